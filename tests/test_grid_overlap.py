"""The grid's collectives overlap with its matmuls: the same bits and bytes with and without, and they do overlap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold import collectives
from fourfold.collectives import Pending
from fourfold.errors import PlanError
from fourfold.plan import Plan
from fourfold.tensor.costs import traffic
from fourfold.tensor.grid import PendingTensor
from fourfold.tensor.late import GradientSums, WeightPrefetch
from fourfold.tensor.linear import GridLinear
from fourfold.testing.ledger import Ledger
from fourfold.testing.ranks import run_ranks
from fourfold.train.one_rank import OneRank, one_of_many
from tests.helpers import MODELS, make_config, run_training, series

MODEL = MODELS["llama"] | {"vocab": 259}
PLANS: dict[str, dict[str, Any]] = {
    "2 x 2 x 2": {"mesh": {"depth": 2, "row": 2, "col": 2}, "batch": {"micro_batches": 2}},
    "hidden, summa": {"mesh": {"depth": 2, "row": 2, "col": 2}, "tensor": {"flow": "summa", "residual": "hidden"}},
    "ws": {"mesh": {"row": 4, "col": 2}, "tensor": {"flow": "ws"}},
    "ls, hidden": {"mesh": {"row": 2, "col": 4}, "tensor": {"flow": "ls", "residual": "hidden"}},
    "split in a pipeline": {
        "mesh": {"pipe": 2, "row": 2, "col": 2},
        "pipeline": {"schedule": "zb-h1"},
        "batch": {"micro_batches": 3},
        "tensor": {"flow": "os"},
    },
    "waves, recomputed": {
        "mesh": {"pipe": 2, "row": 4},
        "pipeline": {"schedule": "wave"},
        "batch": {"micro_batches": 2},
        "unit": [{"match": "blocks.*.attn", "recompute": "full"}, {"match": "blocks.*.mlp", "recompute": "selective"}],
    },
    "zero3, each micro-batch reduced": {
        "mesh": {"depth": 2, "row": 2, "col": 2},
        "batch": {"micro_batches": 2},
        "unit": [{"match": "*", "mode": "zero3", "reduce": "micro-batch"}],
    },
    "keep, message-driven": {
        "mesh": {"pipe": 2, "data": 2, "row": 2},
        "batch": {"micro_batches": 2},
        "pipeline": {"executor": "message-driven"},
        "unit": [{"match": "*", "mode": "keep"}],
    },
}


def make_rank(folder: Path, plan: dict[str, Any], rank: int, model: dict[str, Any] = MODEL) -> OneRank:
    config = make_config(folder / "run", model, train={"global_batch": 24}).resolve()
    made = Plan.from_dict(plan)
    made.check(config)
    return OneRank(config, made, rank)


def with_tensor(plan: dict[str, Any], **more: Any) -> dict[str, Any]:
    return plan | {"tensor": plan.get("tensor", {}) | more}


def gradients(made: OneRank) -> tuple[dict[str, Tensor], float]:
    """Of the second of two steps, with other weights; and the bytes it received."""
    made.step()
    made.zero_grad()
    with torch.no_grad():
        for unit in made.units:
            unit.shard.mul_(1.5)
    with Ledger() as ledger:
        made.step()
    found = {unit.name: unit.shard_grad.clone() for unit in made.units if unit.shard_grad is not None}
    made.zero_grad()
    made.close()
    return found, ledger.received


def compare(rank: int, ranks: int, folder: Path, names: list[str]) -> list[str]:
    """What differs between plans that must not."""
    wrong = []
    for name in names:
        plain, moved = gradients(make_rank(folder, with_tensor(PLANS[name], overlap=False), rank))
        number = list(PLANS).index(name)
        for label, more, bits in (
            ("overlap", {}, True) if number % 3 < 2 else ("gradients kept", {"keep": ["gradients"]}, False),
            ("weights and inputs kept", {"keep": ["weights", "inputs"]}, True),
        ):
            found, received = gradients(make_rank(folder, with_tensor(PLANS[name], **more), rank))
            same = torch.equal if bits else torch.allclose
            wrong += [f"{name}, {label}: {n}" for n, g in plain.items() if not same(found[n], g)]
            if received != moved if label == "overlap" else received > moved:
                wrong.append(f"{name}, {label}: {received} bytes, not {moved}")
    return wrong


@pytest.mark.parametrize("part", range(4))
def test_overlap_changes_no_bit_and_moves_no_byte_more(tmp_path: Path, part: int) -> None:
    """Nor does keeping weights and inputs; summing gradients later adds them in another order."""
    for found in run_ranks(compare, 8, tmp_path, list(PLANS)[2 * part : 2 * part + 2]):
        assert found == []


def test_state_on_the_host_trains_alike(tmp_path: Path) -> None:
    """Weights that may still be on their way are not gathered ahead."""
    runs = []
    for overlap in (False, True):
        config = make_config(
            tmp_path / str(overlap), MODEL, train={"steps": 3, "global_batch": 12, "guard": False}, optim={"clip": 0.0}
        )
        plan = {
            "mesh": {"row": 2, "col": 2},
            "memory": {"optimizer": "host"},
            "tensor": {"overlap": overlap, "keep": ["weights"]},
        }
        runs.append(series(run_training(config, plan, 4), "loss"))
    assert runs[0] == runs[1]


def count_kept(rank: int, ranks: int, folder: Path) -> list[tuple[float, float]]:
    """Bytes that each way to keep saves in a step of two micro-batches: received, and by the formulas."""
    plan = {"mesh": {"row": 2, "col": 2}, "batch": {"micro_batches": 2}}
    plain = make_rank(folder, plan, rank)
    _, before = gradients(plain)
    found = []
    for keep in (["weights"], ["inputs"], ["gradients"], ["weights", "inputs", "gradients"]):
        made = make_rank(folder, with_tensor(plan, keep=keep), rank)
        _, after = gradients(made)
        linears = [m.matmul for m in made.model.modules() if isinstance(m, GridLinear)]
        saved = sum(
            traffic(x.sizes, x.flow, (), 2).bytes(4, 4) - traffic(x.sizes, x.flow, keep, 2).bytes(4, 4) for x in linears
        )
        found.append((before - after, float(saved)))
    return found


def test_keeping_saves_the_bytes_of_the_formulas(tmp_path: Path) -> None:
    for found in run_ranks(count_kept, 4, tmp_path):
        assert found
        for received, said in found:
            assert received == said > 0


def count_selective(rank: int, ranks: int, folder: Path) -> list[float]:
    plan = {"mesh": {"row": 2, "col": 2}, "batch": {"micro_batches": 2}}
    rules = ([], [{"match": "blocks.*", "recompute": "selective"}], [{"match": "blocks.*", "recompute": "full"}])
    return [gradients(make_rank(folder, plan | {"unit": rule}, rank, MODELS["gpt"]))[1] for rule in rules]


def test_selective_recomputation_moves_nothing_for_products(tmp_path: Path) -> None:
    for none, selective, full in run_ranks(count_selective, 4, tmp_path):
        assert none == selective < full


# ---- what overlaps with what ----


class Matmuls(TorchDispatchMode):
    """Counts matmuls."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ == "mm"
        return func(*args, **(kwargs or {}))


