"""Linears in fp8: exact where numbers are representable, as near to fp64 as e4m3 allows elsewhere, and the same under every plan."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.cluster import Cluster
from fourfold.config import ModelConfig
from fourfold.errors import PlanError
from fourfold.model.build import serial_model
from fourfold.model.fp8 import FP8, Fp8Linear, fp8_input_grad, fp8_linear, quantize, use_fp8
from fourfold.model.operators import ModelSpec
from fourfold.model.spec import OwnLayers
from fourfold.plan import Plan
from fourfold.planner.api import named_precision, plan_problem
from fourfold.planner.compute_cost import matmul_seconds
from fourfold.planner.problem import Constraints, PlanProblem
from tests.helpers import MODELS, compile_without_code, make_config, run_training, series
from tests.test_packing import packed_config

BF16 = torch.bfloat16
PRECISION: dict[str, Any] = {"compute": "bf16", "matmul": "fp8", "compile": False}
MODEL = MODELS["gpt"] | {"layers": 4}


def decibels(found: Tensor, exact: Tensor) -> float:
    """Ratio of the signal to the error."""
    return float(10 * torch.log10(exact.square().sum() / (found.double() - exact).square().sum()))


def a_linear(inputs: int = 256, outputs: int = 128, bias: bool = True) -> nn.Linear:
    torch.manual_seed(1)
    linear = nn.Linear(inputs, outputs, bias=bias, dtype=BF16)
    use_fp8(linear)
    assert type(linear) is Fp8Linear
    return linear


# ---- numbers ----


def test_products_of_representable_integers_are_exact() -> None:
    """Integers up to 8 have three bits, and powers of two scale them; sums below 2^8 are bf16 numbers, too."""
    torch.manual_seed(0)
    x, w = (torch.randint(-2, 3, (n, 32)).to(BF16) for n in (48, 64))
    dy = torch.randint(-1, 2, (48, 64)).to(BF16)
    assert torch.equal(fp8_linear(x, w).double(), x.double() @ w.double().t())
    assert torch.equal(fp8_input_grad(dy, w).double(), dy.double() @ w.double())
    scaled = x * 2.0 ** torch.arange(-24, 24)[:, None].to(BF16)
    assert torch.equal(fp8_linear(scaled, w).double(), scaled.double() @ w.double().t())


def test_rows_of_powers_of_two_come_back() -> None:
    """Twelve powers of two below the largest are normal numbers of e4m3, and three more are subnormal."""
    row = 2.0 ** torch.arange(0, -16, -1)
    for largest in (2.0**-90, 1e-3, 1.0, 3e4, 2.0**100):
        x = (row * 2.0 ** torch.tensor(largest).log2().floor()).to(BF16)[None]
        q, scale = quantize(x)
        assert torch.equal(q.float() * scale, x.float())
        assert q.dtype == FP8
        assert torch.equal(scale.log2(), scale.log2().round())


def test_the_largest_number_of_a_row_uses_the_range() -> None:
    """The scale is the smallest power of two that fits: the largest becomes 224 to 448, and 1.75 · 2^8 itself needs no more."""
    x = torch.arange(1, 4, 1 / 64)[:, None]
    q, scale = quantize(x)
    largest = (x / scale).amax(-1)
    assert largest.max() == 448
    assert largest.min() > 224
    assert q.float().isfinite().all()


def test_errors_are_those_of_three_bits() -> None:
    """About 29 dB for normal x, W and dy; the weight gradient is that of bf16."""
    linear = a_linear()
    x = torch.randn(2, 64, 256, dtype=BF16, requires_grad=True)
    y = linear(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    w, b = linear.weight, linear.bias
    assert x.grad is not None
    assert w.grad is not None
    assert b.grad is not None
    exact = x.detach().double() @ w.detach().double().t() + b.detach().double()
    assert 25 < decibels(y.detach(), exact) < 33
    assert 25 < decibels(x.grad, dy.double() @ w.detach().double()) < 33
    flat = dy.flatten(0, 1)
    assert torch.equal(w.grad, flat.t() @ x.detach().flatten(0, 1))
    assert torch.equal(b.grad, flat.sum(0))


def test_an_outlier_costs_its_own_row_only() -> None:
    """One feature of one token is 1e4: other tokens keep their precision. A scale for the whole tensor would lose them."""
    linear, x = a_linear(bias=False), torch.randn(64, 256).to(BF16)
    without = linear(x)
    x[3, 7] = 1e4
    y = linear(x)
    others = [i for i in range(64) if i != 3]
    assert torch.equal(y[others], without[others])
    assert decibels(y.detach(), x.double() @ linear.weight.detach().double().t()) > 25
    everywhere = x.clone()
    everywhere[:, 7] = 1e4
    assert linear(everywhere).isfinite().all()


def test_rows_of_zeros_and_rows_that_are_not_finite() -> None:
    linear, x = a_linear(bias=False), torch.randn(8, 256).to(BF16)
    fine = linear(x)
    x[1], x[2, 5], x[3, 6], x[4] = 0.0, float("nan"), float("inf"), 1e-38
    y = linear(x)
    assert (y[1] == 0).all()
    assert y[2].isnan().all()
    assert not y[3].isfinite().any()
    assert y[4].isfinite().all()
    assert torch.equal(y[[0, 5, 6, 7]], fine[[0, 5, 6, 7]])


def test_torchs_kernel_gives_the_same() -> None:
    """torch._scaled_mm, which is used on GPUs, exists for CPUs, too."""
    if torch.__version__ < "2.12":
        pytest.skip("torch 2.11 has no scales per row on CPUs")
    torch.manual_seed(0)
    x, w = torch.randn(48, 64).to(BF16), torch.randn(32, 64).to(BF16)
    (x_q, x_scale), (w_q, w_scale) = quantize(x), quantize(w)
    y = torch._scaled_mm(x_q, w_q.t(), x_scale, w_scale.t(), out_dtype=BF16)
    assert torch.allclose(y.float(), fp8_linear(x, w).float(), rtol=2**-7, atol=1e-3)
    dy = torch.randn(48, 32).to(BF16)
    (d_q, d_scale), (t_q, t_scale) = quantize(dy), quantize(w.t())
    assert t_q.is_contiguous()
    dx = torch._scaled_mm(d_q, t_q.t(), d_scale, t_scale.t(), out_dtype=BF16)
    assert torch.allclose(dx.float(), fp8_input_grad(dy, w).float(), rtol=2**-7, atol=1e-3)


def test_only_linears_of_blocks_change(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", MODEL).resolve()
    model = serial_model(config.model, 0, dtype=BF16)
    use_fp8(model.blocks)
    changed = {name.split(".", 2)[2] for name, m in model.named_modules() if isinstance(m, Fp8Linear)}
    assert changed == {"attn.qkv", "attn.out", "mlp.up", "mlp.down"}


def test_compiled_code_gives_the_same_bits() -> None:
    """Up to the generation of C++: quantisation and its gradient are one graph of plain operators."""
    linear = a_linear()
    x = torch.randn(32, 256, dtype=BF16)
    found = []
    for run in (linear, torch.compile(linear, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        linear.weight.grad = None
        y.backward(torch.ones_like(y))
        found.append((y.detach(), leaf.grad, linear.weight.grad))
    assert all(map(torch.equal, *found))


# ---- plans ----


def final(folder: Path, name: str, plan: dict[str, Any], ranks: int, **sections: Any) -> tuple[list[float], bytes]:
    config = make_config(folder / name, sections.pop("model", MODEL), **sections)
    metrics = run_training(config, {"precision": PRECISION} | plan, ranks)
    return series(metrics, "loss"), (folder / name / "final" / "model.safetensors").read_bytes()


@functools.cache
def serial(folder: Path) -> tuple[list[float], bytes]:
    """One process, three micro-batches, no clipping."""
    return final(folder, "serial", {"batch": {"micro_batches": 3}}, 1, optim={"clip": 0.0})


TWO: dict[str, Any] = {"mesh": {"data": 2}, "batch": {"micro_batches": 3}}


@functools.cache
def replicas(folder: Path) -> tuple[list[float], bytes]:
    return final(folder, "replicas", TWO, 2, optim={"clip": 0.0})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fp8")


SAME_BITS: dict[str, tuple[int, dict[str, Any]]] = {
    "recomputed": (1, {"unit": [{"match": "blocks.*", "recompute": "full"}]}),
    "recomputed but for matmuls": (1, {"unit": [{"match": "blocks.*", "recompute": "selective"}]}),
    "gpipe": (2, {"mesh": {"pipe": 2}, "pipeline": {"schedule": "gpipe"}}),
    "zb-h1": (2, {"mesh": {"pipe": 2}, "pipeline": {"schedule": "zb-h1"}}),
    "zb-v, recomputed": (
        2,
        {"mesh": {"pipe": 2}, "pipeline": {"schedule": "zb-v"}, "unit": [{"match": "blocks.*", "recompute": "full"}]},
    ),
    "on the host": (1, {"memory": {"optimizer": "host", "activations": "host"}}),
}


@pytest.mark.parametrize("name", SAME_BITS)
def test_plans_that_reorder_nothing_have_the_bits_of_one_process(folder: Path, name: str) -> None:
    ranks, plan = SAME_BITS[name]
    assert final(folder, name, {"batch": {"micro_batches": 3}} | plan, ranks, optim={"clip": 0.0}) == serial(folder)


@pytest.mark.parametrize("mode", ["zero3", "zero2", "keep"])
def test_sharding_has_the_bits_of_replicas(folder: Path, mode: str) -> None:
    """Two addends have one sum; replicas are near one process, whose sums have another order."""
    found = final(folder, mode, TWO | {"unit": [{"match": "*", "mode": mode}]}, 2, optim={"clip": 0.0})
    assert found == replicas(folder)
    assert found[0] == pytest.approx(serial(folder)[0], rel=0.01)


def test_slices_and_sharding_in_a_pipeline_stay_near_one_process(folder: Path) -> None:
    plan = {
        "mesh": {"pipe": 2, "data": 2},
        "batch": {"micro_batches": 3},
        "pipeline": {"schedule": "zb-h1"},
        "unit": [{"match": "*.mlp", "mode": "zero3", "split": 2}, {"match": "*", "mode": "zero3"}],
    }
    losses, _ = final(folder, "slices", plan, 4, optim={"clip": 0.0})
    assert losses == pytest.approx(serial(folder)[0], rel=0.01)


def test_it_is_fp8_that_runs_and_it_learns(folder: Path) -> None:
    narrow = {"precision": {"compute": "bf16", "compile": False}, "batch": {"micro_batches": 3}}
    losses, _ = final(folder, "bf16", narrow, 1, optim={"clip": 0.0})
    assert losses != serial(folder)[0]
    assert losses == pytest.approx(serial(folder)[0], rel=0.02)
    assert serial(folder)[0][-1] < serial(folder)[0][0] - 0.1


def test_resumed_runs_have_the_same_bits(folder: Path) -> None:
    steady = {"optim": {"decay": "constant", "clip": 0.0}}
    whole = final(folder, "whole", {}, 1, train={"steps": 6}, **steady)
    final(folder, "parts", {}, 1, train={"steps": 3}, **steady)
    config = make_config(folder / "parts", MODEL, train={"steps": 6}, **steady)
    losses = series(run_training(config, {"precision": PRECISION}, 1, resume=True), "loss")
    assert (losses, (folder / "parts" / "final" / "model.safetensors").read_bytes()) == whole


def test_a_split_backward_under_compile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp8 linears that queue their weight gradients are captured whole."""
    compile_without_code(monkeypatch)
    plan = {"mesh": {"pipe": 2}, "pipeline": {"schedule": "zb-h1"}, "batch": {"micro_batches": 3}}
    losses, _ = final(folder, "compiled", plan | {"precision": PRECISION | {"compile": True}}, 2, optim={"clip": 0.0})
    assert losses == pytest.approx(serial(folder)[0], rel=0.01)


