"""The wire format of messages with headers, and how bytes move between a device and the network.

A message starts with a header: name and generation as four integers (NAME_BYTES) and, unless the form of all messages is known,
JSON of structure, dtypes and shapes (HEADER_BYTES in all). The data are the bytes of the tensors, each aligned to 64 bytes. Up to
INLINE bytes of host memory are sent in the same transfer as the header (a copy is cheaper than a second wake-up); more data are a
second transfer. Ordered programs with messages of a known form have no headers (`direct.py`).

[Note: generations]
A receive can be posted before its message exists because gloo accepts a shorter message in a longer buffer. The buffer must be
long enough, so both sides track a buffer length, the generation. When a longer message comes, the sender starts a new generation,
whose number is the tag of the transfer; receives posted for the old one never match and are abandoned. Receives of a
generation match in the order of posting, so they are posted for every message or for none.
"""

from __future__ import annotations

import ctypes
import json
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.runtime.sizes import HEADER_BYTES, INLINE, NAME_BYTES

__all__ = [
    "DevicePort",
    "Form",
    "Headers",
    "HostPort",
    "Name",
    "Pool",
    "Port",
    "StagedPort",
    "flatten",
    "join_bytes",
    "joined_size",
    "write_light",
]

FREE = 16  # free buffers kept for reuse; older ones, of lengths no longer used, are dropped
Kind = Literal["activation", "gradient"]


