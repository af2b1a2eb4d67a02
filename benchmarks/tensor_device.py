"""The grid on one device, as one rank of 16 whose collectives are free: what the flows compute, and what layouts cost.

    python -m benchmarks.tensor_device [--quick] [--json PATH]        # a GPU, under a minute, 12 GiB; --quick: also a CPU, small

- **flows**: the linears of a layer (12 hidden² weights), forward and backward, by each flow on planes of 4 × 4 and 2 × 2; against
  the bare products of the same FLOPs, as torch.mm. What is above them is copying, padding and starting kernels.
- **padding**: widths that do not divide, against the next that do; heads that leave a column half empty, against full columns.
- **last-dim copies**: what the residual stream costs when split by features (tokens need none), against one plain copy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import Row, arguments, finish, lower_is_better, show
from fourfold.plan import Mesh
from fourfold.tensor.blocks import even
from fourfold.tensor.flows import _side_by_side, _stacked
from fourfold.tensor.grid import Axis, Grid
from fourfold.tensor.linear import ActivationLayout, GridLinear, GridSettings
from fourfold.train.mesh import RankMesh
from fourfold.train.one_rank import one_of_many

FLOWS = ("auto", "os", "ls", "ws", "summa")
PLANES = {"4 x 4": Mesh(row=4, col=4), "2 x 2 of 4 planes": Mesh(depth=4, row=2, col=2)}
SEQ = 512


def main() -> None:
    args = arguments("The tensor grid on one device")
    rows = list(measure(args.quick))
    show("one rank of 16 on this device", rows)
    finish("tensor_device", rows, args.json)


def measure(quick: bool) -> Iterator[Row]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not quick:
        raise SystemExit("there is no GPU here; --quick runs on a CPU")
    small = quick and device.type == "cpu"
    widths, tokens = ((64,), SEQ) if small else ((1024,), 2048) if quick else ((4096, 8192), 8192)
    dtype = torch.float32 if small else torch.bfloat16
    clock = Clock(device, 2 if quick else 8)
    with one_of_many(16), torch.device(device):
        for name, mesh in PLANES.items():
            grid = make_grid(mesh)
            for hidden in widths:
                yield from flows(f"{name}, hidden {hidden:,}", grid, hidden, tokens, dtype, clock)
        grid = make_grid(PLANES["4 x 4"])
        yield from padding(grid, widths[0], tokens, dtype, clock)
        yield from copies(widths[-1], tokens, dtype, clock)


def make_grid(mesh: Mesh) -> Grid:
    ranks = RankMesh(mesh, dist.get_rank())
    row, col = (Axis(a, ranks.size(a), ranks.coordinates[a], ranks.group(a), overlap=True) for a in ("row", "col"))
    return Grid(row, col)


class Clock:
    """Median milliseconds of calls, and their relative spread."""

    def __init__(self, device: torch.device, rounds: int):
        self.device, self.rounds = device, rounds

    def __call__(self, work: Callable[[], object]) -> tuple[float, float]:
        work()
        times = []
        for _ in range(self.rounds):
            self._wait()
            start = time.perf_counter()
            work()
            self._wait()
            times.append((time.perf_counter() - start) * 1e3)
        middle = statistics.median(times)
        return middle, (max(times) - min(times)) / middle

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def flows(case: str, grid: Grid, hidden: int, tokens: int, dtype: torch.dtype, clock: Clock) -> Iterator[Row]:
    bare, _ = clock(bare_layer(grid, hidden, tokens, dtype))
    for flow in FLOWS:
        residual = "hidden" if flow == "summa" else "sequence"
        setting = GridSettings(grid, SEQ, tokens, flow, residual=residual, compute_bytes=dtype.itemsize)
        linears = [linear(setting, *width, hidden, dtype) for width in ((1, 3), (1, 1), (1, 4), (4, 1))]
        taken = "/".join(x.matmul.flow for x, _ in linears) if flow == "auto" else flow
        ours, spread = clock(partial(train, linears))
        yield lower_is_better(f"{case}, {taken}", "bare products", "layer ms", ours, bare, spread)


def linear(
    setting: GridSettings, inputs: int, outputs: int, hidden: int, dtype: torch.dtype
) -> tuple[GridLinear, Tensor]:
    """One of a layer's linears, out of the residual stream or (outputs = 1) back to it, and an input of it."""
    col, tokens = setting.grid.col.size, setting.residual == "sequence"
    back = outputs == 1
    ins = ActivationLayout(even(inputs * hidden, col), tokens=tokens and not back)
    outs = ActivationLayout(even(outputs * hidden, col), tokens=tokens and back)
    made = GridLinear(setting, ins, outs, bias=False).to(dtype).to_empty(device=torch.get_default_device())
    torch.nn.init.normal_(made.weight, std=0.02)
    shape = (setting.tokens // col, inputs * hidden) if ins.tokens else (setting.tokens // SEQ, SEQ, ins.blocks.size)
    return made, torch.randn(shape, dtype=dtype, requires_grad=True)


def train(linears: list[tuple[GridLinear, Tensor]]) -> None:
    """Forward and backward of each, on its own."""
    for made, x in linears:
        x.grad = made.weight.grad = None
        y = made(x)
        y.backward(y.detach())


def bare_layer(grid: Grid, hidden: int, tokens: int, dtype: torch.dtype) -> Callable[[], None]:
    """The three products of each of a layer's linears: outputs over col out of the residual stream, inputs back to it."""
    col, factors = grid.col.size, []
    for k, n in ((1, 3), (1, 1), (1, 4), (4, 1)):
        inner, outer = (k * hidden // col, hidden) if n == 1 else (hidden, n * hidden // col)
        factors.append(
            [torch.randn(*shape, dtype=dtype) for shape in ((tokens, inner), (outer, inner), (tokens, outer))]
        )

    def work() -> None:
        for x, w, dy in factors:
            x @ w.t()
            dy @ w
            dy.t() @ x

    return work


def padding(grid: Grid, hidden: int, tokens: int, dtype: torch.dtype, clock: Clock) -> Iterator[Row]:
    """Ours is the width that does not divide; the other one is wider, and divides into blocks of whole tiles."""
    setting = GridSettings(grid, SEQ, tokens, "os", compute_bytes=dtype.itemsize)
    col = grid.col.size
    for case, odd, even_width in (
        (f"up to 4 x {hidden} + {col} outputs, blocks of {hidden + 1}", 4 * hidden + col, 4 * hidden + 8 * col),
        (f"30 of 32 heads of {hidden // 32} on 4 columns", 3 * 30 * hidden // 32, 3 * hidden),
    ):
        grain = hidden // 32 if "heads" in case else 1
        made = []
        for width in (odd, even_width):
            residual, outs = ActivationLayout(even(hidden, col), tokens=True), ActivationLayout(even(width, col, grain))
            x = GridLinear(setting, residual, outs, bias=False).to(dtype).to_empty(device=torch.get_default_device())
            torch.nn.init.normal_(x.weight, std=0.02)
            made.append([(x, torch.randn(tokens // col, hidden, dtype=dtype, requires_grad=True))])
        (ours, spread), (theirs, _) = (clock(partial(train, each)) for each in made)
        yield lower_is_better(case, "a width that divides", "linear ms", ours, theirs, spread)


def copies(hidden: int, tokens: int, dtype: torch.dtype, clock: Clock) -> Iterator[Row]:
    for parts in (2, 4):
        joined = torch.randn(parts * tokens, hidden // parts, dtype=dtype)
        separate = torch.randn(tokens, hidden, dtype=dtype)
        plain, _ = clock(separate.clone)
        for case, work, x in (
            (f"{parts} blocks side by side, [{tokens:,}, {hidden:,}]", _side_by_side, joined),
            (f"[{tokens:,}, {hidden:,}] cut into {parts} blocks", _stacked, separate),
        ):
            ours, spread = clock(partial(work, x, parts))
            yield lower_is_better(case, "a plain copy", "ms", ours, plain, spread)


if __name__ == "__main__":
    main()
