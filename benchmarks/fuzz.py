"""Fuzzing of every reader: damaged and hostile files give our own error types, within 5 s and 1 GB a case.

    python -m benchmarks.fuzz [--count 20000] [--seed 0] [--reader NAME …] [--list]

A reader is what a command does with a file: read it, check it, use it (resolve a config, lay out a plan, validate a schedule,
open a checkpoint). Each case is a valid file that was changed at one to eight places: bits flipped, bytes removed, repeated or
inserted, numbers and words replaced by extreme ones, and, of JSON, values of another kind, missing and doubled keys. A case is
bad when it raises anything but a `FourfoldError`, takes more than 5 s of processor time, or 1 GB of memory. Case `i` of a reader
depends on (seed, reader, i) alone: a bad one is printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fourfold.errors import FourfoldError
from fourfold.view.text import printable

__all__ = ["READERS", "Outcome", "Reader", "fuzz", "mutate"]

SECONDS, MEMORY = 5.0, 2**30

WORDS = (
    *b"""0 -1 1 3000000000 9999999999 1e12 1e42 1e308 1e400 -0.0 NaN nan Infinity -inf 0x7fffffffffffffff 18446744073709551616 2.5
    true null [] {} [[]] "" "\\u0000" "\\ud800" [red] ../../x /etc/passwd , ; : = " ' # !!python/object:x % 99999999F0 0F99999999
    OVERLAP_F_B blocks.* * 1GiB 99999999999999TiB wave zb-v synthesized message-driven zero3 x.json yarn llama3""".split(),
    *(
        b"1" * 30,
        b"1" * 400,
        b"9" * 5000,
        b"[" * 3000,
        b"{" * 3000,
        b'{"a":' * 500,
        b"(" * 200,
        b"a." * 500,
        b"&a *a",
        b"<<: *a",
    ),
    *(
        b"\x00",
        b"\xff\xfe",
        b"\x1b[2J\x1b]52;c;aGk=\x07",
        b"\n",
        b"\r\n",
        b"\t",
        b" ",
        "\u202e".encode(),
        "\u2028".encode(),
    ),
)
VALUES: list[Any] = json.loads(
    """[null, true, false, 0, 1, -1, 2, 3, 7, 2147483648, 9007199254740992, 9223372036854775808, 1000000000000,
    1000000000000000000000000000000000000000000, 1.5, -0.5, 1e-300, 1e300, "", "x", "a b", "\\u0000", "\\u001b[2J", "../x",
    "[red]x[/]", "1", "\u00e4", [], {}, [[]], [1], ["x"], {"a": 1}, [null], [[1, 2], [3]]]"""
)
VALUES += [list(range(50)), "x" * 2000]


@dataclass(frozen=True)
class Reader:
    """How one kind of file is read. `use(data)` does what a command does; `seeds` are valid files."""

    seeds: list[bytes]
    use: Callable[[bytes], object]


# ---- mutation ----


def mutate(chance: random.Random, seeds: list[bytes]) -> bytes:
    """A seed, changed at a few places."""
    data = bytearray(chance.choice(seeds))
    if chance.random() < 0.5 and (changed := _mutate_json(chance, bytes(data))) is not None:
        data = bytearray(changed)
        if chance.random() < 0.7:
            return bytes(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        _mutate_bytes(chance, data)
    return bytes(data)


def _mutate_bytes(chance: random.Random, data: bytearray) -> None:
    at = chance.randrange(len(data) + 1)
    kind = chance.randrange(8)
    if kind == 0 and data:
        data[min(at, len(data) - 1)] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del data[at : at + chance.choice((1, 1, 2, 4, 16, 256))]
    elif kind == 2:
        data[at:at] = chance.choice(WORDS)
    elif kind == 3:
        data[at:at] = data[at : at + chance.choice((1, 4, 32, 200))] * chance.choice((1, 2, 20))
    elif kind == 4:
        del data[at:]
    elif kind == 5:
        data[at : at + 1] = bytes([chance.randrange(256)])
    else:  # a number or word becomes another one
        stop = start = at
        while start and (data[start - 1 : start].isalnum() or data[start - 1] in b"._-"):
            start -= 1
        while stop < len(data) and (data[stop : stop + 1].isalnum() or data[stop] in b"._-"):
            stop += 1
        data[start:stop] = chance.choice(WORDS)


def _mutate_json(chance: random.Random, data: bytes) -> bytes | None:
    """One value of one JSON line replaced, removed, moved or doubled; None where there is no JSON."""
    lines = data.split(b"\n") if data.count(b"\n{") else [data]
    number = chance.randrange(len(lines))
    try:
        tree = json.loads(lines[number])
    except (ValueError, RecursionError):
        return None
    for _ in range(chance.choice((1, 1, 2, 4))):
        places = list(_places(tree))
        if not places:
            return None
        holder, key = chance.choice(places)
        kind = chance.randrange(6)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[chance.choice((*holder, "x", "", "\x1b[31m", "\x00"))] = copy.deepcopy(chance.choice(VALUES))
        elif kind == 2 and isinstance(holder, list):
            holder[key:key] = [holder[key]] * chance.choice((1, 2, 30))
        elif kind == 3 and isinstance(holder[key], int | float):
            holder[key] = chance.choice((-holder[key], holder[key] * 10, holder[key] + 1, holder[key] - 1, 2**40))
        else:
            other, at = chance.choice(places)
            with contextlib.suppress(KeyError, IndexError, TypeError):
                holder[key] = copy.deepcopy(chance.choice((chance.choice(VALUES), other[at])))
    try:
        lines[number] = json.dumps(tree).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return None
    if chance.random() < 0.05:
        lines[number] = lines[number].replace(b":", b': 1, "x":', 1)
    return b"\n".join(lines)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    stack = [tree]
    while stack:
        holder = stack.pop()
        for key, value in list(
            holder.items() if isinstance(holder, dict) else enumerate(holder) if isinstance(holder, list) else ()
        ):
            yield holder, key
            if isinstance(value, dict | list) and value is not holder:
                stack.append(value)


# ---- readers ----


def _file(folder: Path, name: str, use: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A reader of the file `name` in `folder`."""
    path = folder / name

    def run(data: bytes) -> object:
        path.write_bytes(data)
        return use(path)

    return run


