"""A unit: the parameters of one part of the model, as views of one flat buffer, with verbs that the loop calls.

    full  [total]   compute dtype; every parameter is a view of it
    grad  [total]   reduce dtype; gradients accumulate here, in the order of the calls (the order of micro-batches)

Verbs: `gather` starts making the parameters usable, `need` makes them usable now, `release` gives their memory back,
`accumulate` adds one micro-batch's gradients, `reduce` starts summing them over the replica group, `finish` waits for it.
In mode `replicate` (the only one so far) parameters are always here, and the reduction is one all-reduce of `total`
elements per unit and step: 2 (N - 1) / N · total received elements on each of N ranks.

Collectives are issued in the order of the calls, which must be the same on every rank of the group. Nothing here is
called by a hook, and nothing knows a schedule.

[Note: tied weights]
A tied head uses the embedding's parameter: the head's unit *borrows* it. Both units accumulate their own part of the
gradient; the owner's `reduce` adds the borrower's once, after its own. So the order of the sum does not depend on the
order in which micro-batches ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fourfold.collectives import Pending, all_reduce
from fourfold.piece import Piece
from fourfold.shard.layout import Layout, lay_out

__all__ = ["Unit"]


class Unit:
    """Parameters gathered and reduced together. Built by `Unit.of`."""

    def __init__(
        self,
        name: str,
        layout: Layout,
        pieces: Mapping[str, tuple[Piece, ...]],
        full: Tensor,
        params: Mapping[str, nn.Parameter],
        borrowed: Mapping[str, tuple[Unit, str]],
        reduce_dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        sums: Mapping[str, dist.ProcessGroup] | None = None,
    ):
        self.name, self.layout, self.pieces, self.full = name, layout, dict(pieces), full
        self.params, self.borrowed, self.reduce_dtype, self.group = dict(params), dict(borrowed), reduce_dtype, group
        self.sums = dict(sums or {})
        self.grad: Tensor | None = None
        self._grads: dict[str, Tensor] = {}  # views of `grad` by name; accumulators of borrowed parameters
        self._borrowers: list[tuple[Unit, str, str]] = []  # unit, its name for the parameter, ours
        self._work: Pending | None = None
        for theirs, (owner, ours) in self.borrowed.items():
            owner._borrowers.append((self, theirs, ours))

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        name: str,
        module: nn.Module,
        *,
        pieces: Mapping[str, tuple[Piece, ...]],
        device: torch.device,
        compute: torch.dtype,
        reduce: torch.dtype,
        group: dist.ProcessGroup | None = None,
        borrow: Mapping[str, tuple[Unit, str]] | None = None,
        sums: Mapping[str, dist.ProcessGroup] | None = None,
    ) -> Unit:
        """Make a unit of `module`'s parameters (still on the meta device); they become views of its flat buffer.

        `pieces` says what each is. Those in `borrow` are another unit's, by that unit and its name for them. The gradients of
        those in `sums` are first summed over that group: ranks of a grid that hold copies of them, and matrices that differ.
        """
        borrowed = dict(borrow or {})
        mine = {n: p for n, p in module.named_parameters() if n not in borrowed}
        layout = lay_out({n: tuple(p.shape) for n, p in mine.items()})
        full = torch.zeros(layout.total, dtype=compute, device=device)
        params = {}
        for slot in layout.slots:
            params[slot.name] = nn.Parameter(full[slot.start : slot.stop].view(slot.shape))
            _place(module, slot.name, params[slot.name])
        for theirs, (owner, ours) in borrowed.items():
            _place(module, theirs, owner.params[ours])
        return cls(name, layout, {n: pieces[n] for n in params}, full, params, borrowed, reduce, group, sums)

    # ---- parameters ----

    def gather(self) -> None:
        """Start making the parameters usable."""

    def need(self) -> None:
        """Make the parameters usable by what the caller does next."""

    def release(self) -> None:
        """The parameters are not needed for now."""

    def parameters(self) -> list[nn.Parameter]:
        """What the unit's module computes with: its own parameters, then the borrowed ones."""
        return [*self.params.values(), *(owner.params[ours] for owner, ours in self.borrowed.values())]

    # ---- gradients ----

    def main_grad(self, name: str) -> Tensor:
        """The accumulator of one parameter, of the reduce dtype and the parameter's shape."""
        if self.grad is None:
            self.grad = torch.zeros(self.layout.total, dtype=self.reduce_dtype, device=self.full.device)
            self._grads = {s.name: self.grad[s.start : s.stop].view(s.shape) for s in self.layout.slots}
            for theirs, (owner, ours) in self.borrowed.items():
                self._grads[theirs] = torch.zeros_like(owner.params[ours], dtype=self.reduce_dtype)
        return self._grads[name]

    @torch.no_grad()
    def accumulate(self, grads: Sequence[Tensor | None]) -> None:
        """Add one micro-batch's gradients, in the order of `parameters()`; None: this parameter was not used."""
        for name, grad in zip([*self.params, *self.borrowed], grads, strict=True):
            if grad is not None:
                self.main_grad(name).add_(grad)

    @torch.no_grad()
    def add_weight_grad(self, name: str, x: Tensor, dy: Tensor) -> None:
        """Add dYᵀX, the gradient of a linear's weight [outputs, inputs]; needs no parameter.

        The product is rounded to the compute dtype before it is added, as autograd's is.
        """
        self.main_grad(name).add_(dy.flatten(0, -2).t() @ x.flatten(0, -2))

    @torch.no_grad()
    def add_grad(self, name: str, grad: Tensor) -> None:
        """Add a gradient that was computed by itself."""
        self.main_grad(name).add_(grad)

    @torch.no_grad()
    def reduce(self) -> None:
        """Start summing the gradient over the replica group. A unit without a gradient takes part with zeros."""
        assert self._work is None, f"{self.name} is being reduced"
        first = self.layout.slots[0].name
        self.main_grad(first)
        assert self.grad is not None
        for borrower, theirs, ours in self._borrowers:
            self.main_grad(ours).add_(borrower.main_grad(theirs))
        self._sum_copies()
        if self.group is not None and self.group.size() > 1:
            self._work = all_reduce(self.grad, self.group, f"the sum of {self.name}'s gradients")

    def _sum_copies(self) -> None:
        """One small all-reduce for all parameters that have the same group in `sums`."""
        for group in dict.fromkeys(self.sums.values()):
            parts = [self.main_grad(name) for name, theirs in self.sums.items() if theirs is group]
            flat = torch.cat([p.flatten() for p in parts])
            all_reduce(flat, group, f"the sum of copied gradients of {self.name}").wait()
            for part, total in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
                part.copy_(total.view_as(part))

    def finish(self) -> None:
        """Wait for the reduction: `grad` is final."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def zero_grad(self) -> None:
        """Forget the gradients and free their memory."""
        assert self._work is None, f"{self.name} is being reduced"
        self.grad, self._grads = None, {}


def _place(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    module.get_submodule(owner)._parameters[leaf] = parameter
