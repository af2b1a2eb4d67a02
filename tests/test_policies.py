"""Rules of the house, as tests."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from functools import cache
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
    "checkpoint.folder",
    "checkpoint.index",
    "supervision.diagnose",
    "supervision.flight",
    "checkpoint.remote",
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
    "offload_sizes",
    "runtime.sizes",
    "shard.layout",
    "tensor.blocks",
    "tensor.costs",
)
ROOMS_WITHOUT_TORCH = ("program", "planner", "site", "view")
APART = ("runtime", "tensor", "shard", "offload")

SAME_THING = {
    "adamw": "the optimizer, and the kernel of its update",
    "build": "a model built from its config, a layout built out into a plan",
    "costs": "of the ops of a schedule, of a matmul on the grid",
    "grid": "the tensor grid, and one whose ranks are threads",
    "layers": "of a model, and the same on the grid",
    "split": "of an operator into slices, of a master weight into two halves",
    "trace": "of a module's operators, of a training step",
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(tree_of(path)):
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
    if room != "testing":
        assert not any(i.startswith("fourfold.testing") for i in imports(path)), "production code imports testing/"
    if room in APART:
        others = {f"fourfold.{other}" for other in APART if other != room}
        assert not any(i.startswith(tuple(others)) for i in imports(path)), f"{room} imports another room"
    if room not in ("train", "commands") and name not in ("cli", "__init__"):
        assert "fourfold.train.worker" not in imports(path)


def test_a_class_name_stands_for_one_thing() -> None:
    """A reader who knows a class by its name must not meet another of the same name."""
    files: dict[str, list[str]] = {}
    for path in FILES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(module_name(path))
    assert not {name: where for name, where in files.items() if len(where) > 1}


def test_the_four_rooms_meet_in_train_and_checkpoint() -> None:
    """CONTRIBUTING says so."""
    for path in FILES:
        met = {room for room in APART if any(i.startswith(f"fourfold.{room}.") for i in imports(path))}
        room = module_name(path).split(".")[0]
        assert len(met) < 2 or room in ("train", "checkpoint"), f"{module_name(path)} joins {sorted(met)}"


# ---- imports of other trees ----

TREES = {name: sorted((ROOT / name).rglob("*.py")) for name in ("src", "tests", "benchmarks", "examples")}


def test_benchmarks_and_tests_do_not_import_each_other() -> None:
    """Tests of benchmarks are `benchmarks/test_*.py`; what both need is in fourfold.testing."""
    for name, other in (("benchmarks", "tests"), ("tests", "benchmarks"), ("examples", "tests")):
        for path in TREES[name]:
            found = {i for i in imports(path) if i.split(".")[0] == other}
            assert not found, f"{path.relative_to(ROOT)} imports {sorted(found)}"


def defined(path: Path) -> set[str]:
    """The names that a module has at its top level."""
    found: set[str] = set()
    todo: list[ast.AST] = [tree_of(path)]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            else:
                todo.append(node)
    return found


def module_file(name: str) -> Path | None:
    base = (ROOT / "src" if name.split(".")[0] == "fourfold" else ROOT) / Path(*name.split("."))
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.exists()), None)


def imported_names(tree: ast.AST) -> set[tuple[str, str]]:
    """(module, name) of every `from module import name` of our own packages."""
    return {
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if node.module.split(".")[0] in ("fourfold", "benchmarks", "tests")
    }


def test_imported_names_exist() -> None:
    """Also in what is imported late, by a test that is skipped here, or in an example of the docs."""
    trees = [(path, tree_of(path)) for paths in TREES.values() for path in paths]
    for page in (ROOT / "docs").glob("*.md"):
        trees += [(page, ast.parse(c)) for c in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]
    missing, names = [], {}
    for path, tree in trees:
        for module, name in imported_names(tree):
            home = module_file(module)
            if home is not None and home not in names:
                names[home] = defined(home)
            if home is None or (name not in names[home] and module_file(f"{module}.{name}") is None):
                missing.append(f"{path.relative_to(ROOT)}: from {module} import {name}")
    assert not missing, "\n".join(sorted(missing))


def test_a_file_name_stands_for_one_thing() -> None:
    """The same name twice is fine where it is the same thing seen from two rooms, as listed; not elsewhere."""
    fronts = ("commands", "view")  # named for what they show
    names = [
        p.stem for p in FILES if p.stem not in ("__init__", "_torch") and module_name(p).split(".")[0] not in fronts
    ]
    twice = {name for name in names if names.count(name) > 1}
    unlisted = twice - SAME_THING.keys()
    assert not unlisted, f"{sorted(unlisted)}: rename one, or say in SAME_THING why both have the name"


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


# ---- what the documentation names ----

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted((ROOT / "docs").glob("*.md"))


def code_of(page: Path) -> list[str]:
    """Lines of a page's shell blocks, and its code spans."""
    text = page.read_text()
    blocks = re.findall(r"```(?:bash|console|sh)\n(.*?)```", text, re.DOTALL)
    lines = [line.split("  #")[0] for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [*lines, *re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))]


