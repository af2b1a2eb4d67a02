"""Plans predicted before they run, on a real GPU: memory and compute time of one rank of many, its collectives free.

    python -m benchmarks.device_plans [--quick] [--json PATH]        # about four minutes and 60 GiB; quick: tiny, also on a CPU

The device is calibrated first, on shapes that no plan here has, and the figures go through a cluster file. Then rank r of N of
each plan runs its real code: forward, backward, update; other ranks do not exist (`fourfold.train.one_rank`), and what they
would send is this rank's own data. `ours` is the planner's prediction for that rank, `theirs` is measured, ratio 1 is right:

    allocated   the most bytes that tensors had in a step                       goal: within 5 %
    reserved    the most the allocator took from the device (no goal)
    compute     seconds of a step without communication                         goal: within 10 %

A step is timed when the device has worked for a second, as calibration does: a cool one is faster. What it spends on standing
in for other ranks is left out.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import Row, arguments, finish, show
from fourfold.cluster import Cluster, Level
from fourfold.config import Config
from fourfold.launch.place import Place
from fourfold.model.operators import ModelSpec
from fourfold.plan import Plan
from fourfold.planner.engines import own_engine
from fourfold.planner.evaluate import predict
from fourfold.planner.problem import PlanProblem
from fourfold.testing.budget import Budget
from fourfold.train.calibrate import calibrate
from fourfold.train.one_rank import OneRank, one_of_many

MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "family": "llama", "layers": 8, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "seq_len": 4096, "vocab": 32000,
    },
    "llama, 2048": {
        "family": "llama", "layers": 16, "hidden": 2048, "heads": 16, "ffn": 5632, "seq_len": 2048, "vocab": 32000,
    },
    "gpt": {"family": "gpt", "layers": 24, "hidden": 2048, "heads": 16, "seq_len": 2048, "vocab": 50304},
    "gpt, untied": {
        "family": "gpt", "layers": 24, "hidden": 2048, "heads": 16, "seq_len": 2048, "vocab": 50304, "tie": False,
    },
    "gpt, dropout": {
        "family": "gpt", "layers": 24, "hidden": 2048, "heads": 16, "seq_len": 2048, "vocab": 50304, "dropout": 0.1,
    },
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "llama": {
        "family": "llama", "layers": 8, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 160, "seq_len": 64, "vocab": 256,
    },
    "llama, 2048": {"family": "llama", "layers": 8, "hidden": 64, "heads": 4, "ffn": 160, "seq_len": 64, "vocab": 256},
    "gpt": {"family": "gpt", "layers": 8, "hidden": 64, "heads": 4, "seq_len": 64, "vocab": 256},
    "gpt, untied": {"family": "gpt", "layers": 8, "hidden": 64, "heads": 4, "seq_len": 64, "vocab": 256, "tie": False},
    "gpt, dropout": {"family": "gpt", "layers": 8, "hidden": 64, "heads": 4, "seq_len": 64, "vocab": 256, "dropout": 0.1},
}  # fmt: skip


def rule(match: str = "*", **more: Any) -> dict[str, Any]:
    return {"match": match, **more}


WARM = 1.0
"""Seconds of steps before those that count."""
PLANS: list[tuple[str, str, int, int, dict[str, Any]]] = [  # name, model, sequences of a micro-batch, rank, plan
    ("data 8, zero3", "llama", 2, 0, {"mesh": {"data": 8}, "unit": [rule(mode="zero3")]}),
    ("data 4, replicate", "llama", 1, 0, {"mesh": {"data": 4}, "batch": {"micro_batches": 2}}),
    ("data 8, keep, 4 micro-batches", "llama", 1, 3,
     {"mesh": {"data": 8}, "unit": [rule(mode="keep")], "batch": {"micro_batches": 4}}),
    ("data 8, zero2, selective", "gpt", 8, 0, {"mesh": {"data": 8}, "unit": [rule(mode="zero2", recompute="selective")]}),
    ("data 64, zero3, full, reduced each time", "llama", 2, 5,
     {"mesh": {"data": 64}, "unit": [rule(mode="zero3", recompute="full", reduce="micro-batch")], "batch": {"micro_batches": 2}}),
    ("data 8, MLP split 4", "llama", 2, 0,
     {"mesh": {"data": 8}, "unit": [rule("*.mlp", mode="zero3", split=4, recompute="per-slice"), rule(mode="zero3")]}),
    ("data 8, no recomputation", "llama, 2048", 8, 1, {"mesh": {"data": 8}, "unit": [rule(mode="zero3")]}),
    ("pipe 4 · data 2, 1f1b, first stage", "gpt, untied", 4, 0,
     {"mesh": {"pipe": 4, "data": 2}, "batch": {"micro_batches": 8}}),
    ("pipe 4, wave, third rank", "llama, 2048", 4, 2,
     {"mesh": {"pipe": 4}, "batch": {"micro_batches": 8}, "pipeline": {"schedule": "wave"}}),
    ("pipe 2, zb-h1, last stage", "llama", 1, 1,
     {"mesh": {"pipe": 2}, "batch": {"micro_batches": 4}, "pipeline": {"schedule": "zb-h1"}}),
    ("data 2 · col 4", "llama", 2, 1,
     {"mesh": {"data": 2, "col": 4}, "unit": [rule(mode="zero3")], "batch": {"micro_batches": 2}}),
    ("row 2 · col 2", "gpt", 8, 3, {"mesh": {"row": 2, "col": 2}}),
    ("row 2 · col 2, one sequence", "llama, 2048", 1, 0, {"mesh": {"row": 2, "col": 2}, "batch": {"micro_batches": 4}}),
    ("data 2 · col 4, one sequence", "llama, 2048", 1, 1,
     {"mesh": {"data": 2, "col": 4}, "batch": {"micro_batches": 4}}),
    ("data 8, zero2", "gpt, dropout", 8, 0, {"mesh": {"data": 8}, "unit": [rule(mode="zero2")]}),
    ("data 8, zero2, full", "gpt, dropout", 8, 0, {"mesh": {"data": 8}, "unit": [rule(mode="zero2", recompute="full")]}),
    ("data 4, optimizer on the host", "llama", 2, 0,
     {"mesh": {"data": 4}, "unit": [rule(mode="zero3")], "memory": {"optimizer": "host"}}),
    ("data 4, activations on the host", "llama", 2, 0,
     {"mesh": {"data": 4}, "unit": [rule(mode="zero3")], "memory": {"activations": "host"}}),
    ("data 4, both on the host", "llama", 2, 0,
     {"mesh": {"data": 4}, "unit": [rule(mode="zero3")], "memory": {"optimizer": "host", "activations": "host"}}),
]  # fmt: skip


# ---- what other ranks would send ----


class _Done:
    def wait(self) -> None:
        """It is there."""


class Clock:
    """Seconds that the device spends on standing in for other ranks."""

    def __init__(self) -> None:
        self.marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    def copy(self, out: Tensor, source: Tensor) -> _Done:
        if out.device.type != "cuda":
            out.copy_(source)
            return _Done()
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record(self.stream)
        out.copy_(source)
        ended.record(self.stream)
        self.marks.append((began, ended))
        return _Done()

    def read(self) -> float:
        """Since it was last read; the device is done."""
        seconds = sum(began.elapsed_time(ended) for began, ended in self.marks) / 1e3
        self.marks.clear()
        return seconds


@contextmanager
def own_data() -> Iterator[Clock]:
    """Collectives bring this rank's own data: what memory happens to hold would make other numbers, and other speeds."""
    clock = Clock()

    def gathered(out: Tensor, mine: Tensor, **_: Any) -> _Done:
        return clock.copy(out.view(-1, mine.numel()), mine.reshape(1, -1))

    def scattered(out: Tensor, whole: Tensor, **_: Any) -> _Done:
        return clock.copy(out.view(-1), whole.reshape(-1)[: out.numel()])

    def exchanged(out: Tensor, mine: Tensor, **_: Any) -> _Done:
        return clock.copy(out, mine)

    with (
        patch("fourfold.collectives._all_gather", gathered),
        patch("fourfold.collectives._reduce_scatter", scattered),
        patch("torch.distributed.all_to_all_single", exchanged),
    ):
        yield clock


