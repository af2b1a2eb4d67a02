"""A timeline as one HTML file that opens offline by double click, or as a Chrome trace for Perfetto. No torch.

The page (`timeline.html` next to this file) holds panels, such as the plan and the measured step, on one time scale. A panel
has a row per rank; a row has ops and waits, and two lanes for messages and collectives, which run concurrently with them. All of
it is data in the page: names are escaped JSON, and are displayed as plain text.

In the page's JSON a span is five numbers: start and duration in ticks (a ten-millionth of the whole), the index of its kind in
`kinds`, the index of its name in `names`, and bytes. A row whose spans (or memory) are the same object as an earlier row's has
that row's index instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from fourfold import files
from fourfold.errors import RunDirError
from fourfold.program.instructions import Gather, Reduce, Release, Send, Stream
from fourfold.program.timeline import Timeline

__all__ = ["KINDS", "PageSpan", "Panel", "Row", "inline_json", "panel_of", "write_page", "write_perfetto"]

KINDS = "FBIWRED_UHMGSXO"
"""F, B, I, W: ops. R: recomputation. E: exposed transfer. D: data. _: waiting for another rank. U: optimizer update. H: host.
On the lanes, M: message, G: gather, S: reduction, X: other collective, O: a bucket of the optimizer that overlaps with ops."""
TICKS = 10_000_000


class PageSpan(NamedTuple):
    """What a rank did from `start` to `end`; `kind` is one of KINDS."""

    start: float
    end: float
    kind: str
    name: str
    size: int = 0
    """Bytes of a message or collective."""
    to: int = 0
    """Of a message: the row of its receiver, relative to this row."""


@dataclass(frozen=True)
class Row:
    """One rank; `lost` has seconds by cause (steps.CAUSES), for the margin and the table."""

    name: str
    spans: tuple[PageSpan, ...]
    lost: Mapping[str, float] = field(default_factory=dict)

    def busy(self, length: float) -> float:
        """The share of `length` in which the rank computed, without recomputation."""
        return sum(s.end - s.start for s in self.spans if s.kind in "FBIW") / length if length else 0.0


@dataclass(frozen=True)
class Panel:
    """Rows that belong together."""

    name: str
    rows: tuple[Row, ...]
    path: tuple[tuple[int, float, float], ...] = ()
    """The critical path: (row, start, end)."""
    memory: tuple[tuple[tuple[float, float], ...], ...] = ()
    """By row: points (time, held)."""
    memory_name: str = "activations held"
    memory_unit: str = "micro-batches"
    """"bytes", or micro-batches whose activations a rank holds."""
    budget: float = 0.0
    """Memory that a rank may use; 0: unknown."""
    peaks: tuple[tuple[float, float, Mapping[str, float]], ...] = ()
    """By row, where known: time, amount and parts of the most memory."""

    @cached_property
    def length(self) -> float:
        return max((s.end for row in self.rows for s in row.spans), default=0.0)


def panel_of(
    name: str, timeline: Timeline, names: Sequence[str] | None = None, peaks: Sequence[Mapping[str, Any]] = ()
) -> Panel:
    """A simulated or merged timeline as a panel. `peaks`: by row, the predicted bytes at the peak (`RankMemory.to_dict`)."""
    spans: list[list[PageSpan]] = [[] for _ in range(timeline.rows)]
    for row, lane, what, start, end in timeline.spans():
        if start == end and lane != "compute":
            continue  # a gather of what is not sharded
        kind = {"compute": "", "message": "M", "collective": "G" if isinstance(what, Gather) else "S", "stream": "U"}
        letter = kind[lane] or what.kind  # type: ignore[union-attr]  # ops alone are on the compute lane
        to = what.peer - row if isinstance(what, Send) else 0
        spans[row].append(PageSpan(float(start), float(end), letter, _told(what), to=to))
    rows = []
    for i, found in enumerate(spans):
        idle = float(timeline.idle[i])
        rows.append(Row(names[i] if names else f"rank {i}", tuple(found), {"bubble": idle} if idle > 0 else {}))
    path = tuple((s.row, float(s.start), float(s.end)) for s in timeline.critical_path if s.lane == "compute")
    memory = tuple(tuple((float(t), float(m)) for t, m in timeline.memory(row)) for row in range(timeline.rows))
    marks = []
    for row, peak in enumerate(peaks[: timeline.rows]):
        parts = {k: float(v) for k, v in peak.items() if k not in _NOT_PARTS and _is_size(v)}
        marks.append((float(timeline.peaks[row].at), float(peak.get("bytes", 0)), parts))
    return Panel(name, tuple(rows), path, memory, peaks=tuple(marks))


_NOT_PARTS = ("rank", "bytes", "at", "host", "host_activations", "host_rollback")


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


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


def write_page(
    path: Path, title: str, summary: str, panels: Sequence[Panel], *, unit: str = "s", more: str = ""
) -> None:
    """Write the page; `unit` is "s", or "" for times in units of the costs. `more` is shown on demand."""
    from fourfold.view.steps import CAUSES  # not above: the planner's page in a browser has this module, and no runs

    length = max(panel.length for panel in panels) or 1.0
    names: dict[str, int] = {}

    def tick(t: float) -> int:
        return round(t / length * TICKS)

    def flat(spans: Sequence[PageSpan]) -> list[int]:
        out: list[int] = []
        for s in sorted(spans):
            at = tick(s.start)
            out += at, tick(s.end) - at, KINDS.index(s.kind), names.setdefault(s.name, len(names)), s.size
        return out

    def shown(p: Panel) -> dict[str, Any]:
        rows: list[dict[str, Any]] = []
        firsts: dict[int, int] = {}
        for at, r in enumerate(p.rows):
            first = firsts.setdefault(id(r.spans), at)
            rows.append(
                {
                    "name": r.name,
                    "busy": round(r.busy(p.length), 5) if first == at else rows[first]["busy"],
                    "lost": {cause: _short(t) for cause, t in r.lost.items() if t > 0},
                    "spans": flat(r.spans) if first == at else first,
                }
            )
        curves: list[Any] = []
        firsts = {}
        for at, points in enumerate(p.memory):
            first = firsts.setdefault(id(points), at)
            curves.append([x for t, held in points for x in (tick(t), _short(held))] if first == at else first)
        return {
            "name": p.name,
            "rows": rows,
            "path": [[row, tick(a), tick(b)] for row, a, b in p.path] or None,
            "memory": curves or None,
            "memory_name": p.memory_name,
            "memory_unit": p.memory_unit,
            "budget": p.budget,
            "peaks": [[tick(t), held, dict(parts)] for t, held, parts in p.peaks],
        }

    data = {
        "title": title,
        "summary": summary,
        "more": more,
        "unit": unit,
        "length": length,
        "ticks": TICKS,
        "kinds": KINDS,
        "causes": CAUSES,
        "panels": [shown(p) for p in panels],
    }
    data["names"] = list(names)
    template = resources.files("fourfold.view").joinpath("timeline.html").read_text("utf-8")
    files.write_text(path, template.replace("{{data}}", inline_json(data)), RunDirError)


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def inline_json(data: Any) -> str:
    """JSON that cannot end its enclosing script element."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


