"""Sharded data parallelism under a memory budget, on a shaped network: DDP, FSDP2, OSDP as published, and ours. One run.

    python -m benchmarks.sharding [--quick] [--only 4x1 4x4 8x1 8x4 own hosts batch] [--models narrow wide mixed] [--json PATH]
    python -m benchmarks.sharding --check

- **4x1, 4x4, 8x1, 8x4**: ranks × micro-batches. A host for each rank, 200 Mbit/s. GPTs: narrow and deep, wide and shallow, of
  mixed width.
- **own**: 4 and 8 ranks at the tightest budget of four micro-batches; the planner cuts each rank's four sequences as it likes, as
  it does for users. FSDP2, cut in the same way, is faster too (its row says how much, where that fits).
- **hosts**: two hosts of four ranks, 200 Mbit/s between them, nothing inside; for information.
- **batch**: wide and shallow, a budget in which FSDP2's ZeRO-3 has room for one sequence a rank; how many others have room for.

Steps are forward, backward and reductions, medians of three, contestants taking turns; where ours is within a tenth of the best
single mode that fits, those take turns again, ROUNDS times, and their ratio is of those medians. **Matrix products give zeros at
once** (`emulated_products`), so that two cores carry eight ranks: what is measured is communication and what the engines add.
`--check` compares the gradients of all contestants with real products. Bytes are counted (`fourfold.testing.budget`) on one rank
of a fake group, with eight bytes of AdamW's state for every parameter that the rank updates.

Contestants. DDP with `no_sync`; FSDP2 by transformer block, `reshard_after_forward` (ZeRO-3) or not (ZeRO-2), gradients
synchronised with the last micro-batch only; both on gloo as it is. OSDP: its two modes (unsharding an operator costs three copies
more, as in its profile), its cost model, its search (the objective mended: it took the shortest time at any batch), run by
our engine as zero2 and zero3, gradients reduced once a step where that fits. Ours: what the planner chooses with the cluster that
calibration found in the hosts, given the ranks and micro-batches of the others. Budgets: what FSDP2's ZeRO-3 needs ("tight"), a
third of the way from there to DDP ("middle"), a little less than DDP ("loose"), a little more ("ample").
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import Row, finish, lower_is_better, parser_of, show, take_turns
from fourfold.cluster import Cluster
from fourfold.config import Config
from fourfold.errors import PlanError
from fourfold.launch.place import Place
from fourfold.model.build import serial_model
from fourfold.model.operators import ModelSpec
from fourfold.plan import Plan, Precision, UnitRule
from fourfold.planner.api import find_plan
from fourfold.planner.evaluate import predict
from fourfold.planner.problem import PlanProblem, parse_fixes
from fourfold.testing.budget import Budget
from fourfold.testing.emulate import emulated_products
from fourfold.testing.network import Network, missing
from fourfold.testing.ranks import run_ranks
from fourfold.train.calibrate import calibrate
from fourfold.train.one_rank import OneRank, one_of_many
from fourfold.train.parallelize import Parallel, parallelize

RATE = "200mbit"
STATE = 8
"""Bytes of AdamW's state for a parameter."""
GOALS = {1: 1.2, 4: 2.5}
"""Times FSDP2's ZeRO-3, by micro-batches."""
ROUNDS = 21
"""Steps of those that are close to each other."""
MIB = 2**20


# ---- the models ----


class MixedBlock(nn.Module):
    """A layer of its own width, entered by a projection where the one before was of another."""

    def __init__(self, before: int, width: int, heads: int = 4):
        super().__init__()
        self.enter = nn.Linear(before, width) if before != width else nn.Identity()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_btd: Tensor) -> Tensor:
        x_btd = self.enter(x_btd)
        q, k, v = self.qkv(self.norm1(x_btd)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x_btd = x_btd + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x_btd + self.down(F.gelu(self.up(self.norm2(x_btd))))


class MixedHead(nn.Module):
    def __init__(self, width: int, vocab: int):
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, x_btd: Tensor, targets_bt: Tensor) -> Tensor:
        return F.cross_entropy(self.proj(self.norm(x_btd)).flatten(0, 1), targets_bt.flatten())


