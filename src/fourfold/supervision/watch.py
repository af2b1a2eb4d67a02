"""The watchdog of a job: detects a hang, and reports which rank the others wait for, in what, at which step and op.

[Note: what a hang is]
Every rank counts its progress: an op begun, a collective or message started or finished, on a GPU also what the device has
reached. A job hangs when *no rank* has made progress for the phase's limit: `train.timeout` for steps, `train.start_timeout`,
`train.eval_timeout` and `checkpoint.timeout` for the other phases; the report names the one that was exceeded. A slow rank makes
progress, and the others may wait for it as long as it does: the timeouts of process groups are disabled.
Starting and saving may take long without visible progress and have longer limits, but a rank that has also been silent for
`train.timeout` ends the job then.

[Note: beats]
Three threads per rank. Two never wait for a device. One publishes the rank's beat a few times per limit: phase, op, what it waits
for, how many collectives of each group it has started, how long ago it made progress. Beats are files for ranks started on this
machine, and keys of the job's store under torchrun and srun. The other thread judges: when its own rank has made no progress for
half a limit, it reads the beats of all ranks; the first to see that no rank makes progress writes the verdict, which ends all
ranks. To keep that cheap with many ranks, only the first few read beats; the others only read the verdict. The threads are
daemons, so that a hanging one does not keep the process alive, and are joined when the watch ends: a daemon thread that returns
from the store while the interpreter shuts down aborts the process (SIGABRT after a successful run).
The third thread asks the device what it has reached; it may block for as long as the device does (device_events.py), and then the
rank makes no progress.

A rank that makes no progress for its limit also writes the stacks of its threads to its log, once. A thread of Python does that,
not `faulthandler.dump_traceback_later`, which reads the stacks while they change, and may so end a healthy rank with SIGSEGV. The
only rank of a job has no other to judge with: it is not ended, but its beats tell the launcher if it is stopped.

Time in which the watchdog's own thread did not run does not count: the whole job was suspended (SIGSTOP, a paused container), and
goes on when it is continued.

[Note: clocks]
The age of a beat is measured by the reader's monotonic clock: the clocks of hosts differ, and may be set while a job runs. A beat
has the time of its rank's monotonic clock; the least delay with which the reader has seen beats of a rank is the difference of
the two clocks. A beat that was not there at the previous read is not older than that read, which corrects the difference after a
host was suspended. Each reader reads once in the first steps, when beats are fresh.

[Note: finding the culprit]
A rank whose beat is old does not answer: it is stopped or dead, or its host is. Otherwise, the culprit is a rank that waits for
nothing while others wait for it. Otherwise the ranks wait for each other: a rank that skipped a collective is ahead of the
others, and the numbers of started collectives show which one; if all have started the same one, the network or the communication
library hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch.distributed as dist

from fourfold.launch.local import file_of
from fourfold.record import RECORD, Record

__all__ = ["Board", "FileBoard", "Limits", "StoreBoard", "Watch", "make_board", "resident_bytes", "verdict"]

READERS = 4  # number of ranks that read all beats when they make no progress
BEAT_EVENTS = 16  # events of the record in a beat: all that is known about a killed rank
STEP = "train.timeout"
BLOCK = 8192
"""Characters of which the size of a beat's file is a multiple."""
STORE_TIMEOUT = 10.0
"""Timeout in seconds for the job's store; the next beat tries again."""
Beat = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """Seconds without progress of any rank after which a job counts as hanging, by phase."""

    step: float
    start: float = 0.0
    evaluation: float = 0.0
    save: float = 0.0

    @classmethod
    def of(cls, step: float, start: float = 0.0, save: float = 0.0, evaluation: float = 0.0) -> Limits:
        """0 selects a default: model building, compilation and files may take longer than an op."""
        return cls(step, start or max(step, 1800.0), evaluation or step, save or max(step, 3600.0))


# ---- where beats are written ----


class Board(Protocol):
    """Shared storage in which each rank can write a line, and read those of all."""

    def publish(self, rank: int, line: str) -> None: ...
    def read(self, ranks: int) -> dict[int, str]: ...
    def settle(self, text: str) -> str:
        """Write the verdict, unless there is one; returns the existing or new one."""

    def settled(self) -> str:
        """The verdict; empty while there is none."""

    def claim(self) -> bool:
        """Whether the caller is the first of all ranks to ask."""


