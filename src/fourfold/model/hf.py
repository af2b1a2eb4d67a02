"""Hugging Face `config.json` to the fields of ModelConfig, by the table of families. No torch, no transformers, no network.

A file that needs something our models do not compute (experts, quantization, other activations, heads for other tasks,
different dropouts) is refused, and the error names the key. So are sizes out of range and files without the main keys. Other
missing keys have the defaults of transformers.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from fourfold import schema
from fourfold.config import RopeScaling, nearest_divisor
from fourfold.errors import ConfigError
from fourfold.model.families import FAMILIES, REQUIRED, Family, Key, Rope

__all__ = ["HARMLESS", "HARMLESS_FORMS", "REFUSED", "hf_file", "hf_folder", "known_keys", "read_config", "read_fields"]

EXPERTS = "a mixture of experts is not supported"
OTHERS = {
    "mixtral": ("Mixtral", EXPERTS),
    "qwen2_moe": ("Qwen 2 MoE", EXPERTS),
    "qwen3_moe": ("Qwen 3 MoE", EXPERTS),
    "deepseek_v2": ("DeepSeek-V2", "a mixture of experts and latent attention are not supported"),
    "deepseek_v3": ("DeepSeek-V3", "a mixture of experts, latent attention and FP8 weights are not supported"),
    "gpt_oss": ("gpt-oss", "a mixture of experts and attention sinks are not supported"),
    "llama4": ("Llama 4", EXPERTS),
    "granitemoe": ("Granite MoE", EXPERTS),
    "olmoe": ("OLMoE", EXPERTS),
    "phimoe": ("Phi-3.5 MoE", EXPERTS),
    "gemma3": (
        "Gemma 3 with vision",
        "images are not supported; a folder of the text model has model_type 'gemma3_text'",
    ),
    "gemma3n": ("Gemma 3n", "its per-layer embeddings are not supported"),
    "chatglm": ("GLM-4 of 2024", "code from a folder is not run; GLM-4-0414 has model_type 'glm4'"),
}
"""Well-known architectures that are not supported: name, reason."""
REFUSED = {
    "num_local_experts": EXPERTS,
    "num_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS,
    "moe_intermediate_size": EXPERTS,
    "add_cross_attention": "cross attention is not supported",
    "is_encoder_decoder": "an encoder and a decoder in one model are not supported",
    "mlp_bias": "a bias in the MLP is not supported for this family",
    "scale_attn_by_inverse_layer_idx": "attention scaled by layer is not supported",
    "attn_logit_softcapping": "soft-capping is not supported for this family",
    "final_logit_softcapping": "soft-capping is not supported for this family",
}
"""Keys that are refused, unless the family lists them."""
HARMLESS = frozenset(
    """
    architectures auto_map dtype model_type name_or_path torch_dtype transformers_version transformers_weights
    base_model_name_or_path finetuning_task id2label label2id language license model_name num_labels problem_type
    task_specific_params tokenizer_class prefix model_max_length max_sequence_length
    attn_implementation cache_implementation chunk_size_feed_forward classifier_dropout embd_pdrop gradient_checkpointing
    initializer_range is_decoder output_attentions output_hidden_states output_scores pretraining_tp
    reorder_and_upcast_attn return_dict return_dict_in_generate torchscript use_bfloat16 use_cache use_flash_attn
    use_flash_attention use_flash_attention_2
    do_sample diversity_penalty early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    length_penalty max_length max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences remove_invalid_values repetition_penalty temperature top_k top_p typical_p
    suppress_tokens begin_suppress_tokens bad_words_ids
    is_llama_config ignore_mismatched_sizes neftune_noise_alpha use_reentrant use_reentrant_checkpointing
    attention_softmax_in_fp32 scale_attention_softmax_in_fp32 eos_token bos_token pad_token unk_token
    n_ctx layer_switch use_parallel_embedding n_special predict_special_tokens output_past custom_pipelines directionality
    """.split()  # noqa: SIM905 (a list of as many lines as words)
)
"""Keys that change nothing of what a model computes in training: metadata, defaults of generation, ways to load or run it."""
HARMLESS_FORMS = re.compile(r"_.*|.*_token_ids?|(summary|pooler|tokenizer|unsloth|transformers)[._].*")
"""Forms of further such keys."""
WINDOW_KEYS = frozenset({"sliding_window", "use_sliding_window", "layer_types", "max_window_layers"})
ROPE_KEYS = frozenset(
    {
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "max_position_embeddings",
        "original_max_position_embeddings",
    }
)
SCALING_KEYS = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor",
        "beta_fast",
        "beta_slow",
        "truncate",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "finetuned",
    },
    "longrope": {"factor", "short_factor", "long_factor", "attention_factor"},
    "dynamic": {"factor"},
    "default": {"factor"},
}
"""By type of rope_scaling, its keys beyond those that all have."""
LONGEST = 4096
"""Default sequence length."""


def hf_file(path: str | Path) -> Path | None:
    """The Hugging Face config at a path: a JSON file with a model_type, or the config.json of a folder; None otherwise."""
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix != ".json":
        return None
    data = schema.read(path)
    return path if "model_type" in data or (path.name == "config.json" and "model" not in data) else None


def hf_folder(path: str | Path) -> Path:
    """The absolute path of a Hugging Face model's folder, given the folder or its config.json."""
    path = Path(path).resolve()
    return path if path.is_dir() else path.parent


