"""Emulated accelerators: chunks of a model whose forward, input gradient and weight gradient take a set time, by sleeping.

    chunk = Chunk(ChunkTimes(forward=0.010, input_grad=0.010, weight_grad=0.010))
    y = chunk(x)                        # 10 ms
    y.backward(g)                       # 20 ms: the gradient of x, then the one of the weight

A chunk scales its input: y = x · w, with w [features], so tensors, gradients and messages are real and can be checked, while the
processor is idle: eight ranks run on two cores, and the overhead, waits and ordering of a runtime show as lost time. Everything
else is as with a real module: saved activations, autograd, threads, schedulers, gloo.

The weight gradient can be computed separately in two ways:

- by torch's generic split: `torch.distributed.pipelining` runs its schedules on a chunk, including zero-bubble ones (there the
  whole backward of stage 0 runs in `W`, since its input needs no gradient);
- through a queue: with `chunk.queue` set, the backward computes only the gradient of the input and calls `queue.put(work)`.
  `work()` computes the gradient of the weight and passes it to `chunk.sink`, which adds it to `.grad`. The queue of a split
  stage (`runtime/weight_grad.py`) can be used, or the simple `WorkQueue`.

`pipeline_stage` wraps a chunk for torch's runtime in either way.

Times may differ by micro-batch: `jitter` draws them (lognormal, seeded), `by_length` scales them. Code that runs micro-batches
out of order sets `chunk.micro_batch` before each forward; otherwise forwards are counted (torch's schedules run them in order).
A list of times repeats from its start in every step.

`emulated_products(rate)` does the same for whole models: matmuls and attention of every module return zeros after FLOPs / rate
seconds (at once with rate 0). Everything else, in particular communication, is real.

An op ends 0.14 ms late (median, alone and with eight ranks on two cores); on a loaded machine one in a hundred is late by
milliseconds, and a thread that computes in Python holds the interpreter for up to 5 ms. Not emulated: a host that runs ahead of
its accelerator (here it waits), memory bandwidth, kernels and their launch overhead. Never quote emulated compute as GPU
compute.
"""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fourfold.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

__all__ = [
    "Chunk",
    "ChunkSpan",
    "ChunkTimes",
    "Queue",
    "WorkQueue",
    "by_length",
    "emulated_products",
    "jitter",
    "pipeline_stage",
    "sleep_until",
]


@dataclass(frozen=True)
class ChunkTimes:
    """Seconds per micro-batch."""

    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0

    def scaled(self, factor: float) -> ChunkTimes:
        return ChunkTimes(self.forward * factor, self.input_grad * factor, self.weight_grad * factor)


def jitter(times: ChunkTimes, micro_batches: int, *, cv: float, seed: int) -> tuple[ChunkTimes, ...]:
    """Random times of every micro-batch and op: lognormal with the given mean and coefficient of variation."""
    draw = random.Random(seed)
    sigma = math.sqrt(math.log1p(cv * cv))

    def factor() -> float:
        return draw.lognormvariate(-sigma * sigma / 2, sigma)

    return tuple(
        ChunkTimes(times.forward * factor(), times.input_grad * factor(), times.weight_grad * factor())
        for _ in range(micro_batches)
    )


def by_length(times: ChunkTimes, lengths: Sequence[float]) -> tuple[ChunkTimes, ...]:
    """Times of micro-batches of unequal length; `times` are those of the average one."""
    mean = sum(lengths) / len(lengths)
    return tuple(times.scaled(length / mean) for length in lengths)


class ChunkSpan(NamedTuple):
    """One executed op of a chunk: its kind (F, I or W), micro-batch, start and end on the host's monotonic clock."""

    op: str
    micro_batch: int
    start: float
    end: float


class Queue(Protocol):
    """Accepts deferred work."""

    def put(self, work: Callable[[], None], /) -> None: ...


