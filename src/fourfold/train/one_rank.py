"""One rank of a plan without the training loop: its units, stages and executor, and steps of random tokens.

    with one_of_many(64):                          # this process is rank 0 of 64; collectives return at once
        rank = OneRank(config, plan)
        rank.step()                                # the real code of a rank: its memory and compute time
        rank.update()                              # with `optimizer = True`: update the weights and drop the gradients

`activations` measures the activation bytes of each unit for one micro-batch; with it, `replayed` predicts the rank's peak
before a step is run.

In a real group (`run_ranks`), every rank creates its own. In `one_of_many` collectives and messages carry no data, so values are
meaningless; memory, order and compute time are real. Any rank of any plan can be created.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.config import Config
from fourfold.model.build import build_model, materialize_buffers
from fourfold.offload.split import square_sum
from fourfold.plan import Plan
from fourfold.program.stages import lay_out_pipeline
from fourfold.runtime.executor import Executor
from fourfold.runtime.transport import Name, Transport
from fourfold.shard.joined import Joined
from fourfold.shard.replay import Activations, Footprint, Replay, replay
from fourfold.shard.unit import Unit
from fourfold.train._torch import fake_store
from fourfold.train.mesh import RankMesh
from fourfold.train.parts import (
    make_grid,
    make_handles,
    make_runner,
    make_stages,
    make_transport,
    make_units,
    message_shape,
    put_on_grid,
    set_loss_chunks,
    types_of,
)
from fourfold.train.streamed import make_keeper, make_optimizer

__all__ = ["DeviceMeter", "Meter", "OneRank", "one_of_many"]


@contextmanager
def one_of_many(ranks: int, rank: int = 0) -> Iterator[None]:
    """A process group in which this process is one rank and the other ranks do not exist."""
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Nowhere(Transport):
    """A transport without neighbours: sends are dropped, receives return random values."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self._make = lambda: torch.randn(shape, dtype=dtype, device=device)
        self.address = lambda rank: rank

    def begin(self, *, ordered: bool, program: str = "") -> None:
        """Nothing to prepare."""

    def send(self, target: int, name: Name, value: Any) -> None:
        """Dropped."""

    def post(self, source: int, name: Name | None = None) -> None:
        """Nothing to wait for."""

    def receive(self, name: Name, source: int) -> Any:
        return self._make()

    def release(self, value: Any) -> None:
        """Nothing to free."""

    def finish(self) -> None:
        """Nothing is in flight."""

    def close(self) -> None:
        """There are no threads."""


