"""Predictions for other systems, and the public `predict`."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fourfold as ff
from fourfold.cluster import Cluster
from fourfold.config import ModelConfig
from fourfold.errors import ClusterError, PlanError
from fourfold.model.operators import ModelSpec
from fourfold.plan import Batch, Mesh, Pipeline, Plan, Precision, UnitRule
from fourfold.planner.api import judge
from fourfold.planner.engines import ENGINES, FOURFOLD, TrainingEngine, own_engine
from fourfold.planner.layouts import layout_of_plan
from fourfold.planner.problem import PlanProblem
from fourfold.planner.unit_cost import UnitChoice, sharding_cost, unit_cost
from fourfold.view.plan_export import export

LLAMA = ModelSpec.from_config(
    ModelConfig(family="llama", layers=16, hidden=4096, heads=32, ffn=11008, vocab=32000, seq_len=4096)
)
A100 = Cluster.preset("a100-80g")
HALF = Precision(compute="bf16", compile=False)
FSDP = Plan(mesh=Mesh(data=8), unit=(UnitRule(match="*", mode="zero3"),), precision=HALF)


def test_predict_is_what_judge_reports() -> None:
    found = ff.predict(FSDP, LLAMA, A100, global_batch=16)
    judged = judge(FSDP, PlanProblem(LLAMA, A100, 16, HALF)).predicted
    assert judged is not None
    assert isinstance(found, ff.Prediction)
    assert found.to_dict().items() <= judged.items()
    assert sum(found.parts) == pytest.approx(found.seconds)
    assert found.tokens_per_second == pytest.approx(16 * 4096 / found.seconds)
    assert 0.3 < found.mfu < 0.75
    assert found.fits
    assert [sum(m.parts.values()) for m in found.memory] == [m.peak for m in found.memory]
    assert found.memory[0].parts["activations"] > 0


def test_a_prediction_fits_its_host_too() -> None:
    hosted = replace(FSDP, memory=replace(FSDP.memory, optimizer="host"))
    assert ff.predict(hosted, LLAMA, A100, global_batch=16).fits
    found = ff.predict(hosted, LLAMA, A100.what_if({"host": "8GiB"}), global_batch=16)
    assert found.peak.peak < found.usable
    assert found.memory[0].host > found.host_memory == 2**30
    assert not found.fits


def test_weight_gradients_in_fp8_are_the_engines() -> None:
    """torchao and Transformer Engine multiply all three matmuls of a linear in fp8, Fourfold two."""
    fp8 = replace(FSDP, precision=replace(HALF, matmul="fp8"))
    h100 = Cluster.preset("h100-sxm")

    def gain(engine: TrainingEngine) -> float:
        wide, narrow = (ff.predict(p, LLAMA, h100, global_batch=16, engine=engine).compute for p in (FSDP, fp8))
        return wide / narrow

    assert not FOURFOLD.fp8_weight_grad
    for name in ("torchtitan", "megatron", "nemo"):
        engine = ENGINES[name]
        assert gain(engine) > 1.1 * gain(replace(engine, fp8_weight_grad=False)), name


def test_predict_refuses_what_cannot_run() -> None:
    with pytest.raises(ClusterError, match="cluster = None: give a Cluster, the name of a preset, or a file's name"):
        ff.predict(FSDP, LLAMA, None, global_batch=16)  # type: ignore[arg-type]
    deeper = replace(FSDP, unit=(UnitRule(match="blocks.16.mlp", mode="keep"), *FSDP.unit))
    with pytest.raises(PlanError, match=r"no unit matches 'blocks.16.mlp': this model's last is blocks.15.mlp"):
        ff.predict(deeper, LLAMA, A100, global_batch=16)
    with pytest.raises(PlanError, match=r"engine = 'torchtitn'; did you mean 'torchtitan'\?"):
        ff.predict(FSDP, LLAMA, A100, global_batch=16, engine="torchtitn")
    with pytest.raises(PlanError, match="global batch 12 does not divide"):
        ff.predict(FSDP, LLAMA, A100, global_batch=12)
    with pytest.raises(PlanError, match="but a100-80g has 8 devices"):
        ff.predict(replace(FSDP, mesh=Mesh(data=16)), LLAMA, "a100-80g", global_batch=16)
    with pytest.raises(PlanError, match="global_batch"):
        ff.predict(FSDP, LLAMA, A100, global_batch=0)


def test_unfused_operators_cost_time_and_compiling_saves_it() -> None:
    def seconds(engine: str, compiled: bool) -> float:
        plan = replace(FSDP, precision=replace(HALF, compile=compiled))
        return ff.predict(plan, LLAMA, A100, global_batch=16, engine=engine).seconds

    ours, titan = seconds("fourfold", False), seconds("torchtitan", False)
    assert 1.03 * ours < titan < 1.2 * ours
    assert titan - seconds("torchtitan", True) > 2 * (ours - seconds("fourfold", True))


def test_full_recomputation_leaves_out_what_the_engine_does() -> None:
    plan = replace(FSDP, unit=(UnitRule(match="*", mode="zero3", recompute="full"),))
    found = {name: ff.predict(plan, LLAMA, A100, global_batch=16, engine=name).recompute for name in ENGINES}
    assert found["fourfold"] < found["torchtitan"]
    assert found["fourfold"] < found["megatron"]


def test_memory_of_fsdp_with_fp32_shards() -> None:
    """Shards are the masters: 4 bytes of parameters, 8 of state. Reduced gradients are fp32, whatever they were reduced in."""
    narrow = replace(FSDP, precision=replace(HALF, reduce="bf16"), batch=Batch(micro_batches=2))
    ours = ff.predict(narrow, LLAMA, A100, global_batch=16).peak
    theirs = ff.predict(narrow, LLAMA, A100, global_batch=16, engine="torchtitan").peak
    shard = LLAMA.parameters / 8
    assert ours.parts["parameters"] == pytest.approx(2 * shard, rel=0.01)
    assert theirs.parts["parameters"] == pytest.approx(4 * shard, rel=0.01)
    assert ours.parts["optimizer"] == pytest.approx(12 * shard, rel=0.01)
    assert theirs.parts["optimizer"] == pytest.approx(8 * shard, rel=0.01)

    def sharded_gradients(engine: str) -> float:
        problem = PlanProblem(LLAMA, A100, 16, narrow.precision).with_engine(engine)
        layout = layout_of_plan(narrow, problem)
        return sharding_cost(problem, layout, "mlp", UnitChoice("zero3")).reduced_bytes

    assert sharded_gradients("torchtitan") == 2 * sharded_gradients("fourfold")


def test_a_block_is_recomputed_from_one_input() -> None:
    """With both units of a block recomputed in full, torchtitan saves its input alone, and recomputes both before its backward."""
    plan = replace(FSDP, unit=(UnitRule(match="*", mode="zero3", recompute="full"),))
    problem = PlanProblem(LLAMA, A100, 16, HALF)
    layout, choice = layout_of_plan(plan, problem), UnitChoice("zero3", recompute="full")
    costs = {
        (name, kind): unit_cost(problem.with_engine(engine), layout, kind, choice)
        for name, engine in (("ours", FOURFOLD), ("blocks", replace(FOURFOLD, recomputes_blocks=True)))
        for kind in ("attn", "mlp")
    }
    hidden = 2 * 4096 * layout.micro_batch_size * 4096
    assert [costs["ours", kind].saved_bytes for kind in ("attn", "mlp")] == [hidden, hidden]
    assert [costs["blocks", kind].saved_bytes for kind in ("attn", "mlp")] == [hidden, 0]
    assert costs["blocks", "attn"] == costs["ours", "attn"]
    attention = unit_cost(problem, layout, "attn", UnitChoice("zero3")).saved_bytes - hidden
    more = costs["blocks", "mlp"].backward_workspace - costs["ours", "mlp"].backward_workspace
    assert more == pytest.approx(attention + hidden)


def test_kernels_of_attention() -> None:
    problem = PlanProblem(LLAMA, A100, 16, HALF)

    def seconds(kernel: str) -> float:
        engine = TrainingEngine(attention=kernel)  # type: ignore[arg-type]
        return ff.predict(FSDP, LLAMA, A100, global_batch=16, engine=engine).compute

    assert seconds("flash-1") > 1.05 * seconds("flash-2") == 1.05 * seconds("best")
    assert problem.with_engine("torchtitan").with_engine("fourfold").cluster == A100


def test_a_device_waits_for_its_host() -> None:
    """Small layers on a grid: Python takes longer than the kernels; on one rank with large ones it does not."""
    small = ModelSpec.from_config(ModelConfig(family="llama", layers=8, hidden=1024, heads=8, vocab=512, seq_len=512))
    grid = Plan(mesh=Mesh(row=2, col=2, data=2), precision=HALF)
    found = ff.predict(grid, small, A100, global_batch=16)
    ahead = ff.predict(grid, small, A100, global_batch=16, engine=TrainingEngine())
    matmuls = 4 * 8 + 1
    assert found.seconds >= (2 * 8 + 2) * FOURFOLD.host_unit + matmuls * (FOURFOLD.host_matmul + FOURFOLD.host_row)
    assert found.seconds > 2 * ahead.seconds
    large = [ff.predict(FSDP, LLAMA, A100, global_batch=16, engine=e).seconds for e in (FOURFOLD, TrainingEngine())]
    assert large[0] == pytest.approx(large[1], rel=1e-3)  # but for the embedding
    blocking = replace(FOURFOLD, synchronous=True)
    assert ff.predict(FSDP, LLAMA, A100, global_batch=16, engine=blocking).seconds > large[0] + 0.03


def test_zero1_in_a_pipeline_is_not_paid_by_every_stage() -> None:
    """Where a step's collectives are before the first forward and after the last backward, all stages have them at once."""
    cluster = Cluster.preset("a100-80g", nodes=8).what_if({"bandwidth": "x0.1"})
    plan = Plan(
        mesh=Mesh(pipe=8, data=8),
        batch=Batch(micro_batches=16),
        pipeline=Pipeline(schedule="1f1b"),
        unit=(UnitRule(match="*", mode="keep"),),
        precision=HALF,
    )
    at_ends, between = (
        ff.predict(plan, LLAMA, cluster, global_batch=128, engine=TrainingEngine(zero1_at_ends=x))
        for x in (True, False)
    )
    assert at_ends.seconds < between.seconds
    assert at_ends.exposed > 0


