"""Faults: a run that is killed, stopped, poisoned or restarted ends with the right weights, or says what happened."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fourfold.cli import main
from fourfold.config import Config
from fourfold.errors import ConfigError, RankFailure, TrainingError
from fourfold.launch.place import Place, agree, first_host, place_from_environment
from fourfold.plan import Plan
from fourfold.shard.unit import Unit
from fourfold.testing.ranks import run_ranks
from fourfold.train.faults import Fault, parse
from fourfold.train.guard import Guard
from fourfold.train.rundir import RunDir, read_metrics
from fourfold.train.watch import Limits
from tests.helpers import make_config


def write_config(path: Path, run: str, **sections: dict[str, Any]) -> str:
    sections = {"train": {"steps": 10, "timeout": 20}, "checkpoint": {"every": 2}} | sections
    path.write_text(json.dumps(make_config(path.parent / run, **sections).to_dict()))  # type: ignore[arg-type]
    return str(path)


def digest(run: Path) -> str:
    return hashlib.sha256((run / "final" / "model.safetensors").read_bytes()).hexdigest()


def steps(run: Path) -> list[int]:
    return [m["step"] for m in read_metrics(RunDir(run)) if "loss" in m]


# ---- killed and restarted ----


def test_killed_ranks_and_restarts_give_the_weights_of_an_uninterrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", write_config(tmp_path / "a.json", "whole"), "--nproc", "3"]) == 0
    chance = random.Random(1)
    faults = "; ".join(f"kill rank={chance.randrange(3)} step={chance.randrange(1, 11)}" for _ in range(3))
    monkeypatch.setenv("FOURFOLD_FAULTS", faults)
    config = write_config(tmp_path / "b.json", "killed")
    assert main(["train", config, "--nproc", "3", "--max-restarts", "3"]) == 0
    assert "was killed by SIGKILL" in capfd.readouterr().out
    assert steps(tmp_path / "killed") == list(range(1, 11))
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")


def torchrun(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=os.environ | (env or {}))


def test_killed_ranks_under_torchrun(tmp_path: Path) -> None:
    assert main(["train", write_config(tmp_path / "a.json", "whole"), "--nproc", "2"]) == 0
    faults = {"FOURFOLD_FAULTS": "kill rank=1 step=4; kill rank=0 step=7"}
    config = write_config(tmp_path / "b.json", "killed")
    flags = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
    killed = torchrun(*flags, "-m", "fourfold", "train", config, env=faults)
    assert killed.returncode == 0, killed.stderr
    assert "step 10/10" in killed.stdout
    assert steps(tmp_path / "killed") == list(range(1, 11))
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")


def test_bare_srun(tmp_path: Path) -> None:
    """What srun does, by hand: one process per task, its place in the environment."""
    assert main(["train", write_config(tmp_path / "a.json", "whole"), "--nproc", "2"]) == 0
    config = write_config(tmp_path / "b.json", "slurm")
    common = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2"}
    common |= {"SLURM_STEP_NODELIST": "localhost", "GLOO_SOCKET_IFNAME": "lo"}
    tasks = []
    for rank in range(2):
        env = os.environ | common | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
        command = [sys.executable, "-m", "fourfold", "train", config]
        tasks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    outputs = [task.communicate(timeout=60)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs
    assert "step 10/10" in outputs[0]
    assert outputs[1] == ""
    assert digest(tmp_path / "slurm") == digest(tmp_path / "whole")
    assert json.loads((tmp_path / "slurm" / "env.json").read_text())["job"] == f"slurm {os.getpid()}.0"


# ---- hanging ----


def test_a_rank_that_hangs_is_named_with_every_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for kind, says in (("stop", "rank 1 is stopped (SIGSTOP)"), ("delay", "rank 1 hangs at step 3, in _happen (")):
        monkeypatch.setenv("FOURFOLD_FAULTS", f"{kind} rank=1 step=3 seconds=60")
        config = write_config(tmp_path / f"{kind}.json", kind)
        assert main(["train", config, "--nproc", "3", "--train.timeout", "2"]) == 1
        error = capfd.readouterr().err
        assert says in error
        for rank in (0, 2):
            assert re.search(
                rf"rank {rank}, at step 3, op 0B0.*: waits in the sum of .* \(collective \d+ of ranks 0, 1, 2\) "
                r"for rank 1, which has not started it",
                error,
            ), error
        logs = [(tmp_path / kind / "logs" / f"rank{r}.log").read_text() for r in range(3)]
        assert all("most recent call first" in log for log in logs[:: 2 if kind == "stop" else 1])


# ---- non-finite ----


def _poisoned_after(rank: int, ranks: int, config: Config) -> None:
    """A non-finite value in rank 1's copy, when the reduction is over: no other rank has it."""
    from fourfold.train.worker import fit

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    calls, finish = [0], Unit.finish

    def poison(self: Unit) -> None:
        finish(self)
        if self.name == "blocks.0.mlp":
            calls[0] += 1
            if rank == 1 and calls[0] == 3:
                assert self.shard_grad is not None
                self.shard_grad[5] = float("inf")

    Unit.finish = poison  # type: ignore[method-assign]
    fit(config, Plan.from_dict({"mesh": {"data": ranks}}))


