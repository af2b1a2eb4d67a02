"""Tensors in distributed checkpoints of torch (DCP) that others wrote: shapes and types by name, boxes on demand.

A DCP folder has files of tensors, `__<rank>_<n>.distcp`, and an index, `.metadata`, which is a pickle. It is read by an unpickler
that knows the dozen classes such an index is made of and refuses anything else, and file names in it must be plain names. Tensors
are read with `weights_only=True`. No process group is needed; a rank reads the chunks that its boxes touch.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fourfold.errors import ConfigError
from fourfold.piece import Box, intersect, shape_of

__all__ = ["DTYPES", "Source", "open_dcp"]

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of weights, as safetensors spells them."""
LONGEST_INDEX = 1 << 30
"""Bytes."""


class Source(Protocol):
    """Stored tensors: shape and type by name, and boxes of them."""

    path: Path

    @property
    def tensors(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]: ...

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor; it may be a view of a mapped file: copy it."""
        ...


_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise ConfigError(f"it names {module}.{name}, which no index of tensors needs; refused")


class _Dcp:
    def __init__(self, path: Path, metadata: Any):
        self.path = path
        self.tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._chunks: dict[str, list[tuple[Box, Any]]] = defaultdict(list)
        sizes: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
        for name, stored in metadata.state_dict_metadata.items():
            if hasattr(stored, "chunks") and stored.properties.dtype in DTYPES.values():
                self.tensors[name] = tuple(stored.size), stored.properties.dtype
                sizes[name] = {tuple(c.offsets): tuple(c.sizes) for c in stored.chunks}
        for index, info in metadata.storage_data.items():
            if index.fqn not in self.tensors:
                continue
            file = str(info.relative_path)
            if Path(file).name != file or getattr(info, "transform_descriptors", None):
                raise ConfigError(f"it names the file {file!r}; refused")
            if not (path / file).is_file():
                raise ConfigError(f"it names {file}, which is not there")
            offset = tuple(index.offset) if index.offset is not None else (0,) * len(self.tensors[index.fqn][0])
            box = tuple((a, a + n) for a, n in zip(offset, sizes[index.fqn][offset], strict=True))
            self._chunks[index.fqn].append((box, info))

    def read(self, name: str, box: Box) -> Tensor:
        out, filled = torch.empty(shape_of(box), dtype=self.tensors[name][1]), 0
        for held, info in self._chunks[name]:
            common = intersect(held, box)
            if common is None:
                continue
            with (self.path / info.relative_path).open("rb") as f:
                f.seek(info.offset)
                stored = io.BytesIO(f.read(info.length))
            chunk = torch.load(stored, map_location="cpu", weights_only=True)
            inside = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, held, strict=True))
            at = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, box, strict=True))
            out[at] = chunk[inside]
            filled += math.prod(shape_of(common))
        if filled != out.numel():
            raise ConfigError(f"{self.path}: has {filled} of {out.numel()} elements of a part of {name}")
        return out


def open_dcp(path: Path) -> Source:
    """The floating-point tensors of a DCP folder; raises ConfigError for an index that is damaged or not to be trusted."""
    index = path / ".metadata"
    if index.stat().st_size > LONGEST_INDEX:
        raise ConfigError(f"{index}: longer than {LONGEST_INDEX} bytes")
    try:
        return _Dcp(path, _Unpickler(io.BytesIO(index.read_bytes())).load())
    except ConfigError as e:
        raise ConfigError(f"{index}: {e}") from None
    except Exception as e:  # a damaged pickle raises anything
        raise ConfigError(f"{index}: damaged: {type(e).__name__}: {e}") from None
