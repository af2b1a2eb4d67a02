"""What every rank did and when: trace/rankN.jsonl, one line per traced step.

    {"step": 20, "rank": 1, "pipe": 1, "origin": 1763199131.2, "spans": [["1F0", 0.0012, 0.0031, 0.0004], ...]}

A span is an op (`1F0`: stage 1, forward, micro-batch 0; with a unit's name when the op was cut), its start and end in
seconds after `origin` (wall-clock time of the step's begin on that rank), and how long the rank waited before it for what the
op needed. On CUDA the times are the device's, from events.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fourfold.runtime.executor import Span

__all__ = ["TraceFile", "device_mark"]


def device_mark(device: torch.device) -> Callable[[], Any]:
    """What an executor calls to mark a moment: the host's clock, or an event in the GPU's stream."""
    if device.type != "cuda":
        return time.perf_counter

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    return mark


class TraceFile:
    """Appends the spans of every `every`-th step; lines of steps that a resumed run does again are dropped first."""

    def __init__(self, folder: Path, rank: int, pipe: int, every: int, done: int):
        self.rank, self.pipe, self.every = rank, pipe, every
        self._held: tuple[int, float, Sequence[Span]] | None = None
        path = folder / f"rank{rank}.jsonl"
        folder.mkdir(exist_ok=True)
        kept = (
            [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= done]
            if path.exists()
            else []
        )
        path.write_text("".join(f"{line}\n" for line in kept))
        self._file = path.open("a", buffering=1)

    def hold(self, step: int, spans: Sequence[Span]) -> None:
        """Remember a step's spans if it is to be traced."""
        if self.every and (step % self.every == 0 or step == 1):
            self._held = step, _began(spans[0].asked), spans

    def write(self) -> None:
        """Write what is held; called when the device has done it."""
        if self._held is not None:
            step, origin, spans = self._held
            self._held = None
            first = spans[0].asked
            rows = [[s.what, *(round(_between(first, t), 7) for t in (s.start, s.end))] for s in spans]
            waits = [round(_between(s.asked, s.start), 7) for s in spans]
            line = {"step": step, "rank": self.rank, "pipe": self.pipe, "origin": origin}
            self._file.write(json.dumps(line | {"spans": [[*r, w] for r, w in zip(rows, waits, strict=True)]}) + "\n")

    def close(self) -> None:
        self.write()
        self._file.close()


def _began(first: Any) -> float:
    """The time of day of a mark on the host's clock; of a device's, about when it was asked for."""
    return time.time() - (time.perf_counter() - first if isinstance(first, float) else 0.0)


def _between(a: Any, b: Any) -> float:
    """Seconds from one mark to another."""
    return b - a if isinstance(a, float) else a.elapsed_time(b) / 1000
