"""The options of a unit, in two aspects that add up: how it is sharded, and what it recomputes.

Each option has seconds of a step, bytes for the whole step, and bytes for a while (transient). The two aspects are chosen apart:
a backward that recomputes would hide more of a gather than is counted here, so times are never too short; the replay of the
whole plan has the last word on memory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from fourfold.planner.layout import Layout, Setting
from fourfold.planner.units import Choice, Compute, computes, joins, shared, unit_cost
from fourfold.shard.layout import JOIN

__all__ = ["Ends", "Option", "RankLoad", "Solver", "sharding_options"]

SPLITS = (2, 4, 8, 16)
BEFORE = {"attn": "mlp", "mlp": "attn", "head": "mlp", "embed": "attn"}
"""What computes while a unit's parameters are gathered."""


Weights = tuple[float, float]
"""[Note: the host's link, at least]"""
Least = Literal["plain", "again"]
"""What no plan can beat: with nothing recomputed, or as if everything was, behind which more is hidden."""


class Option(NamedTuple):
    """One value of one aspect of a unit."""

    choice: Choice
    seconds: float
    memory: float
    transient: float
    first: float = 0.0
    """Of memory, bytes before any gradient is made."""
    last: float = 0.0
    """Of memory, bytes at the end of a step."""
    queued: float = 0.0
    """Seconds of reductions that may hide behind anything before a step's end, and are left out of what is least."""


class Ends(NamedTuple):
    """Whether a unit is at an end of its rank's only stage."""

    opens: bool = False
    """It is the first, and there since the backward before."""
    closes: bool = False
    """It is the last, and there since its forward."""


NEITHER = Ends()


@dataclass(frozen=True)
class RankLoad:
    """What one rank of a pipeline holds: units by kind, and micro-batches in flight."""

    units: tuple[tuple[str, int], ...]
    in_flight: float
    tied_copy: bool = False


class Solver:
    """Options of every kind of unit, remembered by what they depend on."""

    def __init__(self, setting: Setting, fixed: dict[str, str], last: Choice | None = None):
        """`last`: what the model's last unit recomputes, and in how many slices, where that is decided."""
        self.setting, self.fixed, self._last = setting, fixed, last
        first, *_, end = [u.kind for u in setting.spec.units]
        kinds = Counter(u.kind for u in setting.spec.units)
        self._ends = {k: Ends(k == first, k == end) for k in (first, end) if kinds[k] == 1}
        self._sharding: dict[tuple[object, ...], list[Option]] = {}
        self._recompute: dict[tuple[object, ...], list[Option]] = {}
        self.known: dict[tuple[object, ...], Any] = {}
        """What `inner` and `floors` have found of ranks and units, by `key` and more."""

    def key(self, layout: Layout) -> tuple[object, ...]:
        """What a rank's options depend on: layouts that differ in their schedules alone have the same."""
        mesh = layout.mesh
        sizes = (mesh.row, mesh.col, layout.replicas, layout.micro_batches, layout.micro_batch_size, mesh.pipe > 1)
        where = (layout.optimizer, layout.activations, layout.tensor, layout.prefetch, layout.steps)
        return (*sizes, *where, layout.stages_per_rank > 1)

    def sharding(
        self, layout: Layout, kind: str, piped: bool, ends: Ends | None = None, least: Least | None = None
    ) -> list[Option]:
        """Modes, by seconds and bytes of a step; `least`: seconds that none can beat, not those that are likely."""
        mesh = layout.mesh
        if ends is None:
            ends = self._ends.get(kind, NEITHER) if layout.stages_per_rank == 1 else NEITHER
        sizes = (mesh.row, mesh.col, layout.replicas, layout.micro_batches, layout.micro_batch_size)
        key = (kind, *sizes, piped, layout.optimizer, layout.tensor, layout.prefetch, ends, least)
        if key not in self._sharding:
            options = sharding_options(self.setting, layout, kind, piped, ends, least, self.fixed.get("mode", ""))
            self._sharding[key] = _undominated(_wished(options, "mode", self.fixed.get("mode")))
        return self._sharding[key]

    def recompute(self, layout: Layout, kind: str, weights: Weights | None = None) -> list[Option]:
        """Recomputation and splits: seconds of a micro-batch, bytes of a micro-batch in flight.

        `weights`: of the host's link in what ops take at least, where activations cross it; without, as if each unit waited.
        """
        mesh = layout.mesh
        where: tuple[object, ...] = (layout.activations, _stays(self.setting, layout))
        if weights is not None and layout.activations == "host":
            where = (weights, layout.puts_weights_off)
        key = (kind, mesh.row, mesh.col, layout.micro_batch_size, layout.tensor, layout.steps, *where)
        if key not in self._recompute:
            options = recompute_options(self.setting, layout, kind, weights)
            if self._last is not None and kind == self.setting.spec.units[-1].kind:
                options = [o for o in options if o.choice == self._last] or options
            self._recompute[key] = _undominated(_wished(options, "recompute", self.fixed.get("recompute")))
        return self._recompute[key]


