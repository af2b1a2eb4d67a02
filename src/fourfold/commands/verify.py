"""`fourfold verify`: prove this machine, or the job this process belongs to, with a tiny model and every kind of plan."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import os
import platform
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import fourfold
from fourfold import files
from fourfold.errors import ConfigError, FourfoldError, Interrupted, RankFailure
from fourfold.schema import check_writable

if TYPE_CHECKING:
    import torch.distributed as dist

    from fourfold.config import Config
    from fourfold.launch.place import Place
    from fourfold.plan import Plan
    from fourfold.program.stages import PipelineLayout
    from fourfold.train.rundir import RunDir
    from fourfold.train.verify import Case

__all__ = ["VerifyArgs", "verify"]

FAULTS = "FOURFOLD_FAULTS"
FAILED = "fourfold-verify-failed"
"""Folder for the plans of failed cases."""
JOINING = 120.0
"""Seconds to wait for the other ranks of the job."""


@dataclass(frozen=True)
class VerifyArgs:
    """Verify this machine or job: train a tiny model with every kind of plan, compare with one rank; exit code 0: all passed."""

    nproc: int | None = None
    """Ranks to start on this machine; default: one per GPU, else 4. Ignored under torchrun or srun."""
    quick: bool = False
    """One case per feature instead of every kind of plan."""
    out: Annotated[str | None, tyro.conf.arg(aliases=["-o"])] = None
    """Also write the report to this file (.json)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if there is a GPU."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """As train.backend; nccl also where ranks share a GPU."""
    folder: str = ""
    """Where the tiny runs are written; ranks on several machines need one that all of them see. Default: a temporary folder."""
    debug: bool = False
    """Show tracebacks of errors."""


@dataclass
class _Report:
    """The results, as printed and written."""

    about: dict[str, Any]
    cases: list[dict[str, Any]] = field(default_factory=list)
    measured: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failed(self) -> int:
        """Cases that failed, or that were not run since the job ended before."""
        return sum(c["result"] in ("failed", "not run") for c in self.cases)

    def to_dict(self) -> dict[str, Any]:
        return {**self.about, "seconds": self.seconds, "cases": self.cases, "measured": self.measured}


def verify(args: VerifyArgs) -> int:
    if args.nproc is not None and args.nproc < 1:
        raise ConfigError(f"--nproc {args.nproc}: at least one rank is needed")
    gpus = _gpus(args.device)
    if args.device == "cuda" and not gpus:
        raise ConfigError("--device cuda: torch sees no GPU here; use auto or cpu")
    begin = time.monotonic()
    if "RANK" in os.environ or "SLURM_STEP_ID" in os.environ:
        report = _as_a_rank(args)
    else:
        if args.out:
            check_writable(args.out, "a report", ConfigError)
        report = _on_this_machine(args, args.nproc or gpus or 4)
    if report is None:  # another rank prints
        return 0
    report.seconds = time.monotonic() - begin
    _show(report)
    if args.out:
        Path(args.out).write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    return 1 if report.failed else 0


# ---- ranks of this machine ----


def _on_this_machine(args: VerifyArgs, ranks: int) -> _Report:
    import fourfold.train.worker  # noqa: F401 (once, and not in every rank)
    from fourfold.launch.local import launch_local
    from fourfold.train.verify import cases

    gc.freeze()  # the ranks share what was imported, and need not look through it
    console = Console(highlight=False)
    todo = cases(ranks, args.quick)
    console.print(f"{len(todo)} cases with {_ranks(ranks)} …", style="dim")
    report = _Report(_about(ranks))
    with tempfile.TemporaryDirectory(prefix="fourfold-verify-", dir=args.folder or None) as path:
        folder, results = Path(path), Path(path) / "results.jsonl"
        _start(lambda p, s, c: _reference(args, folder, ranks), 1, folder, "the reference on one rank")
        left = [case for case in todo if not case.impossible]
        while left:  # if ranks fail, the case fails; new ranks continue with the next
            problem = ""
            try:
                job = functools.partial(_job, args, list(left), folder, results)
                stopping = "stopping: there will be no report (once more: kill)"
                if not launch_local(job, ranks, folder, stopping):
                    raise Interrupted("stopped; there is no report")
            except RankFailure as e:
                if e.after_stop:
                    raise Interrupted("stopped; there is no report") from None
                problem = str(e)
            done = _results(results)
            left = [case for case in left if case.name not in done]
            if problem and left:
                begun = _begun(results)
                at = begun if begun in {case.name for case in left} else left[0].name
                with results.open("a") as f:
                    f.write(json.dumps({"name": at, "result": "failed", "detail": problem, "seconds": 0.0}) + "\n")
                left = [case for case in left if case.name != at]
        report.cases = _collected(todo, _results(results), folder, args, ranks)
        report.cases.append(_fault(args, folder, ranks))
        with_rates = folder / "measured.json"
        if with_rates.exists():
            report.measured = json.loads(with_rates.read_text())
    return report


def _start(job: Any, ranks: int, folder: Path, what: str) -> None:
    from fourfold.launch.local import launch_local

    try:
        if not launch_local(job, ranks, folder, stopping="stopping"):
            raise Interrupted("stopped; there is no report")
    except RankFailure as e:
        raise RankFailure(f"{what} failed: {e}") from None


def _reference(args: VerifyArgs, folder: Path, ranks: int) -> None:
    from fourfold.train.verify import serial

    (folder / "reference.json").write_text(json.dumps(serial(folder, ranks, args.device)))


def _job(
    args: VerifyArgs,
    todo: list[Case],
    folder: Path,
    results: Path,
    place: Place,
    store: dist.Store | None,
    console: IO[str] | None = None,
) -> None:
    """One rank: run the cases, each in separate process groups, then measure."""
    from fourfold.launch.place import choose_device, join_group, leave
    from fourfold.train.verify import measure_rates, run_cases

    device = choose_device(args.device, place)
    reference = json.loads((folder / "reference.json").read_text())
    run_cases(place, store, todo, reference, folder, args.device, args.backend, results)
    if place.ranks > 1:
        join_group(place, store, device, JOINING, args.backend)
    rates = measure_rates(place, device)
    if place.rank == 0:
        (folder / "measured.json").write_text(json.dumps(_with_preset(rates, place)))
    if place.ranks > 1:
        leave()


def _fault(args: VerifyArgs, folder: Path, ranks: int) -> dict[str, Any]:
    """Kill a rank in the third step: it is named, and the run resumes to the same bits."""
    from fourfold.launch.local import launch_local
    from fourfold.plan import Plan
    from fourfold.train.rundir import RunDir, read_metrics
    from fourfold.train.verify import PRECISION, tiny_config

    name, victim, begin = "a killed rank is named, and the run resumes", ranks - 1, time.monotonic()
    plan = Plan.from_dict({"mesh": {"data": ranks}, "precision": PRECISION})
    losses, report = {}, ""
    before = os.environ.pop(FAULTS, None)
    try:
        for kind in ("whole", "killed"):
            config = tiny_config(folder, kind, ranks, args.device, args.backend, 4)
            config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, every=1))
            layout, run = plan.check(config, ranks), RunDir.create(config.train.run_dir, config, plan)
            if kind == "killed":
                os.environ[FAULTS] = f"kill rank={victim} step=3"
            for _ in range(1 if kind == "whole" else 2):
                try:
                    launch_local(_training(config, plan, layout, run), ranks, run.logs)
                except RankFailure as e:
                    report = str(e)
            run.unlock()
            losses[kind] = [m["loss"] for m in read_metrics(run) if "loss" in m]
    finally:
        os.environ.pop(FAULTS, None)
        if before is not None:
            os.environ[FAULTS] = before
    problem = ""
    if f"rank {victim} was killed by SIGKILL" not in report:
        problem = f"the report was '{report.splitlines()[0] if report else 'none'}'"
    elif losses["killed"] != losses["whole"]:
        problem = f"losses {losses['killed']} instead of {losses['whole']}"
    result = "failed" if problem else "passed"
    return {"name": name, "result": result, "detail": problem, "seconds": time.monotonic() - begin}


def _training(config: Config, plan: Plan, layout: PipelineLayout, run: RunDir) -> Any:
    from fourfold.train.worker import work

    def job(place: Place, store: dist.Store, console: IO[str] | None) -> None:
        with open(os.devnull, "w") as nowhere:
            work(place, store, config, plan, layout, run, console=nowhere)

    return job


# ---- one rank of a job ----


def _as_a_rank(args: VerifyArgs) -> _Report | None:
    """Started by torchrun or srun: every rank runs all cases; rank 0 reports."""
    from fourfold.launch.place import agree, current_place, open_store
    from fourfold.train.verify import cases

    place, store = current_place(), None
    if place.ranks > place.local_ranks and not args.folder:
        raise ConfigError("ranks on several machines: give --folder, a directory that all of them see")
    if place.ranks > 1:
        store = agree(open_store(os.environ, place, JOINING), place.rank, place.ranks, JOINING)
    todo = cases(place.ranks, args.quick)
    folder = _common_folder(args, place, store)
    results, problem = folder / "results.jsonl", ""
    if place.rank == 0:
        said = f"{len(todo)} cases with {_ranks(place.ranks)}; results so far: {results}"
        Console(highlight=False, soft_wrap=True).print(said, style="dim", markup=False)
        _reference(args, folder, place.ranks)
        if store is not None:
            store.set("reference", "written")
    elif store is not None:
        store.wait(["reference"])
    try:
        _job(args, [case for case in todo if not case.impossible], folder, results, place, store)
    except Exception as e:
        if place.rank:
            raise
        problem = str(e) if isinstance(e, FourfoldError) else f"{type(e).__name__}: {e}"
        with results.open("a") as f:
            line = {"name": _begun(results), "result": "failed", "detail": problem, "seconds": 0.0}
            f.write(json.dumps(line) + "\n")
    if place.rank:
        return None
    report = _Report(_about(place.ranks))
    report.cases = _collected(todo, _results(results), folder, args, place.ranks)
    why = "a killed rank would end the job: run `fourfold verify --nproc N` on one machine"
    report.cases.append({"name": "a killed rank is named, and the run resumes", "result": "impossible", "detail": why})
    with contextlib.suppress(FileNotFoundError):  # the job ended before
        report.measured = json.loads((folder / "measured.json").read_text())
    shutil.rmtree(folder, ignore_errors=True)
    return report


def _common_folder(args: VerifyArgs, place: Place, store: dist.Store | None) -> Path:
    """A new folder, made by rank 0; all ranks raise if it cannot be made, or if the report cannot be written."""
    answer = {"folder": "", "problem": ""}
    if place.rank == 0:
        try:
            if args.out:
                check_writable(args.out, "a report", ConfigError)
            answer["folder"] = tempfile.mkdtemp(prefix="fourfold-verify-", dir=args.folder or None)
        except (OSError, ConfigError) as e:
            where = f"--folder {args.folder or tempfile.gettempdir()}: "
            answer["problem"] = f"{where}{files.why(e)}" if isinstance(e, OSError) else str(e)
        if store is not None:
            store.set("folder", json.dumps(answer))
    elif store is not None:
        answer = json.loads(store.get("folder"))
    if store is not None:
        store.add("told", 1)
        patience = time.monotonic() + 10.0
        while place.rank == 0 and store.add("told", 0) < place.ranks and time.monotonic() < patience:
            time.sleep(0.02)  # the store may end with this rank
    if answer["problem"]:
        raise ConfigError(answer["problem"])
    folder = Path(answer["folder"])
    if not folder.is_dir():
        raise ConfigError(
            f"rank {place.rank} does not see {folder}, which rank 0 has made; --folder must be a directory that all "
            "machines share"
        )
    return folder


# ---- results ----


def _lines(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def _results(results: Path) -> dict[str, dict[str, Any]]:
    """By name, the cases that have a result."""
    return {line["name"]: line for line in _lines(results) if "result" in line}


def _begun(results: Path) -> str:
    """The case that was begun last."""
    return next((line["name"] for line in reversed(_lines(results)) if "begun" in line), "")


def _collected(
    todo: list[Case], results: dict[str, dict[str, Any]], folder: Path, args: VerifyArgs, ranks: int
) -> list[dict[str, Any]]:
    """One entry per case; a failed one with the command that runs it again."""
    found = []
    for number, case in enumerate(todo):
        entry = results.get(case.name, {"name": case.name, "result": "not run", "detail": "the job had ended"})
        if case.impossible:
            entry = {"name": case.name, "result": "impossible", "detail": case.impossible}
        if entry["result"] == "failed":
            try:
                entry = entry | {"again": _kept(number, case, folder, args, ranks)}
            except OSError as e:  # the report must not be lost with them
                entry = entry | {"detail": f"{entry['detail']}\nits plan cannot be written to {FAILED}: {files.why(e)}"}
        found.append(entry | {"plan": case.plan})
    return found


def _kept(number: int, case: Case, folder: Path, args: VerifyArgs, ranks: int) -> str:
    """Write config and plan of a failed case; returns the command that runs them."""
    from fourfold.train.verify import tiny_config

    path = Path(FAILED)
    path.mkdir(exist_ok=True)
    config = tiny_config(folder, "again", ranks, args.device, args.backend).to_dict()
    config["data"]["source"] = "stdlib"
    config["train"]["run_dir"] = str(path / f"run-{number}")
    (path / f"case-{number}.json").write_text(json.dumps(config, indent=1))
    (path / f"case-{number}.plan.json").write_text(json.dumps(case.plan, indent=1))
    return f"fourfold train {path}/case-{number}.json --plan {path}/case-{number}.plan.json --nproc {ranks}"


def _with_preset(rates: dict[str, float], place: Place) -> list[dict[str, Any]]:
    """Measured rates, next to those that a plan for this machine assumes."""
    import torch

    from fourfold.cluster import Cluster

    cluster, kind = Cluster.local(place.ranks), "fp32"
    if torch.cuda.is_available():
        from fourfold.launch.place import gpu_cluster

        cluster, kind = gpu_cluster(place.ranks, place.local_ranks), "bf16"
    link = cluster.level[-1].bandwidth if cluster.level else 0.0
    preset = {"matmul": cluster.device.matrix.get(kind, 0.0), "all_reduce": link, "broadcast": link}
    names = {"matmul": (f"matmul, {kind}", "FLOP/s"), "all_reduce": ("all-reduce, 8 MiB", "B/s")}
    names["broadcast"] = ("broadcast, 8 MiB", "B/s")
    return [
        {"what": names[k][0], "unit": names[k][1], "found": rate, "assumed": preset[k], "preset": cluster.name}
        for k, rate in rates.items()
    ]


def _about(ranks: int) -> dict[str, Any]:
    import torch

    from fourfold.launch.place import first_gpu

    gpu = first_gpu()[0]  # CUDA is not started in this process, which forks ranks
    return {
        "fourfold": fourfold.__version__,
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": gpu or f"CPU, {os.cpu_count()} cores",
        "ranks": ranks,
    }


def _gpus(device: str) -> int:
    """GPUs that torch can use, counted without starting CUDA."""
    if device == "cpu" or not (Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()):
        return 0
    import torch

    return torch.cuda.device_count()


def _ranks(count: int) -> str:
    return f"{count} {'ranks' if count > 1 else 'rank'}"


def _rate(value: float, unit: str) -> str:
    prefix, size = ("T", 1e12) if value >= 1e12 else ("G", 1e9)
    return f"{value / size:.3g} {prefix}{unit}"


def _show(report: _Report) -> None:
    from fourfold.view.console import short_duration

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for title in ("case", "result", ""):
        table.add_column(title, overflow="fold")
    colours = {"passed": "green", "failed": "bold red", "impossible": "dim", "not run": "red"}
    words = {"impossible": "not possible here"}
    for case in report.cases:
        result = case["result"]
        detail = short_duration(case["seconds"]) if result == "passed" else case["detail"]
        table.add_row(escape(case["name"]), f"[{colours[result]}]{words.get(result, result)}[/]", escape(detail))
    console.print(table)
    for case in report.cases:
        if "again" in case:
            console.print(f"\nto run '{escape(case['name'])}' again:\n  {escape(case['again'])}", soft_wrap=True)
    if report.measured:
        rates = Table(box=None, pad_edge=False)
        for title in ("measured", "found", "assumed", "found / assumed"):
            rates.add_column(title)
        for row in report.measured:
            assumed = row["assumed"]
            ratio = f"{row['found'] / assumed:.2f}" if assumed else ""
            found, usual = (_rate(x, row["unit"]) for x in (row["found"], assumed))
            rates.add_row(row["what"], found, f"{usual} ({row['preset']})", ratio)
        console.print()
        console.print(rates)
    about = report.about
    count = {r: sum(c["result"] == r for c in report.cases) for r in colours}
    unrun = f"{count['not run']} not run, " if count["not run"] else ""
    console.print(
        f"\n{count['passed']} passed, {count['failed']} failed, {unrun}{count['impossible']} not possible here, "
        f"{report.seconds:.0f} s; {_ranks(about['ranks'])}, {about['device']}, torch {about['torch']}, "
        f"fourfold {about['fourfold']}",
        soft_wrap=True,
    )
