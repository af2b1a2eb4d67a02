"""The command line: `fourfold COMMAND …`. One dataclass of arguments and one function per command; no torch until one runs.

Exit codes: 0 done, 1 a run failed (or two runs diverge), 2 the input is at fault and nothing was started.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tyro.conf import FlagConversionOff

import fourfold
from fourfold import schema
from fourfold.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from fourfold.errors import ConfigError, FourfoldError, RankFailure, RunDirError
from fourfold.plan import Mesh, Plan

if TYPE_CHECKING:
    from fourfold.train.rundir import RunDir

__all__ = ["main"]


@dataclass(frozen=True)
class TrainArgs:
    """Train a model: `fourfold train CONFIG [--plan P] [--section.field value]`, or `fourfold train --resume RUN_DIR`."""

    config: Annotated[str | None, tyro.conf.Positional] = None
    """Config file: what to train (TOML, JSON or YAML)."""
    plan: str | None = None
    """Plan file: how to train it. Without one, every rank holds a whole copy of the model."""
    resume: str | None = None
    """Run directory to go on with, instead of a config."""
    nproc: int | None = None
    """Ranks to start on this machine; default: what the plan's mesh says, else one per GPU, else one."""
    max_restarts: int = 0
    """Start the ranks again, from the newest checkpoint, up to so many times when one fails."""
    dry_run: bool = False
    """Check everything, show what would run, start nothing and write nothing."""
    debug: bool = False
    """Show tracebacks of errors."""
    # booleans of the sections are written out: --log.tensorboard true
    model: FlagConversionOff[ModelConfig] = field(default_factory=ModelConfig)
    data: FlagConversionOff[DataConfig] = field(default_factory=DataConfig)
    optim: FlagConversionOff[OptimConfig] = field(default_factory=OptimConfig)
    train: FlagConversionOff[TrainConfig] = field(default_factory=TrainConfig)
    checkpoint: FlagConversionOff[CheckpointConfig] = field(default_factory=CheckpointConfig)
    log: FlagConversionOff[LogConfig] = field(default_factory=LogConfig)


@dataclass(frozen=True)
class DemoArgs:
    """Train a small GPT on Python's own source in four processes, then let it write."""

    steps: int = 220
    """Optimizer steps."""
    nproc: int = 4
    """Ranks."""
    run_dir: str | None = None
    """Where to write the run; default: runs/demo, or the next free runs/demo-2, …"""
    debug: bool = False
    """Show tracebacks of errors."""


@dataclass(frozen=True)
class SampleArgs:
    """Let a trained model write: continue a prompt (gpt, llama), or fill its [MASK]s (bert)."""

    run_dir: Annotated[str, tyro.conf.Positional]
    """Run directory with a checkpoint."""
    prompt: str = "def "
    """Text to start from."""
    tokens: int = 200
    """How many tokens to write at most."""
    temperature: float = 0.8
    """0: always the likeliest token; higher: more varied."""
    top_k: int = 50
    """Choose among this many likeliest tokens; 0: all."""
    seed: int = 0
    """Another seed, another text."""
    json: bool = False
    """Print one JSON object."""
    debug: bool = False
    """Show tracebacks of errors."""


@dataclass(frozen=True)
class CompareArgs:
    """Compare two runs step by step: identical, rounding, or diverges at step k (exit code 1)."""

    run_a: Annotated[str, tyro.conf.Positional]
    """A run directory."""
    run_b: Annotated[str, tyro.conf.Positional]
    """Another."""
    json: bool = False
    """Print one JSON object."""
    debug: bool = False
    """Show tracebacks of errors."""


@dataclass(frozen=True)
class TokenizeArgs:
    """Encode text once into a token file that training maps into memory."""

    source: Annotated[str, tyro.conf.Positional]
    """Text file, JSONL file, folder, or stdlib."""
    out: Annotated[str, tyro.conf.Positional]
    """Token file to write."""
    tokenizer: str = "bytes"
    """bytes, or the path of a Hugging Face tokenizer.json (extra `hf`)."""
    json: bool = False
    """Print one JSON object."""
    debug: bool = False
    """Show tracebacks of errors."""


