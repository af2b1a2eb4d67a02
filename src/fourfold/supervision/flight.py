"""The flight record: a run's history, and the last events of every rank when it failed. Read by `fourfold doctor RUN`. No torch.

    history.jsonl         one line per start, failure, restart, replan and end of the run
    flight/rank3.jsonl    rank 3, when the run failed: one `failure` line, its threads' stacks, its last events, oldest first
    flight-previous/      the same for the previous failure, after the run was restarted

A rank writes its own file when an exception or the watchdog ends it. For a rank that cannot (killed, stopped, or blocked outside
Python) others write what is known: our launcher, if it started the ranks; otherwise the first rank that fails, from the last
heartbeats of all ranks (watch.py). A file has at most `record.EVENTS` events, about 50 kB.

A failure to write it (full or read-only disk) is ignored, so that the original failure is reported.
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
    """Called by one process before ranks are started: moves the record of the last failure to flight-previous/."""
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
    """Write a rank's file; a file that the rank wrote itself (`own`) is not replaced by another process."""
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
    """Add a line to the run's history; ignores disk errors."""
    cut = {k: v[:MOST_TEXT] if isinstance(v, str) else v for k, v in fields.items()}
    line = {"time": time.time(), "event": event, "host": socket.gethostname()} | cut
    with contextlib.suppress(FourfoldError, OSError), files.append_to(run.history_file, RunDirError) as f:
        f.write(json.dumps(line) + "\n")


# ---- reading ----


@dataclass(frozen=True)
class Flight:
    """What is known about one rank after a failure."""

    rank: int
    failure: dict[str, Any]
    threads: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def text(self, name: str) -> str:
        """A text field of the failure; empty if missing."""
        value = self.failure.get(name)
        return value if isinstance(value, str) else ""

    def number(self, name: str) -> float:
        """A numeric field of the failure; 0 if missing."""
        value = self.failure.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else 0


def read_history(run: RunDir) -> list[dict[str, Any]]:
    """The lines of history.jsonl, oldest first; damaged ones are skipped."""
    if not os.path.lexists(run.history_file):
        return []
    lines = (line for _, line in files.read_json_lines(run.history_file, RunDirError, longest=files.MIB))
    return [line for line in lines if line and isinstance(line.get("event"), str)]


def read_flights(run: RunDir) -> dict[int, Flight]:
    """The files in flight/, by rank; damaged lines are skipped."""
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
