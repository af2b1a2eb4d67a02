"""Published runs are predicted as well as the documentation says, and the search is as quick."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks import published_layouts
from benchmarks.common import Row
from benchmarks.published import axonn, hanayo, megatron, searches

WITHIN = {
    "mpt-h100": 0.05,
    "mpt-a100-80": 0.2,
    "titan-h100": 0.2,
    "ibm": 0.1,
    "aleph-alpha": 0.1,
    "nemotron-4": 0.06,
    "llama-3": 0.06,
}
"""Bounds on the mean signed errors of sources that were held out and are predicted well."""
FIT = ("mpt-a100-80", "mpt-h100", "titan-h100", "ibm")
"""Sources of which every run that ran is predicted to fit."""


def errors(rows: Iterable[Row]) -> list[float]:
    return [abs(r.ratio - 1) for r in rows]


def test_megatron() -> None:
    found = errors(megatron())
    assert len(found) == 8
    assert sum(found) / 8 < 0.1
    assert max(found) < 0.13


def test_axonn_and_hanayo() -> None:
    assert max(errors(axonn())) < 0.08
    on_nvlink = [r for r in hanayo() if not r.case.startswith("TACC")]
    assert sum(errors(on_nvlink)) / len(on_nvlink) < 0.05


def test_choices_are_certified() -> None:
    gaps = [r for r in searches(quick=True) if r.metric == "gap"]
    assert gaps
    assert all(r.ours < r.theirs for r in gaps)


def test_rows_with_layouts() -> None:
    """Every fourth row: errors by source, and of all."""
    found = published_layouts.judge_all(every=4)
    by_source: dict[str, list[float]] = {}
    for j in found:
        if j.error is not None:
            by_source.setdefault(j.source, []).append(j.error)
    assert len(by_source) == 6
    for source, signed in by_source.items():
        assert abs(sum(signed) / len(signed)) < 0.15, source
    assert sum(abs(e) for signed in by_source.values() for e in signed) / sum(map(len, by_source.values())) < 0.1


def test_rows_that_were_held_out() -> None:
    """Every fourth row of sources with which the model was not developed."""
    found = published_layouts.judge_all(published_layouts.HELD_OUT, every=4)
    by_source: dict[str, list[float]] = {name: [] for name in published_layouts.HELD_OUT}
    for j in found:
        if j.error is not None:
            by_source[j.source].append(j.error)
    means = {source: sum(signed) / len(signed) for source, signed in by_source.items()}
    assert sorted(map(abs, means.values()))[len(means) // 2] < 0.15, means
    for source, most in WITHIN.items():
        assert abs(means[source]) < most, (source, means[source])
    assert all(j.fits for j in found if j.source in FIT and not j.facts.get("oom"))


def test_rows_with_layouts_are_plans() -> None:
    """Every row of the file makes a plan of its GPUs; a few are predicted."""
    rows = [r for source in published_layouts.DATA["sources"] for r in published_layouts.DATA["rows"][source]]
    assert len(rows) == 214 + 123 + 166
    for r in rows:
        plan = published_layouts.plan_of(r)
        assert plan.mesh.ranks == r["gpus"] == published_layouts.cluster_of(r).ranks, r
        assert plan.micro_batches(r["gbs"]) * r["mbs"] * r["dp"] == r["gbs"], r
    assert published_layouts.rank_correlation([1, 2, 3, 4], [2, 4, 6, 9]) == 1
    assert published_layouts.rank_correlation([1, 2, 3, 4], [9, 6, 4, 2]) == -1
