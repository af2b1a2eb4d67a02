"""Watching ops: the ground that the ledger and the budget stand on.

A watch sees every op that torch dispatches in the threads that have entered it. Torch keeps dispatch modes per thread, so a
thread that works for the same rank (a receiver of messages) enters the same watch itself:

    with watch:                         # this thread
        Thread(target=receive).start()

    def receive():
        with watch:                     # and that one
            dist.recv(buffer)

Entering it again in a thread that is inside already changes nothing: no op is seen twice. The backward of a loss runs where
`backward()` was called and is seen. `torch.compile` compiles nothing inside a watch, it runs the code as it stands, and with
`fullgraph=True` refuses (torch's rule for dispatch modes). What a kernel does within itself is not seen.
"""

from __future__ import annotations

import threading
from typing import Any, Self

from torch import Tensor, nn

from fourfold.testing._torch import DispatchMode, FakeTensor

__all__ = ["OpWatch"]


class OpWatch:
    """Sees the ops of the threads that entered it: override `op`, which must call it and return its result."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called instead of each op; ops called within are not seen by this watch."""
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
            return func(*args, **(kwargs or {}))  # torch is working out shapes: nothing happens
        if any(t not in (Tensor, nn.Parameter) for t in types):
            return NotImplemented  # a DTensor and the like: let it act first, then see the plain ops it issues
        return self.watch.op(func, args, kwargs or {})
