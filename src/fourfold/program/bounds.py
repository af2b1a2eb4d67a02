"""Lower bounds: what no schedule on a placement can beat.

Every rank must wait for its first input, then do all its work; and, where its last op is a backward that others wait for,
the gradient must still travel to stage 0. A lone micro-batch must pass all stages and come back. With a memory cap there
is more: until its first backward can start, at `first(rank)`, a rank runs forwards only, and no more than the cap holds, so

    makespan >= first(rank) + work(rank) - (forward time that the cap holds)

Times are in the ticks of the problem.
"""

from __future__ import annotations

from typing import Any

from fourfold.program.engine import Problem

__all__ = ["lower_bound"]


def lower_bound(problem: Problem, *, split: bool | None = None, forward_only: bool = False) -> Any:
    """The least makespan of any order of this problem; `split` says whether backwards are split (None: either)."""
    c, last = problem.costs, problem.stages - 1
    stages = range(problem.stages)
    if forward_only:
        first = [c.forward[s] for s in stages]
        whole = first
    elif split is False:
        first = [c.backward[s] for s in stages]
        whole = [c.forward[s] + c.backward[s] for s in stages]
    else:
        halves = [c.input_grad[s] + c.weight_grad[s] for s in stages]
        first = [min(c.input_grad[s], c.backward[s]) for s in stages]
        whole = [c.forward[s] + (halves[s] if split else min(halves[s], c.backward[s])) for s in stages]

    to = [0] * problem.stages  # from the start to the input of F of a stage
    for s in range(last):
        to[s + 1] = to[s] + c.forward[s] + c.down[s]
    after = [0] * problem.stages  # from the end of a backward of a stage to the end of stage 0's
    for s in range(last):
        after[s + 1] = after[s] + c.up[s] + first[s]
    there = to[last] + c.forward[last]
    if forward_only:
        rest = [there - to[s] - c.forward[s] for s in stages]
        ends = [min(rest[s] for s in held) for held in problem.stages_of if held]
    else:
        ends = [after[held[0]] if split is False else 0 for held in problem.stages_of if held]

    bounds = [there if forward_only else there + first[last] + after[last]]
    for held, end in zip((h for h in problem.stages_of if h), ends, strict=True):
        work = problem.micro_batches * sum(whole[s] for s in held)
        bounds.append(to[held[0]] + work + end)
        if problem.cap is not None and not forward_only:
            begins = there + (after[last] - after[held[-1]] + first[last] - first[held[-1]] if held[-1] < last else 0)
            bounds.append(begins + work - _forward_time_within(problem, held))
    return max(bounds)


def _forward_time_within(problem: Problem, held: tuple[int, ...]) -> Any:
    """At most how long a rank can run forwards before it must free memory."""
    c = problem.costs
    assert problem.cap is not None
    if any(c.activation[s] == 0 for s in held):
        return problem.micro_batches * sum(c.forward[s] for s in held)
    densest = max(held, key=lambda s: c.forward[s] / c.activation[s])
    smallest = min(c.activation[s] for s in held)
    if all(c.activation[s] == smallest for s in held):  # whole micro-batches of one size: no fractions
        return problem.cap // smallest * max(c.forward[s] for s in held)
    return -(-problem.cap * c.forward[densest] // c.activation[densest])
