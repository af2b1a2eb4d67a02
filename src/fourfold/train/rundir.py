"""The run directory: the files of a run, locked while in use. An interface, documented in docs/run-directory.md.

    config.json plan.json env.json metrics.jsonl history.jsonl logs/rank*.log checkpoints/step-000040/ final/ flight/

A fresh run needs a directory that does not exist or is empty; an existing run is resumed or refused, never overwritten.
The lock is an advisory file lock on `.lock`: it is released when the processes that hold it end, however they end. No torch.

A run directory may come from an untrusted source. Nothing in it may be a link: a resumed run would write through it, over any
file of the user. The path to the directory itself may contain links.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fourfold import files, schema
from fourfold.config import Config
from fourfold.errors import RunDirError
from fourfold.plan import Plan

__all__ = ["RunDir", "read_metrics", "read_trace", "scan_metrics"]


class RunDir:
    """Paths of one run, and the lock on it while `self` is alive and `locked`."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lock: int | None = None

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def env_file(self) -> Path:
        return self.path / "env.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def final(self) -> Path:
        return self.path / "final"

    @property
    def flight(self) -> Path:
        """The last events of every rank, after a failure (supervision/flight.py)."""
        return self.path / "flight"

    @property
    def history_file(self) -> Path:
        """One line per start, end, failure and restart (supervision/flight.py)."""
        return self.path / "history.jsonl"

    def in_use(self) -> bool:
        """Whether a process holds the lock."""
        try:
            handle = os.open(self.path / ".lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(handle)
        return False

    # ---- claiming ----

    def check_free(self) -> None:
        """Raise RunDirError if the directory holds something, and so cannot be that of a new run."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise RunDirError(f"{self.path}: not a directory")
        if left := [p.name for p in self.path.iterdir() if p.name != ".lock"]:
            self._refuse(left)

    def check_unused(self) -> None:
        """Raise RunDirError if a process holds the lock; nothing is written."""
        if self.in_use():
            raise self._in_use_by((self.path / ".lock").read_text(errors="replace")[:200])

    def _in_use_by(self, holder: str) -> RunDirError:
        holder = holder.strip() or "another process"
        return RunDirError(f"{self.path} is in use by {holder}; wait for it, or choose another run directory")

    @classmethod
    def create(cls, path: str | Path, config: Config, plan: Plan) -> RunDir:
        """Claim a directory for a new run and write config and plan into it; leaves nothing behind on failure."""
        run = cls(path)
        run.check_free()
        made = [p for p in (run.path, *run.path.parents) if not p.exists()]
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run.lock()
            run.logs.mkdir()
            run.write(config, plan)
        except (OSError, RunDirError, ValueError) as e:
            run.unlock()
            with contextlib.suppress(OSError, ValueError):
                for name in (".lock", "config.json", "plan.json"):
                    (run.path / name).unlink(missing_ok=True)
                for p in (run.logs, *made):
                    p.rmdir()
            why = files.why(e) if isinstance(e, OSError) else str(e)
            raise RunDirError(f"{run.path}: cannot be written: {why}; use another train.run_dir") from None
        return run

    @classmethod
    def reopen(cls, path: str | Path) -> RunDir:
        """Claim the directory of an earlier run; a directory that contains a link is refused."""
        run = cls.find(path)
        run.check_links()
        try:
            run.lock()
            run.logs.mkdir(exist_ok=True)
        except OSError as e:
            raise RunDirError(f"{run.path}: cannot be written: {files.why(e)}") from None
        return run

    @classmethod
    def find(cls, path: str | Path) -> RunDir:
        """Open an earlier run for reading."""
        run = cls(path)
        try:
            there, found = run.path.exists(), run.config_file.is_file()
        except PermissionError:
            raise RunDirError(f"{run.path}: cannot be read: permission denied") from None
        except (OSError, ValueError):  # a name too long, or with a NUL
            there = found = False
        if not found:
            where = "there is no config.json in it" if there else "no such directory"
            raise RunDirError(f"{run.path}: not a run directory: {where}")
        run._check_inputs()
        return run

    def _check_inputs(self) -> None:
        """Raise RunDirError if a file that every command reads is a link: exports, and `final/`, would hold what it points to."""
        kept = self.path / "hf"
        for path in (self.config_file, self.plan_file, kept, kept / "additional_chat_templates"):
            files.check_not_link(path, RunDirError)
            with contextlib.suppress(OSError), os.scandir(path) as entries:
                for entry in entries:
                    files.check_not_link(entry.path, RunDirError)

    def check_links(self) -> None:
        """Raise RunDirError if a file that a run writes, or a folder of it, is a link or a FIFO (opening one would block)."""
        folders = [self.path, self.logs, self.path / "trace", self.final, self.checkpoints, self.flight]
        for folder in folders:
            try:
                with os.scandir(folder) as entries:
                    found = sorted(entries, key=lambda e: e.name)
            except OSError:
                continue  # not there yet
            for entry in found:
                path = folder / entry.name
                if entry.is_symlink():
                    raise RunDirError(
                        f"{path}: is a link; a run writes into its directory, and does not follow links out of it. "
                        "Move what the link points to in its place"
                    )
                if not entry.is_dir() and not entry.is_file():
                    raise RunDirError(
                        f"{path}: is neither a file nor a folder (a FIFO, a socket or a device); remove it"
                    )
                if path.suffix in (".log", ".jsonl") and entry.stat().st_nlink > 1:
                    raise RunDirError(
                        f"{path}: is a hard link to another file, and a run appends to it. Put a copy in its place: "
                        f"cp {path} {path}.copy && mv {path}.copy {path}"
                    )

    def _refuse(self, found: list[str]) -> None:
        if "config.json" in found:
            last = max((m["step"] for m in read_metrics(self)), default=0)
            raise RunDirError(
                f"{self.path} already holds a run (at step {last}); resume it with --resume {self.path}, "
                f"or choose another --train.run-dir"
            )
        raise RunDirError(f"{self.path} is not empty ({sorted(found)[0]} …); choose another --train.run-dir")

    def lock(self) -> None:
        """Take the lock; held until `unlock`, or until the last process that inherited it ends."""
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            handle = os.open(self.path / ".lock", flags, 0o644)
        except OSError as e:
            if e.errno != errno.ELOOP:
                raise
            raise RunDirError(f"{self.path / '.lock'}: is a link; links are not followed here") from None
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            os.close(handle)
            raise RunDirError(f"{self.path / '.lock'}: is a hard link, or not a regular file; remove it")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode(errors="replace")
            os.close(handle)
            raise self._in_use_by(holder) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._lock = handle

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # ---- contents ----

    def write(self, config: Config, plan: Plan) -> None:
        """Write the resolved config and plan."""
        files.write_json(self.config_file, config.to_dict(), RunDirError)
        files.write_json(self.plan_file, plan.to_dict(), RunDirError)

    def job(self) -> str:
        """Name of the launcher's job that this run belongs to; empty when it had none."""
        job = schema.read(self.env_file, RunDirError, follow=False).get("job") if self.env_file.exists() else ""
        return job if isinstance(job, str) else ""

    def read(self) -> tuple[Config, Plan]:
        """The config and plan of the run."""
        return Config.load(self.config_file), Plan.load(self.plan_file)


def read_metrics(run: RunDir) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl; damaged ones are skipped."""
    return (line for _, line in scan_metrics(run) if line is not None)


def scan_metrics(run: RunDir) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Number and content of every line of metrics.jsonl; None if the line is damaged."""
    if os.path.lexists(run.metrics_file):
        for number, line in files.read_json_lines(run.metrics_file, RunDirError, longest=files.MIB):
            yield number, line if line is not None and _is_metrics(line) else None


def _is_metrics(line: dict[str, Any]) -> bool:
    """A step, and numbers or null for what is compared."""
    return schema.is_integer(line.get("step")) and all(
        line.get(key) is None or _is_number(line[key]) for key in ("loss", "grad_norm", "eval_loss")
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_trace(path: Path) -> Iterator[dict[str, Any] | None]:
    """The lines of a trace; None for a damaged one."""
    for _, line in files.read_json_lines(path, RunDirError):
        yield line if line is not None and _is_trace(line) else None


def _is_trace(line: dict[str, Any]) -> bool:
    """A step, a time, spans of a name and three times; and, where they are there, events, groups, memory and the rest."""
    return (
        schema.is_integer(line.get("step"))
        and _is_time(line.get("origin"))
        and _rows(line.get("spans"), (str, float, float, float))
        and _is_time(line.get("seconds", 0.0))
        and _is_time(line.get("lead", 0.0))
        and isinstance(line.get("host", ""), str)
        and _rows(line.get("events", []), (str, str, float, float, float, int, int, int, int))
        and _rows(line.get("groups", []), (str, list))
        and all(isinstance(rank, int) for _, ranks in line.get("groups", []) for rank in ranks)
        and all(event[6] < len(line.get("groups", [])) for event in line.get("events", []))
        and _rows(line.get("memory", []), (float, float))
        and _rows([line.get("peak", [0.0, 0.0, {}])], (float, float, dict))
        and all(_is_time(size) for size in line.get("peak", [0, 0, {}])[2].values())
    )


def _rows(rows: Any, kinds: tuple[type, ...]) -> bool:
    """Whether it is a list of rows with values of these kinds; a float is any time."""
    return isinstance(rows, list) and all(
        isinstance(row, list)
        and len(row) == len(kinds)
        and all(
            _is_time(x) if kind is float else isinstance(x, kind) and not isinstance(x, bool)
            for x, kind in zip(row, kinds, strict=True)
        )
        for row in rows
    )


def _is_time(value: Any) -> bool:
    return _is_number(value) and abs(value) < 1e18
