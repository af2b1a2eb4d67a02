"""The timeline page: every span is in it, names cannot break out of it, and a browser shows it."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.program import Costs, build, simulate
from fourfold.view.page import PageSpan, Panel, Row, panel_of, write_page, write_perfetto
from tests.helpers import make_config, run_training


def data_of(page: Path) -> dict:
    """The data of a page, with spans as (start, end, kind, name, bytes)."""
    text = page.read_text()
    data = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    scale = data["length"] / data["ticks"]
    for panel in data["panels"]:
        for row in panel["rows"]:
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
    assert len(simulated["rows"]) == 2
    assert {"F", "B", "M", "S"} <= {s[2] for row in simulated["rows"] for s in row["spans"]}
    for row in measured["rows"]:
        assert {"F", "B", "M", "S", "U"} <= {s[2] for s in row["spans"]}
        assert all(s[4] > 0 for s in row["spans"] if s[2] in "MGSX")
        assert {"bubble", "exposed", "data"} <= row["lost"].keys()
    assert measured["path"]
    assert measured["memory"]
    assert all(set(peak[2]) >= {"parameters", "optimizer state", "everything else"} for peak in measured["peaks"])
    events = json.loads((tmp_path / "run" / "timeline.trace.json").read_text())["traceEvents"]
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


def test_plans_and_schedules_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.toml").write_text('[mesh]\npipe = 4\n[pipeline]\nschedule = "zb-v"\n')
    assert main(["view", str(tmp_path / "plan.toml"), "--html"]) == 0
    assert len(data_of(tmp_path / "plan.html")["panels"][0]["rows"]) == 4
    assert main(["view", str(tmp_path / "plan.toml")]) == 0
    assert "makespan" in capsys.readouterr().out
    assert main(["view", str(tmp_path / "plan.toml"), "--step", "3"]) == 2
    assert main(["simulate", "wave", "--ranks", "2", "--html", str(tmp_path / "s.html")]) == 0
    assert len(data_of(tmp_path / "s.html")["panels"][0]["rows"]) == 2
    assert main(["simulate", "wave", "--html", str(tmp_path / "nowhere" / "s.html")]) == 2
