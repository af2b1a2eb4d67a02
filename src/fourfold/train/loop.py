"""The training loop, from top to bottom.

A step: count the tokens to predict; run this rank's program, which contains every micro-batch's forward and backward and starts
each unit's reduction after its last contribution; exchange one small vector between all ranks; clip, update; report. Nothing in a
step waits for the GPU: losses, norms and traces stay there, and are read `clock.ahead` steps later.

A step depends on the weights, the step number and the seed, not on the number of ranks, the order of micro-batches or timing.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.checkpoint.save_load import Checkpointer, Holding
from fourfold.collectives import all_gather, all_reduce
from fourfold.data.own_data import OwnSamples
from fourfold.data.samples import IGNORE, Lengths, Samples
from fourfold.device_events import make_event
from fourfold.errors import CheckpointError, CommunicationError, ReplicaError
from fourfold.model.attention import Documents
from fourfold.model.spec import flops_per_token
from fourfold.offload.split import square_sum
from fourfold.record import RECORD
from fourfold.runtime.executor import Span
from fourfold.runtime.runner import Runner
from fourfold.shard.tied import TiedCopy, TiedOwner
from fourfold.shard.unit import Unit
from fourfold.supervision.compare_replicas import compare_replicas, flip_bit
from fourfold.supervision.guard import Guard
from fourfold.supervision.stragglers import KINDS, Stragglers, op_seconds
from fourfold.train.callbacks import Callback, RunInfo
from fourfold.train.clock import Clock
from fourfold.train.mesh import RankMesh
from fourfold.train.metrics import peak_bytes
from fourfold.train.objective import Objective, Wanted
from fourfold.train.optim import AdamW
from fourfold.train.streamed import StreamedUnits
from fourfold.train.trace import TraceFile, Waits

__all__ = ["Engine", "Loop", "RankContext", "RunServices"]


NOT_TRACED = Waits(-1.0, -1.0)
COLUMNS = 4 + len(KINDS) + 4


class MicroBatch(NamedTuple):
    """Tokens and targets [B, T] of a micro-batch; its documents, if several share a sequence; its length without padding."""

    tokens: Tensor
    targets: Tensor
    documents: Documents | None
    lengths: Lengths


@dataclass
class _Result:
    """The results of a step. `values` holds the number of tokens and a table [ranks, COLUMNS] that was gathered from all ranks:
    loss sum, square sum, peak bytes, stop flag, seconds of the ops of an earlier step by kind, seconds of waiting in a traced
    step (negative: no step was traced since), and lengths of the documents that the rank read.

    On a GPU, `values` is copied to the host after `ready`, the end of the step, on a stream of its own: copies to the host are
    made in the order in which they are issued, so this one comes after the optimizer's state of this step, for which the next
    step need not wait. Reading waits for `copied`.
    """

    step: int
    values: Tensor
    ready: Any
    copied: Any
    lr: float
    spans: Sequence[Span]
    rolled_back: bool | None
    """Whether its updates were undone and repeated; None: none started before the gradient norm was known."""

    def read(self) -> tuple[float, Tensor]:
        if self.copied is not None:
            self.copied.synchronize()
        return float(self.values[0]), self.values[1:].view(-1, COLUMNS)


@dataclass(frozen=True)
class RankContext:
    """Which rank of which run this is, its device and its process groups (None: this rank alone)."""

    info: RunInfo
    mesh: RankMesh
    device: torch.device
    clock: Clock
    world: dist.ProcessGroup | None
    batch_group: dist.ProcessGroup | None
    """The ranks that hold other sequences of a step."""
    peak_rate: float
    """Peak FLOP/s, for MFU."""


@dataclass(frozen=True)
class Engine:
    """What computes on this rank: the runner of its programs, its units, its tied weights, its optimizer."""

    runner: Runner
    units: Sequence[Unit]
    ties: Sequence[TiedOwner | TiedCopy]
    optimizer: AdamW | StreamedUnits
    bases: Sequence[Unit] = ()
    """With LoRA, units with the frozen weights; they are read from files and not saved in checkpoints."""


@dataclass(frozen=True)
class RunServices:
    """What a run reads and writes, and its supervision."""

    train_samples: Samples
    eval_samples: Samples | None
    checkpointer: Checkpointer
    guard: Guard
    callbacks: Sequence[Callback] = ()
    objective: Objective | None = None
    """The run's loss; None: the cross entropy of the next token."""


