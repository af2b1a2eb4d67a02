"""`fourfold checkpoint list|verify|prune`: manage the checkpoints of a run. No torch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Column, Table

from fourfold import files, schema
from fourfold.checkpoint.folder import complete, doomed, is_file, remove, steps_in, verify
from fourfold.checkpoint.index import MARKER
from fourfold.checkpoint.remote import RemoteFolder, is_url
from fourfold.errors import CheckpointError, ConfigError
from fourfold.train.rundir import RunDir
from fourfold.view.text import markup

__all__ = ["CheckpointArgs", "checkpoint_command"]


@dataclass(frozen=True)
class CheckpointArgs:
    """List, verify or prune the checkpoints of a run."""

    action: Annotated[Literal["list", "verify", "prune"], tyro.conf.Positional]
    """list: steps, sizes, state. verify: compare every file with its SHA-256 (exit code 1 if one is damaged). prune: delete."""
    path: Annotated[str, tyro.conf.Positional]
    """Run directory, or the URL of its checkpoints; for verify also one checkpoint, runs/mine/checkpoints/step-000040."""
    keep: int | None = None
    """prune: how many of the newest are kept; default: checkpoint.keep of the run."""
    keep_every: int | None = None
    """prune: also keep those of every N-th step; default: checkpoint.keep_every of the run."""
    dry_run: bool = False
    """prune: print what would be deleted, delete nothing."""
    json: bool = False
    """Print one JSON object."""
    debug: bool = False
    """Show tracebacks of errors."""


def checkpoint_command(args: CheckpointArgs) -> int:
    """Run the command; returns the exit code."""
    if args.action != "prune" and (args.keep is not None or args.keep_every is not None or args.dry_run):
        raise ConfigError(f"--keep, --keep-every and --dry-run belong to prune; found '{args.action}'")
    return {"list": _list, "verify": _verify, "prune": _prune}[args.action](args)


def _places(path: str) -> tuple[Path | None, RemoteFolder | None]:
    """The local and the remote checkpoints folder of a run; a URL has only the latter."""
    if is_url(path):
        return None, RemoteFolder(path)
    run = RunDir.find(path)
    url = run.read()[0].checkpoint.dir
    return run.checkpoints, RemoteFolder(url) if url else None


def _list(args: CheckpointArgs) -> int:
    folder, remote = _places(args.path)
    rows: list[dict[str, Any]] = []
    for step, path in steps_in(folder) if folder is not None else ():
        state = "complete" if is_file(path / MARKER) else "unfinished"
        rows.append({"step": step, "path": str(path), "state": state, "bytes": _size(path)})
    for path in sorted(folder.glob("damaged-step-*")) if folder is not None and folder.is_dir() else ():
        if path.is_symlink() or not path.is_dir():
            continue
        rows.append({"step": None, "path": str(path), "state": "set aside: damaged", "bytes": _size(path)})
    for step, name in remote.steps() if remote is not None else ():
        state = remote.state(name).replace("damaged", "set aside: damaged") if remote is not None else ""
        rows.append({"step": step, "path": f"{remote.url}/{name}", "state": state, "bytes": remote.size(name)})  # type: ignore[union-attr]
    if args.json:
        print(json.dumps({"run": args.path, "checkpoints": rows}))
        return 0
    table = Table("step", "state", "size", Column("path", overflow="fold"), box=None, header_style="dim")
    for row in rows:
        number = "" if row["step"] is None else str(row["step"])
        table.add_row(number, row["state"], schema.format_bytes(row["bytes"]), markup(row["path"]))
    Console(highlight=False, soft_wrap=True).print(table if rows else f"{markup(args.path)}: no checkpoints")
    return 0


def _verify(args: CheckpointArgs) -> int:
    path = Path(args.path)
    if not is_url(args.path) and is_file(path / MARKER):
        results = {str(path): verify(path)}
    else:
        folder, remote = _places(args.path)
        results = {str(p): verify(p) for _, p in complete(folder)} if folder is not None else {}
        if remote is not None:
            results |= {f"{remote.url}/{name}": remote.verify(name) for _, name in remote.complete()}
    if not results:
        raise CheckpointError(f"{args.path}: has no complete checkpoint")
    if args.json:
        print(json.dumps({"good": not any(results.values()), "checkpoints": results}))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for name, problems in results.items():
            console.print(f"{markup(name)}: {'[red]damaged[/]' if problems else '[green]verified[/]'}")
            for problem in problems:
                console.print(f"  {markup(problem)}")
    return int(any(results.values()))


def _prune(args: CheckpointArgs) -> int:
    if is_url(args.path):
        raise ConfigError(
            f"prune {args.path}: name the run directory; it says how many are kept, and that the run is not in use"
        )
    run = RunDir.find(args.path) if args.dry_run else RunDir.reopen(args.path)
    try:
        config, _ = run.read()
        keep = config.checkpoint.keep if args.keep is None else args.keep
        every = config.checkpoint.keep_every if args.keep_every is None else args.keep_every
        if keep < 1 or every < 0:
            raise ConfigError(f"--keep {keep} must be at least 1, --keep-every {every} at least 0")
        last = max((step for step, _ in complete(run.checkpoints)), default=-1)
        unfinished = [p for step, p in steps_in(run.checkpoints) if step < last and not is_file(p / MARKER)]
        gone = {str(p): _size(p) for p in (*doomed(run.checkpoints, keep, every), *unfinished)}
        if not args.dry_run:
            for path in gone:
                remove(Path(path))
        remote = RemoteFolder(config.checkpoint.dir) if config.checkpoint.dir else None
        for name in remote.doomed(keep, every) if remote is not None else ():
            assert remote is not None
            gone[f"{remote.url}/{name}"] = remote.size(name)
            if not args.dry_run:
                remote.remove(name)
    finally:
        run.unlock()
    if args.json:
        print(json.dumps({"run": args.path, "dry_run": args.dry_run, "deleted": gone, "bytes": sum(gone.values())}))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    for path in gone:
        console.print(f"{'would delete' if args.dry_run else 'deleted'} {markup(path)}")
    console.print(f"{len(gone)} checkpoints, {schema.format_bytes(sum(gone.values()))}")
    return 0


def _size(path: Path) -> int:
    """Bytes of the files of a checkpoint."""
    try:
        with os.scandir(path) as entries:
            return sum(e.stat(follow_symlinks=False).st_size for e in entries)
    except FileNotFoundError:  # a run that is training removes old ones
        return 0
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read: {files.why(e)}") from None