class MixedGpt(nn.Module):
    """A GPT whose layers differ in width."""

    def __init__(self, widths: Sequence[int], vocab: int):
        super().__init__()
        self.embed = nn.Embedding(vocab, widths[0])
        self.blocks = nn.ModuleList(MixedBlock(a, b) for a, b in zip([widths[0], *widths], widths, strict=False))
        self.head = MixedHead(widths[-1], vocab)

    def forward(self, tokens_bt: Tensor, targets_bt: Tensor) -> Tensor:
        x_btd = self.embed(tokens_bt)
        for block in self.blocks:
            x_btd = block(x_btd)
        return self.head(x_btd, targets_bt)


@dataclass(frozen=True)
class Model:
    """A model by the widths of its layers, and how it is fed. Equal widths: the package's own GPT; else MixedGpt."""

    name: str
    widths: tuple[int, ...]
    tokens: int = 16
    vocab: int = 64

    @property
    def mixed(self) -> bool:
        return len(set(self.widths)) > 1

    def config(self, batch: int) -> Config:
        model = {"family": "gpt", "layers": len(self.widths), "hidden": self.widths[0], "heads": 4, "tie": False}
        model |= {"seq_len": self.tokens, "vocab": self.vocab}
        train = {"global_batch": batch, "run_dir": "unused"}
        return Config.from_dict({"model": model, "train": train, "data": {"source": "stdlib"}}).resolve()

    def module(self) -> Any:
        torch.manual_seed(0)
        return MixedGpt(self.widths, self.vocab) if self.mixed else serial_model(self.config(1).model, 0)

    def spec(self) -> ModelSpec:
        if not self.mixed:
            return ModelSpec.from_config(self.config(1).model)
        sample = torch.zeros(1, self.tokens, dtype=torch.long)
        return ModelSpec.from_module(self.module(), (sample, sample))


LONG = [
    Model("narrow and deep, 10 × 128", (128,) * 10),
    Model("wide and shallow, 2 × 288", (288,) * 2),
    Model("mixed width, 6 of 128 or 256", (128, 128, 256, 128, 128, 256)),
]
SHORT = [
    Model("narrow and deep, 6 × 128", (128,) * 6),
    Model("wide and shallow, 2 × 224", (224,) * 2),
    Model("mixed width, 4 of 128 or 224", (128, 224, 128, 224)),
]
"""For several micro-batches: ZeRO-3 moves them that many times."""
KINDS = ("narrow", "wide", "mixed")


@dataclass(frozen=True)
class Task:
    """A model, the number of ranks, and the micro-batches of each with their sequences."""

    model: Model
    ranks: int
    micro_batches: int = 1
    sequences: int = 1

    @property
    def batch(self) -> int:
        return self.ranks * self.micro_batches * self.sequences

    def batches(self, rank: int) -> list[tuple[Tensor, Tensor]]:
        """Tokens and targets of a rank's micro-batches."""
        out = []
        for m in range(self.micro_batches):
            generator = torch.Generator().manual_seed(1000 * rank + m)
            shape = (2, self.sequences, self.model.tokens)
            tokens, targets = torch.randint(0, self.model.vocab, shape, generator=generator)
            out.append((tokens, targets))
        return out


# ---- the contestants: each a step, and the gradients it leaves ----


