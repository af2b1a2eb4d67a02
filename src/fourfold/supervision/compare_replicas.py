"""Replica check: ranks that hold copies of the same weights and optimizer state compare hashes of them.

If memory, a processor or the network changes a bit, replicas train on different weights from then on, and a checkpoint mixes
parts of both. Before every save, and every `train.check_replicas` steps, the ranks compare hashes; a difference ends the run
before anything is written.

[Note: the hash]
Let b_i be the bits of the element at position i of its serial tensor, as an integer. The hash is Σ b_i and Σ b_i · w_i, modulo
2^64, with weights w_i that depend on i. One changed bit always changes the first sum, a swap changes the second. Integer sums do
not depend on their order, so the hash of a tensor is the sum of the hashes of its parts, and copies that are sharded differently
(norms next to matrices of unequal size on a tensor grid) can be compared. The device computes in integers; two numbers per part
are copied to the host, once.

[Note: which ranks compare]
Pieces that are copied over the same mesh axes form a *class*. The ranks at one position on these axes together hold one copy of
the class (several ranks if it is sharded). For each class, every rank sends which copy it holds a part of and the hash of that
part: 40 bytes per class to every rank, a few classes. If copies differ, the ranks exchange the hashes of all their tensors, to
name the ones that differ.

On a tensor grid, copies at different grid positions get their gradients from different communicators over data and depth. With
three or more ranks, the result of a sum depends on its order, which NCCL chooses per communicator (our rings over gloo use rank
order). In that case, copies are compared only within data and depth.

The two copies of a tied weight (shard/tied.py) are a class. Cost: a few passes over weights and state, about the time
of an optimizer step.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.checkpoint.holdings import Holding, held_boxes
from fourfold.collectives import all_gather, summed
from fourfold.errors import ReplicaError
from fourfold.piece import Box, Piece
from fourfold.shard.tied import TiedCopy, TiedOwner
from fourfold.shard.unit import Unit
from fourfold.train.mesh import RankMesh

__all__ = ["Hashed", "compare_replicas", "differing", "flip_bit", "hash_box"]

WEIGHT = -7046029254386353131
"""An odd number with half of its 64 bits set."""
CHUNK = 1 << 23
"""Elements that are summed at a time; each needs 40 bytes of workspace in a flat tensor."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Hash = tuple[int, int]


@dataclass(frozen=True)
class Hashed:
    """The hash of a part of one copy."""

    copied: str
    """The class: number of copies, the axes of the copies, and the position on the other axes."""
    copies: int
    copy: int
    """Index of the copy that this is a part of."""
    name: str
    box: Box
    value: Hash


