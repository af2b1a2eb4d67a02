"""Dealing layers to stages for a schedule: several ways are simulated, the fastest is taken.

Equal work on every rank is what keeps ranks busy; equal work in every stage is what keeps a pipeline's waves short. Which counts
more depends on the schedule, so three deals are timed: ranks alike (`partition`), stages alike by time, stages alike by count.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

from fourfold.plan import Tensor
from fourfold.planner.layout import Layout, Setting
from fourfold.planner.units import compute_times, computing
from fourfold.program.costs import Costs
from fourfold.program.engine import More, Problem, run
from fourfold.program.ops import Schedule, ends_of_step
from fourfold.program.partition import partition
from fourfold.program.schedules import loop, zigzag

__all__ = ["Deal", "deal_layers", "least_idle", "stage_deals"]

MOST = 64
"""Stages up to which ranks are evened out; with more, it takes too long and gains little."""


PRECISION = 4
"""Parts of a layer's work by which deals are made: enough to even out, and few enough for layouts to share them."""


class Deal(NamedTuple):
    """Layers of every stage, embedding and head among them; and what a step takes, were there nothing but computing."""

    counts: tuple[int, ...]
    seconds: float
    simulated: int
    """Micro-batches of those seconds."""
    busiest: float
    """Seconds of one more, on the rank that has most."""

    def least(self, micro_batches: int) -> float:
        """Seconds that no choice of units can beat."""
        return self.seconds + (micro_batches - self.simulated) * self.busiest


def deal_layers(setting: Setting, layout: Layout, schedule: Schedule, message: float) -> Deal:
    """The fastest of the deals."""
    mesh = layout.mesh
    return _dealt(setting, layout.micro_batch_size, mesh.row, mesh.col, layout.tensor, layout.steps, schedule, message)


@lru_cache(maxsize=2048)
def _dealt(
    setting: Setting, size: int, row: int, col: int, tensor: Tensor, steps: int, schedule: Schedule, message: float
) -> Deal:
    grid = (setting, size, row, col, tensor, steps)
    times = _times(*grid)
    ends_of_step = _times(*grid, True) if steps > 1 else times
    work = [sum(t) for t in times]
    if schedule.stages == 1:
        return Deal((len(work),), 0.0, 0, sum(work))
    deals = _deals(_relative(setting, size, row, col), schedule.placement)
    seconds = {counts: _seconds(times, ends_of_step, counts, schedule, message) for counts in deals}
    best = min(seconds, key=seconds.__getitem__)
    ends = list(accumulate(best))
    by_stage = [sum(work[end - count : end]) for count, end in zip(best, ends, strict=True)]
    busiest = max(sum(by_stage[s] for s in held) for held in schedule.stages_of)
    return Deal(best, seconds[best], schedule.micro_batches, busiest)


