"""The timeline page: every span is in it, names cannot break out of it, and a browser shows it."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli import main
from fourfold.cluster import Cluster
from fourfold.errors import PlanError
from fourfold.model.operators import ModelSpec
from fourfold.plan import Plan
from fourfold.planner.api import judge
from fourfold.planner.problem import PlanProblem
from fourfold.program import Costs, build, simulate
from fourfold.program.instructions import Stream
from fourfold.program.stages import lay_out_pipeline
from fourfold.view.page import PageSpan, Panel, Row, panel_of, write_page, write_perfetto
from fourfold.view.planned import planned_panel, planned_step
from tests.helpers import make_config, run_training

MODEL = {"family": "gpt", "layers": 4, "hidden": 64, "heads": 4, "seq_len": 32}


def data_of(page: Path) -> dict:
    """The data of a page, with spans as (start, end, kind, name, bytes)."""
    text = page.read_text()
    data = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    scale = data["length"] / data["ticks"]
    for panel in data["panels"]:
        for row in panel["rows"]:
            if isinstance(row["spans"], int):  # the row with the same spans
                row["spans"] = panel["rows"][row["spans"]]["spans"]
                continue
            five = [row["spans"][i : i + 5] for i in range(0, len(row["spans"]), 5)]
            row["spans"] = [
                (at * scale, (at + took) * scale, data["kinds"][kind], data["names"][name], size)
                for at, took, kind, name, size in five
            ]
    return data


def test_a_simulated_schedule(tmp_path: Path) -> None:
    timeline = simulate(build("wave", 4, 8, waves=2), Costs(message=0.1))
    write_page(tmp_path / "p.html", "wave", "a sentence", [panel_of("wave", timeline)], unit="")
    data = data_of(tmp_path / "p.html")
    (panel,) = data["panels"]
    assert len(panel["rows"]) == 4
    assert sum(len(row["spans"]) for row in panel["rows"]) == len(list(timeline.spans()))
    assert data["length"] == pytest.approx(float(timeline.makespan), rel=1e-6)
    assert [row["busy"] for row in panel["rows"]] == pytest.approx(
        [float(w / timeline.makespan) for w in timeline.work]
    )
    assert max(end for _, _, end in panel["path"]) == data["ticks"]
    starts = sorted(s[0] for row in panel["rows"] for s in row["spans"])
    assert starts == pytest.approx(sorted(float(s.start) for s in timeline.spans()), abs=1e-5)
    assert {s[2] for row in panel["rows"] for s in row["spans"]} == {"F", "B", "M"}


def check_arrows(path: Path) -> int:
    """Each arrow begins in the slice of a message and leads to a later slice of another rank; returns how many there are."""
    events = json.loads(path.read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    begun, ended = ({e["id"]: e for e in events if e["ph"] == kind} for kind in "sf")
    assert begun.keys() == ended.keys() == set(range(1, len(begun) + 1))
    for key, s in begun.items():
        f = ended[key]
        (sent,) = (e for e in slices if (e["pid"], e["tid"], e["ts"], e["cat"]) == (s["pid"], s["tid"], s["ts"], "M"))
        assert f["pid"] != s["pid"]
        assert f["ts"] >= sent["ts"] + sent["dur"] - 0.0021
        assert any(e["ts"] > f["ts"] for e in slices if (e["pid"], e["tid"]) == (f["pid"], 1))
    return len(begun)


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    bad = "</script><script>alert(1)</script><!--\u2028&"
    panel = Panel(bad, (Row(bad, (PageSpan(0.0, 1.0, "F", bad),)),))
    write_page(tmp_path / "p.html", bad, bad, [panel])
    assert "alert(1)</script>" not in (tmp_path / "p.html").read_text()
    assert data_of(tmp_path / "p.html")["panels"][0]["rows"][0]["spans"][0][3] == bad


def test_perfetto(tmp_path: Path) -> None:
    timeline = simulate(build("zb-v", 2, 4), Costs())
    write_perfetto(tmp_path / "t.json", [panel_of("plan", timeline)])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(list(timeline.spans()))
    assert {e["pid"] for e in spans} == {1, 2}
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(1e6 * float(timeline.makespan))


def test_slices_of_a_perfetto_track_do_not_overlap(tmp_path: Path) -> None:
    """Not by a nanosecond: Perfetto drops slices that overlap in part."""
    ends = [i / 7e4 for i in range(1, 2000)]
    row = Row("rank 0", tuple(PageSpan(a, b, "F", "0F0") for a, b in zip([0.0, *ends], ends, strict=False)))
    write_perfetto(tmp_path / "t.json", [Panel("measured", (row,))])
    spans = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    times = [(round(1000 * e["ts"]), round(1000 * e["ts"]) + round(1000 * e["dur"])) for e in spans]
    assert all(a[1] == b[0] for a, b in pairwise(times))


def test_a_run_of_every_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(tmp_path / "run", train={"steps": 4}, log={"trace": 2})
    run_training(config, {"mesh": {"pipe": 2, "data": 2}}, 4)
    assert main(["view", str(tmp_path / "run"), "--html", "--perfetto"]) == 0
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "run" / n) for n in ("timeline.html", "timeline.trace.json")
    ]
    simulated, measured = data_of(tmp_path / "run" / "timeline.html")["panels"]
    assert [row["name"] for row in measured["rows"]] == [
        "rank 0 · pipe 0 data 0",
        "rank 1 · pipe 0 data 1",
        "rank 2 · pipe 1 data 0",
        "rank 3 · pipe 1 data 1",
    ]
    assert [row["name"] for row in simulated["rows"]] == [row["name"] for row in measured["rows"]]
    for row in simulated["rows"]:
        assert {"F", "B", "M", "S", "U"} <= {s[2] for s in row["spans"]}
        assert all(s[4] > 0 for s in row["spans"] if s[2] in "MGS")
    for row in measured["rows"]:
        assert {"F", "B", "M", "S", "U"} <= {s[2] for s in row["spans"]}
        assert all(s[4] > 0 for s in row["spans"] if s[2] in "MGSX")
        assert {"bubble", "exposed", "data"} <= row["lost"].keys()
        forwards = {s[3].split(" ")[-1] for s in row["spans"] if s[2] == "F"}
        assert {"blocks.1.mlp" if "pipe 1" in row["name"] else "blocks.0.mlp"} <= forwards  # by unit
    assert measured["path"]
    assert measured["memory"]
    assert all(set(peak[2]) >= {"parameters", "optimizer state", "everything else"} for peak in measured["peaks"])
    events = json.loads((tmp_path / "run" / "timeline.trace.json").read_text())["traceEvents"]
    messages = [e for e in events if e.get("cat") == "M"]
    assert check_arrows(tmp_path / "run" / "timeline.trace.json") == len(messages) > 20
    lanes: dict[tuple[int, int], float] = {}
    for e in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):  # slices of a thread do not overlap
        assert e["ts"] >= lanes.get((e["pid"], e["tid"]), 0.0) - 0.01
        lanes[e["pid"], e["tid"]] = e["ts"] + e["dur"]
    assert main(["view", "--compare", *2 * [str(tmp_path / "run")], "--html"]) == 0
    a, b = data_of(tmp_path / "run" / "timeline-with-run.html")["panels"]
    assert a["rows"] == b["rows"] == measured["rows"]
    assert main(["view", "--compare", *2 * [str(tmp_path / "run")], "--json"]) == 0
    assert main(["view"]) == 2
    assert main(["view", str(tmp_path / "run")]) == 0
    assert "rank 3 · pipe 1 data 1" in capsys.readouterr().out


def planned(global_batch: int = 16, *, cluster: str = "rtx-4090") -> Plan:
    """A plan of two stages and two replicas, with the planner's prediction; its MLPs are gathered for each op."""
    units = [{"match": "*.mlp", "mode": "zero3"}, {"match": "*", "mode": "keep"}]
    plan = Plan.from_dict({"mesh": {"pipe": 2, "data": 2}, "batch": {"micro_batches": 4}, "unit": units})
    model = make_config(Path("run"), MODEL).model
    problem = PlanProblem(ModelSpec.from_config(model), Cluster.preset(cluster), global_batch, plan.precision)
    return judge(plan, problem)


