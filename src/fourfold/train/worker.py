"""Assembles one rank from a config and a plan, in `assemble`.

Build the model without storage; put it on the tensor grid; make the units of this rank's stages, each with its parameters in one
flat buffer and their initial values; chain them into stages; create an executor for the stages, their messages and the rank's
program; create the optimizer of the units; open the data; resume from a checkpoint if there is one; run the loop.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import psutil
import torch
import torch.distributed as dist

import fourfold
from fourfold import schema
from fourfold.checkpoint import save_load
from fourfold.checkpoint.adapters import check_base, check_lora
from fourfold.checkpoint.hf_files import keep_files
from fourfold.checkpoint.remote import RemoteFolder, check_own, check_url
from fourfold.checkpoint.weights import check_weights, read_weights
from fourfold.collectives import all_reduce
from fourfold.config import LONGEST_WAIT, Config
from fourfold.data.own_data import OwnSamples
from fourfold.data.samples import Samples
from fourfold.errors import ConfigError, FourfoldError, RunDirError
from fourfold.launch.gpu_errors import translated
from fourfold.launch.local import end_rank
from fourfold.launch.place import Place, check_joined, choose_device, current_place, join_group, leave
from fourfold.model.build import build_model, materialize_buffers
from fourfold.model.spec import parameter_count
from fourfold.model.to_hf import check_written
from fourfold.plan import AXES, Mesh, Plan
from fourfold.program.stages import PipelineLayout
from fourfold.record import RECORD
from fourfold.runtime.compiled import set_compile_cache
from fourfold.runtime.executor import Executor
from fourfold.supervision.failures import FailureRecorder
from fourfold.supervision.faults import Faults
from fourfold.supervision.flight import begin_attempt, note
from fourfold.supervision.guard import Guard
from fourfold.supervision.watch import Board, Limits, Watch, make_board
from fourfold.tensor.own_layers import OwnRule
from fourfold.train._torch import default_store
from fourfold.train.attention_kernel import AttentionChoice, attention_seconds, choose_kernel, use_kernel
from fourfold.train.callbacks import Callback, RunInfo, extra_callbacks
from fourfold.train.clock import make_clock
from fourfold.train.loop import Engine, Loop, RankContext, RunServices
from fourfold.train.mesh import RankMesh
from fourfold.train.metrics import Recorder, peak_flops, used_bytes
from fourfold.train.objective import Loss, Objective, add_reference, open_run, samples_together
from fourfold.train.own_model import OwnModel, check_frozen, make_own_units
from fourfold.train.parts import (
    RankUnits,
    compute_in_fp8,
    grid_settings,
    make_grid,
    make_handles,
    make_runner,
    make_stages,
    make_transport,
    make_units,
    put_on_grid,
    set_loss_chunks,
    types_of,
)
from fourfold.train.rundir import RunDir
from fourfold.train.streamed import make_keeper, make_optimizer
from fourfold.train.trace import TraceFile
from fourfold.view.console import short_duration

__all__ = ["Outcome", "fit", "join_and_work", "work"]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the steps done, and its run directory."""

    steps: int
    run_dir: Path


@dataclass(frozen=True)
class UserParts:
    """The caller's own parts in `fit`; None: from the config."""

    model: OwnModel | None = None
    opened: tuple[Samples, Samples | None, Loss | None] | None = None
    """Samples and loss, if already opened."""


