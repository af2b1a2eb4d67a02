"""Lower bounds of a layout: no plan of it takes less, whatever its units choose. The certificate rests on them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.cluster import Cluster
from fourfold.config import ModelConfig
from fourfold.errors import ScheduleError
from fourfold.model.operators import ModelSpec
from fourfold.plan import Mesh, Pipeline, Plan, Precision
from fourfold.planner.api import find_plan
from fourfold.planner.evaluate import PlanEvaluation
from fourfold.planner.grid_cost import chosen_flows
from fourfold.planner.layouts import ParallelLayout, enumerate_layouts, keep_options
from fourfold.planner.lower_bounds import (
    compute_bound,
    in_flight_of_schedule,
    least_bytes,
    memory_bound,
)
from fourfold.planner.problem import PlanProblem, parse_fixes
from fourfold.planner.stage_partition import compute_only_seconds, in_flight_at_least, partition_layers
from fourfold.planner.unit_cost import UnitChoice, rules_of
from fourfold.planner.unit_options import OptionTable, UnitOption, sharding_options
from fourfold.program.from_plan import schedule_of_plan
from fourfold.program.ops import Schedule

MODELS = (
    ModelConfig(family="gpt", layers=12, hidden=768, heads=12, vocab=50304, seq_len=1024),
    ModelConfig(family="llama", layers=24, hidden=2048, heads=16, kv_heads=8, ffn=5632, vocab=32000, seq_len=2048),
    ModelConfig(family="llama", layers=28, hidden=3584, heads=28, kv_heads=4, ffn=18944, vocab=152064, seq_len=4096),
    ModelConfig(family="llama", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, seq_len=8192),
    ModelConfig(family="gpt", layers=40, hidden=5120, heads=40, vocab=50304, seq_len=2048),
    ModelConfig(family="gpt", layers=6, hidden=4096, heads=32, vocab=50304, seq_len=1024, tie=False),
)
PRESETS = ("v100-16g", "a100-40g", "a100-80g", "h100-sxm", "l4-pcie")
STYLES = ("smallest", "any", "alike", "replicate", "zero2", "zero3", "keep")


def random_problems(chance: random.Random) -> Iterator[PlanProblem]:
    while True:
        model, preset = chance.choice(MODELS), chance.choice(PRESETS)
        bandwidth = chance.choice(("x1", "x0.2", "x0.03", "x5"))
        cluster = Cluster.preset(preset, nodes=chance.choice((1, 1, 2))).what_if({"bandwidth": bandwidth})
        precision = Precision(compute="fp32" if preset.startswith("v100") else "bf16")
        yield PlanProblem(ModelSpec.from_config(model), cluster, chance.choice((8, 16, 32, 96)), precision)


def random_layout(chance: random.Random, every: list[ParallelLayout]) -> ParallelLayout:
    plain = [layout for layout in every if layout.mesh.pipe == 1]
    layout = chance.choice(plain if plain and chance.random() < 0.5 else every)
    return replace(
        layout,
        tensor=chance.choice(keep_options(layout.mesh, layout.micro_batches, layout.tensor, None)),
        optimizer=chance.choice(("device", "device", "auto", "host")),
        activations=chance.choice(("device", "device", "host")),
        prefetch=chance.choice((1, 1, 0)) if layout.replicas > 1 else 1,
    )


def random_choices(
    chance: random.Random, table: OptionTable, layout: ParallelLayout, style: str
) -> dict[str, UnitChoice]:
    """Every unit's: all the smallest, all of one mode, by kind, or anything."""
    problem = table.problem
    of_kind: dict[str, tuple[UnitOption, UnitOption]] = {}
    out = {}
    for unit in problem.spec.units:
        modes, again = table.sharding(layout, unit.kind), table.recompute(layout, unit.kind)
        mode, redone = chance.choice(modes), chance.choice(again)
        if style == "smallest":
            mode, redone = (min(options, key=lambda o: o.memory) for options in (modes, again))
        elif style == "alike":
            mode, redone = of_kind.setdefault(unit.kind, (mode, redone))
        elif style != "any":
            every = sharding_options(problem, layout, unit.kind)
            mode = chance.choice([o for o in every if o.choice.mode == style] or modes)
            _, redone = of_kind.setdefault(unit.kind, (mode, redone))
        out[unit.name] = mode.choice._replace(split=redone.choice.split, recompute=redone.choice.recompute)
    if problem.spec.tied:  # the head's matrix is the embedding's
        lender, head = out[problem.spec.units[0].name], problem.spec.units[-1].name
        out[head] = out[head]._replace(mode=lender.mode, reduce=lender.reduce, within=lender.within)
    return out


class Unlike(nn.Module):
    """A language model whose layers differ in width."""

    def __init__(self, widths: Sequence[int], vocab: int = 64):
        super().__init__()
        self.embed = nn.Embedding(vocab, widths[0])
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(a), nn.Linear(a, 4 * b), nn.GELU(), nn.Linear(4 * b, b))
            for a, b in zip([widths[0], *widths], widths, strict=False)
        )
        self.head = nn.Linear(widths[-1], vocab, bias=False)

    def forward(self, tokens_bt: Tensor, targets_bt: Tensor) -> Tensor:
        x_btd = self.embed(tokens_bt)
        for block in self.blocks:
            x_btd = block(x_btd)
        return F.cross_entropy(self.head(x_btd).flatten(0, 1), targets_bt.flatten())


