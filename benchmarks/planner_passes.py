"""What each pass of the planner's search is worth: plan seconds, certificate gap and planning time of 48 questions.

    python -m benchmarks.planner_passes [--quick] [--only small large ...] [--without PASS ...] [--against OLD.json] [--json PATH]

A question is a model (1 B to 175 B parameters) on a cluster (1 to 2,048 GPUs) with a batch. `--without` switches passes of the
search off (fields of `SearchConfig`), so that two runs show what they are worth; `--against` compares with the JSON of an
earlier run and exits with 1 where a plan is more than 1 % slower.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import Row, finish, lower_is_better, parser_of
from fourfold.cluster import Cluster
from fourfold.config import ModelConfig
from fourfold.errors import PlanError
from fourfold.model.operators import ModelSpec
from fourfold.planner.api import default_precision, find_plan
from fourfold.planner.problem import PlanProblem, SearchConfig, parse_fixes

__all__ = ["QUESTIONS", "Question"]

SLOWER = 1.01
"""A plan may take at most this many times the seconds of the plan that it is compared with."""


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, seq_len: int) -> ModelConfig:
    return ModelConfig(
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        seq_len=seq_len,
    )


MODELS = {
    "llama-1b": _llama(16, 2048, 32, 8, 8192, 128256, 2048),
    "gpt-1.3b": ModelConfig(family="gpt", layers=24, hidden=2048, heads=16, vocab=50304, seq_len=2048),
    "llama-3b": _llama(28, 3072, 24, 8, 8192, 128256, 4096),
    "llama-8b": _llama(32, 4096, 32, 8, 14336, 128256, 8192),
    "llama-8b-4k": _llama(32, 4096, 32, 8, 14336, 128256, 4096),
    "gpt-13b": ModelConfig(family="gpt", layers=40, hidden=5120, heads=40, vocab=50304, seq_len=2048),
    "qwen-32b": _llama(64, 5120, 40, 8, 27648, 152064, 4096),
    "llama-70b": _llama(80, 8192, 64, 8, 28672, 128256, 8192),
    "llama-70b-4k": _llama(80, 8192, 64, 8, 28672, 128256, 4096),
    "gpt-175b": ModelConfig(family="gpt", layers=96, hidden=12288, heads=96, vocab=50304, seq_len=2048),
}


class Question(NamedTuple):
    """A model on a cluster; `ranks` below a node's devices use a part of one node."""

    model: str
    preset: str
    ranks: int
    global_batch: int
    memory: str = ""
    fix: str = ""

    def __str__(self) -> str:
        more = "".join(f" {x}" for x in (self.memory, self.fix) if x)
        return f"{self.model} on {self.ranks} {self.preset}, batch {self.global_batch}{more}"

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec.from_config(MODELS[self.model])

    @property
    def cluster(self) -> Cluster:
        one = Cluster.preset(self.preset)
        cluster = Cluster.preset(self.preset, nodes=max(1, self.ranks // one.devices))
        return cluster.what_if({"memory": self.memory}) if self.memory else cluster


QUESTIONS: dict[str, tuple[Question, ...]] = {
    "small": (
        Question("llama-1b", "h100-sxm", 1, 32),
        Question("llama-1b", "l4-pcie", 1, 8),
        Question("gpt-1.3b", "a100-40g", 1, 16),
        Question("llama-3b", "h200", 1, 16),
        Question("llama-8b", "h200", 1, 8),
        Question("llama-1b", "l4-pcie", 4, 32),
        Question("gpt-1.3b", "v100-16g", 4, 64),
        Question("llama-3b", "a100-80g", 2, 32),
        Question("llama-8b-4k", "h100-sxm", 4, 32),
        Question("llama-1b", "h100-sxm", 8, 256),
        Question("gpt-1.3b", "v100-16g", 8, 64),
        Question("llama-3b", "a100-40g", 8, 128),
    ),
    "node": (
        Question("llama-3b", "l4-pcie", 8, 64),
        Question("llama-8b", "h100-sxm", 8, 64),
        Question("llama-8b", "h100-sxm", 8, 512),
        Question("llama-8b", "a100-40g", 8, 32),
        Question("llama-8b-4k", "a100-80g", 8, 256),
        Question("llama-8b-4k", "v100-16g", 8, 32),
        Question("llama-8b", "b200", 8, 128),
        Question("gpt-13b", "a100-40g", 8, 64),
        Question("gpt-13b", "h100-sxm", 8, 256, "60GB"),
        Question("qwen-32b", "h200", 8, 64),
        Question("llama-8b", "h100-sxm", 8, 64, "", "pipe=1 col=1"),
        Question("llama-8b-4k", "a100-40g", 8, 64, "30GB", "pipe=1 optimizer=device activations=device"),
    ),
    "nodes": (
        Question("llama-8b", "h100-sxm", 64, 512),
        Question("llama-8b-4k", "a100-40g", 32, 256),
        Question("llama-8b-4k", "v100-16g", 32, 128),
        Question("gpt-13b", "a100-80g", 64, 512),
        Question("gpt-13b", "v100-16g", 64, 256),
        Question("gpt-13b", "l4-pcie", 64, 256),
        Question("qwen-32b", "h100-sxm", 32, 256),
        Question("qwen-32b", "a100-40g", 64, 512),
        Question("llama-70b-4k", "h100-sxm", 64, 256),
        Question("llama-70b", "h200", 64, 128),
        Question("llama-70b-4k", "a100-80g", 128, 512),
        Question("llama-70b-4k", "b200", 64, 1024),
    ),
    "large": (
        Question("llama-8b", "h100-sxm", 256, 1024),
        Question("qwen-32b", "a100-80g", 256, 1024),
        Question("llama-70b", "h100-sxm", 256, 512),
        Question("llama-70b-4k", "a100-40g", 256, 1024),
        Question("gpt-175b", "a100-80g", 256, 512),
        Question("gpt-175b", "h100-sxm", 512, 1536),
        Question("llama-70b", "h100-sxm", 1024, 1024),
        Question("llama-70b", "h100-sxm", 1024, 2048),
        Question("llama-70b-4k", "a100-40g", 1024, 2048),
        Question("gpt-175b", "a100-80g", 1024, 1536),
        Question("gpt-175b", "v100-16g", 1024, 1024),
        Question("gpt-175b", "h100-sxm", 2048, 2048),
    ),
}

PASSES: dict[str, dict[str, Any]] = {
    "fill": {"fill_rounds": 0},
    "others": {"most_improved": 1},
}
"""Refinement passes by name, and the fields of `SearchConfig` that switch them off."""


def answer(question: Question, config: SearchConfig) -> dict[str, Any]:
    """Plan one question: what to print, and the figures; planning time is CPU time."""
    cluster = question.cluster
    problem = PlanProblem(question.spec, cluster, question.global_batch, default_precision(cluster))
    ranks = question.ranks if question.ranks < cluster.ranks else None
    began = time.process_time()
    try:
        found = find_plan(problem, parse_fixes(question.fix.split(), None, ranks), config=config)
    except PlanError as e:
        return {"says": str(e)}
    planning, seconds, gap = time.process_time() - began, found.best.prediction.seconds, found.certificate["gap"]
    says = f"{seconds:.4f} s, gap {gap:.1%}, planned in {planning:.1f} s of CPU: {found.best.layout}"
    return {"says": says, "step seconds": seconds, "1 + gap": 1 + gap, "planning seconds": planning}


def main() -> None:
    parser = parser_of(__doc__ or "", list(QUESTIONS))
    parser.add_argument("--without", nargs="+", choices=PASSES, default=[], help="switch these passes off")
    parser.add_argument("--against", type=Path, metavar="JSON", help="compare with the JSON of an earlier run")
    args = parser.parse_args()
    off: dict[str, Any] = {}
    for name in args.without:
        off |= PASSES[name]
    earlier = json.loads(args.against.read_text(encoding="utf-8"))["rows"] if args.against else []
    before = {(row["case"], row["metric"]): row["ours"] for row in earlier}
    rows: list[Row] = []
    slower = []
    for question in (q for group in args.only for q in QUESTIONS[group][:: 6 if args.quick else 1]):
        case, found = str(question), answer(question, replace(SearchConfig(), **off))
        print(f"{case}: {found.pop('says')}", flush=True)
        for metric, value in found.items():
            rows.append(lower_is_better(case, "before", metric, value, before.get((case, metric), value)))
        if before.get((case, "step seconds"), math.inf) * SLOWER < found.get("step seconds", math.inf):
            slower.append(case)
    finish("planner_passes", rows, args.json)
    for case in slower:
        print(f"more than 1 % slower than before: {case}")
    sys.exit(1 if slower else 0)


if __name__ == "__main__":
    main()
