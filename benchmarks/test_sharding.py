"""The benchmarks of sharding measure what they say: counted memory is the replay's, overlap is read right, slices save memory."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.sharding_device import DEVICE_PLANS, overlapped, peaks
from benchmarks.sharding_engine import MIB, transient


@pytest.mark.parametrize("name", DEVICE_PLANS)
def test_peak_is_that_of_the_replay(name: str) -> None:
    """Activations, workspaces, gathers, gradients and reductions under way, in one rank of 16 that is counted."""
    counted, said = peaks(name, hidden=64, layers=2, tokens=32, ranks=16, vocab=128)
    assert 0 <= counted - said <= 4 * 4  # the losses of the micro-batches


def test_overlap_is_read_from_a_trace() -> None:
    def kernel(name: str, start: float, end: float) -> dict[str, Any]:
        return {"cat": "kernel", "name": name, "ts": start, "dur": end - start}

    events = [kernel("spin_kernel", 0, 4), kernel("gemm", 3, 6), kernel("gemm", 5, 9), kernel("spin_kernel", 8, 10)]
    assert overlapped([*events, {"cat": "cpu_op", "name": "mm", "ts": 0, "dur": 99}]) == 2 / 6


def test_splitting_divides_the_transient() -> None:
    """An eighth of every size of a 4096-wide MLP, so a 64th of its bytes; a fixed part (the norm, the input's gradient) stays."""
    whole = transient(512, 8, 1) * 64 / MIB
    assert whole <= 1188
    for count, limit in ((4, 165), (8, 90)):
        for prefetch in (0, 1):
            assert transient(512, 8, count, prefetch=prefetch) * 64 / MIB <= limit


def test_slices_computed_again_halve_the_peak_of_many_tokens() -> None:
    whole = transient(256, 512, 1) * 256 / MIB
    assert whole <= 2496
    for prefetch in (0, 1):
        assert transient(256, 512, 8, "full", prefetch) * 256 / MIB <= min(1200, whole / 2)
