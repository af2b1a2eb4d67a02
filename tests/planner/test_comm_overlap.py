"""Chains of units with their collectives next to them, and channels that share a link: computed by hand."""

from __future__ import annotations

import pytest

from fourfold.planner.comm_overlap import SharedLink, UnitStep, UnitTimeline


def test_channels_share_a_link() -> None:
    for links, ends in (((0, 0), 3.0), ((0, 1), 2.0)):
        link = SharedLink(links, (0.0, 0.0))
        link.start(0, 1.0)
        number = link.start(1, 2.0)
        assert link.wait(1, number) == pytest.approx(ends)


def test_a_channel_runs_its_collectives_in_order() -> None:
    link = SharedLink((0,), (0.0,))
    first, second = link.start(0, 1.0), link.start(0, 2.0)
    link.compute(0.5)
    assert link.wait(0, first) == pytest.approx(0.5)
    link.compute(5.0)
    assert link.wait(0, second) == 0.0


def test_a_collective_queues_behind_in_flight_traffic() -> None:
    link = SharedLink((0, 0), (2.0, 2.0))
    long, short = link.start(0, 10.0), link.start(1, 1.0)
    assert link.wait(1, short) == pytest.approx(2.0 + 2.0)  # two seconds of the other, then half of the link
    assert link.wait(0, long) == pytest.approx(7.0)
    link = SharedLink((0, 0), (2.0, 2.0))
    link.start(0, 0.5)
    assert link.wait(1, link.start(1, 1.0)) == pytest.approx(1.5)  # no more than there is


def takes(*steps: UnitStep) -> tuple[float, float]:
    """(when computing ends, when everything has)."""
    timeline = UnitTimeline()
    timeline.run(steps)
    computed = timeline.now
    timeline.finish()
    return computed, timeline.now


def test_gathers_are_one_unit_ahead() -> None:
    assert takes(UnitStep(2.0), UnitStep(2.0)) == (4.0, 4.0)
    assert takes(UnitStep(2.0, gather=1.0), UnitStep(2.0, gather=1.0)) == (
        5.0,
        5.0,
    )  # the first is waited for, the second is not
    assert takes(UnitStep(2.0, gather=1.0), UnitStep(2.0, gather=5.0)) == (
        8.0,
        8.0,
    )  # it starts with the first unit's gather


def test_one_reduction_is_in_flight_while_the_next_gradient_is_made() -> None:
    long = UnitStep(1.0, reduce=5.0)
    assert takes(long) == (1.0, 6.0)
    assert takes(long, long) == (6.0, 11.0)  # the second starts at 2 and computing waits for the first, until 6
    free = long._replace(sharded=False)  # replicas: nothing is freed, so nothing waits
    assert takes(free, free) == (2.0, 11.0)


def test_what_runs_at_once_shares_the_link() -> None:
    # a reduction of 2 next to a gather of 2: both take 4; the unit after waits for its parameters
    first, second = UnitStep(1.0, reduce=2.0), UnitStep(1.0)
    timeline = UnitTimeline()
    timeline.run([first], following=0.0)
    timeline.gather(2.0)
    timeline.run([second._replace(gather=2.0)], started=True)
    assert timeline.now == pytest.approx(1.0 + 4.0 + 1.0)
    # what is waited for shares it too
    assert takes(UnitStep(1.0, reduce=2.0), UnitStep(1.0, grid_exposed=1.0)) == (pytest.approx(4.0), pytest.approx(4.0))


def test_one_sum_across_groups_overlaps() -> None:
    alone = UnitStep(1.0, reduce=1.0, across=3.0)
    assert takes(alone) == (1.0, 5.0)  # nothing follows that could hide it
    short = UnitStep(1.0, reduce=0.25, across=0.5)  # both within the next unit's computing
    assert takes(short, short, short)[0] == 3.0
    long = UnitStep(1.0, reduce=0.25, across=2.0)  # the second sum waits for the first
    assert takes(long, long, long)[1] > 3 + 2 * 2.0
