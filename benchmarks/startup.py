"""The cost of a start: process groups, communicators and store operations by number of ranks; seconds on this machine;
saving and opening checkpoints.

    python -m benchmarks.startup [--quick] [--json PATH] [--only counts seconds disk]

The counts are those of the plan (fourfold.program.groups) and of a rank's rendezvous in a store where all others have already
written. Seconds: 64 CPU ranks (pipe 2 · data 16 · col 2) start, train three steps and save. The peer is a goal: for counts those
of 8 ranks times the logarithm of the ranks. A ratio above 1: better than that. Disk: 2 GiB of tensors saved with 1, 2 and 4
files, each next to `dd conv=fsync` with as many writers, in turns (medians); the peer "one file, then hashed" is how DCP's own
writer and a checksum would do it. FOURFOLD_BENCH_DIR says on which disk.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.common import Row, arguments, finish, lower_is_better, show
from fourfold.checkpoint.folder import describe
from fourfold.checkpoint.save_load import Checkpointer, holding_of, load, verify
from fourfold.checkpoint.tensor_files import FileWriter
from fourfold.config import ModelConfig
from fourfold.launch.place import agree
from fourfold.plan import Mesh, Plan
from fourfold.program.groups import groups_of
from fourfold.program.stages import lay_out_pipeline
from fourfold.testing.stores import CountingStore, CrowdedStore

GROUP_OPERATIONS = 2
"""Of a rank, for each process group (gloo): it writes its address, and reads those of the members."""
COMMUNICATOR_OPERATIONS = 1
"""Of a rank, for each communicator (NCCL): it writes or reads the communicator's id."""


def main() -> None:
    args = arguments("Start-up: groups, communicators, store operations, seconds", list(SECTIONS))
    rows: list[Row] = []
    for title, section in (SECTIONS[name] for name in args.only):
        found = list(section(args.quick))
        show(f"\n{title}", found)
        rows += found
    finish("startup", rows, args.json)


