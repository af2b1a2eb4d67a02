"""Samples of a dataset that is not a corpus of text: any object with a length and samples by index.

    dataset[i] -> {"inputs": …, "targets": …, …}        or the tuple (inputs, targets)

A sample's values are numbers, arrays or tensors; those of a batch are stacked, so every sample has the same names and shapes.
`inputs` is passed to the first layer of the user's own model, the whole batch to the loss. For a built-in model with a
user-defined loss, samples are `tokens` with one of `targets`, `labels` and `loss_mask` (`data.Examples`), and further values for
the loss.

Samples are reshuffled in every epoch, by (seed, epoch) alone; those that belong together (`together`) stay adjacent. The
last `data.eval_fraction` of them are held out for evaluation.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fourfold.data.samples import IGNORE, Corpus, Lengths, Samples, own_document, permute
from fourfold.errors import ConfigError, DataError

__all__ = ["LENGTH", "OwnSamples", "PairRows", "SampleRows", "TokenRows"]

LENGTH = " length"
"""Key by which our own datasets say how many tokens of a sample are no padding; no part of the sample."""


class SampleRows(Protocol):
    """A user-defined dataset: samples by index, the same in every pass."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class OwnSamples(Samples):
    """The samples of a run from a dataset: sample k is dataset[number(k)]."""

    all_valid = False  # the loss defines its divisor

    def __init__(
        self, data: SampleRows, *, seed: int, split: str = "train", eval_fraction: float = 0.0, together: int = 1
    ):
        self.data, self.seed, self.split, self.together = data, seed, split, together
        self.name, self.whole_count = f"data = {type(data).__name__}", len(data)
        if self.whole_count % together:
            raise DataError(
                f"{self.name}: {self.whole_count} samples are not groups of {together}, which the loss compares; "
                f"leave out {self.whole_count % together}"
            )
        groups = self.whole_count // together
        held = int(groups * eval_fraction)
        self.first, self.groups = (groups - held, held) if split == "eval" else (0, groups - held)
        self.count = self.groups * together
        if split == "train" and not self.count:
            raise DataError(f"{self.name}: there are no samples in it")
        self.columns: dict[str, npt.NDArray[np.float64]] = {}
        """Further values of every sample, by index in the dataset."""
        example = self.sample(0) if self.whole_count else {}
        self.shapes = {name: tuple(value.shape) for name, value in example.items() if isinstance(value, Tensor)}
        digest = hashlib.blake2b(f"{type(data).__name__} {self.whole_count} {together}".encode(), digest_size=8)
        for index in {0, self.whole_count - 1} if self.whole_count else ():
            for value in _leaves(self.sample(index)):
                digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        self._fingerprint = digest.hexdigest()

    @functools.cached_property
    def context(self) -> float:
        return float(_tokens(self.sample(0)))

    def sample(self, index: int) -> dict[str, Any]:
        """Sample `index` of the dataset, as tensors by name."""
        return self._read(index)[0]

    def _read(self, index: int) -> tuple[dict[str, Any], int]:
        """Sample `index`, and its number of tokens without padding."""
        item = self.data[index]
        if isinstance(item, tuple) and len(item) == 2:
            item = {"inputs": item[0], "targets": item[1]}
        if not isinstance(item, Mapping):
            raise DataError(
                f"{self.name}, sample {index}: expected a mapping or (inputs, targets), found {type(item).__name__}"
            )
        if "inputs" not in item and "tokens" not in item:
            there = ", ".join(f"'{key}'" for key in item)
            raise DataError(f"{self.name}, sample {index}: has no 'inputs' for the first layer; it has {there}")
        where = f"{self.name}, sample {index}"
        found = {str(k): _tensor(v, f"{where}: '{k}'") for k, v in item.items() if k != LENGTH}
        return found, item[LENGTH] if LENGTH in item else _tokens(found)

    def number(self, k: int) -> int:
        """The index in the dataset of sample k of the run."""
        group, place = divmod(k, self.together)
        epoch, at = divmod(group, self.groups)
        key = hashlib.blake2b(f"{self.seed}:{epoch}:{self.split}".encode(), digest_size=8).digest()
        return (self.first + permute(at, self.groups, int.from_bytes(key, "little"))) * self.together + place

    def rows(self, ks: Iterable[int]) -> tuple[dict[str, Any], Lengths]:
        """Samples `ks` stacked, with the further columns; and what they hold."""
        numbers = [self.number(k) for k in ks]
        found, lengths = zip(*map(self._read, numbers), strict=True)
        for n, row in zip(numbers, found, strict=True):
            if row.keys() != found[0].keys():
                raise DataError(f"{self.name}: sample {n} has {sorted(row)}, sample {numbers[0]} {sorted(found[0])}")
        batch = {name: self._stacked(name, [row[name] for row in found], numbers) for name in found[0]}
        batch |= {name: torch.from_numpy(values[numbers]) for name, values in self.columns.items()}
        return batch, Lengths(sum(lengths), sum(n * n for n in lengths))

    def _stacked(self, name: str, values: list[Any], numbers: list[int]) -> Any:
        if isinstance(values[0], tuple):
            return tuple(self._stacked(name, list(each), numbers) for each in zip(*values, strict=True))
        for n, value in zip(numbers, values, strict=True):
            if value.shape != values[0].shape:
                raise DataError(
                    f"{self.name}: '{name}' of sample {n} has the shape {list(value.shape)}, of sample {numbers[0]} "
                    f"{list(values[0].shape)}; pad them to one length"
                )
        return torch.stack(values)

    def describe(self, global_batch: int, steps: int) -> str:
        """One line about the data of a run."""
        epochs, there = global_batch * steps / max(1, self.count), f"{self.count:,} samples"
        if self.together > 1:
            kind = "pairs" if self.together == 2 else f"groups of {self.together}"
            there = f"{self.groups:,} {kind} ({there})"
        left_out = getattr(self.data, "left_out", 0)
        missing = f"; {left_out:,} left out: an answer does not fit" if left_out else ""
        return f"{there}; {steps} steps are {epochs:.3g} epochs{missing}"

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def consumed(self, state: dict[str, Any]) -> int:
        """The inverse of `state`; refuses another dataset."""
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                f"{self.name}: not the dataset this run was trained on (fingerprint {self.fingerprint}, the run has "
                f"{state['fingerprint']}); give the old one, or start a new run"
            )
        return state["epoch"] * self.count + state["next"]


