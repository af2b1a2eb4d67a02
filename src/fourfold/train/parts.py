"""The parts a rank is assembled from, each made from the plan: grid, units, stages, handles, messages, runner.

Every function returns what it makes and changes no argument except the model's layers (`put_on_grid`, `make_units`).
`UnitHandle` combines sharding, tied weights, the grid and the streamed optimizer: one object per unit, which the program
calls.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from fourfold.config import Config
from fourfold.errors import PlanError
from fourfold.model.adapter import freeze
from fourfold.model.build import fill_initial
from fourfold.model.fp8 import fp8_missing, use_fp8
from fourfold.model.head_loss import ChunkedLoss
from fourfold.model.lora import is_adapter
from fourfold.model.spec import tied_parameters
from fourfold.model.transformer import Transformer
from fourfold.plan import Plan
from fourfold.program.choices import ResolvedUnit
from fourfold.program.groups import GroupSpec
from fourfold.program.stages import PipelineLayout
from fourfold.runtime.direct import form_of
from fourfold.runtime.executor import Executor
from fourfold.runtime.message_driven import drive
from fourfold.runtime.runner import Runner
from fourfold.runtime.sizes import INLINE
from fourfold.runtime.stage import ChainLink, Keeper, Stage
from fourfold.runtime.transport import Transport
from fourfold.runtime.wire import DevicePort, HostPort, Port, StagedPort
from fourfold.shard.joined import join_units
from fourfold.shard.sharing import Reductions, Sharing
from fourfold.shard.split import Serial, Slice, adds_to_sum, slices_of
from fourfold.shard.tied import TiedCopy, TiedOwner
from fourfold.shard.unit import Borrowed, Unit
from fourfold.tensor.grid import Axis, Grid
from fourfold.tensor.late import GradientSums, WeightPrefetch
from fourfold.tensor.linear import GridLinear, GridSettings
from fourfold.tensor.slices import GridCutter
from fourfold.tensor.swap import parallelize, pieces_of
from fourfold.train.mesh import RankMesh
from fourfold.train.optim import AdamW
from fourfold.train.streamed import StreamedUnits

__all__ = [
    "DTYPES",
    "RankStages",
    "RankUnits",
    "UnitHandle",
    "compute_in_fp8",
    "grid_settings",
    "make_grid",
    "make_handles",
    "make_runner",
    "make_sharing",
    "make_stages",
    "make_transport",
    "make_units",
    "message_shape",
    "put_on_grid",
    "set_loss_chunks",
    "types_of",
]

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
"""By their names in a plan."""
TIED = ("embed", "head")
"""Units that may share a weight."""


@dataclass(frozen=True)
class RankUnits:
    """The units of a rank, by name."""

    units: dict[str, Unit]
    slices: dict[str, Slice]
    """The part of the model that each unit computes."""
    ties: dict[str, TiedOwner | TiedCopy]
    """This rank's side of weights that are tied across ranks."""
    bases: dict[str, Unit] = field(default_factory=dict)
    """With LoRA, the frozen weights of each unit ([Note: frozen weights] in shard/unit.py), and of a copy of the embedding."""


@dataclass(frozen=True)
class RankStages:
    """The stages of a rank by number, and the shared state of its linears on the grid."""

    stages: dict[int, Stage]
    linears: dict[str, list[GridLinear]]
    """By unit; empty without a grid."""
    sums: GradientSums
    """Weight gradients that are being summed over `row`."""


