"""`fourfold train`: start or resume a run, on this machine or as one rank of a torchrun or srun job."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from tyro.conf import FlagConversionOff

from fourfold.commands.finetune import fit_to_data, folder_config, is_model_folder
from fourfold.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from fourfold.errors import ConfigError, Interrupted, RankFailure
from fourfold.plan import Plan
from fourfold.view.text import markup

if TYPE_CHECKING:
    from fourfold.launch.place import Backend
    from fourfold.program.stages import PipelineLayout
    from fourfold.train.rundir import RunDir

__all__ = ["TrainArgs", "loaded_defaults", "train"]


@dataclass(frozen=True)
class TrainArgs:
    """Train a model: `fourfold train CONFIG [--plan P] [--section.field value]`, or `fourfold train --resume RUN_DIR`.

    A Hugging Face folder in place of a config is fine-tuned: `fourfold train FOLDER --data FILE`, with defaults that are printed.
    """

    config: Annotated[str | None, tyro.conf.Positional] = None
    """Config file: what to train (TOML, JSON or YAML); or a Hugging Face folder to fine-tune."""
    plan: str | None = None
    """Plan file: how to train it. Without one, the planner makes one for the ranks there are."""
    resume: str | None = None
    """Run directory of an earlier run to continue, instead of a config."""
    nproc: int | None = None
    """Ranks to start on this machine; default: what the plan's mesh says, else one per GPU, else one."""
    max_restarts: int = 0
    """How many times to restart all ranks from the newest checkpoint after one of them fails."""
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
    given: Annotated[tuple[str, ...], tyro.conf.Fixed, tyro.conf.Suppress] = ()
    """Names of the flags that were given: what they say is wanted, what the file says may be made to fit."""


def train(args: TrainArgs) -> int:
    config, plan, layout, data = _prepare(args)
    console = Console(highlight=False)
    if args.dry_run:
        _describe(console, args, config, plan, data)
        console.print("[green]all checks passed[/]; nothing was started or written")
        return 0
    if "RANK" in os.environ or "SLURM_STEP_ID" in os.environ:
        return _be_a_rank(args, config, plan, layout, data)
    from fourfold.train.rundir import RunDir

    ranks = plan.mesh.ranks

    run = RunDir.reopen(args.resume) if args.resume else RunDir.create(config.train.run_dir, config, plan)
    try:
        _describe(console, args, config, plan, data)
        console.print(f"[dim]starting {ranks} {'ranks' if ranks > 1 else 'rank'} …[/]")
        begun = _start(console, config, plan, layout, run, args.max_restarts)
    except Interrupted as e:
        raise Interrupted(f"{e}; {_how_to_continue(run.path, config)}") from None
    finally:
        run.unlock()
    if not begun:
        console.print(f"stopped before training began; {_how_to_continue(run.path, config)}", soft_wrap=True)
        return 130
    _say_end(console, run.path, config)
    return 0


def _say_end(console: Console, path: Path, config: Config) -> None:
    """The last line of a run that ended in order: finished, or stopped by request."""
    if _saved_step(path) < config.train.steps:
        console.print(f"stopped as requested; {_how_to_continue(path, config)}", soft_wrap=True)
    else:
        console.print(
            f"[green]done[/]: {markup(path)}  (sample from it: fourfold sample {markup(path)})", soft_wrap=True
        )


def _how_to_continue(path: Path, config: Config) -> str:
    step = _saved_step(path)
    saved = (
        f"the newest checkpoint is of step {step} of {config.train.steps}" if step else "no checkpoint was saved yet"
    )
    return markup(f"{saved}. Continue with: fourfold train --resume {path}")


def _saved_step(path: Path) -> int:
    """Steps done in the newest complete checkpoint of a run; 0 when there is none. It is verified when the ranks open it."""
    from fourfold.train.checkpoint_folder import complete

    return max((step for step, _ in complete(path / "checkpoints")), default=0)


def _be_a_rank(args: TrainArgs, config: Config, plan: Plan, layout: PipelineLayout, data: str) -> int:
    """Started by torchrun or srun: this process is one rank; rank 0 prints."""
    from torch.distributed.elastic.multiprocessing.errors import record

    from fourfold.launch.local import die_with
    from fourfold.launch.place import current_place
    from fourfold.train.worker import join_and_work

    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())  # torchrun's agent; torch would let its ranks train on
    place = current_place()
    console = Console(highlight=False, quiet=place.rank > 0)
    _describe(console, args, config, plan, data)
    run = record(join_and_work)(place, config, plan, layout, resume=args.resume is not None)
    assert run is not None  # the wrapper re-raises
    if place.rank == 0:
        _say_end(console, run.run_dir, config)
    return 0


