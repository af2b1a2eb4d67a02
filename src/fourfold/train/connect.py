"""Create every communicator, and every connection in it, before the first step.

NCCL creates a communicator at the first collective or message of a group, connects two ranks at the first use of an algorithm
between them, and blocks the host until the peer takes part. Inside a step that can deadlock: a rank that sends the gradient
of a tied weight would wait for a rank that waits for a later message of the first one. So all ranks do this in one order (that
of the groups):

1. the communicator of each group (`eager_connect_single_device`; `device_id` in `init_process_group` would split the world's
   instead, which needs all ranks, and groups are made by their members alone);
2. every kind of collective that runs on the group, short and long (NCCL chooses different algorithms); on an edge one message,
   on the pair of a tied weight one in each direction;
3. synchronize with the device, then a barrier of all ranks.

The groups of a plan are ordered so that each step waits only for earlier ones, so this cannot deadlock. gloo connects when the
group is made, or in its own threads, without a call of the peer: `connect` does nothing there, but tests run `warm_up` on it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold import collectives
from fourfold.launch.gpu_errors import translated
from fourfold.program.groups import GroupSpec
from fourfold.record import RECORD, Ticket
from fourfold.train._torch import make_communicator

__all__ = ["connect", "warm_up"]

SIZES = (1, 1 << 22)
"""Elements of the collectives that are tried, rounded up to the size of the group: NCCL has one algorithm for short ones and
another for long ones (here 16 MiB)."""
SHARED_SIZES = (1, 1 << 16)
"""The same where ranks share a GPU and take turns on it: 16 MiB would take most of a second."""

Collective = Callable[[Tensor, dist.ProcessGroup, str], object]

COLLECTIVES: dict[str, Collective] = {
    "all_reduce": lambda x, group, what: collectives.summed(x, group, what),
    "max": lambda x, group, what: collectives.summed(x, group, what, "max"),
    "all_gather": lambda x, group, what: collectives.gathered(x, group, what),
    "reduce_scatter": lambda x, group, what: collectives.scattered(x, group, what),
    "broadcast": lambda x, group, what: collectives.broadcasted(x, 0, group, what),
    "reduce": lambda x, group, what: collectives.reduced(x, 0, group, what),
    "all_to_all": lambda x, group, what: collectives.exchanged(x, group, what),
}
USES: dict[str, tuple[str, ...]] = {
    "world": ("all_reduce", "all_gather"),
    "gradients": ("all_reduce", "reduce_scatter"),
    "parameters": ("all_gather",),
    "grid": tuple(COLLECTIVES),
}
"""The collectives of each use; all other uses have only messages."""


def connect(groups: Sequence[tuple[GroupSpec, dist.ProcessGroup]], rank: int, device: torch.device) -> None:
    """Create and connect the communicators of this rank's groups; does nothing without NCCL."""
    if device.type != "cuda" or "nccl" not in str(dist.get_backend_config()):
        return
    groups = [(spec, group) for spec, group in groups if not spec.gloo and not spec.placeholder]
    with translated():
        for spec, group in groups:
            with _waiting(f"the communicator of {spec.use}"):
                make_communicator(group, device)
        warm_up(groups, rank, device)
        with _waiting("the first collectives and messages"):
            torch.cuda.synchronize(device)
    with _waiting("all ranks to be connected"):
        dist.all_reduce(torch.zeros(1))  # over gloo: no rank starts while another is still connecting


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    """For the watchdog: what this rank waits for inside."""
    ticket = RECORD.wait(Ticket(what))
    yield
    RECORD.done(ticket)


def warm_up(groups: Sequence[tuple[GroupSpec, dist.ProcessGroup]], rank: int, device: torch.device) -> None:
    """Run each kind of collective and message once on every group, in the order of the groups."""
    for spec, group in groups:
        kinds = USES.get(spec.use)
        if kinds is None:
            _messages(spec, group, rank, device)
            continue
        ranks = len(spec.members)
        for size in SHARED_SIZES if "NCCL_HOSTID" in os.environ else SIZES:
            whole = torch.zeros(-(-size // ranks) * ranks, device=device)
            for kind in kinds:
                x = whole[: len(whole) // ranks] if kind == "all_gather" else whole  # its output is as long as `whole`
                COLLECTIVES[kind](x, group, f"the first {kind} of {spec.use}")


def _messages(spec: GroupSpec, group: dist.ProcessGroup, rank: int, device: torch.device) -> None:
    """One message from the first member to the second; for the pair of a tied weight, also one back."""
    mine = spec.members.index(rank)
    peer = dist.get_group_rank(group, spec.members[1 - mine])
    for sender in (0, 1) if spec.use == "tied" else (0,):
        x = torch.zeros(1, device=device)
        with _waiting(f"the first message of {spec.use}"):
            work = group.send([x], peer, 0) if mine == sender else group.recv([x], peer, 0)
            work.wait()
