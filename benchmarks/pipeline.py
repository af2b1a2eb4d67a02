"""The runtime against torch's: emulated accelerators, real messages (gloo), both in one run, interleaved.

    python -m benchmarks.pipeline [--quick] [--json PATH]

Every stage sleeps the time its work would take (testing/emulate), so eight ranks run on two cores; a step is measured from a
barrier to the last rank's end, in units of one forward of a rank's share (20 ms, in one section 200 ms; a backward takes twice as
long). Contenders take turns, figures are medians. What is compared is order and runtime, not GPUs.

Chimera's two pipelines in opposite directions run as two waves over half the ranks each, every rank with a share twice as large
(the two are the same but for which rank holds what). Its price is two copies of all weights, whose gradients must be summed:
`GRADIENT_SUM` is its exposed time.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common import Row, arguments, finish, lower_is_better, show
from fourfold.program import Costs, Op, Programs, ProgramUnit, Schedule, build, lower, search, simulate
from fourfold.runtime.direct import form_of
from fourfold.runtime.executor import Executor
from fourfold.runtime.message_driven import drive, run_driven
from fourfold.runtime.stage import ChainLink, Stage
from fourfold.runtime.transport import Transport
from fourfold.testing.emulate import Chunk, ChunkTimes, by_length, jitter, pipeline_stage
from fourfold.testing.ranks import run_ranks

FORWARD = 0.020
LONG_FORWARD = 0.200
"""A rank's forward of one micro-batch in a large model: this machine's cost of an op no longer counts."""
GRADIENT_SUM = 2 * 200e-3 * 400e12 / (2 * 8192) * 4 / 50e9 / 200e-3
"""Forwards that the sum of Chimera's two copies takes. A stage whose forward of 8,192 tokens takes 200 ms at 400 TFLOP/s has
4.9 G parameters; a rank holds two such stages, whose fp32 gradients go once over a link of 50 GB/s."""
SHAPE = (1, 64, 256)  # of a micro-batch: 64 KiB
Step = Callable[[], None]


def main() -> None:
    warnings.filterwarnings("ignore", category=UserWarning)
    args = arguments("Pipelines of emulated accelerators, ours and torch's", list(SECTIONS))
    rows: list[Row] = []
    for title, section in (SECTIONS[name] for name in args.only):
        found = list(section(args.quick))
        show(f"\n{title}", found)
        rows += found
    finish("pipeline", rows, args.json)


# ---- the race ----

TORCH: dict[str, tuple[str, int]] = {  # class and stages per rank
    "GPipe": ("ScheduleGPipe", 1),
    "1F1B": ("Schedule1F1B", 1),
    "Interleaved 2": ("ScheduleInterleaved1F1B", 2),
    "Interleaved 4": ("ScheduleInterleaved1F1B", 4),
    "ZBV": ("ScheduleZBVZeroBubble", 2),
}


def race(quick: bool) -> Iterator[Row]:
    """Our best schedule at a peak of at most P against torch's five; and against its own simulation."""
    cases = [(4, 4), (4, 8)] if quick else [(4, 4), (4, 8), (4, 16), (8, 8), (8, 16), (8, 32)]
    goals = {(4, 4): 13.2, (4, 8): 25.7, (4, 16): 50.7, (8, 8): 27.0, (8, 16): 52.5, (8, 32): 103.0}
    for ranks, micro_batches in cases:
        costs = calibrated(ranks)
        best = search(ranks, micro_batches, costs, ranks).schedule
        simulated = float(simulate(best, costs).makespan)
        ideal = float(search(ranks, micro_batches, Costs(), ranks, stages_per_rank=4).makespan)
        hand = {"wave 2": build("wave", ranks, micro_batches, waves=2), "1f1b": build("1f1b", ranks, micro_batches)}
        figures = measure(ranks, micro_batches, {"ours": best} | hand, torch_too=True, repeats=3 if quick else 5)
        case = f"P={ranks} B={micro_batches}"
        mine, spread = figures["ours"].median, figures["ours"].spread
        theirs = {name: figures[f"torch {name}"] for name in TORCH}
        winner = min(theirs, key=lambda name: theirs[name].median)
        yield lower_is_better(case, f"torch's best: {winner}", "step, forwards", mine, theirs[winner].median, spread)
        for name, figure in theirs.items():
            yield lower_is_better(case, f"torch {name}", "step, forwards", mine, figure.median, figure.spread)
        about = f"own simulation, {len(best.stages_of[0])} stages a rank"
        yield lower_is_better(case, about, "step, forwards", mine, simulated, spread)
        yield lower_is_better(case, "own simulation, ideal machine", "step, forwards", mine, ideal, spread)
        yield lower_is_better(case, "goal", "step, forwards", mine, goals[ranks, micro_batches], spread)
        same = figures["torch runtime, 1f1b"]
        yield lower_is_better(
            case, "torch runtime, same 1F1B", "step, forwards", figures["1f1b"].median, same.median, same.spread
        )
        same = figures["torch runtime, wave 2"]
        yield lower_is_better(
            case, "torch runtime, same wave", "step, forwards", figures["wave 2"].median, same.median, same.spread
        )


