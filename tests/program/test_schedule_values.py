"""Ops and schedules as values: text, JSON, CSV, equality, bad input."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_strategies import schedules

from fourfold.program import Op, Schedule, ScheduleError, build, validate


@given(st.integers(0, 999), st.sampled_from("FBIW"), st.integers(0, 999))
def test_op_prints_and_parses(stage, kind, micro_batch):
    op = Op(stage, kind, micro_batch)
    assert str(op) == f"{stage}{kind}{micro_batch}"
    assert Op.parse(str(op)) == op


@pytest.mark.parametrize("text", ["", "F0", "3G0", "3F", "3F0x", "-1F0", "3 F 0"])
def test_bad_ops_are_refused_with_an_example(text):
    with pytest.raises(ScheduleError, match="as in 3F0"):
        Op.parse(text)


def test_the_public_interface_of_the_design():
    schedule = build("wave", ranks=4, micro_batches=8, waves=2)
    assert schedule.order[0][0] == Op(0, "F", 0)
    assert schedule.placement[:5] == (0, 1, 2, 3, 3)
    assert (schedule.ranks, schedule.stages, schedule.micro_batches) == (4, 16, 8)
    assert schedule.stages_of[0] == (0, 7, 8, 15)


def test_schedules_are_hashable_values():
    a, b = build("1f1b", 4, 8), build("1f1b", 4, 8)
    assert a is not b
    assert a == b
    assert len({a, b, build("1f1b", 4, 9)}) == 2
    assert pickle.loads(pickle.dumps(a)) == a
    with pytest.raises(AttributeError):
        a.micro_batches = 3


@given(schedules())
def test_json_and_csv_round_trips(schedule):
    assert Schedule.from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule
    assert Schedule.from_csv(schedule.to_csv()) == schedule


@pytest.mark.parametrize("ending", ["json", "csv"])
def test_save_and_load(tmp_path, ending):
    schedule = build("zb-v", 4, 8)
    schedule.save(tmp_path / f"zbv.{ending}")
    assert Schedule.load(tmp_path / f"zbv.{ending}") == schedule


def test_torch_notation_with_bubbles_overlaps_and_communication():
    schedule = Schedule.from_csv(
        "0F0,,0SEND_F0,0F1,(0B0;0B1)OVERLAP_F_B,0REDUCE_GRAD\n1UNSHARD,1RECV_F0,1F0,1B0,1F1,1B1\n"
    )
    assert schedule.order[0] == tuple(map(Op.parse, ["0F0", "0F1", "0B0", "0B1"]))
    validate(schedule)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0B0\n0F1,0B1\n", "stage 0 is on rank 0 already"),
        ("0F0,2F0\n", "stage 1 has no op"),
        ("0F0,0X0\n", "row 0, cell 1"),
        ("", "stage 0 has no op"),
    ],
)
def test_bad_csv(text, says):
    with pytest.raises(ScheduleError, match=says):
        Schedule.from_csv(text)


def test_bad_files(tmp_path):
    with pytest.raises(ScheduleError, match=r"\.json or \.csv"):
        build("gpipe", 2, 2).save(tmp_path / "x.txt")
    with pytest.raises(ScheduleError, match="cannot be read"):
        Schedule.load(tmp_path / "missing.csv")
    with pytest.raises(ScheduleError, match="did you mean 'order'"):
        Schedule.from_dict({"orders": []})
    with pytest.raises(ScheduleError, match="missing"):
        Schedule.from_dict({"order": []})
    with pytest.raises(ScheduleError, match="not a schedule"):
        Schedule.from_dict({"order": 3, "placement": [], "micro_batches": 1})


def test_the_package_needs_no_torch():
    import subprocess
    import sys

    code = "import sys, fourfold.program, fourfold.commands.simulate, fourfold.view.timeline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
