"""Which rank this process is, and how it joins the others: started by us, by torchrun, or by srun.

torchrun and srun pass a process its rank in environment variables, so the command is the same everywhere:

    fourfold train CONFIG --nproc 4
    torchrun --nproc-per-node 4 -m fourfold train CONFIG
    srun fourfold train CONFIG

[Note: a new key prefix for every attempt]
Ranks exchange addresses through a key-value store (the rendezvous store). After an elastic restart torchrun may pass the store of
the previous attempt, which still has the addresses of its ranks, and its restart counter may differ between nodes. So the ranks
first agree on a new key prefix: every rank writes a random number; rank 0 offers a session that lists the numbers it sees; a
rank accepts a session that lists its own number; when all have accepted, rank 0 opens the session. With a number left by a
dead rank a session is never opened, and rank 0 offers another one as soon as the living rank's number replaces it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from fourfold.cluster import Cluster
from fourfold.errors import ConfigError, RankFailure
from fourfold.launch.gpu_errors import translated

__all__ = [
    "Backend",
    "Place",
    "agree",
    "check_joined",
    "choose_backend",
    "choose_device",
    "current_place",
    "first_gpu",
    "gpu_cluster",
    "join_group",
    "leave",
    "open_store",
    "own_host_settings",
    "place_from_environment",
]


@dataclass(frozen=True)
class Place:
    """One rank of a job: its number, how many there are, and the same within its machine.

    `job`: the launcher's name of the job, if any. `restarted`: whether this is not the launcher's first attempt.
    """

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1
    job: str = ""
    restarted: bool = False


def place_from_environment(env: Mapping[str, str]) -> Place | None:
    """The place that torchrun or srun gave this process; None if neither started it."""
    if "RANK" in env and "WORLD_SIZE" in env and "MASTER_ADDR" in env:
        run = env.get("TORCHELASTIC_RUN_ID", "none")
        return _checked(
            Place(
                _number(env, "RANK"),
                _number(env, "WORLD_SIZE"),
                _number(env, "LOCAL_RANK", 0),
                _number(env, "LOCAL_WORLD_SIZE", 1),
                job="" if run == "none" else f"torchrun {run}",
                restarted=_number(env, "TORCHELASTIC_RESTART_COUNT", 0) > 0,
            ),
            "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE",
        )
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env and _number(env, "SLURM_NTASKS", 1) > 1:
        node = _number(env, "SLURM_NODEID", 0)
        per_node = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "1"))
        return _checked(
            Place(
                _number(env, "SLURM_PROCID"),
                _number(env, "SLURM_NTASKS"),
                _number(env, "SLURM_LOCALID", 0),
                per_node[min(node, len(per_node) - 1)],
                job=f"slurm {env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}",
                restarted=_number(env, "SLURM_RESTART_COUNT", 0) > 0,
            ),
            "SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_TASKS_PER_NODE",
        )
    return None


MOST_TASKS = 1_000_000


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A whole number out of a launcher's variable."""
    text = env.get(name, "")
    if not text and default is not None:
        return default
    if not re.fullmatch("[0-9]{1,12}", text):
        raise ConfigError(f"cannot read {name} = '{text[:50]}'; expected a whole number")
    return int(text)


def _checked(place: Place, names: str) -> Place:
    inside = place.rank < place.ranks <= MOST_TASKS and place.local_rank < place.local_ranks <= place.ranks
    if not inside:
        found = (place.rank, place.ranks, place.local_rank, place.local_ranks)
        raise ConfigError(f"{names} = {', '.join(map(str, found))}: ranks are numbered from 0, below their count")
    return place


def ranks_started(env: Mapping[str, str]) -> int:
    """Number of ranks that torchrun or srun started; 0: neither did."""
    return _number(env, "WORLD_SIZE", 0) or _number(env, "SLURM_NTASKS", 0) * ("SLURM_STEP_ID" in env)


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's `2(x3),1`: two tasks on each of three nodes, one on the next."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?", part.strip())
        if match is None or len(counts) + int(match[2] or 1) > MOST_TASKS:
            raise ConfigError(f"cannot read SLURM_TASKS_PER_NODE = '{text[:50]}'; expected something like '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[007-009,12],cpu3` gives gpu007."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]+)\])?([^,]*)", nodes)
    if match is None:
        raise ConfigError(f"cannot read the Slurm node list '{nodes[:50]}'")
    name, numbers, rest = match.groups()
    return name + (re.split(r"[-,]", numbers)[0] if numbers else "") + rest