# ---- one plan ----


def predicted(plan: Plan, problem: PlanProblem, stage: int) -> tuple[float, float]:
    """Bytes, and seconds without communication, of a rank of the pipeline."""
    host = problem.cluster.host  # it has one to itself here
    alone = replace(host, memory=str(int(problem.cluster.host_memory) * problem.cluster.devices**2))
    p = predict(plan, replace(problem, cluster=replace(problem.cluster, host=alone)))
    return p.memory[stage].peak, p.computing[stage] if plan.mesh.pipe > 1 else p.seconds


def measured(config: Config, plan: Plan, rank: int, device: str, steps: int) -> tuple[int, int, float]:
    """Bytes allocated and reserved, and the median seconds of a step."""
    cuda = device == "cuda"
    budget = Budget()
    seconds = []
    with one_of_many(plan.mesh.ranks, rank), own_data() as clock, nullcontext() if cuda else budget:
        one = OneRank(config, plan, rank, device, optimizer=True)
        start = time.perf_counter()
        while len(seconds) <= steps or (cuda and time.perf_counter() - start < WARM):
            began = time.perf_counter()
            one.step(len(seconds))
            one.update()
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began - clock.read())
            if len(seconds) == 1:  # the first makes what is made once
                budget.reset_peak()
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.max_memory_allocated() if cuda else budget.peak.bytes
        reserved = torch.cuda.max_memory_reserved() if cuda else allocated
    one.close()
    del one
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return allocated, reserved, statistics.median(seconds[-steps:])


