"""The reference pages, from the code: commands, config, plan and cluster, every field with type, default and meaning.

    python docs/make_reference.py            # writes docs/reference/*.md and the tables of docs/clusters.md
    python docs/make_reference.py --check    # fails if they are not those of the code

The texts are the docstrings that `--help` shows.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import types
import typing
from pathlib import Path
from typing import Any

import tyro

from fourfold.cli import COMMANDS
from fourfold.cluster import Cluster, Device, Host, Level
from fourfold.config import Config
from fourfold.plan import Plan
from fourfold.presets import PRESETS

FOLDER = Path(__file__).parent / "reference"
WRITTEN_BY_THE_PLANNER = ("predicted", "certificate", "alternatives")


def field_texts(kind: type) -> dict[str, str]:
    """The docstring below every field of a dataclass."""
    (cls,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(cls, ast.ClassDef)
    found = {}
    for line, after in zip(cls.body, [*cls.body[1:], None], strict=True):
        text = after.value if isinstance(after, ast.Expr) else None
        if (
            isinstance(line, ast.AnnAssign)
            and isinstance(line.target, ast.Name)
            and isinstance(text, ast.Constant)
            and isinstance(text.value, str)
        ):
            found[line.target.id] = " ".join(text.value.split())
    return found


def type_text(kind: Any) -> str:
    """A type as a user would write its values."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated or (args and str(origin).endswith("Annotated")):
        return type_text(args[0])
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_text(a) for a in args if a is not type(None))
    if origin is tuple:
        return f"list of {type_text(args[0])}"
    names = {"int": "integer", "float": "number", "str": "text", "bool": "`true` or `false`", "dict": "table"}
    return names.get(getattr(kind, "__name__", str(kind)), f"[{getattr(kind, '__name__', kind)}]")


def default_text(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "needed"
    if value is None or value in ("", ()) or dataclasses.is_dataclass(value):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def table(kind: type, prefix: str, skip: tuple[str, ...] = ()) -> list[str]:
    """Rows of every field that has a value of its own."""
    texts, hints = field_texts(kind), typing.get_type_hints(kind, include_extras=True)
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(kind):
        if field.name in skip or field.name.startswith("_"):
            continue
        meaning = texts.get(field.name, "").replace("|", "\\|")
        name = f"{prefix}{field.name}"
        if prefix == "--":
            positional = tyro.conf.Positional in getattr(hints[field.name], "__metadata__", ())
            name = field.name.upper() if positional else f"--{field.name.replace('_', '-')}"
        lines.append(f"| `{name}` | {type_text(hints[field.name])} | {default_text(field)} | {meaning} |")
    return lines


def first_paragraph(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())


def section(kind: type, prefix: str, title: str) -> list[str]:
    return [f"## {title}", "", first_paragraph(kind), "", *table(kind, prefix), ""]


def config_page() -> str:
    lines = [
        "# The config file",
        "",
        "What to train: TOML, JSON, or YAML with the extra. Every field is also a flag of `fourfold train`: "
        "`--section.field value`, with `-` for `_` if you like. Defaults < file < flags.",
        "",
    ]
    for field in dataclasses.fields(Config):
        kind = typing.get_type_hints(Config)[field.name]
        lines += section(kind, f"{field.name}.", f"[{field.name}]")
        for inner in typing.get_type_hints(kind).values():
            for part in typing.get_args(inner):
                if dataclasses.is_dataclass(part) and isinstance(part, type):
                    lines += section(part, "", part.__name__)
    return "\n".join(lines)


def plan_page() -> str:
    lines = [
        "# The plan file",
        "",
        "How to train: TOML by hand, JSON from the planner. Everything but `[mesh]` has a default. The planner adds "
        "`predicted`, `certificate` and `alternatives`, which a run does not read.",
        "",
    ]
    hints = typing.get_type_hints(Plan)
    for field in dataclasses.fields(Plan):
        if field.name in WRITTEN_BY_THE_PLANNER:
            continue
        kind = hints[field.name]
        many = typing.get_origin(kind) is tuple
        kind = typing.get_args(kind)[0] if many else kind
        title = f"[[{field.name}]]" if many else f"[{field.name}]"
        lines += section(kind, "" if many else f"{field.name}.", title)
        for name, inner in typing.get_type_hints(kind).items():
            if dataclasses.is_dataclass(inner) and isinstance(inner, type):
                lines += section(inner, f"{field.name}.{name}.", f"[{field.name}.{name}]")
    return "\n".join(lines)


def commands_page() -> str:
    lines = [
        "# Commands",
        "",
        "`fourfold COMMAND --help` prints the same. Exit codes: 0 success, 1 a run failed (or two runs diverge), 2 invalid input "
        "(nothing was started), 130 stopped by Ctrl-C. Commands that print tables also print `--json`.",
        "",
        "| command | what it does |",
        "|---|---|",
        *(f"| [`{name}`](#fourfold-{name}) | {first_paragraph(kind)} |" for name, (kind, _) in COMMANDS.items()),
        "",
    ]
    sections = {field.name for field in dataclasses.fields(Config)}
    for name, (kind, _) in COMMANDS.items():
        own = (*sections, "given") if name == "train" else ()
        text = re.sub(r"\n{2,}", "\n\n", inspect.getdoc(kind) or "")
        lines += [f"## fourfold {name}", "", text, "", *table(kind, "--", own), ""]
        if name == "train":
            lines += ["Besides these, every field of the [config](config.md) as `--section.field value`.", ""]
    return "\n".join(lines)


def clusters_page() -> str:
    """docs/clusters.md with its tables of presets and fields."""
    text = CLUSTERS.read_text()
    fields: list[str] = []
    for kind, prefix, title in (
        (Cluster, "", "The file"),
        (Device, "device.", "[device]"),
        (Host, "host.", "[host]"),
        (Level, "", "[[level]]"),
    ):
        skip = ("device", "host", "level") if kind is Cluster else ()
        fields += [f"### {title}", "", first_paragraph(kind), "", *table(kind, prefix, skip), ""]
    heads = ("preset", "a node", "memory", "bf16 matmuls", "in a node", "between nodes", "source")
    presets = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, c in PRESETS.items():
        rate = c.device.matrix["bf16"] * c.device.efficiency / 1e12
        inside = f"{c.level[0].name}, {c.level[0].bandwidth / 1e9:g} GB/s" if len(c.level) > 1 else ""
        beyond = f"{c.level[-1].name}, {c.level[-1].bandwidth / 1e9:.3g} GB/s"
        node = f"{c.devices} × {c.device.name} | {c.device.memory} | {rate:.0f} TFLOP/s"
        presets.append(f"| `{name}` | {node} | {inside} | {beyond} | {c.source} |")
    for name, lines in (("fields", fields[:-1]), ("presets", presets)):
        first, last = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, _, rest = text.partition(first)
        text = before + first + "\n".join(lines) + "\n" + last + rest.partition(last)[2]
    return text


CLUSTERS = Path(__file__).parent / "clusters.md"
PAGES = {"../clusters.md": clusters_page, "commands.md": commands_page, "config.md": config_page, "plan.md": plan_page}


def main() -> int:
    stale = []
    FOLDER.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        text = make().rstrip() + "\n"
        if "--check" in sys.argv:
            stale += [name] if (FOLDER / name).read_text() != text else []
        else:
            (FOLDER / name).write_text(text)
    if stale:
        print(f"not those of the code: {', '.join(stale)}; run python docs/make_reference.py", file=sys.stderr)
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
