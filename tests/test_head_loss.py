"""The head and its loss in chunks of tokens: equal to all logits at once, under every plan, in less memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold import Cluster, ModelSpec, predict
from fourfold.config import ModelConfig
from fourfold.errors import PlanError
from fourfold.model import head_loss
from fourfold.model.fused import soft_cap
from fourfold.model.head_loss import IGNORE, ChunkedLoss, chunked_loss
from fourfold.plan import AUTO_LOGITS, Memory, Plan, Precision
from fourfold.planner.compute_cost import logit_rows, operator_seconds
from fourfold.planner.problem import PlanProblem
from fourfold.program.stages import lay_out_pipeline
from fourfold.testing.budget import Budget
from fourfold.train.worker import fit
from tests.helpers import MODELS, SerialRuns, make_config, run_training, series

N, D, V = 37, 16, 51


def _inputs(dtype: torch.dtype, bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    made = torch.Generator().manual_seed(0)
    h, w, b = (torch.randn(*shape, generator=made, dtype=torch.float64) for shape in ((N, D), (V, D), (V,)))
    targets = torch.randint(0, V, (N,), generator=made)
    targets[::5] = IGNORE
    leaves = [t.to(dtype).requires_grad_() for t in (h, w, b)]
    return leaves[0], leaves[1], leaves[2] if bias else None, targets


def _whole(h: Tensor, w: Tensor, b: Tensor | None, targets: Tensor, cap: float, per_token: bool) -> Tensor:
    logits = F.linear(h, w, b)
    logits = soft_cap(logits, cap) if cap else logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, targets, ignore_index=IGNORE, reduction="none" if per_token else "sum")


@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("at_once", "per_token"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("rows", [1, 8, 100])
def test_chunks_are_the_whole(cap: float, bias: bool, at_once: bool, per_token: bool, rows: int) -> None:
    """Loss and all gradients, with tokens that do not divide, ignored targets and a weight for every token."""
    found = []
    for chunked in (False, True):
        h, w, b, targets = _inputs(torch.float64, bias)
        if chunked:
            loss = chunked_loss(h, w, b, targets, ChunkedLoss(rows, cap, at_once), per_token=per_token)
        else:
            loss = _whole(h, w, b, targets, cap, per_token)
        factor = torch.linspace(-1, 2, N, dtype=torch.float64) if per_token else torch.tensor(0.37, dtype=torch.float64)
        (loss * factor).sum().backward()
        found.append([loss.detach(), h.grad, w.grad] + ([b.grad] if b is not None else []))
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_bf16_chunks_are_as_near_to_the_truth_as_the_whole() -> None:
    """Against fp64 of the same bf16 inputs: at most 1.5 times the error of all logits at once, and fp32 sums of dW."""
    h, w, _, targets = _inputs(torch.bfloat16, False)
    errors: dict[str, list[float]] = {}
    exact = [t.detach().double().requires_grad_() for t in (h, w)]
    truth = torch.autograd.grad(_whole(exact[0], exact[1], None, targets, 0, False), exact)
    for name in ("whole", "at once", "later"):
        if name == "whole":
            loss = _whole(h, w, None, targets, 0, False)
        else:
            loss = chunked_loss(h, w, None, targets, ChunkedLoss(4, 0, name == "at once"), per_token=False)
        grads = torch.autograd.grad(loss, (h, w))
        errors[name] = [float((g - t).norm() / t.norm()) for g, t in zip(grads, truth, strict=True)]
    for name in ("at once", "later"):
        assert all(a < 1.5 * b for a, b in zip(errors[name], errors["whole"], strict=True)), errors


def test_nothing_to_predict_and_nothing_to_differentiate() -> None:
    h, w, _, targets = _inputs(torch.float32, False)
    nothing = torch.full_like(targets, IGNORE)
    loss = chunked_loss(h, w, None, nothing, ChunkedLoss(8), per_token=False)
    dh, dw = torch.autograd.grad(loss, (h, w))
    assert float(loss.detach()) == 0
    assert not dh.any()
    assert not dw.any()
    with torch.no_grad():
        assert not chunked_loss(h, w, None, targets, ChunkedLoss(8), per_token=False).requires_grad
    frozen = w.detach()
    loss = chunked_loss(h, frozen, None, targets, ChunkedLoss(8), per_token=False)
    assert [t is None for t in loss.grad_fn.saved_tensors] == [False, True, True]  # type: ignore[union-attr]


# ---- when ----


def test_which_heads_are_chunked() -> None:
    auto, none, small = Memory(), Memory(logits="all"), Memory(logits="1MiB")
    assert auto.logit_rows(8192, 32_000, 2) == 0  # 262 M logits: as many as a chunk has
    assert auto.logit_rows(16_384, 128_256, 2) == 2048
    assert auto.logit_rows(16_384, 128_256 // 8, 2) == 0
    assert none.logit_rows(16_384, 128_256, 2) == 0
    assert small.logit_rows(1000, 1024, 4) == 250 // 64 * 64 + 64
    assert small.logit_rows(10, 1 << 30, 4) == 1
    assert auto.logit_rows(16_384, 128_256, 2) * 128_256 <= AUTO_LOGITS
    for bad in ("0", "some", "-1MiB"):
        with pytest.raises(PlanError, match=r"memory\.logits"):
            Memory(logits=bad)


@pytest.mark.parametrize(("schedule", "most"), [("1f1b", 1), ("gpipe", 4), ("zb-h1", 1), ("wave", 1)])
def test_where_the_backward_follows_the_forward(schedule: str, most: int) -> None:
    plan = Plan.from_dict({"mesh": {"pipe": 2}, "batch": {"micro_batches": 4}, "pipeline": {"schedule": schedule}})
    layout = lay_out_pipeline(ModelConfig(**MODELS["gpt"] | {"layers": 4}).resolve(), plan, 4)
    assert layout.in_flight(len(layout.units) - 1) == most


# ---- under every plan ----

PLANS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one rank, two micro-batches": ("llama", 1, {"batch": {"micro_batches": 2}}),
    "selective": ("gpt", 1, {"unit": [{"match": "*", "recompute": "selective"}]}),
    "full": ("gpt", 1, {"unit": [{"match": "*", "recompute": "full"}]}),
    "gpipe": ("gpt", 2, {"mesh": {"pipe": 2}, "batch": {"micro_batches": 3}, "pipeline": {"schedule": "gpipe"}}),
    "split backward, zero3": (
        "llama",
        4,
        {
            "mesh": {"pipe": 2, "data": 2},
            "batch": {"micro_batches": 3},
            "pipeline": {"schedule": "zb-h1"},
            "unit": [{"match": "*", "mode": "zero3"}],
        },
    ),
    "grid": ("bert", 4, {"mesh": {"row": 2, "col": 2}, "batch": {"micro_batches": 2}}),
    "grid, gpipe, kept gradients": (
        "llama",
        4,
        {
            "mesh": {"pipe": 2, "row": 2},
            "batch": {"micro_batches": 2},
            "pipeline": {"schedule": "gpipe"},
            "tensor": {"keep": ["gradients", "weights"], "residual": "hidden"},
        },
    ),
    "columns, message-driven": (
        "gpt",
        4,
        {
            "mesh": {"pipe": 2, "col": 2},
            "batch": {"micro_batches": 3},
            "pipeline": {"executor": "message-driven"},
        },
    ),
}
RUN = {"steps": 3, "global_batch": 12, "eval_every": 3}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> SerialRuns:
    folder = tmp_path_factory.mktemp("references")
    return SerialRuns(lambda name: make_config(folder / name, name, train=RUN), memory={"logits": "all"})


@pytest.mark.parametrize("name", PLANS)
def test_plans(tmp_path: Path, references: SerialRuns, name: str) -> None:
    """Chunks of 5 tokens and fewer, against all logits at once in one process; gpt's head is tied, bert's has a bias."""
    model, ranks, plan = PLANS[name]
    plan = plan | {"precision": {"compute": "fp64"}, "memory": {"logits": str(5 * 8 * 256)}}
    found = run_training(make_config(tmp_path / "run", model, train=RUN), plan, ranks)
    for key in ("loss", "grad_norm", "eval_loss"):
        assert series(found, key) == pytest.approx(series(references[model], key), rel=1e-10)


def test_a_wrong_sum_is_seen(tmp_path: Path, references: SerialRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: the last chunk is left out of dW."""
    add = head_loss._Sums.add
    monkeypatch.setattr(head_loss._Sums, "add", lambda self, rows, dz: add(self, rows, dz * (rows.start == 0)))
    plan = {"precision": {"compute": "fp64"}, "memory": {"logits": str(5 * 8 * 256)}}
    found = run_training(make_config(tmp_path / "run", "gpt", train=RUN), plan, 1)
    assert series(found, "grad_norm") != pytest.approx(series(references["gpt"], "grad_norm"), rel=1e-6)


