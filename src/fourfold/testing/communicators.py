"""No process group, and on NCCL no communicator, is made after training has started.

    fit(config, plan, callbacks=[NoLateGroups()])       # in every rank

A communicator that is made inside a step waits for ranks that may be waiting for this one (train/connect.py). Groups are
counted on every backend; communicators by their address on NCCL.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fourfold.train._torch import communicator, process_groups
from fourfold.train.callbacks import Callback, RunInfo

__all__ = ["NoLateGroups"]


class NoLateGroups(Callback):
    """Raises AssertionError when a step, an evaluation or a save made a process group or a communicator."""

    def on_start(self, run: RunInfo, step: int) -> None:
        self._before = self._found()

    def on_step(self, run: RunInfo, metrics: dict[str, Any]) -> None:
        self._check()

    on_eval = on_step

    def on_end(self, run: RunInfo, step: int) -> None:
        self._check()

    def _check(self) -> None:
        late = [what for what, address in self._found().items() if self._before.get(what) != address]
        if late:
            raise AssertionError(f"made after the start of training: {', '.join(map(repr, late))}")

    def _found(self) -> dict[str, int]:
        """Groups by what they are for and their number; each with the address of its communicator, 0: none."""
        if not dist.is_initialized():
            return {}
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None
        found = {}
        for number, group in enumerate(process_groups()):
            name = group.group_desc or "group"
            key = name if name not in found else f"{name} {number}"
            found[key] = (communicator(group, device) or 0) if device is not None else 0
        return found
