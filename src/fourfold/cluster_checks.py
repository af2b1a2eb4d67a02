"""Validation of a cluster: numbers in plausible ranges, and network levels that match the devices. No torch.

Implausible rates and times are rejected: they are usually a wrong unit (GB/s instead of bytes/s), and the search would not
terminate if a step took years.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from fourfold import schema
from fourfold.config import nearest_divisor
from fourfold.errors import ClusterError

if TYPE_CHECKING:
    from fourfold.cluster import Cluster, Level

__all__ = ["check_cluster", "check_pieces"]

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "message")
SLOWEST, FASTEST = 1e4, 1e21
"""Allowed bytes/s or FLOP/s."""
LONGEST = 1.0
"""Maximum seconds of a latency or of a fixed overhead."""
RATIOS = 1e-4, 1e6
"""Allowed time of a collective relative to an ideal ring."""
MOST = 1_000_000
"""Maximum number of devices."""


def check_cluster(c: Cluster) -> None:
    """Raise ClusterError if a value is invalid."""
    schema.check_count("nodes", c.nodes, ClusterError)
    schema.check_count("devices", c.devices, ClusterError)
    if c.ranks > MOST:
        raise ClusterError(f"{_nodes(c)} · {c.devices} = {c.ranks} devices; at most {MOST} are supported")
    _check_device(c)
    _rate("host.link", c.host.link, "bytes", "25e9")
    for name in ("call", "queue"):
        _between(name, getattr(c, name), 0.0, LONGEST, "seconds")
    _between("small", c.small, 0.0, 1e15, "bytes")
    _share("overlap", c.overlap, least=0.0)
    schema.parse_bytes(c.host.memory, "host.memory", ClusterError)
    if c.usable <= 0:
        raise ClusterError(
            f"device.memory = {c.device.memory} minus device.reserve = {c.device.reserve} leaves nothing for tensors"
            + (
                "; a number without a unit is bytes: write for example '24GB'"
                if c.device.memory.strip().isdigit()
                else ""
            )
        )
    _check_levels(c)


def _check_device(c: Cluster) -> None:
    d = c.device
    for name in ("bf16", "fp32", "fp64"):
        if name not in d.matrix:
            raise ClusterError(f"device.matrix has no rate for '{name}'; give FLOP/s for bf16, fp32 and fp64")
    for table in ("matrix", "stated"):
        for name, rate in getattr(d, table).items():
            _rate(f"device.{table}.{name}", rate, "FLOP", "312e12")
    _rate("device.memory_rate", d.memory_rate, "bytes", "2e12")
    for name in ("efficiency", "attention", "flash_2", "eager"):
        _share(f"device.{name}", getattr(d, name))
    _share("device.margin", d.margin, least=0.0, below=True)
    _between("device.attention_backward", d.attention_backward, 0.1, 100.0, "times the forward")
    _between("device.operator", d.operator, 0.0, LONGEST, "seconds")
    if not schema.is_integer(d.alignment, 1):
        raise ClusterError(f"device.alignment = {d.alignment!r} must be a whole number of elements, at least 1")
    if not schema.is_integer(d.processors):
        raise ClusterError(f"device.processors = {d.processors!r} must be a whole number, 0 (not modelled) or more")


def _check_levels(c: Cluster) -> None:
    if not c.level and c.ranks > 1:
        raise ClusterError(f"{c.ranks} devices, but no [[level]] of network between them; give bandwidth and latency")
    joined = 1
    for i, level in enumerate(c.level):
        where, last = f"level[{i}] ('{level.name}')", i == len(c.level) - 1
        _check_level(where, level)
        if not schema.is_integer(level.ranks):
            raise ClusterError(f"{where}: ranks = {level.ranks!r} must be a whole number, 0 (all devices) or more")
        if not last and not level.ranks:
            raise ClusterError(f"{where}: ranks = 0 connects all devices; only the last level may have it")
        if (level.ranks < joined if last else level.ranks <= joined) and level.ranks:
            before = f"level[{i - 1}] connects {joined}" if i else "one device needs no level"
            raise ClusterError(
                f"{where}: ranks = {level.ranks}, but {before}: levels must grow, the innermost first; "
                f"use a multiple of {joined}, or 0 for all devices in the last level"
            )
        joined = level.ranks or c.ranks
    if c.level and joined < c.ranks:
        raise ClusterError(
            f"the levels connect {joined} devices, but there are {_nodes(c)} · {c.devices} = {c.ranks}; "
            f"give the last level ranks = 0"
        )


def check_pieces(c: Cluster) -> None:
    """Check a cluster file: the size of every level is a multiple of the previous one's, and divides the cluster."""
    below = 1
    for i, level in enumerate(c.level):
        where, ranks = f"level[{i}] ('{level.name}'): ranks = {level.ranks}", level.ranks or c.ranks
        if ranks < c.ranks and ranks % below:
            good = max(2, round(ranks / below)) * below
            raise ClusterError(f"{where} is not a multiple of the {below} that level[{i - 1}] connects; use {good}")
        if ranks < c.ranks and c.ranks % ranks:
            near = nearest_divisor(c.ranks, ranks)
            raise ClusterError(
                f"{where} does not divide {_nodes(c)} · {c.devices} = {c.ranks} devices; the nearest that does is {near}"
            )
        below = ranks


