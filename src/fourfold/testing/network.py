"""Shaped networks: hosts on this machine as network namespaces, connected by links of a set rate. Real sockets, real gloo.

    with Network(hosts=4, rate="100mbit") as net:
        seconds = net.run_ranks(check, ranks_per_host=2)        # check(rank, ranks), as with testing.ranks.run_ranks
        agents = net.torchrun(["train.py"], ranks_per_host=2)   # one job over all hosts; its agents, for wait()
        net.popen(0, ["iperf3", "-s"])                          # any command in a host

    flat        host ──rate── switch                            every host behind one switch
    two levels  ranks of one host communicate over its loopback, which is not shaped; hosts over their links
    racks       host ──rate── rack switch ──uplink── core       racks=2, uplink="50mbit"

A host is a namespace with one interface, `eth0`, address `net.address(host)`; ranks are placed on hosts in order. Each link is
a veth pair with a token bucket (`tc tbf`) at both ends: full duplex, `rate` each way. The network is isolated.

It needs Linux, root, and `ip` and `tc` of iproute2: `missing()` returns what is absent, as a reason to skip a test. At the end
of the context all processes in the hosts are killed and the hosts removed; those of an earlier process that was killed are
removed by the next Network.

Accuracy: gathers and scatters (2 to 16 hosts, 80 to 200 Mbit/s) take 1.00 to 1.08 times bytes / rate with 4 MiB and 1.00 to
1.15 with 1 MiB; on 2 and 4 hosts 0.99 to 1.16 with 256 KiB, 0.95 to 2.1 with 64 KiB. The excess is latency, about 0.7 ms per
hop, which is not shaped. Two cores carry about 1.6 Gbit/s over all links; beyond that the processor is measured (see
`Measured.busy`). gloo is not NCCL: some of its collectives take longer than necessary (reduce-scatter twice, broadcast 2.4
times with 4 ranks and 8.6 with 16), so compare algorithms on the same collectives, and do not quote gloo's ratios as NCCL's.

[Note: settings that matter]
TCP reno (closest to bytes / rate; cubic and bbr add up to 15 %), no slow start after idling, 1 MiB of send buffer. IPv6 is off,
since its traffic would be counted. A packet is a segment, as small as two cores allow: 9000 bytes with 4 hosts of 100 Mbit/s,
32 KiB with 16. A token bucket that filled during a pause allows a burst, which made gathers of 64 KiB on 2 and 4 hosts twice as
fast as their links; so bursts are limited to 1.1 times the rate (`peakrate`), which compensates for timers that are up to 2 ms
late.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from fourfold.errors import NetworkError
from fourfold.testing.ranks import run_ranks

__all__ = ["ByteCounts", "Measured", "Network", "measure", "missing", "parse_rate", "traffic"]

_PREFIX = "fflab"
_INTERFACE = "eth0"
_SEGMENTS, _SEGMENT = 6000, (9000, 32 << 10)  # a second, over all links; bytes of one: least, most
_HEADER, _QUEUE = 14, 8 << 20  # bytes
_LATE, _PEAK = (1e-4, 2e-3), 1.1  # seconds; of the rate
_SETTINGS = {
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_no_metrics_save": "1",
    "ipv4/tcp_wmem": f"4096 131072 {1 << 20}",
    "ipv4/tcp_rmem": f"4096 131072 {2 << 20}",
    "ipv6/conf/all/disable_ipv6": "1",
}


def missing() -> str | None:
    """Why no network can be created here, or None. Tries to create one, since even root may lack the permissions."""
    try:
        with Network(hosts=1, rate="1gbit"):
            return None
    except NetworkError as e:
        return str(e)


def _lacking() -> str | None:
    """A missing requirement that can be detected without creating a network."""
    if sys.platform != "linux":
        return f"shaped networks need Linux; this is {sys.platform}"
    if os.geteuid() != 0:
        return "shaped networks need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"shaped networks need `{tool}` (iproute2), which is not installed"
    return None


class ByteCounts(NamedTuple):
    """Bytes through a host's interface, headers included."""

    received: int
    sent: int


