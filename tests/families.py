"""Tiny models of every Hugging Face family, made by transformers, and the same models of ours.

transformers casts to fp32 in norms, rotary tables and softmax, also in an fp64 model: under `wide()`, every fp32 it names is fp64.
Weights are large and no norm is 1 and no bias 0, so that every feature of a family changes the logits.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold.config import ModelConfig
from fourfold.model.build import serial_model
from fourfold.model.families import FAMILIES, links
from fourfold.model.hf import read_config
from fourfold.model.transformer import Transformer

TOKENS, VOCAB, LAYERS = 24, 53, 4
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
SLIDING = {
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
NO_HEAD_DIM = {"head_dim": 12}
"""For families that take it from hidden_size alone."""

CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 48, "n_layer": LAYERS, "n_head": 4, "n_positions": 32, "vocab_size": VOCAB}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "bert": {k: v for k, v in BASE.items() if k not in ("head_dim", "num_key_value_heads", "tie_word_embeddings")}
    | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    "llama": BASE
    | {"attention_bias": True, "mlp_bias": True}
    | {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "mistral": BASE | {"sliding_window": 5},
    "qwen2": BASE | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2} | NO_HEAD_DIM,
    "qwen3": BASE
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
        }
    },
    "gemma": BASE | {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "gemma2": BASE
    | {"sliding_window": 5, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 9},
    "gemma3_text": BASE
    | SLIDING
    | {"final_logit_softcapping": 5.0, "query_pre_attn_scalar": 9}
    | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        }
    },
    "phi3": BASE
    | NO_HEAD_DIM
    | {
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.5, 2.0],
            "long_factor": [1.0, 3.0, 7.0],
        },
    },
    "olmo2": BASE | NO_HEAD_DIM | {"attention_bias": True},
    "olmo3": BASE | SLIDING | NO_HEAD_DIM,
    "granite": BASE
    | NO_HEAD_DIM
    | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 0.3},
    "smollm3": BASE | NO_HEAD_DIM | {"no_rope_layers": [1, 0, 1, 1], "use_sliding_window": True, "sliding_window": 5},
    "glm4": BASE,
    "starcoder2": BASE | NO_HEAD_DIM | {"sliding_window": 5, "hidden_act": "gelu_pytorch_tanh"},
    "cohere": BASE | NO_HEAD_DIM | {"use_qk_norm": True, "logit_scale": 0.7},
    "cohere2": BASE | SLIDING | NO_HEAD_DIM | {"logit_scale": 0.7},
    "stablelm": BASE | NO_HEAD_DIM | {"qk_layernorm": True, "use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "gpt_neox": {k: v for k, v in BASE.items() if k not in ("head_dim", "num_key_value_heads")} | {"rotary_pct": 0.5},
}
"""By family, what its config.json says."""
VARIANTS: dict[str, dict[str, Any]] = {
    "stablelm parallel": CASES["stablelm"] | {"use_parallel_residual": True, "qk_layernorm": False},
    "gpt_neox sequential": CASES["gpt_neox"] | {"use_parallel_residual": False},
    "granite biased": CASES["granite"] | {"attention_bias": True, "mlp_bias": True},
    "starcoder2 plain": CASES["starcoder2"] | {"use_bias": False, "sliding_window": None},
    "gemma2 uncapped": CASES["gemma2"] | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
}
EVERY = CASES | VARIANTS


class _Wide(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        return func(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()})


@contextlib.contextmanager
def wide(dtype: torch.dtype) -> Iterator[None]:
    """With fp64, whatever transformers does in fp32 is done in fp64."""
    if dtype != torch.float64:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(before)


def theirs(name: str, dtype: torch.dtype, keys: dict[str, Any] | None = None) -> nn.Module:
    """The model of transformers, with `keys` in config.json (default: EVERY[name]); build and run it under `wide`."""
    import transformers

    kind = name.split()[0]
    config = transformers.AutoConfig.for_model(kind, **copy.deepcopy(EVERY[name] if keys is None else keys))
    config._attn_implementation = "eager"
    auto = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model: nn.Module = auto.from_config(config, attn_implementation="eager").to(dtype).eval()
    made = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=made, dtype=torch.float64)
            p.copy_((p.double() + (0.25 if p.dim() > 1 else 0.2) * noise).to(dtype))
    return model


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Its parameters by their names in files; a tied one once."""
    head = "embed_out." if "gpt_neox" in type(model).__module__ else "lm_head."
    return {name.replace("lm_head.", head): p for name, p in model.named_parameters()}


def config_of(model: nn.Module, folder: Path, **fields: Any) -> ModelConfig:
    """Our config, read from the file that transformers writes."""
    path = folder / "config.json"
    path.write_text(json.dumps(model.config.to_dict()))
    return ModelConfig(**read_config(path, TOKENS) | {"seq_len": TOKENS} | fields).resolve()


@torch.no_grad()
def ours(name: str, m: ModelConfig, found: dict[str, Tensor], dtype: torch.dtype) -> Transformer:
    """Our model with these tensors."""
    model = serial_model(m, 0, dtype=dtype)
    parameters = dict(model.named_parameters())
    every = links(FAMILIES[name.split()[0]], m)
    assert {link.theirs for link in every} == set(found), "tensors missing or unknown"
    for link in every:
        tensor = found[link.theirs]
        assert tuple(tensor.shape) == link.shape, (link.theirs, tuple(tensor.shape), link.shape)
        _rows(parameters[link.ours], tensor, link)
    return model


def _rows(into: Tensor, stored: Tensor, link: Any) -> None:
    """Copy a stored tensor's rows to a serial parameter."""
    rows = stored.reshape(link.view)
    rows = rows.t() if link.transposed else rows
    for run in link.runs:
        into[run.ours : run.ours + run.length] = rows[run.theirs : run.theirs + run.length * run.step : run.step]


def gradients_gap(model: Transformer, name: str, other: nn.Module) -> float:
    """Largest difference of gradients, relative to the largest of each parameter; ours are looked up by the table's links."""
    grads = {n: p.grad for n, p in tensors_of(other).items()}
    mine = {n: p.grad for n, p in model.named_parameters()}
    worst = 0.0
    for ours_name, grad in mine.items():
        assert grad is not None, ours_name
        expected = torch.zeros_like(grad)
        for link in links(FAMILIES[name.split()[0]], model.config):
            if link.ours == ours_name:
                _rows(expected, grads[link.theirs], link)
        worst = max(worst, float((grad - expected).abs().max() / expected.abs().max()))
    return worst
