"""Writes the flight record (flight.py) of one rank when the rank fails, or the watchdog ends it.

For ranks started by our launcher, the launcher writes the run's history and the files of ranks that cannot write their own.
Under torchrun and srun the first rank that fails does both, from the last heartbeats of all ranks, after a short delay in which
the other ranks write their own files.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from fourfold.background import start_thread
from fourfold.errors import HangError
from fourfold.launch.place import Place
from fourfold.record import RECORD
from fourfold.supervision.flight import note, stacks, write_flight
from fourfold.supervision.watch import Board, resident_bytes
from fourfold.train.metrics import peak_bytes
from fourfold.train.rundir import RunDir

__all__ = ["FailureRecorder"]

PATIENCE = 1.0
"""Delay in seconds in which the other ranks write their own files."""
LONGEST = 10.0
"""Timeout in seconds for the job's store: the process that hosts it may be stopped."""


class FailureRecorder:
    """A context: an exception that leaves it is recorded. `hang` records the watchdog's verdict."""

    def __init__(self, place: Place, run: RunDir, device: torch.device, board: Board | None, *, launched: bool):
        self.place, self.run, self.device, self.board, self.launched = place, run, device, board, launched

    def __enter__(self) -> FailureRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.record(error, "".join(traceback.format_exception(kind, error, trace)))

    def hang(self, verdict: str) -> None:
        """The watchdog is about to end this process."""
        self.record(HangError(verdict), "")

    def record(self, error: BaseException, text: str) -> None:
        """Write this rank's file; the first rank to fail, without our launcher, also writes what is known about the others."""
        with contextlib.suppress(Exception), _undisturbed():  # an error here must not replace the original one
            blocked = RECORD.blocked_on()
            failure = {
                "state": "raised",
                "error": type(error).__name__,
                "message": str(error),
                "traceback": text[-6000:],
                "phase": RECORD.phase,
                "op": RECORD.op,
                "device_op": RECORD.device_op,
                "wait": None if blocked is None else {"what": blocked.what, "peer": blocked.peer},
                **self._memory(),
                "host": socket.gethostname(),
                "pid": os.getpid(),
            }
            write_flight(self.run, self.place.rank, failure, list(RECORD.events), stacks(), own=True)
            if not self.launched:
                _within(LONGEST, lambda: self._for_others(error))

    def _memory(self) -> dict[str, Any]:
        found: dict[str, Any] = {"rss": resident_bytes(), "device": self.device.type}
        if self.device.type == "cuda" and threading.current_thread() is not threading.main_thread():
            return found  # a hanging main thread may hold the allocator's lock
        with contextlib.suppress(RuntimeError):  # the CUDA context may be broken
            found["peak_bytes"] = peak_bytes(self.device)
            if self.device.type == "cuda":
                found["device_bytes"] = torch.cuda.get_device_properties(self.device).total_memory
        return found

    def _for_others(self, error: BaseException) -> None:
        if self.board is not None and not self.board.claim():
            return
        note(self.run, "failure", kind=type(error).__name__, rank=self.place.rank, message=str(error))
        if self.board is None:
            return
        time.sleep(PATIENCE)
        for rank, text in self.board.read(self.place.ranks).items():
            line = json.loads(text)
            events = line.pop("events", [])
            fields = ("phase", "op", "device_op", "wait", "rss")
            silent = {"state": "gave no reason", "error": "", "message": "", "heard": line.get("time", 0)}
            write_flight(self.run, rank, silent | {name: line.get(name) for name in fields}, events)


def _within(seconds: float, work: Callable[[], None]) -> None:
    """Run `work` in a thread; return when it is done, has failed, or `seconds` have passed."""

    def run() -> None:
        with contextlib.suppress(Exception):
            work()

    start_thread(run, "flight record").join(seconds)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore SIGTERM in this context: torchrun sends it to all ranks as soon as one has failed."""
    if (
        threading.current_thread() is not threading.main_thread()
    ):  # in the watchdog's thread, where the guard handles SIGTERM
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
