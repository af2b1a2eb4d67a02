"""The private torch names that this package uses: autograd's engine, and the compiler's errors, settings and graphs.

`torch.autograd.grad` checks shapes and types in Python before it calls the engine, which checks them again: 0.1 ms a call, as
long as the whole backward of a small unit. A stage calls it once per unit and micro-batch, with gradients of the right shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge
from torch.fx import GraphModule, Node

__all__ = [
    "accumulate",
    "compile_errors",
    "compile_gradients_early",
    "compile_often",
    "gradients",
    "keep_gradients",
    "register_compiler",
]


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


def register_compiler(name: str, compiler: Callable[..., Any]) -> None:
    """Let `torch.compile(backend=name)` use `compiler(graph, inputs, *, options)`; does nothing if the name is registered."""
    from torch._dynamo.backends.registry import list_backends, register_backend

    if name not in list_backends(exclude_tags=()):
        register_backend(compiler, name=name)


def keep_gradients(graph: GraphModule) -> None:
    """Mend captured autograd functions of torch 2.11, which lose gradients; those of torch 2.13 are right as they are.

    torch 2.11 lets the captured forward also return its intermediate results, whose gradients the captured backward ignores. One
    of them may be the very tensor that the function returns: `y.mul_(2)`, `y.contiguous()` and `y.to(y.dtype)` can be `y`. Of two
    outputs that are one tensor, autograd gives the gradient to the last: the function's inputs get zeros, and nothing is said. So
    outputs whose gradients are ignored are returned as tensors of their own.
    """
    for module in list(graph.modules()):
        for node in list(module.graph.nodes) if isinstance(module, GraphModule) else ():
            if node.op == "call_function" and getattr(node.target, "__name__", "") == "autograd_function_apply":
                _part_outputs(module, node)


def _part_outputs(module: Any, node: Any) -> None:
    forward, backward = (module.get_submodule(body.target) for body in node.args[:2])
    end = forward.graph.output_node()
    outputs, saved = end.args[0]
    if not isinstance(outputs, tuple | list) or len(outputs) < 2:
        return
    made, dirty = list(outputs), node.kwargs.get("dirty_idx", ())
    with forward.graph.inserting_before(end):
        for i, grad in enumerate(backward.graph.find_nodes(op="placeholder")[: len(made)]):
            value = made[i].meta.get("example_value") if isinstance(made[i], Node) else None  # a size, where sizes vary
            if not grad.users and isinstance(value, Tensor) and i not in dirty:
                made[i] = forward.graph.call_method("detach", (made[i],))
    end.args = ((tuple(made), saved),)
    forward.recompile()


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
