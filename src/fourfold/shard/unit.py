"""A unit: the parameters of one part of the model, as views of one flat buffer, with verbs that a program calls.

With N shards (`sharing.py`), all flat, in elements:

    full        [total]      compute dtype; every parameter is a view of it. Has memory only while gathered (N = 1: always)
    shard       [total / N]  compute dtype; this rank's part: what is gathered, and what the optimizer writes (N = 1: `full`)
    grad        [total]      reduce dtype; gradients accumulate here, in the order of the calls (the order of micro-batches)
    shard_grad  [total / N]  reduce dtype; this rank's part of the sum over the replica group: what the optimizer reads

Verbs: `gather` starts making the parameters usable, `need` waits until they are, `release` gives their memory back,
`accumulate` and `add_weight_grad` add gradients, `reduce` starts summing them over the replica group and frees `grad`,
`finish` waits for the sums. Which verb when is the program's business: the modes zero2, zero3 and keep differ in nothing else.

Received elements on each of N ranks: gather and reduce (N - 1) / N · total each; a unit in one shard with N copies, 2 (N - 1) / N
· total for its all-reduce. Collectives are issued in the order of the calls, which must be the same on all ranks that share
them. Memory is taken and freed on the caller's stream; a wait blocks on the CPU and orders streams on CUDA.

[Note: parameters are views]
Nothing is copied in or out, and what autograd saved of a parameter is valid again after a later gather, since the storage
is emptied and refilled and never replaced. Parameters are views of `full.data`, which has its own version counter: a
gather is no change in place to autograd. While they are released, stand-ins lie in the module: touching one is an error
that names it, where touching an emptied tensor would crash.

[Note: tied weights]
A tied head uses the embedding's parameter: the head's unit *borrows* it, or rows of it. The lender is gathered as long as
it or a borrower is. All accumulate their own part of the gradient; the lender's `reduce` adds the borrowers' once, after
its own. So the order of the sum does not depend on the order in which micro-batches ran.

[Note: gradients summed over more ranks]
On a grid, norms and biases are copies over more ranks than matrices are. `sum_over` names such parameters with the group
that holds the other copies; they are laid out last, and one small all-reduce for each group comes before the reduction. So
layers need no collective for them. Without a reduction, nothing waits for them before the step's end.

[Note: slices]
Layers are cut into slices for the sake of memory, so a slice is frugal: its gradient is made when no other waits for its
reduction, and a quarter of a product at a time. One slice that is gathered ahead, one that computes and one whole gradient
are all there is of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fourfold.collectives import Pending, all_gather, all_reduce
from fourfold.errors import ReleasedError
from fourfold.piece import Piece
from fourfold.shard.layout import FlatLayout, Slot, lay_out
from fourfold.shard.sharing import ALONE, Reduction, Reductions, Sharing

__all__ = ["Borrowed", "Buffer", "Unit"]


class Borrowed(NamedTuple):
    """Another unit's parameter: all of it, or rows [start, stop)."""

    lender: Unit
    name: str
    rows: tuple[int, int] | None = None


class Buffer(Protocol):
    """Where the gradients of several units lie (joined.py)."""

    def part(self, unit: Unit) -> Tensor: ...
    def reduce(self, unit: Unit) -> None: ...
    def forget(self) -> None: ...


class _Registration(NamedTuple):
    """Where a parameter lies in a module."""

    registry: dict[str, Any]
    leaf: str
    parameter: nn.Parameter
    stand_in: Tensor


