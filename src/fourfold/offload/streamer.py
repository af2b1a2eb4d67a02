"""The engine of the streamed optimizer: AdamW on the device, bucket by bucket (offload/buckets.py), with its state on the host.

Buckets of the host pass through a ring of slots on the device, in three lanes:

    incoming   host -> slot       when the slot's last write-back and this bucket's last write-back are done
    updating   AdamW              when the bucket is in, its gradients are final and, if it matters, the norm is known
    outgoing   slot -> host       when it is updated

The next buckets come in as soon as slots are free, also for the next step: so the link is busy through forward and backward,
and as much as the ring holds is there when the norm is known. Staging is nothing but a longer ring. Nothing in a step waits on
the host or allocates on the device. A caller that computes with a bucket's weights calls `wait` first.

Device bytes, for n elements in a bucket and r slots: r · (state of n) + scratch of n · (4 for gradients, + 4 for bf16 weights,
+ 8 for bf16 moments); no scratch where a kernel does it all (bf16 weights on CUDA).

[Note: updates in the backward]
Where no update waits for the norm, each starts when its gradient is there, the last layer's first. A link that is a little too
slow for that falls behind, and ends with the first layers, which the next forward needs at once. So some of the later
layers' buckets are put off: they are updated when the backward is over, in the order of the forward, which gets to them later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fourfold.kernels import have_kernels
from fourfold.offload.buckets import ALIGN, Bucket, Cut, WeightBlock, allocate, cut_region, place
from fourfold.offload.host import check_available
from fourfold.offload.queues import DeviceQueue, DeviceQueues, make_queues
from fourfold.offload.split import join, scale, split

__all__ = ["Streamer"]

_SETTINGS = ("lr", "betas", "eps", "weight_decay", "maximize")


class Streamer:
    """Blocks in the order in which a forward uses them, their state, and the ring it passes through."""

    def __init__(
        self,
        blocks: Sequence[WeightBlock],
        *,
        moments: torch.dtype | None = None,
        bucket: int = 1 << 24,
        ring: int = 4,
        staging: int = 0,
        device_bytes: int = 0,
        host_bytes: int | None = None,
        backwards: bool = False,
        lanes: DeviceQueues | None = None,
    ):
        """`moments`: their type (default: the master's). `bucket`: elements. `staging`: bytes that the ring may have beyond
        `ring` slots' worth. `device_bytes`: for state that stays on the device, first blocks first. `backwards`: updates
        are expected from the last block to the first."""
        self.device, self.blocks = blocks[0].value.device, list(blocks)
        self.lanes = lanes or make_queues(self.device)
        self.size = max(ALIGN, bucket // ALIGN * ALIGN)
        self.regions = place(self.blocks, moments, device_bytes)
        streamed = sum(r.bytes for r in self.regions if r.home == "host")
        check_available(streamed, "the optimizer's state", host_bytes)
        for region in self.regions:
            allocate(region, self.device)
        self.buckets = [b for region in self.regions for b in cut_region(region, self.blocks, self.size)]
        self.buckets.sort(key=lambda b: b.first)
        for bucket_ in self.buckets:
            for block in bucket_.blocks:
                block.buckets.append(bucket_)
        self._make_ring(ring, staging)
        self._make_scratch()
        self._order = self.buckets[::-1] if backwards else list(self.buckets)
        self._queue: deque[Bucket] = deque()  # to come in next
        self._todo: deque[Bucket] = deque()  # of the step under way, in order
        self._ready: set[WeightBlock] = set()
        self._seen: dict[Bucket, None] = {}  # in the order in which they became ready
        self._stepped: set[WeightBlock] = set()
        self._factor: Tensor | None = None
        self._skip: Tensor | None = None

    # ---- memory ----

    def _make_ring(self, ring: int, staging: int) -> None:
        streamed = [b for b in self.buckets if b.streamed]
        size = max((b.elements * b.region.element_bytes for b in streamed), default=0)
        slots = min(len(streamed), max(1, ring, staging // size if size else 0))
        self._free: deque[tuple[Tensor, Any]] = deque(
            (torch.empty(size, dtype=torch.uint8, device=self.device), None) for _ in range(slots)
        )
        self.ring_bytes = slots * size

    def _make_scratch(self) -> None:
        """Fp32 (or wider) room for what the kernel reads and writes and is stored narrower."""
        names: dict[str, int] = {}
        for region in self.regions:
            if self._in_one_pass(region.kinds):
                continue
            size = min(self.size, region.elements) * region.master.itemsize
            wanted = ["grad"]
            wanted += ["master"] if "low" in region.kinds else []
            wanted += ["exp_avg", "exp_avg_sq"] if region.kinds["exp_avg"] != region.master else []
            for name in wanted:
                names[name] = max(names.get(name, 0), size)
        self._scratch = {n: torch.empty(size, dtype=torch.uint8, device=self.device) for n, size in names.items()}
        self.scratch_bytes = sum(names.values())

    def _in_one_pass(self, kinds: Container[str]) -> bool:
        """Whether a kernel makes the whole update of a bucket with these kinds of state."""
        return "low" in kinds and have_kernels(self.blocks[0].value)

    @property
    def device_bytes(self) -> int:
        """Bytes held on the device: state that lives there, the ring, scratch."""
        return sum(r.bytes for r in self.regions if r.home == "device") + self.ring_bytes + self.scratch_bytes

    @property
    def host_bytes(self) -> int:
        return sum(r.bytes for r in self.regions if r.home == "host")

    # ---- a step ----

    def begin(self) -> None:
        """A step begins: gradients come in by `ready`, or all are there when `step` is called."""
        self._todo = deque(self._order)
        self._ready.clear()
        self._seen.clear()
        self._stepped.clear()
        self._factor = self._skip = None

    def ready(self, block: WeightBlock, after: DeviceQueue | None = None) -> None:
        """The block's gradient is final, and the update waits for nothing else: start what can be started.

        Buckets are updated in the order that is expected; what is out of order waits for its turn, or for `step`, and
        is expected where it came from then on. The gradient was written in lane `after` (default: the caller's).
        """
        self._ready.add(block)
        self.lanes.updating.wait((after or self.lanes.here).mark())
        for bucket in block.buckets:
            if all(b in self._ready for b in bucket.blocks):
                self._seen[bucket] = None
        while self._todo and self._todo[0] in self._seen:
            self._update(self._todo.popleft())

    def step(self, factor: Tensor | None = None, skip: Tensor | None = None) -> None:
        """Update every block that has a gradient and was not updated since `begin`; then let the next step's state come in.

        Gradients are multiplied by `factor`, and nothing changes where `skip` is 1: both are numbers on the device.
        """
        self._factor, self._skip = factor, skip
        self.lanes.updating.wait(self.lanes.here.mark())
        while self._todo:
            self._update(self._todo.popleft())
        if self._seen:
            self._order = _put_off([*self._seen, *(b for b in self._order if b not in self._seen)])
        for block in self.blocks:
            block.grad = None
        self._queue = deque(b for b in self._order if b.streamed and b.slot is None)
        self._fill()

    def wait(self, block: WeightBlock) -> None:
        """What the caller does next may use the block's weights, and write its gradient."""
        for bucket in block.buckets:
            if bucket.pending:
                self._know(bucket)

    def _know(self, bucket: Bucket) -> None:
        self.lanes.here.wait(bucket.updated)
        bucket.pending = False
        bucket.held.clear()

    def wait_all(self) -> None:
        for block in self.blocks:
            self.wait(block)

    def finish(self) -> None:
        """Wait, on the host, until weights and state are where they belong."""
        self.lanes.finish()
        self.wait_all()

    def reload(self) -> None:
        """The state at home was changed by the caller: forget what has come in."""
        self.finish()
        for bucket in self.buckets:
            if bucket.slot is not None:
                self._free.append((bucket.slot, None))
                bucket.slot = None

    # ---- the ring ----

    def _fill(self) -> None:
        """Let the next buckets come in while there are free slots."""
        while self._free and self._queue:
            bucket = self._queue.popleft()
            if bucket.slot is None:
                self._load(bucket)

    def _load(self, bucket: Bucket) -> None:
        bucket.slot, free = self._free.popleft()
        incoming = self.lanes.incoming
        if free is not None:
            incoming.wait(free)
        if bucket.written is not None:
            incoming.wait(bucket.written)
        incoming.do(_Copy(bucket.region.arrays(bucket.slot, bucket.elements), bucket.at_home()))
        bucket.loaded = incoming.mark()

    def _evict(self) -> None:
        """Free the slot of the bucket that is needed last; its state at home is as good."""
        waiting = [b for b in self._todo if b.slot is not None]
        slot, waiting[-1].slot = waiting[-1].slot, None
        assert slot is not None
        self._queue.append(waiting[-1])
        self._free.append((slot, None))  # whatever comes into it next comes in later, in the same lane

    def _update(self, bucket: Bucket) -> None:
        """Append one bucket's way through the lanes."""
        live = [block for block in bucket.blocks if block.grad is not None]
        if not live:
            if bucket.slot is not None:
                self._free.append((bucket.slot, None))
                bucket.slot = None
            return
        if bucket.pending:  # a step without a forward in between
            self._know(bucket)
        lanes, state = self.lanes, bucket.at_home()
        if bucket.streamed:
            if bucket.slot is None:
                if bucket in self._queue:
                    self._queue.remove(bucket)
                if not self._free:
                    self._evict()
                self._load(bucket)
            assert bucket.slot is not None
            lanes.updating.wait(bucket.loaded)
            state = bucket.region.arrays(bucket.slot, bucket.elements)
        fresh = [block for block in live if block not in self._stepped]
        self._stepped.update(fresh)
        grads = {block: block.grad for block in live if block.grad is not None}
        factor, skip = self._factor, self._skip
        settings = {id(cut.settings): dict(cut.settings) for cut in bucket.cuts}  # as they are now
        lanes.updating.do(lambda: self._compute(bucket, state, grads, fresh, settings, factor, skip))
        bucket.updated, bucket.pending = lanes.updating.mark(), True
        bucket.held = [*grads.values(), *(t for t in (factor, skip) if t is not None)]
        if bucket.streamed:
            lanes.outgoing.wait(bucket.updated)
            lanes.outgoing.do(_Copy(bucket.at_home(), state))
            bucket.written = lanes.outgoing.mark()
            assert bucket.slot is not None
            self._free.append((bucket.slot, bucket.written))
            bucket.slot = None
            self._fill()

    # ---- the update itself, in its lane ----

    @torch.no_grad()
    def _compute(
        self,
        bucket: Bucket,
        state: dict[str, Tensor],
        grads: dict[WeightBlock, Tensor],
        fresh: list[WeightBlock],
        settings: dict[int, dict[str, Any]],
        factor: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        if fresh:
            steps = [block.step for block in fresh]
            torch._foreach_add_(steps, 1)
            if skip is not None:
                torch._foreach_sub_(steps, [skip] * len(steps))
        cuts = [cut for cut in bucket.cuts if cut.block in grads]
        if self._in_one_pass(state):
            self._update_in_one_pass(cuts, state, grads, settings, factor, skip)
            return
        master = self._master(bucket, state, cuts)
        moments = [self._wide(bucket, kind, state[kind]) for kind in ("exp_avg", "exp_avg_sq")]
        by_settings: dict[int, list[int]] = {}
        for i, cut in enumerate(cuts):
            by_settings.setdefault(id(cut.settings), []).append(i)
        for key, indices in by_settings.items():
            mine, chosen = [cuts[i] for i in indices], settings[key]
            beta1, beta2 = chosen["betas"]
            torch._fused_adamw_(
                [master[i] for i in indices],
                [self._grad(bucket, cut, grads[cut.block], factor) for cut in mine],
                [moments[0][cut.at : cut.at + cut.stop - cut.start] for cut in mine],
                [moments[1][cut.at : cut.at + cut.stop - cut.start] for cut in mine],
                [],
                [cut.block.step for cut in mine],
                lr=float(chosen["lr"]),
                beta1=float(beta1),
                beta2=float(beta2),
                weight_decay=chosen["weight_decay"],
                eps=chosen["eps"],
                amsgrad=False,
                maximize=chosen.get("maximize", False),
                found_inf=skip,
            )
        if "low" in state:
            for cut, wide in zip(cuts, master, strict=True):
                low = state["low"][cut.at : cut.at + cut.stop - cut.start]
                split(wide, cut.block.value[cut.start : cut.stop], low)
        for kind, wide in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            if wide.dtype != state[kind].dtype:
                state[kind].copy_(wide)

    def _update_in_one_pass(
        self,
        cuts: list[Cut],
        state: dict[str, Tensor],
        grads: dict[WeightBlock, Tensor],
        settings: dict[int, dict[str, Any]],
        factor: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        from fourfold.kernels.adamw import bias_corrections, update

        corrections: dict[tuple[float, float], tuple[Tensor, Tensor]] = {}
        counts = torch.stack([cut.block.step for cut in cuts])
        for i, cut in enumerate(cuts):
            chosen = {k: v for k, v in settings[id(cut.settings)].items() if k in _SETTINGS}
            betas = chosen["betas"]
            if betas not in corrections:
                corrections[betas] = bias_corrections(counts, betas)
            here, there = slice(cut.start, cut.stop), slice(cut.at, cut.at + cut.stop - cut.start)
            low, first, second = (state[kind][there] for kind in ("low", "exp_avg", "exp_avg_sq"))
            held = cut.block.value[here], low, first, second, grads[cut.block][here]
            mine = corrections[betas][0][i], corrections[betas][1][i]
            update(*held, mine, factor, skip, **chosen)

    def _master(self, bucket: Bucket, state: dict[str, Tensor], cuts: list[Cut]) -> list[Tensor]:
        """What the kernel updates, a tensor for every cut: the weights, or their masters in scratch."""
        weights = [cut.block.value[cut.start : cut.stop] for cut in cuts]
        if "low" not in state:
            return weights
        room = self._scratch["master"].view(torch.float32)
        wide = [room[cut.at : cut.at + cut.stop - cut.start] for cut in cuts]
        for cut, weight, out in zip(cuts, weights, wide, strict=True):
            join(weight, state["low"][cut.at : cut.at + weight.numel()], out)
        return wide

    def _wide(self, bucket: Bucket, kind: str, moment: Tensor) -> Tensor:
        """A moment in the master's type."""
        if moment.dtype == bucket.region.master:
            return moment
        return self._scratch[kind].view(bucket.region.master)[: moment.numel()].copy_(moment)

    def _grad(self, bucket: Bucket, cut: Cut, grad: Tensor, factor: Tensor | None) -> Tensor:
        """The gradient in the master's type, clipped."""
        grad = grad[cut.start : cut.stop]
        if factor is None and grad.dtype == bucket.region.master:
            return grad
        out = self._scratch["grad"].view(bucket.region.master)[cut.at : cut.at + grad.numel()]
        scale(grad, factor, out)
        return out


def _put_off(order: list[Bucket]) -> list[Bucket]:
    """Buckets in the order of a backward, but every fourth of those of the last three quarters of the layers at the end."""
    streamed = [b for b in order if b.streamed]
    late = dict.fromkeys(streamed[1 : len(streamed) * 3 // 4 : 4][::-1])
    return [*(b for b in order if b not in late), *late]


@dataclass(frozen=True)
class _Copy:
    """Copies arrays of the same names."""

    to: dict[str, Tensor]
    source: dict[str, Tensor]

    def __call__(self) -> None:
        for kind, target in self.to.items():
            target.copy_(self.source[kind], non_blocking=True)
