"""From files to token ids: finds the files of a source, reads their examples, encodes them, and caches the result. No torch.

A source is `stdlib`, a file, a folder or a glob; several may be encoded together. Files are text, JSONL (`.jsonl`, `.json` with a
list), parquet, or Arrow as Hugging Face's `datasets` saves it; all but the last two also as `.gz` or `.zst`.

    files ── reader ──► chunks of about 4 MB ──► workers: parse, render, encode ──► in order ──► token file

Workers are processes that get chunks through their standard input and return ids, masks and lengths. Chunks do not depend on
the number of workers, so neither does the result. Memory holds a few chunks for each worker, whatever the size of the source.

[Note: encoded once]
Encoding a gigabyte with a subword tokenizer takes minutes, so it is done once, in a separate process, and cached
(`FOURFOLD_CACHE`, default ~/.cache/fourfold) under a name that depends on the files (path, size, modification time), the
tokenizer, the template and the options. All ranks of a host map the same file. Under a lock, one process encodes and the others
wait.
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
import pickle
import queue
import subprocess
import sys
import sysconfig
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from fourfold import files
from fourfold.data.chats import PLAIN, Chat, ChatTemplate, PlainExample, clock, parse_examples, time_limit
from fourfold.errors import DataError

__all__ = [
    "Encoder",
    "Encoding",
    "SourceChunk",
    "cached_tokens",
    "encode_to_file",
    "examples",
    "needs_cache",
    "source_chunks",
    "source_files",
]

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet", ".arrow")
"""Suffixes of the files that are read from a folder, compressed or not."""
EXAMPLES = (".jsonl", ".parquet", ".arrow")
"""Those of them that hold one example per line or row."""
COMPRESSED = (".gz", ".zst")
OTHERS = (
    ".csv",
    ".tsv",
    ".xlsx",
    ".xls",
    ".pdf",
    ".html",
    ".xml",
    ".zip",
    ".tar",
    ".docx",
    ".pkl",
    ".npy",
    ".pt",
    ".safetensors",
)
"""Suffixes of files that are not plain text."""
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
"""Folders of the standard library that are not training text."""
LINE = 64 * files.MIB
"""Longest line of a JSONL file, in bytes."""
BATCH = 256
"""Examples encoded at a time."""
CHUNK = 4 * files.MIB
"""Bytes of a source that one worker encodes at a time."""
MOST_WORKERS = 64
SMALL = 64 * files.MIB
"""Bytes: smaller sources are encoded anew each time with the byte tokenizer, which takes less than a second."""
VERSION = 2
"""Version of the encoding; changing it invalidates every cached file."""
MIXED = "preference pairs and other examples in one source; keep one kind"
AFTER = 3
"""Number of tokens after a turn that are searched for its end token."""


@dataclass(frozen=True)
class Encoding:
    """The settings that, together with the files, determine the token ids."""

    tokenizer: str = "bytes"
    template: str = "auto"
    template_date: str = "2024-07-26"
    loss_on: str = "assistant"


# ---- files and examples ----


def source_files(source: str) -> list[Path]:
    """The files of a source, in a fixed order; raises DataError if there are none."""
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        return sorted(p for p in root.rglob("*.py") if not SKIPPED & set(p.relative_to(root).parts))
    if os.path.isdir(source):
        if saved := _saved_dataset(Path(source)):
            return saved
        found = sorted(p for p in Path(source).rglob("*") if _plain_name(p).endswith(SUFFIXES) and p.is_file())
        if not found:
            raise DataError(f"data.source = '{source}': no file in it ends in {', '.join(SUFFIXES)}")
        _check_one_kind(Path(source), found)
        return found
    if glob.has_magic(source) and not os.path.exists(source):
        found = sorted(Path(p) for p in glob.glob(source, recursive=True) if os.path.isfile(p))
        if not found:
            raise DataError(f"data.source = '{source}': no file matches")
        return found
    if not os.path.exists(source):
        raise DataError(f"data.source = '{source}': no such file; use a path, or 'stdlib' for Python's own source")
    return [Path(source)]


def _check_one_kind(folder: Path, found: Sequence[Path]) -> None:
    """Refuse a folder of examples that also has text, which would be trained on, or data in forms that would be left out."""
    example = next((p for p in found if _plain_name(p).endswith(EXAMPLES)), None)
    if example is None:
        return
    kinds = (*(s for s in SUFFIXES if s not in EXAMPLES), ".json", ".csv", ".tsv")
    other = next((p for p in sorted(folder.rglob("*")) if _plain_name(p).endswith(kinds) and p.is_file()), None)
    if other is not None:
        suffixes = "".join(example.suffixes[-2:]) if example.suffix in COMPRESSED else example.suffix
        raise DataError(
            f"data.source = '{folder}': has examples ({example.relative_to(folder)}) and {other.relative_to(folder)}, which is "
            f"of another kind; name the files to train on, for example '{example.parent}/*{suffixes}'"
        )


def _saved_dataset(folder: Path) -> list[Path]:
    """The files of a dataset written by Hugging Face's `save_to_disk` (its `train` split); empty if it is not one."""
    if (folder / "dataset_dict.json").is_file():
        found = files.read_json(folder / "dataset_dict.json", DataError)
        splits = found.get("splits") if isinstance(found, dict) else None
        names = [str(s) for s in splits] if isinstance(splits, list) else []
        if "train" not in names:
            raise DataError(
                f"{folder}: a dataset with the splits {', '.join(names) or 'none'}; name one: {folder}/SPLIT"
            )
        folder = folder / "train"
    if not (folder / "state.json").is_file():
        return []
    state = files.read_json(folder / "state.json", DataError)
    listed = state.get("_data_files") if isinstance(state, dict) else None
    paths = [f.get("filename") for f in listed if isinstance(f, dict)] if isinstance(listed, list) else []
    if not paths or not all(map(files.is_plain_name, paths)):
        raise DataError(f"{folder / 'state.json'}: does not name the files of the dataset")
    return [folder / str(name) for name in paths]


