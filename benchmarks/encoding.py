"""Encoding of training data: one token file for all ranks, against `datasets.map` with as many workers.

    python -m benchmarks.encoding [--quick] [--megabytes 60] [--workers N]

Both read the same JSONL file and use the same tokenizer.json: byte-level BPE with 16,000 tokens, trained on the text. `text` is
one text per line; `chats` are rendered by a template without `{% generation %}`, where ours also finds which tokens the assistant
wrote (a second rendering and offsets of characters), which the peer does not. The peer is batched, with its cache off; reading
the JSON file into Arrow counts, as it does for ours. Needs `datasets` and `transformers`.
"""

from __future__ import annotations

import importlib.util
import json
import random
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Row, finish, parser_of, show
from fourfold.data.encode import Encoding, encode_to_file, source_files

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    parser = parser_of(__doc__ or "", ("text", "chats"))
    parser.add_argument("--megabytes", type=float, default=60, help="size of each file")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    missing = [name for name in ("datasets", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"compares with datasets.map, and needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    size = int(1e6 * (2 if args.quick else args.megabytes))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        lines = [line for p in source_files("stdlib") for line in p.read_text(errors="ignore").splitlines() if line]
        tokenizer = make_tokenizer(Path(folder), lines)
        for kind in args.only:
            source = make_file(Path(folder) / f"{kind}.jsonl", kind, lines, size)
            ours, theirs = [], []
            for _ in range(1 if args.quick else args.rounds):
                ours.append(seconds(our_encoding, source, tokenizer, args.workers))
                theirs.append(seconds(their_encoding, source, tokenizer, args.workers))
            megabytes = source.stat().st_size / 1e6
            case = f"{kind}, {megabytes:.0f} MB, {args.workers} workers"
            for i, metric in enumerate(("MB/s", "MB per second of a core")):
                mine, peer = ([megabytes / took[i] for took in times] for times in (ours, theirs))
                rates, spread = (statistics.median(mine), statistics.median(peer)), (max(mine) - min(mine)) / max(mine)
                rows.append(Row(case, "datasets.map", metric, *rates, rates[0] / rates[1], spread))
    show("Encoding", rows)
    finish("encoding", rows, args.json)


def seconds(function: Any, *args: Any) -> tuple[float, float]:
    """Seconds by the clock, and of all processes' cores, which a busy machine changes less."""
    begin, used = time.perf_counter(), core_seconds()
    function(*args)
    return time.perf_counter() - begin, core_seconds() - used


def core_seconds() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def make_tokenizer(folder: Path, lines: list[str]) -> Path:
    import tokenizers

    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=16_000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(lines[:40_000], trainer)
    library.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def make_file(path: Path, kind: str, lines: list[str], size: int) -> Path:
    """Texts and answers of log-normal lengths, with a median of 1,200 characters."""
    r, written = random.Random(0), 0
    with path.open("w") as f:
        while written < size:
            at, count = r.randrange(len(lines)), max(1, int(r.lognormvariate(3.4, 0.9)))
            text = "\n".join(lines[at : at + count])
            item: dict[str, Any] = {"text": text}
            if kind == "chats":
                turns = [("system", "You write Python."), ("user", lines[at - 1]), ("assistant", text)]
                turns += [("user", lines[at - 2]), ("assistant", lines[at - 3])] if r.random() < 0.5 else []
                item = {"messages": [{"role": role, "content": content} for role, content in turns]}
            written += f.write(json.dumps(item) + "\n")
    return path


def our_encoding(source: Path, tokenizer: Path, workers: int) -> None:
    out = source.with_suffix(".tokens")
    encode_to_file((str(source),), Encoding(tokenizer=str(tokenizer)), out, workers=workers)
    out.unlink()


def their_encoding(source: Path, tokenizer: Path, workers: int) -> None:
    import datasets
    import transformers

    datasets.disable_progress_bars()
    datasets.disable_caching()
    codec = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer.parent)
    with tempfile.TemporaryDirectory() as cache:
        data = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=cache)

        def encode(batch: dict[str, Any]) -> dict[str, Any]:
            if "text" in batch:
                return {"input_ids": codec(batch["text"])["input_ids"]}
            return {
                "input_ids": codec.apply_chat_template(batch["messages"], tokenize=True, return_dict=True)["input_ids"]
            }

        done = data.map(encode, batched=True, num_proc=workers, remove_columns=data.column_names)
        assert len(done) == len(data)


if __name__ == "__main__":
    main()
