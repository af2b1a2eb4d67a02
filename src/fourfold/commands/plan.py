"""`fourfold plan`: the fastest plan that fits, explained."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import tyro

from fourfold import schema
from fourfold.cluster import ASSUMED, Cluster
from fourfold.config import Config, LoraConfig, ModelConfig
from fourfold.errors import ConfigError, PlanError
from fourfold.model.hf import hf_file
from fourfold.model.operators import ModelSpec
from fourfold.plan import Plan
from fourfold.planner.api import (
    default_batch,
    default_precision,
    judge,
    named_precision,
    plan_problem,
    uniform_plans,
)
from fourfold.planner.problem import Constraints, PlanProblem, parse_fixes
from fourfold.view.text import printable

if TYPE_CHECKING:
    from fourfold.view.plan_export import ExportedPlan

NO_LORA = LoraConfig()

__all__ = ["PlanArgs", "plan_command"]


@dataclass(frozen=True)
class PlanArgs:
    """Find the fastest plan that fits: `fourfold plan MODEL --cluster h100-sxm --nodes 8`. No GPU needed."""

    model: Annotated[str, tyro.conf.Positional] = ""
    """A config file of ours (.toml), or a Hugging Face config.json or the folder that holds it."""
    cluster: str = ""
    """A preset (a100-80g, h100-sxm, h200, b200, rtx-4090, local, …) or a cluster file."""
    nodes: int | None = None
    """Nodes of the cluster (local: ranks)."""
    devices: int | None = None
    """Devices in a node, if not the preset's: two RTX 4090 are --cluster rtx-4090 --devices 2."""
    global_batch: int | None = None
    """Sequences of a step; default: the config's, else about four million tokens."""
    seq_len: int | None = None
    """Tokens of a sequence; default: the config's, else at most 4096."""
    precision: Literal["fp64", "fp32", "bf16", "fp8"] | None = None
    """Default: bf16 on GPUs, fp32 on CPUs. fp8: bf16 with matmuls of blocks in fp8."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Type of AdamW's moments."""
    top: int = 5
    """How many plans to show."""
    fix: tuple[str, ...] = ()
    """Constrain the search: col=4, micro_batch_size=2, mode=zero3, recompute=full, optimizer=device, …"""
    schedule: str | None = None
    """Only this schedule: 1f1b, interleaved, wave, zb-h1, zb-v, gpipe, synthesized."""
    max_ranks: int | None = None
    """Use at most this many of the cluster's devices; a node's others keep their share of its memory."""
    what_if: tuple[str, ...] = ()
    """Also plan (or judge) with the cluster changed: memory=40GiB nodes=16 bandwidth=x2 flops=x1.5."""
    engine: Literal["fourfold", "torchtitan", "megatron", "nemo"] = "fourfold"
    """The system that will run the plan; its kernels, host time and memory are predicted."""
    lora: LoraConfig = NO_LORA
    """Plan for LoRA, with the fields of the config section: --lora.rank 16."""
    judge: str | None = None
    """Do not search: predict this plan file, and report whether it fits."""
    out: Annotated[str | None, tyro.conf.arg(aliases=["-o"])] = None
    """Write the best plan to this file (.json, .toml)."""
    html: str | None = None
    """Write a report of the plan to this file: one page that opens offline."""
    export: Literal["torchtitan", "megatron"] | None = None
    """Also print the plan as options of another system, and what it cannot express."""
    serve: bool = False
    """Serve the planner as a page on this machine's loopback interface, instead of planning here."""
    port: int = 0
    """Port of --serve; 0: one that is free."""
    json: bool = False
    """Print the plan as JSON."""
    debug: bool = False
    """Show tracebacks of errors."""


