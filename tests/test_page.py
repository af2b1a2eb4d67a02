"""The timeline page: every span is in it, names cannot break out of it, and a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.program import Costs, build, simulate
from fourfold.view.page import PageSpan, Panel, Row, panel_of, write_page, write_perfetto
from tests.helpers import make_config, run_training


def data_of(page: Path) -> dict:
    text = page.read_text()
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)[1])  # type: ignore[index]


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
    assert max(end for _, _, end in panel["path"]) == pytest.approx(float(timeline.makespan))
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


def test_a_run_of_every_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(tmp_path / "run", train={"steps": 4}, log={"trace": 2})
    run_training(config, {"mesh": {"pipe": 2, "data": 2}}, 4)
    assert main(["view", str(tmp_path / "run"), "--html", "--perfetto"]) == 0
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "run" / n) for n in ("timeline.html", "timeline.trace.json")
    ]
    measured, simulated = data_of(tmp_path / "run" / "timeline.html")["panels"]
    assert [row["name"] for row in measured["rows"]] == [
        "rank 0 · pipe 0 data 0",
        "rank 1 · pipe 0 data 1",
        "rank 2 · pipe 1 data 0",
        "rank 3 · pipe 1 data 1",
    ]
    assert len(simulated["rows"]) == 2
    assert all(row["spans"] for row in measured["rows"])


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


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_a_browser_shows_it(tmp_path: Path) -> None:
    timeline = simulate(build("1f1b", 4, 8), Costs(message=0.1))
    write_page(tmp_path / "p.html", "a title", "a sentence", [panel_of("1f1b", timeline)], unit="")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [
        f"--user-data-dir={tmp_path / 'chromium'}",
        "--enable-logging=stderr",
        "--virtual-time-budget=2000",
        "--dump-dom",
    ]
    found = subprocess.run([*command, f"file://{tmp_path / 'p.html'}"], capture_output=True, text=True, timeout=100)
    assert '<h1 id="title">a title</h1>' in found.stdout
    assert "gradient" not in re.search(r'id="legend">(.*?)</div>', found.stdout)[1]  # type: ignore[index]
    assert "F forward" in found.stdout
    assert "CONSOLE" not in found.stderr
