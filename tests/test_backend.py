"""`train.backend`, and what users read when CUDA or NCCL refuse: the real texts of their errors become sentences."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fourfold.cli import main
from fourfold.errors import ConfigError, DeviceError
from fourfold.launch import gpu_errors
from fourfold.launch import place as places
from fourfold.launch.gpu_errors import explain, translated
from fourfold.launch.place import check_joined, choose_backend, own_host_settings
from fourfold.testing import ranks as ranks_module
from fourfold.testing.ranks import run_ranks

NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {}, NCCL version 2.28.9\n{}\nLast error:\n{}"
)
INVALID = (
    "invalid usage (run with NCCL_DEBUG=WARN for details)",
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
)
INTERNAL = (
    "internal error - please report this issue to the NCCL developers",
    "ncclInternalError: Internal check failed.",
)
SYSTEM = (
    "unhandled system error (run with NCCL_DEBUG=INFO for details)",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
)
REMOTE = (
    "remote process exited or there was a network error",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
)

TEXTS: dict[str, tuple[str, str]] = {
    "driver": (
        "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading and "
        "installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: "
        "https://pytorch.org to install a PyTorch version that has been compiled with your version of the CUDA driver.",
        "driver of this machine is too old for this torch: it supports CUDA 11.4; update the driver",
    ),
    "driver, by the runtime": (
        "CUDA error: CUDA driver version is insufficient for CUDA runtime version\nCUDA kernel errors might be asynchronously "
        "reported at some other API call",
        "too old for this torch (nvidia-smi shows",
    ),
    "no deterministic kernel": (
        "cumsum_cuda_kernel does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation",
        "no deterministic kernel for cumsum_cuda_kernel, and train.deterministic = true requires one; use --train.deterministic",
    ),
    "no driver": (
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from "
        "http://www.nvidia.com/Download/index.aspx",
        "no NVIDIA driver; install one, or use --train.device cpu",
    ),
    "full": (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 11.69 MiB is free. "
        "Process 2104 has 137.20 GiB memory in use. Including non-PyTorch memory, this process has 2.58 GiB memory in use. Of "
        "the allocated memory 1.90 GiB is allocated by PyTorch",
        "GPU 0 is out of memory: 20.00 MiB were requested, 11.69 MiB of 139.80 GiB are free, and other processes use it: "
        "process 2104 holds 137.20 GiB; end them or choose another GPU",
    ),
    "full by ourselves": (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.15 GiB of which 1.12 GiB is free. "
        "Including non-PyTorch memory, this process has 78.02 GiB memory in use.",
        "GPU 3 is out of memory: 2.00 GiB were requested, 1.12 GiB of 79.15 GiB are free; a plan that fits",
    ),
    "full at the start": ("CUDA error: out of memory\nCUDA kernel errors might be", "too little free memory to start"),
    "full, says NCCL": (
        NCCL.format("unhandled cuda error", "ncclUnhandledCudaError: Call to CUDA function failed.", "Cuda failure 2 'out of memory'"),
        "too little free memory to start",
    ),
    "busy": (
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "in use by another process in exclusive mode",
    ),
    "two ranks on a GPU": (
        NCCL.format(*INVALID, "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 34000"),
        "ranks 0 and 1 share a GPU, which NCCL refuses; start one rank per GPU",
    ),
    "versions": (
        NCCL.format(*INVALID, "Mismatched NCCL version detected : rank 1 version 22705 rank 0 version 22703"),
        "rank 1 has 22705, rank 0 has 22703; install the same torch on all machines",
    ),
    "no interface": (
        NCCL.format(*INTERNAL, "Bootstrap : no socket interface found"),
        "no network interface that NCCL_SOCKET_IFNAME = 'eth9' allows; set NCCL_SOCKET_IFNAME",
    ),
    "shared memory": (
        NCCL.format(
            *SYSTEM,
            "Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888), error: No space left on device (28)",
        ),
        "docker run --shm-size=8g",
    ),
    "files": (NCCL.format(*SYSTEM, "Call to socket failed: Too many open files"), "ulimit -n 65536"),
    "no way": (
        NCCL.format(*SYSTEM, "socketStartConnect: Connect to 10.0.0.7<39875> failed : No route to host"),
        "cannot reach 10.0.0.7;",
    ),
    "remote": (
        NCCL.format(*REMOTE, "Net: Connect refused"),
        "cannot reach another rank;",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_of_an_error_becomes_a_sentence_with_a_way_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth9")
    text, wanted = TEXTS[name]
    with pytest.raises(DeviceError) as found, translated():
        raise RuntimeError(text)
    assert wanted in str(found.value)
    assert "\n" not in str(found.value)


def test_other_errors_stay_what_they_are() -> None:
    assert explain(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")) is None
    with pytest.raises(RuntimeError, match="the size") as found, translated():
        raise RuntimeError("the size of a tensor")
    assert type(found.value) is RuntimeError
    error = RuntimeError("CUDA error: out of memory")
    error.add_note("in instruction 3F0")
    with pytest.raises(DeviceError, match=r"\(in instruction 3F0\)$"), translated():
        raise error


def test_a_gpu_that_cannot_start_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence says what nvidia-smi finds: CUDA calls every want of a resource "out of memory"."""
    error = RuntimeError("CUDA error: out of memory")
    for out, expected in (
        ("0, 139000, 143771\n", "too little free memory to start: 135.7 of 140.4 GiB are in use; other processes"),
        (
            "0, 2000, 143771\n1, 9, 143771\n",
            "cannot start another process or stream on the GPU, although 138.4 of 140.4 GiB are free",
        ),
        ("", "the GPU has too little free memory to start: other processes use it"),
    ):
        done = subprocess.CompletedProcess([], 0, out, "")
        monkeypatch.setattr(gpu_errors.subprocess, "run", lambda *_, done=done, **__: done)
        assert expected in (explain(error) or "")


