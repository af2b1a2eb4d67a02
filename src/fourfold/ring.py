"""Collectives for CPU tensors over gloo's send and receive: rings, chains and pairwise exchanges that move no byte twice.

gloo's own reduce-scatter moves what an all-reduce does, its broadcast sends log2 n copies from the root, and two ranks
that gather from each other do so one after the other. Here each link carries, of S bytes on n ranks (s = S / n one rank's part):

    all_gather, reduce_scatter   n - 1 steps of s to the next rank of the ring
    all_reduce                   the one, then the other: 2 (n - 1) s; two ranks swap their S, and so do 4, 8, 16 … ranks
                                 pair by pair in log2 n steps while S is at most SHORT: messages then are what takes time
    broadcast, reduce            S down a chain that starts or ends at the root, CHUNK bytes at a time
    exchange (all-to-all)        n - 1 steps of s; in step t with the ranks t before and t after

Every receive is posted before the send that follows: a receive tells its sender that there is room, and that notice would
otherwise queue behind bulk data. A reduce-scatter holds a few parts (three at least, up to ROOM bytes) beside its input.

The collectives of a group run in the order in which they were started, in a thread of the group's own (a `Lane`), or in the
caller's where it waits anyway and nothing is before them; those of different groups run at the same time. A sum is taken in
an order that depends on ranks and sizes alone: the same bits in every run, and for an all-reduce on every rank. A failure
names the rank that was waited for, and fails what follows on the lane.

FOURFOLD_COLLECTIVES=gloo in the environment leaves all of it to gloo, whose own rings send each part in halves: of small
tensors on eight ranks they take twice as long.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.errors import CommunicationError

__all__ = ["Job", "Lane", "lane_for", "plain"]

SHORT = 32 << 10
CHUNK = 64 << 10
ROOM = 4 << 20
TAGS = 1 << 30  # and up: far from those of anyone who sends messages on the same group


def lane_for(group: dist.ProcessGroup, x: Tensor) -> Lane | None:
    """The lane that serves a collective on `x` (its whole payload) in a group; None: the backend's own collectives do."""
    if x.device.type != "cpu" or os.environ.get("FOURFOLD_COLLECTIVES") == "gloo":
        return None
    if x.numel() < (1 if _few_steps(x, group.size()) else group.size()):  # empty parts
        return None
    if group not in _lanes:
        _lanes[group] = Lane(group) if group.size() > 1 and "gloo" in _backend(group) else None
    return _lanes[group]


# A group's lane lives as long as the group, and torch's groups take no attributes.
_lanes: weakref.WeakKeyDictionary[dist.ProcessGroup, Lane | None] = weakref.WeakKeyDictionary()


def _few_steps(x: Tensor, ranks: int) -> bool:
    """Whether ranks sum x pair by pair."""
    return x.nbytes <= SHORT and ranks & (ranks - 1) == 0


def _backend(group: dist.ProcessGroup) -> str:
    """What serves a group's CPU tensors."""
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    return next((part.partition(":")[2] for part in config.split(",") if part.startswith("cpu:")), "")


class Job:
    """A collective under way."""

    def __init__(self, work: Callable[[], None], what: str):
        self._work, self._what, self._done = work, what, threading.Event()
        self._error: CommunicationError | None = None

    def run(self, error: CommunicationError | None) -> CommunicationError | None:
        """Do it, unless the lane failed before; what is returned is why the lane fails from now on."""
        try:
            if error is None:
                self._work()
        except Exception as e:  # a thread that ended here would be waited for for ever
            error = CommunicationError(f"waited in vain for {self._what}: {plain(e)}")
            error.__cause__ = e
        self._error = error
        del self._work  # and the tensors
        self._done.set()
        return error

    def wait(self) -> None:
        """Block until the result is there."""
        self._done.wait()
        if self._error is not None:
            raise CommunicationError(str(self._error)) from self._error


