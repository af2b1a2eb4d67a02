"""Ops and schedules: which rank computes what, in which order.

A **stage** is a contiguous run of layers. An **op** is one computation of one stage on one micro-batch, written as stage,
kind, micro-batch: `3F0` is stage 3, forward, micro-batch 0.

    F  forward                                              B  whole backward: I and W in one computation
    I  gradient of the input (the previous stage waits for it)          W  gradient of the weights (no other op waits for it)

A **schedule** has the ordered list of ops of every rank, and the rank of every stage. Messages are not part of it; lowering
derives them (see `lowering`). As CSV, one row per rank, it can be exchanged with `torch.distributed.pipelining`.

    placement[stage] -> rank            order[rank] -> (op, op, ...)
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from fourfold import files, schema
from fourfold.errors import ScheduleError

__all__ = ["Kind", "Op", "Schedule", "ends_of_step"]

Kind = Literal["F", "B", "I", "W"]

MOST_NUMBER = 1_000_000
"""Bound on the number of a stage, rank or micro-batch in a file."""

_OP = re.compile(r"([0-9]{1,30})([FBIW])([0-9]{1,30})")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_TORCH_COMMUNICATION = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")


class Op(NamedTuple):
    """One computation: `Op(3, "F", 0)` is `3F0`."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Op:
        match = _OP.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"'{text.strip()}' is not an op: write the stage, one of F B I W and the micro-batch, as in 3F0"
            )
        stage, micro_batch = int(match[1]), int(match[3])
        if max(stage, micro_batch) > MOST_NUMBER:
            raise ScheduleError(f"'{text.strip()}': stages and micro-batches are numbered up to {MOST_NUMBER}")
        return cls(stage, cast(Kind, match[2]), micro_batch)


