"""What a layout's units take at least in so much memory: no choice of theirs can beat it.

A rank's time is what its units compute and what their choices add; its memory is not a sum, but at some instants of a step it is
known what is held together. At each the relaxed choice (`choice.relaxed`) within the budget is a floor; the highest counts.

    first       when most micro-batches are in flight for the first time: their activations, and no gradients yet
    between     when gradients have been made and most are in flight again: both
    last        at the end: gradients, reduced where they are sharded, and no activations

Of two of these, half of each fits, too: that is a sum over units, as well. Layers are as the deals that are tried (`deal`) have
them, and the best deal counts.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import inf
from typing import NamedTuple

from fourfold.planner.choice import Group, relaxed
from fourfold.planner.deal import stage_deals
from fourfold.planner.layout import Layout, Setting
from fourfold.planner.options import Ends, Option, Solver, Weights
from fourfold.planner.stages import units_of_stages
from fourfold.planner.units import STASH, Choice, compute_times, computes
from fourfold.program.ops import Schedule

__all__ = ["bytes_at_least", "flights", "flights_of", "floor_in", "floor_of"]

WEIGHTS: tuple[Weights, ...] = ((0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (1.0, 0.5), (1.0, 1.0))
"""Of the host's link, with which a rank's least seconds are sought ([Note: the host's link, at least])."""

_Options = tuple[list[tuple[float, float]], int]
"""(bytes, seconds) of each that alike units may choose, and how many units they are."""
Flying = tuple[tuple[int, ...], tuple[int, ...] | None]


class _Row(NamedTuple):
    """Alike units of a rank, and how many micro-batches of theirs are in flight first and between."""

    kind: str
    first: int
    between: int
    opens: bool
    closes: bool
    """Whether it is the first or the last unit of the rank's only stage."""
    units: int


class _Rank(NamedTuple):
    rows: tuple[_Row, ...]
    closing: str
    """The kind of unit whose backward comes when most are in flight; empty where that is not known."""
    ends: bool
    """Whether the model's last unit is here, and its backward may be next to its forward."""
    meets: bool
    """Whether there is a time between."""


class _Instant(NamedTuple):
    """How much of each counts."""

    first: float = 0
    between: float = 0
    last: float = 0


def flights(layout: Layout, rank: int) -> Flying:
    """Micro-batches of each of a rank's stages that are in flight at one time at least: first, and between.

    None: there need be no time between. These are what orders of these schedules have been seen to hold, or less.
    """
    p, m, v = layout.mesh.pipe, layout.micro_batches, layout.stages_per_rank
    if v == 1:
        most = m if layout.schedule == "gpipe" else min(m, p - rank)
        return (most,), (min(m - 1, most),) if m > 1 else None
    if layout.schedule == "interleaved":
        warm = 2 * (p - rank) - 1
        first = (min(m, max(p, warm)), *[min(m, p)] * (v - 2), min(m, p, warm))
        return first, first if m >= 2 * p else None
    if v == 2:  # a V
        first = (min(m, 2 * p - 1 - rank), min(m, rank + 1))
        return first, (first if layout.schedule == "zb-v" else (p, rank)) if m >= 2 * p else None
    if m <= p or p < 4:
        first = (*[min(m, p)] * (v - 1), min(m, rank + 1))
        return first, (*[p // 2] * (v - 1), 0) if m >= 2 * p else None
    whole = m % p == 0
    first = (*[p - 1] * (v - 1), rank) if whole else (*[3 * p // 4] * (v - 1), 0)
    return first, (*[p // 2 if whole else p // 3] * (v - 1), 0) if m >= 2 * p else None


def flights_of(schedule: Schedule, rank: int) -> Flying:
    """The same, as the schedule's order has them."""
    held, ops = schedule.stages_of[rank], schedule.order[rank]
    now, left = dict.fromkeys(held, 0), Counter(op.stage for op in ops if op.kind == "F")
    begun: set[int] = set()
    first, between = (0,) * len(held), None
    for op in ops:
        if op.kind == "F":
            now[op.stage] += 1
            flying = tuple(now.values())
            if not begun:
                first = max(first, flying, key=sum)
            elif len(begun) == len(held) and all(left.values()):
                between = flying if between is None else max(between, flying, key=sum)
        elif op.kind != "W":
            now[op.stage] -= 1
            begun.add(op.stage)
        if op.kind == ("W" if schedule.split else "B"):
            left[op.stage] -= 1
    return first, between


def floor_in(solver: Solver, layout: Layout, limit: float, floor: float = 0.0, enough: float = inf) -> float | None:
    """Seconds of a step in `limit` bytes of a device that no plan of the layout can beat; None where none fits.

    At least `floor`, which is known already; not sought for exactly where it is above `enough`.
    """
    if layout.mesh.pipe > 1 and layout.schedule == "synthesized":  # its stages are its own
        return floor
    placed, deals = _dealt(solver.setting, layout)
    return _floor(solver, layout, _held(solver.setting, placed, deals), limit, floor, enough, None)


def _dealt(setting: Setting, layout: Layout) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    return stage_deals(setting, layout) if layout.mesh.pipe > 1 else ((0,), ((setting.spec.layers,),))


def floor_of(
    solver: Solver, layout: Layout, schedule: Schedule, counts: tuple[int, ...], limit: float, floor: float
) -> float | None:
    """The same with a schedule and layers dealt out."""
    held = _held(solver.setting, schedule.placement, (counts,))
    return _floor(solver, layout, held, limit, floor, inf, schedule)


def bytes_at_least(solver: Solver, layout: Layout) -> float:
    """Bytes of a device without which no plan of the layout fits."""
    placed, deals = _dealt(solver.setting, layout)
    found = []
    for ranks in _held(solver.setting, placed, deals):
        most = 0.0
        for h in ranks:
            rank = _rank(h.stages, *flights(layout, h.rank), h.ends, layout.puts_weights_off)
            kinds = _kinds(solver, layout, rank)
            again = [k.again[0] for k in kinds]
            for at in _instants(rank):
                rows, taken = _rows(rank, kinds, again, at, 0, 1)
                most = max(most, taken + sum(units * min(size for size, _ in options) for options, units in rows))
        found.append(most)
    return min(found) + (layout.message(solver.setting) if solver.setting.cluster.device.kind != "cpu" else 0.0)


class _Held(NamedTuple):
    """What a rank holds, in one deal or in several."""

    rank: int
    stages: tuple[tuple[str, ...], ...]
    """Kinds of units of its stages that are there in all of the deals."""
    ends: bool
    """Whether the last stage is here."""
    deals: tuple[tuple[tuple[str, int], ...], ...]
    """Units by kind, in each."""


@lru_cache(maxsize=4096)
def _held(
    setting: Setting, placed: tuple[int, ...], deals: tuple[tuple[int, ...], ...]
) -> tuple[tuple[_Held, ...], ...]:
    """The first and the last rank, for all deals at once; where layers are not alike, for each."""
    spec, last = setting.spec, max(placed)
    every = [[tuple(u.kind for u in units) for units in units_of_stages(spec, counts)] for counts in deals]
    out = []
    for some in [every] if spec.alike else [[stages] for stages in every]:
        ranks = []
        for rank in sorted({0, last}):
            mine = [[stages[s] for s in range(len(placed)) if placed[s] == rank] for stages in some]
            fewest = tuple(min(kinds, key=len) for kinds in zip(*mine, strict=True))
            counts = (Counter(kind for kinds in stages for kind in kinds) for stages in mine)
            ranks.append(_Held(rank, fewest, rank == placed[-1], tuple(tuple(c.items()) for c in counts)))
        out.append(tuple(ranks))
    return tuple(out)


def _floor(
    solver: Solver,
    layout: Layout,
    held: tuple[tuple[_Held, ...], ...],
    limit: float,
    floor: float,
    enough: float,
    schedule: Schedule | None,
) -> float | None:
    setting, mesh, m = solver.setting, layout.mesh, layout.micro_batches
    grid = (layout.micro_batch_size * setting.spec.seq_len, mesh.row, mesh.col, layout.tensor, layout.steps)
    apart = layout.splits_backward
    work = {kind: m * sum(compute_times(setting, kind, *grid, 1, "none", apart)[:3]) for kind in setting.spec.kinds}
    budget = limit - (layout.message(setting) if setting.cluster.device.kind != "cpu" else 0.0)  # one is being sent
    best: float | None = None
    for ranks in held:
        floors, there = [floor] * len(ranks[0].deals), True
        for h in ranks:
            flying = flights(layout, h.rank) if schedule is None else flights_of(schedule, h.rank)
            least = _least(solver, layout, _rank(h.stages, *flying, h.ends, layout.puts_weights_off), budget)
            if least is None:
                there = False
                break
            for i, units in enumerate(h.deals):
                floors[i] = max(floors[i], least + sum([n * work[kind] for kind, n in units]))
            if min(floors) > enough:
                break
        if there:
            best = min(floors) if best is None else min(best, *floors)
    return best


@lru_cache(maxsize=20_000)
def _rank(
    stages: tuple[tuple[str, ...], ...],
    first: tuple[int, ...],
    between: tuple[int, ...] | None,
    ends: bool,
    puts_off: bool,
) -> _Rank:
    alone, rows = len(stages) == 1, Counter[tuple[str, int, int, bool, bool]]()
    for kinds, a, b in zip(stages, first, between or [0] * len(stages), strict=True):
        end = len(kinds) - 1
        rows.update((kind, a, b, alone and i == 0, alone and i == end) for i, kind in enumerate(kinds))
    found = tuple(_Row(*row, count) for row, count in rows.items())
    closing = stages[0][-1] if alone and not puts_off else ""
    return _Rank(found, closing, alone and ends, between is not None)


def _least(solver: Solver, layout: Layout, rank: _Rank, budget: float) -> float | None:
    """Seconds beyond computing that no choice of the rank's units can beat; None where none fits."""
    key = (*solver.key(layout), layout.puts_weights_off, layout.splits_backward, rank, budget)
    if key not in solver.known:
        solver.known[key] = _sought(solver, layout, rank, _kinds(solver, layout, rank), budget)
    least: float | None = solver.known[key]
    return least


def _kinds(solver: Solver, layout: Layout, rank: _Rank) -> list[_Kind]:
    """Row by row."""
    base, out = (*solver.key(layout), layout.puts_weights_off, layout.splits_backward), []
    for r in rank.rows:
        key = (*base, r.kind, r.opens, r.closes)
        if key not in solver.known:
            solver.known[key] = _Kind.of(solver, layout, r)
        out.append(solver.known[key])
    return out


class _Kind(NamedTuple):
    """Options of a unit, and seconds that they take at least.

    Sums that are queued count in two ways, both less than what a plan takes: hidden as far as anything can be; or all of them,
    less what they can be hidden behind, which is one backward of every unit.
    """

    modes: list[Option]
    behind: float
    plain: tuple[float, float]
    """With nothing recomputed: the fastest of its modes, in both ways."""
    again: list[list[Option]]
    """What it may recompute, for all WEIGHTS where activations cross the host's link."""

    @classmethod
    def of(cls, solver: Solver, layout: Layout, row: _Row) -> _Kind:
        piped, overlap = layout.mesh.pipe > 1, solver.setting.cluster.overlap
        ends = Ends(row.opens, row.closes)
        modes = solver.sharding(layout, row.kind, piped, ends, "again")
        plain = solver.sharding(layout, row.kind, piped, ends, "plain")
        c = computes(solver.setting, layout, row.kind, Choice())
        behind = overlap * (c.input_grad + c.weight_grad)
        fastest = min(o.seconds for o in plain), min(o.seconds + o.queued for o in plain) - behind
        weights = WEIGHTS if layout.activations == "host" else WEIGHTS[:1]
        again = [solver.recompute(layout, row.kind, w) for w in weights]
        return cls(modes, behind + overlap * c.forward, fastest, again)


def _sought(solver: Solver, layout: Layout, rank: _Rank, kinds: list[_Kind], budget: float) -> float | None:
    m, least = layout.micro_batches, 0.0
    which, stay = _weights(solver, layout, rank, kinds) if layout.activations == "host" else (0, 0.0)
    again = [k.again[which] for k in kinds]
    pairs = list(zip(rank.rows, kinds, strict=True))
    queues = sum([r.units * (max([o.queued for o in k.modes]) - k.behind) for r, k in pairs])
    for queued in (0, 1) if queues > 0 else (0,):
        binds = False
        for at in _instants(rank):
            if max(at) < 1 and not binds:
                break
            rows, taken = _rows(rank, kinds, again, at, queued, m)
            found = _relaxed(rows, budget - taken)
            if found is None:
                return None
            binds, least = binds or found[1], max(least, found[0] - stay)
    if layout.activations != "host":  # what is computed again hides no more than it takes
        for way in (0, 1):
            least = max(least, sum([r.units * k.plain[way] for r, k in zip(rank.rows, kinds, strict=True)]))
    return least


def _rows(
    rank: _Rank, kinds: list[_Kind], again: list[list[Option]], at: _Instant, queued: int, micro_batches: int
) -> tuple[list[_Options], float]:
    """What units may hold at an instant, and take; and bytes that are held for a while then."""
    rows: list[_Options] = []
    closing = 0.0
    for r, k, options in zip(rank.rows, kinds, again, strict=True):
        flight = at.first * r.first + at.between * r.between
        sharded = [
            (at.first * o.first + at.between * o.memory + at.last * o.last, o.seconds + queued * (o.queued - k.behind))
            for o in k.modes
        ]
        rows += [(sharded, r.units), ([(flight * o.memory, micro_batches * o.seconds) for o in options], r.units)]
        if r.kind == rank.closing:
            closing = min([o.transient for o in options])
    return rows, (at.first + at.between) * closing


def _weights(solver: Solver, layout: Layout, rank: _Rank, kinds: list[_Kind]) -> tuple[int, float]:
    """Which weights of the host's link make most of it; and seconds of what need not cross it."""
    m, cluster, found = layout.micro_batches, solver.setting.cluster, []
    for i, weights in enumerate(WEIGHTS):
        stay = 0.0
        if rank.ends:  # its backward may be next, and then the last bytes stay
            stay = m * sum(1 - cluster.overlap + w * cluster.overlap for w in weights) * STASH / cluster.host.link
        pairs = zip(rank.rows, kinds, strict=True)
        least = m * sum([r.units * min([o.seconds for o in k.again[i]]) for r, k in pairs]) - stay
        found.append((least, i, stay))
    _, i, stay = max(found)
    return i, stay


def _relaxed(rows: list[_Options], room: float) -> tuple[float, bool] | None:
    """Seconds of alike units, each with its options (bytes, seconds), at least; and whether memory binds."""
    seconds = held = 0.0
    for options, units in rows:
        fastest, size = min([(takes, size) for size, takes in options])
        seconds, held = seconds + units * fastest, held + units * size
    if held <= room:
        return seconds, False
    chosen = relaxed([Group(*row) for row in rows], room)
    return None if chosen is None else (chosen.bound, True)


def _instants(rank: _Rank) -> list[_Instant]:
    """Those that are known of it; then halves of two."""
    if not rank.meets:
        return [_Instant(first=1), _Instant(last=1), _Instant(first=0.5, last=0.5)]
    if all(r.between >= r.first for r in rank.rows):
        return [_Instant(between=1)]
    return [_Instant(first=1), _Instant(between=1), _Instant(first=0.5, between=0.5)]
