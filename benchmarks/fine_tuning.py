"""Fine-tuning on packed chats: `fourfold train FOLDER` against Hugging Face's Trainer, on one GPU, in one run.

    python -m benchmarks.fine_tuning [--quick] [--seconds 330] [--each 75] [--folder PATH] [--json PATH]
                                     [--only full lora bf16]

The Llama 3.1 8B shape, random weights, chats of log-normal lengths (median 400 tokens, sigma 1.1, at most 2,048), 16 k tokens a
step. Tokens per second count no padding; medians over steps after warm-up, or over a whole cycle of lengths where batches are
grouped by length, since their sizes differ. Memory is the most that torch has allocated.

    full     all weights, fp32 master: ours by the planner's plan; the Trainer with fp32 weights and bf16 autocast
    lora     rank 16 on all linear layers, frozen weights in bf16; the Trainer's by PEFT
    bf16     all weights; the Trainer's weights, gradients and state in bf16 without a master copy: less memory, other numerics

The Trainer runs with fused AdamW and its best of: examples flattened into one row with positions; padded batches grouped by
length; the faster of the two with compiled layers (not with `--quick`). It takes the first size of micro-batches, without
recomputation and then with it, that fits. It uses FlashAttention if that is installed, else torch's attention. If ours needs more
memory than the fastest Trainer, it is measured again by the planner's plan for the Trainer's memory.

Each measurement is a process of its own with at most `--each` seconds, the most informative first; every figure is printed as
soon as it is known, and one that fails costs only itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import inspect
import itertools
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Row, finish, lower_is_better, parser_of, show
from benchmarks.hugging_face import (
    GIB,
    SHAPE,
    SMALL,
    Budget,
    Run,
    environment,
    log,
    part,
    result,
    sized,
    tell,
    write_chats,
)

KINDS = ("full", "lora", "bf16")
WAYS = ("flattened", "padded, grouped by length")
ORDER = (
    *(("full", "ours"), ("full", WAYS[0]), ("lora", "ours"), ("lora", WAYS[0]), ("bf16", WAYS[0])),
    *(("lora", "compiled layers"), ("bf16", "compiled layers"), ("full", "compiled layers")),
    *(("full", "less memory"), ("lora", "less memory"), ("lora", WAYS[1]), ("full", WAYS[1]), ("bf16", WAYS[1])),
)
"""What is measured, the most informative first."""
SEQ_LEN, WINDOWS, CHATS, MEDIAN = 2048, 8, 512, 400.0
RANK, LR = 16, 1e-5
WARM, MEASURED = 3, 8
GOAL = 1.5
SPARE = 0.96
"""Predicted memory of a plan that is to need no more than a measured peak; predictions have been up to 3.3 % too low."""
LADDER: dict[str, list[tuple[int, bool]]] = {
    "full": [(2, True), (1, True)],
    "bf16": [(8, False), (4, False), (8, True), (4, True)],
    "lora": [(8, False), (4, False), (8, True), (4, True)],
}
"""Of the Trainer: examples in a micro-batch, and whether activations are recomputed; the first that fits is taken. With 16 bytes
a parameter for weights, gradients and state, 8 B parameters leave about 20 GiB on an H200, of which autocast's bf16 copies of the
weights take 15: 8 examples were out of memory there, and 4 made no step in 50 s."""

Found = dict[str, dict[str, dict[str, float]]]
"""By kind, then by "ours" or the Trainer's way: tokens per second, bytes at the peak, steps, and the step of LADDER."""


