"""The periodic form of a schedule: warm-up, a body that repeats, cool-down.

Run the ops of a schedule in the order of their start times and count, for every stage and kind, how many have started.
If between two moments every count has grown by the same k, the ops between them are a **body**: it can be repeated any number
of times, each time with its micro-batches shifted by k, before the rest follows. All dependencies still hold: the input of an
op is produced either in the same copy of the body or before it, shifted by k like everything else. Memory repeats as well.

So a schedule found for a small number of micro-batches extends to larger ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fourfold.program.engine import Order, Problem, run

__all__ = ["Periodic", "find_body"]

_Op = tuple[int, str, int]


@dataclass(frozen=True)
class Periodic:
    """For each rank: `order[:begin]`, then `order[begin:end]` any number of times, then `order[end:]`."""

    order: tuple[tuple[_Op, ...], ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    stride: int
    """Micro-batches that each repetition of the body adds."""

    def extended(self, micro_batches: int) -> list[list[_Op]]:
        """The order for `micro_batches` more micro-batches, a multiple of `stride`."""
        assert micro_batches % self.stride == 0
        copies = micro_batches // self.stride
        out = []
        for ops, begin, end in zip(self.order, self.begin, self.end, strict=True):
            row = list(ops[:end])
            for copy in range(1, copies + 1):
                row += [(s, kind, m + copy * self.stride) for s, kind, m in ops[begin:end]]
            row += [(s, kind, m + micro_batches) for s, kind, m in ops[end:]]
            out.append(row)
        return out


def find_body(problem: Problem, order: Order) -> Periodic | None:
    """The body with the least time per micro-batch, or None; stages must process micro-batches in order."""
    times = run(problem, order)
    events = sorted((times.starts[rank][i], rank, i, op) for rank, ops in enumerate(order) for i, op in enumerate(ops))
    slot = {key: n for n, key in enumerate(sorted({op[:2] for _, _, _, op in events}))}
    # A moment's signature is a linear hash of its counts minus the first count: equal if all counts grew equally.
    weight = [pow(3, 7 * n + 5, _PRIME) for n in range(len(slot))]
    counts, signature, total = [0] * len(slot), 0, sum(weight)
    position = [0] * problem.ranks
    seen: dict[int, tuple[int, tuple[int, ...], Any]] = {}
    best: tuple[Any, Periodic] | None = None
    rows = tuple(tuple(ops) for ops in order)
    for n, (start, rank, i, (stage, kind, m)) in enumerate(events):
        at = slot[stage, kind]
        if m != counts[at]:
            return None
        counts[at] += 1
        signature = (signature + weight[at] - (total if at == 0 else 0)) % _PRIME
        position[rank] = i + 1
        if n + 1 < len(events) and events[n + 1][0] == start:
            continue  # a moment lies between two distinct times
        if signature in seen:
            count, where, then = seen[signature]
            if counts[0] > count:
                pace = (start - then) / (counts[0] - count)
                if best is None or pace < best[0]:
                    best = pace, Periodic(rows, where, tuple(position), counts[0] - count)
        else:
            seen[signature] = (counts[0], tuple(position), start)
    return best[1] if best else None


_PRIME = (1 << 61) - 1