def hanayo(quick: bool) -> Iterator[Row]:
    """Plain waves (unsplit) against 1F1B and Chimera, B = P: Hanayo's claim is up to 1.30 over Chimera."""
    for ranks in (4,) if quick else (4, 8):
        schedules = {f"wave {w}": build("wave", ranks, ranks, waves=w) for w in ((1, 2) if quick else (1, 2, 4))}
        schedules |= {"1f1b": build("1f1b", ranks, ranks)}
        figures = measure(ranks, ranks, schedules, chimera=True, repeats=3 if quick else 5)
        for wave in [name for name in schedules if name.startswith("wave")]:
            for peer in ("1f1b", "chimera"):
                a, b = figures[wave], figures[peer]
                yield lower_is_better(f"P=B={ranks}, {wave}", peer, "step, forwards", a.median, b.median, a.spread)


def long_stages(quick: bool) -> Iterator[Row]:
    """Waves and a synthesized schedule against 1F1B, torch's five and Chimera, at the op lengths of large models; B = P."""
    for ranks in (4,) if quick else (4, 8):
        waves = (2,) if quick else (1, 2, 4)
        schedules = {f"wave {w}": build("wave", ranks, ranks, waves=w) for w in waves}
        schedules["synthesized"] = search(ranks, ranks, Costs(), ranks, stages_per_rank=4).schedule
        ideal = {name: float(simulate(schedule, Costs()).makespan) for name, schedule in schedules.items()}
        schedules["1f1b"] = build("1f1b", ranks, ranks)
        repeats = 1 if quick else 3
        figures = measure(
            ranks, ranks, schedules, torch_too=not quick, chimera=True, repeats=repeats, forward=LONG_FORWARD
        )
        theirs = {name: figure.median for name, figure in figures.items() if name not in ideal}
        theirs["chimera, gradients summed"] = theirs["chimera"] + GRADIENT_SUM
        by_torch = {name: time for name, time in theirs.items() if name in {f"torch {kind}" for kind in TORCH}}
        best = min(by_torch, key=by_torch.__getitem__, default=None)
        peers = ["1f1b", "chimera", "chimera, gradients summed", *([best] if best else [])]
        for name in ideal:
            case, figure = f"P=B={ranks}, {name}", figures[name]
            yield lower_is_better(case, "own simulation", "step, forwards", figure.median, ideal[name], figure.spread)
            for peer in peers:
                label = f"torch's best: {peer.removeprefix('torch ')}" if peer == best else peer
                yield lower_is_better(case, label, "step, forwards", figure.median, theirs[peer], figure.spread)


@cache
def calibrated(ranks: int) -> Costs:
    """What an op and a message cost here in addition to the emulated work, in forwards: medians over a step of two waves."""
    found = run_ranks(_calibrate, ranks, build("wave", ranks, 2 * ranks, waves=2), timeout=120, group_timeout=60)
    ops = statistics.median(extra for rank in found for extra in rank[0])
    ends = {what: end for rank in found for what, _, _, end in rank[1]}
    late = []
    for _, spans in found:
        for what, asked, start, _ in spans:
            op = Op.parse(what)
            maker = f"{op.stage + (-1 if op.kind == 'F' else 1)}{op.kind}{op.micro_batch}"
            if maker in ends and asked < ends[maker]:  # it waited for that message
                late.append(start - ends[maker])
    return Costs(instruction=round(ops / FORWARD, 3), message=round(statistics.median(late) / FORWARD, 3))


