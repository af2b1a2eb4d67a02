"""Gradient bucketing of unsharded units: one all-reduce of a shared buffer instead of many small ones.

An unsharded unit keeps its full gradient until the update, so the gradients of several units can share one buffer
(`layout.joined` forms the groups), allocated when the first of them is needed. The all-reduce starts when the last unit of
the group calls `reduce`. Only units that are reduced once per step are joined.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.shard.layout import joined
from fourfold.shard.sharing import Reduction
from fourfold.shard.unit import Unit

__all__ = ["Joined", "join_units"]


def join_units(units: Sequence[Unit]) -> None:
    """Join unsharded units, given in backward order, into groups that share one all-reduce."""
    units = [u for u in units if u.layout.total and u.sharing.copies > 1]
    for group in joined([u.layout.total * u.reduce_dtype.itemsize for u in units]):
        if len(group) > 1:
            Joined([units[i] for i in group])


class Joined:
    """Units that share one gradient buffer."""

    def __init__(self, units: Sequence[Unit]):
        self.units = list(units)
        self._sizes = [u.layout.total for u in self.units]
        self._flat: Tensor | None = None
        self._parts: dict[str, Tensor] = {}  # views of the buffer, by unit name
        self._complete: set[str] = set()
        for unit in self.units:
            assert unit.sharing.shards == 1, f"{unit.name} is sharded"
            unit.joined = self

    def part(self, unit: Unit) -> Tensor:
        """A unit's part of the buffer, uninitialised."""
        if self._flat is None:
            self._flat = torch.empty(sum(self._sizes), dtype=unit.reduce_dtype, device=unit.full.device)
            self._parts = {u.name: part for u, part in zip(self.units, self._flat.split(self._sizes), strict=True)}
        return self._parts.pop(unit.name)

    def reduce(self, unit: Unit) -> None:
        """Mark a unit's gradient as complete; when it is the last of the group, start the all-reduce."""
        self._complete.add(unit.name)
        if len(self._complete) < len(self.units):
            return
        flat, self._flat, self._complete = self._flat, None, set()
        assert flat is not None
        what = f"the sum of the gradients of {self.units[0].name} to {self.units[-1].name}"
        started = Reduction(flat, unit.sharing, what, self._reduced)
        for each in self.units:
            each.follow(started)

    def _reduced(self, flat: Tensor) -> None:
        for unit, part in zip(self.units, flat.split(self._sizes), strict=True):
            unit.reduced(part)

    def discard(self) -> None:
        """Drop the buffer and its gradients."""
        self._flat, self._parts, self._complete = None, {}, set()
