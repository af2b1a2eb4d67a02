"""The schedules by name: the figures of the papers, and that all of them are valid at every size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_strategies import schedules

from fourfold.program import (
    Costs,
    Op,
    Schedule,
    ScheduleError,
    build,
    forward_only,
    fused,
    loop,
    names,
    register,
    simulate,
    split,
    validate,
    zigzag,
)

# Hanayo's figure of one wave on four ranks with four micro-batches; a is the leg down, b the leg up.
WAVE_4 = """
F0a F1a F2a F3a F0b B0b F1b B1b F2b B2b F3b B3b B0a B1a B2a B3a
F0a F1a F2a F0b F3a F1b B0b F2b B1b F3b B2b B0a B3b B1a B2a B3a
F0a F1a F0b F2a F1b F3a F2b B0b F3b B1b B0a B2b B1a B3b B2a B3a
F0a F0b F1a F1b F2a F2b F3a F3b B0b B0a B1b B1a B2b B2a B3b B3a
"""


def test_one_wave_is_the_order_of_the_figure():
    schedule = build("wave", 4, 4)
    for rank, line in enumerate(WAVE_4.strip().splitlines()):
        stage = {"a": rank, "b": 7 - rank}
        assert schedule.order[rank] == tuple(Op(stage[x[2]], x[0], int(x[1])) for x in line.split())


def test_two_waves_on_two_ranks():
    # Legs 0 to 3 are stages 0, 3, 4, 7 on rank 0 and 1, 2, 5, 6 on rank 1.
    assert str(build("wave", 2, 2, waves=2)).splitlines()[1:] == [
        "  rank 0: 0F0 0F1 3F0 4F0 3F1 4F1 7F0 7B0 7F1 7B1 4B0 3B0 4B1 3B1 0B0 0B1",
        "  rank 1: 1F0 2F0 1F1 2F1 5F0 6F0 5F1 6F1 6B0 5B0 6B1 5B1 2B0 1B0 2B1 1B1",
    ]


def row(schedule, rank):
    return " ".join(map(str, schedule.order[rank]))


def test_zero_bubble_orders():
    assert row(build("zb-h1", 2, 3), 0) == "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2"
    assert row(build("zb-h1", 2, 3), 1) == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    assert row(build("zb-v", 2, 3), 0) == "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2"
    assert row(build("zb-v", 2, 3), 1) == "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2"


def test_1f1b_and_its_slack():
    assert row(build("1f1b", 3, 4), 0) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert row(build("1f1b", 3, 4), 2) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    assert row(build("1f1b", 3, 4, slack=1), 2) == "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3"
    assert simulate(build("1f1b", 4, 16, slack=2)).peak_activations == (6, 5, 4, 3)


def test_zigzag_turns_on_a_rank_and_ends_where_it_began():
    assert zigzag(3, 4) == (0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0)
    assert loop(3, 2) == (0, 1, 2, 0, 1, 2)


@settings(deadline=None)
@given(schedules(most_ranks=8, most=20))
def test_every_generator_validates_at_every_size(schedule):
    validate(schedule)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 7, 9, 12])
@pytest.mark.parametrize("waves", [1, 2])
def test_waves_stay_within_ranks_and_beat_the_papers_rule(waves, micro_batches):
    ours, paper = (build("wave", 4, micro_batches, waves=waves, paper=p) for p in (False, True))
    validate(ours, memory_cap=4)
    assert simulate(ours).makespan <= simulate(paper).makespan


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 12), st.booleans())
def test_forward_only_on_any_placement(ranks, per_rank, micro_batches, zig):
    placement = (zigzag if zig else loop)(ranks, per_rank)
    schedule = forward_only(placement, micro_batches)
    validate(schedule)
    timeline = simulate(schedule)
    assert schedule.forward_only
    if micro_batches % ranks == 0 and not (zig and per_rank % 2):
        assert timeline.makespan == timeline.lower_bound
    assert max(timeline.peak_activations) <= 1


def test_splitting_and_fusing():
    whole = build("wave", 4, 4)
    halves = split(whole)
    validate(halves)
    assert halves.split
    assert fused(halves) == whole
    validate(fused(build("zb-v", 4, 8)), memory_cap=4)


def test_a_user_adds_a_schedule():
    @register("test-all-at-once")
    def all_at_once(ranks, micro_batches, reverse: bool = False):
        ms = range(micro_batches)[:: -1 if reverse else 1]
        rows = [[Op(r, "F", m) for m in range(micro_batches)] + [Op(r, "B", m) for m in ms] for r in range(ranks)]
        return Schedule.of(rows)

    assert "test-all-at-once" in names()
    schedule = build("test-all-at-once", 3, 4, reverse=True)
    validate(schedule)
    assert schedule.name == "test-all-at-once reverse=True"
    with pytest.raises(ScheduleError, match="registered already"):
        register("test-all-at-once")(lambda ranks, micro_batches: schedule)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: build("wawe", 4, 4), "did you mean 'wave'"),
        (lambda: build("wave", 0, 4), "ranks = 0 must be a whole number of at least 1; use 1"),
        (lambda: build("wave", 4, 0), "micro_batches = 0"),
        (lambda: build("wave", 4, 2.5), r"micro_batches = 2\.5"),
        (lambda: build("wave", 4, 4, waves=0), "waves = 0"),
        (lambda: build("1f1b", 4, 4, slack=-1), "slack = -1 must be a whole number of at least 0"),
        (lambda: build("interleaved", 4, 4, stages_per_rank=0), "stages_per_rank = 0"),
        (lambda: build("wave", 4, 4, wave=2), "did you mean 'waves'"),
        (lambda: build("gpipe", 4, 4, waves=2), "gpipe has no options"),
        (lambda: Costs(forward=-1), r"costs\.forward = -1 must be finite and at least 0"),
        (lambda: Costs(message=float("nan")), r"costs\.message"),
        (lambda: Costs(forward="1"), r"costs\.forward = '1' is not a number"),
        (lambda: Costs(link="shared"), "private, edge, rank"),
        (lambda: simulate(build("gpipe", 2, 2), Costs(forward=(1, 2, 3))), "3 entries; 2 stages"),
        (lambda: simulate(build("gpipe", 2, 2), Costs(message=((0, 1),))), "2 ranks need 2 rows of 2"),
        (lambda: simulate(build("gpipe", 2, 2), Costs(weight_grad_activation=2)), "use at most 1"),
    ],
)
def test_bad_input_names_the_nearest_valid_choice(call, says):
    with pytest.raises(ScheduleError, match=says):
        call()
