"""The ledger: every collective against bytes counted by hand."""

from __future__ import annotations

import copy
import io
import itertools
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import rich.console
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fourfold.collectives import all_gather, reduce_scatter
from fourfold.testing import ledger as ledger_module
from fourfold.testing.ledger import Ledger, received_bytes
from fourfold.testing.ranks import run_ranks

N = 3  # ranks; deliberately not a power of two
S = 4  # bytes of a float32


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype)


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def unevenly(rank: int) -> None:
    """Everyone sends r + 1 rows to rank r."""
    rows = [r + 1 for r in range(N)]
    dist.all_to_all_single(ones(N * (rank + 1), 5), ones(sum(rows), 5), [rank + 1] * N, rows)


def parts() -> list[Tensor]:
    return [ones(2) for _ in range(N)]


def around(rank: int) -> None:
    """A ring of messages: to the next rank, from the one before."""
    works = [dist.irecv(ones(7), (rank - 1) % N), dist.isend(ones(7), (rank + 1) % N)]
    for work in works:
        work.wait()


def to_first(rank: int) -> None:
    """Everyone sends to rank 0, which takes whatever comes."""
    if rank == 0:
        for _ in range(N - 1):
            dist.recv(ones(7))
    else:
        dist.send(ones(7), 0)


# name, what to call, kind, then by hand: calls, payload and received bytes on each rank
CASES: list[tuple[str, Callable[[int], Any], str, list[int], list[int], list[float]]] = [
    ("all-reduce", lambda r: dist.all_reduce(ones(6)), "all_reduce", [1] * N, [24] * N, [32] * N),
    ("uneven all-reduce", lambda r: dist.all_reduce(ones(5)), "all_reduce", [1] * N, [20] * N, [80 / 3] * N),
    (
        "asynchronous",
        lambda r: dist.all_reduce(ones(6), async_op=True).wait(),  # type: ignore[union-attr]
        "all_reduce",
        [1] * N,
        [24] * N,
        [32] * N,
    ),
    (
        "half precision",
        lambda r: dist.all_reduce(ones(6, dtype=torch.bfloat16)),
        "all_reduce",
        [1] * N,
        [12] * N,
        [16] * N,
    ),
    (
        "gather one",
        lambda r: all_gather(ones(6), ones(2), world(), "it").wait(),
        "all_gather",
        [1] * N,
        [24] * N,
        [16] * N,
    ),
    (
        "gather list",
        lambda r: dist.all_gather(parts(), ones(2)),
        "all_gather",
        [1] * N,
        [24] * N,
        [16] * N,
    ),
    (
        "scatter sum",
        lambda r: reduce_scatter(ones(2), ones(6), world(), "it").wait(),
        "reduce_scatter",
        [1] * N,
        [24] * N,
        [16] * N,
    ),
    (
        "scatter sum of a list",
        lambda r: dist.reduce_scatter(ones(2), parts()),
        "reduce_scatter",
        [1] * N,
        [24] * N,
        [16] * N,
    ),
    ("broadcast", lambda r: dist.broadcast(ones(6), 1), "broadcast", [1] * N, [24] * N, [24, 0, 24]),
    ("reduce", lambda r: dist.reduce(ones(6), 1), "reduce", [1] * N, [24] * N, [24, 24, 0]),
    (
        "gather",
        lambda r: dist.gather(ones(2), parts() if r == 1 else None, 1),
        "gather",
        [1] * N,
        [24] * N,
        [0, 16, 0],
    ),
    (
        "scatter",
        lambda r: dist.scatter(ones(2), parts() if r == 1 else None, 1),
        "scatter",
        [1] * N,
        [24] * N,
        [8, 0, 8],
    ),
    ("all-to-all", lambda r: dist.all_to_all_single(ones(6), ones(6)), "all_to_all", [1] * N, [24] * N, [16] * N),
    (
        "uneven all-to-all",
        unevenly,
        "all_to_all",
        [1] * N,
        [60, 120, 180],  # N parts of (rank + 1) rows of 20 bytes
        [40, 80, 120],
    ),
    ("all-to-all of lists", lambda r: dist.all_to_all(parts(), parts()), "all_to_all", [1] * N, [24] * N, [16] * N),
    ("send", around, "send", [1] * N, [28] * N, [0] * N),
    ("recv", around, "recv", [1] * N, [28] * N, [28] * N),
    ("recv from anyone", to_first, "recv_any_source", [2, 0, 0], [56, 0, 0], [56, 0, 0]),
    ("barrier", lambda r: dist.barrier(), "barrier", [1] * N, [0] * N, [0] * N),
    # objects travel as collectives on bytes: first the size (8 bytes), then the pickle (5 bytes for a small number)
    ("object", lambda r: dist.broadcast_object_list([1], 1), "broadcast", [2] * N, [13] * N, [13, 0, 13]),
    ("objects", lambda r: dist.all_gather_object([None] * N, 1), "all_gather", [2] * N, [39] * N, [26] * N),
    (
        "objects to one",
        lambda r: dist.gather_object(1, [None] * N if r == 1 else None, 1),
        "gather",
        [1] * N,
        [15] * N,
        [0, 10, 0],
    ),
    (
        "objects from one",
        lambda r: dist.scatter_object_list([None], [1] * N if r == 1 else None, 1),
        "scatter",
        [2] * N,
        [39] * N,
        [13, 0, 13],
    ),
]


