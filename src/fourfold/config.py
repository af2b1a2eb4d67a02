"""What to train: frozen dataclasses, one per section of the config file.

    defaults  <  file (TOML, JSON, YAML)  <  --section.field value

`Config.load` reads a file; `Config.resolve` fills in the family's defaults and checks every rule, so that a resolved config is
complete. A zero in a size field means "the default", as described at the field.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fourfold import schema
from fourfold.errors import ConfigError

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DpoConfig",
    "LogConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "RopeScaling",
    "TrainConfig",
]

MOST_LAYERS = 10_000
MOST_COUNT, MOST_NUMBER = 10**12, 1e30
MOST = {
    "model.hidden": 2**20,
    "model.heads": 2**16,
    "model.kv_heads": 2**16,
    "model.head_dim": 2**16,
    "model.ffn": 10**8,
    "model.vocab": 10**8,
    "model.seq_len": 10**8,
    "model.positions": 10**8,
    "model.token_types": 2**16,
    "model.rope_scaling.original_positions": 10**8,
    "lora.rank": 2**20,
    "train.global_batch": 2**24,
    "train.eval_batches": 2**20,
    "train.seed": 2**53,
}
"""Upper bounds of integers by field, far above what machines can hold; MOST_COUNT for the others."""
LONGEST_WAIT = 30 * 24 * 3600
"""Seconds: the timeout of torch's process groups when the watchdog replaces it."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of the rotary embedding for long contexts; the names follow Hugging Face's `rope_scaling`."""

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    """linear: all frequencies / factor. llama3: low ones only, blended. yarn: ramp between dimensions, scaled tables.
    longrope: a separate factor for every frequency, scaled tables."""
    factor: float
    """How many times longer than `original_positions`."""
    original_positions: int = 0
    """Context length of pre-training (llama3, yarn, longrope)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths longer than original_positions / this are divided by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than original_positions / this are kept."""
    beta_fast: float = 32.0
    """yarn: rotations above which a dimension is kept."""
    beta_slow: float = 1.0
    """yarn: rotations below which a dimension is interpolated."""
    truncate: bool = True
    """yarn: the ends of the ramp are rounded to whole dimensions."""
    mscale: float = 0.0
    """yarn: with `mscale_all_dim`, replaces the scale of the tables by a ratio of two; 0: not given."""
    mscale_all_dim: float = 0.0
    """yarn: see `mscale`."""
    attention_factor: float = 0.0
    """yarn, longrope: scale of the tables; 0: the default of the kind."""
    short_factor: tuple[float, ...] = ()
    """longrope: divisor of every frequency while seq_len is at most `original_positions`."""
    long_factor: tuple[float, ...] = ()
    """longrope: divisor of every frequency for longer sequences."""

    def __post_init__(self) -> None:
        _require(self, "model.rope_scaling")
        if self.factor < 1:
            raise ConfigError(f"model.rope_scaling.factor = {self.factor} must be at least 1")
        if self.kind != "linear" and self.original_positions < 1:
            raise ConfigError(f"model.rope_scaling.original_positions is needed by kind '{self.kind}'")
        if self.kind == "longrope" and not (self.short_factor and len(self.short_factor) == len(self.long_factor)):
            raise ConfigError(
                f"model.rope_scaling: longrope needs short_factor and long_factor of one length, half the rotary dimensions; "
                f"found {len(self.short_factor)} and {len(self.long_factor)}"
            )


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA: the weights are frozen, and linear layers get trainable factors: y = x Wᵀ + alpha / rank · x Aᵀ Bᵀ."""

    rank: int = 0
    """Rank of the factors A [rank, inputs] and B [outputs, rank]; 0: no LoRA, all weights are trained."""
    alpha: float = 0.0
    """The product of the factors is multiplied by alpha / rank; 0: twice the rank."""
    targets: tuple[str, ...] = ()
    """Names of the adapted linear layers, as in the model's files (q_proj, down_proj; or longer, self_attn.q_proj); default: all
    in the blocks."""
    dropout: float = 0.0
    """Must be 0: results would depend on the plan."""
    merge: bool = False
    """Write final/ as a whole model, with the adapters merged into the weights, instead of as an adapter."""

    def __post_init__(self) -> None:
        _require(self, "lora", rank=0, alpha=0)
        if self.dropout:
            raise ConfigError(
                f"lora.dropout = {self.dropout:g} is not supported: ranks would draw different masks, and results would depend "
                "on the plan; use 0"
            )
        if not self.rank and (self.alpha or self.targets or self.merge):
            raise ConfigError("lora.rank is missing: [lora] needs a rank of at least 1, for example rank = 16")
        if len(set(self.targets)) < len(self.targets):
            twice = next(t for t in self.targets if self.targets.count(t) > 1)
            raise ConfigError(f"lora.targets names '{twice}' twice")

    @property
    def scale(self) -> float:
        """The factor alpha / rank."""
        return (self.alpha or 2.0 * self.rank) / self.rank


FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt": {
        "block": "pre",
        "norm": "layer",
        "norm_bias": True,
        "gated": False,
        "activation": "gelu_tanh",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    },
    "bert": {
        "block": "post",
        "norm": "layer",
        "norm_bias": True,
        "gated": False,
        "activation": "gelu",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    },
    "llama": {
        "block": "pre",
        "norm": "rms",
        "norm_bias": False,
        "gated": True,
        "activation": "silu",
        "qkv_bias": False,
        "out_bias": False,
        "mlp_bias": False,
    },
}
"""Defaults of each family."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model. `hf` takes architecture and weights from a Hugging Face folder; fields given here override it."""

    family: Literal["gpt", "bert", "llama"] = "gpt"
    """gpt: learned positions, LayerNorm, GELU. llama: RMSNorm, RoPE, SwiGLU (also Qwen, Mistral). bert: bidirectional."""
    hf: str | None = None
    """Path of a Hugging Face folder, or of the config.json in one: architecture and weights."""
    init: str = ""
    """Initial weights: random, or the path of a folder to read them from (Hugging Face safetensors, or a distributed checkpoint
    of torch); default: the folder of `hf`, random without one."""
    model_type: str = ""
    """Hugging Face model_type for reading and writing weights; default: that of `hf`, or else one that matches the model."""
    layers: int = 0
    """Number of blocks."""
    hidden: int = 0
    """Width of the residual stream."""
    heads: int = 0
    """Attention heads; 0: hidden / 64."""
    kv_heads: int = 0
    """llama: key and value heads; 0: as many as `heads`."""
    head_dim: int = 0
    """llama: width of a head; 0: hidden / heads."""
    ffn: int = 0
    """Width inside the MLP; 0: 4 hidden (gpt, bert) or 8/3 hidden rounded up to 128 (llama)."""
    vocab: int = 256
    """Number of token ids."""
    seq_len: int = 0
    """Tokens in a training sequence."""
    positions: int = 0
    """gpt, bert: rows of the position embedding, the maximum sequence length; 0: seq_len."""
    token_types: int = 0
    """bert: rows of the token type table, whose first row is added to every token; 0: no table."""
    rope_theta: float = 0.0
    """llama: base of the rotary frequencies; 0: 10000."""
    rope_scaling: RopeScaling | None = None
    """llama: scaling of the rotary embedding."""
    rope_local_theta: float = 0.0
    """llama: base of the rotary frequencies, without scaling, on layers with a window (Gemma 3); 0: as on other layers."""
    rope_dim: int = 0
    """llama: leading dimensions of every head that the rotary embedding rotates (GPT-NeoX, Phi); 0: head_dim."""
    rope_layers: tuple[bool, ...] = ()
    """llama: whether a layer has the rotary embedding (SmolLM3), repeated over the layers; empty: all have."""
    windows: tuple[int, ...] = ()
    """llama: tokens that a query attends to, itself included, layer by layer, repeated over the layers; 0: all earlier ones."""
    attn_scale: float = 0.0
    """llama: factor of attention scores; 0: 1 / sqrt(head_dim)."""
    attn_softcap: float = 0.0
    """llama: attention scores s become cap · tanh(s / cap) (Gemma 2); 0: no soft-capping."""
    logit_softcap: float = 0.0
    """llama: logits s become cap · tanh(s / cap) (Gemma 2); 0: no soft-capping."""
    embed_scale: float = 1.0
    """llama: factor of the embedding (Gemma: sqrt(hidden)), rounded to the compute type."""
    residual_scale: float = 1.0
    """llama: factor of each branch before it is added to the residual stream (Granite)."""
    logit_scale: float = 1.0
    """llama: factor of the logits, before soft-capping (Granite, Cohere)."""
    block: Literal["pre", "post", "output", "sandwich", "parallel", "parallel-shared"] | None = None
    """Where the norms are. pre: x + f(norm(x)). post: norm(x + f(x)). output: x + norm(f(x)). sandwich: x + norm(f(norm(x))).
    parallel: x + attn(norm(x)) + mlp(norm(x)), two norms; parallel-shared: the same with one norm for both.
    Default pre (gpt, llama) or post (bert)."""
    norm: Literal["rms", "layer"] | None = None
    """RMSNorm or LayerNorm; default rms (llama) or layer (gpt, bert)."""
    norm_bias: bool | None = None
    """llama: bias on LayerNorms; default false."""
    norm_plus_one: bool = False
    """llama: norms multiply by 1 + weight (Gemma)."""
    gated: bool | None = None
    """llama: the MLP is activation(gate) · up; default true."""
    activation: Literal["silu", "gelu", "gelu_tanh"] | None = None
    """Activation of the MLP; default gelu_tanh (gpt), gelu (bert) or silu (llama)."""
    qkv_bias: bool | None = None
    """llama: bias on the q, k and v projections (Qwen 2); default false."""
    out_bias: bool | None = None
    """llama: bias on the output projection of attention; default false."""
    mlp_bias: bool | None = None
    """llama: bias in the MLP; default false."""
    qk_norm: bool | Literal["all", "per-head"] | None = None
    """llama: norm of q and k before the rotary embedding. true: over each head, one weight of head_dim for all heads (Qwen 3).
    per-head: over each head, with a separate weight per head (Cohere). all: over all heads at once (OLMo 2). Default false."""
    tie: bool | None = None
    """Head and embedding share one weight; default true for gpt and bert, false for llama."""
    norm_eps: float = 0.0
    """Added to the variance in norms; 0: 1e-5 (gpt, llama) or 1e-12 (bert)."""
    dropout: float | None = None
    """Dropout after the embedding, attention and MLP, and on attention weights; default 0, or the value of `hf`."""
    init_std: float = 0.02
    """Standard deviation of initial matrices (projections back to the residual stream: divided by sqrt(2 layers))."""
    lora: LoraConfig | None = None
    """Adapters on its linear layers, from the section `lora`; all other parameters are then frozen."""

    def __post_init__(self) -> None:
        if self.lora is not None and not self.lora.rank:
            object.__setattr__(self, "lora", None)
        sizes = ("heads", "kv_heads", "head_dim", "ffn", "positions", "rope_theta", "norm_eps", "rope_dim")
        or_default = (*sizes, "rope_local_theta", "attn_scale", "attn_softcap", "logit_softcap")
        _require(self, "model", **dict.fromkeys(or_default, 0))
        for name in ("embed_scale", "residual_scale", "logit_scale"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"model.{name} = {getattr(self, name)} must be above 0")
        if bad := [w for w in self.windows if w < 0]:
            raise ConfigError(f"model.windows has {bad[0]}; a window must be at least 0 tokens (0: no window)")

    # ---- what a family is, by features ----

    @property
    def learned_positions(self) -> bool:
        """Whether positions are learned rather than rotary."""
        return self.family != "llama"

    @property
    def causal(self) -> bool:
        """Whether attention is causal."""
        return self.family != "bert"

    @property
    def masked_lm(self) -> bool:
        """Whether the embedding has a norm, and the head an additional layer and a bias (BERT)."""
        return self.family == "bert"

    def window(self, layer: int) -> int:
        """Window of a layer in tokens; 0: none, or at least as long as the sequence."""
        found = self.windows[layer % len(self.windows)] if self.windows else 0
        return found if found < self.seq_len else 0

    def has_rope(self, layer: int) -> bool:
        """Whether a layer has the rotary embedding."""
        return not self.learned_positions and (not self.rope_layers or self.rope_layers[layer % len(self.rope_layers)])

    def has_local_rope(self, layer: int) -> bool:
        """Whether a layer uses the rotary embedding of layers with a window."""
        return bool(self.rope_local_theta and self.windows and self.windows[layer % len(self.windows)])

    def resolve(self) -> ModelConfig:
        """A copy with the family's defaults filled in; raises ConfigError if a value is invalid."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        if self.hf is not None:
            from fourfold.model.hf import hf_folder, read_config

            given = read_config(self.hf, self.seq_len, self.dropout) | given
            given.setdefault("init", str(hf_folder(self.hf)))
        m = dataclasses.replace(self, **given | {"hf": None, "init": given.get("init", "random")})
        _require(m, "model", layers=1, hidden=1, seq_len=1, vocab=2)
        if m.layers > MOST_LAYERS:
            raise ConfigError(f"model.layers = {m.layers} must be at most {MOST_LAYERS}")
        llama = m.family == "llama"
        heads = m.heads or max(1, m.hidden // 64)
        if not m.head_dim and m.hidden % heads:
            good = nearest_divisor(m.hidden, heads)
            raise ConfigError(
                f"model.heads = {heads} does not divide model.hidden = {m.hidden} "
                f"({m.hidden} / {heads} = {m.hidden / heads:.2f}); the nearest that does is {good}"
            )
        kv_heads, head_dim = m.kv_heads or heads, m.head_dim or m.hidden // heads
        if not llama:
            # fixed in the other families; the implied value is allowed, so that a resolved config can be resolved again
            implied = {"kv_heads": heads, "head_dim": m.hidden // heads, "rope_theta": 0.0, "rope_scaling": None}
            implied |= {"qkv_bias": True, "qk_norm": False}
            for name, value in implied.items():
                if getattr(m, name) and getattr(m, name) != value:
                    raise ConfigError(f"model.{name} is a field of family 'llama'; found family '{m.family}'")
            for name, fallback in _LLAMA_ONLY.items():
                if getattr(m, name) not in (fallback, FAMILY_DEFAULTS[m.family].get(name, fallback)):
                    raise ConfigError(f"model.{name} is a field of family 'llama'; found family '{m.family}'")
        if heads % kv_heads:
            raise ConfigError(
                f"model.kv_heads = {kv_heads} does not divide model.heads = {heads}; "
                f"the nearest that does is {nearest_divisor(heads, kv_heads)}"
            )
        if llama and head_dim % 2 and not m.rope_dim:
            raise ConfigError(
                f"model.head_dim = {head_dim} is odd; the rotary embedding rotates pairs, use {head_dim + 1}"
            )
        if m.rope_dim % 2 or m.rope_dim > head_dim:
            raise ConfigError(
                f"model.rope_dim = {m.rope_dim} must be even and at most model.head_dim = {head_dim}; "
                f"use {min(m.rope_dim, head_dim) // 2 * 2}"
            )
        _check_layer_pattern("windows", m.windows, m.layers)
        _check_layer_pattern("rope_layers", m.rope_layers, m.layers)
        rope_dim = (m.rope_dim or head_dim) if llama else 0
        if m.rope_scaling is not None and m.rope_scaling.kind == "longrope":
            found = len(m.rope_scaling.short_factor)
            if 2 * found != rope_dim:
                raise ConfigError(
                    f"model.rope_scaling.short_factor has {found} numbers; it needs one for each pair of the {rope_dim} "
                    f"rotary dimensions, {rope_dim // 2}"
                )
        dropout = m.dropout or 0.0
        if not 0 <= dropout < 1:
            raise ConfigError(f"model.dropout = {m.dropout} must be at least 0 and below 1")
        if m.token_types < 0:
            raise ConfigError(f"model.token_types = {m.token_types} must be at least 0")
        if m.token_types and m.family != "bert":
            raise ConfigError(f"model.token_types is a field of family 'bert'; found family '{m.family}'")
        if m.init_std <= 0:
            raise ConfigError(f"model.init_std = {m.init_std} must be above 0")
        if dropout and (m.attn_softcap or any(map(m.window, range(m.layers)))):
            what = "attn_softcap" if m.attn_softcap else f"windows (at model.seq_len = {m.seq_len})"
            raise ConfigError(
                f"model.dropout = {m.dropout} and model.{what} cannot be combined: dropout of attention weights is done by "
                "torch's fused kernel, which has neither windows nor soft-capping; use model.dropout = 0"
            )
        positions = m.positions or m.seq_len
        if m.seq_len > positions:
            raise ConfigError(
                f"model.seq_len = {m.seq_len} is longer than model.positions = {positions}, the longest sequence the "
                f"model has positions for; use seq_len = {positions} or less"
            )
        defaults = FAMILY_DEFAULTS[m.family]
        norm = m.norm or defaults["norm"]
        norm_bias = (norm == "layer" and defaults["norm_bias"]) if m.norm_bias is None else m.norm_bias
        if norm == "rms" and norm_bias:
            raise ConfigError("model.norm_bias = true needs model.norm = 'layer': an RMSNorm has no bias")
        if norm == "layer" and m.norm_plus_one:
            raise ConfigError("model.norm_plus_one = true needs model.norm = 'rms'")
        made = dataclasses.replace(
            m,
            norm=norm,
            norm_bias=norm_bias,
            rope_dim=rope_dim,
            **{name: value for name, value in defaults.items() if getattr(m, name) is None and "norm" not in name},
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=m.ffn or (math.ceil(8 * m.hidden / 3 / 128) * 128 if llama else 4 * m.hidden),
            positions=positions,
            rope_theta=m.rope_theta or (10000.0 if llama else 0.0),
            qk_norm=m.qk_norm or False,
            tie=not llama if m.tie is None else m.tie,
            norm_eps=m.norm_eps or (1e-12 if m.family == "bert" else 1e-5),
            dropout=dropout,
        )
        if made.lora is not None:
            from fourfold.model.lora import check_targets

            check_targets(made)
        return made


_LLAMA_ONLY: dict[str, Any] = {
    **{"rope_local_theta": 0.0, "rope_dim": 0, "rope_layers": (), "windows": ()},
    **{"attn_scale": 0.0, "attn_softcap": 0.0, "logit_softcap": 0.0},
    **{"embed_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0, "norm_plus_one": False},
    **dict.fromkeys(FAMILY_DEFAULTS["llama"]),
}
"""Fields that only family llama has, with the value that means the default."""


def _check_layer_pattern(name: str, pattern: tuple[Any, ...], layers: int) -> None:
    if len(pattern) > layers:
        raise ConfigError(f"model.{name} has {len(pattern)} entries for model.layers = {layers}; give at most {layers}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus and how it is read."""

    source: str = "stdlib"
    """stdlib (the running Python's own source), or a file, folder or glob: text, JSONL, parquet, a token file (docs/data.md)."""
    sources: tuple[str, ...] = ()
    """Several sources instead of `source`: each a path, or a weight and a path ("0.5 code/*.jsonl"). The weight is how many times
    an epoch contains the source's examples."""
    eval_source: str = ""
    """A separate source for evaluation; default: `eval_fraction` of the training data."""
    tokenizer: str = ""
    """bytes (256 ids), or the path of a Hugging Face tokenizer.json (extra `hf`); token files include their own. Default: the one
    in the folder of `model.hf`, otherwise bytes."""
    eval_fraction: float = 0.01
    """Fraction of the corpus, at its end, held out for evaluation."""
    template: str = "auto"
    """How chats become text: auto (the template next to the tokenizer), plain ("role: content"), or the path of a jinja file."""
    template_date: str = "2024-07-26"
    """Date for chat templates that use today's date, so that data does not depend on the day."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Tokens of an example that contribute to the loss: the assistant's turns or the answer, or all of them."""
    packing: Literal["auto", "documents", "none", "concat"] = "auto"
    """documents: several whole examples in a window, which do not attend to each other. none: a sample is one whole example,
    padded. concat: concatenated documents, cut into windows. auto: documents for chats and for prompts with answers (none if the
    model has dropout), concat for text."""
    overlong: Literal["auto", "cut", "split", "drop", "error"] = "auto"
    """Examples longer than seq_len, if packing keeps them whole: cut at the end, split into several, dropped, or refused.
    auto: split for text, cut for others."""
    mask_rate: float = 0.15
    """bert: fraction of tokens to predict (80 % masked, 10 % random, 10 % unchanged)."""

    def __post_init__(self) -> None:
        _require(self, "data")
        try:
            datetime.date.fromisoformat(self.template_date)
        except ValueError:
            raise ConfigError(
                f"data.template_date = '{self.template_date}' is not a date; write it as 2024-07-26"
            ) from None
        self.mixture()
        if self.sources and self.source not in ("", "stdlib"):
            raise ConfigError(f"data.source = '{self.source}' and data.sources are both given; keep one of them")
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(f"data.eval_fraction = {self.eval_fraction} must be at least 0 and below 1")
        if not 0 < self.mask_rate < 1:
            raise ConfigError(f"data.mask_rate = {self.mask_rate} must be between 0 and 1")

    def mixture(self) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """The paths of all sources, and their weights."""
        if not self.sources:
            return (self.source,), (1.0,)
        paths, weights = [], []
        for given in self.sources:
            first, _, rest = given.strip().partition(" ")
            weight = float(first) if re.fullmatch(r"\d+(\.\d+)?", first) and rest.strip() else None
            if weight == 0 or not given.strip():
                raise ConfigError(f"data.sources has '{given}'; write a path, or a weight above 0 and a path")
            paths.append(given.strip() if weight is None else rest.strip())
            weights.append(1.0 if weight is None else weight)
        return tuple(paths), tuple(weights)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its learning rate."""

    lr: float = 3e-4
    """Learning rate after warm-up."""
    warmup: int = 0
    """Warm-up steps, in which the learning rate rises from 0."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay of the learning rate after warm-up."""
    final_lr: float = 0.1
    """Learning rate at the last step, as a fraction of `lr`."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""
    beta1: float = 0.9
    """Decay rate of the first moment."""
    beta2: float = 0.95
    """Decay rate of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    clip: float = 1.0
    """Maximum gradient norm, over the whole model; 0: no clipping."""

    def __post_init__(self) -> None:
        _require(self, "optim")
        for name in ("lr", "warmup", "final_lr", "weight_decay", "eps", "clip"):
            if getattr(self, name) < 0:
                raise ConfigError(f"optim.{name} = {getattr(self, name)} must not be negative")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optim.{name} = {getattr(self, name)} must be at least 0 and below 1")

    def lr_at(self, step: int, steps: int) -> float:
        """Learning rate at `step` (counted from 0) of a run of `steps` steps."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.decay == "constant":
            return self.lr
        done = min(1.0, (step - self.warmup) / max(1, steps - self.warmup))
        fall = 0.5 * (1 + math.cos(math.pi * done)) if self.decay == "cosine" else 1 - done
        return self.lr * (self.final_lr + (1 - self.final_lr) * fall)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The run."""

    steps: int = 100
    """Optimizer steps."""
    global_batch: int = 8
    """Sequences per step, independent of the plan."""
    seed: int = 0
    """Seed of initial weights, data order, masks and dropout."""
    run_dir: str = ""
    """Run directory; empty: runs/<name of the config file>."""
    eval_every: int = 0
    """Evaluate every N steps and at the end; 0: never."""
    eval_batches: int = 4
    """Global batches per evaluation."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if there is a GPU."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: NCCL if every rank has its own GPU, otherwise gloo; nccl: also if ranks share a GPU, for tests."""
    timeout: float = 0.0
    """Seconds without progress of any rank after which a run ends as hanging; 0: 60 on CPU, 600 on CUDA."""
    start_timeout: float = 0.0
    """The same until the first step is done; 0: `timeout`, at least 1800."""
    eval_timeout: float = 0.0
    """The same in an evaluation; 0: `timeout`."""
    max_skipped: int = 10
    """Maximum number of consecutive steps with a non-finite loss or gradient; each is skipped on all ranks."""
    guard: bool = True
    """Skip steps with a non-finite loss or gradient; false: streamed updates do not wait for the gradient norm."""
    check_replicas: int = 0
    """Compare all replicas' weights and optimizer state bit by bit every N steps; 0: only before every save; -1: never."""
    deterministic: bool = True
    """Use torch's deterministic kernels, so that the same plan twice is bit-identical."""

    def __post_init__(self) -> None:
        for name in ("timeout", "start_timeout", "eval_timeout"):
            if getattr(self, name) > LONGEST_WAIT:
                raise ConfigError(
                    f"train.{name} = {getattr(self, name):g} must be at most {LONGEST_WAIT} seconds, 30 days"
                )
        least = {
            "steps": 1,
            "global_batch": 1,
            "eval_every": 0,
            "eval_batches": 1,
            "max_skipped": 1,
            "check_replicas": -1,
        }
        _require(self, "train", timeout=0, start_timeout=0, eval_timeout=0, **least)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When and how checkpoints are saved."""

    every: int = 0
    """Save every N steps and at the end; 0: at the end only."""
    dir: str = ""
    """URL of a folder for checkpoints besides the run directory, in an object store: s3://bucket/run, gs://…, file:///…"""
    keep: int = 2
    """Number of complete checkpoints to keep, at least 2 (a machine may fail while the newest is written)."""
    keep_every: int = 0
    """Also keep the checkpoints of every N-th step; 0: none."""
    last: Literal["all", "weights"] = "all"
    """What the checkpoint after the last step holds. weights: no optimizer state, a third of the bytes; final/ is the same, but
    training cannot continue from it."""
    mode: Literal["async", "sync"] = "async"
    """async: a thread writes a copy while training continues; sync: training waits."""
    timeout: float = 0.0
    """As train.timeout, while training waits for a save; 0: train.timeout, at least 3600."""

    def __post_init__(self) -> None:
        _require(self, "checkpoint", every=0, keep=2, keep_every=0, timeout=0)


