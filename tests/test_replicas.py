"""Replicas are compared bit by bit: no false alarm under any plan, and a changed bit is found, named and never saved."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.config import Config
from fourfold.errors import ConfigError, RankFailure
from fourfold.piece import whole
from fourfold.plan import Plan
from fourfold.shard.tied import TiedCopy
from fourfold.supervision.compare_replicas import Hashed, _class_of, differing, explain, hash_box
from fourfold.testing.ranks import run_ranks
from fourfold.train.rundir import RunDir, read_metrics
from fourfold.train.worker import fit
from tests.helpers import MODELS, make_config

LLAMA = MODELS["llama"] | {"heads": 6, "kv_heads": 3}
ZERO3 = [{"match": "*", "mode": "zero3"}]

# model, ranks, plan, the fault, what is said of it
PLANS: dict[str, tuple[str | dict[str, Any], int, dict[str, Any], str, str]] = {
    "data": ("gpt", 3, {"mesh": {"data": 3}}, "rank=1", "rank 1 has other bits than ranks 0, 2"),
    "two copies": ("gpt", 2, {"mesh": {"data": 2}}, "rank=0 name=mlp", "rank 0 and rank 1 have different bits"),
    "bf16, host state": (
        "gpt",
        2,
        {"mesh": {"data": 2}, "precision": {"compute": "bf16"}, "memory": {"optimizer": "host"}},
        "rank=1 name=qkv",
        "blocks.0.attn.qkv.weight differ",
    ),
    "bf16": ("bert", 3, {"mesh": {"data": 3}, "precision": {"compute": "bf16"}}, "rank=2", "rank 2 has other bits"),
    "hybrid shards": (
        "gpt",
        4,
        {"mesh": {"data": 4}, "unit": [{"match": "*", "mode": "zero3", "within": 2}]},
        "rank=3",
        "rank 1 and rank 3 have different bits",
    ),
    "norms on a grid": ("gpt", 4, {"mesh": {"row": 2, "col": 2}}, "rank=2 name=norm", "rank 2 has other bits than"),
    "unequal shards on a grid": (
        LLAMA,
        4,
        {"mesh": {"data": 2, "col": 2}, "unit": ZERO3},
        "rank=3 name=norm",
        "step 3: copies of",
    ),
    "depth": (
        "llama",
        4,
        {"mesh": {"depth": 2, "col": 2}, "tensor": {"residual": "hidden"}},
        "rank=1",
        "rank 1 and rank 3",
    ),
    "message-driven": (
        "gpt",
        4,
        {"mesh": {"pipe": 2, "data": 2}, "pipeline": {"executor": "message-driven", "schedule": "wave"}},
        "rank=3",
        "rank 2 and rank 3 have different bits",
    ),
}


def _fit(rank: int, ranks: int, config: Config, plan: dict[str, Any]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    fit(config, Plan.from_dict(plan))


@pytest.mark.parametrize("name", PLANS)
def test_a_changed_bit_is_found_before_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, ranks, plan, fault, says = PLANS[name]
    train = {"steps": 4, "check_replicas": 1, "global_batch": 24}
    config = make_config(tmp_path / "run", model, train=train, checkpoint={"every": 1, "keep": 5})
    monkeypatch.setenv("FOURFOLD_FAULTS", f"flip step=3 {fault}")
    with pytest.raises(RankFailure, match="step 3: copies of") as error:
        run_ranks(_fit, ranks, config, plan)
    assert says in str(error.value)
    steps = [m["step"] for m in read_metrics(RunDir(tmp_path / "run")) if "loss" in m]
    assert steps == [1, 2, 3]  # the first two passed
    saved = {p.parent.name for p in (tmp_path / "run" / "checkpoints").glob("*/complete.json")}
    assert saved == {"step-000001", "step-000002"}  # the save in flight was finished, the next one not begun
    assert {p.name for p in (tmp_path / "run" / "checkpoints").iterdir()} == saved


def test_a_tied_copy_that_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = TiedCopy.publish

    def damaged(self: TiedCopy) -> None:
        publish(self)
        self.copy.shard.view(torch.int32)[7] ^= 1

    monkeypatch.setattr(TiedCopy, "publish", damaged)
    config = make_config(tmp_path / "run", train={"steps": 2, "check_replicas": -1})
    run_ranks(_fit, 2, config, {"mesh": {"pipe": 2}})  # not compared, not found
    config = make_config(tmp_path / "compared", train={"steps": 2})
    with pytest.raises(
        RankFailure, match="step 2: copies of tied tokens.weight differ between ranks: rank 0 and rank 1"
    ):
        run_ranks(_fit, 2, config, {"mesh": {"pipe": 2}})


def test_hashes_of_parts_add_up_and_every_bit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.randn(5, 6, 7).to(dtype)
        complete = hash_box(x, ((0, 5), (0, 6), (0, 7)), x.shape)
        parts = [((0, 2), (0, 6), (0, 7)), ((2, 5), (0, 6), (0, 3)), ((2, 5), (0, 6), (3, 7))]
        total = sum(hash_box(x[tuple(slice(a, b) for a, b in box)], box, x.shape) for box in parts)
        assert torch.equal(complete, torch.as_tensor(total))
        bits = x.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()]).view(-1)
        for _ in range(20):
            at, bit = chance.randrange(len(bits)), chance.randrange(8 * x.element_size() - 1)
            bits[at] ^= 1 << bit
            assert hash_box(x, ((0, 5), (0, 6), (0, 7)), x.shape)[0] != complete[0]
            bits[at] ^= 1 << bit
        swapped = x.clone()
        swapped[0, 0, 0], swapped[4, 0, 0] = x[4, 0, 0], x[0, 0, 0]
        assert hash_box(swapped, ((0, 5), (0, 6), (0, 7)), x.shape)[1] != complete[1]
        monkeypatch.setattr("fourfold.supervision.compare_replicas.CHUNK", 90)  # two rows, then two, then one
        assert torch.equal(complete, hash_box(x, ((0, 5), (0, 6), (0, 7)), x.shape))
        monkeypatch.undo()
        assert hash_box(x[:0], ((2, 2), (0, 6), (0, 7)), x.shape).tolist() == [0, 0]
    one = torch.tensor(3.0)
    assert hash_box(one, (), ()).tolist() == hash_box(one.view(1), ((0, 1),), (1,)).tolist()


def test_copies_on_a_grid_that_other_communicators_summed_are_not_compared() -> None:
    """NCCL may sum in another order at another place of the grid; copies over data and depth have one communicator."""
    piece, degrees = whole("norm", (4,), ("data", "row", "col")), {"pipe": 1, "data": 3, "depth": 1, "row": 2, "col": 2}
    found: dict[bool, dict[str, set[int]]] = {}
    for across in (True, False):
        classes = found[across] = {}
        for data, row, col in itertools.product(range(3), range(2), range(2)):
            here = {"pipe": 0, "data": data, "depth": 0, "row": row, "col": col}
            name, copies, copy = _class_of(piece, here, degrees, across_grid=across) or ("", 0, 0)
            assert copies == (12 if across else 3)
            classes.setdefault(name, set()).add(copy)
    assert [len(found[across]) for across in (True, False)] == [1, 4]
    assert all(held == {0, 1, 2} for held in found[False].values())
    assert _class_of(whole("norm", (4,), ("row", "col")), here, degrees, across_grid=False) is None


def test_rows_and_words() -> None:
    half = [(7, 2, 0, 5, 1), (7, 2, 0, 3, 1), (7, 2, 1, 8, 2), (0, 0, 0, 0, 0)]  # a copy in two shards, one whole
    assert differing(half) == set()
    assert differing([*half[:2], (7, 2, 1, 8, 3)]) == {7}
    a, b = (Hashed("c", 4, 0, "w", ((0, 4),), (value, 0)) for value in (1, 2))
    assert "ranks 1, 2 have other bits than ranks 0, 3, 4" in explain([[a], [b], [b], [a], [a]])
    uneven = [[Hashed("c", 2, r, "w", ((r, 4),), (r, 0))] for r in range(2)]
    assert "cut differently" in explain(uneven)
    with pytest.raises(ConfigError, match=r"train\.check_replicas = -2 must be at least -1"):
        make_config(Path("/tmp/x"), train={"check_replicas": -2})
