"""Predictions against the program: times against a simulation of the lowered programs, memory against their instants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fourfold.cluster import Cluster
from fourfold.config import ModelConfig
from fourfold.errors import PlanError
from fourfold.model.operators import ModelSpec
from fourfold.plan import Batch, Mesh, Pipeline, Plan, Precision, Tensor, UnitRule
from fourfold.planner.api import make_plan, plan_problem
from fourfold.planner.engines import TrainingEngine
from fourfold.planner.evaluate import PlanEvaluation, predict
from fourfold.planner.layouts import GridShape, layout_of_plan
from fourfold.planner.problem import PlanProblem, parse_fixes
from fourfold.planner.stage_partition import stage_layers, units_of_stages
from fourfold.planner.unit_cost import UnitChoice, UnitTimes, unit_cost, unit_times_on_grid
from fourfold.program import Costs, ProgramUnit, lower, simulate
from fourfold.program.from_plan import schedule_of_plan


def question(bandwidth: str = "x1", batch: int = 16, layers: int = 8, nodes: int = 1) -> PlanProblem:
    model = ModelConfig(family="llama", layers=layers, hidden=2048, heads=16, vocab=4096, seq_len=2048)
    cluster = replace(Cluster.preset("a100-80g", nodes=nodes).what_if({"bandwidth": bandwidth}), overlap=1.0)
    ahead = TrainingEngine()  # its host is always ahead
    return PlanProblem(
        ModelSpec.from_config(model), cluster, batch, Precision(compute="bf16", compile=False), engine=ahead
    )


def simulated(plan: Plan, problem: PlanProblem) -> float:
    """Seconds of the lowered programs, collectives and messages at their place."""
    layout = layout_of_plan(plan, problem)
    schedule = schedule_of_plan(plan, layout.micro_batches, layers=problem.spec.layers)
    stages = units_of_stages(problem.spec, stage_layers(problem, schedule, plan.pipeline.layers))
    rule = plan.unit[0]
    choice = UnitChoice(rule.mode, rule.reduce, rule.within, rule.split, rule.recompute)
    cost = {u.name: unit_cost(problem, layout, u.kind, choice) for u in problem.spec.units}
    units = [
        [ProgramUnit(u.name, rule.mode, rule.reduce, cost[u.name].times.input_grad or 1e-9) for u in of]
        for of in stages
    ]

    def total(name: str) -> tuple[float, ...]:
        return tuple(sum(getattr(cost[u.name].times, name) for u in of) for of in stages)

    again = total("recompute")
    mesh = plan.mesh
    size = layout.micro_batch_size * problem.spec.seq_len * problem.spec.hidden * problem.compute_bytes
    costs = Costs(
        forward=total("forward"),
        input_grad=tuple(a + b for a, b in zip(total("input_grad"), again, strict=True)),
        weight_grad=total("weight_grad"),
        message=problem.cluster.message(size, mesh.ranks // mesh.pipe) if mesh.pipe > 1 else 0.0,
        gather={n: c.gather for n, c in cost.items()},
        reduce={n: c.reduce for n, c in cost.items()},
    )
    return float(simulate(lower(schedule, units), costs).makespan)


@pytest.mark.parametrize("bandwidth", ["x1", "x0.2"])
@pytest.mark.parametrize("mode", ["replicate", "keep", "zero3"])
@pytest.mark.parametrize(
    ("mesh", "schedule"), [({"data": 8}, "1f1b"), ({"pipe": 2, "data": 4}, "1f1b"), ({"pipe": 2, "data": 4}, "zb-h1")]
)
def test_times_are_those_of_the_program(mesh: dict[str, int], schedule: str, mode: Any, bandwidth: str) -> None:
    problem = question(bandwidth)
    plan = Plan(
        mesh=Mesh(**mesh),
        batch=Batch(micro_batches=2 if "pipe" not in mesh else 4),
        pipeline=Pipeline(schedule=schedule),
        unit=(UnitRule(match="*", mode=mode),),
        precision=problem.precision,
    )
    found = predict(plan, problem)
    assert found.seconds - found.update == pytest.approx(simulated(plan, problem), rel=0.08)


@pytest.mark.parametrize("bandwidth", ["x1", "x0.3"])
@pytest.mark.parametrize("mode", ["replicate", "keep"])
@pytest.mark.parametrize(("schedule", "tolerance"), [("interleaved", 0.01), ("zb-v", 0.02), ("1f1b", 0.04)])
def test_deep_pipelines_gather_while_they_wait(schedule: str, tolerance: float, mode: Any, bandwidth: str) -> None:
    """Ranks that wait for their first input gather meanwhile; reductions delay the last backwards.

    With whole layers in a stage they delay them more than the simulation of programs knows: at most one reduction is in flight.
    """
    problem = question(bandwidth, batch=128, layers=30, nodes=8)
    plan = Plan(
        mesh=Mesh(pipe=8, data=8),
        batch=Batch(micro_batches=16),
        pipeline=Pipeline(schedule=schedule, stages_per_rank=4)
        if schedule == "interleaved"
        else Pipeline(schedule=schedule),
        unit=(UnitRule(match="*", mode=mode),),
        precision=problem.precision,
    )
    found = predict(plan, problem)
    assert found.seconds - found.update == pytest.approx(simulated(plan, problem), rel=tolerance)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_what_the_grid_keeps_is_gathered_and_summed_at_a_steps_ends(schedule: str) -> None:
    """Rows that keep weights and gradients communicate what sharded replicas do, over the same links; but not while they wait."""
    problem = question("x0.3", batch=128, layers=30, nodes=8)
    pipeline = Pipeline(schedule=schedule, stages_per_rank=4) if schedule == "interleaved" else Pipeline()
    plan = Plan(
        mesh=Mesh(pipe=8, data=8), batch=Batch(micro_batches=16), pipeline=pipeline, precision=problem.precision
    )
    keep = replace(plan, unit=(UnitRule(match="*", mode="keep"),))
    grid = replace(plan, mesh=Mesh(pipe=8, row=8), tensor=Tensor(keep=("weights", "gradients")))
    shards, rows = predict(keep, problem), predict(grid, problem)
    alone = predict(replace(plan, mesh=Mesh(pipe=8)), replace(problem, global_batch=16))
    assert 1.05 * alone.seconds < shards.seconds < rows.seconds < 1.2 * shards.seconds


@pytest.mark.parametrize("mode", ["replicate", "keep", "zero3"])
@pytest.mark.parametrize(
    "mesh", [{"data": 8}, {"pipe": 4, "data": 2}, {"row": 2, "col": 4}, {"pipe": 2, "col": 2, "data": 2}]
)
def test_a_step_is_the_sum_of_its_parts(mesh: dict[str, int], mode: Any) -> None:
    problem = question("x0.3")
    plan = Plan(
        mesh=Mesh(**mesh), unit=(UnitRule(match="*", mode=mode, recompute="full"),), precision=problem.precision
    )
    found = PlanEvaluation(plan, problem)
    assert sum(found.step_time()) == pytest.approx(found.seconds, rel=1e-9)
    assert min(found.step_time()) >= 0


def test_memory_has_an_instant() -> None:
    problem = question()
    plan = Plan(
        mesh=Mesh(pipe=2, data=4),
        batch=Batch(micro_batches=4),
        unit=(UnitRule(match="*", mode="zero3", recompute="full"),),
        precision=problem.precision,
    )
    p = predict(plan, problem)
    assert 0 < p.mfu < 1
    for m in p.memory:
        assert m.at == "update" or m.at[1] in "FBIW"
        assert m.peak == pytest.approx(sum(m.by_category))
    # sharding, recomputing, splitting and offloading each take less memory
    less = [UnitRule(match="*"), UnitRule(match="*", mode="keep"), UnitRule(match="*", mode="zero3")]
    peaks = [predict(replace(plan, unit=(rule,)), problem).peak.peak for rule in less]
    assert peaks[0] > peaks[1] > peaks[2] > p.peak.peak
    host = replace(plan, memory=replace(plan.memory, optimizer="host"))
    assert predict(host, problem).memory[0].host > 0


def test_imperfect_overlap_is_charged_once() -> None:
    """On a slow network all-reduces end long after the backward: no more of them could overlap than the backward lasts."""
    plan = Plan(mesh=Mesh(data=8), batch=Batch(micro_batches=2), unit=(UnitRule(match="*", mode="replicate"),))
    ideal = question("x0.01")
    half = replace(ideal, cluster=replace(ideal.cluster, overlap=0.5))
    best, found = predict(plan, ideal), predict(plan, half)
    assert best.exposed > 10 * best.compute
    assert 0 < found.seconds - best.seconds <= 0.5 * best.compute


def test_recomputation_is_a_forward_without_its_last_matmul() -> None:
    """Full recomputation adds a forward without the matmul whose output nothing reads; on a grid it is computed."""
    m = ModelConfig(family="llama", layers=2, hidden=4096, heads=32, ffn=11008, vocab=32000, seq_len=2048)
    problem = PlanProblem(
        ModelSpec.from_config(m), Cluster.preset("h100-sxm"), 8, Precision(compute="bf16", compile=False)
    )

    def times(kind: str, col: int) -> UnitTimes:
        return unit_times_on_grid(problem, kind, GridShape(8 * 2048, 1, col, Tensor()), 1, "full")

    for kind, inputs in (("attn", 4096), ("mlp", 11008)):
        alone, grid = times(kind, 1), times(kind, 2)
        product = problem.cluster.product(8 * 2048, inputs, 4096, "bf16", 2)
        assert alone.recompute == pytest.approx(alone.forward - product)
        assert grid.recompute == grid.forward


def test_activations_on_the_host_take_its_memory_and_stay_where_it_has_none_left() -> None:
    """As the runtime does it: in a share of the host's memory; what exceeds that is on the device."""
    problem = question(batch=64)
    plan = Plan(mesh=Mesh(data=8), batch=Batch(micro_batches=1), precision=problem.precision)
    there = replace(plan, memory=replace(plan.memory, activations="host"))
    here, moved = predict(plan, problem).peak, predict(there, problem).peak
    small = replace(problem, cluster=problem.cluster.what_if({"host": "32GiB"}))
    less = predict(there, small).peak
    assert moved.host == moved.host_activations > 2**33
    assert moved.peak < here.peak - 0.5 * moved.host
    assert less.host == pytest.approx(0.9 * 2**32)
    assert less.peak == pytest.approx(moved.peak + moved.host - less.host)
    state = replace(there, memory=replace(there.memory, optimizer="host"))
    assert predict(state, small).peak.host_activations == pytest.approx(0.5 * 2**32)