def _plain_name(path: Path) -> str:
    """The file's name without the suffix of its compression."""
    name = path.name
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return name


class SourceChunk(NamedTuple):
    """A part of a file, passed from the reader to a worker."""

    kind: Literal["lines", "items", "rows", "text"]
    path: str
    first: int
    """Number of its first line, example or row."""
    data: Any
    """Bytes of whole lines, a list of JSON values, a table in Arrow's stream format, or text."""
    size: int = 0
    """Number of bytes of the file that it covers, for progress."""


def source_chunks(source: str) -> Iterator[SourceChunk]:
    """The files of a source, read in order, in chunks."""
    for path in source_files(source):
        name = _plain_name(path)
        if name.endswith((".parquet", ".arrow")):
            yield from _tables(path)
        elif name.endswith(".jsonl"):
            yield from _lines(path)
        elif name.endswith(".json"):
            yield from _array(path)
        else:
            yield from _text(path, keep_going=source == "stdlib")


def examples(chunks: Iterable[SourceChunk]) -> Iterator[tuple[str, PlainExample | Chat]]:
    """The examples of chunks, each with its location (file and line) for messages."""
    for chunk in chunks:
        match chunk.kind:
            case "lines":
                for number, line in enumerate(chunk.data.split(b"\n"), chunk.first):
                    if line.strip():
                        where = f"{chunk.path}:{number}"
                        for example in parse_examples(_json_line(line, where), where):
                            yield where, example
            case "text":
                yield chunk.path, PlainExample(chunk.data)
            case _:
                word = "row" if chunk.kind == "rows" else "example"
                for number, item in enumerate(_items(chunk), chunk.first):
                    where = f"{chunk.path}, {word} {number}"
                    for example in parse_examples(item, where):
                        yield where, example


def _json_line(line: bytes, where: str) -> Any:
    text = _utf8(line, where)
    if text.strip() == "[" and where.endswith(":1"):
        raise DataError(f"{where}: the file is a list over several lines, not one example per line; name it .json")
    return files.parse_json(text, where, DataError)


