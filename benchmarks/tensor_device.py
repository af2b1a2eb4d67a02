"""The grid on one device, as one rank of 16 whose collectives are free: what the flows compute, and what layouts cost.

    python -m benchmarks.tensor_device [--quick] [--only SECTION …] [--json PATH]
                                # a GPU, under a minute, 12 GiB; --quick: also a CPU, small; `--only host`: a CPU, half a minute

- **flows**: the linears of a layer (12 hidden² weights), forward and backward, by each flow on planes of 4 × 4 and 2 × 2; against
  the bare products of the same FLOPs, as torch.mm. What is above them is copying, padding and starting kernels.
- **padding**: widths that do not divide, against the next that do; heads that leave a column half empty, against full columns.
- **copies**: what the residual stream costs when split by features (tokens need none), against one plain copy.
- **host**: CPU time of a Llama layer, forward and backward of a micro-batch, with activations so small that the host decides;
  against the same layer without a grid on as many ranks. Nothing is compiled. The least of many steps, in turns, of ten
  layers less that of two: what a layer adds.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import Row, arguments, finish, lower_is_better, show
from fourfold.config import Config
from fourfold.plan import Mesh, Plan
from fourfold.tensor.blocks import even
from fourfold.tensor.flows import _side_by_side, _stacked
from fourfold.tensor.grid import Axis, Grid
from fourfold.tensor.linear import ActivationLayout, GridLinear, GridSettings
from fourfold.train.mesh import RankMesh
from fourfold.train.one_rank import OneRank, one_of_many

FLOWS = ("auto", "os", "ls", "ws", "summa")
PLANES = {"4 x 4": Mesh(row=4, col=4), "2 x 2 of 4 planes": Mesh(depth=4, row=2, col=2)}
SEQ = 512


SECTIONS = ("flows", "padding", "copies", "host")


def main() -> None:
    args = arguments("The tensor grid on one device", SECTIONS)
    rows = list(measure(args.quick, args.only))
    show("one rank on this device", rows)
    finish("tensor_device", rows, args.json)


def measure(quick: bool, sections: Sequence[str] = SECTIONS) -> Iterator[Row]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not quick and list(sections) != ["host"]:
        raise SystemExit("there is no GPU here; --quick or --only host run on a CPU")
    small = quick and device.type == "cpu"
    widths, tokens = ((64,), SEQ) if small else ((1024,), 2048) if quick else ((4096, 8192), 8192)
    dtype = torch.float32 if small else torch.bfloat16
    clock = Clock(device, 2 if quick else 8)
    with one_of_many(16), torch.device(device):
        if "flows" in sections:
            for name, mesh in PLANES.items():
                grid = make_grid(mesh)
                for hidden in widths:
                    yield from flows(f"{name}, hidden {hidden:,}", grid, hidden, tokens, dtype, clock)
        grid = make_grid(PLANES["4 x 4"])
        if "padding" in sections:
            yield from padding(grid, widths[0], tokens, dtype, clock)
        if "copies" in sections:
            yield from copies(widths[-1], tokens, dtype, clock)
    if "host" in sections:
        with one_of_many(8):
            yield from host(device.type, 3 if quick else 60)


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


# ---- the host's time ----

ALONE = {"data": 4}
GRIDS: dict[str, tuple[dict[str, int], str]] = {
    "4 columns": ({"col": 4}, "auto"),
    "4 rows": ({"row": 4}, "auto"),
    "2 x 2": ({"row": 2, "col": 2}, "auto"),
    "2 x 2 of 2 planes": ({"depth": 2, "row": 2, "col": 2}, "auto"),
    "2 x 2, summa": ({"row": 2, "col": 2}, "summa"),
}
LAYERS = (2, 10)


def host(device: str, rounds: int) -> Iterator[Row]:
    torch.set_num_threads(1)
    cases = {"": (ALONE, "auto"), **GRIDS}
    for compute in ("bf16", "fp32"):
        ranks = {
            (case, layers): tiny_llama(layers, mesh, flow, compute, device)
            for case, (mesh, flow) in cases.items()
            for layers in LAYERS
        }
        seconds: dict[tuple[str, int], list[float]] = {key: [] for key in ranks}
        for turn in range(rounds + 3):
            for key, rank in ranks.items():
                took = cpu_seconds(rank)
                if turn > 2:  # the first steps record the order of weights
                    seconds[key].append(took)
        few, many = LAYERS
        each = {
            case: (min(seconds[case, many]) - min(seconds[case, few])) / (many - few) / MICRO_BATCHES * 1e3
            for case in cases
        }
        for case in GRIDS:
            found = seconds[case, many]
            spread = statistics.pstdev(found) / statistics.mean(found)
            yield lower_is_better(f"{case}, {compute}", "data 4", "host ms a layer", each[case], each[""], spread)


MICRO_BATCHES = 2


def tiny_llama(layers: int, mesh: dict[str, int], flow: str, compute: str, device: str) -> OneRank:
    ways = mesh.get("data", 1) * mesh.get("depth", 1) * mesh.get("row", 1)
    model = {"family": "llama", "layers": layers, "hidden": 32, "heads": 4, "ffn": 64, "seq_len": 8, "vocab": 64}
    config = {"model": model, "train": {"global_batch": MICRO_BATCHES * ways, "run_dir": "unused"}}
    plan = {
        "mesh": mesh,
        "batch": {"micro_batches": MICRO_BATCHES},
        "tensor": {"flow": flow},
        "precision": {"compute": compute, "compile": False},
    }
    made = Config.from_dict(config | {"data": {"source": "stdlib"}}).resolve()
    return OneRank(made, Plan.from_dict(plan), device=device)


def cpu_seconds(rank: OneRank) -> float:
    """CPU time of a step, in all threads of the process."""
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
    gc.disable()
    start = time.process_time()
    rank.step()
    took = time.process_time() - start
    gc.enable()
    rank.zero_grad()
    return took


if __name__ == "__main__":
    main()
