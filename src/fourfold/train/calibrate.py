"""Measure this machine or job, and write it down as a cluster file.

All ranks work at once, since they share what there is to share. Measured: matrix products by size and type, memory, the time an
operator takes at least, attention; all-gathers of two sizes (their difference is the bandwidth, the rest the latency), the other
collectives against them; messages between neighbours; the host's link; and how much of a gather hides behind a product.
With several nodes, the network inside one and the network between them are two levels.

Every figure is the median of a few tries, and the mean over ranks.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fourfold.cluster import Cluster, Device, Host, Level
from fourfold.collectives import all_gather, all_reduce, reduce_scatter
from fourfold.launch.place import Place
from fourfold.train.device_rates import gpu_device

__all__ = ["calibrate"]

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class _Sizes:
    """How large the tries are: seconds on a CPU, a fraction of one on a GPU."""

    products: tuple[int, ...]
    elements: int
    small: int
    large: int
    tries: int


CPU = _Sizes((128, 256, 384), 1 << 21, 1 << 16, 1 << 20, 5)
GPU = _Sizes((2048, 4096, 8192), 1 << 28, 1 << 20, 1 << 26, 9)


def calibrate(place: Place, device: torch.device, name: str = "") -> Cluster:
    """The cluster that this job's ranks are; every rank calls it, and gets the same."""
    return _Calibration(place, device).cluster(name)


