"""Initial weights from files: a Hugging Face folder (safetensors), or a distributed checkpoint (DCP) of torch.

Every rank reads only the boxes of the serial parameters that it holds, directly into its optimizer's master copy,
so nothing is gathered, and a model is never in memory twice:

    held box of a serial parameter  →  rows of stored tensors (model/families.py: Link)  →  pieces of at most CHUNK bytes

Pieces of all units are read by THREADS threads, whole rows by positioned reads (page-locked memory if they go to a GPU), other
parts from the mapped file. A unit's weights are published when its last piece has arrived, AHEAD bytes behind the reading.

`check_weights` compares names, shapes and types with what the model needs from headers alone, before any rank starts.

[Note: files are not trusted]
Names in an index must be plain file names in the folder; a header may not be longer than 100 MB, give a name twice, or promise
bytes that the file does not have; only floating-point types are read. Pickled weights (.bin, .pt) are never opened. The index of
a DCP is a pickle: it is not unpickled but interpreted into inert values (checkpoint/dcp.py).
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fourfold import files
from fourfold.checkpoint.dcp import DTYPES, FileReader, Source, bytes_of, open_dcp
from fourfold.checkpoint.folder import use_torch_in_threads
from fourfold.checkpoint.holdings import Holding, held_boxes
from fourfold.config import ModelConfig
from fourfold.errors import ConfigError
from fourfold.model.families import FAMILIES, TORCHTITAN, Family, Link, Rule, canonical_name, links, tied_names
from fourfold.offload.host import page_locked
from fourfold.piece import Box, shape_of

if TYPE_CHECKING:
    from fourfold.shard.unit import Unit
    from fourfold.train.loop import Loop

__all__ = [
    "ReadWeights",
    "check_weights",
    "family_of_source",
    "fill",
    "fill_by",
    "open_file",
    "open_source",
    "read_weights",
    "stored_types",
    "weight_files",
]

LONGEST_HEADER = 100_000_000
"""Maximum bytes of a header; the safetensors library has the same limit."""
LARGEST_DIM = 2**31
CHUNK = 32 << 20
"""Bytes that are read at a time."""
ONE_THREAD = (1 << 15) - 1
"""Elements that torch's kernels on CPUs do not divide among threads."""
SMALL = 1 << 20
"""Fewer bytes than this come from the mapped file."""
THREADS = 8
"""Number of concurrent reads: while some copy to the device, others keep the disk busy."""
AHEAD = 2 << 30
"""Bytes of masters that are being filled before the first of them is published."""
PREFIXES = ("", "model.", "state.model.", "app.model.", "module.", "model.module.", "_orig_mod.", "model._orig_mod.")
"""Prefixes of model parameters in distributed checkpoints."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def open_source(path: str | Path) -> Source:
    """The tensors in a folder; raises ConfigError if it has no readable weights."""
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; model.init is 'random' or the path of a folder with weights")
    if (path / ".metadata").is_file():
        return open_dcp(path)
    return _Safetensors(path, _files(path))


def open_file(path: Path) -> Source:
    """The tensors of one safetensors file."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    return _Safetensors(path.parent, {path: None})


