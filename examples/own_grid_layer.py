"""A model of one's own on a tensor grid: a rule says how the blocks' matrices are divided.

python examples/own_grid_layer.py                       one process
torchrun --nproc-per-node 4 examples/own_grid_layer.py  a grid of 2 × 2: the same losses
"""

import os
import sys

import torch

import fourfold as ff
from fourfold.tensor.own_layers import on_grid


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(24), torch.nn.Linear(24, 96), torch.nn.Linear(96, 24)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def block_on_grid(block, setting):
    block.up = on_grid(block.up, setting, outputs="split")  # each column has its block of the 96 features
    block.down = on_grid(block.down, setting, inputs="split")  # the norm, and the rest of the model, run as they are


def make_model():
    return [torch.nn.Linear(8, 24), Block(), Block(), torch.nn.Linear(24, 1)]


class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return {"inputs": torch.sin(torch.arange(8.0) * i), "targets": [i / 64]}


def loss(output, batch):
    return (output - batch["targets"]).square().sum()


run = sys.argv[1] if len(sys.argv) > 1 else "runs/own-grid"
grid = {"row": 2, "col": 2} if os.environ.get("WORLD_SIZE") == "4" else {}
ff.fit(
    ff.Config.from_dict({"train": {"steps": 8, "global_batch": 16, "run_dir": run}, "optim": {"lr": 0.01}}),
    ff.Plan.from_dict({"mesh": grid}),
    model=make_model,
    data=Rows(),
    loss=loss,
    grid_rules={Block: block_on_grid},
)