def test_a_plan_with_activations_on_the_host_fits_there() -> None:
    spec = question(batch=256).spec
    cluster = Cluster.preset("l4-pcie").what_if({"host": "24GiB"})
    found = make_plan(spec, cluster, global_batch=256, fix={"activations": "host", "data": 4})
    memory = found.predicted["memory"] if found.predicted else []
    assert memory
    assert all(0 < m["host_activations"] <= m["host"] <= cluster.host_memory for m in memory)


def on_the_host(**memory: Any) -> tuple[PlanProblem, Plan]:
    s = question(batch=8)
    rules = {"mesh": {"pipe": 2, "data": 4}, "pipeline": {"layers": [2, 6]}, "batch": {"micro_batches": 2}}
    return s, Plan.from_dict({**rules, "memory": memory, "precision": {"compute": "bf16"}})


def test_every_rank_keeps_as_many_bytes_of_state_as_the_plan_says() -> None:
    s, plan = on_the_host(optimizer="auto", device_state="1GB", rollback="0GiB")
    least, most = sorted(predict(plan, s).memory, key=lambda m: m.host)
    s, whole = on_the_host(optimizer="host", rollback="0GiB")
    less, more = sorted(predict(whole, s).memory, key=lambda m: m.host)
    assert more.host - most.host == pytest.approx(1e9)
    assert less.host - least.host == pytest.approx(min(1e9, less.host))


