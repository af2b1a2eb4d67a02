"""`fourfold train`: start or resume a run, on this machine or as one rank of a torchrun or srun job."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from tyro.conf import FlagConversionOff

from fourfold.commands.finetune import fit_to_data, folder_config, is_model_folder
from fourfold.commands.start import start_ranks
from fourfold.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DpoConfig,
    LogConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from fourfold.errors import ConfigError, Interrupted, PlanError
from fourfold.launch.restarts import LONGEST_DELAY, Restarts
from fourfold.plan import Plan, Precision
from fourfold.view.text import markup

if TYPE_CHECKING:
    from fourfold.launch.place import Backend
    from fourfold.program.stages import PipelineLayout

__all__ = ["TrainArgs", "loaded_defaults", "train", "with_local_run"]


@dataclass(frozen=True)
class TrainArgs:
    """Train a model: `fourfold train CONFIG [--plan P] [--section.field value]`, or `fourfold train --resume RUN_DIR`.

    A Hugging Face folder in place of a config is fine-tuned: `fourfold train FOLDER --data FILE`, with defaults that are printed.
    """

    config: Annotated[str | None, tyro.conf.Positional] = None
    """Config file: what to train (TOML, JSON or YAML); or a Hugging Face folder to fine-tune."""
    plan: str | None = None
    """Plan file: how to train it. Without one, the planner makes one for the available ranks."""
    resume: str | None = None
    """Run directory of an earlier run to continue, or the URL of its checkpoints, instead of a config."""
    nproc: int | None = None
    """Ranks to start on this machine; default: those of the plan's mesh, else one per GPU, else one. With --resume, a different
    number of ranks than before is planned again."""
    max_restarts: int = 0
    """How many times to restart all ranks from the newest checkpoint that verifies after one of them fails."""
    restart_delay: float = 1.0
    """Seconds before the first restart; doubled for each further one without a new checkpoint, at most 60."""
    on_fault: Literal["stop", "replan"] = "stop"
    """replan: if ranks are no longer available, continue on the remaining ones, with a new plan for them."""
    replan_after: float = 30.0
    """replan, under srun: seconds to wait for the tasks of a host before it counts as gone."""
    dry_run: bool = False
    """Check everything and show what would run, without starting or writing anything."""
    debug: bool = False
    """Show tracebacks of errors."""
    # booleans of the sections are written out: --log.tensorboard true
    model: FlagConversionOff[ModelConfig] = field(default_factory=ModelConfig)
    data: FlagConversionOff[DataConfig] = field(default_factory=DataConfig)
    optim: FlagConversionOff[OptimConfig] = field(default_factory=OptimConfig)
    train: FlagConversionOff[TrainConfig] = field(default_factory=TrainConfig)
    checkpoint: FlagConversionOff[CheckpointConfig] = field(default_factory=CheckpointConfig)
    log: FlagConversionOff[LogConfig] = field(default_factory=LogConfig)
    dpo: FlagConversionOff[DpoConfig] = field(default_factory=DpoConfig)
    lora: FlagConversionOff[LoraConfig] = field(default_factory=LoraConfig)
    given: Annotated[tuple[str, ...], tyro.conf.Fixed, tyro.conf.Suppress] = ()
    """Names of the given flags: their values are binding, while values of the file may be adjusted."""


def train(args: TrainArgs) -> int:
    if _launched() or threading.current_thread() is not threading.main_thread():
        return _train(args)
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        return _train(args)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    """Requests to stop end the command like Ctrl-C while there are no ranks that could save."""
    raise KeyboardInterrupt


def _train(args: TrainArgs) -> int:
    restarts = _restarts(args)
    if restarts.most and _launched() and not args.dry_run and "FOURFOLD_SUPERVISED" not in os.environ:
        return _supervise(args, restarts)
    config, plan, layout, data = _prepare(args)
    console = Console(highlight=False)
    if args.dry_run:
        if not _launched():  # a job that was restarted continues its directory
            _check_run_dir(args, config)
        _describe(console, args, config, plan, data)
        console.print("[green]all checks passed[/]; nothing was started or written")
        return 0
    if _launched():
        return _be_a_rank(args, config, plan, layout, data)
    from fourfold.supervision.flight import note
    from fourfold.train.rundir import RunDir

    ranks = plan.mesh.ranks

    run = RunDir.reopen(args.resume) if args.resume else RunDir.create(config.train.run_dir, config, plan)
    try:
        _describe(console, args, config, plan, data)
        console.print(f"[dim]starting {ranks} {'ranks' if ranks > 1 else 'rank'} …[/]")
        begun = start_ranks(console, config, plan, layout, run, restarts, _planned_like)
    except Interrupted as e:
        note(run, "end", outcome="killed")
        raise Interrupted(f"{e}; {_how_to_continue(run.path, config)}") from None
    except KeyboardInterrupt:  # no ranks were running: before the first start, or between two
        begun = False
    finally:
        run.unlock()
    if not begun:
        note(run, "end", outcome="stopped")
        console.print(f"stopped while no rank was training; {_how_to_continue(run.path, config)}", soft_wrap=True)
        return 130
    _say_end(console, run.path, config)
    return 0


def _check_run_dir(args: TrainArgs, config: Config) -> None:
    """Raise RunDirError if the run could not have its directory; writes nothing."""
    from fourfold.train.rundir import RunDir

    run = RunDir(config.train.run_dir)
    run.check_unused()
    if args.resume:
        RunDir.find(args.resume).check_links()
    else:
        run.check_free()


def _launched() -> bool:
    """Whether torchrun or srun started this process."""
    return "RANK" in os.environ or "SLURM_STEP_ID" in os.environ


def _restarts(args: TrainArgs) -> Restarts:
    """The flags about restarts, checked."""
    if args.max_restarts < 0:
        raise ConfigError(f"--max-restarts {args.max_restarts} must be at least 0")
    if not 0 <= args.restart_delay <= LONGEST_DELAY:
        raise ConfigError(f"--restart-delay {args.restart_delay:g} must be from 0 to {LONGEST_DELAY:g} seconds")
    if not 0 < args.replan_after <= 86400:
        raise ConfigError(f"--replan-after {args.replan_after:g} must be from 0 to 86400 seconds")
    replan = args.on_fault == "replan"
    under_srun = _launched() and "RANK" not in os.environ
    most = max(1, args.max_restarts) if replan and under_srun else args.max_restarts
    if most and "TORCHELASTIC_RUN_ID" in os.environ and "FOURFOLD_SUPERVISED" not in os.environ:
        raise ConfigError(f"--max-restarts {most}: torchrun restarts its ranks itself; give the option to torchrun")
    return Restarts(most, args.restart_delay, replan, args.replan_after)


def _supervise(args: TrainArgs, restarts: Restarts) -> int:
    """A task of srun that starts its rank as a child, and again after a failure."""
    import sys

    from fourfold.launch.place import current_place
    from fourfold.launch.supervise import supervise
    from fourfold.train.rundir import RunDir

    def fits(ranks: int) -> int:
        config = _config(args)[0]
        plan = RunDir.find(config.train.run_dir).read()[1]
        for n in range(ranks, 0, -1):
            try:
                _planned_like(config, n, plan).check(config, n)
                return n
            except PlanError:
                continue
        return 0

    return supervise(current_place(), [sys.executable, "-m", "fourfold", *sys.argv[1:]], restarts, fits)


def _say_end(console: Console, path: Path, config: Config) -> None:
    """The last line of a run that ended in order: finished, or stopped by request."""
    from fourfold.model.to_hf import check_written

    if _saved_step(path) < config.train.steps:
        console.print(f"stopped as requested; {_how_to_continue(path, config)}", soft_wrap=True)
    else:
        final = markup(path / "final")
        made = f"{final} opens in transformers"
        if config.model.lora is not None and not config.lora.merge:
            made = f"{final} is an adapter that opens in PEFT; fourfold export {markup(path)} OUT --merge writes a whole model"
        elif why := check_written(config.model):
            made = f"{final} has the tensor names of fourfold, not of transformers: {why}"
        console.print(f"[green]done[/]: {made}  (sample from it: fourfold sample {markup(path)})", soft_wrap=True)
        if skipped := _skipped_steps(path):
            console.print(
                f"[yellow]{skipped} of its {config.train.steps} steps were skipped[/]: their loss or gradient was not finite",
                soft_wrap=True,
            )


def _skipped_steps(path: Path) -> int:
    """Steps of a run that changed no weights, since the loss or the gradient was not finite."""
    from fourfold.train.rundir import RunDir, read_metrics

    return max((m["skipped"] for m in read_metrics(RunDir(path)) if "skipped" in m), default=0)


def _how_to_continue(path: Path, config: Config) -> str:
    step = _saved_step(path)
    saved = (
        f"the newest checkpoint is of step {step} of {config.train.steps}" if step else "no checkpoint was saved yet"
    )
    return markup(f"{saved}. Continue with: fourfold train --resume {path}")


def _saved_step(path: Path) -> int:
    """Steps done in the newest complete checkpoint of a run; 0 when there is none. It is verified when the ranks open it."""
    from fourfold.checkpoint.folder import complete

    return max((step for step, _ in complete(path / "checkpoints")), default=0)


def _be_a_rank(args: TrainArgs, config: Config, plan: Plan, layout: PipelineLayout, data: str) -> int:
    """Started by torchrun or srun: this process is one rank; rank 0 prints."""
    from torch.distributed.elastic.multiprocessing.errors import record

    from fourfold.launch.local import die_with
    from fourfold.launch.place import current_place
    from fourfold.train.worker import join_and_work

    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())  # torchrun's agent; torch would let its ranks continue
    place = current_place()
    if place.restarted and "FOURFOLD_SUPERVISED" not in os.environ:  # torchrun restarts at once
        time.sleep(min(args.restart_delay * 2 ** (_number_of_restarts() - 1), 60.0))
    console = Console(highlight=False, quiet=place.rank > 0)
    _describe(console, args, config, plan, data)
    run = record(join_and_work)(place, config, plan, layout, resume=args.resume is not None)
    assert run is not None  # the wrapper re-raises
    if place.rank == 0:
        _say_end(console, run.run_dir, config)
    return 0


def _number_of_restarts() -> int:
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(count) if count.isdigit() and len(count) < 4 else 1


def _prepare(args: TrainArgs) -> tuple[Config, Plan, PipelineLayout, str]:
    """The resolved config, the plan, its lowered pipeline and a line about the data.

    Everything that can be checked before a start is checked here.
    """
    config, said = _config(args)
    ranks = args.nproc
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--nproc {ranks}: at least one rank is needed")
    from fourfold.checkpoint.folder import check_whole
    from fourfold.train.objective import open_run

    if args.resume:
        check_whole(Path(args.resume) / "checkpoints")
    else:
        _check_model(config)
    samples, *_ = open_run(config)
    if args.plan:
        plan = Plan.load(args.plan)
    elif args.resume:
        plan = _plan_of(args.resume)
        wanted = ranks or _ranks_started()
        if wanted and wanted != plan.mesh.ranks:  # checkpoints open under any plan
            plan = _planned(config, wanted, samples.context, plan.precision)
    else:
        ranks = (_ranks_started() or _gpus(config) or 1) if ranks is None else ranks
        plan = _planned(config, ranks, samples.context)
    plan = _continued(args, config, plan, samples.context)
    layout = plan.check(config, ranks or _ranks_started() or None)
    if config.train.device == "cuda" and not _gpus(config):
        raise ConfigError("train.device = 'cuda', but torch sees no GPU here; use 'auto' or 'cpu'")
    _backend(config, plan)
    if config.checkpoint.dir:
        from fourfold.checkpoint.remote import check_url

        check_url(config.checkpoint.dir, plan.mesh.ranks)
    from fourfold.train.callbacks import extra_callbacks

    extra_callbacks(config)
    data = samples.describe(config.train.global_batch, config.train.steps)
    return config, plan, layout, f"{data}\nfine-tuning: {said}" if said else data


def _check_model(config: Config) -> None:
    """Check the files of a (resolved) new run's model; before the data, whose encoding may take hours."""
    from fourfold.checkpoint.adapters import check_lora
    from fourfold.checkpoint.weights import check_weights
    from fourfold.model.to_hf import check_written

    check_lora(config)
    if config.model.init != "random":
        check_weights(config.model)
    check_written(config.model)


