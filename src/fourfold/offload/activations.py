"""Activations that wait on the host: what a forward saves streams out behind it, and back in before its backward needs it.

    offload = ActivationOffload(device, budget=32 << 30)
    with offload.saving(model.parameters()):
        loss = model(x)
    loss.backward()

Tensors that autograd saves inside `saving` and that have at least `least` bytes become **parcels**: copied to host memory in a
lane of their own, and dropped from the device once that is done. Parcels of one `saving` key form a stack: when the backward
opens one, those below it start to come back, `ahead` bytes of them. At most `stash` bytes are on the device still (a forward that
is faster than the link waits for it), and at most `budget` bytes are on the host; what exceeds it stays on the device. Parameters
and other tensors that live on anyway are named, and left alone. Values are the same, bit for bit.

What a forward saves last its backward wants first. With `late`, as much as the stash holds is not sent before more comes: as many
bytes are expected as there were between the two backwards before, so that copies begin with the first parcel, are done with the
forward, and none is made that nobody needs.

Host buffers are kept for the next step. Two bytes move for every byte saved, so a layer's offload is free where its compute
takes longer than that: for a transformer at 400 TFLOP/s and 55 GB/s, from a width of about 4,000 on.
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

__all__ = ["ActivationOffload", "Parcel"]

_ROUND = 1 << 16


class Parcel:
    """One saved tensor: on the device, on its way, or on the host."""

    def __init__(self, offload: ActivationOffload, value: Tensor, buffer: Tensor):
        self.offload, self.value, self.buffer = offload, value, buffer
        self.size, self.stride, self.dtype = value.size(), value.stride(), value.dtype
        self.sent = False
        self.out: Any = None
        self.back: Any = None
        self.leaving = True  # on the device still, only until it is out
        self.known = True  # whether the caller's lane may use `value`
        self.address: Any = None
        self.below: weakref.ref[Parcel] | None = None

    @property
    def bytes(self) -> int:
        return self.size.numel() * self.dtype.itemsize

    @property
    def host(self) -> Tensor:
        return self.buffer[: self.bytes].view(self.dtype)

    def __del__(self) -> None:
        self.offload._take_back(self)


class ActivationOffload:
    """Keeps saved tensors of one device on the host."""

    def __init__(
        self,
        device: torch.device,
        *,
        budget: int,
        least: int = 1 << 20,
        ahead: int = 2 << 30,
        stash: int = 2 << 30,
        late: bool | None = None,
        lanes: DeviceQueues | None = None,
    ):
        check_available(budget, "the budget for activations")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # as tensors name theirs
        self.device, self.budget, self.least, self.ahead, self.stash = device, budget, least, ahead, stash
        self.late = device.type == "cuda" if late is None else late  # on a CPU copies are no lane of their own
        self.lanes = lanes or make_queues(device)
        self.taken = 0
        """Bytes of host memory in use or kept for use."""
        self.moved = 0
        """Bytes sent to the host so far."""
        self._pool: dict[int, list[tuple[Tensor, Any]]] = {}
        self._put = self._expected = 0  # bytes since the last backward, and before it
        self._gone_back = False
        self._waiting: deque[weakref.ref[Parcel]] = deque()
        self._waiting_bytes = 0
        self._leaving: deque[weakref.ref[Parcel]] = deque()
        self._leaving_bytes = 0
        self._top: dict[Hashable, weakref.ref[Parcel]] = {}
        self._same: dict[Any, weakref.ref[Parcel]] = {}  # what is leaving, by address

    # ---- for autograd ----

    @contextmanager
    def saving(self, keep: Iterable[Tensor] = (), key: Hashable = None) -> Iterator[None]:
        """Send what autograd saves in here to the host, but for `keep`; parcels of one `key` come back as one stack."""
        kept = {t.untyped_storage().data_ptr() for t in keep}

        def pack(t: Tensor) -> Tensor | Parcel:
            if t.device != self.device or t.nbytes < self.least or t.untyped_storage().data_ptr() in kept:
                return t
            return self.put(t, key)

        with torch.autograd.graph.saved_tensors_hooks(pack, self.get):
            yield

    def put(self, t: Tensor, key: Hashable = None) -> Tensor | Parcel:
        """Send a tensor to the host; the tensor itself where the budget is spent or it is of no plain kind."""
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
        """The tensor again, on the device; those below it in its stack start to come back."""
        if not isinstance(packed, Parcel):
            return packed
        self._gone_back = True
        self._fetch(packed)
        if not packed.known:
            self.lanes.here.wait(packed.back)
            packed.known = True
        coming, below = 0, packed.below
        while coming < self.ahead and below is not None and (parcel := below()) is not None:
            self._fetch(parcel)
            coming += parcel.bytes
            below = parcel.below
        return packed.value

    # ---- between device and host ----

    def _make_room(self) -> None:
        """Send what need not wait for others to come, and let go of what exceeds the stash."""
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
        lanes, host, flat = self.lanes, parcel.host, _flat(parcel.value)
        lanes.outgoing.wait(lanes.here.mark())
        lanes.outgoing.do(lambda: host.copy_(flat, non_blocking=True))
        parcel.sent, parcel.out = True, lanes.outgoing.mark()
        self.moved += parcel.bytes
        self._waiting_bytes -= parcel.bytes
        self._leaving.append(weakref.ref(parcel))
        self._leaving_bytes += parcel.bytes

    def _fetch(self, parcel: Parcel) -> None:
        if parcel.value is not None:
            return
        lanes = self.lanes
        parcel.value = value = torch.empty_strided(parcel.size, parcel.stride, dtype=parcel.dtype, device=self.device)
        lanes.incoming.wait(lanes.here.mark())  # the memory was another tensor's
        lanes.incoming.wait(parcel.out)
        host, flat = parcel.host, _flat(value)
        lanes.incoming.do(lambda: flat.copy_(host, non_blocking=True))
        parcel.back, parcel.known = lanes.incoming.mark(), False

    def _leave(self, parcel: Parcel) -> None:
        """A parcel's memory on the device is about to be given back: what reuses it runs after the copy."""
        self.lanes.here.wait(parcel.out)
        self._leaving_bytes -= parcel.bytes
        self._same.pop(parcel.address, None)
        parcel.leaving = False

    def _take_back(self, parcel: Parcel) -> None:
        """Nobody needs a parcel any more: its host buffer is free once the last copy from or to it is done."""
        if not parcel.sent:
            self._waiting_bytes -= parcel.bytes
            self._same.pop(parcel.address, None)
        elif parcel.leaving:
            self._leave(parcel)
        if not parcel.known:
            self.lanes.here.wait(parcel.back)
        self._pool.setdefault(parcel.buffer.numel(), []).append((parcel.buffer, parcel.back or parcel.out))

    def _buffer(self, size: int) -> Tensor | None:
        """A host buffer, or None when the budget is spent."""
        size = -(-size // _ROUND) * _ROUND
        if self._pool.get(size):
            buffer, free = self._pool[size].pop()
            if free is not None:
                self.lanes.outgoing.wait(free)
            return buffer
        if self.taken + size > self.budget:
            return None
        self.taken += size
        return host_memory(size, self.device)


def _dense(t: Tensor) -> Tensor:
    """The tensor, or a copy without gaps in the same order of dims."""
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    if span == t.numel() == t.untyped_storage().nbytes() // t.itemsize:
        return t
    return torch.empty_like(t).copy_(t)


def _flat(t: Tensor) -> Tensor:
    return t.as_strided((t.numel(),), (1,))
