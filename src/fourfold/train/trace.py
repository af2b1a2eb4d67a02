"""Traces: what every rank did and when, in trace/rankN.jsonl, one line per traced step.

    {"step": 20, "rank": 1, "pipe": 1, "host": "a", "origin": 1763199131.2, "seconds": 0.31, "spans": [...], "events": ...}

All times are seconds after `origin`, the Unix time at which the rank ended the previous step; `seconds` is the end of this step.

spans    `["1F0", start, end, waited]`: an op (`1F0`: stage 1, forward, micro-batch 0; with a unit's name when the op was
         cut), and how long the rank waited before it for what the op needed
events   `[kind, what, issued, begun, end, bytes, group, number, peer]`: a collective, a message, or a part of the step
         (record.py). From `begun` to `end` the rank waited for it or did it; it was started at `issued`. `group` is an index
         into `groups`, or -1; `number` counts the collectives of a group, equally on all its ranks; `peer` is the other rank of a
         message, or -1
groups   `[name, [rank, …]]`
memory   `[time, bytes]` in use at the end of every op; `peak` has the time, the bytes and the parts of the largest
uncompiled    units that torch.compile has failed on so far, and why; absent without any
lead     CUDA: how far the device was behind the host at the end of the step; near 0, the device waits for the host

On CUDA the times are the device's, from events; a step's line is written when the device has finished the step. If buckets of the
streamed optimizer are still being updated then, in another stream, it is written after the next step. A mark that the device has
not reached by then is omitted with its event.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fourfold import files
from fourfold.errors import RunDirError
from fourfold.record import RECORD, Event, GroupRecord, StepTrace
from fourfold.runtime.executor import Span
from fourfold.train.clock import Clock
from fourfold.train.rundir import read_trace

__all__ = ["TraceFile", "Waits"]


class Waits(NamedTuple):
    """Waiting times of this rank in a traced step."""

    exposed: float
    """Seconds, for collectives."""
    bubble: float
    """Fraction of the step, for messages of other pipeline ranks."""


@dataclass
class _Held:
    """A step whose work has been issued."""

    trace: StepTrace
    spans: Sequence[Span]
    begun: Any
    end: Any
    issued: float  # Unix time at which `end` was


class TraceFile:
    """Appends step 1 and every `every`-th step; on resume, lines of steps after `done` are dropped first.

    `begin` returns the recorder of a traced step, `hold` keeps it after the step's work was issued, `write` reads and
    writes it after that work is complete. Several steps may be held at a time.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        pipe: int,
        every: int,
        done: int,
        clock: Clock,
        memory: Callable[[], int] | None = None,
        parts: Callable[[], dict[str, int]] | None = None,
    ):
        self.rank, self.pipe, self.every, self.clock = rank, pipe, every, clock
        self._memory, self._parts = memory, parts
        self._held: dict[int, _Held] = {}
        self._late: tuple[dict[str, Any], Any, list[Event]] | None = (
            None  # a line, its origin, and updates still running
        )
        path = folder / f"rank{rank}.jsonl"
        folder.mkdir(exist_ok=True)
        files.check_not_link(folder, RunDirError)
        lines = list(read_trace(path)) if os.path.lexists(path) else []
        with files.create(path, RunDirError) as f:
            for line in lines:
                if line is not None and line["step"] <= done:
                    f.write(json.dumps(line).encode() + b"\n")
        self.dropped = lines.count(None)  # damaged lines: a full disk or a crash cut them
        self._path, self._host = path, platform.node()
        self._file = files.append_to(path, RunDirError)

    def traces(self, step: int) -> bool:
        return bool(self.every) and (step % self.every == 0 or step == 1)

    def begin(self, step: int, begun: Any) -> StepTrace | None:
        """The recorder of a step from a mark on; None if the step is not traced."""
        if not self.traces(step):
            return None
        trace = StepTrace(self.clock.mark, self._memory, self._parts)
        trace.done = begun
        return trace

    def hold(self, step: int, trace: StepTrace, spans: Sequence[Span], begun: Any, end: Any) -> None:
        """Keep what a step recorded, and the marks of its begin and end."""
        self._held[step] = _Held(trace, spans, begun, end, time.time())

    def write(self, step: int) -> Waits | None:
        """Write the line of a step whose work is complete; None if the step is not traced."""
        self._write_late()
        held = self._held.pop(step, None)
        if held is None:
            return None
        clock, first, at = self.clock, held.begun, self._since(held.begun)
        groups: dict[GroupRecord, int] = {}
        events = []
        waits = {"message": 0.0, "": 0.0}
        late: list[Event] = []
        for e in held.trace.events:
            if not all(map(clock.reached, (e.issued, e.begun, e.end))):
                late += [e] if e.kind == "bucket" else []
                continue
            group = groups.setdefault(e.group, len(groups)) if e.group is not None else -1
            events.append([e.kind, e.what, at(e.issued), at(e.begun), at(e.end), e.size, group, e.number, e.peer])
            if group >= 0 or e.kind == "message":
                waits["" if group >= 0 else "message"] += clock.seconds(e.begun, e.end)
        line: dict[str, Any] = {
            "step": step,
            "rank": self.rank,
            "pipe": self.pipe,
            "host": self._host,
            "origin": clock.time_of_day(first),
            "seconds": at(held.end),
            "spans": [[s.what, at(s.start), at(s.end), round(clock.seconds(s.asked, s.start), 7)] for s in held.spans],
            "events": events,
            "groups": [[g.name, g.ranks] for g in groups],
            "memory": [[at(mark), used] for mark, used in held.trace.memory],
        }
        if held.trace.peak is not None:
            mark, used, parts = held.trace.peak
            line["peak"] = [at(mark), used, parts]
        if RECORD.uncompiled:
            line["uncompiled"] = RECORD.uncompiled
        if (lead := clock.lead(held.end, held.issued)) is not None:
            line["lead"] = round(lead, 6)
        if late:
            self._late = line, first, late
        else:
            self._append(line)
        return Waits(waits[""], waits["message"] / max(line["seconds"], 1e-9))

    def _since(self, first: Any) -> Callable[[Any], float]:
        """Seconds of marks after `first`."""
        return lambda mark: round(self.clock.seconds(first, mark), 7)

    def _write_late(self) -> None:
        """Write a line that was kept for updates that were still running."""
        if self._late is None:
            return
        line, first, late = self._late
        self._late, at = None, self._since(first)
        for e in late:
            if self.clock.reached(e.begun) and self.clock.reached(e.end):
                line["events"].append([e.kind, e.what, at(e.issued), at(e.begun), at(e.end), e.size, -1, 0, -1])
        self._append(line)

    def _append(self, line: dict[str, Any]) -> None:
        files.append_line(self._file, self._path, json.dumps(line), RunDirError)

    def close(self) -> None:
        self._write_late()
        self._file.close()
