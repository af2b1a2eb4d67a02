"""The first step of a pipeline on a device that loads a kernel at its first launch, and waits until it is idle to do so.

A model of hosts and devices: [Note: the first step of a pipeline] in runtime/direct.py. A host issues the instructions of its
program; at the first op of a kind it waits until its device has done all that was issued. Ops of a device run in order; a receive
runs after the ops that were issued before it was posted; a message arrives when both ends run.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from fourfold.program import Op, Programs, Recv, Send, UnitOp, build
from fourfold.runtime.direct import DirectReceiver
from fourfold.runtime.wire import Name
from tests.runtime.chains import lowered
from tests.runtime.test_direct import FORM, _Group, _pool
from tests.runtime.test_transport import act

SCHEDULES = ["gpipe", "1f1b", "wave", "zb-h1", "zb-v", "interleaved"]


class _Rank:
    """A host and its device."""

    def __init__(self, rank: int, programs: Programs, later: bool):
        self.rank, self.programs, self.later = rank, programs, later
        self.todo = deque(programs.of(rank).instructions)
        self.ops: list[Name | None] = []  # issued: the message that each needs
        self.done = 0  # ops that the device has done
        self.loaded: set[str] = set()
        self.sent: dict[Name, int] = {}  # after how many ops
        self.posted: dict[Name, int] = {}
        self.held: dict[int, deque[Name]] = {}  # receives that are posted later, by the sender's rank

    def needs(self, op: Op | UnitOp) -> Name | None:
        """The message that an op needs."""
        stage, kind = op.stage, "activation" if op.kind == "F" else "gradient"
        maker = stage - 1 if op.kind == "F" else stage + 1
        place = self.programs.placement
        if op.kind == "W" or not 0 <= maker < len(place) or place[maker] == self.rank:
            return None
        return Name(maker, kind, op.micro_batch)  # type: ignore[arg-type]

    def issue(self, arrived: set[Name]) -> bool:
        """Issue the next instruction; False: the host waits."""
        if not self.todo:
            return False
        match self.todo[0]:
            case Recv(stage, what, micro_batch, peer):
                name = Name(stage, what, micro_batch)
                if self.later:
                    self.held.setdefault(peer, deque()).append(name)
                else:
                    self.posted[name] = len(self.ops)
            case Send(stage, what, micro_batch, _):
                self.sent[Name(stage, what, micro_batch)] = len(self.ops)
            case Op() | UnitOp() as op:
                name = self.needs(op)
                if name is not None:
                    held = self.held.get(self.programs.placement[name.stage], deque())
                    while name not in self.posted:
                        self.posted[held.popleft()] = len(self.ops)
                idle = self.done == len(self.ops) and arrived >= self.sent.keys() | self.posted.keys()
                if op.kind not in self.loaded and not idle:
                    return False
                self.loaded.add(op.kind)
                self.ops.append(name)
        self.todo.popleft()
        return True


def _ends(programs: Programs, ranks: int, later: bool) -> bool:
    """Whether a step ends."""
    all_ranks = [_Rank(r, programs, later) for r in range(ranks)]
    arrived: set[Name] = set()
    while True:
        moved = False
        for rank in all_ranks:
            moved |= rank.issue(arrived)
            while rank.done < len(rank.ops) and (rank.ops[rank.done] is None or rank.ops[rank.done] in arrived):
                rank.done += 1
                moved = True
        for sender in all_ranks:
            for name, after in sender.sent.items():
                receiver = next((r for r in all_ranks if name in r.posted), None)
                ready = receiver is not None and sender.done >= after and receiver.done >= receiver.posted[name]
                if ready and name not in arrived:
                    arrived.add(name)
                    moved = True
        if not moved:
            return not any(rank.todo for rank in all_ranks)


@pytest.mark.parametrize("micro_batches", [4, 8])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_first_step_ends_whatever_the_schedule(schedule: str, ranks: int, micro_batches: int) -> None:
    if schedule == "interleaved" and micro_batches % ranks:
        pytest.skip("it needs a multiple of the ranks")
    assert _ends(lowered(build(schedule, ranks, micro_batches)), ranks, later=True)


def test_receives_that_are_posted_ahead_would_stop_it() -> None:
    """Two ranks under 1f1b: the first gradient is waited for before the first forward's kernel is loaded."""
    assert not _ends(lowered(build("1f1b", 2, 4)), 2, later=False)


def test_a_receive_is_posted_when_its_message_is_needed() -> None:
    group: Any = _Group()
    receiver = DirectReceiver(FORM, 0, group, 0, _pool(), blocking=False)
    for m in range(3):
        receiver.post(act(m), later=True)
    assert not group.calls
    assert receiver.left == [act(0), act(1), act(2)]
    second = receiver.take(act(1), 1.0)  # the first one comes before it
    assert [torch.equal(x, second) or x is second for _, x, _ in group.calls][-1]
    assert len(group.calls) == 2
    assert receiver.take(act(0), 1.0) is group.calls[0][1]
    receiver.take(act(2), 1.0)
    assert receiver.left == []
