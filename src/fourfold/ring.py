"""Collectives for CPU tensors over gloo's send and receive: rings, chains and pairwise exchanges of minimal traffic.

gloo's own reduce-scatter moves as many bytes as an all-reduce, its broadcast sends log2 n copies from the root, and between two
ranks its all-gather uses one direction at a time. Here, for S bytes on n ranks (s = S / n is a rank's part), each link carries

    all_gather, reduce_scatter   n - 1 steps of s to the next rank of the ring
    all_reduce                   both, one after the other: 2 (n - 1) s; two ranks exchange their S
    broadcast, reduce            S along a chain that starts or ends at the root, CHUNK bytes at a time
    exchange (all-to-all)        n - 1 steps of s, each with another rank

Every receive is posted before the send that follows it: posting notifies the sender that a buffer is ready, and the notification
would otherwise queue behind bulk data. A reduce-scatter needs buffers for a few parts (at least three, up to ROOM bytes).

The collectives of a group run in the order in which they were started, in a thread of that group (a `Lane`), or in the caller's
thread if it waits at once and nothing is queued; those of different groups run concurrently. The order of summation depends only
on ranks and sizes: results are bit-identical in every run, and for an all-reduce on every rank. An error names the rank that
was being waited for, and fails every later collective of the lane.

The environment variable FOURFOLD_COLLECTIVES selects the implementation: `auto` (rings from SMALLEST bytes up; asynchronous sums
only between two ranks), `ring` or `gloo`.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.background import start_thread
from fourfold.errors import CommunicationError

__all__ = ["Job", "Lane", "lane_for", "plain"]

SMALLEST = 32 << 10
CHUNK = 64 << 10
ROOM = 4 << 20
TAGS = 1 << 30  # first tag of rings; other messages on the same group have smaller ones


def lane_for(group: dist.ProcessGroup, x: Tensor, *, overlapped: bool = False) -> Lane | None:
    """The lane for a collective on `x` (the whole payload) in a group; None: use the backend's own collectives.

    `overlapped`: for an asynchronous sum.
    """
    if not x.is_cpu:
        return None
    requested = os.environ.get("FOURFOLD_COLLECTIVES", "auto")
    if x.nbytes < SMALLEST and (requested != "ring" or x.numel() < group.size()):  # or empty parts
        return None
    if requested == "gloo" or (overlapped and requested == "auto" and group.size() > 2):
        return None
    try:
        return _lanes[group]
    except KeyError:
        lane = _lanes[group] = Lane(group) if group.size() > 1 and "gloo" in _backend(group) else None
        return lane


# A lane lives as long as its group; torch's groups take no attributes.
_lanes: weakref.WeakKeyDictionary[dist.ProcessGroup, Lane | None] = weakref.WeakKeyDictionary()


def _backend(group: dist.ProcessGroup) -> str:
    """The backend of a group for CPU tensors."""
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    return next((part.partition(":")[2] for part in config.split(",") if part.startswith("cpu:")), "")


class Job:
    """A collective in progress."""

    def __init__(self, work: Callable[[_Ring], None], ring: _Ring, what: str):
        self._work, self._ring, self._what, self._under_way = work, ring, what, threading.Lock()
        self._under_way.acquire()
        self._error: CommunicationError | None = None

    def run(self, error: CommunicationError | None) -> CommunicationError | None:
        """Run it, unless the lane has failed; returns the error that fails the lane from now on."""
        try:
            if error is None:
                self._work(self._ring)
        except Exception as e:  # if the thread ended here, its callers would wait forever
            error = CommunicationError(f"failed waiting for {self._what}: {self._ring.failed}{plain(e)}")
            error.__cause__ = e
        self._error = error
        del self._work, self._ring  # and the tensors
        self._under_way.release()
        return error

    def wait(self) -> None:
        """Block until the result is complete."""
        with self._under_way:
            pass
        if self._error is not None:
            raise CommunicationError(str(self._error)) from self._error


def plain(error: Exception) -> str:
    """The first line of a gloo error, without its source location and advice."""
    text = re.sub(r"\[\S+\.cc:\d+\] ", "", str(error)).split(". This is typically")[0].strip()
    return text.splitlines()[0] if text else type(error).__name__


class Lane:
    """The collectives of one group: started by any thread, in the same order on all ranks, and run one after another.

    `now`: the caller waits at once.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._jobs = _Jobs()
        self._started = 0
        self._group = weakref.ref(group)  # the lane must not keep its group alive
        self.name, self.size, self.index = group.group_name, group.size(), group.rank()
        jobs = self._jobs  # the thread must not keep the lane alive
        start_thread(lambda: _serve(jobs), f"collectives of {self.name}", lambda: jobs.queue.put(None))

    def __del__(self) -> None:
        self._jobs.queue.put(None)

    def all_gather(self, out: Tensor, mine: Tensor, what: str, now: bool = False) -> Job:
        """out [n · a] = every rank's mine [a]."""

        def work(ring: _Ring) -> None:
            parts = out.view(-1).chunk(ring.size)
            if parts[ring.index].data_ptr() != mine.data_ptr():
                parts[ring.index].copy_(mine.view(-1))
            ring.gather(parts)

        return self._start(work, what, now)

    def reduce_scatter(self, out: Tensor, whole: Tensor, what: str, now: bool = False) -> Job:
        """out [a] = this rank's part of the sum of whole [n · a]."""
        return self._start(lambda ring: ring.scatter(whole.view(-1).chunk(ring.size), out.view(-1)), what, now)

    def all_reduce(self, x: Tensor, what: str, now: bool = False) -> Job:
        """x = the sum of x."""

        def work(ring: _Ring) -> None:
            if ring.size == 2:  # the same bytes in one step
                ring.swap_sum(x.view(-1))
            else:
                parts = x.view(-1).tensor_split(ring.size)
                ring.scatter(parts, parts[ring.index])
                ring.gather(parts)

        return self._start(work, what, now)

    def broadcast(self, x: Tensor, source: int, what: str, now: bool = False) -> Job:
        """x = that of rank `source` of the group."""
        return self._start(lambda ring: ring.pass_on(x.view(-1), source), what, now)

    def reduce(self, x: Tensor, target: int, what: str, now: bool = False) -> Job:
        """x = the sum of x, on rank `target` of the group; elsewhere x is overwritten."""
        return self._start(lambda ring: ring.sum_up(x.view(-1), target), what, now)

    def exchange(self, out: Tensor, x: Tensor, what: str, now: bool = False) -> Job:
        """Part r of x goes to rank r."""
        return self._start(
            lambda ring: ring.exchange(out.view(-1).chunk(ring.size), x.view(-1).chunk(ring.size)), what, now
        )

    def _start(self, work: Callable[[_Ring], None], what: str, now: bool) -> Job:
        group, jobs = self._group(), self._jobs
        assert group is not None
        with jobs.lock:  # the number is the position in the queue
            job = Job(work, _Ring(group, TAGS + self._started % TAGS, self.size, self.index), what)
            self._started += 1
            if now and not jobs.waiting:
                jobs.run(job)
            else:
                jobs.waiting += 1
                jobs.queue.put(job)
        return job


