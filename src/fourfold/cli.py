"""The command line, `fourfold COMMAND …`: parses arguments, runs the command, turns errors into messages and exit codes.

Exit codes: 0 success, 1 a run failed (or two runs diverge), 2 invalid input (nothing was started), 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import fourfold
from fourfold import files, schema
from fourfold.commands.calibrate import CalibrateArgs, calibrate_command
from fourfold.commands.checkpoint import CheckpointArgs, checkpoint_command
from fourfold.commands.demo import DemoArgs, demo
from fourfold.commands.export import ExportArgs, export_command
from fourfold.commands.look import (
    CompareArgs,
    DoctorArgs,
    SampleArgs,
    TokenizeArgs,
    ViewArgs,
    WhyArgs,
    compare,
    doctor,
    sample,
    tokenize,
    view,
    why,
)
from fourfold.commands.plan import PlanArgs, plan_command
from fourfold.commands.simulate import SimulateArgs, simulate_command
from fourfold.commands.train import TrainArgs, loaded_defaults, train, with_local_run
from fourfold.commands.verify import VerifyArgs, verify
from fourfold.errors import ConfigError, FourfoldError
from fourfold.view.text import markup

__all__ = ["main"]


COMMANDS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "demo": (DemoArgs, demo),
    "plan": (PlanArgs, plan_command),
    "simulate": (SimulateArgs, simulate_command),
    "train": (TrainArgs, train),
    "view": (ViewArgs, view),
    "why": (WhyArgs, why),
    "sample": (SampleArgs, sample),
    "export": (ExportArgs, export_command),
    "compare": (CompareArgs, compare),
    "tokenize": (TokenizeArgs, tokenize),
    "calibrate": (CalibrateArgs, calibrate_command),
    "checkpoint": (CheckpointArgs, checkpoint_command),
    "doctor": (DoctorArgs, doctor),
    "verify": (VerifyArgs, verify),
}


atexit.register(gc.freeze)  # no garbage collection at exit: after a long plan it would take a second


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # print "?" for characters that the terminal cannot show
        if isinstance(stream, io.TextIOWrapper) and "utf" not in stream.encoding.lower():
            stream.reconfigure(errors="replace")
    if not args or args[0] in ("-h", "--help"):
        return _help()
    if args[0] == "--version":
        print(f"fourfold {fourfold.__version__}")
        return 0
    debug = "--debug" in args
    try:
        if args[0] not in COMMANDS:
            raise ConfigError(f"unknown command '{args[0]}'{schema.nearest(args[0], COMMANDS)}")
        kind, run = COMMANDS[args[0]]
        return run(_parse(kind, args[0], args[1:]))
    except FourfoldError as e:
        if debug:
            traceback.print_exc()
        else:
            Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {markup(e)}")
        return e.exit_code
    except BrokenPipeError:  # the reader closed the pipe, as in `fourfold … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except OSError as e:  # a file or folder that may not be looked at, say
        if debug or e.filename is None:
            raise
        text = f"{os.fsdecode(e.filename)}: {files.why(e)}"
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {markup(text)}")
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _parse(kind: type, name: str, args: list[str]) -> Any:
    default = None
    args = _joined(args, ("--fix", "--what-if"))
    if kind is TrainArgs:
        args = [
            "--data.source" + a.removeprefix("--data") if a == "--data" or a.startswith("--data=") else a for a in args
        ]
        args = with_local_run(args)
        default = loaded_defaults(args)
        args = [a if a not in ("true", "false") else a.capitalize() for a in args]
    return tyro.cli(kind, prog=f"fourfold {name}", args=args, default=default, config=(tyro.conf.AvoidSubcommands,))


def _joined(args: list[str], flags: Sequence[str]) -> list[str]:
    """Merge the values of repeated flags into the first occurrence, since tyro would keep only the last."""
    for flag in flags:
        at = [i for i, a in enumerate(args) if a == flag]
        for i in reversed(at[1:]):
            end = next((j for j in range(i + 1, len(args)) if args[j].startswith("-")), len(args))
            values, args = args[i + 1 : end], args[:i] + args[end:]
            args[at[0] + 1 : at[0] + 1] = values
    return args


def _help() -> int:
    console = Console(highlight=False)
    console.print("[bold]fourfold[/] trains large models on the GPUs you have.\n\nusage: fourfold COMMAND …\n")
    table = Table.grid(padding=(0, 2))
    for name, (kind, _) in COMMANDS.items():
        table.add_row(f"  [bold]{name}[/]", escape((kind.__doc__ or "").strip().splitlines()[0]))
    console.print(table)
    console.print("\n`fourfold COMMAND --help` lists a command's options.")
    return 0