class FileBoard:
    """A directory on this machine."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def publish(self, rank: int, line: str) -> None:
        path, partial = self.folder / str(rank), self.folder / f".{rank}.partial"
        line = line.ljust(-(-len(line) // BLOCK) * BLOCK)
        try:
            partial.write_text(line)
            partial.replace(path)
        except OSError:  # the disk of temporary files is full: overwriting needs no more room
            with path.open("r+") as f:
                f.write(line)

    def read(self, ranks: int) -> dict[int, str]:
        found = {}
        for rank in range(ranks):
            with contextlib.suppress(OSError):
                found[rank] = (self.folder / str(rank)).read_text()
        return found

    def settle(self, text: str) -> str:
        partial = self.folder / f".verdict.{os.getpid()}"
        partial.write_text(text)
        with contextlib.suppress(FileExistsError):
            os.link(partial, self.folder / "verdict")
        return self.settled()

    def settled(self) -> str:
        with contextlib.suppress(OSError):
            return (self.folder / "verdict").read_text()
        return ""

    def claim(self) -> bool:
        try:
            (self.folder / "claimed").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class StoreBoard:
    """Keys of the job's store, over a separate connection: the main thread may be waiting for a key."""

    def __init__(self, store: dist.Store):
        own = store.clone()  # type: ignore[attr-defined]  # torch's stubs do not know it
        own.set_timeout(timedelta(seconds=STORE_TIMEOUT))
        self.store = dist.PrefixStore("fourfold/beats", own)

    def publish(self, rank: int, line: str) -> None:
        self.store.set(str(rank), line)

    def read(self, ranks: int) -> dict[int, str]:
        keys = [str(rank) for rank in range(ranks)]
        if self.store.check(keys):
            return {rank: line.decode() for rank, line in enumerate(self.store.multi_get(keys))}
        return {rank: self.store.get(key).decode() for rank, key in enumerate(keys) if self.store.check([key])}

    def settle(self, text: str) -> str:
        return self.store.compare_set("verdict", "", text).decode()

    def settled(self) -> str:
        return self.store.get("verdict").decode() if self.store.check(["verdict"]) else ""

    def claim(self) -> bool:
        return self.store.add("claimed", 1) == 1


def make_board(store: dist.Store) -> Board:
    """The board of a job with the rendezvous store `store`; every rank calls it."""
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if isinstance(base, dist.FileStore):
        return FileBoard(file_of(base).with_name("beats"))
    return StoreBoard(store)


# ---- the watchdog of one rank ----


