"""The device benchmark runs on a CPU, small."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch

from benchmarks.tensor_device import FLOWS, GRIDS, MICRO_BATCHES, PLANES, measure, tiny_llama
from fourfold.train.one_rank import OneRank, one_of_many


def test_quick() -> None:
    torch.set_num_threads(1)
    rows = list(measure(quick=True))
    assert len(rows) == len(FLOWS) * len(PLANES) + 2 + 4 + 2 * len(GRIDS)
    rows = [row for row in rows if row.metric != "host ms a layer"]  # differences of two times
    assert all(row.ours > 0 and row.theirs > 0 for row in rows)


@pytest.mark.parametrize(
    ("case", "most"), [("4 columns", 1000), ("2 x 2", 1200), ("2 x 2, summa", 2200)], ids=lambda v: str(v)
)
def test_a_layer_calls_few_python_functions(case: str, most: int) -> None:
    """Forward and backward of a micro-batch; without a grid they are about 310."""
    mesh, flow = GRIDS[case]
    with one_of_many(8):
        few, many = (calls(tiny_llama(layers, mesh, flow, "bf16", "cpu")) for layers in (2, 4))
    assert (many - few) / 2 / MICRO_BATCHES < most


def calls(rank: OneRank) -> int:
    """Python functions that a step calls."""
    found = 0

    def seen(frame: FrameType, event: str, value: Any) -> None:
        nonlocal found
        found += event == "call"

    for _ in range(2):  # the first records the order of weights
        rank.step()
        rank.zero_grad()
    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        rank.step()
    finally:
        sys.setprofile(before)
    return found
