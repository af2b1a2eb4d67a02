"""The matmuls of a model on the grid: their sizes on a rank and their flows, computed from config and plan. No torch.

qkv, up, proj    read the residual stream        out, down    write to it        dense    both
"""

from __future__ import annotations

from functools import lru_cache

from fourfold.config import ModelConfig
from fourfold.plan import Plan
from fourfold.tensor.blocks import Blocks, even, fuse, grouped_heads
from fourfold.tensor.costs import MatmulSizes, choose_flow

__all__ = ["flows_of_plan", "products_of"]


@lru_cache(maxsize=4096)
def products_of(m: ModelConfig, row: int, col: int, tokens: int, residual: str = "sequence") -> dict[str, MatmulSizes]:
    """The matmuls by name, for `tokens` tokens of a micro-batch on a row."""
    stream, sequence = even(m.hidden, col), residual == "sequence"
    q, k, _ = grouped_heads(m.heads, m.kv_heads, m.head_dim, col)
    inner = even(m.ffn, col)
    wide = fuse(*[inner] * (2 if m.gated else 1))

    def product(ins: Blocks, outs: Blocks, leaves: bool, comes: bool) -> MatmulSizes:
        in_tokens, out_tokens = leaves and sequence, comes and sequence
        return MatmulSizes(tokens, ins.total, outs.total, ins.size, outs.size, in_tokens, out_tokens, row, col)

    found = {
        "qkv": product(stream, fuse(q, k, k), True, False),
        "out": product(q, stream, False, True),
        "up": product(stream, wide, True, False),
        "down": product(inner, stream, False, True),
        "proj": product(stream, even(m.vocab, col), True, False),
    }
    if m.masked_lm:
        found["dense"] = product(stream, stream, True, True)
    return found


def flows_of_plan(m: ModelConfig, plan: Plan, global_batch: int) -> dict[str, tuple[MatmulSizes, str]]:
    """By name, every matmul and its flow in a run of this plan."""
    tokens, tensor = plan.micro_batch_size(global_batch) * m.seq_len, plan.tensor
    out = {}
    for name, sizes in products_of(m, plan.mesh.row, plan.mesh.col, tokens, tensor.residual).items():
        flow = getattr(tensor.flows, name)
        chosen = choose_flow(
            sizes,
            tensor.flow if flow == "auto" else flow,
            plan.precision.compute_bytes,
            plan.precision.reduce_bytes,
            moves_output=name != "proj",
            keep=tensor.keep,
            micro_batches=plan.micro_batches(global_batch),
        )
        out[name] = sizes, "os" if name == "proj" and m.tie else chosen
    return out
