"""A stage: a contiguous run of a model's layers on one rank, executed as a chain of links, one link per unit.

The autograd graph of each link is cut from the next (its input is a detached leaf): forward and backward of a stage are loops
over links. There are no hooks: the code shows where parameters are needed and gradients are accumulated, and a program
may do other things between two links. Recomputation uses the same boundaries: a link that recomputes saves only its input.

    forward(m, x)                F   runs the links on micro-batch m and saves what the backward needs
    backward(m, g)               B   runs them in reverse, accumulates weight gradients in the units, returns the gradient of x
    backward(m, g, split=True)   I   the same, but defers the matmuls of weight gradients
    weight_grad(m)               W   runs what I deferred

[Note: whole ops]
If the program does nothing between the links of a micro-batch, neither in its forward nor in its backward, the graph need not be
cut. Links whose accumulators autograd can add to then share one graph, which saves a seventh of the host's time for small units.
All their accumulators are then allocated when the backward begins, not one by one while activations are freed. So the caller
must ensure that they already exist, or that a later peak of the step holds them together with as many activations anyway.

Inputs and outputs are trees of tensors (tuples, lists, dicts). A stage keeps the graph node of a link's output, not the output:
its memory is freed when its last user (the next link, or the message that carries it) is done.

[Note: links that add]
The slices of a layer pass on a tuple: the input of all slices, and a sum that each of them adds to. Such a link is given one
value, saves only that for its backward, and joins its output to the rest in one of three ways:

    alongside   (h, acc)   → (h, acc, module(h))
    more        (h, acc)   → (h, acc + module(h))          (h, acc, a) → (h, acc + module(a))
    last        (h, acc)   → acc + module(h)               (h, acc, a) → acc + module(a)

[Note: frozen units]
With frozen parameters, a link's output may not be differentiable, or only some of its tensors. In the first stage, links up to
the first one with trainable parameters are given inputs without gradients, so the backward ends there: links below it do nothing
in a backward and return no gradient.

Random numbers (dropout) are a function of (seed, step, micro-batch, link): they depend neither on the order of micro-batches
nor on recomputation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fourfold.model.fp8 import FP8_OPTIONS, has_fp8
from fourfold.record import RECORD
from fourfold.runtime._torch import accumulate, gradients
from fourfold.runtime.compiled import OrUncompiled
from fourfold.runtime.weight_grad import COMPILE_OPTIONS, WeightGradQueue, defer
from fourfold.runtime.wire import flatten

__all__ = ["ChainLink", "Finish", "Keeper", "OpListener", "Stage", "UnitVerbs", "keep_products"]


class UnitVerbs(Protocol):
    """The operations of a unit that a stage calls."""

    def ready(self) -> bool: ...
    def need(self) -> None: ...
    def parameters(self) -> Sequence[Tensor]: ...
    def trained(self) -> Sequence[Tensor]: ...
    def lends_grads(self) -> bool: ...
    def accumulates(self) -> bool: ...
    def lend_grads(self) -> None: ...
    def take_grads_back(self) -> None: ...
    def accumulate(self, grads: Sequence[Tensor | None], /) -> None: ...
    def add_weight_grad(self, name: str, x: Tensor, dy: Tensor, /) -> None: ...
    def add_grad(self, name: str, grad: Tensor, /) -> None: ...


class OpListener(Protocol):
    """Notified when an op of a stage begins and ends: F, B, I, W, or E (a forward without a backward)."""

    def begin(self, op: str, /) -> None: ...
    def end(self) -> None: ...


class Keeper(Protocol):
    """Stores what a forward saves for its backward elsewhere (offload/activations.py)."""

    def saving(self, keep: Iterable[Tensor], key: Any) -> AbstractContextManager[None]: ...
    def put(self, t: Tensor, key: Any) -> Any: ...
    def get(self, packed: Any) -> Tensor: ...


@dataclass(frozen=True)
class Finish:
    """The last element of a micro-batch's `extra`: a function from the last link's output to the loss."""

    run: Callable[[Any], Tensor]


@dataclass
class ChainLink:
    """One unit and the module that computes with it."""

    name: str
    unit: UnitVerbs
    module: nn.Module
    recompute: Literal["none", "selective", "full"] = "none"
    compile: bool = False
    adds: Literal["no", "alongside", "more", "last"] = "no"
    """How the output is combined with an input (h, acc) or (h, acc, a): [Note: links that add]."""
    takes_extra: bool = False
    """Whether it takes `extra` in addition to its input; the last link of a stage always does."""
    takes_documents: bool = False
    """Whether it takes the micro-batch's `documents`, if any, as a keyword."""
    sliced: bool = False
    """Whether its weight gradients are computed after its backward, one at a time, which needs less memory."""


