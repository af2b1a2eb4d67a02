"""Hugging Face files: `config.json` to our model fields. No torch, no transformers, no network.

Architectures: GPT-2, BERT, Llama, Mistral, Qwen 2, Qwen 3, as language models. What a file asks for that our models do not do
(experts, sliding windows, quantization, other activations, heads for other tasks, dropouts that differ) is refused by name rather
than read wrongly; so are sizes that no model has, and files without the main ones. What else a file leaves out is what Hugging
Face takes it to be.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from fourfold import schema
from fourfold.config import MOST_LAYERS, RopeScaling, nearest_divisor
from fourfold.errors import ConfigError

__all__ = ["hf_file", "read_config"]

FAMILIES = {
    "gpt2": "gpt",
    "bert": "bert",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
}
TASKS = {"gpt2": ("LMHeadModel", "ForCausalLM"), "bert": ("ForMaskedLM",)}
"""How names in `architectures` end that our models are; those of other families end with ForCausalLM."""
DROPOUTS = {
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "bert": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
}
"""What a family drops out, and how much where the file does not say; others drop out attention weights alone."""
LEFT_OUT: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
"""What a file that does not say it means, where that is not the same in all families; null means something else."""
EXPERTS = "a mixture of experts is not supported"
OTHERS = {
    "mixtral": ("Mixtral", EXPERTS),
    "qwen2_moe": ("Qwen 2 MoE", EXPERTS),
    "qwen3_moe": ("Qwen 3 MoE", EXPERTS),
    "deepseek_v2": ("DeepSeek-V2", "a mixture of experts and latent attention are not supported"),
    "deepseek_v3": ("DeepSeek-V3", "a mixture of experts, latent attention and FP8 weights are not supported"),
    "gpt_oss": ("gpt-oss", "a mixture of experts and sliding-window attention are not supported"),
    "llama4": ("Llama 4", EXPERTS),
    "gemma2": ("Gemma 2", "sliding-window attention and soft-capping of logits are not supported"),
    "gemma3": ("Gemma 3", "sliding-window attention is not supported"),
    "gemma3_text": ("Gemma 3", "sliding-window attention is not supported"),
}
"""Architectures that are asked for and not done: name, why."""
REFUSED = {
    "num_local_experts": EXPERTS,
    "num_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS,
    "moe_intermediate_size": EXPERTS,
    "add_cross_attention": "cross attention is not supported",
    "is_encoder_decoder": "an encoder and a decoder in one model are not supported",
    "mlp_bias": "a bias in a gated MLP is not supported",
    "scale_attn_by_inverse_layer_idx": "attention scaled by layer is not supported",
    "attn_logit_softcapping": "soft-capping of logits is not supported",
    "final_logit_softcapping": "soft-capping of logits is not supported",
}
LONGEST = 4096
"""Tokens of a sequence where none are asked for."""


def hf_file(path: str | Path) -> Path | None:
    """The Hugging Face file that a path names: one with a model_type, or its folder; None where it is something else."""
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix != ".json":
        return None
    data = schema.read(path)
    return path if "model_type" in data or (path.name == "config.json" and "model" not in data) else None


def read_config(path: str | Path, seq_len: int = 0, dropout: float | None = None) -> dict[str, Any]:
    """Fields of ModelConfig from a Hugging Face config.json (a file, or the folder that holds it).

    `seq_len`: tokens of a sequence, if known: a window that is not shorter than it changes nothing. `dropout`: what is asked for
    in place of the file's.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    c = schema.read(path)
    kind = c.get("model_type")
    _refuse(c, kind, path)
    c = LEFT_OUT.get(str(kind), {}) | c
    try:
        read = _gpt2(c, path) if kind == "gpt2" else _bert(c, path) if kind == "bert" else _llama(c, str(kind), path)
    except KeyError as e:
        raise ConfigError(f"{path}: {e.args[0]} is missing for model_type {kind!r}") from None
    _refuse_window(c, str(kind), seq_len or min(LONGEST, read["positions"]), path)
    _refuse_layers(c, read["layers"], path)
    return read | {"dropout": _dropout(c, str(kind), path) if dropout is None else dropout}


