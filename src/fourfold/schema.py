"""Frozen dataclasses from mappings and back: the one reader behind config, plan and cluster files.

    read("x.toml") -> mapping          build(Config, mapping) -> Config          dump(config) -> mapping

Unknown names and wrong types are refused with the path of the field (`model.layers`), what was found, and the nearest
right name. Supported field types: bool, int, float, str, Literal, tuple[X, ...], dict, X | None, unions, dataclasses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import re
import tempfile
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fourfold import files
from fourfold.errors import ConfigError, FourfoldError
from fourfold.files import write_json, write_text

__all__ = [
    "build",
    "check_count",
    "check_writable",
    "dump",
    "dump_toml",
    "format_bytes",
    "in_file",
    "is_integer",
    "nearest",
    "parse_bytes",
    "read",
    "write_json",
    "write_text",
]

T = TypeVar("T")

MOST = 2**53
"""Upper bound on integers in a file: the largest that a float represents exactly."""

KINDS: dict[str, tuple[str, ...]] = {
    "a config": ("model", "data", "optim", "train", "checkpoint", "log"),
    "a plan": ("mesh", "batch", "pipeline", "tensor", "unit", "memory", "precision", "predicted", "certificate"),
    "a cluster": ("preset", "nodes", "devices", "device", "host", "level"),
    "a schedule": ("placement", "order"),
    "a set of programs": ("placement", "programs", "units"),
    "a Hugging Face config": ("model_type",),
}
"""Kinds of files, by their top-level names."""


def nearest(name: str, options: Iterable[str]) -> str:
    """`; did you mean 'x'?` or, when nothing is near, the list of what is allowed."""
    options = list(options)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; choose one of {', '.join(options)}"


def read(
    path: str | Path,
    error: type[FourfoldError] = ConfigError,
    *,
    most: int = 16 * files.MIB,
    follow: bool = True,
) -> dict[str, Any]:
    """Read a TOML, JSON or YAML (with the `yaml` extra) file of at most `most` bytes whose top level is a table."""
    path = Path(path)
    try:
        folder, there = path.is_dir(), path.exists() or path.is_symlink()
    except (OSError, ValueError):
        raise error(f"{str(path)!r}: cannot be the name of a file") from None
    if folder:
        raise error(f"{path}: is a folder; name a file in it")
    if not there:
        siblings = [p.name for p in path.parent.glob("*")] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, siblings, n=1)
        hint = f"; did you mean '{path.parent / close[0]}'?" if close else ""
        raise error(f"{path}: no such file{hint}")
    parsers = {
        ".toml": files.parse_toml,
        ".json": files.parse_json,
        ".yaml": files.parse_yaml,
        ".yml": files.parse_yaml,
    }
    if path.suffix.lower() not in parsers:
        raise error(f"{path}: files end in .toml, .json or .yaml; found '{path.suffix.lower()}'")
    text = files.read_text(path, error, most=most, follow=follow)
    data = parsers[path.suffix.lower()](text, str(path), error)
    if not isinstance(data, dict):
        raise error(f"{path}: the top level must be a table; found {_kind(data)}")
    return data


@contextlib.contextmanager
def in_file(
    path: str | Path, error: type[FourfoldError], what: str = "", data: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Errors raised inside name the file, and its kind if its `data` look like another kind than `what`."""
    try:
        yield
    except error as e:
        matches = {kind: len(data.keys() & set(names)) for kind, names in KINDS.items()} if data else {}
        best = max(matches, key=lambda kind: matches[kind], default=what)
        wrong = bool(matches) and matches[best] > matches[what]
        raise error(f"{path}: this is {best}, not {what}" if wrong else f"{path}: {e}") from None


