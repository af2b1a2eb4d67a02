"""Checks, before anything runs, that a schedule or a set of programs completes under any timing, within memory.

For a schedule: every op runs once, on its rank; F before its backward, I before its W; the last stage processes micro-batches
in order (losses come out in that order); no deadlock; memory within the cap.

For programs, in addition (see `program_checks`): messages and collectives.

Errors are `ScheduleError`s that name the op or instruction, the rank and the reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from fourfold.errors import ScheduleError
from fourfold.program.costs import Costs, Number
from fourfold.program.engine import OpTimes, Problem, levels, peaks, run
from fourfold.program.instructions import Programs
from fourfold.program.ops import Op, Schedule
from fourfold.program.program_checks import validate_programs

__all__ = ["check_cap", "check_ops", "explain_stuck", "validate", "validate_schedule"]


def validate(what: Schedule | Programs, memory_cap: Number | None = None, costs: Costs | None = None) -> None:
    """Raise ScheduleError unless a schedule, or a set of programs, can run within the memory cap.

    The cap limits a rank's activations: in micro-batches of one rank, or, with `costs`, in the unit of their `activation`.
    """
    if isinstance(what, Schedule):
        validate_schedule(what, memory_cap, costs)
    else:
        schedule = validate_programs(what)
        validate_schedule(schedule, memory_cap, costs)


def validate_schedule(schedule: Schedule, memory_cap: Number | None = None, costs: Costs | None = None) -> None:
    """`validate` for schedules."""
    check_ops(schedule)
    _check_last_stage(schedule)
    problem = Problem.of(schedule.placement, schedule.ranks, schedule.micro_batches, costs or Costs())
    times = run(problem, schedule.order)
    if times.stuck:
        raise ScheduleError(explain_stuck(schedule.placement, schedule.order, times))
    if memory_cap is not None and not schedule.forward_only:
        check_cap(problem, memory_cap)
        for rank, ops in enumerate(schedule.order):
            for op, held in zip(ops, levels(problem, ops), strict=True):
                if held > memory_cap * (1 + 1e-9):
                    peak = float(max(peaks(problem, schedule.order)))
                    raise ScheduleError(
                        f"rank {rank}, op {op}: holds {float(held):g}, the cap is {float(memory_cap):g}; "
                        f"use a cap of at least {peak:g} or synthesize for this one"
                    )


def check_cap(problem: Problem, memory_cap: Number) -> None:
    """Raise unless the cap admits at least one micro-batch on every rank."""
    for rank, stages in enumerate(problem.stages_of):
        least = sum(problem.costs.activation[s] for s in stages)
        if memory_cap * (1 + 1e-9) < least:
            raise ScheduleError(
                f"memory_cap = {float(memory_cap):g} is below one micro-batch on rank {rank}; "
                f"use at least {float(least):g}"
            )


MOST_MISSING = 1_000_000
"""Ops that may be missing for the first missing one to be named."""
_BIT = {"F": 1, "B": 2, "I": 4, "W": 8}
_NEEDS = {"F": 0, "B": 1, "I": 1, "W": 5}


def check_ops(schedule: Schedule) -> None:
    """Check that every op runs once, on its rank, after the ops of its own stage and micro-batch that it needs."""
    place, total, ranks = schedule.placement, schedule.micro_batches, schedule.ranks
    stages = len(place)
    if not stages or not ranks or total < 1:
        raise ScheduleError(f"a schedule has ranks, stages and micro-batches; found {ranks}, {stages}, {total}")
    for stage, rank in enumerate(place):
        if not 0 <= rank < ranks:
            raise ScheduleError(f"stage {stage} is placed on rank {rank}; ranks are 0 to {ranks - 1}")
    found = sum(map(len, schedule.order))
    if stages * total > found + MOST_MISSING:
        raise ScheduleError(
            f"{stages} stages · {total} micro-batches are {stages * total} forwards; the ranks have {found} ops in all"
        )
    done = bytearray(stages * total)  # by stage and micro-batch: bits of the kinds that ran
    for rank, ops in enumerate(schedule.order):
        for op in ops:
            stage, kind, m = op
            if not (0 <= stage < stages and 0 <= m < total and kind in _BIT):
                raise ScheduleError(
                    f"rank {rank}, op {Op(*op)}: stages are 0 to {stages - 1}, micro-batches 0 to {total - 1}, "
                    "kinds F B I W"
                )
            if place[stage] != rank:
                raise ScheduleError(f"rank {rank}, op {Op(*op)}: stage {stage} is on rank {place[stage]}")
            at = stage * total + m
            have = done[at]
            if have & _BIT[kind]:
                raise ScheduleError(f"rank {rank}, op {Op(*op)}: it runs twice; every op runs once")
            if have & _NEEDS[kind] != _NEEDS[kind]:
                first = Op(stage, "I" if kind == "W" and have & 1 else "F", m)
                raise ScheduleError(f"rank {rank}, op {Op(*op)}: it comes before {first}, which it needs")
            done[at] = have | _BIT[kind]
    complete = {1} if schedule.forward_only else {3, 13}  # F; F B; F I W
    if not complete.issuperset(done):
        at = next(i for i, bits in enumerate(done) if bits not in complete)
        raise ScheduleError(_incomplete(place, *divmod(at, total), done[at]))


def _incomplete(place: Sequence[int], stage: int, m: int, bits: int) -> str:
    where = f"rank {place[stage]}, stage {stage}, micro-batch {m}"
    if not bits & 1:
        return f"{where}: {Op(stage, 'F', m)} is missing"
    if bits & 2:
        return f"{where}: has both B and {'I' if bits & 4 else 'W'}; a backward is either B, or I and W"
    missing = f"{Op(stage, 'W', m)} is missing" if bits & 4 else f"the backward is missing: {Op(stage, 'B', m)}"
    return f"{where}: {missing}"


def _check_last_stage(schedule: Schedule) -> None:
    last = schedule.stages - 1
    expected = 0
    for op in schedule.order[schedule.placement[last]]:
        if op.stage == last and op.kind == "F":
            if op.micro_batch != expected:
                raise ScheduleError(
                    f"rank {schedule.placement[last]}, op {op}: the last stage takes micro-batches in order, "
                    f"{Op(last, 'F', expected)} comes next"
                )
            expected += 1


def explain_stuck(placement: Sequence[int], order: Sequence[Sequence[Op]], times: OpTimes) -> str:
    """Describe the cycle of ranks that wait for each other."""
    rank = next(r for r, ends in enumerate(times.ends) if len(ends) < len(order[r]))
    path: list[int] = []
    lines: dict[int, str] = {}
    while rank not in lines:
        op = order[rank][len(times.ends[rank])]
        offset, kind = (-1, "F") if op.kind == "F" else (1, "backward")
        to = placement[op.stage + offset]
        awaited = f"{kind} of stage {op.stage + offset}, micro-batch {op.micro_batch}"
        lines[rank] = f"rank {rank} at {op} waits for the {awaited}, on rank {to}"
        path.append(rank)
        rank = to
    return f"deadlock: {'; '.join(lines[r] for r in path[path.index(rank) :])}"
