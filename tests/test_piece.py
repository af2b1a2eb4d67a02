"""Pieces: any flat range of any tensor is a few boxes that cover it exactly once."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fourfold.piece import Piece, flat_boxes, intersect, offset_box, parts_of_range, shape_of, whole

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@given(shapes, st.data())
def test_flat_boxes_cover_the_range_once_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    flat = np.arange(size).reshape(shape)
    covered: list[int] = []
    count = 0
    for box, at in flat_boxes(shape, start, stop):
        inside = flat[tuple(slice(a, b) for a, b in box)].ravel()
        assert inside.tolist() == list(range(at, at + inside.size))
        covered += inside.tolist()
        count += 1
    assert covered == list(range(start, stop))
    assert count <= max(1, 2 * len(shape) - 1)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.data())
def test_parts_find_every_serial_element(split: int, rows: int, cols: int, data: st.DataObject) -> None:
    """A local matrix made of row blocks of a larger serial one (as fused q, k, v are), cut into flat shards."""
    serial = np.arange(split * 3 * rows * cols).reshape(split * 3 * rows, cols)
    block = data.draw(st.integers(0, split - 1))
    pieces, local = [], np.full((3 * rows + 1, cols), -1)  # the last row is padding
    for part in range(3):
        start = part * split * rows + block * rows
        box = ((start, start + rows), (0, cols))
        mine = ((part * rows, (part + 1) * rows), (0, cols))
        pieces.append(Piece("w", serial.shape, box, mine))
        local[part * rows : (part + 1) * rows] = serial[start : start + rows]
    low = data.draw(st.integers(0, local.size))
    high = data.draw(st.integers(low, local.size))
    seen: list[int] = []
    for part in parts_of_range(local.shape, tuple(pieces), low, high):
        inside = local.ravel()[part.start : part.start + math.prod(shape_of(part.inside))].reshape(
            shape_of(part.inside)
        )
        values = inside[tuple(slice(a, b) for a, b in part.within)]
        assert (values == serial[tuple(slice(a, b) for a, b in part.global_box)]).all()
        seen += values.ravel().tolist()
    assert sorted(seen) == sorted(v for v in local.ravel()[low:high].tolist() if v >= 0)


def test_owner_is_at_the_origin_of_the_axes_it_is_copied_over() -> None:
    piece = whole("norm.weight", (4,), copies_over=("data", "row"))
    assert piece.owned_at({"data": 0, "row": 0, "col": 1})
    assert not piece.owned_at({"data": 1, "row": 0, "col": 1})


def test_every_piece_is_written_by_exactly_one_holder() -> None:
    degrees = {"data": 3, "row": 2, "col": 2}
    counts = [0] * 6
    for number in range(60):
        piece = whole(f"w{number}", (4,), copies_over=("data", "row"))
        places = [{"data": d, "row": r, "col": 1} for d in range(3) for r in range(2)]
        writers = [i for i, place in enumerate(places) if piece.written_at(place, degrees)]
        assert len(writers) == 1
        counts[writers[0]] += 1
    assert min(counts) >= 3  # spread over all of them


def test_boxes() -> None:
    assert intersect(((0, 4), (2, 6)), ((3, 9), (0, 3))) == ((3, 4), (2, 3))
    assert intersect(((0, 4),), ((4, 5),)) is None
    assert offset_box(((3, 4),), ((2, 6),), ((10, 14),)) == ((11, 12),)