def build(cls: type[T], data: Mapping[str, Any], where: str = "", error: type[FourfoldError] = ConfigError) -> T:
    """Make a `cls` from a mapping; missing fields take their defaults. `where` prefixes names in messages."""
    assert dataclasses.is_dataclass(cls)
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    for key in data:
        if key not in names:
            hint = _owner(str(key), hints, where) or nearest(str(key), names)
            raise error(f"unknown field '{_join(where, key)}'{hint}")
        table = data[key]
        for inner in table if isinstance(table, Mapping) and dataclasses.is_dataclass(hints[key]) else ():
            if inner not in _fields_inside(hints[key]) and (hint := _owner(str(inner), hints, where)):
                raise error(f"unknown field '{_join(_join(where, key), inner)}'{hint}")
    values = {key: _convert(hints[key], value, _join(where, key), error) for key, value in data.items()}
    missing = [
        f.name
        for f in dataclasses.fields(cls)
        if f.name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise error(f"missing field '{_join(where, missing[0])}'")
    return cls(**values)


def _owner(field: str, hints: Mapping[str, Any], where: str) -> str:
    """`; it is a field of [section]`, if a section has a field of this name."""
    owner = next((name for name, kind in hints.items() if field in _fields_inside(kind)), None)
    if owner is None:
        return ""
    section = _join(where, owner)
    return (
        f"; it is a field of [{section}]"
        if dataclasses.is_dataclass(hints[owner])
        else f"; it is a field of [[{section}]]"
    )


def _fields_inside(kind: Any) -> set[str]:
    """Names of fields of a section, or of the rows of a list of sections."""
    kinds = [kind, *typing.get_args(kind)]
    return {f.name for k in kinds if dataclasses.is_dataclass(k) for f in dataclasses.fields(k)}


def _convert(kind: Any, value: Any, where: str, error: type[FourfoldError]) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is typing.Literal:
        if value in args and not (isinstance(value, bool) and True not in args and False not in args):
            return value
        hint = (
            nearest(value, map(str, args)) if isinstance(value, str) else f"; choose one of {', '.join(map(str, args))}"
        )
        raise error(f"{where} = {_brief(value)} is invalid{hint}")
    if origin in (types.UnionType, typing.Union):
        return _convert_union(args, value, where, error)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise error(f"{where} must be a list; found {_kind(value)}")
        return tuple(_convert(args[0], v, f"{where}[{i}]", error) for i, v in enumerate(value))
    if origin is dict or kind is dict:
        if not isinstance(value, Mapping):
            raise error(f"{where} must be a table; found {_kind(value)}")
        return dict(value)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise error(f"{where} must be a table; found {_kind(value)}")
        return build(typing.cast(type, kind), value, where, error)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        if value.bit_length() > 1000:
            digits = int(value.bit_length() * math.log10(2)) + 1
            raise error(f"{where} must be a number; found one of {digits} digits")
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        number = (
            re.match(r"\s*[0-9.]+(e[+-]?[0-9]+)?\s*[A-Za-z]", value)
            if kind is float and isinstance(value, str)
            else None
        )
        hint = "; numbers have no unit: write for example 25e9 for 25 billion" if number else ""
        raise error(f"{where} must be {_NAMES.get(kind, kind)}; found {_kind(value)} {_brief(value)}{hint}")
    if kind is int and not -MOST <= value <= MOST:
        raise error(f"{where} = {_brief(value)} must be at most {MOST}")
    if kind is str and not value.isprintable():
        raise error(f"{where} = {_brief(value)} has a control character in it; names and paths are printable")
    return value


def _brief(value: Any) -> str:
    """A value in a message."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _convert_union(kinds: tuple[Any, ...], value: Any, where: str, error: type[FourfoldError]) -> Any:
    if value is None and type(None) in kinds:
        return None
    problems = []
    for kind in kinds:
        if kind is type(None):
            continue
        try:
            return _convert(kind, value, where, error)
        except FourfoldError as e:
            problems.append(str(e))
    raise error(" or ".join(problems))


_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def _kind(value: Any) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list() | tuple():
            return "a list"
        case dict():
            return "a table"
        case _:
            return f"a {type(value).__name__}"


def _join(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)


def dump(value: Any) -> Any:
    """The inverse of `build`: plain dicts, lists and scalars; fields that are None are omitted."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name: dump(v) for name, v in items if v is not None}
    if isinstance(value, Mapping):
        return {str(k): dump(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [dump(v) for v in value]
    return value


def dump_toml(data: Mapping[str, Any]) -> str:
    """TOML of a two-level mapping: tables of scalars and lists, and lists of such tables (`[[unit]]`)."""

    def lines(table: Mapping[str, Any]) -> str:
        return "".join(f"{k} = {_toml_value(v)}\n" for k, v in table.items())

    out = [lines({k: v for k, v in data.items() if not _is_table(v)})]
    for key, value in data.items():
        if isinstance(value, Mapping):
            out.append(f"[{key}]\n{lines(value)}")
        elif _is_table(value):
            out.extend(f"[[{key}]]\n{lines(item)}" for item in value)
    return "\n".join(part for part in out if part)


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)
    )


def _toml_value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(map(_toml_value, value))}]"
        case dict():
            return "{" + ", ".join(f"{json.dumps(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
        case _:
            return json.dumps(value, ensure_ascii=False)


def check_writable(
    path: str | Path, what: str, error: type[FourfoldError], endings: tuple[str, str] = (".json", ".toml")
) -> None:
    """Refuse a path that cannot be written, before the work for it starts."""
    path = Path(path)
    if path.is_dir():
        raise error(f"{path}: is a folder; name a file, for example {path / 'file.json'}")
    if path.suffix not in endings:
        raise error(f"{path}: {what} is saved as {' or '.join(endings)}; found '{path.suffix}'")
    if not path.parent.is_dir():
        raise error(f"{path}: cannot be written: there is no folder {path.parent}; make it first, or name another")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".fourfold-"):
            pass
    except OSError as e:
        why = e.strerror or str(e)
        raise error(f"{path}: cannot be written: no file can be made in {path.parent} ({why}); name another") from None


def is_integer(value: Any, least: int = 0) -> bool:
    """Whether it is an integer (not a bool) of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_count(where: str, value: Any, error: type[FourfoldError]) -> None:
    """A whole number of at least 1."""
    if not is_integer(value, 1):
        raise error(f"{where} = {value!r} must be a whole number of at least 1")


_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(text: str | int, where: str, error: type[FourfoldError] = ConfigError) -> int:
    """Bytes of `"16GiB"`, `"512 MB"` or a plain number."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in _UNITS:
        raise error(f"{where} = {str(text)[:50]!r} is not a size; write for example '16GiB', '512MiB' or '40GB'")
    size = float(match[1]) * _UNITS[match[2].upper()]
    if size >= 2**63:
        raise error(f"{where} = {str(text)[:50]!r} is more than any machine has; write for example '16GiB'")
    return int(size)


def format_seconds(seconds: float) -> str:
    """A time as text, with four digits: `24.14 s`, `276.1 ms`, `37.2 min`."""
    for unit, size, least in (
        ("days", 86400, 172800),
        ("h", 3600, 7200),
        ("min", 60, 600),
        ("s", 1, 1),
        ("ms", 1e-3, 1e-3),
    ):
        if abs(seconds) >= least * (1 - 5e-5):
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.4g} µs" if seconds else "0 s"


def format_bytes(count: float) -> str:
    """Bytes as text: `1.50 GiB`."""
    for unit, size in (("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size * (1 - 0.005 / 1024):  # 1.00 MiB, not 1024.00 KiB
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"
