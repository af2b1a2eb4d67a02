"""Memory as a replay: what a rank holds at every op of its program, by category, and the instant of its peak.

Each op is walked link by link (a unit is one, or one for each slice), as the lowered program would:

    gather      one link ahead of its use; zero2 and keep only where the unit is not there already
    compute     what it holds for a while on top; a forward leaves what it keeps, a backward gives it back
    add up      a backward's weight gradients, when they are added to those of the micro-batches before
    reduce      the sum's place is taken; the whole gradient goes when the next link's reduction has started
    release     zero3: after use, unless it is used again next; zero2: when no micro-batch is in flight; keep: at the end

The step ends with the update. What an op holds at its height and leaves behind depends on the stage, the kind of op, and what
comes before and after it, so it is worked out once for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from fourfold.planner.stages import PlannedUnit
from fourfold.program.ops import Op, Schedule

__all__ = ["CATEGORIES", "Extra", "RankMemory", "replay_rank"]

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
    """Bytes on its host: activations, and optimizer state."""
    host_activations: float = 0.0
    """Of these, activations."""

    @cached_property
    def peak(self) -> float:
        return sum(self.by_category)

    def with_state(self, optimizer: float, host: float) -> RankMemory:
        """With so many bytes of optimizer state on the device, always, and on the host."""
        held = list(self.by_category)
        held[OPTIMIZER] += optimizer
        return RankMemory(self.rank, self.at, tuple(held), self.host + host, self.host_activations)

    def to_dict(self) -> dict[str, object]:
        parts = {name: round(size) for name, size in zip(CATEGORIES, self.by_category, strict=True) if size >= 1}
        host = {"host": round(self.host), "host_activations": round(self.host_activations)}
        return {"rank": self.rank, "bytes": round(self.peak), "at": self.at, **parts, **host}


@dataclass(frozen=True)
class Extra:
    """Bytes of a rank that belong to no unit's choice."""

    parameters: float = 0.0
    """Copies of a tied weight, tables."""
    lent: float = 0.0
    """Gradient of a tied weight that the head made and the embedding's reduction takes over, both being here."""
    copied: float = 0.0
    """Gradient of the embedding's unit that is sent to its owner, which is elsewhere."""
    taken: float = 0.0
    """Gradient of a tied weight that comes from the head's rank before the embedding's is reduced."""
    messages: float = 0.0
    """Of messages between stages."""
    pooled: float = 0.0
    """Of one of them, where inputs and gradients of stages that came in a message are among those."""
    parked: float = 0.0
    """Of activations on their way to the host and back, and of those for which it has no room."""
    host: float = 0.0
    """Of activations there."""
    update: float = 0.0
    """What the update holds for a while: rounding of masters."""
    prefetch: int = 1
    """Links gathered ahead."""


class _Turn(NamedTuple):
    """An op's place in its rank's order."""

    kind: str
    first: bool
    """The first of its kind in the step."""
    last: bool
    alone: bool
    """No other micro-batch of the stage is in flight: before a forward, after a backward."""
    stayed: bool
    """The first link is there since the op before."""
    stays: bool
    """The last link is used by the op after."""


class _Place(NamedTuple):
    """All that the walk of an op depends on, besides its stage's units."""

    turn: _Turn
    ahead: float
    """Bytes that are gathered for the op after while the last link computes."""
    flying: tuple[float, float]
    """A reduction under way: its whole gradient, and what else goes when it is done."""


class _Walk(NamedTuple):
    """What an op holds at its height above what was there before, and what it leaves."""

    height: float
    at_height: tuple[float, ...]
    change: float
    after: tuple[tuple[int, float], ...]
    """(category, bytes) that it leaves."""
    flying: tuple[float, float]


