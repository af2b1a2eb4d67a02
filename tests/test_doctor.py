"""The flight record and `fourfold doctor RUN`: after every kind of end, it says what happened and what to do."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fourfold.cli import main
from fourfold.config import Config
from fourfold.errors import RankFailure
from fourfold.launch.place import Place
from fourfold.plan import Plan
from fourfold.record import EVENTS
from fourfold.supervision.diagnose import Diagnosis, cause_of, diagnose
from fourfold.supervision.failures import FailureRecorder
from fourfold.supervision.flight import note, read_flights, read_history, write_flight
from fourfold.supervision.watch import StoreBoard
from fourfold.testing.ranks import run_ranks
from fourfold.train.rundir import RunDir
from fourfold.train.worker import fit
from tests.helpers import make_config


def config_file(folder: Path, **sections: dict[str, Any]) -> str:
    sections = {"train": {"steps": 4, "timeout": 20}, "checkpoint": {"every": 2, "mode": "sync"}} | sections
    path = folder / "config.json"
    path.write_text(json.dumps(make_config(folder / "run", **sections).to_dict()))  # type: ignore[arg-type]
    return str(path)


def after(folder: Path, monkeypatch: pytest.MonkeyPatch, faults: str, *flags: str) -> Diagnosis:
    """Train with faults; what the doctor says then."""
    monkeypatch.setenv("FOURFOLD_FAULTS", faults)
    main(["train", config_file(folder), "--nproc", "2", *flags])
    return diagnose(RunDir(folder / "run"))


def test_ends_of_real_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    cases = {
        "killed": ("kill rank=1 step=3 op=0B0", "rank 1 was killed by SIGKILL at step 3, op 0B0"),
        "hang": ("stop rank=1 step=3 op=0B0", "rank 1 is stopped (SIGSTOP) at step 3, op 0B0"),
        "raised": ("raise rank=0 step=3 op=0F0", "rank 0 raised RuntimeError at step 3, op 0F0"),
        "memory": ("memory rank=1 step=3 op=0B0", "rank 1 ran out of memory at step 3, op 0B0"),
    }
    for cause, (fault, says) in cases.items():
        folder = tmp_path / cause
        folder.mkdir()
        found = after(folder, monkeypatch, fault, "--train.timeout", "2")
        assert (found.state, found.cause, found.checkpoint, found.step) == ("failed", cause, 2, 2)
        assert says in found.happened
        assert "the newest checkpoint is of step 2" in found.happened
        assert f"--resume {folder / 'run'}" in found.advice
        flights = read_flights(RunDir(folder / "run"))
        assert list(flights) == [0, 1]
        for rank, flight in flights.items():
            assert flight.text("phase") == "step 3", rank
            assert 0 < len(flight.events) <= EVENTS
            assert flight.threads or "SIGKILL" in flight.text("state"), rank
        assert sum(f.stat().st_size for f in (folder / "run" / "flight").iterdir()) < 200_000
        capfd.readouterr()
        assert main(["doctor", str(folder / "run")]) == 1
        assert says in " ".join(capfd.readouterr().out.split())

    # memory: the planner's plan takes less than was predicted, and the run continues under it
    run, plan = tmp_path / "memory" / "run", tmp_path / "plan.json"
    assert main(["doctor", str(run), "--out", str(plan), "--json"]) == 1
    said = json.loads(capfd.readouterr().out)
    assert "the plan predicted" in said["happened"]
    old, new = Plan.load(run / "plan.json"), Plan.load(plan)
    assert old.predicted is not None
    assert new.predicted is not None
    assert new.predicted["peak_bytes"] <= 0.95 * old.predicted["peak_bytes"]
    monkeypatch.delenv("FOURFOLD_FAULTS")
    assert main(["train", "--resume", str(run), "--plan", str(plan)]) == 0
    assert diagnose(RunDir(run)).state == "finished"
    assert (run / "flight-previous" / "rank1.jsonl").exists()  # not taken for the new attempt's
    assert main(["doctor", str(run)]) == 0


def _fit(rank: int, ranks: int, config: Config) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    fit(config, Plan.from_dict({"mesh": {"data": ranks}}))


def test_a_killed_rank_without_our_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun and srun, the other ranks have to tell; the first of them does."""
    monkeypatch.setenv("FOURFOLD_FAULTS", "delay rank=1 step=3 seconds=1.5; kill rank=1 step=3 op=0B0")
    monkeypatch.setattr("fourfold.supervision.failures.PATIENCE", 0.3)
    config = make_config(tmp_path / "run", train={"steps": 4, "timeout": 20})
    with pytest.raises(RankFailure):
        run_ranks(_fit, 3, config)
    found = diagnose(RunDir(tmp_path / "run"))
    assert (found.state, found.cause) == ("failed", "killed")
    assert "rank 1 ended without a reason at step 3" in found.happened
    states = {r.rank: r.state for r in found.ranks}
    assert states == {0: "CommunicationError", 1: "gave no reason", 2: "CommunicationError"}
    assert [line["event"] for line in read_history(RunDir(tmp_path / "run"))] == ["start", "failure"]
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert [StoreBoard(server).claim() for _ in range(3)] == [True, False, False]


