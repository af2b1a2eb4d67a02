"""List scheduling: every idle rank runs the ready op of highest priority that memory admits.

**Priority.** An op's key is `key[kind][stage] + micro_batch · period`; the smallest runs first. W runs when nothing else
can (with `eager`, by its key like the others). With `patience`, a rank waits up to that long for a more urgent op.

[Note: nested reserves]
A memory cap can deadlock a schedule: ranks fill up with new micro-batches, and older ones, which alone could free memory,
find no room on the ranks they still have to visit. A check local to each rank prevents this. Let a rank hold stages
s1 < s2 < ... < sv, and let reserve(s) be at least one micro-batch of stage s. F of stage si is admitted if afterwards, for
every j >= i,

    held(s1) + ... + held(sj)  <=  cap - reserve(s(j+1)) - ... - reserve(sv)

so early stages never use memory reserved for later ones, while later stages may use all of it.
Claim: no deadlock. By induction from the last stage down, every micro-batch that has finished stage s - 1 finishes F of
stage s: micro-batches beyond stage s finish their forward (induction), then their backward, which needs no admission, and
free their memory. The rest on this rank belongs to stages before s, so reserve(s) is free, enough for this F.

Reserves also shape the steady state: in proportion to how long each stage must hold a micro-batch, they keep early stages
from using too much memory. This matters more than refined priorities when messages take time.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

from fourfold.program.engine import Problem

__all__ = ["Policy", "first_times", "lifetimes", "list_schedule", "reserves"]


@dataclass(frozen=True)
class Policy:
    """Priorities of the list scheduler. Keys and patience are in ticks; one key per stage."""

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    """Also used for B, where the backward is not split."""
    weight_grad: tuple[float, ...]
    period: float
    """Added to a key for each micro-batch."""
    reserve: tuple[int, ...]
    """By stage: memory that earlier stages of the same rank must leave free for it."""
    whole: tuple[int, int] = (0, 0)
    """Micro-batches [start, stop) run B; the others run I and W."""
    eager: bool = False
    """Whether W competes by its key; otherwise it only fills gaps."""
    patience: float = 0

    @classmethod
    def by_time(
        cls,
        problem: Problem,
        *,
        forward: float,
        backward: float,
        lead: float,
        reserve: float,
        whole: tuple[int, int] = (0, 0),
        eager: bool = False,
        weight: float = 0,
        weight_lead: float = 1,
        patience: float = 0,
    ) -> Policy:
        """A policy from a few numbers: keys are multiples of the times at which a single micro-batch would pass.

        `forward`, `backward`, `weight` multiply those times (1: earliest first, -1: deepest first). The leads shift
        backwards relative to forwards (in durations of that single pass; -1: backwards first). `reserve` is a fraction of
        `reserves`, `patience` a fraction of the shortest W.
        """
        first_f, first_b, length = first_times(problem)
        return cls(
            forward=tuple(forward * t for t in first_f),
            input_grad=tuple(lead * length + backward * (t - first_b[-1]) for t in first_b),
            weight_grad=tuple(weight_lead * length + weight * (t - first_b[-1]) for t in first_b),
            period=problem.period,
            reserve=reserves(problem, reserve),
            whole=whole,
            eager=eager,
            patience=patience * min(problem.costs.weight_grad),
        )


def list_schedule(problem: Problem, policy: Policy) -> list[list[tuple[int, str, int]]]:
    """The order that results when each rank always runs its most urgent admissible op."""
    place, c, total = problem.placement, problem.costs, problem.micro_batches
    down, up, taken = c.down, c.up, c.activation
    limit, period = _limits(problem, policy), policy.period
    eager, patience, last = policy.eager, policy.patience, len(place) - 1
    begin, stop = policy.whole
    first_w = stop if begin == 0 else 0

    # Stages process micro-batches in order, so per stage only the next F, I and W matter: their keys and ready times.
    never = float("inf")
    arrived_f: list[list[Any]] = [[0 if s == 0 else never] * total + [never] for s in range(len(place))]
    arrived_b: list[list[Any]] = [[never] * (total + 1) for _ in place]
    ready_f, ready_b = [row[0] for row in arrived_f], [row[0] for row in arrived_b]
    key_f, key_b = list(policy.forward), list(policy.input_grad)
    key_w = [key + first_w * period for key in policy.weight_grad]
    next_f, next_b, next_w = [0] * len(place), [0] * len(place), [first_w] * len(place)
    held: list[Any] = [0] * len(place)
    used: list[Any] = [0] * problem.ranks
    busy_until: list[Any] = [0] * problem.ranks
    deep_first = [stages[::-1] for stages in problem.stages_of]
    order: list[list[tuple[int, str, int]]] = [[] for _ in range(problem.ranks)]
    events: list[tuple[Any, int]] = [(0, rank) for rank in range(problem.ranks)]
    push, pop = heapq.heappush, heapq.heappop
    while events:
        now, rank = pop(events)
        if busy_until[rank] > now:
            continue
        kind, s, best, start = "", 0, never, now
        horizon, room, below = now + patience, never, used[rank]
        for t in deep_first[rank]:
            left = limit[t] - below
            if left < room:
                room = left  # the minimum over all limits from this stage on
            below -= held[t]
            ready = ready_b[t]
            if ready <= horizon and key_b[t] < best:
                kind, s, best, start = "I", t, key_b[t], ready
            ready = ready_f[t]
            if ready <= horizon and key_f[t] < best and taken[t] <= room:
                kind, s, best, start = "F", t, key_f[t], ready
        if eager or not kind:
            for t in deep_first[rank]:
                if next_w[t] < next_b[t] and key_w[t] < best:
                    kind, s, best, start = "W", t, key_w[t], now
        if not kind:
            continue  # the next arrival wakes this rank
        if start > now:
            push(events, (start, rank))
            continue
        if kind == "F":
            m = next_f[s]
            end = now + c.forward[s]
            next_f[s] = m + 1
            key_f[s] += period
            ready_f[s] = arrived_f[s][m + 1]
            held[s] += taken[s]
            used[rank] += taken[s]
            if s == last:
                arrived_b[s][m] = end
                if next_b[s] == m:
                    ready_b[s] = end
            else:
                to, arrival = place[s + 1], end + down[s]
                arrived_f[s + 1][m] = arrival
                if next_f[s + 1] == m:
                    ready_f[s + 1] = arrival
                if to != rank:
                    push(events, (arrival, to))
        elif kind == "W":
            m = next_w[s]
            end = now + c.weight_grad[s]
            next_w[s] = stop if m + 1 == begin else m + 1
            key_w[s] += (next_w[s] - m) * period
            held[s] -= c.kept[s]
            used[rank] -= c.kept[s]
        else:
            m = next_b[s]
            if begin <= m < stop:
                kind, end, freed = "B", now + c.backward[s], taken[s]
            else:
                end, freed = now + c.input_grad[s], taken[s] - c.kept[s]
            next_b[s] = m + 1
            key_b[s] += period
            ready_b[s] = arrived_b[s][m + 1]
            held[s] -= freed
            used[rank] -= freed
            if s:
                to, arrival = place[s - 1], end + up[s - 1]
                arrived_b[s - 1][m] = arrival
                if next_b[s - 1] == m:
                    ready_b[s - 1] = arrival
                if to != rank:
                    push(events, (arrival, to))
        order[rank].append((s, kind, m))
        busy_until[rank] = end
        push(events, (end, rank))
    assert min(next_b) == total, "nested reserves cannot deadlock"
    return order


def _limits(problem: Problem, policy: Policy) -> list[Any]:
    """limit[s]: the memory that the stages of a rank up to s may use together."""
    limit: list[Any] = [float("inf")] * problem.stages
    if problem.cap is None:
        return limit
    for stages in problem.stages_of:
        left: Any = problem.cap
        for s in reversed(stages):
            limit[s] = left
            left -= policy.reserve[s]
    return limit


def lifetimes(problem: Problem) -> list[Any]:
    """Minimum time that every stage holds a micro-batch: from its F to the last stage and back, then its W."""
    c, path = problem.costs, 0
    out = [0] * problem.stages
    for s in reversed(range(problem.stages)):
        path += c.forward[s] + c.input_grad[s] + (c.down[s] + c.up[s] if s < problem.stages - 1 else 0)
        out[s] = path + c.weight_grad[s]
    return out


def reserves(problem: Problem, fraction: float) -> tuple[int, ...]:
    """Reserves in proportion to the stages' lifetimes: `fraction` of the cap divided among a rank's stages.

    Each is an integer number of micro-batches, at least one; together they do not exceed the cap.
    """
    if problem.cap is None:
        return (0,) * problem.stages
    out = [0] * problem.stages
    life, size = lifetimes(problem), problem.costs.activation
    for stages in problem.stages_of:
        whole = sum(life[s] * size[s] for s in stages) or 1
        share = {s: fraction * problem.cap * life[s] / whole for s in stages}  # in micro-batches
        count = {s: max(1, int(share[s])) for s in stages}
        left = problem.cap - sum(count[s] * size[s] for s in stages)
        for s in sorted(stages, key=lambda s: count[s] - share[s]):  # largest rounding loss first
            if count[s] < share[s] and size[s] <= left:
                count[s] += 1
                left -= size[s]
        while left < 0:
            s = max(stages, key=lambda s: (count[s] > 1, count[s] - share[s]))
            count[s] -= 1
            left += size[s]
        for s in stages:
            out[s] = count[s] * size[s]
    return tuple(out)


def first_times(problem: Problem) -> tuple[list[Any], list[Any], Any]:
    """Start times of F and I of every stage for a single micro-batch, and the end of its last I."""
    c, last, t = problem.costs, problem.stages - 1, 0
    first_f, first_b = [0] * problem.stages, [0] * problem.stages
    for s in range(problem.stages):
        first_f[s] = t
        t += c.forward[s] + (c.down[s] if s < last else 0)
    for s in reversed(range(problem.stages)):
        first_b[s] = t
        t += c.input_grad[s] + (c.up[s - 1] if s else 0)
    return first_f, first_b, t