def test_an_export_is_judged_as_the_other_system_runs_it() -> None:
    """What fits here and not there is recomputed, or said not to fit."""
    problem = PlanProblem(LLAMA, A100, 16, HALF)
    plan = replace(FSDP, unit=(UnitRule(match="*", mode="zero3"),))
    found = export(plan, problem, "torchtitan")
    there = problem.with_engine("torchtitan").cluster
    assert "a step" in found.predicted
    assert there.usable < A100.usable
    assert found.predicted in str(found)
    full = Cluster.preset("a100-80g").what_if({"memory": "12GiB"})
    refused = export(plan, replace(problem, cluster=full), "torchtitan")
    assert "does not fit" in refused.predicted
    assert any("the memory limit" in x for x in refused.lost)


def test_gradients_are_narrow_where_nothing_else_fits() -> None:
    """And the report says so, and which units have which mode."""
    small = Cluster.preset("a100-80g").with_devices(1).what_if({"memory": "20GiB", "host": "64GiB"})
    plan = ff.make_plan(LLAMA, small, global_batch=4)
    assert plan.precision.reduce == "bf16"
    assert "gradients are accumulated and reduced in bf16: with fp32 no plan fits" in plan.explain()
    with pytest.raises(PlanError, match="no plan fits"):
        ff.make_plan(LLAMA, small, global_batch=4, precision="bf16")


