"""The validator refuses every broken schedule and program, and says which instruction, where and why."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from program_strategies import few, programs, schedules

from fourfold.program import (
    Costs,
    Gather,
    Op,
    Program,
    Programs,
    ProgramUnit,
    Recv,
    Reduce,
    Release,
    Schedule,
    ScheduleError,
    Send,
    Stream,
    UnitOp,
    build,
    lower,
    parse_instruction,
    validate,
)


def ops(text):
    return tuple(map(Op.parse, text.split()))


# ---- schedules ----


@few
@given(schedules(), st.data())
def test_a_dropped_op_is_refused(schedule, data):
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    at = data.draw(st.integers(0, len(schedule.order[rank]) - 1))
    row = schedule.order[rank]
    broken = _with_row(schedule, rank, row[:at] + row[at + 1 :])
    assume(not broken.forward_only)  # that would be a valid evaluation
    with pytest.raises(ScheduleError, match=r"missing|before|deadlock|in order"):
        validate(broken)


@few
@given(schedules(), st.data())
def test_a_repeated_op_is_refused(schedule, data):
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    at = data.draw(st.integers(0, len(schedule.order[rank]) - 1))
    with pytest.raises(ScheduleError, match="twice"):
        validate(_with_row(schedule, rank, (*schedule.order[rank], schedule.order[rank][at])))


@few
@given(schedules(), st.data())
def test_swapped_dependent_ops_are_refused(schedule, data):
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    row = list(schedule.order[rank])
    pairs = [
        (i, j)
        for i, a in enumerate(row)
        for j, b in enumerate(row)
        if (a.stage, a.micro_batch) == (b.stage, b.micro_batch) and a.kind + b.kind in ("FB", "FI", "IW")
    ]
    i, j = data.draw(st.sampled_from(pairs))
    row[i], row[j] = row[j], row[i]
    with pytest.raises(ScheduleError, match=r"which it needs|in order|deadlock"):
        validate(_with_row(schedule, rank, row))


@few
@given(schedules(least_ranks=2), st.data())
def test_an_op_on_a_foreign_rank_is_refused(schedule, data):
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    op = data.draw(st.sampled_from(schedule.order[rank]))
    other = (rank + 1) % schedule.ranks
    with pytest.raises(ScheduleError, match=f"rank {other}, op {op}: stage {op.stage} is on rank {rank}"):
        validate(_with_row(schedule, other, (op, *schedule.order[other])))


def _with_row(schedule, rank, row):
    order = list(schedule.order)
    order[rank] = tuple(row)
    return replace(schedule, order=tuple(order))


def test_deadlock_is_explained_as_a_circle():
    schedule = Schedule((ops("0F0 0F1 0B1 0B0"), ops("1F0 1B0 1F1 1B1")), (0, 1), 2)
    validate(schedule)
    locked = Schedule((ops("0F0 0B0 0F1 0B1"), ops("1F0 1F1 1B0 1B1")), (0, 1), 2)
    with pytest.raises(ScheduleError) as error:
        validate(locked)
    assert str(error.value) == (
        "deadlock: rank 0 at 0B0 waits for the backward of stage 1, micro-batch 0, on rank 1; "
        "rank 1 at 1F1 waits for the F of stage 0, micro-batch 1, on rank 0"
    )


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (("0F0 0B0",), "rank 1"),
        (("0F0 0B0", "1F0"), "the backward is missing: 1B0"),
        (("0F0 0B0", "1F0 1I0"), "1W0 is missing"),
        (("0F0 0B0", "1F0 1B0 1I0 1W0"), "has both B and I"),
        (("0F0 0B0", "1B0 1F0"), "1B0: it comes before 1F0"),
        (("0F0 0B0", "1F0 1W0 1I0"), "1W0: it comes before 1I0"),
        (("0F0 0B0 2F0", "1F0 1B0"), "stages are 0 to 1"),
        (("0F0 0B0 0F7", "1F0 1B0"), "micro-batches 0 to 0"),
    ],
)
def test_broken_schedules_say_why(rows, says):
    with pytest.raises(ScheduleError, match=says):
        validate(Schedule(tuple(map(ops, rows)), (0, 1), 1))


def test_the_last_stage_takes_micro_batches_in_order():
    schedule = Schedule((ops("0F1 0F0 0B0 0B1"), ops("1F1 1F0 1B0 1B1")), (0, 1), 2)
    with pytest.raises(
        ScheduleError, match="rank 1, op 1F1: the last stage takes micro-batches in order, 1F0 comes next"
    ):
        validate(schedule)


def test_memory_caps():
    schedule = build("1f1b", 4, 8)
    validate(schedule, memory_cap=4)
    with pytest.raises(ScheduleError, match="rank 0, op 0F3: holds 4, the cap is 3; use a cap of at least 4"):
        validate(schedule, memory_cap=3)
    with pytest.raises(ScheduleError, match=r"memory_cap = 0\.5 is below one micro-batch on rank 0; use at least 1"):
        validate(schedule, memory_cap=0.5)
    costs = Costs(activation=(10, 20, 30, 40), weight_grad_activation=0)
    validate(schedule, memory_cap=60, costs=costs)
    with pytest.raises(ScheduleError, match="rank 1, op 1F2: holds 60, the cap is 50"):
        validate(schedule, memory_cap=50, costs=costs)


def test_what_w_still_needs_is_counted():
    schedule = build("zb-h1", 4, 8)
    validate(schedule, memory_cap=4)
    light = Costs(activation=4, weight_grad_activation=1)
    validate(schedule, memory_cap=16, costs=light)
    with pytest.raises(ScheduleError, match="holds"):
        validate(schedule, memory_cap=15, costs=light)


# ---- programs ----


@few
@given(programs())
def test_lowered_programs_validate(lowered):
    validate(lowered)


@few
@given(programs(replicas=2))
def test_lowered_programs_with_replicas_validate(lowered):
    validate(lowered)


@few
@given(programs(), st.data())
def test_a_dropped_instruction_is_refused(lowered, data):
    row = data.draw(st.integers(0, len(lowered.programs) - 1))
    instructions = lowered.programs[row].instructions
    at = data.draw(st.integers(0, len(instructions) - 1))
    left = instructions[:at] + instructions[at + 1 :]
    assume(any(isinstance(x, Op | UnitOp) and x.kind != "F" for x in left))  # else it is a valid evaluation
    with pytest.raises(ScheduleError):
        validate(_changed(lowered, row, left))


@few
@given(programs(), st.data())
def test_a_repeated_instruction_is_refused(lowered, data):
    row = data.draw(st.integers(0, len(lowered.programs) - 1))
    instructions = lowered.programs[row].instructions
    at = data.draw(st.integers(0, len(instructions) - 1))
    with pytest.raises(ScheduleError):
        validate(_changed(lowered, row, (*instructions[: at + 1], *instructions[at:])))


@few
@given(programs(least_ranks=2), st.data(), st.sampled_from([Send, Recv]))
def test_two_swapped_messages_of_an_edge_are_refused(lowered, data, verb):
    edges = {}
    for row, program in enumerate(lowered.programs):
        for i, instruction in enumerate(program.instructions):
            if isinstance(instruction, verb):
                edges.setdefault((row, instruction.peer), []).append(i)
    edges = {edge: places for edge, places in edges.items() if len(places) > 1}
    assume(edges)
    row, _ = edge = data.draw(st.sampled_from(sorted(edges)))
    i, j = data.draw(st.lists(st.sampled_from(edges[edge]), min_size=2, max_size=2, unique=True))
    with pytest.raises(ScheduleError):
        validate(_swapped(lowered, row, i, j))


@few
@given(programs(replicas=2), st.data())
def test_a_collective_reordered_on_one_rank_is_refused(lowered, data):
    row = data.draw(st.integers(0, len(lowered.programs) - 1))
    places = [i for i, x in enumerate(lowered.programs[row].instructions) if isinstance(x, Gather | Reduce)]
    what = lowered.programs[row].instructions
    pairs = [(i, j) for i in places for j in places if i < j and what[i] != what[j]]
    assume(pairs)
    with pytest.raises(ScheduleError):
        validate(_swapped(lowered, row, *data.draw(st.sampled_from(pairs))))


@few
@given(programs(), st.data())
def test_an_instruction_before_what_it_needs_is_refused(lowered, data):
    """A SEND before its op, a use before its GATHER, a REDUCE before the last gradient, a STREAM before its REDUCE."""
    row = data.draw(st.integers(0, len(lowered.programs) - 1))
    instructions = list(lowered.programs[row].instructions)
    movable = [i for i, x in enumerate(instructions) if isinstance(x, Send | Reduce | Stream | Release)]
    assume(movable)
    instructions.insert(0, instructions.pop(data.draw(st.sampled_from(movable))))
    with pytest.raises(ScheduleError):
        validate(_changed(lowered, row, instructions))


def _changed(lowered, row, instructions):
    rows = list(lowered.programs)
    rows[row] = replace(rows[row], instructions=tuple(instructions))
    return replace(lowered, programs=tuple(rows))


def _swapped(lowered, row, i, j):
    instructions = list(lowered.programs[row].instructions)
    instructions[i], instructions[j] = instructions[j], instructions[i]
    return _changed(lowered, row, instructions)


PAIR = """
micro_batches 1
placement 0 1
unit 0 embed zero3 step 1
unit 1 head replicate step 1
bucket all embed head
rank 0 replica 0
  GATHER embed
  0F0
  SEND 0 activation 0 to 1
  RECV 1 gradient 0 from 1
  0B0
  RELEASE embed
  REDUCE embed
  STREAM all
