"""Start the ranks of a job on this machine, watch them, and report which failed first.

The launcher imports torch once and forks the ranks, so four of them start in a tenth of a second. Each rank writes to its own
log file; rank 0 also has the console. Ranks communicate over the loopback interface only, with a file for the rendezvous.
The kernel kills them when their launcher dies, and one rank's failure ends the others.

Ctrl-C, SIGTERM or SIGUSR1 requests a stop (in training: after the current step, with a checkpoint); a second Ctrl-C or SIGTERM
kills the ranks.

When a rank fails, the others have a few seconds to end by themselves. One that does not hangs or is stopped, and is what the
others were waiting for. Before ending it, the launcher requests its stack (SIGUSR2), which is written to the rank's log.

Ranks detect hangs themselves (supervision/watch.py). If none of them sends heartbeats any more, the launcher ends the job: a
rank whose driver or library blocks while it holds Python's lock cannot report anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import mmap
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import psutil
import torch.distributed as dist

from fourfold.errors import (
    CheckpointError,
    CommunicationError,
    FourfoldError,
    HangError,
    Interrupted,
    RankFailure,
    ReplicaError,
)
from fourfold.files import append_to
from fourfold.launch.place import Place
from fourfold.record import EXIT, MIRROR, RECORD, read_mirror
from fourfold.view.text import printable

__all__ = ["Job", "die_with", "end_rank", "file_of", "launch_local"]

Job = Callable[[Place, dist.Store, IO[str] | None], object]
"""What a rank does: (place, store, console of rank 0)."""

GRACE = 3.0
"""Seconds that the other ranks have to end by themselves after the first failure."""
SILENCE = 1.0
"""Seconds beyond a rank's own limit after which it counts as silent."""
ENDING = 0.5
"""Seconds after which the report of a failure is shown, although ranks still end: the driver takes seconds to free a GPU."""
STACKS = 1.0
"""Seconds that ranks have to write their stacks before they are killed."""
TICK = 0.5
"""Seconds between two looks at the heartbeats."""
LOOKS = 5
"""How many looks in a row must find all ranks silent: after a suspended machine wakes, ranks need a moment to report."""
EXITING = 60.0
"""Seconds that the remaining ranks have to end once the work of all of them is done."""
TWICE = 0.2
"""Seconds within which a second signal is the same request: timeout(1) sends one to its child and one to its group."""
HANGS = "hangs"
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that request a stop. SIGUSR1, which Slurm can send before a job's time is up, never kills the ranks."""


def launch_local(
    job: Job, ranks: int, logs: Path, stopping: str = "stopping after this step (once more: kill)"
) -> bool:
    """Run `job` in `ranks` forked processes; raises RankFailure about the one that failed first.

    Returns False if a stop was requested (the console then shows `stopping`) before the ranks had begun their job. Raises
    Interrupted if a second request killed them.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="fourfold-") as folder, _console() as console, _mirrors(ranks) as mirrors:
        for rank in range(ranks):
            append_to(logs / f"rank{rank}.log").close()  # refused here rather than in every rank
        processes: list[BaseProcess] = []
        with _ended(processes), _forwarding(processes, stopping) as asked:
            with _held():
                for rank in range(ranks):
                    args = (job, Place(rank, ranks, rank, ranks), Path(folder), logs, os.getpid(), console)
                    process = context.Process(target=_rank, args=(*args, mirrors[rank]), name=f"rank {rank}")
                    process.start()
                    processes.append(process)
            asked.all_started()
            end = _watch(processes, Path(folder), logs, mirrors, asked)
        if asked.killed and -signal.SIGKILL in end.failed.values():
            raise Interrupted("the ranks were killed at the second request to stop")
        if (end.failed or end.reported or end.silent) and not _ended_by_the_request(end, asked, Path(folder)):
            failure = _blame(end, Path(folder), logs)
            failure.after_stop, failure.shown = asked.stopped, end.shown or time.time()
            failure.reports = _reports(end, Path(folder), logs)
            raise failure
        return not end.failed


def _ended_by_the_request(end: _End, asked: _Asked, folder: Path) -> bool:
    """Whether ranks that had not begun their job died of the request to stop, and the others of it or of their absence."""
    ours = {-signal.SIGTERM, -signal.SIGUSR1}
    others = {rank: code for rank, code in end.failed.items() if code not in ours}
    died = len(others) < len(end.failed)
    return died and all(_read_error(folder, rank).get("time", 0.0) > asked.at for rank in others)


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
def _mirrors(ranks: int) -> Iterator[list[memoryview]]:
    """Memory shared with the ranks: what each of them does, also when it can no longer say so."""
    with mmap.mmap(-1, MIRROR * ranks) as memory, memoryview(memory) as whole:
        parts = [whole[r * MIRROR : (r + 1) * MIRROR] for r in range(ranks)]
        try:
            yield parts
        finally:
            for part in parts:
                part.release()


@contextlib.contextmanager
def _ended(processes: list[BaseProcess]) -> Iterator[None]:
    """At the end no rank is left, and nothing that was opened for it: the error of a failed attempt refers to its frames, so
    that otherwise two pipes per rank stay open with every restart."""
    try:
        yield
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()


@contextlib.contextmanager
def _held() -> Iterator[None]:
    """Signals are blocked inside, so that a rank cannot receive one before it has chosen its handlers.

    Only in this thread: the handlers also run inside if another thread of this process takes the signal (`_Asked.started`).
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


