"""Checkpoints in object stores and other storage that fsspec supports: s3://, gs://, file://, memory://. No torch.

    checkpoint.dir = "s3://bucket/runs/mine"

    s3://bucket/runs/mine/
        config.json plan.json hf/…      what a new machine needs to resume the run
        step-000040/__0_0.distcp …      as in a run directory
        step-000040/complete.json       uploaded last: a checkpoint without it is an incomplete upload, and is never opened

A checkpoint is saved in the run directory first, then every rank uploads the files that it wrote; when all have done so, rank 0
uploads `complete.json`. The run directory keeps the newest one, retention applies to the remote ones. To resume, ranks download
the newest complete checkpoint, a share of the files each, and compare sizes and SHA-256; one that differs is marked
(`complete.json` becomes `damaged.json`), and the previous one is used.

File names and paths never come from a listing or a file alone: checkpoints are called `step-<number>`, files have one component.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

from fourfold import files
from fourfold.checkpoint.folder import STEP
from fourfold.checkpoint.index import MARKER, FileInfo, parse_marker
from fourfold.errors import CheckpointError, ConfigError, FourfoldError
from fourfold.supervision.flight import note, read_history
from fourfold.train.rundir import RunDir
from fourfold.view.text import printable

__all__ = ["RemoteFolder", "check_own", "check_url", "fetch", "fetch_newest", "is_url", "local_run", "publish"]

T = TypeVar("T")
SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://")
DAMAGED = "damaged.json"
BLOCK = 8 * files.MIB
TRIES = 3
RUN_FILES = ("config.json", "plan.json")
SMALL = 64 * files.MIB
"""Bytes of a file of a run that is neither a checkpoint nor a log."""


def is_url(text: str) -> bool:
    """Whether a text is a URL with a scheme: s3://bucket/path."""
    return SCHEME.match(text) is not None


def check_url(url: str, ranks: int = 1) -> None:
    """Raise ConfigError if `checkpoint.dir` cannot be used here; opens no connection."""
    match = SCHEME.match(url)
    if match is None:
        raise ConfigError(f"checkpoint.dir = '{url}': expected a URL such as s3://bucket/run or file:///path/run")
    if not url[match.end() :].strip("/"):
        raise ConfigError(f"checkpoint.dir = '{url}': names no folder; for example {url.rstrip('/')}/bucket/run")
    try:
        import fsspec
    except ImportError:
        raise ConfigError(f"checkpoint.dir = '{url}': needs the extra: pip install 'fourfold[remote]'") from None
    try:
        fsspec.get_filesystem_class(match[1])
    except (ImportError, ValueError) as e:
        known = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}.get(match[1])
        how = f"pip install {known}" if known else "known are, among others, s3, gs, az, sftp, file"
        raise ConfigError(f"checkpoint.dir = '{url}': fsspec cannot open {match[1]}://: {how} ({e})") from None
    if match[1] == "memory" and ranks > 1:
        raise ConfigError(
            f"checkpoint.dir = '{url}': memory:// is inside one process; {ranks} ranks need another place"
        )


