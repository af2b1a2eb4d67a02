"""Communication cost of a matmul on the grid: received elements per rank, calls, and seconds. No torch.

Y[tokens, N] = X[tokens, K] · Wᵀ on a plane of `row` × `col` ranks. A rank (i, j) has n tokens of its row, and of X and Y one of

    tokens     m = n / col of them, every feature: [m, K]         the residual stream, split by sequence
    features   all n, one block of the features:   [n, k]         inside a layer; the residual stream of the paper

(k, b: the blocks of K and N on a column, padding included.) If X or Y does not have the layout of a flow, an all-to-all over col
converts it: (col - 1) m · block elements. The flows; w = (row - 1) · |W|, where |W| is the rank's part of W:

    flow    W on rank (i, j)     forward (F)                                gradient of the input (I)       of the weight (W)
    os      [b / row, K]         gather X over col, W over row              W again, scatter dX             X again, scatter dW
    ls      [N / row, k]         gather W over row, scatter Y over col      gather dY, W again              scatter dW
    ws in   [b, K / row]         X to all of the plane's tokens, scatter Y over row      dY the same, dX back     X again
    ws out  [N / row, k]         gather X over row, scatter Y over col and row           dY the same, dX back     X again
    summa   [b, k]               q broadcasts of X over col and of W over row            q broadcasts, q reductions, each

`ws` never communicates W; it has two forms, for matmuls that read the residual stream and for those that write to it. Reductions
over depth and data belong to the unit, and are the same for all flows.

A plan may keep `inputs` (X is not gathered again), `weights` (W is gathered once per step) and `gradients` (dW is reduced once
per step). Seconds depend on the links (`LinkSpeed`). Moves with `overlaps` can overlap with matmuls.
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
    "MatmulSizes",
    "Move",
    "MoveTimes",
    "Traffic",
    "choose_flow",
    "flows_of",
    "lookup_moves",
    "moves",
    "passed",
    "seconds",
    "statistics_moves",
    "traffic",
]

FLOWS = ("os", "ls", "ws-in", "ws-out", "summa")
Flow = str


@dataclass(frozen=True)
class MatmulSizes:
    """The sizes of a matmul on one rank, as defined above."""

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
        """Shape of one rank's part of W, [outputs, inputs]."""
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
    """Received elements of activations, weights and weight gradients, and number of calls."""

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
        """Received bytes, given the bytes per element of the compute and reduce dtypes."""
        moved = self.activations_forward + self.activations_backward + self.weights_forward + self.weights_backward
        return moved * compute + self.weight_grads * reduce


class Move(NamedTuple):
    """One collective of a micro-batch, or `calls` equal ones."""

    op: Literal["F", "I", "W"]
    axis: Literal["row", "col"]
    what: Literal["activations", "weights", "gradients"]
    kind: Literal["all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"]
    elements: int
    """Received elements."""
    calls: int = 1
    overlaps: bool = False
    """Whether it can overlap with matmuls, if the plan enables overlap."""
    once: bool = False
    """Once per step, not once per micro-batch."""


def moves(p: MatmulSizes, flow: Flow, keep: Collection[str] = ()) -> tuple[Move, ...]:
    """The collectives of a matmul with `flow`."""
    return _every(p, flow, tuple(keep))


@lru_cache(maxsize=50_000)
def _every(p: MatmulSizes, flow: Flow, keep: tuple[str, ...]) -> tuple[Move, ...]:
    every = _converted(p, flow) + _moves(p, flow, keep)
    return tuple(m for m in every if (p.row if m.axis == "row" else p.col) > 1)


def _converted(p: MatmulSizes, flow: Flow) -> list[Move]:
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


def _moves(p: MatmulSizes, flow: Flow, keep: Collection[str]) -> list[Move]:
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
                Move("I", "col", "activations", "reduce_scatter", x, overlaps=True),
                *([] if kept else [Move("W", "col", "activations", "all_gather", x, overlaps=True)]),
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
                Move("I", "col", "activations", "reduce_scatter", over_col, overlaps=True),
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
                Move("I", "row", "activations", "reduce_scatter", back, overlaps=True),
                *([] if kept else [Move("W", "row", "activations", "all_gather", back, overlaps=True)]),
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
    """Gather of W over row, and reduce-scatter of its gradient."""
    kept = "weights" in keep
    again = [] if kept else [Move("I", "row", "weights", "all_gather", w, overlaps=True)]
    return [
        Move("F", "row", "weights", "all_gather", w, overlaps=True, once=kept),
        *again,
        Move("W", "row", "gradients", "reduce_scatter", w, overlaps=True, once="gradients" in keep),
    ]


