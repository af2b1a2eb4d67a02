"""What a run minimizes instead of the cross entropy of the next token: a user-defined loss, or DPO.

A loss is a function of the model's output for a micro-batch and of the batch, a dict of tensors [B, …]:

    def loss(output, batch): ...            # a number: the sum over the samples of the micro-batch

The output is that of the last layer of the user's own model; for the built-in models it is the log-probability of every target,
[B, T], 0 where nothing is predicted. (Logits are not available: on a tensor grid no rank has all of them.) The run's loss is the
sum over all micro-batches and ranks, divided by the number of samples of the step. So it does not depend on the plan. This is
checked on the first micro-batch: the loss of all samples must equal the sum of the losses of each.

A loss may also be an object with `__call__` and any of

    samples                    number of consecutive samples that belong together (a pair: 2); they are in one micro-batch
    weight(batch)              what the sum is divided by, instead of the number of groups of samples
    reports, report(output, batch)   names, and a sum over the samples for each; evaluation metrics contain their means
    reference(output, batch)   [B]: computed once per sample before training, with the initial weights, and passed to the
                               loss as batch["reference"]

[Note: the reference]
Reference values are computed by the run's own plan, forward only, and saved in the run directory (reference.npz), since a resumed
run no longer has the initial weights. They are indexed by sample, so they stay valid under another plan.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold import files
from fourfold.collectives import all_reduce
from fourfold.config import Config
from fourfold.data.own_data import LENGTH, OwnSamples, PairRows, TokenRows
from fourfold.data.samples import Samples, none_held_out, open_run_corpus, open_samples
from fourfold.errors import CheckpointError, ConfigError, DataError
from fourfold.runtime.stage import Finish

if TYPE_CHECKING:
    from fourfold.train.loop import Loop

__all__ = ["DPO", "Loss", "Objective", "add_reference", "open_run", "samples_together"]

SAVED = "reference.npz"
Wanted = Literal["loss", "evaluation", "reference"]


class Loss(Protocol):
    """See the top of this file; `samples`, `weight`, `reference` and `reports` are optional."""

    def __call__(self, output: Any, batch: Mapping[str, Any], /) -> Tensor: ...


class DPO:
    """Direct preference optimization: samples are pairs, the chosen answer before the rejected one.

    L = -log σ(β ((log π_c - log π_r) - (log ρ_c - log ρ_r))), where π is the model, ρ the reference, and log π the sum over the
    tokens of an answer.
    """

    samples = 2
    reports = ("accuracy", "margin")
    """accuracy: fraction of pairs whose chosen answer gained more than the rejected one; margin: the difference, times β."""

    def __init__(self, beta: float = 0.1):
        if not (math.isfinite(beta) and beta > 0):
            raise ConfigError(f"beta = {beta} must be above 0; 0.1 is usual")
        self.beta = beta

    def __call__(self, logp_bt: Tensor, batch: Mapping[str, Any]) -> Tensor:
        return -F.logsigmoid(self.beta * self._moved(logp_bt, batch)).sum()

    def _moved(self, logp_bt: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """[pairs]: how much more the chosen answer gained over the reference than the rejected one."""
        chosen, rejected = logp_bt.sum(1).unflatten(0, (-1, 2)).unbind(1)
        before_chosen, before_rejected = batch["reference"].to(logp_bt.dtype).unflatten(0, (-1, 2)).unbind(1)
        return (chosen - rejected) - (before_chosen - before_rejected)

    def report(self, logp_bt: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        moved = self._moved(logp_bt, batch)
        return (moved > 0).sum(), self.beta * moved.sum()

    def reference(self, logp_bt: Tensor, batch: Mapping[str, Any]) -> Tensor:
        return logp_bt.sum(1)


class Objective:
    """A loss with its checks, applied to the model's output. `log_probs`: the output is cross entropies of tokens."""

    def __init__(self, loss: Loss, dtype: torch.dtype, *, log_probs: bool):
        if not callable(loss):
            raise ConfigError(f"loss = a {type(loss).__name__}: expected a function of (output, batch)")
        self.loss, self.dtype, self.log_probs = loss, dtype, log_probs
        self.together = samples_together(loss)
        self.has_reference = callable(getattr(loss, "reference", None))
        self.reports: tuple[str, ...] = tuple(getattr(loss, "reports", ()))
        self._checked = False

    def weight(self, batch: Mapping[str, Any]) -> Tensor:
        """This micro-batch's contribution to the divisor of the loss."""
        given: Callable[[Mapping[str, Any]], Any] | None = getattr(self.loss, "weight", None)
        found = self._call(given, batch) if given is not None else _rows(batch) / self.together
        return torch.as_tensor(found, dtype=torch.float64).sum()

    def finish(self, batch: Mapping[str, Any], wanted: Wanted = "loss") -> Finish:
        """A function from the last layer's output to the loss, to loss and reports [1 + reports], or to reference values [B]."""
        make = {"loss": self._loss, "evaluation": self._evaluation, "reference": self._reference}[wanted]
        return Finish(functools.partial(make, batch))

    def _evaluation(self, batch: Mapping[str, Any], output: Any) -> Tensor:
        found = [self._loss(batch, output)]
        if self.reports:
            output = -output if self.log_probs else output
            found += self._call(self.loss.report, output, batch)  # type: ignore[attr-defined]
        if len(found) != 1 + len(self.reports):
            raise ConfigError(f"report(output, batch) returned {len(found) - 1} values for {len(self.reports)} reports")
        return torch.stack([torch.as_tensor(value, dtype=self.dtype, device=found[0].device).sum() for value in found])

    def _loss(self, batch: Mapping[str, Any], output: Any) -> Tensor:
        output = -output if self.log_probs else output
        loss = self._call(self.loss, output, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ConfigError(f"the loss must be one number, the sum over the samples; found {found}")
        if not self._checked and not torch.compiler.is_compiling():
            self._check_sum(batch, output, loss)
        return loss.reshape(()).to(self.dtype)

    def _reference(self, batch: Mapping[str, Any], output: Any) -> Tensor:
        output, rows = -output if self.log_probs else output, _rows(batch)
        found = self._call(self.loss.reference, output, batch)  # type: ignore[attr-defined]
        if not isinstance(found, Tensor) or found.shape != (rows,):
            kind = f"shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ConfigError(f"reference(output, batch) must be [{rows}], one number per sample; found {kind}")
        return found.detach()

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        batch = args[-1]
        try:
            return function(*args)
        except KeyError as e:
            if e.args and isinstance(e.args[0], str) and e.args[0] not in batch:
                there = ", ".join(f"'{name}'" for name in batch)
                raise ConfigError(f"the loss needs batch['{e.args[0]}'], but the samples have {there}") from e
            raise

    @torch.no_grad()
    def _check_sum(self, batch: Mapping[str, Any], output: Any, loss: Tensor) -> None:
        """Raise unless the loss is a sum over groups of samples: a mean would depend on the size of micro-batches."""
        self._checked, rows = True, _rows(batch)
        parts = [
            (_cut(output, rows, first, first + self.together), _cut(dict(batch), rows, first, first + self.together))
            for first in range(0, rows, self.together)
        ]
        if len(parts) == 1 or not _has_rows(output, rows):
            return
        each = sum(float(self.loss(part, some)) for part, some in parts)
        whole = float(loss)
        if math.isfinite(whole) and not math.isclose(whole, each, rel_tol=1e-3, abs_tol=1e-6):
            raise ConfigError(
                f"the loss of a micro-batch is {whole:.6g}, but the losses of its {len(parts)} samples sum to {each:.6g}: a loss "
                "must be a sum over samples, or it would depend on the plan; return .sum() and not .mean() (the run divides by "
                "the number of samples, or by what loss.weight(batch) returns)"
            )


def samples_together(loss: object) -> int:
    """Number of consecutive samples that a loss compares."""
    together = getattr(loss, "samples", 1)
    if not isinstance(together, int) or together < 1:
        raise ConfigError(f"loss.samples = {together!r} must be a whole number of samples, at least 1")
    return together


def _rows(batch: Mapping[str, Any]) -> int:
    return next(len(value) for value in _tensors(batch))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [t for v in values for t in _tensors(v)]


def _has_rows(value: Any, rows: int) -> bool:
    found = _tensors(value)
    return bool(found) and all(t.dim() and len(t) == rows for t in found)


def _cut(value: Any, rows: int, first: int, stop: int) -> Any:
    """Samples [first, stop) of a tree of tensors."""
    if isinstance(value, Tensor):
        return value[first:stop] if value.dim() and len(value) == rows else value
    if isinstance(value, dict):
        return {key: _cut(v, rows, first, stop) for key, v in value.items()}
    return type(value)(_cut(v, rows, first, stop) for v in value) if isinstance(value, tuple | list) else value


# ---- the samples of a run ----


class _CorpusRows:
    """Samples of a corpus as a dataset, for a user-defined loss."""

    def __init__(self, samples: Samples):
        self.samples = samples

    def __len__(self) -> int:
        return self.samples.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens, targets = self.samples[index]
        return {"tokens": tokens, "targets": targets, LENGTH: self.samples.lengths([index]).tokens}


def open_run(
    config: Config, data: Any = None, loss: Loss | None = None, *, own_model: bool = False
) -> tuple[Samples, Samples | None, Loss | None]:
    """The training samples of a run, the evaluation samples if enabled, and its loss (None: the cross entropy)."""
    if config.dpo.beta and loss is not None:
        raise ConfigError(f"dpo.beta = {config.dpo.beta} and a loss of your own; use beta = 0, or leave the loss out")
    if config.dpo.beta:
        if own_model or config.model.family == "bert":
            raise ConfigError(
                f"dpo.beta = {config.dpo.beta} is for models here that predict the next token; use beta = 0"
            )
        loss = DPO(config.dpo.beta)
        corpus = open_run_corpus(config, data)
        if not corpus.paired:
            raise ConfigError(
                f"dpo.beta = {config.dpo.beta}, but {corpus.name} has no preference pairs: examples need 'prompt', 'chosen' "
                "and 'rejected'; use beta = 0 to train on it as it is"
            )
        rows: Any = PairRows(corpus, config.model.seq_len)
    elif loss is None:
        return *open_samples(config, data), None
    elif own_model:
        rows = data
    elif data is not None:
        rows = TokenRows(data, config.model.seq_len, config.model.vocab)
    else:
        rows = _CorpusRows(_unpacked(config))
    if not callable(getattr(rows, "__len__", None)) or not callable(getattr(rows, "__getitem__", None)):
        raise DataError(f"data = a {type(data).__name__}: needs __len__ and __getitem__(i), samples by number")
    for field in ("sources", "eval_source") if data is None else ():
        if getattr(config.data, field):
            raise ConfigError(
                f"data.{field}: not with DPO or a loss of your own; use data.source and data.eval_fraction"
            )
    held = config.data.eval_fraction if config.train.eval_every else 0.0
    kinds: dict[str, Any] = {"seed": config.train.seed, "eval_fraction": held, "together": samples_together(loss)}
    train = OwnSamples(rows, **kinds)
    if not config.train.eval_every:
        return train, None, loss
    evaluated = OwnSamples(rows, split="eval", **kinds)
    if not evaluated.count:
        raise none_held_out(config, f"{train.whole_count} samples", train.groups)
    return train, evaluated, loss


def _unpacked(config: Config) -> Samples:
    """The samples of a corpus, each one example or one window of text."""
    packing = config.data.packing
    if packing == "auto":
        packing = "none" if open_run_corpus(config).prompted and config.model.family != "bert" else "concat"
    elif packing not in ("none", "concat"):
        raise ConfigError(
            f"data.packing = '{packing}' with a loss of your own, which is given samples; use 'none' or 'concat'"
        )
    data = dataclasses.replace(config.data, packing=packing, eval_fraction=0.0)
    train = dataclasses.replace(config.train, eval_every=0)
    return open_samples(dataclasses.replace(config, data=data, train=train))[0]


# ---- [Note: the reference] ----


def add_reference(loop: Loop, folder: Path, done: int, console: IO[str] | None) -> None:
    """Add reference values to the samples of a run: computed before the first step, or read by a resumed run."""
    batch, splits = loop.config.train.global_batch, dict[str, tuple[OwnSamples, int]]()
    for name, samples, steps in (
        ("train", loop.train_samples, loop.config.train.steps),
        ("eval", loop.eval_samples, loop.config.train.eval_batches),
    ):
        if isinstance(samples, OwnSamples):
            splits[name] = samples, steps * batch
    values: dict[str, npt.NDArray[np.float64]] = {}
    if done:
        values = _read(folder / SAVED, {f"{n}-{s.fingerprint}" for n, (s, _) in splits.items()})
    began, rank0 = time.perf_counter(), loop.info.rank == 0
    for name, (samples, wanted) in splits.items():
        key = f"{name}-{samples.fingerprint}"
        count = min(samples.count, wanted)
        if key not in values:
            if rank0:
                what = {"train": "training", "eval": "evaluation"}[name]
                print(f"reference values of {count} {what} samples, by the initial weights …", file=console, flush=True)
            values[key] = _computed(loop, samples, count)
        elif missing := int(np.isnan([values[key][samples.number(k)] for k in range(count)]).sum()):
            raise ConfigError(
                f"{folder / SAVED}: {missing} of {count} samples have no reference: they are beyond the steps that the run was "
                f"started with; start a new run for train.steps = {loop.config.train.steps}"
            )
        samples.columns["reference"] = values[key]
    if not done and rank0:
        with files.create(folder / SAVED, CheckpointError) as f:
            np.savez(f, **values)  # type: ignore[arg-type]
        print(f"reference values computed in {time.perf_counter() - began:.3g} s", file=console, flush=True)


def _computed(loop: Loop, samples: OwnSamples, count: int) -> npt.NDArray[np.float64]:
    """The reference of the first `count` samples, by index in the dataset; NaN for the others."""
    size = loop.config.train.global_batch
    found = np.zeros((2, samples.whole_count))  # values, and their counts
    for index in range(-(-count // size)):
        loop.guard.evaluate(0)
        for first, values in loop.reference_values(samples, index):
            for row, value in enumerate(values.tolist()):
                if first + row < count:
                    found[:, samples.number(first + row)] = value, 1.0
    if loop.world is not None:
        everyone = torch.from_numpy(found).to(loop.device)
        all_reduce(everyone, loop.world, "the reference values").wait()
        found = everyone.cpu().numpy()
    return np.where(found[1] > 0, found[0], np.nan)


def _read(path: Path, keys: set[str]) -> dict[str, npt.NDArray[np.float64]]:
    """The saved reference values; raises if they are missing, damaged, or of other data."""
    try:
        with files.open_for_reading(path, CheckpointError) as f, np.load(f, allow_pickle=False) as stored:
            found = {name: np.asarray(stored[name], np.float64) for name in stored.files}
    except (OSError, ValueError, KeyError, EOFError) as e:
        raise CheckpointError(f"{path}: cannot be read: {e}; a resumed run needs its reference values") from None
    if missing := keys - found.keys():
        raise CheckpointError(f"{path}: has the reference values of other data, not of {sorted(missing)[0]}")
    return found