def meshes(ranks: int) -> dict[str, tuple[Mesh, bool]]:
    """Meshes of a number of ranks, and whether their units are sharded."""
    return {
        "data, zero3": (Mesh(data=ranks), True),
        "pipe · data · col": (Mesh(pipe=2, data=ranks // 4, col=2), False),
        "deep pipe, grid, keep": (Mesh(pipe=max(2, ranks // 8), data=min(2, ranks // 8), row=2, col=2), True),
    }


def counts(quick: bool) -> Iterator[Row]:
    """A rank in the middle of the mesh."""
    first: dict[tuple[str, str], int] = {}
    for ranks in (8, 1024) if quick else (8, 64, 256, 1024):
        for name, (mesh, sharded) in meshes(ranks).items():
            rule = [{"match": "*", "mode": "keep" if mesh.pipe > 1 else "zero3"}] if sharded else []
            plan = Plan.from_dict({"mesh": mesh.degrees, "batch": {"micro_batches": 4}, "unit": rule})
            model = ModelConfig(family="gpt", layers=128, hidden=64, heads=8, seq_len=16, tie=True).resolve()
            layout = lay_out_pipeline(model, plan, plan.mesh.batch_ways * 4)
            rank = ranks // 2
            groups = groups_of(model, plan, layout, rank)
            communicators = sum(not group.gloo for group in groups)
            store = CountingStore(CrowdedStore(rank, ranks))
            agree(store, rank, ranks, timeout=10)
            operations = sum(store.operations.values())
            operations += GROUP_OPERATIONS * len(groups) + COMMUNICATOR_OPERATIONS * communicators
            case = f"{name}: {mesh.product()}"
            found = {"communicators": communicators, "process groups": len(groups), "store operations": operations}
            for what, count in found.items():
                goal = first.setdefault((name, what), count) * math.log2(ranks) / 3
                yield lower_is_better(case, "grows as log(ranks)", what, count, goal)


def seconds(quick: bool) -> Iterator[Row]:
    """Start, three steps, a checkpoint and the end of a run."""
    mesh = Mesh(pipe=2, data=2, col=2) if quick else Mesh(pipe=2, data=16, col=2)
    goal = 30.0 if quick else 50.0
    with tempfile.TemporaryDirectory(prefix="fourfold-startup-") as folder:
        text = Path(folder) / "corpus.txt"
        text.write_text("".join(f"{i} times {i} is {i * i}; " for i in range(4000)))
        config = {
            "model": {"family": "gpt", "layers": 4, "hidden": 64, "heads": 4, "seq_len": 32},
            "data": {"source": str(text)},
            "train": {"steps": 3, "global_batch": 4 * mesh.data, "run_dir": f"{folder}/run", "device": "cpu"},
        }
        Path(folder, "config.json").write_text(json.dumps(config))
        Path(folder, "plan.json").write_text(json.dumps({"mesh": mesh.degrees, "batch": {"micro_batches": 4}}))
        command = [sys.executable, "-m", "fourfold", "train", "config.json", "--plan", "plan.json"]
        start = time.monotonic()
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        took = time.monotonic() - start
    case = f"{mesh.ranks} CPU ranks ({mesh.product()})"
    yield lower_is_better(case, "goal", "seconds to start, train 3 steps and save", took, goal)


def disk(quick: bool) -> Iterator[Row]:
    """Gigabytes per second of saving, checking and opening a checkpoint, and how long a step waits for a background save."""
    rounds, size = (1, 64 << 20) if quick else (3, 2 << 30)
    tensors = {f"w{i}": torch.randn(size // 64) for i in range(16)}  # 16 · 4 bytes
    holdings = [holding_of(name, tensor) for name, tensor in tensors.items()]
    times: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="fourfold-disk-", dir=os.environ.get("FOURFOLD_BENCH_DIR")) as folder:
        where = Path(folder)
        for _ in range(rounds):
            for writers in (1, 2, 4):
                times[f"dd {writers}"].append(_timed(lambda w=writers: _dd(where, size, w)))
                times[f"save {writers}"].append(_timed(lambda w=writers: _save(where / "ours", tensors, w)))
            times["old"].append(_timed(lambda: _save_then_hash(where / "theirs", tensors)))
            saver = Checkpointer(where / "checkpoints", keep=1, background=True)
            times["wait"].append(_timed(lambda s=saver: s.save(1, holdings, {"step": 1})))
            saver.wait()
            newest = saver.finished()[-1]
            times["verify"].append(_timed(lambda p=newest: verify(p)))
            times["load"].append(_timed(lambda p=newest: load(p, holdings)))
            shutil.rmtree(where / "checkpoints")
    rate = {name: size / 1e9 / statistics.median(found) for name, found in times.items()}
    case = f"{size / 2**30:.2f} GiB"
    for writers in (1, 2, 4):
        yield _faster(case, f"dd, {writers} writers", "GB/s saved", rate[f"save {writers}"], rate[f"dd {writers}"])
    yield _faster(case, "one file, then hashed", "GB/s saved", rate["save 4"], rate["old"])
    yield _faster(case, "checked alone", "GB/s opened (checked and read)", rate["load"], rate["verify"])
    yield lower_is_better(
        case, "saving at once", "seconds that a step waits", *map(statistics.median, (times["wait"], times["save 4"]))
    )


def _faster(case: str, peer: str, metric: str, ours: float, theirs: float) -> Row:
    return Row(case, peer, metric, ours, theirs, ours / theirs, 0.0)


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _save(path: Path, tensors: Mapping[str, torch.Tensor], files: int) -> None:
    dcp.save(dict(tensors), storage_writer=FileWriter(path, files), no_dist=True)
    shutil.rmtree(path)


def _save_then_hash(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    for file in path.glob("*.distcp"):
        describe(file)
    shutil.rmtree(path)


def _dd(folder: Path, size: int, writers: int) -> None:
    files = [folder / f"dd{i}" for i in range(writers)]
    count = size // (8 << 20) // writers
    command = ["dd", "if=/dev/zero", "bs=8M", f"count={count}", "conv=fsync"]
    running = [subprocess.Popen([*command, f"of={file}"], stderr=subprocess.DEVNULL) for file in files]
    assert not any(process.wait() for process in running)
    for file in files:
        file.unlink()


SECTIONS: dict[str, tuple[str, Callable[[bool], Iterator[Row]]]] = {
    "counts": ("Of one rank, by the number of ranks", counts),
    "seconds": ("Seconds", seconds),
    "disk": ("Checkpoints and the disk", disk),
}

if __name__ == "__main__":
    main()
