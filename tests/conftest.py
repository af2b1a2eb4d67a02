"""Ranks are forked: torch must never have run a multi-threaded kernel in this process, or have met a GPU.

With `FOURFOLD_TEST_DEVICE=cuda` the tests of GPUs run (`make test-gpu`); without it no test sees one.
"""

from __future__ import annotations

import os

if os.environ.get("FOURFOLD_TEST_DEVICE", "cpu") == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # backward passes would start a thread per GPU, and forked ranks lack it

import pytest
import torch

torch.set_num_threads(1)

LONG = ("test_readme", "test_hosts", "test_faults", "test_checkpoint")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that two workers end together."""
    items.sort(key=lambda item: not item.nodeid.startswith(tuple(f"tests/{name}" for name in LONG)))
