"""What a model is made of, as data: its units, parameters and FLOPs. No torch.

A model is an ordered list of layers: `embed`, `blocks.0` …, `head`. A block has two units, `attn` and `mlp`; the norm that
feeds a part belongs to it. Shapes here are the serial ones, and equal the real modules' (a test holds them to it).

Letters: L layers, D hidden, H heads, K kv_heads, E head_dim, F ffn, V vocab, T seq_len.
"""

from __future__ import annotations

import math

from fourfold.config import ModelConfig

__all__ = [
    "Shapes",
    "flops_per_token",
    "parameter_count",
    "parameter_shapes",
    "tied_parameters",
    "unit_flops",
    "unit_names",
    "unit_shapes",
]

Shapes = dict[str, tuple[int, ...]]


def unit_names(m: ModelConfig) -> list[str]:
    """Units in forward order."""
    blocks = [f"blocks.{i}.{part}" for i in range(m.layers) for part in ("attn", "mlp")]
    return ["embed", *blocks, "head"]


def tied_parameters(m: ModelConfig) -> dict[str, str]:
    """Names that are a second use of another parameter: {borrowed name: serial name}."""
    return {"head.proj.weight": "embed.tokens.weight"} if m.tie else {}


def parameter_shapes(m: ModelConfig) -> Shapes:
    """Shape of every serial parameter by name, in forward order; a tied head has none of its own."""
    shapes: Shapes = {}
    for unit in unit_names(m):
        shapes |= {f"{unit}.{name}": shape for name, shape in unit_shapes(m, unit).items()}
    return shapes


def unit_shapes(m: ModelConfig, unit: str) -> Shapes:
    """Shapes of one unit's own parameters, by their names in it."""
    bias = m.family != "llama"
    qkv = (m.heads + 2 * m.kv_heads) * m.head_dim
    if unit == "embed":
        shapes: Shapes = {"tokens.weight": (m.vocab, m.hidden)}
        if m.family != "llama":
            shapes["positions.weight"] = (m.positions, m.hidden)
        if m.token_types:
            shapes["types.weight"] = (m.token_types, m.hidden)
        return shapes | (_norm(m) if m.family == "bert" else {})
    if unit.endswith("attn"):
        heads: Shapes = {"q_norm.weight": (m.head_dim,), "k_norm.weight": (m.head_dim,)} if m.qk_norm else {}
        return (
            _norm(m)
            | _linear("qkv", m.hidden, qkv, bool(m.qkv_bias))
            | heads
            | _linear("out", m.heads * m.head_dim, m.hidden, bias)
        )
    if unit.endswith("mlp"):
        wide = 2 * m.ffn if m.family == "llama" else m.ffn
        return _norm(m) | _linear("up", m.hidden, wide, bias) | _linear("down", m.ffn, m.hidden, bias)
    dense = _linear("dense", m.hidden, m.hidden, True) if m.family == "bert" else {}
    proj = _linear("proj", m.hidden, m.vocab, m.family == "bert")
    return dense | _norm(m) | {n: s for n, s in proj.items() if not (m.tie and n == "proj.weight")}


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> Shapes:
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def _norm(m: ModelConfig) -> Shapes:
    shapes: Shapes = {"norm.weight": (m.hidden,)}
    return shapes | ({} if m.family == "llama" else {"norm.bias": (m.hidden,)})


def parameter_count(m: ModelConfig) -> int:
    """Parameters of the model; a tied weight counts once."""
    return sum(math.prod(shape) for shape in parameter_shapes(m).values())


def unit_flops(m: ModelConfig) -> dict[str, float]:
    """FLOPs of each unit's forward for one token: 2 per weight of a matrix product, plus attention.

    The head's product counts, also when tied; the embedding lookup does not. Attention multiplies every query with T
    keys and values (causal: half of them): 2·2·T·H·E. The backward is twice the forward.
    """
    keys = m.seq_len if m.family == "bert" else m.seq_len / 2
    flops: dict[str, float] = {}
    for unit in unit_names(m):
        products = sum(math.prod(s) for s in unit_shapes(m, unit).values() if len(s) == 2)
        flops[unit] = 2.0 * products if unit != "embed" else 0.0
        if unit.endswith("attn"):
            flops[unit] += 4 * keys * m.heads * m.head_dim
    flops["head"] += 2.0 * m.vocab * m.hidden if m.tie else 0.0
    return flops


def flops_per_token(m: ModelConfig) -> float:
    """Model FLOPs of one training token, forward and backward; the numerator of MFU, so recomputation does not count."""
    return 3 * sum(unit_flops(m).values())