def read_config(path: str | Path, seq_len: int = 0, dropout: float | None = None) -> dict[str, Any]:
    """Fields of ModelConfig from a Hugging Face config.json (a file, or the folder that holds it).

    `seq_len`: tokens of a sequence, if known: windows at least this long are ignored. `dropout`: replaces the file's value.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    return read_fields(schema.read(path), path, seq_len, dropout)


def read_fields(c: dict[str, Any], path: Path, seq_len: int = 0, dropout: float | None = None) -> dict[str, Any]:
    """`read_config` of a parsed file; errors name `path`."""
    family = _family(c, path)
    try:
        read = _fields(c, family, path, seq_len)
    except KeyError as e:
        raise ConfigError(f"{path}: {e.args[0]} is missing for model_type {family.model_type!r}") from None
    return read | {"dropout": _dropout(c, family, path) if dropout is None else dropout}


def _family(c: dict[str, Any], path: Path) -> Family:
    """The family of a file; raises ConfigError if anything in it is not supported."""
    kind = c.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None and isinstance(kind, str) and kind in OTHERS:
        name, why = OTHERS[kind]
        raise ConfigError(f"{path}: {name} (model_type {kind!r}): {why}; known: {', '.join(FAMILIES)}")
    known = {name for key in family.keys for name in (key.name, *key.others)} if family else set()
    for key, why in (REFUSED | dict(family.refused if family else {})).items():
        if key not in known and c.get(key):
            raise ConfigError(f"{path}: {key} = {c[key]!r}: {why}")
    for key in ("quantization_config", "compression_config"):
        if c.get(key):
            method = c[key].get("quant_method") if isinstance(c[key], dict) else c[key]
            what = "FP8 weights" if "fp8" in str(method).lower() else "quantized weights"
            suffix = f" with quant_method {method!r}" if method else ""
            raise ConfigError(f"{path}: {key}{suffix}: {what} are not supported; use the file of the bf16 weights")
    for key in ("torch_dtype", "dtype"):
        if "float8" in str(c.get(key)):
            raise ConfigError(f"{path}: {key} = {c[key]!r}: FP8 weights are not supported; use bfloat16 or float32")
    if family is None:
        found = f"model_type {kind!r} is not supported" if kind is not None else "model_type is missing"
        raise ConfigError(f"{path}: {found}; known: {', '.join(FAMILIES)}")
    _refuse_task(c, family, path)
    _refuse_unknown(c, family, path)
    return family


def known_keys(family: Family) -> frozenset[str]:
    """Keys of config.json that are read for a family, or that its models do not depend on."""
    named = {name for key in family.keys for name in (key.name, *key.others)}
    rope = family.rope
    if rope is not None:
        named |= ROPE_KEYS | {rope.theta_key, rope.partial_key}
        named |= {"rope_local_base_freq"} if isinstance(rope.local_theta, float) and rope.local_theta else set()
        named |= {"no_rope_layers", "no_rope_layer_interval"} if rope.layers == "listed" else set()
    windows = WINDOW_KEYS | ({family.window.full_key} if family.window.full_key else set())
    listed = {*family.dropouts, *family.only, *family.refused, *family.unread_keys}
    return frozenset(named) | windows | listed | HARMLESS


def _refuse_unknown(c: dict[str, Any], family: Family, path: Path) -> None:
    """Refuse keys that could change the computation and are not read."""
    for key, value in family.only.items():
        if c.get(key) is not None and c[key] != value:
            raise ConfigError(
                f"{path}: {key} = {c[key]!r} is not supported for model_type {family.model_type!r}; it computes {value!r}"
            )
    known = known_keys(family) | REFUSED.keys() | {"quantization_config", "compression_config"}
    for key, value in c.items():
        if value and key not in known and not HARMLESS_FORMS.fullmatch(key):
            shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
            raise ConfigError(
                f"{path}: {key} = {shown}: models of type {family.model_type!r} have no such key; if it does not change what "
                "the model computes, remove it from the file"
            )


def _refuse_task(c: dict[str, Any], family: Family, path: Path) -> None:
    """Refuse architectures whose head is not a language model's."""
    names = c.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    ends = tuple(end.lower() for end in family.tasks)
    if names and not any(str(name).lower().endswith(ends) for name in names):
        raise ConfigError(
            f"{path}: architectures = {', '.join(map(str, names))}: {family.model_type} is trained as a language model here, "
            f"{family.architecture}, and no other head is supported; to train that, write "
            f'"architectures": ["{family.architecture}"]'
        )


