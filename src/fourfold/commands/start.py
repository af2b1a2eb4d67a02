"""Starts the ranks of a run on this machine, restarts them after a failure, and continues with fewer ranks if requested."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from rich.console import Console

from fourfold.config import Config
from fourfold.errors import PlanError, RankFailure
from fourfold.launch.restarts import Restarts, next_delay
from fourfold.plan import Plan
from fourfold.view.text import markup

if TYPE_CHECKING:
    from collections.abc import Callable

    from fourfold.program.stages import PipelineLayout
    from fourfold.train.rundir import RunDir

__all__ = ["fewer_ranks", "start_ranks"]


def start_ranks(
    console: Console,
    config: Config,
    plan: Plan,
    layout: PipelineLayout,
    run: RunDir,
    restarts: Restarts,
    planned: Callable[[Config, int, Plan], Plan],
) -> bool:
    """Start the ranks, and restart them after a failure as often as allowed. False: stopped before training began.

    `planned(config, n, plan)` makes a plan for n ranks with the settings of `plan`. With `restarts.replan`, a run that fails
    after all restarts continues on the largest smaller number of ranks for which there is a plan.
    """
    from fourfold.checkpoint.save_load import newest
    from fourfold.launch.local import launch_local
    from fourfold.supervision.flight import begin_attempt, note, write_flight
    from fourfold.train.worker import work

    count, delay = 0, 0.0
    while True:
        begin_attempt(run)
        before = newest(run.checkpoints)

        def job(place, store, screen, plan=plan, layout=layout):  # type: ignore[no-untyped-def]
            return work(place, store, config, plan, layout, run, console=screen)

        try:
            return launch_local(job, plan.mesh.ranks, run.logs)
        except RankFailure as e:
            note(run, "failure", time=e.shown, kind=e.kind, rank=e.rank, message=str(e), after_stop=e.after_stop)
            for rank, report in e.reports.items():
                write_flight(run, rank, **report)
            if e.exit_code == 2 or e.after_stop:
                raise
            smaller = None
            if count == restarts.most:
                smaller = fewer_ranks(config, plan, planned) if restarts.replan else None
                if smaller is None:
                    raise
            console.print(f"[red]{markup(str(e).splitlines()[0])}[/]", soft_wrap=True)
            last = newest(run.checkpoints)
            delay = next_delay(delay, restarts.delay, last != before)
            if smaller is None:
                count += 1
                said = f"restarting from {last or 'the beginning'} ({count} of {restarts.most})"
                note(run, "restart", number=count)
            else:
                _leave_out_gpu(config, e.rank)
                old, (plan, layout), count = plan, smaller, 0
                ranks = f"{plan.mesh.ranks} of {old.mesh.ranks} ranks"
                said = f"continuing on {ranks} ({plan.mesh.product()}) from {last or 'the beginning'}"
                note(run, "replan", ranks=plan.mesh.ranks, mesh=plan.mesh.product())
            console.print(markup(f"{said} in {delay:g} s"), soft_wrap=True)
            time.sleep(delay)


def fewer_ranks(
    config: Config, plan: Plan, planned: Callable[[Config, int, Plan], Plan]
) -> tuple[Plan, PipelineLayout] | None:
    """A plan for the largest smaller number of ranks for which there is one; None: there is none."""
    for ranks in range(plan.mesh.ranks - 1, 0, -1):
        try:
            made = planned(config, ranks, plan)
            return made, made.check(config, ranks)
        except PlanError:
            continue
    return None


def _leave_out_gpu(config: Config, rank: int) -> None:
    """Hide a rank's GPU, which may be defective, from ranks that are started from now on."""
    if config.train.device == "cpu" or rank < 0:
        return
    import torch

    count = torch.cuda.device_count()
    if count > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        visible = visible if len(visible) == count else [str(i) for i in range(count)]
        del visible[rank % count]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
