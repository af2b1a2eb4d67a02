"""The tensor files of a checkpoint: written by several threads, and hashed while they are written, or read.

A rank writes up to four files, `__<rank>_0.distcp` to `__<rank>_3.distcp`, one per `FILE_BYTES` of tensors: many disks take more
from several writers than from one. A file is written in pieces of `PIECE` bytes; while one is written, a second thread hashes it,
so a save takes as long as the slower of the two and nothing is read back. Only large pieces have a thread: below `PIECE` the time
is not worth it. Nothing is buffered here: pieces are views of the tensors.

Files are those of torch's FileSystemWriter, tensor after tensor as `torch.save` writes them, so DCP reads them. Every file is
synced to the disk before `write_data` returns.

Tensors on a GPU are copied to the host one at a time per writer, through page-locked memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fourfold.checkpoint.dcp import FileReader
from fourfold.checkpoint.folder import FILES, PIECE, in_threads
from fourfold.offload.host import available_bytes, page_locked
from fourfold.schema import format_bytes
from fourfold.train._torch import stored_at

__all__ = ["FILE_BYTES", "FileWriter", "HashedReader", "HostCopies"]

FILE_BYTES = 64 << 20
"""Bytes of tensors for which another file is worth its thread."""
MOST_OF_HOST = 0.9
"""Share of the available host memory that copies may take."""


class FileWriter(dcp.FileSystemWriter):
    """DCP's writer of one folder; `written` has size and SHA-256 of every file of this rank, by name.

    `stored` says where every chunk of all ranks is, on the rank that coordinates the save. (DCP's metadata has the same, but
    torch 2.11 puts it in a copy that `dcp.save` does not return.)
    """

    def __init__(self, path: Path, files: int = FILES):
        super().__init__(path)
        self.folder, self.files = path, files
        self.written: dict[str, dict[str, Any]] = {}
        self.stored: dict[MetadataIndex, Any] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        prefix = plan.storage_data.prefix
        jobs = [
            (f"{prefix}{number}.distcp", items) for number, items in enumerate(_dealt(plan.items, self.files)) if items
        ]
        found = in_threads(lambda job: self._write(*job, planner), jobs)
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for results in found for result in results])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.stored = {result.index: result.storage_data for each in results for result in each}
        super().finish(metadata, results)

    def _write(self, name: str, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        results = []
        with _HashedFile(self.folder / name) as file:
            for item in items:
                at = file.at
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                file.save(_on_host(tensor))
                results.append(WriteResult(item.index, file.at - at, stored_at(name, at, file.at - at)))
        self.written[name] = {"bytes": file.at, "sha256": file.hash.hexdigest()}
        return results


def _on_host(tensor: Tensor) -> Tensor:
    """A tensor on the CPU with no more storage than elements: `torch.save` writes all of a storage."""
    tensor = tensor.detach()
    if tensor.device.type == "cuda":
        tensor = _page_locked(tensor).copy_(tensor)
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _page_locked(like: Tensor) -> Tensor:
    """Host memory for a GPU's tensor, until it is written: page-locked, which is faster to copy to, if the system gives it."""
    try:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)
    except RuntimeError:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")


