"""The package stands alone: its wheel and sdist build, install elsewhere and run; the API page has every public name."""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import fourfold

ROOT = Path(__file__).parent.parent


def run(*words: str, cwd: Path, **env: str) -> str:
    out = subprocess.run(words, cwd=cwd, capture_output=True, text=True, env=os.environ | env, timeout=100)
    assert out.returncode == 0, f"{words}\n{out.stdout}\n{out.stderr}"
    return out.stdout


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_installs_outside_the_checkout_and_the_demo_runs(tmp_path: Path) -> None:
    """Torch and the rest come from this environment; only fourfold is installed anew."""
    pytest.importorskip("hatchling")
    built, home, away = tmp_path / "built", tmp_path / "home", tmp_path / "away"
    away.mkdir()
    run(sys.executable, "-m", "hatchling", "build", "-d", str(built), cwd=ROOT)
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert wheel.name.startswith(f"fourfold-{fourfold.__version__}-")
    source = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src" / "fourfold").rglob("*") if p.is_file()}
    assert files_of(wheel) == {name for name in source if "__pycache__" not in name}

    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "again"), cwd=unpacked)
    (again,) = (tmp_path / "again").glob("*.whl")
    assert files_of(again) == files_of(wheel)

    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(home))
    run(*pip, str(wheel), cwd=away)
    where = run(sys.executable, "-c", "import fourfold; print(fourfold.__file__)", cwd=away, PYTHONPATH=str(home))
    assert Path(where.strip()).is_relative_to(home)
    demo = (sys.executable, "-m", "fourfold", "demo", "--steps", "2", "--nproc", "2", "--run-dir", "run")
    assert "done" in run(*demo, cwd=away, PYTHONPATH=str(home))
    assert (away / "run" / "metrics.jsonl").exists()


def test_the_api_page_has_every_public_name() -> None:
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    assert spec is not None
    assert spec.loader is not None
    make_api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_api)
    page = io.StringIO()
    assert make_api.write_api(page) > 60
    for name in fourfold.__all__:
        assert f"`{name}" in page.getvalue()
    headings = [line for line in page.getvalue().splitlines() if line.startswith("### ")]
    assert len(headings) == len(set(headings))
