"""The order of collectives, compared over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fourfold.errors import RankFailure
from fourfold.testing.order import SameOrder
from fourfold.testing.ranks import run_ranks


def _calls(rank: int, ranks: int, wrong: bool) -> int:
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    order = SameOrder()
    with order:
        for turn in range(2):
            mine = [g for g, members in zip(pairs, ([0, 1], [1, 2]), strict=True) if rank in members]
            for group in mine:
                size = 3 if wrong and turn and rank == 2 else 4
                work = dist.all_reduce(torch.ones(size), group=group, async_op=True)
                if not wrong:
                    work.wait()
            if rank < 2:  # messages are not collectives
                (dist.send if rank else dist.recv)(torch.ones(1), 1 - rank)
            order.compare()
    return order.compared


def test_equal_orders_pass() -> None:
    assert run_ranks(_calls, 3, False) == [2, 4, 2]


def test_an_order_that_differs_is_named() -> None:
    with pytest.raises(
        RankFailure, match=r"call 0 is \('all_reduce', 16\) on rank 1 and \('all_reduce', 12\) on rank 2"
    ):
        run_ranks(_calls, 3, True)
