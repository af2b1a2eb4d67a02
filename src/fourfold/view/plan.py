"""Plans in the terminal: the table of the best, the report, what-ifs, and progress while the search runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from fourfold.plan import Plan
from fourfold.planner.explain import explain, table

if TYPE_CHECKING:
    from fourfold.planner.search import Progress as Report

__all__ = ["progress_bar", "show_plan", "show_what_if"]


def show_plan(plan: Plan, file: IO[str] | None = None) -> None:
    """The table, then the report."""
    console = Console(file=file, highlight=False, soft_wrap=False)
    rows = table(plan)
    out = Table("", "plan", "units", "step", "MFU", "memory", "exposed", "bubble", box=None, header_style="dim")
    for i, row in enumerate(rows):
        out.add_row(*row, style="bold" if i == 0 else "")
    console.print(out)
    console.print()
    for line in explain(plan).splitlines():
        console.print(line, markup=False, soft_wrap=True)


def show_what_if(plan: Plan, other: Plan, changes: Sequence[str], file: IO[str] | None = None) -> None:
    """A changed cluster's plan beside this one's."""
    assert plan.predicted is not None
    assert other.predicted is not None
    a, b = plan.predicted["seconds"], other.predicted["seconds"]
    console = Console(file=file, highlight=False)
    console.print(f"\n[bold]what if {' '.join(changes)}[/]: {b:.4g} s a step, {b / a - 1:+.1%}")
    if other.alternatives:
        best = other.alternatives[0]
        console.print(f"  {best['plan']}; {best['units']}", markup=False, soft_wrap=True)


@contextmanager
def progress_bar() -> Iterator[Report]:
    """A bar on standard error while layouts are searched."""
    console = Console(stderr=True)
    columns = (TextColumn("searching"), BarColumn(), TextColumn("{task.fields[told]}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, told="layouts")

        def report(done: int, total: int, best: float | None) -> None:
            told = f"{done} of {total} layouts" + (f", best {best:.4g} s" if best is not None else "")
            bar.update(task, completed=done, total=max(1, total), told=told)

        yield report
