"""Compiled where that works, uncompiled with a line that says why where it does not."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold import Plan
from fourfold.errors import PlanError
from fourfold.plan import Precision
from fourfold.planner.problem import PlanProblem
from fourfold.runtime._torch import keep_gradients
from fourfold.runtime.compiled import OrUncompiled, compiled, set_compile_cache
from fourfold.runtime.stage import keep_products
from fourfold.runtime.weight_grad import WeightGradQueue, defer
from tests.helpers import compile_without_code


def test_what_is_compiled() -> None:
    assert Precision().compile == "auto"
    assert Precision().compiles("cuda")
    assert not Precision().compiles("cpu")
    assert Precision(compile=True).compiles("cpu")
    assert not Precision(compile=False).compiles("cuda")
    summa = {"mesh": {"row": 2, "col": 2}, "tensor": {"flow": "summa"}}
    assert "summa" in Plan.from_dict(summa).not_compiled
    assert not Plan.from_dict(summa).compiles("cuda")
    assert Plan.from_dict({"mesh": {"row": 2, "col": 2}}).compiles("cuda")
    assert "compiled" in vars(PlanProblem)  # the planner asks it, not the field
    with pytest.raises(PlanError, match="compile"):
        Plan.from_dict({"precision": {"compile": "some"}})


def test_a_function_that_cannot_be_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The compiler fails on the second of two functions: it runs as it is, is not tried again, and its own errors are its own."""
    real, calls = torch.compile, []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        if any("tanh" in str(node.target) for node in graph.graph.nodes):
            raise NotImplementedError("no kernel for tanh on this machine")
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda run, **_: real(run, backend=backend))
    x = torch.randn(5, requires_grad=True)

    def fine(x: Tensor) -> Tensor:
        return x * 2

    def fails(x: Tensor) -> Tensor:
        return x.tanh() * 2

    good, bad = OrUncompiled("blocks.0.attn", fine), OrUncompiled("blocks.0.mlp", fails)
    for _ in range(3):
        assert torch.equal(good(x), fine(x))
        assert torch.equal(bad(x), fails(x))
    assert len(calls) == 2  # each was compiled once
    lines = [line for line in capsys.readouterr().err.splitlines() if "uncompiled" in line]
    assert len(lines) == 1
    assert lines[0].startswith("blocks.0.mlp runs uncompiled: torch.compile failed: ")
    assert "no kernel for tanh" in lines[0]
    (grad,) = torch.autograd.grad(bad(x).sum(), x)
    assert torch.allclose(grad, 2 * (1 - x.detach().tanh() ** 2))
    with pytest.raises(RuntimeError, match="size"):
        OrUncompiled("head", lambda a, b: a + b)(torch.zeros(2), torch.zeros(3))


def _added(x: Tensor, w: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for _ in range(2):
        y += x * w
    return y


RETURNS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "another tensor": lambda x, w: x * w,
    "in place": lambda x, w: (x * w).mul_(2),
    "out=": lambda x, w: torch.mul(x, w, out=torch.empty_like(x)),
    "copied into": lambda x, w: torch.empty_like(x).copy_(x * w),
    "summed in a loop": _added,
    "already contiguous": lambda x, w: (x * w).contiguous(),
    "already of that type": lambda x, w: (x * w).to(x.dtype),
    "of the same shape": lambda x, w: (x * w).reshape(x.shape[0], -1, 2).flatten(1).contiguous(),
    "already flat": lambda x, w: (x * w).flatten(1),
}


