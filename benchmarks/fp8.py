"""Matmuls in fp8 against bf16: the loss of a run, and on a GPU the time of a step.

    python -m benchmarks.fp8 [--quick] [--steps N] [--json PATH]

The same model, data, seed and steps with `precision.matmul = "fp8"` and without it, on the text of Python's standard library.
Compared is the mean loss of the last tenth of the steps; the same difference between bf16 and fp32 shows what rounding does.
On a GPU the model has 300 M parameters, units are compiled and the median time of a step is compared, too. On a CPU, where fp8 is
emulated, the model has 1 M parameters, and times mean nothing.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, finish, lower_is_better, parser_of, show
from fourfold.config import Config
from fourfold.plan import Plan
from fourfold.train.rundir import RunDir, read_metrics
from fourfold.train.worker import fit

ON_GPU = torch.cuda.is_available()
SHAPE: dict[str, Any] = {"family": "llama", "layers": 4, "hidden": 128, "heads": 4, "ffn": 384, "seq_len": 128}
LARGE: dict[str, Any] = {"family": "llama", "layers": 24, "hidden": 1024, "heads": 16, "ffn": 2816, "seq_len": 2048}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp8": {"compute": "bf16", "matmul": "fp8"},
    "bf16": {"compute": "bf16"},
    "fp32": {"compute": "fp32"},
}


def main() -> None:
    parser = parser_of("matmuls in fp8 and in bf16")
    parser.add_argument("--steps", type=int, default=0, help="steps of each run; default 1,000 on a GPU, 400 on a CPU")
    args = parser.parse_args()
    steps = args.steps or (20 if args.quick else 1000 if ON_GPU else 400)
    shape = LARGE if ON_GPU and not args.quick else SHAPE
    found = {name: train(shape, steps, name) for name in PRECISIONS}
    last = max(1, steps // 10)
    case = f"{shape['layers']} layers of {shape['hidden']}, {steps} steps, {'GPU' if ON_GPU else 'CPU, emulated'}"
    loss = {name: statistics.fmean(m["loss"] for m in steps_[-last:]) for name, steps_ in found.items()}
    rows: list[Row] = [
        lower_is_better(case, "bf16", f"mean loss of the last {last}", loss["fp8"], loss["bf16"]),
        lower_is_better(f"{case}: bf16", "fp32", f"mean loss of the last {last}", loss["bf16"], loss["fp32"]),
    ]
    if ON_GPU:
        took = {name: statistics.median(m["seconds"] for m in steps_[steps // 5 :]) for name, steps_ in found.items()}
        rows.append(lower_is_better(case, "bf16", "seconds of a step", took["fp8"], took["bf16"]))
    show("fp8", rows)
    finish("fp8", rows, args.json)


def train(shape: dict[str, Any], steps: int, name: str) -> list[dict[str, Any]]:
    """The metrics of a run's steps."""
    with tempfile.TemporaryDirectory() as folder, open("/dev/null", "w") as nowhere:
        config = Config.from_dict(
            {
                "model": shape,
                "data": {"source": "stdlib", "tokenizer": "bytes"},
                "optim": {"lr": 1e-3 if shape is SHAPE else 3e-4, "warmup": max(1, steps // 20)},
                "train": {"steps": steps, "global_batch": 16, "run_dir": str(Path(folder) / "run")},
            }
        ).resolve()
        fit(config, Plan.from_dict({"precision": PRECISIONS[name]}), console=nowhere)
        return [m for m in read_metrics(RunDir(config.train.run_dir)) if "loss" in m]


if __name__ == "__main__":
    main()