@dataclass
class _Kept:
    """What one link saves for one micro-batch between forward and backward."""

    args: tuple[Any, ...]
    edges: list[GradientEdge | None] | None  # graph nodes of the outputs (None: not differentiable); None: recompute
    fed: int = 0  # index of the input value that the link used: [Note: links that add]
    inputs: list[GradientEdge] | None = None  # graph nodes of differentiable inputs; None: `args` are leaves


class Stage:
    """A chain of links. `reseed(step, micro_batch, link)` is called before a link of a model that draws random numbers.

    With `split`, the linears of the links queue their weight gradients, so that the stage can do I and W. `first`: nothing needs
    the gradient of its input.
    """

    def __init__(
        self,
        links: Sequence[ChainLink],
        *,
        split: bool = False,
        reseed: Callable[[int, int, int], None] | None = None,
        keeper: Keeper | None = None,
        watch: OpListener | None = None,
        first: bool = False,
    ):
        self.links, self.step, self.keeper, self.watch = list(links), 0, keeper, watch
        self.index = {link.name: i for i, link in enumerate(self.links)}
        self.queue = WeightGradQueue() if split or any(link.sliced for link in self.links) else None
        for link in self.links:
            if self.queue is not None and (split or link.sliced):
                device = next((p.device for p in link.unit.parameters()), None)
                defer(link.module, self.queue, link.unit, device)
        self._runs = [_make_run(link, split) for link in self.links]
        self._again = [_make_again(link, run) for link, run in zip(self.links, self._runs, strict=True)]
        self._reseed = reseed
        below = [any(link.unit.trained() for link in self.links[:i]) for i in range(len(self.links) + 1)]
        self._differs = [
            not first or trains for trains in below
        ]  # whether a link's input has a gradient; last: the output
        self._kept: dict[int, list[_Kept]] = {}
        self._whole: dict[int, list[_Kept]] = {}  # by micro-batch that runs as a whole op
        self._documents: dict[int, Any] = {}  # by micro-batch in flight, if it has documents
        self._uncut = [] if self.queue is not None or keeper is not None else _uncut(self.links)

    # ---- ops, and the parts of ops that use one link ----

    def forward(
        self,
        micro_batch: int,
        value: Any,
        extra: tuple[Any, ...] = (),
        *,
        documents: Any = None,
        whole: bool = False,
    ) -> Any:
        """Run the links on `value`. `extra` (the targets) is passed to the last link, and to links that take it.

        `documents` is passed to the links that take it, also in recomputation. `whole`: the backward will be a whole op,
        too: [Note: whole ops].
        """
        if whole and self._uncut:
            self._keep_documents(micro_batch, documents)
            return self._forward_whole(micro_batch, value, extra)
        for index in range(len(self.links)):
            value = self.forward_part(index, micro_batch, value, extra, documents)
        return value

    def forward_part(
        self, index: int, micro_batch: int, value: Any, extra: tuple[Any, ...] = (), documents: Any = None
    ) -> Any:
        """Run one link on the output of the previous one."""
        self._keep_documents(micro_batch, documents)
        kept = self._kept.setdefault(micro_batch, [])
        assert len(kept) == index, f"micro-batch {micro_batch}: link {index} out of order"
        self._begins("F", index == 0)
        link = self.links[index]
        fed = _fed(link, value)
        args = self._args(index, value if link.adds == "no" else value[fed], extra)
        link.unit.need()
        stack = id(self), micro_batch
        last = index == len(self.links) - 1 or link.takes_extra
        keeper = None if extra and last else self.keeper  # the loss: its backward is next
        if link.recompute == "full":
            with torch.no_grad():
                out = self._run(micro_batch, index, args)
            if keeper is not None:
                args = tuple(keeper.put(a.detach(), stack) if _differentiable(a) else a for a in args)
            kept.append(_Kept(args, None, fed))
        elif keeper is not None:
            stays = [*link.unit.parameters(), *link.module.buffers()]
            with torch.enable_grad(), keeper.saving(stays, stack):
                args = tuple(_anchored(a) if _differentiable(a) else a for a in args)
                inputs = [get_gradient_edge(a) for a in args if _differentiable(a)]
                out = self._run(micro_batch, index, args)
            kept.append(_Kept((), _edges(out), fed, inputs))
        else:
            with torch.enable_grad():
                out = self._run(micro_batch, index, args)
            kept.append(_Kept(args, _edges(out), fed))
        self._ends(index == len(self.links) - 1)
        return _joined(link, value, _detached(out))

    def backward(self, micro_batch: int, grad: Any, *, split: bool = False) -> Any:
        """Run the links in reverse from the gradient of the output (a tree like it); `split`: as I, leaving W for later.

        Returns the gradient of the stage's input: a tuple for several tensors, None if it has none (token ids).
        """
        if micro_batch in self._whole:
            return self._backward_whole(micro_batch, grad)
        for index in reversed(range(len(self.links))):
            grad = self.backward_part(index, micro_batch, grad, split=split)
        return grad

    def _forward_whole(self, micro_batch: int, value: Any, extra: tuple[Any, ...]) -> Any:
        self._begins("F", True)
        kept = self._whole[micro_batch] = []
        for indices in self._uncut:
            leaves = args = self._args(indices[0], value, extra)
            out: Any = None
            with torch.enable_grad():
                for index in indices:
                    if index > indices[0]:
                        args = (*(out if isinstance(out, tuple) else (out,)), *self._extra(index, extra))
                    self.links[index].unit.need()
                    out = self._run(micro_batch, index, args)
            kept.append(_Kept(leaves, _edges(out)))
            value = _detached(out)
        self._ends(True)
        return value

    def _backward_whole(self, micro_batch: int, grad: Any) -> Any:
        self._begins("B", True)
        self._documents.pop(micro_batch, None)
        for indices, kept in zip(reversed(self._uncut), reversed(self._whole.pop(micro_batch)), strict=True):
            if not self._differs[indices[-1] + 1]:
                grad = None
            elif len(indices) == 1:
                grad = self._link_backward(micro_batch, indices[0], kept, grad)
            else:
                grad = _added_in_place([self.links[i].unit for i in indices], kept, grad)
        self._ends(True)
        return grad

    def backward_part(self, index: int, micro_batch: int, grad: Any, *, split: bool = False) -> Any:
        """The backward of one link from the gradient of its output."""
        kept = self._kept[micro_batch]
        assert len(kept) == index + 1, f"micro-batch {micro_batch}: link {index} out of order"
        self._begins("I" if split else "B", index == len(self.links) - 1)
        queue = self.queue if split or self.links[index].sliced else None
        assert queue is not None or not split, "the stage was not built for a split backward"
        if queue is not None:
            queue.open(micro_batch, index)
        try:
            grad = self._link_backward(micro_batch, index, kept.pop(), grad)
        finally:
            if queue is not None:
                queue.close()
        if queue is not None and not split:
            queue.run(micro_batch, index)
        if not kept:
            del self._kept[micro_batch]
            self._documents.pop(micro_batch, None)
        self._ends(index == 0)
        return grad

    def weight_grad(self, micro_batch: int) -> None:
        """Run what I deferred; called in the order of the micro-batches."""
        for index in reversed(range(len(self.links))):
            self.weight_grad_part(index, micro_batch)

    def weight_grad_part(self, index: int, micro_batch: int) -> None:
        """Run what I deferred for one link."""
        assert self.queue is not None, "the stage was not built for a split backward"
        self._begins("W", index == len(self.links) - 1)
        self.queue.run(micro_batch, index)
        self._ends(index == 0)

    def evaluate(self, value: Any, extra: tuple[Any, ...] = (), documents: Any = None) -> Any:
        """Forward only: nothing is saved, dropout is off."""
        for index in range(len(self.links)):
            value = self.evaluate_part(index, value, extra, documents)
        return value

    @torch.no_grad()
    def evaluate_part(self, index: int, value: Any, extra: tuple[Any, ...] = (), documents: Any = None) -> Any:
        link = self.links[index]
        args = self._args(index, value if link.adds == "no" else value[_fed(link, value)], extra)
        link.unit.need()
        self._begins("E", index == 0)
        link.module.eval()
        try:
            return _joined(link, value, _finished(link.module, args, _named(link, documents)))
        finally:
            link.module.train()
            self._ends(index == len(self.links) - 1)

    @property
    def accumulates(self) -> bool:
        """Whether the accumulators of all links exist."""
        return all(link.unit.accumulates() for link in self.links)

    @property
    def in_flight(self) -> int:
        """Micro-batches between their forward and their backward."""
        return len(self._kept) + len(self._whole)

    def reset(self) -> None:
        """Drop the micro-batches in flight (after a failed step)."""
        self._kept.clear()
        self._whole.clear()
        self._documents.clear()
        if self.queue is not None:
            self.queue.clear()

    def _begins(self, op: str, first: bool) -> None:
        if first and self.watch is not None:
            self.watch.begin(op)

    def _ends(self, last: bool) -> None:
        if last and self.watch is not None:
            self.watch.end()

    # ---- one link ----

    def _args(self, index: int, value: Any, extra: tuple[Any, ...]) -> tuple[Any, ...]:
        """Positional arguments of a link: leaves of a new graph, differentiable if the values are."""
        parts = value if isinstance(value, tuple) else (value,)
        leaves = (self._leaf(index, p) if isinstance(p, Tensor) else p for p in parts)
        return (*leaves, *self._extra(index, extra))

    def _leaf(self, index: int, value: Tensor) -> Tensor:
        return value.detach().requires_grad_(self._differs[index] and value.is_floating_point())

    def _extra(self, index: int, extra: tuple[Any, ...]) -> tuple[Any, ...]:
        if index == len(self.links) - 1:
            return extra
        return tuple(e for e in extra if not isinstance(e, Finish)) if self.links[index].takes_extra else ()

    def _run(
        self, micro_batch: int, index: int, args: tuple[Any, ...], runs: Sequence[Callable[..., Any]] | None = None
    ) -> Any:
        if self._reseed is not None:
            self._reseed(self.step, micro_batch, index)
        run, trace = (runs or self._runs)[index], RECORD.trace
        named = _named(self.links[index], self._documents.get(micro_batch)) if self._documents else {}
        if trace is None:
            return _finished(run, args, named)
        begun, out = trace.mark(), _finished(run, args, named)
        trace.add("unit" if runs is None else "recompute", self.links[index].name, begun)
        return out

    def _keep_documents(self, micro_batch: int, documents: Any) -> None:
        if documents is not None:
            self._documents[micro_batch] = documents

    def _link_backward(self, micro_batch: int, index: int, kept: _Kept, grad: Any) -> Any:
        link, edges = self.links[index], kept.edges
        if not self._differs[index + 1]:  # [Note: frozen units]
            return None
        others: list[Any] = []  # gradients of h and acc, from the links after this one
        if link.adds != "no":
            others = [None, grad] if link.adds == "last" else list(grad[:2])
            grad = grad[2] if link.adds == "alongside" else others[1]
        link.unit.need()
        args = kept.args
        if edges is None:
            if self.keeper is not None:
                args = tuple(self.keeper.get(a) for a in args)
                args = tuple(self._leaf(index, a) if isinstance(a, Tensor) else a for a in args)
            with torch.enable_grad():
                edges = _edges(self._run(micro_batch, index, args, self._again))
        wanted = kept.inputs if kept.inputs is not None else [a for a in args if _differentiable(a)]
        inputs = [*wanted, *link.unit.trained()]
        ends, given = _ends(edges, grad)
        grads: Sequence[Any]
        if link.compile:
            grads = torch.autograd.grad(ends, inputs, given, allow_unused=True)
        else:
            grads = gradients(ends, inputs, given)
        link.unit.accumulate(grads[len(wanted) :])
        if link.adds != "no":
            mine = grads[0] if wanted else None
            if kept.fed == 2:
                return (*others, mine)
            return (mine if others[0] is None else others[0] if mine is None else others[0] + mine), others[1]
        return None if not wanted else grads[0] if len(wanted) == 1 else grads[: len(wanted)]


