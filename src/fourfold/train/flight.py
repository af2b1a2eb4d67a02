"""The flight record: what became of a run, and what every rank did last when it failed. Read by `fourfold doctor RUN`. No torch.

    history.jsonl         a line for every start, failure, restart, replan and end of the run
    flight/rank3.jsonl    rank 3, when the run failed: one `failure` line, its threads' stacks, its last events, oldest first
    flight-previous/      the same of the failure before, once the run was started again

A rank writes its own file when an exception ends it or the watchdog does. For a rank that cannot (killed, stopped, or blocked
where no Python runs) others write what is known: the launcher, where it started the ranks on this machine; else the first rank
that fails, from the last beats of all (watch.py). A file has at most `record.EVENTS` events and is about 50 kB at most.

Writing it must not hide the failure itself: a disk that is full or read-only leaves it out.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.errors import FourfoldError, RunDirError
from fourfold.train.rundir import RunDir

__all__ = ["Flight", "begin_attempt", "note", "read_flights", "read_history", "stacks", "write_flight"]

MOST_TEXT, MOST_FRAMES, MOST_THREADS = 8000, 60, 30
FILE = re.compile(r"rank(\d{1,7})\.jsonl")


def begin_attempt(run: RunDir) -> None:
    """Ranks are about to be started: the record of the last failure makes room for another. One process calls it."""
    if not run.flight.is_dir() or run.flight.is_symlink():
        return
    previous = run.flight.with_name("flight-previous")
    with contextlib.suppress(OSError):
        if previous.is_symlink():
            previous.unlink()
        shutil.rmtree(previous, ignore_errors=True)
        run.flight.rename(previous)


def write_flight(
    run: RunDir,
    rank: int,
    failure: Mapping[str, Any],
    events: Iterable[Sequence[Any]] = (),
    threads: Sequence[Mapping[str, Any]] = (),
    *,
    own: bool = False,
) -> None:
    """Write a rank's file; what another process knows of the rank does not replace what it wrote itself (`own`)."""
    path = run.flight / f"rank{rank}.jsonl"
    if not own and os.path.lexists(path):
        return
    cut = {k: v[:MOST_TEXT] if isinstance(v, str) else v for k, v in failure.items()}
    lines: list[dict[str, Any]] = [{"kind": "failure", "rank": rank, "time": time.time()} | cut]
    lines += [{"kind": "stack"} | dict(thread) for thread in threads]
    lines += [{"kind": "event", "time": t, "what": what, "name": str(name)[:200]} for t, what, name in events]
    with contextlib.suppress(FourfoldError, OSError):
        run.flight.mkdir(exist_ok=True)
        files.check_not_link(run.flight, RunDirError)
        files.write_text(path, "".join(f"{json.dumps(line)}\n" for line in lines), RunDirError)


def stacks() -> list[dict[str, Any]]:
    """The stacks of this process's threads, innermost call first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: names.get(item[0]) != "MainThread"):
        calls = traceback.extract_stack(frame)[-MOST_FRAMES:]
        lines = [f"{c.name} ({c.filename}:{c.lineno})" for c in reversed(calls)]
        found.append({"thread": names.get(ident, str(ident)), "calls": lines})
    return found[:MOST_THREADS]


def note(run: RunDir, event: str, **fields: Any) -> None:
    """Add a line to the run's history; left out where the disk refuses it."""
    cut = {k: v[:MOST_TEXT] if isinstance(v, str) else v for k, v in fields.items()}
    line = {"time": time.time(), "event": event, "host": socket.gethostname()} | cut
    with contextlib.suppress(FourfoldError, OSError), files.append_to(run.history_file, RunDirError) as f:
        f.write(json.dumps(line) + "\n")


# ---- reading ----


@dataclass(frozen=True)
class Flight:
    """What is known of one rank after a failure."""

    rank: int
    failure: dict[str, Any]
    threads: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def text(self, name: str) -> str:
        """A field of the failure that is text; empty where there is none."""
        value = self.failure.get(name)
        return value if isinstance(value, str) else ""

    def number(self, name: str) -> float:
        """A field of the failure that is a number; 0 where there is none."""
        value = self.failure.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else 0


def read_history(run: RunDir) -> list[dict[str, Any]]:
    """The lines of history.jsonl, oldest first; damaged ones are left out."""
    if not os.path.lexists(run.history_file):
        return []
    lines = (line for _, line in files.read_json_lines(run.history_file, RunDirError, longest=files.MIB))
    return [line for line in lines if line and isinstance(line.get("event"), str)]


def read_flights(run: RunDir) -> dict[int, Flight]:
    """The files in flight/, by rank; damaged lines are left out."""
    found = {}
    folder = run.flight
    for path in sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else ():
        match = FILE.fullmatch(path.name)
        if match is not None and (flight := _read(path, int(match[1]))) is not None:
            found[flight.rank] = flight
    return dict(sorted(found.items()))


def _read(path: Path, rank: int) -> Flight | None:
    lines = [line for _, line in files.read_json_lines(path, RunDirError, longest=files.MIB) if line is not None]
    failure = next((line for line in lines if line.get("kind") == "failure"), None)
    if failure is None:
        return None
    return Flight(
        rank,
        failure,
        [line for line in lines if line.get("kind") == "stack" and isinstance(line.get("calls"), list)],
        [line for line in lines if line.get("kind") == "event"],
    )