LANES = {
    "M": (2, "messages"),
    "G": (3, "collectives"),
    "S": (3, "collectives"),
    "X": (3, "collectives"),
    "O": (4, "optimizer"),
}


def write_perfetto(path: Path, panels: Sequence[Panel], *, scale: float = 1e6) -> None:
    """Write a Chrome trace: a process per rank, threads for ops and waits, messages, and collectives; `scale` gives µs.

    Slices of a thread must nest, so those that overlap go to further threads. Every rank has a counter of its memory. An arrow
    leads from a message to the receiver's next op or wait.
    """
    events: list[dict[str, Any]] = []
    arrows = 0
    for number, panel in enumerate(panels):
        for place, row in enumerate(panel.rows):
            pid = 10_000 * number + place + 1
            named = {1: "ops"}
            ends: dict[int, float] = {}
            for s in sorted(row.spans):
                tid, name = LANES.get(s.kind, (1, "ops"))
                while ends.get(tid, 0.0) > s.start + 1e-9:
                    tid += 10
                ends[tid], named[tid] = s.end, name
                span = {"ph": "X", "name": s.name or "wait", "cat": s.kind, "pid": pid, "tid": tid}
                start, end = (
                    round(s.start * scale, 3),
                    round(s.end * scale, 3),
                )  # to ns: neighbours must not overlap by one
                times = {"ts": start, "dur": round(end - start, 3)}
                events.append(span | times | ({"args": {"bytes": s.size}} if s.size else {}))
                if s.to and 0 <= place + s.to < len(panel.rows):
                    arrows += 1
                    arrow = {"name": "message", "cat": "message", "id": arrows}
                    events.append({"ph": "s", **arrow, "pid": pid, "tid": tid, "ts": start})
                    events.append({"ph": "f", **arrow, "pid": pid + s.to, "tid": 1, "ts": round(end - 0.001, 3)})
            titles = [("process_name", 0, f"{panel.name} · {row.name}")]
            titles += [("thread_name", tid, name) for tid, name in sorted(named.items())]
            events += [{"ph": "M", "name": n, "pid": pid, "tid": t, "args": {"name": v}} for n, t, v in titles]
            events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
            for t, held in panel.memory[place] if panel.memory else ():
                counter = {"ph": "C", "name": panel.memory_name, "pid": pid, "ts": round(t * scale, 3)}
                events.append(counter | {"args": {"held": held}})
    files.write_json(path, {"displayTimeUnit": "ms", "traceEvents": events}, RunDirError, indent=None)