class Network:
    """Hosts that exist inside the context. The module docstring describes the topologies."""

    def __init__(self, hosts: int, rate: str = "1gbit", *, racks: int = 1, uplink: str | None = None):
        if hosts < 1 or racks < 1 or hosts % racks:
            raise NetworkError(
                f"{hosts} hosts cannot be divided equally among {racks} racks; use a multiple of {racks}"
            )
        if (racks > 1) != (uplink is not None):
            raise NetworkError("racks and the rate of their uplink go together: racks=2, uplink='50mbit'")
        self.hosts, self.rate, self.racks, self.uplink = hosts, rate, racks, uplink
        self.bytes_per_second = parse_rate(rate)
        if uplink is not None:
            parse_rate(uplink)
        self._name = ""
        self._processes: list[subprocess.Popen[Any]] = []

    def address(self, host: int) -> str:
        """The host's IP address."""
        return f"10.91.{self._check(host) // 250}.{host % 250 + 1}"

    def run_ranks(
        self,
        fn: Callable[..., Any],
        *args: Any,
        ranks_per_host: int = 1,
        timeout: float = 60.0,
        group_timeout: float = 20.0,
        **kwargs: Any,
    ) -> list[Any]:
        """As `testing.ranks.run_ranks`, with `ranks_per_host` ranks in each host: rank r is in host r // ranks_per_host."""
        places = [self._host(host) for host in range(self.hosts) for _ in range(ranks_per_host)]

        def enter(rank: int) -> None:
            _enter_namespace(places[rank])
            os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE

        return run_ranks(fn, len(places), *args, timeout=timeout, group_timeout=group_timeout, prepare=enter, **kwargs)

    def popen(
        self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command in a host. `env` is added to this process's, `options` are those of subprocess.Popen.

        GLOO_SOCKET_IFNAME is set. The command and its children are killed at the end of the context.
        """
        merged = {**os.environ, "GLOO_SOCKET_IFNAME": _INTERFACE, **(env or {})}
        process = subprocess.Popen(["ip", "netns", "exec", self._host(host), *command], env=merged, **options)
        self._processes.append(process)
        return process

    def torchrun(
        self,
        command: Sequence[str],
        *,
        ranks_per_host: int = 1,
        flags: Sequence[str] = (),
        least: int | None = None,
        conf: str = "",
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> list[subprocess.Popen[Any]]:
        """Start `torchrun FLAGS COMMAND` on every host, as one job of hosts · ranks_per_host ranks; a process per host.

        The rendezvous is torch's elastic one on host 0, so `flags=["--max-restarts=2"]` restarts ranks. `least`: the job
        continues with at least this many hosts; `conf` is added to --rdzv-conf.
        """
        nodes = f"{least}:{self.hosts}" if least else str(self.hosts)
        start = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}"]
        start += [
            f"--nproc-per-node={ranks_per_host}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.address(0)}:29400",
        ]
        agents = []
        for host in range(self.hosts):
            # torch would derive both from the machine's name, which all hosts share
            more = f",{conf}" if conf else ""
            here = [f"--rdzv-conf=is_host={int(host == 0)}{more}", f"--local-addr={self.address(host)}"]
            agents.append(self.popen(host, [*start, *here, *flags, *command], env, **options))
        return agents

    def cut(self, host: int) -> None:
        """Cut a host's link: packets are dropped silently from now on."""
        _run("ip", "-n", f"{self._name}-switch", "link", "set", f"port{self._check(host)}", "down")

    def traffic(self, host: int) -> ByteCounts:
        """Bytes through the host's interface since its creation; inside a rank, use `network.traffic()`."""
        answer = json.loads(_run("ip", "-n", self._host(host), "-s", "-j", "link", "show", _INTERFACE))
        stats = answer[0]["stats64"]
        return ByteCounts(stats["rx"]["bytes"], stats["tx"]["bytes"])

    # ---- up and down ----

    def __enter__(self) -> Self:
        if (reason := _lacking()) is not None:
            raise NetworkError(reason)
        for name in _namespaces(f"{_PREFIX}-"):
            if not _owner_lives(name):
                _remove(name)
        mine = _owner(os.getpid())
        self._name = next(f"{mine}-{n}" for n in itertools.count() if not _namespaces(f"{mine}-{n}-"))
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        if not self._name.startswith(f"{_owner(os.getpid())}-"):
            return  # a forked child leaving the context of its parent
        for process in self._processes:
            process.kill()  # one just started may not have entered its host yet, where `_remove` looks
        for name in _namespaces(f"{self._name}-"):
            _remove(name)
        for process in self._processes:
            process.wait()
        self._name, self._processes = "", []

    def _build(self) -> None:
        switch, hosts = f"{self._name}-switch", [self._host(h) for h in range(self.hosts)]
        _batch(["ip"], [f"netns add {name}" for name in (switch, *hosts)])
        for name in (switch, *hosts):
            _configure(name)
        segment = min(max(_SEGMENT[0], int(self.hosts * self.bytes_per_second / _SEGMENTS)), _SEGMENT[1])
        size = f"mtu {segment} gso_max_size {segment} gro_max_size {segment}"
        links, shapes = ["link add core type bridge", f"link set core mtu {segment} up"], []
        for rack in range(self.racks if self.uplink else 0):
            links += [f"link add rack{rack} type bridge", f"link set rack{rack} mtu {segment} up"]
            links += [f"link add up{rack} {size} type veth peer name down{rack} {size}"]
            links += [f"link set up{rack} master rack{rack} up", f"link set down{rack} master core up"]
            shapes += [(f"up{rack}", str(self.uplink)), (f"down{rack}", str(self.uplink))]
        for host, name in enumerate(hosts):
            above = f"rack{host * self.racks // self.hosts}" if self.uplink else "core"
            links += [f"link add port{host} {size} type veth peer name {_INTERFACE} {size} netns {name}"]
            links += [f"link set port{host} master {above} up"]
            shapes += [(f"port{host}", self.rate)]
        _batch(["ip", "-n", switch], links)
        _batch(["tc", "-n", switch], [_shape(*shape, segment) for shape in shapes])
        for host, name in enumerate(hosts):
            address = f"addr add {self.address(host)}/16 dev {_INTERFACE}"
            _batch(["ip", "-n", name], [address, f"link set {_INTERFACE} up", "link set lo up"])
            _batch(["tc", "-n", name], [_shape(_INTERFACE, self.rate, segment)])

    def _host(self, host: int) -> str:
        if not self._name:
            raise NetworkError("the network is not up: use it inside `with Network(...) as net`")
        return f"{self._name}-host{self._check(host)}"

    def _check(self, host: int) -> int:
        if not 0 <= host < self.hosts:
            raise NetworkError(f"there is no host {host}: the network has hosts 0 to {self.hosts - 1}")
        return host


def parse_rate(rate: str) -> float:
    """Bytes per second of `"100mbit"`, in the units of `tc` (powers of ten)."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmg])bit", rate.strip().lower())
    if match is None or float(match[1]) == 0:
        raise NetworkError(f"invalid rate {rate!r}; write for example '100mbit', '800kbit' or '1gbit'")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]] / 8


# ---- measuring, inside ranks ----


@dataclass(frozen=True)
class Measured:
    """A timed section: seconds from the first rank's start to the last rank's end; maximum bytes through any rank's
    interface; and the load of the machine's processors (near 1, they limit the time, not the network)."""

    seconds: float
    received: int
    sent: int
    busy: float


def measure(work: Callable[[], Any]) -> Measured:
    """Time `work` on all ranks. Every rank calls it and gets the same result."""
    dist.barrier()
    idle, before = _processor_time(), traffic()
    start = time.monotonic()
    work()
    end = time.monotonic()
    dist.barrier()
    after, total = traffic(), [b - a for a, b in zip(idle, _processor_time(), strict=True)]
    mine = (start, end, after.received - before.received, after.sent - before.sent, 1 - total[1] / max(1, total[0]))
    everyone = [torch.zeros(5, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, torch.tensor(mine, dtype=torch.float64))
    start_r, end_r, received_r, sent_r, busy_r = torch.stack(everyone).unbind(1)  # _r: by rank
    seconds = float(end_r.max() - start_r.min())
    return Measured(seconds, int(received_r.max()), int(sent_r.max()), float(busy_r.max()))


def traffic() -> ByteCounts:
    """Bytes through the interface of the host this rank is in."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == _INTERFACE:
            fields = counts.split()
            return ByteCounts(int(fields[0]), int(fields[8]))
    return ByteCounts(0, 0)


def _processor_time() -> tuple[int, int]:
    """Processor ticks so far: (total, idle)."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(fields), fields[3] + fields[4]


# ---- namespaces ----


def _owner(pid: int) -> str | None:
    """Prefix of a process's namespaces: pid and start time, since pids are reused. None if the process is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{_PREFIX}-{pid}-{fields[19]}"


def _owner_lives(namespace: str) -> bool:
    owner = _owner(int(namespace.split("-")[1]))
    return owner is not None and namespace.startswith(f"{owner}-")


def _namespaces(prefix: str) -> list[str]:
    folder = Path("/var/run/netns")
    return sorted(p.name for p in folder.iterdir() if p.name.startswith(prefix)) if folder.exists() else []


def _remove(namespace: str) -> None:
    """End the processes in a namespace, then remove it."""
    while pids := _run("ip", "netns", "pids", namespace, check=False).split():
        for pid in pids:  # again until there are none: one may start another while we look
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)
    _run("ip", "netns", "delete", namespace, check=False)


def _configure(namespace: str) -> None:
    lines = [
        f"[ ! -e /proc/sys/net/{key} ] || echo '{value}' > /proc/sys/net/{key}" for key, value in _SETTINGS.items()
    ]
    _run("ip", "netns", "exec", namespace, "sh", "-ec", "\n".join(lines))


def _shape(device: str, rate: str, segment: int) -> str:
    speed = parse_rate(rate)
    at_once, in_all = (int(segment + _HEADER + late * speed) for late in _LATE)
    peak = f"peakrate {int(8 * _PEAK * speed)}bit mtu {at_once}"
    return f"qdisc add dev {device} root tbf rate {rate} burst {in_all} {peak} limit {_QUEUE}"


def _enter_namespace(name: str) -> None:
    """Move this thread, and the threads it will start, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{name}") as file:
        if libc.setns(file.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), name)


def _batch(command: list[str], lines: Sequence[str]) -> None:
    _run(*command, "-batch", "-", text="\n".join(lines))


def _run(*command: str, text: str | None = None, check: bool = True) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if check and done.returncode != 0:
        raise NetworkError(f"shaped networks do not work here: `{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
