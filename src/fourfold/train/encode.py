"""From files to token ids: finds the files of a source, reads their examples, encodes them, and keeps the result. No torch.

A source is `stdlib`, a file, a folder or a glob. Files are text, JSONL (`.jsonl`, `.json` with a list, either also `.gz`) or
parquet. Examples are encoded in batches, which the tokenizer spreads over the cores, and go straight to a token file: memory
holds one batch, whatever the size of the source.

[Note: encoded once]
Encoding with a real tokenizer takes minutes for a gigabyte, so it is done once, in a process of its own, and kept in a cache
(`FOURFOLD_CACHE`, default ~/.cache/fourfold) under a name that depends on the files (path, size, time of change), the tokenizer,
the template and the options. All ranks of a host map the same file. A lock lets one process encode and the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from fourfold import files
from fourfold.errors import DataError
from fourfold.train.chats import PLAIN, Chat, ChatTemplate, PlainExample, parse_example, time_limit

__all__ = ["Encoder", "Encoding", "cached_tokens", "encode_to_file", "needs_cache", "source_files"]

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".jsonl.gz", ".parquet")
"""Files that are read of a folder."""
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
"""Folders of the standard library that are not training text."""
LINE = 64 * files.MIB
"""Longest line of a JSONL file, in bytes."""
BATCH = 256
"""Examples encoded at a time."""
SMALL = 64 * files.MIB
"""Bytes: smaller sources are encoded as bytes each time, which takes less than a second."""
VERSION = 1
"""Of what is encoded: a change of it makes every cached file stale."""
AFTER = 3
"""Tokens after a turn among which its end token is looked for."""


@dataclass(frozen=True)
class Encoding:
    """What decides, beside the files, which ids come out."""

    tokenizer: str = "bytes"
    template: str = "auto"
    template_date: str = "2024-07-26"
    loss_on: str = "assistant"


# ---- files and examples ----


def source_files(source: str) -> list[Path]:
    """The files of a source, in a fixed order; raises DataError when there are none."""
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        return sorted(p for p in root.rglob("*.py") if not SKIPPED & set(p.relative_to(root).parts))
    if os.path.isdir(source):
        found = sorted(p for p in Path(source).rglob("*") if p.name.endswith(SUFFIXES) and p.is_file())
        if not found:
            raise DataError(f"data.source = '{source}': no file in it ends in {', '.join(SUFFIXES)}")
        return found
    if glob.has_magic(source) and not os.path.exists(source):
        found = sorted(Path(p) for p in glob.glob(source, recursive=True) if os.path.isfile(p))
        if not found:
            raise DataError(f"data.source = '{source}': no file matches")
        return found
    if not os.path.exists(source):
        raise DataError(f"data.source = '{source}': no such file; use a path, or 'stdlib' for Python's own source")
    return [Path(source)]


def examples(source: str, paths: Iterable[Path]) -> Iterator[tuple[str, PlainExample | Chat]]:
    """The examples of files, each with its place (file and line) for messages."""
    for path in paths:
        name = path.name.removesuffix(".gz")
        if name.endswith(".parquet"):
            yield from _parquet(path)
        elif name.endswith(".jsonl"):
            yield from _json_lines(path)
        elif name.endswith(".json"):
            yield from _json_array(path)
        else:
            try:
                text = files.read_bytes(path, DataError, most=4096 * files.MIB).decode("utf-8")
            except UnicodeDecodeError:
                if source == "stdlib":  # a few files there test other encodings
                    continue
                raise DataError(f"{path}: not UTF-8 text") from None
            if text:
                yield str(path), PlainExample(text)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    with files.open_for_reading(path, DataError) as f:
        try:
            yield cast(IO[bytes], gzip.GzipFile(fileobj=f)) if path.name.endswith(".gz") else f
        except (OSError, EOFError) as e:
            raise DataError(f"{path}: cannot be read: {e}") from None


def _json_lines(path: Path) -> Iterator[tuple[str, PlainExample | Chat]]:
    with _opened(path) as f:
        for number in itertools.count(1):
            where, line = f"{path}:{number}", f.readline(LINE + 1)
            if not line:
                return
            if len(line) > LINE:
                raise DataError(f"{where}: longer than {LINE} bytes")
            if line.strip():
                yield where, parse_example(files.parse_json(_utf8(line, where), where, DataError), where)


def _json_array(path: Path) -> Iterator[tuple[str, PlainExample | Chat]]:
    with _opened(path) as f:
        data = f.read(1024 * files.MIB + 1)
    if len(data) > 1024 * files.MIB:
        raise DataError(f"{path}: larger than 1 GiB; use JSONL, which is read line by line")
    found = files.parse_json(_utf8(data, str(path)), str(path), DataError)
    if not isinstance(found, list):
        raise DataError(f"{path}: expected a list of examples; a file with one object per line is named .jsonl")
    for number, item in enumerate(found, start=1):
        yield f"{path}, example {number}", parse_example(item, f"{path}, example {number}")


def _parquet(path: Path) -> Iterator[tuple[str, PlainExample | Chat]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(f"{path}: parquet files need the extra: pip install 'fourfold[parquet]'") from None
    try:
        number = 0
        with ParquetFile(path) as table:
            for batch in table.iter_batches(BATCH):
                for item in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", parse_example(item, f"{path}, row {number}")
    except (ArrowException, OSError) as e:
        raise DataError(f"{path}: cannot be read as parquet: {e}") from None


def _utf8(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise DataError(f"{where}: byte {e.start} is not UTF-8") from None


# ---- encoding ----


def load_template(encoding: Encoding) -> ChatTemplate | None:
    """The template that a run's chats are rendered with; None where the tokenizer's folder has none."""
    on = date.fromisoformat(encoding.template_date)
    if encoding.template == "plain":
        return ChatTemplate(PLAIN, "the template 'plain'", date=on)
    folder = Path(encoding.tokenizer).parent if encoding.tokenizer not in ("bytes", "") else None
    own = ChatTemplate.load(folder, date=on) if folder is not None else None
    if encoding.template == "auto":
        return own
    text = files.read_text(encoding.template, DataError)
    return ChatTemplate(text, encoding.template, own.tokens if own else {}, on)


class Encoder:
    """Examples to token ids and a mask of the trained ones; counts what it leaves out."""

    def __init__(self, codec: Any, encoding: Encoding):
        self.codec, self.encoding = codec, encoding
        self.dtype = np.uint8 if codec.vocab <= 2**8 else np.uint16 if codec.vocab <= 2**16 else np.uint32
        self.empty = 0  # chats whose answer says nothing
        self.prompted = False  # whether some example is a prompt and its answer
        self._template: ChatTemplate | None = None
        self._looked = False

    def __call__(
        self, found: Iterable[tuple[str, PlainExample | Chat]]
    ) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.uint8] | None]]:
        """Ids of every example, and which of them are trained (None: all of them)."""
        with time_limit("a chat") as since:
            for batch in _batched(found, BATCH):
                texts, trained = [], []
                for where, example in batch:
                    since[0] = time.monotonic()
                    rendered = self._rendered(where, example)
                    if rendered is not None:
                        texts.append(rendered[0])
                        trained.append(rendered[1:])
                since[0] = time.monotonic() + 600.0  # the library encodes; no template runs
                for (ids, starts, ends), marks in zip(self.codec.encode_all(texts), trained, strict=True):
                    yield self._finished(ids, starts, ends, *marks)

    def _rendered(
        self, where: str, example: PlainExample | Chat
    ) -> tuple[str, list[tuple[int, int]] | None, bool, bool] | None:
        """Text, trained ranges of characters (None: all), whether a turn's end token is to be added, whether it is a chat."""
        everything = self.encoding.loss_on == "all"
        if isinstance(example, PlainExample):
            self.prompted |= bool(example.prompt)
            text = example.prompt + example.text
            return text, None if everything or not example.prompt else [(len(example.prompt), len(text))], False, False
        self.prompted = True
        if example.empty:
            self.empty += 1
            return None
        template = self.template(where)
        try:
            if everything:
                return template.render(example.messages, tools=example.tools), None, False, True
            text, spans, end = template.render_trained(example)
        except DataError as e:
            raise DataError(f"{where}: {e}") from None
        return text, spans, end, True

    def template(self, where: str) -> ChatTemplate:
        if not self._looked:
            self._template, self._looked = load_template(self.encoding), True
        if self._template is None:
            raise DataError(
                f"{where}: a chat, but the tokenizer '{self.encoding.tokenizer}' has no chat template beside it; give "
                "data.template = the path of a jinja file, or 'plain'"
            )
        return self._template

    def _finished(
        self,
        ids: npt.NDArray[Any],
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        spans: list[tuple[int, int]] | None,
        end_of_turn: bool,
        chat: bool,
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8] | None]:
        mask = None
        if spans is not None:
            mask = np.zeros(len(ids), np.uint8)
            for first, last in spans:
                at = np.nonzero((ends > first) & (starts < last) & (ends > starts))[0]
                mask[at] = 1
                if end_of_turn and len(at):
                    after = at[-1] + 1
                    special = [
                        k for k in range(after, min(after + AFTER, len(ids))) if int(ids[k]) in self.codec.special
                    ]
                    if special:
                        mask[after : special[0] + 1] = 1
        ids = ids.astype(self.dtype, copy=False)
        if chat:  # its template writes all special tokens
            return ids, mask
        begin = [] if self.codec.begin is None or spans is None else [self.codec.begin]
        ids = np.concatenate((np.array(begin, self.dtype), ids, np.array([self.codec.end], self.dtype)))
        if mask is not None:
            mask = np.concatenate((np.zeros(len(begin), np.uint8), mask, np.ones(1, np.uint8)))
        return ids, mask


