"""Lanes: queues of device work that run beside each other, ordered by marks.

    do(work)     append work
    mark()       a mark behind everything appended so far
    wait(mark)   what is appended from now on runs after the mark

On CUDA a lane is a stream and a mark is an event: none of these waits on the host. On the CPU work runs when it is given, so
everything is in order by itself; tests give lanes that are threads, where a forgotten `wait` shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["DeviceQueue", "DeviceQueues", "make_queues"]


class DeviceQueue(Protocol):
    """One queue of work."""

    def do(self, work: Callable[[], object]) -> None: ...
    def mark(self) -> Any: ...
    def wait(self, mark: Any) -> None: ...
    def finish(self) -> None:
        """Wait, on the host, until all work is done."""


@dataclass(frozen=True)
class DeviceQueues:
    """`here` is where the caller computes; the others copy in, update and copy out."""

    here: DeviceQueue
    incoming: DeviceQueue
    updating: DeviceQueue
    outgoing: DeviceQueue

    def finish(self) -> None:
        """Wait, on the host, until the three are done."""
        for lane in (self.incoming, self.updating, self.outgoing):
            lane.finish()


class _Inline:
    """Work is done when it is given."""

    def do(self, work: Callable[[], object]) -> None:
        work()

    def mark(self) -> None:
        return None

    def wait(self, mark: None) -> None:
        pass

    def finish(self) -> None:
        pass


class _Stream:
    """A CUDA stream of its own."""

    def __init__(self, device: torch.device, priority: int = 0):
        self.stream = torch.cuda.Stream(device, priority=priority)

    def do(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def mark(self) -> torch.cuda.Event:
        return self.stream.record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        self.stream.wait_event(mark)

    def finish(self) -> None:
        self.stream.synchronize()


class _Current:
    """Whatever CUDA stream is current."""

    def __init__(self, device: torch.device):
        self.device = device

    def do(self, work: Callable[[], object]) -> None:
        work()

    def mark(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self.device).record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(mark)

    def finish(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()


def make_queues(device: torch.device) -> DeviceQueues:
    """The lanes of a device. Updates have priority over the model's kernels: layers wait for them."""
    if device.type == "cpu":
        return DeviceQueues(_Inline(), _Inline(), _Inline(), _Inline())
    return DeviceQueues(_Current(device), _Stream(device), _Stream(device, priority=-1), _Stream(device))