def rows(cluster: Cluster, quick: bool, device: str) -> Iterator[Row]:
    for name, model, size, rank, sections in PLANS:
        narrow = {"compute": "bf16" if device == "cuda" else "fp32", "compile": False}
        plan = Plan.from_dict({"precision": narrow, **sections})
        batch = plan.mesh.batch_ways * (plan.batch.micro_batches or 1) * size
        train = {"global_batch": batch, "run_dir": "unused", "device": device}
        config = Config.from_dict({"model": (TINY if quick else MODELS)[model], "train": train}).resolve()
        plan.check(config, plan.mesh.ranks)
        problem = PlanProblem(ModelSpec.from_config(config.model), cluster, batch, plan.precision)
        problem = problem.with_engine(own_engine(deterministic=False))  # torch's own choice of attention kernels
        stage = rank // (plan.mesh.ranks // plan.mesh.pipe)
        memory, seconds = predicted(plan, problem, stage)
        allocated, reserved, took = measured(config, plan, rank, device, 2 if quick else 3)
        case = f"{model}: {name}"
        for row in (
            Row(case, "device", "allocated_bytes", memory, allocated, memory / allocated),
            Row(case, "device", "reserved_bytes", memory, reserved, memory / reserved),
            Row(case, "device", "compute_s", seconds, took, seconds / took),
        ):
            print(
                f"{row.case}: {row.metric} {row.ours:.5g} predicted, {row.theirs:.5g} measured, {row.ratio:.3f}",
                flush=True,
            )
            yield row


def spread_over(cluster: Cluster, ranks: int) -> Cluster:
    """The calibrated device in a cluster of many, whose network takes no time."""
    return replace(cluster, devices=ranks, level=(Level(bandwidth=1e18, latency=1e-12),))


def main() -> None:
    args = arguments(__doc__ or "")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.quick:
        raise SystemExit("there is no GPU here; --quick runs tiny plans on the CPU")
    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        calibrate(Place(), torch.device(device)).save(path)
        print(path.read_text())
        cluster = spread_over(Cluster.load(path), 64)
    print(f"calibrated in {time.perf_counter() - began:.0f} s", flush=True)
    if device == "cuda":
        probe()
    gc.collect()  # of calibration and the probe, or the first plan would be measured with what they left
    found = list(rows(cluster, args.quick, device))
    show("plans on this device: ours predicted, theirs measured, ratio 1 is right", found)
    for metric, goal in (("allocated_bytes", 0.05), ("compute_s", 0.10)):
        errors = [abs(r.ratio - 1) for r in found if r.metric == metric]
        met = sum(e <= goal for e in errors)
        errors_said = f"mean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}"
        print(f"{metric}: {met} of {len(errors)} plans within {goal:.0%}; {errors_said}")
    finish("device_plans", found, args.json)


def probe() -> None:
    """What attention holds for a while beyond its inputs, for a reader of a miss."""

    def most(work: Callable[[], Any]) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before

    for heads, keys in ((32, 8), (16, 16)):
        q, k, v = (
            torch.randn(1, 4096, n, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
            for n in (heads, keys, keys)
        )
        out: list[Tensor] = []
        attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=heads != keys)
        there = most(lambda out=out, attend=attend: out.append(attend()))  # type: ignore[misc]
        grad = torch.randn_like(out[0])
        back = most(partial(torch.autograd.grad, out[0], (q, k, v), grad))
        held = f"forward {there / q.nbytes:.3f}, backward {back / q.nbytes:.3f}"
        print(f"attention, {heads} and {keys} heads: {type(out[0].grad_fn).__name__}; of q's bytes, {held}", flush=True)


if __name__ == "__main__":
    main()
