"""The device benchmark runs on a CPU, small."""

from __future__ import annotations

import torch

from benchmarks.tensor_device import FLOWS, PLANES, measure


def test_quick() -> None:
    torch.set_num_threads(1)
    rows = list(measure(quick=True))
    assert len(rows) == len(FLOWS) * len(PLANES) + 2 + 4
    assert all(row.ours > 0 and row.theirs > 0 for row in rows)
