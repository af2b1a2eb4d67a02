"""Activation offload: tensors that the forward saves are copied to the host, and copied back before the backward needs them.

    offload = ActivationOffload(device, budget=32 << 30)
    with offload.saving(model.parameters()):
        loss = model(x)
    loss.backward()

Tensors of at least `least` bytes that autograd saves inside `saving` become **parcels**: they are copied to host memory in a
separate stream and freed on the device when the copy is done. The parcels of one `saving` key form a stack: when the backward
unpacks one, up to `ahead` bytes of the parcels below it are prefetched. At most `stash` bytes wait on the device for their copy
(a forward faster than the link waits), and at most `budget` bytes are on the host; further tensors stay on the device. Tensors in
`keep`, such as parameters, are not offloaded. The results are bit-identical to those without offload.

The backward needs first what the forward saved last. With `late`, the last `stash` bytes of a forward are not sent at all. The
number of bytes to come is estimated from the previous forward, so copies start with the first parcel, end with the forward, and
no copy is unnecessary.

Host buffers are reused in the next step. Each saved byte is copied twice, so the offload of a layer is fully overlapped if its
compute takes longer than these copies: for a transformer at 400 TFLOP/s and 55 GB/s, from a width of about 4,000.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fourfold.offload.host import check_available, host_memory
from fourfold.offload.queues import DeviceQueues, make_queues
from fourfold.offload_sizes import ACTIVATION_BUFFER_BYTES, HOST_PAGE_BYTES, LEAST_ACTIVATION_BYTES

__all__ = ["ActivationOffload", "Parcel"]


class Parcel:
    """One saved tensor: on the device, being copied, or on the host."""

    def __init__(self, offload: ActivationOffload, value: Tensor, buffer: Tensor):
        self.offload, self.value, self.buffer = offload, value, buffer
        self.size, self.stride, self.dtype = value.size(), value.stride(), value.dtype
        self.sent = False
        self.out: Any = None
        self.back: Any = None
        self.leaving = True  # still on the device, until its copy to the host is done
        self.known = True  # whether the compute queue has waited for `value`
        self.version = value._version
        self.changed = False  # in place, while it was on the device: the copy on the host may be of either time
        self.address: Any = None
        self.below: weakref.ref[Parcel] | None = None

    @property
    def bytes(self) -> int:
        return self.size.numel() * self.dtype.itemsize

    @property
    def host(self) -> Tensor:
        return self.buffer[: self.bytes].view(self.dtype)

    def check(self) -> None:
        """Refuse a tensor that was changed in place after it was saved, as autograd does without offload."""
        if self.leaving:
            self.changed = self.value._version != self.version
        if self.changed:
            raise RuntimeError(
                f"a tensor {list(self.size)} of {self.dtype} that the backward needs was changed in place after it was saved; "
                "use an operation that is not in place"
            )

    def __del__(self) -> None:
        self.offload._take_back(self)


class ActivationOffload:
    """Offloads the saved tensors of one device to the host."""

    def __init__(
        self,
        device: torch.device,
        *,
        budget: int,
        least: int = LEAST_ACTIVATION_BYTES,
        ahead: int = ACTIVATION_BUFFER_BYTES,
        stash: int = ACTIVATION_BUFFER_BYTES,
        late: bool | None = None,
        queues: DeviceQueues | None = None,
    ):
        check_available(budget, "the budget for activations")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # tensors' devices always have an index
        self.device, self.budget, self.least, self.ahead, self.stash = device, budget, least, ahead, stash
        self.late = device.type == "cuda" if late is None else late  # on the CPU copies do not run concurrently
        self.queues = queues or make_queues(device)
        self.taken = 0
        """Bytes of host memory allocated, in use or pooled."""
        self.moved = 0
        """Bytes copied to the host so far."""
        self._pool: dict[int, list[tuple[Tensor, Any]]] = {}
        self._put = self._expected = 0  # bytes saved by the current forward, and by the previous one
        self._gone_back = False  # whether a backward has begun since the last `put`
        self._waiting: deque[weakref.ref[Parcel]] = deque()
        self._waiting_bytes = 0
        self._leaving: deque[weakref.ref[Parcel]] = deque()
        self._leaving_bytes = 0
        self._top: dict[Hashable, weakref.ref[Parcel]] = {}
        self._same: dict[
            Any, weakref.ref[Parcel]
        ] = {}  # parcels still on the device, by address: a tensor is sent once

    # ---- for autograd ----

    @contextmanager
    def saving(self, keep: Iterable[Tensor] = (), key: Hashable = None) -> Iterator[None]:
        """Offload the tensors that autograd saves in this context, except `keep`; parcels of one `key` form one stack."""
        kept = {t.untyped_storage().data_ptr() for t in keep}

        def pack(t: Tensor) -> Tensor | Parcel:
            if t.device != self.device or t.nbytes < self.least or t.untyped_storage().data_ptr() in kept:
                return t
            return self.put(t, key)

        with torch.autograd.graph.saved_tensors_hooks(pack, self.get):
            yield

    def put(self, t: Tensor, key: Hashable = None) -> Tensor | Parcel:
        """Offload a tensor. Returns the tensor itself if the budget is used up or it is not a plain strided tensor."""
        if type(t) not in (Tensor, torch.nn.Parameter) or t.layout != torch.strided:
            return t
        address = t.data_ptr(), t.size(), t.stride(), t.dtype, t._version
        same = self._same.get(address)
        if same is not None and (found := same()) is not None:
            return found
        buffer = self._buffer(t.nbytes)
        if buffer is None:
            return t
        value = _dense(t.detach())
        parcel = Parcel(self, value, buffer)
        if value.data_ptr() == t.data_ptr():
            parcel.address, self._same[address] = address, weakref.ref(parcel)
        if self._gone_back:
            self._expected, self._put, self._gone_back = self._put, 0, False
        self._put += parcel.bytes
        self._waiting.append(weakref.ref(parcel))
        self._waiting_bytes += parcel.bytes
        self._make_room()
        parcel.below = self._top.get(key)
        self._top[key] = weakref.ref(parcel)
        return parcel

    def get(self, packed: Tensor | Parcel) -> Tensor:
        """The tensor on the device; prefetches the parcels below it in its stack."""
        if not isinstance(packed, Parcel):
            return packed
        packed.check()
        self._gone_back = True
        self._fetch(packed)
        if not packed.known:
            self.queues.compute.wait(packed.back)
            packed.known = True
        coming, below = 0, packed.below
        while coming < self.ahead and below is not None and (parcel := below()) is not None:
            self._fetch(parcel)
            coming += parcel.bytes
            below = parcel.below
        return packed.value

    # ---- between device and host ----

    def _make_room(self) -> None:
        """Send parcels that need not be held back, and free the device memory beyond the stash."""
        for queue in (self._waiting, self._leaving):
            while queue and queue[0]() is None:
                queue.popleft()
        more = self._expected - self._put
        stays = max(0, self.stash - more) if more >= 0 else self.stash // 2
        while self._waiting_bytes > stays * self.late:
            if (oldest := self._waiting.popleft()()) is not None:
                self._send(oldest)
        while self._leaving_bytes > max(0, self.stash - self._waiting_bytes):
            if (oldest := self._leaving.popleft()()) is not None:
                self._leave(oldest)
                oldest.value = None  # type: ignore[assignment]

    def _send(self, parcel: Parcel) -> None:
        queues, host, flat = self.queues, parcel.host, _flat(parcel.value)
        queues.copy_out.wait(queues.compute.record())
        queues.copy_out.submit(lambda: host.copy_(flat, non_blocking=True))
        parcel.sent, parcel.out = True, queues.copy_out.record()
        self.moved += parcel.bytes
        self._waiting_bytes -= parcel.bytes
        self._leaving.append(weakref.ref(parcel))
        self._leaving_bytes += parcel.bytes

    def _fetch(self, parcel: Parcel) -> None:
        if parcel.value is not None:
            return
        queues = self.queues
        parcel.value = value = torch.empty_strided(parcel.size, parcel.stride, dtype=parcel.dtype, device=self.device)
        queues.copy_in.wait(queues.compute.record())  # the allocator may have reused memory of another tensor
        queues.copy_in.wait(parcel.out)
        host, flat = parcel.host, _flat(value)
        queues.copy_in.submit(lambda: flat.copy_(host, non_blocking=True))
        parcel.back, parcel.known = queues.copy_in.record(), False

    def _leave(self, parcel: Parcel) -> None:
        """Called before a parcel's device memory is freed: whatever reuses the memory runs after the copy."""
        self.queues.compute.wait(parcel.out)
        parcel.changed = parcel.value._version != parcel.version
        self._leaving_bytes -= parcel.bytes
        self._same.pop(parcel.address, None)
        parcel.leaving = False

    def _take_back(self, parcel: Parcel) -> None:
        """Called when a parcel is deleted: return its host buffer to the pool, with the event of its last copy."""
        if not parcel.sent:
            self._waiting_bytes -= parcel.bytes
            self._same.pop(parcel.address, None)
        elif parcel.leaving:
            self._leave(parcel)
        if not parcel.known:
            self.queues.compute.wait(parcel.back)
        self._pool.setdefault(parcel.buffer.numel(), []).append((parcel.buffer, parcel.back or parcel.out))

    def _buffer(self, size: int) -> Tensor | None:
        """A host buffer, or None when the budget is used up."""
        size = -(-size // HOST_PAGE_BYTES) * HOST_PAGE_BYTES
        if self._pool.get(size):
            buffer, free = self._pool[size].pop()
            if free is not None:
                self.queues.copy_out.wait(free)
            return buffer
        if self.taken + size > self.budget:
            return None
        self.taken += size
        return host_memory(size, self.device)


def _dense(t: Tensor) -> Tensor:
    """The tensor, or a copy without gaps and with the same order of dims."""
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    if span == t.numel() == t.untyped_storage().nbytes() // t.itemsize:
        return t
    return torch.empty_like(t).copy_(t)


def _flat(t: Tensor) -> Tensor:
    return t.as_strided((t.numel(),), (1,))
