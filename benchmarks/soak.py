"""A soak of the pipeline runtime: random schedules, executors, delays and shapes, step after step, in real processes.

    python -m benchmarks.soak [--steps 2000] [--ranks 4] [--seed 0]

Every step draws a schedule (any kind, split or fused, any number of micro-batches, on 1 to all ranks), an executor, a length
for each micro-batch and delays before ops, runs it over one transport, and compares losses and gradients with a serial run,
bit for bit. A step that hangs ends the soak with the wait's own error; tensors, threads and pooled buffers are counted
every hundred steps, and must not grow.
"""

from __future__ import annotations

import argparse
import gc
import random
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fourfold.piece import whole
from fourfold.program import ProgramUnit, Schedule, build, fused, lower, split
from fourfold.runtime.executor import Executor
from fourfold.runtime.message_driven import drive, run_driven
from fourfold.runtime.stage import ChainLink, Stage
from fourfold.runtime.transport import Transport
from fourfold.shard.unit import Unit as RealUnit
from fourfold.testing.ranks import run_ranks

WIDTH = 8
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("gpipe", {}),
    ("1f1b", {}),
    ("1f1b", {"slack": 2}),
    ("interleaved", {"stages_per_rank": 2}),
    ("interleaved", {"stages_per_rank": 3}),
    ("wave", {"waves": 1}),
    ("wave", {"waves": 2}),
    ("zb-h1", {}),
    ("zb-v", {}),
]


@dataclass
class Report:
    """What a soak found on one rank."""

    steps: int
    driven: int
    messages: int
    threads: tuple[int, int]
    """At the first count and at the most."""
    tensors: tuple[int, int]
    buffers: tuple[int, int]


def soak(steps: int, ranks: int = 4, seed: int = 0, show: bool = False) -> list[Report]:
    """Run `steps` random steps; raises RankFailure where one hangs, differs or leaks."""
    return run_ranks(_soak, ranks, steps, seed, show, timeout=60 + 2.0 * steps, group_timeout=60)


class Layer(nn.Module):
    """A norm, a linear and a residual; the last one ends in a loss."""

    def __init__(self, number: int, last: bool):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.last = last
        generator = torch.Generator().manual_seed(number)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype) / WIDTH**0.5

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        y = x + torch.tanh(self.linear(self.norm(x)))
        return y if target is None else (y - target).square().sum()


class Data:
    """Micro-batches of drawn lengths."""

    def __init__(self, lengths: list[int], seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.inputs, self.targets = (
            [torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in lengths] for _ in range(2)
        )

    def first(self, micro_batch: int) -> Tensor:
        return self.inputs[micro_batch]

    def extra(self, micro_batch: int) -> tuple[Tensor, ...]:
        return (self.targets[micro_batch],)

    def documents(self, micro_batch: int) -> None:
        return None

    def grad(self, micro_batch: int) -> Tensor:
        return torch.tensor(0.5, dtype=torch.float64)


@dataclass
class Draw:
    """One random step, the same on every rank."""

    schedule: Schedule
    data: Data
    driven: bool
    slack: int
    delays: tuple[float, ...]

    @classmethod
    def of(cls, chance: random.Random, ranks: int) -> Draw:
        name, options = chance.choice(KINDS)
        schedule = build(name, chance.randint(1, ranks), chance.randint(1, 2 * ranks), **options)
        schedule = chance.choice((lambda s: s, split, fused))(schedule)
        lengths = [chance.choice((1, 3, 16, chance.randint(1, 400))) for _ in range(schedule.micro_batches)]
        delays = chance.choice(((0.0,), (0.0,) * 9 + (0.004,), (0.0, 0.0005, 0.002)))
        return cls(
            schedule, Data(lengths, chance.randrange(1 << 30)), chance.random() < 0.5, chance.randint(0, 3), delays
        )


def _soak(rank: int, ranks: int, steps: int, seed: int, show: bool) -> Report:
    chance, mine = random.Random(seed), random.Random(seed * 1000 + rank + 1)
    edges = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]

    def new_group(members: list[int]) -> dist.ProcessGroup:
        return dist.new_group(members, timeout=timedelta(days=1), use_local_synchronization=True)  # type: ignore[return-value]

    transport = Transport(rank, edges, new_group, timeout=30)
    counts: list[tuple[int, int, int]] = []
    driven = messages = 0
    start = time.monotonic()
    for step in range(1, steps + 1):
        draw = Draw.of(chance, ranks)
        driven += draw.driven
        if rank < draw.schedule.ranks:
            messages += _step(rank, transport, draw, mine)
        if step % 100 == 0 or step == steps:
            dist.barrier()  # no rank is a hundred steps ahead of the count
            gc.collect()
            tensors = sum(isinstance(o, Tensor) for o in gc.get_objects())
            counts.append((threading.active_count(), tensors, transport.port.pool.buffers))
            if show and rank == 0:
                print(
                    f"\r{step:,} steps, {time.monotonic() - start:.0f} s, threads, tensors, buffers {counts[-1]}",
                    end=" ",
                )
    report = Report(steps, driven, messages, *((c[0], max(c)) for c in zip(*counts, strict=True)))  # type: ignore[arg-type]
    allowed = 2 * (ranks - 1) + 4  # threads: one per edge and direction; tensors: pooled buffers come and go
    assert report.threads[1] <= allowed, f"{report.threads[1]} threads, {allowed} at most"
    assert report.tensors[1] <= report.tensors[0] + 64, f"tensors grew from {report.tensors[0]} to {report.tensors[1]}"
    assert report.buffers[1] <= 64, f"{report.buffers[1]} pooled buffers"
    return report


