"""Every Hugging Face family against transformers: logits and gradients, in fp64 and in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fourfold.model.families import FAMILIES
from fourfold.model.spec import parameter_shapes, unit_names
from tests.families import CASES, EVERY, TOKENS, VOCAB, config_of, gradients_gap, ours, tensors_of, theirs, wide

transformers = pytest.importorskip("transformers")


def test_every_family_is_tested() -> None:
    assert set(CASES) == set(FAMILIES)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("name", EVERY)
def test_logits_and_gradients_are_those_of_transformers(
    name: str, dtype: torch.dtype, close: float, tmp_path: Path
) -> None:
    tokens = torch.randint(0, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    targets = tokens.roll(-1, 1)
    with wide(dtype):
        other = theirs(name, dtype)
        expected = other(input_ids=tokens).logits
        F.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    m = config_of(other, tmp_path)
    model = ours(name, m, tensors_of(other), dtype)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == parameter_shapes(m)
    assert list(model.units()) == unit_names(m)
    with torch.no_grad():
        assert (model(tokens) - expected).abs().max() < min(close, 1e-5) * expected.abs().max()
    model(tokens, targets).backward()
    assert gradients_gap(model, name, other) < close
