"""Emulated accelerators: real gradients, times that are kept, the backward split in two ways, torch's schedules on them."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from fourfold.errors import ConfigError
from fourfold.runtime.stage import ChainLink, Stage
from fourfold.runtime.weight_grad import WeightGradQueue
from fourfold.testing.emulate import Chunk, ChunkSpan, ChunkTimes, WorkQueue, by_length, jitter, pipeline_stage
from fourfold.testing.ranks import run_ranks

FEATURES = 6
EXACT = {"rtol": 0.0, "atol": 0.0}


def make(seed: int = 0, times: ChunkTimes | tuple[ChunkTimes, ...] | None = None) -> Chunk:
    chunk = Chunk(times or ChunkTimes(), FEATURES)
    with torch.no_grad():
        chunk.weight.copy_(torch.rand(FEATURES, generator=torch.Generator().manual_seed(seed)) + 0.5)
    return chunk


def sample(*, requires_grad: bool = True) -> Tensor:
    return torch.rand(3, 4, FEATURES, generator=torch.Generator().manual_seed(7)).requires_grad_(requires_grad)


def by_autograd(chunk: Chunk, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    w = chunk.weight.detach().requires_grad_()
    x = x.detach().requires_grad_()
    return torch.autograd.grad(x * w, (x, w), grad)


def ops(chunk: Chunk) -> str:
    return " ".join(f"{span.op}{span.micro_batch}" for span in chunk.spans)


def test_a_backward_gives_both_gradients_input_first() -> None:
    chunk, x = make(), sample()
    y = chunk(x)
    torch.testing.assert_close(y, x * chunk.weight, **EXACT)
    grad = torch.rand_like(y)
    y.backward(grad)
    dx, dw = by_autograd(chunk, x, grad)
    torch.testing.assert_close(x.grad, dx, **EXACT)
    torch.testing.assert_close(chunk.weight.grad, dw)
    assert ops(chunk) == "F0 I0 W0"


def test_the_first_chunk_of_a_model_takes_its_time_too() -> None:
    """Its input (data) needs no gradient, but inside a real one gradients flow all the same."""
    chunk = make()
    chunk(sample(requires_grad=False)).sum().backward()
    assert ops(chunk) == "F0 I0 W0"
    with torch.no_grad():
        assert not chunk(sample(requires_grad=False)).requires_grad


def test_the_weight_gradient_waits_in_the_queue() -> None:
    chunk, x = make(), sample()
    chunk.queue = queue = WorkQueue()
    for _ in range(2):
        y = chunk(x)
        y.backward(torch.ones_like(y))
    assert ops(chunk) == "F0 I0 F1 I1"
    assert chunk.weight.grad is None
    run = queue.take()
    assert not queue.work
    run()
    assert ops(chunk) == "F0 I0 F1 I1 W0 W1"
    torch.testing.assert_close(chunk.weight.grad, 2 * by_autograd(chunk, x, torch.ones_like(x))[1])


def test_torchs_generic_split() -> None:
    chunk, x = make(), sample()
    y = chunk(x)
    grad = torch.rand_like(y)
    (dx,), groups = stage_backward_input([y], [grad], [x], chunk.parameters())
    assert ops(chunk) == "F0 I0"
    stage_backward_weight(chunk.parameters(), groups)
    assert ops(chunk) == "F0 I0 W0"
    expected = by_autograd(chunk, x, grad)
    torch.testing.assert_close((dx, chunk.weight.grad), expected)


class Verbs:
    """What a stage asks of a unit, for a chunk."""

    def __init__(self, chunk: Chunk):
        self.chunk = chunk
        self.grads: list[Any] = []

    def need(self) -> None: ...
    def lends_grads(self) -> bool:
        return False

    def release(self) -> None: ...

    def parameters(self) -> list[Tensor]:
        return [self.chunk.weight]

    trained = parameters

    def accumulate(self, grads: Any) -> None:
        self.grads += grads

    def add_weight_grad(self, name: str, x: Tensor, dy: Tensor) -> None:
        raise AssertionError("only linears ask for this")


def test_a_stage_of_our_runtime_runs_on_it() -> None:
    """Micro-batches out of order, their number told before each forward; weight gradients by the runtime's own queue."""
    chunk, x, sums = make(), sample(), []
    unit = Verbs(chunk)
    stage = Stage([ChainLink("chunk", unit, chunk)], reseed=lambda step, m, link: setattr(chunk, "micro_batch", m))
    chunk.queue = WeightGradQueue()  # closed: what is put is done at once
    chunk.sink = sums.append
    for m in (1, 0):
        stage.forward(m, x, whole=True)
    for m in (0, 1):
        dx, dw = by_autograd(chunk, x, torch.ones_like(x))
        torch.testing.assert_close(stage.backward(m, torch.ones_like(x)), dx, **EXACT)
        torch.testing.assert_close(sums[m], dw)
    assert unit.grads == [None, None]
    assert sorted(ops(chunk).split()) == ["F0", "F1", "I0", "I1", "W0", "W1"]
    assert ops(chunk).startswith("F1 F0")


