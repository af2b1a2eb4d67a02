"""Attention over windows and with soft-capped scores, block by block, against all scores at once."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fourfold.launch.place import current_place
from fourfold.model import attention
from fourfold.model.attention import blocked_attention
from fourfold.runtime.stage import keep_products
from fourfold.train import attention_kernel, worker
from tests.helpers import make_config

TOKENS = 23


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, window: int, causal: bool) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = scale * q @ k.mT
    s = cap * torch.tanh(s / cap) if cap else s
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])[None, :]
    seen = (j <= i) | torch.tensor(not causal)
    seen = seen & (j > i - window) if window else seen
    return s.masked_fill(~seen, float("-inf")).softmax(-1) @ v


def made(heads: int, kv_heads: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = [(2, n, TOKENS, 6) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, dtype=torch.float64, generator=g).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_blocks_are_all_scores_at_once(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES", 1)
    monkeypatch.setattr(attention, "FEWEST", 5)  # five queries to a block
    for cap, window, causal in itertools.product((0.0, 2.0), (0, 1, 7, 30), (True, False)):
        if window and not causal:
            continue
        parts = made(4, kv_heads)
        found = blocked_attention(*parts, scale=0.7, cap=cap, window=window, causal=causal)
        expected = plain(*parts, 0.7, cap, window, causal)
        dy = torch.ones_like(found).cumsum(-1)
        assert (found - expected).abs().max() < 1e-12, (cap, window, causal)
        for a, b in zip(torch.autograd.grad(found, parts, dy), torch.autograd.grad(expected, parts, dy), strict=True):
            assert (a - b).abs().max() < 1e-11, (cap, window, causal)


def test_compiled() -> None:
    parts = made(4, 2)
    run = torch.compile(lambda q, k, v: blocked_attention(q, k, v, scale=0.5, cap=1.0, window=7), backend="aot_eager")
    torch.testing.assert_close(run(*parts), plain(*parts, 0.5, 1.0, 7, True))


def test_selective_recomputation_keeps_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = attention._scores
    monkeypatch.setattr(attention, "_scores", lambda *args: calls.append(1) or forward(*args))
    q, k, v = made(4, 2)

    def part(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return blocked_attention(2 * q, k, v, scale=0.5, window=7)

    y = checkpoint(part, q, k, v, use_reentrant=False, context_fn=keep_products)
    assert len(calls) == 1
    y.sum().backward()
    assert len(calls) == 2  # once more for the gradient of the scores, and not for the output


# ---- which of torch's kernels, on a GPU ----


def test_the_fastest_kernel_is_first_unless_it_is_not_deterministic() -> None:
    seconds = {"cudnn": 0.010, "flash": 0.016, "efficient": 0.030}
    free, exact = (attention_kernel.choose_kernel(seconds, deterministic=d) for d in (False, True))
    assert free is not None
    assert free.order == ("cudnn", "flash", "efficient")
    assert str(free) == "attention: cudnn (time of others: flash 1.60, efficient 3.00)"
    assert exact is not None
    assert exact.order == ("flash", "efficient", "cudnn")
    assert "cudnn is faster, but its gradient is not deterministic: train.deterministic = false" in str(exact)
    assert exact.to_dict() == {"kernel": "flash", "seconds": seconds}
    other = attention_kernel.choose_kernel({"efficient": 0.002, "flash": 0.005, "cudnn": 0.004}, deterministic=True)
    assert other is not None
    assert other.order == exact.order  # the same bits twice: not by times, which are noisy
    assert "is faster" not in str(other)
    only = attention_kernel.choose_kernel({"efficient": 0.03}, deterministic=True)
    assert only is not None
    assert only.order == ("efficient", "cudnn", "flash")  # torch still asks the others, which refuse
    assert attention_kernel.choose_kernel({}, deterministic=True) is None


def test_torch_takes_the_order() -> None:
    before = torch._C._get_sdp_priority_order()
    try:
        choice = attention_kernel.choose_kernel({"efficient": 1.0, "cudnn": 2.0, "flash": 3.0}, deterministic=False)
        assert choice is not None
        attention_kernel.use_kernel(choice)
        assert torch._C._get_sdp_priority_order()[:4] == [2, 3, 1, 0]
        assert sorted(torch._C._get_sdp_priority_order()) == sorted(before)
        assert torch.compiler.config.cache_key_tag.endswith("attention: efficient cudnn flash")
    finally:
        torch._C._set_sdp_priority_order(before)
        torch.compiler.config.cache_key_tag = attention_kernel._USER_TAG


@pytest.mark.parametrize("own", [False, True])
def test_a_deterministic_run_asks_for_deterministic_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """Where torch only warns, fused attention is not deterministic. cuDNN's is timed without the mode, in which torch refuses it."""
    for name in ("CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, os.environ.get(name, ":4096:8" if "CUBLAS" in name else "expandable_segments:True"))
    monkeypatch.setattr(worker, "choose_device", lambda *_: torch.device("cuda"))
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        worker._prepare(make_config(tmp_path / "run"), current_place(), own=own)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() == own
        for name in attention_kernel.KERNELS:
            with attention_kernel._as_it_may_run(name):
                assert torch.are_deterministic_algorithms_enabled() == (name != "cudnn")
        assert torch.is_deterministic_algorithms_warn_only_enabled() == own
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
