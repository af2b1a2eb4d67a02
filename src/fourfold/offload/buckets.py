"""Data structures of the streamed optimizer: weight blocks, state regions, and buckets.

A **weight block** is a flat tensor of weights with its gradient; its `parts` are the ranges that are parameters. A **state
region** holds the optimizer state of all blocks with the same weight dtype and home (device or host): one array per kind of
state, blocks one after another, each starting at a multiple of 64 elements.

    weight dtype   state per element
    bf16           low 16 bits of the fp32 master (offload/split.py), two moments        2 + 2 m bytes, m = 4 (fp32) or 2
    fp32, fp64     two moments; the weight is the master                                  2 m bytes

A **bucket** is a range of a region that is copied and updated at once. Bucket boundaries cut parameters at multiples of 64
elements, and each cut is passed to the fused kernel as a separate tensor. (A single flat tensor would be as fast, but
vectorised kernels compute the tail of a tensor with other instructions, so a shifted tail would change bits.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fourfold.offload.host import host_memory
from fourfold.offload_sizes import bucket_label

__all__ = ["ALIGN", "Bucket", "Cut", "StateRegion", "WeightBlock", "allocate", "allocate_spares", "cut_region", "place"]

ALIGN = 64


@dataclass(eq=False, repr=False)
class WeightBlock:
    """Weights [n] with one home; `parts` are the (start, stop, settings) of its parameters, in order.

    `settings` is a torch parameter group. `step` is the number of updates, a tensor on the device.
    """

    value: Tensor
    parts: list[tuple[int, int, dict[str, Any]]]
    step: Tensor
    grad: Tensor | None = None
    """Flat gradient of the current step; None: this block is not updated."""
    name: str = ""
    """For timelines."""
    region: StateRegion = field(init=False)
    start: int = field(init=False)
    buckets: list[Bucket] = field(init=False, default_factory=list)

    @property
    def elements(self) -> int:
        return -(-self.value.numel() // ALIGN) * ALIGN

    def state(self) -> dict[str, Tensor]:
        """Views of this block's state in its region. Call `Streamer.finish` first."""
        return {kind: flat[self.start : self.start + self.value.numel()] for kind, flat in self.region.state.items()}


@dataclass(eq=False, repr=False)
class StateRegion:
    """Optimizer state of the blocks with one weight dtype and one home."""

    weights: torch.dtype
    home: Literal["device", "host"]
    kinds: dict[str, torch.dtype]
    elements: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)

    @property
    def element_bytes(self) -> int:
        return sum(dtype.itemsize for dtype in self.kinds.values())

    @property
    def bytes(self) -> int:
        return self.elements * self.element_bytes

    @property
    def master(self) -> torch.dtype:
        return torch.float32 if self.weights == torch.bfloat16 else self.weights

    def arrays(self, memory: Tensor, elements: int, weights: bool = False) -> dict[str, Tensor]:
        """Views of a byte buffer as the state arrays of `elements` elements, one kind after another; `weights`: and theirs."""
        out, at = {}, 0
        for kind, dtype in {**self.kinds, **({"weight": self.weights} if weights else {})}.items():
            size = elements * dtype.itemsize
            out[kind] = memory[at : at + size].view(dtype)
            at += size
        return out


@dataclass(frozen=True, repr=False)
class Cut:
    """Elements [start, stop) of a block, all of one parameter; they start at element `at` of the bucket."""

    block: WeightBlock
    settings: dict[str, Any]
    start: int
    stop: int
    at: int


@dataclass(eq=False, repr=False)
class Bucket:
    """Elements [start, stop) of a region, with the events of their copies and update."""

    region: StateRegion
    start: int
    stop: int
    first: int
    """Index of its first block; buckets are sorted by it."""
    cuts: list[Cut] = field(default_factory=list)
    blocks: list[WeightBlock] = field(default_factory=list)
    slot: Tensor | None = None
    loaded: Any = None
    updated: Any = None
    written: Any = None
    """The last copy to `at_home()`."""
    spare: dict[str, Tensor] | None = None
    """A second place on the host for the state, with the `weight` of before: see the streamer's note on rolling back."""
    spare_written: Any = None
    """The last copy to `spare`: of state, of weights, or of both."""
    in_spare: bool = False
    """Whether the current state is in `spare`."""
    undo: bool = False
    """Whether the weights have to be set back to those in `spare` first."""
    pending: bool = False
    """Whether an update was submitted that the compute queue has not waited for."""
    held: list[Tensor] = field(default_factory=list)
    """Tensors that a pending update reads, kept alive until it is done."""

    @property
    def elements(self) -> int:
        return self.stop - self.start

    @property
    def streamed(self) -> bool:
        return self.region.home == "host"

    @property
    def label(self) -> str:
        """What it holds, for timelines."""
        return bucket_label([block.name for block in self.blocks], on_host=self.streamed)

    def at_home(self) -> dict[str, Tensor]:
        return {kind: flat[self.start : self.stop] for kind, flat in self.region.state.items()}

    def place(self, spare: bool) -> dict[str, Tensor]:
        """The state arrays in its spare place, or at home."""
        if not spare:
            return self.at_home()
        assert self.spare is not None
        return {kind: self.spare[kind] for kind in self.region.kinds}

    @property
    def spare_bytes(self) -> int:
        """Bytes of a spare place: state and weights."""
        return self.elements * (self.region.element_bytes + self.region.weights.itemsize)


