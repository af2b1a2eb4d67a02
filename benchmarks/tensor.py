"""Tensor parallelism on shaped networks: ours, 1-D, 2-D, the published 2.5-D and what torch composes; in one run, interleaved.

    python -m benchmarks.tensor [--only flat-2 two-4 …] [--quick] [--json PATH]

The contestants (tensor_layers.py) compute the linears of one layer on 16, 8 or 4 ranks, each a host behind a link of a set
rate (testing/network; root is needed). Matrix products are replaced by zeros, so that communication is what is measured; in
the sections `compute-…` they take the time an accelerator would (a sleep). All algorithms use the same collectives, our rings,
but where a name says gloo. Every time comes with the bytes a rank must receive (ledger), those its interface received,
and how busy the processors were: where they were busy, a step is measured again, up to four times. `--only check` compares every
contestant's results, with real products in fp64, with those of one process.

`W/4`: a rank holds a quarter of the weights. T/h: tokens of a step over hidden size; 2 and 4 are the strong scaling of the
Tesseract paper (an eighth of its sizes). Bandwidth is emulated, latency is that of this machine: no ratio here is one of NCCL's.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.common import Row, arguments, finish, lower_is_better
from benchmarks.tensor_layers import (
    Degrees,
    GridLayer,
    Groups,
    OneDimension,
    Options,
    Serial,
    Shape,
    TorchLayer,
    replace_products,
)
from fourfold import collectives
from fourfold.tensor.blocks import even, fuse
from fourfold.tensor.costs import MatmulSizes, choose_flow, traffic
from fourfold.testing.ledger import Ledger
from fourfold.testing.network import Network, measure, missing
from fourfold.testing.ranks import run_ranks

Make = Callable[[Groups, Shape, Serial | None], Any]
console = Console(width=150, highlight=False)


@dataclass(frozen=True)
class Entry:
    """A contestant: `held` is the share of the weights a rank holds, `served` by which collectives."""

    name: str
    held: float
    make: Make
    served: str = "ring"


@dataclass
class Figures:
    """What was measured of one contestant."""

    forward: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    received: float = 0.0
    ledger: float = 0.0
    calls: int = 0

    @property
    def milliseconds(self) -> float:
        return 1e3 * median(self.step)

    @property
    def spread(self) -> float:
        return (max(self.step) - min(self.step)) / median(self.step)


# ---- the contestants ----


def grid(degrees: Degrees, name: str = "", served: str = "ring", **options: Any) -> Entry:
    _, r, c = degrees
    chosen = Options(**{"overlap": True} | options)
    label = f"grid{degrees}{' ' + name if name else ''}".replace(", ", ",")
    return Entry(label, 1 / (r * c), lambda g, s, serial: GridLayer(g, s, degrees, chosen, serial), served)


def summa(degrees: Degrees, name: str, served: str = "ring", **options: Any) -> Entry:
    d, q, _ = degrees
    label = f"{'2-D' if d == 1 else '2.5-D'} [{q},{q}{f',{d}' if d > 1 else ''}] {name}"
    chosen = Options(flow="summa", residual="hidden", **options)
    return Entry(label, 1 / (q * q), lambda g, s, serial: GridLayer(g, s, degrees, chosen, serial), served)


def one_dimension(ranks: int, name: str = "1-D", served: str = "ring") -> Entry:
    return Entry(name, 1 / ranks, lambda g, s, serial: OneDimension(g, s, serial), served)


def torch_entry(name: str, ranks: int, tensor: int, **options: Any) -> Entry:
    return Entry(name, 1 / ranks, lambda g, s, serial: TorchLayer(g, s, tensor, serial=serial, **options), "ring")


KEPT = ("weights", "inputs")


def both(*degrees: Degrees) -> list[Entry]:
    """With overlap and without: where products take no time, it can only cost."""
    return [e for each in degrees for e in (grid(each), grid(each, "no overlap", overlap=False))]


def named(*names: str) -> list[str]:
    return [each for name in names for each in (name, f"{name} no overlap")]


def entries_of(ranks: int) -> list[Entry]:
    """Everyone, on a flat network."""
    d, c = ranks // 4, 4
    planes: list[Degrees] = [(4, 2, 2), (1, 4, 4)] if ranks == 16 else [(2, 2, 2)]
    ours: list[Degrees] = [(d, 1, 4), (ranks // 4, 2, 2), (ranks // 2, 1, 2), (1, d, 4), (1, ranks // 2, 2)]
    found = [*both(*ours), grid((1, d, c), "kept", keep=KEPT)]
    found += [grid((1, d, c), "kept no overlap", keep=KEPT, overlap=False), one_dimension(ranks)]
    found += [torch_entry("1-D DTensor, gloo", ranks, ranks)]
    found += [torch_entry("1-D DTensor + SP, gloo", ranks, ranks, sequence=True)]
    for plane in planes:
        found.append(summa(plane, "look-ahead", look_ahead=True, late=False))
        if plane[0] > 1:
            found.append(summa(plane, "look-ahead, late sums", look_ahead=True))
    for zero in (3, 2):
        label = f"DTensor TP4 x FSDP2 ZeRO-{zero}"
        found += [torch_entry(f"{label}, gloo", ranks, 4, zero=zero)]
        found += [torch_entry(f"{label}, FSDP2 on rings", ranks, 4, zero=zero, ring=True)]
    found += [one_dimension(ranks, "1-D, gloo", "gloo")]
    found += [grid(degrees, "gloo", "gloo") for degrees in ((d, 1, c), (1, d, c))]
    return [*found, *(summa(plane, "look-ahead, gloo", "gloo", look_ahead=True) for plane in planes)]


def two_level_entries() -> list[Entry]:
    """16 ranks on 4 hosts."""
    return [
        *both((2, 1, 8), (4, 1, 4), (1, 4, 4)),
        *(grid(degrees, "kept", keep=KEPT) for degrees in ((4, 1, 4), (1, 4, 4))),
        one_dimension(16),
        summa((1, 4, 4), "look-ahead", look_ahead=True),
        summa((4, 2, 2), "look-ahead", look_ahead=True, late=False),
        summa((4, 2, 2), "look-ahead, late sums", look_ahead=True),
        one_dimension(16, "1-D, gloo", "gloo"),
        grid((4, 1, 4), "gloo", "gloo"),
    ]


def all_grids(ranks: int) -> list[Degrees]:
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [(ranks // (r * c), r, c) for r in sizes for c in sizes if ranks % (r * c) == 0]


# ---- the race ----

CALM = 0.85  # share of the processors in use; above it, a time is not the network's


def race(rank: int, ranks: int, shape: Shape, entries: Sequence[Entry], tries: int, flops: float) -> list[Figures]:
    """Everyone in turn, `tries` times after one that does not count."""
    warnings.filterwarnings("ignore")
    for kept in (
        -1,
        -3,
    ):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD: freed memory is used again, else faulting it in is measured
        ctypes.CDLL(None).mallopt(kept, 1 << 30)
    replace_products(flops)
    groups = Groups(rank, ranks)
    layers = [entry.make(groups, shape, None) for entry in entries]
    found = [Figures() for _ in entries]
    for attempt in range(tries + 1):
        for entry, layer, figures in zip(entries, layers, found, strict=True):
            os.environ["FOURFOLD_COLLECTIVES"] = entry.served
            if not attempt:
                with Ledger() as ledger:
                    layer.step()
                most = torch.tensor([ledger.received])
                dist.all_reduce(most, op=dist.ReduceOp.MAX)
                figures.ledger, figures.calls = most.item(), ledger.calls()
                continue
            layer.step()  # its memory has not been used since its last turn
            seen = measure(layer.step)
            for _ in range(4):  # other processes were computing: again
                seen = seen if seen.busy < CALM else measure(layer.step)
            figures.step.append(seen.seconds)
            figures.busy.append(seen.busy)
            figures.received = max(figures.received, seen.received)
            if not isinstance(layer, TorchLayer):  # a forward alone leaves FSDP2 in the middle of a step
                figures.forward.append(measure(layer.forward).seconds)
                layer.reset()
    return found


COLUMNS = (
    "weights", "forward ms", "step ms", "spread", "calls", "ledger MB", "interface MB", "ms / bytes", "busy"
)  # fmt: skip


def run_race(
    net: Network, shape: Shape, entries: Sequence[Entry], tries: int, flops: float = 0.0, title: str = ""
) -> dict[str, Figures]:
    found = net.run_ranks(race, shape, entries, tries, flops, timeout=400, group_timeout=120)[0]
    flat = net.uplink is None and not flops
    for served in ("ring", "gloo"):
        chosen = [(e, f) for e, f in zip(entries, found, strict=True) if e.served == served]
        if not chosen:
            continue
        table = Table(
            title=f"{title}; {'all on gloo' if served == 'gloo' else 'rings, but where gloo is named'}", box=None
        )
        table.add_column()
        for column in COLUMNS:
            table.add_column(column, justify="right")
        for entry, f in chosen:
            share = f"{f.milliseconds / 1e3 / (f.ledger / net.bytes_per_second):.2f}" if flat else ""
            table.add_row(
                entry.name, f"W/{1 / entry.held:.0f}", f"{1e3 * median(f.forward or [0]):.0f}", f"{f.milliseconds:.0f}",
                f"{100 * f.spread:.0f} %", str(f.calls), f"{f.ledger / 1e6:.2f}", f"{f.received / 1e6:.2f}", share,
                f"{median(f.busy):.2f}",
            )  # fmt: skip
        console.print(table, "")
    return {entry.name: figures for entry, figures in zip(entries, found, strict=True)}


class Scores:
    """Rows, and which goals were met."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def versus(
        self, case: str, found: dict[str, Figures], ours: Sequence[str], theirs: Sequence[str], goal: float | None
    ) -> None:
        """Our best against their best."""
        mine, peer = (min(names, key=lambda n: found[n].milliseconds) for names in (ours, theirs))
        metric = f"step ms of {mine}" + (f", goal {goal:g}" if goal else "")
        row = lower_is_better(
            case, peer, metric, found[mine].milliseconds, found[peer].milliseconds, found[mine].spread
        )
        self.add(row, goal)

    def add(self, row: Row, goal: float | None) -> None:
        self.rows.append(row)
        label = "" if goal is None else f"   goal {goal:g}: {'met' if row.ratio >= goal else 'MISSED'}"
        metric = row.metric.partition(", goal")[0]
        console.print(
            f"  {row.case}: {metric} {row.ours:.4g}, of {row.peer} {row.theirs:.4g}, ratio {row.ratio:.2f}{label}"
        )