class WorkQueue:
    """Deferred work, in order."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def put(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def take(self) -> Callable[[], None]:
        """Empty the queue; returns a function that runs its work."""
        taken, self.work = self.work, []

        def run() -> None:
            for work in taken:
                work()

        return run


EARLY = 150e-6  # seconds; a sleep ends about 100 µs late, so the last part is a busy wait


def sleep_until(deadline: float) -> None:
    """Sleep until `time.monotonic()` is at the deadline."""
    while (left := deadline - time.monotonic()) > 0:
        if left > EARLY:
            time.sleep(left - EARLY)


class Chunk(nn.Module):
    """y = x · weight, with set times: the same for every micro-batch, or a list of them. `spans` records what ran."""

    def __init__(self, times: ChunkTimes | Sequence[ChunkTimes], features: int = 1):
        super().__init__()
        self.times = (times,) if isinstance(times, ChunkTimes) else tuple(times)
        if not self.times:
            raise ConfigError("a chunk needs the times of one micro-batch at least")
        self.weight = nn.Parameter(torch.ones(features))
        self.queue: Queue | None = None
        self.sink: Callable[[Tensor], None] = self._add_to_grad  # where a queued gradient goes
        self.micro_batch: int | None = None  # of the next forward; None: forwards are counted
        self.spans: list[ChunkSpan] = []
        self._forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        start = time.monotonic()
        micro_batch = self._forwards if self.micro_batch is None else self.micro_batch
        self._forwards += 1
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # first chunk: its weight needs a gradient although its input does not
        # In this order autograd computes the gradient of the input first.
        gradient_of_weight = _Weight.apply(self.weight, x.detach(), self, micro_batch)
        y = _Input.apply(x, self.weight.detach(), self, micro_batch) + gradient_of_weight
        self._finish("F", micro_batch, start)
        return y

    def _finish(self, op: str, micro_batch: int, start: float) -> None:
        """Sleep until an op that began at `start` has taken its set time, and record it."""
        times = self.times[micro_batch % len(self.times)]
        seconds = {"F": times.forward, "I": times.input_grad, "W": times.weight_grad}[op]
        sleep_until(start + seconds)
        self.spans.append(ChunkSpan(op, micro_batch, start, time.monotonic()))

    def weight_grad(self, x: Tensor, grad: Tensor, micro_batch: int) -> Tensor:
        """The gradient of the weight, [features]."""
        start = time.monotonic()
        result = (x * grad).sum_to_size(self.weight.shape)
        self._finish("W", micro_batch, start)
        return result

    def _add_to_grad(self, grad: Tensor) -> None:
        self.weight.grad = grad if self.weight.grad is None else self.weight.grad.add_(grad)


class _Input(torch.autograd.Function):
    """x · weight; its backward computes only the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, chunk: Chunk, micro_batch: int) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.chunk, ctx.micro_batch = chunk, micro_batch
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        start = time.monotonic()
        result = grad * ctx.saved_tensors[0]
        ctx.chunk._finish("I", ctx.micro_batch, start)
        return result, None, None, None


class _Weight(torch.autograd.Function):
    """Zeros without storage, added to the output; the backward computes the gradient of the weight, or queues it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, chunk: Chunk, micro_batch: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.chunk, ctx.micro_batch = chunk, micro_batch
        return x.new_zeros(()).expand_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,), chunk, micro_batch = ctx.saved_tensors, ctx.chunk, ctx.micro_batch
        if chunk.queue is None:
            return chunk.weight_grad(x, grad, micro_batch), None, None, None
        chunk.queue.put(lambda: chunk.sink(chunk.weight_grad(x, grad, micro_batch)))
        return None, None, None, None


def pipeline_stage(
    chunk: Chunk,
    index: int,
    stages: int,
    sample: Tensor,
    *,
    split: Literal["generic", "queue"] = "generic",
) -> PipelineStage:
    """A stage of torch's pipeline runtime, for its schedules. `sample` is one micro-batch of the stage's input.

    Schedules that split the backward use torch's generic walk of the graph or, faster, the chunk's queue (torch's `dw_builder`).
    The shapes are given, so torch does not run the chunk to infer them.
    """
    from torch.distributed.pipelining import PipelineStage  # takes 1.6 s, needed only here

    if split == "queue":
        chunk.queue = queue = WorkQueue()
    given = sample.detach().to(chunk.weight.device)
    return PipelineStage(
        chunk,
        index,
        stages,
        given.device,
        input_args=given.clone().requires_grad_(index > 0),
        output_args=given.clone().requires_grad_(),
        dw_builder=queue.take if split == "queue" else None,  # called after each backward: what it put off
    )


# ---- whole models ----


@contextmanager
def emulated_products(rate: float = 0.0, launch: float = 0.0) -> Iterator[None]:
    """In this context, matmuls and attention on the CPU return zeros after `launch` + FLOPs / `rate` seconds; rate 0: at once.

    Applies to all threads of this process. Values are meaningless; shapes, memory, order and messages are real.
    """

    def take(start: float, flops: float) -> None:
        if rate:
            sleep_until(start + launch + flops / rate)

    def mm(a: Tensor, b: Tensor) -> Tensor:
        start, out = time.monotonic(), a.new_zeros(a.shape[0], b.shape[1])
        take(start, 2.0 * a.numel() * b.shape[1])
        return out

    def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        return mm(a, b)

    def bmm(a: Tensor, b: Tensor) -> Tensor:
        start, out = time.monotonic(), a.new_zeros(a.shape[0], a.shape[1], b.shape[2])
        take(start, 2.0 * a.numel() * b.shape[2])
        return out

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        start = time.monotonic()
        out = torch.zeros_like(q), q.new_zeros(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        take(start, (2.0 if is_causal else 4.0) * q.numel() * k.shape[-2])
        return out

    def attend_backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        dropout_p: float,
        is_causal: bool,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        start = time.monotonic()
        grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        take(start, 2.5 * (2.0 if is_causal else 4.0) * q.numel() * k.shape[-2])
        return grads

    library = torch.library.Library("aten", "IMPL")
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that its kernels are overridden
        for name, kernel in (("mm", mm), ("addmm", addmm), ("bmm", bmm)):
            library.impl(name, kernel, "CPU")
        library.impl(attention, attend, "CPU")
        library.impl(f"{attention}_backward", attend_backward, "CPU")
    try:
        yield
    finally:
        library._destroy()
