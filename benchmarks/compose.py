"""Every mix of features equals one process: random valid plans, trained in real processes, against a single one.

    python -m benchmarks.compose [--count 200] [--seed 0] [--ranks 2 4 8 16] [--matrix docs/support.md]
    python -m benchmarks.compose --rerun plan.json

A draw chooses a mesh over all axes, and any features that it allows: schedules, executors, modes, groups, splits, recomputation,
flows, layouts, host memory, kinds of models and of data. A third of the pipelines follow a random valid order of ops on a random
placement of stages, as from a schedule file. A draw is trained for a few steps in fp64; losses, gradient norms and the
evaluation's loss must be those of one process to 1e-9. A plan that `Plan.check` refuses is counted with its reason, and another
one is drawn. A plan that fails is written to a file, with its config, from which `--rerun` repeats it.

`--pairs N` resumes: the first half under one random plan, the second half under another one, against one process that never
stopped.

`--matrix PATH` then takes every pair of features that no random plan has had, alone, and writes which pairs work, and which are
refused and why.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import random
import re
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import track

from benchmarks.common import Row, finish, parser_of
from fourfold.checkpoint.export import write_final  # noqa: F401 (else every rank would import it after the fork)
from fourfold.config import Config
from fourfold.data.samples import open_samples
from fourfold.errors import FourfoldError, RankFailure
from fourfold.plan import AXES, Plan
from fourfold.program import Op, Schedule
from fourfold.testing.ranks import run_ranks
from fourfold.train import metrics, streamed
from fourfold.train.worker import fit

TOLERANCE = 1e-9
STEPS, BATCH, MICRO_BATCHES = 2, 48, (1, 2, 3, 4, 6)
MODEL = {"family": "gpt", "hidden": 32, "heads": 4, "seq_len": 12, "init_std": 0.2}
LLAMA = {"family": "llama", "kv_heads": 2, "tie": True}
AT_MOST = {"pipe": 4, "col": 4}
"""Of these axes: the model has four heads, and two layers for every rank of a pipeline."""

SMALL_BUCKET, SMALL_ACTIVATION, SMALL_BUFFER = 4096, 256, 4096
"""Parameters that are updated at once, bytes that are worth a copy to the host, and bytes of activations on the device. By the
usual ones this model would be one bucket, and none of its activations would leave the device."""


@dataclass(frozen=True)
class Feature:
    """Something that a plan or a config may have. Of a group, a draw has at most one."""

    name: str
    group: str
    needs: tuple[str, ...] = ()
    """Axes that must be wider than 1."""
    plan: dict[str, Any] = field(default_factory=dict)
    rule: dict[str, Any] = field(default_factory=dict)
    """Fields of a `[[unit]]` rule."""
    match: str = "*"
    config: dict[str, Any] = field(default_factory=dict)
    square: bool = False
    """Only where row = col."""


def _features() -> list[Feature]:
    found = [Feature(axis, f"axis {axis}", (axis,)) for axis in AXES]
    for name in ("gpipe", "1f1b", "interleaved", "wave", "zb-h1", "zb-v", "synthesized"):
        found.append(Feature(name, "schedule", ("pipe",), {"pipeline": {"schedule": name}}))
    found += [
        Feature("message-driven", "executor", ("pipe",), {"pipeline": {"executor": "message-driven", "slack": 1}}),
        Feature("split backward", "backward", ("pipe",), {"pipeline": {"split_backward": True}}),
    ]
    for mode in ("zero2", "zero3", "keep"):
        found.append(Feature(mode, "mode", rule={"mode": mode}))
    found += [
        Feature("within groups", "within", ("data",), rule={"within": 2}),
        Feature("reduce per micro-batch", "reduce", rule={"reduce": "micro-batch"}),
        Feature("split MLP", "split", rule={"split": 2}, match="*.mlp"),
        Feature("split head", "split", rule={"split": 3}, match="head"),
    ]
    for kind in ("selective", "full", "per-slice"):
        found.append(Feature(f"recompute {kind}", "recompute", rule={"recompute": kind}))
    for flow in ("summa", "os", "ls", "ws"):
        grid = ("row", "col") if flow == "summa" else ("col",)
        found.append(Feature(f"flow {flow}", "flow", grid, {"tensor": {"flow": flow}}, square=flow == "summa"))
    found += [
        Feature("residual hidden", "residual", ("col",), {"tensor": {"residual": "hidden"}}),
        Feature("grid keeps", "keep", ("row",), {"tensor": {"keep": ["weights", "inputs", "gradients"]}}),
        Feature("no grid overlap", "overlap", ("col",), {"tensor": {"overlap": False}}),
        Feature("optimizer on host", "optimizer", plan={"memory": {"optimizer": "host"}}),
        Feature("activations on host", "activations", plan={"memory": {"activations": "host"}}),
        Feature("no prefetch", "prefetch", plan={"memory": {"prefetch": 0}}),
        Feature("early updates", "guard", config={"train": {"guard": False}, "optim": {"clip": 0.0}}),
        Feature("packed documents", "data", config={"data": {"packing": "documents"}}),
        Feature("LoRA", "adapters", config={"lora": {"rank": 2}}),
        Feature("llama, tied, GQA", "model", config={"model": LLAMA}),
        Feature("windows, soft-capping", "model", config={"model": LLAMA | {"windows": [5, 0], "attn_softcap": 3.0}}),
        Feature("parallel blocks", "model", config={"model": LLAMA | {"block": "parallel", "tie": False}}),
        Feature("bert", "model", config={"model": {"family": "bert"}}),
    ]
    return found


FEATURES = {feature.name: feature for feature in _features()}
GROUPS = {
    group: [f for f in FEATURES.values() if f.group == group] for group in {f.group: None for f in FEATURES.values()}
}


@dataclass(frozen=True)
class Draw:
    """A plan with its config sections, and the features it has."""

    ranks: int
    features: tuple[str, ...]
    plan: dict[str, Any]
    config: dict[str, Any]

    def title(self) -> str:
        own = ["own order"] if "order" in self.plan.get("pipeline", {}) else []
        return f"{self.ranks} ranks: {', '.join([*self.features, *own])}"


def compose(mesh: dict[str, int], micro_batches: int, features: Sequence[Feature]) -> Draw:
    """The plan and config with these features."""
    plan: dict[str, Any] = {
        "mesh": mesh,
        "batch": {"micro_batches": micro_batches},
        "precision": {"compute": "fp64"},
        "memory": {},
    }
    config: dict[str, Any] = {"model": MODEL | {"layers": 2 * max(2, mesh["pipe"])}, "optim": {"lr": 1e-2, "warmup": 1}}
    everywhere: dict[str, Any] = {}
    for f in features:
        for into, sections in ((plan, f.plan), (config, f.config)):
            for section, fields in sections.items():
                into[section] = into.get(section, {}) | fields
        if f.rule and f.match == "*":
            everywhere |= f.rule
    rules = [{"match": f.match} | everywhere | f.rule for f in features if f.rule and f.match != "*"]
    plan["unit"] = [*rules, {"match": "*"} | everywhere]
    return Draw(math.prod(mesh.values()), tuple(f.name for f in features), plan, config)


def draw(rng: random.Random, ranks: int, most: int = 6) -> Draw:
    """A random mesh of `ranks` ranks, and up to `most` random features that it allows."""
    mesh = dict.fromkeys(AXES, 1)
    for prime in _primes(ranks):
        free = [a for a in AXES if mesh[a] * prime <= AT_MOST.get(a, ranks)]
        mesh[rng.choice(free)] *= prime
    ways = mesh["data"] * mesh["depth"] * mesh["row"]
    micro_batches = rng.choice([m for m in MICRO_BATCHES if BATCH % (ways * m) == 0])
    axes = [FEATURES[axis] for axis in AXES if mesh[axis] > 1]
    groups = [group for group in GROUPS if not group.startswith("axis")]
    chosen = []
    own = mesh["pipe"] > 1 and rng.random() < 1 / 3
    if mesh["pipe"] > 1:
        groups.remove("schedule")
    if mesh["pipe"] > 1 and not own:
        chosen.append(rng.choice(GROUPS["schedule"]))
    elif own:
        groups.remove("backward")  # the order says which backwards are split
    for group in rng.sample(groups, rng.randint(1, most)):
        allowed = [f for f in GROUPS[group] if all(mesh[axis] > 1 for axis in f.needs)]
        allowed = [f for f in allowed if not f.square or mesh["row"] == mesh["col"]]
        if allowed:
            chosen.append(rng.choice(allowed))
    made = compose(mesh, micro_batches, axes + chosen)
    if own:
        schedule = random_schedule(rng, mesh["pipe"], micro_batches)
        made.plan["pipeline"] = made.plan.get("pipeline", {}) | {"order": schedule.to_dict()}
        made.config["model"] = made.config["model"] | {"layers": max(made.config["model"]["layers"], schedule.stages)}
    return made


def random_schedule(rng: random.Random, ranks: int, micro_batches: int) -> Schedule:
    """A valid schedule: stages on random ranks, at least one on each, and any order of ops that their dependencies allow."""
    place = [*range(ranks), *(rng.randrange(ranks) for _ in range(rng.randint(0, 2 * ranks)))]
    rng.shuffle(place)
    last, splits = len(place) - 1, rng.choice((0.0, 0.5, 1.0))
    waiting: dict[Op, list[Op]] = {}  # what each op needs first
    backward: dict[tuple[int, int], Op] = {}
    for m in range(micro_batches):
        for s in reversed(range(len(place))):
            forward = Op(s, "F", m)
            in_order = m > 0 and (s == last or rng.random() < 0.5)
            waiting[forward] = [Op(s - 1, "F", m)] * (s > 0) + [Op(s, "F", m - 1)] * in_order
            op = backward[s, m] = Op(s, "I" if rng.random() < splits else "B", m)
            waiting[op] = [forward, backward[s + 1, m]] if s < last else [forward]
            if op.kind == "I":
                waiting[Op(s, "W", m)] = [op]
    rows: list[list[Op]] = [[] for _ in range(ranks)]
    while waiting:
        op = rng.choice([op for op, needs in waiting.items() if not any(need in waiting for need in needs)])
        del waiting[op]
        rows[place[op.stage]].append(op)
    return Schedule.of(rows)


def plan_of(plan: dict[str, Any], folder: Path) -> Plan:
    """The plan of a draw; an order of its own becomes a schedule file."""
    pipeline = dict(plan.get("pipeline", {}))
    if "order" in pipeline:
        order = pipeline.pop("order")
        pipeline["schedule"] = str(folder / f"order-{_key(order)}.json")
        if not Path(pipeline["schedule"]).exists():
            Schedule.from_dict(order).save(pipeline["schedule"])
        plan = plan | {"pipeline": pipeline}
    return Plan.from_dict(plan)


def smallest(features: Sequence[Feature]) -> Draw:
    """These features alone, on the smallest mesh that has them."""
    needed = {axis for f in features for axis in f.needs} or {"data"}
    mesh = {axis: 2 if axis in needed else 1 for axis in AXES}
    return compose(mesh, 2, features)


def _primes(n: int) -> Iterator[int]:
    for p in range(2, n + 1):
        while n % p == 0:
            yield p
            n //= p


def config_of(config: dict[str, Any], folder: Path, name: str, steps: int = STEPS) -> Config:
    """The config of a run of a draw."""
    text, examples = folder / "corpus.txt", folder / "examples.jsonl"
    if not text.exists():
        text.write_text("".join(f"{i} times {i} is {i * i}; " for i in range(3000)))
        lines = ({"prompt": "ab"[i % 2] * (1 + i % 4), "completion": "c" * (1 + i % 5)} for i in range(2000))
        examples.write_text("\n".join(json.dumps(line) for line in lines))
    train = {"steps": steps, "global_batch": BATCH, "eval_every": steps, "eval_batches": 1, "device": "cpu"}
    data = {"checkpoint": {"mode": "sync"}, "log": {"trace": 0}} | config
    source = examples if "data" in config else text
    data["data"] = {"source": str(source), "tokenizer": "bytes"} | config.get("data", {})
    data["optim"] = data.get("optim", {}) | {"decay": "constant"}
    if "lora" in config:  # adapters are for weights that a run has left
        data["model"] = {"hf": str(folder / _base(config) / "final"), "seq_len": config["model"]["seq_len"]}
    data["train"] = train | config.get("train", {}) | {"run_dir": str(folder / name), "timeout": 60.0}
    return Config.from_dict(data)


def _base(config: dict[str, Any]) -> str:
    """The run whose weights the adapters of a config are for."""
    return f"base-{_key(config['model'])}"


def _key(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _prepare(config: dict[str, Any], folder: Path) -> None:
    if "lora" in config and not (folder / _base(config)).exists():
        plain = config_of({"model": config["model"]}, folder, _base(config), 1)
        run_ranks(_alone, 1, plain, timeout=120.0)


def refusal(d: Draw, folder: Path) -> str:
    """Why a draw is refused, in a sentence; nothing if it can run."""
    if "lora" in d.config and d.config["model"].keys() & {"windows", "block"}:
        return "not tried: no Hugging Face family has just these features, so there is no folder of weights to adapt"
    try:
        _prepare(d.config, folder)
        config = config_of(d.config, folder, "check").resolve()
        plan_of(d.plan, folder).check(config, d.ranks)
        if "data" in d.config:
            open_samples(config)
    except FourfoldError as e:
        return str(e)
    return ""


# ---- running ----

Series = list[list[float]]


def _series(path: Path) -> Series:
    """Loss and norm of every step, then the evaluation's losses."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    steps = [[m["loss"], m["grad_norm"]] for m in lines if "loss" in m]
    return [*steps, [m["eval_loss"] for m in lines if "eval_loss" in m]]


