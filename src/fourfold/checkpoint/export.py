"""Exports a checkpoint for other tools: Hugging Face safetensors, or a distributed checkpoint (DCP) with Hugging Face names.

Runs in one process, without a process group, also while the run continues. Tensors are read, cast and written one at a time, so
that memory holds one parameter.

    OUT/model.safetensors, or model-00001-of-00004.safetensors … and model.safetensors.index.json
    OUT/config.json (written last), generation_config.json, the original tokenizer and chat template

A LoRA run is written as a PEFT adapter, or merged with its frozen weights (checkpoint/adapters.py).

A model that no family of the table describes (model/families.py) is written under our own names, with our config.json.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from copy import copy as shallow_copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from fourfold import files
from fourfold.checkpoint import save_load
from fourfold.checkpoint.adapters import ADAPTER, WEIGHTS, adapter_config, check_base, fill_model, merged
from fourfold.checkpoint.dcp import DTYPES
from fourfold.checkpoint.folder import in_threads
from fourfold.checkpoint.hf_files import TOKENIZER, copy, read_types
from fourfold.checkpoint.index import Index, read_index
from fourfold.checkpoint.remote import fetch_newest, is_url, local_run
from fourfold.checkpoint.weights import check_weights, family_of_source, fill
from fourfold.config import Config, ModelConfig
from fourfold.data.samples import load_tokenizer
from fourfold.errors import CheckpointError, ConfigError, FileError
from fourfold.model.build import build_model, materialize_buffers
from fourfold.model.families import Link, Run, links
from fourfold.model.lora import adapter_links
from fourfold.model.spec import parameter_shapes
from fourfold.model.to_hf import as_written, family_of, hf_config
from fourfold.model.transformer import Transformer
from fourfold.record import RECORD
from fourfold.train.rundir import RunDir

__all__ = ["Exported", "check_out", "export", "find_checkpoint", "load_model", "write_final", "write_own_final"]

SHARD_BYTES = 4 << 30
"""Maximum bytes of a file; a tensor is never split over two files."""
NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Exported:
    """What was written: the step, the family's model_type ("" for our own names), tensors, bytes, the most frequent dtype."""

    step: int
    model_type: str
    tensors: int
    bytes: int
    dtype: str


def write_final(run: RunDir, config: Config) -> None:
    """final/: the newest checkpoint as a Hugging Face folder."""
    directory = save_load.newest(run.checkpoints)
    assert directory is not None
    export(run, config, directory, run.final, merge=config.lora.merge)


def write_own_final(
    checkpoints: Path, out: Path, frozen: Mapping[str, Tensor], aliases: Mapping[str, str] | None = None
) -> None:
    """final/ of a user's own model: the newest checkpoint's weights, and the frozen ones, under the state dict's names.

    `aliases`: further names of shared parameters.
    """
    directory = save_load.newest(checkpoints)
    assert directory is not None
    stored = read_index(directory)
    shapes = {name: at.shape for name, at in stored.items() if not name.startswith("optim.")}
    shapes |= {name: tuple(value.shape) for name, value in frozen.items()}
    found = _as_they_are(shapes)
    known = {link.theirs: link for link in found}
    found += [dataclasses.replace(known[n], theirs=alias) for alias, n in (aliases or {}).items() if alias not in known]
    tensors = [_Tensor(link, DTYPES[_trained_type(stored)]) for link in found]
    _make(out)
    _write_safetensors(tensors, _Parameters(directory, stored, shapes, frozen), out)


def export(
    run: RunDir,
    config: Config,
    directory: Path,
    out: Path,
    *,
    dtype: str = "",
    form: str = "hf",
    merge: bool = False,
) -> Exported:
    """Write a checkpoint of a run to the folder `out`. `dtype`: in safetensors' spelling; default: that of the original weights.

    For a LoRA run this writes a PEFT adapter, or with `merge` the whole model with merged adapters.
    """
    m, kept = as_written(config.model), run.path / "hf"
    if m.lora is not None:
        check_base(kept, m, first=False)
    if m.lora is not None and not merge:
        return _export_adapter(config, directory, kept, out, dtype)
    base = files.read_json(kept / "config.json", CheckpointError) if (kept / "config.json").is_file() else None
    family = family_of(m, base)
    came, others = ("", {}) if dtype else read_types(kept)
    stored = read_index(directory)
    trained = _trained_type(stored)
    common = dtype or came or trained
    found = links(family, m) if family else _as_they_are(parameter_shapes(m))
    tensors = [_Tensor(link, DTYPES[others.get(link.theirs, common)]) for link in found]
    source = _Parameters(directory, stored, parameter_shapes(m)) if m.lora is None else _Merged(directory, stored, m)
    _make(out)
    if form == "dcp":
        _write_dcp(tensors, source, out)
    else:
        _write_safetensors(tensors, source, out)
        _write_other_files(dataclasses.replace(config, model=m), family, base, kept, out, NAMES[common])
    step = save_load.read_state(directory)["step"]
    size = sum(t.bytes for t in tensors)
    return Exported(step, family.model_type if family else "", len(tensors), size, NAMES[common])


