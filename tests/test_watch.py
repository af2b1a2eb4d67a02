"""The watchdog: a job in which no rank proceeds ends with a report that names the right rank; a slow one continues."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fourfold.cli import main
from fourfold.collectives import all_reduce
from fourfold.errors import RankFailure
from fourfold.launch import local
from fourfold.launch.place import Place
from fourfold.record import EXIT, RECORD, Record, Ticket
from fourfold.supervision.watch import Beat, FileBoard, Limits, StoreBoard, Watch, make_board, verdict
from fourfold.testing.ranks import run_ranks
from fourfold.train.rundir import RunDir, read_metrics
from tests.helpers import make_config

# ---- the verdict ----


def test_beats_of_hosts_whose_clocks_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The age of a beat was the difference of two hosts' clocks: a slow rank looked as if it was stopped."""
    board = FileBoard(tmp_path)
    watch = Watch(board, 0, 3, Limits.of(8.0), end=lambda text: None)
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def read(*theirs: tuple[int, int, float]) -> dict[int, float]:
        """Ages after a read of (rank, number of the beat, that rank's clock)."""
        watch._hear({r: beat(count=count, clock=clock, time=0.0) for r, count, clock in theirs})
        return {r: round(now[0] - b["time"], 3) for r, b in watch._others.items()}

    # at the first step: rank 1's clock is 900 s behind, rank 2's 5,000 s ahead, and its beat is 0.5 s old
    assert read((1, 5, 100.0), (2, 5, 5999.5)) == {1: 0.0, 2: 0.0}
    now[0] = 2000.0  # much later, rank 1 has been stopped for 4 s
    assert read((1, 900, 1096.0), (2, 900, 7000.0)) == {1: 4.0, 2: 0.0}
    now[0] = 2001.0
    assert read((1, 900, 1096.0), (2, 901, 7000.8)) == {1: 5.0, 2: 0.2}
    now[0] = 9000.0  # rank 2's host slept for 500 s: its beats look as old, until the next one is seen
    assert read((1, 901, 8100.0), (2, 3000, 13500.0))[2] == 500.0
    now[0] = 9001.0
    assert read((1, 902, 8101.0), (2, 3001, 13501.0)) == {1: 0.0, 2: 1.0}


def beat(**fields: Any) -> Beat:
    usual = {
        "count": 1,
        "time": 100.0,
        "clock": 100.0,
        "idle": 9.0,
        "limit": 5.0,
        "setting": "train.timeout",
        "patience": 5.0,
        "phase": "step 3",
        "op": "0F0",
        "device_op": "",
    }
    return usual | {"wait": None, "groups": {}, "where": "f (x.py:1)", "passive": False} | fields


def waits(what: str, number: int, ranks: list[int], **fields: Any) -> Beat:
    wait = {"what": what, "peer": -1, "group": "g", "number": number, "ranks": ranks}
    return beat(wait=wait, groups={"g": [number, what]}, **fields)


def test_nobody_is_blamed_while_somebody_moves() -> None:
    beats = {0: waits("a sum", 4, [0, 1]), 1: beat(idle=0.2)}
    assert verdict(beats, 2, 100.0, 1.0) == ""
    assert verdict(beats, 2, 104.0, 5.0) == ""
    assert verdict(beats, 2, 105.0, 5.5) != ""
    save = {0: waits("a sum", 4, [0, 1]), 1: beat(phase="the save of step 2", limit=600.0)}
    assert verdict(save, 2, 100.0, 1.0) == ""  # it may take longer
    stopped = {0: waits("a sum", 4, [0, 1], limit=600.0, time=110.0), 1: save[1]}
    assert "rank 1 has not answered" in verdict(stopped, 2, 110.0, 1.0)  # but not in silence
    assert verdict(stopped, 2, 110.0, 1.0).startswith("no rank has made progress for 5 s (train.timeout)")
    moved = {r: b | {"idle": 601.0, "limit": 600.0, "setting": "checkpoint.timeout"} for r, b in save.items()}
    assert verdict(moved, 2, 100.0, 1.0).startswith("no rank has made progress for 600 s (checkpoint.timeout)")


