"""Checkpoints: a set of pieces, so that one saved under any plan opens under any other.

A rank's state is, for every serial tensor it holds a part of, a list of (place in it, view of local memory). torch's
distributed checkpoint (DCP) stores these, one file per rank, and reads back whatever boxes another layout asks for; it
refuses gaps and overlaps, which proves every save complete. Of a piece's copies one is written; replicas share the work.

    checkpoints/step-000040/
        __0_0.distcp …      tensors: <name>, optim.exp_avg.<name>, optim.exp_avg_sq.<name>
        .metadata           DCP's index
        state.json          step, updates, data state
        complete.json       written last: every file with its size and SHA-256

A directory without `complete.json` is a save that did not finish; it is never opened, and is removed by a later save.

[Note: nothing is unpickled]
DCP's index is a pickle. It is read by an unpickler that knows the dozen classes such an index is made of and refuses
anything else, and file names in it must be plain names. Tensors are read with `weights_only=True`. All the rest is JSON.

[Note: saving while training goes on]
With `mode = "async"` a save first copies the rank's own pieces to host memory, then a thread writes them, talking over its
own process group. One save is in flight at a time; the next one, or the end of the run, waits for it and raises its error.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fourfold import schema
from fourfold.errors import CheckpointError, ConfigError
from fourfold.piece import Box, Piece, parts_of_range, shape_of, whole
from fourfold.shard.layout import FlatLayout, Slot

if TYPE_CHECKING:
    from fourfold.train.loop import Loop

__all__ = ["Checkpointer", "Holding", "holding_of", "load", "newest", "read_state", "resume", "tensor_types"]

MARKER = "complete.json"

warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)  # DCP on one process


@dataclass(frozen=True)
class Holding:
    """A flat buffer of this rank: elements [start, start + len) of a unit's layout, under a prefix of names.

    `place`: the rank's coordinates and the degrees by which copies of its pieces are told apart; None: there are none.
    """

    prefix: str
    flat: Tensor
    start: int
    layout: FlatLayout
    pieces: Mapping[str, tuple[Piece, ...]]
    place: tuple[Mapping[str, int], Mapping[str, int]] | None = None

    def writes(self, piece: Piece) -> bool:
        """Whether this rank is the one of a piece's holders that saves it."""
        return self.place is None or piece.written_at(*self.place)


def holding_of(name: str, tensor: Tensor) -> Holding:
    """A whole serial tensor, held by itself."""
    shape = tuple(tensor.shape)
    layout = FlatLayout((Slot(name, shape, 0, tensor.numel()),), tensor.numel(), 1)
    return Holding("", tensor.detach().view(-1), 0, layout, {name: (whole(name, shape),)})


# ---- pieces as DCP sees them ----


class _Chunks:
    """What this rank holds of one serial tensor."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype):
        self.shape, self.dtype = torch.Size(shape), dtype
        self.views: dict[torch.Size, Tensor] = {}  # by offset in the serial tensor

    def list(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, view.shape) for offset, view in self.views.items()]


def _chunks(holdings: Iterable[Holding], *, written: bool = False) -> dict[str, _Chunks]:
    """What the holdings hold, or what of it this rank writes."""
    out: dict[str, _Chunks] = {}
    for h in holdings:
        stop = h.start + h.flat.numel()
        for slot in h.layout.slots:
            low, high = max(h.start, slot.start), min(stop, slot.stop)
            for part in parts_of_range(slot.shape, h.pieces[slot.name], low - slot.start, high - slot.start):
                if not written or h.writes(part.piece):
                    at = slot.start + part.start - h.start
                    name = h.prefix + part.piece.name
                    chunks = out.setdefault(name, _Chunks(part.piece.global_shape, h.flat.dtype))
                    offset = torch.Size(a for a, _ in part.global_box)
                    chunks.views[offset] = _view(h.flat, at, part.inside, part.within)
    return out


def _view(flat: Tensor, at: int, inside: Box, within: Box) -> Tensor:
    shape = shape_of(inside)
    view = flat[at : at + torch.Size(shape).numel()].view(shape)
    for dim, (a, b) in enumerate(within):
        view = view.narrow(dim, a, b - a)
    return view


class _SavePlanner(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, chunks in self.state_dict.items():
            for i, chunk in enumerate(chunks.list()):
                data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=chunks.dtype), size=chunks.shape)
                items.append(WriteItem(MetadataIndex(name, chunk.offsets, i), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].views[index.offset]


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        # the default deep-copies what it does not know, and would load into the copy
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored, items = self.metadata.state_dict_metadata, []
        for name, chunks in self.state_dict.items():
            if chunks is None:  # DCP hands every rank the union of all names
                continue
            found = stored.get(name)
            if not isinstance(found, TensorStorageMetadata):
                raise CheckpointError(f"the checkpoint has no tensor '{name}'{schema.nearest(name, stored)}")
            if found.size != chunks.shape:
                raise CheckpointError(
                    f"'{name}' is {list(found.size)} in the checkpoint and {list(chunks.shape)} in the model"
                )
            items += create_read_items_for_chunk_list(name, found, chunks.list())
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].views[index.offset]


_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
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
    """[Note: nothing is unpickled]"""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise CheckpointError(
            f"the checkpoint's index names {module}.{name}, which no checkpoint of ours holds; refused"
        )


class _Reader(dcp.FileSystemReader):
    """DCP's reader with an index that cannot run code or point outside its directory."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


