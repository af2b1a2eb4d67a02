"""What a matrix product on the grid costs: elements received and collectives called by one rank. Pure arithmetic, no torch.

Y[tokens, N] = X[tokens, K] · Wᵀ on a plane of `row` × `col` ranks. A rank (i, j) has n tokens of its row, and of X and Y one of

    tokens     m = n / col of them, every feature: [m, K]         the residual stream, split by sequence
    features   all n, one block of the features:   [n, k]         inside a layer; the residual stream of the paper

(k, b: the blocks of K and N on a column, padding included.) Where a side is not what a flow works on, an all-to-all over col
converts it: (col - 1) m · block elements. The flows, by what moves; w = (row - 1) · |W|, where |W| is the rank's share of W:

    flow    W on rank (i, j)     forward                                    backward
    os      [b / row, K]         gather X over col, W over row              W, X again, scatter dX, scatter dW
    ls      [N / row, k]         gather W over row, scatter Y over col      gather dY, W again, scatter dW
    ws in   [b, K / row]         X to all of the plane's tokens, scatter Y over row      dY likewise, dX back, X again
    ws out  [N / row, k]         gather X over row, scatter Y over col and row           dY likewise, dX back, X again
    summa   [b, k]               q broadcasts of X over col and of W over row            2 q broadcasts, 2 q reductions

`ws` never moves W; it has two forms, for products that leave the residual stream and for those that come back to it. Sums over
depth and data are the unit's, and the same for all flows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from fourfold.tensor.blocks import round_up

__all__ = ["FLOWS", "Flow", "Product", "Traffic", "choose_flow", "traffic"]

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


def traffic(p: Product, flow: Flow) -> Traffic:
    """What `flow` costs for this product."""
    r, c, m, n = p.row, p.col, p.m, p.n
    rows, columns = p.weight_shape(flow)
    w, over_row, over_col = (r - 1) * rows * columns, int(r > 1), int(c > 1)
    x = (c - 1) * (m * p.inputs if p.in_tokens else n * p.k)
    y = (c - 1) * (m * p.outputs if p.out_tokens else n * p.b)
    natural_in, natural_out = _natural(p, flow)
    total = Traffic()
    for converted, block in ((natural_in != p.in_tokens, p.k), (natural_out != p.out_tokens, p.b)):
        if converted:
            moved = (c - 1) * m * block
            total += Traffic(moved, moved, calls_forward=over_col, calls_backward=over_col)
    match flow:
        case "os":
            return total + Traffic(x, 2 * x, w, w, w, over_row + over_col, 2 * (over_row + over_col))
        case "ls":
            return total + Traffic(y, y, w, w, w, over_row + over_col, 2 * over_row + over_col)
        case "ws-in":
            spread = (r - 1) * m * columns + (c - 1) * r * m * columns
            back = (r - 1) * n * p.b
            calls = 2 * over_row + over_col
            return total + Traffic(
                spread + back, 2 * spread + back, calls_forward=calls, calls_backward=3 * over_row + 2 * over_col
            )
        case "ws-out":
            spread = (r - 1) * m * rows + (c - 1) * r * m * rows
            back = (r - 1) * n * p.k
            calls = 2 * over_row + over_col
            return total + Traffic(
                spread + back, spread + 2 * back, calls_forward=calls, calls_backward=3 * over_row + over_col
            )
        case _:
            q = c if c > 1 else 0
            x = (c - 1) * n * p.k
            return total + Traffic(x, 2 * x, w, w, w, 2 * q, 4 * q)


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


def choose_flow(p: Product, wish: str, compute: int, reduce: int, *, moves_output: bool = True) -> Flow:
    """The flow a plan's `wish` means for this product: itself, or the one with the fewest received bytes.

    Without `moves_output` (logits), only flows that leave the output where it is made are considered: `os`, `summa`.
    """
    flows = {"auto": ("os", "ls", "ws-in", "ws-out"), "ws": ("ws-in", "ws-out")}.get(wish, (wish,))
    if not moves_output:
        flows = tuple(f for f in flows if f in ("os", "summa")) or ("os",)
    return min(flows, key=lambda flow: traffic(p, flow).bytes(compute, reduce))
