"""Faults: a run that is killed, stopped, poisoned or restarted ends with the right weights, or says what happened."""

from __future__ import annotations

import hashlib
import json
import math
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
from fourfold.launch.restarts import Restarts, next_delay
from fourfold.launch.supervise import Supervisor
from fourfold.plan import Plan
from fourfold.runtime.runner import Runner
from fourfold.shard.unit import Unit
from fourfold.supervision.faults import Fault, parse
from fourfold.supervision.flight import read_history
from fourfold.supervision.guard import Guard
from fourfold.supervision.watch import Limits
from fourfold.testing.ranks import run_ranks
from fourfold.train.rundir import RunDir, read_metrics
from tests.helpers import make_config, series


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


def _poisoned(rank: int, ranks: int, config: Config, bad_steps: tuple[int, ...], resume: bool = False) -> None:
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
    fit(config, Plan.from_dict({"mesh": {"data": ranks}}), resume=resume)


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


@pytest.mark.parametrize("memory", [{}, {"optimizer": "host"}, {"optimizer": "host", "rollback": "1GiB"}], ids=str)
def test_an_infinite_loss_with_a_finite_gradient_skips_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: dict[str, str]
) -> None:
    step = Runner.step

    def poisoned(self: Runner, index: int, feed: Any) -> dict[int, Any]:
        return {m: loss + (math.inf if index == 2 else 0) for m, loss in step(self, index, feed).items()}

    monkeypatch.setattr(Runner, "step", poisoned)
    from fourfold.train.worker import fit

    run = tmp_path / "run"
    with open(os.devnull, "w") as nowhere:
        config = make_config(run, checkpoint={"every": 1, "keep": 5}, optim={"clip": 100.0})
        fit(config, Plan.from_dict({"memory": memory}), console=nowhere)
    lines = [m for m in read_metrics(RunDir(run)) if "loss" in m]
    assert [m["skipped"] for m in lines] == [0, 0, 1, 1]
    assert lines[2]["loss"] is None
    assert lines[2]["grad_norm"] > 0
    from tests.test_checkpoint import state_digest

    digests = [state_digest(run, step) for step in (1, 2, 3, 4)]
    assert digests[1] == digests[2]
    assert len(set(digests)) == 3


def test_a_resume_after_a_skipped_step_has_the_bits_of_no_stop(tmp_path: Path) -> None:
    """Skipped steps do not count as updates, which correct the moments' bias; the number of them goes on."""
    from tests.test_checkpoint import state_digest

    found = []
    for name, parts in (("whole", (5,)), ("parts", (3, 5))):
        for steps in parts:
            config = make_config(tmp_path / name, train={"steps": steps}, optim={"decay": "constant"})
            run_ranks(_poisoned, 2, config, (2,) if steps == parts[0] else (), steps != parts[0])
        lines = [m for m in read_metrics(RunDir(tmp_path / name)) if "loss" in m]
        assert [m["skipped"] for m in lines] == [0, 1, 1, 1, 1]
        found.append((state_digest(tmp_path / name, 5), series(lines, "loss"), series(lines, "grad_norm")))
    assert found[0] == found[1]


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
    with pytest.raises(RankFailure, match=r"rank 0 waited 0 s for the other ranks of the job: ranks 1, 2 never joined"):
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


# ---- restarts ----


def test_back_off() -> None:
    delays, delay = [], 0.0
    for progressed in (False, False, False, True, False):
        delay = next_delay(delay, 0.5, progressed)
        delays.append(delay)
    assert delays == [0.5, 1.0, 2.0, 0.5, 1.0]
    assert next_delay(50.0, 0.5, False) == 60.0


