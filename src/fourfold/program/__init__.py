"""Schedules and programs as data: what each rank does in a step; validation, simulation and search. No torch.

build("wave", ranks=4, micro_batches=8, waves=2)      a schedule by name
validate(schedule, memory_cap=8)                      raises ScheduleError unless it can run
simulate(schedule, Costs(message=0.05))               -> Timeline: makespan, bubble, memory, critical path
synthesize(ranks=8, micro_batches=32, memory_cap=8)   the best schedule that a search finds
lower(schedule, units, buckets)                       -> Programs: one list of instructions per rank
"""

from fourfold.errors import ScheduleError
from fourfold.program.costs import Costs
from fourfold.program.instructions import (
    Gather,
    Instruction,
    Program,
    ProgramBucket,
    Programs,
    ProgramUnit,
    Recv,
    Reduce,
    Release,
    Send,
    Stream,
    UnitOp,
    parse_instruction,
)
from fourfold.program.lowering import lower
from fourfold.program.ops import Op, Schedule
from fourfold.program.partition import Layer
from fourfold.program.schedules import build, forward_only, fused, loop, names, register, split, zigzag
from fourfold.program.simulator import simulate
from fourfold.program.synthesis.synthesizer import Synthesis, search, synthesize
from fourfold.program.timeline import MemoryPeak, Timeline, TimelineSpan
from fourfold.program.validator import validate
from fourfold.program.waves import choose_waves

__all__ = [
    "Costs",
    "Gather",
    "Instruction",
    "Layer",
    "MemoryPeak",
    "Op",
    "Program",
    "ProgramBucket",
    "ProgramUnit",
    "Programs",
    "Recv",
    "Reduce",
    "Release",
    "Schedule",
    "ScheduleError",
    "Send",
    "Stream",
    "Synthesis",
    "Timeline",
    "TimelineSpan",
    "UnitOp",
    "build",
    "choose_waves",
    "forward_only",
    "fused",
    "loop",
    "lower",
    "names",
    "parse_instruction",
    "register",
    "search",
    "simulate",
    "split",
    "synthesize",
    "validate",
    "zigzag",
]
