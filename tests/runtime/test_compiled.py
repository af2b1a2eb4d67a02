"""Compiled where that works, uncompiled with a line that says why where it does not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold import Plan
from fourfold.errors import PlanError
from fourfold.plan import Precision
from fourfold.planner.problem import PlanProblem
from fourfold.runtime.compiled import OrUncompiled, set_compile_cache
from fourfold.runtime.weight_grad import WeightGradQueue, defer


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
    monkeypatch.setattr(torch, "compile", lambda run: whole(run, backend=lambda g, _: graphs.append(g) or g.forward))

    class Layer(nn.Module):
        def __init__(self, window: str):
            super().__init__()
            self.window = window

        def forward(self, x: Tensor) -> Tensor:
            return x + len(self.window)

    for i in range(10):
        assert OrUncompiled(f"blocks.{i}", Layer(i * "."))(torch.zeros(2)).tolist() == [i, i]
    assert len(graphs) == 10
