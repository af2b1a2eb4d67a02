"""The contents of a checkpoint: the index of its tensors and the list of its files. No torch, no pickle.

    index.json      {"version": 1, "tensors": {"head.norm.weight": {"dtype": "float32", "shape": [64], "chunks": [
                        {"offset": [0], "shape": [64], "file": "__0_0.distcp", "at": 0, "bytes": 1716}]}}}
    complete.json   {"version": 2, "files": {"__0_0.distcp": {"bytes": 90211, "sha256": "…"}, "index.json": …}}

Everything in them is checked when it is read: file names have one component and are listed with their size, chunks lie inside
their tensor and inside their file, and a chunk's bytes can hold its elements. So an index cannot refer to a file outside the
folder, nor to more bytes than are on the disk.

[Note: old checkpoints]
Checkpoints of version 1 have no index.json. Their index is torch's `.metadata`, a pickle. It is not unpickled: `_Machine`
interprets the two dozen opcodes that such a file consists of. It calls nothing and imports nothing. A class becomes its name, an
object becomes its class name, arguments and state, and a dict becomes a list of pairs, so that nothing is hashed either.
"""

from __future__ import annotations

import io
import math
import pickletools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.errors import CheckpointError

__all__ = [
    "ITEM_BYTES",
    "FileInfo",
    "Index",
    "StoredChunk",
    "StoredTensor",
    "check_index",
    "dump_index",
    "parse_dcp_index",
    "parse_marker",
    "read_index",
    "read_marker",
    "saved_tensor",
]

MARKER, INDEX, OLD_INDEX = "complete.json", "index.json", ".metadata"
ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes per element, by torch's name of the dtype."""
MOST_DIMS = 16
INDEX_BYTES = 256 * files.MIB


