"""A last look at the plan that the search found: would one mode for all units, or another mode for one kind of unit, be faster?

The search chooses by estimates of each unit alone. What units do together (sums that are joined, gathers that hide behind one
another's products) only a simulation of the whole plan knows, so plans nearby are simulated. No plan is then slower, by the
planner's own account, than one of a single mode that fits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fourfold.plan import Plan
from fourfold.planner.layout import Setting
from fourfold.planner.predict import Prediction, choice_of, judged
from fourfold.planner.rules import pattern, rules_of
from fourfold.planner.units import Choice

__all__ = ["polished"]

MODES: tuple[Any, ...] = ("replicate", "zero2", "keep", "zero3")


def polished(setting: Setting, plan: Plan, prediction: Prediction) -> tuple[Plan, Prediction]:
    """The plan, or a faster one with other modes that fits."""
    choices = {u.name: choice_of(plan, u) for u in setting.spec.units}
    kinds: dict[str, list[str]] = {}
    for name in choices:
        kinds.setdefault(pattern(name), []).append(name)
    if setting.spec.tied:  # the head's matrix is the embedding's
        first, last = (pattern(setting.spec.units[i].name) for i in (0, -1))
        kinds[first] += kinds.pop(last)
    for names in (list(choices), *kinds.values()):
        for mode in MODES:
            tried = choices | {n: _in_mode(choices[n], mode) for n in names}
            if tried == choices:
                continue
            other = replace(plan, unit=rules_of(tried))
            found = judged(other, setting, tried)
            if found.seconds < 0.999 * prediction.seconds and found.fits:
                plan, prediction, choices = other, found.prediction(), tried
    return plan, prediction


def _in_mode(c: Choice, mode: Any) -> Choice:
    """A choice in another mode; replicas are neither split nor shared in parts."""
    if c.mode == mode:
        return c
    if mode == "replicate":
        return Choice(mode, "step", 0, 1, "full" if c.recompute == "per-slice" else c.recompute)
    return c._replace(mode=mode, reduce="step")
