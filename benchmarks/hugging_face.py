"""From a Hugging Face folder to a Hugging Face folder, on one GPU, from the command line.

    python -m benchmarks.hugging_face [--quick] [--seconds 200] [--folder PATH] [--json PATH] [--only open final chain same]

A folder of the Llama 3.1 8B shape with random bf16 weights is written by `transformers`. Then

    open     its files are read by as many plain readers as `fourfold train` uses, out of the page cache, and again by
             `fourfold train FOLDER --data chats.jsonl`, which makes 30 steps of full fine-tuning by the planner's own plan; the
             last checkpoint has weights only (with all state it would have 90 GiB) and is in memory (/dev/shm) if that has room
    final    transformers opens the final/ of that run, and its fp32 logits are compared with ours
    chain    the same for a few of the layers, for small disks
    same     folder in, folder out without a step: every tensor by SHA-256, and the fp32 logits of transformers and ours

Every figure is printed as soon as it is known; a part that fails, or for which no time is left, is reported, and the next
begins. Everything that uses the GPU is a process of its own. Needs 20 GiB of disk, where TMPDIR or `--folder` is, and 50 GiB
there or in memory; `--quick` is a small shape on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fourfold
from benchmarks.common import Row, finish, lower_is_better, parser_of, show

GIB = 1 << 30
SHAPE: dict[str, Any] = {
    **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
    **{"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 2},
    "rope_parameters": {
        **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8192,
    },
}
SMALL = SHAPE | {
    **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
STEPS, CHAIN_LAYERS, CHAIN_STEPS = 30, 4, 10
LONGEST = 510
"""Tokens of the longest chat: a short sequence length, so that 30 steps take less than a minute."""
SLOWER = 1.5
"""Goal: opening a folder takes at most this many times as long as reading its files."""
TOLERANCE = 1e-4
"""Of fp32 logits, as a share of the largest."""
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"
BEGAN = time.perf_counter()


def main() -> None:
    args = arguments()
    if args.part:
        PARTS[args.part](args)
        return
    budget = Budget(args.seconds)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=args.folder.parent if args.folder else None) as made:
        args.work = Path(made)
        args.folder = args.folder or args.work / "model"
        for name in ("write", *args.only):
            try:
                budget.check(name)
                for row in SECTIONS[name](args, budget):
                    rows.append(row)
                    log(
                        f"  {row.case}, {row.metric}: {row.ours:.5g}, {row.peer} {row.theirs:.5g}, ratio {row.ratio:.4f}"
                    )
                    finish("hugging_face", rows, args.json)
            except Exception as e:
                log(f"{name}: FAILED: {type(e).__name__}: {e}")
    show("\nHugging Face folders", rows)
    finish("hugging_face", rows, args.json)


def arguments() -> argparse.Namespace:
    parser = parser_of("A Hugging Face folder in and out, on one GPU", ("open", "final", "chain", "same"))
    parser.add_argument("--seconds", type=float, default=200.0, help="for everything; what does not fit is left out")
    parser.add_argument("--folder", type=Path, help="where the folder is written, and kept; one that is there is used")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    for name in ("--work", "--model"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.shape = SMALL if args.quick else SHAPE
    return args


class Budget:
    """The seconds that are left."""

    def __init__(self, seconds: float):
        self.end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        return self.end - time.perf_counter()

    def check(self, name: str) -> None:
        if self.left < 10:
            raise TimeoutError(f"left out: {self.left:.0f} s are left ({name})")


def log(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f} s] {text}", flush=True)


def sized(shape: dict[str, Any], layers: int = 0) -> str:
    return f"{parameters(shape, layers) / 1e9:.3g} B parameters"


def parameters(shape: dict[str, Any], layers: int = 0) -> int:
    """Parameters of the shape, or of as many of its layers."""
    h, ffn = shape["hidden_size"], shape["intermediate_size"]
    kv = h * shape["num_key_value_heads"] // shape["num_attention_heads"]
    layer = 2 * h * h + 2 * h * kv + 3 * h * ffn + 2 * h
    return (layers or shape["num_hidden_layers"]) * layer + 2 * shape["vocab_size"] * h + h


# ---- processes ----


def environment(quick: bool) -> dict[str, str]:
    """Of our processes: this tree, no network, wide lines; `quick`: one thread, since cores may be busy."""
    paths = [str(Path(fourfold.__file__).parents[1]), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    wanted = {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "HF_HUB_OFFLINE": "1", "COLUMNS": "150"}
    wanted["PYTORCH_CUDA_ALLOC_CONF"] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    wanted |= {"OMP_NUM_THREADS": "1"} if quick else {}
    return {**os.environ, **wanted, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}


def part(
    name: str, args: argparse.Namespace, seconds: float, *more: str, module: str = "benchmarks.hugging_face"
) -> dict[str, Any]:
    """Run a part in a process of its own: its last result, a line of JSON; other lines are passed on."""
    command = [sys.executable, "-m", module, "--part", name, "--folder", str(args.folder), "--work", str(args.work)]
    command += ["--seconds", str(seconds), *(["--quick"] if args.quick else []), *more]
    found: dict[str, Any] = {}
    tail: list[str] = []
    child = subprocess.Popen(
        command,
        env=environment(args.quick),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    timer = threading.Timer(seconds, end, [child])
    timer.start()
    try:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith('{"result"'):
                found |= json.loads(line)["result"]
            elif line.startswith("|"):
                log(line[1:].rstrip())
            else:
                tail = [*tail[-14:], line.rstrip()]
        code = child.wait()
    finally:
        timer.cancel()
        timer.join()
        end(child)
    if code and not found:
        raise RuntimeError(f"part {name} ended with {code}:\n" + "\n".join(tail))
    if code:
        log(f"part {name} ended early with {code}: {' / '.join(tail[-2:])[-300:]}")
    return found


def end(child: subprocess.Popen[str]) -> None:
    """Kill a process of ours, and those that it has started (they are its process group)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def tell(text: str) -> None:
    """A line for the console, from a part."""
    print(f"|{text}", flush=True)


