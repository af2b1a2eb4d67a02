"""The benchmark of faults: its shortest sections hold, and a promise that is broken is counted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.faults import damaged, measure


def test_a_dead_rank_and_damaged_files() -> None:
    dead, files = measure(["dead", "damaged"], {"dead": 1, "damaged": 60}, seed=1)
    assert (dead.tries, files.held, files.tries) == (1, 60, 60)
    assert dead.worst > 0  # how long depends on the machine


def test_a_broken_promise_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.faults._damage", lambda copy, outside, chance: str((outside / "x").touch()))
    assert damaged(3, random.Random(0), tmp_path).held == 0  # something outside was touched
