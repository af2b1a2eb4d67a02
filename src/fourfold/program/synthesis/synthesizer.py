"""The synthesizer: searches for the fastest schedule under given costs and a memory cap.

1. *Layers to stages.* With `layers`, they are partitioned into balanced stages for every placement (`partition`).
2. *A portfolio search* for every number of stages per rank (`portfolio`), timed under the true costs.
3. *The best of them*, with a lower bound on the makespan of any schedule (`bounds`).

The budget is a number of timed orders per number of stages, and random choices come from a seeded generator: the same
call gives the same schedule on any machine. Each number of stages is searched independently, and skipped only if its lower
bound is no better than the best schedule so far; so the result is never worse than with a fixed number of stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fourfold.errors import ScheduleError
from fourfold.program.costs import Costs, Number, divide
from fourfold.program.ops import Schedule
from fourfold.program.partition import Layer
from fourfold.program.schedules import at_least, check_size
from fourfold.program.synthesis.portfolio import PLACEMENTS, Portfolio, SearchRequest
from fourfold.program.validator import validate

__all__ = ["Synthesis", "default_evaluations", "search", "synthesize"]


@dataclass(frozen=True)
class Synthesis:
    """The result of a search, with its lower bound."""

    schedule: Schedule
    costs: Costs
    """The costs of the search; with `layers`, one number per stage."""
    makespan: Number
    lower_bound: Number
    """Lower bound on the makespan of any schedule on the same placement under the same cap."""
    origin: str
    """Which method found it."""
    layers: tuple[int, ...] | None
    """Number of layers of every stage, if layers were given."""
    evaluations: int
    """Number of orders timed."""

    @property
    def gap(self) -> Number:
        """(makespan - lower bound) / lower bound; 0: proven optimal for its placement."""
        return divide(self.makespan, self.lower_bound) - 1 if self.lower_bound else 0

    def explain(self) -> str:
        """A one-line summary."""
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
    """The fastest schedule found under the memory cap; `search` also returns its lower bound."""
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

    Args:
        memory_cap: limit on a rank's activations, in the unit of `costs.activation` (default: micro-batches of one rank).
        stages_per_rank: a number, several to choose from, or None for 1, 2 and 4.
        evaluations: orders to time for every number of stages per rank; None: by size.
    """
    at_least(ranks=(ranks, 1), micro_batches=(micro_batches, 1))
    costs = costs or Costs()
    if evaluations is not None:
        at_least(evaluations=(evaluations, 1))
    for name in placements:
        if name not in PLACEMENTS:
            raise ScheduleError(f"placement '{name}' is invalid; choose 'wave' or 'loop'")
    portfolios = []
    for count in _stage_counts(ranks, costs, layers, stages_per_rank):
        check_size(ranks, micro_batches, count)
        request = SearchRequest(
            ranks=ranks,
            micro_batches=micro_batches,
            stages_per_rank=count,
            placements=tuple(name for name in placements if count > 1 or name == "loop") or ("loop",),
            costs=costs,
            memory_cap=memory_cap,
            layers=None if layers is None else tuple(layers),
            split_backward=split_backward,
        )
        budget = evaluations or default_evaluations(ranks * count * micro_batches)
        portfolios.append(Portfolio(request, budget, seed))
    best: Synthesis | None = None
    for portfolio in sorted(portfolios, key=lambda portfolio: portfolio.bound):
        if best is None or portfolio.bound < best.makespan:  # else it cannot win
            found = _synthesis(portfolio)
            best = found if best is None or found.makespan < best.makespan else best
    assert best is not None
    validate(best.schedule, memory_cap, best.costs)
    return best


def _synthesis(portfolio: Portfolio) -> Synthesis:
    winner, makespan, bound = portfolio.search()
    arena = winner.arena
    return Synthesis(
        schedule=winner.schedule(f"synthesized {arena.name} v={portfolio.request.stages_per_rank}"),
        costs=arena.costs,
        makespan=makespan,
        lower_bound=bound,
        origin=winner.origin,
        layers=arena.layers,
        evaluations=portfolio.timed,
    )


def default_evaluations(ops: int) -> int:
    """Default number of orders to time for a schedule of `ops` forwards: 240 for small schedules, 44 for large ones."""
    return max(44, min(240, 140_000 // max(1, ops)))


def _stage_counts(
    ranks: int, costs: Costs, layers: Sequence[Layer] | None, wanted: int | Sequence[int] | None
) -> list[int]:
    """The numbers of stages per rank to try."""
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
