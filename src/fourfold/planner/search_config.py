"""The search's constants, in one place."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SearchConfig"]


@dataclass(frozen=True)
class SearchConfig:
    """How thorough the search is. Shares are of a step's seconds or of a device's memory."""

    # ---- branch and bound over layouts ----
    many_layouts: int = 2000
    """With more layouts than this, the next share applies, and only the best plan is improved."""
    least_gain: float = 0.02
    """Of many layouts, those are pruned whose lower bound allows a gain of less than this share."""
    unlikely: float = 0.02
    """Once there are enough plans to be shown, layouts are skipped whose estimate exceeds the best by more than this share."""
    most_built: int = 24
    """Layouts built into plans that fit, at most; four times as many are tried."""
    estimates_per_alternative: int = 4
    """Layouts estimated for every alternative that is to be shown, where fewer could be best."""
    most_tightened: int = 200
    """Lower bounds that are tightened for the certificate alone, at most."""

    # ---- one layout: a budget for every rank ----
    budget_rounds: int = 12
    """Choices of a rank that are replayed, at most."""
    budget_tolerance: float = 0.01
    """A choice is full when it leaves no more than this share of the memory free."""

    # ---- local search ----
    improved_share: float = 0.03
    """Plans slower than the best by no more than this share are improved."""
    most_improved: int = 3
    """Plans that are improved, at most; of many layouts, one."""
    try_modes: bool = True
    """Whether other modes are tried for all units, and for all units of a name pattern."""
    fill_rounds: int = 6
    """Rounds in which changes of single units are evaluated and a knapsack of them is chosen; 0: never."""

    # ---- CPUs ----
    cpu_tie: float = 0.01
    """On CPUs, plans within this share are equal, and one with a single mode is preferred."""
    cpu_link_gain: float = 0.05
    """On CPUs, gathers and reductions pass each other on a link that they are predicted to share: the share this may gain."""
