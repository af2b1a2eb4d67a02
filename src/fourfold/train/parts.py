"""The parts a rank is assembled from, each made from the plan: units, stages, messages, runner."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from fourfold.config import Config
from fourfold.model.build import fill_initial
from fourfold.model.spec import tied_parameters
from fourfold.model.transformer import Transformer
from fourfold.plan import Plan
from fourfold.program.choices import UnitChoice
from fourfold.program.groups import Group
from fourfold.program.stages import PipelineLayout
from fourfold.runtime.executor import Executor, StreamVerbs, Verbs
from fourfold.runtime.message_driven import drive
from fourfold.runtime.runner import Runner
from fourfold.runtime.stage import Keeper, Link, Stage
from fourfold.runtime.transport import Transport
from fourfold.runtime.wire import DevicePort, HostPort, Port, StagedPort
from fourfold.shard.joined import join
from fourfold.shard.sharing import Reductions, Sharing
from fourfold.shard.split import Serial, Slice, slices_of
from fourfold.shard.tied import TiedCopy, TiedOwner
from fourfold.shard.unit import Borrowed, Unit
from fourfold.tensor.grid import Axis, Grid
from fourfold.tensor.late import Ahead, Sums
from fourfold.tensor.linear import GridLinear, Setting
from fourfold.tensor.slices import GridCutter
from fourfold.tensor.swap import parallelize, pieces_of
from fourfold.train.mesh import RankMesh

__all__ = [
    "Held",
    "make_grid",
    "make_runner",
    "make_sharing",
    "make_stages",
    "make_transport",
    "make_units",
    "put_on_grid",
]

TIED = ("embed", "head")
"""Units that may share a weight."""


@dataclass
class Held:
    """The units of a rank: by name; what each is made of; as the program's verbs; its end of a weight tied across ranks; its
    buckets."""

    units: dict[str, Unit] = field(default_factory=dict)
    slices: dict[str, Slice] = field(default_factory=dict)
    verbs: dict[str, Verbs] = field(default_factory=dict)
    ties: list[TiedOwner | TiedCopy] = field(default_factory=list)
    buckets: dict[str, StreamVerbs] = field(default_factory=dict)


def make_grid(mesh: RankMesh, plan: Plan) -> Grid:
    """This rank's lines of the tensor grid."""
    row, col = (
        Axis(axis, mesh.size(axis), mesh.coordinates[axis], mesh.group(axis), overlap=plan.tensor.overlap)
        for axis in ("row", "col")
    )
    return Grid(row, col, tuple(axis for axis in ("data", "depth") if mesh.size(axis) > 1))


