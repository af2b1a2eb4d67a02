"""Messages without headers: one transfer each, exact buffers, the order of the program; and what NCCL needs of them."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.errors import RankFailure
from fourfold.program import build
from fourfold.runtime.direct import DirectReceiver, DirectSender, form_of
from fourfold.runtime.transport import Transport
from fourfold.runtime.wire import Name, Pool
from fourfold.testing.ranks import run_ranks
from tests.runtime.chains import WIDTH, Data, lowered, run_rank
from tests.runtime.test_transport import _group, act

FORM = form_of((3, WIDTH), torch.float64)


class Even(Data):
    """Micro-batches of one length."""

    def __init__(self, micro_batches: int):
        super().__init__(micro_batches)
        self.inputs = [x[:3] for x in self.inputs]
        self.targets = [x[:3] for x in self.targets]


@pytest.mark.parametrize("schedule", ["1f1b", "wave", "zb-v"])
def test_the_bits_are_those_of_messages_with_headers(schedule: str) -> None:
    """Ordered steps have no headers, message-driven ones short headers; both kinds in turns over one transport."""
    assert run_ranks(_same, 2, schedule) == [True, True]


def _same(rank: int, ranks: int, name: str) -> bool:
    programs = lowered(build(name, ranks, 4))
    found = []
    for form in (None, FORM):
        transport = Transport(rank, [(0, 1), (1, 0)], _group, timeout=10, form=form, usual=FORM.size)
        for driven in (False, True, False):
            found.append(run_rank(rank, transport, programs, driven=driven, slack=1, data=Even(4))[:2])
        dist.barrier()
        transport.close()
    losses, grads = found[0]
    return all(a == losses and all(torch.equal(g[n], grads[n]) for n in grads) for a, g in found[1:])


def test_a_message_is_one_transfer_of_its_own_bytes() -> None:
    """4 micro-batches forward and back: 4 sends on each rank, of a micro-batch each and nothing else."""
    assert run_ranks(_traffic, 2) == [(4, 4 * FORM.size)] * 2


def _traffic(rank: int, ranks: int) -> tuple[int, int]:
    transport = Transport(rank, [(0, 1), (1, 0)], _group, timeout=10, form=FORM)
    sizes: list[int] = []
    group: Any = transport._direct_out[1 - rank].group
    transport._direct_out[1 - rank].group = _Recording(group, sizes)  # type: ignore[assignment]
    run_rank(rank, transport, lowered(build("1f1b", ranks, 4)), data=Even(4))
    dist.barrier()
    return len(sizes), sum(sizes)


class _Recording:
    """A group that notes what is sent."""

    def __init__(self, group: Any, sizes: list[int]):
        self.group, self.sizes = group, sizes

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self.sizes += [t.nbytes for t in tensors]
        return self.group.send(tensors, peer, tag)


def test_another_form_than_the_plan_says_is_refused_by_the_sender() -> None:
    with pytest.raises(
        RankFailure, match=r"micro-batch 0 is torch.float64 \[4, 6\]; the receiver expects torch.float64 \[3, 6\]"
    ):
        run_ranks(_unequal, 2)


def _unequal(rank: int, ranks: int) -> None:
    transport = Transport(rank, [(0, 1), (1, 0)], _group, timeout=10, form=FORM)
    transport.begin(ordered=True)
    if rank == 0:
        transport.send(1, act(0), torch.ones(4, WIDTH, dtype=torch.float64))
    dist.barrier()


def test_what_does_not_come_is_named() -> None:
    with pytest.raises(RankFailure, match="timed out after 1 s waiting for the activation of stage 0, micro-batch 3"):
        run_ranks(_silent, 2)


def _silent(rank: int, ranks: int) -> None:
    transport = Transport(rank, [(0, 1), (1, 0)], _group, timeout=1, form=FORM)
    transport.begin(ordered=True)
    if rank == 1:
        transport.post(0, act(3))
        transport.receive(act(3), 0)
    dist.barrier()


# ---- as on NCCL: a stand-in for a group whose transfers order streams and never block ----


class _Transfer:
    """A transfer that the device does later."""

    def __init__(self) -> None:
        self.done = self.waited = False

    def wait(self, *timeout: Any) -> None:
        assert not timeout, "a timeout makes NCCL's wait block the host and abort the communicator"
        self.waited = True

    def is_completed(self) -> bool:
        return self.done


class _Group:
    """One end of an edge."""

    def __init__(self) -> None:
        self.calls: deque[tuple[str, Tensor, _Transfer]] = deque()
        self.threads = set[int]()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _Transfer:
        return self._start("send", tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _Transfer:
        return self._start("recv", tensors)

    def _start(self, what: str, tensors: list[Tensor]) -> _Transfer:
        self.threads.add(threading.get_ident())
        transfer = _Transfer()
        self.calls.append((what, tensors[0], transfer))
        return transfer


def _pool() -> Pool:
    return Pool(lambda size: torch.empty((3, WIDTH), dtype=torch.float64))


def test_on_nccl_the_computing_thread_starts_transfers_and_nothing_blocks() -> None:
    group: Any = _Group()
    pool = _pool()
    receiver = DirectReceiver(FORM, 0, group, 0, pool, blocking=False)
    for m in range(3):
        receiver.post(act(m))
    assert [x.shape for _, x, _ in group.calls] == [torch.Size((3, WIDTH))] * 3
    second = receiver.take(act(1), 1.0)  # what was posted before it waits to be wanted
    assert second is group.calls[1][1]
    assert [t.waited for *_, t in group.calls] == [True, True, False]
    assert receiver.take(act(0), 1.0) is group.calls[0][1]
    assert receiver.left == [act(2)]

    sender = DirectSender(FORM, 1, group, 1, pool, _raise, blocking=False)
    group.calls.clear()
    sender.put(act(0), second)  # what came is handed on: its buffer has two users
    pool.give_back([second])
    receiver.post(act(3))
    assert group.calls[-1][1] is not second  # still being sent
    group.calls[0][2].done = True
    sender.put(act(1), torch.zeros(3, WIDTH, dtype=torch.float64))
    receiver.post(act(4))
    assert group.calls[-1][1] is second  # it has left: the buffer is used again
    assert sender.wait_idle(1.0)
    assert group.threads == {threading.get_ident()}
    assert sender._thread is None


def _raise(error: Exception) -> None:
    raise error


def test_buffers_are_used_again_over_steps() -> None:
    group: Any = _Group()
    pool = _pool()
    receiver = DirectReceiver(FORM, 0, group, 0, pool, blocking=False)
    for m in range(100):
        receiver.post(Name(0, "activation", m))
        pool.give_back([receiver.take(Name(0, "activation", m), 1.0)])
    assert pool.buffers == 1
