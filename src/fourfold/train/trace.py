"""What every rank did and when: trace/rankN.jsonl, one line per traced step.

    {"step": 20, "rank": 1, "pipe": 1, "origin": 1763199131.2, "spans": [["1F0", 0.0012, 0.0031, 0.0004], ...]}

A span is an op (`1F0`: stage 1, forward, micro-batch 0; with a unit's name when the op was cut), its start and end in
seconds after `origin` (Unix time at which the rank began the step), and how long the rank waited before it for what the op
needed. On CUDA the times are the device's, from events; a step's line is written when the device has finished the step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from fourfold import files
from fourfold.errors import RunDirError
from fourfold.runtime.executor import Span
from fourfold.train.clock import Clock
from fourfold.train.rundir import read_trace

__all__ = ["TraceFile"]


class TraceFile:
    """Appends the spans of step 1 and of every `every`-th step; on resume, lines of steps after `done` are dropped first.

    `hold` takes the spans of a step whose work has been issued, `write` reads and writes them once that work is complete.
    Several steps may be held at a time.
    """

    def __init__(self, folder: Path, rank: int, pipe: int, every: int, done: int, clock: Clock):
        self.rank, self.pipe, self.every, self.clock = rank, pipe, every, clock
        self._held: dict[int, Sequence[Span]] = {}
        path = folder / f"rank{rank}.jsonl"
        folder.mkdir(exist_ok=True)
        files.check_not_link(folder, RunDirError)
        lines = list(read_trace(path)) if os.path.lexists(path) else []
        with files.create(path, RunDirError) as f:
            for line in lines:
                if line is not None and line["step"] <= done:
                    f.write(json.dumps(line).encode() + b"\n")
        self.dropped = lines.count(None)  # damaged lines: a full disk or a crash cut them
        self._path = path
        self._file = files.append_to(path, RunDirError)

    def hold(self, step: int, spans: Sequence[Span]) -> None:
        """Keep the spans of a step that is to be traced."""
        if spans and self.every and (step % self.every == 0 or step == 1):
            self._held[step] = spans

    def write(self, step: int) -> None:
        """Write the line of a step whose work is complete; nothing if the step is not traced."""
        spans = self._held.pop(step, None)
        if spans is None:
            return
        seconds, first = self.clock.seconds, spans[0].asked
        rows = [
            [
                s.what,
                round(seconds(first, s.start), 7),
                round(seconds(first, s.end), 7),
                round(seconds(s.asked, s.start), 7),
            ]
            for s in spans
        ]
        line = {"step": step, "rank": self.rank, "pipe": self.pipe, "origin": self.clock.time_of_day(first)}
        files.append_line(self._file, self._path, json.dumps(line | {"spans": rows}), RunDirError)

    def close(self) -> None:
        self._file.close()
