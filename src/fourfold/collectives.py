"""The collectives the project uses: one name on every supported torch, and errors that say who waited for what.

Every call names what it is for. A peer that died or hangs ends the wait with `CommunicationError` (within the group's timeout
at the latest), whose message has that name; torch's own would only say that some connection closed.

(2.13 renamed `all_gather_into_tensor` and `reduce_scatter_tensor`; nothing else here depends on the version.)
"""

from __future__ import annotations

import re

import torch.distributed as dist
from torch import Tensor

from fourfold.errors import CommunicationError

__all__ = ["Pending", "all_gather", "all_reduce", "reduce_scatter"]

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective under way. `wait` makes its result usable by what follows (CPU: blocks; CUDA: orders streams)."""

    def __init__(self, work: dist.Work | None, what: str):
        self._work, self._what = work, what

    def wait(self) -> None:
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as e:
                raise CommunicationError(f"waited in vain for {self._what}: {_plain(e)}") from e
            self._work = None


def all_gather(out: Tensor, mine: Tensor, group: dist.ProcessGroup, what: str) -> Pending:
    """Start: out [ranks · n] = every rank's mine [n], in rank order. Receives (ranks - 1) · n elements."""
    return _start(_all_gather, out, mine, group=group, what=what)


def reduce_scatter(out: Tensor, whole: Tensor, group: dist.ProcessGroup, what: str) -> Pending:
    """Start: out [n] = this rank's part of the sum over ranks of whole [ranks · n]. Receives (ranks - 1) · n elements."""
    return _start(_reduce_scatter, out, whole, group=group, what=what)


def all_reduce(x: Tensor, group: dist.ProcessGroup, what: str) -> Pending:
    """Start: x [n] = the sum over ranks of x. Receives 2 (ranks - 1) / ranks · n elements."""
    return _start(dist.all_reduce, x, group=group, what=what)


def _start(call: object, *tensors: Tensor, group: dist.ProcessGroup, what: str) -> Pending:
    try:
        return Pending(call(*tensors, group=group, async_op=True), what)  # type: ignore[operator]
    except RuntimeError as e:
        raise CommunicationError(f"could not start {what}: {_plain(e)}") from e


def _plain(error: RuntimeError) -> str:
    """gloo's message without the place in its source and its advice."""
    return re.sub(r"^\[\S+\.cc:\d+\] ", "", str(error)).split(". This is typically")[0].splitlines()[0]
