"""The memory model gathers and releases as the lowered program does: at every unit op, the same units are gathered."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, get_args

import pytest

from fourfold.cluster import Cluster
from fourfold.config import ModelConfig
from fourfold.model.operators import ModelSpec
from fourfold.plan import Batch, Mesh, Pipeline, Plan, UnitRule
from fourfold.planner import memory_model
from fourfold.planner.evaluate import PlanEvaluation
from fourfold.planner.problem import PlanProblem
from fourfold.planner.unit_cost import PlannedUnit
from fourfold.program import ProgramUnit, lower
from fourfold.program.instructions import Gather, Mode, Release, UnitOp
from fourfold.program.ops import Op, Schedule

MODEL = ModelConfig(family="gpt", layers=10, hidden=64, heads=2, vocab=64, seq_len=16)
SCHEDULES = ("1f1b", "gpipe", "zb-h1", "interleaved", "wave", "zb-v")


def random_plan(chance: random.Random) -> Plan:
    """Every unit has a mode of its own."""
    pipe, name = chance.choice((1, 2, 4)), chance.choice(SCHEDULES)
    units = [u.name for u in ModelSpec.from_config(MODEL).units]
    rules = tuple(UnitRule(match=u, mode=chance.choice(get_args(Mode))) for u in units)
    pipeline = Pipeline(schedule=name if pipe > 1 else "1f1b")
    batch = Batch(micro_batches=chance.choice((1, 2, 4, 8)))
    return Plan(mesh=Mesh(pipe=pipe, data=2), batch=batch, pipeline=pipeline, unit=rules)


def in_program(schedule: Schedule, stages: list[list[PlannedUnit]], rank: int, prefetch: int) -> list[tuple[str, int]]:
    """(op, bytes gathered) at every unit op of a rank's program."""
    size = {u.spec.name: int(u.cost.gathered_bytes) for of in stages for u in of}
    units = [[ProgramUnit(u.spec.name, u.choice.mode) for u in of] for of in stages]
    held, out = 0, []
    for instruction in lower(schedule, units, prefetch=prefetch).of(rank).instructions:
        if isinstance(instruction, Gather):
            held += size[instruction.unit]
        elif isinstance(instruction, Release):
            held -= size[instruction.unit]
        elif isinstance(instruction, UnitOp):
            out.append((str(instruction).partition(" ")[0], held))
        elif isinstance(instruction, Op):  # whole: nothing is gathered or released inside
            out += [(str(instruction), held)] * len(stages[instruction.stage])
    return out


class Forgets(dict[Any, Any]):
    """A cache that knows nothing: every op is replayed."""

    def get(self, key: Any, default: Any = None) -> Any:
        return default

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return Forgets()


def in_model(
    problem: PlanProblem, schedule: Schedule, stages: list[list[PlannedUnit]], rank: int, prefetch: int
) -> list[tuple[str, int]]:
    """The same in the replay: recorded where it marks the workspace of a link."""
    ops, before, marked, out = iter(schedule.order[rank]), [0.0], list[float](), list[tuple[str, int]]()
    mark, replay = memory_model._Meter.mark, memory_model._replay_op

    def recorded(meter: Any, *args: float, **more: float) -> None:
        if len(args) > 1:  # workspace, and bytes that are gathered for the next op
            marked.append(before[0] + meter.gathered + args[1])
        mark(meter, *args, **more)

    def replayed(key: Any, *args: Any) -> Any:
        marked.clear()
        memory = replay(key, *args)
        op = next(ops)
        out.extend(
            (str(op), int(held)) for held in marked[:: 1 if op.kind == "F" else 2]
        )  # a backward marks a link twice
        before[0] += dict(memory.left).get(memory_model._GATHERED, 0.0)
        return memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_model._Meter, "mark", recorded)
        patch.setattr(memory_model, "_replay_op", replayed)
        memory_model.replay_rank(problem, schedule, rank, stages, memory_model.RankExtras(prefetch=prefetch), Forgets())
    return out


def test_the_same_units_are_gathered_as_in_the_program() -> None:
    chance, spec, seen = random.Random(5), ModelSpec.from_config(MODEL), 0
    for _ in range(60):
        plan, prefetch = random_plan(chance), chance.choice((0, 1, 1))
        problem = PlanProblem(spec, Cluster.preset("a100-40g"), 16, plan.precision)
        found = PlanEvaluation(plan, problem)
        # one bit for every unit: a sum says which are gathered
        bits = {u.name: 2.0**i for i, u in enumerate(spec.units)}
        stages = [
            [replace(u, cost=replace(u.cost, gathered_bytes=bits[u.spec.name], tied_parameter_bytes=0.0)) for u in of]
            for of in found.stages
        ]
        for rank in range(found.schedule.ranks):
            model = in_model(problem, found.schedule, stages, rank, prefetch)
            assert model == in_program(found.schedule, stages, rank, prefetch), (plan.pipeline, plan.mesh, rank)
            seen += len(model)
    assert seen > 5000


def test_sums_are_those_of_every_python() -> None:
    """`sum` of floats rounds differently from Python 3.12 on; a plan must not depend on it."""
    assert memory_model.RankMemory(0, "update", (2.0**53, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)).peak == 2.0**53 + 2
