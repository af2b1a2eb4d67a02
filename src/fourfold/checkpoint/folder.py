"""The checkpoints folder: listing, verifying and pruning checkpoints. No torch.

A checkpoint is a folder `step-<number>` with a `complete.json`, ordered by number. Only these names determine what is deleted or
renamed, never the content of a file; links are ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from fourfold import files, schema
from fourfold.checkpoint.index import MARKER, FileInfo, read_index, read_marker
from fourfold.errors import CheckpointError

__all__ = [
    "FILES",
    "PIECE",
    "STATE",
    "STEP",
    "check_state",
    "check_whole",
    "complete",
    "describe",
    "doomed",
    "hash_file",
    "in_threads",
    "is_file",
    "newest",
    "read_state",
    "remove",
    "set_aside",
    "steps_in",
    "use_torch_in_threads",
    "verify",
    "verify_files",
    "wrong_size",
    "wrong_sum",
]

FILES = 4
"""Files that a rank writes, hashes or reads at the same time, at most."""
PIECE = 8 << 20
"""Bytes that are hashed while they are written, or while the next ones are read."""
STATE = "state.json"
STEP = re.compile(r"step-(\d{6,18})")

A = TypeVar("A")
T = TypeVar("T")


def steps_in(checkpoints: Path) -> list[tuple[int, Path]]:
    """The step and path of every folder that is named like a checkpoint, ordered by step.

    By number, not by name: step-1000000 comes after step-999999. Links are excluded.
    """
    files.check_not_link(checkpoints, CheckpointError)
    found = []
    try:
        with os.scandir(checkpoints) as entries:
            for entry in entries:
                match = STEP.fullmatch(entry.name)
                if match and entry.is_dir(follow_symlinks=False):
                    found.append((int(match[1]), checkpoints / entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as e:
        raise CheckpointError(f"{checkpoints}: cannot be read: {files.why(e)}") from None
    return sorted(found)


def complete(checkpoints: Path) -> list[tuple[int, Path]]:
    """The step and path of every complete checkpoint, ordered by step."""
    return [(step, path) for step, path in steps_in(checkpoints) if is_file(path / MARKER)]


def newest(checkpoints: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = complete(checkpoints)
    return found[-1][1] if found else None


def doomed(checkpoints: Path, keep: int, keep_every: int = 0) -> list[Path]:
    """The complete checkpoints that retention removes: all but the newest `keep` and those of every `keep_every`-th step."""
    old = complete(checkpoints)[: -keep or None]
    return [path for step, path in old if not (keep_every and step % keep_every == 0)]


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, the marker first, so that a partly deleted one never looks complete. Links are not followed."""
    try:
        if checkpoint.is_symlink():
            checkpoint.unlink()
            return
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            (checkpoint / MARKER).unlink()
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(checkpoint)
    except OSError as e:
        raise CheckpointError(f"{checkpoint}: cannot be removed: {files.why(e)}") from None


def is_file(path: Path) -> bool:
    """Whether it is a regular file, not a link."""
    return path.is_file() and not path.is_symlink()


# ---- verification ----


def read_state(directory: Path) -> dict[str, Any]:
    """The state other than tensors."""
    read_marker(directory)
    state = schema.read(directory / STATE, CheckpointError, follow=False)
    if not schema.is_integer(state.get("step")):
        raise CheckpointError(f"{directory / STATE}: damaged: it has no step")
    named = STEP.fullmatch(directory.name)
    if named and int(named[1]) != state["step"]:
        raise CheckpointError(
            f"{directory / STATE}: is of step {state['step']}, the folder's name says {int(named[1])}"
        )
    return state


def check_state(state: Mapping[str, Any], directory: Path) -> None:
    """Raise CheckpointError unless a state has everything that a run needs to resume."""
    data = state.get("data")
    table = data if isinstance(data, dict) else {}
    counts = [state.get("updates"), state.get("skipped"), table.get("epoch"), table.get("next")]
    if not all(map(schema.is_integer, counts)) or not isinstance(table.get("fingerprint"), str):
        raise CheckpointError(f"{directory / STATE}: damaged: it needs updates, skipped and data to resume from")


