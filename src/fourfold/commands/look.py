"""The commands sample, view, why, compare, tokenize and doctor."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fourfold import files, schema
from fourfold.errors import ConfigError, DataError, RunDirError
from fourfold.view.text import markup, printable

if TYPE_CHECKING:
    from fourfold.train.rundir import RunDir
    from fourfold.view.page import Panel
    from fourfold.view.run import StepComparison

__all__ = [
    "CompareArgs",
    "DoctorArgs",
    "SampleArgs",
    "TokenizeArgs",
    "ViewArgs",
    "WhyArgs",
    "compare",
    "doctor",
    "sample",
    "tokenize",
    "view",
    "view_run",
    "why",
]


@dataclass(frozen=True)
class SampleArgs:
    """Generate text from a trained model: continue a prompt (gpt, llama), or fill its [MASK]s (bert)."""

    run_dir: Annotated[str, tyro.conf.Positional]
    """Run directory with a checkpoint, or a Hugging Face folder."""
    prompt: str = "def "
    """Text to start from; with --chat, the user's message."""
    chat: bool = False
    """Put the prompt through the model's chat template, and generate the assistant's answer."""
    system: str = ""
    """System message of a chat."""
    tokens: int = 200
    """Maximum number of tokens to generate."""
    temperature: float = 0.8
    """Sampling temperature; 0: always the most likely token."""
    top_k: int = 50
    """Sample among this many most likely tokens; 0: all."""
    top_p: float = 1.0
    """Sample among the most likely tokens that have this probability together; 1: all."""
    seed: int = 0
    """Random seed."""
    json: bool = False
    """Print one JSON object."""
    debug: bool = False
    """Show tracebacks of errors."""


@dataclass(frozen=True)
class ViewArgs:
    """Show the timeline of a traced step of a run next to its simulation, or of a plan: makespan, bubble, memory."""

    run_dir: Annotated[str | None, tyro.conf.Positional] = None
    """Run directory with traces (config: log.trace), or a plan file."""
    compare: tuple[str, str] | None = None
    """Show the traced steps of two run directories on one time scale."""
    step: int | None = None
    """Traced step to show; default: the last."""
    save_schedule: str | None = None
    """Write the measured order of ops to this file (.json, .csv), as a schedule that a plan can use."""
    html: bool = False
    """Write the timeline as a page that opens offline: timeline.html in the run directory, or next to the plan."""
    perfetto: bool = False
    """Write the timeline as a Chrome trace for ui.perfetto.dev: timeline.trace.json in the run directory, or next to the plan."""
    open: bool = False
    """With --html: open the page in a browser."""
    json: bool = False
    """Print one JSON object."""
    debug: bool = False
    """Show tracebacks of errors."""


@dataclass(frozen=True)
class WhyArgs:
    """Explain where the time of a run's steps went, compared with its plan's prediction, and what would help."""

    run_dir: Annotated[str, tyro.conf.Positional]
    """Run directory with traces (config: log.trace)."""
    cluster: str | None = None
    """What it ran on: a preset, or a file that `fourfold calibrate` wrote; default: what the plan was made for."""
    json: bool = False
    """Print one JSON object."""
    debug: bool = False
    """Show tracebacks of errors."""


@dataclass(frozen=True)
class CompareArgs:
    """Compare two runs step by step: identical, equal up to rounding, or diverged at step k (exit code 1)."""

    run_a: Annotated[str, tyro.conf.Positional]
    """First run directory."""
    run_b: Annotated[str, tyro.conf.Positional]
    """Second run directory."""
    json: bool = False
    """Print one JSON object."""
    debug: bool = False
    """Show tracebacks of errors."""


@dataclass(frozen=True)
class TokenizeArgs:
    """Tokenize text once into a token file, which training memory-maps."""

    source: Annotated[str, tyro.conf.Positional]
    """Text file, JSONL file, folder, or stdlib."""
    out: Annotated[str, tyro.conf.Positional]
    """Token file to write."""
    tokenizer: str = "bytes"
    """bytes, or the path of a Hugging Face tokenizer.json (extra `hf`)."""
    template: str = "auto"
    """How chats become text: auto (the template next to the tokenizer), plain, or the path of a jinja file."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Tokens of an example that contribute to the loss."""
    json: bool = False
    """Print one JSON object."""
    debug: bool = False
    """Show tracebacks of errors."""