def result(**values: Any) -> None:
    """What a part has found."""
    print(json.dumps({"result": values}), flush=True)


class Run:
    """`fourfold train` in a process of its own, followed through its metrics.jsonl."""

    def __init__(self, words: Sequence[str], run: Path, quick: bool):
        self.run, self.seconds, self.quick = run, 0.0, quick
        self.steps: list[dict[str, Any]] = []
        shutil.rmtree(run, ignore_errors=True)
        command = [sys.executable, "-m", "fourfold", "train", *words, "--train.run-dir", str(run)]
        command += ["--train.device", "cpu"] if quick else []
        self.output = run.with_suffix(".log")
        self.words = command

    def go(self, steps: int, seconds: float, *, finish: bool) -> None:
        """Until `steps` are reported, and kill it before it has saved; with `finish`, until it ends. Raises if it fails."""
        log(" ".join(["fourfold", *self.words[3:]]))
        begun, shown = time.perf_counter(), 0
        with self.output.open("w") as out:
            child = subprocess.Popen(
                self.words,
                env=environment(self.quick),
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                process_group=0,
            )
            try:
                while child.poll() is None and time.perf_counter() - begun < seconds:
                    self.steps = read_lines(self.run / "metrics.jsonl")
                    for m in self.steps[shown:]:
                        if m["step"] <= 3 or m["step"] % 10 == 0:
                            log(
                                f"  step {m['step']}: loss {m['loss']:.4f}, {m['seconds']:.3f} s, "
                                f"{m['tokens_per_second']:,.0f} tokens/s, {m['peak_bytes'] / GIB:.2f} GiB"
                            )
                    shown = len(self.steps)
                    if shown >= steps and not finish:
                        break
                    time.sleep(0.02)
                code = child.poll()
            finally:
                end(child)
        self.steps, self.seconds = read_lines(self.run / "metrics.jsonl"), time.perf_counter() - begun
        for line in self.lines("model", "data", "plan", "predicted", "attention", "weights", "done", "units are not"):
            log(f"  | {line}")
        text = self.output.read_text(errors="replace")
        if code or (finish and code is None):
            raise RuntimeError(f"exit code {code} after {self.seconds:.0f} s, {len(self.steps)} steps:\n{text[-2500:]}")
        if not self.steps:
            raise RuntimeError(f"no step after {self.seconds:.0f} s:\n{text[-2500:]}")

    def lines(self, *names: str) -> list[str]:
        """Lines of its output that begin with a name."""
        return [
            line.rstrip() for line in self.output.read_text(errors="replace").splitlines() if line.startswith(names)
        ]

    def weights(self) -> tuple[int, float]:
        """Bytes and seconds of reading weights."""
        found = json.loads((self.run / "env.json").read_text())["weights"]
        return sum(each["bytes"] for each in found), max(each["seconds"] for each in found)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The steps in a metrics.jsonl that may be growing."""
    if not path.is_file():
        return []
    lines = path.read_text(errors="replace").split("\n")[:-1]
    return [m for m in map(json.loads, lines) if "loss" in m and m["loss"] is not None]


# ---- the folder and its chats ----


def write(args: argparse.Namespace, budget: Budget) -> Iterator[Row]:
    """The folder, unless it is there; and the chats."""
    write_chats(args.work / "chats.jsonl", 400 if not args.quick else 40, LONGEST if not args.quick else 60, median=300)
    if args.folder.is_dir():
        log(f"{args.folder} is there")
    free, need = shutil.disk_usage(args.work).free, 2 * parameters(args.shape)
    log(f"{sized(args.shape)}, {need / GIB:.1f} GiB; {free / GIB:.0f} GiB of disk are free")
    part("write", args, budget.left, *(["--model", str(args.work / "chain-model")] if "chain" in args.only else []))
    yield from ()


def write_part(args: argparse.Namespace) -> None:
    """The folder, unless it is there, and a smaller `--model`; by `transformers`, on the GPU if there is one."""
    begun = time.perf_counter()
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tell(f"torch {torch.__version__}, transformers {transformers.__version__} imported in {since(begun)}")
    layers = CHAIN_LAYERS if not args.quick else 2
    for folder, count in ((args.folder, args.shape["num_hidden_layers"]), (args.model, layers)):
        if folder is None or folder.is_dir():
            continue
        begun = time.perf_counter()
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**args.shape | {"num_hidden_layers": count})
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        made = since(begun)
        begun = time.perf_counter()
        model.save_pretrained(folder, max_shard_size="5GB")
        write_tokenizer(folder)
        size = 0
        for file in folder.glob("*.safetensors"):  # on the disk, so that it can be dropped from the page cache
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            size += os.fstat(handle).st_size
            os.close(handle)
        tell(f"{count} layers: made in {made}, {size / GIB:.2f} GiB written by transformers in {since(begun)}")
        del model


def since(begun: float) -> str:
    return f"{time.perf_counter() - begun:.1f} s"


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer and a chat template."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_end|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(special),
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator(["hello world"], trainer)
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_chats(path: Path, count: int, longest: int, *, median: float, spread: float = 1.1, seed: int = 0) -> None:
    """Chats of one question and one answer, of log-normal lengths, at most `longest` tokens of the byte-level tokenizer."""
    rng = random.Random(seed)
    words = [
        "time",
        "light",
        "river",
        "stone",
        "gives",
        "under",
        "seven",
        "garden",
        "moves",
        "a",
        "the",
        "of",
        "and",
        "to",
    ]

    def text(length: int) -> str:
        made = ""
        while len(made) < length:
            made += rng.choice(words) + " "
        return made[: max(1, length)]

    with path.open("w") as f:
        for _ in range(count):
            length = min(longest, int(median * math.exp(rng.gauss(0, spread)))) - 45  # names of roles, ends of turns
            length = max(8, length)
            asked = max(4, length // 4)
            turns = [{"role": "user", "content": text(asked)}, {"role": "assistant", "content": text(length - asked)}]
            f.write(json.dumps({"messages": turns}) + "\n")


# ---- open: plain reads, and `fourfold train` ----


def open_(args: argparse.Namespace, budget: Budget) -> Iterator[Row]:
    files = sorted(args.folder.glob("*.safetensors"))
    how = drop(files)
    size = sum(file.stat().st_size for file in files)
    plain = read_plainly(files)
    log(f"plain reads: {size / GIB:.2f} GiB in {plain:.2f} s, {size / plain / 1e9:.2f} GB/s, {how}")
    how = drop(files)
    words = [str(args.folder), "--data.source", str(args.work / "chats.jsonl"), "--checkpoint.last", "weights"]
    run = Run([*words, *steps_of(args, STEPS)], full_run(args), args.quick)
    try:
        run.go(STEPS if not args.quick else 6, budget.left - 5, finish=True)
        log(f"  from the command to its end: {run.seconds:.1f} s")
    finally:
        found, seconds = run.weights()
        log(f"fourfold train: {found / GIB:.2f} GiB in {seconds:.2f} s, {found / seconds / 1e9:.2f} GB/s, {how}")
        case = f"{sized(args.shape)}, one GPU"
        yield lower_is_better(f"{case}: open the folder", "plain reads", "s", seconds, plain)
        met = "met" if seconds <= SLOWER * plain else "MISSED"
        log(f"goal {met}: {seconds / plain:.2f} times as long as plain reads; at most {SLOWER}")
        yield from speed(f"{case}, full", run)
        shutil.rmtree(run.run / "checkpoints", ignore_errors=True)


def full_run(args: argparse.Namespace) -> Path:
    """The directory of the run of the whole model: in memory if that has room for checkpoint and final/, 6 bytes a parameter."""
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > 7 * parameters(args.shape):
        return memory / f"{args.work.name}-full"
    return Path(args.work) / "full"


def final(args: argparse.Namespace, budget: Budget) -> Iterator[Row]:
    """The final/ of the run of `open`, in transformers and in ours."""
    run = full_run(args)
    try:
        found = part("compare", args, budget.left, "--model", str(run / "final"))
        yield from compared(f"{sized(args.shape)}, trained: logits of final/", found)
    finally:
        shutil.rmtree(run, ignore_errors=True)


def steps_of(args: argparse.Namespace, steps: int) -> list[str]:
    return ["--train.steps", str(steps)] if not args.quick else ["--train.steps", "6", "--optim.lr", "0.01"]


def speed(case: str, run: Run) -> Iterator[Row]:
    """Loss of the first and the last step; what was predicted."""
    first, last = run.steps[0], run.steps[-1]
    fell = "falls" if last["loss"] < first["loss"] else "DOES NOT FALL"
    log(f"loss {fell}: {first['loss']:.4f} at step {first['step']}, {last['loss']:.4f} at step {last['step']}")
    yield lower_is_better(case, "first step", f"loss at step {last['step']}", last["loss"], first["loss"])
    steady = sorted(m["seconds"] for m in run.steps[3:])
    predicted = json.loads((run.run / "plan.json").read_text()).get("predicted") or {}
    if steady and predicted.get("seconds"):
        yield lower_is_better(case, "predicted", "s a step", steady[len(steady) // 2], predicted["seconds"])
        peak = max(m["peak_bytes"] for m in run.steps)
        yield lower_is_better(case, "predicted", "GiB at the peak", peak / GIB, predicted["peak_bytes"] / GIB)


def drop(files: Sequence[Path]) -> str:
    """Drop files from the page cache, and all else only if that does not work; says what is left."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    left, how = in_cache(files), "by advice"
    if left is None or left > 0.05:
        try:
            Path("/proc/sys/vm/drop_caches").write_text("1\n")
            left, how = in_cache(files), "by drop_caches"
        except OSError as e:
            how = f"by advice alone; drop_caches: {e.strerror}"
    return f"page cache dropped {how}, {'unknown' if left is None else format(left, '.0%')} of the files is left in it"


