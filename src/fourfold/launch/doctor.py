"""Checks whether this machine is ready: versions, devices, backends, memory, disk, with advice on problems."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from typing import Any, Literal

import psutil

from fourfold import schema

__all__ = ["Finding", "examine"]


@dataclass(frozen=True)
class Finding:
    """Result of one check: what was found, whether it is good, and what to do if it is not."""

    what: str
    found: str
    state: Literal["good", "note", "bad"] = "good"
    advice: str = ""


def examine() -> list[Finding]:
    """Run all checks; takes a few seconds, most of it for importing torch."""
    return [*_versions(), *_devices(), *_backends(), *_memory()]


def _versions() -> list[Finding]:
    import torch

    found = [Finding("python", platform.python_version())]
    version = tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2])
    good = (2, 11) <= version < (2, 14)
    advice = "" if good else "install a supported one: pip install 'torch>=2.11,<2.14'"
    found.append(Finding("torch", torch.__version__, "good" if good else "bad", advice))
    for package in ("numpy", "safetensors", "rich", "tyro", "psutil"):
        found.append(Finding(package, metadata.version(package)))
    return found


def _devices() -> list[Finding]:
    import torch

    cores = os.cpu_count() or 1
    found = [Finding("cpu cores", str(cores))]
    if not torch.cuda.is_available():
        advice = "training runs on the CPU; on a GPU machine, check nvidia-smi and that torch is a CUDA build"
        return [*found, Finding("gpu", "none that torch can use", "note", advice)]
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        found.append(Finding(f"gpu {i}", f"{properties.name}, {schema.format_bytes(properties.total_memory)}"))
    return found


def _backends() -> list[Finding]:
    import torch.distributed as dist

    found = []
    if not dist.is_available():
        return [
            Finding("torch.distributed", "missing", "bad", "this build of torch cannot start ranks; install another")
        ]
    found.append(Finding("nccl", "yes" if dist.is_nccl_available() else "no", "good"))
    try:
        good = _sum_over_loopback() == [1.0, 1.0]
        found.append(
            Finding("gloo", "two ranks agree over loopback" if good else "wrong sum", "good" if good else "bad")
        )
    except Exception as e:
        advice = (
            "ranks cannot communicate on this machine: is the loopback interface up? (GLOO_SOCKET_IFNAME names another)"
        )
        found.append(Finding("gloo", str(e).splitlines()[0], "bad", advice))
    return found


def _sum_over_loopback() -> list[float]:
    """The sum of the ranks 0 and 1, as computed by two ranks; the ranks are threads of this process."""
    import torch
    import torch.distributed as dist

    store = dist.HashStore()

    groups = []  # kept until both ranks are done: deleting a group closes its connections

    def rank_sum(rank: int) -> float:
        group: Any = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=10))
        groups.append(group)
        x = torch.tensor([float(rank)])
        group.allreduce([x]).wait()
        return x.item()

    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = interface or "lo"
    try:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(rank_sum, range(2)))
    finally:
        if interface is None:
            del os.environ["GLOO_SOCKET_IFNAME"]


def _memory() -> list[Finding]:
    free = psutil.virtual_memory().available
    low = free < 3 << 30
    advice = "the demo needs about 3 GiB" if low else ""
    found = [Finding("free memory", schema.format_bytes(free), "note" if low else "good", advice)]
    if os.path.isdir("/dev/shm"):
        shm = shutil.disk_usage("/dev/shm").free
        small = shm < 64 << 20
        advice = "NCCL needs some; in a container, raise --shm-size" if small else ""
        found.append(Finding("shared memory", schema.format_bytes(shm), "note" if small else "good", advice))
    disk = shutil.disk_usage(".").free
    small = disk < 1 << 30
    advice = "checkpoints take 12 bytes a parameter, times checkpoint.keep" if small else ""
    found.append(Finding("disk here", schema.format_bytes(disk), "note" if small else "good", advice))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft < 1024
    found.append(
        Finding("open files", str(soft), "note" if few else "good", f"raise it: ulimit -n {hard}" if few else "")
    )
    return found
