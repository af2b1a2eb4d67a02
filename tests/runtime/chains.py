"""Small chains of layers cut into stages, for tests of the runtime; and the serial run they must equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.piece import whole
from fourfold.program import Programs, ProgramUnit, Schedule, lower
from fourfold.runtime.executor import Executor
from fourfold.runtime.message_driven import drive, run_driven
from fourfold.runtime.stage import ChainLink, Stage
from fourfold.shard.unit import Unit as RealUnit

WIDTH = 6


def fill(module: nn.Module, seed: int) -> None:
    """Weights by a seed of their own: ranks may be threads, which share torch's generator."""
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype) / WIDTH**0.5


class Layer(nn.Module):
    """A norm, a linear with bias and a residual: gradients of every kind."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        fill(self, number)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Loss(nn.Module):
    """The last layer: a linear, then the sum of squared errors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        fill(self, 99)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (self.linear(x) - target).square().sum()


class Data:
    """Micro-batches of unequal length, the same for everyone."""

    def __init__(self, micro_batches: int, base: int = 3):
        generator = torch.Generator().manual_seed(5)
        shapes = [(base + m % 2, WIDTH) for m in range(micro_batches)]
        self.inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        self.targets = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]

    def first(self, micro_batch: int) -> Tensor:
        return self.inputs[micro_batch]

    def extra(self, micro_batch: int) -> tuple[Tensor, ...]:
        return (self.targets[micro_batch],)

    def documents(self, micro_batch: int) -> None:
        return None

    def grad(self, micro_batch: int) -> Tensor:
        return torch.tensor(0.125, dtype=torch.float64)


def layers_of(stages: int) -> list[nn.Module]:
    return [*(Layer(i) for i in range(stages - 1)), Loss()]


def serial(stages: int, micro_batches: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients of one process, micro-batch after micro-batch, by plain autograd."""
    layers, data = layers_of(stages), Data(micro_batches)
    losses = []
    for m in range(micro_batches):
        x = data.first(m)
        for layer in layers[:-1]:
            x = layer(x)
        loss = layers[-1](x, *data.extra(m))
        loss.backward(data.grad(m))
        losses.append(loss.item())
    return losses, {f"{i}.{n}": p.grad for i, layer in enumerate(layers) for n, p in layer.named_parameters()}  # type: ignore[misc]


def make_unit(name: str, module: nn.Module) -> RealUnit:
    values = {n: p.detach().clone() for n, p in module.named_parameters()}
    unit = RealUnit.of(
        name,
        module,
        pieces={n: (whole(f"{name}.{n}", tuple(v.shape)),) for n, v in values.items()},
        device=torch.device("cpu"),
        compute=torch.float64,
        reduce=torch.float64,
    )
    for n, v in values.items():
        unit.params[n].data.copy_(v)
    return unit


def make_executor(
    programs: Programs, rank: int, transport: Any, *, split: bool, watch: Callable[[str], None] | None = None
) -> Executor:
    """This rank's stages (one layer each) and the executor that runs them."""
    layers = layers_of(len(programs.placement))
    units, stages = {}, {}
    for stage, place in enumerate(programs.placement):
        if place == rank:
            unit = make_unit(str(stage), layers[stage])
            units[str(stage)] = unit
            stages[stage] = Stage([ChainLink(str(stage), unit, layers[stage])], split=split)
    return Executor(programs.placement, rank, stages, units, transport, watch=watch)


def lowered(schedule: Schedule) -> Programs:
    return lower(schedule, [[ProgramUnit(str(s))] for s in range(schedule.stages)])


def run_rank(
    rank: int,
    transport: Any,
    programs: Programs,
    *,
    driven: bool = False,
    slack: int = 0,
    watch: Callable[[str], None] | None = None,
    data: Data | None = None,
) -> tuple[list[float], dict[str, Tensor], list[str], Executor]:
    """One step on one rank: losses, gradients, the order of ops, and the executor."""
    split = any(getattr(i, "kind", "") == "I" for p in programs.programs for i in p.instructions)
    executor = make_executor(programs, rank, transport, split=split, watch=watch)
    program, data = programs.of(rank), data or Data(programs.micro_batches)
    if driven:
        stages = {u: tuple(s for s in at if programs.placement[s] == rank) for u, at in programs.stages_with.items()}
        outputs = run_driven(executor, drive(program, stages, slack), data)
    else:
        outputs = executor.run(program, data)
    units: Any = executor.units.values()
    for unit in units:
        unit.finish()
    grads = {f"{u.name}.{n}": u.reduced_grad(n) for u in units for n in u.params}
    assert all(stage.in_flight == 0 for stage in executor.stages.values())
    losses = [outputs[m].item() for m in sorted(outputs)]
    return losses, grads, [span.what for span in executor.spans], executor