def _prepare(args: TrainArgs) -> tuple[Config, Plan, PipelineLayout, str]:
    """The resolved config, the plan, its lowered pipeline and a line about the data.

    Everything that can be checked before a start is checked here.
    """
    config = Config(
        model=args.model,
        data=args.data,
        optim=args.optim,
        train=args.train,
        checkpoint=args.checkpoint,
        log=args.log,
    )
    said = ""
    if is_model_folder(args.config):
        config, said = fit_to_data(config, args.given)
    if "train.steps" in args.given and "optim.warmup" not in args.given:
        config = config.with_short_warmup()
    config = config.resolve()
    ranks = args.nproc
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--nproc {ranks}: at least one rank is needed")
    if args.plan:
        plan = Plan.load(args.plan)
    elif args.resume:
        plan = Plan.load(Path(args.resume) / "plan.json")
    else:
        ranks = (_ranks_started() or _gpus(config) or 1) if ranks is None else ranks
        plan = _planned(config, ranks)
    layout = plan.check(config, ranks or _ranks_started() or None)
    if config.train.device == "cuda" and not _gpus(config):
        raise ConfigError("train.device = 'cuda', but torch sees no GPU here; use 'auto' or 'cpu'")
    _backend(config, plan)
    from fourfold.train.callbacks import extra_callbacks
    from fourfold.train.data import open_samples

    extra_callbacks(config)
    samples, _ = open_samples(config)
    if config.model.init != "random" and not args.resume:
        from fourfold.train.weights import check_weights

        check_weights(config.model)
    data = samples.describe(config.train.global_batch, config.train.steps)
    return config, plan, layout, f"{data}\nfine-tuning: {said}" if said else data


def _planned(config: Config, ranks: int) -> Plan:
    """The planner's plan for these ranks, on this machine's GPUs or its cores."""
    from fourfold.cluster import Cluster
    from fourfold.planner.api import plan_run

    if not _gpus(config):
        return plan_run(config, Cluster.local(ranks))
    from fourfold.launch.place import gpu_cluster, place_from_environment

    place = place_from_environment(os.environ)
    return plan_run(config, gpu_cluster(ranks, place.local_ranks if place else ranks))


def _ranks_started() -> int:
    """How many ranks torchrun or srun started; 0 when neither did."""
    if not {"WORLD_SIZE", "SLURM_STEP_ID"} & os.environ.keys():
        return 0
    from fourfold.launch.place import ranks_started

    return ranks_started(os.environ)


def _gpus(config: Config) -> int:
    """GPUs that torch can use, counted without starting CUDA (a process that has started it cannot fork ranks)."""
    if config.train.device == "cpu" or not (Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()):
        return 0
    import torch

    return torch.cuda.device_count()


def _backend(config: Config, plan: Plan) -> Backend:
    """What the ranks will talk over; raises ConfigError where that is not possible here."""
    from fourfold.launch.place import choose_backend, place_from_environment

    gpus, place = _gpus(config), place_from_environment(os.environ)
    local = place.local_ranks if place else plan.mesh.ranks
    return choose_backend(config.train.backend, "cuda" if gpus else "cpu", local, gpus)


def _start(
    console: Console, config: Config, plan: Plan, layout: PipelineLayout, run: RunDir, max_restarts: int
) -> bool:
    """Start the ranks on this machine, again after a failure as often as allowed. False: stopped before training began."""
    from fourfold.launch.local import launch_local
    from fourfold.train.checkpoint import newest
    from fourfold.train.worker import work

    for attempt in range(max_restarts + 1):
        try:
            return launch_local(
                lambda place, store, screen: work(place, store, config, plan, layout, run, console=screen),
                plan.mesh.ranks,
                run.logs,
            )
        except RankFailure as e:
            if attempt == max_restarts or e.exit_code == 2 or e.after_stop:
                raise
            last = newest(run.checkpoints)
            console.print(f"[red]{markup(str(e).splitlines()[0])}[/]")
            console.print(
                f"restarting from {last or 'the beginning'} ({attempt + 1} of {max_restarts})", soft_wrap=True
            )
    raise AssertionError("the last attempt returns or raises")


