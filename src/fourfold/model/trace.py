"""The spec of any module: run it once on the meta device and record what every layer computes, moves and saves. Needs torch.

Layers are the children with parameters of the largest list of modules (an `nn.ModuleList` or `nn.Sequential`; the module itself
may be one), from the first to the last of the most frequent type. Operators before the first layer belong to `embed`, those after
the last to `head`, those between two layers to the earlier one. A layer is one unit with its own parameters; other parameters
belong to the unit that first uses them in the forward. A parameter used twice counts once; if it belongs to `embed` and `head`
uses it, the spec is `tied`.

Everything is divided by the tokens of the sample's first tensor:

    ids [sequences, length]                  features [sequences, length, width]
    features [rows, width], images [rows, channels, …] and all else: a row is a sequence of one token
"""

from __future__ import annotations

import copy
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from fourfold.errors import ConfigError
from fourfold.model.operators import Held, ModelSpec, Moment, Operator, UnitSpec
from fourfold.model.spec import Shapes

__all__ = ["trace_module"]

_PRODUCTS = ("mm", "addmm")
_BATCHED = ("bmm", "baddbmm")
_VIEWS = (
    *("view", "_unsafe_view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select"),
    *("detach", "split", "split_with_sizes", "unbind", "alias", "as_strided", "empty"),
)


class _Product(NamedTuple):
    """A matmul [rows, inputs] · [inputs, outputs], or a convolution as one."""

    inputs: int
    outputs: int
    rows: int
    flops: float
    held: int
    """Elements of its input and output."""


class _Notes:
    """Record of one layer."""

    def __init__(self) -> None:
        self.products: list[_Product] = []
        self.attention = 0.0
        self.moved = 0.0
        self.product_outputs = 0.0
        self.saved: dict[int, tuple[int, int]] = {}  # by storage: elements, bytes of one
        self.used: dict[str, None] = {}  # names of parameters, in the order of use
        self.largest = 0.0
        self.output = 0.0
        self.input = 0.0

    def add(self, other: _Notes) -> None:
        """Add a later record; input and output stay unchanged."""
        self.products += other.products
        self.attention += other.attention
        self.moved += other.moved
        self.product_outputs += other.product_outputs
        self.saved |= other.saved
        self.used |= other.used
        self.largest = max(self.largest, other.largest)


