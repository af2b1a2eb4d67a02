"""The soak, for a few seconds."""

from __future__ import annotations

import pytest

from benchmarks import soak
from fourfold.errors import RankFailure


def test_random_pipelines() -> None:
    reports = soak.soak(60, ranks=3, seed=1)
    assert all(r.steps == 60 and 10 < r.driven < 50 for r in reports)
    assert sum(r.messages for r in reports) > 200


def test_a_wrong_gradient_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that adds a micro-batch's weight gradients twice."""
    honest = soak.RealUnit.accumulate

    def twice(self, grads):  # type: ignore[no-untyped-def]
        honest(self, grads)
        honest(self, grads)

    monkeypatch.setattr(soak.RealUnit, "accumulate", twice)
    with pytest.raises(RankFailure, match="gradient of"):
        soak.soak(5, ranks=2)
