"""All layouts of a question, and what each takes at least.

The mesh's degrees multiply to the number of ranks. Depth is data by another name (the same ranks hold copies, the same tokens are
split), so it is 1 unless asked for. A grid keeps all it can; what memory has no room for is dropped in the search. A layout's
floor is what its busiest rank computes, with idling that no dealing of layers avoids: no choice of its units can be faster.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

from fourfold.errors import PlanError
from fourfold.plan import AXES, Mesh, Tensor
from fourfold.planner.constraints import Constraints
from fourfold.planner.layout import Layout, Setting
from fourfold.planner.options import RankLoad
from fourfold.planner.products import column_seconds, ladder
from fourfold.planner.units import compute_times, computing

__all__ = ["bound", "bubble", "computed", "layouts", "loads", "mean", "waits"]

CHOSEN = ("1f1b", "zb-h1", "interleaved", "wave", "zb-v")
"""Schedules that are searched by default; gpipe is never better, synthesized ones take long to make: where asked for."""
FEW = 64
"""Of at most so many ranks, every number above the half is looked at."""
COMMON = 5
"""Of more, so many that have most in common with the batch."""


def layouts(setting: Setting, wanted: Constraints) -> Iterator[Layout]:
    """Every layout that the constraints allow."""
    ranks, found = min(setting.cluster.ranks, wanted.max_ranks or setting.cluster.ranks), False
    refused: dict[str, str] = {}
    for number in _numbers(ranks, setting.global_batch, wanted):
        for layout in _of_ranks(setting, wanted, number):
            why = _disobeys(layout, wanted, setting.heads)
            if why:
                refused.setdefault(*why)
                continue
            found = True
            yield layout
    if not found:
        for rule, way in refused.items():
            raise PlanError(f"{rule}, which nothing else that is asked for allows; {way}")
        _explain_none(setting, wanted, ranks)


def _disobeys(layout: Layout, wanted: Constraints, heads: int) -> tuple[str, str] | None:
    """Of what is asked for, what a layout would leave undone: the rule, and the way out."""
    mesh, mode, flow = layout.mesh, wanted.get("mode", "replicate"), wanted.get("flow")
    if mesh.col > heads:
        return f"--fix col={mesh.col} needs an attention head for every column", f"use col={heads}" + (
            " or less" if heads > 1 else ""
        )
    if mode != "replicate" and layout.replicas == 1:
        return f"--fix mode={mode} needs replicas to shard over (data or depth of 2 or more)", "leave mode free"
    if wanted.get("recompute") == "per-slice" and mesh.row * mesh.col > 1:
        return "--fix recompute=per-slice needs whole operators to slice (row=1 col=1)", "use recompute=full on a grid"
    if flow == "summa" and (mesh.row != mesh.col or mesh.col == 1):
        return (
            "--fix flow=summa needs a square plane (row=col of 2 or more)",
            "use flow=auto, which takes any rectangle",
        )
    if flow not in (None, "auto") and mesh.row * mesh.col == 1:
        return f"--fix flow={flow} needs a grid (row or col of 2 or more)", "leave flow free"
    keep = wanted.get("keep", "none")
    if keep != "none" and not layout.tensor.keep:
        needs = {"weights": "row of 2 or more", "inputs": "col of 2 or more", "all": "row or col of 2 or more"}
        rule = f"--fix keep={keep} needs a grid: {needs.get(keep, 'row of 2 or more, and several micro-batches')}"
        return rule, "leave keep free"
    return None


def _numbers(ranks: int, batch: int, wanted: Constraints) -> list[int]:
    """How many ranks may be used: all; with `max_ranks`, also fewer, which may divide better, but more than half.

    Of many, those that have most in common with the batch.
    """
    if not wanted.max_ranks:
        return [ranks]
    numbers = range(ranks, ranks // 2, -1)
    if ranks <= FEW:
        return list(numbers)
    common = sorted(numbers, key=lambda n: (-math.gcd(n, batch), -n))[:COMMON]
    return sorted({ranks, ranks // 8 * 8, 1 << ranks.bit_length() - 1, *common}, reverse=True)


def _of_ranks(setting: Setting, wanted: Constraints, ranks: int) -> Iterator[Layout]:
    spec, batch = setting.spec, setting.global_batch
    for pipe in _degrees(ranks, wanted.get("pipe")):
        if pipe == 1 and wanted.piped:
            continue
        if pipe > spec.layers or (
            batch < pipe // 8 and "pipe" not in wanted.fixed
        ):  # idle for all but an eighth at best
            continue
        for col in _degrees(ranks // pipe, wanted.get("col")):
            if setting.heads % col and "col" not in wanted.fixed:
                continue
            # without columns, rows are much like replicas that are sharded, but take more of the host, which no cost here knows
            for row in _degrees(ranks // pipe // col, wanted.get("row", 1 if col == 1 else None)):
                rest = ranks // pipe // col // row
                depth = wanted.get("depth", 1)
                if rest % depth or wanted.get("data", rest // depth) != rest // depth:
                    continue
                mesh = Mesh(pipe=pipe, data=rest // depth, depth=depth, row=row, col=col)
                if batch % mesh.batch_ways:
                    continue
                yield from _of_mesh(setting, mesh, wanted)


def _of_mesh(setting: Setting, mesh: Mesh, wanted: Constraints) -> Iterator[Layout]:
    each, tensor = setting.global_batch // mesh.batch_ways, Tensor(flow=wanted.get("flow", "auto"))
    for size in _degrees(each, wanted.get("micro_batch_size")):
        m = each // size
        if wanted.get("micro_batches", m) != m:
            continue
        most = ladder(mesh, m, tensor, wanted.get("keep"))[0]
        for schedule, stages in _schedules(setting, mesh.pipe, m, wanted):
            yield Layout(
                mesh,
                m,
                size,
                schedule,
                stages,
                wanted.get("optimizer", "device"),
                wanted.get("activations", "device"),
                most,
            )


def _schedules(setting: Setting, pipe: int, micro_batches: int, wanted: Constraints) -> Iterator[tuple[str, int]]:
    if pipe == 1:
        yield "1f1b", 1
        return
    for name in (wanted.schedule,) if wanted.schedule else CHOSEN:
        match name:
            case "interleaved":
                counts = [wanted.get("stages_per_rank")] if wanted.get("stages_per_rank") else [2, 3, 4, 8]
                counts = [c for c in counts if micro_batches >= pipe or wanted.get("stages_per_rank")]
            case "wave":
                counts = [2 * wanted.get("waves")] if wanted.get("waves") else [2, 4, 8]
            case "zb-v":
                counts = [2]
            case _:
                counts = [1]
        for count in counts:
            if pipe * count <= setting.spec.layers:
                yield str(name), count


@lru_cache(maxsize=4096)
def _divisors(n: int) -> tuple[int, ...]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def _degrees(n: int, wish: int | None) -> tuple[int, ...]:
    return _divisors(n) if wish is None else (wish,) if n % wish == 0 else ()


def _explain_none(setting: Setting, wanted: Constraints, ranks: int) -> None:
    """Say which constraint leaves no layout."""
    batch = setting.global_batch
    product = 1
    for axis in AXES:
        if axis in wanted.fixed:
            product *= wanted.fixed[axis]
    told = " · ".join(f"{a} {wanted.fixed[a]}" for a in AXES if a in wanted.fixed)
    if product > 1 and ranks % product:
        raise PlanError(
            f"--fix asks for {told} = {product}, which does not divide {ranks} ranks; use a divisor of {ranks}"
        )
    if set(AXES) <= {*wanted.fixed, "depth"} and product != ranks:
        raise PlanError(f"--fix asks for {told} = {product} ranks, but there are {ranks}; leave one axis free")
    if wanted.piped and product == ranks and "pipe" not in wanted.fixed:
        raise PlanError(
            f"the schedule {wanted.schedule} needs a pipeline of 2 ranks or more, and "
            + (f"--fix {told} leaves none of {ranks} for it; leave one free" if told else "there is one rank")
        )
    pipe = wanted.get("pipe", 1)
    if pipe > setting.spec.layers:
        most = setting.spec.layers
        raise PlanError(
            f"--fix pipe={pipe}: the model has {most - 2} layers, which with its embedding and its head make at most {most} "
            f"stages; use pipe={max(d for d in _divisors(ranks) if d <= most)} or less"
        )
    name, each = {"wave": ("waves", 2), "interleaved": ("stages_per_rank", 1)}.get(wanted.schedule or "", ("", 1))
    fewest = wanted.get(name, 1 if each == 2 else 2) if name else 2 if wanted.schedule == "zb-v" else 1
    stages, most = max(2, pipe) * each * fewest, setting.spec.layers
    if stages > most:
        if name in wanted.fixed:
            told, less = f"--fix {name}={wanted.fixed[name]}", most // (max(2, pipe) * each)
            way = f"use {name}={less} at most" if less else f"leave {name} out"
        else:
            told, less = (
                f"the schedule {wanted.schedule}",
                max((d for d in _divisors(ranks) if d * each * fewest <= most), default=1),
            )
            way = f"use pipe={less} or less, or another schedule" if less > 1 else "use another schedule"
        raise PlanError(
            f"{told} makes {stages} stages on {max(2, pipe)} ranks of a pipeline, and the model "
            f"has {most - 2} layers, which with its embedding and its head fill {most}; {way}"
        )
    if (
        wanted.schedule == "interleaved"
        and "stages_per_rank" not in wanted.fixed
        and wanted.get("micro_batches", pipe) < pipe
    ):
        raise PlanError(
            f"the schedule interleaved is searched with as many micro-batches as its pipeline has ranks, or more; "
            f"--fix asks for {wanted.fixed['micro_batches']} on {pipe}: fix stages_per_rank too, or use micro_batches={pipe}"
        )
    if "micro_batches" in wanted.fixed or "micro_batch_size" in wanted.fixed:
        raise PlanError(
            f"no mesh of {ranks} ranks cuts {batch} sequences into the micro-batches that --fix asks for; "
            "leave micro_batches and micro_batch_size free"
        )
    most = _most_ranks(setting, ranks)
    raise PlanError(
        f"{batch} sequences cannot be spread over {ranks} ranks: data · row must divide the batch, and "
        f"pipe ≤ {setting.spec.layers} stages and col (a divisor of the heads) take the rest; "
        + (
            f"use a global batch that is a multiple of {ranks}, or --max-ranks {most}"
            if most < ranks
            else "leave some of --fix free"
        )
    )


def _most_ranks(setting: Setting, ranks: int) -> int:
    """The most that the batch can be spread over, with nothing fixed."""
    batch = setting.global_batch
    pipes = range(1, min(setting.spec.layers, 8 * batch + 7) + 1)
    found = (w * c * p for w in _divisors(batch) for c in _divisors(setting.heads) for p in pipes)
    return max(n for n in found if n <= ranks)


# ---- what a layout takes at least ----


def in_flight(layout: Layout, rank: int) -> float:
    """The most micro-batches (of its share) that a rank holds, as the schedule's order says or nearly so."""
    p, m, v = layout.mesh.pipe, layout.micro_batches, layout.stages_per_rank
    match layout.schedule:
        case "gpipe":
            return m
        case "1f1b":
            return min(m, p - rank)
        case "interleaved":
            return min(m, ((v - 1) * p + 2 * (p - rank - 1) + 1) / v)
        case _:
            return min(m, p)


