"""The table of Hugging Face families: how each `config.json` is read, and how its tensors map to our parameters. No torch.

A `Family` is a row of data. Three parts:

    keys, fixed, rope, dropouts, window   how the keys of config.json become fields of ModelConfig, and back
    refused, tasks                        what is not supported
    tensors, renames, unread              names of the tensors in the files, and the part of a serial parameter in each

`links` applies the tensor rules to one model: for every tensor of the files, its shape and the runs of its rows that equal
runs of rows of a serial parameter. Reading, writing and checking files are functions of these links alone
(checkpoint/weights.py, checkpoint/export.py). A rule whose serial parameter the model does not have (a bias, a head that is
tied, a norm that only some layers have) yields no link, so rules need no conditions.

To add a family, add an entry to FAMILIES; docs/models.md shows how.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fourfold.config import MOST_LAYERS, ModelConfig
from fourfold.model.spec import parameter_shapes

__all__ = [
    "FAMILIES",
    "REQUIRED",
    "TORCHTITAN",
    "Family",
    "Key",
    "Link",
    "Rope",
    "Rule",
    "Run",
    "Window",
    "canonical_name",
    "links",
    "rows_of",
    "tied_names",
]

REQUIRED: Any = object()
"""Default of a key that is required."""


@dataclass(frozen=True)
class Key:
    """One key of config.json, and the field of ModelConfig that it sets.

    `field`: "" if the value is only checked. `name`: the key as written; `others`: names that are also read. `kind` "size": an
    integer from `least` to `most`; "number": a float above 0; "flag": true or false, mapped by `values` if given;
    "choice": a key of `values`, which maps it to the field's value. `default`: the value of a missing key; `null`: the value of
    null (default: the same). A size or number of 0 leaves ModelConfig's default. `power`: the field is the value to this
    power (-0.5: an attention scale from a width).
    """

    field: str
    name: str
    kind: Literal["size", "number", "flag", "choice"] = "size"
    default: Any = REQUIRED
    null: Any = None
    least: int = 1
    most: int = 10**8
    power: float = 1.0
    values: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: the default base, the names of the keys, and the layers that have it.

    `partial`: default fraction of each head that is rotated; 0: all of it, and other values in a file are refused.
    `local_theta`: base on layers with a window, which have no scaling; 0: all layers share one rotary embedding; "same":
    the base of the other layers. `layers`: "listed": those with a 1 in `no_rope_layers`, or all but every fourth; "windows":
    those with a window. `longrope`: names of scaling types that mean longrope in this family.
    """

    theta: float = 10000.0
    theta_key: str = "rope_theta"
    partial: float = 0.0
    partial_key: str = "partial_rotary_factor"
    local_theta: float | Literal["same"] = 0.0
    layers: Literal["all", "listed", "windows"] = "all"
    longrope: tuple[str, ...] = ("longrope",)


@dataclass(frozen=True)
class Window:
    """Sliding windows: the layers that have one, and the default of `sliding_window` (0: none).

    `always`: windows apply without `use_sliding_window`. `layers` "none": the family has no windows; "all": all layers have one,
    whatever `layer_types` says; "types": those that `layer_types` names, or else by `full`; "no rope": those without a rotary
    embedding. `full`, where layer_types is absent: every `full`-th layer has no window (key `full_key`); 0: layers before
    `max_window_layers` have none.
    """

    default: int = 0
    always: bool = True
    layers: Literal["none", "all", "types", "no rope"] = "none"
    full: int = 0
    full_key: str = ""


