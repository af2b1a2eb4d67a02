"""Code and commands of the README and of docs/ run as they stand.

| block | what happens |
|---|---|
| python | executed in a folder with the README's files, or by the test that RUN_BY names |
| bash | README: every line. Other pages: `plan` and `simulate` as they stand, `train` with --dry-run; all lines in full, one |
| | page after another, with FOURFOLD_SLOW_TESTS=1 (WHOLE). NOT_HERE says which lines are never run, and why |
| toml | read as a plan, a config or a cluster file |
| console, text | output; of the README, commands in a console are run, and what `fourfold plan` says is compared |

`test_docs.py` checks that there are no others.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli import main
from fourfold.cluster import Cluster
from fourfold.config import Config
from fourfold.plan import Plan
from tests.hub import LLAMA3

ROOT = Path(__file__).parent.parent
NOT_HERE = {
    "make ": "needs a fresh environment: CI's own job",
    "pip ": "installs",
    "pytest": "is this",
    "git ": "needs a remote",
    "cd ": "of a clone",
    "fourfold verify": "tests/test_verify.py runs it",
    "fourfold plan --serve": "does not end; tests/test_plan_report.py asks the server",
    "python -m http.server": "does not end; benchmarks/site.py serves the folder",
    "s3://": "needs an object store; tests/test_remote.py has one",
    "configs/llama-1b.toml --train.steps": "needs a GPU",
}
COMMANDS_RUN_BY = {
    "README.md": "test_readme_commands",
    "docs/hugging-face.md": "tests/test_hugging_face.py",
    "docs/fine-tuning.md": "tests/test_hugging_face.py",
}
RUN_BY = {
    "docs/own-model.md": "tests/test_own_model.py",
    "docs/tensor.md": "tests/tensor/test_tensor_docs.py",
    "docs/sharding.md": "tests/test_sharding_costs.py",
    "docs/offload.md": "tests/offload/test_streamed_adamw.py",
    "docs/lab.md": "tests/lab/test_docs.py",
    "docs/schedules.md": "tests/program/test_simulate_command.py",
    "docs/hugging-face.md": "tests/test_hugging_face.py",
    "docs/fine-tuning.md": "tests/test_hugging_face.py",
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SLOW = pytest.mark.skipif("FOURFOLD_SLOW_TESTS" not in os.environ, reason="every line in full: FOURFOLD_SLOW_TESTS=1")


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)


def commands(path: Path) -> list[str]:
    """Lines of bash blocks (README: and of consoles) that a reader would type; `$ ` and comments are taken off."""
    found = []
    for block in blocks(path, "(?:console|bash)" if path.name == "README.md" else "bash"):
        shown = [line for line in block.splitlines() if line.startswith("$ ")]
        for line in shown or block.splitlines():
            line = line.removeprefix("$ ").split("  #")[0].strip()
            if line and not line.startswith("#") and not any(part in f"{line} " for part in NOT_HERE):
                found.append(line)
    return found


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def with_blocks(language: str) -> list[Any]:
    """Pages whose blocks of a language are run here."""
    elsewhere = {"bash": COMMANDS_RUN_BY, "python": RUN_BY, "toml": {}}[language]
    return [pytest.param(p, id=name(p)) for p in PAGES if blocks(p, language) and name(p) not in elsewhere]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the pages speak of: configs and examples, a model's config.json, a plan."""
    for folder in ("configs", "examples", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "path/to").mkdir(parents=True)
    for file in ("config.json", "path/to/config.json"):
        (tmp_path / file).write_text(json.dumps(LLAMA3))
    (tmp_path / "plan.toml").write_text('[mesh]\ndata = 2\n[precision]\ncompute = "bf16"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put_files(page: Path, folder: Path) -> None:
    """TOML blocks that begin with the name of a file (`# plan.toml`) are written there."""
    for block in blocks(page, "toml"):
        if match := re.match(r"# ([\w.-]+\.toml)", block):
            (folder / match[1]).write_text(block)


@pytest.mark.timeout(300)
def test_readme_commands(workplace: Path) -> None:
    lines = commands(ROOT / "README.md")
    assert any(line.startswith("fourfold demo") for line in lines)
    run_all(lines, workplace)


@pytest.mark.parametrize("page", [pytest.param(p, id=name(p)) for p in PAGES if "$ fourfold plan " in p.read_text()])
def test_plans_that_pages_show_are_those_of_today(
    page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every line of the output that is shown, but for what `…` leaves out and the seconds of the search."""
    monkeypatch.setenv("COLUMNS", "140")
    for block in blocks(page, "console"):
        command, *lines = block.splitlines()
        if not command.startswith("$ fourfold plan "):
            continue
        main(shlex.split(command)[2:])
        said = " ".join("".join(capsys.readouterr()).split())
        for line in lines:
            shown = re.escape(" ".join(line.split())).replace("…", ".*")
            shown = re.sub(r"searched\\ in\\ [\d\\.]+\\ s", r"searched in [\\d.]+ s", shown)
            assert re.search(shown, said), f"{page.name} shows another plan than today's:\n{line}\n{command}\n{said}"


@SLOW
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", with_blocks("bash"))
def test_whole_pages(page: Path, workplace: Path) -> None:
    script = "import runpy, sys; m = runpy.run_path('examples/fine_tune_folder.py'); m['tiny_folder'](m['Path']('path/to/folder'))"
    subprocess.run([sys.executable, "-c", script], cwd=workplace, check=True, capture_output=True)
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    (workplace / "chats.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 16)
    put_files(page, workplace)
    run_all(commands(page), workplace, limit=1800)


def run_all(lines: list[str], workplace: Path, limit: float = 300) -> None:
    folder = Path(sys.executable).parent
    env = {"PATH": f"{folder}:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": str(workplace), "PYTHONPATH": str(ROOT / "src")}
    for line in lines:
        for part in line.split(" && "):
            words = re.sub(r"(^|\s)fourfold ", rf"\1{sys.executable} -m fourfold ", part, count=1)
            words = re.sub(r"^python ", f"{sys.executable} ", words)
            if part.startswith("fourfold demo"):
                words += " --steps 4"  # the same path, shorter
            out = subprocess.run(
                words, shell=True, cwd=workplace, capture_output=True, text=True, env=env, timeout=limit
            )
            assert out.returncode == 0, f"{part}\n{out.stdout}\n{out.stderr}"


def test_commands_are_valid(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = set()
    for (page,) in (p.values for p in with_blocks("bash")):
        put_files(page, workplace)
        for line in commands(page):
            words = shlex.split(line)
            if "=" in words[0]:  # VARIABLE=value before it
                del words[0]
            key = (*words, (workplace / "plan.toml").read_text() if "plan.toml" in words else "")
            if key in seen or "path/to/folder" in words or "--resume" in words:
                continue
            seen.add(key)
            if words[:2] in (["fourfold", "plan"], ["fourfold", "simulate"]):
                assert main(words[1:]) == 0, (page, line, capsys.readouterr())
            elif words[:2] == ["fourfold", "train"]:
                assert main([*words[1:], "--dry-run"]) == 0, (page, line, capsys.readouterr())
    assert len(seen) > 20, "the pages have lost their commands"


@pytest.mark.parametrize("page", with_blocks("python"))
def test_python(page: Path, workplace: Path) -> None:
    for code in blocks(page, "python"):
        code = code.replace("callbacks=[...]", "callbacks=[]").replace(
            "ff.fit(", "(lambda *a, **k: None)("
        )  # README: not trained again
        exec(compile(code, name(page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", with_blocks("toml"))
def test_toml(page: Path) -> None:
    for text in blocks(page, "toml"):
        data = tomllib.loads(text)
        keys = data.keys()
        if keys <= Plan.__dataclass_fields__.keys():
            Plan.from_dict(data)
        elif keys <= Config.__dataclass_fields__.keys():
            Config.from_dict(data)
        else:
            Cluster.from_dict(data)
