"""Deferred weight gradients: linears queue (input, output gradient), and the matmul runs later.

In a split backward, I computes the gradient of a stage's input and W the gradients of its weights. `defer` makes every
`nn.Linear` of a module do so: its backward computes dX at once and queues (X, dY); W runs the queue. Other linear modules can
take part too (`DefersWeightGrad`): they queue two tensors of their choice and compute the gradient themselves. Gradients of
biases, norms and embeddings are cheap and stay in I. The matmul is the one autograd would run, accumulated in the same order (of
micro-batches), so the result is bit-identical to a whole backward. (Splitting with two passes of autograd over the graph
costs two to three backwards on small layers.)

[Note: compiled graphs]
torch.compile would drop a Python side effect, or refuse it. The queue is therefore filled by a custom op that claims to change a
token tensor, which cannot be dropped. Such an op takes tensors and numbers only: it finds its queue by number, in a weak table of
this module. A linear has that number, and its own, in a tensor on the host: numbers would be part of the compiled code, which
would then not serve all layers, but be compiled for each of them until torch gives up (after eight). The queued tensors outlive
the op, which the compiler does not know; so a graph with deferred linears must be compiled with COMPILE_OPTIONS, or it may reuse
their memory.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.model.fp8 import Fp8Linear, fp8_input_grad, fp8_linear

__all__ = ["COMPILE_OPTIONS", "DefersWeightGrad", "WeightGradQueue", "defer"]

COMPILE_OPTIONS: Mapping[str, bool] = {"allow_buffer_reuse": False, "inplace_buffers": False}


class WeightGradQueue:
    """Work that I has deferred to W, by (micro-batch, link)."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        _queues[self.number] = self
        self._sinks: list[Callable[[Tensor, Tensor], None]] = []
        self._left: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._open: list[Callable[[], None]] | None = None

    def open(self, micro_batch: int, link: int) -> None:
        """Work deferred from now on belongs to this micro-batch and link."""
        self._open = self._left.setdefault((micro_batch, link), [])

    def close(self) -> None:
        self._open = None

    def put(self, work: Callable[[], None]) -> None:
        """Defer work to W; outside of a split backward it runs at once."""
        if self._open is None:
            work()
        else:
            self._open.append(work)

    def run(self, micro_batch: int, link: int) -> None:
        """W: run the deferred work, in order."""
        for work in self._left.pop((micro_batch, link)):
            work()

    def __len__(self) -> int:
        return sum(map(len, self._left.values()))

    def clear(self) -> None:
        self._left.clear()
        self._open = None


_numbers = itertools.count()
_queues: weakref.WeakValueDictionary[int, WeightGradQueue] = weakref.WeakValueDictionary()  # [Note: compiled graphs]


class DefersWeightGrad(Protocol):
    """A module whose weight gradient can be computed later, from two tensors of its backward."""

    weight: nn.Parameter

    def defer(
        self, put_off: Callable[[Tensor, Tensor, Tensor, int, int], None], token: Tensor, queue: int, place: int, /
    ) -> None:
        """From now on the backward calls put_off(a, b, token, queue, place)."""

    def weight_grad(self, a: Tensor, b: Tensor, add: Callable[[Tensor], None], /) -> None:
        """Compute the gradient and accumulate it, with `add` or otherwise."""


class Accumulates(Protocol):
    """Accumulates gradients: dYᵀX, or a given gradient, of a weight."""

    def add_weight_grad(self, name: str, x: Tensor, dy: Tensor, /) -> None: ...
    def add_grad(self, name: str, grad: Tensor, /) -> None: ...


def defer(module: nn.Module, queue: WeightGradQueue, unit: Accumulates, device: torch.device | None = None) -> None:
    """Make the linears of `module` queue their weight gradients, which W accumulates in `unit` by the name of the weight.

    Frozen linears have none.

    `device`: the device of the computation, if the weights are not there now (a released weight has no storage).
    """
    for name, child in module.named_modules():
        weight, place = f"{name}.weight" if name else "weight", len(queue._sinks)
        if not getattr(getattr(child, "weight", None), "requires_grad", False):
            continue
        if type(child) in (nn.Linear, Fp8Linear):
            queue._sinks.append(_sink(queue, functools.partial(unit.add_weight_grad, weight)))
            child.__class__ = _DeferredFp8Linear if type(child) is Fp8Linear else _DeferredLinear
            assert isinstance(child, _DeferredLinear)
            child.where = torch.tensor([queue.number, place])
            child.register_buffer("token", torch.zeros(1, device=device or child.weight.device), persistent=False)
        elif hasattr(child, "defer") and hasattr(child, "weight_grad"):
            linear = cast(DefersWeightGrad, child)
            queue._sinks.append(_sink(queue, _computed(linear, functools.partial(unit.add_grad, weight))))
            linear.defer(_put_off, torch.zeros(1, device=device or linear.weight.device), queue.number, place)


def _computed(linear: DefersWeightGrad, add: Callable[[Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    return lambda a, b: linear.weight_grad(a, b, add)


def _sink(queue: WeightGradQueue, work: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    """Queue the two tensors detached: their autograd graph would keep the stage's input alive."""

    def put(a: Tensor, b: Tensor) -> None:
        a, b = a.detach(), b.detach()
        queue.put(lambda: work(a, b))

    return put


class _DeferredLinear(nn.Linear):
    """An nn.Linear whose weight gradient is queued."""

    where: Tensor
    """Numbers of its queue and of its place there, on the host: [Note: compiled graphs]."""
    token: Tensor
    fp8 = False

    def forward(self, x: Tensor) -> Tensor:
        return _Linear.apply(x, self.weight, self.bias, self.token, self.where, self.fp8)


class _DeferredFp8Linear(_DeferredLinear, Fp8Linear):
    """The same for one that computes in fp8."""

    fp8 = True


class _Linear(torch.autograd.Function):
    """y = x wᵀ + b. Backward: dx and db; (x, dy) goes to the queue, and autograd gets no gradient of w."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, token: Tensor, where: Tensor, fp8: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.token = token  # not saved: it "changes" between forward and backward, which autograd would refuse
        ctx.where, ctx.has_bias, ctx.fp8 = where, b is not None, fp8
        return fp8_linear(x, w, b) if fp8 else F.linear(x, w, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, w = ctx.saved_tensors
        _put_off_at(x, dy, ctx.token, ctx.where)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = fp8_input_grad(dy, w) if ctx.fp8 else dy @ w
        db = dy.flatten(0, -2).sum(0) if ctx.has_bias else None
        return dx, None, db, None, None, None


@torch.library.custom_op("fourfold::put_off_weight_grad", mutates_args=("token",))
def _put_off(x: Tensor, dy: Tensor, token: Tensor, queue: int, place: int) -> None:
    _queues[queue]._sinks[place](x, dy)


@_put_off.register_fake
def _(x: Tensor, dy: Tensor, token: Tensor, queue: int, place: int) -> None:
    return None


@torch.library.custom_op("fourfold::put_off_weight_grad_at", mutates_args=("token",))
def _put_off_at(x: Tensor, dy: Tensor, token: Tensor, where: Tensor) -> None:
    queue, place = where.tolist()
    _queues[queue]._sinks[place](x, dy)


@_put_off_at.register_fake
def _(x: Tensor, dy: Tensor, token: Tensor, where: Tensor) -> None:
    return None