def read_metadata(directory: Path) -> Metadata:
    """DCP's index of a checkpoint, safely read."""
    data = (directory / ".metadata").read_bytes()
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        infos = metadata.storage_data.values()
    except CheckpointError:
        raise
    except Exception as e:
        raise CheckpointError(f"{directory / '.metadata'}: damaged: {e}") from None
    for info in infos:
        if Path(info.relative_path).name != info.relative_path or info.transform_descriptors:
            raise CheckpointError(f"{directory / '.metadata'}: names the file '{info.relative_path}'; refused")
    return metadata


def tensor_types(directory: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Serial tensors in a checkpoint: shape and dtype by name."""
    stored = read_metadata(directory).state_dict_metadata
    return {n: (m.size, m.properties.dtype) for n, m in stored.items() if isinstance(m, TensorStorageMetadata)}


# ---- complete or not ----


def newest(checkpoints: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    complete = _complete(checkpoints)
    return complete[-1] if complete else None


def _complete(checkpoints: Path) -> list[Path]:
    return sorted(p.parent for p in checkpoints.glob(f"step-*/{MARKER}"))


def read_state(directory: Path) -> dict[str, Any]:
    """The state that is not tensors."""
    if not (directory / MARKER).is_file():
        raise CheckpointError(f"{directory}: not a complete checkpoint: there is no {MARKER} in it")
    return schema.read(directory / "state.json", CheckpointError)


def verify(directory: Path, share: int = 0, shares: int = 1) -> list[str]:
    """Damaged files among every `shares`-th one, each with what is wrong with it."""
    problems = []
    files = schema.read(directory / MARKER, CheckpointError)["files"]
    for name, expected in sorted(files.items())[share::shares]:
        path = directory / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif (size := path.stat().st_size) != expected["bytes"]:
            problems.append(f"{path} is damaged: {size} bytes instead of {expected['bytes']}")
        elif _sha256(path) != expected["sha256"]:
            problems.append(f"{path} is damaged: its checksum is not the one it was saved with")
    return problems


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _write_synced(path: Path, data: Any) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as f:
        json.dump(data, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    partial.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


# ---- loading ----


def load(
    directory: Path,
    holdings: Sequence[Holding],
    *,
    group: dist.ProcessGroup | None = None,
    check: bool = True,
) -> dict[str, Any]:
    """Fill the holdings from a complete checkpoint and return its state; ranks of `group` call it together.

    With `check`, the ranks first compare every file with its checksum, each a share of the files.
    """
    state = read_state(directory)
    rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
    if check:
        problems = [p for found in _exchange(verify(directory, rank, ranks), group) for p in found]
        if problems:
            raise CheckpointError(f"{'; '.join(problems)}. Delete {directory} to resume from the checkpoint before it")
    read_metadata(directory)  # raises what is wrong with it; some versions of torch only log it
    try:
        dcp.load(
            _chunks(holdings),
            storage_reader=_Reader(directory),
            planner=_LoadPlanner(),
            process_group=group,
            no_dist=group is None,
        )
    except dcp.CheckpointException as e:
        raise CheckpointError(f"{directory}: {_root_cause(e)}") from None
    return state


def resume(loop: Loop, checkpoints: Path, group: dist.ProcessGroup | None) -> int:
    """Fill the loop's state from the newest complete checkpoint, if there is one; returns the steps done."""
    directory = newest(checkpoints)
    if directory is None:
        return 0
    state = load(directory, loop.holdings(), group=group)
    for unit in loop.units:
        loop.optimizer.publish(unit)
    for tie in loop.ties:
        tie.publish()
    loop.optimizer.updates = state["updates"]
    consumed, batch = loop.train_samples.consumed(state["data"]), loop.config.train.global_batch
    if consumed != state["step"] * batch:
        raise ConfigError(f"train.global_batch = {batch} is not the batch this run was started with; it cannot change")
    loop.guard.skipped = state["skipped"]
    loop.saved_step = state["step"]
    return state["step"]


def _exchange(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's value, on every rank."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _root_cause(error: dcp.CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    text = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    return f"{text} (rank {rank})"


# ---- saving ----


class Checkpointer:
    """Saves a rank's holdings every so often; ranks of `group` (a gloo group of its own) call every method together.

    Of the holders of a piece one writes it (`Holding.writes`).
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 2,
        background: bool = False,
        group: dist.ProcessGroup | None = None,
    ):
        self.directory, self.keep, self.background, self.group = directory, keep, background, group
        self.rank = dist.get_rank(group) if group is not None else 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._finished: list[Path] = []

    def save(self, step: int, holdings: Sequence[Holding], state: Mapping[str, Any], *, last: bool = False) -> None:
        """Save as step-<step>; `finished` tells when it is complete. The `last` one runs beside nothing, and copies nothing."""
        self.wait()
        path = self.directory / f"step-{step:06d}"
        owned = _chunks(holdings, written=True)
        if not self.background or last:
            self._write(path, owned, state)
            return
        for chunks in owned.values():
            chunks.views = {offset: view.to("cpu", copy=True) for offset, view in chunks.views.items()}
        self._thread = threading.Thread(target=self._guarded, args=(path, owned, dict(state)), name=f"save-{step}")
        self._thread.start()

    def finished(self) -> list[Path]:
        """Checkpoints that were completed since the last call."""
        found, self._finished = self._finished, []
        return found

    def wait(self) -> None:
        """Wait for the save in flight; raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _guarded(self, path: Path, owned: dict[str, _Chunks], state: Mapping[str, Any]) -> None:
        try:
            self._write(path, owned, state)
        except BaseException as e:  # handed to the caller of wait()
            self._error = e

    def _write(self, path: Path, owned: dict[str, _Chunks], state: Mapping[str, Any]) -> None:
        """Tensors, index, state, then the marker; rank 0 leads. Leaves nothing new behind when it fails."""
        try:
            self._together(lambda: self._clear(path))
            dcp.save(
                owned,
                storage_writer=dcp.FileSystemWriter(path),
                planner=_SavePlanner(),
                process_group=self.group,
                no_dist=self.group is None,
            )
            mine = {p.name: _describe(p) for p in path.glob(f"__{self.rank}_*.distcp")}
            files = {name: info for each in _exchange(mine, self.group) for name, info in each.items()}
            self._together(lambda: self._finish(path, files, state))
            self._finished.append(path)
        except dcp.CheckpointException as e:
            if self.rank == 0:
                shutil.rmtree(path, ignore_errors=True)
            last = newest(self.directory)
            kept = f"; the last complete checkpoint is {last}" if last else ""
            raise CheckpointError(f"{path}: cannot be saved: {_root_cause(e)}{kept}") from None

    def _together(self, action: Callable[[], None]) -> None:
        """Rank 0 acts; all ranks learn how it went."""
        problem: OSError | None = None
        if self.rank == 0:
            try:
                action()
            except OSError as e:
                problem = e
        problem = _exchange(problem, self.group)[0]
        if problem is not None:
            raise dcp.CheckpointException("write", {0: (problem, None)})  # type: ignore[dict-item]

    def _clear(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / MARKER).unlink(missing_ok=True)
        for left in path.iterdir():  # of a save that did not finish
            left.unlink()

    def _finish(self, path: Path, files: dict[str, Any], state: Mapping[str, Any]) -> None:
        _write_synced(path / "state.json", dict(state))
        for name in (".metadata", "state.json"):
            files[name] = _describe(path / name)
        _write_synced(path / MARKER, {"version": 1, "files": files})
        complete = _complete(self.directory)
        for old in complete[: -self.keep]:
            _remove(old)
        for partial in self.directory.glob("step-*"):
            if partial not in complete and partial < path:
                _remove(partial)


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint so that no half of it is ever taken for whole: the marker goes first."""
    (checkpoint / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)
