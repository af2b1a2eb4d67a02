"""The contestants of benchmarks/tensor: the four linears of a transformer layer, split over ranks in every way that is compared.

    q = first third of x Wqkv      y = ((q Wout) Wup) Wdown      x, y [T, h]
    Wqkv [3h, h], Wout [h, h], Wup [4h, h], Wdown [h, 4h]

Attention, norms, biases and activations are left out: they are the same work everywhere. One micro-batch a step, whose
gradients are summed over all copies. Each contestant holds its share of everything, computes `forward()` and `step()`, and
reports by `worst()` how far its results of the last step are from those of one process.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch._dynamo  # DTensor and FSDP2 would import it, in every rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fourfold import collectives
from fourfold.shard.sharing import Sharing
from fourfold.shard.unit import Unit
from fourfold.tensor.blocks import even, fuse
from fourfold.tensor.flows import Matmul, Whole
from fourfold.tensor.grid import Axis, Grid, PendingTensor
from fourfold.tensor.late import GradientSums, WeightPrefetch
from fourfold.tensor.linear import ActivationLayout, GridLinear, GridSettings

__all__ = ["GridLayer", "Groups", "OneDimension", "Options", "Serial", "Shape", "TorchLayer", "replace_products"]

Degrees = tuple[int, int, int]


class Shape(NamedTuple):
    """Tokens of a step, and hidden size."""

    tokens: int
    hidden: int

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        h = self.hidden
        return {"qkv": (3 * h, h), "out": (h, h), "up": (4 * h, h), "down": (h, 4 * h)}

    @property
    def weights(self) -> int:
        return sum(a * b for a, b in self.linears.values())


class Serial:
    """The layer in one process: fp64, real products."""

    def __init__(self, shape: Shape):
        draw = torch.Generator().manual_seed(0)
        self.weights = {
            n: torch.randn(s, generator=draw, dtype=torch.float64) / s[1] ** 0.5 for n, s in shape.linears.items()
        }
        self.x = torch.randn(*shape, generator=draw, dtype=torch.float64)
        self.dy = torch.randn(*shape, generator=draw, dtype=torch.float64)
        w = {n: v.requires_grad_() for n, v in self.weights.items()}
        x = self.x.requires_grad_()
        q = F.linear(x, w["qkv"])[:, : shape.hidden]
        self.y = F.linear(F.linear(F.linear(q, w["out"]), w["up"]), w["down"])
        self.y.backward(self.dy)


class Groups:
    """Process groups of ranks with a stride; each family of lines is made once, by all ranks in the same order."""

    def __init__(self, rank: int, ranks: int):
        self.rank, self.ranks = rank, ranks
        self._made: dict[tuple[int, int], dist.ProcessGroup] = {}

    def line(self, size: int, stride: int) -> tuple[int, dist.ProcessGroup | None]:
        """This rank's place in its line, and the line's group; None for one rank."""
        index = self.rank // stride % size
        if size > 1 and (size, stride) not in self._made:
            first = self.rank - index * stride
            members = [first + i * stride for i in range(size)]
            self._made[size, stride] = dist.new_group(members, use_local_synchronization=True)
        return index, self._made.get((size, stride)) if size > 1 else None

    @functools.cache  # noqa: B019
    def mesh(self, data: int, tensor: int) -> DeviceMesh:
        """For torch's own."""
        return init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))


def replace_products(rate: float = 0.0) -> None:
    """From now on matrix products are zeros, which take FLOPs / `rate` seconds by sleeping (0: none)."""

    def product(flops: int, *shape: int, like: Tensor) -> Tensor:
        if rate:
            time.sleep(flops / rate)
        return like.new_zeros(shape)

    def mm(a: Tensor, b: Tensor) -> Tensor:
        return product(2 * a.shape[0] * a.shape[1] * b.shape[1], a.shape[0], b.shape[1], like=a)

    def bmm(a: Tensor, b: Tensor) -> Tensor:
        return product(2 * a.numel() * b.shape[2], a.shape[0], a.shape[1], b.shape[2], like=a)

    def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        return mm(a, b)

    for name, call in (("mm", mm), ("bmm", bmm), ("addmm", addmm)):
        _aten.impl(name, call, "CPU")


