"""The synthesizer: its targets, never worse than hand-written schedules, and the parts it is made of."""

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_strategies import costs, few

from fourfold.program import (
    Costs,
    Layer,
    Op,
    Schedule,
    ScheduleError,
    build,
    choose_waves,
    loop,
    search,
    simulate,
    synthesize,
    validate,
    zigzag,
)
from fourfold.program.bounds import lower_bound
from fourfold.program.engine import Problem, peaks, run
from fourfold.program.greedy import Policy, list_schedule, reserves
from fourfold.program.partition import partition
from fourfold.program.synthesis.improve import fuse, improve
from fourfold.program.synthesis.modulo import modulo_schedule
from fourfold.program.synthesis.periodic import find_body
from fourfold.program.waves import first_guess

# ---- the whole ----


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "best"),
    [(4, 4, 12.75), (4, 8, 24.75), (4, 16, 48.75), (8, 8, 25.75), (8, 16, 49.75), (8, 32, 97.75)],
)
def test_four_stages_a_rank_in_the_memory_of_1f1b_are_optimal(ranks, micro_batches, best):
    found = search(ranks, micro_batches, Costs(), ranks, stages_per_rank=4)
    assert found.makespan == best == found.lower_bound
    assert found.gap == 0
    assert "proven optimal" in found.explain()
    validate(found.schedule, memory_cap=ranks)
    timeline = simulate(found.schedule)
    assert timeline.makespan == best
    assert max(timeline.peak_activations) <= ranks


@pytest.mark.parametrize(("ranks", "micro_batches", "most"), [(4, 16, 53.5), (8, 32, 107.5)])
def test_half_the_memory(ranks, micro_batches, most):
    found = search(ranks, micro_batches, Costs(), Fraction(ranks, 2), stages_per_rank=2)
    assert found.makespan <= most
    validate(found.schedule, memory_cap=Fraction(ranks, 2))


def test_a_cost_per_instruction_decides_the_number_of_stages():
    prices = Costs(instruction=Fraction(1, 50))
    free = search(4, 8, prices, 4)
    fixed = [search(4, 8, prices, 4, stages_per_rank=n) for n in (1, 2, 4)]
    assert free.makespan == min(f.makespan for f in fixed)


def test_whole_backwards_are_used_where_they_are_cheaper():
    prices = Costs(backward=Fraction(8, 5))
    found = search(4, 8, prices, 4, stages_per_rank=2)
    kinds = {op.kind for ops in found.schedule.order for op in ops}
    assert "B" in kinds
    assert found.makespan < search(4, 8, prices, 4, stages_per_rank=2, split_backward=True).makespan


HAND = [
    ("1f1b", {}),
    ("zb-h1", {}),
    ("zb-v", {}),
    ("gpipe", {}),
    *(("interleaved", {"stages_per_rank": n}) for n in (2, 4)),
    *(("wave", {"waves": n}) for n in (1, 2)),
]


@settings(deadline=None, max_examples=12)
@given(st.integers(1, 5), st.integers(1, 12), costs(), st.sampled_from([Fraction(1, 2), Fraction(3, 4), 1, 2]))
def test_never_worse_than_a_hand_written_schedule(ranks, micro_batches, prices, share):
    cap = max(1, ranks * share)
    found = search(ranks, micro_batches, prices, cap, evaluations=30)
    validate(found.schedule, memory_cap=cap)
    assert simulate(found.schedule, prices).makespan == found.makespan >= found.lower_bound
    for name, options in HAND:
        timeline = simulate(build(name, ranks, micro_batches, **options), prices)
        if max(timeline.peak_activations) <= cap:
            assert found.makespan <= timeline.makespan


def test_a_small_budget_still_keeps_the_hand_written_schedules():
    prices = Costs(message=Fraction(1, 20))
    best = simulate(build("zb-v", 8, 32), prices).makespan
    assert search(8, 32, prices, 8, stages_per_rank=2, evaluations=12).makespan <= best


def test_messages_and_unequal_costs_are_beaten():
    prices = Costs(input_grad=Fraction(7, 5), weight_grad=Fraction(3, 5), message=Fraction(1, 20))
    best = min(simulate(build(name, 4, 4, **options), prices).makespan for name, options in HAND)
    assert search(4, 4, prices, 4).makespan < Fraction(9, 10) * best


