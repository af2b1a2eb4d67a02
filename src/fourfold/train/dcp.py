"""Reads tensors from torch distributed checkpoints (DCP) written by other tools: shapes and types by name, boxes on demand.

A DCP folder has files of tensors, `__<rank>_<n>.distcp`, and an index, `.metadata`, which is a pickle. It is not unpickled but
interpreted into inert values (checkpoint_index.py, [Note: old checkpoints]), and file names in it have one component. Tensors
are read with `weights_only=True`. No process group is needed; a rank reads the chunks that overlap its boxes.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Protocol

import torch
from torch import Tensor

from fourfold import files
from fourfold.errors import ConfigError, FourfoldError
from fourfold.piece import Box, intersect, shape_of
from fourfold.train.checkpoint_index import FileInfo, Index, StoredChunk, check_index, parse_dcp_index

__all__ = ["DTYPES", "Source", "open_dcp", "read_tensor"]

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


class _Dcp:
    def __init__(self, path: Path, index: Index):
        self.path = path
        self._index = {n: t for n, t in index.items() if getattr(torch, t.dtype) in DTYPES.values()}
        self.tensors = {n: (t.shape, getattr(torch, t.dtype)) for n, t in self._index.items()}

    def read(self, name: str, box: Box) -> Tensor:
        out, filled = torch.empty(shape_of(box), dtype=self.tensors[name][1]), 0
        for chunk in self._index[name].chunks:
            held, common = chunk.box, intersect(chunk.box, box)
            if common is None:
                continue
            with files.open_for_reading(self.path / chunk.file, ConfigError) as f:
                stored = read_tensor(f, chunk, out.dtype, self.path / chunk.file, ConfigError)
            inside = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, held, strict=True))
            at = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, box, strict=True))
            out[at] = stored[inside]
            filled += math.prod(shape_of(common))
        if filled != out.numel():
            raise ConfigError(f"{self.path}: has {filled} of {out.numel()} elements of a part of {name}")
        return out


def read_tensor(f: IO[bytes], chunk: StoredChunk, dtype: torch.dtype, path: Path, error: type[FourfoldError]) -> Tensor:
    """A chunk as `torch.save` wrote it: a zip archive of uncompressed records, so it needs no more memory than disk."""
    try:
        f.seek(chunk.at)
        data = io.BytesIO(f.read(chunk.bytes))
        with zipfile.ZipFile(data) as archive:
            records = archive.infolist()
        stored = all(r.compress_type == zipfile.ZIP_STORED for r in records)
        if not stored or sum(r.file_size for r in records) > chunk.bytes:
            raise ValueError("a record is compressed")
        data.seek(0)
        tensor = torch.load(data, map_location="cpu", weights_only=True)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != chunk.shape or tensor.dtype != dtype:
            raise ValueError("it is not the tensor that the index says")
    except Exception as e:  # zipfile and torch raise a dozen kinds for damaged bytes
        why = files.why(e) if isinstance(e, OSError) else " ".join(str(e).split())[:200]
        raise error(f"{path}: damaged at byte {chunk.at}: {why or type(e).__name__}") from None
    return tensor


def open_dcp(path: Path) -> Source:
    """The floating-point tensors of a DCP folder; raises ConfigError for a damaged or untrustworthy index."""
    file = path / ".metadata"
    data = files.read_bytes(file, ConfigError, most=LONGEST_INDEX)
    try:
        index = parse_dcp_index(data, tensors_alone=True)
        for chunk in (c for t in index.values() for c in t.chunks):
            if not files.is_plain_name(chunk.file):
                raise ValueError(f"it names the file {str(chunk.file)[:100]!r}; refused")
            if not (path / chunk.file).is_file():
                raise ValueError(f"it names {chunk.file}, which is not there")
        check_index(index, {p.name: FileInfo(p.stat().st_size, "") for p in path.iterdir() if p.is_file()})
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, OverflowError, OSError) as e:
        raise ConfigError(f"{file}: damaged: {' '.join(str(e).split())[:300] or type(e).__name__}") from None
    return _Dcp(path, index)