def _refuse(c: dict[str, Any], kind: Any, path: Path) -> None:
    """What our models do not do."""
    if isinstance(kind, str) and kind in OTHERS:
        name, why = OTHERS[kind]
        raise ConfigError(f"{path}: {name} (model_type {kind!r}): {why}; known: {', '.join(FAMILIES)}")
    for key, why in REFUSED.items():
        if c.get(key):
            raise ConfigError(f"{path}: {key} = {c[key]!r}: {why}")
    for key in ("quantization_config", "compression_config"):
        if c.get(key):
            method = c[key].get("quant_method") if isinstance(c[key], dict) else c[key]
            what = "FP8 weights" if "fp8" in str(method).lower() else "quantized weights"
            told = f" with quant_method {method!r}" if method else ""
            raise ConfigError(f"{path}: {key}{told}: {what} are not supported; use the file of the bf16 weights")
    for key in ("torch_dtype", "dtype"):
        if "float8" in str(c.get(key)):
            raise ConfigError(f"{path}: {key} = {c[key]!r}: FP8 weights are not supported; use bfloat16 or float32")
    if not isinstance(kind, str) or kind not in FAMILIES:
        found = f"model_type {kind!r} is not supported" if kind is not None else "model_type is missing"
        raise ConfigError(f"{path}: {found}; known: {', '.join(FAMILIES)}")
    _refuse_task(c, kind, path)


def _refuse_task(c: dict[str, Any], kind: str, path: Path) -> None:
    """Heads that are not a language model's."""
    names = c.get("architectures") or []
    ends, names = TASKS.get(kind, ("ForCausalLM",)), names if isinstance(names, list) else [names]
    if names and not any(str(name).lower().endswith(tuple(end.lower() for end in ends)) for name in names):
        good = {"gpt2": "GPT2", "bert": "Bert"}.get(kind, kind.capitalize()) + ends[0]
        raise ConfigError(
            f"{path}: architectures = {', '.join(map(str, names))}: {kind} is trained as a language model here, {good}, and no "
            f'other head is supported; to train that, write "architectures": ["{good}"]'
        )


def _dropout(c: dict[str, Any], kind: str, path: Path) -> float:
    """Our models have one dropout: after the embedding, after every part and on attention weights."""
    named = DROPOUTS.get(kind, {"attention_dropout": 0.0})
    found = {key: default if c.get(key) is None else c[key] for key, default in named.items()}
    for key, value in found.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
            raise ConfigError(f"{path}: {key} = {value!r} must be at least 0 and below 1")
    if len(set(found.values()) | (set() if kind in DROPOUTS else {0})) > 1:
        told = ", ".join(f"{key} = {value}" for key, value in found.items())
        others = "" if kind in DROPOUTS else " and no other dropout"
        raise ConfigError(
            f"{path}: {told}{others}: one dropout for embedding, parts and attention weights is supported; beside model.hf, "
            f"give model.dropout = {max(found.values())}, say"
        )
    return float(next(iter(found.values())))


def _refuse_window(c: dict[str, Any], kind: str, seq_len: int, path: Path) -> None:
    """Attention over less than the sequence."""
    types = c.get("layer_types") or []
    for found in types if isinstance(types, list) else [types]:
        if found not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"{path}: layer_types has {found!r}, which is not supported; known: full_attention")
    window = _size(c, "sliding_window", path, 0, least=0)
    uses = _flag(c, "use_sliding_window", path, kind not in ("qwen2", "qwen3")) and window > 0
    if "sliding_attention" in types and not window:
        raise ConfigError(f"{path}: layer_types has 'sliding_attention': sliding-window attention is not supported")
    if (uses or "sliding_attention" in types) and window < seq_len:
        raise ConfigError(
            f"{path}: sliding_window = {window} is shorter than the sequence of {seq_len} tokens: sliding-window attention "
            f"is not supported; use sequences of at most {window}"
        )


