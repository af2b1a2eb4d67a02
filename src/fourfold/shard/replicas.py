"""Replica check: ranks that hold the same part of a serial parameter must hold the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.piece import Box, parts_of_range, shape_of
from fourfold.shard.unit import Unit

__all__ = ["unequal_replicas"]


def unequal_replicas(units: Iterable[Unit], group: dist.ProcessGroup | None) -> list[str]:
    """Describe every part that differs between the ranks of `group` that hold it; [] if all replicas are equal."""
    mine = {(name, box): hashlib.blake2b(_bytes(part)).hexdigest() for u in units for name, box, part in _parts(u)}
    if group is None:
        return []
    everyone: list[dict[tuple[str, Box], str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    problems = []
    for key in sorted({key for held in everyone for key in held}, key=str):
        holders = {rank: held[key] for rank, held in enumerate(everyone) if key in held}
        first = next(iter(holders.values()))
        if wrong := [rank for rank, digest in holders.items() if digest != first]:
            problems.append(f"{key[0]}{list(key[1])}: ranks {wrong} differ from rank {next(iter(holders))}")
    return problems


def _parts(unit: Unit) -> Iterator[tuple[str, Box, Tensor]]:
    """The contents of this rank's shard: (serial name, box in the serial parameter, values)."""
    low, _ = unit.shard_range
    for slot, start, stop in unit.slots():
        shift = low - slot.start
        for part in parts_of_range(slot.shape, unit.pieces[slot.name], start + shift, stop + shift):
            at = part.start - shift
            inside = unit.shard[at : at + torch.Size(shape_of(part.inside)).numel()].view(shape_of(part.inside))
            yield part.piece.name, part.global_box, inside[tuple(slice(a, b) for a, b in part.within)]


def _bytes(part: Tensor) -> bytes:
    return part.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes()
