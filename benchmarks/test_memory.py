"""Memory predicted against bytes counted in real training; the whole table is `python -m benchmarks.memory`."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.common import Row
from benchmarks.memory import alone, measure

GPT = {"family": "gpt", "layers": 3, "hidden": 96, "heads": 4, "seq_len": 48, "vocab": 1024}
LLAMA = {
    "family": "llama",
    "layers": 3,
    "hidden": 96,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 256,
    "seq_len": 48,
    "vocab": 128,
}
BERT = {"family": "bert", "layers": 3, "hidden": 96, "heads": 4, "seq_len": 48, "vocab": 256}

QWEN = {**LLAMA, "qk_norm": True}
LORA: dict[str, Any] = {"lora": {"rank": 8}}
SOME: dict[str, Any] = {"lora": {"rank": 8, "targets": ["q_proj", "v_proj"]}}


def rule(match: str = "*", **more: Any) -> dict[str, Any]:
    return {"match": match, **more}


EACH = {"reduce": "micro-batch", "mode": "zero3"}
SLICED = [rule("*.mlp", mode="zero3", split=4, recompute="per-slice"), rule(mode="zero3")]


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (GPT, {"mesh": {"data": 2}}),
        (GPT, {"mesh": {"data": 4}, "unit": [rule(recompute="full", **EACH)], "batch": {"micro_batches": 4}}),
        (GPT, {"mesh": {"data": 4}, "unit": [rule(reduce="micro-batch")], "batch": {"micro_batches": 4}}),
        (GPT, {"mesh": {"row": 2, "col": 2}}),
        (GPT, {"mesh": {"row": 2, "col": 2}, "precision": {"compute": "bf16"}}),
        (GPT, {"mesh": {"data": 2}, "memory": {"moments": "bf16"}}),
        (LLAMA, {"mesh": {"data": 2}, "unit": [rule(recompute="selective")], "precision": {"compute": "bf16"}}),
        (LLAMA, {"mesh": {"data": 4}, "unit": [rule(mode="zero3", within=2)], "batch": {"micro_batches": 2}}),
        (LLAMA, {"mesh": {"data": 4}, "unit": [rule(mode="zero3")], "memory": {"prefetch": 0}}),
        (LLAMA, {"mesh": {"data": 2, "col": 2}, "unit": [rule(mode="keep")], "batch": {"micro_batches": 2}}),
        (LLAMA, {"mesh": {"data": 2}, "memory": {"optimizer": "host"}, "precision": {"compute": "bf16"}}),
        (BERT, {"mesh": {"data": 4}, "unit": [rule(mode="zero2")]}),
        (BERT, {"mesh": {"data": 2}, "unit": SLICED}),
        (QWEN, {"mesh": {"data": 2}}),
        *(({**model, "dropout": 0.1}, {"mesh": {"data": 2}}) for model in (GPT, LLAMA, BERT, QWEN)),
        *(({**GPT, "dropout": 0.1}, {"mesh": {"data": 2}, "unit": [rule(recompute=r)]}) for r in ("selective", "full")),
        ({**LLAMA, "dropout": 0.1}, {"mesh": {"data": 2}, "precision": {"compute": "bf16"}}),
        ({**GPT, "dropout": 0.1}, {"mesh": {"col": 2}}),
        ({**GPT, "dropout": 0.1}, {"mesh": {"data": 2}, "unit": SLICED}),
        *((model, {"mesh": {"data": 2}}) for model in (GPT | LORA, LLAMA | LORA, LLAMA | SOME, BERT | LORA)),
        (LLAMA | LORA, {"mesh": {"data": 2}, "unit": [rule(recompute="full")], "precision": {"compute": "bf16"}}),
        (LLAMA | LORA, {"mesh": {"data": 2}, "unit": [rule(recompute="selective")]}),
        (LLAMA | LORA, {"mesh": {"data": 4}, "unit": [rule(recompute="full", **EACH)], "batch": {"micro_batches": 4}}),
        (LLAMA | LORA, {"mesh": {"data": 2}, "unit": SLICED}),
        (GPT | LORA, {"mesh": {"row": 2, "col": 2}}),
        (LLAMA | LORA, {"mesh": {"data": 2}, "memory": {"optimizer": "host"}, "precision": {"compute": "bf16"}}),
    ],
)
def test_one_rank(model: dict[str, Any], plan: dict[str, Any]) -> None:
    assert alone(model, plan) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("gpt", {"mesh": {"data": 2}, "unit": [{"match": "*", "mode": "zero3"}], "batch": {"micro_batches": 2}}),
        ("llama", {"mesh": {"pipe": 2}, "batch": {"micro_batches": 4}, "unit": [{"match": "*", "recompute": "full"}]}),
        ("gpt", {"mesh": {"pipe": 2}, "batch": {"micro_batches": 4}, "pipeline": {"schedule": "zb-v"}}),
    ],
)
def test_real_runs(model: str, plan: dict[str, Any]) -> None:
    row = measure("", model, plan)
    assert isinstance(row, Row), row
    assert row.ratio == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize(
    "sections", [{}, {"mesh": {"data": 2}}, {"mesh": {"data": 4}, "unit": [{"match": "*", "mode": "zero3"}]}]
)
def test_the_planner_counts_consumed_gradients(sections: dict[str, Any]) -> None:
    """Predicted over counted bytes of one rank."""
    fields = {"family": "gpt", "layers": 4, "hidden": 64, "heads": 4, "seq_len": 16, "vocab": 64}
    made = {"memory": {"optimizer": "host", "gradients": "consume"}, **sections}
    assert alone(fields, made, batch=4) == pytest.approx(1, abs=0.01)
