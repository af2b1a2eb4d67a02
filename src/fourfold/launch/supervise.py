"""Restarts under srun: every task is a supervisor that starts its rank as a child, and starts it again after a failure.

srun ends a job when a task fails, and restarts nothing. So with `--max-restarts` a task is a supervisor and not a rank. The
supervisor of rank 0 hosts the job's store, which outlives the ranks; the ranks are its clients, as under torchrun, and each
attempt uses new keys ([Note: a new key prefix for every attempt] in place.py). torchrun restarts ranks itself and
does not need this.

One attempt, in keys under `supervise/<attempt>/`:

1. `here/<task>`: a supervisor is ready; the value names its node.
2. `members`: the supervisor of rank 0 has seen all tasks, and lists them. If a host is permanently gone and the run may be
   replanned, it lists those that arrived in time, as many as a plan exists for; the others end.
3. Every supervisor starts its rank, numbered by its position in the list.
4. `failed`: a rank has failed. The others end by themselves within seconds (their peer is gone) or are killed; then the next
   attempt.

`supervise/end` ends all: a rank failed for a reason that another attempt cannot change, or all attempts are used up.
If the host of rank 0 is gone, so is the store, and the job ends; a new job can resume from its checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from fourfold.errors import RankFailure
from fourfold.launch.place import Place, store_address
from fourfold.launch.restarts import Restarts, next_delay

__all__ = ["Supervisor", "supervise"]

GRACE = 10.0
"""Seconds that a rank has to end by itself when another has failed."""
POLL = 0.2
ABSENT = 600.0
"""Seconds to wait for a missing task, if the run may not continue without it."""


def supervise(place: Place, command: Sequence[str], restarts: Restarts, fits: Callable[[int], int]) -> int:
    """Run `command` as this task's rank until it succeeds; returns the exit code.

    `fits(n)`: the largest number of ranks, at most n, for which a plan exists; 0: none.
    """
    host, port = store_address(os.environ)
    try:
        store = dist.TCPStore(
            host, port, is_master=place.rank == 0, timeout=timedelta(seconds=60), wait_for_workers=False
        )
    except dist.DistError as e:
        raise RankFailure(f"rank {place.rank} cannot reach the job's store at {host}:{port}: {e}") from None
    node = os.environ.get("SLURM_NODEID", "0")
    supervisor = Supervisor(dist.PrefixStore("supervise", store), place.rank, place.ranks, node, restarts, fits)
    with supervisor.forwarding():
        return supervisor.run(command, {"MASTER_ADDR": host, "MASTER_PORT": str(port)})


class Supervisor:
    """One task of the job."""

    def __init__(
        self,
        store: dist.Store,
        task: int,
        tasks: int,
        node: str,
        restarts: Restarts,
        fits: Callable[[int], int],
    ):
        self.store, self.task, self.tasks, self.node, self.restarts, self.fits = (
            store,
            task,
            tasks,
            node,
            restarts,
            fits,
        )
        self.child: subprocess.Popen[bytes] | None = None
        self.stopped = False

    @contextlib.contextmanager
    def forwarding(self) -> Iterator[None]:
        """Pass requests to stop on to the rank."""

        def forward(number: int, frame: object) -> None:
            self.stopped = True
            self._signal(signal.SIGTERM)

        before = {n: signal.signal(n, forward) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
        try:
            yield
        finally:
            self._signal(signal.SIGKILL)
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, command: Sequence[str], address: Mapping[str, str]) -> int:
        """Run attempts until one succeeds or none is left; returns the exit code of the last."""
        attempt, delay, members = 0, 0.0, list(range(self.tasks))
        try:
            while True:
                nodes = self._meet(attempt, members)
                members = list(nodes)
                if self.task not in nodes:
                    self._say(f"task {self.task} is left out: the run continues on {len(members)} ranks")
                    return 0
                code = self._attempt(command, self._environment(nodes, attempt) | dict(address), attempt)
                if code == 0:
                    self._part(members)
                if code == 0 or self.stopped:
                    return code
                attempt += 1
                if code == 2 or attempt > self.restarts.most:
                    self.store.set("end", str(code))
                    return code
                delay = next_delay(delay, self.restarts.delay, progressed=False)
                if self.task == members[0]:
                    self._say(f"restarting all ranks in {delay:g} s ({attempt} of {self.restarts.most})")
                time.sleep(delay)
        except dist.DistError as e:
            self._signal(signal.SIGKILL)
            raise RankFailure(
                f"task {self.task}: the job's store does not answer; the host of rank 0 is gone, or the network to it. Continue "
                f"with a new job and --resume ({str(e).splitlines()[0]})"
            ) from None

    # ---- rendezvous ----

    def _meet(self, attempt: int, members: Sequence[int]) -> dict[int, str]:
        """The tasks of this attempt, in order, and their nodes."""
        self.store.set(f"{attempt}/here/{self.task}", self.node)
        if self.task == members[0]:
            self.store.set(f"{attempt}/members", json.dumps(self._gather(attempt, members)))
        deadline = time.monotonic() + ABSENT + self.restarts.replan_after
        while not self.store.check([f"{attempt}/members"]):
            self._check_end()
            if time.monotonic() > deadline:
                raise RankFailure(f"task {self.task} waited {ABSENT:.0f} s for the supervisor of rank 0")
            time.sleep(POLL)
        return {int(task): node for task, node in json.loads(self.store.get(f"{attempt}/members")).items()}

    def _gather(self, attempt: int, members: Sequence[int]) -> dict[int, str]:
        """Wait for all tasks, with a limit for a host that is gone."""
        begin, patience = time.monotonic(), ABSENT
        if self.restarts.replan and attempt:
            patience = self.restarts.replan_after
        while True:
            keys = {task: f"{attempt}/here/{task}" for task in members}
            here = {task: key for task, key in keys.items() if self.store.check([key])}
            if len(here) == len(members) or time.monotonic() - begin > patience:
                break
            self._check_end()
            time.sleep(POLL)
        absent = [task for task in members if task not in here]
        if absent and not (self.restarts.replan and attempt):
            self.store.set("end", "1")
            raise RankFailure(
                f"tasks {absent} did not return within {patience:.0f} s; --on-fault replan continues without them"
            )
        count = self.fits(len(here)) if absent else len(here)
        if not count:
            self.store.set("end", "1")
            raise RankFailure(f"tasks {absent} are gone, and no plan exists for the {len(here)} ranks that are left")
        if absent:
            self._say(f"tasks {absent} are gone: continuing on {count} ranks")
        return {task: self.store.get(key).decode() for task, key in list(here.items())[:count]}

    def _check_end(self) -> None:
        if self.store.check(["end"]):
            raise RankFailure(f"task {self.task}: the job was ended by another task; its output says why")

    def _part(self, members: Sequence[int]) -> None:
        """The rank is done. Rank 0's supervisor hosts the store: it stays until the others are done, too."""
        self.store.add("done", 1)
        deadline = time.monotonic() + 3 * GRACE
        while self.task == members[0] and self.store.add("done", 0) < len(members) and time.monotonic() < deadline:
            time.sleep(POLL)

    # ---- one attempt ----

    def _environment(self, nodes: Mapping[int, str], attempt: int) -> dict[str, str]:
        """The place of this task's rank, in torchrun's variables."""
        local = [task for task, node in nodes.items() if node == self.node]
        return {
            "RANK": str(list(nodes).index(self.task)),
            "WORLD_SIZE": str(len(nodes)),
            "LOCAL_RANK": str(local.index(self.task)),
            "LOCAL_WORLD_SIZE": str(len(local)),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_RUN_ID": f"slurm-{os.environ.get('SLURM_JOB_ID', '')}.{os.environ.get('SLURM_STEP_ID', '')}",
            "FOURFOLD_SUPERVISED": "1",
        }

    def _attempt(self, command: Sequence[str], env: Mapping[str, str], attempt: int) -> int:
        """Start the rank and wait for its end; when another rank has failed it is killed after a while."""
        self.child = subprocess.Popen(command, env={**os.environ, **env})
        if self.stopped:  # while it was started
            self._signal(signal.SIGTERM)
        deadline = float("inf")
        while (code := self.child.poll()) is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(POLL)
            if deadline == float("inf") and self.store.check([f"{attempt}/failed"]):
                deadline = time.monotonic() + GRACE
            if time.monotonic() > deadline:
                self._signal(signal.SIGKILL)
        if code:
            self.store.set(f"{attempt}/failed", str(self.task))
        return code if code >= 0 else 1

    def _signal(self, number: int) -> None:
        if self.child is not None and self.child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.child.send_signal(number)

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
