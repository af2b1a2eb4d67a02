"""StreamedAdamW is torch's fused AdamW on an fp32 master, bit for bit. FOURFOLD_TEST_DEVICE=cuda runs it there."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from fourfold import StreamedAdamW
from fourfold.errors import ConfigError, HostMemoryError
from fourfold.kernels import have_kernels
from fourfold.offload import host
from fourfold.offload.queues import DeviceQueues, make_queues
from fourfold.offload.split import join, split, square_sum
from tests.helpers import rounded_half_up
from tests.offload.threads import CallerQueue, ThreadQueue, slow_queues

torch.set_num_threads(1)
DEVICE = torch.device(os.environ.get("FOURFOLD_TEST_DEVICE", "cpu"))


class Net(nn.Module):
    """Odd sizes, a tied weight, a frozen one, an unused one, and one that only the model itself uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 37)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(37, 101), nn.GELU(), nn.Linear(101, 37)) for _ in range(3))
        self.norm = nn.LayerNorm(37)
        self.scale = nn.Parameter(torch.ones(37))
        self.outer = nn.Linear(37, 37)  # used without being called
        self.unused = nn.Linear(5, 7)
        self.frozen = nn.Linear(37, 37)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(37, 29, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scale
        for layer in self.layers:
            x = x + layer(x)
        x = F.linear(self.frozen(self.norm(x)), self.outer.weight)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


def make_net(dtype: torch.dtype) -> Net:
    torch.manual_seed(0)
    return Net().to(DEVICE, dtype)


def groups_of(params: list[Tensor]) -> list[dict[str, Any]]:
    params = [p for p in params if p.requires_grad]
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.2},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0, "betas": (0.8, 0.9), "lr": 2e-3},
    ]


def batches(steps: int, seed: int = 1) -> Iterator[Tensor]:
    made = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randint(0, 29, (4, 6), generator=made).to(DEVICE)


class Reference:
    """An fp32 (or wider) master of a net's parameters with torch's AdamW, fed with the gradients of the net under test."""

    def __init__(self, net: Net, clip: float):
        self.net, self.clip, self.norm, self.guard = net, clip, torch.zeros(()), False
        wide = [p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in net.parameters()]
        self.master = dict(zip(net.parameters(), wide, strict=True))
        for p, q in self.master.items():
            q.requires_grad_(p.requires_grad)
        self.optimizer = torch.optim.AdamW(groups_of(wide), lr=5e-3, fused=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)

    def step(self) -> None:
        for p, q in self.master.items():
            q.grad = None if p.grad is None else p.grad.to(q.dtype, copy=True)
        if self.clip:
            self.norm = nn.utils.clip_grad_norm_(self.master.values(), self.clip)
        if not self.guard or all(q.grad.isfinite().all() for q in self.master.values() if q.grad is not None):
            self.optimizer.step()
        self.schedule.step()


def assert_same(reference: Reference, optimizer: StreamedAdamW) -> None:
    for p, q in reference.master.items():
        if not p.requires_grad:
            continue
        assert torch.equal(optimizer.master(p).to(DEVICE), q)
        if p.dtype == torch.bfloat16:
            assert torch.equal(p.detach(), rounded_half_up(q.detach()))
        if q in reference.optimizer.state:
            for kind in ("step", "exp_avg", "exp_avg_sq"):
                assert torch.equal(optimizer.state[p][kind].to(DEVICE), reference.optimizer.state[q][kind]), kind