def store_address(env: Mapping[str, str]) -> tuple[str, int]:
    """Host and port of the job's store."""
    host = env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", ""))
    number = _number(env, "SLURM_JOB_ID", 0) + 1009 * _number(env, "SLURM_STEP_ID", 0)  # steps may run at once
    port = _number(env, "MASTER_PORT", 20000 + number % 20000)
    if port > 65535:
        raise ConfigError(f"MASTER_PORT = {port} must be at most 65535")
    return host, port


def open_store(env: Mapping[str, str], place: Place, timeout: float) -> dist.Store:
    """The store the launcher provides (torchrun), or one that rank 0 hosts (srun).

    Keys begin with the name of the job: ranks of another one, whose own store found the port in use, may reach this store.
    """
    host, port = store_address(env)
    theirs = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            host,
            port,
            None if theirs else place.ranks,
            is_master=place.rank == 0 and not theirs,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except dist.DistError as e:
        way = "; another job uses this port, set MASTER_PORT to a free one" if "EADDRINUSE" in str(e) else ""
        raise RankFailure(f"rank {place.rank} cannot reach the job's store at {host}:{port}: {e}{way}") from None
    return dist.PrefixStore(place.job, store) if place.job else store


def agree(store: dist.Store, rank: int, ranks: int, timeout: float, pause: float = 0.02) -> dist.Store:
    """The keys of `store` under a prefix that only this attempt uses: [Note: a new key prefix for every attempt].

    A poll is at most five operations on the store, whatever the number of ranks; polls are rarer the more ranks there are.
    """
    try:
        return _agreed(store, rank, ranks, timeout, pause)
    except dist.DistNetworkError as e:
        raise RankFailure(
            f"rank {rank} has lost the job's store while it waited for the other ranks: the process that hosts it (under srun "
            f"rank 0, else torchrun's agent) has ended; its output says why ({str(e).splitlines()[0]})"
        ) from None


TELLING = 10.0
"""Seconds after which rank 0 says which ranks have not joined yet."""


def _agreed(store: dist.Store, rank: int, ranks: int, timeout: float, pause: float) -> dist.Store:
    mine, begin, pause = uuid.uuid4().hex, time.monotonic(), max(pause, ranks / 4000)
    keys = [f"fourfold/number/{r}" for r in range(ranks)]
    store.set(keys[rank], mine)
    offered: list[str] = []
    session = seen = accepted = ""
    told = False
    while True:
        if rank == 0:
            numbers = _read_all(store, keys) if store.check(keys) else []
            if numbers and numbers != offered:
                offered, session = numbers, uuid.uuid4().hex
                store.set(f"fourfold/{session}/numbers", json.dumps(offered))
                store.set("fourfold/session", session)
            if session and store.add(f"fourfold/{session}/accepted", 0) == ranks:
                store.set(f"fourfold/{session}/open", "yes")
        if store.check(["fourfold/session"]):
            name = store.get("fourfold/session").decode()
            if name != seen:  # it may belong to a dead attempt
                seen, numbers = name, json.loads(store.get(f"fourfold/{name}/numbers"))
                if len(numbers) == ranks and numbers[rank] == mine:
                    store.add(f"fourfold/{name}/accepted", 1)
                    accepted = name
            if accepted and store.check([f"fourfold/{accepted}/open"]):
                return dist.PrefixStore(f"fourfold/{accepted}", store)
        waited = time.monotonic() - begin
        if rank == 0 and waited > TELLING and not told:
            told, missing = True, [r for r, k in enumerate(keys) if not store.check([k])]
            if missing:
                print(f"waiting for {_some(missing)} to join, at most {timeout:.0f} s", file=sys.stderr, flush=True)
        if waited > timeout:
            missing = [r for r, k in enumerate(keys) if not store.check([k])]
            who = f"{_some(missing)} never joined" if missing else "not all ranks accepted the same session"
            raise RankFailure(f"rank {rank} waited {timeout:.0f} s for the other ranks of the job: {who}")
        time.sleep(pause)


