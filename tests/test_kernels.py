"""Gated SiLU, rotary embedding and the update of bf16 weights, each in one pass, against torch's operators.

On the CPU what stands in for the kernels, on a GPU the kernels.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.config import ModelConfig
from fourfold.model.fused import embed_qk, gated, rotate
from fourfold.model.layers import Attention, Rotary
from fourfold.offload.split import join, round_half_up, split

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")


def plain(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def with_grad(run: object, h: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    h = h.detach().requires_grad_()
    out = run(h)  # type: ignore[operator]
    out.backward(grad)
    assert h.grad is not None
    return out.detach(), h.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_on_the_cpu_it_has_the_bits_of_torch(dtype: torch.dtype) -> None:
    h, grad = torch.randn(3, 5, 26, dtype=dtype), torch.randn(3, 5, 13, dtype=dtype)
    for mine, theirs in zip(with_grad(gated, h, grad), with_grad(plain, h, grad), strict=True):
        assert torch.equal(mine, theirs)


def test_it_keeps_what_feeds_it_and_no_more() -> None:
    kept: list[Tensor] = []
    h = torch.randn(4, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gated(h)
    assert [t.data_ptr() for t in kept] == [h.data_ptr()]


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    h, grad = torch.randn(6, 48, dtype=dtype, device=device), torch.randn(6, 24, dtype=dtype, device=device)
    compiled = torch.compile(lambda x: gated(x * 2), backend="aot_eager" if device == "cpu" else "inductor")
    for mine, theirs in zip(with_grad(compiled, h, grad), with_grad(lambda x: plain(x * 2), h, grad), strict=True):
        torch.testing.assert_close(mine, theirs)


@needs_gpu
@pytest.mark.parametrize("shape", [(7, 2 * 37), (2, 300, 2 * 1024), (5, 2 * 3000)])
def test_gated_kernel(shape: tuple[int, ...]) -> None:
    h = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(*shape[:-1], shape[-1] // 2, device="cuda", dtype=torch.bfloat16)
    for mine, exact in zip(with_grad(gated, h, grad), with_grad(plain, h.double(), grad.double()), strict=True):
        torch.testing.assert_close(mine, exact.bfloat16(), rtol=2**-7, atol=1e-6)


HEADS, GROUPS, DIM, TOKENS = 6, 2, 24, 11
WIDTHS = (HEADS * DIM, GROUPS * DIM, GROUPS * DIM)


def tables(device: str, dtype: torch.dtype, dims: int = DIM) -> tuple[Tensor, Tensor]:
    rotary = Rotary(dims, TOKENS, 10000.0, None)
    rotary.materialize(torch.device(device), dtype)
    return rotary.tables(TOKENS)


def by_operators(qkv: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    q, k, v = (part.unflatten(-1, (-1, DIM)).transpose(1, 2) for part in qkv.split(WIDTHS, dim=-1))
    return [rotate(q, cos, sin), rotate(k, cos, sin), v]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dims", "placed"), [(DIM, False), (10, False), (DIM, True)])
def test_rotary_embedding(dtype: torch.dtype, device: str, compiled: bool, dims: int, placed: bool) -> None:
    """`placed`: every sequence has positions of its own."""
    made = torch.Generator(device).manual_seed(0)
    wide = torch.randn(3, TOKENS, sum(WIDTHS), dtype=torch.float64, device=device, generator=made)
    grads = [torch.randn(3, n // DIM, TOKENS, DIM, dtype=torch.float64, device=device, generator=made) for n in WIDTHS]
    exact, narrow = wide.to(dtype).double().requires_grad_(), wide.to(dtype).requires_grad_()
    grads = [g.to(dtype) for g in grads]
    run = torch.compile(embed_qk, backend="aot_eager" if device == "cpu" else "inductor") if compiled else embed_qk
    at = torch.randint(0, TOKENS, (3, TOKENS), generator=made, device=device) if placed else None
    mine = run(narrow, WIDTHS, DIM, *tables(device, dtype, dims), at)
    torch.autograd.backward(mine, [g.transpose(1, 2).contiguous().transpose(1, 2) for g in grads])
    theirs = by_operators(exact, *(t if at is None else t[at] for t in tables(device, torch.float64, dims)))
    torch.autograd.backward(theirs, [g.double() for g in grads])
    close = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-6}[dtype]
    assert narrow.grad is not None
    assert exact.grad is not None
    for a, b in zip((*mine, narrow.grad), (*theirs, exact.grad), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=close, atol=close)


def test_rotated_heads_are_all_that_attention_keeps() -> None:
    m = ModelConfig(family="llama", layers=1, hidden=48, heads=4, kv_heads=2, ffn=64, vocab=32, seq_len=8).resolve()
    rotary = Rotary(m.head_dim, m.seq_len, m.rope_theta, None)
    rotary.materialize(torch.device("cpu"), torch.float32)
    kept: dict[int, int] = {}
    x = torch.randn(2, 8, 48, requires_grad=True)
    part = Attention(m, rotary)
    known = {t.untyped_storage().data_ptr() for t in (*part.parameters(), *rotary.buffers())}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}) or t, lambda t: t
    ):
        part(x)
    kept = {at: size for at, size in kept.items() if at not in known}
    tokens, qkv = 16, (4 + 2 * 2) * 12
    # x, normed (torch's RMSNorm keeps x times its scale, too), q k v, what attention gives, two statistics
    assert sum(kept.values()) == 4 * tokens * (3 * 48 + qkv + 48 + 4 + 1)


@needs_gpu
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("clipped", "low", "moments"), [
    (False, False, torch.float32), (True, False, torch.float32), (True, True, torch.float32), (True, True, torch.bfloat16),
])  # fmt: skip
def test_an_update_has_the_bits_of_torch(clipped: bool, low: bool, moments: torch.dtype, decay: float) -> None:
    from fourfold.kernels.adamw import bias_corrections, update

    n, betas = (1 << 22) + 77, (0.9, 0.95)
    start = torch.randn(n, device="cuda")
    theirs = start.clone().requires_grad_()
    reference = torch.optim.AdamW([theirs], lr=1e-3, betas=betas, eps=1e-8, weight_decay=decay, fused=True)
    master, first, second = start.clone(), *(torch.zeros_like(start, dtype=moments) for _ in range(2))
    weight, expected = (torch.empty_like(start, dtype=torch.bfloat16) for _ in range(2))
    bits = torch.empty_like(start, dtype=torch.int16)
    split(start.clone(), weight, bits)
    count = torch.zeros((), device="cuda")
    for step in range(20):
        lr = 1e-3 / (1 + step)
        skip = torch.tensor(float(step == 7), device="cuda")
        grad = (torch.randn(n, device="cuda") * 10.0 ** (step % 5 - 3)).bfloat16()
        factor = torch.tensor(0.37 + step / 100, device="cuda") if clipped else None
        count += 1
        held = (weight, bits if low else master, first, second)
        corrections = bias_corrections(count, betas)
        update(*held, grad, corrections, factor, skip, lr=lr, betas=betas, eps=1e-8, weight_decay=decay)
        count -= skip
        theirs.grad = grad.float() if factor is None else grad.float() * factor
        reference.param_groups[0]["lr"], reference.found_inf = lr, skip  # type: ignore[attr-defined]
        reference.step()
        round_half_up(theirs.detach(), expected)
        state = reference.state[theirs]
        if low:
            join(weight, bits, master)
        for mine, other in ((master, theirs.detach()), (first, state["exp_avg"]), (second, state["exp_avg_sq"])):
            assert torch.equal(mine, other.to(mine.dtype)), step
            other.copy_(other.to(mine.dtype))
        assert torch.equal(weight, expected)
