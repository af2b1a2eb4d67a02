"""Does more memory, or a faster network, ever make the plan slower? Random models and clusters, a little more step by step.

    python -m benchmarks.monotone [--seconds 300] [--seed 0]

Each step adds 0.2, 1 or 3 percent of memory, or somewhat more bandwidth, and plans again; some cases with constraints. The
search inside a layout compares choices by estimates and by simulations of some of them, so that nothing but trying shows it.
A certificate is wrong where its lower bound is above a plan that was found for less.
"""

from __future__ import annotations

import argparse
import random
import time

from fourfold.cluster import Cluster
from fourfold.config import ModelConfig
from fourfold.errors import PlanError
from fourfold.model.operators import ModelSpec
from fourfold.plan import Precision
from fourfold.planner.api import find_plan
from fourfold.planner.problem import PlanProblem, parse_fixes

MODELS = (
    ModelConfig(family="gpt", layers=12, hidden=768, heads=12, vocab=50304, seq_len=1024),
    ModelConfig(family="llama", layers=24, hidden=2048, heads=16, kv_heads=8, ffn=5632, vocab=32000, seq_len=2048),
    ModelConfig(family="llama", layers=28, hidden=3584, heads=28, kv_heads=4, ffn=18944, vocab=152064, seq_len=4096),
    ModelConfig(family="llama", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, seq_len=8192),
    ModelConfig(family="gpt", layers=40, hidden=5120, heads=40, vocab=50304, seq_len=2048),
    ModelConfig(family="gpt", layers=6, hidden=4096, heads=32, vocab=50304, seq_len=1024, tie=False),
)
PRESETS = ("v100-16g", "a100-40g", "a100-80g", "h100-sxm", "l4-pcie")
FIXES = (
    (),
    (),
    (),
    ("optimizer=device", "activations=device"),
    ("pipe=1",),
    ("pipe=1", "col=1", "optimizer=device"),
    ("pipe=2",),
)
STEPS = 8


def climb(chance: random.Random) -> tuple[int, list[str]]:
    """One random case: how many plans were compared with those for less, and which were slower."""
    model, preset = chance.choice(MODELS), chance.choice(PRESETS)
    base = Cluster.preset(preset, nodes=chance.choice((1, 1, 2, 4)))
    fixes, batch = list(chance.choice(FIXES)), chance.choice((8, 32, 64, 96, 256))
    what = chance.choice(("memory", "memory", "bandwidth"))
    precision = Precision(compute="fp32" if preset.startswith("v100") else "bf16")
    memory, more = base.memory * chance.uniform(0.5, 1.5), chance.choice((1.002, 1.01, 1.03))
    compared, slower, best = 0, [], float("inf")
    for step in range(STEPS):
        memory *= more
        value = str(int(memory)) if what == "memory" else f"x{(1.02 * more) ** step:.4f}"
        problem = PlanProblem(ModelSpec.from_config(model), base.what_if({what: value}), batch, precision)
        try:
            found = find_plan(problem, parse_fixes(fixes))
            seconds, lower = found.best.prediction.seconds, found.certificate["lower_bound"]
        except PlanError:  # too small
            seconds = lower = float("inf")
        if best < float("inf"):
            compared += 1
            case = f"{model.family} of {model.layers} layers, {base.nodes} × {preset}, batch {batch}, {' '.join(fixes)}"
            if seconds > best * (1 + 1e-9):
                percent = 100 * (seconds / best - 1)
                slower.append(
                    f"{case} {what} {value}: {seconds:.6f} s, was {best:.6f} with less ({percent:.4f} % slower)"
                )
            if lower > best * (1 + 1e-6):
                slower.append(f"{case} {what} {value}: nothing below {lower:.6f} s, it says, but {best:.6f} with less")
        best = min(best, seconds)
    return compared, slower


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long to try")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance, end, compared, slower = random.Random(args.seed), time.monotonic() + args.seconds, 0, 0
    while time.monotonic() < end:
        more, worse = climb(chance)
        compared, slower = compared + more, slower + len(worse)
        for line in worse:
            print(line, flush=True)
    print(f"{slower} of {compared} plans were slower than one for less")


if __name__ == "__main__":
    main()
