"""The traced steps of a run: what every rank did, where its time went, and the critical path across ranks. No torch.

Ranks of one host share a clock. Between hosts, clocks differ: the end of a step is a collective of all ranks, which all of them
leave at nearly the same moment, so every host is shifted by the difference of these moments.

The time of a rank is divided into parts, without gaps: every moment belongs to the innermost op, wait or part of the step that
covers it. Waits are divided further. A wait for a collective is a wait for the last rank that starts it, and from then on for the
transfer. A wait for a message is a wait for its sender, and after it was sent, for the transfer:

    bubble     waiting for a rank of another pipeline stage
    waiting    waiting for a rank of the same stage
    exposed    transfers that overlap with nothing, by collective and mesh axis
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

from fourfold.errors import RunDirError, ScheduleError
from fourfold.plan import AXES
from fourfold.program.groups import coordinates_of
from fourfold.program.ops import Op
from fourfold.train.rundir import RunDir, read_metrics, read_trace

__all__ = ["CAUSES", "COMPUTE", "Part", "RankStep", "TraceEvent", "TracedStep", "axes_of", "median_step", "read_steps"]

CAUSES = {
    "forward": "forward",
    "backward": "backward",
    "weight": "weight gradients",
    "recompute": "recomputation",
    "exposed": "exposed communication",
    "bubble": "bubble: waiting for other stages",
    "waiting": "waiting for slower ranks",
    "data": "loading data",
    "update": "optimizer",
    "norm": "gradient norm",
    "host": "host: between ops",
    "between": "host: between steps",
    "other": "not explained",
}
"""What a rank's time is spent on, in the order of tables."""
COMPUTE = ("forward", "backward", "weight", "recompute")
_KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}
_PARTS = {"data": "data", "program": "host", "norm": "norm", "update": "update", "between": "between"}
END_OF_STEP = "the end of the step"


class TraceEvent(NamedTuple):
    """An event of a rank's trace (train/trace.py); `ranks` are those of its group."""

    kind: str
    what: str
    issued: float
    begun: float
    end: float
    size: int
    group: str
    ranks: tuple[int, ...]
    number: int
    peer: int


class Part(NamedTuple):
    """What a rank's time from `start` to `end` was spent on."""

    start: float
    end: float
    cause: str
    what: str
    axes: str = ""
    """Of exposed communication: the mesh axes it crosses."""
    peer: int = -1
    """The rank that was waited for."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class RankStep:
    """One rank in one traced step; times are seconds after the begin of the step, on the clock of all ranks."""

    rank: int
    step: int
    host: str
    start: float
    end: float
    spans: list[tuple[str, float, float, float]]
    events: list[TraceEvent]
    memory: list[tuple[float, float]]
    peak: tuple[float, float, dict[str, int]] | None
    lead: float | None
    uncompiled: Mapping[str, str] = field(default_factory=dict)
    """Units that torch.compile failed on, and why."""
    parts: list[Part] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def spent(self, *causes: str) -> float:
        """Seconds spent on these causes."""
        return sum(p.seconds for p in self.parts if p.cause in causes)

    @cached_property
    def starts(self) -> list[float]:
        return [p.start for p in self.parts]


@dataclass
class TracedStep:
    """One traced step of all ranks whose trace has it."""

    step: int
    ranks: dict[int, RankStep]
    pauses: tuple[tuple[str, float], ...]
    """What followed the step, and its seconds: save, evaluation."""
    degrees: Mapping[str, int]

    @property
    def seconds(self) -> float:
        return max(r.end for r in self.ranks.values()) - min(r.start for r in self.ranks.values())

    @cached_property
    def path(self) -> list[tuple[int, Part]]:
        """The critical path: (rank, part) from the begin of the step to its end; waits lead to the rank that was waited for."""
        rank = max(self.ranks, key=lambda r: self.ranks[r].end)
        at = self.ranks[rank].end
        out: list[tuple[int, Part]] = []
        jumps: set[tuple[int, float]] = set()
        while True:
            here = self.ranks[rank]
            i = bisect_left(here.starts, at - 1e-9) - 1
            if i < 0:
                return out[::-1]
            part = here.parts[i]._replace(end=min(here.parts[i].end, at))
            if part.cause in ("bubble", "waiting") and part.peer in self.ranks and (rank, part.start) not in jumps:
                jumps.add((rank, part.start))
                rank = part.peer
                continue
            out.append((rank, part))
            at = part.start


def median_step(steps: Sequence[TracedStep]) -> int:
    """The traced step of median duration, without the first of the run, which allocates and compiles."""
    later = [s for s in steps if s.step > 1] or list(steps)
    return sorted(later, key=lambda s: s.seconds)[len(later) // 2].step


def read_steps(run: RunDir) -> list[TracedStep]:
    """All traced steps of a run, in order."""
    _, plan = run.read()
    lines: dict[int, dict[int, dict[str, Any]]] = {}
    if not (run.path / "trace").is_dir():
        raise RunDirError(f"{run.path}: the run has no trace; train with --log.trace 10")
    for rank in range(plan.mesh.ranks):
        path = run.path / "trace" / f"rank{rank}.jsonl"
        for line in read_trace(path) if path.is_file() else ():
            if line is not None and line["spans"] and _of_ops(line):
                lines.setdefault(line["step"], {})[rank] = line
    if not lines:
        raise RunDirError(f"{run.path}: no step was traced; train with --log.trace 10")
    pauses: dict[int, tuple[tuple[str, float], ...]] = {}
    for m in read_metrics(run):
        for key, name in (("save_seconds", "save"), ("eval_seconds", "evaluation")):
            if isinstance(m.get(key), float):
                pauses[m["step"]] = (*pauses.get(m["step"], ()), (name, m[key]))
    found = []
    for step, by_rank in sorted(lines.items()):
        traced = TracedStep(step, _aligned(step, by_rank), pauses.get(step, ()), plan.mesh.degrees)
        _divide(traced)
        found.append(traced)
    return found


def _of_ops(line: dict[str, Any]) -> bool:
    """Whether the spans of a trace's line are named after ops; in a damaged line they may not be."""
    try:
        return all(Op.parse(what.partition(" ")[0]) for what, *_ in line["spans"])
    except ScheduleError:
        return False