def _calibrate(rank: int, ranks: int, schedule: Schedule) -> tuple[list[float], list[tuple[str, float, float, float]]]:
    share = FORWARD / len(schedule.stages_of[0])
    executor, programs = our_executor(rank, schedule, lambda s: ChunkTimes(share, share, share))
    executor.mark = time.monotonic
    for _ in range(3):
        dist.barrier()
        executor.run(programs.of(rank), Ones())
    dist.barrier()
    spans = [tuple(span) for span in executor.spans]
    extra = []
    for (what, _, start, end), (_, asked, _, _) in pairwise(spans):
        extra.append(end - start - share * (1 if "F" in what else 2) + asked - end)
    return extra, spans


@dataclass
class Figure:
    """Times of one contender, in forwards."""

    times: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def spread(self) -> float:
        return (max(self.times) - min(self.times)) / self.median


def measure(
    ranks: int,
    micro_batches: int,
    schedules: dict[str, Schedule],
    *,
    torch_too: bool = False,
    chimera: bool = False,
    repeats: int = 5,
    forward: float = FORWARD,
) -> dict[str, Figure]:
    """Steps of every contender, in turns."""
    found = run_ranks(
        _race, ranks, micro_batches, schedules, torch_too, chimera, repeats, forward, timeout=900, group_timeout=120
    )
    return {name: Figure([max(r[name][i] for r in found) / forward for i in range(repeats)]) for name in found[0]}


