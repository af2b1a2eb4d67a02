"""Packs whole examples into windows of T positions. numpy only.

A document of n tokens takes n - 1 positions: every token but the last is an input, every token but the first a target. A document
that takes more than T is cut, split, dropped or refused. Windows are filled by best fit, longest first: each document is put into
the window with the least sufficient room. All documents of one length and all windows of equal room are processed at once, so
that a million documents take less than a second. The result is a function of the lengths alone.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fourfold.errors import DataError

__all__ = ["Segments", "best_fit", "segments_of"]

Ints = npt.NDArray[np.int64]
CHUNK = 1 << 24
"""Tokens whose mask is read at a time."""


@dataclass(frozen=True)
class Segments:
    """Runs of tokens that are trained on as documents: segment i is `lengths[i]` tokens from `first[i]` on, at most T + 1."""

    first: Ints
    lengths: Ints
    predicted: Ints
    """Number of predicted tokens of each."""
    cut: int = 0
    """Number of documents that were truncated."""
    split: int = 0
    """Number of documents that were split."""
    too_long: int = 0
    """Number of documents dropped for their length."""
    empty: int = 0
    """Number of documents dropped because no token in them is predicted."""

    def __len__(self) -> int:
        return len(self.first)

    def part(self, start: int, stop: int) -> Segments:
        """Segments [start, stop); the counts stay those of all."""
        return self.chosen(np.arange(start, stop))

    def chosen(self, which: Ints) -> Segments:
        """The segments with these indices, which may repeat; the counts stay those of all."""
        return replace(self, first=self.first[which], lengths=self.lengths[which], predicted=self.predicted[which])


def segments_of(
    name: str, starts: npt.NDArray[Any], mask: npt.NDArray[Any] | None, places: int, overlong: str
) -> Segments:
    """The segments of a corpus whose documents begin at `starts`, for windows of `places`; `mask`: 1 where predicted."""
    bounds = np.asarray(starts, np.int64)
    first, lengths = bounds[:-1], bounds[1:] - bounds[:-1]
    long = lengths > places + 1
    cut = split = too_long = 0
    if long.any():
        if overlong == "error":
            raise DataError(
                f"{name}: {long.sum():,} of {len(lengths):,} examples are longer than model.seq_len = {places}, the longest has "
                f"{lengths.max():,} tokens; use a longer seq_len, or data.overlong = 'cut', 'split' or 'drop'"
            )
        if overlong == "split":
            parts = np.maximum(1, -(-(lengths - 1) // places))
            number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)  # within its document
            ends = np.repeat(first + lengths, parts)
            first = np.repeat(first, parts) + number * places
            lengths, split = np.minimum(ends - first, places + 1), int(long.sum())
        elif overlong == "drop":
            first, lengths, too_long = first[~long], lengths[~long], int(long.sum())
        else:
            lengths, cut = np.minimum(lengths, places + 1), int(long.sum())
    predicted = np.maximum(0, lengths - 1) if mask is None else _predicted(mask, first, lengths)
    kept = predicted > 0
    return Segments(first[kept], lengths[kept], predicted[kept], cut, split, too_long, int((~kept).sum()))


def _predicted(mask: npt.NDArray[Any], first: Ints, lengths: Ints) -> Ints:
    """Number of predicted tokens of each segment: those in the mask, except the first token."""
    out = np.zeros(len(first), np.int64)
    i = 0
    while i < len(first):
        j = max(i + 1, int(np.searchsorted(first, first[i] + CHUNK)))  # segments are in the order of their tokens
        low, high = int(first[i]), int((first[i:j] + lengths[i:j]).max())
        before = np.concatenate(([0], np.cumsum(mask[low:high], dtype=np.int64)))
        at = first[i:j] - low
        out[i:j] = before[at + lengths[i:j]] - before[at + np.minimum(1, lengths[i:j])]
        i = j
    return out


def best_fit(places: Ints, room: int) -> tuple[Ints, Ints]:
    """Pack documents that take `places` (1 to `room`) each into windows of `room` places.

    Returns the documents, window by window, and the offsets of the windows among them (windows + 1 values).
    """
    by_length = np.argsort(-places, kind="stable")
    lengths, where = np.unique(-places[by_length], return_index=True)
    window_of, windows = np.empty(len(places), np.int64), 0
    # windows by remaining room, in runs, and a bit for each room that occurs
    waiting: defaultdict[int, list[Ints]] = defaultdict(list)
    rooms = 0
    for length, (start, stop) in zip(-lengths, pairwise([*where, len(places)]), strict=True):
        documents, size = by_length[start:stop], int(length)
        while len(documents):
            larger = rooms >> size
            left = size + ((larger & -larger).bit_length() - 1) if larger else room
            each = left // size  # a window with the least room takes documents until no further one fits
            wanted = -(-len(documents) // each)
            if larger:
                here = waiting[left].pop()
                if len(here) > wanted:
                    waiting[left].append(here[wanted:])
                    here = here[:wanted]
                if not waiting[left]:
                    rooms &= ~(1 << left)
            else:
                here = np.arange(windows, windows + wanted)
                windows += wanted
            now = documents[: len(here) * each]
            documents = documents[len(now) :]
            window_of[now] = np.repeat(here, each)[: len(now)]
            full = len(now) // each  # of these windows; the last may have taken fewer
            for some, took in ((here[:full], each), (here[full:], len(now) - full * each)):
                rest = left - took * size
                if len(some) and rest:
                    waiting[rest].append(some)
                    rooms |= 1 << rest
    order = np.argsort(window_of, kind="stable")
    return order, np.concatenate(([0], np.cumsum(np.bincount(window_of, minlength=windows))))
