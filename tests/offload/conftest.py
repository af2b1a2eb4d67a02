"""Queue threads end with their test, since ranks are forked from this process (see conftest.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.offload.threads import OPEN


@pytest.fixture(autouse=True)
def queues_are_closed() -> Iterator[None]:
    yield
    for queue in list(OPEN):
        queue.close()
    OPEN.clear()
