"""What the grid's collectives expose in a chain of units: computed by hand."""

from __future__ import annotations

import pytest

from fourfold.cluster import Cluster, Device, Level
from fourfold.config import ModelConfig
from fourfold.model.operators import ModelSpec
from fourfold.plan import Precision, Tensor
from fourfold.planner.grid_cost import grid_times
from fourfold.planner.layouts import GridShape
from fourfold.planner.problem import PlanProblem


def problem() -> PlanProblem:
    device = Device(
        kind="cpu", matrix={"bf16": 1e9, "fp32": 1e9, "fp64": 1e9}, efficiency=1.0, operator=0.0, memory_rate=1e15
    )
    cluster = Cluster(nodes=4, devices=1, device=device, level=(Level(bandwidth=1e7, latency=0.0),), overlap=1.0)
    model = ModelConfig(family="gpt", layers=4, hidden=128, heads=4, seq_len=32, vocab=128, tie=False)
    return PlanProblem(ModelSpec.from_config(model), cluster, 16, Precision())


def test_weights_are_gathered_one_matmul_ahead() -> None:
    """Rows alone, forward: `out`, which is short, overlaps little of the gather of `up`, which overlaps most of that of `down`."""
    mlp, attn = (grid_times(problem(), GridShape(128, 4, 1, Tensor(flow="os")))[kind] for kind in ("mlp", "attn"))
    weight = 3 / 4 * 4 * 128 * 512 / 1e7  # up, and down: 19.7 ms
    out, up = (2 * 128 * 128 * n / 1e9 for n in (128, 512))  # seconds of the matmuls
    assert mlp.forward[0].exposed == pytest.approx(weight - out + weight - up, rel=1e-3)
    assert mlp.forward[1].total == 0.0
    assert attn.forward[0].exposed == pytest.approx(0.0, abs=1e-6)  # all of it overlaps with `down` and `qkv`


def test_without_overlap_everything_is_exposed() -> None:
    for kind, found in grid_times(problem(), GridShape(128, 2, 2, Tensor(overlap=False))).items():
        for axis in (*found.forward, *found.backward):
            assert axis.exposed == pytest.approx(axis.total), kind


def test_a_split_backward_overlaps_less() -> None:
    one, two = (grid_times(problem(), GridShape(128, 1, 4, Tensor()), splits)["mlp"] for splits in (False, True))
    assert two.backward[1].exposed > one.backward[1].exposed
    assert two.backward[1].total == pytest.approx(one.backward[1].total)