def _named(link: ChainLink, documents: Any) -> dict[str, Any]:
    return {"documents": documents} if link.takes_documents and documents is not None else {}


def _finished(run: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The output of a link for these arguments; if the last is a Finish, it is applied to the output."""
    if args and isinstance(args[-1], Finish):
        return args[-1].run(run(*args[:-1], **named))
    return run(*args, **named)


def _uncut(links: Sequence[ChainLink]) -> list[list[int]]:
    """Runs of links that may share one graph; empty if a link needs its own graph, or no two links can share one."""
    if any(link.adds != "no" or link.recompute != "none" or link.compile for link in links):
        return []
    lends = [link.unit.lends_grads() for link in links]
    runs: list[list[int]] = []
    for index, mine in enumerate(lends):
        if mine and index and lends[index - 1]:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs if len(runs) < len(links) else []


def _added_in_place(units: Sequence[UnitVerbs], kept: _Kept, grad: Any) -> Any:
    """The backward of links that share a graph: autograd adds to the units' accumulators; returns the input gradient."""
    assert kept.edges is not None
    wanted = [a for a in kept.args if _differentiable(a)]
    inputs = list(wanted)
    for unit in units:
        unit.need()
        unit.lend_grads()
        inputs += unit.trained()
    try:
        ends, given = _ends(kept.edges, grad)
        accumulate(ends, inputs, given)
    finally:
        for unit in units:
            unit.take_grads_back()
    return None if not wanted else wanted[0].grad if len(wanted) == 1 else tuple(a.grad for a in wanted)


def _differentiable(a: Any) -> bool:
    return isinstance(a, Tensor) and a.requires_grad


class _Anchor(torch.autograd.Function):
    """Identity whose output is differentiable and not kept alive; the graph would keep a leaf alive until the backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


def _anchored(a: Tensor) -> Tensor:
    return _Anchor.apply(a.detach(), torch.empty(0, dtype=a.dtype, device=a.device, requires_grad=True))


def _make_run(link: ChainLink, split: bool) -> Callable[..., Any]:
    run: Callable[..., Any] = link.module
    if link.recompute == "selective":
        context = keep_products if link.compile else functools.partial(_traced_products, link.name)
        run = functools.partial(checkpoint, run, use_reentrant=False, context_fn=context, determinism_check="none")
    if link.compile:
        options = dict(COMPILE_OPTIONS) if split or link.sliced else {}
        if has_fp8(link.module):
            options |= FP8_OPTIONS
        run = OrUncompiled(link.name, run, options)
    return run


def _make_again(link: ChainLink, run: Callable[..., Any]) -> Callable[..., Any]:
    """The function that recomputes a link; a module may have a cheaper one, since the values of its output are not needed."""
    return run if link.compile else getattr(link.module, "again", run)


def _edges(value: Any) -> list[GradientEdge | None]:
    tensors = [value] if isinstance(value, Tensor) else flatten(value)[1]
    return [get_gradient_edge(t) if t.requires_grad else None for t in tensors]


def _ends(edges: Sequence[GradientEdge | None], grad: Any) -> tuple[list[GradientEdge], list[Tensor]]:
    """The graph nodes where a backward begins, and their gradients."""
    given = [grad] if isinstance(grad, Tensor) else flatten(grad)[1]
    pairs = [(edge, g) for edge, g in zip(edges, given, strict=True) if edge is not None]
    return [edge for edge, _ in pairs], [g for _, g in pairs]


def _fed(link: ChainLink, value: Any) -> int:
    """Index of the value that a link that adds is given: h, or a if there is one."""
    return len(value) - 1 if link.adds in ("more", "last") and len(value) == 3 else 0


def _joined(link: ChainLink, value: Any, out: Any) -> Any:
    """A link's output, joined to its input: [Note: links that add]."""
    match link.adds:
        case "alongside":
            return (*value, out)
        case "more":
            return value[0], value[1] + out
        case "last":
            return value[1] + out
    return out


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return tuple(v.detach() if isinstance(v, Tensor) else v for v in value)


_PRODUCTS = ("mm", "addmm", "_scaled_mm", "bmm", "baddbmm", "convolution")


def keep_products() -> Any:
    """Selective recomputation: outputs of matmuls and attention are saved, everything else is recomputed."""

    def policy(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        name = op.overloadpacket.__name__
        keep = name in (*_PRODUCTS, "attend", "_varlen_attn") or name.startswith("_scaled_dot_product")
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class _Recomputing(AbstractContextManager[Any]):
    """The context of a selective recomputation, which a traced step records."""

    def __init__(self, name: str, inner: AbstractContextManager[Any]):
        self.name, self.inner = name, inner

    def __enter__(self) -> Any:
        self.trace = RECORD.trace
        self.begun = self.trace.mark() if self.trace is not None else None
        return self.inner.__enter__()

    def __exit__(self, *exception: Any) -> bool | None:
        try:
            return self.inner.__exit__(*exception)
        finally:
            if self.trace is not None:
                self.trace.add("recompute", self.name, self.begun)


def _traced_products(name: str) -> Any:
    forward, again = keep_products()
    return forward, _Recomputing(name, again)
