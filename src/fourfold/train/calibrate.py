"""Measures this machine or job as a cluster for the planner.

All ranks work at the same time, since they share the machine. Measured: matmuls by size and dtype, memory bandwidth, launch
overhead per operator (on a CPU: in a step of a small model), attention; all-gathers, reduce-scatters and all-reduces of several
sizes over all ranks of a level and over pairs; messages between neighbours; the host link; and how much of a gather overlaps
with a matmul. Bandwidth and latency are fitted to the two largest all-gathers; all other collectives are stored relative to an
ideal ring with these values. If the larger all-gather took hardly longer than the smaller one (no link is faster than memory),
other load disturbed the measurement: it is repeated, and if that does not help, the figure is reported as doubtful. With several
nodes, the network inside a node and the network between nodes are two levels.

Every figure is the median of a few tries, and the mean over ranks.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fourfold.cluster import Cluster, Device, Host, Level
from fourfold.collectives import all_gather, all_reduce, reduce_scatter
from fourfold.config import Config
from fourfold.launch.place import Place
from fourfold.model.operators import ModelSpec
from fourfold.plan import Plan
from fourfold.planner.evaluate import predict
from fourfold.planner.problem import PlanProblem
from fourfold.ring import SMALLEST
from fourfold.runtime.transport import Name, Transport
from fourfold.runtime.wire import DevicePort, HostPort, Port, StagedPort
from fourfold.schema import format_bytes
from fourfold.train.device_rates import gpu_device, steady
from fourfold.train.one_rank import OneRank
from fourfold.train.parts import DTYPES

__all__ = ["calibrate"]

Start = Callable[[Tensor, Tensor, dist.ProcessGroup], object]
COLLECTIVES: dict[str, Start] = {
    "all_gather": lambda whole, part, group: all_gather(whole, part, group, "a calibration").wait(),
    "reduce_scatter": lambda whole, part, group: reduce_scatter(part, whole, group, "a calibration").wait(),
    "all_reduce": lambda whole, part, group: all_reduce(whole, group, "a calibration").wait(),
}
ENOUGH, REPEATS, LONG = 0.03, 16, 0.3
"""Target seconds of one try of a collective; maximum repetitions within a try; target seconds of all tries."""
TURNS = 4
"""Number of small gathers during a large one."""
AGAIN = 2
"""How often implausible all-gathers are measured again."""


@dataclass(frozen=True)
class _Sizes:
    """Problem sizes: they take seconds on a CPU, a fraction of a second on a GPU."""

    products: tuple[int, ...]
    elements: int
    buffers: tuple[int, ...]
    tries: int


RING = SMALLEST // 4
"""Elements from which ring collectives are used."""
CPU = _Sizes(
    (128, 256, 384), 1 << 21, tuple(sorted({1 << 8, 1 << 10, RING - 64, RING, 1 << 14, 1 << 16, 1 << 17, 1 << 20})), 5
)
GPU = _Sizes((2048, 4096, 8192), 1 << 28, (1 << 12, 1 << 16, 1 << 20, 1 << 26), 9)


def calibrate(
    place: Place, device: torch.device, name: str = "", tell: Callable[[str], object] = lambda what: None
) -> Cluster:
    """Measure the cluster of this job's ranks; all ranks call it and get the same. `tell` is called with what is measured next.

    Doubts are reported at the end of the cluster's `source`, after a semicolon.
    """
    return _Calibration(place, device, tell).cluster(name)


def fitted(n: int, sizes: Sequence[int], times: Sequence[float], fastest: float) -> tuple[float, float] | None:
    """Bandwidth and latency of a ring of n from its two largest all-gathers; None if that exceeds `fastest` bytes/s."""
    (small, large), (short, long) = sizes[-2:], times[-2:]
    moved = (n - 1) / n * (large - small)
    if moved > fastest * (long - short):
        return None
    bandwidth = moved / (long - short)
    return bandwidth, max(1e-7, short / (n - 1) - small / n / bandwidth)


class _Calibration:
    def __init__(self, place: Place, device: torch.device, tell: Callable[[str], object] = lambda what: None):
        self.place, self.device, self.tell = place, device, tell
        self.doubts: list[str] = []
        self.sizes = GPU if device.type == "cuda" else CPU
        self.nodes = place.ranks // max(1, place.local_ranks)

    def cluster(self, name: str) -> Cluster:
        self.tell("products, memory and attention")
        device = self._device()
        levels = self._levels(device.memory_rate)
        made = Cluster(
            name=name or platform.node(),
            nodes=self.nodes,
            devices=max(1, self.place.local_ranks),
            device=device,
            host=Host(memory=str(psutil.virtual_memory().total), link=self._link()),
            level=levels,
            source="; ".join([f"measured with torch {torch.__version__} on {self.place.ranks} ranks", *self.doubts]),
        )
        self.tell("a step of a small model, and its overhead")
        if self.device.type != "cuda":
            made = replace(made, device=replace(made.device, operator=self._operator_of_a_step(made)))
        else:
            made = replace(made, device=replace(made.device, eager=self._eager_share(made)))
        if self.place.ranks > 1:
            made = replace(made, overlap=self._overlap(), queue=self._queue(), call=self._call())
            made = replace(
                made, small=0.0 if self.device.type == "cuda" else float(SMALLEST)
            )  # gloo in addition to rings
        return made

    # ---- one device ----

    def _device(self) -> Device:
        if self.device.type == "cuda":
            return gpu_device(self.device, self._memory(), self._operator())
        rates = {kind: self._best_rate(dtype) for kind, dtype in sorted(DTYPES.items())}
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
        """FLOP/s of square matmuls, by size."""
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

    def _operator_of_a_step(self, made: Cluster) -> float:
        """Overhead per operator: the time of a small model's step without matmuls and memory traffic, divided by its operators.

        A GPU's host spends it ahead of the device; a CPU adds it to the computation.
        """
        fields = {"family": "gpt", "layers": 2, "hidden": 96, "heads": 4, "seq_len": 32, "vocab": 64}
        config = Config.from_dict({"model": fields, "train": {"global_batch": 2, "run_dir": "unused"}}).resolve()
        plan, one = Plan(), OneRank(config, Plan(), 0)

        def step() -> None:
            one.step()
            one.zero_grad()

        took = self._time(step)

        def computing(operator: float) -> float:
            cluster = replace(made, device=replace(made.device, operator=operator))
            problem = PlanProblem(ModelSpec.from_config(config.model), cluster, 2, plan.precision)
            return predict(plan, problem).compute

        free = computing(0.0)
        return max(made.device.operator, (took - free) / (computing(1.0) - free))

    def _eager_share(self, made: Cluster) -> float:
        """Fraction of the memory bandwidth that a step's unfused operators (without matmuls and attention) reach.

        Some access memory with strides. Two models are measured, since norms, activations and positions differ. They are
        large enough for the device, not the host, to determine the time.
        """
        moved = left = 0.0
        for family in ("gpt", "llama"):
            fields = {"family": family, "layers": 3, "hidden": 2560, "heads": 20, "seq_len": 2048, "vocab": 8192}
            config = Config.from_dict({"model": fields, "train": {"global_batch": 8, "run_dir": "unused"}}).resolve()
            plan = Plan.from_dict({"precision": {"compute": "bf16", "compile": False}})
            one = OneRank(config, plan, 0, str(self.device))

            def step(one: OneRank = one) -> None:
                one.step()
                one.zero_grad()

            took = steady(step)
            problem = PlanProblem(ModelSpec.from_config(config.model), made, 8, plan.precision)
            half = replace(made, device=replace(made.device, eager=0.5))
            once, twice = (
                predict(
                    plan, replace(problem, cluster=replace(c, level=(Level(bandwidth=1e12, latency=1e-6),)))
                ).compute
                for c in (made, half)
            )
            moved, left = moved + twice - once, left + took - (2 * once - twice)
        return min(1.0, moved / left) if left > 0 else 1.0

    def _memory(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory
        return int(psutil.virtual_memory().available * 0.8 / max(1, self.place.local_ranks))

    def _link(self) -> float:
        here = torch.ones(self.sizes.elements)
        if self.device.type != "cuda":
            there = torch.empty_like(here)
            return here.nbytes / self._time(lambda: there.copy_(here))
        here, back = here.pin_memory(), torch.empty_like(here).pin_memory()
        far, gone = torch.empty(2, self.sizes.elements, device=self.device).unbind()
        out, home = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)

        def both_ways() -> None:  # as in a streamed update, on all devices of a node at once
            for stream, into, source in ((out, far, here), (home, back, gone)):
                with torch.cuda.stream(stream):
                    into.copy_(source, non_blocking=True)

        return here.nbytes / self._time(both_ways)

    # ---- between devices ----

    def _levels(self, fastest: float) -> tuple[Level, ...]:
        ranks, local = self.place.ranks, max(1, self.place.local_ranks)
        if ranks == 1:
            return ()
        inside = [list(range(n * local, (n + 1) * local)) for n in range(self.nodes)]
        across = [list(range(i, ranks, local)) for i in range(local)]
        out = []
        if local > 1:
            name = "NVLink or PCIe" if self.device.type == "cuda" else "loopback"
            out.append(self._level(name, inside, local if self.nodes > 1 else 0, fastest))
        if self.nodes > 1:
            out.append(self._level("network", across, 0, fastest))
        return tuple(out)

    def _level(self, name: str, groups: list[list[int]], ranks: int, fastest: float) -> Level:
        """Measure a level: bandwidth and latency from all-gathers, all other times relative to an ideal ring."""
        n = len(groups[0])
        halves = [g[i : i + 2] for g in groups for i in range(0, n - n % 2, 2)] if n > 2 else []
        sizes = [4 * size for size in self.sizes.buffers]
        times: dict[tuple[str, int], list[float]] = {}
        for cut in filter(None, (groups, halves)):
            for kind, start in COLLECTIVES.items():
                self.tell(f"{name}: {kind} of {len(cut[0])} ranks")
                times[kind, len(cut[0])] = self._collectives(start, cut)
        self.tell(f"{name}: messages")
        times["message", 2] = self._messages(halves or groups)
        for _ in range(AGAIN):
            if fitted(n, sizes, times["all_gather", n], fastest) is not None:
                break
            again = self._collectives(COLLECTIVES["all_gather"], groups)
            times["all_gather", n] = list(
                map(min, times["all_gather", n], again)
            )  # other load can only increase a time
        bandwidth, latency = self._ring(name, n, sizes, times["all_gather", n], fastest)
        level = Level(name=name, ranks=ranks, bandwidth=bandwidth, latency=latency)
        ring = Cluster(nodes=1, devices=n, level=(replace(level, ranks=0),))
        measured = {}
        for (kind, members), found in times.items():
            takes = [ring.message(s, 1) if kind == "message" else ring.collective(kind, s, members) for s in sizes]  # type: ignore[arg-type]
            measured[f"{kind} {members}"] = [[s, round(t / r, 3)] for s, t, r in zip(sizes, found, takes, strict=True)]
        return replace(level, measured=measured)

    def _ring(self, name: str, n: int, sizes: list[int], times: list[float], fastest: float) -> tuple[float, float]:
        """Bandwidth and latency; if they cannot be fitted, from the largest all-gather alone and the smallest alone."""
        found = fitted(n, sizes, times, fastest)
        if found is not None:
            return found
        (small, large), (short, long) = sizes[-2:], times[-2:]
        bandwidth = min(fastest, (n - 1) / n * large / long)
        self.doubts.append(
            f"{name} in doubt: all-gathers of {format_bytes(small)} and {format_bytes(large)} took {short * 1e3:.3g} and "
            f"{long * 1e3:.3g} ms, measured {AGAIN + 1} times, faster than any link; its bandwidth is set to the "
            f"{bandwidth:.3g} bytes/s of the larger one"
        )
        return bandwidth, max(1e-7, times[0] / (n - 1))

    def _collectives(self, start: Start, groups: list[list[int]]) -> list[float]:
        """Seconds of a collective for each buffer size, with all groups active."""
        made = [(members, dist.new_group(members, group_desc="calibration")) for members in groups]
        mine = next(((m, g) for m, g in made if self.place.rank in m), None)
        out = []
        for elements in self.sizes.buffers:
            if mine is None:  # a rank without a group
                out.append(self._time(lambda: None, collective=True))
                continue
            n, group = len(mine[0]), mine[1]
            whole = torch.ones(elements // n * n, device=self.device)
            part = torch.ones(elements // n, device=self.device)
            out.append(self._time(partial(start, whole, part, group), collective=True))
        return out

    def _messages(self, groups: list[list[int]]) -> list[float]:
        """Seconds of a message of each size to the next rank of a group: half of a round trip.

        Timed on the rank that gets its own message back; the other one is done when its reply is sent.
        """
        pairs = [(g[i], g[i + 1]) for g in groups for i in range(0, len(g) - 1, 2)]
        edges = [edge for a, b in pairs for edge in ((a, b), (b, a))]
        port: Port = HostPort(self.device)
        if self.device.type == "cuda":
            port = DevicePort(self.device) if "nccl" in str(dist.get_backend_config()) else StagedPort(self.device)

        def new_group(ranks: list[int]) -> dist.ProcessGroup:
            made = dist.new_group(ranks, use_local_synchronization=True, group_desc="calibration")
            assert made is not None
            return made

        transport = Transport(self.place.rank, edges, new_group, port=port)
        mine = next((pair for pair in pairs if self.place.rank in pair), None)
        out = []
        for elements in self.sizes.buffers:
            x = torch.ones(elements, device=self.device)

            def there_and_back(x: Tensor = x) -> None:
                if mine is None:
                    return
                here, peer = mine if self.place.rank == mine[0] else mine[::-1]
                transport.post(peer)
                name = Name(0, "activation", 0)
                if here == mine[0]:
                    transport.send(peer, name, x)
                transport.release(transport.receive(name, peer))
                if here != mine[0]:
                    transport.send(peer, name, x)
                transport.finish()

            out.append(self._time(there_and_back, collective=True, longest=True) / 2)
        transport.close()
        return out

    def _overlap(self) -> float:
        """The fraction of a gather that overlaps with matmuls of about the same duration."""
        group = dist.group.WORLD
        assert group is not None
        n = self.place.ranks
        elements = self.sizes.buffers[-1] // n * n
        mine = torch.ones(elements // n, device=self.device)
        whole = torch.empty(elements, device=self.device)
        size = self.sizes.products[-1]
        a = torch.ones(size, size, device=self.device)
        gather = self._time(lambda: all_gather(whole, mine, group, "a calibration").wait())
        one = self._time(lambda: a @ a)
        times = max(1, round(gather / one))

        def both() -> None:
            pending = all_gather(whole, mine, group, "a calibration")
            for _ in range(times):
                a @ a
            pending.wait()

        together = self._time(both)
        hidden = (gather + times * one - together) / min(gather, times * one)
        return round(min(1.0, max(0.0, hidden)), 3)

    def _call(self) -> float:
        """Cost of an overlapped gather: the host's time to start it and to complete it."""
        if self.device.type == "cuda":  # the host runs ahead of the device
            return 0.0
        group = dist.group.WORLD
        assert group is not None
        n, size = self.place.ranks, self.sizes.products[-1]
        mine = torch.ones(self.sizes.buffers[0])
        whole, a = torch.empty(n * len(mine)), torch.ones(size, size)

        def both() -> None:
            pending = all_gather(whole, mine, group, "a calibration")
            a @ a
            pending.wait()

        return max(0.0, self._time(both) - self._time(lambda: a @ a))

    def _queue(self) -> float:
        """How much longer a small gather of two ranks takes while a large one of all ranks is in flight. CPU only."""
        ranks, stride = self.place.ranks, max(1, self.place.local_ranks) if self.nodes > 1 else 1
        if self.device.type == "cuda":
            return 0.0
        lines = [list(range(i, ranks, stride)) for i in range(stride)]
        made = [
            (pair, dist.new_group(pair, group_desc="calibration"))
            for line in lines
            for i in range(0, len(line) - 1, 2)
            for pair in [line[i : i + 2]]
        ]
        pair = next((group for members, group in made if self.place.rank in members), None)
        everyone = dist.new_group(list(range(ranks)), group_desc="calibration")
        small, part = torch.ones(2 * self.sizes.buffers[0]), torch.ones(self.sizes.buffers[0])
        large = torch.ones(self.sizes.buffers[-1] // ranks * ranks)
        mine = torch.ones(len(large) // ranks)

        def gather() -> None:
            if pair is not None:
                all_gather(small, part, pair, "a calibration").wait()

        alone, found = self._time(gather, collective=True), []
        for _ in range(self.sizes.tries):
            dist.barrier()
            pending = all_gather(large, mine, everyone, "a calibration")
            time.sleep(ENOUGH)
            began = time.perf_counter()
            for _ in range(TURNS):
                gather()
            found.append((time.perf_counter() - began) / TURNS)
            pending.wait()
        return max(0.0, self._mean(median(found)) - alone)

    # ---- the clock ----

    def _time(self, work: Callable[[], Any], *, collective: bool = False, longest: bool = False) -> float:
        """Median seconds of a few tries that all ranks start together; the mean over ranks, or the longest.

        A short collective is repeated within a try, since ranks leave a barrier at different times. On a CPU each follows a
        matmul, as in a step, where threads sleep and ranks are not synchronised.
        """
        found: list[float] = []
        times, tries, warm = 1, self.sizes.tries, False
        pauses = collective and self.device.type != "cuda"
        a = torch.ones(self.sizes.products[0], self.sizes.products[0]) if pauses else torch.empty(0)
        while len(found) < tries:
            if self.place.ranks > 1:
                dist.barrier()
            self._wait()
            began, paused = time.perf_counter(), 0.0
            for _ in range(times):
                if pauses:
                    rest = time.perf_counter()
                    torch.mm(a, a)
                    paused += time.perf_counter() - rest
                work()
            self._wait()
            took = time.perf_counter() - began - paused
            if warm:
                found.append(took / times)
                continue
            warm, often = True, self._mean(ENOUGH / max(took, 1e-6))  # the same on all ranks
            times = min(REPEATS, max(1, round(often))) if collective else 1
            tries = min(3 * tries, max(tries, round(LONG / ENOUGH * often / times)))
        return max(1e-9, self._mean(median(found), longest))

    def _mean(self, value: float, longest: bool = False) -> float:
        """The mean, or the maximum, over all ranks."""
        if self.place.ranks == 1:
            return value
        mine = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(mine, dist.ReduceOp.MAX if longest else dist.ReduceOp.SUM)
        return float(mine.item()) / (1 if longest else self.place.ranks)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
