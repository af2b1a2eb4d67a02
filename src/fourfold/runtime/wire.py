"""What goes over a wire: a header with name and shapes, the bytes of a tree of tensors, and how they leave and reach a device.

A message starts with a header: name and generation as four numbers (NAME_BYTES), then, where the form of messages is not known
beforehand, JSON of structure, dtypes and shapes (HEADER_BYTES in all). Ordered programs over a known form have no header at all
(`direct.py`). The data are the tensors' bytes one after another, each on a
multiple of 64. Up to INLINE bytes of host memory follow the header in the same transfer (copied: cheaper than a second
wake-up); more are a transfer of their own.

[Note: generations]
A receive can be posted before its message is there because gloo takes a shorter message into a longer buffer. The buffer must
be long enough: both sides know the length of the generation. When a longer message comes, the sender starts a new one, whose
number is the tag of the transfer; receives that were posted for the old one never match, and are left behind. Receives of a
generation match in the order in which they were posted, so they are posted for all messages or for none.
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
    "plain",
    "write_light",
]

FREE = 16  # buffers kept for use again; older ones, of lengths gone by, are dropped
Kind = Literal["activation", "gradient"]


class Name(NamedTuple):
    """Which message: the output (activation) or the input's gradient that a stage made of one micro-batch."""

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
                f"a stage hands on tensors, and tuples, lists and dicts of them; found {type(value).__name__}"
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
    """Bytes of the tensors one after another."""
    return tensors[0].nbytes if len(tensors) == 1 else sum(_padded(t.nbytes) for t in tensors)


def write_bytes(tensors: Sequence[Tensor], out: Tensor) -> None:
    """Copy the tensors into a run of bytes."""
    at = 0
    for t in tensors:
        out[at : at + t.nbytes].copy_(_bytes(t))
        at += _padded(t.nbytes)


def write_light(header: bytes, tensors: Sequence[Tensor], out: Tensor) -> None:
    """A header, then the tensors (in host memory); by plain copies, which cost a fraction of torch's for little data."""
    start = out.data_ptr()
    ctypes.memmove(start, header, len(header))
    start += len(header)
    for t in tensors:
        source = t if t.is_contiguous() else t.contiguous()
        ctypes.memmove(start, source.data_ptr(), t.nbytes)
        start += _padded(t.nbytes)


def join_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors as one run of bytes; a single contiguous tensor is not copied."""
    if len(tensors) == 1:
        return _bytes(tensors[0])
    out = torch.empty(joined_size(tensors), dtype=torch.uint8, device=tensors[0].device)
    write_bytes(tensors, out)
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
        """Bytes of the data that follow."""
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
    """Writes and reads headers. Forms recur, so their text is made and read once each.

    `form`: that of all messages, where it is known; headers then name the message and nothing else.
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
        """Name, generation and form of the message that begins with its header."""
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
    """Buffers for received bytes, used again when their last user is done."""

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
        """Buffers there are, lent or free."""
        return len(self._free) + len(self._loans)

    def borrow(self, tensors: Sequence[Tensor]) -> None:
        """One more user of those that lie in a buffer of ours (a stage may hand on what it was given)."""
        self._count(tensors, 1)

    def give_back(self, tensors: Sequence[Tensor]) -> None:
        """One user less."""
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

    `sends_at_once`: `send` does not block, so the thread that computes may call it. `inline`: bytes that may follow the header.
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
        """A mark of everything computed so far, for `send` to wait for."""
        return None

    def send(self, data: Tensor, target: int, group: dist.ProcessGroup, tag: int, computed: Any) -> dist.Work | None:
        """Start sending to a rank of the group; what is returned is waited for before `data` is let go. None: it has left."""
        return group.send([data], target, tag)

    def post(self, size: int, source: int, group: dist.ProcessGroup, tag: int) -> tuple[Tensor, Any]:
        """Start receiving at most `size` bytes."""
        buffer = self.pool.take(size)
        return buffer, group.recv([buffer], source, tag)

    def receive(self, posted: tuple[Tensor, Any], size: int) -> tuple[Tensor, Callable[[], None]]:
        """The received bytes, and what the consumer calls before it uses them."""
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
        work.wait()  # once: a second wait for a transfer of gloo never ends
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
            work = super().send(data, target, group, 0, None)  # NCCL knows no tags
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


def plain(error: Exception) -> str:
    """The first line of an error of gloo, without its advice."""
    return str(error).split(". This is typically")[0].splitlines()[0] if str(error) else type(error).__name__
