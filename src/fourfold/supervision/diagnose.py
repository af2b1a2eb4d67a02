"""Diagnosis of a run and advice: `fourfold doctor RUN`. No torch.

It reads the files of the run directory: its history and the flight record (flight.py), metrics, checkpoints, and
whether a process holds its lock. The rank at fault is the one that the launcher named. Under torchrun and srun, which do not name
one, it is the first rank that failed for a reason other than another rank's failure, or one that ended without a reason.

After an out-of-memory error it plans again for the same ranks, with the memory budget reduced by the excess over the prediction.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fourfold import schema
from fourfold.checkpoint.folder import complete
from fourfold.cluster import Cluster, preset_names
from fourfold.config import Config
from fourfold.errors import FourfoldError, PlanError
from fourfold.plan import Batch, Plan
from fourfold.program.groups import coordinates_of
from fourfold.supervision.flight import Flight, read_flights, read_history
from fourfold.train.rundir import RunDir, read_metrics

__all__ = ["Diagnosis", "RankState", "cause_of", "diagnose"]

SHORTAGE = (
    r"no space left|disk quota|read-only|permission denied|input/output error|the disk refused|Errno (?:28|30|122|13)\b"
)
INPUT = ("ConfigError", "PlanError", "ClusterError", "ScheduleError", "DataError", "RunDirError")
FULL_HOST = 0.8
"""Fraction of a host's memory in use above which a killed rank was most likely killed for lack of memory."""
MARGIN = 0.95
"""Memory budget of a new plan after running out of memory, as a fraction of the predicted memory."""


@dataclass(frozen=True)
class RankState:
    """One rank when the run failed."""

    rank: int
    state: str
    at: str
    last: str
    """What it was waiting for, or its last operation."""
    bytes: int
    """Peak bytes of its tensors on a GPU, or on a CPU the memory of its process; 0: unknown."""


@dataclass(frozen=True)
class Diagnosis:
    """What happened, and what to do."""

    state: str
    """running, finished, stopped, failed, gone (ended without a reason) or new."""
    cause: str
    """Cause of a failure: killed, hang, memory, disk, not finite, replicas, checkpoint, input, device, raised."""
    happened: str
    advice: str
    step: int = 0
    steps: int = 0
    checkpoint: int = 0
    """Step of the newest complete checkpoint; 0: none."""
    restarts: int = 0
    ranks: list[RankState] = field(default_factory=list)
    plan: Plan | None = None
    """Out of memory: a plan that should fit."""

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("ranks", "plan")}
        plan = self.plan.to_dict() if self.plan is not None else None
        return out | {"ranks": [dataclasses.asdict(r) for r in self.ranks], "plan": plan}


def diagnose(run: RunDir, *, replan: bool = True) -> Diagnosis:
    """Diagnose a run directory; with `replan`, search for a plan that fits after an out-of-memory failure."""
    config, plan = run.read()
    history = read_history(run)
    metrics = [m for m in read_metrics(run) if "loss" in m]
    saved = max((step for step, _ in complete(run.checkpoints)), default=0)
    facts: dict[str, Any] = {
        "step": metrics[-1]["step"] if metrics else 0,
        "steps": config.train.steps,
        "checkpoint": saved,
        "restarts": max(0, sum(line["event"] == "start" for line in history) - 1),
    }
    again = f"Continue with: fourfold train --resume {run.path}"
    where = f"step {facts['step']} of {facts['steps']}"
    if run.in_use():
        return Diagnosis("running", "", f"a process is running it: {where}{_age(run)}", "Nothing to do", **facts)
    last: dict[str, Any] = next(
        (line for line in reversed(history) if line["event"] in ("start", "end", "failure")), {}
    )
    match last.get("event"):
        case "end" if last.get("outcome") == "finished":
            sampled = f"Sample from it: fourfold sample {run.path}"
            return Diagnosis("finished", "", f"it finished all {facts['steps']} steps", sampled, **facts)
        case "end":
            killed = last.get("outcome") == "killed"
            how = "it was killed by a second request to stop" if killed else "it stopped as requested"
            return Diagnosis("stopped", "", f"{how}, after {where}; {_saved(saved)}", again, **facts)
        case "failure":
            return _failed(run, config, plan, last, metrics, facts, replan)
        case "start":
            why = "its processes ended without a reason: the launcher was killed, or the host went down"
            text = f"{why}, after {where}{_age(run)}; {_saved(saved)}"
            return Diagnosis("gone", "", text, f"Look at the host's log (dmesg, journalctl). {again}", **facts)
    if facts["step"] >= facts["steps"]:
        return Diagnosis("finished", "", f"it finished all {facts['steps']} steps", "Nothing to do", **facts)
    return Diagnosis("new", "", f"it has no history; {where}, {_saved(saved)}", again, **facts)


