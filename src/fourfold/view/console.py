"""Console output of a run: a header, a live status line, and a log line every N steps; only log lines if not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from fourfold import schema
from fourfold.view.text import markup

__all__ = ["Progress", "duration", "facts", "number", "short_duration"]


def number(value: float) -> str:
    """Counts for people: 124 M, 1.24 B."""
    for unit, size in ((" T", 1e12), (" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds for people: 42 s, 3 min 20 s, 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"


def short_duration(seconds: float) -> str:
    """Seconds for people, of something that should be short: 12 ms, 1.4 s, 3 min 20 s."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def facts(rows: Iterable[tuple[str, str]], console: Console) -> None:
    """A small two-column table."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    for name, value in rows:
        table.add_row(name, markup(value))
    console.print(table)


class Progress:
    """One status line that is rewritten at every step on a terminal, and a log line every `every` steps.

    `memory` says what a step's peak_bytes count: a device's tensors, or a whole process.
    """

    def __init__(self, steps: int, every: int, file: IO[str] | None = None, memory: str = "mem"):
        self.steps, self.every, self.memory = steps, every, memory
        self.file = file or sys.stdout
        self.live = self.file.isatty()
        self.console = Console(file=self.file, highlight=False, soft_wrap=True)
        self._recent: list[float] = []

    def step(self, m: dict[str, Any]) -> None:
        """Show one step's metrics."""
        self._recent = [*self._recent[-19:], m["seconds"]]
        lasting = m["step"] % self.every == 0 or m["step"] in (1, self.steps)
        if self.live:
            self.file.write("\r\x1b[2K")
        if self.live or lasting:
            self.console.print(self._line(m), end="\n" if lasting else "")
            self.file.flush()

    def note(self, text: str) -> None:
        """Print a line above the status line."""
        if self.live:
            self.file.write("\r\x1b[2K")
        self.console.print(text)
        self.file.flush()

    def _line(self, m: dict[str, Any]) -> str:
        left = (self.steps - m["step"]) * sum(self._recent) / len(self._recent)
        width = len(str(self.steps))
        return (
            f"[bold]step {m['step']:>{width}}/{self.steps}[/]  loss [cyan]{m['loss']:.4f}[/]  "
            f"grad {m['grad_norm']:.3f}  lr {m['lr']:.2e}  {number(m['tokens_per_second'])} tok/s  "
            f"mfu {m['mfu']:.1%}  {self.memory} {schema.format_bytes(m['peak_bytes'])}"
            + (f"  [dim]{duration(left)} left[/]" if left else "")
        )
