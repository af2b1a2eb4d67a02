"""The input of the planner: a model on a cluster with a batch (`PlanProblem`), the user's constraints (`Constraints`), and the
thoroughness of the search (`SearchConfig`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial, wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from fourfold import schema
from fourfold.cluster import Cluster
from fourfold.errors import PlanError
from fourfold.model.operators import ModelSpec, Operator, UnitSpec
from fourfold.plan import AXES, FP8_WIDTH, SCHEDULES, Plan, Precision
from fourfold.planner.engines import FOURFOLD, TrainingEngine, engine_of

__all__ = ["Constraints", "PlanProblem", "SearchConfig", "parse_fixes", "per_problem", "rounded"]


def rounded(value: float) -> float:
    """Round seconds to nine significant digits before they are compared.

    [Note: ties]
    Many choices take exactly the same time, for example which of several identical units holds more memory. The last digits
    differ between platforms and versions of Python and must not decide: times are compared after rounding, and ties are broken
    by order.
    """
    return float(f"{value:.9g}")


@dataclass(frozen=True, eq=False)
class PlanProblem:
    """Model, cluster, batch and precision. Compared by identity."""

    spec: ModelSpec
    cluster: Cluster
    global_batch: int
    """Sequences per step."""
    precision: Precision
    moments: Literal["fp32", "bf16"] = "fp32"
    engine: TrainingEngine = FOURFOLD
    """The system that runs the plan; set it with `with_engine`."""
    machine: Cluster | None = None
    """The cluster as given; `cluster` has the engine's adjustments."""
    logits: str = "auto"
    """See `Memory.logits`."""
    together: int = 1
    """Consecutive sequences that must be in one micro-batch."""
    needs_norm: bool = True
    """Whether updates need the norm of all gradients, for clipping or the guard."""
    caches: dict[Any, Callable[..., Any]] = field(default_factory=dict, init=False, repr=False)
    """Cached results for this problem, by function (`per_problem`)."""

    def __post_init__(self) -> None:
        if self.precision.matmul != "fp8":
            return
        d = self.cluster.device
        if d.kind == "cuda" and "fp8" not in d.matrix:
            raise PlanError(
                f"precision.matmul = 'fp8': {self.cluster.name} ({d.name}) has no rate of fp8 matmuls: device.matrix has "
                f"{', '.join(d.matrix)}; use matmul = 'compute', a preset whose GPUs have fp8 tensor cores (h100-sxm, h200, "
                "l40s, rtx-4090, …), or give device.matrix.fp8 in the cluster file"
            )
        if self.spec.config is not None:
            Plan(precision=self.precision).check_model(self.spec.config)

    def computes_in_fp8(self, o: Operator) -> bool:
        """Whether a matmul's forward and input gradient are in fp8: those of blocks, but not of the head."""
        return self.precision.matmul == "fp8" and o.name in ("qkv", "out", "up", "down")

    def may_split(self, unit: UnitSpec, slices: int) -> bool:
        """Whether a unit may be computed in slices; fp8 needs slices of a multiple of 16."""
        fp8 = self.precision.matmul == "fp8" and unit.kind.startswith("mlp")
        return unit.slices >= slices and not (fp8 and unit.slices % (FP8_WIDTH * slices))

    def with_engine(self, engine: str | TrainingEngine) -> PlanProblem:
        """The same problem for another system."""
        found, machine = engine_of(engine), self.machine or self.cluster
        return replace(self, cluster=found.on(machine), machine=machine, engine=found)

    def with_cluster(self, cluster: Cluster) -> PlanProblem:
        """The same problem on another cluster."""
        return replace(self, cluster=cluster, machine=None).with_engine(self.engine)

    def of_plan(self, plan: Plan) -> PlanProblem:
        """The same problem with a plan's precision and logits."""
        memory = plan.memory
        return replace(self, precision=plan.precision, moments=memory.moments, logits=memory.logits)

    @cached_property
    def heads(self) -> int:
        """Number of attention heads, the largest useful `col`; 1 if unknown."""
        return self.spec.config.heads if self.spec.config is not None else 1

    @cached_property
    def on_cpu(self) -> bool:
        return self.cluster.device.kind == "cpu"

    @cached_property
    def compiled(self) -> bool:
        """Whether units are compiled. By default, Fourfold compiles on GPUs; other systems are predicted without compilation."""
        if self.precision.compile == "auto" and self.engine.name != FOURFOLD.name:
            return False
        return self.precision.compiles(self.cluster.device.kind)

    @cached_property
    def compute_bytes(self) -> int:
        """Bytes of a weight or an activation."""
        return self.precision.compute_bytes

    @cached_property
    def reduce_bytes(self) -> int:
        """Bytes of a gradient: never narrower than the compute type."""
        return self.precision.reduce_bytes

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of a parameter between uses: of a weight, or of its fp32 master, of which gathers make weights."""
        return max(4, self.compute_bytes) if self.engine.fp32_shards else self.compute_bytes

    @cached_property
    def state_bytes(self) -> float:
        """Bytes of optimizer state per parameter on the device: two moments, and an fp32 master of narrow weights."""
        return (0 if self.parameter_bytes >= 4 else 4) + self._moment_bytes

    @cached_property
    def streamed_bytes(self) -> float:
        """Bytes per parameter that a streamed update moves each way: of an fp32 master of a bf16 weight, the low 16 bits."""
        return (2 if self.compute_bytes < 4 else 0) + self._moment_bytes

    @property
    def _moment_bytes(self) -> int:
        return 2 * (2 if self.moments == "bf16" else max(4, self.compute_bytes))


P = ParamSpec("P")
R = TypeVar("R")


def per_problem(function: Callable[Concatenate[PlanProblem, P], R]) -> Callable[Concatenate[PlanProblem, P], R]:
    """Cache a function of a problem and other values. The results are stored in the problem, and freed with it."""

    @wraps(function)
    def cached(problem: PlanProblem, /, *args: P.args, **options: P.kwargs) -> R:
        if function not in problem.caches:
            problem.caches[function] = lru_cache(maxsize=None)(partial(function, problem))
        found: R = problem.caches[function](*args, **options)
        return found

    return cached


# ---- constraints ----

SYNONYMS = {
    "tp": "col",
    "pp": "pipe",
    "dp": "data",
    "mbs": "micro_batch_size",
    "vp": "stages_per_rank",
    "vpp": "stages_per_rank",
}
"""Names of other systems that `--fix` accepts."""
_NOT_HERE = {
    "cp": "context parallelism is not supported: sequences are split over col, between the matmuls of a block",
    "ep": "expert parallelism is not supported: there are no models with experts",
    "sp": "sequence parallelism is part of col, unless tensor.residual = 'hidden'",
}
_OTHER_MODES = {
    "zero1": "use mode=keep: optimizer state is sharded, parameters are gathered and gradients reduced once a step",
    "ddp": "use mode=replicate",
    "fsdp": "use mode=zero3",
}
_NUMBERS = (*AXES, "micro_batches", "micro_batch_size", "waves", "stages_per_rank")
_WORDS = {
    "schedule": SCHEDULES,
    "mode": ("replicate", "zero2", "zero3", "keep"),
    "recompute": ("none", "selective", "full", "per-slice"),
    "optimizer": ("device", "host", "auto"),
    "activations": ("device", "host"),
    "gradients": ("keep", "consume"),
    "flow": ("auto", "summa", "os", "ls", "ws"),
    "keep": ("none", "weights", "inputs", "gradients", "all"),
}
_FIXABLE = (*_NUMBERS, *_WORDS)


@dataclass(frozen=True)
class Constraints:
    """The user's constraints on the search: `--fix col=4`, `--schedule wave`, `--max-ranks`."""

    fixed: dict[str, Any]
    max_ranks: int = 0

    def get(self, name: str, default: Any = None) -> Any:
        return self.fixed.get(name, default)

    def allows(self, **values: Any) -> bool:
        """Whether these values agree with the constraints."""
        return all(self.fixed.get(name, value) == value for name, value in values.items())

    @property
    def schedule(self) -> str | None:
        """The requested schedule, by name or by an option that only it has."""
        implied = "wave" if "waves" in self.fixed else "interleaved" if "stages_per_rank" in self.fixed else None
        return self.get("schedule", implied)

    @property
    def needs_pipeline(self) -> bool:
        return (self.schedule or "1f1b") != "1f1b"


