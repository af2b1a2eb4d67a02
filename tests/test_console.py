"""Console output of a run: log lines, and the live view of a terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

from fourfold.commands.demo import demo_config, demo_plan
from fourfold.view.console import Progress, braille


class Screen(io.StringIO):
    """A terminal that can be asked what it shows."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What is on the screen after everything that was written: cursor up, erase below, erase the line."""
        rows, at = [""], 0
        for part in re.findall(r"\x1b\[[\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", self.getvalue()):
            if part == "\n":
                at += 1
                rows += [""] * (at + 1 - len(rows))
            elif part.endswith("A") and part.startswith("\x1b"):
                at -= int(part[2:-1])
            elif part == "\x1b[J":
                rows[at:] = [""]
            elif part == "\x1b[2K":
                rows[at] = ""
            elif part != "\r" and not part.startswith("\x1b"):
                rows[at] += part
        return rows


def metrics(step: int, **more: Any) -> dict[str, Any]:
    found = {"step": step, "loss": 5.0 / step, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_second": 13600.0}
    return found | {"seconds": 0.5, "mfu": 0.12, "peak_bytes": 3 << 20} | more


def test_a_terminal_has_a_live_view(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TERM": "xterm", "COLUMNS": "80", "LINES": "30"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("fourfold.view.console.time.monotonic", iter(range(1, 1000)).__next__)
    screen = Screen()
    progress = Progress(100, 10, screen, "process")
    for step in range(1, 26):
        progress.step(metrics(step, **({"exposed_seconds": 0.012, "bubble": 0.19} if step == 11 else {})))
    progress.note("a note")
    lines = screen.lines()
    assert [line[:12] for line in lines[:4]] == ["step   1/100", "step  10/100", "step  20/100", "a note"]
    view = lines[4:]
    assert view[0].startswith("step 25/100 ━")
    assert view[0].endswith("25%  38 s left")
    assert sum("\u2801" <= c <= "\u28ff" for line in view[1:5] for c in line) >= 20  # the curve
    assert "loss 0.2000  tok/s 13.6 k  mfu 12.0%  process 3.00 MiB" in view[5]
    assert "exposed communication 12 ms" in view[6]
    assert "bubble 19%" in view[6]
    assert all(len(line) < 80 for line in lines)
    assert (
        lines[1] == "step  10/100  loss 0.5000  grad 1.000  lr 1.00e-03  13.6 k tok/s  mfu 12.0%"
    )  # the rest is below
    for step in range(26, 101):
        progress.step(metrics(step))
    progress.note("saved")
    *_, last, note, empty = screen.lines()  # the view is gone when all steps are done
    assert (last[:12], note, empty) == ("step 100/100", "saved", "")


@pytest.mark.parametrize("setting", [{"TERM": "dumb"}, {"TERM": "xterm", "LINES": "10"}])
def test_small_and_dumb_terminals(monkeypatch: pytest.MonkeyPatch, setting: dict[str, str]) -> None:
    for name, value in {"COLUMNS": "120", **setting}.items():
        monkeypatch.setenv(name, value)
    screen = Screen()
    progress = Progress(100, 10, screen)
    for step in range(1, 12):
        progress.step(metrics(step))
    assert len([line for line in screen.lines() if line.startswith("step")]) <= 3
    assert "━" not in screen.getvalue()


def test_no_terminal_has_log_lines_alone() -> None:
    out = io.StringIO()
    progress = Progress(30, 10, out)
    for step in range(1, 31):
        progress.step(metrics(step, exposed_seconds=0.1))
    lines = out.getvalue().splitlines()
    assert [line[:10] for line in lines] == ["step  1/30", "step 10/30", "step 20/30", "step 30/30"]
    assert lines[0] == (
        "step  1/30  loss 5.0000  grad 1.000  lr 1.00e-03  13.6 k tok/s  mfu 12.0%  mem 3.00 MiB  14 s left"
    )


def test_a_skipped_step_is_always_said() -> None:
    file = io.StringIO()
    progress = Progress(100, 10, file)
    for step in range(2, 10):
        progress.step(metrics(step, **({"grad_norm": float("nan")} if step == 4 else {})))
    (line,) = file.getvalue().splitlines()
    assert line.startswith("step   4/100")
    assert "not finite: skipped" in line


def test_the_demo_needs_three_axes() -> None:
    """What the demo says: no single axis fits, and the plan uses stages, sharding and columns; the README shows these lines."""
    plan, lines = demo_plan(demo_config(160, "unused").resolve(), 8)
    assert min(plan.mesh.pipe, plan.mesh.data, plan.mesh.col) > 1
    assert {rule.mode for rule in plan.unit} - {"replicate"}
    assert "fits" not in dict(lines)["one axis"]
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    for name, text in lines:
        assert f"{name:<9}  {text}" in readme


def test_braille() -> None:
    assert braille([0.0, 1.0], 1, 1) == ["⡈"]
    rows = braille([float(i) for i in range(1000)], 20, 4)
    dots = [[c != "\u2800" for c in row] for row in rows]
    assert [row.index(True) for row in dots] == pytest.approx([15, 10, 5, 0], abs=1)  # it rises
