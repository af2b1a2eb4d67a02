"""LoRA files: the frozen weights that a run adapts, and adapters in PEFT's format.

A checkpoint of a LoRA run has its adapters and their optimizer state, but not the frozen weights. `hf/base.json` in the run
directory lists the files of the frozen weights, with sizes and SHA-256, and the LoRA settings. Resuming, sampling and merging
require exactly these files.

A PEFT adapter is a folder:

    adapter_config.json          rank, alpha, names of the adapted layers, path of the weights; written last
    adapter_model.safetensors    base_model.model.<layer>.lora_A.weight [rank, inputs], ….lora_B.weight [outputs, rank]
    tokenizer and chat template  copied from the folder of the weights
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold import files
from fourfold.checkpoint import save_load
from fourfold.checkpoint.folder import describe
from fourfold.checkpoint.holdings import Holding, holding_of
from fourfold.checkpoint.weights import check_weights, fill, fill_by, open_file, weight_files
from fourfold.config import Config, LoraConfig, ModelConfig
from fourfold.errors import ConfigError, RunDirError
from fourfold.model.families import Family
from fourfold.model.lora import adapter_links, adapters, is_adapter, layer_names, target_names
from fourfold.model.transformer import Transformer

__all__ = [
    "adapter_config",
    "check_base",
    "check_lora",
    "fill_from_adapter",
    "fill_model",
    "is_adapter_folder",
    "merged",
    "open_adapter",
]

ADAPTER, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base.json"
THREADS = 4
CHANGES = (
    *("use_dora", "use_rslora", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication"),
    *("layers_to_transform", "trainable_token_indices", "target_parameters", "alora_invocation_tokens", "use_qalora"),
    *("use_bdlora", "arrow_config", "kasa_config", "monteclora_config", "velora_config", "ensure_weight_tying"),
)
"""Keys of adapter_config.json that change what an adapter computes and are not supported."""


def check_lora(config: Config) -> None:
    """Refuse LoRA without trained weights to adapt."""
    if config.model.lora is not None and config.model.init == "random":
        raise ConfigError(
            "[lora] adapts trained weights, but model.init = 'random' has none: name a folder with weights, model.hf = "
            '"FOLDER", or train all weights with lora.rank = 0'
        )


# ---- the weights that are adapted ----


def check_base(folder: Path, m: ModelConfig, *, first: bool) -> None:
    """Record the files of the frozen weights (`first`), or check that they are the recorded ones. `folder`: hf/ of the run."""
    with ThreadPoolExecutor(THREADS) as pool:  # hashing releases the GIL
        paths = weight_files(Path(m.init))
        found = {path.name: each for path, each in zip(paths, pool.map(describe, paths), strict=True)}
    assert m.lora is not None
    lora = {"rank": m.lora.rank, "scale": m.lora.scale, "layers": layer_names(m)}
    if first:
        folder.mkdir(exist_ok=True)
        record = {"folder": str(Path(m.init).resolve()), "files": found, "lora": lora}
        files.write_json(folder / BASE, record, RunDirError)
        return
    known = files.read_json(folder / BASE, RunDirError, follow=False)
    if not isinstance(known, dict) or not isinstance(known.get("files"), dict):
        raise RunDirError(f"{folder / BASE}: damaged; it records the weights that this run's adapters belong to")
    if known.get("lora") != lora:
        raise ConfigError(f"[lora] is {lora}, but this run was started with {known.get('lora')}; it cannot change")
    if known["files"] != found:
        other = sorted(n for n in {*known["files"], *found} if known["files"].get(n) != found.get(n))
        raise ConfigError(
            f"{m.init}: {other[0]} is not the file that this run adapts (its SHA-256 differs from that in {folder / BASE}, of "
            f"{known.get('folder')}); put that file back, or resume with the folder that has it: --model.init FOLDER"
        )


# ---- whole models ----


def fill_model(model: Transformer, directory: Path, m: ModelConfig, *, checksums: bool = True) -> int:
    """Fill a whole model from a checkpoint, and with LoRA from the files of its frozen weights; returns the step."""
    holdings = _holdings(model)
    if m.lora is not None:
        frozen = [h for h in holdings if not _of_adapter(h)]
        holdings = [h for h in holdings if _of_adapter(h)]
        fill(check_weights(m, again=True), m, frozen)
    step: int = save_load.load(directory, holdings, checksums=checksums)["step"]
    return step


def _holdings(model: Transformer) -> list[Holding]:
    return [holding_of(n, p) for n, p in model.named_parameters()]


def _of_adapter(holding: Holding) -> bool:
    return is_adapter(holding.layout.slots[0].name)


@torch.no_grad()
def merged(weight: Tensor, name: str, m: ModelConfig, read: Any) -> Tensor:
    """A serial parameter with its adapter merged: W + scale · B A. `read(name)` returns the adapter's parameters."""
    assert m.lora is not None
    unit, _, rest = name.rpartition(".")[0].rpartition(".")
    parts = adapters(m, unit).get(rest, ()) if name.endswith(".weight") else ()
    wide = torch.promote_types(weight.dtype, torch.float32)
    weight = weight.to(wide, copy=True)
    for k, part in enumerate(parts):
        a = read(f"{unit}.{rest}.adapter.a.weight")[k * m.lora.rank : (k + 1) * m.lora.rank].to(wide)
        b = read(f"{unit}.{rest}.adapter.b.{part.name}.weight").to(wide)
        weight[part.start : part.stop].addmm_(b, a, alpha=m.lora.scale)
    return weight


