"""The outer choices of a plan: mesh, micro-batches, schedule and placements; and what is the same for all of them.

A `Setting` is the question (model, cluster, batch, precision); a `Layout` is one way to fold it, before anything is chosen
unit by unit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from fourfold.cluster import Cluster
from fourfold.model.operators import ModelSpec
from fourfold.plan import Batch, Flows, Memory, Mesh, Pipeline, Plan, Precision, Tensor, UnitRule

__all__ = ["WIDTH", "Layout", "Setting"]

WIDTH = {"fp64": 8, "fp32": 4, "bf16": 2}
"""Bytes of an element."""


@dataclass(frozen=True, eq=False)
class Setting:
    """What is to be planned. Compared by identity: costs are remembered for each."""

    spec: ModelSpec
    cluster: Cluster
    global_batch: int
    precision: Precision
    moments: Literal["fp32", "bf16"] = "fp32"

    @cached_property
    def heads(self) -> int:
        """Of attention, which columns of a grid share; 1 where a model's are not known."""
        return self.spec.config.heads if self.spec.config is not None else 1

    @cached_property
    def compute(self) -> int:
        """Bytes of a weight or activation."""
        return WIDTH[self.precision.compute]

    @cached_property
    def reduce(self) -> int:
        """Bytes of a gradient: never narrower than the compute type."""
        return max(WIDTH[self.precision.reduce], self.compute)

    @cached_property
    def state(self) -> float:
        """Bytes of optimizer state for one parameter on the device: a master of narrow weights, two moments."""
        master = 0 if self.compute >= 4 else 4
        return master + 2 * (2 if self.moments == "bf16" else max(4, self.compute))

    @cached_property
    def streamed(self) -> float:
        """Bytes for one parameter that a streamed update moves each way: bf16 weights keep 16 bits of their master here."""
        return (2 if self.compute < 4 else 0) + 2 * (2 if self.moments == "bf16" else max(4, self.compute))


@dataclass(frozen=True)
class Layout:
    """Mesh, micro-batches, schedule, placements."""

    mesh: Mesh
    micro_batches: int
    micro_batch_size: int
    """Sequences of a micro-batch on one rank."""
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    optimizer: Literal["device", "host", "auto"] = "device"
    activations: Literal["device", "host"] = "device"
    tensor: Tensor = field(default_factory=Tensor)
    prefetch: int = 1

    @property
    def replicas(self) -> int:
        """Ranks that hold copies of the same matrices, over which units are sharded."""
        return self.mesh.data * self.mesh.depth

    @property
    def replica_stride(self) -> int:
        return self.mesh.row * self.mesh.col

    @property
    def steps(self) -> int:
        """Micro-batches over which the grid keeps something; 1 where it keeps nothing over them."""
        keep = self.tensor.keep
        return self.micro_batches if "weights" in keep or "gradients" in keep else 1

    @property
    def splits_backward(self) -> bool:
        """Whether the grid's weight gradients have an op of their own."""
        return self.mesh.row * self.mesh.col > 1 and self.puts_weights_off

    @property
    def zigzags(self) -> bool:
        """Whether stages go down the ranks and up again."""
        return self.schedule in ("wave", "zb-v")

    @property
    def puts_weights_off(self) -> bool:
        """Whether weight gradients have an op of their own in the schedule."""
        return self.mesh.pipe > 1 and self.schedule in ("zb-h1", "zb-v", "synthesized")

    def streams(self, setting: Setting) -> bool:
        """Whether the streamed engine updates: state on the host, or narrow."""
        return self.optimizer != "device" or setting.moments != "fp32"

    def host_room(self, setting: Setting) -> float:
        """Bytes of the host that a device's activations may take."""
        return Memory(optimizer=self.optimizer).host_share * setting.cluster.host_memory

    def message(self, setting: Setting) -> float:
        """Bytes of one message between stages."""
        if self.mesh.pipe == 1:
            return 0.0
        return self.micro_batch_size * setting.spec.seq_len * setting.spec.hidden * setting.compute / self.mesh.col

    def message_seconds(self, setting: Setting) -> float:
        """Of one message to the next stage."""
        far = self.mesh.ranks // self.mesh.pipe
        return setting.cluster.message(self.message(setting), far) if self.mesh.pipe > 1 else 0.0

    @property
    def stages(self) -> int:
        return self.mesh.pipe * self.stages_per_rank

    @property
    def waves(self) -> int:
        return max(1, self.stages_per_rank // 2)

    def plan(
        self,
        setting: Setting,
        rules: tuple[UnitRule, ...],
        layers: tuple[int, ...] | None,
        flows: Flows | None = None,
    ) -> Plan:
        """The plan of this layout with a choice for every unit and, on a grid, a flow for every product."""
        piped = self.mesh.pipe > 1
        return Plan(
            mesh=self.mesh,
            batch=Batch(micro_batches=self.micro_batches),
            pipeline=Pipeline(
                schedule=self.schedule if piped else "1f1b",
                layers=layers if piped and layers is not None else "auto",
                waves=self.waves if piped and self.schedule == "wave" else 1,
                stages_per_rank=self.stages_per_rank if piped and self.schedule == "interleaved" else 2,
            ),
            tensor=replace(self.tensor, flows=flows or self.tensor.flows),
            unit=rules,
            memory=Memory(
                optimizer=self.optimizer,
                moments=setting.moments,
                activations=self.activations,
                prefetch=self.prefetch,
            ),
            precision=setting.precision,
        )

    def __str__(self) -> str:
        text = self.mesh.product().rpartition(" = ")[0]
        text += f", {self.micro_batches} × {self.micro_batch_size}"
        if self.mesh.pipe > 1:
            more = {"wave": f" {self.waves}", "interleaved": f" {self.stages_per_rank}"}.get(self.schedule, "")
            text += f", {self.schedule}{more}"
        if self.tensor.keep:
            text += f", keep {' + '.join(self.tensor.keep)}"
        return text if self.prefetch else f"{text}, nothing gathered ahead"