def test_commands_in_the_docs_exist(capsys: pytest.CaptureFixture[str]) -> None:
    from fourfold.cli import COMMANDS, main

    make_targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    options: dict[str, set[str]] = {}
    for page in PAGES:
        for line in code_of(page):
            where = f"{page.name}: {line.strip()}"
            for target in re.findall(r"^\$? ?make ([a-z-]+)", line):
                assert target in make_targets, where
            for module in re.findall(r"python -m (benchmarks\.\w+)", line):
                assert module_file(module), where
            found = re.search(r"(?:^|[\s;&|=`])fourfold ([a-z][a-z-]*)(.*)", line)
            if not found or found[1] in ("import", "as"):
                continue
            command, rest = found[1], found[2].split(" && ")[0].split("|")[0]
            assert command in COMMANDS, where
            if command not in options:
                with pytest.raises(SystemExit):
                    main([command, "--help"])
                options[command] = set(re.findall(r"--[a-z][\w.-]*", capsys.readouterr().out)) | {"--help", "--debug"}
            for option in re.findall(r"(?<!\S)(--[a-z][\w-]*)(?=[\s=]|$)", rest):
                assert option in options[command], f"{where}: no option {option}"


def test_files_in_the_docs_exist() -> None:
    """In pages, and in docstrings and comments of the package: a path names a file of the tree."""
    roots = [ROOT, SOURCE, ROOT / "tests", ROOT / "src"]
    missing = []
    for path in [*PAGES, *FILES]:
        text = path.read_text()
        for name in set(re.findall(r"(?<![\w./*-])((?:[a-z_]+/)+[\w-]+\.(?:py|md))\b", text)):
            if not any((root / name).exists() for root in [*roots, path.parent, path.parent.parent]):
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert not missing, "\n".join(missing)


# ---- words ----

DIALECT = (
    r"of a sort|so many of|so much|what would do|go(?:es|ing)? on from|is believed|sees? to it|by turns|what it takes",
    r"with the bits of|the speed of none|which nothing else|what is left of it|for want of|is told|are told|commonest|nobody",
    r"heights|(?<!['\"])beside|likewise|for ever|whoever|nothing says|where there is none|where there are none|as it came|as they came",
)
"""Samples of sentences that readers had to read twice; CONTRIBUTING says how to write instead."""


def test_words_that_readers_stumble_over_are_gone() -> None:
    pattern = re.compile(rf"\b(?:{'|'.join(DIALECT)})\b", re.IGNORECASE)
    pages = [*PAGES, *(ROOT / "docs").glob("*/*.md")]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in [*FILES, *TREES["benchmarks"], *TREES["examples"], *TREES["tests"], ROOT / "conftest.py", *pages]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if path.name != "test_policies.py" and pattern.search(line)
    ]
    assert not found, "\n".join(found)


