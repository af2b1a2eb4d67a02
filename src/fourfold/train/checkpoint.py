"""Checkpoints: a set of pieces, so that one saved under any plan opens under any other.

A rank's state maps each serial tensor that it holds a part of to a list of (box in the tensor, view of local memory). torch's
distributed checkpoint (DCP) writes these, up to four files per rank (checkpoint_files.py), and refuses gaps and overlaps, so
every save is complete. One of a piece's copies is written; replicas share the work. A rank reads the boxes that its own layout
needs.

    checkpoints/step-000040/
        __0_0.distcp …      tensors: <name>, optim.exp_avg.<name>, optim.exp_avg_sq.<name>
        index.json          where each part of each tensor lies (checkpoint_index.py)
        .metadata           DCP's index, for other tools; never read here
        state.json          step, updates, data state
        complete.json       written last: every file with its size and SHA-256

A directory without `complete.json` is an incomplete save; it is never opened, and a later save removes it. When a run resumes, a
checkpoint that does not verify is renamed to `damaged-step-000040`, and the previous one is used.

[Note: no code, no path from a file]
Only tensors are unpickled, by torch's `weights_only=True`, from archives whose sizes were checked first. File names in a
checkpoint have one component and name regular files, never links. Only directories named `step-<number>` in the checkpoints
folder are deleted, whatever a file contains.

[Note: saving while training continues]
With `mode = "async"` a save first copies the rank's pieces to host memory, then a thread writes them, communicating over a
separate process group. One save is in flight at a time; the next one, or the end of the run, waits for it and raises its error.
"""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from fourfold import files, schema
from fourfold.errors import CheckpointError, ConfigError, FileError
from fourfold.piece import Box, intersect, offset_box, shape_of
from fourfold.train.checkpoint_files import FileWriter, HostCopies
from fourfold.train.checkpoint_folder import (
    STATE,
    STEP,
    check_state,
    complete,
    describe,
    doomed,
    in_threads,
    is_file,
    newest,
    read_state,
    remove,
    set_aside,
    steps_in,
    verify,
)
from fourfold.train.checkpoint_index import (
    INDEX,
    MARKER,
    OLD_INDEX,
    Index,
    StoredChunk,
    StoredTensor,
    dump_index,
    read_index,
)
from fourfold.train.dcp import read_tensor
from fourfold.train.holdings import Chunks, Holding, chunks_of, holding_of, narrow
from fourfold.train.remote import RemoteFolder, fetch, publish

if TYPE_CHECKING:
    from fourfold.train.loop import Loop

__all__ = [
    "Checkpointer",
    "ChunkPlanner",
    "Holding",
    "check_state",
    "complete",
    "doomed",
    "download_newest",
    "holding_of",
    "load",
    "newest",
    "open_newest",
    "read_box",
    "read_state",
    "remove",
    "resume",
    "tensor_types",
    "verify",
]

T = TypeVar("T")

warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)  # DCP on one process


class ChunkPlanner(DefaultSavePlanner):
    """Lets DCP save Chunks by name; a chunk that several ranks hold is written once."""

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


