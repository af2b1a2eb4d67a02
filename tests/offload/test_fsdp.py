"""StreamedAdamW on parameters that FSDP2 has sharded: the bits of torch's AdamW on the same shards."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fourfold import StreamedAdamW
from fourfold.testing.ranks import run_ranks
from tests.offload.threads import slow_queues


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 50), nn.GELU(), nn.Linear(50, 24))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def train_sharded(rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    ours, theirs = make_net(), make_net()
    mine = StreamedAdamW(ours.parameters(), lr=1e-2, clip=0.1, bucket=256, overlap=ours)
    plain = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    for step in range(6):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step * ranks + rank))
        for net in (ours, theirs):
            net(x).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        mine.step()
        plain.step()
        assert torch.equal(norm.full_tensor(), mine.norm)
        mine.zero_grad()
        plain.zero_grad()
        mine.wait()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert isinstance(p, DTensor)
            assert torch.equal(p.to_local(), q.to_local())
    saved = get_optimizer_state_dict(ours, mine)
    assert isinstance(saved["state"]["0.weight"]["exp_avg"], DTensor)
    set_optimizer_state_dict(theirs, plain, saved)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.state[p]["exp_avg"].to_local(), plain.state[q]["exp_avg"].to_local())


def test_sharded_parameters() -> None:
    run_ranks(train_sharded, 2)


def train_without_waits(rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    losses = []
    for queues in (None, slow_queues(rank, torch.device("cpu"), 2e-2)):
        net = make_net()
        optimizer = StreamedAdamW(net.parameters(), lr=1e-2, bucket=256, overlap=net, queues=queues)
        for step in range(4):
            loss = net(torch.randn(8, 24, generator=torch.Generator().manual_seed(step))).square().sum()
            losses.append(float(loss))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert losses[:4] == losses[4:]


def test_weights_are_gathered_after_their_update() -> None:
    """FSDP2 gathers them before the hooks of a layer run."""
    run_ranks(train_without_waits, 2)
