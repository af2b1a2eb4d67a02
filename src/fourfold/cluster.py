"""What to train on: devices, hosts and networks, as the planner sees them. Presets, files, what-ifs. No torch.

    Cluster.preset("h100-sxm", nodes=8)      Cluster.local(4)      Cluster.load("cluster.toml")

A cluster is `nodes` nodes of equal devices under one or more **levels** of network, the innermost first: a level joins `ranks`
devices, and every device sends into it at `bandwidth` bytes a second and receives at the same rate, at once. A ring over a group
goes as fast as the slowest level it crosses; of k members under one lower level, each brings its own link, so the group
crosses with k times the bandwidth of one. Received bytes of a buffer of S bytes over n ranks:

    all_gather, reduce_scatter   (n - 1)/n · S          all_reduce   2 (n - 1)/n · S          message   S

Latency is paid once per hop of the ring. `factor` multiplies the time of a collective where a backend is worse than a ring
(gloo's own reduce_scatter moves what an all_reduce does). `fourfold calibrate` measures all of it on a machine or job, and writes
factors of several sizes and groups in place of one (`measured`): those between are interpolated, and the nearest group's count.
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
"""What a rank on this machine has besides tensors."""
TILES = ((256, 128, 1.0), (128, 128, 1.0), (128, 64, 0.9))
"""Blocks of the output that a processor of a GPU computes at once, and how well each keeps it busy."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device: what a rank computes on."""

    name: str = "device"
    """For people."""
    kind: Literal["cuda", "cpu"] = "cuda"
    """Which kernels run: a GPU's fused ones or a CPU's."""
    memory: str = "80GB"
    """All of its memory."""
    reserve: str = "2GiB"
    """Of it, what no tensor can have: driver context, communication buffers."""
    margin: float = 0.04
    """Share of the rest that the allocator loses to rounding and fragmentation."""
    matrix: dict[str, float] = field(default_factory=lambda: {"bf16": 312e12, "fp32": 19.5e12, "fp64": 9.7e12})
    """Peak FLOP/s of matrix products by type."""
    stated: dict[str, float] = field(default_factory=dict)
    """By type, FLOP/s that the vendor states, where those of `matrix` are measured: what MFU is a share of."""
    efficiency: float = 0.8
    """Share of the peak that large products reach."""
    attention: float = 0.65
    """Share of `efficiency` that fused attention reaches."""
    attention_backward: float = 2.5
    """Time of its backward over its forward's."""
    processors: int = 0
    """Processors that blocks of a product are dealt to, for the loss at the last round; 0: none is modelled."""
    memory_rate: float = 2.0e12
    """Bytes a second that large memory-bound operators reach."""
    eager: float = 1.0
    """Share of it that a model's operators between products reach, one by one; 1: fused."""
    operator: float = 5e-6
    """Seconds that starting an operator takes at least."""

    def peak(self, dtype: str) -> float:
        """FLOP/s that MFU is a share of."""
        return self.stated.get(dtype, self.matrix[dtype])

    def fullness(self, m: float, k: float, n: float) -> float:
        """Of what large products reach, the share that [m, k] · [k, n] can: short sums, and idle processors in the last round."""
        if not self.processors:
            return 1.0
        return (
            k
            / (k + 64)
            * max(good * _full_rounds(m, n, rows, columns, self.processors) for rows, columns, good in TILES)
        )


