"""`fourfold verify`: the cases for a number of ranks, a passing report, and one in which a case fails."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.plan import AXES, SCHEDULES, Plan
from fourfold.train import verify
from fourfold.train.verify import cases, tiny_config


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_cases_cover_every_kind_of_plan(ranks: int, tmp_path: Path) -> None:
    found = cases(ranks)
    assert len({case.name for case in found}) == len(found)
    for case in found:
        plan = Plan.from_dict(case.plan)
        assert case.impossible or plan.mesh.ranks == ranks, case.name
    possible = [case for case in found if not case.impossible]
    config = tiny_config(tmp_path, "run", ranks, "cpu", "auto")
    refused = [case.name for case in possible if not _runs(Plan.from_dict(case.plan), config, ranks)]
    assert all("flow summa" in name or "message-driven" in name for name in refused), refused
    if ranks == 8:
        plans = [Plan.from_dict(case.plan) for case in possible]
        pairs = {tuple(a for a in AXES if getattr(p.mesh, a) > 1) for p in plans}
        assert {(a, b) for i, a in enumerate(AXES) for b in AXES[i + 1 :]} | {(a,) for a in AXES} <= pairs
        assert {p.pipeline.schedule for p in plans} == set(SCHEDULES)
        assert {p.pipeline.executor for p in plans} == {"ordered", "message-driven"}
        rules = [rule for p in plans for rule in p.unit]
        assert {rule.mode for rule in rules} == {"replicate", "zero2", "zero3", "keep"}
        assert {rule.recompute for rule in rules} == {"none", "selective", "full", "per-slice"}
        assert {p.memory.optimizer for p in plans} == {"device", "host"}
        assert {p.tensor.flow for p in plans} == {"auto", "summa", "os", "ls", "ws"}


def _runs(plan: Plan, config: verify.Config, ranks: int) -> bool:
    try:
        plan.check(config, ranks)
    except verify.FourfoldError:
        return False
    return True


def test_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Two cases pass, one is wrong, one dies; the rest runs, and the failed plans are there to run again."""
    some = {"data alone", "stop and resume", "zero3, reduced per step", "1f1b, ordered", "row · col"}
    chosen = [case for case in cases(2) if case.name in some]
    monkeypatch.setattr(verify, "cases", lambda ranks, quick: chosen)
    compare = verify._compared

    def broken(place, store, config, case, reference):  # type: ignore[no-untyped-def]
        if case.name.startswith("zero3"):
            reference = [(loss * (1 + 1e-8), norm) for loss, norm in reference]
        if case.name.startswith("1f1b") and place.rank == 1:
            raise RuntimeError("a defect")
        return compare(place, store, config, case, reference)

    monkeypatch.setattr(verify, "_compared", broken)
    monkeypatch.chdir(tmp_path)
    assert main(["verify", "--nproc", "2", "-o", "report.json"]) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    results = {case["name"]: case["result"] for case in report["cases"]}
    assert results == {
        "data alone": "passed",
        "row · col": "impossible",
        "1f1b, ordered": "failed",
        "zero3, reduced per step": "failed",
        "stop and resume": "passed",
        "a killed rank is named, and the run resumes": "passed",
    }
    said = " ".join(capfd.readouterr().out.split())
    assert "3 passed, 2 failed, 1 not possible here" in said
    failed = {case["name"]: case for case in report["cases"] if case["result"] == "failed"}
    assert "RuntimeError: a defect" in failed["1f1b, ordered"]["detail"]
    assert "relative difference 1.0e-08" in failed["zero3, reduced per step"]["detail"]
    again = failed["zero3, reduced per step"]["again"].split()
    assert Plan.load(again[again.index("--plan") + 1]).unit[0].mode == "zero3"
    assert {row["what"] for row in report["measured"]} == {"matmul, fp32", "all-reduce, 8 MiB", "broadcast, 8 MiB"}


def test_a_report_under_srun_survives_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 reports although rank 1 was killed: what passed, what failed with its command, and what was not run."""
    some = {"data alone", "col alone", "1f1b, ordered"}
    chosen = [case for case in cases(2) if case.name in some]
    monkeypatch.setattr(verify, "cases", lambda ranks, quick: chosen)
    compare = verify._compared

    def broken(place, store, config, case, reference):  # type: ignore[no-untyped-def]
        if case.name == "col alone":
            os.environ["FOURFOLD_FAULTS"] = "kill rank=1 step=2"
        return compare(place, store, config, case, reference)

    monkeypatch.setattr(verify, "_compared", broken)
    monkeypatch.chdir(tmp_path)
    job = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2"}
    for name, value in (job | {"SLURM_STEP_NODELIST": "127.0.0.1"}).items():
        monkeypatch.setenv(name, value)

    def task(rank: int, *flags: str) -> None:
        os.environ |= {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        os._exit(main(["verify", *flags]))

    def codes(*flags: str) -> list[int | None]:
        tasks = [multiprocessing.get_context("fork").Process(target=task, args=(r, *flags)) for r in range(2)]
        for process in tasks:
            process.start()
        for process in tasks:
            process.join(100)
        return [process.exitcode for process in tasks]

    assert codes("-o", "nowhere/report.json") == [2, 2]  # before anything is trained
    assert "there is no folder nowhere" in capfd.readouterr().err
    assert codes("-o", "report.json") == [1, -signal.SIGKILL]
    report = {case["name"]: case for case in json.loads((tmp_path / "report.json").read_text())["cases"]}
    results = {name: case["result"] for name, case in report.items()}
    assert {name: results[name] for name in some} == {
        "data alone": "passed",
        "col alone": "failed",
        "1f1b, ordered": "not run",
    }
    assert [name for name, case in report.items() if "again" in case] == ["col alone"]
    assert "1 passed, 1 failed, 1 not run" in " ".join(capfd.readouterr().out.split())
