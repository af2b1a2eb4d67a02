"""Every Hugging Face family: logits and gradients of transformers, in fp64 and fp32; any plan trains like one process."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fourfold.config import Config, ModelConfig
from fourfold.errors import ConfigError
from fourfold.model.build import serial_model
from fourfold.model.families import FAMILIES
from fourfold.model.hf import HARMLESS, HARMLESS_FORMS, REFUSED, known_keys, read_config
from fourfold.model.operators import ModelSpec
from fourfold.model.spec import parameter_count, parameter_shapes, unit_names
from fourfold.plan import Plan
from fourfold.testing.ranks import run_ranks
from fourfold.train.rundir import RunDir, read_metrics
from fourfold.train.worker import fit
from tests.families import CASES, EVERY, TOKENS, VOCAB, config_of, gradients_gap, ours, tensors_of, theirs, wide
from tests.helpers import make_config, series
from tests.tensor.common import restless_model


def test_every_family_is_tested() -> None:
    assert set(CASES) == set(FAMILIES)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("name", EVERY)
def test_logits_and_gradients_are_those_of_transformers(
    name: str, dtype: torch.dtype, close: float, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
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
    assert parameter_count(m) == sum(p.numel() for p in other.parameters())
    with torch.no_grad():
        assert (model(tokens) - expected).abs().max() < min(close, 1e-5) * expected.abs().max()
    model(tokens, targets).backward()
    assert gradients_gap(model, name, other) < close


@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2", "gpt_neox"])
def test_models_of_transformers_are_traced_as_they_are(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **CASES[name]))
    traced = ModelSpec.from_module(model, torch.zeros(2, TOKENS, dtype=torch.long))
    m = config_of(model, tmp_path)
    spec = ModelSpec.from_config(m)
    assert (traced.parameters, traced.layers, traced.tied) == (spec.parameters, spec.layers, spec.tied)
    more = 1.1 if any(m.windows) else 1.0  # theirs multiplies with keys outside of a window, too
    assert spec.flops_per_token * (1 - 1e-9) < traced.flops_per_token < spec.flops_per_token * more * (1 + 1e-9)
    ours = ModelSpec.from_module(serial_model(m, 0), torch.zeros(2, TOKENS, dtype=torch.long))
    assert ours.flops_per_token == pytest.approx(spec.flops_per_token)


# ---- any plan trains like one process ----

PLANS: tuple[dict[str, Any], ...] = (
    {"mesh": {"pipe": 2, "col": 2}, "batch": {"micro_batches": 2}},
    {"mesh": {"pipe": 2, "data": 2}, "pipeline": {"schedule": "zb-h1"}, "unit": [{"match": "*", "mode": "zero3"}]},
    {"mesh": {"data": 2, "col": 2}, "unit": [{"match": "*", "mode": "zero3", "recompute": "selective"}]},
    {"mesh": {"col": 4}, "tensor": {"residual": "hidden"}},
    {"mesh": {"row": 2, "col": 2}, "unit": [{"match": "*", "recompute": "full"}], "tensor": {"flow": "ws"}},
    {"mesh": {"pipe": 2, "col": 2}, "unit": [{"match": "*", "recompute": "full"}], "tensor": {"residual": "hidden"}},
    {"mesh": {"data": 4}, "unit": [{"match": "head", "mode": "zero3", "split": 3}, {"match": "*", "mode": "zero3"}]},
    {
        "mesh": {"data": 4},
        "unit": [{"match": "*", "mode": "zero3", "recompute": "full"}],
        "memory": {"optimizer": "host"},
    },
)
SPLIT: dict[str, Any] = {
    "mesh": {"data": 2, "col": 2},
    "unit": [{"match": "*.mlp", "mode": "zero3", "split": 2, "recompute": "full"}, {"match": "*", "mode": "zero3"}],
}
"""MLPs in slices, where the family allows it."""


def plans_of(name: str) -> list[dict[str, Any]]:
    """Three plans for a family: one of the pipelines, one with columns, one with zero3 or (where it can) slices.

    Only one of them, another one for the next family, unless FOURFOLD_SLOW_TESTS is set.
    """
    draw = random.Random(name)
    groups = (PLANS[:2], PLANS[3:6], (PLANS[2], *PLANS[6:]))
    chosen = [draw.choice(group) for group in groups]
    if name in SPLITTABLE:
        chosen[2] = SPLIT
    at = FAMILY_NAMES.index(name) // PARTS % len(chosen)
    return chosen if os.environ.get("FOURFOLD_SLOW_TESTS") else [chosen[at]]


SPLITTABLE = ("gpt_neox", "cohere", "granite", "stablelm parallel")
FAMILY_NAMES = [*CASES, "stablelm parallel"]
PARTS = 3


def training_config(folder: Path, name: str) -> Config:
    """A run of two steps, with weights so large that every feature changes the loss."""
    kind, number = name.split()[0], list(EVERY).index(name)
    path = folder / f"{number}" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(EVERY[name] | {"model_type": kind}))
    model = ModelConfig(**read_config(path, 12) | {"seq_len": 12, "init_std": 0.3, "vocab": 256})
    run = make_config(
        folder / f"run-{number}",
        train={"steps": 2, "global_batch": 4},
        optim={"lr": 0.1, "warmup": 0},
        log={"trace": 0},
    )
    return dataclasses.replace(run, model=model)


def train_all(rank: int, ranks: int, jobs: list[tuple[str, Config, dict[str, Any]]]) -> list[tuple[str, Any]]:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (a rank's, until it ends)
    found = []
    for name, config, plan in jobs:
        fit(config, Plan.from_dict(plan | {"precision": {"compute": "fp64"}}))
        metrics = list(read_metrics(RunDir(config.train.run_dir)))
        found.append((name, [series(metrics, key) for key in ("loss", "grad_norm")]))
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_any_plan_trains_like_one_process(tmp_path: Path, part: int) -> None:
    serial, jobs, alone_at = [], [], []
    for number, name in enumerate(FAMILY_NAMES[part::PARTS]):
        config = training_config(tmp_path, name)
        serial.append((name, config, {}))
        for i, plan in enumerate(plans_of(name)):
            train = dataclasses.replace(config.train, run_dir=f"{config.train.run_dir}-{i}")
            jobs.append((f"{name}: {plan}", dataclasses.replace(config, train=train), plan))
            alone_at.append(number)
    (expected,) = run_ranks(train_all, 1, serial, timeout=120.0)
    found, *_ = run_ranks(train_all, 4, jobs, timeout=240.0)
    for number, (title, series_of_plan) in zip(alone_at, found, strict=True):
        for mine, alone in zip(series_of_plan, expected[number][1], strict=True):
            assert mine == pytest.approx(alone, rel=1e-9), title


# ---- every feature shows ----

MUTATIONS = (
    ("gemma2", {"attn_softcap": 0.0}),
    ("gemma2", {"logit_softcap": 0.0}),
    ("gemma2", {"attn_scale": 0.0}),
    ("gemma2", {"embed_scale": 1.0}),
    ("gemma2", {"windows": (6, 0)}),
    ("gemma2", {"norm_plus_one": False}),
    ("gemma3_text", {"rope_local_theta": 0.0}),
    ("gemma3_text", {"rope_scaling": None}),
    ("phi3", {"rope_scaling": None}),
    ("phi3", {"rope_dim": 12, "rope_scaling": None}),
    ("gpt_neox", {"activation": "gelu_tanh"}),
    ("gpt_neox", {"block": "pre"}),
    ("olmo2", {"norm_eps": 1e-2}),
    ("granite", {"residual_scale": 1.0}),
    ("granite", {"logit_scale": 1.0}),
    ("smollm3", {"rope_layers": ()}),
)


@pytest.mark.parametrize(("name", "change"), MUTATIONS)
def test_a_wrong_feature_changes_the_logits(tmp_path: Path, name: str, change: dict[str, Any]) -> None:
    m = dataclasses.replace(training_config(tmp_path, name).model, seq_len=TOKENS, vocab=VOCAB).resolve()
    tokens = torch.randint(0, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    model, wrong = restless_model(m), restless_model(dataclasses.replace(m, **change))
    wrong.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert (model(tokens) - wrong(tokens)).abs().max() > 1e-3


# ---- every key of config.json ----

KEY_VALUES: dict[str, list[Any]] = {
    "_sliding_window_pattern": [2],
    "attention_chunk_size": [4],
    "is_causal": [False],
    "layer_types": [["sliding_attention", "full_attention"] * 2, ["full_attention"] * 4, ["sliding_attention"] * 4],
    "max_window_layers": [1],
    "no_rope_layer_interval": [2],
    "no_rope_layers": [[1, 1, 0, 0]],
    "num_attention_heads": [2],
    "original_max_position_embeddings": [4, 12],
    "partial_rotary_factor": [0.25],
    "position_embedding_type": ["relative_key"],
    "pruned_heads": [{"0": [1]}],
    "rope_local_base_freq": [70.0],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 77.0},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0},
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 50.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "attention_factor": 2.0},
    ],
    "rope_scaling": [{"type": "linear", "factor": 3.0}, {"rope_type": "yarn", "factor": 4.0}],
    "rope_theta": [70.0],
    "rotary_emb_base": [70.0],
    "rotary_pct": [0.25],
    "scale_attn_weights": [False],
    "sliding_window": [3, None],
    "sliding_window_pattern": [2],
    "use_sliding_window": [True, False],
}
"""Values to try for keys that a family may or may not have."""
SKIPPED = {"model_type", "vocab_size", "num_hidden_layers"}


def values_to_try(key: str, value: Any) -> list[Any]:
    """Other values of a key that has `value` in a file."""
    if key in KEY_VALUES:
        return KEY_VALUES[key]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2]
    return [ACTIVATION_TO_TRY] if "act" in key and isinstance(value, str) else []


ACTIVATION_TO_TRY = "relu"


def logits_of_both(kind: str, config: dict[str, Any], folder: Path) -> tuple[torch.Tensor, torch.Tensor] | str:
    """Logits of transformers and of ours for one config.json; or why one of the two refuses it."""
    tokens = torch.randint(0, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    try:
        other = theirs(kind, torch.float32, config)
        with torch.no_grad():
            expected = other(input_ids=tokens).logits
    except Exception as e:  # its own checks, of many types
        return f"transformers: {e}"
    path = folder / "config.json"
    path.write_text(json.dumps(config | {"model_type": kind}))
    try:
        m = ModelConfig(**read_config(path, TOKENS) | {"seq_len": TOKENS}).resolve()
    except ConfigError as e:
        return str(e)
    with torch.no_grad():
        return expected, ours(kind, m, tensors_of(other), torch.float32)(tokens)


@pytest.mark.parametrize(
    "kind", FAMILIES if os.environ.get("FOURFOLD_SLOW_TESTS") else ("gpt2", "llama", "gemma3_text", "olmo3", "smollm3")
)
def test_every_key_that_changes_a_model_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    family = FAMILIES[kind]
    whole = transformers.AutoConfig.for_model(kind, **copy.deepcopy(CASES[kind])).to_dict()
    skipped = SKIPPED | ({"tie_word_embeddings"} if kind == "bert" else set())  # refused when a run starts
    read = known_keys(family) - HARMLESS - set(family.dropouts) - skipped
    tried = 0
    for key in sorted(read | KEY_VALUES.keys() | whole.keys() - HARMLESS - set(family.dropouts) - skipped):
        value = CASES[kind].get(key, whole.get(key))
        for new in values_to_try(key, value):
            both = logits_of_both(kind, copy.deepcopy(CASES[kind]) | {key: new}, tmp_path)
            if not isinstance(both, str):
                assert (both[0] - both[1]).abs().max() < 1e-4 * both[0].abs().max(), f"{key} = {new!r}"
                tried += 1
    assert tried > 8


@pytest.mark.parametrize("kind", FAMILIES)
def test_harmless_keys_change_nothing(kind: str, tmp_path: Path) -> None:
    """All of them at once, with values that transformers accepts and that differ from its defaults."""
    transformers = pytest.importorskip("transformers")
    defaults = transformers.AutoConfig.for_model(kind).to_dict()
    names = HARMLESS - {"architectures", "dtype", "torch_dtype", "id2label", "label2id", "auto_map", "is_decoder"}
    names -= set(FAMILIES[kind].dropouts)
    names -= {
        "initializer_range",
        "attn_implementation",
        "output_attentions",
        "output_hidden_states",
        "torchscript",
        "return_dict",
    }
    extra: dict[str, Any] = {}
    for name in sorted(names | {"bos_token_id", "_name_or_path", "unsloth_version"} - set(CASES[kind])):
        value = defaults.get(name)
        extra[name] = not value if isinstance(value, bool) else 0.7 if isinstance(value, float) else 6
    extra |= {
        "cache_implementation": "dynamic",
        "problem_type": None,
        "num_labels": 3,
        "classifier_dropout": 0.5,
        "bos_token_id": 3,
    }
    extra.pop("model_type")
    both = logits_of_both(kind, CASES[kind] | extra, tmp_path)
    assert not isinstance(both, str), both
    alone = logits_of_both(kind, CASES[kind], tmp_path)
    assert (both[0] - alone[0]).abs().max() < 1e-5 * alone[0].abs().max()
    assert (both[0] - both[1]).abs().max() < 1e-4 * both[0].abs().max()


PUBLISHED: list[tuple[str, dict[str, Any]]] = [
    (
        "llama",
        {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
    ),  # SmolLM2
    ("llama", {"neftune_noise_alpha": 5.0, "unsloth_fixed": True, "pad_token": "<pad>"}),  # fine-tuned models
    ("starcoder2", {"activation_function": "gelu", "mlp_type": "default", "norm_type": "layer_norm"}),
    ("starcoder2", {"scale_attn_weights": True, "attention_softmax_in_fp32": True, "layer_norm_epsilon": 1e-3}),
    ("gemma", {"hidden_activation": "gelu_pytorch_tanh"}),
    ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "sliding_window_size": 4096, "cache_implementation": "hybrid"}),
    ("qwen2", {"use_mrope": False}),
]
"""Keys of published files that the classes of transformers do not have."""


@pytest.mark.parametrize(("kind", "extra"), PUBLISHED)
def test_published_files_have_keys_that_nobody_reads(kind: str, extra: dict[str, Any], tmp_path: Path) -> None:
    def fields(config: dict[str, Any]) -> dict[str, Any]:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config | {"model_type": kind}))
        return read_config(path, TOKENS)

    assert fields(CASES[kind] | extra) == fields(CASES[kind])


ELSEWHERE = {
    "_attn_implementation",
    "embedding_size",
    "get_text_config",
    "hidden_dropout",
    "image_token_id",
    "mm_tokens_per_image",
    "summary_last_dropout",
    "text_config",
    "vision_config",
}
"""Names that the code of transformers reads for other heads, for images, or that are not in files."""


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_key_that_transformers_reads_is_known(kind: str) -> None:
    """By its source: `config.name`, `getattr(config, "name")`, and in the shared code of masks and rotary embeddings."""
    transformers = pytest.importorskip("transformers")
    folder = Path(transformers.__file__).parent
    name = kind.removesuffix("_text")
    texts = [folder / "models" / name / f"modeling_{name}.py", folder / "masking_utils.py"]
    found: set[str] = set()
    for text in texts:
        source = text.read_text()
        found |= set(re.findall(r"\bconfig\.([a-z_]\w*)\b(?!\()", source))
        found |= set(re.findall(r"""[gh][ea][ts]attr\((?:self\.)?config, "(\w+)\"""", source))
    refused = {"attention_chunk_size", *REFUSED}
    unknown = found - known_keys(FAMILIES[kind]) - refused - ELSEWHERE
    unknown = {key for key in unknown if not HARMLESS_FORMS.fullmatch(key)}
    assert not unknown or all(key in ("head_dim", "num_key_value_heads") for key in unknown), unknown


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("llama", {"is_causal": False}, "is_causal = False is not supported for model_type 'llama'; it computes True"),
        ("llama", {"attention_multiplier": 0.5}, "models of type 'llama' have no such key; if it does not change"),
        ("gpt2", {"scale_attn_weights": False}, "it computes True"),
        ("gpt2", {"num_attention_heads": 2}, "n_head = 4 and num_attention_heads = 2 mean the same"),
        ("mistral", {"use_sliding_window": False}, "set it to null"),
        ("phi3", {"full_attn_mod": 2}, "full_attn_mod = 2"),
        ("qwen3", {"original_max_position_embeddings": 12}, "given twice, as 8 and 12"),
        ("qwen3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_theta = 10000|differ; leave one"),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "low_freq_factor": 3.0}}, "low_freq_factor"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "by layer type"),
        ("olmo3", {"rope_theta": 7.0}, "read differently by versions of transformers"),
        ("olmo3", {"rope_scaling": {"type": "linear", "factor": 3.0}}, "name it rope_type"),
        ("smollm3", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 4}, "use_sliding_window"),
        (
            "gpt_neox",
            {"num_key_value_heads": 2},
            "num_key_value_heads = 2 is not supported for model_type 'gpt_neox': it is 4",
        ),
        ("stablelm", {"head_dim": 16}, "head_dim = 16 is not supported"),
    ],
)
def test_keys_that_would_be_misread_are_refused(kind: str, change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CASES[kind] | {"model_type": kind} | change))
    with pytest.raises(ConfigError, match=words):
        read_config(path, TOKENS)
