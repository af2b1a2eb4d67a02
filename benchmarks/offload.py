"""Optimizer state on the host, on one GPU: ours, all on the GPU, and FSDP2's CPU offload, in one run.

    python -m benchmarks.offload [--quick] [--json PATH]

A 2.8 B Llama shape in bf16, full recomputation, micro-batches of 4 x 4,096 tokens. "All on the GPU" is a hand-written loop with
torch's fused AdamW on an fp32 master; it and ours live in one process and take turns, so figures are shares of its speed a
moment before. Each row also has the bound: what the measured link and compute allow. Needs about 90 GiB on the GPU and 80 GiB
on the host; `--quick` is a small shape.

    bound without clipping   max(compute, traffic)                    traffic = bytes of state / one direction of the duplex link
    bound with clipping      compute + the part of the traffic that is neither staged nor overlapped with the next forward,
                             at least traffic; where updates may be rolled back, nor with the last backward, of 6/5 of the traffic

where compute is forward, backward and update with all state on the GPU, measured in the same turn. "May be rolled back, norm
fine" has a threshold that no norm reaches; in "every step clips" all do, so that after three steps updates wait for the norm.

Then: the update alone against the link; the largest models, with kept gradients and clipping, and with consumed gradients and
neither; activations on the host against recomputation.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as `fourfold train` does

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.common import Row, arguments, finish, lower_is_better, show
from fourfold import StreamedAdamW
from fourfold.config import ModelConfig
from fourfold.errors import HostMemoryError
from fourfold.model.build import serial_model
from fourfold.offload.activations import ActivationOffload
from fourfold.offload.host import available_bytes, host_memory
from fourfold.offload.queues import make_queues

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the CPU it runs, but measures nothing
GIB = 1 << 30
SHAPE = ModelConfig(family="llama", layers=26, hidden=3072, heads=24, kv_heads=8, ffn=8192, vocab=32000, seq_len=4096)
SMALL = replace(SHAPE, layers=4, hidden=1024, heads=8, kv_heads=8, ffn=2816)
SEQUENCES = 4
if DEVICE.type == "cpu":
    SMALL, SEQUENCES = replace(SMALL, layers=2, hidden=64, ffn=128, vocab=256, seq_len=16), 2


class Model(nn.Module):
    """The serial model and its loss; every block is recomputed in the backward."""

    def __init__(self, shape: ModelConfig, recompute: bool = True, device: torch.device = DEVICE):
        super().__init__()
        self.config, self.recompute = shape.resolve(), recompute
        made = serial_model(self.config, 0, device, torch.bfloat16)
        self.embed, self.blocks, self.head, self.rotary = made.embed, made.blocks, made.head, made.rotary
        self.size = sum(p.numel() for p in self.parameters())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x, ids) / ids.numel()


def tokens(shape: ModelConfig, seed: int = 0) -> Tensor:
    made = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randint(0, shape.vocab, (SEQUENCES, shape.seq_len), device=DEVICE, generator=made)


class OnDevice:
    """The hand-written loop: bf16 weights, fp32 master, torch's fused AdamW, clipping."""

    def __init__(self, model: Model):
        self.model, self.clip = model, 1.0
        self.params = list(model.parameters())
        self.master = [p.detach().float() for p in self.params]
        self.optimizer = torch.optim.AdamW(self.master, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def run(self, ids: Tensor, micro_batches: int, update: bool = True) -> None:
        for _ in range(micro_batches):
            (self.model(ids) / micro_batches).backward()
        if update:
            if self.clip:
                nn.utils.clip_grad_norm_(self.params, self.clip)
            for q, p in zip(self.master, self.params, strict=True):
                q.grad = p.grad.float()  # type: ignore[union-attr]
            self.optimizer.step()
            for q, p in zip(self.master, self.params, strict=True):
                p.data.copy_(q)
                q.grad = None
        for p in self.params:
            p.grad = None


class Ours:
    """The same loop with StreamedAdamW."""

    def __init__(self, model: Model, lr: float = 1e-4, **options: Any):
        self.model = model
        self.optimizer = StreamedAdamW(
            model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, overlap=model, **options
        )

    def run(self, ids: Tensor, micro_batches: int) -> None:
        for i in range(micro_batches):
            loss = self.model(ids) / micro_batches
            if i == micro_batches - 1:
                with self.optimizer.last_backward():
                    loss.backward()
            else:
                loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        self.optimizer.streamer.finish()


def timed(run: Callable[[], object], steps: int, warm: int = 1) -> float:
    """Seconds of one of `steps` runs, launched one after another as in training: only the ends wait for the GPU."""
    for _ in range(warm):
        run()
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        run()
    synchronize()
    return (time.perf_counter() - start) / steps


def synchronize() -> None:
    """Wait for what this thread computes; copies and updates in other streams may go on."""
    if DEVICE.type == "cuda":
        torch.cuda.current_stream().synchronize()


def allocated() -> int:
    return torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0


def peak() -> int:
    """Most bytes of tensors on the GPU since `clean`; on the CPU, of the whole process since it began."""
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def clean() -> None:
    """Give memory back and forget the peak."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def log(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f} s] {text}", flush=True)


BEGAN = time.perf_counter()


def main() -> None:
    args = arguments("Optimizer state and activations on the host")
    if "PEER" in os.environ:
        globals()[os.environ["PEER"]](args.quick)
        return
    rows: list[Row] = []
    for title, section in SECTIONS.items():
        if os.environ.get("ONLY", title.split()[0]) != title.split()[0]:
            continue
        try:
            found = list(section(args.quick))
        except Exception as e:  # the rest is still worth having
            log(f"{title}: {type(e).__name__}: {e}")
            continue
        show(f"\n{title}", found)
        rows += found
        finish("offload", rows, args.json)


# ---- the link ----


def link_rates(size: int = 2 * GIB) -> dict[str, float]:
    """Bytes per second host to device, device to host, and both at once (in sum), in buckets as the optimizer's."""
    host = [host_memory(size, DEVICE) for _ in range(2)]
    device = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    queues = make_queues(DEVICE)

    def copy(inward: bool, outward: bool) -> None:
        for queue in (queues.copy_in, queues.copy_out):
            queue.wait(queues.compute.record())
        for at in range(0, size, 64 << 20):
            part = slice(at, at + (64 << 20))
            if inward:
                queues.copy_in.submit(lambda part=part: device[0][part].copy_(host[0][part], non_blocking=True))  # type: ignore[misc]
            if outward:
                queues.copy_out.submit(lambda part=part: host[1][part].copy_(device[1][part], non_blocking=True))  # type: ignore[misc]
        for queue in (queues.copy_in, queues.copy_out):
            queues.compute.wait(queue.record())

    rates = {
        "in": size / timed(lambda: copy(True, False), 3),
        "out": size / timed(lambda: copy(False, True), 3),
        "both": 2 * size / timed(lambda: copy(True, True), 3),
    }
    log(f"link: {', '.join(f'{k} {v / 1e9:.1f} GB/s' for k, v in rates.items())}")
    return rates


# ---- the optimizer ----


def optimizer_rows(quick: bool) -> Iterator[Row]:
    rates = link_rates(256 << 20 if quick else 2 * GIB)
    shape = SMALL if quick else SHAPE
    there, here = OnDevice(Model(shape)), Model(shape)
    ids = tokens(shape)
    per_step = SEQUENCES * shape.seq_len
    with torch.no_grad():
        forward = timed(lambda: here(ids), 2)
    there.run(ids, 1)  # its state is allocated in its first update
    micro = timed(lambda: there.run(ids, 1, update=False), 3)
    log(f"{here.size / 1e9:.2f} B parameters; forward {forward:.3f} s, forward and backward {micro:.3f} s")
    fsdp = peer("fsdp_offload", quick)
    began, base = time.perf_counter(), allocated()
    ours = Ours(here, clip=1.0, guard=True, staging=256 << 20 if quick else 16 * GIB, rollback=1 << 62)
    streamer = ours.optimizer.streamer
    room = streamer.rollback_bytes
    ready = f"{streamer.host_bytes / GIB:.1f} + {room / GIB:.1f} GiB of host memory made ready"
    log(f"{ready} in {time.perf_counter() - began:.1f} s")
    for case, prepare in (
        ("clipping, 16 GiB staged", partial(set_rollback, ours, 0)),
        ("clipping, 4 buckets", partial(shorten_ring, ours)),
        ("clipping, may be rolled back, norm fine", partial(set_rollback, ours, room, 1e9)),
        ("clipping, may be rolled back, every step clips", partial(set_rollback, ours, room, 1e-6)),
        ("no clipping, 4 buckets", partial(drop_norm, ours)),
    ):
        prepare()
        clean()
        resident = (allocated() - base + 4 * here.size) / GIB
        yield lower_is_better(case, "16 bytes a parameter", "GiB resident", resident, 16 * here.size / GIB)
        for count in (1, 4):
            rows = list(race(case, count, there, ours, ids, fsdp))
            yield from rows
            link = rates["both"] / 2
            compute, traffic = count * per_step / rows[0].theirs, streamer.host_bytes / link
            exposed = (streamer.host_bytes - streamer.ring_bytes) / link - forward if ours.optimizer.clip else 0.0
            if streamer.optimistic:
                exposed = 1.2 * streamer.host_bytes / link - micro
            bound = max(traffic, compute + max(0.0, exposed))
            spent = count * per_step / rows[0].ours
            yield lower_is_better(rows[0].case, "bound of link and compute", "s a step", spent, bound)
    yield from update_alone(ours, rates)
    ours.close()
    del ours, streamer
    clean()
    half = Ours(here, clip=1.0, guard=True, moments=torch.bfloat16)
    for count in (1, 4):
        yield from race("clipping, 4 buckets, bf16 moments", count, there, half, ids, {})


def race(case: str, count: int, there: OnDevice, ours: Ours, ids: Tensor, fsdp: dict[str, float]) -> Iterator[Row]:
    """Both in turn; rows for the shares of speed."""
    there.clip = 1.0 if ours.optimizer.clip else 0.0
    times: dict[str, list[float]] = {"theirs": [], "ours": []}
    for _ in range(2):
        times["theirs"].append(timed(lambda: there.run(ids, count), 3 if count == 1 else 1))
        times["ours"].append(timed(lambda: ours.run(ids, count), 4 if count == 1 else 2, 2 if count == 1 else 1))
        ours.close()
    mine, theirs = median(times["ours"]), median(times["theirs"])
    spread = max((max(t) - min(t)) / min(t) for t in times.values())
    rate = count * ids.numel()
    name = f"{case}, {rate // 1024} k tokens" if rate >= 1024 else f"{case}, {rate} tokens"
    log(f"{name}: {mine:.3f} s, all on the GPU {theirs:.3f} s: {theirs / mine:.1%}")
    yield Row(name, "all on the GPU", "tokens/s", rate / mine, rate / theirs, theirs / mine, spread)
    if str(count) in fsdp:
        other = fsdp[str(count)]
        yield Row(name, "FSDP2 CPUOffloadPolicy", "tokens/s", rate / mine, rate / other, other / mine, spread)


def shorten_ring(ours: Ours, slots: int = 4) -> None:
    """The same optimizer with fewer slots: host memory takes long to make ready, so it is made once."""
    streamer = ours.optimizer.streamer
    streamer.reload()
    size = streamer._free[0][0].numel()
    while len(streamer._free) > slots:
        streamer._free.pop()
    streamer.ring_bytes = size * len(streamer._free)


def set_rollback(ours: Ours, room: int, clip: float = 1.0) -> None:
    """The same optimizer with its spare places in use (`room` bytes) or not (0), and another threshold."""
    optimizer, streamer = ours.optimizer, ours.optimizer.streamer
    streamer.reload()
    optimizer.clip, streamer.rollback_bytes, streamer.optimistic, streamer._late = clip, room, room > 0, None
    streamer._unfine.clear()
    streamer._learned = streamer.buckets[::-1] if room else list(streamer.buckets)
    streamer._order = streamer._next_order()
    optimizer._register()


def drop_norm(ours: Ours) -> None:
    """The same optimizer without clipping and guard."""
    set_rollback(ours, 0, 0.0)
    ours.optimizer.guard, streamer = False, ours.optimizer.streamer
    streamer._order = streamer._learned = streamer.buckets[::-1]
    ours.optimizer._register()


def update_alone(ours: Ours, rates: dict[str, float]) -> Iterator[Row]:
    """Steps with nothing between them: how much of the duplex link is used."""
    optimizer = ours.optimizer
    grads = {p: torch.zeros_like(p) for p in ours.model.parameters()}

    def run() -> None:
        for p, g in grads.items():
            p.grad = g
        optimizer.step()

    ours.close()
    run()
    ours.close()
    start = time.perf_counter()
    for _ in range(3):
        run()
    ours.close()
    seconds = (time.perf_counter() - start) / 3
    optimizer.zero_grad()
    moved = 2 * optimizer.streamer.host_bytes / seconds
    log(f"update alone: {seconds:.3f} s, {moved / 1e9:.1f} GB/s of {rates['both'] / 1e9:.1f}")
    yield Row("update alone", "duplex link", "GB/s", moved / 1e9, rates["both"] / 1e9, moved / rates["both"])


# ---- peers and other processes ----


def peer(name: str, quick: bool) -> dict[str, float]:
    """Run a function of this file in a process of its own; it prints one line of JSON last."""
    env = os.environ | {"PEER": name}
    command = [sys.executable, "-m", "benchmarks.offload", *(["--quick"] if quick else [])]
    out = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    if out.returncode:
        log(f"{name} failed: {out.stderr[-1500:]}")
        return {}
    log(f"{name}: {out.stdout.strip().splitlines()[-1]}")
    return json.loads(out.stdout.strip().splitlines()[-1])


def fsdp_offload(quick: bool) -> None:
    """FSDP2 with CPUOffloadPolicy on one rank: weights and optimizer on the host, torch's fused CPU AdamW."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("cpu:gloo,cuda:nccl")
    model = Model(SMALL if quick else SHAPE)
    rotary = model.rotary
    model.float().to("cpu")
    assert rotary is not None
    rotary.materialize(DEVICE, torch.bfloat16)
    options: dict[str, Any] = {
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    rotary.materialize(DEVICE, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ids = tokens(SMALL if quick else SHAPE)

    def run(count: int) -> None:
        for i in range(count):
            model.set_requires_gradient_sync(i == count - 1)  # type: ignore[operator]
            (model(ids) / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    print(json.dumps({"1": timed(lambda: run(1), 2, 2), "4": timed(lambda: run(4), 1, 0)}))


# ---- the largest model ----


def largest_rows(quick: bool) -> Iterator[Row]:
    """8 B with all state on the GPU; then what neither the GPU nor the host could hold alone."""
    wide = replace(SHAPE, hidden=5120, heads=40, kv_heads=8, ffn=13824)
    clipped: dict[str, Any] = {"clip": 1.0, "guard": True}
    consumed: dict[str, Any] = {"consume": True}
    tries: dict[str, Any] = {"clip": 1e9, "guard": True, "rollback": 1 << 62}
    cases: dict[str, tuple[ModelConfig, str, dict[str, Any]]] = {
        "8 B, on the GPU": (replace(wide, layers=28), "device", clipped),
        "14 B, auto": (replace(wide, layers=50), "auto", clipped),
        "14 B, auto, may be rolled back, norm fine": (replace(wide, layers=50), "auto", tries),
        "16 B, auto": (replace(wide, layers=57), "auto", clipped),
        "17.6 B, auto": (replace(wide, layers=63), "auto", clipped),
        "17.6 B, auto, consumed gradients": (replace(wide, layers=63), "auto", consumed),
        "20 B, auto, consumed gradients": (replace(wide, layers=72), "auto", consumed),
        "30 B, auto, consumed gradients, bf16 moments": (
            replace(wide, layers=108), "auto", {**consumed, "moments": torch.bfloat16},
        ),
    }  # fmt: skip
    if quick:
        cases = {
            "small": (SMALL, "device", clipped),
            "small, auto": (SMALL, "auto", clipped),
            "small, may be rolled back, norm fine": (SMALL, "host", tries),
            "small, consumed gradients": (SMALL, "host", consumed),
        }
    found: dict[str, dict[int, float]] = {}
    for name, (shape, where, options) in cases.items():
        try:
            found[name] = train_large(name, shape, where, options)
        except (HostMemoryError, torch.OutOfMemoryError) as e:
            log(f"{name}: {type(e).__name__}: {e}")
    (small, those), *others = found.items()
    for large, these in others:
        for count, b in these.items():
            a, k = those[min(count, 2)], count * SEQUENCES * SHAPE.seq_len // 1024
            yield Row(f"{large}, {k} k tokens", small, "TFLOP/s of 6 N T", b / 1e12, a / 1e12, b / a)


def train_large(name: str, shape: ModelConfig, placement: Any, options: dict[str, Any]) -> dict[int, float]:
    """FLOP/s of 6 N T with two micro-batches and with one; the device holds as much state as a step without it leaves free.

    With updates that may be rolled back also with 32, half a million tokens; gradients are consumed in one micro-batch only.
    """
    rates = {}
    consume, tries = options.get("consume", False), "rollback" in options
    for count in (1,) if consume else (32, 2, 1) if tries and DEVICE.type == "cuda" else (2, 1):
        clean()
        model, ids, losses = Model(shape), tokens(shape), []
        room = left_free(model, ids, min(count, 2), consume)
        state = 10 * model.size - (room if placement == "auto" else 0)
        made = {**options, "rollback": int(0.85 * available_bytes()) - state} if tries else options
        ours = Ours(model, lr=1e-5, placement=placement, device_bytes=room, ring=8, **made)
        streamer = ours.optimizer.streamer
        there = f"{streamer.host_bytes / GIB:.1f} + {streamer.rollback_bytes / GIB:.1f} GiB on the host"
        log(f"{name}: {model.size / 1e9:.2f} B, {there}, {streamer.device_bytes / GIB:.1f} on the device")
        steps = 1 if count > 2 else 2
        seconds = timed(partial(train_once, ours, ids, count, losses), steps, steps)
        ours.close()
        rates[count] = 6 * model.size * ids.numel() * count / seconds
        log(
            f"{name}: {seconds:.2f} s for {count} x {ids.numel()} tokens, {count * ids.numel() / seconds:.0f} tokens/s, "
            f"{rates[count] / 1e12:.0f} TFLOP/s, peak {peak() / GIB:.1f} GiB, losses {[round(float(x), 3) for x in losses]}"
        )
        del model, ours
    return rates


def train_once(ours: Ours, ids: Tensor, count: int, losses: list[Tensor]) -> None:
    for i in range(count):
        loss = ours.model(ids)
        with ours.optimizer.last_backward() if i == count - 1 else nullcontext():
            (loss / count).backward()
    losses.append(loss.detach())
    ours.optimizer.step()
    ours.optimizer.zero_grad()


def left_free(model: Model, ids: Tensor, count: int, consume: bool) -> int:
    """Bytes that a step leaves free at its peak before the update, less the optimizer's ring of eight buckets and 2 GiB.

    `consume`: gradients are dropped as soon as they are there; the largest one is left room for, which waits for its update.
    """
    if DEVICE.type == "cpu":
        return 2 * GIB
    before, hooks = allocated(), []
    if consume:
        hooks = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in model.parameters()]
    for _ in range(count):
        model(ids).backward()
    rises = peak() - before
    if consume:
        rises += max(p.nbytes for p in model.parameters())
    for hook in hooks:
        hook.remove()
    for p in model.parameters():
        p.grad = None
    clean()
    return torch.cuda.mem_get_info()[0] - rises - 8 * 12 * (1 << 24) - 2 * GIB


# ---- activations ----


def activation_rows(quick: bool) -> Iterator[Row]:
    """Peak and time of a step (forward and backward) with activations kept, recomputed, on the host, and both."""
    for hidden, layers in ((4096, 8), (8192, 4)) if not quick else ((2 * SMALL.hidden, 4),):
        found = activations_at(hidden, layers, quick)
        clean()
        for name in ("on the host", "on the host, recomputed"):
            for other in ("kept", "recomputed"):
                case, (mine, theirs) = f"hidden {hidden}, {name}", (found[name], found[other])
                yield lower_is_better(case, other, "s a step", mine[0], theirs[0])
                yield lower_is_better(case, other, "GiB at the peak", mine[1], theirs[1])


def activations_at(hidden: int, layers: int, quick: bool) -> dict[str, tuple[float, float]]:
    base_shape = SMALL if quick else SHAPE
    shape = replace(
        base_shape, hidden=hidden, layers=layers, heads=max(8, hidden // 128), ffn=hidden * 7 // 2, vocab=8192
    )
    model, ids, found = Model(shape), tokens(shape), {}
    offload = ActivationOffload(DEVICE, budget=(1 if quick else 60) * GIB, stash=GIB, ahead=GIB)
    stay = [*model.parameters(), *model.buffers()]

    def run(hosted: bool) -> None:
        with offload.saving(stay) if hosted else nullcontext():
            x = model_without_head(model, ids)
        (model.head(x, ids) / ids.numel()).backward()
        for p in model.parameters():
            p.grad = None

    for name, recompute, hosted in (
        ("kept", False, False),
        ("recomputed", True, False),
        ("on the host", False, True),
        ("on the host, recomputed", True, True),
    ):
        model.recompute = recompute
        run(hosted)
        run(hosted)
        synchronize()
        base = allocated()
        clean()
        seconds = timed(partial(run, hosted), 3)
        found[name] = seconds, (peak() - base) / GIB
        log(
            f"hidden {hidden}, {name}: {seconds:.3f} s, peak {found[name][1]:.1f} GiB, {offload.taken / GIB:.1f} on the host"
        )
    return found


def model_without_head(model: Model, ids: Tensor) -> Tensor:
    x = model.embed(ids)
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False) if model.recompute else block(x)
    return x


SECTIONS = {
    "optimizer state on the host": optimizer_rows,
    "largest model": largest_rows,
    "activations on the host": activation_rows,
}


if __name__ == "__main__":
    main()
