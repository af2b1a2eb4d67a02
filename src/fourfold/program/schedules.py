"""Named schedules: each is a pure function from sizes to a `Schedule`.

    build("wave", ranks=4, micro_batches=8, waves=2)

In the formulas P is the number of ranks, B of micro-batches, v of stages per rank; F, I, W are a rank's times for one
micro-batch, T_B = I + W. Any B ≥ 1 is allowed. Memory is the peak number of micro-batches held by a rank.

| name | placement | idle time of a rank, messages free | memory |
|---|---|---|---|
| gpipe | loop, v = 1 | (P - 1)(F + T_B) | B |
| 1f1b | loop, v = 1 | (P - 1)(F + T_B) | P, + slack |
| interleaved | loop, v stages | (P - 1)(F + T_B) / v for B a multiple of P | P + (P - 1)/v |
| wave | zig-zag, v = 2 waves | (P - 1) T_B / waves for B = P | P |
| zb-h1 | loop, v = 1 | (P - 1)(F + I - W) for B ≥ P | P |
| zb-v | zig-zag, v = 2 | (P - 1) F / 2 for B ≥ 2P - 1 and F = I = W | P |

Add your own with `@register("name")`: see docs/schedules.md.
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
"""Limits on the size of a schedule: forwards plus backwards, ranks, and stages per rank. Building is linear in the ops."""

_REGISTRY: dict[str, Generator] = {}  # filled while modules load, by `register` alone


def register(name: str) -> Callable[[Generator], Generator]:
    """Register a function `(ranks, micro_batches, **options) -> Schedule` under a name, for `build`."""

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
    """Build a schedule by name: gpipe, 1f1b (slack), interleaved (stages_per_rank), wave (waves), zb-h1, zb-v, or your own."""
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
    given = [f"{k}={v}" for k, v in options.items() if v != allowed[k]]
    return schedule if schedule.name else replace(schedule, name=" ".join([name, *given]))


_SIZES = ("ranks", "micro_batches")


def at_least(**values: tuple[Any, int]) -> None:
    """Raise unless every value is an integer of at least its minimum, given as name=(value, minimum)."""
    for name, (value, least) in values.items():
        if not schema.is_integer(value, least):
            raise ScheduleError(f"{name} = {value!r} must be a whole number of at least {least}; use {least}")


def check_size(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> None:
    """Raise if a schedule would have too many ops to be built within a minute or two."""
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
    """Placement of stage s on rank s mod P."""
    return tuple(s % ranks for s in range(ranks * stages_per_rank))


def zigzag(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Zig-zag placement: legs down and up the ranks. At a turn, neighbouring stages share a rank and need no message."""
    legs = [range(ranks) if leg % 2 == 0 else range(ranks - 1, -1, -1) for leg in range(stages_per_rank)]
    return tuple(rank for leg in legs for rank in leg)


# ---- one stage per rank ----


@register("gpipe")
def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards."""
    check_size(ranks, micro_batches)
    order = [_ops("F", r, range(micro_batches)) + _ops("B", r, range(micro_batches)) for r in range(ranks)]
    return _schedule(order, loop(ranks, 1), micro_batches)


@register("1f1b")
def one_f_one_b(ranks: int, micro_batches: int, slack: int = 0) -> Schedule:
    """Warm-up: one forward per rank behind this one (plus `slack`); then one forward, one backward in turn."""
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
    """1F1B with split backwards: rank r delays its W by r micro-batches, so that input gradients arrive earlier."""
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


# ---- several stages per rank ----


@register("interleaved")
def interleaved(ranks: int, micro_batches: int, stages_per_rank: int = 2) -> Schedule:
    """1F1B with several stages per rank: groups of micro-batches pass one leg of the loop, then the next."""
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
    """Groups of at least `size` micro-batches, as even as possible; a single group if there are fewer."""
    count = max(1, micro_batches // size)
    bounds = [micro_batches * i // count for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


@register("wave")
def wave(ranks: int, micro_batches: int, waves: int = 1, paper: bool = False) -> Schedule:
    """Hanayo's wave pipeline: `waves` waves, each a leg down the ranks and a leg up, with 2 · waves stages per rank.

    With B = P micro-batches this is the order of Hanayo's figures, optimal there for unsplit backwards. The paper gives no
    order for other B. With `paper = True`, groups of at most P micro-batches run one after another, each with its own bubble.
    By default, list scheduling with the same memory (P micro-batches) fills the bubbles with later micro-batches; the fastest
    order at T_B = 2 F is taken.
    """
    at_least(waves=(waves, 1))
    if 2 * waves > MOST_STAGES:
        raise ScheduleError(
            f"waves = {waves}: {2 * waves} stages on a rank are too many; use at most {MOST_STAGES // 2}"
        )
    check_size(ranks, micro_batches, 2 * waves)
    groups = [range(a, min(a + ranks, micro_batches)) for a in range(0, micro_batches, ranks)]
    order: Order = [[op for group in groups for op in _wave_group(ranks, waves, group, rank)] for rank in range(ranks)]
    placement = zigzag(ranks, 2 * waves)
    if micro_batches != ranks and not paper:
        order = _filled(order, placement, ranks, micro_batches)
    return _schedule(order, placement, micro_batches)


def _wave_group(ranks: int, waves: int, group: Sequence[int], rank: int) -> list[Op]:
    """Hanayo's order of one rank for a group of at most P micro-batches. Even legs go down the ranks, odd legs up."""
    stage = [leg * ranks + (rank if leg % 2 == 0 else ranks - 1 - rank) for leg in range(2 * waves)]

    def ops(kind: Kind, legs: Iterable[int]) -> list[Op]:
        return [Op(stage[leg], kind, m) for leg in legs for m in group]

    down, up = iter(ops("F", range(0, 2 * waves, 2))), ops("F", range(1, 2 * waves, 2))
    back_up, back_down = iter(ops("B", range(2 * waves - 1, 0, -2))), ops("B", range(2 * waves - 2, -1, -2))
    order = [next(down) for _ in range(min(ranks - rank, len(group)))]  # warm-up: until the first leg has turned
    for op in up:
        order.append(op)
        order.append(next(down, None) or next(back_up))
    for op in back_down:
        order.append(op)
        order.extend(op for op in [next(back_up, None)] if op)
    return order


