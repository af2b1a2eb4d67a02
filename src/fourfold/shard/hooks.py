"""Units driven by module hooks, for any nn.Module that runs outside the executor and so has no program.

The unit methods and the modes are the same as in a program; hooks decide when to call them:

    before a unit's forward     gather, need, and prefetch: gather the `prefetch` units that followed in the last forward
    after its forward           zero3: release
    gradient of its output      gather, need, and prefetch the units before it; lend the accumulators to autograd if possible
    gradients of its inputs     its backward is complete: release, reduce

A unit whose inputs need no gradient (an embedding) is completed by `close`, after the backward. Every rank of a replica group
must call the units in the same order.

A micro-batch that needs no communication (all units stay gathered, nothing is reduced) is *quiet*: autograd adds to the lent
accumulators of all units, and the hooks return at once. So these accumulators exist from the start of such a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.program.modes import Mode, ReduceAfter, once_a_step, reduces, releases, shards
from fourfold.shard.unit import Unit

__all__ = ["HookDriver", "Hooked", "tensors_in"]


@dataclass
class Hooked:
    """A unit, the module whose forward uses it, and its sharding options."""

    unit: Unit
    module: nn.Module
    mode: Mode
    reduce: ReduceAfter
    waiting: int = 0
    """Number of forwards whose backward is not complete."""
    reduced: bool = False
    """Whether it was reduced in this step."""


class HookDriver:
    """Calls the units' methods from hooks, during the forward and backward of each micro-batch."""

    def __init__(self, parts: Sequence[Hooked], prefetch: int = 1):
        self.parts, self.prefetch = list(parts), prefetch
        self.last = True  # whether this is the step's last micro-batch
        self.quiet = False
        self._order: list[Hooked] = []  # the units in the order of the last forward
        self._seen: list[Hooked] = []  # the units that this forward has used so far
        for part in self.parts:
            part.module.register_forward_pre_hook(self._before(part), with_kwargs=True)
            part.module.register_forward_hook(self._after(part))
            for name, parameter in part.unit.params.items():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_mover(part.unit, name))

    def open(self, *, last: bool) -> None:
        """Begin a micro-batch; `last`: it is the last of its step."""
        self.last, self._seen = last, []
        self.quiet = not last and all(_idle(part) for part in self.parts)
        if self.quiet:
            for part in self.parts:
                part.unit.lend_grads()

    def close(self) -> None:
        """End a micro-batch: complete units whose inputs needed no gradient, and release unused prefetches."""
        for part in reversed(self.parts):
            part.unit.take_grads_back()
            if part.waiting or (part.unit.grad is not None and self._reduces(part)):
                part.waiting = 0
                self._complete(part)
            if releases(part.mode, last=self.last, none_in_flight=True):
                part.unit.release()
        if self._seen:
            self._order = self._seen
        self.quiet = False

    def finish(self) -> None:
        """End a step: reduce the remaining units (unused ones contribute zeros) and wait for all reductions."""
        for part in self.parts:
            if not part.reduced:
                part.unit.reduce()
            part.reduced = False
        for part in self.parts:
            part.unit.finish()

    def made(self, part: Hooked) -> None:
        """Called by a backward outside the hooks when a unit's gradient of this micro-batch is complete."""
        if releases(part.mode, last=False, none_in_flight=True):
            part.unit.release()
        self._complete(part)

    # ---- hooks ----

    def _before(self, part: Hooked) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.quiet:
                return None
            self._use(part, 1)
            if part not in self._seen:
                self._seen.append(part)
            if not torch.is_grad_enabled():
                return None
            part.waiting += 1
            given = [*args, *kwargs.values()]
            with_grad = [i for i, a in enumerate(given) if isinstance(a, Tensor) and a.requires_grad]
            if with_grad:
                passed = _Boundary.apply(lambda: self._done(part), *(given[i] for i in with_grad))
                for i, value in zip(with_grad, passed, strict=True):
                    given[i] = value
            return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))

        return hook

    def _after(self, part: Hooked) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self.quiet:
                return
            if releases(part.mode, last=False, none_in_flight=False) or not torch.is_grad_enabled():
                part.unit.release()
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: back())

        def back() -> None:
            self._use(part, -1)
            if lends and not torch.is_grad_enabled():  # with create_graph=True, autograd would not add in place
                part.unit.lend_grads()

        lends = part.unit.lends_grads()
        return hook

    def _use(self, part: Hooked, direction: int) -> None:
        part.unit.gather()
        if part in self._order:
            at = self._order.index(part)
            for ahead in range(1, self.prefetch + 1):
                if 0 <= at + direction * ahead < len(self._order):
                    self._order[at + direction * ahead].unit.gather()
        part.unit.need()

    def _done(self, part: Hooked) -> None:
        """Called when the backward of one forward call is complete."""
        part.waiting -= 1
        if not part.waiting:
            part.unit.take_grads_back()
        if releases(part.mode, last=False, none_in_flight=not part.waiting):  # `keep` is released after the step
            part.unit.release()
        if not part.waiting and self._reduces(part):
            self._complete(part)

    def _reduces(self, part: Hooked) -> bool:
        return reduces(part.reduce, last=self.last)

    def _complete(self, part: Hooked) -> None:
        if self._reduces(part):
            part.unit.reduce()
            part.reduced = True


def _idle(part: Hooked) -> bool:
    """Whether a unit needs no communication in a micro-batch that is not the last."""
    here = not shards(part.mode) or part.unit.ready()
    return once_a_step(part.mode, part.reduce) and here and part.unit.lends_grads()


class _Boundary(torch.autograd.Function):
    """Identity on a unit's inputs; its backward runs when the unit's backward is complete."""

    @staticmethod
    def forward(ctx: Any, done: Any, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.done = done
        return tuple(v.view_as(v) for v in values)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.done()
        return None, *grads


def _mover(unit: Unit, name: str) -> Any:
    """A hook that moves a parameter's `.grad` into the unit's accumulator, unless the accumulator is lent to autograd."""

    def move(parameter: Tensor) -> None:
        if not unit.lent and parameter.grad is not None:
            unit.add_grad(name, parameter.grad)
            parameter.grad = None

    return move


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a tree of dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
