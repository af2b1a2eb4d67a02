"""What sharding costs is what the program says: collectives, their bytes and order, and memory."""

from __future__ import annotations

import math
import re
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fourfold.collectives import all_gather
from fourfold.errors import ReleasedError
from fourfold.model.build import serial_model
from fourfold.plan import Plan
from fourfold.shard.layout import joined
from fourfold.testing.budget import Budget
from fourfold.testing.ledger import Ledger
from fourfold.testing.order import SameOrder
from fourfold.testing.ranks import run_ranks
from fourfold.train.one_rank import OneRank
from tests.helpers import make_config
from tests.test_sharding import MIX, MODEL, everything


def make_rank(folder: Path, model: dict[str, Any], plan: dict[str, Any], rank: int, batch: int = 24) -> OneRank:
    config = make_config(folder / "run", model, train={"global_batch": batch}).resolve()
    made = Plan.from_dict(plan)
    made.check(config)
    return OneRank(config, made, rank)


def _counted(rank: int, ranks: int, folder: Path, model: str, plan: dict[str, Any]) -> tuple[Any, Any]:
    made = make_rank(folder, MODEL[model], plan, rank)
    made.step()
    made.zero_grad()
    with SameOrder() as order:
        made.step()
        issued = [(e.kind, e.payload) for e in order.entries if e.kind not in ("send", "recv")]
        order.compare()
    return issued, [(c.kind, c.bytes) for c in made.replayed().collectives]


@pytest.mark.parametrize(
    ("model", "mesh", "rules"),
    [
        ("gpt", {"data": 2}, everything("zero3")),
        ("llama", {"data": 2}, everything("zero2", split=2)),
        ("untied", {"data": 4}, everything("keep", within=2, reduce="micro-batch")),
        ("gpt", {"data": 3}, MIX),
        ("gpt", {"data": 2}, everything("replicate")),
        ("untied", {"pipe": 2, "data": 2}, everything("replicate")),
        ("untied", {"pipe": 2, "data": 2}, MIX),
        ("untied", {"data": 2, "depth": 2}, everything("zero3", within=2, split=4, recompute="per-slice")),
    ],
)
def test_collectives_are_those_of_the_program(
    tmp_path: Path, model: str, mesh: dict[str, int], rules: list[Any]
) -> None:
    plan = {"mesh": mesh, "batch": {"micro_batches": 2}, "unit": rules}
    found = run_ranks(_counted, math.prod(mesh.values()), tmp_path, model, plan)
    for issued, said in found:
        assert issued
        assert sorted(issued) == sorted(said)
        assert [e for e in issued if e[0] == "all_gather"] == [c for c in said if c[0] == "all_gather"]


def _joined(rank: int, ranks: int, folder: Path, size: int) -> tuple[list[tuple[str, int]], int, bool]:
    """The sums of a step, elements of all units, and whether a second step has the same gradients."""
    with patch("fourfold.shard.layout.JOIN", size):
        made = make_rank(folder, MODEL["untied"], {"mesh": {"data": ranks}, "batch": {"micro_batches": 2}}, rank)
    made.step()
    first = [unit.shard_grad.clone() for unit in made.units]
    made.zero_grad()
    with Ledger() as ledger:
        made.step()
    again = [unit.shard_grad for unit in made.units]
    same = all(map(torch.equal, first, again))
    return [(e.kind, e.payload) for e in ledger.entries], sum(u.layout.total for u in made.units), same


def test_replicated_units_are_summed_together(tmp_path: Path) -> None:
    for issued, elements, same in run_ranks(_joined, 2, tmp_path, 1 << 30):
        assert issued == [("all_reduce", 4 * elements)]
        assert same
    for issued, elements, same in run_ranks(_joined, 2, tmp_path, 1):
        assert len(issued) > 4, "every unit on its own"
        assert sum(size for _, size in issued) == 4 * elements
        assert same


def test_sums_are_joined_until_they_are_large_enough() -> None:
    with patch("fourfold.shard.layout.JOIN", 100):
        assert joined([40, 40, 40, 10, 200, 5]) == [[0, 1], [2, 3, 4, 5]], "half as many first; few are not left alone"
        assert joined([40, 40, 40, 10, 200, 50]) == [[0, 1], [2, 3, 4], [5]]
        assert joined([10, 10]) == [[0, 1]]
        assert joined([]) == []


