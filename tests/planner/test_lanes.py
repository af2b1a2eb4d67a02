"""Lanes: what a chain of units takes with its collectives beside it, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.planner.lanes import Lanes, Step


def takes(*steps: Step) -> tuple[float, float]:
    """(when computing ends, when everything has)."""
    lanes = Lanes()
    lanes.run(steps)
    computed = lanes.now
    lanes.finish()
    return computed, lanes.now


def test_gathers_are_one_unit_ahead() -> None:
    assert takes(Step(2.0), Step(2.0)) == (4.0, 4.0)
    assert takes(Step(2.0, gather=1.0), Step(2.0, gather=1.0)) == (
        5.0,
        5.0,
    )  # the first is waited for, the second is not
    assert takes(Step(2.0, gather=1.0), Step(2.0, gather=5.0)) == (8.0, 8.0)  # it starts with the first unit's gather


def test_one_reduction_is_under_way_while_the_next_gradient_is_made() -> None:
    long = Step(1.0, reduce=5.0)
    assert takes(long) == (1.0, 6.0)
    assert takes(long, long) == (6.0, 11.0)  # the second starts at 2 and computing waits for the first, until 6
    free = long._replace(holds=False)  # whole copies: nothing is freed, so nothing waits
    assert takes(free, free) == (2.0, 11.0)


def test_what_runs_at_once_shares_the_link() -> None:
    # a reduction of 2 beside a gather of 2: both take 4; the unit after waits for its parameters
    first, second = Step(1.0, reduce=2.0), Step(1.0)
    lanes = Lanes()
    lanes.run([first], following=0.0)
    lanes.gather(2.0)
    lanes.run([second._replace(gather=2.0)], ready=True)
    assert lanes.now == pytest.approx(1.0 + 4.0 + 1.0)
    # what is waited for shares it too
    assert takes(Step(1.0, reduce=2.0), Step(1.0, moves=1.0)) == (pytest.approx(4.0), pytest.approx(4.0))


def test_sums_across_groups_are_waited_for() -> None:
    assert takes(Step(1.0, reduce=1.0, across=3.0)) == (1.0, 5.0)


@given(
    st.lists(st.tuples(*[st.sampled_from((0.0, 0.1, 0.3, 1.0, 2.7))] * 8), min_size=1, max_size=3),
    st.integers(4, 40),
    st.booleans(),
    st.sampled_from((0.0, 0.2)),
)
def test_layers_that_are_alike_take_what_they_would_one_by_one(
    layer: list[tuple[float, ...]], times: int, holds: bool, queue: float
) -> None:
    """A step that is the same object is known to repeat; copies are gone through."""
    first, *rest = steps = [Step(*fields[:4], holds, *fields[4:7]) for fields in layer]
    chain = [first, *(steps * times), *rest, first._replace(compute=0.7)]
    found = []
    for units in (chain, [Step(*s) for s in chain]):
        lanes = Lanes(queue)
        for _ in range(2):
            lanes.run(units)
        ran = lanes.now, lanes.since_work
        lanes.finish()
        found.append((*ran, lanes.now, lanes.exposed, lanes.communicated))
    assert found[0] == pytest.approx(found[1], rel=1e-6, abs=1e-9)