def _check_level(where: str, level: Level) -> None:
    _rate(f"{where}: bandwidth", level.bandwidth, "bytes", "25e9")
    for name in ("latency", "start"):
        _between(f"{where}: {name}", getattr(level, name), 0.0, LONGEST, "seconds")
    _between(f"{where}: congestion", level.congestion, 0.0, 10.0, "of the bandwidth per doubling")
    for kind, factor in level.factor.items():
        if kind not in COLLECTIVES:
            raise ClusterError(f"{where}: factor of '{kind}'{schema.nearest(kind, COLLECTIVES)}")
        _between(f"{where}: factor.{kind}", factor, *RATIOS, "relative to an ideal ring")
    for name, points in level.measured.items():
        _check_measured(f"{where}: measured.'{name}'", name, points)


def _check_measured(where: str, name: str, points: Any) -> None:
    kind, _, members = name.partition(" ")
    if kind not in COLLECTIVES or not re.fullmatch(r"[1-9][0-9]{0,8}", members):
        raise ClusterError(f"{where}: the name must be a collective and its group size, for example 'all_gather 4'")
    pairs = isinstance(points, list | tuple) and all(isinstance(p, list | tuple) and len(p) == 2 for p in points)
    if not pairs or not points or not all(_number(x) for p in points for x in p):
        raise ClusterError(f"{where} must be pairs [bytes, ratio], for example [[65536, 2.5]]; found {points!r}")
    sizes = [size for size, _ in points]
    if sizes != sorted(set(sizes)):
        raise ClusterError(f"{where}: the sizes {sizes} must increase")
    for size, ratio in points:
        _between(f"{where}: bytes", size, 1.0, 1e15, "bytes")
        _between(f"{where}: ratio", ratio, *RATIOS, "relative to an ideal ring")


def _nodes(c: Cluster) -> str:
    return f"{c.nodes} node{'s' if c.nodes > 1 else ''}"


# ---- kinds of numbers ----


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    return f"{value:g}" if _number(value) else repr(value)


def _between(where: str, value: Any, least: float, most: float, unit: str) -> None:
    if not (_number(value) and math.isfinite(value) and least <= value <= most):
        raise ClusterError(f"{where} = {_text(value)} must be a number from {least:g} to {most:g} ({unit})")


def _share(where: str, value: Any, least: float = 1e-4, below: bool = False) -> None:
    if not (_number(value) and (least <= value < 1 if below else least <= value <= 1)):
        most = "below 1" if below else "1"
        raise ClusterError(f"{where} = {_text(value)} must be a fraction from {least:g} to {most}")


def _rate(where: str, value: Any, unit: str, example: str) -> None:
    if not (_number(value) and SLOWEST <= value <= FASTEST):
        raise ClusterError(
            f"{where} = {_text(value)} must be {unit}/s, at least {SLOWEST:g} and finite; for example {example}"
        )