def test_a_non_finite_copy_of_a_gradient_skips_the_step_on_all(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", train={"steps": 4, "max_skipped": 3})
    run_ranks(_poisoned_after, 2, config)
    lines = [m for m in read_metrics(RunDir(tmp_path / "run")) if "loss" in m]
    assert [m["skipped"] for m in lines] == [0, 0, 1, 1]


def _poisoned(rank: int, ranks: int, config: Config, bad_steps: tuple[int, ...]) -> None:
    from fourfold.train.worker import fit

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    calls, reduce = [0], Unit.reduce

    def poison(self: Unit) -> None:
        if self.name == "blocks.0.mlp":
            calls[0] += 1
            if rank == 1 and calls[0] in bad_steps:
                self.main_grad("up.weight")[0, 0] = float("nan")
        reduce(self)

    Unit.reduce = poison  # type: ignore[method-assign]
    fit(config, Plan.from_dict({"mesh": {"data": ranks}}))


def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    fields = {"steps": 4, "max_skipped": 3}
    config = make_config(
        tmp_path / "run", train=fields, checkpoint={"every": 1, "keep": 5}, optim={"decay": "constant"}
    )
    run_ranks(_poisoned, 2, config, (3,))
    lines = [m for m in read_metrics(RunDir(tmp_path / "run")) if "loss" in m]
    assert [m["skipped"] for m in lines] == [0, 0, 1, 1]
    assert lines[2]["grad_norm"] is None
    from tests.test_checkpoint import state_digest

    digests = [state_digest(tmp_path / "run", step) for step in (1, 2, 3, 4)]
    assert digests[1] == digests[2]  # nothing changed, moments included
    assert len(set(digests)) == 3


def test_too_many_non_finite_steps_in_a_row_end_the_run(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", train={"steps": 9, "max_skipped": 3})
    with pytest.raises(RankFailure, match="step 5: the loss or the gradient was not finite in the last 3 steps"):
        run_ranks(_poisoned, 2, config, (1, 3, 4, 5))
    guard = Guard(limits=Limits(1), max_skipped=2)
    guard.judge(1, float("inf"), 1.0)
    guard.judge(2, 1.0, 1.0)
    guard.judge(3, 1.0, float("nan"))
    with pytest.raises(TrainingError, match=r"train\.max_skipped = 2"):
        guard.judge(4, 1.0, float("nan"))
    assert guard.skipped == 3


# ---- places ----


def test_places() -> None:
    assert place_from_environment({}) is None
    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "x"}
    assert place_from_environment(env) == Place(3, 4, 1, 2)
    env |= {"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert place_from_environment(env) == Place(3, 4, 1, 2, "torchrun abc", True)
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_JOB_ID": "9"}
    assert place_from_environment(slurm) is None  # a batch script, not a task
    slurm |= {"SLURM_STEP_ID": "0", "SLURM_TASKS_PER_NODE": "2(x3),1"}
    assert place_from_environment(slurm) == Place(5, 7, 1, 2, "slurm 9.0")
    with pytest.raises(ConfigError, match="cannot read SLURM_TASKS_PER_NODE = 'many'"):
        place_from_environment(slurm | {"SLURM_TASKS_PER_NODE": "many"})
    assert [first_host(h) for h in ("gpu[007-009,12],cpu3", "node3,node4", "a[1,3]b")] == ["gpu007", "node3", "a1b"]


def test_ranks_of_a_new_attempt_do_not_meet_the_dead() -> None:
    """The store still has the numbers and the sessions of an attempt whose ranks are gone, one of them half joined."""
    store = dist.HashStore()
    assert meet(store, [0, 1, 2]) == [3, 3, 3]
    store.set("fourfold/number/1", "a number of a rank that died while joining")
    assert meet(store, [0, 2, 1]) == [3, 3, 3]  # in whatever order they come


def meet(store: dist.Store, order: list[int]) -> list[int]:
    """Ranks arrive one by one and agree; how many each of them finds under the name it was given."""
    found: dict[int, dist.Store] = {}

    def arrive(rank: int) -> None:
        found[rank] = agree(store, rank, 3, timeout=20)
        found[rank].add("here", 1)

    threads = [threading.Thread(target=arrive, args=(rank,)) for rank in order]
    for thread in threads:
        thread.start()
        thread.join(0.1)
    for thread in threads:
        thread.join()
    return [found[rank].add("here", 0) for rank in range(3)]


def test_a_rank_that_never_comes_is_named() -> None:
    with pytest.raises(
        RankFailure, match=r"rank 0 waited 0 s for the other ranks of the job: ranks \[1, 2\] never came"
    ):
        agree(dist.HashStore(), 0, 3, timeout=0.3)


def test_fault_texts() -> None:
    assert parse("kill rank=1 step=5; delay rank=0 step=3 seconds=0.5 op=3F0;") == [
        Fault("kill", 1, 5),
        Fault("delay", 0, 3, "3F0", 0.5),
    ]
    for text, message in (
        ("kil rank=1 step=5", "did you mean 'kill'"),
        ("kill rank=1", "needs whole numbers for rank and step"),
        ("kill rank=x step=1", "needs whole numbers"),
        ("kill rnk=1 step=1", "did you mean 'rank'"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(text)