class UnitHandle:
    """The operations that a program calls on one unit: GATHER, RELEASE, REDUCE and STREAM.

    Linears on the grid sum their weight gradients over `row` before the unit is reduced, and drop what they keep when it is
    released. A tied weight exchanges its gradient with the other rank before it is reduced.
    """

    def __init__(
        self,
        unit: Unit,
        tie: TiedOwner | TiedCopy | None,
        linears: Sequence[GridLinear],
        sums: GradientSums,
        optimizer: AdamW | StreamedUnits | None,
    ):
        self.unit, self.tie, self.linears, self.sums, self.optimizer = unit, tie, linears, sums, optimizer

    def gather(self) -> None:
        self.unit.gather()

    def release(self) -> None:
        for linear in self.linears:
            linear.forget()
        self.unit.release()

    def reduce(self) -> None:
        for linear in self.linears:
            linear.flush()
            linear.forget()
        self.sums.then((self.tie or self.unit).reduce)

    def stream(self) -> None:
        assert isinstance(self.optimizer, StreamedUnits), "STREAM in a program whose optimizer state is on the device"
        self.sums.settle()  # the reduction must have been started
        self.optimizer.stream(self.unit)


def types_of(plan: Plan) -> tuple[torch.dtype, torch.dtype]:
    """The types of a plan's compute and of its reductions; the latter are at least as wide."""
    compute = DTYPES[plan.precision.compute]
    return compute, torch.promote_types(DTYPES[plan.precision.reduce], compute)


def make_grid(mesh: RankMesh, plan: Plan) -> Grid:
    """This rank's lines of the tensor grid."""
    row, col = (
        Axis(axis, mesh.size(axis), mesh.coordinates[axis], mesh.group(axis), overlap=plan.tensor.overlap)
        for axis in ("row", "col")
    )
    return Grid(row, col, tuple(axis for axis in ("data", "depth") if mesh.size(axis) > 1))


def grid_settings(
    grid: Grid, config: Config, plan: Plan, compute: torch.dtype, reduce: torch.dtype, *, positions: int = 0
) -> GridSettings:
    """What the layers on a grid share; `positions`: of a sample of the user's own, whose rows are sequences of one token."""
    return GridSettings(
        grid,
        seq_len=1 if positions else config.model.seq_len,
        tokens=plan.micro_batch_size(config.train.global_batch) * (positions or config.model.seq_len),
        flow=plan.tensor.flow,
        flows=asdict(plan.tensor.flows),
        residual=plan.tensor.residual,
        compute_bytes=compute.itemsize,
        reduce_bytes=reduce.itemsize,
        keep=frozenset(plan.tensor.keep),
        micro_batches=plan.micro_batches(config.train.global_batch),
    )


def put_on_grid(
    model: Transformer, grid: Grid, config: Config, plan: Plan, compute: torch.dtype, reduce: torch.dtype
) -> None:
    """Swap the model's layers for those of the grid, where it is more than one rank."""
    if grid.row.size * grid.col.size == 1:
        return
    parallelize(model, grid_settings(grid, config, plan, compute, reduce))
    model.tie()


