"""The private torch name that this package uses: autograd's engine.

`torch.autograd.grad` checks shapes and types in Python before it calls the engine, which checks them again: 0.1 ms a call, as
long as the whole backward of a small unit. A stage calls it once per unit and micro-batch, with gradients of the right shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

__all__ = ["accumulate", "gradients"]


def gradients(
    outputs: Sequence[GradientEdge], inputs: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients of `inputs` (None for an unused one) from those of `outputs`; frees their graph.

    Not for compiled graphs: `torch.autograd.grad` passes compiler settings to the device threads.
    """
    run = Variable._execution_engine.run_backward
    return run(tuple(outputs), tuple(grads), False, False, tuple(inputs), True, accumulate_grad=False)


def accumulate(outputs: Sequence[GradientEdge], inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """The same, but each gradient is accumulated in the `grad` of its input, a leaf, as soon as it is computed."""
    Variable._execution_engine.run_backward(
        tuple(outputs), tuple(grads), False, False, tuple(inputs), True, accumulate_grad=True
    )