FLAT = {2: Shape(768, 384), 4: Shape(1536, 384), 16: Shape(3072, 192)}
GRIDS = {2: Shape(960, 480), 4: Shape(2304, 576), 16: Shape(4608, 288)}
"""Larger: 16 ranks take 40 ms of two cores for what is not communication."""
TWO = {2: Shape(512, 256), 4: Shape(1024, 256), 16: Shape(3072, 192)}
GOALS = {  # T/h: over 1-D, 2-D, 2.5-D, torch's ZeRO-3, its ZeRO-2, two-level over 1-D
    2: (1.7, 2.0, 2.7, 1.2, 1.3, 1.0),
    4: (2.3, 2.2, 2.2, 1.05, 1.2, 1.35),
    16: (4.5, 3.3, 2.0, None, None, 4.0),
}


def flat(scores: Scores, tries: int, ratio: int) -> None:
    """16 ranks, 100 Mbit/s."""
    entries, shape = entries_of(16), FLAT[ratio]
    case = f"flat, 16 ranks, T/h = {ratio}"
    with Network(16, "100mbit") as net:
        found = run_race(net, shape, entries, tries, title=f"{case} ({shape.tokens} x {shape.hidden})")
    one, two, two_half, zero3, zero2, _ = GOALS[ratio]
    sixteenth = named("grid(1,4,4)", "grid(1,8,2)")
    quarter = [*named("grid(4,1,4)", "grid(4,2,2)"), *sixteenth]
    published = [n for n in found if n.startswith("2.5-D") and "gloo" not in n]
    scores.versus(case, found, quarter, ["1-D"], one)
    scores.versus(case, found, sixteenth, ["1-D"], None)
    scores.versus(case, found, quarter, ["1-D DTensor, gloo"], None)
    scores.versus(case, found, quarter, ["1-D DTensor + SP, gloo"], None)
    scores.versus(case, found, sixteenth, [n for n in found if n.startswith("2-D") and "gloo" not in n], two)
    scores.versus(case, found, quarter, published, two_half)
    scores.versus(case, found, quarter, [*published, "2.5-D [2,2,4] look-ahead, gloo"], None)
    scores.versus(case, found, named("grid(1,4,4)"), ["DTensor TP4 x FSDP2 ZeRO-3, gloo"], zero3)
    scores.versus(case, found, named("grid(1,4,4)"), ["DTensor TP4 x FSDP2 ZeRO-3, FSDP2 on rings"], None)
    scores.versus(case, found, named("grid(1,4,4) kept"), ["DTensor TP4 x FSDP2 ZeRO-2, gloo"], zero2)
    scores.versus(case, found, named("grid(1,4,4) kept"), ["DTensor TP4 x FSDP2 ZeRO-2, FSDP2 on rings"], None)


