"""The choice unit by unit: against brute force, its certificate, and the table that OSDP's authors published."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.planner.knapsack import Chosen, Group, choose

option = st.tuples(st.integers(0, 20), st.integers(0, 20))
group = st.builds(Group, st.lists(option, min_size=1, max_size=4), st.integers(1, 2))


def brute_force(groups: list[Group], budget: float) -> float | None:
    units = [g.options for g in groups for _ in range(g.count)]
    times = [sum(o[1] for o in mix) for mix in itertools.product(*units) if sum(o[0] for o in mix) <= budget]
    return min(times, default=None)


def check(groups: list[Group], chosen: Chosen, budget: float) -> None:
    """The counts say what the totals say, and fit."""
    for g, counts in zip(groups, chosen.counts, strict=True):
        assert sum(counts.values()) == g.count
    pairs = [(g.options[k], n) for g, c in zip(groups, chosen.counts, strict=True) for k, n in c.items()]
    assert abs(sum(o[0] * n for o, n in pairs) - chosen.memory) < 1e-6
    assert abs(sum(o[1] * n for o, n in pairs) - chosen.seconds) < 1e-6
    assert chosen.memory <= budget + 1e-9


@settings(max_examples=300, deadline=None)
@given(st.lists(group, min_size=1, max_size=4), st.integers(0, 80))
def test_against_brute_force(groups: list[Group], budget: int) -> None:
    best = brute_force(groups, budget)
    chosen = choose(groups, budget)
    if best is None:
        assert chosen is None
        return
    assert chosen is not None
    check(groups, chosen, budget)
    assert chosen.bound <= best + 1e-9 <= chosen.seconds + 2e-9  # the certificate is never below the true gap


@settings(max_examples=100, deadline=None)
@given(st.lists(group, min_size=1, max_size=4), st.integers(0, 60), st.integers(0, 20))
def test_with_more_room_the_bound_never_rises(groups: list[Group], budget: int, more: int) -> None:
    small, large = choose(groups, budget), choose(groups, budget + more)
    if small is not None:
        assert large is not None
        assert large.bound <= small.bound + 1e-9


def test_more_memory_buys_the_steepest_step_until_all_are_fastest() -> None:
    groups = [Group([(1, 10.0), (3, 4.0), (9, 3.0)], 10)]
    chosen, more, free = (choose(groups, budget) for budget in (20, 22, 1000))
    assert chosen is not None
    assert more is not None
    assert free is not None
    assert chosen.seconds - more.seconds == 2 * 3.0  # (10 - 4) / (3 - 1)
    assert (free.gap, free.seconds) == (0.0, 30.0)


# Seconds and MB of one layer of 48 (hidden 1536, batch index 1, eight GPUs) by how much of it is sharded, as measured by
# OSDP's authors: github.com/Youhe-Jiang/IJCAI2023-OptimalShardedDataParallel, OSDP_modules/Profiler_output.py (MIT).
PUBLISHED = [(377.745, 0.051672141), (271.885, 0.054875135), (147.315, 0.060699721), (116.225, 0.069794059)]


def test_the_published_table_gives_the_authors_plan() -> None:
    chosen = choose([Group(PUBLISHED, 48)], 8192 - 800)
    assert chosen is not None
    assert chosen.counts == ({2: 46, 1: 2},)
    assert round(chosen.seconds, 4) == 2.9019
    assert chosen.gap < 0.002
