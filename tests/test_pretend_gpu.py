"""The code of GPUs, on a pretended one: nothing is mixed that a GPU cannot mix, nothing is read before the device has reached it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.testing import pretend_gpu

pytestmark = [
    pytest.mark.skipif(not pretend_gpu.available(), reason="needs g++ and a torch without CUDA"),
    pytest.mark.timeout(400),  # the first one compiles
]
ROOT = Path(__file__).parents[1]


def pretended(*arguments: str) -> str:
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    command = [sys.executable, "-m", "fourfold.testing.pretend_gpu", *arguments]
    out = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    return out.stdout


WRONG = """
import torch
x, host = torch.ones(4, 4, device="cuda"), torch.ones(4, 4)
for mixed in (lambda: x + host, lambda: x @ host, lambda: torch.cat((x, host)), lambda: x.copy_(host) is None):
    try:
        print(mixed())
    except RuntimeError:
        print("refused")
there = torch.zeros(4, 4, pin_memory=True).copy_(x, non_blocking=True)
first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
first.record()
print(there.isnan().all().item(), first.query())
second.record()
try:
    first.elapsed_time(second)
except ValueError:
    print("too early")
second.synchronize()
print(there.sum().item(), first.query(), first.elapsed_time(second) >= 0)
print(torch.cuda.current_stream().query(), torch.empty(3, device="cuda").isnan().all().item())
"""


def test_it_refuses_what_a_gpu_refuses(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    found = pretended(str(tmp_path / "wrong.py")).splitlines()
    assert found == ["refused"] * 3 + ["False", "True False", "too early", "16.0 True True", "False True"]


ORDER = """
import torch
from torch import nn
from fourfold import StreamedAdamW
from fourfold.offload.activations import ActivationOffload
from fourfold.offload.queues import DeviceQueues
from fourfold.offload.streamer import Streamer

torch.set_num_threads(1)
main, side = torch.cuda.current_stream(), torch.cuda.Stream()

def attempt(work, *options):
    try:
        work(*options)
        print("fine")
    except RuntimeError as e:
        print(*(words for words in ("were allocated", "reads", "writes", "were freed") if words in str(e)))
    torch.cuda.synchronize()

def copied(before, after, record=False):
    x = torch.empty(8, device="cuda")
    if before:
        side.wait_stream(main)
    with torch.cuda.stream(side):
        x.zero_()
    if after:
        main.wait_stream(side)
    if record:
        x.record_stream(side)
    del x
    torch.zeros((), device="cuda").add_(1)

def read():
    x = torch.ones(8, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        x.zero_()
    try:
        x + 1
    finally:
        main.wait_stream(side)

def train(drop=False, clip=1.0, rollback=0):
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to("cuda", torch.bfloat16)
    optimizer = StreamedAdamW(net.parameters(), clip=clip, overlap=net, bucket=1024, ring=3, rollback=rollback)
    offload = ActivationOffload(torch.device("cuda", 0), budget=1 << 22, least=64, stash=0, ahead=4096)
    for _ in range(3):
        with offload.saving(net.parameters()):
            loss = net(torch.ones(8, 64, dtype=torch.bfloat16, device="cuda")).square().sum()
        with optimizer.last_backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if not drop:
        optimizer.state_dict()
    del optimizer
    torch.zeros((), device="cuda").add_(1)

for options in ((True, True), (False, True), (True, False), (True, False, True)):
    attempt(copied, *options)
attempt(read)
for options in ((), (True,), (False, 0.0), (False, 1.0, 1 << 24), (False, 0.01, 1 << 24)):
    attempt(train, *options)

def without_waits(streamer, *options):
    make(streamer, *options)
    streamer._free = type(streamer._free)((slot, None) for slot, _ in streamer._free)

make, Streamer._make_ring = Streamer._make_ring, without_waits
attempt(train)
Streamer._make_ring = make
DeviceQueues.synchronize = lambda queues: None
attempt(train, True)
"""


def test_it_refuses_an_order_that_streams_do_not_keep(tmp_path: Path) -> None:
    """Also in the code of the offload, without one of its waits."""
    (tmp_path / "order.py").write_text(ORDER)
    found = pretended(str(tmp_path / "order.py")).splitlines()
    expected = ["fine", "were allocated", "were freed", "fine", "reads writes"]
    assert found == [*expected, *["fine"] * 5, "were allocated", "were freed"]


@pytest.mark.parametrize("part", [0, 1])
def test_training_on_it(part: int, tmp_path: Path) -> None:
    """Every case equals a run on the CPU; tests/pretended.py has them."""
    lines = pretended("tests/pretended.py", str(tmp_path), str(part)).splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(found) > 4
    assert not [case for case in found if case["problem"]], "\n".join(case["problem"] or "" for case in found)