@dataclass(frozen=True)
class DoctorArgs:
    """Look at this machine: versions, devices, backends, memory, disk."""

    json: bool = False
    """Print one JSON object."""
    debug: bool = False
    """Show tracebacks of errors."""


# ---- train ----


def train(args: TrainArgs) -> int:
    config, plan, ranks = _prepare(args)
    console = Console(highlight=False)
    if args.dry_run:
        _describe(console, config, plan, ranks)
        console.print("[green]all checks passed[/]; nothing was started or written")
        return 0
    if "RANK" in os.environ or "SLURM_STEP_ID" in os.environ:
        return _be_a_rank(args, config, plan, ranks)
    from fourfold.train.rundir import RunDir

    run = RunDir.reopen(args.resume) if args.resume else RunDir.create(config.train.run_dir, config, plan)
    try:
        if args.resume:
            run.write(config, plan)
        _describe(console, config, plan, ranks)
        console.print(f"[dim]starting {ranks} {'ranks' if ranks > 1 else 'rank'} …[/]")
        _start(console, config, plan, run, args.max_restarts)
    finally:
        run.unlock()
    console.print(f"[green]done[/]: {run.path}  (sample from it: fourfold sample {run.path})")
    return 0


def _be_a_rank(args: TrainArgs, config: Config, plan: Plan, ranks: int) -> int:
    """Started by torchrun or srun: this process is one rank; rank 0 prints."""
    from torch.distributed.elastic.multiprocessing.errors import record

    from fourfold.launch.place import current_place
    from fourfold.train.worker import fit

    place = current_place()
    console = Console(highlight=False, quiet=place.rank > 0)
    plan.check(config, place.ranks)
    _describe(console, config, plan, ranks)
    run = record(fit)(config, plan, resume=args.resume is not None)
    assert run is not None  # the wrapper re-raises
    console.print(f"[green]done[/]: {run.run_dir}  (sample from it: fourfold sample {run.run_dir})")
    return 0


def _prepare(args: TrainArgs) -> tuple[Config, Plan, int]:
    """The resolved config, the plan and the number of ranks; everything that can be checked before a start is."""
    config = Config(
        model=args.model,
        data=args.data,
        optim=args.optim,
        train=args.train,
        checkpoint=args.checkpoint,
        log=args.log,
    ).resolve()
    ranks = args.nproc
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--nproc {ranks}: at least one rank is needed")
    if args.plan:
        plan = Plan.load(args.plan)
    elif args.resume:
        plan = Plan.load(Path(args.resume) / "plan.json")
    else:
        ranks = (_ranks_started() or _gpus(config) or 1) if ranks is None else ranks
        plan = Plan(mesh=Mesh(data=ranks))
    plan.check(config, ranks)
    if config.train.device == "cuda" and not _gpus(config):
        raise ConfigError("train.device = 'cuda', but torch sees no GPU here; use 'auto' or 'cpu'")
    from fourfold.train.callbacks import extra_callbacks
    from fourfold.train.data import open_samples

    extra_callbacks(config)
    open_samples(config)
    return config, plan, plan.mesh.ranks


def _ranks_started() -> int:
    """How many ranks torchrun or srun started; 0 when neither did."""
    return int(os.environ.get("WORLD_SIZE", 0)) or int(os.environ.get("SLURM_NTASKS", 0)) * (
        "SLURM_STEP_ID" in os.environ
    )


def _gpus(config: Config) -> int:
    """GPUs that torch can use, counted without starting CUDA (a process that has started it cannot fork ranks)."""
    if config.train.device == "cpu" or not (Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()):
        return 0
    import torch

    return torch.cuda.device_count()


