"""Reading and writing files that may be damaged, hostile or on a full disk. No torch.

Every file that Fourfold reads or writes goes through here, so that each rule is written once:

- **Reading.** The file must be a regular one (opening a FIFO or a device would hang) and no larger than a bound that is checked
  before anything is read. Inside a run directory links are refused (`follow=False`): the author of a run directory must
  not be able to choose which other files of the user are read.
- **Parsing.** JSON, TOML and YAML of at most `DEPTH` levels, with numbers and strings that can be printed and stored again.
  Whatever a parser raises (`ValueError`, `RecursionError`, `MemoryError`) becomes the caller's error type with one sentence.
- **Writing.** A new temporary file in the same folder (`O_EXCL`, never through a link), fsync, rename over the target, fsync of
  the folder. A reader sees the old file or the new one. `OSError` becomes a sentence about the disk.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fourfold.errors import FileError, FourfoldError

__all__ = [
    "MIB",
    "append_line",
    "append_to",
    "check_not_link",
    "create",
    "is_plain_name",
    "open_for_reading",
    "parse_json",
    "parse_toml",
    "parse_yaml",
    "read_bytes",
    "read_json",
    "read_json_lines",
    "read_text",
    "sync_folder",
    "why",
    "write_bytes",
    "write_json",
    "write_text",
]

MIB = 2**20
DEPTH = 64
"""Levels of tables and lists in a file."""
LARGEST = 2**127
"""Bound on whole numbers in a file; what a field may hold is checked where it is used."""
KEY_PARTS = 64
"""Parts of a dotted TOML key: the time to read one grows with their square."""
YAML_NODES = 100_000
YAML_BYTES = MIB // 4
"""PyYAML reads about 100 kB a second."""


# ---- reading ----


def open_for_reading(
    path: str | Path, error: type[FourfoldError] = FileError, *, follow: bool = True
) -> io.BufferedReader:
    """A regular file, open for reading; with `follow=False` a link is refused."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
    except OSError as e:
        if e.errno == errno.ELOOP and not follow:
            raise error(f"{path}: is a link; links are not followed here") from None
        raise error(f"{path}: cannot be read: {why(e)}") from None
    except ValueError:  # a NUL, or a surrogate that the file system's encoding does not have
        raise error(f"{str(path)!r}: cannot be the name of a file") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        what = "a folder" if Path(path).is_dir() else "not a regular file"
        raise error(f"{path}: cannot be read: it is {what}")
    return open(handle, "rb")


def read_bytes(
    path: str | Path, error: type[FourfoldError] = FileError, *, most: int = 16 * MIB, follow: bool = True
) -> bytes:
    """All of a regular file of at most `most` bytes."""
    with open_for_reading(path, error, follow=follow) as f:
        size = os.fstat(f.fileno()).st_size
        if size <= most:
            try:
                data = f.read(size + 1)  # one more: it may grow meanwhile
            except OSError as e:
                raise error(f"{path}: cannot be read: {why(e)}") from None
            size = len(data)
        if size > most:
            raise error(f"{path}: has {size} bytes; a file of this kind has at most {most}")
    return data


def read_text(
    path: str | Path, error: type[FourfoldError] = FileError, *, most: int = 16 * MIB, follow: bool = True
) -> str:
    """All of a UTF-8 text file of at most `most` bytes."""
    try:
        return read_bytes(path, error, most=most, follow=follow).decode("utf-8")
    except UnicodeDecodeError as e:
        raise error(f"{path}: cannot be read as text: byte {e.start} is not UTF-8") from None


def read_json(
    path: str | Path, error: type[FourfoldError] = FileError, *, most: int = 16 * MIB, follow: bool = True
) -> Any:
    """A JSON file of at most `most` bytes."""
    return parse_json(read_text(path, error, most=most, follow=follow), str(path), error)


