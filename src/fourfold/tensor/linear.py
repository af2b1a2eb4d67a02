"""A linear layer on the grid: a serial `nn.Linear` [outputs, inputs]; each rank holds 1/(row·col) of it.

Its input and output are the residual stream, as tokens [m, width] or features [B, T, block], or the inside of a layer, as
features in blocks that suit the computation (whole heads, gate next to up). It uses one flow (costs.py), and converts an input
or output that does not have the layout of the flow.

On its own, it gathers its weight when needed, and autograd gets its gradient. In a stage (`serve`), weights are prefetched and
gradients are passed to a unit after a deferred reduction. There it can also keep, until `forget`, the gathered `weights` (one
gather per step) and the unreduced `gradients` (one reduction over row per step, at `flush`).

[Note: adapters on the grid]
An adapter (LoRA) is computed from the layer's input and added to its output, whatever the flow. A has the layout of the input and
B that of the output. A factor on a side split by tokens is replicated over the columns, which hold different tokens: its gradient
is also summed over col. A factor on a side split by features is split over the columns. In between, u = x Aᵀ [.., rank] is
communicated: gathered from tokens to features, summed from features to tokens, both if both sides are split by features.
Received, forward and backward: (col - 1) m · parts · rank elements for each of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.model.adapter import Adapter, AdapterShape
from fourfold.piece import Piece
from fourfold.tensor.blocks import Blocks, Runs, cut, make_pieces, single
from fourfold.tensor.costs import MatmulSizes, choose_flow
from fourfold.tensor.flows import Matmul, PutOff, all_tokens, multiply, own_tokens, to_features, to_tokens
from fourfold.tensor.grid import Grid, PendingTensor
from fourfold.tensor.late import GradientSums, WeightPrefetch

__all__ = ["ActivationLayout", "GridLinear", "GridSettings"]


@dataclass(frozen=True)
class GridSettings:
    """What all layers of a model on a grid share.

    `tokens` of a micro-batch on this rank's row are what flows are chosen for; any number of sequences of `seq_len` tokens
    can be computed.
    """

    grid: Grid
    seq_len: int
    tokens: int
    flow: str = "auto"
    flows: Mapping[str, str] = field(default_factory=dict)
    """Flow by name of a matmul; auto or absent: `flow`."""
    residual: str = "sequence"
    compute_bytes: int = 4
    reduce_bytes: int = 4
    keep: frozenset[str] = frozenset()
    """Which of `weights`, `inputs` and `gradients` are kept instead of being communicated again."""
    micro_batches: int = 1
    """Micro-batches per step."""

    def choose(self, sizes: MatmulSizes, name: str, moves_output: bool) -> str:
        """The flow of a matmul."""
        flow = self.flows.get(name, "auto")
        return choose_flow(
            sizes,
            self.flow if flow == "auto" else flow,
            self.compute_bytes,
            self.reduce_bytes,
            moves_output=moves_output,
            keep=self.keep,
            micro_batches=self.micro_batches,
        )


@dataclass(frozen=True)
class ActivationLayout:
    """Layout of the input or output of a linear layer: tokens [m, blocks.total], or features [B, T, blocks.size]."""

    blocks: Blocks
    tokens: bool = False


def _always() -> bool:
    return True


class GridLinear(nn.Module):
    """y = x Wᵀ + b. The bias has the layout of y and is added once.

    `name`: name of the matmul, by which a plan can select its flow.
    `trim`: the padding at the end of the input's block may contain values, which are treated as 0.
    """

    def __init__(
        self,
        setting: GridSettings,
        inputs: ActivationLayout,
        outputs: ActivationLayout,
        *,
        bias: bool,
        name: str = "",
        flow: str | None = None,
        moves_output: bool = True,
        trim: bool = False,
    ):
        super().__init__()
        grid = setting.grid
        sizes = MatmulSizes(
            setting.tokens,
            inputs.blocks.total,
            outputs.blocks.total,
            inputs.blocks.size,
            outputs.blocks.size,
            inputs.tokens,
            outputs.tokens,
            grid.row.size,
            grid.col.size,
        )
        chosen = flow or setting.choose(sizes, name, moves_output)
        self.setting, self.inputs, self.outputs = setting, inputs, outputs
        self.col, self.seq_len = grid.col, setting.seq_len
        self.filled = inputs.blocks.filled(grid.col.index) if trim else inputs.blocks.size
        self.matmul = Matmul(chosen, grid, sizes, setting.seq_len, keeps_inputs="inputs" in setting.keep)
        self.weight = nn.Parameter(torch.empty(sizes.weight_shape(chosen), device="meta"))
        width = outputs.blocks.total if outputs.tokens else outputs.blocks.size
        self.bias = nn.Parameter(torch.empty(width, device="meta")) if bias else None
        self.adapter: Adapter | None = None
        self._put_off: PutOff | None = None
        self._queue = self._place = 0
        self.register_buffer("token", None, persistent=False)
        self.token: Tensor | None
        self._ahead: WeightPrefetch | None = None
        self._sums: GradientSums | None = None
        self._add: Callable[[Tensor], None] | None = None
        self._ready: Callable[[], bool] = _always
        self._keeps_whole = "weights" in setting.keep
        self._keeps_unsummed = "gradients" in setting.keep and self.matmul.moves_weight and grid.row.size > 1
        self._whole: Tensor | None = None  # gathered W, if kept
        self._unsummed: Tensor | None = None  # unreduced gradients, if kept

    def forward(self, x: Tensor) -> Tensor:
        matmul, col, seq_len, inputs, outputs = self.matmul, self.col, self.seq_len, self.inputs, self.outputs
        if self.filled < inputs.blocks.size:
            x = F.pad(x[..., : self.filled], (0, x.shape[-1] - self.filled))
        low = None if self.adapter is None else self.adapter.low(x if inputs.tokens else x.flatten(0, -2))
        if matmul.takes_tokens and not inputs.tokens:
            x = to_tokens(x.flatten(0, -2), col, col.size * x.shape[-1], seq_len)
        elif inputs.tokens and not matmul.takes_tokens:
            x = matmul.by_sequence(to_features(x, col, inputs.blocks.size, seq_len))
        holder = None if torch.compiler.is_compiling() else self
        if self._put_off is None:
            y = multiply(x, self.weight, matmul, holder)
        else:
            y = multiply(x, self.weight, matmul, holder, self.token, self._put_off, self._queue, self._place)
        if matmul.gives_tokens and not outputs.tokens:
            y = matmul.by_sequence(to_features(y, col, outputs.blocks.size, seq_len))
        elif outputs.tokens and not matmul.gives_tokens:
            y = to_tokens(y.flatten(0, -2), col, outputs.blocks.total, seq_len)
        if self.adapter is not None and low is not None:
            if not inputs.tokens:
                low = own_tokens(low, col, seq_len)
            if not outputs.tokens:
                low = all_tokens(low, col, seq_len)
            added = self.adapter.spread(low)
            y = y + (added if outputs.tokens else matmul.by_sequence(added))
        if (bias := self.bias) is not None:
            y = y + bias
        return y

    def adapt(self, shape: AdapterShape) -> None:
        """Add an adapter: [Note: adapters on the grid]."""
        columns = () if self.outputs.tokens else self.outputs.blocks.runs
        sides = (*self._side(self.inputs), *self._side(self.outputs))
        self.adapter = Adapter(shape, *sides, columns).to(self.weight.dtype)

    def _side(self, side: ActivationLayout) -> tuple[int, Runs]:
        """How many features of the input or output this rank has, and which."""
        if side.tokens:
            return side.blocks.total, single(side.blocks.total)
        return side.blocks.size, side.blocks.runs[self.setting.grid.col.index]

    # ---- the weight and its gradient ----

    def serve(
        self,
        ahead: WeightPrefetch,
        sums: GradientSums,
        add: Callable[[Tensor], None],
        ready: Callable[[], bool] = _always,
        *,
        selective: bool = False,
    ) -> None:
        """Become part of a stage: `add` receives gradients of the weight, `ready` returns whether the weight is gathered.

        `selective`: the forward runs under a selective checkpoint, which keeps the output and no gathered inputs.
        """
        self._ahead, self._sums, self._add, self._ready = ahead, sums, add, ready
        if selective:
            self.matmul = replace(self.matmul, keeps_inputs=False)

    def ready(self) -> bool:
        return self._ready()

    def start_whole(self) -> PendingTensor:
        return PendingTensor(self._whole) if self._whole is not None else self.matmul.start_whole(self.weight)

    def whole(self) -> Tensor:
        """W of all rows."""
        if self._ahead is None:
            return self.start_whole().get()
        whole = self._ahead.take(self).get()
        if self._keeps_whole and self.training:
            self._whole = whole
        return whole

    def take_weight_grad(self, inputs: Tensor, kept: Tensor) -> bool:
        """Compute the gradient and pass it to the unit after its deferred reduction; False if there is no unit."""
        if self._sums is None or self._add is None:
            return False
        wide = torch.promote_types(kept.dtype, torch.float32)
        if not self._keeps_unsummed:
            self._sums.start(self.matmul.weight_grad(inputs, kept, wide), self._add)
        elif self._unsummed is None:
            self._unsummed = self.matmul.weight_product(inputs, kept, wide)
        else:
            self._unsummed += self.matmul.weight_product(inputs, kept, kept.dtype)
        return True

    def take_weight_product(self, dw: Tensor) -> Tensor | None:
        """The same from the gradient of this row's tokens; without a unit, returns the sum over row for autograd."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        dw = self.matmul.padded(dw.to(wide))
        if self._sums is None or self._add is None:
            return self.matmul.row_sum(dw).get().to(self.weight.dtype)
        if not self._keeps_unsummed:
            self._sums.start(self.matmul.row_sum(dw), self._add)
        else:
            self._unsummed = dw if self._unsummed is None else self._unsummed.add_(dw)
        return None

    def flush(self) -> None:
        """Start the reduction over row of kept gradients."""
        if self._unsummed is not None and self._sums is not None and self._add is not None:
            unsummed, self._unsummed = self._unsummed, None
            self._sums.start(self.matmul.row_sum(unsummed), self._add)

    def forget(self) -> None:
        """Free the gathered W."""
        self._whole = None

    def defer(self, put_off: PutOff, token: Tensor, queue: int, place: int) -> None:
        """From now on the backward calls put_off(x, kept, token, queue, place); `weight_grad(x, kept, …)` completes it later."""
        self._put_off, self._queue, self._place, self.token = put_off, queue, place, token

    @torch.no_grad()
    def weight_grad(self, x: Tensor, kept: Tensor, add: Callable[[Tensor], None]) -> None:
        """Pass the gradient of the weight, reduced over row in at least fp32, to the unit (deferred), or else to `add`."""
        inputs = self.matmul.inputs(x).get()
        if not self.take_weight_grad(inputs, kept):
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            add(self.matmul.weight_grad(inputs, kept, wide).get())

    # ---- pieces ----

    def pieces(self, prefix: str) -> dict[str, tuple[Piece, ...]]:
        grid, sizes, ins, outs = self.setting.grid, self.matmul.sizes, self.inputs, self.outputs
        i, j, r = grid.row.index, grid.col.index, grid.row.size
        all_in = single(ins.blocks.total) if ins.tokens else ins.blocks.joined()
        all_out = single(outs.blocks.total) if outs.tokens else outs.blocks.joined()
        wide_in = ins.blocks.total if ins.tokens else sizes.col * sizes.k
        wide_out = outs.blocks.total if outs.tokens else sizes.col * sizes.b
        match self.matmul.flow:
            case "os":
                runs = cut(outs.blocks.runs[j], sizes.b, r, i)[0], all_in
            case "ls" | "ws-out":
                runs = cut(all_out, wide_out, r, i)[0], ins.blocks.runs[j]
            case "ws-in":
                runs = outs.blocks.runs[j], cut(all_in, wide_in, r, i)[0]
            case _:
                runs = outs.blocks.runs[j], ins.blocks.runs[i]
        shape = outs.blocks.total, ins.blocks.total
        found = {"weight": make_pieces(f"{prefix}.weight", shape, runs, grid.copies())}
        if self.bias is not None:
            mine = single(shape[0]) if outs.tokens else outs.blocks.runs[j]
            copies = grid.copies("row", "col") if outs.tokens else grid.copies("row")
            found["bias"] = make_pieces(f"{prefix}.bias", shape[:1], (mine,), copies)
        if self.adapter is not None:
            sides = [grid.copies("row", "col") if side.tokens else grid.copies("row") for side in (ins, outs)]
            held = self.adapter.pieces(f"{prefix}.adapter", *sides)
            found |= {f"adapter.{n}": pieces for n, pieces in held.items()}
        return found
