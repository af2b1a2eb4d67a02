"""Units whose gradients are summed together: one all-reduce in place of many small ones, each of which takes its messages.

A unit in one shard keeps its whole gradient until the update, so gradients of several can lie in one buffer (`layout.joined`
says of which), taken when the first of them is made. The sum starts when the last of them was told to reduce, whichever that
is, and ends for all at once. Gradients that are reduced once a step alone are joined.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.shard.layout import joined
from fourfold.shard.sharing import Reduction
from fourfold.shard.unit import Unit

__all__ = ["Joined", "join"]


def join(units: Sequence[Unit]) -> None:
    """Join units in one shard, given in the order of the backward."""
    units = [u for u in units if u.layout.total and u.sharing.copies > 1]
    for group in joined([u.layout.total * u.reduce_dtype.itemsize for u in units]):
        if len(group) > 1:
            Joined([units[i] for i in group])


class Joined:
    """Units with one buffer for their gradients."""

    def __init__(self, units: Sequence[Unit]):
        self.units = list(units)
        self._sizes = [u.layout.total for u in self.units]
        self._flat: Tensor | None = None
        self._parts: dict[str, Tensor] = {}  # of the buffer, by unit
        self._complete: set[str] = set()
        for unit in self.units:
            assert unit.sharing.shards == 1, f"{unit.name} is sharded"
            unit.joined = self

    def part(self, unit: Unit) -> Tensor:
        """A unit's part of the buffer, not initialised."""
        if self._flat is None:
            self._flat = torch.empty(sum(self._sizes), dtype=unit.reduce_dtype, device=unit.full.device)
            self._parts = {u.name: part for u, part in zip(self.units, self._flat.split(self._sizes), strict=True)}
        return self._parts.pop(unit.name)

    def reduce(self, unit: Unit) -> None:
        """A unit's gradient is complete; the sum starts with the last one."""
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

    def forget(self) -> None:
        """The gradients are not wanted."""
        self._flat, self._parts, self._complete = None, {}, set()