def _start(console: Console, config: Config, plan: Plan, run: RunDir, max_restarts: int) -> None:
    """Start the ranks on this machine, again after a failure as often as allowed."""
    from fourfold.launch.local import launch_local
    from fourfold.train.checkpoint import newest
    from fourfold.train.worker import work

    for attempt in range(max_restarts + 1):
        try:
            launch_local(
                lambda place, store, screen: work(place, store, config, plan, run, console=screen),
                plan.mesh.ranks,
                run.logs,
            )
            return
        except RankFailure as e:
            if attempt == max_restarts or e.exit_code == 2:
                raise
            last = newest(run.checkpoints)
            console.print(f"[red]{escape(str(e).splitlines()[0])}[/]")
            console.print(f"starting again from {last or 'the beginning'} ({attempt + 1} of {max_restarts})")


def _describe(console: Console, config: Config, plan: Plan, ranks: int) -> None:
    from fourfold.model.spec import parameter_count
    from fourfold.view.console import facts, number

    m, batch = config.model, config.train.global_batch
    size, micro = plan.micro_batch_size(batch), plan.micro_batches(batch)
    share = f"{micro} × {size} sequences each, {plan.precision.compute}"
    facts(
        [
            ("model", f"{m.family}, {m.layers} layers, hidden {m.hidden}, {number(parameter_count(m))} parameters"),
            ("data", f"{config.data.source}, {batch} × {m.seq_len} tokens a step"),
            ("plan", f"{plan.mesh.product()} {'ranks' if ranks > 1 else 'rank'}, {share}"),
            ("steps", f"{config.train.steps}"),
            ("run", config.train.run_dir),
        ],
        console,
    )


# ---- demo ----


def demo(args: DemoArgs) -> int:
    console = Console(highlight=False)
    run_dir = args.run_dir or _free_run_dir("runs/demo")
    config = Config.from_dict(
        {
            "model": {"family": "gpt", "layers": 2, "hidden": 128, "heads": 4, "seq_len": 64},
            "optim": {"lr": 4e-3, "warmup": min(20, args.steps), "weight_decay": 0.01},
            "train": {"steps": args.steps, "global_batch": 32, "run_dir": run_dir},
            "checkpoint": {"every": max(1, args.steps // 2)},
            "log": {"every": 20},
        }
    )
    trained = train(
        TrainArgs(
            nproc=args.nproc,
            **{f.name: getattr(config, f.name) for f in dataclasses.fields(config)},
        )
    )
    if trained:
        return trained
    prompt = "def read"
    console.print(f"\nwhat it writes after [bold]{prompt}[/]:\n")
    sample(SampleArgs(run_dir=run_dir, prompt=prompt, tokens=160))
    console.print()
    from fourfold.view.console import facts

    facts(
        [
            ("metrics", f"{run_dir}/metrics.jsonl"),
            ("checkpoints", f"{run_dir}/checkpoints/"),
            ("weights", f"{run_dir}/final/model.safetensors"),
            ("logs", f"{run_dir}/logs/"),
            ("more text", f'fourfold sample {run_dir} --prompt "class "'),
            ("your model", "fourfold train configs/gpt-tiny.toml --nproc 4"),
        ],
        console,
    )
    return 0


def _free_run_dir(wish: str) -> str:
    number = 1
    while os.path.exists(path := wish if number == 1 else f"{wish}-{number}"):
        number += 1
    return path


# ---- the others ----


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
    print(json.dumps({"run": args.run_dir, "step": step, "prompt": args.prompt, "text": text}) if args.json else text)
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
            "identical": "[green]identical[/]: the same bits",
            "rounding": f"[green]rounding[/]: equal but for the order of sums, from step {c.first_difference} on",
            "diverges": f"[red]diverges at step {c.step}[/] by more than rounding (first difference: {c.first_difference})",
        }[c.verdict]
        console.print(f"{c.steps} steps in common: {verdict}")
        console.print(table)
    return 1 if c.verdict == "diverges" else 0


def tokenize(args: TokenizeArgs) -> int:
    from fourfold.train.data import write_tokens

    out = Path(args.out)
    if out.exists():
        raise RunDirError(f"{out} exists; choose another name, or remove it first")
    console = Console(highlight=False, stderr=True)
    with console.status(f"encoding {args.source} …"):
        corpus = write_tokens(args.source, args.tokenizer, out)
    facts_ = {"file": str(out), "tokens": len(corpus.tokens), "bytes": out.stat().st_size, "vocab": corpus.vocab}
    if args.json:
        print(json.dumps(facts_ | {"fingerprint": corpus.fingerprint}))
    else:
        print(f"{out}: {len(corpus.tokens)} tokens of {corpus.vocab} kinds, {schema.format_bytes(out.stat().st_size)}")
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


# ---- dispatch ----

COMMANDS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "demo": (DemoArgs, demo),
    "train": (TrainArgs, train),
    "sample": (SampleArgs, sample),
    "compare": (CompareArgs, compare),
    "tokenize": (TokenizeArgs, tokenize),
    "doctor": (DoctorArgs, doctor),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        return _help()
    if args[0] == "--version":
        print(f"fourfold {fourfold.__version__}")
        return 0
    debug = "--debug" in args
    try:
        if args[0] not in COMMANDS:
            raise ConfigError(f"unknown command '{args[0]}'{schema.nearest(args[0], COMMANDS)}")
        kind, run = COMMANDS[args[0]]
        return run(_parse(kind, args[0], args[1:]))
    except FourfoldError as e:
        if debug:
            traceback.print_exc()
        else:
            Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(e))}")
        return e.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def _parse(kind: type, name: str, args: list[str]) -> Any:
    default = None
    if kind is TrainArgs:
        default = _loaded(args)
        args = [a if a not in ("true", "false") else a.capitalize() for a in args]
    return tyro.cli(kind, prog=f"fourfold {name}", args=args, default=default, config=(tyro.conf.AvoidSubcommands,))