@dataclass(frozen=True)
class Rule:
    """Tensors `theirs` of the files hold parts of the serial parameters `ours`.

    Patterns: {i} is the layer, {p} is weight and bias, {h} a head (one tensor per head; ours is a vector of all heads).

    `part`: which rows of ours they hold. "all": all; "q", "k", "v": heads of the fused qkv; "gate", "up": halves of a gated up;
    "qkv by head": all of qkv, stored head by head, [q | k | v] within each head.
    `transposed`: stored as [inputs, outputs]. `interleaved`: rotary pairs are rows (2j, 2j + 1) of each head in the files, and
    (j, j + R/2) in ours, R the rotary dims. `shape`: fields of ModelConfig that give the stored shape, if it differs from
    ours (same elements in the same order).
    """

    theirs: str
    ours: str
    part: Literal["all", "q", "k", "v", "gate", "up", "qkv by head"] = "all"
    transposed: bool = False
    interleaved: bool = False
    shape: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """One row of the table."""

    model_type: str
    architecture: str
    """Class in transformers, for `architectures`."""
    ours: Literal["gpt", "bert", "llama"]
    """`family` of ModelConfig."""
    keys: tuple[Key, ...]
    tensors: tuple[Rule, ...]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of ModelConfig that all models of the family have."""
    derived: Mapping[str, tuple[str, float]] = dataclasses.field(default_factory=dict)
    """Fields that are a power of another one: {field: (other field, power)}."""
    rope: Rope | None = Rope()
    """None: no rotary embedding."""
    window: Window = Window()
    dropouts: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"attention_dropout": 0.0})
    """Keys of dropouts, with their defaults."""
    one_dropout: bool = False
    """Whether every place where our models apply dropout has a key."""
    tasks: tuple[str, ...] = ("ForCausalLM",)
    """Suffixes of `architectures` that mean this model with a language modelling head."""
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Keys that must be absent, null, false or 0, with the reason."""
    implied: tuple[str, ...] = ()
    """Of `head_dim` and `kv_heads`, those that the family has no choice of: hidden / heads, and heads."""
    only: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"is_causal": True})
    """Further keys, and the only value of each that is supported: what a model without the key computes."""
    unread_keys: tuple[str, ...] = ()
    """Keys of published files that transformers does not read, whatever they say."""
    constant: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further keys that are written into config.json."""
    renames: tuple[tuple[str, str], ...] = ()
    """Regular expressions and replacements for names in older files."""
    unread: tuple[str, ...] = ()
    """Regular expressions of tensor names that are ignored: they are not parameters of the model."""


SILU = {"silu": "silu", "swish": "silu"}
GELU_TANH = dict.fromkeys(
    ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh", "gelu_accurate"), "gelu_tanh"
)
ACTIVATIONS = {**SILU, **GELU_TANH, "gelu": "gelu"}


def _decoder_keys(*more: Key) -> tuple[Key, ...]:
    """Keys that Llama-like families share; a key in `more` replaces the one of the same field."""
    keys = {
        k.field or k.name: k
        for k in (
            Key("activation", "hidden_act", "choice", "silu", values=ACTIVATIONS),
            Key("layers", "num_hidden_layers", most=MOST_LAYERS),
            Key("hidden", "hidden_size", most=2**20),
            Key("heads", "num_attention_heads", most=2**16),
            Key("kv_heads", "num_key_value_heads", default=0),
            Key("head_dim", "head_dim", default=0, most=2**16),
            Key("ffn", "intermediate_size"),
            Key("vocab", "vocab_size", least=2),
            Key("positions", "max_position_embeddings"),
            Key("norm_eps", "rms_norm_eps", "number", 1e-6),
            Key("tie", "tie_word_embeddings", "flag", False),
        )
    }
    return tuple((keys | {k.field or k.name: k for k in more}).values())


def _kv_heads(default: int) -> Key:
    return Key("kv_heads", "num_key_value_heads", default=default, null=0)


def _head_dim(default: int) -> Key:
    return Key("head_dim", "head_dim", default=default, null=0, most=2**16)


def _attention_bias(default: bool = False, *, out: bool = True) -> tuple[Key, ...]:
    """`attention_bias`: of q, k and v, and (`out`) of the output projection."""
    names = ("qkv_bias", "out_bias") if out else ("qkv_bias",)
    return tuple(Key(name, "attention_bias", "flag", default) for name in names)


MLP_BIAS = Key("mlp_bias", "mlp_bias", "flag", False)
TIED = Key("tie", "tie_word_embeddings", "flag", True)
LAYER_NORM_EPS = Key("norm_eps", "layer_norm_eps", "number", 1e-5)


DECODER = (
    Rule("model.embed_tokens.weight", "embed.tokens.weight"),
    Rule("model.layers.{i}.input_layernorm.{p}", "blocks.{i}.attn.norm.{p}"),
    Rule("model.layers.{i}.self_attn.q_proj.{p}", "blocks.{i}.attn.qkv.{p}", "q"),
    Rule("model.layers.{i}.self_attn.k_proj.{p}", "blocks.{i}.attn.qkv.{p}", "k"),
    Rule("model.layers.{i}.self_attn.v_proj.{p}", "blocks.{i}.attn.qkv.{p}", "v"),
    Rule("model.layers.{i}.self_attn.q_norm.weight", "blocks.{i}.attn.q_norm.weight"),
    Rule("model.layers.{i}.self_attn.k_norm.weight", "blocks.{i}.attn.k_norm.weight"),
    Rule("model.layers.{i}.self_attn.o_proj.{p}", "blocks.{i}.attn.out.{p}"),
    Rule("model.layers.{i}.post_attention_layernorm.{p}", "blocks.{i}.mlp.norm.{p}"),
    Rule("model.layers.{i}.mlp.gate_proj.{p}", "blocks.{i}.mlp.up.{p}", "gate"),
    Rule("model.layers.{i}.mlp.up_proj.{p}", "blocks.{i}.mlp.up.{p}", "up"),
    Rule("model.layers.{i}.mlp.down_proj.{p}", "blocks.{i}.mlp.down.{p}"),
    Rule("model.norm.{p}", "head.norm.{p}"),
    Rule("lm_head.weight", "head.proj.weight"),
)
"""Tensor names of Llama-like families."""


def _renamed(rules: tuple[Rule, ...], *changes: Rule, without: tuple[str, ...] = ()) -> tuple[Rule, ...]:
    """Rules, with `changes` in place of those for the same part of the same parameter, and without some parameters."""
    new = {(rule.ours, rule.part): rule for rule in changes}
    for rule in changes:
        if rule.part == "all":  # one tensor where there were several
            without = (*without, *(rule.ours for old in rules if old.ours == rule.ours and old.part != "all"))
    kept = [new.pop((rule.ours, rule.part), rule) for rule in rules if rule.ours not in without]
    return (*kept, *new.values())


def _layer(theirs: str, ours: str, part: Any = "all", **options: Any) -> Rule:
    return Rule(f"model.layers.{{i}}.{theirs}", f"blocks.{{i}}.{ours}", part, **options)


SANDWICH = _renamed(
    DECODER,
    _layer("post_attention_layernorm.{p}", "attn.out_norm.{p}"),
    _layer("pre_feedforward_layernorm.{p}", "mlp.norm.{p}"),
    _layer("post_feedforward_layernorm.{p}", "mlp.out_norm.{p}"),
)
"""Tensor names of Gemma 2, Gemma 3 and OLMo 2 (which has no input norms)."""
GATE_UP = _layer("mlp.gate_up_proj.{p}", "mlp.up.{p}")
INTERLEAVED = _renamed(
    DECODER,
    _layer("self_attn.q_proj.{p}", "attn.qkv.{p}", "q", interleaved=True),
    _layer("self_attn.k_proj.{p}", "attn.qkv.{p}", "k", interleaved=True),
)
"""Tensor names of families whose rotary embedding rotates neighbouring dimensions."""

COHERE_ONLY = {
    "is_causal": True,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
}
"""Keys of Cohere's own files, which transformers does not read."""
BIDIRECTIONAL = "attention to later tokens is not supported for this family"