def train(
    dtype: torch.dtype = torch.bfloat16,
    clip: float = 0.0,
    *,
    steps: int = 20,
    accumulate: int = 1,
    early: bool = False,
    overlap: bool = True,
    queues: DeviceQueues | None = None,
    check: int = 5,
    scale: Callable[[int], float] = lambda step: 1.0,
    each: Callable[[int, StreamedAdamW], None] = lambda step, optimizer: None,
    **options: Any,
) -> tuple[Reference, StreamedAdamW]:
    """Train a net with the streamed optimizer, and a reference; they are compared every `check` steps.

    The loss of a step is multiplied by `scale(step)`; `each` is called after it.
    """
    net = make_net(dtype)
    optimizer = StreamedAdamW(
        groups_of(list(net.parameters())),
        lr=5e-3,
        clip=clip,
        overlap=net if overlap else None,
        **{"bucket": 2048, "ring": 2, "queues": queues} | options,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    reference = Reference(net, clip)
    reference.guard = options.get("guard", False)
    data = batches(steps * accumulate)
    for step in range(1, steps + 1):
        for i in range(accumulate):
            loss = net(next(data)) / accumulate * scale(step)
            with optimizer.last_backward() if early and i == accumulate - 1 else nullcontext():
                loss.backward()
        reference.step()
        optimizer.step()
        schedule.step()
        if clip:
            assert torch.equal(optimizer.norm, reference.norm) or not reference.norm.isfinite()
        optimizer.zero_grad()
        each(step, optimizer)
        if step % check == 0 or step == steps:
            assert_same(reference, optimizer)
    return reference, optimizer


@pytest.mark.parametrize("clip", [0.0, 0.05, 1e6], ids=["off", "clips", "above"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=["bf16", "fp32", "fp64"])
def test_a_hundred_steps_have_the_bits_of_adamw(dtype: torch.dtype, clip: float) -> None:
    reference, optimizer = train(dtype, clip, steps=100, check=25)
    assert len(optimizer.streamer.buckets) > 5
    moved = [(p - q).abs().max() for p, q in zip(make_net(dtype).parameters(), reference.master.values(), strict=True)]
    assert max(moved) > 0.01


def test_clipping_exactly_at_the_threshold() -> None:
    net = make_net(torch.float32)
    net(next(batches(1))).backward()
    norm = float(nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None]))
    train(torch.float32, norm, steps=3, check=1)


@pytest.mark.parametrize("bucket", [64, 1000, 4096, 1 << 20])
@pytest.mark.parametrize("ring", [1, 3, 100])
def test_any_bucket_and_ring(bucket: int, ring: int) -> None:
    train(clip=0.05, bucket=bucket, ring=ring, steps=4)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("options", [{"accumulate": 3}, {"overlap": False}, {"placement": "device"}, {"guard": True}])
def test_every_way_of_running_it(options: dict[str, Any], early: bool) -> None:
    train(early=early, steps=6, **options)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_time_changes_nothing(dtype: torch.dtype, clip: float, early: bool, seed: int) -> None:
    """Every queue has random delays."""
    train(dtype, clip, early=early, queues=slow_queues(seed, DEVICE), steps=8, check=8, staging=seed * 60000)


@pytest.mark.parametrize("queue", ["copy_in", "update", "copy_out", "compute"])
def test_a_queue_that_does_not_wait_is_detected(queue: str) -> None:
    """The test above can fail: without the waits of any one queue, results differ."""
    with pytest.raises((AssertionError, RuntimeError)):  # autograd also detects weights that change in place
        for seed in range(5):
            train(clip=0.05, queues=slow_queues(seed, DEVICE, 3e-3, careless=queue), steps=8, check=8)


def test_nothing_outlives_the_optimizer() -> None:
    """Its memory is given back with it, and with the model; what it left in the model does nothing."""
    net = make_net(torch.float32)
    optimizer = StreamedAdamW(groups_of(list(net.parameters())), overlap=net)
    with optimizer.last_backward():
        net(next(batches(1))).backward()
    optimizer.step()
    there = weakref.ref(optimizer.streamer)
    del optimizer
    gc.collect()
    assert there() is None
    net(next(batches(1))).backward()
    assert not any(m._forward_pre_hooks for m in net.modules())
    model = weakref.ref(net)
    del net
    gc.collect()
    assert model() is None


def test_updates_start_in_the_backward() -> None:
    """Without clipping, all buckets whose parameters are used are updated before `step` is called."""
    net = make_net(torch.float32)
    net.unused.requires_grad_(False)
    net.outer.bias.requires_grad_(False)
    optimizer = StreamedAdamW(groups_of(list(net.parameters())), overlap=net, bucket=2048)
    for step, ids in enumerate(batches(3)):
        loss = net(ids)
        with optimizer.last_backward():
            loss.backward()
        done = sum(b.pending for b in optimizer.streamer.buckets)
        assert step == 0 or done == len(optimizer.streamer.buckets)  # the first step learns the order
        optimizer.step()
        optimizer.zero_grad()


