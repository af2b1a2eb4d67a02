"""What is said of a layout before it is built out: no plan of it takes less, however its units choose."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest
import torch
from benchmarks.monotone import MODELS, PRESETS
from benchmarks.sharding import MixedGpt

from fourfold.cluster import Cluster
from fourfold.errors import ScheduleError
from fourfold.model.operators import ModelSpec
from fourfold.plan import Mesh, Pipeline, Plan, Precision
from fourfold.planner.build import dealt_out
from fourfold.planner.constraints import parse_fixes
from fourfold.planner.deal import least_idle
from fourfold.planner.floors import bytes_at_least, flights, flights_of, floor_in, floor_of
from fourfold.planner.layout import Layout, Setting
from fourfold.planner.layouts import bound, computed, layouts
from fourfold.planner.make import find_plan
from fourfold.planner.options import Option, Solver, sharding_options
from fourfold.planner.predict import judged
from fourfold.planner.products import chosen_flows, ladder
from fourfold.planner.rules import rules_of
from fourfold.planner.units import Choice
from fourfold.program.from_plan import schedule_of_plan
from fourfold.program.ops import Schedule

STYLES = ("smallest", "any", "alike", "replicate", "zero2", "zero3", "keep")


def random_settings(chance: random.Random) -> Iterator[Setting]:
    while True:
        model, preset = chance.choice(MODELS), chance.choice(PRESETS)
        bandwidth = chance.choice(("x1", "x0.2", "x0.03", "x5"))
        cluster = Cluster.preset(preset, nodes=chance.choice((1, 1, 2))).what_if({"bandwidth": bandwidth})
        precision = Precision(compute="fp32" if preset.startswith("v100") else "bf16")
        yield Setting(ModelSpec.from_config(model), cluster, chance.choice((8, 16, 32, 96)), precision)


def random_layout(chance: random.Random, every: list[Layout]) -> Layout:
    plain = [layout for layout in every if layout.mesh.pipe == 1]
    layout = chance.choice(plain if plain and chance.random() < 0.5 else every)
    return replace(
        layout,
        tensor=chance.choice(ladder(layout.mesh, layout.micro_batches, layout.tensor, None)),
        optimizer=chance.choice(("device", "device", "auto", "host")),
        activations=chance.choice(("device", "device", "host")),
        prefetch=chance.choice((1, 1, 0)) if layout.replicas > 1 else 1,
    )


def random_choices(chance: random.Random, solver: Solver, layout: Layout, style: str) -> dict[str, Choice]:
    """Every unit's: all the smallest, all of one mode, by kind, or anything."""
    setting, piped = solver.setting, layout.mesh.pipe > 1
    of_kind: dict[str, tuple[Option, Option]] = {}
    out = {}
    for unit in setting.spec.units:
        modes, again = solver.sharding(layout, unit.kind, piped), solver.recompute(layout, unit.kind)
        mode, redone = chance.choice(modes), chance.choice(again)
        if style == "smallest":
            mode, redone = (min(options, key=lambda o: o.memory) for options in (modes, again))
        elif style == "alike":
            mode, redone = of_kind.setdefault(unit.kind, (mode, redone))
        elif style != "any":
            every = sharding_options(setting, layout, unit.kind, piped)
            mode = chance.choice([o for o in every if o.choice.mode == style] or modes)
            _, redone = of_kind.setdefault(unit.kind, (mode, redone))
        out[unit.name] = mode.choice._replace(split=redone.choice.split, recompute=redone.choice.recompute)
    if setting.spec.tied:  # its matrix is the embedding's, and so is what is done with it
        lender, head = out[setting.spec.units[0].name], setting.spec.units[-1].name
        out[head] = out[head]._replace(mode=lender.mode, reduce=lender.reduce, within=lender.within)
    return out


def unlike_layers() -> Setting:
    """A model whose layers differ, as a module: what pipelines have of it depends on where they cut."""
    sample = torch.zeros(1, 16, dtype=torch.long)
    spec = ModelSpec.from_module(MixedGpt((128, 224, 128, 160, 224, 96), 64), (sample, sample))
    return Setting(spec, Cluster.preset("a100-40g").what_if({"bandwidth": "x0.05"}), 32, Precision())