class OneRank:
    """One rank of a plan. Creates process groups, so all real ranks of the plan must create theirs."""

    def __init__(self, config: Config, plan: Plan, rank: int = 0, device: str = "cpu", optimizer: bool = False):
        self.config, self.plan, self.device = config, plan, torch.device(device)
        self.mesh = RankMesh(plan.mesh, rank)
        early = optimizer and plan.updates_early(config)
        self.layout = lay_out_pipeline(config.model, plan, config.train.global_batch, early=early)
        self.model = build_model(config.model)
        compute, reduce = types_of(plan)
        grid = make_grid(self.mesh, plan)
        put_on_grid(self.model, grid, config, plan, compute, reduce)
        set_loss_chunks(self.model, config, plan, self.layout)
        self.model.to(compute)
        self.held = make_units(
            config, plan, self.mesh, grid, self.layout, self.model, device=self.device, compute=compute, reduce=reduce
        )
        materialize_buffers(self.model, self.device, compute)
        self._all = list(self.held.units.values())
        self.optimizer = make_optimizer(config, plan, self._all) if optimizer else None
        stages = make_stages(config, plan, self.mesh, self.layout, self.held, make_keeper(plan, self.device))
        handles = make_handles(self.held, stages, self.optimizer)
        executor = Executor(
            self.layout.schedule.placement,
            self.mesh.coordinates["pipe"],
            stages.stages,
            handles,
            self._messages(compute),
            buckets=handles,
        )
        self.runner = make_runner(executor, plan, self.mesh, self.layout)
        way, micro_batches = self.mesh.index("data", "depth", "row"), plan.micro_batches(config.train.global_batch)
        self._batches = [self.batch(way, m) for m in range(micro_batches)]
        self._scale = torch.tensor(1e-3, dtype=torch.promote_types(compute, torch.float32), device=self.device)

    @property
    def units(self) -> list[Unit]:
        return self._all

    def _messages(self, compute: torch.dtype) -> Transport | None:
        config, plan, mesh = self.config, self.plan, self.mesh
        if mesh.size("pipe") == 1 or dist.get_backend() != "fake":
            return make_transport(config, plan, mesh, self.layout, self.device, 20.0)
        return _Nowhere(message_shape(config, plan), compute, self.device)

    def step(self, index: int = 0) -> dict[int, Tensor]:
        """Forward and backward of all micro-batches, gradients reduced; returns the losses."""
        if self.optimizer is not None:
            self.optimizer.begin(1e-4)
        losses = self.runner.step(index, self)
        for unit in self.units:
            unit.finish()
        return losses

    @torch.no_grad()
    def update(self, lr: float = 1e-4) -> None:
        """Update the weights from the reduced gradients, and free the gradients."""
        assert self.optimizer is not None, "a rank without an optimizer"
        squares = [square_sum(u.shard_grad) for u in self.units if u.shard_grad is not None]  # those not consumed
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self.device)
        self.optimizer.step(lr, total.sqrt(), None)
        self.zero_grad()

    def zero_grad(self) -> None:
        for unit in self.units:
            unit.zero_grad()

    def close(self) -> None:
        """Stop the threads that carry messages."""
        if self.runner.executor.transport is not None:
            self.runner.executor.transport.close()

    def activations(self, meter: Meter) -> dict[str, Activations]:
        """Activation bytes of one micro-batch at each unit, if one stage is the whole model.

        Nothing else is allocated: one unit is gathered at a time, and its gradient is dropped.
        """
        (stage,) = self.runner.executor.stages.values()
        units, base = [self.held.units[link.name] for link in stage.links], meter.live
        forward, backward = [], []
        value: Any = self.first(0)
        for index, unit in enumerate(units):
            with _passing(unit, meter) as most:
                value = stage.forward_part(index, 0, value, self.extra(0))
            forward.append((most[-1] - base, meter.live - base))
        value = self.grad(0)
        for index, unit in reversed(list(enumerate(units))):
            with _passing(unit, meter) as most:
                value = stage.backward_part(index, 0, value)
            backward.append((most[0] - base, most[-1] - base, meter.live - base))
        found = zip(units, forward, reversed(backward), strict=True)
        return {unit.name: Activations(*there, *back) for unit, there, back in found}

    def replayed(self, activations: Mapping[str, Activations] | None = None) -> Replay:
        """The collectives and memory that follow from the rank's program; with `activations`, the full peak."""
        footprints = {
            unit.name: Footprint(
                unit.layout.total,
                unit.sharing.shards,
                unit.sharing.copies,
                next((lender.name for lender, *_ in unit.borrowed.values()), None),
                sum(row.numel() for row in unit._borrowed_params.values()),
                unit.sliced,
                tuple(u.name for u in unit.joined.units) if isinstance(unit.joined, Joined) else (),
            )
            for unit in self.units
        }
        first = self.units[0]
        return replay(
            self.runner.program,
            footprints,
            compute_bytes=first.full.element_size(),
            reduce_bytes=first.reduce_dtype.itemsize,
            in_flight=first.reductions.in_flight,
            units_of_op=dict(enumerate(self.layout.units)),
            activations=activations,
        )

    # ---- the feed: random tokens, a function of the rank's place in the batch and the micro-batch ----

    def batch(self, way: int, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of one micro-batch of the ranks at index `way` of the batch."""
        m, size = self.config.model, self.plan.micro_batch_size(self.config.train.global_batch)
        generator = torch.Generator().manual_seed(1000 * way + micro_batch)
        tokens, targets = torch.randint(0, m.vocab, (2, size, m.seq_len), generator=generator).to(self.device)
        return tokens, targets

    def first(self, micro_batch: int) -> Tensor:
        return self._batches[micro_batch][0]

    def extra(self, micro_batch: int) -> tuple[Tensor, ...]:
        return self._batches[micro_batch][1:]

    def documents(self, micro_batch: int) -> None:
        return None

    def grad(self, micro_batch: int) -> Tensor:
        return self._scale


# ---- measuring ----


class Meter(Protocol):
    """Bytes in use now, and the peak since `reset`."""

    @property
    def live(self) -> int: ...
    @property
    def most(self) -> int: ...
    def reset(self) -> None: ...


class DeviceMeter:
    """A GPU's allocator."""

    def __init__(self, device: str | torch.device = "cuda"):
        self.device = torch.device(device)

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    @property
    def most(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)


@contextmanager
def _passing(unit: Unit, meter: Meter) -> Iterator[list[int]]:
    """Peak bytes other than the unit's parameters and gradient: before its gradient is allocated, and after."""
    without = meter.live
    unit.gather()
    unit.need()
    extra = meter.live - without
    accumulator = unit._accumulator
    most: list[int] = []

    def taken(name: str) -> Tensor:
        if not most:
            most.append(meter.most - extra)
            meter.reset()
        return accumulator(name)

    meter.reset()
    with patch.object(unit, "_accumulator", taken):
        yield most
    own = [unit.grad] if unit.grad is not None else []
    own += [grad for name, grad in unit._grads.items() if name in unit._borrowed_params]
    most.append(meter.most - extra - sum(grad.untyped_storage().nbytes() for grad in own))
    unit.release()
    unit.zero_grad()