def _refuse_layers(c: dict[str, Any], layers: int, path: Path) -> None:
    """A list of layers that is not as long as the model."""
    types = c.get("layer_types")
    if types is not None and (not isinstance(types, list) or len(types) != layers):
        found = f"{len(types)} entries" if isinstance(types, list) else repr(types)
        raise ConfigError(
            f"{path}: layer_types has {found} for num_hidden_layers = {layers}; leave it out, or give one for every layer"
        )


def _size(
    c: dict[str, Any], key: str, path: Path, default: int | None = None, least: int = 1, most: int = 10**8
) -> int:
    """A whole number; null is the default, where there is one."""
    if default is not None and c.get(key) is None:
        return default
    value = c[key]
    if not schema.whole(value, least) or value > most:
        found = "null" if value is None else repr(value)
        raise ConfigError(f"{path}: {key} = {found} must be a whole number from {least} to {most}")
    return value


def _number(c: dict[str, Any], key: str, path: Path, default: float | None = None) -> float:
    """A number above 0; null is the default, where there is one."""
    if default is not None and c.get(key) is None:
        return default
    value = c[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(f"{path}: {key} = {value!r} must be a number above 0")
    return float(value)


def _flag(c: dict[str, Any], key: str, path: Path, default: bool) -> bool:
    value = default if c.get(key) is None else c[key]
    if not isinstance(value, bool):
        raise ConfigError(f"{path}: {key} = {value!r} must be true or false")
    return value


def _heads(c: dict[str, Any], heads: str, hidden: str, path: Path) -> int:
    """Heads that divide the width."""
    count, width = _size(c, heads, path, most=2**16), _size(c, hidden, path, most=2**20)
    if width % count:
        good = nearest_divisor(width, count)
        raise ConfigError(
            f"{path}: {heads} = {count} does not divide {hidden} = {width}; the nearest that does is {good}"
        )
    return count


def _activation(c: dict[str, Any], key: str, default: str, allowed: tuple[str, ...], path: Path) -> None:
    found = c.get(key, default)
    if found not in allowed:
        raise ConfigError(f"{path}: {key} = {found!r} is not supported; this family computes {allowed[0]!r}")


def _gpt2(c: dict[str, Any], path: Path) -> dict[str, Any]:
    _activation(c, "activation_function", "gelu_new", ("gelu_new", "gelu_pytorch_tanh"), path)
    hidden = _size(c, "n_embd", path, most=2**20)
    return {
        "family": "gpt",
        "layers": _size(c, "n_layer", path, most=MOST_LAYERS),
        "hidden": hidden,
        "heads": _heads(c, "n_head", "n_embd", path),
        "ffn": _size(c, "n_inner", path, 4 * hidden),
        "vocab": _size(c, "vocab_size", path, least=2),
        "positions": _size(c, "n_positions", path),
        "norm_eps": _number(c, "layer_norm_epsilon", path, 1e-5),
        "tie": _flag(c, "tie_word_embeddings", path, True),
    }


def _bert(c: dict[str, Any], path: Path) -> dict[str, Any]:
    _activation(c, "hidden_act", "gelu", ("gelu",), path)
    if c.get("is_decoder"):
        raise ConfigError(
            f"{path}: is_decoder = {c['is_decoder']!r}: a BERT that sees earlier tokens alone is not supported"
        )
    if c.get("position_embedding_type", "absolute") != "absolute":
        raise ConfigError(f"{path}: position_embedding_type = {c['position_embedding_type']!r} is not supported")
    return {
        "family": "bert",
        "layers": _size(c, "num_hidden_layers", path, most=MOST_LAYERS),
        "hidden": _size(c, "hidden_size", path, most=2**20),
        "heads": _heads(c, "num_attention_heads", "hidden_size", path),
        "ffn": _size(c, "intermediate_size", path),
        "vocab": _size(c, "vocab_size", path, least=2),
        "positions": _size(c, "max_position_embeddings", path),
        "token_types": _size(c, "type_vocab_size", path, 2, least=0),
        "norm_eps": _number(c, "layer_norm_eps", path, 1e-12),
        "tie": _flag(c, "tie_word_embeddings", path, True),
    }


def _llama(c: dict[str, Any], kind: str, path: Path) -> dict[str, Any]:
    _activation(c, "hidden_act", "silu", ("silu",), path)
    if _flag(c, "attention_bias", path, False) and kind != "qwen2":
        raise ConfigError(f"{path}: attention_bias = true puts a bias on the output projection: not supported")
    rope = _table(c, "rope_parameters", path) or {}
    for table in (c, rope):
        if _number(table, "partial_rotary_factor", path, 1.0) != 1:
            raise ConfigError(
                f"{path}: partial_rotary_factor = {table['partial_rotary_factor']!r}: rotary positions on a part of each head "
                "are not supported"
            )
    scaling = _table(c, "rope_scaling", path) or (rope if rope.get("rope_type", "default") != "default" else None)
    hidden = _size(c, "hidden_size", path, most=2**20)
    if c.get("head_dim") is None:
        heads = _heads(c, "num_attention_heads", "hidden_size", path)
    else:
        heads = _size(c, "num_attention_heads", path, most=2**16)
    kv_heads = _size(c, "num_key_value_heads", path, heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{path}: num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}; "
            f"the nearest that does is {nearest_divisor(heads, kv_heads)}"
        )
    return {
        "family": "llama",
        "layers": _size(c, "num_hidden_layers", path, most=MOST_LAYERS),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": _size(c, "head_dim", path, hidden // heads, most=2**16),
        "ffn": _size(c, "intermediate_size", path),
        "vocab": _size(c, "vocab_size", path, least=2),
        "positions": _size(c, "max_position_embeddings", path),
        "rope_theta": _number(c, "rope_theta", path, _number(rope, "rope_theta", path, 10000.0)),
        "rope_scaling": _scaling(scaling, c, path),
        "qkv_bias": kind == "qwen2",
        "qk_norm": kind == "qwen3",
        "tie": _flag(c, "tie_word_embeddings", path, False),
        "norm_eps": _number(c, "rms_norm_eps", path, 1e-6),
    }


