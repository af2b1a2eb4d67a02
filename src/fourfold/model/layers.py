"""Building blocks of the models: rotary positions, norms, the attention part and the MLP part, embedding and head.

A block is two parts, each a residual branch with the norm that feeds it: pre-norm `x + f(norm(x))` (GPT, Llama) or
post-norm `norm(x + f(x))` (BERT). A part is a unit of sharding, so norm, matrices and residual lie together in it.

Letters: B sequences, T tokens of a sequence, D hidden, H heads, K key heads, E width of a head, F width of the MLP, V
vocabulary. Weights are [outputs, inputs] as in torch. q, k and v are one matrix with rows [H·E | K·E | K·E]; gate and up of
a gated MLP are one matrix with rows [F | F].
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.config import ModelConfig, RopeScaling
from fourfold.model.fused import gated_silu, rotate, turn

__all__ = [
    "IGNORE",
    "MLP",
    "Attention",
    "Block",
    "Embedding",
    "Head",
    "Positions",
    "Rotary",
    "TokenLoss",
    "TokenTypes",
    "activation",
    "make_norm",
]

IGNORE = -100
"""Target of a token that is not predicted."""


class Rotary(nn.Module):
    """Tables that turn pairs (e, e + E/2) of every head by position · frequency; shared by all blocks of a model.

    cos, sin [T, E]; computed in fp64, kept in fp32 (fp64 for fp64 models), rotation done in that type.
    """

    def __init__(self, head_dim: int, positions: int, theta: float, scaling: RopeScaling | None):
        super().__init__()
        self.head_dim, self.positions, self.theta, self.scaling = head_dim, positions, theta, scaling
        empty = torch.empty(0, head_dim)
        self.register_buffer("cos", empty, persistent=False)
        self.register_buffer("sin", empty.clone(), persistent=False)
        self.cos: Tensor
        self.sin: Tensor

    def materialize(self, device: torch.device, dtype: torch.dtype) -> None:
        """Compute the tables; called once the module has left the meta device."""
        frequency, scale = _frequencies(self.head_dim, self.theta, self.scaling)
        angle = torch.outer(torch.arange(self.positions, dtype=torch.float64, device="cpu"), frequency).repeat(1, 2)
        table = torch.float64 if dtype == torch.float64 else torch.float32
        self.cos = (angle.cos() * scale).to(device, table)
        self.sin = (angle.sin() * scale).to(device, table)

    def forward(self, x_bhte: Tensor) -> Tensor:
        return rotate(x_bhte, *self.tables(x_bhte.shape[-2]))

    def tables(self, tokens: int) -> tuple[Tensor, Tensor]:
        """The rows of cos and sin for this many tokens."""
        return self.cos[:tokens], self.sin[:tokens]


def _frequencies(dim: int, theta: float, scaling: RopeScaling | None) -> tuple[Tensor, float]:
    """Radians per position for every pair, and the scale of the tables (1 but for yarn)."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
    plain = theta**-exponent
    match scaling:
        case None:
            return plain, 1.0
        case RopeScaling(kind="linear"):
            return plain / scaling.factor, 1.0
        case RopeScaling(kind="llama3"):
            turns = scaling.original_positions * plain / (2 * math.pi)  # over the original context
            span = scaling.high_freq_factor - scaling.low_freq_factor
            keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
            return plain * (keep + (1 - keep) / scaling.factor), 1.0
        case _:  # yarn
            low, high = (
                dim * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))
                for turns in (scaling.beta_fast, scaling.beta_slow)
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
            pair = torch.arange(dim // 2, dtype=torch.float64, device="cpu")
            keep = 1 - ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
            return plain * (keep + (1 - keep) / scaling.factor), 0.1 * math.log(scaling.factor) + 1.0


def make_norm(m: ModelConfig, width: int = 0) -> nn.Module:
    """LayerNorm (gpt, bert) or RMSNorm (llama) over the last dim."""
    kind = nn.RMSNorm if m.family == "llama" else nn.LayerNorm
    return kind(width or m.hidden, eps=m.norm_eps)


class _Part(nn.Module):
    """A residual branch with its norm; subclasses compute the branch, up to its last product."""

    def __init__(self, m: ModelConfig):
        super().__init__()
        self.norm = make_norm(m)
        self.post_norm = m.family == "bert"
        self.dropout = m.dropout or 0.0

    def inner(self, x_btd: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def last(self) -> nn.Module:
        """The linear that leads back to the residual stream."""
        raise NotImplementedError

    def forward(self, x_btd: Tensor) -> Tensor:
        h_btd = self.last(self.inner(x_btd if self.post_norm else self.norm(x_btd)))
        h_btd = x_btd + F.dropout(h_btd, self.dropout, self.training)
        return self.norm(h_btd) if self.post_norm else h_btd

    def again(self, x_btd: Tensor) -> Tensor:
        """`forward` for the sake of its graph (recomputation): nobody reads what it returns.

        So the last product need not be computed, unless a norm comes after it.
        """
        if self.post_norm or not isinstance(self.last, nn.Linear):
            return self(x_btd)
        h_btd = self.inner(self.norm(x_btd))
        with _Unread():
            return x_btd + F.dropout(self.last(h_btd), self.dropout, self.training)


class _Unread(TorchDispatchMode):
    """Products and sums leave their results as memory happens to be; what autograd records of them is as always."""

    _left_out = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.add.Tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._left_out:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.add.Tensor:
            return torch.empty_like(args[0])
        a, b = args[-2:]
        return a.new_empty(a.shape[0], b.shape[1])


class Attention(_Part):
    """Softmax attention over all earlier tokens (gpt, llama) or all tokens (bert), through torch's fused kernel."""

    def __init__(self, m: ModelConfig, rotary: Rotary | None):
        super().__init__(m)
        self.widths = (m.heads * m.head_dim, m.kv_heads * m.head_dim, m.kv_heads * m.head_dim)
        self.head_dim, self.grouped, self.causal = m.head_dim, m.kv_heads != m.heads, m.family != "bert"
        self.qkv: nn.Module = nn.Linear(m.hidden, sum(self.widths), bias=bool(m.qkv_bias))
        self.q_norm = make_norm(m, m.head_dim) if m.qk_norm else None
        self.k_norm = make_norm(m, m.head_dim) if m.qk_norm else None
        self.rotary = rotary
        self.out: nn.Module = nn.Linear(self.widths[0], m.hidden, bias=m.family != "llama")

    @property
    def last(self) -> nn.Module:
        return self.out

    def inner(self, x_btd: Tensor) -> Tensor:
        q, k, v = self.heads(self.qkv(x_btd))
        dropout = self.dropout if self.training else 0.0
        o_bhte = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=self.causal, enable_gqa=self.grouped
        )
        return o_bhte.transpose(1, 2).flatten(-2)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, H or K, T, E], normed and turned where the model does that."""
        if self.rotary is not None and self.q_norm is None:
            return turn(qkv, self.widths, *self.rotary.tables(qkv.shape[1]))
        parts = qkv.split(self.widths, dim=-1)
        q_bthe, k_bthe, v_bthe = (p.unflatten(-1, (-1, self.head_dim)) for p in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q_bthe, k_bthe = self.q_norm(q_bthe), self.k_norm(k_bthe)
        q, k, v = (t.transpose(1, 2) for t in (q_bthe, k_bthe, v_bthe))
        return (q, k, v) if self.rotary is None else (self.rotary(q), self.rotary(k), v)


def activation(family: str, h: Tensor) -> Tensor:
    """GELU (gpt: tanh form, bert: exact) or the gated SiLU of llama."""
    if family == "llama":
        return gated_silu(h)
    return F.gelu(h, approximate="tanh" if family == "gpt" else "none")


class MLP(_Part):
    """Up to the width of the MLP, activation, and down again."""

    def __init__(self, m: ModelConfig):
        super().__init__(m)
        self.family = m.family
        gated = m.family == "llama"
        self.up: nn.Module = nn.Linear(m.hidden, (2 if gated else 1) * m.ffn, bias=not gated)
        self.down: nn.Module = nn.Linear(m.ffn, m.hidden, bias=not gated)

    @property
    def last(self) -> nn.Module:
        return self.down

    def inner(self, x_btd: Tensor) -> Tensor:
        return activation(self.family, self.up(x_btd))


class Block(nn.Module):
    """One layer of the model: attention, then MLP."""

    def __init__(self, m: ModelConfig, rotary: Rotary | None):
        super().__init__()
        self.attn = Attention(m, rotary)
        self.mlp = MLP(m)

    def forward(self, x_btd: Tensor) -> Tensor:
        return self.mlp(self.attn(x_btd))


class Positions(nn.Embedding):
    """Learned positions: a row for every place in the sequences of token ids [B, T]."""

    def forward(self, tokens_bt: Tensor) -> Tensor:
        return self.weight[: tokens_bt.shape[1]]


class TokenTypes(nn.Embedding):
    """Types of tokens: all of ours are of the first."""

    def forward(self, tokens_bt: Tensor) -> Tensor:
        return self.weight[0]


class Embedding(nn.Module):
    """Token ids [B, T] to the residual stream [B, T, D]: tokens, learned positions (gpt, bert), token types and norm (bert)."""

    def __init__(self, m: ModelConfig):
        super().__init__()
        self.tokens: nn.Module = nn.Embedding(m.vocab, m.hidden)
        self.positions: nn.Module | None = Positions(m.positions, m.hidden) if m.family != "llama" else None
        self.types: nn.Module | None = TokenTypes(m.token_types, m.hidden) if m.token_types else None
        self.norm = make_norm(m) if m.family == "bert" else None
        self.dropout = m.dropout or 0.0

    def forward(self, tokens_bt: Tensor) -> Tensor:
        x_btd = self.tokens(tokens_bt)
        if self.positions is not None:
            x_btd = x_btd + self.positions(tokens_bt)
        if self.types is not None:
            x_btd = x_btd.add_(self.types(tokens_bt))
        if self.norm is not None:
            x_btd = self.norm(x_btd)
        return F.dropout(x_btd, self.dropout, self.training)


class TokenLoss(nn.Module):
    """Sum of the tokens' cross entropies from logits [B, T, V] and targets [B, T], at least fp32; IGNORE counts for nothing."""

    def forward(self, logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
        logits_nv = logits_btv.flatten(0, 1)
        logits_nv = logits_nv if logits_nv.dtype == torch.float64 else logits_nv.float()
        return F.cross_entropy(logits_nv, targets_bt.flatten(), ignore_index=IGNORE, reduction="sum")


class Head(nn.Module):
    """The residual stream to logits [B, T, V], or with targets [B, T] to the sum of the tokens' cross entropies.

    The projection's weight is the embedding's when tied.
    """

    def __init__(self, m: ModelConfig):
        super().__init__()
        bert = m.family == "bert"
        self.dense: nn.Module | None = nn.Linear(m.hidden, m.hidden) if bert else None
        self.norm = make_norm(m)
        self.proj: nn.Module = nn.Linear(m.hidden, m.vocab, bias=bert)
        self.tied = bool(m.tie)
        self.loss: nn.Module = TokenLoss()

    def forward(self, x_btd: Tensor, targets_bt: Tensor | None = None) -> Tensor:
        if self.dense is not None:
            x_btd = F.gelu(self.dense(x_btd))
        logits_btv = self.proj(self.norm(x_btd))
        if targets_bt is None:
            return logits_btv
        return self.loss(logits_btv, targets_bt)