@dataclass(frozen=True)
class Job:
    """A run in all ranks of a group: a draw, and where it is written; `then`: the plan under which its second half runs."""

    draw: Draw
    name: str
    then: Draw | None = None


def _rank(rank: int, ranks: int, jobs: Sequence[Job], folder: Path) -> None:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (a rank's, until it ends)
    metrics.measured_flops = lambda *_: 1e11  # MFU is not what is measured here
    streamed.BUCKET, streamed.LEAST, streamed.BUFFER = SMALL_BUCKET, SMALL_ACTIVATION, SMALL_BUFFER
    for job in jobs:
        fit(config_of(job.draw.config, folder, job.name), plan_of(job.draw.plan, folder))
        if job.then is not None:
            fit(config_of(job.draw.config, folder, job.name, 2 * STEPS), plan_of(job.then.plan, folder), resume=True)
        if rank == 0:
            (folder / job.name / "series.json").write_text(json.dumps(_series(folder / job.name)))


def run_jobs(jobs: Sequence[Job], folder: Path) -> dict[str, str]:
    """What is wrong, by name of the job: a difference from one process, or an error; empty where all is well.

    Jobs of equal ranks run one after another in the same processes; after a failure, in new ones.
    """
    found: dict[str, str] = {}
    for job in jobs:
        _prepare(job.draw.config, folder)
        for each in (job.draw, job.then):
            if each is not None:
                plan_of(each.plan, folder)  # write its schedule once, before several ranks read it
    for ranks, some in itertools.groupby(sorted(jobs, key=lambda job: job.draw.ranks), key=lambda job: job.draw.ranks):
        left = list(some)
        while left:
            batch = left[:8]
            error = ""
            try:
                run_ranks(_rank, ranks, batch, folder, timeout=120.0 + 20.0 * len(batch), group_timeout=60.0)
            except RankFailure as e:
                error = str(e)
            for job in batch:
                path = folder / job.name / "series.json"
                if not path.exists():
                    found[job.name] = error or "the ranks ended without a word"
                    left.remove(job)
                    break  # those after it have not been tried
                found[job.name] = _compared(job, json.loads(path.read_text()), folder)
                left.remove(job)
    return found


def _compared(job: Job, series: Series, folder: Path) -> str:
    steps = STEPS if job.then is None else 2 * STEPS
    key = f"serial-{steps}-{_key(job.draw.config)}"
    if not (folder / key).exists():  # one process, once for all plans of a config
        run_ranks(_alone, 1, config_of(job.draw.config, folder, key, steps), timeout=120.0)
    expected = _series(folder / key)
    if job.then is not None:  # the evaluation between the halves has no counterpart
        series, expected = [*series[:-1], series[-1][-1:]], [*expected[:-1], expected[-1][-1:]]
    for step, (mine, alone) in enumerate(zip(series, expected, strict=True), 1):
        for a, b in zip(mine, alone, strict=True):
            if not math.isfinite(a) or abs(a - b) > TOLERANCE * abs(b):
                return f"step {step}: {a:.15g} instead of {b:.15g}, relative difference {abs(a - b) / abs(b):.1e}"
    return ""


def _alone(rank: int, ranks: int, config: Config) -> None:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    fit(config, Plan.from_dict({"precision": {"compute": "fp64"}}))


# ---- the whole ----


@dataclass
class Report:
    """What a sweep found."""

    passed: list[Draw] = field(default_factory=list)
    refused: list[tuple[Draw, str]] = field(default_factory=list)
    failed: list[tuple[Draw, str]] = field(default_factory=list)
    resumed: int = 0


def draws(count: int, seed: int, ranks: Sequence[int], folder: Path, report: Report) -> list[Draw]:
    """`count` draws that can run; those refused on the way are reported."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        one = draw(rng, rng.choice(ranks))
        why = refusal(one, folder)
        if why:
            report.refused.append((one, why))
        else:
            found.append(one)
    return found


def sweep(
    count: int, seed: int, ranks: Sequence[int], folder: Path, pairs: int = 0, say: Any = lambda text: None
) -> Report:
    """Run `count` random plans and `pairs` random pairs for resuming."""
    report = Report()
    chosen = draws(count, seed, ranks, folder, report)
    jobs = [Job(one, f"plan-{seed}-{i}") for i, one in enumerate(chosen)]
    rng = random.Random(f"{seed} pairs")
    while len(jobs) < count + pairs:
        first = draw(rng, rng.choice(ranks))
        then = draw(rng, first.ranks)
        both = Draw(first.ranks, first.features, first.plan, first.config)
        if not refusal(both, folder) and not refusal(Draw(then.ranks, (), then.plan, first.config), folder):
            jobs.append(Job(both, f"pair-{seed}-{len(jobs) - count}", then))
    for start in track(range(0, len(jobs), 16), description="runs", console=Console(stderr=True)):
        part = jobs[start : start + 16]
        problems = run_jobs(part, folder)
        for job in part:
            if problems[job.name]:
                text = problems[job.name] + (f"\nresumed under {job.then.title()}" if job.then else "")
                report.failed.append((job.draw, text))
                path = Path(f"compose-{job.name}.json")
                data = {"plan": job.draw.plan, "config": job.draw.config, "ranks": job.draw.ranks}
                path.write_text(json.dumps(data | ({"then": job.then.plan} if job.then else {}), indent=1))
                say(f"FAILED {job.draw.title()}\n{text}\nrepeat: python -m benchmarks.compose --rerun {path}")
            elif job.then is not None:
                report.resumed += 1
            else:
                report.passed.append(job.draw)
    return report


def pairs_of(features: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pairs of features, in the order of FEATURES."""
    order = list(FEATURES)
    yield from itertools.combinations(sorted(features, key=order.index), 2)


def complete(report: Report, folder: Path, say: Any) -> dict[tuple[str, str], str]:
    """For every pair of features that may meet: empty where it works, else why not; pairs not met yet are run alone."""
    works = {pair for one in report.passed for pair in pairs_of(one.features)}
    found: dict[tuple[str, str], str] = dict.fromkeys(works, "")
    jobs: dict[str, tuple[str, str]] = {}
    todo: list[Job] = []
    for pair in pairs_of(list(FEATURES)):
        a, b = (FEATURES[name] for name in pair)
        if pair in works or a.group == b.group or a.name in b.needs:
            continue
        one = smallest([a, b])
        if why := refusal(one, folder):
            found[pair] = why
        else:
            todo.append(Job(one, f"alone-{len(todo)}"))
            jobs[todo[-1].name] = pair
    say(f"{len(works)} pairs of features met in random plans; {len(todo)} more run alone")
    for start in track(range(0, len(todo), 16), description="pairs", console=Console(stderr=True)):
        for name, problem in run_jobs(todo[start : start + 16], folder).items():
            found[jobs[name]] = f"FAILED: {problem}" if problem else ""
    return found


WORKS, EXCLUDED = "·", "-"
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def write_matrix(path: Path, report: Report, pairs: dict[tuple[str, str], str]) -> None:
    """The support matrix, as Markdown: one line of a code block per feature, one character per pair."""
    names = list(FEATURES)
    pairs = {pair: why for pair, why in pairs.items() if pair[0] not in FEATURES[pair[1]].needs}  # implied
    reasons: dict[str, str] = {}
    for why in pairs.values():
        if why:
            reasons.setdefault(_general(why), LETTERS[len(reasons)])
    works, untried = (
        sum(not why for why in pairs.values()),
        sum(why.startswith("not tried") for why in pairs.values()),
    )
    width = max(map(len, names)) + 3
    refused = len(pairs) - works - untried
    runs = (
        "Written by `python -m benchmarks.compose --matrix docs/support.md` from runs of real processes (gloo, CPUs) in fp64, "
        "each compared with one process: losses, gradient norms and evaluation are equal to 1e-9. "
        f"{len(report.passed)} random plans of 2 to 16 ranks, with up to six features besides their axes; {report.resumed} "
        "pairs of random plans, of which the second resumes what the first saved; "
        f"{len(report.failed)} failures. Pairs of features that no random plan had were run alone, on the smallest mesh that "
        f"has both. Of {len(pairs)} pairs that can meet, {works} work; refused with a reason, before any "
        f"process starts: {refused}; not tried: {untried}."
    )
    legend = (
        f"`{WORKS}` works. A letter says why a pair is refused or was not tried. `{EXCLUDED}`: the two exclude "
        "each other (two schedules), or one implies the other (a schedule and the pipe axis). Columns have the numbers of the "
        "rows."
    )
    lines = [
        "# Which features go together",
        "",
        *textwrap.wrap(runs, 140),
        "",
        *textwrap.wrap(legend, 140),
        "",
        "```text",
        *_header(len(names), width),
    ]
    for i, a in enumerate(names):
        cells = []
        for b in names[:i]:
            why = pairs.get((b, a))
            cells.append(EXCLUDED if why is None else reasons[_general(why)] if why else WORKS)
        lines.append(f"{i + 1:2d} {a:<{width}}{' '.join(cells)}".rstrip())
    lines += ["```", "", "| | why not |", "|---|---|"]
    lines += [f"| {letter} | {why.replace('|', chr(92) + '|')} |" for why, letter in reasons.items()]
    more = Counter(_general(why) for _, why in report.refused)
    more = Counter({why: n for why, n in more.items() if why not in reasons})
    if more:
        lines += ["", "Refused where more than two features meet, with the plans that were drawn and refused:", ""]
        lines += ["| plans | why |", "|---|---|", *(f"| {n} | {why} |" for why, n in more.most_common())]
    path.write_text("\n".join([*lines, ""]))


def _header(count: int, width: int) -> list[str]:
    """The numbers of the columns, tens over ones."""
    numbers = range(1, count)
    tens = " ".join(str(n // 10) if n >= 10 else " " for n in numbers)
    return [" " * (width + 3) + row for row in (tens, " ".join(str(n % 10) for n in numbers))]


def read_matrix(text: str) -> tuple[list[str], dict[tuple[str, str], str]]:
    """The features of a support matrix, and the character of every pair."""
    rows = [line for line in text.split("```")[1].splitlines() if re.match(r" ?\d+ ", line)]
    width = max(map(len, FEATURES)) + 3
    names = [row[3 : 3 + width].strip() for row in rows]
    found = {}
    for i, row in enumerate(rows):
        for b, cell in zip(names[:i], row[3 + width :].split(), strict=True):
            found[b, names[i]] = cell
    return names, found


def _general(why: str) -> str:
    """A reason without the sizes of one case."""
    return re.sub(r"\s+", " ", why.splitlines()[0])


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--count", type=int, default=200, help="random plans")
    parser.add_argument("--pairs", type=int, default=0, help="random pairs of plans for resuming")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 4, 6, 8, 8, 12, 16])
    parser.add_argument("--matrix", type=Path, help="write the support matrix to this file")
    parser.add_argument("--rerun", type=Path, help="repeat the plan of a file that a failure left")
    args = parser.parse_args()
    console = Console(highlight=False)

    def say(text: str) -> None:
        console.print(escape(text))

    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as name:
        folder = Path(name)
        if args.rerun:
            data = json.loads(args.rerun.read_text())
            one = Draw(data["ranks"], ("rerun",), data["plan"], data["config"])
            then = Draw(data["ranks"], (), data["then"], {}) if "then" in data else None
            problem = run_jobs([Job(one, "rerun", then)], folder)["rerun"]
            say(problem or "equal to one process")
            sys.exit(bool(problem))
        count, ranks = (6, [2, 4]) if args.quick else (args.count, args.ranks)
        begin = time.perf_counter()
        report = sweep(count, args.seed, ranks, folder, 2 if args.quick else args.pairs, say)
        if args.matrix:
            pairs = complete(report, folder, say)
            for pair, why in pairs.items():
                if why.startswith("FAILED"):
                    report.failed.append((smallest([FEATURES[name] for name in pair]), why))
                    say(f"{' + '.join(pair)}: {why}")
            write_matrix(args.matrix, report, pairs)
    for why, times in Counter(_general(why) for _, why in report.refused).most_common():
        say(f"refused {times:3d} times: {why}")
    total = len(report.passed) + len(report.failed) + report.resumed
    say(
        f"{len(report.passed)} random plans and {report.resumed} resumed pairs equal one process to {TOLERANCE:g}, "
        f"{len(report.failed)} do not ({time.perf_counter() - begin:.0f} s)"
    )
    finish("compose", [Row("random plans", "one process", "equal", total - len(report.failed), total, 1.0)], args.json)
    sys.exit(bool(report.failed))


if __name__ == "__main__":
    main()