def test_a_plan_has_the_collectives_of_every_rank(tmp_path: Path) -> None:
    plan = planned()
    plan.save(tmp_path / "plan.json")
    assert main(["view", str(tmp_path / "plan.json"), "--html", "--perfetto"]) == 0
    raw = re.search(r'type="application/json">(.*?)</script>', (tmp_path / "plan.html").read_text(), re.S)
    assert raw is not None
    assert [type(row["spans"]) for row in json.loads(raw[1])["panels"][0]["rows"]] == [list, int, list, int]
    (panel,) = data_of(tmp_path / "plan.html")["panels"]
    assert [row["name"] for row in panel["rows"]] == [
        "rank 0 · pipe 0 data 0",
        "rank 1 · pipe 0 data 1",
        "rank 2 · pipe 1 data 0",
        "rank 3 · pipe 1 data 1",
    ]
    assert plan.predicted is not None
    places = {name: k for stage in plan.predicted["units"] for name, k in stage}
    seconds = {name: plan.predicted["unit_seconds"][k] for name, k in places.items()}
    for pipe, row in enumerate(panel["rows"][::2]):
        spans, close = row["spans"], 1e-6 * plan.predicted["seconds"]
        lane = [s for s in spans if s[2] in "GS"]
        assert all(a[1] <= b[0] + close for a, b in pairwise(lane))  # one after another
        found: dict[tuple[str, str], list[Any]] = {}
        for s in lane:
            kind, unit, _, over = s[3].split(" ")
            found.setdefault((kind, unit), []).append(s)
            assert over == "data"
            assert s[1] - s[0] == pytest.approx(seconds[unit][kind], abs=close)
            assert s[4] == seconds[unit][f"{kind}_bytes"] > 0
        for name, _ in plan.predicted["units"][pipe]:
            # the last unit of a forward whose backward is next is still gathered
            least, most = (5, 8) if name.endswith(".mlp") else (1, 1)
            assert least <= len(found["gather", name]) <= most, name
            assert len(found["reduce", name]) == 1
            used = [s for s in spans if s[2] in "FB" and s[3].endswith(f" {name}")]
            assert used == [] or found["gather", name][0][1] <= used[0][0] + close
            assert used == [] or found["reduce", name][0][0] >= used[-1][1] - close
        update = [s for s in spans if s[2] == "U"]
        assert [s[1] - s[0] for s in update] == pytest.approx([plan.predicted["updates"][pipe]], abs=close)
        assert update[0][0] >= lane[-1][1] - close
        busy = sorted(s for s in spans if s[2] in "FBEU_")
        assert busy[0][0] == 0
        assert all(a[1] == pytest.approx(b[0], abs=close) for a, b in pairwise(busy))  # no gap: waits are spans
        assert any(s[2] == "E" and s[3].startswith("waiting: ") for s in busy)
    assert data_of(tmp_path / "plan.html")["length"] == pytest.approx(plan.predicted["seconds"], rel=0.1)
    times, held = panel["memory"][0][::2], panel["memory"][0][1::2]
    change = max(abs(b - a) for a, b in pairwise(held))
    assert 0 < change < 0.1 * (max(held) - min(held))  # within an op, not at once
    assert panel["peaks"][0][0] == times[held.index(max(held))]


