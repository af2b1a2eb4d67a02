"""What a program's unit verbs will communicate and hold, without running it. Pure arithmetic; no torch.

    collectives   every collective the verbs issue, in order: (kind, unit, payload bytes), as the ledger counts payloads
    held          bytes of gathered parameters and of gradients after every instruction; their peak

`resident` (shards and optimizer state) and activations come on top; they do not depend on the order of instructions in the way
gathered parameters and gradients do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from fourfold.program import Gather, Instruction, Op, Part, Program, Reduce, Release

__all__ = ["Collective", "Footprint", "Replay", "replay"]


@dataclass(frozen=True)
class Footprint:
    """A unit as its buffers see it: the flat length (padding included), and how it is shared."""

    elements: int
    shards: int = 1
    copies: int = 1
    lender: str | None = None
    """The unit whose parameter it borrows."""


@dataclass(frozen=True)
class Collective:
    kind: str
    unit: str
    bytes: int


@dataclass(frozen=True)
class Replay:
    """What a step's verbs do on one rank."""

    collectives: tuple[Collective, ...]
    held: tuple[int, ...]
    """Bytes after every instruction; within an op, gradients and parameters only grow until its end."""

    @property
    def peak(self) -> int:
        return max(self.held, default=0)

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
) -> Replay:
    """Replay the verbs of a program. `units_of_op[stage]` names the units of ops that stand whole in it."""
    walk = _Walk(units, compute_bytes, reduce_bytes, in_flight)
    held = []
    for instruction in program.instructions:
        walk.do(instruction, units_of_op or {})
        held.append(walk.now)
    walk.finish()
    return Replay(tuple(walk.collectives), tuple(held))


class _Walk:
    def __init__(self, units: Mapping[str, Footprint], compute: int, reduce: int, in_flight: int):
        self.units, self.compute, self.reduce, self.in_flight = units, compute, reduce, in_flight
        self.now = 0
        self.collectives: list[Collective] = []
        self.holders: dict[str, set[str]] = {}
        self.grads: set[str] = set()  # whole gradients that accumulate
        self.sums: set[str] = set()  # reduced gradients
        self.under_way: deque[str] = deque()

    def do(self, instruction: Instruction, units_of_op: Mapping[int, tuple[str, ...]]) -> None:
        match instruction:
            case Gather(unit):
                for name in self._with_lender(unit):
                    self._hold(name, unit)
            case Release(unit):
                for name in self._with_lender(unit):
                    self._let_go(name, unit)
            case Op(stage, kind, _) if kind != "F":
                for name in units_of_op.get(stage, ()):
                    self._contribute(name)
            case Part(_, kind, _, unit) if kind != "F":
                self._contribute(unit)
            case Reduce(unit):
                self._reduce(unit)

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

    def _contribute(self, name: str) -> None:
        if name not in self.grads:
            self.grads.add(name)
            self.now += self.units[name].elements * self.reduce

    def _reduce(self, name: str) -> None:
        self._contribute(name)
        self.grads.remove(name)
        unit = self.units[name]
        payload = unit.elements * self.reduce
        if not payload:
            return
        if unit.shards == 1:
            if unit.copies > 1:
                self.collectives.append(Collective("all_reduce", name, payload))
            if name in self.sums:  # added to what is there
                self.now -= payload
            self.sums.add(name)
            return
        self.collectives.append(Collective("reduce_scatter", name, payload))
        self.now += payload // unit.shards
        self.under_way.append(name)
        while len(self.under_way) > self.in_flight:
            self._complete(self.under_way.popleft())

    def _complete(self, name: str) -> None:
        unit = self.units[name]
        payload = unit.elements * self.reduce
        self.now -= payload
        if unit.copies > 1:
            self.collectives.append(Collective("all_reduce", name, payload // unit.shards))
        if name in self.sums:
            self.now -= payload // unit.shards
        self.sums.add(name)

    def finish(self) -> None:
        while self.under_way:
            self._complete(self.under_way.popleft())