def in_cache(files: Sequence[Path]) -> float | None:
    """The share of files that is in the page cache, of 16 places in each; None: this file system does not say."""
    found = []
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            for k in range(16):
                try:
                    os.preadv(handle, [bytearray(1)], file.stat().st_size * k // 16, os.RWF_NOWAIT)
                    found.append(True)
                except BlockingIOError:
                    found.append(False)
        except OSError:
            return None
        finally:
            os.close(handle)
    return sum(found) / max(1, len(found))


def read_plainly(files: Sequence[Path]) -> float:
    """Seconds of reading files with as many readers as `fourfold train` has, in pieces of the same size."""
    from fourfold.checkpoint.weights import CHUNK, THREADS

    handles = [os.open(file, os.O_RDONLY) for file in files]
    pieces = [(h, at) for h, file in zip(handles, files, strict=True) for at in range(0, file.stat().st_size, CHUNK)]
    mine = threading.local()

    def read(piece: tuple[int, int]) -> int:
        if not hasattr(mine, "buffer"):
            mine.buffer = bytearray(CHUNK)
        return os.preadv(piece[0], [mine.buffer], piece[1])

    begun = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        found = sum(pool.map(read, pieces))
    seconds = time.perf_counter() - begun
    for handle in handles:
        os.close(handle)
    assert found == sum(file.stat().st_size for file in files), found
    return seconds


# ---- chain: to the end of a run ----


def chain(args: argparse.Namespace, budget: Budget) -> Iterator[Row]:
    """A run to its end, and its final/ in transformers."""
    folder, run = args.work / "chain-model", args.work / "chain"
    layers = CHAIN_LAYERS if not args.quick else 2
    free, need = shutil.disk_usage(args.work).free, 14 * parameters(args.shape, layers)
    log(
        f"{layers} layers, {sized(args.shape, layers)}; needs {need / GIB:.1f} GiB of disk, {free / GIB:.0f} GiB are free"
    )
    steps = ["--optim.lr", "1e-4", "--train.steps", str(CHAIN_STEPS)] if not args.quick else steps_of(args, 6)
    job = Run([str(folder), "--data.source", str(args.work / "chats.jsonl"), *steps], run, args.quick)
    job.go(CHAIN_STEPS, budget.left - 5, finish=True)
    log(f"  from the command to its end: {job.seconds:.1f} s")
    case = f"{sized(args.shape, layers)}, to the end"
    yield from speed(case, job)
    shutil.rmtree(run / "checkpoints")
    changed = (run / "final" / "config.json").is_file() and digests(run / "final") != digests(folder)
    log(f"final/ is there, and differs from the folder: {changed}")
    yield from compared(f"{case}: logits of final/", part("compare", args, budget.left, "--model", str(run / "final")))
    shutil.rmtree(run)


def compared(case: str, found: dict[str, Any]) -> Iterator[Row]:
    if found:
        yield lower_is_better(case, "goal", "largest difference, share", max(found["difference"], 1e-12), TOLERANCE)


def compare_part(args: argparse.Namespace) -> None:
    """A folder in transformers and in ours: fp32 logits of fixed tokens."""
    compare(args.model, args.shape)


def compare(folder: Path, shape: dict[str, Any]) -> None:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randint(0, shape["vocab_size"], (2, 128), generator=torch.Generator().manual_seed(3)).to(device)
    with torch.no_grad():
        begun = time.perf_counter()
        model = opened(folder, torch.float32, device)
        ours = model(x).float()
        tell(f"opened by ours in {since(begun)}")
        del model
        begun = time.perf_counter()
        place = {"device_map": device} if device == "cuda" else {}
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, **place
        )
        other, info = loaded
        theirs = other.eval()(x).logits.float()
        tell(f"opened by transformers in {since(begun)}")
    wrong = {key: list(value)[:3] for key, value in info.items() if value}
    if wrong:
        raise RuntimeError(f"transformers: {wrong}")
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    said = "equal" if difference < TOLERANCE else "DIFFER"
    tell(
        f"logits {said}: fp32 on {device}, largest difference {difference:.2e} of the largest; allowed {TOLERANCE:.0e}"
    )
    result(difference=difference)


