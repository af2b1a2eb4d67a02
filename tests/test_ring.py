"""Ring collectives: right for any number of ranks, size and type; ordered, concurrent, counted; a failure names its rank."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fourfold import collectives as c
from fourfold import ring
from fourfold.errors import CommunicationError
from fourfold.testing.ledger import Ledger
from fourfold.testing.network import Network, measure, missing
from fourfold.testing.ranks import run_ranks

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOURFOLD_COLLECTIVES", "ring")


def numbers(seed: int, n: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, whose sums are exact in every type."""
    return torch.randint(-8, 8, (n,), generator=torch.Generator().manual_seed(seed)).to(dtype)


def right(rank: int, ranks: int, rounds: int) -> int:
    group, draw = world(), random.Random(0)
    for k in range(rounds):
        dtype, n = draw.choice(DTYPES), draw.choice([1, 2, 3, 17, 1000, 33_333, 100_000])
        mine = [numbers(100 * k + r, n, dtype) for r in range(ranks)]
        wide = [numbers(100 * k + 50 + r, ranks * n, dtype) for r in range(ranks)]
        root = draw.randrange(ranks)
        assert torch.equal(c.gathered(mine[rank], group, "a gather"), torch.cat(mine))
        assert torch.equal(c.scattered(wide[rank], group, "a scatter"), sum(wide).chunk(ranks)[rank])  # type: ignore[union-attr]
        assert torch.equal(c.summed(wide[rank], group, "a sum"), sum(wide))  # type: ignore[arg-type]
        assert torch.equal(c.summed(mine[rank], group, "an odd sum"), sum(mine))  # type: ignore[arg-type]
        assert torch.equal(c.broadcasted(wide[rank], root, group, "a broadcast"), wide[root])
        total = c.reduced(wide[rank], root, group, "a reduction")
        assert rank != root or torch.equal(total, sum(wide))  # type: ignore[arg-type]
        sent = torch.cat([w.chunk(ranks)[rank] for w in wide])
        assert torch.equal(c.exchanged(wide[rank], group, "an exchange"), sent)
        assert torch.equal(wide[rank], numbers(100 * k + 50 + rank, ranks * n, dtype)), "an input was changed"
    return len([t for t in threading.enumerate() if t.name.startswith("collectives of")])


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_every_size_and_type(ranks: int, always: None) -> None:
    assert run_ranks(right, ranks, 12 if ranks < 5 else 6) == [1] * ranks


def test_parts_that_do_not_all_fit_beside_the_input(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "ROOM", 0)  # three parts at a time, of seven
    run_ranks(right, 8, 3)


def same_bits(rank: int, ranks: int) -> Any:
    found = []
    for requested in ("ring", "ring", "gloo"):
        os.environ["FOURFOLD_COLLECTIVES"] = requested
        x = torch.randn(50_001, generator=torch.Generator().manual_seed(rank))
        whole = torch.randn(ranks, 9_999, generator=torch.Generator().manual_seed(rank))
        found.append((c.summed(x, world(), "a sum"), c.scattered(whole, world(), "a scatter")))
    (first, part), (again, same_part), (gloo, gloo_part) = found
    assert torch.equal(first, again)
    assert torch.equal(part, same_part)
    assert torch.allclose(first, gloo, rtol=1e-5, atol=1e-5)
    assert torch.allclose(part, gloo_part, rtol=1e-5, atol=1e-5)
    return first.sum(dtype=torch.float64).item(), first[::997].tolist()


def test_sums_have_the_same_bits_on_all_ranks_and_in_every_run() -> None:
    everyone = run_ranks(same_bits, 4)
    assert all(x == everyone[0] for x in everyone)