def _saved(step: int) -> str:
    return f"the newest checkpoint is of step {step}" if step else "no checkpoint was saved yet"


def _age(run: RunDir) -> str:
    try:
        seconds = time.time() - run.metrics_file.stat().st_mtime
    except OSError:
        return ""
    return f" ({schema.format_seconds(max(0.0, seconds))} ago)"


# ---- failures ----


def cause_of(kind: str, message: str) -> str:
    """The cause of a failure, from the name of the error (or signal) and its text."""
    if re.search(
        r"out of memory:|CUDA out of memory|no memory left|too little free memory|cannot start another process|OutOfMemoryError|"
        r"cannot allocate memory",
        message,
    ):
        return "memory"
    if kind in ("MemoryError", "OverBudget", "HostMemoryError", "OutOfMemoryError"):
        return "memory"
    if kind.startswith("SIG") or kind in ("exit", "gave no reason"):
        return "killed"
    if kind == "HangError":
        return "hang"
    if kind == "ReplicaError":
        return "replicas"
    if kind == "TrainingError" and "not finite" in message:
        return "not finite"
    if kind in ("CheckpointError", "FileError", "RunDirError", "OSError", "PermissionError") and re.search(
        SHORTAGE, message
    ):
        return "disk"
    if kind == "CheckpointError":
        return "checkpoint"
    if kind in INPUT:
        return "input"
    return "device" if kind == "DeviceError" else "raised"


def _failed(
    run: RunDir,
    config: Config,
    plan: Plan,
    last: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    facts: dict[str, Any],
    replan: bool,
) -> Diagnosis:
    flights = read_flights(run)
    kind, rank, message = _culprit(last, flights)
    cause = cause_of(kind, message)
    flight = flights.get(rank)
    env = _environment(run)
    if cause == "killed" and _host_was_full(flights, env):
        cause = "memory"
    saved, made = _saved(facts["checkpoint"]), None
    again = f"Then continue with: fourfold train --resume {run.path}"
    first = message.strip().splitlines()[0] if message.strip() else kind
    match cause:
        case "killed":
            how = (
                f"rank {rank} was killed by {kind}" if kind.startswith("SIG") else f"rank {rank} ended without a reason"
            )
            how += _at(flight, " at ")
            advice = (
                f"Find out what killed it: the kernel, for lack of memory (dmesg on {_host(flight, env)}), a scheduler, or a "
                f"container's limit. {again}, or start with --max-restarts"
            )
        case "hang":
            how, advice = _hang(message, again, run)
        case "memory":
            how, advice, made = _memory(run, config, plan, env, flight, rank, first, replan)
        case "disk":
            free = schema.format_bytes(shutil.disk_usage(run.path).free)
            how = first
            advice = (
                f"Make room ({free} are free now; fourfold checkpoint prune {run.path} --dry-run shows what retention would "
                f"delete), or check the permissions of {run.path}. {again}"
            )
        case "not finite":
            begin = next((m["step"] for m in metrics if m.get("loss") is None or m.get("grad_norm") is None), 0)
            since = f", the first at step {begin}" if begin else ""
            how = f"{first.split('. Lower')[0]}{since}"
            advice = f"Lower optim.lr (now {config.optim.lr:g}) or optim.clip (now {config.optim.clip:g}), or look at the data"
            advice += f" of these steps. {again}"
        case "replicas":
            how = first
            advice = (
                "The memory, the processor or the network of a host changed bits: run `fourfold verify` on it, leave it out, "
                f"then continue with: fourfold train --resume {run.path} (from before the difference)"
            )
        case "checkpoint":
            how, advice = first, f"Look at them with: fourfold checkpoint verify {run.path}. {again}"
        case "input":
            how, advice = first, f"Correct it. {again}"
        case "device":
            how, advice = first, again.removeprefix("Then ").capitalize()
        case _:
            line = flight.text("message").splitlines()[0] if flight and flight.text("message") else ""
            how = f"rank {rank} raised {kind}{_at(flight, ' at ')}{f': {line}' if line else ''}"
            advice = f"Correct the cause; the traceback is in {run.flight / f'rank{rank}.jsonl'}. {again}"
    rows = [_row(f) for f in flights.values()]
    return Diagnosis(
        "failed",
        cause,
        f"{how.rstrip('. ')}; {saved}" if saved not in how else how,
        advice,
        ranks=rows,
        plan=made,
        **facts,
    )


