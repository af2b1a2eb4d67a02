"""Start ranks in a test: forked processes, a gloo group over a file, each rank's traceback raised in the parent.

    def check(rank, ranks):
        x = torch.full((3,), float(rank))
        dist.all_reduce(x)
        return x.sum().item()

    assert run_ranks(check, 4) == [18.0] * 4

Forking takes about 0.1 s for four ranks, against seconds for fresh interpreters, and ranks see what the test has patched.

[Note: forking from a process that runs tests]
The parent has imported torch and has run other tests. Four things keep its forks sound:

1. Only the thread that forks exists in a rank; a lock that another thread held stays locked there forever. So the parent
   has no other thread that computes: torch runs on one thread (`torch.set_num_threads(1)` before any kernel), and tests end
   the threads they start (conftest.py checks it after every test).
2. A rank's garbage collector leaves what the parent made alone (`gc.freeze`). It would write to every object it visits, and
   so copy the parent's memory into each rank (507 MB of the 1.2 GB of a pytest worker after 1,000 tests, eight times over),
   and it could run finalizers of objects whose threads do not exist in the rank.
3. Every group that a rank makes has `group_timeout`, also those made without one: torch's default is 30 minutes, and a rank
   that stops would be waited for until the test runner ends the test without naming the rank.
4. `timeout` is below the test runner's own limit, so that a rank that hangs is reported with the stacks of all its threads.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from fourfold.errors import RankFailure
from fourfold.launch.place import Place, choose_device, join_group
from fourfold.testing._torch import set_default_timeout

__all__ = ["run_ranks"]

DUMPED_BEFORE = 0.5
"""Seconds before the end of its time at which a rank writes its stacks."""
START = {"gloo": "fork", "nccl": "forkserver"}


def run_ranks(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = 60.0,
    group_timeout: float = 20.0,
    prepare: Callable[[int], None] | None = None,
    backend: Literal["gloo", "nccl"] = "gloo",
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(rank, ranks, *args, **kwargs)` in `ranks` processes that share a process group; returns their results.

    The first rank to fail ends the others, and RankFailure carries its traceback. `timeout` bounds the whole call,
    `group_timeout` every collective of every group, both in seconds. `prepare(rank)` is called in each rank before it joins
    the group. With `backend="nccl"` each rank has a GPU, which it shares where there are too few. CUDA does not survive a fork,
    so these ranks are forked from a server that has never used it: `fn` and its arguments must be picklable.
    """
    torch.set_num_threads(1)
    context: Any = multiprocessing.get_context(START[backend])
    if START[backend] == "forkserver":
        context.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory(prefix="fourfold-ranks-") as folder:
        processes, pipes = [], []
        gc.freeze()
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe(duplex=False)
                limits = (timeout, group_timeout)
                job = (fn, rank, ranks, args, kwargs, f"{folder}/store", limits, prepare, backend, theirs)
                process = context.Process(target=_rank, args=job, daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
        finally:
            gc.unfreeze()
        try:
            return _collect(processes, pipes, time.monotonic() + timeout, timeout, folder)
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
            for pipe in pipes:
                pipe.close()


def _rank(
    fn: Callable[..., Any],
    rank: int,
    ranks: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    store: str,
    limits: tuple[float, float],
    prepare: Callable[[int], None] | None,
    backend: str,
    pipe: Connection,
) -> None:
    timeout, group_timeout = limits
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stack = open(_stack_of(os.path.dirname(store), rank), "w")  # noqa: SIM115 (open as long as the process lives)
    # by time, not by a signal: a run installs its own handlers
    faulthandler.dump_traceback_later(max(0.1, timeout - DUMPED_BEFORE), file=stack)
    if sys.platform == "linux":
        # gloo's thread spins while another holds a connection's lock: on few cores it must not take that one's core
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        if prepare is not None:
            prepare(rank)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        set_default_timeout(timedelta(seconds=group_timeout))
        file = dist.FileStore(store, ranks)
        if backend == "nccl":
            place = Place(rank, ranks, rank, ranks)
            join_group(place, file, choose_device("cuda", place), group_timeout, "nccl")
        else:
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
            limit = timedelta(seconds=group_timeout)
            dist.init_process_group("gloo", store=file, rank=rank, world_size=ranks, timeout=limit)
        # over gloo: one that is done at once must not be gone before the others have connected to it
        dist.all_reduce(torch.zeros(1))
        answer = (time.monotonic(), True, fn(rank, ranks, *args, **kwargs))
    except BaseException:  # all of it is the parent's to raise
        answer = (time.monotonic(), False, traceback.format_exc())
    try:
        data = pickle.dumps(answer)
    except Exception:
        data = pickle.dumps((time.monotonic(), False, f"the result cannot be sent:\n{traceback.format_exc()}"))
    pipe.send_bytes(data)
    pipe.close()
    os._exit(0 if answer[1] else 1)  # no clean-up: the group's other ranks may be gone


def _collect(processes: list[Any], pipes: list[Connection], deadline: float, timeout: float, folder: str) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, tuple[float, str]] = {}
    open_pipes = dict(enumerate(pipes))
    while open_pipes:
        left = deadline - time.monotonic()
        ready = wait(list(open_pipes.values()), timeout=max(0.0, left))
        if not ready:
            waiting = ", ".join(map(str, open_pipes))
            where = _where(open_pipes, folder)
            raise RankFailure(f"ranks {waiting} did not finish within {timeout:.0f} s{_first(failures)}\n{where}")
        for rank in [r for r, p in open_pipes.items() if p in ready]:
            pipe = open_pipes.pop(rank)
            try:
                when, good, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(5)
                failures[rank] = (0.0, f"died with exit code {processes[rank].exitcode}")
                continue
            if good:
                results[rank] = value
            else:
                failures[rank] = (when, value)
        if failures:
            deadline = min(deadline, time.monotonic() + 2.0)  # a short time for the others to say what they saw
            if not open_pipes or time.monotonic() > deadline:
                break
    if failures:
        raise RankFailure(_first(failures).lstrip("; "))
    return [results[rank] for rank in sorted(results)]


def _stack_of(folder: str, rank: int) -> str:
    return f"{folder}/stack.{rank}"


def _where(ranks: Iterable[int], folder: str) -> str:
    """The stacks of ranks, thread by thread."""
    texts = []
    for rank in ranks:
        try:
            texts.append(f"rank {rank} is at:\n{Path(_stack_of(folder, rank)).read_text()}")
        except OSError:
            texts.append(f"rank {rank} has not begun")
    return "\n".join(texts)


def _first(failures: dict[int, tuple[float, str]]) -> str:
    """The earliest failure: the others are usually its consequences."""
    if not failures:
        return ""
    rank, (_, text) = min(failures.items(), key=lambda item: item[1][0])
    return f"; rank {rank} failed first:\n{text}"
