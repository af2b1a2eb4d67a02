"""The commands sample, view, compare, tokenize and doctor."""

from __future__ import annotations

import dataclasses
import json
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
    "compare",
    "doctor",
    "sample",
    "tokenize",
    "view",
    "view_run",
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

    run_dir: Annotated[str, tyro.conf.Positional]
    """Run directory with traces (config: log.trace), or a plan file."""
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
    """Tokens of an example that the loss counts."""
    json: bool = False
    """Print one JSON object."""
    debug: bool = False
    """Show tracebacks of errors."""


@dataclass(frozen=True)
class DoctorArgs:
    """Check this machine: versions, devices, backends, memory, disk."""

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
    from fourfold.view.run import compare_step

    if Path(args.run_dir).is_file():
        return _view_plan(args, Path(args.run_dir))
    run = RunDir.find(args.run_dir)
    traced = compare_step(run, args.step)
    if args.save_schedule:
        traced.schedule.save(args.save_schedule)
    if args.html or args.perfetto or args.open:
        print(*view_run(args, run, traced), sep="\n")
        return 0
    both = {"measured": traced.measured, "simulated": traced.simulated}
    if args.json:
        figures = {name: t.to_dict(path=False) for name, t in both.items()}
        print(json.dumps({"step": traced.step, **figures}))
        return 0
    from fourfold.view.timeline import draw

    console = Console(highlight=False)
    for name, timeline in both.items():
        console.print(f"[bold]{name}[/], step {traced.step}: {float(timeline.makespan):.3f} s")
        for row, line in enumerate(draw(timeline, max(20, console.width - 4))):
            console.print(Text.assemble((f"{row:>3} ", "dim"), line), no_wrap=True, crop=True)
    table = Table("", "measured", "simulated", "ratio", box=None, header_style="dim")
    for name, read in (
        ("makespan, s", lambda t: float(t.makespan)),
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
    """Write the views of a run's traced step that `args` ask for; returns the files."""
    from fourfold.view.page import panel_of
    from fourfold.view.run import compare_step, measured_panel

    traced = traced or compare_step(run, args.step)
    panels = [measured_panel(run, traced.step), panel_of("simulated with the measured times of ops", traced.simulated)]
    return _write_views(args, run.path / "timeline", f"{run.path.name}, step {traced.step}", traced.summary, panels)


def _view_plan(args: ViewArgs, path: Path) -> int:
    """The timeline of a plan: as the planner predicted it, or in forwards of a rank's share."""
    from fourfold.plan import Plan
    from fourfold.view.page import panel_of
    from fourfold.view.timeline import show_timeline

    if args.step is not None or args.save_schedule:
        raise RunDirError(f"{path} is a plan: --step and --save-schedule are for runs")
    plan = Plan.load(path)
    timeline, unit = plan.simulate(), "s" if plan.predicted else ""
    if args.json:
        print(json.dumps({"plan": str(path), **timeline.to_dict()}))
        return 0
    if not (args.html or args.perfetto or args.open):
        show_timeline(str(path), timeline)
        return 0
    what = f"{float(timeline.makespan):.4g} s" if unit else f"{float(timeline.makespan):.4g} forwards of a rank's share"
    summary = f"One step of the pipeline takes {what}, with a bubble of {float(timeline.bubble):.1%}."
    panel = panel_of(f"planned: {plan.mesh.product()} ranks", timeline)
    print(*_write_views(args, path.with_suffix(""), path.name, summary, [panel], unit), sep="\n")
    return 0


def _write_views(
    args: ViewArgs, base: Path, title: str, summary: str, panels: list[Panel], unit: str = "s"
) -> list[Path]:
    from fourfold.view.page import write_page, write_perfetto

    written = []
    if args.html or args.open:
        page = base.with_name(f"{base.name}.html")
        write_page(page, title, summary, panels, unit=unit)
        written.append(page)
        if args.open:
            import webbrowser

            webbrowser.open(page.resolve().as_uri())
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
    from fourfold.train.data import write_tokens
    from fourfold.train.encode import Encoding

    out = Path(args.out)
    if out.exists():
        raise RunDirError(f"{out} exists; choose another name, or remove it first")
    console = Console(highlight=False, stderr=True)
    with console.status(f"encoding {args.source} …"):
        encoding = Encoding(template=args.template, loss_on=args.loss_on)
        corpus = write_tokens(args.source, args.tokenizer, out, encoding)
    if args.tokenizer not in ("", "bytes"):
        beside = out.with_name(f"{out.name}.tokenizer.json")
        files.write_bytes(beside, files.read_bytes(args.tokenizer, DataError, most=64 * files.MIB), DataError)
    facts_ = {"file": str(out), "tokens": len(corpus.tokens), "bytes": out.stat().st_size, "vocab": corpus.vocab}
    if args.json:
        print(json.dumps(facts_ | {"fingerprint": corpus.fingerprint}))
    else:
        print(
            f"{out}: {len(corpus.tokens):,} tokens, vocabulary {corpus.vocab:,}, {schema.format_bytes(out.stat().st_size)}"
        )
    return 0


def doctor(args: DoctorArgs) -> int:
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
