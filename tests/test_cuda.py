"""On a GPU: one rank, several ranks that share it, against one process on the CPU. Skipped without a GPU."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.model.attention import Documents, document_attention
from fourfold.model.fp8 import fp8_input_grad, fp8_linear, fp8_missing, quantize
from fourfold.train.rundir import RunDir, read_metrics
from fourfold.view.steps import read_steps
from tests.helpers import MODELS, make_config, series
from tests.test_packing import packed_config, random_starts

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
    pytest.mark.timeout(400),
]

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "recompute": (1, {"unit": [{"match": "*", "recompute": "full"}]}),
    "data": (2, {"mesh": {"data": 2}}),
    "1f1b": (2, {"mesh": {"pipe": 2}}),
    "zb-v": (2, {"mesh": {"pipe": 2}, "pipeline": {"schedule": "zb-v"}}),
    "message-driven": (
        2,
        {"mesh": {"pipe": 2}, "pipeline": {"schedule": "wave", "executor": "message-driven", "slack": 1}},
    ),
    "pipe and data": (4, {"mesh": {"pipe": 2, "data": 2}, "pipeline": {"schedule": "wave"}}),
    "sharded": (
        2,
        {
            "mesh": {"data": 2},
            "batch": {"micro_batches": 2},
            "unit": [{"match": "*.mlp", "mode": "zero3", "split": 2}, {"match": "*", "mode": "zero2"}],
        },
    ),
    "grid": (4, {"mesh": {"row": 2, "col": 2}, "batch": {"micro_batches": 2}}),
    "on the host": (1, {"memory": {"optimizer": "host", "activations": "host"}, "batch": {"micro_batches": 2}}),
    "everything": (
        4,
        {
            "mesh": {"pipe": 2, "data": 2},
            "pipeline": {"schedule": "zb-v"},
            "unit": [{"match": "*", "mode": "keep"}],
            "memory": {"optimizer": "host"},
        },
    ),
}


def train(folder: Path, name: str, ranks: int, plan: dict[str, Any], **sections: Any) -> list[dict[str, Any]]:
    """Train with the command line; returns the steps' metrics. Units are not compiled, which takes most of a minute, unless the plan
    says so."""
    plan = plan | {"precision": {"compile": False} | plan.get("precision", {})}
    model = sections.pop("model", MODELS["gpt"] | {"layers": 4})
    train = {"steps": 6, "device": "cuda"} | sections.pop("train", {})
    config = make_config(folder / name, model, train=train, **sections)
    (folder / f"{name}.json").write_text(json.dumps(config.to_dict()))
    (folder / f"{name}.plan.json").write_text(json.dumps(plan))
    command = [
        sys.executable,
        "-m",
        "fourfold",
        "train",
        f"{folder / name}.json",
        "--plan",
        f"{folder / name}.plan.json",
    ]
    out = subprocess.run([*command, "--nproc", str(ranks)], capture_output=True, text=True, timeout=110)
    assert out.returncode == 0, out.stdout + out.stderr
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda")


@pytest.fixture(scope="module")
def serial(folder: Path) -> list[dict[str, Any]]:
    return train(folder, "serial", 1, {"precision": {"compute": "fp64"}}, train={"device": "cpu"})


@pytest.mark.parametrize("name", PLANS)
def test_fp64_matches_one_process_on_the_cpu(name: str, folder: Path, serial: list[dict[str, Any]]) -> None:
    ranks, plan = PLANS[name]
    found = train(folder, name, ranks, plan | {"precision": {"compute": "fp64"}})
    for key in ("loss", "grad_norm"):
        assert [f[key] for f in found] == pytest.approx([s[key] for s in serial], rel=1e-9)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_two_ranks_on_one_gpu_match_one(compute: str, folder: Path) -> None:
    precision = {"precision": {"compute": compute}}
    one = train(folder, f"one {compute}", 1, {"batch": {"micro_batches": 4}} | precision)
    two = train(folder, f"two {compute}", 2, {"mesh": {"pipe": 2}, "batch": {"micro_batches": 4}} | precision)
    assert [s["loss"] for s in two] == pytest.approx([s["loss"] for s in one], rel=1e-5 if compute == "fp32" else 5e-3)


@pytest.mark.parametrize(("ranks", "plan"), [(1, {}), (2, {"mesh": {"pipe": 2}, "batch": {"micro_batches": 2}})])
def test_preference_training(ranks: int, plan: dict[str, Any], folder: Path) -> None:
    pairs = folder / "pairs.jsonl"
    rows = [{"prompt": f"{i}? ", "chosen": "yes" * (1 + i % 2), "rejected": f"no {i}"} for i in range(24)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections: dict[str, Any] = {"data": {"source": str(pairs)}, "dpo": {"beta": 0.2}}
    fp64 = {"precision": {"compute": "fp64"}}
    cpu = train(folder, f"pairs cpu {ranks}", 1, fp64, train={"device": "cpu"}, **sections)
    found = train(folder, f"pairs {ranks}", ranks, plan | fp64, **sections)
    assert [f["loss"] for f in found] == pytest.approx([c["loss"] for c in cpu], rel=1e-9)


LORA_PLANS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {"unit": [{"match": "*", "recompute": "full"}]}),
    (
        2,
        {
            "mesh": {"data": 2},
            "unit": [{"match": "*.mlp", "mode": "zero3", "split": 2}, {"match": "*", "mode": "zero3"}],
        },
    ),
    (2, {"mesh": {"pipe": 2}, "pipeline": {"schedule": "zb-h1"}, "batch": {"micro_batches": 2}}),
    (4, {"mesh": {"row": 2, "col": 2}}),
    (1, {"memory": {"optimizer": "host"}}),
)


@pytest.mark.parametrize("number", range(len(LORA_PLANS)))
def test_lora(number: int, folder: Path, serial: list[dict[str, Any]]) -> None:
    ranks, plan = LORA_PLANS[number]
    sections: dict[str, Any] = {
        "model": {"hf": str(folder / "serial" / "final"), "seq_len": 16, "dropout": 0.0},
        "data": {"tokenizer": "bytes"},
        "lora": {"rank": 4},
        "optim": {"lr": 1e-3},
    }
    fp64 = {"precision": {"compute": "fp64"}}
    cpu = train(folder, f"lora cpu {number}", 1, fp64, train={"device": "cpu"}, **sections)
    found = train(folder, f"lora {number}", ranks, plan | fp64, **sections)
    for key in ("loss", "grad_norm"):
        assert [f[key] for f in found] == pytest.approx([c[key] for c in cpu], rel=1e-9)
    narrow = train(folder, f"lora bf16 {number}", ranks, plan | {"precision": {"compute": "bf16"}}, **sections)
    assert [n["loss"] for n in narrow] == pytest.approx([c["loss"] for c in cpu], rel=2e-2)


def test_an_own_model(tmp_path: Path) -> None:
    """The example, on the GPU and without it."""
    losses, script = [], Path(__file__).parents[1] / "examples" / "own_dataset_and_loss.py"
    for visible in ("", "0"):
        here = tmp_path / f"gpu{visible}"
        here.mkdir()
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible}
        out = subprocess.run([sys.executable, str(script)], cwd=here, env=environment, capture_output=True, text=True)
        assert out.returncode == 0, out.stderr
        lines = (here / "runs" / "own-model" / "metrics.jsonl").read_text().splitlines()
        losses.append([line["loss"] for line in map(json.loads, lines) if "loss" in line])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_compiled_with_a_split_backward(folder: Path) -> None:
    plan = {"mesh": {"pipe": 2}, "pipeline": {"schedule": "zb-h1"}}
    plain = train(folder, "plain", 2, plan)
    compiled = train(folder, "compiled", 2, plan | {"precision": {"compile": True}})
    assert [s["loss"] for s in compiled] == pytest.approx([s["loss"] for s in plain], rel=1e-4)


@pytest.fixture
def fp8() -> None:
    if reason := fp8_missing(torch.device("cuda", 0)):  # not asked for before the test: it starts CUDA in this process
        pytest.skip(reason)


@pytest.mark.usefixtures("fp8")
def test_fp8_matmuls_are_those_of_the_emulation() -> None:
    """Integers exactly; random numbers to the rounding of bf16, with more in the forward, whose sums are the tensor core's."""
    torch.manual_seed(0)
    x, w, dy = (torch.randint(-2, 3, shape).to(torch.bfloat16) for shape in ((48, 32), (64, 32), (48, 64)))
    assert torch.equal(fp8_linear(x.cuda(), w.cuda()).cpu().double(), x.double() @ w.double().t())
    assert torch.equal(fp8_input_grad(dy.cuda(), w.cuda()).cpu().double(), dy.double() @ w.double())
    x, w, b = (torch.randn(shape).to(torch.bfloat16) for shape in ((2, 256, 1024), (512, 1024), (512,)))
    dy = torch.randn(2, 256, 512).to(torch.bfloat16)
    for q, on_gpu in zip(quantize(x[0]), quantize(x[0].cuda()), strict=True):
        assert torch.equal(q.float(), on_gpu.cpu().float())
    gap = fp8_linear(x.cuda(), w.cuda(), b.cuda()).cpu().double() - fp8_linear(x, w, b).double()
    assert gap.norm() < 0.01 * fp8_linear(x, w, b).double().norm()
    gap = fp8_input_grad(dy.cuda(), w.cuda()).cpu().double() - fp8_input_grad(dy, w).double()
    assert gap.norm() < 0.005 * fp8_input_grad(dy, w).double().norm()