class Noted(Pending):
    """Notes how many matmuls were computed between its start and its wait."""

    def __init__(self, matmuls: Matmuls, what: str, said: list[tuple[str, int]]):
        super().__init__(None, what)
        self.matmuls, self.what, self.said, self.start = matmuls, what, said, matmuls.count

    def wait(self) -> None:
        self.said.append((self.what, self.matmuls.count - self.start))


def overlapped_matmuls(folder: Path, monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any]) -> dict[str, list[int]]:
    """By collective that was started ahead of its wait: matmuls that ran meanwhile, in a step of the first of many ranks."""
    said: list[tuple[str, int]] = []
    made = Plan.from_dict(plan)
    with one_of_many(made.mesh.ranks):
        rank = make_rank(folder, plan, 0, MODELS["gpt"])
        rank.step()
        rank.zero_grad()
        matmuls = Matmuls()
        with monkeypatch.context() as m, matmuls:
            for name in ("all_gather", "reduce_scatter"):
                m.setattr(collectives, name, lambda out, x, group, what, **_: Noted(matmuls, what, said))
            rank.step()
    return {what: [n for w, n in said if w == what] for what, _ in said}


def test_collectives_overlap_with_matmuls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, their eight linears alternately by `os` and `ls`, and the head by `os`."""
    plan = {"mesh": {"row": 2, "col": 2}}
    found = overlapped_matmuls(tmp_path, monkeypatch, plan)
    weights = found["a gather over row"]
    # the table's rows and the first weight of F and of B have nothing before them
    assert len(weights) == 1 + 9 + 9
    assert sum(n > 0 for n in weights) == 8 + 8
    assert (
        sum(n > 0 for n in found["a scatter over row"]) == 8
    )  # of weight gradients all but the last; it is waited for with the op
    assert sum(n > 0 for n in found["a scatter over col"]) == 5  # gradients of the inputs of `os`
    assert sum(n > 0 for n in found["a gather over col"]) == 5  # those inputs, for the weight gradient
    off = overlapped_matmuls(tmp_path, monkeypatch, plan | {"tensor": {"overlap": False}})
    assert all(n == 0 for counts in off.values() for n in counts)
    assert {what: len(n) for what, n in off.items()} == {what: len(n) for what, n in found.items()}


# ---- the parts ----


class Weight:
    """A weight that notes when it is gathered."""

    def __init__(self, name: str, log: list[str], here: bool = True):
        self.name, self.log, self.here = name, log, here

    def ready(self) -> bool:
        return self.here

    def start_whole(self) -> PendingTensor:
        self.log.append(self.name)
        return PendingTensor(torch.zeros(1))


def test_weights_are_gathered_one_ahead_in_the_order_learnt() -> None:
    log: list[str] = []
    a, b, c = (Weight(name, log) for name in "abc")
    ahead = WeightPrefetch(GradientSums(1))

    def op(*weights: Weight) -> list[str]:
        log.clear()
        seen = []
        ahead.begin("F")
        for weight in weights:
            ahead.take(weight)
            seen.append("".join(log))
        ahead.end()
        return seen

    assert op(a, b, c) == ["a", "ab", "abc"]
    assert op(a, b, c) == ["ab", "abc", "abc"]
    assert op(a, c, b) == ["ab", "abc", "abcb"]  # b was fetched in vain
    assert op(a, c, b) == ["ac", "acb", "acb"]
    b.here = False
    assert op(a, c, b) == ["ac", "ac", "acb"]


def test_sums_are_added_in_the_order_in_which_they_were_started() -> None:
    added: list[float] = []
    sums = GradientSums(1)

    def add(x: Tensor) -> None:
        added.append(float(x))

    for n in range(3):
        sums.start(PendingTensor(torch.tensor(float(n)), Pending(None, "")), add)
        assert added == [float(i) for i in range(n)]
    sums.open()
    sums.then(lambda: added.append(-1.0))
    assert added == [0.0, 1.0]  # in an op, what comes after waits with it
    sums.close()
    assert added == [0.0, 1.0, 2.0, -1.0]


def test_compiled_graphs_keep_inputs_alone(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", "gpt").resolve()
    plan = {"mesh": {"row": 2, "col": 2}, "precision": {"compile": True}}
    Plan.from_dict(with_tensor(plan, keep=["inputs"])).check(config)
    with pytest.raises(PlanError, match=r"tensor.keep = 'weights' cannot be kept; use keep = \[\] or \['inputs'\]"):
        Plan.from_dict(with_tensor(plan, keep=["inputs", "weights"])).check(config)
