"""What a matrix product on the grid costs: what one rank receives, in how many calls, and the seconds of it. No torch.

Y[tokens, N] = X[tokens, K] · Wᵀ on a plane of `row` × `col` ranks. A rank (i, j) has n tokens of its row, and of X and Y one of

    tokens     m = n / col of them, every feature: [m, K]         the residual stream, split by sequence
    features   all n, one block of the features:   [n, k]         inside a layer; the residual stream of the paper

(k, b: the blocks of K and N on a column, padding included.) Where a side is not what a flow works on, an all-to-all over col
converts it: (col - 1) m · block elements. The flows, by what moves; w = (row - 1) · |W|, where |W| is the rank's share of W:

    flow    W on rank (i, j)     forward (F)                                gradient of the input (I)       of the weight (W)
    os      [b / row, K]         gather X over col, W over row              W again, scatter dX             X again, scatter dW
    ls      [N / row, k]         gather W over row, scatter Y over col      gather dY, W again              scatter dW
    ws in   [b, K / row]         X to all of the plane's tokens, scatter Y over row      dY likewise, dX back     X again
    ws out  [N / row, k]         gather X over row, scatter Y over col and row           dY likewise, dX back     X again
    summa   [b, k]               q broadcasts of X over col and of W over row            q broadcasts, q reductions, each

`ws` never moves W; it has two forms, for products that leave the residual stream and for those that come back to it. Sums over
depth and data are the unit's, and the same for all flows.

A plan may keep `inputs` (X is not gathered again), `weights` (W is gathered once a step) and `gradients` (dW is scattered once a
step). What a flow costs in seconds depends on the lines: `LinkSpeed`. What `hides` runs beside products, as far as they last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

from fourfold.tensor.blocks import round_up

__all__ = [
    "FLOWS",
    "Flow",
    "LinkSpeed",
    "LinkSpeeds",
    "Move",
    "Product",
    "Timed",
    "Traffic",
    "choose_flow",
    "flows_of",
    "lookup_moves",
    "moves",
    "passed",
    "seconds",
    "traffic",
]

FLOWS = ("os", "ls", "ws-in", "ws-out", "summa")
Flow = str


@dataclass(frozen=True)
class Product:
    """The sizes of a product on one rank: see above."""

    n: int
    inputs: int
    outputs: int
    k: int
    b: int
    in_tokens: bool
    out_tokens: bool
    row: int
    col: int

    @property
    def m(self) -> int:
        return round_up(self.n, self.col) // self.col

    def weight_shape(self, flow: Flow) -> tuple[int, int]:
        """W's share of one rank, [outputs, inputs]."""
        inputs = self.inputs if self.in_tokens else self.col * self.k
        outputs = self.outputs if self.out_tokens else self.col * self.b
        match flow:
            case "os":
                return round_up(self.b, self.row) // self.row, inputs
            case "ls" | "ws-out":
                return round_up(outputs, self.row) // self.row, self.k
            case "ws-in":
                return self.b, round_up(inputs, self.row) // self.row
            case _:
                return self.b, self.k


@dataclass(frozen=True)
class Traffic:
    """Elements received, of activations, weights and weight gradients; and calls."""

    activations_forward: int = 0
    activations_backward: int = 0
    weights_forward: int = 0
    weights_backward: int = 0
    weight_grads: int = 0
    calls_forward: int = 0
    calls_backward: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def bytes(self, compute: int, reduce: int) -> int:
        """Received bytes, with so many for an element of compute and of gradients."""
        moved = self.activations_forward + self.activations_backward + self.weights_forward + self.weights_backward
        return moved * compute + self.weight_grads * reduce


class Move(NamedTuple):
    """One collective of a micro-batch, or `calls` alike."""

    op: Literal["F", "I", "W"]
    axis: Literal["row", "col"]
    what: Literal["activations", "weights", "gradients"]
    kind: Literal["all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"]
    elements: int
    """Received."""
    calls: int = 1
    hides: bool = False
    """Whether it runs beside products, where the plan overlaps."""
    once: bool = False
    """Once a step, not once a micro-batch."""


def moves(p: Product, flow: Flow, keep: Collection[str] = ()) -> tuple[Move, ...]:
    """What `flow` moves for this product."""
    return _every(p, flow, tuple(keep))


