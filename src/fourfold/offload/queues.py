"""Queues of device work that run concurrently, ordered by events.

    submit(work)    append work
    record()        an event after everything appended so far
    wait(event)     work appended from now on runs after the event

On CUDA a queue is a stream and these calls never block the host. On the CPU work runs when it is submitted, so everything
happens in order. Tests use queues that are threads, where a missing `wait` is found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["DeviceQueue", "DeviceQueues", "make_queues"]


class DeviceQueue(Protocol):
    """One queue of work."""

    def submit(self, work: Callable[[], object]) -> None: ...
    def record(self) -> Any: ...
    def wait(self, event: Any) -> None: ...
    def synchronize(self) -> None:
        """Block the host until all work is done."""


@dataclass(frozen=True)
class DeviceQueues:
    """The queue in which the caller computes, and one each for host-to-device copies, updates and device-to-host copies."""

    compute: DeviceQueue
    copy_in: DeviceQueue
    update: DeviceQueue
    copy_out: DeviceQueue

    def synchronize(self) -> None:
        """Block the host until copies and updates are done."""
        for queue in (self.copy_in, self.update, self.copy_out):
            queue.synchronize()


class _Inline:
    """Runs work when it is submitted."""

    def submit(self, work: Callable[[], object]) -> None:
        work()

    def record(self) -> None:
        return None

    def wait(self, event: None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Stream:
    """A separate CUDA stream."""

    def __init__(self, device: torch.device, priority: int = 0):
        self.stream = torch.cuda.Stream(device, priority=priority)

    def submit(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def record(self) -> torch.cuda.Event:
        return self.stream.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        self.stream.wait_event(event)

    def synchronize(self) -> None:
        self.stream.synchronize()


class _Current:
    """The current CUDA stream."""

    def __init__(self, device: torch.device):
        self.device = device

    def submit(self, work: Callable[[], object]) -> None:
        work()

    def record(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self.device).record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()


def make_queues(device: torch.device) -> DeviceQueues:
    """The queues of a device. Updates have a higher stream priority than the model's kernels, since layers wait for them."""
    if device.type == "cpu":
        return DeviceQueues(_Inline(), _Inline(), _Inline(), _Inline())
    return DeviceQueues(_Current(device), _Stream(device), _Stream(device, priority=-1), _Stream(device))