def loads(
    setting: Setting, layout: Layout, apart: bool | None = None
) -> tuple[list[RankLoad], list[tuple[float, float, float]]]:
    """The kinds of ranks of a pipeline: what each holds, and its F, I, W of a micro-batch.

    `apart`: whether weight gradients are computed apart (default: as the schedule does).
    """
    mesh, zigzag = layout.mesh, layout.zigzags
    size, tensor = layout.micro_batch_size, layout.tensor
    ranks, held, works = _held(
        setting,
        mesh.pipe,
        zigzag,
        size,
        mesh.row,
        mesh.col,
        tensor,
        layout.steps,
        layout.splits_backward if apart is None else apart,
    )
    copy = setting.spec.tied and not zigzag and mesh.pipe > 1
    last = mesh.pipe - 1
    return [
        RankLoad(units, in_flight(layout, rank), copy and rank == last) for rank, units in zip(ranks, held, strict=True)
    ], works


@lru_cache(maxsize=20_000)
def _held(
    setting: Setting, pipe: int, zigzag: bool, size: int, row: int, col: int, tensor: Tensor, steps: int, apart: bool
) -> tuple[list[int], list[tuple[tuple[str, int], ...]], list[tuple[float, float, float]]]:
    """Ranks that differ: the first, the last, and of those between the first that holds such blocks."""
    spec = setting.spec
    base = {}
    for kind in spec.kinds:
        c = compute_times(setting, kind, size * spec.seq_len, row, col, tensor, steps, 1, "none", apart)
        base[kind] = (c.forward, c.input_grad, c.weight_grad)
    first, last = [u.kind for u in spec.of_layer(0)], [u.kind for u in spec.of_layer(spec.layers - 1)]
    blocks = max(1, spec.layers - 2)
    per = {kind: n / blocks for kind, (_, n) in _counts(setting).items() if n}
    end = 0 if zigzag else pipe - 1
    more = [0.0] * pipe
    more[0] += sum(_sum(base, dict.fromkeys(first, 1)))
    more[end] += sum(_sum(base, dict.fromkeys(last, 1)))
    share = _shares(spec.layers - 2, sum(_sum(base, per)), tuple(more))
    ranks, held, works = [], [], []
    seen: set[tuple[tuple[str, int], ...]] = set()
    layers = iter(range(1, spec.layers - 1))
    for rank in range(pipe):
        counts = Counter(u.kind for layer in islice(layers, share[rank]) for u in spec.of_layer(layer))
        inner = tuple(counts.items())
        if rank in (0, pipe - 1) or inner not in seen:
            ranks.append(rank)
            seen |= {inner} if 0 < rank < pipe - 1 else set()
            counts.update([*(first if rank == 0 else ()), *(last if rank == end else ())])
            held.append(tuple(counts.items()))
            works.append(_sum(base, counts))
    return ranks, held, works


