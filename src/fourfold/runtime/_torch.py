"""The private torch names that this package uses: autograd's engine, and the compiler's errors.

`torch.autograd.grad` checks shapes and types in Python before it calls the engine, which checks them again: 0.1 ms a call, as
long as the whole backward of a small unit. A stage calls it once per unit and micro-batch, with gradients of the right shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

__all__ = ["accumulate", "compile_errors", "compile_gradients_early", "compile_often", "gradients"]


def compile_gradients_early() -> None:
    """Compile a function's gradient together with it: a failure then shows in the forward, not in the first backward."""
    import torch._functorch.config as config

    config.force_non_lazy_backward_lowering = True


def compile_often() -> None:
    """Let one function be compiled up to 32 times instead of eight; beyond that torch runs it uncompiled.

    All layers have one function. It is compiled for each kind of layer (with a window or without), with gradients and without
    them (recomputation), and again for a varying number of documents.
    """
    import torch._dynamo.config as config

    config.recompile_limit = max(32, config.recompile_limit)


def compile_errors() -> tuple[type[Exception], ...]:
    """What torch.compile raises where it fails; imported when it is needed, since it takes seconds."""
    from torch._dynamo.exc import TorchDynamoException

    return (TorchDynamoException,)


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