def test_layers_wait_for_their_own_weights_only() -> None:
    net = make_net(torch.bfloat16)
    optimizer = StreamedAdamW(groups_of(list(net.parameters())), overlap=net, bucket=1024)
    for ids in batches(2):
        net(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    waiting = {p for p, block in optimizer._blocks.items() if any(b.pending for b in block.buckets)}
    assert net.layers[1][0].weight in waiting
    assert net.embed.weight in waiting
    net.embed(torch.zeros(1, dtype=torch.long, device=DEVICE))
    waiting = {p for p, block in optimizer._blocks.items() if any(b.pending for b in block.buckets)}
    assert net.layers[1][0].weight in waiting
    assert net.embed.weight not in waiting
    net.state_dict()
    assert not any(b.pending for b in optimizer.streamer.buckets)


@pytest.mark.parametrize("guard", [False, True])
def test_a_step_that_is_not_finite(guard: bool) -> None:
    """With the guard nothing changes, counters included; without it everything is NaN, as in torch."""
    net = make_net(torch.bfloat16)
    optimizer = StreamedAdamW(groups_of(list(net.parameters())), clip=1.0, guard=guard, overlap=net, bucket=1024)
    before: list[Tensor] = []
    for step, ids in enumerate(batches(3)):
        if step == 2:
            before = [p.detach().clone() for p in net.parameters()] + [
                optimizer.master(p) for p in net.parameters() if p.requires_grad
            ]
            counts = [optimizer.state[p]["step"].clone() for p in net.parameters() if p.requires_grad]
        net(ids).backward()
        if step == 2:
            net.norm.weight.grad[3] = torch.inf
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    after = [p.detach() for p in net.parameters()]
    after += [optimizer.master(p) for p in net.parameters() if p.requires_grad]
    same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert all(same) if guard else not all(same)
    if guard:
        assert counts == [optimizer.state[p]["step"] for p in net.parameters() if p.requires_grad]
    else:
        assert net.norm.weight[3].isnan()


def continue_both(ours: StreamedAdamW, net: Net, theirs: Reference) -> None:
    for ids in batches(5, seed=9):
        net(ids).backward()
        for mine, other in zip(ours.param_groups, theirs.optimizer.param_groups, strict=True):
            mine["lr"] = other["lr"]
        theirs.step()
        ours.step()
        ours.zero_grad()
    assert_same(theirs, ours)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_state_goes_to_adamw_and_back(dtype: torch.dtype) -> None:
    first, optimizer = train(dtype, 0.05, steps=10, bucket=1024)
    saved = optimizer.state_dict()
    saved = {k: (v if k == "param_groups" else {i: dict(s) for i, s in v.items()}) for k, v in saved.items()}

    reference = Reference(first.net, 0.05)  # plain AdamW, a master in fp32
    with torch.no_grad():
        for q, state in zip(
            [q for g in reference.optimizer.param_groups for q in g["params"]], saved["state"].values(), strict=True
        ):
            q.copy_(state.get("master", q))
    reference.optimizer.load_state_dict(saved)
    assert reference.optimizer.param_groups[0]["fused"]
    assert_same(reference, optimizer)

    other = make_net(dtype)
    with torch.no_grad():
        for p, q in zip(other.parameters(), first.net.parameters(), strict=True):
            p.copy_(q)
    again = StreamedAdamW(groups_of(list(other.parameters())), clip=0.05, overlap=other, bucket=4096, ring=1)
    back = reference.optimizer.state_dict()
    for state in back["state"].values():
        assert ("master" in state) == (dtype == torch.bfloat16)
    again.load_state_dict(back)
    moved = Reference(other, 0.05)
    for p, q in zip(moved.master.values(), reference.master.values(), strict=True):
        p.data.copy_(q)
    moved.optimizer.load_state_dict(back)
    continue_both(again, other, moved)


def test_loading_replaces_what_was_fetched_ahead() -> None:
    reference, optimizer = train(clip=0.05, steps=4)
    saved = optimizer.state_dict()
    kept = {i: {k: v.clone() for k, v in s.items()} for i, s in saved["state"].items()}
    net = reference.net
    for ids in batches(3, seed=5):
        net(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.load_state_dict({"state": kept, "param_groups": saved["param_groups"]})
    assert_same(reference, optimizer)
    continue_both(optimizer, net, reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dcp_state_dict_both_ways(dtype: torch.dtype) -> None:
    net = make_net(dtype)
    optimizer = StreamedAdamW(groups_of(list(net.parameters())), lr=5e-3, bucket=1024)
    for ids in batches(3):
        net(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = get_optimizer_state_dict(net, optimizer)
    assert saved["state"]["layers.1.0.weight"]["exp_avg"].shape == (101, 37)
    other = make_net(dtype)
    fresh = StreamedAdamW(groups_of(list(other.parameters())), lr=5e-3, bucket=4096)
    set_optimizer_state_dict(other, fresh, saved)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        if p.requires_grad:
            assert torch.equal(optimizer.master(p), fresh.master(q)) or dtype == torch.float32
            assert torch.equal(optimizer.state[p]["exp_avg_sq"], fresh.state[q]["exp_avg_sq"])
    plain_net = make_net(torch.float32)
    plain = torch.optim.AdamW(groups_of(list(plain_net.parameters())), lr=5e-3, fused=True)
    set_optimizer_state_dict(plain_net, plain, saved)
    assert torch.equal(
        plain.state[plain_net.norm.weight]["exp_avg"].cpu(), saved["state"]["norm.weight"]["exp_avg"].float()
    )


def test_bf16_moments_stay_near() -> None:
    losses, sizes = [], []
    for moments in (torch.float32, torch.bfloat16):
        net = make_net(torch.bfloat16)
        optimizer = StreamedAdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95), moments=moments, bucket=2048)
        sizes.append(optimizer.streamer.host_bytes)
        row = []
        for ids in batches(60):
            loss = net(ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            row.append(float(loss.detach()))
        losses.append(sum(row) / 60)
    assert sizes[1] * 10 == sizes[0] * 6
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[1] != losses[0]


def test_groups_can_be_added() -> None:
    net = make_net(torch.bfloat16)
    decayed, plain = groups_of(list(net.parameters()))
    optimizer = StreamedAdamW([decayed], lr=5e-3, bucket=1024)
    reference = Reference(net, 0.0)
    reference.optimizer.param_groups[1]["lr"] = 0.0
    for step, ids in enumerate(batches(6)):
        net(ids).backward()
        if step == 3:
            optimizer.add_param_group(plain)
            kept = reference.optimizer
            reference.optimizer = torch.optim.AdamW(groups_of(list(reference.master.values())), lr=5e-3, fused=True)
            reference.optimizer.state.update({q: s for q, s in kept.state.items() if q.ndim > 1})
            reference.schedule = torch.optim.lr_scheduler.ConstantLR(reference.optimizer, 1.0)
        elif step < 3:
            reference.optimizer.param_groups[0]["lr"], reference.optimizer.param_groups[1]["weight_decay"] = 5e-3, 0.0
            reference.optimizer.param_groups[1]["lr"] = 0.0
        reference.step()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(reference, optimizer)


def test_zeroed_gradients_are_zeroed_after_the_update() -> None:
    net = make_net(torch.bfloat16)
    queues = slow_queues(0, DEVICE)
    optimizer = StreamedAdamW(groups_of(list(net.parameters())), lr=5e-3, overlap=net, bucket=2048, queues=queues)
    reference = Reference(net, 0.0)
    for ids in batches(5):
        net(ids).backward()
        reference.step()
        reference.schedule.base_lrs = [5e-3, 2e-3]
        for mine, theirs in zip(optimizer.param_groups, reference.optimizer.param_groups, strict=True):
            mine["lr"] = theirs["initial_lr"]
            theirs["lr"] = theirs["initial_lr"]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        assert grads
        assert not any(grad.any() for grad in grads)


# ---- memory ----


def test_bytes_are_those_of_the_formula() -> None:
    """AxoNN: 20 bytes a parameter become 4 and a few buckets. Ours: 10 on the host, (10 r + 8) a bucket element here.

    Where one kernel makes the update (CUDA), 10 r.
    """
    n, bucket, ring = 64 * 1000, 6400, 3
    weight = nn.Parameter(torch.zeros(n, dtype=torch.bfloat16, device=DEVICE))
    streamer = StreamedAdamW([weight], bucket=bucket, ring=ring).streamer
    assert streamer.host_bytes == 10 * n
    assert streamer.device_bytes == (10 * ring + (0 if have_kernels(weight) else 8)) * bucket
    held = [slot for slot, _ in streamer._free] + list(streamer._scratch.values())
    assert sum(t.untyped_storage().nbytes() for t in held) == streamer.device_bytes
    assert (
        StreamedAdamW([weight], bucket=bucket, staging=200 * 1024).streamer.ring_bytes == 3 * 10 * bucket + 10 * bucket
    )
    assert StreamedAdamW([weight], placement="device").streamer.host_bytes == 0


def test_auto_keeps_the_first_layers_on_the_device() -> None:
    net = make_net(torch.bfloat16)
    whole = StreamedAdamW(groups_of(list(net.parameters())), overlap=net, bucket=1024)
    room = whole.streamer.host_bytes // 2
    train(clip=0.05, steps=6, placement="auto", device_bytes=room, bucket=1024)
    optimizer = StreamedAdamW(
        groups_of(list(net.parameters())), overlap=net, placement="auto", device_bytes=room, bucket=1024
    )
    homes = [block.region.home for block in optimizer._blocks.values()]
    assert homes[0] == "device"
    assert "host" in homes
    here = sum(r.bytes for r in optimizer.streamer.regions if r.home == "device")
    assert 0.8 * room < here <= room
    assert optimizer.streamer.host_bytes + here == whole.streamer.host_bytes


def test_too_little_host_memory_is_said_before_anything_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("allocated")

    monkeypatch.setattr("fourfold.offload.buckets.host_memory", never)
    weight = nn.Parameter(torch.zeros(1 << 20, dtype=torch.bfloat16))
    with pytest.raises(
        HostMemoryError, match=r"needs 10.00 MiB of host memory, but 1.00 MiB are available; keep at least 9"
    ):
        StreamedAdamW([weight], host_bytes=1 << 20)
    monkeypatch.setattr(host, "available_bytes", lambda: 100)
    with pytest.raises(HostMemoryError, match="100 B are available"):
        StreamedAdamW([weight])


def test_host_memory_is_not_rounded_up() -> None:
    assert host.host_memory(3 * 4096 + 17, torch.device("cpu")).numel() == 3 * 4096 + 17
    assert host.available_bytes() > 1 << 20


# ---- masters ----


def test_split_masters_lose_nothing() -> None:
    """All exponents with random and special mantissas: ties, subnormals, zeros, infinities, overflow on rounding up."""
    special = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x18000, 0x7F8000, 0x7FFFFF])
    mantissas = torch.cat([special, torch.randint(0, 1 << 23, (500,), generator=torch.Generator().manual_seed(0))])
    bits = (torch.arange(512)[:, None] << 23 | mantissas).flatten().to(torch.int64)
    master = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32).to(DEVICE)
    weight, low = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    split(master.clone(), weight, low)
    back = torch.empty_like(master)
    join(weight, low, back)
    finite = ~master.isnan()
    assert torch.equal(back.view(torch.int32)[finite], master.view(torch.int32)[finite])
    assert back[~finite].isnan().all()
    assert weight[~finite].isnan().all()
    assert torch.equal(weight[finite], rounded_half_up(master[finite]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_squares_are_summed_in_fp64(dtype: torch.dtype) -> None:
    """Also those that fp32 could not hold, and any number of them."""
    for size in (1, 2048, 5001):
        x = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(DEVICE, dtype) * 1e-30
        expected = float(sum(v * v for v in x.double().tolist()))
        assert float(square_sum(x)) == pytest.approx(expected, rel=1e-12)
    assert float(square_sum(torch.zeros(0, device=DEVICE, dtype=dtype))) == 0


# ---- errors ----


@pytest.mark.parametrize(
    ("options", "message"),
    [({"clip": -1.0}, "must not be negative"), ({"moments": torch.float16}, "torch.float32 or torch.bfloat16")],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StreamedAdamW([nn.Parameter(torch.zeros(4))], **options)


def test_wrong_parameters() -> None:
    with pytest.raises(ConfigError, match=r"torch.float16.*model.to\(torch.bfloat16\)"):
        StreamedAdamW([nn.Parameter(torch.zeros(4, dtype=torch.float16))])
    with pytest.raises(ConfigError, match="no parameter"):
        StreamedAdamW([nn.Parameter(torch.zeros(4), requires_grad=False)])


def test_parameters_in_another_order_of_memory() -> None:
    weight = nn.Parameter(torch.randn(8, 3, 5, 5, device=DEVICE).to(memory_format=torch.channels_last))
    twin = nn.Parameter(weight.detach().clone())
    ours, theirs = StreamedAdamW([weight], bucket=64), torch.optim.AdamW([twin], fused=True)
    for _ in range(3):
        weight.grad = torch.randn(8, 3, 5, 5, device=DEVICE)
        twin.grad = weight.grad.clone(memory_format=torch.channels_last)
        ours.step()
        theirs.step()
    assert ours.state[weight]["exp_avg"].stride() == weight.stride()
    assert torch.equal(weight, twin)


def test_cpu_queues_run_work_at_once() -> None:
    queues, done = make_queues(torch.device("cpu")), []
    queues.copy_in.submit(lambda: done.append(1))
    queues.copy_out.wait(queues.copy_in.record())
    queues.synchronize()
    assert done == [1]


def test_the_documentation_runs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "offload.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, "docs/offload.md", "exec"), {})


def test_a_slot_is_written_after_what_has_yet_to_read_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator gives a slot memory that was freed, while work that was issued before the free still reads it."""
    memory, make, seen = torch.ones(1 << 16, dtype=torch.uint8), torch.empty, list[bool]()
    compute = ThreadQueue(0, 0.0)
    queues = dataclasses.replace(slow_queues(0, torch.device("cpu")), compute=compute)

    def reused(*size: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        if dtype == torch.uint8 and "pin_memory" not in options:
            return memory[: size[0]]
        return make(*size, dtype=dtype, **options)

    compute.submit(lambda: time.sleep(0.2))
    compute.submit(lambda: seen.append(bool((memory == 1).all())))
    weight = nn.Parameter(torch.zeros(64))
    monkeypatch.setattr(torch, "empty", reused)
    optimizer = StreamedAdamW([weight], queues=queues, ring=1)
    monkeypatch.undo()
    weight.grad = torch.ones(64)
    optimizer.step()
    queues.synchronize()
    compute.synchronize()
    assert seen == [True]


def test_what_is_under_way_ends_before_its_memory_is_freed() -> None:
    """The optimizer is dropped after a step: its weights are final, and its workspace is used no more."""
    net, ended = make_net(torch.bfloat16), list[bool]()

    class Queue(CallerQueue):
        def synchronize(self) -> None:
            ended.append(all(memory() is not None for memory in held))

    optimizer = StreamedAdamW(net.parameters(), overlap=net, queues=DeviceQueues(*(Queue() for _ in range(4))))
    net(next(batches(1))).backward()
    optimizer.step()
    streamer = optimizer.streamer
    held = [weakref.ref(t) for t in streamer._scratch.values()]
    assert not ended
    del optimizer, streamer
    assert ended == [True] * 3
    assert not any(memory() is not None for memory in held)


def test_host_memory_is_unregistered_after_the_copies_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    class Runtime:
        def cudaHostUnregister(self, address: int) -> None:
            done.append(address)

    monkeypatch.setattr(host, "_register", lambda memory, device: (Runtime(), memory.data_ptr()))
    monkeypatch.setattr(torch.cuda, "synchronize", done.append)
    device = torch.device("cuda", 0)
    memory = host.host_memory(4096, device)
    address = memory.data_ptr()
    del memory
    assert done == [device, address]