@lru_cache(maxsize=20_000)
def _shares(blocks: int, block: float, more: tuple[float, ...]) -> tuple[int, ...]:
    """Blocks of every rank, so that the busiest does least."""
    heap = [(m, i) for i, m in enumerate(more)]
    heapq.heapify(heap)
    share = [0] * len(more)
    for _ in range(blocks):
        load, i = heapq.heappop(heap)
        share[i] += 1
        heapq.heappush(heap, (load + block, i))
    return tuple(share)


def _sum(base: dict[str, tuple[float, float, float]], counts: dict[str, Any]) -> tuple[float, float, float]:
    f = sum(base[k][0] * n for k, n in counts.items())
    i = sum(base[k][1] * n for k, n in counts.items())
    w = sum(base[k][2] * n for k, n in counts.items())
    return f, i, w


def bubble(layout: Layout, f: float, i: float, w: float) -> float:
    """Idle seconds that the schedule gives a rank whose micro-batch takes F, I and W (messages free)."""
    p, m, v = layout.mesh.pipe, layout.micro_batches, layout.stages_per_rank
    match layout.schedule:
        case "interleaved":
            return (p - 1) * (f + i + w) / v
        case "wave":
            return (p - 1) * (i + w) / layout.waves
        case "zb-h1":
            return (p - 1) * max(0.0, f + i - w)
        case "zb-v":
            return (p - 1) * (f / 2 if m >= 2 * p - 1 else f)
        case "synthesized":
            return (p - 1) * f / 8
        case _:
            return (p - 1) * (f + i + w)


