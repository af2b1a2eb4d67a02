"""The documentation: links and anchors lead somewhere, every page is in the site's menu, the reference is that of the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *ROOT.glob("*.md")]


def without_code(path: Path) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Of the headings, as GitHub and MkDocs make them."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    found = set()
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        found.add(re.sub(r"[^\w\- ]", "", title.lower().replace("`", "")).strip().replace(" ", "-"))
    return found | {re.sub("-+", "-", anchor).strip("-") for anchor in found}


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path)):
        if re.match("[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), f"{path.name}: {target}"
        if anchor:
            assert anchor in anchors(found), f"{path.name}: {target}; it has {sorted(anchors(found))}"


def test_every_page_is_in_the_menu() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = set(re.findall(r"[\w/-]+\.md", str(nav)))
    assert listed == {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}


def test_the_reference_is_that_of_the_code() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_reference.py", "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