class RemoteFolder:
    """The checkpoints of one run at a URL. Errors of the store become CheckpointError, after a few tries."""

    def __init__(self, url: str):
        check_url(url)
        import fsspec

        self.url = url.rstrip("/")
        self._fs, root = self._tried(lambda: fsspec.core.url_to_fs(self.url), "opened")
        self._root = root.rstrip("/")

    def _tried(self, action: Callable[[], T], what: str, name: str = "") -> T:
        """Call `action`, with retries after transient errors; FileNotFoundError is not caught."""
        for number in range(TRIES):
            try:
                return action()
            except (FileNotFoundError, FourfoldError):
                raise
            except Exception as e:  # every store raises different errors
                if number + 1 == TRIES or isinstance(e, PermissionError):
                    why = files.why(e) if isinstance(e, OSError) and e.errno else str(e) or type(e).__name__
                    where = f"{self.url}/{name}" if name else self.url
                    raise CheckpointError(f"{where}: cannot be {what}: {' '.join(why.split())[:300]}") from None
                time.sleep(0.5 * 2**number)
        raise AssertionError("the last try returns or raises")

    def _path(self, *names: str) -> str:
        assert all(files.is_plain_name(n) for n in names), names
        return "/".join((self._root, *names))

    # ---- listing ----

    def _names(self, *folder: str) -> dict[str, int]:
        """Names in a folder, and their sizes."""
        try:
            self._fs.invalidate_cache()
            found = self._tried(lambda: self._fs.ls(self._path(*folder), detail=True), "listed", "/".join(folder))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        names = {e["name"].rstrip("/").rpartition("/")[2]: int(e.get("size") or 0) for e in found}
        return {name: size for name, size in names.items() if files.is_plain_name(name)}

    def steps(self) -> list[tuple[int, str]]:
        """The step and name of everything that is named like a checkpoint, ordered by step."""
        return sorted((int(m[1]), name) for name in self._names() if (m := STEP.fullmatch(name)))

    def state(self, name: str) -> str:
        """complete, damaged or unfinished."""
        there = self._names(name)
        return "complete" if MARKER in there else "damaged" if DAMAGED in there else "unfinished"

    def complete(self) -> list[tuple[int, str]]:
        """The step and name of every complete checkpoint, in the order of the steps."""
        return [(step, name) for step, name in self.steps() if self.state(name) == "complete"]

    def size(self, name: str) -> int:
        """Bytes of a checkpoint."""
        return sum(self._names(name).values())

    def marker(self, name: str) -> dict[str, FileInfo]:
        """The files of a complete checkpoint."""
        where = f"{self.url}/{name}/{MARKER}"
        try:
            data = self._tried(lambda: self._fs.cat_file(self._path(name, MARKER), end=16 * files.MIB), "read", name)
        except FileNotFoundError:
            raise CheckpointError(f"{self.url}/{name}: not a complete checkpoint: there is no {MARKER} in it") from None
        try:
            return parse_marker(files.parse_json(data.decode("utf-8"), where, CheckpointError), where)
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.url}/{name} is damaged: {MARKER} is not UTF-8") from None
        except CheckpointError as e:
            raise CheckpointError(f"{self.url}/{name} is damaged: {e}") from None

    # ---- to and from a run directory ----

    def upload(self, local: Path, name: str) -> None:
        """Upload one file of the checkpoint `name`."""
        to = self._path(name, local.name)
        self._tried(lambda: self._fs.makedirs(self._path(name), exist_ok=True), "created", name)
        self._tried(lambda: self._fs.put_file(str(local), to), "written", f"{name}/{local.name}")
        size = self._tried(lambda: self._fs.size(to), "read", f"{name}/{local.name}")
        if size != local.stat().st_size:
            raise CheckpointError(f"{self.url}/{name}/{local.name}: {size} bytes arrived of {local.stat().st_size}")

    def upload_marker(self, local: Path, name: str) -> None:
        """Upload the last file of a checkpoint, which makes it complete."""
        data = (local / MARKER).read_bytes()
        self._tried(lambda: self._fs.pipe_file(self._path(name, MARKER), data), "written", f"{name}/{MARKER}")

    def clear(self, name: str) -> None:
        """Remove the files of an incomplete upload of this checkpoint."""
        if self._names(name):
            self.remove(name)

    def download(self, name: str, file: str, expected: FileInfo, local: Path) -> None:
        """Download a file of a checkpoint into the folder `local`, unless it exists; raises CheckpointError if it differs."""
        target = local / file
        if target.is_file() and not target.is_symlink() and target.stat().st_size == expected.bytes:
            with files.open_for_reading(target, CheckpointError, follow=False) as f:
                if hashlib.file_digest(f, "sha256").hexdigest() == expected.sha256:
                    return
        with files.create(target, CheckpointError) as out:
            self._copy(name, file, expected, out)

    def check(self, name: str, file: str, expected: FileInfo) -> None:
        """Raise CheckpointError if a file has changed since it was saved."""
        self._copy(name, file, expected, None)

    def _copy(self, name: str, file: str, expected: FileInfo, out: IO[bytes] | None) -> None:
        where, digest, size = f"{self.url}/{name}/{file}", hashlib.sha256(), 0
        try:
            for block in self._blocks(name, file):
                size += len(block)
                if size > expected.bytes:
                    break
                digest.update(block)
                if out is not None:
                    out.write(block)
        except FileNotFoundError:
            raise CheckpointError(f"{where} is missing") from None
        if size != expected.bytes:
            raise CheckpointError(f"{where} is damaged: not {expected.bytes} bytes")
        if digest.hexdigest() != expected.sha256:
            raise CheckpointError(f"{where} is damaged: its checksum is not the one it was saved with")

    def _blocks(self, name: str, file: str) -> Iterator[bytes]:
        with self._tried(lambda: self._fs.open(self._path(name, file), "rb"), "read", f"{name}/{file}") as f:
            while block := self._tried(lambda: f.read(BLOCK), "read", f"{name}/{file}"):
                yield block

    def verify(self, name: str) -> list[str]:
        """The problems of a complete checkpoint; empty if every file has its size and SHA-256."""
        try:
            listed = self.marker(name)
        except CheckpointError as e:
            return [str(e)]
        problems = []
        for file, expected in sorted(listed.items()):
            try:
                self.check(name, file, expected)
            except CheckpointError as e:
                problems.append(str(e))
        return problems

    # ---- retention ----

    def doomed(self, keep: int, keep_every: int = 0) -> list[str]:
        """The checkpoints that retention removes: all but the newest `keep` and those of every `keep_every`-th step, and
        incomplete ones before the newest."""
        states = [(step, name, self.state(name)) for step, name in self.steps()]
        whole = [(step, name) for step, name, state in states if state == "complete"]
        old = [name for step, name in whole[: -keep or None] if not (keep_every and step % keep_every == 0)]
        last = whole[-1][0] if whole else -1
        return old + [name for step, name, state in states if state == "unfinished" and step < last]

    def remove(self, name: str) -> None:
        """Delete a checkpoint, the marker first, so that a partly deleted one never looks complete."""
        for file in (MARKER, None):
            path = self._path(name, file) if file else self._path(name)
            try:
                self._tried(lambda path=path, file=file: self._fs.rm(path, recursive=file is None), "removed", name)  # type: ignore[misc]
            except FileNotFoundError:
                continue

    def set_aside(self, name: str) -> None:
        """Mark a checkpoint as damaged: it is kept, but never opened again."""
        self._tried(lambda: self._fs.mv(self._path(name, MARKER), self._path(name, DAMAGED)), "marked as damaged", name)

    # ---- what a new machine needs ----

    def upload_run(self, run: Path) -> None:
        """config.json, plan.json and hf/ of a run directory."""
        for name in RUN_FILES:
            data = files.read_bytes(run / name, CheckpointError, follow=False)
            self._tried(lambda name=name, data=data: self._fs.pipe_file(self._path(name), data), "written", name)  # type: ignore[misc]
        for path in sorted((run / "hf").iterdir()) if (run / "hf").is_dir() else ():
            if path.is_file() and not path.is_symlink() and files.is_plain_name(path.name):
                self.upload(path, "hf")

    def download_run(self, run: Path) -> None:
        """Download them into a new run directory; `train.run_dir` and `checkpoint.dir` are replaced by the local ones."""
        there = self._names()
        if not all(name in there for name in RUN_FILES):
            raise CheckpointError(f"{self.url}: is not a run: there is no config.json and plan.json in it")
        texts = {name: self._small(name) for name in RUN_FILES}
        config = files.parse_json(texts["config.json"].decode("utf-8", "replace"), f"{self.url}/config.json")
        if not isinstance(config, dict) or not all(
            isinstance(config.get(k, {}), dict) for k in ("train", "checkpoint")
        ):
            raise CheckpointError(f"{self.url}/config.json: damaged: not the config of a run")
        config["train"] = config.get("train", {}) | {"run_dir": str(run)}
        config["checkpoint"] = config.get("checkpoint", {}) | {"dir": self.url}
        run.mkdir(parents=True, exist_ok=True)
        for name, size in self._names("hf").items():
            if size <= SMALL:
                (run / "hf").mkdir(exist_ok=True)
                files.write_bytes(run / "hf" / name, self._small("hf", name), CheckpointError)
        files.write_bytes(run / "plan.json", texts["plan.json"], CheckpointError)
        files.write_text(run / "config.json", json.dumps(config, indent=2) + "\n", CheckpointError)

    def _small(self, *names: str) -> bytes:
        return self._tried(lambda: self._fs.cat_file(self._path(*names), end=SMALL), "read", "/".join(names))