@dataclass(frozen=True)
class DoctorArgs:
    """Check this machine: versions, devices, backends, memory, disk. With a run: what happened to it, and what to do."""

    run: Annotated[str | None, tyro.conf.Positional] = None
    """Run directory to diagnose, instead of this machine."""
    out: Annotated[str | None, tyro.conf.arg(aliases=["-o"])] = None
    """For a run that was out of memory: write a plan that should fit to this file."""
    json: bool = False
    """Print one JSON object."""
    debug: bool = False
    """Show tracebacks of errors."""


def sample(args: SampleArgs) -> int:
    if args.temperature < 0 or args.tokens < 1 or args.top_k < 0 or not 0 < args.top_p <= 1:
        raise ConfigError(
            "--temperature and --top-k must not be negative, --tokens must be at least 1, --top-p above 0 and at most 1"
        )
    from fourfold.train.sample import Sampler, chat_prompt, continue_text, fill_blanks, open_model

    opened = open_model(args.run_dir)
    sampler = Sampler(args.temperature, args.top_k, args.top_p, args.seed)
    if opened.model.config.family == "bert":
        if args.chat:
            raise ConfigError("--chat: a bert model fills blanks and does not chat; leave it out")
        parts = iter([fill_blanks(opened, args.prompt)])
    elif args.chat:
        text = chat_prompt(opened, args.prompt, args.system)
        parts = continue_text(opened, text, args.tokens, sampler, begin=False)
    else:
        rest = continue_text(opened, args.prompt, args.tokens, sampler)
        parts = (part for parts in ((args.prompt,), rest) for part in parts)
    if args.json:
        found = {"run": args.run_dir, "step": opened.step, "prompt": args.prompt, "text": "".join(parts)}
        print(json.dumps(found))
        return 0
    for part in parts:
        print(printable(part), end="", flush=True)
    print()
    return 0


def view(args: ViewArgs) -> int:
    from fourfold.train.rundir import RunDir
    from fourfold.view.planned import rank_name
    from fourfold.view.run import compare_step
    from fourfold.view.steps import read_steps
    from fourfold.view.timeline import draw, show_step

    if (args.run_dir is None) == (args.compare is None):
        raise RunDirError("name one run directory or plan file, or two run directories with --compare A B")
    if args.json and (args.html or args.perfetto or args.open):
        raise RunDirError("--json prints figures and --html, --perfetto and --open write files; use one or the other")
    if args.compare is not None:
        return _view_two(args, RunDir.find(args.compare[0]), RunDir.find(args.compare[1]))
    assert args.run_dir is not None
    if Path(args.run_dir).is_file():
        return _view_plan(args, Path(args.run_dir))
    run = RunDir.find(args.run_dir)
    traced = compare_step(run, args.step)
    if args.save_schedule:
        traced.schedule.save(args.save_schedule)
    if args.html or args.perfetto or args.open:
        print(*map(printable, view_run(args, run, traced)), sep="\n")
        return 0
    both = {"measured": traced.measured, "simulated": traced.simulated}
    if args.json:
        figures = {name: t.to_dict(path=False) for name, t in both.items()}
        print(json.dumps({"step": traced.step, **figures}))
        return 0
    console = Console(highlight=False)
    plan = run.read()[1]
    step = next(s for s in read_steps(run) if s.step == traced.step)
    console.print(f"[bold]measured[/], step {step.step}: {step.seconds:.3f} s")
    show_step(step, {rank: rank_name(plan, rank) for rank in step.ranks}, console)
    console.print(f"[bold]simulated[/] with the median times of its ops: {float(traced.simulated.makespan):.3f} s")
    for row, line in enumerate(draw(traced.simulated, max(20, console.width - 4))):
        console.print(Text.assemble((f"{row:>3} ", "dim"), line), no_wrap=True, crop=True)
    table = Table("first replica", "measured", "simulated", "ratio", box=None, header_style="dim")
    for name, read in (
        ("first to last op, s", lambda t: float(t.makespan)),
        ("bubble", lambda t: float(t.bubble)),
        ("most idle rank, s", lambda t: float(max(t.idle))),
        ("peak in flight, micro-batches", lambda t: float(max(t.peak_activations))),
    ):
        a, b = read(traced.measured), read(traced.simulated)
        table.add_row(name, f"{a:.4g}", f"{b:.4g}", f"{a / b:.2f}" if b else "")
    console.print(table)
    if args.save_schedule:
        console.print(f"schedule written to {markup(args.save_schedule)}")
    return 0


