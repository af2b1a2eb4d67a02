"""Observing ops: the base class of the ledger and the budget.

An OpWatch sees every op that torch dispatches in the threads that entered it. Torch keeps dispatch modes per thread, so another
thread of the same rank (a receiver of messages) must enter the same watch itself:

    with watch:                         # this thread
        Thread(target=receive).start()

    def receive():
        with watch:                     # and that one
            dist.recv(buffer)

Entering it twice in one thread has no further effect. The backward runs in the thread that calls `backward()` on CPUs, and is
seen. Inside a watch `torch.compile` runs code uncompiled, and raises with `fullgraph=True` (torch's rule for dispatch modes). The
inside of a kernel is not seen.
"""

from __future__ import annotations

import threading
from typing import Any, Self

from torch import Tensor, nn

from fourfold.testing._torch import DispatchMode, FakeTensor

__all__ = ["OpWatch"]


class OpWatch:
    """Observes the ops of the threads that entered it. Subclasses override `op`, which must run the op and return its result."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called instead of each op; ops called inside are not observed."""
        return op(*args, **kwargs)

    def __enter__(self) -> Self:
        depth = getattr(self._thread, "depth", 0)
        if depth == 0:
            self._thread.mode = _Mode(self)
            self._thread.mode.__enter__()
        self._thread.depth = depth + 1
        return self

    def __exit__(self, *error: Any) -> None:
        self._thread.depth -= 1
        if self._thread.depth == 0:
            self._thread.mode.__exit__(*error)


class _Mode(DispatchMode):
    def __init__(self, watch: OpWatch):
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, FakeTensor) for t in types):
            return func(*args, **(kwargs or {}))  # torch is inferring shapes: no computation
        if any(t not in (Tensor, nn.Parameter) for t in types):
            return NotImplemented  # DTensor and other subclasses: they run first, then their plain ops are observed
        return self.watch.op(func, args, kwargs or {})
