"""Message-driven execution (AxoNN): run whichever op has its input, under a cap of micro-batches in flight per stage.

A rank chooses its next op in this order of preference:

    F or B (I)   whose input has arrived; if both kinds are ready, the kind that did not run last; the oldest micro-batch
                 first, then the deepest stage. F only while the stage is below its cap
    W            when neither is ready: weight gradients fill the waiting time
    STREAM       when no W is left either: optimizer updates of units whose reduction has started
    REDUCE …     as soon as a stage's last weight gradient is done; in the program's order, so that replicas agree

It blocks only when nothing is ready. Each stage runs F, B and W in the order of the micro-batches, so gradients are
accumulated in a fixed order and the results are bit-identical whatever the timing. It cannot deadlock: the last stage can always
process its inputs, a backward has no cap, and a forward waits only for backwards of its own stage.

The cap of a stage is the program's maximum number of micro-batches in flight there, plus `slack`. Without slack there is no
choice, and jitter costs as much as in an ordered run (docs/pipelines.md has figures).

Ranks of one grid communicate inside an op, so they must run ops in the same order: the first of them chooses and broadcasts its
choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fourfold.errors import CommunicationError
from fourfold.program import Gather, Op, Program, Recv, Reduce, Release, Send, Stream, UnitOp
from fourfold.record import RECORD, Ticket
from fourfold.runtime.executor import Executor, Feed
from fourfold.runtime.transport import Name

__all__ = ["Drive", "drive", "run_driven"]


@dataclass(frozen=True)
class Drive:
    """What a rank needs to choose ops by itself: derived from its program, without the order of ops."""

    stages: tuple[int, ...]
    micro_batches: int
    split: bool
    caps: dict[int, int]
    before: tuple[Gather, ...]
    after: tuple[tuple[Reduce | Release, tuple[int, ...]], ...]
    """In order; each with the stages that must be complete before it."""
    streams: tuple[tuple[Stream, tuple[str, ...]], ...]
    """Each with the units whose reduction must have started before it."""
    incoming: dict[int, int]
    """Number of messages from each rank."""
    outgoing: dict[tuple[int, str], int]
    """Target rank of the activation or gradient of a stage."""


def drive(
    program: Program,
    units_of: dict[str, tuple[int, ...]],
    slack: int = 0,
    buckets: Mapping[str, tuple[str, ...]] | None = None,
) -> Drive:
    """Derive a `Drive` from a program. `units_of[unit]`: stages on this rank that use a unit; `buckets`: units in each bucket.

    Units must be gathered once per step (`replicate`, `keep`): the order of further gathers would depend on timing.
    """
    ops = [Op(i.stage, i.kind, i.micro_batch) for i in program.instructions if isinstance(i, Op | UnitOp)]
    ops = list(dict.fromkeys(ops))
    split = any(op.kind == "I" for op in ops)
    flying: dict[int, int] = {}
    caps: dict[int, int] = {}
    for op in ops:
        if op.kind == "F":
            flying[op.stage] = flying.get(op.stage, 0) + 1
            caps[op.stage] = max(caps.get(op.stage, 0), flying[op.stage])
        elif op.kind == ("W" if split else "B"):
            flying[op.stage] -= 1
    micro_batches = 1 + max(op.micro_batch for op in ops)
    after = [(i, units_of[i.unit]) for i in program.instructions if isinstance(i, Reduce | Release)]
    reduced = {i.unit for i, _ in after if isinstance(i, Reduce)}
    streams = [
        (i, tuple(u for u in (buckets or {})[i.bucket] if u in reduced))
        for i in program.instructions
        if isinstance(i, Stream)
    ]
    gathers = [i for i in program.instructions if isinstance(i, Gather)]
    assert len({g.unit for g in gathers}) == len(gathers), "a unit that is gathered more than once in a step"
    incoming: dict[int, int] = {}
    outgoing: dict[tuple[int, str], int] = {}
    for i in program.instructions:
        if isinstance(i, Recv):
            incoming[i.peer] = incoming.get(i.peer, 0) + 1
        elif isinstance(i, Send):
            outgoing[i.stage, i.kind] = i.peer
    return Drive(
        tuple(sorted(caps)),
        micro_batches,
        split,
        {stage: min(cap + slack, micro_batches) for stage, cap in caps.items()},
        tuple(gathers),
        tuple(after),
        tuple(streams),
        incoming,
        outgoing,
    )


def run_driven(
    executor: Executor, plan: Drive, feed: Feed, *, together: dist.ProcessGroup | None = None
) -> dict[int, Any]:
    """Run a step; returns the output of the last stage by micro-batch, if that stage is on this rank.

    `together`: the ranks of this rank's grid; the first of them chooses for all.
    """
    return _Driver(executor, plan, together).run(feed)


class _Driver:
    """One step of one rank."""

    def __init__(self, executor: Executor, plan: Drive, together: dist.ProcessGroup | None):
        self.executor, self.plan, self.together = executor, plan, together
        self.forwards = dict.fromkeys(plan.stages, 0)  # done so far, per stage
        self.backwards = dict.fromkeys(plan.stages, 0)
        self.weights = dict.fromkeys(plan.stages, 0)
        self.after, self.streams = deque(plan.after), list(plan.streams)
        self.reduced: set[str] = set()
        self.last_kind = "B"
        self.leads = together is None or dist.get_rank(together) == 0

    def run(self, feed: Feed) -> dict[int, Any]:
        self.executor.begin(feed, ordered=False)
        for source, count in self.plan.incoming.items():
            self.executor.messages.listen(source, count)
        for gather in self.plan.before:
            self.executor.do(gather)
        kinds = 3 if self.plan.split else 2
        for _ in range(kinds * len(self.plan.stages) * self.plan.micro_batches):
            self._do(self._agree(self._choose() if self.leads else None))
        while self._stream():
            pass
        return self.executor.end()

    # ---- choosing ----

    def _choose(self) -> Op:
        """The next op; waits until one is ready."""
        while True:
            ready = self._ready()
            if ready:
                return ready
            if self._stream():
                continue
            awaited = self._awaited()
            messages = self.executor.messages
            sources = [messages.address(self.executor.placement[name.stage]) for name in awaited]
            ticket = RECORD.wait(Ticket(" or ".join(map(str, awaited[:4])), peer=sources[0]))
            try:
                messages.wait_any(awaited)
            except CommunicationError as e:
                raise CommunicationError(f"nothing to do: {e}") from e
            RECORD.done(ticket)

    def _stream(self) -> bool:
        """Start one optimizer update that is ready; False: none is."""
        for each in self.streams:
            if self.reduced.issuperset(each[1]):
                self.streams.remove(each)
                self.executor.do(each[0])
                return True
        return False

    def _ready(self) -> Op | None:
        backward: Any = "I" if self.plan.split else "B"
        forwards = [
            Op(s, "F", self.forwards[s]) for s in self.plan.stages if self._may_forward(s) and self._has_input(s)
        ]
        backwards = [Op(s, backward, self.backwards[s]) for s in self.plan.stages if self._has_grad(s)]
        first, second = (backwards, forwards) if self.last_kind == "F" else (forwards, backwards)
        for ops in (first, second):
            if ops:
                return min(ops, key=lambda op: (op.micro_batch, -op.stage))
        late = [Op(s, "W", self.weights[s]) for s in self.plan.stages if self.weights[s] < self.backwards[s]]
        return min(late, key=lambda op: (op.micro_batch, -op.stage)) if late and self.plan.split else None

    def _may_forward(self, stage: int) -> bool:
        done = self.weights if self.plan.split else self.backwards
        more = self.forwards[stage] < self.plan.micro_batches
        return more and self.forwards[stage] - done[stage] < self.plan.caps[stage]

    def _has_input(self, stage: int) -> bool:
        return stage == 0 or self._here(stage - 1, "activation", self.forwards[stage])

    def _has_grad(self, stage: int) -> bool:
        micro_batch = self.backwards[stage]
        if micro_batch >= self.forwards[stage]:
            return False
        return stage == self.executor.last or self._here(stage + 1, "gradient", micro_batch)

    def _here(self, maker: int, kind: Any, micro_batch: int) -> bool:
        name = Name(maker, kind, micro_batch)
        if self.executor.placement[maker] == self.executor.rank:
            return name in self.executor.values.made
        return self.executor.messages.arrived(name)

    def _awaited(self) -> Sequence[Name]:
        """Messages that would each make an op ready."""
        names = []
        for stage in self.plan.stages:
            if self._may_forward(stage) and stage > 0:
                names.append(Name(stage - 1, "activation", self.forwards[stage]))
            if self.backwards[stage] < self.forwards[stage] and stage < self.executor.last:
                names.append(Name(stage + 1, "gradient", self.backwards[stage]))
        place = self.executor.placement
        return [n for n in names if place[n.stage] != self.executor.rank]

    def _agree(self, op: Op | None) -> Op:
        """The op that the leader chose."""
        if self.together is None:
            assert op is not None
            return op
        code = torch.tensor([op.stage, "FBIW".index(op.kind), op.micro_batch] if op else [0, 0, 0])
        ticket = RECORD.wait(RECORD.start(self.together, "the choice of the next op"))
        dist.broadcast(code, group_src=0, group=self.together)
        RECORD.done(ticket)
        stage, kind, micro_batch = code.tolist()
        return Op(stage, "FBIW"[kind], micro_batch)  # type: ignore[arg-type]

    # ---- doing ----

    def _do(self, op: Op) -> None:
        self.executor.do(op)
        counts = {"F": self.forwards, "B": self.backwards, "I": self.backwards, "W": self.weights}[op.kind]
        counts[op.stage] += 1
        if op.kind != "W":
            self.last_kind = "F" if op.kind == "F" else "B"
            kind: Any = "activation" if op.kind == "F" else "gradient"
            peer = self.plan.outgoing.get((op.stage, kind))
            if peer is not None:
                self.executor.do(Send(op.stage, kind, op.micro_batch, peer))
        done = self.weights if self.plan.split else self.backwards
        while self.after and all(done[s] == self.plan.micro_batches for s in self.after[0][1]):
            instruction = self.after.popleft()[0]
            self.executor.do(instruction)
            if isinstance(instruction, Reduce):
                self.reduced.add(instruction.unit)