def local_run(url: str, run_dir: str = "") -> Path:
    """The local run directory of a run whose checkpoints are at `url`; created if missing.

    Default: runs/<last part of the URL>. A directory that holds another run is refused.
    """
    remote = RemoteFolder(url)
    run = Path(run_dir or Path("runs") / remote.url.rpartition("/")[2])
    local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    deadline = time.monotonic() + 300
    while local_rank != "0" and not (run / "config.json").is_file() and time.monotonic() < deadline:
        time.sleep(0.2)  # one process of a host downloads
    if not (run / "config.json").is_file():
        mine = ("plan.json", "hf", "history.jsonl")
        left = sorted(p.name for p in run.iterdir()) if run.is_dir() else []
        if any(name not in mine and not name.startswith(".") for name in left):
            raise ConfigError(f"{run} is not empty, and no run; choose another --train.run-dir")
        remote.download_run(run)
        note(RunDir(run), "downloaded", url=remote.url)
        return run
    config = files.read_json(run / "config.json", ConfigError)
    found = config.get("checkpoint", {}).get("dir") if isinstance(config, dict) else None
    if found != remote.url:
        raise ConfigError(f"{run} holds another run (its checkpoint.dir is '{found}'); choose another --train.run-dir")
    return run


def check_own(run: RunDir, remote: RemoteFolder) -> None:
    """Raise ConfigError if the URL already has checkpoints of another run, from which a new run would resume."""
    events = [line["event"] for line in read_history(run)]
    if events.count("start") > 1 or "downloaded" in events:
        return
    found = remote.steps()
    if found:
        raise ConfigError(
            f"{remote.url} already holds checkpoints of a run (at step {found[-1][0]}); resume it with --resume {remote.url}, or "
            "choose another checkpoint.dir"
        )


