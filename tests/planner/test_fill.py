"""Filling up: the same plan from wherever it starts, a faster one with more memory, never more than there is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.monotone import MODELS

from fourfold.cluster import Cluster
from fourfold.model.operators import ModelSpec
from fourfold.plan import Plan, Precision
from fourfold.planner.fill import GIB, filled, turned
from fourfold.planner.layout import Setting
from fourfold.planner.polish import Known
from fourfold.planner.predict import predict


def plan_of(optimizer: str = "device", **rule: object) -> Plan:
    return Plan.from_dict(
        {
            "mesh": {"data": 16},
            "batch": {"micro_batches": 2},
            "memory": {"optimizer": optimizer},
            "unit": [{"match": "*", **rule}],
        }
    )


SETTING = Setting(ModelSpec.from_config(MODELS[1]), Cluster.preset("v100-16g", nodes=2), 64, Precision(compute="fp32"))
SMALL = plan_of(mode="zero3", reduce="micro-batch", recompute="full")


def test_it_ends_at_the_same_plan_wherever_it_starts() -> None:
    known: Known = {}
    starts = [
        SMALL,
        plan_of(mode="zero3", reduce="micro-batch"),
        plan_of(mode="keep", reduce="micro-batch", recompute="full"),
    ]
    ends = [filled(SETTING, start, 18.9e9, known).prediction.seconds for start in starts]
    assert max(ends) <= min(ends) * (1 + 1e-5)
    assert max(ends) < 0.9 * predict(SMALL, SETTING).seconds


@pytest.mark.parametrize("optimizer", ["device", "auto"])
def test_a_little_more_memory_is_never_slower_and_all_of_it_is_used(optimizer: str) -> None:
    known: Known = {}
    start, best, limit = replace(SMALL, memory=replace(SMALL.memory, optimizer=optimizer)), float("inf"), 18.5e9
    for _ in range(4):
        plan, prediction, _ = filled(SETTING, start, limit, known)
        assert prediction.seconds <= best * (1 + 1e-9), limit
        assert 0.98 * limit < prediction.peak.peak <= limit
        assert prediction == predict(plan, SETTING, limit)
        best, limit = prediction.seconds, limit * 1.002


def test_a_large_unit_that_chooses_otherwise_is_never_slower() -> None:
    known: Known = {}
    full = filled(SETTING, SMALL, 18.9e9, known)
    other = turned(SETTING, full.plan, 18.9e9, known)
    assert other.prediction.seconds <= full.prediction.seconds
    assert other.prediction.peak.peak <= 18.9e9


def test_what_a_gib_is_worth_is_what_one_more_saves() -> None:
    known: Known = {}
    before, after = (filled(SETTING, SMALL, limit, known) for limit in (18.0e9, 18.0e9 + GIB))
    saved = before.prediction.seconds - after.prediction.seconds
    assert saved == pytest.approx(before.price, rel=0.25)