def weight_files(path: Path) -> list[Path]:
    """The files in a folder that contain its weights."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; it had the weights that this run started from")
    if (path / ".metadata").is_file():
        return [path / ".metadata", *sorted(path.glob("*.distcp"))]
    return sorted(_files(path))


# ---- safetensors ----


class _Safetensors:
    """The safetensors of a folder, mapped into memory: `model.safetensors`, or the files that an index names."""

    def __init__(self, path: Path, files: Mapping[Path, set[str] | None]):
        self.path = path
        self.tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._file_of: dict[str, Path] = {}
        self._start: dict[str, int] = {}
        for file, wanted in files.items():
            header, start = _header(file)
            if wanted is not None:
                _same_names(path, file, wanted, set(header))
            for name, (shape, dtype, (begin, _)) in header.items():
                if name in self._file_of:
                    raise ConfigError(f"{file}: has {name}, which {self._file_of[name].name} has as well")
                self.tensors[name] = shape, dtype
                self._file_of[name], self._start[name] = file, start + begin
        self._mapped: dict[Path, Any] = {}

    def read(self, name: str, box: Box, scratch: Tensor | None = None) -> Tensor:
        shape, dtype = self.tensors[name]
        at, size = self._start[name], math.prod(shape) * dtype.itemsize
        file = self._file_of[name]
        rows = shape_of(box)
        wanted = math.prod(rows) * dtype.itemsize
        if scratch is not None and SMALL <= wanted <= scratch.numel() and rows[1:] == shape[1:]:
            into = scratch[:wanted]
            _read_at(file, at + box[0][0] * (wanted // rows[0]), into)
            return into.view(dtype).view(rows)
        if file not in self._mapped:
            self._mapped[file] = torch.UntypedStorage.from_file(str(file), False, file.stat().st_size)
        raw = torch.empty(0, dtype=torch.uint8).set_(self._mapped[file], at, (size,))  # type: ignore[call-overload]
        if at % dtype.itemsize:  # files of old writers
            raw = torch.frombuffer(bytearray(bytes_of(raw)), dtype=torch.uint8)
        tensor = raw.view(dtype).view(shape)
        return tensor[tuple(slice(a, b) for a, b in box)]


def _read_at(file: Path, at: int, into: Tensor) -> None:
    with files.open_for_reading(file, ConfigError) as f:
        try:
            FileReader(f.fileno(), file).read(at, bytes_of(into))
        except OSError as e:
            raise ConfigError(f"{file}: cannot be read: {files.why(e)}") from None
        except ValueError as e:  # it was whole when its header was read
            raise ConfigError(f"{file}: {e}: it was changed while it was being read") from None


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """The files of a folder, and the tensors that the index expects in each (None: there is no index)."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return {single: None}
    if not index.is_file():
        raise ConfigError(_no_weights(folder))
    where = _json(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ConfigError(f"{index}: weight_map is missing")
    found: dict[Path, set[str] | None] = {}
    for tensor, name in where.items():
        if not files.is_plain_name(name) or not name.endswith(".safetensors"):
            raise ConfigError(
                f"{index}: weight_map names {str(name)[:100]!r}; it must be a .safetensors file of the folder"
            )
        file = folder / name
        if not file.is_file():
            raise ConfigError(f"{index}: weight_map names {name}, which is not in the folder")
        names = found.setdefault(file, set())
        assert names is not None
        names.add(tensor)
    return found


def _no_weights(folder: Path) -> str:
    pickles = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern) if "training_args" not in p.name)
    if pickles:
        return (
            f"{folder}: its weights are pickles ({pickles[0]}), which can run code and are not opened; convert them where you "
            f"trust them: AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained({str(folder) + '-safe'!r})"
        )
    other = sorted(p.name for p in folder.glob("*.safetensors"))
    for name in ("model.safetensors", "model.safetensors.index.json"):
        if (folder / name).is_symlink() and not (folder / name).exists():
            return f"{folder}: {name} is a link to {(folder / name).readlink()}, which is not there; is the download complete?"
        if (folder / name).exists():
            return f"{folder}: {name} is no regular file"
    if other:
        return (
            f"{folder}: has {other[0]}, but neither model.safetensors nor model.safetensors.index.json; give the index"
        )
    return (
        f"{folder}: there are no weights in it (model.safetensors, or model.safetensors.index.json); give a folder that has "
        "them, or train from random weights with model.init = 'random'"
    )


def _same_names(folder: Path, file: Path, wanted: set[str], found: set[str]) -> None:
    for name in sorted(wanted - found):
        raise ConfigError(f"{folder}: the index lists {name} in {file.name}, which does not contain it")
    for name in sorted(found - wanted):
        raise ConfigError(f"{folder}: {file.name} has {name}, which the index does not name")


def _json(path: Path) -> dict[str, Any]:
    return _table(path, files.read_bytes(path, ConfigError, most=LONGEST_HEADER))


def _table(path: Path, text: bytes) -> dict[str, Any]:
    """A JSON object without duplicate names."""
    try:
        data = files.parse_json(text.decode("utf-8"), f"{path}: damaged", ConfigError)
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: damaged: its header is not JSON") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: damaged: its header is not a JSON object")
    return data