def test_verdicts() -> None:
    three = [0, 1, 2]
    waiting = {r: waits("the sum of embed", 7, three) for r in (0, 2)}
    cases: list[tuple[dict[int, Beat], list[str]]] = [
        (  # stopped
            waiting | {1: beat(time=90.0, idle=0.1)},
            ["rank 1 has not answered for 10 s", "rank 2, at step 3, op 0F0: waits in the sum of embed (collective 7 of ranks"],
        ),
        (waiting, ["rank 1 has never reported"]),
        (  # hangs by itself
            waiting | {1: beat(groups={"g": [6, "x"]})},
            ["rank 1 hangs at step 3, op 0F0, in f (x.py:1); it waits for no other rank", "for rank 1, which has not started it"],
        ),
        (  # skipped one: it is ahead in another group
            waiting | {1: beat(wait={"what": "the end", "peer": -1, "group": "w", "number": 3, "ranks": three}, groups={"g": [6, "x"], "w": [3, "the end"]})},
            ["the ranks wait for each other", "rank 0, at step 3, op 0F0: waits in the sum of embed", "for rank 1, which has not", "rank 1, at step 3, op 0F0: waits in the end (collective 3 of ranks 0, 1, 2) for ranks 0, 2"],
        ),
        (  # another order
            waiting | {1: waits("the sum of head", 7, three)},
            ["ranks 0 and 1 disagree: collective 7 of ranks 0, 1, 2 is 'the sum of embed' on rank 0 and 'the sum of head' on rank 1"],
        ),
        (waiting | {1: waiting[0]}, ["ranks 0, 1, 2 have all started the sum of embed and none has finished"]),
        (  # a pipeline
            {0: beat(op="0B3"), 1: beat(wait={"what": "the gradient", "peer": 2}), 2: beat(wait={"what": "the activation", "peer": 0})},
            ["rank 0 hangs at step 3, op 0B3", "rank 1, at step 3, op 0F0: waits for the gradient from rank 2", "from rank 0"],
        ),
        (  # a GPU whose host is ahead of it
            waiting | {1: beat(time=80.0, idle=0.0, device_op="1B0")},
            ["rank 1 has not answered for 20 s", "(the device has done 1B0)"],
        ),
    ]  # fmt: skip
    for beats, expected in cases:
        text = verdict(beats, 3, 100.0, 1.0)
        assert all(part in text for part in expected), text
    assert "rank 0 hangs" not in verdict(waiting | {1: beat(time=90.0)}, 3, 100.0, 1.0)


# ---- a device that lags ----


