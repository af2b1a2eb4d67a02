"""Serial tensors, and what a rank of a grid holds of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fourfold.config import ModelConfig
from fourfold.model.build import build_model, materialize_buffers, serial_model
from fourfold.model.transformer import Transformer
from fourfold.piece import Piece
from fourfold.tensor.grid import Axis, Grid
from fourfold.tensor.linear import GridSettings
from fourfold.tensor.swap import parallelize, pieces_of

GRIDS = [
    (1, 1, 1),
    (2, 1, 1),
    (1, 2, 1),
    (1, 1, 2),
    (1, 2, 2),
    (2, 2, 2),
    (1, 2, 4),
    (1, 4, 2),
    (4, 2, 1),
    (2, 1, 4),
    (2, 3, 1),
    (1, 1, 3),
]

BASE: dict[str, Any] = {"layers": 1, "hidden": 20, "heads": 4, "seq_len": 6, "vocab": 37}
CONFIGS = {
    "gpt": {"family": "gpt", **BASE, "ffn": 27},
    "gpt untied": {"family": "gpt", **BASE, "tie": False},
    "bert": {"family": "bert", **BASE, "token_types": 2},
    "llama": {"family": "llama", **BASE, "kv_heads": 2, "ffn": 27, "head_dim": 6, "qkv_bias": True, "qk_norm": True},
    "llama tied": {"family": "llama", **BASE, "kv_heads": 1, "head_dim": 4, "ffn": 24, "tie": True},
    "llama, 3 key heads": {"family": "llama", **BASE, "heads": 6, "kv_heads": 3, "head_dim": 4, "ffn": 25},
    "llama, 5 queries to a key": {"family": "llama", **BASE, "heads": 10, "kv_heads": 2, "head_dim": 2, "ffn": 25},
    "sandwich": {
        **{
            "family": "llama",
            **BASE,
            "layers": 2,
            "kv_heads": 2,
            "head_dim": 6,
            "ffn": 27,
            "tie": True,
            "qk_norm": True,
        },
        **{"block": "sandwich", "norm_plus_one": True, "windows": (3, 0), "attn_softcap": 2.0, "logit_softcap": 3.0},
        **{"embed_scale": 4.0, "activation": "gelu_tanh", "rope_local_theta": 50.0, "attn_scale": 0.3},
    },
    "output norms": {
        **{"family": "llama", **BASE, "layers": 2, "kv_heads": 2, "head_dim": 6, "ffn": 27, "qk_norm": "all"},
        **{"block": "output", "rope_layers": (False, True), "residual_scale": 0.5, "logit_scale": 2.0},
    },
    "parallel": {
        **{"family": "llama", **BASE, "norm": "layer", "norm_bias": True, "gated": False, "activation": "gelu"},
        **{"block": "parallel", "qkv_bias": True, "out_bias": True, "mlp_bias": True, "rope_dim": 2, "ffn": 27},
    },
    "parallel, one norm": {
        **{"family": "llama", **BASE, "norm": "layer", "kv_heads": 2, "head_dim": 6, "ffn": 27, "mlp_bias": True},
        **{"block": "parallel-shared", "qk_norm": "per-head", "windows": (4,), "residual_scale": 0.7},
    },
}


def config_of(name: str) -> ModelConfig:
    return ModelConfig(**CONFIGS[name]).resolve()


def slices(box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in box)


@torch.no_grad()
def fill(local: Tensor, pieces: tuple[Piece, ...], serial: Tensor) -> None:
    """Give a local parameter its parts of the serial one; padding is 0."""
    local.zero_()
    for p in pieces:
        local[slices(p.local_slice)] = serial[slices(p.global_slice)]


def gap(local: Tensor, pieces: tuple[Piece, ...], serial: Tensor) -> float:
    """Largest difference between a local tensor and its parts of the serial one; padding must be 0."""
    expected = torch.zeros_like(local)
    fill(expected, pieces, serial)
    return float((local - expected).abs().max()) if local.numel() else 0.0


def total_over(grad: Tensor, pieces: tuple[Piece, ...], grid: Grid, depth: Axis) -> Tensor:
    """What a unit's reduction makes of a gradient: the sum over the axes along which its parameter is copied."""
    copied = pieces[0].copies_over if pieces else ()
    for axis in (grid.row, grid.col):
        grad = axis.sum(grad) if axis.name in copied else grad
    return depth.sum(grad)


def restless_model(m: ModelConfig, seed: int = 0) -> Transformer:
    """A serial fp64 model with no bias 0 and no norm 1: nothing may hide behind its initial value."""
    model = serial_model(m, seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model


def on_grid(serial: Transformer, grid: Grid, **options: Any) -> tuple[Transformer, dict[str, tuple[Piece, ...]]]:
    """The model on a grid with the serial model's weights, and the pieces of its parameters by name."""
    m = serial.config
    model = build_model(m)
    parallelize(model, GridSettings(grid, m.seq_len, options.pop("tokens", 2 * m.seq_len), **options))
    model.tie()
    model.to(torch.float64)
    model.to_empty(device="cpu").tie()
    materialize_buffers(model, torch.device("cpu"), torch.float64)
    pieces: dict[str, tuple[Piece, ...]] = {}
    for name, module in model.units().items():
        pieces |= {f"{name}.{n}": p for n, p in pieces_of(module, name, grid).items()}
    theirs = dict(serial.named_parameters())
    for name, parameter in model.named_parameters():
        fill(parameter, pieces[name], theirs[name])
    return model, pieces
