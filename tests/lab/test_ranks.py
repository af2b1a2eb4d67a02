"""Ranks started for a test: what they return, and what is reported of those that fail, die, stop or hang."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from fourfold.errors import RankFailure
from fourfold.testing.ranks import run_ranks


def test_results_come_in_rank_order() -> None:
    secret = object()  # a closure: nothing is pickled on the way to a rank

    def check(rank: int, ranks: int, *, factor: float) -> float:
        assert secret is not None
        x = torch.full((3,), factor * rank)
        dist.all_reduce(x)
        return x.sum().item()

    assert run_ranks(check, 4, factor=2.0) == [36.0] * 4


def test_the_first_failure_is_reported_with_its_traceback() -> None:
    def check(rank: int, ranks: int) -> None:
        if rank == 1:
            raise ValueError("rank 1 says no")
        dist.barrier()

    with pytest.raises(RankFailure, match="(?s)rank 1 failed first.*ValueError: rank 1 says no"):
        run_ranks(check, 3)


def test_a_rank_that_dies_is_reported() -> None:
    def check(rank: int, ranks: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailure, match="rank 1 failed first:\ndied with exit code -9"):
        run_ranks(check, 2)


def test_a_rank_that_stops_is_not_waited_for_in_a_group_without_a_timeout() -> None:
    """Torch's default is 30 minutes: longer than any test may take."""

    def check(rank: int, ranks: int) -> None:
        pair = dist.new_group([0, 1])
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1), group=pair)

    start = time.monotonic()
    with pytest.raises(RankFailure, match="(?s)did not finish within .*rank 0 failed first.*[Tt]imed out"):
        run_ranks(check, 2, group_timeout=1.0)
    assert time.monotonic() - start < 30


def test_a_rank_that_hangs_is_reported_with_its_stacks() -> None:
    def wait_for_nobody(rank: int, ranks: int) -> None:
        threading.Event().wait(100)

    with pytest.raises(RankFailure, match="(?s)ranks 0 did not finish within 1 s.*in wait_for_nobody"):
        run_ranks(wait_for_nobody, 1, timeout=1.0)


def test_ranks_do_not_collect_what_the_parent_made() -> None:
    class Parents:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            os.write(writing, b"!")

    import gc

    reading, writing = os.pipe()
    gc.disable()
    try:
        Parents()  # garbage that only the collector finds
        run_ranks(lambda rank, ranks: gc.collect() and None, 2)
        os.set_blocking(reading, False)
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
        gc.collect()
        assert os.read(reading, 2) == b"!"
    finally:
        gc.enable()
        os.close(reading)
        os.close(writing)
