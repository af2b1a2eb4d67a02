"""`fourfold simulate`: targets, tables, JSON, drawings, errors; and the example."""

import io
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from fourfold.commands.simulate import SimulateArgs, simulate_command
from fourfold.errors import FourfoldError, PlanError, ScheduleError
from fourfold.plan import Mesh, Pipeline, Plan
from fourfold.program import Costs, build, lower, simulate, validate
from fourfold.program.from_plan import schedule_of_plan
from fourfold.view.timeline import draw

ROOT = Path(__file__).parents[2]


def printed(**fields):
    out = io.StringIO()
    assert simulate_command(SimulateArgs(**fields), out) == 0
    return out.getvalue()


def test_a_schedule_by_name():
    text = printed(target="wave", ranks=4, micro_batches=4, waves=2)
    assert "wave waves=2" in text
    assert "makespan 15, bubble 20.0%" in text
    assert text.count("\n") >= 4 + 5


def test_json_has_the_figures():
    data = json.loads(printed(target="zb-v", ranks=4, micro_batches=8, json=True))
    assert data["schedule"] == "zb-v"
    assert data["makespan"] == 25.5
    assert data["lower_bound"] == 25.5
    assert data["peak_activations"] == [4.0] * 4
    assert len(data["spans"]) == 4 * 2 * 8 * 3


def test_compare_puts_the_fastest_first():
    rows = json.loads(printed(target="1f1b", ranks=4, micro_batches=8, message=0.05, compare=True, json=True))
    names = [row["schedule"] for row in rows]
    assert {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "wave", "wave waves=2"} <= set(names)
    assert names[0].startswith("synthesized")
    assert [row["makespan"] for row in rows] == sorted(row["makespan"] for row in rows)
    assert "spans" not in rows[0]
    text = printed(target="1f1b", ranks=2, micro_batches=4, compare=True)
    assert "peak memory" in text
    assert "synthesized" in text


def test_compare_stays_within_a_cap():
    rows = json.loads(printed(target="1f1b", ranks=4, micro_batches=8, memory_cap=4, compare=True, json=True))
    assert all(max(row["peak_activations"]) <= 4 for row in rows)
    assert "gpipe" not in [row["schedule"] for row in rows]


def test_synthesized_within_a_cap():
    data = json.loads(printed(target="synthesized", ranks=4, micro_batches=4, memory_cap=4, json=True))
    assert data["makespan"] == 12.75


def test_files(tmp_path):
    schedule = build("zb-v", 2, 4)
    for name in ("s.csv", "s.json"):
        schedule.save(tmp_path / name)
        assert json.loads(printed(target=str(tmp_path / name), json=True))["makespan"] == 12.5
    for name in ("p.txt", "p.json"):
        lower(schedule).save(tmp_path / name)
        assert json.loads(printed(target=str(tmp_path / name), json=True))["makespan"] == 12.5
    plan = Plan(mesh=Mesh(pipe=2), pipeline=Pipeline(schedule="zb-v"))
    for name in ("plan.toml", "plan.json"):
        plan.save(tmp_path / name)
        assert json.loads(printed(target=str(tmp_path / name), json=True))["makespan"] == 12.5


