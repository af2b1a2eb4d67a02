"""A ledger of communication: every collective and message a rank issues, in order, with its bytes.

    with Ledger() as ledger:
        train_step()
    ledger.calls("all_gather")          # how often
    ledger.bytes("all_gather")          # payload of all of them
    ledger.received                     # bytes this rank must receive, by the cost model below
    rich.print(ledger)                  # a table

It records everything that goes through `torch.distributed`, synchronous or not: collectives on one tensor or on lists,
coalesced ones, object collectives (collectives on bytes), point-to-point messages, DDP's and FSDP2's buckets, DTensor's
functional collectives; and our ring collectives, each as the collective that it implements. Other threads of a rank must enter
the ledger themselves (op_watch.py). The overhead is about 6 µs per op.

Received bytes are those of the bandwidth-optimal algorithm (rings and chains) on one of n ranks, so that a formula can be
checked exactly. A backend may transfer more (gloo's broadcast sends log2 n copies from the root, its reduce-scatter transfers an
all-reduce); `testing/network.py` counts the bytes on the interface. S is the payload, s = S / n one rank's part:

    kind              payload S                         received
    all_reduce        the tensor                        2 (n - 1) / n · S         reduce-scatter, then all-gather
    all_gather        the gathered output               S - s
    reduce_scatter    the whole input                   S - s
    all_to_all        this rank's output                S - what it sends to itself
    broadcast         the tensor                        S, and 0 on the root
    reduce            the tensor                        S, and 0 on the rank after the root, where the chain starts
    gather            all parts together                S - s on the root, 0 elsewhere
    scatter           all parts together                s, and 0 on the root
    send              the message                       0
    recv              the message                       S                         also recv_any_source
    barrier           0                                 0

Lists of unequal parts are counted by their actual sizes. An op of `torch.distributed` that is not in the table raises an error,
so that nothing is left out silently. (Symmetric-memory kernels are not such ops and are not seen.)
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from fourfold.testing._torch import named_arguments, process_group
from fourfold.testing.op_watch import OpWatch

__all__ = ["Entry", "Ledger", "received_bytes"]


class Entry(NamedTuple):
    """One call: its kind, the process group's name and size, payload and received bytes (all_reduce: may be a fraction)."""

    kind: str
    group: str
    ranks: int
    payload: int
    received: Fraction


class Ledger(OpWatch):
    """The communication of the threads that entered it; `entries` has every call, in the order of issue."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []

    def calls(self, kind: str | None = None, group: dist.ProcessGroup | None = None) -> int:
        """Number of calls, of one kind or all, in one group or all."""
        return sum(1 for _ in self._select(kind, group))

    def bytes(self, kind: str | None = None, group: dist.ProcessGroup | None = None) -> int:
        """Total payload in bytes, selected as in `calls`."""
        return sum(entry.payload for entry in self._select(kind, group))

    def received_bytes(self, kind: str | None = None, group: dist.ProcessGroup | None = None) -> float:
        """Bytes that this rank must receive, selected as in `calls`; a fraction if an all-reduce does not divide evenly."""
        return float(sum(entry.received for entry in self._select(kind, group)))

    @property
    def received(self) -> float:
        """Bytes that this rank must receive in total."""
        return self.received_bytes()

    def clear(self) -> None:
        """Remove all entries."""
        self.entries.clear()

    def rows(self) -> list[dict[str, Any]]:
        """The summary as plain data: one row for each kind and group size."""
        keys = sorted({(entry.kind, entry.ranks) for entry in self.entries})
        rows = []
        for kind, ranks in keys:
            mine = [entry for entry in self.entries if (entry.kind, entry.ranks) == (kind, ranks)]
            row = {"kind": kind, "ranks": ranks, "calls": len(mine), "bytes": sum(e.payload for e in mine)}
            rows.append(row | {"received": float(sum(e.received for e in mine))})
        return rows

    def __rich__(self) -> Table:
        table = Table(title="communication of this rank")
        for column in ("kind", "ranks", "calls", "payload bytes", "received bytes"):
            table.add_column(column, justify="left" if column == "kind" else "right")
        for row in self.rows():
            table.add_row(row["kind"], *(f"{row[c]:,.0f}" for c in ("ranks", "calls", "bytes", "received")))
        table.add_section()
        table.add_row("all", "", f"{self.calls():,}", f"{self.bytes():,}", f"{self.received:,.0f}")
        return table

    def op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = op(*args, **kwargs)
        if op.namespace in _NAMESPACES and op.name() not in _SILENT:
            self.entries.append(_entry(op.name(), named_arguments(op, args, kwargs) | {"result": result}))
        return result

    def _select(self, kind: str | None, group: dist.ProcessGroup | None) -> Iterator[Entry]:
        for entry in self.entries:
            if kind in (None, entry.kind) and (group is None or group.group_name == entry.group):
                yield entry


def received_bytes(kind: str, *, ranks: int, whole: int, mine: int = 0, after_root: int = 0) -> Fraction:
    """Bytes that one rank must receive, by the table above. `mine` is its own part of `whole`, in bytes; `after_root` is
    (rank - root) mod ranks."""
    match kind:
        case "all_reduce":
            return Fraction(2 * (ranks - 1) * whole, ranks)
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return Fraction(whole - mine)
        case "broadcast":
            return Fraction(whole if after_root else 0)
        case "reduce":
            return Fraction(0 if after_root == 1 % ranks else whole)
        case "gather":
            return Fraction(0 if after_root else whole - mine)
        case "scatter":
            return Fraction(mine if after_root else 0)
        case "recv" | "recv_any_source":
            return Fraction(whole)
        case "send" | "barrier":
            return Fraction(0)
    raise ValueError(f"unknown collective {kind!r}")


class _CollectiveOp(NamedTuple):
    """How to read an op: its kind, and the arguments (or "result") that hold the whole and this rank's part of it."""

    kind: str
    whole: str = ""
    mine: str = ""