def stage_deals(setting: Setting, layout: Layout) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The rank of every stage, and the deals that are tried (unless the schedule is synthesized, and its stages its own)."""
    mesh = layout.mesh
    placed = (zigzag if layout.zigzags else loop)(mesh.pipe, layout.stages_per_rank)
    return placed, _deals(_relative(setting, layout.micro_batch_size, mesh.row, mesh.col), placed)


def least_idle(setting: Setting, layout: Layout) -> float:
    """Seconds of a layout's computing, and of what its ranks cannot but wait for, with the best of the deals.

    A rank begins when a micro-batch has come through the stages before its first one; and after its last backward, which is of
    that stage, those stages have theirs to do. Where weight gradients are put off, they may be what it does last.
    """
    mesh, m = layout.mesh, layout.micro_batches
    if mesh.pipe == 1 or layout.schedule == "synthesized":  # whose stages are its own
        return 0.0
    grid = (setting, layout.micro_batch_size, mesh.row, mesh.col, layout.tensor, layout.steps)
    placed, deals = stage_deals(setting, layout)
    split, hop = layout.puts_weights_off, layout.message_seconds(setting)
    work = [0.0, *accumulate(sum(t) for t in _times(*grid, None))]
    first = [0.0, *accumulate(t[0] if split else sum(t) for t in _times(*grid, True))]
    best = float("inf")
    for counts in deals:
        ends = [0, *accumulate(counts)]
        own = [0.0] * mesh.pipe
        for stage, rank in enumerate(placed):
            own[rank] += work[ends[stage + 1]] - work[ends[stage]]
        waits = [first[ends[rank]] + (1 if split else 2) * rank * hop for rank in range(mesh.pipe)]
        best = min(best, max(m * o + w for o, w in zip(own, waits, strict=True)))
    return best


@lru_cache(maxsize=4096)
def _times(
    setting: Setting, size: int, row: int, col: int, tensor: Tensor, steps: int, once: bool | None = False
) -> list[tuple[float, float, float]]:
    """F, I and W of a micro-batch, layer by layer; `once` as of `compute_times`."""
    spec, tokens = setting.spec, size * setting.spec.seq_len
    kinds = {k: compute_times(setting, k, tokens, row, col, tensor, steps, 1, "none", once=once) for k in spec.kinds}
    times = []
    for layer in range(spec.layers):
        parts = [kinds[u.kind] for u in spec.of_layer(layer)]
        times.append(
            (sum(p.forward for p in parts), sum(p.input_grad for p in parts), sum(p.weight_grad for p in parts))
        )
    return times


@lru_cache(maxsize=4096)
def _relative(setting: Setting, size: int, row: int, col: int) -> tuple[int, ...]:
    """What the layers compute, in parts of a usual one: the same for many layouts."""
    spec, tokens = setting.spec, size * setting.spec.seq_len
    kinds = {k: sum(computing(setting, k, tokens, row, col)[:3]) for k in spec.kinds}
    work = [sum(kinds[u.kind] for u in spec.of_layer(layer)) for layer in range(spec.layers)]
    usual = sorted(work)[len(work) // 2] or max(work) or 1.0
    return tuple(round(PRECISION * w / usual) for w in work)


@lru_cache(maxsize=4096)
def _deals(work: tuple[int, ...], placement: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Ways to deal out layers that compute so much."""
    stages = len(placement)
    deals = {_by_time(work, stages), _by_count(len(work), stages)}
    if stages <= MOST:
        deals.add(tuple(partition(work, placement)))
    return tuple(sorted(deals))


def _by_time(work: Sequence[float], stages: int) -> tuple[int, ...]:
    """Every stage about as much work: a boundary where the sum passes its share; at least a layer each."""
    total, counts, at, done = sum(work), [], 0, 0.0
    for stage in range(stages):
        left = stages - stage - 1
        end = at + 1
        done += work[at]
        while end < len(work) - left and done + work[end] / 2 <= total * (stage + 1) / stages:
            done += work[end]
            end += 1
        if not left:
            end = len(work)
        counts.append(end - at)
        at = end
    return tuple(counts)


def _by_count(layers: int, stages: int) -> tuple[int, ...]:
    """Blocks alike, the embedding with the first stage, the head with the last."""
    blocks = layers - 2
    counts = [blocks // stages + (s < blocks % stages) for s in range(stages)]
    counts[0] += 1
    counts[-1] += 1
    return tuple(counts) if min(counts) else _by_time([1.0] * layers, stages)


def _seconds(
    times: Sequence[tuple[float, float, float]],
    ends: Sequence[tuple[float, float, float]],
    counts: Sequence[int],
    schedule: Schedule,
    message: float,
) -> float:
    """Of a step; `ends`: the first forward and the last backward of every layer."""
    sums, at, more = [], 0, {}
    for stage, count in enumerate(counts):
        layers = slice(at, at + count)
        sums.append([sum(t[i] for t in times[layers]) for i in range(3)])
        if times is not ends:
            f, i, w = (max(0.0, sum(t[i] for t in ends[layers]) - sums[-1][i]) for i in range(3))
            more[stage] = {"F": f, "I": i, "W": w, "B": i + w}
        at += count
    costs = Costs(
        forward=tuple(s[0] for s in sums),
        input_grad=tuple(s[1] for s in sums),
        weight_grad=tuple(s[2] for s in sums),
        message=message,
        link="rank",
    )
    problem = Problem.of(schedule.placement, schedule.ranks, schedule.micro_batches, costs)
    once: dict[tuple[int, str, int], More] = {}
    for ops in schedule.order if more else ():
        for op in chain(*ends_of_step(ops)):
            once[op] = More(longer := more[op.stage][op.kind], longer)
    return float(run(problem, schedule.order, more=once).makespan)