def test_the_same_call_gives_the_same_schedule():
    prices = Costs(message=0.05)
    a, b = (synthesize(4, 6, prices, 4, evaluations=40) for _ in range(2))
    assert a == b
    c = synthesize(4, 6, prices, 4, evaluations=40, seed=1)
    validate(c, memory_cap=4)


def test_many_micro_batches_repeat_a_body():
    few, many = (search(4, n, Costs(message=0.05), 4, stages_per_rank=2, evaluations=32) for n in (16, 200))
    validate(many.schedule, memory_cap=4)
    assert many.makespan - few.makespan <= 184 * 3 * 1.002
    assert many.gap < 0.01


def test_layers_are_balanced_first():
    block = Layer(forward=1, input_grad=1, weight_grad=1, activation=1)
    head = Layer(forward=2, input_grad=2, weight_grad=2, activation=1)
    layers = [Layer(forward=0, input_grad=0, weight_grad=0, activation=1), *[block] * 14, head]
    found = search(4, 8, Costs(), 16, layers=layers, stages_per_rank=2, evaluations=30)
    assert found.layers is not None
    assert sum(found.layers) == 16
    assert min(found.layers) >= 1
    timeline = simulate(found.schedule, found.costs)
    assert max(timeline.work) == 8 * 3 * 4  # 16 units of work over 4 ranks: perfectly even
    assert timeline.makespan == found.makespan


def test_one_rank_and_one_micro_batch():
    assert simulate(synthesize(1, 3)).makespan == 9
    validate(synthesize(3, 1, memory_cap=1), memory_cap=1)
    assert simulate(synthesize(4, 6, split_backward=False)).peak_activations
    assert not synthesize(4, 6, memory_cap=4, split_backward=False, evaluations=10).split


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: synthesize(0, 4), "ranks = 0"),
        (lambda: synthesize(4, 0), "micro_batches = 0"),
        (lambda: synthesize(4, 4, memory_cap=0.5), r"below one micro-batch on rank 0; use at least 1"),
        (lambda: synthesize(4, 4, stages_per_rank=0), "stages_per_rank = 0"),
        (lambda: synthesize(4, 4, stages_per_rank=()), "stages_per_rank is empty"),
        (lambda: synthesize(4, 4, evaluations=0), "evaluations = 0"),
        (lambda: synthesize(4, 4, placements=("ring",)), "choose 'wave' or 'loop'"),
        (lambda: synthesize(4, 4, Costs(forward=(1,) * 5)), r"for \[5\] stages"),
        (
            lambda: synthesize(4, 4, layers=[Layer(forward=1, input_grad=1, weight_grad=1)] * 3),
            "3 layers cannot fill 4",
        ),
        (lambda: Layer(forward=-1, input_grad=1, weight_grad=1), r"layer\.forward = -1"),
    ],
)
def test_bad_input(call, says):
    with pytest.raises(ScheduleError, match=says):
        call()


# ---- its parts ----


