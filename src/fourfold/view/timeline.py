"""A timeline in the terminal: one line per rank, time from left to right, coloured by kind of op.

    F forward   B backward   I gradient of the input   W gradient of the weights   · idle

An op that is wide enough shows its micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fourfold.program.costs import Number
from fourfold.program.timeline import Timeline
from fourfold.view.text import markup

__all__ = ["draw", "show_comparison", "show_timeline"]

_STYLE = {"F": "black on bright_blue", "B": "black on bright_green", "I": "black on green", "W": "black on yellow"}


def draw(timeline: Timeline, width: int) -> list[Text]:
    """One line per row of the timeline, `width` characters for its whole length."""
    lines = []
    total = float(timeline.makespan) or 1.0
    for ops, starts, ends in zip(timeline.ops, timeline.starts, timeline.ends, strict=True):
        line = Text()
        for op, start, end in zip(ops, starts, ends, strict=True):
            first = round(float(start * timeline.tick) / total * width)
            last = round(float(end * timeline.tick) / total * width)
            if last <= first:
                continue
            line.append("·" * (first - len(line)), style="dim")
            label = f"{op.kind}{op.micro_batch}"
            if len(label) > last - first:
                label = op.kind
            line.append(label.ljust(last - first, "─"), style=_STYLE[op.kind])
        line.append("·" * (width - len(line)), style="dim")
        lines.append(line)
    return lines


def show_timeline(name: str, timeline: Timeline, file: IO[str] | None = None) -> None:
    """Print the drawing, a table by rank, and the totals."""
    console = Console(file=file, highlight=False)
    console.print(f"[bold]{markup(name)}[/]")
    margin = len(f"{timeline.rows - 1} ")
    for row, line in enumerate(draw(timeline, max(20, console.width - margin))):
        console.print(Text.assemble((f"{row:>{margin - 1}} ", "dim"), line), no_wrap=True, crop=True)
    legend = Text(" " * margin)
    for kind in dict.fromkeys(op.kind for ops in timeline.ops for op in ops):
        legend.append(f" {kind} ", style=_STYLE[kind])
    console.print(legend)
    table = Table("rank", "busy", "idle", "peak memory", "at", box=None, header_style="dim")
    for row in range(timeline.rows):
        peak = timeline.peaks[row]
        figures = (timeline.work[row], timeline.idle[row], peak.memory, peak.at)
        table.add_row(str(row), *(_figure(x) for x in figures))
    console.print(table)
    console.print(
        f"makespan [bold]{_figure(timeline.makespan)}[/], bubble {float(timeline.bubble):.1%}, "
        f"{float(timeline.gap):.1%} above the lower bound {_figure(timeline.lower_bound)}"
    )


def show_comparison(rows: Sequence[tuple[str, Timeline]], file: IO[str] | None = None) -> None:
    """Print a table of several timelines, in the given order."""
    console = Console(file=file, highlight=False)
    table = Table(
        "schedule", "makespan", "bubble", "peak memory", "most idle", "above bound", box=None, header_style="dim"
    )
    for index, (name, timeline) in enumerate(rows):
        table.add_row(
            name,
            _figure(timeline.makespan),
            f"{float(timeline.bubble):.1%}",
            _figure(max(peak.memory for peak in timeline.peaks)),
            _figure(max(timeline.idle)),
            f"{float(timeline.gap):.1%}",
            style="bold" if index == 0 else "",
        )
    console.print(table)


def _figure(value: Number) -> str:
    return f"{float(value):.4g}" if float(value) < 1000 else f"{float(value):.1f}"
