"""LoRA as data: which linear layers of a model are adapted, and under which names. No torch.

An adapted linear W [N, K] of ours may be several layers in the files: qkv is q_proj, k_proj and v_proj for Llama, and one c_attn
for GPT-2. Each of these is a **part**, a run of W's rows with a separate adapter, as in PEFT:

    A   [parts · rank, K]     `….adapter.a.weight`          one parameter for all parts: x is read once
    B   [rows, rank]          `….adapter.b.NAME.weight`     one for each part, NAME as in the files
    y[rows] += alpha / rank · (x Aᵀ)[part] Bᵀ

`adapter_links` maps these to the tensors of a PEFT adapter, as `families.links` does for the weights.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

from fourfold.config import LoraConfig, ModelConfig
from fourfold.errors import ConfigError
from fourfold.model.families import FAMILIES, Family, Link, Rule, Run, rows_of
from fourfold.model.spec import Shapes, unit_shapes

__all__ = [
    "PEFT_PREFIX",
    "AdapterPart",
    "adapter_links",
    "adapters",
    "check_targets",
    "is_adapter",
    "layer_names",
    "target_names",
]

PEFT_PREFIX = "base_model.model."
OURS = ("blocks.{i}.attn.qkv", "blocks.{i}.attn.out", "blocks.{i}.mlp.up", "blocks.{i}.mlp.down", "head.dense")
"""The linear layers that can be adapted."""


@dataclass(frozen=True)
class AdapterPart:
    """Rows [start, stop) of an adapted matrix that share one adapter; `module`: the layer's name in the files."""

    name: str
    module: str
    start: int
    stop: int
    rule: Rule


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter, by its name in a unit or in the model."""
    return ".adapter." in f".{name}"


def adapters(m: ModelConfig, unit: str) -> dict[str, tuple[AdapterPart, ...]]:
    """The adapted linears of a unit of a (resolved) model by their names in it."""
    if m.lora is None:
        return {}
    prefix = f"blocks.{{i}}.{unit.rpartition('.')[2]}." if unit.startswith("blocks.") else f"{unit}."
    found = _chosen(_shapes_alone(m), m.lora)
    return {ours.removeprefix(prefix): parts for ours, parts in found.items() if ours.startswith(prefix)}


def check_targets(m: ModelConfig) -> None:
    """Raise ConfigError unless every target names a layer, and the rank fits all of them."""
    assert m.lora is not None
    alone, rank = _shapes_alone(m), m.lora.rank
    candidates = _candidates(alone)
    names = [part.module for parts in candidates.values() for part in parts]
    for target in m.lora.targets:
        if any(_matches(target, name) for name in names):
            continue
        short = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
        why = ""
        if target.rpartition(".")[2] in ("lm_head", "embed_out", "decoder"):
            why = "; the output layer stays as it is"
        elif "embed" in target or target.rpartition(".")[2] in ("wte", "wpe"):
            why = "; embeddings stay as they are"
        raise ConfigError(
            f"lora.targets: no linear layer of this model is named '{target}'{why}; its layers are {short}"
        )
    for ours, parts in _chosen(alone, m.lora).items():
        inputs = _linears(alone)[ours][1]
        for part in parts:
            most = min(inputs, part.stop - part.start)
            if rank > most:
                raise ConfigError(
                    f"lora.rank = {rank} is larger than {part.name}, which has {inputs} inputs and {part.stop - part.start} "
                    f"outputs; use at most {most}"
                )


def adapter_links(family: Family, m: ModelConfig) -> list[Link]:
    """Every tensor of a PEFT adapter of a (resolved) model, linked to our parameters."""
    assert m.lora is not None
    alone, rank, made = _shapes_alone(m), m.lora.rank, []
    for ours, parts in _chosen(alone, m.lora).items():
        outputs, inputs = _linears(alone)[ours]
        for i in range(m.layers) if "{i}" in ours else [0]:
            name = ours.replace("{i}", str(i))
            for k, part in enumerate(parts):
                theirs, rows = PEFT_PREFIX + part.module.replace("{i}", str(i)), part.stop - part.start
                a, b = (rank, inputs), (rows, rank)
                runs = tuple(
                    dataclasses.replace(run, ours=run.ours - part.start) for run in rows_of(part.rule, m, outputs)
                )
                factor = f"{name}.adapter.a.weight", f"{name}.adapter.b.{part.name}.weight"
                made.append(Link(f"{theirs}.lora_A.weight", a, factor[0], a, False, (Run(k * rank, 0, rank),)))
                made.append(Link(f"{theirs}.lora_B.weight", b, factor[1], b, False, runs))
    return made


def target_names(m: ModelConfig) -> list[str]:
    """`target_modules` of a PEFT adapter: the shortest names that match only these layers, or else all full names."""
    assert m.lora is not None
    alone = _shapes_alone(m)
    every = [part.module for parts in _candidates(alone).values() for part in parts]
    chosen = [part.module for parts in _chosen(alone, m.lora).values() for part in parts]
    short = sorted({name.rpartition(".")[2] for name in chosen})
    if all(name in chosen for name in every for target in short if _matches(target, name)):
        return short
    return [n.replace("{i}", str(i)) for n in chosen for i in (range(m.layers) if "{i}" in n else [0])]


def layer_names(m: ModelConfig) -> list[str]:
    """The adapted layers, each by its own name in the files."""
    assert m.lora is not None
    return list(dict.fromkeys(p.name for parts in _chosen(_shapes_alone(m), m.lora).values() for p in parts))


# ---- names ----


@lru_cache(maxsize=64)
def _linears(m: ModelConfig) -> Shapes:
    """[outputs, inputs] of the linear layers of a model, with {i} for the number of the block."""
    units = {"blocks.{i}.attn": "blocks.0.attn", "blocks.{i}.mlp": "blocks.0.mlp", "head": "head"}
    return {
        f"{pattern}.{name.removesuffix('.weight')}": shape
        for pattern, unit in units.items()
        for name, shape in unit_shapes(m, unit).items()
        if len(shape) == 2
    }


def _shapes_alone(m: ModelConfig) -> ModelConfig:
    """The model without fields that do not affect shapes, as a cache key."""
    return dataclasses.replace(m, lora=None, init="random")


@lru_cache(maxsize=64)
def _chosen(m: ModelConfig, lora: LoraConfig) -> dict[str, tuple[AdapterPart, ...]]:
    """The adapted parts of each of our linears, with {i} for the layer."""
    out = {}
    for ours, parts in _candidates(m).items():
        wanted = tuple(
            part
            for part in parts
            if any(_matches(t, part.module) for t in lora.targets) or (not lora.targets and ours != "head.dense")
        )
        if wanted:
            out[ours] = wanted
    return out


@lru_cache(maxsize=64)
def _candidates(m: ModelConfig) -> dict[str, tuple[AdapterPart, ...]]:
    from fourfold.model.to_hf import family_of

    family = FAMILIES.get(m.model_type) or family_of(m)
    shapes = _linears(m)
    out: dict[str, tuple[AdapterPart, ...]] = {}
    for ours in OURS:
        if ours not in shapes:
            continue
        rules = [] if family is None else [r for r in family.tensors if r.ours in (f"{ours}.weight", f"{ours}.{{p}}")]
        rules = rules or [Rule(f"{ours}.weight", f"{ours}.weight")]
        parts = []
        for rule in rules:
            runs = rows_of(rule, m, shapes[ours][0])
            module = rule.theirs.rpartition(".")[0]
            start = min(run.ours for run in runs)
            stop = max(run.ours + run.length for run in runs)
            parts.append(AdapterPart(module.rpartition(".")[2], module, start, stop, rule))
        out[ours] = tuple(sorted(parts, key=lambda part: part.start))
    return out


def _matches(target: str, module: str) -> bool:
    return module == target or module.endswith(f".{target}")