SMALL = {
    "model": {"family": "llama", "layers": 4, "hidden": 64, "heads": 4, "vocab": 256, "seq_len": 32},
    "data": {"source": "stdlib", "tokenizer": "bytes"},
    "optim": {"lr": 3e-4, "warmup": 2, "decay": "cosine"},
    "train": {"steps": 20, "global_batch": 8, "seed": 0, "run_dir": "runs/x", "timeout": 20.0},
    "checkpoint": {"every": 5, "keep": 2, "keep_every": 0, "mode": "async"},
    "log": {"every": 1, "trace": 10},
}
PLANS: tuple[dict[str, Any], ...] = (
    {
        "mesh": {"pipe": 2, "data": 2, "col": 2},
        "batch": {"micro_batches": 4},
        "pipeline": {"schedule": "wave", "waves": 1, "layers": "auto"},
    },
    {
        "mesh": {"data": 4, "row": 2},
        "tensor": {"flow": "auto", "residual": "sequence", "keep": ["inputs"], "flows": {"qkv": "os"}},
        "unit": [
            {"match": "blocks.*.mlp", "mode": "zero3", "within": 2, "split": 2, "recompute": "full"},
            {"match": "*", "mode": "zero2"},
        ],
        "memory": {"optimizer": "auto", "device_state": "1GiB", "staging": "0GiB", "prefetch": 1},
        "precision": {"compute": "bf16", "reduce": "fp32"},
    },
    {
        "mesh": {"pipe": 2, "data": 2},
        "predicted": {
            "seconds": 0.5,
            "peak_bytes": 1000,
            "cluster": "x",
            "model": "m",
            "parameters": 9,
            "seq_len": 32,
            "global_batch": 8,
            "stages": [[0.1, 0.1, 0.1], [0.1, 0.2, 0.1]],
            "message": 0.01,
        },
        "certificate": {"gap": 0.0, "model": "abc"},
        "alternatives": [{"plan": "data 4", "seconds": 0.6}],
    },
    {"mesh": {"pipe": 4}, "pipeline": {"schedule": "synthesized", "slack": 1, "layers": [1, 1, 1, 1]}},
    {"mesh": {"pipe": 2}, "pipeline": {"schedule": "interleaved", "stages_per_rank": 2, "executor": "message-driven"}},
)
HF = (
    {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "intermediate_size": 172,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "bfloat16",
        "head_dim": 16,
        "attention_dropout": 0.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 256,
        "n_positions": 128,
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "activation_function": "gelu_new",
    },
    {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "intermediate_size": 172,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "layer_types": ["full_attention", "full_attention"],
        "sliding_window": None,
        "use_sliding_window": False,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6},
        "quantization_config": None,
        "rms_norm_eps": 1e-6,
    },
    {
        "model_type": "bert",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "intermediate_size": 256,
        "max_position_embeddings": 128,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
    },
)


