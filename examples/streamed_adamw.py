"""StreamedAdamW alone in a plain loop: optimizer state in host memory, the losses of torch's AdamW bit for bit.

python examples/streamed_adamw.py
"""

import torch
from torch import Tensor, nn

import fourfold as ff

WORDS, WIDTH, STEPS = 64, 32, 5


def train(streamed: bool, device: str = "cpu") -> list[float]:
    """The losses of a few steps, with gradient accumulation over two micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS)).to(
        device
    )
    optimizer: torch.optim.Optimizer
    if streamed:
        optimizer = ff.StreamedAdamW(model.parameters(), lr=1e-2, weight_decay=0.1, overlap=model)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    losses = []
    for step in range(STEPS):
        tokens = (torch.arange(4 * 12).view(4, 12) * (step + 1) % WORDS).to(device)
        total = torch.zeros((), device=device)
        for part in tokens.chunk(2):
            loss: Tensor = nn.functional.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) / 2
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ours, theirs = train(True, device), train(False, device)
    print(f"streamed {ours[0]:.6f} … {ours[-1]:.6f}, torch's AdamW {theirs[0]:.6f} … {theirs[-1]:.6f}")
    assert ours == theirs