def view_run(args: ViewArgs, run: RunDir, traced: StepComparison | None = None) -> list[Path]:
    """Write the views of a run's traced step that `args` request; returns the files."""
    from fourfold.view.planned import planned_panel, planned_step
    from fourfold.view.run import compare_step, measured_panel, planned_with_measured_times
    from fourfold.view.steps import read_steps
    from fourfold.view.why import explain_run

    traced = traced or compare_step(run, args.step)
    config, plan = run.read()
    steps = read_steps(run)
    if plan.predicted and plan.predicted.get("stages") and plan.predicted.get("cluster") != "local":
        count = plan.micro_batches(config.train.global_batch)
        planned, name = planned_step(plan, count), "planned"
    else:
        planned, name = planned_with_measured_times(run, steps), "planned, with measured times"
    panels = [planned_panel(plan, planned, name), measured_panel(run, traced.step, steps)]
    why = explain_run(run, changes=False)
    took = next(s.seconds for s in steps if s.step == traced.step)
    takes = schema.format_seconds(float(planned.timeline.makespan))
    summary = f"Step {traced.step} took {schema.format_seconds(took)}; {name}, it takes {takes}."
    if worst := next((f for f in why.findings if f.label not in ("save", "evaluation")), None):  # of the step drawn
        summary += f" Largest loss ({schema.format_seconds(worst.seconds)} a step): {worst.text}."
    title = f"{run.path.name}, step {traced.step}"
    return _write_views(args, run.path / "timeline", title, summary, panels, more="\n".join(why.lines()))


def _view_two(args: ViewArgs, a: RunDir, b: RunDir) -> int:
    """Two runs on one scale: where the time of a step went in each."""
    from statistics import mean

    from fourfold.view.planned import rank_name
    from fourfold.view.run import measured_panel
    from fourfold.view.steps import CAUSES, read_steps
    from fourfold.view.timeline import show_step

    if args.save_schedule:
        raise RunDirError("--save-schedule is for one run; leave out --compare")
    steps = []
    for run in (a, b):
        found = [s for s in read_steps(run) if args.step in (None, s.step)]
        if not found:
            traced = ", ".join(str(s.step) for s in read_steps(run))
            raise RunDirError(f"{run.path}: step {args.step} was not traced; traced: {traced}")
        steps.append(found[-1])
    spent = [{c: mean(r.spent(c) for r in s.ranks.values()) for c in CAUSES} for s in steps]
    if args.json:
        rows = [
            {"run": str(run.path), "step": s.step, "seconds": s.seconds, "spent": x}
            for run, s, x in zip((a, b), steps, spent, strict=True)
        ]
        print(json.dumps(rows))
        return 0
    first, second = (s.seconds for s in steps)
    seconds = schema.format_seconds
    summary = f"{b.path}: {seconds(second)} a step, {second / first - 1:+.1%} against {a.path} ({seconds(first)})."
    if args.html or args.perfetto or args.open:
        panels = [
            measured_panel(run, s.step, [s], f"{run.path.name}, step {s.step}")
            for run, s in zip((a, b), steps, strict=True)
        ]
        base = b.path / f"timeline-with-{a.path.name}"
        written = _write_views(args, base, f"{a.path.name} and {b.path.name}", summary, panels)
        print(*map(printable, written), sep="\n")
        return 0
    console = Console(highlight=False)
    for run, s in zip((a, b), steps, strict=True):
        plan = run.read()[1]
        console.print(f"[bold]{markup(run.path)}[/], step {s.step}: {s.seconds:.3f} s")
        show_step(s, {rank: rank_name(plan, rank) for rank in s.ranks}, console)
    table = Table("mean of ranks", markup(a.path.name), markup(b.path.name), "change", box=None, header_style="dim")
    for cause, name in CAUSES.items():
        x, y = spent[0][cause], spent[1][cause]
        if max(x, y) > 0.002 * max(first, second):
            table.add_row(name, seconds(x), seconds(y), _change(y - x))
    table.add_row("step", seconds(first), seconds(second), _change(second - first), style="bold")
    console.print(table)
    console.print(markup(summary), soft_wrap=True)
    return 0