def _race(
    rank: int,
    ranks: int,
    micro_batches: int,
    schedules: dict[str, Schedule],
    torch_too: bool,
    chimera: bool,
    repeats: int,
    forward: float,
) -> dict[str, list[float]]:
    steps: dict[str, Step] = {name: our_step(rank, schedule, forward) for name, schedule in schedules.items()}
    if chimera:  # two pipelines in opposite directions are two waves on half the ranks each, with shares twice as large
        half = build("wave", ranks // 2, micro_batches // 2)
        offset = rank // (ranks // 2) * (ranks // 2)
        steps["chimera"] = our_step(rank % (ranks // 2), half, 2 * forward, offset=offset)
    if torch_too:
        for name, (kind, per_rank) in TORCH.items():
            steps[f"torch {name}"] = torch_step(rank, ranks, micro_batches, kind, per_rank, forward)
        for name in ("1f1b", "wave 2"):
            steps[f"torch runtime, {name}"] = torch_replay(rank, schedules[name], forward)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):  # the first warms up
        for name, step in steps.items():
            dist.barrier()
            start = time.monotonic()
            step()
            if repeat:
                times[name].append(time.monotonic() - start)
    dist.barrier()
    return times


# ---- our runtime on emulated stages ----


class Ones:
    """Inputs and gradients of ones."""

    def __init__(self, shape: tuple[int, ...] = SHAPE):
        self.x = torch.ones(shape)

    def first(self, micro_batch: int) -> Tensor:
        return self.x

    def extra(self, micro_batch: int) -> tuple[Tensor, ...]:
        return ()

    def documents(self, micro_batch: int) -> None:
        return None

    def grad(self, micro_batch: int) -> Tensor:
        return self.x


class ChunkUnit:
    """A chunk's parameter as a unit, no collectives."""

    def __init__(self, chunk: Chunk):
        self.chunk = chunk

    def need(self) -> None: ...
    def lends_grads(self) -> bool:
        return False

    def accumulates(self) -> bool:
        return True

    def gather(self) -> None: ...
    def release(self) -> None: ...
    def reduce(self) -> None: ...
    def parameters(self) -> list[Tensor]:
        return [self.chunk.weight]

    trained = parameters

    def accumulate(self, grads: Any) -> None: ...
    def add_weight_grad(self, name: str, x: Tensor, dy: Tensor) -> None: ...


class Empty(nn.Module):
    """One product: as little work as a stage with a parameter can have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def our_executor(
    rank: int, schedule: Schedule, times: Callable[[int], Any] | None, offset: int = 0
) -> tuple[Executor, Programs]:
    """An executor whose stage s takes times(s); None: no time."""
    programs = lower(schedule, [[ProgramUnit(f"s{s}")] for s in range(schedule.stages)])

    def new_group(members: list[int]) -> dist.ProcessGroup:
        ranks = [offset + m for m in members]
        return dist.new_group(ranks, timeout=timedelta(days=1), use_local_synchronization=True)  # type: ignore[return-value]

    place = schedule.placement
    edges = {(a, b) for a, b in pairwise(place) if a != b}
    edges |= {(b, a) for a, b in edges}
    form = form_of(SHAPE, torch.float32)
    transport = Transport(rank, edges, new_group, address=lambda r: offset + r, timeout=60, form=form)
    stages, units = {}, {}
    for number, where in enumerate(place):
        if where == rank:
            chunk: Any = Chunk(times(number)) if times else Empty()
            unit = units[f"s{number}"] = ChunkUnit(chunk)
            reseed = _tell(chunk) if times else None
            stage = stages[number] = Stage([ChainLink(f"s{number}", unit, chunk)], split=schedule.split, reseed=reseed)
            if times:
                chunk.queue, chunk.sink = stage.queue, _nowhere
    return Executor(place, rank, stages, units, transport), programs


def _tell(chunk: Chunk) -> Callable[[int, int, int], None]:
    return lambda step, micro_batch, link: setattr(chunk, "micro_batch", micro_batch)


def _nowhere(grad: Tensor) -> None:
    """The gradient is not looked at."""


def our_step(rank: int, schedule: Schedule, forward: float, offset: int = 0) -> Step:
    per_stage = forward / len(schedule.stages_of[0])
    executor, programs = our_executor(rank, schedule, lambda s: ChunkTimes(per_stage, per_stage, per_stage), offset)
    program, feed = programs.of(rank), Ones()

    def step() -> None:
        executor.run(program, feed)

    return step


# ---- torch's runtime on the same chunks ----


def torch_step(rank: int, ranks: int, micro_batches: int, kind: str, per_rank: int, forward: float) -> Step:
    import torch.distributed.pipelining as pipelining

    zigzag = kind == "ScheduleZBVZeroBubble"
    mine = [rank, 2 * ranks - 1 - rank] if zigzag else [rank + i * ranks for i in range(per_rank)]
    share = forward / per_rank
    chunks = [Chunk(ChunkTimes(share, share, share)) for _ in mine]
    stages = [pipeline_stage(c, i, ranks * per_rank, torch.ones(SHAPE)) for c, i in zip(chunks, mine, strict=True)]
    make = getattr(pipelining.schedules, kind)
    schedule = make(stages[0] if per_rank == 1 else stages, micro_batches, loss_fn=_loss)
    return _torch_run(schedule, mine, ranks * per_rank, micro_batches)


def torch_replay(rank: int, schedule: Schedule, forward: float = FORWARD, empty: bool = False) -> Step:
    """One of our schedules in torch's runtime."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    mine = list(schedule.stages_of[rank])
    share = forward / len(mine)
    chunks: list[Any] = [Empty() if empty else Chunk(ChunkTimes(share, share, share)) for _ in mine]
    stages = [pipeline_stage(c, i, schedule.stages, torch.ones(SHAPE)) for c, i in zip(chunks, mine, strict=True)]
    runtime = _PipelineScheduleRuntime(stages, schedule.micro_batches, loss_fn=_loss)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        schedule.save(path)
        runtime._load_csv(str(path))
    return _torch_run(runtime, mine, schedule.stages, schedule.micro_batches)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


def _torch_run(schedule: Any, mine: list[int], stages: int, micro_batches: int) -> Step:
    x = torch.ones(micro_batches, *SHAPE[1:])
    inputs = (x,) if 0 in mine else ()
    target = {"target": torch.ones(micro_batches, 1)} if stages - 1 in mine else {}

    def step() -> None:
        schedule.step(*inputs, **target)

    return step


# ---- overhead ----


def overhead(quick: bool) -> Iterator[Row]:
    """Time per op with stages that take none: on one rank, and with messages on two."""
    for ranks, goal in ((1, 100.0), (2, 300.0)):
        found = run_ranks(_overhead, ranks, 3 if quick else 15, timeout=300, group_timeout=60)
        ours, theirs = (
            statistics.median(max(r[which][i] for r in found) for i in range(len(found[0][which]))) for which in (0, 1)
        )
        case = f"P={ranks} B=16, empty stages"
        yield lower_is_better(case, "torch runtime, same 1F1B", "µs per op", ours, theirs)
        yield lower_is_better(case, "goal", "µs per op", ours, goal)


def _overhead(rank: int, ranks: int, repeats: int) -> tuple[list[float], list[float]]:
    schedule = build("1f1b", ranks, 16)
    executor, programs = our_executor(rank, schedule, None)
    program, feed = programs.of(rank), Ones()
    theirs = torch_replay(rank, schedule, empty=True)
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 2):
        for which, step in enumerate((lambda: executor.run(program, feed), theirs)):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(5):
                step()
            if repeat > 1:
                times[which].append((time.perf_counter() - start) / 5 / 32 * 1e6)
    dist.barrier()
    return times


# ---- jitter and unequal micro-batches ----


def uneven(quick: bool) -> Iterator[Row]:
    """Message-driven with slack against ordered 1F1B and against ordered 1F1B with the same slack: efficiency and peak.

    Efficiency is the busiest rank's work over the step's time. Slack gives most of it; order little.
    """
    ranks, micro_batches = 4, 12 if quick else 24
    for label in ("steady", "jitter, cv 0.3", "unequal lengths, cv 0.5"):
        found = run_ranks(_uneven, ranks, micro_batches, label, 3 if quick else 5, timeout=600, group_timeout=60)
        names = list(found[0])
        efficiency = {}
        for n in names:
            work = max(r[n][1] for r in found)
            spans = [max(r[n][0][i] for r in found) for i in range(len(found[0][n][0]))]
            efficiency[n] = 100 * work / statistics.median(spans)
        peaks = {n: max(r[n][2] for r in found) for n in names}
        for n in names:
            if n.startswith("driven"):
                slack = n.split("+")[1]
                for peer in ("1f1b", f"1f1b +{slack}"):
                    yield Row(
                        f"{label}: {n} [peak {peaks[n]}]",
                        f"{peer} [peak {peaks[peer]}]",
                        "efficiency, %",
                        efficiency[n],
                        efficiency[peer],
                        efficiency[n] / efficiency[peer],
                    )


def _uneven(
    rank: int, ranks: int, micro_batches: int, label: str, repeats: int
) -> dict[str, tuple[list[float], list[float], int]]:
    base = ChunkTimes(0.010, 0.010, 0.010)

    def times(stage: int) -> Any:
        if label.startswith("jitter"):
            return jitter(base, micro_batches, cv=0.3, seed=stage)
        if label.startswith("unequal"):
            lengths = [t.forward for t in jitter(base, micro_batches, cv=0.5, seed=7)]
            return by_length(base, lengths)
        return base

    contenders: dict[str, tuple[Executor, Callable[[], Any]]] = {}
    for slack in (0, 2, 4):
        schedule = build("1f1b", ranks, micro_batches, slack=slack)
        executor, programs = our_executor(rank, schedule, times)
        program = programs.of(rank)
        contenders["1f1b" if not slack else f"1f1b +{slack}"] = executor, _bind(executor.run, program, Ones())
    for slack in (2, 4):
        executor, programs = our_executor(rank, build("1f1b", ranks, micro_batches), times)
        plan = drive(programs.of(rank), {f"s{rank}": (rank,)}, slack)
        contenders[f"driven +{slack}"] = executor, _bind(run_driven, executor, plan, Ones())
    found: dict[str, tuple[list[float], float, int]] = {}
    spans: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, (_, step) in contenders.items():
            dist.barrier()
            start = time.monotonic()
            step()
            if repeat:
                spans[name].append(time.monotonic() - start)
    for name, (executor, _) in contenders.items():
        flying, peak = 0, 0
        for span in executor.spans:
            flying += 1 if "F" in span.what else -1
            peak = max(peak, flying)
        chunk: Any = executor.stages[rank].links[0].module
        asked = chunk.times if len(chunk.times) > 1 else chunk.times * micro_batches
        work = sum(t.forward + t.input_grad + t.weight_grad for t in asked)
        found[name] = spans[name], work, peak
    dist.barrier()
    return found


def _bind(call: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: call(*args)


SECTIONS: dict[str, tuple[str, Callable[[bool], Iterator[Row]]]] = {
    "race": ("The race: a step in forwards of a rank's share (a ratio above 1: ours is faster)", race),
    "hanayo": ("Hanayo's waves against 1F1B and Chimera", hanayo),
    "long": ("The same at the op lengths of large models: a rank's forward takes 200 ms", long_stages),
    "overhead": ("Overhead", overhead),
    "uneven": ("Jitter and micro-batches of unequal length", uneven),
}

if __name__ == "__main__":
    main()
