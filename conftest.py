"""Ranks are forked: torch must never have run a multi-threaded kernel in this process, or have met a GPU.

With `FOURFOLD_TEST_DEVICE=cuda` the tests of GPUs run (`make test-gpu`); without it no test sees one.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

if os.environ.get("FOURFOLD_TEST_DEVICE", "cpu") == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # backward passes would start a thread per GPU, and forked ranks lack it

import pytest
import torch

torch.set_num_threads(1)
if (
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN
):  # a job in the background of a script, whose children would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

MEMORY_DISK = Path("/dev/shm")
if os.access(MEMORY_DISK, os.W_OK) and shutil.disk_usage(MEMORY_DISK).free > 4 << 30:
    # runs wait for the disk after every file that they write, 8 ms each: files of tests are kept in memory
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY_DISK))

IDLE: tuple[str, ...] = ("MainThread", "asyncio_", "tqdm_monitor")
"""Threads of pytest and of tqdm, which torch.compile starts where it is installed: they wait and hold no lock. The thread
that receives orders in a worker of xdist is none of Python's `threading`."""
if (
    os.environ.get("FOURFOLD_TEST_DEVICE", "cpu") != "cpu"
):  # torch.compile's pool; each test has a process of its own (tests/gpu.py)
    IDLE += ("InductorSubproc", "subproc_worker_timer", "Dummy-")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """A later test forks this process: whatever lock another thread holds stays locked in the ranks."""
    yield
    deadline = time.monotonic() + 5
    while (left := _threads()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"the test leaves threads behind: {left}"


@pytest.fixture(autouse=True)
def random_numbers_are_the_same() -> None:
    """A test that draws from torch's generator draws the same, whatever ran before it in this process."""
    torch.manual_seed(0)


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.name.startswith(IDLE)]


@pytest.fixture(autouse=True, scope="session")
def no_rate_is_measured() -> Iterator[None]:
    """Every rank of every run would multiply matrices for 0.1 s, to know the rate that MFU is a share of."""
    with patch("fourfold.train.metrics.measured_flops", return_value=1e11):
        yield


SLOW = (
    "tests/test_readme",
    "tests/test_package",
    "tests/test_hosts",
    "tests/test_faults",
    "tests/test_checkpoint",
    "tests/test_launch",
)
SLOW += (
    "tests/test_sharding",
    "tests/test_pipelines",
    "tests/test_together",
    "tests/test_grid",
    "tests/test_cli",
    "tests/test_why",
)
SLOW += ("tests/test_numerics", "tests/test_parallelize", "tests/test_cuda", "tests/offload/test_training")
SLOW += (
    "tests/offload/test_activations",
    "tests/lab/test_docs",
    "tests/lab/test_network",
    "tests/planner",
    "benchmarks",
)
SLOW += ("tests/test_families", "tests/test_hugging_face", "tests/test_verify", "tests/test_watch", "tests/test_loop")
SLOW += (
    "tests/test_groups",
    "tests/test_ring",
    "tests/runtime/test_transport",
    "tests/test_backend",
    "tests/test_chats",
    "tests/test_doctor",
    "tests/test_replicas",
    "tests/test_plan_report",
    "tests/test_remote",
    "tests/test_pretend_gpu",
    "tests/test_own_model",
    "tests/test_lora",
    "tests/test_packing",
    "tests/test_fp8",
)
"""Files left out by `make test-fast`: whole training runs, searches for plans, benchmarks."""
LONG = (
    "tests/test_readme.py::test_readme_commands",
    "tests/test_pretend_gpu.py::test_training_on_it",
    "tests/test_hosts.py",
    "tests/test_faults.py::test_killed_ranks_under_torchrun",
    "benchmarks/test_all.py::test_the_quickest_part_runs",
    "benchmarks/test_network.py::test_calibration_finds_the_links",
    "tests/test_parallelize.py::test_the_example_under_torchrun",
    "tests/test_readme.py::test_commands_are_valid",
    "tests/test_package.py::test_the_wheel",
    "tests/test_own_model.py::test_in_the_trainer",
    "tests/test_plan_report.py::test_a_browser",
    "tests/lab/test_docs.py::test_example[torchrun]",
    "tests/planner/test_lower_bounds.py::test_no_plan",
    "tests/test_lora.py::test_any_plan",
    "tests/test_families.py::test_any_plan",
    "tests/test_verify.py::test_a_report",
    "tests/test_checkpoint.py::test_saved_on_n",
    "tests/test_sharding.py::test_checkpoints_open",
    "tests/test_sharding_costs.py::test_random_mixes",
    "tests/test_faults.py::test_a_rank_that_hangs",
    "tests/test_pipelines.py::test_a_rank_killed",
    "tests/test_why.py",
    "tests/test_watch.py",
)
"""What takes more than about five seconds, the longest first: it is begun first, so that workers end together."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is slow, and order items by length. `--dist worksteal` gives each worker one block of them at first."""
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker("slow")
    long = {item: rank for item in items for rank, start in enumerate(LONG) if item.nodeid.startswith(start)}
    first = sorted(long, key=lambda item: long[item])
    rest, ordered = [item for item in items if item not in long], []
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    for worker in range(workers):
        mine = first[worker::workers]
        size = (len(items) - len(ordered)) // (workers - worker)
        ordered += mine + rest[: max(0, size - len(mine))]
        del rest[: max(0, size - len(mine))]
    items[:] = ordered + rest
