"""The run directory: where a run is written, locked while in use. An interface, documented in docs/run-directory.md.

    config.json plan.json env.json metrics.jsonl logs/rank*.log checkpoints/step-000040/ final/

A fresh run needs a directory that does not exist or is empty; an existing run is resumed or refused, never overwritten.
The lock is an advisory file lock on `.lock`: it goes with the processes that hold it, however they end. No torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fourfold import schema
from fourfold.config import Config
from fourfold.errors import RunDirError
from fourfold.plan import Plan

__all__ = ["RunDir", "read_metrics"]


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

    # ---- claiming ----

    @classmethod
    def create(cls, path: str | Path, config: Config, plan: Plan) -> RunDir:
        """Claim a directory for a new run and write what will be run into it; leaves nothing behind on failure."""
        run = cls(path)
        if not run.path.exists():
            made = [p for p in (run.path, *run.path.parents) if not p.exists()]
        elif not run.path.is_dir():
            raise RunDirError(f"{run.path}: not a directory")
        elif left := [p.name for p in run.path.iterdir() if p.name != ".lock"]:
            run._refuse(left)
        else:
            made = []
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run.lock()
            run.logs.mkdir()
            run.write(config, plan)
        except OSError as e:
            with contextlib.suppress(OSError):
                for p in sorted(run.path.rglob("*"), reverse=True):
                    p.rmdir() if p.is_dir() else p.unlink()
                for p in made:
                    p.rmdir()
            run.unlock()
            raise RunDirError(f"{run.path}: cannot be written: {e.strerror}; use another train.run_dir") from None
        return run

    @classmethod
    def reopen(cls, path: str | Path) -> RunDir:
        """Claim the directory of an earlier run."""
        run = cls.find(path)
        try:
            run.lock()
            run.logs.mkdir(exist_ok=True)
        except OSError as e:
            raise RunDirError(f"{run.path}: cannot be written: {e.strerror}") from None
        return run

    @classmethod
    def find(cls, path: str | Path) -> RunDir:
        """An earlier run, to read from."""
        run = cls(path)
        if not run.config_file.is_file():
            where = "no such directory" if not run.path.exists() else "there is no config.json in it"
            raise RunDirError(f"{run.path}: not a run directory: {where}")
        return run

    def _refuse(self, found: list[str]) -> None:
        if "config.json" in found:
            last = max((m["step"] for m in read_metrics(self)), default=0)
            raise RunDirError(
                f"{self.path} already holds a run (at step {last}); go on with it by --resume {self.path}, "
                f"or choose another --train.run-dir"
            )
        raise RunDirError(f"{self.path} is not empty ({sorted(found)[0]} …); choose another --train.run-dir")

    def lock(self) -> None:
        """Take the lock; held until `unlock`, or until the last process that inherited it ends."""
        handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
            os.close(handle)
            raise RunDirError(
                f"{self.path} is in use by {holder}; wait for it, or choose another run directory"
            ) from None
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
        schema.write_json(self.config_file, config.to_dict())
        schema.write_json(self.plan_file, plan.to_dict())

    def job(self) -> str:
        """Name of the launcher's job that this run belongs to; empty when it had none."""
        return schema.read(self.env_file).get("job", "") if self.env_file.exists() else ""

    def read(self) -> tuple[Config, Plan]:
        """The config and plan of the run."""
        return Config.load(self.config_file), Plan.load(self.plan_file)


def read_metrics(run: RunDir) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line cut off by a crash is left out."""
    if not run.metrics_file.exists():
        return
    with run.metrics_file.open(encoding="utf-8") as f:
        for line in f:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return