def _culprit(last: Mapping[str, Any], flights: Mapping[int, Flight]) -> tuple[str, int, str]:
    """Name of the error, rank and text of the failure that caused the others."""
    kind, rank, message = (last.get(name) for name in ("kind", "rank", "message"))
    kind, message = (x if isinstance(x, str) else "" for x in (kind, message))
    rank = rank if isinstance(rank, int) else -1
    if kind == "exit" and (own := flights.get(rank)) is not None and own.text("error"):
        return own.text("error"), rank, own.text("message")  # it wrote its record, and nothing else
    if kind != "CommunicationError":
        return kind, rank, message
    others = [f for f in flights.values() if f.text("error") not in ("CommunicationError", "")]
    if others:
        first = min(others, key=lambda f: f.number("time"))
        return first.text("error"), first.rank, first.text("message")
    silent = [f for f in flights.values() if f.text("state") != "raised"]
    if silent:
        first = min(silent, key=lambda f: f.number("heard"))
        return "gave no reason", first.rank, ""
    return kind, rank, message


def _at(flight: Flight | None, before: str = "") -> str:
    """`step 3, op 0F1`."""
    if flight is None or not flight.text("phase"):
        return ""
    op = flight.text("op")
    return f"{before}{flight.text('phase')}{f', op {op}' if op else ''}"


def _host(flight: Flight | None, env: Mapping[str, Any]) -> str:
    return (flight.text("host") if flight is not None else "") or str(env.get("host") or "its host")


def _row(flight: Flight) -> RankState:
    wait = flight.failure.get("wait")
    state = flight.text("error") if flight.text("state") == "raised" else flight.text("state")
    if isinstance(wait, dict) and isinstance(wait.get("what"), str):
        peer = wait.get("peer")
        source = f" from rank {peer}" if isinstance(peer, int) and peer >= 0 else ""
        last = f"waits for {wait['what']}{source}"
    else:
        event = flight.events[-1] if flight.events else {}
        last = f"{event.get('what')} {event.get('name')}" if event else ""
    size = flight.number("peak_bytes") or flight.number("rss")
    return RankState(flight.rank, state or "ended", _at(flight), last, int(size))


def _environment(run: RunDir) -> dict[str, Any]:
    try:
        return schema.read(run.env_file, follow=False)
    except FourfoldError:
        return {}