_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor", "fourfold")
_SILENT = (
    "c10d::check_for_nan",
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
    "fourfold::put_off_weight_grad",
    "fourfold::put_off_weight_grad_at",
)

_OPS = {
    "c10d::allreduce_": _CollectiveOp("all_reduce", "tensors"),
    "c10d::allreduce_coalesced_": _CollectiveOp("all_reduce", "tensors"),
    "c10d::allgather_": _CollectiveOp("all_gather", "output_tensors", "input_tensors"),
    "c10d::allgather_coalesced_": _CollectiveOp("all_gather", "output_lists", "input_list"),
    "c10d::_allgather_base_": _CollectiveOp("all_gather", "output_tensor", "input_tensor"),
    "c10d::allgather_into_tensor_coalesced_": _CollectiveOp("all_gather", "outputs", "inputs"),
    "c10d::reduce_scatter_": _CollectiveOp("reduce_scatter", "input_tensors", "output_tensors"),
    "c10d::_reduce_scatter_base_": _CollectiveOp("reduce_scatter", "input_tensor", "output_tensor"),
    "c10d::reduce_scatter_tensor_coalesced_": _CollectiveOp("reduce_scatter", "inputs", "outputs"),
    "c10d::alltoall_": _CollectiveOp("all_to_all", "output_tensors"),
    "c10d::alltoall_base_": _CollectiveOp("all_to_all", "output"),
    "c10d::broadcast_": _CollectiveOp("broadcast", "tensors"),
    "c10d::reduce_": _CollectiveOp("reduce", "tensors"),
    "c10d::gather_": _CollectiveOp("gather", mine="input_tensors"),
    "c10d::scatter_": _CollectiveOp("scatter", mine="output_tensors"),
    "c10d::send": _CollectiveOp("send", "tensors"),
    "c10d::recv_": _CollectiveOp("recv", "tensors"),
    "c10d::recv_any_source_": _CollectiveOp("recv_any_source", "tensors"),
    "c10d::barrier": _CollectiveOp("barrier"),
    "c10d::monitored_barrier_": _CollectiveOp("barrier"),
    "_c10d_functional::all_reduce": _CollectiveOp("all_reduce", "input"),
    "_c10d_functional::all_reduce_": _CollectiveOp("all_reduce", "input"),
    "_c10d_functional::all_reduce_coalesced": _CollectiveOp("all_reduce", "inputs"),
    "_c10d_functional::all_reduce_coalesced_": _CollectiveOp("all_reduce", "inputs"),
    "_c10d_functional::all_gather_into_tensor": _CollectiveOp("all_gather", "result", "input"),
    "_c10d_functional::all_gather_into_tensor_out": _CollectiveOp("all_gather", "result", "input"),
    "_c10d_functional::all_gather_into_tensor_coalesced": _CollectiveOp("all_gather", "result", "inputs"),
    "_c10d_functional::reduce_scatter_tensor": _CollectiveOp("reduce_scatter", "input", "result"),
    "_c10d_functional::reduce_scatter_tensor_out": _CollectiveOp("reduce_scatter", "input", "result"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": _CollectiveOp("reduce_scatter", "inputs", "result"),
    "_c10d_functional::all_to_all_single": _CollectiveOp("all_to_all", "result"),
    "_c10d_functional::broadcast": _CollectiveOp("broadcast", "input"),
    "_c10d_functional::broadcast_": _CollectiveOp("broadcast", "input"),
    "_c10d_functional::isend": _CollectiveOp("send", "tensor"),
    "_c10d_functional::irecv": _CollectiveOp("recv", "tensor"),
    "_dtensor::shard_dim_alltoall": _CollectiveOp("all_to_all", "result"),
    "fourfold::collective": _CollectiveOp("kind", "whole", "mine"),  # its kind is an argument
}


def _entry(name: str, given: dict[str, Any]) -> Entry:
    if name not in _OPS:
        raise NotImplementedError(f"{name} is not in the ledger's table: its bytes would go uncounted")
    kind, whole_name, mine_name = _OPS[name]
    kind = given.get(kind, kind)
    group = process_group(given["process_group"] if "process_group" in given else given["group_name"])
    ranks, rank = group.size(), group.rank()
    whole, mine = _nbytes(given.get(whole_name)), _nbytes(given.get(mine_name))
    if kind in ("gather", "scatter"):  # the list of parts is the root's alone; parts are equal
        whole = ranks * mine
    elif kind == "all_to_all":
        mine = _to_itself(given[whole_name], given.get("output_split_sizes"), rank, ranks)
    root = given.get("root_rank", given.get("src", 0))
    received = received_bytes(kind, ranks=ranks, whole=whole, mine=mine, after_root=(rank - root) % ranks)
    return Entry(kind, group.group_name, ranks, whole, received)


def _to_itself(output: Any, splits: list[int] | None, rank: int, ranks: int) -> int:
    """The part of an all-to-all's output that is not sent."""
    if not isinstance(output, Tensor):
        return _nbytes(output[rank])
    if splits:
        return _nbytes(output) * splits[rank] // max(1, sum(splits))
    return _nbytes(output) // ranks


def _nbytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_nbytes(v) for v in value or ())
