"""Threads that wait in C++ for other ranks or a store, and what becomes of them when the process ends.

[Note: threads at exit]
They are daemons, so that a wait for a rank that is gone holds no process up. But a daemon thread that comes back from C++ while
the interpreter shuts down is ended by Python inside frames of C++ that do not allow it, and the process aborts: SIGABRT instead
of the exit code. So before the interpreter shuts down every thread is asked to end, and joined. A run that succeeded leaves no
thread that waits. After a failure one may wait for a rank that can end at any moment; then the process ends at once, with exit
code 1 and without the rest of the clean-up.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable

__all__ = ["start_thread"]

PATIENCE = 0.5
"""Seconds, at exit, for threads to finish what they do."""

_ends: dict[threading.Thread, Callable[[], object]] = {}  # of the threads that run


def start_thread(work: Callable[[], object], name: str, end: Callable[[], object] = lambda: None) -> threading.Thread:
    """Run `work` in a daemon thread; `end()` is called at exit and asks it to return."""

    def run() -> None:
        try:
            work()
        finally:
            _ends.pop(thread, None)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _ends[thread] = end
    thread.start()
    return thread


@atexit.register
def _end_all() -> None:
    running = dict(_ends)  # in a process that was forked they do not run
    threads = [thread for thread in running if thread.is_alive()]
    for thread in threads:
        running[thread]()
    deadline = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    waiting = [thread.name for thread in threads if thread.is_alive()]
    if waiting:
        print(
            f"exit code 1, without further clean-up: threads still wait for other ranks ({', '.join(waiting[:4])})",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
