"""Bytes that messages between stages take on a rank.

On CPUs, messages are received into buffers that are used again and never given back: as many as were ever posted for, in use as
inputs or gradients of a stage, or (short ones, which are copied) being sent at one time. On GPUs a message has memory of its
own from its arrival to its last use, where it is an input that is kept anyway.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from fourfold.program.costs import Costs
from fourfold.program.instructions import Recv
from fourfold.program.lowering import receives_of
from fourfold.program.ops import Op, Schedule
from fourfold.runtime.sizes import HEADER_BYTES, INLINE, light_sends, room_for

__all__ = ["message_bytes"]


def message_bytes(schedule: Schedule, rank: int, size: float, cpu: bool) -> float:
    """Bytes of the messages of one rank, one being `size` bytes."""
    if schedule.ranks == 1:
        return 0.0
    if not cpu:
        return size  # one that is being sent
    if size <= INLINE:
        return _most_buffers(schedule, light_sends(int(size) + HEADER_BYTES))[rank] * (size + HEADER_BYTES)
    return _most_buffers(schedule, 0)[rank] * (room_for(int(size)) + HEADER_BYTES) + size


@lru_cache(maxsize=256)
def _most_buffers(schedule: Schedule, light: int) -> list[int]:
    """By rank: the most buffers at one time, of which `light` at most hold what is being sent to one rank."""
    posted = receives_of(schedule, Costs(), 2)
    return [_of_rank(schedule, rank, posted[rank], light) for rank in range(schedule.ranks)]


def _of_rank(schedule: Schedule, rank: int, posted: dict[int, list[Recv]], light: int) -> int:
    place, last = schedule.placement, schedule.stages - 1
    split = any(op.kind == "W" for op in schedule.order[rank])
    taken = most = 0
    held: Counter[tuple[int, int]] = Counter()  # received, by stage and micro-batch
    sent: Counter[int] = Counter()
    for index, op in enumerate(schedule.order[rank]):
        stage, kind, micro_batch = op
        taken += len(posted.get(index, ()))
        if _came(op, place, last):
            held[stage, micro_batch] += 1
        most = max(most, taken + sum(min(light, n) for n in sent.values()))
        to = stage + 1 if kind == "F" else stage - 1
        if kind != "W" and 0 <= to <= last and place[to] != rank:
            sent[place[to]] += 1
            most = max(most, taken + sum(min(light, n) for n in sent.values()))
        if kind == ("W" if split else "B"):
            taken -= held.pop((stage, micro_batch), 0)
    return most


def _came(op: Op, place: tuple[int, ...], last: int) -> bool:
    """Whether an op begins with a message."""
    if op.kind == "W":
        return False
    giver = op.stage - 1 if op.kind == "F" else op.stage + 1
    return 0 <= giver <= last and place[giver] != place[op.stage]
