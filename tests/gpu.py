"""Everything that needs an NVIDIA GPU, in one go, from the root of the repository; nothing is installed.

    make test-gpu     python -m tests.gpu tests    kernels, offload, runs on one GPU, NCCL among ranks that share it, verify
    make gpu-check    python -m tests.gpu check    figures: the life of a run of 1.2 B parameters, then killed and stopped ranks
                      (its parts: life, which is whole and killed, and faults; --only 'stop pipe 4' of the faults, --device cpu --backend gloo to rehearse)

Each takes less than ten minutes on an H200 with 16 cores. Whatever fails, the rest runs; the summary comes last, and logs are in
`runs/gpu`. What there is no time for is said to be left out (`--limit` seconds, 570 by default).

Tests are forked from one process that has imported torch and not touched CUDA: a process that has started CUDA must not fork ranks, so
a test that forks them has a process of its own. Processes compute on one CPU thread each: their pools would wait for each other. Runs
of real size have the GPU to themselves. Tests with ranks on NCCL run one at a time: processes on a GPU take turns, and NCCL's kernels
wait for each other, so that one all-reduce of eight ranks takes 0.1 s.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "runs" / "gpu"
TOGETHER = max(2, (os.cpu_count() or 2) - 2)
"""Tests at a time."""
NCCL = ("tests/test_nccl.py", "test_a_stopped_rank_over_nccl")
REAL = ("of_real_size",)
FORKING = ("offload/test_training", "offload/test_fsdp", "test_training_has_the_same_bits")
"""Tests that fork ranks."""


@dataclass
class Done:
    """A test or command, and how it ended."""

    name: str
    problem: str
    seconds: float


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | more


class Session:
    """Runs jobs until the time is over, and keeps what they gave."""

    def __init__(self, limit: float, name: str):
        self.begin, self.limit = time.monotonic(), limit
        self.done: list[Done] = []
        self.left_out: list[str] = []
        self.logs = LOGS / name
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)

    @property
    def left(self) -> float:
        return self.limit - (time.monotonic() - self.begin)

    def run(self, name: str, start: Callable[[Path], int], needs: float = 20.0, seconds: float = 200.0) -> bool:
        """Start a process and wait for it: `start` returns its id; it leads a session of its own, which ends with it."""
        if self.left < needs:
            self.left_out.append(name)
            return False
        begin, log = time.monotonic(), self.logs / f"{hashlib.sha256(name.encode()).hexdigest()[:10]}.log"
        deadline = begin + min(seconds, self.left)
        pid = start(log)
        code = None
        while code is None and time.monotonic() < deadline:
            found, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if found else None
            time.sleep(0.05)
        _end_session(pid)
        if code is None:
            os.waitpid(pid, 0)
        took = time.monotonic() - begin
        text = log.read_text(errors="replace") if log.exists() else ""
        problem = "" if code == 0 else f"{'took too long' if code is None else f'exit code {code}'}\n{_tail(text)}"
        skipped = code in (0, 5) and " skipped" in text and " passed" not in text
        self.done.append(Done(name, problem if not skipped else "", took))
        mark = "FAILED" if problem and not skipped else "skipped" if skipped else "ok"
        print(f"{time.monotonic() - self.begin:5.0f} s  {mark:8} {took:5.1f} s  {name}", flush=True)
        return not problem

    def command(self, name: str, *arguments: str, **how: Any) -> bool:
        def start(log: Path) -> int:
            with log.open("wb") as out:
                process = subprocess.Popen(
                    [sys.executable, *arguments],
                    cwd=ROOT,
                    env=environment(),
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            return process.pid

        return self.run(name, start, **how)

    def test(self, names: Sequence[str], **how: Any) -> bool:
        """Run tests in one process."""
        label = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        return self.run(label, lambda log: _forked(names, log), **how)

    def tests(self, groups: Iterable[Sequence[str]]) -> None:
        with ThreadPoolExecutor(TOGETHER) as pool:
            list(pool.map(self.test, groups))

    def summary(self) -> int:
        failed = [d for d in self.done if d.problem]
        for d in failed:
            print(f"\n---- {d.name}: {d.problem}")
        print(
            f"\n{len(self.done) - len(failed)} passed or skipped, {len(failed)} failed, {len(self.left_out)} left out",
            end="",
        )
        print(f", {time.monotonic() - self.begin:.0f} s")
        for d in failed:
            print(f"FAILED  {d.name}")
        for name in self.left_out:
            print(f"left out, no time left  {name}")
        return 1 if failed or self.left_out else 0


def _tail(text: str, lines: int = 25) -> str:
    return "\n".join(text.splitlines()[-lines:])


def _end_session(leader: int) -> None:
    """End what a job has left behind."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _forked(names: Sequence[str], log: Path) -> int:
    """Run tests in a forked process."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        import pytest

        code = int(pytest.main(["-q", "-p", "no:cacheprovider", *names]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# ---- make test-gpu ----


def collected(*files: str) -> tuple[list[str], str]:
    """The names of the tests in files, collected in another process, and what went wrong."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-o",
        "addopts=",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        *files,
    ]
    out = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    return [
        line for line in out.stdout.splitlines() if "::" in line
    ], "" if out.returncode == 0 else out.stdout + out.stderr