def test_fewer_ranks_when_one_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 3 dies, and again when it is restarted. A batch of 8 cannot be divided by three: the plan is a pipeline then."""
    monkeypatch.setenv("FOURFOLD_FAULTS", "kill rank=3 step=3; kill rank=3 step=0 op=start")
    config = write_config(tmp_path / "a.json", "run", train={"steps": 6, "global_batch": 8}, checkpoint={"every": 2})
    flags = ["--nproc", "4", "--max-restarts", "1", "--restart-delay", "0.1"]
    assert main(["train", config, *flags]) == 1  # not asked for
    monkeypatch.setenv("FOURFOLD_FAULTS", "kill rank=3 step=3; kill rank=3 step=0 op=start ")
    config = write_config(tmp_path / "b.json", "fewer", train={"steps": 6, "global_batch": 8}, checkpoint={"every": 2})
    assert main(["train", config, *flags, "--on-fault", "replan"]) == 0
    said = capfd.readouterr().out
    assert "continuing on 3 of 4 ranks (pipe 3 = 3) from" in said
    assert steps(tmp_path / "fewer") == list(range(1, 7))  # nothing lost beyond the last checkpoint
    run = RunDir(tmp_path / "fewer")
    assert run.read()[1].mesh.ranks == 3
    events = [line["event"] for line in read_history(run)]
    assert events == ["start", "failure", "restart", "start", "failure", "replan", "start", "end"]
    monkeypatch.delenv("FOURFOLD_FAULTS")
    config = write_config(tmp_path / "c.json", "whole", train={"steps": 6, "global_batch": 8})
    assert main(["train", config, "--nproc", "4"]) == 0
    assert losses(tmp_path / "fewer") == pytest.approx(losses(tmp_path / "whole"), abs=1e-4)


def losses(run: Path) -> list[float]:
    return [m["loss"] for m in read_metrics(RunDir(run)) if "loss" in m]


SCRIPT = """
echo "$RANK of $WORLD_SIZE, local $LOCAL_RANK of $LOCAL_WORLD_SIZE, attempt $TORCHELASTIC_RESTART_COUNT" >> $NOTES
case "$TORCHELASTIC_RESTART_COUNT $RANK" in $FAILS) exit $CODE;; esac
[ $TORCHELASTIC_RESTART_COUNT -lt $ENDS ] && exec sleep 60
exit 0
"""


def supervised(
    folder: Path, tasks: list[int], restarts: Restarts, fails: str, code: int = 1, ends: int = 1
) -> tuple[Any, list[str]]:
    """Supervisors of three tasks on two nodes, of which `tasks` start, as threads; ranks are shell scripts.

    The rank and attempt in `fails` exits with `code`; the others sleep until attempt `ends`. Exit codes or errors, and who ran.
    """
    store, found = dist.HashStore(), {}

    def fits(ranks: int) -> int:
        return ranks

    def task(number: int) -> None:
        supervisor = Supervisor(store, number, 3, str(number // 2), restarts, fits)
        env = {"NOTES": str(folder / "notes"), "FAILS": fails, "CODE": str(code), "ENDS": str(ends)}
        try:
            found[number] = supervisor.run(["sh", "-c", SCRIPT], env)
        except RankFailure as e:
            found[number] = str(e)

    threads = [threading.Thread(target=task, args=(number,)) for number in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, sorted((folder / "notes").read_text().splitlines())


def test_supervisors_restart_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold.launch.supervise.GRACE", 0.3)
    restarts = Restarts(2, 0.01)
    codes, ran = supervised(tmp_path, [0, 1, 2], restarts, "0 1")
    assert codes == {0: 0, 1: 0, 2: 0}
    assert len(ran) == 6
    assert ran[0] == "0 of 3, local 0 of 2, attempt 0"
    assert ran[-1] == "2 of 3, local 0 of 1, attempt 1"
    (tmp_path / "notes").unlink()
    codes, ran = supervised(tmp_path, [0, 1, 2], restarts, "0 1", code=2)  # its input is wrong: no other attempt
    assert codes[1] == 2
    assert all("ended by another task" in str(codes[task]) for task in (0, 2))
    assert all("attempt 0" in line for line in ran)
    (tmp_path / "notes").unlink()
    codes, ran = supervised(tmp_path, [0, 1, 2], Restarts(1, 0.01), "* 0", ends=9)
    assert codes[0] == 1
    assert {line[-1] for line in ran} == {"0", "1"}  # as often as allowed


def test_supervisors_go_on_without_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Task 2, alone on its node, is gone after the first attempt."""
    monkeypatch.setattr("fourfold.launch.supervise.GRACE", 0.3)
    run = Supervisor.run

    def once(self: Supervisor, *args: Any) -> int:
        if self.task == 2:
            self._meet(0, [0, 1, 2])
            return -9
        return run(self, *args)

    monkeypatch.setattr(Supervisor, "run", once)
    codes, ran = supervised(tmp_path, [0, 1, 2], Restarts(1, 0.01, replan=True, replan_after=0.5), "0 1")
    assert codes == {0: 0, 1: 0, 2: -9}
    assert "1 of 2, local 1 of 2, attempt 1" in ran
    monkeypatch.setattr("fourfold.launch.supervise.ABSENT", 0.5)
    codes, _ = supervised(tmp_path, [0, 1, 2], Restarts(1, 0.01), "0 1")
    assert "tasks [2] did not return within 0 s; --on-fault replan" in codes[0]


@pytest.mark.skipif("FOURFOLD_SLOW_TESTS" not in os.environ, reason="seven interpreters; set FOURFOLD_SLOW_TESTS=1")
@pytest.mark.timeout(200)
def test_restarts_under_srun(tmp_path: Path) -> None:
    """Every task is a supervisor; the rank that it starts is killed, and the rank of the store's host, too."""
    assert main(["train", write_config(tmp_path / "a.json", "whole"), "--nproc", "2"]) == 0
    config = write_config(tmp_path / "b.json", "slurm")
    common = {"SLURM_JOB_ID": str(os.getpid() + 1), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
    common |= {"SLURM_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost", "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"FOURFOLD_FAULTS": "kill rank=0 step=6", "OMP_NUM_THREADS": "1"}
    tasks = []
    for rank in range(2):
        env = os.environ | common | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
        command = [sys.executable, "-m", "fourfold", "train", config, "--max-restarts", "2", "--restart-delay", "0.1"]
        tasks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    outputs = [task.communicate(timeout=180)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs
    assert "restarting all ranks in 0.1 s (1 of 2)" in outputs[0]
    assert steps(tmp_path / "slurm") == list(range(1, 11))
    assert digest(tmp_path / "slurm") == digest(tmp_path / "whole")


def test_flags_about_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "a.json", "run")
    for flags, message in (
        (["--max-restarts", "-1"], "--max-restarts -1 must be at least 0"),
        (["--restart-delay", "99"], "--restart-delay 99 must be from 0 to 60 seconds"),
        (["--replan-after", "0"], "--replan-after 0 must be from 0 to 86400 seconds"),
    ):
        assert main(["train", config, *flags]) == 2
        assert message in capfd.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert main(["train", config, "--max-restarts", "2"]) == 2
    assert "torchrun restarts its ranks itself; give the option to torchrun" in capfd.readouterr().err
