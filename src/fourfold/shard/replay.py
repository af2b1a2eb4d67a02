"""What a program's verbs will communicate and what its rank will hold, without running it. Pure arithmetic; no torch.

    collectives   every collective the verbs issue, in order: (kind, unit, payload bytes), as the ledger counts payloads
    held          bytes of gathered parameters and of gradients after every instruction
    peak          the most of them at any moment; with `activations`, together with what computations hold

`resident` (shards and optimizer state) comes on top. What a computation holds is said by `Activations`, unit by unit:

    forward    over what was there before it                            then it leaves `kept` (its output among it)
    backward   until the unit's gradient is taken, and from then on     then it leaves `left` (its input's gradient among it)

Both include what the micro-batch holds of the units before, so that what two units share counts once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from fourfold.program import Gather, Instruction, Op, Program, Reduce, Release, UnitOp

__all__ = ["Activations", "Collective", "Footprint", "Replay", "replay"]


@dataclass(frozen=True)
class Footprint:
    """A unit as its buffers see it: the flat length (padding included), and how it is shared."""

    elements: int
    shards: int = 1
    copies: int = 1
    lender: str | None = None
    """The unit whose parameter it borrows."""
    borrowed: int = 0
    """Elements that it borrows: it accumulates their gradient until the lender's is reduced."""
    sliced: bool = False
    """Whether its gradient is made when no reduction is under way."""
    joined: tuple[str, ...] = ()
    """Units, itself among them, whose gradients lie in one buffer and are summed together."""


@dataclass(frozen=True)
class Activations:
    """Bytes that one micro-batch holds on the way through a unit, parameters and accumulated gradients not counted."""

    forward: int
    """Most during its forward."""
    kept: int
    """After it."""
    before: int
    """Most during its backward, before gradients are added up."""
    after: int
    """Most from then on."""
    left: int
    """After its backward."""


@dataclass(frozen=True)
class Collective:
    kind: str
    unit: str
    bytes: int


@dataclass(frozen=True)
class Replay:
    """What a step does on one rank."""

    collectives: tuple[Collective, ...]
    held: tuple[int, ...]
    """Bytes of parameters and gradients after every instruction."""
    peak: int
    """Most bytes at any moment, activations included where they are known."""

    def bytes(self, kind: str) -> int:
        """Payload of all collectives of a kind."""
        return sum(c.bytes for c in self.collectives if c.kind == kind)

    def calls(self, kind: str) -> int:
        return sum(c.kind == kind for c in self.collectives)


def replay(
    program: Program,
    units: Mapping[str, Footprint],
    *,
    compute_bytes: int,
    reduce_bytes: int,
    in_flight: int = 1,
    units_of_op: Mapping[int, tuple[str, ...]] | None = None,
    activations: Mapping[str, Activations] | None = None,
) -> Replay:
    """Replay a program. `units_of_op[stage]` names the units of ops that stand whole in it."""
    walk = _ReplayState(units, compute_bytes, reduce_bytes, in_flight, activations or {})
    held = []
    for instruction in program.instructions:
        walk.do(instruction, units_of_op or {})
        held.append(walk.now)
    walk.finish()
    return Replay(tuple(walk.collectives), tuple(held), walk.peak)


