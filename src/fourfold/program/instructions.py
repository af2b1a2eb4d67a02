"""Instructions and programs: what each rank does in one step, as data.

    3F0                          compute: a whole op
    3F0 blocks.2.mlp             compute: the part of an op that uses one unit
    SEND 3 activation 0 to 2     start sending the output of 3F0 to rank 2         (gradient: the output of 3I0 or 3B0)
    RECV 3 activation 0 from 1   post the receive; the op that consumes the message waits for it
    GATHER blocks.2.mlp          start gathering a unit's parameters; the ops that use them wait for it
    RELEASE blocks.2.mlp         free the gathered parameters
    REDUCE blocks.2.mlp          start reducing a unit's gradients
    STREAM head                  start updating a bucket after its units are reduced

A message has one name at both ends: the stage that produced it, its kind, its micro-batch. So the activation of stage 3 feeds
F of stage 4, and the gradient of stage 4 feeds the backward of stage 3.

Only compute blocks a rank: SEND, RECV, GATHER, REDUCE and STREAM start something and return. Messages between two ranks
arrive and are received in the order in which they were sent; a rank's collectives run in the order in which it issues them.

A **unit** is a set of parameters gathered and reduced together. By mode:

| mode | gathered | released | REDUCE is |
|---|---|---|---|
| replicate | never: parameters are not sharded | never | an all-reduce |
| keep | once a step, before its first F | after its last backward | a reduce-scatter |
| zero2 | before F, unless still gathered | when no micro-batch awaits its backward | a reduce-scatter |
| zero3 | before F and before I (or B) | after each | a reduce-scatter |

W uses no parameters. Gradients are reduced once, after the last micro-batch (`reduce = "step"`), or after every micro-batch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from fourfold import files, schema
from fourfold.errors import ScheduleError
from fourfold.program.modes import Mode, ReduceAfter
from fourfold.program.ops import Kind, Op, parse_number, parse_numbers

__all__ = [
    "Gather",
    "Instruction",
    "Program",
    "ProgramBucket",
    "ProgramUnit",
    "Programs",
    "Recv",
    "Reduce",
    "Release",
    "Send",
    "Stream",
    "UnitOp",
    "parse_instruction",
]

MOST_WEIGHT = 1e30
"""Bound on a unit's weight, which may be FLOPs."""
Carried = Literal["activation", "gradient"]


@dataclass(frozen=True, slots=True)
class UnitOp:
    """The part of an op that computes with one unit."""

    stage: int
    kind: Kind
    micro_batch: int
    unit: str

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch} {self.unit}"


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending the result of `stage` for a micro-batch to rank `peer`."""

    stage: int
    kind: Carried
    micro_batch: int
    peer: int

    def __str__(self) -> str:
        return f"SEND {self.stage} {self.kind} {self.micro_batch} to {self.peer}"


@dataclass(frozen=True, slots=True)
class Recv:
    """Post the receive of the result of `stage` for a micro-batch, from rank `peer`."""

    stage: int
    kind: Carried
    micro_batch: int
    peer: int

    def __str__(self) -> str:
        return f"RECV {self.stage} {self.kind} {self.micro_batch} from {self.peer}"


@dataclass(frozen=True, slots=True)
class Gather:
    """Start gathering a unit's parameters."""

    unit: str

    def __str__(self) -> str:
        return f"GATHER {self.unit}"


@dataclass(frozen=True, slots=True)
class Release:
    """Free a unit's gathered parameters."""

    unit: str

    def __str__(self) -> str:
        return f"RELEASE {self.unit}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Start reducing a unit's gradients."""

    unit: str

    def __str__(self) -> str:
        return f"REDUCE {self.unit}"


@dataclass(frozen=True, slots=True)
class Stream:
    """Start updating a bucket."""

    bucket: str

    def __str__(self) -> str:
        return f"STREAM {self.bucket}"


Instruction = Op | UnitOp | Send | Recv | Gather | Release | Reduce | Stream

_MESSAGE = re.compile(r"(SEND|RECV) ([0-9]{1,30}) (activation|gradient) ([0-9]{1,30}) (to|from) ([0-9]{1,30})")
_NAMED: dict[str, type[Gather | Release | Reduce | Stream]] = {
    "GATHER": Gather,
    "RELEASE": Release,
    "REDUCE": Reduce,
    "STREAM": Stream,
}
_FORMS = (
    "3F0",
    "3F0 unit",
    "SEND 3 activation 0 to 2",
    "RECV 3 gradient 0 from 2",
    "GATHER unit",
    "RELEASE unit",
    "REDUCE unit",
    "STREAM bucket",
)


