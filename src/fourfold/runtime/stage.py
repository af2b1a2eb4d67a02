"""A stage: a contiguous run of a model's layers on one rank, run as a chain of links, one link per unit.

Each link's graph is cut from the next (its input is a detached leaf), so the forward and the backward of a stage are
loops over links: parameters are needed, used and released, and gradients handed over, at places that the code shows
rather than in hooks. Recomputation hangs on the same boundary: a link that recomputes keeps its input alone.

    forward(m, x)        runs the links on micro-batch m and keeps what the backward needs
    backward(m, g)       runs them in reverse, adds weight gradients to the units, returns the gradient of x

Random numbers (dropout) are a function of (seed, step, micro-batch, link): the order in which micro-batches run, and
whether a link runs twice, change nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

__all__ = ["Link", "Stage", "UnitVerbs"]


class UnitVerbs(Protocol):
    """What a stage asks of a unit."""

    def need(self) -> None: ...
    def release(self) -> None: ...
    def parameters(self) -> Sequence[Tensor]: ...
    def accumulate(self, grads: Sequence[Tensor | None], /) -> None: ...


@dataclass
class Link:
    """One unit and the module that computes with it."""

    name: str
    unit: UnitVerbs
    module: nn.Module
    recompute: Literal["none", "selective", "full"] = "none"
    compile: bool = False

    def __post_init__(self) -> None:
        self.run: Callable[..., Tensor] = self.module
        if self.recompute == "selective":
            self.run = functools.partial(
                checkpoint, self.module, use_reentrant=False, context_fn=_keep_products, determinism_check="none"
            )
        if self.compile:
            self.run = torch.compile(self.run)


@dataclass
class _Kept:
    """What one link keeps of one micro-batch between forward and backward."""

    inputs: tuple[Any, ...]
    output: Tensor | None  # None: recompute


class Stage:
    """A chain of links. `reseed(step, micro_batch, link)` is called before a link of a model that draws random numbers."""

    def __init__(self, links: Sequence[Link], reseed: Callable[[int, int, int], None] | None = None):
        self.links = list(links)
        self.step = 0
        self._reseed = reseed
        self._kept: dict[int, list[_Kept]] = {}

    def forward(self, micro_batch: int, *inputs: Any, extra: tuple[Any, ...] = ()) -> Tensor:
        """Run the links on `inputs`; `extra` is handed to the last link beside its input (the targets)."""
        assert micro_batch not in self._kept, f"micro-batch {micro_batch} is in flight already"
        kept = self._kept[micro_batch] = []
        args: tuple[Any, ...] = inputs
        output = None
        for index, link in enumerate(self.links):
            args = tuple(_leaf(a) for a in args) + (extra if index == len(self.links) - 1 else ())
            link.unit.need()
            if link.recompute == "full":
                with torch.no_grad():
                    output = self._run(micro_batch, index, args)
                kept.append(_Kept(args, None))
            else:
                with torch.enable_grad():
                    output = self._run(micro_batch, index, args)
                kept.append(_Kept(args, output))
            link.unit.release()
            args = (output,)
        assert output is not None
        return output.detach()

    def backward(
        self, micro_batch: int, grad: Tensor, done: Callable[[UnitVerbs], None] | None = None
    ) -> Tensor | None:
        """Run the links in reverse from the gradient of the output; `done(unit)` follows each unit's contribution.

        Returns the gradient of the stage's input, or None when it is not differentiable (token ids).
        """
        kept = self._kept.pop(micro_batch)
        for index in reversed(range(len(self.links))):
            link, (inputs, output) = self.links[index], _unpack(kept.pop())
            link.unit.need()
            if output is None:
                with torch.enable_grad():
                    output = self._run(micro_batch, index, inputs)
            wanted = [a for a in inputs if isinstance(a, Tensor) and a.requires_grad]
            grads = torch.autograd.grad(output, [*wanted, *link.unit.parameters()], grad, allow_unused=True)
            del output, inputs
            link.unit.accumulate(grads[len(wanted) :])
            link.unit.release()
            if done is not None:
                done(link.unit)
            if not wanted:
                return None
            assert grads[0] is not None
            grad = grads[0]
        return grad

    @torch.no_grad()
    def evaluate(self, *inputs: Any, extra: tuple[Any, ...] = ()) -> Tensor:
        """Forward only, nothing kept, dropout off."""
        args: tuple[Any, ...] = inputs
        for index, link in enumerate(self.links):
            args += extra if index == len(self.links) - 1 else ()
            link.unit.need()
            link.module.eval()
            try:
                args = (link.module(*args),)
            finally:
                link.module.train()
            link.unit.release()
        return args[0]

    def reset(self) -> None:
        """Drop what is in flight (after a failed step)."""
        self._kept.clear()

    def _run(self, micro_batch: int, index: int, args: tuple[Any, ...]) -> Tensor:
        if self._reseed is not None:
            self._reseed(self.step, micro_batch, index)
        return self.links[index].run(*args)


def _leaf(value: Any) -> Any:
    """A leaf of a new graph, differentiable when its values are."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point())


def _unpack(kept: _Kept) -> tuple[tuple[Any, ...], Tensor | None]:
    return kept.inputs, kept.output


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def _keep_products() -> Any:
    """Selective recomputation: outputs of matrix products and attention are kept, all else is computed again."""

    def policy(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        name = op.overloadpacket.__name__
        keep = name in _PRODUCTS or name.startswith("_scaled_dot_product")
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
