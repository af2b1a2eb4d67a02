"""Explains errors of CUDA and NCCL: what is wrong, and what to do.

`explain` matches the text of an exception, because torch raises most of these as plain RuntimeError. An unknown text is not
changed: a wrong explanation is worse than none.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fourfold.errors import DeviceError

__all__ = ["explain", "translated"]

Match = re.Match[str]


def _version(number: str) -> str:
    """CUDA's 12040 as 12.4."""
    return f"{int(number) // 1000}.{int(number) % 1000 // 10}"


def _too_old(found: Match) -> str:
    return (
        f"the NVIDIA driver of this machine is too old for this torch: it supports CUDA {_version(found[1])}; "
        "update the driver, or install a torch built for that CUDA"
    )


def _full(found: Match) -> str:
    others = re.findall(r"Process (\d+) has ([\d.]+ \w+) memory in use", found.string)
    who = "; ".join(f"process {pid} holds {size}" for pid, size in others)
    taken = f", and other processes use it: {who}" if who else ""
    return f"GPU {found[2]} is out of memory: {found[1]} were requested, {found[4]} of {found[3]} are free{taken}; " + (
        "end them or choose another GPU (CUDA_VISIBLE_DEVICES)" if who else "a plan that fits: fourfold plan"
    )


def _cannot_start(_: Match) -> str:
    """CUDA cannot make a context or a stream: it calls the lack of any resource "out of memory"."""
    in_use = _memory_in_use()
    others = "other processes use it (nvidia-smi lists them); end them or choose another GPU (CUDA_VISIBLE_DEVICES)"
    if in_use is None:
        return f"the GPU has too little free memory to start: {others}"
    used, total = in_use
    if used > 0.9 * total:
        return f"the GPU has too little free memory to start: {used / 1024:.1f} of {total / 1024:.1f} GiB are in use; {others}"
    free = f"{(total - used) / 1024:.1f} of {total / 1024:.1f} GiB"
    return (
        f"CUDA cannot start another process or stream on the GPU, although {free} are free: too many processes share it, or the "
        f"host has too little free memory; {others}"
    )


def _memory_in_use() -> tuple[int, int] | None:
    """MiB in use, and in all, of the visible GPU with the least free memory; None: unknown."""
    command = ["nvidia-smi", "--query-gpu=index,memory.used,memory.total", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = re.findall(r"^(\d+), (\d+), (\d+)$", out, re.MULTILINE)
    found = [(int(used), int(total)) for index, used, total in rows if not visible or index in visible.split(",")]
    return min(found, key=lambda pair: pair[1] - pair[0], default=None)


def _interface(found: Match) -> str:
    name = os.environ.get("NCCL_SOCKET_IFNAME", "")
    why = f" that NCCL_SOCKET_IFNAME = '{name}' allows" if name else ""
    return (
        f"NCCL finds no network interface{why}; set NCCL_SOCKET_IFNAME to one that `ip -brief address` lists as UP "
        "(lo for ranks of one machine), or use --train.backend gloo"
    )


def _nccl_version(found: Match) -> str:
    return (
        f"the ranks have different versions of NCCL: rank {found[1]} has {found[2]}, rank {found[3]} has {found[4]}; "
        "install the same torch on all machines"
    )


def _unreachable(found: Match) -> str:
    where = found[1] if found.re.groups and found[1] else "another rank"
    return (
        f"NCCL cannot reach {where}; the machines need open ports between them, on the interface that NCCL_SOCKET_IFNAME "
        "names (NCCL_DEBUG=INFO shows which one it chose); or that rank has failed: see its log"
    )


EXPLANATIONS: tuple[tuple[str, str | Callable[[Match], str]], ...] = (
    (r"driver on your system is too old \(found version (\d+)\)", _too_old),
    (
        r"CUDA driver version is insufficient for CUDA runtime version",
        "the NVIDIA driver of this machine is too old for this torch (nvidia-smi shows the CUDA it supports); "
        "update the driver, or install a torch built for that CUDA",
    ),
    (
        r"Found no NVIDIA driver on your system",
        "this machine has no NVIDIA driver; install one, or use --train.device cpu",
    ),
    (
        r"no kernel image is available for execution on the device",
        "this torch has no kernels for this GPU (too old or too new for the build); install a torch built for it",
    ),
    (
        r"CUDA-capable device\(s\) is/are busy or unavailable",
        "the GPU is in use by another process in exclusive mode; end that process, choose another GPU "
        "(CUDA_VISIBLE_DEVICES), or allow sharing: nvidia-smi -c DEFAULT",
    ),
    (
        r"CUDA out of memory\. Tried to allocate ([\d.]+ \w+)\. GPU (\d+) has a total capacity of ([\d.]+ \w+) of which "
        r"([\d.]+ \w+) is free",
        _full,
    ),
    (
        r"CUDA error: out of memory|Cuda failure 2? ?'out of memory'",
        _cannot_start,
    ),
    (
        r"Duplicate GPU detected : rank (\d+) and rank (\d+)",
        lambda found: (
            f"ranks {found[2]} and {found[1]} share a GPU, which NCCL refuses; start one rank per GPU, or use "
            "--train.backend gloo (for tests also nccl, with a different host name for every rank: NCCL_HOSTID)"
        ),
    ),
    (r"Mismatched NCCL version detected : rank (\d+) version (\d+) rank (\d+) version (\d+)", _nccl_version),
    (r"no socket interface found", _interface),
    (
        r"shared memory segment /dev/shm/\S+ .*|failed to extend /dev/shm/\S+ .*",
        "NCCL has too little shared memory in /dev/shm; in a container start it with more (docker run --shm-size=8g), "
        "or set NCCL_SHM_DISABLE=1, which is slower",
    ),
    (
        r"(\S+) does not have a deterministic implementation",
        lambda found: (
            f"torch has no deterministic kernel for {found[1]}, and train.deterministic = true requires one; use "
            "--train.deterministic false: the same run twice may then differ in the last bits"
        ),
    ),
    (
        r"Too many open files",
        "this process may open no more files or connections (ulimit -n); raise the limit, for instance: ulimit -n 65536",
    ),
    (r"Connect to (\S+?)(?:<\d+>)? failed|ncclRemoteError", _unreachable),
)
"""Patterns, the most specific first, and their explanations."""


def explain(error: BaseException) -> str | None:
    """Explain an error of CUDA or NCCL in a sentence, with a remedy; None: unknown."""
    text = str(error)
    for pattern, sentence in EXPLANATIONS:
        found = re.search(pattern, text)
        if found is not None:
            return sentence if isinstance(sentence, str) else sentence(found)
    return None


@contextmanager
def translated() -> Iterator[None]:
    """Convert known errors of CUDA and NCCL raised inside to DeviceError; others are not changed."""
    try:
        yield
    except RuntimeError as e:
        sentence = explain(e)
        if sentence is None:
            raise
        where = "".join(f" ({note})" for note in getattr(e, "__notes__", ()))
        raise DeviceError(sentence + where) from e