def plain(error: Exception) -> str:
    """gloo's message without the place in its source and its advice."""
    return re.sub(r"\[\S+\.cc:\d+\] ", "", str(error)).split(". This is typically")[0].splitlines()[0]


class Lane:
    """The collectives of one group: started by any thread, in one order on all ranks; run one after another.

    `now`: the caller waits for it at once.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._jobs = _Jobs()
        self._started = 0
        self._group = weakref.ref(group)  # the lane is the group's, not the group the lane's
        title = f"collectives of {group.group_name}"
        threading.Thread(target=_serve, args=(self._jobs,), name=title, daemon=True).start()

    def __del__(self) -> None:
        self._jobs.queue.put(None)

    def all_gather(self, out: Tensor, mine: Tensor, what: str, now: bool = False) -> Job:
        """out [n · a] = every rank's mine [a]."""
        flat_out, flat_mine = _flat(out), _flat(mine)

        def work(ring: _Ring) -> None:
            parts = list(flat_out.chunk(ring.size))
            if parts[ring.index].data_ptr() != flat_mine.data_ptr():
                parts[ring.index].copy_(flat_mine)
            ring.gather(parts)

        return self._start(work, what, now)

    def reduce_scatter(self, out: Tensor, whole: Tensor, what: str, now: bool = False) -> Job:
        """out [a] = this rank's part of the sum of whole [n · a]."""
        flat_out, flat_whole = _flat(out), _flat(whole)
        return self._start(lambda ring: ring.scatter(list(flat_whole.chunk(ring.size)), flat_out), what, now)

    def all_reduce(self, x: Tensor, what: str, now: bool = False) -> Job:
        """x = the sum of x."""
        flat = _flat(x)

        def work(ring: _Ring) -> None:
            if ring.size == 2 or _few_steps(flat, ring.size):
                ring.swap_sums(flat)
            else:
                parts = list(flat.tensor_split(ring.size))
                ring.scatter(parts, parts[ring.index])
                ring.gather(parts)

        return self._start(work, what, now)

    def broadcast(self, x: Tensor, source: int, what: str, now: bool = False) -> Job:
        """x = that of rank `source` of the group."""
        flat = _flat(x)
        return self._start(lambda ring: ring.pass_on(flat, source), what, now)

    def reduce(self, x: Tensor, target: int, what: str, now: bool = False) -> Job:
        """x = the sum of x, on rank `target` of the group; elsewhere x is spoilt."""
        flat = _flat(x)
        return self._start(lambda ring: ring.sum_up(flat, target), what, now)

    def exchange(self, out: Tensor, x: Tensor, what: str, now: bool = False) -> Job:
        """Part r of x goes to rank r."""
        flat_out, flat = _flat(out), _flat(x)
        return self._start(
            lambda ring: ring.exchange(list(flat_out.chunk(ring.size)), list(flat.chunk(ring.size))), what, now
        )

    def _start(self, work: Callable[[_Ring], None], what: str, now: bool) -> Job:
        group, jobs = self._group(), self._jobs
        assert group is not None
        with jobs.lock:  # the number is the place in the line
            ring = _Ring(group, TAGS + self._started % TAGS)
            self._started += 1
            job = Job(lambda: work(ring), what)
            if now and not jobs.waiting:
                jobs.run(job)
            else:
                jobs.waiting += 1
                jobs.queue.put(job)
        return job