class _ReplayState:
    def __init__(
        self,
        units: Mapping[str, Footprint],
        compute: int,
        reduce: int,
        in_flight: int,
        activations: Mapping[str, Activations],
    ):
        self.units, self.compute, self.reduce, self.in_flight = units, compute, reduce, in_flight
        self.activations = activations
        self.now = self.peak = 0
        self.live: dict[int, int] = {}  # activations by micro-batch
        self.collectives: list[Collective] = []
        self.holders: dict[str, set[str]] = {}
        self.grads: set[str] = set()  # whole gradients that accumulate
        self.borrowed: dict[str, int] = {}  # bytes of accumulators of what each unit borrows
        self.sums: set[str] = set()  # reduced gradients
        self.under_way: deque[str] = deque()
        self.whole: set[str] = set()  # reduced, and as large as before

    def do(self, instruction: Instruction, units_of_op: Mapping[int, tuple[str, ...]]) -> None:
        match instruction:
            case Gather(unit):
                for name in self._with_lender(unit):
                    self._hold(name, unit)
            case Release(unit):
                for name in self._with_lender(unit):
                    self._let_go(name, unit)
            case Op(stage, kind, micro_batch):
                names = units_of_op.get(stage, ())
                for name in names if kind == "F" else names[::-1]:
                    self._compute(name, kind, micro_batch)
            case UnitOp(_, kind, micro_batch, unit):
                self._compute(unit, kind, micro_batch)
            case Reduce(unit):
                self._reduce(unit)
        self._mark()

    def _mark(self, micro_batch: int = -1, now: int = 0) -> None:
        """Something was taken; of `micro_batch`, `now` bytes are there for the moment."""
        others = sum(live for m, live in self.live.items() if m != micro_batch)
        self.peak = max(self.peak, self.now + others + now)

    # ---- computing ----

    def _compute(self, name: str, kind: str, micro_batch: int) -> None:
        known = self.activations.get(name)
        if kind == "F":
            if known is not None:
                self._mark(micro_batch, known.forward)
                self.live[micro_batch] = known.kept
            return
        if known is not None and kind != "W":
            self._mark(micro_batch, known.before)
        self._contribute(name)
        if known is not None and kind != "W":
            self._mark(micro_batch, known.after)
            self.live[micro_batch] = known.left
        self._mark()

    # ---- parameters ----

    def _with_lender(self, unit: str) -> list[str]:
        lender = self.units[unit].lender
        return [unit] if lender is None else [unit, lender]

    def _hold(self, name: str, who: str) -> None:
        unit, holders = self.units[name], self.holders.setdefault(name, set())
        if not holders and unit.shards > 1 and unit.elements:
            self.collectives.append(Collective("all_gather", name, unit.elements * self.compute))
            self.now += unit.elements * self.compute
        holders.add(who)

    def _let_go(self, name: str, who: str) -> None:
        unit, holders = self.units[name], self.holders[name]
        holders.discard(who)
        if not holders and unit.shards > 1:
            self.now -= unit.elements * self.compute

    # ---- gradients ----

    def _contribute(self, name: str) -> None:
        unit = self.units[name]
        if unit.borrowed and name not in self.borrowed:
            self.borrowed[name] = unit.borrowed * self.reduce
            self.now += self.borrowed[name]
        if name not in self.grads and unit.elements:
            self._take(name)

    def _take(self, name: str) -> None:
        """A whole gradient; a slice's waits for all reductions, one that stays whole for its own."""
        unit = self.units[name]
        if unit.sliced:
            self.finish()
        if name in self.whole:
            self.whole.remove(name)
            self._sum(name, unit.elements * self.reduce)
        there = any(other in self.grads or other in self.whole for other in unit.joined)
        self.grads.add(name)
        if not there:
            self.now += sum(self.units[other].elements for other in unit.joined or (name,)) * self.reduce

    def _sum(self, name: str, size: int) -> None:
        """A sum is there: the unit's gradient, or added to what was there."""
        if name in self.sums:
            self.now -= size
        self.sums.add(name)

    def _reduce(self, name: str) -> None:
        unit = self.units[name]
        payload = unit.elements * self.reduce
        if not payload:
            return
        self._take_over(name)
        self.grads.remove(name)
        if unit.shards == 1:
            self.whole.add(name)
            together = unit.joined or (name,)
            if unit.copies > 1 and self.whole.issuperset(together):
                payload = sum(self.units[other].elements for other in together) * self.reduce
                self.collectives.append(Collective("all_reduce", name, payload))
            return
        self.collectives.append(Collective("reduce_scatter", name, payload))
        self.now += payload // unit.shards
        self.under_way.append(name)
        self._mark()
        while len(self.under_way) > self.in_flight:
            self._complete(self.under_way.popleft())

    def _take_over(self, name: str) -> None:
        """A unit has a gradient when it is reduced, and that of what was borrowed from it goes there."""
        if name not in self.grads:
            self._take(name)
        self._mark()
        for borrower in [b for b in self.borrowed if self.units[b].lender == name]:
            self.now -= self.borrowed.pop(borrower)

    def _complete(self, name: str) -> None:
        unit = self.units[name]
        payload = unit.elements * self.reduce
        self.now -= payload
        if unit.copies > 1:
            self.collectives.append(Collective("all_reduce", name, payload // unit.shards))
        self._sum(name, payload // unit.shards)

    def finish(self) -> None:
        """Wait for all reductions."""
        while self.under_way:
            self._complete(self.under_way.popleft())