def read_json_lines(
    path: str | Path, error: type[FourfoldError] = FileError, *, longest: int = 64 * MIB, follow: bool = False
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Number and object of every line of a JSONL file of ours; None for a line that is damaged (cut off, or changed).

    A crash or a full disk may truncate the last line, and a bad disk may change any; the other lines are still useful.
    """
    with open_for_reading(path, error, follow=follow) as f:
        number = 0
        while line := _next_line(f, path, longest, error):
            number += 1
            if not line.strip():
                continue
            item = None
            if line.endswith(b"\n"):  # else it was cut off, maybe inside a number
                with contextlib.suppress(FileError, UnicodeDecodeError):
                    item = parse_json(line.decode("utf-8"), "", FileError)
            yield number, item if isinstance(item, dict) else None


def _next_line(f: IO[bytes], path: str | Path, longest: int, error: type[FourfoldError]) -> bytes:
    try:
        line = f.readline(longest)
        while len(line) == longest and not line.endswith(b"\n"):  # too long: dropped up to its end
            rest = f.readline(longest)
            line = b"!" * (longest - 1) + rest[-1:] if len(rest) < longest else rest
        return line
    except OSError as e:
        raise error(f"{path}: cannot be read: {why(e)}") from None


def check_not_link(path: str | Path, error: type[FourfoldError] = FileError) -> None:
    """Refuse a link: it could lead out of its folder."""
    if os.path.islink(path):
        raise error(f"{path}: is a link; links are not followed here. Move what it points to in its place")


def is_plain_name(name: Any) -> bool:
    """Whether a name read from a file is a plain file name: one component, printable, not `.` or `..`."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= 255
        and name not in (".", "..")
        and "/" not in name
        and "\\" not in name
        and name.isprintable()
        and _is_unicode(name)
    )


# ---- parsing ----


def parse_json(text: str, where: str, error: type[FourfoldError] = FileError) -> Any:
    """JSON without duplicate keys, NaN or Infinity. `where` opens the error's text."""
    try:
        value = json.loads(text, object_pairs_hook=_table, parse_constant=_refuse_constant)
        _check(value, finite=True)
    except RecursionError:
        raise error(_say(where, "not valid JSON", _TOO_DEEP)) from None
    except (ValueError, MemoryError) as e:
        raise error(_say(where, "not valid JSON", _short(e))) from None
    return value


def parse_toml(text: str, where: str, error: type[FourfoldError] = FileError) -> dict[str, Any]:
    """TOML, with a bound on the parts of a dotted key."""
    if _LONG_KEY.search(text):
        raise error(_say(where, "not valid TOML", f"a key has more than {KEY_PARTS} parts"))
    try:
        value = tomllib.loads(text)
        _check(value, finite=False)
    except RecursionError:
        raise error(_say(where, "not valid TOML", _TOO_DEEP)) from None
    except (ValueError, MemoryError, OverflowError) as e:
        raise error(_say(where, "not valid TOML", _short(e))) from None
    return value


def parse_yaml(text: str, where: str, error: type[FourfoldError] = FileError) -> Any:
    """YAML of the safe loader, without aliases: a few hundred bytes of them expand to gigabytes."""
    try:
        import yaml
    except ImportError:
        raise error(_say(where, "YAML needs the extra", "pip install 'fourfold[yaml]' (or use TOML or JSON)")) from None
    if len(text) > YAML_BYTES:
        raise error(_say(where, "not read", f"{len(text)} characters of YAML, at most {YAML_BYTES}; use JSON or TOML"))

    class Loader(yaml.SafeLoader):
        nodes = depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                raise ValueError("aliases (*name) are not allowed; write the value out")
            self.nodes += 1
            self.depth += 1
            if self.depth > DEPTH:
                raise ValueError(_TOO_DEEP)
            if self.nodes > YAML_NODES:
                raise ValueError(f"more than {YAML_NODES} values")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_yaml_int(self, node: Any) -> int:
            value = self.construct_scalar(node)
            if len(str(value)) > 100:
                raise ValueError(f"a number of {len(str(value))} characters")
            return super().construct_yaml_int(node)

        def construct_yaml_float(self, node: Any) -> float:
            value = self.construct_scalar(node)
            if len(str(value)) > 100:
                raise ValueError(f"a number of {len(str(value))} characters")
            return super().construct_yaml_float(node)

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_yaml_float)
    try:
        value = yaml.load(text, Loader)  # noqa: S506 - a subclass of the safe loader
        _check(value, finite=False)
    except RecursionError:
        raise error(_say(where, "not valid YAML", _TOO_DEEP)) from None
    except Exception as e:  # PyYAML lets AttributeError, TypeError and IndexError of bad tags and dates through
        raise error(_say(where, "not valid YAML", _short(e))) from None
    return value