class Ours:
    """Our engine on a plan: the program's executor, or hooks for a module that is not of the package."""

    def __init__(self, task: Task, plan: Plan, rank: int):
        self.task, self.feed = task, task.batches(rank)
        self.one: OneRank | None = None
        self.parallel: Parallel | None = None
        if task.model.mixed:
            self.parallel = parallelize(task.model.module(), plan)
            tokens, targets = zip(*self.feed, strict=True)
            self.whole = torch.cat(tokens), torch.cat(targets)
        else:
            self.one = OneRank(task.model.config(task.batch), plan, rank)

    def step(self) -> None:
        if self.parallel is not None:
            self.parallel.step(self.whole)
        elif self.one is not None:
            self.one.step()

    def zero_grad(self) -> None:
        if self.parallel is not None:
            self.parallel.zero_grad()
        elif self.one is not None:
            self.one.zero_grad()

    @property
    def units(self) -> list[Any]:
        return list(self.parallel.units) if self.parallel is not None else list(self.one.units) if self.one else []

    @property
    def local(self) -> int:
        return sum(unit.shard.numel() for unit in self.units)

    def grads(self) -> dict[str, Tensor]:
        """Whole gradients of the sum of all losses (mixed: of their mean)."""
        out = {}
        for unit in self.units:
            flat = unit.shard_grad
            if unit.sharing.shards > 1:
                parts = [torch.empty_like(flat) for _ in range(unit.sharing.shards)]
                dist.all_gather(parts, flat, group=unit.sharing.gathers)
                flat = torch.cat(parts)
            prefix = "" if unit.name == "rest" else f"{unit.name}."
            for slot in unit.layout.slots:
                out[prefix + slot.name] = flat[slot.start : slot.stop].view(slot.shape)
        scale = 1.0 if self.task.model.mixed else 1e3  # OneRank's gradient of the loss
        return {name: scale * grad for name, grad in out.items()}


class Torch:
    """DDP, or FSDP2 by transformer block."""

    def __init__(self, task: Task, kind: str, rank: int):
        self.task, self.kind, self.feed = task, kind, task.batches(rank)
        module = task.model.module()
        if kind == "ddp":
            from torch.nn.parallel import DistributedDataParallel

            self.module: Any = DistributedDataParallel(module, gradient_as_bucket_view=True)
        else:
            from torch.distributed.fsdp import fully_shard

            for part in (module.embed, *module.blocks, module.head):
                fully_shard(part, reshard_after_forward=kind == "zero3")
            self.module = fully_shard(module)

    def step(self) -> None:
        for m, batch in enumerate(self.feed):
            last = m == len(self.feed) - 1
            if self.kind != "ddp":
                self.module.set_requires_gradient_sync(last)
                self.module(*batch).backward()
            elif last:
                self.module(*batch).backward()
            else:
                with self.module.no_sync():
                    self.module(*batch).backward()

    def zero_grad(self) -> None:
        self.module.zero_grad()

    @property
    def local(self) -> int:
        whole = self.kind == "ddp"
        return sum(p.numel() if whole else p.to_local().numel() for p in self.module.parameters())

    def grads(self) -> dict[str, Tensor]:
        named = self.module.module if self.kind == "ddp" else self.module
        whole = {n: p.grad if self.kind == "ddp" else p.grad.full_tensor() for n, p in named.named_parameters()}
        ranks = dist.get_world_size()  # torch's is the mean over ranks
        scale = 1 / self.task.micro_batches if self.task.model.mixed else ranks
        return {name: scale * grad for name, grad in whole.items()}


Entry = str | Plan
"""A contestant: one of torch's by name, or a plan for our engine."""


def start(task: Task, entry: Entry, rank: int) -> Ours | Torch:
    return Torch(task, entry, rank) if isinstance(entry, str) else Ours(task, entry, rank)


def needs(task: Task, entry: Entry) -> int:
    """Bytes that a contestant holds at its peak, counted. DDP, which a fake group does not serve, holds the same on any ranks."""
    key = (task, str(entry))
    if key not in _needs:
        if entry == "ddp":
            _needs[key] = run_ranks(lambda rank, ranks: _held(task, entry), 2)[0]
        else:
            with one_of_many(task.ranks):
                _needs[key] = _held(task, entry)
    return _needs[key]


_needs: dict[tuple[Task, str], int] = {}


def _held(task: Task, entry: Entry) -> int:
    budget = Budget(None)
    with emulated_products(), budget:
        made = start(task, entry, 0)
        for _ in range(2):
            made.step()
            made.zero_grad()
    return budget.peak.bytes + STATE * made.local


