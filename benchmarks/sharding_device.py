"""One rank of 64 on a real GPU, its collectives free: memory against the program's replay, and overlap.

    python -m benchmarks.sharding_device [--quick] [--json PATH]         # needs a GPU; about two minutes, 40 GiB (quick: 4)

- **memory**: ten plans; "ours" is the most the allocator had in a step, "theirs" what the program's replay says of gathered
  parameters and gradients, on top of what is resident and of activations measured one unit at a time. A ratio of 1 is exact.
- **overlap**: collectives are emulated, as kernels on a stream of their own that take bytes / 100 GB/s; a step with prefetch
  against one without, and `sharding_trace.json`, a Chrome trace of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.common import Row, arguments, finish, lower_is_better, show
from benchmarks.sharding_engine import MIB, config_of, plan_of, race
from fourfold.plan import Plan
from fourfold.testing.one_rank import OneRank, one_of_many


def main() -> None:
    args = arguments("Sharding on one GPU: memory and overlap")
    rows = list(device(args.quick))
    show("one rank of 64 on this GPU", rows)
    finish("sharding_device", rows, args.json)


def rule(match: str, mode: str, **more: Any) -> dict[str, Any]:
    return {"match": match, "mode": mode, **more}


DEVICE_PLANS: dict[str, tuple[int, list[dict[str, Any]]]] = {  # micro-batches, rules
    "replicate": (1, [rule("*", "replicate")]),
    "zero3": (1, [rule("*", "zero3")]),
    "zero3, 4 micro-batches": (4, [rule("*", "zero3")]),
    "zero3, reduced each time": (4, [rule("*", "zero3", reduce="micro-batch")]),
    "zero2": (1, [rule("*", "zero2")]),
    "keep": (4, [rule("*", "keep", reduce="micro-batch")]),
    "within 8": (1, [rule("*", "zero3", within=8)]),
    "recomputed": (1, [rule("*", "zero3", recompute="full")]),
    "MLP split 4": (1, [rule("*.mlp", "zero3", split=4, recompute="per-slice"), rule("*", "zero3")]),
    "mixed": (2, [rule("*.mlp", "zero3"), rule("*.attn", "keep"), rule("*", "zero2")]),
}


def device(quick: bool) -> Iterator[Row]:
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here")
    hidden, layers, tokens, ranks = (1024, 4, 512, 64) if quick else (4096, 8, 2048, 64)
    for name, (micro, rules) in DEVICE_PLANS.items():
        config = config_of(hidden, layers, ranks * micro, tokens, 32000)
        plan = Plan.from_dict(
            {
                "mesh": {"data": ranks},
                "batch": {"micro_batches": micro},
                "unit": rules,
                "precision": {"compute": "bf16"},
            }
        )
        with one_of_many(ranks):
            rank = OneRank(config, plan, 0, "cuda")
            rank.step()
            rank.zero_grad()
            torch.cuda.synchronize()
            resident = torch.cuda.memory_allocated()
            alone = _activations(rank)
            torch.cuda.reset_peak_memory_stats()
            rank.step()
            torch.cuda.synchronize()
            measured = torch.cuda.max_memory_allocated()
            said = resident + _with_activations(rank, alone)
            rank.zero_grad()
            del rank
        yield Row(name, "the program's replay", "MiB", measured / MIB, said / MIB, said / measured)
    yield from _overlap(quick)


def _activations(rank: OneRank) -> dict[str, tuple[int, int, int]]:
    """Per unit: bytes kept between forward and backward, and the most above that in either (measured, one unit at a time)."""
    stage = rank.runner.executor.stages[0]
    out = {}
    value: Any = rank.first(0)
    inputs = []
    with torch.no_grad():
        for index, link in enumerate(stage.links):
            inputs.append(value)
            rank.held.units[link.name].gather()
            value = stage.evaluate_part(index, value, rank.extra(0))
            rank.held.units[link.name].release()
    for index, link in enumerate(stage.links):
        unit = rank.held.units[link.name]
        unit.gather()
        unit.accumulate([None if i else torch.zeros_like(p) for i, p in enumerate(unit.parameters())])
        torch.cuda.synchronize()
        stage._kept[0] = [None] * index  # type: ignore[list-item]
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        made = stage.forward_part(index, 0, inputs[index], rank.extra(0))
        forward = torch.cuda.max_memory_allocated() - start
        grad = rank.grad(0) if index == len(stage.links) - 1 else _like(made)
        following = stage.links[index + 1] if index + 1 < len(stage.links) else link
        made = made[0] if following.adds != "no" and isinstance(made, tuple) else made  # the sum is not kept
        here = torch.cuda.memory_allocated()
        kept = here - start
        torch.cuda.reset_peak_memory_stats()
        stage.backward_part(index, 0, grad)
        out[link.name] = (kept, forward - kept, torch.cuda.max_memory_allocated() - here)
        stage._kept.clear()
        del made, grad
        unit.release()
        unit.zero_grad()
    return out


def _like(value: Any) -> Any:
    return tuple(map(torch.zeros_like, value)) if isinstance(value, tuple) else torch.zeros_like(value)


def _with_activations(rank: OneRank, alone: dict[str, tuple[int, int, int]]) -> int:
    """The peak of the program's replay with activations on top."""
    names = [link.name for link in rank.runner.executor.stages[0].links]
    replayed, kept, peak = rank.replayed(), 0, 0
    for instruction, held in zip(rank.runner.program.instructions, replayed.held, strict=True):
        kind = getattr(instruction, "kind", None)
        if kind is None:
            peak = max(peak, held + kept)
            continue
        unit = getattr(instruction, "unit", None)
        for name in [unit] if unit else (names if kind == "F" else names[::-1]):
            keeps, forward, backward = alone[name]
            peak = max(peak, held + kept + (keeps + forward if kind == "F" else backward))
            kept += keeps if kind == "F" else -keeps
    return peak


class _Emulated:
    """A collective that takes time on a stream of its own and moves nothing."""

    stream: Any = None
    rate = 100e9  # bytes a second

    def __init__(self, tensor: Tensor):
        self.event = torch.cuda.Event()
        _Emulated.stream = _Emulated.stream or torch.cuda.Stream()
        _Emulated.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(_Emulated.stream):
            torch.cuda._sleep(int(tensor.nbytes / self.rate * 1.7e9))
            self.event.record()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


def _overlap(quick: bool) -> Iterator[Row]:
    """A step whose collectives take time (100 GB/s): with and without overlap, and as a Chrome trace."""
    hidden, tokens = (1024, 512) if quick else (4096, 4096)
    seconds = {}
    with (
        patch("fourfold.shard.unit.all_gather", lambda out, mine, group, what: _Emulated(out)),
        patch("fourfold.shard.sharing.reduce_scatter", lambda out, whole, group, what: _Emulated(whole)),
        one_of_many(64),
    ):
        for prefetch in (0, 1):
            more = {"precision": {"compute": "bf16"}, "memory": {"prefetch": prefetch}}
            rank = OneRank(config_of(hidden, 4, 64, tokens), plan_of(64, "zero3", 1, **more), 0, "cuda")

            def step(rank: OneRank = rank) -> None:
                rank.step()
                rank.zero_grad()
                torch.cuda.synchronize()

            seconds[prefetch] = statistics.median(race({"": step}, 10)[""])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
        profile.export_chrome_trace("sharding_trace.json")
    yield lower_is_better(
        "zero3, collectives of 100 GB/s emulated", "prefetch 0", "step ms", seconds[1] * 1e3, seconds[0] * 1e3
    )


if __name__ == "__main__":
    main()