def _grouped(names: Sequence[str]) -> list[list[str]]:
    """Tests that share a process, the longest groups first: starting CUDA takes longer than most of them."""
    groups: list[list[str]] = []
    for file, size in (("tests/test_cuda.py", 3), ("tests/test_kernels.py", 8), ("tests/offload", 24)):
        found = [n for n in names if n.startswith(file) and not any(word in n for word in FORKING)]
        groups += [found[i : i + size] for i in range(0, len(found), size)]
    return groups + [[n] for n in names if any(word in n for word in FORKING)]


def run_tests(session: Session) -> int:
    os.chdir(ROOT)
    os.environ.update(environment(FOURFOLD_TEST_DEVICE="cuda", PYTORCH_NVML_BASED_CUDA_CHECK="1", OMP_NUM_THREADS="1"))
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    names, problem = collected("tests/test_kernels.py", "tests/test_cuda.py", "tests/test_nccl.py", "tests/offload")
    if problem:  # pytest is missing, or a file cannot be imported
        session.done.append(Done("collecting the tests", _tail(problem), 0.0))
    import torch

    torch.set_num_threads(1)
    import fourfold.train.worker  # noqa: F401 (once, for all that are forked)

    if names:
        import pytest  # noqa: F401

    alone = [n for n in names if any(word in n for word in (*NCCL, *REAL))]
    shared = [n for n in names if n not in alone and ("[cpu" not in n or "cuda" in n)]
    print(f"{len(names)} tests, {len(shared)} of them {TOGETHER} at a time", flush=True)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = (
        "8"  # with 32, which ranks over NCCL need, the GPU has too few for so many processes
    )
    session.tests(_grouped(shared))
    del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    for n in alone:
        if any(word in n for word in REAL):
            session.test([n], needs=100, seconds=300)
    for ranks in (2, 4, 8):
        verify = ["-m", "fourfold", "verify", "--nproc", str(ranks), "--device", "cuda", "--backend", "nccl", "--quick"]
        session.command(f"verify over NCCL with {ranks} ranks on one GPU", *verify, needs=40, seconds=200)
    for n in alone:
        if "test_nccl" in n and any(kept in n for kept in ("tied", "all axes")):  # verify has the other plans
            session.test([n], needs=30)
    return session.summary()


# ---- make gpu-check ----


def run_check(session: Session, args: argparse.Namespace) -> int:
    """Figures, as text to be copied."""
    what = args.what
    os.chdir(ROOT)
    found: dict[str, Any] = {}
    for name, more, faults in (
        ("whole", ["--checkpoint.every", "0"], ""),
        ("killed", ["--checkpoint.every", "20", "--max-restarts", "1"], "kill rank=0 step=50"),
    ):
        if what in ("check", "life", name):
            found[name] = _life(session, name, more, faults)
    if len(found) == 2:
        same = found["whole"] == found["killed"]
        print(f"killed at step 50 and resumed: {'the same bits' if same else 'OTHER BITS'}")
        problem = "" if same else "losses or weights differ"
        session.done.append(Done("life of a run: the same bits after a kill", problem, 0.0))
    if what in ("check", "faults"):
        run_faults(session, args.device, args.backend, args.together, args.only)
    return session.summary()