def replay_rank(
    schedule: Schedule,
    rank: int,
    stages: Sequence[Sequence[PlannedUnit]],
    extra: Extra,
    known: dict[Any, dict[_Place, _Walk]] | None = None,
) -> RankMemory:
    """Replay one rank's ops; `stages[s]` are the units of stage s. `known`: what other ranks' replays have worked out.

    The optimizer's state is left out: it is there all the time.
    """
    held = schedule.stages_of[rank]
    base: Bytes = [0.0] * len(CATEGORIES)
    for s in held:
        for u in stages[s]:
            base[PARAMETERS] += u.cost.parameters
    base[PARAMETERS] += extra.parameters
    base[MESSAGES] = extra.messages
    base[ACTIVATIONS] = extra.parked
    came = _came(schedule, rank) if extra.pooled else frozenset()
    apart = (extra.lent, extra.copied, extra.taken)
    walks: dict[int, dict[_Place, _Walk]] = {}  # of every stage; alike ones have the same
    ahead: dict[tuple[int, bool] | None, float] = {None: 0.0}
    for s in held:
        alike = tuple((id(u.cost), u.choice) for u in stages[s])
        walks[s] = ({} if known is None else known).setdefault((alike, (s, "F") in came, (s, "B") in came, apart), {})
        first, last = stages[s][0].cost, stages[s][-1].cost
        ahead[s, True], ahead[s, False] = first.transient, last.transient + last.lender
    best, most, best_at = list(base), 0.0, "update"
    total = sum(base)
    flying = (0.0, 0.0)
    ops = schedule.order[rank]
    for op, (turn, following) in zip(ops, _turns(ops, extra.prefetch > 0), strict=True):
        place = _Place(turn, ahead[following], flying)
        walk = walks[op.stage].get(place)
        if walk is None:
            walk = walks[op.stage][place] = _walk(place, op.stage, stages[op.stage], extra, came)
        if total + walk.height > most:
            most, best_at = total + walk.height, str(op)
            best = [b + h for b, h in zip(base, walk.at_height, strict=True)]
        for category, change in walk.after:
            base[category] += change
        total += walk.change
        flying = walk.flying
    base[GRADIENTS] -= sum(flying)
    at_update = list(base)
    at_update[WORKSPACE] += extra.update
    if sum(at_update) > sum(best):
        best, best_at = at_update, "update"
    return RankMemory(rank, best_at, tuple(best), extra.host, extra.host)


@lru_cache(maxsize=1024)
def _turns(ops: tuple[Op, ...], prefetch: bool) -> list[tuple[_Turn, tuple[int, bool] | None]]:
    """Of every op its turn, and for which (stage, whether forward) a link is gathered ahead."""
    last_of = {(op.stage, op.kind): i for i, op in enumerate(ops)}
    begun: set[tuple[int, str]] = set()
    waiting = dict.fromkeys((op.stage for op in ops), 0)
    stayed = False
    out: list[tuple[_Turn, tuple[int, bool] | None]] = []
    for i, op in enumerate(ops):
        stage, kind, _ = op
        following = ops[i + 1] if i + 1 < len(ops) and ops[i + 1].kind != "W" else None
        alone = waiting[stage] == 0
        if kind != "W":
            waiting[stage] += 1 if kind == "F" else -1
            alone = alone if kind == "F" else waiting[stage] == 0
        turns = following is not None and following.stage == stage and (following.kind == "F") != (kind == "F")
        stays = turns and kind != "W" and prefetch
        ahead = None
        if following is not None and not stays and prefetch:
            ahead = following.stage, following.kind == "F"
        key = (stage, kind)
        out.append((_Turn(kind, key not in begun, last_of[key] == i, alone, stayed, stays), ahead))
        begun.add(key)
        stayed = stays
    return out


def _came(schedule: Schedule, rank: int) -> frozenset[tuple[int, str]]:
    """Stages of a rank whose forward ("F") or backward ("B") begins with a message."""
    place, last = schedule.placement, schedule.stages - 1
    inputs = {(s, "F") for s in schedule.stages_of[rank] if s and place[s - 1] != rank}
    return frozenset(inputs | {(s, "B") for s in schedule.stages_of[rank] if s < last and place[s + 1] != rank})


class _Step:
    """What is held inside an op: now, and when it was most."""

    __slots__ = ("_high", "_most", "activations", "gathered", "gradients")

    def __init__(self) -> None:
        self.gathered = self.gradients = self.activations = self._most = 0.0
        self._high = (0.0, 0.0, 0.0, 0.0)

    def mark(self, workspace: float = 0.0, gathered: float = 0.0, gradients: float = 0.0) -> None:
        gathered, gradients = self.gathered + gathered, self.gradients + gradients
        held = gathered + gradients + self.activations + workspace
        if held > self._most:
            self._most, self._high = held, (gathered, gradients, self.activations, workspace)

    def walked(self, flying: tuple[float, float]) -> _Walk:
        high: Bytes = [0.0] * len(CATEGORIES)
        high[GATHERED], high[GRADIENTS], high[ACTIVATIONS], high[WORKSPACE] = self._high
        now = ((GATHERED, self.gathered), (GRADIENTS, self.gradients), (ACTIVATIONS, self.activations))
        change = self.gathered + self.gradients + self.activations
        return _Walk(self._most, tuple(high), change, tuple((i, size) for i, size in now if size), flying)