def _plan_of(run: str) -> Plan:
    """The plan that a run last used."""
    return Plan.load(Path(run) / "plan.json")


def _config(args: TrainArgs) -> tuple[Config, str]:
    """The resolved config, and a line about values that were derived from the data."""
    config = Config(
        model=args.model,
        data=args.data,
        optim=args.optim,
        train=args.train,
        checkpoint=args.checkpoint,
        log=args.log,
        dpo=args.dpo,
        lora=args.lora,
    )
    said = ""
    if is_model_folder(args.config):
        one = dataclasses.replace(config.model, seq_len=config.model.seq_len or 1)
        _check_model(dataclasses.replace(config, model=one, optim=OptimConfig(warmup=0)).resolve())
        config, said = fit_to_data(config, args.given)
    if "train.steps" in args.given and "optim.warmup" not in args.given:
        config = config.with_short_warmup()
    return config.resolve(), said


def _continued(args: TrainArgs, config: Config, plan: Plan, context: float) -> Plan:
    """The plan of a job that its launcher restarted; if the number of ranks has changed, a new one."""
    ranks, path = _ranks_started(), Path(config.train.run_dir)
    if args.on_fault != "replan" or not ranks or not (path / "config.json").is_file():
        return plan
    from fourfold.train.rundir import RunDir

    if args.plan and plan.mesh.ranks == ranks:
        return plan
    before = RunDir.find(path).read()[1]
    return before if before.mesh.ranks == ranks else _planned(config, ranks, context, before.precision)


