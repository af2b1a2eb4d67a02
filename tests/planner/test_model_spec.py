"""Model specs: what the planner counts against what the real modules have and save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.config import ModelConfig
from fourfold.errors import ConfigError
from fourfold.model.build import build_model, serial_model
from fourfold.model.operators import ModelSpec
from fourfold.model.spec import flops_per_token, parameter_count
from fourfold.runtime.stage import Link, Stage


def config(family: Any) -> ModelConfig:
    more: dict[str, Any] = {"kv_heads": 2} if family == "llama" else {}
    return ModelConfig(family=family, layers=2, hidden=64, heads=4, ffn=160, vocab=96, seq_len=32, **more).resolve()


class _Unit:
    def __init__(self, module: nn.Module):
        self.module = module

    def need(self) -> None: ...
    def lends_grads(self) -> bool:
        return False

    def accumulate(self, grads: Any) -> None: ...
    def add_weight_grad(self, name: str, x: Tensor, dy: Tensor) -> None: ...

    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())


def saved_bytes(model: Any, name: str, module: nn.Module, dtype: torch.dtype, recompute: Any) -> int:
    """Bytes of storages that a link keeps of two sequences, parameters and tables left out."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    tokens = torch.zeros(2, 32, dtype=torch.long)
    value = tokens if name == "embed" else torch.randn(2, 32, 64, dtype=dtype)
    stage = Stage([Link(name, _Unit(module), module, recompute)])
    found: dict[int, int] = {value.untyped_storage().data_ptr(): value.nbytes}
    alive = []

    def pack(t: Tensor) -> Tensor:
        alive.append(t)
        if t.untyped_storage().data_ptr() not in own:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        stage.forward(0, value, (tokens,) if name == "head" else ())
    return sum(found.values())


@pytest.mark.parametrize("family", ["gpt", "llama", "bert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_bytes_are_those_of_the_real_modules(family: str, dtype: torch.dtype) -> None:
    from fourfold.cluster import Cluster
    from fourfold.plan import Precision
    from fourfold.planner.layout import Setting
    from fourfold.planner.units import _bytes

    m = config(family)
    spec, model = ModelSpec.from_config(m), serial_model(m, 0, dtype=dtype)
    compute: Any = "fp32" if dtype == torch.float32 else "bf16"
    setting = Setting(spec, Cluster.local(1), 2, Precision(compute=compute))
    for unit in spec.units:
        module = model.units()[unit.name]
        for recompute in ("none", "full"):
            want = saved_bytes(model, unit.name, module, dtype, recompute)
            have = _bytes(setting, unit.saved[recompute], unit, recompute) * 64
            if unit.name == "head":  # the targets are handed over beside the input, also where all is recomputed
                want = max(want, 64 * 64 * dtype.itemsize + 64 * 8) if recompute == "full" else want
            assert have == pytest.approx(want, rel=0.012), (unit.name, recompute)


@pytest.mark.parametrize("family", ["gpt", "llama", "bert"])
def test_parameters_and_flops(family: str) -> None:
    m = config(family)
    spec = ModelSpec.from_config(m)
    assert spec.parameters == parameter_count(m)
    assert spec.flops_per_token == pytest.approx(flops_per_token(m))
    assert [u.name for u in spec.units] == list(build_model(m).units())
    assert len(spec.kinds) == 4  # alike units are counted once


def test_any_module_on_meta() -> None:
    m = config("gpt")
    ours = ModelSpec.from_config(m)
    ids = torch.zeros(2, 32, dtype=torch.long)
    traced = ModelSpec.from_module(build_model(m), (ids, ids))
    assert traced.parameters == ours.parameters
    assert (traced.seq_len, traced.hidden, traced.layers) == (32, 64, 4)
    assert traced.flops_per_token == pytest.approx(ours.flops_per_token, rel=0.05)  # attention here is not causal
    assert len(traced.kinds) == 3
    block = traced.units[1]
    assert block.saved["full"].narrow == 64
    assert block.saved["none"].narrow > 6 * 64


def test_modules_that_cannot_be_cut() -> None:
    with pytest.raises(ConfigError, match="no list of layers"):
        ModelSpec.from_module(nn.Linear(4, 4), torch.zeros(2, 3, 4))
    with pytest.raises(ConfigError, match="the sample must hold a tensor"):
        ModelSpec.from_module(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ())


HF = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 96,
    "max_position_embeddings": 8192,
}


def test_hugging_face_files(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HF))
    spec = ModelSpec.from_hf(folder, seq_len=128)
    assert (spec.name, spec.seq_len, spec.layers) == ("tiny", 128, 6)
    assert ModelSpec.from_hf(folder).seq_len == 4096
    for bad in (
        {"num_experts": 8},
        {"sliding_window": 64, "model_type": "mistral"},
        {"quantization_config": {"fp8": 1}},
    ):
        (folder / "config.json").write_text(json.dumps(HF | bad))
        with pytest.raises(ConfigError, match="is not supported"):
            ModelSpec.from_hf(folder)
