"""Supervision of one rank: requests to stop, phases and their limits, non-finite steps, and fault injection.

- SIGTERM (and SIGUSR1, which Slurm can send before a job's time is up) requests a stop: the rank finishes its step, all ranks
  agree on the last step, save, and exit with 0.
- The guard records (record.py) the phase of the rank and how long it may make no progress in it; the watchdog (watch.py) finds
  hangs.
- Steps with a non-finite loss or gradient are skipped by the optimizer on all ranks; too many in a row end the run. (With
  `train.guard = false` no step is skipped, and the first one ends the run.)
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from fourfold.errors import TrainingError
from fourfold.record import EXIT, RECORD
from fourfold.supervision.faults import Faults
from fourfold.supervision.watch import Limits

__all__ = ["Guard"]


class Guard:
    """One rank's guard; active inside `with guard.on_watch():`."""

    def __init__(self, *, limits: Limits, max_skipped: int, skips: bool = True, faults: Faults | None = None):
        self.limits, self.max_skipped, self.skips, self.faults = limits, max_skipped, skips, faults
        self.skipped = 0  # in the whole run
        self._in_a_row = 0
        self._stop = False
        self._step = 0
        self._warm = False  # whether a step is done, so that compilation is over

    def stop_requested(self) -> bool:
        return self._stop

    @contextlib.contextmanager
    def on_watch(self) -> Iterator[None]:
        """Install signal handlers; restores the previous ones on exit."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGUSR1)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._stop = True

    def start(self) -> None:
        """The rank is about to be assembled."""
        if self.faults is not None:
            self.faults.at(0, "start")

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """The rank connects to the other ranks inside."""
        RECORD.enter("the connections between ranks", self.limits.start, "train.start_timeout")
        if self.faults is not None:
            self.faults.at(0, "connect")
        yield
        RECORD.enter("start", self.limits.start, "train.start_timeout")

    def begin(self, step: int) -> None:
        """The rank begins step `step` (counted from 1)."""
        self._step = step
        limit = self.limits.step if self._warm else self.limits.start
        RECORD.enter(f"step {step}", limit, "train.timeout" if self._warm else "train.start_timeout")
        if self.faults is not None:
            self.faults.at(step)

    def instruction(self, op: str) -> None:
        """Called before every computation of a step."""
        if self.faults is not None:
            self.faults.at(self._step, op)

    def evaluate(self, step: int) -> None:
        """The rank begins the evaluation after step `step`."""
        RECORD.enter(f"the evaluation after step {step}", self.limits.evaluation, "train.eval_timeout")
        if self.faults is not None:
            self.faults.at(step, "evaluation")

    def save(self, step: int) -> None:
        """The rank begins to save step `step`."""
        RECORD.enter(f"the save of step {step}", self.limits.save, "checkpoint.timeout")
        if self.faults is not None:
            self.faults.at(step, "save")

    def compare(self, step: int) -> None:
        """The rank begins to compare its weights with its replicas'."""
        RECORD.enter(f"the comparison of replicas after step {step}", self.limits.save, "checkpoint.timeout")

    def skips_collective(self) -> bool:
        """Whether a fault makes this rank skip the collective that it comes to."""
        return self.faults is not None and self.faults.skips()

    def finish(self, step: int, *, final: bool) -> None:
        """The rank has trained and saved step `step`, its last one; `final`: rank 0 writes final/, the others wait for it."""
        RECORD.enter("the writing of final/" if final else "the end of the run", self.limits.save, "checkpoint.timeout")
        if self.faults is not None:
            self.faults.at(step, "final")

    def leave(self) -> None:
        """End of the collective work."""
        RECORD.enter(EXIT, float("inf"))

    def judge(self, step: int, loss: float, norm: float) -> None:
        """Called after a step. Counts skipped steps; raises TrainingError after too many in a row."""
        self._warm = True
        if math.isfinite(loss) and math.isfinite(norm):
            self._in_a_row = 0
            return
        if not self.skips:
            raise TrainingError(
                f"step {step}: the loss or the gradient is not finite (loss {loss}, gradient norm {norm}), and with "
                "train.guard = false the weights were updated with it; resume from the last checkpoint with train.guard = true"
            )
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= self.max_skipped:
            raise TrainingError(
                f"step {step}: the loss or the gradient was not finite in the last {self._in_a_row} steps (loss {loss}, "
                f"gradient norm {norm}); they changed no weights. Lower optim.lr, or look at the data; "
                f"train.max_skipped = {self.max_skipped} sets how many are allowed"
            )
