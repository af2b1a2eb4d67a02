"""What the planner is asked: a model on a cluster with a batch (`PlanProblem`), what is decided already (`Constraints`), and how
thorough the search is (`SearchConfig`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial, wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from fourfold import schema
from fourfold.cluster import Cluster
from fourfold.errors import PlanError
from fourfold.model.operators import ModelSpec
from fourfold.plan import AXES, SCHEDULES, Plan, Precision
from fourfold.planner.engines import FOURFOLD, TrainingEngine, engine_of

__all__ = ["Constraints", "PlanProblem", "SearchConfig", "parse_fixes", "per_problem", "rounded"]


def rounded(value: float) -> float:
    """Nine significant digits of seconds that are compared.

    [Note: ties]
    Many choices take exactly as long as each other: which of identical units holds more, or which of two kinds is gathered more
    often where the network binds. Last digits differ between platforms and versions of Python, so they must not decide: times
    are compared as rounded here, and ties are decided by order.
    """
    return float(f"{value:.9g}")


@dataclass(frozen=True, eq=False)
class PlanProblem:
    """Model, cluster, batch and precision. Compared by identity."""

    spec: ModelSpec
    cluster: Cluster
    global_batch: int
    """Sequences of a step."""
    precision: Precision
    moments: Literal["fp32", "bf16"] = "fp32"
    engine: TrainingEngine = FOURFOLD
    """The system that runs the plan; set it with `with_engine`."""
    machine: Cluster | None = None
    """The cluster itself, where `cluster` is as the engine uses it."""
    logits: str = "auto"
    """See `Memory.logits`."""
    together: int = 1
    """Consecutive sequences that must be in one micro-batch."""
    needs_norm: bool = True
    """Updates need the norm of all gradients: for clipping, or the guard."""
    caches: dict[Any, Callable[..., Any]] = field(default_factory=dict, init=False, repr=False)
    """By function, its results for this problem (`per_problem`)."""

    def with_engine(self, engine: str | TrainingEngine) -> PlanProblem:
        """The same question about another system."""
        found, machine = engine_of(engine), self.machine or self.cluster
        return replace(self, cluster=found.on(machine), machine=machine, engine=found)

    def with_cluster(self, cluster: Cluster) -> PlanProblem:
        """The same question about another cluster."""
        return replace(self, cluster=cluster, machine=None).with_engine(self.engine)

    def of_plan(self, plan: Plan) -> PlanProblem:
        """The same question with a plan's types and logits."""
        memory = plan.memory
        return replace(self, precision=plan.precision, moments=memory.moments, logits=memory.logits)

    @cached_property
    def heads(self) -> int:
        """Attention heads, the largest sensible `col`; 1 where the model's are unknown."""
        return self.spec.config.heads if self.spec.config is not None else 1

    @cached_property
    def on_cpu(self) -> bool:
        return self.cluster.device.kind == "cpu"

    @cached_property
    def compiled(self) -> bool:
        """Whether units are compiled. By default: on GPUs, by this system; other systems are judged as they are without."""
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
    def state_bytes(self) -> float:
        """Bytes of optimizer state per parameter on the device: two moments, and an fp32 master of narrow weights."""
        return (0 if self.compute_bytes >= 4 else 4) + self._moment_bytes

    @cached_property
    def streamed_bytes(self) -> float:
        """Bytes per parameter that a streamed update moves each way: of a master of bf16 weights, the 16 low bits."""
        return (2 if self.compute_bytes < 4 else 0) + self._moment_bytes

    @property
    def _moment_bytes(self) -> int:
        return 2 * (2 if self.moments == "bf16" else max(4, self.compute_bytes))


P = ParamSpec("P")
R = TypeVar("R")


def per_problem(function: Callable[Concatenate[PlanProblem, P], R]) -> Callable[Concatenate[PlanProblem, P], R]:
    """Cache a function of a problem and other values. The results are kept in the problem, and freed with it."""

    @wraps(function)
    def cached(problem: PlanProblem, /, *args: P.args, **options: P.kwargs) -> R:
        if function not in problem.caches:
            problem.caches[function] = lru_cache(maxsize=None)(partial(function, problem))
        found: R = problem.caches[function](*args, **options)
        return found

    return cached


# ---- constraints ----

SYNONYMS = {"tp": "col", "pp": "pipe", "dp": "data"}
"""What `--fix` also understands, as other systems name it."""
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
    """What the user has decided before the search: `--fix col=4`, `--schedule wave`, `--max-ranks`."""

    fixed: dict[str, Any]
    max_ranks: int = 0

    def get(self, name: str, default: Any = None) -> Any:
        return self.fixed.get(name, default)

    def allows(self, **values: Any) -> bool:
        """Whether none of these values was decided to be another."""
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
    """How thorough the search is. Shares are of a step's seconds or of a device's memory."""

    # ---- branch and bound over layouts ----
    many_layouts: int = 2000
    """With more layouts than this, the next share applies, and only the best plan is improved."""
    least_gain: float = 0.02
    """Of many layouts, those are pruned whose lower bound allows a gain of less than this share."""
    unlikely: float = 0.02
    """Once there are enough plans to be shown, layouts are skipped whose estimate exceeds the best by more than this share."""
    most_built: int = 24
    """Layouts built into plans that fit, at most; four times as many are tried."""
    estimates_per_alternative: int = 4
    """Layouts estimated for every alternative that is to be shown, where fewer could be best."""
    most_tightened: int = 200
    """Lower bounds that are tightened for the certificate alone, at most."""

    # ---- one layout: a budget for every rank ----
    budget_rounds: int = 12
    """Choices of a rank that are replayed, at most."""
    budget_tolerance: float = 0.01
    """A choice is full when it leaves no more than this share of the memory free."""

    # ---- local search ----
    improved_share: float = 0.03
    """Plans slower than the best by no more than this share are improved."""
    most_improved: int = 3
    """Plans that are improved, at most; of many layouts, one."""
    fill_rounds: int = 6
    """Rounds in which changes of single units are evaluated and a knapsack of them is chosen; 0: never."""

    outside_gain: float = 0.01
    """Layouts near the best that are not searched replace it if they gain at least this share."""
    synthesized_ranks: int = 4
    """Most ranks of a pipeline whose schedule is synthesized then."""
    more_memory: float = 1.2
    """Where memory is full and another GiB gains nothing, this many times the memory is tried, in any layout."""

    # ---- CPUs ----
    cpu_tie: float = 0.01
    """On CPUs, plans within this share are equal, and one with a single mode is preferred."""
    cpu_link_gain: float = 0.05
    """On CPUs, gathers and reductions pass each other on a link that they are predicted to share: the share this may gain."""
