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


@pytest.mark.parametrize("part", [0, 1])
def test_training_on_it(part: int, tmp_path: Path) -> None:
    """Every case equals a run on the CPU; tests/pretended.py has them."""
    lines = pretended("tests/pretended.py", str(tmp_path), str(part)).splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(found) > 4
    assert not [case for case in found if case["problem"]], "\n".join(case["problem"] or "" for case in found)
