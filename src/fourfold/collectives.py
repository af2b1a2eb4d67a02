"""The collectives of the project: one interface for every supported torch, with errors that name what was waited for.

Every call takes a description (`what`). If a peer died or hangs, the wait ends with `CommunicationError` (within the group's
timeout at the latest), and its message contains that description; torch's own would only say that a connection was closed.
`now=True`: the caller waits at once, which saves waking another thread.

GPU tensors use NCCL. On CPUs, small tensors use gloo's collectives and larger ones ring algorithms over gloo messages (ring.py);
the choice depends on the size alone, so all ranks agree. A ring is dispatched as one op, `fourfold::collective`, so that tools
which trace ops see it instead of its messages. Asynchronous sums over three or more ranks always use gloo: its all-reduce
moves as many bytes as a ring, two of them run at a time, and they do not need the interpreter.

Collectives are called on the group directly: a layer on the grid issues about twenty, and torch's wrappers take as long as
starting one (and some have other names in 2.13).

The functions in the second half return results that are complete. torch.compile can capture them, as functional collectives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    ReduceOptions,
    ReduceScatterOptions,
)

from fourfold.errors import CommunicationError
from fourfold.record import RECORD, Ticket
from fourfold.ring import Job, Lane, lane_for, plain

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


class _Work(Protocol):
    def wait(self) -> object: ...


_gathers, _scatters, _sums = AllgatherOptions(), ReduceScatterOptions(), AllreduceOptions()


_here = threading.local()  # `start`: what the op below calls in this thread; `job`: its result


def _collective(kind: str, whole: Tensor, mine: Tensor, group_name: str, root_rank: int) -> None:
    _here.job = _here.start()


_library = torch.library.Library("fourfold", "DEF")
_library.define("collective(str kind, Tensor whole, Tensor mine, str group_name, int root_rank) -> ()")
_library.impl("collective", _collective, "CompositeExplicitAutograd")
_op = torch.ops.fourfold.collective.default


class Pending:
    """A collective in progress. After `wait` its result may be used (CPU: blocks; CUDA: orders streams)."""

    __slots__ = ("_on_device", "_ticket", "_work")

    def __init__(self, work: _Work | None, what: str, ticket: Ticket | None = None, on_device: bool = False):
        self._work, self._ticket, self._on_device = work, ticket or Ticket(what), on_device

    def wait(self) -> None:
        if self._work is not None:
            RECORD.wait(self._ticket)
            try:
                self._work.wait()
            except RuntimeError as e:
                raise CommunicationError(f"failed waiting for {self._ticket.what}: {plain(e)}") from e
            RECORD.done(self._ticket, on_device=self._on_device)
            self._work = None


def all_gather(out: Tensor, mine: Tensor, group: dist.ProcessGroup, what: str, *, now: bool = False) -> Pending:
    """Start: out [ranks · n] = every rank's mine [n], in rank order. Receives (ranks - 1) · n elements."""
    if (lane := lane_for(group, out)) is None:
        return _start(group._allgather_base, (out, mine, _gathers), group, what, "all_gather", out)
    return _by_ring(lane, lambda: lane.all_gather(out, mine, what, now), group, what, "all_gather", out, mine, now=now)


def reduce_scatter(out: Tensor, whole: Tensor, group: dist.ProcessGroup, what: str, *, now: bool = False) -> Pending:
    """Start: out [n] = this rank's part of the sum over ranks of whole [ranks · n]. Receives (ranks - 1) · n elements."""
    if (lane := lane_for(group, whole)) is None:
        return _start(group._reduce_scatter_base, (out, whole, _scatters), group, what, "reduce_scatter", whole)
    return _by_ring(
        lane, lambda: lane.reduce_scatter(out, whole, what, now), group, what, "reduce_scatter", whole, out, now=now
    )


def all_reduce(x: Tensor, group: dist.ProcessGroup, what: str, *, now: bool = False) -> Pending:
    """Start: x [n] = the sum over ranks of x. Receives 2 (ranks - 1) / ranks · n elements."""
    if (lane := lane_for(group, x, overlapped=not now)) is None:
        return _start(group.allreduce, ([x], _sums), group, what, "all_reduce", x)
    return _by_ring(lane, lambda: lane.all_reduce(x, what, now), group, what, "all_reduce", x, x, now=now)


def broadcast(x: Tensor, source: int, group: dist.ProcessGroup, what: str, *, now: bool = False) -> Pending:
    """Start: x = that of the rank `source` of the group. The others receive |x| elements."""
    if (lane := lane_for(group, x)) is None:
        options = BroadcastOptions()
        options.rootRank = source
        return _start(group.broadcast, ([x], options), group, what, "broadcast", x)
    return _by_ring(lane, lambda: lane.broadcast(x, source, what, now), group, what, "broadcast", x, x, source, now=now)