@dataclass(frozen=True)
class Schedule:
    """Every rank's ops in order, and every stage's rank. Schedules with the same ops compare equal."""

    order: tuple[tuple[Op, ...], ...]
    placement: tuple[int, ...]
    micro_batches: int
    name: str = field(default="", compare=False)

    @classmethod
    def of(cls, rows: Iterable[Iterable[Op]], name: str = "") -> Schedule:
        """A schedule from the ranks' ops; a stage is placed on the rank of its ops."""
        order = tuple(tuple(row) for row in rows)
        where: dict[int, int] = {}
        for rank, ops in enumerate(order):
            for op in ops:
                if where.setdefault(op.stage, rank) != rank:
                    raise ScheduleError(
                        f"rank {rank}, op {op}: stage {op.stage} is on rank {where[op.stage]} already; "
                        "all ops of a stage run on one rank"
                    )
        stages = max(where, default=-1) + 1
        if len(where) < stages or not stages:
            missing = next((s for s in range(stages) if s not in where), 0)
            raise ScheduleError(f"stages must be numbered from 0 without gaps; stage {missing} has no op")
        micro_batches = 1 + max(op.micro_batch for ops in order for op in ops)
        return cls(order, tuple(where[s] for s in range(stages)), micro_batches, name)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # of thousands of ops: once
        return hash((self.order, self.placement, self.micro_batches))

    @property
    def ranks(self) -> int:
        return len(self.order)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every rank, in layer order."""
        held: list[list[int]] = [[] for _ in self.order]
        for stage, rank in enumerate(self.placement):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    @cached_property
    def split(self) -> bool:
        """Whether some backward is split into I and W."""
        return any(op.kind == "I" for ops in self.order for op in ops)

    @cached_property
    def forward_only(self) -> bool:
        """Whether there is no backward at all (evaluation)."""
        return all(op.kind == "F" for ops in self.order for op in ops)

    def __str__(self) -> str:
        head = (
            f"{self.name or 'schedule'}: {self.ranks} ranks, {self.stages} stages, {self.micro_batches} micro-batches"
        )
        return "\n".join([head, *(f"  rank {r}: {' '.join(map(str, ops))}" for r, ops in enumerate(self.order))])

    # ---- files ----

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "micro_batches": self.micro_batches,
            "placement": list(self.placement),
            "order": [" ".join(map(str, ops)) for ops in self.order],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Schedule:
        known = ("name", "micro_batches", "placement", "order")
        for key in data:
            if key not in known:
                raise ScheduleError(f"a schedule has no '{key}'{schema.nearest(key, known)}")
        for key in known[1:]:
            if key not in data:
                raise ScheduleError(f"a schedule needs {', '.join(known[1:])}; '{key}' is missing")
        order = data["order"]
        if not isinstance(order, list) or not all(isinstance(row, str) for row in order):
            raise ScheduleError("not a schedule: order must be a list with a text of ops for every rank")
        return cls(
            order=tuple(tuple(map(Op.parse, row.split())) for row in order),
            placement=parse_numbers(data["placement"], "placement"),
            micro_batches=parse_number(data["micro_batches"], "micro_batches"),
            name=str(data.get("name", ""))[:200],
        )

    def to_csv(self) -> str:
        """One row of ops per rank, as `torch.distributed.pipelining` loads it with format "compute_only"."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([map(str, ops) for ops in self.order])
        return out.getvalue()

    @classmethod
    def from_csv(cls, text: str, name: str = "") -> Schedule:
        """A schedule from torch's CSV, either format.

        Empty cells are bubbles, `(2F1;5B0)OVERLAP_F_B` is read as its ops in order, and communication is ignored: lowering
        derives it from the ops.
        """
        try:
            rows = list(csv.reader(io.StringIO(text)))
        except csv.Error as e:
            raise ScheduleError(f"not a CSV file: {e}") from None
        return cls.of((list(_ops_of_row(rank, row)) for rank, row in enumerate(rows)), name)

    def save(self, path: str | Path) -> None:
        """Write the schedule as .json or .csv."""
        path = Path(path)
        schema.check_writable(path, "a schedule", ScheduleError, (".json", ".csv"))
        if path.suffix == ".json":
            schema.write_json(path, self.to_dict())
        else:
            schema.write_text(path, self.to_csv())

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """Read a schedule from a .json or .csv file, written by `save`, by hand or by torch."""
        path = Path(path)
        if path.suffix == ".csv":
            text = files.read_text(path, ScheduleError)
            with schema.in_file(path, ScheduleError):
                return cls.from_csv(text, path.stem)
        if path.suffix != ".json":
            raise ScheduleError(f"{path}: a schedule file ends in .json or .csv; found '{path.suffix}'")
        data = schema.read(path, ScheduleError)
        with schema.in_file(path, ScheduleError, "a schedule", data):
            return cls.from_dict(data)


def parse_number(value: Any, what: str) -> int:
    """A stage, rank, micro-batch or count out of a file."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,30}", value):
        value = int(value)
    if not schema.is_integer(value) or value > MOST_NUMBER:
        raise ScheduleError(f"{what} = {str(value)[:50]!r} must be a whole number from 0 to {MOST_NUMBER}")
    return value


def parse_numbers(values: Any, what: str) -> tuple[int, ...]:
    """A list of them."""
    if not isinstance(values, list):
        raise ScheduleError(f"{what} must be a list of whole numbers")
    return tuple(parse_number(v, f"{what}[{i}]") for i, v in enumerate(values))


def ends_of_step(ops: Sequence[Op]) -> tuple[list[Op], list[Op]]:
    """(first forward of each stage, last backward op of each stage and kind) among a rank's ops, in order."""
    first: dict[int, Op] = {}
    last: dict[tuple[int, str], Op] = {}
    for op in ops:
        if op.kind == "F":
            first.setdefault(op.stage, op)
        else:
            last[op.stage, op.kind] = op
    return list(first.values()), list(last.values())


def _ops_of_row(rank: int, row: Sequence[str]) -> Iterable[Op]:
    for column, raw in enumerate(row):
        cell = raw.strip()
        overlap = _OVERLAP.fullmatch(cell)
        for part in overlap[1].split(";") if overlap else [cell]:
            if not part or _TORCH_COMMUNICATION.fullmatch(part):
                continue
            try:
                yield Op.parse(part)
            except ScheduleError as e:
                raise ScheduleError(f"row {rank}, cell {column}: {e}") from None
