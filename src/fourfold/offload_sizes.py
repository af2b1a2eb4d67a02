"""Buffer sizes of offloading, and names of its buckets, shared by the engine, the planner and the view. No torch."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "ACTIVATION_BUFFER_BYTES",
    "HOST_PAGE_BYTES",
    "LEAST_ACTIVATION_BYTES",
    "STREAM_BUCKET",
    "STREAM_SLOTS",
    "bucket_label",
]

STREAM_BUCKET = 1 << 24
"""Parameters that the streamed optimizer updates at once."""
STREAM_SLOTS = 4
"""Buckets of optimizer state on the device at once."""
LEAST_ACTIVATION_BYTES = 1 << 20
"""Smaller activations stay on the device."""
HOST_PAGE_BYTES = 1 << 16
"""Host buffers of activations are multiples of this."""
ACTIVATION_BUFFER_BYTES = 2 << 30
"""Bytes of activations on the device that are being copied to the host, or were prefetched."""


def bucket_label(units: Sequence[str], *, on_host: bool) -> str:
    """What a bucket of the streamed optimizer is called in timelines: the units that it updates, in order."""
    name = " to ".join(dict.fromkeys((units[0], units[-1])))
    return f"update {name}" + (", state on the host" if on_host else "")