TORCHTITAN = (
    Rule("tok_embeddings.weight", "embed.tokens.weight"),
    Rule("layers.{i}.attention_norm.weight", "blocks.{i}.attn.norm.weight"),
    Rule("layers.{i}.attention.wq.weight", "blocks.{i}.attn.qkv.weight", "q", interleaved=True),
    Rule("layers.{i}.attention.wk.weight", "blocks.{i}.attn.qkv.weight", "k", interleaved=True),
    Rule("layers.{i}.attention.wv.weight", "blocks.{i}.attn.qkv.weight", "v"),
    Rule("layers.{i}.attention.wo.weight", "blocks.{i}.attn.out.weight"),
    Rule("layers.{i}.ffn_norm.weight", "blocks.{i}.mlp.norm.weight"),
    Rule("layers.{i}.feed_forward.w1.weight", "blocks.{i}.mlp.up.weight", "gate"),
    Rule("layers.{i}.feed_forward.w3.weight", "blocks.{i}.mlp.up.weight", "up"),
    Rule("layers.{i}.feed_forward.w2.weight", "blocks.{i}.mlp.down.weight"),
    Rule("norm.weight", "head.norm.weight"),
    Rule("output.weight", "head.proj.weight"),
)
"""Tensor names of Llama in torchtitan's distributed checkpoints, which use the rotary layout of Meta's files."""

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    ours="llama",
    keys=_decoder_keys(*_attention_bias(), MLP_BIAS),
    tensors=DECODER,
    fixed={"qk_norm": False},
    unread=(r"rotary_emb\.inv_freq$",),
)

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    ours="gpt",
    keys=(
        Key("", "activation_function", "choice", "gelu_new", values={"gelu_new": "", "gelu_pytorch_tanh": ""}),
        Key("layers", "n_layer", most=MOST_LAYERS, others=("num_hidden_layers",)),
        Key("hidden", "n_embd", most=2**20, others=("hidden_size",)),
        Key("heads", "n_head", most=2**16, others=("num_attention_heads",)),
        Key("ffn", "n_inner", default=0),
        Key("vocab", "vocab_size", least=2),
        Key("positions", "n_positions", others=("max_position_embeddings",)),
        Key("norm_eps", "layer_norm_epsilon", "number", 1e-5),
        Key("tie", "tie_word_embeddings", "flag", True),
    ),
    tensors=(
        Rule("transformer.wte.weight", "embed.tokens.weight"),
        Rule("transformer.wpe.weight", "embed.positions.weight"),
        Rule("transformer.h.{i}.ln_1.{p}", "blocks.{i}.attn.norm.{p}"),
        Rule("transformer.h.{i}.attn.c_attn.{p}", "blocks.{i}.attn.qkv.{p}", transposed=True),
        Rule("transformer.h.{i}.attn.c_proj.{p}", "blocks.{i}.attn.out.{p}", transposed=True),
        Rule("transformer.h.{i}.ln_2.{p}", "blocks.{i}.mlp.norm.{p}"),
        Rule("transformer.h.{i}.mlp.c_fc.{p}", "blocks.{i}.mlp.up.{p}", transposed=True),
        Rule("transformer.h.{i}.mlp.c_proj.{p}", "blocks.{i}.mlp.down.{p}", transposed=True),
        Rule("transformer.ln_f.{p}", "head.norm.{p}"),
        Rule("lm_head.weight", "head.proj.weight"),
    ),
    rope=None,
    dropouts={"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    one_dropout=True,
    tasks=("LMHeadModel", "ForCausalLM"),
    refused={"scale_attn_by_inverse_layer_idx": "attention scaled by layer is not supported"},
    only={"scale_attn_weights": True, "is_causal": True},
    constant={"activation_function": "gelu_new"},
    renames=((r"^(?!transformer\.|lm_head\.)", "transformer."),),
    unread=(r"\.attn\.(masked_)?bias$",),
)