def _step(rank: int, transport: Transport, draw: Draw, mine: random.Random) -> int:
    schedule = draw.schedule
    programs = lower(schedule, [[ProgramUnit(str(s))] for s in range(schedule.stages)])
    layers = [Layer(s, s == schedule.stages - 1) for s in range(schedule.stages)]
    losses, grads = _serial(layers, draw.data)
    units, stages = {}, {}
    for s in schedule.stages_of[rank]:
        layers[s].zero_grad()
        units[str(s)] = _unit(str(s), layers[s])
        stages[s] = Stage([ChainLink(str(s), units[str(s)], layers[s])], split=schedule.split)
    executor = Executor(
        schedule.placement, rank, stages, units, transport, watch=lambda op: time.sleep(mine.choice(draw.delays))
    )
    program = programs.of(rank)
    if draw.driven:
        outputs = run_driven(executor, drive(program, {u: (int(u),) for u in units}, draw.slack), draw.data)
    else:
        outputs = executor.run(program, draw.data)
    for m, loss in outputs.items():
        assert loss.item() == losses[m], f"{schedule}: loss of micro-batch {m}"
    for s, unit in ((int(n), u) for n, u in units.items()):
        unit.finish()
        for name in unit.params:
            assert torch.equal(unit.reduced_grad(name), grads[s, name]), f"{schedule}: gradient of {s}.{name}"
    return sum(type(i).__name__ == "Send" for i in program.instructions)


def _serial(layers: list[Layer], data: Data) -> tuple[list[float], dict[tuple[int, str], Tensor]]:
    losses = []
    for m in range(len(data.inputs)):
        x: Tensor = data.first(m)
        for layer in layers[:-1]:
            x = layer(x)
        loss = layers[-1](x, *data.extra(m))
        loss.backward(data.grad(m))
        losses.append(loss.item())
    return losses, {(s, n): p.grad for s, layer in enumerate(layers) for n, p in layer.named_parameters()}  # type: ignore[misc]


def _unit(name: str, module: nn.Module) -> RealUnit:
    values = {n: p.detach().clone() for n, p in module.named_parameters()}
    pieces = {n: (whole(f"{name}.{n}", tuple(v.shape)),) for n, v in values.items()}
    float64 = torch.float64
    unit = RealUnit.of(name, module, pieces=pieces, device=torch.device("cpu"), compute=float64, reduce=float64)
    for n, v in values.items():
        unit.params[n].data.copy_(v)
    return unit


def main() -> None:
    parser = argparse.ArgumentParser(description="Random pipelines until something gives")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.monotonic()
    reports = soak(args.steps, args.ranks, args.seed, show=True)
    sent = sum(r.messages for r in reports)
    print(
        f"\n{args.steps:,} steps on {args.ranks} ranks, {sent:,} messages, {time.monotonic() - start:.0f} s: every bit equal"
    )
    for rank, r in enumerate(reports):
        print(f"rank {rank}: threads, tensors, buffers at first and at most: {r.threads}, {r.tensors}, {r.buffers}")


if __name__ == "__main__":
    main()
