"""A training step and an evaluation of one rank, with either executor."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from fourfold.program import Program
from fourfold.runtime.executor import Executor, Feed, Span
from fourfold.runtime.message_driven import Drive, run_driven

__all__ = ["Runner"]


class Runner:
    """Runs the program of a training step, ordered or message-driven (`drive`), and the program of an evaluation."""

    def __init__(
        self,
        executor: Executor,
        program: Program,
        evaluation: Program,
        *,
        drive: Drive | None = None,
        together: dist.ProcessGroup | None = None,
    ):
        self.executor, self.program, self.evaluation = executor, program, evaluation
        self.drive, self.together = drive, together

    def step(self, index: int, feed: Feed) -> dict[int, Any]:
        """Forward and backward of all micro-batches; returns the losses, if the last stage is on this rank."""
        for stage in self.executor.stages.values():
            stage.step = index
        if self.drive is not None:
            return run_driven(self.executor, self.drive, feed, together=self.together)
        return self.executor.run(self.program, feed)

    def evaluate(self, feed: Feed) -> dict[int, Any]:
        """Forward only."""
        return self.executor.run(self.evaluation, feed, evaluate=True)

    @property
    def spans(self) -> list[Span]:
        """The computations of the last run."""
        return self.executor.spans
