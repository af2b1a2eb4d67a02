"""The table of Hugging Face families: what a `config.json` of each means, and where its tensors lie in ours. No torch.

A `Family` is a row of data. Three parts:

    keys, fixed, rope, dropouts, window   how the keys of config.json become fields of ModelConfig, and back
    refused, tasks                        what a file may not ask for
    tensors, renames, unread              names of the tensors in the files, and what part of which serial parameter each one is

`links` turns the tensor rules into facts for one model: for every tensor of the files its shape, and runs of rows that are equal
to runs of rows of a serial parameter. Reading, writing and checking files are functions of these links alone
(train/weights.py, train/export.py). A rule whose serial parameter the model does not have (a bias, a head that is tied, a norm
that only some layers have) yields no link, so rules need no conditions.

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
    "Family",
    "Key",
    "Link",
    "Rope",
    "Rule",
    "Run",
    "Window",
    "canonical_name",
    "links",
    "tied_names",
]

REQUIRED: Any = object()
"""Default of a key that a file must have."""


@dataclass(frozen=True)
class Key:
    """One key of config.json, and the field of ModelConfig that it gives.

    `field`: "" where the value is only checked. `name`: the key as it is written; `others` are read as well. `kind` "size": a
    whole number from `least` to `most`; "number": a float above 0; "flag": true or false; "choice": one of `values`, each with
    the value of the field. `default`: what a file without the key means; `null`: what null means (default: the same). A size or
    number of 0 leaves the field to ModelConfig. `power`: the field is the value to this power (-0.5: an attention scale from a
    width).
    """

    field: str
    name: str
    kind: Literal["size", "number", "flag", "choice"] = "size"
    default: Any = REQUIRED
    null: Any = None
    least: int = 1
    most: int = 10**8
    power: float = 1.0
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: its base where a file does not give it, and the names of the keys."""

    theta: float = 10000.0
    theta_key: str = "rope_theta"


@dataclass(frozen=True)
class Window:
    """Sliding windows: the window where the file has no `sliding_window`, and whether it counts without `use_sliding_window`."""

    default: int = 0
    always: bool = True


@dataclass(frozen=True)
class Rule:
    """Tensors `theirs` of the files are part of the serial parameters `ours`.

    Patterns: {i} is the layer, {p} is weight and bias, {h} a head (one tensor for each; ours is a vector of them all).

    `part`: which rows of ours they are. "all": all; "q", "k", "v": heads of the fused qkv; "gate", "up": halves of a gated up;
    "qkv by head": all of qkv, with the rows [q | k | v] of one head after those of another.
    `transposed`: stored as [inputs, outputs]. `interleaved`: rotary pairs are rows (2j, 2j + 1) of each head in the files, and
    (j, j + R/2) in ours, R the rotary dims. `shape`: fields of ModelConfig that give the stored shape, where it is another than
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
    rope: Rope | None = Rope()
    """None: no rotary embedding."""
    window: Window = Window()
    dropouts: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"attention_dropout": 0.0})
    """Keys of dropouts, with their values where the file does not give them."""
    one_dropout: bool = False
    """All places of our one dropout have a key."""
    tasks: tuple[str, ...] = ("ForCausalLM",)
    """Ends of the architectures that are this model with a language model's head."""
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Keys that must be absent, null, false or 0, with the reason."""
    constant: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further keys that are written into config.json."""
    renames: tuple[tuple[str, str], ...] = ()
    """Regular expressions and replacements: names of older files."""
    unread: tuple[str, ...] = ()
    """Regular expressions of names that files may have and that are no parameters of the model."""


def _decoder_keys(*more: Key) -> tuple[Key, ...]:
    """Keys that Llama and its relatives share; a later one of the same field replaces an earlier one."""
    keys = {
        k.field or k.name: k
        for k in (
            Key("", "hidden_act", "choice", "silu", values={"silu": "silu"}),
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
"""Names of Llama and its relatives."""

_OUT_BIAS = "a bias on the output projection is not supported"

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    ours="llama",
    keys=_decoder_keys(),
    tensors=DECODER,
    fixed={"qkv_bias": False, "qk_norm": False},
    refused={"attention_bias": _OUT_BIAS, "mlp_bias": "a bias in a gated MLP is not supported"},
    constant={"attention_bias": False, "mlp_bias": False},
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
    refused={"is_decoder": "a BERT that sees earlier tokens alone is not supported"},
    constant={"hidden_act": "gelu", "position_embedding_type": "absolute"},
    renames=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
    unread=(
        r"^bert\.pooler\.",
        r"^cls\.seq_relationship\.",
        r"^bert\.embeddings\.(position_ids|token_type_ids)$",
        r"^cls\.predictions\.decoder\.bias$",
    ),
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
            keys=_decoder_keys(Key("kv_heads", "num_key_value_heads", default=8, null=0)),
            window=Window(default=4096),
            constant={},
        ),
        replace(
            LLAMA,
            model_type="qwen2",
            architecture="Qwen2ForCausalLM",
            keys=_decoder_keys(Key("kv_heads", "num_key_value_heads", default=32, null=0)),
            window=Window(always=False),
            fixed={"qkv_bias": True, "qk_norm": False},
            refused={},
            constant={"use_sliding_window": False},
        ),
        replace(
            LLAMA,
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            keys=_decoder_keys(
                Key("kv_heads", "num_key_value_heads", default=32, null=0),
                Key("head_dim", "head_dim", default=128, null=0, most=2**16),
            ),
            window=Window(always=False),
            fixed={"qkv_bias": False, "qk_norm": True},
            constant={"use_sliding_window": False, "attention_bias": False},
        ),
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
    """Every tensor that the files of a (resolved) model have, in the order of our parameters."""
    shapes = parameter_shapes(m)
    order = {name: at for at, name in enumerate(shapes)}
    found = [link for rule in family.tensors for link in _links(rule, m, shapes)]
    return sorted(found, key=lambda link: order[link.ours])


def tied_names(family: Family, m: ModelConfig) -> list[str]:
    """Names under which files may hold the embedding once more, as the head of a model whose head is tied."""
    return [rule.theirs for rule in family.tensors if rule.ours == "head.proj.weight"] if m.tie else []


def canonical_name(family: Family, name: str) -> str | None:
    """A name in a file as the table has it; None: no parameter."""
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
    """One stored tensor for every head; ours is a vector of all of them."""
    return [
        Link(theirs.replace("{h}", str(h)), (width,), ours, (width,), False, (Run(h * width, 0, width),))
        for h in range(shape[0] // width)
    ]


def _link(rule: Rule, m: ModelConfig, theirs: str, ours: str, shape: tuple[int, ...]) -> Link:
    runs = _runs(rule, m, shape[0])
    dims = (sum(run.length for run in runs), *shape[1:])
    transposed = rule.transposed and len(shape) == 2
    view = dims[::-1] if transposed else dims
    stored = tuple(getattr(m, name) for name in rule.shape) or view
    assert math.prod(stored) == math.prod(view), (theirs, stored, view)
    return Link(theirs, stored, ours, view, transposed, runs)


def _runs(rule: Rule, m: ModelConfig, rows: int) -> tuple[Run, ...]:
    """Which rows of ours are which rows of theirs."""
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
    turned = getattr(m, "rope_dim", 0) or e  # the first dims of each head; the rest stay where they are
    runs = []
    for h in range(0, length, e):
        runs += [Run(start + h, h, turned // 2, 2), Run(start + h + turned // 2, h + 1, turned // 2, 2)]
        runs += [Run(start + h + turned, h + turned, e - turned)] if turned < e else []
    return tuple(runs)
