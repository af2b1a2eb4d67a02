"""Where a step's time went, compared with the plan's prediction, and what would help: `fourfold why`. No torch.

Every rank's time is divided into causes (steps.py). The table shows the ranks of the pipeline stage with the most work next to
the planner's prediction of the same ranks. Each finding has the seconds that it adds to a step:

    straggler       compute of a rank beyond that of its peers: ranks that do the same work, or else all ranks, by predicted work
    slow unit       time of a unit beyond that of units of its kind, in forwards, and as much longer in backwards
    communication   exposed transfers on the critical path, beyond the plan's prediction
    bubble          waiting for other stages, beyond the plan's prediction and what the findings above explain
    data, update, host, save and evaluation     as measured; the last two as a mean over all steps
    uncompiled      time of units that torch.compile failed on beyond that of compiled units of their kind, as above; if
                    the plan compiles none, what the planner predicts to save by it
    micro-batch     what the planner predicts to save with larger micro-batches
    compute         compute beyond the prediction that no finding above explains

The planner's figures for `local` are guesses: there the prediction is scaled to the compute that was measured, and compute itself
is not compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from fourfold import schema
from fourfold.cluster import Cluster, preset_names
from fourfold.errors import FourfoldError
from fourfold.model.operators import ModelSpec
from fourfold.plan import Plan, UnitRule
from fourfold.program.groups import coordinates_of
from fourfold.program.ops import Op
from fourfold.schema import format_bytes, format_seconds
from fourfold.train.rundir import RunDir, read_metrics
from fourfold.view.run import layout_of_run, own_layers
from fourfold.view.steps import CAUSES, COMPUTE, TracedStep, axes_of, read_steps

__all__ = ["Change", "Explanation", "TimeLoss", "explain_run"]

WORTH = 0.03
"""Findings below this share of a step are left out."""
SLOWER = 1.15
"""A rank or unit is slow from this ratio on."""
MOST_FINDINGS = 5
"""Findings that are printed with a line of their own."""
MOST_STEPS = 20
"""Traced steps that are looked at: the last ones, and not the first of the run."""


@dataclass(frozen=True)
class TimeLoss:
    """Something that makes a step longer; `seconds` is by how much."""

    label: str
    seconds: float
    text: str
    advice: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """A change of the plan or the machine, and the seconds that it saves per step by the planner's prediction."""

    text: str
    seconds: float
    kind: str


@dataclass(frozen=True)
class Explanation:
    """Why the steps of a run take as long as they do."""

    run: str
    steps: tuple[int, ...]
    """The traced steps that were looked at."""
    seconds: float
    """Mean time of these steps."""
    promised: float | None
    """The planner's prediction; None if there is none for this machine."""
    cluster: str
    table: tuple[tuple[str, float, float | None], ...]
    """Cause, seconds measured and seconds promised, on the ranks of the stage with the most work."""
    findings: tuple[TimeLoss, ...]
    """What makes a step longer, the most important first; empty: as promised."""
    changes: tuple[Change, ...]
    accounted: tuple[float, ...]
    """By rank: the share of its step that is accounted for."""
    notes: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """A stable label for the first finding."""
        return self.findings[0].label if self.findings else "as-planned"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict}

    def lines(self) -> list[str]:
        """The explanation for people."""
        steps = f"step {self.steps[0]}" if len(self.steps) == 1 else f"mean of {len(self.steps)} traced steps"
        promised = f"; the plan promised {format_seconds(self.promised)} on {self.cluster}" if self.promised else ""
        out = [f"A step takes {format_seconds(self.seconds)} ({steps}){promised}."]
        for number, f in enumerate(self.findings[:MOST_FINDINGS], 1):
            share = f"{f.seconds / self.seconds:.0%}"
            out.append(f"{number}. {format_seconds(f.seconds)} a step ({share}): {f.text}")
            if number == 1 and f.advice:
                out.append(f"   Try: {f.advice}")
        if rest := self.findings[MOST_FINDINGS:]:
            smaller = ", ".join(f"{f.label} {format_seconds(f.seconds)}" for f in rest)
            out.append(f"Smaller ones, each above {WORTH:.0%}: {smaller}.")
        if not self.findings:
            out.append(f"Nothing costs more than {WORTH:.0%} of a step beyond the plan.")
        parts = []
        for cause, measured, planned in self.table:
            if measured >= 0.005 * self.seconds or (planned or 0.0) >= 0.005 * self.seconds:
                against = f" (planned {format_seconds(planned)})" if planned is not None else ""
                parts.append(f"{cause} {format_seconds(measured)}{against}")
        out.append(f"Of a step: {'; '.join(parts)}.")
        worst = min(range(len(self.accounted)), key=lambda r: self.accounted[r])
        out.append(f"Accounted for: at least {self.accounted[worst]:.1%} of every rank's step (rank {worst}).")
        for kind in ("plan", "machine"):
            best = max((c for c in self.changes if c.kind == kind), key=lambda c: c.seconds, default=None)
            if best is not None:
                out.append(f"Predicted by the planner: {best.text} would save {format_seconds(best.seconds)} a step.")
        return [*out, *self.notes]