def _items(chunk: SourceChunk) -> list[Any]:
    if chunk.kind == "items":
        return list(chunk.data)
    import pyarrow

    rows: list[Any] = pyarrow.ipc.open_stream(chunk.data).read_all().to_pylist()
    return rows


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """Open a file, decompressing it; also returns a function for the number of (compressed) bytes read so far."""
    with files.open_for_reading(path, DataError) as f:
        try:
            if path.name.endswith(".zst"):
                try:
                    import zstandard
                except ImportError:
                    raise DataError(f"{path}: .zst files need the extra: pip install 'fourfold[zstd]'") from None
                reader = _Frames(f, lambda: zstandard.ZstdDecompressor().decompressobj())
                try:
                    yield cast(IO[bytes], io.BufferedReader(reader)), f.tell
                except zstandard.ZstdError as e:
                    raise DataError(f"{path}: cannot be read: {e}") from None
            else:
                yield cast(IO[bytes], gzip.GzipFile(fileobj=f)) if path.name.endswith(".gz") else f, f.tell
        except (OSError, EOFError) as e:
            raise DataError(f"{path}: cannot be read: {e}") from None


class _Frames(io.RawIOBase):
    """Decompresses a sequence of zstd frames. (The library's own reader does not detect a truncated file.)"""

    def __init__(self, f: IO[bytes], make: Callable[[], Any]):
        self.f, self.make, self.frame, self.left = f, make, make(), memoryview(b"")
        self.fresh = True  # at the start of a frame

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.left:
            data = b""
            if self.frame.eof:
                data, self.frame, self.fresh = self.frame.unused_data, self.make(), True
            data = data or self.f.read(1 << 16)
            if not data:
                if self.fresh:
                    return 0
                raise EOFError("it ends in the middle of a frame")
            self.left, self.fresh = memoryview(self.frame.decompress(data)), False
        count = min(len(buffer), len(self.left))
        buffer[:count], self.left = self.left[:count], self.left[count:]
        return count


def _lines(path: Path) -> Iterator[SourceChunk]:
    number, seen = 1, 0
    with _opened(path) as (f, read):
        while data := f.read(CHUNK):
            if not data.endswith(b"\n"):
                rest = f.readline(LINE + 1)
                if len(rest) > LINE:
                    line = number + data.count(b"\n")
                    raise DataError(f"{path}:{line}: longer than {LINE} bytes")
                data += rest
            yield SourceChunk("lines", str(path), number, data, read() - seen)
            number, seen = number + data.count(b"\n"), read()


