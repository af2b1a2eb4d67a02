"""What a model is made of, as data: its units, parameters and FLOPs. No torch.

A model is an ordered list of layers: `embed`, `blocks.0` …, `head`. A block has two units, `attn` and `mlp`; the norm that
feeds a part belongs to it. Shapes are serial; a test checks that they equal those of the real modules.

Letters: L layers, D hidden, H heads, K kv_heads, E head_dim, F ffn, V vocab, T seq_len.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fourfold.config import ModelConfig

__all__ = [
    "OwnLayers",
    "Shapes",
    "flops_per_token",
    "frozen_shapes",
    "keys_per_query",
    "parameter_count",
    "parameter_shapes",
    "tied_parameters",
    "trained_count",
    "trained_shapes",
    "unit_flops",
    "unit_names",
    "unit_shapes",
]

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class OwnLayers:
    """What a plan needs to know about a user's own model: its layers in order, each a unit, with their parameter counts."""

    parameters: dict[str, int]
    tied: dict[str, str] = field(default_factory=dict)
    """Layers that use a parameter of an earlier layer, and which."""
    grid: bool = False
    """Whether rules say how layers lie on a tensor grid."""

    @property
    def names(self) -> list[str]:
        return list(self.parameters)

    @property
    def flops(self) -> dict[str, float]:
        """Estimated FLOPs of each layer's forward for one token: 2 per parameter."""
        return {name: 2.0 * count for name, count in self.parameters.items()}


def unit_names(m: ModelConfig) -> list[str]:
    """Units in forward order."""
    blocks = [f"blocks.{i}.{part}" for i in range(m.layers) for part in ("attn", "mlp")]
    return ["embed", *blocks, "head"]


def tied_parameters(m: ModelConfig) -> dict[str, str]:
    """Names of tied parameters: {name of the second use: serial name}."""
    return {"head.proj.weight": "embed.tokens.weight"} if m.tie else {}


def parameter_shapes(m: ModelConfig) -> Shapes:
    """Shape of every serial parameter by name, in forward order; a tied head has no entry."""
    shapes: Shapes = {}
    for unit in unit_names(m):
        shapes |= {f"{unit}.{name}": shape for name, shape in unit_shapes(m, unit).items()}
    return shapes


def unit_shapes(m: ModelConfig, unit: str) -> Shapes:
    """Shapes of one unit's own parameters, by their names in it: those of the model, then those of its adapters."""
    return frozen_shapes(m, unit) | trained_shapes(m, unit) if m.lora is not None else _unit_shapes(m, unit)


def trained_shapes(m: ModelConfig, unit: str) -> Shapes:
    """Shapes of a unit's trainable parameters: all, or with LoRA those of its adapters."""
    if m.lora is None:
        return _unit_shapes(m, unit)
    from fourfold.model.lora import adapters  # lora imports this module

    shapes: Shapes = {}
    for name, parts in adapters(m, unit).items():
        inputs = _unit_shapes(m, unit)[f"{name}.weight"][1]
        shapes[f"{name}.adapter.a.weight"] = (m.lora.rank * len(parts), inputs)
        shapes |= {f"{name}.adapter.b.{part.name}.weight": (part.stop - part.start, m.lora.rank) for part in parts}
    return shapes


def frozen_shapes(m: ModelConfig, unit: str) -> Shapes:
    """Shapes of a unit's frozen parameters."""
    return {} if m.lora is None else _unit_shapes(m, unit)


