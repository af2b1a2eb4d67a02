"""Promises about faults, held to figures: real processes, real injections.

    python -m benchmarks.faults [--only dead stopped …] [--count N] [--quick] [--seed 0] [--json PATH]

dead     SIGKILL of a rank in the start, while ranks connect, in a step, an op, an evaluation, a save, the writing of final/: the
         launcher names rank and phase within 2 s
stopped  SIGSTOP in the same phases, train.timeout = 5 s: rank and phase are named within timeout + 5 s
kills    SIGKILL of a rank at random instants, three fifths inside a save, sync and async, one restart: the bits of a whole run
damaged  a file of a checkpoint changed, cut, exchanged or linked: refused, or the one before used; nothing outside is touched
disk     a disk that is full at a random size, or read-only: one error; after room was made, the bits of a run on a good disk
pairs    saved under one plan, killed, resumed under another, fp64: state equal in all bits, losses to 1e-9
replan   two hosts (network namespaces), the link of one cut: the next step on the other within 60 s, from the last checkpoint
soak     one run of many steps with a fault every 200: no step lost, same bits; memory, files, threads and sockets do not grow

Runs are of a model with two layers on two to four ranks; `disk` and `replan` need root. Every failed try is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from fourfold.checkpoint import save_load
from fourfold.checkpoint.index import read_index
from fourfold.cli import main as fourfold
from fourfold.errors import CheckpointError
from fourfold.supervision.flight import read_history
from fourfold.train.loop import Loop
from fourfold.train.rundir import RunDir, read_metrics

PLANS: list[tuple[int, dict[str, Any]]] = [
    (3, {"mesh": {"data": 3}}),
    (2, {"mesh": {"pipe": 2}, "batch": {"micro_batches": 3}}),
    (2, {"mesh": {"data": 2}, "unit": [{"match": "*", "mode": "zero3"}]}),
    (2, {"mesh": {"col": 2}}),
    (4, {"mesh": {"pipe": 2, "data": 2}, "batch": {"micro_batches": 3}, "pipeline": {"schedule": "wave"}}),
]
PHASES = {
    "start": ("step=0 op=start", "start"),
    "connect": ("step=0 op=connect", "the connections between ranks"),
    "step": ("step=3", "step 3"),
    "op": ("step=3 op=0F0", "step 3, op 0F0"),
    "evaluation": ("step=2 op=evaluation", "the evaluation after step 2"),
    "save": ("step=2 op=save", "the save of step 2"),
    "final": ("step=6 op=final", "the writing of final/"),
}
COUNTS = {
    "dead": 50,
    "stopped": 30,
    "kills": 50,
    "damaged": 10_000,
    "disk": 30,
    "pairs": 60,
    "replan": 2,
    "soak": 10_000,
}
QUICK = {"dead": 2, "stopped": 1, "kills": 2, "damaged": 100, "disk": 2, "pairs": 2, "replan": 1, "soak": 400}


@dataclass
class Promise:
    """How a promise held."""

    name: str
    tries: int = 0
    held: int = 0
    worst: float = 0.0
    """Seconds, where the promise is about time."""
    note: str = ""

    def add(self, good: bool, said: str, seconds: float = 0.0) -> None:
        """Count a try; `said` is printed where it failed."""
        self.tries += 1
        self.held += good
        self.worst = max(self.worst, seconds)
        if not good:
            print(f"{self.name}: {said}", flush=True)


# ---- runs ----


def write_config(folder: Path, run: str, plan: dict[str, Any] | None = None, **sections: dict[str, Any]) -> list[str]:
    """Files of a small run; returns the arguments of `fourfold train`."""
    text = folder / "corpus.txt"
    if not text.exists():
        text.write_text("".join(f"{i} times {i} is {i * i}; " for i in range(2000)))
    data: dict[str, dict[str, Any]] = {
        "model": {"family": "gpt", "layers": 2, "hidden": 32, "heads": 4, "seq_len": 16},
        "data": {"source": str(text)},
        "optim": {"lr": 1e-2, "warmup": 2},
        "train": {"steps": 6, "global_batch": 24, "run_dir": str(folder / run), "device": "cpu", "eval_every": 2},
        "checkpoint": {"every": 2},
        "log": {"trace": 0},
    }
    for name, fields in sections.items():
        data[name] = data.get(name, {}) | fields
    (folder / f"{run}.json").write_text(json.dumps(data))
    args = ["train", str(folder / f"{run}.json")]
    if plan is not None:
        (folder / f"{run}-plan.json").write_text(json.dumps(plan))
        args += ["--plan", str(folder / f"{run}-plan.json")]
    return args


def train(args: list[str], faults: str = "") -> tuple[int, str]:
    """Exit code and errors of a command, run in this process (its ranks are forked)."""
    os.environ["FOURFOLD_FAULTS"] = faults
    said = io.StringIO()
    with _silent(), contextlib.redirect_stderr(said):
        code = fourfold(args)
    return code, said.getvalue()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Ranks have the descriptor of the console, so that it is the descriptor that goes elsewhere."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def digest(run: Path) -> str:
    """Of the final weights; empty if there are none."""
    path = run / "final" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def steps(run: Path) -> list[int]:
    return [m["step"] for m in read_metrics(RunDir(run)) if "loss" in m]


# ---- sections ----


def dead(count: int, chance: random.Random, folder: Path) -> Promise:
    promise = Promise("dead rank named within 2 s")
    for i in range(count):
        ranks, plan = PLANS[i % len(PLANS)]
        phase = list(PHASES)[(i // len(PLANS) + i) % len(PHASES)]
        promise.add(*_named(folder / f"dead{i}", "kill", phase, chance.randrange(ranks), plan, 2.0, 60.0))
    return promise


def stopped(count: int, chance: random.Random, folder: Path) -> Promise:
    promise = Promise("stopped rank named within timeout + 5 s")
    for i in range(count):
        ranks, plan = PLANS[i % len(PLANS)]
        phase = list(PHASES)[(i // len(PLANS) + i) % len(PHASES)]
        promise.add(*_named(folder / f"stopped{i}", "stop", phase, chance.randrange(ranks), plan, 10.0, 5.0))
    return promise


def _named(
    folder: Path, kind: str, phase: str, rank: int, plan: dict[str, Any], limit: float, timeout: float
) -> tuple[bool, str, float]:
    """Whether a fault is named rightly and in time: from the moment it happens until the launcher has its report."""
    folder.mkdir()
    when, at = PHASES[phase]
    if phase == "op" and "pipe" in plan["mesh"]:  # every rank has another first op
        when, at = "step=3", "step 3"
    args = write_config(folder, "run", plan, train={"timeout": timeout})
    code, said = train(args, f"{kind} rank={rank} {when}")
    failures = [line for line in read_history(RunDir(folder / "run")) if line["event"] == "failure"]
    note = folder / "run" / "faults" / "0"
    if code != 1 or len(failures) != 1 or not note.exists():
        return False, f"{phase}, rank {rank}, {plan['mesh']}: exit code {code}: {said}", 0.0
    seconds = failures[0]["time"] - note.stat().st_mtime
    words = (
        f"rank {rank} was killed by SIGKILL at {at}" if kind == "kill" else f"rank {rank} is stopped (SIGSTOP) at {at}"
    )
    good = words in said and seconds <= limit and f"rank {rank} hangs" not in said
    shutil.rmtree(folder)
    return good, f"{phase}, rank {rank}, {plan['mesh']}, {seconds:.1f} s: {said}", seconds


def kills(count: int, chance: random.Random, folder: Path) -> Promise:
    promise, saves = Promise("killed at a random instant, restarted: same bits"), 0
    reference: dict[int, str] = {}
    for i in range(count):
        at = i % len(PLANS)
        ranks, plan = PLANS[at]
        if at not in reference:
            train(write_config(folder, f"whole{at}", plan))
            reference[at] = digest(folder / f"whole{at}")
        inside = i % 5 < 3
        saves += inside
        when = f"step={chance.choice((2, 4))} op=save" if inside else f"step={chance.randint(1, 6)}"
        fault = f"kill rank={chance.randrange(ranks)} {when} after={chance.uniform(0, 0.05 if inside else 0.1):.4f}"
        mode = ("sync", "async")[i % 2]
        args = write_config(folder, f"killed{i}", plan, checkpoint={"every": 2, "mode": mode})
        code, said = train([*args, "--max-restarts", "1", "--restart-delay", "0"], fault)
        run = folder / f"killed{i}"
        good = code == 0 and digest(run) == reference[at] and steps(run) == list(range(1, 7))
        promise.add(good, f"{fault}, {mode}, {plan['mesh']}: exit code {code}: {said}")
        shutil.rmtree(run)
    promise.note = f"{saves} inside a save"
    return promise


def damaged(count: int, chance: random.Random, folder: Path) -> Promise:
    promise = Promise("damaged, mixed, linked files: refused or the one before used")
    whole, outside = folder / "whole", folder / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    for step in (1, 2):
        saver = save_load.Checkpointer(whole)
        saver.save(step, [save_load.holding_of("x", torch.full((500,), float(step)))], {"step": step}, last=True)
    for i in range(count):
        copy = folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole, copy)
        what = _damage(copy, outside, chance)
        x, good, said = torch.zeros(500), False, ""
        try:
            held = [save_load.holding_of("x", x)]
            found, state, _ = save_load.load_newest(copy, lambda held=held: held)
            if found is not None:
                good = bool((x == state["step"]).all())  # of one step alone
            else:
                good = True
        except CheckpointError:
            good = True
        except Exception as e:
            said = f"{type(e).__name__}: {e}"
        kept = (outside / "precious").read_text() == "mine" and len(list(outside.iterdir())) == 1
        promise.add(good and kept, f"try {i}, {what}: {said}")
    return promise


def _damage(copy: Path, outside: Path, chance: random.Random) -> str:
    """Spoil something in a folder of two checkpoints; returns what."""
    path = chance.choice(sorted(p for p in copy.rglob("*") if p.is_file()))
    kind = chance.choice(("flip", "cut", "grow", "swap", "link", "remove", "folder", "link folder", "zero"))
    data = bytearray(path.read_bytes())
    if kind == "flip":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
    elif kind == "cut":
        path.write_bytes(data[: chance.randrange(len(data))])
    elif kind == "grow":
        path.write_bytes(data + bytes(chance.randrange(1, 99)))
    elif kind == "zero":
        start = chance.randrange(len(data))
        path.write_bytes(data[:start] + bytes(len(data) - start))
    elif kind == "swap":
        other = copy / ("step-000001" if "step-000002" in str(path) else "step-000002") / path.name
        path.write_bytes(other.read_bytes())
    elif kind == "link":
        path.unlink()
        path.symlink_to(outside / "precious")
    elif kind == "remove":
        path.unlink()
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    else:
        shutil.rmtree(path.parent)
        path.parent.symlink_to(outside)
    return f"{kind} {path.relative_to(copy)}"


def disk(count: int, chance: random.Random, folder: Path) -> Promise:
    promise = Promise("disk full or read-only, then room: same bits")
    model = {"family": "gpt", "layers": 2, "hidden": 64, "heads": 4, "seq_len": 16}
    args = write_config(folder, "good", {"mesh": {"data": 2}}, model=model)
    train(args)
    for i in range(count):
        small = folder / f"disk{i}"
        small.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)], capture_output=True, text=True
        )
        if done.returncode:
            promise.note = f"not run: {done.stderr.strip()}"
            return promise
        try:
            mode = ("sync", "async")[i % 2]
            sections = {
                "checkpoint": {"every": 2, "mode": mode},
                "train": {"run_dir": str(small / "run")},
                "model": model,
            }
            args = write_config(folder, f"full{i}", {"mesh": {"data": 2}}, **sections)
            room = chance.randrange(20_000, 3_000_000)
            (small / "filler").write_bytes(bytes(8 * 2**20 - 64 * 1024 - room))
            code, said = train(args)
            good = code == 0 or ("no space left" in said and "Traceback" not in said)
            os.unlink(small / "filler")
            if i % 3 == 0 and (small / "run" / "config.json").exists():
                subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
                code, refused = train(["train", "--resume", str(small / "run")])
                good &= code != 0 and "read-only" in refused and "Traceback" not in refused
                subprocess.run(["mount", "-o", "remount,rw", str(small)], check=True)
            again = ["--resume", str(small / "run")] if (small / "run" / "config.json").exists() else args[1:]
            code, second = train(["train", *again])
            good &= code == 0 and digest(small / "run") == digest(folder / "good")
            promise.add(good, f"{room} bytes of room, {mode}: {said} {second}")
        finally:
            subprocess.run(["umount", "-l", str(small)], check=True)
    return promise


RESUME_PLANS: list[dict[str, Any]] = [
    *(plan for _, plan in PLANS),
    {"mesh": {"row": 2, "col": 2}, "tensor": {"residual": "hidden"}},
    {"mesh": {"data": 2, "col": 2}, "memory": {"optimizer": "host"}, "unit": [{"match": "*", "mode": "zero2"}]},
    {"mesh": {"pipe": 3}, "batch": {"micro_batches": 4}, "pipeline": {"executor": "message-driven"}},
    {
        "mesh": {"depth": 2},
        "unit": [{"match": "*.mlp", "split": 2, "recompute": "per-slice"}, {"match": "*", "mode": "keep"}],
    },
]


def pairs(count: int, chance: random.Random, folder: Path) -> Promise:
    promise = Promise("saved under one plan, resumed under another: state equal in all bits, losses to 1e-9")
    ordered = [(a, b) for a in RESUME_PLANS for b in RESUME_PLANS if a is not b]
    chance.shuffle(ordered)
    precision = {"precision": {"compute": "fp64"}}
    train(write_config(folder, "serial", precision, model=RESUME_MODEL))
    right = [m["loss"] for m in read_metrics(RunDir(folder / "serial")) if "loss" in m]
    for i in range(count):
        first, second = ordered[i % len(ordered)]
        promise.add(*_resumed(folder, i, first | precision, second | precision, chance.randint(1, 5), right))
    promise.note = f"{min(count, len(ordered))} different ordered pairs"
    return promise


RESUME_MODEL = {"family": "gpt", "layers": 3, "hidden": 32, "heads": 4, "seq_len": 16}


def _resumed(
    folder: Path, number: int, first: dict[str, Any], second: dict[str, Any], at: int, right: list[float]
) -> tuple[bool, str]:
    """A rank is killed at a step, and the run resumed under another plan, which saves what it has loaded before it trains on."""
    name = f"resumed{number}"
    args = write_config(folder, name, first, checkpoint={"every": 1, "mode": "sync", "keep": 9}, model=RESUME_MODEL)
    train(args, f"kill rank=0 step={at + 1}")
    other, again = folder / f"{name}-other.json", folder / f"{name}-again"
    other.write_text(json.dumps(second))
    with _saved_again(again):
        code, said = train(["train", "--resume", str(folder / name), "--plan", str(other)])
    found = [m["loss"] for m in read_metrics(RunDir(folder / name)) if "loss" in m]
    good = code == 0 and len(found) == len(right)
    good = good and max(abs(a - b) / abs(b) for a, b in zip(found, right, strict=True)) < 1e-9
    differ = _different(folder / name / "checkpoints" / f"step-{at:06d}", again / f"step-{at:06d}") if good else []
    shutil.rmtree(folder / name)
    shutil.rmtree(again, ignore_errors=True)
    what = f"{first['mesh']} to {second['mesh']} at step {at}: {code} {said} {f'other bits: {differ[:3]}' if differ else ''}"
    return good and not differ, what


@contextlib.contextmanager
def _saved_again(folder: Path) -> Iterator[None]:
    """Ranks (forked from this process) that resume save their state to another folder before the first step."""
    honest = Loop.run

    def run(loop: Loop, done: int) -> int:
        usual, loop.checkpointer = loop.checkpointer, save_load.Checkpointer(folder, group=loop.checkpointer.group)
        loop.saved_step = -1
        loop.save(done, last=True)
        loop.checkpointer = usual
        return honest(loop, done)

    Loop.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        Loop.run = honest  # type: ignore[method-assign]


def _different(one: Path, other: Path) -> list[str]:
    """Tensors (weights and optimizer state) of two checkpoints that are not equal in all bits."""
    indexes = [read_index(path) for path in (one, other)]
    if indexes[0].keys() != indexes[1].keys() or not indexes[0]:
        return ["the names of tensors"]
    found = []
    for name, tensor in indexes[0].items():
        box = tuple((0, n) for n in tensor.shape)
        a, b = (save_load.read_box(path, index, name, box) for path, index in zip((one, other), indexes, strict=True))
        if a.dtype != b.dtype or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            found.append(name)
    return found


def replan(count: int, chance: random.Random, folder: Path) -> Promise:
    from fourfold.testing.network import Network, missing

    promise = Promise("one of two hosts lost: next step within 60 s")
    if (reason := missing()) is not None:
        promise.note = f"not run: {reason}"
        return promise
    for i in range(count):
        kind = ("srun", "torchrun")[i % 2]
        train_flags = {"steps": 100_000, "timeout": 10.0, "eval_every": 0}
        args = write_config(folder, f"hosts{i}", train=train_flags, checkpoint={"every": 10})
        args += ["--on-fault", "replan"]
        run, env = folder / f"hosts{i}", {"OMP_NUM_THREADS": "1", "FOURFOLD_FAULTS": ""}
        with Network(hosts=2, rate="1gbit") as net, open(folder / f"hosts{i}.log", "w") as log:
            if kind == "torchrun":
                conf, flags = "last_call_timeout=3,read_timeout=10", ["--max-restarts=3", "--rdzv-id=job"]
                net.torchrun(
                    ["-m", "fourfold", *args],
                    ranks_per_host=2,
                    least=1,
                    conf=conf,
                    flags=flags,
                    env=env,
                    stdout=log,
                    stderr=log,
                )
            else:
                common = env | {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}
                common |= {"SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": net.address(0)}
                for rank in range(4):
                    place = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank % 2, "SLURM_NODEID": rank // 2}
                    command = [sys.executable, "-m", "fourfold", *args, "--max-restarts", "2", "--replan-after", "5"]
                    own = common | {name: str(value) for name, value in place.items()}
                    net.popen(rank // 2, command, own, stdout=log, stderr=log)
            _until(lambda run=run: len(_started(run)) and len(steps(run)) >= 25, 180)  # type: ignore[misc]
            saved = save_load.newest(run / "checkpoints")
            net.cut(1)
            cut = time.time()
            _until(lambda run=run: len(_started(run)) > 1 and _fresh(run), 150)  # type: ignore[misc]
            seconds = time.time() - cut
            first = steps(run)
            kept = int(saved.name[5:]) if saved is not None else 0
        good = seconds <= 60 and first == list(range(1, len(first) + 1)) and len(first) > kept
        found = f"{len(first)} steps, {kept} of them saved before, starts {len(_started(run))}"
        promise.add(
            good, f"{kind}: {seconds:.0f} s, {found}\n{(folder / f'hosts{i}.log').read_text()[-3000:]}", seconds
        )
    return promise


def _until(good: Callable[[], Any], limit: float) -> None:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception):  # files that are being replaced
            if good():
                return
        time.sleep(0.2)


def _started(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_history(RunDir(run)) if line["event"] == "start"]


def _fresh(run: Path) -> bool:
    """Whether a step was done after the last start."""
    return (run / "metrics.jsonl").stat().st_mtime > _started(run)[-1]["time"] + 0.5 and bool(steps(run))


SOAK_PLAN = {"mesh": {"pipe": 2, "data": 2, "col": 2}, "batch": {"micro_batches": 2}}
SOAK_FAULTS = ("kill {}", "raise {}", "stop {}", "kill {} op=save", "flip {}", "kill {} op=save after=0.02")


def soak(count: int, chance: random.Random, folder: Path) -> Promise:
    """`count` steps without a fault, then as many with one every 200 steps (40 of a short soak): kills, errors, stopped ranks and
    changed bits, in steps and in saves."""
    every = 200 if count >= 2000 else 40
    save = every // 4
    flags = {
        "train": {"steps": count, "eval_every": 0, "timeout": 10.0, "global_batch": 8},
        "checkpoint": {"every": save},
    }
    faults = []
    for number, step in enumerate(range(every, count, every)):
        kind = SOAK_FAULTS[number % len(SOAK_FAULTS)]
        at = step + (0 if "save" in kind else chance.randrange(save))
        faults.append(kind.format(f"rank={chance.randrange(8)} step={at}"))
    promise = Promise(f"soak: {count:,} steps on 8 ranks, a checkpoint every {save}, a fault every {every}")
    restarts = ["--max-restarts", str(len(faults)), "--restart-delay", "0"]
    calm, soaked = (
        _sampled(write_config(folder, name, SOAK_PLAN, **flags) + restarts, given, folder / name)
        for name, given in (("calm", ""), ("soaked", "; ".join(faults)))
    )
    failures = sum(line["event"] == "failure" for line in read_history(RunDir(folder / "soaked")))
    whole = list(range(1, count + 1))
    left = sum(len(list(folder.glob(f"{name}.tmp/*"))) for name in ("calm", "soaked"))
    for what, good in {
        f"exit codes {calm.code} and {soaked.code}": not calm.code and not soaked.code,
        "every step is in metrics.jsonl once": steps(folder / "calm") == whole and steps(folder / "soaked") == whole,
        "the bits of the run without faults": digest(folder / "calm") == digest(folder / "soaked") != "",
        f"{failures} failures of {len(faults)} faults": failures == len(faults),
        f"launcher over {failures} restarts: {soaked.launcher}": soaked.launcher.flat,
        f"launcher without faults: {calm.launcher}": calm.launcher.flat,
        f"ranks without faults: {calm.ranks}": calm.ranks.flat,
        f"ranks over restarts: {soaked.ranks}": soaked.ranks.flat,
        f"{left} temporary folders left": not left,
    }.items():
        print(f"  {'held' if good else 'NOT HELD'}: {what}", flush=True)
        promise.add(good, f"{what}\n{soaked.said[-2000:]}")
    promise.note = f"{failures} faults; {calm.seconds:.0f} s without, {soaked.seconds:.0f} s with them"
    return promise


@dataclass
class Held:
    """What processes held in the first and in the last third of a run: MiB, the maximum; files, threads and sockets, the median.

    A start opens two files for a moment, which a sample may or may not see.
    """

    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()

    @property
    def flat(self) -> bool:
        """Files, threads and sockets have not grown, and memory by no more than 16 MiB and a tenth."""
        (memory, *counts), (later, *more) = self.first, self.last
        return later <= 1.1 * memory + 16 and all(b <= a for a, b in zip(counts, more, strict=True))

    def __str__(self) -> str:
        names = ("MiB", "files", "threads", "sockets")
        return ", ".join(f"{a} to {b} {n}" for a, b, n in zip(self.first, self.last, names, strict=True))


@dataclass
class Sampled:
    """A run as a command of its own, looked at from outside every second."""

    code: int
    said: str
    seconds: float
    launcher: Held
    ranks: Held


def _sampled(args: list[str], faults: str, run: Path) -> Sampled:
    began = time.monotonic()
    temporary = Path(f"{run}.tmp")
    temporary.mkdir()
    env = {**os.environ, "FOURFOLD_FAULTS": faults, "TMPDIR": str(temporary)}
    with open(f"{run}.log", "w+") as log:
        process = subprocess.Popen([sys.executable, "-m", "fourfold", *args], stdout=log, stderr=log, env=env)
        launcher = psutil.Process(process.pid)
        mine, theirs = [], []
        while process.poll() is None:
            time.sleep(1)
            with contextlib.suppress(psutil.Error):
                mine.append(_counts(launcher))
            with contextlib.suppress(psutil.Error):
                some = [_counts(p) for p in launcher.children()]
                if some:
                    theirs.append(tuple(map(max, zip(*some, strict=True))))
        log.seek(0)
        said = log.read()
    return Sampled(process.returncode, said, time.monotonic() - began, _thirds(mine), _thirds(theirs))


def _counts(process: psutil.Process) -> tuple[int, int, int, int]:
    with process.oneshot():
        sockets = len(process.net_connections("all"))
        return process.memory_info().rss >> 20, process.num_fds(), process.num_threads(), sockets


def _thirds(samples: list[tuple[int, ...]]) -> Held:
    third = max(1, len(samples) // 3)
    columns = [list(zip(*part, strict=True)) for part in (samples[:third], samples[-third:])]
    return Held(*((max(memory), *(sorted(c)[len(c) // 2] for c in counts)) for memory, *counts in columns))


SECTIONS: dict[str, Callable[[int, random.Random, Path], Promise]] = {
    "dead": dead,
    "stopped": stopped,
    "kills": kills,
    "damaged": damaged,
    "disk": disk,
    "pairs": pairs,
    "replan": replan,
    "soak": soak,
}


def measure(names: list[str], counts: dict[str, int], seed: int = 0) -> list[Promise]:
    """Run sections; each has a folder and random numbers of its own."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # sums of several threads have other bits
    found = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="fourfold-faults-") as folder:
            found.append(SECTIONS[name](counts[name], random.Random(f"{seed} {name}"), Path(folder)))
            print(f"{name}: {found[-1].held} of {found[-1].tries}", flush=True)
    os.environ.pop("FOURFOLD_FAULTS", None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--count", type=int, help="tries of every section, instead of its own number")
    parser.add_argument("--quick", action="store_true", help="a few tries each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    counts = {name: args.count or (QUICK if args.quick else COUNTS)[name] for name in SECTIONS}
    found = measure(args.only, counts, args.seed)
    table = Table("promise", "held", "tries", "worst s", "", box=None, header_style="dim")
    for p in found:
        table.add_row(p.name, str(p.held), str(p.tries), f"{p.worst:.1f}" if p.worst else "", p.note)
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps({"benchmark": "faults", "rows": [asdict(p) for p in found]}, indent=2))
    sys.exit(int(any(p.held < p.tries for p in found)))


if __name__ == "__main__":
    main()
