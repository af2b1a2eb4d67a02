"""A unit: the parameters of one part of the model, stored as views of one flat buffer. The field's term is an FSDP unit.

With N shards (`sharing.py`), all buffers flat, sizes in elements:

    full        [total]      compute dtype; every parameter is a view of it. Allocated only while gathered (N = 1: always)
    shard       [total / N]  compute dtype; the local shard: input of the all-gather, written by the optimizer (N = 1: `full`)
    grad        [total]      reduce dtype; gradient accumulator, added to in micro-batch order
    shard_grad  [total / N]  reduce dtype; this rank's shard of the gradient summed over the replica group, read by the optimizer

Methods that a program calls: `gather` starts the all-gather, `need` waits for it, `release` frees the gathered parameters,
`accumulate` and `add_weight_grad` add gradients, `reduce` starts the reduction over the replica group and frees `grad`,
`finish` waits for the reductions. The modes zero2, zero3 and keep differ only in when the program calls them.

Received elements on each of N ranks: gather and reduce (N - 1) / N · total each; an unsharded unit with N copies, 2 (N - 1) / N
· total for its all-reduce. Collectives are issued in the order of the calls, which must be the same on all ranks of the
group. Memory is allocated and freed on the caller's stream. A wait blocks the host on the CPU; on CUDA it orders streams.

[Note: parameters are views]
Parameters are never copied into or out of the buffer. A gather refills the same storage, so tensors that autograd saved are
valid again after a later gather. Parameters are views of `full.data`, which has its own version counter, so autograd does
not see a gather as an in-place change. While a unit is released, placeholders take the parameters' places in the module:
using one raises an error that names the parameter, where using an emptied tensor would crash.

[Note: tied weights]
A tied head uses the embedding's parameter: the head's unit *borrows* it, or rows of it, from the embedding's unit (the
lender). The lender stays gathered while it or a borrower needs it. Each unit accumulates its own gradient; the lender's
`reduce` adds the borrowers' gradients once, after its own. So the order of the sum does not depend on the order in which
micro-batches ran.

[Note: frozen weights]
With LoRA, a unit's own parameters are those of its adapters. The frozen weights are another unit, its *base*, from which it
borrows them all: gathered, needed and released with it, and nothing else, since no gradient reaches a frozen parameter. A base
has no accumulators and no optimizer state, and is never reduced. Slices of a layer may share a factor: the first slice, whose
backward comes last, lends it.

[Note: gradients summed over more ranks]
On a tensor grid, norms and biases are replicated over more ranks than matrices are. `sum_over` maps such parameters to the
group that holds the other copies. They come last in the buffer, and one small all-reduce per group precedes the reduction,
so layers need no collective for them. Without a reduction, nothing waits for these all-reduces before the end of the step.
Where ranks of the group compute the same gradient (`silent`), one of them counts, and the others add zeros.

[Note: slices]
Operator splitting cuts layers into slices to save memory. A slice's gradient is allocated only when no other reduction is
in flight, and its weight gradient is computed a quarter of the rows at a time. At most one prefetched slice, one computing
slice and one full gradient of a layer exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
    """One gradient buffer shared by several units (joined.py)."""

    def part(self, unit: Unit) -> Tensor: ...
    def reduce(self, unit: Unit) -> None: ...
    def discard(self) -> None: ...


class _Registration(NamedTuple):
    """Where a parameter is registered in a module, and the placeholder that replaces it while it is released."""

    registry: dict[str, Any]
    leaf: str
    parameter: nn.Parameter
    placeholder: Tensor


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
        silent: Collection[str] = (),
    ):
        self.name, self.layout, self.pieces, self.full = name, layout, dict(pieces), full
        self.params, self.borrowed, self.reduce_dtype = dict(params), dict(borrowed), reduce_dtype
        self.sharing, self.reductions, self.sums = sharing, reductions or Reductions(), tuple(sums)
        self.sliced = sliced  # a slice of a layer: [Note: slices]
        self.silent = tuple(silent)
        self.before_sums: Callable[[Unit], None] | None = None  # sees the gradients before they are summed over copies
        self.shard = full if sharing.shards == 1 else full.new_empty(layout.total // sharing.shards)
        self.grad: Tensor | None = None
        self.shard_grad: Tensor | None = None
        self._grads: dict[
            str, Tensor
        ] = {}  # accumulators by parameter: views of `grad`, and those of borrowed parameters
        self._unwritten: set[str] = (
            set()
        )  # accumulators without a value: the first gradient is copied, not added to zeros
        self.lent = False  # whether the accumulators are the parameters' `.grad` now
        self._gaps, self._slots = layout.gaps(), {s.name: s for s in layout.slots}
        self._borrowed_params: dict[
            str, nn.Parameter
        ] = {}  # borrowed parameters, or rows of them, as this module uses them
        self._borrowers: list[tuple[Unit, str, Borrowed]] = []
        self._holders: set[str] = {name}  # units that have gathered this one and not released it
        self._gathering: Pending | None = None
        self._reducing: list[Reduction] = []
        self._lenders: list[Unit] = list(dict.fromkeys(each.lender for each in self.borrowed.values()))
        self.before_use: Callable[[Unit], None] | None = None  # waits for an update of the weights under way
        self.joined: Buffer | None = None  # the shared gradient buffer, if there is one
        self._registrations: list[_Registration] = []
        self._aliases: dict[str, str] = {}  # further names of parameters in the module

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
        silent: Collection[str] = (),
    ) -> Unit:
        """Make a unit of `module`'s parameters (only shapes are read: they may be on the meta device), gathered and zero.

        The module's parameters are replaced by views of the unit's flat buffer. The caller writes their values, then calls
        `scatter`.

        Args:
            pieces: the parts of serial parameters that each parameter holds.
            borrow: parameters that belong to another unit (tied weights).
            sum_over: parameters replicated over more ranks than the unit, with the group of the other copies.
            names: use only these parameters; default all.
            sliced: whether the unit is a slice of a layer.
            silent: parameters of `sum_over` whose gradient here counts as zero: another rank of the group has the same.
        """
        borrowed, also = dict(borrow or {}), dict(sum_over or {})
        found = dict(module.named_parameters())
        mine = {n: found[n] for n in (found if names is None else names) if n not in borrowed}
        groups = list(dict.fromkeys(also.values()))
        order = sorted(
            mine, key=lambda n: 1 + groups.index(also[n]) if n in also else 0
        )  # parameters replicated over more ranks come last
        layout = lay_out({n: tuple(mine[n].shape) for n in order}, sharing.shards)
        full = torch.zeros(layout.total, dtype=compute, device=device)
        alias = full.data  # [Note: parameters are views]
        params = {
            s.name: nn.Parameter(alias[s.start : s.stop].view(s.shape), mine[s.name].requires_grad)
            for s in layout.slots
        }
        sums = [_span([s for s in layout.slots if also.get(s.name) is group], group) for group in groups]
        own = {n: pieces[n] for n in params}
        unit = cls(name, layout, own, full, params, borrowed, reduce, sharing, reductions, sums, sliced, silent)
        for n, parameter in params.items():
            unit.put(module, n, parameter)
        for n, source in borrowed.items():
            unit._borrow(module, n, source)
        return unit

    def put(self, module: nn.Module, name: str, parameter: nn.Parameter, borrower: str | None = None) -> None:
        """Register a parameter of this unit in a module; a placeholder replaces it while the unit is released."""
        owner, _, leaf = name.rpartition(".")
        registry: dict[str, Any] = module.get_submodule(owner)._parameters
        registry[leaf] = parameter
        placeholder = _placeholder(parameter, f"{borrower or self.name}.{name}", self.name)
        self._registrations.append(_Registration(registry, leaf, parameter, placeholder))

    def alias(self, module: nn.Module, name: str, of: str) -> None:
        """Register the parameter `of` under a further name, by which the module uses it as well."""
        self.put(module, name, self.params[of])
        self._aliases[name] = of

    def _borrow(self, module: nn.Module, name: str, borrowed: Borrowed) -> None:
        lender, theirs, rows = borrowed
        parameter = lender.params[theirs]
        if rows is not None:
            with lender._with_memory():  # torch cannot make a view of an empty storage
                parameter = nn.Parameter(parameter.data[slice(*rows)], parameter.requires_grad)
        self._borrowed_params[name] = parameter
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
        """Copy this rank's shard out of the full parameters, and release them. Called after their values were written."""
        if self.sharing.shards > 1:
            self.shard.copy_(self.full[slice(*self.shard_range)])
            self.release()

    @property
    def shard_range(self) -> tuple[int, int]:
        """The elements of the flat buffer that this rank holds."""
        return self.layout.shard_range(self.sharing.index)

    def gather(self) -> None:
        """Start gathering the parameters, borrowed ones included."""
        if self.before_use is not None:
            self.before_use(self)
        self._gather_for(self.name)
        for lender in self._lenders:
            lender._gather_for(self.name)

    def need(self) -> None:
        """Wait for the gather, so that the caller's next operations may use the parameters."""
        if self.before_use is not None:
            self.before_use(self)
        self._wait_gathered()
        for lender in self._lenders:
            lender._wait_gathered()

    def release(self) -> None:
        """Free the gathered parameters, unless another unit still uses them."""
        self._release_for(self.name)
        for lender in self._lenders:
            lender._release_for(self.name)

    @property
    def gathered(self) -> bool:
        """Whether the parameters are gathered or being gathered."""
        return self.sharing.shards == 1 or bool(self._holders)

    def ready(self) -> bool:
        """Whether the parameters can be used without waiting. Depends on the calls made, not on timing."""
        if self.before_use is not None:
            return False
        here = self.gathered and self._gathering is None
        return here and all(unit.gathered and unit._gathering is None for unit in self._lenders)

    def _gather_for(self, user: str) -> None:
        already_gathered = bool(self._holders)
        self._holders.add(user)
        if self.sharing.shards == 1 or already_gathered or not self.layout.total:
            return
        self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
        assert self.sharing.gathers is not None
        self._gathering = all_gather(self.full, self.shard, self.sharing.gathers, f"the parameters of {self.name}")

    def _wait_gathered(self) -> None:
        assert self.gathered, f"{self.name} is used but was not gathered"
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            for r in self._registrations:
                r.registry[r.leaf] = r.parameter

    def _release_for(self, user: str) -> None:
        self._holders.discard(user)
        if self.sharing.shards == 1 or self._holders:
            return
        if self._gathering is not None:  # gathered but never used: the collective must not write to freed memory
            self._gathering.wait()
            self._gathering = None
        for r in self._registrations:
            r.registry[r.leaf] = r.placeholder
        self.full.untyped_storage().resize_(0)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the unit's module uses: its own, then the borrowed ones."""
        return [*self.params.values(), *self._borrowed_params.values()]

    def trained(self) -> list[nn.Parameter]:
        """Those of them that have gradients."""
        return [p for p in self.parameters() if p.requires_grad]

    # ---- gradients ----

    def main_grad(self, name: str) -> Tensor:
        """The gradient accumulator of one parameter: its shape, the reduce dtype; zeros if nothing was added yet."""
        into = self._accumulator(name)
        if name in self._unwritten:
            into.zero_()
            self._unwritten.remove(name)
        return into

    def _accumulator(self, name: str) -> Tensor:
        if (made := self._grads.get(name)) is not None:
            return made
        if name in self._borrowed_params:
            made = torch.empty_like(self._borrowed_params[name], dtype=self.reduce_dtype)
            self._unwritten.add(name)
        else:
            slot = self._slots[name]
            made = self._full_grad()[slot.start : slot.stop].view(slot.shape)
        self._grads[name] = made
        return made

    def _full_grad(self) -> Tensor:
        if self.grad is None:
            if self.sliced:
                self.reductions.wait()
            if self.sharing.shards == 1:  # the previous micro-batch's all-reduce, normally finished by now
                self._wait_reductions()
            if self.joined is not None:
                self.grad = self.joined.part(self)
            else:
                self.grad = torch.empty(self.layout.total, dtype=self.reduce_dtype, device=self.full.device)
            self._unwritten.update(self.params)
            for start, stop in self._gaps:
                self.grad[start:stop].zero_()
        return self.grad

    def lends_grads(self) -> bool:
        """Whether autograd can write to the accumulators directly: same dtype, no slices, no borrowed parameters."""
        frozen = not any(p.requires_grad for p in self._borrowed_params.values())
        return self.reduce_dtype == self.full.dtype and not self.sliced and frozen

    def accumulates(self) -> bool:
        """Whether the gradient accumulators are allocated."""
        return self.grad is not None or not self.params

    def lend_grads(self) -> None:
        """Set each parameter's `.grad` to its accumulator, so that autograd adds in place, until `take_grads_back`."""
        if self.lent:
            return
        self.lent = True
        full_grad, grads = self._full_grad(), self._grads
        if self._unwritten >= self.params.keys():
            full_grad.zero_()
            self._unwritten -= self.params.keys()
        for name, p in self.params.items():
            p.grad = grads[name] if name in grads and name not in self._unwritten else self.main_grad(name)

    def take_grads_back(self) -> None:
        """Undo `lend_grads`: set each parameter's `.grad` to None."""
        if self.lent:
            self.lent = False
            for p in self.params.values():
                p.grad = None

    @torch.no_grad()
    def accumulate(self, grads: Sequence[Tensor | None]) -> None:
        """Add one micro-batch's gradients, in the order of `trained()`; None for a parameter that was not used."""
        given = [g for g in grads if g is not None]
        if given and len(given) == len(self.params) == len(grads):
            if self.grad is None and not self._gaps:
                self._accumulator(next(iter(self.params)))
                torch.cat([g.flatten() for g in given], out=self.grad)
                self._unwritten.clear()
                return
            if self.grad is not None and not self._unwritten:
                made = self._grads
                torch._foreach_add_([made[n] if n in made else self._accumulator(n) for n in self.params], given)
                return
        names = [n for n, p in (*self.params.items(), *self._borrowed_params.items()) if p.requires_grad]
        for name, grad in zip(names, grads, strict=True):
            if grad is not None:
                self._add(name, grad)

    @torch.no_grad()
    def add_weight_grad(self, name: str, x: Tensor, dy: Tensor) -> None:
        """Add dYᵀX, the gradient of a linear layer's weight [outputs, inputs]. The unit need not be gathered.

        The matmul's result is rounded to the compute dtype before it is added, as in autograd; for a slice it is computed
        a quarter of the rows at a time.
        """
        name = self._aliases.get(name, name)
        into, dy, x = self._accumulator(name), dy.flatten(0, -2).t(), x.flatten(0, -2)
        if name in self._unwritten and into.dtype == x.dtype:
            torch.mm(dy, x, out=into)
        else:
            rows = max(64, -(-len(into) // 4)) if self.sliced else max(1, len(into))
            for start in range(0, len(into), rows):
                product, part = dy[start : start + rows] @ x, into[start : start + rows]
                _ = part.copy_(product) if name in self._unwritten else part.add_(product)
        self._unwritten.discard(name)

    @torch.no_grad()
    def add_grad(self, name: str, grad: Tensor) -> None:
        """Add one parameter's gradient."""
        self._add(self._aliases.get(name, name), grad)

    def _add(self, name: str, grad: Tensor) -> None:
        into = self._accumulator(name)
        _ = into.copy_(grad) if name in self._unwritten else into.add_(grad)
        self._unwritten.discard(name)

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of the units that borrow from this one: [Note: tied weights]."""
        for borrower, theirs, (_, ours, rows) in self._borrowers:
            grad = borrower._grads.pop(theirs, None)
            if grad is not None:
                target = self.main_grad(ours)
                (target if rows is None else target[slice(*rows)]).add_(grad)

    @torch.no_grad()
    def reduce(self) -> None:
        """Start reducing the accumulated gradients over the replica group; a unit without gradients contributes zeros."""
        self.collect()
        if not self.layout.total:
            return
        grad = self._full_grad()
        for name in self._unwritten.intersection(self.params):
            self.main_grad(name)
        if self.before_sums is not None:
            self.before_sums(self)
        for name in self.silent:
            self.main_grad(name).zero_()
        self.grad, self._grads = None, {n: g for n, g in self._grads.items() if n in self._borrowed_params}
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
        """Register a started reduction that includes this unit's gradient; `finish` waits for it."""
        self._reducing.append(reduction)

    @torch.no_grad()
    def reduced(self, part: Tensor) -> None:
        """Receive this rank's shard of a finished reduction."""
        self.shard_grad = part if self.shard_grad is None else self.shard_grad.add_(part)

    def _wait_reductions(self) -> None:
        for reduction in self._reducing:
            reduction.complete()
        self._reducing = []

    def finish(self) -> None:
        """Wait for the reductions; afterwards `shard_grad` is final."""
        self._wait_reductions()
        for borrower, theirs, _ in self._borrowers:
            assert theirs not in borrower._grads, f"{borrower.name} got a gradient after {self.name} was reduced"

    def reduced_grad(self, name: str) -> Tensor:
        """The final gradient of one parameter, in its shape. Unsharded units only."""
        assert self.sharing.shards == 1, f"{self.name} is sharded"
        assert self.shard_grad is not None, f"{self.name} was not reduced"
        slot = self._slots[name]
        return self.shard_grad[slot.start : slot.stop].view(slot.shape)

    def zero_grad(self) -> None:
        """Discard the gradients and free their memory."""
        assert not self._reducing, f"{self.name} is being reduced"
        self.grad, self.shard_grad, self._grads, self._unwritten = None, None, {}, set()
        if self.joined is not None:
            self.joined.discard()

    # ---- contents of a shard ----

    def slots(self) -> list[tuple[Slot, int, int]]:
        """(slot, start, stop) for each slot that overlaps this rank's shard; positions are relative to the shard."""
        low, high = self.shard_range
        cut = [(s, max(s.start, low) - low, min(s.stop, high) - low) for s in self.layout.slots]
        return [(s, start, stop) for s, start, stop in cut if start < stop]


def _span(slots: Sequence[Slot], group: dist.ProcessGroup) -> tuple[int, int, dist.ProcessGroup]:
    return slots[0].start, slots[-1].stop, group


# ---- placeholders of released parameters ----


class _Released(Tensor):
    """Placeholder with a parameter's shape and dtype but no values; using it raises an error that names the parameter."""

    title: str
    unit: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _HARMLESS:
            return super().__torch_function__(func, types, args, kwargs or {})
        found = next((a for a in [*args, *(kwargs or {}).values()] if isinstance(a, cls)), None)
        name, unit = (found.title, found.unit) if found is not None else ("a parameter", "its unit")
        raise ReleasedError(
            f"{name} was used while released: it has no memory now. The program must GATHER {unit} before using it"
        )


_HARMLESS = ("__get__", "size", "dim", "numel", "stride", "is_floating_point", "requires_grad_")


def _placeholder(parameter: nn.Parameter, title: str, unit: str) -> Tensor:
    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    made = empty.requires_grad_(parameter.requires_grad).as_subclass(_Released)
    made.title, made.unit = title, unit
    return made