def test_no_plan_beats_its_floor_in_the_memory_that_it_takes() -> None:
    """Random plans of random layouts: in exactly the bytes that one holds, its layout's floors are not above its seconds."""
    chance, seen = random.Random(7), Counter[tuple[str, str]]()
    near = 0
    for setting in [unlike_layers(), *islice(random_settings(chance), 36)]:
        solver, every = Solver(setting, {}), list(layouts(setting, parse_fixes([])))
        for _ in range(10 if setting.spec.alike else 60):
            layout = random_layout(chance, every)
            try:
                schedule, deal = dealt_out(setting, layout)
            except ScheduleError:
                continue
            layers = tuple(n - (s == 0) - (s == schedule.stages - 1) for s, n in enumerate(deal.counts))
            outer = max(computed(setting, layout, moved=True), bound(setting, layout), least_idle(setting, layout))
            for style in chance.sample(STYLES, 3):
                choices = random_choices(chance, solver, layout, style)
                plan = layout.plan(setting, rules_of(choices), layers, flows=chosen_flows(setting, layout))
                found = judged(plan, setting, choices, chance.choice((0.0, 1e15)))
                peak = max(m.peak for m in found.memory)
                first = floor_in(solver, layout, peak)
                then = floor_of(solver, layout, schedule, deal.counts, peak, 0.0)
                assert first is not None, (layout, style)
                assert then is not None, (layout, style)
                floor = max(outer, first, then)
                assert floor <= found.seconds * (1 + 1e-9), (layout, style, outer, first, then, found.seconds)
                assert bytes_at_least(solver, layout) <= peak * (1 + 1e-9), (layout, style)
                near += floor > 0.9 * found.seconds
                seen[layout.schedule if layout.mesh.pipe > 1 else "", style] += 1
    assert len(seen) > 25
    assert near > 100  # and they are worth something


def test_a_floor_that_is_high_enough_is_one_however_layers_are_dealt() -> None:
    setting = unlike_layers()
    solver, cut = Solver(setting, {}), 0
    for layout in layouts(setting, parse_fixes([])):
        whole = floor_in(solver, layout, setting.cluster.usable)
        if whole is not None and layout.mesh.pipe > 1:
            early = floor_in(solver, layout, setting.cluster.usable, 0.0, whole * (1 + 1e-7))
            assert early == whole, layout
            early = floor_in(solver, layout, setting.cluster.usable, 0.0, 0.5 * whole)
            assert early is not None
            assert 0.5 * whole < early <= whole
            cut += early < whole
    assert cut > 0


def test_unlike_layers_are_planned_over_a_pipeline() -> None:
    """A rank may have none of some kinds: its share of them is no whole number."""
    for fixes in ([], ["pipe=4"], ["pipe=8"]):
        found = find_plan(unlike_layers(), parse_fixes(fixes))
        assert found.certificate["lower_bound"] <= found.best.prediction.seconds


def test_floors_rise_as_memory_shrinks() -> None:
    chance = random.Random(3)
    rose = 0
    for setting in islice(random_settings(chance), 6):
        solver, every = Solver(setting, {}), list(layouts(setting, parse_fixes([])))
        for _ in range(20):
            layout = random_layout(chance, every)
            floors = [floor_in(solver, layout, gib * 2.0**30) for gib in (1000, 80, 40, 20, 10, 5)]
            values = [float("inf") if f is None else f for f in floors]
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
        ("wave", (2, 4, 8)),
        ("zb-v", (2,)),
    ],
)
def test_so_many_micro_batches_are_in_flight(name: str, counts: tuple[int, ...]) -> None:
    """At one instant before any backward, and at one after a backward of every stage: as many as is said, or more."""
    between_seen = 0
    for pipe in (2, 3, 4, 6, 8):
        for m in (1, 2, 3, 4, 5, 7, 8, 12, 16, 24):
            for v in counts:
                schedule = ordered(name, pipe, m, v)
                for rank in range(pipe):
                    before, after = instants(schedule, rank)
                    for first, between in (
                        flights(Layout(Mesh(pipe=pipe), m, 1, name, v), rank),
                        flights_of(schedule, rank),
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
