"""A transformer as an ordered list of layers, so that any contiguous run of them is a stage.

    layers:  embed, blocks.0, …, blocks.L-1, head           units:  embed, blocks.0.attn, blocks.0.mlp, …, head

The embedding takes token ids, blocks and head take the residual stream; the head returns logits or, given targets, the summed
loss.
"""

from __future__ import annotations

from torch import Tensor, nn

from fourfold.config import ModelConfig
from fourfold.model.attention import Documents
from fourfold.model.layers import Block, Embedding, Head, Rotary

__all__ = ["Transformer"]


class Transformer(nn.Module):
    """The model of a config; the plain serial model that every parallel run is compared with."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.rotary: Rotary | None = None
        self.local_rotary: Rotary | None = None  # for layers with a window, if the model distinguishes them
        if not config.learned_positions:
            self.rotary = Rotary(config.rope_dim, config.seq_len, config.rope_theta, config.rope_scaling)
        if config.rope_local_theta:
            self.local_rotary = Rotary(config.rope_dim, config.seq_len, config.rope_local_theta, None)
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(Block(config, self._rotary(i), config.window(i)) for i in range(config.layers))
        self.head = Head(config)
        self.tie()

    def _rotary(self, layer: int) -> Rotary | None:
        if not self.config.has_rope(layer):
            return None
        return self.local_rotary if self.config.has_local_rope(layer) else self.rotary

    def tie(self) -> None:
        """Tie the head to the embedding if the config says so; call again after replacing parameters."""
        if self.config.tie:
            self.head.proj.weight = self.embed.tokens.weight

    def layers(self) -> dict[str, nn.Module]:
        """The layers by name, in order."""
        blocks = {f"blocks.{i}": block for i, block in enumerate(self.blocks)}
        return {"embed": self.embed, **blocks, "head": self.head}

    def units(self) -> dict[str, nn.Module]:
        """The units by name, in order; running them in sequence is the model's forward."""
        parts = {f"blocks.{i}.{p}": getattr(b, p) for i, b in enumerate(self.blocks) for p in ("attn", "mlp")}
        return {"embed": self.embed, **parts, "head": self.head}

    def forward(
        self, tokens_bt: Tensor, targets_bt: Tensor | None = None, documents: Documents | None = None
    ) -> Tensor:
        x_btd = self.embed(tokens_bt, documents=documents)
        for block in self.blocks:
            x_btd = block(x_btd, documents)
        return self.head(x_btd, targets_bt)