def test_units_that_differ_are_listed() -> None:
    rules = (
        *(UnitRule(match=f"blocks.{i}.mlp", mode="zero2", recompute="selective") for i in (0, 1, 2, 5)),
        UnitRule(match="*", mode="zero3"),
    )
    text = judge(replace(FSDP, unit=rules), PlanProblem(LLAMA, A100, 16, HALF).with_engine("torchtitan")).explain()
    assert "  zero2, recompute selective: blocks.0-2,5.mlp" in text
    assert "  zero3: *" in text
    assert "predicted for torchtitan" in text
    assert "units (" not in judge(FSDP, PlanProblem(LLAMA, A100, 16, HALF)).explain()


def test_deterministic_attention_is_slower_where_another_kernel_is_the_best() -> None:
    """On Hopper, whose best kernel is cuDNN's; narrow heads are slower there, too."""
    seconds = {}
    for name, preset in (("hopper", "h200"), ("ampere", "a100-80g")):
        for width, heads in ((128, 16), (64, 32)):
            shape = ModelConfig(family="llama", layers=4, hidden=2048, heads=heads, seq_len=8192, vocab=1024)
            for deterministic in (True, False):
                engine, cluster = own_engine(deterministic), Cluster.preset(preset)
                found = ff.predict(FSDP, ModelSpec.from_config(shape), cluster, global_batch=8, engine=engine)
                seconds[name, width, deterministic] = found.compute
    assert seconds["hopper", 128, True] > 1.1 * seconds["hopper", 128, False]
    assert seconds["hopper", 64, False] > 1.01 * seconds["hopper", 128, False]
    assert seconds["ampere", 128, True] == seconds["ampere", 128, False]