def _walk(
    place: _Place, stage: int, units: Sequence[PlannedUnit], extra: Extra, came: frozenset[tuple[int, str]]
) -> _Walk:
    """One op, link by link."""
    turn, flying = place.turn, place.flying
    kind, step, prefetch = turn.kind, _Step(), extra.prefetch
    links = [(u, part) for u in units for part in range(u.cost.slices)]
    if kind != "F":
        links.reverse()
    gathers = [_gathers(u, turn) and not (i == 0 and turn.stayed) for i, (u, _) in enumerate(links)]
    sizes = [_size(u) for u, _ in links]
    if gathers[0]:
        step.gathered += sizes[0]
    for i, (u, part) in enumerate(links):
        c, last = u.cost, i == len(links) - 1
        if i and not prefetch and gathers[i]:
            step.gathered += sizes[i]
        if not last and prefetch and gathers[i + 1]:
            step.gathered += sizes[i + 1]
        ahead = place.ahead if last else 0.0
        given = extra.pooled if u is units[0] and (stage, "F") in came else 0.0  # of what it keeps, a message
        if kind == "F":
            if part == 0:
                step.activations += c.activation - given
            step.mark(c.forward_workspace, ahead)
        else:
            adds = kind != "W" and (turn.first or (_each_time(u) and kind == "B" and c.reduced < c.gradients))
            grad = extra.pooled if i == 0 and kind != "W" and (stage, "B") in came else 0.0
            early = c.gradients / c.slices if c.at_once and kind == "B" and adds else 0.0
            height = c.workspace if kind == "B" else c.split_workspace if kind == "I" else c.product
            step.mark(height - grad, ahead, early)
            if c.slices > 1:  # its gradient waits for those before
                step.gradients -= flying[0] + flying[1]
                flying = (0.0, 0.0)
            if adds:
                step.gradients += (c.gradients + c.borrowed) / c.slices
            step.mark(c.closing if kind == "B" else 0.0 if kind == "I" else c.product, ahead)
            if kind != "I":
                flying = _reduced(u, part, turn, flying, step, extra)
            if part == 0:
                kept, whole = c.kept_for_weight_grad, c.activation - given
                step.activations -= whole if kind == "B" else whole - kept if kind == "I" else kept
        if kind != "W" and _releases(u, turn) and not (last and turn.stays and u.choice.mode != "keep"):
            step.gathered -= sizes[i]
    return step.walked(flying)


def _reduced(
    u: PlannedUnit, part: int, turn: _Turn, flying: tuple[float, float], step: _Step, extra: Extra
) -> tuple[float, float]:
    """A link's gradient is complete: reduced at once, or in the last op. Returns the reduction that is under way."""
    c, each = u.cost, _each_time(u)
    whole, sums = c.gradients / c.slices, c.reduced / c.slices
    if not (turn.last or each):
        return flying
    if c.borrowed and extra.copied and part == 0:
        step.mark(gradients=extra.copied)
        step.gradients += extra.copied - c.borrowed
    if u.spec.layer == 0:
        step.mark(gradients=extra.taken)
        step.gradients -= extra.lent
    if c.reduced >= c.gradients:  # it stays whole; a second one is added to it when the third begins
        step.gradients += whole if each and turn.first and not turn.last else 0.0
        return flying
    step.mark(gradients=sums)
    step.gradients += sums - flying[0] - flying[1]
    if each and turn.kind == "W" and not turn.last:  # the next micro-batch has begun one of its own
        step.gradients += whole
    added = sums if each and not turn.first else 0.0
    if not extra.prefetch:  # it is waited for
        step.gradients -= whole + added
        return 0.0, 0.0
    return whole, added


def _size(u: PlannedUnit) -> float:
    """Bytes that are gathered for one link."""
    return u.cost.whole / u.cost.slices + u.cost.lender if u.cost.gather else 0.0


def _each_time(u: PlannedUnit) -> bool:
    return u.choice.reduce == "micro-batch"


def _gathers(u: PlannedUnit, turn: _Turn) -> bool:
    """Whether the op gathers the unit."""
    if turn.kind == "W" or not u.cost.gather:
        return False
    mode = u.choice.mode
    return mode == "zero3" or (turn.kind == "F" and (turn.alone if mode == "zero2" else turn.first))


def _releases(u: PlannedUnit, turn: _Turn) -> bool:
    if not u.cost.gather:
        return False
    mode = u.choice.mode
    return mode == "zero3" or (turn.kind != "F" and (turn.alone if mode == "zero2" else turn.last))
