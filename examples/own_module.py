"""Your own module in your own loop, sharded over the ranks of torchrun:

    python examples/own_module.py                              # alone
    torchrun --nproc-per-node 4 examples/own_module.py         # the same losses on four ranks

Every rank takes its own part of a batch of 8. The model is saved by all ranks together and opens under any other number of them.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import fourfold as ff

STEPS, BATCH, LENGTH, WORDS, WIDTH = 5, 8, 12, 50, 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def main(folder: str) -> None:
    torch.manual_seed(0)
    plan = ff.Plan.from_dict({"unit": [{"match": "*", "mode": "zero3"}]})  # parameters sharded over all ranks
    model = ff.parallelize(Net(), plan)  # joins torchrun's process group
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, size = model.rank, BATCH // model.ranks
    for step in range(STEPS):
        whole = torch.randint(0, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
        mine = whole[rank * size : (rank + 1) * size]
        loss = model.step({"tokens": mine, "labels": mine})  # the mean over all ranks
        model.clip_grad_norm_(1.0)
        optimizer.step()
        model.zero_grad()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.6f}")
    model.save(Path(folder) / "saved", optimizer)
    model.load(Path(folder) / "saved", optimizer)  # under this number of ranks or another


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/own-module")  # the same folder on all ranks