def fetch(remote: RemoteFolder, name: str, checkpoints: Path, share: int = 0, shares: int = 1) -> None:
    """Download every `shares`-th file of a complete checkpoint; `publish` writes `complete.json`."""
    local = checkpoints / name
    files.check_not_link(checkpoints, CheckpointError)
    local.mkdir(parents=True, exist_ok=True)
    files.check_not_link(local, CheckpointError)
    for file, expected in sorted(remote.marker(name).items())[share::shares]:
        remote.download(name, file, expected, local)


def publish(remote: RemoteFolder, name: str, checkpoints: Path) -> Path:
    """Write the marker after all files were downloaded, which makes the local copy complete."""
    listed = {file: {"bytes": info.bytes, "sha256": info.sha256} for file, info in remote.marker(name).items()}
    files.write_json(checkpoints / name / MARKER, {"version": 2, "files": listed}, CheckpointError)
    return checkpoints / name


def fetch_newest(url: str, checkpoints: Path) -> Path | None:
    """Download the newest complete checkpoint at `url` that verifies; for commands in a single process."""
    remote = RemoteFolder(url)
    for _, name in reversed(remote.complete()):
        if os.path.isfile(checkpoints / name / MARKER):
            return checkpoints / name
        try:
            fetch(remote, name, checkpoints)
        except CheckpointError as e:
            print(printable(f"{e}; using the previous checkpoint"), flush=True)
            continue
        return publish(remote, name, checkpoints)
    return None