def _json_of(*values: Any) -> list[bytes]:
    return [json.dumps(v, indent=1).encode() for v in values]


def _configs(folder: Path) -> dict[str, Callable[[], Reader]]:
    def use(path: Path) -> None:
        from fourfold.config import Config
        from fourfold.model.spec import parameter_count
        from fourfold.plan import Plan

        config = Config.load(path).resolve()
        parameter_count(config.model)
        Plan().check(config)

    def toml() -> Reader:
        from fourfold import schema

        return Reader([schema.dump_toml(SMALL).encode()], _file(folder, "config.toml", use))

    def yaml() -> Reader:
        lines = [f"{s}:\n" + "".join(f"  {k}: {json.dumps(v)}\n" for k, v in t.items()) for s, t in SMALL.items()]
        return Reader(["".join(lines).encode(), json.dumps(SMALL).encode()], _file(folder, "config.yaml", use))

    return {
        "config.toml": toml,
        "config.json": lambda: Reader(_json_of(SMALL), _file(folder, "config.json", use)),
        "config.yaml": yaml,
    }


def _plans(folder: Path) -> dict[str, Callable[[], Reader]]:
    def use(path: Path) -> None:
        from fourfold.config import Config
        from fourfold.plan import Plan

        plan = Plan.load(path)
        plan.check(Config.from_dict(SMALL).resolve())
        plan.simulate()

    def toml() -> Reader:
        from fourfold import schema

        return Reader([schema.dump_toml(p).encode() for p in PLANS], _file(folder, "plan.toml", use))

    def cluster(path: Path) -> None:
        from fourfold.cluster import Cluster

        found = Cluster.load(path)
        found.collective("all_reduce", 1e6, min(4, found.ranks))
        _ = found.fingerprint, found.usable, found.host_memory

    def clusters(ending: str) -> Reader:
        from fourfold import schema
        from fourfold.cluster import Cluster

        values = [
            Cluster.preset("h100-sxm", nodes=2).to_dict(),
            {"preset": "a100-80g", "nodes": 4, "host": {"memory": "1TiB"}},
        ]
        values.append({"preset": "local", "devices": 2})
        if ending == "json":
            return Reader(_json_of(*values), _file(folder, "cluster.json", cluster))
        return Reader([schema.dump_toml(v).encode() for v in values], _file(folder, "cluster.toml", cluster))

    def hf(path: Path) -> None:
        from fourfold.config import Config
        from fourfold.model.spec import parameter_count

        config = Config.from_dict({"model": {"hf": str(path), "seq_len": 32}, "train": {"run_dir": "x"}}).resolve()
        parameter_count(config.model)

    return {
        "plan.toml": toml,
        "plan.json": lambda: Reader(_json_of(*PLANS), _file(folder, "plan.json", use)),
        "cluster.toml": lambda: clusters("toml"),
        "cluster.json": lambda: clusters("json"),
        "hf-config.json": lambda: Reader(_json_of(*HF), _file(folder, "hf.json", hf)),
    }


def _schedules(folder: Path) -> dict[str, Callable[[], Reader]]:
    def schedules() -> list[Any]:
        from fourfold.program import build

        return [build("1f1b", 2, 3), build("wave", 2, 4, waves=1), build("zb-h1", 3, 4)]

    def schedule(path: Path) -> None:
        from fourfold.program import Schedule, simulate, validate

        found = Schedule.load(path)
        validate(found, memory_cap=100)
        simulate(found)

    def programs(path: Path) -> None:
        from fourfold.program import simulate, validate
        from fourfold.program.instructions import Programs

        found = Programs.load(path)
        validate(found)
        simulate(found)

    def lowered() -> list[Any]:
        from fourfold.program import build, lower
        from fourfold.program.instructions import ProgramUnit as Unit

        units = [(Unit("a"), Unit("b", "zero3")), (Unit("c", "zero2", "micro-batch"),)]
        return [lower(build("1f1b", 2, 2)), lower(build("gpipe", 2, 2), units=units)]

    def program_reader(ending: str) -> Reader:
        texts = [json.dumps(p.to_dict()).encode() if ending == "json" else str(p).encode() for p in lowered()]
        return Reader(texts, _file(folder, f"programs.{ending}", programs))

    return {
        "schedule.csv": lambda: Reader([s.to_csv().encode() for s in schedules()], _file(folder, "s.csv", schedule)),
        "schedule.json": lambda: Reader(
            _json_of(*(s.to_dict() for s in schedules())), _file(folder, "s.json", schedule)
        ),
        "programs.txt": lambda: program_reader("txt"),
        "programs.json": lambda: program_reader("json"),
    }


