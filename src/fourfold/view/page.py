"""A timeline as one HTML file that opens offline by double click, or as a Chrome trace for Perfetto. No torch.

The page (`timeline.html` next to this file) holds panels, such as the plan and the measured step, on one time scale. A panel
has a row per rank; a row has ops, waits before them, and a lane for messages, collectives and updates, which run concurrently
with the ops. All of it is data in the page: names reach it as JSON, are escaped, and are shown as text alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from fourfold import files
from fourfold.errors import RunDirError
from fourfold.program.instructions import Gather, Reduce, Release, Send, Stream
from fourfold.program.timeline import Timeline

__all__ = ["PageSpan", "Panel", "Row", "panel_of", "write_page", "write_perfetto"]


class PageSpan(NamedTuple):
    """What a rank did from `start` to `end`; `kind` is F, B, I, W, M (message), C (collective), U (update) or _ (waiting)."""

    start: float
    end: float
    kind: str
    name: str
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One rank."""

    name: str
    spans: tuple[PageSpan, ...]

    def busy(self, length: float) -> float:
        """The share of `length` in which the rank computed."""
        return sum(s.end - s.start for s in self.spans if s.kind in "FBIW") / length if length else 0.0


@dataclass(frozen=True)
class Panel:
    """Rows that belong together. `path` is the critical path: (row, start, end); `memory` has points (time, held) by row."""

    name: str
    rows: tuple[Row, ...]
    path: tuple[tuple[int, float, float], ...] = ()
    memory: tuple[tuple[tuple[float, float], ...], ...] = ()
    memory_name: str = "activations held"
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def length(self) -> float:
        return max((s.end for row in self.rows for s in row.spans), default=0.0)


def panel_of(name: str, timeline: Timeline, names: Sequence[str] | None = None) -> Panel:
    """A simulated or merged timeline as a panel."""
    spans: list[list[PageSpan]] = [[] for _ in range(timeline.rows)]
    for row, lane, what, start, end in timeline.spans():
        kind = {"compute": "", "message": "M", "collective": "C", "stream": "U"}[lane]
        kind = kind or what.kind  # type: ignore[union-attr]  # ops alone are on the compute lane
        spans[row].append(PageSpan(float(start), float(end), kind, _told(what)))
    rows = [Row(names[i] if names else f"rank {i}", tuple(found)) for i, found in enumerate(spans)]
    path = tuple((s.row, float(s.start), float(s.end)) for s in timeline.critical_path if s.lane == "compute")
    memory = tuple(tuple((float(t), float(m)) for t, m in timeline.memory(row)) for row in range(timeline.rows))
    return Panel(name, tuple(rows), path, memory)


def _told(what: Any) -> str:
    match what:
        case Send(stage, kind, micro_batch, peer):
            return f"{kind} of stage {stage}, micro-batch {micro_batch}, to rank {peer}"
        case Gather(unit):
            return f"gather {unit}"
        case Reduce(unit):
            return f"reduce {unit}"
        case Release(unit):
            return f"release {unit}"
        case Stream(bucket):
            return f"update {bucket}"
    return str(what)


def write_page(path: Path, title: str, summary: str, panels: Sequence[Panel], *, unit: str = "s") -> None:
    """Write the page; `unit` is "s", or "" for times in units of the costs."""
    length = max(panel.length for panel in panels)
    data = {
        "title": title,
        "summary": summary,
        "unit": unit,
        "length": length or 1.0,
        "panels": [
            {
                "name": p.name,
                "rows": [
                    {"name": r.name, "busy": r.busy(p.length), "spans": [_rounded(s, length) for s in r.spans]}
                    for r in p.rows
                ],
                "path": p.path or None,
                "memory": p.memory or None,
                "memory_name": p.memory_name,
            }
            for p in panels
        ],
    }
    template = resources.files("fourfold.view").joinpath("timeline.html").read_text("utf-8")
    files.write_text(path, template.replace("{{data}}", _inline(data)), RunDirError)


def _rounded(span: PageSpan, length: float) -> list[Any]:
    """A millionth of the step is less than any screen shows."""
    digits = max(0, 7 - len(str(int(length)))) if length >= 1 else 9
    values: list[Any] = [round(span.start, digits), round(span.end, digits), span.kind, span.name]
    return [*values, span.note] if span.note else values


def _inline(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


LANES = {"M": (2, "messages"), "C": (3, "collectives"), "U": (4, "optimizer"), "_": (5, "waiting")}


def write_perfetto(path: Path, panels: Sequence[Panel], *, scale: float = 1e6) -> None:
    """Write a Chrome trace: a process per rank, threads for ops, messages, collectives, updates and waits; `scale` gives µs."""
    events: list[dict[str, Any]] = []
    for number, panel in enumerate(panels):
        for place, row in enumerate(panel.rows):
            pid = 10_000 * number + place + 1
            named = [("process_name", 0, f"{panel.name} · {row.name}"), ("thread_name", 1, "ops")]
            kinds = {s.kind for s in row.spans}
            named += [("thread_name", tid, name) for kind, (tid, name) in LANES.items() if kind in kinds]
            events += [{"ph": "M", "name": n, "pid": pid, "tid": t, "args": {"name": v}} for n, t, v in named]
            events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
            for s in row.spans:
                tid = LANES.get(s.kind, (1, ""))[0]
                times = {"ts": round(s.start * scale, 3), "dur": round((s.end - s.start) * scale, 3)}
                events.append({"ph": "X", "name": s.name or "wait", "cat": s.kind, "pid": pid, "tid": tid, **times})
    files.write_json(path, {"displayTimeUnit": "ms", "traceEvents": events}, RunDirError, indent=None)
