"""The loop on a device that runs behind the host, as a GPU does: nothing is read before the device has done it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fourfold.config import Config
from fourfold.plan import Plan
from fourfold.record import StepTrace
from fourfold.runtime.executor import Span
from fourfold.supervision.stragglers import Stragglers
from fourfold.testing.ranks import run_ranks
from fourfold.train.callbacks import Callback, RunInfo
from fourfold.train.clock import HostClock
from fourfold.train.rundir import RunDir, read_metrics, read_trace
from fourfold.train.trace import TraceFile
from fourfold.train.worker import fit
from tests.helpers import make_config


class LaggingClock:
    """A device that is `ahead` steps behind the host: it reaches a mark when the host waits for it, never before.

    Every mark is 1 ms of device time after the one before. Reading one too early raises what CUDA raises.
    """

    def __init__(self, ahead: int):
        self.ahead = ahead
        self.issued = self.last = 0  # marks; `last`: that the device has reached
        self.most = 0  # marks that the host was ahead by

    def mark(self) -> int:
        self.issued += 1
        self.most = max(self.most, self.issued - self.last)
        return self.issued

    def wait(self, mark: int) -> None:
        self.last = max(self.last, mark)

    def reached(self, mark: int) -> bool:
        return mark <= self.last

    def seconds(self, first: int, second: int) -> float:
        if max(first, second) > self.last:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (second - first) / 1000

    def time_of_day(self, mark: int) -> float:
        return 1e9 + self.seconds(0, mark)

    def lead(self, mark: int, issued: float) -> float:
        return self.seconds(0, mark)


def train(config: Config, clock: LaggingClock, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    monkeypatch.setattr("fourfold.train.worker.make_clock", lambda device: clock)
    with open(os.devnull, "w") as nowhere:
        fit(config, console=nowhere, **options)


def lines(run: Path, key: str = "loss") -> list[dict[str, Any]]:
    return [m for m in read_metrics(RunDir(run)) if key in m]


def traced(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "trace" / "rank0.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_device_behind_the_host_is_read_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """Traces, metrics and seconds of all steps, with pauses for evaluation and saves, stopped and resumed."""
    run, clock = tmp_path / "run", LaggingClock(ahead)
    sections: dict[str, Any] = {"log": {"trace": 4}, "checkpoint": {"every": 5}}
    config = make_config(run, train={"steps": 11, "eval_every": 7}, **sections)
    train(config, clock, monkeypatch)
    assert traced(run) == [1, 4, 8]
    found = lines(run)
    assert [m["step"] for m in found] == list(range(1, 12))
    per_step = found[1]["seconds"]
    untraced = [m["seconds"] for m in found if m["step"] not in traced(run)]
    assert untraced == pytest.approx([per_step] * 8)  # the last one, too
    for line in read_trace(run / "trace" / "rank0.jsonl"):
        assert line is not None
        assert {"between", "data", "unit", "program", "norm", "update"} <= {e[0] for e in line["events"]}
        assert max(e[4] for e in line["events"]) < line["seconds"] == pytest.approx(found[line["step"] - 1]["seconds"])
    assert clock.most >= (ahead + 1) * per_step * 1000  # it did run behind
    more = make_config(run, train={"steps": 14, "eval_every": 7}, **sections)
    train(more, LaggingClock(ahead), monkeypatch, resume=True)
    assert traced(run) == [1, 4, 8, 12]
    assert [m["step"] for m in lines(run)] == list(range(1, 15))


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_stop_loses_no_step_that_was_issued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    class StopAt(Callback):
        def on_step(self, run: RunInfo, metrics: dict[str, Any]) -> None:
            if metrics["step"] == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    run = tmp_path / "run"
    config = make_config(run, train={"steps": 20}, log={"trace": 1})
    train(config, LaggingClock(ahead), monkeypatch, callbacks=[StopAt()])
    last = lines(run)[-1]["step"]
    assert last < 20
    assert [m["step"] for m in lines(run)] == traced(run) == list(range(1, last + 1))
    assert [p.name for p in (run / "checkpoints").iterdir()] == [f"step-{last:06d}"]  # what was issued is saved


def test_a_step_with_nothing_to_predict_has_no_loss_and_no_gradient(tmp_path: Path) -> None:
    """Windows of concatenated text may consist of prompts alone; 0 / 0 would be a step that is not finite."""
    config = make_config(tmp_path / "run", data={"packing": "concat", "eval_fraction": 0.1}, train={"eval_every": 4})
    prompts = [{"tokens": list(range(60, 100)), "loss_mask": [0] * 40} for _ in range(40)]
    with open(os.devnull, "w") as nowhere:
        fit(config, data=prompts, console=nowhere)
    assert [(m["loss"], m["grad_norm"], m["skipped"]) for m in lines(tmp_path / "run")] == [(0.0, 0.0, 0)] * 4
    assert [m["eval_loss"] for m in lines(tmp_path / "run", "eval_loss")] == [0.0]


def test_the_time_that_saves_and_evaluations_take_is_a_metric(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    out = (tmp_path / "out.txt").open("w")
    for mode in ("sync", "async"):
        config = make_config(run / mode, train={"eval_every": 2}, checkpoint={"every": 2, "mode": mode})
        fit(config, console=out)
        assert [m["step"] for m in lines(run / mode, "save_seconds")] == [2, 4]
        assert [m["step"] for m in lines(run / mode, "eval_seconds")] == [2, 4]
        kinds = ("save_seconds", "eval_seconds")
        assert all(m[k] > 0 for k in kinds for m in lines(run / mode, k))
    out.close()
    assert (tmp_path / "out.txt").read_text().count("(training waited ") == 4


def test_a_trace_begins_when_its_step_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However late it is written: the rows of a view are as far apart as the ranks were."""

    class Times:
        time = staticmethod(lambda: 1007.0)
        perf_counter = staticmethod(lambda: 7.0)

    monkeypatch.setattr("fourfold.train.clock.time", Times)
    trace = TraceFile(tmp_path, 0, 0, 1, 0, HostClock())
    trace.hold(1, StepTrace(float), [Span("0F0", 2.0, 3.0, 4.0)], 2.0, 5.0)
    trace.write(1)
    trace.close()
    line = json.loads((tmp_path / "rank0.jsonl").read_text())
    assert line["origin"] == 1002.0
    assert line["spans"] == [["0F0", 1.0, 2.0, 1.0]]