def put_on_grid(
    model: Transformer, grid: Grid, config: Config, plan: Plan, compute: torch.dtype, reduce: torch.dtype
) -> None:
    """Swap the model's layers for those of the grid, where it is more than one rank."""
    if grid.row.size * grid.col.size == 1:
        return
    setting = Setting(
        grid,
        seq_len=config.model.seq_len,
        tokens=plan.micro_batch_size(config.train.global_batch) * config.model.seq_len,
        flow=plan.tensor.flow,
        flows=asdict(plan.tensor.flows),
        residual=plan.tensor.residual,
        compute_bytes=compute.itemsize,
        reduce_bytes=reduce.itemsize,
        keep=frozenset(plan.tensor.keep),
        micro_batches=plan.micro_batches(config.train.global_batch),
    )
    parallelize(model, setting)
    model.tie()


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
) -> Held:
    """The units of this rank's stages, with their initial weights; the model's parameters become views of them.

    A tied weight whose two users are on this rank is one parameter; where they are on two, one owns it and the other
    holds a copy (shard/tied.py).
    """
    sharings = {shards: make_sharing(mesh, shards) for shards in sorted({c.shards for c in layout.choices.values()})}
    reductions = Reductions(min(plan.memory.prefetch, 1))
    row, plane = grid.row.group, mesh.group("row", "col")

    def make(name: str, of: str, part: Slice, borrow: dict[str, Borrowed] | None = None) -> Unit:
        copied = {n: held[0].copies_over for n, held in part.pieces.items() if held}
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
            sliced=layout.choices[of].slices > 1,
        )
        for n, parameter in unit.params.items():
            for piece in unit.pieces[n]:
                fill_initial(parameter, piece, config.model, config.train.seed)
        unit.scatter()
        return unit

    held, place, here = Held(), layout.rank_of, mesh.coordinates["pipe"]
    first, last = layout.choices["embed"].names[0], layout.choices["head"].names[0]
    tied = bool(tied_parameters(config.model))
    apart = tied and place[first] != place[last]
    pair = mesh.pair("pipe", place[first], place[last], use="tied") if apart else None
    for of, module in model.units().items():
        names = layout.choices[of].names
        if place[names[0]] != here:
            continue
        lender = None
        if of == "head" and tied:
            whole_embed = Slice(model.embed, pieces_of(model.embed, "embed", grid))
            lender = make("embed (copy)", "embed", whole_embed) if apart else held.units["embed"]
        slices = layout.choices[of].slices
        parts = [Slice(module, pieces_of(module, of, grid))]
        if slices > 1:
            cutter = GridCutter(grid) if grid.row.size * grid.col.size > 1 else Serial(grid.copies())
            parts = slices_of(of, module, slices, per_matrix=len(names) > slices, cutter=cutter)
        for name, part in zip(names, parts, strict=True):
            rows = part.tied_rows.get("proj.weight")
            borrow = {"proj.weight": Borrowed(lender, "tokens.weight", rows)} if lender is not None else None
            held.units[name] = held.verbs[name] = make(name, of, part, borrow)
            held.slices[name] = part
        if pair is not None and of == "embed":
            held.ties.append(TiedOwner(held.units[first], pair, 1, "tokens.weight"))
            held.verbs[first] = held.ties[-1]
        elif pair is not None and lender is not None:
            held.ties.append(TiedCopy(held.units[last], lender, pair, 0, "tokens.weight"))
            held.verbs[last] = held.ties[-1]
    if plan.memory.optimizer == "device":  # a bucket waits for its own unit alone
        alone = {c.names[0] for of, c in layout.choices.items() if _sums_may_wait(c) and not (tied and of in TIED)}
        for stage, names in enumerate(layout.units):
            if layout.schedule.placement[stage] == here:
                join([held.units[name] for name in reversed(names) if name in alone])
    return held


def _sums_may_wait(choice: UnitChoice) -> bool:
    """Whether a unit's gradient may be summed together with those of others."""
    return choice.shards == choice.slices == 1 and choice.reduce == "step"


def make_sharing(mesh: RankMesh, shards: int) -> Sharing:
    """The replica group cut into runs of `shards` ranks, with their process groups; all ranks call it alike."""
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
    config: Config, plan: Plan, mesh: RankMesh, layout: PipelineLayout, held: Held, keeper: Keeper | None = None
) -> dict[int, Stage]:
    """This rank's stages by number, each a chain of its units' modules."""
    recompute = {name: choice.recompute for choice in layout.choices.values() for name in choice.names}
    number_of = {name: i for i, choice in enumerate(layout.choices.values()) for name in choice.names}
    stages, sums = {}, Sums(int(plan.tensor.overlap))
    for number, names in enumerate(layout.units):
        if layout.schedule.placement[number] == mesh.coordinates["pipe"]:
            links = []
            for name in names:
                part = held.slices[name]
                links.append(
                    Link(
                        name,
                        held.units[name],
                        part.module,
                        recompute[name],
                        plan.precision.compile,
                        part.adds,
                        part.takes_extra,
                        held.units[name].sliced,
                    )
                )
            reseed = _reseeder(config, mesh, [number_of[name] for name in names]) if config.model.dropout else None
            watch = _serve_linears(links, held, sums) if mesh.size("row", "col") > 1 else None
            stages[number] = Stage(links, split=layout.schedule.split, reseed=reseed, keeper=keeper, watch=watch)
    return stages