def in_flight(rank: int, ranks: int) -> None:
    groups = [world(), dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([3, 1, 2, 0])]
    mine = [g for g in groups if g != dist.GroupMember.NON_GROUP_MEMBER]
    draw, started = random.Random(0), []
    for k in range(40):
        group = mine[draw.randrange(len(mine))] if k % 2 else mine[k // 2 % len(mine)]
        n = group.size() * draw.choice([5, 5000])
        members = dist.get_process_group_ranks(group)
        wide = {r: numbers(1000 * k + r, n, torch.float32) for r in members}
        total = torch.stack(list(wide.values())).sum(0)
        if k % 3 == 0:
            started.append((c.all_reduce(wide[rank], group, f"sum {k}"), wide[rank], total))
        elif k % 3 == 1:
            out = torch.empty(n // group.size())
            pending = c.reduce_scatter(out, wide[rank], group, f"scatter {k}")
            started.append((pending, out, total.chunk(group.size())[group.rank()]))
        else:
            out = torch.empty(n)
            part = total.chunk(group.size())[group.rank()]
            started.append((c.all_gather(out, part, group, f"gather {k}"), out, total))
        if k % 5 == 0:  # a message of someone else's on the same group
            to, away = members[(group.rank() + 1) % group.size()], members[group.rank() - 1]
            note, back = torch.tensor([float(k)]), torch.zeros(1)
            works = [dist.irecv(back, away, group=group), dist.isend(note, to, group=group)]
            for work in works:
                work.wait()
            assert back.item() == k
    for pending, out, expected in reversed(started):
        pending.wait()
        pending.wait()  # once more changes nothing
        assert torch.equal(out, expected)


def test_many_in_flight_in_several_groups(always: None) -> None:
    run_ranks(in_flight, 4)


def silent_peer(rank: int, ranks: int, leaves: bool) -> tuple[str, str, float]:
    c.all_reduce(torch.ones(90_000), world(), "a first sum").wait()
    if rank == 2:
        if leaves:
            dist.destroy_process_group()
        time.sleep(1.9)
        return "", "", 0.0
    began, errors = time.monotonic(), []
    for what in ("the parameters of blocks.7", "what follows"):
        with pytest.raises(CommunicationError) as info:
            c.all_gather(torch.empty(400_000), torch.ones(100_000), world(), what).wait()
        errors.append(str(info.value))
    return errors[0], errors[1], time.monotonic() - began


@pytest.mark.parametrize("leaves", [True, False], ids=["left", "hangs"])
def test_a_silent_peer_is_named(leaves: bool) -> None:
    found = run_ranks(silent_peer, 4, leaves, group_timeout=1.0)
    after, following, _ = found[3]  # receives from rank 2
    assert "failed waiting for the parameters of blocks.7" in after
    assert "from rank 2" in after
    assert following == after, "the lane has failed, and says why"
    assert all(took < 1.8 for *_, took in found), "within the group's timeout"
    assert all("blocks.7" in first for first, *_ in found[:2])


def ledgers(rank: int, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for requested in ("gloo", "ring"):
        os.environ["FOURFOLD_COLLECTIVES"] = requested
        with Ledger() as ledger:
            x = torch.ones(ranks, 1001)
            c.gathered(x, world(), "a gather")
            c.scattered(x, world(), "a scatter")
            c.summed(x, world(), "a sum")
            c.broadcasted(x, 1, world(), "a broadcast")
            c.reduced(x, 1, world(), "a reduction")
            c.exchanged(x, world(), "an exchange")
            c.summed(x, world(), "a maximum", "max")
        found[requested] = ledger.entries
    return found


def test_the_ledger_counts_rings_as_collectives() -> None:
    for found in run_ranks(ledgers, 3):
        assert len(found["ring"]) == 7
        assert found["ring"] == found["gloo"]


def served(rank: int, ranks: int) -> tuple[int, int]:
    def threads() -> int:
        return sum(t.name.startswith("collectives of") for t in threading.enumerate())

    c.summed(torch.ones(ring.SMALLEST // 4 - 1), world(), "a small sum")
    with torch.inference_mode():
        c.summed(torch.zeros(0), world(), "nothing")
    small = threads()
    group = dist.new_group([0, 1])
    x = torch.ones(ring.SMALLEST // 4, requires_grad=True)
    out = c.summed(x, group, "a large sum")
    assert not out.requires_grad or out.sum().item() == 2 * x.numel()
    with torch.inference_mode():
        c.summed(torch.ones_like(x), group, "a sum without a record")
    assert threads() == small + 1
    dist.destroy_process_group(group)
    del group
    gc.collect()
    until = time.monotonic() + 5
    while threads() > small and time.monotonic() < until:
        time.sleep(0.01)
    return small, threads()


def test_small_tensors_stay_with_gloo_and_a_lane_ends_with_its_group() -> None:
    assert run_ranks(served, 2) == [(0, 0), (0, 0)]


def lanes(rank: int, ranks: int) -> tuple[bool, bool]:
    x = torch.ones(ring.SMALLEST)
    c.all_reduce(x, world(), "a sum").wait()
    assert x.eq(ranks).all()
    return ring.lane_for(world(), x) is not None, ring.lane_for(world(), x, overlapped=True) is not None


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_beside_computing_are_gloos_where_it_moves_no_more(ranks: int) -> None:
    assert run_ranks(lanes, ranks) == [(True, ranks == 2)] * ranks


def moved(rank: int, ranks: int) -> dict[tuple[str, str], float]:
    """Bytes through the busiest interface, over the ledger's: the least of three, as TCP may send a packet again."""
    found: dict[tuple[str, str], float] = {}
    whole, mine = torch.ones(1 << 18), torch.ones((1 << 18) // ranks)
    for requested in ("ring", "gloo"):
        os.environ["FOURFOLD_COLLECTIVES"] = requested
        calls = {
            "all_gather": lambda: c.all_gather(whole, mine, world(), "a gather").wait(),
            "reduce_scatter": lambda: c.reduce_scatter(mine, whole, world(), "a scatter").wait(),
            "all_reduce": lambda: c.all_reduce(whole, world(), "a sum").wait(),
            "broadcast": lambda: c.broadcast(whole, 1, world(), "a broadcast").wait(),
            "reduce": lambda: c.reduce(whole, 1, world(), "a reduction").wait(),
        }
        for kind, call in calls.items():
            with Ledger() as ledger:
                call()
            seen = min(max(m.received, m.sent) for m in (measure(call) for _ in range(3)))
            needed = torch.tensor([ledger.received])
            dist.all_reduce(needed, op=dist.ReduceOp.MAX)
            found[requested, kind] = seen / needed.item()
    return found


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_no_byte_is_moved_twice() -> None:
    with Network(hosts=4, rate="1gbit") as net:
        found = net.run_ranks(moved)[0]
    assert {
        kind: ratio for (requested, kind), ratio in found.items() if requested == "ring" and not 1 <= ratio < 1.03
    } == {}
    assert found["gloo", "reduce_scatter"] > 1.9
    assert found["gloo", "broadcast"] > 1.9