class _Jobs:
    """State shared by a lane and its thread."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.waiting = 0  # in the queue, or being run by the thread
        self.error: CommunicationError | None = None

    def run(self, job: Job) -> None:
        with torch.inference_mode():  # may write to any tensor, records nothing
            self.error = job.run(self.error)


def _serve(jobs: _Jobs) -> None:
    while (job := jobs.queue.get()) is not None:
        jobs.run(job)
        with jobs.lock:
            jobs.waiting -= 1
        del job


class _Ring:
    """The messages of one collective, under a tag of its own."""

    def __init__(self, group: dist.ProcessGroup, tag: int, size: int, index: int):
        self.group, self.tag, self.size, self.index = group, tag, size, index
        self._sent: list[tuple[Any, int]] = []
        self._doing, self._offset = "", 0

    def gather(self, parts: Sequence[Tensor]) -> None:
        """Step t: part (index - t) goes to the next rank, part (index - t - 1) comes from the one before."""
        steps = range(self.size - 1)
        coming = [self._receive(parts[self.index - t - 1], -1) for t in steps]
        for t in steps:
            self._send(parts[self.index - t], 1)
            self._arrive(coming[t], -1)
        self._leave()

    def scatter(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Step t: send the partial sum of part (index - t - 1), receive that of part (index - t - 2); the last is ours."""
        steps, longest = self.size - 1, parts[0]
        ahead = min(steps, max(3, ROOM // max(1, longest.nbytes)))
        buffers = longest.new_empty(ahead, longest.numel()).unbind()

        def post(t: int) -> tuple[Tensor, Any]:
            buffer = buffers[t % ahead][: parts[self.index - t - 2].numel()]
            return buffer, self._receive(buffer, -1)

        coming = [post(t) for t in range(ahead)]
        going = parts[self.index - 1]
        for t in range(steps):
            if ahead <= t + ahead - 2 < steps:  # its buffer was sent in the previous step
                self._leave()
                coming.append(post(t + ahead - 2))
            self._send(going, 1)
            going, work = coming[t]
            self._arrive(work, -1)
            torch.add(going, parts[self.index - t - 2], out=going if t < steps - 1 else out)
        self._leave()

    def swap_sum(self, x: Tensor) -> None:
        theirs = torch.empty_like(x)
        coming = self._receive(theirs, 1)
        self._send(x, 1)
        self._arrive(coming, 1)
        self._leave()
        x.add_(theirs)

    def pass_on(self, x: Tensor, source: int) -> None:
        """The chain starts at `source` and ends before it."""
        place = (self.index - source) % self.size
        chunks = self._chunks(x)
        coming = [self._receive(c, -1) for c in chunks] if place > 0 else []
        for k, chunk in enumerate(chunks):
            if place > 0:
                self._arrive(coming[k], -1)
            if place < self.size - 1:
                self._send(chunk, 1)
        self._leave()

    def sum_up(self, x: Tensor, target: int) -> None:
        """The chain starts after `target` and ends there."""
        place = (self.index - target - 1) % self.size
        chunks = self._chunks(x)
        buffers = [torch.empty_like(c) for c in chunks] if place > 0 else []
        coming = [self._receive(b, -1) for b in buffers]
        for k, chunk in enumerate(chunks):
            if place > 0:
                self._arrive(coming[k], -1)
                chunk.add_(buffers[k])
            if place < self.size - 1:
                self._send(chunk, 1)
        self._leave()

    def exchange(self, out: Sequence[Tensor], x: Sequence[Tensor]) -> None:
        """A step starts when the part of the step before has arrived; small parts: when less than CHUNK bytes are in flight."""
        steps, ahead = _meetings(self.size, self.index), max(1, CHUNK // max(1, x[0].nbytes))
        coming = [(self._receive(out[source], source - self.index), source - self.index) for _, source in steps]
        out[self.index].copy_(x[self.index])
        for t, (target, _) in enumerate(steps):
            if t >= ahead:
                self._arrive(*coming[t - ahead])
            self._send(x[target], target - self.index)
        for work, offset in coming[-ahead:]:
            self._arrive(work, offset)
        self._leave()

    def _chunks(self, x: Tensor) -> Sequence[Tensor]:
        """Chunks of a chain; between two ranks there is nothing to pipeline."""
        return [x] if self.size == 2 else x.split(max(1, CHUNK // x.element_size()))

    # ---- messages to and from the rank at `offset` from this one ----

    def _receive(self, x: Tensor, offset: int) -> Any:
        self._doing, self._offset = "cannot receive from", offset
        return self.group.recv([x], (self.index + offset) % self.size, self.tag)

    def _arrive(self, work: Any, offset: int) -> None:
        self._doing, self._offset = "no data from", offset
        work.wait()
        self._doing = ""

    def _send(self, x: Tensor, offset: int) -> None:
        self._doing, self._offset = "cannot send to", offset
        self._sent.append((self.group.send([x], (self.index + offset) % self.size, self.tag), offset))

    def _leave(self) -> None:
        """Wait until all sends are complete: their buffers may then be overwritten."""
        self._doing = "data not taken by"
        for work, offset in self._sent:
            self._offset = offset
            work.wait()
        self._sent = []

    @property
    def failed(self) -> str:
        """Which message failed, if one did."""
        if not self._doing:
            return ""
        rank = dist.get_process_group_ranks(self.group)[(self.index + self._offset) % self.size]
        return f"{self._doing} rank {rank}: "


def _meetings(size: int, index: int) -> list[tuple[int, int]]:
    """For each step of an exchange, the ranks to send to and to receive from.

    With an even number of ranks, pairs exchange: then no rank receives two parts at once because another is ahead (which makes
    steps of 8 ranks with 72 KiB 1.7 times as long). With an odd number, step t sends t ranks ahead and receives from t behind.
    """
    if size % 2:
        return [((index + t) % size, (index - t) % size) for t in range(1, size)]
    last = size - 1  # round-robin of the others; the one without a partner is paired with the last
    with_me = [(t - index) % last if index < last else t * size // 2 % last for t in range(last)]
    return [(other, other) for other in (last if rank == index else rank for rank in with_me)]