def _change(seconds: float) -> str:
    return ("+" if seconds > 0 else "-" if seconds < 0 else "") + schema.format_seconds(abs(seconds))


def why(args: WhyArgs) -> int:
    from fourfold.cluster import Cluster
    from fourfold.train.rundir import RunDir
    from fourfold.view.why import explain_run

    run = RunDir.find(args.run_dir)
    cluster = None
    if args.cluster is not None:
        cluster, ranks = Cluster.find(args.cluster), run.read()[1].mesh.ranks
        if cluster.ranks < ranks:
            nodes = ranks if args.cluster == "local" else -(-ranks // cluster.devices)
            cluster = Cluster.find(args.cluster, nodes)
    found = explain_run(run, cluster)
    if args.json:
        print(json.dumps(found.to_dict()))
    else:
        console = Console(highlight=False)
        for line in found.lines():
            console.print(printable(line), markup=False, soft_wrap=not console.is_terminal)
    return 0


def _view_plan(args: ViewArgs, path: Path) -> int:
    """The timeline of a plan: as the planner predicted it, or in forwards of a rank's share."""
    from fourfold.plan import Plan
    from fourfold.view.planned import planned_panel, planned_step
    from fourfold.view.timeline import show_timeline

    if args.step is not None or args.save_schedule:
        raise RunDirError(f"{path} is a plan: --step and --save-schedule are for runs")
    plan = Plan.load(path)
    timeline, unit = plan.simulate(), "s" if plan.predicted else ""
    if args.json:
        print(json.dumps({"plan": str(path), **timeline.to_dict()}))
        return 0
    if not (args.html or args.perfetto or args.open):
        show_timeline(str(path), timeline, seconds=bool(unit))
        return 0
    step = planned_step(plan)
    whole = float(step.timeline.makespan)
    what = schema.format_seconds(whole) if unit else f"{whole:.4g} forwards of a rank's share"
    summary = f"One step of the pipeline takes {what}, with a bubble of {float(step.timeline.bubble):.1%}."
    panel = planned_panel(plan, step, f"planned: {plan.mesh.product()} ranks")
    if step.sizes:
        promised = schema.format_seconds(plan.predicted["seconds"] if plan.predicted else whole)
        computing = sum(row.busy(panel.length) for row in panel.rows) / len(panel.rows)
        summary = f"One step takes {what} as drawn, of which the ranks compute {computing:.1%}"
        again = sum(row.lost.get("recompute", 0.0) for row in panel.rows) / len(panel.rows) / whole
        summary += f", without recomputation ({again:.1%}). " if again else ". "
        summary += f"The planner's own figure, with what is not drawn, is {promised}."
    elif plan.predicted:
        summary += " Collectives are not drawn."
    print(*map(printable, _write_views(args, path.with_suffix(""), path.name, summary, [panel], unit)), sep="\n")
    return 0


def _write_views(
    args: ViewArgs, base: Path, title: str, summary: str, panels: list[Panel], unit: str = "s", more: str = ""
) -> list[Path]:
    from fourfold.view.page import write_page, write_perfetto

    written = []
    if args.html or args.open:
        page = base.with_name(f"{base.name}.html")
        write_page(page, title, summary, panels, unit=unit, more=more)
        written.append(page)
        if args.open:
            import webbrowser

            if not webbrowser.open(page.resolve().as_uri()):
                print("no browser was found; the page is", file=sys.stderr)
    if args.perfetto:
        trace = base.with_name(f"{base.name}.trace.json")
        write_perfetto(trace, panels)
        written.append(trace)
    return written


def compare(args: CompareArgs) -> int:
    from fourfold.train.rundir import RunDir
    from fourfold.view.compare import compare_runs

    c = compare_runs(RunDir.find(args.run_a), RunDir.find(args.run_b))
    if args.json:
        print(json.dumps(dataclasses.asdict(c)))
    else:
        console = Console(highlight=False)
        table = Table("metric", "largest difference", "at step")
        for key, (gap, step) in c.worst.items():
            table.add_row(key, f"{gap:.2e}" if gap else "none", str(step) if gap else "")
        verdict = {
            "identical": "[green]identical[/], bit for bit",
            "rounding": f"[green]rounding[/]: equal up to the order of summation; first difference at step {c.first_difference}",
            "diverges": f"[red]diverges at step {c.step}[/] by more than rounding; first difference at step {c.first_difference}",
        }[c.verdict]
        console.print(f"{c.steps} steps in common: {verdict}")
        console.print(table)
    return 1 if c.verdict == "diverges" else 0


def tokenize(args: TokenizeArgs) -> int:
    from fourfold.data.encode import Encoding, EncodingBar
    from fourfold.data.samples import write_tokens

    out = Path(args.out)
    if out.exists():
        raise RunDirError(f"{out} exists; choose another name, or remove it first")
    encoding, bar = Encoding(template=args.template, loss_on=args.loss_on), EncodingBar(args.source)
    try:
        corpus = write_tokens(args.source, args.tokenizer, out, encoding, bar)
    finally:
        bar.close()
    if args.tokenizer not in ("", "bytes"):
        copied = out.with_name(f"{out.name}.tokenizer.json")
        files.write_bytes(copied, files.read_bytes(args.tokenizer, DataError, most=64 * files.MIB), DataError)
    facts_ = {"file": str(out), "tokens": len(corpus.tokens), "bytes": out.stat().st_size, "vocab": corpus.vocab}
    if args.json:
        print(json.dumps(facts_ | {"fingerprint": corpus.fingerprint}))
    else:
        print(
            f"{out}: {len(corpus.tokens):,} tokens, vocabulary {corpus.vocab:,}, {schema.format_bytes(out.stat().st_size)}"
        )
    return 0


def doctor(args: DoctorArgs) -> int:
    if args.run is not None:
        return _doctor_of_run(args)
    if args.out is not None:
        raise ConfigError("--out: needs a run directory, `fourfold doctor RUN --out plan.json`")
    from fourfold.launch.doctor import examine

    findings = examine()
    bad = any(f.state == "bad" for f in findings)
    if args.json:
        print(json.dumps({"good": not bad, "findings": [dataclasses.asdict(f) for f in findings]}))
        return int(bad)
    table = Table("", "found", "advice")
    marks = {"good": "[green]✓[/]", "note": "[yellow]•[/]", "bad": "[red]✗[/]"}
    for f in findings:
        table.add_row(f"{marks[f.state]} {f.what}", escape(f.found), f.advice)
    Console(highlight=False).print(table)
    return int(bad)


def _doctor_of_run(args: DoctorArgs) -> int:
    """0 for a run that is running, finished or stopped, 1 for one that failed."""
    from fourfold.schema import check_writable, format_bytes
    from fourfold.supervision.diagnose import diagnose
    from fourfold.train.rundir import RunDir

    assert args.run is not None
    if args.out is not None:
        check_writable(args.out, "a plan", ConfigError)
    found = diagnose(RunDir.find(args.run))
    if args.out is not None:
        if found.plan is None:
            raise ConfigError(f"--out: there is no plan to write: {found.happened}")
        found.plan.save(args.out)
    code = int(found.state in ("failed", "gone"))
    if args.json:
        print(json.dumps(found.to_dict()))
        return code
    console = Console(highlight=False, soft_wrap=True)
    style = {"failed": "red", "gone": "red", "finished": "green"}.get(found.state, "yellow")
    name = f"{found.state}: {found.cause}" if found.cause and found.cause not in found.state else found.state
    console.print(f"[{style}]{markup(name)}[/]  {markup(found.happened)}.")
    console.print(markup(found.advice.rstrip(".") + "."))
    if found.ranks:
        table = Table("rank", "ended", "at", "last", "memory", box=None, header_style="dim")
        order = sorted(found.ranks, key=lambda r: (r.state == "CommunicationError", r.rank))
        for r in order[:16]:
            size = format_bytes(r.bytes) if r.bytes else ""
            table.add_row(str(r.rank), markup(r.state), markup(r.at), markup(r.last), size)
        Console(highlight=False).print(table)
        if len(order) > 16:
            console.print(f"and {len(order) - 16} more ranks: {markup(args.run)}/flight")
    if args.out is not None:
        console.print(f"written to {markup(args.out)}")
    return code