# ---- memory ----


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_logits_never_exist_at_once(tmp_path: Path, compute: str) -> None:
    """A model that is mostly vocabulary, in a budget that all logits alone exceed; the planner predicts the peaks."""
    model = {"family": "gpt", "layers": 1, "hidden": 16, "heads": 2, "seq_len": 64, "vocab": 4096}
    logits, peaks = 4 * 16 * 64 * 4096, {}  # bytes of 16 sequences' fp32 logits
    for wanted in ("all", "1MiB"):
        config = make_config(tmp_path / wanted, model, train={"steps": 2, "global_batch": 16})
        plan = Plan.from_dict({"memory": {"logits": wanted}, "precision": {"compute": compute}})
        budget = Budget(None)
        with budget, open("/dev/null", "w") as console:
            fit(config, plan, console=console)
        peaks[wanted] = budget.peak.bytes
        spec, here = ModelSpec.from_config(config.model), Cluster.local(1)
        assert predict(plan, spec, here, global_batch=16).peak.peak == pytest.approx(peaks[wanted], rel=0.05)
    assert peaks["all"] > 2 * logits
    assert peaks["1MiB"] < logits / 2


class _Traffic(TorchDispatchMode):
    """Counts the bytes that operators between the matmuls read and write."""

    moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name in ("mm", "addmm_", "zeros_like", "empty_like", "new_empty", "gather", "index_put_"):
            return out
        read = [a for a in (args[1:2] if name == "copy_" else args) if isinstance(a, Tensor)]
        self.moved += sum(t.nbytes for t in [*read, *([out] if isinstance(out, Tensor) else [])])
        return out


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_planner_charges_what_the_chunks_read_and_write(dtype: str) -> None:
    """Loss and gradients of 1,024 tokens in four chunks, by the bytes of every operator that runs."""
    tokens, hidden, words, rows = 1024, 64, 4000, 256
    compute = getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[dtype])
    h, w = torch.randn(tokens, hidden, dtype=compute), torch.randn(words, hidden, dtype=compute)
    how, wanted = ChunkedLoss(rows), (True, True, False)
    with _Traffic() as counted:
        head_loss.losses_in_chunks(h, w, None, torch.zeros(tokens).long(), how, head_loss.VocabPart(words), wanted)
    base = Cluster.preset("h200")
    device = replace(base.device, memory_rate=1e6, operator=0.0)
    model = ModelConfig(family="llama", layers=2, hidden=hidden, heads=4, vocab=words, seq_len=tokens)
    problem = PlanProblem(
        ModelSpec.from_config(model),
        replace(base, device=device),
        1,
        Precision(compute=dtype),  # type: ignore[arg-type]
        logits=str(rows * words * (2 if dtype == "bf16" else 4)),
    )
    assert logit_rows(problem, tokens, 1) == rows
    loss = next(o for o in problem.spec.units[-1].operators if o.name == "loss")
    predicted = 1e6 * sum(operator_seconds(problem, loss, tokens, 1, 1, 1))
    assert predicted == pytest.approx(counted.moved, rel=0.02)
    whole = 1e6 * sum(operator_seconds(replace(problem, logits="all"), loss, tokens, 1, 1, 1))
    assert predicted != pytest.approx(whole, rel=0.1)
