"""Update the table of rooms in docs/architecture.md: files and lines of Python in every folder of the package.

    python docs/make_rooms.py

tests/test_policies.py checks that the table lists every folder and is right within a tenth.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
SOURCE = ROOT / "src" / "fourfold"
TOP = "config.py"
"""The row of the package's own files starts with this one."""


def rooms() -> dict[str, tuple[int, int]]:
    """(files, lines) of every folder, by its name; TOP: files of the package itself; `all`: everything."""
    found: dict[str, tuple[int, int]] = {}
    for path in SOURCE.rglob("*.py"):
        part = path.relative_to(SOURCE).parts[0]
        for room in (TOP if part.endswith(".py") else part, "all"):
            files, lines = found.get(room, (0, 0))
            found[room] = files + 1, lines + len(path.read_text().splitlines())
    return found


def listed(page: str) -> dict[str, tuple[int, int]]:
    """(files, lines) in the last column of the page's table, by room."""
    rows = re.findall(r"^\| (?:`([\w.]+)/?`|(all))[^\n]*\| (\d+), ([\d,]+) \|$", page, re.MULTILINE)
    return {name or total: (int(files), int(lines.replace(",", ""))) for name, total, files, lines in rows}


def updated(page: str) -> str:
    """The page with the counts of now."""
    counts = rooms()

    def row(match: re.Match[str]) -> str:
        files, lines = counts[match[2] or match[3]]
        return f"{match[1]}| {files}, {lines:,} |"

    return re.sub(r"^(\| (?:`([\w.]+)/?`|(all))[^\n]*)\| \d+, [\d,]+ \|$", row, page, flags=re.MULTILINE)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
