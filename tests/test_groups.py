"""Process groups and communicators: known from the plan, made before the first step, none later."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fourfold.config import ModelConfig
from fourfold.launch.place import agree
from fourfold.plan import Mesh, Plan
from fourfold.program.groups import GroupSpec, edge_rounds, groups_of, members_of
from fourfold.program.stages import lay_out_pipeline
from fourfold.testing.communicators import NoLateGroups
from fourfold.testing.ranks import run_ranks
from fourfold.testing.stores import CountingStore, CrowdedStore
from fourfold.train import connect as connecting
from fourfold.train.callbacks import Callback, RunInfo
from fourfold.train.connect import warm_up
from fourfold.train.mesh import RankMesh
from fourfold.train.worker import fit
from tests.helpers import MODELS, make_config

TIED = {"layers": 4, "tie": True}

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (2, {"mesh": {"data": 2}}),
    "tied 1f1b": (4, {"mesh": {"pipe": 4}, "batch": {"micro_batches": 4}}),
    "sharded both ways": (
        4,
        {
            "mesh": {"data": 4},
            "unit": [{"match": "*.mlp", "mode": "zero3", "within": 2}, {"match": "head", "mode": "zero2"}],
        },
    ),
    "all axes": (
        8,
        {
            "mesh": {"pipe": 2, "data": 2, "col": 2},
            "batch": {"micro_batches": 2},
            "pipeline": {"executor": "message-driven", "schedule": "wave", "slack": 1},
            "unit": [{"match": "blocks.*", "mode": "keep"}],
        },
    ),
    "interleaved ring": (
        3,
        {
            "mesh": {"pipe": 3},
            "batch": {"micro_batches": 3},
            "pipeline": {"schedule": "interleaved", "stages_per_rank": 2},
        },
    ),
}


class Groups(Callback):
    """Notes the process groups that exist when training starts."""

    def on_start(self, run: RunInfo, step: int) -> None:
        self.found = [
            (g.group_desc, tuple(dist.get_process_group_ranks(g))) for g in dist.distributed_c10d._world.pg_map
        ]


@pytest.mark.parametrize("name", PLANS)
def test_a_run_makes_the_groups_that_its_plan_says_and_none_later(name: str, tmp_path: Path) -> None:
    ranks, plan = PLANS[name]
    config = make_config(tmp_path / "run", MODELS["gpt"] | TIED, train={"steps": 2, "eval_every": 2}).resolve()
    found = run_ranks(_train, ranks, config, plan)
    layout = lay_out_pipeline(config.model, Plan.from_dict(plan), config.train.global_batch)
    for rank in range(ranks):
        wanted = [
            (g.use, tuple(sorted(g.members))) for g in groups_of(config.model, Plan.from_dict(plan), layout, rank)
        ]
        assert found[rank][1:] == wanted[1:]  # the first is the world, which the launcher made


def test_a_frozen_tied_weight_needs_no_group(tmp_path: Path) -> None:
    """With LoRA the two ranks that use it have nothing to exchange."""
    ranks, plan = PLANS["tied 1f1b"]
    for rank_of_lora, uses in ((0, True), (2, False)):
        config = make_config(tmp_path, MODELS["gpt"] | TIED, lora={"rank": rank_of_lora}).resolve()
        layout = lay_out_pipeline(config.model, Plan.from_dict(plan), config.train.global_batch)
        found = [groups_of(config.model, Plan.from_dict(plan), layout, rank) for rank in range(ranks)]
        assert any(g.use == "tied" for groups in found for g in groups) == uses


def _train(rank: int, ranks: int, config: Any, plan: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    groups = Groups()
    with open("/dev/null", "w") as console:
        fit(config, Plan.from_dict(plan), callbacks=[groups, NoLateGroups()], console=console)
    return groups.found


def test_a_group_made_inside_a_run_is_an_error(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", train={"steps": 2})
    with pytest.raises(Exception, match="made after the start of training: 'late'"):
        run_ranks(_train_late, 2, config)


def _train_late(rank: int, ranks: int, config: Any) -> None:
    class Late(Callback):
        def on_step(self, run: RunInfo, metrics: dict[str, Any]) -> None:
            dist.new_group([0, 1], group_desc="late")

    with open("/dev/null", "w") as console:
        fit(config, Plan(mesh=Mesh(data=2)), callbacks=[NoLateGroups(), Late()], console=console)


LARGE = {
    "data 8, zero3": {"mesh": {"data": 8}, "unit": [{"match": "*", "mode": "zero3"}]},
    "data 1024, zero3": {"mesh": {"data": 1024}, "unit": [{"match": "*", "mode": "zero3"}]},
    "pipe 8 · data 16 · col 8": {"mesh": {"pipe": 8, "data": 16, "col": 8}},
    "pipe 64 · data 2 · row 2 · col 4": {
        "mesh": {"pipe": 64, "data": 2, "row": 2, "col": 4},
        "unit": [{"match": "*", "mode": "keep"}],
    },
    "interleaved, pipe 15 · data 64": {
        "mesh": {"pipe": 15, "data": 64},
        "pipeline": {"schedule": "interleaved", "stages_per_rank": 2},
    },
}


@pytest.mark.parametrize("name", LARGE)
def test_groups_do_not_grow_with_the_number_of_ranks(name: str) -> None:
    """At most 16 groups, placeholders included, whatever the mesh; the same number on every rank."""
    plan = Plan.from_dict(LARGE[name] | {"batch": {"micro_batches": 4}})
    model = ModelConfig(family="gpt", layers=128, hidden=64, heads=8, seq_len=16, tie=True).resolve()
    layout = lay_out_pipeline(model, plan, plan.mesh.batch_ways * 4)
    ranks = sorted({0, 1, plan.mesh.ranks // 3, plan.mesh.ranks // 2, plan.mesh.ranks - 1})
    counts = {len(groups_of(model, plan, layout, rank)) for rank in ranks}
    assert len(counts) == 1
    assert max(counts) <= 16
    for rank in ranks:
        specs = groups_of(model, plan, layout, rank)
        assert sum(not g.gloo for g in specs) <= 12
        assert all(rank in g.members for g in specs)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 64, 101])
def test_edges_are_made_in_few_rounds(ranks: int) -> None:
    chain = [e for r in range(ranks - 1) for e in ((r, r + 1), (r + 1, r))]
    for edges in (chain, [*chain, (ranks - 1, 0), (0, ranks - 1)]):
        rounds = edge_rounds(edges)
        assert sorted(e for r in rounds for e in r) == sorted(set(edges))
        assert len(rounds) <= (4 if edges is chain else 7)
        for together in rounds:
            assert len({r for e in together for r in e}) == 2 * len(together)


def test_members_are_those_that_differ_along_the_axes_only() -> None:
    degrees = {"pipe": 2, "data": 3, "depth": 1, "row": 2, "col": 2}
    assert members_of(degrees, 13, "col") == [12, 13]
    assert members_of(degrees, 13, "data") == [13, 17, 21]
    assert members_of(degrees, 13, "pipe", "row") == [1, 3, 13, 15]
    assert members_of(degrees, 13, *degrees) == list(range(24))


def test_every_kind_of_group_can_be_warmed_up_in_the_order_of_the_groups() -> None:
    """What `connect` runs on NCCL, here on gloo: overlapping groups, edges both ways, a pair. It must not lock up."""
    assert run_ranks(_warm_up, 4) == [6, 7, 7, 6]


def _warm_up(rank: int, ranks: int) -> int:
    mesh = RankMesh(Mesh(pipe=4), rank)
    mesh.group_of([0, 1, 2, 3], use="gradients")
    mesh.group_of([0, 1, 2, 3], use="parameters")
    mesh.group_of([0, 1, 2, 3], use="grid")
    mesh.group_of([0, 1, 2, 3], use="grid")  # once
    mesh.pair("pipe", 0, 3, use="tied")
    for together in edge_rounds([(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]):
        edge = next((e for e in together if rank in e), (rank,))
        mesh.new_group(GroupSpec("edge", edge, gloo=len(edge) == 1))
    made = [(m.spec, m.group) for m in mesh.made if not m.spec.placeholder]
    warm_up(made, rank, torch.device("cpu"))
    dist.barrier()
    return len(made)


def test_what_a_rank_asks_of_the_store_does_not_grow_with_the_ranks() -> None:
    """The rendezvous of the first rank and of another, in jobs of 8 to 1,024 ranks."""
    for rank in (0, 5):
        counts = []
        for ranks in (8, 64, 1024):
            store = CountingStore(CrowdedStore(rank, ranks))
            agree(store, rank, ranks, timeout=10)
            counts.append(sum(store.operations.values()))
        assert counts[0] == counts[1] == counts[2] <= 20


@pytest.mark.parametrize("ranks", [2, 6])
def test_a_group_takes_two_operations_of_a_rank_whatever_its_size(ranks: int) -> None:
    assert run_ranks(_operations, ranks) == [{"set": 1, "multi_get": 1}] * ranks


def _operations(rank: int, ranks: int) -> dict[str, int]:
    os.environ["GLOO_ENABLE_STORE_V2_API"] = "1"  # as `join` sets it
    port = torch.tensor([0])
    served = dist.TCPStore("127.0.0.1", 0, ranks, True, wait_for_workers=False) if rank == 0 else None
    if served is not None:
        port[0] = served.port
    dist.broadcast(port, 0)
    store = CountingStore(served or dist.TCPStore("127.0.0.1", int(port), ranks, False, wait_for_workers=False))
    group: Any = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=20))
    group.barrier().wait()
    dist.barrier()
    return dict(store.operations)


def test_on_nccl_communicators_come_first_then_the_warm_up_then_all_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for the device: each group once, in order, without those that gloo alone serves."""
    calls: list[Any] = []
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "all_reduce", lambda x: calls.append("all ranks"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronize"))
    monkeypatch.setattr(connecting, "make_communicator", lambda group, device: calls.append(group))
    monkeypatch.setattr(connecting, "warm_up", lambda groups, rank, device: calls.append(len(groups)))
    groups: Any = [
        (GroupSpec("world", (0, 1)), "world"),
        (GroupSpec("save", (0, 1), gloo=True), "save"),
        (GroupSpec("edge 0 to 1", (0, 1)), "there"),
        (GroupSpec("edge", (0,), gloo=True), "placeholder"),
        (GroupSpec("edge 1 to 0", (1, 0)), "back"),
    ]
    connecting.connect(groups, 0, torch.device("cuda", 0))
    assert calls == ["world", "there", "back", 3, "synchronize", "all ranks"]
    calls.clear()
    connecting.connect(groups, 0, torch.device("cpu"))
    assert calls == []