def _export_adapter(config: Config, directory: Path, kept: Path, out: Path, dtype: str) -> Exported:
    """A PEFT adapter (checkpoint/adapters.py)."""
    m, stored = config.model, read_index(directory)
    family = family_of_source(m)
    kind = dtype or _trained_type(stored)
    tensors = [_Tensor(link, DTYPES[kind]) for link in adapter_links(family, m)]
    _make(out)
    _write_file(out / WEIGHTS, tensors, _Parameters(directory, stored, parameter_shapes(m)))
    copy(kept, out, TOKENIZER)
    files.write_json(out / ADAPTER, adapter_config(m, family), CheckpointError)
    step = save_load.read_state(directory)["step"]
    return Exported(step, family.model_type, len(tensors), sum(t.bytes for t in tensors), NAMES[kind])


def _trained_type(stored: Index) -> str:
    """The type of the trained weights of a checkpoint."""
    return {"float64": "F64"}.get(next(iter(stored.values())).dtype, "F32")


def _as_they_are(shapes: Mapping[str, tuple[int, ...]]) -> list[Link]:
    return [Link(n, s, n, s, False, (Run(0, 0, s[0]),) if s else ()) for n, s in shapes.items()]


def _write_other_files(config: Config, family: Any, base: Any, kept: Path, out: Path, dtype: str) -> None:
    """Tokenizer, generation config and, last, config.json: a folder without one is visibly unfinished."""
    copy(kept, out, TOKENIZER)
    if family is None:
        files.write_json(out / "config.json", config.to_dict(), CheckpointError)
        return
    end = None if base is not None else load_tokenizer(_tokenizer(config, kept)).end
    if (kept / "generation_config.json").is_file():
        copy(kept, out, ("generation_config.json",))
    elif end is not None:
        files.write_json(out / "generation_config.json", {"eos_token_id": end}, CheckpointError)
    files.write_json(out / "config.json", hf_config(family, config.model, dtype, base, end), CheckpointError)


def _tokenizer(config: Config, kept: Path) -> str:
    return str(kept / "tokenizer.json") if (kept / "tokenizer.json").is_file() else config.data.tokenizer


# ---- tensors, one at a time ----


@dataclass(frozen=True)
class _Tensor:
    """A tensor to write: the rows of a parameter, and the dtype."""

    link: Link
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.link.shape) * self.dtype.itemsize


