"""Everything that needs an NVIDIA GPU, in one go, from the root of the repository; nothing is installed.

    make test-gpu     python -m tests.gpu tests    kernels, offload, runs on one GPU, NCCL among ranks that share it, verify
    make gpu-check    python -m tests.gpu check    figures: the life of a run of 1.2 B parameters, then killed and stopped ranks
                      (its parts: whole, killed, faults)

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
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
            print(f"left out for want of time  {name}")
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
    session.tests(_grouped(shared))
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


def run_check(session: Session, what: str) -> int:
    """Figures, as text to be copied."""
    os.chdir(ROOT)
    found: dict[str, Any] = {}
    for name, more, faults in (
        ("whole", ["--checkpoint.every", "0"], ""),
        ("killed", ["--checkpoint.every", "20", "--max-restarts", "1"], "kill rank=0 step=50"),
    ):
        if what in ("check", name):
            found[name] = _life(session, name, more, faults)
    if len(found) == 2:
        same = found["whole"] == found["killed"]
        print(f"killed at step 50 and resumed: {'the same bits' if same else 'OTHER BITS'}")
        problem = "" if same else "losses or weights differ"
        session.done.append(Done("life of a run: the same bits after a kill", problem, 0.0))
    if what in ("check", "faults"):
        _faults(session)
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


TINY = """
[model]
family = "gpt"
layers = {layers}
hidden = 64
heads = 8
seq_len = 16
[data]
source = "stdlib"
[train]
steps = 2000
global_batch = 16
device = "cuda"
backend = "nccl"
timeout = 10.0
start_timeout = 60.0
[log]
trace = 0
"""
KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "data": lambda n: {"mesh": {"data": n}},
    "zero3": lambda n: {"mesh": {"data": n}, "unit": [{"match": "*", "mode": "zero3"}]},
    "col": lambda n: {"mesh": {"col": n}},
    "pipe": lambda n: {"mesh": {"pipe": n}},
}


def _faults(session: Session) -> None:
    """Killed and stopped ranks over NCCL, until the time is over."""
    print("\n## A killed and a stopped rank over NCCL, ranks that share one GPU, train.timeout 10 s", flush=True)
    print("| ranks | plan | fault | noticed after | report names it | processes left |\n|---|---|---|---|---|---|")

    def attempt(case: tuple[int, str, str]) -> None:
        n, kind, fault = case
        name = f"{fault} over NCCL, {n} ranks, {kind}"
        if session.left < 60:
            session.left_out.append(name)
        else:
            _fault(session, name, n, kind, fault)

    cases = [(n, kind, fault) for n in (4, 2, 8) for kind in KINDS for fault in ("stop", "kill")]
    with ThreadPoolExecutor(2) as pool:  # processes on a GPU take turns: more at a time would be slower
        list(pool.map(attempt, cases))


def _fault(session: Session, name: str, ranks: int, kind: str, fault: str) -> None:
    import psutil

    run, victim, begin = session.logs / name.replace(" ", "-").replace(",", ""), ranks - 1, time.monotonic()
    plan, config = run.with_suffix(".plan.json"), run.with_suffix(".toml")
    config.write_text(TINY.format(layers=ranks if kind == "pipe" else 2))
    plan.write_text(json.dumps(KINDS[kind](ranks) | {"precision": {"compile": False}}))  # to reach the fault soon
    command = [
        sys.executable,
        "-m",
        "fourfold",
        "train",
        str(config),
        "--plan",
        str(plan),
        "--nproc",
        str(ranks),
    ]
    log = run.with_suffix(".log")
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--train.run-dir", str(run)],
            cwd=ROOT,
            env=environment(FOURFOLD_FAULTS=f"{fault} rank={victim} step=3"),
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    family: set[Any] = set()
    while process.poll() is None and time.monotonic() - begin < 90:
        if len(family) <= ranks:
            family.update(psutil.Process(process.pid).children(recursive=True))
        time.sleep(0.1)
    ended = time.time()
    left = [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    _end_session(process.pid)
    process.wait()
    fired = run / "faults" / "0"
    noticed = ended - fired.stat().st_mtime if fired.exists() else float("nan")
    text = log.read_text(errors="replace")
    named = f"rank {victim} {'was killed' if fault == 'kill' else 'is stopped'}" in text
    limit = 5.0 if fault == "kill" else 20.0
    good = process.returncode == 1 and named and noticed < limit and not left
    print(f"| {ranks} | {kind} | {fault} | {noticed:.1f} s | {'yes' if named else 'NO'} | {len(left)} |", flush=True)
    session.done.append(
        Done(name, "" if good else f"exit code {process.returncode}\n{_tail(text)}", time.monotonic() - begin)
    )
    for p in left:
        p.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tests", "check", "whole", "killed", "faults"))
    parser.add_argument("--limit", type=float, default=570.0, help="seconds")
    args = parser.parse_args()
    if shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    version = "import sys, torch; print('Python', sys.version.split()[0], 'torch', torch.__version__, torch.cuda.device_count(), 'GPU')"
    subprocess.run([sys.executable, "-c", version])
    session = Session(args.limit, args.what)
    return run_tests(session) if args.what == "tests" else run_check(session, args.what)


if __name__ == "__main__":
    sys.exit(main())