def parse_fixes(texts: list[str], schedule: str | None = None, max_ranks: int | None = None) -> Constraints:
    """Constraints from `["col=4", "mode=zero3"]`; refuses unknown names, invalid values and contradictions."""
    fixed: dict[str, Any] = {}
    for text in texts:
        name, value = _parse_fix(text)
        if fixed.setdefault(name, value) != value:
            raise PlanError(f"--fix {name}={fixed[name]} and {text} contradict each other; give one")
    if schedule is not None:
        if schedule not in SCHEDULES:
            raise PlanError(f"--schedule {schedule}{schema.nearest(schedule, SCHEDULES)}")
        if fixed.setdefault("schedule", schedule) != schedule:
            raise PlanError(f"--schedule {schedule} and --fix schedule={fixed['schedule']} contradict each other")
    if {"waves", "stages_per_rank"} <= fixed.keys():
        raise PlanError(
            f"--fix waves={fixed['waves']} is for the schedule wave and stages_per_rank={fixed['stages_per_rank']} for "
            "interleaved; leave one out"
        )
    named = fixed.get("schedule")
    for name, suits in (("waves", "wave"), ("stages_per_rank", "interleaved")):
        if name in fixed and named not in (None, suits):
            raise PlanError(
                f"--fix {name}={fixed[name]} is for the schedule {suits}, but {named} was requested; leave one out"
            )
    if fixed.get("pipe") == 1 and (named not in (None, "1f1b") or fixed.keys() & {"waves", "stages_per_rank"}):
        raise PlanError(
            "--fix pipe=1 has no pipeline, but a schedule was requested; leave one out, or use pipe=2 or more"
        )
    if fixed.get("gradients") == "consume" and fixed.get("optimizer") == "device":
        raise PlanError(
            "--fix gradients=consume frees gradients after updates of state on the host, but optimizer=device was requested; "
            "use optimizer=host or auto"
        )
    if max_ranks is not None and max_ranks < 1:
        raise PlanError(f"--max-ranks {max_ranks} must be at least 1")
    return Constraints(fixed, max_ranks or 0)