def test_damaged_lines_of_a_trace_are_dropped_on_resume(tmp_path: Path) -> None:
    good = '{"step": 3, "rank": 0, "pipe": 0, "origin": 1.5, "spans": [["0F0", 0.0, 1.0, 0.0]]}'
    (tmp_path / "rank0.jsonl").write_bytes(
        f'{good}\n{{"step": 4, "ra\n[]\n\xff\n{{"step": 9}}\n{{"st'.encode("latin-1")
    )
    TraceFile(tmp_path, 0, 0, 1, 5, HostClock()).close()
    assert (tmp_path / "rank0.jsonl").read_text() == f"{good}\n"


def test_who_is_slow_is_said_when_it_lasts() -> None:
    found = Stragglers({"pipe": 2, "data": 3, "depth": 1, "row": 1, "col": 1}, 6)
    usual = [[1.0, 2.0, 0.0]] * 3 + [[3.0, 6.0, 0.0]] * 3  # stages differ: that is no straggler
    assert not any(found.add(usual) for _ in range(100))
    slow = [*usual[:4], [3.0, 9.0, 0.0], usual[5]]
    assert not any(found.add(slow) for _ in range(20))
    assert not any(found.add(usual) for _ in range(10))  # it was a moment
    reports = [found.add(slow) for _ in range(40)]
    assert [i for i, r in enumerate(reports, 1) if r] == [30, 40]
    assert reports[29] == {"rank": 4, "op": "B", "slower": 1.5}
    alone = Stragglers({"pipe": 2, "data": 1, "depth": 1, "row": 1, "col": 1}, 2)
    assert not any(alone.add([[1.0, 1.0, 1.0], [9.0, 9.0, 9.0]]) for _ in range(50))


def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    run_ranks(_slow, 2, make_config(tmp_path / "run", train={"steps": 33}))
    said = lines(tmp_path / "run", "straggler")
    assert [m["step"] for m in said] == [30]
    assert (said[0]["straggler"]["rank"], said[0]["straggler"]["op"]) == (1, "F")
    assert said[0]["straggler"]["slower"] > 1.3


def _slow(rank: int, ranks: int, config: Config) -> None:
    from fourfold.runtime.stage import Stage

    forward = Stage.forward

    def slow(self: Stage, *args: Any, **options: Any) -> Any:
        time.sleep(0.1 * (rank == 1))
        return forward(self, *args, **options)

    Stage.forward = slow  # type: ignore[method-assign]
    with open(os.devnull, "w") as nowhere:
        fit(config, Plan.from_dict({"mesh": {"data": 2}}), console=nowhere)