rank 1 replica 0
  RECV 0 activation 0 from 0
  1F0
  1B0
  SEND 1 gradient 0 to 0
  REDUCE head
  STREAM all
"""


def test_a_program_written_by_hand():
    validate(Programs.parse(PAIR))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("  GATHER embed\n", "", r"rank 0, instruction 0 \(0F0\): it uses embed, which is not gathered"),
        ("  RELEASE embed\n", "", r"rank 0, instruction 7 \(the end\): RELEASE embed is missing"),
        ("  REDUCE head\n", "", "it comes before the gradients of head are reduced"),
        ("  STREAM all\nrank 1", "rank 1", "STREAM all is missing"),
        ("  REDUCE embed\n", "  REDUCE embed\n  REDUCE embed\n", "all its gradients are reduced already"),
        ("  GATHER embed\n", "  GATHER embed\n  GATHER embed\n", "gathered already"),
        ("  REDUCE head\n", "  GATHER head\n", "mode replicate is never gathered"),
        ("  GATHER embed\n", "  GATHER embd\n", "did you mean 'embed'"),
        ("STREAM all\nrank", "STREAM al\nrank", "did you mean 'all'"),
        ("  SEND 0 activation 0 to 1\n", "", "SEND 0 activation 0 to 1 is missing"),
        ("  RECV 1 gradient 0 from 1\n", "", r"instruction 3 \(0B0\): it needs RECV 1 gradient 0 from 1 before it"),
        ("SEND 1 gradient 0 to 0", "SEND 1 gradient 0 to 1", "goes from rank 1 to rank 0"),
        ("SEND 1 gradient 0 to 0", "SEND 1 activation 0 to 0", "that another stage reads"),
        ("  1B0\n", "", "has produced the gradient"),
        ("  1F0\n  1B0\n", "  1B0\n  1F0\n", "before 1F0, which it needs|needs RECV"),
        ("  0F0\n", "  0F0\n  0F0\n", "runs twice"),
        ("  0F0\n", "  0F0 head\n", "the units of 0F0 run in the order embed"),
        ("  0F0\n", "  1F0\n", "stage 1 is on rank 1"),
        ("  0F0\n", "  0F5\n", "micro-batches 0 to 0"),
        ("rank 1 replica 0", "rank 2 replica 0", "one program"),
        ("  REDUCE embed\n", "  REDUCE\n", "line 14: 'REDUCE': 'REDUCE' is not an instruction"),
        ("unit 0 embed zero3", "unit 0 embed zero4", "did you mean 'zero"),
        ("micro_batches 1\n", "", "a line 'micro_batches N'"),
    ],
)
def test_broken_programs_say_where_and_why(old, new, says):
    assert PAIR.count(old) == 1
    with pytest.raises(ScheduleError, match=says):
        validate(Programs.parse(PAIR.replace(old, new)))


def test_blocking_sends_that_lock_up_are_found():
    """Two ranks that send to each other before either posts its receive: fine for a buffer, fatal without."""
    schedule = build("1f1b", 2, 3)
    lowered = lower(schedule)
    rows = []
    for program in lowered.programs:  # post every receive right before its use
        late, waiting = [], []
        for instruction in program.instructions:
            if isinstance(instruction, Recv):
                waiting.append(instruction)
                continue
            if isinstance(instruction, Op):
                step = -1 if instruction.kind == "F" else 1
                mine = [
                    r
                    for r in waiting
                    if (r.stage, r.micro_batch) == (instruction.stage + step, instruction.micro_batch)
                ]
                late += mine
                waiting = [r for r in waiting if r not in mine]
            late.append(instruction)
        rows.append(replace(program, instructions=tuple(late)))
    with pytest.raises(
        ScheduleError,
        match=r"deadlock: rank \d, instruction \d+ \(SEND .*which waits for rank \d, instruction \d+ \(SEND",
    ):
        validate(replace(lowered, programs=tuple(rows)))


def test_ranks_that_share_units_reduce_them_in_one_order():
    schedule = build("1f1b", 2, 2)
    tied = [ProgramUnit("a"), ProgramUnit("b")]
    lowered = lower(schedule, [tied, tied])
    validate(lowered)
    last = [i for i, x in enumerate(lowered.programs[1].instructions) if isinstance(x, Reduce)]
    with pytest.raises(ScheduleError, match=r"rank 1, instruction \d+ \(REDUCE b\).*must issue them in the same order"):
        validate(_swapped(lowered, 1, *last))


def test_replicas_start_their_collectives_in_one_order():
    units = [[ProgramUnit("a", mode="zero3"), ProgramUnit("b", mode="keep")]]
    lowered = lower(build("gpipe", 1, 1), units, replicas=2)
    assert [str(i) for i in lowered.programs[1].instructions[:2]] == ["GATHER a", "GATHER b"]
    with pytest.raises(ScheduleError) as error:
        validate(_swapped(lowered, 1, 0, 1))
    assert str(error.value) == (
        "rank 0 of replica 1, instruction 0 (GATHER b): rank 0 of replica 0 has GATHER a there; "
        "ranks that share collectives must issue them in the same order"
    )


def test_both_ends_of_an_edge_are_named():
    lowered = lower(build("1f1b", 2, 3))
    sends = [i for i, x in enumerate(lowered.programs[1].instructions) if isinstance(x, Send)]
    with pytest.raises(ScheduleError, match=r"has produced the gradient|rank 1 to rank 0, but rank 0 receives"):
        validate(_swapped(lowered, 1, *sends[:2]))


def test_programs_obey_the_cap_too():
    lowered = lower(build("1f1b", 4, 8))
    validate(lowered, memory_cap=4)
    with pytest.raises(ScheduleError, match="the cap is 3"):
        validate(lowered, memory_cap=3)


@pytest.mark.parametrize(
    "text",
    ["SEND 3 activation 0 from 2", "RECV 3 activations 0 from 2", "GATHER", "GATHER a b", "JUMP 3", "3F0 a b", ""],
)
def test_bad_instructions(text):
    with pytest.raises(ScheduleError, match="is not an instruction"):
        parse_instruction(text)


def test_instructions_differ_by_verb():
    assert Gather("u") != Release("u")
    assert Send(0, "activation", 0, 1) != Recv(0, "activation", 0, 1)
    assert UnitOp(0, "F", 0, "u") != Op(0, "F", 0)
    assert Program(0, ()) != Program(1, ())