def _data(folder: Path) -> dict[str, Callable[[], Reader]]:
    def use(path: Path) -> None:
        from fourfold.data.samples import Samples, open_corpus

        corpus = open_corpus(str(path))
        samples = Samples(corpus, seq_len=24, vocab=256, seed=0)
        samples.batch([0, 1])

    def tokens() -> Reader:
        from fourfold.data.samples import write_tokens

        seeds = []
        for name, text in (
            ("a.txt", "some text to train on. " * 8),
            ("b.jsonl", '{"prompt": "how many? ", "answer": "three of them"}\n' * 5),
        ):
            (folder / name).write_text(text)
            write_tokens(str(folder / name), "bytes", folder / "seed.tokens")
            seeds.append((folder / "seed.tokens").read_bytes())
        return Reader(seeds, _file(folder, "x.tokens", use))

    def tokenizer() -> Reader:
        library = __import__("tokenizers")
        model = library.models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "</s>": 3, "Ġ": 4}, merges=[("a", "b")])
        made = library.Tokenizer(model)
        made.pre_tokenizer = library.pre_tokenizers.ByteLevel()
        made.add_special_tokens(["</s>"])
        words = library.Tokenizer(library.models.WordLevel({"a": 0, "[SEP]": 1, "[UNK]": 2}, unk_token="[UNK]"))
        words.normalizer = library.normalizers.BertNormalizer()
        words.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()

        def encode(path: Path) -> None:
            from fourfold.data.samples import load_tokenizer

            found = load_tokenizer(str(path))
            found.decode(found.encode("a b ab ä"))

        return Reader([made.to_str().encode(), words.to_str().encode()], _file(folder, "tokenizer.json", encode))

    lines = (
        b'{"text": "some text to train on, long enough"}\n' * 4
        + b'{"prompt": "how many? ", "answer": "three of them"}\n' * 2
    )
    return {
        "corpus.jsonl": lambda: Reader([lines], _file(folder, "corpus.jsonl", use)),
        "corpus.txt": lambda: Reader([b"some text to train on, \xc3\xa4. " * 20], _file(folder, "corpus.txt", use)),
        "token file": tokens,
        "tokenizer.json": tokenizer,
    }


