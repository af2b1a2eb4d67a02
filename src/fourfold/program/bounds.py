"""Lower bounds on the makespan of any schedule on a given placement.

Every rank waits for its first input and then does all its work; if its last op is an unsplit backward, the gradient must
still travel to stage 0. A single micro-batch must pass all stages and come back. A memory cap gives two more bounds. Until its
first backward can start, at `first(rank)`, a rank runs forwards only, and no more than the cap allows, so

    makespan >= first(rank) + work(rank) - (forward time that fits under the cap)

and every micro-batch occupies memory at least from its F through all later stages and back, so that memory times time gives

    makespan >= first input of the rank + micro-batches · (memory · minimum lifetime, summed over its stages) / cap

Times are in ticks of the problem.
"""

from __future__ import annotations

from typing import Any

from fourfold.program.engine import Problem

__all__ = ["forward_bound", "lower_bound"]


def lower_bound(problem: Problem, split: bool | None = None) -> Any:
    """Lower bound on the makespan of any order; `split`: whether backwards are split (None: some may be)."""
    c, stages, last = problem.costs, range(problem.stages), problem.stages - 1
    halves = [i + w for i, w in zip(c.input_grad, c.weight_grad, strict=True)]
    if split is None:
        back = [min(c.input_grad[s], c.backward[s]) for s in stages]
        work = [c.forward[s] + min(halves[s], c.backward[s]) for s in stages]
    else:
        back = list(c.input_grad if split else c.backward)
        work = [c.forward[s] + (halves[s] if split else c.backward[s]) for s in stages]
    first = _first_inputs(problem)
    home = [0] * problem.stages  # from the end of a stage's backward to the end of stage 0's
    for s in range(last):
        home[s + 1] = home[s] + c.up[s] + back[s]
    lone = first[last] + c.forward[last] + back[last] + home[last]  # one micro-batch, there and back
    returns = [lone - home[s] - back[s] for s in stages]  # when a stage's first backward can start

    bounds = [lone]
    for held in filter(None, problem.stages_of):
        all_work = problem.micro_batches * sum(work[s] for s in held)
        bounds.append(first[held[0]] + all_work + (home[held[0]] if split is False else 0))
        if problem.cap:
            bounds.append(returns[held[-1]] + all_work - _forward_time_within(problem, held))
            occupied = sum(
                c.activation[s] * (returns[s] - first[s]) + _backward_memory(problem, s, split) for s in held
            )
            bounds.append(first[held[0]] + -(-problem.micro_batches * occupied // problem.cap))
    return max(bounds)


def forward_bound(problem: Problem) -> Any:
    """Lower bound for forward only: a rank's first input, its work, and the remaining path of its last output."""
    c, last = problem.costs, problem.stages - 1
    first = _first_inputs(problem)
    lone = first[last] + c.forward[last]
    bounds = [lone]
    for held in filter(None, problem.stages_of):
        rest = lone - first[held[-1]] - c.forward[held[-1]]
        bounds.append(first[held[0]] + problem.micro_batches * sum(c.forward[s] for s in held) + rest)
    return max(bounds)


def _first_inputs(problem: Problem) -> list[Any]:
    """Earliest arrival of the input of every stage's first F."""
    c = problem.costs
    first = [0] * problem.stages
    for s in range(problem.stages - 1):
        first[s + 1] = first[s] + c.forward[s] + c.down[s]
    return first


def _backward_memory(problem: Problem, stage: int, split: bool | None) -> Any:
    """Lower bound on memory · time of one micro-batch during the backward of a stage."""
    c = problem.costs
    whole = c.activation[stage] * c.backward[stage]
    halves = c.activation[stage] * c.input_grad[stage] + c.kept[stage] * c.weight_grad[stage]
    return min(whole, halves) if split is None else halves if split else whole


def _forward_time_within(problem: Problem, held: tuple[int, ...]) -> Any:
    """Upper bound on how long a rank can run forwards before it must free memory."""
    c, cap = problem.costs, problem.cap
    assert cap is not None
    sizes = {c.activation[s] for s in held}
    if 0 in sizes:
        return problem.micro_batches * sum(c.forward[s] for s in held)
    if len(sizes) == 1:
        return cap // sizes.pop() * max(c.forward[s] for s in held)
    densest = max(held, key=lambda s: c.forward[s] / c.activation[s])
    return -(-cap * c.forward[densest] // c.activation[densest])
