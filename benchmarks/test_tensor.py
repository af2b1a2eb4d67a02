"""The contestants of benchmarks/tensor compute what one process does; a wrong one is found."""

from __future__ import annotations

import pytest
from torch import Tensor

from benchmarks import tensor_layers
from benchmarks.tensor import all_grids, differences, entries_of, predicted_bytes
from benchmarks.tensor_layers import LookAhead, Shape
from fourfold.tensor.flows import Whole
from fourfold.testing.ranks import run_ranks


def worst(names: tuple[str, ...]) -> dict[str, float]:
    entries = [e for e in entries_of(8) if e.name.startswith(names)]
    found = run_ranks(differences, 8, Shape(32, 16), entries, timeout=100.0)
    return {entry.name: max(gaps) for entry, *gaps in zip(entries, *found, strict=True)}


def test_everyone_equals_one_process() -> None:
    found = worst(("grid(1,2,4)", "grid(2,2,2)", "1-D", "2.5-D [2,2,2] look-ahead", "DTensor"))
    assert len(found) == 18
    assert {name: gap for name, gap in found.items() if gap > 1e-11} == {}


def test_a_wrong_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_step_short(self: LookAhead, x: Tensor, w: Tensor, whole: Whole) -> tuple[Tensor, Tensor]:
        steps = zip(
            *(tensor_layers._broadcasts(t, a) for t, a in ((x, self.grid.col), (w, self.grid.row))), strict=True
        )
        return [x_t @ w_t.t() for x_t, w_t in steps][-1], x

    monkeypatch.setattr(LookAhead, "forward", one_step_short)
    assert min(worst(("2.5-D [2,2,2] look-ahead",)).values()) > 1e-3


def test_grids_and_their_bytes() -> None:
    """Many tokens: fewer columns."""
    shapes = [Shape(768, 384), Shape(1536, 384), Shape(3072, 192)]
    fewest = [min(all_grids(16), key=lambda degrees: predicted_bytes(shape, degrees)) for shape in shapes]
    assert fewest == [(4, 1, 4), (4, 1, 4), (8, 1, 2)]
    assert len(all_grids(16)) == 15
