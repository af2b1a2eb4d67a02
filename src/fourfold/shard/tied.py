"""A weight that two ranks use: the embedding's on the first stage, tied to the head on the last.

The embedding's rank owns it: it holds the optimizer state, counts it in the norm and writes it to checkpoints. The head's rank
holds a copy of the embedding's unit, sharded alike, from which the head borrows. In a step the copy's gradient goes to the
owner, which adds it once, after its own; after the update the new weights come back, each rank's shard to the rank that holds
the same one. So the two are equal by construction, and memory for the optimizer is paid once.

Per step and rank of N shards: V·D elements of the reduce dtype one way, V·D / N of the compute dtype the other.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.errors import CommunicationError
from fourfold.shard.unit import Unit

__all__ = ["TiedCopy", "TiedOwner"]


class _Verbs:
    """The verbs of a unit, of which the reduction does more."""

    def __init__(self, unit: Unit, group: dist.ProcessGroup, peer: int, name: str):
        self.unit, self.group, self.peer, self.name = unit, group, peer, name
        self._sending: list[tuple[dist.Work, Tensor]] = []
        self._staged = "nccl" not in str(dist.get_backend_config(group))  # gloo sends from host memory alone

    def gather(self) -> None:
        self.unit.gather()

    def release(self) -> None:
        self.unit.release()

    def _send(self, tensor: Tensor) -> None:
        tensor = tensor.cpu() if self._staged else tensor
        work = dist.isend(tensor, group=self.group, group_dst=self.peer)
        assert work is not None
        self._sending.append((work, tensor))

    def _receive(self, tensor: Tensor, what: str) -> Tensor:
        into = torch.empty_like(tensor, device="cpu") if self._staged and tensor.is_cuda else tensor
        try:
            dist.recv(into, group=self.group, group_src=self.peer)
        except RuntimeError as e:
            raise CommunicationError(f"failed waiting for {what} of {self.name}: {e}") from e
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
        self._send(self.unit.shard.detach())


class TiedCopy(_Verbs):
    """The last of the head's units to be reduced; its projection is `copy`'s parameter, whose gradient goes to the owner."""

    def __init__(self, unit: Unit, copy: Unit, group: dist.ProcessGroup, peer: int, name: str):
        super().__init__(unit, group, peer, name)
        self.copy = copy

    def reduce(self) -> None:
        self.copy.collect()
        self._send(self.copy.main_grad(self.name))
        self.copy.zero_grad()
        self.unit.reduce()

    @torch.no_grad()
    def publish(self) -> None:
        """After the update: receive the new weights from the owner, who has the gradient by then."""
        self.flush()
        self._receive(self.copy.shard, "the new value")
