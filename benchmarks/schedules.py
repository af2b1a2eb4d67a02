"""Schedules: how fast the synthesized ones are, against hand-written ones, lower bounds and published measurements.

    python -m benchmarks.schedules [--quick] [--json PATH]

Everything but the last section is simulated and exact: it does not depend on the machine. Misses are printed like hits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from typing import Any

from benchmarks.common import Row, arguments, finish, lower_is_better, show
from benchmarks.exhaustive import pairings, possible
from fourfold.program import Costs, Layer, Schedule, build, search, simulate
from fourfold.program.partition import partition, stage_costs


def main() -> None:
    args = arguments("Synthesized against hand-written schedules")
    rows: list[Row] = []
    for title, section in SECTIONS.items():
        found = list(section(args.quick))
        show(f"\n{title}", found)
        rows += found
    finish("schedules", rows, args.json)


# ---- ideal costs ----


def full_memory(quick: bool) -> Iterator[Row]:
    """F = I = W = 1, messages free, peak at most P, four stages a rank: against the targets and the lower bounds."""
    targets = {(4, 4): 12.75, (4, 8): 24.75, (4, 16): 48.75, (8, 8): 25.75, (8, 16): 50.25, (8, 32): 98.75}
    for (ranks, micro_batches), target in targets.items():
        found = search(ranks, micro_batches, Costs(), ranks, stages_per_rank=4)
        case = f"P={ranks} B={micro_batches} cap P, v=4"
        yield lower_is_better(case, "target", "makespan", found.makespan, target)
        yield lower_is_better(case, "lower bound", "makespan", found.makespan, found.lower_bound)


def less_memory(quick: bool) -> Iterator[Row]:
    """The same with three quarters and half of that memory, two stages a rank."""
    targets = {(4, 16): 53.5, (8, 32): 109.5}
    for share in (Fraction(3, 4), Fraction(1, 2)):
        for ranks, micro_batches in ((4, 4), (4, 8), (4, 16), (8, 8), (8, 16), (8, 32)):
            found = search(ranks, micro_batches, Costs(), ranks * share, stages_per_rank=2)
            case = f"P={ranks} B={micro_batches} cap {share}P, v=2"
            if share == Fraction(1, 2) and (ranks, micro_batches) in targets:
                yield lower_is_better(case, "target", "makespan", found.makespan, targets[ranks, micro_batches])
            yield lower_is_better(case, "lower bound", "makespan", found.makespan, found.lower_bound)
            one = simulate(build("1f1b", ranks, micro_batches))
            yield lower_is_better(case, "1f1b at cap P", "makespan", found.makespan, one.makespan)


def proof(quick: bool) -> Iterator[Row]:
    """Half the memory on four ranks, B = 16: no schedule with two equal stages a rank ends before 53.5 (107 ticks).

    All 105 placements of eight stages on four ranks are searched exhaustively; `ours` counts those proven.
    """
    placements = [[(s, 7 - s) for s in range(4)]] if quick else list(pairings(range(8)))
    proven = sum(not possible(placement, 16, 4, 106) for placement in placements)
    yield Row(
        "P=4 B=16 cap P/2, v=2", "placements", "proven >= 53.5", proven, len(placements), proven / len(placements)
    )


def all_schedules(quick: bool) -> Iterator[Row]:
    """Every schedule at its own memory, ideal costs; ours within 1F1B's memory."""
    for ranks in (4, 8):
        for micro_batches in (ranks, 2 * ranks, 4 * ranks):
            ours = search(ranks, micro_batches, Costs(), ranks)
            two_replicas = simulate(*chimera(ranks, micro_batches, Costs()))
            twice = ("chimera, twice the weights", two_replicas.makespan, max(two_replicas.peak_activations))
            for name, makespan, peak in [*_peers(ranks, micro_batches, Costs()), twice]:
                case = f"P={ranks} B={micro_batches}, ours holds {ranks}, theirs {float(peak):g}"
                yield lower_is_better(case, name, "makespan", ours.makespan, makespan)


def instructions(quick: bool) -> Iterator[Row]:
    """0.02 for every instruction: the best number of stages a rank, against every fixed one."""
    prices = Costs(instruction=Fraction(1, 50))
    for ranks, micro_batches in (
        ((4, 8), (4, 16), (8, 16)) if quick else ((4, 4), (4, 8), (4, 16), (8, 8), (8, 16), (8, 32))
    ):
        ours = search(ranks, micro_batches, prices, ranks)
        case = f"P={ranks} B={micro_batches} 0.02 an instruction, chose v={ours.schedule.stages // ranks}"
        for count in (1, 2, 4):
            fixed = search(ranks, micro_batches, prices, ranks, stages_per_rank=count)
            yield lower_is_better(case, f"v={count}", "makespan", ours.makespan, fixed.makespan)
        best = min(m for _, m, peak in _peers(ranks, micro_batches, prices) if peak <= ranks)
        yield lower_is_better(case, "best hand-written", "makespan", ours.makespan, best)


# ---- a grid of costs ----