@dataclass(frozen=True)
class FileInfo:
    """A file of a checkpoint as it was saved."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class StoredChunk:
    """A box of a tensor: `bytes` bytes of `file` from byte `at` on, as `torch.save` writes a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    at: int
    bytes: int

    @property
    def box(self) -> tuple[tuple[int, int], ...]:
        return tuple((o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class StoredTensor:
    """One serial tensor of a checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


Index = dict[str, StoredTensor]


def dump_index(index: Index) -> dict[str, Any]:
    """The content of index.json."""
    tensors = {
        name: {
            "dtype": t.dtype,
            "shape": list(t.shape),
            "chunks": [
                {"offset": list(c.offset), "shape": list(c.shape), "file": c.file, "at": c.at, "bytes": c.bytes}
                for c in t.chunks
            ],
        }
        for name, t in index.items()
    }
    return {"version": 1, "tensors": tensors}


def read_marker(directory: Path) -> dict[str, FileInfo]:
    """The files of a complete checkpoint, by name; raises CheckpointError if it is incomplete or the list is damaged."""
    path = directory / MARKER
    if not path.is_file() and not path.is_symlink():
        raise CheckpointError(f"{directory}: not a complete checkpoint: there is no {MARKER} in it")
    return parse_marker(files.read_json(path, CheckpointError, follow=False), str(path))


def parse_marker(data: Any, path: str) -> dict[str, FileInfo]:
    """The files that a `complete.json` lists; errors start with `path`."""
    try:
        found = {}
        for name, info in data["files"].items():
            if not files.is_plain_name(name):
                raise CheckpointError(f"{path}: names the file {name[:100]!r}; refused")
            found[name] = FileInfo(_count(info["bytes"]), _digest(info["sha256"]))
        if data["version"] not in (1, 2):
            raise CheckpointError(f"{path}: version {_brief(data['version'])}; this program reads 1 and 2")
        if data["version"] == 2 and INDEX not in found:
            raise ValueError(f"{INDEX} is not listed")
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise CheckpointError(f"{path}: damaged: {_reason(e)}") from None
    return found


def read_index(directory: Path) -> Index:
    """The tensors of a complete checkpoint, each with the files that hold its parts."""
    listed = read_marker(directory)
    name = INDEX if INDEX in listed else OLD_INDEX
    path = directory / name
    data = files.read_bytes(path, CheckpointError, most=INDEX_BYTES, follow=False)
    try:
        index = _from_json(data, path) if name == INDEX else parse_dcp_index(data)
        check_index(index, listed)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, OverflowError, MemoryError) as e:
        raise CheckpointError(f"{path}: damaged: {_reason(e)}") from None
    return index


def _from_json(data: bytes, path: Path) -> Index:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: damaged: not UTF-8") from None
    parsed = files.parse_json(text, str(path), CheckpointError)
    if parsed["version"] != 1:
        raise CheckpointError(f"{path}: version {_brief(parsed['version'])}; this program reads 1")
    return {
        name: StoredTensor(
            t["dtype"],
            _shape(t["shape"]),
            tuple(
                StoredChunk(_shape(c["offset"]), _shape(c["shape"]), c["file"], _count(c["at"]), _count(c["bytes"]))
                for c in t["chunks"]
            ),
        )
        for name, t in parsed["tensors"].items()
    }


def check_index(index: Index, listed: Mapping[str, FileInfo]) -> None:
    """Raise ValueError unless every tensor is complete and its parts lie inside the listed files."""
    for name, tensor in index.items():
        _check_tensor(name, tensor, listed)


def _check_tensor(name: str, tensor: StoredTensor, listed: Mapping[str, FileInfo]) -> None:
    """Raise ValueError unless the chunks cover the tensor, lie inside it, and lie inside listed files."""
    if not isinstance(name, str) or not name.isprintable() or len(name) > 1000:
        raise ValueError(f"a tensor is called {_brief(name)}")
    if not isinstance(tensor.dtype, str) or tensor.dtype not in ITEM_BYTES:
        raise ValueError(f"'{name}' is of type {_brief(tensor.dtype)}")
    total = 0
    for chunk in tensor.chunks:
        if not files.is_plain_name(chunk.file):
            raise ValueError(f"the index names the file {_brief(chunk.file)}; refused")
        if chunk.file not in listed:
            raise ValueError(f"'{name}' is in {chunk.file}, which {MARKER} does not list")
        if len(chunk.shape) != len(tensor.shape) or len(chunk.offset) != len(tensor.shape):
            raise ValueError(f"a part of '{name}' has another number of dims")
        if any(stop > n for (_, stop), n in zip(chunk.box, tensor.shape, strict=True)):
            raise ValueError(f"a part of '{name}' lies outside it")
        elements = math.prod(chunk.shape)
        if chunk.at + chunk.bytes > listed[chunk.file].bytes or elements * ITEM_BYTES[tensor.dtype] > chunk.bytes:
            raise ValueError(f"a part of '{name}' lies outside {chunk.file}")
        total += elements
    if total != math.prod(tensor.shape):
        raise ValueError(f"the parts of '{name}' have {total} elements of {math.prod(tensor.shape)}")


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError(f"{_brief(value)} is not a count")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) > MOST_DIMS:
        raise ValueError(f"{_brief(value)} is not a shape")
    return tuple(map(_count, value))


def _digest(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise ValueError(f"{_brief(value)} is not a SHA-256")
    return value


def _brief(value: Any) -> str:
    """A value for an error message; structures, which may be huge, are only named by type."""
    return repr(value)[:100] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def _reason(e: Exception) -> str:
    text = f"{e.args[0]!r} is missing" if isinstance(e, KeyError) and e.args else str(e)
    return " ".join(text.split())[:300] or type(e).__name__


# ---- [Note: old checkpoints] ----


@dataclass(eq=False)
class _Class:
    """The name of a class."""

    name: str


@dataclass(eq=False)
class _Object:
    """An object in a pickle: its class, arguments and state."""

    cls: Any
    args: Any
    state: Any = None


@dataclass(eq=False)
class _Pairs:
    """A dict in a pickle, as pairs."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


class _Machine:
    """Interprets a pickle's opcodes into values of the classes above, str, int, bool, None, lists and tuples."""

    MOST_OPCODES = 20_000_000

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(io.BytesIO(data))):
            if count > self.MOST_OPCODES:
                raise ValueError("too long")
            if opcode.name == "STOP":
                return self.stack.pop()
            self.do(opcode.name, argument)
        raise ValueError("it has no end")

    def above_mark(self) -> list[Any]:
        at = self.marks.pop()
        items, self.stack[at:] = self.stack[at:], []
        return items

    def popped(self, count: int) -> list[Any]:
        if count > len(self.stack):
            raise ValueError("the stack is empty")
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items

    def do(self, name: str, argument: Any) -> None:
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self.marks.append(len(self.stack))
            case "EMPTY_DICT":
                self.stack.append(_Pairs())
            case "EMPTY_LIST":
                self.stack.append([])
            case "EMPTY_TUPLE":
                self.stack.append(())
            case "TUPLE":
                self.stack.append(tuple(self.above_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self.stack.append(tuple(self.popped(int(name[-1]))))
            case "NONE":
                self.stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                self.stack.append(name == "NEWTRUE")
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINUNICODE" | "SHORT_BINUNICODE" | "BINFLOAT":
                self.stack.append(argument)
            case "SHORT_BINBYTES" | "BINBYTES":
                self.stack.append(None)  # none of the fields that are read are bytes
            case "EMPTY_SET":
                self.stack.append([])
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = self.stack[-1]
            case "BINGET" | "LONG_BINGET":
                self.stack.append(self.memo[argument])
            case "GLOBAL":
                self.stack.append(_Class(str(argument).replace(" ", ".")))
            case "STACK_GLOBAL":
                module, qualname = self.popped(2)
                self.stack.append(_Class(f"{_text(module)}.{_text(qualname)}"))
            case "BINPERSID":  # the storage of a saved tensor
                self.stack.append(_Object(_Class("storage"), *self.popped(1)))
            case "REDUCE" | "NEWOBJ":
                cls, args = self.popped(2)
                self.stack.append(_Object(cls, args))
            case "BUILD":
                target, state = self.popped(2)
                if not isinstance(target, _Object):
                    raise ValueError("a state is set on something that is not an object")
                target.state = state
                self.stack.append(target)
            case "APPEND":
                self.extend(self.popped(1))
            case "APPENDS" | "ADDITEMS":
                self.extend(self.above_mark())
            case "SETITEM":
                self.put(self.popped(2))
            case "SETITEMS":
                self.put(self.above_mark())
            case _:
                raise ValueError(f"an index has no opcode {name}")

    def extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("items are appended to something that is not a list")
        self.stack[-1].extend(items)

    def put(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], _Pairs) or len(items) % 2:
            raise ValueError("items are set on something that is not a table")
        self.stack[-1].items.extend(zip(items[::2], items[1::2], strict=True))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a name is not text")
    return value


def _object(value: Any, name: str) -> dict[str, Any]:
    """The fields of an object of class `name`."""
    if not isinstance(value, _Object) or not isinstance(value.cls, _Class) or not value.cls.name.endswith(f".{name}"):
        raise ValueError(f"the index has {_named(value)} where a {name} is expected, as no checkpoint of ours has")
    state = value.state
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], _Pairs):  # slots
        state = state[1]
    return _fields(state) if isinstance(state, _Pairs) else {"": state}