# ---- PEFT ----


def adapter_config(m: ModelConfig, family: Family) -> dict[str, Any]:
    """adapter_config.json of a (resolved) model."""
    assert m.lora is not None
    return {
        "peft_type": "LORA",
        "task_type": None if m.masked_lm else "CAUSAL_LM",
        "base_model_name_or_path": str(Path(m.init).resolve()),
        "r": m.lora.rank,
        "lora_alpha": m.lora.alpha or 2 * m.lora.rank,
        "lora_dropout": 0.0,
        "target_modules": target_names(m),
        "fan_in_fan_out": any(rule.transposed for rule in family.tensors),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "init_lora_weights": True,
        "inference_mode": True,
    }


def is_adapter_folder(path: Path) -> bool:
    return (path / ADAPTER).is_file()


def open_adapter(path: Path) -> tuple[ModelConfig, Path]:
    """The model that a PEFT adapter folder adapts, with its adapters, and the folder of its weights."""
    c = files.read_json(path / ADAPTER, ConfigError)
    if not isinstance(c, dict) or c.get("peft_type") != "LORA":
        raise ConfigError(f"{path / ADAPTER}: peft_type is not LORA; other adapters are not supported")
    if given := [key for key in CHANGES if c.get(key)]:
        raise ConfigError(f"{path / ADAPTER}: {given[0]} = {str(c[given[0]])[:80]} is not supported")
    if c.get("bias", "none") != "none":
        raise ConfigError(f"{path / ADAPTER}: bias = {c['bias']!r} is not supported; adapters without biases are")
    base, rank, alpha, targets = (c.get(n) for n in ("base_model_name_or_path", "r", "lora_alpha", "target_modules"))
    if not isinstance(base, str) or not Path(base).is_dir():
        raise ConfigError(
            f"{path / ADAPTER}: base_model_name_or_path = {base!r} is no folder here; write the path of the weights"
        )
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or not isinstance(targets, list):
        raise ConfigError(f"{path / ADAPTER}: r, lora_alpha and a list of target_modules are needed")
    m = ModelConfig(hf=base, seq_len=1).resolve()
    named = tuple(dict.fromkeys(_without_layer(str(t)) for t in targets))
    lora = LoraConfig(rank=rank, alpha=float(alpha), targets=named)
    return replace(m, lora=lora).resolve(), Path(base)


def _without_layer(target: str) -> str:
    """A layer's full name without its index, which matches all layers."""
    return ".".join("{i}" if part.isdigit() else part for part in target.split("."))


def fill_from_adapter(model: Transformer, path: Path, m: ModelConfig, family: Family) -> None:
    """Fill the adapters of a whole model from a PEFT folder."""
    source, expected = open_file(path / WEIGHTS), adapter_links(family, m)
    for link in expected:
        if link.theirs not in source.tensors or source.tensors[link.theirs][0] != link.shape:
            found = source.tensors.get(link.theirs, ("missing",))[0]
            raise ConfigError(f"{path / WEIGHTS}: {link.theirs} is {found}, but {list(link.shape)} in the model")
    fill_by(source, expected, [h for h in _holdings(model) if _of_adapter(h)])
