"""Memory predicted against bytes counted in real training; the whole table is `python -m benchmarks.memory`."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.common import Row
from benchmarks.memory import measure


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("gpt", {"mesh": {"data": 2}, "unit": [{"match": "*", "mode": "zero3"}], "batch": {"micro_batches": 2}}),
        ("llama", {"mesh": {"pipe": 2}, "batch": {"micro_batches": 4}, "unit": [{"match": "*", "recompute": "full"}]}),
        ("llama", {"mesh": {"col": 2}}),
    ],
)
def test_peaks(model: str, plan: dict[str, Any]) -> None:
    row = measure("", model, plan)
    assert isinstance(row, Row), row
    assert row.ratio == pytest.approx(1.0, abs=0.04)