def test_every_op_takes_its_time_and_no_processor() -> None:
    chunk = make(times=(ChunkTimes(0.02, 0.03, 0.04), ChunkTimes(0.05, 0.06, 0.07)))
    busy = time.process_time()
    for _ in range(2):
        chunk(sample()).sum().backward()
    assert time.process_time() - busy < 0.2  # seconds; it slept for 0.27
    took = {f"{s.op}{s.micro_batch}": s.end - s.start for s in chunk.spans}
    asked = {"F0": 0.02, "I0": 0.03, "W0": 0.04, "F1": 0.05, "I1": 0.06, "W1": 0.07}
    assert took.keys() == asked.keys()
    assert all(took[op] >= asked[op] for op in asked)
    assert all(before.end <= after.start for before, after in pairwise(chunk.spans))


def test_jitter_and_length() -> None:
    mean = ChunkTimes(1.0, 2.0, 0.5)
    drawn = jitter(mean, 4000, cv=0.3, seed=1)
    assert drawn == jitter(mean, 4000, cv=0.3, seed=1)
    assert drawn != jitter(mean, 4000, cv=0.3, seed=2)
    for op in ("forward", "input_grad", "weight_grad"):
        values = [getattr(t, op) / getattr(mean, op) for t in drawn]
        assert statistics.mean(values) == pytest.approx(1, abs=0.03)
        assert statistics.stdev(values) == pytest.approx(0.3, abs=0.03)
        assert min(values) > 0
    assert jitter(mean, 3, cv=0.0, seed=1) == (mean,) * 3
    assert by_length(mean, [1, 3]) == (mean.scaled(0.5), mean.scaled(1.5))
    with pytest.raises(ConfigError, match="the times of one micro-batch at least"):
        Chunk(())


SCHEDULES: dict[str, tuple[Any, int]] = {  # and how many stages a rank has
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "interleaved zero-bubble": (ScheduleInterleavedZeroBubble, 2),
    "zbv": (ScheduleZBVZeroBubble, 2),
}
MICRO_BATCHES, TIMES = 6, ChunkTimes(0.002, 0.002, 0.002)


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum() / 2


def pipelined(rank: int, ranks: int, names: list[tuple[str, Any]]) -> Any:
    answers = []
    for name, split in names:
        schedule, per_rank = SCHEDULES[name]
        stages = ranks * per_rank
        mine = [rank, stages - 1 - rank] if name == "zbv" else list(range(rank, stages, ranks))
        data, target = torch.rand(2, MICRO_BATCHES, 3, FEATURES, generator=torch.Generator().manual_seed(3))
        chunks = [make(seed=stage, times=TIMES) for stage in mine]
        given = [
            pipeline_stage(chunk, stage, stages, data[:1], split=split)
            for chunk, stage in zip(chunks, mine, strict=True)
        ]
        runner = schedule(given if per_rank > 1 else given[0], MICRO_BATCHES, loss_fn=half_square, scale_grads=False)
        dist.barrier()
        runner.step(*([data] if 0 in mine else []), target=target if stages - 1 in mine else None)
        grads = [chunk.weight.grad for chunk in chunks]

        model = torch.nn.Sequential(*(make(seed=stage) for stage in range(stages)))
        half_square(model(data), target).backward()
        for stage, grad in zip(mine, grads, strict=True):
            torch.testing.assert_close(grad, model[stage].weight.grad)  # type: ignore[union-attr]
        answers.append([chunk.spans for chunk in chunks])
    return answers


def test_torchs_schedules_run_on_them() -> None:
    """Five schedules, the backward split both ways: gradients equal the serial ones (checked in the ranks), every op
    ran once, one at a time, and the zero-bubble schedules moved weight gradients to later."""
    cases: list[tuple[str, Any]] = [(name, "generic") for name in SCHEDULES]
    cases += [("interleaved zero-bubble", "queue"), ("zbv", "queue")]
    if torch.__version__ < "2.13":
        cases = [case for case in cases if case[0] != "zbv"]  # its runtime has a rank send to itself, gloo refuses
    answers = run_ranks(pipelined, 2, cases)
    for number, (name, _) in enumerate(cases):
        moved = 0
        for answer in answers:
            for spans in answer[number]:
                wanted = sorted((op, m) for op in "FIW" for m in range(MICRO_BATCHES))
                assert sorted((s.op, s.micro_batch) for s in spans) == wanted
                moved += sum(1 for a, b in pairwise(spans) if a.op == "I" and b[:2] != ("W", a.micro_batch))
            together: list[ChunkSpan] = sorted((s for spans in answer[number] for s in spans), key=lambda s: s.start)
            assert all(a.end <= b.start for a, b in pairwise(together))
        assert (moved > 0) == (name in ("interleaved zero-bubble", "zbv")), name