def _named(value: Any) -> str:
    cls = value.cls if isinstance(value, _Object) else value
    return cls.name[:100] if isinstance(cls, _Class) else f"a {type(value).__name__.strip('_')}"


def _fields(pairs: Any) -> dict[str, Any]:
    if not isinstance(pairs, _Pairs):
        raise ValueError("a table is missing")
    return {_text(key): value for key, value in pairs.items}


def _size(value: Any) -> tuple[int, ...]:
    """A torch.Size."""
    if isinstance(value, _Object) and isinstance(value.cls, _Class) and value.cls.name == "torch.Size":
        (value,) = value.args
    return _shape(value)


STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "BFloat16Storage": "bfloat16", "HalfStorage": "float16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool",
}  # fmt: skip


def saved_tensor(data: bytes) -> tuple[str, tuple[int, ...]] | None:
    """Type and shape in the pickle that `torch.save` writes for a contiguous tensor, interpreted; None for anything else."""
    tensor = _Machine().run(data)
    if _object_name(tensor) != "torch._utils._rebuild_tensor_v2":
        return None
    storage, offset, shape, strides = tensor.args[:4]
    _, kind, _, _, elements = storage.args
    shape = _shape(shape)
    dense = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    same = all(n == 1 or a == b for n, a, b in zip(shape, strides, dense, strict=True))
    if offset != 0 or elements != math.prod(shape) or not same:
        return None
    return STORAGES[kind.name.removeprefix("torch.")], shape


def _object_name(value: Any) -> str:
    return value.cls.name if isinstance(value, _Object) and isinstance(value.cls, _Class) else ""


def parse_dcp_index(data: bytes, *, tensors_alone: bool = False) -> Index:
    """The tensors of torch's `.metadata`: [Note: old checkpoints]. Raises ValueError, KeyError or similar if it is damaged.

    `tensors_alone`: skip objects that are not tensors, and tensors of types that are not in ITEM_BYTES.
    """
    metadata = _object(_Machine().run(data), "Metadata")
    places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
    for key, value in metadata["storage_data"].items:
        index, info = _object(key, "MetadataIndex"), _object(value, "_StorageInfo")
        if info.get("transform_descriptors"):
            raise ValueError("the index asks for a transformation of its files; refused")
        place = info["relative_path"], _count(info["offset"]), _count(info["length"])
        offset = () if index.get("offset") is None else _size(index["offset"])
        places[_text(index["fqn"]), offset] = place
    out: Index = {}
    for name, stored in metadata["state_dict_metadata"].items:
        if tensors_alone and _named(stored).endswith(".BytesStorageMetadata"):
            continue
        tensor = _object(stored, "TensorStorageMetadata")
        properties = _object(tensor["properties"], "TensorProperties")
        dtype = properties[""][0] if "" in properties else properties["dtype"]
        if not isinstance(dtype, _Class):
            raise ValueError("a tensor has no type")
        if tensors_alone and dtype.name.removeprefix("torch.") not in ITEM_BYTES:
            continue
        chunks = []
        for part in tensor["chunks"]:
            chunk = _object(part, "ChunkStorageMetadata")
            offset = _size(chunk["offsets"])
            place = places.get((_text(name), offset)) or places[_text(name), () if not any(offset) else offset]
            chunks.append(StoredChunk(offset, _size(chunk["sizes"]), *place))
        out[_text(name)] = StoredTensor(dtype.name.removeprefix("torch."), _size(tensor["size"]), tuple(chunks))
    return out