def parse_instruction(text: str) -> Instruction:
    """Parse an instruction from its text form."""
    text = " ".join(text.split())
    message = _MESSAGE.fullmatch(text)
    if message and (message[1] == "SEND") == (message[5] == "to"):
        verb = Send if message[1] == "SEND" else Recv
        stage, micro_batch, peer = (parse_number(message[i], "a number") for i in (2, 4, 6))
        return verb(stage, cast(Carried, message[3]), micro_batch, peer)
    word, _, name = text.partition(" ")
    if word in _NAMED and name and " " not in name:
        return _NAMED[word](name)
    if word[:1].isdigit() and " " not in name:
        op = Op.parse(word)
        return UnitOp(*op, name) if name else op
    raise ScheduleError(f"'{text}' is not an instruction; they look like {', '.join(_FORMS)}")


@dataclass(frozen=True)
class ProgramUnit:
    """Parameters gathered and reduced together. A unit listed in several stages is shared by them (tied weights)."""

    name: str
    mode: Mode = "replicate"
    reduce: ReduceAfter = "step"
    weight: float = 1
    """Its share of the stage's compute time, relative to the other units of the stage."""

    def __post_init__(self) -> None:
        for name, allowed in (("mode", ("replicate", "zero2", "zero3", "keep")), ("reduce", ("step", "micro-batch"))):
            value = getattr(self, name)
            if value not in allowed:
                raise ScheduleError(f"unit '{self.name}': {name} = '{value}'{schema.nearest(str(value), allowed)}")
        if not self.name or self.name.split() != [self.name]:
            raise ScheduleError(f"'{self.name}' is not a unit name: names have no spaces, as in blocks.3.mlp")
        if not 0 <= self.weight <= MOST_WEIGHT:
            raise ScheduleError(
                f"unit '{self.name}': weight = {self.weight} must be at least 0 and at most {MOST_WEIGHT:g}; "
                "use 0 for 'no time'"
            )


@dataclass(frozen=True)
class ProgramBucket:
    """Units whose parameters are updated together."""

    name: str
    units: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """The instructions of one rank for one step; `replica` numbers the copies of the pipeline."""

    rank: int
    instructions: tuple[Instruction, ...]
    replica: int = 0

    def __str__(self) -> str:
        head = f"rank {self.rank} replica {self.replica}"
        return "\n".join([head, *(f"  {instruction}" for instruction in self.instructions)])