BERT = Family(
    model_type="bert",
    architecture="BertForMaskedLM",
    ours="bert",
    keys=(
        Key("", "hidden_act", "choice", "gelu", values={"gelu": ""}),
        Key("", "position_embedding_type", "choice", "absolute", values={"absolute": ""}),
        Key("layers", "num_hidden_layers", most=MOST_LAYERS),
        Key("hidden", "hidden_size", most=2**20),
        Key("heads", "num_attention_heads", most=2**16),
        Key("ffn", "intermediate_size"),
        Key("vocab", "vocab_size", least=2),
        Key("positions", "max_position_embeddings"),
        Key("token_types", "type_vocab_size", default=2, least=0),
        Key("norm_eps", "layer_norm_eps", "number", 1e-12),
        Key("tie", "tie_word_embeddings", "flag", True),
    ),
    tensors=(
        Rule("bert.embeddings.word_embeddings.weight", "embed.tokens.weight"),
        Rule("bert.embeddings.position_embeddings.weight", "embed.positions.weight"),
        Rule("bert.embeddings.token_type_embeddings.weight", "embed.types.weight"),
        Rule("bert.embeddings.LayerNorm.{p}", "embed.norm.{p}"),
        Rule("bert.encoder.layer.{i}.attention.self.query.{p}", "blocks.{i}.attn.qkv.{p}", "q"),
        Rule("bert.encoder.layer.{i}.attention.self.key.{p}", "blocks.{i}.attn.qkv.{p}", "k"),
        Rule("bert.encoder.layer.{i}.attention.self.value.{p}", "blocks.{i}.attn.qkv.{p}", "v"),
        Rule("bert.encoder.layer.{i}.attention.output.dense.{p}", "blocks.{i}.attn.out.{p}"),
        Rule("bert.encoder.layer.{i}.attention.output.LayerNorm.{p}", "blocks.{i}.attn.norm.{p}"),
        Rule("bert.encoder.layer.{i}.intermediate.dense.{p}", "blocks.{i}.mlp.up.{p}"),
        Rule("bert.encoder.layer.{i}.output.dense.{p}", "blocks.{i}.mlp.down.{p}"),
        Rule("bert.encoder.layer.{i}.output.LayerNorm.{p}", "blocks.{i}.mlp.norm.{p}"),
        Rule("cls.predictions.transform.dense.{p}", "head.dense.{p}"),
        Rule("cls.predictions.transform.LayerNorm.{p}", "head.norm.{p}"),
        Rule("cls.predictions.bias", "head.proj.bias"),
        Rule("cls.predictions.decoder.weight", "head.proj.weight"),
    ),
    rope=None,
    dropouts={"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    one_dropout=True,
    tasks=("ForMaskedLM",),
    refused={"is_decoder": "BERT with causal attention is not supported"},
    only={"is_causal": False},
    constant={"hidden_act": "gelu", "position_embedding_type": "absolute"},
    renames=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
    unread=(
        r"^bert\.pooler\.",
        r"^cls\.seq_relationship\.",
        r"^bert\.embeddings\.(position_ids|token_type_ids)$",
        r"^cls\.predictions\.decoder\.bias$",
    ),
)

GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    ours="llama",
    keys=_decoder_keys(
        Key("activation", "hidden_act", "choice", "gelu", values=ACTIVATIONS),
        LAYER_NORM_EPS,
        Key("block", "use_parallel_residual", "flag", True, values={False: "pre", True: "parallel"}),
        *_attention_bias(True),
    ),
    implied=("kv_heads", "head_dim"),
    tensors=(
        Rule("gpt_neox.embed_in.weight", "embed.tokens.weight"),
        Rule("gpt_neox.layers.{i}.input_layernorm.{p}", "blocks.{i}.attn.norm.{p}"),
        Rule("gpt_neox.layers.{i}.attention.query_key_value.{p}", "blocks.{i}.attn.qkv.{p}", "qkv by head"),
        Rule("gpt_neox.layers.{i}.attention.dense.{p}", "blocks.{i}.attn.out.{p}"),
        Rule("gpt_neox.layers.{i}.post_attention_layernorm.{p}", "blocks.{i}.mlp.norm.{p}"),
        Rule("gpt_neox.layers.{i}.mlp.dense_h_to_4h.{p}", "blocks.{i}.mlp.up.{p}"),
        Rule("gpt_neox.layers.{i}.mlp.dense_4h_to_h.{p}", "blocks.{i}.mlp.down.{p}"),
        Rule("gpt_neox.final_layer_norm.{p}", "head.norm.{p}"),
        Rule("embed_out.weight", "head.proj.weight"),
    ),
    fixed={"norm": "layer", "norm_bias": True, "gated": False, "mlp_bias": True},
    rope=Rope(theta_key="rotary_emb_base", partial=0.25, partial_key="rotary_pct"),
    dropouts={"hidden_dropout": 0.0, "attention_dropout": 0.0},
    one_dropout=True,
    renames=((r"^lm_head\.", "embed_out."),),
    unread=(r"\.attention\.(masked_)?bias$", r"rotary_emb\.inv_freq$"),
)

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        GPT2,
        BERT,
        LLAMA,
        replace(
            LLAMA,
            model_type="mistral",
            architecture="MistralForCausalLM",
            keys=_decoder_keys(_kv_heads(8)),
            window=Window(default=4096, layers="all"),
            fixed={"qkv_bias": False, "qk_norm": False},
        ),
        replace(
            LLAMA,
            model_type="qwen2",
            architecture="Qwen2ForCausalLM",
            keys=_decoder_keys(_kv_heads(32)),
            window=Window(default=4096, always=False, layers="types"),
            fixed={"qkv_bias": True, "qk_norm": False},
        ),
        replace(
            LLAMA,
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            keys=_decoder_keys(_kv_heads(32), _head_dim(128), *_attention_bias()),
            window=Window(default=4096, always=False, layers="types"),
            fixed={"qk_norm": True},
        ),
        replace(
            LLAMA,
            model_type="gemma",
            architecture="GemmaForCausalLM",
            keys=_decoder_keys(
                # files of Gemma 1 have "gelu" but mean the tanh approximation
                Key(
                    "activation", "hidden_act", "choice", "gelu_pytorch_tanh", values=GELU_TANH | {"gelu": "gelu_tanh"}
                ),
                Key("kv_heads", "num_key_value_heads", default=16, null=0),
                _head_dim(256),
                *_attention_bias(),
                TIED,
            ),
            fixed={"norm_plus_one": True},
            derived={"embed_scale": ("hidden", 0.5)},
            refused={"use_bidirectional_attention": BIDIRECTIONAL},
            only={"hidden_activation": "gelu_pytorch_tanh", "is_causal": True},
        ),
        replace(
            LLAMA,
            model_type="gemma2",
            architecture="Gemma2ForCausalLM",
            keys=_decoder_keys(
                Key("activation", "hidden_activation", "choice", "gelu_pytorch_tanh", values=ACTIVATIONS),
                _kv_heads(4),
                _head_dim(256),
                Key("attn_scale", "query_pre_attn_scalar", "number", 256**-0.5, power=-0.5),
                Key("attn_softcap", "attn_logit_softcapping", "number", 50.0, null=0),
                Key("logit_softcap", "final_logit_softcapping", "number", 30.0, null=0),
                *_attention_bias(),
                TIED,
            ),
            tensors=SANDWICH,
            fixed={"norm_plus_one": True, "block": "sandwich"},
            derived={"embed_scale": ("hidden", 0.5)},
            window=Window(default=4096, layers="types", full=2),
            refused={"use_bidirectional_attention": BIDIRECTIONAL},
            unread_keys=("hidden_act", "sliding_window_size"),
        ),
        replace(
            LLAMA,
            model_type="gemma3_text",
            architecture="Gemma3ForCausalLM",
            keys=_decoder_keys(
                Key("activation", "hidden_activation", "choice", "gelu_pytorch_tanh", values=ACTIVATIONS),
                _kv_heads(4),
                _head_dim(256),
                Key("attn_scale", "query_pre_attn_scalar", "number", 256**-0.5, power=-0.5),
                Key("logit_softcap", "final_logit_softcapping", "number", 0, null=0),
                *_attention_bias(),
                TIED,
            ),
            tensors=SANDWICH,
            fixed={"norm_plus_one": True, "block": "sandwich", "qk_norm": True},
            derived={"embed_scale": ("hidden", 0.5)},
            rope=Rope(theta=1e6, local_theta=1e4),
            window=Window(default=4096, layers="types", full=6, full_key="sliding_window_pattern"),
            refused={
                "use_bidirectional_attention": BIDIRECTIONAL,
                "attn_logit_softcapping": "transformers does not apply it in Gemma 3; set it to null",
            },
        ),
        replace(
            LLAMA,
            model_type="phi3",
            architecture="Phi3ForCausalLM",
            keys=_decoder_keys(Key("norm_eps", "rms_norm_eps", "number", 1e-5)),
            tensors=_renamed(DECODER, _layer("self_attn.qkv_proj.{p}", "attn.qkv.{p}"), GATE_UP),
            fixed={},
            rope=Rope(partial=1.0, longrope=("longrope", "su", "yarn")),
            window=Window(layers="all"),
            only={"full_attn_mod": 1, "interpolate_factor": 1, "is_causal": True},
            dropouts={"attention_dropout": 0.0, "resid_pdrop": 0.0},
        ),
        replace(
            LLAMA,
            model_type="olmo2",
            architecture="Olmo2ForCausalLM",
            keys=_decoder_keys(Key("norm_eps", "rms_norm_eps", "number", 1e-5), *_attention_bias()),
            tensors=SANDWICH,
            fixed={"block": "output", "qk_norm": "all"},
        ),
        replace(
            LLAMA,
            model_type="olmo3",
            architecture="Olmo3ForCausalLM",
            keys=_decoder_keys(Key("norm_eps", "rms_norm_eps", "number", 1e-5), *_attention_bias()),
            tensors=SANDWICH,
            fixed={"block": "output", "qk_norm": "all"},
            rope=Rope(theta=5e5, local_theta="same"),
            window=Window(default=4096, layers="types", full=4),
        ),
        replace(
            LLAMA,
            model_type="granite",
            architecture="GraniteForCausalLM",
            keys=_decoder_keys(
                Key("embed_scale", "embedding_multiplier", "number", 1.0),
                Key("residual_scale", "residual_multiplier", "number", 1.0),
                Key("attn_scale", "attention_multiplier", "number", 1.0),
                Key("logit_scale", "logits_scaling", "number", 1.0, power=-1.0),
                *_attention_bias(),
                MLP_BIAS,
            ),
            fixed={},
        ),
        replace(
            LLAMA,
            model_type="smollm3",
            architecture="SmolLM3ForCausalLM",
            keys=_decoder_keys(_kv_heads(4), *_attention_bias(), MLP_BIAS, TIED),
            fixed={},
            rope=Rope(theta=2e6, layers="listed"),
            window=Window(always=False, layers="no rope"),
        ),
        replace(
            LLAMA,
            model_type="glm4",
            architecture="Glm4ForCausalLM",
            keys=_decoder_keys(
                _kv_heads(2),
                _head_dim(128),
                Key("norm_eps", "rms_norm_eps", "number", 1.5625e-7),
                *_attention_bias(True, out=False),
            ),
            tensors=_renamed(
                INTERLEAVED,
                GATE_UP,
                _layer("post_self_attn_layernorm.{p}", "attn.out_norm.{p}"),
                _layer("post_mlp_layernorm.{p}", "mlp.out_norm.{p}"),
            ),
            fixed={"block": "sandwich"},
            rope=Rope(partial=0.5),
        ),
        replace(
            LLAMA,
            model_type="starcoder2",
            architecture="Starcoder2ForCausalLM",
            keys=_decoder_keys(
                Key("activation", "hidden_act", "choice", "gelu_pytorch_tanh", values=ACTIVATIONS),
                _kv_heads(2),
                Key("norm_eps", "norm_epsilon", "number", 1e-5),
                *(Key(field, "use_bias", "flag", True) for field in ("qkv_bias", "out_bias", "mlp_bias")),
                TIED,
            ),
            tensors=_renamed(
                DECODER,
                _layer("mlp.c_fc.{p}", "mlp.up.{p}"),
                _layer("mlp.c_proj.{p}", "mlp.down.{p}"),
            ),
            fixed={"norm": "layer", "norm_bias": True, "gated": False},
            window=Window(layers="all"),
            dropouts={"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0},
            one_dropout=True,
            only={"is_causal": True, "mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True},
            unread_keys=("activation_function", "layer_norm_epsilon"),
        ),
        replace(
            LLAMA,
            model_type="cohere",
            architecture="CohereForCausalLM",
            keys=_decoder_keys(
                LAYER_NORM_EPS,
                Key("logit_scale", "logit_scale", "number", 0.0625),
                Key("qk_norm", "use_qk_norm", "flag", False, values={False: False, True: "per-head"}),
                *_attention_bias(),
                TIED,
            ),
            tensors=_renamed(
                INTERLEAVED,
                _layer("self_attn.q_norm.weight", "attn.q_norm.weight", interleaved=True, shape=("heads", "head_dim")),
                _layer(
                    "self_attn.k_norm.weight", "attn.k_norm.weight", interleaved=True, shape=("kv_heads", "head_dim")
                ),
                without=("blocks.{i}.mlp.norm.{p}",),
            ),
            fixed={"block": "parallel-shared", "norm": "layer"},
            rope=Rope(theta=5e5),
            only=COHERE_ONLY,
        ),
        replace(
            LLAMA,
            model_type="cohere2",
            architecture="Cohere2ForCausalLM",
            keys=_decoder_keys(
                LAYER_NORM_EPS,
                Key("logit_scale", "logit_scale", "number", 0.0625),
                *_attention_bias(),
                TIED,
            ),
            tensors=_renamed(INTERLEAVED, without=("blocks.{i}.mlp.norm.{p}",)),
            fixed={"block": "parallel-shared", "norm": "layer"},
            rope=Rope(layers="windows"),
            only=COHERE_ONLY,
            window=Window(default=4096, layers="types", full=4, full_key="sliding_window_pattern"),
        ),
        replace(
            LLAMA,
            model_type="stablelm",
            architecture="StableLmForCausalLM",
            keys=_decoder_keys(
                LAYER_NORM_EPS,
                Key(
                    "block",
                    "use_parallel_residual",
                    "flag",
                    False,
                    values={False: "pre", True: "parallel-shared"},
                ),
                Key("qk_norm", "qk_layernorm", "flag", False, values={False: False, True: "per-head"}),
                Key("qkv_bias", "use_qkv_bias", "flag", False),
            ),
            implied=("head_dim",),
            tensors=_renamed(
                DECODER,
                _layer("self_attn.q_layernorm.norms.{h}.weight", "attn.q_norm.weight"),
                _layer("self_attn.k_layernorm.norms.{h}.weight", "attn.k_norm.weight"),
            ),
            fixed={"norm": "layer", "norm_bias": True},
            rope=Rope(partial=0.25),
            dropouts={"attention_dropout": 0.0, "hidden_dropout": 0.0},
        ),
        GPT_NEOX,
    )
}
"""By `model_type`."""