def _loaded(args: list[str]) -> TrainArgs:
    """What the config file (or the run to resume) says, as the defaults of the flags; flags win over it."""
    path, resume = _named(args)
    if "-h" in args or "--help" in args:
        return TrainArgs(config=path)
    if (path is None) == (resume is None):
        raise ConfigError(
            "name one config file, or --resume a run directory; for example: fourfold train configs/gpt-tiny.toml"
        )
    if resume is not None:
        from fourfold.train.rundir import RunDir

        config, _ = RunDir.find(resume).read()
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, run_dir=resume))
    else:
        assert path is not None
        config = Config.load(path)
    sections = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return TrainArgs(config=path, resume=resume, **sections)


def _named(args: list[str]) -> tuple[str | None, str | None]:
    """The positional argument and the value of --resume; every flag but these takes one value."""
    alone = ("--dry-run", "--no-dry-run", "--debug", "--no-debug", "-h", "--help")
    path = resume = None
    rest = iter(args)
    for a in rest:
        if a.startswith("--resume"):
            resume = a.partition("=")[2] or next(rest, None)
        elif a.startswith("-"):
            if a not in alone and "=" not in a:
                next(rest, None)
        elif path is None:
            path = a
    return path, resume


def _help() -> int:
    console = Console(highlight=False)
    console.print("[bold]fourfold[/] trains large models on the GPUs you have.\n\nusage: fourfold COMMAND …\n")
    table = Table.grid(padding=(0, 2))
    for name, (kind, _) in COMMANDS.items():
        table.add_row(f"  [bold]{name}[/]", escape((kind.__doc__ or "").strip().splitlines()[0]))
    console.print(table)
    console.print("\n`fourfold COMMAND --help` lists a command's options.")
    return 0