def _array(path: Path) -> Iterator[SourceChunk]:
    with _opened(path) as (f, _):
        data = f.read(1024 * files.MIB + 1)
    if len(data) > 1024 * files.MIB:
        raise DataError(f"{path}: larger than 1 GiB; use JSONL, which is read line by line")
    found = files.parse_json(_utf8(data, str(path)), str(path), DataError)
    if not isinstance(found, list):
        raise DataError(f"{path}: expected a list of examples; a file with one object per line is named .jsonl")
    each = max(1, len(found) * CHUNK // max(1, len(data)))
    for first in range(0, len(found), each):
        yield SourceChunk(
            "items", str(path), first + 1, found[first : first + each], path.stat().st_size * each // len(found)
        )


def _tables(path: Path) -> Iterator[SourceChunk]:
    """Rows of a parquet file, or of an Arrow file (a stream, as `datasets` writes it)."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(f"{path}: parquet and Arrow files need the extra: pip install 'fourfold[parquet]'") from None
    number, size = 1, path.stat().st_size
    try:
        with contextlib.ExitStack() as stack:
            if path.name.endswith(".parquet"):
                table = stack.enter_context(ParquetFile(path))
                batches, rows = table.iter_batches(4 * BATCH), table.metadata.num_rows
            else:
                mapped = stack.enter_context(pyarrow.memory_map(str(path)))
                whole = pyarrow.ipc.open_stream(mapped).read_all()  # maps the file without reading it
                batches, rows = iter(whole.to_batches(4 * BATCH)), whole.num_rows
            for batch in batches:
                sink = pyarrow.BufferOutputStream()
                with pyarrow.ipc.new_stream(sink, batch.schema) as out:
                    out.write_batch(batch)
                yield SourceChunk(
                    "rows", str(path), number, sink.getvalue().to_pybytes(), size * len(batch) // max(1, rows)
                )
                number += len(batch)
    except (pyarrow.ArrowException, OSError) as e:
        kind = "parquet" if path.name.endswith(".parquet") else "an Arrow stream"
        raise DataError(f"{path}: cannot be read as {kind}: {e}") from None


def _text(path: Path, *, keep_going: bool) -> Iterator[SourceChunk]:
    """A text file, which is one document; `keep_going`: skip files of other encodings."""
    if path.name.endswith(OTHERS):
        raise DataError(
            f"{path}: a {path.suffix} file is not text to train on; convert it to JSONL (one object with 'text', 'messages' "
            "or 'prompt' and 'completion' per line) or parquet"
        )
    with _opened(path) as (f, _):
        data = f.read(4096 * files.MIB + 1)
    if len(data) > 4096 * files.MIB:
        raise DataError(f"{path}: larger than 4 GiB; cut it into several files, or use JSONL")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        if keep_going:  # a few files of the standard library have other encodings
            return
        line = data.count(b"\n", 0, e.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8 text (byte {e.start} of the file)") from None
    if kind := _json_inside(text):
        raise DataError(f"{path}: holds {kind}, which would be trained on as plain text; name it {kind.split()[-1]}")
    if text:
        yield SourceChunk("text", str(path), 1, text, path.stat().st_size)


def _json_inside(text: str) -> str:
    """The kind of JSON that a text contains, a list or lines of objects; empty: none."""
    start = text[:4096].lstrip()
    try:
        if start.startswith("{"):
            line = text.lstrip().split("\n", 1)[0]
            return "one JSON object per line: .jsonl" if isinstance(json.loads(line), dict) else ""
        if (
            start.startswith("[")
            and isinstance(found := json.loads(text), list)
            and isinstance((found or [0])[0], dict)
        ):
            return "a JSON list of objects: .json"
    except (ValueError, RecursionError):
        pass
    return ""


def _utf8(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise DataError(f"{where}: byte {e.start} is not UTF-8") from None


# ---- encoding ----


def load_template(encoding: Encoding) -> ChatTemplate | None:
    """The chat template of a run; None if the tokenizer's folder has none."""
    on = date.fromisoformat(encoding.template_date)
    if encoding.template == "plain":
        return ChatTemplate(PLAIN, "the template 'plain'", date=on)
    folder = Path(encoding.tokenizer).parent if encoding.tokenizer not in ("bytes", "") else None
    if encoding.template == "auto":
        return ChatTemplate.load(folder, date=on) if folder is not None else None
    text = files.read_text(encoding.template, DataError)
    return ChatTemplate(text, encoding.template, ChatTemplate.tokens_in(folder) if folder is not None else {}, on)


def nothing_in(source: str, empty: int) -> str:
    """What is said of a source without documents, `empty` of whose chats were left out."""
    if empty:
        return f"data.source = '{source}': the answers of all its {empty:,} chats are empty, so there is nothing to train on"
    return f"data.source = '{source}': there is no text in it"


class Encoder:
    """Examples to token ids and a mask of the trained ones; counts the examples it skips."""

    def __init__(self, codec: Any, encoding: Encoding):
        self.codec, self.encoding = codec, encoding
        self.dtype = np.uint8 if codec.vocab <= 2**8 else np.uint16 if codec.vocab <= 2**16 else np.uint32
        self.empty = 0  # number of chats whose answer is empty
        self.prompted = False  # whether any example is a prompt with an answer
        self.paired: bool | None = (
            None  # whether examples are preference pairs, adjacent to each other; None: no example yet
        )
        self._template: ChatTemplate | None = None
        self._looked = False

    def __call__(
        self, found: Iterable[tuple[str, PlainExample | Chat]]
    ) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.uint8] | None]]:
        """The ids of each example, and the mask of the trained ones (None: all)."""
        with time_limit("a chat") as limit:
            for batch in _batched(found, BATCH):
                texts, trained = [], []
                for where, example in batch:
                    limit.since, limit.where = clock(), where
                    rendered = self._rendered(where, example)
                    if rendered is not None:
                        texts.append(rendered[0])
                        trained.append(rendered[1:])
                limit.since = clock() + 600.0  # the library encodes; no template runs
                locate = any(spans is not None for spans, *_ in trained)
                for (ids, tokens), marks in zip(self.codec.encode_all(texts, locate=locate), trained, strict=True):
                    yield self._finished(ids, tokens, *marks)

    def _rendered(
        self, where: str, example: PlainExample | Chat
    ) -> tuple[str, list[tuple[int, int]] | None, bool, bool] | None:
        """Text, trained ranges of characters (None: all), whether to add a turn's end token, whether it is a chat."""
        everything = self.encoding.loss_on == "all"
        if self.paired is None:
            self.paired = bool(example.side)
        if self.paired != bool(example.side):
            raise DataError(f"{where}: {MIXED}")
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
                return template.render_chat(example), None, False, True
            text, spans, end = template.render_trained(example)
        except DataError as e:
            raise DataError(f"{where}: {e}") from None
        return text, spans, end, True

    def template(self, where: str) -> ChatTemplate:
        if not self._looked:
            self._template, self._looked = load_template(self.encoding), True
        if self._template is None:
            raise DataError(
                f"{where}: a chat, but the tokenizer '{self.encoding.tokenizer}' has no chat template in its folder; set "
                "data.template = the path of a jinja file, or 'plain'"
            )
        return self._template

    def _finished(
        self,
        ids: npt.NDArray[Any],
        tokens: Callable[[int, int], tuple[int, int]],
        spans: list[tuple[int, int]] | None,
        end_of_turn: bool,
        chat: bool,
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8] | None]:
        mask = None
        if spans is not None:
            mask = np.zeros(len(ids), np.uint8)
            for first, last in spans:
                start, after = tokens(first, last)
                mask[start:after] = 1
                if end_of_turn and start < after:
                    near = range(after, min(after + AFTER, len(ids)))
                    ends = [k for k in near if ids[k] == self.codec.end]  # some write another special token before it
                    ends += [k for k in near if int(ids[k]) in self.codec.special]
                    if ends:
                        mask[after : ends[0] + 1] = 1
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