def fit(
    config: Config,
    plan: Plan | None = None,
    *,
    model: Any = None,
    data: Any = None,
    loss: Loss | None = None,
    grid_rules: Mapping[type, OwnRule] | None = None,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    console: IO[str] | None = None,
) -> Outcome:
    """Train `config` under `plan` (default: every rank is a replica); this process is one rank of a job, or the only one.

    Call it in every rank, from your own script; `fourfold train` starts the ranks itself. It uses the existing process group,
    or joins that of torchrun or srun, or runs alone. With `resume`, the run in `train.run_dir` continues from its newest
    checkpoint.

    Args:
        model: your own model instead of `config.model`: ordered layers, or a function that makes them (own_model.py). Needs
            `data` and `loss`.
        data: your own dataset instead of `config.data`: an object with a length and samples by index (data/own_data.py;
            without `model` and `loss`: examples of tokens or text, data/samples.py).
        loss: your own loss instead of the cross entropy: a function of (output, batch) (objective.py).
        grid_rules: of your own model, how modules of a class lie on a tensor grid (tensor/own_layers.py).
    """
    if grid_rules is not None and model is None:
        raise ConfigError(
            "fit(grid_rules=…) is for a model of your own: fit(…, model=…); built-in models have their rules"
        )
    config, place = config.resolve(own_model=model is not None), current_place()
    plan = plan or Plan(mesh=Mesh(data=place.ranks))
    if model is not None and config.lora.rank:
        raise ConfigError(
            "[lora] adapts built-in models, not your own: use lora.rank = 0, and adapt your model yourself"
        )
    own = OwnModel.of(model, config.train.seed, grid_rules) if model is not None else None
    if own is not None and (data is None or loss is None):
        raise ConfigError(f"fit(model=…) needs your {'data' if data is None else 'loss'}, too: fit(…, data=…, loss=…)")
    layout = plan.check(config, place.ranks, own.outline if own is not None else None)
    check_lora(config)
    if loss is not None:
        plan.check_together(config.train.global_batch, samples_together(loss))
    if config.checkpoint.dir:
        check_url(config.checkpoint.dir, place.ranks)
    if own is None and not resume:
        check_written(config.model)
    if own is None and config.model.init != "random" and not resume:
        check_weights(config.model)
    user = UserParts(own, open_run(config, data, loss, own_model=own is not None))
    callbacks = [*callbacks, _Resumed(resume, console)]
    outcome = join_and_work(place, config, plan, layout, callbacks=callbacks, resume=resume, console=console, user=user)
    if place.rank == 0 and outcome.steps < config.train.steps:
        print(
            f"stopped after step {outcome.steps} of {config.train.steps}; fit(…, resume=True) continues", file=console
        )
    return outcome


class _Resumed(Callback):
    """Prints where a resumed run starts; the command line prints this itself."""

    def __init__(self, resume: bool, console: IO[str] | None):
        self.resume, self.console = resume, console

    def on_start(self, run: RunInfo, step: int) -> None:
        if self.resume and run.rank == 0:
            said = f"from the checkpoint of step {step}" if step else "from the beginning: no checkpoint was saved yet"
            print(f"resumes {said}", file=self.console, flush=True)


def join_and_work(
    place: Place,
    config: Config,
    plan: Plan,
    layout: PipelineLayout,
    *,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    console: IO[str] | None = None,
    user: UserParts = UserParts(),
) -> Outcome:
    """`fit` with a resolved config and a checked plan; `layout` is its lowered pipeline."""
    device, limits = _prepare(config, place, own=user.model is not None)
    joins = place.ranks > 1 and not dist.is_initialized()
    if joins:
        join_group(place, None, device, max(limits.step, 300.0), config.train.backend, LONGEST_WAIT)
    with _leaving(joins):
        _check_same(place, config)
        plan, layout = _agree_on_plan(place, config, plan, layout, user)
        run = claim(place, config, plan, resume)
        try:
            return work(place, None, config, plan, layout, run, callbacks=callbacks, console=console, user=user)
        finally:
            run.unlock()


def _check_same(place: Place, config: Config) -> None:
    """Raise ConfigError on all ranks if one has another config or version than rank 0. Paths may differ between hosts."""
    if place.ranks == 1:
        return
    sections = {name: section for name, section in config.to_dict().items() if isinstance(section, dict)}
    mine = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    mine |= {"the version of fourfold": fourfold.__version__, "the version of torch": torch.__version__}
    offered = [mine]
    dist.broadcast_object_list(offered, src=0)
    problem = ""
    for key, value in offered[0].items():
        if (own := mine.get(key)) != value and not ("/" in str(own) and "/" in str(value)):
            problem = f"{key} is {own!r} on rank {place.rank} and {value!r} on rank 0"
            break
    problems = [found for found in _everyone(problem, place) if found]
    if problems:
        raise ConfigError(f"{problems[0]}; start all ranks with the same config, flags and packages")


