"""Python programs that tests start: forked from the process that runs the tests, which has imported torch already.

A new interpreter takes 3 s of a core until it has imported what training needs, and the tests start a hundred. `ForkedPopen` is
`subprocess.Popen`, but a command `python -m fourfold …`, `python -m benchmarks.… …` or `python file.py …` is run in a fork, as
`__main__`, with its own standard streams, environment, signal handlers and folder. Every other command is executed, and so is one
whose PYTHONPATH names a folder that this process does not import from. `tests/test_package.py` and the tests of torchrun have
whole runs in interpreters of their own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["ForkedPopen"]

OWN = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGCHLD)
"""Signals that the process of the tests may have a handler for."""


class ForkedPopen(subprocess.Popen):  # type: ignore[type-arg]
    def __init__(self, args: Any, *rest: Any, **options: Any):
        program = None if rest or options.get("shell") or options.get("executable") else _program(args)
        environment = options.get("env")
        if program is None or not _importable(environment if environment is not None else os.environ):
            super().__init__(args, *rest, **options)
            return
        before, kept = options.pop("preexec_fn", None), {0, 1, 2, *options.get("pass_fds", ())}
        # Popen forks, moves streams and folder, and calls this in the child, which ends in it
        super().__init__(args, preexec_fn=lambda: _become(program, environment, kept, before), **options)


def _program(args: Any) -> list[str] | None:
    """The module or file that a command runs in this Python, and its arguments."""
    if isinstance(args, str | bytes | os.PathLike):
        return None
    words = [os.fsdecode(word) for word in args]
    if words[:1] != [sys.executable]:
        return None
    words = [word for i, word in enumerate(words[1:]) if i or word != "-u"]
    module = words[:1] == ["-m"] and (words[1] == "fourfold" or words[1].startswith("benchmarks."))
    return words if module or (words[:1] and words[0].endswith(".py")) else None


def _importable(environment: Mapping[str, str]) -> bool:
    return all(folder in sys.path for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder)


def _become(
    program: Sequence[str], environment: Mapping[str, str] | None, kept: set[int], before: Callable[[], object] | None
) -> None:
    """Run a program in this process, a fork that has its streams; never returns."""
    code = 1
    try:
        gc.freeze()  # [Note: forking from a process that runs tests]
        faulthandler.disable()
        for fd in map(
            int, os.listdir("/proc/self/fd")
        ):  # the one by which Popen learns of a failure, too: it waits for its end
            if fd not in kept:
                with contextlib.suppress(OSError):
                    os.close(fd)
        for number in OWN:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if before is not None:
            before()
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (open as long as the process lives)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
        code = _run(program)
    except BaseException:
        with contextlib.suppress(Exception):
            traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _run(program: Sequence[str]) -> int:
    try:
        if program[0] == "-m":
            sys.argv = [program[1], *program[2:]]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(program)
            sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    return 0
