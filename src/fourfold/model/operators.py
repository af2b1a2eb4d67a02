"""A model as the planner sees it: units made of operators, with the FLOPs, memory traffic and saved elements of each. No torch.

Everything is counted for one token and one forward, in elements and FLOPs, so that one description serves every micro-batch,
precision and grid. Identical units share a `kind`, and are costed once.

What a unit saves between its forward and its backward, by recomputation (letters as in model/spec.py):

    none        everything autograd saves       selective   its input, and the outputs of matmuls and attention
    full        its input                       per-slice   its input and the normalised input; slices are recomputed

`Held(narrow, wide)` counts elements of the compute type and of fp32 (fp64 for fp64). A test checks that the numbers equal what
the real modules save.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fourfold import schema
from fourfold.config import ModelConfig
from fourfold.model.lora import adapters
from fourfold.model.spec import Shapes, frozen_shapes, keys_per_query, unit_flops, unit_names, unit_shapes

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Held", "ModelSpec", "Moment", "Operator", "UnitSpec"]


class Held(NamedTuple):
    """Numbers of elements: of the compute type, and of fp32 (or fp64)."""

    narrow: float = 0.0
    wide: float = 0.0

    def bytes(self, compute: int) -> float:
        """Bytes, if an element of the compute type has `compute` bytes."""
        return self.narrow * compute + self.wide * max(4, compute)


NOTHING = Held()


class Moment(NamedTuple):
    """Workspace of a unit at one point of its forward or backward, beyond saved activations; negative: some are already freed."""

    held: Held = NOTHING
    """Elements per token, divided over the columns of a grid."""
    inner: Held = NOTHING
    """The same, divided over slices as well."""
    grads: float = 0.0
    """Fraction of the weights whose gradients exist."""
    full: float = 0.0
    """On a grid: elements per token that every column holds in full."""
    weights: float = 0.0
    """On a grid: fraction of the matrices that are gathered over the rows."""


@dataclass(frozen=True)
class Operator:
    """One operator of a unit, for one token of a forward."""

    name: str
    kind: Literal["product", "attention", "memory"]
    """product: a matmul with a weight; attention; memory: a memory-bound operator."""
    inputs: int = 0
    """product: width of the input, K."""
    outputs: int = 0
    """product: width of the output, N."""
    flops: float = 0.0
    """FLOPs of the forward."""
    moved: float = 0.0
    """Elements that the forward reads and writes, except weights."""
    wide: float = 0.0
    """The same for elements in fp32 (or fp64) whatever the compute type."""
    backward: float = 2.0
    """Time of the backward relative to the forward, for attention (fused kernels: 2.5) and memory-bound operators."""
    rows: float = 1.0
    """product: rows of the input per token: more than 1 for an image, less for a pooled sequence."""
    frozen: bool = False
    """product: the weight is frozen, so that no weight gradient is computed."""


@dataclass(frozen=True)
class UnitSpec:
    """A unit: parameters that are sharded, gathered and reduced together; it may recompute its activations."""

    name: str
    kind: str
    """Units of the same kind differ only in their names."""
    layer: int
    """The index of its layer; stages are runs of layers."""
    shapes: Shapes = field(hash=False)
    operators: tuple[Operator, ...]
    saved: Mapping[str, Held] = field(hash=False)
    """By recomputation mode, activations saved between forward and backward."""
    forward: Mapping[str, tuple[Moment, ...]] = field(hash=False)
    """By recomputation mode, the candidates for the peak of a forward, including the unit's output."""
    backward: tuple[Moment, ...]
    """Candidates for the peak of a backward, with everything that `none` saves present; includes the gradient of the output."""
    split: tuple[Moment, ...] = ()
    """The same for I, if the matmuls of weight gradients are deferred."""
    closing: float = 0.0
    """Elements present while weight gradients are accumulated: gradients of output and input, and the input."""
    cast: float = 0.0
    """Elements of the forward that are also held in fp32, where the compute type is narrower."""
    for_weight_grad: Held = NOTHING
    """With a split backward, held until W: inputs of matmuls, and gradients of their outputs."""
    mask: float = 0.0
    """Elements that dropout applies to. Saved for the backward: a byte each, on CPUs an element of the compute type."""
    scores: float = 0.0
    """Attention weights that dropout applies to: CPUs have no fused kernel for this and save them, in fp32 or fp64."""
    unfused: float = 0.0
    """Elements of RMSNorm inputs: CPUs have no fused kernel and save them once more (twice in fp32, for narrower types)."""
    again: tuple[str, ...] = ()
    """Operators that selective recomputation recomputes; empty: all memory-bound ones."""
    unread: str = ""
    """The matmul that full recomputation skips, since its result is not needed (on a grid it is computed)."""
    slices: int = 1
    """Maximum number of slices of operator splitting."""
    output: float = 0.0
    """Elements passed to the next unit."""
    frozen: tuple[str, ...] = ()
    """Parameters that are not trained (LoRA): without gradients and optimizer state."""

    @cached_property
    def trained(self) -> Shapes:
        """Shapes of the parameters that are trained."""
        return {name: shape for name, shape in self.shapes.items() if name not in self.frozen}

    @cached_property
    def matrices(self) -> int:
        """Elements of its matrices, which are split over the grid."""
        return sum(_size(s) for s in self.shapes.values() if len(s) > 1)

    @cached_property
    def vectors(self) -> int:
        """Elements of its norms and biases."""
        return sum(_size(s) for s in self.shapes.values() if len(s) <= 1)

    @property
    def parameters(self) -> int:
        return self.matrices + self.vectors

    @cached_property
    def flops(self) -> float:
        """FLOPs of the forward, for one token."""
        return sum(o.flops for o in self.operators)