def test_a_hang_is_recorded_without_waiting_for_the_store_or_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's process may be stopped, and a main thread that hangs may hold the lock of the device's allocator."""

    class Silent(StoreBoard):
        def __init__(self) -> None:
            self.asked, self.answers = threading.Event(), threading.Event()

        def claim(self) -> bool:
            self.asked.set()
            return not self.answers.wait()

    def locked(device: torch.device) -> int:
        raise AssertionError("asked the allocator")

    monkeypatch.setattr("fourfold.supervision.failures.LONGEST", 0.2)
    monkeypatch.setattr("fourfold.supervision.failures.peak_bytes", locked)
    run, board = RunDir(tmp_path), Silent()
    place = Place(rank=1, ranks=2, local_rank=1, local_ranks=2)
    recorder = FailureRecorder(place, run, torch.device("cuda"), board, launched=False)
    watchdog = threading.Thread(target=recorder.hang, args=("no rank has made progress",), daemon=True)
    watchdog.start()
    watchdog.join(20)
    ended = not watchdog.is_alive()
    board.answers.set()
    assert ended
    assert board.asked.is_set()
    assert read_flights(run)[1].text("message") == "no rank has made progress"


def test_ends_from_files(tmp_path: Path) -> None:
    """What only a history can have: each event alone decides."""
    run = RunDir.create(tmp_path / "run", make_config(tmp_path / "run"), Plan())
    assert diagnose(run).state == "running"  # it holds the lock
    run.unlock()
    assert diagnose(run).state == "new"
    note(run, "start", ranks=1)
    assert diagnose(run).state == "gone"
    note(run, "end", outcome="stopped", step=2)
    assert "it stopped as requested, after step 0 of 4" in diagnose(run).happened
    note(run, "end", outcome="finished", step=4)
    assert (diagnose(run).state, diagnose(run).restarts) == ("finished", 0)
    texts = {
        "disk": ("CheckpointError", "checkpoints/step-000002: cannot be saved: no space left on the disk", "prune"),
        "checkpoint": ("CheckpointError", "no checkpoint verifies: x is damaged", "checkpoint verify"),
        "not finite": ("TrainingError", "step 5: the loss or the gradient was not finite in the last 3 steps", "optim.lr"),
        "replicas": ("ReplicaError", "blocks.0.mlp.up.weight differs", "fourfold verify"),
        "input": ("DataError", "corpus.txt: no such file", "Correct it"),
        "killed": ("SIGTERM", "rank 0 was killed by SIGTERM", "--max-restarts"),
        "hang": ("HangError", "no rank has made progress for 5 s\nranks 0, 1 have all started a sum and none has finished: x", "NCCL_DEBUG"),
    }  # fmt: skip
    for cause, (kind, message, advice) in texts.items():
        note(run, "failure", kind=kind, rank=0, message=message)
        found = diagnose(run)
        assert (found.state, found.cause) == ("failed", cause)
        assert advice in found.advice, found.advice
    assert cause_of("MemoryError", "") == cause_of("RuntimeError", "CUDA out of memory.") == "memory"


def test_the_first_cause_is_found_among_its_consequences(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", make_config(tmp_path / "run"), Plan())
    run.unlock()
    note(run, "failure", kind="CommunicationError", rank=0, message="failed waiting for a sum")
    waited = {"state": "raised", "error": "CommunicationError", "message": "failed waiting", "time": 3.0}
    write_flight(run, 0, waited)
    write_flight(
        run, 1, waited | {"error": "ValueError", "message": "a broken gradient", "time": 2.0, "phase": "step 7"}
    )
    found = diagnose(run)
    assert found.happened.startswith("rank 1 raised ValueError at step 7: a broken gradient")
    note(run, "failure", kind="exit", rank=1, message="rank 1 ended with exit code 1")  # all that its launcher knew
    assert diagnose(run).happened.startswith("rank 1 raised ValueError at step 7: a broken gradient")
    write_flight(run, 1, {"state": "killed"})  # what others know does not replace what it wrote
    assert read_flights(run)[1].text("error") == "ValueError"


def test_damaged_and_hostile_records(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = RunDir.create(tmp_path / "run", make_config(tmp_path / "run"), Plan())
    run.unlock()
    note(run, "failure", kind=3, rank="x", message=["\x1b[2J[red]"])
    with run.history_file.open("a") as f:
        f.write(
            '{"event": "failure", "kind": "ValueError", "rank": 0, "message": "\\u001b[2J[red]x"}\n{"event": 1}\n{"cut'
        )
    run.flight.mkdir()
    for name in ("rank0.jsonl", "rank99999999.jsonl", "rankx.jsonl"):
        (run.flight / name).write_text(
            '{"kind": "failure", "wait": 3, "error": 7, "message": {}}\n{"kind": "stack"}\nno'
        )
    assert len(read_history(run)) == 2
    assert main(["doctor", str(run.path)]) == 1
    assert "\x1b[2J" not in capfd.readouterr().out
    for args, message in (
        (["doctor", str(tmp_path)], "not a run directory"),
        (["doctor", str(run.path), "--out", str(tmp_path / "p.json")], "there is no plan to write"),
        (["doctor", "--out", "p.json"], "needs a run directory"),
    ):
        assert main(args) == 2
        assert message in capfd.readouterr().err