def tensor_types(directory: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Serial tensors in a checkpoint: shape and dtype by name."""
    return {n: (torch.Size(t.shape), _dtype(t.dtype)) for n, t in read_index(directory).items()}


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


# ---- the newest that verifies ----


def open_newest(checkpoints: Path, group: dist.ProcessGroup | None = None) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and a line about each newer one that does not; ranks of `group` call it together.

    One that does not verify is renamed to `damaged-<its name>`, never deleted. If none verifies, nothing is renamed and
    CheckpointError is raised: starting from the beginning is the user's decision.
    """
    rank, ranks = _place(group)
    found = _together(lambda: complete(checkpoints), group)
    bad: list[tuple[Path, list[str]]] = []
    for _, path in reversed(found):
        problems = [p for each in _exchange(verify(path, rank, ranks), group) for p in each]
        if not problems:
            return path, _together(lambda: [set_aside(p, found) for p, found in bad], group)
        bad.append((path, problems))
    if bad:
        raise CheckpointError(
            f"{checkpoints}: no checkpoint verifies: {'; '.join(p for _, problems in bad for p in problems[:1])}. "
            "Move them away to start from the beginning"
        )
    return None, []


# ---- loading ----


def load(
    directory: Path,
    holdings: Sequence[Holding],
    *,
    group: dist.ProcessGroup | None = None,
    check: bool = True,
) -> dict[str, Any]:
    """Fill the holdings from a complete checkpoint and return its state; ranks of `group` call it together.

    With `check`, the ranks first verify the checksum of every file; each rank checks some of them.
    """
    rank, ranks = _place(group)
    if check:
        problems = [p for found in _exchange(verify(directory, rank, ranks), group) for p in found]
        if problems:
            raise CheckpointError(f"{'; '.join(problems)}. Delete {directory} to resume from the checkpoint before it")

    def fill() -> dict[str, Any]:
        state = read_state(directory)
        _fill(directory, read_index(directory), chunks_of(holdings))
        return state

    problem, state = None, dict[str, Any]()
    try:
        state = fill()
    except CheckpointError as e:
        problem = str(e)
    for at, found in enumerate(_exchange(problem, group)):
        if found is not None:
            raise CheckpointError(f"{found} (rank {at})" if ranks > 1 else found)
    return state


def download_newest(
    remote: RemoteFolder, checkpoints: Path, group: dist.ProcessGroup | None, share: int = 0, shares: int = 1
) -> list[str]:
    """Download the newest remote checkpoint that verifies; ranks of `group` call it together. Returns a line per damaged one.

    The `shares` ranks of a host each download some of the files; existing local files are only compared.
    """
    lines: list[str] = []
    names = [name for _, name in _together(remote.complete, group)]
    for name in reversed(names):
        problem = None
        try:
            fetch(remote, name, checkpoints, share, shares)
        except (CheckpointError, FileError, OSError) as e:
            problem = str(e)
        problems = [p for p in _exchange(problem, group) if p is not None]
        if not problems:
            if share == 0:
                publish(remote, name, checkpoints)
            _exchange(None, group)  # wait until all hosts have it
            return lines
        if not any("is damaged" in p or "is missing" in p or ": damaged" in p for p in problems):
            raise CheckpointError(problems[0])  # the store is unreachable, or the disk is full
        _together(lambda name=name: remote.set_aside(name), group)  # type: ignore[misc]
        lines.append(f"{problems[0]}; set aside")
    if names:
        raise CheckpointError(
            f"{remote.url}: no checkpoint verifies: {lines[0]}. Move them away to start from the beginning"
        )
    return lines


def resume(
    loop: Loop,
    checkpoints: Path,
    group: dist.ProcessGroup | None,
    console: IO[str] | None = None,
    downloaded: Sequence[str] = (),
) -> int:
    """Fill the loop's state from the newest checkpoint that verifies, if there is one; returns the number of steps done.

    `downloaded`: lines about remote checkpoints, from `download_newest`.
    """
    directory, lines = open_newest(checkpoints, group)
    lines = [*downloaded, *lines]
    if directory is None:
        return 0
    for line in lines if loop.info.rank == 0 else ():
        print(f"{line}; resuming from {directory.name}", file=console, flush=True)
    state = load(directory, loop.holdings(), group=group, check=False)
    check_state(state, directory)
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


def read_box(directory: Path, index: Index, name: str, box: Box) -> Tensor:
    """A box of one serial tensor of a checkpoint."""
    stored = index[name]
    chunks = Chunks(stored.shape, _dtype(stored.dtype))
    out = torch.empty(shape_of(box), dtype=chunks.dtype)
    chunks.views[torch.Size(a for a, _ in box)] = out
    _fill(directory, index, {name: chunks})
    return out


def _fill(directory: Path, index: Index, wanted: Mapping[str, Chunks]) -> None:
    """Fill the views from the files; each file is opened once and read in order, up to four at a time."""
    reads: dict[str, list[tuple[StoredChunk, StoredTensor, list[tuple[Box, Box, Tensor]]]]] = {}
    for name, chunks in wanted.items():
        stored = index.get(name)
        if stored is None:
            raise CheckpointError(f"{directory}: the checkpoint has no tensor '{name}'{schema.nearest(name, index)}")
        if stored.shape != tuple(chunks.shape):
            raise CheckpointError(
                f"{directory}: '{name}' is {list(stored.shape)} in the checkpoint and {list(chunks.shape)} in the model"
            )
        for chunk in stored.chunks:
            copies = []
            for offset, view in chunks.views.items():
                mine = tuple((o, o + n) for o, n in zip(offset, view.shape, strict=True))
                common = intersect(mine, chunk.box)
                if common is not None:
                    zero = tuple((0, n) for n in view.shape), tuple((0, n) for n in chunk.shape)
                    inside = offset_box(common, mine, zero[0]), offset_box(common, chunk.box, zero[1])
                    copies.append((*inside, view))
            if copies:
                reads.setdefault(chunk.file, []).append((chunk, stored, copies))

    def read(job: tuple[str, list[Any]]) -> None:
        file, parts = job
        with files.open_for_reading(directory / file, CheckpointError, follow=False) as f:
            for chunk, stored, copies in sorted(parts, key=lambda part: part[0].at):
                tensor = read_tensor(f, chunk, _dtype(stored.dtype), directory / file, CheckpointError)
                for to, source, view in copies:
                    narrow(view, to).copy_(narrow(tensor, source))

    in_threads(read, reads.items())


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)


