"""Are two runs the same? identical, rounding, or diverged at step k. No torch.

Two runs are compared step by step over the steps both have, loss and gradient norm. *Identical*: the same bits. *Rounding*:
different sums in different orders; the difference of one step is within the numerics contract at first (1e-9 of fp64, 1e-5 of
fp32 losses and ten times that of norms, 1e-2 of bf16) and may grow by 20 % a step after the eighth, up to 5 %, since training
amplifies small differences. Anything more is a divergence, and its first step is named.
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
    """How two runs compare; `worst` is the largest relative difference per metric and the step it occurred at."""

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
    return {m["step"]: m for m in read_metrics(run) if "loss" in m}


def _gap(x: float | None, y: float | None) -> float:
    """Relative difference; a number against a non-finite one (null) is infinitely far."""
    if x == y:
        return 0.0
    if x is None or y is None:
        return float("inf")
    return abs(x - y) / max(abs(x), abs(y))


def _allowed(precision: str, key: str, step: int) -> float:
    at_first = LOSS_TOLERANCE[precision] * (10 if key == "grad_norm" and precision == "fp32" else 1)
    return min(at_first * 1.2 ** max(0, step - CONTRACT_STEPS[precision]), 0.05)
