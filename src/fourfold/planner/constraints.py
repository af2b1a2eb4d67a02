"""What the user has decided before the search: `--fix col=4`, `--schedule wave`, `--max-ranks`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fourfold import schema
from fourfold.errors import PlanError
from fourfold.plan import AXES, SCHEDULES

__all__ = ["Constraints", "parse_fixes"]

_NUMBERS = (*AXES, "micro_batches", "micro_batch_size", "waves", "stages_per_rank")
_WORDS = {
    "schedule": SCHEDULES,
    "mode": ("replicate", "zero2", "zero3", "keep"),
    "recompute": ("none", "selective", "full", "per-slice"),
    "optimizer": ("device", "host", "auto"),
    "activations": ("device", "host"),
    "flow": ("auto", "summa", "os", "ls", "ws"),
    "keep": ("none", "weights", "inputs", "gradients", "all"),
}
FIXABLE = (*_NUMBERS, *_WORDS)


@dataclass(frozen=True)
class Constraints:
    """What the user has decided already."""

    fixed: dict[str, Any]
    max_ranks: int = 0

    def get(self, name: str, default: Any = None) -> Any:
        return self.fixed.get(name, default)

    @property
    def schedule(self) -> str | None:
        """The one asked for, by its name or by what only it has."""
        implied = "wave" if "waves" in self.fixed else "interleaved" if "stages_per_rank" in self.fixed else None
        return self.get("schedule", implied)

    @property
    def piped(self) -> bool:
        """Whether a pipeline is asked for, by its schedule."""
        return (self.schedule or "1f1b") != "1f1b"


def parse_fixes(texts: list[str], schedule: str | None = None, max_ranks: int | None = None) -> Constraints:
    """`["col=4", "mode=zero3"]` as constraints; refuses what is not known."""
    fixed: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name not in FIXABLE:
            raise PlanError(f"--fix {text}{schema.nearest(name, FIXABLE)}; write for example --fix col=4")
        if not equals:
            raise PlanError(f"--fix {text} has no value; write for example --fix {name}={_WORDS.get(name, (4,))[-1]}")
        if name in _WORDS and value not in _WORDS[name]:
            raise PlanError(f"--fix {text}{schema.nearest(value, _WORDS[name])}")
        if name not in _WORDS and not re.fullmatch(r"0*[1-9][0-9]{0,8}", value):
            raise PlanError(f"--fix {text}: {name} is a whole number of at least 1")
        given = value if name in _WORDS else int(value)
        if fixed.setdefault(name, given) != given:
            raise PlanError(f"--fix {name}={fixed[name]} and {text} contradict each other; give one")
    if schedule is not None:
        if schedule not in SCHEDULES:
            raise PlanError(f"--schedule {schedule}{schema.nearest(schedule, SCHEDULES)}")
        if fixed.setdefault("schedule", schedule) != schedule:
            raise PlanError(f"--schedule {schedule} and --fix schedule={fixed['schedule']} contradict each other")
    if {"waves", "stages_per_rank"} <= fixed.keys():
        raise PlanError(
            f"--fix waves={fixed['waves']} is for the schedule wave and stages_per_rank={fixed['stages_per_rank']} for "
            "interleaved; leave one out"
        )
    named = fixed.get("schedule")
    for name, suits in (("waves", "wave"), ("stages_per_rank", "interleaved")):
        if name in fixed and named not in (None, suits):
            raise PlanError(
                f"--fix {name}={fixed[name]} is for the schedule {suits}, and {named} was asked for; leave one out"
            )
    if fixed.get("pipe") == 1 and (named not in (None, "1f1b") or fixed.keys() & {"waves", "stages_per_rank"}):
        raise PlanError(
            "--fix pipe=1 has no pipeline, and a schedule was asked for; leave one out, or use pipe=2 or more"
        )
    if max_ranks is not None and max_ranks < 1:
        raise PlanError(f"--max-ranks {max_ranks} must be at least 1")
    return Constraints(fixed, max_ranks or 0)