def _train(run: Path, *flags: str, faults: str = "", limit: float = 300.0) -> tuple[int, str, float]:
    command = [sys.executable, "-m", "fourfold", "train", *flags, "--train.run-dir", str(run)]
    begin = time.monotonic()
    log = run.with_suffix(".log")
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(FOURFOLD_FAULTS=faults), stdout=out, stderr=out, start_new_session=True
        )
    try:
        code = process.wait(max(5.0, limit))
    except subprocess.TimeoutExpired:
        code = -1
    took = time.monotonic() - begin
    _end_session(process.pid)
    process.wait()
    return code, log.read_text(errors="replace"), took


def _metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _digest(run: Path) -> str:
    found = hashlib.sha256()
    for part in sorted((run / "final").glob("*.safetensors")):
        with part.open("rb") as f:
            found.update(hashlib.file_digest(f, "sha256").digest())
    return found.hexdigest()[:16]


def _life(session: Session, name: str, more: list[str], faults: str) -> tuple[list[dict[str, Any]], str]:
    """Llama 1B, 8 × 4,096 tokens, 60 steps by default settings: trained, `killed` also saved three times, killed and resumed;
    sampled. Returns losses and a hash of the weights."""
    print(
        f"\n## The life of a run, {name}: configs/llama-1b.toml, 60 steps of 8 × 4,096 tokens of the standard library",
        flush=True,
    )
    flags = ["configs/llama-1b.toml", "--data.source", "stdlib", "--train.steps", "60", "--train.global-batch", "8"]
    flags += ["--optim.warmup", "20", "--train.eval-every", "30", "--checkpoint.keep", "2"]
    run = session.logs / name
    code, text, took = _train(run, *flags, *more, faults=faults, limit=min(300.0, session.left - 30))
    steps = [m for m in _metrics(run) if "loss" in m]
    traced = run / "trace" / "rank0.jsonl"
    count = len(traced.read_text().splitlines()) if traced.exists() else 0
    print(f"{name}: exit code {code}, {len(steps)} steps, {count} traced, {took:.0f} s, of which {_usual(steps)}")
    saves = [f"{m['save_seconds']:.2f} s at step {m['step']}" for m in _metrics(run) if "save_seconds" in m]
    print(f"{name}: training waited for saves: {', '.join(saves) or 'none'}")
    digest = _digest(run)
    print(f"{name}: loss {steps[-1]['loss'] if steps else float('nan'):.6f}, weights {digest}", flush=True)
    problem = "" if code == 0 and len(steps) == 60 else f"exit code {code}\n{_tail(text)}"
    session.done.append(Done(f"life of a run: {name}", problem, took))
    if name == "whole":
        _sample(session, run)
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    return [{k: m.get(k) for k in ("step", "loss", "grad_norm")} for m in steps], digest


def _usual(steps: list[dict[str, Any]]) -> str:
    if len(steps) < 5:
        return "too few steps to tell"
    rates = [m["tokens_per_second"] for m in steps[3:]]
    last = steps[-1]
    peak = last["peak_bytes"] / 2**30
    return (
        f"{statistics.median(rates):,.0f} tokens/s (median; last step {last['seconds']:.3f} s), "
        f"mfu {statistics.median(m['mfu'] for m in steps[3:]):.1%}, {peak:.1f} GiB"
    )