def waits(setting: Setting, layout: Layout, average: Sequence[float], busiest: float) -> float:
    """Seconds that messages add: the way there and back once, and, for every micro-batch, what in-flight ones do not cover.

    A micro-batch returns to the first stage after all stages' F and I (B where it is whole) and all hops; with k in flight
    there, one every k-th of that time can pass. `average`: F, I, W of a rank; `busiest`: seconds of the one that has most.
    """
    p, m, v = layout.mesh.pipe, layout.micro_batches, layout.stages_per_rank
    if p == 1:
        return 0.0
    hop = layout.message_seconds(setting)
    hops = v * (p - 1) if layout.zigzags else v * p - 1
    loop = sum(average[:2] if layout.puts_weights_off else average) * p + 2 * hops * hop
    return 2 * hops * hop + max(0.0, m - p) * max(0.0, loop / in_flight(layout, 0) - busiest)


def least_seconds(layout: Layout, model: float, busiest: float) -> float:
    """What no dealing of layers can beat: one micro-batch takes `model` seconds of all ranks, `busiest` of one at least.

    [Note: least idling]
    A rank's F of the first micro-batch comes after those before it, its B of the last one before theirs; and with one F, one B in
    turn and k = p - rank in flight, it waits for B of the first, having k - 1 others to compute, and once more for that of the
    last. So with A and Z seconds on the ranks before and after one that has M, a step takes A + m M + max(0, 2 Z - (k - 1) M)
    at least. Of all ways to deal out A + M + Z the least is m M + max(0, 2 (A + M + Z) - (p + 1) M), where m > p. With fewer
    micro-batches A + m M for every rank is what is left; least where all are equal. Other schedules idle less: a micro-batch
    goes through all stages, where W is not put off.
    """
    p, m = layout.mesh.pipe, layout.micro_batches
    if layout.schedule == "1f1b" and m > p:
        return m * busiest + max(0.0, 2 * model - (p + 1) * busiest)
    if layout.schedule in ("1f1b", "gpipe"):
        return max(m * busiest, model / (1 - (1 - 1 / m) ** p))
    return max(m * busiest, model) if layout.schedule in ("interleaved", "wave") else m * busiest