def _grid(config: Config, plan: Plan) -> str:
    """How every product moves, what is kept, and what a rank receives for the products of one layer."""
    from fourfold.schema import format_bytes
    from fourfold.tensor.costs import traffic
    from fourfold.tensor.products import flows_of_plan

    batch, tensor = config.train.global_batch, plan.tensor
    found, micro = flows_of_plan(config.model, plan, batch), plan.micro_batches(batch)
    compute, reduce = plan.precision.compute_bytes, plan.precision.reduce_bytes
    layer = [traffic(p, f, tensor.keep, micro) for n, (p, f) in found.items() if n in ("qkv", "out", "up", "down")]
    moved = format_bytes(sum(t.bytes(compute, reduce) for t in layer))
    said = [n for n in found if getattr(tensor.flows, n) != "auto"]
    why = "as the plan says" if len(said) == len(found) or tensor.flow != "auto" else "by bytes and calls"
    flows = ", ".join(f"{name} {flow}" for name, (_, flow) in found.items())
    kept = f"keeping {' and '.join(tensor.keep)}" if tensor.keep else "keeping nothing"
    return f"{flows} ({why}); {moved} a layer and step, {kept}; overlap {'on' if tensor.overlap else 'off'}"


def _describe(console: Console, args: TrainArgs, config: Config, plan: Plan, data: str) -> None:
    from fourfold.model.spec import parameter_count
    from fourfold.view.console import facts, number

    m, batch, ranks = config.model, config.train.global_batch, plan.mesh.ranks
    size, micro = plan.micro_batch_size(batch), plan.micro_batches(batch)
    share = f"{micro} × {size} sequences each, {plan.precision.compute}"
    other = _made_for(config, plan)
    facts(
        [
            ("model", f"{m.family}, {m.layers} layers, hidden {m.hidden}, {number(parameter_count(m))} parameters"),
            ("data", f"{config.data.source}, {batch} × {m.seq_len} tokens a step"),
            ("", data),
            ("plan", f"{plan.mesh.product()} {'ranks' if ranks > 1 else 'rank'}, {share}"),
            *([("grid", _grid(config, plan))] if plan.mesh.row * plan.mesh.col > 1 else []),
            *([("predicted", _predicted(plan))] if plan.predicted and not other else []),
            *([("backend", note)] if ranks > 1 and (note := _backend(config, plan).note) else []),
            ("steps", _steps(args, config)),
            *([("resumes", _resumes(Path(args.resume), config))] if args.resume else []),
            ("run", config.train.run_dir),
        ],
        console,
    )
    if other:
        console.print(
            f"[yellow]warning:[/] {markup(other)}: what it predicted is not for this run; "
            "`fourfold plan` with --judge predicts it anew",
            soft_wrap=True,
        )


def _resumes(path: Path, config: Config) -> str:
    step = _saved_step(path)
    if step >= config.train.steps:
        return f"at step {step}: all steps are done; --train.steps trains further"
    return f"from the checkpoint of step {step}" if step else "from the beginning: no checkpoint was saved yet"


def _steps(args: TrainArgs, config: Config) -> str:
    """How many, and whether the warm-up was made to fit them."""
    whole, warmup = args.optim.warmup, config.optim.warmup
    return f"{config.train.steps}" + (f", warm-up shortened from {whole} to {warmup}" if warmup < whole else "")


def _made_for(config: Config, plan: Plan) -> str:
    """What the plan was made for, where that is another model or batch than the run's."""
    from fourfold.model.operators import ModelSpec

    p, batch = plan.predicted or {}, config.train.global_batch
    if not p:
        return ""
    spec = ModelSpec.from_config(config.model)
    known = (p.get("parameters"), p.get("seq_len"), (plan.certificate or {}).get("model", spec.fingerprint))
    parts = []
    if known != (spec.parameters, spec.seq_len, spec.fingerprint):
        parts.append(f"another model ({p.get('model')}, {p.get('seq_len')} tokens)")
    if p.get("global_batch") != batch:
        parts.append(f"another batch ({p.get('global_batch')} sequences, here {batch})")
    return f"the plan was made for {' and '.join(parts)}" if parts else ""


def _predicted(plan: Plan) -> str:
    from fourfold.schema import format_bytes

    p = plan.predicted or {}
    seconds, held = p.get("seconds"), p.get("peak_bytes")
    if not all(isinstance(x, int | float) for x in (seconds, held)):
        return "not readable"
    return f"{seconds:.3g} s a step, {format_bytes(held or 0)} of tensors on the fullest rank ({p.get('cluster')})"


def loaded_defaults(args: list[str]) -> TrainArgs:
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
        if Path(path).is_dir() and not is_model_folder(path):
            raise ConfigError(
                f"{path} is a folder, and no Hugging Face model (config.json with a model_type); name a config file, for example "
                f"configs/gpt-tiny.toml, or continue a run: fourfold train --resume {path}"
            )
        config = folder_config(path) if is_model_folder(path) else Config.load(path)
    sections = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    given = tuple(a.removeprefix("--").partition("=")[0] for a in args if a.startswith("--"))
    return TrainArgs(config=path, resume=resume, given=given, **sections)


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
