"""Folders of tiny random models, written by `transformers`: those that training reads (tests/families.py has every family).

[Note: large weights]
At their initial scale, weights hide mistakes: the wrong GELU moves logits by 5e-5. `make` adds noise to every parameter, norms and
biases included.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("tqdm").tqdm.monitor_interval = 0  # its thread would outlive the tests, which fork
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

VOCAB = 261
SIZES: dict[str, Any] = {
    **{"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"vocab_size": VOCAB, "max_position_embeddings": 64},
}
DECODER = SIZES | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "head_dim": 16, "rope_parameters": LLAMA3} | DECODER,
    "mistral": {"model_type": "mistral", "sliding_window": None} | DECODER,
    "qwen2": {"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}} | DECODER,
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True} | DECODER,
    "gpt2": {
        **{"model_type": "gpt2", "n_embd": 48, "n_inner": 80, "n_layer": 2, "n_head": 4, "n_positions": 64},
        **{"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2},
    },
    "bert": {"model_type": "bert"} | SIZES,
}
"""Config of a tiny model by name."""


def make(name: str, *, noise: float = 0.2, **changes: Any) -> nn.Module:
    """The model `name`, of the default dtype, in evaluation mode; [Note: large weights]."""
    torch.manual_seed(0)
    data = CONFIGS[name] | changes
    config = transformers.AutoConfig.for_model(**data)
    kind = transformers.AutoModelForMaskedLM if data["model_type"] == "bert" else transformers.AutoModelForCausalLM
    model: nn.Module = kind.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, dtype=torch.float32).to(p) * noise)
    return model.eval()


def save(model: Any, folder: Path, **changes: Any) -> Path:
    """Its folder, as transformers writes it; `changes` are of config.json."""
    model.save_pretrained(folder)
    if changes:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def tokens(count: int = 24) -> Tensor:
    return torch.randint(0, VOCAB, (2, count), generator=torch.Generator().manual_seed(1))
