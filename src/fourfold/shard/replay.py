"""Predicts a program's collectives and memory without running it. Pure arithmetic; no torch.

    collectives   every collective that the units issue, in order: (kind, unit, payload bytes), counted as in the ledger
    held          bytes of gathered parameters and of gradients after every instruction
    peak          maximum of these bytes at any moment; with `activations`, activations included

Shards and optimizer state are not counted. `Activations` gives the bytes of one micro-batch at each unit: peak during the
forward, bytes kept after it, peak during the backward before and after the unit's gradient is allocated, bytes left after it.
Each figure includes what the same micro-batch keeps from earlier units, so that a tensor used by two units counts once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from fourfold.program import Gather, Instruction, Op, Program, Reduce, Release, UnitOp

__all__ = ["Activations", "Collective", "Footprint", "Replay", "replay"]


@dataclass(frozen=True)
class Footprint:
    """A unit's buffer sizes: its flat length in elements (padding included), and how it is sharded."""

    elements: int
    shards: int = 1
    copies: int = 1
    lender: str | None = None
    """The unit whose parameter it borrows (tied weights)."""
    borrowed: int = 0
    """Number of borrowed elements; it accumulates their gradient until the lender is reduced."""
    sliced: bool = False
    """Whether it is a slice: its gradient is allocated only when no reduction is in flight."""
    joined: tuple[str, ...] = ()
    """Units, itself included, that share one gradient buffer and one all-reduce."""


@dataclass(frozen=True)
class Activations:
    """Activation bytes of one micro-batch while it passes through a unit, without parameters and accumulated gradients."""

    forward: int
    """Peak during the forward."""
    kept: int
    """After the forward, output included."""
    before: int
    """Peak during the backward, before the unit's gradient is allocated."""
    after: int
    """Peak during the backward, after the unit's gradient was allocated."""
    left: int
    """After the backward, gradient of the input included."""


@dataclass(frozen=True)
class Collective:
    kind: str
    unit: str
    bytes: int


@dataclass(frozen=True)
class Replay:
    """The collectives and memory of one step on one rank."""

    collectives: tuple[Collective, ...]
    held: tuple[int, ...]
    """Bytes of gathered parameters and gradients after every instruction."""
    peak: int
    """Peak bytes, activations included where given."""

    def bytes(self, kind: str) -> int:
        """Total payload of the collectives of one kind."""
        return sum(c.bytes for c in self.collectives if c.kind == kind)

    def calls(self, kind: str) -> int:
        """Number of collectives of one kind."""
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
    """Replay a program. `units_of_op[stage]` names the units of ops that the program does not split by unit."""
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
        self.live: dict[int, int] = {}  # activation bytes by micro-batch
        self.collectives: list[Collective] = []
        self.holders: dict[str, set[str]] = {}
        self.grads: set[str] = set()  # units with a full gradient that accumulates
        self.borrowed: dict[str, int] = {}  # by borrower: bytes of its accumulator for the borrowed parameter
        self.sums: set[str] = set()  # units with a reduced gradient
        self.in_flight_names: deque[str] = deque()
        self.whole: set[str] = set()  # reduced but unsharded, so the gradient keeps its size

    def do(self, instruction: Instruction, units_of_op: Mapping[int, tuple[str, ...]]) -> None:
        match instruction:
            case Gather(unit):
                for name in self._with_lender(unit):
                    self._gather(name, unit)
            case Release(unit):
                for name in self._with_lender(unit):
                    self._release(name, unit)
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
        """Update the peak; `micro_batch` momentarily holds `now` bytes instead of its live ones."""
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

    def _gather(self, name: str, user: str) -> None:
        unit, holders = self.units[name], self.holders.setdefault(name, set())
        if not holders and unit.shards > 1 and unit.elements:
            self.collectives.append(Collective("all_gather", name, unit.elements * self.compute))
            self.now += unit.elements * self.compute
        holders.add(user)

    def _release(self, name: str, user: str) -> None:
        unit, holders = self.units[name], self.holders[name]
        holders.discard(user)
        if not holders and unit.shards > 1:
            self.now -= unit.elements * self.compute

    # ---- gradients ----

    def _contribute(self, name: str) -> None:
        unit = self.units[name]
        if unit.borrowed and name not in self.borrowed:
            self.borrowed[name] = unit.borrowed * self.reduce
            self.now += self.borrowed[name]
        if name not in self.grads and unit.elements:
            self._allocate_grad(name)

    def _allocate_grad(self, name: str) -> None:
        """Allocate a full gradient. A slice first waits for all reductions, an unsharded unit for its own."""
        unit = self.units[name]
        if unit.sliced:
            self.finish()
        if name in self.whole:
            self.whole.remove(name)
            self._sum(name, unit.elements * self.reduce)
        allocated = any(other in self.grads or other in self.whole for other in unit.joined)
        self.grads.add(name)
        if not allocated:
            self.now += sum(self.units[other].elements for other in unit.joined or (name,)) * self.reduce

    def _sum(self, name: str, size: int) -> None:
        """Account for a finished reduction: it becomes the unit's reduced gradient, or is added to the existing one."""
        if name in self.sums:
            self.now -= size
        self.sums.add(name)

    def _reduce(self, name: str) -> None:
        unit = self.units[name]
        payload = unit.elements * self.reduce
        if not payload:
            return
        self._collect(name)
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
        self.in_flight_names.append(name)
        self._mark()
        while len(self.in_flight_names) > self.in_flight:
            self._complete(self.in_flight_names.popleft())

    def _collect(self, name: str) -> None:
        """Allocate the gradient if needed, add the borrowers' gradients to it and free theirs."""
        if name not in self.grads:
            self._allocate_grad(name)
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
        while self.in_flight_names:
            self._complete(self.in_flight_names.popleft())