def opened(folder: Path, dtype: Any, device: str) -> Any:
    """Our serial model of a folder."""
    import torch

    from fourfold.checkpoint.save_load import holding_of
    from fourfold.checkpoint.weights import check_weights, fill
    from fourfold.config import ModelConfig
    from fourfold.model.build import build_model, materialize_buffers

    m = ModelConfig(hf=str(folder), seq_len=128, dropout=0.0).resolve()
    model = build_model(m).to(dtype).to_empty(device=device)
    model.tie()
    materialize_buffers(model, torch.device(device), dtype)
    fill(check_weights(m), m, [holding_of(n, p) for n, p in model.named_parameters()])
    return model.eval()


# ---- same: in and out without a step ----


def same(args: argparse.Namespace, budget: Budget) -> Iterator[Row]:
    """Every tensor by hash, then logits of what was written."""
    out = args.work / "same"
    for old in ("chain-model", "chain"):
        shutil.rmtree(args.work / old, ignore_errors=True)
    found = part("same", args, budget.left)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    begun = time.perf_counter()
    before, after = digests(args.folder), digests(out / "final")
    equal = sum(after.get(name) == digest for name, digest in before.items())
    other = sorted(before.keys() ^ after.keys())
    said = "all equal" if equal == len(before) and not other else f"DIFFER: {other[:3]}"
    log(f"{equal} of {len(before)} tensors out as they went in, by SHA-256: {said} ({since(begun)})")
    case = sized(args.shape)
    yield Row(f"{case}: in and out", "in the folder", "equal tensors", equal, len(before), equal / len(before))
    log(f"in {found['open']:.1f} s, checkpoint {found['save']:.1f} s, final/ {found['final']:.1f} s")
    yield from compared(f"{case}: logits of final/", part("compare", args, budget.left, "--model", str(out / "final")))


