"""Local launch: failures are named, nothing is left behind, run directories are safe."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import psutil
import pytest
import torch
import torch.distributed as dist

from fourfold.cli import main
from fourfold.errors import CheckpointError, ConfigError, FileError, RankFailure, RunDirError
from fourfold.launch import local
from fourfold.launch import place as place_module
from fourfold.launch.local import launch_local
from fourfold.launch.place import Place, join_group, leave
from fourfold.plan import Plan
from fourfold.testing.ranks import run_ranks
from fourfold.train.rundir import RunDir, read_metrics
from tests.helpers import make_config


def in_group(what: Callable[[Place], Any]) -> Callable[[Place, dist.Store, IO[str] | None], None]:
    def job(place: Place, store: dist.Store, console: IO[str] | None) -> None:
        join_group(place, store, torch.device("cpu"), 30.0)
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


def test_a_failure_is_shown_while_ranks_still_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The driver may take seconds to free a GPU; here SIGKILL comes late."""
    honest = local._signal

    def late(processes: list[Any], number: int) -> None:
        if number == signal.SIGKILL:
            threading.Timer(1.0, honest, (processes, number)).start()
        else:
            honest(processes, number)

    def job(place: Place, store: dist.Store, console: IO[str] | None) -> None:
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    monkeypatch.setattr(local, "ENDING", 0.1)
    monkeypatch.setattr(local, "_signal", late)
    with pytest.raises(RankFailure, match="rank 1 was killed by SIGKILL") as failure:
        launch_local(job, 3, tmp_path)
    said = capfd.readouterr().err
    assert "rank 1 was killed by SIGKILL" in said
    assert "2 ranks are ending" in said
    assert time.time() - failure.value.shown > 0.5  # it was shown before they had ended


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


def test_a_rank_that_misses_a_stopped_one_does_not_make_the_stop_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has died of the request before rank 1 is sent it, as happens on a busy machine."""

    def slowly(processes: list[Any], number: int) -> None:
        for process in processes:
            os.kill(process.pid, number)
            time.sleep(1.0)

    def waits_for_rank_0(place: Place) -> None:
        if place.rank == 0:
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(60)
        dist.barrier()

    monkeypatch.setattr(local, "_signal", slowly)
    assert not launch_local(in_group(waits_for_rank_0), 2, tmp_path)


def test_a_stop_that_another_thread_takes_while_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread blocks signals then, but its handlers run, before the launcher knows the ranks."""
    process, done = multiprocessing.get_context("fork").Process, threading.Event()
    start = process.start

    def start_and_stop(self: Any) -> None:
        start(self)
        if self.name == "rank 0":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)  # the handler runs here

    def job(place: Place, store: dist.Store, console: IO[str] | None) -> None:
        time.sleep(5)

    monkeypatch.setattr(process, "start", start_and_stop)
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        assert not launch_local(job, 2, tmp_path)
    finally:
        done.set()
        other.join()


def test_killed_rank_is_named(tmp_path: Path) -> None:
    def what(place: Place) -> None:
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    def held() -> tuple[int, int]:
        me = psutil.Process()
        return me.num_fds(), len(me.children())

    before = held()
    with pytest.raises(RankFailure, match="rank 1 was killed by SIGKILL") as failure:
        launch_local(in_group(what), 3, tmp_path)
    assert held() == before, f"files and children that a failed start leaves open ({failure})"


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


def test_a_dry_run_refuses_what_the_run_would_refuse(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["train", write_config(tmp_path, steps=2), "--nproc", "1"]
    dry = [*command, "--dry-run"]

    def refused(command: list[str], why: str) -> None:
        assert main(command) != 0
        assert why in capfd.readouterr().err

    assert main(dry) == 0
    run = RunDir(tmp_path / "run")
    assert not run.path.exists()
    run.path.mkdir()
    run.lock()
    refused(dry, "run is in use by process")
    run.unlock()
    assert main(dry) == 0
    (run.path / "note.txt").touch()
    refused(dry, "is not empty (note.txt …)")
    (run.path / "note.txt").unlink()
    assert main(command) == 0
    refused(dry, "already holds a run (at step 2)")
    resume = ["train", "--resume", str(run.path), "--dry-run"]
    assert main(resume) == 0
    run.lock()
    refused(resume, "run is in use by process")
    run.unlock()


def test_directories_that_cannot_be_written_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path / "run").resolve()

    def full(self: RunDir, *args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunDir, "write", full)
    with pytest.raises(RunDirError, match="cannot be written: no space left on the disk"):
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