def _agree_on_plan(
    place: Place, config: Config, plan: Plan, layout: PipelineLayout, user: UserParts
) -> tuple[Plan, PipelineLayout]:
    """Broadcast rank 0's plan: ranks may have planned from different hardware information."""
    if place.ranks == 1:
        return plan, layout
    mine = plan.to_dict()
    offered = [mine]
    dist.broadcast_object_list(offered, src=0)
    if offered[0] == mine:
        return plan, layout
    theirs = Plan.from_dict(offered[0])
    return theirs, theirs.check(config, place.ranks, user.model.outline if user.model is not None else None)


def claim(place: Place, config: Config, plan: Plan, resume: bool) -> RunDir:
    """The run directory, claimed by rank 0 for all; if that fails, every rank raises its error.

    A job that was restarted by its launcher continues its run: it is recognised by the restart count of one of its ranks, or
    by the job's name in the directory.
    """
    restarted = any(_everyone(place.restarted, place))
    run, problem = RunDir(config.train.run_dir), None
    if place.rank == 0:
        again = run.config_file.exists() and (restarted or (place.job and run.job() == place.job))
        try:
            if resume or again:
                run = RunDir.reopen(run.path)
                begin_attempt(run)
            else:
                run = RunDir.create(run.path, config, plan)
        except RunDirError as e:
            problem = str(e)
    problem = _everyone(problem, place)[0]
    if problem is not None:
        raise RunDirError(problem)
    return run


def _everyone(value: Any, place: Place) -> list[Any]:
    """Every rank's value."""
    if place.ranks == 1:
        return [value]
    values: list[Any] = [None] * place.ranks
    dist.all_gather_object(values, value)
    return values


def work(
    place: Place,
    store: dist.Store | None,
    config: Config,
    plan: Plan,
    layout: PipelineLayout,
    run: RunDir,
    *,
    callbacks: Sequence[Callback] = (),
    console: IO[str] | None = None,
    user: UserParts = UserParts(),
) -> Outcome:
    """Run one rank: the run directory is claimed, the config resolved and the plan checked; `layout` is its lowered pipeline."""
    device, limits = _prepare(config, place, own=user.model is not None)
    joins = place.ranks > 1 and not dist.is_initialized()
    if dist.is_initialized():
        check_joined(config.train.backend)
    if joins:
        join_group(place, store, device, max(limits.step, 300.0), config.train.backend, LONGEST_WAIT)
    board = make_board(default_store()) if place.ranks > 1 else make_board(store) if store is not None else None
    recorder = FailureRecorder(place, run, device, board, launched=store is not None)
    if place.rank == 0:
        note(run, "start", ranks=place.ranks, mesh=plan.mesh.product())
    with _leaving(joins), recorder, translated(), _watch(place, store, limits, board, recorder):
        loop, done = assemble(place, device, limits, config, plan, layout, run, callbacks, console, user)
        with loop.guard.on_watch():
            steps = loop.run(done)
            guard, group = loop.guard, loop.checkpointer.group
            if place.rank == 0 and steps == config.train.steps:
                from fourfold.checkpoint.export import write_final, write_own_final

                del loop  # free this rank's tensors before whole weights are read
                gc.collect()
                if user.model is None:
                    write_final(run, config)  # not interrupted by a request to stop
                else:
                    write_own_final(run.checkpoints, run.final, user.model.frozen, user.model.aliases)
            if group is not None:  # so that they notice if rank 0 is killed or stopped while it writes
                all_reduce(torch.zeros(1), group, "the end of the run").wait()
            guard.leave()
            if place.rank == 0:
                outcome = "finished" if steps == config.train.steps else "stopped"
                note(run, "end", outcome=outcome, step=steps)
    return Outcome(steps, run.path)


@contextlib.contextmanager
def _leaving(joined: bool) -> Iterator[None]:
    """Leave the process group on exit, if this call has joined it; after a failure only if that waits for no peer."""
    try:
        yield
    except BaseException:
        if joined and "nccl" not in str(dist.get_backend_config()):
            leave()
        raise
    if joined:
        leave()


