"""Messages between real processes: names, shapes, trees, bounded memory, dead peers."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fourfold.errors import CommunicationError, RankFailure
from fourfold.program import Op, Schedule, build
from fourfold.runtime.message_driven import drive, run_driven
from fourfold.runtime.sizes import room_for
from fourfold.runtime.transport import Name, Transport
from fourfold.runtime.wire import HostPort, Pool, StagedPort, flatten
from fourfold.testing.ranks import run_ranks
from tests.runtime.chains import Data, lowered, make_executor, run_rank, serial


def make(rank: int, ranks: int, **options: Any) -> Transport:
    edges = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    return Transport(rank, edges, _group, **{"timeout": 10, **options})


def _group(members: list[int]) -> Any:
    return dist.new_group(members, timeout=timedelta(days=1), use_local_synchronization=True)


def act(micro_batch: int) -> Name:
    return Name(0, "activation", micro_batch)


def value(number: int, length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float32) + number


LENGTHS = [5, 3, 1000, 2, 40_000, 17, 40_001, 9, 90_000, 1]


@pytest.mark.parametrize("ahead", [1, 3, 10])
def test_messages_of_any_length_posted_ahead(ahead: int) -> None:
    """Receives that were posted for shorter messages do not take longer ones."""
    assert run_ranks(_lengths, 2, ahead) == [None, True]


def _lengths(rank: int, ranks: int, ahead: int) -> bool | None:
    transport = make(rank, ranks)
    if rank == 0:
        for m, length in enumerate(LENGTHS):
            transport.send(1, act(m), value(m, length))
            time.sleep(0.002)
        transport.finish()
        dist.barrier()
        return None
    posted = 0
    for m, length in enumerate(LENGTHS):
        while posted < min(m + ahead, len(LENGTHS)):
            transport.post(0)
            posted += 1
        assert torch.equal(transport.receive(act(m), 0), value(m, length)), m
    dist.barrier()
    return True


def test_trees_of_tensors_keep_their_structure_dtypes_and_bits() -> None:
    assert run_ranks(_trees, 2) == [True, True]


def _trees(rank: int, ranks: int) -> bool:
    tree = {"a": (torch.ones(3, dtype=torch.bfloat16), [torch.arange(7), None]), "b": torch.full((2, 3), float("nan"))}
    transport = make(rank, ranks)
    transport.post(1 - rank)
    transport.send(1 - rank, act(rank), tree)
    found = transport.receive(act(1 - rank), 1 - rank)
    transport.finish()
    dist.barrier()
    same = [
        a.dtype == b.dtype and a.shape == b.shape and a.view(torch.uint8).equal(b.view(torch.uint8))
        for a, b in zip(flatten(found)[1], flatten(tree)[1], strict=True)
    ]
    return all(same) and flatten(found)[0] == flatten(tree)[0]


def test_out_of_order_use_and_pooled_buffers() -> None:
    """What comes before it is wanted waits; a hundred messages live in a handful of buffers."""
    assert run_ranks(_reuse, 2)[1] <= 6


def _reuse(rank: int, ranks: int) -> int:
    transport = make(rank, ranks)
    for first in range(0, 100, 2):
        if rank == 0:
            transport.send(1, act(first), value(first, 500))
            transport.send(1, act(first + 1), value(first + 1, 500))
        else:
            transport.post(0)
            transport.post(0)
            for m in (first + 1, first):
                found = transport.receive(act(m), 0)
                assert torch.equal(found, value(m, 500))
                transport.release(found)
        dist.barrier()
    transport.finish()
    return transport.port.pool.buffers


def test_a_listener_takes_no_more_than_its_credits() -> None:
    """While the caller computes, at most `depth` messages of one stage and kind are taken off the wire."""
    assert run_ranks(_credits, 2)[1] == 2


def _credits(rank: int, ranks: int) -> int:
    transport = make(rank, ranks, depth=2)
    if rank == 0:
        for m in range(8):
            transport.send(1, act(m), value(m, 10))
        transport.finish()
        dist.barrier()
        return 0
    transport.listen(0, 8)
    transport.wait_any([act(0)])
    time.sleep(0.2)
    held = len(transport.inbox.messages)
    for m in reversed(range(8)):  # the last is wanted first: what comes before it must be let in
        assert torch.equal(transport.receive(act(m), 0), value(m, 10))
    dist.barrier()
    return held


def test_what_does_not_come_is_named() -> None:
    with pytest.raises(RankFailure, match="timed out after 0 s waiting for the activation of stage 0, micro-batch 3"):
        run_ranks(_silent, 2)


def _silent(rank: int, ranks: int) -> None:
    transport = make(rank, ranks, timeout=0.3)
    if rank == 1:
        transport.post(0)
        transport.receive(act(3), 0)
    time.sleep(3)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("listening", [False, True])
def test_a_dead_sender_is_noticed_at_once(listening: bool, late: bool) -> None:
    with pytest.raises(RankFailure, match="rank 0 no longer sends"):
        run_ranks(_orphan, 2, listening, late)


def _orphan(rank: int, ranks: int, listening: bool, late: bool) -> None:
    """`late`: who waits comes to wait after the death."""
    transport = make(rank, ranks, timeout=30)
    if rank == 0:
        transport.send(1, act(0), value(0, 5))
        transport.finish()
        dist.barrier()
        for fd in os.listdir("/proc/self/fd"):  # as its death would, but the process stays to be told apart from it
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                    line = socket.socket(fileno=os.dup(int(fd)))
                    line.getpeername()  # a listening one has none
                    line.shutdown(socket.SHUT_RDWR)
        time.sleep(20)
        return
    ask = (lambda: transport.listen(0, 1)) if listening else (lambda: transport.post(0))
    ask()
    if not late:
        ask()
    transport.receive(act(0), 0)
    dist.barrier()
    if late:
        time.sleep(0.5)
        ask()
    start = time.monotonic()
    try:
        transport.receive(act(1), 0)
    finally:
        assert time.monotonic() - start < 5


def test_lengths_of_generations() -> None:
    for size in range(1, 5000, 7):
        assert size <= room_for(size) <= max(64, size * 1.25 + 64)
        assert room_for(room_for(size)) == room_for(size)
    assert len({room_for(size) for size in range(1 << 20, 1 << 21)}) <= 9


def test_a_pool_counts_users() -> None:
    pool = Pool(lambda size: torch.empty(size, dtype=torch.uint8))
    buffer = pool.take(100)
    view = buffer[:10].view(torch.float16)
    pool.borrow([view])
    pool.give_back([view])
    assert pool.take(100).data_ptr() != buffer.data_ptr()
    pool.give_back([view])
    assert pool.take(100).data_ptr() == buffer.data_ptr()
    pool.give_back([torch.ones(3)])  # not ours: nothing happens
    assert pool.buffers == 2


def test_closing_ends_the_threads() -> None:
    assert run_ranks(_close, 2) == [1, 1]


def _close(rank: int, ranks: int) -> int:
    transport = make(rank, ranks)
    transport.listen(1 - rank, 1)
    transport.send(1 - rank, act(rank), value(0, 5))
    transport.receive(act(1 - rank), 1 - rank)
    transport.finish()
    transport.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    dist.barrier()
    return threading.active_count()


# ---- whole programs over real messages ----


class AsIfStaged(StagedPort):
    """What ranks on one GPU use, its device being the host."""

    def __init__(self) -> None:
        HostPort.__init__(self, torch.device("cpu"))

    def computed(self) -> Any:
        return "mark"

    def to_host(self, data: Tensor, host: Tensor, computed: Any) -> None:
        assert computed == "mark"
        time.sleep(0.001)
        host.copy_(data)

    def to_device(self, host: Tensor) -> tuple[Tensor, Any]:
        return host.clone(), lambda: None


SAMPLE = [
    ("1f1b", {}, False),
    ("wave", {"waves": 2}, False),
    ("zb-v", {}, False),
    ("zb-v", {}, True),
    ("1f1b", {}, True),
]


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize(("name", "options", "driven"), SAMPLE, ids=str)
def test_programs_over_gloo_equal_serial(name: str, options: dict[str, Any], driven: bool, staged: bool) -> None:
    schedule = build(name, 3, 5, **options)
    losses, grads = serial(schedule.stages, 5)
    results = run_ranks(_program, 3, lowered(schedule), driven, staged)
    found: dict[str, Tensor] = {}
    for mine, gradients in results:
        found |= gradients
        assert mine in ([], losses)
    assert found.keys() == grads.keys()
    assert all(torch.equal(found[n], g) for n, g in grads.items())


def _program(rank: int, ranks: int, programs: Any, driven: bool, staged: bool) -> Any:
    transport = make(rank, ranks, port=AsIfStaged() if staged else None)
    for _ in range(2):  # a second step over the same channels
        losses, grads, _, _ = run_rank(rank, transport, programs, driven=driven, slack=1)
    dist.barrier()
    return losses, grads


def test_where_two_ranks_are_one_stage_the_leader_chooses() -> None:
    """Two pipelines side by side whose stages meet in a collective: without one order they would mix up their sums."""
    orders = run_ranks(_side_by_side, 4)
    assert orders[0] == orders[1]
    assert orders[2] == orders[3]


class Meeting(nn.Module):
    """A layer whose forward meets its twin."""

    def __init__(self, inner: nn.Module, group: Any):
        super().__init__()
        self.inner, self.group = inner, group

    def forward(self, *args: Tensor) -> Tensor:
        mark = args[0].detach().sum()
        both = [torch.empty_like(mark) for _ in range(2)]
        dist.all_gather(both, mark, group=self.group)
        assert torch.equal(both[0], both[1]), "twins met over different micro-batches"
        return self.inner(*args)


def test_how_many_micro_batches_a_stage_may_hold() -> None:
    """As many as at any time in its program, which need not be at the end, and `slack` more."""
    schedule = Schedule.of([[Op.parse(op) for op in ["0F0", "0F1", "0B0", "0B1", "0F2", "0B2"]]])
    for slack, most in ((0, 2), (1, 3), (5, 3)):
        assert drive(lowered(schedule).of(0), {"0": (0,)}, slack).caps == {0: most}


def _side_by_side(rank: int, ranks: int) -> list[str]:
    """Ranks 0 and 2 are one pipeline, 1 and 3 the other; 0 with 1 are its first stage, 2 with 3 its second."""
    here, lane = divmod(rank, 2)
    edges = [(0, 1), (1, 0)]
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def new_group(members: list[int]) -> Any:
        return _group([2 * m + lane for m in members])

    transport = Transport(here, edges, new_group, address=lambda r: 2 * r + lane, timeout=10)
    schedule = build("1f1b", 2, 8)
    programs = lowered(schedule)

    def dawdle(op: str) -> None:
        time.sleep(0.003 * ((hash((op, rank)) >> 3) % 3))

    executor = make_executor(programs, here, transport, split=False, watch=dawdle)
    link = executor.stages[here].links[0]
    executor.stages[here]._runs[0] = Meeting(link.module, pairs[here])
    plan = drive(programs.of(here), {str(here): (here,)}, slack=2)
    run_driven(executor, plan, Data(8), together=pairs[here])
    dist.barrier()
    return [span.what for span in executor.spans]


def test_sending_to_a_rank_that_is_gone() -> None:
    with pytest.raises((RankFailure, CommunicationError), match="rank 1"):
        run_ranks(_gone, 2)


def _gone(rank: int, ranks: int) -> None:
    transport = make(rank, ranks)
    dist.barrier()
    if rank == 1:
        os._exit(3)
    time.sleep(0.5)
    for m in range(50):
        transport.send(1, act(m), value(m, 100_000))
        time.sleep(0.01)
    transport.finish()