def timed(rank: int, ranks: int, task: Task, entries: Sequence[Entry], rounds: int) -> list[list[float]]:
    """Seconds of the contestants' steps, taking turns; the first turn is not counted."""
    with emulated_products():
        return take_turns([start(task, entry, rank) for entry in entries], rounds)


# ---- plans ----


def mode_plan(task: Task, mode: str, **more: Any) -> Plan:
    rule: Any = {"match": "*", "mode": mode} | more
    return Plan.from_dict(
        {"mesh": {"data": task.ranks}, "batch": {"micro_batches": task.micro_batches}, "unit": [rule]}
    )


def our_plan(task: Task, cluster: Cluster, budget: float, *fixes: str) -> Plan | None:
    """What the planner chooses for this task, within the budget as counted; None where nothing fits.

    Counted bytes decide: where they exceed the budget, the planner is asked again with as much less; where it refuses (it knows
    modules that are not of the package roughly), with a tenth more, up to half.
    """
    asked, over = budget, 0.0
    for _ in range(8):
        plan = _planned(task, cluster, asked, *fixes)
        if plan is None:
            if over > 0 or asked > 1.4 * budget:
                return None
            asked += 0.1 * budget
        elif (over := needs(task, plan) - budget) <= 0:
            return plan
        else:
            asked -= over + 0.005 * budget
    return None


def _planned(task: Task, cluster: Cluster, budget: float, *fixes: str) -> Plan | None:
    cluster = replace(cluster, device=replace(cluster.device, memory=str(int(budget)), reserve="0MiB", margin=0.0))
    problem = PlanProblem(task.model.spec(), cluster, task.batch, Precision())
    wanted = [f"data={task.ranks}", f"micro_batches={task.micro_batches}", *(fixes or ("recompute=none",))]
    try:
        return find_plan(problem, parse_fixes(wanted)).best.plan
    except PlanError:
        return None


def _fastest_mix(options: list[tuple[tuple[float, float], ...]], budget: float) -> tuple[int, ...] | None:
    """By dynamic programming: the option (bytes, seconds) of every operator with the least seconds within the budget."""
    front: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    for each in options:
        grown = sorted((m + size, s + time, (*path, k)) for m, s, path in front for k, (size, time) in enumerate(each))
        front, fastest = [], float("inf")
        for mix in grown:  # without those that another one dominates
            if mix[0] <= budget and mix[1] < fastest * (1 - 1e-12):
                front.append(mix)
                fastest = mix[1]
    return min(front, key=lambda mix: mix[1])[2] if front else None


def osdp_plan(
    task: Task, cluster: Cluster, budget: float, activations: float, reduce: str, split: int = 1
) -> Plan | None:
    """OSDP's choice: for every operator DP (as it runs: unsharded from forward to backward) or ZDP, by its own model.

    Memory is a sum: 16 bytes a parameter over the ranks, 12 more for DP, activations, and the largest operator gathered (a slice
    of it, where operators are split) with its gradient. Time: 2 or 3 rings of every operator.
    """
    spec, n = task.model.spec(), task.ranks
    ring = {u.name: cluster.collective("all_gather", 4 * u.parameters, n) for u in spec.units}
    surge = max(8 * u.parameters for u in spec.units) / split
    sizes = [
        ((16 * u.parameters / n, 3 * ring[u.name]), (16 * u.parameters / n + 12 * u.parameters, 2 * ring[u.name]))
        for u in spec.units
    ]
    chosen = _fastest_mix(sizes, budget - activations - surge)
    if chosen is None:
        return None
    sharded = [option == 0 for option in chosen]
    rules = tuple(
        UnitRule(
            match=u.name,
            mode="zero3" if z else "zero2",
            reduce="micro-batch" if reduce == "micro-batch" else "step",
            split=split if z and u.slices >= split else 1,
        )
        for u, z in zip(spec.units, sharded, strict=True)
    )
    return replace(mode_plan(task, "zero3"), unit=rules)