def check_whole(checkpoints: Path) -> None:
    """Raise CheckpointError if the newest checkpoint has no optimizer state (checkpoint.last = "weights")."""
    directory = newest(checkpoints)
    state: dict[str, Any] = {}
    if directory is not None:
        with contextlib.suppress(CheckpointError):  # a damaged one is reported when it is loaded
            state = read_state(directory)
    if state.get("optimizer") is False:
        raise CheckpointError(
            f"{directory}: has weights only (checkpoint.last = 'weights'), so training cannot continue from it. "
            f"fourfold export {checkpoints.parent} FOLDER writes the model, which a new run can fine-tune; or delete {directory} "
            "to resume from the checkpoint before it"
        )


def verify(directory: Path, share: int = 0, shares: int = 1) -> list[str]:
    """Describe the damaged files among every `shares`-th file from `share`, and a damaged index or state."""
    try:
        listed = read_marker(directory)
    except CheckpointError as e:
        return [str(e)]
    problems = verify_files(directory, dict(sorted(listed.items())[share::shares]))
    if not problems and share == 0:
        for read in (read_state, read_index):
            try:
                read(directory)
            except CheckpointError as e:
                problems.append(str(e))
    return problems


def verify_files(directory: Path, listed: Mapping[str, FileInfo]) -> list[str]:
    """Describe the damaged ones among these files of a checkpoint."""
    jobs = [(directory / name, expected) for name, expected in listed.items()]
    return [p for p in in_threads(_problem, jobs) if p is not None]


def _problem(job: tuple[Path, FileInfo]) -> str | None:
    """What is wrong with a file, if anything."""
    path, expected = job
    try:
        with files.open_for_reading(path, CheckpointError, follow=False) as f:
            return wrong_size(path, f, expected) or wrong_sum(path, hash_file(f, expected.bytes), expected)
    except CheckpointError as e:
        return f"{path} is missing" if not os.path.lexists(path) else str(e)
    except OSError as e:
        return f"{path}: cannot be read: {files.why(e)}"


def wrong_size(path: Path, file: io.BufferedReader, expected: FileInfo) -> str | None:
    size = os.fstat(file.fileno()).st_size
    return None if size == expected.bytes else f"{path} is damaged: {size} bytes instead of {expected.bytes}"


def wrong_sum(path: Path, digest: str, expected: FileInfo) -> str | None:
    return None if digest == expected.sha256 else f"{path} is damaged: its checksum is not the one it was saved with"


def hash_file(file: io.BufferedReader, size: int) -> str:
    """SHA-256 of an open file, in hexadecimal; the next piece is read while one is hashed."""
    found = hashlib.sha256()
    if size <= 2 * PIECE:
        return hashlib.file_digest(file, "sha256").hexdigest()
    buffers = [bytearray(PIECE), bytearray(PIECE)]
    ready: threading.Thread | None = None
    for number in range(-(-size // PIECE)):
        buffer = buffers[number % 2]
        count = file.readinto(buffer)
        if ready is not None:
            ready.join()
        ready = threading.Thread(target=found.update, args=(memoryview(buffer)[:count],))
        ready.start()
    if ready is not None:
        ready.join()
    return found.hexdigest()


def in_threads(work: Callable[[A], T], jobs: Iterable[A], most: int = FILES) -> list[T]:
    """`work` of every job, at most `most` at a time, in the order of the jobs; the first error is raised when all have ended."""
    todo = list(jobs)
    if len(todo) <= 1:
        return [work(job) for job in todo]
    use_torch_in_threads()
    with ThreadPoolExecutor(min(most, len(todo)), thread_name_prefix="checkpoint") as pool:
        return [future.result() for future in [pool.submit(work, job) for job in todo]]


def use_torch_in_threads() -> None:
    """Call this before threads that use torch.

    A forked process makes torch's thread pool anew at its first use. Threads that come first at the same time find none
    ("Invalid thread pool!"), so it is made here.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(torch.get_num_threads())


def describe(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with path.open("rb") as f:
        return {"bytes": os.fstat(f.fileno()).st_size, "sha256": hashlib.file_digest(f, "sha256").hexdigest()}


def set_aside(path: Path, problems: Sequence[str]) -> str:
    """Rename a damaged checkpoint to `damaged-<its name>`; returns a message."""
    to = path.with_name(f"damaged-{path.name}")
    for number in range(2, 1000):
        if not os.path.lexists(to):
            break
        to = path.with_name(f"damaged-{path.name}-{number}")
    path.rename(to)
    return f"{problems[0]}; set aside as {to.name}"
