"""The commands sample, view, compare, tokenize and doctor."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fourfold import schema
from fourfold.errors import ConfigError, RunDirError
from fourfold.view.text import markup, printable

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
]


@dataclass(frozen=True)
class SampleArgs:
    """Generate text from a trained model: continue a prompt (gpt, llama), or fill its [MASK]s (bert)."""

    run_dir: Annotated[str, tyro.conf.Positional]
    """Run directory with a checkpoint."""
    prompt: str = "def "
    """Text to start from."""
    tokens: int = 200
    """Maximum number of tokens to generate."""
    temperature: float = 0.8
    """Sampling temperature; 0: always the most likely token."""
    top_k: int = 50
    """Sample among this many most likely tokens; 0: all."""
    seed: int = 0
    """Random seed."""
    json: bool = False
    """Print one JSON object."""
    debug: bool = False
    """Show tracebacks of errors."""


@dataclass(frozen=True)
class ViewArgs:
    """Show the timeline of a traced step of a run, next to its simulation: makespan, bubble, memory."""

    run_dir: Annotated[str, tyro.conf.Positional]
    """Run directory with traces (config: log.trace)."""
    step: int | None = None
    """Traced step to show; default: the last."""
    save_schedule: str | None = None
    """Write the measured order of ops to this file (.json, .csv), as a schedule that a plan can use."""
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
    """How chats become text: auto (the template beside the tokenizer), plain, or the path of a jinja file."""
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
    if args.temperature < 0 or args.tokens < 1 or args.top_k < 0:
        raise ConfigError("--temperature and --top-k must not be negative, --tokens must be at least 1")
    from fourfold.train.rundir import RunDir
    from fourfold.train.sample import continue_text, fill_blanks, open_run

    model, tokenizer, step = open_run(RunDir.find(args.run_dir))
    if model.config.family == "bert":
        text = fill_blanks(model, tokenizer, args.prompt)
    else:
        text = continue_text(
            model,
            tokenizer,
            args.prompt,
            args.tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            seed=args.seed,
        )
    print(
        json.dumps({"run": args.run_dir, "step": step, "prompt": args.prompt, "text": text})
        if args.json
        else printable(text)
    )
    return 0


def view(args: ViewArgs) -> int:
    from fourfold.train.rundir import RunDir
    from fourfold.view.run import compare_step

    traced = compare_step(RunDir.find(args.run_dir), args.step)
    if args.save_schedule:
        traced.schedule.save(args.save_schedule)
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
