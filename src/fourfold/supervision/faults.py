"""Fault injection: kill, stop, raise in or delay a rank in any phase of a run, to test that the run survives it.

    FOURFOLD_FAULTS="kill rank=1 step=5; delay rank=0 step=3 seconds=0.5" fourfold train CONFIG --nproc 4 --max-restarts 1

| fault | what happens to the rank |
|---|---|
| `kill`  | SIGKILL, as from the kernel's OOM killer or a lost machine; `after=0.05` seconds later |
| `stop`  | SIGSTOP: the process is alive but does nothing, as in a hang |
| `raise` | a RuntimeError |
| `delay` | it sleeps for `seconds` |
| `slow`  | from then on, every op begins `seconds` later |
| `skip`  | it does not take part in the collective at the end of the step |
| `memory` | a CUDA out-of-memory error |
| `flip`  | a bit flip in one of its copies of the weights; `name=` is part of the weight's name |

`step` counts from 1, as in metrics.jsonl; `op=3F0` waits for that instruction of the step, `op=evaluation` for its evaluation,
`op=save` for its save, `op=final` for the end of the run after it, in which rank 0 writes final/. With `step=0`, `op=start` is
the start of the rank and `op=connect` the moment before it connects to the other ranks. Each fault happens once in a run, even
across restarts: run_dir/faults/ records those that have happened.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fourfold.errors import ConfigError
from fourfold.schema import nearest

__all__ = ["Fault", "Faults", "parse"]

KINDS = ("kill", "stop", "raise", "delay", "slow", "skip", "memory", "flip")
FIELDS = ("rank", "step", "op", "seconds", "name", "after")


@dataclass(frozen=True)
class Fault:
    """One injected fault."""

    kind: str
    rank: int
    step: int
    op: str = ""
    seconds: float = 1.0
    name: str = ""
    after: float = 0.0


def parse(text: str) -> list[Fault]:
    """Faults from `kill rank=1 step=5; delay rank=0 step=3 seconds=0.5`."""
    faults = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        kind, *pairs = part.split()
        if kind not in KINDS:
            raise ConfigError(f"fault '{part}': unknown kind '{kind}'{nearest(kind, KINDS)}")
        fields = dict(p.partition("=")[::2] for p in pairs)
        for name in fields:
            if name not in FIELDS:
                raise ConfigError(f"fault '{part}': unknown field '{name}'{nearest(name, FIELDS)}")
        try:
            faults.append(
                Fault(
                    kind,
                    int(fields["rank"]),
                    int(fields["step"]),
                    fields.get("op", ""),
                    float(fields.get("seconds", 1)),
                    fields.get("name", ""),
                    float(fields.get("after", 0)),
                )
            )
        except (KeyError, ValueError) as e:
            raise ConfigError(f"fault '{part}': needs whole numbers for rank and step ({e})") from None
    return faults


class Faults:
    """The faults of one rank; `at` is called wherever one may happen."""

    def __init__(self, faults: Sequence[Fault], rank: int, notes: Path):
        self._faults = [(i, f) for i, f in enumerate(faults) if f.rank == rank]
        self._notes = notes
        self.flip: Callable[[str], None] | None = None
        """Changes a bit of a weight of this rank; set by the loop, which has them."""
        self._late = 0.0  # seconds by which every op begins later
        self._skip = False

    @classmethod
    def from_environment(cls, env: Mapping[str, str], rank: int, notes: Path) -> Faults | None:
        """The faults of FOURFOLD_FAULTS, or None."""
        text = env.get("FOURFOLD_FAULTS", "")
        return cls(parse(text), rank, notes) if text else None

    def at(self, step: int, op: str = "") -> None:
        """Called when the rank is about to run `op` of `step` ("": to begin the step)."""
        for number, fault in self._faults:
            if fault.step == step and fault.op == op and self._first_time(number):
                if fault.kind == "flip" and self.flip is not None:
                    self.flip(fault.name)
                self._late += fault.seconds if fault.kind == "slow" else 0.0
                self._skip |= fault.kind == "skip"
                _happen(fault)
        if op and self._late:
            time.sleep(self._late)

    def skips(self) -> bool:
        """Whether the rank skips the collective that it comes to; once per fault."""
        skip, self._skip = self._skip, False
        return skip

    def _first_time(self, number: int) -> bool:
        self._notes.mkdir(parents=True, exist_ok=True)
        try:
            (self._notes / str(number)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _happen(fault: Fault) -> None:
    match fault.kind:
        case "kill":
            if fault.after:
                threading.Timer(fault.after, os.kill, (os.getpid(), signal.SIGKILL)).start()
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise RuntimeError(f"an injected fault, at step {fault.step}")
        case "delay":
            time.sleep(fault.seconds)
        case "memory":
            raise RuntimeError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1.12 GiB is "
                "free."
            )
