"""Text from files, names and logs, made safe to print. No torch.

A terminal obeys escape sequences: a file name could clear the screen, rename the window or fill the clipboard. rich obeys
markup in square brackets. So text from outside goes through one of these functions before it is printed; files and logs keep it.
"""

from __future__ import annotations

import re

__all__ = ["markup", "printable"]

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of writing
    "\u2028\u2029\ufeff\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f]"  # line breaks, marks, half pairs, tags
)


def printable(text: object) -> str:
    """Text with control characters written out: `\\x1b`, `\\u202e`. Tabs and newlines stay."""
    return _UNSAFE.sub(lambda m: _written(ord(m[0])), str(text))


def markup(text: object) -> str:
    """`printable` text for rich, which would take `[red]` in it for markup."""
    from rich.markup import escape

    return escape(printable(text))


def _written(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