def recompute_options(setting: Setting, layout: Layout, kind: str, weights: Weights | None = None) -> list[Option]:
    """All there are.

    [Note: the host's link, at least]
    An op that computes for c seconds and moves activations for d takes max(c, d) + (1 - overlap) · min(c, d). Both are sums over
    its units, which share the link, so none can be charged by itself. But that is convex: for each weight w in [0, 1] it is
    at least (1 - w) · (c + (1 - overlap) · d) + w · (d + (1 - overlap) · c), which is a sum over units. `weights`: of forwards,
    and of backwards, which compute more for the same bytes.
    """
    unit, out = setting.spec.kinds[kind], []
    stays = _stays(setting, layout) if weights is None else 0.0
    base = _work(computes(setting, layout, kind, Choice(), False))
    candidates = [Choice(recompute=r) for r in ("none", "selective", "full")]
    if "per-slice" in unit.saved and layout.mesh.row * layout.mesh.col == 1:  # slices and the grid exclude each other
        candidates += [Choice(recompute="per-slice", split=s) for s in SPLITS if unit.slices >= s]
    for choice in candidates:
        cost = unit_cost(setting, layout, kind, choice)
        c = cost.compute
        seconds = _work(c) + c.again - base
        moved, overlap = cost.offloaded / setting.cluster.host.link, setting.cluster.overlap
        if weights is not None and layout.activations == "host":
            behind = c.input_grad + c.again + (0.0 if layout.puts_weights_off else c.weight_grad)
            for weight, work in zip(weights, (c.forward, behind), strict=True):
                seconds += (1 - overlap + weight * overlap) * moved - weight * overlap * work
        elif moved:
            for work in (c.forward, c.input_grad + c.again):
                seconds += max(work, moved) + (1 - overlap) * min(work, moved) - work
        held = cost.activation + stays * cost.offloaded
        out.append(Option(choice, seconds, held, max(cost.workspace, cost.forward_workspace)))
    return out


@lru_cache(maxsize=4096)
def _stays(setting: Setting, layout: Layout) -> float:
    """Of what could move to the host, the share for which it has no room if nothing is recomputed."""
    if layout.activations == "device" or setting.cluster.device.kind == "cpu":
        return 0.0
    flight = min(layout.micro_batches, layout.mesh.pipe) / layout.mesh.pipe
    kinds = Counter(u.kind for u in setting.spec.units)
    moves = flight * sum(n * unit_cost(setting, layout, kind, Choice()).offloaded for kind, n in kinds.items())
    return max(0.0, 1 - layout.host_room(setting) / moves) if moves else 0.0


def sharding_options(
    setting: Setting,
    layout: Layout,
    kind: str,
    piped: bool,
    ends: Ends = NEITHER,
    least: Least | None = None,
    wish: str = "",
) -> list[Option]:
    """All modes that make sense for these replicas, and the one that was wished for."""
    m, replicas = layout.micro_batches, layout.replicas
    choices = [Choice()]
    if replicas > 1:
        node = setting.cluster.devices // layout.replica_stride
        groups = [0]
        if 1 < node < replicas and replicas % node == 0:
            groups.append(node)
        modes: list[Literal["zero2", "zero3", "keep"]] = ["zero3"]
        if m > 1 or wish == "keep":  # which are the same in one micro-batch
            modes.append("keep")
        if m == 1 or wish == "zero2":
            modes.append("zero2")
        reduces: list[Literal["step", "micro-batch"]] = ["step", "micro-batch"] if m > 1 else ["step"]
        choices += [Choice(mode, reduce, g) for mode in modes for reduce in reduces for g in groups]
    alone = replace(layout, mesh=replace(layout.mesh, pipe=1))  # no op is in parts
    before = BEFORE.get(kind, kind)
    before = before if before in setting.spec.kinds else kind
    other = computes(setting, alone, before, Choice())
    forward, backward = other.forward, other.input_grad + other.weight_grad
    if least == "again":
        forward, backward = 2 * forward, backward + 2 * forward
    if not layout.prefetch:  # nothing is under way while something computes
        forward = backward = 0.0
    return [
        o for c in choices for o in _sharding(setting, alone, kind, before, c, piped, forward, backward, ends, least)
    ]