def plan_command(args: PlanArgs, file: IO[str] | None = None) -> int:
    """Run the command; returns 0, or 2 where neither the plan fits nor that of a changed cluster."""
    _check(args)
    if args.serve:
        from fourfold.site.server import serve

        return serve(args.port)
    cluster = Cluster.find(args.cluster, args.nodes, args.devices)
    if ASSUMED in cluster.source:
        print(printable(f"{args.cluster}: {ASSUMED}{cluster.source.partition(ASSUMED)[2]}"), file=sys.stderr)
    problem = read_problem(args, cluster)
    wanted = parse_fixes(list(args.fix), args.schedule, args.max_ranks)
    given = Plan.load(args.judge) if args.judge else None
    if args.judge and cluster.device.kind == "cuda" and "precision" not in schema.read(args.judge):
        where = printable(args.judge)
        print(f'{where}: without [precision] a plan computes in fp32; write compute = "bf16" for bf16', file=sys.stderr)
    changed = problem.with_cluster(cluster.what_if(_changes(args.what_if))) if args.what_if else None

    def answer(question: PlanProblem) -> Plan | str:
        """The plan, or why there is none."""
        try:
            return judge(given, question) if given is not None else _planned(question, wanted, args)
        except PlanError as e:
            if changed is None and not args.json:
                raise
            return str(e)

    plan = answer(problem)
    other = answer(changed) if changed is not None else None
    if args.html and isinstance(plan, Plan):
        plan = _write_report(plan, other, problem, wanted, args)
    exported = _write(plan, problem, args) if isinstance(plan, Plan) and _fits(plan) else None
    status = 0 if _fits(plan) or _fits(other) else 2
    if args.json:
        data = _json(plan)
        if other is not None or exported is not None:  # the plan is one part of the answer
            data = {"plan": data}
        if other is not None:
            data["what_if"] = _json(other)
        if exported is not None:
            data["export"] = {"options": exported.options, "files": exported.files, "lost": exported.lost}
            data["export"]["predicted"] = exported.predicted
        print(json.dumps(data, indent=2), file=file)
        return status
    from fourfold.view.plan import show_plan, show_what_if

    if isinstance(plan, Plan):
        show_plan(plan, file, args.top)
    else:
        print(plan, file=file)
    if other is not None:
        show_what_if(plan, other, args.what_if, file)
    if exported is not None:
        print(f"\n{exported}", file=file)
        if exported.files and not args.out:
            print("# its CSV file is written with -o: `-o plan.json` also writes plan.csv", file=file)
    if not _fits(plan) and (args.out or args.export):
        print("\nnot written or exported: the plan does not fit", file=file)
    elif args.out:
        files = [args.out, *(exported.files if exported is not None else ())]
        print(f"\nwritten to {printable(' and '.join(files))}", file=file)
    if args.html:
        print(
            f"\nreport: {printable(args.html)}" if isinstance(plan, Plan) else "\nno report: there is no plan",
            file=file,
        )
    return status


def _check(args: PlanArgs) -> None:
    """Refuse options that would do nothing, and output files that cannot be written."""
    if args.serve:
        given = [f.name for f in fields(args) if f.name not in ("serve", "port", "debug")]
        idle = [n for n in given if getattr(args, n) != getattr(PlanArgs, n)]
        if idle:
            raise PlanError(f"{_flags(idle)}: not with --serve, whose page has fields for everything")
        return
    if not args.model or not args.cluster:
        missing = "the model" if not args.model else "--cluster"
        raise PlanError(
            f"{missing} is missing: fourfold plan MODEL --cluster NAME, for example configs/llama-8b.toml --cluster h100-sxm; "
            "or fourfold plan --serve, for a page with fields"
        )
    if args.port:
        raise PlanError(f"--port {args.port}: it is the port of --serve, which is missing")
    if args.html:
        schema.check_writable(args.html, "a report", PlanError, (".html", ".htm"))
    for name, value in (("top", args.top), ("nodes", args.nodes), ("devices", args.devices)):
        if value is not None and value < 1:
            raise PlanError(f"--{name} {value} must be at least 1")
    if args.out:
        schema.check_writable(args.out, "a plan", PlanError)
        _check_unused(Path(args.out))
    if args.judge:
        searching = ("fix", "schedule", "max_ranks", "top", "precision", "moments")
        idle = [n for n in searching if getattr(args, n) != getattr(PlanArgs, n)]
        if idle:
            raise PlanError(f"{_flags(idle)}: not with --judge, which predicts the given plan and does not search")


def _flags(names: Sequence[str]) -> str:
    return ", ".join("MODEL" if n == "model" else f"--{n.replace('_', '-')}" for n in names)


def _check_unused(out: Path) -> None:
    """Refuse to overwrite a file that is not a plan, such as the model's."""
    if not out.is_file():
        return
    try:
        plan = "mesh" in schema.read(out)
    except ConfigError:
        plan = False
    if not plan:
        raise PlanError(f"-o {out}: this file exists and is no plan; choose another name, or remove it first")


def _fits(plan: Plan | str | None) -> bool:
    return isinstance(plan, Plan) and not (plan.predicted or {}).get("misfit")


def _json(plan: Plan | str) -> dict[str, Any]:
    return plan.to_dict() if isinstance(plan, Plan) else {"error": plan}


def _write(plan: Plan, problem: PlanProblem, args: PlanArgs) -> ExportedPlan | None:
    """The plan's file, and its export with the files that it names."""
    if args.out:
        plan.save(args.out)
    if not args.export:
        return None
    from fourfold.view.plan_export import export

    exported = export(plan, problem, args.export, str(Path(args.out).with_suffix(".csv")) if args.out else "")
    if args.out:
        exported.write()
    return exported


