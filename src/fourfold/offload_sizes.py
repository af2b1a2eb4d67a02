"""Buffer sizes of offloading, shared by the engine and the planner. No torch."""

from __future__ import annotations

__all__ = ["ACTIVATION_BUFFER_BYTES", "HOST_PAGE_BYTES", "LEAST_ACTIVATION_BYTES", "STREAM_BUCKET", "STREAM_SLOTS"]

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
