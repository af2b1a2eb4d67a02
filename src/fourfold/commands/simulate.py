"""`fourfold simulate`: simulate a plan, a schedule or programs, and print the timeline."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Annotated, Any

import tyro

from fourfold import schema
from fourfold.errors import ScheduleError
from fourfold.plan import SCHEDULES, Pipeline, Plan
from fourfold.program.costs import Costs
from fourfold.program.from_plan import costs_of_plan, schedule_of_plan
from fourfold.program.instructions import Programs
from fourfold.program.ops import Schedule
from fourfold.program.schedules import build, names
from fourfold.program.simulator import simulate
from fourfold.program.synthesis.synthesizer import search
from fourfold.program.timeline import Timeline
from fourfold.view.text import printable

__all__ = ["SimulateArgs", "compare", "simulate_command"]


@dataclass(frozen=True)
class SimulateArgs:
    """Simulate a plan, a schedule or programs: time, bubble and memory, without running them."""

    target: Annotated[str, tyro.conf.Positional]
    """Plan (.toml, .json), schedule (.json, .csv), programs (.txt, .json), or the name of a schedule:
    gpipe, 1f1b, interleaved, wave, zb-h1, zb-v, synthesized."""
    ranks: int = 4
    """Pipeline ranks, for a named schedule."""
    micro_batches: int = 8
    """Micro-batches per step, for a named schedule."""
    waves: int = 1
    """wave: number of waves."""
    stages_per_rank: int = 2
    """interleaved: stages per rank."""
    slack: int = 0
    """1f1b: extra micro-batches in flight."""
    forward: float = 1
    """Time of F for one micro-batch on one rank, all its stages together."""
    input_grad: float = 1
    """Time of I."""
    weight_grad: float = 1
    """Time of W; B takes I + W."""
    message: float = 0
    """Time of one message between ranks."""
    instruction: float = 0
    """Fixed cost of every instruction."""
    memory_cap: float | None = None
    """Limit on the micro-batches whose activations a rank holds, for `synthesized` and --compare."""
    compare: bool = False
    """Compare all schedules."""
    html: str | None = None
    """Write the timeline to this HTML page, which opens offline."""
    json: bool = False
    """Print JSON."""
    debug: bool = False
    """Show tracebacks of errors."""

    @property
    def costs(self) -> Costs:
        return Costs(
            forward=self.forward,
            input_grad=self.input_grad,
            weight_grad=self.weight_grad,
            message=self.message,
            instruction=self.instruction,
        )


def simulate_command(args: SimulateArgs, file: IO[str] | None = None) -> int:
    """Run the command: print a table and a drawing, or JSON, to `file` (default: standard output); returns 0."""
    if args.html:
        if args.json:
            raise ScheduleError("--json prints and --html writes a page; use one of them")
        schema.check_writable(args.html, "a page", ScheduleError, (".html", ".htm"))
    target, costs = _target(args)
    rows: list[tuple[str, Timeline]] = []
    if isinstance(target, Schedule):
        rows.append((target.name or args.target, simulate(target, costs)))
        if args.compare:
            rows = compare(target, args)
    else:
        if args.compare:
            raise ScheduleError(f"{args.target}: --compare needs a schedule or a plan, not programs")
        rows.append((args.target, simulate(target, costs)))
    if args.html:
        from fourfold.view.page import panel_of, write_page

        unit = "s" if costs != args.costs else ""  # a plan with predicted seconds
        panels = [panel_of(name, timeline) for name, timeline in rows]
        best = rows[0][1]
        measure = f"{float(best.makespan):.4g}"
        if unit:
            measure += " s"
        else:
            measure += f", where the forward of a micro-batch through all layers of a rank takes {args.forward:g}"
        summary = f"{rows[0][0]} on {best.rows} ranks: a step takes {measure}; bubble {float(best.bubble):.1%}."
        write_page(Path(args.html), f"simulated: {rows[0][0]}", summary, panels, unit=unit)
        print(printable(args.html), file=file)
        return 0
    if args.json:
        whole = not args.compare
        data = [{"schedule": name, **timeline.to_dict(spans=whole, path=whole)} for name, timeline in rows]
        print(json.dumps(data if args.compare else data[0], indent=2), file=file)
        return 0
    from fourfold.view.timeline import show_comparison, show_timeline  # imports rich, not needed for --json

    if args.compare:
        show_comparison(rows, file)
    else:
        show_timeline(*rows[0], file, seconds=costs != args.costs)
    return 0


def compare(target: Schedule, args: SimulateArgs) -> list[tuple[str, Timeline]]:
    """The target and all other schedules of the same size that fit the memory cap, fastest first."""
    sizes = (target.ranks, target.micro_batches)
    options: list[tuple[str, dict[str, Any]]] = [
        *[("interleaved", {"stages_per_rank": n}) for n in sorted({2, 4, args.stages_per_rank})],
        *[("wave", {"waves": n}) for n in sorted({1, 2, args.waves})],
        *[(name, {}) for name in names() if name not in ("interleaved", "wave")],
    ]
    schedules = [target, *(build(name, *sizes, **chosen) for name, chosen in options)]
    timed = {s.name: simulate(s, args.costs) for s in schedules}
    found = search(*sizes, args.costs, target.ranks if args.memory_cap is None else args.memory_cap)
    timed[found.schedule.name] = simulate(found.schedule, args.costs)
    fitting = {
        name: t
        for name, t in timed.items()
        if args.memory_cap is None or max(t.peak_activations) <= args.memory_cap * (1 + 1e-9)
    }
    return sorted(fitting.items(), key=lambda item: (item[1].makespan, max(item[1].peak_activations)))


def _target(args: SimulateArgs) -> tuple[Schedule | Programs, Costs]:
    """The schedule or programs to simulate, and their costs: from the arguments, or as predicted by the planner."""
    path = Path(args.target)
    if path.suffix in (".json", ".toml", ".yaml", ".yml"):
        data = schema.read(path, ScheduleError)
        if not {"order", "programs"} & data.keys():
            plan = Plan.load(path)
            predicted = costs_of_plan(plan) if args.costs == Costs() else None
            count = plan.batch.micro_batches or max(1, 2 * plan.mesh.pipe)
            return schedule_of_plan(plan, count, costs=predicted or args.costs), predicted or args.costs
    return _schedule(args), args.costs


def _schedule(args: SimulateArgs) -> Schedule | Programs:
    """The schedule or programs in a file, or a named schedule."""
    path = Path(args.target)
    match path.suffix:
        case ".csv":
            return Schedule.load(path)
        case ".txt":
            return Programs.load(path)
        case ".json" | ".toml" | ".yaml" | ".yml":
            data = schema.read(path, ScheduleError)
            with schema.in_file(path, ScheduleError):
                return Schedule.from_dict(data) if "order" in data else Programs.from_dict(data)
    known = tuple(dict.fromkeys((*names(), *SCHEDULES)))
    if args.target not in known:
        raise ScheduleError(
            f"'{args.target}' is neither a schedule nor a .toml, .json, .csv or .txt file{schema.nearest(args.target, known)}"
        )
    if args.target == "synthesized":
        cap = args.ranks + args.slack if args.memory_cap is None else args.memory_cap
        return search(args.ranks, args.micro_batches, args.costs, cap).schedule
    if args.target in SCHEDULES:
        pipeline = Pipeline(
            schedule=args.target, waves=args.waves, stages_per_rank=args.stages_per_rank, slack=args.slack
        )
        plan = Plan(pipeline=pipeline)
        plan = replace(plan, mesh=replace(plan.mesh, pipe=args.ranks))
        return schedule_of_plan(plan, args.micro_batches)
    return build(args.target, args.ranks, args.micro_batches)
