"""The private name of torch that this package uses: autograd's engine.

`torch.autograd.grad` looks at shapes and types in Python before it calls the engine, which checks them again: 0.1 ms a call, as
long as a small unit's whole backward. A stage calls once per unit and micro-batch, with gradients that fit by construction.
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
    """Gradients of `inputs` (None where one was not used) from those of `outputs`, whose graph is gone afterwards.

    Not for a compiled graph: `torch.autograd.grad` tells its compiler's settings to the threads of devices.
    """
    run = Variable._execution_engine.run_backward
    return run(tuple(outputs), tuple(grads), False, False, tuple(inputs), True, accumulate_grad=False)


def accumulate(outputs: Sequence[GradientEdge], inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """The same, each gradient added to the `grad` of its input, a leaf, as soon as it is there."""
    Variable._execution_engine.run_backward(
        tuple(outputs), tuple(grads), False, False, tuple(inputs), True, accumulate_grad=True
    )
