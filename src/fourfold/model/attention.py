"""Softmax attention over a sliding window, with soft-capped scores, or within documents: cases that torch's fused kernel does not
support.

    scores   s = scale · q kᵀ; with a cap, cap · tanh(s / cap)
    mask     causal: query i attends to keys j ≤ i; with a window w, to i - w < j ≤ i (w keys including its own); with
             documents, to j ≥ starts[i], the first token of its document
    output   softmax(s) v

Queries are processed in blocks, each with the keys it can attend to. Only one block's scores exist at a time, and a window of w
costs T · w instead of T². Saved for the backward: q, k, v, the output and each query's log-sum-exp; scores are recomputed.
Softmax, tanh and the sums of key and value gradients are computed in fp32 (fp64 for fp64 inputs).

[Note: documents]
Several documents may share the T tokens of a sequence (`data.packing = "documents"`); `Documents` holds their boundaries. They
follow from the data alone, so every rank of every stage computes them locally and nothing is sent. On CPUs documents are
processed one by one, which costs Σ L² for documents of L tokens instead of T². On GPUs torch's variable-length kernel has the
same cost, for 16-bit types without soft-capping; other types use the mask above and cost T².

Forward and backward are registered as torch custom operators: selective recomputation saves the output of a single operator, and
torch.compile does not trace into it.

Letters: B sequences, T tokens, H heads, K key heads, G = H / K, E width of a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.kernels import operator

__all__ = ["Documents", "blocked_attention", "document_attention"]

SCORES = 1 << 24
"""Maximum number of scores in a block, unless the block would have fewer than `FEWEST` queries."""
FEWEST = 64
WIDTHS = range(8, 257, 8)
"""Head widths that torch's variable-length kernel supports."""
GROUPED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
"""Whether torch's kernel supports fewer key heads than query heads."""


class Documents(NamedTuple):
    """The documents of a micro-batch of B sequences with T tokens: [Note: documents]."""

    starts: Tensor
    """[B, T] int64: for each token, the position in the sequence where its document begins."""
    positions: Tensor
    """[B, T] int64: the position of each token within its document."""
    bounds: Tensor
    """int32: offsets of the documents in all B · T tokens, and the end of the last one (cu_seqlens)."""
    longest: int
    """Upper bound on a document's length in tokens: a power of two, or T."""

    @classmethod
    def of(cls, starts: Tensor) -> Documents:
        """From `starts`, on the CPU."""
        tokens = starts.shape[1]
        positions = torch.arange(tokens) - starts
        first = torch.nonzero(positions.flatten() == 0)[:, 0]
        bounds = torch.cat((first, torch.tensor([starts.numel()]))).int()
        longest = int(positions.max()) + 1
        return cls(starts, positions, bounds, min(tokens, 1 << (longest - 1).bit_length()))

    def to(self, send: Callable[[Tensor], Tensor]) -> Documents:
        """A copy on another device; `send` copies one tensor."""
        return Documents(send(self.starts), send(self.positions), send(self.bounds), self.longest)


def document_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, *, scale: float, cap: float = 0.0, window: int = 0
) -> Tensor:
    """Causal attention within documents: q [B, H, T, E], k and v [B, K, T, E] to [B, H, T, E]."""
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and not cap and q.shape[-1] in WIDTHS:
        return _variable_length(q, k, v, documents, scale, window)
    return blocked_attention(q, k, v, scale=scale, cap=cap, window=window, starts=documents.starts)


def _kernel() -> Any:
    """Torch's kernel, imported when it is first needed: it brings the compiler with it, which takes as long as torch itself."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def _variable_length(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float, window: int) -> Tensor:
    """By torch's variable-length kernel, which takes all tokens in one dim: [B · T, H, E]."""
    rows, more = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)], {}
    varlen_attn = _kernel()
    if q.shape[1] != k.shape[1]:
        if GROUPED:
            more = {"enable_gqa": True}
        else:
            rows[1:] = [x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in rows[1:]]
    at, longest = documents.bounds, documents.longest
    reach = (window - 1 if window else -1, 0)
    out: Tensor = varlen_attn(*rows, at, at, longest, longest, scale=scale, window_size=reach, **more)
    return out.unflatten(0, (q.shape[0], -1)).transpose(1, 2)


def blocked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    cap: float = 0.0,
    window: int = 0,
    causal: bool = True,
    starts: Tensor | None = None,
) -> Tensor:
    """q [B, H, T, E], k and v [B, K, T, E] to [B, H, T, E]. `cap`, `window`: 0 for none. `starts` [B, T]: document starts."""
    out: Tensor = _Attend.apply(q, k, v, starts, scale, cap, window, causal)
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor | None,
        scale: float,
        cap: float,
        window: int,
        causal: bool,
    ) -> Tensor:
        out, log_sum = attend(q, k, v, starts, scale, cap, window, causal)
        ctx.save_for_backward(q, k, v, out, log_sum, starts)
        ctx.options = scale, cap, window, causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *attend_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


def _fake(q: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=_wide(q))


