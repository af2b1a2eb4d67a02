"""The parts of serial tensors that a rank holds: flat buffers as lists of (box of a serial tensor, view of local memory).

Checkpoints are written from these views and read into them (save_load.py); so are weights of Hugging Face folders (weights.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from fourfold.piece import Box, Piece, parts_of_range, shape_of, whole
from fourfold.shard.layout import FlatLayout, Slot

__all__ = ["Chunks", "Holding", "chunks_of", "held_boxes", "holding_of", "narrow"]


@dataclass(frozen=True)
class Holding:
    """A flat buffer of this rank: elements [start, start + len) of a unit's layout, under a prefix of names.

    `place`: the rank's coordinates and the degrees that identify copies of its pieces; None: there are no copies.
    """

    prefix: str
    flat: Tensor
    start: int
    layout: FlatLayout
    pieces: Mapping[str, tuple[Piece, ...]]
    place: tuple[Mapping[str, int], Mapping[str, int]] | None = None

    def writes(self, piece: Piece) -> bool:
        """Whether this rank is the holder that saves the piece."""
        return self.place is None or piece.written_at(*self.place)


def holding_of(name: str, tensor: Tensor) -> Holding:
    """A holding of one whole serial tensor."""
    shape = tuple(tensor.shape)
    layout = FlatLayout((Slot(name, shape, 0, tensor.numel()),), tensor.numel(), 1)
    return Holding("", tensor.detach().view(-1), 0, layout, {name: (whole(name, shape),)})


class Chunks:
    """The parts of one serial tensor that this rank holds."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype):
        self.shape, self.dtype = torch.Size(shape), dtype
        self.views: dict[torch.Size, Tensor] = {}  # by offset in the serial tensor

    def list(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, view.shape) for offset, view in self.views.items()]


def chunks_of(holdings: Iterable[Holding], *, written: bool = False) -> dict[str, Chunks]:
    """The chunks of all holdings, or of those pieces that this rank writes."""
    out: dict[str, Chunks] = {}
    for h in holdings:
        for piece, box, view in held_boxes(h, written=written):
            chunks = out.setdefault(h.prefix + piece.name, Chunks(piece.global_shape, h.flat.dtype))
            chunks.views[torch.Size(a for a, _ in box)] = view
    return out


def held_boxes(h: Holding, *, written: bool = False) -> Iterator[tuple[Piece, Box, Tensor]]:
    """The parts of a holding (`written`: that this rank writes): piece, box of the serial tensor, view of local memory."""
    stop = h.start + h.flat.numel()
    for slot in h.layout.slots:
        low, high = max(h.start, slot.start), min(stop, slot.stop)
        for part in parts_of_range(slot.shape, h.pieces[slot.name], low - slot.start, high - slot.start):
            if not written or h.writes(part.piece):
                at = slot.start + part.start - h.start
                yield part.piece, part.global_box, _view(h.flat, at, part.inside, part.within)


def _view(flat: Tensor, at: int, inside: Box, within: Box) -> Tensor:
    shape = shape_of(inside)
    return narrow(flat[at : at + math.prod(shape)].view(shape), within)


def narrow(tensor: Tensor, box: Box) -> Tensor:
    """A view of a box of a tensor."""
    for dim, (a, b) in enumerate(box):
        tensor = tensor.narrow(dim, a, b - a)
    return tensor