def lookup_moves(words: int, width: int, n: int, row: int, col: int) -> list[Move]:
    """The collectives of an embedding table with `words` rows, for n tokens of a row: the table over row, its output over col."""
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


def statistics_moves(n: int, col: int) -> list[Move]:
    """Collectives of norms of queries and keys over all heads, for n tokens of a row: a sum of squares of each, both ways."""
    half = 2 * (col - 1) * (round_up(n, col) // col)
    return [
        Move(op, "col", "activations", kind, half, calls=2)
        for op in ("F", "I")
        for kind in ("reduce_scatter", "all_gather")
        if col > 1
    ]


def traffic(p: MatmulSizes, flow: Flow, keep: Collection[str] = (), micro_batches: int = 1) -> Traffic:
    """Received elements and calls of a matmul with `flow` in one step."""
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
    """Speed of an axis of the grid: bytes/s received per rank, and latency of a collective in seconds."""

    rate: float = 25e9
    call: float = 1e-5


class MoveTimes(Protocol):
    """Times moves on the axes of the grid."""

    def seconds(self, m: Move, width: int, /) -> float:
        """Seconds of a move with elements of `width` bytes."""


@dataclass(frozen=True)
class LinkSpeeds:
    """Speeds of both axes. By default they are equal, and the latency of a call equals the time of 250 kB."""

    row: LinkSpeed = field(default_factory=LinkSpeed)
    col: LinkSpeed = field(default_factory=LinkSpeed)

    def seconds(self, m: Move, width: int) -> float:
        link = self.row if m.axis == "row" else self.col
        return m.calls * link.call + passed(m) * width / link.rate


def passed(m: Move) -> float:
    """Elements through a rank's link in one direction: those it receives; for broadcasts and reductions also its own."""
    own = m.kind in ("broadcast", "reduce") and m.calls > 1
    return m.elements * m.calls / (m.calls - 1) if own else float(m.elements)


def seconds(
    every: Iterable[Move], links: MoveTimes, compute: int, reduce: int, micro_batches: int = 1
) -> dict[str, tuple[float, float]]:
    """By op: exposed and overlappable seconds per micro-batch; `compute` and `reduce` are bytes per element."""
    out = {"F": (0.0, 0.0), "I": (0.0, 0.0), "W": (0.0, 0.0)}
    for m in every:
        time = links.seconds(m, reduce if m.what == "gradients" else compute) / (micro_batches if m.once else 1)
        exposed, overlapped = out[m.op]
        out[m.op] = (exposed, overlapped + time) if m.overlaps else (exposed + time, overlapped)
    return out


def _natural(p: MatmulSizes, flow: Flow) -> tuple[bool, bool]:
    """(input, output) layout of a flow: tokens (True) or features (False); as in `p` if the flow supports both."""
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


def flows_of(requested: str, moves_output: bool = True) -> tuple[Flow, ...]:
    """The flows that a plan's value allows; without `moves_output` (logits), those that do not communicate the output."""
    flows = {"auto": ("os", "ls", "ws-in", "ws-out"), "ws": ("ws-in", "ws-out")}.get(requested, (requested,))
    if not moves_output:
        flows = tuple(f for f in flows if f in ("os", "summa")) or ("os",)
    return flows


def choose_flow(
    p: MatmulSizes,
    requested: str,
    compute: int,
    reduce: int,
    *,
    moves_output: bool = True,
    links: MoveTimes | None = None,
    keep: Collection[str] = (),
    micro_batches: int = 1,
    overlappable: float = 0.0,
) -> Flow:
    """The flow of a matmul: `requested`, or among several the one with the least exposed time on these links.

    `overlappable`: seconds of compute, forward and backward, with which moves can overlap.
    """
    where = links or LinkSpeeds()

    def late(flow: Flow) -> float:
        parts = seconds(moves(p, flow, keep), where, compute, reduce, micro_batches).values()
        return sum(exposed for exposed, _ in parts) + max(
            0.0, sum(overlapped for _, overlapped in parts) - overlappable
        )

    flows = flows_of(requested, moves_output)
    if len(flows) == 1:
        return flows[0]
    times = {flow: late(flow) for flow in flows}
    least = (1 + 1e-9) * min(times.values())  # which of two equal ones is chosen must not depend on rounding
    best = [flow for flow in flows if times[flow] <= least]
    return (
        min(best, key=lambda f: traffic(p, f, keep, micro_batches).bytes(compute, reduce)) if len(best) > 1 else best[0]
    )
