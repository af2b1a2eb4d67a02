"""How the elements of a dim are divided among the ranks of an axis: padded blocks of equal size, without splitting heads.

A **run** (start, stop, at): elements [start, stop) of the serial dim are at positions [at, …) of a rank's part. Positions without
a run are padding. Fused matrices are divided one by one: with gate and up fused, a rank has [its gate | its up], so that
corresponding elements are on one rank. Pure arithmetic, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from fourfold.piece import Piece

__all__ = ["Blocks", "Runs", "cut", "even", "fuse", "grouped_heads", "make_pieces", "round_up", "single", "slice_of"]

Runs = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Blocks:
    """`total` elements divided into `len(runs)` parts of `size` positions each."""

    total: int
    size: int
    runs: tuple[Runs, ...]

    @property
    def parts(self) -> int:
        return len(self.runs)

    def joined(self) -> Runs:
        """All parts concatenated into one of `parts · size` positions; adjacent runs are merged."""
        out: list[tuple[int, int, int]] = []
        for part, runs in enumerate(self.runs):
            for start, stop, at in runs:
                at += part * self.size
                if out and out[-1][1] == start and out[-1][2] + out[-1][1] - out[-1][0] == at:
                    out[-1] = (out[-1][0], stop, out[-1][2])
                else:
                    out.append((start, stop, at))
        return tuple(out)

    def filled(self, part: int) -> int:
        """Number of positions of a part that are not padding."""
        return sum(stop - start for start, stop, _ in self.runs[part])


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def single(total: int) -> Runs:
    """The undivided dim."""
    return ((0, total, 0),)


def even(total: int, parts: int, grain: int = 1) -> Blocks:
    """Equal blocks of whole grains, one after another; padding at the end.

    Large blocks have a multiple of 8 features: matmuls with odd widths take several times as long on a GPU.
    """
    size = round_up(total // grain, parts) // parts * grain
    if parts > 1 and grain == 1 and size > 512:
        size = round_up(size, 8)
    bounds = [(min(p * size, total), min((p + 1) * size, total)) for p in range(parts)]
    return Blocks(total, size, tuple(((a, b, 0),) if a < b else () for a, b in bounds))


def fuse(*blocks: Blocks) -> Blocks:
    """Matrices stacked along the dim: every part has a block of each matrix."""
    bases = [0, *accumulate(b.total for b in blocks)]
    places = [0, *accumulate(b.size for b in blocks)]
    runs = tuple(
        tuple(
            (start + base, stop + base, at + place)
            for b, base, place in zip(blocks, bases, places, strict=False)
            for start, stop, at in b.runs[p]
        )
        for p in range(blocks[0].parts)
    )
    return Blocks(bases[-1], places[-1], runs)


def grouped_heads(heads: int, kv_heads: int, width: int, parts: int) -> tuple[Blocks, Blocks, tuple[int | None, ...]]:
    """Blocks of the query heads, blocks of the key (or value) heads, and by part the key head that it shares.

    With at least as many key heads as parts, whole groups (a key head and its query heads) are distributed, and no key
    head is shared (None). With fewer, `parts // kv_heads` parts share a key head: its query heads are distributed over
    them, and its features are divided evenly and gathered; a part beyond the last key head is padding (None).
    """
    group = heads // kv_heads
    if kv_heads >= parts:
        keys = even(kv_heads * width, parts, width)
        return even(heads * width, parts, group * width), keys, (None,) * parts
    sharing = parts // kv_heads
    each = round_up(group, sharing) // sharing
    runs: list[Runs] = []
    shared: list[int | None] = []
    for p in range(parts):
        key, place = divmod(p, sharing)
        first, last = key * group + min(place * each, group), key * group + min((place + 1) * each, group)
        used = key < kv_heads and first < last
        runs.append(((first * width, last * width, 0),) if used else ())
        shared.append(key if used else None)
    return Blocks(heads * width, each * width, tuple(runs)), even(kv_heads * width, parts), tuple(shared)


def cut(runs: Runs, size: int, ways: int, index: int) -> tuple[Runs, int]:
    """The `index`-th of `ways` equal divisions of a part of `size` positions: its runs and size."""
    step = round_up(size, ways) // ways
    low, high = index * step, (index + 1) * step
    out = []
    for start, stop, at in runs:
        a, b = max(low, at), min(high, at + stop - start)
        if a < b:
            out.append((start + a - at, start + b - at, a - low))
    return tuple(out), step


def slice_of(blocks: Blocks, count: int, index: int, ways: int = 1) -> Blocks:
    """The `index`-th of `count` slices of every part; if `ways` ranks share a part, of each rank's share.

    `total` remains the size of the serial dim, although the slices hold only some of it.
    """
    held = round_up(blocks.size, ways) // ways
    low, high = index * held // count, (index + 1) * held // count
    parts = []
    for runs in blocks.runs:
        mine: list[tuple[int, int, int]] = []
        for way in range(ways):
            for start, stop, at in cut(runs, blocks.size, ways, way)[0]:
                a, b = max(low, at), min(high, at + stop - start)
                if a < b:
                    mine.append((start + a - at, start + b - at, way * (high - low) + a - low))
        parts.append(tuple(mine))
    return Blocks(blocks.total, ways * (high - low), tuple(parts))


def make_pieces(
    name: str, shape: tuple[int, ...], runs: tuple[Runs, ...], copies_over: tuple[str, ...]
) -> tuple[Piece, ...]:
    """The pieces of a local parameter whose dims contain `runs` of the serial parameter `name`."""
    boxes: list[tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]] = [((), ())]
    for dim in runs:
        boxes = [((*theirs, (a, b)), (*ours, (at, at + b - a))) for theirs, ours in boxes for a, b, at in dim]
    return tuple(Piece(name, shape, theirs, ours, copies_over) for theirs, ours in boxes)
