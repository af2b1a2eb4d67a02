"""Costs: the times and memory sizes that a simulation uses.

The units of time and memory are the caller's. A single number is **the cost of one micro-batch on one rank** (all its stages
together) and is divided evenly over the rank's stages; a tuple has one number per stage. With the defaults, time is
in forwards of one rank, and memory in micro-batches of one rank.

Numbers may be int, `Fraction` or float. Without floats every result is exact: costs are brought to a common
denominator, time is counted in integer ticks, and results are ticks times `unit`.

Memory of one micro-batch in a stage, over time:

    start of F ─── activation ───► end of I ─── weight_grad_activation ───► end of W        (B ends both)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal

from fourfold.errors import ScheduleError

__all__ = ["Costs", "Number", "StageCosts", "Table", "Ticks", "divide", "per_share"]

Number = int | float | Fraction
PerStage = Number | tuple[Number, ...]
PerName = Number | Mapping[str, Number]
Table = tuple[Any, ...]
"""Numbers by stage; `Any` keeps unions of number types out of the arithmetic."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times and memory of ops, messages and collectives. Everything is at least 0."""

    forward: PerStage = 1
    """F: one micro-batch on one rank, or one number per stage."""
    input_grad: PerStage = 1
    """I."""
    weight_grad: PerStage = 1
    """W."""
    backward: PerStage | None = None
    """B. None: input_grad + weight_grad. Measured, an unsplit backward is often cheaper than I plus W."""
    message: Number | tuple[tuple[Number, ...], ...] = 0
    """One activation or gradient between two ranks; or a table, [sender][receiver]."""
    link: Literal["private", "edge", "rank"] = "private"
    """Which messages queue behind each other: none; those of one sender and receiver; all of one sender."""
    instruction: Number = 0
    """Fixed cost of every instruction on the rank that issues it. In a schedule, the ops are the instructions."""
    activation: PerStage = 1
    """Memory held from the start of F to the end of I (or B)."""
    weight_grad_activation: PerStage | None = None
    """The part of `activation` that W still needs: held from the end of I to the end of W. None: all of it."""
    gather: PerName = field(default=0, hash=False)
    """Programs only: time of a GATHER, for all units or by unit name."""
    reduce: PerName = field(default=0, hash=False)
    """Programs only: time of a REDUCE."""
    stream: PerName = field(default=0, hash=False)
    """Programs only: time of a STREAM, for all buckets or by bucket name."""
    gathered: PerName = field(default=0, hash=False)
    """Programs only: memory of a unit's parameters between GATHER and RELEASE."""

    def __post_init__(self) -> None:
        if self.link not in ("private", "edge", "rank"):
            raise ScheduleError(f"link = '{self.link}' is invalid; choose one of private, edge, rank")
        for name in self.__dataclass_fields__:
            if name == "link":
                continue
            for value in _numbers(getattr(self, name)):
                if isinstance(value, bool) or not isinstance(value, int | float | Fraction):
                    raise ScheduleError(f"costs.{name} = {value!r} is not a number")
                if not (math.isfinite(value) and value >= 0):
                    raise ScheduleError(f"costs.{name} = {value} must be finite and at least 0; use 0 for 'free'")

    def of_stages(self, placement: Sequence[int], ranks: int) -> StageCosts:
        """Costs of each stage of a placement, without the fixed cost of an instruction."""
        forward = per_share(self.forward, placement, "forward")
        input_grad = per_share(self.input_grad, placement, "input_grad")
        weight_grad = per_share(self.weight_grad, placement, "weight_grad")
        if self.backward is None:
            backward = tuple(i + w for i, w in zip(input_grad, weight_grad, strict=True))
        else:
            backward = per_share(self.backward, placement, "backward")
        activation = per_share(self.activation, placement, "activation")
        if self.weight_grad_activation is None:
            kept = activation
        else:
            kept = per_share(self.weight_grad_activation, placement, "weight_grad_activation")
            for stage, (k, a) in enumerate(zip(kept, activation, strict=True)):
                if k > a:
                    raise ScheduleError(
                        f"stage {stage}: weight_grad_activation = {k} is part of activation = {a}; use at most {a}"
                    )
        hops = tuple((self.hop(a, b, ranks), self.hop(b, a, ranks)) for a, b in pairwise(placement))
        return StageCosts(
            forward=forward,
            backward=backward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            activation=activation,
            kept=kept,
            down=tuple(d for d, _ in hops),
            up=tuple(u for _, u in hops),
            link=self.link,
        )

    def hop(self, sender: int, receiver: int, ranks: int) -> Number:
        """The time of a message from one rank to another."""
        if sender == receiver:
            return 0
        if not isinstance(self.message, tuple):
            return self.message
        if len(self.message) != ranks or any(len(row) != ranks for row in self.message):
            sizes = [len(row) for row in self.message]
            raise ScheduleError(f"costs.message has rows of {sizes}; {ranks} ranks need {ranks} rows of {ranks}")
        return self.message[sender][receiver]


