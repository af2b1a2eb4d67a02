"""What each rank will do, as data: schedules, programs, and their proof, timing and search. Pure Python, no torch.

build("wave", ranks=4, micro_batches=8, waves=2)      a schedule by name
validate(schedule, memory_cap=8)                      raises ScheduleError unless it can run
simulate(schedule, Costs(message=0.05))               -> Timeline: makespan, bubble, memory, critical path
synthesize(ranks=8, micro_batches=32, memory_cap=8)   the best schedule that a search finds
lower(schedule, units, buckets)                       -> Programs: one list of instructions per rank
"""

from fourfold.errors import ScheduleError
from fourfold.program.costs import Costs
from fourfold.program.instructions import (
    Bucket,
    Gather,
    Instruction,
    Part,
    Program,
    Programs,
    Recv,
    Reduce,
    Release,
    Send,
    Stream,
    Unit,
)
from fourfold.program.lowering import lower
from fourfold.program.ops import Op, Schedule
from fourfold.program.schedules import build, forward_only, fused, loop, names, register, split, zigzag
from fourfold.program.simulator import simulate
from fourfold.program.timeline import Peak, Span, Timeline
from fourfold.program.validator import validate

__all__ = [
    "Bucket",
    "Costs",
    "Gather",
    "Instruction",
    "Op",
    "Part",
    "Peak",
    "Program",
    "Programs",
    "Recv",
    "Reduce",
    "Release",
    "Schedule",
    "ScheduleError",
    "Send",
    "Span",
    "Stream",
    "Timeline",
    "Unit",
    "build",
    "forward_only",
    "fused",
    "loop",
    "lower",
    "names",
    "register",
    "simulate",
    "split",
    "validate",
    "zigzag",
]