def set_loss_chunks(model: Transformer, config: Config, plan: Plan, layout: PipelineLayout) -> None:
    """Let the head compute its loss a chunk of tokens at a time, where the plan says so.

    Not where the vocabulary is split into slices, whose logits do not all exist at once either, nor with the flow `summa`, which
    broadcasts W in parts. Gradients are computed with the loss where the last stage's backward follows its forward.
    """
    head, col = model.head, plan.mesh.col
    tokens = plan.micro_batch_size(config.train.global_batch) * config.model.seq_len
    rows = plan.memory.logit_rows(tokens, -(-config.model.vocab // col), plan.precision.compute_bytes)
    if not rows or layout.choices["head"].slices > 1:
        return
    if isinstance(head.proj, GridLinear) and head.proj.matmul.flow != "os":
        return
    one = layout.in_flight(len(layout.units) - 1) == 1 and plan.pipeline.executor == "ordered"
    head.chunked = ChunkedLoss(rows, head.softcap, at_once=one)


def make_units(
    config: Config,
    plan: Plan,
    mesh: RankMesh,
    grid: Grid,
    layout: PipelineLayout,
    model: Transformer,
    *,
    device: torch.device,
    compute: torch.dtype,
    reduce: torch.dtype,
) -> RankUnits:
    """The units of this rank's stages, with their initial weights; the model's parameters become views of them.

    A tied weight whose two users are on this rank is one parameter; if they are on two ranks, one owns it and the other
    holds a copy (shard/tied.py). With LoRA it is frozen, and nothing is exchanged.
    """
    sharings = {shards: make_sharing(mesh, shards) for shards in sorted({c.shards for c in layout.choices.values()})}
    reductions = Reductions(min(plan.memory.prefetch, 1))
    row, plane = grid.row.group, mesh.group("row", "col")

    def make(name: str, of: str, part: Slice, borrow: dict[str, Borrowed] | None = None) -> Unit:
        names, lent = [n for n, _ in part.module.named_parameters()], dict(borrow or {})
        if frozen:
            freeze(part.module)
            base = make_one(f"{name} (base)", of, part, [n for n in names if not is_adapter(n) and n not in lent], {})
            held.bases[name] = base
            names, lent = list(filter(is_adapter, names)), lent | {n: Borrowed(base, n) for n in base.params}
            for n in names:  # a factor that all slices of a layer share
                mine, others = part.pieces[n], [held.units.get(other) for other in layout.choices[of].names]
                owner = next((u for u in others if u and mine and u.pieces.get(n) == mine), None)
                if owner is not None:
                    lent[n] = Borrowed(owner, n)
        return make_one(name, of, part, [n for n in names if n not in lent], lent)

    def make_one(name: str, of: str, part: Slice, names: list[str], borrow: dict[str, Borrowed]) -> Unit:
        copied = {n: part.pieces[n][0].copies_over for n in names if part.pieces[n]}
        sums = {n: plane if "col" in over else row for n, over in copied.items() if {"row", "col"} & {*over}}
        unit = Unit.of(
            name,
            part.module,
            pieces=part.pieces,
            borrow=borrow,
            device=device,
            compute=compute,
            reduce=reduce,
            sharing=sharings[layout.choices[of].shards],
            reductions=reductions,
            sum_over={n: group for n, group in sums.items() if group is not None},
            names=names,
            sliced=layout.choices[of].slices > 1,
        )
        for n, parameter in unit.params.items():
            for piece in unit.pieces[n] if config.model.init == "random" or is_adapter(n) else ():
                fill_initial(parameter, piece, config.model, config.train.seed)
        unit.scatter()
        return unit

    held, place, here = RankUnits({}, {}, {}), layout.rank_of, mesh.coordinates["pipe"]
    first, last = layout.choices["embed"].names[0], layout.choices["head"].names[0]
    tied = bool(tied_parameters(config.model))
    frozen = config.model.lora is not None
    on_two_ranks = tied and place[first] != place[last]
    pair = mesh.pair("pipe", place[first], place[last], use="tied") if on_two_ranks and not frozen else None
    for of, module in model.units().items():
        names = layout.choices[of].names
        if place[names[0]] != here:
            continue
        lender = None
        if of == "head" and tied:
            whole_embed = Slice(model.embed, pieces_of(model.embed, "embed", grid))
            lender = make("embed (copy)", "embed", whole_embed) if on_two_ranks else held.units["embed"]
            lender = held.bases[lender.name] if frozen else lender
        slices = layout.choices[of].slices
        parts = [Slice(module, pieces_of(module, of, grid), "last" if adds_to_sum(module) else "no")]
        if slices > 1:
            cutter = GridCutter(grid) if grid.row.size * grid.col.size > 1 else Serial(grid.copies())
            parts = slices_of(of, module, slices, per_matrix=len(names) > slices, cutter=cutter)
        for name, part in zip(names, parts, strict=True):
            rows = part.tied_rows.get("proj.weight")
            borrow = {"proj.weight": Borrowed(lender, "tokens.weight", rows)} if lender is not None else None
            held.units[name] = make(name, of, part, borrow)
            held.slices[name] = part
        if pair is not None and of == "embed":
            held.ties[first] = TiedOwner(held.units[first], pair, "tokens.weight")
        elif pair is not None and lender is not None:
            held.ties[last] = TiedCopy(held.units[last], lender, pair, "tokens.weight")
    if plan.memory.optimizer == "device":  # a streamed bucket waits only for its own unit
        alone = {c.names[0] for of, c in layout.choices.items() if _sums_may_wait(c) and not (tied and of in TIED)}
        for stage, names in enumerate(layout.units):
            if layout.schedule.placement[stage] == here:
                join_units([held.units[name] for name in reversed(names) if name in alone])
    return held


def compute_in_fp8(held: RankUnits, device: torch.device) -> None:
    """Let the linears of blocks compute in fp8; raises PlanError on a GPU without fp8 matmuls."""
    if reason := fp8_missing(device):
        raise PlanError(f"precision.matmul = 'fp8': {reason}; use matmul = 'compute'")
    for name, part in held.slices.items():
        if name.startswith("blocks."):
            use_fp8(part.module)


def _sums_may_wait(choice: ResolvedUnit) -> bool:
    """Whether a unit's gradient may share an all-reduce with other units."""
    return choice.shards == choice.slices == 1 and choice.reduce == "step"


def make_sharing(mesh: RankMesh, shards: int) -> Sharing:
    """The replica group in runs of `shards` ranks, with their process groups; all ranks call it in the same order."""
    run, across = mesh.divided(shards, "data", "depth")
    at = mesh.index("data", "depth")
    return Sharing(
        shards,
        at % shards,
        len(across),
        at // shards,
        mesh.group_of(run, use="parameters"),
        mesh.group_of(run, use="gradients"),
        mesh.group_of(across, use="gradients"),
    )


def make_stages(
    config: Config,
    plan: Plan,
    mesh: RankMesh,
    layout: PipelineLayout,
    held: RankUnits,
    keeper: Keeper | None = None,
    *,
    own: bool = False,
    compiled: bool = False,
) -> RankStages:
    """This rank's stages, each a chain of its units' modules; `own`: of the user's own model, which may draw random numbers."""
    recompute = {name: choice.recompute for choice in layout.choices.values() for name in choice.names}
    number_of = {name: i for i, choice in enumerate(layout.choices.values()) for name in choice.names}
    made = RankStages({}, {}, GradientSums(int(plan.tensor.overlap)))
    for number, names in enumerate(layout.units):
        if layout.schedule.placement[number] == mesh.coordinates["pipe"]:
            links = []
            for name in names:
                part = held.slices[name]
                chunked = getattr(part.module, "chunked", None) is not None  # a loop with a gradient of its own
                links.append(
                    ChainLink(
                        name,
                        held.units[name],
                        part.module,
                        "none" if chunked and recompute[name] == "selective" else recompute[name],
                        compiled and not chunked,
                        part.adds,
                        part.takes_extra,
                        getattr(part.module, "takes_documents", False),
                        held.units[name].sliced,
                    )
                )
            reseed = (
                _reseeder(config, mesh, [number_of[name] for name in names], own)
                if config.model.dropout or own
                else None
            )
            watch = None
            if mesh.size("row", "col") > 1:
                watch = WeightPrefetch(made.sums)
                made.linears.update((link.name, _serve_linears(link, watch, made.sums)) for link in links)
            made.stages[number] = Stage(
                links, split=layout.schedule.split, reseed=reseed, keeper=keeper, watch=watch, first=number == 0
            )
    return made


def _serve_linears(link: ChainLink, ahead: WeightPrefetch, sums: GradientSums) -> list[GridLinear]:
    """Make a unit's linears prefetch their weights and defer the sums of their gradients; returns the linears."""
    linears = []
    for name, linear in link.module.named_modules():
        if isinstance(linear, GridLinear):
            weight = f"{name}.weight" if name else "weight"
            add, ready = functools.partial(link.unit.add_grad, weight), link.unit.ready
            linear.serve(ahead, sums, add, ready, selective=link.recompute == "selective")
            linears.append(linear)
    return linears


def make_handles(
    held: RankUnits, stages: RankStages, optimizer: AdamW | StreamedUnits | None = None
) -> dict[str, UnitHandle]:
    """A handle for every unit of the rank, which the program calls."""
    return {
        name: UnitHandle(unit, held.ties.get(name), stages.linears.get(name, ()), stages.sums, optimizer)
        for name, unit in held.units.items()
    }


def _reseeder(config: Config, mesh: RankMesh, numbers: list[int], own: bool) -> Callable[[int, int, int], None]:
    """Seed torch by (seed, step, micro-batch, unit, rank but for pipe) before a unit draws random numbers.

    `numbers` are those of the links' units in the model; slices of a unit share its number. Ranks of a column hold other
    tokens or features of one batch: every rank has a stream of its own. In the user's own model they hold the same.
    """
    part = mesh.index("data", "depth", "row", *(() if own else ("col",)))

    def reseed(step: int, micro_batch: int, link: int) -> None:
        key = f"{config.train.seed}:{step}:{micro_batch}:{numbers[link]}:{part}"
        torch.manual_seed(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little"))

    return reseed


def make_transport(
    config: Config,
    plan: Plan,
    mesh: RankMesh,
    layout: PipelineLayout,
    device: torch.device,
    timeout: float,
    *,
    own: bool = False,
) -> Transport | None:
    """The messages of this rank's pipeline; None if it has only one rank.

    `own`: for a user's own model, whose layers may return anything, so that messages have headers.
    """
    if mesh.size("pipe") == 1:
        return None
    form = None if own else form_of(message_shape(config, plan), DTYPES[plan.precision.compute])
    members, alone = mesh.members("pipe"), GroupSpec("edge", (mesh.rank,), gloo=True)

    def new_group(ranks: list[int]) -> dist.ProcessGroup:
        spec = (
            GroupSpec(f"edge {ranks[0]} to {ranks[1]}", tuple(members[r] for r in ranks)) if len(ranks) == 2 else alone
        )
        return mesh.new_group(spec, limit)

    # A receive may be posted long before its message; on gloo every wait has a separate timeout. On NCCL the group's timeout
    # also bounds how long an abort of its communicator may take.
    port: Port = HostPort(device)
    limit = timedelta(days=30)
    if device.type == "cuda":
        nccl = "nccl" in str(dist.get_backend_config())
        port = DevicePort(device) if nccl else StagedPort(device)
        limit = timedelta(seconds=3600 + 2 * timeout) if nccl else limit
    return Transport(
        mesh.coordinates["pipe"],
        layout.edges(),
        new_group,
        address=members.__getitem__,
        port=port,
        timeout=timeout,
        usual=INLINE if form is None else form.size,
        form=form,
    )


def message_shape(config: Config, plan: Plan) -> tuple[int, ...]:
    """The shape of a message between stages, for a micro-batch on one rank of the grid."""
    size, m, col = plan.micro_batch_size(config.train.global_batch), config.model, plan.mesh.col
    if plan.tensor.residual == "hidden":
        return size, m.seq_len, -(-m.hidden // col)
    if plan.mesh.row * col > 1:
        return -(-size * m.seq_len // col), m.hidden
    return size, m.seq_len, m.hidden


def make_runner(executor: Executor, plan: Plan, mesh: RankMesh, layout: PipelineLayout) -> Runner:
    """The runner of this rank's programs, with the plan's executor."""
    here = mesh.coordinates["pipe"]
    program, evaluation = layout.programs.of(here), layout.evaluation.of(here)
    freedom = None
    if plan.pipeline.executor == "message-driven":
        place = layout.schedule.placement
        mine = {u: tuple(s for s in at if place[s] == here) for u, at in layout.programs.stages_with.items()}
        buckets = {bucket.name: bucket.units for bucket in layout.programs.buckets}
        freedom = drive(program, mine, plan.pipeline.slack, buckets)
    # ranks of a plane communicate inside their ops
    together = mesh.group("row", "col") if freedom is not None else None
    return Runner(executor, program, evaluation, drive=freedom, together=together)
