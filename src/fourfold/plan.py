"""The Plan: a small readable file that defines how one model is trained on one cluster.

A plan is written by hand in TOML, or by the planner in JSON (which adds `predicted`, `certificate`, `alternatives`).
Everything but `[mesh]` has a default. `Plan.check` validates a plan against a config before any process starts; its errors state
the arithmetic that failed and the nearest value that works.

Mesh axes, slowest link first: pipe, data, depth, row, col; their product is the number of ranks. Tokens are split over
data × depth × row, so a step's sequences divide as  global_batch = data·depth·row · micro_batches · micro_batch_size.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fourfold import schema
from fourfold.config import Config, ModelConfig, nearest_divisor
from fourfold.errors import PlanError
from fourfold.model.spec import OwnLayers, unit_names

if TYPE_CHECKING:
    from fourfold.program.stages import PipelineLayout
    from fourfold.program.timeline import Timeline

__all__ = [
    "AXES",
    "Batch",
    "Flows",
    "Kept",
    "Memory",
    "Mesh",
    "Pipeline",
    "Plan",
    "Precision",
    "Recompute",
    "Tensor",
    "UnitRule",
]

AXES = ("pipe", "data", "depth", "row", "col")
MOST_RANKS, MOST_MICRO_BATCHES, MOST_SPLIT = 1_000_000, 100_000, 4096
"""Bounds far above what machines have: larger numbers are typing errors, and lists of that length would fill the memory."""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "wave", "zb-h1", "zb-v", "synthesized")
Recompute = Literal["none", "selective", "full", "per-slice"]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Degrees of the mesh axes."""

    pipe: int = 1
    """Pipeline parallelism: stages of layers."""
    data: int = 1
    """Data parallelism: replicas, or shards of units."""
    depth: int = 1
    """Tensor grid: copies of the grid, with different sequences."""
    row: int = 1
    """Tensor grid: sequences and the rows of matrices are split."""
    col: int = 1
    """Tensor grid: features, heads and the columns of matrices are split (tensor parallelism as in Megatron-LM)."""

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise PlanError(f"mesh.{axis} = {getattr(self, axis)} must be at least 1")

    @property
    def degrees(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def ranks(self) -> int:
        return math.prod(self.degrees.values())

    @property
    def batch_ways(self) -> int:
        """Number of ranks over which the sequences of a step are divided."""
        return self.data * self.depth * self.row

    def product(self) -> str:
        """The degrees as text: `pipe 2 · data 2 = 4`."""
        factors = [f"{axis} {n}" for axis, n in self.degrees.items() if n > 1] or ["data 1"]
        return f"{' · '.join(factors)} = {self.ranks}"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How a rank's sequences of a step are divided into micro-batches."""

    micro_batches: int = 0
    """Micro-batches per step; 0: 1 without a pipeline, otherwise 2 · pipe or the nearest number that divides the batch."""

    def __post_init__(self) -> None:
        if self.micro_batches < 0:
            raise PlanError(f"batch.micro_batches = {self.micro_batches} must be at least 1")
        if self.micro_batches > MOST_MICRO_BATCHES:
            raise PlanError(f"batch.micro_batches = {self.micro_batches} must be at most {MOST_MICRO_BATCHES}")


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The pipeline schedule and its execution."""

    schedule: str = "1f1b"
    """gpipe | 1f1b | interleaved | wave | zb-h1 | zb-v | synthesized | path of a schedule file."""
    waves: int = 1
    """wave: number of waves."""
    stages_per_rank: int = 2
    """interleaved: stages per rank."""
    split_backward: Literal["auto"] | bool = "auto"
    """Whether backwards are split into I and W."""
    executor: Literal["ordered", "message-driven"] = "ordered"
    """ordered: follow the schedule's order; message-driven: run what has arrived."""
    slack: int = 0
    """Extra micro-batches in flight per stage."""
    layers: Literal["auto"] | tuple[int, ...] = "auto"
    """Number of layers of every stage, or auto."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES and Path(self.schedule).suffix not in (".json", ".csv"):
            raise PlanError(
                f"pipeline.schedule = '{self.schedule}' is neither a schedule nor a .json or .csv file"
                f"{schema.nearest(self.schedule, SCHEDULES)}"
            )
        for name, least, most in (
            ("waves", 1, MOST_MICRO_BATCHES),
            ("stages_per_rank", 1, MOST_MICRO_BATCHES),
            ("slack", 0, MOST_MICRO_BATCHES),
        ):
            if not least <= getattr(self, name) <= most:
                bound = f"at least {least}" if getattr(self, name) < least else f"at most {most}"
                raise PlanError(f"pipeline.{name} = {getattr(self, name)} must be {bound}")
        if isinstance(self.layers, tuple) and any(n < 0 for n in self.layers):
            raise PlanError(f"pipeline.layers = {list(self.layers)} has a negative number of layers")


Kept = Literal["weights", "inputs", "gradients"]
FlowName = Literal["auto", "summa", "os", "ls", "ws", "ws-in", "ws-out"]


@dataclass(frozen=True, kw_only=True)
class Flows:
    """The flow of every matmul of a model, as the planner chose it for its cluster; auto: `tensor.flow`."""

    qkv: FlowName = "auto"
    """Projection of queries, keys and values."""
    out: FlowName = "auto"
    """Output projection of attention."""
    up: FlowName = "auto"
    """Gate and up projection of the MLP."""
    down: FlowName = "auto"
    """Down projection of the MLP."""
    dense: FlowName = "auto"
    """Dense layer before the head (bert)."""
    proj: FlowName = "auto"
    """The head's projection; always os if tied."""


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Matmuls on the tensor grid."""

    flow: Literal["auto", "summa", "os", "ls", "ws"] = "auto"
    """Algorithm of a distributed matmul; auto: the cheapest for each shape, by bytes and calls."""
    flows: Flows = field(default_factory=Flows)
    """Per matmul; filled in by the planner, which knows the links."""
    residual: Literal["sequence", "hidden"] = "sequence"
    """How the residual stream is split."""
    overlap: bool = True
    """Overlap the grid's collectives with compute: weights gathered one linear layer ahead, gradients reduced late."""
    keep: tuple[Kept, ...] = ()
    """What is kept instead of being communicated again: gathered weights for a step, gathered inputs until the backward,
    unreduced gradients, which are then reduced over `row` once per step."""


@dataclass(frozen=True, kw_only=True)
class UnitRule:
    """Options of the units whose name matches; the first rule that matches a unit applies."""

    match: str
    """Pattern of unit names: `embed`, `blocks.3.attn`, `blocks.*.mlp`, `*`."""
    mode: Literal["replicate", "zero2", "zero3", "keep"] = "replicate"
    """Sharding over the replica group: replicate, zero2, zero3 or keep."""
    reduce: Literal["step", "micro-batch"] = "step"
    """When gradients are reduced: once per step or after every micro-batch."""
    within: int = 0
    """Hybrid sharding: shard within groups of this many ranks, replicate across them; 0: all."""
    split: int = 1
    """Number of slices of operator splitting."""
    recompute: Recompute = "none"
    """Activation recomputation: none, selective (keep the outputs of matmuls), full, per-slice."""

    def __post_init__(self) -> None:
        for name, least, most in (("within", 0, MOST_RANKS), ("split", 1, MOST_SPLIT)):
            if not least <= getattr(self, name) <= most:
                bound = f"at least {least}" if getattr(self, name) < least else f"at most {most}"
                raise PlanError(f"unit '{self.match}': {name} = {getattr(self, name)} must be {bound}")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Where optimizer state and activations are stored."""

    optimizer: Literal["device", "host", "auto"] = "device"
    """auto: as much on the device as fits."""
    device_state: str = ""
    """auto: bytes of optimizer state kept on each device, from the planner; empty: what the first step leaves free."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Dtype of AdamW's moments."""
    staging: str = "0GiB"
    """Device bytes for prefetched optimizer state."""
    rollback: str = "0GiB"
    """Host bytes that let updates start before the gradient norm is known, and be undone; 0GiB: they wait for it. auto: what is
    free, on GPUs, if staging is 0GiB and mesh.row is 1. Not measured on a GPU yet, so it is not the default."""
    gradients: Literal["keep", "consume", "auto"] = "auto"
    """consume: a unit's gradient is freed by its update in the backward. auto: kept; the planner may choose consume."""
    activations: Literal["device", "host"] = "device"
    """Where saved activations are kept until the backward."""
    logits: str = "auto"
    """Bytes of logits (in the compute type) that exist on a rank at a time: the head's loss and gradient are computed a chunk of
    tokens at a time. all: no chunks; auto: chunks where a rank's micro-batch has more than 2^28 logits."""
    prefetch: int = 1
    """Number of units gathered ahead; 0: neither gathers nor reductions overlap with compute, least memory."""

    def logit_rows(self, tokens: int, width: int, element: int) -> int:
        """Tokens whose logits exist at a time, for `tokens` tokens of `width` logits of `element` bytes; 0: all, no chunks."""
        if self.logits == "all":
            return 0
        limit = AUTO_LOGITS
        if self.logits != "auto":
            limit = schema.parse_bytes(self.logits, "memory.logits", PlanError) // element
        if tokens * width <= limit:
            return 0
        chunks = -(-tokens // max(1, limit // width))
        rows = -(-tokens // chunks)
        return rows if rows < 64 else min(-(-rows // 64) * 64, tokens)  # chunks of equal size, aligned

    @property
    def host_share(self) -> float:
        """Limit on host memory for activations; further activations stay on the device."""
        return 0.9 if self.optimizer == "device" else 0.5  # optimizer state is allocated later, and needs memory, too

    def __post_init__(self) -> None:
        schema.parse_bytes(self.staging, "memory.staging", PlanError)
        if self.logits not in ("auto", "all") and not schema.parse_bytes(self.logits, "memory.logits", PlanError):
            raise PlanError(
                "memory.logits = 0 leaves no room for a token's logits; use 'auto', 'all' or a size such as 512MiB"
            )
        if self.device_state:
            schema.parse_bytes(self.device_state, "memory.device_state", PlanError)
            if self.optimizer != "auto":
                raise PlanError(
                    f"memory.device_state = {self.device_state} is the state that optimizer = 'auto' keeps on the device, but "
                    f"memory.optimizer = '{self.optimizer}'; leave it out, or use optimizer = 'auto'"
                )
        if self.rollback != "auto":
            size = schema.parse_bytes(self.rollback, "memory.rollback", PlanError)
            if size and self.optimizer == "device":
                raise PlanError(
                    f"memory.rollback = {self.rollback} is for optimizer state on the host, but memory.optimizer = 'device'; "
                    "leave it out, or use optimizer = 'host' or 'auto'"
                )
        if self.prefetch < 0:
            raise PlanError(f"memory.prefetch = {self.prefetch} must be at least 0")


AUTO_LOGITS = 1 << 28
"""memory.logits = "auto": logits of a chunk, at most. Fewer tokens at a time would make the sum of dW's chunks slow."""
FP8_WIDTH = 16
"""Numbers of inputs and outputs of fp8 matmuls are multiples of this."""
_DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Number formats."""

    compute: Literal["fp64", "fp32", "bf16"] = "fp32"
    """Dtype of weights and activations; with bf16 the optimizer keeps fp32 master weights."""
    matmul: Literal["compute", "fp8"] = "compute"
    """Type in which the linears of blocks multiply. compute: the compute type; fp8: forward and input gradient in e4m3 with a
    scale for each row, weight gradient in bf16; needs compute = "bf16"."""
    reduce: Literal["fp64", "fp32", "bf16"] = "fp32"
    """Dtype in which gradients accumulate and are reduced; fp64 compute always uses fp64."""
    compile: Literal["auto"] | bool = "auto"
    """torch.compile every unit; auto: on GPUs, for models of ours, where the plan allows it. A unit that cannot be compiled runs
    uncompiled."""

    def __post_init__(self) -> None:
        if self.matmul == "fp8" and self.compute != "bf16":
            raise PlanError(
                f"precision.matmul = 'fp8' with precision.compute = '{self.compute}': fp8 matmuls read and write bf16; use "
                "compute = 'bf16', or matmul = 'compute'"
            )

    def compiles(self, kind: str) -> bool:
        """Whether units are compiled on devices of a kind ("cuda" or "cpu"), as far as the precision says."""
        return kind == "cuda" if self.compile == "auto" else self.compile

    @property
    def compute_bytes(self) -> int:
        """Bytes of a weight or an activation."""
        return _DTYPE_BYTES[self.compute]

    @property
    def reduce_bytes(self) -> int:
        """Bytes of a gradient: never narrower than the compute type."""
        return max(_DTYPE_BYTES[self.reduce], self.compute_bytes)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one model is trained on one cluster: mesh, schedule, sharding, memory, precision."""

    mesh: Mesh = field(default_factory=Mesh)
    batch: Batch = field(default_factory=Batch)
    pipeline: Pipeline = field(default_factory=Pipeline)
    tensor: Tensor = field(default_factory=Tensor)
    unit: tuple[UnitRule, ...] = ()
    memory: Memory = field(default_factory=Memory)
    precision: Precision = field(default_factory=Precision)
    predicted: dict[str, Any] | None = None
    """Written by the planner: predicted time and memory."""
    certificate: dict[str, Any] | None = None
    """Written by the planner: lower bound on the step time of any plan."""
    alternatives: tuple[dict[str, Any], ...] | None = None
    """Written by the planner: the runners-up."""

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file (TOML, JSON, YAML)."""
        data = schema.read(path, PlanError)
        with schema.in_file(path, PlanError, "a plan", data):
            return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        return schema.build(cls, data, error=PlanError)

    def to_dict(self) -> dict[str, Any]:
        return schema.dump(self)

    def save(self, path: str | Path) -> None:
        """Write the plan as .toml or .json."""
        path = Path(path)
        schema.check_writable(path, "a plan", PlanError)
        if path.suffix == ".json":
            schema.write_json(path, self.to_dict())
        else:
            schema.write_text(path, schema.dump_toml(self.to_dict()))

    def explain(self) -> str:
        """The planner's report: what limits this plan, what more memory would gain, and the memory of the ranks."""
        from fourfold.view.explain import explain  # it needs this module

        return explain(self)

    def simulate(self) -> Timeline:
        """Simulate a step: in seconds if the planner predicted them, otherwise in forwards of one rank."""
        from fourfold.program.from_plan import costs_of_plan, schedule_of_plan  # they need this module
        from fourfold.program.simulator import simulate

        costs = costs_of_plan(self)
        return simulate(
            schedule_of_plan(self, self.batch.micro_batches or max(1, 2 * self.mesh.pipe), costs=costs), costs
        )

    def rule_for(self, unit: str) -> UnitRule:
        """The first rule that matches a unit's name, or the defaults."""
        return next((r for r in self.unit if fnmatch.fnmatchcase(unit, r.match)), UnitRule(match=unit))

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches per step, with the default filled in."""
        if self.batch.micro_batches:
            return self.batch.micro_batches
        target = 2 * self.mesh.pipe if self.mesh.pipe > 1 else 1
        return nearest_divisor(max(1, global_batch // self.mesh.batch_ways), target)

    def micro_batch_size(self, global_batch: int) -> int:
        """Sequences of one micro-batch on one rank."""
        return global_batch // (self.mesh.batch_ways * self.micro_batches(global_batch))

    def check(self, config: Config, ranks: int | None = None, own: OwnLayers | None = None) -> PipelineLayout:
        """Raise PlanError unless this plan can train `config` (a resolved one) on `ranks` ranks; returns its lowered pipeline.

        `own`: the layers of the user's own model, in place of the config's.
        """
        self.check_ranks(ranks)
        self._check_batch(config.train.global_batch)
        self.check_together(config.train.global_batch, config.sequences_together)
        self.check_gradients(config)
        self.check_units(unit_names(config.model) if own is None else own.names)
        if own is None:
            self.check_model(config.model)
        else:
            self._check_pipeline()
            self._check_own_grid(own)
        from fourfold.program.stages import lay_out_pipeline  # it needs this module

        early = self.updates_early(config)
        return lay_out_pipeline(own or config.model, self, config.train.global_batch, early=early)

    def updates_early(self, config: Config) -> bool:
        """Whether a unit's update may start in the backward, as soon as its own gradient is reduced."""
        return self.memory.optimizer != "device" and (not config.needs_norm or self.rolls_back(config))

    def rolls_back(self, config: Config) -> bool:
        """Whether updates that need the gradient norm start before it is known, to be undone if it is not fine."""
        if self.memory.optimizer == "device" or not config.needs_norm:
            return False
        if self.memory.rollback == "auto":
            return not schema.parse_bytes(self.memory.staging, "memory.staging") and self.mesh.row == 1
        return schema.parse_bytes(self.memory.rollback, "memory.rollback") > 0

    def check_gradients(self, config: Config) -> None:
        """Raise PlanError if gradients are to be consumed in the backward, but are needed after it."""
        memory = self.memory
        if memory.gradients != "consume":
            return
        unknown = memory.optimizer == "auto" and not memory.device_state
        if memory.optimizer == "device" or unknown:
            where = f"memory.optimizer = '{memory.optimizer}'{' without device_state' if unknown else ''}"
            raise PlanError(
                f"memory.gradients = 'consume' needs state on the host, in a size known before the first step, but {where}; use "
                "optimizer = 'host', or 'auto' with device_state"
            )
        micro = self.micro_batches(config.train.global_batch)
        for found, needs, instead in (
            (config.optim.clip, f"optim.clip = {config.optim.clip} needs the norm of all of them", "optim.clip = 0"),
            (config.train.guard, "train.guard = true checks all of them before any update", "train.guard = false"),
            (micro > 1, f"they are summed over {micro} micro-batches", "batch.micro_batches = 1"),
        ):
            if found:
                raise PlanError(
                    f"memory.gradients = 'consume' frees a gradient after its update in the backward, but {needs}; use {instead}"
                    ", or gradients = 'keep'"
                )

    def check_units(self, units: list[str]) -> None:
        """Raise PlanError unless every rule matches a unit and can be applied."""
        self._check_rules(units)
        self.check_sharding(units)

    def check_model(self, model: ModelConfig) -> None:
        """Raise PlanError unless the model can run on the pipeline and the grid."""
        self._check_pipeline()
        self._check_grid(model)
        if self.precision.matmul == "fp8":
            self._check_fp8(model)

    def _check_fp8(self, model: ModelConfig) -> None:
        """Raise PlanError unless the linears of blocks can compute in fp8."""
        for axis in ("row", "col"):
            if getattr(self.mesh, axis) > 1:
                raise PlanError(
                    f"precision.matmul = 'fp8' with mesh.{axis} = {getattr(self.mesh, axis)}: linears on a tensor grid "
                    f"multiply in the compute type only; use {axis} = 1, and data, depth or pipe for the rest, or "
                    "matmul = 'compute'"
                )
        if model.lora is not None:
            raise PlanError(
                "precision.matmul = 'fp8' with adapters (LoRA): a linear with an adapter multiplies in the compute type only; "
                "use matmul = 'compute', or train all weights"
            )
        assert model.ffn is not None
        heads, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
        up = (2 if model.gated else 1) * model.ffn
        for what, width in (
            ("hidden", model.hidden),
            ("heads · head_dim", heads),
            ("(heads + 2 kv_heads) · head_dim", heads + 2 * keys),
            ("ffn", model.ffn),
            ("2 ffn", up),
        ):
            if width % FP8_WIDTH:
                raise PlanError(
                    f"precision.matmul = 'fp8': the model's {what} is {width}, and numbers of inputs and outputs of fp8 matmuls "
                    f"are multiples of {FP8_WIDTH}; use {-(-width // FP8_WIDTH) * FP8_WIDTH}, or matmul = 'compute'"
                )
        for name in unit_names(model):
            split = self.rule_for(name).split
            if name.endswith(".mlp") and split > 1 and model.ffn % (FP8_WIDTH * split):
                fits = [n for n in range(1, split) if model.ffn % (FP8_WIDTH * n) == 0]
                raise PlanError(
                    f"precision.matmul = 'fp8': unit '{name}' with split = {split} has slices of ffn {model.ffn} / {split} "
                    f"inputs, and they must be a multiple of {FP8_WIDTH}; use split = {fits[-1]}, or matmul = 'compute'"
                )

    def check_ranks(self, ranks: int | None) -> None:
        """Raise PlanError unless the mesh has this many ranks."""
        if ranks is None or self.mesh.ranks == ranks:
            return
        fixed = self.mesh.ranks // self.mesh.data
        if ranks % fixed == 0:
            hint = f"data = {ranks // fixed} would make it {ranks}"
        else:
            hint = f"or start {self.mesh.ranks} ranks"
        raise PlanError(f"the mesh is {self.mesh.product()} ranks, but there are {ranks}; {hint}")

    def _check_batch(self, global_batch: int) -> None:
        ways, micro = self.mesh.batch_ways, self.batch.micro_batches or 1
        if global_batch % (ways * micro):
            step = ways * micro
            low, high = global_batch // step * step, -(-global_batch // step) * step
            split = " · ".join(f"{a} {getattr(self.mesh, a)}" for a in ("data", "depth", "row") if a in self._wide())
            factors = " · ".join(filter(None, [split, f"micro_batches {micro}" if micro > 1 else ""]))
            near = f"{low} or {high}" if low else f"{high}"
            raise PlanError(
                f"train.global_batch = {global_batch} does not divide by {factors} = {step}; use {near} sequences"
            )

    def check_together(self, global_batch: int, together: int) -> None:
        """Raise PlanError unless every micro-batch holds a multiple of `together` sequences, which a loss compares."""
        size = self.micro_batch_size(global_batch)
        if size % together:
            ways, micro = self.mesh.batch_ways, self.micro_batches(global_batch)
            raise PlanError(
                f"a micro-batch has train.global_batch {global_batch} / (data · depth · row {ways} · micro_batches {micro}) = "
                f"{size} sequences, but the loss compares {together} that must be in one; use a global_batch of "
                f"{ways * micro * together} or a multiple, or fewer micro_batches"
            )

    def _wide(self) -> list[str]:
        return [axis for axis, n in self.mesh.degrees.items() if n > 1]

    def _check_rules(self, units: Iterable[str]) -> None:
        units = list(units)
        for rule in self.unit:
            if not fnmatch.filter(units, rule.match):
                number = rule.match.split(".")[1:2]
                if number and number[0].isdigit() and rule.match.startswith("blocks."):
                    raise PlanError(
                        f"no unit matches '{rule.match}': this model's last is {units[-2]}; the plan is for another"
                    )
                raise PlanError(f"no unit matches '{rule.match}'{schema.nearest(rule.match, _patterns(units))}")

    def check_sharding(self, units: Iterable[str]) -> None:
        """Check `within`, and that the modes' collectives have the same order on all replicas."""
        replicas = self.mesh.data * self.mesh.depth
        for rule in self.unit:
            if rule.within and replicas % rule.within:
                raise PlanError(
                    f"unit '{rule.match}': within = {rule.within} does not divide the replica group, "
                    f"data {self.mesh.data} · depth {self.mesh.depth} = {replicas}; use {nearest_divisor(replicas, rule.within)}"
                )
        if self.pipeline.executor != "message-driven" or replicas == 1:
            return
        for rule in map(self.rule_for, units):
            for what, value, instead in (
                ("mode", rule.mode if rule.mode in ("zero2", "zero3") and rule.within != 1 else "", "keep"),
                ("reduce", rule.reduce if rule.reduce == "micro-batch" else "", "step"),
            ):
                if value:
                    raise PlanError(
                        f"unit '{rule.match}': {what} = '{value}': the message-driven executor's order depends on time, so "
                        f"replicas would issue collectives in different orders; use {what} = '{instead}' or executor = 'ordered'"
                    )

    def _check_pipeline(self) -> None:
        p = self.pipeline
        if p.slack and p.executor == "ordered" and p.schedule not in ("1f1b", "synthesized"):
            raise PlanError(
                f"pipeline.slack = {p.slack}: the ordered executor follows '{p.schedule}' exactly; use schedule = '1f1b' or "
                f"'synthesized', or executor = 'message-driven'"
            )

    def _check_own_grid(self, own: OwnLayers) -> None:
        if self.precision.matmul == "fp8":
            raise PlanError(
                "precision.matmul = 'fp8': layers of your own model run unchanged; use matmul = 'compute', or linears of your "
                "own that compute in fp8"
            )
        for axis in ("row", "col"):
            if getattr(self.mesh, axis) > 1 and not own.grid:
                raise PlanError(
                    f"mesh.{axis} = {getattr(self.mesh, axis)}: layers of your own model run unchanged: there are no rules "
                    f"to put them on a tensor grid; give fit(…, grid_rules=…), or use {axis} = 1, and pipe, data or depth for "
                    "the rest"
                )
        if self.tensor.residual == "hidden":
            raise PlanError(
                "tensor.residual = 'hidden': between layers of your own model every column has all features; use 'sequence'"
            )
        self._check_flows()

    def _check_grid(self, model: ModelConfig) -> None:
        mesh = self.mesh
        if mesh.col > model.heads:
            raise PlanError(
                f"mesh.col = {mesh.col}: every column needs an attention head, and the model has {model.heads}; "
                f"use col = {model.heads} at most, and row or depth for the rest"
            )
        if mesh.col > model.seq_len:
            raise PlanError(
                f"mesh.col = {mesh.col}: every column needs a token of a sequence, and model.seq_len = {model.seq_len}; "
                f"use col = {model.seq_len} at most"
            )
        self._check_flows()

    def _check_flows(self) -> None:
        mesh, tensor = self.mesh, self.tensor
        square = "summa" in (tensor.flow, *dataclasses.asdict(tensor.flows).values())
        if square and mesh.row != mesh.col:
            side = math.isqrt(mesh.row * mesh.col)
            hint = f"row = col = {side}, or " if side * side == mesh.row * mesh.col else ""
            raise PlanError(
                f"tensor.flow = 'summa' broadcasts over square planes, but mesh.row = {mesh.row} and mesh.col = {mesh.col}; "
                f"use {hint}flow = 'auto', which takes any rectangle"
            )
        if self.precision.compile is True and (reason := self.not_compiled):
            raise PlanError(f"precision.compile: {reason}")

    @property
    def not_compiled(self) -> str:
        """Why the units of this plan cannot be compiled, and what to use instead; empty where they can."""
        mesh, tensor = self.mesh, self.tensor
        if mesh.col > 1 and "summa" in (tensor.flow, *dataclasses.asdict(tensor.flows).values()):
            return "torch cannot capture the reductions of tensor.flow = 'summa'; use flow = 'auto'"
        kept = [what for what in tensor.keep if what != "inputs"]
        if kept and mesh.row > 1:
            return (
                f"a compiled graph gathers and sums on its own, and tensor.keep = '{kept[0]}' cannot be kept; use keep = [] "
                "or ['inputs']"
            )
        return ""

    def compiles(self, kind: str) -> bool:
        """Whether units are compiled on devices of a kind ("cuda" or "cpu")."""
        return self.precision.compiles(kind) and not self.not_compiled


def _patterns(units: list[str]) -> list[str]:
    """Unit names with the block number as `*`, in order, each once."""
    return list(dict.fromkeys(".".join("*" if p.isdigit() else p for p in name.split(".")) for name in units))
