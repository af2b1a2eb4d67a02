"""Every command that the README shows is run, but for those that need a fresh environment."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOT_HERE = (
    "make ",  # needs a fresh environment: CI's own job
    "pip ",
    "pytest",
    "git ",
    "cd ",
    "fourfold verify",  # tests/test_verify.py runs it
)


def commands(path: Path) -> list[str]:
    """Lines of ```console and ```bash blocks that a reader would type; `$ ` and comments are taken off."""
    found = []
    for block in re.findall(r"```(?:console|bash)\n(.*?)```", path.read_text(), re.DOTALL):
        shown = [line for line in block.splitlines() if line.startswith("$ ")]
        for line in shown or block.splitlines():
            line = line.removeprefix("$ ").split("  #")[0].strip()
            if line and not line.startswith("#"):
                found.append(line)
    return found


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    for name in ("configs", "examples", "benchmarks"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.timeout(300)
def test_readme_commands(workplace: Path) -> None:
    lines = [c for c in commands(ROOT / "README.md") if not c.startswith(NOT_HERE)]
    assert any(line.startswith("fourfold demo") for line in lines)
    folder = Path(sys.executable).parent
    for line in lines:
        for part in line.split(" && "):
            if part.startswith(NOT_HERE):
                continue
            words = part.replace("fourfold ", f"{sys.executable} -m fourfold ", 1)
            words = re.sub(r"^python ", f"{sys.executable} ", words)
            if part.startswith("fourfold demo"):
                words += " --steps 4"  # the same path, shorter
            env = {"PATH": f"{folder}:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": str(workplace)}
            out = subprocess.run(words, shell=True, cwd=workplace, capture_output=True, text=True, env=env, timeout=200)
            assert out.returncode == 0, f"{part}\n{out.stdout}\n{out.stderr}"