def _watch(
    place: Place, store: dist.Store | None, limits: Limits, board: Board | None, recorder: FailureRecorder
) -> contextlib.AbstractContextManager[object]:
    """The watchdog of this rank, which replaces the timeouts of process groups; `store` is the launcher's."""
    if board is None:
        return contextlib.nullcontext()

    def end(verdict: str) -> None:
        recorder.hang(verdict)
        end_rank(place, store, verdict)

    return Watch(board, place.rank, place.ranks, limits, end=end)


def assemble(
    place: Place,
    device: torch.device,
    limits: Limits,
    config: Config,
    plan: Plan,
    layout: PipelineLayout,
    run: RunDir,
    callbacks: Sequence[Callback],
    console: IO[str] | None,
    user: UserParts = UserParts(),
) -> tuple[Loop, int]:
    """The loop of one rank, and the number of steps done before."""
    RECORD.uncompiled = {}  # an earlier run of this process may have had some
    own = user.model is not None
    mesh = RankMesh(plan.mesh, place.rank, timedelta(seconds=LONGEST_WAIT))
    world = dist.group.WORLD if place.ranks > 1 else None
    batch_group = mesh.group("data", "depth", "row", use="gradients")
    saving = mesh.group(*AXES, use="save", gloo=True)
    compute, _ = types_of(plan)
    peak_rate = peak_flops(device, compute)  # measuring needs memory, so do it before the model is built
    attention = None if own else _choose_attention(config, plan, place, device, compute, run, console)
    guard = Guard(
        limits=limits,
        max_skipped=config.train.max_skipped,
        skips=config.train.guard,
        faults=Faults.from_environment(os.environ, place.rank, run.path / "faults"),
    )
    guard.start()

    clock = make_clock(device)
    train_samples, eval_samples, loss = user.opened or open_run(config)
    held, frozen = _make_units(
        config, plan, place, layout, mesh, device, user.model, train_samples, per_token=loss is not None
    )
    units = list(held.units.values())
    optimizer = make_optimizer(config, plan, units, place.local_ranks)
    keeper = make_keeper(plan, device, place.local_ranks)
    compiled = _compiles(plan, place, device, console, own=own)
    stages = make_stages(config, plan, mesh, layout, held, keeper, own=own, compiled=compiled)
    handles = make_handles(held, stages, optimizer)
    executor = Executor(
        layout.schedule.placement,
        mesh.coordinates["pipe"],
        stages.stages,
        handles,
        make_transport(config, plan, mesh, layout, device, LONGEST_WAIT, own=own),
        buckets=handles,
        watch=guard.instruction,
        mark=clock.mark,
    )
    runner = make_runner(executor, plan, mesh, layout)
    with guard.connecting():
        mesh.connect(device)

    parameters = user.model.parameters if user.model is not None else parameter_count(config.model)
    info = RunInfo(config, plan, run.path, place.rank, place.ranks, parameters)
    mine = list(callbacks) + extra_callbacks(config)
    objective = None
    if loss is not None:
        wide = torch.float64 if compute == torch.float64 else torch.float32
        objective = Objective(loss, wide, log_probs=not own)
    remote = RemoteFolder(config.checkpoint.dir) if config.checkpoint.dir else None
    loop = Loop(
        RankContext(info, mesh, device, clock, world, batch_group, peak_rate),
        Engine(runner, units, list(held.ties.values()), optimizer, list(held.bases.values())),
        RunServices(
            train_samples,
            eval_samples,
            _checkpointer(config, run, saving, remote, place, console),
            guard,
            mine,
            objective,
        ),
    )
    said: list[str] = []
    if remote is not None:
        check_own(run, remote)
        said = save_load.download_newest(remote, run.checkpoints, saving, place.local_rank, place.local_ranks)
    done = save_load.resume(loop, run.checkpoints, saving, console, said)
    if own:
        weights: list[tuple[int, float]] = []
        if frozen:
            begins = save_load.newest(run.checkpoints) is None
            _checked_by_rank_0(place, lambda: check_frozen(run.path, frozen, first=begins))
    else:
        weights = _fill_weights(loop, place, run, done, console)
    if objective is not None and objective.has_reference:
        add_reference(loop, run.path, done, console)
    if config.log.trace:
        folder, stage = run.path / "trace", mesh.coordinates["pipe"]
        used = functools.partial(used_bytes, device)
        loop.trace = TraceFile(folder, place.rank, stage, config.log.trace, done, clock, used, loop.memory_parts)
        if loop.trace.dropped:
            print(f"trace/rank{place.rank}.jsonl: dropped {loop.trace.dropped} damaged lines", flush=True)
    if place.rank == 0:
        run.write(config, plan)  # after the checkpoint was opened under them
        schema.write_json(run.env_file, _environment(place, device, attention, weights, user.model))
        loop.callbacks = [Recorder(run, config, done, console, device), *loop.callbacks]
    return loop, done