def test_rolling_back_takes_host_memory() -> None:
    """A second place for state and weights, and weights of before in the slots; in what the host has free, but for a tenth."""
    s, plan = on_the_host(optimizer="host", rollback="0GiB")
    _, auto = on_the_host(optimizer="host", rollback="auto")
    waits, tries = predict(plan, s).peak, predict(auto, s).peak
    assert tries.host_rollback == pytest.approx(1.2 * waits.host)
    assert tries.host == pytest.approx(2.2 * waits.host)
    assert tries.peak - waits.peak == pytest.approx(4 * 2**24 * s.compute_bytes)
    small = replace(s, cluster=s.cluster.what_if({"host": str(int(1.5 * waits.host * s.cluster.devices))}))
    assert predict(auto, small).peak.host == pytest.approx(0.9 * 1.5 * waits.host)
    assert predict(auto, replace(s, needs_norm=False)).peak == replace(waits, at=tries.at)


@pytest.mark.parametrize("needs_norm", [True, False])
def test_gradients_are_consumed_where_memory_needs_it(needs_norm: bool) -> None:
    """And where no clipping and no guard need them; the plan says how much state is on the device, so that it can be checked."""
    model = ModelConfig(
        family="llama", layers=40, hidden=5120, heads=40, kv_heads=8, ffn=13824, vocab=32000, seq_len=4096
    )
    spec, precision = ModelSpec.from_config(model.resolve()), Precision(compute="bf16", reduce="bf16")
    found = {}
    for memory in ("141GB", "1000GB"):
        cluster = Cluster.preset("h200").what_if({"memory": memory})
        problem = PlanProblem(spec, cluster, 1, precision, needs_norm=needs_norm)
        found[memory] = plan_problem(problem, parse_fixes([], None, 1)).memory
    assert (found["141GB"].gradients == "consume") == (not needs_norm)
    assert bool(found["141GB"].device_state)
    assert found["1000GB"].gradients == "auto"
    asked = plan_problem(problem, parse_fixes(["gradients=consume"], None, 1))
    assert asked.memory.gradients == "consume"
    many = replace(problem, global_batch=4)
    with pytest.raises(PlanError, match="one micro-batch per step"):
        plan_problem(many, parse_fixes(["gradients=consume", "micro_batches=4"], None, 1))