# ---- chunks, encoded here or by workers ----


class Encoded(NamedTuple):
    """An encoded chunk: the ids of all its documents, the mask of predicted ones (None: all), and the documents' lengths."""

    ids: npt.NDArray[Any]
    mask: npt.NDArray[np.uint8] | None
    lengths: list[int]
    size: int
    empty: int
    """Number of examples skipped because their answer is empty."""
    prompted: bool
    """Whether any example is a prompt with an answer."""
    paired: bool | None
    """Whether its examples are preference pairs; None: it has none."""


def encode_chunk(encoder: Encoder, chunk: SourceChunk) -> Encoded:
    encoder.empty, encoder.prompted, encoder.paired = 0, False, None
    found = list(encoder(examples([chunk])))
    ids = np.concatenate([ids for ids, _ in found]) if found else np.zeros(0, encoder.dtype)
    mask = None
    if any(marks is not None for _, marks in found):
        mask = np.concatenate([np.ones(len(i), np.uint8) if m is None else m for i, m in found])
    return Encoded(ids, mask, [len(i) for i, _ in found], chunk.size, encoder.empty, encoder.prompted, encoder.paired)


_PROCESS = "import sys; from fourfold.data import encode; sys.exit(getattr(encode, sys.argv[1])(sys.argv[2]))"
"""Runs a function of this module; run with -m, the module's classes would belong to `__main__`."""


class EncodingWorkers:
    """Processes that encode chunks; results come in the order of the chunks."""

    def __init__(self, count: int, encoding: Encoding):
        asked = json.dumps(asdict(encoding))
        # a worker has one core: the tokenizer's threads would compete for it
        environment = os.environ | {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", _PROCESS, "work", asked],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            for _ in range(count)
        ]
        self.idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        for process in self.processes:
            self.idle.put(process)

    def __call__(self, chunks: Iterable[SourceChunk]) -> Iterator[Encoded]:
        with ThreadPoolExecutor(len(self.processes)) as pool:
            pending: deque[Future[Encoded]] = deque()
            try:
                for chunk in chunks:
                    pending.append(pool.submit(self._encode, chunk))
                    if len(pending) > 2 * len(self.processes):
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                for future in pending:
                    future.cancel()

    def _encode(self, chunk: SourceChunk) -> Encoded:
        process = self.idle.get()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                pickle.dump(chunk, process.stdin, pickle.HIGHEST_PROTOCOL)
                process.stdin.flush()
                found = pickle.load(process.stdout)  # noqa: S301  # of our own process
            except (OSError, EOFError, pickle.UnpicklingError):
                raise DataError(
                    f"{chunk.path}: the process that encodes it ended (exit code {process.wait()})"
                ) from None
            if isinstance(found, str):
                raise DataError(found)
            assert isinstance(found, Encoded)
            return found
        finally:
            self.idle.put(process)

    def close(self) -> None:
        for process in self.processes:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()
            process.kill()
            process.wait()


