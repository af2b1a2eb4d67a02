"""Reads tensors from torch distributed checkpoints (DCP) written by other tools: shapes and types by name, boxes on demand.

A DCP folder has files of tensors, `__<rank>_<n>.distcp`, and an index, `.metadata`, which is a pickle. It is not unpickled but
interpreted into inert values (index.py, [Note: old checkpoints]), and file names in it have one component. Tensors
lie in the archives of `torch.save`, uncompressed: the rows that are wanted are read from where they lie, and only an unusual
archive goes through `torch.load`, with `weights_only=True`. No process group is needed; a rank reads rows that overlap its boxes.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol, Self

import torch
from torch import Tensor

from fourfold import files
from fourfold.checkpoint.index import FileInfo, Index, StoredChunk, check_index, parse_dcp_index, saved_tensor
from fourfold.errors import ConfigError
from fourfold.piece import Box, intersect, shape_of

__all__ = ["DTYPES", "DamagedError", "FileReader", "Source", "bytes_of", "open_dcp", "read_rows"]

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of weights, as safetensors spells them."""
LONGEST_INDEX = 1 << 30
"""Bytes."""
LONGEST_PICKLE = 1 << 16
"""Bytes of the record of a saved tensor that is not its data."""
LARGEST_READ = 1 << 30
"""Bytes; Linux reads at most 2 GiB at once."""


class Source(Protocol):
    """Stored tensors: shape and type by name, and boxes of them."""

    path: Path

    @property
    def tensors(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]: ...

    def read(self, name: str, box: Box, scratch: Tensor | None = None) -> Tensor:
        """A box of a tensor; it may be a view of a mapped file, or of `scratch` (bytes of CPU memory): copy it."""
        ...


class _Dcp:
    def __init__(self, path: Path, index: Index):
        self.path = path
        self._index = {n: t for n, t in index.items() if getattr(torch, t.dtype) in DTYPES.values()}
        self.tensors = {n: (t.shape, getattr(torch, t.dtype)) for n, t in self._index.items()}

    def read(self, name: str, box: Box, scratch: Tensor | None = None) -> Tensor:
        out, filled = torch.empty(shape_of(box), dtype=self.tensors[name][1]), 0
        for chunk in self._index[name].chunks:
            held, common = chunk.box, intersect(chunk.box, box)
            if common is None:
                continue
            (first, last), *_ = [(a - o, b - o) for (a, b), (o, _) in zip(common, held, strict=True)] or [(0, 1)]
            with files.open_for_reading(self.path / chunk.file, ConfigError) as f:
                try:
                    stored = read_rows(FileReader(f.fileno(), self.path / chunk.file), chunk, out.dtype, (first, last))
                except DamagedError as e:
                    raise ConfigError(str(e)) from None
            inside = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common[1:], held[1:], strict=True))
            inside = (slice(None), *inside) if common else ()
            at = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, box, strict=True))
            out[at] = stored[inside]
            filled += math.prod(shape_of(common))
        if filled != out.numel():
            raise ConfigError(f"{self.path}: has {filled} of {out.numel()} elements of a part of {name}")
        return out


class _FilePart(io.RawIOBase):
    """A range of a file as a file of its own."""

    def __init__(self, handle: int, start: int, size: int):
        self.handle, self.start, self.size, self.at = handle, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = max(0, offset + {0: 0, 1: self.at, 2: self.size}[whence])
        return self.at

    def readinto(self, into: Any) -> int:
        count = os.preadv(self.handle, [memoryview(into)[: max(0, self.size - self.at)]], self.start + self.at)
        self.at += count
        return count


def data_at(handle: int, chunk: StoredChunk, dtype: torch.dtype) -> int | None:
    """The byte of a file at which the elements of a chunk lie, row after row; None if only `torch.load` can tell.

    Reads what `torch.save` writes around a contiguous tensor: an archive's index and a short pickle, which is interpreted into
    inert values.
    """
    try:
        part = _FilePart(handle, chunk.at, chunk.bytes)
        with zipfile.ZipFile(part) as archive:
            (pickled,) = (r for r in archive.infolist() if r.filename.endswith("/data.pkl"))
            (data,) = (r for r in archive.infolist() if r.filename.endswith("/data/0"))
            (order,) = (r for r in archive.infolist() if r.filename.endswith("/byteorder"))
            if pickled.file_size > LONGEST_PICKLE or order.file_size > LONGEST_PICKLE or data.compress_type:
                return None
            if archive.read(order) != sys.byteorder.encode() or data.file_size != chunk.elements * dtype.itemsize:
                return None
            if saved_tensor(archive.read(pickled)) != (str(dtype).removeprefix("torch."), chunk.shape):
                return None
            part.seek(data.header_offset)
            header = part.read(30) or b""
        at = data.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return chunk.at + at if at + data.file_size <= chunk.bytes else None
    except Exception:  # zipfile raises a dozen kinds for damaged bytes; torch.load will name the damage
        return None


def load_tensor(data: IO[bytes], chunk: StoredChunk, dtype: torch.dtype) -> Tensor:
    """A chunk as `torch.save` wrote it: a zip archive of uncompressed records, so it needs no more memory than disk."""
    with zipfile.ZipFile(data) as archive:
        records = archive.infolist()
    stored = all(r.compress_type == zipfile.ZIP_STORED for r in records)
    if not stored or sum(r.file_size for r in records) > chunk.bytes:
        raise ValueError("a record is compressed")
    data.seek(0)
    try:
        tensor = torch.load(data, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # torch's text recommends to run it
        raise ValueError("its pickle holds more than a tensor, maybe code; it was not run") from None
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != chunk.shape or tensor.dtype != dtype:
        raise ValueError("it is not the tensor that the index says")
    return tensor


def read_rows(
    file: FileReader, chunk: StoredChunk, dtype: torch.dtype, rows: tuple[int, int], into: Tensor | None = None
) -> Tensor:
    """Rows of a chunk (of a scalar: all of it). `into`: a contiguous CPU tensor that may take them, and is then returned."""
    shape = (rows[1] - rows[0], *chunk.shape[1:]) if chunk.shape else ()
    try:
        at = data_at(file.handle, chunk, dtype)
        if at is None:
            whole = bytearray(chunk.bytes)
            file.read(chunk.at, memoryview(whole))
            tensor = load_tensor(io.BytesIO(whole), chunk, dtype)
            return tensor[slice(*rows)] if chunk.shape else tensor
        out = torch.empty(shape, dtype=dtype) if into is None else into
        if out.numel():
            file.read(at + rows[0] * math.prod(chunk.shape[1:]) * dtype.itemsize, bytes_of(out))
    except Exception as e:  # torch raises a dozen kinds for damaged bytes
        why = files.why(e) if isinstance(e, OSError) else " ".join(str(e).split())[:200]
        raise DamagedError(f"{file.path}: damaged at byte {chunk.at}: {why or type(e).__name__}") from None
    return out


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class DamagedError(ValueError):
    """Bytes of a file are not what they should be."""


class FileReader:
    """Reads ranges of an open file."""

    def __init__(self, handle: int, path: Path):
        self.handle, self.path = handle, path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        """The caller closes the file."""

    def read(self, at: int, into: memoryview) -> None:
        while into:
            count = os.preadv(self.handle, [into[:LARGEST_READ]], at)
            if count == 0:
                raise ValueError(f"the file ends at byte {at}")
            at, into = at + count, into[count:]


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