def grids(scores: Scores, tries: int, ratio: int) -> None:
    """Every grid of 16 ranks, against bytes over rate; and the best of them against the one with the fewest bytes."""
    shape, degrees = GRIDS[ratio], all_grids(16)
    entries = [grid(each, overlap=False) for each in degrees]
    case = f"every grid, 16 ranks, T/h = {ratio}"
    found: dict[str, Figures] = {}
    with Network(16, "100mbit") as net:
        for few in range(
            0, len(entries), 3
        ):  # with 15 of them in one process, the memory of (16, 1, 1) slows it by a tenth
            title = f"{case} ({shape.tokens} x {shape.hidden})"
            found |= run_race(net, shape, entries[few : few + 3], tries, title=title)
        needed = {name: 1e3 * f.ledger / net.bytes_per_second for name, f in found.items()}
    worst = max(found, key=lambda n: found[n].milliseconds / needed[n])
    row = lower_is_better(
        case, "bytes over rate", f"step ms of {worst}, the farthest", found[worst].milliseconds, needed[worst]
    )
    scores.add(row, 1 / 1.13)
    predicted = {entry.name: predicted_bytes(shape, each) for entry, each in zip(entries, degrees, strict=True)}
    for name, count in predicted.items():
        assert abs(count - found[name].ledger) < 1e-3 * count, (name, count, found[name].ledger)
    guess, best = min(predicted, key=predicted.__getitem__), min(found, key=lambda n: found[n].milliseconds)
    row = lower_is_better(
        case,
        f"measured best {best}",
        f"step ms of {guess}, predicted best",
        found[guess].milliseconds,
        found[best].milliseconds,
    )
    scores.add(row, 0.97)


