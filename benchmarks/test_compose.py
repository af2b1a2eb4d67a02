"""A seeded sample of random plans, and of pairs of them for resuming, equals one process; a wrong one does not pass."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compose
from fourfold.offload.activations import ActivationOffload
from fourfold.offload.streamer import Streamer
from fourfold.program import validate
from fourfold.testing.ranks import run_ranks


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


def test_orders_of_their_own_are_valid_and_run(tmp_path: Path) -> None:
    rng = random.Random(4)
    placements = set()
    for _ in range(200):
        schedule = compose.random_schedule(rng, rng.randint(2, 4), rng.choice(compose.MICRO_BATCHES))
        validate(schedule)
        placements.add(schedule.placement)
    assert len(placements) > 100
    while "order" not in (one := compose.draw(rng, 2, 1)).plan.get("pipeline", {}):
        pass
    assert not compose.refusal(one, tmp_path)
    assert compose.run_jobs([compose.Job(one, "own")], tmp_path) == {"own": ""}
    assert list(tmp_path.glob("order-*.json"))


def _on_host(rank: int, ranks: int, job: compose.Job, folder: Path) -> tuple[int, int]:
    made: list[Any] = []
    for kind in (Streamer, ActivationOffload):

        def init(self: Any, *args: Any, of: Any = kind.__init__, **options: Any) -> None:
            made.append(self)
            of(self, *args, **options)

        kind.__init__ = init  # type: ignore[method-assign]
    compose._rank(rank, ranks, [job], folder)
    found = {type(each): each for each in made}
    return len(found[Streamer].buckets), found[ActivationOffload].moved


def test_memory_of_the_host_is_used(tmp_path: Path) -> None:
    """So small a model would else be one bucket of optimizer state, and keep its activations."""
    features = [compose.FEATURES[name] for name in ("optimizer on host", "activations on host")]
    job = compose.Job(compose.smallest(features), "host")
    for buckets, moved in run_ranks(_on_host, 2, job, tmp_path):
        assert buckets > 4
        assert moved > 1 << 20


def test_pairs_that_are_refused_say_why(tmp_path: Path) -> None:
    features = [compose.FEATURES[name] for name in ("message-driven", "zero3", "data")]
    assert "message-driven" in compose.refusal(compose.smallest(features), tmp_path)
    fine = dataclasses.replace(compose.smallest(features[1:]))
    assert not compose.refusal(fine, tmp_path)


def test_the_support_matrix_is_that_of_the_code(tmp_path: Path) -> None:
    """Every pair that it calls refused is, for its reason; a sample of those that work may run (others run in compose itself)."""
    text = (Path(__file__).parent.parent / "docs" / "support.md").read_text()
    names, cells = compose.read_matrix(text)
    assert names == list(compose.FEATURES)
    reasons = {line[2]: line for line in text.splitlines() if line.startswith("| ") and line[3:5] == " |"}
    chance = random.Random(0)
    tried = 0
    for (a, b), cell in cells.items():
        pair = compose.FEATURES[a], compose.FEATURES[b]
        excluded = pair[0].group == pair[1].group or a in pair[1].needs
        assert (cell == compose.EXCLUDED) == excluded, (a, b)
        if excluded or "LoRA" in (a, b) or (cell == compose.WORKS and chance.random() > 0.15):
            continue  # LoRA needs a folder of weights, which a run makes
        tried += 1
        why = compose.refusal(compose.smallest(pair), tmp_path)
        assert bool(why) == (cell != compose.WORKS), (a, b, why)
        assert not why or compose._general(why).replace("|", "\\|") in reasons[cell], (a, b)
    assert tried > 100