class _Calibration:
    def __init__(self, place: Place, device: torch.device):
        self.place, self.device = place, device
        self.sizes = GPU if device.type == "cuda" else CPU
        self.nodes = place.ranks // max(1, place.local_ranks)

    def cluster(self, name: str) -> Cluster:
        made = Cluster(
            name=name or platform.node(),
            nodes=self.nodes,
            devices=max(1, self.place.local_ranks),
            device=self._device(),
            host=Host(memory=str(psutil.virtual_memory().total), link=self._link()),
            level=self._levels(),
            source=f"measured with torch {torch.__version__} on {self.place.ranks} ranks",
        )
        return replace(made, overlap=self._overlap(made)) if self.place.ranks > 1 else made

    # ---- one device ----

    def _device(self) -> Device:
        if self.device.type == "cuda":
            return gpu_device(self.device, self._memory(), self._operator())
        rates = {kind: self._best_rate(dtype) for kind, dtype in DTYPES.items()}
        peaks = {kind: max(found) for kind, found in rates.items()}
        share = min(1.0, median(rates["fp32"]) / peaks["fp32"])
        memory = self._memory()
        return Device(
            name="CPU",
            kind="cpu",
            memory=str(memory),
            reserve=str(min(256 << 20, memory // 8)),
            matrix=peaks,
            efficiency=share,
            attention=min(1.0, self._attention() / (peaks["fp32"] * share)),
            memory_rate=self._memory_rate(),
            operator=self._operator(),
        )

    def _best_rate(self, dtype: torch.dtype) -> list[float]:
        """FLOP/s of square products, by size."""
        out = []
        for n in self.sizes.products:
            a = torch.ones(n, n, dtype=dtype, device=self.device)
            out.append(2.0 * n**3 / self._time(partial(torch.mm, a, a)))
        return out

    def _attention(self) -> float:
        tokens = 128
        q = torch.ones(2, 4, tokens, 64)
        took = self._time(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
        return 0.5 * 4 * tokens * q.numel() / took

    def _memory_rate(self) -> float:
        x = torch.ones(self.sizes.elements, device=self.device)
        y = torch.ones_like(x)
        return 3 * x.nbytes / self._time(lambda: torch.add(x, y, out=y))

    def _operator(self) -> float:
        x = torch.ones(8, device=self.device)

        def many() -> None:
            for _ in range(100):
                x.add_(1.0)

        return self._time(many) / 100

    def _memory(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory
        return int(psutil.virtual_memory().available * 0.8 / max(1, self.place.local_ranks))

    def _link(self) -> float:
        here = torch.ones(self.sizes.elements)
        if self.device.type != "cuda":
            there = torch.empty_like(here)
            return here.nbytes / self._time(lambda: there.copy_(here))
        here = here.pin_memory()
        far = torch.empty(self.sizes.elements, device=self.device)
        return here.nbytes / self._time(lambda: far.copy_(here, non_blocking=True))

    # ---- between devices ----

    def _levels(self) -> tuple[Level, ...]:
        ranks, local = self.place.ranks, max(1, self.place.local_ranks)
        if ranks == 1:
            return ()
        inside = [list(range(n * local, (n + 1) * local)) for n in range(self.nodes)]
        across = [list(range(i, ranks, local)) for i in range(local)]
        out = []
        if local > 1:
            name = "NVLink or PCIe" if self.device.type == "cuda" else "loopback"
            out.append(self._level(name, inside, local if self.nodes > 1 else 0))
        if self.nodes > 1:
            out.append(self._level("network", across, 0))
        return tuple(out)

    def _level(self, name: str, groups: list[list[int]], ranks: int) -> Level:
        made = [(members, dist.new_group(members)) for members in groups]
        members, group = next((m, g) for m, g in made if self.place.rank in m)
        n = len(members)
        few, many = self.sizes.small // n * n, self.sizes.large // n * n

        def gathered(elements: int) -> float:
            mine = torch.ones(elements // n, device=self.device)
            whole = torch.empty(elements, device=self.device)
            return self._time(lambda: all_gather(whole, mine, group, "a calibration").wait(), group)

        def scattered(elements: int) -> float:
            mine = torch.empty(elements // n, device=self.device)
            whole = torch.ones(elements, device=self.device)
            return self._time(lambda: reduce_scatter(mine, whole, group, "a calibration").wait(), group)

        def reduced(elements: int) -> float:
            whole = torch.ones(elements, device=self.device)
            return self._time(lambda: all_reduce(whole, group, "a calibration").wait(), group)

        short, long = gathered(few), gathered(many)
        moved = 4 * (n - 1) / n
        bandwidth = moved * (many - few) / max(1e-9, long - short)
        latency = max(0.0, short - moved * few / bandwidth) / (n - 1)
        ring = latency * (n - 1) + moved * many / bandwidth
        factor = {
            "reduce_scatter": scattered(many) / ring,
            "all_reduce": reduced(many) / (2 * ring),
            "message": self._message(members, group, many // n) / (latency + 4 * (many // n) / bandwidth),
        }
        told = {kind: round(max(0.05, value), 3) for kind, value in factor.items()}
        return Level(name=name, ranks=ranks, bandwidth=bandwidth, latency=latency, factor=told)

    def _message(self, members: list[int], group: dist.ProcessGroup, elements: int) -> float:
        """Seconds of a message to the next rank; every even one sends."""
        at = members.index(self.place.rank)
        peer = members[at ^ 1] if at ^ 1 < len(members) else None
        x = torch.ones(elements, device=self.device)

        def send() -> None:
            if peer is None:
                return
            if at % 2 == 0:
                dist.send(x, peer, group=group)
            else:
                dist.recv(x, peer, group=group)

        return self._time(send, group)

    def _overlap(self, made: Cluster) -> float:
        """The share of a gather that hides behind a product of about the same time."""
        group = dist.group.WORLD
        assert group is not None
        n = self.place.ranks
        elements = self.sizes.large // n * n
        mine = torch.ones(elements // n, device=self.device)
        whole = torch.empty(elements, device=self.device)
        size = self.sizes.products[-1]
        a = torch.ones(size, size, device=self.device)
        gather = self._time(lambda: all_gather(whole, mine, group, "a calibration").wait(), group)
        one = self._time(lambda: a @ a, group)
        times = max(1, round(gather / one))

        def both() -> None:
            pending = all_gather(whole, mine, group, "a calibration")
            for _ in range(times):
                a @ a
            pending.wait()

        together = self._time(both, group)
        hidden = (gather + times * one - together) / min(gather, times * one)
        return round(min(1.0, max(0.0, hidden)), 3)

    # ---- the clock ----

    def _time(self, work: Callable[[], Any], group: dist.ProcessGroup | None = None) -> float:
        """Median seconds of a few tries, all ranks starting together; the mean over them."""
        found = []
        for attempt in range(self.sizes.tries + 1):
            if self.place.ranks > 1:
                dist.barrier(group=group)
            self._wait()
            began = time.perf_counter()
            work()
            self._wait()
            if attempt:  # the first is warm-up
                found.append(time.perf_counter() - began)
        mine = torch.tensor([median(found)], dtype=torch.float64, device=self.device)
        if self.place.ranks > 1:
            world = dist.group.WORLD
            assert world is not None
            all_reduce(mine, world, "a calibration").wait()
        return max(1e-9, float(mine.item()) / self.place.ranks)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