@pytest.mark.parametrize(("compute", "gather", "reduce"), [("fp32", 4, 4), ("bf16", 2, 4)])
def test_keep_moves_a_fifth_of_naive_zero3(tmp_path: Path, compute: str, gather: int, reduce: int) -> None:
    """A whole model, by the ledger. With 4 micro-batches 8 gathers and 4 reductions become 1 and 1: 32 bytes an element become
    6 in bf16 with fp32 gradients (3/16), 48 become 8 in fp32 (1/6)."""

    def moved(rules: list[dict[str, Any]], prefetch: int = 0) -> int:
        precision, memory = {"compute": compute}, {"prefetch": prefetch}
        plan = {"mesh": {"data": 2}, "batch": {"micro_batches": 4}, "unit": rules}
        return run_ranks(_moved, 2, tmp_path, plan | {"memory": memory, "precision": precision})[0]

    naive, keep = moved(everything("zero3", reduce="micro-batch")), moved(everything("keep"))
    assert naive * (gather + reduce) == keep * (8 * gather + 4 * reduce)
    assert keep <= naive / 5
    assert moved(everything("zero3")) * (gather + reduce) == keep * (8 * gather + reduce)
    assert moved(everything("zero2")) * (gather + reduce) == keep * (4 * gather + reduce)
    assert keep < moved(everything("zero3"), prefetch=1) < moved(everything("zero3"))  # the ends of the chain stay


def _moved(rank: int, ranks: int, folder: Path, plan: dict[str, Any]) -> int:
    made = make_rank(folder, MODEL["untied"], plan, rank)
    with Ledger() as ledger:
        made.step()
    assert sum(c.bytes for c in made.replayed().collectives) == ledger.bytes()
    return ledger.bytes()


def _memory(rank: int, ranks: int, folder: Path, plan: dict[str, Any]) -> tuple[int, int]:
    """Most bytes of parameters and gradients in a step: counted, and as replayed."""
    made = make_rank(folder, MODEL["gpt"] | {"hidden": 64, "seq_len": 4, "vocab": 256}, plan, rank, 2 * ranks)
    budget = Budget()
    for unit in made.units:
        budget.adopt(unit.shard)
    resident = budget.live
    with budget:
        made.step()
    return budget.peak.bytes - resident, made.replayed().peak


@pytest.mark.parametrize("mode", ["zero3", "zero2", "keep", "replicate"])
def test_memory_is_that_of_the_replay(tmp_path: Path, mode: str) -> None:
    """At a handful of tokens, parameters and gradients are all there is: the count exceeds the replay by the activations and
    by one unit's gradients as autograd hands them over."""
    plan = {"mesh": {"data": 2}, "unit": everything(mode)}
    largest = 4 * 2 * 4 * 64 * 64
    for counted, said in run_ranks(_memory, 2, tmp_path, plan):
        assert said <= counted <= said + largest + 0.15 * said


def _touched(rank: int, ranks: int, folder: Path) -> None:
    made = make_rank(folder, MODEL["gpt"], {"mesh": {"data": 2}, "unit": everything("zero3")}, rank)
    weight = made.model.blocks[0].mlp.up.weight  # type: ignore[union-attr]
    assert tuple(weight.shape) == (128, 32)
    with pytest.raises(ReleasedError, match=r"blocks\.0\.mlp\.up\.weight was used while released"):
        weight + 1
    with pytest.raises(ReleasedError):
        made.model(torch.zeros(1, 4, dtype=torch.long))
    unit = made.held.units["blocks.0.mlp"]
    unit.gather()
    unit.need()
    assert made.model.blocks[0].mlp.up.weight.sum().isfinite()  # type: ignore[union-attr]
    unit.release()
    assert unit.full.untyped_storage().size() == 0


def test_touching_a_released_parameter_is_an_error_that_names_it(tmp_path: Path) -> None:
    run_ranks(_touched, 2, tmp_path)


# ---- random mixes ----

FAMILIES = list(MODEL.values())


MESHES = [
    {"data": 4},
    {"pipe": 2, "data": 2},
    {"row": 2, "col": 2},
    {"data": 2, "col": 2},
    {"depth": 2, "row": 2},
    {"pipe": 2, "col": 2},
    {"pipe": 2, "row": 2},
]


def random_plan(random: Random, mesh: dict[str, int]) -> dict[str, Any]:
    """Any modes, splits, schedules, flows and recomputation, unit by unit; either executor."""
    pipe = mesh.get("pipe", 1)
    driven = pipe > 1 and random.random() < 0.3
    rules = [
        {
            "match": match,
            "mode": random.choice(["replicate", "keep"] if driven else ["replicate", "zero2", "zero3", "keep"]),
            "reduce": "step" if driven or match == "embed" else random.choice(["step", "micro-batch"]),
            "within": random.choice([0, 0, 2]) if mesh.get("data", mesh.get("depth", 1)) > 1 else 0,
            "split": random.choice([1, 2, 4, 8]),
            "recompute": random.choice(["none", "selective", "full", "per-slice"]),
        }
        for match in ("embed", "blocks.0.mlp", "blocks.0.attn", "blocks.1.mlp", "*")
    ]
    schedule = random.choice(["1f1b", "wave", "zb-h1", "zb-v"] if pipe > 1 else ["1f1b"])
    flows = ["auto", "os", "ls", "ws", *(["summa"] if mesh.get("row", 1) == mesh.get("col", 1) else [])]
    return {
        "mesh": mesh,
        "batch": {"micro_batches": random.choice([1, 2, 3, 4])},
        "pipeline": {
            "schedule": schedule,
            "split_backward": random.choice(["auto", True]),
            "executor": "message-driven" if driven else "ordered",
        },
        "tensor": {"flow": random.choice(flows), "residual": random.choice(["sequence", "hidden"])},
        "memory": {"prefetch": random.choice([0, 1, 2])},
        "precision": {"compute": "fp64"},
        "unit": rules,
    }