def _numbers(value: object) -> list[object]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, tuple | list):
        return [x for item in value for x in _numbers(item)]
    return [value]


def per_share(value: PerStage, placement: Sequence[int], name: str) -> tuple[Number, ...]:
    """One number per stage: a rank's cost divided evenly over its stages, or the given tuple."""
    if isinstance(value, tuple | list):
        if len(value) != len(placement):
            raise ScheduleError(f"costs.{name} has {len(value)} entries; {len(placement)} stages need {len(placement)}")
        return tuple(value)
    held: dict[int, int] = {}
    for rank in placement:
        held[rank] = held.get(rank, 0) + 1
    return tuple(divide(value, held[rank]) for rank in placement)


def divide(value: Number, by: Number) -> Number:
    """Divide exactly, unless one of the numbers is a float."""
    if isinstance(value, float) or isinstance(by, float):
        return value / by
    share = Fraction(value) / by
    return share.numerator if share.denominator == 1 else share


@dataclass(frozen=True)
class StageCosts:
    """Costs of one placement, one number per stage."""

    forward: Table
    backward: Table
    input_grad: Table
    weight_grad: Table
    activation: Table
    """Held from the start of F to the end of I or B."""
    kept: Table
    """Held from the end of I to the end of W."""
    down: Table
    """down[s]: the activation from stage s to s + 1; 0 on one rank."""
    up: Table
    """up[s]: the gradient from stage s + 1 to s."""
    link: str

    @property
    def times(self) -> dict[str, Table]:
        """The times of every kind of op."""
        return {"F": self.forward, "B": self.backward, "I": self.input_grad, "W": self.weight_grad}

    def launched(self, instruction: Number) -> StageCosts:
        """These costs with the fixed cost of an instruction added to every op."""

        def plus(table: Table) -> Table:
            return tuple(x + instruction for x in table)

        return replace(
            self,
            forward=plus(self.forward),
            backward=plus(self.backward),
            input_grad=plus(self.input_grad),
            weight_grad=plus(self.weight_grad),
        )

    def scaled(self, time: Callable[[Table], Table], memory: Callable[[Table], Table]) -> StageCosts:
        """These costs with `time` applied to all times and `memory` to all memory sizes."""
        return StageCosts(
            forward=time(self.forward),
            backward=time(self.backward),
            input_grad=time(self.input_grad),
            weight_grad=time(self.weight_grad),
            activation=memory(self.activation),
            kept=memory(self.kept),
            down=time(self.down),
            up=time(self.up),
            link=self.link,
        )


@dataclass(frozen=True)
class Ticks:
    """A common unit for a set of numbers, so that each is an integer number of ticks; with floats, numbers stay as they are."""

    unit: Number

    @classmethod
    def measuring(cls, *groups: Sequence[Number]) -> Ticks:
        denominator = 1
        for group in groups:
            for value in group:
                if isinstance(value, float):
                    return cls(1.0)
                if isinstance(value, Fraction):
                    denominator = math.lcm(denominator, value.denominator)
        return cls(Fraction(1, denominator) if denominator > 1 else 1)

    def count(self, value: Number) -> Number:
        """The value in ticks."""
        if isinstance(self.unit, Fraction):
            return int(value / self.unit)
        return float(value) if isinstance(self.unit, float) else value

    def counts(self, values: Table) -> Table:
        return tuple(map(self.count, values))