def _header(path: Path) -> tuple[dict[str, tuple[tuple[int, ...], torch.dtype, tuple[int, int]]], int]:
    """Shape, type and bytes of every tensor of a safetensors file, and where its data begin; checked against the file's size."""
    size = path.stat().st_size
    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if length == int.from_bytes(b"version ", "little"):
            raise ConfigError(f"{path}: a pointer of Git LFS, not the file itself; run `git lfs pull` in the folder")
        if size < 8 or length > min(LONGEST_HEADER, size - 8):
            raise ConfigError(
                f"{path}: not a safetensors file, or truncated: its header does not fit into {size} bytes"
            )
        data = _table(path, f.read(length))
    start, found, end = 8 + length, {}, 0
    for name, entry in data.items():
        if name == "__metadata__":
            continue
        try:
            kind, shape, (begin, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            numbers = (*shape, begin, stop)
            if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{path}: damaged: the entry of {name} is {str(entry)[:80]}") from None
        if kind not in DTYPES:
            known = ", ".join(DTYPES)
            raise ConfigError(f"{path}: {name} is of type {kind}, which is not supported; weights are {known}")
        bytes_ = math.prod(shape) * DTYPES[kind].itemsize
        if any(n >= LARGEST_DIM for n in shape) or stop - begin != bytes_:
            raise ConfigError(f"{path}: damaged: {name} of shape {list(shape)} has bytes {begin} to {stop}")
        found[name] = shape, DTYPES[kind], (begin, stop)
        end = max(end, stop)
    if start + end != size:
        what = "truncated" if size < start + end else "longer than its header says"
        raise ConfigError(f"{path}: {what}: {size} bytes, but the header promises {start + end}")
    at = 0
    for name, (_, _, (begin, stop)) in sorted(found.items(), key=lambda item: item[1][2]):
        if begin != at:
            raise ConfigError(f"{path}: damaged: the bytes of {name} overlap others, or leave a gap")
        at = stop
    return found, start


# ---- what the model needs ----


def family_of_source(m: ModelConfig) -> Family:
    """The family whose tensor names the files of a model use."""
    if m.model_type not in FAMILIES:
        raise ConfigError(
            f"model.init = '{m.init}' needs model.model_type, the family of its names: one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[m.model_type]


def check_weights(m: ModelConfig, *, again: bool = False) -> _Renamed:
    """Open the weights of a (resolved) model and compare them with what it needs; raises ConfigError naming what differs.

    `again`: they were checked before; only headers are read.
    """
    family = family_of_source(m)
    opened = open_source(m.init)
    source = _canonical(opened, family) if isinstance(opened, _Safetensors) else _without_prefix(opened, family, m)
    family = source.family
    expected = {link.theirs: link.shape for link in links(family, m)}
    tied = set(tied_names(family, m))
    missing = [name for name in expected if name not in source.tensors]
    unknown = [name for name in source.tensors if name not in expected and name not in tied]
    where = f"{m.init} does not fit the model (model_type {family.model_type!r}, {m.layers} layers, hidden {m.hidden})"
    if missing:
        heads = [rule.theirs for rule in family.tensors if rule.ours == "head.proj.weight"]
        hint = "; is its head tied to the embedding? Then write model.tie = true" if missing == heads else ""
        raise ConfigError(f"{where}: {_some(missing)} missing{hint}")
    if unknown:
        raise ConfigError(f"{where}: {_some(unknown)} not part of it")
    for name, shape in expected.items():
        if (found := source.tensors[name][0]) != shape:
            raise ConfigError(f"{where}: {name} is {list(found)}, but {list(shape)} in the model")
    for name in set() if again else tied & set(source.tensors):
        _refuse_untied(source, name, next(x.theirs for x in links(family, m) if x.ours == "embed.tokens.weight"), where)
    return source


def _canonical(source: Source, family: Family) -> _Renamed:
    """The source's tensors under the table's names, without those that are not parameters."""
    names: dict[str, str] = {}
    for name in source.tensors:
        known = canonical_name(family, name)
        if known is not None and names.setdefault(known, name) != name:
            raise ConfigError(f"{source.path}: {name} and {names[known]} are the same tensor")
    return _Renamed(source, names, family)


def _without_prefix(source: Source, family: Family, m: ModelConfig) -> _Renamed:
    """The model's tensors in a distributed checkpoint, whose names have a prefix and which also holds other tensors."""
    families = [family]
    if family.model_type == "llama":
        newer = tuple((f"attention.w{x}", f"attention.qkv_linear.w{x}") for x in "qkv")
        newer += (("output.weight", "lm_head.weight"),)
        families += [dataclasses.replace(family, tensors=_named(TORCHTITAN, names)) for names in ((), newer[:3], newer)]

    def found(family: Family, prefix: str) -> int:
        return sum(prefix + link.theirs in source.tensors for link in links(family, m))

    family, prefix = max(((f, p) for f in families for p in PREFIXES), key=lambda pair: found(*pair))
    names = {name: prefix + name for name in (*(x.theirs for x in links(family, m)), *tied_names(family, m))}
    return _Renamed(source, {name: theirs for name, theirs in names.items() if theirs in source.tensors}, family)


def _named(rules: tuple[Rule, ...], names: tuple[tuple[str, str], ...]) -> tuple[Rule, ...]:
    """Rules with other names for the stored tensors."""
    for old, new in names:
        rules = tuple(dataclasses.replace(rule, theirs=rule.theirs.replace(old, new)) for rule in rules)
    return rules


class _Renamed:
    """Another source under the names of a family."""

    def __init__(self, source: Source, names: Mapping[str, str], family: Family):
        self.source, self.names, self.path, self.family = source, dict(names), source.path, family
        self.tensors = {name: source.tensors[theirs] for name, theirs in self.names.items()}

    def read(self, name: str, box: Box, scratch: Tensor | None = None) -> Tensor:
        return self.source.read(self.names[name], box, scratch)


def _some(names: list[str]) -> str:
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{listed} {'is' if len(names) == 1 else 'are'}"


def _refuse_untied(source: Source, head: str, embedding: str, where: str) -> None:
    """If the config ties the head but the files contain it, check that it equals the embedding.

    The process will fork ranks, which hang if a kernel ran here on several threads: they lack these threads.
    Bytes are compared by numpy, and other files than safetensors are read in parts too small for several threads.
    """
    shape = source.tensors[embedding][0]
    same = source.tensors[head] == source.tensors[embedding]
    mapped = isinstance(source, _Renamed) and isinstance(source.source, _Safetensors)
    step = max(1, (CHUNK // 8 if mapped else ONE_THREAD) // math.prod(shape[1:]))
    for a in range(0, shape[0] if same else 0, step):
        box = ((a, min(a + step, shape[0])), *((0, n) for n in shape[1:]))
        one, other = (bytes_of(source.read(name, box)) for name in (head, embedding))
        same = same and np.array_equal(one, other)
    if not same:
        raise ConfigError(
            f"{where}: its head is tied to the embedding, but {head} differs from {embedding}; write model.tie = false"
        )


# ---- reading ----


@dataclass(frozen=True)
class ReadWeights:
    """What a rank has read: the dtype of every tensor in the folder by name, in safetensors' spelling; bytes and seconds."""

    types: dict[str, str]
    bytes: int
    seconds: float


def read_weights(loop: Loop) -> ReadWeights:
    """Fill the weights of a loop from the folder in its config, unit by unit; every rank reads its own pieces."""
    begun, size, m = time.perf_counter(), 0, loop.config.model
    source = check_weights(m, again=True)
    if loop.bases:  # with LoRA, the only units whose weights are in files
        bases = [Holding("", b.shard.detach(), b.shard_range[0], b.layout, b.pieces) for b in loop.bases]
        size += fill(source, m, bases)
    else:
        size += _fill_units(source, m, loop)
    for tie in loop.ties:
        tie.publish()
    if loop.device.type == "cuda":
        torch.cuda.synchronize(loop.device)
    return ReadWeights(stored_types(source), size, time.perf_counter() - begun)


def _fill_units(source: _Renamed, m: ModelConfig, loop: Loop) -> int:
    """Fill the masters of all units, and publish each when its last piece has arrived."""
    size, ahead, of = 0, 0, _links_by_name(links(source.family, m))
    filling: deque[tuple[Unit, int, list[Future[int]]]] = deque()
    with _Readers() as readers:

        def publish() -> int:
            unit, _, pieces = filling.popleft()
            read = sum(piece.result() for piece in pieces)
            loop.optimizer.publish(unit)
            return read

        for unit in loop.units:
            master = loop.optimizer.flats(unit)[""]
            pieces = readers.start(source, of, [Holding("", master, unit.shard_range[0], unit.layout, unit.pieces)])
            filling.append((unit, master.nbytes, pieces))
            ahead += master.nbytes
            while ahead > AHEAD:
                ahead -= filling[0][1]
                size += publish()
        while filling:
            size += publish()
    return size


def stored_types(source: Source) -> dict[str, str]:
    """The dtype of every tensor by name, in safetensors' spelling."""
    spelled = {dtype: name for name, dtype in DTYPES.items()}
    return {name: spelled[dtype] for name, (_, dtype) in source.tensors.items()}


@torch.no_grad()
def fill(source: _Renamed, m: ModelConfig, holdings: Iterable[Holding]) -> int:
    """Fill this rank's parts of the serial parameters; returns the bytes read."""
    return fill_by(source, links(source.family, m), holdings)


def fill_by(source: Source, stored: Iterable[Link], holdings: Iterable[Holding]) -> int:
    """The same, with an explicit list of stored tensors."""
    with _Readers() as readers:
        return sum(piece.result() for piece in readers.start(source, _links_by_name(stored), holdings))


def _links_by_name(stored: Iterable[Link]) -> dict[str, list[Link]]:
    of: dict[str, list[Link]] = defaultdict(list)
    for link in stored:
        of[link.ours].append(link)
    return of


class _Readers:
    """Threads that copy pieces of stored tensors to where they belong, each through memory of its own."""

    def __init__(self) -> None:
        use_torch_in_threads()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="weights")
        self._own = threading.local()

    def __enter__(self) -> _Readers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def start(self, source: Source, of: Mapping[str, Sequence[Link]], holdings: Iterable[Holding]) -> list[Future[int]]:
        """Start to fill holdings; every future has the bytes of a piece."""
        return [
            self._pool.submit(self._copy, source, link, theirs, step, view, at)
            for holding in holdings
            for piece, box, view in held_boxes(holding)
            for link in of[piece.name]
            for at, theirs, step in _runs(link, box, source.tensors[link.theirs][1].itemsize)
        ]

    @torch.no_grad()
    def _copy(self, source: Source, link: Link, theirs: Box, step: int, view: Tensor, at: int) -> int:
        stored = _stored(source, link, theirs, self._scratch(view.device))
        part = stored[::step]
        target = view.narrow(0, at, part.shape[0])
        target.copy_(part.to(target.device) if target.is_cuda else part)
        return part.nbytes

    def _scratch(self, device: torch.device) -> Tensor:
        if not hasattr(self._own, "scratch"):
            self._own.scratch = page_locked(CHUNK, device)
        scratch: Tensor = self._own.scratch
        return scratch


def _runs(link: Link, box: Box, width: int) -> Iterator[tuple[int, Box, int]]:
    """For each run: first row in the held box, the box of the viewed stored tensor, and the stride of its rows."""
    (start, stop), *rest = box
    most = max(1, CHUNK // (width * max(1, math.prod(b - a for a, b in rest))))
    for run in link.runs:
        low, high = max(start, run.ours), min(stop, run.ours + run.length)
        for a in range(low, high, most):
            b = min(a + most, high)
            first = run.theirs + (a - run.ours) * run.step
            yield a - start, ((first, first + (b - a - 1) * run.step + 1), *rest), run.step


def _stored(source: Source, link: Link, box: Box, scratch: Tensor) -> Tensor:
    """A box of a stored tensor, after its view and transpose; it may be in `scratch`, or a view of a mapped file."""
    if link.shape != link.view:
        whole = source.read(link.theirs, tuple((0, n) for n in link.shape)).reshape(link.view)
        tensor = whole.mT if link.transposed else whole
        return tensor[tuple(slice(a, b) for a, b in box)]
    if link.transposed:
        return source.read(link.theirs, box[::-1], scratch).mT
    return source.read(link.theirs, box, scratch)