# ---- a model of the table ----


@dataclass(frozen=True)
class Run:
    """Rows [ours, ours + length) of a serial parameter are the rows theirs, theirs + step, … of a stored tensor."""

    ours: int
    theirs: int
    length: int
    step: int = 1


@dataclass(frozen=True)
class Link:
    """A tensor of the files and its elements in a serial parameter.

    Take the stored tensor of `shape`, view it as `view`, transpose it if `transposed`: then `runs` of its rows are runs of rows
    of the serial parameter `ours`.
    """

    theirs: str
    shape: tuple[int, ...]
    ours: str
    view: tuple[int, ...]
    transposed: bool
    runs: tuple[Run, ...]


def links(family: Family, m: ModelConfig) -> list[Link]:
    """Every tensor in the files of a (resolved) model, in the order of our parameters."""
    shapes = parameter_shapes(m)
    order = {name: at for at, name in enumerate(shapes)}
    found = [link for rule in family.tensors for link in _links(rule, m, shapes)]
    return sorted(found, key=lambda link: order[link.ours])


def tied_names(family: Family, m: ModelConfig) -> list[str]:
    """Names under which files of a tied model may store the embedding a second time, as the head."""
    return [rule.theirs for rule in family.tensors if rule.ours == "head.proj.weight"] if m.tie else []


