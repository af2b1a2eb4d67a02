"""The cluster model: devices, hosts and network levels, as the planner uses them. Presets, files, what-if changes. No torch.

    Cluster.preset("h100-sxm", nodes=8)      Cluster.local(4)      Cluster.load("cluster.toml")

A cluster is `nodes` nodes of equal devices, connected by one or more **levels** of network, innermost first: a level connects
`ranks` devices, and every device sends and receives at `bandwidth` bytes/s simultaneously. A ring over a group is as fast as the
slowest level it crosses; if k members share a lower level, the group crosses with the bandwidth of k links. Bytes received
per rank, for a buffer of S bytes over n ranks:

    all_gather, reduce_scatter   (n - 1)/n · S          all_reduce   2 (n - 1)/n · S          message   S

Latency is paid once per hop of the ring. `factor` multiplies the time of a collective if a backend is slower than a ring
(gloo's reduce_scatter transfers as much as an all_reduce). `fourfold calibrate` measures all of this, with factors for
several buffer sizes and groups (`measured`): sizes are interpolated, and the group of the nearest size is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from fourfold import schema
from fourfold.cluster_checks import check_cluster, check_pieces
from fourfold.errors import ClusterError

__all__ = ["Cluster", "Device", "Host", "Level", "preset_names"]

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "message"]
LOCAL_RESERVE = "256MiB"
"""Memory of a rank on this machine besides its tensors."""
TILES = ((256, 128, 1.0), (128, 128, 1.0), (128, 64, 0.9))
"""Matmul tiles: rows and columns of output that one multiprocessor computes at once, and the relative efficiency."""
ALIGNED = ((64, 1.0), (32, 0.88), (16, 0.82), (8, 0.7), (4, 0.55), (1, 0.4))
"""Relative speed of a matmul, by the largest of these numbers of elements that divides its inner or output width. NVIDIA's guide
to matmul performance recommends 64 elements on an A100 and later, 8 on a V100; others than multiples of 8 need padding."""
ATTENTION_TOKENS, ATTENTION_HALF = 3072, 500
"""Sequence length for which a device's `attention` is stated; sequence length at which attention reaches half of its rate for
long sequences (FlashAttention-2's published figures on an A100, causal, heads of 128)."""
NARROW_HEADS = 64, 0.9
"""Heads of at most this width, and the speed of attention with them relative to wider ones, on GPUs on which FlashAttention-2 is
not the best kernel (an H200)."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device; each rank computes on one."""

    name: str = "device"
    """Display name."""
    kind: Literal["cuda", "cpu"] = "cuda"
    """Which kernels run."""
    memory: str = "80GB"
    """Total memory."""
    reserve: str = "2GiB"
    """Memory unavailable to tensors: driver context, communication buffers."""
    margin: float = 0.04
    """Fraction of the remaining memory lost to the allocator's rounding and fragmentation."""
    matrix: dict[str, float] = field(default_factory=lambda: {"bf16": 312e12, "fp32": 19.5e12, "fp64": 9.7e12})
    """Peak matmul FLOP/s by dtype."""
    stated: dict[str, float] = field(default_factory=dict)
    """Vendor's peak FLOP/s by dtype, if `matrix` is measured; the denominator of MFU."""
    efficiency: float = 0.8
    """Fraction of the peak that large matmuls reach."""
    attention: float = 0.65
    """Fraction of `efficiency` that its best fused attention kernel reaches, for sequences of 3,072 tokens."""
    flash_2: float = 1.0
    """Speed of FlashAttention-2 relative to that kernel."""
    attention_backward: float = 2.5
    """Time of the attention backward relative to its forward."""
    processors: int = 0
    """Multiprocessors, to model partly filled waves of matmul tiles; 0: not modelled."""
    alignment: int = 64
    """Alignment in elements: matmuls whose inner or output width is not a multiple of it are slower."""
    memory_rate: float = 2.0e12
    """Memory bandwidth in bytes/s that large memory-bound operators reach."""
    eager: float = 1.0
    """Fraction of `memory_rate` that a model's unfused memory-bound operators reach; 1: fused."""
    operator: float = 5e-6
    """Launch overhead per operator, in seconds."""

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s: the denominator of MFU."""
        return self.stated.get(dtype, self.matrix[dtype])

    def aligned(self, width: float) -> float:
        """Relative speed of a matmul with this inner or output width."""
        n = round(width)
        if n < 8 or n % self.alignment == 0:
            return 1.0
        return next(speed for step, speed in ALIGNED if n % step == 0)

    def fullness(self, m: float, k: float, n: float) -> float:
        """Efficiency of the matmul [m, k] · [k, n] relative to a large one: short inner dim, partly filled last wave of tiles,
        widths that are not aligned."""
        if not self.processors:
            return 1.0
        return (
            min(self.aligned(k), self.aligned(n))
            * k
            / (k + 64)
            * max(good * _full_rounds(m, n, rows, columns, self.processors) for rows, columns, good in TILES)
        )


@dataclass(frozen=True, kw_only=True)
class Host:
    """The host of a node, shared by its devices."""

    memory: str = "1TiB"
    """Host memory of a node."""
    link: float = 25e9
    """Bytes/s between a device and its host, per direction, with both directions and all devices of a node active."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """One level of the network."""

    name: str = "network"
    """Display name."""
    ranks: int = 0
    """Devices connected by one switch of this level; 0: all."""
    bandwidth: float = 25e9
    """Bytes/s that every device sends and receives, as reached by ring collectives."""
    latency: float = 5e-6
    """Latency of one hop, in seconds."""
    start: float = 0.0
    """Fixed seconds of every collective besides its hops and bytes: launch, and synchronisation of the ranks."""
    factor: dict[str, float] = field(default_factory=dict)
    """By collective: its time relative to an ideal ring; default 1."""
    congestion: float = 0.0
    """Bandwidth lost with every doubling of the switches of the level below that a collective connects: with 0.05, one over
    16 nodes takes 1 + 4 · 0.05 times as long as its bytes would."""
    measured: dict[str, list[list[float]]] = field(default_factory=dict)
    """By collective and group size ("all_gather 4"): pairs [bytes, time relative to an ideal ring], by increasing size."""

    def relative_time(self, kind: str, size: float, members: int) -> float:
        """Time of a collective relative to an ideal ring, for a buffer of `size` bytes."""
        if not self.measured:
            return self.factor.get(kind, 1.0)
        found = [(int(n), points) for name, points in self.measured.items() for k, n in [name.split()] if k == kind]
        if not found:
            return self.factor.get(kind, 1.0)
        _, points = min(found, key=lambda item: (abs(math.log(item[0] / members)), item[0]))
        return _interpolated(points, size)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal devices, their hosts and their network."""

    name: str = "cluster"
    """Display name."""
    nodes: int = 1
    """Number of nodes."""
    devices: int = 8
    """Devices per node."""
    device: Device = field(default_factory=Device)
    """The model of every device."""
    host: Host = field(default_factory=Host)
    """The host of every node."""
    level: tuple[Level, ...] = ()
    """Network levels, innermost first; the last connects all devices."""
    overlap: float = 0.9
    """Fraction of gathers, reductions and messages that can overlap with compute."""
    call: float = 0.0
    """Compute seconds lost per collective even if it is overlapped."""
    small: float = 0.0
    """Bytes; smaller collectives run concurrently with others of their group instead of queueing behind them."""
    queue: float = 0.0
    """Maximum seconds that a collective queues behind in-flight traffic of other groups on the same link."""
    source: str = ""
    """Where the numbers come from."""

    def __post_init__(self) -> None:
        check_cluster(self)

    # ---- presets and files ----

    @classmethod
    def preset(cls, name: str, nodes: int = 1, devices: int | None = None) -> Cluster:
        """A cluster by name: `nodes` machines with the preset's devices, or with `devices`; or this machine ("local")."""
        from fourfold.presets import PRESETS

        if name == "local":
            if devices is not None:
                raise ClusterError(
                    f"devices = {devices}: 'local' has one device in a node; use nodes = {nodes * devices}"
                )
            return cls.local(nodes)
        if name not in PRESETS:
            letters = re.sub("[^a-z0-9]", "", name.lower())
            near = [known for known in PRESETS if letters in known.replace("-", "")] if letters else []
            known = (
                f"did you mean {' or '.join(near)}? Or" if near else f"choose one of {', '.join(preset_names())}, or"
            )
            raise ClusterError(f"unknown cluster '{name}'; {known} give the path of a cluster file")
        found = replace(PRESETS[name], nodes=nodes)
        return found if devices is None else found.with_devices(devices)

    @classmethod
    def local(cls, ranks: int) -> Cluster:
        """This machine as `ranks` CPU devices that share its cores and memory: a rough guess, see `fourfold calibrate`."""
        schema.check_count("ranks of this machine", ranks, ClusterError)
        cores = os.cpu_count() or 1
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        most = int(memory * 0.8) // (schema.parse_bytes(LOCAL_RESERVE, "reserve") + 2**20)
        if ranks > most:
            raise ClusterError(
                f"{ranks} ranks are too many for this machine: each would have {schema.format_bytes(memory * 0.8 / ranks)} "
                f"of its {schema.format_bytes(memory)} of memory, but needs {LOCAL_RESERVE} besides its tensors; "
                f"use {most} or fewer"
            )
        share = min(cores, ranks) / ranks
        rate = 40e9 * share
        device = Device(
            name="CPU core",
            kind="cpu",
            memory=str(int(memory * 0.8 / ranks)),
            reserve=LOCAL_RESERVE,
            margin=0.06,
            matrix={"bf16": rate / 4, "fp32": rate, "fp64": rate / 2},
            efficiency=0.8,
            attention=0.5,
            memory_rate=4e9 * share,
            operator=2e-5,
        )
        inside = Level(name="loopback", bandwidth=1e9 * share, latency=2e-4)
        return cls(
            name="local",
            devices=ranks,
            device=device,
            host=Host(memory=str(int(memory * 0.8)), link=4e9),
            level=(inside,),
            overlap=0.0,
            source="a guess from the number of cores; run `fourfold calibrate` to measure",
        )

    @classmethod
    def load(cls, path: str | Path, nodes: int | None = None, devices: int | None = None) -> Cluster:
        """Read a cluster file (TOML, JSON, YAML). With `preset = "h100-sxm"` in it, missing fields come from the preset.

        `nodes` and `devices` override the file's; with `preset = "local"`, `nodes` is the number of ranks on this machine.
        """
        given = {"nodes": nodes, "devices": devices}
        data = schema.read(path, ClusterError) | {k: v for k, v in given.items() if v is not None}
        with schema.in_file(path, ClusterError):
            return cls.from_dict({"name": Path(path).stem} | data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cluster:
        """The cluster of a file's fields; with `preset`, missing ones come from the preset."""
        data = dict(data)
        known = ["preset", *(f.name for f in fields(cls))]
        for key in data:
            if key not in known:
                raise ClusterError(f"unknown field '{key}'{schema.nearest(str(key), known)}")
        if isinstance(data.get("device"), list):
            raise ClusterError(
                f"{len(data['device'])} kinds of device; a cluster has one [device] table, since a step ends when its "
                "slowest rank does: give the slowest device, or plan for one kind of device only"
            )
        base = data.pop("preset", None)
        if base is None:
            data = _with_assumptions(data)
        else:
            if not isinstance(base, str):
                raise ClusterError(f"preset must be a name; found {base!r}")
            whole, devices = cls.preset(base), data.get("devices", 0)
            if base == "local" and all(schema.is_integer(data.get(n, 1), 1) for n in ("nodes", "devices")):
                whole = cls.local(data.pop("nodes", 1) * data.pop("devices", 1))
            elif "level" not in data and schema.is_integer(devices, 1):
                whole = whole.with_devices(devices)
            data = _merged(whole.to_dict(), data)
        cluster = schema.build(cls, data, error=ClusterError)
        check_pieces(cluster)
        return cluster

    @classmethod
    def find(cls, name: str, nodes: int | None = None, devices: int | None = None) -> Cluster:
        """A preset or a cluster file, optionally with another number of nodes, or of devices in a node."""
        if name in preset_names() or not Path(name).suffix:
            return cls.preset(name, 1 if nodes is None else nodes, devices)
        return cls.load(name, nodes, devices)

    def to_dict(self) -> dict[str, Any]:
        return schema.dump(self)

    def save(self, path: str | Path) -> None:
        """Write the cluster as .toml or .json."""
        path = Path(path)
        if path.suffix == ".json":
            schema.write_json(path, self.to_dict())
        elif path.suffix == ".toml":
            schema.write_text(path, schema.dump_toml(self.to_dict()))
        else:
            raise ClusterError(f"{path}: a cluster is saved as .json or .toml; found '{path.suffix}'")

    def what_if(self, changes: Mapping[str, str | int]) -> Cluster:
        """A changed copy of this cluster: memory=40GiB, nodes=16, bandwidth=x2, flops=x1.5, latency, host, link."""
        return _changed(self, {name: str(value) for name, value in changes.items()})

    def with_devices(self, devices: int) -> Cluster:
        """A copy of this cluster with `devices` devices per node; a level that connected a node still does."""
        levels = [replace(x, ranks=devices) if x.ranks == self.devices else x for x in self.level]
        if devices == 1:  # drop the level inside a node
            levels = [x for x in levels if x.ranks != 1]
        return replace(self, devices=devices, level=tuple(levels))

    # ---- sizes and times ----

    @property
    def ranks(self) -> int:
        return self.nodes * self.devices

    @property
    def memory(self) -> int:
        """Memory of a device in bytes."""
        return schema.parse_bytes(self.device.memory, "device.memory", ClusterError)

    @cached_property
    def usable(self) -> int:
        """Bytes of a device that are available to tensors."""
        reserve = schema.parse_bytes(self.device.reserve, "device.reserve", ClusterError)
        return int((self.memory - reserve) * (1 - self.device.margin))

    @property
    def host_memory(self) -> float:
        """Host memory per device, in bytes."""
        return schema.parse_bytes(self.host.memory, "host.memory", ClusterError) / self.devices

    @property
    def fingerprint(self) -> str:
        text = json.dumps({k: v for k, v in self.to_dict().items() if k not in ("name", "source")}, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def collective(self, kind: Collective, size: float, members: int, stride: int = 1) -> float:
        """Seconds of a collective over a buffer of `size` bytes among `members` ranks whose numbers differ by `stride`."""
        if members <= 1 or size <= 0:
            return 0.0
        known = self._rings.get((kind, members, stride))
        if known is None:
            bandwidth, hops, crossed = self._crossed(members, stride)
            passes = 2 if kind == "all_reduce" else 1
            latency = passes * hops
            if kind == "all_reduce":  # for small buffers a tree has fewer hops than a ring
                latency = min(latency, 2 * math.ceil(math.log2(members)) * self._latency(members, stride))
            latency += max((level.start for level in crossed), default=0.0)
            factor = None if any(level.measured for level in crossed) else self._factor(crossed, kind, size, members)
            known = latency, passes * (members - 1) / members, bandwidth, factor, crossed
            self._rings[kind, members, stride] = known
        latency, share, bandwidth, factor, crossed = known
        if factor is None:
            factor = self._factor(crossed, kind, size, members)
        return factor * (latency + share * size / bandwidth)

    def message(self, size: float, distance: int) -> float:
        """Seconds of a message of `size` bytes to a rank `distance` away, on the innermost level that connects the two."""
        _, hops, crossed = self._crossed(2, distance)
        return self._factor(crossed, "message", size, 2) * (hops + size / crossed[-1].bandwidth)

    def messages(self, size: float, first: int, other: int, ranks: int) -> float:
        """Seconds until each of the `ranks` ranks from `first` on has sent a message to its peer among those from `other` on."""
        if not self.level:
            return 0.0
        for level in self.level:
            joined = level.ranks or self.ranks
            if all((first + i) // joined == (other + i) // joined for i in range(ranks)):
                break  # otherwise some pair is on two switches of this level
        return self._factor([level], "message", size, 2) * (level.latency + size / level.bandwidth)

    def link(self, members: int, stride: int = 1) -> int:
        """Index of the level whose links a group's collectives occupy: the outermost that the group crosses."""
        crossed = self._crossed(members, stride)[2]
        return self.level.index(crossed[-1]) if crossed else -1

    @staticmethod
    def _factor(crossed: Sequence[Level], kind: str, size: float, members: int) -> float:
        """Time of a collective relative to an ideal ring."""
        factor = 1.0
        for level in crossed:
            ratio = level.relative_time(kind, size, members)
            factor = ratio if level.measured else max(factor, ratio)
        return factor

    def _crossed(self, members: int, stride: int) -> tuple[float, float, list[Level]]:
        """(bandwidth, latency of a ring's hops, levels it crosses) of a group."""
        if (members, stride) in self._groups:
            return self._groups[members, stride]
        bandwidth, latency, crossed, under, below = math.inf, 0.0, list[Level](), 1, 1
        for level in self.level:
            joined = level.ranks or self.ranks
            inside = max(1, min(members, joined // stride)) if stride < joined else 1
            if inside > under:
                lines = members % under or under  # a partly filled last node has fewer links
                crowd = 1 + level.congestion * math.log2(inside / under)
                bandwidth = min(bandwidth, level.bandwidth * max(1, min(lines, below // stride)) / crowd)
                latency += (
                    members / under - members / inside
                ) * level.latency  # hops of this level in a ring over all members
                crossed.append(level)
                under = inside
            below = joined
            if under >= members:
                break
        if not crossed and members > 1 and self.level:  # the stride exceeds every level
            bandwidth, latency, crossed = self.level[-1].bandwidth, self.level[-1].latency, [self.level[-1]]
        self._groups[members, stride] = bandwidth, latency, crossed
        return bandwidth, latency, crossed

    @cached_property
    def _groups(self) -> dict[tuple[int, int], tuple[float, float, list[Level]]]:
        """Cache of `_crossed`."""
        return {}

    @cached_property
    def _rings(self) -> dict[tuple[str, int, int], tuple[float, float, float, float | None, list[Level]]]:
        """Cache by collective, members and stride: latency, fraction of the buffer received, bandwidth, factor, levels."""
        return {}

    def _latency(self, members: int, stride: int) -> float:
        """Latency of one hop on the outermost level that a group crosses."""
        for level in self.level:
            if (level.ranks or self.ranks) >= stride * members:
                return level.latency
        return self.level[-1].latency

    def product(self, m: float, k: float, n: float, dtype: str, width: int) -> float:
        """Seconds of the matmul [m, k] · [k, n] with elements of `width` bytes."""
        d = self.device
        rate = d.matrix[dtype] * d.efficiency * d.fullness(m, k, n)
        return max(2.0 * m * k * n / rate, width * (m * k + k * n + m * n) / d.memory_rate) + d.operator

    def attention(self, flops: float, dtype: str, tokens: float = ATTENTION_TOKENS) -> float:
        """Seconds of fused attention over sequences of `tokens` tokens: short ones do not fill the device."""
        d = self.device
        full = tokens / (tokens + ATTENTION_HALF) * (1 + ATTENTION_HALF / ATTENTION_TOKENS) if d.processors else 1.0
        return flops / (d.matrix[dtype] * d.efficiency * d.attention * full) + d.operator

    def memory_bound(self, size: float, *, fused: bool = False) -> float:
        """Seconds of an operator that reads and writes `size` bytes."""
        share = 1.0 if fused else self.device.eager
        return size / (self.device.memory_rate * share) + self.device.operator


def preset_names() -> list[str]:
    """Names accepted by `Cluster.preset`."""
    from fourfold.presets import PRESETS

    return [*PRESETS, "local"]


def _interpolated(points: Sequence[Sequence[float]], x: float) -> float:
    """Interpolate the ratio at x bytes, linearly in log(x); constant after the last point.

    Below the first point the ratio grows as 1/x, so that the time stays that of the smallest size measured.
    """
    if x <= points[0][0]:
        return points[0][1] * points[0][0] / max(1.0, x)
    for (a, low), (b, high) in pairwise(points):
        if x <= b:
            return low + (high - low) * math.log(x / a) / math.log(b / a)
    return points[-1][1]


def _full_rounds(m: float, n: float, rows: int, columns: int, processors: int) -> float:
    """Utilisation of the waves of tiles: useful output divided by waves · processors · tile size."""
    blocks = math.ceil(m / rows) * math.ceil(n / columns)
    return (m * n) / (math.ceil(blocks / processors) * processors * rows * columns)


# ---- changes ----


_RATES = {"device": ("memory", "matrix", "efficiency", "attention", "memory_rate"), "host": ("memory", "link")}
"""Fields on which predictions depend most."""
ASSUMED = "assumed, since the file leaves them out: "


def _with_assumptions(data: dict[str, Any]) -> dict[str, Any]:
    """A cluster file with the rates that it leaves out named in `source`."""
    missing = []
    for table, names in _RATES.items():
        given, defaults = data.get(table, {}), (Device if table == "device" else Host)()
        if isinstance(given, Mapping):
            missing += [f"{table}.{n} = {_rate_text(getattr(defaults, n))}" for n in names if n not in given]
    levels = data.get("level", ())
    for i, level in enumerate(levels if isinstance(levels, list | tuple) else ()):
        if isinstance(level, Mapping):
            unset = (n for n in ("bandwidth", "latency") if n not in level)
            missing += [f"level[{i}].{n} = {_rate_text(getattr(Level(), n))}" for n in unset]
    if not missing:
        return data
    source = data.get("source")
    return data | {
        "source": (f"{source}; " if isinstance(source, str) and source else "") + ASSUMED + ", ".join(missing)
    }


def _rate_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {rate:g}" for name, rate in value.items())
    return value if isinstance(value, str) else f"{value:g}"


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        out[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return out


_CHANGES = ("memory", "nodes", "devices", "bandwidth", "latency", "flops", "link", "host")


def _changed(c: Cluster, changes: Mapping[str, str]) -> Cluster:
    for what, text in changes.items():
        if what not in _CHANGES:
            raise ClusterError(f"--what-if {what}{schema.nearest(what, _CHANGES)}")
        if what in ("nodes", "devices"):
            if not re.fullmatch(r"[1-9]\d*", text):
                raise ClusterError(f"--what-if {what}={text}: give a whole number of at least 1")
            c = replace(c, nodes=int(text)) if what == "nodes" else c.with_devices(int(text))
        elif what == "memory":
            size = _times(c.memory, text) or schema.parse_bytes(text, "--what-if memory", ClusterError)
            c = replace(c, device=replace(c.device, memory=str(int(size))))
        elif what == "host":
            size = _times(c.host_memory * c.devices, text) or schema.parse_bytes(text, "--what-if host", ClusterError)
            c = replace(c, host=replace(c.host, memory=str(int(size))))
        else:
            factor = _times(1.0, text)
            if factor is None:
                raise ClusterError(f"--what-if {what}={text}: give a factor, for example {what}=x2")
            if what == "flops":
                matrix, stated = ({k: v * factor for k, v in x.items()} for x in (c.device.matrix, c.device.stated))
                c = replace(c, device=replace(c.device, matrix=matrix, stated=stated))
            elif what == "link":
                c = replace(c, host=replace(c.host, link=c.host.link * factor))
            else:
                levels = tuple(replace(x, **{what: getattr(x, what) * factor}) for x in c.level)
                c = replace(c, level=levels)
    return c


def _times(value: float, text: str) -> float | None:
    """`value` times the number after an x, as in x2; None if the text is not a factor."""
    match = re.fullmatch(r"[x×*](\d+(?:\.\d+)?)", text)
    return value * float(match[1]) if match and float(match[1]) > 0 else None
