"""Your own model, dataset and loss, trained by `ff.fit` under any pipeline and sharding:

python examples/own_dataset_and_loss.py                                        # one process
torchrun --nproc-per-node 2 examples/own_dataset_and_loss.py pipe              # a pipeline of two ranks, the same losses
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

import fourfold as ff

WIDTH, WORDS = 32, 50


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def make_model() -> list[nn.Module]:
    """Layers in order; called on every rank after torch was seeded by train.seed."""
    return [nn.Embedding(WORDS, WIDTH), *(Layer() for _ in range(4)), nn.Linear(WIDTH, WORDS)]


class Rows:
    """A dataset: a length, and samples by number. The loss is given everything; `inputs` goes to the first layer."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Any]:
        tokens = (i + 3 * torch.arange(9)) % WORDS
        return {"inputs": tokens[:-1], "targets": tokens[1:], "importance": 1.0 + i % 3}


class WeightedLoss:
    """A sum over the samples of a micro-batch, which the run divides by the sum of `weight`."""

    def __call__(self, logits: Tensor, batch: dict[str, Any]) -> Tensor:
        each = nn.functional.cross_entropy(logits.transpose(1, 2), batch["targets"], reduction="none").mean(1)
        return (each * batch["importance"]).sum()

    def weight(self, batch: dict[str, Any]) -> Tensor:
        return batch["importance"].sum()


if __name__ == "__main__":
    config = ff.Config.from_dict(
        {
            "train": {"steps": 6, "global_batch": 8, "run_dir": "runs/own-model", "eval_every": 3, "eval_batches": 1},
            "data": {"eval_fraction": 0.2},
            "optim": {"lr": 1e-2},
            "log": {"every": 1},
        }
    )
    plan = ff.Plan.from_dict({"mesh": {"pipe": 2}}) if "pipe" in sys.argv else None
    outcome = ff.fit(config, plan, model=make_model, data=Rows(), loss=WeightedLoss())
    print(f"trained {outcome.steps} steps; weights under the model's names: {outcome.run_dir / 'final'}")
