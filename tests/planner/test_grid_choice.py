"""The grid in plans: flows by the cluster's links, what is kept by its memory, and both in the plan that a run gets."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli import main
from fourfold.cluster import Cluster
from fourfold.config import ModelConfig
from fourfold.model.operators import ModelSpec
from fourfold.plan import Plan, Precision, Tensor
from fourfold.planner.api import find_plan, judge
from fourfold.planner.evaluate import predict
from fourfold.planner.grid_cost import grid_axes
from fourfold.planner.problem import PlanProblem, parse_fixes
from fourfold.planner.report import with_report
from fourfold.tensor.costs import Move
from fourfold.tensor.products import flows_of_plan

MODEL = ModelConfig(family="llama", layers=8, hidden=4096, heads=32, kv_heads=8, ffn=11008, vocab=32000, seq_len=2048)


def question(batch: int = 64, memory: str = "80GB", bandwidth: str = "x1") -> PlanProblem:
    cluster = Cluster.preset("a100-80g", nodes=2).what_if({"memory": memory, "bandwidth": bandwidth})
    return PlanProblem(ModelSpec.from_config(MODEL.resolve()), cluster, batch, Precision(compute="bf16"))


def plan_for(problem: PlanProblem, *fix: str) -> Plan:
    return with_report(find_plan(problem, parse_fixes(list(fix))), problem)


def test_axes_have_the_bandwidth_of_the_networks_they_cross() -> None:
    s = question()
    near, *_ = s.cluster.level
    col, row = (Move("F", axis, "weights", "all_gather", 10**8) for axis in ("col", "row"))  # type: ignore[arg-type]
    inside, across = grid_axes(s, 2, 4), grid_axes(s, 4, 4)  # nodes of eight
    assert inside.seconds(col, 2) == pytest.approx(2e8 / near.bandwidth, rel=0.1)
    assert inside.seconds(row, 2) == pytest.approx(2e8 / near.bandwidth, rel=0.1)
    assert across.seconds(row, 2) > 1.5 * across.seconds(col, 2)
    many = col._replace(elements=10, calls=1000)
    assert inside.seconds(many, 2) > 1000 * near.latency


def test_flows_are_in_the_plan_and_explained(tmp_path: Path) -> None:
    s = question()
    plan = plan_for(s, "row=4", "col=4", "data=1", "micro_batch_size=1")
    said = {k: v for k, v in asdict(plan.tensor.flows).items() if v != "auto"}
    assert set(said) == {"qkv", "out", "up", "down", "proj"}
    text = plan.explain()
    for part in ("on the grid, kept:", "qkv", "overlapped with", "would expose"):
        assert part in text
    plan.save(tmp_path / "plan.toml")
    again = Plan.load(tmp_path / "plan.toml")
    assert again.tensor == plan.tensor
    assert s.spec.config is not None
    run = {name: flow for name, (_, flow) in flows_of_plan(s.spec.config, again, s.global_batch).items()}
    assert run == said  # a run does as the plan says, and measures nothing


def test_links_change_the_flows() -> None:
    """A row that crosses hosts slowly, and few tokens: weights stay; with fast links they move."""
    plan = Plan.from_dict(
        {"mesh": {"data": 1, "row": 4, "col": 4}, "batch": {"micro_batches": 16}, "precision": {"compute": "bf16"}}
    )
    flows = [judge(plan, question(bandwidth=b)).tensor.flows for b in ("x100", "x0.02")]
    assert flows[0] != flows[1]
    assert "ws" in flows[1].up
    assert flows[0].up == "os"
    by_hand = replace(plan, tensor=Tensor(flow="ls"))
    assert judge(by_hand, question()).tensor.flows.qkv == "ls"


def test_what_fits_is_kept() -> None:
    fixed = ("row=4", "col=2", "data=2", "pipe=1", "micro_batch_size=2")
    roomy = plan_for(question(), *fixed)
    assert "weights" in roomy.tensor.keep
    scarce = plan_for(question(memory="11GB"), *fixed, "optimizer=device", "activations=device")
    assert len(scarce.tensor.keep) < len(roomy.tensor.keep)
    assert plan_for(question(), *fixed, "keep=none").tensor.keep == ()
    assert plan_for(question(), *fixed, "keep=inputs").tensor.keep == ("inputs",)


@pytest.mark.parametrize("keep", [("weights",), ("inputs",), ("gradients",)])
def test_keeping_costs_memory_and_saves_time(keep: Any) -> None:
    s = question(bandwidth="x0.1")
    plan = Plan.from_dict({"mesh": {"data": 2, "row": 2, "col": 4}, "batch": {"micro_batches": 4}})
    plan = judge(replace(plan, precision=s.precision), s)
    kept = replace(plan, tensor=replace(plan.tensor, keep=keep))
    before, after = predict(plan, s), predict(kept, s)
    assert after.seconds < before.seconds
    assert after.peak.peak > before.peak.peak
    off = predict(replace(plan, tensor=replace(plan.tensor, overlap=False)), s)
    assert off.seconds > before.seconds
    assert off.peak.peak <= before.peak.peak


def test_a_dry_run_shows_the_flows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.toml").write_text('[mesh]\nrow = 2\ncol = 2\n[tensor]\nkeep = ["weights"]\n')
    main(["train", "configs/gpt-tiny.toml", "--plan", str(tmp_path / "plan.toml"), "--dry-run"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "qkv os, out ls, up os, down ls, proj os (by bytes and calls)" in shown
    assert "keeping weights" in shown