class Unit:
    """Parameters gathered and reduced together. Built by `Unit.of`."""

    def __init__(
        self,
        name: str,
        layout: FlatLayout,
        pieces: Mapping[str, tuple[Piece, ...]],
        full: Tensor,
        params: Mapping[str, nn.Parameter],
        borrowed: Mapping[str, Borrowed],
        reduce_dtype: torch.dtype,
        sharing: Sharing = ALONE,
        reductions: Reductions | None = None,
        sums: Sequence[tuple[int, int, dist.ProcessGroup]] = (),
        sliced: bool = False,
    ):
        self.name, self.layout, self.pieces, self.full = name, layout, dict(pieces), full
        self.params, self.borrowed, self.reduce_dtype = dict(params), dict(borrowed), reduce_dtype
        self.sharing, self.reductions, self.sums = sharing, reductions or Reductions(), tuple(sums)
        self.sliced = sliced  # one of a layer's slices: [Note: slices]
        self.shard = full if sharing.shards == 1 else full.new_empty(layout.total // sharing.shards)
        self.grad: Tensor | None = None
        self.shard_grad: Tensor | None = None
        self._grads: dict[str, Tensor] = {}  # accumulators: views of `grad`, and those of borrowed parameters
        self._fresh: set[str] = set()  # those not written to yet: the first gradient is copied, not added to zeros
        self.lent = False  # whether autograd adds to them itself
        self._gaps, self._slots = layout.gaps(), {s.name: s for s in layout.slots}
        self._rows: dict[str, nn.Parameter] = {}  # borrowed parameters as this unit's module holds them
        self._borrowers: list[tuple[Unit, str, Borrowed]] = []
        self._holders: set[str] = {name}  # units that have gathered this one and not released it
        self._gathering: Pending | None = None
        self._reducing: list[Reduction] = []
        self.joined: Buffer | None = None  # its gradient is a part of this, and summed with the others
        self._places: list[_Registration] = []

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
        sharing: Sharing = ALONE,
        reductions: Reductions | None = None,
        borrow: Mapping[str, Borrowed] | None = None,
        sum_over: Mapping[str, dist.ProcessGroup] | None = None,
        names: Sequence[str] | None = None,
        sliced: bool = False,
    ) -> Unit:
        """Make a unit of `module`'s parameters (their shapes: they may be on the meta device), gathered and zero.

        They become views of its flat buffer. `pieces` says what each is. Those in `borrow` are another unit's; those in
        `sum_over` are copies over more ranks; `names`: these alone. Fill them, then call `scatter`.
        """
        borrowed, also = dict(borrow or {}), dict(sum_over or {})
        found = dict(module.named_parameters())
        mine = {n: found[n] for n in names or found if n not in borrowed}
        groups = list(dict.fromkeys(also.values()))
        order = sorted(
            mine, key=lambda n: 1 + groups.index(also[n]) if n in also else 0
        )  # copies over more ranks: last
        layout = lay_out({n: tuple(mine[n].shape) for n in order}, sharing.shards)
        full = torch.zeros(layout.total, dtype=compute, device=device)
        alias = full.data  # [Note: parameters are views]
        params = {
            s.name: nn.Parameter(alias[s.start : s.stop].view(s.shape), mine[s.name].requires_grad)
            for s in layout.slots
        }
        sums = [_span([s for s in layout.slots if also.get(s.name) is group], group) for group in groups]
        unit = cls(
            name,
            layout,
            {n: pieces[n] for n in params},
            full,
            params,
            borrowed,
            reduce,
            sharing,
            reductions,
            sums,
            sliced,
        )
        for n, parameter in params.items():
            unit.put(module, n, parameter)
        for theirs, borrowing in borrowed.items():
            unit._borrow(module, theirs, borrowing)
        return unit

    def put(self, module: nn.Module, name: str, parameter: nn.Parameter, borrower: str | None = None) -> None:
        """Lay a parameter of this unit into a module, where it is as long as the unit is gathered."""
        owner, _, leaf = name.rpartition(".")
        registry: dict[str, Any] = module.get_submodule(owner)._parameters
        registry[leaf] = parameter
        self._places.append(
            _Registration(registry, leaf, parameter, _stand_in(parameter, f"{borrower or self.name}.{name}", self.name))
        )

    def _borrow(self, module: nn.Module, name: str, borrowed: Borrowed) -> None:
        lender, theirs, rows = borrowed
        parameter = lender.params[theirs]
        if rows is not None:
            with lender._with_memory():  # torch makes no view of an empty storage
                parameter = nn.Parameter(parameter.data[slice(*rows)], parameter.requires_grad)
        self._rows[name] = parameter
        lender.put(module, name, parameter, self.name)
        lender._borrowers.append((self, name, borrowed))

    @contextmanager
    def _with_memory(self) -> Iterator[None]:
        storage = self.full.untyped_storage()
        size = storage.size()
        storage.resize_(self.full.numel() * self.full.element_size())
        yield
        storage.resize_(size)

    # ---- parameters ----

    @torch.no_grad()
    def scatter(self) -> None:
        """The parameters were written: keep this rank's shard of them, and release them."""
        if self.sharing.shards > 1:
            self.shard.copy_(self.full[slice(*self.shard_range)])
            self.release()

    @property
    def shard_range(self) -> tuple[int, int]:
        """The elements of the flat buffer that this rank holds."""
        return self.layout.shard_range(self.sharing.index)

    def gather(self) -> None:
        """Start making the parameters usable, and those that are borrowed."""
        self._hold(self.name)
        for lender, *_ in self.borrowed.values():
            lender._hold(self.name)

    def need(self) -> None:
        """Make the parameters usable by what the caller does next; they must be gathered."""
        self._arrive()
        for lender, *_ in self.borrowed.values():
            lender._arrive()

    def release(self) -> None:
        """The parameters are not needed for now."""
        self._let_go(self.name)
        for lender, *_ in self.borrowed.values():
            lender._let_go(self.name)

    @property
    def gathered(self) -> bool:
        """Whether the parameters are here, or on their way."""
        return self.sharing.shards == 1 or bool(self._holders)

    def ready(self) -> bool:
        """Whether the parameters can be used without waiting; a function of the verbs alone, not of time."""
        units = [self, *(lender for lender, *_ in self.borrowed.values())]
        return all(unit.gathered and unit._gathering is None for unit in units)

    def _hold(self, who: str) -> None:
        there = bool(self._holders)
        self._holders.add(who)
        if self.sharing.shards == 1 or there or not self.layout.total:
            return
        self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
        assert self.sharing.gathers is not None
        self._gathering = all_gather(self.full, self.shard, self.sharing.gathers, f"the parameters of {self.name}")

    def _arrive(self) -> None:
        assert self.gathered, f"{self.name} is used and was not gathered"
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            for place in self._places:
                place.registry[place.leaf] = place.parameter

    def _let_go(self, who: str) -> None:
        self._holders.discard(who)
        if self.sharing.shards == 1 or self._holders:
            return
        self._arrive_quietly()
        for place in self._places:
            place.registry[place.leaf] = place.stand_in
        self.full.untyped_storage().resize_(0)

    def _arrive_quietly(self) -> None:
        """Nobody used what was gathered: it still must not be written to after its memory is gone."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def parameters(self) -> list[nn.Parameter]:
        """What the unit's module computes with: its own parameters, then the borrowed ones."""
        return [*self.params.values(), *self._rows.values()]

    # ---- gradients ----

    def main_grad(self, name: str) -> Tensor:
        """The accumulator of one parameter, of the reduce dtype and the parameter's shape."""
        into = self._accumulator(name)
        if name in self._fresh:
            into.zero_()
            self._fresh.remove(name)
        return into

    def _accumulator(self, name: str) -> Tensor:
        if name in self._rows:
            if name not in self._grads:
                self._grads[name] = torch.empty_like(self._rows[name], dtype=self.reduce_dtype)
                self._fresh.add(name)
        else:
            whole = self._whole_grad()
            if name not in self._grads:
                slot = self._slots[name]
                self._grads[name] = whole[slot.start : slot.stop].view(slot.shape)
        return self._grads[name]

    def _whole_grad(self) -> Tensor:
        if self.grad is None:
            if self.sliced:
                self.reductions.settle()
            if self.sharing.shards == 1:  # of the micro-batch before: long done
                self._settle()
            if self.joined is not None:
                self.grad = self.joined.part(self)
            else:
                self.grad = torch.empty(self.layout.total, dtype=self.reduce_dtype, device=self.full.device)
            self._fresh.update(self.params)
            for start, stop in self._gaps:
                self.grad[start:stop].zero_()
        return self.grad

    def lends_grads(self) -> bool:
        """Whether autograd can add to the accumulators itself: they are its own, and of the parameters' type."""
        return self.reduce_dtype == self.full.dtype and not self.sliced and not self.borrowed

    def accumulates(self) -> bool:
        """Whether the accumulators are there; who has none holds no memory for them yet."""
        return self.grad is not None or not self.params

    def lend_grads(self) -> None:
        """Until they are taken back, the accumulators are the parameters' `grad`."""
        if self.lent:
            return
        self.lent = True
        whole, there = self._whole_grad(), self._grads
        if self._fresh >= self.params.keys():
            whole.zero_()
            self._fresh -= self.params.keys()
        for name, p in self.params.items():
            p.grad = there[name] if name in there and name not in self._fresh else self.main_grad(name)

    def take_grads_back(self) -> None:
        if self.lent:
            self.lent = False
            for p in self.params.values():
                p.grad = None

    @torch.no_grad()
    def accumulate(self, grads: Sequence[Tensor | None]) -> None:
        """Add one micro-batch's gradients, in the order of `parameters()`; None: this parameter was not used."""
        given = [g for g in grads if g is not None]
        if given and len(given) == len(self.params) == len(grads):
            if self.grad is None and not self._gaps:
                self._accumulator(next(iter(self.params)))
                torch.cat([g.flatten() for g in given], out=self.grad)
                self._fresh.clear()
                return
            if self.grad is not None and not self._fresh:
                there = self._grads
                torch._foreach_add_([there[n] if n in there else self._accumulator(n) for n in self.params], given)
                return
        for name, grad in zip([*self.params, *self._rows], grads, strict=True):
            if grad is not None:
                self._add(name, grad)

    @torch.no_grad()
    def add_weight_grad(self, name: str, x: Tensor, dy: Tensor) -> None:
        """Add dYᵀX, the gradient of a linear's weight [outputs, inputs]; needs no parameter.

        The product is rounded to the compute dtype before it is added, as autograd's is; a slice's exists in parts.
        """
        into, dy, x = self._accumulator(name), dy.flatten(0, -2).t(), x.flatten(0, -2)
        if name in self._fresh and into.dtype == x.dtype:
            torch.mm(dy, x, out=into)
        else:
            rows = max(64, -(-len(into) // 4)) if self.sliced else len(into)
            for start in range(0, len(into), rows):
                product, part = dy[start : start + rows] @ x, into[start : start + rows]
                _ = part.copy_(product) if name in self._fresh else part.add_(product)
        self._fresh.discard(name)

    @torch.no_grad()
    def add_grad(self, name: str, grad: Tensor) -> None:
        """Add a gradient that was computed by itself."""
        self._add(name, grad)

    def _add(self, name: str, grad: Tensor) -> None:
        into = self._accumulator(name)
        _ = into.copy_(grad) if name in self._fresh else into.add_(grad)
        self._fresh.discard(name)

    @torch.no_grad()
    def collect(self) -> None:
        """Take over the gradients of those that borrow from this unit: [Note: tied weights]."""
        for borrower, theirs, (_, ours, rows) in self._borrowers:
            grad = borrower._grads.pop(theirs, None)
            if grad is not None:
                target = self.main_grad(ours)
                (target if rows is None else target[slice(*rows)]).add_(grad)

    @torch.no_grad()
    def reduce(self) -> None:
        """Start summing what has accumulated over the replica group. A unit without a gradient takes part with zeros."""
        self.collect()
        if not self.layout.total:
            return
        grad = self._whole_grad()
        for name in self._fresh.intersection(self.params):
            self.main_grad(name)
        self.grad, self._grads = None, {n: g for n, g in self._grads.items() if n in self._rows}
        what = f"the sum of {self.name}'s gradients"
        sums = [all_reduce(grad[start:stop], group, f"{what} over their copies") for start, stop, group in self.sums]
        if self.sharing.copies * self.sharing.shards > 1:  # the reduction reads them
            for pending in sums:
                pending.wait()
        if self.joined is not None:
            self.joined.reduce(self)
        else:
            self.follow(self.reductions.start(grad, self.sharing, what, self.reduced, sums))

    def follow(self, reduction: Reduction) -> None:
        """A sum that this unit's gradient is in has been started."""
        self._reducing.append(reduction)

    @torch.no_grad()
    def reduced(self, part: Tensor) -> None:
        """This rank's part of a sum is there."""
        self.shard_grad = part if self.shard_grad is None else self.shard_grad.add_(part)

    def _settle(self) -> None:
        for reduction in self._reducing:
            reduction.complete()
        self._reducing = []

    def finish(self) -> None:
        """Wait for the reductions: `shard_grad` is final."""
        self._settle()
        for borrower, theirs, _ in self._borrowers:
            assert theirs not in borrower._grads, f"{borrower.name} had a gradient after {self.name} was reduced"

    def reduced_grad(self, name: str) -> Tensor:
        """The final gradient of one parameter, of its shape; where the unit is in one shard."""
        assert self.sharing.shards == 1, f"{self.name} is sharded"
        assert self.shard_grad is not None, f"{self.name} was not reduced"
        slot = self._slots[name]
        return self.shard_grad[slot.start : slot.stop].view(slot.shape)

    def zero_grad(self) -> None:
        """Forget the gradients and free their memory."""
        assert not self._reducing, f"{self.name} is being reduced"
        self.grad, self.shard_grad, self._grads, self._fresh = None, None, {}, set()
        if self.joined is not None:
            self.joined.forget()

    # ---- what a shard holds ----

    def slots(self) -> list[tuple[Slot, int, int]]:
        """The slots of which this rank's shard holds a part, each with the part's place in the shard."""
        low, high = self.shard_range
        cut = [(s, max(s.start, low) - low, min(s.stop, high) - low) for s in self.layout.slots]
        return [(s, start, stop) for s, start, stop in cut if start < stop]


def _span(slots: Sequence[Slot], group: dist.ProcessGroup) -> tuple[int, int, dist.ProcessGroup]:
    return slots[0].start, slots[-1].stop, group


# ---- what lies in a module in place of a released parameter ----


class _Released(Tensor):
    """Has a parameter's shape and type and no values; using it is an error that names it."""

    title: str
    unit: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _HARMLESS:
            return super().__torch_function__(func, types, args, kwargs or {})
        found = next((a for a in [*args, *(kwargs or {}).values()] if isinstance(a, cls)), None)
        name, unit = (found.title, found.unit) if found is not None else ("a parameter", "its unit")
        raise ReleasedError(
            f"{name} was used while it is released: it has no memory now. GATHER {unit} comes before its use"
        )


_HARMLESS = ("__get__", "size", "dim", "numel", "stride", "is_floating_point", "requires_grad_")


def _stand_in(parameter: nn.Parameter, title: str, unit: str) -> Tensor:
    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    made = empty.requires_grad_(parameter.requires_grad).as_subclass(_Released)
    made.title, made.unit = title, unit
    return made