class Name(NamedTuple):
    """Identifies a message: the output (activation) or the input gradient of a stage for one micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"the {self.kind} of stage {self.stage}, micro-batch {self.micro_batch}"


# ---- trees of tensors ----


def flatten(value: Any) -> tuple[Any, list[Tensor]]:
    """Structure (plain JSON) and tensors of a tree of tuples, lists, dicts and tensors."""
    match value:
        case Tensor():
            return 0, [value]
        case None:
            return None, []
        case tuple() | list():
            parts = [flatten(v) for v in value]
            mark = "tuple" if isinstance(value, tuple) else "list"
            return [mark, *(s for s, _ in parts)], [t for _, tensors in parts for t in tensors]
        case dict():
            parts = [flatten(v) for v in value.values()]
            return dict(zip(value, (s for s, _ in parts), strict=True)), [t for _, tensors in parts for t in tensors]
        case _:
            raise TypeError(
                f"a stage must return a tensor, or tuples, lists and dicts of tensors; found {type(value).__name__}"
            )


def _unflatten(structure: Any, tensors: deque[Tensor]) -> Any:
    match structure:
        case None:
            return None
        case [mark, *parts]:
            values = [_unflatten(p, tensors) for p in parts]
            return tuple(values) if mark == "tuple" else values
        case dict():
            return {k: _unflatten(p, tensors) for k, p in structure.items()}
        case _:
            return tensors.popleft()


def joined_size(tensors: Sequence[Tensor]) -> int:
    """Size in bytes of the tensors, concatenated with alignment."""
    return tensors[0].nbytes if len(tensors) == 1 else sum(_padded(t.nbytes) for t in tensors)


def copy_bytes(tensors: Sequence[Tensor], out: Tensor) -> None:
    """Copy the tensors into one byte buffer."""
    at = 0
    for t in tensors:
        out[at : at + t.nbytes].copy_(_bytes(t))
        at += _padded(t.nbytes)


def write_light(header: bytes, tensors: Sequence[Tensor], out: Tensor) -> None:
    """Write a header, then the tensors (host memory), with memmove: for small tensors much cheaper than `Tensor.copy_`."""
    start = out.data_ptr()
    ctypes.memmove(start, header, len(header))
    start += len(header)
    for t in tensors:
        source = t if t.is_contiguous() else t.contiguous()
        ctypes.memmove(start, source.data_ptr(), t.nbytes)
        start += _padded(t.nbytes)


def join_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors as one byte tensor; a single contiguous tensor is not copied."""
    if len(tensors) == 1:
        return _bytes(tensors[0])
    out = torch.empty(joined_size(tensors), dtype=torch.uint8, device=tensors[0].device)
    copy_bytes(tensors, out)
    return out


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _padded(count: int) -> int:
    return -(-count // 64) * 64


_FIXED = struct.Struct("<4q")  # stage, kind, micro-batch, generation
_KINDS: tuple[Kind, Kind] = ("activation", "gradient")


class Form(NamedTuple):
    """The structure of a message and the dtypes and shapes of its tensors."""

    structure: Any
    tensors: tuple[tuple[torch.dtype, torch.Size], ...]

    @property
    def size(self) -> int:
        """Size of the data in bytes."""
        sizes = [shape.numel() * dtype.itemsize for dtype, shape in self.tensors]
        return sizes[0] if len(sizes) == 1 else sum(map(_padded, sizes))

    def tree(self, data: Tensor) -> Any:
        """The tree of tensors, as views of the received bytes."""
        found: deque[Tensor] = deque()
        at = 0
        for dtype, shape in self.tensors:
            count = shape.numel() * dtype.itemsize
            found.append(data[at : at + count].view(dtype).view(shape))
            at += _padded(count)
        return _unflatten(self.structure, found)


class Headers:
    """Encodes and decodes headers. The JSON text of each form is cached.

    `form`: the form of all messages, if known; headers then hold only the name.
    """

    def __init__(self, form: Form | None = None) -> None:
        self.form, self.size = form, HEADER_BYTES if form is None else NAME_BYTES
        self._texts: dict[Any, bytes] = {}
        self._forms: dict[bytes, Form] = {}

    def encode(self, name: Name, generation: int, structure: Any, tensors: Sequence[Tensor]) -> bytes:
        """The header of a message."""
        fixed = _FIXED.pack(name.stage, _KINDS.index(name.kind), name.micro_batch, generation)
        if self.form is not None:
            if (structure, *((t.dtype, t.shape) for t in tensors)) != (self.form.structure, *self.form.tensors):
                raise ValueError(f"{name} has another form than the receiver expects: {self.form}")
            return fixed
        key = (repr(structure), *((t.dtype, t.shape) for t in tensors))
        text = self._texts.get(key)
        if text is None:
            shapes = [[str(t.dtype).removeprefix("torch."), *t.shape] for t in tensors]
            text = json.dumps([structure, shapes], separators=(",", ":")).encode()
            if len(text) > HEADER_BYTES - _FIXED.size:
                raise ValueError(f"{name}: {len(tensors)} tensors are too many for one message")
            text = self._texts[key] = text.ljust(HEADER_BYTES - _FIXED.size)
        return fixed + text

    def decode(self, message: Tensor) -> tuple[Name, int, Form]:
        """Name, generation and form from the header at the start of a message."""
        data = ctypes.string_at(message.data_ptr(), self.size)
        stage, kind, micro_batch, generation = _FIXED.unpack_from(data)
        if self.form is not None:
            return Name(stage, _KINDS[kind], micro_batch), generation, self.form
        text = data[_FIXED.size :]
        form = self._forms.get(text)
        if form is None:
            structure, shapes = json.loads(text)
            tensors = tuple((getattr(torch, d), torch.Size(s)) for d, *s in shapes)
            form = self._forms[text] = Form(structure, tensors)
        return Name(stage, _KINDS[kind], micro_batch), generation, form


class Pool:
    """Reference-counted receive buffers, reused when their last user is done."""

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._free: list[Tensor] = []
        self._loans: dict[int, tuple[Tensor, int]] = {}  # by address: buffer, users

    def take(self, size: int) -> Tensor:
        """A buffer of at least `size` bytes, with one user."""
        with self._lock:
            fitting = [i for i, b in enumerate(self._free) if size <= b.numel() <= 2 * size + 4096]
            buffer = self._free.pop(fitting[0]) if fitting else self._make(size)
            self._loans[buffer.data_ptr()] = buffer, 1
        return buffer

    @property
    def buffers(self) -> int:
        """Number of buffers, in use or free."""
        return len(self._free) + len(self._loans)

    def borrow(self, tensors: Sequence[Tensor]) -> None:
        """Add a user to the buffers these tensors lie in, if any (a stage may forward what it received)."""
        self._count(tensors, 1)

    def give_back(self, tensors: Sequence[Tensor]) -> None:
        """Remove a user."""
        self._count(tensors, -1)

    def _count(self, tensors: Sequence[Tensor], change: int) -> None:
        with self._lock:
            for address in {t.untyped_storage().data_ptr() for t in tensors}:
                if address in self._loans:
                    buffer, users = self._loans.pop(address)
                    if users + change:
                        self._loans[address] = buffer, users + change
                    else:
                        self._free.append(buffer)
                        del self._free[:-FREE]


# ---- how bytes leave a device and reach it ----


class HostPort:
    """CPU tensors over gloo. Receives are posted ahead: [Note: generations].

    `sends_at_once`: `send` does not block, so the computing thread may call it. `inline`: most bytes sent with the header.
    """

    posts_ahead = True
    sends_at_once = True
    inline = INLINE
    direct = True
    """Whether messages of a known form go without headers (`direct.py`)."""
    blocking = True
    """Whether waiting for a transfer blocks the host; else it orders streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = Pool(lambda size: torch.empty(size, dtype=torch.uint8))

    def computed(self) -> Any:
        """An event after everything computed so far, which `send` waits for."""
        return None

    def send(self, data: Tensor, target: int, group: dist.ProcessGroup, tag: int, computed: Any) -> dist.Work | None:
        """Start sending to a rank of the group. Wait for the returned work before `data` is freed; None: already sent."""
        return group.send([data], target, tag)

    def post(self, size: int, source: int, group: dist.ProcessGroup, tag: int) -> tuple[Tensor, Any]:
        """Start receiving at most `size` bytes."""
        buffer = self.pool.take(size)
        return buffer, group.recv([buffer], source, tag)

    def receive(self, posted: tuple[Tensor, Any], size: int) -> tuple[Tensor, Callable[[], None]]:
        """The received bytes, and a function to call before they are used."""
        data, work = posted
        work.wait()
        return data, _nothing


class StagedPort(HostPort):
    """CUDA tensors over gloo, through pinned host memory, on side streams: for ranks that share a GPU."""

    sends_at_once = False
    inline = 0
    direct = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.pool = Pool(lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def computed(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event()

    def send(self, data: Tensor, target: int, group: dist.ProcessGroup, tag: int, computed: Any) -> None:
        host = self.pool.take(data.numel())
        self.to_host(data, host[: data.numel()], computed)
        work = super().send(host[: data.numel()], target, group, tag, None)
        assert work is not None
        work.wait()  # only once: a second wait for a gloo transfer never returns
        self.pool.give_back([host])

    def receive(self, posted: tuple[Tensor, Any], size: int) -> tuple[Tensor, Callable[[], None]]:
        host, _ = super().receive(posted, size)
        found = self.to_device(host[:size])
        self.pool.give_back([host])
        return found

    def to_host(self, data: Tensor, host: Tensor, computed: Any) -> None:
        with torch.cuda.stream(self._out):
            self._out.wait_event(computed)
            host.copy_(data, non_blocking=True)
            self._out.record_event().synchronize()

    def to_device(self, host: Tensor) -> tuple[Tensor, Callable[[], None]]:
        with torch.cuda.stream(self._in):
            data = host.to(self.device, non_blocking=True)
            self._in.record_event().synchronize()
        return data, lambda: data.record_stream(torch.cuda.current_stream(self.device))


class DevicePort(HostPort):
    """CUDA tensors over NCCL, on the edge's own communicator. Lengths must match: a receive follows its header, if any."""

    posts_ahead = False
    sends_at_once = False
    inline = 0
    blocking = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._out = torch.cuda.Stream(device)

    def computed(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event()

    def send(self, data: Tensor, target: int, group: dist.ProcessGroup, tag: int, computed: Any) -> None:
        with torch.cuda.stream(self._out):
            self._out.wait_event(computed)
            work = super().send(data, target, group, 0, None)  # NCCL has no tags
            assert work is not None
            work.wait()  # orders the stream
            self._out.record_event().synchronize()

    def post(self, size: int, source: int, group: dist.ProcessGroup, tag: int) -> tuple[Tensor, Any]:
        buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        return buffer, group.recv([buffer], source, 0)

    def receive(self, posted: tuple[Tensor, Any], size: int) -> tuple[Tensor, Callable[[], None]]:
        data, work = posted
        return data, work.wait


Port = HostPort | StagedPort | DevicePort


def _nothing() -> None:
    pass