def place(blocks: Sequence[WeightBlock], moments: torch.dtype | None, room: int) -> list[StateRegion]:
    """Assign every block to a region: on the device while `room` bytes last, first blocks first, then on the host."""
    regions: dict[tuple[torch.dtype, str], StateRegion] = {}
    for block in blocks:
        dtype = block.value.dtype
        master = torch.float32 if dtype == torch.bfloat16 else dtype
        moment = moments or master
        kinds = {"low": torch.int16} if dtype == torch.bfloat16 else {}
        kinds |= {"exp_avg": moment, "exp_avg_sq": moment}
        size = block.elements * sum(k.itemsize for k in kinds.values())
        home: Literal["device", "host"] = "device" if size <= room else "host"
        room -= size if home == "device" else 0
        region = regions.setdefault((dtype, home), StateRegion(dtype, home, kinds))
        block.region, block.start = region, region.elements
        region.elements += block.elements
    return list(regions.values())


def allocate(region: StateRegion, device: torch.device) -> None:
    """Allocate a region's zeroed arrays. Each has its own memory: memory registered with CUDA in one call is copied in one."""
    for kind, dtype in region.kinds.items():
        size = region.elements * dtype.itemsize
        if region.home == "host":
            memory = host_memory(size, device)
        else:
            memory = torch.zeros(size, dtype=torch.uint8, device=device)
        region.state[kind] = memory.view(dtype)


def allocate_spares(buckets: Sequence[Bucket], room: int, device: torch.device) -> list[Tensor]:
    """Give the first buckets spare places while `room` bytes last; returns their memory. Each array has its own."""
    allocated: list[Tensor] = []
    chosen: dict[StateRegion, list[Bucket]] = {}
    for bucket in buckets:
        if bucket.spare_bytes > room:
            break
        room -= bucket.spare_bytes
        chosen.setdefault(bucket.region, []).append(bucket)
    for region, mine in chosen.items():
        elements = sum(b.elements for b in mine)
        kinds = {**region.kinds, "weight": region.weights}
        memory = {kind: host_memory(elements * dtype.itemsize, device) for kind, dtype in kinds.items()}
        flat = {kind: memory[kind].view(dtype) for kind, dtype in kinds.items()}
        allocated += memory.values()
        at = 0
        for bucket in mine:
            bucket.spare = {kind: array[at : at + bucket.elements] for kind, array in flat.items()}
            at += bucket.elements
    return allocated


def cut_region(
    region: StateRegion, blocks: Sequence[WeightBlock], size: int, *, per_block: bool = False
) -> list[Bucket]:
    """Cut a region into buckets of `size` elements; `per_block`: at the ends of blocks, too."""
    mine = [block for block in blocks if block.region is region]
    ranges = [(b.start, b.start + b.elements) for b in mine] if per_block else [(0, region.elements)]
    buckets = [
        Bucket(region, start, min(start + size, stop), len(blocks))
        for first, stop in ranges
        for start in range(first, stop, size)
    ]
    starts = [bucket.start for bucket in buckets]
    for index, block in enumerate(blocks):
        if block.region is not region or not block.elements:
            continue
        first, last = (bisect_right(starts, at) - 1 for at in (block.start, block.start + block.elements - 1))
        for bucket in buckets[first : last + 1]:
            bucket.blocks.append(block)
            bucket.first = min(bucket.first, index)
            for start, stop, settings in block.parts:
                low, high = (max(bucket.start, block.start + start), min(bucket.stop, block.start + stop))
                if low < high:
                    inside = Cut(block, settings, low - block.start, high - block.start, low - bucket.start)
                    bucket.cuts.append(inside)
    return buckets
