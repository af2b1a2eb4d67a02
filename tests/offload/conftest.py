"""Threads that stand for lanes end with their test: ranks are forked from this process (see tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.offload.threads import OPEN


@pytest.fixture(autouse=True)
def lanes_are_closed() -> Iterator[None]:
    yield
    for lane in list(OPEN):
        lane.close()
    OPEN.clear()