def reduce(x: Tensor, target: int, group: dist.ProcessGroup, what: str, *, now: bool = False) -> Pending:
    """Start: x = the sum over ranks of x, on the rank `target` of the group; undefined elsewhere. Receives |x| elements."""
    if (lane := lane_for(group, x)) is None:
        options = ReduceOptions()
        options.rootRank = target
        return _start(group.reduce, ([x], options), group, what, "reduce", x)
    return _by_ring(lane, lambda: lane.reduce(x, target, what, now), group, what, "reduce", x, x, target, now=now)


def _start(
    call: Callable[..., _Work | None],
    arguments: tuple[object, ...],
    group: dist.ProcessGroup,
    what: str,
    kind: str,
    whole: Tensor,
) -> Pending:
    RECORD.waiting = ticket = RECORD.start(group, what, kind, whole.nbytes)  # the host may block in the call, too
    try:
        work = call(*arguments)
    except RuntimeError as e:
        raise CommunicationError(f"could not start {what}: {plain(e)}") from e
    RECORD.waiting = None
    return Pending(work, what, ticket, whole.is_cuda)


def _by_ring(
    lane: Lane,
    start: Callable[[], Job],
    group: dist.ProcessGroup,
    what: str,
    kind: str,
    whole: Tensor,
    mine: Tensor,
    root: int = 0,
    *,
    now: bool = False,
) -> Pending:
    ticket = RECORD.start(group, what, kind, whole.nbytes)
    RECORD.waiting = ticket  # a lane whose caller waits at once does it in this call
    ticket.begun = ticket.issued if now else None
    _here.start = start
    _op(kind, whole, mine, lane.name, root)
    job = _here.job
    del _here.start, _here.job
    RECORD.waiting = None
    return Pending(job, what, ticket)


# ---- complete results; may be captured by torch.compile ----

_functional = torch.ops._c10d_functional


def gathered(x: Tensor, group: dist.ProcessGroup, what: str) -> Tensor:
    """[ranks · a, …]: every rank's x [a, …], in rank order. Receives (ranks - 1) |x| elements."""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return _done(_functional.all_gather_into_tensor(x, group.size(), group.group_name))
    out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    all_gather(out, x, group, what, now=True).wait()
    return out


def scattered(x: Tensor, group: dist.ProcessGroup, what: str) -> Tensor:
    """[a, …]: this rank's part of the sum over ranks of x [ranks · a, …]. Receives (ranks - 1) / ranks · |x| elements."""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return _done(_functional.reduce_scatter_tensor(x, "sum", group.size(), group.group_name))
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    reduce_scatter(out, x, group, what, now=True).wait()
    return out


def summed(x: Tensor, group: dist.ProcessGroup, what: str, op: str = "sum") -> Tensor:
    """The sum (or with op "max" the largest) over ranks of x. Receives 2 (ranks - 1) / ranks · |x| elements."""
    if torch.compiler.is_compiling():
        return _done(_functional.all_reduce(x.contiguous(), op, group.group_name))
    out = x.clone(memory_format=torch.contiguous_format)
    if op == "sum":
        all_reduce(out, group, what, now=True).wait()
    else:
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        _start(group.allreduce, ([out], options), group, what, "all_reduce", out).wait()
    return out


def exchanged(x: Tensor, group: dist.ProcessGroup, what: str) -> Tensor:
    """[ranks · a, …]: part r of x [ranks · a, …] goes to rank r. Receives (ranks - 1) / ranks · |x| elements."""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        sizes = [x.shape[0] // group.size()] * group.size()
        return _done(_functional.all_to_all_single(x, sizes, sizes, group.group_name))
    out = torch.empty_like(x)
    if (lane := lane_for(group, out)) is None:
        arguments = (out, x, None, None, group, True)
        _start(dist.all_to_all_single, arguments, group, what, "all_to_all", x).wait()
    else:
        _by_ring(lane, lambda: lane.exchange(out, x, what, True), group, what, "all_to_all", out, x, now=True).wait()
    return out


def broadcasted(x: Tensor, source: int, group: dist.ProcessGroup, what: str) -> Tensor:
    """x of the rank `source` of the group; other ranks' x only gives the shape. They receive |x| elements."""
    out = x.contiguous() if group.rank() == source else torch.empty_like(x, memory_format=torch.contiguous_format)
    broadcast(out, source, group, what, now=True).wait()
    return out


def reduced(x: Tensor, target: int, group: dist.ProcessGroup, what: str) -> Tensor:
    """The sum over ranks of x, on rank `target`; undefined elsewhere. Receives |x| elements (a chain)."""
    out = x.clone(memory_format=torch.contiguous_format)
    reduce(out, target, group, what, now=True).wait()
    return out


def _done(x: Tensor) -> Tensor:
    return _functional.wait_tensor(x)