class _Counter(TorchDispatchMode):
    """Records every op. `passed`: one record per run of a layer (its index), or of ops between layers (None), in order."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.parameters = {id(p.untyped_storage()): name for name, p in model.named_parameters()}
        self.passed: list[tuple[int | None, _Notes]] = []
        self.notes = _Notes()
        self.begin(None)

    def begin(self, layer: int | None) -> None:
        self.notes = _Notes()
        self.passed.append((layer, self.notes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "embedding" and args[1].is_floating_point():  # torch 2.11 does not refuse it without data
            raise RuntimeError(f"an embedding needs integers, but its input is {args[1].dtype}")
        given = [t for t in tree_flatten(args)[0] if isinstance(t, Tensor)]
        notes = self.notes
        notes.used |= {self.parameters[id(s)]: None for t in given if id(s := t.untyped_storage()) in self.parameters}
        if name in _VIEWS:
            return out
        tensors = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
        made = float(sum(t.numel() for t in tensors))
        if name in _PRODUCTS:
            a, b = args[-2], args[-1]
            m, k, n = a.shape[0], a.shape[1], b.shape[1]
            notes.products.append(_Product(k, n, m, 2.0 * m * k * n, m * (k + n)))
            notes.product_outputs += made
        elif name == "convolution":
            notes.products.append(_convolution(args[0], args[1], out, transposed=args[6]))
            notes.product_outputs += made
        elif name == "attend":  # our operator, for windows and soft-capped scores: model/attention.py
            q, k, window, causal = args[0], args[1], args[6], args[7]
            keys = (window or k.shape[2]) - (window or k.shape[2]) ** 2 / (2 * k.shape[2]) if causal else k.shape[2]
            notes.attention += 4.0 * q.numel() * keys
            notes.product_outputs += q.numel()
        elif name in _BATCHED:
            a, b = args[-2], args[-1]
            notes.attention += 2.0 * a.numel() * b.shape[-1]
        else:
            notes.moved += made + sum(t.numel() for t in given)
        notes.largest = max(notes.largest, made)
        return out


def _convolution(x: Tensor, w: Tensor, y: Tensor, *, transposed: bool) -> _Product:
    """A convolution as a matmul: one row per output position, as wide as the weights that contribute to it.

    Transposed: one row per input position. w [outputs (transposed: inputs), inputs of a group (transposed: outputs), …].
    """
    of_row = w.numel() // w.shape[0]
    wide = x if transposed else y
    rows, channels = wide.numel() // wide.shape[1], wide.shape[1]
    k, n = (channels, of_row) if transposed else (of_row, channels)
    return _Product(k, n, rows, 2.0 * rows * k * n, x.numel() + y.numel())


class _Attending(TorchFunctionMode):
    """Records attention as one fused operator; on the meta device torch would decompose it and materialise the scores."""

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
    if not isinstance(module, nn.Module):
        found = (
            f"{module.__name__}, a class"
            if isinstance(module, type)
            else f"{module!r}, of type {type(module).__name__}"
        )
        raise ConfigError(f"the module to trace is {found}: give an nn.Module, such as nn.Sequential(…)")
    title = type(module).__name__
    inputs = sample if isinstance(sample, tuple) else (sample,)
    inputs = tree_map(lambda t: t.to("meta") if isinstance(t, Tensor) else t, inputs)
    length, tokens = _tokens(inputs)
    model = _without_storage(module, title)
    layers = _layers(model)
    counter = _traced(model, list(layers.values()), inputs, title)
    notes = _by_unit(counter, len(layers), title, next(iter(layers)))
    shapes = _shapes(model, list(layers.values()), notes)
    tied = next((n for n in notes[-1].used if len(shapes[0].get(n, ())) > 1), None)
    if tied is not None:  # the planner takes the first unit's first parameter as the tied one
        shapes[0] = {tied: shapes[0][tied]} | shapes[0]
    ends = ["embed" if "embed" not in layers else "before", "head" if "head" not in layers else "after"]
    kinds: dict[Any, str] = {}
    units = []
    for i, (unit, shape, note) in enumerate(zip([ends[0], *layers, ends[1]], shapes, notes, strict=True)):
        described = _unit(unit, i, shape, note, tokens)
        like = (tuple(sorted(map(str, shape.values()))), described.operators, tuple(described.saved.items()))
        kind = kinds.setdefault(like, unit)
        units.append(described if kind == unit else replace(described, kind=kind))
    hidden = round(max((n.input for n in notes[1:]), default=0.0) / tokens) or 1
    spec = ModelSpec(name or title, tuple(units), length, hidden, tied is not None)
    if not spec.parameters:
        raise ConfigError(f"{title} has no parameters to plan for")
    return spec


def _tokens(inputs: Any) -> tuple[int, int]:
    """Tokens of a sequence, and of the sample."""
    first = next((t for t in tree_flatten(inputs)[0] if isinstance(t, Tensor)), None)
    if first is None or first.dim() < 1:
        raise ConfigError("the sample must hold a tensor of [sequences, length, …]")
    ids = not (first.is_floating_point() or first.is_complex())
    length = first.shape[1] if first.dim() == 3 or (ids and first.dim() > 1) else 1
    if not first.shape[0] * length:
        raise ConfigError(
            f"the sample's first tensor is {_describe(first)}, which has no token; give one of [2, …] or more"
        )
    return length, first.shape[0] * length


def _without_storage(module: nn.Module, title: str) -> nn.Module:
    """A copy on the meta device, without storage; shared tensors stay shared."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for t in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
            if isinstance(t, nn.UninitializedParameter | nn.UninitializedBuffer):
                raise ConfigError(f"{title} has parameters without a shape ({type(part).__name__}): run it once first")
            if isinstance(t, Tensor) and id(t) not in memo:
                made = torch.empty_like(t, device="meta", requires_grad=False)
                memo[id(t)] = nn.Parameter(made, t.requires_grad) if isinstance(t, nn.Parameter) else made
    return copy.deepcopy(module, memo).train()