SHARES = {"1:1:1": (1, 1, 1), "1:1.4:0.6": (1, 1.4, 0.6), "1:1.32:0.88": (1, 1.32, 0.88)}


def grid(quick: bool) -> Iterator[Row]:
    """Messages of 0.05, equal and unequal costs, a head of 1.6: against the best hand-written schedule under the cap."""
    rows = []
    for case, ours, best in _grid(quick):
        rows.append(lower_is_better(case, best[0], "makespan", ours, best[1]))
    yield from rows
    ratios = [row.ratio for row in rows]
    worse = sum(ratio < 1 - 1e-9 for ratio in ratios)
    better = sum(ratio > 1 + 1e-9 for ratio in ratios)
    yield Row("grid", "best hand-written", "cases worse", worse, len(rows), float(not worse))
    yield Row("grid", "best hand-written", "cases better", better, len(rows), better / len(rows))
    yield Row("grid", "best hand-written", "mean ratio", 1.0, sum(ratios) / len(ratios), sum(ratios) / len(ratios))


def _grid(quick: bool) -> Iterator[tuple[str, Any, tuple[str, Any]]]:
    sizes = [(2, b) for b in (2, 4, 8)] + [(3, 7)] + [(4, b) for b in (2, 4, 6, 8, 12, 16)]
    more = [(6, 12)] + [(8, b) for b in (4, 8, 12, 16, 32)] + [(16, b) for b in (8, 16, 32, 64)]
    for ranks, micro_batches in sizes if quick else sizes + more:
        for share in (1, Fraction(3, 2)):
            cap = ranks * share
            for label, (forward, input_grad, weight_grad) in SHARES.items():
                prices = Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad, message=0.05)
                ours = search(ranks, micro_batches, prices, cap).makespan
                best = _best((n, m, p) for n, m, p in _peers(ranks, micro_batches, prices) if p <= cap)
                if best is not None:
                    yield f"P={ranks} B={micro_batches} {label} cap {float(cap):g}", ours, best
        layers = _with_head(ranks)
        ours = search(ranks, micro_batches, Costs(message=0.05), ranks, layers=layers).makespan
        best = _best((n, m, p) for n, m, p in _peers(ranks, micro_batches, Costs(message=0.05), layers) if p <= ranks)
        if best is not None:
            yield f"P={ranks} B={micro_batches} head 1.6 cap {ranks}", ours, best


def _with_head(ranks: int) -> list[Layer]:
    """Four layers a rank, the last of which costs 1.6 of the others. Memory in micro-batches of a rank's share."""
    quarter = Layer(forward=0.25, input_grad=0.25, weight_grad=0.25, activation=Fraction(1, 4))
    head = Layer(forward=0.4, input_grad=0.4, weight_grad=0.4, activation=Fraction(1, 4))
    return [*[quarter] * (4 * ranks - 1), head]


def _best(peers: Iterator[tuple[str, Any, Any]]) -> tuple[str, Any] | None:
    return min(((name, makespan) for name, makespan, _ in peers), key=lambda x: x[1], default=None)


def _peers(
    ranks: int, micro_batches: int, prices: Costs, layers: list[Layer] | None = None
) -> Iterator[tuple[str, Any, Any]]:
    """(name, makespan, peak memory) of every hand-written schedule; layers are balanced for each placement."""
    options: list[tuple[str, dict[str, Any]]] = [
        *[(name, {}) for name in ("gpipe", "1f1b", "zb-h1", "zb-v")],
        *[("1f1b", {"slack": n}) for n in (1, 2)],
        *[("interleaved", {"stages_per_rank": n}) for n in (2, 4)],
        *[("wave", {"waves": n}) for n in (1, 2)],
        *[("wave", {"waves": n, "paper": True}) for n in (1, 2)],
    ]
    for name, chosen in options:
        schedule = build(name, ranks, micro_batches, **chosen)
        costs = prices
        if layers is not None:
            counts = partition([layer.work for layer in layers], schedule.placement)
            costs = stage_costs(layers, counts, prices)
        timeline = simulate(schedule, costs)
        yield schedule.name, timeline.makespan, max(timeline.peak_activations)


