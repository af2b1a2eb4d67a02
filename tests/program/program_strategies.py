"""What property tests draw: schedules of all kinds, units, programs, costs."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import settings
from hypothesis import strategies as st

from fourfold.program import Costs, ProgramBucket, Programs, ProgramUnit, Schedule, build, lower, split

few = settings(deadline=None, max_examples=40)
"""For properties whose examples take milliseconds."""

MODES = st.sampled_from(["replicate", "zero2", "zero3", "keep"])


@st.composite
def schedules(draw: st.DrawFn, least_ranks: int = 1, most_ranks: int = 6, most: int = 14) -> Schedule:
    """Any built schedule, some with their backwards split."""
    ranks = draw(st.integers(least_ranks, most_ranks))
    micro_batches = draw(st.integers(1, most))
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "wave", "zb-h1", "zb-v"]))
    options = {
        "1f1b": {"slack": draw(st.integers(0, 3))},
        "interleaved": {"stages_per_rank": draw(st.integers(1, 4))},
        "wave": {"waves": draw(st.integers(1, 3)), "paper": draw(st.booleans())},
    }.get(name, {})
    schedule = build(name, ranks, micro_batches, **options)
    return split(schedule) if draw(st.booleans()) else schedule


@st.composite
def programs(draw: st.DrawFn, least_ranks: int = 1, replicas: int = 1) -> Programs:
    """A lowered schedule with units of all modes, one of them shared by the first and the last stage."""
    schedule = draw(schedules(least_ranks=least_ranks, most_ranks=4, most=6))
    tied = draw(st.booleans())
    units = []
    for stage in range(schedule.stages):
        count = draw(st.integers(0 if replicas == 1 else 2, 3))
        reduces = st.sampled_from(["step", "micro-batch"])
        row = [ProgramUnit(f"s{stage}.u{k}", mode=draw(MODES), reduce=draw(reduces)) for k in range(count)]
        if tied and stage in (0, schedule.stages - 1):
            row.append(ProgramUnit("tied"))
        units.append(row)
    names = list(dict.fromkeys(unit.name for row in units for unit in row))
    half = len(names) // 2
    buckets = [ProgramBucket(f"b{i}", tuple(part)) for i, part in enumerate((names[:half], names[half:])) if part]
    return lower(
        schedule,
        units,
        buckets,
        replicas=replicas,
        prefetch=draw(st.integers(0, 3)),
        ahead=draw(st.integers(0, 3)),
        stream=draw(st.sampled_from(["early", "last"])),
    )


times = st.integers(1, 12).map(lambda n: Fraction(n, 4))


@st.composite
def costs(draw: st.DrawFn) -> Costs:
    return Costs(
        forward=draw(times),
        input_grad=draw(times),
        weight_grad=draw(times),
        message=draw(st.sampled_from([0, Fraction(1, 20), Fraction(1, 2), 2])),
        link=draw(st.sampled_from(["private", "edge", "rank"])),
        instruction=draw(st.sampled_from([0, Fraction(1, 50)])),
    )