_TOO_DEEP = f"nested deeper than {DEPTH} levels"
_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*"""
_LONG_KEY = re.compile(rf"(?<![\w-])(?:{_PART}){{{KEY_PARTS}}}")


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:100]!r} appears twice in one table")
    return table


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _check(value: Any, finite: bool) -> None:
    """Raise ValueError if a value cannot be stored and printed again: depth, range of numbers, invalid text."""
    stack = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if depth > DEPTH:
            raise ValueError(_TOO_DEEP)
        if isinstance(item, dict):
            for key, inner in item.items():
                if not isinstance(key, str):
                    raise ValueError(f"the key {key!r} is not a string"[:200])
                if not _is_unicode(key):
                    raise ValueError(f"the key {key[:100]!r} is not valid Unicode")
                stack.append((inner, depth + 1))
        elif isinstance(item, list):
            stack.extend((inner, depth + 1) for inner in item)
        elif isinstance(item, str):
            if not _is_unicode(item):
                raise ValueError(f"the text {item[:100]!r} is not valid Unicode")
        elif isinstance(item, int):
            if not -LARGEST < item < LARGEST:
                raise ValueError(f"a whole number of {item.bit_length()} bits; at most 127 are read")
        elif finite and isinstance(item, float) and not math.isfinite(item):
            raise ValueError("a number is too large for a float")


def _is_unicode(text: str) -> bool:
    """Whether a text has no unpaired surrogate, which no encoding can represent."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _short(e: BaseException) -> str:
    text = " ".join(str(e).split()) or type(e).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


def _say(where: str, what: str, detail: str) -> str:
    return f"{where}: {what}: {detail}" if where else f"{what}: {detail}"


# ---- writing ----


def why(e: OSError) -> str:
    """What an error of the operating system means, as a phrase."""
    return {
        errno.ENOSPC: "no space left on the disk",
        errno.EDQUOT: "the disk quota is used up",
        errno.EROFS: "the file system is read-only",
        errno.EACCES: "permission denied",
        errno.EPERM: "permission denied",
        errno.ENOENT: "no such file",
        errno.EIO: "the disk reports an input/output error",
        errno.ELOOP: "it is a link; links are not followed here",
        errno.ENAMETOOLONG: "the name is too long",
        errno.EMFILE: "too many files are open",
        errno.ENXIO: "it is not a regular file",
    }.get(e.errno or 0, e.strerror or str(e) or type(e).__name__)


@contextlib.contextmanager
def create(path: str | Path, error: type[FourfoldError] = FileError) -> Iterator[IO[bytes]]:
    """A file open for writing that replaces `path` atomically when the block ends without an error.

    A link at `path` is replaced, never written through.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.partial")
    try:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            with os.fdopen(handle, "wb") as f:
                yield f
                f.flush()
                os.fsync(f.fileno())
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
        sync_folder(path.parent)
    except FourfoldError:  # raised by the caller's code: some are ValueErrors, too
        raise
    except OSError as e:
        raise error(f"{path}: cannot be written: {why(e)}") from None
    except ValueError as e:  # a name with a NUL
        raise error(f"{str(path)!r}: cannot be written: {e}") from None


def write_bytes(path: str | Path, data: bytes, error: type[FourfoldError] = FileError) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it."""
    with create(path, error) as f:
        f.write(data)


def write_text(path: str | Path, text: str, error: type[FourfoldError] = FileError) -> None:
    """Write UTF-8 text atomically."""
    write_bytes(path, text.encode("utf-8"), error)


def write_json(path: str | Path, data: Any, error: type[FourfoldError] = FileError, indent: int | None = 2) -> None:
    """Write JSON atomically."""
    write_text(path, json.dumps(data, indent=indent) + "\n", error)


def append_to(path: str | Path, error: type[FourfoldError] = FileError) -> IO[str]:
    """A text file open for appending, created if missing; never a symbolic or hard link."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(path, flags, 0o644)
    except OSError as e:
        raise error(f"{path}: cannot be written: {why(e)}") from None
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(handle)
        raise error(f"{path}: cannot be written: it is a hard link to another file, or not a regular one")
    return os.fdopen(handle, "a", buffering=1, encoding="utf-8")


def append_line(f: IO[str], path: str | Path, line: str, error: type[FourfoldError] = FileError) -> None:
    """Add a line to a file opened by `append_to`; disk errors become `error`."""
    try:
        f.write(f"{line}\n")
    except OSError as e:
        raise error(f"{path}: cannot be written: {why(e)}") from None


def sync_folder(path: str | Path) -> None:
    """Sync a folder, so that its names survive a loss of power; does nothing if folders cannot be synced (some networks)."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)
