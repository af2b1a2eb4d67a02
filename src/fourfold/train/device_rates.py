"""Rates of one GPU as reached in training: matmuls, attention forward and backward, memory bandwidth.

A GPU that was idle, or that multiplies ones, draws little power and runs faster than in training. So operands are random, and
every measurement follows a warm-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from fourfold.cluster import Device
from fourfold.train.metrics import peak_flops
from fourfold.train.parts import DTYPES

__all__ = ["gpu_device", "steady"]

SHAPES = (
    (8192, 8192, 8192), (4096, 3072, 9216), (8192, 3072, 3072), (12288, 6144, 3072), (6144, 8192, 6144), (3072, 12288, 3072),
)  # fmt: skip
"""Shapes (m, k, n) of matmuls: forwards, gradients of inputs and of weights."""
WARM, ENOUGH = 1.0, 0.05
"""Seconds of warm-up before anything is timed, and of each measurement."""


def gpu_device(device: torch.device, memory: int, operator: float) -> Device:
    """Measure a GPU as a Device of the cluster model."""
    properties = torch.cuda.get_device_properties(device)
    bare = Device(processors=properties.multi_processor_count, memory=str(memory))
    one = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    _took(lambda: one @ one, WARM)
    rates = {
        kind: _product_rates(dtype, device, bare, SHAPES[: 6 if kind == "bf16" else 2])
        for kind, dtype in sorted(DTYPES.items())
    }
    peaks = {kind: max(found) for kind, found in rates.items()}
    efficiency = median(rates["bf16"]) / peaks["bf16"]
    forward, ratio = _attention(device)
    return Device(
        name=properties.name,
        kind="cuda",
        memory=str(memory),
        reserve="2GiB",
        processors=properties.multi_processor_count,
        matrix=peaks,
        stated={kind: peak_flops(device, dtype) for kind, dtype in sorted(DTYPES.items())},
        efficiency=efficiency,
        attention=min(1.0, forward / (peaks["bf16"] * efficiency)),
        attention_backward=ratio,
        memory_rate=_memory_rate(device),
        operator=operator,
    )


def _product_rates(
    dtype: torch.dtype, device: torch.device, bare: Device, shapes: tuple[tuple[int, int, int], ...]
) -> list[float]:
    """FLOP/s of matmuls, corrected for idle multiprocessors in the last wave of tiles."""
    out = []
    for m, k, n in shapes:
        x, w = torch.randn(m, k, dtype=dtype, device=device), torch.randn(n, k, dtype=dtype, device=device)
        took = _took(lambda x=x, w=w: F.linear(x, w))  # type: ignore[misc]
        out.append(2.0 * m * k * n / took / bare.fullness(m, k, n))
    return out


def _attention(device: torch.device) -> tuple[float, float]:
    """FLOP/s of the attention forward, and the time of its backward relative to the forward."""
    tokens, heads, width = 3072, 24, 128
    q, k, v = torch.randn(3, 2, heads, tokens, width, dtype=torch.bfloat16, device=device).requires_grad_().unbind()
    grad = torch.randn(2, heads, tokens, width, dtype=torch.bfloat16, device=device)

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> None:
        torch.autograd.grad(attend(), (q, k, v), grad)

    there, back = _took(attend), _took(both)
    return 0.5 * 4 * tokens * q.numel() / there, (back - there) / there


def _memory_rate(device: torch.device) -> float:
    x, y = torch.randn(2, 1 << 28, dtype=torch.bfloat16, device=device).unbind()
    return 3 * x.nbytes / _took(lambda: torch.add(x, y, out=y))


def steady(work: Callable[[], Any]) -> float:
    """Seconds of one call, after a warm-up."""
    _took(work, WARM)
    return _took(work, 5 * ENOUGH)


def _took(work: Callable[[], Any], enough: float = ENOUGH) -> float:
    """Seconds of one call, averaged over `enough` seconds."""
    work()
    times = 1
    while True:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            work()
        torch.cuda.synchronize()
        took = time.perf_counter() - began
        if took >= enough:
            return took / times
        times = max(2 * times, int(times * enough / max(took, 1e-6)))
