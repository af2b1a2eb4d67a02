"""Fine-tuning on packed chats: `fourfold train FOLDER` against Hugging Face's Trainer, on one GPU, in one run.

    python -m benchmarks.fine_tuning [--quick] [--seconds 330] [--each 70] [--folder PATH] [--json PATH]
                                     [--only full lora bf16]

The Llama 3.1 8B shape, random weights, chats of log-normal lengths (median 400 tokens, sigma 1.1, at most 2,048), 16 k tokens a
step. Tokens per second count no padding; medians over steps after warm-up, or over a whole cycle of lengths where batches are
grouped by length, since their sizes differ. Memory is the most that torch has allocated.

    full     all weights, fp32 master: ours by the planner's plan; the Trainer with fp32 weights and bf16 autocast
    lora     rank 16 on all linear layers, frozen weights in bf16; the Trainer's by PEFT
    bf16     all weights; the Trainer's weights, gradients and state in bf16 without a master copy: less memory, other numerics

The Trainer runs with fused AdamW and its best of: examples flattened into one row with positions; padded batches grouped by
length; the faster of the two with compiled layers (not with `--quick`). It takes the first size of micro-batches, without
recomputation and then with it, that fits. It uses FlashAttention if that is installed, else torch's attention. Each measurement
is a process of its own, with at most `--each` seconds; every figure is printed as soon as it is known.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import itertools
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Row, finish, lower_is_better, parser_of, show
from benchmarks.hugging_face import GIB, SHAPE, SMALL, Budget, Run, log, part, result, sized, tell, write_chats

KINDS = ("full", "lora", "bf16")
SEQ_LEN, WINDOWS, CHATS, MEDIAN = 2048, 8, 512, 400.0
RANK, LR = 16, 1e-5
WARM, MEASURED = 3, 8
GOAL = 1.5
LADDER: dict[str, list[tuple[int, bool]]] = {
    "full": [(8, True), (4, True), (2, True), (1, True)],
    "bf16": [(8, False), (4, False), (8, True), (4, True)],
    "lora": [(8, False), (4, False), (8, True), (4, True)],
}
"""Of the Trainer: examples in a micro-batch, and whether activations are recomputed; the first that fits is taken. With 16 bytes
a parameter for weights, gradients and state, 8 B parameters leave about 20 GiB on an H200: too few without recomputation."""


def main() -> None:
    args = arguments()
    if args.part:
        PARTS[args.part](args)
        return
    budget, rows = Budget(args.seconds), []
    with tempfile.TemporaryDirectory(dir=args.folder.parent if args.folder else None) as made:
        args.work = Path(made)
        args.folder = args.folder or args.work / "model"
        try:
            prepare(args, budget)
        except Exception as e:
            log(f"the folder: FAILED: {type(e).__name__}: {e}")
        mine: dict[str, dict[str, float]] = {}
        for kind in args.only:
            try:
                for row in compare(kind, args, budget, mine):
                    rows.append(row)
                    log(
                        f"  {row.case}, {row.metric}: {row.ours:.5g}, {row.peer} {row.theirs:.5g}, ratio {row.ratio:.3f}"
                    )
                    finish("fine_tuning", rows, args.json)
            except Exception as e:
                log(f"{kind}: FAILED: {type(e).__name__}: {e}")
    show("\nfine-tuning", rows)
    finish("fine_tuning", rows, args.json)


def arguments() -> argparse.Namespace:
    parser = parser_of("Fine-tuning on packed chats, ours and the Trainer's", KINDS)
    parser.add_argument("--seconds", type=float, default=330.0, help="for everything; what does not fit is left out")
    parser.add_argument("--each", type=float, default=70.0, help="seconds of one measurement, at most")
    parser.add_argument("--folder", type=Path, help="where the folder is written, and kept; one that is there is used")
    for name in ("--part", "--kind"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
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


def compare(kind: str, args: argparse.Namespace, budget: Budget, mine: dict[str, dict[str, float]]) -> Iterator[Row]:
    """Ours, unless it was measured before, and the Trainer."""
    same = "lora" if kind == "lora" else "full"
    if same not in mine:
        budget.check(f"ours, {same}")
        mine[same] = ours(same, args, min(args.each, budget.left))
    budget.check(f"the Trainer, {kind}")
    found = part("peer", args, min(args.each, budget.left), "--kind", kind, module="benchmarks.fine_tuning")
    if not found:
        raise RuntimeError("the Trainer measured nothing in its time")
    name, best = max(found.items(), key=lambda item: item[1]["rate"])
    us = mine[same]
    case = f"{kind}, {sized(args.shape)}"
    peer = f"Trainer, {name}"
    yield Row(case, peer, "tokens/s", us["rate"], best["rate"], us["rate"] / best["rate"])
    yield lower_is_better(case, peer, "GiB at the peak", us["peak"] / GIB, best["peak"] / GIB)
    speed = "met" if us["rate"] >= GOAL * best["rate"] else "MISSED"
    memory = "met" if us["peak"] <= best["peak"] else "MISSED"
    log(f"goal of {GOAL} times the tokens per second {speed}, goal of no more memory {memory} ({kind})")


def ours(kind: str, args: argparse.Namespace, seconds: float) -> dict[str, float]:
    """`fourfold train` by the planner's plan; it is killed after the steps that are measured."""
    words = [str(args.folder), "--data.source", str(args.work / "chats.jsonl"), "--model.seq-len", str(args.seq_len)]
    words += ["--train.global-batch", str(args.windows), "--train.steps", "500"]
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
        shutil.rmtree(run.run, ignore_errors=True)
    log(f"ours, {kind}: {rate:,.0f} tokens/s ({len(taken)} steps), {peak / GIB:.2f} GiB at the peak")
    return {"rate": rate, "peak": float(peak)}


# ---- the Trainer ----


def peer_part(args: argparse.Namespace) -> None:
    """The Trainer's ways to run, one after another; a result for each."""
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
    found: dict[str, dict[str, float]] = {}
    rungs: dict[str, int] = {}
    ladder = LADDER[args.kind]
    for way in ("flattened", "padded, grouped by length", "compiled layers"):
        if found and time.perf_counter() > last - 8:
            break
        base = way
        if way == "compiled layers":
            if args.quick or not found:
                break
            base = max(found, key=lambda name: found[name]["rate"])
            compile_layers(model)
        rung = rungs.get(base, 0)
        name = base if base == way else f"{base}, {way}"
        got = None
        while got is None and rung < len(ladder) and time.perf_counter() < last:
            micro, recompute = min(ladder[rung][0], together), ladder[rung][1]
            try:
                got = train(model, examples, micro, together // micro, recompute, name, last, args)
            except Exception as e:  # another size or way may still work
                why = (
                    "out of memory" if isinstance(e, torch.OutOfMemoryError) else f"{type(e).__name__}: {str(e)[:300]}"
                )
                tell(f"Trainer, {name}: {micro} examples{' with recomputation' * recompute}: {why}")
                rung += 1
            clean(model)
        if got is None:
            continue
        found[name], rungs[base] = got, rung
        how = f"{micro} x {together // micro} chats{', recomputed' * recompute}"
        tell(
            f"Trainer, {args.kind}, {name}, {how}: {got['rate']:,.0f} tokens/s, {got['peak'] / GIB:.2f} GiB at the peak"
        )
        result(**{f"{name}, {how}": got})


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


PARTS = {"peer": peer_part}


if __name__ == "__main__":
    main()