@pytest.mark.usefixtures("fp8")
def test_training_in_fp8(folder: Path) -> None:
    """Near the emulation on a CPU; kept and recomputed, whole and in a pipeline with queued weight gradients: the same bits."""
    precision = {"compute": "bf16", "matmul": "fp8"}
    plan: dict[str, Any] = {"precision": precision, "batch": {"micro_batches": 2}}
    emulated = train(folder, "fp8 emulated", 1, plan, train={"device": "cpu"})
    here = train(folder, "fp8", 1, plan)
    assert [s["loss"] for s in here] == pytest.approx([s["loss"] for s in emulated], rel=0.02)
    for name, ranks, more in (
        ("full", 1, {"unit": [{"match": "blocks.*", "recompute": "full"}]}),
        ("selective", 1, {"unit": [{"match": "blocks.*", "recompute": "selective"}]}),
        ("zb-h1", 2, {"mesh": {"pipe": 2}, "pipeline": {"schedule": "zb-h1"}}),
    ):
        losses = [s["loss"] for s in train(folder, f"fp8 {name}", ranks, plan | more)]
        assert losses == [s["loss"] for s in here], name
    compiled = train(folder, "fp8 compiled", 1, plan | {"precision": precision | {"compile": True}})
    assert [s["loss"] for s in compiled] == pytest.approx([s["loss"] for s in here], rel=0.02)