def _dealt(items: Sequence[WriteItem], most: int) -> list[list[WriteItem]]:
    """The items in as many lists of nearly equal size as there are files, in the order of the plan."""
    sizes = {id(item): _bytes(item) for item in items}
    count = max(1, min(most, sum(sizes.values()) // FILE_BYTES, len(items)))
    lists: list[list[WriteItem]] = [[] for _ in range(count)]
    filled = [0] * count
    for item in sorted(items, key=lambda item: -sizes[id(item)]):
        into = filled.index(min(filled))
        lists[into].append(item)
        filled[into] += sizes[id(item)]
    place = {id(item): i for i, item in enumerate(items)}
    return [sorted(part, key=lambda item: place[id(item)]) for part in lists]


def _bytes(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None
    return int(data.chunk.sizes.numel()) * data.properties.dtype.itemsize


class _HashedFile:
    """A file that is hashed while it is written; an error of the disk is raised as it is, not as torch wraps it."""

    def __init__(self, path: Path):
        self.path, self.at, self.hash = path, 0, hashlib.sha256()
        self._handle = -1
        self._beside: ThreadPoolExecutor | None = None
        self._error: OSError | None = None

    def __enter__(self) -> _HashedFile:
        self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                os.fsync(self._handle)
        finally:
            os.close(self._handle)
            if self._beside is not None:
                self._beside.shutdown()

    def save(self, tensor: Tensor) -> None:
        try:
            torch.save(tensor, self)  # type: ignore[arg-type]
        except Exception:
            if self._error is not None:  # torch reports its own failure to finish the archive
                raise self._error from None
            raise

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), PIECE):
                self._write_piece(view[start : start + PIECE])
        except OSError as e:
            self._error = e
            raise
        self.at += len(view)
        return len(view)

    def _write_piece(self, piece: memoryview) -> None:
        if len(piece) < PIECE:
            self.hash.update(piece)
            self._write_all(piece)
            return
        if self._beside is None:
            self._beside = ThreadPoolExecutor(1, thread_name_prefix="hash")
        hashed = self._beside.submit(self.hash.update, piece)
        try:
            self._write_all(piece)
        finally:
            hashed.result()  # the piece is the caller's: it must not be read later

    def _write_all(self, piece: memoryview) -> None:
        while piece:
            piece = piece[os.write(self._handle, piece) :]

    def flush(self) -> None:
        """Nothing is buffered."""


class HashedReader(FileReader):
    """Reads ranges of a file in its order, and hashes all of it meanwhile; every byte is read once.

    A second thread hashes a piece while the next one is read. What is read must stay as it is until `digest`.
    """

    def __init__(self, handle: int, path: Path):
        super().__init__(handle, path)
        self.at, self.hash = 0, hashlib.sha256()
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="hash")
        self._hashing: Any = None
        self._scratch = [bytearray(0), bytearray(0)]

    def read(self, at: int, into: memoryview) -> None:
        assert at >= self.at, "ranges are read in the order of the file"
        self._skip_to(at)
        for start in range(0, len(into), PIECE):
            self._read_piece(into[start : start + PIECE])

    def digest(self, size: int) -> str:
        """SHA-256 of the file of `size` bytes, in hexadecimal."""
        self._skip_to(size)
        self._wait()
        return self.hash.hexdigest()

    def _skip_to(self, at: int) -> None:
        while self.at < at:
            count = min(PIECE, at - self.at)
            if len(self._scratch[0]) < count:
                self._wait()
                self._scratch = [bytearray(count), bytearray(count)]
            self._scratch.reverse()  # the other one may still be hashed
            self._read_piece(memoryview(self._scratch[0])[:count])

    def _read_piece(self, piece: memoryview) -> None:
        super().read(self.at, piece)
        self.at += len(piece)
        self._wait()
        self._hashing = self._beside.submit(self.hash.update, piece)

    def _wait(self) -> None:
        if self._hashing is not None:
            self._hashing.result()
            self._hashing = None

    def __exit__(self, *_: Any) -> None:
        self._wait()
        self._beside.shutdown()


class HostCopies:
    """Copies of tensors for a save that is written later. Those of GPUs keep their page-locked memory for the next save.

    `ranks` of this host copy at the same time.
    """

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        self._kept: dict[Any, Tensor] = {}

    def missing(self, tensors: Mapping[Any, Tensor]) -> str:
        """Why the host has no room for copies of these tensors; empty where it has."""
        new = sum(t.nbytes for key, t in tensors.items() if t.device.type != "cuda" or self._fitting(key, t) is None)
        needed, available = new * self.ranks, available_bytes()
        if needed <= available * MOST_OF_HOST:
            return ""
        return f"a copy needs {format_bytes(needed)} of host memory, and {format_bytes(available)} are available"

    def copy(self, key: Any, tensor: Tensor) -> Tensor:
        """Start a copy; `finish` before it is read."""
        if tensor.device.type != "cuda":
            return tensor.to("cpu", copy=True)
        into = self._fitting(key, tensor)
        if into is None:
            into = self._kept[key] = page_locked(tensor.nbytes, tensor.device).view(tensor.dtype).view(tensor.shape)
        return into.copy_(tensor.detach(), non_blocking=True)

    def finish(self) -> None:
        if self._kept:
            torch.cuda.current_stream().synchronize()

    def _fitting(self, key: Any, tensor: Tensor) -> Tensor | None:
        into = self._kept.get(key)
        return into if into is not None and (into.shape, into.dtype) == (tensor.shape, tensor.dtype) else None
