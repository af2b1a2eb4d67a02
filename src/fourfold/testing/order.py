"""Checks that all ranks of a group issue their collectives in the same order: hashed per group, compared after every step.

    order = SameOrder()
    with order:                                     # in every rank
        fit(config, plan, callbacks=[order])        # or order.compare() at the same place on every rank

If a rank issues a collective in another order or with another size than its peers, a run may hang or compute wrong results,
depending on backend and timing. Here it is an error that names the group and the call. Point-to-point messages are not compared.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch.distributed as dist

from fourfold.testing.ledger import Ledger
from fourfold.train.callbacks import Callback, RunInfo

__all__ = ["SameOrder"]

_MESSAGES = ("send", "recv", "recv_any_source")


class SameOrder(Callback, Ledger):
    """The collectives this rank issued since the last comparison."""

    compared = 0
    """Number of calls found equal on all ranks."""

    def on_step(self, run: RunInfo, metrics: dict[str, Any]) -> None:
        self.compare()

    def compare(self) -> None:
        """Compare across ranks (all must call it); raises if the ranks of a group issued different collectives or orders."""
        mine: dict[str, list[tuple[str, int]]] = {}
        for entry in self.entries:
            if entry.kind not in _MESSAGES:
                mine.setdefault(entry.group, []).append((entry.kind, entry.payload))
        if dist.is_initialized():
            self._compare(mine)
        self.compared += sum(map(len, mine.values()))
        self.clear()

    def _compare(self, mine: dict[str, list[tuple[str, int]]]) -> None:
        hashes = {name: hashlib.sha256(repr(calls).encode()).hexdigest() for name, calls in mine.items()}
        everyone = _exchanged(hashes)
        wrong = sorted(
            {name for each in everyone for name in each if len({h.get(name) for h in everyone} - {None}) > 1}
        )
        if not wrong:
            return
        for name in wrong:  # all ranks come here together
            calls = {rank: c for rank, c in enumerate(_exchanged(mine.get(name))) if c is not None}
            first, *others = calls
            for other in others:
                pairs = [*zip(calls[first], calls[other], strict=False)]
                at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
                if calls[first] != calls[other]:
                    found = [(calls[rank][at : at + 1] or ["nothing"])[0] for rank in (first, other)]
                    raise AssertionError(
                        f"group {name}: call {at} is {found[0]} on rank {first} and {found[1]} on rank {other}"
                    )


def _exchanged(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