def test_a_run_with_a_promise_shows_its_collectives(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", MODEL, train={"steps": 2, "global_batch": 16}, log={"trace": 1})
    run_training(config, planned().to_dict(), 4)
    assert main(["view", str(tmp_path / "run"), "--html"]) == 0
    promised, measured = data_of(tmp_path / "run" / "timeline.html")["panels"]
    assert (promised["name"], measured["name"]) == ("planned", "measured, step 2")
    assert [row["name"] for row in promised["rows"]] == [row["name"] for row in measured["rows"]]
    for row, real in zip(promised["rows"], measured["rows"], strict=True):
        assert {"F", "B", "M", "G", "S", "U"} <= {s[2] for s in row["spans"]} & {s[2] for s in real["spans"]}
        assert _collectives(row) == _collectives(real)  # the same number of each, with the same bytes, as training made


AGAIN = [
    {"match": "*.mlp", "mode": "zero2", "recompute": "full"},
    {"match": "*.attn", "recompute": "selective"},
    {"match": "*", "mode": "keep"},
]


def test_collectives_of_the_grid_are_not_drawn_as_compute(tmp_path: Path) -> None:
    """The planned rows divide a step as the planner's own sum does, and as measured rows do."""
    units = [{"match": "*.attn", "recompute": "full"}, {"match": "*"}]
    plan = Plan.from_dict({"mesh": {"data": 2, "col": 4}, "batch": {"micro_batches": 4}, "unit": units})
    config = make_config(Path("run"), MODEL | {"layers": 8, "heads": 16, "hidden": 2048, "ffn": 8192})
    problem = PlanProblem(ModelSpec.from_config(config.model), Cluster.preset("l40s"), 16, plan.precision)
    plan = judge(plan, problem)
    p = plan.predicted
    assert p is not None
    assert p["grid"] > 0.04 * p["seconds"]
    row = planned_panel(plan, planned_step(plan), "planned").rows[0]
    assert row.busy(1.0) == pytest.approx(p["compute"], rel=0.02)
    on_grid = sum(s.end - s.start for s in row.spans if s.name.endswith(": collectives of the grid"))
    assert on_grid == pytest.approx(p["grid"], rel=0.05)
    assert row.lost["recompute"] == pytest.approx(p["recompute"], rel=0.05)
    ops = sorted(s for s in row.spans if s.kind in "FBIWREU_")
    assert all(a.end == pytest.approx(b.start, abs=1e-9) for a, b in pairwise(ops))  # no gap, no overlap

    run_training(make_config(tmp_path / "run", train={"steps": 2}, log={"trace": 1}), {"mesh": {"col": 2}}, 2)
    assert main(["view", str(tmp_path / "run"), "--html"]) == 0
    planned, measured = data_of(tmp_path / "run" / "timeline.html")["panels"]
    assert planned["name"] == "planned, with measured times"
    for a, b in zip(planned["rows"], measured["rows"], strict=True):
        for row in (a, b):
            assert any(s[2] == "E" and ("collectives of the grid" in s[3] or "col" in s[3]) for s in row["spans"])
            assert 0 < row["lost"]["exposed"] < data_of(tmp_path / "run" / "timeline.html")["length"]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_recomputation_and_buckets_of_a_plan(schedule: str, tmp_path: Path) -> None:
    plan = Plan.from_dict(
        {
            "mesh": {"pipe": 2, "data": 2},
            "batch": {"micro_batches": 4},
            "pipeline": {"schedule": schedule},
            "unit": AGAIN,
            "memory": {"optimizer": "host"},
        }
    )
    config = make_config(Path("run"), MODEL | {"layers": 8, "hidden": 2048, "ffn": 8192})
    spec = ModelSpec.from_config(config.model)
    plan = judge(plan, PlanProblem(spec, Cluster.preset("h100-sxm"), 16, plan.precision))
    step, predicted = planned_step(plan), plan.predicted
    assert predicted is not None
    assert step.programs is not None
    panel = planned_panel(plan, step, "planned")
    write_page(tmp_path / "p.html", "p", "", [panel])
    for pipe, row in enumerate(panel.rows[::2]):
        seconds = {
            name: predicted["unit_seconds"][k]["recompute_seconds"]
            for stage, rank in enumerate(step.programs.placement)
            for name, k in predicted["units"][stage]
            if rank == pipe
        }
        again = {f"recompute {name}" for name, t in seconds.items() if t}
        assert {s.name for s in row.spans if s.kind == "R"} == again
        assert sum(name.endswith((".mlp", ".attn")) for name in again) == len(again) > 0
        found = sum(s.end - s.start for s in row.spans if s.kind == "R")
        assert found == pytest.approx(4 * sum(seconds.values()), rel=0.01)
        assert row.lost["recompute"] == pytest.approx(found)
        ops = sorted(s for s in row.spans if s.kind in "FBIWREU_")
        assert all(a.end == pytest.approx(b.start, abs=1e-9) for a, b in pairwise(ops))  # no gap, no overlap
        for r, following in pairwise(ops):
            assert r.kind != "R" or following.kind in "BI", following  # a unit's backward follows its recomputation
        update = [s for s in row.spans if s.kind == "U"]
        assert len(update) > 3
        assert all(s.name.startswith("update ") and s.name.endswith("on the host") for s in update)
        assert sum(s.end - s.start for s in update) == pytest.approx(predicted["updates"][pipe])


def test_recomputation_and_buckets_are_those_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same units are recomputed, as often, and the same buckets updated, in the same order, as planned."""
    for name in ("fourfold.train.streamed.BUCKET", "fourfold.view.planned.STREAM_BUCKET"):
        monkeypatch.setattr(name, 1 << 14)
    memory = {"optimizer": "auto", "device_state": "300KiB"}
    plan = Plan.from_dict({**planned().to_dict(), "unit": AGAIN, "memory": memory})
    model = make_config(Path("run"), MODEL).model
    plan = judge(plan, PlanProblem(ModelSpec.from_config(model), Cluster.preset("rtx-4090"), 16, plan.precision))
    config = make_config(tmp_path / "run", MODEL, train={"steps": 2, "global_batch": 16}, log={"trace": 1})
    run_training(config, plan.to_dict(), 4)
    assert main(["view", str(tmp_path / "run"), "--html"]) == 0
    promised, measured = data_of(tmp_path / "run" / "timeline.html")["panels"]
    for row, real in zip(promised["rows"], measured["rows"], strict=True):
        again, buckets = (
            [Counter(s[3] for s in r["spans"] if s[2] == "R") for r in (row, real)],
            [[s[3] for s in r["spans"] if s[2] == "U" and s[3] != "optimizer"] for r in (row, real)],
        )
        assert {name.split(".")[-1] for name in again[1]} == {"mlp", "attn"}
        assert again[0] == again[1]
        assert buckets[0] == buckets[1]
        assert {name.endswith("on the host") for name in buckets[0]} == {False, True}
        assert {"recompute", "update"} <= row["lost"].keys() & real["lost"].keys()


def _collectives(row: dict[str, Any]) -> Counter[tuple[str, str, int]]:
    """Gathers and reductions of units, planned or measured; a tied weight's copy is not in plans."""
    unit = re.compile(r"(?:gather|reduce|the parameters of|the sum of) (\S+?)(?:'s gradients)? over data.*")
    found = ((s[2], unit.fullmatch(s[3]), s[4]) for s in row["spans"] if s[2] in "GS")
    return Counter((kind, name[1], size) for kind, name, size in found if name is not None)


@pytest.mark.parametrize(
    ("schedule", "rule", "more"),
    [
        ("1f1b", {"match": "*.mlp", "mode": "zero3", "split": 2}, {}),
        ("zb-v", {"match": "*.mlp", "mode": "zero2", "recompute": "full", "split": 2}, {"optimizer": "host"}),
        ("wave", {"match": "*.attn", "mode": "replicate"}, {"prefetch": 2}),
        ("interleaved", {"match": "*.mlp", "mode": "zero2", "reduce": "micro-batch"}, {}),
        ("gpipe", {"match": "embed", "mode": "keep"}, {"prefetch": 0}),
    ],
)
@pytest.mark.parametrize(("data", "tie"), [(1, False), (2, False), (4, True)])
def test_what_is_drawn_is_what_training_runs(
    schedule: str, rule: dict[str, Any], more: dict[str, Any], data: int, tie: bool
) -> None:
    """The same instructions in the same order, but for the updates; about as long as the planner predicts."""
    config = make_config(Path("run"), MODEL | {"layers": 8, "ffn": 256, "vocab": 256, "tie": tie})
    units = [rule, {"match": "*", "mode": "zero3" if tie else "keep"}]
    plan = Plan.from_dict(
        {
            "mesh": {"pipe": 2, "data": data},
            "batch": {"micro_batches": 4},
            "pipeline": {"schedule": schedule},
            "unit": units,
            "memory": more,
        }
    )
    spec = ModelSpec.from_config(config.model)
    plan = judge(plan, PlanProblem(spec, Cluster.preset("h100-sxm"), 32, plan.precision))
    step, layout = planned_step(plan), lay_out_pipeline(config.model, plan, 32)
    assert step.programs is not None
    drawn, run = (
        [[i for i in p.instructions if not isinstance(i, Stream)] for p in programs.programs]
        for programs in (step.programs, layout.programs)
    )
    assert drawn == run
    assert plan.predicted is not None
    assert 0.8 < float(step.timeline.makespan) / plan.predicted["seconds"] < 1.05


def test_a_plan_of_an_older_version_is_drawn_without_collectives(tmp_path: Path) -> None:
    plan = planned()
    assert plan.predicted is not None
    old = {
        k: v
        for k, v in plan.predicted.items()
        if k not in ("units", "unit_seconds", "updates", "updates_on_device", "messages", "message_bytes")
    }
    assert planned_step(replace(plan, predicted=old)).sizes == {}
    before = [
        {k: v for k, v in row.items() if k not in ("recompute_seconds", "updated")}
        for row in plan.predicted["unit_seconds"]
    ]
    middle = {k: v for k, v in plan.predicted.items() if k != "updates_on_device"} | {"unit_seconds": before}
    assert planned_step(replace(plan, predicted=middle)).sizes != {}  # without recomputation and buckets
    broken = replace(plan, predicted=plan.predicted | {"unit_seconds": []})
    with pytest.raises(PlanError, match="plan again"):
        planned_step(broken)
    page = tmp_path / "p.html"
    write_page(page, "old", "", [planned_panel(plan, planned_step(replace(plan, predicted=old)), "planned")])
    (panel,) = data_of(page)["panels"]
    assert len(panel["rows"]) == 4
    assert {s[2] for row in panel["rows"] for s in row["spans"]} <= {"F", "B", "M", "_"}


def test_plans_and_schedules_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.toml").write_text('[mesh]\npipe = 4\n[pipeline]\nschedule = "zb-v"\n')
    assert main(["view", str(tmp_path / "plan.toml"), "--html"]) == 0
    assert len(data_of(tmp_path / "plan.html")["panels"][0]["rows"]) == 4
    assert main(["view", str(tmp_path / "plan.toml")]) == 0
    assert "makespan" in capsys.readouterr().out
    assert main(["view", str(tmp_path / "plan.toml"), "--step", "3"]) == 2
    assert main(["view", str(tmp_path / "plan.toml"), "--html", "--json"]) == 2
    assert "use one or the other" in capsys.readouterr().err
    assert main(["simulate", "wave", "--html", str(tmp_path / "none" / "p.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["simulate", "wave", "--ranks", "2", "--html", str(tmp_path / "s.html")]) == 0
    assert len(data_of(tmp_path / "s.html")["panels"][0]["rows"]) == 2
    assert main(["simulate", "wave", "--html", str(tmp_path / "nowhere" / "s.html")]) == 2