# ---- finding the layers ----


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers, by the names of their modules."""
    lists: dict[str, nn.Module] = {
        name: found
        for name, found in model.named_modules()
        if isinstance(found, nn.ModuleList | nn.Sequential) and len(found) > 1 and _children(name, found)
    }
    if not lists:
        raise ConfigError(
            f"{type(model).__name__} has no list of layers (nn.ModuleList or nn.Sequential) to cut into stages and units"
        )
    name = max(lists, key=lambda n: (_size(lists[n]), -n.count(".")))
    while (inner := _list_of_most(name, lists)) is not None:
        name = inner
    children = _children(name, lists[name])
    kinds = _kinds(children)
    most = [at for at, child in enumerate(children.values()) if kinds[type(child)] == max(kinds.values())]
    return dict(list(children.items())[most[0] : most[-1] + 1])


def _list_of_most(name: str, lists: dict[str, nn.Module]) -> str | None:
    """A nested list that holds more modules of one type, if it is most of the list or the only one in it."""
    prefix = f"{name}." if name else ""
    inside = [n for n in lists if n != name and n.startswith(prefix)]
    largest = max(inside, key=lambda n: (_size(lists[n]), -n.count(".")), default=None)
    if largest is None:
        return None
    here, there = (max(_kinds(_children(n, lists[n])).values()) for n in (name, largest))
    if there <= here:
        return None
    holders = {n.removeprefix(prefix).partition(".")[0] for n in inside}
    return largest if len(holders) == 1 or 2 * _size(lists[largest]) > _size(lists[name]) else None


def _children(name: str, found: nn.Module) -> dict[str, nn.Module]:
    """The children that have parameters, by full name; a module that is in the list twice appears twice."""
    every = found.named_modules(prefix=name, remove_duplicate=False)
    depth = name.count(".") + 1 if name else 0
    return {n: m for n, m in every if n != name and n.count(".") == depth and _size(m)}


def _kinds(children: dict[str, nn.Module]) -> Counter[type]:
    return Counter(type(child) for child in children.values())


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# ---- the run ----


def _traced(model: nn.Module, layers: list[nn.Module], inputs: Any, title: str) -> _Counter:
    """Run the model and record it, layer by layer."""
    counter = _Counter(model)
    with _watched(counter, layers), torch.device("meta"):
        try:
            model(*inputs)
        except Exception as e:
            where = next((f for f in reversed(traceback.extract_tb(e.__traceback__)) if not _torchs(f.filename)), None)
            at = f" at {Path(where.filename).name}:{where.lineno} ({where.line})" if where is not None else ""
            what = f"{type(e).__name__}{at}: {str(e).strip().partition(chr(10))[0]}"
            if isinstance(e, NotImplementedError) or "meta" in str(e):
                raise ConfigError(
                    f"{title} cannot be traced without storage: {what}. A trace has shapes only: the forward must not "
                    "depend on values of tensors, and tensors that it uses must be parameters or buffers"
                ) from e
            given = ", ".join(_describe(t) for t in tree_flatten(inputs)[0] if isinstance(t, Tensor))
            raise ConfigError(
                f"{title} does not run on the sample, {given}: {what}. Pass the arguments of its forward, "
                "as a tuple if there are several"
            ) from e
    return counter


def _torchs(file: str) -> bool:
    return file == __file__ or Path(torch.__file__).parent in Path(file).parents


def _describe(t: Tensor) -> str:
    return f"{list(t.shape)} of {str(t.dtype).removeprefix('torch.')}"


@contextmanager
def _watched(counter: _Counter, layers: list[nn.Module]) -> Iterator[None]:
    """Record ops and saved tensors under the running layer, or between layers."""
    turns: dict[nn.Module, deque[int]] = defaultdict(
        deque
    )  # a module used as several layers takes these indices in order
    for i, layer in enumerate(layers):
        turns[layer].append(i)

    def enter(layer: nn.Module, args: Any) -> None:
        counter.begin(turns[layer][0])
        turns[layer].rotate(-1)
        counter.notes.input = _elements(args)

    def leave(_layer: nn.Module, _args: Any, out: Any) -> None:
        counter.notes.output = given = _elements(out)
        counter.begin(None)
        counter.notes.input = given

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if id(storage) not in counter.parameters and not isinstance(t, nn.Parameter):
            counter.notes.saved[id(storage)] = (storage.nbytes() // t.element_size(), t.element_size())
            kept.append(t)
        return t

    kept: list[Tensor] = []  # kept alive, since storages are compared by id
    handles = [layer.register_forward_pre_hook(enter) for layer in turns]
    handles += [layer.register_forward_hook(leave) for layer in turns]
    try:
        with counter, _Attending(counter), saved_tensors_hooks(pack, lambda t: t):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _elements(value: Any) -> float:
    return float(sum(t.numel() for t in tree_flatten(value)[0] if isinstance(t, Tensor)))


def _by_unit(counter: _Counter, layers: int, title: str, first: str) -> list[_Notes]:
    """The records of `embed`, every layer and `head`."""
    ran = [at for at, (layer, _) in enumerate(counter.passed) if layer is not None]
    if not ran:
        raise ConfigError(
            f"the forward of {title} runs none of its layers ('{first}' and its siblings): call them as modules, "
            "layer(x), in the forward"
        )
    out: list[_Notes | None] = [None] * (layers + 2)
    unit = 0
    for at, (layer, notes) in enumerate(counter.passed):
        unit = layers + 1 if at > ran[-1] else unit if layer is None else layer + 1
        before = out[unit]
        if before is None:
            out[unit] = notes
        else:
            before.add(notes)
    return [notes if notes is not None else _Notes() for notes in out]


def _shapes(model: nn.Module, layers: list[nn.Module], notes: list[_Notes]) -> list[Shapes]:
    """Parameters of every unit: a layer has its own; others belong to the unit that uses them first, or (unused) defines them."""
    out: list[Shapes] = [{} for _ in notes]
    inside: dict[int, int] = {}
    for i, layer in enumerate(layers):
        for p in layer.parameters():
            inside.setdefault(id(p), i + 1)
    users: dict[str, int] = {}
    for i, note in enumerate(notes):
        for name in note.used:
            users.setdefault(name, i)
    defined = 0
    for name, p in model.named_parameters():
        if id(p) in inside:
            defined = len(layers) + 1
        at = inside.get(id(p), users.get(name, defined))
        out[at][name] = tuple(p.shape)
    return out


def _unit(name: str, layer: int, shapes: Shapes, note: _Notes, tokens: int) -> UnitSpec:
    operators = [
        Operator(f"product{i}", "product", p.inputs, p.outputs, p.flops / tokens, p.held / tokens, rows=p.rows / tokens)
        for i, p in enumerate(note.products)
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
        for_weight_grad=Held(sum(p.held for p in note.products) / tokens),
        output=note.output / tokens,
    )
