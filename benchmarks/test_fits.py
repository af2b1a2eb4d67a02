"""The planner's plans run within their budget, or are refused; fifty of them are `python -m benchmarks.fits`."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from benchmarks.fits import make_case, run_case


@pytest.mark.parametrize("seed", [3, 5, 8])
def test_a_plan_stays_within_its_budget(tmp_path: Path, seed: int) -> None:
    case = make_case(Random(seed), str(tmp_path))
    ended, peak = run_case(case)
    assert ended in ("ran", "refused"), ended
    assert peak <= case.cluster.memory