def _sample(session: Session, run: Path) -> None:
    begin = time.monotonic()
    command = [sys.executable, "-m", "fourfold", "sample", str(run), "--prompt", "def f(", "--tokens", "200"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    first, text = 0.0, b""
    while chunk := process.stdout.read1(1 << 16):  # type: ignore[attr-defined]
        first, text = first or time.monotonic() - begin, text + chunk
    code, whole = process.wait(), time.monotonic() - begin
    rate = 200 / max(1e-3, whole - first)
    print(f"sample: exit code {code}, first output after {first:.1f} s, then about {rate:.0f} tokens/s")
    session.done.append(Done("sample", "" if code == 0 else _tail(text.decode(errors="replace")), whole))


# ---- faults ----

TINY = """
[model]
family = "gpt"
layers = {layers}
hidden = 64
heads = 8
seq_len = 16
[data]
source = "corpus.txt"
[optim]
warmup = 2
[train]
steps = {steps}
global_batch = 16
eval_every = {every}
eval_batches = 1
device = "{device}"
backend = "{backend}"
timeout = {timeout}
start_timeout = 45.0
[checkpoint]
every = {every}
[log]
trace = 0
"""
TIMEOUT = 10.0
"""train.timeout of the runs, in seconds."""
DEAD, STOPPED = 2.0, TIMEOUT + 5.0
"""Seconds after which a killed and a stopped rank must be named."""
KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "data": lambda n: {"mesh": {"data": n}},
    "zero3": lambda n: {"mesh": {"data": n}, "unit": [{"match": "*", "mode": "zero3"}]},
    "col": lambda n: {"mesh": {"col": n}},
    "pipe": lambda n: {"mesh": {"pipe": n}, "batch": {"micro_batches": n}},
}
PHASES = {
    "start": ("step=0 op=start", "start"),
    "connect": ("step=0 op=connect", "the connections between ranks"),
    "step": ("step=3", "step 3"),
    "evaluation": ("step=2 op=evaluation", "the evaluation after step 2"),
    "save": ("step=2 op=save", "the save of step 2"),
    "final": ("step=4 op=final", "the writing of final/"),
}
"""What FOURFOLD_FAULTS says of each phase, and what a report says."""
CASES = """
none pipe 4 -; stop col 4 step 3; stop zero3 4 step 0; stop pipe 4 step 2; stop pipe 4 evaluation 1; stop data 4 save 1;
stop data 4 final 0; stop col 4 connect 2; skip data 4 step 3; slow data 4 step 2; kill pipe 4 step 1; kill zero3 4 save 3;
kill col 4 evaluation 0; kill pipe 4 connect 2; kill data 4 final 0; stop pipe 2 save 0; stop zero3 4 evaluation 2;
stop data 2 step 1; kill col 4 step 3; kill data 8 step 7; stop col 4 save 1; stop pipe 8 step 5; stop zero3 2 connect 1;
kill zero3 8 step 0; stop data 8 step 6; kill pipe 4 save 3; stop pipe 4 connect 3; kill data 4 start 2; stop pipe 4 final 3;
slow pipe 4 step 1; stop col 8 step 0; kill zero3 4 evaluation 1; skip zero3 4 step 0; kill pipe 8 step 3; kill col 2 step 1;
stop data 4 start 0; stop col 2 evaluation 0; kill data 2 connect 0; kill pipe 2 evaluation 1; stop zero3 4 final 0
"""
"""The fault, the plan, the ranks, the phase, the rank that it happens to; the most valuable come first."""


@dataclass
class Case:
    """A fault in a run, and what came of it; times in seconds."""

    fault: str
    plan: str
    ranks: int
    phase: str
    victim: int
    started: float = math.nan
    """From the start of the command until the fault."""
    named: float = math.nan
    """From the fault until the launcher had its report."""
    ended: float = math.nan
    """From the fault until the command had ended."""
    right: bool = False
    """Whether the report names the rank and the phase, and no other rank."""
    said: str = ""
    code: int = -1
    left: int = 0
    """Processes left."""
    good: bool = False

    @property
    def name(self) -> str:
        return f"{self.fault} {self.plan} {self.ranks} {self.phase} {self.victim}"


def cases() -> list[Case]:
    found = []
    for text in CASES.replace("\n", " ").split(";"):
        fault, plan, ranks, phase, *victim = text.split()
        found.append(Case(fault, plan, int(ranks), phase, int(victim[0]) if victim else 0))
    return found