def test_plans_name_options_files_and_synthesis(tmp_path):
    mesh = Mesh(pipe=4)

    def of(**fields):
        return schedule_of_plan(Plan(mesh=mesh, pipeline=Pipeline(**fields)), 8)

    assert of(schedule="wave", waves=2) == build("wave", 4, 8, waves=2)
    assert of(schedule="interleaved", stages_per_rank=3) == build("interleaved", 4, 8, stages_per_rank=3)
    assert of(schedule="1f1b", slack=1) == build("1f1b", 4, 8, slack=1)
    assert of(schedule="wave", split_backward=True).split
    assert not of(schedule="zb-v", split_backward=False).split
    found = of(schedule="synthesized")
    validate(found, memory_cap=4)
    assert simulate(found).makespan == 24.75
    few = schedule_of_plan(Plan(mesh=mesh, pipeline=Pipeline(schedule="synthesized")), 8, layers=4)
    assert few.stages == 4
    build("zb-h1", 4, 8).save(tmp_path / "mine.csv")
    assert of(schedule=str(tmp_path / "mine.csv")) == build("zb-h1", 4, 8)
    build("zb-h1", 4, 6).save(tmp_path / "other.csv")
    with pytest.raises(ScheduleError, match="is for 4 ranks and 6 micro-batches"):
        of(schedule=str(tmp_path / "other.csv"))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"target": "wawe"}, "did you mean 'wave'"),
        ({"target": "missing.csv"}, "cannot be read"),
        ({"target": "missing.toml"}, "no such file"),
        ({"target": "1f1b", "ranks": 0}, "must be at least 1"),
        ({"target": "1f1b", "forward": -1.0}, r"costs\.forward"),
        ({"target": "synthesized", "memory_cap": 0.5}, "below one micro-batch"),
        ({"target": "wave", "waves": 0}, "waves"),
        ({"target": "wave", "waves": 100_000}, "waves = 100000: 200000 stages on a rank are too many; use at most 32"),
        ({"target": "interleaved", "stages_per_rank": 1000}, "1000 stages on a rank are too many; use at most 64"),
        (
            {"target": "1f1b", "micro_batches": 10**9},
            "4 ranks · 1 stages on each · 1000000000 micro-batches make 8000000000 forwards and backwards; schedules of up to "
            "1000000 are built: use at most 125000 micro-batches",
        ),
        ({"target": "gpipe", "ranks": 10**9}, "1000000000 ranks are too many; use at most 10000"),
        ({"target": "wave", "waves": 32, "ranks": 10_000, "micro_batches": 1}, "are built: use fewer ranks"),
        ({"target": "zb-h1", "micro_batches": 10**9}, "use at most 125000 micro-batches"),
        ({"target": "wave", "waves": 32, "micro_batches": 10**6}, "use at most 1953 micro-batches"),
        ({"target": "zb-v", "ranks": 10**5}, "zb-v on 100000 ranks is too large to be built; use at most 353"),
        ({"target": "synthesized", "micro_batches": 10**6}, "use at most 125000 micro-batches"),
    ],
)
def test_errors(fields, says):
    with pytest.raises(FourfoldError, match=says) as error:
        simulate_command(SimulateArgs(**fields), io.StringIO())
    assert isinstance(error.value, ScheduleError | PlanError)
    assert error.value.exit_code == 2


def test_programs_are_not_compared(tmp_path):
    lower(build("1f1b", 2, 2)).save(tmp_path / "p.txt")
    with pytest.raises(ScheduleError, match="--compare needs a schedule"):
        simulate_command(SimulateArgs(target=str(tmp_path / "p.txt"), compare=True), io.StringIO())


def test_the_drawing():
    timeline = simulate(build("1f1b", 2, 2))
    assert [line.plain for line in draw(timeline, 18)] == ["F0F1····B0──··B1──", "··F0B0──F1B1──····"]
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=80)
    console.print(draw(timeline, 36)[0])
    assert "\x1b[" in console.file.getvalue()


def test_many_ops_on_few_characters():
    lines = draw(simulate(build("1f1b", 4, 64), Costs(message=0.5)), 20)
    assert all(len(line) == 20 for line in lines)
    steady = draw(simulate(build("1f1b", 64, 128)), 190)[63].plain.strip("·")  # F and B in turn, 2.9 units a character
    assert set(steady[:-1]) == {"▒"}
    assert "▒ " in printed(target="1f1b", ranks=8, micro_batches=64)
    assert "▒" not in printed(target="1f1b", ranks=4, micro_batches=4)


def test_the_example_runs():
    out = subprocess.run(
        [sys.executable, "examples/own_schedule.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "two-by-two" in out
    assert "makespan" in out
    own = runpy.run_path(str(ROOT / "examples/own_schedule.py"))["two_by_two"]
    for ranks, micro_batches in ((1, 1), (4, 8), (3, 7), (5, 2)):
        validate(own(ranks, micro_batches))


def test_the_documentation_is_right():
    """Its drawings are drawn so, and its code runs."""
    text = (ROOT / "docs/schedules.md").read_text(encoding="utf-8")
    for name, micro_batches, width in (("1f1b", 4, 63), ("wave", 4, 72), ("zb-v", 8, 102)):
        for rank, line in enumerate(draw(simulate(build(name, 4, micro_batches)), width)):
            assert f"{rank} {line.plain}" in text
    for code in text.split("```python\n")[1:]:
        exec(code.split("```")[0], {})