def test_packed_documents(folder: Path) -> None:
    """Documents of a window, in a pipeline whose units are recomputed, against one process."""
    found = []
    for name, ranks, plan in (
        ("packed", 1, {}),
        ("packed, wave", 2, {"mesh": {"pipe": 2}, "pipeline": {"schedule": "wave"}}),
    ):
        config = packed_config(folder / name, "gpt", data={"packing": "documents"})
        plan = plan | {"batch": {"micro_batches": 3}, "unit": [{"match": "*", "recompute": "full"}]}
        found.append(series(run_training(config, {"precision": PRECISION} | plan, ranks), "loss"))
    assert found[0][0] == found[1][0]
    assert found[1] == pytest.approx(found[0], rel=1e-4)


# ---- refusals ----


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        ({}, {"mesh": {"col": 2}}, r"mesh.col = 2: linears on a tensor grid .* use col = 1"),
        ({}, {"mesh": {"row": 2}}, r"mesh.row = 2: linears on a tensor grid .* use row = 1"),
        ({"hidden": 40}, {}, r"the model's hidden is 40, .* multiples of 16; use 48"),
        ({"ffn": 136}, {}, r"the model's ffn is 136, .* multiples of 16; use 144"),
        (
            {},
            {"unit": [{"match": "*.mlp", "mode": "zero3", "split": 3}]},
            r"split = 3 has slices of ffn 128 / 3 .* use split = 2",
        ),
    ],
)
def test_what_cannot_be_is_refused(model: dict[str, Any], plan: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", MODEL | model).resolve()
    with pytest.raises(PlanError, match=message):
        Plan.from_dict(plan | {"precision": PRECISION}).check(config)


@pytest.mark.parametrize("compute", ["fp32", "fp64"])
def test_fp8_needs_bf16(compute: str) -> None:
    with pytest.raises(
        PlanError, match=f"precision.compute = '{compute}': .* use compute = 'bf16', or matmul = 'compute'"
    ):
        Plan.from_dict({"precision": PRECISION | {"compute": compute}})


def test_own_layers_are_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", MODEL).resolve()
    with pytest.raises(PlanError, match="layers of your own model run unchanged; use matmul = 'compute'"):
        Plan.from_dict({"precision": PRECISION}).check(config, own=OwnLayers({"0": 16, "1": 16}, None))


def test_adapters_are_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", MODELS["llama"], lora={"rank": 4}).resolve()
    with pytest.raises(PlanError, match="adapters"):
        Plan.from_dict({"precision": PRECISION}).check(config)


# ---- planner ----


def a_problem(cluster: str, precision: str) -> PlanProblem:
    """A Llama of 8 B parameters."""
    model = {
        "family": "llama", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256,
        "seq_len": 8192,
    }  # fmt: skip
    spec = ModelSpec.from_config(ModelConfig(**model).resolve())
    return PlanProblem(spec, Cluster.preset(cluster, nodes=1), 64, named_precision(precision))


def test_the_planner_prices_fp8() -> None:
    """Of the H200's layer with 16,384 tokens: forward and dx at twice the rate, dW as before, and quantisation of about 0.5 ms each."""
    for kind, k, n in (("up", 4096, 28672), ("down", 14336, 4096)):
        times = []
        for precision in ("bf16", "fp8"):
            problem = a_problem("h200", precision)
            o = next(o for u in problem.spec.units for o in u.operators if o.name == kind)
            assert (o.inputs, o.outputs) == (k, n)
            times.append(matmul_seconds(problem, o, 16384, 1, 1))
        (forward, dx, dw), (forward_8, dx_8, dw_8) = times
        assert dw_8 == dw
        assert 1.5 < forward / forward_8 < 2
        assert 1.5 < dx / dx_8 < 2
    head = next(o for o in a_problem("h200", "fp8").spec.units[-1].operators if o.name == "proj")
    assert matmul_seconds(a_problem("h200", "fp8"), head, 1024, 1, 1) == matmul_seconds(
        a_problem("h200", "bf16"), head, 1024, 1, 1
    )


def test_the_planner_knows_fp8() -> None:
    plans = [plan_problem(a_problem("h200", precision), Constraints({})) for precision in ("bf16", "fp8")]
    seconds = [plan.predicted["seconds"] for plan in plans if plan.predicted]
    assert 1.15 < seconds[0] / seconds[1] < 1.6
    assert plans[1].precision.matmul == "fp8"
    assert plans[1].mesh.row == plans[1].mesh.col == 1


@pytest.mark.parametrize("cluster", ["a100-80g", "v100-16g", "rtx-3090", "a6000", "mi300x"])
def test_gpus_without_fp8_are_refused(cluster: str) -> None:
    with pytest.raises(
        PlanError, match=rf"{cluster} .* has no rate of fp8 matmuls: .* use matmul = 'compute', a preset"
    ):
        a_problem(cluster, "fp8")


def test_a_grid_is_refused_by_the_planner() -> None:
    with pytest.raises(PlanError, match="mesh.col = 2"):
        plan_problem(a_problem("h200", "fp8"), Constraints({"col": 2}))


def test_a_cpu_emulates_it() -> None:
    assert (
        matmul_seconds(a_problem("local", "fp8"), a_problem("local", "fp8").spec.units[1].operators[1], 64, 1, 1)[0] > 0
    )
