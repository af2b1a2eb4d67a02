"""Choices of units as the rules of a plan."""

from __future__ import annotations

from fourfold.plan import UnitRule
from fourfold.planner.units import Choice

__all__ = ["pattern", "rules_of"]


def rules_of(choices: dict[str, Choice]) -> tuple[UnitRule, ...]:
    """Few rules that say the same: for every pattern its commonest choice, after the exceptions by name."""
    patterns: dict[str, dict[Choice, int]] = {}
    for name, choice in choices.items():
        votes = patterns.setdefault(pattern(name), {})
        votes[choice] = votes.get(choice, 0) + 1
    common = {p: max(votes, key=lambda c: votes[c]) for p, votes in patterns.items()}
    rules = [_rule(name, c) for name, c in choices.items() if common[pattern(name)] != c]
    if len(set(common.values())) == 1:
        return (*rules, _rule("*", next(iter(common.values()))))
    return (*rules, *(_rule(p, c) for p, c in common.items()))


def pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _rule(match: str, c: Choice) -> UnitRule:
    return UnitRule(match=match, mode=c.mode, reduce=c.reduce, within=c.within, split=c.split, recompute=c.recompute)
