"""ModelConfig to a Hugging Face `config.json`, by the table of families. No torch, no transformers.

The file is correct for transformers 4 and 5: rotary parameters are written at the top level (4.x) and in `rope_parameters`
(5.x), the dtype as `torch_dtype` and `dtype`. A model that was read from a folder keeps every key of its config.json that
training does not change.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.config import ModelConfig
from fourfold.errors import ConfigError
from fourfold.model.families import FAMILIES, Family, Key, Rope
from fourfold.model.hf import read_fields

__all__ = ["as_written", "check_written", "family_of", "hf_config"]

SCALING = {
    "factor": "factor",
    "original_positions": "original_max_position_embeddings",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "attention_factor": "attention_factor",
    "short_factor": "short_factor",
    "long_factor": "long_factor",
}
"""Fields of RopeScaling, and their keys."""
BY_KIND = {
    "linear": ("factor",),
    "llama3": ("factor", "original_positions", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_positions",
        "beta_fast",
        "beta_slow",
        "truncate",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
    ),
    "longrope": ("factor", "original_positions", "attention_factor", "short_factor", "long_factor"),
}


def family_of(m: ModelConfig, base: dict[str, Any] | None = None) -> Family | None:
    """The family for writing a (resolved) model: one whose config.json, read back, gives the same model.

    `base`: the config.json of the folder that it was read from.
    """
    if m.family == "bert" and not m.tie:
        return None  # transformers has two such biases, and uses the one that files of tied models lack
    for family in [FAMILIES[m.model_type]] if m.model_type in FAMILIES else FAMILIES.values():
        if _says(hf_config(family, m, "float32", base), m):
            return family
    return None


def as_written(m: ModelConfig) -> ModelConfig:
    """The model as its files describe it: files of a BERT always have a row of token types, zeros if the model has none."""
    return dataclasses.replace(m, token_types=1) if m.family == "bert" and not m.token_types else m


def check_written(m: ModelConfig) -> str:
    """Of a (resolved) model that is to be trained: "", or why its files will not open in transformers.

    Raises ConfigError for a model that was named by a Hugging Face folder: its files must open there.
    """
    m = as_written(m)
    path = Path(m.init) / "config.json"
    base = files.read_json(path, ConfigError) if m.init != "random" and path.is_file() else None
    if family_of(m, base) is not None:
        return ""
    if m.model_type not in FAMILIES:
        return "no family of transformers computes this model"
    where = f"a config.json of '{m.model_type}'"
    if m.family == "bert" and not m.tie:
        found = f"model.tie = False of a bert model cannot be written to {where}"
    else:
        again = _read_again(hf_config(FAMILIES[m.model_type], m, "float32", base), m)
        names = [f.name for f in dataclasses.fields(m) if again and getattr(again, f.name) != getattr(m, f.name)]
        values = ", ".join(f"model.{name} = {getattr(m, name)}" for name in names)
        found = f"{values} cannot be written to {where}" if names else f"this model cannot be written to {where}"
    raise ConfigError(f"{found}, so transformers could not open the result; use the folder's own value")


def _says(c: dict[str, Any], m: ModelConfig) -> bool:
    """Whether a config.json gives this model."""
    return _read_again(c, m) == m


def _read_again(c: dict[str, Any], m: ModelConfig) -> ModelConfig | None:
    """The model that a config.json written for `m` gives; None: it gives none."""
    try:
        read = read_fields(c, Path("config.json"), m.seq_len, m.dropout)
        again = ModelConfig(**read | {"seq_len": m.seq_len, "init_std": m.init_std}).resolve()
    except (ConfigError, KeyError):
        return None
    return dataclasses.replace(again, init=m.init, model_type=m.model_type, lora=m.lora)


def hf_config(
    family: Family, m: ModelConfig, dtype: str, base: dict[str, Any] | None = None, end: int | None = None
) -> dict[str, Any]:
    """config.json of a (resolved) model with weights of type `dtype` ("bfloat16"); `base`: that of the folder it came from.

    `end`: the id that ends a text, for a model that did not come from a folder.
    """
    c: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    if base is None:
        c |= dict(family.constant) | {"bos_token_id": None, "eos_token_id": end, "use_cache": True}
        c |= dict.fromkeys(family.dropouts, m.dropout or 0.0) if family.one_dropout else dict(family.dropouts)
        if family.window.default:
            c["sliding_window"] = None
        if any(m.windows):
            sizes = [m.windows[i % len(m.windows)] for i in range(m.layers)]
            kinds = ["sliding_attention" if size else "full_attention" for size in sizes]
            c |= {"sliding_window": max(sizes), "use_sliding_window": True, "layer_types": kinds}
        if family.rope is not None and family.rope.layers == "listed":
            rotary = m.rope_layers or (True,)
            c["no_rope_layers"] = [int(rotary[i % len(rotary)]) for i in range(m.layers)]
    else:
        c |= base
    for key in family.keys if base is None or not _says(base, m) else ():
        _write(c, key, m)
    if family.rope is not None and not (base or {}).keys() & {"rope_theta", "rope_parameters", family.rope.theta_key}:
        c["rope_parameters"] = _rope(m)
        if family.rope.local_theta:  # layers with a window have a table of their own
            local = {"rope_type": "default", "rope_theta": m.rope_local_theta or m.rope_theta}
            c["rope_parameters"] = {"full_attention": c["rope_parameters"], "sliding_attention": local}
    if family.rope is not None:
        _both_rotary_forms(c, family.rope)
    return dict(sorted((c | {"dtype": dtype, "torch_dtype": dtype}).items()))


def _write(c: dict[str, Any], key: Key, m: ModelConfig) -> None:
    """Write one key, unless the file already has this value."""
    name = next((n for n in (key.name, *key.others) if n in c), key.name)
    if not key.field:
        return
    value = getattr(m, key.field)
    if key.kind == "choice" or key.values:
        spelled = [k for k, v in key.values.items() if v == value]
        if c.get(name) not in spelled and spelled:
            c[name] = spelled[0]
        return
    if key.power != 1.0 and value:
        value = value ** (1 / key.power)
        value = round(value) if abs(value - round(value)) < 1e-9 * value else value
    if c.get(name) is None and name in c and key.null == value:
        return  # null already means this value
    if c.get(name) != value:
        c[name] = value


def _rope(m: ModelConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": m.rope_theta}
    if m.rope_dim and m.rope_dim != m.head_dim:
        found["partial_rotary_factor"] = m.rope_dim / m.head_dim
    if m.rope_scaling is not None:
        found["rope_type"] = m.rope_scaling.kind
        values = {SCALING[field]: getattr(m.rope_scaling, field) for field in BY_KIND[m.rope_scaling.kind]}
        found |= {key: list(v) if isinstance(v, tuple) else v for key, v in values.items() if v != 0 or v is False}
    return found


def _both_rotary_forms(c: dict[str, Any], rope: Rope) -> None:
    """Write the rotary parameters in the forms of transformers 4 and 5, from whichever is present."""
    theta, new = rope.theta_key, c.get("rope_parameters")
    if isinstance(new, dict) and new and all(isinstance(v, dict) for v in new.values()):  # one table per layer type
        whole, local = new.get("full_attention", {}), new.get("sliding_attention", {})
        if "rope_theta" in whole:
            c.setdefault(theta, whole["rope_theta"])
        if "rope_theta" in local and c["model_type"].startswith("gemma3"):
            c.setdefault("rope_local_base_freq", local["rope_theta"])
        if whole.get("rope_type", "default") != "default":
            c.setdefault("rope_scaling", _old_scaling(whole))
        return
    if not isinstance(new, dict):
        old = c.get("rope_scaling") or {}
        new = {"rope_type": old.get("rope_type") or old.get("type") or "default"} | old
        if c.get(theta) is not None:
            new["rope_theta"] = c[theta]
        if (partial := c.get(rope.partial_key, c.get("partial_rotary_factor"))) is not None:
            new["partial_rotary_factor"] = partial
        if "rope_theta" not in new:
            return  # the family's default, in both versions
        c["rope_parameters"] = new
    if "rope_theta" in new:
        c[theta] = new["rope_theta"]
    if "partial_rotary_factor" in new:
        c["partial_rotary_factor"] = c[rope.partial_key] = new["partial_rotary_factor"]
    if new.get("rope_type", "default") != "default":
        c["rope_scaling"] = _old_scaling(new)
        if new["rope_type"] == "longrope" and "original_max_position_embeddings" in new:
            c.setdefault("original_max_position_embeddings", new["original_max_position_embeddings"])


def _old_scaling(new: dict[str, Any]) -> dict[str, Any]:
    """`rope_scaling` of transformers 4: without the keys that it has at the top level; longrope has only three keys."""
    if new["rope_type"] == "longrope":
        return {"type": "longrope", "short_factor": new["short_factor"], "long_factor": new["long_factor"]}
    return {key: value for key, value in new.items() if key not in ("rope_theta", "partial_rotary_factor")}