def _run_directory(folder: Path) -> Path:
    """A small run, as if it had been trained."""
    from fourfold.config import Config
    from fourfold.plan import Plan
    from fourfold.program.stages import lay_out_pipeline
    from fourfold.train.rundir import RunDir

    path = folder / "run"
    if path.exists():
        return path
    config, plan = (
        Config.from_dict(SMALL).resolve(),
        Plan.from_dict({"mesh": {"pipe": 2}, "batch": {"micro_batches": 2}}),
    )
    run = RunDir.create(path, config, plan)
    run.unlock()
    (path / "trace").mkdir()
    for rank, ops in enumerate(lay_out_pipeline(config.model, plan, 8).schedule.order):
        lines = []
        for step in (1, 10, 20):
            spans = [[str(op), 0.1 * i, 0.1 * i + 0.05, 0.0] for i, op in enumerate(ops)]
            lines.append({"step": step, "rank": rank, "pipe": rank, "origin": 1e9 + step, "spans": spans})
        (path / "trace" / f"rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps = [{"step": s, "loss": 1 / s, "grad_norm": 1.0, "seconds": 0.1, "skipped": 0} for s in range(1, 21)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in steps))
    return path


def _runs(folder: Path) -> dict[str, Callable[[], Reader]]:
    def trace() -> Reader:
        run = _run_directory(folder)

        def use(path: Path) -> None:
            from fourfold.train.rundir import RunDir
            from fourfold.view.run import compare_step

            compare_step(RunDir.find(run))

        return Reader([(run / "trace" / "rank1.jsonl").read_bytes()], _file(run / "trace", "rank1.jsonl", use))

    def metrics() -> Reader:
        run = _run_directory(folder)
        other = folder / "other"
        if not other.exists():
            shutil.copytree(run, other)

        def use(path: Path) -> None:
            from fourfold.train.metrics import MetricsFile
            from fourfold.train.rundir import RunDir
            from fourfold.view.compare import compare_runs

            compare_runs(RunDir.find(other), RunDir.find(run))
            MetricsFile(RunDir.find(run), 7).close()

        return Reader([(other / "metrics.jsonl").read_bytes()], _file(run, "metrics.jsonl", use))

    def environment(name: str) -> Reader:
        run = _run_directory(folder)

        def use(path: Path) -> None:
            from fourfold.train.rundir import RunDir

            found = RunDir.find(run)
            found.job()
            found.read()

        return Reader(
            _json_of({"job": "slurm 1.0", "ranks": 2} if name == "env.json" else SMALL), _file(run, name, use)
        )

    def doctor(name: str) -> Reader:
        """The history or a flight record, as `fourfold doctor RUN` reads them."""
        run = folder / "failed"
        if not run.exists():
            shutil.copytree(_run_directory(folder), run)
            (run / "flight").mkdir()
        wait = {"what": "a sum", "peer": 1}
        failure = {
            "kind": "failure",
            "rank": 0,
            "time": 2.0,
            "state": "raised",
            "error": "DeviceError",
            "phase": "step 3",
            "op": "0F1",
        }
        failure |= {
            "message": "GPU 0 is out of memory: 2.00 GiB were requested",
            "wait": wait,
            "rss": 5,
            "peak_bytes": 7,
            "device": "cuda",
        }
        stack = {"kind": "stack", "thread": "MainThread", "calls": ["f (x.py:1)"]}
        event = {"kind": "event", "time": 1.0, "what": "op", "name": "0F1"}
        start = {"time": 1.0, "event": "start", "host": "a", "ranks": 2, "mesh": "pipe 2 = 2"}
        ended = {"time": 2.0, "event": "failure", "kind": "CommunicationError", "rank": 1, "message": "failed waiting"}
        texts = {"history.jsonl": [start, ended], "rank0.jsonl": [failure, stack, event]}
        lines = {n: "".join(json.dumps(line) + "\n" for line in value).encode() for n, value in texts.items()}
        (run / "history.jsonl").write_bytes(lines["history.jsonl"])
        (run / "flight" / "rank0.jsonl").write_bytes(lines["rank0.jsonl"])

        def use(path: Path) -> None:
            from fourfold.supervision.diagnose import diagnose
            from fourfold.train.rundir import RunDir

            json.dumps(diagnose(RunDir.find(run), replan=False).to_dict())

        return Reader([lines[name]], _file(run if name == "history.jsonl" else run / "flight", name, use))

    return {
        "trace": trace,
        "metrics": metrics,
        "env.json": lambda: environment("env.json"),
        "history": lambda: doctor("history.jsonl"),
        "flight record": lambda: doctor("rank0.jsonl"),
    }


def _checkpoints(folder: Path) -> dict[str, Callable[[], Reader]]:
    def reader(name: str, old: bool = False, mend: bool = True) -> Callable[[], Reader]:
        """A file of a checkpoint; `mend`: the checksum is made to fit, as an attacker would."""

        def make() -> Reader:
            import hashlib

            import torch

            from fourfold.checkpoint import save_load

            where = folder / f"checkpoint-{name}-{old}"
            tensors = {"a.weight": torch.arange(12.0).view(4, 3), "b": torch.zeros(5, dtype=torch.bfloat16)}
            state = {
                "version": 1,
                "step": 1,
                "updates": 1,
                "skipped": 0,
                "data": {"epoch": 0, "next": 8, "fingerprint": "ab"},
            }
            saver = save_load.Checkpointer(where)
            saver.save(1, [save_load.holding_of(n, t) for n, t in tensors.items()], state)
            directory = where / "step-000001"
            marker = directory / "complete.json"
            listed = json.loads(marker.read_text())
            if old:
                listed["version"] = 1
                del listed["files"]["index.json"]
                marker.write_text(json.dumps(listed))

            def use(path: Path) -> None:
                if mend:
                    data = path.read_bytes()
                    digest = hashlib.sha256(data).hexdigest()
                    listed["files"][name] = {"bytes": len(data), "sha256": digest}
                    marker.write_text(json.dumps(listed))
                empty = {n: torch.empty_like(t) for n, t in tensors.items()}
                save_load.tensor_types(directory)
                found = save_load.load(directory, [save_load.holding_of(n, t) for n, t in empty.items()])
                save_load.check_state(found, directory)

            return Reader([(directory / name).read_bytes()], _file(directory, name, use))

        return make

    def weights(kind: str) -> Reader:
        """Weights of others: a safetensors file, its index, or a DCP folder."""
        import torch
        import torch.distributed.checkpoint as dcp
        from safetensors.torch import save

        where = folder / f"weights-{kind}"
        where.mkdir()
        tensors = {"a.weight": torch.arange(12.0).view(4, 3), "b": torch.zeros(5, dtype=torch.bfloat16)}
        name = {"dcp": ".metadata", "index": "model.safetensors.index.json"}.get(kind, "model.safetensors")
        if kind == "dcp":
            dcp.save({**tensors, "step": 3}, checkpoint_id=where, no_dist=True)
        elif kind == "index":
            (where / "x.safetensors").write_bytes(save(tensors))
            content = {"metadata": {"total_size": 58}, "weight_map": dict.fromkeys(tensors, "x.safetensors")}
            (where / name).write_text(json.dumps(content))
        else:
            (where / name).write_bytes(save(tensors))

        def use(path: Path) -> None:
            from fourfold.checkpoint.weights import open_source

            source = open_source(str(where))
            for found, (shape, _) in source.tensors.items():
                source.read(found, tuple((0, n) for n in shape))

        return Reader([(where / name).read_bytes()], _file(where, name, use))

    return {
        "safetensors": lambda: weights("safetensors"),
        "safetensors index": lambda: weights("index"),
        "DCP of others": lambda: weights("dcp"),
        "complete.json": reader("complete.json", mend=False),
        "index.json": reader("index.json"),
        ".metadata (old index)": reader(".metadata", old=True),
        "state.json": reader("state.json"),
        "checkpoint tensors": reader("__0_0.distcp"),
    }


def _environments(folder: Path) -> dict[str, Callable[[], Reader]]:
    torchrun = {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "abc",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    slurm = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "7",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2",
        "SLURM_JOB_ID": "9",
        "SLURM_STEP_ID": "0",
        "SLURM_TASKS_PER_NODE": "2(x3),1",
        "SLURM_STEP_NODELIST": "gpu[007-009,12],cpu3",
        "SLURM_RESTART_COUNT": "0",
    }

    def reader(variables: dict[str, str]) -> Reader:
        def use(data: bytes) -> None:
            from fourfold.launch.place import place_from_environment, store_address

            pairs = (line.partition("=")[::2] for line in data.decode("utf-8", "surrogateescape").splitlines())
            env = {name: value.replace("\0", "") for name, value in pairs if name}
            if place_from_environment(env) is not None:
                store_address(env)

        return Reader(["".join(f"{k}={v}\n" for k, v in variables.items()).encode()], use)

    def faults(data: bytes) -> None:
        from fourfold.supervision.faults import parse

        parse(data.decode("utf-8", "surrogateescape"))

    return {
        "torchrun variables": lambda: reader(torchrun),
        "srun variables": lambda: reader(slurm),
        "FOURFOLD_FAULTS": lambda: Reader([b"kill rank=1 step=5; delay rank=0 step=3 seconds=0.5 op=3F0;"], faults),
    }


def readers(folder: Path) -> dict[str, Callable[[], Reader]]:
    """All readers by name; each is made when it is called."""
    makers = (_configs, _plans, _schedules, _data, _runs, _checkpoints, _environments)
    return {name: make for maker in makers for name, make in maker(folder).items()}


READERS = tuple(readers(Path("/")))


# ---- running ----


class _TooLongError(BaseException):
    """A case took more than its processor time."""


@dataclass
class Outcome:
    """What the cases of one reader did: accepted, refused with our own error, or bad."""

    accepted: int = 0
    refused: int = 0
    slowest: float = 0.0
    memory: int = 0
    """Bytes that the process grew by."""
    bad: Counter[str] = field(default_factory=Counter)
    example: dict[str, int] = field(default_factory=dict)


def fuzz(name: str, count: int, seed: int, first: int = 0, *, verbose: bool = False) -> Outcome:
    """Run `count` cases of a reader in this process, from case `first` on."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        reader = readers(Path(folder))[name]()
        for data in reader.seeds:
            reader.use(data)  # what is not changed must be accepted
        peak = _peak()

        def late(number: int, frame: object) -> None:
            raise _TooLongError(f"more than {SECONDS:.0f} s")

        before = signal.signal(signal.SIGPROF, late)
        try:
            for case in range(first, first + count):
                data = mutate(random.Random(f"{seed} {name} {case}"), reader.seeds)
                began, problem = time.process_time(), ""
                signal.setitimer(signal.ITIMER_PROF, SECONDS)
                try:
                    reader.use(data)
                    outcome.accepted += 1
                except FourfoldError as e:
                    outcome.refused += 1
                    printable(e).encode()
                except (_TooLongError, Exception) as e:
                    problem = f"{type(e).__name__}: {_where(e)}"
                except BaseException as e:
                    if isinstance(e, KeyboardInterrupt | SystemExit):
                        raise
                    problem = f"{type(e).__name__}: {_where(e)}"  # a panic of a Rust library
                finally:
                    signal.setitimer(signal.ITIMER_PROF, 0)
                outcome.slowest = max(outcome.slowest, time.process_time() - began)
                grown = _peak() - peak
                if grown - outcome.memory > MEMORY // 4:
                    problem = problem or f"memory: {grown >> 20} MiB"
                outcome.memory = max(outcome.memory, grown)
                if problem:
                    outcome.bad[problem] += 1
                    outcome.example.setdefault(problem, case)
                    if verbose:
                        print(repr(data[:2000]))
                        print(problem)
        finally:
            signal.signal(signal.SIGPROF, before)
    return outcome


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _where(e: BaseException) -> str:
    """The innermost line of ours that an error went through, and the start of its text."""
    frames = [
        f for f in traceback.extract_tb(e.__traceback__) if "fourfold" in f.filename and "benchmarks" not in f.filename
    ]
    at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} " if frames else ""
    return f"{at}{str(e)[:80]!r}"


def _isolated(name: str, count: int, seed: int, first: int) -> Outcome | str:
    """`fuzz` in a child process, which a crash of a library or of memory ends alone."""
    import pickle

    read, write = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust prints its panics
            resource.setrlimit(resource.RLIMIT_DATA, (8 * MEMORY, 8 * MEMORY))
            os.write(write, pickle.dumps(fuzz(name, count, seed, first)))
        except BaseException as e:
            os.write(write, pickle.dumps(f"failed: {type(e).__name__}: {_where(e)}"))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as f:
        data = f.read()
    _, status = os.waitpid(child, 0)
    if data:
        return pickle.loads(data)  # from our own child
    return f"crashed (status {status})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="cases of every reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--reader", nargs="+", choices=READERS, default=list(READERS), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the names of the readers")
    parser.add_argument("--verbose", action="store_true", help="print bad cases whole; runs in this process")
    args = parser.parse_args()
    if args.list:
        print("\n".join(READERS))
        return 0
    print(
        f"{'reader':<24}{'cases':>8}{'accepted':>10}{'refused':>9}{'bad':>6}{'slowest':>10}{'memory':>10}{'seconds':>9}"
    )
    total = 0
    for name in args.reader:
        began = time.monotonic()
        if args.verbose:
            found: Outcome | str = fuzz(name, args.count, args.seed, args.first, verbose=True)
        else:
            found = _isolated(name, args.count, args.seed, args.first)
        took = time.monotonic() - began
        if isinstance(found, str):
            print(f"{name:<24}{args.count:>8}  {found}")
            total += 1
            continue
        bad = sum(found.bad.values())
        total += bad
        print(
            f"{name:<24}{args.count:>8}{found.accepted:>10}{found.refused:>9}{bad:>6}{found.slowest:>8.2f} s"
            f"{found.memory >> 20:>6} MiB{took:>7.0f} s",
            flush=True,
        )
        for problem, times in found.bad.most_common(12):
            again = f"--reader '{name}' --seed {args.seed} --first {found.example[problem]} --count 1 --verbose"
            print(f"    {times:>6}  {problem}\n            python -m benchmarks.fuzz {again}")
    return int(total > 0)


if __name__ == "__main__":
    raise SystemExit(main())