class Event:
    def __init__(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached


def test_what_a_device_has_not_reached_is_what_a_rank_waits_for() -> None:
    record = Record()
    record.watched = True
    tickets = [Ticket("1F0"), Ticket("the activation", peer=3), Ticket("1B0")]
    events = [Event() for _ in tickets]
    for ticket, event in zip(tickets, events, strict=True):
        record._issued(ticket, event)
    record.poll()
    assert record.blocked_on() is None  # it computes
    events[0].reached = True
    before = record.progress
    record.poll()
    assert record.progress == before + 1
    assert record.device_op == "1F0"
    assert record.blocked_on() is tickets[1]
    events[1].reached = events[2].reached = True
    record.poll()
    assert record.device_op == "1B0"
    assert record.blocked_on() is None


# ---- beats through files and stores ----


def test_no_thread_is_left_in_the_store_when_a_rank_ends(tmp_path: Path) -> None:
    """The interpreter would abort: a run that succeeded would end with SIGABRT."""

    class SlowBoard(FileBoard):
        busy = False

        def publish(self, rank: int, line: str) -> None:
            self.busy = True
            time.sleep(0.2)
            self.busy = False

    board = SlowBoard(tmp_path / "beats")
    with Watch(board, 0, 2, Limits.of(1.0), record=Record(), end=print) as watch:
        while not board.busy:
            time.sleep(0.01)
    assert not board.busy
    assert not any(thread.is_alive() for thread in watch._threads)


def test_beats_are_published_on_a_full_disk(tmp_path: Path) -> None:
    """Overwriting a beat's file needs no more room: else a healthy run would end for lack of heartbeats."""
    board = FileBoard(tmp_path / "beats")
    board.publish(0, json.dumps(beat(where="x" * 500)))
    blocks = (tmp_path / "beats" / "0").stat().st_size
    (tmp_path / "beats" / ".0.partial").mkdir()  # no other file can be written
    board.publish(0, json.dumps(beat(count=2)))
    assert json.loads(board.read(1)[0])["count"] == 2
    assert (tmp_path / "beats" / "0").stat().st_size == blocks


@pytest.mark.parametrize("kind", ["files", "store"])
def test_a_rank_that_skips_a_collective_is_found_by_all(tmp_path: Path, kind: str) -> None:
    texts = run_ranks(_skip, 3, str(tmp_path), kind)
    assert texts[0] == texts[1] == texts[2]  # one verdict for all
    assert re.search(
        r"rank 0, at step 1: waits in sum 2 \(collective 2 of ranks 0, 1, 2\) for rank 1, which has", texts[0]
    )
    assert "rank 1 hangs at step 1, in _skip (" in texts[0]


def _skip(rank: int, ranks: int, folder: str, kind: str) -> str:
    board: Any = FileBoard(Path(folder) / "beats")
    if kind == "store":
        port = Path(folder) / "port"
        if rank == 0:
            server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port.write_text(str(server.port))
        dist.barrier()
        board = make_board(
            dist.PrefixStore("job", dist.TCPStore("127.0.0.1", int(port.read_text()), wait_for_workers=False))
        )
        assert isinstance(board, StoreBoard)
    said: list[str] = []
    with Watch(board, rank, ranks, Limits(0.8, 60, 1, 1), end=said.append):
        RECORD.enter("step 1", 0.8)
        all_reduce(torch.ones(3), dist.group.WORLD, "sum 1", now=True).wait()  # type: ignore[arg-type]
        deadline = time.monotonic() + 15
        if rank != 1:
            all_reduce(torch.ones(3), dist.group.WORLD, "sum 2")  # type: ignore[arg-type]
            RECORD.waiting = Ticket("sum 2", RECORD.groups[dist.group.WORLD], 2)  # type: ignore[index]
        while not said and time.monotonic() < deadline:
            time.sleep(0.02)  # what the main thread is in
    return said[0] if said else "nothing"


# ---- training ----

PLANS: dict[str, dict[str, Any]] = {
    "zero3": {"mesh": {"data": 2}, "unit": [{"match": "*", "mode": "zero3"}]},
    "col": {"mesh": {"col": 2}},
    "pipe": {"mesh": {"pipe": 2}, "batch": {"micro_batches": 4}},
}  # replicas are in tests/test_faults.py


def start(tmp_path: Path, plan: dict[str, Any], *flags: str, **sections: Any) -> int:
    (tmp_path / "c.json").write_text(json.dumps(make_config(tmp_path / "run", **sections).to_dict()))
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    return main(["train", str(tmp_path / "c.json"), "--plan", str(tmp_path / "plan.json"), *flags])


@pytest.mark.parametrize("name", PLANS)
def test_a_stopped_rank_is_named_in_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOURFOLD_FAULTS", f"stop rank=1 step=3 op={'1B0' if name == 'pipe' else '0B0'}")
    begin = time.monotonic()
    assert start(tmp_path, PLANS[name], "--train.timeout", "1.5", train={"steps": 5}) == 1
    assert time.monotonic() - begin < 60  # and not the 30 days of a process group
    error = capfd.readouterr().err
    assert "rank 1 is stopped (SIGSTOP)" in error
    assert re.search(r"rank 0, at step 3, op 0[FB]\d.*: waits (for the gradient of stage 1|in .* for rank 1)", error), (
        error
    )


PHASES = {
    "start": ("step=0 op=start", "train.start_timeout", "start"),
    "connect": ("step=0 op=connect", "train.start_timeout", "the connections between ranks"),
    "final": ("step=3 op=final", "checkpoint.timeout", "the writing of final/"),
    "evaluation": ("step=2 op=evaluation", "train.eval_timeout", "the evaluation after step 2"),
    "save": ("step=2 op=save", "checkpoint.timeout", "the save of step 2"),
}


@pytest.mark.parametrize("kind", ["delay", "stop"])
@pytest.mark.parametrize("name", PHASES)
def test_every_phase_has_a_timeout_of_its_own(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank that hangs and answers is ended by the phase's limit; one that is stopped by the limit of a step."""
    when, setting, at = PHASES[name]
    monkeypatch.setenv("FOURFOLD_FAULTS", f"{kind} rank=1 {when} seconds=60")
    limits = {
        "train.timeout": "30",
        "train.start_timeout": "30",
        "train.eval_timeout": "30",
        "checkpoint.timeout": "30",
    }
    limits["train.timeout" if kind == "stop" else setting] = "1.5"
    flags = [text for key, value in limits.items() for text in (f"--{key.replace('_', '-')}", value)]
    train = {"steps": 3, "eval_every": 2}
    assert start(tmp_path, {"mesh": {"data": 2}}, *flags, train=train, checkpoint={"every": 2, "mode": "sync"}) == 1
    error = capfd.readouterr().err
    if kind == "stop":
        assert "no rank has made progress for 1.5 s (train.timeout)" in error
        assert f"rank 1 is stopped (SIGSTOP) at {at}" in error
    else:
        assert f"no rank has made progress for 1.5 s ({setting})" in error
        assert f"rank 1 hangs at {at}, in _happen (" in error
    assert "rank 0 hangs" not in error


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_rank_stopped_in_a_save_is_named(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOURFOLD_FAULTS", "stop rank=1 step=2 op=save")
    checkpoint = {"every": 2, "mode": mode}
    plan = {"mesh": {"data": 2}}
    assert start(tmp_path, plan, "--train.timeout", "1.5", train={"steps": 5}, checkpoint=checkpoint) == 1
    error = capfd.readouterr().err
    assert "rank 1 is stopped (SIGSTOP)" in error
    assert "rank 1 has not answered" in error
    assert "rank 0 hangs" not in error


def test_a_rank_a_hundred_times_slower_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it longer than the timeout, in one collective, and it never stands still for as long."""
    monkeypatch.setenv("FOURFOLD_FAULTS", "slow rank=1 step=2 seconds=0.7")
    plan = {"mesh": {"data": 2}, "batch": {"micro_batches": 4}}
    assert start(tmp_path, plan, "--train.timeout", "2.5", train={"steps": 3, "global_batch": 8}) == 0


@pytest.mark.parametrize("mesh", [{"data": 3}, {"pipe": 3}])
def test_a_rank_that_skips_a_collective_is_named(
    mesh: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOURFOLD_FAULTS", "skip rank=1 step=2")
    plan = {"mesh": mesh, "batch": {"micro_batches": 3}}
    model = {"family": "gpt", "layers": 3, "hidden": 32, "heads": 4, "seq_len": 16}
    train = {"steps": 5, "global_batch": 9}
    assert start(tmp_path, plan, "--train.timeout", "2", model=model, train=train) == 1
    error = capfd.readouterr().err
    assert "one of them skipped a collective or message" in error
    assert "rank 1 is at step 3, ranks 0, 2 are at step 2" in error
    assert "waits in the end of the step (collective 2 of ranks 0, 1, 2) for rank 1, which has not started it" in error


# ---- no rank can report ----


def test_the_launcher_ends_ranks_that_send_no_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 blocks in a library while it holds Python's lock, as in a call to a driver; rank 1 is stopped."""
    monkeypatch.setattr(local, "SILENCE", 0.5)
    monkeypatch.setattr(local, "TICK", 0.1)

    def job(place: Place, store: dist.Store, console: object) -> None:
        with Watch(make_board(store), place.rank, 2, Limits.of(1.0), end=lambda text: None):
            RECORD.enter("step 3", 1.0, "train.timeout")
            time.sleep(0.5)
            if place.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            ctypes.PyDLL(None).sleep(60)

    begin = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        local.launch_local(job, 2, tmp_path)
    assert time.monotonic() - begin < 30
    assert "none of 2 ranks has sent a heartbeat for" in str(failure.value)
    assert "rank 1 is stopped (SIGSTOP) at step 3" in str(failure.value)
    assert failure.value.rank == 1


def test_a_rank_that_has_ended_its_watch_owes_no_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "SILENCE", 0.2)
    monkeypatch.setattr(local, "TICK", 0.1)

    def job(place: Place, store: dist.Store, console: object) -> None:
        with Watch(make_board(store), place.rank, 1, Limits.of(1.0), end=lambda text: None):
            RECORD.enter("step 3", 1.0, "train.timeout")
            time.sleep(0.3)
        time.sleep(2.5)

    assert local.launch_local(job, 1, tmp_path)


def test_the_only_rank_is_named_if_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOURFOLD_FAULTS", "stop rank=0 step=3")
    assert start(tmp_path, {}, "--train.timeout", "1.5", train={"steps": 5}) == 1
    error = capfd.readouterr().err
    assert "rank 0 has not sent a heartbeat for" in error
    assert "rank 0 is stopped (SIGSTOP) at step 3" in error


def test_the_only_rank_writes_its_stacks_and_is_not_ended(tmp_path: Path) -> None:
    """It has no other rank that could judge with it, and may be slow; its stacks say in what."""

    def job(place: Place, store: dist.Store, console: object) -> None:
        with Watch(make_board(store), place.rank, 1, Limits.of(0.5), end=lambda text: os._exit(3)):
            RECORD.enter("step 3", 0.5, "train.timeout")
            time.sleep(2.0)
            RECORD.begin_op("0F0")

    assert local.launch_local(job, 1, tmp_path)
    log = (tmp_path / "rank0.log").read_text()
    assert log.count("Current thread") == 1  # once
    assert "in job" in log


# ---- a whole job that is suspended ----


def test_a_job_that_is_suspended_for_longer_than_its_timeout_continues(tmp_path: Path) -> None:
    """SIGSTOP of all its processes: a scheduler's suspension, a paused container. Its ops are slower than a look of the watchdog."""
    (tmp_path / "c.json").write_text(json.dumps(make_config(tmp_path / "run", train={"steps": 4}).to_dict()))
    (tmp_path / "plan.json").write_text('{"mesh": {"data": 2}}')
    command = ["train", str(tmp_path / "c.json"), "--plan", str(tmp_path / "plan.json"), "--train.timeout", "4"]
    env = os.environ | {"FOURFOLD_FAULTS": "slow rank=1 step=3 seconds=2.5"}
    job = subprocess.Popen([sys.executable, "-m", "fourfold", *command], env=env, start_new_session=True)
    try:
        while sum(m["step"] == 1 for m in read_metrics(RunDir(tmp_path / "run"))) == 0 and job.poll() is None:
            time.sleep(0.05)
        time.sleep(1.0)
        os.killpg(job.pid, signal.SIGSTOP)
        time.sleep(7.0)
        os.killpg(job.pid, signal.SIGCONT)
        assert job.wait(120) == 0
    finally:
        job.kill()


def test_a_rank_that_does_not_exit_after_its_work_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It sends no heartbeats then, and the launcher waited forever, although the run was complete."""
    monkeypatch.setattr(local, "EXITING", 1.0)

    def job(place: Place, store: dist.Store, console: object) -> None:
        RECORD.enter(EXIT, float("inf"))
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    assert local.launch_local(job, 2, tmp_path)
    assert "rank 1 is stopped (SIGSTOP) after its work was done, and is ended" in capfd.readouterr().err


def test_ranks_that_train_again_after_their_work_are_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`fourfold verify` trains many times in the same ranks: they were killed 60 s after the first time."""
    monkeypatch.setattr(local, "EXITING", 0.5)

    def job(place: Place, store: dist.Store, console: object) -> None:
        for _ in range(3):
            RECORD.enter(EXIT, float("inf"))
            time.sleep(0.3)
            RECORD.enter("step 1", float("inf"))
            time.sleep(0.9)
        (tmp_path / f"done-{place.rank}").touch()

    assert local.launch_local(job, 2, tmp_path)
    assert capfd.readouterr().err == ""
    assert len(list(tmp_path.glob("done-*"))) == 2
