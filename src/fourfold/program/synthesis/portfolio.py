"""Portfolio search for an order, for one number of stages per rank.

**Seeds**: the hand-written schedules. **List schedules** with nested reserves (`greedy`): first a few policies that are often
best, then random ones and mutations of the best so far. They also run with other costs (messages free, or twice as expensive):
greedy choices are short-sighted, and an order found for other costs is often better under the true ones. **Modulo
schedules** (`modulo`). Finally the best is **fused** and **improved** (`improve`).

If an unsplit backward is cheaper than I plus W (one instruction less, or measured so), the search also chooses which backwards
to split; otherwise all are split, which can only help.

For many micro-batches the search runs on three to four times as many micro-batches as ranks, and the periodic body of the
result (`periodic`) is repeated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

from fourfold.program.bounds import lower_bound
from fourfold.program.costs import Costs, Number
from fourfold.program.engine import Order, Problem, peaks, run
from fourfold.program.greedy import Policy, list_schedule
from fourfold.program.ops import Op, Schedule
from fourfold.program.partition import Layer, partition, stage_costs
from fourfold.program.schedules import build, fused, loop, split, zigzag
from fourfold.program.synthesis.improve import fuse, improve
from fourfold.program.synthesis.modulo import modulo_schedule
from fourfold.program.synthesis.periodic import find_body
from fourfold.program.validator import check_cap

__all__ = ["PLACEMENTS", "Arena", "Portfolio", "ScheduleCandidate", "SearchRequest"]

PLACEMENTS: dict[str, Callable[[int, int], tuple[int, ...]]] = {"loop": loop, "wave": zigzag}

_STARTERS = (
    # forward, backward, lead, patience
    (1, 1, 0, 0),
    (1, 1, 0, 0.5),
    (1, 1, 0.5, 0),
    (-1, -1, -1, 0),
    (-2, -2, 0, 0),
    (-2, -2, 1, 0.5),
)


@dataclass(frozen=True)
class SearchRequest:
    """The arguments of a search."""

    ranks: int
    micro_batches: int
    stages_per_rank: int
    placements: tuple[str, ...]
    costs: Costs
    memory_cap: Number | None
    layers: tuple[Layer, ...] | None
    split_backward: Literal["auto"] | bool

    def arena(self, name: str, micro_batches: int) -> Arena:
        """The problem of one placement with balanced layers, for a number of micro-batches."""
        placement = PLACEMENTS[name](self.ranks, self.stages_per_rank)
        costs, counts = self.costs, None
        if self.layers is not None:
            counts = partition([layer.work for layer in self.layers], placement)
            costs = stage_costs(self.layers, counts, self.costs)
        if self.memory_cap is not None:
            check_cap(Problem.of(placement, self.ranks, micro_batches, costs), self.memory_cap)
        problem = Problem.in_integers(placement, self.ranks, micro_batches, costs, self.memory_cap)
        return Arena(name, problem, costs, counts, lower_bound(problem))


@dataclass
class Arena:
    """One placement and its problem, in integers."""

    name: str
    problem: Problem
    costs: Costs
    layers: tuple[int, ...] | None
    bound: Any
    """Lower bound on the makespan, in ticks."""

    def __post_init__(self) -> None:
        c = self.problem.costs
        third = tuple((f + i + w) // 3 for f, i, w in zip(c.forward, c.input_grad, c.weight_grad, strict=True))
        none = (0,) * len(c.down)
        self.variants = {
            "true": self.problem,
            "even": self._with(forward=third, input_grad=third, weight_grad=third, down=none, up=none),
        }
        """The problem with its true costs, and with others: all ops equal; messages free; messages twice as expensive."""
        if any(c.down):
            self.variants["free"] = self._with(down=none, up=none)
            self.variants["double"] = self._with(down=tuple(2 * x for x in c.down), up=tuple(2 * x for x in c.up))

    def _with(self, **tables: Any) -> Problem:
        return replace(self.problem, costs=replace(self.problem.costs, **tables))

    def value(self, ticks: Any) -> Fraction:
        """Ticks in the caller's unit of time, comparable between arenas."""
        return Fraction(ticks) * Fraction(self.problem.tick)


