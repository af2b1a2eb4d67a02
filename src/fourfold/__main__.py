"""The `fourfold` command, and `python -m fourfold`.

Ctrl-C while modules are imported, before `main` can catch it, ends the process without a traceback: the signal's default.
"""

import signal
import sys

_HANDLER = signal.getsignal(signal.SIGINT)
if _HANDLER is signal.default_int_handler:  # not if it is ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from fourfold.cli import main  # noqa: E402

if _HANDLER is signal.default_int_handler:
    signal.signal(signal.SIGINT, _HANDLER)

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