@dataclass(frozen=True)
class ModelSpec:
    """A model's units in the order of the forward."""

    name: str
    units: tuple[UnitSpec, ...]
    seq_len: int
    hidden: int
    """Width of the activations between layers."""
    tied: bool = False
    """The head's matrix is the embedding's."""
    config: ModelConfig | None = field(default=None, compare=False)
    """The config it was made from, if any."""
    context: float = 0.0
    """Effective document length for the cost of attention, if documents share a sequence; 0: seq_len."""

    @classmethod
    def from_config(cls, config: ModelConfig, name: str = "") -> ModelSpec:
        """The spec of a model of ours."""
        m = config.resolve()
        flops = unit_flops(m)
        units = tuple(_unit(m, name, flops[name]) for name in unit_names(m))
        title = (name or f"{m.family} {m.layers}×{m.hidden}") + (f", LoRA rank {m.lora.rank}" if m.lora else "")
        return cls(title, units, m.seq_len, m.hidden, bool(m.tie), m)

    @classmethod
    def from_hf(cls, path: str | Path, *, seq_len: int = 0, dropout: float | None = None) -> ModelSpec:
        """The spec of a Hugging Face config.json (a file, or the folder that holds it); `dropout` replaces the file's."""
        file = Path(path).resolve()
        config = file / "config.json" if file.is_dir() else Path(path)
        name = file.name if file.is_dir() else file.parent.name if file.name == "config.json" else file.stem
        return cls.from_hf_config(schema.read(config), name, config, seq_len=seq_len, dropout=dropout)

    @classmethod
    def from_hf_config(
        cls,
        config: dict[str, Any],
        name: str = "",
        path: str | Path = "config.json",
        *,
        seq_len: int = 0,
        dropout: float | None = None,
    ) -> ModelSpec:
        """The spec of a parsed Hugging Face config.json; errors name `path`."""
        from fourfold.model.hf import LONGEST, read_fields

        fields = read_fields(config, Path(path), seq_len, dropout)
        length = seq_len or min(LONGEST, fields["positions"])
        return cls.from_config(ModelConfig(**fields | {"seq_len": length}), name)

    @classmethod
    def from_module(cls, module: nn.Module, sample: Any, name: str = "") -> ModelSpec:
        """The spec of any module (on the meta device or not) by tracing it on a sample input; needs torch.

        `sample`: the argument of its forward, or a tuple of arguments. The first tensor defines tokens: ids [sequences, length]
        and features [sequences, length, width] have `length` tokens per sequence; in anything else (features [rows, width],
        images) a row is a sequence of one token. `fourfold.model.trace` explains what becomes a unit.
        """
        from fourfold.model.trace import trace_module

        return trace_module(module, sample, name)

    @property
    def layers(self) -> int:
        """Number of layers, including the embedding and the head."""
        return self.units[-1].layer + 1

    @cached_property
    def parameters(self) -> int:
        return sum(u.parameters for u in self.units)

    @cached_property
    def flops_per_token(self) -> float:
        """FLOPs of forward and backward per token, without recomputation."""
        frozen = sum(o.flops for u in self.units for o in u.operators if o.frozen)
        return 3 * sum(u.flops for u in self.units) - frozen

    @property
    def lora(self) -> bool:
        """Whether only adapters are trained, and all weights of the model are frozen."""
        return self.config is not None and self.config.lora is not None

    @cached_property
    def kinds(self) -> dict[str, UnitSpec]:
        """One unit of each kind."""
        return {u.kind: u for u in reversed(self.units)}

    def before_in_block(self, kind: str) -> UnitSpec | None:
        """The unit before one of this kind in the same layer: the attention before an MLP."""
        units = self.of_layer(self.kinds[kind].layer)
        at = next(i for i, u in enumerate(units) if u.kind == kind)
        return units[at - 1] if at else None

    @cached_property
    def alike(self) -> bool:
        """Whether all layers except the first and the last consist of the same kinds of units."""
        return len({tuple(u.kind for u in self.of_layer(layer)) for layer in range(1, self.layers - 1)}) <= 1

    def of_layer(self, layer: int) -> tuple[UnitSpec, ...]:
        return self._layers[layer]

    @cached_property
    def kinds_of_layers(self) -> tuple[tuple[str, ...], ...]:
        """The kinds of units of every layer."""
        return tuple(tuple(u.kind for u in units) for units in self._layers)

    @cached_property
    def _layers(self) -> tuple[tuple[UnitSpec, ...], ...]:
        out: list[list[UnitSpec]] = [[] for _ in range(self.layers)]
        for unit in self.units:
            out[unit.layer].append(unit)
        return tuple(map(tuple, out))

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of everything that the planner reads."""
        text = json.dumps([asdict(u, dict_factory=_said) for u in self.units], sort_keys=True, default=str)
        return hashlib.blake2b(f"{self.seq_len} {self.tied} {text}".encode(), digest_size=6).hexdigest()

    def with_context(self, context: float, *, expands: bool = False) -> ModelSpec:
        """The spec on packed data (`data.packing = "documents"`): attention costs Σ L² / Σ L keys for documents of L tokens.

        `expands`: the kernel takes as many key heads as query heads, so keys and values are copied for it where there are fewer.
        """
        if not context or self.config is None:
            return self
        units, m = [], self.config
        copied = (
            Held(2.0 * m.heads * m.head_dim) if expands and m.kv_heads < m.heads and not m.attn_softcap else NOTHING
        )
        if context >= self.seq_len and not copied.narrow:
            return self
        for u in self.units:
            if u.kind.startswith("attn"):
                share = min(1.0, keys_per_query(m, u.layer - 1, context) / keys_per_query(m, u.layer - 1))
                operators = (replace(o, flops=o.flops * share) if o.kind == "attention" else o for o in u.operators)
                u = _with_copies(replace(u, operators=tuple(operators)), copied)
            units.append(u)
        return replace(self, units=tuple(units), context=context)

    def with_plain_attention(self, dropout: bool = True, residual_copies: int = 1) -> ModelSpec:
        """The spec without fused attention: scores, softmax and dropout are written to memory.

        Each operation reads and writes a row of `seq_len` scores per head and token, and the row is saved (selective
        recomputation drops it). `residual_copies`: ranks of a tensor-parallel group that compute the same norms and residual
        sums. Used to predict published runs that predate fused attention.
        """
        assert self.config is not None
        c, keys = self.config, self.seq_len
        scores = float(c.heads * keys)
        kept = 2.5 * scores if dropout else scores  # softmax, its dropout, the mask (a byte)
        units = []
        for u in self.units:
            if u.kind == "attn":
                inner = 4.0 * keys * c.heads * c.head_dim  # the full square is computed, also if causal
                passes = 2 + 2 + (2.5 if dropout else 0)  # matmuls read and write; softmax; dropout and mask
                operators = tuple(
                    replace(o, flops=inner, backward=2.0) if o.kind == "attention" else o for o in u.operators
                )
                more = Operator("softmax", "memory", moved=passes * scores, backward=1.3)
                u = replace(
                    u,
                    operators=(*operators, more),
                    again=("attention", "softmax"),
                    saved={**u.saved, "none": Held(u.saved["none"].narrow + kept, u.saved["none"].wide)},
                    backward=tuple(m._replace(held=Held(m.held.narrow + 2 * scores, m.held.wide)) for m in u.backward),
                )
            u = replace(u, unread="")
            if dropout and u.kind in ("attn", "mlp"):
                extra = Operator("dropout", "memory", moved=2.5 * c.hidden, backward=1.0)
                u = replace(u, operators=(*u.operators, extra))
            if residual_copies > 1:
                alike = ("norm", "residual", "dropout")
                operators = tuple(
                    replace(o, moved=o.moved * residual_copies) if o.name in alike else o for o in u.operators
                )
                u = replace(u, operators=operators)
            units.append(u)
        return replace(self, units=tuple(units))


def _said(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Fields that differ from their defaults, so that new fields do not change the fingerprints in saved plans."""
    silent = {"rows": 1.0, "mask": 0.0, "scores": 0.0}
    return {name: value for name, value in fields if silent.get(name) != value and (value or name != "frozen")}