def hash_box(view: Tensor, box: Box, shape: Sequence[int]) -> Tensor:
    """[2] int64: the hash of a box of a serial tensor of this shape: [Note: the hash].

    The weight of an element is a sum over dims of a number that depends on its index in the dim, so sums along the other dims
    are computed first, and no tensor of weights is allocated. Rows are processed in blocks: as int64, a whole bf16 tensor would
    need 4 times its memory, which a GPU may not have free.
    """
    if not shape:
        view, box = view.reshape(1), ((0, 1),)
    bits = view.detach().view(BITS[view.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=view.device)
    rows = max(1, CHUNK * len(bits) // max(1, bits.numel()))
    for first in range(0, len(bits), rows):
        at = box[0][0] + first
        part = bits[first : first + rows].to(torch.int64)
        _add_hash(total, part, ((at, at + len(part)), *box[1:]))
    return total


def _add_hash(total: Tensor, bits: Tensor, box: Box) -> None:
    for d, (start, stop) in enumerate(box):
        others = [other for other in range(bits.ndim) if other != d]
        along = bits.sum(others) if others else bits
        weights = (torch.arange(start, stop, device=bits.device) + _wrapped(d * WEIGHT)) * WEIGHT
        total[1] += (along * (weights ^ (weights >> 29))).sum()
        if d == 0:
            total[0] += along.sum()


def compare_replicas(
    step: int,
    holdings: Sequence[Holding],
    units: Sequence[Unit],
    ties: Sequence[TiedOwner | TiedCopy],
    mesh: RankMesh,
    world: dist.ProcessGroup | None,
) -> int:
    """Compare all copies that the ranks hold after `step` steps; all ranks call it. Returns the bytes that this rank compared.

    Raises ReplicaError, on all ranks, if copies differ.
    """
    if world is None:
        return 0
    device = units[0].shard.device if units else torch.device("cpu")
    mine, compared = _hashed(holdings, units, ties, mesh, device)
    table = _table(mine)
    longest = int(summed(torch.tensor([len(table)], device=device), world, "the number of replicas", "max").item())
    if not longest:
        return compared
    rows = torch.zeros(longest, 5, dtype=torch.int64)
    for i, row in enumerate(table):
        rows[i] = torch.tensor(row, dtype=torch.int64)
    rows = rows.view(-1).to(device)
    everyone = rows.new_empty(dist.get_world_size(world) * rows.numel())
    all_gather(everyone, rows, world, "the comparison of replicas").wait()
    bad = differing(everyone.view(-1, 5).tolist())
    if bad:
        details: list[Any] = [None] * dist.get_world_size(world)
        dist.all_gather_object(details, [h for h in mine if _number(h.copied) in bad], group=world)
        raise ReplicaError(f"step {step}: {explain(details)}")
    return compared


def _hashed(
    holdings: Sequence[Holding],
    units: Sequence[Unit],
    ties: Sequence[TiedOwner | TiedCopy],
    mesh: RankMesh,
    device: torch.device,
) -> tuple[list[Hashed], int]:
    """The hashes of all parts of copies on this rank, and the number of bytes hashed."""
    found: list[tuple[Hashed, Tensor]] = []
    compared = 0
    stored = {h.flat.data_ptr() for h in holdings}
    across_grid = device.type == "cpu" or mesh.size("data", "depth") < 3
    rounded = [_compute_weights(u, mesh) for u in units if u.shard.numel() and u.shard.data_ptr() not in stored]
    for h in (*holdings, *rounded):
        for piece, box, view in held_boxes(h):
            assert h.place is not None
            key = _class_of(piece, *h.place, across_grid=across_grid)
            if key is not None:
                copied, copies, copy = key
                hashed = Hashed(copied, copies, copy, h.prefix + piece.name, box, (0, 0))
                found.append((hashed, hash_box(view, box, piece.global_shape)))
                compared += view.nbytes
    for tie in ties:
        here = {axis: at for axis, at in mesh.coordinates.items() if axis != "pipe"}
        shard = tie.unit.shard if isinstance(tie, TiedOwner) else tie.copy.shard
        box = ((0, shard.numel()),)
        hashed = Hashed(f"tied {tie.name} {here}", 2, int(isinstance(tie, TiedCopy)), f"tied {tie.name}", box, (0, 0))
        found.append((hashed, hash_box(shard, box, tuple(shard.shape))))
        compared += shard.nbytes
    values: dict[int, list[int]] = {}
    for kind in {value.device for _, value in found}:  # one copy to the host per device
        at = [i for i, (_, value) in enumerate(found) if value.device == kind]
        values |= dict(zip(at, torch.stack([found[i][1] for i in at]).tolist(), strict=True))
    hashes = [
        Hashed(h.copied, h.copies, h.copy, h.name, h.box, (values[i][0], values[i][1]))
        for i, (h, _) in enumerate(found)
    ]
    return hashes, compared


def _compute_weights(unit: Unit, mesh: RankMesh) -> Holding:
    """The compute weights, if they differ from the optimizer's master weights."""
    place = unit.sharing.place(mesh.coordinates, mesh.degrees)
    return Holding("compute.", unit.shard.detach(), unit.shard_range[0], unit.layout, unit.pieces, place)


def _class_of(
    piece: Piece, here: Mapping[str, int], degrees: Mapping[str, int], *, across_grid: bool = True
) -> tuple[str, int, int] | None:
    """Name of a piece's class, its number of copies, and the index of this rank's copy; None if there is only one copy."""
    copy, copies = 0, 1
    axes = [axis for axis in piece.copies_over if across_grid or axis in ("data", "depth")]
    for axis in axes:
        copy, copies = copy * degrees[axis] + here[axis], copies * degrees[axis]
    if copies == 1:
        return None
    fixed = {axis: at for axis, at in here.items() if axis not in (*axes, "data", "depth")}
    return f"{copies} over {sorted(axes)} at {sorted(fixed.items())}", copies, copy


def _number(copied: str) -> int:
    return int.from_bytes(hashlib.blake2b(copied.encode(), digest_size=8).digest(), "little", signed=True)


def _wrapped(value: int) -> int:
    """As a signed 64-bit integer."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _table(mine: Sequence[Hashed]) -> list[tuple[int, int, int, int, int]]:
    """Per class: its number, copies, this rank's copy, and the sum of the parts' hashes, each times the hash of its name."""
    sums: dict[tuple[str, int, int], Hash] = defaultdict(lambda: (0, 0))
    for h in mine:
        weight = _number(h.name) | 1
        one, two = sums[h.copied, h.copies, h.copy]
        sums[h.copied, h.copies, h.copy] = one + weight * h.value[0], two + weight * h.value[1]
    return [(_number(k[0]), k[1], k[2], _wrapped(a), _wrapped(b)) for k, (a, b) in sums.items()]


def differing(rows: Sequence[Sequence[int]]) -> set[int]:
    """Numbers of the classes whose copies differ, from the rows of all ranks (of `_table`; copies = 0 is padding)."""
    copies: dict[int, dict[int, Hash]] = defaultdict(dict)
    counts: dict[int, int] = {}
    for number, count, copy, one, two in rows:
        if count:
            counts[number] = count
            a, b = copies[number].get(copy, (0, 0))
            copies[number][copy] = (_wrapped(a + one), _wrapped(b + two))
    for number, found in copies.items():
        assert len(found) == counts[number], "every copy is held by a rank"
    return {number for number, found in copies.items() if len(set(found.values())) > 1}


def explain(details: Sequence[Sequence[Hashed]]) -> str:
    """Which tensors differ between which ranks, from the hashes of all ranks."""
    by_part: dict[tuple[str, str, Box], dict[Hash, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, parts in enumerate(details):
        for h in parts:
            by_part[h.copied, h.name, h.box][h.value].append(rank)
    bad = [(name, groups) for (_, name, _), groups in by_part.items() if len(groups) > 1]
    if not bad:  # copies are cut differently: only whole copies can be compared
        names = sorted({h.name for parts in details for h in parts})
        return f"copies of {names[0]} or of {len(names) - 1} other tensors differ; their parts are cut differently"
    name, groups = min(bad, key=lambda item: (item[0].startswith(("optim.", "compute.")), item[0]))
    ordered = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
    if len(ordered) == 2 and len(ordered[0]) > len(ordered[1]):
        who = f"{_ranks(ordered[1])} {'have' if len(ordered[1]) > 1 else 'has'} other bits than {_ranks(ordered[0])}"
    else:
        who = " and ".join(_ranks(ranks) for ranks in ordered[:4]) + " have different bits"
    others = len({n for n, _ in bad}) - 1
    more = f" ({others} other tensors differ, too)" if others else ""
    odd = Counter(rank for _, g in bad for ranks in sorted(g.values(), key=len)[:-1] for rank in ranks)
    suspect = f"; rank {odd.most_common(1)[0][0]} differs most" if others and len(odd) > 1 else ""
    return f"copies of {name} differ between ranks: {who}{more}{suspect}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{' …' if len(ranks) > 8 else ''}"


# ---- fault injection ----


def flip_bit(holdings: Sequence[Holding], name: str = "") -> str:
    """Change one bit of a copied weight of this rank, in a tensor whose name contains `name`; returns the tensor's name.

    For the fault `flip` (faults.py); empty if the rank holds no such copy.
    """
    for piece, _, view in _copied_weights(holdings):
        if name in piece.name and view.numel():
            first = view[(0,) * view.ndim].reshape(1)
            bits = first.view(BITS[view.element_size()])
            bits ^= 1 << (8 * view.element_size() - 12)  # the exponent's lowest bit, or a high one of the mantissa
            view[(0,) * view.ndim] = first[0]
            return piece.name
    return ""


def _copied_weights(holdings: Sequence[Holding]) -> Iterator[tuple[Piece, Box, Tensor]]:
    for h in holdings:
        for piece, box, view in held_boxes(h) if not h.prefix else ():
            if h.place is not None and _class_of(piece, *h.place) is not None:
                yield piece, box, view