def _table(c: dict[str, Any], key: str, path: Path) -> dict[str, Any] | None:
    value = c.get(key)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(
            f'{path}: {key} = {value!r} must be a table, for example {{"rope_type": "linear", "factor": 2.0}}'
        )
    return value


def _scaling(s: dict[str, Any] | None, c: dict[str, Any], path: Path) -> RopeScaling | None:
    if not s:
        return None
    kind = s.get("rope_type") or s.get("type")
    original = _size(s, "original_max_position_embeddings", path, _size(c, "max_position_embeddings", path))
    match kind:
        case "default":
            return None
        case "linear":
            return RopeScaling(kind="linear", factor=_number(s, "factor", path))
        case "llama3":
            return RopeScaling(
                kind="llama3",
                factor=_number(s, "factor", path),
                original_positions=original,
                low_freq_factor=_number(s, "low_freq_factor", path),
                high_freq_factor=_number(s, "high_freq_factor", path),
            )
        case "yarn":
            return RopeScaling(
                kind="yarn",
                factor=_number(s, "factor", path),
                original_positions=original,
                beta_fast=_number(s, "beta_fast", path, 32.0),
                beta_slow=_number(s, "beta_slow", path, 1.0),
            )
        case _:
            raise ConfigError(f"{path}: rope_scaling of type {kind!r} is not supported; known: linear, llama3, yarn")