def osdp_that_fits(task: Task, cluster: Cluster, budget: float, split: int = 1) -> Plan | None:
    """Its plan, with gradients reduced once a step where there is room for them."""
    saved = sum(u.saved["none"].bytes(4) for u in task.model.spec().units)
    for reduce in ("step", "micro-batch"):
        plan = osdp_plan(task, cluster, budget, saved * task.sequences * task.model.tokens, reduce, split)
        if plan is not None and needs(task, plan) <= budget:
            return plan
    return None


# ---- one table ----


@dataclass(frozen=True)
class Lab:
    """Hosts and ranks on them."""

    hosts: int
    per_host: int = 1
    rate: str = RATE

    @contextmanager
    def up(self) -> Iterator[Callable[..., list[Any]]]:
        with Network(self.hosts, self.rate) as net:

            def run(fn: Callable[..., Any], *args: Any) -> list[Any]:
                return net.run_ranks(fn, *args, ranks_per_host=self.per_host, timeout=400, group_timeout=60)

            yield run

    def calibrated(self) -> Cluster:
        with self.up() as run:
            return run(_calibrated, self.per_host)[0]


def _calibrated(rank: int, ranks: int, per_host: int) -> Cluster:
    with emulated_products():
        return calibrate(Place(rank, ranks, rank % per_host, per_host), torch.device("cpu"), "shaped")


def race(task: Task, lab: Lab, cluster: Cluster, rounds: int) -> list[Row]:
    """All contestants of one task, at all budgets."""
    several = task.micro_batches > 1
    single: dict[str, Entry] = {"DDP": "ddp", "FSDP2 ZeRO-3": "zero3", "FSDP2 ZeRO-2": "zero2"}
    single |= {f"our {mode}": mode_plan(task, mode) for mode in ("replicate", "zero2", "zero3")}
    if several:
        single["our keep"] = mode_plan(task, "keep")
    bytes_of = {name: needs(task, entry) for name, entry in single.items()}
    low, high = bytes_of["FSDP2 ZeRO-3"], bytes_of["DDP"]
    budgets = {"tight": 1.01 * low, "middle": low + 0.33 * (high - low), "loose": 0.99 * high, "ample": 1.05 * high}
    chosen: dict[tuple[str, str], Entry | None] = {}
    for level, budget in budgets.items():
        chosen["OSDP", level] = osdp_that_fits(task, cluster, budget)
        chosen["ours", level] = our_plan(task, cluster, budget)
    entries = list(single.values())
    for plan in chosen.values():
        if plan is not None and plan not in entries:
            entries.append(plan)
    with lab.up() as run:
        found = run(timed, task, entries, rounds)[0]
        median = {i: statistics.median(times) for i, times in enumerate(found)}

        def ms(entry: Entry) -> float:
            return 1e3 * median[entries.index(entry)]

        close: list[Entry] = []
        for level, budget in budgets.items():
            ours = chosen["ours", level]
            fit = [entry for peer, entry in single.items() if bytes_of[peer] <= budget]
            fast = [entry for entry in fit if ours is not None and ms(entry) < 1.1 * ms(ours)]
            close += [entry for entry in (*fast, *([ours] if fast and ours else [])) if entry not in close]
        again = run(timed, task, close, ROUNDS)[0] if close and rounds > 1 else []
    closer = {close.index(entry): statistics.median(times) for entry, times in zip(close, again, strict=False)}

    def closely(entry: Entry) -> float:
        return 1e3 * closer[close.index(entry)] if entry in close and again else ms(entry)

    name = f"{task.model.name}; {task.ranks} ranks, {task.micro_batches} micro-batch{'es' if several else ''}"
    print(f"\n{name}")
    problem = PlanProblem(task.model.spec(), cluster, task.batch, Precision())

    def expected(entry: Entry) -> str:
        return f" (predicted {1e3 * predict(entry, problem).seconds:.0f})" if isinstance(entry, Plan) else ""

    for peer, entry in single.items():
        more = f", of {ROUNDS} rounds {closely(entry):.0f}" if again and entry in close else ""
        print(f"  {peer:14} {ms(entry):7.0f} ms{more}  {bytes_of[peer] / MIB:6.1f} MiB{expected(entry)}")
    rows = []
    for level, budget in budgets.items():
        ours, osdp = chosen["ours", level], chosen["OSDP", level]
        if ours is None:
            print(f"  {level:7} {budget / MIB:6.1f} MiB: missed: no plan of ours fits, FSDP2's ZeRO-3 does")
            continue
        held, spread = needs(task, ours), _spread(found[entries.index(ours)])
        fitting = {peer: closely(entry) for peer, entry in single.items() if bytes_of[peer] <= budget}
        best = min(fitting, key=lambda peer: fitting[peer])
        for peer in ("FSDP2 ZeRO-3", "FSDP2 ZeRO-2", "DDP"):
            if peer in fitting:
                mine, theirs = (f(e) for f in [closely if single[peer] in close else ms] for e in (ours, single[peer]))
                rows.append(lower_is_better(f"{name}; {level}", peer, "step ms", mine, theirs, spread))
        if osdp is not None:
            rows.append(lower_is_better(f"{name}; {level}", "OSDP", "step ms", ms(ours), ms(osdp), spread))
        mine = closely(ours) if single[best] in close else ms(ours)
        rows.append(lower_is_better(f"{name}; {level}", "best single mode", "step ms", mine, fitting[best], spread))
        names = [u.name for u in task.model.spec().units]
        counts = {mode: sum(rule_is(ours, name, mode) for name in names) for mode in MODES}
        modes = ", ".join(f"{n} {mode}" for mode, n in counts.items() if n)
        also = f"OSDP {ms(osdp):.0f} ms; " if osdp is not None else "OSDP has no plan; "
        print(
            f"  {level:7} {budget / MIB:6.1f} MiB: ours {ms(ours):.0f} ms{expected(ours)}, {held / MIB:.1f} MiB, {modes}; {also}"
            f"best single that fits: {best}, {fitting[best] / mine:.2f}; {ms('zero3') / ms(ours):.2f} × FSDP2 ZeRO-3"
        )
    return rows


