"""Compares two runs step by step: identical, equal up to rounding, or diverged at step k. No torch.

Losses and gradient norms are compared over the steps that both runs have. *Identical*: the same bits. *Rounding*: the
difference is explained by another order of summation. It starts within the numerics contract (relative 1e-9 in fp64; 1e-5
for losses and 1e-4 for norms in fp32; 1e-2 in bf16) and may grow by 20 % per step after the contract's steps (20 in fp64,
otherwise 8), up to 5 %, since training amplifies small differences. A larger difference is a divergence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fourfold.errors import RunDirError
from fourfold.train.rundir import RunDir, read_metrics

__all__ = ["Comparison", "compare_runs"]

LOSS_TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 1e-2}
CONTRACT_STEPS = {"fp64": 20, "fp32": 8, "bf16": 8}
KEYS = ("loss", "grad_norm")


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison; `worst` has the largest relative difference of each metric, with its step."""

    verdict: Literal["identical", "rounding", "diverges"]
    steps: int
    step: int | None
    """First step that differs by more than rounding."""
    first_difference: int | None
    """First step that differs at all."""
    worst: dict[str, tuple[float, int]]


def compare_runs(a: RunDir, b: RunDir) -> Comparison:
    """Compare the metrics of two runs."""
    lines = [_by_step(run) for run in (a, b)]
    steps = sorted(lines[0].keys() & lines[1].keys())
    if not steps:
        raise RunDirError(f"{a.path} and {b.path} have no step in common")
    widest = max((run.read()[1].precision.compute for run in (a, b)), key=lambda p: LOSS_TOLERANCE[p])
    worst = dict.fromkeys(KEYS, (0.0, steps[0]))
    diverged = first = None
    for step in steps:
        for key in KEYS:
            gap = _gap(lines[0][step][key], lines[1][step][key])
            worst[key] = max(worst[key], (gap, step), key=lambda w: w[0])
            if gap > 0 and first is None:
                first = step
            if gap > _allowed(widest, key, step) and diverged is None:
                diverged = step
    verdict: Any = "identical" if first is None else "rounding" if diverged is None else "diverges"
    return Comparison(verdict, len(steps), diverged, first, worst)


def _by_step(run: RunDir) -> dict[int, dict[str, Any]]:
    return {m["step"]: m for m in read_metrics(run) if "loss" in m and "grad_norm" in m}


def _gap(x: float | None, y: float | None) -> float:
    """Relative difference; infinite if only one of the values is finite (non-finite ones are stored as null)."""
    if x == y:
        return 0.0
    if x is None or y is None:
        return float("inf")
    return abs(x - y) / max(abs(x), abs(y))


def _allowed(precision: str, key: str, step: int) -> float:
    at_first = LOSS_TOLERANCE[precision] * (10 if key == "grad_norm" and precision == "fp32" else 1)
    return min(at_first * 1.2 ** max(0, step - CONTRACT_STEPS[precision]), 0.05)
