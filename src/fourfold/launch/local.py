"""Start the ranks of a job on this machine, watch them, and say which failed first.

The launcher imports torch once and forks the ranks, so four of them start in a tenth of a second. Each rank writes to its own
log file; rank 0 also gets the console. Ranks talk over the loopback interface alone and find each other through a file.
They die with their launcher (the kernel sees to it), and one rank's failure ends the others.

Ctrl-C or SIGTERM asks the ranks to stop after the step in progress; a second one kills them.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO

import torch.distributed as dist

from fourfold.errors import FourfoldError, RankFailure
from fourfold.launch.place import Place

__all__ = ["Job", "launch_local"]

Job = Callable[[Place, dist.Store, IO[str] | None, Callable[[], bool]], object]
"""What a rank does: (place, store, console of rank 0, stop requested?)."""

GRACE = 3.0
"""Seconds the other ranks get to end by themselves after the first failure, and again after SIGTERM."""


def launch_local(job: Job, ranks: int, logs: Path) -> None:
    """Run `job` in `ranks` forked processes; raises RankFailure, or the FourfoldError that the first failing rank met."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="fourfold-") as folder, _console() as console:
        processes: list[BaseProcess] = []
        for rank in range(ranks):
            args = (job, Place(rank, ranks, rank, ranks), Path(folder), logs, os.getpid(), console)
            process = context.Process(target=_rank, args=args, name=f"rank {rank}")
            process.start()
            processes.append(process)
        with _forwarding(processes):
            failed = _watch(processes)
        if failed:
            raise _first_failure(failed, Path(folder), logs)


@contextlib.contextmanager
def _console() -> Iterator[int]:
    """A descriptor of our standard output that survives the redirection in the ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    handle = os.dup(1)
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def _forwarding(processes: list[BaseProcess]) -> Iterator[None]:
    """Pass SIGINT and SIGTERM on to the ranks as SIGTERM, then as SIGKILL."""
    times = 0

    def forward(number: int, frame: object) -> None:
        nonlocal times
        times += 1
        if times == 1:
            print("\nstopping after this step (once more: kill)", file=sys.stderr, flush=True)
        _signal(processes, signal.SIGTERM if times == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal(processes: list[BaseProcess], number: int) -> None:
    for process in processes:
        if process.is_alive() and process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _watch(processes: list[BaseProcess]) -> dict[int, int]:
    """Wait for all ranks; after a first failure, end the others. Returns exit codes of those that failed by themselves."""
    failed: dict[int, int] = {}
    waiting = dict(enumerate(processes))
    deadline, next_signal = float("inf"), signal.SIGTERM
    while waiting:
        left = deadline - time.monotonic()
        wait([p.sentinel for p in waiting.values()], timeout=None if left == float("inf") else max(0.0, left))
        ended = [rank for rank, p in waiting.items() if not p.is_alive()]
        ours = next_signal != signal.SIGTERM  # deaths after our SIGTERM are our doing
        for rank in ended:
            code = waiting.pop(rank).exitcode or 0
            if code and not ours:
                failed[rank] = code
        if failed and deadline == float("inf"):
            deadline = time.monotonic() + GRACE
        if time.monotonic() >= deadline:
            _signal(processes, next_signal)
            deadline, next_signal = time.monotonic() + GRACE, signal.SIGKILL
    return failed


def _first_failure(failed: dict[int, int], folder: Path, logs: Path) -> FourfoldError:
    """The rank to blame: one that was killed, else the one that raised first (others often fail as a consequence)."""
    records = {}
    for rank in failed:
        with contextlib.suppress(OSError, json.JSONDecodeError):
            records[rank] = json.loads((folder / f"error{rank}").read_text())
    killed = [rank for rank, code in failed.items() if code < 0 and rank not in records]
    if killed:
        rank = killed[0]
        name = signal.Signals(-failed[rank]).name
        hint = " (out of memory? the kernel kills with this signal)" if name == "SIGKILL" else ""
        return RankFailure(f"rank {rank} was killed by {name}{hint}; its log: {logs / f'rank{rank}.log'}")
    if not records:
        rank = min(failed)
        return RankFailure(f"rank {rank} ended with exit code {failed[rank]}; its log: {logs / f'rank{rank}.log'}")
    rank, record = min(records.items(), key=lambda item: item[1]["time"])
    if record["for_user"]:
        error: FourfoldError = RankFailure(f"{record['message']} (rank {rank})")
        error.exit_code = record["exit_code"]
        return error
    return RankFailure(
        f"rank {rank} failed first; its log: {logs / f'rank{rank}.log'}\n\n{record['traceback'].rstrip()}"
    )


# ---- in the rank ----


def _rank(job: Job, place: Place, folder: Path, logs: Path, launcher: int, console: int) -> None:
    _die_with(launcher)
    stop = [False]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides
    signal.signal(signal.SIGTERM, lambda *_: stop.__setitem__(0, True))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    log = os.open(logs / f"rank{place.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    screen = os.fdopen(console, "w", buffering=1, closefd=False) if place.rank == 0 else None
    code = 0
    try:
        job(place, dist.FileStore(str(folder / "store"), place.ranks), screen, lambda: stop[0])
    except BaseException as e:
        traceback.print_exc()
        record = {
            "time": time.time(),
            "for_user": isinstance(e, FourfoldError),
            "exit_code": getattr(e, "exit_code", 1),
            "message": str(e),
            "traceback": traceback.format_exc(),
        }
        (folder / f"error{place.rank}").write_text(json.dumps(record))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no interpreter clean-up: other ranks may be gone, and threads of a broken group may hang


def _die_with(launcher: int) -> None:
    """Ask the kernel to kill this process when its parent ends (Linux; elsewhere the group's timeout ends it)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != launcher:  # it ended before the call
            os._exit(1)
