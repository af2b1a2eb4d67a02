"""The schedules by name: each a pure function from sizes to a `Schedule`.

    build("wave", ranks=4, micro_batches=8, waves=2)

In the formulas P is the number of ranks, B of micro-batches, v of stages on a rank; F, I, W a rank's whole share for one
micro-batch, T_B = I + W. Any B ≥ 1 is legal everywhere. Memory is the most micro-batches (of a rank's share) held at once.

| name | placement | idle time of a rank, messages free | memory |
|---|---|---|---|
| gpipe | loop, v = 1 | (P - 1)(F + T_B) | B |
| 1f1b | loop, v = 1 | (P - 1)(F + T_B) | P, + slack |
| interleaved | loop, v stages | (P - 1)(F + T_B) / v for B a multiple of P | P + (P - 1)/v |
| wave | zig-zag, v = 2 waves | (P - 1) T_B / waves for B = P | P |
| zb-h1 | loop, v = 1 | (P - 1)(F + I - W) for B ≥ P | P |
| zb-v | zig-zag, v = 2 | (P - 1) F / 2 for B ≥ 2P - 1 and F = I = W | P |

Add one's own with `@register("name")`: see docs/schedules.md.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

from fourfold import schema
from fourfold.errors import ScheduleError
from fourfold.program.costs import Costs
from fourfold.program.engine import Order, Problem, peaks, run
from fourfold.program.greedy import Policy, list_schedule
from fourfold.program.ops import Kind, Op, Schedule

__all__ = ["build", "forward_only", "fused", "loop", "names", "register", "split", "zigzag"]

Generator = Callable[..., Schedule]

MOST_OPS, MOST_RANKS, MOST_STAGES = 1_000_000, 10_000, 64
"""Forwards and backwards of a schedule that is built, its ranks, and stages on each: orders are tried one by one, op by op."""

_REGISTRY: dict[str, Generator] = {}  # filled while modules load, by `register` alone


def register(name: str) -> Callable[[Generator], Generator]:
    """Make a function `(ranks, micro_batches, **options) -> Schedule` known to `build` by a name."""

    def add(generator: Generator) -> Generator:
        if name in _REGISTRY and _REGISTRY[name] is not generator:
            raise ScheduleError(f"a schedule '{name}' is registered already; choose another name")
        _REGISTRY[name] = generator
        return generator

    return add


def names() -> tuple[str, ...]:
    """All registered names."""
    return tuple(_REGISTRY)


def build(name: str, ranks: int, micro_batches: int, **options: Any) -> Schedule:
    """The schedule of a name: gpipe, 1f1b (slack), interleaved (stages_per_rank), wave (waves), zb-h1, zb-v, or one's own."""
    if name not in _REGISTRY:
        raise ScheduleError(f"there is no schedule '{name}'{schema.nearest(name, _REGISTRY)}")
    at_least(ranks=(ranks, 1), micro_batches=(micro_batches, 1))
    generator = _REGISTRY[name]
    allowed = {k: p.default for k, p in inspect.signature(generator).parameters.items() if k not in _SIZES}
    for option in options:
        if option not in allowed:
            hint = schema.nearest(option, allowed) if allowed else f"; {name} has no options"
            raise ScheduleError(f"schedule '{name}' has no option '{option}'{hint}")
    schedule = generator(ranks, micro_batches, **options)
    told = [f"{k}={v}" for k, v in options.items() if v != allowed[k]]
    return schedule if schedule.name else replace(schedule, name=" ".join([name, *told]))


_SIZES = ("ranks", "micro_batches")


def at_least(**values: tuple[Any, int]) -> None:
    """Raise unless every value is a whole number of at least its least."""
    for name, (value, least) in values.items():
        if not schema.whole(value, least):
            raise ScheduleError(f"{name} = {value!r} must be a whole number of at least {least}; use {least}")