@operator(
    "(Tensor q, Tensor k, Tensor v, Tensor? starts, float scale, float cap, int window, bool causal) -> (Tensor, Tensor)",
    _fake,
    "CompositeExplicitAutograd",
)
def attend(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, scale: float, cap: float, window: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp of each query's scores."""
    out, log_sum = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=_wide(q))
    for block in _blocks(q, starts, window, causal):
        rows, queries, keys = block
        s, _ = _scores(q, k, block, starts, scale, cap, window, causal)
        top = s.logsumexp(-1, keepdim=True)
        p = (s - top).exp_().to(v.dtype)
        out[rows, :, queries] = _by_query(p @ v[rows, :, keys], q.shape[1])
        log_sum[rows, :, queries] = _by_query(top, q.shape[1])[..., 0]
    return out, log_sum


def _fake_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@operator(
    "(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sum, Tensor? starts, float scale, float cap, int window, "
    "bool causal) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
    "CompositeExplicitAutograd",
)
def attend_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    starts: Tensor | None,
    scale: float,
    cap: float,
    window: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    wide, groups = _wide(q), k.shape[1]
    dq = torch.empty_like(q)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    dots = (dy.to(wide) * out).sum(-1, keepdim=True)  # Σ p · dp of every query
    for block in _blocks(q, starts, window, causal):
        rows, queries, keys = block
        s, slope = _scores(q, k, block, starts, scale, cap, window, causal)
        p = s.sub_(_by_group(log_sum[rows, :, queries, None], groups)).exp_()
        dy_block = _by_group(dy[rows, :, queries], groups)
        dv[rows, :, keys] += p.to(v.dtype).mT @ dy_block
        ds = (dy_block @ v[rows, :, keys].mT).to(wide).sub_(_by_group(dots[rows, :, queries], groups)).mul_(p)
        ds = (ds if slope is None else ds.mul_(slope)).mul_(scale).to(q.dtype)
        dq[rows, :, queries] = _by_query(ds @ k[rows, :, keys], q.shape[1])
        dk[rows, :, keys] += ds.mT @ _by_group(q[rows, :, queries], groups)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


Block = tuple[slice, slice, slice]


def _one_by_one(starts: Tensor) -> bool:
    """Whether documents are processed one by one: on CPUs only, since reading `starts` from a GPU would synchronize."""
    return starts.device.type == "cpu"


def _blocks(q: Tensor, starts: Tensor | None, window: int, causal: bool) -> Iterator[Block]:
    """Blocks of queries: the sequences, the queries, and the keys that any of them attends to.

    A block belongs to one document, or covers several, which `_scores` then masks.
    """
    batch, heads, tokens, _ = q.shape
    if starts is None or not _one_by_one(starts):
        yield from _of_documents(slice(0, batch), batch * heads, 0, tokens, window, causal)
        return
    for row, its in enumerate(starts.unbind()):
        bounds = [*its.unique_consecutive().tolist(), tokens]
        for first, last in itertools.pairwise(bounds):
            yield from _of_documents(slice(row, row + 1), heads, first, last, window, causal)


def _of_documents(rows: slice, heads: int, first: int, last: int, window: int, causal: bool) -> Iterator[Block]:
    """The blocks of the tokens [first, last): one document, or a range in all sequences."""
    size = max(FEWEST, SCORES // (heads * min(last - first, 2 * window or last - first)))
    size = min(size, max(FEWEST, window)) if window else size
    for start in range(first, last, size):
        stop = min(start + size, last)
        yield (
            rows,
            slice(start, stop),
            slice(max(first, start - window + 1) if window else first, stop if causal else last),
        )


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[B, H, c, .] to [B, K, G · c, .]: the queries of all heads that share a key head."""
    return x.unflatten(1, (groups, -1)).flatten(2, 3)


def _by_query(x: Tensor, heads: int) -> Tensor:
    """[B, K, G · c, .] to [B, H, c, .]."""
    return x.unflatten(2, (heads // x.shape[1], -1)).flatten(1, 2)


def _scores(
    q: Tensor, k: Tensor, block: Block, starts: Tensor | None, scale: float, cap: float, window: int, causal: bool
) -> tuple[Tensor, Tensor | None]:
    """Scores [B, K, G · c, keys] in fp32 or fp64, -inf where masked, and the derivative of the soft-cap (None: no cap)."""
    (rows, queries, keys), groups, slope = block, k.shape[1], None
    s = (_by_group(q[rows, :, queries], groups) @ k[rows, :, keys].mT).to(_wide(q)).mul_(scale)
    if cap:
        s = s.div_(cap).tanh_()
        slope = 1 - s.square()
        s = s.mul_(cap)
    if causal:
        i = torch.arange(queries.start, queries.stop, device=q.device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=q.device)[None, :]
        masked = (j > i) | (j <= i - window) if window else j > i
        if starts is not None and not _one_by_one(starts):
            masked = (masked | (j < starts[rows, queries, None]))[:, None, None]
        s.unflatten(2, (-1, queries.stop - queries.start)).masked_fill_(masked, float("-inf"))
    return s, slope