@lru_cache(maxsize=50_000)
def _every(p: Product, flow: Flow, keep: tuple[str, ...]) -> tuple[Move, ...]:
    every = _converted(p, flow) + _moves(p, flow, keep)
    return tuple(m for m in every if (p.row if m.axis == "row" else p.col) > 1)


def _converted(p: Product, flow: Flow) -> list[Move]:
    natural_in, natural_out = _natural(p, flow)
    out = []
    for converted, block in ((natural_in != p.in_tokens, p.k), (natural_out != p.out_tokens, p.b)):
        if converted:
            size = (p.col - 1) * p.m * block
            out += [
                Move("F", "col", "activations", "all_to_all", size),
                Move("I", "col", "activations", "all_to_all", size),
            ]
    return out


def _moves(p: Product, flow: Flow, keep: Collection[str]) -> list[Move]:
    r, c, m, n = p.row, p.col, p.m, p.n
    rows, columns = p.weight_shape(flow)
    w = (r - 1) * rows * columns
    x = (c - 1) * (m * p.inputs if p.in_tokens else n * p.k)
    y = (c - 1) * (m * p.outputs if p.out_tokens else n * p.b)
    kept = "inputs" in keep
    match flow:
        case "os":
            return [
                Move("F", "col", "activations", "all_gather", x),
                *_weights(w, keep),
                Move("I", "col", "activations", "reduce_scatter", x, hides=True),
                *([] if kept else [Move("W", "col", "activations", "all_gather", x, hides=True)]),
            ]
        case "ls":
            return [
                Move("F", "col", "activations", "reduce_scatter", y),
                *_weights(w, keep),
                Move("I", "col", "activations", "all_gather", y),
            ]
        case "ws-in":
            over_row, over_col, back = (r - 1) * m * columns, (c - 1) * r * m * columns, (r - 1) * n * p.b
            again = [
                Move("W", "row", "activations", "all_to_all", over_row),
                Move("W", "col", "activations", "all_gather", over_col),
            ]
            return [
                Move("F", "row", "activations", "all_to_all", over_row),
                Move("F", "col", "activations", "all_gather", over_col),
                Move("F", "row", "activations", "reduce_scatter", back),
                Move("I", "row", "activations", "all_gather", back),
                Move("I", "col", "activations", "reduce_scatter", over_col, hides=True),
                Move("I", "row", "activations", "all_to_all", over_row),
                *([] if kept else again),
            ]
        case "ws-out":
            over_row, over_col, back = (r - 1) * m * rows, (c - 1) * r * m * rows, (r - 1) * n * p.k
            return [
                Move("F", "row", "activations", "all_gather", back),
                Move("F", "col", "activations", "reduce_scatter", over_col),
                Move("F", "row", "activations", "all_to_all", over_row),
                Move("I", "row", "activations", "all_to_all", over_row),
                Move("I", "col", "activations", "all_gather", over_col),
                Move("I", "row", "activations", "reduce_scatter", back, hides=True),
                *([] if kept else [Move("W", "row", "activations", "all_gather", back, hides=True)]),
            ]
        case _:
            x = (c - 1) * n * p.k
            return [
                Move("F", "col", "activations", "broadcast", x, c),
                Move("F", "row", "weights", "broadcast", w, c),
                Move("I", "row", "weights", "broadcast", w, c),
                Move("I", "col", "activations", "reduce", x, c),
                Move("W", "col", "activations", "broadcast", x, c),
                Move("W", "row", "gradients", "reduce", w, c),
            ]


def _weights(w: int, keep: Collection[str]) -> list[Move]:
    """W to all rows, its gradient back."""
    kept = "weights" in keep
    again = [] if kept else [Move("I", "row", "weights", "all_gather", w, hides=True)]
    return [
        Move("F", "row", "weights", "all_gather", w, hides=True, once=kept),
        *again,
        Move("W", "row", "gradients", "reduce_scatter", w, hides=True, once="gradients" in keep),
    ]