@few
@given(st.data(), costs())
def test_list_schedules_never_lock_up_nor_exceed_the_cap(data, prices):
    """Any keys, any reserves of at least one micro-batch a stage, any cap of at least one micro-batch."""
    ranks = data.draw(st.integers(1, 5))
    count = data.draw(st.integers(1, 4))
    placement = data.draw(st.sampled_from([loop, zigzag]))(ranks, count)
    cap = data.draw(st.fractions(1, 2 * ranks))
    total = data.draw(st.integers(1, 10))
    problem = Problem.in_integers(placement, ranks, total, prices, cap)
    size = problem.costs.activation
    reserve = list(reserves(problem, data.draw(st.sampled_from([0, 0.5, 1]))))
    for stages in problem.stages_of:
        assert sum(reserve[s] for s in stages) <= problem.cap
        assert all(reserve[s] >= size[s] for s in stages)
    keys = st.lists(st.integers(-50, 50), min_size=len(placement), max_size=len(placement)).map(tuple)
    policy = Policy(
        forward=data.draw(keys),
        input_grad=data.draw(keys),
        weight_grad=data.draw(keys),
        period=data.draw(st.integers(0, 20)),
        reserve=tuple(reserve),
        whole=data.draw(st.sampled_from([(0, 0), (0, total), (total // 3, total // 2), (total // 2, total)])),
        eager=data.draw(st.booleans()),
        patience=data.draw(st.integers(0, 10)),
    )
    order = list_schedule(problem, policy)
    assert max(peaks(problem, order)) <= problem.cap
    validate(Schedule(tuple(tuple(map(Op._make, ops)) for ops in order), placement, total))


def test_reserves_by_lifetime_stop_early_stages_from_hoarding():
    """The figures in the documentation: the least reserves idle 19 F, those in proportion to lifetimes 6 F."""
    problem = Problem.in_integers(zigzag(8, 4), 8, 32, Costs(message=Fraction(1, 20)), 8)
    idle = {}
    for share in (0, 1):
        policy = Policy.by_time(problem, forward=1, backward=1, lead=0, reserve=share)
        idle[share] = run(problem, list_schedule(problem, policy)).makespan * problem.tick - 96
    assert round(idle[0]) == 19
    assert round(idle[1]) == 6


def test_greedy_without_reserves_would_lock_up():
    """Reserves of nothing: young micro-batches fill the ranks, and the search's own assertion fires."""
    problem = Problem.in_integers(zigzag(4, 4), 4, 16, Costs(message=Fraction(1, 20)), 4)
    policy = Policy.by_time(problem, forward=1, backward=1, lead=0, reserve=1)
    list_schedule(problem, policy)
    with pytest.raises(AssertionError, match="cannot deadlock"):
        list_schedule(problem, Policy(**{**vars(policy), "reserve": (0,) * 16}))


@pytest.mark.parametrize(
    "prices",
    [Costs(forward=2), Costs(forward=2, message=0.5), Costs(forward=2, input_grad=3)],
    ids=["forward", "message", "backward"],
)
@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("unroll", [1, 2, 3, 4])
def test_modulo_schedules_are_complete(unroll, split, prices):
    """Not every placement finds room for all ops: some do, and those are whole schedules."""
    problem = Problem.in_integers(zigzag(3, 2), 3, 9, prices)
    tries = [(random.Random(seed), delay) for seed in range(20) for delay in (0, 0.1, 0.3)]
    orders = [modulo_schedule(problem, rng, unroll=unroll, delay=delay, split=split) for rng, delay in tries]
    found = [order for order in orders if order is not None]
    assert found
    for order in found:
        validate(Schedule(tuple(tuple(map(Op._make, ops)) for ops in order), problem.placement, 9))


def test_modulo_schedules_take_micro_batches_in_order():
    """Also where, with several of them in a period, one overtook another."""
    problem = Problem.in_integers(zigzag(3, 2), 3, 9, Costs(forward=2, input_grad=3, weight_grad=1))
    orders = [modulo_schedule(problem, random.Random(seed), unroll=3, delay=0.3) for seed in range(60)]
    assert any(orders)
    for order in orders:
        for ops in order or []:
            for key in {op[:2] for op in ops}:
                assert [m for *other, m in ops if tuple(other) == key] == list(range(9))


def test_modulo_scheduling_needs_little_memory():
    problem = Problem.in_integers(zigzag(4, 2), 4, 16, Costs())
    order = modulo_schedule(problem, random.Random(0), unroll=1)
    assert order is not None
    assert max(peaks(problem, order)) == 4
    assert run(problem, order).makespan == 107  # ticks of 1/2: the 53.5 of half the memory


@few
@given(st.integers(1, 4), st.integers(1, 8), costs(), st.integers(0, 9))
def test_improved_orders_are_valid(ranks, micro_batches, prices, seed):
    schedule = build("zb-v", ranks, micro_batches)
    problem = Problem.in_integers(schedule.placement, ranks, micro_batches, prices, ranks)
    order, _ = improve(problem, schedule.order, random.Random(seed), 40)
    better = Schedule(tuple(tuple(map(Op._make, ops)) for ops in order), schedule.placement, micro_batches)
    validate(better, memory_cap=ranks)
    assert simulate(better, prices).makespan <= simulate(schedule, prices).makespan
    for stage in range(schedule.stages):  # gradients accumulate in the order of the micro-batches
        taken = [
            op.micro_batch for op in better.order[schedule.placement[stage]] if op.stage == stage and op.kind == "W"
        ]
        assert taken == list(range(micro_batches))


def test_improvement_only_improves():
    problem = Problem.in_integers(zigzag(4, 2), 4, 8, Costs(input_grad=1.4, weight_grad=0.6, message=0.05), 4)
    before = build("zb-v", 4, 8).order
    after, timed = improve(problem, before, random.Random(0), 300)
    assert 0 < timed <= 300
    assert run(problem, after).makespan < run(problem, before).makespan
    assert max(peaks(problem, after)) <= problem.cap
    assert sorted(op for ops in after for op in ops) == sorted(op for ops in before for op in ops)


def test_fusing_keeps_the_length_without_and_saves_time_with_fixed_costs():
    schedule = build("zb-v", 4, 8)
    for tax in (0, Fraction(1, 50)):
        problem = Problem.in_integers(schedule.placement, 4, 8, Costs(instruction=tax), 4)
        order = fuse(problem, schedule.order)
        assert any(op[1] == "B" for ops in order for op in ops)
        before, after = run(problem, schedule.order).makespan, run(problem, order).makespan
        assert after < before if tax else after <= before


def test_a_body_can_be_repeated():
    schedule = build("zb-v", 4, 16)
    problem = Problem.in_integers(schedule.placement, 4, 16, Costs(), 4)
    body = find_body(problem, schedule.order)
    assert body is not None
    assert body.stride == 1
    longer = body.extended(24)
    bigger = Problem.in_integers(schedule.placement, 4, 40, Costs(), 4)
    assert max(peaks(bigger, longer)) <= bigger.cap
    assert run(bigger, longer).makespan == run(bigger, build("zb-v", 4, 40).order).makespan
    assert body.extended(0) == [list(ops) for ops in schedule.order]


def test_no_body_where_nothing_repeats():
    schedule = build("gpipe", 4, 8)
    problem = Problem.in_integers(schedule.placement, 4, 8, Costs())
    assert find_body(problem, schedule.order) is None


def test_no_body_where_micro_batches_are_out_of_order():
    rows = [[Op(r, k, m ^ 1) for m in range(16) for k in "FIW"] for r in range(2)]
    problem = Problem.in_integers(loop(2, 1), 2, 16, Costs())
    assert not run(problem, rows).stuck
    assert find_body(problem, rows) is None


@few
@given(st.lists(st.integers(0, 9), min_size=8, max_size=16), st.sampled_from([loop, zigzag]))
def test_partition_is_at_least_as_good_as_even(work, place):
    placement = place(4, 2)
    counts = partition(work, placement)
    assert sum(counts) == len(work)
    assert min(counts) >= 1
    even = [len(work) * (s + 1) // 8 - len(work) * s // 8 for s in range(8)]
    assert max(_loads(work, counts, placement)) <= max(_loads(work, even, placement))


def test_partition_of_a_heavy_head():
    counts = partition([1] * 15 + [4], loop(4, 1))
    assert counts == (5, 5, 5, 1) or max(_loads([1] * 15 + [4], counts, loop(4, 1))) == 5


def _loads(work, counts, placement):
    loads, at = [0] * 4, 0
    for count, rank in zip(counts, placement, strict=True):
        loads[rank] += sum(work[at : at + count])
        at += count
    return loads


def test_the_cap_raises_the_lower_bound():
    free, capped = (Problem.in_integers(zigzag(4, 2), 4, 16, Costs(), cap) for cap in (None, 2))
    assert lower_bound(free) * free.tick == 49.5
    assert lower_bound(capped) * capped.tick == 51.5


@pytest.mark.parametrize(("message", "waves"), [(0.02, 5), (0.05, 3), (0.1, 2)])
def test_the_number_of_waves(message, waves):
    prices = Costs(message=message)
    assert round(first_guess(8, 8, prices)) == waves  # sqrt(T_B / 4 T_C), whatever the number of ranks
    chosen = choose_waves(8, 8, prices)
    times = {w: simulate(build("wave", 8, 8, waves=w), prices).makespan for w in range(1, 9)}
    assert times[chosen] == min(times.values())
    assert choose_waves(8, 8, prices, most=2) == 2
    assert choose_waves(8, 8, Costs(), most=6) == 6
    assert choose_waves(8, 8, Costs(message=message, instruction=0.5)) <= chosen


def test_waves_are_searched_beyond_the_formula():
    prices = Costs(message=0.1)
    assert round(first_guess(4, 16, prices)) == 2
    times = {w: simulate(build("wave", 4, 16, waves=w), prices).makespan for w in range(1, 9)}
    assert choose_waves(4, 16, prices) == min(times, key=lambda w: times[w]) == 1


def test_no_number_of_waves_fits():
    with pytest.raises(ScheduleError, match="use a cap of at least 4"):
        choose_waves(4, 8, Costs(), memory_cap=2)
    with pytest.raises(ScheduleError, match="single numbers"):
        choose_waves(2, 2, Costs(input_grad=(1, 1)))