def test_the_same_bits_twice_and_after_a_stop(folder: Path) -> None:
    """Deterministic kernels, dropout, bf16: stopped and resumed, the metrics of the later steps are the same."""
    how: dict[str, Any] = {"checkpoint": {"every": 3}, "train": {"steps": 6}}
    plan = {"precision": {"compute": "bf16", "compile": "auto"}}
    whole = train(folder, "whole", 1, plan, **how)
    train(folder, "stopped", 1, plan, **how | {"train": {"steps": 3}})
    command = [sys.executable, "-m", "fourfold", "train", "--resume", str(folder / "stopped"), "--train.steps", "6"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert out.returncode == 0, out.stdout + out.stderr
    lines = [json.loads(line) for line in (folder / "stopped" / "metrics.jsonl").read_text().splitlines()]
    again = [line for line in lines if "loss" in line]
    assert [s["loss"] for s in again[-3:]] == [s["loss"] for s in whole[-3:]]


def test_a_gpu_run_can_be_sampled(folder: Path) -> None:
    train(folder, "sampled", 1, {})
    command = [sys.executable, "-m", "fourfold", "sample", str(folder / "sampled"), "--prompt", "1 times"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert out.returncode == 0, out.stdout + out.stderr


def test_a_model_of_real_size_is_traced_and_timed(folder: Path) -> None:
    """The device is behind the host here, which no small model shows: traces and seconds are read in time, all of them."""
    run = folder / "real size"
    overrides = ["--train.steps", "12", "--train.global-batch", "8", "--log.trace", "5", "--train.run-dir", str(run)]
    command = [
        sys.executable,
        "-m",
        "fourfold",
        "train",
        "configs/gpt-124m.toml",
        "--data.source",
        "stdlib",
        *overrides,
    ]
    out = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stdout + out.stderr
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = [s["seconds"] for s in steps if "loss" in s]
    assert len(seconds) == 12
    usual = sorted(seconds[2:-1])[4]
    assert seconds[-1] == pytest.approx(usual, rel=0.5)
    traced = [json.loads(line) for line in (run / "trace" / "rank0.jsonl").read_text().splitlines()]
    assert [t["step"] for t in traced] == [1, 5, 10]
    busy = max(end for _, _, end, _ in traced[-1]["spans"])
    assert busy == pytest.approx(usual, rel=0.5)
    last = traced[-1]
    assert last["seconds"] == pytest.approx(usual, rel=0.5)
    assert {e[0] for e in last["events"]} >= {"between", "data", "program", "unit", "norm", "update"}
    assert all(-1e-6 <= e[2] <= e[3] <= e[4] <= last["seconds"] + 1e-6 for e in last["events"])
    assert last["memory"]
    assert last["peak"][2]["optimizer state"] > 124e6 * 8
    assert 0 <= last["lead"] < 60
    (step,) = [s for s in read_steps(RunDir.find(str(run))) if s.step == 10]
    assert step.ranks[0].spent("other") < 0.05 * step.ranks[0].seconds


def test_the_life_of_a_run_of_real_size(tmp_path: Path) -> None:
    """GPT 124M, 24 steps, evaluated, traced, saved three times, killed once and restarted: the bits of a run without a fault.

    `make gpu-check` has the same with 1.2 B parameters. Takes 5 GB of disk.
    """

    def run(name: str, *flags: str, faults: str = "") -> tuple[list[dict[str, Any]], str]:
        path = tmp_path / name
        fields = [
            "--train.steps",
            "24",
            "--train.global-batch",
            "8",
            "--optim.warmup",
            "10",
            "--train.eval-every",
            "12",
        ]
        command = [
            sys.executable,
            "-m",
            "fourfold",
            "train",
            "configs/gpt-124m.toml",
            "--data.source",
            "stdlib",
            *fields,
        ]
        env = os.environ | {"FOURFOLD_FAULTS": faults}
        command += ["--train.run-dir", str(path), "--log.trace", "6", *flags]
        out = subprocess.run(command, capture_output=True, text=True, timeout=180, env=env)
        assert out.returncode == 0, out.stdout + out.stderr
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        digest = hashlib.sha256()
        for part in sorted((path / "final").glob("*.safetensors")):
            with part.open("rb") as f:
                digest.update(hashlib.file_digest(f, "sha256").digest())
        shutil.rmtree(path / "checkpoints")
        return lines, digest.hexdigest() + out.stdout + out.stderr

    whole, first = run("whole", "--checkpoint.every", "0")
    killed, second = run("killed", "--checkpoint.every", "8", "--max-restarts", "1", faults="kill rank=0 step=20")
    assert "was killed by SIGKILL" in second
    keys = ("step", "loss", "grad_norm", "eval_loss")
    assert [[m.get(k) for k in keys] for m in killed if "save_seconds" not in m] == [
        [m.get(k) for k in keys] for m in whole if "save_seconds" not in m
    ]
    assert second[:64] == first[:64]
    assert [m["step"] for m in killed if "save_seconds" in m] == [8, 16, 24]
    seconds = [m["seconds"] for m in whole if "loss" in m]
    assert seconds[-1] == pytest.approx(sorted(seconds)[12], rel=0.3)
    traced = [
        json.loads(line)["step"] for line in (tmp_path / "killed" / "trace" / "rank0.jsonl").read_text().splitlines()
    ]
    assert traced == [1, 6, 12, 18, 24]


def test_a_stopped_rank_over_nccl_is_named_in_time(tmp_path: Path) -> None:
    """Four ranks share the GPU, each a host of its own to NCCL."""
    plans: dict[str, dict[str, Any]] = {
        "data": {"mesh": {"data": 4}},
        "zero3": {"mesh": {"data": 4}, "unit": [{"match": "*", "mode": "zero3"}]},
        "col": {"mesh": {"col": 4}},
        "pipe": {"mesh": {"pipe": 4}},
    }
    for name, plan in plans.items():
        config = make_config(tmp_path / name, MODELS["gpt"] | {"layers": 4})
        data = config.to_dict()
        data["train"] |= {"steps": 200, "device": "cuda", "backend": "nccl", "timeout": 10.0, "global_batch": 16}
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
        (tmp_path / f"{name}.plan.json").write_text(json.dumps(plan | {"precision": {"compile": False}}))
        command = [sys.executable, "-m", "fourfold", "train", str(tmp_path / f"{name}.json"), "--nproc", "4"]
        command += ["--plan", str(tmp_path / f"{name}.plan.json")]
        env = os.environ | {"FOURFOLD_FAULTS": "stop rank=2 step=5"}
        out = subprocess.run(command, capture_output=True, text=True, timeout=110, env=env)
        assert out.returncode == 1
        assert "rank 2 is stopped (SIGSTOP)" in out.stderr, f"{name}: {out.stderr}"
        assert "no rank has made progress for 10 s" in out.stderr


# ---- packed data ----


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("kv_heads", "window"), [(8, 0), (2, 0), (2, 100)])
def test_torchs_kernel_agrees_with_documents_alone(kv_heads: int, window: int, width: int) -> None:
    """Variable-length attention in bf16, on q, k and v as the rotary kernel leaves them, against fp64 on the CPU."""
    g = torch.Generator().manual_seed(0)
    heads = (8, kv_heads, kv_heads)
    whole = torch.randn(2, 384, sum(heads) * width, generator=g).bfloat16()
    starts = random_starts(2, 384)
    starts[1] = 0  # a sequence of one document
    grad = torch.randn(2, 8, 384, width, generator=g).bfloat16()
    found = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        qkv = whole.to(device, dtype).requires_grad_()
        parts = [p.unflatten(-1, (-1, width)).transpose(1, 2) for p in qkv.split([n * width for n in heads], -1)]
        documents = Documents.of(starts).to(lambda t, device=device: t.to(device))  # type: ignore[misc]
        out = document_attention(*parts, documents, scale=width**-0.5, window=window)
        (dqkv,) = torch.autograd.grad(out, qkv, grad.to(device, dtype))
        found.append([t.detach().cpu().double() for t in (out, dqkv)])
    for exact, mine in zip(*found, strict=True):
        assert (mine - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_packed_run_on_a_gpu(tmp_path: Path, name: str, compiled: bool) -> None:
    """bf16 on the GPU, with the kernel (llama) and under a mask (gemma: soft-capped), near fp64 on the CPU."""
    model = {"init_std": 0.05, "head_dim": 16}
    losses = []
    for device, compute in (("cpu", "fp64"), ("cuda", "bf16")):
        fields = packed_config(tmp_path / device, name, device=device).to_dict()
        fields["model"] |= model
        precision = {"compute": compute, "compile": compiled and device == "cuda"}
        plan = {"precision": precision, "unit": [{"match": "*.attn", "recompute": "selective"}]}
        (tmp_path / f"{device}.json").write_text(json.dumps(fields))
        (tmp_path / "plan.json").write_text(json.dumps({"mesh": {"data": 1}} | plan))
        command = ["train", str(tmp_path / f"{device}.json"), "--plan", str(tmp_path / "plan.json"), "--nproc", "1"]
        done = subprocess.run([sys.executable, "-m", "fourfold", *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        losses.append(series(list(read_metrics(RunDir(tmp_path / device))), "loss"))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
