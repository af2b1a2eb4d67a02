"""The spec of any module: run it once without storage, and note what every layer computes, moves and saves. Needs torch.

Layers are the children of the largest list of modules (an `nn.ModuleList` or `nn.Sequential`); what runs before the first of them
is `embed`, what runs after the last is `head`. A layer is one unit. Everything is divided by the tokens of the sample: its first
two dims, sequences and their length.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from fourfold.errors import ConfigError
from fourfold.model.operators import Held, ModelSpec, Moment, Operator, UnitSpec

__all__ = ["trace_module"]

_PRODUCTS = ("mm", "addmm")
_BATCHED = ("bmm", "baddbmm")
_VIEWS = (
    *("view", "_unsafe_view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select"),
    *("detach", "split", "split_with_sizes", "unbind", "alias", "as_strided", "empty"),
)


class _Notes:
    """What one layer did."""

    def __init__(self) -> None:
        self.products: list[tuple[int, int, float]] = []  # K, N, FLOPs
        self.attention = 0.0
        self.moved = 0.0
        self.product_outputs = 0.0
        self.saved: dict[int, tuple[int, int]] = {}  # by storage: elements, bytes of one
        self.largest = 0.0
        self.output = 0.0
        self.input = 0.0


class _Counter(TorchDispatchMode):
    """Notes every op under the layer that runs."""

    def __init__(self, notes: _Notes):
        super().__init__()
        self.notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _VIEWS:
            return out
        tensors = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
        made = float(sum(t.numel() for t in tensors))
        notes = self.notes
        if name in _PRODUCTS:
            a, b = args[-2], args[-1]
            m, k, n = a.shape[0], a.shape[1], b.shape[1]
            notes.products.append((k, n, 2.0 * m * k * n))
            notes.product_outputs += made
        elif name in _BATCHED:
            a, b = args[-2], args[-1]
            notes.attention += 2.0 * a.numel() * b.shape[-1]
        else:
            read = sum(t.numel() for t in tree_flatten(args)[0] if isinstance(t, Tensor))
            notes.moved += made + read
        notes.largest = max(notes.largest, made)
        return out


class _Attending(TorchFunctionMode):
    """Attention as devices run it, in one operator; without storage torch would take it apart, scores and all."""

    def __init__(self, counter: _Counter):
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
        given |= kwargs or {}
        q, k, v = given["query"], given["key"], given["value"]
        self.counter.notes.attention += (2.0 if given.get("is_causal") else 4.0) * q.numel() * k.shape[-2]
        self.counter.notes.product_outputs += q.numel()
        return _Attention.apply(q, k, v)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
        ctx.save_for_backward(q, k, v, out, torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device))
        return out


def trace_module(module: nn.Module, sample: Any, name: str = "") -> ModelSpec:
    """Trace `module(*sample)` on the meta device."""
    model = copy.deepcopy(module).to("meta").train()
    inputs = sample if isinstance(sample, tuple) else (sample,)
    inputs = tree_map(lambda t: t.to("meta") if isinstance(t, Tensor) else t, inputs)
    first = next((t for t in tree_flatten(inputs)[0] if isinstance(t, Tensor)), None)
    if first is None or first.dim() < 1:
        raise ConfigError("the sample must hold a tensor of [sequences, length, …]")
    length = first.shape[1] if first.dim() > 1 else 1
    tokens = first.shape[0] * length
    prefix, layers = _layers(model)
    notes = [_Notes() for _ in range(len(layers) + 2)]
    with _watched(model, layers, notes):
        try:
            out = model(*inputs)
        except NotImplementedError as e:
            raise ConfigError(f"{type(module).__name__} cannot be traced without storage: {e}") from None
    notes[-1].output = 0.0
    del out
    shapes = _shapes(model, prefix, layers)
    names = ["embed", *(f"{prefix}.{i}" for i in range(len(layers))), "head"]
    kinds: dict[Any, str] = {}
    units = []
    for i, (unit, shape, note) in enumerate(zip(names, shapes, notes, strict=True)):
        described = _unit(unit, i, shape, note, tokens)
        like = (tuple(sorted(map(str, shape.values()))), described.operators, tuple(described.saved.items()))
        kind = kinds.setdefault(like, unit)
        units.append(described if kind == unit else replace(described, kind=kind))
    hidden = round(max((n.input for n in notes[1:]), default=0.0) / tokens) or 1
    spec = ModelSpec(name or type(module).__name__, tuple(units), length, hidden)
    if not spec.parameters:
        raise ConfigError(f"{type(module).__name__} has no parameters to plan for")
    return spec


def _layers(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """The list of modules with the most parameters, and its name."""
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1]
    if not lists:
        raise ConfigError(
            f"{type(model).__name__} has no list of layers (nn.ModuleList or nn.Sequential) to cut into stages and units"
        )
    name, found = max(lists, key=lambda item: (sum(p.numel() for p in item[1].parameters()), -item[0].count(".")))
    return name or "layers", list(found)


@contextmanager
def _watched(model: nn.Module, layers: list[nn.Module], notes: list[_Notes]) -> Iterator[None]:
    """Ops go to the notes of the layer that runs: 0 before the first, the last after all."""
    counter = _Counter(notes[0])
    parameters = {id(p.untyped_storage()) for p in model.parameters()}
    handles = []

    def enter(index: int) -> Any:
        def hook(_module: nn.Module, args: Any) -> None:
            counter.notes = notes[index]
            notes[index].input = float(sum(t.numel() for t in tree_flatten(args)[0] if isinstance(t, Tensor)))

        return hook

    def leave(_module: nn.Module, _args: Any, out: Any) -> None:
        counter.notes.output = float(sum(t.numel() for t in tree_flatten(out)[0] if isinstance(t, Tensor)))
        notes[-1].input = counter.notes.output
        counter.notes = notes[-1]

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if id(storage) not in parameters and not isinstance(t, nn.Parameter):
            counter.notes.saved[id(storage)] = (storage.nbytes() // t.element_size(), t.element_size())
            kept.append(t)
        return t

    kept: list[Tensor] = []  # alive while ids are compared
    for i, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(enter(i + 1)))
        handles.append(layer.register_forward_hook(leave))
    try:
        with counter, _Attending(counter), saved_tensors_hooks(pack, lambda t: t):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _shapes(model: nn.Module, prefix: str, layers: list[nn.Module]) -> list[dict[str, tuple[int, ...]]]:
    """Parameters of every unit; those outside the layers belong to `embed`, or to `head` where they come after."""
    out: list[dict[str, tuple[int, ...]]] = [{} for _ in range(len(layers) + 2)]
    seen: set[int] = set()
    after = False
    for name, p in model.named_parameters(remove_duplicate=True):
        inside = name.startswith(f"{prefix}.") and name.removeprefix(f"{prefix}.").partition(".")[0].isdigit()
        after = after or inside
        at = 1 + int(name.removeprefix(f"{prefix}.").partition(".")[0]) if inside else len(layers) + 1 if after else 0
        if id(p) not in seen:
            seen.add(id(p))
            out[at][name] = tuple(p.shape)
    return out


def _unit(name: str, layer: int, shapes: dict[str, tuple[int, ...]], note: _Notes, tokens: int) -> UnitSpec:
    operators = [
        Operator(f"product{i}", "product", k, n, flops / tokens, k + n) for i, (k, n, flops) in enumerate(note.products)
    ]
    if note.attention:
        operators.append(Operator("attention", "attention", flops=note.attention / tokens, backward=2.5))
    operators.append(Operator("other", "memory", moved=note.moved / tokens, backward=1.5))
    sizes = [pair for pair in note.saved.values() if pair[0]]
    widest = 4
    narrow = sum(n for n, width in sizes if width <= widest) / tokens
    wide = sum(n * width / widest for n, width in sizes if width > widest) / tokens
    kept = Held(narrow, wide)
    entry = note.input / tokens
    return UnitSpec(
        name,
        name,
        layer,
        shapes,
        tuple(operators),
        {
            "none": kept,
            "selective": Held(min(narrow, entry + note.product_outputs / tokens), 0.0),
            "full": Held(min(entry, narrow + wide) if entry else 0.0),
        },
        forward=dict.fromkeys(("none", "selective", "full"), (Moment(Held((note.largest + note.output) / tokens)),)),
        backward=(Moment(Held(2 * note.largest / tokens), grads=1.0),),
        split=(Moment(Held(2 * note.largest / tokens)),),
        closing=entry + 2 * note.output / tokens,
        for_weight_grad=Held(sum(k + n for k, n, _ in note.products)),
        output=note.output / tokens,
    )
