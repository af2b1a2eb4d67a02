"""Which of torch's attention kernels a run uses on a GPU: measured at the start, the fastest first.

`scaled_dot_product_attention` has cuDNN's kernel, FlashAttention and a memory-efficient one; which is fastest depends on GPU,
length and width of heads, and torch's own order on its version and cuDNN's. Each is timed for the run's shapes, forward and
backward, and torch's order is set by these times; a kernel that refuses a shape is skipped. Rank 0's measurement counts for
all ranks.

With `train.deterministic` the order is fixed: a choice by measured times could differ between two runs, and another kernel
gives other bits. FlashAttention comes first, then the memory-efficient kernel; their gradients are then deterministic (unless
torch only warns) and slower. cuDNN's is not, and torch does not use it. All are timed nevertheless, to say what that costs.

Only for what the fused kernel computes: windows and soft-capping have their own code (model/attention.py), as have documents.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.compiler.config
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fourfold.train._torch import set_attention_order

__all__ = ["KERNELS", "AttentionChoice", "attention_seconds", "choose_kernel", "use_kernel"]

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
CALLS = 5
"""Forwards and backwards of each kernel that are timed."""
DETERMINISTIC = ("flash", "efficient", "cudnn")
"""The order where the same run twice must have the same bits."""
_USER_TAG = torch.compiler.config.cache_key_tag
TOKENS = 1 << 14
"""Tokens of a measurement, at most, unless one sequence is longer."""


@dataclass(frozen=True)
class AttentionChoice:
    """The order of kernels, and the seconds of a forward and backward that it follows."""

    order: tuple[str, ...]
    seconds: Mapping[str, float]
    deterministic: bool

    def __str__(self) -> str:
        first = self.order[0]
        said = f"attention: {first}"
        others = [
            f"{name} {self.seconds[name] / self.seconds[first]:.2f}" for name in self.order[1:] if name in self.seconds
        ]
        if others:
            said += f" (time of others: {', '.join(others)})"
        fastest = min(self.seconds, key=self.seconds.__getitem__)
        if self.deterministic and fastest == "cudnn" != first:
            said += f"; {fastest} is faster, but its gradient is not deterministic: train.deterministic = false would use it"
        return said

    def to_dict(self) -> dict[str, Any]:
        return {"kernel": self.order[0], "seconds": dict(self.seconds)}


def choose_kernel(seconds: Mapping[str, float], *, deterministic: bool) -> AttentionChoice | None:
    """The fastest first, or with `deterministic` in a fixed order. None where no fused kernel takes the shape."""
    if not seconds:
        return None
    order = sorted(seconds, key=DETERMINISTIC.index if deterministic else seconds.__getitem__)
    return AttentionChoice((*order, *(name for name in KERNELS if name not in seconds)), dict(seconds), deterministic)


def attention_seconds(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int, tokens: int, *, causal: bool
) -> dict[str, float]:
    """Seconds of a forward and backward of every kernel that takes this shape, on a GPU."""
    batch = max(1, TOKENS // tokens)
    q = torch.randn(batch, heads, tokens, width, device=device, dtype=dtype, requires_grad=True)
    k, v = (
        torch.randn(batch, kv_heads, tokens, width, device=device, dtype=dtype, requires_grad=True) for _ in range(2)
    )
    grad = torch.randn_like(q)

    def both() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=kv_heads != heads)
        torch.autograd.grad(out, (q, k, v), grad)

    found = {}
    for name, kernel in KERNELS.items():
        try:
            with _as_it_may_run(name), sdpa_kernel([kernel]):
                found[name] = _seconds(both, device)
        except RuntimeError:  # it does not take the shape, or is not built in
            continue
    return found


@contextmanager
def _as_it_may_run(name: str) -> Iterator[None]:
    """No warnings that a kernel refuses a shape; for cuDNN's no deterministic mode, in which torch refuses it."""
    mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == "cudnn":
            torch.use_deterministic_algorithms(False)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    work()  # the first call may compile or choose algorithms
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(CALLS):
        work()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / 1000 / CALLS


def use_kernel(choice: AttentionChoice) -> None:
    """Set torch's order, for this process. Compiled code depends on it, which torch's cache of it does not know."""
    torch.compiler.config.cache_key_tag = f"{_USER_TAG} attention: {' '.join(choice.order)}".strip()
    set_attention_order([*(KERNELS[name] for name in choice.order), SDPBackend.MATH])
