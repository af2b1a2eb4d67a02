"""Published runs with their layouts (published_layouts.toml), each as a plan, and what the planner predicts for it.

Some sources are held out: no term or constant of the model was chosen with them at hand, so they show how well it predicts runs
that it was not built on. They are summarized separately.

`python -m benchmarks.published` prints them by source. The error is signed: predicted over published tokens a second, less 1;
above 0 the planner promises more than was measured. Clusters are presets, changed only where a source states its hardware.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fourfold.cluster import Cluster
from fourfold.config import LoraConfig, ModelConfig
from fourfold.model.operators import ModelSpec
from fourfold.plan import Batch, Mesh, Pipeline, Plan, Precision, Tensor, UnitRule
from fourfold.planner.engines import ENGINES, TrainingEngine
from fourfold.planner.evaluate import predict
from fourfold.planner.prediction import Prediction, StepTime
from fourfold.planner.problem import PlanProblem
from fourfold.presets import CLOUD_CONGESTION
from fourfold.schema import parse_bytes

DATA = tomllib.loads((Path(__file__).parent / "published_layouts.toml").read_text(encoding="utf-8"))
GIB = 2**30
Facts = dict[str, Any]
"""A row of the file."""


@dataclass(frozen=True)
class Judged:
    """A published run and its prediction."""

    source: str
    facts: Facts
    prediction: Prediction
    usable: float
    """Bytes of a device that tensors may take."""
    held: float
    """Predicted GiB, as the source counts them."""

    @property
    def peak(self) -> float:
        """Predicted bytes of tensors on the fullest rank."""
        return self.prediction.peak.peak + not_split(self.facts)

    @property
    def fits(self) -> bool:
        return self.peak <= self.usable

    @property
    def tokens(self) -> float:
        """Of a step, on a GPU."""
        return float(self.facts["gbs"] * self.facts["seq"] / self.facts["gpus"])

    @property
    def predicted(self) -> float:
        """Tokens a second and GPU."""
        return self.tokens / self.prediction.seconds

    @property
    def published(self) -> float | None:
        """Tokens a second and GPU."""
        r = self.facts
        if r.get("memory_only"):
            return None
        return float(r["tps"]) if "tps" in r else self.tokens / r["step_s"] if "step_s" in r else None

    @property
    def error(self) -> float | None:
        return None if self.published is None else self.predicted / self.published - 1

    @property
    def memory_error(self) -> float | None:
        return self.held / self.facts["memory"] - 1 if "memory" in self.facts else None


# ---- a row as a question to the planner ----

MEGATRON_2021 = replace(ENGINES["megatron"], name="megatron, 2021", fused_accumulation=False)
"""Before its matmuls of weight gradients added to those of earlier micro-batches."""
SYSTEMS: dict[str, str | TrainingEngine] = {
    "titan-a100": "torchtitan",
    # Composer's FSDP on torch 1.13 and 2.0: fused LayerNorm and GELU, the first FlashAttention, all of a block is recomputed;
    # the fused loss holds bf16 logits and their gradient, 4 bytes per logit
    "mpt": replace(ENGINES["torchtitan"], name="composer", traffic={}, skipped=(), attention="flash-1", logits=-8.0),
    # XLA fuses operators, leaves out what is not read, and needs no Python in a step
    "jax": TrainingEngine("xla", fused=True, skipped=("down",), logits=2.0),
    # the residual stream is cast to fp32 for every norm and sum; SiLU and the product are two kernels; rotary embedding and loss
    # are fused; all of a block is recomputed; ZeRO-1 broadcasts parameters
    "internevo": replace(
        ENGINES["torchtitan"],
        name="internevo",
        traffic={"norm": 3.0, "residual": 1.67, "activation": 1.67},
        skipped=(),
        broadcasts=True,
        logits=0.0,
        fp32_shards=False,
    ),
    # CUDA_LAUNCH_BLOCKING=1, as its chronicles say: about 60 kernels of a unit, one after another, at 40 µs of the host each
    "bigscience": replace(MEGATRON_2021, name="megatron, blocking", synchronous=True, host_unit=1.7e-3),
    "sc21": MEGATRON_2021,
    "titan-h100": "torchtitan",
    "ibm": "torchtitan",  # FSDP of torch, eager, FlashAttention-2
}
SYSTEMS |= {"mpt-a100-80": SYSTEMS["mpt"], "mpt-h100": SYSTEMS["mpt"]}
# layers of torch with a fused norm, uncompiled; sequence parallelism as Megatron's; ZeRO-1
_LAYERS = replace(ENGINES["torchtitan"], traffic={"rotary": 3.5, "activation": 1.67}, fp32_shards=False)
# Transformers: the norm is not fused, and all of a block is recomputed
_TRANSFORMERS = replace(ENGINES["torchtitan"], name="transformers", skipped=(), fp32_shards=False)
SYSTEMS |= {
    "aleph-alpha": replace(_LAYERS, name="aleph-alpha", zero1_at_ends=True),
    "mt-nlg": MEGATRON_2021,
    "nemotron-4": "megatron",
    "llama-3": replace(ENGINES["megatron"], name="meta"),
    "tinyllama": replace(ENGINES["torchtitan"], name="tinyllama", traffic={}, logits=-8.0),
    "olmo-core": "torchtitan",
    "qwen": _TRANSFORMERS,
    "deepspeed": _TRANSFORMERS,
    "nemo-fp8": "nemo",
    "megatron-bridge": "nemo",
    "titan-fp8": "torchtitan",
}
"""What ran each source's rows."""


