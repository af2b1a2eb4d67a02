"""A seeded sample of random plans, and of pairs of them for resuming, equals one process; a wrong one does not pass."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compose


@pytest.mark.timeout(300)
def test_a_sample_of_random_plans_equals_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = compose.sweep(3, 11, [2, 4], tmp_path, pairs=1)
    assert not report.failed
    assert (len(report.passed), report.resumed) == (3, 1)


def test_a_plan_that_trains_otherwise_is_found(tmp_path: Path) -> None:
    one = compose.smallest([compose.FEATURES["zero3"]])
    path = compose.config_of(one.config, tmp_path, "x").train.run_dir
    series = [[1.0, 2.0], [1.0, 2.0], [1.0]]
    job = compose.Job(one, "x")
    assert "instead of" in compose._compared(job, series, tmp_path)
    assert not Path(path).exists()


def test_draws_have_the_features_that_they_name() -> None:
    rng = random.Random(0)
    seen: set[str] = set()
    for _ in range(3000):
        one = compose.draw(rng, rng.choice([2, 4, 8]))
        seen.update(one.features)
        mesh: dict[str, Any] = one.plan["mesh"]
        for name in one.features:
            assert all(mesh[axis] > 1 for axis in compose.FEATURES[name].needs)
        groups = [compose.FEATURES[name].group for name in one.features]
        assert len(groups) == len(set(groups))
    assert seen == set(compose.FEATURES)


def test_pairs_that_are_refused_say_why(tmp_path: Path) -> None:
    features = [compose.FEATURES[name] for name in ("message-driven", "zero3", "data")]
    assert "message-driven" in compose.refusal(compose.smallest(features), tmp_path)
    fine = dataclasses.replace(compose.smallest(features[1:]))
    assert not compose.refusal(fine, tmp_path)
