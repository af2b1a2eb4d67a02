"""Models: their shapes are what the spec says, and initial weights are a function of (seed, name, piece)."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.config import ModelConfig, RopeScaling
from fourfold.errors import ConfigError
from fourfold.model.build import build_model, fill_initial, serial_model
from fourfold.model.layers import IGNORE, Rotary
from fourfold.model.spec import flops_per_token, parameter_count, parameter_shapes, unit_names
from fourfold.piece import Piece

KINDS: list[dict[str, Any]] = [
    {"family": "gpt"},
    {"family": "gpt", "tie": False},
    {"family": "bert"},
    {"family": "bert", "token_types": 2},
    {"family": "llama", "heads": 4, "kv_heads": 2},
    {"family": "llama", "heads": 4, "kv_heads": 1, "head_dim": 20, "qkv_bias": True, "qk_norm": True, "tie": True},
    {"family": "llama", "block": "sandwich", "norm_plus_one": True, "windows": (5, 0), "attn_softcap": 2.0},
    {"family": "llama", "block": "output", "qk_norm": "all", "rope_layers": (True, False), "residual_scale": 0.5},
    {"family": "llama", "block": "parallel", "norm": "layer", "norm_bias": True, "gated": False, "rope_dim": 4},
    {"family": "llama", "block": "parallel-shared", "norm": "layer", "qk_norm": "per-head", "logit_softcap": 3.0},
]


def model_config(**fields: Any) -> ModelConfig:
    return ModelConfig(**{"layers": 2, "hidden": 64, "seq_len": 16, "vocab": 99, "heads": 4} | fields).resolve()


@pytest.mark.parametrize("kind", KINDS)
def test_modules_have_the_shapes_of_the_spec(kind: dict[str, Any]) -> None:
    m = model_config(**kind)
    model = build_model(m)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == parameter_shapes(m)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(m)
    assert list(model.units()) == unit_names(m)
    grouped = {f"{u}.{n}" for u, module in model.units().items() for n, _ in module.named_parameters()}
    assert grouped - {"head.proj.weight"} == set(parameter_shapes(m)) - {"head.proj.weight"}


def test_known_sizes() -> None:
    gpt2 = model_config(family="gpt", layers=12, hidden=768, heads=12, seq_len=1024, vocab=50257)
    assert parameter_count(gpt2) == 124_439_808
    llama = model_config(
        family="llama", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, seq_len=4096
    )
    assert parameter_count(llama) == 8_030_261_248


def test_flops_match_what_torch_counts() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    m = model_config(family="bert", tie=True)
    model = serial_model(m, 0)
    tokens = torch.zeros(3, m.seq_len, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # the fused kernel is not counted
        model(tokens, tokens).backward()
    assert counter.get_total_flops() == flops_per_token(m) * tokens.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_units_one_after_the_other_are_the_model(kind: dict[str, Any]) -> None:
    model = serial_model(model_config(**kind), 0)
    tokens = torch.randint(0, 99, (2, 16))
    x = tokens
    for module in model.units().values():
        x = module(*x) if isinstance(x, tuple) else module(x)
    assert torch.equal(x, model(tokens))


def test_targets_to_ignore_count_for_nothing() -> None:
    model = serial_model(model_config(family="gpt"), 0)
    tokens = torch.randint(0, 99, (1, 16))
    targets = tokens.roll(-1, 1)
    whole = model(tokens, targets)
    targets[:, 8:] = IGNORE
    part = model(tokens[:, :8], targets[:, :8])
    assert torch.allclose(model(tokens, targets), part)
    assert part < whole


def test_causal_models_do_not_see_ahead_and_bert_does() -> None:
    for family, sees in (("gpt", False), ("llama", False), ("bert", True)):
        model = serial_model(model_config(family=family), 0)
        a = torch.randint(0, 99, (1, 16))
        b = a.clone()
        b[0, -1] = (b[0, -1] + 1) % 99
        assert torch.allclose(model(a)[0, 0], model(b)[0, 0]) is not sees


def test_every_token_is_of_the_first_type() -> None:
    model, plain = (
        serial_model(model_config(family="bert", token_types=types), 0, dtype=torch.float64) for types in (2, 0)
    )
    with torch.no_grad():
        plain.embed.positions.weight += model.embed.types.weight[0]
    tokens = torch.randint(0, 99, (2, 16))
    losses = [m(tokens, tokens) for m in (model, plain)]
    assert torch.allclose(*losses)
    grads = [
        torch.autograd.grad(loss, m.embed.positions.weight)[0] for m, loss in zip((model, plain), losses, strict=True)
    ]
    assert torch.allclose(*grads)
    (types,) = torch.autograd.grad(model(tokens, tokens), model.embed.types.weight)
    assert torch.allclose(types[0], grads[0].sum(0))
    assert (types[1] == 0).all()


def test_token_types_are_of_bert() -> None:
    with pytest.raises(ConfigError, match="model.token_types is a field of family 'bert'; found family 'gpt'"):
        model_config(family="gpt", token_types=2)
    with pytest.raises(ConfigError, match="model.token_types = -1 must be at least 0"):
        model_config(family="bert", token_types=-1)


# ---- initial weights ----


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_piece_is_a_part_of_the_whole(data: st.DataObject) -> None:
    m = model_config(family="llama")
    shape = (24, 40)
    name = data.draw(st.sampled_from(["embed.tokens.weight", "blocks.0.mlp.down.weight"]))
    box = tuple(tuple(sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape)
    full = torch.empty(shape, dtype=torch.float64)
    fill_initial(full, Piece(name, shape, ((0, 24), (0, 40)), ((0, 24), (0, 40))), m, seed=7)
    rows, cols = (b - a for a, b in box)
    local = torch.full((rows + 2, cols + 1), 9.0, dtype=torch.float64)
    fill_initial(local, Piece(name, shape, box, ((1, 1 + rows), (1, 1 + cols))), m, seed=7)  # type: ignore[arg-type]
    assert torch.equal(local[1 : 1 + rows, 1:], full[box[0][0] : box[0][1], box[1][0] : box[1][1]])
    assert (local[0] == 9).all()
    assert (local[-1] == 9).all()
    assert (local[:, 0] == 9).all()


def test_initial_values_are_close_to_normal_and_differ_by_seed_and_name() -> None:
    m = model_config(family="gpt", hidden=512, heads=8, vocab=512)
    model = serial_model(m, 1, dtype=torch.float64)
    w = model.embed.tokens.weight / m.init_std
    assert abs(w.mean()) < 0.01
    assert abs(w.std() - 1) < 0.01
    assert abs((w**4).mean() - 2.7) < 0.03  # a sum of four uniforms; the normal distribution has 3
    assert abs(torch.corrcoef(w[:2])[0, 1]) < 0.15
    out = model.blocks[0].attn.out.weight
    assert abs(out.std() * math.sqrt(2 * m.layers) / m.init_std - 1) < 0.01
    assert (model.blocks[0].attn.norm.weight == 1).all()
    assert (model.blocks[0].attn.qkv.bias == 0).all()
    other = serial_model(m, 2, dtype=torch.float64)
    assert not torch.equal(other.embed.tokens.weight, model.embed.tokens.weight)
    assert not torch.equal(model.blocks[0].mlp.up.weight, model.blocks[1].mlp.up.weight)
    narrow = serial_model(m, 1, dtype=torch.float32)
    assert torch.equal(narrow.embed.tokens.weight, model.embed.tokens.weight.float())


# ---- rotary embedding ----


def table(scaling: RopeScaling | None) -> Rotary:
    rotary = Rotary(16, 64, 10000.0, scaling)
    rotary.materialize(torch.device("cpu"), torch.float64)
    return rotary


def test_rotary_makes_scores_depend_on_distance_alone() -> None:
    rotary = table(None)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    rotated_q, rotated_k = (rotary(t.expand(1, 1, 64, 16)) for t in (q, k))
    scores = (rotated_q @ rotated_k.transpose(-1, -2))[0, 0]
    for distance in (1, 5, 20):
        diagonal = scores.diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal))


def test_rotary_scaling() -> None:
    plain, linear = table(None), table(RopeScaling(kind="linear", factor=4.0))
    assert torch.allclose(linear.cos[4 * 3], plain.cos[3])
    llama = table(RopeScaling(kind="llama3", factor=8.0, original_positions=32))
    assert torch.allclose(llama.cos[:, 0], plain.cos[:, 0])  # the fastest pair is kept
    assert torch.allclose(llama.cos[8, 7], plain.cos[1, 7])  # the slowest is stretched by the factor
    yarn = table(RopeScaling(kind="yarn", factor=8.0, original_positions=32))
    scale = 0.1 * math.log(8.0) + 1
    assert torch.allclose(yarn.cos[:, 0], scale * plain.cos[:, 0])
    assert torch.allclose(yarn.cos[8, 7], scale * plain.cos[1, 7])


# ---- Hugging Face configs ----

LLAMA31 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}


def write(path: Path, data: dict[str, Any]) -> str:
    path.write_text(json.dumps(data))
    return str(path)


def test_hugging_face_config(tmp_path: Path) -> None:
    m = ModelConfig(hf=write(tmp_path / "config.json", LLAMA31), seq_len=4096).resolve()
    assert parameter_count(m) == 8_030_261_248
    assert m.rope_scaling is not None
    assert m.rope_scaling.kind == "llama3"
    assert m.resolve() == m  # the resolved config no longer needs the file
    assert m.hf is None
    assert (
        ModelConfig(hf=str(tmp_path), seq_len=64, layers=2).resolve().layers == 2
    )  # a field given with it overrides it


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "a mixture of experts is not supported"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"sliding_window": 16}, "models of type 'llama' have no windows"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "rope_scaling of type 'longrope' needs short_factor"),
        ({"hidden_size": None}, "hidden"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    data = {k: v for k, v in (LLAMA31 | change).items() if v is not None}
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        ModelConfig(hf=write(tmp_path / "config.json", data), seq_len=64).resolve()


def test_resolving_twice_changes_nothing() -> None:
    for kind in KINDS:
        m = model_config(**kind)
        assert m.resolve() == m
        assert dataclasses.replace(m, ffn=m.ffn) == m


@pytest.mark.parametrize("family", ["gpt", "llama", "bert"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recomputation_leaves_the_last_product_out(family: str, dropout: float) -> None:
    """`again` has the graph of `forward`, bit for bit, with one matmul less (bert's norm comes after it: all are computed)."""
    m = ModelConfig(family=family, layers=1, hidden=32, heads=4, vocab=64, seq_len=8, dropout=dropout).resolve()
    block = serial_model(m, 0).blocks[0]
    x, dy = torch.randn(2, 8, 32, requires_grad=True), torch.randn(2, 8, 32)
    for part in (block.attn, block.mlp):
        found = []
        for run in (part, part.again):
            torch.manual_seed(1)
            with _CountProducts() as count:
                y = run(x)
            found.append((count.products, torch.autograd.grad(y, [x, *part.parameters()], dy)))
        (before, whole), (after, again) = found
        assert after == before - (0 if family == "bert" else 1)
        assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


class _CountProducts(TorchDispatchMode):
    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))
