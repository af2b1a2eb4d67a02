"""The pictures of the README and of these pages: `python docs/make_pictures.py [NAME …]`. None is drawn by hand.

| picture | from |
|---|---|
| timeline.png | the page with which `fourfold demo` ends, of a demo that this script runs (needs Chromium) |
| message-driven.svg | a run of both executors on four emulated accelerators, real messages |
| grid.svg | the pieces of a linear layer that ranks of a grid hold |
| sharding.svg | predictions of the planner's memory model |
| waves.svg, streaming.svg, program.svg | the simulator |
| planner.svg | a search for a plan, and plans with one mode for all units |
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "pictures"
ROOT = Path(__file__).parent.parent
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --window-size=1040,1150 --force-device-scale-factor=1.5"
)
# the colours of the timeline page (view/timeline.html), by Okabe and Ito
COLOURS = {
    "F": "#56B4E9",
    "B": "#E69F00",
    "I": "#E69F00",
    "W": "#009E73",
    "U": "#5b6472",
    "G": "#CC79A7",
    "S": "#9E4A78",
}
PARTS = ("#0072B2", "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442")
STEPS = 5
INK, DIM, LINE = "#1d2127", "#5b6472", "#d5d8de"


class Drawing:
    """An SVG file on a white card, readable on light and dark pages."""

    def __init__(self, width: float, height: float, title: str):
        self.size, self.title, self.parts = (width, height), title, list[str]()

    def box(self, x: float, y: float, w: float, h: float, fill: str, stroke: str = "none", hint: str = "") -> None:
        inside = f"<title>{escape(hint)}</title>" if hint else ""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{fill}" stroke="{stroke}">{inside}</rect>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 12,
        fill: str = INK,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        where = f'x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}"{weight}'
        self.parts.append(f"<text {where}>{escape(text)}</text>")

    def line(self, points: Sequence[tuple[float, float]], stroke: str = LINE, width: float = 1, dash: str = "") -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width}"{dashed}/>')

    def dot(self, x: float, y: float, r: float, fill: str, hint: str = "") -> None:
        self.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:g}" fill="{fill}"><title>{escape(hint)}</title></circle>'
        )

    def legend(self, x: float, y: float, entries: Iterable[tuple[str, str]]) -> None:
        for colour, name in entries:
            self.box(x, y - 9, 11, 11, colour)
            self.text(x + 16, y, name, 11.5, DIM)
            x += 30 + 6.4 * len(name)

    def save(self, path: Path) -> None:
        w, h = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w:g} {h:g}" width="{w:g}" height="{h:g}" role="img"'
        )
        font = 'font-family="system-ui, -apple-system, Segoe UI, sans-serif"'
        card = f'<rect width="{w:g}" height="{h:g}" rx="8" fill="#ffffff"/>'
        path.write_text(
            "\n".join([f"{head} {font}>", f"<title>{escape(self.title)}</title>", card, *self.parts, "</svg>\n"])
        )


def rows(
    d: Drawing,
    spans: Sequence[Sequence[tuple[str, float, float, str]]],
    x: float,
    y: float,
    scale: float,
    names: Sequence[str],
    height: float = 20,
) -> float:
    """Rows of (kind, start, end, text); returns the y below them."""
    length = max(end for row in spans for _, _, end, _ in row)
    for name, row in zip(names, spans, strict=True):
        d.text(x - 8, y + height / 2 + 4, name, 11, DIM, "end")
        d.box(x, y, length * scale, height, "#f1f2f5")
        for kind, start, end, text in row:
            w = (end - start) * scale
            d.box(x + start * scale, y, max(0.7, w - 0.7), height, COLOURS[kind], hint=text)
            if w > 6.5 * len(text):
                d.text(
                    x + (start + end) / 2 * scale,
                    y + height / 2 + 4,
                    text,
                    10,
                    "#fff" if kind in "US" else "#000",
                    "middle",
                )
        y += height + 3
    return y


# ---- how it works ----


def grid(path: Path) -> None:
    """Which part of W, X and Y the ranks of a grid of 2 × 2 × 2 hold, from the pieces that their layers report."""
    import torch
    from torch import nn

    from fourfold.tensor.blocks import even
    from fourfold.tensor.linear import ActivationLayout, GridLinear, GridSettings
    from fourfold.tensor.swap import parallelize, pieces_of, residual_side
    from fourfold.testing.grid import run_grid

    inputs, outputs, found = 8, 16, {}

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(inputs, outputs, bias=False)

    def rule(module: Any, setting: Any) -> None:
        module.up = GridLinear(
            setting, residual_side(setting, inputs), ActivationLayout(even(outputs, setting.grid.col.size)), bias=False
        )

    def look(place: tuple[int, int, int], grid: Any, depth: Any) -> None:
        with torch.device("meta"):
            layer = Layer()
        parallelize(layer, GridSettings(grid, seq_len=8, tokens=16), {Layer: rule})
        found[tuple(place)] = [(p.global_slice, p.copies_over) for p in pieces_of(layer, "", grid)["up.weight"]]

    run_grid(look, 2, 2, 2)
    d = Drawing(860, 330, "Where the parts of a matmul are on a grid of 2 × 2 × 2 ranks")
    inks = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7")
    d.text(24, 30, "Y = X Wᵀ on a grid of depth 2 × row 2 × col 2", 14, bold=True)
    d.text(24, 66, "ranks: depth, row, col", 11.5, DIM)
    for depth in range(2):
        for row in range(2):
            for col in range(2):
                x, y = 24 + 64 * col + 150 * depth, 78 + 64 * row
                d.box(x, y, 58, 58, inks[2 * row + col], "#fff")
                d.text(x + 29, y + 33, f"{depth}, {row}, {col}", 12, "#000", "middle")
        d.text(24 + 150 * depth, 222, f"depth {depth}", 11, DIM)
    d.text(350, 66, "W [16 outputs, 8 inputs]: each rank of a plane", 11.5, DIM)
    for place, pieces in sorted(found.items()):
        for ((a, b), (k, m)), copies in pieces:
            assert copies == ("depth",), copies
            if place[0] == 0:
                d.box(
                    350 + 12 * k,
                    92 + 8 * a,
                    12 * (m - k),
                    8 * (b - a),
                    inks[2 * place[1] + place[2]],
                    "#fff",
                    f"rank {place}",
                )
                d.text(350 + 6 * (k + m), 96 + 4 * (a + b), f"·, {place[1]}, {place[2]}", 11, "#000", "middle")
    d.text(350, 82, "holds a quarter; copied over depth", 11.5, DIM)
    d.text(650, 66, "X [tokens, 8 features]: between", 11.5, DIM)
    d.text(650, 82, "layers, each rank has its tokens", 11.5, DIM)
    for depth in range(2):
        for row in range(2):
            for col in range(2):
                i = 4 * depth + 2 * row + col
                d.box(650, 92 + 16 * i, 96, 16, inks[2 * row + col], "#fff")
                d.text(698, 104 + 16 * i, f"{depth}, {row}, {col}", 10, "#000", "middle")
    d.text(
        24,
        258,
        "flow os, forward: each rank gathers X over its col (2 ranks) and W over its row (2 ranks), then multiplies.",
        12,
    )
    d.text(
        24,
        280,
        "Backward: gathers both again, reduce-scatters dX over col and dW over row; dW is summed over depth once per step.",
        12,
    )
    d.text(
        24,
        302,
        "depth = row = 1 is Megatron's tensor parallelism; depth = 1 is 2-D (Optimus); row = col is Tesseract.",
        12,
    )
    d.save(path)


def sharding(path: Path) -> None:
    """Memory and step time of one policy for all units, and of the plan that chooses per unit."""
    from fourfold.plan import Batch, Mesh, Plan, UnitRule
    from fourfold.planner.api import find_plan, judge
    from fourfold.planner.problem import parse_fixes
    from fourfold.planner.report import with_report

    problem, fixed = _problem("a100-40g"), parse_fixes(["pipe=1", "col=1"])
    names = ("parameters", "gathered", "gradients", "optimizer", "activations", "workspace")
    judged = []
    for mode in ("replicate", "zero2", "zero3", "keep"):  # each with the recomputation and reduction that suit it best
        options = []
        for recompute in ("none", "selective", "full"):
            for reduce in ("step", "micro-batch"):
                rule = UnitRule(match="*", mode=mode, recompute=recompute, reduce=reduce)
                plan = Plan(mesh=Mesh(data=8), batch=Batch(micro_batches=8), unit=(rule,), precision=problem.precision)
                p = judge(plan, problem).predicted or {}
                options.append((bool(p["misfit"]), p["peak_bytes"] if p["misfit"] else p["seconds"], recompute, p))
        _, _, recompute, p = min(options, key=lambda o: o[:3])
        judged.append((f"{mode}, recompute {recompute}", p))
    best = with_report(find_plan(problem, fixed), problem)
    judged.append(("chosen per unit", best.predicted or {}))
    d = Drawing(860, 300, "Memory of one policy for all units, and of a choice per unit")
    d.text(
        24,
        30,
        "Llama 3 8B on 8 A100 (40 GB), 64 × 8,192 tokens: memory of a rank in GiB, predicted time of a step",
        14,
        bold=True,
    )
    limit = judged[0][1]["usable_bytes"] / 2**30
    scale = 540 / max(sum(p["memory"][0].get(n, 0) for n in names) / 2**30 for _, p in judged)
    y = 56.0
    for name, p in judged:
        d.text(186, y + 17, name, 12, INK, "end", bold=name == "chosen per unit")
        x = 196.0
        for part, colour in zip(names, PARTS, strict=True):
            held = p["memory"][0].get(part, 0) / 2**30
            d.box(x, y, max(0.0, held * scale - 0.7), 25, colour, hint=f"{part} {held:.2f} GiB")
            if held * scale > 26:
                d.text(
                    x + held * scale / 2,
                    y + 17,
                    f"{held:.1f}",
                    10.5,
                    "#fff" if colour == "#0072B2" else "#000",
                    "middle",
                )
            x += held * scale
        fits = p["peak_bytes"] <= p["usable_bytes"]
        d.text(
            max(x, 196 + limit * scale) + 8,
            y + 17,
            f"{p['seconds']:.2f} s" if fits else "does not fit",
            12,
            INK if fits else "#b3261e",
        )
        y += 36
    d.line([(196 + limit * scale, 48), (196 + limit * scale, y)], "#b3261e", 1.5, "5 3")
    d.text(196 + limit * scale, y + 12, f"limit {limit:.1f}", 11, "#b3261e", "middle")
    d.legend(24, y + 38, zip(PARTS, names, strict=True))
    d.text(
        24,
        y + 58,
        "Above: one mode and one recomputation for all units, the fastest that fits. Last: the planner chooses unit by unit.",
        11.5,
        DIM,
    )
    d.save(path)


def waves(path: Path) -> None:
    """Schedules on four ranks, on one time scale."""
    from fourfold.program import Costs, build, simulate

    d = Drawing(860, 0, "Pipeline schedules on four ranks")
    d.text(24, 30, "Four ranks, four micro-batches; forward : backward = 1 : 2, messages free", 14, bold=True)
    y, longest = 44.0, float(simulate(build("1f1b", 4, 4), Costs()).makespan)
    for title, schedule in (
        ("1F1B, one stage a rank", build("1f1b", 4, 4)),
        ("wave, one wave: two stages a rank, down and up", build("wave", 4, 4, waves=1)),
        ("wave, two waves: four stages a rank", build("wave", 4, 4, waves=2)),
        ("zb-v: one wave, gradients of the weights (W) on their own", build("zb-v", 4, 4)),
    ):
        t = simulate(schedule, Costs())
        d.text(24, y + 14, title, 12.5, bold=True)
        held = max(float(p) for p in t.peak_activations)
        took = f"{float(t.makespan):g} forwards, bubble {float(t.bubble):.0%}, at most {held:g} micro-batches held"
        d.text(836, y + 14, took, 12, DIM, "end")
        spans = [
            [(op.kind, float(a), float(b), f"{op.kind}{op.micro_batch}") for op, a, b in _ops(t, row)]
            for row in range(4)
        ]
        y = rows(d, spans, 76, y + 22, 760 / longest, [f"rank {r}" for r in range(4)], 17) + 10
    d.legend(
        24,
        y + 10,
        [
            (COLOURS["F"], "forward"),
            (COLOURS["B"], "backward, or gradient of the input"),
            (COLOURS["W"], "gradient of the weights"),
        ],
    )
    d.size = 860, y + 26
    d.save(path)


def message_driven(path: Path) -> None:
    """A run of both executors on emulated accelerators whose ops take unequal times."""
    from fourfold.testing.ranks import run_ranks

    sys.path.insert(0, str(ROOT))
    found = run_ranks(_both_executors, 4, timeout=120, group_timeout=60)
    d = Drawing(860, 0, "Ordered and message-driven execution of micro-batches of unequal length")
    d.text(
        24,
        30,
        f"Measured, median of {STEPS} steps: four emulated accelerators, twelve micro-batches of unequal length",
        14,
        bold=True,
    )
    y, longest = 44.0, max(end for r in found for name in r for *_, end, _ in r[name])
    for name, title in (
        ("ordered", "ordered: 1F1B"),
        ("driven", "message-driven, slack 2: whatever has arrived runs next"),
    ):
        spans = [r[name] for r in found]
        end = max(x[2] for row in spans for x in row)
        d.text(24, y + 14, title, 12.5, bold=True)
        d.text(836, y + 14, f"{1e3 * end:.0f} ms", 12, DIM, "end")
        y = rows(d, spans, 76, y + 22, 760 / longest, [f"rank {r}" for r in range(4)], 17) + 10
    d.legend(24, y + 10, [(COLOURS["F"], "forward"), (COLOURS["B"], "backward")])
    d.size = 860, y + 26
    d.save(path)


def _both_executors(rank: int, ranks: int) -> dict[str, list[tuple[str, float, float, str]]]:
    import time

    import torch.distributed as dist
    from benchmarks.pipeline import Ones, drive, our_executor, run_driven

    from fourfold.program import build
    from fourfold.testing.emulate import ChunkTimes, by_length, jitter

    base, count = ChunkTimes(0.030, 0.030, 0.030), 12
    lengths = [t.forward for t in jitter(base, count, cv=0.5, seed=7)]
    found = {}
    for name in ("ordered", "driven"):
        executor, programs = our_executor(rank, build("1f1b", ranks, count), lambda s: by_length(base, lengths))
        program = programs.of(rank)
        plan = drive(program, {f"s{rank}": (rank,)}, 2)
        chunk: Any = executor.stages[rank].links[0].module
        steps = []
        for _ in range(STEPS):
            chunk.spans.clear()
            dist.barrier()
            begun = time.monotonic()
            executor.run(program, Ones()) if name == "ordered" else run_driven(executor, plan, Ones())
            dist.barrier()
            took = time.monotonic() - begun
            spans = [("F" if s.op == "F" else "B", s.start - begun, s.end - begun, s.micro_batch) for s in chunk.spans]
            steps.append((took, [(kind, a, b, f"{kind}{m}") for kind, a, b, m in spans]))
        totals: list[Any] = [None] * ranks
        dist.all_gather_object(totals, [took for took, _ in steps])
        middle = sorted(range(STEPS), key=lambda i: max(t[i] for t in totals))[STEPS // 2]  # the same step on all ranks
        found[name] = steps[middle][1]
    return found


def streaming(path: Path) -> None:
    """Where updates of streamed optimizer state run in a step, from lowered programs."""
    from fourfold.program import Costs, build, lower, simulate
    from fourfold.program.instructions import ProgramBucket, ProgramUnit

    layers, count, scale = 6, 2, 84
    units = [[ProgramUnit(f"blocks.{i}") for i in range(layers)]]
    buckets = [ProgramBucket(f"blocks.{i}", (f"blocks.{i}",)) for i in range(layers)]
    costs = Costs(stream={f"blocks.{i}": 0.34 for i in range(layers)})
    d = Drawing(860, 0, "Streamed optimizer updates in a step")
    d.text(
        24, 30, "One GPU, six layers, two micro-batches: the state of each layer passes through the GPU", 14, bold=True
    )
    y = 44.0
    for title, stream in (
        (
            "a layer's update starts when its gradient is complete (with clipping: it is undone if the norm says so)",
            "early",
        ),
        ("waiting for the norm (rollback off): updates run in forward order and overlap with the next forward", "last"),
    ):
        t = simulate(lower(build("1f1b", 1, count), units, buckets, stream=stream), costs)
        ops = [
            ("F" if "F" in str(op) else "B", float(a), float(b), str(op).split()[-1].removeprefix("blocks."))
            for op, a, b in _ops(t, 0)
        ]
        updates = [
            ("U", float(s.start), float(s.end), s.what.bucket.removeprefix("blocks."))
            for s in t.spans()
            if s.lane == "stream"
        ]  # type: ignore[union-attr]
        d.text(24, y + 14, title, 12.5, bold=True)
        end = max(b for _, _, b, _ in ops)
        if (
            stream == "last"
        ):  # as offload/streamer.py: forward order; each layer of the next forward waits for its own update
            each, free = updates[0][2] - updates[0][1], end
            updates = [("U", end + i * each, end + (i + 1) * each, str(i)) for i in range(layers)]
            for i, (_, _, done, _) in enumerate(updates):
                start = max(free, done)
                ops.append(("F", start, free := start + 1 / layers, str(i)))
            d.line([(120 + end * scale, y + 20), (120 + end * scale, y + 70)], INK, 1, "3 3")
        y = rows(d, [ops, updates], 120, y + 22, scale, ["compute", "copy and update"], 20) + 12
    d.legend(
        24,
        y + 10,
        [
            (COLOURS["F"], "forward of a layer"),
            (COLOURS["B"], "backward"),
            (COLOURS["U"], "state in, AdamW on the GPU, state out"),
        ],
    )
    d.size = 860, y + 26
    d.save(path)


def planner(path: Path) -> None:
    """The plans of a search, time against memory."""
    from fourfold.planner.api import find_plan, uniform_plans
    from fourfold.planner.problem import parse_fixes
    from fourfold.planner.report import with_report
    from fourfold.view.plan_report import report_data

    problem, free = _problem("h100-sxm"), parse_fixes([])
    found = find_plan(problem, free)
    plan = with_report(found, problem, len(found.ranked))
    data = report_data(plan, problem, tried=plan.alternatives or (), uniform=list(uniform_plans(problem, 120, free)))
    points, usable, bound = data["points"], problem.cluster.usable / 2**30, data["lower_bound"]
    d = Drawing(860, 400, "Plans for Llama 3 8B on 8 H100: time against memory")
    d.text(
        24,
        30,
        "Llama 3 8B on 8 H100, 64 × 8,192 tokens a step: plans by step time and memory of the fullest rank",
        14,
        bold=True,
    )
    top, most = 2.0 * data["predicted"]["seconds"], 1.4 * usable
    x0, y0, w, h = 64, 52, 772, 292

    def at(memory: float, seconds: float) -> tuple[float, float]:
        return x0 + w * memory / most, y0 + h * (1 - (seconds - 0.9 * bound) / (top - 0.9 * bound))

    d.box(at(usable, top)[0], y0, x0 + w - at(usable, top)[0], h, "#fbeeea")
    for tick in range(0, int(most) + 1, 20):
        d.line([at(tick, top), at(tick, 0.9 * bound)])
        d.text(at(tick, 0)[0], y0 + h + 16, str(tick), 11, DIM, "middle")
    for tick in range(int(bound), int(top) + 1, 2):
        d.line([at(0, tick), at(most, tick)])
        d.text(x0 - 6, at(0, tick)[1] + 4, f"{tick} s", 11, DIM, "end")
    d.line([at(0, bound), at(usable, bound)], "#009E73", 1.5, "5 3")
    d.text(
        x0 + 4,
        at(0, bound)[1] - 5,
        f"lower bound {bound:.2f} s: no plan is faster, under the planner's model",
        11.5,
        "#00694f",
    )
    d.text(at(usable, top)[0] + 4, y0 + 14, f"more than {usable:.1f} GiB: does not fit", 11.5, "#b3261e")
    fits, front = [], []
    for p in points:
        memory, seconds = p["bytes"] / 2**30, p["seconds"]
        if memory > most or seconds > top:
            continue
        if memory <= usable:
            fits.append((memory, seconds))
        searched = p["kind"] == "found"
        d.dot(
            *at(memory, seconds),
            4 if searched else 3,
            "#0072B2" if searched else "#E69F00",
            f"{p['name']}, {p['units']}",
        )
    for memory, seconds in sorted(fits):
        if not front or seconds < front[-1][1]:
            front += [(memory, front[-1][1]), (memory, seconds)] if front else [(memory, seconds)]
    d.line([at(*p) for p in front], "#0072B2", 1.2)
    now = data["predicted"]
    x, y = at(now["peak_bytes"] / 2**30, now["seconds"])
    d.dot(x, y, 6, "#D55E00", "chosen")
    d.text(x + 8, y + 20, f"chosen: {now['seconds']:.2f} s", 12, "#a34700", bold=True)
    d.text(x0 + w / 2, y0 + h + 32, "memory of the fullest rank, GiB", 11.5, DIM, "middle")
    d.legend(
        24,
        392,
        [
            ("#D55E00", "chosen"),
            ("#0072B2", "found by the search, unit by unit; line: frontier"),
            ("#E69F00", "one mode and one recomputation for all units"),
        ],
    )
    d.save(path)


def program(path: Path) -> None:
    """The programs of two ranks, and their simulation."""
    from fourfold.program import Costs, build, lower, simulate
    from fourfold.program.instructions import ProgramUnit

    schedule = build("1f1b", 2, 2)
    units = [
        [ProgramUnit(f"blocks.{2 * s + i}", mode="zero3" if s == 0 else "keep") for i in range(2)] for s in range(2)
    ]
    programs = lower(schedule, units, replicas=1)
    costs = Costs(message=0.15, gather=0.3, reduce=0.3)
    t = simulate(programs, costs)
    listings = [[str(i) for i in programs.of(rank).instructions] for rank in range(2)]
    d = Drawing(860, 0, "The program of each rank, and its simulation")
    d.text(
        24, 30, "A plan is lowered to one list of instructions per rank: two stages, two micro-batches", 14, bold=True
    )
    columns = 3
    for rank, lines in enumerate(listings):
        top = 52.0
        d.text(
            24 + 420 * rank,
            top,
            f"rank {rank}: stage {rank}, {'zero3' if rank == 0 else 'keep'}, {len(lines)} instructions",
            12,
            bold=True,
        )
        per = -(-max(map(len, listings)) // columns)
        for i, line in enumerate(lines):
            kind = next(
                (
                    c
                    for word, c in (("GATHER", "G"), ("RELEASE", "G"), ("REDUCE", "S"), ("SEND", "M"), ("RECV", "M"))
                    if line.startswith(word)
                ),
                "",
            )
            ink = {"G": "#8d3f6b", "S": "#6d2c50", "M": "#00507d", "": INK}[kind]
            d.text(
                24 + 420 * rank + 136 * (i // per),
                top + 18 + 13 * (i % per),
                line.replace("activation", "act.").replace("gradient", "grad."),
                9.5,
                ink,
            )
    y = 52 + 18 + 13 * -(-max(map(len, listings)) // columns) + 12
    d.text(
        24,
        y,
        "The same lists, simulated: the executor runs them, the memory model replays them, the trace records them",
        12.5,
        bold=True,
    )
    spans: list[list[tuple[str, float, float, str]]] = [[], [], [], []]
    for s in t.spans():
        name = str(s.what)
        if s.lane == "compute":
            op, _, unit = name.partition(" ")
            spans[2 * s.row].append((s.what.kind, float(s.start), float(s.end), f"{op} {unit}".replace("blocks.", "b")))  # type: ignore[union-attr]
        elif s.lane == "collective" and s.end > s.start:
            kind = "G" if name.startswith("GATHER") else "S"
            spans[2 * s.row + 1].append((kind, float(s.start), float(s.end), name.split()[-1].removeprefix("blocks.")))
    y = (
        rows(d, spans, 120, y + 10, 700 / float(t.makespan), ["rank 0", "collectives", "rank 1", "collectives"], 18)
        + 12
    )
    d.legend(
        24,
        y + 8,
        [(COLOURS["F"], "forward"), (COLOURS["B"], "backward"), (COLOURS["G"], "gather"), (COLOURS["S"], "reduce")],
    )
    d.size = 860, y + 24
    d.save(path)


def _ops(timeline: Any, row: int) -> list[tuple[Any, Any, Any]]:
    return [(s.what, s.start, s.end) for s in timeline.spans() if s.row == row and s.lane == "compute"]


def _problem(cluster_name: str) -> Any:
    import fourfold as ff
    from fourfold.planner.api import default_precision
    from fourfold.planner.problem import PlanProblem

    cluster = ff.Cluster.preset(cluster_name)
    spec = ff.ModelSpec.from_config(ff.Config.load(ROOT / "configs" / "llama-8b.toml").model)
    return PlanProblem(spec, cluster, 64, default_precision(cluster))


# ---- the README's ----


def timeline(path: Path) -> None:
    """The page with which the demo ends."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("timeline.png needs Chromium")
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "demo"
        subprocess.run([sys.executable, "-m", "fourfold", "demo", "--run-dir", str(run)], check=True)
        shot = [f"--user-data-dir={name}/browser", f"--screenshot={path}"]
        subprocess.run([browser, *FLAGS.split(), *shot, (run / "timeline.html").as_uri()], check=True)


PICTURES: dict[str, Callable[[Path], None]] = {
    "timeline.png": timeline,
    "message-driven.svg": message_driven,
    "grid.svg": grid,
    "sharding.svg": sharding,
    "waves.svg": waves,
    "streaming.svg": streaming,
    "planner.svg": planner,
    "program.svg": program,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        if name not in PICTURES:
            sys.exit(f"no picture {name}; there are {', '.join(PICTURES)}")
        PICTURES[name](FOLDER / name)
        print(f"{FOLDER / name}", flush=True)


if __name__ == "__main__":
    main()
