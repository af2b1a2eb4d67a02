"""Are these replicas equal? A question about pieces: all ranks that hold the same part of a serial parameter hold its bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist

from fourfold.shard.unit import Unit

__all__ = ["unequal_replicas"]


def unequal_replicas(units: Iterable[Unit], group: dist.ProcessGroup | None) -> list[str]:
    """Pieces that are not the same on all ranks of `group` that hold them, each with the ranks that differ from the first."""
    mine = {
        (piece.name, piece.global_slice): hashlib.blake2b(_bytes(unit, name, piece.local_slice)).hexdigest()
        for unit in units
        for name, pieces in unit.pieces.items()
        for piece in pieces
    }
    if group is None:
        return []
    everyone: list[dict[tuple[str, object], str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    problems = []
    for key in sorted({key for held in everyone for key in held}, key=str):
        holders = {rank: held[key] for rank, held in enumerate(everyone) if key in held}
        first = next(iter(holders.values()))
        if wrong := [rank for rank, digest in holders.items() if digest != first]:
            problems.append(f"{key[0]}{list(key[1])}: ranks {wrong} differ from rank {next(iter(holders))}")  # type: ignore[call-overload]
    return problems


def _bytes(unit: Unit, name: str, box: tuple[tuple[int, int], ...]) -> bytes:
    part = unit.params[name].detach()[tuple(slice(a, b) for a, b in box)].contiguous().cpu()
    return part.view(-1).view(torch.uint8).numpy().tobytes()
