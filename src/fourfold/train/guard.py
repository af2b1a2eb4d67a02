"""Watching over one rank: requests to stop, hangs, non-finite steps, and faults on purpose.

- SIGTERM (and SIGUSR1, which Slurm can send before a job's time is up) asks to stop: the rank finishes its step, all ranks agree
  to stop after the same one, save, and exit with 0.
- If a step takes longer than the timeout, the stacks of all threads go to the log. Ranks that wait for a rank that hangs
  fail at the timeout themselves, since every collective has it.
- Steps with a non-finite loss or gradient are skipped by the optimizer on all ranks; too many in a row end the run. (With
  `train.guard = false` none is skipped, and the first ends it.)
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from fourfold.errors import TrainingError
from fourfold.train.faults import Faults

__all__ = ["Guard"]


class Guard:
    """One rank's guard; active inside `with guard.on_watch():`."""

    def __init__(self, *, timeout: float, max_skipped: int, skips: bool = True, faults: Faults | None = None):
        self.timeout, self.max_skipped, self.skips, self.faults = timeout, max_skipped, skips, faults
        self.skipped = 0  # in the whole run
        self._in_a_row = 0
        self._stop = False
        self._step = 0

    def stop_requested(self) -> bool:
        return self._stop

    @contextlib.contextmanager
    def on_watch(self) -> Iterator[None]:
        """Listen to signals and watch the clock; gives both back afterwards."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGUSR1)}
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._stop = True

    def begin(self, step: int) -> None:
        """The rank begins step `step` (counted from 1)."""
        self._step = step
        self.rest()
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a stderr without a descriptor takes no dump
            faulthandler.dump_traceback_later(self.timeout, file=sys.stderr)
        if self.faults is not None:
            self.faults.at(step)

    def instruction(self, op: str) -> None:
        """Called before every computation of a step."""
        if self.faults is not None:
            self.faults.at(self._step, op)

    def rest(self) -> None:
        """What follows may take its time (evaluation, saving)."""
        faulthandler.cancel_dump_traceback_later()

    def judge(self, step: int, loss: float, norm: float) -> None:
        """Count a step that was skipped; raises TrainingError when there were too many in a row."""
        if math.isfinite(loss) and math.isfinite(norm):
            self._in_a_row = 0
            return
        if not self.skips:
            raise TrainingError(
                f"step {step}: the loss or the gradient is not finite (loss {loss}, gradient norm {norm}), and with "
                "train.guard = false the weights took it; resume from the last checkpoint with train.guard = true"
            )
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= self.max_skipped:
            raise TrainingError(
                f"step {step}: the loss or the gradient was not finite in the last {self._in_a_row} steps (loss {loss}, "
                f"gradient norm {norm}); they changed no weights. Lower optim.lr, or look at the data; "
                f"train.max_skipped = {self.max_skipped} sets how many are borne"
            )
