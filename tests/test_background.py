"""Threads that wait in C++ when the process ends: it ends with its exit code, and is not aborted."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from fourfold import background

store = dist.HashStore()

def work():
    try:
        store.wait(["never"], timedelta(seconds=float(sys.argv[1])))  # in C++, without Python's lock
    except dist.DistStoreError:
        pass

class Slow:
    def __del__(self):
        time.sleep(2)  # while the interpreter shuts down, the thread comes back

slow = Slow()
background.start_thread(work, "waits")
sys.exit(0)
"""


@pytest.mark.parametrize(("waits", "code"), [("0.2", 0), ("1.5", 1)], ids=["it ends soon", "it still waits"])
def test_a_thread_that_waits_does_not_abort_the_process(waits: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, waits], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert ("threads still wait for other ranks (waits)" in done.stderr) == bool(code)