def _aligned(step: int, lines: dict[int, dict[str, Any]]) -> dict[int, RankStep]:
    first = min(line["origin"] for line in lines.values())
    left: dict[str, list[float]] = {}  # by host: when its ranks left the collective at the end of the step
    for line in lines.values():
        at = [e[4] for e in line.get("events", ()) if e[1] == END_OF_STEP]
        if at:
            left.setdefault(line.get("host", ""), []).append(line["origin"] - first + at[-1])
    hosts = {host: median(times) for host, times in left.items()}
    main = next(iter(hosts.values()), 0.0)
    shifts = {host: main - at if len(hosts) > 1 else 0.0 for host, at in hosts.items()}
    ranks = {}
    for rank, line in lines.items():
        host = line.get("host", "")
        ranks[rank] = _rank_step(step, rank, line, line["origin"] - first + shifts.get(host, 0.0))
    begin = min(r.start for r in ranks.values())
    for r in ranks.values():
        _shift(r, -begin)
    return ranks


def _rank_step(step: int, rank: int, line: dict[str, Any], at: float) -> RankStep:
    groups = [(name, tuple(ranks)) for name, ranks in line.get("groups", ())]
    events = []
    for kind, what, issued, begun, end, size, g, number, peer in line.get("events", ()):
        name, members = groups[g] if g >= 0 else ("", ())
        events.append(TraceEvent(kind, what, at + issued, at + begun, at + end, size, name, members, number, peer))
    spans = [(what, at + start, at + end, waited) for what, start, end, waited in line["spans"]]
    end = at + line["seconds"] if "seconds" in line else max(end for _, _, end, _ in spans)
    peak = line.get("peak")
    memory = [(at + t, used) for t, used in line.get("memory", ())]
    return RankStep(
        rank,
        step,
        line.get("host", ""),
        at,
        end,
        spans,
        events,
        memory,
        (at + peak[0], peak[1], peak[2]) if peak else None,
        line.get("lead"),
        line.get("uncompiled", {}),
    )


