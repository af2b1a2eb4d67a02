"""Exports: files in the plan's folder, stages where the other system puts them, arguments that it accepts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.cluster import Cluster
from fourfold.config import Config
from fourfold.model.operators import ModelSpec
from fourfold.plan import Batch, Mesh, Pipeline, Plan, Precision, UnitRule
from fourfold.planner.evaluate import predict
from fourfold.planner.prediction import fits
from fourfold.planner.problem import PlanProblem
from fourfold.program.ops import Schedule
from fourfold.view.plan_export import ExportedPlan, export

SPEC = ModelSpec.from_config(Config.load("configs/llama-8b.toml").model, "llama-8b")  # 32 layers


def exported(system: str, pipe: int, **pipeline: object) -> ExportedPlan:
    problem = PlanProblem(SPEC, Cluster.preset("h100-sxm"), 16, Precision(compute="bf16"))
    plan = Plan(mesh=Mesh(pipe=pipe), batch=Batch(micro_batches=16), pipeline=Pipeline(**pipeline))  # type: ignore[arg-type]
    return export(plan, problem, system)  # type: ignore[arg-type]


def option(found: ExportedPlan, name: str) -> str | None:
    return next((o.split()[1] for o in found.options if o.split()[0].endswith(name)), None)


def test_the_schedule_is_written_beside_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", "configs/llama-1b.toml", "--cluster", "h100-sxm", "--global-batch", "32", "--export", "torchtitan"]
    args += ["--fix", "pipe=8", "waves=1", "data=1", "--schedule", "wave"]
    assert main([*args, "-o", str(tmp_path / "p.json")]) == 0
    text = capsys.readouterr().out
    assert f"schedule_csv {tmp_path / 'p.csv'}" in text
    assert f"written to {tmp_path / 'p.json'} and {tmp_path / 'p.csv'}" in text.replace("\n", " ")
    assert Schedule.load(tmp_path / "p.csv").ranks == 8
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.csv", "p.json"]  # nothing half written is left
    assert main(args) == 0
    assert "-o plan.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pipeline", "name", "runs"),
    [
        ({"schedule": "zb-h1"}, "1F1B", True),
        ({"schedule": "wave"}, "ZBVZeroBubble", True),
        ({"schedule": "wave", "waves": 2}, "PipelineScheduleMulti", False),
        ({"schedule": "interleaved", "stages_per_rank": 2}, "Interleaved1F1B", True),
    ],
)
def test_torchtitan_places_stages(pipeline: dict[str, object], name: str, runs: bool) -> None:
    found = exported("torchtitan", 4, **pipeline)
    assert option(found, "pipeline_parallel_schedule") == name
    assert any("cannot run this schedule" in x for x in found.lost) != runs


def test_torchtitan_stages_and_layers() -> None:
    found = exported("torchtitan", 2, schedule="interleaved", stages_per_rank=3)
    assert option(found, "layers_per_stage") == "6"  # 34 with the embedding and the head, in 6 stages
    assert option(exported("torchtitan", 2, schedule="interleaved"), "layers_per_stage") is None
    for layers, alike in (((8, 9, 8, 7), True), ((8, 8, 8, 8), False)):
        lost = exported("torchtitan", 4, schedule="1f1b", layers=layers).lost
        assert any("layers of every stage" in x for x in lost) != alike


def test_megatron_gets_equal_virtual_stages() -> None:
    name = "num-layers-per-virtual-pipeline-stage"
    found = exported("megatron", 2, schedule="interleaved", stages_per_rank=3)
    assert option(found, name) == "8"  # 16 layers of a rank in two, not three
    assert any("refuses" in x and "2 of 8 layers" in x for x in found.lost)
    found = exported("megatron", 2, schedule="interleaved", stages_per_rank=4)
    assert option(found, name) == "4"
    assert not any("refuses" in x for x in found.lost)
    found = exported("megatron", 3, schedule="interleaved", stages_per_rank=2)  # 32 layers on 3 ranks
    assert option(found, name) is None
    assert any("refuses" in x for x in found.lost)
    assert (option(found, "first-pipeline-num-layers"), option(found, "last-pipeline-num-layers")) == ("11", "10")


def test_megatron_first_and_last_stage_may_differ() -> None:
    found = exported("megatron", 4, schedule="1f1b", layers=(8, 9, 9, 6))
    assert (option(found, "first-pipeline-num-layers"), option(found, "last-pipeline-num-layers")) == ("8", "6")
    assert not any("layers of every stage" in x for x in found.lost)
    found = exported("megatron", 4, schedule="1f1b", layers=(8, 9, 8, 7))
    assert option(found, "last-pipeline-num-layers") is None
    assert any("layers of every stage [8, 9, 8, 7]" in x for x in found.lost)


def test_megatron_is_given_what_its_flags_need() -> None:
    problem = PlanProblem(SPEC, Cluster.preset("h100-sxm"), 16, Precision(compute="bf16"))
    rules = {"mesh": {"data": 8}, "unit": [{"match": "*", "mode": "zero3"}], "memory": {"optimizer": "host"}}
    text = str(export(Plan.from_dict(rules | {"precision": {"compute": "bf16"}}), problem, "megatron"))
    for flag in ("--ckpt-format fsdp_dtensor", "--use-distributed-optimizer", "--use-precision-aware-optimizer"):
        assert flag in text
    assert "--optimizer-offload-fraction 1.00" in text
    plain = {"mesh": {"data": 8}, "precision": {"compute": "fp64", "reduce": "fp64"}, "memory": {"moments": "bf16"}}
    lost = export(Plan.from_dict(plain), problem, "megatron").lost
    assert [x for x in lost if x.startswith("fp64")]
    assert [x for x in lost if "moments in bf16" in x]


@pytest.mark.parametrize("system", ["torchtitan", "megatron"])
def test_a_plan_that_no_longer_fits_is_recomputed_or_reported(system: str) -> None:
    problem = PlanProblem(SPEC, Cluster.preset("h100-sxm"), 16, Precision(compute="bf16"))
    rules = {"mesh": {"data": 8}, "unit": [{"match": "*", "mode": "zero3"}], "precision": {"compute": "bf16"}}
    plan = Plan.from_dict(rules | {"memory": {"activations": "host"}})
    found = export(plan, problem, system)  # type: ignore[arg-type]
    assert not [x for x in found.lost if "made it fit" in x]
    small = replace(problem, cluster=problem.cluster.what_if({"memory": "66GB"}))
    found = export(plan, small, system)  # type: ignore[arg-type]
    assert [x for x in found.lost if "with which the plan fits" in x]
    assert not [x for x in found.lost if x.startswith(("`mode`", "the memory limit"))]  # all units share it
    tiny = replace(problem, cluster=problem.cluster.what_if({"memory": "16GB"}))
    found = export(plan, tiny, system)  # type: ignore[arg-type]
    assert [x for x in found.lost if "the memory limit" in x]
    assert not [x for x in found.lost if "with which the plan fits" in x]


def predicted_seconds(found: ExportedPlan) -> float:
    number, unit = found.predicted.split()[:2]
    return float(number) * {"s": 1.0, "ms": 1e-3}[unit]


@pytest.mark.parametrize("batch", [64, 128])
def test_a_mixed_plan_gets_the_fastest_choice_that_fits(batch: int) -> None:
    spec = ModelSpec.from_config(replace(Config.load("configs/llama-8b.toml").model, seq_len=4096), "llama-8b")
    problem = PlanProblem(spec, Cluster.preset("h100-sxm"), batch, Precision(compute="bf16"))
    plan = Plan(
        mesh=Mesh(data=8),
        batch=Batch(micro_batches=batch // 16),
        precision=problem.precision,
        unit=(
            UnitRule(match="blocks.*.mlp", mode="zero3", reduce="micro-batch"),
            UnitRule(match="*", mode="keep", reduce="micro-batch"),
        ),
    )
    found = export(plan, problem, "torchtitan")
    assert "does not fit" not in found.predicted
    for mode in ("zero2", "zero3"):
        for recompute in ("none", "selective", "full"):
            rule = UnitRule(match="*", mode=mode, recompute=recompute, reduce="micro-batch")
            there = predict(replace(plan, unit=(rule,)), problem.with_engine("torchtitan"))
            if fits(there.memory, problem.cluster, problem.with_engine("torchtitan").cluster.usable):
                assert predicted_seconds(found) <= there.seconds * 1.001


def test_the_prediction_is_of_the_plan_that_runs_there() -> None:
    problem = PlanProblem(SPEC, Cluster.preset("h100-sxm", nodes=2), 64, Precision(compute="bf16"))
    rule = UnitRule(match="*", mode="keep", recompute="full")
    given = {"batch": Batch(micro_batches=8), "precision": problem.precision, "unit": (rule,)}
    one, other = (
        Plan(mesh=Mesh(pipe=4, data=4), pipeline=Pipeline(schedule=name), **given)  # type: ignore[arg-type]
        for name in ("1f1b", "zb-h1")
    )
    assert (
        export(one, problem, "megatron").predicted == export(other, problem, "megatron").predicted
    )  # 1F1B runs instead
    rows, data = (Plan(mesh=mesh, **given) for mesh in (Mesh(data=2, row=4, col=2), Mesh(data=8, col=2)))  # type: ignore[arg-type]
    for system in ("megatron", "torchtitan"):
        assert export(rows, problem, system).predicted == export(data, problem, system).predicted


@pytest.mark.parametrize("pipe", [16, 17, 32, 33, 34])
def test_pipelines_of_about_as_many_ranks_as_layers(pipe: int) -> None:
    for system in ("megatron", "torchtitan"):
        assert "a step" in exported(system, pipe).predicted


def test_rounds_that_interleaved_schedules_need() -> None:
    plan = Plan(
        mesh=Mesh(pipe=4), batch=Batch(micro_batches=9), pipeline=Pipeline(schedule="interleaved", stages_per_rank=2)
    )
    problem = PlanProblem(SPEC, Cluster.preset("h100-sxm"), 9, Precision(compute="bf16"))
    assert option(export(plan, problem, "torchtitan"), "pipeline_parallel_schedule") == "PipelineScheduleMulti"
    found = export(plan, problem, "megatron")
    assert "virtual" not in str(found.options)
    assert [x for x in found.lost if "no multiple of 4" in x]


def test_replicas_with_columns_are_sharded_in_torchtitan() -> None:
    problem = PlanProblem(SPEC, Cluster.preset("h100-sxm"), 16, Precision(compute="bf16"))
    found = export(Plan(mesh=Mesh(data=4, col=2), precision=problem.precision), problem, "torchtitan")
    assert option(found, "data_parallel_shard_degree") == "4"
    assert [x for x in found.lost if x.startswith("replicas together with")]
