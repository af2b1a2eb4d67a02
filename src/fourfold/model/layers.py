"""Building blocks of the models: rotary embedding, norms, the attention part and the MLP part, embedding and head.

A block is two parts, attention and MLP, each a residual branch with its norms. A part is a unit of sharding, so its norms,
matrices and residual sum belong to it. `ModelConfig.block` says where the norms are (f: the branch, s: `residual_scale`):

    pre               x + s f(norm(x))                  GPT-2, Llama, Mistral, Qwen, Phi-3, …
    post              norm(x + s f(x))                  BERT
    output            x + s out_norm(f(x))              OLMo 2
    sandwich          x + s out_norm(f(norm(x)))        Gemma 2, Gemma 3, GLM-4
    parallel          x + s attn(norm(x)) + s mlp(norm'(x))       GPT-NeoX
    parallel-shared   h = norm(x);  x + s attn(h) + s mlp(h)      Cohere

In a parallel block the attention part returns (what feeds the MLP, the residual sum so far), and the MLP part adds to it.

Letters: B sequences, T tokens of a sequence, D hidden, H heads, K key heads, E width of a head, R rotary dimensions, F width of
the MLP, V vocabulary. Weights are [outputs, inputs] as in torch. q, k and v are one matrix with rows [H·E | K·E | K·E]; gate and
up of a gated MLP are one matrix with rows [F | F].
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.config import ModelConfig, RopeScaling
from fourfold.model.adapter import LoraLinear
from fourfold.model.attention import Documents, blocked_attention, document_attention
from fourfold.model.fused import embed_qk, gated, rotate, soft_cap
from fourfold.model.head_loss import IGNORE, ChunkedLoss, chunked_loss

__all__ = [
    "IGNORE",
    "MLP",
    "Attention",
    "Block",
    "Embedding",
    "Head",
    "PerHeadNorm",
    "PlusOneNorm",
    "Positions",
    "Rotary",
    "TokenLoss",
    "TokenTypes",
    "activate",
    "make_norm",
]


class Rotary(nn.Module):
    """Tables of the rotary embedding, shared by the blocks of a model: pairs (e, e + R/2) are rotated by position · frequency.

    cos, sin [T, R]; computed in fp64, kept in fp32 (fp64 for fp64 models), rotation done in that type.
    """

    def __init__(self, dim: int, positions: int, theta: float, scaling: RopeScaling | None):
        super().__init__()
        self.dim, self.positions, self.theta, self.scaling = dim, positions, theta, scaling
        empty = torch.empty(0, dim)
        self.register_buffer("cos", empty, persistent=False)
        self.register_buffer("sin", empty.clone(), persistent=False)
        self.cos: Tensor
        self.sin: Tensor

    def materialize(self, device: torch.device, dtype: torch.dtype) -> None:
        """Compute the tables; called once the module has left the meta device."""
        frequency, scale = _frequencies(self.dim, self.theta, self.scaling, self.positions)
        angle = torch.outer(torch.arange(self.positions, dtype=torch.float64, device="cpu"), frequency).repeat(1, 2)
        table = torch.float64 if dtype == torch.float64 else torch.float32
        self.cos = (angle.cos() * scale).to(device, table)
        self.sin = (angle.sin() * scale).to(device, table)

    def forward(self, x_bhte: Tensor) -> Tensor:
        return rotate(x_bhte, *self.tables(x_bhte.shape[-2]))

    def tables(self, tokens: int, documents: Documents | None = None) -> tuple[Tensor, Tensor]:
        """The rows of cos and sin for `tokens` positions [T, R]; with documents, of positions within them [B, T, R]."""
        if documents is None:
            return self.cos[:tokens], self.sin[:tokens]
        return self.cos[documents.positions], self.sin[documents.positions]


def _frequencies(dim: int, theta: float, scaling: RopeScaling | None, positions: int) -> tuple[Tensor, float]:
    """Radians per position of each pair, and the scale of the tables (1 unless yarn or longrope)."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
    plain = theta**-exponent
    match scaling:
        case None:
            return plain, 1.0
        case RopeScaling(kind="linear"):
            return plain / scaling.factor, 1.0
        case RopeScaling(kind="llama3"):
            turns = scaling.original_positions * plain / (2 * math.pi)  # rotations over the original context
            span = scaling.high_freq_factor - scaling.low_freq_factor
            keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
            return plain * (keep + (1 - keep) / scaling.factor), 1.0
        case RopeScaling(kind="longrope"):
            long = positions > scaling.original_positions
            factors = torch.tensor(
                scaling.long_factor if long else scaling.short_factor, dtype=torch.float64, device="cpu"
            )
            return plain / factors, _table_scale(scaling)
        case _:  # yarn
            low, high = (
                dim * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))
                for turns in (scaling.beta_fast, scaling.beta_slow)
            )
            if scaling.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, dim - 1)
            pair = torch.arange(dim // 2, dtype=torch.float64, device="cpu")
            keep = 1 - ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
            return plain * (keep + (1 - keep) / scaling.factor), _table_scale(scaling)


def _table_scale(s: RopeScaling) -> float:
    """Scale of cos and sin by yarn or longrope."""
    if s.attention_factor:
        return s.attention_factor
    if s.factor <= 1:
        return 1.0
    if s.kind == "longrope":
        return math.sqrt(1 + math.log(s.factor) / math.log(s.original_positions))
    log = 0.1 * math.log(s.factor)
    if s.mscale and s.mscale_all_dim:
        return (s.mscale * log + 1) / (s.mscale_all_dim * log + 1)
    return log + 1.0


class PlusOneNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight (Gemma)."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.rms_norm(x, self.normalized_shape, None, self.eps)
        return torch.addcmul(h, h, self.weight)


class PerHeadNorm(nn.Module):
    """A norm over each head of features [.., H·E], with a separate weight per head: [H·E]."""

    def __init__(self, width: int, head_dim: int, eps: float, *, centred: bool):
        super().__init__()
        self.head_dim, self.eps, self.centred = head_dim, eps, centred
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        heads, dims = x.unflatten(-1, (-1, self.head_dim)), (self.head_dim,)
        normal = F.layer_norm(heads, dims, eps=self.eps) if self.centred else F.rms_norm(heads, dims, eps=self.eps)
        return normal.flatten(-2) * self.weight


def make_norm(m: ModelConfig, width: int = 0) -> nn.Module:
    """The model's kind of norm over the last dim."""
    width = width or m.hidden
    if m.norm == "layer":
        return nn.LayerNorm(width, eps=m.norm_eps, bias=bool(m.norm_bias))
    return (PlusOneNorm if m.norm_plus_one else nn.RMSNorm)(width, eps=m.norm_eps)


def _make_qk_norm(m: ModelConfig, heads: int) -> nn.Module | None:
    match m.qk_norm:
        case "all":
            return make_norm(m, heads * m.head_dim)
        case "per-head":
            return PerHeadNorm(heads * m.head_dim, m.head_dim, m.norm_eps, centred=m.norm == "layer")
        case _:
            return make_norm(m, m.head_dim) if m.qk_norm else None


class _Part(nn.Module):
    """A residual branch with its norms; subclasses compute the branch up to its last matmul."""

    def __init__(self, m: ModelConfig, *, norm: bool = True):
        super().__init__()
        self.norm = make_norm(m) if norm and m.block != "output" else None
        self.out_norm = make_norm(m) if m.block in ("output", "sandwich") else None
        self.post_norm = m.block == "post"
        self.parallel = m.block in ("parallel", "parallel-shared")
        self.dropout = m.dropout or 0.0
        self.residual_scale = m.residual_scale

    def before_projection(self, h_btd: Tensor, documents: Documents | None = None) -> Tensor:
        raise NotImplementedError

    @property
    def last(self) -> nn.Module:
        """The linear that projects back to the residual stream."""
        raise NotImplementedError

    def forward(self, x_btd: Tensor, sum_btd: Tensor | None = None, *, documents: Documents | None = None) -> Any:
        """The residual stream after this part; parallel attention: what feeds the MLP, and the residual sum."""
        h_btd = self.feed(x_btd)
        return self._close(x_btd, h_btd, self.before_projection(h_btd, documents), sum_btd)

    def again(self, x_btd: Tensor, sum_btd: Tensor | None = None, *, documents: Documents | None = None) -> Any:
        """`forward` for recomputation: its graph is needed, its result is not.

        The last matmul is skipped, unless a norm follows it.
        """
        if self.post_norm or self.out_norm is not None or not isinstance(self.last, nn.Linear):
            return self(x_btd, sum_btd, documents=documents)
        h_btd = self.feed(x_btd)
        hidden = self.before_projection(h_btd, documents)
        low = self.last.adapter.low(hidden) if isinstance(self.last, LoraLinear) else None  # read by B's gradient
        with _Unread():
            return self._close(x_btd, h_btd, hidden, sum_btd, low)

    def feed(self, x_btd: Tensor) -> Tensor:
        """The input of the branch."""
        norm = self.norm
        return x_btd if norm is None or self.post_norm else norm(x_btd)

    def _close(
        self, x_btd: Tensor, h_btd: Tensor, hidden: Tensor, sum_btd: Tensor | None, low: Tensor | None = None
    ) -> Any:
        """The last matmul and the residual sum. `low`: its adapter's `low(hidden)`, if already computed."""
        y_btd = self.last(hidden) if low is None else self.last(hidden, low)
        if self.out_norm is not None:
            y_btd = self.out_norm(y_btd)
        if self.dropout:
            y_btd = F.dropout(y_btd, self.dropout, self.training)
        return self._join(x_btd, h_btd, y_btd, sum_btd)

    def _join(self, x_btd: Tensor, h_btd: Tensor, y_btd: Tensor, sum_btd: Tensor | None) -> Any:
        x_btd = self.add(x_btd, y_btd)
        return self.norm(x_btd) if self.post_norm and self.norm is not None else x_btd

    def add(self, x_btd: Tensor, y_btd: Tensor) -> Tensor:
        return x_btd + y_btd if self.residual_scale == 1 else torch.add(x_btd, y_btd, alpha=self.residual_scale)


class _Unread(TorchDispatchMode):
    """Matmuls and sums return uninitialised results; the autograd graph is unchanged."""

    _left_out = (
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_mm.default,
        torch.ops.aten.add.Tensor,
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._left_out:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.add.Tensor:
            return torch.empty_like(args[0])
        if func is torch.ops.aten._scaled_mm.default:  # a, b, two scales, bias, scale of the result, type of the result
            return args[0].new_empty(args[0].shape[0], args[1].shape[1], dtype=args[6])
        a, b = args[-2:]
        return a.new_empty(a.shape[0], b.shape[1])


class Attention(_Part):
    """Softmax attention over all earlier tokens, a window of them, those of the same document, or (bert) all tokens.

    Uses torch's fused kernel; windows, soft-capped scores and documents use attention.py.
    """

    takes_documents = True

    def __init__(self, m: ModelConfig, rotary: Rotary | None, window: int = 0):
        super().__init__(m)
        self.widths = (m.heads * m.head_dim, m.kv_heads * m.head_dim, m.kv_heads * m.head_dim)
        self.head_dim, self.grouped, self.causal = m.head_dim, m.kv_heads != m.heads, m.causal
        self.window, self.softcap = window, m.attn_softcap
        self.scale: float | None = m.attn_scale or None
        self.shares_norm = m.block == "parallel-shared"
        self.qkv: nn.Module = nn.Linear(m.hidden, sum(self.widths), bias=bool(m.qkv_bias))
        self.q_norm, self.k_norm = _make_qk_norm(m, m.heads), _make_qk_norm(m, m.kv_heads)
        self.norms_heads = m.qk_norm is True  # one weight for all heads, of a head's width
        self.norms_keys = True  # false where the projection does it (on a grid with fewer key heads than columns)
        self.rotary = rotary
        self.out: nn.Module = nn.Linear(self.widths[0], m.hidden, bias=bool(m.out_bias))

    @property
    def last(self) -> nn.Module:
        return self.out

    def before_projection(self, h_btd: Tensor, documents: Documents | None = None) -> Tensor:
        q_bhte, k_bkte, v_bkte = self.heads(self.qkv(h_btd), documents)
        return self.attend(q_bhte, k_bkte, v_bkte, documents).transpose(1, 2).flatten(-2)

    def attend(self, q_bhte: Tensor, k_bkte: Tensor, v_bkte: Tensor, documents: Documents | None = None) -> Tensor:
        scale = self.scale or self.head_dim**-0.5
        if documents is not None:
            assert self.causal, "documents need causal attention"
            return document_attention(
                q_bhte, k_bkte, v_bkte, documents, scale=scale, cap=self.softcap, window=self.window
            )
        if self.softcap or 0 < self.window < q_bhte.shape[2]:
            return blocked_attention(
                q_bhte, k_bkte, v_bkte, scale=scale, cap=self.softcap, window=self.window, causal=self.causal
            )
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(
            q_bhte,
            k_bkte,
            v_bkte,
            dropout_p=dropout,
            is_causal=self.causal,
            scale=self.scale,
            enable_gqa=self.grouped,
        )

    def heads(self, qkv: Tensor, documents: Documents | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, H or K, T, E], with norms and rotary embedding where the layer has them."""
        rotary = self.rotary
        if rotary is not None and self.q_norm is None:
            positions = None if documents is None else documents.positions
            return embed_qk(qkv, self.widths, self.head_dim, *rotary.tables(qkv.shape[1]), positions)
        q_btf, k_btf, v_btf = qkv.split(self.widths, dim=-1)
        if self.q_norm is not None and not self.norms_heads:
            q_btf = self.q_norm(q_btf)
            k_btf = self.k_norm(k_btf) if self.k_norm is not None and self.norms_keys else k_btf
        q_bthe, k_bthe, v_bthe = (p.unflatten(-1, (-1, self.head_dim)) for p in (q_btf, k_btf, v_btf))
        if self.norms_heads and self.q_norm is not None and self.k_norm is not None:
            q_bthe, k_bthe = self.q_norm(q_bthe), self.k_norm(k_bthe)
        q, k, v = (t.transpose(1, 2) for t in (q_bthe, k_bthe, v_bthe))
        if self.rotary is None:
            return q, k, v
        cos, sin = self.rotary.tables(q.shape[2], documents)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _join(self, x_btd: Tensor, h_btd: Tensor, y_btd: Tensor, sum_btd: Tensor | None) -> Any:
        if not self.parallel:
            return super()._join(x_btd, h_btd, y_btd, sum_btd)
        return (h_btd if self.shares_norm else x_btd), self.add(x_btd, y_btd)


def activate(kind: str, is_gated: bool, h: Tensor) -> Tensor:
    """SiLU or GELU (exact, or by tanh) of h; gated: of its first half, times the second."""
    if is_gated:
        return gated(h, kind)
    return F.silu(h) if kind == "silu" else F.gelu(h, approximate="tanh" if kind == "gelu_tanh" else "none")


class MLP(_Part):
    """Up to the width of the MLP, activation, and down again."""

    def __init__(self, m: ModelConfig):
        super().__init__(m, norm=m.block != "parallel-shared")
        assert m.activation is not None
        self.activation, self.gated = m.activation, bool(m.gated)
        self.up: nn.Module = nn.Linear(m.hidden, (2 if m.gated else 1) * m.ffn, bias=bool(m.mlp_bias))
        self.down: nn.Module = nn.Linear(m.ffn, m.hidden, bias=bool(m.mlp_bias))

    @property
    def last(self) -> nn.Module:
        return self.down

    def before_projection(self, h_btd: Tensor, documents: Documents | None = None) -> Tensor:
        return activate(self.activation, self.gated, self.up(h_btd))

    def _join(self, x_btd: Tensor, h_btd: Tensor, y_btd: Tensor, sum_btd: Tensor | None) -> Any:
        """In a parallel block that is given no residual sum: the branch's output, to be added to it."""
        if not self.parallel:
            return super()._join(x_btd, h_btd, y_btd, sum_btd)
        if sum_btd is not None:
            return self.add(sum_btd, y_btd)
        return y_btd if self.residual_scale == 1 else y_btd * self.residual_scale


class Block(nn.Module):
    """One layer of the model: attention, then MLP."""

    def __init__(self, m: ModelConfig, rotary: Rotary | None, window: int = 0):
        super().__init__()
        self.attn = Attention(m, rotary, window)
        self.mlp = MLP(m)

    def forward(self, x_btd: Tensor, documents: Documents | None = None) -> Tensor:
        out = self.attn(x_btd, documents=documents)
        y_btd: Tensor = self.mlp(*out) if isinstance(out, tuple) else self.mlp(out)
        return y_btd


class Positions(nn.Embedding):
    """Learned positions: one row per position in the sequence of token ids [B, T], or in the document."""

    def forward(self, tokens_bt: Tensor, documents: Documents | None = None) -> Tensor:
        return self.weight[: tokens_bt.shape[1]] if documents is None else F.embedding(documents.positions, self.weight)


class TokenTypes(nn.Embedding):
    """Token types; all tokens have the first type."""

    def forward(self, tokens_bt: Tensor) -> Tensor:
        return self.weight[0]


class Embedding(nn.Module):
    """Token ids [B, T] to the residual stream [B, T, D]: tokens, learned positions (gpt, bert), token types and norm (bert).

    `embed_scale`, rounded to the dtype of the table, multiplies its rows, as in Gemma.
    """

    takes_documents = True

    def __init__(self, m: ModelConfig):
        super().__init__()
        self.tokens: nn.Module = nn.Embedding(m.vocab, m.hidden)
        self.positions: nn.Module | None = Positions(m.positions, m.hidden) if m.learned_positions else None
        self.types: nn.Module | None = TokenTypes(m.token_types, m.hidden) if m.token_types else None
        self.norm = make_norm(m) if m.masked_lm else None
        self.scale = m.embed_scale
        self.dropout = m.dropout or 0.0

    def forward(self, tokens_bt: Tensor, *, documents: Documents | None = None) -> Tensor:
        x_btd = self.tokens(tokens_bt)
        if self.scale != 1:
            x_btd = x_btd * torch.tensor(self.scale, dtype=x_btd.dtype, device="cpu").item()
        if self.positions is not None:
            x_btd = x_btd + self.positions(tokens_bt, documents)
        if self.types is not None:
            x_btd = x_btd.add_(self.types(tokens_bt))
        if self.norm is not None:
            x_btd = self.norm(x_btd)
        return F.dropout(x_btd, self.dropout, self.training)


class TokenLoss(nn.Module):
    """Sum of the tokens' cross entropies from logits [B, T, V] and targets [B, T], in fp32 or fp64; IGNORE contributes 0.

    `per_token`: return the cross entropies [B, T] instead, for losses that are not this sum.
    """

    per_token = False

    def forward(self, logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
        logits_nv = logits_btv.flatten(0, 1)
        logits_nv = logits_nv if logits_nv.dtype == torch.float64 else logits_nv.float()
        reduction = "none" if self.per_token else "sum"
        loss = F.cross_entropy(logits_nv, targets_bt.flatten(), ignore_index=IGNORE, reduction=reduction)
        return loss.view_as(targets_bt) if self.per_token else loss

    def in_chunks(self, h_btd: Tensor, proj: Any, targets_bt: Tensor, how: ChunkedLoss) -> Tensor:
        """The same from what the projection reads, without all logits at once."""
        h_nd, targets_n = h_btd.flatten(0, 1), targets_bt.flatten()
        loss = chunked_loss(h_nd, proj.weight, proj.bias, targets_n, how, per_token=self.per_token)
        return loss.view_as(targets_bt) if self.per_token else loss


class Head(nn.Module):
    """The residual stream to logits [B, T, V], or with targets [B, T] to the sum of the tokens' cross entropies.

    The projection's weight is the embedding's when tied. `logit_scale` multiplies the input of the projection, which is narrower
    than the logits.
    """

    def __init__(self, m: ModelConfig):
        super().__init__()
        self.dense: nn.Module | None = nn.Linear(m.hidden, m.hidden) if m.masked_lm else None
        self.norm = make_norm(m)
        self.proj: nn.Module = nn.Linear(m.hidden, m.vocab, bias=m.masked_lm)
        self.scale, self.softcap = m.logit_scale, m.logit_softcap
        self.tied = bool(m.tie)
        self.loss: Any = TokenLoss()
        self.chunked: ChunkedLoss | None = None
        """How to compute the loss a chunk of tokens at a time; None: all logits at once."""

    def forward(self, x_btd: Tensor, targets_bt: Tensor | None = None) -> Tensor:
        if targets_bt is not None and self.chunked is not None:
            return self.loss.in_chunks(self.feed(x_btd), self.proj, targets_bt, self.chunked)
        logits_btv = self.cap(self.proj(self.feed(x_btd)))
        if targets_bt is None:
            return logits_btv
        return self.loss(logits_btv, targets_bt)

    def feed(self, x_btd: Tensor) -> Tensor:
        """The input of the projection."""
        if self.dense is not None:
            x_btd = F.gelu(self.dense(x_btd))
        h_btd: Tensor = self.norm(x_btd)
        return h_btd if self.scale == 1 else h_btd * self.scale

    def cap(self, logits: Tensor) -> Tensor:
        return soft_cap(logits, self.softcap) if self.softcap else logits