class _Jobs:
    """What a lane and its thread share."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.waiting = 0  # in the queue, or being run by the thread
        self.error: CommunicationError | None = None

    def run(self, job: Job) -> None:
        with torch.inference_mode():  # writes into anything, records nothing
            self.error = job.run(self.error)


def _serve(jobs: _Jobs) -> None:
    while (job := jobs.queue.get()) is not None:
        jobs.run(job)
        with jobs.lock:
            jobs.waiting -= 1
        del job


def _flat(x: Tensor) -> Tensor:
    return x.detach().view(-1)


class _Ring:
    """One collective's messages: tags of its own, this rank's neighbours."""

    def __init__(self, group: dist.ProcessGroup, tag: int):
        self.group, self.tag = group, tag
        self.size, self.index = group.size(), group.rank()
        self._sent: list[tuple[Any, int]] = []

    def gather(self, parts: list[Tensor]) -> None:
        """Step t: part (index - t) goes to the next rank, part (index - t - 1) comes from the one before."""
        steps = range(self.size - 1)
        coming = [self._receive(parts[self.index - t - 1], -1) for t in steps]
        for t in steps:
            self._send(parts[self.index - t], 1)
            self._arrive(coming[t], -1)
        self._leave()

    def scatter(self, parts: list[Tensor], out: Tensor) -> None:
        """Step t: the sum so far of part (index - t - 1) goes on, that of part (index - t - 2) comes; the last is ours."""
        steps = self.size - 1
        ahead = min(steps, max(3, ROOM // max(1, parts[0].nbytes)))
        buffers = [torch.empty_like(parts[0]) for _ in range(ahead)]  # part 0 is the longest

        def post(t: int) -> tuple[Tensor, Any]:
            buffer = buffers[t % ahead][: parts[self.index - t - 2].numel()]
            return buffer, self._receive(buffer, -1)

        coming = [post(t) for t in range(ahead)]
        going = parts[self.index - 1]
        for t in range(steps):
            if ahead <= t + ahead - 2 < steps:  # its buffer left in the step before
                self._leave()
                coming.append(post(t + ahead - 2))
            self._send(going, 1)
            going, work = coming[t]
            self._arrive(work, -1)
            torch.add(going, parts[self.index - t - 2], out=going if t < steps - 1 else out)
        self._leave()

    def swap_sums(self, x: Tensor) -> None:
        """Step k: x goes to the rank whose number differs in bit k, and its own comes and is added; a + b is b + a on both."""
        offsets = [(self.index ^ 1 << bit) - self.index for bit in range(self.size.bit_length() - 1)]
        theirs = [torch.empty_like(x) for _ in offsets]
        coming = [self._receive(t, offset) for t, offset in zip(theirs, offsets, strict=True)]
        for t, work, offset in zip(theirs, coming, offsets, strict=True):
            self._send(x, offset)
            self._arrive(work, offset)
            self._leave()
            x.add_(t)

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

    def exchange(self, out: list[Tensor], x: list[Tensor]) -> None:
        steps = range(1, self.size)
        coming = {t: self._receive(out[self.index - t], -t) for t in steps}
        out[self.index].copy_(x[self.index])
        for t in steps:
            self._send(x[(self.index + t) % self.size], t)
            self._arrive(coming[t], -t)
        self._leave()

    def _chunks(self, x: Tensor) -> list[Tensor]:
        """Two ranks have nothing to gain from them."""
        return [x] if self.size == 2 else list(x.split(max(1, CHUNK // x.element_size())))

    # ---- messages to and from the rank `offset` further ----

    def _receive(self, x: Tensor, offset: int) -> Any:
        return self._try(lambda: self.group.recv([x], self._peer(offset), self.tag), offset, "nothing comes from")

    def _arrive(self, work: Any, offset: int) -> None:
        self._try(work.wait, offset, "nothing came from")

    def _send(self, x: Tensor, offset: int) -> None:
        work = self._try(lambda: self.group.send([x], self._peer(offset), self.tag), offset, "nothing goes to")
        self._sent.append((work, offset))

    def _leave(self) -> None:
        """What was sent may be overwritten."""
        for work, offset in self._sent:
            self._try(work.wait, offset, "nothing went to")
        self._sent = []

    def _peer(self, offset: int) -> int:
        return (self.index + offset) % self.size

    def _try(self, call: Callable[[], Any], offset: int, failure: str) -> Any:
        try:
            return call()
        except RuntimeError as e:
            rank = dist.get_process_group_ranks(self.group)[self._peer(offset)]
            raise RuntimeError(f"{failure} rank {rank}: {e}") from e
