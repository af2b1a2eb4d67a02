"""Plans as one would write them by hand: one mode and one recomputation for all units, no search.

Each is predicted in milliseconds. They answer "will it fit?" before a search, and show beside its plans what it gained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Literal, NamedTuple

from fourfold.errors import FourfoldError
from fourfold.plan import Mesh, Plan
from fourfold.planner.api import judge
from fourfold.planner.problem import Constraints, PlanProblem

__all__ = ["uniform_plans"]

Mode = Literal["replicate", "keep", "zero3"]
Recompute = Literal["none", "selective", "full"]


class _Choice(NamedTuple):
    mode: Mode
    recompute: Recompute
    host: bool = False
    """Optimizer state and activations in host memory."""


_FEW = (
    _Choice("zero3", "full"),
    _Choice("zero3", "full", True),
    _Choice("zero3", "none"),
    _Choice("keep", "selective"),
)
_MODES: tuple[Mode, ...] = ("replicate", "keep", "zero3")
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
_MANY = tuple(_Choice(mode, recompute) for mode in _MODES for recompute in _RECOMPUTE)


def uniform_plans(
    problem: PlanProblem, most: int, constraints: Constraints | None = None, *, few: bool = False
) -> Iterator[Plan]:
    """At most `most` plans, judged (`misfit` says which do not fit), the usual ones first; `few`: four choices per mesh."""
    count, constraints = 0, constraints or Constraints({})
    choices = [c for c in (_FEW if few else (*_MANY, _FEW[1])) if _allowed(c, problem, constraints)]
    for size, mesh in product((1, 2, 4), _meshes(problem, constraints)):  # size: sequences of a micro-batch
        sequences, rest = divmod(problem.global_batch, mesh.batch_ways)
        if rest or sequences % size or (mesh.pipe > 1 and sequences // size < mesh.pipe):
            continue
        if not constraints.allows(micro_batches=sequences // size, micro_batch_size=size):
            continue
        tried = set()
        for choice in choices:
            if mesh.data == 1 and constraints.get("mode") is None:  # there is nothing to shard over
                choice = choice._replace(mode="replicate")
            if choice in tried:
                continue
            if count == most:
                return
            tried.add(choice)
            judged = _judged(problem, constraints, mesh, sequences // size, choice)
            if judged is not None:
                count += 1
                yield judged


def _allowed(choice: _Choice, problem: PlanProblem, constraints: Constraints) -> bool:
    place = "host" if choice.host else "device"
    return not (choice.host and problem.on_cpu) and constraints.allows(
        mode=choice.mode, recompute=choice.recompute, optimizer=place, activations=place
    )


def _meshes(problem: PlanProblem, constraints: Constraints) -> list[Mesh]:
    """All ranks: data alone, then with columns inside a node, with a pipeline, and with both."""
    cluster = problem.cluster
    ranks, layers = min(cluster.ranks, constraints.max_ranks or cluster.ranks), problem.spec.layers - 2
    columns = [1, *(n for n in (8, 4, 2) if cluster.devices % n == 0 and problem.heads % n == 0)]
    pipes = [1, *(n for n in (8, 4, 2, 16) if ranks % n == 0 and n <= layers)]
    if constraints.needs_pipeline:
        pipes.remove(1)
    meshes = [Mesh(pipe=p, data=ranks // p // c, col=c) for p, c in product(pipes, columns) if ranks % (p * c) == 0]
    return sorted((m for m in meshes if constraints.allows(**m.degrees)), key=lambda m: (m.pipe > 1) + (m.col > 1))


def _judged(
    problem: PlanProblem, constraints: Constraints, mesh: Mesh, micro_batches: int, choice: _Choice
) -> Plan | None:
    place = "host" if choice.host else "device"
    fixed = {k: constraints.fixed[k] for k in ("waves", "stages_per_rank") if k in constraints.fixed}
    keep = constraints.get("keep", "none")
    data: dict[str, Any] = {
        "mesh": mesh.degrees,
        "batch": {"micro_batches": micro_batches},
        "pipeline": fixed | {"schedule": constraints.schedule or "1f1b"} if mesh.pipe > 1 else {},
        "tensor": {"flow": constraints.get("flow", "auto")},
        "unit": [{"match": "*", "mode": choice.mode, "recompute": choice.recompute}],
        "memory": {"optimizer": place, "activations": place, "moments": problem.moments},
    }
    if keep != "none":
        data["tensor"]["keep"] = ["weights", "inputs", "gradients"] if keep == "all" else [keep]
    try:
        return judge(replace(Plan.from_dict(data), precision=problem.precision), problem)
    except FourfoldError:  # not every model can have every mesh
        return None