def serial_gradients(made: OneRank) -> dict[str, torch.Tensor]:
    """Of the whole step, by plain autograd."""
    model = serial_model(made.config.model, made.config.train.seed, dtype=torch.float64)
    ways, micro = made.plan.mesh.batch_ways, made.plan.micro_batches(made.config.train.global_batch)
    for m in range(micro):
        for way in range(ways):
            tokens, targets = made.batch(way, m)
            model(tokens, targets).backward(made.grad(m))
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _mixes(rank: int, ranks: int, folder: Path, seeds: range) -> list[str]:
    """What is wrong with the gradients of random plans."""
    problems = []
    for seed in seeds:
        random = Random(seed)
        model = FAMILIES[seed % len(FAMILIES)] | {"layers": 2}
        plan = random_plan(random, MESHES[seed % len(MESHES)])
        made, order = make_rank(folder, model, plan, rank, batch=48), SameOrder()
        with order:
            made.step()
            order.compare()
        expected = serial_gradients(made)
        for unit in made.units:
            if unit.shard_grad is None:
                continue
            whole = unit.shard_grad
            if unit.sharing.gathers is not None:
                whole = torch.empty(unit.layout.total, dtype=torch.float64)
                all_gather(whole, unit.shard_grad, unit.sharing.gathers, "gradients").wait()
            for slot in unit.layout.slots:
                local = whole[slot.start : slot.stop].view(slot.shape)
                for piece in unit.pieces[slot.name]:
                    part = local[tuple(slice(*s) for s in piece.local_slice)]
                    serial = expected[piece.name][tuple(slice(*s) for s in piece.global_slice)]
                    if not torch.allclose(part, serial, rtol=1e-11, atol=1e-13):
                        problems.append(f"seed {seed}: {piece.name} in {unit.name}, {plan}")
        made.close()
    return problems


def test_random_mixes_have_the_serial_gradients(tmp_path: Path) -> None:
    """On data, pipelines and grids; and every group's collectives have one order on its ranks."""
    for problems in run_ranks(_mixes, 4, tmp_path, range(10)):
        assert not problems


# ---- against FSDP2 ----


def _against_fsdp2(rank: int, ranks: int, folder: Path, mode: str, compute: str) -> list[str]:
    """Gradients of one step of two micro-batches, ours and FSDP2's, where it does the same: which differ in a bit."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    plan = {
        "mesh": {"data": ranks},
        "batch": {"micro_batches": 2},
        "unit": everything(mode),
        "precision": {"compute": compute},
    }
    made = make_rank(folder, MODEL["untied"], plan, rank)
    weights, ours = {}, {}
    for unit in made.units:
        unit.gather()
        unit.need()
        weights |= {f"{unit.name}.{n}": p.detach().clone() for n, p in unit.params.items()}
        unit.release()
    made.step()
    for unit in made.units:
        assert unit.shard_grad is not None
        whole = torch.empty(unit.layout.total, dtype=unit.shard_grad.dtype)
        all_gather(whole, unit.shard_grad, unit.sharing.gathers, "gradients").wait()
        ours |= {f"{unit.name}.{s.name}": whole[s.start : s.stop].view(s.shape) for s in unit.layout.slots}
    model = serial_model(made.config.model, made.config.train.seed)
    bf16 = compute == "bf16"
    model.load_state_dict(weights)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for part in model.units().values():
        fully_shard(part, reshard_after_forward=mode == "zero3", mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for m in range(2):
        model.set_requires_gradient_sync(m == 1)  # type: ignore[operator]
        model(made.first(m), *made.extra(m)).backward(made.grad(m))
    theirs = {n: p.grad.full_tensor() for n, p in model.named_parameters()}  # type: ignore[union-attr]
    assert theirs.keys() == ours.keys()
    return [n for n in ours if not torch.equal(ours[n].float(), theirs[n].float())]


@pytest.mark.parametrize(("mode", "compute"), [("zero3", "fp32"), ("zero2", "fp32"), ("zero3", "bf16")])
def test_gradients_are_those_of_fsdp2_to_the_bit(tmp_path: Path, mode: str, compute: str) -> None:
    assert run_ranks(_against_fsdp2, 2, tmp_path, mode, compute) == [[], []]


PAGE = Path(__file__).parents[1] / "docs" / "sharding.md"


@pytest.mark.parametrize(
    "code", re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL), ids=["replay", "own module"]
)
def test_examples_of_the_page_run(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PAGE.parents[1])
    exec(compile(code, str(PAGE), "exec"), {"__name__": "__main__"})
