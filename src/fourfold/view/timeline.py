"""A timeline in the terminal: one line per rank, time from left to right, coloured by kind of op.

    F forward   B backward   I gradient of the input   W gradient of the weights   ▒ several of these   · idle

An op that is wide enough shows its micro-batch. A measured step has every rank of the mesh, and also shows what is no op:

    R recomputation   E exposed communication   D data   U optimizer   h host   · waiting for another rank   ? not explained

A character shows what took most of its time. With more than 64 ranks, only some are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fourfold.program.costs import Number
from fourfold.program.ops import Op
from fourfold.program.timeline import Timeline
from fourfold.schema import format_seconds
from fourfold.view.steps import RankStep, TracedStep
from fourfold.view.text import markup

__all__ = ["draw", "draw_rank", "show_comparison", "show_step", "show_timeline"]

MOST_ROWS = 64
_MARKS = {
    "recompute": ("R", "black on bright_yellow"),
    "exposed": ("E", "black on red"),
    "data": ("D", "black on white"),
    "update": ("U", "black on magenta"),
    "norm": ("h", "dim"),
    "host": ("h", "dim"),
    "between": ("h", "dim"),
    "bubble": ("·", "dim"),
    "waiting": ("·", "dim"),
    "other": ("?", "dim"),
}

_STYLE = {"F": "black on bright_blue", "B": "black on bright_green", "I": "black on green", "W": "black on yellow"}
MIXED = "▒"


def draw(timeline: Timeline, width: int) -> list[Text]:
    """One line per row of the timeline, `width` characters for its whole length."""
    lines = []
    total = float(timeline.makespan) or 1.0
    for ops, starts, ends in zip(timeline.ops, timeline.starts, timeline.ends, strict=True):
        line = Text()
        if len(ops) > width:  # by rounding, a character would show one of several ops, and a pattern that is none
            scale = float(timeline.tick) / total * width
            spans = [(op.kind, float(a) * scale, float(b) * scale) for op, a, b in zip(ops, starts, ends, strict=True)]
            lines.append(_dense(spans, width))
            continue
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


def _dense(spans: Sequence[tuple[str, float, float]], width: int) -> Text:
    """One line: spans of (kind, start, end) in characters; a character with several kinds shows what has most of it, or MIXED."""
    cells: list[dict[str, float]] = [{} for _ in range(width)]
    for kind, first, last in spans:
        for cell in range(max(0, int(first)), min(width, int(last) + 1)):
            took = min(last, cell + 1) - max(first, cell)
            cells[cell][kind] = cells[cell].get(kind, 0.0) + took
    line = Text()
    for found in cells:
        busy = sum(found.values())
        kind = max(found, key=lambda k: found[k]) if found else ""
        mark = "·" if busy < 0.5 else MIXED if found[kind] < 0.7 * busy else kind
        line.append(mark, style=_STYLE.get(mark, "dim"))
    return line


def draw_rank(rank: RankStep, length: float, width: int) -> Text:
    """One line: what the rank did, `width` characters for `length` seconds."""
    cells: list[dict[str, float]] = [{} for _ in range(width)]
    for part in rank.parts:
        kind = part.cause
        if kind in ("forward", "backward", "weight"):
            kind = Op.parse(part.what.partition(" ")[0]).kind
        first, last = part.start / length * width, part.end / length * width
        for cell in range(max(0, int(first)), min(width, int(last) + 1)):
            took = min(last, cell + 1) - max(first, cell)
            cells[cell][kind] = cells[cell].get(kind, 0.0) + took
    line = Text()
    for found in cells:
        kind = max(found, key=lambda k: found[k]) if found else ""
        mark, style = _MARKS.get(kind, (kind or " ", _STYLE.get(kind, "")))
        line.append(mark, style=style)
    return line


def show_step(traced: TracedStep, names: Mapping[int, str], console: Console) -> None:
    """Print what every rank did in a step, and where its time went."""
    ranks = list(traced.ranks.values())
    every = -(-len(ranks) // MOST_ROWS)
    room = 0 if console.width < 70 or len(ranks) > 16 else max(len(name) for name in names.values()) + 1
    margin = room or len(str(ranks[-1].rank)) + 1
    length = max(r.end for r in ranks)
    for r in ranks[::every]:
        name = names[r.rank] if room else str(r.rank).rjust(margin - 1)
        line = draw_rank(r, length, max(10, console.width - margin - 1))
        console.print(Text.assemble((name.ljust(margin), "dim"), line), no_wrap=True, crop=True)
    used = {_MARKS[p.cause][0] for r in ranks for p in r.parts if p.cause in _MARKS}
    used |= {Op.parse(what.partition(" ")[0]).kind for r in ranks for what, *_ in r.spans}
    _show_legend(used, margin, console)
    if every > 1:
        console.print(f"[dim]{len(ranks[::every])} of {len(ranks)} ranks are shown; --html shows all[/]")


_WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    MIXED: "several of these",
    "R": "recomputation",
    "E": "exposed communication",
    "D": "data",
    "U": "optimizer",
    "h": "host",
    "·": "waiting",
    "?": "not explained",
}


def _show_legend(used: set[str], margin: int, console: Console) -> None:
    """Print what the marks mean, in as many lines as it takes."""
    styles = {**_STYLE, **dict(_MARKS.values()), MIXED: "dim"}
    line = Text(" " * margin)
    for mark, name in _WORDS.items():
        if mark not in used:
            continue
        entry = Text.assemble((f" {mark} ", styles[mark]), f" {name}")
        if len(line) > margin and len(line) + len(entry) + 2 > console.width:
            console.print(line)
            line = Text(" " * margin)
        line.append("  " if len(line) > margin else "").append(entry)
    console.print(line)


def show_timeline(name: str, timeline: Timeline, file: IO[str] | None = None, *, seconds: bool = False) -> None:
    """Print the drawing, a table by rank, and the totals; `seconds`: the timeline's unit of time."""
    console = Console(file=file, highlight=False)
    console.print(f"[bold]{markup(name)}[/]")
    margin = len(f"{timeline.rows - 1} ")
    every = -(-timeline.rows // MOST_ROWS)
    drawn = draw(timeline, max(20, console.width - margin))
    for row, line in list(enumerate(drawn))[::every]:
        console.print(Text.assemble((f"{row:>{margin - 1}} ", "dim"), line), no_wrap=True, crop=True)
    used = {op.kind for ops in timeline.ops for op in ops} | {"·", *("".join(line.plain for line in drawn))}
    _show_legend(used, margin, console)
    show = (lambda x: format_seconds(float(x))) if seconds else _figure
    table = Table("rank", "busy", "idle", "peak memory", "at", box=None, header_style="dim")
    rows = list(range(timeline.rows))
    if len(rows) > 16:  # the ends of the range say enough
        rows = sorted({*rows[:3], *rows[-3:], *sorted(rows, key=lambda r: -timeline.idle[r])[:3]})
    for row in rows:
        peak = timeline.peaks[row]
        busy, idle = show(timeline.work[row]), show(timeline.idle[row])
        table.add_row(str(row), busy, idle, _figure(peak.memory), show(peak.at))
    console.print(table)
    console.print(
        f"makespan [bold]{show(timeline.makespan)}[/], bubble {float(timeline.bubble):.1%}, "
        f"{float(timeline.gap):.1%} above the lower bound {show(timeline.lower_bound)}"
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