def predicted_bytes(shape: Shape, degrees: Degrees) -> float:
    """What a rank receives in a step, by the library's cost model."""
    (d, r, c), h = degrees, shape.hidden
    third, inner, stream = even(h, c), even(4 * h, c), even(h, c)
    sides = [
        (stream, fuse(third, third, third), True),
        (third, stream, False),
        (stream, inner, True),
        (inner, stream, False),
    ]
    total = 0.0
    for ins, outs, leaves in sides:
        p = MatmulSizes(shape.tokens // (d * r), ins.total, outs.total, ins.size, outs.size, leaves, not leaves, r, c)
        flow = choose_flow(p, "auto", 4, 4)
        a, b = p.weight_shape(flow)
        total += traffic(p, flow).bytes(4, 4) + 2 * (d - 1) / d * 4 * a * b
    return total


def two_level(scores: Scores, tries: int, ratio: int) -> None:
    """4 hosts of 4 ranks: 200 Mbit/s each, 100 Mbit/s shared by a host's four."""
    shape, case = TWO[ratio], f"two-level, 16 ranks, T/h = {ratio}"
    with Network(16, "200mbit", racks=4, uplink="100mbit") as net:
        found = run_race(net, shape, two_level_entries(), tries, title=f"{case} ({shape.tokens} x {shape.hidden})")
    ours = named("grid(2,1,8)", "grid(4,1,4)", "grid(1,4,4)")
    scores.versus(case, found, ours, ["1-D"], GOALS[ratio][5])
    scores.versus(case, found, named("grid(1,4,4)"), ["2-D [4,4] look-ahead"], None)
    scores.versus(case, found, ours, ["2.5-D [2,2,4] look-ahead"], None)
    scores.versus(case, found, ours, ["2.5-D [2,2,4] look-ahead, late sums"], None)
    scores.versus(case, found, ["grid(1,4,4) kept"], ["1-D"], None)


def eight(scores: Scores, tries: int, ratio: int) -> None:
    """8 ranks, 200 Mbit/s."""
    shape, case = FLAT[ratio], f"flat, 8 ranks, T/h = {ratio}"
    with Network(8, "200mbit") as net:
        found = run_race(net, shape, entries_of(8), tries, title=f"{case} ({shape.tokens} x {shape.hidden})")
    eighth = named("grid(1,2,4)", "grid(1,4,2)")
    quarter = [*named("grid(2,1,4)", "grid(2,2,2)"), *eighth]
    published = [n for n in found if n.startswith("2.5-D") and "gloo" not in n]
    scores.versus(case, found, quarter, ["1-D"], None)
    scores.versus(case, found, eighth, ["1-D"], None)
    scores.versus(case, found, quarter, published, None)
    scores.versus(case, found, named("grid(1,2,4)"), ["DTensor TP4 x FSDP2 ZeRO-3, gloo"], None)
    scores.versus(case, found, named("grid(1,2,4) kept"), ["DTensor TP4 x FSDP2 ZeRO-2, gloo"], None)


def four(scores: Scores, tries: int) -> None:
    """4 ranks, 200 Mbit/s, fewer and fewer tokens: where one dimension wins."""
    entries = [*both(*(degrees for degrees in all_grids(4) if degrees[0] < 4)), one_dimension(4)]
    with Network(4, "200mbit") as net:
        for tokens in (96, 192, 384, 768, 1536, 6144):
            shape = Shape(tokens, 384)
            case = f"flat, 4 ranks, T/h = {tokens / 384:g}"
            found = run_race(net, shape, entries, tries, title=case)
            scores.versus(case, found, [e.name for e in entries if e.held == 0.25 and e.name != "1-D"], ["1-D"], None)
            scores.versus(case, found, [e.name for e in entries if e.held == 0.5], ["1-D"], None)


def compute(scores: Scores, tries: int, net: Network, shape: Shape, case: str, communication: float) -> None:
    """With products that take time: together 0.37 of what 1-D communicates, an A100 cluster's share at 40 % of its peak."""
    flops = 3 * 2 * shape.tokens * shape.weights / 16 / (0.37 * communication)
    entries = [
        one_dimension(16),
        summa((1, 4, 4), "look-ahead", look_ahead=True),
        summa((4, 2, 2), "look-ahead", look_ahead=True, late=False),
        summa((4, 2, 2), "look-ahead, late sums", look_ahead=True),
        *(grid(degrees) for degrees in ((4, 1, 4), (1, 4, 4))),
        *(grid(degrees, "no overlap", overlap=False) for degrees in ((4, 1, 4), (1, 4, 4))),
        *(grid(degrees, "kept", keep=KEPT) for degrees in ((4, 1, 4), (1, 4, 4))),
    ]
    with net:
        found = run_race(net, shape, entries, tries, flops, title=f"{case} ({shape.tokens} x {shape.hidden})")
    ours = ["grid(4,1,4)", "grid(1,4,4)"]
    scores.versus(case, found, ours, ["1-D"], None)
    scores.versus(case, found, ["grid(1,4,4)"], ["2-D [4,4] look-ahead"], None)
    scores.versus(case, found, ours, [n for n in found if n.startswith("2.5-D")], None)
    for each in ours:
        scores.versus(case, found, [each], [f"{each} no overlap"], None)


def rings(scores: Scores, tries: int) -> None:
    """Reduce-scatter, ours and gloo's."""
    for ranks, rate in ((2, "200mbit"), (4, "200mbit"), (8, "200mbit"), (16, "100mbit")):
        with Network(ranks, rate) as net:
            found = net.run_ranks(scatter_times, (1 << 18, 1 << 20, 1 << 22), tries, timeout=200)[0]
        for (size, served), seconds in found.items():
            if served == "ring":
                theirs = median(found[size, "gloo"])
                row = lower_is_better(
                    f"{ranks} ranks, {size / (1 << 20):g} MiB",
                    "gloo",
                    "reduce-scatter ms",
                    1e3 * median(seconds),
                    1e3 * theirs,
                )
                scores.add(row, 1.8 if size >= 1 << 20 else None)


def scatter_times(rank: int, ranks: int, sizes: Sequence[int], tries: int) -> dict[tuple[int, str], list[float]]:
    found: dict[tuple[int, str], list[float]] = {(s, served): [] for s in sizes for served in ("ring", "gloo")}
    group = dist.group.WORLD
    assert group is not None
    for attempt in range(tries + 1):
        for size, served in found:
            os.environ["FOURFOLD_COLLECTIVES"] = served
            whole, mine = torch.ones(size // 4), torch.empty(size // 4 // ranks)
            seen = measure(
                lambda whole=whole, mine=mine: collectives.reduce_scatter(mine, whole, group, "a race").wait()
            )
            if attempt:
                found[size, served].append(seen.seconds)
    return found


# ---- the check, and the command ----


def check(scores: Scores) -> None:
    """Every contestant's results with real products, against one process."""
    for ranks, entries in (
        (16, [*entries_of(16), *two_level_entries(), *map(grid, all_grids(16))]),
        (8, entries_of(8)),
    ):
        unique = list({entry.name: entry for entry in entries}.values())
        gaps = run_ranks(differences, ranks, Shape(64, 32), unique, timeout=300, group_timeout=60)
        for entry, *gap in zip(unique, *gaps, strict=True):
            console.print(f"  {ranks} ranks, {entry.name}: largest difference {max(gap):.1e}")
            assert max(gap) < 1e-11, entry.name


def differences(rank: int, ranks: int, shape: Shape, entries: Sequence[Entry]) -> list[float]:
    warnings.filterwarnings("ignore")
    groups, serial, found = Groups(rank, ranks), Serial(shape), []
    for entry in entries:
        os.environ["FOURFOLD_COLLECTIVES"] = entry.served
        layer = entry.make(groups, shape, serial)
        layer.step()
        layer.step()  # what was learned in the first is used in the second
        found.append(layer.worst())
    return found


SECTIONS: dict[str, Callable[[Scores, int], None]] = {
    "rings": rings,
    **{f"flat-{ratio}": partial(flat, ratio=ratio) for ratio in FLAT},
    **{f"grids-{ratio}": partial(grids, ratio=ratio) for ratio in FLAT},
    **{f"two-{ratio}": partial(two_level, ratio=ratio) for ratio in TWO},
    **{f"eight-{ratio}": partial(eight, ratio=ratio) for ratio in FLAT},
    "four": four,
    "compute-flat": lambda scores, tries: compute(
        scores, tries, Network(16, "100mbit"), FLAT[4], "with compute, flat, 16 ranks, T/h = 4", 1.5
    ),
    "compute-two": lambda scores, tries: compute(
        scores,
        tries,
        Network(16, "200mbit", racks=4, uplink="100mbit"),
        TWO[4],
        "with compute, two-level, T/h = 4",
        0.68,
    ),
}


def main() -> None:
    torch.set_num_threads(1)
    args = arguments("Tensor parallelism on shaped networks", sections=[*SECTIONS, "check"])
    scores = Scores()
    if (reason := missing()) is not None and args.only != ["check"]:
        raise SystemExit(reason)
    all_of_them = len(args.only) > len(SECTIONS)
    for name in ["eight-2"] if args.quick and all_of_them else args.only:
        if name == "check":
            check(scores)
        else:
            SECTIONS[name](scores, 1 if args.quick else 3)
    finish("tensor", scores.rows, args.json)


if __name__ == "__main__":
    main()