def run_faults(session: Session, device: str, backend: str, together: int, only: str) -> None:
    """Killed, stopped and slow ranks, and ranks that skip a collective, in every phase of a run, until the time is over.

    Ranks share one GPU. Commands are forked from this process, which has imported torch and does not touch CUDA.
    """
    os.environ.update(environment(PYTORCH_NVML_BASED_CUDA_CHECK="1", OMP_NUM_THREADS="1"))
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    import torch

    torch.set_num_threads(1)
    import fourfold.checkpoint.export
    import fourfold.cli
    import fourfold.train.worker  # noqa: F401 (once, for all that are forked)

    print(
        f"\n## Faults, {backend} on {device}, train.timeout {TIMEOUT:g} s; limits {DEAD:g} s and {STOPPED:g} s",
        flush=True,
    )
    print("| fault | plan | ranks | phase, rank | after a start of | named after | ended after | report | left |")
    print("|---|---|---|---|---|---|---|---|---|")
    tried: list[Case] = []

    def attempt(case: Case) -> None:
        if session.left < (25 if case.fault == "kill" else 45):
            session.left_out.append(case.name)
            return
        begin = time.monotonic()
        try:
            problem = _fault(session, case, device, backend)
        except Exception as e:  # the others go on
            problem = "".join(traceback.format_exception(e))
        tried.append(case)
        named, ended = (f"{t:.1f} s" if t == t else "" for t in (case.named, case.ended))
        mark = "right" if case.right else "WRONG"
        row = f"| {case.fault} | {case.plan} | {case.ranks} | {case.phase}, {case.victim} | {case.started:.1f} s | {named} | {ended} |"
        print(f"{row} {mark}: {case.said[:150]} | {case.left} |{'' if case.good else ' NOT HELD'}", flush=True)
        session.done.append(Done(case.name, problem, time.monotonic() - begin))
        if case.fault == "none" and problem:
            os.environ["CUDA_MODULE_LOADING"] = "EAGER"  # perhaps a kernel is loaded while another waits for a message
            print(f"{case.name} failed: from here with CUDA_MODULE_LOADING=EAGER\n{problem}", flush=True)
        summary = session.logs / "summary.json"
        summary.write_text(json.dumps([asdict(c) for c in tried], indent=1))

    with ThreadPoolExecutor(together) as pool:  # processes on a GPU take turns
        list(pool.map(attempt, [case for case in cases() if all(word in case.name.split() for word in only.split())]))
    for fault, limit in (("kill", DEAD), ("stop", STOPPED)):
        some = [case for case in tried if case.fault == fault]
        worst = max((case.named for case in some if case.named == case.named), default=math.nan)
        held = sum(case.good for case in some)
        print(f"{fault}: {held} of {len(some)} held; named after {worst:.1f} s at most (limit {limit:g} s)", flush=True)


