"""Defaults of `fourfold train FOLDER --data FILE`: fine-tuning of a Hugging Face model, without a config file.

    learning rate     1e-5, or 2e-4 with LoRA (--lora.rank 16); 3 % of the steps warm-up, cosine to a tenth; no weight decay
    sequences         the longest example, rounded up to 64 tokens, at most 2048 and at most the model's positions
    batch             16 sequences, or the number of samples if that is less
    steps             up to 3 epochs, at most 1000 steps, but at least one epoch

Flags override each of them.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from fourfold.config import CheckpointConfig, Config, DataConfig, LogConfig, ModelConfig, OptimConfig, TrainConfig
from fourfold.errors import ConfigError
from fourfold.model.hf import hf_file

__all__ = ["fit_to_data", "folder_config", "is_model_folder"]

LR = 1e-5
LORA_LR = 2e-4
WARMUP = 0.03
LONGEST = 2048
BATCH = 16
EPOCHS = 3
FEW_STEPS = 1000


def is_model_folder(path: str | None) -> bool:
    """Whether a path names a Hugging Face folder and not a config file of ours."""
    return path is not None and Path(path).is_dir() and (Path(path) / "config.json").is_file() and bool(hf_file(path))


def folder_config(path: str) -> Config:
    """The defaults that do not depend on the data; sizes that do are left at 0 and 1."""
    name = Path(path).resolve().name
    return Config(
        model=ModelConfig(hf=path),
        data=DataConfig(source=""),
        optim=OptimConfig(lr=LR, weight_decay=0.0, decay="cosine", final_lr=0.1),
        train=TrainConfig(steps=1, global_batch=1, run_dir=f"runs/{name}"),
        checkpoint=CheckpointConfig(),
        log=LogConfig(),
    )


def fit_to_data(config: Config, given: tuple[str, ...]) -> tuple[Config, str]:
    """Set sequence length, batch and steps from the data, unless flags give them; also returns a line about them."""
    from fourfold.train.objective import open_run

    if not config.data.source and not config.data.sources:
        raise ConfigError("what to train on? Give --data FILE: text, JSONL, chats, a token file, or a folder of text")
    given = tuple(name.replace("-", "_") for name in given)
    if config.lora.rank and "optim.lr" not in given:
        config = _with(config, optim={"lr": LORA_LR})
    positions = dataclasses.replace(config.model, seq_len=1).resolve().positions
    if not config.model.seq_len:
        config = _with(config, model={"seq_len": _seq_len(config, min(LONGEST, positions))})
    samples, *_ = open_run(_with(config, train={"steps": 1, "global_batch": 1}, optim={"warmup": 0}).resolve())
    batch = config.train.global_batch
    if "train.global_batch" not in given:
        batch = max(config.sequences_together, min(BATCH, 1 << (samples.count.bit_length() - 1)))
    epoch = math.ceil(samples.count / batch)
    epochs = max(1, min(EPOCHS, FEW_STEPS // epoch))
    steps = config.train.steps if "train.steps" in given else math.ceil(epochs * samples.count / batch)
    warmup = config.optim.warmup if "optim.warmup" in given else math.ceil(WARMUP * steps) if steps > 1 else 0
    config = _with(config, train={"steps": steps, "global_batch": batch}, optim={"warmup": warmup})
    passes = f"{steps * batch / samples.count:.2g} epochs"
    return (
        config,
        f"lr {config.optim.lr:g}, {passes} of {samples.count} samples; change it with --optim.lr, --train.steps",
    )


def _seq_len(config: Config, most: int) -> int:
    """Tokens of the longest example, at most `most`; for plain text, of the whole text."""
    import numpy as np

    from fourfold.data.encode import Encoding
    from fourfold.data.samples import open_corpus

    data = _with(config, train={"steps": 1}, optim={"warmup": 0}, model={"seq_len": 1}).resolve().data
    corpus = open_corpus(
        data.mixture()[0], data.tokenizer, Encoding(data.tokenizer, data.template, data.template_date, data.loss_on)
    )
    whole = data.packing in ("none", "documents") or (data.packing == "auto" and corpus.prompted)
    tokens = len(corpus.tokens) - 1
    if whole and corpus.starts is not None:
        tokens = math.ceil(int(np.diff(np.asarray(corpus.starts, np.int64)).max()) / 64) * 64
    return max(1, min(most, tokens))


def _with(config: Config, **sections: dict[str, Any]) -> Config:
    changed = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in sections.items()}
    return dataclasses.replace(config, **changed)
