"""Console output of a run: a header, a live view, and a log line every N steps; only log lines if not a terminal."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fourfold import schema
from fourfold.view.text import markup, printable

__all__ = ["Progress", "braille", "duration", "facts", "number", "short_duration"]


def number(value: float) -> str:
    """A count as text: 124 M, 1.24 B."""
    for unit, size in ((" T", 1e12), (" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds as text: 42 s, 3 min 20 s, 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"


def short_duration(seconds: float) -> str:
    """Seconds of a short time as text: 12 ms, 1.4 s, 3 min 20 s."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def facts(rows: Iterable[tuple[str, str]], console: Console) -> None:
    """A small two-column table; lines are wrapped on a terminal only."""
    if not console.is_terminal and "COLUMNS" not in os.environ:
        rows = list(rows)
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            console.print(f"{name.ljust(width)}  {printable(value)}", markup=False, soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")  # a long path is wrapped, not cut
    for name, value in rows:
        table.add_row(name, markup(value))
    console.print(table)


def _skipped(m: dict[str, Any]) -> bool:
    """Whether the guard skipped a step; without the guard, the run ends there."""
    return not (math.isfinite(m["loss"]) and math.isfinite(m["grad_norm"]))


class Progress:
    """A log line every `every` steps; on a terminal, below the lines, a live view that is rewritten as steps are done.

    The live view has the progress and the time left, the loss curve, and the figures of the last step. It is drawn at most four
    times a second, without hiding the cursor, so a killed run leaves the terminal usable. A terminal with few lines has one
    status line instead; anything else has only log lines. `memory`: the label of a step's peak_bytes, which count a device's
    tensors or a whole process.
    """

    def __init__(self, steps: int, every: int, file: IO[str] | None = None, memory: str = "mem"):
        self.steps, self.every, self.memory = steps, every, memory
        self.file = file or sys.stdout
        self.live = self.file.isatty() and os.environ.get("TERM") != "dumb"
        self.console = Console(file=self.file, highlight=False, soft_wrap=True)
        self._recent: list[float] = []
        self._losses: list[tuple[int, float]] = []
        self._waits: dict[str, float] = {}  # of the last traced step: exposed_seconds, bubble
        self._drawn = 0  # lines of the live view on the screen
        self._at = 0.0  # when it was drawn
        self._last: dict[str, Any] | None = None

    def step(self, m: dict[str, Any]) -> None:
        """Show one step's metrics."""
        self._recent = [*self._recent[-19:], m["seconds"]]
        logged = m["step"] % self.every == 0 or m["step"] in (1, self.steps) or _skipped(m)
        if self.live:
            self._remember(m)
        if logged:
            self.note(self._line(m))
        elif self.live and time.monotonic() - self._at > 0.25:
            self._erase()
            self._draw()

    def note(self, text: str) -> None:
        """Print a line above the live view."""
        self._erase()
        self.console.print(text)
        if self.live and self._last is not None and self._last["step"] < self.steps:
            self._draw()
        self.file.flush()

    def _line(self, m: dict[str, Any]) -> str:
        """A log line; on a terminal without the figures that do not fit its width, which the live view has."""
        left = 0.0 if self.live and self.console.size.height >= 16 else self._left(m)  # the view has it
        width = len(str(self.steps))
        parts = {
            "loss": f"[bold]step {m['step']:>{width}}/{self.steps}[/]  loss [cyan]{m['loss']:.4f}[/]",
            "grad": f"grad {m['grad_norm']:.3f}",
            "lr": f"lr {m['lr']:.2e}",
            "speed": f"{number(m['tokens_per_second'])} tok/s",
            "mfu": f"mfu {m['mfu']:.1%}",
            "memory": f"{self.memory} {schema.format_bytes(m['peak_bytes'])}",
            "skipped": "[yellow]not finite: skipped[/]" if _skipped(m) else "",
            "rolled back": "[yellow]rolled back[/]" if m.get("rolled_back") else "",
            "left": f"[dim]{duration(left)} left[/]" if left else "",
        }
        line = "  ".join(filter(None, parts.values()))
        for name in ("memory", "lr", "grad") if self.live else ():
            if Text.from_markup(line).cell_len < self.console.size.width:
                break
            del parts[name]
            line = "  ".join(filter(None, parts.values()))
        return line

    def _left(self, m: dict[str, Any]) -> float:
        return (self.steps - m["step"]) * sum(self._recent) / len(self._recent)

    # ---- the live view ----

    def _remember(self, m: dict[str, Any]) -> None:
        self._last = m
        self._waits |= {k: m[k] for k in ("exposed_seconds", "bubble") if k in m}
        if math.isfinite(m["loss"]):
            self._losses.append((m["step"], m["loss"]))
            if len(self._losses) > 4000:  # every second of the older ones is enough for a curve
                self._losses = self._losses[:2000:2] + self._losses[2000:]

    def _erase(self) -> None:
        if self._drawn:
            self.file.write(f"\r\x1b[{self._drawn - 1}A\x1b[J" if self._drawn > 1 else "\r\x1b[2K")
            self._drawn = 0

    def _draw(self) -> None:
        """Draw the view; the cursor stays at the end of its last line."""
        assert self._last is not None
        size = self.console.size
        lines = (
            self.view(self._last, size.width - 1) if size.height >= 16 else [Text.from_markup(self._line(self._last))]
        )
        for i, line in enumerate(lines):
            line.truncate(size.width - 1)
            self.console.print(line, end="" if i == len(lines) - 1 else "\n")
        self.file.flush()
        self._drawn, self._at = len(lines), time.monotonic()

    def view(self, m: dict[str, Any], width: int) -> list[Text]:
        """The live view of a step, `width` characters wide."""
        share, left = m["step"] / self.steps, f"  {duration(self._left(m))} left"
        head = f"step {m['step']}/{self.steps} "
        room = max(5, width - len(head) - len(left) - 7)
        full = round(share * room)
        bar = Text.assemble(
            (head, "bold"), ("━" * full, "cyan"), ("━" * (room - full), "dim"), f" {share:>4.0%}", (left, "dim")
        )
        lines = [bar]
        if len(self._losses) > 1 and width >= 30:
            values = [loss for _, loss in self._losses]
            low, high = min(values), max(values)
            rows = braille(values, width - 10, 4)
            marks = [f"{high:8.4g} ", " " * 9, " " * 9, f"{low:8.4g} "]
            lines += [Text.assemble((a, "dim"), (b, "cyan")) for a, b in zip(marks, rows, strict=True)]
        figures = [
            ("loss", f"{m['loss']:.4f}"),
            ("tok/s", number(m["tokens_per_second"])),
            ("mfu", f"{m['mfu']:.1%}"),
            (self.memory, schema.format_bytes(m["peak_bytes"])),
            ("grad", f"{m['grad_norm']:.3f}"),
            ("lr", f"{m['lr']:.2e}"),
        ]
        if "exposed_seconds" in self._waits:
            figures.append(("exposed communication", short_duration(self._waits["exposed_seconds"])))
        if "bubble" in self._waits:
            figures.append(("bubble", f"{self._waits['bubble']:.0%}"))
        line = Text()
        for name, value in figures:
            if len(line) and len(line) + len(name) + len(value) + 3 > width:
                lines.append(line)
                line = Text()
            line.append("  " if len(line) else "").append(f"{name} ", style="dim").append(value)
        return [*lines, line]


def braille(values: Sequence[float], width: int, height: int) -> list[str]:
    """A curve in braille characters: 2 × 4 dots each; several values in one column are averaged, few are joined by lines."""
    columns, dots = 2 * width, 4 * height
    if 1 < len(values) < columns:
        places = [x * (len(values) - 1) / (columns - 1) for x in range(columns)]
        pairs = [*values, values[-1]]
        values = [pairs[int(t)] + (t - int(t)) * (pairs[int(t) + 1] - pairs[int(t)]) for t in places]
    low, high = min(values), max(values)
    cells = [[0] * width for _ in range(height)]
    bits = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
    used = min(columns, len(values))
    for x in range(used):
        part = values[x * len(values) // used : max((x + 1) * len(values) // used, x * len(values) // used + 1)]
        share = (sum(part) / len(part) - low) / (high - low) if high > low else 0.5
        y = min(dots - 1, round((1 - share) * (dots - 1)))
        at = x if used == columns else x * columns // used
        cells[y // 4][at // 2] |= bits[at % 2][y % 4]
    return ["".join(chr(0x2800 + cell) for cell in row) for row in cells]
