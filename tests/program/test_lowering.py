"""From a schedule to programs: messages, units by mode, buckets, text and JSON."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_strategies import few, programs, schedules

from fourfold.program import (
    Gather,
    Op,
    ProgramBucket,
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
    forward_only,
    lower,
    parse_instruction,
    validate,
    zigzag,
)


def text(program):
    return [str(instruction) for instruction in program.instructions]


def alone(mode, micro_batches=2, reduce="step", **options):
    """One rank, one stage, two units: the smallest program with everything in it."""
    units = [[ProgramUnit("a", mode=mode, reduce=reduce), ProgramUnit("b", mode=mode, reduce=reduce)]]
    schedule = Schedule.of([[Op(0, k, m) for m in range(micro_batches) for k in "FB"]])
    return text(lower(schedule, units, [ProgramBucket("all", ("a", "b"))], **options).of(0))


def test_replicate_only_reduces():
    assert alone("replicate") == ["0F0", "0B0", "0F1", "0B1 b", "REDUCE b", "0B1 a", "REDUCE a", "STREAM all"]


def test_keep_gathers_once_a_step():
    assert alone("keep") == [
        *("GATHER a", "GATHER b", "0F0", "0B0", "0F1"),
        *("0B1 b", "REDUCE b", "RELEASE b", "0B1 a", "REDUCE a", "RELEASE a", "STREAM all"),
    ]


def test_zero3_gathers_for_every_use_and_prefetches():
    assert alone("zero3", prefetch=0) == [
        *("GATHER a", "0F0 a", "RELEASE a", "GATHER b", "0F0 b", "RELEASE b"),
        *("GATHER b", "0B0 b", "RELEASE b", "GATHER a", "0B0 a", "RELEASE a"),
        *("GATHER a", "0F1 a", "RELEASE a", "GATHER b", "0F1 b", "RELEASE b"),
        *("GATHER b", "0B1 b", "REDUCE b", "RELEASE b", "GATHER a", "0B1 a", "REDUCE a", "RELEASE a", "STREAM all"),
    ]
    # One step ahead, b is not released between its forward and its backward, nor a between micro-batches.
    assert alone("zero3") == [
        *("GATHER a", "GATHER b", "0F0 a", "RELEASE a", "0F0 b", "GATHER a", "0B0 b", "RELEASE b", "0B0 a"),
        *("GATHER b", "0F1 a", "RELEASE a", "0F1 b", "GATHER a", "0B1 b", "REDUCE b", "RELEASE b"),
        *("0B1 a", "REDUCE a", "RELEASE a", "STREAM all"),
    ]


def test_zero2_stays_while_a_backward_is_awaited():
    assert alone("zero2", prefetch=0) == [
        *("GATHER a", "0F0 a", "GATHER b", "0F0 b", "0B0 b", "RELEASE b", "0B0 a", "RELEASE a"),
        *("GATHER a", "0F1 a", "GATHER b", "0F1 b", "0B1 b", "REDUCE b", "RELEASE b"),
        *("0B1 a", "REDUCE a", "RELEASE a", "STREAM all"),
    ]


def test_reduce_every_micro_batch_and_stream_early():
    found = alone("replicate", reduce="micro-batch", stream="early")
    assert found == [
        "0F0",
        "0B0 b",
        "REDUCE b",
        "0B0 a",
        "REDUCE a",
        "0F1",
        "0B1 b",
        "REDUCE b",
        "0B1 a",
        "REDUCE a",
        "STREAM all",
    ]


def test_w_needs_no_parameters():
    schedule = Schedule.of([[Op(0, k, 0) for k in "FIW"]])
    assert text(lower(schedule, [[ProgramUnit("a", mode="zero3")]]).of(0)) == [
        "GATHER a",
        "0F0",
        "0I0",
        "RELEASE a",
        "0W0",
        "REDUCE a",
    ]


@pytest.mark.parametrize(
    ("mode", "rank", "gathers"), [("keep", 0, 1), ("zero2", 0, 1), ("zero2", 3, 16), ("zero3", 0, 32)]
)
def test_gathers_of_1f1b(mode, rank, gathers):
    """zero2 on a rank that always has a micro-batch in flight is keep; on the last rank of 1F1B it never has."""
    schedule = build("1f1b", 4, 16)
    # Three units a stage, so that the next use of one is further away than the prefetch.
    units = [[ProgramUnit(f"{s}.{k}", mode=mode) for k in "abc"] for s in range(4)]
    count = Counter(i for i in lower(schedule, units, prefetch=0).of(rank).instructions if isinstance(i, Gather))
    assert count[Gather(f"{rank}.a")] == gathers


@few
@given(schedules())
def test_messages_are_exactly_the_hops_between_ranks(schedule):
    place = schedule.placement
    lowered = lower(schedule)
    sent = Counter(
        (i.stage, i.kind, i.micro_batch) for p in lowered.programs for i in p.instructions if isinstance(i, Send)
    )
    hops = [s for s in range(schedule.stages - 1) if place[s] != place[s + 1]]
    wanted = [(s, "activation", m) for s in hops for m in range(schedule.micro_batches)]
    wanted += [(s + 1, "gradient", m) for s in hops for m in range(schedule.micro_batches)]
    assert sent == Counter(wanted)
    for (sender, receiver), messages in lowered.messages().items():
        received = [i for i in lowered.of(receiver).instructions if isinstance(i, Recv) and i.peer == sender]
        assert [(i.stage, i.kind, i.micro_batch) for i in received] == [
            (i.stage, i.kind, i.micro_batch) for i in messages
        ]


def test_turns_and_single_ranks_need_no_message():
    lowered = lower(build("wave", 2, 2))
    assert sum(isinstance(i, Send) for p in lowered.programs for i in p.instructions) == 2 * 2 * 2  # not the turn
    alone = lower(build("wave", 1, 3, waves=2))
    validate(alone)
    assert all(isinstance(i, Op) for i in alone.of(0).instructions)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "wave", "zb-h1", "zb-v"])
def test_few_receives_are_outstanding(name):
    """Receive buffers are taken when messages could come, not one per micro-batch."""
    for ranks in (2, 4, 8):
        lowered = lower(build(name, ranks, 3 * ranks))
        for program in lowered.programs:
            waiting, most = set(), 0
            for i in program.instructions:
                if isinstance(i, Recv):
                    waiting.add((i.stage, i.kind, i.micro_batch))
                elif isinstance(i, Op):
                    waiting.discard((i.stage - 1, "activation", i.micro_batch) if i.kind == "F" else None)
                    waiting.discard((i.stage + 1, "gradient", i.micro_batch) if i.kind in "BI" else None)
                most = max(most, len(waiting))
            assert 0 < most <= 6


def test_tied_units_are_reduced_once_and_last():
    schedule = build("1f1b", 2, 2)
    units = [[ProgramUnit("embed"), ProgramUnit("a")], [ProgramUnit("b"), ProgramUnit("embed")]]
    lowered = lower(schedule, units, [ProgramBucket("all", ("embed", "a", "b"))], stream="early")
    for rank in (0, 1):
        assert text(lowered.of(rank))[-2:] == ["REDUCE embed", "STREAM all"]
    assert lowered.ranks_with("embed") == (0, 1)
    wave = lower(
        build("wave", 2, 2), [[ProgramUnit("embed")], [ProgramUnit("a")], [ProgramUnit("b")], [ProgramUnit("embed")]]
    )
    assert text(wave.of(0)).count("REDUCE embed") == 1  # both stages are here: no other rank takes part
    assert text(wave.of(0))[-1] == "REDUCE embed"


def test_evaluation_programs():
    schedule = forward_only(zigzag(2, 2), 3)
    units = [[ProgramUnit(f"u{s}", mode=mode)] for s, mode in enumerate(("zero3", "zero2", "keep", "replicate"))]
    lowered = lower(schedule, units, [ProgramBucket("all", ("u0",))], prefetch=0)
    validate(lowered)
    instructions = [i for program in lowered.programs for i in program.instructions]
    assert not any(isinstance(i, Reduce | Stream) for i in instructions)
    count = Counter(i.unit for i in instructions if isinstance(i, Gather))
    assert count["u2"] == 1
    assert count["u0"] > 1
    assert count == Counter(i.unit for i in instructions if isinstance(i, Release))


@few
@given(programs(), st.booleans())
def test_text_and_json_round_trips(lowered, as_text):
    if as_text:
        assert Programs.parse(str(lowered)) == lowered
    else:
        assert Programs.from_dict(json.loads(json.dumps(lowered.to_dict()))) == lowered
    for program in lowered.programs:
        for instruction in program.instructions:
            assert parse_instruction(str(instruction)) == instruction


@pytest.mark.parametrize("ending", ["txt", "json"])
def test_save_and_load(tmp_path, ending):
    lowered = lower(build("zb-v", 2, 3), [[ProgramUnit(f"u{s}", mode="zero3")] for s in range(4)], replicas=2)
    lowered.save(tmp_path / f"p.{ending}")
    assert Programs.load(tmp_path / f"p.{ending}") == lowered
    with pytest.raises(ScheduleError, match=r"\.json or \.txt"):
        lowered.save(tmp_path / "p.csv")


def test_parts_and_whole_ops_print_apart():
    assert str(UnitOp(3, "F", 0, "blocks.2.mlp")) == "3F0 blocks.2.mlp"
    assert parse_instruction("  3F0   blocks.2.mlp ") == UnitOp(3, "F", 0, "blocks.2.mlp")


@pytest.mark.parametrize(
    ("units", "options", "says"),
    [
        ([[ProgramUnit("a")]], {}, "units for 1 stages; the schedule has 2"),
        ([[ProgramUnit("a"), ProgramUnit("a")], []], {}, "names a unit twice"),
        ([[ProgramUnit("a")], [ProgramUnit("a", mode="keep")]], {}, "has two different definitions"),
        (
            [[ProgramUnit("a", reduce="micro-batch")], [ProgramUnit("a", reduce="micro-batch")]],
            {},
            "use reduce = 'step'",
        ),
        ([[ProgramUnit("a")], []], {"buckets": [ProgramBucket("x", ("b",))]}, "no unit 'b'"),
        ([[], []], {"prefetch": -1}, "prefetch = -1"),
        ([[], []], {"replicas": 0}, "replicas = 0"),
        ([[], []], {"stream": "now"}, "choose 'early' or 'last'"),
    ],
)
def test_bad_units(units, options, says):
    with pytest.raises(ScheduleError, match=says):
        lower(build("1f1b", 2, 2), units, **options)


@pytest.mark.parametrize(("name", "options"), [("a b", {}), ("", {}), ("a", {"mode": "zero1"}), ("a", {"weight": -1})])
def test_bad_unit_names_and_modes(name, options):
    with pytest.raises(ScheduleError):
        ProgramUnit(name, **options)


def test_there_is_no_such_program():
    with pytest.raises(ScheduleError, match="ranks are 0 to 1"):
        lower(build("1f1b", 2, 2)).of(5)
