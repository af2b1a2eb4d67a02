"""The closed forms, in rationals: exact equality, no tolerance."""

from fractions import Fraction

import pytest

from fourfold.program import Costs, build, simulate

RATIOS = [Fraction(1), Fraction(3, 2), Fraction(2), Fraction(3)]  # T_B / F


def idle(name, ranks, micro_batches, backward=Fraction(2), message=Fraction(0), **options):
    """(idle time of a rank, its bubble ratio)."""
    costs = Costs(input_grad=backward / 2, weight_grad=backward / 2, message=message)
    timeline = simulate(build(name, ranks, micro_batches, **options), costs)
    assert len(set(timeline.idle)) == 1
    return timeline.idle[0], timeline.bubble


@pytest.mark.parametrize("backward", RATIOS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_gpipe_and_1f1b(ranks, backward):
    for micro_batches in (ranks, 2 * ranks + 1):
        want = (ranks - 1) * (1 + backward)
        assert idle("gpipe", ranks, micro_batches, backward)[0] == want
        assert idle("1f1b", ranks, micro_batches, backward)[0] == want


@pytest.mark.parametrize("backward", RATIOS)
@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_interleaved(ranks, stages, backward):
    for rounds in (1, 2, 4):
        want = (ranks - 1) * (1 + backward) / stages
        found, bubble = idle("interleaved", ranks, rounds * ranks, backward, stages_per_rank=stages)
        assert found == want
        assert bubble == Fraction(ranks - 1) / (stages * rounds * ranks + ranks - 1)


@pytest.mark.parametrize("backward", RATIOS)
@pytest.mark.parametrize("waves", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_waves(ranks, waves, backward):
    """Idle (P - 1) T_B / W; with messages, every one of 4 W (P - 1) + 2 P - 4 of them is exposed."""
    want = (ranks - 1) * backward / waves
    found, bubble = idle("wave", ranks, ranks, backward, waves=waves)
    assert found == want
    assert bubble == want / (ranks * (1 + backward) + want)
    if backward == 2:
        assert bubble == Fraction(2 * ranks - 2, 3 * ranks * waves + 2 * ranks - 2)
    message = Fraction(1, 40)
    exposed = (4 * waves * (ranks - 1) + 2 * ranks - 4) * message
    assert idle("wave", ranks, ranks, backward, message, waves=waves)[0] == want + exposed


@pytest.mark.parametrize(("ranks", "waves"), [(4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4)])
def test_the_papers_equation_is_pessimistic(ranks, waves):
    """Its denominator lacks half of its numerator's (P - 1) T_B / W."""
    paper = Fraction(2 * ranks - 2, 3 * ranks * waves + ranks - 1)
    _, ours = idle("wave", ranks, ranks, waves=waves)
    assert ours < paper
    bubble = Fraction(2 * (ranks - 1), waves)
    assert paper == bubble / (3 * ranks + bubble / 2)
    assert ours == bubble / (3 * ranks + bubble)


@pytest.mark.parametrize("waves", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_memory_of_waves(ranks, waves):
    peaks = simulate(build("wave", ranks, ranks, waves=waves)).peak_activations
    assert peaks == tuple(ranks - Fraction(ranks - 1 - rank, 2 * waves) for rank in range(ranks))


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("ranks", [4, 8])
def test_memory_of_interleaving(ranks, stages):
    peak = max(simulate(build("interleaved", ranks, 2 * ranks, stages_per_rank=stages)).peak_activations)
    assert peak == ranks + Fraction(ranks - 1, stages)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zero_bubble_schedules(ranks):
    halves = simulate(build("zb-h1", ranks, 3 * ranks))
    assert max(halves.idle) == ranks - 1  # (P - 1)(F + I - W): a third of 1F1B's
    assert max(halves.peak_activations) == ranks
    wave = simulate(build("zb-v", ranks, 3 * ranks))
    assert set(wave.idle) == {Fraction(ranks - 1, 2)}  # the start alone
    assert set(wave.peak_activations) == {ranks}
    assert wave.makespan == wave.lower_bound
