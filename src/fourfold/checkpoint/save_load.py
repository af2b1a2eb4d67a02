"""Checkpoints: a set of pieces, so that one saved under any plan opens under any other.

A rank's state maps each serial tensor that it holds a part of to a list of (box in the tensor, view of local memory). torch's
distributed checkpoint (DCP) writes these, up to four files per rank (tensor_files.py), and refuses gaps and overlaps, so
every save is complete. One of a piece's copies is written; replicas share the work. A rank reads the boxes that its own layout
needs.

    checkpoints/step-000040/
        __0_0.distcp …      tensors: <name>, optim.exp_avg.<name>, optim.exp_avg_sq.<name>
        index.json          where each part of each tensor lies (index.py)
        .metadata           DCP's index, for other tools; never read here
        state.json          step, updates, data state
        complete.json       written last: every file with its size and SHA-256

A directory without `complete.json` is an incomplete save; it is never opened, and a later save removes it. When a run resumes, a
checkpoint that does not verify is renamed to `damaged-step-000040`, and the previous one is used.

[Note: each byte is read once]
A file is hashed while its tensors are read into place, so they are there before the file is verified. Nothing uses them until all
ranks have verified all files: a checkpoint that does not verify is overwritten by the one before it, or ends the run.

[Note: no code, no path from a file]
Elements are read from where they lie in the archives of `torch.save`; an unusual archive is unpickled by torch's
`weights_only=True`, after its sizes were checked. File names in a
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
from dataclasses import dataclass
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
from fourfold.checkpoint.dcp import DamagedError, FileReader, read_rows
from fourfold.checkpoint.folder import (
    STATE,
    check_state,
    check_whole,
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
    verify_files,
    wrong_size,
    wrong_sum,
)
from fourfold.checkpoint.holdings import Chunks, Holding, chunks_of, holding_of, narrow
from fourfold.checkpoint.index import (
    INDEX,
    MARKER,
    OLD_INDEX,
    FileInfo,
    Index,
    StoredChunk,
    StoredTensor,
    dump_index,
    read_index,
    read_marker,
)
from fourfold.checkpoint.remote import RemoteFolder, fetch, publish
from fourfold.checkpoint.tensor_files import FileWriter, HashedReader, HostCopies
from fourfold.errors import CheckpointError, ConfigError, FileError
from fourfold.piece import Box, intersect, offset_box, shape_of
from fourfold.view.text import printable

if TYPE_CHECKING:
    from fourfold.train.loop import Loop

__all__ = [
    "Checkpointer",
    "ChunkPlanner",
    "Holding",
    "check_state",
    "check_whole",
    "complete",
    "doomed",
    "download_newest",
    "holding_of",
    "load",
    "load_newest",
    "newest",
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


def load_newest(
    checkpoints: Path, holdings: Callable[[], Sequence[Holding]], group: dist.ProcessGroup | None = None
) -> tuple[Path | None, dict[str, Any], list[str]]:
    """Fill the holdings from the newest checkpoint that verifies; ranks of `group` call it together.

    `holdings` is called only if there is a checkpoint: it allocates optimizer state that otherwise waits for the first step.

    Returns the checkpoint, its state, and a line about each newer one that does not verify: that one is renamed to
    `damaged-<its name>`, never deleted. If none verifies, nothing is renamed and CheckpointError is raised: starting from the
    beginning is the user's decision.
    """
    bad: list[tuple[Path, list[str]]] = []
    _together(lambda: check_whole(checkpoints), group)
    found = _together(lambda: complete(checkpoints), group)
    held = holdings() if found else ()
    for _, path in reversed(found):
        state, problems = _load(path, held, group)
        if not problems:
            return path, state, _together(lambda: [set_aside(p, found) for p, found in bad], group)
        bad.append((path, problems))
    if bad:
        raise CheckpointError(
            f"{checkpoints}: no checkpoint verifies: {'; '.join(p for _, problems in bad for p in problems[:1])}. "
            "Move them away to start from the beginning"
        )
    return None, {}, []


# ---- loading ----


def load(
    directory: Path, holdings: Sequence[Holding], *, group: dist.ProcessGroup | None = None, checksums: bool = True
) -> dict[str, Any]:
    """Fill the holdings from a complete checkpoint and return its state; ranks of `group` call it together.

    Raises CheckpointError, with the holdings partly filled, unless every file has the checksum that it was saved with. Without
    `checksums` only what the holdings need is read: of weights, a third of the bytes.
    """
    state, problems = _load(directory, holdings, group, checksums)
    if problems:
        raise CheckpointError(f"{'; '.join(problems)}. Delete {directory} to resume from the checkpoint before it")
    return state


def _load(
    directory: Path, holdings: Sequence[Holding], group: dist.ProcessGroup | None, checksums: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """Fill the holdings and verify every file, in one pass: the state, or what is damaged.

    Each file is hashed by one rank while it reads its tensors from it: of those that need the file, the one with the fewest
    bytes to hash so far. Other ranks read only the rows that they need. Raises CheckpointError for a checkpoint of another model.
    """
    rank, ranks = _place(group)
    problems, wrong, reads, state = list[str](), None, dict[str, list[_Read]](), dict[str, Any]()
    listed, small = dict[str, FileInfo](), list[str]()
    try:
        listed = read_marker(directory)
        small = [name for name in (INDEX, OLD_INDEX, STATE) if name in listed]
        problems = verify_files(directory, {n: listed[n] for n in small})  # every rank reads them
        if not problems:
            state, index = read_state(directory), read_index(directory)
    except CheckpointError as e:
        problems.append(str(e))
    if not problems:
        try:
            reads = _reads(directory, index, chunks_of(holdings))
        except CheckpointError as e:
            wrong = str(e)
    needed = {name: sum(read.chunk.bytes for read in found) for name, found in reads.items()}
    everyone = _exchange((problems, wrong, needed), group)
    if found := [p for each, _, _ in everyone for p in each]:
        return {}, list(dict.fromkeys(found))
    for at, (_, each, _) in enumerate(everyone):
        if each is not None:
            raise CheckpointError(f"{each} (rank {at})" if ranks > 1 else each)
    tensors = {name: info for name, info in listed.items() if name not in small}
    mine = _hashed_by(tensors, [each for _, _, each in everyone])[rank] if checksums else set[str]()
    jobs = [(directory / name, tensors[name] if name in mine else None, reads.get(name, [])) for name in tensors]
    problem, found = None, list[str]()
    try:
        found = [p for p in in_threads(_read_file, [j for j in jobs if j[1] is not None or j[2]]) if p is not None]
    except CheckpointError as e:
        problem = str(e)
    everyone = _exchange((found, problem), group)
    if found := [p for each, _ in everyone for p in each]:
        return {}, found
    for at, (_, each) in enumerate(everyone):
        if each is not None:
            raise CheckpointError(f"{each} (rank {at})" if ranks > 1 else each)
    return state, []


def _hashed_by(listed: Mapping[str, FileInfo], needed: Sequence[Mapping[str, int]]) -> list[set[str]]:
    """For each rank, the files that it hashes."""
    out: list[set[str]] = [set() for _ in needed]
    filled = [0] * len(needed)
    for name, info in sorted(listed.items(), key=lambda item: (-item[1].bytes, item[0])):
        readers = [rank for rank, wants in enumerate(needed) if wants.get(name)] or range(len(needed))
        rank = min(readers, key=lambda rank: (filled[rank], rank))
        out[rank].add(name)
        filled[rank] += info.bytes
    return out


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
    directory, state, lines = load_newest(checkpoints, loop.holdings, group)
    lines = [*downloaded, *lines]
    if directory is None:
        return 0
    for line in lines if loop.info.rank == 0 else ():
        print(printable(f"{line}; resuming from {directory.name}"), file=console, flush=True)
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


@dataclass(frozen=True)
class _Read:
    """A chunk of a file, and the boxes of views that boxes of it fill."""

    chunk: StoredChunk
    dtype: torch.dtype
    copies: tuple[tuple[Tensor, Box], ...]

    def run(self, file: FileReader) -> None:
        dims = self.chunk.shape
        rows = (min(box[0][0] for _, box in self.copies), max(box[0][1] for _, box in self.copies)) if dims else (0, 1)
        into, all_of_rows = self.copies[0][0], self.copies[0][1][1:] == tuple((0, n) for n in dims[1:])
        plain = into.device.type == "cpu" and into.is_contiguous() and into.dtype == self.dtype
        straight = len(self.copies) == 1 and all_of_rows and plain
        found = read_rows(file, self.chunk, self.dtype, rows, into if straight else None)
        for view, box in self.copies if found is not into else ():
            view.copy_(narrow(found, ((box[0][0] - rows[0], box[0][1] - rows[0]), *box[1:]) if dims else ()))


def _reads(directory: Path, index: Index, wanted: Mapping[str, Chunks]) -> dict[str, list[_Read]]:
    """What to read of each file to fill the views, in the order of the file."""
    reads: dict[str, list[_Read]] = {}
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
                    to = offset_box(common, mine, zero[0])
                    copies.append((narrow(view, to), offset_box(common, chunk.box, zero[1])))
            if copies:
                reads.setdefault(chunk.file, []).append(_Read(chunk, _dtype(stored.dtype), tuple(copies)))
    return {file: sorted(found, key=lambda read: read.chunk.at) for file, found in reads.items()}


def _fill(directory: Path, index: Index, wanted: Mapping[str, Chunks]) -> None:
    """Fill the views from the files, without verifying them; up to four files at a time."""
    jobs = [(directory / name, None, found) for name, found in _reads(directory, index, wanted).items()]
    in_threads(_read_file, jobs)


@torch.no_grad()
def _read_file(job: tuple[Path, FileInfo | None, list[_Read]]) -> str | None:
    """Run the reads of one file; with its FileInfo hash all of it meanwhile, and return what is wrong with it, if anything."""
    path, expected, reads = job
    damage = None
    try:
        with files.open_for_reading(path, CheckpointError, follow=False) as f:
            if expected is not None and (problem := wrong_size(path, f, expected)):
                return problem
            with HashedReader(f.fileno(), path) if expected is not None else FileReader(f.fileno(), path) as file:
                try:
                    for read in reads:
                        read.run(file)
                except DamagedError as e:
                    damage = str(e)  # but the checksum is the better report
                if isinstance(file, HashedReader) and expected is not None:
                    problem = wrong_sum(path, file.digest(expected.bytes), expected)
                    if problem is not None:
                        return problem
    except CheckpointError as e:
        if expected is None:
            raise
        return f"{path} is missing" if not os.path.lexists(path) else str(e)
    except OSError as e:
        damage = f"{path}: cannot be read: {files.why(e)}"
    except ValueError as e:
        damage = f"{path}: damaged: {e}"
    if damage is not None:
        raise CheckpointError(damage)
    return None


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
    every `keep_every`-th step are kept; the others are removed. One that cannot be removed is reported on `console`, once.
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
        console: IO[str] | None = None,
    ):
        self.console, self._left = console, set[str]()
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
            _together(lambda: self._finish(path, _index_of(metadata, writer.stored), listed, state), self.group)
        except (dcp.CheckpointException, CheckpointError, OSError) as e:
            why = _root_cause(e, path, size)
            if self.rank == 0:
                shutil.rmtree(path, ignore_errors=True)
            whole = [old for _, old in complete(self.directory) if old != path]  # rank 0 may not have removed it yet
            kept = f"; the last complete checkpoint is {whole[-1]}" if whole else ""
            raise CheckpointError(f"{path}: cannot be saved: {why}{kept}") from None
        if self.rank == 0:
            self._retain(path)
        if self.remote is not None:
            self._upload(path, self.remote)
        self._finished.append(path)

    def _retain(self, path: Path) -> None:
        """Remove what is old, and unfinished saves of earlier steps. If that fails, the new checkpoint is still whole."""
        step = int(path.name.removeprefix("step-"))
        try:
            unfinished = [p for n, p in steps_in(self.directory) if n < step and not is_file(p / MARKER)]
            gone = [*doomed(self.directory, self.keep, self.keep_every), *unfinished]
        except CheckpointError:  # the folder cannot be read: the next save says so
            gone = []
        for old in gone:
            self._removed(lambda old=old: remove(old))  # type: ignore[misc]

    def _removed(self, action: Callable[[], object]) -> None:
        try:
            action()
        except CheckpointError as e:
            if str(e) not in self._left:
                print(printable(f"  {e}; the run continues"), file=self.console, flush=True)
            self._left.add(str(e))

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
                self._removed(lambda old=old: remove(old))  # type: ignore[misc]

    def _publish(self, path: Path, remote: RemoteFolder) -> None:
        if (self.directory.parent / "config.json").is_file():
            remote.upload_run(self.directory.parent)
        remote.upload_marker(path, path.name)
        for old in remote.doomed(self.keep, self.keep_every):
            self._removed(lambda old=old: remote.remove(old))  # type: ignore[misc]

    def _clear(self, path: Path) -> None:
        """Make an empty folder; an incomplete save of this step, or a link, is removed first."""
        if not self.directory.parent.is_dir():  # making it again would split the run in two
            raise CheckpointError(
                f"{self.directory.parent} is gone: it was moved or deleted during the run. Resume from where it is now"
            )
        self.directory.mkdir(exist_ok=True)
        files.check_not_link(self.directory, CheckpointError)
        if os.path.lexists(path):
            remove(path)
        path.mkdir()

    def _finish(self, path: Path, index: Index, listed: dict[str, Any], state: Mapping[str, Any]) -> None:
        files.write_json(path / INDEX, dump_index(index), CheckpointError, indent=None)
        files.write_json(path / STATE, dict(state), CheckpointError)
        for name in (OLD_INDEX, INDEX, STATE):
            listed[name] = describe(path / name)
        files.write_json(path / MARKER, {"version": 2, "files": listed}, CheckpointError)
        files.sync_folder(self.directory)


def _index_of(metadata: Metadata, at: Mapping[MetadataIndex, Any]) -> Index:
    """Our index, from DCP's metadata of a save and where its chunks are."""
    out: Index = {}
    for name, stored in metadata.state_dict_metadata.items():
        chunks = []
        for part in stored.chunks:  # type: ignore[union-attr]
            info = at[MetadataIndex(name, part.offsets)]
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
