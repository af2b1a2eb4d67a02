"""StreamedAdamW in a plain FSDP2 loop: each rank streams the state of its own shards.

python examples/streamed_adamw_fsdp2.py                             # one rank
torchrun --nproc-per-node 2 examples/streamed_adamw_fsdp2.py        # two
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fourfold as ff

WIDTH = 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def train(streamed: bool) -> list[float]:
    """The losses of four steps, each rank on its part of a batch of 8."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if streamed:  # in place of torch's
        optimizer = ff.StreamedAdamW(model.parameters(), lr=1e-2, clip=1.0)  # it clips, too, over all ranks
    rank, ranks, losses = dist.get_rank(), dist.get_world_size(), []
    for step in range(4):
        whole = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (model(whole.chunk(ranks)[rank]) - 1).square().mean()
        loss.backward()
        if not streamed:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
    return losses


if __name__ == "__main__":
    for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29533")):
        os.environ.setdefault(name, alone)
    dist.init_process_group("gloo")
    found = train(streamed=True)
    if dist.get_rank() == 0:
        print(found)
    dist.destroy_process_group()
