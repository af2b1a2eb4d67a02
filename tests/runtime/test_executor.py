"""Every schedule, both executors: the bits of one process."""

from __future__ import annotations

import random
import time
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.errors import RankFailure
from fourfold.program import Op, Programs, Schedule, build, forward_only, lower
from fourfold.testing.threads import Mail, run_threads
from tests.runtime.chains import Data, lowered, make_executor, run_rank, serial

reference = cache(serial)

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("gpipe", {}),
    ("1f1b", {}),
    ("1f1b", {"slack": 2}),
    ("interleaved", {"stages_per_rank": 2}),
    ("interleaved", {"stages_per_rank": 3}),
    ("wave", {"waves": 1}),
    ("wave", {"waves": 2}),
    ("zb-h1", {}),
    ("zb-v", {}),
]


def check(schedule: Schedule, **how: Any) -> list[list[str]]:
    """Run on threads and compare with one process, bit for bit; returns the orders of ops."""
    programs = lowered(schedule)
    results = run_threads(lambda rank, ranks, mail: run_rank(rank, mail.of(rank), programs, **how), schedule.ranks)
    losses, grads = reference(schedule.stages, schedule.micro_batches)
    found: dict[str, Tensor] = {}
    for _, mine, _, _ in results:
        found |= mine
    assert [loss for result in results for loss in result[0]] == losses
    assert found.keys() == grads.keys()
    for name, grad in grads.items():
        assert torch.equal(found[name], grad), name
    return [order for _, _, order, _ in results]


@pytest.mark.parametrize(
    ("name", "options"), KINDS, ids=lambda k: k if isinstance(k, str) else "-".join(map(str, k.values()))
)
@pytest.mark.parametrize("driven", [False, True], ids=["ordered", "driven"])
def test_gradients_equal_serial(name: str, options: dict[str, Any], driven: bool) -> None:
    from fourfold.program import fused, split

    for ranks in (1, 2, 3, 4):
        for micro_batches in sorted({1, max(1, ranks - 1), ranks, ranks + 1, 2 * ranks}):
            schedule = build(name, ranks, micro_batches, **options)
            for variant in {schedule, fused(schedule), split(schedule)}:
                check(variant, driven=driven)


def test_any_timing_gives_one_set_of_bits_and_more_than_one_order() -> None:
    schedule = build("wave", 3, 6, waves=1)
    programs = lowered(schedule)

    def one(rank: int, ranks: int, mail: Mail, seed: int) -> Any:
        chance = random.Random(1000 * seed + rank)

        def jitter(op: str) -> None:
            time.sleep(chance.choice((0, 0, 0.001, 0.003)))

        return run_rank(rank, mail.of(rank), programs, driven=True, slack=2, watch=jitter)

    orders = set()
    for seed in range(20):
        results = run_threads(one, 3, seed)
        grads: dict[str, Tensor] = {}
        for _, mine, _, _ in results:
            grads |= mine
        orders.add(tuple(tuple(order) for _, _, order, _ in results))
        for name, grad in reference(schedule.stages, 6)[1].items():
            assert torch.equal(grads[name], grad)
    assert len(orders) > 1


def test_caps_hold_and_slack_raises_them() -> None:
    """No stage ever has more micro-batches in flight than its cap."""
    schedule = build("1f1b", 4, 12)
    for slack in (0, 2):
        orders = check(schedule, driven=True, slack=slack)
        for rank, order in enumerate(orders):
            flying, most = 0, 0
            for op in map(Op.parse, order):
                flying += 1 if op.kind == "F" else -1
                most = max(most, flying)
            assert most <= min(12, 4 - rank + slack)


def test_a_driven_run_can_be_replayed_as_a_program() -> None:
    schedule = build("zb-v", 3, 5)
    orders = check(schedule, driven=True, slack=1)
    replay = Schedule.of([[Op.parse(op) for op in order] for order in orders])
    assert replay.placement == schedule.placement
    assert check(replay) == orders


@pytest.mark.parametrize(
    ("name", "options"), KINDS, ids=lambda k: k if isinstance(k, str) else "-".join(map(str, k.values()))
)
def test_evaluation_on_any_placement(name: str, options: dict[str, Any]) -> None:
    for ranks in (1, 2, 4):
        schedule = forward_only(build(name, ranks, 1, **options).placement, 3)
        results = run_threads(_evaluate, ranks, lower(schedule))
        found = {m: loss.item() for outputs in results for m, loss in outputs.items()}
        assert [found[m] for m in range(3)] == reference(schedule.stages, 3)[0]


def _evaluate(rank: int, ranks: int, mail: Mail, programs: Programs) -> Any:
    executor = make_executor(programs, rank, mail.of(rank), split=False)
    return executor.run(programs.of(rank), Data(3), evaluate=True)


def test_a_failing_rank_ends_the_others_and_names_the_instruction() -> None:
    programs = lowered(build("1f1b", 3, 4))

    def one(rank: int, ranks: int, mail: Mail) -> Any:
        def break_down(op: str) -> None:
            if op == "1B2":
                raise ValueError("out of luck")

        return run_rank(rank, mail.of(rank), programs, watch=break_down)

    with pytest.raises(RankFailure, match=r"(?s)rank 1 failed first.*ValueError: out of luck\nin instruction 1B2"):
        run_threads(one, 3)


def test_a_wait_has_a_timeout_that_names_what_is_waited_for() -> None:
    programs = lowered(build("1f1b", 2, 2))

    def one(rank: int, ranks: int, mail: Mail) -> Any:
        if rank == 0:
            time.sleep(1.0)
            return None
        return run_rank(rank, mail.of(rank), programs)

    with pytest.raises(
        RankFailure, match="1F0: timed out after 0 s waiting for the activation of stage 0, micro-batch 0"
    ):
        run_threads(one, 2, timeout=0.2)