def _serve_linears(links: Sequence[Link], held: Held, sums: Sums) -> Ahead:
    """Give the linears of a stage what gathers their weights ahead and sums their gradients late."""
    ahead = Ahead(sums)
    for link in links:
        linears = []
        for name, linear in link.module.named_modules():
            if isinstance(linear, GridLinear):
                weight = f"{name}.weight" if name else "weight"
                add, ready = functools.partial(link.unit.add_grad, weight), link.unit.ready
                linear.serve(ahead, sums, add, ready, selective=link.recompute == "selective")
                linears.append(linear)
        held.verbs[link.name] = OnGrid(held.verbs[link.name], linears, sums)
        if link.name in held.buckets:
            held.buckets[link.name] = AfterSums(held.buckets[link.name], sums)
    return ahead


class OnGrid:
    """Verbs of a unit on the grid: its linears' gradients are summed over row, and what they keep is dropped, in time."""

    def __init__(self, verbs: Verbs, linears: Sequence[GridLinear], sums: Sums):
        self._verbs, self._linears, self._sums = verbs, linears, sums

    def gather(self) -> None:
        self._verbs.gather()

    def release(self) -> None:
        for linear in self._linears:
            linear.forget()
        self._verbs.release()

    def reduce(self) -> None:
        for linear in self._linears:
            linear.flush()
            linear.forget()
        self._sums.then(self._verbs.reduce)


class AfterSums:
    """A bucket whose unit's reduction must have been started."""

    def __init__(self, bucket: StreamVerbs, sums: Sums):
        self._bucket, self._sums = bucket, sums

    def stream(self) -> None:
        self._sums.settle()
        self._bucket.stream()


def _reseeder(config: Config, mesh: RankMesh, numbers: list[int]) -> Callable[[int, int, int], None]:
    """Seed torch by (seed, step, micro-batch, unit, rank but for pipe) before a unit draws random numbers.

    `numbers` are those of the links' units in the model; slices of a unit share its number. Ranks of a column hold other
    tokens or features of one batch: every rank has a stream of its own.
    """
    part = mesh.index("data", "depth", "row", "col")

    def reseed(step: int, micro_batch: int, link: int) -> None:
        key = f"{config.train.seed}:{step}:{micro_batch}:{numbers[link]}:{part}"
        torch.manual_seed(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little"))

    return reseed


def make_transport(
    config: Config, plan: Plan, mesh: RankMesh, layout: PipelineLayout, device: torch.device, timeout: float
) -> Transport | None:
    """The messages of this rank's pipeline; None when there is only one rank in it."""
    if mesh.size("pipe") == 1:
        return None
    tokens = plan.micro_batch_size(config.train.global_batch) * config.model.seq_len
    width = {"fp64": 8, "fp32": 4}.get(plan.precision.compute, 2)
    members, alone = mesh.members("pipe"), Group("edge", (mesh.rank,), gloo=True)

    def new_group(ranks: list[int]) -> dist.ProcessGroup:
        spec = Group(f"edge {ranks[0]} to {ranks[1]}", tuple(members[r] for r in ranks)) if len(ranks) == 2 else alone
        # a receive may be posted long before its message: waits have their own timeout
        return mesh.new_group(spec, timedelta(days=30))

    port: Port = HostPort(device)
    if device.type == "cuda":
        shared = "nccl" not in str(dist.get_backend_config())
        port = StagedPort(device) if shared else DevicePort(device)
    return Transport(
        mesh.coordinates["pipe"],
        layout.edges(),
        new_group,
        address=members.__getitem__,
        port=port,
        timeout=timeout,
        usual=tokens * config.model.hidden * width // mesh.size("col"),
    )


def make_runner(executor: Executor, plan: Plan, mesh: RankMesh, layout: PipelineLayout) -> Runner:
    """What runs this rank's programs, as the plan's executor."""
    here = mesh.coordinates["pipe"]
    program, evaluation = layout.programs.of(here), layout.evaluation.of(here)
    freedom = None
    if plan.pipeline.executor == "message-driven":
        place = layout.schedule.placement
        mine = {u: tuple(s for s in at if place[s] == here) for u, at in layout.programs.stages_with.items()}
        buckets = {bucket.name: bucket.units for bucket in layout.programs.buckets}
        freedom = drive(program, mine, plan.pipeline.slack, buckets)
    # ranks of a plane meet inside their ops
    together = mesh.group("row", "col") if freedom is not None else None
    return Runner(executor, program, evaluation, drive=freedom, together=together)