@dataclass(frozen=True, kw_only=True)
class DpoConfig:
    """Preference training (DPO): pairs of a chosen and a rejected answer, against the initial weights as the reference."""

    beta: float = 0.0
    """DPO's beta: higher values keep the model closer to the reference; usually 0.1. 0: no preference training. The data has
    `prompt`, `chosen` and `rejected`, and train.global_batch counts sequences, two per pair."""

    def __post_init__(self) -> None:
        _require(self, "dpo")
        if self.beta < 0:
            raise ConfigError(f"dpo.beta = {self.beta} must not be negative; 0.1 is usual")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Console output, traces, and other destinations of the metrics."""

    every: int = 10
    """Print a log line every N steps."""
    trace: int = 10
    """Trace the timeline of all ranks every N steps, under run_dir/trace; 0: never."""
    tensorboard: bool = False
    """Write TensorBoard events under run_dir/tensorboard (extra `tensorboard`)."""
    wandb: str = ""
    """Project name at Weights & Biases (extra `wandb`); empty: off."""

    def __post_init__(self) -> None:
        _require(self, "log", every=1, trace=0)


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to train: all sections of the config."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    dpo: DpoConfig = field(default_factory=DpoConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        lora = self.lora if self.lora.rank else None
        if self.model.lora != lora:  # copied from the section, so that functions of a model see it
            object.__setattr__(self, "model", dataclasses.replace(self.model, lora=lora))

    @property
    def needs_norm(self) -> bool:
        """Whether an update needs the norm of all gradients: to clip, or to skip a step that is not finite."""
        return bool(self.optim.clip) or self.train.guard

    @property
    def sequences_together(self) -> int:
        """Consecutive sequences of a step that must be in one micro-batch."""
        return 2 if self.dpo.beta else 1

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """Read a config file. `model.hf` and `data` paths in it are relative to the working directory."""
        path = Path(path)
        data = schema.read(path)
        if "model_type" in data:
            raise ConfigError(
                f"{path}: this is a Hugging Face config without training settings; name it in a config file: "
                f'[model] hf = "{path}"'
            )
        with schema.in_file(path, ConfigError, "a config", data):
            config = cls.from_dict(data)
        if not config.train.run_dir:
            train = dataclasses.replace(config.train, run_dir=f"runs/{path.stem}")
            config = dataclasses.replace(config, train=train)
        return config

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Config:
        if isinstance(model := data.get("model"), dict) and "lora" in model:
            raise ConfigError("unknown field 'model.lora'; LoRA has a separate section, [lora]")
        return schema.build(cls, data)

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = schema.dump(self)
        data["model"].pop("lora", None)  # it has its own section
        return data

    def with_short_warmup(self) -> Config:
        """A copy whose warm-up is not longer than its steps, for runs with fewer steps than the file has."""
        warmup = min(self.optim.warmup, self.train.steps)
        return dataclasses.replace(self, optim=dataclasses.replace(self.optim, warmup=warmup))

    def resolve(self, *, own_model: bool = False) -> Config:
        """A copy with all defaults filled in and all values checked; `own_model`: `[model]` is ignored."""
        if not self.train.run_dir:
            raise ConfigError("train.run_dir is missing: set the directory for the run")
        if self.optim.warmup > self.train.steps:
            raise ConfigError(
                f"optim.warmup = {self.optim.warmup} is longer than train.steps = {self.train.steps}; "
                f"use {self.train.steps} or less"
            )
        data = self.data
        if not data.tokenizer:
            from fourfold.model.hf import hf_folder

            own = hf_folder(self.model.hf) / "tokenizer.json" if self.model.hf else None
            scratch = own is None or (self.model.init == "random" and not own.is_file())
            data = dataclasses.replace(data, tokenizer="bytes" if scratch else str(own))
        model = dataclasses.replace(self.model, init="random") if own_model else self.model.resolve()
        return dataclasses.replace(self, model=model, data=data)


def nearest_divisor(total: int, target: int) -> int:
    """The divisor of `total` nearest to `target` (the smaller of two equally near ones)."""
    small = [d for d in range(1, math.isqrt(total) + 1) if total % d == 0]
    return min({d for s in small for d in (s, total // s)}, key=lambda d: (abs(d - target), d))


def _require(section: Any, name: str, **least: int) -> None:
    """Check that all numbers of a section are finite, and that the named ones are not below their minimum."""
    defaults = {f.name: f.default for f in dataclasses.fields(section)}
    for key, default in defaults.items():
        value = getattr(section, key)
        if isinstance(value, float) and not math.isfinite(value):
            hint = "" if default is dataclasses.MISSING else f"; the default is {default}"
            raise ConfigError(f"{name}.{key} = {value} must be a finite number{hint}")
        if key in least and value < least[key]:
            what = "is missing" if value == default else f"= {value} must be at least {least[key]}"
            raise ConfigError(f"{name}.{key} {what}")
        most = MOST.get(f"{name}.{key}", MOST_COUNT)
        if isinstance(value, int) and abs(value) > most:
            raise ConfigError(f"{name}.{key} = {value} must be at most {most}")
        if isinstance(value, float) and abs(value) > MOST_NUMBER:
            raise ConfigError(f"{name}.{key} = {value:g} must be at most {MOST_NUMBER:g}")
