"""Sizes of message buffers on a host. Pure arithmetic, shared by the runtime and the planner; no torch.

A message with a header sends up to INLINE bytes of data in the same transfer, from a separate buffer; longer data are a second
transfer, received into a buffer of the generation's length (`wire.py`).
"""

from __future__ import annotations

__all__ = ["HEADER_BYTES", "INLINE", "NAME_BYTES", "light_sends", "room_for"]

HEADER_BYTES = 1024
NAME_BYTES = 32
INLINE = 128 << 10


def room_for(size: int) -> int:
    """Buffer length of a generation whose first message has `size` bytes: rounded up to one of 8 steps per power of two."""
    step = max(64, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


def light_sends(size: int) -> int:
    """Short messages of `size` bytes that the caller keeps in flight before a thread takes over: 4 to 32, about 512 KiB."""
    return max(4, min(32, (1 << 19) // max(1, size)))