@pytest.mark.parametrize("request_to_stop", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_exits_with_0(tmp_path: Path, request_to_stop: signal.Signals) -> None:
    process = start_training(tmp_path)
    wait_for_steps(tmp_path / "run", 2)
    process.send_signal(request_to_stop)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    saved = [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()]
    last = [m["step"] for m in read_metrics(RunDir(tmp_path / "run"))][-1]
    assert saved == [f"step-{last:06d}"]
    assert f"the newest checkpoint is of step {last} of 100000" in out
    assert f"fourfold train --resume {tmp_path / 'run'}" in out


@pytest.mark.parametrize("request_to_stop", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_there_are_no_ranks_ends_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], request_to_stop: signal.Signals
) -> None:
    """Before the ranks were started, and between two starts, SIGTERM and SIGUSR1 killed the launcher without a word."""

    def starts_slowly(*args: object) -> bool:
        os.kill(os.getpid(), request_to_stop)
        time.sleep(60)
        return True

    before = signal.getsignal(request_to_stop)
    monkeypatch.setattr("fourfold.commands.train.start_ranks", starts_slowly)
    assert main(["train", write_config(tmp_path, steps=2), "--nproc", "1"]) == 130
    assert signal.getsignal(request_to_stop) == before
    assert "stopped while no rank was training; no checkpoint was saved yet. Continue with" in capfd.readouterr().out
    history = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert [(line["event"], line["outcome"]) for line in history] == [("end", "stopped")]


def signal_when(ready: Callable[[], bool], *numbers: signal.Signals) -> threading.Thread:
    """A thread that sends this process signals, 0.3 s apart, once `ready`."""

    def send() -> None:
        deadline = time.monotonic() + 60
        while not ready() and time.monotonic() < deadline:
            time.sleep(0.05)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def write_config(tmp_path: Path, **train: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps(make_config(tmp_path / "run", train=train).to_dict()))
    return str(tmp_path / "config.json")


def test_two_interrupts_end_a_run_that_may_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOURFOLD_FAULTS", "delay rank=1 step=3 seconds=50")
    config = write_config(tmp_path, steps=100)
    thread = signal_when(lambda: (tmp_path / "run" / "faults" / "0").exists(), signal.SIGINT, signal.SIGINT)
    assert main(["train", config, "--nproc", "2", "--max-restarts", "3"]) == 130
    thread.join()
    said = capfd.readouterr()
    assert "restarting" not in said.out
    assert "out of memory" not in said.err
    assert "killed at the second request to stop; no checkpoint was saved yet" in " ".join(said.err.split())
    assert f"fourfold train --resume {tmp_path / 'run'}" in said.err


def test_an_error_is_told_although_the_log_is_on_a_full_disk(tmp_path: Path) -> None:
    """The traceback that did not fit into the log hid the error: "rank 0 ended with exit code 1", and no reason."""

    def job(place: Place, store: dist.Store, console: IO[str] | None) -> None:
        full = os.open("/dev/full", os.O_WRONLY)
        for number in (1, 2):
            os.dup2(full, number)
        raise CheckpointError("step-000004: cannot be saved: no space left on the disk")

    with pytest.raises(RankFailure, match="no space left on the disk$") as caught:
        launch_local(job, 1, tmp_path)
    assert caught.value.kind == "CheckpointError"


def test_signals_at_once_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """timeout(1) sends SIGTERM to its child and to its group: the second one killed the ranks, and nothing was saved."""
    now = 5.0
    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    with local._forwarding([], "stopping") as asked:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert asked.stopped
        assert not asked.killed
        now += 0.5
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.killed


def test_a_stop_while_the_final_weights_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from fourfold.checkpoint import export

    write, marker = export.write_final, tmp_path / "writing"

    def slow(*args: Any) -> None:
        marker.touch()
        time.sleep(1)
        write(*args)

    monkeypatch.setattr(export, "write_final", slow)
    thread = signal_when(marker.exists, signal.SIGTERM)
    assert main(["train", write_config(tmp_path, steps=2), "--nproc", "2"]) == 0
    thread.join()
    assert "done: " in capfd.readouterr().out
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


