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
    assert traced.flops_per_token == pytest.approx(ours.flops_per_token)
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
    (folder / "mine.json").write_text(json.dumps(HF))
    assert ModelSpec.from_hf(folder / "mine.json").name == "mine"


GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 96, "n_positions": 128}
EXPERTS = "a mixture of experts is not supported"


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (GPT2, {"n_embd": "768"}, "n_embd = '768' must be a whole number"),
        (GPT2, {"n_embd": None}, "n_embd = null must be a whole number"),
        (GPT2, {"n_embd": 0}, "n_embd = 0 must be a whole number from 1"),
        (GPT2, {"n_head": 0}, "n_head = 0 must be"),
        (GPT2, {"n_head": 7}, "n_head = 7 does not divide n_embd = 64; the nearest that does is 8"),
        (GPT2, {"n_positions": 0}, "n_positions = 0 must be"),
        (GPT2, {"n_positions": None}, "n_positions = null must be"),
        (GPT2, {"n_layer": True}, "n_layer = True must be"),
        (GPT2, {"n_layer": 100_000}, "n_layer = 100000 must be a whole number from 1 to 10000"),
        (GPT2, {"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no' must be true or false"),
        (HF, {"num_key_value_heads": 0}, "num_key_value_heads = 0 must be"),
        (HF, {"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide num_attention_heads = 4"),
        (HF, {"rope_theta": -1}, "rope_theta = -1 must be a number above 0"),
        (HF, {"rope_scaling": "llama3"}, "rope_scaling = 'llama3' must be a table"),
        (HF, {"rope_scaling": {"type": "linear"}}, "factor is missing"),
        (HF, {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor = '2' must be a number"),
        (HF, {"model_type": "mixtral"}, f"Mixtral (model_type 'mixtral'): {EXPERTS}"),
        (HF, {"model_type": "qwen3_moe"}, f"Qwen 3 MoE (model_type 'qwen3_moe'): {EXPERTS}"),
        (HF, {"model_type": "deepseek_v3"}, "a mixture of experts, latent attention and FP8 weights are not supported"),
        (HF, {"model_type": "gemma2"}, "sliding-window attention and soft-capping of logits are not supported"),
        (HF, {"model_type": "other", "num_experts": 8}, f"num_experts = 8: {EXPERTS}"),
        (HF, {"model_type": "other"}, "model_type 'other' is not supported; known: gpt2, bert"),
        (HF, {"num_experts_per_tok": 2}, EXPERTS),
        (HF, {"moe_intermediate_size": 64}, EXPERTS),
        (HF, {"quantization_config": {"quant_method": "fp8"}}, "FP8 weights are not supported"),
        (HF, {"quantization_config": {"bits": 4}}, "quantization_config: quantized weights are not supported"),
        (HF, {"compression_config": {"quant_method": "gptq"}}, "quantized weights are not supported"),
        (HF, {"torch_dtype": "float8_e4m3fn"}, "torch_dtype = 'float8_e4m3fn': FP8 weights are not supported"),
        (HF, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: rotary positions on a part"),
        (HF, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention is not supported"),
        (HF, {"sliding_window": 64}, "sliding_window = 64 is shorter than the sequence of 4096 tokens"),
        (HF, {"sliding_window": 64, "model_type": "mistral"}, "use sequences of at most 64"),
    ],
)
def test_hugging_face_files_that_ask_for_more_or_nonsense(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(base | change))
    with pytest.raises(ConfigError) as e:
        ModelSpec.from_hf(tmp_path)
    assert message in str(e.value)
    assert "did you mean" not in str(e.value)


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 4096},
        {"sliding_window": 64, "use_sliding_window": False, "model_type": "qwen2"},
        {"sliding_window": None, "layer_types": ["full_attention"] * 4, "model_type": "qwen3"},
        {"partial_rotary_factor": 1.0, "rope_scaling": None, "head_dim": None, "num_experts": 0},
    ],
)
def test_hugging_face_files_that_only_look_so(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF | change))
    assert ModelSpec.from_hf(tmp_path).layers == 6