def test_staging_takes_memory() -> None:
    s, plan = on_the_host(optimizer="host", rollback="0GiB")
    _, wide = on_the_host(optimizer="host", staging="1GiB")
    ring = 2**24 * s.streamed_bytes
    longer = (1 << 30) // ring - 4
    assert longer > 0
    assert predict(wide, s).peak.peak - predict(plan, s).peak.peak == pytest.approx(longer * ring)


def test_a_tied_weight_goes_from_end_to_end() -> None:
    model = ModelConfig(family="gpt", layers=14, hidden=1024, heads=16, vocab=32768, seq_len=512, tie=True)
    s = PlanProblem(
        ModelSpec.from_config(model), Cluster.preset("a100-80g", nodes=2), 32, Precision(compute="bf16", compile=False)
    )
    untied = replace(s, spec=ModelSpec.from_config(replace(model, tie=False)))
    plan = Plan(mesh=Mesh(pipe=8, data=2), batch=Batch(micro_batches=8), precision=s.precision)
    ends = [predict(plan, x) for x in (s, untied)]
    size = 32768 * 1024
    crossing = sum(s.cluster.messages(size * width, 14, 0, 2) for width in (s.reduce_bytes, s.compute_bytes))
    assert crossing > 5 * s.cluster.message(6 * size, 2)  # between nodes, not to the next rank
    assert ends[0].seconds - ends[1].seconds > 0.5 * crossing
