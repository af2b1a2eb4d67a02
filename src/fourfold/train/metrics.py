"""Metrics of every step: one JSON object per line in metrics.jsonl, and what MFU is measured against.

    step loss grad_norm lr tokens seconds tokens_per_second mfu peak_bytes skipped

`loss` is the mean over the step's valid tokens; it and `grad_norm` (before clipping) are null when not finite, and `skipped`
counts the steps that were skipped for that. `tokens` are those of the step's documents, without padding; `seconds` run from
the end of the step before (or of an evaluation or save after it) to the end of this one, on a GPU in the device's time;
evaluations have `eval_seconds` and saves `save_seconds` in lines of their own. `exposed_seconds` (time in which a rank waited
for collectives) and `bubble` (share of the step in which it waited for other pipeline ranks; with a pipeline) are means over
all ranks, of the last traced step, in the line of the first step that knows them. `peak_bytes` is the most memory any rank
has used so far (CUDA: allocated; CPU: resident). `mfu` is the model's FLOPs for these tokens (model/spec.py: no
recomputation) per second over the ranks' peak rate: the vendor's figure for known GPUs at the plan's precision, and on CPUs,
which have no such figure worth the name, the rate of a matrix product measured when the run starts, on all ranks at once.

`Recorder` writes them, and prints a part of them to the console.
"""

from __future__ import annotations

import functools
import json
import math
import resource
import sys
import time
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from fourfold import files
from fourfold.config import Config
from fourfold.errors import RunDirError
from fourfold.offload.streamer import LAST_STEPS, TOO_MANY
from fourfold.supervision.stragglers import WINDOW, WINDOWS
from fourfold.train.callbacks import Callback, RunInfo
from fourfold.train.rundir import RunDir, scan_metrics
from fourfold.view.console import Progress, short_duration
from fourfold.view.text import markup

__all__ = ["MetricsFile", "Recorder", "measured_flops", "peak_bytes", "peak_flops", "used_bytes"]

# Dense matrix rate, FLOP/s, by a part of the device's name: (bf16, fp32 without TF32, fp64), vendor figures.
_PEAKS = {
    "B200": (2250e12, 75e12, 37e12),
    "H200": (989e12, 67e12, 67e12),
    "H100": (989e12, 67e12, 67e12),
    "A100": (312e12, 19.5e12, 19.5e12),
    "V100": (125e12, 15.7e12, 7.8e12),
    "L40S": (362e12, 91.6e12, 1.4e12),
    "A10": (125e12, 31.2e12, 0.5e12),
    "L4": (121e12, 30.3e12, 0.5e12),
    "4090": (165e12, 82.6e12, 1.3e12),
}


class MetricsFile:
    """Appends to metrics.jsonl; after a resume, lines of steps that will be repeated are dropped first.

    `dropped`: line numbers of damaged lines, which are dropped too.
    """

    def __init__(self, run: RunDir, done: int):
        self.dropped: list[int] = []
        with files.create(run.metrics_file, RunDirError) as f:
            for number, line in scan_metrics(run):
                if line is None:
                    self.dropped.append(number)
                elif line["step"] <= done:
                    f.write(json.dumps(line).encode() + b"\n")
        self._path = run.metrics_file
        self._file = files.append_to(self._path, RunDirError)

    def write(self, metrics: dict[str, Any]) -> None:
        """Append one line; non-finite numbers become null, since JSON has none."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
        files.append_line(self._file, self._path, json.dumps(finite), RunDirError)

    def close(self) -> None:
        self._file.close()


class Recorder(Callback):
    """Rank 0's record: metrics.jsonl and the console."""

    def __init__(self, run: RunDir, config: Config, done: int, console: IO[str] | None, device: torch.device):
        self.file = MetricsFile(run, done)
        memory = "tensors" if device.type == "cuda" else "process"
        self.progress = Progress(config.train.steps, config.log.every, console, memory)
        self.waited: dict[int, float] = {}  # by step, how long training waited for its save
        self.tries: bool | None = (
            None  # whether the last step's updates started before the norm was known; None: none yet
        )
        if self.file.dropped:
            numbers = ", ".join(map(str, self.file.dropped[:10]))
            self.progress.note(f"  metrics.jsonl: dropped {len(self.file.dropped)} damaged lines: {numbers}")

    def on_step(self, run: RunInfo, metrics: dict[str, Any]) -> None:
        self.file.write(metrics)
        self.progress.step(metrics)
        self._tell_rollback("rolled_back" in metrics)
        if slow := metrics.get("straggler"):
            op = {"F": "forwards", "B": "backwards", "W": "weight gradients"}[slow["op"]]
            who = f"rank {slow['rank']} takes {slow['slower']:g} times as long as its replicas for {op}"
            self.progress.note(f"  [yellow]slow:[/] {who} (the last {WINDOW * WINDOWS} steps)")

    def _tell_rollback(self, tries: bool) -> None:
        if self.tries and not tries:
            why = f"{TOO_MANY} of the last {LAST_STEPS} steps were clipped or not finite"
            self.progress.note(f"  [yellow]updates wait for the gradient norm[/] while {why}")
        elif self.tries is False and tries:
            self.progress.note("  updates start in the backward again")
        if tries or self.tries is not None:
            self.tries = tries

    def on_eval(self, run: RunInfo, metrics: dict[str, Any]) -> None:
        self.file.write(metrics)
        took = short_duration(metrics["eval_seconds"])
        known = ("eval_loss", "eval_tokens", "eval_seconds", "step")
        more = "".join(f"  {n.removeprefix('eval_')} {v:.4g}" for n, v in metrics.items() if n not in known)
        loss = f"loss {metrics['eval_loss']:.4f}{markup(more)}"
        self.progress.note(f"  evaluation at step {metrics['step']}: {loss}  [dim]({took})[/]")

    def on_saving(self, run: RunInfo, metrics: dict[str, Any]) -> None:
        self.file.write(metrics)
        self.waited[metrics["step"]] = metrics["save_seconds"]

    def on_save(self, run: RunInfo, step: int, path: Path) -> None:
        waited = short_duration(self.waited.pop(step, 0.0))
        self.progress.note(f"  [dim]saved {markup(path)} (training waited {waited})[/]")

    def on_end(self, run: RunInfo, step: int) -> None:
        self.file.close()


def peak_bytes(device: torch.device) -> int:
    """Peak memory of this rank so far, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def used_bytes(device: torch.device) -> int:
    """Memory in use on this rank: on CUDA its tensors, on a CPU the resident memory of the process (0: unknown)."""
    if device.type == "cuda":
        return int(torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"])
    try:
        with open("/proc/self/statm", "rb") as f:
            return int(f.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Peak FLOP/s, for MFU."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        column = {torch.float32: 1, torch.float64: 2}.get(dtype, 0)
        known = [rates[column] for part, rates in _PEAKS.items() if part in name]
        if known:
            return known[0]
    return measured_flops(device, dtype)


@functools.cache
def measured_flops(device: torch.device, dtype: torch.dtype, size: int = 384, seconds: float = 0.1) -> float:
    """Rate of a square matmul: the best within `seconds`; on a busy machine, of 20 within at most ten times that. Cached."""
    a: Tensor = torch.ones(size, size, dtype=dtype, device=device)
    best, count, begin = 0.0, 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < seconds or (count < 20 and spent < 10 * seconds):
        count += 1
        start = time.perf_counter()
        b = a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
        del b
    return best