def _unit_shapes(m: ModelConfig, unit: str) -> Shapes:
    if unit == "embed":
        shapes: Shapes = {"tokens.weight": (m.vocab, m.hidden)}
        if m.learned_positions:
            shapes["positions.weight"] = (m.positions, m.hidden)
        if m.token_types:
            shapes["types.weight"] = (m.token_types, m.hidden)
        return shapes | (_norm(m) if m.masked_lm else {})
    if unit == "head":
        dense = _linear("dense", m.hidden, m.hidden, True) if m.masked_lm else {}
        proj = _linear("proj", m.hidden, m.vocab, m.masked_lm)
        return dense | _norm(m) | {n: s for n, s in proj.items() if not (m.tie and n == "proj.weight")}
    attention = unit.endswith("attn")
    norms: Shapes = {}
    if m.block != "output" and (attention or m.block != "parallel-shared"):
        norms |= _norm(m)
    if m.block in ("output", "sandwich"):
        norms |= _norm(m, "out_norm")
    if attention:
        qkv = (m.heads + 2 * m.kv_heads) * m.head_dim
        return (
            norms
            | _linear("qkv", m.hidden, qkv, bool(m.qkv_bias))
            | _qk_norms(m)
            | _linear("out", m.heads * m.head_dim, m.hidden, bool(m.out_bias))
        )
    up = _linear("up", m.hidden, 2 * m.ffn if m.gated else m.ffn, bool(m.mlp_bias))
    return norms | up | _linear("down", m.ffn, m.hidden, bool(m.mlp_bias))


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> Shapes:
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def _norm(m: ModelConfig, name: str = "norm", width: int = 0) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (width or m.hidden,)}
    return shapes | ({f"{name}.bias": (width or m.hidden,)} if m.norm_bias else {})


def _qk_norms(m: ModelConfig) -> Shapes:
    if not m.qk_norm:
        return {}
    widths = {n: m.head_dim * (1 if m.qk_norm is True else h) for n, h in (("q_norm", m.heads), ("k_norm", m.kv_heads))}
    if m.qk_norm == "per-head":
        return {f"{n}.weight": (width,) for n, width in widths.items()}
    return _norm(m, "q_norm", widths["q_norm"]) | _norm(m, "k_norm", widths["k_norm"])


def parameter_count(m: ModelConfig) -> int:
    """Parameters of the model; a tied weight counts once."""
    return sum(math.prod(shape) for shape in parameter_shapes(m).values())


def trained_count(m: ModelConfig) -> int:
    """Parameters that are trained: all, or with LoRA those of the adapters."""
    return sum(math.prod(s) for unit in unit_names(m) for s in trained_shapes(m, unit).values())


def keys_per_query(m: ModelConfig, layer: int, context: float = 0.0) -> float:
    """Average number of keys that a query attends to: all (bert), half of them, or those in the layer's window.

    `context`: effective document length, if documents share a sequence (`Samples.context`); 0: seq_len.
    """
    length = context or m.seq_len
    if not m.causal:
        return length
    window = min(m.window(layer) or length, length)
    return window - window * window / (2 * length)


def unit_flops(m: ModelConfig, context: float = 0.0) -> dict[str, float]:
    """FLOPs of each unit's forward for one token: 2 per weight of a matmul, plus attention.

    The head's matmul counts, also if tied; the embedding lookup does not. Attention multiplies every query with its
    keys and values: 2·2·keys·H·E. The backward has twice the FLOPs of the forward.
    """
    flops: dict[str, float] = {}
    for unit in unit_names(m):
        weights = sum(math.prod(s) for s in unit_shapes(m, unit).values() if len(s) == 2)
        flops[unit] = 2.0 * weights if unit != "embed" else 0.0
        if unit.endswith("attn"):
            flops[unit] += 4 * keys_per_query(m, int(unit.split(".")[1]), context) * m.heads * m.head_dim
    flops["head"] += 2.0 * m.vocab * m.hidden if m.tie else 0.0
    return flops


def flops_per_token(m: ModelConfig, context: float = 0.0) -> float:
    """Model FLOPs of one training token, forward and backward; the numerator of MFU, so recomputation does not count.

    Frozen weights have no gradient, so that they count two matmuls instead of three. `context`: effective document length, if
    documents share a sequence; 0: seq_len.
    """
    frozen = 0.0
    for unit in unit_names(m) if m.lora is not None else ():
        frozen += 2.0 * sum(math.prod(s) for s in frozen_shapes(m, unit).values() if len(s) == 2 and unit != "embed")
    frozen += 2.0 * m.vocab * m.hidden if m.lora is not None and m.tie else 0.0
    return 3 * sum(unit_flops(m, context).values()) - frozen
