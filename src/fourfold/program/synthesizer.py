"""The synthesizer: the best schedule a bounded search finds, for any costs and any memory cap.

1. *Layers to stages.* With `layers`, every placement gets its own balanced split (`partition`).
2. *A portfolio of orders* for every number of stages a rank: the hand-written schedules; list schedules with nested
   reserves (`greedy`), first a handful of policies that are often best, then random ones and mutations of the best so
   far; modulo schedules (`modulo`). Policies are also tried as if messages were free or twice as dear: greedy choices
   are short-sighted, and what they find for other costs is often better for the true ones.
3. *Improvement* (`improve`): swaps on the critical path of the best; fusing I and W where that pays.

Every order is timed under the true costs by the simulator's engine and kept if it is the fastest within the cap. The budget
is a number of timed orders for every number of stages, and random choices come from a seeded generator: the same call
gives the same schedule on any machine. More stages a rank are tried independently, so the best number is never worse
than a fixed one.

Many micro-batches are reduced to few by the periodic form (`periodic`): the search runs on three to four times as many
micro-batches as ranks, and the body of what it finds is repeated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

from fourfold.errors import ScheduleError
from fourfold.program.bounds import lower_bound
from fourfold.program.costs import Costs, Number, divide
from fourfold.program.engine import Order, Problem, peaks, run
from fourfold.program.greedy import Policy, list_schedule
from fourfold.program.improve import fuse, improve
from fourfold.program.modulo import modulo_schedule
from fourfold.program.ops import Op, Schedule
from fourfold.program.partition import Layer, partition, stage_costs
from fourfold.program.periodic import find_body
from fourfold.program.schedules import at_least, build, fused, loop, split, zigzag
from fourfold.program.validator import check_cap, validate

__all__ = ["Synthesis", "default_evaluations", "search", "synthesize"]

_PLACEMENTS: dict[str, Callable[[int, int], tuple[int, ...]]] = {"loop": loop, "wave": zigzag}


@dataclass(frozen=True)
class Synthesis:
    """What a search found, and how good it is."""

    schedule: Schedule
    costs: Costs
    """The costs it was made for; with layers, stage by stage."""
    makespan: Number
    lower_bound: Number
    """No schedule on the same placement and under the same cap can be faster."""
    origin: str
    """How it was found."""
    layers: tuple[int, ...] | None
    """Layers of every stage, where layers were given."""
    evaluations: int
    """Orders timed."""

    @property
    def gap(self) -> Number:
        """How far above the lower bound, as a share of it; 0: proven optimal for its placement."""
        return divide(self.makespan, self.lower_bound) - 1 if self.lower_bound else 0

    def explain(self) -> str:
        """One line for people."""
        proof = "proven optimal" if self.gap <= 1e-9 else f"at most {float(self.gap):.1%} above the lower bound"
        return (
            f"{self.schedule.name}: makespan {float(self.makespan):g}, {proof} {float(self.lower_bound):g} "
            f"({self.origin}, {self.evaluations} orders timed)"
        )


def synthesize(
    ranks: int,
    micro_batches: int,
    costs: Costs | None = None,
    memory_cap: Number | None = None,
    *,
    layers: Sequence[Layer] | None = None,
    stages_per_rank: int | Sequence[int] | None = None,
    placements: Sequence[Literal["loop", "wave"]] = ("wave", "loop"),
    split_backward: Literal["auto"] | bool = "auto",
    evaluations: int | None = None,
    seed: int = 0,
) -> Schedule:
    """The best schedule found for these costs within the memory cap; `search` also says how good it is."""
    return search(
        ranks,
        micro_batches,
        costs,
        memory_cap,
        layers=layers,
        stages_per_rank=stages_per_rank,
        placements=placements,
        split_backward=split_backward,
        evaluations=evaluations,
        seed=seed,
    ).schedule


def search(
    ranks: int,
    micro_batches: int,
    costs: Costs | None = None,
    memory_cap: Number | None = None,
    *,
    layers: Sequence[Layer] | None = None,
    stages_per_rank: int | Sequence[int] | None = None,
    placements: Sequence[Literal["loop", "wave"]] = ("wave", "loop"),
    split_backward: Literal["auto"] | bool = "auto",
    evaluations: int | None = None,
    seed: int = 0,
) -> Synthesis:
    """Search for the fastest schedule.

    `memory_cap` is on the activations a rank holds, in the unit of `costs.activation` (default: micro-batches of a rank's
    share). `stages_per_rank`: a number, several to choose from, or None for 1, 2 and 4. `evaluations`: orders to time for
    every number of stages a rank; None: by size.
    """
    at_least(ranks=(ranks, 1), micro_batches=(micro_batches, 1))
    costs = costs or Costs()
    if evaluations is not None:
        at_least(evaluations=(evaluations, 1))
    for name in placements:
        if name not in _PLACEMENTS:
            raise ScheduleError(f"placement '{name}' is neither 'wave' nor 'loop'")
    fields = []
    for count in _stage_counts(ranks, costs, layers, stages_per_rank):
        budget = evaluations or default_evaluations(ranks * count * micro_batches)
        shapes = [n for n in placements if count > 1 or n == "loop"] or ["loop"]
        fields.append(
            _Field(ranks, micro_batches, count, costs, memory_cap, layers, split_backward, shapes, budget, seed)
        )
    best: Synthesis | None = None
    for field in sorted(fields, key=lambda field: field.bound):
        if best is None or field.bound < best.makespan:  # else it cannot win
            found = field.search()
            best = found if best is None or found.makespan < best.makespan else best
    assert best is not None
    validate(best.schedule, memory_cap, best.costs)
    return best


def default_evaluations(ops: int) -> int:
    """Orders to time for a schedule of about so many forwards: some hundred for small ones, some tens for large."""
    return max(44, min(240, 140_000 // max(1, ops)))


def _stage_counts(
    ranks: int, costs: Costs, layers: Sequence[Layer] | None, wanted: int | Sequence[int] | None
) -> list[int]:
    """The numbers of stages a rank to try."""
    counts = [1, 2, 4] if wanted is None else [wanted] if isinstance(wanted, int) else list(wanted)
    for count in counts:
        at_least(stages_per_rank=(count, 1))
    if not counts:
        raise ScheduleError("stages_per_rank is empty; give a number, or several to choose from")
    sizes = {len(t) for t in (costs.forward, costs.input_grad, costs.weight_grad) if isinstance(t, tuple)}
    if sizes and layers is None:
        fitting = [c for c in counts if sizes == {ranks * c}]
        if not fitting:
            raise ScheduleError(
                f"costs are given for {sorted(sizes)} stages; {ranks} ranks with {counts} stages each have "
                f"{[ranks * c for c in counts]}"
            )
        return fitting
    if layers is not None:
        fitting = [c for c in counts if ranks * c <= len(layers)]
        if not fitting:
            raise ScheduleError(
                f"{len(layers)} layers cannot fill {ranks * min(counts)} stages; use fewer ranks or stages"
            )
        return fitting
    return counts


@dataclass
class _Candidate:
    """An order that was timed."""

    makespan: Any
    order: Order
    arena: _Arena
    origin: str
    policy: Policy | None = None
    messages: int = 1


@dataclass
class _Arena:
    """One placement with its costs, at the number of micro-batches that is searched."""

    name: str
    problem: Problem
    costs: Costs
    layers: tuple[int, ...] | None
    bound: Any
    """No order can be faster, in ticks."""
    variants: dict[int, Problem]
    """The problem with messages 0, 1 and 2 times as dear."""


class _Field:
    """The search for one number of stages a rank."""

    def __init__(
        self,
        ranks: int,
        micro_batches: int,
        count: int,
        costs: Costs,
        memory_cap: Number | None,
        layers: Sequence[Layer] | None,
        split_backward: Literal["auto"] | bool,
        placements: Sequence[str],
        budget: int,
        seed: int,
    ):
        self.ranks, self.micro_batches, self.count = ranks, micro_batches, count
        self.costs, self.memory_cap, self.layers = costs, memory_cap, layers
        self.rng = random.Random(f"{seed} {ranks} {micro_batches} {count}")
        # Beyond four rounds of micro-batches a steady state repeats; keep the remainder to a whole number of rounds.
        rounds = 3 * ranks + micro_batches % ranks
        self.searched = rounds if micro_batches > 4 * ranks else micro_batches
        cheaper_whole = costs.instruction > 0 or costs.backward is not None
        self.split_backward: Literal["auto"] | bool = split_backward
        if split_backward == "auto" and not cheaper_whole:
            self.split_backward = True  # a split backward costs nothing, so it can only help
        self.hand_split = split_backward is True
        self.placements, self.budget = placements, budget
        self.timed = 0
        self.best: list[_Candidate] = []  # of every arena and way of splitting, the fastest
        arenas = [self._arena(name, micro_batches) for name in placements]
        self.bound: Number = min(arena.bound * arena.problem.tick for arena in arenas)
        """No schedule with this number of stages can be faster."""

    def search(self) -> Synthesis:
        arenas, budget = [self._arena(name, self.searched) for name in self.placements], self.budget
        for arena in arenas:
            self._hand_written(arena)
            for policy, messages in self._starters(arena):
                self._try_policy(arena, policy, messages, "greedy")
        self._evolve(int(budget * 0.75))
        if self.split_backward == "auto":
            winner = self._winner()
            self._consider(winner.arena, fuse(winner.arena.problem, winner.order), f"{winner.origin}, fused")
        if not self._proven():
            winner, swaps = self._winner(), max(0, budget - self.timed)
            self._consider(
                winner.arena, improve(winner.arena.problem, winner.order, self.rng, swaps), f"{winner.origin}, improved"
            )
            self.timed += swaps - 1
        return self._finished(self._winner())

    # ---- candidates ----

    def _arena(self, name: str, micro_batches: int) -> _Arena:
        placement = _PLACEMENTS[name](self.ranks, self.count)
        costs, counts = self.costs, None
        if self.layers is not None:
            counts = partition([layer.work for layer in self.layers], placement)
            costs = stage_costs(self.layers, counts, self.costs)
        problem = Problem.in_integers(placement, self.ranks, micro_batches, costs, self.memory_cap)
        if self.memory_cap is not None:
            check_cap(Problem.of(placement, self.ranks, micro_batches, costs), self.memory_cap)
        c = problem.costs
        variants = {
            factor: replace(
                problem,
                costs=replace(c, down=tuple(factor * x for x in c.down), up=tuple(factor * x for x in c.up)),
            )
            for factor in ((0, 1, 2) if any(c.down) else (1,))
        }
        return _Arena(name, problem, costs, counts, lower_bound(problem), variants)

    def _consider(
        self, arena: _Arena, order: Order, origin: str, policy: Policy | None = None, messages: int = 1
    ) -> None:
        """Time an order; keep it if it is the fastest of its kind within the cap."""
        problem = arena.problem
        self.timed += 1
        if policy is None and problem.cap is not None and max(peaks(problem, order)) > problem.cap:
            return  # list schedules keep to the cap themselves
        times = run(problem, order)
        if times.stuck:
            return
        kinds = {op[1] for op in order[0]}
        for i, other in enumerate(self.best):
            if other.arena is arena and {op[1] for op in other.order[0]} == kinds:
                # Equally good policies replace each other: the search drifts over plateaus.
                if times.makespan < other.makespan or (policy is not None and times.makespan == other.makespan):
                    self.best[i] = _Candidate(times.makespan, order, arena, origin, policy or other.policy, messages)
                return
        self.best.append(_Candidate(times.makespan, order, arena, origin, policy, messages))

    def _winner(self) -> _Candidate:
        return min(self.best, key=lambda candidate: candidate.makespan * candidate.arena.problem.tick)

    def _proven(self) -> bool:
        """Whether the winner meets its lower bound: no search can do better on its placement."""
        winner = self._winner()
        return bool(winner.makespan <= winner.arena.bound)

    def _hand_written(self, arena: _Arena) -> None:
        for name, options in _hand_written(arena.name, self.count):
            schedule = build(name, self.ranks, arena.problem.micro_batches, **options)
            if self.hand_split:
                schedule = split(schedule)
            elif self.split_backward is False:
                schedule = fused(schedule)
            self._consider(arena, schedule.order, schedule.name)

    def _try_policy(self, arena: _Arena, policy: Policy, messages: int, origin: str) -> None:
        self._consider(arena, list_schedule(arena.variants[messages], policy), origin, policy, messages)

    def _starters(self, arena: _Arena) -> Iterator[tuple[Policy, int]]:
        """Policies that are often best: earliest first or deepest first, with full reserves."""
        for whole in self._ways(arena.problem.micro_batches):
            for forward, backward, lead, patience in _STARTERS:
                policy = Policy.by_time(
                    arena.problem,
                    forward=forward,
                    backward=backward,
                    lead=lead,
                    reserve=1,
                    whole=whole,
                    patience=patience,
                )
                yield policy, 1

    def _ways(self, micro_batches: int) -> list[tuple[int, int]]:
        """Which backwards are whole: none, all, or, where the choice matters, all but those of the cool-down."""
        if self.split_backward is True:
            return [(0, 0)]
        if self.split_backward is False:
            return [(0, micro_batches)]
        return [(0, 0), (0, micro_batches), (0, max(0, micro_batches - self.ranks))]

    def _evolve(self, until: int) -> None:
        """Random policies, mutations of the best ones and modulo schedules, mostly on the best kind."""
        rng = self.rng
        while self.timed < until and not self._proven():
            ranking = sorted(self.best, key=lambda c: c.makespan * c.arena.problem.tick)
            parent = ranking[1 if self.timed % 4 == 0 and len(ranking) > 1 else 0]
            arena = parent.arena
            messages = rng.choice(list(arena.variants))
            draw = rng.random()
            if draw < 0.12:
                unroll = rng.choice((1, 1, 2, 2, 3, 4))
                parted = any(op[1] == "I" for op in parent.order[0])
                order = modulo_schedule(arena.problem, rng, unroll=unroll, split=parted)
                if order is None:
                    self.timed += 1
                else:
                    self._consider(arena, order, "modulo")
            elif draw < 0.45 or parent.policy is None:
                self._try_policy(arena, self._random_policy(arena.problem), messages, "greedy")
            else:
                keep = parent.messages if rng.random() < 0.8 else messages
                self._try_policy(arena, self._mutated(arena.problem, parent.policy), keep, "greedy")

    def _random_policy(self, problem: Problem) -> Policy:
        rng, count = self.rng, problem.micro_batches
        whole = rng.choice(self._ways(count))
        if self.split_backward == "auto" and rng.random() < 0.5:
            ramps = (0, self.ranks // 2, self.ranks, 3 * self.ranks // 2, 2 * self.ranks)
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
        """A policy with some reserves, or some keys, or one of its traits changed."""
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
        """Reserves with a micro-batch more or less for some stages, still at least one each and within the cap."""
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

    # ---- the result ----

    def _finished(self, winner: _Candidate) -> Synthesis:
        """The winner for all micro-batches: its body repeated where fewer were searched, else its policy run again."""
        arena = winner.arena
        if self.searched < self.micro_batches:
            small, self.best = self.best, []
            arenas = {c.arena.name: self._arena(c.arena.name, self.micro_batches) for c in small}
            for candidate in sorted(small, key=lambda c: c.makespan * c.arena.problem.tick)[:2]:
                self._extend(candidate, arenas[candidate.arena.name])
            for full in arenas.values():
                self._hand_written(full)
            winner = self._winner()
            arena = winner.arena
        order = tuple(tuple(map(Op._make, ops)) for ops in winner.order)
        name = f"synthesized {arena.name} v={self.count}"
        schedule = Schedule(order, arena.problem.placement, self.micro_batches, name)
        exact = Problem.of(arena.problem.placement, self.ranks, self.micro_batches, arena.costs)
        return Synthesis(
            schedule=schedule,
            costs=arena.costs,
            makespan=run(exact, order).makespan * exact.tick,
            lower_bound=_value(arena.bound, arena.problem, exact),
            origin=winner.origin,
            layers=arena.layers,
            evaluations=self.timed,
        )

    def _extend(self, candidate: _Candidate, full: _Arena) -> None:
        body = find_body(candidate.arena.problem, candidate.order)
        more = self.micro_batches - self.searched
        if body is not None and more % body.step == 0:
            self._consider(full, body.extended(more), f"{candidate.origin}, repeated", candidate.policy)
        elif candidate.policy is not None:
            self._try_policy(full, candidate.policy, candidate.messages, candidate.origin)


_STARTERS = (
    # forward, backward, lead, patience
    (1, 1, 0, 0),
    (1, 1, 0, 0.5),
    (1, 1, 0.5, 0),
    (-1, -1, -1, 0),
    (-2, -2, 0, 0),
    (-2, -2, 1, 0.5),
)


def _hand_written(placement: str, count: int) -> list[tuple[str, dict[str, Any]]]:
    """The hand-written schedules of a placement and a number of stages a rank."""
    if count == 1:
        return [("1f1b", {}), ("1f1b", {"slack": 1}), ("1f1b", {"slack": 2}), ("zb-h1", {}), ("gpipe", {})]
    if placement == "loop":
        return [("interleaved", {"stages_per_rank": count})]
    if count % 2:
        return []
    waves: list[tuple[str, dict[str, Any]]] = [("wave", {"waves": count // 2})]
    return [*waves, ("zb-v", {})] if count == 2 else waves


def _value(ticks: Any, problem: Problem, exact: Problem) -> Number:
    """A time of the whole-number problem in the caller's unit, exact where the caller's numbers are."""
    value = Fraction(ticks) * Fraction(problem.tick)
    return float(value) if isinstance(exact.tick, float) else value
