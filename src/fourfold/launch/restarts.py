"""Policy for restarting a run after a failure. No torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LONGEST_DELAY", "Restarts", "next_delay"]

LONGEST_DELAY = 60.0
"""Maximum seconds between two attempts."""


@dataclass(frozen=True)
class Restarts:
    """How a run is restarted after a failure."""

    most: int = 0
    delay: float = 1.0
    """Seconds before the first restart; doubled for each further one, unless a checkpoint was saved meanwhile."""
    replan: bool = False
    """Continue with fewer ranks if not all are available."""
    replan_after: float = 30.0
    """Seconds to wait for the tasks of a host before it counts as gone for good."""


def next_delay(delay: float, first: float, progressed: bool) -> float:
    """Seconds to wait before the restart after one that waited `delay` (0: there was none)."""
    return first if progressed or not delay else min(2 * delay, LONGEST_DELAY)