_aten = torch.library.Library("aten", "IMPL")  # holds the replacements for as long as the process lives


# ---- ours, and SUMMA ----


@dataclass(frozen=True)
class Options:
    """How a grid layer works."""

    flow: str = "auto"
    residual: str = "sequence"
    overlap: bool = False
    keep: tuple[str, ...] = ()
    look_ahead: bool = False
    late: bool = True
    """Sums over depth overlap with the rest of the backward."""


class GridLayer:
    """The library's own linears, units and gradient sums on a grid (depth, row, col)."""

    def __init__(self, groups: Groups, shape: Shape, degrees: Degrees, options: Options, serial: Serial | None = None):
        d, r, c = degrees
        (j, col), (i, row), (k, depth) = groups.line(c, 1), groups.line(r, c), groups.line(d, r * c)
        self.degrees, self.place, self.options, self.serial = degrees, (k, i, j), options, serial
        grid = Grid(
            Axis("row", r, i, row, overlap=options.overlap), Axis("col", c, j, col, overlap=options.overlap), ("depth",)
        )
        n, h = shape.tokens // (d * r), shape.hidden
        dtype = torch.float64 if serial else torch.float32
        setting = GridSettings(
            grid, n, n, options.flow, residual=options.residual, keep=frozenset(options.keep),
            compute_bytes=dtype.itemsize, reduce_bytes=dtype.itemsize,
        )  # fmt: skip
        third, inner = even(h, c), even(4 * h, c)
        stream = ActivationLayout(even(h, c), tokens=options.residual == "sequence")
        sides = {
            "qkv": (stream, ActivationLayout(fuse(third, third, third))),
            "out": (ActivationLayout(third), stream),
            "up": (stream, ActivationLayout(inner)),
            "down": (ActivationLayout(inner), stream),
        }
        self.linears = {name: GridLinear(setting, *both, bias=False) for name, both in sides.items()}
        self.flows = {name: linear.matmul.flow for name, linear in self.linears.items()}
        self.pieces = {name: linear.pieces(name)["weight"] for name, linear in self.linears.items()}
        self.sums = GradientSums(int(options.overlap))
        self.ahead = WeightPrefetch(self.sums)
        sharing = Sharing(copies=d, copy=k, across=depth)
        self.units = {}
        for unit_name, names in (("attn", ("qkv", "out")), ("mlp", ("up", "down"))):
            module = nn.ModuleDict({name: self.linears[name] for name in names})
            unit = Unit.of(
                unit_name,
                module,
                pieces={f"{name}.weight": self.pieces[name] for name in names},
                device=torch.device("cpu"),
                compute=dtype,
                reduce=dtype,
                sharing=sharing,
            )
            self.units[unit_name] = unit
            for name in names:
                linear = self.linears[name]
                linear.serve(self.ahead, self.sums, functools.partial(unit.add_grad, f"{name}.weight"))
                if options.look_ahead:
                    m = linear.matmul
                    linear.matmul = LookAhead(m.flow, m.grid, m.sizes, m.seq_len)
        if serial:
            for name, linear in self.linears.items():
                _fill(linear.weight.data, self.pieces[name], serial.weights[name].detach())
        self.x = self._held(serial.x if serial else None, stream, n, h, dtype).requires_grad_()
        self.dy = self._held(serial.dy if serial else None, stream, n, h, dtype)
        self.stream = stream
        self.y: Tensor | None = None

    def _held(self, x: Tensor | None, side: ActivationLayout, n: int, h: int, dtype: torch.dtype) -> Tensor:
        """This rank's part of activations [T, h]."""
        (d, r, c), (k, i, j) = self.degrees, self.place
        if x is None:
            return torch.zeros((n // c, h) if side.tokens else (1, n, h // c), dtype=dtype)
        mine = x.detach().chunk(d * r)[k * r + i]
        return mine.chunk(c)[j].clone() if side.tokens else mine.chunk(c, 1)[j].clone()[None]

    def forward(self) -> Tensor:
        self.ahead.begin("F")
        y = self._forward()
        self.ahead.end()
        return y

    def _forward(self) -> Tensor:
        qkv = self.linears["qkv"](self.x)
        between = self.linears["out"](qkv[..., : qkv.shape[-1] // 3])
        if between.requires_grad:
            between.register_hook(lambda g: self._reduce("mlp"))
        return self.linears["down"](self.linears["up"](between))

    def _reduce(self, name: str) -> None:
        unit = self.units[name]
        for place in unit.params:
            linear = self.linears[place.partition(".")[0]]
            linear.flush()
            linear.forget()
        self.sums.then(unit.reduce)
        if not self.options.late:
            self.sums.settle()
            unit.finish()

    def step(self) -> None:
        self.x.grad = None
        for unit in self.units.values():
            unit.zero_grad()
        self.y = self.forward()
        self.ahead.begin("B")
        self.y.backward(self.dy)
        self._reduce("attn")
        self.ahead.end()
        for unit in self.units.values():
            unit.finish()

    def reset(self) -> None:
        """Let go of what a forward keeps for its backward."""
        for linear in self.linears.values():
            linear.forget()

    def worst(self) -> float:
        assert self.serial
        assert self.y is not None
        held = functools.partial(self._held, side=self.stream, n=0, h=0, dtype=torch.float64)
        gaps = [
            (self.y.detach() - held(self.serial.y)).abs().max(),
            (_grad(self.x) - held(_grad(self.serial.x))).abs().max(),
        ]
        for unit in self.units.values():
            for place in unit.params:
                name = place.partition(".")[0]
                expected = torch.zeros_like(self.linears[name].weight)
                _fill(expected, self.pieces[name], _grad(self.serial.weights[name]))
                gaps.append((unit.reduced_grad(place) - expected).abs().max())
        return float(torch.stack(gaps).max())


def _grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def _fill(local: Tensor, pieces: Any, serial: Tensor) -> None:
    with torch.no_grad():
        for p in pieces:
            ours, theirs = (tuple(slice(a, b) for a, b in box) for box in (p.local_slice, p.global_slice))
            local[ours] = serial[theirs]


class LookAhead(Matmul):
    """SUMMA with the next step's broadcasts, and the last step's reduction, under way during each product."""

    def forward(self, x: Tensor, w: Tensor, whole: Whole) -> tuple[Tensor, Tensor]:
        xs, ws = _broadcasts(x, self.grid.col), _broadcasts(w, self.grid.row)
        y = next(xs) @ next(ws).t()
        for x_t, w_t in zip(xs, ws, strict=True):
            y = y + x_t @ w_t.t()
        return y, x

    def input_grad(self, dy: Tensor, w: Tensor, whole: Whole) -> tuple[PendingTensor, Tensor]:
        parts = (dy @ w_t for w_t in _broadcasts(w, self.grid.row))
        return PendingTensor(_reductions(parts, self.grid.col)), dy

    def weight_grad(self, inputs: Tensor, kept: Tensor, dtype: torch.dtype) -> PendingTensor:
        parts = ((kept.t() @ x_t).to(dtype) for x_t in _broadcasts(inputs, self.grid.col))
        return PendingTensor(_reductions(parts, self.grid.row))


def _broadcasts(x: Tensor, axis: Axis) -> Any:
    """x of every rank in turn, one ahead."""
    if axis.group is None:
        yield x
        return
    x = x.contiguous()

    def start(t: int) -> tuple[Tensor, collectives.Pending]:
        assert axis.group is not None
        buffer = x if t == axis.index else torch.empty_like(x)
        return buffer, collectives.broadcast(buffer, t, axis.group, f"a broadcast over {axis.name}")

    coming = start(0)
    for t in range(axis.size):
        buffer, pending = coming
        if t + 1 < axis.size:
            coming = start(t + 1)
        pending.wait()
        yield buffer


def _reductions(parts: Any, axis: Axis) -> Tensor:
    """Of the sums over the axis of every part in turn, this rank's; each under way during the next product."""
    mine, pending = None, None
    for t, part in enumerate(parts):
        if t == axis.index:
            mine = part
        if pending is not None:
            pending.wait()
        if axis.group is not None:
            pending = collectives.reduce(part, t, axis.group, f"a reduction over {axis.name}")
    if pending is not None:
        pending.wait()
    assert mine is not None
    return mine


# ---- one dimension: Megatron's, all-reduces, activations on every rank ----


class OneDimension:
    """Rows of Wqkv and Wup, columns of Wout and Wdown on each rank; sums of input gradients overlap with the weights' matmuls."""

    def __init__(self, groups: Groups, shape: Shape, serial: Serial | None = None):
        index, group = groups.line(groups.ranks, 1)
        assert group is not None
        self.shape, self.serial, self.index, self.ranks = shape, serial, index, groups.ranks
        self.weights = {n: nn.Parameter(self._share(n, None)) for n in shape.linears}
        if serial:
            self.weights = {n: nn.Parameter(self._share(n, serial.weights[n].detach())) for n in shape.linears}
        dtype = torch.float64 if serial else torch.float32
        self.x = (serial.x.detach().clone() if serial else torch.zeros(*shape, dtype=dtype)).requires_grad_()
        self.dy = serial.dy if serial else torch.zeros(*shape, dtype=dtype)
        self.group, self.y = group, self.x

    def _share(self, name: str, w: Tensor | None) -> Tensor:
        rows, columns = self.shape.linears[name]
        n, at = self.ranks, self.index
        if w is None:
            return torch.zeros(rows // n, columns) if name in ("qkv", "up") else torch.zeros(rows, columns // n)
        return block_rows(w, n)[at] if name == "qkv" else w.chunk(n, 0 if name == "up" else 1)[at].clone()

    def forward(self) -> Tensor:
        w, group = self.weights, self.group
        q = _Out.apply(self.x, w["qkv"], group)[:, : self.shape.hidden // self.ranks]
        between = _Back.apply(q, w["out"], group)
        return _Back.apply(_Out.apply(between, w["up"], group), w["down"], group)

    def step(self) -> None:
        self.x.grad = None
        for weight in self.weights.values():
            weight.grad = None
        self.y = self.forward()
        self.y.backward(self.dy)

    def reset(self) -> None:
        pass

    def worst(self) -> float:
        assert self.serial
        gaps = [(self.y - self.serial.y).abs().max(), (_grad(self.x) - _grad(self.serial.x)).abs().max()]
        for name, weight in self.weights.items():
            gaps.append((_grad(weight) - self._share(name, _grad(self.serial.weights[name]))).abs().max())
        return float(torch.stack(gaps).max())


def block_rows(w: Tensor, n: int) -> list[Tensor]:
    """The rows of [Wq; Wk; Wv] of each of n ranks: its block of every third."""
    return [torch.cat(blocks) for blocks in zip(*(third.chunk(n) for third in w.chunk(3)), strict=True)]


class _Out(torch.autograd.Function):
    """x [T, h] on every rank to a block of features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.group = group
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        dx = dy @ w
        pending = collectives.all_reduce(dx, ctx.group, "the gradient of the input")
        dw = dy.t() @ x
        pending.wait()
        return dx, dw, None


class _Back(torch.autograd.Function):
    """A block of features to [T, h] on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, w)
        y = x @ w.t()
        collectives.all_reduce(y, group, "the output", now=True).wait()
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        return dy @ w, dy.t() @ x, None


# ---- torch's own: DTensor, and FSDP2 around it ----


class _Pair(nn.Module):
    """Two linears, of the first of which a share is used."""

    def __init__(self, shape: Shape, names: tuple[str, str], used: int):
        super().__init__()
        self.names, self.used = names, used
        for name in names:
            rows, columns = shape.linears[name]
            self.add_module(name, nn.Linear(columns, rows, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.get_submodule(name) for name in self.names)
        inner = first(x)
        return second(inner[..., : inner.shape[-1] // self.used])


class TorchLayer:
    """DTensor's Colwise and Rowwise over `tensor` ranks, with or without sequence parallelism; FSDP2 over the rest.

    zero 3: weights are gathered again for the backward; 2: they are not. `ring`: FSDP2's collectives are ours.
    """

    def __init__(
        self,
        groups: Groups,
        shape: Shape,
        tensor: int,
        *,
        sequence: bool = False,
        zero: int = 3,
        ring: bool = False,
        serial: Serial | None = None,
    ):
        data = groups.ranks // tensor
        self.mesh = groups.mesh(data, tensor)
        self.serial, self.shape, self.sequence = serial, shape, sequence
        self.data, self.tensor = data, tensor
        self.model = nn.Sequential(_Pair(shape, ("qkv", "out"), 3), _Pair(shape, ("up", "down"), 1))
        if serial:
            self.model.to(torch.float64)
            with torch.no_grad():
                for name, weight in self._named().items():
                    weight.copy_(self._ordered(name, serial.weights[name].detach()))
        stream: Any = Shard(0) if sequence else Replicate()
        out, back = ColwiseParallel(input_layouts=stream), RowwiseParallel(output_layouts=stream)
        plan = {"0.qkv": out, "0.out": back, "1.up": out, "1.down": back}
        parallelize_module(self.model, self.mesh["tensor"], plan, src_data_rank=None)  # every rank has the same weights
        if data > 1:
            for part in (*self.model, self.model):
                fully_shard(part, mesh=self.mesh["data"], reshard_after_forward=zero == 3)
                if ring:
                    part.set_custom_all_gather(_Gather())  # type: ignore[operator]
                    part.set_custom_reduce_scatter(_Scatter())  # type: ignore[operator]
        self.x = self._held(serial.x if serial else None).requires_grad_()
        self.dy = self._held(serial.dy if serial else None)
        self.y = self.x

    def _named(self) -> dict[str, Tensor]:
        return {name.split(".")[1]: p for name, p in self.model.named_parameters()}

    def _ordered(self, name: str, w: Tensor) -> Tensor:
        return torch.cat(block_rows(w, self.tensor)) if name == "qkv" else w

    def _held(self, x: Tensor | None) -> Tensor:
        parts = self.data * (self.tensor if self.sequence else 1)
        if x is None:
            return torch.zeros(self.shape.tokens // parts, self.shape.hidden)
        at = self.mesh.get_local_rank("data")
        if self.sequence:
            at = at * self.tensor + self.mesh.get_local_rank("tensor")
        return x.detach().chunk(parts)[at].clone()

    def forward(self) -> Tensor:
        y = self.model(self.x)
        _arrive(y)
        return y

    def step(self) -> None:
        self.x.grad = None
        self.model.zero_grad()
        self.y = self.forward()
        self.y.backward(self.dy)
        _arrive(_grad(self.x))

    def worst(self) -> float:
        assert self.serial
        gaps = [(self.y - self._held(self.serial.y)).abs().max()]
        gaps.append((_grad(self.x) - self._held(_grad(self.serial.x))).abs().max())
        for name, weight in self._named().items():
            grad: Any = _grad(weight)
            whole = grad.full_tensor() * self.data  # FSDP2 takes the mean
            gaps.append((whole - self._ordered(name, _grad(self.serial.weights[name]))).abs().max())
        return float(torch.stack(gaps).max())


def _arrive(x: Tensor) -> None:
    """DTensor hands out results that are still on their way."""
    if isinstance(x, AsyncCollectiveTensor):
        x.wait()


class _Comm:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Comm):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        pending = collectives.all_gather(output_tensor, input_tensor, group, "a gather of FSDP2's")
        return pending if async_op else pending.wait()


class _Scatter(_Comm):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        assert not async_op
        collectives.reduce_scatter(output_tensor, input_tensor, group, "a scatter of FSDP2's").wait()
        if str(op).endswith("AVG"):
            output_tensor.div_(group.size())