def _shift(r: RankStep, by: float) -> None:
    r.start, r.end = r.start + by, r.end + by
    r.spans = [(what, a + by, b + by, waited) for what, a, b, waited in r.spans]
    r.events = [e._replace(issued=e.issued + by, begun=e.begun + by, end=e.end + by) for e in r.events]
    r.memory = [(t + by, used) for t, used in r.memory]
    r.peak = (r.peak[0] + by, *r.peak[1:]) if r.peak else None


# ---- where the time went ----


def _divide(traced: TracedStep) -> None:
    """Fill in the parts of every rank."""
    last: dict[
        tuple[str, tuple[int, ...], int], tuple[float, int]
    ] = {}  # by collective: when it was started last, and by which rank
    sent: dict[tuple[int, int, str], float] = {}  # by sender, receiver and name: when it was sent
    for rank, r in traced.ranks.items():
        for e in r.events:
            if e.ranks:
                key = e.group, e.ranks, e.number
                last[key] = max(last.get(key, (float("-inf"), -1)), (e.issued, rank))
            elif e.kind == "send":
                sent[rank, e.peer, e.what] = e.begun
    places = {rank: coordinates_of(dict(traced.degrees), rank) for rank in traced.ranks}
    for rank, r in traced.ranks.items():
        known: list[Part] = []
        for what, start, end, waited in r.spans:
            if waited > 0 and not r.events:  # a trace of an older version
                known.append(Part(start - waited, start, "bubble", f"before {what}"))
            known.append(Part(start, end, _KINDS[Op.parse(what.partition(" ")[0]).kind], what))
        for e in r.events:
            if e.ranks:
                at, who = last[e.group, e.ranks, e.number]
                waits = "bubble" if who in places and places[who]["pipe"] != places[rank]["pipe"] else "waiting"
                known += _wait(e, at, who if who != rank else -1, waits, axes_of(e.ranks, traced.degrees))
            elif e.kind == "message":
                times = [t for name in e.what.split(" or ") if (t := sent.get((e.peer, rank, name))) is not None]
                known += _wait(e, min(times, default=e.end), e.peer, "bubble", "pipe")
            elif e.kind == "sent":
                known.append(Part(e.begun, e.end, "bubble", e.what))
            elif e.kind == "recompute":
                known.append(Part(e.begun, e.end, "recompute", e.what))
            elif e.kind == "bucket" and r.lead is None:  # on a GPU, it overlaps with ops
                known.append(Part(e.begun, e.end, "update", e.what))
            elif e.kind in _PARTS:
                known.append(Part(e.begun, e.end, _PARTS[e.kind], e.what))
        r.parts = _innermost(known, r.start, r.end)


def _wait(e: TraceEvent, at: float, who: int, waits: str, axes: str) -> list[Part]:
    """A wait, divided at the time from which only the transfer is waited for."""
    at = min(max(at, e.begun), e.end) if who >= 0 else e.begun
    name = e.what if e.kind == "message" else f"{e.kind}: {e.what}"
    parts = [Part(e.begun, at, waits, name, peer=who), Part(at, e.end, "exposed", name, axes)]
    return [p for p in parts if p.seconds > 0]


def axes_of(ranks: Sequence[int], degrees: Mapping[str, int]) -> str:
    """The mesh axes along which ranks differ."""
    places = [coordinates_of(dict(degrees), rank) for rank in ranks]
    return " × ".join(axis for axis in AXES if len({place[axis] for place in places}) > 1)


def _innermost(known: list[Part], start: float, end: float) -> list[Part]:
    """A division of [start, end]: every moment belongs to the part that began last."""
    out: list[Part] = []
    stack: list[Part] = []
    at = start

    def spend(until: float) -> None:
        nonlocal at
        if until > at:
            top = stack[-1] if stack else Part(at, until, "other", "")
            if out and out[-1].end == at and out[-1][2:] == top[2:]:
                out[-1] = out[-1]._replace(end=until)
            else:
                out.append(top._replace(start=at, end=until))
            at = until

    for part in sorted(known, key=lambda p: (p.start, -p.end)):
        while stack and stack[-1].end <= part.start:
            spend(min(stack[-1].end, end))
            stack.pop()
        spend(min(part.start, end))
        stack.append(part)
    while stack:
        spend(min(stack[-1].end, end))
        stack.pop()
    spend(end)
    return out