def computed(setting: Setting, layout: Layout, moved: bool = False) -> float:
    """Seconds that no choice of units on this layout can beat; unless `moved`, the grid moves what any flow does."""
    mesh, kept = layout.mesh, (layout.tensor, layout.steps) if moved else ()
    model, block = _model(setting, layout.micro_batch_size, mesh.row, mesh.col, *kept)
    blocks = -(-(setting.spec.layers - 2) // mesh.pipe) if setting.spec.alike else 0
    return least_seconds(layout, model, max(model / mesh.pipe, blocks * block))


@lru_cache(maxsize=20_000)
def _model(
    setting: Setting, size: int, row: int, col: int, tensor: Tensor | None = None, steps: int = 1
) -> tuple[float, float]:
    """Seconds of a micro-batch of the whole model, and of a block; without `tensor`, at least."""
    tokens, total, blocks = size * setting.spec.seq_len, 0.0, 0.0
    for kind, (every, inner) in _counts(setting).items():
        if tensor is None:
            seconds = sum(computing(setting, kind, tokens, row, col)[:3]) + column_seconds(setting, kind, tokens, col)
        else:
            seconds = sum(compute_times(setting, kind, tokens, row, col, tensor, steps, 1, "none")[:3])
        total, blocks = total + every * seconds, blocks + inner * seconds
    return total, blocks / max(1, setting.spec.layers - 2)


@lru_cache(maxsize=64)
def _counts(setting: Setting) -> dict[str, tuple[int, int]]:
    """Units of every kind: in all, and between the first layer and the last."""
    out: dict[str, tuple[int, int]] = {}
    for unit in setting.spec.units:
        every, inner = out.get(unit.kind, (0, 0))
        out[unit.kind] = every + 1, inner + (unit.layer not in (0, setting.spec.layers - 1))
    return out


def bound(setting: Setting, layout: Layout) -> float:
    """The same, with alike layers dealt out: the busiest rank's share is the least that it can be."""
    if not setting.spec.alike:
        return 0.0
    _, works = loads(setting, layout, apart=False)  # which hides most, and is found faster
    return layout.micro_batches * max(map(sum, works))


def mean(works: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """F, I and W of the kinds of ranks, on average."""
    f, i, w = (sum(x) / len(works) for x in zip(*works, strict=True))
    return f, i, w