class Watch:
    """Publishes one rank's beats, and calls `end(text)` when the job hangs: no exception can reach the blocked main thread, so
    the process must end."""

    def __init__(
        self,
        board: Board,
        rank: int,
        ranks: int,
        limits: Limits,
        *,
        record: Record = RECORD,
        end: Callable[[str], object],
    ):
        self.board, self.rank, self.ranks, self.limits, self.record = board, rank, ranks, limits, record
        shortest = min(x for x in (limits.step, limits.start, limits.evaluation, limits.save) if x > 0)
        self.interval = min(1.0, shortest / 8)
        self._end = end
        self._main = threading.main_thread().ident or 0
        self._closed = threading.Event()
        self._count = self._seen = 0
        self._moved = self._answered = time.monotonic()
        self._others: dict[int, Beat] = {}
        self._offsets: dict[int, float] = {}
        self._read_at = 0.0
        self._verdict = ""
        self._reading = self._dumped = False
        self._threads = [
            threading.Thread(target=work, name=f"watchdog {work.__name__}", daemon=True)
            for work in (self._talk, self._judge, self._poll)
        ]

    def __enter__(self) -> Watch:
        self.record.clear()
        self.record.watched = self.ranks > 1
        self.record.enter("start", self.limits.start, "train.start_timeout")
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.record.limit = float("inf")  # in the last beat: none will follow
        self._closed.set()
        self.record.watched = False
        for thread in self._threads:  # see [Note: beats]; several operations on the store may time out in a row
            thread.join(4 * STORE_TIMEOUT)

    @property
    def idle(self) -> float:
        """Seconds since this rank made progress."""
        return time.monotonic() - self._moved

    @property
    def patience(self) -> float:
        """Seconds without progress after which a rank that also sends no beats ends the job."""
        return min(self.record.limit, self.limits.step)

    def beat(self) -> Beat:
        """This rank's state, for the other ranks."""
        self._count += 1
        record, blocked = self.record, self.record.blocked_on()
        wait: dict[str, Any] | None = None
        if blocked is not None:
            wait = {"what": blocked.what, "peer": blocked.peer}
            if blocked.group is not None:
                wait |= {"group": blocked.group.name, "number": blocked.number, "ranks": blocked.group.ranks}
        where, passive = _where(sys._current_frames().get(self._main))
        return {
            "count": self._count,
            "time": time.time(),
            "clock": time.monotonic(),
            "idle": self.idle,
            "limit": record.limit,
            "setting": record.setting,
            "patience": self.patience,
            "phase": record.phase,
            "op": record.op,
            "device_op": record.device_op,
            "wait": wait,
            "groups": {g.name: [g.started, g.what] for g in list(record.groups.values())},
            "where": where,
            "passive": passive,
            "rss": resident_bytes(),
            "events": [(t, kind, what[:80]) for t, kind, what in list(record.events)[-BEAT_EVENTS:]],
        }

    def _talk(self) -> None:
        """Thread: publish beats, the first at once, and read those of others on request. Only this thread uses the board, which
        may block."""
        while not self._closed.wait(self.interval if self._count else 0.0):
            try:
                self.board.publish(self.rank, json.dumps(self.beat()))
                self._verdict = self.board.settled() if self.idle > self.patience / 2 else ""
                first = not self._offsets and self.rank < READERS and self.record.setting == STEP
                if (self._reading or first) and not self._verdict:
                    self._hear({r: json.loads(line) for r, line in self.board.read(self.ranks).items()})
                self._answered = time.monotonic()
            except Exception:  # the board is unreachable: the other thread counts how long
                continue
        if isinstance(self.board, FileBoard):  # a launcher reads it
            with contextlib.suppress(OSError):
                self.board.publish(self.rank, json.dumps(self.beat()))

    def _hear(self, beats: dict[int, Beat]) -> None:
        """Keep the beats just read, their times converted to this rank's clock: [Note: clocks]."""
        now = time.monotonic()
        for rank, beat in beats.items():
            late, last = now - beat["clock"], self._others.get(rank)
            offset = min(late, self._offsets.get(rank, late))
            if last is not None and last["count"] != beat["count"]:
                offset = max(offset, late - (now - self._read_at))
            self._offsets[rank] = offset
            beat["time"] = beat["clock"] + offset
        self._others, self._read_at = beats, now

    def _poll(self) -> None:
        """Thread: see what the device has reached."""
        while not self._closed.wait(self.interval / 4):
            try:
                self.record.poll()
            except RuntimeError:  # the device has failed: the main thread gets the same error
                return

    def _judge(self) -> None:
        """Thread: track progress; if there is none, find out whether any rank makes progress."""
        last = time.monotonic()
        while not self._closed.wait(self.interval / 4):
            now = time.monotonic()
            if now - last > self.patience / 4:  # suspended: no thread of this process could run
                self._moved += now - last
            last = now
            try:
                text = self._look()
            except Exception:  # the watchdog must report its own failure, and continue
                traceback.print_exc()
                continue
            if text:
                self._end(text)
                return

    def _look(self) -> str:
        """Why this rank must end; empty if it need not."""
        now = time.monotonic()
        if self.record.progress != self._seen:
            self._seen, self._moved, self._reading = self.record.progress, self.record.moved, False
            self._dumped = False
            return ""
        limit = self.record.limit
        late = self.idle - self.patience
        if limit == float("inf"):  # no collective work any more
            return ""
        if self.idle > limit and not self._dumped:
            self._dumped = True
            with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may have no file descriptor
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
        if self.ranks == 1:
            return ""
        if self._verdict:
            return self._verdict
        if self.idle > limit + 2 * self.interval and now - self._answered > limit:
            return (
                f"the job's store has not answered for {now - self._answered:.0f} s, and rank {self.rank} makes no progress: "
                "the process that hosts it (under srun rank 0, else torchrun's agent) is stopped or gone"
            )
        self._reading = self.idle > self.patience / 2 if self.rank < READERS else late > 3 + 2 * self.interval
        text = verdict(self._others, self.ranks, now, 5 * self.interval) if late > 0 and self._others else ""
        if text:
            with contextlib.suppress(Exception):
                text = self.board.settle(text)
        return text


def resident_bytes() -> int:
    """Resident memory of this process, in bytes."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


WAITING_IN = ("torch/distributed/", "torch/cuda/", "/threading.py", "/queue.py")


def _where(frame: FrameType | None) -> tuple[str, bool]:
    """The main thread's current function, and whether it is one in which threads wait."""
    if frame is None:
        return "", False
    code = frame.f_code
    passive = any(part in code.co_filename for part in WAITING_IN)
    return f"{code.co_name} ({code.co_filename}:{frame.f_lineno})", passive


# ---- the verdict, a pure function of the beats ----


