"""The largest Llama, Qwen and Mistral that the planner fits on machines that people have, as a table in docs/clusters.md.

    python -m benchmarks.largest [--quick] [--json PATH] [--write]

From the largest model of a family down, the first with a plan: full training with AdamW in bf16, fp32 masters and moments,
sequences of 4,096 tokens, 64 of them in a step. Predicted, not run. `--write` puts the table into docs/clusters.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import Row, finish, parser_of
from fourfold.cluster import Cluster
from fourfold.config import ModelConfig
from fourfold.errors import PlanError
from fourfold.model.operators import ModelSpec
from fourfold.plan import Plan
from fourfold.planner.api import make_plan
from fourfold.schema import format_bytes

PAGE = Path(__file__).parent.parent / "docs" / "clusters.md"
BATCH, TOKENS = 64, 4096
Shape = tuple[str, int, int, int, int, int, int, bool]
"""Name, layers, hidden, heads, key heads, width of the MLP, vocabulary, tied."""
FAMILIES: dict[str, list[Shape]] = {
    "Llama 3": [
        ("Llama 3.1 70B", 80, 8192, 64, 8, 28672, 128256, False),
        ("Llama 3.1 8B", 32, 4096, 32, 8, 14336, 128256, False),
        ("Llama 3.2 3B", 28, 3072, 24, 8, 8192, 128256, True),
        ("Llama 3.2 1B", 16, 2048, 32, 8, 8192, 128256, True),
    ],
    "Qwen 2.5": [
        ("Qwen 2.5 72B", 80, 8192, 64, 8, 29568, 152064, False),
        ("Qwen 2.5 32B", 64, 5120, 40, 8, 27648, 152064, False),
        ("Qwen 2.5 14B", 48, 5120, 40, 8, 13824, 152064, False),
        ("Qwen 2.5 7B", 28, 3584, 28, 4, 18944, 152064, False),
        ("Qwen 2.5 3B", 36, 2048, 16, 2, 11008, 151936, True),
        ("Qwen 2.5 1.5B", 28, 1536, 12, 2, 8960, 151936, True),
        ("Qwen 2.5 0.5B", 24, 896, 14, 2, 4864, 151936, True),
    ],
    "Mistral": [
        ("Mistral Large 123B", 88, 12288, 96, 8, 28672, 32768, False),
        ("Mistral Small 24B", 40, 5120, 32, 8, 32768, 131072, False),
        ("Mistral Nemo 12B", 40, 5120, 32, 8, 14336, 131072, False),
        ("Mistral 7B", 32, 4096, 32, 8, 14336, 32768, False),
    ],
}


def machines() -> dict[str, Cluster]:
    card, l4 = Cluster.preset("rtx-4090"), Cluster.preset("l4-pcie")
    return {
        "2 × RTX 4090, 128 GiB of host memory": card.with_devices(2),
        "1 × RTX 4090, 64 GiB of host memory": card.with_devices(1).what_if({"host": "64GiB"}),
        "1 × L4, 64 GiB of host memory": l4.with_devices(1).what_if({"host": "64GiB"}),
        "8 × A100 40 GB": Cluster.preset("a100-40g"),
    }


def spec_of(shape: Shape) -> ModelSpec:
    name, layers, hidden, heads, kv_heads, ffn, vocab, tie = shape
    config = ModelConfig(
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        tie=tie,
        seq_len=TOKENS,
        qkv_bias=name.startswith("Qwen"),
        head_dim=128 if "Nemo" in name or "Small" in name else 0,
    )
    return ModelSpec.from_config(config, name)


def largest(shapes: list[Shape], cluster: Cluster) -> tuple[str, Plan] | None:
    """The first of the models that has a plan."""
    for shape in shapes:
        try:
            return shape[0], make_plan(spec_of(shape), cluster, global_batch=BATCH)
        except PlanError:
            continue
    return None


def found(quick: bool) -> Iterator[tuple[str, str, str, Plan | None]]:
    """Machine, family, model, plan."""
    for machine, cluster in list(machines().items())[: 1 if quick else None]:
        for family, shapes in list(FAMILIES.items())[-1 if quick else 0 :]:
            best = largest(shapes, cluster)
            yield (
                (machine, family, *best)
                if best
                else (machine, family, f"no {family}: {shapes[-1][0]} is too large", None)
            )


def table(rows: list[tuple[str, str, str, Plan | None]]) -> list[str]:
    lines = ["| machine | model | plan | tokens/s | device memory | on the host |", "|---|---|---|---|---|---|"]
    for machine, _, model, plan in rows:
        if plan is None or plan.predicted is None:
            lines.append(f"| {machine} | {model} | | | | |")
            continue
        p, best = plan.predicted, (plan.alternatives or ({},))[0]
        host = max(m.get("host", 0) for m in p["memory"])
        narrow = "; gradients in bf16" if plan.precision.reduce == "bf16" else ""
        lines.append(
            f"| {machine} | {model} | {best['plan']}; {best['units']}{narrow} | {p['tokens_per_second']:,.0f} | "
            f"{format_bytes(p['peak_bytes'])} of {format_bytes(p['usable_bytes'])} | "
            f"{format_bytes(host) + ' a device' if host else ''} |"
        )
    return lines


def write(lines: list[str]) -> None:
    """Replace the table in the page."""
    text, first, last = PAGE.read_text(encoding="utf-8"), "<!-- largest -->\n", "<!-- /largest -->"
    before, _, rest = text.partition(first)
    PAGE.write_text(before + first + "\n".join(lines) + "\n" + last + rest.partition(last)[2], encoding="utf-8")


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--write", action="store_true", help="put the table into docs/clusters.md")
    args = parser.parse_args()
    rows = list(found(args.quick))
    lines = table(rows)
    print("\n".join(lines))
    if args.write and not args.quick:
        write(lines)
    finish("largest", [_row(*r) for r in rows], args.json)


def _row(machine: str, family: str, model: str, plan: Plan | None) -> Row:
    billions = (plan.predicted or {}).get("parameters", 0) / 1e9 if plan is not None else 0.0
    most = spec_of(FAMILIES[family][0]).parameters / 1e9
    return Row(f"{machine}: {model}", family, "parameters, in billions", billions, most, billions / most)


if __name__ == "__main__":
    main()
