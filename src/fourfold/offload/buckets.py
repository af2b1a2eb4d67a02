"""What the streamed optimizer moves: blocks of weights, regions of state, and buckets that cut them.

A **block** is a flat tensor of weights with its gradient, and the **parts** of it that are parameters. The state of all
blocks that live in one place and have one type is a **region**: one array per kind of state, a block after another, each from
a multiple of 64 elements on.

    type of the weights   state per element
    bf16                  low 16 bits of the fp32 master (offload/split.py), two moments        2 + 2 m bytes, m = 4 (fp32) or 2
    fp32, fp64            two moments; the weight is the master                                  2 m bytes

A **bucket** is a range of a region, so that a parameter is cut at multiples of 64 elements only, and each cut of a parameter
is a tensor of its own in the fused kernel. (One flat tensor would do for speed, but a vector kernel treats the tail of a
tensor apart: a moved tail changes bits.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fourfold.offload.host import host_memory

__all__ = ["ALIGN", "Bucket", "Cut", "StateRegion", "WeightBlock", "allocate", "cut_region", "place"]

ALIGN = 64


@dataclass(eq=False, repr=False)
class WeightBlock:
    """Weights [n] that are placed together; `parts` are (start, stop, settings) of parameters in it, in order.

    `settings` are those of a torch parameter group. `step` counts updates, on the device.
    """

    value: Tensor
    parts: list[tuple[int, int, dict[str, Any]]]
    step: Tensor
    grad: Tensor | None = None
    """Flat gradient of the step under way; None: this block is left alone."""
    region: StateRegion = field(init=False)
    start: int = field(init=False)
    buckets: list[Bucket] = field(init=False, default_factory=list)

    @property
    def elements(self) -> int:
        return -(-self.value.numel() // ALIGN) * ALIGN

    def state(self) -> dict[str, Tensor]:
        """Views of this block's state, where it lives. The host must have called `Streamer.finish`."""
        return {kind: flat[self.start : self.start + self.value.numel()] for kind, flat in self.region.state.items()}


@dataclass(eq=False, repr=False)
class StateRegion:
    """State of blocks with one type of weights, in one place."""

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

    def arrays(self, memory: Tensor, elements: int) -> dict[str, Tensor]:
        """The kinds of state of `elements` elements, one after another in a byte buffer."""
        out, at = {}, 0
        for kind, dtype in self.kinds.items():
            size = elements * dtype.itemsize
            out[kind] = memory[at : at + size].view(dtype)
            at += size
        return out


@dataclass(frozen=True, repr=False)
class Cut:
    """Elements [start, stop) of a block, all of one parameter, at element `at` of their bucket."""

    block: WeightBlock
    settings: dict[str, Any]
    start: int
    stop: int
    at: int


@dataclass(eq=False, repr=False)
class Bucket:
    """Elements [start, stop) of a region, and where they are now."""

    region: StateRegion
    start: int
    stop: int
    first: int
    """Index of its first block, for the order."""
    cuts: list[Cut] = field(default_factory=list)
    blocks: list[WeightBlock] = field(default_factory=list)
    slot: Tensor | None = None
    loaded: Any = None
    updated: Any = None
    written: Any = None
    pending: bool = False
    """Updated in its lane; the caller's lane has not waited for it yet."""
    held: list[Tensor] = field(default_factory=list)
    """Gradients in use until then."""

    @property
    def elements(self) -> int:
        return self.stop - self.start

    @property
    def streamed(self) -> bool:
        return self.region.home == "host"

    def at_home(self) -> dict[str, Tensor]:
        return {kind: flat[self.start : self.stop] for kind, flat in self.region.state.items()}


def place(blocks: Sequence[WeightBlock], moments: torch.dtype | None, room: int) -> list[StateRegion]:
    """Give every block its place in a region: the device for the first that fit in `room` bytes, else the host."""
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
    """Zeroed arrays, each in memory of its own: what is registered with CUDA in one call can be copied in one."""
    for kind, dtype in region.kinds.items():
        size = region.elements * dtype.itemsize
        if region.home == "host":
            memory = host_memory(size, device)
        else:
            memory = torch.zeros(size, dtype=torch.uint8, device=device)
        region.state[kind] = memory.view(dtype)


def cut_region(region: StateRegion, blocks: Sequence[WeightBlock], size: int) -> list[Bucket]:
    """A region's buckets, `size` elements each."""
    buckets = [
        Bucket(region, start, min(start + size, region.elements), len(blocks))
        for start in range(0, region.elements, size)
    ]
    for index, block in enumerate(blocks):
        if block.region is not region:
            continue
        for bucket in buckets[block.start // size : (block.start + block.elements - 1) // size + 1]:
            bucket.blocks.append(block)
            bucket.first = min(bucket.first, index)
            for start, stop, settings in block.parts:
                low, high = (max(bucket.start, block.start + start), min(bucket.stop, block.start + stop))
                if low < high:
                    inside = Cut(block, settings, low - block.start, high - block.start, low - bucket.start)
                    bucket.cuts.append(inside)
    return buckets