def canonical_name(family: Family, name: str) -> str | None:
    """The table's name for a tensor name in a file; None: not a parameter."""
    for pattern, replacement in family.renames:
        name = re.sub(pattern, replacement, name)
    return None if any(re.search(pattern, name) for pattern in family.unread) else name


def _links(rule: Rule, m: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> list[Link]:
    made = []
    layers = range(m.layers) if "{i}" in rule.ours else [0]
    for i in layers:
        for leaf in ("weight", "bias") if "{p}" in rule.ours else ("",):
            ours = rule.ours.replace("{i}", str(i)).replace("{p}", leaf)
            theirs = rule.theirs.replace("{i}", str(i)).replace("{p}", leaf)
            if ours not in shapes:
                continue
            if "{h}" in theirs:
                made += _by_head(theirs, ours, shapes[ours], m.head_dim)
            else:
                made.append(_link(rule, m, theirs, ours, shapes[ours]))
    return made


def _by_head(theirs: str, ours: str, shape: tuple[int, ...], width: int) -> list[Link]:
    """Links of tensors stored one per head; ours is one vector of all heads."""
    return [
        Link(theirs.replace("{h}", str(h)), (width,), ours, (width,), False, (Run(h * width, 0, width),))
        for h in range(shape[0] // width)
    ]


def _link(rule: Rule, m: ModelConfig, theirs: str, ours: str, shape: tuple[int, ...]) -> Link:
    runs = rows_of(rule, m, shape[0])
    dims = (sum(run.length for run in runs), *shape[1:])
    transposed = rule.transposed and len(shape) == 2
    view = dims[::-1] if transposed else dims
    stored = tuple(getattr(m, name) for name in rule.shape) or view
    assert math.prod(stored) == math.prod(view), (theirs, stored, view)
    return Link(theirs, stored, ours, view, transposed, runs)


def rows_of(rule: Rule, m: ModelConfig, rows: int) -> tuple[Run, ...]:
    """The runs that map our `rows` rows to rows of theirs."""
    e, q, kv = m.head_dim, m.heads * m.head_dim, m.kv_heads * m.head_dim
    if rule.part == "qkv by head":
        assert m.heads == m.kv_heads, "rows by head need as many key heads as heads"
        return tuple(Run(part * q + h * e, (3 * h + part) * e, e) for part in range(3) for h in range(m.heads))
    start, length = {
        "all": (0, rows),
        "q": (0, q),
        "k": (q, kv),
        "v": (q + kv, kv),
        "gate": (0, m.ffn),
        "up": (m.ffn, m.ffn),
    }[rule.part]
    if not rule.interleaved:
        return (Run(start, 0, length),)
    rotated = m.rope_dim  # the first dims of each head; the rest stay where they are
    runs = []
    for h in range(0, length, e):
        runs += [Run(start + h, h, rotated // 2, 2), Run(start + h + rotated // 2, h + 1, rotated // 2, 2)]
        runs += [Run(start + h + rotated, h + rotated, e - rotated)] if rotated < e else []
    return tuple(runs)
