"""Ranks are forked: torch must never have run a multi-threaded kernel in this process."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)

LONG = ("test_readme", "test_hosts", "test_faults", "test_checkpoint")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that two workers end together."""
    items.sort(key=lambda item: not item.nodeid.startswith(tuple(f"tests/{name}" for name in LONG)))
