"""Clocks that mark moments of a rank's work: on the CPU the host's clock, on a GPU events in its stream.

A GPU runs behind the host: the time of an event can be read only after the device has reached it. So a mark is taken where
the work is issued, waited for once per step (`wait`), and read after that. `ahead` is how many steps the host may issue
before it reads the results of an earlier one.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

__all__ = ["Clock", "DeviceClock", "HostClock", "make_clock"]


class Clock(Protocol):
    """Marks, and the time between them."""

    @property
    def ahead(self) -> int:
        """Steps that may be issued before the results of an earlier one are read."""

    def mark(self) -> Any:
        """Mark this moment of the work that is being issued."""

    def wait(self, mark: Any) -> None:
        """Return when the device has reached a mark; marks taken before it are then readable, too."""

    def seconds(self, first: Any, second: Any) -> float:
        """Time from one mark to another; both must have been reached."""

    def time_of_day(self, mark: Any) -> float:
        """Unix time at which a mark was reached; call it for marks in the order in which they were taken."""


class HostClock:
    """The clock of a CPU rank: its work is done when the call that issues it returns."""

    ahead = 0

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self, mark: float) -> None:
        pass

    def seconds(self, first: float, second: float) -> float:
        return second - first

    def time_of_day(self, mark: float) -> float:
        return time.time() - (time.perf_counter() - mark)


class DeviceClock:
    """CUDA events in the current stream of a device."""

    ahead = 1

    def __init__(self, device: torch.device):
        self.device = device
        self._known: tuple[torch.cuda.Event, float] | None = (
            None  # an event and the time of day at which it was reached
        )

    def mark(self) -> torch.cuda.Event:
        if self._known is None:
            known = torch.cuda.Event(enable_timing=True)
            known.record(torch.cuda.current_stream(self.device))
            known.synchronize()
            self._known = known, time.time()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return first.elapsed_time(second) / 1000

    def time_of_day(self, mark: torch.cuda.Event) -> float:
        assert self._known is not None
        event, at = self._known
        at += self.seconds(event, mark)
        self._known = mark, at  # CUDA measures in fp32 milliseconds: short distances keep the microseconds
        return at


def make_clock(device: torch.device) -> Clock:
    """The clock of a rank on this device."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()