def cluster_of(r: Facts) -> Cluster:
    """The row's machine."""
    c = DATA["clusters"][r["cluster"]]
    base = Cluster.preset(c["preset"])
    if r["gpus"] < base.devices or "devices" in c:
        base = base.with_devices(c.get("devices", r["gpus"]))
    base = replace(base, nodes=max(1, r["gpus"] // base.devices))
    if changed := {k: c[k] for k in ("memory", "memory_rate") if k in c}:
        base = replace(base, device=replace(base.device, **changed))
    if "nvlink" in c:
        base = replace(base, level=(replace(base.level[0], bandwidth=c["nvlink"]), *base.level[1:]))
    if "network" in c:
        network = replace(base.level[-1], bandwidth=c["network"])
        if c.get("roce"):
            network = replace(network, name="RoCE", congestion=CLOUD_CONGESTION)
        base = replace(base, level=(*base.level[:-1], network))
    return base


def spec_of(r: Facts) -> ModelSpec:
    lora = LoraConfig(rank=r["lora"]) if "lora" in r else None
    spec = ModelSpec.from_config(ModelConfig(**DATA["models"][r["model"]], seq_len=r["seq"], lora=lora), r["model"])
    return spec.with_plain_attention(residual_copies=r.get("copies", 1)) if r.get("attention") == "plain" else spec


def rules_of(r: Facts, layers: int) -> tuple[UnitRule, ...]:
    how: Facts = {
        "mode": r["mode"],
        "within": r.get("within", 0),
        "reduce": "micro-batch" if r.get("reduce_each") else "step",
    }

    def every(step: int, recompute: Any) -> Iterator[UnitRule]:
        return (UnitRule(match=f"blocks.{i}.*", recompute=recompute, **how) for i in range(0, layers, step))

    match r["recompute"]:
        case "half-full":
            blocks = (*every(2, "full"), UnitRule(match="blocks.*", **how))
        case "half-full-half-selective":
            blocks = (*every(2, "full"), UnitRule(match="blocks.*", recompute="selective", **how))
        case recompute:
            blocks = (UnitRule(match="blocks.*", recompute=recompute, **how),)
    return (*blocks, UnitRule(match="*", **how))


def plan_of(r: Facts) -> Plan:
    pipe, per_rank, col, data = (r.get(k, 1) for k in ("pp", "vp", "tp", "dp"))
    layers: Any = "auto"
    if pipe > 1 and (per_rank > 1 or "layers" in r):
        given = r.get("layers", DATA["models"][r["model"]]["layers"] // (pipe * per_rank))
        layers = tuple(given) if isinstance(given, list) else (given,) * (pipe * per_rank)
    return Plan(
        mesh=Mesh(pipe=pipe, data=data, col=col),
        batch=Batch(micro_batches=r["gbs"] // data // r["mbs"]),
        pipeline=Pipeline(
            schedule="interleaved" if per_rank > 1 else "1f1b",
            stages_per_rank=per_rank if per_rank > 1 else 2,
            layers=layers,
        ),
        tensor=Tensor() if r.get("tp_overlap", True) else Tensor(overlap=False, keep=("inputs",)),
        unit=rules_of(r, DATA["models"][r["model"]]["layers"]),
        precision=Precision(
            compute="bf16",
            reduce=r.get("reduce", "fp32"),
            matmul=r.get("matmul", "compute"),
            compile=r["engine"] == "compiled",
        ),
    )


def not_split(r: Facts) -> float:
    """Bytes that tensor parallelism without sequence parallelism holds more, which no plan of ours has.

    Every column has the inputs of its blocks whole, for the micro-batches in flight on the first stage, and 10 bytes a token
    inside a block.
    """
    col, pipe = r.get("tp", 1), r.get("pp", 1)
    if r.get("copies", 1) == 1 or col == 1:
        return 0.0
    m, given = DATA["models"][r["model"]], r.get("layers", 0)
    first = given[0] if isinstance(given, list) else given or -(-m["layers"] // pipe)
    whole = r["mbs"] * r["seq"] * m["hidden"]
    in_flight = min(pipe, r["gbs"] // r["dp"] // r["mbs"])
    return float((1 - 1 / col) * whole * (2 * in_flight * first + 10))


def judged(source: str, r: Facts) -> Judged:
    plan = plan_of(r)
    problem = PlanProblem(spec_of(r), cluster_of(r), r["gbs"], plan.precision).with_engine(SYSTEMS[source])
    p, cluster = predict(plan, problem), problem.cluster
    held, kind = (p.peak.peak + not_split(r)) / GIB, r.get("memory_kind", "")
    if kind in ("nvidia-smi", "reserved"):
        held /= 1 - cluster.device.margin
    if kind == "nvidia-smi":
        held += parse_bytes(cluster.device.reserve, "reserve") / GIB
    return Judged(source, r, p, cluster.usable, held)


HELD_OUT: Sequence[str] = DATA["held_out"]["sources"]
KNOWN = [name for name in DATA["sources"] if name not in HELD_OUT]
"""Sources that were at hand when the model of time was developed."""


def judge_all(sources: Iterable[str] = (), every: int = 1) -> list[Judged]:
    """Predictions of all rows of some sources (default: those known), or of every so-manyth."""
    names = list(sources) or KNOWN
    return [judged(name, r) for name in names for r in DATA["rows"][name][::every]]


# ---- what is printed ----


def layout_text(r: Facts) -> str:
    parts = [f"{name}{r[key]}" for key, name in (("tp", "TP"), ("pp", "PP"), ("vp", "VP")) if r.get(key, 1) > 1]
    mode = {"zero3": "FSDP", "zero2": "ZeRO-2", "keep": "ZeRO-1", "replicate": "DP"}[r["mode"]]
    within = f" in {r['within']}" if r.get("within") else ""
    mesh = "·".join([*parts, f"{mode} {r['dp']}{within}"])
    return f"{mesh}, {r['gbs'] // r['dp'] // r['mbs']}×{r['mbs']}, {r['recompute']}"


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's, of values without ties."""

    def ranks(values: Sequence[float]) -> list[int]:
        order = sorted(range(len(values)), key=lambda i: values[i])
        return [order.index(i) for i in range(len(values))]

    n, distance = len(xs), sum((a - b) ** 2 for a, b in zip(ranks(xs), ranks(ys), strict=True))
    return 1 - 6 * distance / (n * (n * n - 1))


def errors_line(name: str, errors: Sequence[float]) -> str:
    mean, worst = statistics.mean(map(abs, errors)), max(errors, key=abs)
    return (
        f"{name:24}{len(errors):4} rows   mean error {mean:6.1%}   signed {statistics.mean(errors):+6.1%}   "
        f"largest {worst:+6.1%}   within 10 %: {sum(abs(e) <= 0.1 for e in errors)}"
    )


def model_sweeps(rows: Sequence[Judged]) -> list[list[Judged]]:
    """Five or more rows of one source, model, cluster, length, batch and number of GPUs: the planner should find their order."""
    groups: dict[object, list[Judged]] = {}
    for j in rows:
        r = j.facts
        if j.error is not None:
            key = (j.source, r["model"], r["gpus"], r["seq"], round(r["gbs"], -2), r.get("reduce"))
            groups.setdefault(key, []).append(j)
    return [group for group in groups.values() if len(group) >= 5]


def row_line(j: Judged) -> str:
    """One row: published and predicted tokens a second, the error, and the parts of the predicted step."""
    r, p = j.facts, j.prediction
    name = f"{r['id']:4} {j.source:11}{r['model']:18} {r['seq']:5} {r['gpus']:5} {r['cluster']:9} {layout_text(r):46}"
    speed = "out of memory" if r.get("oom") else ""
    if j.error is not None:
        speed = f"{j.published:7.0f} {j.predicted:7.0f} {j.error:+7.1%}"
    memory = f"{r['memory']:6.1f} {j.held:6.1f} {j.memory_error:+6.1%}" if "memory" in r else ""
    parts = " ".join(f"{getattr(p, part) / p.seconds:4.0%}" for part in StepTime._fields)
    return f"{name} {speed:24} {parts}  {memory}{'' if j.fits else '  does not fit'}"


def report(rows: Sequence[Judged]) -> None:
    """Print all rows, then a summary by source."""
    print("id, source, model, tokens of a sequence, GPUs, cluster, layout; tokens/s/GPU published, predicted, error;")
    print(f"shares of the step ({', '.join(StepTime._fields)}); GiB published, predicted, error")
    for j in rows:
        print(row_line(j))
    print("\nthroughput, predicted over published less 1 (above 0: too optimistic)")
    timed = [j for j in rows if j.error is not None]
    by_source: dict[str, list[float]] = {}
    for j in timed:
        assert j.error is not None
        gpu = DATA["clusters"][j.facts["cluster"]]["preset"].split("-")[0]
        by_source.setdefault(f"{j.source}, {gpu}", []).append(j.error)
    for name, errors in by_source.items():
        print(errors_line(name, errors))
    print(errors_line("all rows", [e for errors in by_source.values() for e in errors]))
    means = [statistics.mean(map(abs, errors)) for errors in by_source.values()]
    print(f"mean over sources of their mean error: {statistics.mean(means):.1%}")
    for group in model_sweeps(rows):
        ours, theirs = [j.predicted for j in group], [j.published or 0.0 for j in group]
        pick = theirs[ours.index(max(ours))]
        r = group[0].facts
        print(
            f"order of {len(group)} layouts ({group[0].source}, {r['model']}, {r['gpus']} GPUs, batch {r['gbs']}): "
            f"rank correlation {rank_correlation(ours, theirs):.2f}, "
            f"the best predicted is {1 - pick / max(theirs):.1%} below the best measured"
        )
    print("\nmemory, predicted over published less 1")
    for source in DATA["sources"]:
        if found := [j.memory_error for j in rows if j.source == source and j.memory_error is not None]:
            print(errors_line(source, found))
    ran = [j for j in rows if not j.facts.get("oom")]
    print(f"of {len(ran)} runs {sum(j.fits for j in ran)} are predicted to fit")
    if failed := [j for j in rows if j.facts.get("oom")]:
        print(
            f"of {len(failed)} published out-of-memory runs {sum(not j.fits for j in failed)} are predicted not to fit"
        )