def test_a_refused_resume_changes_nothing_and_a_good_one_says_where_it_begins(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", write_config(tmp_path, steps=2), "--nproc", "1"]) == 0
    run = tmp_path / "run"
    before = {name: (run / name).read_bytes() for name in ("config.json", "plan.json", "metrics.jsonl")}
    resume = ["train", "--resume", str(run), "--train.steps", "3"]
    assert main([*resume, "--train.global-batch", "6"]) == 2
    assert "is not the batch this run was started with" in capfd.readouterr().err
    assert before == {name: (run / name).read_bytes() for name in before}
    assert main(resume) == 0
    assert "from the checkpoint of step 2" in capfd.readouterr().out
    assert json.loads((run / "config.json").read_text())["train"]["steps"] == 3


def test_ranks_die_with_the_agent_of_torchrun(tmp_path: Path) -> None:
    """torchrun starts a rank as its child, with this environment, and does not watch it."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    command = f"{sys.executable} -m fourfold train {write_config(tmp_path, steps=100000)} & wait"
    agent = subprocess.Popen(["bash", "-c", command], env=os.environ | place, stdout=subprocess.DEVNULL)
    wait_for_steps(tmp_path / "run", 2)
    ranks = psutil.Process(agent.pid).children()
    assert len(ranks) == 1
    agent.kill()
    agent.wait()
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert not alive


def test_a_log_that_cannot_be_written_is_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank1.log").mkdir()
    with pytest.raises(FileError, match=r"rank1\.log: cannot be written: Is a directory"):
        launch_local(in_group(lambda place: None), 2, tmp_path)
    assert "Traceback" not in capfd.readouterr().err


def test_ctrl_c_while_the_command_is_imported_prints_no_traceback() -> None:
    program = """
import os, runpy, signal, sys

class Presses:
    def find_spec(self, name, path=None, target=None):
        if name == "fourfold.commands.train":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Presses())
runpy.run_module("fourfold", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_rank_that_cannot_leave_its_group_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Over NCCL it may wait for a peer that is gone, when no watchdog runs any more."""

    def hang() -> None:
        time.sleep(60)

    def job(place: Place, store: dist.Store, console: object) -> None:
        join_group(place, store, torch.device("cpu"), 20.0)
        monkeypatch.setattr(place_module, "LEAVING", 0.2)
        monkeypatch.setattr(dist, "destroy_process_group", hang)
        leave()

    with pytest.raises(RankFailure, match="could not leave its process group within 0.2 s"):
        launch_local(job, 2, tmp_path)


def _start_with(rank: int, ranks: int, folder: str) -> str:
    from fourfold.train.worker import fit

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    config = make_config(Path(folder) / "run", optim={"lr": 0.02 if rank == 1 else 0.01})
    try:
        fit(config, Plan.from_dict({"mesh": {"data": ranks}}))
    except ConfigError as e:
        return str(e)
    return ""


def test_ranks_with_different_configs_are_refused(tmp_path: Path) -> None:
    """As from two copies of a config file: replicas with two learning rates trained until they were compared."""
    said = run_ranks(_start_with, 3, str(tmp_path))
    assert (
        said
        == ["optim.lr is 0.02 on rank 1 and 0.01 on rank 0; start all ranks with the same config, flags and packages"]
        * 3
    )
    assert not (tmp_path / "run").exists()


def test_jobs_at_one_port_do_not_mix() -> None:
    """Rank 1 of a job whose store found the port in use reached the other job's store, and took its rank 1's place."""
    env = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env["MASTER_PORT"] = str(free.getsockname()[1])

    def task(job: str, rank: int) -> tuple[dict[str, str], Place]:
        mine = env | {"SLURM_JOB_ID": job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        place = place_module.place_from_environment(mine)
        assert place is not None
        return mine, place

    store = place_module.open_store(*task("1", 0), 20.0)
    with pytest.raises(RankFailure, match="set MASTER_PORT to a free one"):
        place_module.open_store(*task("20001", 0), 2.0)
    other = place_module.open_store(*task("20001", 1), 20.0)
    other.set("number", "theirs")
    assert not store.check(["number"])
    place_module.open_store(*task("1", 1), 20.0).set("number", "ours")
    assert store.get("number") == b"ours"
    ports = {
        place_module.store_address({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": str(n), "MASTER_ADDR": "x"}) for n in range(9)
    }
    assert len(ports) == 9  # steps of one job may run at once
