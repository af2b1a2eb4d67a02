"""Memory as a replay: what a rank holds at every op of its program, by category, and the instant of its peak.

Each op is walked unit by unit: a forward adds what the unit keeps; a backward holds its workspace, adds gradients, gives
activations back; gathered parameters come and go as the unit's mode says, the next unit's being gathered while one computes.
The step ends with the update. What an op adds at its height and leaves behind depends on the stage, the kind of op, and
whether it is the first or the last of its kind, so it is worked out once for each.

    parameters  gathered  gradients  optimizer  activations  workspace  messages
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fourfold.planner.stages import PlannedUnit
from fourfold.program.ops import Op, Schedule

__all__ = ["CATEGORIES", "RankMemory", "replay_rank"]

CATEGORIES = ("parameters", "gathered", "gradients", "optimizer", "activations", "workspace", "messages")
PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS, WORKSPACE, MESSAGES = range(7)
Bytes = list[float]


@dataclass(frozen=True)
class RankMemory:
    """The most a rank holds, in bytes, when, and of what."""

    rank: int
    at: str
    """The op at which it is highest, or `update`."""
    by_category: tuple[float, ...]
    host: float = 0.0
    """Bytes on its host."""

    @cached_property
    def peak(self) -> float:
        return sum(self.by_category)

    def to_dict(self) -> dict[str, object]:
        parts = {name: round(size) for name, size in zip(CATEGORIES, self.by_category, strict=True) if size >= 1}
        return {"rank": self.rank, "bytes": round(self.peak), "at": self.at, **parts, "host": round(self.host)}


@dataclass(frozen=True)
class Extra:
    """Bytes of a rank that belong to no unit's choice."""

    parameters: float = 0.0
    """Copies of a tied weight, tables."""
    gradients: float = 0.0
    message: float = 0.0
    """One message between stages."""
    update: float = 0.0
    """What the update holds for a while: rounding of masters, buffers of the stream."""
    state_on_device: float = 1.0
    """Share of the optimizer's state that is on the device."""
    state: float = 0.0
    """Bytes of optimizer state of one parameter, wherever it is."""


@dataclass(frozen=True)
class _Walk:
    """What an op holds at its height above what was there before, and what it leaves."""

    height: float
    at_height: tuple[float, ...]
    change: float
    after: tuple[tuple[int, float], ...]
    """(category, bytes) that it leaves."""


def replay_rank(
    schedule: Schedule, rank: int, stages: Sequence[Sequence[PlannedUnit]], extra: Extra, prefetch: bool = True
) -> RankMemory:
    """Replay one rank's ops; `stages[s]` are the units of stage s."""
    held = schedule.stages_of[rank]
    base: Bytes = [0.0] * len(CATEGORIES)
    for s in held:
        for u in stages[s]:
            base[PARAMETERS] += u.cost.parameters
            base[OPTIMIZER] += u.cost.local * extra.state * extra.state_on_device
            base[GATHERED] += u.cost.stays
    base[WORKSPACE] += max(u.cost.ahead for s in held for u in stages[s])
    base[PARAMETERS] += extra.parameters
    ops = schedule.order[rank]
    last_of = {(op.stage, op.kind): op for op in ops}
    walks: dict[tuple[int, str, bool, bool], _Walk] = {}
    begun: set[tuple[int, str]] = set()
    best, most, best_at = list(base), 0.0, "update"
    total = sum(base)
    # receives are posted ahead on both edges of a rank, and their buffers stay; results wait until they are sent
    messages = (1 + 2 * min(2, len(held))) * extra.message if schedule.ranks > 1 else 0.0
    for op in ops:
        stage, kind, _ = op
        key = (stage, kind)
        name = (stage, kind, key not in begun, last_of[key] == op)
        begun.add(key)
        walk = walks.get(name)
        if walk is None:
            steady = schedule.ranks > 1 and kind != "F" and not name[3]
            walk = walks[name] = _walk(op, name[2], name[3], steady, stages[stage], prefetch)
        if total + walk.height > most:
            most, best_at = total + walk.height, str(op)
            best = [b + h for b, h in zip(base, walk.at_height, strict=True)]
        for category, change in walk.after:
            base[category] += change
        total += walk.change
    if most:
        best[MESSAGES] += messages
    at_update = list(base)
    at_update[GRADIENTS] += extra.gradients
    at_update[WORKSPACE] += extra.update
    if sum(at_update) > sum(best):
        best, best_at = at_update, "update"
    host = sum(u.cost.local for s in held for u in stages[s]) * extra.state * (1 - extra.state_on_device)
    return RankMemory(rank, best_at, tuple(best), host)


def _walk(op: Op, first: bool, last: bool, steady: bool, units: Sequence[PlannedUnit], prefetch: bool) -> _Walk:
    """One op, unit by unit."""
    now: Bytes = [0.0] * len(CATEGORIES)
    high: Bytes = list(now)

    def mark(**more: float) -> None:
        nonlocal high
        at = list(now)
        for name, size in more.items():
            at[CATEGORIES.index(name)] += size
        if sum(at) > sum(high):
            high = at

    order = units if op.kind == "F" else units[::-1]
    flying = 0.0  # the gradient of the unit before, which is being reduced
    following = [*order[1:], None]
    for u, after in zip(order, following, strict=True):
        c = u.cost
        ahead = after.cost.transient if after is not None and prefetch else 0.0
        gathered = c.transient + ahead
        if op.kind == "F":
            if u.choice.mode in ("keep", "zero2") and (first or (u.choice.mode == "zero2" and not steady)):
                now[GATHERED] += c.whole if c.gather else 0.0
            now[ACTIVATIONS] += c.activation
            mark(gathered=gathered, workspace=c.forward_workspace)
            continue
        work = {"B": c.workspace, "I": c.split_workspace, "W": c.product}[op.kind]
        mark(gathered=gathered if op.kind != "W" else 0.0, workspace=work)
        gives = {"B": c.activation, "I": c.activation - c.kept_for_weight_grad, "W": c.kept_for_weight_grad}[op.kind]
        if op.kind in "BW":
            _contribute(u, first, last, work, flying, now, mark)
            flying = c.gradients if u.choice.reduce == "micro-batch" else 0.0
        now[ACTIVATIONS] -= gives
        kept = op.kind != "W" and c.gather and u.choice.mode in ("keep", "zero2")
        if kept and (last or (u.choice.mode == "zero2" and not steady)):
            now[GATHERED] -= c.whole
    left = tuple((i, size) for i, size in enumerate(now) if size)
    return _Walk(sum(high), tuple(high), sum(now), left)


def _contribute(u: PlannedUnit, first: bool, last: bool, work: float, flying: float, now: Bytes, mark: object) -> None:
    """Gradients of one micro-batch: accumulated, then reduced at once or at the end of the step."""
    c = u.cost
    assert callable(mark)
    sharded = c.reduced < c.gradients
    at_once = u.choice.reduce == "micro-batch"
    if first and not at_once:
        now[GRADIENTS] += c.gradients
    whole = c.gradients + flying + (c.reduced if sharded else 0.0)
    mark(workspace=work, gradients=whole if at_once else flying)
    if at_once:
        if first:
            now[GRADIENTS] += c.reduced
    elif last and sharded:
        now[GRADIENTS] += c.reduced
        mark()
        now[GRADIENTS] -= c.gradients