def _planned_like(config: Config, ranks: int, plan: Plan) -> Plan:
    """The planner's plan for `ranks` ranks, with the precision of another plan."""
    from fourfold.data.samples import open_samples

    return _planned(config, ranks, open_samples(config)[0].context, plan.precision)


def _planned(config: Config, ranks: int, context: float, precision: Precision | None = None) -> Plan:
    """The planner's plan for these ranks, on this machine's GPUs or its cores, for data with documents of this length."""
    from fourfold.cluster import Cluster
    from fourfold.planner.api import plan_run

    if not _gpus(config):
        return plan_run(config, Cluster.local(ranks), precision, context=context)
    from fourfold.launch.place import gpu_cluster, place_from_environment

    place = place_from_environment(os.environ)
    return plan_run(config, gpu_cluster(ranks, place.local_ranks if place else ranks), precision, context=context)


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
    """The backend of the ranks; raises ConfigError if it is not available here."""
    from fourfold.launch.place import choose_backend, place_from_environment

    gpus, place = _gpus(config), place_from_environment(os.environ)
    local = place.local_ranks if place else plan.mesh.ranks
    return choose_backend(config.train.backend, "cuda" if gpus else "cpu", local, gpus)


def _grid(config: Config, plan: Plan) -> str:
    """The flow of every matmul, what is kept, and the bytes that a rank receives for the matmuls of one layer."""
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
    count = number(parameter_count(dataclasses.replace(m, lora=None)))
    size, micro = plan.micro_batch_size(batch), plan.micro_batches(batch)
    fp8 = ", matmuls of blocks in fp8" if plan.precision.matmul == "fp8" else ""
    share = f"{micro} × {size} sequences each, {plan.precision.compute}{fp8}"
    other = _made_for(config, plan)
    facts(
        [
            ("model", f"{m.model_type or m.family}, {m.layers} layers, hidden {m.hidden}, {count} parameters"),
            *([("lora", _lora(config))] if m.lora is not None else []),
            ("data", f"{_sources(config)}, {batch} × {m.seq_len} tokens a step"),
            ("", data),
            ("plan", f"{plan.mesh.product()} {'ranks' if ranks > 1 else 'rank'}, {share}"),
            *([("", anew)] if (anew := _planned_anew(args, plan)) else []),
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


def _planned_anew(args: TrainArgs, plan: Plan) -> str:
    """That a resumed run has a new plan, for another number of ranks."""
    if not args.resume or args.plan:
        return ""
    before = _plan_of(args.resume).mesh
    if before.ranks == plan.mesh.ranks:
        return ""
    return f"planned anew: the run had {before.product()} {'ranks' if before.ranks > 1 else 'rank'}; --plan FILE names your own"


def _lora(config: Config) -> str:
    """What is adapted, and how many parameters are trained."""
    from fourfold.model.lora import layer_names
    from fourfold.model.spec import parameter_count, trained_count
    from fourfold.view.console import number

    m = config.model
    assert m.lora is not None
    trained, whole = trained_count(m), parameter_count(m)
    names = ", ".join(layer_names(m))
    return f"rank {m.lora.rank}, scale {m.lora.scale:g}, on {names}: {number(trained)} parameters trained ({trained / whole:.2%})"


def _resumes(path: Path, config: Config) -> str:
    step = _saved_step(path)
    if step >= config.train.steps:
        return f"at step {step}: all steps are done; --train.steps trains further"
    if config.checkpoint.dir and not step:
        return f"from the newest checkpoint at {config.checkpoint.dir}"
    return f"from the checkpoint of step {step}" if step else "from the beginning: no checkpoint was saved yet"


def _sources(config: Config) -> str:
    """The training data, with weights, and what it is evaluated on."""
    pairs = zip(*config.data.mixture(), strict=True)
    said = " + ".join(path if weight == 1 else f"{weight:g} × {path}" for path, weight in pairs)
    separate = config.train.eval_every and config.data.eval_source
    return f"{said}; evaluation on {config.data.eval_source}" if separate else said


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
    spec = ModelSpec.from_config(config.model).with_context(p.get("context", 0.0))
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


def with_local_run(args: list[str]) -> list[str]:
    """The arguments with the URL of `--resume` replaced by the local run directory, which is created if missing."""
    from fourfold.checkpoint.remote import is_url, local_run

    _, resume = _named(args)
    if resume is None or not is_url(resume):
        return args
    at = next((i for i, a in enumerate(args) if a.startswith("--train.run-dir")), -1)
    folder = (args[at].partition("=")[2] or args[at + 1]) if 0 <= at < len(args) - ("=" not in args[at]) else ""
    run = str(local_run(resume, folder))
    return [run if a == resume else f"--resume={run}" if a == f"--resume={resume}" else a for a in args]


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
