"""The documentation: links and anchors lead somewhere, every page is in the site's menu, the reference is that of the code."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fourfold.testing.browser import Browser, missing_browser
from tests.test_readme import RUN_BY

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
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    assert listed == pages | {"reference/api.md"}  # written by docs/site_hooks.py


def test_blocks_are_run_or_output() -> None:
    """Every fenced block has a language: those of the first line are run or read by tests/test_readme.py, the others are output."""
    for path in PAGES:
        for fence in re.findall(r"^```(\S*)\n.*?^```$", path.read_text(), re.DOTALL | re.MULTILINE):
            assert fence in ("python", "bash", "toml", "console", "text"), (
                f"{path.name}: a block of {fence or 'no language'}"
            )
    for page, test in RUN_BY.items():
        assert Path(page).name in (ROOT / test).read_text(), f"{test} does not run {page}"


def test_pictures_are_made_by_the_script() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "make_pictures.py"))
    shown = {Path(t).name for p in PAGES for t in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", p.read_text())}
    assert shown == set(script["PICTURES"]) == {p.name for p in (ROOT / "docs" / "pictures").iterdir()}


def test_the_reference_is_that_of_the_code() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_reference.py", "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(600)
@pytest.mark.skipif("FOURFOLD_SLOW_TESTS" not in os.environ, reason="builds the site: FOURFOLD_SLOW_TESTS=1")
def test_the_site_builds_and_its_search_works_offline(tmp_path: Path) -> None:
    pytest.importorskip("material")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 40
    for page in pages:  # nothing is loaded from elsewhere
        assert not re.search(r'(?:<script[^>]*src|<link[^>]*rel="stylesheet"[^>]*href)="https?:', page.read_text()), (
            page
        )
    if why := missing_browser():
        pytest.skip(why)
    with Browser(tmp_path) as browser:
        browser.open((tmp_path / "site" / "how" / "grid.html").as_uri())
        browser.run(
            "const q = document.querySelector('.md-search__input'); q.focus(); q.value = 'knapsack';"
            "q.dispatchEvent(new Event('input', {bubbles: true})); q.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}))"
        )
        assert browser.wait("return document.querySelectorAll('.md-search-result__item').length")
        assert not browser.errors()
    assert not browser.requests()