@dataclass(frozen=True, kw_only=True)
class Host:
    """What the devices of a node share."""

    memory: str = "1TiB"
    """Of a node."""
    link: float = 25e9
    """Bytes a second between a device and its host, in each direction at once, while all devices of a node do the same."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """One level of network."""

    name: str = "network"
    """For people."""
    ranks: int = 0
    """Devices that one piece of this level joins; 0: all."""
    bandwidth: float = 25e9
    """Bytes a second that every device sends and receives at, as rings reach them."""
    latency: float = 5e-6
    """Seconds of one hop."""
    factor: dict[str, float] = field(default_factory=dict)
    """By collective, its time over a ring's; 1 where not given."""
    measured: dict[str, list[list[float]]] = field(default_factory=dict)
    """By collective and ranks of a group ("all_gather 4"): [bytes, its time over a ring's] of some sizes, the smallest first."""

    def slower(self, kind: str, size: float, members: int) -> float:
        """The time of a collective over a ring's, for a buffer of `size` bytes."""
        if not self.measured:
            return self.factor.get(kind, 1.0)
        found = [(int(n), points) for name, points in self.measured.items() for k, n in [name.split()] if k == kind]
        if not found:
            return self.factor.get(kind, 1.0)
        _, points = min(found, key=lambda item: (abs(math.log(item[0] / members)), item[0]))
        return _interpolated(points, size)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of devices."""

    name: str = "cluster"
    """For people."""
    nodes: int = 1
    """Nodes."""
    devices: int = 8
    """Devices of a node."""
    device: Device = field(default_factory=Device)
    """What every device is."""
    host: Host = field(default_factory=Host)
    """What every node is."""
    level: tuple[Level, ...] = ()
    """Networks, the innermost first; the last joins everything."""
    overlap: float = 0.9
    """Share of gathers, reductions and messages that can hide behind computing."""
    call: float = 0.0
    """Seconds of computing that a collective takes even where it hides."""
    small: float = 0.0
    """Bytes; collectives of fewer run beside the others of their group, not after those that were started before."""
    queue: float = 0.0
    """Seconds that a collective waits at most, on a link that others use, for what they have on the way there."""
    source: str = ""
    """Where the numbers are from."""

    def __post_init__(self) -> None:
        check_cluster(self)

    # ---- where clusters come from ----

    @classmethod
    def preset(cls, name: str, nodes: int = 1) -> Cluster:
        """A cluster by name: nodes of eight GPUs, NVLink inside, InfiniBand between; or this machine ("local")."""
        from fourfold.presets import PRESETS

        if name == "local":
            return cls.local(nodes)
        if name not in PRESETS:
            raise ClusterError(
                f"there is no cluster '{name}'; known: {', '.join(preset_names())}, or the path of a file"
            )
        return replace(PRESETS[name], nodes=nodes)

    @classmethod
    def local(cls, ranks: int) -> Cluster:
        """This machine as `ranks` CPU devices that share its cores and memory. Rough; `fourfold calibrate` measures."""
        schema.check_count("ranks of this machine", ranks, ClusterError)
        cores = os.cpu_count() or 1
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        most = int(memory * 0.8) // (schema.parse_bytes(LOCAL_RESERVE, "reserve") + 2**20)
        if ranks > most:
            raise ClusterError(
                f"{ranks} ranks are too many for this machine: of its {schema.format_bytes(memory)} of memory each would "
                f"have {schema.format_bytes(memory * 0.8 / ranks)}, but takes {LOCAL_RESERVE} "
                f"before its first tensor; use {most} or fewer"
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
            source="a guess from the number of cores; `fourfold calibrate` measures",
        )

    @classmethod
    def load(cls, path: str | Path, nodes: int | None = None) -> Cluster:
        """Read a cluster file (TOML, JSON, YAML). `preset = "h100-sxm"` in it takes what it does not say from there.

        `nodes`: instead of the file's; those of `preset = "local"` are ranks that share this machine.
        """
        data = schema.read(path, ClusterError) | ({} if nodes is None else {"nodes": nodes})
        known = ["preset", *(f.name for f in fields(cls))]
        for key in data:
            if key not in known:
                raise ClusterError(f"{path}: unknown field '{key}'{schema.nearest(key, known)}")
        base = data.pop("preset", None)
        try:
            if base is not None:
                if not isinstance(base, str):
                    raise ClusterError(f"preset must be a name; found {base!r}")
                whole, devices = cls.preset(base), data.get("devices", 0)
                if base == "local" and all(schema.whole(data.get(n, 1), 1) for n in ("nodes", "devices")):
                    whole = cls.local(data.pop("nodes", 1) * data.pop("devices", 1))
                elif "level" not in data and schema.whole(devices, 1):
                    whole = whole.with_devices(devices)
                data = _merged(whole.to_dict(), {"name": Path(path).stem} | data)
            cluster = schema.build(cls, {"name": Path(path).stem} | data, error=ClusterError)
            check_pieces(cluster)
        except ClusterError as e:
            raise ClusterError(f"{path}: {e}") from None
        return cluster

    @classmethod
    def find(cls, name: str, nodes: int | None = None) -> Cluster:
        """A preset or a file, with as many nodes as asked for."""
        if name in preset_names() or not Path(name).suffix:
            return cls.preset(name, 1 if nodes is None else nodes)
        return cls.load(name, nodes)

    def to_dict(self) -> dict[str, Any]:
        return schema.dump(self)

    def save(self, path: str | Path) -> None:
        """Write the cluster; TOML or JSON by the file's ending."""
        path = Path(path)
        if path.suffix == ".json":
            schema.write_json(path, self.to_dict())
        elif path.suffix == ".toml":
            schema.write_text(path, schema.dump_toml(self.to_dict()))
        else:
            raise ClusterError(f"{path}: a cluster is saved as .json or .toml; found '{path.suffix}'")

    def what_if(self, changes: Mapping[str, str | int]) -> Cluster:
        """This cluster with some things changed: memory=40GiB, nodes=16, bandwidth=x2, flops=x1.5, latency, host, link."""
        return _changed(self, {name: str(value) for name, value in changes.items()})

    def with_devices(self, devices: int) -> Cluster:
        """This cluster with so many devices a node; what joined a node still does."""
        levels = [replace(x, ranks=devices) if x.ranks == self.devices else x for x in self.level]
        if devices == 1:  # what joined a node has nothing to join
            levels = [x for x in levels if x.ranks != 1]
        return replace(self, devices=devices, level=tuple(levels))

    # ---- what it can do ----

    @property
    def ranks(self) -> int:
        return self.nodes * self.devices

    @property
    def memory(self) -> int:
        """Bytes of a device."""
        return schema.parse_bytes(self.device.memory, "device.memory", ClusterError)

    @cached_property
    def usable(self) -> int:
        """Bytes of a device that tensors can have."""
        reserve = schema.parse_bytes(self.device.reserve, "device.reserve", ClusterError)
        return int((self.memory - reserve) * (1 - self.device.margin))

    @property
    def host_memory(self) -> float:
        """Bytes of a host, for each of its devices."""
        return schema.parse_bytes(self.host.memory, "host.memory", ClusterError) / self.devices

    @property
    def fingerprint(self) -> str:
        text = json.dumps({k: v for k, v in self.to_dict().items() if k not in ("name", "source")}, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def collective(self, kind: Collective, size: float, members: int, stride: int = 1) -> float:
        """Seconds of a collective over a buffer of `size` bytes, for `members` ranks that lie `stride` apart."""
        if members <= 1 or size <= 0:
            return 0.0
        known = self._rings.get((kind, members, stride))
        if known is None:
            bandwidth, hops, crossed = self._crossed(members, stride)
            passes = 2 if kind == "all_reduce" else 1
            latency = passes * hops
            if kind == "all_reduce":  # a tree of small messages has fewer hops
                latency = min(latency, 2 * math.ceil(math.log2(members)) * self._latency(members, stride))
            factor = None if any(level.measured for level in crossed) else self._factor(crossed, kind, size, members)
            known = latency, passes * (members - 1) / members, bandwidth, factor, crossed
            self._rings[kind, members, stride] = known
        latency, share, bandwidth, factor, crossed = known
        if factor is None:
            factor = self._factor(crossed, kind, size, members)
        return factor * (latency + share * size / bandwidth)

    def message(self, size: float, distance: int) -> float:
        """Seconds of a message of `size` bytes to the rank `distance` away, if both are on what joins so many."""
        bandwidth, hops, crossed = self._crossed(2, distance)
        return self._factor(crossed, "message", size, 2) * (hops + size / bandwidth)

    def messages(self, size: float, first: int, other: int, ranks: int) -> float:
        """Seconds until each of `ranks` ranks from `first` on has sent one to its peer among those from `other` on."""
        if not self.level:
            return 0.0
        for level in self.level:
            joined = level.ranks or self.ranks
            if all((first + i) // joined == (other + i) // joined for i in range(ranks)):
                break  # else some are on two of what this level joins
        return self._factor([level], "message", size, 2) * (level.latency + size / level.bandwidth)

    def link(self, members: int, stride: int = 1) -> int:
        """The level whose links a group's collectives keep busy, by its number: the outermost that it crosses."""
        crossed = self._crossed(members, stride)[2]
        return self.level.index(crossed[-1]) if crossed else -1

    @staticmethod
    def _factor(crossed: Sequence[Level], kind: str, size: float, members: int) -> float:
        """The time of a collective over a ring's."""
        factor = 1.0
        for level in crossed:
            slower = level.slower(kind, size, members)
            factor = slower if level.measured else max(factor, slower)
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
                lines = members % under or under  # where a group fills its last node in part, fewer cross there
                bandwidth = min(bandwidth, level.bandwidth * max(1, min(lines, below // stride)))
                latency += (members / under - members / inside) * level.latency  # hops on the way past all members
                crossed.append(level)
                under = inside
            below = joined
            if under >= members:
                break
        if not crossed and members > 1 and self.level:  # further apart than whole strides reach
            bandwidth, latency, crossed = self.level[-1].bandwidth, self.level[-1].latency, [self.level[-1]]
        self._groups[members, stride] = bandwidth, latency, crossed
        return bandwidth, latency, crossed

    @cached_property
    def _groups(self) -> dict[tuple[int, int], tuple[float, float, list[Level]]]:
        """What `_crossed` has found."""
        return {}

    @cached_property
    def _rings(self) -> dict[tuple[str, int, int], tuple[float, float, float, float | None, list[Level]]]:
        """By collective, members and stride: latency, share of a buffer that passes a link, bandwidth, factor, levels."""
        return {}

    def _latency(self, members: int, stride: int) -> float:
        """Of one hop over the outermost level that a group crosses."""
        for level in self.level:
            if (level.ranks or self.ranks) >= stride * members:
                return level.latency
        return self.level[-1].latency

    def product(self, m: float, k: float, n: float, dtype: str, width: int) -> float:
        """Seconds of [m, k] · [k, n] of elements of `width` bytes."""
        d = self.device
        rate = d.matrix[dtype] * d.efficiency * d.fullness(m, k, n)
        return max(2.0 * m * k * n / rate, width * (m * k + k * n + m * n) / d.memory_rate) + d.operator

    def attention(self, flops: float, dtype: str) -> float:
        """Seconds of fused attention."""
        d = self.device
        return flops / (d.matrix[dtype] * d.efficiency * d.attention) + d.operator

    def memory_bound(self, size: float, *, fused: bool = False) -> float:
        """Seconds of an operator that reads and writes `size` bytes."""
        share = 1.0 if fused else self.device.eager
        return size / (self.device.memory_rate * share) + self.device.operator


def preset_names() -> list[str]:
    """Names that `Cluster.preset` knows."""
    from fourfold.presets import PRESETS

    return [*PRESETS, "local"]


def _interpolated(points: Sequence[Sequence[float]], x: float) -> float:
    """The value at x of a curve by its points, straight over the logarithm of x; after the last point, that of it.

    Before the first one, as much more as x is less: nothing takes less time than the smallest that was measured.
    """
    if x <= points[0][0]:
        return points[0][1] * points[0][0] / max(1.0, x)
    for (a, low), (b, high) in pairwise(points):
        if x <= b:
            return low + (high - low) * math.log(x / a) / math.log(b / a)
    return points[-1][1]


def _full_rounds(m: float, n: float, rows: int, columns: int, processors: int) -> float:
    """How full the rounds of blocks are: the useful share of rounds · processors · block."""
    blocks = math.ceil(m / rows) * math.ceil(n / columns)
    return (m * n) / (math.ceil(blocks / processors) * processors * rows * columns)


# ---- changes ----


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
    """`value` times the number after an x; None where the text is no factor."""
    match = re.fullmatch(r"[x×*](\d+(?:\.\d+)?)", text)
    return value * float(match[1]) if match and float(match[1]) > 0 else None
