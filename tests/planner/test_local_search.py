"""Local search: never slower, never more memory than there is, and what is fixed stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fourfold.cluster import Cluster
from fourfold.config import ModelConfig
from fourfold.model.operators import ModelSpec
from fourfold.plan import Plan, Precision
from fourfold.planner.build import Candidate
from fourfold.planner.evaluate import predict
from fourfold.planner.layouts import layout_of_plan
from fourfold.planner.local_search import improve
from fourfold.planner.problem import PlanProblem, SearchConfig, parse_fixes

CLUSTER = Cluster.preset("v100-16g", nodes=2).what_if({"memory": "10GB"})
MODEL = ModelConfig(family="llama", layers=8, hidden=2048, heads=16, kv_heads=8, ffn=5632, vocab=32000, seq_len=2048)
PROBLEM = PlanProblem(ModelSpec.from_config(MODEL), CLUSTER, 64, Precision(compute="fp32"))


def improved(start: Plan, *fix: str, **config: object) -> Candidate:
    candidate = Candidate(layout_of_plan(start, PROBLEM), start, predict(start, PROBLEM))
    return improve(PROBLEM, parse_fixes(list(fix)), replace(SearchConfig(), **config), candidate)  # type: ignore[arg-type]


def small(optimizer: str = "device") -> Plan:
    """A plan that holds little: everything sharded and recomputed."""
    rule = {"match": "*", "mode": "zero3", "reduce": "micro-batch", "recompute": "full"}
    mesh, batch = {"data": 16}, {"micro_batches": 2}
    return Plan.from_dict({"mesh": mesh, "batch": batch, "memory": {"optimizer": optimizer}, "unit": [rule]})


@pytest.mark.parametrize("optimizer", ["device", "auto"])
def test_memory_that_is_left_is_used(optimizer: str) -> None:
    start = small(optimizer)
    before, after = predict(start, PROBLEM), improved(start)
    assert after.prediction.seconds < 0.9 * before.seconds
    assert 0.97 * CLUSTER.usable < after.prediction.peak.peak <= CLUSTER.usable
    assert predict(Plan.from_dict(after.plan.to_dict()), PROBLEM).seconds == pytest.approx(after.prediction.seconds)


def test_filling_memory_gains() -> None:
    assert improved(small()).prediction.seconds < improved(small(), fill_rounds=0).prediction.seconds


def test_what_is_fixed_stays() -> None:
    again = improved(small(), "recompute=full", "optimizer=device")
    assert {again.plan.rule_for(u.name).recompute for u in PROBLEM.spec.units} == {"full"}
    modes = improved(small(), "mode=zero3", "optimizer=device")
    assert {modes.plan.rule_for(u.name).mode for u in PROBLEM.spec.units} == {"zero3"}
    assert modes.prediction.seconds < predict(small(), PROBLEM).seconds