def main() -> None:
    args = arguments()
    if args.part:
        PARTS[args.part](args)
        return
    budget, rows = Budget(args.seconds), []
    found: Found = {"full": {}, "lora": {}, "bf16": {}}
    with tempfile.TemporaryDirectory(dir=args.folder.parent if args.folder else None) as made:
        args.work = Path(made)
        args.folder = args.folder or args.work / "model"
        try:
            prepare(args, budget)
        except Exception as e:
            log(f"the folder: FAILED: {type(e).__name__}: {e}")
        for kind, way in ORDER:
            if kind not in args.only and not (way == "ours" and ours_of(kind) in map(ours_of, args.only)):
                continue
            try:
                measure(kind, way, args, budget, found)
            except Exception as e:
                log(f"{kind}, {way}: FAILED: {type(e).__name__}: {e}")
            rows = [row for k in args.only for row in compare(k, args, found)]
            finish("fine_tuning", rows, args.json)
    show("\nfine-tuning", rows)
    for kind in args.only:
        judge(kind, found)


def arguments() -> argparse.Namespace:
    parser = parser_of("Fine-tuning on packed chats, ours and the Trainer's", KINDS)
    parser.add_argument("--seconds", type=float, default=330.0, help="for everything; what does not fit is left out")
    parser.add_argument("--each", type=float, default=75.0, help="seconds of one measurement, at most")
    parser.add_argument("--folder", type=Path, help="where the folder is written, and kept; one that is there is used")
    for name in ("--part", "--kind", "--way"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    for name in ("--rung", "--bytes"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    for name in ("--work", "--model"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.shape = SMALL if args.quick else SHAPE
    args.seq_len, args.windows = (128, 4) if args.quick else (SEQ_LEN, WINDOWS)
    return args


def prepare(args: argparse.Namespace, budget: Budget) -> None:
    """Chats, and the folder unless it is there."""
    count, median = (CHATS, MEDIAN) if not args.quick else (80, 60.0)
    write_chats(args.work / "chats.jsonl", count, args.seq_len, median=median)
    if not args.folder.is_dir():
        part("write", args, budget.left)


def measure(kind: str, way: str, args: argparse.Namespace, budget: Budget, found: Found) -> None:
    """One measurement, added to `found`; none if there is nothing to measure."""
    theirs = {name: each for name, each in found[kind].items() if not name.startswith("ours")}
    if way == "compiled layers" and (args.quick or not theirs):
        return
    if way == "less memory":
        mine, best = found[kind].get("ours"), fastest(theirs)
        if mine is None or best is None or mine["peak"] <= theirs[best]["peak"]:
            return
    budget.check(f"{kind}, {way}")
    seconds = min(args.each, budget.left)
    if way == "ours":
        found[kind]["ours"] = ours(kind, args, seconds)
    elif way == "less memory":
        assert best is not None
        plan = args.work / f"less-{kind}.json"
        most = int(SPARE * theirs[best]["peak"])
        part("plan", args, seconds, *of_part(kind), "--bytes", str(most), module="benchmarks.fine_tuning")
        found[kind]["ours, less memory"] = ours(kind, args, min(args.each, budget.left), "--plan", str(plan))
    else:
        more = of_part(kind, "--way", way)
        if way == "compiled layers":
            best = fastest(theirs)
            assert best is not None
            base = next(name for name in WAYS if best.startswith(name))
            more = of_part(kind, "--way", base, "--compiled", "--rung", str(int(theirs[best]["rung"])))
        found[kind] |= part("peer", args, seconds, *more, module="benchmarks.fine_tuning")
    us, best = found[ours_of(kind)].get("ours"), fastest({n: e for n, e in found[kind].items() if "ours" not in n})
    if us is not None and best is not None:
        log(f"  {kind}: {us['rate'] / found[kind][best]['rate']:.2f} times the tokens/s of the Trainer so far ({best})")


def of_part(kind: str, *more: str) -> tuple[str, ...]:
    return ("--kind", kind, *more)


def ours_of(kind: str) -> str:
    """Which of our runs a kind is compared with."""
    return "lora" if kind == "lora" else "full"


def fastest(measured: dict[str, dict[str, float]]) -> str | None:
    return max(measured, key=lambda name: measured[name]["rate"], default=None)


def compare(kind: str, args: argparse.Namespace, found: Found) -> Iterator[Row]:
    """Ours, by default and for the Trainer's memory, against the fastest Trainer."""
    theirs = {name: each for name, each in found[kind].items() if not name.startswith("ours")}
    best = fastest(theirs)
    if best is None:
        return
    for name, us in found[ours_of(kind)].items():
        if not name.startswith("ours"):
            continue
        case, peer = f"{kind}{name.removeprefix('ours')}, {sized(args.shape)}", f"Trainer, {best}"
        yield Row(case, peer, "tokens/s", us["rate"], theirs[best]["rate"], us["rate"] / theirs[best]["rate"])
        yield lower_is_better(case, peer, "GiB at the peak", us["peak"] / GIB, theirs[best]["peak"] / GIB)


def judge(kind: str, found: Found) -> None:
    """Say whether the goals are met, by the same run of ours."""
    theirs = {name: each for name, each in found[kind].items() if not name.startswith("ours")}
    best = fastest(theirs)
    for name, us in found[ours_of(kind)].items():
        if best is None or not name.startswith("ours"):
            continue
        speed = "met" if us["rate"] >= GOAL * theirs[best]["rate"] else "MISSED"
        memory = "met" if us["peak"] <= theirs[best]["peak"] else "MISSED"
        log(f"{kind}, {name}: goal of {GOAL} times the tokens per second {speed}, goal of no more memory {memory}")


def ours(kind: str, args: argparse.Namespace, seconds: float, *more: str) -> dict[str, float]:
    """`fourfold train` by the planner's plan; it is killed after the steps that are measured."""
    words = [str(args.folder), "--data.source", str(args.work / "chats.jsonl"), "--model.seq-len", str(args.seq_len)]
    words += ["--train.global-batch", str(args.windows), "--train.steps", "500", *more]
    # all weights are trained from random ones, which takes seconds less than reading them; adapters need weights
    words += ["--lora.rank", str(RANK)] if kind == "lora" else ["--model.init", "random"]
    run = Run(words, args.work / f"ours-{kind}", args.quick)
    try:
        run.go(WARM + MEASURED, seconds, finish=False)
        taken = run.steps[WARM : WARM + MEASURED]
        if len(taken) < 2:
            raise RuntimeError(f"{len(run.steps)} steps in {seconds:.0f} s; give more with --each")
        rate = statistics.median(m["tokens_per_second"] for m in taken)
        peak = max(m["peak_bytes"] for m in run.steps)
    finally:
        shutil.rmtree(run.run / "checkpoints", ignore_errors=True)
    log(f"ours, {kind}: {rate:,.0f} tokens/s ({len(taken)} steps), {peak / GIB:.2f} GiB at the peak")
    for line in explained(run.run, args.quick):
        log(f"  | {line}")
    return {"rate": rate, "peak": float(peak)}


def explained(run: Path, quick: bool) -> list[str]:
    """Where the time of a run's steps went, in the words of `fourfold why`."""
    command = [sys.executable, "-m", "fourfold", "why", str(run)]
    done = subprocess.run(command, env=environment(quick), capture_output=True, text=True, timeout=60)
    return [line.rstrip() for line in (done.stdout if done.returncode == 0 else done.stderr).splitlines()][:20]


def plan_part(args: argparse.Namespace) -> None:
    """The planner's plan for our run on this device with less memory."""
    import torch

    from fourfold.cluster import Cluster
    from fourfold.data.samples import open_samples
    from fourfold.launch.place import gpu_cluster
    from fourfold.planner.api import plan_run
    from fourfold.train.rundir import RunDir

    config, before = RunDir.find(args.work / f"ours-{args.kind}").read()
    cluster = gpu_cluster(1, 1) if torch.cuda.is_available() else Cluster.local(1)
    memory = cluster.memory - (cluster.usable - args.bytes) / (1 - cluster.device.margin)
    device = dataclasses.replace(cluster.device, memory=f"{int(memory)}")
    context = open_samples(config)[0].context
    plan = plan_run(config, dataclasses.replace(cluster, device=device), before.precision, context=context)
    plan.save(args.work / f"less-{args.kind}.json")
    assert plan.predicted is not None
    tell(f"plan for {args.bytes / GIB:.2f} GiB: {plan.predicted['seconds']:.3f} s a step predicted")


# ---- the Trainer ----


def peer_part(args: argparse.Namespace) -> None:
    """One of the Trainer's ways to run."""
    last = time.perf_counter() + args.seconds - 6
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    begun = time.perf_counter()
    model = peer_model(args.kind, args.shape, device)
    examples = encoded(args)
    mean = sum(len(e["input_ids"]) for e in examples) / len(examples)
    together = power_of_two(args.windows * args.seq_len / mean)
    attention = getattr(model.config, "_attn_implementation", "?")
    tell(
        f"Trainer of transformers {transformers.__version__}, {args.kind}: {together} chats a step, {mean:.0f} tokens each, "
        f"attention: {attention}; model made in {time.perf_counter() - begun:.1f} s"
    )
    name = args.way
    if args.compiled:
        compile_layers(model)
        name += ", compiled layers"
    plain = model.forward
    for rung, (examples_of_one, recompute) in list(enumerate(LADDER[args.kind]))[args.rung :]:
        micro = min(examples_of_one, together)
        how = f"{micro} x {together // micro} chats{', recomputed' * recompute}"
        try:
            got = train(model, examples, micro, together // micro, recompute, name, last, args)
        except Exception as e:  # another size may still work
            memory = isinstance(e, torch.OutOfMemoryError)
            why = "out of memory" if memory else f"{type(e).__name__}: {str(e)[:300]}"
            tell(f"Trainer, {args.kind}, {name}, {how}: {why}")
            if time.perf_counter() > last:
                return
            model.forward = plain  # the Trainer has replaced it
            clean(model)
            continue
        tell(
            f"Trainer, {args.kind}, {name}, {how}: {got['rate']:,.0f} tokens/s, {got['peak'] / GIB:.2f} GiB at the peak"
        )
        result(**{f"{name}, {how}": got | {"rung": rung}})
        return


def power_of_two(value: float) -> int:
    """The power of two next to a number of at least 1."""
    return min((1 << n for n in range(12)), key=lambda n: abs(n - value))


def peer_model(kind: str, shape: dict[str, Any], device: str) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    flash = device == "cuda" and transformers.utils.is_flash_attn_2_available()
    config = transformers.LlamaConfig(**shape)
    config.use_cache = False
    with torch.device(device):
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32 if kind == "full" else torch.bfloat16,
            attn_implementation="flash_attention_2" if flash else "sdpa",
        )
    if kind == "lora":
        import peft

        model = peft.get_peft_model(
            model,
            peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
    return model.train()


def encoded(args: argparse.Namespace) -> list[dict[str, list[int]]]:
    """The chats as ours encodes them: the same tokens, and the same of them trained."""
    from fourfold.data.encode import Encoding
    from fourfold.data.samples import IGNORE, open_corpus

    tokenizer = str(args.folder / "tokenizer.json")
    corpus = open_corpus(str(args.work / "chats.jsonl"), tokenizer, Encoding(tokenizer))
    assert corpus.starts is not None
    assert corpus.mask is not None
    starts = [int(s) for s in corpus.starts]
    examples = []
    for start, stop in itertools.pairwise(starts):
        ids = [int(t) for t in corpus.tokens[start : min(stop, start + args.seq_len + 1)]]
        marks = corpus.mask[start : start + len(ids)]
        examples.append({"input_ids": ids, "labels": [t if m else IGNORE for t, m in zip(ids, marks, strict=True)]})
    return examples


def padded(examples: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
    """A batch of rows, padded to the longest, rounded up to 8 tokens."""
    import torch

    width = -(-max(len(e["input_ids"]) for e in examples) // 8) * 8
    rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for e in examples:
        more = width - len(e["input_ids"])
        rows["input_ids"].append(e["input_ids"] + [0] * more)
        rows["labels"].append(e["labels"] + [-100] * more)
        rows["attention_mask"].append([1] * len(e["input_ids"]) + [0] * more)
    return {name: torch.tensor(values) for name, values in rows.items()}


def train(
    model: Any,
    examples: list[dict[str, list[int]]],
    micro: int,
    accumulated: int,
    recompute: bool,
    name: str,
    last: float,
    args: argparse.Namespace,
) -> dict[str, float]:
    """Steps of one Trainer: tokens per second, peak bytes, number of steps."""
    import torch
    import transformers

    cuda, flat, compiled = torch.cuda.is_available(), name.startswith("flattened"), "compiled" in name
    cycle = max(
        1, min(50, len(examples) // (4 * micro * accumulated))
    )  # steps from the longest examples to the shortest
    warm = WARM if flat else cycle if compiled else 1
    measured = MEASURED - WARM if flat else cycle
    counts: list[torch.Tensor] = []
    steps: list[tuple[float, int]] = []

    def count(module: Any, positional: Any, given: dict[str, Any]) -> None:
        if given.get("attention_mask") is not None:
            counts.append(given["attention_mask"].sum() - len(given["attention_mask"]))
        else:
            counts.append((given["position_ids"] != 0).sum())

    class Clock(transformers.TrainerCallback):
        begun = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.begun = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            now = time.perf_counter()
            steps.append((now - self.begun, int(sum(int(c) for c in counts))))
            self.begun = now
            counts.clear()
            if len(steps) <= 2:
                tell(f"Trainer, {name}: step {len(steps)} after {steps[-1][0]:.1f} s")
            control.should_training_stop = control.should_training_stop or now > last

    known = inspect.signature(transformers.TrainingArguments.__init__).parameters
    settings: dict[str, Any] = {
        **{
            "output_dir": str(args.work / "trainer"),
            "max_steps": warm + measured,
            "learning_rate": LR,
            "lr_scheduler_type": "cosine",
        },
        **{"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulated, "max_grad_norm": 1.0},
        **{
            "optim": "adamw_torch_fused" if cuda else "adamw_torch",
            "bf16": cuda and args.kind != "bf16",
            "use_cpu": not cuda,
        },
        **{"gradient_checkpointing": recompute, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        **{"logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True},
        **{"remove_unused_columns": False, "dataloader_drop_last": True},
    }
    if not flat:
        new = "train_sampling_strategy" in known
        settings |= {"train_sampling_strategy": "group_by_length"} if new else {"group_by_length": True}
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**settings),
        train_dataset=examples,
        data_collator=transformers.DataCollatorWithFlattening() if flat else padded,
        callbacks=[Clock()],
    )
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        trainer.train()
    finally:
        hook.remove()
    peak = torch.cuda.max_memory_allocated() if cuda else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken = steps[warm:] or steps[-1:]
    if flat:
        rate = statistics.median(n / s for s, n in taken)
    else:
        rate = sum(n for _, n in taken) / sum(s for s, _ in taken)
    if len(steps) < warm + measured:
        tell(f"Trainer, {name}: only {len(taken)} of {measured} steps were measured")
    return {"rate": rate, "peak": float(peak), "steps": len(taken)}


def compile_layers(model: Any) -> None:
    """torch.compile of every layer, for rows of any length."""
    for module in model.modules():
        if type(module).__name__ == "LlamaDecoderLayer":
            module.compile(dynamic=True)


def clean(model: Any) -> None:
    """Give the memory of a Trainer back."""
    import torch

    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


PARTS = {"peer": peer_part, "plan": plan_part}


if __name__ == "__main__":
    main()