def _fields(c: dict[str, Any], family: Family, path: Path, seq_len: int) -> dict[str, Any]:
    """Fields by the family's keys; raises KeyError for a missing required key."""
    fields: dict[str, Any] = {"family": family.ours, "model_type": family.model_type}
    names = {key.field: _present(c, key, path) for key in family.keys}
    for key in family.keys:
        value = _value(c, key, names[key.field] if key.field else key.name, path)
        if key.field and (value != 0 or key.kind == "flag" or key.least == 0):
            fields[key.field] = value
    heads, hidden = fields["heads"], fields["hidden"]
    if "head_dim" not in fields and hidden % heads:
        raise ConfigError(
            f"{path}: {names['heads']} = {heads} does not divide {names['hidden']} = {hidden}; the nearest that does is "
            f"{nearest_divisor(hidden, heads)}"
        )
    if heads % fields.get("kv_heads", heads):
        raise ConfigError(
            f"{path}: {names['kv_heads']} = {fields['kv_heads']} does not divide {names['heads']} = {heads}; "
            f"the nearest that does is {nearest_divisor(heads, fields['kv_heads'])}"
        )
    for name in family.implied:
        value = heads if name == "kv_heads" else hidden // heads
        if fields.get(name, value) != value:
            raise ConfigError(
                f"{path}: {names[name]} = {fields[name]} is not supported for model_type {family.model_type!r}: it is {value}; "
                "leave it out"
            )
    for name, (other, power) in family.derived.items():
        fields[name] = fields[other] ** power
    listed = _listed_rope(c, fields["layers"], path) if family.rope and family.rope.layers == "listed" else ()
    windows = _windows(c, family, fields["layers"], listed, path, seq_len or min(LONGEST, fields["positions"]))
    fields |= {"windows": windows} if any(windows) else {}
    rope = _rope(c, family.rope, fields.get("head_dim") or hidden // heads, path) if family.rope else {}
    if any(listed) and not all(listed):
        rope["rope_layers"] = listed
    elif family.rope and family.rope.layers == "windows":
        rope["rope_layers"] = tuple(map(bool, windows)) or (False,)
    if not any(windows):
        rope.pop("rope_local_theta", None)
    return fields | rope | dict(family.fixed)


def _present(c: dict[str, Any], key: Key, path: Path) -> str:
    """The name that a file uses for a key; a file may use several, with one value."""
    present = [name for name in (key.name, *key.others) if name in c]
    for name in present[1:]:
        if c[name] != c[present[0]]:
            raise ConfigError(
                f"{path}: {present[0]} = {c[present[0]]!r} and {name} = {c[name]!r} mean the same; leave one of them"
            )
    return present[0] if present else key.name


def _value(c: dict[str, Any], key: Key, name: str, path: Path) -> Any:
    if name not in c and key.default is REQUIRED:
        raise KeyError(name)
    if name not in c:
        return key.values[key.default] if key.values else key.default
    if c[name] is None and key.default is not REQUIRED:
        return key.null if key.null is not None else _value({}, key, name, path)
    match key.kind:
        case "size":
            return _size(c, name, path, least=key.least, most=key.most)
        case "number":
            return _number(c, name, path) ** key.power
        case "flag":
            flag = _flag(c, name, path, False)
            return key.values[flag] if key.values else flag
    if not isinstance(c[name], str) or c[name] not in key.values:
        good = next(iter(key.values))
        raise ConfigError(f"{path}: {name} = {c[name]!r} is not supported; this family computes {good!r}")
    return key.values[c[name]]


def _dropout(c: dict[str, Any], family: Family, path: Path) -> float:
    """Our models have one dropout: after the embedding, after every part and on attention weights."""
    found = {key: default if c.get(key) is None else c[key] for key, default in family.dropouts.items()}
    for key, value in found.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
            raise ConfigError(f"{path}: {key} = {value!r} must be at least 0 and below 1")
    if len(set(found.values()) | (set() if family.one_dropout else {0})) > 1:
        values = ", ".join(f"{key} = {value}" for key, value in found.items())
        others = "" if family.one_dropout else " and no other dropout"
        raise ConfigError(
            f"{path}: {values}{others}: one dropout for embedding, parts and attention weights is supported; choose it: "
            f"model.dropout = 0, or for example {max(found.values())}"
        )
    return float(next(iter(found.values())))


TYPES = ("full_attention", "sliding_attention")


def _windows(
    c: dict[str, Any], family: Family, layers: int, listed: tuple[bool, ...], path: Path, seq_len: int
) -> tuple[int, ...]:
    """The window of each layer, or one entry if all are equal; 0: none."""
    rule, types = family.window, c.get("layer_types")
    _check_layer_types(types, layers, path)
    window = _size({"sliding_window": rule.default} | c, "sliding_window", path, 0, least=0)
    asked = _flag(c, "use_sliding_window", path, rule.always)
    if rule.always and rule.layers != "none" and window and not asked:
        raise ConfigError(
            f"{path}: use_sliding_window = false, but models of type {family.model_type!r} always apply "
            f"sliding_window = {window}; set it to null"
        )
    uses = asked and window > 0
    match rule.layers:
        case "none":
            if (uses or "sliding_attention" in (types or [])) and window < seq_len:
                raise ConfigError(
                    f"{path}: sliding_window = {window} is shorter than the sequence of {seq_len} tokens, and models of type "
                    f"{family.model_type!r} have no windows; leave sliding_window and layer_types out"
                )
            return ()
        case "all":
            return (window,) if uses else ()
        case "no rope":
            sliding = [not rope for rope in listed] if types is None else [kind == TYPES[1] for kind in types]
            if types is not None and any(sliding) and not uses:
                raise ConfigError(
                    f"{path}: layer_types has {TYPES[1]!r}, but use_sliding_window is false or sliding_window is missing"
                )
            return tuple(window if slides else 0 for slides in sliding) if uses else ()
    if types is not None:
        if "sliding_attention" in types and not window:
            raise ConfigError(f"{path}: layer_types has 'sliding_attention', but sliding_window is missing")
        return tuple(window if kind == "sliding_attention" else 0 for kind in types)
    if not uses:
        return ()
    if not rule.full:
        first = _size(c, "max_window_layers", path, 28, least=0)
        return tuple(window if i >= first else 0 for i in range(layers))
    every = _size(c, rule.full_key, path, rule.full) if rule.full_key else rule.full
    return tuple(0 if (i + 1) % every == 0 else window for i in range(layers))


def _listed_rope(c: dict[str, Any], layers: int, path: Path) -> tuple[bool, ...]:
    """Whether each layer has a rotary embedding, by `no_rope_layers` (1: yes) or `no_rope_layer_interval`."""
    listed = c.get("no_rope_layers")
    if listed is None:
        every = _size(c, "no_rope_layer_interval", path, 4)
        return tuple((i + 1) % every != 0 for i in range(layers))
    if not isinstance(listed, list) or len(listed) != layers or any(flag not in (0, 1) for flag in listed):
        raise ConfigError(
            f"{path}: no_rope_layers = {listed!r} must have one entry for each of the {layers} layers: 1 with a rotary "
            "embedding, 0 without"
        )
    return tuple(map(bool, listed))


def _check_layer_types(types: Any, layers: int, path: Path) -> None:
    """Check that `types` is a list of known types, one per layer."""
    if types is None:
        return
    if not isinstance(types, list) or len(types) != layers:
        found = f"{len(types)} entries" if isinstance(types, list) else repr(types)
        raise ConfigError(
            f"{path}: layer_types has {found} for num_hidden_layers = {layers}; leave it out, or give one for every layer"
        )
    for found in types:
        if found not in TYPES:
            raise ConfigError(f"{path}: layer_types has {found!r}, which is not supported; known: {', '.join(TYPES)}")


def _size(
    c: dict[str, Any], key: str, path: Path, default: int | None = None, least: int = 1, most: int = 10**8
) -> int:
    """An integer; null means the default, if there is one."""
    if default is not None and c.get(key) is None:
        return default
    value = c[key]
    if not schema.is_integer(value, least) or value > most:
        found = "null" if value is None else repr(value)
        raise ConfigError(f"{path}: {key} = {found} must be a whole number from {least} to {most}")
    return value


def _number(c: dict[str, Any], key: str, path: Path, default: float | None = None) -> float:
    """A number above 0; null means the default, if there is one."""
    if default is not None and c.get(key) is None:
        return default
    value = c[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(f"{path}: {key} = {value!r} must be a number above 0")
    return float(value)


def _flag(c: dict[str, Any], key: str, path: Path, default: bool) -> bool:
    value = default if c.get(key) is None else c[key]
    if not isinstance(value, bool):
        raise ConfigError(f"{path}: {key} = {value!r} must be true or false")
    return value


# ---- rotary embeddings ----


def _rope(c: dict[str, Any], rope: Rope, head_dim: int, path: Path) -> dict[str, Any]:
    """Fields of the rotary embedding, from the keys of transformers 4 (at the top) or 5 (in rope_parameters)."""
    old, new = _table(c, "rope_scaling", path) or {}, _table(c, "rope_parameters", path) or {}
    local: dict[str, Any] = {}
    by_type = bool(new) and set(new) <= set(TYPES)
    if by_type:
        if not rope.local_theta:
            raise ConfigError(f"{path}: rope_parameters by layer type are not supported for this family")
        local, new = _table(new, "sliding_attention", path) or {}, _table(new, "full_attention", path) or {}
    elif new and rope.local_theta:
        raise ConfigError(
            f"{path}: rope_parameters = {new}: this family has them by layer type, "
            '{"full_attention": {…}, "sliding_attention": {…}}'
        )
    for table in (old, new, local):
        _check_scaling_keys(table, rope, path)
    theta = _one_number("rope_theta", rope.theta, path, (c, rope.theta_key), (old, "rope_theta"), (new, "rope_theta"))
    partial = _one_number(
        rope.partial_key,
        rope.partial or 1.0,
        path,
        *((table, key) for table in (c, old, new) for key in {rope.partial_key, "partial_rotary_factor"}),
    )
    if partial < 1 and not rope.partial:
        raise ConfigError(
            f"{path}: partial_rotary_factor = {partial}: a rotary embedding on a part of each head is not supported for this "
            "family"
        )
    if partial > 1:
        raise ConfigError(f"{path}: {rope.partial_key} = {partial} must be at most 1")
    if old and not by_type and theta != rope.theta and not (c.get(rope.theta_key) or old.get("rope_theta")):
        raise ConfigError(
            f"{path}: rope_scaling replaces rope_parameters, so its rope_theta = {theta:g} is lost in transformers 5; leave "
            "rope_scaling out"
        )
    fields: dict[str, Any] = {"rope_theta": theta, "rope_scaling": _one_scaling(old, new, c, rope, path)}
    if partial < 1:
        fields["rope_dim"] = int(head_dim * partial)
    if rope.local_theta:
        same = rope.local_theta == "same"
        if same and not by_type and theta != rope.theta:
            raise ConfigError(  # transformers 4 takes it for all layers, 5 for those without a window
                f"{path}: rope_theta = {theta:g} is read differently by versions of transformers; give it for "
                '"full_attention" and "sliding_attention" in rope_parameters'
            )
        fields["rope_local_theta"] = _one_number(
            "rope_local_base_freq",
            theta if same else float(rope.local_theta),
            path,
            ({} if same else c, "rope_local_base_freq"),
            (local, "rope_theta"),
        )
        if local.get("rope_type", "default") != "default":
            raise ConfigError(
                f"{path}: rope_parameters of sliding_attention have rope_type = {local['rope_type']!r}; "
                "layers with a window are supported without scaling only"
            )
        if fields["rope_local_theta"] == theta and fields["rope_scaling"] is None:
            del fields["rope_local_theta"]
    return fields


def _check_scaling_keys(table: dict[str, Any], rope: Rope, path: Path) -> None:
    """Refuse keys of one table of rotary parameters that its type does not read."""
    kind = table.get("rope_type") or table.get("type") or "default"
    if table.get("rope_type", kind) != table.get("type", kind) or (rope.local_theta and "type" in table):
        raise ConfigError(f"{path}: type = {table['type']!r} in rope_scaling: name it rope_type, and leave type out")
    own = SCALING_KEYS.get("longrope" if kind in rope.longrope else str(kind), set())
    known = own | {"type", "rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
    for key, value in table.items():
        if value and key not in known and str(kind) in {*SCALING_KEYS, *rope.longrope}:
            raise ConfigError(
                f"{path}: {key} = {value!r} is not supported in rope_scaling of type {kind!r}; leave it out"
            )


def _one_scaling(
    old: dict[str, Any], new: dict[str, Any], c: dict[str, Any], rope: Rope, path: Path
) -> RopeScaling | None:
    """The scaling of `rope_scaling` and `rope_parameters`, which must agree if both have one."""
    before, now = (_scaling(table, c, rope, path) if table else None for table in (old, new))
    if old and new and before != now and not (before and new.keys() <= {"rope_type", "rope_theta"} and now is None):
        raise ConfigError(f"{path}: rope_scaling and rope_parameters differ; leave one of them")
    return now or before


def _one_number(name: str, default: float, path: Path, *places: tuple[dict[str, Any], str]) -> float:
    """A number that may be given in several places, which must agree."""
    given = {_number(table, key, path) for table, key in places if table.get(key) is not None}
    if len(given) > 1:
        found = " and ".join(f"{value:g}" for value in sorted(given))
        raise ConfigError(f"{path}: {name} is given several times, as {found}; leave one of them")
    return next(iter(given), default)


def _table(c: dict[str, Any], key: str, path: Path) -> dict[str, Any] | None:
    value = c.get(key)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(
            f'{path}: {key} = {value!r} must be a table, for example {{"rope_type": "linear", "factor": 2.0}}'
        )
    return value


def _scaling(s: dict[str, Any], c: dict[str, Any], rope: Rope, path: Path) -> RopeScaling | None:
    kind = s.get("rope_type") or s.get("type") or "default"
    if kind in (
        "default",
        "dynamic",
    ):  # dynamic scaling starts beyond max_position_embeddings; no sequence is that long
        return None
    kind = "longrope" if kind in rope.longrope else kind
    positions = _size(c, "max_position_embeddings", path)
    original = positions
    if kind != "linear":  # transformers 4 prefers the one in the table, 5 the one at the top
        key = "original_max_position_embeddings"
        given = {_size(table, key, path) for table in (s, c) if table.get(key) is not None}
        if len(given) > 1:
            found = " and ".join(map(str, sorted(given)))
            raise ConfigError(f"{path}: {key} is given twice, as {found}; leave one of them")
        original = next(iter(given), positions)
    match kind:
        case "linear":
            return RopeScaling(kind="linear", factor=_number(s, "factor", path))
        case "llama3":
            return RopeScaling(
                kind="llama3",
                factor=_number(s, "factor", path),
                original_positions=original,
                low_freq_factor=_number(s, "low_freq_factor", path),
                high_freq_factor=_number(s, "high_freq_factor", path),
            )
        case "yarn":
            return RopeScaling(
                kind="yarn",
                factor=_number(s, "factor", path, positions / original),
                original_positions=original,
                beta_fast=_number(s, "beta_fast", path, 32.0),
                beta_slow=_number(s, "beta_slow", path, 1.0),
                truncate=_flag(s, "truncate", path, True),
                mscale=_optional(s, "mscale", path),
                mscale_all_dim=_optional(s, "mscale_all_dim", path),
                attention_factor=_optional(s, "attention_factor", path),
            )
        case "longrope":
            return RopeScaling(
                kind="longrope",
                factor=_number(s, "factor", path, max(1.0, positions / original)),
                original_positions=original,
                short_factor=_factors(s, "short_factor", path),
                long_factor=_factors(s, "long_factor", path),
                attention_factor=_optional(s, "attention_factor", path),
            )
        case _:
            raise ConfigError(
                f"{path}: rope_scaling of type {kind!r} is not supported; known: linear, llama3, yarn, longrope, dynamic"
            )


def _optional(c: dict[str, Any], key: str, path: Path) -> float:
    """A number above 0, or 0 if the key is missing."""
    return 0.0 if c.get(key) is None else _number(c, key, path)


def _factors(s: dict[str, Any], key: str, path: Path) -> tuple[float, ...]:
    found = s.get(key)
    if not isinstance(found, list) or not found:
        raise ConfigError(f"{path}: rope_scaling of type 'longrope' needs {key}, a list of numbers")
    return tuple(_number({key: value}, key, path) for value in found)