class Loop:
    """Everything a rank needs to train; assembled by train/worker.py."""

    def __init__(self, rank: RankContext, engine: Engine, services: RunServices, trace: TraceFile | None = None):
        info, mesh = rank.info, rank.mesh
        self.info, self.config, self.plan = info, info.config, info.plan
        self.mesh, self.world, self.device = mesh, rank.world, rank.device
        self.clock = rank.clock
        self.batch_group, self.peak_rate, self.trace = rank.batch_group, rank.peak_rate, trace
        self.runner, self.ties, self.units = engine.runner, list(engine.ties), list(engine.units)
        self.optimizer, self.bases = engine.optimizer, list(engine.bases)
        self.train_samples, self.eval_samples = services.train_samples, services.eval_samples
        self.objective = services.objective
        self.checkpointer, self.guard, self.callbacks = services.checkpointer, services.guard, list(services.callbacks)
        self.micro_batches = info.plan.micro_batches(info.config.train.global_batch)
        self.loss_dtype = torch.float64 if info.plan.precision.compute == "fp64" else torch.float32
        self.counts_targets = mesh.coordinates["pipe"] == mesh.coordinates["col"] == 0  # one rank per part of the batch
        self.counts_loss = mesh.coordinates["col"] == 0  # the loss is equal on all columns
        self.saved_step = -1
        self._squares: dict[str, list[tuple[bool, Tensor]]] = {}  # of gradients that the update has consumed
        if isinstance(self.optimizer, StreamedUnits):
            self.optimizer.measure = self._measure
        self.stragglers = Stragglers(mesh.degrees, info.ranks)
        self._op_seconds: tuple[float, ...] = (0.0,) * len(KINDS)  # of the last step that was reported
        self._waits = NOT_TRACED  # of the last traced step, until they are reported
        self._since: Any = None  # mark from which the next step's seconds count
        self._ended: Any = None  # mark at the end of the last issued work: a step, an evaluation, a save
        if self.guard.faults is not None:
            self.guard.faults.flip = self._flip

    def run(self, done: int) -> int:
        """Train from step `done` to the config's last step, or until a stop is requested; returns the steps done."""
        try:
            return self._run(done)
        except BaseException:
            if self.checkpointer.group is None:  # other ranks may be gone, and the save would wait for them
                with contextlib.suppress(Exception):
                    self.checkpointer.wait()
            raise

    def _run(self, done: int) -> int:
        steps = self.config.train.steps
        self._call(lambda c: c.on_start(self.info, done))
        self._since = self._ended = self.clock.mark()
        pending: deque[_Result] = deque()  # steps issued and not yet reported
        stop = False
        while done < steps and not stop:
            try:
                pending.append(self.step(done))
            except CommunicationError as e:
                raise CommunicationError(f"step {done + 1}: {e}") from e
            done += 1
            while len(pending) > (0 if stop or done == steps or self._pause_at(done) else self.clock.ahead):
                stop |= self._report(pending.popleft())
            self._tell_saved()
            if self._every(self.config.train.check_replicas, done) and not self._saves_at(done, stop):
                self.check_replicas(done, self.holdings())
            if self._every(self.config.train.eval_every, done):
                self.evaluate(done)
            if self._saves_at(done, stop):
                self.save(done, last=stop or done == steps)
        self.checkpointer.wait()
        for tie in self.ties:
            tie.flush()
        self._tell_saved()
        self.guard.finish(done, final=done == steps)
        self._call(lambda c: c.on_end(self.info, done))
        if self.trace is not None:
            self.trace.close()
        return done

    # ---- one step ----

    def step(self, index: int) -> _Result:
        """Step `index`, counted from 0."""
        begun = self._ended
        RECORD.trace = trace = self.trace.begin(index + 1, begun) if self.trace is not None else None
        try:
            result = self._step(index)
        finally:
            RECORD.trace = None
        self._ended = result.ready
        if trace is not None and self.trace is not None:
            self.trace.hold(index + 1, trace, result.spans, begun, result.ready)
        return result

    def _step(self, index: int) -> _Result:
        with RECORD.part("between", "between steps"):
            self.guard.begin(index + 1)
            lr = self.config.optim.lr_at(index, self.config.train.steps)
            self.optimizer.begin(lr)
        with RECORD.part("data", "the step's batch"):
            batches = list(self._micro_batches(self.train_samples, index))
            count = self._count(self.train_samples, batches)
        with RECORD.part("program", "forwards and backwards"):
            losses = self.runner.step(index, self._feed(batches, count.reciprocal().to(self.loss_dtype)))
            for unit in self.units:
                unit.finish()
        with RECORD.part("norm", "gradient norm and the end of the step"):
            loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
            for m in sorted(losses) if self.counts_loss else ():
                loss_sum += losses[m]
            stop = self.guard.stop_requested()
            read = Lengths.total(batch.lengths for batch in batches if self.counts_targets)
            known = peak_bytes(self.device), stop, *self._op_seconds, *self._waits, *read
            self._waits = NOT_TRACED
            gathered = self._gather(loss_sum, self._square_sum(), *known)
            norm = gathered[:, 1].sum().sqrt()
            finite = (norm + gathered[:, 0].sum()).isfinite().float()
        with RECORD.part("update", "optimizer"):
            self.optimizer.step(lr, norm, 1 - finite if self.config.train.guard else None)
            for tie in self.ties:
                self.optimizer.wait(tie.unit)
                tie.publish()
            for unit in self.units:
                unit.zero_grad()
            values = torch.cat((count.view(1), gathered.view(-1)))
        return self._result(index + 1, values, lr)

    def _result(self, step: int, values: Tensor, lr: float) -> _Result:
        ready, copied = self.clock.mark(), None
        if self.device.type == "cuda":
            there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            ready.wait(self._to_host)
            with torch.cuda.stream(self._to_host):
                there.copy_(values, non_blocking=True)
            values.record_stream(self._to_host)
            copied = make_event()
            copied.record(self._to_host)
            values = there
        return _Result(step, values, ready, copied, lr, self.runner.spans, self.optimizer.rolled_back)

    @cached_property
    def _to_host(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def _micro_batches(self, samples: Samples, index: int) -> Iterator[MicroBatch | OwnBatch]:
        """This rank's part of step `index`: micro-batch m holds sequences (m · ways + way) · size … of the step.

        Every rank of a pipeline and of a column reads the same, so that all know the documents.
        """
        batch, ways = self.config.train.global_batch, self.plan.mesh.batch_ways
        size, way = self.plan.micro_batch_size(batch), self.mesh.index("data", "depth", "row")
        for m in range(self.micro_batches):
            first = index * batch + (m * ways + way) * size
            if isinstance(samples, OwnSamples):
                found, lengths = samples.rows(range(first, first + size))
                rows = {name: self._sent_tree(v, cast=name == "inputs") for name, v in found.items()}
                yield OwnBatch(rows.get("tokens", rows.get("inputs")), rows.get("targets"), None, lengths, rows)
                continue
            numbers = range(first, first + size)
            tokens, targets = (self._sent(torch.from_numpy(array)) for array in samples.batch(numbers))
            starts = samples.documents(numbers)
            documents = None if starts is None else Documents.of(torch.from_numpy(starts)).to(self._sent)
            yield MicroBatch(tokens, targets, documents, samples.lengths(numbers))

    def _sent(self, array: Tensor) -> Tensor:
        """Copy to the device, without waiting for it."""
        if self.device.type != "cuda":
            return array.to(self.device)
        return array.pin_memory().to(self.device, non_blocking=True)

    def _sent_tree(self, value: Any, *, cast: bool) -> Any:
        """Copy the user's data to the device; `cast`: floating-point tensors to the compute dtype."""
        if isinstance(value, tuple):
            return tuple(self._sent_tree(v, cast=cast) for v in value)
        return self._sent(value.to(self.units[0].full.dtype) if cast and value.is_floating_point() else value)

    def _feed(self, batches: Sequence[Any], scale: Tensor, wanted: Wanted = "loss") -> _Feed:
        if self.objective is None:
            return _Feed(batches, scale)
        return _OwnFeed(batches, scale, self.objective, wanted)

    def _weight(self, batch: Any) -> Tensor:
        """A micro-batch's contribution to the divisor of the loss; a scalar on the device or on the host."""
        if self.objective is not None:
            return self.objective.weight(batch.rows)  # may be on the host: a copy to the device would synchronize
        return (batch.targets != IGNORE).sum()

    def reference_values(self, samples: OwnSamples, index: int) -> Iterator[tuple[int, Tensor]]:
        """The objective's reference values of step `index`, on the rank that has them: the first sample and [B] values."""
        batch, ways = self.config.train.global_batch, self.plan.mesh.batch_ways
        size, way = self.plan.micro_batch_size(batch), self.mesh.index("data", "depth", "row")
        batches = list(self._micro_batches(samples, index))
        found = self.runner.evaluate(self._feed(batches, torch.zeros((), device=self.device), "reference"))
        for m, values in found.items():
            if self.counts_loss:
                yield index * batch + (m * ways + way) * size, values

    def _count(self, samples: Samples, batches: Sequence[Any]) -> Tensor:
        """The divisor of the loss, over all ranks: tokens to predict in the whole step, or the objective's weight."""
        if samples.all_valid:
            total = self.config.train.global_batch * self.config.model.seq_len
            return torch.full((), float(total), dtype=torch.float64, device=self.device)
        count = torch.zeros((), dtype=torch.float64, device=self.device)
        for each in batches:
            count += self._weight(each)
        if self.batch_group is not None:
            all_reduce(count, self.batch_group, "the number of tokens in the step").wait()
        return count.where(count > 0, 1.0)

    def _square_sum(self) -> Tensor:
        """Sum of squares of the gradients this rank owns; over all ranks, every element counts once.

        NaN if a copy that another rank owns is not finite here: that rank's sum would not include it, but the update would.
        """
        total, copies = torch.zeros(2, dtype=torch.float64, device=self.device).unbind()
        for unit in self.units:
            if unit.name not in self._squares:
                self._measure(unit)
            for owned, found in self._squares.pop(unit.name):
                (total if owned else copies).add_(found)
        return total + 0 * copies

    def _measure(self, unit: Unit) -> None:
        """Take the sums of squares of a unit's gradient."""
        grad = unit.shard_grad
        spans = self._spans(unit)
        assert grad is not None or not spans
        self._squares[unit.name] = [
            (owned, square_sum(grad[start:stop])) for owned, start, stop in spans if grad is not None
        ]

    def _spans(self, unit: Unit) -> list[tuple[bool, int, int]]:
        """The parts of a unit's shard, and whether this rank owns them; neighbours are joined (padding between them is zero)."""
        here, _ = unit.sharing.place(self.mesh.coordinates, self.mesh.degrees)
        spans: list[tuple[bool, int, int]] = []
        for slot, start, stop in unit.slots():
            owned = all(piece.owned_at(here) for piece in unit.pieces[slot.name])
            if spans and spans[-1][0] == owned:
                spans[-1] = (owned, spans[-1][1], stop)
            else:
                spans.append((owned, start, stop))
        return spans

    def _gather(self, *values: Tensor | float) -> Tensor:
        """[ranks, len(values)]: every rank's values on every rank, so that all ranks decide the same."""
        mine = torch.zeros(len(values), dtype=torch.float64, device=self.device)
        for i, v in enumerate(values):
            if isinstance(v, Tensor):
                mine[i].copy_(v)
            else:
                mine[i].fill_(v)  # fill_ does not synchronize, unlike a copy from the host
        if self.world is None:
            return mine[None]
        everyone = mine.new_empty(self.info.ranks * len(values))
        if self.guard.skips_collective():  # an injected fault
            return everyone.zero_().view(self.info.ranks, len(values))
        all_gather(everyone, mine, self.world, "the end of the step").wait()
        return everyone.view(self.info.ranks, len(values))

    def memory_parts(self) -> dict[str, int]:
        """Bytes of this rank's parameters (with LoRA's frozen ones) and gradients, gathered ones included, and of its optimizer's
        state."""
        held = [*self.units, *self.bases]
        parameters = sum(u.full.untyped_storage().size() for u in held)
        parameters += sum(u.shard.nbytes for u in held if u.sharing.shards > 1)
        grads = [g for u in self.units for g in (u.grad, u.shard_grad) if g is not None]
        parts = {"parameters": parameters, "gradients": sum({g.data_ptr(): g.nbytes for g in grads}.values())}
        if isinstance(self.optimizer, AdamW):
            shards = {u.shard.data_ptr() for u in self.units}
            state = {t.data_ptr(): t for u in self.units for t in self.optimizer.flats(u).values()}
            parts["optimizer state"] = sum(t.nbytes for at, t in state.items() if at not in shards)
        return parts

    # ---- around the steps ----

    def _report(self, result: _Result) -> bool:
        """Wait for a step's results and report them to the callbacks; True if a rank has requested a stop."""
        self.clock.wait(result.ready)
        if self.trace is not None:
            self._waits = self.trace.write(result.step) or self._waits
        count, gathered = result.read()
        if self.world is not None:
            self._op_seconds = op_seconds(result.spans, self.clock.seconds)
        seconds, self._since = self.clock.seconds(self._since, result.ready), result.ready
        read = Lengths(*map(int, gathered[:, -2:].sum(0)))
        rate = read.tokens / seconds
        loss, norm = float(gathered[:, 0].sum()) / count, float(gathered[:, 1].sum().sqrt())
        self.guard.judge(result.step, loss, norm)
        metrics: dict[str, Any] = {
            "step": result.step,
            "loss": loss,
            "grad_norm": norm,
            "lr": result.lr,
            "tokens": read.tokens,
            "seconds": seconds,
            "tokens_per_second": rate,
            "mfu": self._flops(read) / seconds / (self.peak_rate * self.info.ranks),
            "peak_bytes": int(gathered[:, 2].max()),
            "skipped": self.guard.skipped,
        }
        if result.rolled_back is not None:
            metrics["rolled_back"] = result.rolled_back
        kinds = 4 + len(KINDS)
        if straggler := self.stragglers.add(gathered[:, 4:kinds].tolist()):
            metrics["straggler"] = straggler
        if self.world is not None and bool((gathered[:, kinds] >= 0).all()):
            exposed, bubble = gathered[:, kinds : kinds + 2].mean(0).tolist()
            metrics["exposed_seconds"] = exposed
            if self.plan.mesh.pipe > 1:
                metrics["bubble"] = bubble
        self._call(lambda c: c.on_step(self.info, metrics))
        return bool(gathered[:, 3].any())

    def _flops(self, read: Lengths) -> float:
        """The model's FLOPs for documents of these lengths, forward and backward; padding needs none."""
        if not self.config.model.layers:  # a model of the user's own
            return 6.0 * self.info.parameters * read.tokens
        return flops_per_token(self.config.model, read.context) * read.tokens

    def evaluate(self, step: int) -> float:
        """Mean loss over the first batches of the evaluation split, the same at every call."""
        assert self.eval_samples is not None
        begin = time.perf_counter()
        self.guard.evaluate(step)
        reports = self.objective.reports if self.objective is not None else ()
        total = torch.zeros(2 + len(reports), dtype=torch.float64, device=self.device)  # weight, loss, reports
        for index in range(self.config.train.eval_batches):
            batches = list(self._micro_batches(self.eval_samples, index))
            for found in self.runner.evaluate(self._feed(batches, total[0], "evaluation")).values():
                total[1:] += found if self.counts_loss else 0.0
            if self.counts_targets:
                total[0] += sum(self._weight(each) for each in batches)
        if self.world is not None:
            all_reduce(total, self.world, "the evaluation's loss").wait()
        mean, *others = (total[1:] / total[0].where(total[0] > 0, 1.0)).tolist()
        seconds = time.perf_counter() - begin
        metrics = {"step": step, "eval_loss": mean, "eval_tokens": int(total[0]), "eval_seconds": seconds}
        metrics |= {f"eval_{name}": value for name, value in zip(reports, others, strict=True)}
        self._call(lambda c: c.on_eval(self.info, metrics))
        self._since = self._ended = self.clock.mark()
        return mean

    def save(self, step: int, *, last: bool = False) -> None:
        """Save a checkpoint after `step` steps, unless it exists; `last`: no step follows."""
        if step == self.saved_step:
            return
        self.saved_step = step
        begin = time.perf_counter()
        self.guard.save(step)
        state = {
            "version": 1,
            "step": step,
            "updates": self.optimizer.updates,
            "skipped": self.guard.skipped,
            "data": self.train_samples.state(step * self.config.train.global_batch),
        }
        holdings = self.holdings()
        if self.config.train.check_replicas >= 0:
            self.check_replicas(step, holdings)
            self.guard.save(step)
        if step == self.config.train.steps and self.config.checkpoint.last == "weights":
            holdings = [h for h in holdings if not h.prefix]
            state["optimizer"] = False
        self.checkpointer.save(step, holdings, state, last=last)
        metrics = {"step": step, "save_seconds": time.perf_counter() - begin}
        self._call(lambda c: c.on_saving(self.info, metrics))
        self._since = self._ended = self.clock.mark()

    def check_replicas(self, step: int, holdings: Sequence[Holding]) -> None:
        """Raise ReplicaError if copies of a weight, or of its optimizer state, differ between ranks."""
        self.guard.compare(step)
        try:
            compare_replicas(step, holdings, self.units, self.ties, self.mesh, self.world)
        except ReplicaError:  # raised by all ranks: a save of an earlier step, in flight, can be finished
            with contextlib.suppress(CheckpointError):
                self.checkpointer.wait()
            raise

    def _flip(self, name: str) -> None:
        holdings = self.holdings()
        found = flip_bit(holdings, name)
        print(
            f"fault: flipped a bit of {found}" if found else f"fault: no copied weight '{name}' on this rank",
            flush=True,
        )
        for unit in self.units:
            self.optimizer.publish(unit)

    def _tell_saved(self) -> None:
        for path in self.checkpointer.finished():
            for callback in self.callbacks:
                callback.on_save(self.info, int(path.name.removeprefix("step-")), path)

    def holdings(self) -> list[Holding]:
        """The tensors of this rank that a checkpoint saves and restores."""
        holdings = []
        for unit in self.units:
            place = unit.sharing.place(self.mesh.coordinates, self.mesh.degrees)
            for prefix, flat in self.optimizer.flats(unit).items():
                holdings.append(Holding(prefix, flat, unit.shard_range[0], unit.layout, unit.pieces, place))
        return holdings

    def _pause_at(self, done: int) -> bool:
        return self._every(self.config.train.eval_every, done) or self._every(self.config.checkpoint.every, done)

    def _saves_at(self, done: int, stop: bool) -> bool:
        return self._every(self.config.checkpoint.every, done) or stop or done == self.config.train.steps

    def _every(self, interval: int, done: int) -> bool:
        return interval > 0 and (done % interval == 0 or done == self.config.train.steps)

    def _call(self, what: Callable[[Callback], None]) -> None:
        for callback in self.callbacks:
            what(callback)


class OwnBatch(NamedTuple):
    """A micro-batch of user-defined data: the first layer's inputs, the targets (built-in models), and the whole batch."""

    tokens: Any
    targets: Tensor | None
    documents: None
    lengths: Lengths
    rows: dict[str, Any]


class _Feed:
    """The `Feed` of a step, from its micro-batches."""

    def __init__(self, batches: Sequence[Any], scale: Tensor):
        self.batches, self.scale = batches, scale

    def first(self, micro_batch: int) -> Tensor:
        return self.batches[micro_batch].tokens

    def extra(self, micro_batch: int) -> tuple[Any, ...]:
        return (self.batches[micro_batch].targets,)

    def documents(self, micro_batch: int) -> Documents | None:
        return self.batches[micro_batch].documents

    def grad(self, micro_batch: int) -> Tensor:
        return self.scale


class _OwnFeed(_Feed):
    """The `Feed` of a step with a user-defined loss; `wanted`: which result of the objective."""

    def __init__(self, batches: Sequence[OwnBatch], scale: Tensor, objective: Objective, wanted: Wanted):
        super().__init__(batches, scale)
        self.objective, self.wanted = objective, wanted

    def extra(self, micro_batch: int) -> tuple[Any, ...]:
        batch = self.batches[micro_batch]
        finish = self.objective.finish(batch.rows, self.wanted)
        return (batch.targets, finish) if self.objective.log_probs else (finish,)
