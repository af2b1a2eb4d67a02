"""From a checkpoint to plain files: safetensors under the serial names, a few GiB at a time, without a process group."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from fourfold import schema
from fourfold.config import Config
from fourfold.errors import CheckpointError
from fourfold.model.build import build_model, materialize_buffers
from fourfold.model.transformer import Transformer
from fourfold.train import checkpoint
from fourfold.train.rundir import RunDir

__all__ = ["load_model", "write_final", "write_safetensors"]

SHARD_BYTES = 4 << 30


def write_final(run: RunDir, config: Config) -> None:
    """final/: the weights of the newest checkpoint as safetensors, with the config."""
    directory = checkpoint.newest(run.checkpoints)
    assert directory is not None
    write_safetensors(directory, run.final)
    schema.write_json(run.final / "config.json", config.to_dict())


def write_safetensors(directory: Path, out: Path) -> None:
    """The model's tensors of a checkpoint, fp32 or fp64 as trained, in files of at most about 4 GiB and an index."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, (shape, dtype) in checkpoint.tensor_types(directory).items():
        if name.startswith("optim."):
            continue
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    out.mkdir(exist_ok=True)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    names = ["model.safetensors"] if len(shards) == 1 else names
    for file, wanted in zip(names, shards, strict=True):
        save_file(_read(directory, wanted), out / file)
    if len(shards) > 1:
        where = {name: file for file, wanted in zip(names, shards, strict=True) for name in wanted}
        schema.write_json(out / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})


def _read(directory: Path, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors = {name: torch.empty_like(meta, device="cpu") for name, meta in wanted.items()}
    checkpoint.load(directory, [checkpoint.holding_of(n, t) for n, t in tensors.items()], check=False)
    return tensors


def load_model(run: RunDir, dtype: torch.dtype = torch.float32) -> tuple[Transformer, int]:
    """The model of a run's newest checkpoint, whole, on the CPU; and its step."""
    config, _ = run.read()
    directory = checkpoint.newest(run.checkpoints)
    if directory is None:
        raise CheckpointError(f"{run.path}: has no complete checkpoint yet")
    model = build_model(config.model)
    model.to(dtype).to_empty(device="cpu").tie()
    materialize_buffers(model, torch.device("cpu"), dtype)
    state = checkpoint.load(directory, [checkpoint.holding_of(n, p) for n, p in model.named_parameters()])
    return model, state["step"]