@dataclass
class _Asked:
    """The user's requests to stop; they are passed on once all ranks exist."""

    processes: list[BaseProcess]
    started: bool = False
    stopped: bool = False
    at: float = float("inf")
    """Time of day of the first request."""
    killed: bool = False
    sent: int = 0
    """The signal that the ranks were sent last."""

    def all_started(self) -> None:
        self.started = True
        self.pass_on()

    def pass_on(self) -> None:
        number = signal.SIGKILL if self.killed else signal.SIGTERM
        if self.started and self.stopped and number != self.sent:
            self.sent = number
            _signal(self.processes, number)


@contextlib.contextmanager
def _forwarding(processes: list[BaseProcess], stopping: str) -> Iterator[_Asked]:
    """Pass the first request to stop on to the ranks as SIGTERM; a second SIGINT or SIGTERM as SIGKILL."""
    asked, last = _Asked(processes), float("inf")

    def forward(number: int, frame: object) -> None:
        nonlocal last
        if number != signal.SIGUSR1:
            asked.killed = asked.killed or time.monotonic() - last > TWICE
            last = time.monotonic()
        if not asked.stopped:
            asked.stopped, asked.at = True, time.time()
            print(f"\n{stopping}", file=sys.stderr, flush=True)
        asked.pass_on()

    before = {number: signal.signal(number, forward) for number in STOPS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal(processes: list[BaseProcess], number: int) -> None:
    for process in processes:
        if process.is_alive() and process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


@dataclass
class _End:
    """How the ranks ended: exit codes of those that failed, and the state of those that had to be ended."""

    failed: dict[int, int] = field(default_factory=dict)
    reported: list[int] = field(default_factory=list)
    """Ranks that have reported a hang; one that uses a GPU then takes a moment to end."""
    hung: dict[int, str] = field(default_factory=dict)
    silent: str = ""
    """Why the job was ended if no rank sent heartbeats any more."""
    doing: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Phase and op of every rank, before the remaining ones were ended."""
    shown: float = 0.0
    """When the failure was shown, if before all ranks had ended."""


def _watch(
    processes: list[BaseProcess], folder: Path, logs: Path, mirrors: Sequence[memoryview], asked: _Asked
) -> _End:
    """Wait for all ranks; some time after a first failure, end the others (at once, if they agreed that the job hangs)."""
    end = _End()
    waiting = dict(enumerate(processes))
    deadline = show = float("inf")
    looks = 0  # how many in a row have found all ranks silent
    done = float("inf")  # since when all remaining ranks are done
    late: set[int] = set()
    while waiting:
        wait([p.sentinel for p in waiting.values()], timeout=min(TICK, max(0.0, deadline - time.monotonic())))
        for rank in [rank for rank, p in waiting.items() if not p.is_alive()]:
            code = waiting.pop(rank).exitcode or 0
            if code and not end.hung and rank not in late:  # later deaths are caused by the launcher
                end.failed[rank] = code
        if deadline == float("inf"):
            end.reported = [
                r for r in range(len(processes)) if _read_error(folder, r).get("kind") == HangError.__name__
            ]
        if (end.failed or end.reported) and deadline == float("inf"):
            hang = bool(end.reported)
            killed = min(end.failed.values(), default=0) < 0  # the first failure is certain
            deadline = time.monotonic() + GRACE * (1 / 12 if killed else 1 / 3 if hang else 1)
        if deadline == float("inf"):
            silent = _all_silent(folder, sorted(waiting))
            looks = looks + 1 if silent else 0
            if looks >= LOOKS:
                end.silent, deadline = silent, time.monotonic()
        exiting = bool(waiting) and all(read_mirror(mirrors[rank])[0] == EXIT for rank in waiting)
        done = min(done, time.monotonic()) if exiting else float("inf")  # a job may train several times
        if exiting and deadline == float("inf") and not late and time.monotonic() - done > EXITING:
            late = set(waiting)
            for rank, process in waiting.items():
                said = f"rank {rank} {_state(process)} after its work was done, and is ended"
                print(said, file=sys.stderr, flush=True)
            _signal(list(waiting.values()), signal.SIGKILL)
        if waiting and time.monotonic() >= deadline:
            end.doing = end.doing or {rank: read_mirror(mirror) for rank, mirror in enumerate(mirrors)}
            end.hung = end.hung or {rank: _state(p) for rank, p in waiting.items()}
            sizes = {log: _size(log) for log in (logs / f"rank{rank}.log" for rank in waiting)}
            _signal(list(waiting.values()), signal.SIGUSR2)
            _signal(list(waiting.values()), signal.SIGCONT)  # one that is stopped writes its stack then
            _await_stacks(sizes)
            _signal(list(waiting.values()), signal.SIGKILL)
            deadline = time.monotonic() + GRACE
            show = min(show, time.monotonic() + ENDING)
        if waiting and time.monotonic() >= show and not end.shown and not asked.stopped:
            end.shown = time.time()
            others = f"{len(waiting)} ranks are ending" if len(waiting) > 1 else "a rank is ending"
            print(f"{printable(str(_blame(end, folder, logs)))}\n{others} …", file=sys.stderr, flush=True)
    end.doing = end.doing or {rank: read_mirror(mirror) for rank, mirror in enumerate(mirrors)}
    return end


def _await_stacks(sizes: dict[Path, int]) -> None:
    """Wait until every log has grown and grows no more; at most STACKS seconds, as a rank may be stuck in a driver."""
    end, found, steady = time.monotonic() + STACKS, dict(sizes), 0
    while steady < 2 and time.monotonic() < end:
        time.sleep(0.05)
        before, found = found, {log: _size(log) for log in sizes}
        steady = steady + 1 if found == before and all(found[log] > size for log, size in sizes.items()) else 0


def _size(log: Path) -> int:
    with contextlib.suppress(OSError):
        return log.stat().st_size
    return 0


def _all_silent(folder: Path, ranks: Sequence[int]) -> str:
    """Since when none of these ranks has sent a heartbeat; empty if one has, within its limit, or needs none."""
    limits = []
    for rank in ranks:
        try:
            beat = json.loads((folder / "beats" / str(rank)).read_text())
        except (OSError, ValueError):
            return ""
        age = time.time() - beat["time"]
        if beat["limit"] == float("inf") or age <= beat["patience"] + SILENCE:
            return ""
        limits.append((age, beat["patience"]))
    if not limits:
        return ""
    age, limit = min(limits)
    who = f"rank {ranks[0]} has not" if len(ranks) == 1 else f"none of {len(ranks)} ranks has"
    return (
        f"{who} sent a heartbeat for {age:.0f} s (train.timeout {limit:g} s): a rank that is stopped, or whose driver or "
        "library blocks while it holds Python's lock, sends none"
    )


def _state(process: BaseProcess) -> str:
    with contextlib.suppress(psutil.Error):
        if psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
            return "is stopped (SIGSTOP)"
    return HANGS


def _blame(end: _End, folder: Path, logs: Path) -> RankFailure:
    """The rank at fault: one that was killed; else one that hangs, if the others only waited; else the first to raise."""

    def failure(text: str, rank: int, kind: str) -> RankFailure:
        made = RankFailure(text)
        made.rank, made.kind = rank, kind
        return made

    if end.silent:
        stopped = [r for r, state in end.hung.items() if state != HANGS]
        known = {
            r: "does not answer either, and is not stopped" if stopped and state == HANGS else state
            for r, state in end.hung.items()
        }
        lines = [f"rank {r} {state}{_doing(end, r)}" for r, state in sorted(known.items())]
        text = "\n".join([end.silent, *lines, f"stacks of all ranks are in {logs}"])
        return failure(text, next(iter(stopped), -1), HangError.__name__)
    records = {
        rank: note for rank in {**end.failed, **dict.fromkeys(end.reported)} if (note := _read_error(folder, rank))
    }
    killed = [rank for rank, code in end.failed.items() if code < 0 and rank not in records]
    if killed:
        rank = killed[0]
        name = signal.Signals(-end.failed[rank]).name
        hint = " (out of memory? the kernel kills with this signal)" if name == "SIGKILL" else ""
        where = _doing(end, rank)
        return failure(
            f"rank {rank} was killed by {name}{where}{hint}; its log: {logs / f'rank{rank}.log'}", rank, name
        )
    if not records:
        rank = min(end.failed)
        log = logs / f"rank{rank}.log"
        last = f": {line}" if (line := _last_line(log)) else ""  # of a traceback: no room for the note of its failure
        return failure(f"rank {rank} ended with exit code {end.failed[rank]}{last}; its log: {log}", rank, "exit")
    hangs = [rec["message"] for rec in records.values() if rec["kind"] == HangError.__name__]
    if hangs:  # the ranks' watchdogs agreed on it
        stopped = [r for r, state in end.hung.items() if state != HANGS]
        lines = [f"rank {r} {end.hung[r]}{_doing(end, r)}" for r in stopped]
        verdict = _corrected(hangs[0], stopped) if stopped else hangs[0]
        text = "\n".join([verdict, *lines, f"stacks of all ranks are in {logs}"])
        silent = [r for r in end.hung if r not in end.reported]
        return failure(text, next(iter(stopped or silent), -1), HangError.__name__)
    waited = {r: rec for r, rec in records.items() if rec["kind"] == CommunicationError.__name__}
    if len(waited) == len(records) and end.hung:  # only ranks that waited for the remaining ones failed
        lines = [f"rank {r} {state}{_innermost(logs / f'rank{r}.log')}" for r, state in end.hung.items()]
        lines += [f"rank {r}, {rec['message'].splitlines()[0]}" for r, rec in sorted(waited.items())]
        text = "\n".join([*lines, f"stacks of all ranks are in {logs}"])
        return failure(text, next(iter(end.hung)), HangError.__name__)
    causes = {r: rec for r, rec in records.items() if r not in waited} or records
    rank, record = min(causes.items(), key=lambda item: item[1]["time"])
    if record["for_user"]:
        together = record["kind"] in (ReplicaError.__name__, CheckpointError.__name__)  # raised by all ranks
        by = "" if together else f" (rank {rank})"
        made = failure(f"{record['message']}{by}", rank, record["kind"])
        made.exit_code = record["exit_code"]
        return made
    text = f"rank {rank} failed first; its log: {logs / f'rank{rank}.log'}\n\n{record['traceback'].rstrip()}"
    return failure(text, rank, record["kind"])


def _corrected(verdict: str, stopped: Sequence[int]) -> str:
    """A verdict without doubts about ranks that do not answer and are not stopped: others are, as the launcher sees."""

    def known(match: re.Match[str]) -> str:
        return match[0] if int(match[1]) in stopped else f"rank {match[1]} does not answer, and is not stopped"

    return re.sub(
        r"^rank (\d+) has not answered for \d+ s: it is stopped, gone, or hangs", known, verdict, flags=re.MULTILINE
    )


def _doing(end: _End, rank: int) -> str:
    """What a rank was doing, from its shared memory: ` at step 3, op 0F1`."""
    phase, op = end.doing[rank]
    return f" at {phase}{f', op {op}' if op else ''}" if phase else ""


def _reports(end: _End, folder: Path, logs: Path) -> dict[int, dict[str, Any]]:
    """What is known about every rank: how it ended, what it was doing, its last beat, and its stack if it is in the log."""
    reports = {}
    for rank, (phase, op) in end.doing.items():
        code = end.failed.get(rank)
        if code is not None:
            state = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        else:
            state = end.hung.get(rank, "ended")
        beat: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            beat = json.loads((folder / "beats" / str(rank)).read_text())
        events = beat.pop("events", [])
        calls = _calls(logs / f"rank{rank}.log") if rank in end.hung else []
        failure = {"state": state, "phase": phase, "op": op, "wait": beat.get("wait"), "rss": beat.get("rss", 0)}
        reports[rank] = {
            "failure": failure | {"error": "", "message": "", "peak_bytes": beat.get("peak_bytes", 0)},
            "events": events,
            "threads": [{"thread": "MainThread", "calls": calls}] if calls else [],
        }
    return reports


def _read_error(folder: Path, rank: int) -> dict[str, Any]:
    """The note that a rank left about its failure; empty if there is none."""
    with contextlib.suppress(OSError, json.JSONDecodeError):
        return json.loads((folder / f"error{rank}").read_text())
    return {}


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError), log.open("rb") as f:
        f.seek(max(0, f.seek(0, os.SEEK_END) - 4096))
        return next((x.strip() for x in reversed(f.read().decode(errors="replace").splitlines()) if x.strip()), "")
    return ""


def _innermost(log: Path) -> str:
    """The innermost call of a rank's main thread, from the last stack in its log."""
    calls = _calls(log)
    return f" in {calls[0]}" if calls else ""


def _calls(log: Path) -> list[str]:
    """The last stack in a rank's log, that of its main thread, innermost call first."""
    with contextlib.suppress(OSError), log.open("rb") as f:
        f.seek(max(0, f.seek(0, os.SEEK_END) - (1 << 18)))
        blocks = f.read().decode(errors="replace").split("(most recent call first):\n")
        if len(blocks) > 1:
            found = re.findall(r'^\s*File "(.*)", line (\d+) in (\S+)', blocks[-1], re.MULTILINE)
            return [f"{name} ({file}:{line})" for file, line, name in found[:60]]
    return []


# ---- in the rank ----


def _rank(job: Job, place: Place, folder: Path, logs: Path, launcher: int, console: int, mirror: memoryview) -> None:
    die_with(launcher)
    gc.freeze()  # a collection would visit, and so copy, all that the launcher made, and no thread runs meanwhile
    RECORD.mirror = mirror
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    with append_to(logs / f"rank{place.rank}.log") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    screen = os.fdopen(console, "w", buffering=1, closefd=False) if place.rank == 0 else None
    code = 0
    try:
        job(place, dist.FileStore(str(folder / "store"), place.ranks), screen)
    except BaseException as e:
        code = 1
        with contextlib.suppress(OSError):
            _note_error(folder, place.rank, e, traceback.format_exc())
        with contextlib.suppress(OSError):  # the log may be on a full disk
            traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)  # no interpreter clean-up: other ranks may be gone, and threads of a broken group may hang


def _note_error(folder: Path, rank: int, error: BaseException, text: str) -> None:
    """Leave the launcher a note about why this rank fails."""
    record = {
        "time": time.time(),
        "kind": type(error).__name__,
        "for_user": isinstance(error, FourfoldError),
        "exit_code": getattr(error, "exit_code", 1),
        "message": str(error),
        "traceback": text,
    }
    (folder / f"error{rank}").write_text(json.dumps(record))


def file_of(store: dist.FileStore) -> Path:
    """The file of a store."""
    return Path(store.path)  # type: ignore[attr-defined]  # torch's stubs do not know it


def end_rank(place: Place, store: dist.Store | None, verdict: str) -> None:
    """End this process, one rank of a job that hangs, after reporting the verdict to its launcher through `store`."""
    print(f"error: {verdict}", file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
    with contextlib.suppress(Exception):
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if isinstance(store, dist.FileStore):
            _note_error(file_of(store).parent, place.rank, HangError(verdict), "")
        elif "TORCHELASTIC_ERROR_FILE" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(HangError(verdict))
    os._exit(1)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends (Linux; elsewhere the group's timeout ends it)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)