@dataclass(frozen=True)
class Programs:
    """The programs of all ranks and replicas, with the units and buckets that they refer to.

    Ranks of one replica exchange messages. The replicas of a rank take part in a unit's GATHER; the replicas of all ranks
    that hold the unit, in its REDUCE.
    """

    programs: tuple[Program, ...]
    placement: tuple[int, ...]
    micro_batches: int
    units: tuple[tuple[ProgramUnit, ...], ...]
    """The units of every stage, in forward order."""
    buckets: tuple[ProgramBucket, ...] = ()

    @property
    def ranks(self) -> int:
        return max(program.rank for program in self.programs) + 1

    def of(self, rank: int, replica: int = 0) -> Program:
        """The program of one rank."""
        for program in self.programs:
            if (program.rank, program.replica) == (rank, replica):
                return program
        raise ScheduleError(f"there is no program of rank {rank}, replica {replica}; ranks are 0 to {self.ranks - 1}")

    @cached_property
    def unit(self) -> dict[str, ProgramUnit]:
        """The units by name."""
        return {unit.name: unit for units in self.units for unit in units}

    @cached_property
    def stages_with(self) -> dict[str, tuple[int, ...]]:
        """The stages that use each unit."""
        out: dict[str, tuple[int, ...]] = {}
        for stage, units in enumerate(self.units):
            for unit in units:
                out[unit.name] = (*out.get(unit.name, ()), stage)
        return out

    def ranks_with(self, unit: str) -> tuple[int, ...]:
        """The ranks that hold a unit, in order."""
        return tuple(sorted({self.placement[stage] for stage in self.stages_with[unit]}))

    def messages(self, replica: int = 0) -> dict[tuple[int, int], tuple[Send, ...]]:
        """By edge (sender, receiver): the messages in sending order."""
        out: dict[tuple[int, int], list[Send]] = {}
        for program in self.programs:
            if program.replica == replica:
                for instruction in program.instructions:
                    if isinstance(instruction, Send):
                        out.setdefault((program.rank, instruction.peer), []).append(instruction)
        return {edge: tuple(sends) for edge, sends in out.items()}

    # ---- files ----

    def __str__(self) -> str:
        """The text form, as read by `parse`."""
        lines = [f"micro_batches {self.micro_batches}", f"placement {' '.join(map(str, self.placement))}"]
        for stage, units in enumerate(self.units):
            lines += [f"unit {stage} {u.name} {u.mode} {u.reduce} {u.weight:g}" for u in units]
        lines += [f"bucket {b.name} {' '.join(b.units)}" for b in self.buckets]
        return "\n".join([*lines, *map(str, self.programs)]) + "\n"

    @classmethod
    def parse(cls, text: str) -> Programs:
        """Parse programs from their text form. Empty lines and lines that start with # are skipped."""
        reader = _ProgramParser()
        for line_number, raw in enumerate(text.splitlines(), 1):
            line = raw.strip()
            if line and not line.startswith("#"):
                try:
                    reader.read(line)
                except (ScheduleError, ValueError) as e:
                    raise ScheduleError(f"line {line_number}: '{line}': {e}") from None
        return reader.programs()

    def to_dict(self) -> dict[str, Any]:
        return {
            "micro_batches": self.micro_batches,
            "placement": list(self.placement),
            "units": [[schema.dump(unit) for unit in units] for units in self.units],
            "buckets": [schema.dump(bucket) for bucket in self.buckets],
            "programs": [
                {"rank": p.rank, "replica": p.replica, "instructions": list(map(str, p.instructions))}
                for p in self.programs
            ],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Programs:
        try:
            return cls(
                programs=tuple(
                    Program(
                        parse_number(p["rank"], "rank"),
                        tuple(map(parse_instruction, p["instructions"])),
                        parse_number(p["replica"], "replica"),
                    )
                    for p in data["programs"]
                ),
                placement=parse_numbers(data["placement"], "placement"),
                micro_batches=parse_number(data["micro_batches"], "micro_batches"),
                units=tuple(
                    tuple(schema.build(ProgramUnit, unit, "unit", ScheduleError) for unit in units)
                    for units in data["units"]
                ),
                buckets=tuple(
                    schema.build(ProgramBucket, bucket, "bucket", ScheduleError) for bucket in data["buckets"]
                ),
            )
        except KeyError as e:
            raise ScheduleError(f"not a set of programs: {e} is missing") from None
        except (TypeError, AttributeError) as e:
            raise ScheduleError(f"not a set of programs: {str(e)[:200]}") from None

    def save(self, path: str | Path) -> None:
        """Write the programs as .json or .txt."""
        path = Path(path)
        schema.check_writable(path, "a set of programs", ScheduleError, (".json", ".txt"))
        if path.suffix == ".json":
            schema.write_json(path, self.to_dict())
        else:
            schema.write_text(path, str(self))

    @classmethod
    def load(cls, path: str | Path) -> Programs:
        """Read programs written by `save` or by hand."""
        path = Path(path)
        if path.suffix == ".txt":
            text = files.read_text(path, ScheduleError)
            with schema.in_file(path, ScheduleError):
                return cls.parse(text)
        data = schema.read(path, ScheduleError)
        with schema.in_file(path, ScheduleError, "a set of programs", data):
            return cls.from_dict(data)


class _ProgramParser:
    """Parses the text form line by line."""

    def __init__(self) -> None:
        self.micro_batches = 0
        self.placement: tuple[int, ...] = ()
        self.units: list[tuple[int, ProgramUnit]] = []
        self.buckets: list[ProgramBucket] = []
        self.rows: list[tuple[int, int, list[Instruction]]] = []

    def read(self, line: str) -> None:
        match line.split():
            case ["micro_batches", count]:
                self.micro_batches = parse_number(count, "micro_batches")
            case ["placement", *ranks]:
                self.placement = parse_numbers(ranks, "placement")
            case ["unit", stage, name, mode, reduce, weight]:
                self.units.append(
                    (
                        parse_number(stage, "stage"),
                        ProgramUnit(name, cast(Mode, mode), cast(Any, reduce), float(weight)),
                    )
                )
            case ["bucket", name, *units]:
                self.buckets.append(ProgramBucket(name, tuple(units)))
            case ["rank", rank, "replica", replica]:
                self.rows.append((parse_number(rank, "rank"), parse_number(replica, "replica"), []))
            case _ if self.rows:
                self.rows[-1][2].append(parse_instruction(line))
            case _:
                raise ScheduleError("instructions follow a line 'rank R replica 0'")

    def programs(self) -> Programs:
        if not (self.placement and self.micro_batches and self.rows):
            raise ScheduleError(
                "a set of programs has a line 'micro_batches N', a line 'placement R R ...' and programs"
            )
        units = tuple(self._of_stage(stage) for stage in range(len(self.placement)))
        programs = tuple(Program(rank, tuple(instructions), replica) for rank, replica, instructions in self.rows)
        return Programs(programs, self.placement, self.micro_batches, units, tuple(self.buckets))

    def _of_stage(self, stage: int) -> tuple[ProgramUnit, ...]:
        return tuple(unit for at, unit in self.units if at == stage)