def _make_units(
    config: Config,
    plan: Plan,
    place: Place,
    layout: PipelineLayout,
    mesh: RankMesh,
    device: torch.device,
    own: OwnModel | None,
    samples: Samples,
    *,
    per_token: bool,
) -> tuple[RankUnits, str]:
    """The units of this rank, of a built-in model or of the user's own, and a fingerprint of the latter's frozen weights.

    `per_token`: the loss is computed from the head's cross entropies of single tokens.
    """
    grid = make_grid(mesh, plan)
    compute, reduce = types_of(plan)
    sizes: dict[str, Any] = {"device": device, "compute": compute, "reduce": reduce}
    if own is None:
        model = build_model(config.model)
        put_on_grid(model, grid, config, plan, compute, reduce)
        model.head.loss.per_token = per_token
        set_loss_chunks(model, config, plan, layout)
        model.to(compute)
        held = make_units(config, plan, mesh, grid, layout, model, **sizes)
        if plan.precision.matmul == "fp8":
            compute_in_fp8(held, device)
        materialize_buffers(model, device, compute)
        return held, ""
    if len(set(_everyone(own.fingerprint(), place))) > 1:
        raise ConfigError(
            "the weights of your model differ between ranks; call torch.manual_seed before it is built, or pass fit a "
            "function that builds it"
        )
    frozen = own.fingerprint(frozen=True) if own.frozen_parameters() else ""
    if place.rank == 0:  # it writes final/
        own.frozen.update(own.frozen_parameters())
    setting = grid_settings(grid, config, plan, compute, reduce, positions=_positions(samples))
    return make_own_units(own, plan, mesh, grid, layout, setting, **sizes), frozen


def _compiles(plan: Plan, place: Place, device: torch.device, console: IO[str] | None, *, own: bool) -> bool:
    """Whether units are compiled; prints why not if they should be."""
    precision, missing = plan.precision, plan.not_compiled
    wanted = precision.compile is True if own else precision.compiles(device.type)
    if device.type == "cuda" and precision.compile == "auto" and find_spec("triton") is None:
        missing = "Triton, which compiles for GPUs, is not installed"
    if wanted and not missing:
        set_compile_cache(os.environ)
        return True
    if wanted and place.rank == 0:
        print(f"units are not compiled: {missing}", file=console, flush=True)
    return False


def _checkpointer(
    config: Config,
    run: RunDir,
    group: dist.ProcessGroup | None,
    remote: RemoteFolder | None,
    place: Place,
    console: IO[str] | None,
) -> save_load.Checkpointer:
    return save_load.Checkpointer(
        run.checkpoints,
        keep=config.checkpoint.keep,
        keep_every=config.checkpoint.keep_every,
        background=config.checkpoint.mode == "async",
        group=group,
        remote=remote,
        prunes=place.local_rank == 0,
        local_ranks=place.local_ranks,
        console=console if place.rank == 0 else None,
    )