def _fault(session: Session, case: Case, device: str, backend: str) -> str:
    """Run a case and fill it in; returns what was wrong."""
    import psutil

    run = session.logs / case.name.replace(" ", "-")
    plan, config, log = run.with_suffix(".plan.json"), run.with_suffix(".toml"), run.with_suffix(".log")
    layers = case.ranks if case.plan == "pipe" else 2
    timeout, late = (3.0, 0.6 if case.plan == "pipe" else 1.6) if case.fault == "slow" else (TIMEOUT, 0.0)
    steps, every = (8, 0) if case.fault == "skip" else (4, 2)  # hosts run ahead of their devices by a step
    given = {"layers": layers, "steps": steps, "every": every, "device": device, "backend": backend, "timeout": timeout}
    config.write_text(TINY.format(**given))
    plan.write_text(json.dumps(KINDS[case.plan](case.ranks) | {"precision": {"compute": "fp64", "compile": False}}))
    when, at = PHASES.get(case.phase, ("", ""))
    fault = f"{case.fault} rank={case.victim} {when} seconds={late}" if case.fault != "none" else ""
    args = ["train", str(config), "--plan", str(plan), "--nproc", str(case.ranks), "--train.run-dir", str(run)]
    begin = time.time()
    pid = _forked_command(args, log, fault)
    code = None
    while code is None and time.time() - begin < min(150.0, session.left):
        found, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if found else None
        time.sleep(0.05)
    ended = time.time()
    case.left = sum(_session_of(p) == pid for p in psutil.pids()) if code is not None else 0
    _end_session(pid)
    if code is None:
        os.waitpid(pid, 0)
    case.code = -1 if code is None else code
    noted = run / "faults" / "0"
    at_fault = noted.stat().st_mtime if noted.exists() else ended
    case.started, case.ended = at_fault - begin, ended - at_fault
    text = log.read_text(errors="replace")
    lines = (run / "history.jsonl").read_text().splitlines() if (run / "history.jsonl").exists() else []
    failures = [event for event in map(json.loads, lines) if event["event"] == "failure"]
    if failures:
        case.named = failures[0]["time"] - at_fault
    _judge_case(case, text, failures, at)
    return "" if case.good else f"exit code {case.code}, {case.said}\n{_tail(text, 40)}"


def _judge_case(case: Case, text: str, failures: Sequence[dict[str, Any]], at: str) -> None:
    """Whether the report is right, and the promise held."""
    report = failures[0]["message"] if failures else ""
    blamed = [line for line in report.splitlines() if re.match(r"ranks? [\d, ]+ (was|is|has|hangs|are)", line)]
    if case.fault in ("none", "slow"):
        case.right = case.good = case.code == 0 and not failures and not case.left
        case.said = "ran to its end" if case.right else report[:300]
        return
    if case.fault == "skip":
        case.said = next((line for line in report.splitlines() if "skipped" in line), report[:300])
        ahead = re.search(rf"rank {case.victim} is at step (\d+), ranks? [\d, ]+ (?:is|are) at step (\d+)", case.said)
        case.right = ahead is not None and int(ahead[1]) > int(ahead[2])
        case.good = case.right and case.code == 1 and case.named < STOPPED and not case.left
        return
    words = "was killed by SIGKILL" if case.fault == "kill" else "is stopped (SIGSTOP)"
    case.said = "; ".join(blamed) or report[:300]
    others = [line for line in blamed if not re.match(rf"rank {case.victim} ", line)]
    case.right = f"rank {case.victim} {words} at {at}" in report and not others
    limit = DEAD if case.fault == "kill" else STOPPED
    case.good = case.right and case.code == 1 and case.named < limit and not case.left


def _session_of(pid: int) -> int:
    """The session of a process; -1: it has ended."""
    import psutil

    try:
        return os.getsid(pid) if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else -1
    except (ProcessLookupError, psutil.Error):
        return -1


def _forked_command(args: list[str], log: Path, faults: str) -> int:
    """`fourfold ARGS` in a forked process; returns its id. It leads a session."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        os.chdir(ROOT)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ["FOURFOLD_FAULTS"] = faults
        from fourfold.cli import main as fourfold

        code = fourfold(args)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tests", "check", "life", "whole", "killed", "faults"))
    parser.add_argument("--limit", type=float, default=570.0, help="seconds")
    parser.add_argument("--device", default="cuda", help="of the faults: cuda, or cpu to rehearse")
    parser.add_argument("--backend", default="nccl", help="of the faults: nccl, or gloo to rehearse")
    parser.add_argument("--together", type=int, default=3, help="faults tried at a time")
    parser.add_argument("--only", default="", help="faults: words of the cases to try, as in 'stop pipe 4'")
    args = parser.parse_args()
    if shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    version = "import sys, torch; print('Python', sys.version.split()[0], 'torch', torch.__version__, torch.cuda.device_count(), 'GPU')"
    subprocess.run([sys.executable, "-c", version])
    session = Session(args.limit, args.what)
    return run_tests(session) if args.what == "tests" else run_check(session, args)


if __name__ == "__main__":
    sys.exit(main())
