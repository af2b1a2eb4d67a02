"""The private torch names that this package uses, in one place; each is the same in 2.11, 2.12 and 2.13.

`TorchDispatchMode` is documented but lives in a private module. Collectives reach it as ops of the namespaces `c10d`
(what `torch.distributed` calls issue) and `_c10d_functional` (what DTensor and compiled code issue), with the process group
as an opaque object in the first and by name (or, from 2.13, as itself) in the second.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = [
    "DispatchMode",
    "FakeTensor",
    "backward_node",
    "named_arguments",
    "plain_tensors",
    "process_group",
    "set_default_timeout",
]


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that does not import torch._dynamo: a second and a half in every rank, and half the cost of an op."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def named_arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """An op's arguments by their names in its schema; those left to their defaults are absent."""
    return dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs


def process_group(handle: Any) -> dist.ProcessGroup:
    """The process group behind an argument of a collective op."""
    if isinstance(handle, dist.ProcessGroup):
        return handle
    if isinstance(handle, str):
        name: Any = handle  # an object with a name in 2.13
        return _resolve_process_group(name)
    return dist.ProcessGroup.unbox(handle)


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold memory: a DTensor and the like are wrappers of others."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [plain for part in inner if isinstance(part, Tensor) for plain in plain_tensors(part)]


def backward_node() -> str | None:
    """The autograd node that is being differentiated by this thread, as `MmBackward0`; None outside a backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node.name()


def set_default_timeout(timeout: timedelta) -> None:
    """Set the default timeout of the process groups that this process makes from now on."""
    distributed_c10d.default_pg_timeout = timeout
