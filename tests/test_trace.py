"""Traces: every collective, message and part of a step is in them, and every rank's time is accounted for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fourfold.errors import RunDirError
from fourfold.plan import Plan
from fourfold.program import Gather
from fourfold.program.stages import lay_out_pipeline
from fourfold.train.rundir import RunDir, read_metrics
from fourfold.view.run import compare_step
from fourfold.view.steps import median_step, read_steps
from tests.helpers import make_config, run_training


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Two stages, two replicas; zero3 and recomputation."""
    path = tmp_path_factory.mktemp("trace") / "run"
    config = make_config(path, train={"steps": 5, "global_batch": 8}, log={"trace": 2}, checkpoint={"every": 4})
    unit = {"match": "blocks.*", "mode": "zero3", "recompute": "full"}
    plan = {"mesh": {"pipe": 2, "data": 2}, "batch": {"micro_batches": 2}, "unit": [unit]}
    run_training(config, plan, 4)
    return RunDir.find(str(path))


def test_what_is_recorded(run: RunDir) -> None:
    steps = read_steps(run)
    assert [s.step for s in steps] == [1, 2, 4]
    config, plan = run.read()
    programs = lay_out_pipeline(config.model, plan, 8).programs.programs
    last = steps[-1]
    assert list(last.ranks) == [0, 1, 2, 3]
    for rank, r in last.ranks.items():
        kinds = {e.kind for e in r.events}
        assert {"all_gather", "reduce_scatter", "message", "send", "recompute", "data", "update", "between"} <= kinds
        assert all(e.size > 0 for e in r.events if e.ranks or e.kind in ("message", "send"))
        gathered = [e.what.split()[-1] for e in r.events if e.kind == "all_gather" and e.what.startswith("the param")]
        asked = [i.unit for i in programs[rank // 2].instructions if isinstance(i, Gather) and "blocks" in i.unit]
        assert sorted(gathered) == sorted(asked)
        assert r.memory
        assert r.peak is not None
        assert min(r.peak[2][part] for part in ("parameters", "optimizer state")) > 0
    sent = {e.what: e.size for r in last.ranks.values() for e in r.events if e.kind == "send"}
    received = {e.what: e.size for r in last.ranks.values() for e in r.events if e.kind == "message"}
    assert [what for what, _ in last.pauses] == ["save"]
    assert sent == received
    assert len(sent) == 6  # an activation and a gradient per micro-batch; the tied weight and its gradient


def test_collectives_match_across_ranks(run: RunDir) -> None:
    steps = list(read_steps(run))
    assert steps
    for traced in steps:
        found: dict[tuple[str, tuple[int, ...], int], list[tuple[int, str, int]]] = {}
        for rank, r in traced.ranks.items():
            for e in r.events:
                if e.ranks:
                    found.setdefault((e.group, e.ranks, e.number), []).append((rank, e.what, e.size))
        assert found
        for key, members in found.items():
            assert [rank for rank, *_ in members] == list(key[1])
            assert len({(what, size) for _, what, size in members}) == 1


def test_every_rank_is_accounted_for(run: RunDir) -> None:
    steps = list(read_steps(run))
    assert steps
    for traced in steps:
        for r in traced.ranks.values():
            assert sum(p.seconds for p in r.parts) == pytest.approx(r.seconds)
            assert r.spent("other") < 0.05 * r.seconds
            assert r.spent("forward", "backward") > 0
        path = [part for _, part in traced.path]
        assert [a.end for a in path[:-1]] == pytest.approx([b.start for b in path[1:]], abs=1e-6)
        assert path[-1].end == max(r.end for r in traced.ranks.values())
        assert path[0].start in [r.start for r in traced.ranks.values()]


def test_the_median_step_is_typical(run: RunDir) -> None:
    steps = read_steps(run)
    chosen = median_step(steps)
    later = sorted(s.seconds for s in steps if s.step > 1)
    assert next(s.seconds for s in steps if s.step == chosen) == later[len(later) // 2]
    assert median_step(steps[:1]) == steps[0].step


def test_metrics_have_waits(run: RunDir) -> None:
    lines = [m for m in read_metrics(run) if "exposed_seconds" in m]
    assert [m["step"] for m in lines] == [2, 3, 5]  # steps 1, 2 and 4 were traced
    assert all(m["exposed_seconds"] > 0 and 0 < m["bubble"] < 1 for m in lines)


def test_waits_are_divided(tmp_path: Path) -> None:
    """A slow sender is a bubble, a slow transfer is exposed; the clock of another host is shifted."""
    config = make_config(tmp_path / "run")
    run = RunDir.create(tmp_path / "run", config, Plan.from_dict({"mesh": {"pipe": 2}}))
    run.unlock()
    (run.path / "trace").mkdir()
    name = "the activation of stage 0, micro-batch 0"
    world, end = ["w", [0, 1]], "the end of the step"
    rows = [
        {
            "host": "a",
            "origin": 100.0,
            "spans": [["0F0", 0.0, 4.0, 0.0]],
            "events": [
                ["send", name, 4.0, 4.0, 4.1, 8, -1, 0, 1],
                ["all_gather", end, 5.0, 5.0, 9.0, 8, 0, 1, -1],
            ],
        },
        {
            "host": "b",
            "origin": 107.0,  # this host's clock is 7 s ahead
            "spans": [["1F0", 6.0, 8.0, 5.0]],
            "events": [
                ["message", name, 1.0, 1.0, 6.0, 8, -1, 0, 0],
                ["all_gather", end, 8.0, 8.0, 9.0, 8, 0, 1, -1],
            ],
        },
    ]
    for rank, row in enumerate(rows):
        line = {"step": 2, "rank": rank, "seconds": 9.0, "groups": [world], **row}
        (run.path / "trace" / f"rank{rank}.jsonl").write_text(json.dumps(line) + "\n")
    (traced,) = read_steps(run)

    def parts(rank: int) -> list[tuple[float, float, str, int]]:
        return [(round(p.start, 6), round(p.end, 6), p.cause, p.peer) for p in traced.ranks[rank].parts]

    assert parts(0) == [
        (0, 4, "forward", -1),
        (4, 5, "other", -1),
        (5, 8, "bubble", 1),
        (8, 9, "exposed", -1),
    ]
    assert parts(1) == [
        (0, 1, "other", -1),
        (1, 4, "bubble", 0),
        (4, 6, "exposed", -1),
        (6, 8, "forward", -1),
        (8, 9, "exposed", -1),
    ]
    path = [(rank, p.cause, round(p.seconds, 6)) for rank, p in traced.path]
    assert path[:3] == [(0, "forward", 4.0), (1, "exposed", 2.0), (1, "forward", 2.0)]


def test_a_line_whose_spans_are_no_ops_is_skipped(run: RunDir) -> None:
    path = run.path / "trace" / "rank0.jsonl"
    before = path.read_text()
    lines = [json.loads(line) for line in before.splitlines()]
    lines[0]["spans"][0][0] = "\x1b[2J"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    steps = read_steps(run)
    assert [list(s.ranks) for s in steps] == [[1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines[:1]))
    with pytest.raises(RunDirError, match="no step was traced by all ranks of a pipeline"):
        compare_step(run)
    path.write_text(before)