def _sharding(
    setting: Setting,
    layout: Layout,
    kind: str,
    before: str,
    choice: Choice,
    piped: bool,
    forward: float,
    backward: float,
    ends: Ends,
    least: Least | None,
) -> list[Option]:
    """A mode, whose gathers and reductions have so many seconds to hide behind: with its state here, on the host, or either."""
    m, overlap = layout.micro_batches, setting.cluster.overlap
    cost = shared(setting, layout, kind, choice)

    def late(takes: float, window: float) -> float:
        shown = max(0.0, takes - window)
        return shown + (1 - overlap) * (takes - shown)

    sharded = choice.mode != "replicate"
    seconds = queued = 0.0
    if choice.mode == "zero3":
        seconds += (1 if ends.opens else m) * late(cost.gather, forward)
        seconds += 0.0 if ends.closes else m * late(cost.gather, backward)
    elif sharded:
        seconds += late(cost.gather, forward)
    reduce = cost.reduce
    if joins(cost, choice) and layout.optimizer == "device" and 0 < cost.gradients < JOIN:  # its share of a sum
        reduce = setting.cluster.collective("all_reduce", JOIN, layout.replicas, layout.replica_stride)
        reduce = min(cost.reduce, cost.gradients / JOIN * reduce)
    if least is not None and not sharded:
        queued, backward = overlap * reduce, reduce
    seconds += (m if choice.reduce == "micro-batch" else 1) * (late(reduce, backward) + cost.across)
    if choice.mode == "zero3" and "weights" in layout.tensor.keep:  # they are gathered again
        again, once = (_work(computes(setting, layout, kind, c)) for c in (choice, Choice()))
        seconds += m * (again - once)
    first = cost.parameters + (cost.whole if choice.mode in ("keep", "zero2") else 0.0)
    last = cost.parameters + cost.reduced
    at_once = sharded and (choice.reduce == "micro-batch" or (m == 1 and not piped))
    memory = first + (cost.reduced if at_once else cost.gradients)
    transient = cost.transient + (cost.gradients if at_once else 0.0)
    if cost.transient and layout.prefetch:  # one is gathered ahead
        transient += shared(setting, layout, before, choice).transient
    held = cost.local * (setting.state if layout.optimizer == "device" else setting.streamed)
    here = Option(choice, seconds, memory + held, transient, first + held, last + held, queued)
    crossing = held / setting.cluster.host.link
    there = Option(choice, seconds + crossing, memory, transient, first, last, queued)
    return {"device": [here], "host": [there]}.get(layout.optimizer, [here, there])


def _work(c: Compute) -> float:
    return c.forward + c.input_grad + c.weight_grad


def _wished(options: list[Option], name: str, wish: str | None) -> list[Option]:
    """The options that the user asked for; all, where a unit has none of them."""
    return [o for o in options if wish in (None, getattr(o.choice, name))] or options


def _undominated(options: list[Option]) -> list[Option]:
    """Without those that another beats or equals in all."""
    kept: list[Option] = []
    for o in options:
        if not any(_beats(p, o) for p in kept):
            kept = [p for p in kept if not _beats(o, p)]
            kept.append(o)
    return kept


def _beats(a: Option, b: Option) -> bool:
    return (
        a.seconds <= b.seconds
        and a.memory <= b.memory
        and a.transient <= b.transient
        and a.first <= b.first
        and a.last <= b.last
        and a.queued <= b.queued
    )
