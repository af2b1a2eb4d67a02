"""The sharding engine against FSDP2: host time, step time, memory; both in one run, interleaved.

    python -m benchmarks.sharding_engine [--quick] [--json PATH]

- **host**: one rank of eight whose collectives return at once, tiny layers: what is left is the engine's own time per unit and
  micro-batch (less that of the plain model).
- **step**: two gloo ranks, medians. gloo's ratios are not NCCL's.
- **split**: an MLP of 4096 features (16384 hidden), one rank of 64, bf16 with fp32 gradients: the most bytes above what is
  resident, counted. "theirs" is the same MLP unsplit. Goals: 165 MiB in 4 slices, 90 in 8; at 8192 tokens with recomputation
  per slice 1200. Smaller sizes stand for larger ones where time is short: a quarter of every size has a 16th of the bytes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import Row, arguments, finish, lower_is_better, show
from fourfold.config import Config, ModelConfig
from fourfold.model.build import serial_model
from fourfold.model.layers import MLP
from fourfold.piece import whole
from fourfold.plan import Plan
from fourfold.program import ProgramUnit as ProgramUnit
from fourfold.program import build, lower
from fourfold.runtime.executor import Executor
from fourfold.runtime.stage import ChainLink, Stage
from fourfold.shard.sharing import Reductions, Sharing
from fourfold.shard.split import Slice, slices_of
from fourfold.shard.unit import Unit
from fourfold.testing.budget import Budget
from fourfold.testing.ranks import run_ranks
from fourfold.train.one_rank import OneRank, one_of_many

MIB = 2**20


def main() -> None:
    args = arguments("Sharding: ours and FSDP2's")
    torch.set_num_threads(1)
    rows: list[Row] = []
    for title, section in SECTIONS.items():
        found = list(section(args.quick))
        if found:
            show(f"\n{title}", found)
        rows += found
    finish("sharding_engine", rows, args.json)


# ---- the same model, ours and FSDP2's ----


def config_of(hidden: int, layers: int, batch: int, tokens: int = 8, vocab: int = 64) -> Config:
    model = {"family": "gpt", "layers": layers, "hidden": hidden, "heads": 4, "seq_len": tokens, "vocab": vocab}
    train = {"global_batch": batch, "run_dir": "unused"}
    return Config.from_dict({"model": model | {"tie": False}, "train": train, "data": {"source": "stdlib"}}).resolve()


def plan_of(ranks: int, mode: str, micro_batches: int, **more: Any) -> Plan:
    rules = [{"match": "*", "mode": mode}]
    return Plan.from_dict({"mesh": {"data": ranks}, "batch": {"micro_batches": micro_batches}, "unit": rules} | more)


def ours(config: Config, mode: str, ranks: int, rank: int, micro_batches: int) -> Callable[[], None]:
    made = OneRank(config, plan_of(ranks, mode, micro_batches), rank)

    def step() -> None:
        made.step()
        made.zero_grad()

    return step


def fsdp2(config: Config, mode: str, feed: OneRank, micro_batches: int) -> Callable[[], None]:
    """The same units under `fully_shard`, with what it needs to do the same."""
    from torch.distributed.fsdp import fully_shard

    model: Any = serial_model(config.model, 0)
    for part in model.units().values():
        fully_shard(part, reshard_after_forward=mode == "zero3")
    fully_shard(model)
    batches = [(feed.first(m), *feed.extra(m)) for m in range(micro_batches)]

    def step() -> None:
        for m, batch in enumerate(batches):
            last = m == micro_batches - 1
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            if mode == "keep":
                model.set_reshard_after_backward(last)
            model(*batch).backward()
        model.zero_grad()

    return step


def plain(config: Config, feed: OneRank, micro_batches: int) -> Callable[[], None]:
    model = serial_model(config.model, 0)
    batches = [(feed.first(m), *feed.extra(m)) for m in range(micro_batches)]

    def step() -> None:
        for batch in batches:
            model(*batch).backward()
        model.zero_grad()

    return step


def race(
    steps: dict[str, Callable[[], None]], rounds: int, ready: Callable[[], object] = int
) -> dict[str, list[float]]:
    """Seconds of each contender's steps, taking turns; the first turn is not counted."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            ready()
            start = time.perf_counter()
            step()
            if turn:
                times[name].append(time.perf_counter() - start)
    return times


def host(quick: bool) -> Iterator[Row]:
    config, micro = config_of(16, 4 if quick else 12, 16), 2
    units = 2 * config.model.layers + 2
    for mode in ("zero3", "keep"):
        with one_of_many(8):
            feed = OneRank(config, plan_of(8, mode, micro))
            steps = {
                "ours": ours(config, mode, 8, 0, micro),
                "theirs": fsdp2(config, mode, feed, micro),
                "plain": plain(config, feed, micro),
            }
            times = race(steps, 5 if quick else 30)
        least = {name: min(found) / (units * micro) * 1e6 for name, found in times.items()}
        spread = statistics.pstdev(times["ours"]) / statistics.mean(times["ours"])
        us, them = least["ours"] - least["plain"], least["theirs"] - least["plain"]
        yield lower_is_better(f"{mode}, {units} units", "FSDP2", "host µs per unit and micro-batch", us, them, spread)


