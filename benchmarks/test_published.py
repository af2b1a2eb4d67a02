"""Published runs are predicted as well as the documentation says, and the search is as quick."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.common import Row
from benchmarks.published import axonn, hanayo, megatron, searches


def errors(rows: Iterable[Row]) -> list[float]:
    return [abs(r.ratio - 1) for r in rows]


def test_megatron() -> None:
    found = errors(megatron())
    assert len(found) == 8
    assert sum(found) / 8 < 0.03
    assert max(found) < 0.07


def test_axonn_and_hanayo() -> None:
    assert max(errors(axonn())) < 0.08
    on_nvlink = [r for r in hanayo() if not r.case.startswith("TACC")]
    assert sum(errors(on_nvlink)) / len(on_nvlink) < 0.05


def test_choices_are_certified() -> None:
    gaps = [r for r in searches(quick=True) if r.metric == "gap"]
    assert gaps
    assert all(r.ours < r.theirs for r in gaps)