def unlike_layers() -> PlanProblem:
    """A model whose layers differ, as a module: what pipelines have of it depends on where they cut."""
    sample = torch.zeros(1, 16, dtype=torch.long)
    spec = ModelSpec.from_module(Unlike((128, 224, 128, 160, 224, 96)), (sample, sample))
    return PlanProblem(spec, Cluster.preset("a100-40g").what_if({"bandwidth": "x0.05"}), 32, Precision())


def test_no_plan_beats_its_lower_bounds_in_the_memory_that_it_takes() -> None:
    """Random plans of random layouts: in exactly the bytes that one holds, its layout's lower bounds are not above its seconds."""
    chance, seen = random.Random(7), Counter[tuple[str, str]]()
    near = 0
    for problem in [unlike_layers(), *islice(random_problems(chance), 24)]:
        table, every = OptionTable(problem, {}), list(enumerate_layouts(problem, parse_fixes([])))
        for _ in range(8 if problem.spec.alike else 40):
            layout = random_layout(chance, every)
            try:
                schedule, counts = partition_layers(problem, layout)
            except ScheduleError:
                continue
            layers = tuple(n - (s == 0) - (s == schedule.stages - 1) for s, n in enumerate(counts))
            outer = compute_bound(problem, layout, grid=True)
            assert compute_bound(problem, layout) <= outer * (1 + 1e-9), layout
            outer = max(outer, compute_only_seconds(problem, layout, schedule, counts))
            for style in chance.sample(STYLES, 2):
                choices = random_choices(chance, table, layout, style)
                plan = layout.plan(problem, rules_of(choices), layers, flows=chosen_flows(problem, layout))
                found = PlanEvaluation(plan, problem, choices, chance.choice((0.0, 1e15)))
                peak = max(m.peak for m in found.memory)
                first = memory_bound(table, layout, peak)
                then = memory_bound(table, layout, peak, schedule)
                assert first is not None, (layout, style)
                assert then is not None, (layout, style)
                bound = max(outer, first, then)
                assert bound <= found.seconds * (1 + 1e-9), (layout, style, outer, first, then, found.seconds)
                assert least_bytes(table, layout) <= peak * (1 + 1e-9), (layout, style)
                near += bound > 0.9 * found.seconds
                seen[layout.schedule if layout.mesh.pipe > 1 else "", style] += 1
    assert len(seen) > 25
    assert near > 50  # and they are useful


def test_unlike_layers_are_planned_over_a_pipeline() -> None:
    """A rank may have none of some kinds: its share of them is no whole number."""
    for fixes in ([], ["pipe=4"], ["pipe=8"]):
        found = find_plan(unlike_layers(), parse_fixes(fixes))
        assert found.certificate["lower_bound"] <= found.best.prediction.seconds


def test_bounds_rise_as_memory_shrinks() -> None:
    chance = random.Random(3)
    rose = 0
    for problem in islice(random_problems(chance), 6):
        table, every = OptionTable(problem, {}), list(enumerate_layouts(problem, parse_fixes([])))
        for _ in range(20):
            layout = random_layout(chance, every)
            bounds = [memory_bound(table, layout, gib * 2.0**30) for gib in (1000, 80, 40, 20, 10, 5)]
            values = [float("inf") if f is None else f for f in bounds]
            assert values == sorted(values), layout
            rose += values[0] < values[-1]
    assert rose > 30


def ordered(name: str, pipe: int, micro_batches: int, per_rank: int) -> Schedule:
    waves = max(1, per_rank // 2) if name == "wave" else 1
    pipeline = Pipeline(schedule=name, waves=waves, stages_per_rank=per_rank if name == "interleaved" else 2)
    return schedule_of_plan(Plan(mesh=Mesh(pipe=pipe), pipeline=pipeline), micro_batches, layers=200)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("gpipe", (1,)),
        ("1f1b", (1,)),
        ("zb-h1", (1,)),
        ("interleaved", (2, 3, 4)),
        ("wave", (2, 4)),
        ("zb-v", (2,)),
    ],
)
def test_micro_batches_in_flight(name: str, counts: tuple[int, ...]) -> None:
    """At one instant before any backward, and at one after a backward of every stage: as many as claimed, or more."""
    between_seen = 0
    for pipe in (2, 3, 4, 6, 8):
        for m in (1, 2, 3, 5, 8, 12, 16):
            for v in counts:
                schedule = ordered(name, pipe, m, v)
                for rank in range(pipe):
                    before, after = instants(schedule, rank)
                    for first, between in (
                        in_flight_at_least(ParallelLayout(Mesh(pipe=pipe), m, 1, name, v), rank),
                        in_flight_of_schedule(schedule, rank),
                    ):
                        assert any(reaches(held, first) for held in before), (pipe, m, v, rank)
                        if between is not None:
                            between_seen += 1
                            assert any(reaches(held, between) for held in after), (pipe, m, v, rank, between)
    assert between_seen or name == "gpipe"


def reaches(held: tuple[int, ...], said: tuple[int, ...]) -> bool:
    return all(a >= b for a, b in zip(held, said, strict=True))


def instants(schedule: Schedule, rank: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Micro-batches in flight by stage, after each op: before any backward; after one of every stage, none reduced yet."""
    stages, ops = schedule.stages_of[rank], schedule.order[rank]
    now, made, done = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    every = Counter(op.stage for op in ops if op.kind == "F")
    before, after = [], []
    for op in ops:
        now[op.stage] += {"F": 1, "W": 0}.get(op.kind, -1)
        made[op.stage] += op.kind in "BI"
        done[op.stage] += op.kind in "BW"
        if not any(made.values()):
            before.append(tuple(now.values()))
        elif all(made.values()) and all(done[s] < every[s] for s in stages):
            after.append(tuple(now.values()))
    return before, after
