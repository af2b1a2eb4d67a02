"""API reference from docstrings, as one Markdown page: every public name of the package and of the modules listed below.

python docs/make_api.py > api.md
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from types import ModuleType
from typing import Any, TextIO

MODULES = (
    "fourfold",
    "fourfold.program",
    "fourfold.testing.ranks",
    "fourfold.testing.ledger",
    "fourfold.testing.budget",
    "fourfold.testing.emulate",
    "fourfold.testing.network",
)


def write_api(out: TextIO) -> int:
    """Write the page; returns the number of names on it."""
    out.write("# API reference\n")
    count = 0
    for name in MODULES:
        module: ModuleType = importlib.import_module(name)
        out.write(f"\n## `{name}`\n\n{inspect.getdoc(module) or ''}\n")
        for public in sorted(module.__all__):
            _write_entry(out, public, getattr(module, public), "###")
            count += 1
    return count


def _write_entry(out: TextIO, name: str, value: Any, heading: str) -> None:
    kind = "class " if inspect.isclass(value) else ""
    signature = f"\n```text\n{name}{_signature(value)}\n```\n" if callable(value) else ""
    out.write(f"\n{heading} {kind}`{name}`\n{signature}\n{inspect.getdoc(value) or ''}\n")
    if not inspect.isclass(value) or heading != "###":
        return
    for attribute, member in sorted(vars(value).items()):
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if attribute.startswith("_") or not (inspect.isfunction(function) or isinstance(function, property)):
            continue
        _write_entry(out, f"{name}.{attribute}", getattr(value, attribute), "####")


def _signature(value: Any) -> str:
    try:
        text = str(inspect.signature(value)).replace("fourfold.", "")
        return re.sub(r"'([\w.\[\], |*]+)'(?=[,)= ]|$)", r"\1", text).replace(" -> None", "")  # annotations are strings
    except ValueError:
        return ""


if __name__ == "__main__":
    write_api(sys.stdout)