def work(asked: str) -> int:
    """Run as a worker: read chunks from standard input, write results (or an error text) to standard output."""
    from fourfold.data.samples import load_tokenizer

    source, out = sys.stdin.buffer, sys.stdout.buffer
    encoding = Encoding(**json.loads(asked))
    encoder: Encoder | None = None
    while True:
        try:
            chunk = pickle.load(source)  # noqa: S301  # from the process that started this one
        except EOFError:
            return 0
        try:
            encoder = encoder or Encoder(load_tokenizer(encoding.tokenizer), encoding)
            answer: Encoded | str = encode_chunk(encoder, chunk)
        except DataError as e:
            answer = str(e)
        pickle.dump(answer, out, pickle.HIGHEST_PROTOCOL)
        out.flush()


def worker_count(size: int) -> int:
    """Number of worker processes for a source of `size` bytes: one per core; 0 for a small source."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_WORKERS, cores, size // (2 * CHUNK))


# ---- token files ----


def encode_to_file(
    sources: Sequence[str],
    encoding: Encoding,
    out: Path,
    progress: Callable[[int, int], None] | None = None,
    workers: int | None = None,
) -> None:
    """Encode sources into a token file (format: samples.py), which is written atomically.

    `progress` is called with the number of bytes read and the total.
    """
    from fourfold.data.samples import MAGIC, load_tokenizer

    whole = sum(p.stat().st_size for s in sources for p in source_files(s))
    workers = worker_count(whole) if workers is None else workers
    pool = EncodingWorkers(workers, encoding) if workers > 1 else None
    digest, lengths, parts, masked, seen = hashlib.blake2b(digest_size=16), array("q"), [], False, 0
    empty, prompted, paired = 0, False, None
    room = 4096  # reserved for the header, which is written last
    try:
        codec = load_tokenizer(encoding.tokenizer)
        encoder = Encoder(codec, encoding)
        with files.create(out, DataError) as f, tempfile.TemporaryFile(dir=out.parent) as masks:
            f.write(b" " * room)
            for source in sources:
                chunks, before = source_chunks(source), len(lengths)
                for found in pool(chunks) if pool else (encode_chunk(encoder, chunk) for chunk in chunks):
                    data = found.ids.astype(found.ids.dtype.newbyteorder("<"), copy=False).data
                    f.write(data)
                    digest.update(data)
                    masks.write((np.ones(len(found.ids), np.uint8) if found.mask is None else found.mask).data)
                    masked |= found.mask is not None
                    lengths.extend(found.lengths)
                    empty, prompted, seen = empty + found.empty, prompted or found.prompted, seen + found.size
                    if paired is not None and found.paired not in (None, paired):
                        raise DataError(f"{source}: {MIXED}")
                    paired = found.paired if paired is None else paired
                    if progress is not None:
                        progress(min(seen, whole), whole)
                if len(lengths) == before:
                    raise DataError(nothing_in(source, empty))
                parts.append(len(lengths) - before)
            if masked:
                masks.seek(0)
                while part := masks.read(1 << 24):
                    f.write(part)
                    digest.update(part)
            ends = np.cumsum(np.frombuffer(lengths, np.int64), dtype="<u8")
            f.write(b"\0" * 8 + ends.tobytes())
            header = {
                "version": 2,
                "dtype": np.dtype(encoder.dtype).name,
                "tokens": int(ends[-1]),
                "masked": masked,
                "documents": len(lengths),
                "parts": parts,
                "prompted": prompted,
                "paired": bool(paired),
                "left_out": empty,
                "vocab": codec.vocab,
                "end": codec.end,
                "mask_token": codec.mask,
                "tokenizer": codec.name,
                "fingerprint": digest.hexdigest(),
            }
            text = json.dumps(header).encode()
            if len(text) > room - len(MAGIC) - 4:
                raise DataError(
                    f"{out}: too many sources, or the tokenizer's name is too long for the header of a token file"
                )
            f.seek(0)
            f.write(MAGIC + (room - len(MAGIC) - 4).to_bytes(4, "little") + text)
            f.seek(0, io.SEEK_END)
    finally:
        if pool is not None:
            pool.close()


# ---- the cache: [Note: encoded once] ----


def needs_cache(sources: Sequence[str], tokenizer: str) -> bool:
    """Whether encoding takes long enough to be cached."""
    if tuple(sources) == ("stdlib",) and tokenizer == "bytes":
        return False
    return tokenizer != "bytes" or sum(p.stat().st_size for s in sources for p in source_files(s)) > SMALL


def cache_folder() -> Path:
    given = os.environ.get("FOURFOLD_CACHE")
    base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fourfold"
    return base / "data"


def cached_tokens(sources: Sequence[str], encoding: Encoding) -> Path:
    """The cached token file of sources, encoded first if needed; other processes of this host wait for it."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{_key(sources, encoding)}.tokens"
        if path.exists():
            return path
        with (folder / f"{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _encode_in_a_process(sources, encoding, path)
    except OSError as e:
        raise DataError(
            f"{folder}: encoded data cannot be cached there: {files.why(e)}; set FOURFOLD_CACHE to a writable folder"
        ) from None
    return path


def _key(sources: Sequence[str], encoding: Encoding) -> str:
    digest = hashlib.blake2b(digest_size=16)
    there = [[(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in source_files(s)] for s in sources]
    folder = Path(encoding.tokenizer).parent
    names = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
    inputs = [Path(encoding.tokenizer), *(folder / name for name in names)]
    if encoding.template not in ("auto", "plain"):
        inputs.append(Path(encoding.template))
    read = [hashlib.blake2b(p.read_bytes()).hexdigest() if p.is_file() else "" for p in inputs]
    digest.update(json.dumps([VERSION, there, read, asdict(encoding)]).encode())
    return digest.hexdigest()


def _encode_in_a_process(sources: Sequence[str], encoding: Encoding, out: Path) -> None:
    """Encode in a separate process: the tokenizer's threads must not exist when ranks are forked."""
    asked = json.dumps({"sources": list(sources), "out": str(out), **asdict(encoding)})
    done = subprocess.run([sys.executable, "-c", _PROCESS, "main", asked], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        message = done.stdout.decode(errors="replace").strip().splitlines()
        raise DataError(
            message[-1] if message else f"encoding {', '.join(sources)} failed with exit code {done.returncode}"
        )


class EncodingBar:
    """Progress of encoding on stderr: a bar on a terminal, otherwise a line per 10 %."""

    def __init__(self, name: str):
        self.name, self.begin, self.shown, self.terminal = name, time.monotonic(), -1, sys.stderr.isatty()

    def __call__(self, seen: int, whole: int) -> None:
        share, passed = seen / max(whole, 1), time.monotonic() - self.begin
        tenth = int((1000 if self.terminal else 10) * share)
        if tenth == self.shown or (passed < 1 and not self.terminal):
            return
        self.shown = tenth
        rate = seen / max(passed, 1e-6)
        left = f"{(whole - seen) / max(rate, 1):.0f} s left"
        text = f"encoding {self.name}: {share:4.0%}, {rate / 1e6:.1f} MB/s, {left}"
        if self.terminal:
            full = int(20 * share)
            sys.stderr.write(f"\r{'━' * full}{'─' * (20 - full)} {text}\x1b[K")
        else:
            sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def close(self) -> None:
        if self.terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def main(asked: str) -> int:
    """Encode in this process and its workers; the last line of stdout is the error, if any."""
    fields = json.loads(asked)
    sources, out = fields.pop("sources"), Path(fields.pop("out"))
    bar = EncodingBar(", ".join(sources))
    try:
        encode_to_file(sources, Encoding(**fields), out, bar)
    except DataError as e:
        sys.stdout.write(f"{e}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        bar.close()
    return 0