def _filled(groups: Order, placement: tuple[int, ...], ranks: int, micro_batches: int) -> Order:
    """The fastest of the groups run one after another and some list schedules with unsplit backwards."""
    problem = Problem.in_integers(placement, ranks, micro_batches, Costs(backward=2), ranks)
    policies = [
        Policy.by_time(problem, forward=f, backward=b, lead=lead, reserve=reserve, whole=(0, micro_batches))
        for f, b, lead in ((0, 0, -1), (1, 1, 0), (1, 1, 0.5), (-2, -2, 0))
        for reserve in (1, 0)
    ]
    return _fastest(problem, [groups, *(list_schedule(problem, policy) for policy in policies)])


def _fastest(problem: Problem, orders: Iterable[Order]) -> Order:
    return min(orders, key=lambda order: (run(problem, order).makespan, max(peaks(problem, order))))


@register("zb-v")
def zb_v(ranks: int, micro_batches: int) -> Schedule:
    """One wave with split backwards: no bubble after the warm-up if F = I = W and B ≥ 2P - 1.

    The order is defined for 2P - 1 micro-batches or more; with fewer, the missing ones are left out of it.
    """
    total = max(2 * ranks - 1, micro_batches)
    if 8 * ranks**2 > MOST_OPS:
        raise ScheduleError(f"zb-v on {ranks} ranks is too large to be built; use at most {math.isqrt(MOST_OPS // 8)}")
    check_size(ranks, micro_batches, 2)
    order = []
    for rank in range(ranks):
        behind = ranks - 1 - rank
        phases = [
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
        order.append([op for op in _numbered(phases, stage) if op.micro_batch < micro_batches])
    return _schedule(order, zigzag(ranks, 2), micro_batches)


def _numbered(kinds: Iterable[str], stage: dict[str, int]) -> Iterable[Op]:
    """Ops from kinds and chunks such as "F0": each kind of each stage takes the micro-batches in order."""
    seen: dict[str, int] = {}
    for kind in kinds:
        seen[kind] = seen.get(kind, -1) + 1
        yield Op(stage[kind[1]], cast(Kind, kind[0]), seen[kind])


# ---- changing a schedule ----


def forward_only(placement: Sequence[int], micro_batches: int) -> Schedule:
    """A schedule of forwards only (evaluation), for any placement."""
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
    """The schedule with every B replaced by I directly followed by W."""

    def halves(op: Op) -> tuple[Op, ...]:
        return (op._replace(kind="I"), op._replace(kind="W")) if op.kind == "B" else (op,)

    return replace(schedule, order=tuple(tuple(h for op in ops for h in halves(op)) for ops in schedule.order))


def fused(schedule: Schedule) -> Schedule:
    """The schedule with every I and W replaced by one B, at the position of the I."""
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
    """`warm` forwards, then forwards and backwards alternating, then the remaining backwards."""
    pairs = zip(forwards[warm:], backwards, strict=False)
    return [*forwards[:warm], *(op for pair in pairs for op in pair), *backwards[len(forwards) - warm :]]


def _schedule(order: Order, placement: Sequence[int], micro_batches: int, name: str = "") -> Schedule:
    return Schedule(tuple(tuple(map(Op._make, ops)) for ops in order), tuple(placement), micro_batches, name)
