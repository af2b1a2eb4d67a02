"""The private torch names that this package uses, in one place: NCCL communicators, fake groups, the default group's store,
records of DCP, the order of attention kernels.

`_get_backend`, `eager_connect_single_device` and `_comm_ptr` exist in 2.11, 2.12 and 2.13; the list of process groups is the
one that `torch.distributed` itself looks groups up in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "communicator",
    "default_store",
    "fake_store",
    "make_communicator",
    "process_groups",
    "set_attention_order",
    "stored_at",
]


def make_communicator(group: dist.ProcessGroup, device: torch.device) -> None:
    """Make a group's communicator now, unless it has one; all members call it. Messages of the group use it from then on."""
    if communicator(group, device):
        return
    backend: Any = group._get_backend(device)
    backend.eager_connect_single_device(device)


def communicator(group: dist.ProcessGroup, device: torch.device) -> int | None:
    """The address of a group's communicator; 0: not made yet; None: the group does not use NCCL."""
    try:
        backend: Any = group._get_backend(device)
    except RuntimeError:  # no backend for this device
        return None
    return int(backend._comm_ptr()) if hasattr(backend, "_comm_ptr") else None


def process_groups() -> list[dist.ProcessGroup]:
    """Every process group that this process has made, in order."""
    return list(dist.distributed_c10d._world.pg_map)


def fake_store() -> Any:
    """The store of a group of backend "fake", whose collectives return at once; importing it registers the backend."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def set_attention_order(kernels: Sequence[Any]) -> None:
    """The order in which `scaled_dot_product_attention` tries its kernels; those left out keep their places after them."""
    first = [int(kernel) for kernel in kernels]
    rest = [kernel for kernel in torch._C._get_sdp_priority_order() if kernel not in first]
    torch._C._set_sdp_priority_order(first + rest)


def stored_at(file: str, offset: int, length: int) -> Any:
    """DCP's record of where a tensor lies in a checkpoint's files."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def default_store() -> dist.Store:
    """The rendezvous store of the default process group."""
    return dist.distributed_c10d._get_default_store()