def _parse_fix(text: str) -> tuple[str, Any]:
    given, equals, value = text.partition("=")
    name = SYNONYMS.get(given, given)
    if name in _NOT_HERE:
        raise PlanError(f"--fix {text}: {_NOT_HERE[name]}; leave it out")
    if name not in _FIXABLE:
        raise PlanError(f"--fix {text}{schema.nearest(given, (*_FIXABLE, *SYNONYMS))}; write for example --fix col=4")
    if not equals:
        raise PlanError(f"--fix {text} has no value; write for example --fix {given}={_WORDS.get(name, (4,))[-1]}")
    if name not in _WORDS:
        if not re.fullmatch(r"0*[1-9][0-9]{0,8}", value):
            raise PlanError(f"--fix {text}: {given} is a whole number of at least 1")
        return name, int(value)
    if value not in _WORDS[name]:
        if name == "mode" and value.lower() in _OTHER_MODES:
            raise PlanError(f"--fix {text}: no mode has this name; {_OTHER_MODES[value.lower()]}")
        raise PlanError(f"--fix {text}{schema.nearest(value, _WORDS[name])}")
    return name, value


# ---- how thorough the search is ----


@dataclass(frozen=True)
class SearchConfig:
    """Thoroughness of the search. Shares are fractions of a step's seconds or of a device's memory."""

    # ---- branch and bound over layouts ----
    many_layouts: int = 2000
    """With more layouts than this, `least_gain` applies, and only the best plan is improved."""
    least_gain: float = 0.02
    """With many layouts, a layout is pruned if its lower bound allows a gain of less than this share."""
    unlikely: float = 0.02
    """Once enough plans are built, a layout is skipped if its estimate exceeds the best plan by more than this share."""
    most_built: int = 24
    """Maximum number of plans that are built and fit; four times as many layouts are tried."""
    estimates_per_alternative: int = 4
    """Minimum layouts estimated per alternative in the report."""
    most_tightened: int = 200
    """Maximum number of lower bounds that are tightened only for the certificate."""

    # ---- one layout: a budget for every rank ----
    budget_rounds: int = 12
    """Maximum number of choices of a rank that are replayed."""
    budget_tolerance: float = 0.01
    """A choice is accepted if it leaves at most this share of the memory free."""

    # ---- local search ----
    improved_share: float = 0.03
    """Plans within this share of the best are improved."""
    most_improved: int = 3
    """Maximum number of plans that are improved; one if there are many layouts."""
    fill_rounds: int = 6
    """Rounds in which changes of single units are evaluated and a knapsack of them is chosen; 0: never."""

    outside_gain: float = 0.01
    """Layouts outside the searched space replace the best plan if they gain at least this share."""
    rows_gain: float = 0.01
    """On GPUs, a plan with rows must gain at least this share."""
    synthesized_ranks: int = 4
    """Maximum pipeline ranks for which a schedule is synthesized after the search."""
    synthesized_share: float = 0.1
    """Pipelines within this share of the best plan get a synthesized schedule."""
    most_synthesized: int = 3
    """Maximum number of meshes for which schedules are synthesized."""
    more_memory: float = 1.2
    """If memory is full and one more GiB gains nothing in this layout, this multiple of the memory is tried in all layouts."""

    # ---- CPUs ----
    cpu_tie: float = 0.01
    """On CPUs, plans within this share count as equal, and one with a single mode is preferred."""
    cpu_link_gain: float = 0.05
    """On CPUs, gathers and reductions do not slow each other on a link, but are predicted to: the share this may gain."""
