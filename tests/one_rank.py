"""One rank of a plan without the training loop: its units, stages and executor, and a step of random tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fourfold.config import Config
from fourfold.model.build import build_model, materialize_buffers
from fourfold.plan import Plan
from fourfold.program.stages import PipelineLayout, lay_out_pipeline
from fourfold.runtime.executor import Executor
from fourfold.runtime.runner import Runner
from fourfold.train.mesh import RankMesh
from fourfold.train.parts import Held, make_runner, make_stages, make_transport, make_units
from fourfold.train.worker import DTYPES


class Rank:
    """What a rank holds under a plan. Makes process groups: all ranks of the plan must make theirs."""

    def __init__(self, config: Config, plan: Plan, rank: int, device: str = "cpu"):
        self.config, self.plan, self.device = config, plan, torch.device(device)
        self.mesh = RankMesh(plan.mesh, rank)
        self.layout: PipelineLayout = lay_out_pipeline(config.model, plan, config.train.global_batch)
        self.model = build_model(config.model)
        compute = DTYPES[plan.precision.compute]
        self.model.to(compute)
        types: dict[str, Any] = {
            "compute": compute,
            "reduce": torch.float64 if compute == torch.float64 else torch.float32,
        }
        self.held: Held = make_units(config, plan, self.mesh, self.layout, self.model, device=self.device, **types)
        materialize_buffers(self.model, self.device, compute)
        executor = Executor(
            self.layout.schedule.placement,
            self.mesh.coordinates["pipe"],
            make_stages(config, plan, self.mesh, self.layout, self.held),
            self.held.verbs,
            make_transport(self.mesh, self.layout, self.device, 20.0),
        )
        self.runner: Runner = make_runner(executor, plan, self.mesh, self.layout)

    def step(self, index: int = 0) -> dict[int, Tensor]:
        """Forward and backward of all micro-batches, gradients reduced."""
        losses = self.runner.step(index, Tokens(self))
        for unit in self.held.units.values():
            unit.finish()
        return losses

    def zero_grad(self) -> None:
        for unit in self.held.units.values():
            unit.zero_grad()


class Tokens:
    """Random tokens, a function of the rank's place in the batch and the micro-batch."""

    def __init__(self, rank: Rank):
        m, size = rank.config.model, rank.plan.micro_batch_size(rank.config.train.global_batch)
        self.shape, self.vocab, self.device = (2, size, m.seq_len), m.vocab, rank.device
        self.way = rank.mesh.index("data", "depth", "row")

    def _pair(self, micro_batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.way + micro_batch)
        return torch.randint(0, self.vocab, self.shape, generator=generator).to(self.device)

    def first(self, micro_batch: int) -> Tensor:
        return self._pair(micro_batch)[0]

    def extra(self, micro_batch: int) -> tuple[Tensor, ...]:
        return (self._pair(micro_batch)[1],)

    def grad(self, micro_batch: int) -> Tensor:
        return torch.tensor(1e-3, dtype=torch.float32 if self.vocab else torch.float64, device=self.device)
