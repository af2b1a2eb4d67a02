"""Lanes that are threads and take random times: what does not wait for what it needs shows on the CPU."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from fourfold.offload.lanes import Lanes


class ThreadLane:
    """A queue of work and a thread that does it, each piece after a random delay."""

    def __init__(self, seed: int, delay: float, *, careless: bool = False):
        self.random, self.delay, self.careless = random.Random(seed), delay, careless
        self.error: BaseException | None = None
        self.queue: queue.Queue[Callable[[], Any] | None] = queue.Queue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (work := self.queue.get()) is not None:
            try:
                work()
            except BaseException as e:
                self.error = e

    def do(self, work: Callable[[], object]) -> None:
        def late() -> None:
            time.sleep(self.random.random() * self.delay)
            work()

        self.queue.put(late)

    def mark(self) -> threading.Event:
        event = threading.Event()
        self.queue.put(event.set)
        return event

    def wait(self, mark: threading.Event) -> None:
        if not self.careless:
            self.queue.put(lambda: mark.wait(30))

    def finish(self) -> None:
        assert self.mark().wait(30)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.queue.put(None)
        self.thread.join()


class Here:
    """The thread that calls."""

    def __init__(self, careless: bool = False):
        self.careless = careless

    def do(self, work: Callable[[], object]) -> None:
        work()

    def mark(self) -> threading.Event:
        event = threading.Event()
        event.set()
        return event

    def wait(self, mark: threading.Event) -> None:
        if not self.careless:
            assert mark.wait(30)

    def finish(self) -> None:
        pass


def thread_lanes(seed: int, delay: float = 1e-3, careless: str = "") -> Lanes:
    """Lanes as threads; the one named `careless` waits for nothing."""
    made = [
        ThreadLane(seed + i, delay, careless=careless == n) for i, n in enumerate(("incoming", "updating", "outgoing"))
    ]
    return Lanes(Here(careless == "here"), *made)
