"""What all benchmarks share: rows, the table, the JSON file, the command line.

A benchmark measures us and a peer on the same case. A row's `ratio` is above 1 where ours is better; `spread` is the
relative spread of what was measured (0 for figures that do not vary).

    {"benchmark", "machine", "rows": [{"case", "peer", "metric", "ours", "theirs", "ratio", "spread"}]}
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["Row", "arguments", "finish", "lower_is_better", "parser_of", "show", "take_turns"]


@dataclass(frozen=True)
class Row:
    """One comparison."""

    case: str
    peer: str
    metric: str
    ours: float
    theirs: float
    ratio: float
    spread: float = 0.0


def lower_is_better(case: str, peer: str, metric: str, ours: float, theirs: float, spread: float = 0.0) -> Row:
    """A row for times, memory and the like."""
    return Row(case, peer, metric, float(ours), float(theirs), float(theirs) / float(ours), spread)


def parser_of(description: str, sections: Sequence[str] = ()) -> argparse.ArgumentParser:
    """A parser of `--quick`, `--json PATH`, and `--only SECTION …` where there are sections to choose from."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small part, in seconds")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the rows to a file")
    if sections:
        parser.add_argument("--only", nargs="+", choices=sections, default=list(sections), help="these sections alone")
    return parser


def arguments(description: str, sections: Sequence[str] = ()) -> argparse.Namespace:
    """What the parser finds on the command line."""
    return parser_of(description, sections).parse_args()


def take_turns(contestants: Sequence[Any], rounds: int) -> list[list[float]]:
    """Seconds of every contestant's steps in shaped hosts, one step of each after the other; the first turn is not counted."""
    from fourfold.testing.network import measure

    times: list[list[float]] = [[] for _ in contestants]
    for turn in range(rounds + 1):
        for contestant, found in zip(contestants, times, strict=True):
            took = measure(contestant.step).seconds
            contestant.zero_grad()
            if turn:
                found.append(took)
    return times


def show(title: str, rows: Sequence[Row]) -> None:
    """Print rows as a table."""
    table = Table("case", "metric", "peer", "ours", "theirs", "ratio", title=title, title_justify="left", box=None)
    for row in rows:
        table.add_row(
            escape(row.case), row.metric, escape(row.peer), f"{row.ours:.5g}", f"{row.theirs:.5g}", f"{row.ratio:.4f}"
        )
    Console(width=150, highlight=False).print(table)


def finish(benchmark: str, rows: Sequence[Row], path: Path | None) -> None:
    """Write the JSON file if one was requested."""
    if path is not None:
        data = {"benchmark": benchmark, "machine": machine(), "rows": [asdict(row) for row in rows]}
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def machine() -> dict[str, str | int]:
    """Where this ran."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
