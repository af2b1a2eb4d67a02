"""Which rank this process is, and how it joins the others."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["Place", "choose_device", "current_place", "join", "leave"]


@dataclass(frozen=True)
class Place:
    """One rank of a job: its number, how many there are, and the same within its machine."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1


def current_place() -> Place:
    """This process's place in the process group that is initialised, or alone."""
    if not dist.is_initialized():
        return Place()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return Place(rank, ranks, rank, ranks)


def choose_device(wish: str, place: Place) -> torch.device:
    """The device of a rank: `auto` takes a GPU when there is one. Several ranks may share a GPU."""
    gpus = torch.cuda.device_count() if wish != "cpu" else 0
    if wish == "cuda" and not gpus:
        raise RuntimeError("train.device = 'cuda', but torch sees no GPU")
    return torch.device("cuda", place.local_rank % gpus) if gpus else torch.device("cpu")


def join(place: Place, store: dist.Store | None, device: torch.device, timeout: float) -> None:
    """Join the process group of the job. GPUs shared by several ranks talk over gloo: NCCL refuses that."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        shared = place.local_ranks > torch.cuda.device_count()
        backend = "gloo" if shared else "cpu:gloo,cuda:nccl"
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.local_ranks))
        os.environ.setdefault(
            "TORCH_FR_BUFFER_SIZE", "0"
        )  # torch's record of past collectives: 100 MB for small models
        backend = "gloo"
    dist.init_process_group(
        backend, store=store, rank=place.rank, world_size=place.ranks, timeout=timedelta(seconds=timeout)
    )


def leave() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