class _Parameters:
    """Serial parameters of a checkpoint; the last one is cached, since adjacent tensors of a file come from it."""

    def __init__(
        self,
        directory: Path,
        index: Index,
        shapes: Mapping[str, tuple[int, ...]],
        others: Mapping[str, Tensor] | None = None,
    ):
        self.directory, self.index, self.shapes, self.others = directory, index, shapes, others or {}
        self._last: tuple[str, Tensor] | None = None

    def another(self) -> Self:
        """A reader of the same parameters for another thread."""
        made = shallow_copy(self)
        made._last = None
        return made

    def read(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # free it before reading the next one
            self._last = name, self._read(name)
        return self._last[1]

    def _read(self, name: str) -> Tensor:
        if name in self.others:
            return self.others[name].cpu()
        if name == "embed.types.weight" and name not in self.index:
            return torch.zeros(self.shapes[name])
        box = tuple((0, n) for n in self.index[name].shape)
        return save_load.read_box(self.directory, self.index, name, box)

    def stored(self, tensor: _Tensor) -> Tensor:
        """A tensor as it is written; casts round to nearest even."""
        RECORD.begin_op(tensor.link.theirs)  # a sign of progress for the watchdog
        link, whole = tensor.link, self.read(tensor.link.ours)
        if not link.runs or link.runs == (Run(0, 0, whole.shape[0]),):
            rows = whole
        elif len(link.runs) == 1 and link.runs[0].step == 1:
            rows = whole.narrow(0, link.runs[0].ours, link.runs[0].length)
        else:
            rows = whole.new_empty((sum(run.length for run in link.runs), *whole.shape[1:]))
            for run in link.runs:
                stop = run.theirs + (run.length - 1) * run.step + 1
                rows[run.theirs : stop : run.step] = whole[run.ours : run.ours + run.length]
        rows = rows.to(tensor.dtype)
        return (rows.mT if link.transposed else rows).reshape(link.shape).contiguous()


class _Merged(_Parameters):
    """Serial parameters of a LoRA run: the frozen weights from their files, with the adapters of a checkpoint added."""

    def __init__(self, directory: Path, index: Index, m: ModelConfig):
        super().__init__(directory, index, parameter_shapes(m))
        self.m = m
        self.weights = check_weights(m, again=True)
        self.dtype = torch.float64 if _trained_type(index) == "F64" else torch.float32

    def _read(self, name: str) -> Tensor:
        weight = torch.zeros(self.shapes[name], dtype=self.dtype)
        fill(self.weights, self.m, [save_load.holding_of(name, weight)])
        return merged(weight, name, self.m, super()._read)


def _write_safetensors(tensors: list[_Tensor], source: _Parameters, out: Path) -> None:
    """Write files of at most about 4 GiB, up to four at a time, and an index if there are several."""
    shards: list[list[_Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.bytes for t in shards[-1]) + tensor.bytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(tensor)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    names = ["model.safetensors"] if len(shards) == 1 else names
    in_threads(lambda job: _write_file(out / job[0], job[1], source.another()), list(zip(names, shards, strict=True)))
    if len(shards) > 1:
        where = {t.link.theirs: name for name, shard in zip(names, shards, strict=True) for t in shard}
        sizes = {"total_size": sum(t.bytes for t in tensors)}
        sizes["total_parameters"] = sum(math.prod(t.link.shape) for t in tensors)
        index = {"metadata": sizes, "weight_map": where}
        files.write_json(out / "model.safetensors.index.json", index, CheckpointError)


def _write_file(path: Path, tensors: list[_Tensor], source: _Parameters) -> None:
    """One safetensors file: 8 bytes of length, a JSON header, the tensors; wider types first, so that each is aligned."""
    spelled = {dtype: name for name, dtype in DTYPES.items()}
    tensors = sorted(tensors, key=lambda t: -t.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for t in tensors:
        place = [at, at := at + t.bytes]
        header[t.link.theirs] = {"dtype": spelled[t.dtype], "shape": list(t.link.shape), "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with files.create(path, CheckpointError) as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for t in tensors:
            f.write(source.stored(t).view(-1).view(torch.uint8).numpy().data)


class _LazyPlanner(DefaultSavePlanner):
    """A save plan of whole tensors, each computed when it is written."""

    def __init__(self, tensors: list[_Tensor], source: _Parameters):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.tensors, self.source = {t.link.theirs: t for t in tensors}, source

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, t in self.tensors.items():
            shape = torch.Size(t.link.shape)
            chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
            data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=t.dtype), size=shape)
            items.append(WriteItem(MetadataIndex(name, chunk.offsets, 0), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.source.stored(self.tensors[index.fqn])


def _write_dcp(tensors: list[_Tensor], source: _Parameters, out: Path) -> None:
    """A DCP folder with the tensors under the names of Hugging Face files."""
    try:
        dcp.save({}, storage_writer=dcp.FileSystemWriter(out), planner=_LazyPlanner(tensors, source), no_dist=True)
    except dcp.CheckpointException as e:
        raise CheckpointError(f"{out}: cannot be written: {next(iter(e.failures.values()))[0]}") from None


# ---- the model itself ----


def load_model(
    run: RunDir, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Transformer, int]:
    """The whole model of a run's newest checkpoint, on one device, and its step."""
    config, _ = run.read()
    directory = save_load.newest(run.checkpoints)
    if directory is None:
        raise CheckpointError(f"{run.path}: has no complete checkpoint yet")
    model = build_model(config.model)
    model.to(dtype).to_empty(device=device).tie()
    materialize_buffers(model, torch.device(device), dtype)
    if config.model.lora is not None:
        check_base(run.path / "hf", config.model, first=False)
    return model, fill_model(model, directory, config.model)


def find_checkpoint(path: str | Path) -> tuple[RunDir, Path]:
    """The run and the checkpoint that a path names: a run directory (its newest), or a checkpoint in one."""
    if is_url(str(path)):
        path = local_run(str(path))
    path = Path(path)
    if (path / "state.json").is_file() or path.name.startswith("step-"):
        run, directory = RunDir.find(path.resolve().parent.parent), path
    else:
        run = RunDir.find(path)
        url = run.read()[0].checkpoint.dir
        newest = save_load.newest(run.checkpoints) or (fetch_newest(url, run.checkpoints) if url else None)
        if newest is None:
            raise CheckpointError(f"{run.path}: has no complete checkpoint yet")
        directory = newest
    save_load.read_state(directory)  # raises if it is incomplete
    return run, directory


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise FileError(f"{out}: cannot be written: {files.why(e)}") from None


def check_out(out: Path) -> None:
    """A folder to write to: new, or empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder; choose another, or remove it first")
