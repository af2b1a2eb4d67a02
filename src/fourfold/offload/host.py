"""Pinned host memory, for copies between host and device at full speed.

Memory is mapped with huge pages where available, touched by all threads, and registered with CUDA. Its size is not rounded up
(`pin_memory=True` rounds up to a power of two). Requests are compared with the available host memory before anything is mapped.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.errors import HostMemoryError
from fourfold.schema import format_bytes

__all__ = ["available_bytes", "check_available", "host_memory", "page_locked"]


def available_bytes() -> int:
    """Available host memory in bytes: of the machine, or of the cgroup if that is less. Cached files count as available."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        lines = (group / "memory.stat").read_text().splitlines()
        cached = sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
        free = min(free, limit - used + cached)
    return free


def check_available(needed: int, what: str, limit: int | None = None) -> None:
    """Raise HostMemoryError unless `needed` bytes are available; `limit` replaces the measured available memory."""
    available = available_bytes() if limit is None else limit
    if needed > available:
        raise HostMemoryError(
            f"{what} needs {format_bytes(needed)} of host memory, but {format_bytes(available)} are available; keep at "
            f"least {format_bytes(needed - available)} of it on the device (optimizer = 'auto'), or store moments as bf16"
        )


def host_memory(size: int, device: torch.device) -> Tensor:
    """A zeroed uint8 tensor [size] in memory registered for copies with `device`; freed with the tensor."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        region.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(region, dtype=torch.uint8)
    if device.type == "cuda":
        memory.zero_()  # all threads touch it
        weakref.finalize(region, _unregister, *_register(memory, device), device)
    return memory


def page_locked(size: int, device: torch.device) -> Tensor:
    """A uint8 tensor [size] on the host: `host_memory` if the system gives it, else ordinary memory (copies are slower)."""
    try:
        return host_memory(size, device)
    except (HostMemoryError, OSError):
        return torch.empty(size, dtype=torch.uint8, device="cpu")


def _register(memory: Tensor, device: torch.device) -> tuple[Any, int]:
    runtime: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code != 0:
        raise HostMemoryError(
            f"the driver refused to register {format_bytes(memory.numel())} of host memory (CUDA error {code}); "
            "raise the limit on locked memory (ulimit -l), or keep more on the device (optimizer = 'auto')"
        )
    return runtime, memory.data_ptr()


def _unregister(runtime: Any, address: int, device: torch.device) -> None:
    with contextlib.suppress(RuntimeError):  # the device has failed, or this is a forked process
        torch.cuda.synchronize(device)  # copies under way still use the memory
    runtime.cudaHostUnregister(address)