def lookup_moves(words: int, width: int, n: int, row: int, col: int) -> list[Move]:
    """What an embedding table of `words` rows moves for n tokens of a row: itself over row, what it gives over col."""
    block = round_up(words, col) // col
    table = (row - 1) * (round_up(block, row) // row) * width
    found = (col - 1) * (round_up(n, col) // col) * width
    every = [
        Move("F", "row", "weights", "all_gather", table),
        Move("F", "col", "activations", "reduce_scatter", found),
        Move("I", "col", "activations", "all_gather", found),
        Move("W", "row", "gradients", "reduce_scatter", table),
    ]
    return [m for m in every if (row if m.axis == "row" else col) > 1]


def traffic(p: Product, flow: Flow, keep: Collection[str] = (), micro_batches: int = 1) -> Traffic:
    """What `flow` costs for this product in a step."""
    out = Traffic()
    for m in moves(p, flow, keep):
        times = 1 if m.once else micro_batches
        backward = m.op != "F"
        what = "weight_grads" if m.what == "gradients" else f"{m.what}_{'backward' if backward else 'forward'}"
        calls = "calls_backward" if backward else "calls_forward"
        out += Traffic(**{what: times * m.elements, calls: times * m.calls})
    return out


@dataclass(frozen=True)
class LinkSpeed:
    """A line of ranks: bytes a second that each receives, and seconds of a call, its hops together."""

    rate: float = 25e9
    call: float = 1e-5


class Timed(Protocol):
    """The lines of a plane, of which moves take time."""

    def seconds(self, m: Move, width: int, /) -> float:
        """Of a move of elements of `width` bytes."""


@dataclass(frozen=True)
class LinkSpeeds:
    """The lines of a plane. Where nothing is known of them, both are alike, and a call is as dear as 250 kB."""

    row: LinkSpeed = field(default_factory=LinkSpeed)
    col: LinkSpeed = field(default_factory=LinkSpeed)

    def seconds(self, m: Move, width: int) -> float:
        link = self.row if m.axis == "row" else self.col
        return m.calls * link.call + passed(m) * width / link.rate


def passed(m: Move) -> float:
    """Elements that pass a rank's link, one way: those it receives, and of broadcasts and reductions its own, too."""
    own = m.kind in ("broadcast", "reduce") and m.calls > 1
    return m.elements * m.calls / (m.calls - 1) if own else float(m.elements)


def seconds(
    every: Iterable[Move], links: Timed, compute: int, reduce: int, micro_batches: int = 1
) -> dict[str, tuple[float, float]]:
    """By op, seconds of a micro-batch that nothing hides, and those that may hide; elements of so many bytes."""
    out = {"F": (0.0, 0.0), "I": (0.0, 0.0), "W": (0.0, 0.0)}
    for m in every:
        time = links.seconds(m, reduce if m.what == "gradients" else compute) / (micro_batches if m.once else 1)
        shown, hidden = out[m.op]
        out[m.op] = (shown, hidden + time) if m.hides else (shown + time, hidden)
    return out


def _natural(p: Product, flow: Flow) -> tuple[bool, bool]:
    """Whether a flow takes and gives tokens (True) or features (False); as asked for where it does either."""
    match flow:
        case "os":
            return p.in_tokens, False
        case "ls":
            return False, p.out_tokens
        case "ws-in":
            return True, False
        case "ws-out":
            return False, True
        case _:
            return False, False


def flows_of(wish: str, moves_output: bool = True) -> tuple[Flow, ...]:
    """The flows that a plan's `wish` leaves to choose from; without `moves_output` (logits) those that leave it in place."""
    flows = {"auto": ("os", "ls", "ws-in", "ws-out"), "ws": ("ws-in", "ws-out")}.get(wish, (wish,))
    if not moves_output:
        flows = tuple(f for f in flows if f in ("os", "summa")) or ("os",)
    return flows


def choose_flow(
    p: Product,
    wish: str,
    compute: int,
    reduce: int,
    *,
    moves_output: bool = True,
    links: Timed | None = None,
    keep: Collection[str] = (),
    micro_batches: int = 1,
    beside: float = 0.0,
) -> Flow:
    """The flow a plan's `wish` means for this product: itself, or the one that takes least time on these links.

    `beside`: seconds of its products, forward and backward, beside which moves that hide can run.
    """
    where = links or LinkSpeeds()

    def late(flow: Flow) -> float:
        parts = seconds(moves(p, flow, keep), where, compute, reduce, micro_batches).values()
        return sum(shown for shown, _ in parts) + max(0.0, sum(hidden for _, hidden in parts) - beside)

    flows = flows_of(wish, moves_output)
    if len(flows) == 1:
        return flows[0]
    times = {flow: late(flow) for flow in flows}
    best = [flow for flow in flows if times[flow] == min(times.values())]
    return (
        min(best, key=lambda f: traffic(p, f, keep, micro_batches).bytes(compute, reduce)) if len(best) > 1 else best[0]
    )
