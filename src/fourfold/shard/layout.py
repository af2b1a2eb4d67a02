"""Offsets of a unit's parameters in its flat buffer. Pure arithmetic, shared by the runtime and the planner; no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["ALIGN", "JOIN", "FlatLayout", "Slot", "joined", "lay_out"]

ALIGN = 64
"""Elements. Parameters and shards start at multiples of this, so that vectorised kernels split them into the same main loop
and tail at any offset: updates are bit-identical under every plan, and matmul operands are aligned."""
JOIN = 1 << 20
"""Bytes. Size of a group of joined gradients: latency dominates smaller all-reduces."""


@dataclass(frozen=True)
class Slot:
    """Elements [start, stop) of the flat buffer are the parameter `name`, row-major."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class FlatLayout:
    """Slots in order, and the buffer's length `total`, a multiple of ALIGN · shards."""

    slots: tuple[Slot, ...]
    total: int
    shards: int

    def gaps(self) -> list[tuple[int, int]]:
        """Ranges of elements that belong to no slot (padding)."""
        ends = [0, *(slot.stop for slot in self.slots)]
        starts = [*(slot.start for slot in self.slots), self.total]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def shard_range(self, index: int) -> tuple[int, int]:
        """Elements of the buffer that shard `index` holds."""
        length = self.total // self.shards
        return index * length, (index + 1) * length


def lay_out(shapes: Mapping[str, tuple[int, ...]], shards: int = 1) -> FlatLayout:
    """Lay out parameters one after another, in the given order."""
    slots, at = [], 0
    for name, shape in shapes.items():
        slot = Slot(name, tuple(shape), at, at + math.prod(shape))
        slots.append(slot)
        at = _round_up(slot.stop, ALIGN)
    return FlatLayout(tuple(slots), _round_up(at, ALIGN * shards), shards)


def joined(sizes: Sequence[float]) -> list[list[int]]:
    """Group gradients that share one all-reduce: indices into `sizes` (bytes, in the order of the backward).

    Groups have about JOIN bytes. The first group has half of it, so that communication starts early; a remainder of less
    than half is added to the last group.
    """
    groups: list[list[int]] = []
    half, room, left = JOIN / 2, 0.0, sum(sizes)
    for i, size in enumerate(sizes):
        if not groups or (room <= 0 and left >= half):
            room = JOIN if groups else half
            groups.append([])
        groups[-1].append(i)
        room, left = room - size, left - size
    return groups


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