def _tokens(sample: dict[str, Any]) -> int:
    """What counts as the tokens of a sample: its inputs if they are integers, else 1."""
    value = sample.get("tokens", sample.get("inputs"))
    first = value[0] if isinstance(value, tuple) else value
    return first.numel() if isinstance(first, Tensor) and not first.is_floating_point() else 1


def _tensor(value: Any, where: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_tensor(v, where) for v in value)
    try:
        found = value.detach().cpu() if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError, RuntimeError):
        raise DataError(f"{where} is a {type(value).__name__}, not a number or an array") from None
    return found


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value
    return [t for v in values for t in _leaves(v)]


# ---- samples for the built-in models ----


class TokenRows:
    """A user's examples of tokens as samples of T tokens and targets, padded, with their further values for a loss."""

    def __init__(self, data: SampleRows, seq_len: int, vocab: int):
        self.data, self.seq_len, self.vocab = data, seq_len, vocab

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item, where = self.data[index], f"data = {type(self.data).__name__}, sample {index}"
        if not isinstance(item, Mapping) or not {"tokens", "input_ids"} & item.keys():
            raise DataError(f"{where}: expected a mapping with 'tokens', found {type(item).__name__}")
        ids, mask = own_document(item, self.vocab, where)
        tokens, targets = padded(ids, mask, self.seq_len, 0)
        used = ("tokens", "input_ids", "targets", "labels", "loss_mask", "attention_mask")
        length = min(len(ids) - 1, self.seq_len)
        return {"tokens": tokens, "targets": targets, LENGTH: length} | {k: v for k, v in item.items() if k not in used}


class PairRows:
    """The documents of a corpus of preference pairs as samples: chosen, rejected, chosen, …"""

    def __init__(self, corpus: Corpus, seq_len: int):
        self.corpus, self.seq_len = corpus, seq_len
        assert corpus.starts is not None
        starts = np.asarray(corpus.starts, np.int64)
        lengths = np.diff(starts).reshape(-1, 2)
        fits = (lengths <= seq_len + 1).all(1)
        self.pairs, self.left_out = np.nonzero(fits)[0], int((~fits).sum())
        """Pairs with an answer that is too long are skipped: comparing truncated answers would be meaningless."""
        if not len(self.pairs):
            raise ConfigError(
                f"model.seq_len = {seq_len}: no pair fits; the shortest needs {int(lengths.max(1).min()) - 1} tokens"
            )

    def __len__(self) -> int:
        return 2 * len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert self.corpus.starts is not None
        document = 2 * int(self.pairs[index // 2]) + index % 2
        start, stop = (int(self.corpus.starts[document + i]) for i in (0, 1))
        mask = None if self.corpus.mask is None else np.asarray(self.corpus.mask[start:stop])
        tokens, targets = padded(np.asarray(self.corpus.tokens[start:stop]), mask, self.seq_len, self.corpus.end)
        return {"tokens": tokens, "targets": targets, LENGTH: stop - start - 1}


def padded(
    ids: npt.NDArray[Any], mask: npt.NDArray[Any] | None, length: int, end: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Tokens and targets of `length` from an example's ids, cut or padded at its end."""
    ids = ids[: length + 1].astype(np.int64)
    tokens, targets = (np.full(length, fill, np.int64) for fill in (end, IGNORE))
    used = max(0, len(ids) - 1)
    tokens[:used], targets[:used] = ids[:-1][:used], ids[1:][:used]
    if mask is not None:
        targets[:used][np.asarray(mask)[1 : used + 1] == 0] = IGNORE
    return tokens, targets
