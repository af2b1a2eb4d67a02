"""Where each parameter of a unit lies in the unit's flat buffer. Pure arithmetic, shared by engine and planner; no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["ALIGN", "JOIN", "FlatLayout", "Slot", "joined", "lay_out"]

ALIGN = 64
"""Elements. A parameter starts on a multiple of this, and so does every rank's shard: vectorised kernels then see the same
main loop and tail wherever a parameter lies, so an update has the same bits under every plan, and matrix operands are
aligned."""
JOIN = 1 << 20
"""Bytes. Whole gradients are summed together until they are as much: smaller sums take longer than their bytes do."""


@dataclass(frozen=True)
class Slot:
    """Elements [start, stop) of the flat buffer are the parameter `name`, row-major."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class FlatLayout:
    """Slots in order, and the length of the buffer: a multiple of ALIGN times the number of shards."""

    slots: tuple[Slot, ...]
    total: int
    shards: int

    def gaps(self) -> list[tuple[int, int]]:
        """Elements that belong to no slot."""
        ends = [0, *(slot.stop for slot in self.slots)]
        starts = [*(slot.start for slot in self.slots), self.total]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def shard_range(self, index: int) -> tuple[int, int]:
        """Elements of the buffer that shard `index` holds."""
        length = self.total // self.shards
        return index * length, (index + 1) * length


def lay_out(shapes: Mapping[str, tuple[int, ...]], shards: int = 1) -> FlatLayout:
    """Parameters one after another in the given order."""
    slots, at = [], 0
    for name, shape in shapes.items():
        slot = Slot(name, tuple(shape), at, at + math.prod(shape))
        slots.append(slot)
        at = _round_up(slot.stop, ALIGN)
    return FlatLayout(tuple(slots), _round_up(at, ALIGN * shards), shards)


def joined(sizes: Sequence[float]) -> list[list[int]]:
    """Which of some gradients, in the order in which they are made, are summed together; by their bytes.

    The first ones, before which nothing is under way, wait for half as many; the last few go with those before them.
    """
    groups: list[list[int]] = []
    few, room, left = JOIN / 2, 0.0, sum(sizes)
    for i, size in enumerate(sizes):
        if not groups or (room <= 0 and left >= few):
            room = JOIN if groups else few
            groups.append([])
        groups[-1].append(i)
        room, left = room - size, left - size
    return groups


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