def _size(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


# ---- our models ----


def _unit(m: ModelConfig, name: str, flops: float) -> UnitSpec:
    part = name.rpartition(".")[2]
    layer = 0 if name == "embed" else m.layers + 1 if name == "head" else 1 + int(name.split(".")[1])
    build = {"embed": _embed, "attn": _attention, "mlp": _mlp, "head": _head}[part]
    unit = build(m, name, layer)
    unit = unit if m.lora is None else _with_adapters(m, unit)
    assert abs(unit.flops - flops) <= 1e-6 * max(1.0, flops), name
    return _with_dropout(m, unit) if m.dropout and part != "head" else unit


def _with_dropout(m: ModelConfig, unit: UnitSpec) -> UnitSpec:
    """Add dropout of the branch's output and of attention weights; gradients of its input and output coexist."""
    d = m.hidden

    def more(moments: tuple[Moment, ...]) -> tuple[Moment, ...]:
        return tuple(moment._replace(held=Held(moment.held.narrow + d, moment.held.wide)) for moment in moments)

    return replace(
        unit,
        operators=(*unit.operators, Operator("dropout", "memory", moved=2.5 * d, backward=1.0)),
        forward={name: more(moments) for name, moments in unit.forward.items()},
        backward=(*more(unit.backward[:1]), *unit.backward[1:]),
        split=(*more(unit.split[:1]), *unit.split[1:]),
        mask=float(d),
        scores=float(m.heads * m.seq_len) if unit.kind == "attn" else 0.0,
    )


def _with_adapters(m: ModelConfig, unit: UnitSpec) -> UnitSpec:
    """LoRA: the unit's parameters are frozen, and adapted linears gain two factors.

    A frozen linear saves its input only for its adapter. An adapter saves x Aᵀ. Its matmuls are memory-bound: they read the
    input, write the output, to which the frozen matmul is added, and read the output's gradient twice in the backward.
    """
    assert m.lora is not None
    found, operators = adapters(m, unit.name), []
    low = sum(m.lora.rank * len(parts) for parts in found.values())
    wide = {o.name: (o.inputs, o.outputs) for o in unit.operators if o.kind == "product"}
    for o in unit.operators:
        operators.append(replace(o, frozen=True) if o.kind == "product" else o)
        if parts := found.get(o.name):
            rank = m.lora.rank
            flops = 2.0 * rank * (len(parts) * o.inputs + sum(p.stop - p.start for p in parts))
            moved = float(o.inputs + 2 * o.outputs)
            operators.append(Operator(f"{o.name} adapter", "memory", flops=flops, moved=moved))
    unread = sum(wide[n][0] for n in wide if n not in found and n in ("qkv", "up", "down", "proj"))
    none, selective = unit.saved["none"], unit.saved["selective"]
    if unit.name == "embed":
        none = selective = unit.saved["full"]
        operators = [replace(o, backward=0.0) for o in operators]
    made = sum(wide[n][1] for n in found)

    def more(moments: tuple[Moment, ...]) -> tuple[Moment, ...]:
        """In an MLP whose `down` has no adapter, the input of `down` is not saved, and counts as workspace."""
        inner = wide["down"][0] if "down" in wide and "down" not in found else 0
        return tuple(x._replace(inner=Held(x.inner.narrow + inner, x.inner.wide)) for x in moments)

    return replace(
        unit,
        operators=tuple(operators),
        saved={
            **unit.saved,
            "none": Held(none.narrow + low - unread, none.wide),
            "selective": Held(selective.narrow + low + made, selective.wide),
        },
        forward={name: moments if name == "selective" else more(moments) for name, moments in unit.forward.items()},
        backward=(*unit.backward[:1], *more(unit.backward[1:])),
        split=(*unit.split[:1], *more(unit.split[1:])),
        for_weight_grad=Held(unit.for_weight_grad.narrow - unread + 2 * low, unit.for_weight_grad.wide),
        frozen=tuple(frozen_shapes(m, unit.name)),
    )


def _product(name: str, inputs: int, outputs: int) -> Operator:
    return Operator(name, "product", inputs, outputs, flops=2.0 * inputs * outputs, moved=inputs + outputs)


def _norm_operator(width: int) -> Operator:
    return Operator("norm", "memory", moved=2.0 * width, backward=2.0)


def _embed(m: ModelConfig, name: str, layer: int) -> UnitSpec:
    d = m.hidden
    post = m.masked_lm
    added = 2 * d * (m.learned_positions + bool(m.token_types) + (m.embed_scale != 1))
    operators = [Operator("lookup", "memory", moved=2.0 * d + added, backward=1.5)]
    tokens = 2.0  # int64 ids
    return UnitSpec(
        name,
        "embed",
        layer,
        unit_shapes(m, name),
        (*operators, _norm_operator(d)) if post else tuple(operators),
        {
            "none": Held(d + 2 if post else 0, tokens),
            "selective": Held(d + 2 if post else 0, tokens),
            "full": Held(0, tokens),
        },
        forward=_alike(Moment(Held(2.0 * d if added else d), full=2.0 * d, weights=1.0)),
        backward=(Moment(Held(2.0 * d if post else d), grads=1.0, full=float(d)),),
        closing=float(d),
        output=d,
    )


def _alike(*moments: Moment) -> dict[str, tuple[Moment, ...]]:
    return dict.fromkeys(("none", "selective", "full"), moments)


class _Norms(NamedTuple):
    """The norms of a part on the residual stream."""

    before: bool
    """Whether the input (post-norm: the sum) is normalised."""
    after: bool
    """Whether the branch's output is normalised."""
    rms: bool
    plus_one: bool

    @classmethod
    def of(cls, m: ModelConfig, part: str) -> _Norms:
        before = m.block != "output" and not (part == "mlp" and m.block == "parallel-shared")
        return cls(before, m.block in ("output", "sandwich"), m.norm == "rms", m.norm_plus_one)

    @property
    def number(self) -> int:
        return self.before + self.after

    def operators(self, width: int) -> list[Operator]:
        more = [Operator("plus_one", "memory", moved=3.0 * width, backward=1.7)] if self.plus_one else []
        return [_norm_operator(width), *more]

    @property
    def stats(self) -> Held:
        """Statistics of one norm: in fp32 for RMSNorm, otherwise of the compute type."""
        return Held(0, 1) if self.rms else Held(2, 0)

    def saved(self, width: int) -> Held:
        """Saved by all of them besides inputs and outputs: statistics, and normalised values before the factor 1 + weight."""
        extra = width if self.plus_one else 0
        return Held(self.number * (self.stats.narrow + extra), self.number * self.stats.wide)


def _attention(m: ModelConfig, name: str, layer: int) -> UnitSpec:
    d, q, kv = m.hidden, m.heads * m.head_dim, m.kv_heads * m.head_dim
    qkv, index = q + 2 * kv, layer - 1
    norms, rotary = _Norms.of(m, "attn"), m.has_rope(index)
    blocked = bool(m.attn_softcap or m.window(index))
    operators = [
        *(norms.operators(d) if norms.before else []),
        _product("qkv", d, qkv),
        *(
            [Operator(_HEAD_NORM[m.qk_norm == "all"], "memory", moved=2.0 * (q + kv), backward=2.0)]
            if m.qk_norm
            else []
        ),
        *([Operator("rotary", "memory", moved=2.0 * qkv, backward=1.0)] if rotary else []),
        Operator(
            "attention",
            "attention",
            flops=4.0 * keys_per_query(m, index) * q,
            moved=2.0 * q + 2 * kv,
            backward=2.5,
        ),
        *([_scores_operator(m, index)] if blocked else []),
        _product("out", q, d),
        *(norms.operators(d) if norms.after else []),
        Operator("residual", "memory", moved=3.0 * d, backward=0.7),
    ]
    rotated = again = (
        0.0  # q and k after the rotary embedding, saved in addition to qkv (without q/k norms: instead of it)
    )
    if rotary:
        rotated = float(q + kv) if m.qk_norm else 0.0
        again = rotated or float(qkv)
    elif m.qk_norm:
        rotated = again = float(kv)
    late = d * q / (d * qkv + d * q)
    heads = _head_norms(m)
    kept = norms.saved(d)
    statistics = float(kept.wide) if norms.rms else 0  # float or int: the distinction enters the fingerprint
    after = d if norms.after else 0  # the branch's output, which its norm keeps
    parallel = m.block in ("parallel", "parallel-shared")
    fed = d if norms.before else 0

    def rotating(others: float) -> tuple[Moment, ...]:
        """Workspace of the rotary embedding of queries: two terms of half their width; after a norm, three of full width."""
        if not rotary:
            return ()
        return (Moment(Held(others - kv, 3.0 * q) if m.qk_norm else Held(others + qkv, q)),)

    scores = _scores_moment(m, index) if blocked else ()
    return UnitSpec(
        name,
        _attention_kind(m, index),
        layer,
        unit_shapes(m, name),
        tuple(operators),
        {
            "none": Held(d + fed + qkv + q + rotated + heads.narrow + after + kept.narrow, m.heads + statistics),
            "selective": Held(d + fed + qkv + q, m.heads),
            "full": Held(d),
        },
        forward={
            "none": (Moment(Held(2 * d)), Moment(Held(d), full=d, weights=late), *rotating(-q), *scores),
            "selective": (Moment(Held(d + again), full=d, weights=late), *rotating(-q), *scores),
            "full": (
                Moment(Held(d + fed + qkv + rotated + q), full=d, weights=late),
                *rotating(d + qkv),
                *(_more(s, Held(d + fed + qkv + rotated)) for s in scores),
            ),
        },
        backward=(
            Moment(Held(d + q), grads=late, full=d, weights=late),
            Moment(Held(d + q + qkv), grads=late),
            *((Moment(Held(d + qkv - q, q), grads=late),) if rotary and not m.qk_norm else ()),
            *(_more(s, Held(d + q + qkv), 2)._replace(grads=late) for s in scores),
            Moment(Held(2 * d - q), grads=1.0, full=2 * d, weights=1 - late),
        ),
        split=(
            Moment(Held(d + q + qkv)),
            *(_more(s, Held(d + q + qkv), 2) for s in scores),
            Moment(Held(2 * d), full=d),
        ),
        closing=3.0 * d,
        for_weight_grad=Held(2 * d + q + qkv),
        unfused=_unfused(m, norms) + (_unfused_heads(m) if m.qk_norm and m.norm == "rms" else 0.0),
        again=tuple(dict.fromkeys(o.name for o in operators if o.kind == "memory" and o.name != "scores"))
        if blocked
        else (),
        unread="" if m.block == "post" or norms.after else "out",
        output=2.0 * d if parallel else d,
    )


_HEAD_NORM = {False: "norm", True: "norm of all heads"}
"""Names of the norm of queries and keys. A norm over all heads reduces its statistics over the grid's columns."""


def _attention_kind(m: ModelConfig, index: int) -> str:
    """The kind of an attention unit, by its window and rotary embedding; the model's most frequent one is `attn`."""

    def of(layer: int) -> tuple[int, bool]:
        return m.window(layer), m.has_rope(layer)

    window, rotary = of(index)
    if not (m.windows or m.rope_layers) or Counter(map(of, range(m.layers))).most_common(1)[0][0] == of(index):
        return "attn"
    return (f"attn window {window}" if window else "attn whole") + ("" if rotary else " without rotary")


def _unfused(m: ModelConfig, norms: _Norms) -> float:
    return float(m.hidden * norms.number) if m.norm == "rms" and not m.norm_plus_one else 0.0


def _unfused_heads(m: ModelConfig) -> float:
    q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    return float(2 * q + kv + m.heads + m.kv_heads)


def _head_norms(m: ModelConfig) -> Held:
    """Saved by LayerNorms of queries and keys: values before the weights, statistics, a copy of attention's output."""
    if not m.qk_norm or m.norm == "rms":
        return Held(0, 0)
    q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    values = q + kv if m.qk_norm == "per-head" else 0
    return Held(values + q + 2 * (m.heads + m.kv_heads if m.qk_norm != "all" else 2))


def _block_scores(m: ModelConfig, index: int) -> tuple[float, float]:
    """`blocked_attention`: keys per query for which scores are computed, and scores that exist at once, per token."""
    tokens, window = m.seq_len, m.window(index)
    rows = max(64, (1 << 24) // (m.heads * min(tokens, 2 * window or tokens)))
    rows = min(rows, tokens, max(64, window) if window else tokens)
    keys = min(tokens, rows + window) if window else keys_per_query(m, index) + rows / 2
    return keys, m.heads * rows * (min(tokens, rows + window) if window else tokens) / tokens


def _scores_operator(m: ModelConfig, index: int) -> Operator:
    """Scores of unfused attention: written, scaled, masked, soft-capped and exponentiated, in fp32."""
    passes = 20.0 if m.attn_softcap else 12.0
    return Operator("scores", "memory", wide=passes * m.heads * _block_scores(m, index)[0], backward=1.5)


def _scores_moment(m: ModelConfig, index: int) -> tuple[Moment, ...]:
    """Scores of one block of queries, their attention weights, and the derivative of the soft-cap."""
    return (Moment(Held(0, (3.0 if m.attn_softcap else 2.0) * _block_scores(m, index)[1])),)


def _more(moment: Moment, held: Held, times: float = 1.0) -> Moment:
    both = moment.held
    return moment._replace(held=Held(times * both.narrow + held.narrow, times * both.wide + held.wide))


def _with_copies(unit: UnitSpec, copied: Held) -> UnitSpec:
    """An attention unit that also saves what was copied for its kernel, or copies it again."""
    if not copied.narrow:
        return unit
    none = unit.saved["none"]
    forward = {
        mode: moments if mode == "none" else (_more(moments[0], copied), *moments[1:])
        for mode, moments in unit.forward.items()
    }
    return replace(unit, saved={**unit.saved, "none": Held(none.narrow + copied.narrow, none.wide)}, forward=forward)


def _mlp(m: ModelConfig, name: str, layer: int) -> UnitSpec:
    d, f = m.hidden, m.ffn
    norms, wide = _Norms.of(m, "mlp"), 2 * m.ffn if m.gated else m.ffn
    late = f / (f + wide)
    operators = (
        *(norms.operators(d) if norms.before else []),
        _product("up", d, wide),
        Operator("activation", "memory", moved=float(wide + f), backward=1.7 if m.gated else 1.5),
        _product("down", f, d),
        *(norms.operators(d) if norms.after else []),
        Operator("residual", "memory", moved=3.0 * d, backward=0.7),
    )
    kept, after, fed = norms.saved(d), d if norms.after else 0, d if norms.before else 0
    return UnitSpec(
        name,
        "mlp",
        layer,
        unit_shapes(m, name),
        operators,
        {
            "none": Held(d + fed + wide + f + after + kept.narrow, kept.wide),
            "selective": Held(d + fed + wide + after),
            "full": Held(d),
        }
        | ({} if norms.after else {"per-slice": Held(d + fed)}),
        forward={
            "none": (Moment(Held(2 * d)), Moment(Held(d), full=d, weights=late)),
            "selective": (Moment(Held(d), Held(f), full=d, weights=late),),
            "full": (Moment(Held(2 * d), Held(wide + f), full=d, weights=late),),
        },
        backward=(
            Moment(Held(d), Held(f), late, full=d, weights=late),
            Moment(Held(d), Held(wide), late),
            Moment(Held(2 * d), Held(-f), 1.0, full=2 * d, weights=1 - late),
        ),
        split=(Moment(Held(d), Held(wide + f)), Moment(Held(2 * d), full=d)),
        closing=3.0 * d,
        for_weight_grad=Held(2 * d + f + wide),
        unfused=_unfused(m, norms),
        unread="" if m.block == "post" or norms.after else "down",
        slices=1 if norms.after else f,
        output=d,
    )


def _head(m: ModelConfig, name: str, layer: int) -> UnitSpec:
    d, v = m.hidden, m.vocab
    norms = _Norms(True, False, m.norm == "rms", m.norm_plus_one)
    scaled, capped = m.logit_scale != 1, bool(m.logit_softcap)
    operators = [*norms.operators(d), _product("proj", d, v)]
    if m.masked_lm:
        operators.insert(0, _product("dense", d, d))
        operators.insert(1, Operator("activation", "memory", moved=2.0 * d, backward=1.5))
    if scaled:
        operators.insert(1, Operator("scale", "memory", moved=2.0 * d, backward=1.0))
    if capped:
        operators.append(Operator("softcap", "memory", moved=6.0 * v, backward=1.3))
    operators.append(Operator("loss", "memory", moved=float(v), wide=3.0 * v, backward=1.6))
    more, kept, cap = 2 * d if m.masked_lm else 0, norms.saved(d), v if capped else 0
    return UnitSpec(
        name,
        "head",
        layer,
        unit_shapes(m, name),
        tuple(operators),
        {
            "none": Held(2 * d + more + kept.narrow + cap, v + 2 + kept.wide),
            "selective": Held(d + v + (d if m.masked_lm else 0), 2),
            "full": Held(d, 2),
            "per-slice": Held(2 * d + (d if m.masked_lm else 0), 4),
        },
        forward={
            "none": (Moment(inner=Held(v)), Moment(full=d)),
            "selective": (Moment(inner=Held(cap, v)), Moment(Held(d), full=d)),
            "full": (Moment(Held(d + more), Held(v + cap, v)), Moment(Held(d + more), Held(v), full=d)),
        },
        backward=(Moment(inner=Held(0, 2 * v)), Moment(Held(d), Held(v, -v), 1.0, full=2 * d)),
        split=(Moment(inner=Held(0, 2 * v)), Moment(Held(d), Held(v, -v), full=d)),
        closing=2.0 * d,
        cast=float(v),
        for_weight_grad=Held(d + v + more),
        unfused=_unfused(m, norms),
        slices=v,
        output=0.0,
    )
