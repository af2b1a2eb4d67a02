"""`fourfold calibrate`: measure this machine, or the job this process belongs to, and write a cluster file."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Literal

import psutil
import tyro
from rich.console import Console
from rich.markup import escape

from fourfold.cluster import Cluster
from fourfold.errors import ClusterError
from fourfold.schema import check_writable

__all__ = ["CalibrateArgs", "calibrate_command"]

LOOK, BUSY = 0.3, 30.0
"""Seconds to sample the machine's load before measuring, and the load in percent above which a warning is printed."""


@dataclass(frozen=True)
class CalibrateArgs:
    """Measure matmuls, collectives and links on this machine, and write a cluster file for `fourfold plan`."""

    out: Annotated[str, tyro.conf.arg(aliases=["-o"])] = "cluster.toml"
    """Cluster file to write (.toml, .json)."""
    nproc: int | None = None
    """Ranks to start on this machine; default: one per GPU, or one per two cores. Ignored under torchrun or srun."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if there is a GPU."""
    json: bool = False
    """Print the cluster as JSON."""
    debug: bool = False
    """Show tracebacks of errors."""


def calibrate_command(args: CalibrateArgs) -> int:
    if args.nproc is not None and args.nproc < 1:
        raise ClusterError(f"--nproc {args.nproc}: at least one rank is needed")
    if args.device == "cuda" and not _gpus(args.device):
        raise ClusterError("--device cuda: torch sees no GPU here; use auto or cpu")
    from fourfold.launch.place import current_place

    if "RANK" in os.environ or "SLURM_STEP_ID" in os.environ:
        if current_place().rank == 0:
            check_writable(args.out, "a cluster", ClusterError)
        if _measure(args, current_place(), None, sys.stdout) and current_place().rank == 0:
            _tell(args)
        return 0
    check_writable(args.out, "a cluster", ClusterError)
    from fourfold.launch.local import launch_local

    ranks = args.nproc or _gpus(args.device) or max(1, (os.cpu_count() or 2) // 2)
    Cluster.local(ranks)  # raises if this machine has too little memory for this many ranks
    busy = psutil.cpu_percent(LOOK)
    if busy > BUSY:
        _warn(f"this machine is busy ({busy:.0f} % of its cores in use): the measured rates will be too low")
    if not args.json:
        Console(highlight=False).print(f"measuring with {ranks} {'ranks' if ranks > 1 else 'rank'} …", style="dim")
    with tempfile.TemporaryDirectory(prefix="fourfold-calibrate-") as logs:
        done = launch_local(
            lambda place, store, screen: _measure(args, place, store, screen),
            ranks,
            Path(logs),
            stopping=f"stopped: {args.out} is not written",
        )
    if not done:
        return 130
    _tell(args)
    return 0


def _warn(text: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[yellow]warning:[/] {escape(text)}")


def _gpus(device: str) -> int:
    if device == "cpu" or not (Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()):
        return 0
    import torch

    return torch.cuda.device_count()


def _measure(args: CalibrateArgs, place: object, store: object, screen: IO[str] | None) -> bool:
    """Measure on one rank; rank 0 prints progress and writes the file."""
    import torch

    from fourfold.launch.place import Place, choose_device, join_group, leave
    from fourfold.train.calibrate import calibrate

    assert isinstance(place, Place)
    torch.set_num_threads(1)
    device = choose_device(args.device, place)
    if place.ranks > 1:
        join_group(place, store, device, 120.0)  # type: ignore[arg-type]
    try:
        console = Console(file=screen, highlight=False, quiet=args.json or place.rank > 0)
        cluster = calibrate(place, device, tell=lambda what: console.print(f"  {what} …", style="dim"))
        if place.rank == 0:
            cluster.save(args.out)
        return True
    finally:
        if place.ranks > 1:
            leave()


def _tell(args: CalibrateArgs) -> None:
    cluster = Cluster.load(args.out)
    _, _, doubt = cluster.source.partition("; ")
    if doubt:
        _warn(f"{doubt}; calibrate again when the machine is otherwise idle")
    if args.json:
        print(json.dumps(cluster.to_dict(), indent=2))
        return
    from fourfold.schema import format_bytes
    from fourfold.view.console import facts

    def number(value: float) -> str:
        units = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
        return next(f"{value / size:.3g} {unit}" for unit, size in units if value >= size or unit == "k")

    d = cluster.device
    rows = [
        ("devices", f"{cluster.nodes} × {cluster.devices} {d.name}, {format_bytes(cluster.memory)} each"),
        ("matmuls", ", ".join(f"{k} {number(v)}FLOP/s" for k, v in d.matrix.items())),
        (
            "memory",
            f"{number(d.memory_rate)}B/s, {d.eager:.0%} of it for unfused operators; "
            f"launch overhead {d.operator * 1e6:.1f} µs per operator",
        ),
        ("host link", f"{number(cluster.host.link)}B/s"),
    ]
    for level in cluster.level:
        rows.append((level.name, f"{number(level.bandwidth)}B/s, {level.latency * 1e6:.0f} µs per hop"))
        for kind, points in level.measured.items():
            ratios = ", ".join(f"{format_bytes(size)} × {ratio:.2f}" for size, ratio in points)
            rows.append((f"  {kind}", f"relative to an ideal ring: {ratios}"))
    if cluster.ranks > 1:
        rows.append(("overlap", f"{cluster.overlap:.0%} of a gather can overlap with compute"))
    rows.append(("written to", f"{args.out}  (use it: fourfold plan CONFIG --cluster {args.out})"))
    facts(rows, Console(highlight=False))
