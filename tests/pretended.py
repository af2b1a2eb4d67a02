"""Runs on the pretended GPU (fourfold.testing.pretend_gpu), each compared with the same run on the CPU; a program of test_pretend_gpu.

Prints a line of JSON for every case: its name, and what went wrong, or null.
"""

from __future__ import annotations

import io
import json
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

import fourfold as ff
from fourfold.testing.communicators import NoLateGroups
from fourfold.testing.ranks import run_ranks
from fourfold.train.sample import Sampler, continue_text, open_model
from tests.helpers import MODELS, make_config

KEYS = ("step", "loss", "grad_norm", "eval_loss", "eval_accuracy")
BF16, FP64 = ({"precision": {"compute": kind}} for kind in ("bf16", "fp64"))


def fit(
    folder: Path, name: str, plan: dict[str, Any], device: str, *, resume: bool = False, **sections: Any
) -> list[Any]:
    """Train; returns the metrics that do not depend on time."""
    model = sections.pop("model", MODELS["llama"])
    train = {"steps": 3, "device": device, "eval_every": 2} | sections.pop("train", {})
    log = {"trace": 1} | sections.pop("log", {})
    config = make_config(folder / f"{name} {device}", model, train=train, log=log, **sections)
    ff.fit(config, ff.Plan.from_dict(plan), resume=resume, console=io.StringIO())
    return metrics(folder / f"{name} {device}")


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: line[k] for k in KEYS if k in line} for line in map(json.loads, lines) if "save_seconds" not in line]


def both(folder: Path, name: str, plan: dict[str, Any], **sections: Any) -> None:
    """The same bits on both devices, where the CPU computes attention as the pretended GPU does.

    In fp64 nearly the same: the CPU adds the bias of a linear layer in the matmul.
    """
    there = fit(folder, name, plan, "cuda", **sections)
    with sdpa_kernel(SDPBackend.MATH), patch("fourfold.model.attention._one_by_one", return_value=False):
        here = fit(folder, name, plan, "cpu", **sections)
    if plan.get("precision") == FP64["precision"]:
        for a, b in zip(there, here, strict=True):
            assert a == pytest.approx(b, rel=1e-9), f"{a} {b}"
    else:
        assert there == here, f"{there}\n{here}"


def events(run: Path, kind: str) -> list[list[str]]:
    """By traced step: what rank 0's events of a kind are called."""
    lines = (run / "trace" / "rank0.jsonl").read_text().splitlines()
    return [[e[1] for e in json.loads(line)["events"] if e[0] == kind] for line in lines]


def pairs(folder: Path) -> str:
    path = folder / "preferences.jsonl"
    rows = [{"prompt": f"{i}? ", "chosen": "yes" * (1 + i % 2), "rejected": f"no {i}"} for i in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def answers(folder: Path) -> str:
    draw, path = random.Random(2), folder / "answers.jsonl"
    lengths = [draw.choice((1, 2, 5, 9)) for _ in range(120)]
    path.write_text("".join(json.dumps({"prompt": "q" * (n % 4), "answer": "a" * n}) + "\n" for n in lengths))
    return str(path)


RANKS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tied weight, sharded": (
        "nccl",
        4,
        {
            "mesh": {"pipe": 2, "data": 2},
            "unit": [{"match": "*.mlp", "mode": "zero3"}, {"match": "head", "mode": "zero2"}],
        },
    ),
    "message-driven": (
        "nccl",
        2,
        {"mesh": {"pipe": 2}, "pipeline": {"executor": "message-driven", "schedule": "wave", "slack": 1}},
    ),
    "grid": ("nccl", 4, {"mesh": {"row": 2, "col": 2}, "tensor": {"flow": "summa", "residual": "hidden"}}),
    "zero bubble, state on the host": (
        "gloo",
        2,
        {
            "mesh": {"pipe": 2},
            "pipeline": {"schedule": "zb-v"},
            "unit": [{"match": "*", "mode": "keep"}],
            "memory": {"optimizer": "host", "activations": "host"},
        },
    ),
}
"""By name: the backend ("gloo": through host memory), the ranks and the plan."""


def _rank(rank: int, ranks: int, backend: str, config: ff.Config, plan: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":  # as if each rank had a GPU of its own
        dist.destroy_process_group()
        store = dist.FileStore(f"{config.train.run_dir}.store", ranks)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=ranks)
    ff.fit(config, ff.Plan.from_dict(plan | FP64), callbacks=[NoLateGroups()], console=io.StringIO())


def several_ranks(folder: Path) -> None:
    train = {"steps": 2, "eval_every": 2, "check_replicas": 2}
    model = MODELS["gpt"] | {"tie": True}
    wanted = run_ranks(_serial, 1, make_config(folder / "serial", model, train=train))[0]
    for name, (backend, ranks, plan) in RANKS.items():
        config = make_config(folder / name, model, train=train | {"device": "cuda"}, log={"trace": 1})
        run_ranks(_rank, ranks, backend, config, plan)
        for a, b in zip(metrics(Path(config.train.run_dir)), wanted, strict=True):
            assert a == pytest.approx(b, rel=1e-9), f"{name}: {a} {b}"