def _hang(message: str, again: str, run: RunDir) -> tuple[str, str]:
    """Two sentences about a hang: which ranks, and what to do."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    first, rest = (lines[0] if lines else "no rank made progress"), lines[1:]
    blamed = [
        x for x in rest if re.search("not answered|never reported|hangs|disagree|is stopped|none has finished", x)
    ]
    waiting = [x for x in rest if "waits" in x and x not in blamed]
    stopped = [x.split(" is stopped")[0] for x in blamed if "is stopped" in x]  # more precise than "has not answered"
    blamed = [x for x in blamed if "not answered" not in x or x.split(" has not")[0] not in stopped]
    how = "; ".join([first, *(blamed or ["the ranks wait for each other"]), *waiting[:2]])
    if len(waiting) > 2:
        how += f"; {len(waiting) - 2} more wait"
    if any("is stopped" in x for x in rest):
        advice = "Find out what stopped the process (SIGSTOP: a debugger, a shell's Ctrl-Z, a scheduler)."
    elif any("not answered" in x or "never reported" in x for x in rest):
        advice = "Look at that rank's host: is it up and reachable, is the process alive?"
    elif any("hangs" in x and "waits for no other" in x for x in rest):
        advice = (
            "Its own code did not return (its stack is in the flight record); if it is slow and does not hang, raise "
            "train.timeout, train.start_timeout, train.eval_timeout or checkpoint.timeout, as the phase was."
        )
    elif any("none has finished" in x for x in rest):
        advice = (
            "The network or the communication library hangs: try `fourfold verify`, over NCCL with NCCL_DEBUG=INFO."
        )
    else:
        advice = f"Ranks took different paths, in your code or in ours: please report it with {run.flight}."
    return how, f"{advice} {again}"


# ---- memory ----


def _host_was_full(flights: Mapping[int, Flight], env: Mapping[str, Any]) -> bool:
    total = env.get("host_bytes")
    held = sum(f.number("rss") for f in flights.values())
    local = env.get("local_ranks")
    if not isinstance(total, int) or not isinstance(local, int):
        return False
    return len(flights) <= local and held > FULL_HOST * total > 0  # with several hosts, the ranks of each are unknown


def _memory(
    run: RunDir,
    config: Config,
    plan: Plan,
    env: Mapping[str, Any],
    flight: Flight | None,
    rank: int,
    message: str,
    replan: bool,
) -> tuple[str, str, Plan | None]:
    """Rank, op, predicted and measured memory, advice, and a plan that fits if there is one."""
    asked = re.search(
        r"([\d.]+) ([KMGT]iB) were (?:requested|asked for)|Tried to allocate ([\d.]+) ([KMGT]iB)", message
    )
    more = 0
    if asked:
        number, unit = (asked[1], asked[2]) if asked[1] else (asked[3], asked[4])
        more = schema.parse_bytes(f"{number}{unit}", "bytes")
    on_gpu = flight is not None and flight.text("device") == "cuda"
    held = int(flight.number("peak_bytes" if on_gpu else "rss")) if flight is not None else 0
    predicted = _predicted(plan, rank)
    parts = [f"rank {rank} ran out of memory{_at(flight, ' at ')}"]
    if held:
        what = "its tensors held" if on_gpu else "its process held"
        wanted = f" and it requested {schema.format_bytes(more)} more" if more else ""
        parts.append(f"{what} {schema.format_bytes(held)}{wanted}")
    if predicted:
        parts.append(f"the plan predicted {schema.format_bytes(predicted)} of tensors for this rank")
    how = "; ".join(parts)
    command = f"fourfold train --resume {run.path} --plan PLAN"
    cluster = _cluster(plan, env)
    usual = (
        f"Use a plan that needs less: fourfold plan {run.path}/config.json --cluster NAME --what-if memory=x0.8; then "
        f"{command}"
    )
    if cluster is None or not replan:
        return how, usual, None
    try:
        made, room = _smaller(config, plan, cluster, predicted, held + more if on_gpu else 0)
    except PlanError as e:
        return how, f"The planner finds no plan that needs less on {cluster.ranks} ranks ({e}); use more ranks", None
    changed = _changes(_explicit(plan, config), _explicit(made, config))
    time_ratio = ""
    old, new = (p.predicted["seconds"] if p.predicted else 0 for p in (plan, made))
    if old and new:
        time_ratio = f", {new / old:.2f} times the predicted step time"
    advice = (
        f"A plan that fits in {schema.format_bytes(room)} of tensors: {changed}{time_ratio}. Write it: fourfold doctor "
        f"{run.path} --out plan.json; then continue with: {command.replace('PLAN', 'plan.json')}"
    )
    return how, advice, made


def _predicted(plan: Plan, rank: int) -> int:
    """Bytes of tensors that the plan predicted for a rank; 0: no prediction."""
    found = (plan.predicted or {}).get("memory")
    stage = coordinates_of(plan.mesh.degrees, rank)["pipe"] if 0 <= rank < plan.mesh.ranks else 0
    for entry in found if isinstance(found, list) else ():
        if isinstance(entry, dict) and entry.get("rank") == stage and schema.is_integer(entry.get("bytes")):
            return entry["bytes"]
    peak = (plan.predicted or {}).get("peak_bytes", 0)
    return int(peak) if isinstance(peak, int | float) else 0


def _cluster(plan: Plan, env: Mapping[str, Any]) -> Cluster | None:
    """The cluster that the plan was made for, by its name; None if the name is not known here."""
    name, ranks, local = (plan.predicted or {}).get("cluster"), plan.mesh.ranks, env.get("local_ranks")
    if name == "local":
        return Cluster.local(ranks)
    if name not in preset_names():
        return None
    per_node = local if isinstance(local, int) and 0 < local <= ranks and ranks % local == 0 else ranks
    return dataclasses.replace(Cluster.preset(name).with_devices(per_node), nodes=ranks // per_node)


def _smaller(config: Config, plan: Plan, cluster: Cluster, predicted: int, found: int) -> tuple[Plan, int]:
    """A plan for the same ranks with less memory, and its budget: reduced by the excess over the prediction."""
    from fourfold.planner.api import judge, plan_run, problem_of_run

    if not predicted:
        judged = judge(plan, problem_of_run(config, cluster, plan.precision))
        predicted = int((judged.predicted or {}).get("peak_bytes", 0))
    usable = (plan.predicted or {}).get("usable_bytes", cluster.usable)
    usable = usable if isinstance(usable, int | float) and usable > 0 else cluster.usable
    room = int(min(usable * predicted / max(found, predicted, 1), MARGIN * predicted))
    reserve = schema.parse_bytes(cluster.device.reserve, "device.reserve")
    device = dataclasses.replace(cluster.device, memory=str(int(room / (1 - cluster.device.margin)) + reserve))
    made = plan_run(config, dataclasses.replace(cluster, device=device), plan.precision)
    return made, room


def _explicit(plan: Plan, config: Config) -> Plan:
    """The plan with its number of micro-batches, where that is the default."""
    return dataclasses.replace(plan, batch=Batch(micro_batches=plan.micro_batches(config.train.global_batch)))


def _changes(old: Plan, new: Plan) -> str:
    """The fields in which a new plan differs."""
    before, after = (_flat(p.to_dict()) for p in (old, new))
    lines = [f"{k} = {after[k]} (was {before.get(k)})" for k in after if k in before and after[k] != before[k]]
    if before.get("unit") != after.get("unit"):
        lines = [line for line in lines if not line.startswith("unit")] + ["other modes per unit"]
    return ", ".join(lines[:6]) + (f" and {len(lines) - 6} more" if len(lines) > 6 else "") or "no change"


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in table.items():
        if key in ("predicted", "certificate", "alternatives"):
            continue
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out