def explain_run(run: RunDir | str | Path, cluster: Cluster | None = None, *, changes: bool = True) -> Explanation:
    """Explain a run by its traces: where the time of a step went against what the plan promised.

    `run`: a run directory. `cluster`: what it ran on; default: what its plan was made for.
    `changes`: also ask the planner what would help, which takes a second.
    """
    return _Case(run if isinstance(run, RunDir) else RunDir.find(str(run)), cluster).explain(changes)


class _SlowUnit(NamedTuple):
    """A unit that takes longer than its kind."""

    name: str
    lost: float
    """Seconds a step."""
    slower: float
    ranks: list[int]


class _Case:
    """One run: what was measured, and what was promised."""

    def __init__(self, run: RunDir, cluster: Cluster | None):
        self.run = run
        self.config, self.plan = run.read()
        steps = read_steps(run)
        self.steps = [s for s in steps if s.step > 1][-MOST_STEPS:] or steps
        self.metrics = list(read_metrics(run))
        self.seconds = mean(s.seconds for s in self.steps)
        self.degrees = self.plan.mesh.degrees
        self.micro_batches = self.plan.micro_batches(self.config.train.global_batch)
        self.layout, self.own = layout_of_run(run), own_layers(run) is not None
        self.alike = _alike(run)
        self.compiled = self.plan.compiles("cpu" if _environment(run).get("device") == "cpu" else "cuda")
        self.cluster = None if self.own else cluster or _cluster_of(run, self.plan)
        self.predicted = self._prediction(cluster is not None)
        self.measured_cluster = self.cluster is not None and self.cluster.name != "local"
        self.ranks = sorted(set.intersection(*(set(s.ranks) for s in self.steps)))
        self.uncompiled = {
            r: {u: why for s in self.steps for u, why in s.ranks[r].uncompiled.items()} for r in self.ranks
        }
        self.compute = {r: median(s.ranks[r].spent(*COMPUTE) for s in self.steps) for r in self.ranks}
        self.work = self._predicted_work()
        self.focus = self._busiest()
        self.scale = self._scale()

    # ---- what was promised ----

    def _prediction(self, anew: bool) -> dict[str, Any] | None:
        """The prediction that the plan carries, if it is for this run; else the planner's."""
        known = self.plan.predicted
        if known and not anew and known.get("global_batch") == self.config.train.global_batch and known.get("stages"):
            return known
        return self._judged(self.plan, self.cluster) if self.cluster is not None else None

    def _judged(self, plan: Plan, cluster: Cluster, *, deterministic: bool | None = None) -> dict[str, Any] | None:
        from fourfold.planner.api import judge
        from fourfold.planner.engines import own_engine
        from fourfold.planner.problem import PlanProblem

        spec = ModelSpec.from_config(self.config.model).with_context((plan.predicted or {}).get("context", 0.0))
        problem = PlanProblem(spec, cluster, self.config.train.global_batch, plan.precision, plan.memory.moments)
        problem = problem.with_engine(
            own_engine(self.config.train.deterministic if deterministic is None else deterministic)
        )
        try:
            plan.check(self.config)
            return judge(replace(plan, predicted=None, certificate=None, alternatives=None), problem).predicted
        except FourfoldError:
            return None

    def _predicted_work(self) -> dict[int, float] | None:
        """By rank of the pipeline: predicted seconds of its ops."""
        stages, place = (self.predicted or {}).get("stages"), self.layout.schedule.placement
        if not stages or len(stages) != len(place):
            return None
        work = dict.fromkeys(range(self.plan.mesh.pipe), 0.0)
        for stage, times in enumerate(stages):
            work[place[stage]] += self.micro_batches * sum(times)
        return work if all(work.values()) else None

    def _pipe(self, rank: int) -> int:
        return coordinates_of(dict(self.degrees), rank)["pipe"]

    def _busiest(self) -> list[int]:
        """The ranks of the stage with the most work."""
        by_pipe: dict[int, float] = {}
        for r in self.ranks:
            work = self.work[self._pipe(r)] if self.work else self.compute[r]
            by_pipe[self._pipe(r)] = max(by_pipe.get(self._pipe(r), 0.0), work)
        most = max(by_pipe, key=lambda p: by_pipe[p])
        return [r for r in self.ranks if self._pipe(r) == most]

    def _scale(self) -> float:
        """What a predicted second is here: 1 where the cluster's figures are measured."""
        if self.predicted is None or self.measured_cluster:
            return 1.0
        predicted = self.predicted["compute"] + self.predicted["recompute"]
        return median(self.compute[r] for r in self.focus) / predicted if predicted else 1.0

    # ---- findings ----

    def explain(self, ask: bool) -> Explanation:
        table = {c: mean(s.ranks[r].spent(c) for s in self.steps for r in self.focus) for c in CAUSES}
        units = self._slow_units()
        first = [*units, *(f for f in (self._straggler(units), self._data()) if f is not None)]
        communication = self._communication()
        changes = list(self._changes()) if ask else []
        fixed = [f for f in (self._micro_batch(changes), self._uncompiled(changes)) if f is not None]
        explained = sum(f.seconds for f in first)
        found = [*first, *communication, *fixed, *self._pauses(), *self._host(table, explained)]
        found += self._bubble(table, explained)
        found += self._slower_compute(table, explained + sum(f.seconds for f in fixed))
        found = [f for f in found if f.seconds >= WORTH * self.seconds]
        findings = tuple(sorted(found, key=lambda f: -f.seconds))
        accounted = [1 - max(s.ranks[r].spent("other") / s.ranks[r].seconds for s in self.steps) for r in self.ranks]
        promised = self.predicted["seconds"] if self.predicted and self.measured_cluster else None
        return Explanation(
            run=str(self.run.path),
            steps=tuple(s.step for s in self.steps),
            seconds=self.seconds,
            promised=promised,
            cluster=self.cluster.name if self.cluster else "",
            table=self._table(table),
            findings=findings,
            changes=tuple(sorted((c for c in changes if c.seconds > 0), key=lambda c: -c.seconds)),
            accounted=tuple(accounted),
            notes=tuple(self._notes(findings)),
        )

    def _table(self, table: Mapping[str, float]) -> tuple[tuple[str, float, float | None], ...]:
        planned: dict[str, float] = {}
        if self.predicted is not None and self.measured_cluster:
            planned = {c: float(self.predicted[c]) for c in ("compute", "recompute", "bubble", "update")}
            planned["exposed"] = self.predicted["exposed"] + self.predicted["grid"]
        compute = sum(table[c] for c in ("forward", "backward", "weight"))
        rows: list[tuple[str, float, float | None]] = [("forward and backward", compute, planned.get("compute"))]
        rows += [(CAUSES[c], table[c], planned.get(c)) for c in CAUSES if c not in ("forward", "backward", "weight")]
        return tuple(row for row in rows if row[1] > 0 or row[2])

    def _straggler(self, units: Sequence[TimeLoss]) -> TimeLoss | None:
        """The rank whose compute exceeds its peers' most."""
        own = dict(self.compute)
        for unit in units:
            for r in unit.details["ranks"]:
                own[r] = max(0.0, own[r] - unit.seconds)
        best: TimeLoss | None = None
        for r in self.ranks:
            peers = [x for x in self.ranks if x != r and self._same_work(x, r)]
            if peers:
                usual, who = median(own[x] for x in peers), "ranks that do the same work"
            elif self.work and len(self.ranks) > 1:
                rates = [own[x] / self.work[self._pipe(x)] for x in self.ranks if x != r]
                usual, who = median(rates) * self.work[self._pipe(r)], "other ranks, for its work"
            else:
                continue
            if own[r] > SLOWER * usual and (best is None or own[r] - usual > best.seconds):
                slower = own[r] / usual if usual else float("inf")
                host = self.steps[-1].ranks[r].host
                best = TimeLoss(
                    "straggler",
                    own[r] - usual,
                    f"rank {r}" + (f" on {host}" if host else "") + f" computes {slower:.2f} times as long as {who}",
                    "look at the clock, temperature and other load of its device; replace it, or leave it out",
                    {"rank": r, "slower": round(slower, 3), "host": host},
                )
        return best

    def _same_work(self, a: int, b: int) -> bool:
        places = [coordinates_of(dict(self.degrees), r) for r in (a, b)]
        return all(places[0][axis] == places[1][axis] for axis in ("pipe", "row", "col"))

    def _slow_units(self) -> list[TimeLoss]:
        """Units that torch.compile failed on, as one finding; and of the others, the unit that loses most.

        A unit's forward is compared with its kind: on the fastest of its ranks, so that it is the unit and not the rank; or on
        those where it runs uncompiled, with units that are compiled there.
        """
        times: dict[str, dict[int, list[float]]] = {}
        for s in self.steps:
            for r in self.ranks:
                here: dict[str, list[float]] = {}
                for e in s.ranks[r].events:
                    if e.kind == "unit":
                        here.setdefault(e.what, []).append(e.end - e.begun)
                for name, found in here.items():
                    times.setdefault(name, {}).setdefault(r, []).append(median(found))
        seconds = {name: {r: median(x) for r, x in by.items()} for name, by in times.items()}
        slow: list[_SlowUnit] = []
        uncompiled: list[_SlowUnit] = []
        for name, by_rank in seconds.items():
            plain = [r for r in by_rank if name in self.uncompiled.get(r, ())]
            rank = min(plain or by_rank, key=lambda r: by_rank[r])
            others = [n for n in seconds if n != name and self._kind(n) == self._kind(name)]
            if plain:
                others = [n for n in others if n not in self.uncompiled[rank]]
            like = [seconds[n][rank] for n in others if rank in seconds[n]]
            like = like or [min(seconds[n].values()) for n in others]
            if not like or not median(like):
                continue
            forward = max(median(s.ranks[rank].spent("forward") for s in self.steps), 1e-9)
            both = median(s.ranks[rank].spent(*COMPUTE) for s in self.steps) / forward
            lost = (by_rank[rank] - median(like)) * self.micro_batches * both
            unit = _SlowUnit(name, lost, by_rank[rank] / median(like), sorted(plain or by_rank))
            if plain and lost > 0:
                uncompiled.append(unit)
            elif not plain and unit.slower > 1.3:
                slow.append(unit)
        out = [] if not uncompiled else [self._fell_out(uncompiled)]
        if slow:
            out.append(self._slower(max(slow, key=lambda u: u.lost)))
        return out

    def _slower(self, unit: _SlowUnit) -> TimeLoss:
        advice = (
            "look for graph breaks and recompilations of this unit: TORCH_LOGS=graph_breaks,recompiles"
            if self.compiled
            else "profile this unit; see whether it computes something that the others do not"
        )
        return TimeLoss(
            "slow-unit",
            unit.lost,
            f"unit {unit.name} takes {unit.slower:.2f} times as long as others of its kind ({self._kind(unit.name)[0]})"
            + ("; it may run uncompiled" if self.compiled else ""),
            advice,
            {"unit": unit.name, "slower": round(unit.slower, 3), "ranks": unit.ranks},
        )

    def _fell_out(self, units: Sequence[_SlowUnit]) -> TimeLoss:
        """Units that torch.compile failed on; their seconds are those of the rank that loses most."""
        lost = {r: sum(u.lost for u in units if r in u.ranks) for u in units for r in u.ranks}
        most = max(lost, key=lambda r: lost[r])
        worst = max((u for u in units if most in u.ranks), key=lambda u: u.lost)
        more = len(units) - 1
        return TimeLoss(
            "uncompiled",
            lost[most],
            f"unit {worst.name}"
            + (f" and {more} other{'s' * (more > 1)} run" if more else " runs")
            + f" uncompiled: {worst.slower:.2f} times as long as compiled units of its kind ({self._kind(worst.name)[0]})",
            f"make it compile; torch.compile failed: {self.uncompiled[most][worst.name]}",
            {
                "unit": worst.name,
                "units": [u.name for u in units],
                "slower": round(worst.slower, 3),
                "ranks": sorted(lost),
                "why": self.uncompiled[most][worst.name],
            },
        )

    def _kind(self, unit: str) -> tuple[str, int]:
        """Equal for units that do the same work: by name, or by class and number of parameters of a model's own layers."""
        return self.alike.get(unit) or (re.sub(r"\d+", "*", unit), 0)

    def _data(self) -> TimeLoss | None:
        spent = {r: mean(s.ranks[r].spent("data") for s in self.steps) for r in self.ranks}
        rank = max(spent, key=lambda r: spent[r])
        advice = "tokenize once (fourfold tokenize), move the data to a local disk, or use a faster loader"
        text = f"loading the batch; rank {rank} takes longest"
        return TimeLoss("data", spent[rank], text, advice, {"rank": rank}) if spent[rank] > 0 else None

    def _communication(self) -> list[TimeLoss]:
        """Exposed transfers on the critical path, by collective and axis."""
        found: dict[tuple[str, str], float] = {}
        moved: dict[tuple[str, str], float] = {}
        for s in self.steps:
            for _, part in s.path:
                if part.cause == "exposed":
                    kind = part.what.partition(":")[0] if ":" in part.what else "messages"
                    key = (kind, part.axes)
                    found[key] = found.get(key, 0.0) + part.seconds / len(self.steps)
            for r in self.focus:
                for e in s.ranks[r].events:
                    if e.ranks or e.kind == "message":
                        kind, axes = (
                            ("messages", "pipe") if e.kind == "message" else (e.kind, axes_of(e.ranks, self.degrees))
                        )
                        key = kind, axes
                        moved[key] = moved.get(key, 0.0) + e.size / len(self.steps) / len(self.focus)
        total = sum(found.values())
        p = self.predicted or {}
        promised = self.scale * (p.get("exposed", 0.0) + p.get("grid", 0.0))
        over = max(0.0, total - promised) / total if total else 0.0
        out = []
        for (kind, axes), seconds in found.items():
            size = moved.get((kind, axes), 0.0)
            much = f" ({format_bytes(size)} a step and rank)" if size else ""
            out.append(
                TimeLoss(
                    "communication",
                    seconds * over,
                    f"exposed communication: {kind.replace('_', '-')} over {axes or 'all ranks'}{much}",
                    f"check the links between ranks that differ in {axes}; place them on one host, or use fewer of them",
                    {"collective": kind, "axes": axes, "exposed": round(seconds, 6), "bytes": round(size)},
                )
            )
        return out

    def _pauses(self) -> Iterator[TimeLoss]:
        steps = sum("loss" in m for m in self.metrics)
        end = self.config.train.steps  # no step follows the save after the last one
        saves = [
            m["save_seconds"] for m in self.metrics if isinstance(m.get("save_seconds"), float) and m["step"] < end
        ]
        evaluations = [m["eval_seconds"] for m in self.metrics if isinstance(m.get("eval_seconds"), float)]
        advice = "write to a faster disk, save less often, or use checkpoint.mode = 'async'"
        for label, what, found, tip in (
            ("save", "saving", saves, advice),
            ("evaluation", "evaluating", evaluations, "evaluate less often, or on fewer batches"),
        ):
            if found and steps:
                often = "once" if len(found) == 1 else f"{len(found)} times"
                each = f"{often} in {steps} steps, training waited {format_seconds(mean(found))}"
                yield TimeLoss(label, sum(found) / steps, f"{what}: {each}, between steps", tip)

    def _host(self, table: Mapping[str, float], explained: float) -> Iterator[TimeLoss]:
        leads = [r.lead for s in self.steps for r in s.ranks.values() if r.lead is not None]
        behind = bool(leads) and median(leads) < 0.02 * self.seconds
        seconds = table["host"] + table["between"]
        text = "the host, between ops and between steps"
        if behind and self.predicted is not None and self.measured_cluster:
            slow = sum(table[c] for c in COMPUTE) - self.predicted["compute"] - self.predicted["recompute"] - explained
            seconds += max(0.0, slow)
            text = f"the device waits for the host, which is only {format_seconds(max(0.0, median(leads)))} ahead"
        advice = "use larger micro-batches" + ("" if self.compiled else ", or compile (precision.compile = true)")
        yield TimeLoss("host", seconds, text, advice)

    def _bubble(self, table: Mapping[str, float], explained: float) -> Iterator[TimeLoss]:
        if self.plan.mesh.pipe == 1:
            return
        promised = self.scale * (self.predicted or {}).get("bubble", 0.0)
        text = f"pipeline bubble: {format_seconds(table['bubble'])} instead of {format_seconds(promised)}"
        advice = "more micro-batches, another schedule, or other stages (pipeline.layers)"
        yield TimeLoss("bubble", table["bubble"] - promised - explained, text, advice)

    def _slower_compute(self, table: Mapping[str, float], explained: float) -> Iterator[TimeLoss]:
        """Compute beyond the prediction, and the stage that it is worst in."""
        if self.predicted is None or not self.measured_cluster:
            return
        measured = sum(table[c] for c in COMPUTE)
        promised = self.predicted["compute"] + self.predicted["recompute"]
        stages, place = self.predicted.get("stages") or [], self.layout.schedule.placement
        slower: dict[int, float] = {}
        for stage, times in enumerate(stages):
            ranks = [r for r in self.ranks if self._pipe(r) == place[stage]]
            seconds = mean(_stage_seconds(s, r, stage) for s in self.steps for r in ranks) if ranks else 0.0
            if sum(times):
                slower[stage] = seconds / (self.micro_batches * sum(times))
        if not slower:
            return
        worst = max(slower, key=lambda s: slower[s])
        yield TimeLoss(
            "compute",
            measured - promised - explained,
            f"compute takes {measured / promised:.2f} times the prediction; stage {worst} is worst ({slower[worst]:.2f} times)",
            "measure this machine (fourfold calibrate) and plan again; look at clocks and other load",
            {"stage": worst, "slower": round(slower[worst], 3), "units": list(self.layout.units[worst])},
        )

    def _faster_attention(self) -> str:
        """The change that allows another kernel of attention, if the run measured one that is clearly faster."""
        found = _environment(self.run).get("attention")
        known: dict[str, Any] = found if isinstance(found, dict) else {}
        times = known.get("seconds")
        pairs = times.items() if isinstance(times, dict) else ()
        seconds = {str(name): t for name, t in pairs if isinstance(t, float) and t > 0}
        used = seconds.get(str(known.get("kernel")), 0.0)
        fastest = min(seconds, key=seconds.__getitem__, default="")
        if not self.config.train.deterministic or not fastest or seconds[fastest] > 0.9 * used:
            return ""
        share = seconds[fastest] / used
        return f"train.deterministic = false: attention by {fastest}, in {share:.2f} of the time, with a gradient that varies"

    # ---- what would help ----

    def _micro_batch(self, changes: Sequence[Change]) -> TimeLoss | None:
        fewer = [c for c in changes if c.text.startswith("micro_batches") and self._fewer(c.text)]
        best = max(fewer, key=lambda c: c.seconds, default=None)
        if best is None or best.seconds <= 0:
            return None
        size = self.plan.micro_batch_size(self.config.train.global_batch)
        tokens = size * self.config.model.seq_len
        return TimeLoss(
            "micro-batch",
            best.seconds,
            f"small micro-batches: {self.micro_batches} of {tokens:,} tokens, so fixed costs per op weigh more",
            best.text,
            {"micro_batches": self.micro_batches, "tokens": tokens},
        )

    def _fewer(self, text: str) -> bool:
        return int(text.split()[2].rstrip(",")) < self.micro_batches

    def _uncompiled(self, changes: Sequence[Change]) -> TimeLoss | None:
        compiled = next((c for c in changes if c.text.startswith("precision.compile") and c.seconds > 0), None)
        if compiled is None:
            return None
        return TimeLoss("uncompiled", compiled.seconds, "units are not compiled", compiled.text)

    def _changes(self) -> Iterator[Change]:
        """Changed plans and clusters, judged by the planner; those that fit."""
        if self.cluster is None:
            return
        now = self._judged(self.plan, self.cluster)
        if now is None:
            return
        for kind, text, plan, cluster in self._variants(self.cluster):
            judged = self._judged(plan, cluster)
            if judged is not None and (not judged.get("misfit") or now.get("misfit")):
                yield Change(text, self.scale * (now["seconds"] - judged["seconds"]), kind)
        if text := self._faster_attention():
            judged = self._judged(self.plan, self.cluster, deterministic=False)
            if judged is not None:
                yield Change(text, self.scale * (now["seconds"] - judged["seconds"]), "plan")

    def _variants(self, cluster: Cluster) -> Iterator[tuple[str, str, Plan, Cluster]]:
        plan, batch = self.plan, self.config.train.global_batch
        ways = batch // plan.mesh.batch_ways
        for count in (self.micro_batches // 4, self.micro_batches // 2, 2 * self.micro_batches):
            if count >= 1 and ways % count == 0 and count != self.micro_batches:
                changed = replace(plan, batch=replace(plan.batch, micro_batches=count))
                yield "plan", f"micro_batches = {count}, of {ways // count} sequences each", changed, cluster
        if not plan.precision.compiles("cuda") and cluster.device.kind == "cuda":
            yield (
                "plan",
                "precision.compile = true",
                replace(plan, precision=replace(plan.precision, compile=True)),
                cluster,
            )
        if plan.mesh.pipe > 1:
            for name in ("1f1b", "zb-h1", "wave"):
                if name != plan.pipeline.schedule:
                    changed = replace(plan, pipeline=replace(plan.pipeline, schedule=name, layers="auto"))
                    yield "plan", f"schedule = '{name}'", changed, cluster
        if any(rule.recompute != "none" for rule in plan.unit):
            rules = tuple(replace(rule, recompute="none") for rule in plan.unit)
            yield "plan", "recompute = 'none' in all units", replace(plan, unit=rules), cluster
        if plan.mesh.data * plan.mesh.depth > 1:
            for mode in ("replicate", "zero2", "keep"):
                if any(rule.mode != mode for rule in plan.unit) or (not plan.unit and mode != "replicate"):
                    every = tuple(replace(rule, mode=mode) for rule in plan.unit) or (UnitRule(match="*", mode=mode),)
                    yield "plan", f"mode = '{mode}' for all units", replace(plan, unit=every), cluster
        yield "machine", "links twice as fast", plan, cluster.what_if({"bandwidth": "x2"})

    def _notes(self, findings: Sequence[TimeLoss]) -> Iterator[str]:
        times = [m["seconds"] for m in self.metrics if isinstance(m.get("seconds"), float) and m["step"] > 1]
        if len(times) >= 10:
            usual = median(times)
            slow = [m["step"] for m in self.metrics if isinstance(m.get("seconds"), float) and m["seconds"] > 2 * usual]
            slow = [step for step in slow if step > 1]
            if slow:
                first = ", ".join(map(str, slow[:5])) + (" …" if len(slow) > 5 else "")
                yield f"{len(slow)} of {len(times)} steps took more than twice the median: {first}."
        failed = {unit: why for found in self.uncompiled.values() for unit, why in found.items()}
        if failed and [f.label for f in findings[:1]] != ["uncompiled"]:  # which says why
            first, many = next(iter(failed)), f" and {len(failed) - 1} more" if len(failed) > 1 else ""
            yield f"Not compiled: {first}{many}, since torch.compile failed: {failed[first]}"
        if self.steps[-1].step == 1:
            yield "Only step 1 was traced, whose times include what happens once; train longer, or with --log.trace 1."
        if self.own:
            yield "No prediction: the planner does not know the operators of a model of your own."
        elif self.cluster is None:
            yield "No prediction for this machine: give --cluster, a preset or a file that `fourfold calibrate` wrote."
        elif not self.measured_cluster:
            yield (
                "The planner's figures for `local` are guesses, scaled here to the compute that was measured; "
                "`fourfold calibrate` measures them."
            )


def _stage_seconds(s: TracedStep, rank: int, stage: int) -> float:
    """Compute of one stage on a rank, without waits."""
    here = s.ranks[rank]
    return sum(
        p.seconds
        for p in here.parts
        if p.cause in ("forward", "backward", "weight") and Op.parse(p.what.partition(" ")[0]).stage == stage
    )


def _environment(run: RunDir) -> dict[str, Any]:
    return schema.read(run.env_file, follow=False) if run.env_file.exists() else {}


def _alike(run: RunDir) -> dict[str, tuple[str, int]]:
    """Layers of a user's own model: their class and number of parameters; names such as `0`, `1` say nothing."""
    classes, own = _environment(run).get("own_classes"), own_layers(run)
    if own is None:
        return {}
    known = classes if isinstance(classes, dict) else {}
    return {name: (str(known.get(name, name)), count) for name, count in own.parameters.items()}


def _cluster_of(run: RunDir, plan: Plan) -> Cluster | None:
    """What a run ran on: the cluster its plan was made for, or a preset of its device's name."""
    name, ranks = (plan.predicted or {}).get("cluster", ""), plan.mesh.ranks
    device = str(_environment(run).get("device", ""))
    if name not in preset_names():
        if name and plan.predicted is not None:
            return None
        known = [p for p in preset_names() if p.split("-")[0].upper() in device.upper()]
        name = "local" if device == "cpu" else known[0] if known else ""
    try:
        if name == "local":
            return Cluster.local(ranks)
        return Cluster.preset(name, -(-ranks // Cluster.preset(name).devices)) if name else None
    except FourfoldError:
        return None