MODES = ("replicate", "keep", "zero2", "zero3", "keep, reduced each", "zero3, reduced each")


def rule_is(plan: Plan, unit: str, mode: str) -> bool:
    rule = plan.rule_for(unit)
    return mode == rule.mode + (", reduced each" if rule.reduce == "micro-batch" else "")


def _spread(times: Sequence[float]) -> float:
    return (max(times) - min(times)) / statistics.median(times)


# ---- the batch that fits ----


def batch_rows(quick: bool) -> list[Row]:
    """Sequences a second within what FSDP2's ZeRO-3 needs for one sequence a rank (and half of a second one)."""
    lab, model = Lab(4), Model("wide and shallow, 2 × 288", (288,) * 2, tokens=48)
    cluster = lab.calibrated()
    one, two = (needs(Task(model, 4, 1, b), "zero3") for b in (1, 2))
    budget = (one + two) / 2
    found: dict[str, tuple[Task, Entry]] = {"FSDP2 ZeRO-3": (Task(model, 4), "zero3")}
    most = 3 if quick else 8
    for b in range(most, 0, -1):
        task = Task(model, 4, 1, b)
        plan = osdp_that_fits(task, cluster, budget, split=4)
        if plan is not None:
            found["OSDP, operators in 4 slices"] = task, plan
            break
    best = 0.0
    for m in (1, 4):
        for b in range(1, most + 1):
            task = Task(model, 4, m, b)
            plan = our_plan(task, cluster, budget, "optimizer=device")
            if plan is None:
                break
            seconds = predict(plan, PlanProblem(model.spec(), cluster, task.batch, Precision())).seconds
            if task.batch / seconds > best:
                best, found["ours"] = task.batch / seconds, (task, plan)
    rates = {}
    with lab.up() as run:
        for name, (task, entry) in found.items():
            times = run(timed, task, [entry], 1 if quick else 5)[0][0]
            rates[name] = task.batch / statistics.median(times)
            print(
                f"  {name}: {task.micro_batches} × {task.sequences} sequences a rank, {rates[name]:.1f} a second, "
                f"{needs(task, entry) / MIB:.1f} of {budget / MIB:.1f} MiB"
            )
    ours = rates["ours"]
    return [
        Row(f"{model.name}, {budget / MIB:.1f} MiB", peer, "sequences/s", ours, rate, ours / rate)
        for peer, rate in rates.items()
        if peer != "ours"
    ]


