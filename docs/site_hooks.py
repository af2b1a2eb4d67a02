"""For `make docs`: the API page comes from docstrings; files outside of docs/ that pages link to become part of the site."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

DOCS = Path(__file__).parent
ROOT = DOCS.parent
API = "reference/api.md"
LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Called by MkDocs with the files of docs/."""
    sys.path.insert(0, str(DOCS))
    from make_api import write_api

    out = io.StringIO()
    write_api(out)
    files.append(File.generated(config, API, content=out.getvalue()))
    for path in _linked(files):
        text = path.read_text()
        if path.suffix == ".md":
            text = _relinked(text, path, Path("repository") / path.relative_to(ROOT))
        file = File.generated(config, (Path("repository") / path.relative_to(ROOT)).as_posix(), content=text)
        file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files


def _linked(files: Any) -> list[Path]:
    """Files of the repository outside of docs/ that pages link to, and those that these link to."""
    todo = [DOCS / f.src_uri for f in files if f.src_uri.endswith(".md") and f.src_uri != API]
    found: dict[Path, None] = {}
    while todo:
        page = todo.pop()
        for target, _ in LINK.findall(page.read_text()):
            path = (page.parent / target).resolve()
            if path.is_file() and path.is_relative_to(ROOT) and not path.is_relative_to(DOCS) and path not in found:
                found[path] = None
                todo += [path] if path.suffix == ".md" else []
    return sorted(found)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs for every page."""
    source = DOCS / page.file.src_uri
    return _relinked(markdown, source, Path(page.file.src_uri)) if source.exists() else markdown


def _relinked(text: str, source: Path, place: Path) -> str:
    """Links of the file `source`, as they are for the page `place` of the site; a folder or source file becomes its name."""

    def link(match: re.Match[str]) -> str:
        path = (source.parent / match[1]).resolve()
        if path.is_relative_to(DOCS) and path.exists():
            target = path.relative_to(DOCS)
        elif path.is_file() and path.is_relative_to(ROOT):
            target = Path("repository") / path.relative_to(ROOT)
        else:
            return f"]({match[1]}{match[2] or ''})"
        return f"]({os.path.relpath(target, place.parent)}{match[2] or ''})"

    text = LINK.sub(link, text)
    return re.sub(r"\[([^\]]+)\]\(((?:\.\./)*[\w-]+/)\)", r"\1", text)  # folders


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The theme's search needs a script to work from file://, which it would load from the network: ours is in vendor/."""
    local = os.path.relpath("vendor/iframe-worker.js", Path(page.file.dest_uri).parent)
    return output.replace("https://unpkg.com/iframe-worker/shim", local)


def on_post_template(output_content: str, **_: Any) -> str:
    """The same for the page of a missing address."""
    return output_content.replace("https://unpkg.com/iframe-worker/shim", "/vendor/iframe-worker.js")
