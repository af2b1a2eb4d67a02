"""Local launch: failures are named, nothing is left behind, run directories are safe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
import torch
import torch.distributed as dist

from fourfold.errors import ConfigError, RankFailure, RunDirError
from fourfold.launch.local import launch_local
from fourfold.launch.place import Place, join
from fourfold.plan import Plan
from fourfold.testing.ranks import run_ranks
from fourfold.train.rundir import RunDir, read_metrics
from tests.helpers import make_config


def in_group(what: Callable[[Place], Any]) -> Callable[[Place, dist.Store, IO[str] | None], None]:
    def job(place: Place, store: dist.Store, console: IO[str] | None) -> None:
        join(place, store, torch.device("cpu"), 30.0)
        what(place)
        dist.barrier()

    return job


def test_ranks_meet_and_write_their_own_logs(tmp_path: Path) -> None:
    def what(place: Place) -> None:
        x = torch.tensor(float(place.rank))
        dist.all_reduce(x)
        print("sum", x.item(), "addresses", sorted({c.laddr.ip for c in psutil.Process().net_connections()}))

    launch_local(in_group(what), 3, tmp_path)
    for rank in range(3):
        log = (tmp_path / f"rank{rank}.log").read_text()
        assert "sum 3.0" in log
        assert set(json.loads(log.split("addresses ")[1].replace("'", '"'))) <= {"127.0.0.1", "::1"}  # loopback alone


def test_first_failing_rank_is_named_with_its_traceback(tmp_path: Path) -> None:
    def what(place: Place) -> None:
        if place.rank == 2:
            raise ValueError("a broken gradient")

    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)rank 2 failed first.*rank2\.log.*ValueError: a broken gradient"):
        launch_local(in_group(what), 4, tmp_path)
    assert time.monotonic() - start < 15
    assert "ValueError" in (tmp_path / "rank2.log").read_text()


def test_user_errors_inside_a_rank_need_no_traceback(tmp_path: Path) -> None:
    def what(place: Place) -> None:
        raise ConfigError("say it plainly")

    with pytest.raises(RankFailure) as e:
        launch_local(in_group(what), 2, tmp_path)
    assert str(e.value).startswith("say it plainly (rank ")
    assert e.value.exit_code == 2


def test_a_stop_is_told_and_answered(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also one that comes while ranks start."""

    def what(place: Place) -> None:
        if place.rank == 0:
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)

    def first(place: Place, store: dist.Store, console: IO[str] | None) -> None:
        what(place)

    assert launch_local(in_group(lambda place: None), 2, tmp_path)
    for job in (in_group(what), first):
        assert not launch_local(job, 2, tmp_path, stopping="ending it")
        assert "ending it" in capfd.readouterr().err


def test_killed_rank_is_named(tmp_path: Path) -> None:
    def what(place: Place) -> None:
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankFailure, match="rank 1 was killed by SIGKILL"):
        launch_local(in_group(what), 3, tmp_path)


def test_run_ranks_raises_the_first_traceback_and_returns_results() -> None:
    def good(rank: int, ranks: int, add: int) -> int:
        return rank + add

    def bad(rank: int, ranks: int) -> None:
        if rank == 1:
            raise RuntimeError("no such tensor")
        dist.barrier()

    def hang(rank: int, ranks: int) -> None:
        if rank == 0:
            time.sleep(60)

    assert run_ranks(good, 3, 10) == [10, 11, 12]
    with pytest.raises(RankFailure, match=r"(?s)rank 1 failed first.*RuntimeError: no such tensor"):
        run_ranks(bad, 3)
    with pytest.raises(RankFailure, match=r"(?s)ranks 0 did not finish within 1 s.*rank 0 is at:.* in hang"):
        run_ranks(hang, 2, timeout=1)


# ---- the run directory ----


def test_existing_runs_are_never_overwritten(tmp_path: Path) -> None:
    config, plan = make_config(tmp_path / "run").resolve(), Plan()
    first = RunDir.create(tmp_path / "run", config, plan)
    with pytest.raises(RunDirError, match="already holds a run"):
        RunDir.create(tmp_path / "run", config, plan)
    with pytest.raises(RunDirError, match=f"in use by process {os.getpid()} on "):
        RunDir.reopen(tmp_path / "run")
    first.unlock()
    again = RunDir.reopen(tmp_path / "run")
    assert again.read() == (config, plan)
    again.unlock()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(RunDirError, match="is not empty \\(thesis.tex"):
        RunDir.create(tmp_path / "other", config, plan)
    with pytest.raises(RunDirError, match="not a run directory: no such directory"):
        RunDir.find(tmp_path / "nowhere")


def test_directories_that_cannot_be_written_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path / "run").resolve()

    def full(self: RunDir, *args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunDir, "write", full)
    with pytest.raises(RunDirError, match="cannot be written: No space left on device"):
        RunDir.create(tmp_path / "a" / "b", config, Plan())
    assert not (tmp_path / "a").exists()
    monkeypatch.undo()
    with pytest.raises(RunDirError, match="cannot be written"):
        RunDir.create("/proc/fourfold", config, Plan())


# ---- the command ----


def start_training(tmp_path: Path, *flags: str) -> subprocess.Popen[str]:
    config = make_config(tmp_path / "run", train={"steps": 100000})
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    command = [sys.executable, "-m", "fourfold", "train", str(tmp_path / "config.json"), "--nproc", "2", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_steps(run: Path, steps: int) -> None:
    deadline = time.monotonic() + 60
    while sum(1 for _ in read_metrics(RunDir(run))) < steps:
        assert time.monotonic() < deadline, "training does not get on"
        time.sleep(0.05)


def test_ranks_die_with_their_launcher(tmp_path: Path) -> None:
    process = start_training(tmp_path)
    wait_for_steps(tmp_path / "run", 2)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 2
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    RunDir.reopen(tmp_path / "run").unlock()  # and so has the lock


def test_sigterm_saves_and_exits_with_0(tmp_path: Path) -> None:
    process = start_training(tmp_path)
    wait_for_steps(tmp_path / "run", 2)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    saved = [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()]
    last = [m["step"] for m in read_metrics(RunDir(tmp_path / "run"))][-1]
    assert saved == [f"step-{last:06d}"]