def _exchange(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's value, on every rank."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _together(action: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Rank 0 calls `action`; all ranks return its result, or raise its error."""
    result, problem = None, None
    if _place(group)[0] == 0:
        try:
            result = action()
        except (CheckpointError, FileError) as e:
            problem = str(e)
        except OSError as e:
            problem = f"{e.filename or 'a file'}: {files.why(e)}"
    result, problem = _exchange((result, problem), group)[0]
    if problem is not None:
        raise CheckpointError(problem)
    return result


# ---- saving ----


class Checkpointer:
    """Saves a rank's holdings; ranks of `group` (a separate gloo group) call every method together.

    One holder of each piece writes it (`Holding.writes`). After each save the newest `keep` complete checkpoints and those of
    every `keep_every`-th step are kept; the others are removed.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 2,
        keep_every: int = 0,
        background: bool = False,
        group: dist.ProcessGroup | None = None,
        remote: RemoteFolder | None = None,
        prunes: bool = False,
        local_ranks: int = 1,
    ):
        self.directory, self.background, self.group, self.remote = directory, background, group, remote
        self.keep, self.keep_every = keep, keep_every
        self.prunes = prunes or group is None
        """With `remote`: one rank of every host removes old local copies."""
        self.rank = _place(group)[0]
        self._copies, self._told = HostCopies(local_ranks), False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._finished: list[Path] = []

    def save(self, step: int, holdings: Sequence[Holding], state: Mapping[str, Any], *, last: bool = False) -> None:
        """Save as step-<step>; `finished` returns it once complete.

        The `last` save is synchronous and makes no copy, as is one for whose copy the host has no room.
        """
        self.wait()
        path = self.directory / f"step-{step:06d}"
        owned = chunks_of(holdings, written=True)
        if not self.background or last:
            self._write(path, owned, state)
            return
        views = {(name, at): view for name, chunks in owned.items() for at, view in chunks.views.items()}
        if missing := self._copies.missing(views):
            if not self._told:
                print(f"training waits for saves, as with checkpoint.mode = 'sync': {missing}", flush=True)
            self._told = True
            self._write(path, owned, state)
            return
        for name, chunks in owned.items():
            chunks.views = {at: self._copies.copy((name, at), view) for at, view in chunks.views.items()}
        self._copies.finish()
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

    def _guarded(self, path: Path, owned: dict[str, Chunks], state: Mapping[str, Any]) -> None:
        try:
            self._write(path, owned, state)
        except BaseException as e:  # raised by wait()
            self._error = e

    def _write(self, path: Path, owned: dict[str, Chunks], state: Mapping[str, Any]) -> None:
        """Write tensors, index, state, then the marker; rank 0 coordinates. A failed save leaves no new files."""
        size = sum(view.nbytes for chunks in owned.values() for view in chunks.views.values())
        try:
            _together(lambda: self._clear(path), self.group)
            writer = FileWriter(path)
            metadata = dcp.save(
                owned,
                storage_writer=writer,
                planner=ChunkPlanner(),
                process_group=self.group,
                no_dist=self.group is None,
            )
            listed = {name: info for each in _exchange(writer.written, self.group) for name, info in each.items()}
            _together(lambda: self._finish(path, metadata, listed, state), self.group)
        except (dcp.CheckpointException, CheckpointError, OSError) as e:
            why = _root_cause(e, path, size)
            if self.rank == 0:
                shutil.rmtree(path, ignore_errors=True)
            last = newest(self.directory)
            kept = f"; the last complete checkpoint is {last}" if last else ""
            raise CheckpointError(f"{path}: cannot be saved: {why}{kept}") from None
        if self.remote is not None:
            self._upload(path, self.remote)
        self._finished.append(path)

    def _upload(self, path: Path, remote: RemoteFolder) -> None:
        """Every rank uploads its own files, then rank 0 the marker; then older local copies are removed."""
        name, problem = path.name, None
        try:
            _together(lambda: remote.clear(name), self.group)
            mine = sorted(path.glob(f"__{self.rank}_*.distcp"))
            for file in mine + ([path / n for n in (OLD_INDEX, INDEX, STATE)] if self.rank == 0 else []):
                remote.upload(file, name)
        except (CheckpointError, OSError) as e:
            problem = str(e)
        problems = [f"{p} (rank {r})" for r, p in enumerate(_exchange(problem, self.group)) if p is not None]
        if problems:
            raise CheckpointError(f"{problems[0]}; the checkpoint is complete in {path}")
        _together(lambda: self._publish(path, remote), self.group)
        for number, old in steps_in(self.directory) if self.prunes else ():
            if f"step-{number:06d}" != name and number < int(name.removeprefix("step-")):
                remove(old)

    def _publish(self, path: Path, remote: RemoteFolder) -> None:
        if (self.directory.parent / "config.json").is_file():
            remote.upload_run(self.directory.parent)
        remote.upload_marker(path, path.name)
        for old in remote.doomed(self.keep, self.keep_every):
            remote.remove(old)

    def _clear(self, path: Path) -> None:
        """Make an empty folder; an incomplete save of this step, or a link, is removed first."""
        self.directory.mkdir(parents=True, exist_ok=True)
        files.check_not_link(self.directory, CheckpointError)
        if os.path.lexists(path):
            remove(path)
        path.mkdir()

    def _finish(self, path: Path, metadata: Metadata, listed: dict[str, Any], state: Mapping[str, Any]) -> None:
        files.write_json(path / INDEX, dump_index(_index_of(metadata)), CheckpointError, indent=None)
        files.write_json(path / STATE, dict(state), CheckpointError)
        for name in (OLD_INDEX, INDEX, STATE):
            listed[name] = describe(path / name)
        files.write_json(path / MARKER, {"version": 2, "files": listed}, CheckpointError)
        files.sync_folder(self.directory)
        for old in doomed(self.directory, self.keep, self.keep_every):
            remove(old)
        step = STEP.fullmatch(path.name)
        for number, partial in steps_in(self.directory):
            if step and number < int(step[1]) and not is_file(partial / MARKER):
                remove(partial)


def _index_of(metadata: Metadata) -> Index:
    """Our index, from DCP's metadata of a save."""
    out: Index = {}
    for name, stored in metadata.state_dict_metadata.items():
        chunks = []
        for part in stored.chunks:  # type: ignore[union-attr]
            info = metadata.storage_data[MetadataIndex(name, part.offsets)]
            chunks.append(
                StoredChunk(tuple(part.offsets), tuple(part.sizes), info.relative_path, info.offset, info.length)
            )
        dtype = str(stored.properties.dtype).removeprefix("torch.")  # type: ignore[union-attr]
        out[name] = StoredTensor(dtype, tuple(stored.size), tuple(chunks))  # type: ignore[union-attr]
    return out


def _root_cause(error: BaseException, path: Path, size: int) -> str:
    """Why a save failed, as a sentence; torch reports a full disk as a failed assertion about a position in a file."""
    rank, cause = "", error
    if isinstance(error, dcp.CheckpointException):
        number, (cause, _) = next(iter(error.failures.items()))
        rank = f" (rank {number})"
    if isinstance(cause, OSError):
        return files.why(cause) + rank
    text = " ".join(str(cause).split())
    if "PytorchStreamWriter" in text or "inline_container" in text or "unexpected pos" in text:
        try:
            free = shutil.disk_usage(path).free
        except FileNotFoundError:  # rank 0 has removed the folder, and freed its space
            return f"no space left on the disk, or it refused the data{rank}"
        except OSError as e:
            return files.why(e) + rank
        if free < size:
            return f"no space left on the disk: {schema.format_bytes(free)} are free{rank}"
        return f"the disk refused the data{rank}"
    return text[:300] + rank
