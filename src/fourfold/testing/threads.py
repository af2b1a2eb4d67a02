"""Ranks as threads of one process, for programs that only exchange messages: hundreds of runs per second.

    def check(rank, ranks, mail):
        executor = Executor(placement, rank, stages, units, mail.of(rank))
        return executor.run(programs.of(rank), feed)

    results = run_threads(check, 4)

`mail.of(rank)` replaces a Transport: messages are passed by reference, in each sender's order, and every wait has a timeout.
Collectives need processes: `run_ranks`.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from fourfold.errors import CommunicationError, RankFailure
from fourfold.runtime.wire import Name

__all__ = ["Mail", "MailBox", "run_threads"]


class Mail:
    """The mailboxes of all ranks."""

    def __init__(self, ranks: int, timeout: float = 20.0):
        self.timeout = timeout
        self.boxes = [MailBox(self) for _ in range(ranks)]
        self.broken = False

    def of(self, rank: int) -> Any:
        """The mailbox of a rank, in place of its Transport."""
        return self.boxes[rank]

    def break_off(self) -> None:
        """Abort all waits, because a rank failed."""
        self.broken = True
        for box in self.boxes:
            with box.changed:
                box.changed.notify_all()


class MailBox:
    """What one rank sends and receives; as Transport, without threads or buffers."""

    def __init__(self, mail: Mail):
        self.mail, self.changed = mail, threading.Condition()
        self.messages: dict[Name, Any] = {}

    def address(self, rank: int) -> int:
        """A rank of the pipeline is a rank of the job."""
        return rank

    def begin(self, *, ordered: bool, program: str = "") -> None:
        """Nothing to prepare."""

    def post(self, source: int, name: Name | None = None) -> None:
        """Messages come as they are sent."""

    def listen(self, source: int, count: int) -> None:
        """Messages come as they are sent."""

    def send(self, target: int, name: Name, value: Any) -> None:
        box = self.mail.boxes[target]
        with box.changed:
            assert name not in box.messages, f"{name} was sent twice"
            box.messages[name] = value
            box.changed.notify_all()

    def receive(self, name: Name, source: int) -> Any:
        self.wait_any([name])
        return self.messages.pop(name)

    def arrived(self, name: Name) -> bool:
        return name in self.messages

    def wait_any(self, names: Sequence[Name]) -> None:
        deadline = time.monotonic() + self.mail.timeout
        with self.changed:
            while not any(name in self.messages for name in names):
                if self.mail.broken:
                    raise CommunicationError(f"failed waiting for {', '.join(map(str, names))}: another rank is gone")
                if not self.changed.wait(deadline - time.monotonic()):
                    raise CommunicationError(
                        f"timed out after {self.mail.timeout:.0f} s waiting for {', '.join(map(str, names))}"
                    )

    def release(self, value: Any) -> None:
        """Nothing is pooled."""

    def finish(self) -> None:
        assert not self.messages, f"never used: {list(map(str, self.messages))}"


def run_threads(fn: Callable[..., Any], ranks: int, *args: Any, timeout: float = 20.0) -> list[Any]:
    """Call `fn(rank, ranks, mail, *args)` in `ranks` threads; returns their results, or raises the first failure."""
    mail = Mail(ranks, timeout)
    results: dict[int, Any] = {}
    failures: list[tuple[int, str, BaseException]] = []

    def work(rank: int) -> None:
        try:
            results[rank] = fn(rank, ranks, mail, *args)
        except BaseException as e:
            failures.append((rank, traceback.format_exc(), e))
            mail.break_off()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        rank, text, error = failures[0]
        raise RankFailure(f"rank {rank} failed first:\n{text}") from error
    return [results[rank] for rank in range(ranks)]