def _some(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"


def _read_all(store: dist.Store, keys: list[str]) -> list[str]:
    """The values of existing keys, in one operation if the store supports it."""
    extended: Any = getattr(store, "has_extended_api", None)  # torch's stubs lack it
    values = store.multi_get(keys) if extended is not None and extended() else [store.get(key) for key in keys]
    return [value.decode() for value in values]


def current_place() -> Place:
    """This process's place: in the process group that is initialised, in a launcher's job, or alone."""
    place = place_from_environment(os.environ)
    if not dist.is_initialized():
        return place or Place()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return place if place and (place.rank, place.ranks) == (rank, ranks) else Place(rank, ranks, rank, ranks)


def choose_device(requested: str, place: Place) -> torch.device:
    """The device of a rank: `auto` uses a GPU if there is one. Several ranks may share a GPU.

    A pipeline's rank has a stream for every directed edge and group, and a GPU has 8 hardware queues by default: a receive that
    waits in one would block the streams that share it, perhaps with a send that the other rank waits for. CUDA reads the number
    when it starts.
    """
    if requested != "cpu":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    gpus = torch.cuda.device_count() if requested != "cpu" else 0
    if requested == "cuda" and not gpus:
        raise ConfigError("train.device = 'cuda', but torch sees no GPU here; use 'auto' or 'cpu'")
    return torch.device("cuda", place.local_rank % gpus) if gpus else torch.device("cpu")


PRESET_OF = {
    "B200": "b200", "GB200": "gb200", "H200": "h200", "GH200": "gh200", "H100 PCIe": "h100-pcie", "H100": "h100-sxm",
    "H800": "h100-sxm", "H20": "h20", "A100": "a100-80g", "A800": "a100-80g", "V100": "v100-16g", "L40S": "l40s", "L4": "l4-pcie",
    "A10G": "a10g", "RTX A6000": "a6000", "RTX PRO 6000": "rtx-pro-6000", "RTX 5090": "rtx-5090", "RTX 4090": "rtx-4090",
    "RTX 3090": "rtx-3090", "MI300X": "mi300x",
}  # fmt: skip
"""By words of a GPU's name; the first that matches."""
HOST_SHARE = 0.9
"""Fraction of a host's memory that a plan may use."""


def gpu_cluster(ranks: int, local_ranks: int) -> Cluster:
    """The cluster that this job's GPUs are: the preset of their name, with the memory that they and this host have.

    Ranks that share a GPU each have a part of it, and communicate through the host. CUDA is not started in this process.
    """
    name, memory = first_gpu()
    preset, known = _preset(name, memory)
    cluster = Cluster.preset(preset)
    if not known:  # the console shows the name with the prediction
        found = f"'{name}'" if name else "a GPU of unknown name"
        cluster = dataclasses.replace(
            cluster, name=f"rates of {preset}, since there is no preset for {found}: fourfold calibrate"
        )
    local = math.gcd(ranks, local_ranks)
    share = -(-local // max(1, torch.cuda.device_count()))
    d, link = cluster.device, cluster.host.link / share
    device = dataclasses.replace(
        d,
        memory=str((memory or cluster.memory) // share),
        matrix={kind: rate / share for kind, rate in d.matrix.items()},
        memory_rate=d.memory_rate / share,
    )
    host = dataclasses.replace(cluster.host, memory=str(int(HOST_SHARE * psutil.virtual_memory().total)), link=link)
    made = dataclasses.replace(cluster.with_devices(local), nodes=ranks // local, device=device, host=host)
    if share == 1:
        return made
    through = tuple(dataclasses.replace(x, bandwidth=min(x.bandwidth, link)) for x in made.level)
    return dataclasses.replace(made, level=through)


def first_gpu() -> tuple[str, int]:
    """Name and memory in bytes of the first GPU; empty if nvidia-smi is missing or does not report them."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.reserved", "--format=csv,noheader,nounits"]
    try:
        out = subprocess.run(query, capture_output=True, text=True).stdout
    except OSError:
        return "", 0
    match = re.search(r"^(.+), (\d+), (\d+|\[.*\])$", out, re.MULTILINE)
    if match is None:
        return "", 0
    return match[1], (int(match[2]) - (int(match[3]) if match[3].isdigit() else 0)) << 20


def _preset(name: str, memory: int) -> tuple[str, bool]:
    """The cluster whose GPUs are most like one of this name and memory, and whether its name is known."""
    found = next((preset for word, preset in PRESET_OF.items() if re.search(rf"\b{word}\b", name)), None)
    if found == "a100-80g" and memory and memory < 60 << 30:
        found = "a100-40g"
    return found or "a100-40g", found is not None


@dataclass(frozen=True)
class Backend:
    """What carries the collectives and messages of a job."""

    name: str
    """As `init_process_group` takes it."""
    own_hosts: bool = False
    """Whether ranks share a GPU over NCCL: each must then appear as a different host."""
    note: str = ""
    """What the user should know about the choice."""


def choose_backend(choice: str, device: str, local_ranks: int, gpus: int) -> Backend:
    """The backend of `train.backend` for `local_ranks` ranks of a machine on `device`, which share `gpus` GPUs."""
    if device != "cuda":
        if choice == "nccl":
            raise ConfigError("train.backend = 'nccl' needs a GPU, but the ranks run on the CPU; use 'auto' or 'gloo'")
        return Backend("gloo")
    if choice == "gloo":
        return Backend("gloo", note="gloo: all communication goes through host memory")
    if not dist.is_nccl_available():
        if choice == "nccl":
            raise ConfigError("train.backend = 'nccl', but this torch is built without NCCL; use 'auto' or 'gloo'")
        return Backend("gloo", note="this torch is built without NCCL: all communication goes through host memory")
    if local_ranks <= gpus:
        return Backend("cpu:gloo,cuda:nccl")
    sharing = f"{local_ranks} ranks share {gpus} {'GPU' if gpus == 1 else 'GPUs'}"
    if choice == "nccl":
        note = f"{sharing} over NCCL, each rank as a separate host: for tests, not for speed"
        return Backend("cpu:gloo,cuda:nccl", own_hosts=True, note=note)
    return Backend("gloo", note=f"{sharing}: communication goes through host memory (gloo); one rank per GPU is faster")


def own_host_settings(rank: int, one_machine: bool) -> dict[str, str]:
    """NCCL settings that let ranks share a GPU: NCCL compares (host, GPU), and with these every rank is a different host.

    They apply to the whole process: NCCL reads each of them once, at the first communicator.
    """
    settings = {
        "NCCL_HOSTID": f"fourfold-rank-{rank}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": "4",  # kernels of the ranks wait for each other on one GPU, so none may fill it
        "NCCL_RAS_ENABLE": "0",  # its port is one per host
    }
    if one_machine:
        settings |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
    return settings


NCCL_SETTINGS = {
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "86400",  # kills ranks whose device or interpreter is busy for long
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",  # it sleeps four times as long before it ends a rank
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",  # may itself hang
}
"""torch's NCCL watchdog reacts later than ours (supervision/watch.py), whose report names ranks and ops."""


def join_group(
    place: Place,
    store: dist.Store | None,
    device: torch.device,
    timeout: float,
    backend: str = "auto",
    group_timeout: float | None = None,
) -> None:
    """Join the process group of the job; without a store, the launcher's. `backend` is `train.backend`.

    `timeout`: seconds to wait for the other ranks to join. `group_timeout`: that of its collectives; default: the same.
    """
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    chosen = choose_backend(backend, device.type, place.local_ranks, gpus)
    if device.type == "cuda":
        with translated():
            torch.cuda.set_device(device)
        if chosen.own_hosts:
            os.environ.update(own_host_settings(place.rank, place.local_ranks == place.ranks))
    else:
        cores = max(1, (os.cpu_count() or 1) // place.local_ranks)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or cores))
        # torch's record of past collectives takes 100 MB for small models
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    if store is None:
        store = agree(open_store(os.environ, place, timeout), place.rank, place.ranks, timeout)
    # gloo then reads all addresses of a group at once; it reads them one by one if the store cannot
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    for name, value in NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)
    limit = timedelta(seconds=group_timeout or timeout)
    dist.init_process_group(chosen.name, store=store, rank=place.rank, world_size=place.ranks, timeout=limit)


def check_joined(choice: str) -> None:
    """Refuse a process group that the caller made with another backend than `train.backend`."""
    found = str(dist.get_backend_config())
    if choice != "auto" and choice not in found:
        raise ConfigError(
            f"train.backend = '{choice}', but the existing process group has '{found}'; use 'auto' or make the group "
            f"with init_process_group('{'cpu:gloo,cuda:nccl' if choice == 'nccl' else 'gloo'}')"
        )


LEAVING = 60.0
"""Seconds that a rank may take to leave its process group: NCCL may wait for a peer that is gone, and no watchdog runs then."""


def leave() -> None:
    """Leave the process group; ends this process, with exit code 1, if that takes longer than `LEAVING`."""
    if not dist.is_initialized():
        return

    def end(rank: int = dist.get_rank()) -> None:
        print(
            f"error: rank {rank} could not leave its process group within {LEAVING:g} s (destroy_process_group hangs), and is "
            "ended; what it had written is complete",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    timer = threading.Timer(LEAVING, end)
    timer.daemon = True
    timer.start()
    try:
        dist.destroy_process_group()
    finally:
        timer.cancel()
        timer.join()