@dataclass
class ScheduleCandidate:
    """An order and its makespan."""

    makespan: Any
    order: Order
    arena: Arena
    origin: str
    policy: Policy | None = None
    """The list scheduler's policy that led to it, if any."""
    variant: str = "true"
    """The cost variant on which the policy was run."""

    @property
    def time(self) -> Fraction:
        return self.arena.value(self.makespan)

    @property
    def kinds(self) -> set[str]:
        return {op[1] for op in self.order[0]}

    def schedule(self, name: str) -> Schedule:
        order = tuple(tuple(map(Op._make, ops)) for ops in self.order)
        return Schedule(order, self.arena.problem.placement, self.arena.problem.micro_batches, name)


class Portfolio:
    """The search for one number of stages per rank."""

    def __init__(self, request: SearchRequest, budget: int, seed: int):
        self.request, self.budget, self.timed = request, budget, 0
        ranks, micro_batches = request.ranks, request.micro_batches
        self.rng = random.Random(f"{seed} {ranks} {micro_batches} {request.stages_per_rank}")
        whole_arenas = [request.arena(name, micro_batches) for name in request.placements]
        self.bound = min(arena.value(arena.bound) for arena in whole_arenas)
        """Lower bound for this number of stages."""
        # Beyond four rounds of micro-batches the steady state repeats; only whole rounds are left out.
        self.searched = 3 * ranks + micro_batches % ranks if micro_batches > 4 * ranks else micro_batches
        cheaper_whole = request.costs.instruction > 0 or request.costs.backward is not None
        self.choose_split = request.split_backward == "auto" and cheaper_whole
        self.best: list[ScheduleCandidate] = []  # the fastest per arena and set of op kinds

    def search(self) -> tuple[ScheduleCandidate, Number, Number]:
        """The best candidate for all micro-batches, its makespan and its lower bound."""
        arenas = [self.request.arena(name, self.searched) for name in self.request.placements]
        for arena in arenas:
            self._try_hand_written(arena)
            for policy in self._starters(arena):
                self._try_policy(arena, policy, "true")
            for variant in ("true", "even"):
                self._try_modulo(arena, variant, unroll=1, delay=0, split=self.request.split_backward is not False)
        self._evolve(int(self.budget * 0.75))
        if self.choose_split:
            winner = self._winner()
            self._consider(winner.arena, fuse(winner.arena.problem, winner.order), f"{winner.origin}, fused")
        winner = self._winner()
        if not self._proven(winner):
            order, tried = improve(winner.arena.problem, winner.order, self.rng, max(0, self.budget - self.timed))
            self.timed += tried
            self._consider(winner.arena, order, f"{winner.origin}, improved")
        if self.searched < self.request.micro_batches:
            self._extend()
        winner = self._winner()
        problem, costs = winner.arena.problem, winner.arena.costs
        exact = Problem.of(problem.placement, problem.ranks, problem.micro_batches, costs)
        bound = winner.arena.value(winner.arena.bound)
        makespan = run(exact, winner.order).makespan * exact.tick
        return winner, makespan, float(bound) if isinstance(makespan, float) else bound

    # ---- candidates ----

    def _consider(
        self, arena: Arena, order: Order, origin: str, policy: Policy | None = None, variant: str = "true"
    ) -> None:
        """Time an order; keep it if it fits the cap and is the fastest of its arena and op kinds."""
        problem = arena.problem
        self.timed += 1
        if policy is None and problem.cap is not None and max(peaks(problem, order)) > problem.cap:
            return  # list schedules respect the cap by construction
        times = run(problem, order)
        if times.stuck:
            return
        new = ScheduleCandidate(times.makespan, order, arena, origin, policy, variant)
        for i, old in enumerate(self.best):
            if old.arena is arena and old.kinds == new.kinds:
                if policy is None:  # later mutations start from the best policy
                    new.policy, new.variant = old.policy, old.variant
                # Equally good policies replace each other: the search drifts over plateaus.
                if new.makespan < old.makespan or (policy is not None and new.makespan == old.makespan):
                    self.best[i] = new
                return
        self.best.append(new)

    def _winner(self) -> ScheduleCandidate:
        return min(self.best, key=lambda candidate: candidate.time)

    def _proven(self, candidate: ScheduleCandidate) -> bool:
        """Whether it meets its lower bound, and so is optimal on its placement."""
        return bool(candidate.makespan <= candidate.arena.bound)

    def _try_hand_written(self, arena: Arena) -> None:
        for name, options in _hand_written(arena.name, self.request.stages_per_rank):
            schedule = build(name, self.request.ranks, arena.problem.micro_batches, **options)
            if self.request.split_backward is True:
                schedule = split(schedule)
            elif self.request.split_backward is False:
                schedule = fused(schedule)
            self._consider(arena, schedule.order, schedule.name)

    def _try_policy(self, arena: Arena, policy: Policy, variant: str) -> None:
        self._consider(arena, list_schedule(arena.variants[variant], policy), "greedy", policy, variant)

    def _try_modulo(self, arena: Arena, variant: str, unroll: int, delay: float, split: bool) -> None:
        order = modulo_schedule(arena.variants[variant], self.rng, unroll=unroll, delay=delay, split=split)
        if order is None:
            self.timed += 1
        else:
            self._consider(arena, order, "modulo")

    def _starters(self, arena: Arena) -> Iterator[Policy]:
        """Policies that are often best: earliest or deepest first, with full reserves."""
        for whole in self._ways(arena.problem.micro_batches):
            for forward, backward, lead, patience in _STARTERS:
                yield Policy.by_time(
                    arena.problem,
                    forward=forward,
                    backward=backward,
                    lead=lead,
                    reserve=1,
                    whole=whole,
                    patience=patience,
                )

    def _ways(self, micro_batches: int) -> list[tuple[int, int]]:
        """Ranges of micro-batches whose backward is not split: none or all; if the search may choose, also all but the last."""
        if self.choose_split:
            return [(0, 0), (0, micro_batches), (0, max(0, micro_batches - self.request.ranks))]
        return [(0, micro_batches) if self.request.split_backward is False else (0, 0)]

    # ---- evolution ----

    def _evolve(self, until: int) -> None:
        """Try random policies, mutations of the best ones and modulo schedules, mostly on the best arena."""
        rng = self.rng
        while self.timed < until:
            ranking = sorted(self.best, key=lambda candidate: candidate.time)
            if self._proven(ranking[0]):
                return
            parent = ranking[1 if self.timed % 4 == 0 and len(ranking) > 1 else 0]
            arena = parent.arena
            variant = rng.choice(list(arena.variants))
            draw = rng.random()
            if draw < 0.12:
                kind = variant if rng.random() < 0.5 else "even"
                unroll, delay = rng.choice((1, 1, 2, 2, 3, 4)), rng.choice((0, 0, 0.05, 0.1, 0.2, 0.4))
                self._try_modulo(arena, kind, unroll, delay, split="I" in parent.kinds)
            elif draw < 0.45 or parent.policy is None:
                self._try_policy(arena, self._random_policy(arena.problem), variant)
            else:
                keep = parent.variant if rng.random() < 0.8 else variant
                self._try_policy(arena, self._mutated(arena.problem, parent.policy), keep)

    def _random_policy(self, problem: Problem) -> Policy:
        rng, count = self.rng, problem.micro_batches
        whole = rng.choice(self._ways(count))
        if self.choose_split and rng.random() < 0.5:
            ranks = self.request.ranks
            ramps = (0, ranks // 2, ranks, 3 * ranks // 2, 2 * ranks)
            begin = min(rng.choice(ramps), count)
            whole = (begin, max(begin, count - rng.choice(ramps)))
        return Policy.by_time(
            problem,
            forward=rng.choice((-2, -1, -0.5, 0, 0.5, 1, 2)),
            backward=rng.choice((-2, -1, -0.5, 0, 0.5, 1, 2)),
            lead=rng.choice((-1, 0, 0.25, 0.5, 0.75, 1, 1.5)),
            reserve=rng.choice((1, 1, 1, 0.75, 0.5, 0)),
            whole=whole,
            eager=rng.random() < 0.3,
            weight=rng.choice((-1, 0, 1)),
            weight_lead=rng.choice((0, 0.5, 1, 1.5, 2)),
            patience=rng.choice((0, 0, 0.25, 0.5, 0.75)),
        )

    def _mutated(self, problem: Problem, policy: Policy) -> Policy:
        """A copy of a policy with some reserves, some keys or one field changed."""
        rng = self.rng
        draw = rng.random()
        if draw < 0.6 and problem.cap is not None:
            return replace(policy, reserve=self._nudged(problem, policy.reserve))
        if draw < 0.8:
            other = self._random_policy(problem)
            trait = rng.choice(("forward", "input_grad", "weight_grad", "whole", "eager", "patience"))
            return replace(policy, **{trait: getattr(other, trait)})
        amount = problem.period * rng.random()

        def shaken(keys: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(key + amount * rng.choice((0, 0, 0, -1, 1)) for key in keys)

        return replace(policy, forward=shaken(policy.forward), input_grad=shaken(policy.input_grad))

    def _nudged(self, problem: Problem, reserve: Sequence[int]) -> tuple[int, ...]:
        """Reserves with one micro-batch more or less for some stages; at least one each, together within the cap."""
        rng, size = self.rng, problem.costs.activation
        assert problem.cap is not None
        new = list(reserve)
        for _ in range(rng.choice((1, 1, 2, 3, 6))):
            stages = rng.choice(problem.stages_of)
            stage = rng.choice(stages)
            changed = max(size[stage], new[stage] + rng.choice((-1, 1)) * size[stage])
            if sum(new[s] for s in stages[1:]) - new[stage] + changed + size[stages[0]] <= problem.cap:
                new[stage] = changed
        return tuple(new)

    # ---- more micro-batches ----

    def _extend(self) -> None:
        """Extend the two best to all micro-batches, by repeating their bodies or rerunning their policies; add the seeds."""
        ranking = sorted(self.best, key=lambda candidate: candidate.time)
        more = self.request.micro_batches - self.searched
        arenas = {name: self.request.arena(name, self.request.micro_batches) for name in self.request.placements}
        self.best, extended = [], 0
        for candidate in ranking:  # a policy can always be rerun, and every arena has one
            arena = arenas[candidate.arena.name]
            body = find_body(candidate.arena.problem, candidate.order)
            if body is not None and more % body.stride == 0:
                self._consider(arena, body.extended(more), f"{candidate.origin}, repeated")
            elif candidate.policy is not None:
                begin, stop = candidate.policy.whole
                whole = (begin, stop + more if stop > begin else stop)
                self._try_policy(arena, replace(candidate.policy, whole=whole), candidate.variant)
            else:
                continue
            extended += 1
            if extended == 2:
                break
        for arena in arenas.values():
            self._try_hand_written(arena)


def _hand_written(placement: str, count: int) -> list[tuple[str, dict[str, Any]]]:
    """The hand-written schedules for a placement and a number of stages per rank."""
    if count == 1:
        return [("1f1b", {}), ("1f1b", {"slack": 1}), ("1f1b", {"slack": 2}), ("zb-h1", {}), ("gpipe", {})]
    if placement == "loop":
        return [("interleaved", {"stages_per_rank": count})]
    if count % 2:
        return []
    waves = [("wave", {"waves": count // 2, "paper": paper}) for paper in (False, True)]
    return [*waves, ("zb-v", {})] if count == 2 else waves