def issue(rank: int, ranks: int) -> dict[str, tuple[int, int, float]]:
    found = {}
    for name, call, kind, *_ in CASES:
        with Ledger() as ledger:
            try:
                call(rank)
            except RuntimeError as e:
                if "does not support" not in str(e):
                    raise
                continue  # gloo has no all-to-all of lists before torch 2.13
        found[name] = (ledger.calls(kind), ledger.bytes(kind), ledger.received_bytes(kind))
        if kind not in ("send", "recv") and "object" not in name:
            assert ledger.calls() == ledger.calls(kind) + ledger.calls("send")
        assert {entry.ranks for entry in ledger.entries} <= {ranks}
    return found


def differences(found: list[dict[str, tuple[int, int, float]]]) -> list[str]:
    """The cases whose bytes are not those counted by hand."""
    return [
        f"{name} on rank {rank}: {found[rank][name]} by the ledger, {by_hand} by hand"
        for name, _, _, *columns in CASES
        for rank, by_hand in enumerate(zip(*columns, strict=True))
        if name in found[rank] and found[rank][name] != by_hand
    ]


def test_every_collective_equals_the_bytes_counted_by_hand() -> None:
    found = run_ranks(issue, N)
    assert differences(found) == []
    assert len(found[0]) >= len(CASES) - 1


@pytest.mark.parametrize("op", ["c10d::_allgather_base_", "c10d::broadcast_"])
def test_a_wrong_table_is_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: read one op wrongly (no part is its own, or another kind) and it names the case."""
    wrong = {"c10d::_allgather_base_": ("all_gather", "output_tensor", ""), "c10d::broadcast_": ("broadcast", "", "")}
    monkeypatch.setitem(ledger_module._OPS, op, ledger_module._CollectiveOp(*wrong[op]))
    found = differences(run_ranks(issue, N))
    assert found
    assert all("gather one" in text or "broadcast" in text or "object" in text for text in found)


def test_totals_over_ranks_are_conserved() -> None:
    """Whatever the root, a collective moves the same bytes in all: the formulas agree with each other."""
    for n, root in itertools.product(range(1, 9), range(8)):
        places = [(rank - root) % n for rank in range(n)]
        whole = 24 * n

        def total(kind: str, *, n: int = n, whole: int = whole, places: list[int] = places) -> Fraction:
            each = [received_bytes(kind, ranks=n, whole=whole, mine=24, after_root=p) for p in places]
            return sum(each, Fraction(0))

        assert total("broadcast") == total("reduce") == (n - 1) * whole
        assert total("gather") == total("scatter") == (n - 1) * 24
        assert total("all_gather") == total("reduce_scatter") == (n - 1) * whole
        assert total("all_reduce") == total("reduce_scatter") + total("all_gather")
        assert total("send") == total("barrier") == 0
    with pytest.raises(ValueError, match="unknown collective 'all_recude'"):
        received_bytes("all_recude", ranks=2, whole=1)


def in_threads(rank: int, ranks: int) -> Any:
    ledger, unseen = Ledger(), Ledger()

    def receive() -> None:
        with ledger:
            dist.recv(ones(5), 1 - rank)

    with ledger, unseen:
        thread = threading.Thread(target=receive)
        thread.start()
        with ledger:  # inside already: nothing is counted twice
            dist.isend(ones(5), 1 - rank).wait()
        thread.join()
    dist.all_reduce(ones(1))  # outside
    return [(e.kind, e.payload) for e in ledger.entries], [(e.kind, e.payload) for e in unseen.entries]


def test_a_thread_is_counted_when_it_enters() -> None:
    for seen, unseen in run_ranks(in_threads, 2):
        assert sorted(seen) == [("recv", 20), ("send", 20)]
        assert unseen == [("send", 20)]


def as_others_do(rank: int, ranks: int) -> Any:
    """What torch's own layers issue: DDP's buckets, DTensor's functional collectives, sub-groups."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = nn.parallel.DistributedDataParallel(nn.Linear(6, 4))
    with Ledger() as ledger:
        model(ones(2, 6)).sum().backward()
        ddp = ledger.bytes("all_reduce")
        ledger.clear()
        x = distribute_tensor(ones(4, 4), init_device_mesh("cpu", (ranks,)), [Shard(0)])
        ledger.clear()
        assert (x @ x).full_tensor().sum() == 4**3
        dtensor = ledger.rows()
        ledger.clear()
        pair = dist.new_group([0, 1])
        dist.barrier()
        if rank < 2:
            dist.all_reduce(ones(6), group=pair)
            assert ledger.calls(group=pair) == 1
        rows = [row for row in ledger.rows() if row["kind"] == "all_reduce"]
    console = rich.console.Console(width=100, record=True, file=io.StringIO())
    console.print(ledger)
    return ddp, dtensor, rows, console.export_text()


def test_ddp_dtensor_and_sub_groups() -> None:
    answers = run_ranks(as_others_do, 4)
    for rank, (ddp, dtensor, rows, text) in enumerate(answers):
        assert ddp == (6 * 4 + 4) * S
        # the second factor is gathered for the product (64 bytes, a quarter its own), then the result
        assert dtensor == [{"kind": "all_gather", "ranks": 4, "calls": 2, "bytes": 128, "received": 96.0}]
        if rank < 2:
            assert rows == [{"kind": "all_reduce", "ranks": 2, "calls": 1, "bytes": 24, "received": 24.0}]
            assert "all_reduce" in text
        assert "barrier" in text


def test_an_unknown_op_is_not_left_out_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = copy.copy(ledger_module._OPS)
    del fewer["c10d::allreduce_"]
    monkeypatch.setattr(ledger_module, "_OPS", fewer)

    def one(rank: int, ranks: int) -> None:
        with Ledger(), pytest.raises(NotImplementedError, match="c10d::allreduce_ is not in the ledger's table"):
            dist.all_reduce(ones(1))

    run_ranks(one, 1)
