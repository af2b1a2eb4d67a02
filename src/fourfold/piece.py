"""Pieces: which parts of which serial parameters a local parameter holds.

A **serial parameter** is a parameter of the model as one process would hold it, by its name there. A local parameter
(on some rank, on some grid, cut or fused or padded) is a list of pieces; elements of it that no piece covers are padding.
Initial weights, the gradient norm, checkpoints, import, export and "are these replicas equal?" are functions of pieces.

A **box** is a tuple of (start, stop) per dim. If a rank holds only the range [lo, hi) of a parameter's flat buffer, `flat_boxes`
cuts it into boxes: a flat range of an n-dim tensor is at most 2n - 1 boxes.

No torch here: these are facts about shapes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["Box", "Piece", "PiecePart", "flat_boxes", "intersect", "offset_box", "parts_of_range", "shape_of", "whole"]

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Piece:
    """The elements `local_slice` of a local parameter are the elements `global_slice` of the serial parameter `name`.

    `copies_over` names the mesh axes along which other ranks hold an identical copy. The rank at coordinate 0 on all of
    them is the owner: it alone counts the piece in a norm. Checkpoints are written by all holders, a share of the names each.
    """

    name: str
    global_shape: tuple[int, ...]
    global_slice: Box
    local_slice: Box
    copies_over: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.global_shape) == len(self.global_slice) == len(self.local_slice), self
        assert shape_of(self.global_slice) == shape_of(self.local_slice), self
        assert all(0 <= a <= b <= n for (a, b), n in zip(self.global_slice, self.global_shape, strict=True)), self

    @property
    def elements(self) -> int:
        return math.prod(shape_of(self.global_slice))

    def owned_at(self, coordinates: Mapping[str, int]) -> bool:
        """Whether the rank at these mesh coordinates is the piece's owner."""
        return all(coordinates[axis] == 0 for axis in self.copies_over)

    def written_at(self, coordinates: Mapping[str, int], degrees: Mapping[str, int]) -> bool:
        """Whether the rank at these coordinates writes the piece to a checkpoint: one of its holders, spread by name."""
        mine, copies = 0, 1
        for axis in self.copies_over:
            mine, copies = mine * degrees[axis] + coordinates[axis], copies * degrees[axis]
        return zlib.crc32(self.name.encode()) % copies == mine


def whole(name: str, shape: tuple[int, ...], copies_over: tuple[str, ...] = ()) -> Piece:
    """The piece that is a whole serial parameter."""
    box = tuple((0, n) for n in shape)
    return Piece(name, shape, box, box, copies_over)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None when there is none."""
    box = tuple((max(i, k), min(j, m)) for (i, j), (k, m) in zip(a, b, strict=True))
    return None if any(start >= stop for start, stop in box) else box


def offset_box(box: Box, origin: Box, target: Box) -> Box:
    """`box`, given inside `origin`, translated to `target` (a box of the same shape as `origin`)."""
    return tuple((i - o + t, j - o + t) for (i, j), (o, _), (t, _) in zip(box, origin, target, strict=True))


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Cut the flat range [start, stop) of a row-major tensor into boxes; yields (box, flat start of the box).

    Every box is contiguous in the flat order: full rows in the middle, a rest of a row before and after.
    """
    if start >= stop:
        return
    if not shape:
        yield (), start
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # full rows are first .. last - 1
    if first > last:  # the range lies inside row `last`
        for box, at in flat_boxes(shape[1:], start - last * row, stop - last * row):
            yield ((last, last + 1), *box), at + last * row
        return
    if start < first * row:
        for box, at in flat_boxes(shape[1:], start - (first - 1) * row, row):
            yield ((first - 1, first), *box), at + (first - 1) * row
    if first < last:
        yield ((first, last), *((0, n) for n in shape[1:])), first * row
    if last * row < stop:
        for box, at in flat_boxes(shape[1:], 0, stop - last * row):
            yield ((last, last + 1), *box), at + last * row


@dataclass(frozen=True)
class PiecePart:
    """A box of one piece that lies contiguously in a flat range: `piece`'s serial elements `global_box`.

    The box of local elements `inside` starts at flat element `start`; `within` is the part of it that belongs to the
    piece, relative to the box. A tensor view of it is `flat[start:...].view(shape_of(inside))` narrowed to `within`.
    """

    piece: Piece
    global_box: Box
    inside: Box
    start: int
    within: Box


def parts_of_range(shape: tuple[int, ...], pieces: tuple[Piece, ...], start: int, stop: int) -> Iterator[PiecePart]:
    """The parts of serial parameters in the flat range [start, stop) of a local parameter."""
    for inside, at in flat_boxes(shape, start, stop):
        for piece in pieces:
            common = intersect(inside, piece.local_slice)
            if common is not None:
                zero = tuple((0, n) for n in shape_of(inside))
                yield PiecePart(
                    piece,
                    offset_box(common, piece.local_slice, piece.global_slice),
                    inside,
                    at,
                    offset_box(common, inside, zero),
                )