def step_time(quick: bool) -> Iterator[Row]:
    for hidden in (32,) if quick else (32, 256, 768):
        for mode in ("zero3", "zero2", "keep"):
            found = run_ranks(_step_time, 2, hidden, mode, 3 if quick else 9, timeout=300)
            median = {name: statistics.median(found[0][name]) * 1e3 for name in ("ours", "theirs")}
            spread = statistics.pstdev(found[0]["ours"]) / statistics.mean(found[0]["ours"])
            yield lower_is_better(
                f"{mode}, hidden {hidden}", "FSDP2", "step ms", median["ours"], median["theirs"], spread
            )


def _step_time(rank: int, ranks: int, hidden: int, mode: str, rounds: int) -> dict[str, list[float]]:
    config, micro = config_of(hidden, 4, 16, tokens=16), 4
    feed = OneRank(config, plan_of(ranks, mode, micro), rank)
    steps = {"ours": ours(config, mode, ranks, rank, micro), "theirs": fsdp2(config, mode, feed, micro)}
    return race(steps, rounds, dist.barrier)


# ---- operator splitting ----


class MlpRank:
    """One rank of 64 that holds an MLP alone, in `split` slices, and runs one micro-batch through it."""

    def __init__(self, hidden: int, split: int, recompute: Any, prefetch: int, device: str = "cpu"):
        m = ModelConfig(family="gpt", layers=1, hidden=hidden, heads=1, seq_len=8, vocab=8).resolve()
        with torch.device("meta"):
            mlp = MLP(m).to(torch.bfloat16)
        shapes = {n: tuple(p.shape) for n, p in mlp.named_parameters()}
        separate = recompute == "none"
        parts = [Slice(mlp, {n: (whole(n, s),) for n, s in shapes.items()})]
        if split > 1:
            parts = slices_of("mlp", mlp, split, per_matrix=separate)
        group = dist.group.WORLD
        sharing, reductions = Sharing(64, 0, 1, 0, group, group), Reductions(min(prefetch, 1))
        units, links = {}, []
        for i, part in enumerate(parts):
            unit = Unit.of(
                f"mlp/{i}",
                part.module,
                pieces=part.pieces,
                device=torch.device(device),
                compute=torch.bfloat16,
                reduce=torch.float32,
                sharing=sharing,
                reductions=reductions,
                sliced=split > 1,
            )
            unit.scatter()
            units[unit.name] = unit
            links.append(ChainLink(unit.name, unit, part.module, recompute, adds=part.adds, sliced=split > 1))
        described = [ProgramUnit(name, "zero3") for name in units]
        programs = lower(build("1f1b", 1, 1), [described], prefetch=prefetch)
        self.units, self.program = units, programs.of(0)
        self.executor = Executor((0,), 0, {0: Stage(links)}, units)

    def step(self, x: Tensor) -> None:
        self.x = x
        self.executor.run(self.program, self)
        for unit in self.units.values():
            unit.finish()

    def first(self, micro_batch: int) -> Tensor:
        return self.x

    def extra(self, micro_batch: int) -> tuple[Tensor, ...]:
        return ()

    def documents(self, micro_batch: int) -> None:
        return None

    def grad(self, micro_batch: int) -> Tensor:
        return self.x


def transient(hidden: int, tokens: int, split: int, recompute: str = "none", prefetch: int = 0) -> int:
    """Most bytes above what is resident (shards, input) in a step of the MLP."""
    with one_of_many(64):
        rank, budget = MlpRank(hidden, split, recompute, prefetch), Budget()
        x = torch.zeros(1, tokens, hidden, dtype=torch.bfloat16)
        budget.adopt(x, *(unit.shard for unit in rank.units.values()))
        resident = budget.live
        with budget:
            rank.step(x)
        return budget.peak.bytes - resident


def split(quick: bool) -> Iterator[Row]:
    part = 4 if quick else 1  # of every size
    for prefetch in (0, 1):
        unsplit = transient(4096 // part, 64 // part, 1, prefetch=prefetch) * part**2 / MIB
        for g in (2, 4, 8):
            found = transient(4096 // part, 64 // part, g, prefetch=prefetch) * part**2 / MIB
            yield lower_is_better(f"64 tokens, split {g}, prefetch {prefetch}", "unsplit", "MiB", found, unsplit)
    part = 16 if quick else 8  # bf16 products are slow on CPUs
    unsplit = transient(4096 // part, 8192 // part, 1, prefetch=1) * part**2 / MIB
    for g in (4, 8):
        for recompute in ("none", "full"):
            found = transient(4096 // part, 8192 // part, g, recompute, prefetch=1) * part**2 / MIB
            name = "per slice" if recompute == "full" else "not"
            yield lower_is_better(f"8192 tokens, split {g}, computed again {name}", "unsplit", "MiB", found, unsplit)


SECTIONS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "host time, collectives free": host,
    "step time, two gloo ranks": step_time,
    "operator splitting: transient memory of a 4096-wide MLP": split,
}

if __name__ == "__main__":
    main()
