"""A compiled function that runs uncompiled where it cannot be compiled, and a place for compiled code that lasts.

The first call compiles. If the compiler fails, the call is repeated uncompiled, a line on stderr says why, and later calls are
not compiled either. Traces have the unit and the reason (train/trace.py), and `fourfold why` names it. The function must be
repeatable: it has no effect before it is compiled. Errors of the function itself are raised as they are. The gradient is compiled
with the forward, not at the first backward, so that its failure is seen in time. Captured graphs are mended before they are
compiled: torch 2.11 would lose gradients (`keep_gradients`).

Compiled code is kept in `~/.cache/fourfold/inductor` (or $XDG_CACHE_HOME) unless TORCHINDUCTOR_CACHE_DIR says otherwise; torch's
own default, which is left where that folder cannot be written, is a temporary folder, which a job may lose between two runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch

from fourfold.record import RECORD
from fourfold.runtime._torch import (
    compile_errors,
    compile_gradients_early,
    compile_often,
    keep_gradients,
    register_compiler,
)

__all__ = ["OrUncompiled", "compiled", "set_compile_cache"]


def compiled(run: Callable[..., Any], options: Mapping[str, bool] | None = None) -> Callable[..., Any]:
    """torch.compile with options of its compiler, whose autograd functions have their gradients under torch 2.11, too."""
    register_compiler("fourfold", _compile)
    made: Callable[..., Any] = torch.compile(run, backend="fourfold", options=dict(options or {}))
    return made


def _compile(graph: torch.fx.GraphModule, inputs: list[Any], *, options: Mapping[str, bool] | None = None) -> Any:
    keep_gradients(graph)
    return _lower(graph, inputs, dict(options or {}))


def _lower(graph: torch.fx.GraphModule, inputs: list[Any], options: dict[str, Any]) -> Any:
    import torch._inductor

    return torch._inductor.compile(graph, inputs, options)


class OrUncompiled:
    """`run`, compiled with `options` if that works."""

    def __init__(self, name: str, run: Callable[..., Any], options: Mapping[str, bool] | None = None):
        self.name, self.plain = name, run
        compile_gradients_early()
        compile_often()
        self.compiled: Callable[..., Any] | None = compiled(run, options)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self.compiled is None:
            return self.plain(*args, **named)
        try:
            return self.compiled(*args, **named)
        except compile_errors() as e:
            why = " ".join(str(e).split())[:300] or type(e).__name__
            print(f"{self.name} runs uncompiled: torch.compile failed: {why}", file=sys.stderr, flush=True)
            self.compiled = None
            RECORD.uncompiled = {**RECORD.uncompiled, self.name: why}
        return self.plain(*args, **named)


def set_compile_cache(environment: MutableMapping[str, str]) -> None:
    """Let compiled code be kept between runs."""
    if environment.get("TORCHINDUCTOR_CACHE_DIR"):
        return
    try:
        folder = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fourfold" / "inductor"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a user without a home, or a home that cannot be written
        return
    if os.access(folder, os.W_OK):
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