def _serial(rank: int, ranks: int, config: ff.Config) -> list[Any]:
    ff.fit(config, ff.Plan.from_dict(FP64), console=io.StringIO())
    return metrics(Path(config.train.run_dir))


def training(folder: Path) -> None:
    both(folder, "one", {"batch": {"micro_batches": 2}}, checkpoint={"every": 2}, train={"steps": 11}, log={"trace": 5})


def models(folder: Path) -> None:
    both(folder, "gpt", FP64, model=MODELS["gpt"] | {"dropout": 0.1})
    both(folder, "bert", FP64, model=MODELS["bert"])


def recomputation(folder: Path) -> None:
    for how in ("full", "selective"):
        both(folder, how, {"unit": [{"match": "*", "recompute": how}]} | BF16)
        assert all(events(folder / f"{how} cuda", "recompute"))
    both(folder, "split", {"unit": [{"match": "*.mlp", "split": 2}]})


def host_state(folder: Path) -> None:
    for name, memory in {
        "clipped": {"optimizer": "host"},
        "narrow": {"optimizer": "host", "moments": "bf16"},
        "auto": {"optimizer": "auto", "staging": "1MiB"},
    }.items():
        both(folder, name, {"memory": memory, "batch": {"micro_batches": 2}} | BF16, checkpoint={"every": 2})
    both(folder, "early", {"memory": {"optimizer": "host"}} | BF16, optim={"clip": 0.0}, train={"guard": False})
    for name in ("clipped", "early"):  # updates run after the step, and in it
        found = events(folder / f"{name} cuda", "bucket")
        assert len(found) == 3
        assert all(found)


def host_activations(folder: Path) -> None:
    with patch("fourfold.train.streamed.LEAST", 64):
        for recompute in ("none", "full"):
            plan = {"unit": [{"match": "*", "recompute": recompute}], "batch": {"micro_batches": 3}}
            both(folder, f"activations {recompute}", plan | {"memory": {"activations": "host"}})


def resumed(folder: Path) -> None:
    for name, plan in {"device": BF16, "host": {"memory": {"optimizer": "host"}} | BF16}.items():
        how: dict[str, Any] = {"optim": {"decay": "constant"}, "checkpoint": {"every": 2}}
        whole = fit(folder, f"whole {name}", plan, "cuda", train={"steps": 4}, **how)
        fit(folder, name, plan, "cuda", train={"steps": 2}, **how)
        assert fit(folder, name, plan, "cuda", train={"steps": 4}, resume=True, **how) == whole


def packed(folder: Path) -> None:
    data = {"source": answers(folder), "eval_fraction": 0.2, "packing": "documents"}
    both(folder, "packed", {"batch": {"micro_batches": 2}}, model=MODELS["llama"] | {"seq_len": 24}, data=data)


def preferences(folder: Path) -> None:
    both(folder, "dpo", {}, data={"source": pairs(folder), "eval_fraction": 0.2}, dpo={"beta": 0.2})


def adapters(folder: Path) -> None:
    fit(folder, "base", {}, "cpu", model=MODELS["gpt"])
    model = {"hf": str(folder / "base cpu" / "final"), "seq_len": 16, "dropout": 0.0}
    for name, plan in {"lora": FP64, "lora on the host": FP64 | {"memory": {"optimizer": "host"}}}.items():
        both(folder, name, plan, model=model, data={"tokenizer": "bytes"}, lora={"rank": 4})


def sampling(folder: Path) -> None:
    fit(folder, "sampled", {}, "cuda")
    opened = open_model(folder / "sampled cuda")
    assert next(opened.model.parameters()).is_cuda
    for temperature in (0.0, 0.8):
        "".join(continue_text(opened, "1 times", 8, Sampler(temperature=temperature)))


def traces(folder: Path) -> None:
    fit(folder, "traced", {}, "cuda", train={"steps": 5}, log={"trace": 2})
    lines = (folder / "traced cuda" / "trace" / "rank0.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 4]
    assert all(json.loads(line)["events"] and json.loads(line)["memory"] for line in lines)


PARTS: tuple[tuple[Callable[[Path], None], ...], ...] = (
    (
        several_ranks,
        training,
        models,
        sampling,
        traces,
    ),  # ranks first: they are forked, from a process without backwards
    (recomputation, host_state, host_activations, resumed, packed, preferences, adapters),
)


def main(folder: Path, wanted: str) -> None:
    torch.set_num_threads(1)
    for case in (c for part in PARTS for c in part):
        if wanted != case.__name__ and (not wanted.isdigit() or case not in PARTS[int(wanted)]):
            continue
        problem = None
        here = folder / case.__name__
        here.mkdir()
        try:
            case(here)
        except Exception:
            problem = f"{case.__name__}: {traceback.format_exc()}"
        print(json.dumps({"case": case.__name__, "problem": problem}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