# ---- micro-batches of one's own ----


def own_rows(wanted: Sequence[str], quick: bool, sequences: int = 4) -> list[Row]:
    """Within what FSDP2's ZeRO-3 needs for micro-batches of one sequence: ours, and FSDP2 itself, with fewer and larger ones."""
    rows = []
    for ranks in (4,) if quick else (4, 8):
        lab = Lab(ranks)
        cluster = lab.calibrated()
        for model in [m for m in SHORT if m.name.split()[0] in wanted]:
            rows += _own(lab, cluster, model, ranks, sequences, 1 if quick else 5)
    goal = GOALS[sequences]
    found = [row.ratio for row in rows if row.peer == "FSDP2 ZeRO-3"]
    print(f"goal {goal} × FSDP2 ZeRO-3: met in {sum(ratio >= goal for ratio in found)} of {len(found)} cases")
    return rows


def _own(lab: Lab, cluster: Cluster, model: Model, ranks: int, sequences: int, rounds: int) -> list[Row]:
    budget = 1.01 * needs(Task(model, ranks, sequences), "zero3")
    tasks = [Task(model, ranks, m, sequences // m) for m in range(1, sequences + 1) if sequences % m == 0]
    found: dict[str, tuple[Task, Entry]] = {"FSDP2 ZeRO-3": (tasks[-1], "zero3")}
    if (fewest := next(t for t in tasks if needs(t, "zero3") <= budget)) is not tasks[-1]:
        found["FSDP2 ZeRO-3, larger ones"] = fewest, "zero3"
    best = float("inf")
    for task in tasks:
        plan = our_plan(task, cluster, budget)
        problem = PlanProblem(model.spec(), cluster, task.batch, Precision())
        if plan is not None and (seconds := predict(plan, problem).seconds) < best:
            best, found["ours"] = seconds, (task, plan)
    times = {}
    with lab.up() as run:
        for name, (task, entry) in found.items():
            times[name] = 1e3 * statistics.median(run(timed, task, [entry], rounds)[0][0])
            held = needs(task, entry) / MIB
            print(
                f"  {ranks} ranks, {name}: {task.micro_batches} × {task.sequences}, {times[name]:.0f} ms, {held:.1f} MiB"
            )
    ours = times.pop("ours")
    case = f"{model.name}, {ranks} ranks, {budget / MIB:.1f} MiB"
    return [lower_is_better(case, peer, "step ms", ours, theirs) for peer, theirs in times.items()]


# ---- parity ----


def _gradients(rank: int, ranks: int, task: Task, entry: Entry) -> dict[str, Tensor]:
    made = start(task, entry, rank)
    made.step()
    return {name: grad.clone() for name, grad in made.grads().items()}


def serial_gradients(task: Task) -> dict[str, Tensor]:
    module = task.model.module()
    every = [batch for rank in range(task.ranks) for batch in task.batches(rank)]
    for batch in every:
        (module(*batch) / (len(every) if task.model.mixed else 1)).backward()
    return {name: p.grad for name, p in module.named_parameters()}


TINY = (Model("equal widths", (32,) * 3), Model("mixed widths", (16, 32, 16)))


def check(models: Sequence[Model] = TINY, ranks: int = 2) -> Iterator[tuple[str, float]]:
    """The largest error of a parameter's gradient, over the largest gradient of it, for every contestant; real products."""
    for model in models:
        task = Task(model, ranks, micro_batches=2, sequences=2)
        want = serial_gradients(task)
        mixed = replace(
            mode_plan(task, "zero3"),
            unit=(
                UnitRule(match="blocks.0*", mode="keep"),
                UnitRule(match="blocks.1*", mode="zero3", reduce="micro-batch"),
                UnitRule(match="blocks.2*", mode="zero2"),
                UnitRule(match="*"),
            ),
        )
        entries: dict[str, Entry] = {
            "DDP": "ddp",
            "FSDP2 ZeRO-3": "zero3",
            "FSDP2 ZeRO-2": "zero2",
            "ours, mixed": mixed,
        }
        entries |= {f"ours, {mode}": mode_plan(task, mode) for mode in ("zero2", "zero3", "keep")}
        for name, entry in entries.items():
            found = run_ranks(_gradients, ranks, task, entry, timeout=100)
            worst = 0.0
            for grads in found:
                assert grads.keys() == want.keys(), f"{name}: {sorted(grads.keys() ^ want.keys())}"
                worst = max(
                    worst, *(float((grads[n] - w).abs().max() / w.abs().max().clamp(min=1e-6)) for n, w in want.items())
                )
            yield f"{model.name}, {name}", worst


# ---- the sections ----


def tables(ranks: int, micro_batches: int, wanted: Sequence[str], quick: bool, hosts: int = 0) -> list[Row]:
    lab = Lab(hosts or ranks, ranks // hosts if hosts else 1)
    cluster = lab.calibrated()
    models = SHORT if micro_batches > 1 or ranks > 4 else LONG
    rows: list[Row] = []
    for model in [m for m in models if m.name.split()[0] in wanted]:
        rows += race(Task(model, ranks, micro_batches), lab, cluster, 1 if quick else 3)
    verdict(rows, micro_batches)
    return rows


def verdict(rows: Sequence[Row], micro_batches: int) -> None:
    """Which goals are met, and which are not."""
    goal = GOALS[micro_batches]
    for row in rows:
        if row.peer == "FSDP2 ZeRO-3" and row.ratio < goal:
            print(f"missed: {row.case}: {row.ratio:.2f} × FSDP2 ZeRO-3, goal {goal}")
        if row.peer == "best single mode" and row.ratio < 0.97:
            print(f"missed: {row.case}: {row.ratio:.2f} × the best single mode that fits")
    met = [r for r in rows if r.peer == "FSDP2 ZeRO-3" and r.ratio >= goal]
    print(f"goal {goal} × FSDP2 ZeRO-3: met in {len(met)} of {sum(r.peer == 'FSDP2 ZeRO-3' for r in rows)} cases")


SECTIONS: dict[str, Callable[[Sequence[str], bool], list[Row]]] = {
    "4x1": partial(tables, 4, 1),
    "4x4": partial(tables, 4, 4),
    "8x1": partial(tables, 8, 1),
    "8x4": partial(tables, 8, 4),
    "own": own_rows,
    "hosts": partial(tables, 8, 4, hosts=2),
    "batch": lambda _, quick: batch_rows(quick),
}


def main() -> None:
    parser = parser_of(__doc__ or "", tuple(SECTIONS))
    parser.add_argument("--models", nargs="+", default=None, choices=KINDS, help="default: all; --quick: wide")
    parser.add_argument("--check", action="store_true", help="compare gradients with real products, and nothing else")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.check:
        for name, error in check():
            print(f"{name}: {error:.1e}")
        return
    if (why := missing()) is not None:
        sys.exit(why)
    rows: list[Row] = []
    for name in args.only:
        found = SECTIONS[name](args.models or (["wide"] if args.quick else KINDS), args.quick)
        show(f"\nsharding, {name}", found)
        rows += found
    finish("sharding", rows, args.json)


if __name__ == "__main__":
    main()
