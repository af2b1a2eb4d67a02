"""One GPU without offload: `fourfold train` against a hand-written loop on the same model, in one run.

    python -m benchmarks.single_gpu [--quick] [--json PATH]

The 2.8 B Llama shape, bf16, one micro-batch of 4 x 4,096 tokens a step. The hand-written loop has bf16 gradients and torch's
fused AdamW on an fp32 master; ours runs the same settings through the config, the plan and the program, with gradients
in bf16 like the loop's. MFU is of 800 TFLOP/s, the rate of a large bf16 product on an H200; recomputation does not count, and
neither does the embedding, which is a lookup. Many count six FLOPs for every parameter, so also for the embedding's: that is the
second row.

Then ours with all optimizer state on the host, against the same loop with all of it on the GPU: with clipping, where updates
start in the backward and the norm is fine, and without clipping and guard, with gradients that the update consumes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, arguments, finish, show
from benchmarks.offload import DEVICE, SEQUENCES, SHAPE, SMALL, Model, OnDevice, clean, log, peak, timed, tokens
from fourfold import schema
from fourfold.config import Config
from fourfold.launch.place import Place
from fourfold.model.spec import flops_per_token
from fourfold.plan import Plan
from fourfold.supervision.watch import Limits
from fourfold.train.rundir import RunDir
from fourfold.train.worker import assemble

RATE = 800e12
ON_HOST: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "state on the host, clipping": ({"optimizer": "host", "rollback": "64GiB"}, {"optim": {"clip": 1e9}}),
    "state on the host, consumed gradients": (
        {"optimizer": "host", "gradients": "consume"},
        {"optim": {"clip": 0.0}, "train": {"guard": False}},
    ),
}
"""By case: the plan's memory, and what of the config is not the default."""


class Hand(OnDevice):
    """The hand-written loop, compiled per part where asked."""

    def __init__(self, model: Model, compiled: bool):
        super().__init__(model)
        if compiled:
            for block in model.blocks:
                for part in (block.attn, block.mlp):
                    part.compile()


def main() -> None:
    args = arguments("fourfold train and a hand-written loop on one GPU")
    rows = []
    cases: list[tuple[bool, bool, str]] = [(True, False, ""), (False, False, ""), (False, True, "")]
    for recompute, compiled, hosted in [*cases, *((True, False, hosted) for hosted in ON_HOST)]:
        try:
            rows += list(compare(args.quick, recompute, compiled, hosted))
        except Exception as e:
            log(f"recompute {recompute}, compiled {compiled}, {hosted}: {type(e).__name__}: {e}")
        clean()
        torch._dynamo.reset()
    show("one GPU", rows)
    finish("single_gpu", rows, args.json)


def compare(quick: bool, recompute: bool, compiled: bool, hosted: str) -> Iterator[Row]:
    shape = SMALL if quick else SHAPE
    case = f"{'full recomputation' if recompute else 'no recomputation'}{', compiled' if compiled else ''}"
    case += f", {hosted}" if hosted else ""
    flops = flops_per_token(shape.resolve()) * SEQUENCES * shape.seq_len
    ids = tokens(shape)
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    peaks = {}
    for _ in range(1 if quick or compiled else 2):
        hand = Hand(Model(shape, recompute), compiled)
        clean()
        seconds["theirs"].append(timed(lambda hand=hand: hand.run(ids, 1), 10, 3))  # type: ignore[misc]
        peaks["theirs"] = peak()
        del hand
        clean()
        with tempfile.TemporaryDirectory() as folder:
            step = ours(Path(folder), shape, recompute, compiled, hosted)
            clean()
            seconds["ours"].append(timed(step, 10, 3))
            peaks["ours"] = peak()
            del step
        clean()
    mine, theirs = min(seconds["ours"]), min(seconds["theirs"])
    spread = max((max(t) - min(t)) / min(t) for t in seconds.values())
    log(f"{case}: ours {flops / mine / RATE:.1%}, by hand {flops / theirs / RATE:.1%} of 800 TFLOP/s")
    yield Row(case, "hand-written loop", "MFU", flops / mine / RATE, flops / theirs / RATE, theirs / mine, spread)
    counted = flops + 6 * shape.vocab * shape.hidden * SEQUENCES * shape.seq_len
    values = counted / mine / RATE, counted / theirs / RATE
    yield Row(case, "hand-written loop", "MFU, embedding counted", *values, theirs / mine, spread)
    gib = {k: v / 2**30 for k, v in peaks.items()}
    yield Row(case, "hand-written loop", "GiB at the peak", gib["ours"], gib["theirs"], gib["theirs"] / gib["ours"])


def ours(folder: Path, shape: Any, recompute: bool, compiled: bool, hosted: str) -> Any:
    """One step of `fourfold train`, as a function."""
    memory, sections = ON_HOST[hosted] if hosted else ({}, {})
    config = Config.from_dict(
        {
            "model": schema.dump(shape),
            "data": {"source": "stdlib"},
            "optim": {"lr": 1e-4, "weight_decay": 0.1, **sections.get("optim", {})},
            "train": {
                "steps": 1000,
                "global_batch": SEQUENCES,
                "run_dir": str(folder / "run"),
                "device": DEVICE.type,
                "deterministic": False,
                **sections.get("train", {}),
            },
            "log": {"trace": 0},
        }
    ).resolve()
    plan = Plan.from_dict(
        {
            "unit": [{"match": "blocks.*", "recompute": "full" if recompute else "none"}],
            "precision": {"compute": "bf16", "reduce": "bf16", "compile": compiled},
            "memory": memory,
        }
    )
    layout = plan.check(config, 1)
    run = RunDir.create(config.train.run_dir, config, plan)
    with open("/dev/null", "w") as nowhere:
        loop, _ = assemble(Place(), DEVICE, Limits.of(600.0), config, plan, layout, run, (), nowhere)
    index = iter(range(1000))
    return lambda: loop.step(next(index))


if __name__ == "__main__":
    main()