def _batched(items: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    rest = iter(items)
    while batch := tuple(itertools.islice(rest, size)):
        yield batch


# ---- token files ----


def encode_to_file(
    source: str, encoding: Encoding, out: Path, progress: Callable[[int, int], None] | None = None
) -> None:
    """Encode a source into a token file (data.py says its format), which appears whole or not at all."""
    from fourfold.train.data import MAGIC, load_tokenizer

    paths = source_files(source)
    codec = load_tokenizer(encoding.tokenizer)
    encoder = Encoder(codec, encoding)
    digest, lengths, tokens, masked = hashlib.blake2b(digest_size=16), [], 0, False
    room = 4096  # of the header, which is written last
    with files.create(out, DataError) as f, tempfile.TemporaryFile(dir=out.parent) as masks:
        f.write(b" " * room)
        for ids, mask in encoder(_followed(examples(source, paths), paths, progress)):
            data = ids.astype(ids.dtype.newbyteorder("<"), copy=False).tobytes()
            f.write(data)
            digest.update(data)
            masks.write((np.ones(len(ids), np.uint8) if mask is None else mask).tobytes())
            masked |= mask is not None
            lengths.append(len(ids))
            tokens += len(ids)
        if not tokens:
            raise DataError(f"data.source = '{source}': there is no text in it")
        if masked:
            masks.seek(0)
            while part := masks.read(1 << 24):
                f.write(part)
                digest.update(part)
        f.write(np.cumsum([0, *lengths], dtype="<u8").tobytes())
        header = {
            "version": 2,
            "dtype": np.dtype(encoder.dtype).name,
            "tokens": tokens,
            "masked": masked,
            "documents": len(lengths),
            "prompted": encoder.prompted,
            "left_out": encoder.empty,
            "vocab": codec.vocab,
            "end": codec.end,
            "mask_token": codec.mask,
            "tokenizer": codec.name,
            "fingerprint": digest.hexdigest(),
        }
        text = json.dumps(header).encode()
        if len(text) > room - len(MAGIC) - 4:
            raise DataError(f"{out}: the tokenizer's name is too long for the header of a token file")
        f.seek(0)
        f.write(MAGIC + (room - len(MAGIC) - 4).to_bytes(4, "little") + text)
        f.seek(0, io.SEEK_END)


def _followed(
    found: Iterator[tuple[str, PlainExample | Chat]], paths: list[Path], progress: Callable[[int, int], None] | None
) -> Iterator[tuple[str, PlainExample | Chat]]:
    """The same examples; reports characters read of bytes there are, about four times a second."""
    whole, seen, last = sum(p.stat().st_size for p in paths), 0, time.monotonic()
    for where, example in found:
        seen += (
            len(example.prompt) + len(example.text)
            if isinstance(example, PlainExample)
            else sum(len(m["content"]) for m in example.messages)
        )
        if progress is not None and time.monotonic() - last > 0.25:
            last = time.monotonic()
            progress(min(seen, whole), whole)
        yield where, example


# ---- the cache: [Note: encoded once] ----


def needs_cache(source: str, tokenizer: str) -> bool:
    """Whether encoding takes long enough to be kept."""
    if source == "stdlib" and tokenizer == "bytes":
        return False
    return tokenizer != "bytes" or sum(p.stat().st_size for p in source_files(source)) > SMALL


def cache_folder() -> Path:
    given = os.environ.get("FOURFOLD_CACHE")
    base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fourfold"
    return base / "data"


def cached_tokens(source: str, encoding: Encoding) -> Path:
    """The token file of a source, encoded now if it was not before; other processes of this host wait for it."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{_key(source, encoding)}.tokens"
        if path.exists():
            return path
        with (folder / f"{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _encode_in_a_process(source, encoding, path)
    except OSError as e:
        raise DataError(
            f"{folder}: encoded data cannot be kept there: {files.why(e)}; set FOURFOLD_CACHE to a folder that can be written"
        ) from None
    return path


def _key(source: str, encoding: Encoding) -> str:
    digest = hashlib.blake2b(digest_size=16)
    there = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in source_files(source)]
    folder = Path(encoding.tokenizer).parent
    beside = [Path(encoding.tokenizer), folder / "tokenizer_config.json", folder / "chat_template.jinja"]
    if encoding.template not in ("auto", "plain"):
        beside.append(Path(encoding.template))
    read = [hashlib.blake2b(p.read_bytes()).hexdigest() if p.is_file() else "" for p in beside]
    digest.update(json.dumps([VERSION, there, read, asdict(encoding)]).encode())
    return digest.hexdigest()


def _encode_in_a_process(source: str, encoding: Encoding, out: Path) -> None:
    """A process of its own: the tokenizer's threads must not be there when ranks are forked."""
    asked = json.dumps({"source": source, "out": str(out), **asdict(encoding)})
    done = subprocess.run([sys.executable, "-m", "fourfold.train.encode", asked], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        message = done.stdout.decode(errors="replace").strip().splitlines()
        raise DataError(message[-1] if message else f"encoding {source} failed with exit code {done.returncode}")


def main(asked: str) -> int:
    """Encode in this process; a line on stderr tells how far it is, the last line of stdout what went wrong."""
    fields = json.loads(asked)
    source, out = fields.pop("source"), Path(fields.pop("out"))
    shows, last = sys.stderr.isatty(), [-10]

    def progress(seen: int, whole: int) -> None:
        share = 100 * seen // max(whole, 1)
        if shows:
            sys.stderr.write(f"\rencoding {source}: {share} % ")
        elif share >= last[0] + 10:
            last[0] = share
            sys.stderr.write(f"encoding {source}: {share} %\n")
        sys.stderr.flush()

    try:
        encode_to_file(source, Encoding(**fields), out, progress)
    except DataError as e:
        sys.stdout.write(f"{e}\n")
        return 2
    finally:
        if shows:
            sys.stderr.write("\r\x1b[K")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