def verdict(beats: Mapping[int, Beat], ranks: int, now: float, stale: float) -> str:
    """Why no rank makes progress and since when, one line per relevant rank; empty if some rank makes progress."""
    age = {r: max(0.0, now - b["time"]) for r, b in beats.items()}
    idle = {r: b["idle"] + age[r] for r, b in beats.items()}
    silent = [r for r in beats if age[r] > stale]
    which = "patience" if silent else "limit"
    # a silent rank may have begun another phase
    limits = [(b[which], b["setting"] if b[which] == b["limit"] else STEP) for r, b in beats.items() if r not in silent]
    limit, setting = max(limits, default=(float("inf"), ""))
    if min(idle.values()) < limit:
        return ""
    lines = [f"no rank has made progress for {limit:g} s{f' ({setting})' if setting else ''}"]
    for r in (r for r in range(ranks) if r not in beats):
        lines.append(f"rank {r} has never reported: it did not start, or is gone")
    for r in silent:
        lines.append(
            f"rank {r} has not answered for {age[r]:.0f} s: it is stopped, gone, or hangs; its last report: {_at(beats[r])}"
        )
    free = [r for r in beats if r not in silent and beats[r]["wait"] is None and not beats[r]["passive"]]
    if not silent and len(beats) == ranks:
        for r in free:
            lines.append(f"rank {r} hangs {_at(beats[r])}, in {beats[r]['where']}; it waits for no other rank")
        if not free:
            lines += _disagreement(beats)
    for r in sorted(beats):
        if r not in silent and r not in free:
            lines.append(f"rank {r}, {_at(beats[r])}: {_waits(r, beats)}")
    return "\n".join(lines)


def _at(beat: Beat) -> str:
    op = f", op {beat['op']}" if beat["op"] else ""
    device = f" (the device has done {beat['device_op']})" if beat["device_op"] else ""
    return f"at {beat['phase']}{op}{device}"


def _late(wait: dict[str, Any], beats: Mapping[int, Beat]) -> list[int]:
    """Ranks that have not started the collective that another rank waits for."""
    return [r for r in wait["ranks"] if r in beats and beats[r]["groups"].get(wait["group"], [0])[0] < wait["number"]]


def _waits(rank: int, beats: Mapping[int, Beat]) -> str:
    wait = beats[rank]["wait"]
    if wait is None:
        return f"waits in {beats[rank]['where']}"
    if wait["peer"] >= 0:
        return f"waits for {wait['what']} from rank {wait['peer']}"
    if "group" not in wait:
        return f"waits for {wait['what']}"
    late = _late(wait, beats)
    who = f"for {_ranks(late)}, which {'have' if len(late) > 1 else 'has'} not started it" if late else "for its end"
    return f"waits in {wait['what']} (collective {wait['number']} of ranks {_list(wait['ranks'])}) {who}"


def _disagreement(beats: Mapping[int, Beat]) -> list[str]:
    """Where ranks that all wait disagree."""
    lines, named = [], set()
    for rank, beat in sorted(beats.items()):
        wait = beat["wait"]
        if wait is None or "group" not in wait or (key := (wait["group"], wait["number"])) in named:
            continue
        named.add(key)
        for other in wait["ranks"]:
            started, what = beats[other]["groups"].get(wait["group"], [0, ""]) if other in beats else [0, ""]
            if started == wait["number"] and what != wait["what"]:
                lines.append(
                    f"ranks {rank} and {other} disagree: collective {started} of ranks {_list(wait['ranks'])} is "
                    f"'{wait['what']}' on rank {rank} and '{what}' on rank {other}"
                )
        waiting = [r for r in wait["ranks"] if r in beats and beats[r]["wait"] == wait]
        if len(waiting) == len(wait["ranks"]):
            lines.append(
                f"{_ranks(waiting)} have all started {wait['what']} and none has finished: the network or the communication "
                "library hangs"
            )
    found = "the ranks wait for each other: one of them skipped a collective or message, or did two in another order"
    return lines or [f"{found}{_apart(beats)}"]


def _apart(beats: Mapping[int, Beat]) -> str:
    """Which ranks are in another phase than the others: one that skipped something is ahead."""
    phases: dict[str, list[int]] = {}
    for rank, beat in sorted(beats.items()):
        phases.setdefault(beat["phase"], []).append(rank)
    if len(phases) < 2:
        return ""
    few = sorted(phases.items(), key=lambda item: len(item[1]))
    return "; " + ", ".join(f"{_ranks(ranks)} {'are' if len(ranks) > 1 else 'is'} at {phase}" for phase, ranks in few)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_list(ranks)}"


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" … ({len(ranks)} in all)" if len(ranks) > 8 else "")
