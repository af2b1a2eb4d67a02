"""Add a schedule of one's own in ten lines, prove it, time it, and see it.

python examples/own_schedule.py
"""

from fourfold.program import Costs, Op, Schedule, build, register, simulate, validate
from fourfold.view.timeline import show_timeline


@register("two-by-two")
def two_by_two(ranks: int, micro_batches: int) -> Schedule:
    """1F1B in steps of two: two forwards, two backwards."""
    rows = []
    for rank in range(ranks):
        forwards = [Op(rank, "F", m) for m in range(micro_batches)]
        backwards = [Op(rank, "B", m) for m in range(micro_batches)]
        row = [forwards.pop(0) for _ in range(min(2 * (ranks - rank), micro_batches))]
        while backwards:
            row += backwards[:2] + forwards[:2]
            backwards, forwards = backwards[2:], forwards[2:]
        rows.append(row)
    return Schedule.of(rows)


if __name__ == "__main__":
    schedule = build("two-by-two", ranks=4, micro_batches=8)
    validate(schedule, memory_cap=8)
    show_timeline(schedule.name, simulate(schedule, Costs(message=0.1)))
    plain = simulate(build("1f1b", 4, 8), Costs(message=0.1))
    print(f"1f1b takes {plain.makespan:g} and holds {max(plain.peak_activations)} micro-batches")