def check_size(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> None:
    """Raise where a schedule would have too many ops to be built in a minute or two."""
    for count, what, most in ((ranks, "ranks", MOST_RANKS), (stages_per_rank, "stages on a rank", MOST_STAGES)):
        if count > most:
            raise ScheduleError(f"{count} {what} are too many; use at most {most}")
    each = 2 * ranks * stages_per_rank
    if each * micro_batches > MOST_OPS:
        fewer = f"at most {MOST_OPS // each} micro-batches" if each <= MOST_OPS else "fewer ranks"
        raise ScheduleError(
            f"{ranks} ranks · {stages_per_rank} stages on each · {micro_batches} micro-batches make {each * micro_batches} "
            f"forwards and backwards; schedules of up to {MOST_OPS} are built: use {fewer}"
        )


# ---- placements ----


def loop(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Stage s on rank s mod P: after the last rank comes the first."""
    return tuple(s % ranks for s in range(ranks * stages_per_rank))


def zigzag(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Legs down and up again. Where a leg turns, neighbouring stages share a rank: a hand-off without a message."""
    legs = [range(ranks) if leg % 2 == 0 else range(ranks - 1, -1, -1) for leg in range(stages_per_rank)]
    return tuple(rank for leg in legs for rank in leg)


# ---- one stage on a rank ----


@register("gpipe")
def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards."""
    check_size(ranks, micro_batches)
    order = [_ops("F", r, range(micro_batches)) + _ops("B", r, range(micro_batches)) for r in range(ranks)]
    return _schedule(order, loop(ranks, 1), micro_batches)


@register("1f1b")
def one_f_one_b(ranks: int, micro_batches: int, slack: int = 0) -> Schedule:
    """Warm up with as many forwards as there are ranks behind (and `slack` more), then one forward, one backward."""
    at_least(slack=(slack, 0))
    check_size(ranks, micro_batches)
    order = []
    for rank in range(ranks):
        warm = min(ranks - rank - 1 + slack, micro_batches)
        forwards, backwards = _ops("F", rank, range(micro_batches)), _ops("B", rank, range(micro_batches))
        order.append(_alternate(forwards, backwards, warm))
    return _schedule(order, loop(ranks, 1), micro_batches)


@register("zb-h1")
def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """1F1B with the backward split: rank r runs its W r micro-batches late, so that I goes up the ranks sooner."""
    check_size(ranks, micro_batches)
    order = []
    for rank in range(ranks):
        warm = min(ranks - rank, micro_batches)
        ops = _ops("F", rank, range(warm))
        for m in range(micro_batches):
            ops.append(Op(rank, "I", m))
            if m >= rank:
                ops.append(Op(rank, "W", m - rank))
            if warm + m < micro_batches:
                ops.append(Op(rank, "F", warm + m))
        ops += _ops("W", rank, range(max(0, micro_batches - rank), micro_batches))
        order.append(ops)
    return _schedule(order, loop(ranks, 1), micro_batches)


# ---- several stages on a rank ----


@register("interleaved")
def interleaved(ranks: int, micro_batches: int, stages_per_rank: int = 2) -> Schedule:
    """1F1B over several stages a rank, in groups of micro-batches: a group passes a leg of the loop, then the next leg."""
    at_least(stages_per_rank=(stages_per_rank, 1))
    check_size(ranks, micro_batches, stages_per_rank)
    groups = _groups(micro_batches, ranks)
    width = max(map(len, groups))
    order = []
    for rank in range(ranks):
        stages = range(rank, ranks * stages_per_rank, ranks)
        forwards = [Op(s, "F", m) for group in groups for s in stages for m in group]
        backwards = [Op(s, "B", m) for group in groups for s in reversed(stages) for m in group]
        warm = min(len(forwards), 2 * (ranks - rank - 1) + (stages_per_rank - 1) * width)
        order.append(_alternate(forwards, backwards, warm))
    return _schedule(order, loop(ranks, stages_per_rank), micro_batches)


def _groups(micro_batches: int, size: int) -> list[range]:
    """As many groups as have at least `size` micro-batches, as even as can be; fewer micro-batches: one group."""
    count = max(1, micro_batches // size)
    bounds = [micro_batches * i // count for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


@register("wave")
def wave(ranks: int, micro_batches: int, waves: int = 1, paper: bool = False) -> Schedule:
    """Hanayo: `waves` waves, each a leg down the ranks and a leg up, over 2 · waves stages a rank.

    With B = P micro-batches this is the order of Hanayo's figures, and there the best for unsplit backwards. For other
    numbers the paper says nothing. Its rule, in units of at most P micro-batches one after another, pays the bubble for
    every unit (`paper = True`). Otherwise list scheduling within the same memory, P micro-batches, lets the next ones
    fill the bubbles, and the fastest at T_B = 2 F is taken.
    """
    at_least(waves=(waves, 1))
    if 2 * waves > MOST_STAGES:
        raise ScheduleError(
            f"waves = {waves}: {2 * waves} stages on a rank are too many; use at most {MOST_STAGES // 2}"
        )
    check_size(ranks, micro_batches, 2 * waves)
    units = [range(a, min(a + ranks, micro_batches)) for a in range(0, micro_batches, ranks)]
    order: Order = [[op for unit in units for op in _wave_unit(ranks, waves, unit, rank)] for rank in range(ranks)]
    placement = zigzag(ranks, 2 * waves)
    if micro_batches != ranks and not paper:
        order = _filled(order, placement, ranks, micro_batches)
    return _schedule(order, placement, micro_batches)


def _wave_unit(ranks: int, waves: int, unit: Sequence[int], rank: int) -> list[Op]:
    """Hanayo's order of one rank for at most P micro-batches. Even legs go down the ranks, odd legs up."""
    stage = [leg * ranks + (rank if leg % 2 == 0 else ranks - 1 - rank) for leg in range(2 * waves)]

    def ops(kind: Kind, legs: Iterable[int]) -> list[Op]:
        return [Op(stage[leg], kind, m) for leg in legs for m in unit]

    down, up = iter(ops("F", range(0, 2 * waves, 2))), ops("F", range(1, 2 * waves, 2))
    back_up, back_down = iter(ops("B", range(2 * waves - 1, 0, -2))), ops("B", range(2 * waves - 2, -1, -2))
    order = [next(down) for _ in range(min(ranks - rank, len(unit)))]  # warm-up: until the first leg has turned
    for op in up:
        order.append(op)
        order.append(next(down, None) or next(back_up))
    for op in back_down:
        order.append(op)
        order.extend(op for op in [next(back_up, None)] if op)
    return order


def _filled(units: Order, placement: tuple[int, ...], ranks: int, micro_batches: int) -> Order:
    """The fastest of the units one after another and some list schedules with unsplit backwards."""
    problem = Problem.in_integers(placement, ranks, micro_batches, Costs(backward=2), ranks)
    policies = [
        Policy.by_time(problem, forward=f, backward=b, lead=lead, reserve=reserve, whole=(0, micro_batches))
        for f, b, lead in ((0, 0, -1), (1, 1, 0), (1, 1, 0.5), (-2, -2, 0))
        for reserve in (1, 0)
    ]
    return _fastest(problem, [units, *(list_schedule(problem, policy) for policy in policies)])


def _fastest(problem: Problem, orders: Iterable[Order]) -> Order:
    return min(orders, key=lambda order: (run(problem, order).makespan, max(peaks(problem, order))))


@register("zb-v")
def zb_v(ranks: int, micro_batches: int) -> Schedule:
    """One wave with the backward split. Without bubbles but the first, when F = I = W and B ≥ 2P - 1.

    The order is written for 2P - 1 micro-batches or more; with fewer, it is that order without the missing ones.
    """
    total = max(2 * ranks - 1, micro_batches)
    if 8 * ranks**2 > MOST_OPS:
        raise ScheduleError(f"zb-v on {ranks} ranks is too large to be built; use at most {math.isqrt(MOST_OPS // 8)}")
    check_size(ranks, micro_batches, 2)
    order = []
    for rank in range(ranks):
        behind = ranks - 1 - rank
        steps = [
            *["F0"] * (2 * behind + 1),  # until the first micro-batch is back from the turn
            *["F1", "F0"] * rank,  # until the last stage begins its backward
            *["F1", "I1", "W1"] * (behind + 1),  # until that backward is back from the turn
            *["F0", "I0", "W0", "F1", "I1", "W1"] * (total - ranks - behind),
            *["I0", "W0", "F1", "I1", "W1"] * behind,
            *["I0", "I1"] * rank,  # cool-down: input gradients first, other ranks wait for them
            *["I0", "W0"] * (behind + 1),
            *["W1"] * rank,
            *["W0"] * rank,
        ]
        stage = {"0": rank, "1": 2 * ranks - 1 - rank}
        order.append([op for op in _numbered(steps, stage) if op.micro_batch < micro_batches])
    return _schedule(order, zigzag(ranks, 2), micro_batches)


def _numbered(steps: Iterable[str], stage: dict[str, int]) -> Iterable[Op]:
    """Steps as ops: each kind of each stage takes the micro-batches in order."""
    seen: dict[str, int] = {}
    for step in steps:
        seen[step] = seen.get(step, -1) + 1
        yield Op(stage[step[1]], cast(Kind, step[0]), seen[step])


# ---- changing a schedule ----


def forward_only(placement: Sequence[int], micro_batches: int) -> Schedule:
    """Evaluation: F alone, on any placement."""
    at_least(micro_batches=(micro_batches, 1))
    # A training problem whose backwards take neither time nor memory; they are left out of the order.
    costs = Costs(input_grad=0, weight_grad=0, activation=0)
    problem = Problem.in_integers(placement, max(placement) + 1, micro_batches, costs)
    no_backward: Any = {"backward": 1, "lead": -1, "reserve": 0, "whole": (0, micro_batches)}
    policies = [Policy.by_time(problem, forward=f, **no_backward) for f in (-1, 0, 0.5, 1, 2, 4)]
    order = _fastest(problem, (list_schedule(problem, policy) for policy in policies))
    rows = [[op for op in ops if op[1] == "F"] for ops in order]
    return _schedule(rows, placement, micro_batches, "forward only")


def split(schedule: Schedule) -> Schedule:
    """The schedule with every B as I and, right after it, W."""

    def halves(op: Op) -> tuple[Op, ...]:
        return (op._replace(kind="I"), op._replace(kind="W")) if op.kind == "B" else (op,)

    return replace(schedule, order=tuple(tuple(h for op in ops for h in halves(op)) for ops in schedule.order))


def fused(schedule: Schedule) -> Schedule:
    """The schedule with every I and W as one B, in the place of the I."""
    return replace(
        schedule,
        order=tuple(
            tuple(op._replace(kind="B") if op.kind == "I" else op for op in ops if op.kind != "W")
            for ops in schedule.order
        ),
    )


def _ops(kind: Kind, stage: int, micro_batches: Iterable[int]) -> list[Op]:
    return [Op(stage, kind, m) for m in micro_batches]


def _alternate(forwards: list[Op], backwards: list[Op], warm: int) -> list[Op]:
    """`warm` forwards, then a forward and a backward in turn, then the other backwards."""
    pairs = zip(forwards[warm:], backwards, strict=False)
    return [*forwards[:warm], *(op for pair in pairs for op in pair), *backwards[len(forwards) - warm :]]


def _schedule(order: Order, placement: Sequence[int], micro_batches: int, name: str = "") -> Schedule:
    return Schedule(tuple(tuple(map(Op._make, ops)) for ops in order), tuple(placement), micro_batches, name)
