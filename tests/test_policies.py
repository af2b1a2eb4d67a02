"""Rules of the house, as tests."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "fourfold"
FILES = sorted(SOURCE.rglob("*.py"))

WITHOUT_TORCH = (
    "plan",
    "cluster",
    "cluster_checks",
    "config",
    "schema",
    "files",
    "train.checkpoint_folder",
    "train.checkpoint_index",
    "train.rundir",
    "piece",
    "errors",
    "cli",
    "model.spec",
    "model.hf",
    "model.families",
    "model.operators",
    "presets",
    "commands.plan",
    "runtime.sizes",
    "shard.layout",
    "tensor.blocks",
    "tensor.costs",
)
ROOMS_WITHOUT_TORCH = ("program", "planner", "view")
APART = ("runtime", "tensor", "shard", "offload")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_planning_code_starts_without_torch() -> None:
    names = [n for n in WITHOUT_TORCH if (SOURCE / Path(*n.split("."))).with_suffix(".py").exists()]
    names += [
        module_name(p) for room in ROOMS_WITHOUT_TORCH for p in (SOURCE / room).rglob("*.py") if p.stem != "__init__"
    ]
    script = f"import sys, importlib\nfor n in {names!r}: importlib.import_module('fourfold.' + n)\n"
    script += "bad = [m for m in ('torch', 'safetensors.torch') if m in sys.modules]\nassert not bad, bad"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_file(path: Path) -> None:
    text, name = path.read_text(), module_name(path)
    assert ast.get_docstring(ast.parse(text)) or not text.strip(), "a module opens with what it is"
    assert ".cuda(" not in text
    assert not re.search(r"torch\.load\((?![^)]*weights_only=True)", text)
    assert not re.search(r"\bTODO\b|\bFIXME\b", text)
    room = name.split(".")[0]
    if room in APART:
        others = {f"fourfold.{other}" for other in APART if other != room}
        assert not any(i.startswith(tuple(others)) for i in imports(path)), f"{room} imports another room"
    if room not in ("train", "commands") and name not in ("cli", "__init__"):
        assert "fourfold.train.worker" not in imports(path)


def test_a_class_name_stands_for_one_thing() -> None:
    """A reader who knows a class by its name must not meet another of the same name."""
    files: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(module_name(path))
    assert not {name: where for name, where in files.items() if len(where) > 1}


def test_public_names_exist_and_are_listed() -> None:
    import fourfold

    for name in fourfold.__all__:
        assert getattr(fourfold, name) is not None
    assert set(dir(fourfold)) == {*fourfold.__all__, "__version__"}
    with pytest.raises(AttributeError):
        _ = fourfold.nothing  # type: ignore[attr-defined]


def test_every_config_field_is_documented() -> None:
    for path in (SOURCE / "config.py", SOURCE / "plan.py"):
        for cls in ast.parse(path.read_text()).body:
            if not isinstance(cls, ast.ClassDef) or cls.name in ("Config", "Plan", "Mesh"):
                continue
            for here, following in zip(cls.body, [*cls.body[1:], None], strict=True):
                if isinstance(here, ast.AnnAssign):
                    assert isinstance(following, ast.Expr), f"{cls.name}.{ast.unparse(here.target)} has no text"


def test_nothing_is_left_in_the_tree() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert not [f for f in tracked if f.startswith("runs/") or "__pycache__" in f or f.endswith(".pyc")]
    for script in (".ci/run",):
        assert os.access(ROOT / script, os.X_OK)
