"""Ranks are forked: torch must never have run a multi-threaded kernel in this process, or have met a GPU.

With `FOURFOLD_TEST_DEVICE=cuda` the tests of GPUs run (`make test-gpu`); without it no test sees one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

if os.environ.get("FOURFOLD_TEST_DEVICE", "cpu") == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # backward passes would start a thread per GPU, and forked ranks lack it

import pytest
import torch

torch.set_num_threads(1)

IDLE = ("MainThread", "asyncio_", "tqdm_monitor")
"""Threads that pytest itself has, and tqdm's, which torch.compile starts where tqdm is installed: it waits and holds no lock; execnet's, which receives orders in a worker of xdist, is none of Python's `threading`."""


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """A later test forks this process: whatever lock another thread holds then stays locked in the ranks for ever."""
    yield
    deadline = time.monotonic() + 5
    while (left := _threads()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"the test leaves threads behind: {left}"


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.name.startswith(IDLE)]


LONG = ("test_readme", "test_hosts", "test_faults", "test_checkpoint")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that two workers end together."""
    items.sort(key=lambda item: not item.nodeid.startswith(tuple(f"tests/{name}" for name in LONG)))
