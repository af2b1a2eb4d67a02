"""A weight used on two ranks: the embedding's on the first stage, tied to the head on the last.

The rank of the embedding owns the weight: it holds the optimizer state, counts it in the gradient norm and writes it to
checkpoints. The rank of the head has a copy of the embedding's unit, sharded the same way, whose parameter the head uses. In
each step the copy's gradient is sent to the owner, which adds it once, after its own; after the update the owner sends the new
weights, each shard to the rank with the same shard of the copy. The two are therefore always equal, and there is one set of
optimizer state.

Per step and rank of N shards: V·D elements of the reduce dtype one way, V·D / N of the compute dtype the other. The two ranks
have a separate process group, connected before the first step (train/connect.py): a send never waits for the receiver's call.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.errors import CommunicationError
from fourfold.record import RECORD, Ticket
from fourfold.shard.unit import Unit

__all__ = ["TiedCopy", "TiedOwner"]


class _Verbs:
    """The operations of a unit that a program calls; the reduction also exchanges the tied weight."""

    def __init__(self, unit: Unit, group: dist.ProcessGroup, name: str):
        self.unit, self.group, self.name = unit, group, name
        self.peer = 1 - dist.get_rank(group)  # torch numbers its two members by rank, and either may be the owner
        self._sending: list[tuple[dist.Work, Tensor]] = []
        self._staged = "nccl" not in str(dist.get_backend_config(group))  # gloo sends only from host memory

    def gather(self) -> None:
        self.unit.gather()

    def release(self) -> None:
        self.unit.release()

    def _send(self, tensor: Tensor, what: str) -> None:
        tensor = tensor.cpu() if self._staged else tensor
        if (trace := RECORD.trace) is not None:
            peer = dist.get_global_rank(self.group, self.peer)
            trace.add("send", f"{what} of {self.name}", trace.mark(), size=tensor.nbytes, peer=peer)
        work = dist.isend(tensor, group=self.group, group_dst=self.peer)
        assert work is not None
        self._sending.append((work, tensor))

    def _receive(self, tensor: Tensor, what: str) -> Tensor:
        into = torch.empty_like(tensor, device="cpu") if self._staged and tensor.is_cuda else tensor
        peer = dist.get_global_rank(self.group, self.peer)
        ticket = RECORD.wait(Ticket(f"{what} of {self.name}", peer=peer, size=into.nbytes))
        try:
            dist.recv(into, group=self.group, group_src=self.peer)
        except RuntimeError as e:
            raise CommunicationError(f"failed waiting for {what} of {self.name} from rank {peer}: {e}") from e
        RECORD.done(ticket, on_device=into.is_cuda)
        return tensor if into is tensor else tensor.copy_(into)

    def flush(self) -> None:
        """Wait until everything has been sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending = []


class TiedOwner(_Verbs):
    """The embedding's unit: its reduction first takes the copy's gradient; `publish` sends the new weights."""

    @torch.no_grad()
    def reduce(self) -> None:
        self.flush()  # the weights that were sent after the last update
        mine = self.unit.main_grad(self.name)
        mine.add_(self._receive(torch.empty_like(mine), "the gradient"))
        self.unit.reduce()

    def publish(self) -> None:
        """After the update: send the new weights to the copy."""
        self._send(self.unit.shard.detach(), "the new value")


class TiedCopy(_Verbs):
    """The head's unit that is reduced last; its projection is the parameter of `copy`, whose gradient goes to the owner."""

    def __init__(self, unit: Unit, copy: Unit, group: dist.ProcessGroup, name: str):
        super().__init__(unit, group, name)
        self.copy = copy

    def reduce(self) -> None:
        self.copy.collect()
        self._send(self.copy.main_grad(self.name), "the gradient")
        self.copy.zero_grad()
        self.unit.reduce()

    @torch.no_grad()
    def publish(self) -> None:
        """After the update: receive the new weights from the owner, which has received the gradient."""
        self.flush()
        self._receive(self.copy.shard, "the new value")
