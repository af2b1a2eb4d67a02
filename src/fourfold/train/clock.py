"""Clocks that record times in a rank's work: the host's clock on a CPU, events in the stream on a GPU.

A GPU runs behind the host: the time of an event can be read only after the device has reached it. So a mark is recorded when
the work is issued, waited for once per step (`wait`), and read after that. `ahead` is the number of steps that the host may issue
before it reads the results of an earlier one.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from fourfold.device_events import make_event

__all__ = ["Clock", "DeviceClock", "HostClock", "make_clock"]


class Clock(Protocol):
    """Marks, and the time between them."""

    @property
    def ahead(self) -> int:
        """Steps that may be issued before the results of an earlier one are read."""

    def mark(self) -> Any:
        """Record a mark after the work issued so far."""

    def wait(self, mark: Any) -> None:
        """Block until the device has reached a mark; earlier marks are then readable, too."""

    def seconds(self, first: Any, second: Any) -> float:
        """Time from one mark to another; both must have been reached."""

    def reached(self, mark: Any) -> bool:
        """Whether the device has reached a mark."""

    def time_of_day(self, mark: Any) -> float:
        """Unix time at which a mark was reached; a later mark must have been waited for."""

    def lead(self, mark: Any, issued: float) -> float | None:
        """Seconds from `issued` (Unix time) until the device reached a mark; None on a CPU."""


class HostClock:
    """The clock of a CPU rank, whose work is done when the call that issues it returns."""

    ahead = 0

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self, mark: float) -> None:
        pass

    def seconds(self, first: float, second: float) -> float:
        return second - first

    def reached(self, mark: float) -> bool:
        return True

    def time_of_day(self, mark: float) -> float:
        return time.time() - (time.perf_counter() - mark)

    def lead(self, mark: float, issued: float) -> None:
        return None


class DeviceClock:
    """CUDA events in the current stream of a device."""

    ahead = 1

    def __init__(self, device: torch.device):
        self.device = device
        self._known: tuple[Any, float] | None = None  # an event and the time of day at which it was reached

    def mark(self) -> Any:
        if self._known is None:
            known = make_event(timing=True)
            known.record(torch.cuda.current_stream(self.device))
            known.synchronize()
            self._known = known, time.time()
        event = make_event(timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, mark: Any) -> None:
        """Also records the time of day of this mark, for `time_of_day`, since the clocks of host and device drift.

        If the host had to wait, it wakes when the device reaches the mark, and reads its own clock. Otherwise the device was
        earlier, and the time is computed from the previous mark. CUDA reports fp32 milliseconds, which resolve microseconds
        over short intervals.
        """
        first = not mark.query()
        mark.synchronize()
        assert self._known is not None
        event, at = self._known
        self._known = mark, time.time() if first else at + self.seconds(event, mark)

    def reached(self, mark: Any) -> bool:
        return bool(mark.query())

    def seconds(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1000

    def time_of_day(self, mark: Any) -> float:
        assert self._known is not None
        event, at = self._known
        return at - self.seconds(mark, event)

    def lead(self, mark: Any, issued: float) -> float:
        return max(0.0, self.time_of_day(mark) - issued)  # two clocks, which agree to a fraction of a millisecond


def make_clock(device: torch.device) -> Clock:
    """The clock of a rank on this device."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()
