"""The system that runs a plan, as far as the planner's model depends on it: Fourfold itself, torchtitan, Megatron-LM, NeMo.

A `TrainingEngine` describes how time and memory of a plan differ in another system: bytes moved by operators between matmuls,
what full recomputation repeats, the speed of attention, host time per unit, whether ZeRO-1's collectives are at the ends of a
step, and extra memory. `make_plan(…, engine=)` and `predict(…, engine=)` take a name or an engine.

Where the numbers are from: `fourfold` is measured on an H200. Of the others, bytes are counted kernel by kernel from their
sources; rates of attention kernels are those of the FlashAttention-2 paper's figures; host times and memory shares are assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from fourfold import schema
from fourfold.errors import PlanError

if TYPE_CHECKING:
    from fourfold.cluster import Cluster, Device

__all__ = ["ENGINES", "FOURFOLD", "TrainingEngine", "engine_of", "own_engine"]


@dataclass(frozen=True)
class TrainingEngine:
    """A training system, as the planner's model sees it."""

    name: str = "fourfold"
    fused: bool = False
    """Operators between matmuls are fused even if a plan does not compile."""
    traffic: Mapping[str, float] = field(default_factory=dict, hash=False)
    """By operator between matmuls: bytes it moves, relative to ours without compilation."""
    fused_accumulation: bool = False
    """The matmul of a weight gradient also accumulates it; otherwise a separate kernel does."""
    fp8_weight_grad: bool = False
    """With fp8 matmuls, those of weight gradients are in fp8, too; ours are in the compute type."""
    skipped: tuple[str, ...] = ("out", "down")
    """Matmuls that full recomputation skips, since the backward does not read their output."""
    attention: Literal["best", "flash-2", "flash-2 deterministic", "flash-1"] = "best"
    """Its attention kernel: the device's best, or a version of FlashAttention."""
    host_unit: float = 0.0
    """Host seconds of a unit's forward and backward: on a GPU, a lower bound of the unit's time."""
    host_matmul: float = 0.0
    """Additional host seconds for every matmul on a tensor grid."""
    host_row: float = 0.0
    """Further host seconds for every matmul on a grid with rows, which gathers and sums matrices, too."""
    host_step: float = 0.0
    """Seconds of every step in which the device waits for the host: data, optimizer, metrics."""
    synchronous: bool = False
    """Kernels are launched one at a time (CUDA_LAUNCH_BLOCKING=1): the host's time adds to the device's."""
    zero1_at_ends: bool = False
    """In a pipeline, parameters that are gathered once a step are gathered before the first forward, and their gradients are
    reduced after the last backward, on all stages at once."""
    broadcasts: bool = False
    """ZeRO-1's parameters are broadcast by the ranks of the group in turn, not all-gathered."""
    logits: float = 0.0
    """Bytes per logit beyond our 12 (in bf16, without chunks): fp32 copies if the loss is not fused; negative if it is."""
    fp32_shards: bool = False
    """FSDP with fp32 parameters: shards are the masters, reduced gradients are fp32, and gathers cast to the compute type."""
    recomputes_blocks: bool = False
    """Full recomputation keeps one input for a whole block; ours keeps one for each of its units, attention and MLP."""
    margin: float = 0.0
    """Fraction of the memory that its allocator loses, beyond the cluster's margin."""

    def attention_speed(self, device: Device) -> float:
        """Speed of its attention kernel relative to the device's best."""
        speeds = {"best": 1.0, "flash-2": device.flash_2, "flash-1": _FLASH_1 * device.flash_2}
        # not measured where FlashAttention-2 is the best kernel
        speeds["flash-2 deterministic"] = _DETERMINISTIC * device.flash_2 if device.flash_2 < 1 else 1.0
        return speeds[self.attention]

    def on(self, cluster: Cluster) -> Cluster:
        """The cluster as this engine uses it."""
        d = cluster.device
        changed = replace(d, eager=1.0 if self.fused else d.eager, margin=min(0.9, d.margin + self.margin))
        return cluster if changed == d else replace(cluster, device=changed)


_FLASH_1 = 0.5
"""Speed of the first FlashAttention relative to the second, on an A100."""
_DETERMINISTIC = 0.75
"""Speed of FlashAttention-2 with a deterministic gradient relative to without, forward and backward: cuDNN takes 0.54 to 0.59 of
its time on an H200."""
FOURFOLD = TrainingEngine(attention="flash-2 deterministic", host_unit=1.2e-3, host_matmul=0.6e-3, host_row=0.3e-3)
"""Measured on the host of an H200: Python takes 2.4 ms for a layer of two units, 5.3 ms on four columns, 6.4 ms on two rows and
columns."""
_TITAN = TrainingEngine(
    name="torchtitan",
    # eager: queries and keys are rotated as complex fp32 numbers (20 bytes an element instead of 4), RMSNorm is partly fused,
    # SiLU and the multiplication are two kernels (10 bytes instead of 6)
    traffic={"rotary": 3.5, "norm": 3.0, "activation": 1.67, "norm of every head": 3.0, "norm of all heads": 3.0},
    fp8_weight_grad=True,  # torchao
    skipped=("down",),  # a block is recomputed as a whole, up to the last tensor that the backward reads
    attention="flash-2",
    host_unit=0.8e-3,
    host_matmul=0.5e-3,
    host_step=0.02,
    logits=2.0,  # bf16 logits in addition to their fp32 copy
    fp32_shards=True,
    recomputes_blocks=True,
    margin=0.03,
)
_MEGATRON = TrainingEngine(
    name="megatron",
    fused=True,
    fused_accumulation=True,
    fp8_weight_grad=True,  # Transformer Engine
    skipped=(),
    host_unit=0.5e-3,
    host_matmul=0.1e-3,
    host_step=0.02,
    zero1_at_ends=True,
    logits=2.0,
    margin=0.04,
)
ENGINES: Mapping[str, TrainingEngine] = {
    e.name: e for e in (FOURFOLD, _TITAN, _MEGATRON, replace(_MEGATRON, name="nemo", host_unit=0.4e-3))
}


def own_engine(deterministic: bool) -> TrainingEngine:
    """Fourfold with this `train.deterministic`; without it, the fastest attention kernel is used."""
    return FOURFOLD if deterministic else replace(FOURFOLD, attention="best")


def engine_of(engine: str | TrainingEngine) -> TrainingEngine:
    """An engine by name."""
    if isinstance(engine, TrainingEngine):
        return engine
    if engine not in ENGINES:
        raise PlanError(f"engine = {engine!r}{schema.nearest(str(engine), tuple(ENGINES))}")
    return ENGINES[engine]
