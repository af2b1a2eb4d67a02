"""The collectives the project uses: one name on every supported torch, and errors that say who waited for what.

Every call names what it is for. A peer that died or hangs ends the wait with `CommunicationError` (within the group's timeout
at the latest), whose message has that name; torch's own would only say that some connection closed.

NCCL serves GPUs. On CPUs gloo serves small tensors, and larger ones go by rings over gloo's messages (ring.py): ranks decide
by the size, so all alike. A ring is no collective of torch's; the op `fourfold::collective`, which does nothing, tells of it
those who watch ops.

(2.13 renamed `all_gather_into_tensor` and `reduce_scatter_tensor`; nothing else here depends on the version.)

The second half waits for its results, and can be captured by torch.compile: it then is torch's functional collectives.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.errors import CommunicationError
from fourfold.ring import Lane, lane_for, plain

__all__ = [
    "Pending",
    "all_gather",
    "all_reduce",
    "broadcast",
    "broadcasted",
    "exchanged",
    "gathered",
    "reduce",
    "reduce_scatter",
    "reduced",
    "scattered",
    "summed",
]

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_library = torch.library.Library("fourfold", "DEF")
_library.define("collective(str kind, Tensor whole, Tensor mine, str group_name, int root_rank) -> ()")
_library.impl("collective", lambda kind, whole, mine, group_name, root_rank: None, "CompositeExplicitAutograd")


class _Work(Protocol):
    def wait(self) -> object: ...


class Pending:
    """A collective under way. `wait` makes its result usable by what follows (CPU: blocks; CUDA: orders streams)."""

    def __init__(self, work: _Work | None, what: str):
        self._work, self._what = work, what

    def wait(self) -> None:
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as e:
                raise CommunicationError(f"waited in vain for {self._what}: {plain(e)}") from e
            self._work = None


def all_gather(out: Tensor, mine: Tensor, group: dist.ProcessGroup, what: str) -> Pending:
    """Start: out [ranks · n] = every rank's mine [n], in rank order. Receives (ranks - 1) · n elements."""
    if lane := _lane("all_gather", out, mine, group):
        return Pending(lane.all_gather(out, mine, what), what)
    return _start(_all_gather, out, mine, group=group, what=what)


def reduce_scatter(out: Tensor, whole: Tensor, group: dist.ProcessGroup, what: str) -> Pending:
    """Start: out [n] = this rank's part of the sum over ranks of whole [ranks · n]. Receives (ranks - 1) · n elements."""
    if lane := _lane("reduce_scatter", whole, out, group):
        return Pending(lane.reduce_scatter(out, whole, what), what)
    return _start(_reduce_scatter, out, whole, group=group, what=what)


def all_reduce(x: Tensor, group: dist.ProcessGroup, what: str) -> Pending:
    """Start: x [n] = the sum over ranks of x. Receives 2 (ranks - 1) / ranks · n elements."""
    if lane := _lane("all_reduce", x, x, group):
        return Pending(lane.all_reduce(x, what), what)
    return _start(dist.all_reduce, x, group=group, what=what)


def broadcast(x: Tensor, source: int, group: dist.ProcessGroup, what: str) -> Pending:
    """Start: x = that of the rank `source` of the group. The others receive |x| elements."""
    if lane := _lane("broadcast", x, x, group, source):
        return Pending(lane.broadcast(x, source, what), what)
    return _start(dist.broadcast, x, group=group, what=what, group_src=source)


def reduce(x: Tensor, target: int, group: dist.ProcessGroup, what: str) -> Pending:
    """Start: x = the sum over ranks of x, on the rank `target` of the group; elsewhere of no use. Receives |x| elements."""
    if lane := _lane("reduce", x, x, group, target):
        return Pending(lane.reduce(x, target, what), what)
    return _start(dist.reduce, x, group=group, what=what, group_dst=target)


def _start(call: object, *tensors: Tensor, group: dist.ProcessGroup, what: str, **options: object) -> Pending:
    try:
        return Pending(call(*tensors, group=group, async_op=True, **options), what)  # type: ignore[operator]
    except RuntimeError as e:
        raise CommunicationError(f"could not start {what}: {plain(e)}") from e


def _lane(kind: str, whole: Tensor, mine: Tensor, group: dist.ProcessGroup, root: int = 0) -> Lane | None:
    """The lane for a collective, which is told to those who watch; None: torch's own serves."""
    lane = lane_for(group, whole)
    if lane is not None:
        torch.ops.fourfold.collective(kind, whole, mine, group.group_name, root)
    return lane


# ---- waited for; may be captured ----

_functional = torch.ops._c10d_functional


def gathered(x: Tensor, group: dist.ProcessGroup, what: str) -> Tensor:
    """[ranks · a, …]: every rank's x [a, …], in rank order. Receives (ranks - 1) |x| elements."""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return _done(_functional.all_gather_into_tensor(x, group.size(), group.group_name))
    out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    all_gather(out, x, group, what).wait()
    return out


def scattered(x: Tensor, group: dist.ProcessGroup, what: str) -> Tensor:
    """[a, …]: this rank's part of the sum over ranks of x [ranks · a, …]. Receives (ranks - 1) / ranks · |x| elements."""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return _done(_functional.reduce_scatter_tensor(x, "sum", group.size(), group.group_name))
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    reduce_scatter(out, x, group, what).wait()
    return out


def summed(x: Tensor, group: dist.ProcessGroup, what: str, op: str = "sum") -> Tensor:
    """The sum (or with op "max" the largest) over ranks of x. Receives 2 (ranks - 1) / ranks · |x| elements."""
    if torch.compiler.is_compiling():
        return _done(_functional.all_reduce(x.contiguous(), op, group.group_name))
    out = x.clone(memory_format=torch.contiguous_format)
    if op == "sum":
        all_reduce(out, group, what).wait()
    else:
        _start(dist.all_reduce, out, group=group, what=what, op=dist.ReduceOp.MAX).wait()
    return out


def exchanged(x: Tensor, group: dist.ProcessGroup, what: str) -> Tensor:
    """[ranks · a, …]: part r of x [ranks · a, …] goes to rank r. Receives (ranks - 1) / ranks · |x| elements."""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        sizes = [x.shape[0] // group.size()] * group.size()
        return _done(_functional.all_to_all_single(x, sizes, sizes, group.group_name))
    out = torch.empty_like(x)
    if lane := _lane("all_to_all", out, x, group):
        lane.exchange(out, x, what).wait()
    else:
        _start(dist.all_to_all_single, out, x, group=group, what=what).wait()
    return out


def broadcasted(x: Tensor, source: int, group: dist.ProcessGroup, what: str) -> Tensor:
    """x of the rank `source` of the group; other ranks' x only tells the shape. They receive |x| elements."""
    out = x.contiguous() if group.rank() == source else torch.empty_like(x, memory_format=torch.contiguous_format)
    broadcast(out, source, group, what).wait()
    return out


def reduced(x: Tensor, target: int, group: dist.ProcessGroup, what: str) -> Tensor:
    """The sum over ranks of x, on rank `target`; elsewhere what is left is of no use. Receives |x| elements (a chain)."""
    out = x.clone(memory_format=torch.contiguous_format)
    reduce(out, target, group, what).wait()
    return out


def _done(x: Tensor) -> Tensor:
    return _functional.wait_tensor(x)