def same_part(args: argparse.Namespace) -> None:
    """What a run of no step would write: a checkpoint of the weights as they are, and final/ of it."""
    import torch

    from fourfold.checkpoint.export import write_final
    from fourfold.checkpoint.hf_files import keep_files
    from fourfold.checkpoint.save_load import Checkpointer, holding_of
    from fourfold.checkpoint.weights import check_weights, stored_types
    from fourfold.commands.finetune import folder_config
    from fourfold.config import ModelConfig
    from fourfold.plan import Plan
    from fourfold.train.rundir import RunDir

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.zeros(1, device=device)
    begun = time.perf_counter()
    model = opened(args.folder, torch.bfloat16, device)
    took = {"open": time.perf_counter() - begun}
    m = ModelConfig(hf=str(args.folder), seq_len=128, dropout=0.0).resolve()
    config = dataclasses.replace(folder_config(str(args.folder)), model=m)
    run = RunDir.create(args.work / "same", config, Plan())
    run.unlock()
    keep_files(config, run.path / "hf", stored_types(check_weights(m)))
    begun = time.perf_counter()
    holdings = [holding_of(n, p) for n, p in model.named_parameters()]
    Checkpointer(run.checkpoints).save(1, holdings, {"step": 1})
    took["save"] = time.perf_counter() - begun
    del model, holdings
    begun = time.perf_counter()
    write_final(run, config)
    took["final"] = time.perf_counter() - begun
    result(**took)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every tensor in a folder, with its type and shape."""

    def of_file(file: Path) -> dict[str, str]:
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(length))
            found = {}
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                begin, stop = entry["data_offsets"]
                made = hashlib.sha256(f"{entry['dtype']} {entry['shape']}".encode())
                f.seek(8 + length + begin)
                while begin < stop:
                    data = f.read(min(16 << 20, stop - begin))
                    made.update(data)
                    begin += len(data)
                found[name] = made.hexdigest()
        return found

    with ThreadPoolExecutor(8) as pool:
        return {n: d for found in pool.map(of_file, sorted(folder.glob("*.safetensors"))) for n, d in found.items()}


PARTS = {"write": write_part, "compare": compare_part, "same": same_part}
SECTIONS = {"write": write, "open": open_, "final": final, "chain": chain, "same": same}


if __name__ == "__main__":
    main()
