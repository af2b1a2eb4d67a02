"""How much memory messages take on a host. Pure arithmetic, shared by engine and planner; no torch.

A message has a header. Up to INLINE bytes of host memory follow it in the same transfer, in a buffer of their own on either side;
more are a transfer of their own, from where they lie into a buffer of a generation's length (`wire.py`).
"""

from __future__ import annotations

__all__ = ["HEADER_BYTES", "INLINE", "NAME_BYTES", "light_sends", "room_for"]

HEADER_BYTES = 1024
NAME_BYTES = 32
INLINE = 128 << 10


def room_for(size: int) -> int:
    """Length of the buffers of a generation whose first message has `size` bytes: the next of 8 steps per doubling."""
    step = max(64, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


def light_sends(size: int) -> int:
    """Copies of short messages of `size` bytes that a sender holds before it has them looked after: half a MiB, 4 to 32."""
    return max(4, min(32, (1 << 19) // max(1, size)))