def chimera(ranks: int, micro_batches: int, prices: Costs) -> tuple[Schedule, Costs]:
    """Chimera with two replicas, in the form in which stages and blocks are swapped between mirrored ranks.

    Its two pipelines in opposite directions then are two equal ones on half the ranks, each one wave, each with half the
    micro-batches, and all starts as before; a rank's share is twice as large, and so is the memory of one micro-batch.
    """
    doubled = Costs(
        forward=2 * prices.forward,  # type: ignore[operator]
        input_grad=2 * prices.input_grad,  # type: ignore[operator]
        weight_grad=2 * prices.weight_grad,  # type: ignore[operator]
        activation=2 * prices.activation,  # type: ignore[operator]
        message=prices.message,
        instruction=prices.instruction,
    )
    return build("wave", ranks // 2, micro_batches // 2, paper=True), doubled


# ---- against published measurements ----

# Sequences per second in Hanayo's figure 9: GPipe, Chimera (as one wave), Hanayo with 2, 4 and 8 waves.
FIGURE_9 = {
    "pairwise NVLink, P=8": (8, 1.150, 1.439, {2: 1.626, 4: 1.665, 8: 1.655}),
    "full NVLink, P=8": (8, 1.132, 1.445, {2: 1.645, 4: 1.754, 8: 1.780}),
    "Lonestar6, P=8": (8, 1.089, 1.343, {2: 1.453, 4: 1.367, 8: 1.147}),
    "V100 NVLink, P=8": (8, 0.872, 1.104, {2: 1.264, 4: 1.350, 8: 1.375}),
    "pairwise NVLink, P=4": (4, 2.099, 2.542, {2: 3.047, 4: 3.233, 8: 3.316}),
    "full NVLink, P=4": (4, 2.226, 2.632, {2: 3.082, 4: 3.301, 8: 3.419}),
    "Lonestar6, P=4": (4, 2.082, 2.514, {2: 2.896, 4: 2.944, 8: 2.751}),
    "V100 NVLink, P=4": (4, 1.687, 1.990, {2: 2.327, 4: 2.486, 8: 2.547}),
}


def published(quick: bool) -> Iterator[Row]:
    """Simulated speed of waves over GPipe and over Chimera (ours) against the measured ones (theirs), B = P, T_B = 2F.

    First with free messages, then with the one message time that fits the wave bars of the row best. Chimera's bars are
    compared with both readings of them: one wave on all ranks, and two pipelines of half the ranks.
    """
    for case, (ranks, gpipe, chimera_bar, bars) in FIGURE_9.items():
        fitted = min((Fraction(n, 400) for n in range(41)), key=lambda tc: _misfit(ranks, gpipe, bars, tc))
        for message, label in ((Fraction(0), "free messages"), (fitted, f"messages {float(fitted):g} F")):
            for waves, bar in bars.items():
                yield _error(f"{case}, {label}", f"wave {waves} / GPipe", _speedup(ranks, waves, message), bar / gpipe)
            best = max(bars, key=lambda w: bars[w])
            ours = 1 / _time(ranks, best, message)
            prices = Costs(message=message)
            halves = 1 / simulate(*chimera(ranks, ranks, prices)).makespan
            one = 1 / _time(ranks, 1, message)
            measured = bars[best] / chimera_bar
            yield _error(f"{case}, {label}", f"wave {best} / Chimera on halves", ours / halves, measured)
            yield _error(f"{case}, {label}", f"wave {best} / one wave", ours / one, measured)


def _error(case: str, what: str, predicted: Any, measured: float) -> Row:
    """A row whose ratio is measured over predicted: 1 is a perfect prediction, below 1 too optimistic."""
    return Row(case, what, "speed-up", float(predicted), measured, measured / float(predicted))


@cache
def _time(ranks: int, waves: int, message: Fraction) -> Any:
    """Of `waves` waves; 0: of GPipe."""
    schedule = build("wave", ranks, ranks, waves=waves) if waves else build("gpipe", ranks, ranks)
    return simulate(schedule, Costs(message=message)).makespan


def _speedup(ranks: int, waves: int, message: Fraction) -> Any:
    return _time(ranks, 0, message) / _time(ranks, waves, message)


def _misfit(ranks: int, gpipe: float, bars: dict[int, float], message: Fraction) -> float:
    return sum((float(_speedup(ranks, waves, message)) / (bar / gpipe) - 1) ** 2 for waves, bar in bars.items())


# ---- speed of the tools themselves ----


def tools(quick: bool) -> Iterator[Row]:
    """Wall-clock seconds on this machine, against what was requested."""
    yield _timed("synthesize P=8 B=32, ideal costs", 2, lambda: search(8, 32, Costs(), 8))
    yield _timed("synthesize P=8 B=32, messages 0.05", 2, lambda: search(8, 32, Costs(message=0.05), 8))
    if quick:
        return
    yield _timed("synthesize P=64 B=256, messages 0.05", 60, lambda: search(64, 256, Costs(message=0.05), 64))
    schedule = build("1f1b", 512, 2048)
    yield _timed("simulate P=512 B=2048 1f1b, 2 million ops", 20, lambda: simulate(schedule))
    yield _timed("the same with messages of 0.05", 20, lambda: simulate(schedule, Costs(message=0.05)))


def _timed(case: str, wanted: float, work: Callable[[], Any]) -> Row:
    begin = time.perf_counter()
    work()
    return lower_is_better(case, "wanted", "seconds", time.perf_counter() - begin, wanted)


SECTIONS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "F = I = W = 1, messages free, four stages a rank, peak at most P": full_memory,
    "F = I = W = 1, messages free, two stages a rank, less memory": less_memory,
    "Proof by exhaustion": proof,
    "All schedules, ideal costs": all_schedules,
    "A fixed cost per instruction": instructions,
    "Messages and unequal costs": grid,
    "Hanayo's figure 9: predicted and measured speed-ups": published,
    "The tools themselves": tools,
}


if __name__ == "__main__":
    main()
