"""A model from its config, and initial weights as a function of (seed, parameter name, piece).

[Note: initial weights]
Element i (row-major index in the serial parameter) of a matrix is a function of (seed, name, i) alone: a 64-bit hash of
them, read as four 16-bit numbers whose sum, centred and scaled, is close to normal (standard deviation 1, truncated at 3.46).
All but the last two operations are integer arithmetic, and those two are correctly rounded in fp64. So any rank can compute any
piece on any device without the rest of the tensor, bit-identically. Norm weights are initialised to 1, biases to 0. An adapter's
(LoRA) A is uniform in ±1/sqrt(inputs), as in PEFT, and its B is 0.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from fourfold.config import ModelConfig
from fourfold.model.adapter import adapt
from fourfold.model.layers import Rotary
from fourfold.model.lora import is_adapter
from fourfold.model.transformer import Transformer
from fourfold.piece import Box, Piece, shape_of, whole

__all__ = ["build_model", "fill_initial", "initial_std", "materialize_buffers", "serial_model"]


def build_model(m: ModelConfig) -> Transformer:
    """The model on the meta device: shapes and names, no storage."""
    with torch.device("meta"):
        return adapt(Transformer(m))


def serial_model(
    m: ModelConfig, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Transformer:
    """The whole model in one process with its initial weights."""
    device = torch.device(device)
    model = build_model(m)
    model.to(dtype).to_empty(device=device).tie()
    materialize_buffers(model, device, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill_initial(parameter, whole(name, tuple(parameter.shape)), m, seed)
    return model


def materialize_buffers(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Allocate and compute the buffers, such as rotary tables."""
    for child in module.modules():
        if isinstance(child, Rotary):
            child.materialize(device, dtype)


def initial_std(name: str, m: ModelConfig) -> float:
    """Standard deviation of a matrix's initial elements."""
    back_to_residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
    return m.init_std / math.sqrt(2 * m.layers) if back_to_residual else m.init_std


@torch.no_grad()
def fill_initial(local: Tensor, piece: Piece, m: ModelConfig, seed: int) -> None:
    """Write the initial values of `piece` to its slice of the local parameter."""
    target = local[tuple(slice(a, b) for a, b in piece.local_slice)]
    leaf = piece.name.rpartition(".")[2]
    if leaf == "bias":
        target.zero_()
    elif len(piece.global_shape) == 1:
        target.fill_(0 if m.norm_plus_one else 1)
    elif is_adapter(piece.name) and ".adapter.b." in piece.name:
        target.zero_()
    else:
        make, scale = _normal, initial_std(piece.name, m)
        if is_adapter(piece.name):
            make, scale = _uniform, piece.global_shape[1] ** -0.5
        for rows in _chunks(piece.global_slice, 1 << 16 if local.device.type == "cpu" else 1 << 24):
            start = rows[0][0] - piece.global_slice[0][0]
            values = make(seed, piece.name, piece.global_shape, rows, local.device)
            target[start : start + values.shape[0]].copy_(values.mul_(scale))


def _chunks(box: Box, elements: int) -> list[Box]:
    """The box cut along its first dim into boxes of about `elements` elements, to bound temporaries."""
    (start, stop), *rest = box
    rows = max(1, elements // max(1, math.prod(b - a for a, b in rest)))
    return [((a, min(a + rows, stop)), *rest) for a in range(start, stop, rows)]


def _normal(seed: int, name: str, shape: tuple[int, ...], box: Box, device: torch.device) -> Tensor:
    """Standard normal values, fp64, of the elements `box` of a tensor of `shape`: [Note: initial weights]."""
    bits = _bits(seed, name, shape, box, device)
    pairs = ((bits >> 16) & 0x0000FFFF0000FFFF).add_(bits.bitwise_and_(0x0000FFFF0000FFFF))
    total = (pairs >> 32).add_(pairs & 0xFFFFFFFF)
    assert total.shape == shape_of(box)
    return total.double().sub_(131070.0).mul_(math.sqrt(3 / (2**32 - 1)))


def _uniform(seed: int, name: str, shape: tuple[int, ...], box: Box, device: torch.device) -> Tensor:
    """The same, uniform between -1 and 1."""
    bits = _bits(seed, name, shape, box, device)
    return (bits >> 11).double().mul_(2.0**-52)  # 53 bits with their sign


def _bits(seed: int, name: str, shape: tuple[int, ...], box: Box, device: torch.device) -> Tensor:
    """64 pseudo-random bits per element."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little", signed=True)
    index = torch.zeros((), dtype=torch.int64, device=device)
    for (a, b), stride in zip(box, _strides(shape), strict=True):
        index = index[..., None] + torch.arange(a, b, dtype=torch.int64, device=device) * stride
    return _mix(index.mul_(_signed(0x9E3779B97F4A7C15)).add_(key))


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64: every input bit changes half of the output bits. In place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)  # >> is arithmetic: mask the copied sign bits
        x *= _signed(factor)
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]
