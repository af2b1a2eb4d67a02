"""Hugging Face files: `config.json` to our model fields. No torch, no transformers, no network.

Architectures: GPT-2, BERT, Llama, Mistral, Qwen 2, Qwen 3. What a file asks for that our models do not do (experts,
sliding windows, quantization, other activations) is refused by name rather than read wrongly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fourfold import schema
from fourfold.config import RopeScaling
from fourfold.errors import ConfigError

__all__ = ["read_config"]

FAMILIES = {
    "gpt2": "gpt",
    "bert": "bert",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
}
REFUSED = {
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "quantization_config": "quantized weights",
    "add_cross_attention": "cross attention",
    "is_encoder_decoder": "an encoder and a decoder",
    "mlp_bias": "a bias in a gated MLP",
    "scale_attn_by_inverse_layer_idx": "attention scaled by layer",
}


def read_config(path: str | Path) -> dict[str, Any]:
    """Fields of ModelConfig from a Hugging Face config.json (a file, or the folder that holds it)."""
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    c = schema.read(path)
    kind = c.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(f"{path}: model_type {kind!r} is not supported{schema.nearest(str(kind), FAMILIES)}")
    for key, what in REFUSED.items():
        if c.get(key):
            raise ConfigError(f"{path}: {key} = {c[key]!r}: {what} is not supported")
    if c.get("sliding_window") and c.get("use_sliding_window", kind == "mistral"):
        raise ConfigError(f"{path}: sliding_window = {c['sliding_window']}: sliding-window attention is not supported")
    try:
        return _gpt2(c, path) if kind == "gpt2" else _bert(c, path) if kind == "bert" else _llama(c, kind, path)
    except KeyError as e:
        raise ConfigError(f"{path}: {e.args[0]} is missing for model_type {kind!r}") from None


def _activation(c: dict[str, Any], key: str, default: str, allowed: tuple[str, ...], path: Path) -> None:
    found = c.get(key, default)
    if found not in allowed:
        raise ConfigError(f"{path}: {key} = {found!r} is not supported; this family computes {allowed[0]!r}")


def _gpt2(c: dict[str, Any], path: Path) -> dict[str, Any]:
    _activation(c, "activation_function", "gelu_new", ("gelu_new", "gelu_pytorch_tanh"), path)
    return {
        "family": "gpt",
        "layers": c["n_layer"],
        "hidden": c["n_embd"],
        "heads": c["n_head"],
        "ffn": c.get("n_inner") or 4 * c["n_embd"],
        "vocab": c["vocab_size"],
        "positions": c["n_positions"],
        "norm_eps": c.get("layer_norm_epsilon", 1e-5),
        "tie": c.get("tie_word_embeddings", True),
    }


def _bert(c: dict[str, Any], path: Path) -> dict[str, Any]:
    _activation(c, "hidden_act", "gelu", ("gelu",), path)
    if c.get("position_embedding_type", "absolute") != "absolute":
        raise ConfigError(f"{path}: position_embedding_type = {c['position_embedding_type']!r} is not supported")
    return {
        "family": "bert",
        "layers": c["num_hidden_layers"],
        "hidden": c["hidden_size"],
        "heads": c["num_attention_heads"],
        "ffn": c["intermediate_size"],
        "vocab": c["vocab_size"],
        "positions": c["max_position_embeddings"],
        "norm_eps": c.get("layer_norm_eps", 1e-12),
        "tie": c.get("tie_word_embeddings", True),
    }


def _llama(c: dict[str, Any], kind: str, path: Path) -> dict[str, Any]:
    _activation(c, "hidden_act", "silu", ("silu",), path)
    if c.get("attention_bias") and kind != "qwen2":
        raise ConfigError(f"{path}: attention_bias = true puts a bias on the output projection: not supported")
    heads = c["num_attention_heads"]
    rope = c.get("rope_parameters") or {}
    scaling = c.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
    return {
        "family": "llama",
        "layers": c["num_hidden_layers"],
        "hidden": c["hidden_size"],
        "heads": heads,
        "kv_heads": c.get("num_key_value_heads") or heads,
        "head_dim": c.get("head_dim") or c["hidden_size"] // heads,
        "ffn": c["intermediate_size"],
        "vocab": c["vocab_size"],
        "positions": c["max_position_embeddings"],
        "rope_theta": float(c.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        "rope_scaling": _scaling(scaling, c, path),
        "qkv_bias": kind == "qwen2",
        "qk_norm": kind == "qwen3",
        "tie": bool(c.get("tie_word_embeddings", False)),
        "norm_eps": c.get("rms_norm_eps", 1e-6),
    }


def _scaling(s: dict[str, Any] | None, c: dict[str, Any], path: Path) -> RopeScaling | None:
    if not s:
        return None
    kind = s.get("rope_type") or s.get("type")
    original = s.get("original_max_position_embeddings") or c["max_position_embeddings"]
    match kind:
        case "default":
            return None
        case "linear":
            return RopeScaling(kind="linear", factor=float(s["factor"]))
        case "llama3":
            return RopeScaling(
                kind="llama3",
                factor=float(s["factor"]),
                original_positions=original,
                low_freq_factor=float(s["low_freq_factor"]),
                high_freq_factor=float(s["high_freq_factor"]),
            )
        case "yarn":
            return RopeScaling(
                kind="yarn",
                factor=float(s["factor"]),
                original_positions=original,
                beta_fast=float(s.get("beta_fast") or 32),
                beta_slow=float(s.get("beta_slow") or 1),
            )
        case _:
            raise ConfigError(f"{path}: rope_scaling of type {kind!r} is not supported; known: linear, llama3, yarn")
