"""Exhaustive search: is there any schedule with at most a given number of ticks? Proof where a lower bound falls short.

All ops take one tick and messages none. Then some best schedule starts every op on a tick, and, micro-batches being alike,
lets every stage take them in order. So a state is how often each stage has run F, I and W, and all states after t ticks
are found from those after t - 1: every rank runs one of the ops that are ready, or nothing if only forwards are (a
forward takes memory and may be held back; I and W only ever help). States that cannot end in time are dropped.

Feasible for four ranks and some hundred ops, because the deadline and the memory cap leave few states alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

__all__ = ["pairings", "possible"]


def possible(stages_of: Sequence[Sequence[int]], micro_batches: int, cap: int, ticks: int) -> bool:
    """Whether ranks with these stages, holding at most `cap` activations of a stage each, can end within `ticks`."""
    stages = sum(map(len, stages_of))
    alive = {(0,) * (3 * stages)}
    for now in range(ticks):
        left = ticks - now - 1
        after: set[tuple[int, ...]] = set()
        for state in alive:
            choices = [_choices(state, held, stages, micro_batches, cap, left) for held in stages_of]
            for chosen in product(*choices):
                new = list(state)
                for op in chosen:
                    if op >= 0:
                        new[op] += 1
                key = tuple(new)
                if key not in after and _can_end(new, stages_of, stages, micro_batches, left):
                    after.add(key)
        if any(min(state[2 * stages :]) == micro_batches for state in after):
            return True
        if not after:
            return False
        alive = after
    return False


def _choices(
    state: tuple[int, ...], held: Sequence[int], stages: int, micro_batches: int, cap: int, left: int
) -> list[int]:
    """What one rank may do: indices into the state (F of s: s, I: stages + s, W: 2 stages + s), -1 for nothing."""
    out, used, work = [], 0, 0
    for s in held:
        f, i, w = state[s], state[stages + s], state[2 * stages + s]
        used += f - w
        work += 3 * micro_batches - f - i - w
        if i < f and (s == stages - 1 or state[stages + s + 1] > i):
            out.append(stages + s)
        if w < i:
            out.append(2 * stages + s)
    idle_helps = not out and work <= left
    if used < cap:
        out += [s for s in held if state[s] < micro_batches and (s == 0 or state[s - 1] > state[s])]
    return [*out, -1] if idle_helps else out


def _can_end(
    state: Sequence[int], stages_of: Sequence[Sequence[int]], stages: int, micro_batches: int, left: int
) -> bool:
    """Whether every rank's work, and the last micro-batch's way, fit in the ticks that are left."""
    for held in stages_of:
        if sum(3 * micro_batches - state[s] - state[stages + s] - state[2 * stages + s] for s in held) > left:
            return False
    forward = sum(state[s] == micro_batches for s in range(stages))
    back = sum(state[stages + s] == micro_batches for s in range(stages))
    last_w = state[2 * stages] == micro_batches
    return 2 * stages - forward - back + (not last_w) <= left


def pairings(stages: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """All ways to place stages on ranks two by two; which rank is which does not matter."""
    if not stages:
        yield []
        return
    first, *rest = stages
    for partner in rest:
        others = [s for s in rest if s != partner]
        for more in pairings(others):
            yield [(first, partner), *more]
