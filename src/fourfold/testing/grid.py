"""A tensor grid in one process: every rank is a thread, and collectives are exchanges between threads. 64 ranks in a second.

    def check(place, grid, depth):            # place: this rank's (depth, row, col)
        y = linear_on(grid)(x[place])
        return depth.sum(y)

    results = run_grid(check, 4, 4, 4)

For testing the correctness of layers; sums are in rank order. Bytes, timing and process groups need processes: `run_ranks`.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fourfold.errors import RankFailure
from fourfold.tensor.grid import Axis, Grid

__all__ = ["run_grid"]


class _Line:
    """The ranks of one line of the grid, which exchange tensors at a barrier."""

    def __init__(self, size: int, timeout: float):
        self.barrier, self.exchanged = threading.Barrier(size, timeout=timeout), [torch.empty(0)] * size

    def show(self, index: int, x: Tensor) -> list[Tensor]:
        self.exchanged[index] = x.detach()
        self.barrier.wait()
        everyone = list(self.exchanged)
        self.barrier.wait()
        return everyone


class _ThreadAxis(Axis):
    """An Axis between threads."""

    def __init__(self, name: str, size: int, index: int, line: _Line):
        super().__init__(name, size, index)  # no group: collectives complete at once
        self.line = line

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._all(x))

    def scatter(self, x: Tensor) -> Tensor:
        return _total([part.chunk(self.size)[self.index] for part in self._all(x)])

    def sum(self, x: Tensor) -> Tensor:
        return _total(self._all(x))

    def max(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x)).amax(0)

    def exchange(self, x: Tensor) -> Tensor:
        return torch.cat([part.chunk(self.size)[self.index] for part in self._all(x)])

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return self._all(x)[source]

    def reduce(self, x: Tensor, target: int) -> Tensor:
        total = _total(self._all(x))
        return total if target == self.index else torch.full_like(total, float("nan"))

    def _all(self, x: Tensor) -> list[Tensor]:
        found = self.line.show(self.index, x)
        assert all(part.shape == x.shape for part in found), f"{self.name}: {[tuple(p.shape) for p in found]}"
        return found


def _total(parts: list[Tensor]) -> Tensor:
    out = parts[0].clone()
    for part in parts[1:]:
        out += part
    return out


def run_grid(fn: Callable[..., Any], depth: int, row: int, col: int, *args: Any, timeout: float = 30.0) -> list[Any]:
    """Call `fn((k, i, j), grid, depth axis, *args)` in a thread for every rank; returns the results in rank order."""
    degrees = {"depth": depth, "row": row, "col": col}
    places = [(k, i, j) for k in range(depth) for i in range(row) for j in range(col)]
    lines: dict[tuple[Any, ...], _Line] = {}
    results: dict[tuple[int, int, int], Any] = {}
    failures: list[tuple[tuple[int, int, int], str]] = []

    def axis(name: str, place: tuple[int, int, int]) -> Axis:
        at = list(degrees).index(name)
        others = (name, *place[:at], *place[at + 1 :])
        return _ThreadAxis(name, degrees[name], place[at], lines.setdefault(others, _Line(degrees[name], timeout)))

    def work(place: tuple[int, int, int], grid: Grid, planes: Axis) -> None:
        try:
            results[place] = fn(place, grid, planes, *args)
        except threading.BrokenBarrierError:
            pass  # another rank failed, and is reported
        except BaseException:
            failures.append((place, traceback.format_exc()))
        finally:
            if place not in results:
                for line in lines.values():
                    line.barrier.abort()

    replicas = ("depth",) if depth > 1 else ()
    ranks = [(p, Grid(axis("row", p), axis("col", p), replicas), axis("depth", p)) for p in places]
    threads = [threading.Thread(target=work, args=rank, daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures or len(results) < len(places):
        place, text = failures[0] if failures else (None, "a rank waited for another until the timeout")
        raise RankFailure(f"rank {place} failed first:\n{text}")
    return [results[place] for place in places]