def _write_report(
    plan: Plan, other: Plan | str | None, problem: PlanProblem, wanted: Constraints, args: PlanArgs
) -> Plan:
    """Write the page, which has all alternatives; returns the plan with the requested number of them."""
    from fourfold.view.plan import show_what_if
    from fourfold.view.plan_report import COMPARED, report_data, write_report

    assert args.html is not None
    tried = () if args.judge else plan.alternatives or ()
    plan = replace(plan, alternatives=(plan.alternatives or ())[: args.top])
    notes = []
    if other is not None:
        text = io.StringIO()
        show_what_if(plan, other, args.what_if, text)
        notes = [" ".join(text.getvalue().split())]
    uniform = uniform_plans(problem, COMPARED, wanted)
    data = report_data(plan, problem, tried=tried, uniform=uniform, command=_words(args), notes=notes)
    write_report(Path(args.html), data)
    return plan


def _words(args: PlanArgs) -> list[str]:
    """The command line that asks the same question."""
    words = ["fourfold", "plan", args.model]
    for f in fields(args):
        value = getattr(args, f.name)
        if isinstance(value, LoraConfig):
            words += [w for n, v in schema.dump(value).items() if v for w in (f"--lora.{n}", *_each(v))]
        elif f.name not in ("model", "html", "json", "debug") and value != getattr(PlanArgs, f.name):
            words += [f"--{f.name.replace('_', '-')}", *_each(value)]
    return words


def _each(value: Any) -> list[str]:
    return [str(v) for v in (value if isinstance(value, tuple | list) else (value,))]


def read_problem(args: PlanArgs, cluster: Cluster) -> PlanProblem:
    """The planner's problem of these arguments."""
    spec, batch, needs_norm = read_model(args.model, args.seq_len, args.lora)
    precision = named_precision(args.precision) if args.precision else default_precision(cluster)
    size = args.global_batch if args.global_batch is not None else batch
    if size is not None and size < 1:
        raise PlanError(f"--global-batch {size} must be at least 1")
    batch = size or default_batch(spec, cluster, args.max_ranks)
    problem = PlanProblem(spec, cluster, batch, precision, args.moments, needs_norm=needs_norm)
    return problem.with_engine(args.engine)


def read_model(path: str, seq_len: int | None, lora: LoraConfig | None = None) -> tuple[ModelSpec, int | None, bool]:
    """The model of a config of ours or of a Hugging Face file, the batch where the config has one, and whether updates need the
    gradient norm.

    `lora`: from flags; it overrides the config's.
    """
    if seq_len is not None and seq_len < 1:
        raise ConfigError(f"--seq-len {seq_len} must be at least 1")
    where = Path(path)
    if hf_file(where):
        spec = _folder_spec(path, seq_len or 0)
        if lora is not None and lora.rank and spec.config is not None:
            spec = ModelSpec.from_config(replace(spec.config, lora=lora), spec.name)
        return spec, None, True
    config = Config.load(where / "config.json" if where.is_dir() else where)  # a folder of a run
    config = config if lora is None or not lora.rank else replace(config, lora=lora)
    model: ModelConfig = config.model if seq_len is None else replace(config.model, seq_len=seq_len)
    return ModelSpec.from_config(model, where.stem), config.train.global_batch, config.needs_norm


def _folder_spec(path: str, seq_len: int) -> ModelSpec:
    """The spec of a Hugging Face model; without dropout, with a line that says so, if it has dropouts that are not supported."""
    try:
        return ModelSpec.from_hf(path, seq_len=seq_len)
    except ConfigError as e:
        try:
            spec = ModelSpec.from_hf(path, seq_len=seq_len, dropout=0.0)
        except ConfigError:
            raise e from None
        print(printable(f"{e}; planned with 0 (a run: --model.dropout 0)"), file=sys.stderr)
        return spec


def _planned(problem: PlanProblem, wanted: Constraints, args: PlanArgs) -> Plan:
    narrow, every = args.precision is None, bool(args.html)
    if args.json or not sys.stderr.isatty():
        return plan_problem(problem, wanted, args.top, narrow=narrow, every=every)
    from fourfold.view.plan import progress_bar

    with progress_bar() as bar:
        return plan_problem(problem, wanted, args.top, bar, narrow=narrow, every=every)


def _changes(texts: Sequence[str]) -> dict[str, str]:
    """`memory=40GiB` and the like by name."""
    changes: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise PlanError(f"--what-if {text}: write for example memory=40GiB or bandwidth=x2")
        if changes.setdefault(name, value) != value:
            raise PlanError(f"--what-if {name}={changes[name]} and {text} contradict each other; give one")
    return changes
