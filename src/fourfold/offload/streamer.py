"""The engine of the streamed optimizer: AdamW on the device, bucket by bucket (offload/buckets.py), with its state on the host.

Buckets pass through a ring of slots on the device, in three queues:

    copy_in    host -> slot       after the slot's and this bucket's previous write-backs
    update     AdamW              after the copy, when the gradients are final and (with clipping or the guard) the norm is known
    copy_out   slot -> host       after the update

Buckets are prefetched as soon as slots are free, also for the next step: the link is busy during forward and backward, and a
full ring is on the device when the norm is known. `staging` makes the ring longer. A step never blocks the host and never
allocates on the device. Code that uses a bucket's weights calls `wait` first.

Device bytes, for n elements in a bucket and r slots: r · (state of n) + workspace of n · (4 for gradients, + 4 for bf16 weights,
+ 8 for bf16 moments); no workspace if one kernel does the whole update (bf16 weights on CUDA).

[Note: updates in the backward]
If no update waits for the norm, or it can be rolled back, each starts when its gradient is complete, from the last layer to the
first. A link slightly too slow for that falls behind and finishes with the first layers, which the next forward needs first. So
some buckets of the later layers are deferred: they are updated after the backward, in forward order, since the forward reaches
them later.

[Note: rolling back]
With clipping or the guard, an update needs the norm of all gradients. Nearly always the norm is fine: the gradient is finite and
its factor is 1. So buckets that have a spare place on the host are updated in the backward as if it were:

    tried      state from its current place, weights of before aside into the slot; update with factor 1; state to the place
               that is not current, weights of before to the spare place
    accepted   the places change roles; nothing is copied
    rolled back    the state of before, in its current place, and the weights of before come in; the weights are set back, then
               the update is repeated with the factor of the norm, or skipped, as are the step counts

The host reads one number per step, whether the norm is fine. Buckets without a spare place, and state on the device, wait for the
norm. A step that waits writes its state home; `finish` copies home what is in spare places.

Rolling back costs a second pass over the link. So a step tries its updates only if fewer than TOO_MANY of the last LAST_STEPS
steps were clipped or not finite; the others wait for the norm, in the order of the forward, as without spare places. A step
that waits is judged one step later, when reading the number no longer holds up the host.

[Note: consumed gradients]
With `consume`, a block is updated when its gradient is complete, in whatever order, and the gradient is given back: while one
block's gradient is computed, at most one other still waits for its update. Buckets end where blocks end, and none is deferred.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fourfold.kernels import have_kernels
from fourfold.offload.buckets import ALIGN, Bucket, Cut, WeightBlock, allocate, allocate_spares, cut_region, place
from fourfold.offload.host import available_bytes, check_available
from fourfold.offload.queues import DeviceQueue, DeviceQueues, make_queues
from fourfold.offload.split import join, scale, split
from fourfold.offload_sizes import STREAM_BUCKET, STREAM_SLOTS
from fourfold.record import RECORD

__all__ = ["LAST_STEPS", "TOO_MANY", "Streamer"]

LAST_STEPS, TOO_MANY = 8, 3
"""[Note: rolling back]"""
_SETTINGS = ("lr", "betas", "eps", "weight_decay", "maximize")


class Streamer:
    """Updates weight blocks (given in forward order) with state that is streamed through a ring of slots."""

    def __init__(
        self,
        blocks: Sequence[WeightBlock],
        *,
        moments: torch.dtype | None = None,
        bucket: int = STREAM_BUCKET,
        ring: int = STREAM_SLOTS,
        staging: int = 0,
        device_bytes: int = 0,
        host_bytes: int | None = None,
        rollback: int = 0,
        backwards: bool = False,
        consume: bool = False,
        queues: DeviceQueues | None = None,
    ):
        """Allocate the state, the ring and the workspace.

        Args:
            moments: dtype of the moments; default: the master's.
            bucket: elements per bucket.
            ring: slots of the ring.
            staging: bytes of the ring, if that is more than `ring` slots.
            device_bytes: bytes of state that stays on the device, first blocks first.
            host_bytes: limit on host memory; default: what is available.
            rollback: host bytes for spare places, so that updates need not wait for the norm [Note: rolling back]; as many as
                there are.
            backwards: whether updates are expected from the last block to the first.
            consume: give gradients back in the backward [Note: consumed gradients]; not with `rollback`.
        """
        self.device, self.blocks = blocks[0].value.device, list(blocks)
        self.queues = queues or make_queues(self.device)
        self.size = max(ALIGN, bucket // ALIGN * ALIGN)
        self.regions = place(self.blocks, moments, device_bytes)
        streamed = sum(r.bytes for r in self.regions if r.home == "host")
        check_available(streamed, "the optimizer's state", host_bytes)
        for region in self.regions:
            allocate(region, self.device)
        self.consume = consume
        self.buckets = [
            b for region in self.regions for b in cut_region(region, self.blocks, self.size, per_block=consume)
        ]
        self.buckets.sort(key=lambda b: b.first)
        for bucket_ in self.buckets:
            for block in bucket_.blocks:
                block.buckets.append(bucket_)
        self._learned = self.buckets[::-1] if backwards else list(self.buckets)
        self.rollback_bytes, self._spares, self._lent = 0, list[Tensor](), list[int]()
        if rollback:
            self._learned = self.buckets[::-1]
            room = min(rollback, (available_bytes() if host_bytes is None else host_bytes) - streamed)
            self._spares = allocate_spares(_defer([b for b in self._learned if b.streamed]), room, self.device)
            self.rollback_bytes = sum(memory.numel() for memory in self._spares)
        self.optimistic = self.rollback_bytes > 0
        """Whether the next step tries updates before the norm is known."""
        self.rolled_back: bool | None = None
        """Whether the last step was rolled back; None: it waited for the norm, or needed none."""
        self._unfine: deque[bool] = deque(
            maxlen=LAST_STEPS
        )  # of the last steps, whether they were clipped or not finite
        self._late: tuple[Tensor, Any] | None = None  # whether the last step, which waited, was fine
        self._tried: dict[Bucket, None] = {}  # buckets updated in this step before the norm was known
        self._consumed: deque[WeightBlock] = deque()  # blocks whose gradients wait for their updates
        self._make_ring(ring, staging)
        self._make_scratch()
        self._order = self._next_order()
        self._prefetch: deque[Bucket] = deque()  # buckets to copy in next
        self._todo: deque[Bucket] = deque()  # buckets not yet updated in this step, in the expected order
        self._ready: set[WeightBlock] = set()
        self._seen: dict[Bucket, None] = {}  # buckets in the order in which they became ready
        self._stepped: set[WeightBlock] = set()
        self._factor: Tensor | None = None
        self._skip: Tensor | None = None
        # copies and updates under way use memory that is freed with this object, and write weights that nothing else waits for
        weakref.finalize(self, self.queues.synchronize).atexit = False

    # ---- memory ----

    def _make_ring(self, ring: int, staging: int) -> None:
        streamed = [b for b in self.buckets if b.streamed]
        size = max((b.spare_bytes if b.spare else b.elements * b.region.element_bytes for b in streamed), default=0)
        slots = min(len(streamed), max(1, ring, staging // size if size else 0))
        memory = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(slots)]
        free = self.queues.compute.record()  # the allocator reuses memory that issued work has yet to read
        self._free: deque[tuple[Tensor, Any]] = deque((slot, free) for slot in memory)
        self.ring_bytes = slots * size

    def _make_scratch(self) -> None:
        """Allocate fp32 (or fp64) workspace for values that are stored in a narrower type."""
        names: dict[str, int] = {}
        for region in self.regions:
            if self._in_one_pass(region.kinds):
                continue
            longest = max((b.elements for b in self.buckets if b.region is region), default=0)
            size = longest * region.master.itemsize
            wanted = ["grad"]
            wanted += ["master"] if "low" in region.kinds else []
            wanted += ["exp_avg", "exp_avg_sq"] if region.kinds["exp_avg"] != region.master else []
            for name in wanted:
                names[name] = max(names.get(name, 0), size)
        self._scratch = {n: torch.empty(size, dtype=torch.uint8, device=self.device) for n, size in names.items()}
        self.scratch_bytes = sum(names.values())

    def _in_one_pass(self, kinds: Container[str]) -> bool:
        """Whether one kernel does the whole update of a bucket with these kinds of state."""
        return "low" in kinds and have_kernels(self.blocks[0].value)

    @property
    def device_bytes(self) -> int:
        """Bytes on the device: resident state, ring, workspace."""
        return sum(r.bytes for r in self.regions if r.home == "device") + self.ring_bytes + self.scratch_bytes

    def lend(self, size: int) -> Tensor | None:
        """`size` bytes of the spare places, to be used after `finish` and until the next `begin`; None: too few are left."""
        self._lent = self._lent or [0] * len(self._spares)
        for i, (memory, at) in enumerate(zip(self._spares, self._lent, strict=True)):
            if at + size <= memory.numel():
                self._lent[i] = at + -(-size // ALIGN) * ALIGN
                return memory[at : at + size]
        return None

    @property
    def host_bytes(self) -> int:
        """Bytes of state on the host, without spare places."""
        return sum(r.bytes for r in self.regions if r.home == "host")

    # ---- a step ----

    def begin(self) -> None:
        """Begin a step. Gradients are reported by `ready`, or are complete when `step` is called."""
        assert not self._tried, "the step before was not finished"
        self._lent = []
        self._todo = deque(self._order)
        self._ready.clear()
        self._seen.clear()
        self._stepped.clear()
        self._factor = self._skip = None

    def ready(self, block: WeightBlock, after: DeviceQueue | None = None) -> None:
        """Report that a block's gradient is final, and submit the updates that can start.

        Buckets are updated in the order of the previous step; a bucket that is ready out of order waits for its turn or
        for `step`. `after` is the queue that wrote the gradient (default: the compute queue).
        """
        if self.rollback_bytes and not self.optimistic:
            return
        self._ready.add(block)
        self.queues.update.wait((after or self.queues.compute).record())
        for bucket in block.buckets:
            if all(b in self._ready for b in bucket.blocks):
                self._seen[bucket] = None
        if self.consume:
            self._consume(block)
            return
        while self._todo and self._todo[0] in self._seen and (self._todo[0].spare or not self.rollback_bytes):
            self._update(self._todo.popleft(), tries=self.rollback_bytes > 0)

    def _consume(self, block: WeightBlock) -> None:
        """Submit a block's updates and give its gradient back; the compute queue waits for the block before."""
        for bucket in block.buckets:
            self._todo.remove(bucket)
            self._update(bucket)
        block.grad = None
        self._consumed.append(block)
        while len(self._consumed) > 1:
            self.wait(self._consumed.popleft())

    def step(self, factor: Tensor | None = None, skip: Tensor | None = None) -> None:
        """Update every block that has a gradient and was not updated since `begin`; then prefetch for the next step.

        Gradients are multiplied by `factor`; if `skip` is 1, nothing changes. Both are scalar tensors on the device.
        """
        self._factor, self._skip = factor, skip
        self.queues.update.wait(self.queues.compute.record())
        if self.rollback_bytes:
            self._judge(factor, skip)
        while self._todo:
            self._update(self._todo.popleft())
        if self._seen:
            learned = [*self._seen, *(b for b in self._learned if b not in self._seen)]
            self._learned = learned if self.consume else _defer(learned)
        self._order = self._next_order()
        for block in self.blocks:
            block.grad = None
        self._prefetch = deque(b for b in self._order if b.streamed and b.slot is None)
        self._fill()

    # ---- rolling back ----

    def _judge(self, factor: Tensor | None, skip: Tensor | None) -> None:
        """The norm is known: accept the updates that were tried, or put them back on the list of those to be done."""
        fine = torch.ones((), dtype=torch.bool, device=self.device)
        if factor is not None:
            fine = fine & (factor == 1)
        if skip is not None:
            fine = fine & (skip == 0)
        self._note_late(None if self._tried else fine)
        self.rolled_back = None
        if not self._tried:
            return
        self.rolled_back = not bool(fine)  # the host waits for the compute queue
        self._note(self.rolled_back)
        for bucket in self._tried:
            if self.rolled_back:
                bucket.undo = True
            else:
                bucket.in_spare = not bucket.in_spare
        if self.rolled_back:
            steps = [block.step for block in self._stepped]
            self.queues.update.submit(lambda: torch._foreach_sub_(steps, 1))
            self._stepped.clear()
            again = {*self._tried, *self._todo}
            self._todo = deque(b for b in self.buckets if b in again)
        self._tried.clear()

    def _note(self, unfine: bool) -> None:
        self._unfine.append(unfine)
        self.optimistic = sum(self._unfine) < TOO_MANY

    def _note_late(self, fine: Tensor | None) -> None:
        """Read the number that the step before left, and leave this step's, if it waited for the norm."""
        if self._late is not None:
            before, event = self._late
            if event is not None:
                event.synchronize()
            self._note(not bool(before))
        self._late = None
        if fine is not None:
            event = None
            if self.device.type == "cuda":
                fine = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(fine, non_blocking=True)
                event = torch.cuda.current_stream(self.device).record_event()
            self._late = fine, event

    def _next_order(self) -> list[Bucket]:
        """The expected order of the next step's updates."""
        if not self.rollback_bytes:
            return self._learned
        if not self.optimistic:  # all wait for the norm; the next forward needs the first ones first
            return list(self.buckets)
        return [*(b for b in self._learned if b.spare), *(b for b in self.buckets if not b.spare)]

    def wait(self, block: WeightBlock) -> None:
        """Make the compute queue wait for the block's update; then its weights may be read and its gradient written."""
        for bucket in block.buckets:
            if bucket.pending:
                self._wait_updated(bucket)

    def _wait_updated(self, bucket: Bucket) -> None:
        self.queues.compute.wait(bucket.updated)
        bucket.pending = False
        bucket.held.clear()

    def wait_all(self) -> None:
        for block in self.blocks:
            self.wait(block)

    def finish(self) -> None:
        """Block the host until all updates are done and all state is written back, to its home."""
        assert not self._tried, "updates of this step wait for the norm: call `step` first"
        self.queues.synchronize()
        self.wait_all()
        for bucket in self.buckets:
            if bucket.in_spare:
                _Copy(bucket.at_home(), bucket.place(True))()
                bucket.in_spare = False

    def reload(self) -> None:
        """Discard prefetched state: the caller changed the state in its home."""
        self.finish()
        for bucket in self.buckets:
            if bucket.slot is not None:
                self._free.append((bucket.slot, None))
                bucket.slot = None

    # ---- the ring ----

    def _fill(self) -> None:
        """Prefetch the next buckets while there are free slots."""
        while self._free and self._prefetch:
            bucket = self._prefetch.popleft()
            if bucket.slot is None:
                self._load(bucket)

    def _load(self, bucket: Bucket) -> None:
        bucket.slot, free = self._free.popleft()
        copy_in = self.queues.copy_in
        if free is not None:
            copy_in.wait(free)
        source = bucket.place(bucket.in_spare)
        waits = [bucket.spare_written if bucket.in_spare else bucket.written]
        if bucket.undo:
            assert bucket.spare is not None
            source["weight"] = bucket.spare["weight"]
            waits.append(bucket.spare_written)
        for event in waits:
            if event is not None:
                copy_in.wait(event)
        arrays = bucket.region.arrays(bucket.slot, bucket.elements, bucket.undo)
        copy_in.submit(_Copy(arrays, source))
        bucket.loaded = copy_in.record()

    def _evict(self) -> None:
        """Free the slot of the loaded bucket that is needed last; its state in host memory is current."""
        waiting = [b for b in self._todo if b.slot is not None]
        slot, waiting[-1].slot = waiting[-1].slot, None
        assert slot is not None
        self._prefetch.append(waiting[-1])
        self._free.append((slot, None))  # the next copy into the slot is later in the same queue

    def _update(self, bucket: Bucket, *, tries: bool = False) -> None:
        """Submit one bucket's copies and update to the queues; `tries`: the norm is not known yet, so it may be undone."""
        live = [block for block in bucket.blocks if block.grad is not None]
        if not live:
            if bucket.slot is not None:
                self._free.append((bucket.slot, None))
                bucket.slot = None
            return
        if bucket.pending:  # a step without a forward in between
            self._wait_updated(bucket)
        queues, state = self.queues, bucket.at_home()
        if bucket.streamed:
            if bucket.slot is None:
                if bucket in self._prefetch:
                    self._prefetch.remove(bucket)
                if not self._free:
                    self._evict()
                self._load(bucket)
            assert bucket.slot is not None
            queues.update.wait(bucket.loaded)
            state = bucket.region.arrays(bucket.slot, bucket.elements, tries or bucket.undo)
        first_cut = [block for block in live if block not in self._stepped]  # their step counts go up once
        self._stepped.update(first_cut)
        grads = {block: block.grad for block in live if block.grad is not None}
        factor, skip = self._factor, self._skip
        settings = {id(cut.settings): dict(cut.settings) for cut in bucket.cuts}  # snapshot: they may change later
        if tries:
            queues.update.submit(lambda: _copy_weights(bucket, grads, state["weight"], back=False))
            self._tried[bucket] = None
        elif bucket.undo:
            queues.update.submit(lambda: _copy_weights(bucket, grads, state["weight"], back=True))
            bucket.undo = False
        trace = RECORD.trace

        def compute() -> None:
            begun = trace.mark() if trace is not None else None
            self._compute(bucket, state, grads, first_cut, settings, factor, skip)
            if trace is not None:
                trace.add("bucket", bucket.label, begun, size=bucket.elements * bucket.region.element_bytes)

        queues.update.submit(compute)
        bucket.updated, bucket.pending = queues.update.record(), True
        bucket.held = [*grads.values(), *(t for t in (factor, skip) if t is not None)]
        if bucket.streamed:
            to_spare = tries and not bucket.in_spare
            target = bucket.place(to_spare)
            if tries:
                assert bucket.spare is not None
                target["weight"] = bucket.spare["weight"]
            queues.copy_out.wait(bucket.updated)
            queues.copy_out.submit(_Copy(target, state))
            written = queues.copy_out.record()
            if tries:
                bucket.spare_written = written
            if not to_spare:
                bucket.written = written
            if not tries:
                bucket.in_spare = False
            assert bucket.slot is not None
            self._free.append((bucket.slot, written))
            bucket.slot = None
            self._fill()

    # ---- the update itself, run by the update queue ----

    @torch.no_grad()
    def _compute(
        self,
        bucket: Bucket,
        state: dict[str, Tensor],
        grads: dict[WeightBlock, Tensor],
        first_cut: list[WeightBlock],
        settings: dict[int, dict[str, Any]],
        factor: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        if first_cut:
            steps = [block.step for block in first_cut]
            torch._foreach_add_(steps, 1)
            if skip is not None:
                torch._foreach_sub_(steps, [skip] * len(steps))
        cuts = [cut for cut in bucket.cuts if cut.block in grads]
        if self._in_one_pass(state):
            self._update_in_one_pass(cuts, state, grads, settings, factor, skip)
            return
        master = self._master(state, cuts)
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
            in_block, in_bucket = slice(cut.start, cut.stop), slice(cut.at, cut.at + cut.stop - cut.start)
            low, first, second = (state[kind][in_bucket] for kind in ("low", "exp_avg", "exp_avg_sq"))
            tensors = cut.block.value[in_block], low, first, second, grads[cut.block][in_block]
            correction = corrections[betas][0][i], corrections[betas][1][i]
            update(*tensors, correction, factor, skip, **chosen)

    def _master(self, state: dict[str, Tensor], cuts: list[Cut]) -> list[Tensor]:
        """The tensors that the kernel updates, one per cut: the weights, or their masters in the workspace."""
        weights = [cut.block.value[cut.start : cut.stop] for cut in cuts]
        if "low" not in state:
            return weights
        room = self._scratch["master"].view(torch.float32)
        wide = [room[cut.at : cut.at + cut.stop - cut.start] for cut in cuts]
        for cut, weight, out in zip(cuts, weights, wide, strict=True):
            join(weight, state["low"][cut.at : cut.at + weight.numel()], out)
        return wide

    def _wide(self, bucket: Bucket, kind: str, moment: Tensor) -> Tensor:
        """A moment in the master's dtype."""
        if moment.dtype == bucket.region.master:
            return moment
        return self._scratch[kind].view(bucket.region.master)[: moment.numel()].copy_(moment)

    def _grad(self, bucket: Bucket, cut: Cut, grad: Tensor, factor: Tensor | None) -> Tensor:
        """The clipped gradient in the master's dtype."""
        grad = grad[cut.start : cut.stop]
        if factor is None and grad.dtype == bucket.region.master:
            return grad
        out = self._scratch["grad"].view(bucket.region.master)[cut.at : cut.at + grad.numel()]
        scale(grad, factor, out)
        return out


@torch.no_grad()
def _copy_weights(bucket: Bucket, grads: Container[WeightBlock], kept: Tensor, *, back: bool) -> None:
    """Copy the weights of the blocks in `grads` to `kept`, or back."""
    for cut in bucket.cuts:
        if cut.block in grads:
            weights, aside = cut.block.value[cut.start : cut.stop], kept[cut.at : cut.at + cut.stop - cut.start]
            _ = weights.copy_(aside) if back else aside.copy_(weights)


def _defer(order: list[Bucket]) -> list[Bucket]:
    """Buckets in backward order, with every fourth of the last three quarters of the layers moved to the end."""
    streamed = [b for b in order if b.streamed]
    late = dict.fromkeys(streamed[1 : len(streamed) * 3 // 4 : 4][::-1])
    return [*(b for b in order if b not in late), *late]


@dataclass(frozen=True)
class _Copy:
    """Copies arrays between dicts with the same keys."""

    to: dict[str, Tensor]
    source: dict[str, Tensor]

    def __call__(self) -> None:
        for kind, target in self.to.items():
            target.copy_(self.source[kind], non_blocking=True)
