"""Plans in the terminal: the table of the best plans, the report, what-if comparisons, and the search's progress bar."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from fourfold.plan import Plan
from fourfold.schema import format_bytes, format_seconds
from fourfold.view.explain import describe_units, explain, table

if TYPE_CHECKING:
    from fourfold.planner.search import Progress as Report

__all__ = ["progress_bar", "show_plan", "show_what_if"]

NARROW, WIDE = 110, 140
"""Columns of a terminal: below, a plan's units are shown under it; of a file."""


def show_plan(plan: Plan, file: IO[str] | None = None, top: int = 0) -> None:
    """Print the table and the report, preceded by a warning if the plan does not fit. `top`: number of plans requested."""
    console = Console(file=file, highlight=False, soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDE  # a file or a pipe has no width: lines that wrap are hard to read and to search
    lines = explain(plan).splitlines()
    if (plan.predicted or {}).get("misfit"):
        console.print(lines.pop(0), style="bold red", markup=False, soft_wrap=True)
        console.print()
    rows = table(plan)
    narrow = console.width < NARROW
    out = Table("", "plan, units" if narrow else "plan", *(() if narrow else ("units",)), box=None, header_style="dim")
    for name in (
        "step",
        "MFU",
        "memory",
        "network",
        "bubble",
    ):  # numbers are never wrapped, however narrow the terminal
        out.add_column(name, no_wrap=True, min_width=len(name), justify="right")
    for i, (number, name, units, *figures) in enumerate(rows):
        words = (f"{name}\n  {units}",) if narrow else (name, units)
        out.add_row(number, *words, *figures, style="bold" if i == 0 else "")
    console.print(out)
    total = (plan.certificate or {}).get("layouts", 0)
    if len(rows) < min(top, total):
        shown = f"{len(rows)} plan{'s' * (len(rows) > 1)} of {total:,} layouts"
        why = "they do not fit, or their lower bounds show that they are not faster"
        console.print(f"{shown}: the others were not evaluated, because {why}", style="dim", soft_wrap=True)
    console.print()
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def show_what_if(plan: Plan | str, other: Plan | str, changes: Sequence[str], file: IO[str] | None = None) -> None:
    """Print the plan of a changed cluster, compared with this one. A string is the reason why there is no plan."""
    console = Console(file=file, highlight=False, soft_wrap=True)
    question = f"\n[bold]what if {escape(' '.join(changes))}[/]: "
    if isinstance(other, str):
        console.print(question + escape(other))
        return
    assert other.predicted is not None
    misfit, seconds = other.predicted.get("misfit"), other.predicted["seconds"]
    answer = (f"does NOT fit: {misfit}; " if misfit else "") + f"{format_seconds(seconds)} per step"
    if isinstance(plan, Plan) and plan.predicted is not None:
        answer += f", {seconds / plan.predicted['seconds'] - 1:+.1%}"
    console.print(question + answer)
    if other.alternatives:
        best = other.alternatives[0]
        memory = f"{format_bytes(best['peak_bytes'])} of {format_bytes(other.predicted['usable_bytes'])}"
        console.print(f"  {best['plan']}; {describe_units(best)}; memory {memory}", markup=False, soft_wrap=True)


@contextmanager
def progress_bar() -> Iterator[Report]:
    """A progress bar on standard error during the search."""
    console = Console(stderr=True)
    columns = (TextColumn("searching"), BarColumn(), TextColumn("{task.fields[status]}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, status="layouts")

        def report(done: int, total: int, best: float | None) -> None:
            status = f"{done} of {total} layouts" + (f", best {format_seconds(best)}" if best is not None else "")
            if done == total and best is None:
                status = "nothing fits: looking for what would fit"
            bar.update(task, completed=done, total=max(1, total), status=status)

        yield report