SAME_FUNCTION = {
    "main": "of each program",
    "join": "bf16 weights and their low bits, in torch and as a kernel",
    "split": "bf16 weights and their low bits, in torch and as a kernel; the backwards of a schedule",
    "scale": "in torch and as a kernel",
    "round_half_up": "in torch and as a kernel",
    "square_sum": "in torch and as a kernel",
    "why": "the command; the reason of an OSError",
    "verify": "the command; a checkpoint",
    "compare": "the command; schedules in `simulate`",
    "export": "a plan to another system; a checkpoint",
    "explain": "a plan; an error of CUDA; replicas that differ",
    "predict": "a plan, for users and inside the planner",
    "search": "for a plan; for a schedule",
    "improve": "a plan or a schedule, by local search",
    "build": "a schedule by name; a dataclass from a mapping",
    "parallelize": "a module on the tensor grid; any module over replicas",
    "fuse": "matrices along a dim; I and W of a schedule",
    "traffic": "of a matmul; through an interface",
    "work": "of one rank; of one encoding process",
}


def test_a_function_name_stands_for_one_thing() -> None:
    """Public functions at the top of modules; the same name twice only as listed."""
    files: dict[str, list[str]] = {}
    for path in FILES:
        for node in tree_of(path).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                files.setdefault(node.name, []).append(module_name(path))
    twice = {name: where for name, where in files.items() if len(where) > 1 and name not in SAME_FUNCTION}
    assert not twice, f"{twice}: rename one, or say in SAME_FUNCTION why both have the name"


# ---- signs ----


def test_names_in_docstrings_and_pages_exist() -> None:
    """Notes, modules by dotted path, files without a folder, and environment variables."""
    text = {path: path.read_text() for path in [*FILES, *PAGES, *TREES["tests"], ROOT / "conftest.py"]}
    notes = {note for t in text.values() for note in re.findall(r"^ *\[Note: ([^\]\n]+)\]$", t, re.MULTILINE)}
    variables = {v for p, t in text.items() if p.suffix == ".py" for v in re.findall(r"FOURFOLD_[A-Z_]+", t)}
    missing = []
    for path in [*FILES, *PAGES]:
        found = [f"[Note: {note}]" for note in re.findall(r"\[Note: ([^\]\n]+)\]", text[path]) if note not in notes]
        found += [v for v in re.findall(r"FOURFOLD_[A-Z_]+", text[path]) if v not in variables]
        for dotted in re.findall(r"(?<![\w./])fourfold(?:\.[a-z_]+)+(?![\w.]*[:(/])", text[path]):
            parts = dotted.split(".")
            if not any(module_file(".".join(parts[:n])) for n in range(2, len(parts) + 1)) and parts[1] not in ("zip",):
                found += (
                    [dotted] if parts[1] not in defined(SOURCE / "__init__.py") | {"collective", "__file__"} else []
                )
        if path.suffix == ".py":
            for name in re.findall(r"(?<![\w./`'\"*-])([a-z_]+\.py)\b", text[path]):
                if not any((folder / name).exists() for folder in (path.parent, SOURCE, ROOT)) and name != "script.py":
                    found.append(f"{name} (give its folder)")
        missing += [f"{path.relative_to(ROOT)}: {name}" for name in found]
    assert not missing, "\n".join(missing)


def test_the_table_of_rooms_is_right() -> None:
    """docs/make_rooms.py writes it; a tenth may have come or gone since."""
    made = runpy.run_path(str(ROOT / "docs" / "make_rooms.py"))
    counted, listed = made["rooms"](), made["listed"](made["PAGE"].read_text())
    assert listed.keys() == counted.keys()
    for room, (_, lines) in counted.items():
        assert abs(listed[room][1] - lines) <= max(60, lines / 10), f"{room}: run python docs/make_rooms.py"