def _scaled(forward: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """A function of a layer of the user's, whose gradients are not what autograd would find."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            y = forward(x, w)
            ctx.save_for_backward(w, y)
            return y

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
            w, y = ctx.saved_tensors
            return grads[0] * w * 3, (grads[0] * y).sum(0)

    return Scaled.apply


@pytest.mark.parametrize("returned", RETURNS)
def test_autograd_functions_keep_their_gradients(returned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 would return gradients of zero for each but the first. Also under selective recomputation."""
    compile_without_code(monkeypatch)
    function = _scaled(RETURNS[returned])

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return function(x.sin(), w).cos()

    again = functools.partial(checkpoint, layer, use_reentrant=False, context_fn=keep_products)
    for run in (layer, again):
        torch.compiler.reset()
        for rows in (3, 5):  # compiled for any number of rows when a second one is seen
            inputs = [
                torch.linspace(1, 2, 4 * rows).view(rows, 4).requires_grad_(),
                torch.linspace(1, 3, 4).requires_grad_(),
            ]
            expected = torch.autograd.grad(layer(*inputs).sum(), inputs)
            found = torch.autograd.grad(compiled(run)(*inputs).sum(), inputs)
            assert all(map(torch.allclose, found, expected))
            assert all(bool(grad.all()) for grad in expected)


def test_outputs_that_are_one_tensor_are_parted() -> None:
    """The graph that torch 2.11 makes of a function that returns x.mul(2).mul_(3): autograd's gradient goes to the wrong output."""
    forward, backward, graph = torch.fx.Graph(), torch.fx.Graph(), torch.fx.Graph()
    doubled = forward.call_method("mul", (forward.placeholder("x"), 2))
    doubled.meta["example_value"] = torch.ones(2)
    forward.output(((forward.call_method("mul_", (doubled, 3)), doubled), ()))
    grad, _ = backward.placeholder("grad"), backward.placeholder("unused")
    backward.output((backward.call_method("mul", (grad, 6)),))
    bodies = {"fwd_body": forward, "bwd_body": backward}
    root = {name: torch.fx.GraphModule({}, body) for name, body in bodies.items()}
    x, function = graph.placeholder("x"), torch.ops.higher_order.autograd_function_apply
    indices: dict[str, Any] = {"non_differentiable_idx": [], "saved_for_backward_idx": []}
    made = graph.call_function(function, (*map(graph.get_attr, root), x), indices)
    graph.output(graph.call_function(operator.getitem, (made, 0)))
    module = torch.fx.GraphModule(root, graph)
    for expected in (0, 6):
        value = torch.ones(2, requires_grad=True)
        out = module(value)
        assert out.tolist() == [6, 6]
        out.sum().backward()
        assert value.grad is not None
        assert value.grad.tolist() == [expected, expected]
        keep_gradients(module)


def test_compiled_code_has_a_lasting_place(tmp_path: Path) -> None:
    found = {"XDG_CACHE_HOME": str(tmp_path)}
    set_compile_cache(found)
    assert found["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "fourfold" / "inductor")
    own = {"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}
    set_compile_cache(own)
    assert own == {"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}
    (tmp_path / "file").touch()
    nowhere = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    set_compile_cache(nowhere)
    assert "TORCHINDUCTOR_CACHE_DIR" not in nowhere  # torch's own folder


def test_layers_with_deferred_weight_gradients_share_compiled_code() -> None:
    """Torch compiles a function at most eight times; the ninth layer would run uncompiled."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    found: list[str] = []
    queue, unit = WeightGradQueue(), SimpleNamespace(add_weight_grad=lambda name, x, dy: found.append(name))
    layers = [Layer() for _ in range(3)]
    x = torch.randn(2, 4, requires_grad=True)
    for layer in layers:
        defer(layer, queue, unit)  # type: ignore[arg-type]
        torch.autograd.grad(torch.compile(layer, backend=backend)(x).sum(), x)
    assert len(graphs) == 1
    assert found == 3 * ["second.weight", "first.weight"]


def test_many_kinds_of_layers_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []
    whole = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda run, **_: whole(run, backend=lambda g, _: graphs.append(g) or g.forward)
    )

    class Layer(nn.Module):
        def __init__(self, window: str):
            super().__init__()
            self.window = window

        def forward(self, x: Tensor) -> Tensor:
            return x + len(self.window)

    for i in range(10):
        assert OrUncompiled(f"blocks.{i}", Layer(i * "."))(torch.zeros(2)).tolist() == [i, i]
    assert len(graphs) == 10
