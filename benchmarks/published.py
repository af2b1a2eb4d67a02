"""Published runs, predicted by the planner from presets of their machines. Every error is printed.

    python -m benchmarks.published [--only layouts papers searches] [--quick] [--json PATH]

`layouts`: runs with their layouts, by source, with signed errors (published_layouts.py). `papers`: the four papers' own figures.
`searches`: seconds of the search.

`ours` is the prediction, `theirs` what was published, `ratio` the prediction over it: 1 is right. Where a publication leaves
something open (Hanayo's and Tesseract's micro-batches), ratios between its own rows are predicted, not times.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import published_layouts
from benchmarks.common import Row, arguments, finish, show
from fourfold.cluster import Cluster, Host, Level
from fourfold.config import ModelConfig
from fourfold.model.operators import ModelSpec
from fourfold.plan import Batch, Memory, Mesh, Pipeline, Plan, Precision, Tensor, UnitRule
from fourfold.planner.api import make_plan
from fourfold.planner.engines import TrainingEngine
from fourfold.planner.evaluate import predict
from fourfold.planner.knapsack import Group, choose
from fourfold.planner.prediction import Prediction
from fourfold.planner.problem import PlanProblem

DATA = tomllib.loads((Path(__file__).parent / "published_runs.toml").read_text(encoding="utf-8"))
HALF = Precision(compute="bf16", compile=False)
PAPER = TrainingEngine("paper", fused=True)
"""Systems of which only the layout is known: the host is always ahead."""


def row(case: str, peer: str, metric: str, ours: float, theirs: float) -> Row:
    return Row(case, peer, metric, ours, theirs, ours / theirs)


def fused(name: str, nodes: int = 1) -> Cluster:
    """A preset as these systems use it, whose operators between products are fused."""
    base = Cluster.preset(name, nodes=nodes)
    return replace(base, device=replace(base.device, eager=1.0))


# ---- Megatron-LM ----


def megatron() -> Iterator[Row]:
    """Tensor parallelism of 8 in a node, pipelines between nodes; no fused attention yet, dropout on."""
    for r in DATA["megatron"]["rows"]:
        for metric, recompute in (("full_recompute_s", "full"), ("sequence_selective_s", "selective")):
            model = ModelConfig(
                family="gpt", layers=r["layers"], hidden=r["hidden"], heads=r["heads"], vocab=51200, seq_len=2048
            )
            copies = r["tensor"] if recompute == "full" else 1  # those rows were run without sequence parallelism
            spec = ModelSpec.from_config(model).with_plain_attention(residual_copies=copies)
            pipe, per_rank = r["pipe"], r["interleave"]
            plan = Plan(
                mesh=Mesh(pipe=pipe, col=r["tensor"]),
                batch=Batch(micro_batches=r["global_batch"] // r["micro"]),
                pipeline=Pipeline(
                    schedule="interleaved" if per_rank > 1 else "1f1b",
                    stages_per_rank=per_rank if per_rank > 1 else 2,
                    layers=(r["layers"] // (pipe * per_rank),) * (pipe * per_rank) if pipe > 1 else "auto",
                ),
                tensor=Tensor(overlap=False, keep=("inputs",)),  # what it gathers again overlaps with its matmuls
                unit=(UnitRule(match="blocks.*", recompute=recompute),),  # type: ignore[arg-type]
                precision=HALF,
            )
            cluster = fused("a100-80g", nodes=r["gpus"] // 8)
            problem = PlanProblem(spec, cluster, r["global_batch"], HALF).with_engine("megatron")
            seconds = predict(plan, problem).seconds
            yield row(r["model"], "Megatron-LM", metric, seconds, r[metric])


# ---- AxoNN ----


def v100() -> Cluster:
    """As those runs used them: in fp16, whose bytes are those of our bf16."""
    base = fused("v100-16g")
    return replace(base, device=replace(base.device, matrix=base.device.matrix | {"bf16": 125e12}))


def summit(gpus: int) -> Cluster:
    """Six V100 a node, NVLink of 50 GB/s to each other and to the host, two InfiniBand rails of 12.5 GB/s a node."""
    base = v100()
    return replace(
        base,
        name="summit",
        nodes=gpus // 6,
        devices=6,
        host=Host(memory="512GiB", link=50e9),
        level=(
            Level(name="NVLink", ranks=6, bandwidth=44e9, latency=4e-6),
            Level(name="InfiniBand", bandwidth=4.2e9, latency=8e-6),
        ),
    )


def axonn() -> Iterator[Row]:
    """Pipelines and data parallelism, everything recomputed, optimizer state streamed from the host."""
    for r in DATA["axonn"]["rows"]:
        model = ModelConfig(
            family="gpt", layers=r["layers"], hidden=r["hidden"], heads=r["heads"], vocab=51200, seq_len=512
        )
        spec = ModelSpec.from_config(model).with_plain_attention()
        plan = Plan(
            mesh=Mesh(pipe=r["pipe"], data=r["data"]),
            batch=Batch(micro_batches=16384 // r["data"] // r["micro"]),
            pipeline=Pipeline(schedule="1f1b"),
            unit=(UnitRule(match="blocks.*", recompute="full"),),
            memory=Memory(optimizer="host"),
            precision=Precision(compute="bf16", reduce="bf16", compile=False),
        )
        problem = PlanProblem(spec, summit(r["gpus"]), 16384, plan.precision, engine=PAPER)
        seconds = predict(plan, problem).seconds
        days = 3e11 / (16384 * 512) * seconds / 86400
        yield row(r["model"], "AxoNN", "days for 300 B tokens", days, r["days"])


# ---- Hanayo ----


def hanayo_cluster(name: str) -> Cluster:
    """The four machines, by how their eight GPUs are joined."""
    a100 = fused("a100-80g")
    pcie, nvlink = Level(name="PCIe", bandwidth=20e9, latency=1e-5), Level(name="NVLink", bandwidth=200e9, latency=5e-6)
    match name:
        case "PC":
            return replace(a100, level=(replace(nvlink, ranks=2), pcie))
        case "FC":
            return replace(a100, level=(nvlink,))
        case "TACC":
            far = Level(name="InfiniBand", bandwidth=8e9, latency=1.5e-5)
            return replace(fused("a100-40g"), level=(replace(pcie, ranks=3), far))
        case _:
            return replace(v100(), level=(replace(nvlink, bandwidth=100e9),))


def hanayo() -> Iterator[Row]:
    """Sequences a second of waves over GPipe's, as many micro-batches as ranks, on each machine.

    Type and length are not given. V100s are as much slower than A100s there as in fp32 (not as in half precision), and
    the times are then those of sequences of about 2048 tokens.
    """
    model = ModelConfig(family="bert", layers=64, hidden=2560, heads=64, vocab=30522, seq_len=2048)
    single = Precision(compile=False)
    spec = ModelSpec.from_config(model).with_plain_attention()
    for r in DATA["hanayo"]["rows"]:
        cluster = replace(hanayo_cluster(r["cluster"]), nodes=1, devices=8)
        batch = r["data"] * r["pipe"]

        def rate(schedule: str, waves: int = 1, r: Any = r, cluster: Any = cluster, batch: int = batch) -> float:
            stages = r["pipe"] * (2 * waves if schedule == "wave" else 1)
            layers = (64 // stages,) * stages
            plan = Plan(
                mesh=Mesh(pipe=r["pipe"], data=r["data"]),
                batch=Batch(micro_batches=r["pipe"]),
                pipeline=Pipeline(schedule=schedule, waves=waves, layers=layers),
                precision=single,
            )
            return batch / predict(plan, PlanProblem(spec, cluster, batch, single, engine=PAPER)).seconds

        base = rate("gpipe")
        case = f"{r['cluster']} {r['data']}x{r['pipe']}"
        yield row(case, "Hanayo", "1F1B / GPipe", rate("1f1b") / base, r["dapple"] / r["gpipe"])
        for waves in (2, 4, 8):
            if 2 * waves * r["pipe"] <= spec.layers:
                ours = rate("wave", waves) / base
                yield row(case, "Hanayo", f"{waves} waves / GPipe", ours, r[f"wave{waves}"] / r["gpipe"])


# ---- Tesseract ----


def tesseract() -> Iterator[Row]:
    """Seconds of forward and backward for a sequence, [4, 4, 4] against 1-D of 64 and 2-D of 8 × 8, all as published.

    Four A100 and two rails of 200 Gb/s a node; fp32. The rows' batches are partly given: 30 and 384 sequences (weak scaling),
    16 is assumed for strong scaling; so are 8 layers, on which seconds depend and ratios do not. What was published takes 18 to
    42 times as long as FLOPs, bytes and latencies of that machine do: something else took the time, and no ratio follows from it.
    """
    base = fused("a100-40g")
    near, far = base.level
    cluster = replace(base, nodes=16, devices=4, level=(replace(near, ranks=4), replace(far, bandwidth=11.5e9)))
    single = Precision(compile=False)
    for name, first, second in (("strong", 16, 16), ("weak", 30, 384)):
        s = DATA["tesseract"][name]
        model = ModelConfig(family="gpt", layers=8, hidden=s["hidden"], heads=s["heads"], vocab=512, seq_len=512)
        plain = ModelSpec.from_config(model).with_plain_attention()
        copies = ModelSpec.from_config(model).with_plain_attention(residual_copies=64)

        def seconds(spec: ModelSpec, mesh: Mesh, flow: Any, batch: int) -> float:
            plan = Plan(
                mesh=mesh, batch=Batch(micro_batches=1), tensor=Tensor(flow=flow, overlap=False), precision=single
            )
            p: Prediction = predict(plan, PlanProblem(spec, cluster, batch, single, engine=PAPER))
            return (p.compute + p.grid + p.exposed) / batch

        found = {
            "1-D": seconds(copies, Mesh(col=64), "auto", first),
            "2-D": seconds(plain, Mesh(row=8, col=8), "summa", second),
            "[4, 4, 4]": seconds(plain, Mesh(depth=4, row=4, col=4), "summa", second),
        }
        grid = found["[4, 4, 4]"]
        yield row(f"{name} scaling", "Tesseract", "1-D / [4, 4, 4]", found["1-D"] / grid, s["over_1d"])
        yield row(f"{name} scaling", "Tesseract", "2-D / [4, 4, 4]", found["2-D"] / grid, s["over_2d"])
        for (what, ours), theirs in zip(found.items(), s["seconds"], strict=True):
            yield row(f"{name} scaling", "Tesseract's seconds", f"{what}, a sequence", ours, theirs)


# ---- the search itself ----


def searches(quick: bool) -> Iterator[Row]:
    """Seconds to find a plan against the goals; the choice that OSDP's authors published, found by theirs in 9.1 s."""
    llama = ModelConfig(
        family="llama", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256, seq_len=8192
    )
    spec = ModelSpec.from_config(llama)
    for gpus, goal in ((1024, 5.0), (8192, 30.0)):
        if quick and gpus > 1024:
            continue
        began = time.perf_counter()
        make_plan(spec, Cluster.preset("h100-sxm", nodes=gpus // 8), global_batch=gpus)
        took = time.perf_counter() - began
        yield Row(f"70 B on {gpus} GPUs", "goal", "search_s", took, goal, goal / took)
    layer = [(377.745, 0.051672141), (271.885, 0.054875135), (147.315, 0.060699721), (116.225, 0.069794059)]
    began = time.perf_counter()
    chosen = choose([Group(layer, 48)], 8192 - 800)
    took = time.perf_counter() - began
    assert chosen is not None
    assert round(chosen.seconds, 4) == 2.9019
    yield Row("48 layers, published table", "OSDP's search", "search_s", took, 9.1, 9.1 / took)
    random = Random(0)
    units = []
    for _ in range(1000):
        size, speed = random.lognormvariate(3, 1.2), random.uniform(0.7, 1.3)
        steps = [k / 4 for k in range(5)]
        units.append(Group([(size * (1 / 8 + s * 7 / 8), speed * (3 - s) * (0.01 * size + 0.05)) for s in steps]))
    sizes = [[o[0] for o in g.options] for g in units]
    least, most = sum(map(min, sizes)), sum(map(max, sizes))
    began = time.perf_counter()
    chosen = choose(units, least + 0.37 * (most - least))
    took = time.perf_counter() - began
    assert chosen is not None
    yield Row("1000 distinct units", "goal", "choice_s", took, 0.02, 0.02 / took)
    yield Row("1000 distinct units", "goal", "gap", chosen.gap, 0.001, 0.001 / max(1e-12, chosen.gap))


def summary(rows: list[Row], peer: str) -> str:
    errors = [abs(r.ratio - 1) for r in rows if r.peer == peer]
    return f"{peer}: mean error {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}, {len(errors)} rows"


def layouts(quick: bool) -> Iterator[Row]:
    """Tokens a second and GPU of the rows with a layout; prints them by source, those held out at the end."""
    for title, sources in (
        ("sources with which the model was developed", published_layouts.KNOWN),
        ("sources that were held out", published_layouts.HELD_OUT),
    ):
        found = published_layouts.judge_all(sources, every=8 if quick else 1)
        print(f"\n== {title} ==")
        published_layouts.report(found)
        for j in found:
            if j.published is not None:
                case = f"{j.facts['model']}, {published_layouts.layout_text(j.facts)}"
                yield row(case, j.source, "tokens/s/GPU", j.predicted, j.published)


def main() -> None:
    args = arguments(__doc__ or "", ("layouts", "papers", "searches"))
    rows: list[Row] = []
    if "layouts" in args.only:
        rows += layouts(args.quick)
    if "papers" in args.only:
        found = [*megatron(), *axonn(), *hanayo(), *tesseract()]
        show("published figures: ours predicted, theirs published, ratio 1 is right", found)
        for peer in ("Megatron-LM", "AxoNN", "Hanayo", "Tesseract", "Tesseract's seconds"):
            print(summary(found, peer))
        rows += found
    if "searches" in args.only:
        found = list(searches(args.quick))
        show("searches: a ratio above 1 is within the goal", found)
        rows += found
    finish("published", rows, args.json)


if __name__ == "__main__":
    main()
