"""The simulator: exact times by hand, programs against schedules, memory curves, critical paths, bounds."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from program_strategies import costs, few, programs, schedules

from fourfold.program import (
    Costs,
    Op,
    ProgramBucket,
    ProgramUnit,
    Recv,
    Schedule,
    ScheduleError,
    Send,
    build,
    lower,
    simulate,
)
from fourfold.program.engine import OpExtras, Problem, run


def spans(timeline, lane="compute"):
    return {(s.row, str(s.what)): (s.start, s.end) for s in timeline.spans() if s.lane == lane}


def test_two_ranks_by_hand():
    timeline = simulate(build("1f1b", 2, 2), Costs(forward=2, input_grad=3, weight_grad=1, message=1))
    assert spans(timeline) == {
        (0, "0F0"): (0, 2),
        (0, "0F1"): (2, 4),
        (1, "1F0"): (3, 5),
        (1, "1B0"): (5, 9),
        (0, "0B0"): (10, 14),
        (1, "1F1"): (9, 11),
        (1, "1B1"): (11, 15),
        (0, "0B1"): (16, 20),
    }
    assert spans(timeline, "message")[0, "SEND 0 activation 1 to 1"] == (4, 5)
    assert timeline.makespan == 20
    assert timeline.work == (12, 12)
    assert timeline.idle == (8, 8)
    assert timeline.bubble == Fraction(16, 40)
    assert timeline.peak_activations == (2, 1)
    assert timeline.peaks[0] == (2, 2)
    assert timeline.memory(1) == [(0, 0), (3, 1), (9, 0), (9, 1), (15, 0)]
    path = ["0F0", "SEND 0 activation 0 to 1", "1F0", "1B0", "1F1", "1B1", "SEND 1 gradient 1 to 0", "0B1"]
    assert [str(s.what) for s in timeline.critical_path] == path


def test_results_are_exact_unless_floats_come_in():
    exact = simulate(build("wave", 4, 4), Costs(message=Fraction(1, 3)))
    assert isinstance(exact.makespan, int | Fraction)
    rough = simulate(build("wave", 4, 4), Costs(message=1 / 3))
    assert isinstance(rough.makespan, float)
    assert rough.makespan == pytest.approx(float(exact.makespan), rel=1e-12)


def test_a_cost_per_stage_and_a_whole_backward():
    schedule = build("gpipe", 2, 1)
    timeline = simulate(schedule, Costs(forward=(1, 5), input_grad=(1, 1), weight_grad=(2, 2), backward=(4, 7)))
    assert timeline.makespan == 1 + 5 + 7 + 4
    with_split = Schedule.of([[Op(s, k, 0) for k in "FIW"] for s in range(2)])
    assert simulate(with_split, Costs(forward=(1, 5), input_grad=1, weight_grad=2)).makespan == 1 + 5 + 1 + 1 + 2


def test_shared_links_queue():
    """Rank 1 sends three activations faster than the link carries them."""
    schedule = build("gpipe", 2, 3)
    ends = {}
    for link in ("private", "edge", "rank"):
        timeline = simulate(schedule, Costs(message=4, link=link))
        ends[link] = [end for (_, what), (_, end) in sorted(spans(timeline, "message").items()) if "activation" in what]
        path = timeline.critical_path
        assert path[0].start == 0
        assert all(a.end == b.start for a, b in pairwise(path))
    assert ends["private"] == [5, 6, 7]
    assert ends["edge"] == ends["rank"] == [5, 9, 13]


def test_one_port_for_all_a_rank_sends():
    schedule = build("zb-v", 4, 8)
    times = [simulate(schedule, Costs(message=2, link=link)).makespan for link in ("private", "edge", "rank")]
    assert times[0] < times[1] < times[2]


def test_messages_by_table():
    far = ((0, 1, 9), (1, 0, 1), (9, 1, 0))
    assert simulate(build("gpipe", 3, 1), Costs(message=far)).makespan == 3 * 3 + 4
    looped = build("interleaved", 3, 3, stages_per_rank=2)
    assert simulate(looped, Costs(message=far)).makespan > simulate(looped, Costs(message=1)).makespan


def test_a_fixed_cost_per_instruction():
    plain, taxed = (simulate(build("1f1b", 1, 4), Costs(instruction=x)) for x in (0, Fraction(1, 50)))
    assert taxed.makespan == plain.makespan + 8 * Fraction(1, 50)


def test_memory_between_i_and_w():
    schedule = Schedule.of([[Op(0, k, 0) for k in "FIW"]])
    timeline = simulate(schedule, Costs(activation=10, weight_grad_activation=4))
    assert timeline.memory(0) == [(0, 0), (0, 10), (2, 4), (3, 0)]


def test_deadlock_is_an_error():
    locked = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(locked)
    with pytest.raises(ScheduleError, match="is missing"):
        simulate(Schedule.from_csv("0F0,0B0\n1F0\n"))


@few
@given(schedules(), costs())
def test_nothing_beats_the_lower_bound(schedule, prices):
    timeline = simulate(schedule, prices)
    assert timeline.makespan >= timeline.lower_bound
    assert timeline.gap >= 0
    assert max(timeline.idle) < timeline.makespan
    path = timeline.critical_path
    assert path[0].start == 0
    assert path[-1].end == timeline.makespan
    assert all(a.end == b.start for a, b in pairwise(path))


@few
@given(schedules(), costs())
def test_the_critical_path_of_what_was_measured(schedule, prices):
    """Every op starts some time after what it waited for: its path is the same, with gaps."""
    exact = simulate(schedule, Costs(**{**vars(prices), "message": 0}))
    late = replace(
        exact,
        starts=tuple(tuple(2.0 * t for t in row) for row in exact.starts),
        ends=tuple(
            tuple(1.5 * e + 0.5 * s for s, e in zip(*row, strict=True))
            for row in zip(exact.starts, exact.ends, strict=True)
        ),
    )
    path = late.critical_path
    assert path[0].start == 0
    assert path[-1].end == late.makespan
    assert all(a.end <= b.start for a, b in pairwise(path))
    assert late.to_dict()["critical_path"][-1][2] == str(path[-1].what)


@few
@given(schedules(), costs())
def test_programs_take_the_time_of_their_schedule(schedule, prices):
    """Receives are posted in time, whatever messages cost, also when links are shared."""
    prices = Costs(**{**vars(prices), "instruction": 0})
    a, b = simulate(schedule, prices), simulate(lower(schedule, costs=prices), prices)
    assert a.makespan == b.makespan
    assert a.peak_activations == b.peak_activations
    assert spans(a) == spans(b)


@few
@given(programs(), costs())
def test_timelines_of_programs(lowered, prices):
    timeline = simulate(lowered, prices)
    assert timeline.makespan >= timeline.lower_bound
    path = timeline.critical_path
    assert path[-1].end == timeline.makespan
    assert all(a.end == b.start for a, b in pairwise(path))
    for row in range(timeline.rows):
        assert timeline.memory(row)[-1][1] == 0


def test_collectives_and_updates_take_time():
    """One rank, two units: gathers, reductions and the update overlap with compute, in order."""
    schedule = Schedule.of([[Op(0, "F", 0), Op(0, "B", 0)]])
    units = [[ProgramUnit("a", mode="zero3", weight=1), ProgramUnit("b", mode="zero3", weight=3)]]
    lowered = lower(schedule, units, [ProgramBucket("all", ("a", "b"))])
    prices = Costs(forward=4, input_grad=4, weight_grad=4, gather=2, reduce={"a": 3, "b": 5}, stream=7, gathered=10)
    timeline = simulate(lowered, prices)
    compute = spans(timeline)
    assert compute[0, "0F0 a"] == (2, 3)  # after its gather; a is a quarter of the stage
    assert compute[0, "0F0 b"] == (4, 7)  # after b's gather
    assert compute[0, "0B0 b"] == (7, 13)
    assert compute[0, "0B0 a"] == (13, 15)
    collectives = spans(timeline, "collective")
    assert collectives[0, "REDUCE b"] == (13, 18)
    assert collectives[0, "REDUCE a"] == (18, 21)
    assert spans(timeline, "stream")[0, "STREAM all"] == (21, 28)
    assert timeline.makespan == 28
    assert [str(s.what) for s in timeline.critical_path][-3:] == ["REDUCE b", "REDUCE a", "STREAM all"]
    assert timeline.peaks[0].memory == 21  # both units and the activation
    with pytest.raises(ScheduleError, match=r"costs\.reduce has no entry for 'b'"):
        simulate(lowered, Costs(reduce={"a": 1}))


def test_a_collective_waits_for_all_who_share_it():
    schedule = build("1f1b", 2, 1)
    tied = lower(schedule, [[ProgramUnit("t")], [ProgramUnit("t")]], replicas=2)
    timeline = simulate(tied, Costs(reduce=5))
    reductions = [s for s in timeline.spans() if s.lane == "collective"]
    assert len(reductions) == 1  # one, of two ranks and two replicas
    assert reductions[0].start == 6
    assert timeline.makespan == 11
    late = Schedule.of([[Op(s, k, 0) for k in "FIW"] for s in range(2)])  # here rank 1 is the last to come
    timeline = simulate(lower(late, [[ProgramUnit("t")], [ProgramUnit("t")]]), Costs(weight_grad=(1, 9), reduce=5))
    assert [s.start for s in timeline.spans() if s.lane == "collective"] == [12]


def test_late_receives_cost_time():
    schedule, prices = build("1f1b", 2, 4), Costs(message=Fraction(1, 2))
    lowered = lower(schedule, costs=prices)
    assert simulate(lowered, prices).makespan == simulate(schedule, prices).makespan
    first, second = lowered.programs
    instructions = list(second.instructions)
    recv = instructions.pop(instructions.index(Recv(0, "activation", 0, 0)))
    instructions.insert(instructions.index(Op(1, "F", 0)), recv)
    later = [i for i in instructions if isinstance(i, Recv) and i.micro_batch > 0]  # keep the sender's order
    instructions = [i for i in instructions if i not in later]
    for m, i in enumerate(later, 1):
        instructions.insert(instructions.index(Op(1, "F", m)), i)
    late = replace(lowered, programs=(first, replace(second, instructions=tuple(instructions))))
    assert simulate(late, prices).makespan > simulate(lowered, prices).makespan


def test_to_dict_is_plain():
    import json

    data = json.loads(json.dumps(simulate(build("zb-v", 2, 3), Costs(message=Fraction(1, 10))).to_dict()))
    assert data["spans"][0] == [0, "compute", "0F0", 0.0, 0.5]
    assert data["makespan"] >= data["lower_bound"]


def test_timelines_are_values():
    a, b = (simulate(build("1f1b", 2, 2)) for _ in range(2))
    assert a == b
    assert a != simulate(build("1f1b", 2, 2), Costs(message=1))
    assert Send(0, "activation", 0, 1) in [s.what for s in simulate(build("1f1b", 2, 2), Costs(message=1)).spans()]


def test_an_op_that_does_more_gets_ready_while_it_waits_and_reduces_behind_others() -> None:
    """Two ranks, one micro-batch, F = 1, B = 2: gathers before the input comes cost nothing; the lane holds the rank up."""
    schedule = build("1f1b", ranks=2, micro_batches=1)
    problem = Problem.of(schedule.placement, 2, 1, Costs())
    usual = run(problem, schedule.order)
    assert usual.ends == [[1, 6], [2, 4]]
    waits = run(problem, schedule.order, more={(1, "F", 0): OpExtras(free=1, ready=0)})
    assert waits.ends == usual.ends  # ready after 1, when the input comes
    late = run(problem, schedule.order, more={(1, "F", 0): OpExtras(free=3, ready=1)})
    assert late.ends[1] == [4, 6]
    reduces = run(problem, schedule.order, more={(1, "B", 0): OpExtras(after=5, puts=4, done=9)})
    assert reduces.ends == usual.ends  # its gradient has left by then
    assert reduces.lanes == [0, 2 + 9]
    both = {(0, "F", 0): OpExtras(puts=9, done=10), (0, "B", 0): OpExtras(lead=1, puts=2, done=4)}
    held = run(problem, schedule.order, more=both)
    assert held.starts[0] == [0, 9]  # a part of 1 computes while the lane is busy
    assert held.lanes[0] == 13