def _fill_weights(loop: Loop, place: Place, run: RunDir, done: int, console: IO[str] | None) -> list[tuple[int, float]]:
    """Read the weights of a built-in model that come from a Hugging Face folder; returns the bytes and seconds of every rank.

    These are the initial ones, and with LoRA, in every run, the frozen ones. The folder's other files are kept for final/.
    """
    config = loop.config
    begins = save_load.newest(run.checkpoints) is None
    if config.model.lora is not None:
        _checked_by_rank_0(place, lambda: check_base(run.path / "hf", config.model, first=begins))
    if config.model.init != "random" and (begins or config.model.lora is not None):
        found = read_weights(loop)
        read: list[tuple[int, float]] = _everyone((found.bytes, found.seconds), place)
        if place.rank == 0:
            keep_files(config, run.path / "hf", found.types)
            slowest = " on the slowest rank" if place.ranks > 1 else ""
            size, seconds = sum(b for b, _ in read), max(s for _, s in read)
            took = f"{schema.format_bytes(size)} read in {short_duration(seconds)}{slowest}"
            print(f"weights: {took}", file=console, flush=True)
        return read
    if place.rank == 0 and done == 0:
        keep_files(config, run.path / "hf")
    return []


def _checked_by_rank_0(place: Place, check: Callable[[], None]) -> None:
    """Rank 0 records, or compares, what the run began with; its refusal is raised on every rank."""
    problem = None
    if place.rank == 0:
        try:
            check()
        except FourfoldError as e:
            problem = str(e)
    problem = _everyone(problem, place)[0]
    if problem is not None:
        raise ConfigError(problem)


def _positions(samples: Samples) -> int:
    """Rows that a linear layer of the user's own model has for each sample, as far as its inputs show."""
    shape = samples.shapes.get("inputs", ()) if isinstance(samples, OwnSamples) else ()
    return max(1, math.prod(shape[:-1]))


def _choose_attention(
    config: Config,
    plan: Plan,
    place: Place,
    device: torch.device,
    compute: torch.dtype,
    run: RunDir,
    console: IO[str] | None,
) -> AttentionChoice | None:
    """Measure torch's attention kernels on a GPU and set their order; None on CPUs, and where none was measured."""
    m, col = config.model, plan.mesh.col
    if device.type != "cuda" or compute == torch.float64:
        return None
    seconds: dict[str, float] = {}
    if place.rank == 0:
        heads, kv_heads = -(-m.heads // col), max(1, -(-m.kv_heads // col))
        heads = -(-heads // kv_heads) * kv_heads
        try:
            seconds = attention_seconds(device, compute, heads, kv_heads, m.head_dim, m.seq_len, causal=m.causal)
        except RuntimeError as e:
            print(f"attention kernels were not measured: {' '.join(str(e).split())[:200]}", file=console, flush=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)  # the run's peak is that of training
    choice = choose_kernel(_everyone(seconds, place)[0], deterministic=config.train.deterministic)
    if choice is not None:
        use_kernel(choice)
        if place.rank == 0:
            print(choice, file=console, flush=True)
    return choice


def _environment(
    place: Place,
    device: torch.device,
    attention: AttentionChoice | None,
    weights: Sequence[tuple[int, float]],
    own: OwnModel | None,
) -> dict[str, Any]:
    """Hardware and software of the run, and what was measured at its start, for env.json."""
    found: dict[str, Any] = {
        "fourfold": fourfold.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "ranks": place.ranks,
        "local_ranks": place.local_ranks,
        "host_bytes": psutil.virtual_memory().total,
        "threads": torch.get_num_threads(),
        "job": place.job,
    }
    if attention is not None:
        found["attention"] = attention.to_dict()
    if weights:
        found["weights"] = [{"bytes": size, "seconds": round(seconds, 3)} for size, seconds in weights]
    if own is not None:
        found["own_layers"] = own.outline.parameters
        found["own_classes"] = {name: type(layer).__name__ for name, layer in own.layers.items()}
    return found


def _prepare(config: Config, place: Place, *, own: bool = False) -> tuple[torch.device, Limits]:
    """This rank's device and timeouts; also configures torch. `own`: for a model of the user's own."""
    device = choose_device(config.train.device, place)
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # reduces fragmentation; read at the first allocation
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if config.train.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # With warn_only torch warns, and attention's gradient is not deterministic. All operators of built-in models have a
        # deterministic kernel; those of the user's own may have none.
        torch.use_deterministic_algorithms(True, warn_only=own)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    step = config.train.timeout or (60.0 if device.type == "cpu" else 600.0)
    return device, Limits.of(step, config.train.start_timeout, config.checkpoint.timeout, config.train.eval_timeout)