def test_the_backend_by_ranks_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    both = "cpu:gloo,cuda:nccl"
    assert choose_backend("auto", "cpu", 4, 0).name == "gloo"
    assert choose_backend("auto", "cuda", 4, 4) == choose_backend("nccl", "cuda", 4, 8)
    assert choose_backend("auto", "cuda", 4, 4).name == both
    shared = choose_backend("auto", "cuda", 4, 1)
    assert shared.name == "gloo"
    assert shared.note.startswith("4 ranks share 1 GPU: communication goes through host memory")
    tested = choose_backend("nccl", "cuda", 4, 2)
    assert tested.name == both
    assert tested.own_hosts
    assert "for tests, not for speed" in tested.note
    assert choose_backend("gloo", "cuda", 2, 2).name == "gloo"
    with pytest.raises(ConfigError, match="'nccl' needs a GPU, but the ranks run on the CPU; use 'auto' or 'gloo'"):
        choose_backend("nccl", "cpu", 2, 0)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match="built without NCCL"):
        choose_backend("nccl", "cuda", 2, 2)
    assert choose_backend("auto", "cuda", 2, 2).name == "gloo"


def test_ranks_that_share_a_gpu_are_hosts_of_their_own() -> None:
    settings = [own_host_settings(rank, one_machine=True) for rank in range(3)]
    assert len({s["NCCL_HOSTID"] for s in settings}) == 3
    assert all(s["NCCL_SOCKET_IFNAME"] == "lo" and s["NCCL_SHM_DISABLE"] == "1" for s in settings)
    assert "NCCL_SOCKET_IFNAME" not in own_host_settings(0, one_machine=False)


def test_join_sets_nccl_up_before_the_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the GPU and for the group: the settings are there when the group is made."""
    seen: dict[str, str | None] = {}

    def made(backend: str, **options: object) -> None:
        seen.update(backend=backend, host=os.environ.get("NCCL_HOSTID"))

    for name in own_host_settings(0, one_machine=True):
        monkeypatch.setenv(name, "")  # so that they are put back
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", made)
    place = places.Place(1, 2, 1, 2)
    places.join_group(place, dist.HashStore(), torch.device("cuda", 0), 10.0, "nccl")
    assert seen == {"backend": "cpu:gloo,cuda:nccl", "host": "fourfold-rank-1"}
    places.join_group(place, dist.HashStore(), torch.device("cuda", 0), 10.0, "auto")
    assert seen["backend"] == "gloo"


def test_nccl_without_a_gpu_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", "configs/gpt-tiny.toml", "--train.backend", "nccl", "--train.run-dir", str(run)]) == 2
    assert "train.backend = 'nccl' needs a GPU" in capsys.readouterr().err
    assert not run.exists()


def test_ranks_that_share_a_gpu_are_told_what_it_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fourfold.commands.train._gpus", lambda config: 1)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    plan = tmp_path / "plan.toml"
    plan.write_text("[mesh]\ndata = 2\n")
    command = [
        "train",
        "configs/gpt-tiny.toml",
        "--plan",
        str(plan),
        "--train.run-dir",
        str(tmp_path / "run"),
        "--dry-run",
    ]
    for backend, wanted in (("auto", "goes through host memory (gloo)"), ("nccl", "for tests, not for speed")):
        assert main([*command, "--train.backend", backend]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "2 ranks share 1 GPU" in out
        assert wanted in out


def test_a_group_that_was_made_otherwise_is_refused() -> None:
    assert run_ranks(_joined, 2) == [True, True]


def _joined(rank: int, ranks: int) -> bool:
    check_joined("auto")
    check_joined("gloo")
    try:
        check_joined("nccl")
    except ConfigError as e:
        return "the existing process group has 'cpu:gloo" in str(e)
    return False


def test_ranks_can_be_forked_from_a_server_as_gpus_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ranks_module.START, "gloo", "forkserver")
    assert run_ranks(_sum, 2) == [1.0, 1.0]


def _sum(rank: int, ranks: int) -> float:
    x = torch.tensor(float(rank))
    dist.all_reduce(x)
    return x.item()
