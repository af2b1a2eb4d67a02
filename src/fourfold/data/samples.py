"""Corpora, and the samples of each step. numpy only.

A corpus is one long array of token ids (uint8, uint16 or uint32; in memory or memory-mapped), and optionally a mask of the
tokens to predict. It is cut into windows of T tokens (plus the next one, for next-token targets); window i starts at
token i · T. Sample k of a run, counted over all steps and epochs, is window permute(seed, epoch, k mod windows): a function
of (seed, k) alone, so of (seed, step), never of the number of ranks. To resume, a run needs two integers, the epoch and the next
sample in it, and the corpus's fingerprint, to check that the corpus is the same.

Plain text is cut into windows (`packing = "concat"`): documents follow one another with an end-of-text token between them.
Examples of fine-tuning (chats, prompts with answers) stay whole. With `packing = "documents"` a window holds several of them,
by best fit (packing.py), and tokens attend only within their document: a sample includes the position at which each token's
document begins. With `packing = "none"` sample k is one example. The rest of a window is padded with the end token, as a separate
document that is never predicted. Encoding is in encode.py, formats and chat templates in chats.py.

[Note: token file]
    bytes 0..7    magic  b"4FOLDTOK"
    bytes 8..11   length of the header in bytes, little-endian uint32 (the header is padded with spaces so that the tokens
                  start on a multiple of 64 bytes)
    header        JSON: version 2, dtype ("uint8" | "uint16" | "uint32"), tokens (count), masked (bool), documents (count),
                  parts (documents of each source, in order), prompted (whether examples are prompts with
                  answers), left_out (count), vocab, end, mask_token, tokenizer (name), fingerprint (hex)
    tokens        count little-endian values
    mask          if masked: count bytes, 1 where the token is to be predicted
    starts        documents + 1 little-endian uint64: where each document begins, and where the last one ends
Version 1 has neither documents nor starts, and is still read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fourfold import files, schema
from fourfold.config import Config
from fourfold.data.chats import Chat, ChatTemplate, PlainExample, parse_examples
from fourfold.data.encode import (
    Encoder,
    Encoding,
    cached_tokens,
    encode_to_file,
    examples,
    needs_cache,
    nothing_in,
    source_chunks,
)
from fourfold.data.packing import best_fit, segments_of
from fourfold.errors import ConfigError, DataError

__all__ = [
    "ByteTokenizer",
    "Corpus",
    "Examples",
    "Lengths",
    "Samples",
    "Tokenizer",
    "corpus_of",
    "load_tokenizer",
    "open_corpus",
    "permute",
    "write_tokens",
]

MAGIC = b"4FOLDTOK"
HEADER_BYTES = 1 << 20
"""Maximum size of a token file's header, in bytes."""
CHECKED_BYTES = 256 << 20
"""Token files up to this size are checked against their fingerprint when opened; larger ones, id by id as they are read."""
OLDER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""Files of tokenizers in forms that are not read; transformers converts them."""
IGNORE = -100  # target of a token that is not predicted, as in torch's cross entropy


Locate = Callable[[int, int], tuple[int, int]]


class Tokenizer(Protocol):
    """Text to token ids and back. `end` separates documents, `mask` replaces masked tokens of a bidirectional model."""

    @property
    def name(self) -> str: ...
    @property
    def vocab(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def mask(self) -> int | None: ...
    @property
    def begin(self) -> int | None:
        """The token that a text begins with, if the tokenizer has one."""

    @property
    def special(self) -> frozenset[int]:
        """Control tokens, such as the one that ends a turn of a chat."""

    def encode_all(self, texts: Sequence[str], *, locate: bool) -> Iterator[tuple[npt.NDArray[Any], Locate]]:
        """For each text its ids and, with `locate`, a function from a range of characters to the range of their tokens."""

    def encode(self, text: str) -> npt.NDArray[Any]: ...
    def decode(self, tokens: Iterable[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes. Two control bytes that do not occur in text serve as end of text (0) and mask (1)."""

    name, vocab, end, mask, begin = "bytes", 256, 0, 1, None
    special: frozenset[int] = frozenset()

    def encode_all(self, texts: Sequence[str], *, locate: bool) -> Iterator[tuple[npt.NDArray[Any], Locate]]:
        for text in texts:
            ids = self.encode(text)
            characters = (
                np.cumsum((ids & 0xC0) != 0x80) - 1 if locate else ids
            )  # a character begins with a byte that is not a continuation byte

            def tokens(first: int, last: int, of: npt.NDArray[Any] = characters) -> tuple[int, int]:
                return int(np.searchsorted(of, first)), int(np.searchsorted(of, last))

            yield ids, tokens

    def encode(self, text: str) -> npt.NDArray[Any]:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(t for t in tokens if 1 < t < 256).decode(errors="replace")


TOKENIZER_BYTES = 512 << 20


@contextlib.contextmanager
def _library_errors(path: Path, what: str) -> Iterator[None]:
    """Convert errors of the `tokenizers` library: it raises bare Exception, and its Rust panics are BaseException."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as e:
        raise DataError(f"{path}: {what}: {' '.join(str(e).split())[:300]}") from None


class HuggingFaceTokenizer:
    """A tokenizer.json, through the `tokenizers` package."""

    def __init__(self, path: Path):
        if not path.is_file():
            older = next((n for n in OLDER_TOKENIZERS if (path.parent / n).is_file()), None)
            if older is not None:
                raise DataError(
                    f"{path}: there is no such file, but {older}, an older form; convert it: "
                    f"AutoTokenizer.from_pretrained({str(path.parent)!r}).save_pretrained({str(path.parent)!r})"
                )
            raise DataError(f"{path}: no such tokenizer file; use 'bytes' or the path of a tokenizer.json")
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise DataError(f"{path}: tokenizer files need the extra: pip install 'fourfold[hf]'") from None
        text = files.read_text(path, DataError, most=TOKENIZER_BYTES)
        files.parse_json(text, f"{path}: not a tokenizer.json", DataError)
        with _library_errors(path, "not a tokenizer.json"):
            self._library = Library.from_str(text)
        self.name, self.vocab = str(path), 1 + max(self._library.get_vocab(with_added_tokens=True).values(), default=0)
        names = ("<|endoftext|>", "<|end_of_text|>", "</s>", "[SEP]", "<eos>", "<|im_end|>")
        config = path.parent / "tokenizer_config.json"
        found = files.read_json(config, DataError) if config.is_file() else {}
        tokens = ChatTemplate.special_tokens(found if isinstance(found, dict) else {})
        end = self._first(*(tokens[k] for k in ("eos_token",) if k in tokens), *names)
        if end is None:
            raise DataError(f"{path}: has no end-of-text token; looked for {', '.join(names)}")
        self.end = end
        self.mask = self._first("[MASK]", "<mask>")
        added = self._library.get_added_tokens_decoder()
        self.special = frozenset(i for i, token in added.items() if token.special)
        begin = self._first(tokens["bos_token"]) if "bos_token" in tokens else None
        self.begin = begin if begin in self._library.encode("", add_special_tokens=True).ids[:1] else None

    def _first(self, *names: str) -> int | None:
        ids = (self._library.token_to_id(name) for name in names)
        return next((i for i in ids if i is not None), None)

    def encode_all(self, texts: Sequence[str], *, locate: bool) -> Iterator[tuple[npt.NDArray[Any], Locate]]:
        encode = self._library.encode_batch if locate else self._library.encode_batch_fast
        with _library_errors(Path(self.name), "cannot encode text"):
            encoded = encode(list(texts), add_special_tokens=False)
        for found in encoded:
            ids = np.asarray(found.ids, dtype=np.int64)
            self._check_ids(ids)
            yield ids.astype(_dtype_for(self.vocab)), functools.partial(_tokens_of, found)

    def _check_ids(self, ids: npt.NDArray[np.int64]) -> None:
        if len(ids) and ids.max() >= self.vocab:
            raise DataError(f"{self.name}: gives the id {ids.max()}, but has {self.vocab} tokens")

    def encode(self, text: str) -> npt.NDArray[Any]:
        with _library_errors(Path(self.name), "cannot encode text"):
            ids = np.asarray(self._library.encode(text, add_special_tokens=False).ids, dtype=np.int64)
        self._check_ids(ids)
        return ids.astype(_dtype_for(self.vocab))

    def decode(self, tokens: Iterable[int]) -> str:
        with _library_errors(Path(self.name), "cannot decode tokens"):
            return self._library.decode(list(tokens))


def _tokens_of(found: Any, first: int, last: int) -> tuple[int, int]:
    """The range of tokens that contain one of the characters [first, last).

    Queries the library for a few characters: its list of all tokens' offsets would take a tenth of the encoding time. Some
    characters, such as spaces that a normaliser drops, belong to no token.
    """
    start = next((t for c in range(first, last) if (t := found.char_to_token(c)) is not None), None)
    if start is None:
        return 0, 0
    stop = next(t for c in range(last - 1, first - 1, -1) if (t := found.char_to_token(c)) is not None) + 1
    while stop < len(found) and (place := found.token_to_chars(stop)) is not None and first <= place[0] < last:
        stop += 1  # a character of several tokens
    return start, stop


def load_tokenizer(name: str) -> Tokenizer:
    return ByteTokenizer() if name in ("bytes", "") else HuggingFaceTokenizer(Path(name))


@dataclass(frozen=True)
class Corpus:
    """Token ids, the mask of predicted tokens (None: all), and the tokenizer's properties."""

    name: str
    tokens: npt.NDArray[Any]
    mask: npt.NDArray[Any] | None
    vocab: int
    end: int
    mask_token: int | None
    tokenizer: str
    fingerprint: str
    starts: npt.NDArray[Any] | None = None
    """Offsets of the documents, and the end of the last one."""
    prompted: bool = False
    """Whether the documents are examples of fine-tuning: prompts with answers, or chats."""
    left_out: int = 0
    """Number of examples that were not encoded, since their answer is empty."""
    parts: tuple[int, ...] = ()
    """Number of documents of each source, if there are several."""
    paired: bool = False
    """Whether documents are preference pairs: chosen, rejected, chosen, …"""


class Examples(Protocol):
    """A user-defined dataset: examples by index, the same in every pass.

    An example is a mapping. `tokens` are its ids. Optionally, one of these, as long as `tokens`, defines what is predicted:

        loss_mask   1 where the token is predicted from the tokens before it, 0 elsewhere
        targets     the token that follows each position, or IGNORE (-100)
        labels      the token at each position, or IGNORE, as in Hugging Face (`input_ids` is also understood)

    Without any of them every token is predicted. An example without tokens is text: any format of a JSONL file
    (`messages`, `prompt` with `completion`, `text` …), encoded by the tokenizer and the template of the config.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


def corpus_of(data: Examples, vocab: int, encoding: Encoding | None = None) -> Corpus:
    """The corpus of a dataset; reads every example once, and raises DataError for one that is not an example."""
    encoding = encoding or Encoding()
    codec = load_tokenizer(encoding.tokenizer)
    encoder, name = Encoder(codec, encoding), f"data = {type(data).__name__}"
    documents: list[tuple[npt.NDArray[Any], npt.NDArray[np.uint8] | None]] = []
    texts: list[tuple[str, PlainExample | Chat]] = []  # encoded in batches
    for i in range(len(data)):
        item, where = data[i], f"{name}, example {i}"
        if not isinstance(item, Mapping):
            raise DataError(f"{where}: expected a mapping with 'tokens', found {type(item).__name__}")
        if "tokens" in item or "input_ids" in item:
            documents += encoder(texts)
            texts = []
            documents.append(own_document(item, vocab, where))
        else:
            texts += [(where, example) for example in parse_examples(item, where)]
    documents += encoder(texts)
    if not documents:
        raise DataError(f"{name}: there are no examples in it")
    vocab = max(vocab, codec.vocab) if encoding.tokenizer != "bytes" else vocab
    found = _corpus(name, documents, codec, vocab, prompted=True, left_out=encoder.empty)
    return replace(found, paired=bool(encoder.paired))


def own_document(
    item: Mapping[str, Any], vocab: int, where: str
) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8] | None]:
    """The ids of an example that has `tokens`, and the mask of those that are predicted."""

    def ids_of(key: str) -> npt.NDArray[np.int64]:
        found = np.asarray(item[key])
        if found.ndim != 1 or (found.size and found.dtype.kind not in "iub"):
            raise DataError(f"{where}: '{key}' must be a list of integers, found shape {found.shape} of {found.dtype}")
        return found.astype(np.int64)

    ids = ids_of("tokens" if "tokens" in item else "input_ids")
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab):
        raise DataError(
            f"{where}: has the id {ids.max() if ids.max() >= vocab else ids.min()}, but model.vocab = {vocab}"
        )
    given = [key for key in ("loss_mask", "targets", "labels") if item.get(key) is not None]
    if len(given) > 1:
        raise DataError(f"{where}: has both '{given[0]}' and '{given[1]}'; keep one")
    if not given:
        return ids.astype(_dtype_for(vocab)), None
    said = ids_of(given[0])
    if len(said) != len(ids):
        raise DataError(f"{where}: {len(ids)} tokens, but {len(said)} values of '{given[0]}'")
    if given[0] == "loss_mask":
        return ids.astype(_dtype_for(vocab)), (said != 0).astype(np.uint8)
    if given[0] == "targets":  # shift: the target of position i is token i + 1
        if len(said) and said[-1] != IGNORE:
            ids = np.append(ids, said[-1])
            said = np.append(IGNORE, said)
        else:
            said = np.append(IGNORE, said[:-1])
    wrong = np.nonzero((said != IGNORE) & (said != ids))[0]
    if len(wrong):
        at = int(wrong[0])
        raise DataError(
            f"{where}: '{given[0]}' has token {said[at]} at position {at}, but the example has {ids[at]}; a target is the "
            f"example's own next token, or {IGNORE}"
        )
    return ids.astype(_dtype_for(vocab)), (said != IGNORE).astype(np.uint8)


def _corpus(
    name: str,
    found: Sequence[tuple[npt.NDArray[Any], npt.NDArray[np.uint8] | None]],
    codec: Tokenizer,
    vocab: int,
    *,
    prompted: bool,
    left_out: int,
) -> Corpus:
    """A corpus in memory from its documents: the ids of each, and the mask of predicted ones (None: all)."""
    tokens, mask = np.concatenate([ids for ids, _ in found]), None
    if any(marks is not None for _, marks in found):
        mask = np.concatenate([np.ones(len(ids), np.uint8) if marks is None else marks for ids, marks in found])
    starts = np.cumsum([0, *(len(ids) for ids, _ in found)])
    fingerprint = _fingerprint(tokens, mask)
    return Corpus(name, tokens, mask, vocab, codec.end, codec.mask, codec.name, fingerprint, starts, prompted, left_out)


def open_corpus(source: str | Sequence[str], tokenizer: str = "bytes", encoding: Encoding | None = None) -> Corpus:
    """Open a corpus by name or path, or several as one; raises DataError if one is missing, empty or damaged."""
    sources = (source,) if isinstance(source, str) else tuple(source)
    for name in sources:
        if "\0" in name:
            raise DataError(f"data.source = {name!r}: cannot be the name of a file")
        if os.path.isfile(name) and _starts_with(name, MAGIC):
            if len(sources) == 1:
                return _open_tokens(Path(name))
            raise DataError(f"data.sources: '{name}' is a token file, which cannot be one of several sources")
    encoding = replace(encoding or Encoding(), tokenizer=tokenizer or "bytes")
    title = ", ".join(sources)
    if needs_cache(sources, encoding.tokenizer):
        return replace(_open_tokens(cached_tokens(sources, encoding)), name=title)
    codec = load_tokenizer(encoding.tokenizer)
    encoder = Encoder(codec, encoding)
    found, parts = [], []
    for name in sources:
        documents = list(encoder(examples(source_chunks(name))))
        if not documents:
            raise DataError(nothing_in(name, encoder.empty))
        found += documents
        parts.append(len(documents))
    corpus = _corpus(title, found, codec, codec.vocab, prompted=encoder.prompted, left_out=encoder.empty)
    return replace(corpus, parts=tuple(parts), paired=bool(encoder.paired))


def _starts_with(path: str, magic: bytes) -> bool:
    with files.open_for_reading(path, DataError) as f:
        return f.read(len(magic)) == magic


def _fingerprint(tokens: npt.NDArray[Any], mask: npt.NDArray[Any] | None) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).data)
    if mask is not None:
        digest.update(mask.data)
    return digest.hexdigest()


def _dtype_for(vocab: int) -> type[np.uint8] | type[np.uint16] | type[np.uint32]:
    return np.uint8 if vocab <= 2**8 else np.uint16 if vocab <= 2**16 else np.uint32


# ---- token files: [Note: token file] ----


def write_tokens(
    source: str,
    tokenizer: str,
    path: Path,
    encoding: Encoding | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Corpus:
    """Encode a source and write it as a token file; the file appears whole or not at all."""
    encode_to_file((source,), replace(encoding or Encoding(), tokenizer=tokenizer), path, progress)
    return _open_tokens(path)


def _open_tokens(path: Path) -> Corpus:
    with files.open_for_reading(path, DataError) as f:
        length = int.from_bytes(f.read(12)[8:], "little")
        text = f.read(min(length, HEADER_BYTES))
        size = os.fstat(f.fileno()).st_size
    try:
        h = files.parse_json(text.decode("utf-8"), str(path), DataError)
        dtype = {"uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32}[h["dtype"]]
        count, masked, version = h["tokens"], h["masked"], h["version"]
        documents, prompted, left_out = h.get("documents", -1), bool(h.get("prompted")), h.get("left_out", 0)
        vocab, end, mask_token = h["vocab"], h["end"], h["mask_token"]
        tokenizer, fingerprint = str(h["tokenizer"]), str(h["fingerprint"])
        parts = tuple(h.get("parts", ()))
        counts = (count, vocab, end, documents + 1, left_out, *parts)
        if length > HEADER_BYTES or not all(map(schema.is_integer, counts)) or not isinstance(masked, bool):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, DataError):
        raise DataError(f"{path}: damaged header of a token file; write it again with 'fourfold tokenize'") from None
    if version not in (1, 2):
        raise DataError(f"{path}: token file of version {str(version)[:20]}; this program reads versions 1 and 2")
    masks = mask_token is None or (schema.is_integer(mask_token) and mask_token < vocab)
    if not 0 < vocab <= 2**32 or end >= vocab or not masks:
        raise DataError(
            f"{path}: its header says {vocab} ids, but the end token is {end} and the mask token {str(mask_token)[:20]}"
        )
    offset = 12 + length
    wanted = offset + count * np.dtype(dtype).itemsize + (count if masked else 0) + 8 * (documents + 1)
    if size != wanted:
        what = "truncated" if size < wanted else "longer than its header says"
        raise DataError(f"{path}: {what}: {size} bytes, but the header promises {wanted} ({count} tokens)")
    if count == 0:
        raise DataError(f"{path}: there are no tokens in it")
    tokens = np.memmap(path, dtype, "r", offset, (count,))
    mask = np.memmap(path, np.uint8, "r", offset + tokens.nbytes, (count,)) if masked else None
    starts = np.memmap(path, "<u8", "r", wanted - 8 * (documents + 1), (documents + 1,)) if documents >= 0 else None
    if starts is not None and (starts[0] or starts[-1] != count or (np.diff(starts.astype(np.int64)) < 0).any()):
        raise DataError(
            f"{path}: damaged: its documents do not follow one another; write it again with 'fourfold tokenize'"
        )
    if size <= CHECKED_BYTES:
        _check_ids(tokens, vocab, str(path))
        if _fingerprint(tokens, mask) != fingerprint:
            raise DataError(f"{path}: damaged: its tokens are not those it was written with; write it again")
    meaning = vocab, end, mask_token, tokenizer, fingerprint
    return Corpus(str(path), tokens, mask, *meaning, starts, prompted, left_out, parts, bool(h.get("paired")))


def _check_ids(tokens: npt.NDArray[Any], vocab: int, name: str) -> None:
    """Raise DataError for an id outside the vocabulary, for which the embedding has no row."""
    if len(tokens) and (largest := int(tokens.max())) >= vocab:
        raise DataError(f"{name}: damaged: it has the id {largest}, but its vocabulary {vocab} ids")


# ---- samples ----


def permute(index: int, count: int, key: int) -> int:
    """Position of `index` in a pseudo-random permutation of range(count), selected by `key`; needs no memory.

    Four Feistel rounds on the smallest even number of bits that holds `count`; they are repeated until the result is below
    `count` (at most four times on average), which keeps it a permutation (cycle walking).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            left, right = right, left ^ (_hash(key, turn, right) & mask)
        index = left << half | right
        if index < count:
            return index


def _hash(*values: int) -> int:
    data = b"".join(v.to_bytes(16, "little", signed=True) for v in values)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class Lengths(NamedTuple):
    """What samples hold without their padding: Σ L and Σ L² over their documents of L tokens."""

    tokens: int
    squares: int

    @classmethod
    def total(cls, parts: Iterable[Lengths]) -> Lengths:
        found = list(parts)
        return cls(sum(each.tokens for each in found), sum(each.squares for each in found))

    @property
    def context(self) -> float:
        """Tokens of a document, as attention costs them."""
        return self.squares / max(1, self.tokens)


class Samples:
    """The samples of a run: sample k as (tokens, targets), each [T] int64; targets are IGNORE where nothing is predicted.

    `split` is "train" (all but the last part of the corpus) or "eval" (that part). A bidirectional model's samples
    are T tokens, some of them masked, chosen by (seed, k); others are windows of T + 1 tokens, shifted by one, or whole documents
    (`packing`). `overlong`: how documents of more than T + 1 tokens are treated. `masks`: whether the model's attention can
    separate the documents of a window, so that `auto` may pack them. `weights`: for each source of the corpus, how many times an
    epoch contains its examples (or windows); a fraction selects examples at random, by the seed.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        seq_len: int,
        vocab: int,
        seed: int,
        split: str = "train",
        eval_fraction: float = 0.0,
        bidirectional: bool = False,
        mask_rate: float = 0.15,
        packing: str = "auto",
        overlong: str = "auto",
        masks: bool = True,
        weights: Sequence[float] = (),
    ):
        self.weights = tuple(weights) if any(w != 1 for w in weights) else ()
        self.corpus, self.seq_len, self.seed, self.split = corpus, seq_len, seed, split
        if packing == "auto":
            packing = "concat" if bidirectional or not corpus.prompted else "documents" if masks else "none"
        if overlong == "auto":
            overlong = "cut" if corpus.prompted else "split"
        self.packing, self.overlong = packing, overlong
        self.bidirectional, self.mask_rate = bidirectional, mask_rate
        if corpus.vocab > vocab:
            raise DataError(
                f"{corpus.name}: its tokenizer ('{corpus.tokenizer}') has {corpus.vocab} ids, but model.vocab = {vocab}; "
                f"use model.vocab = {corpus.vocab} or more"
            )
        if bidirectional and corpus.mask_token is None:
            raise DataError(f"{corpus.name}: a bert model needs a mask token, which '{corpus.tokenizer}' does not have")
        if packing == "concat":
            windows = (len(corpus.tokens) - (0 if bidirectional else 1)) // seq_len
            if windows < 1:
                raise DataError(
                    f"{corpus.name}: {len(corpus.tokens)} tokens are fewer than one sample of model.seq_len = {seq_len} "
                    f"(+1); use more text or a shorter seq_len"
                )
            held = int(windows * eval_fraction)
            self.first, self.count = (windows - held, held) if split == "eval" else (0, windows - held)
            if self.weights:
                at = np.arange(self.first, self.first + self.count)
                self._windows = at[self._repeated(at * seq_len)]
                self.count = len(self._windows)
            return
        self._pack(eval_fraction)

    def _pack(self, eval_fraction: float) -> None:
        """Choose the segments of this split, and pack them into windows."""
        corpus = self.corpus
        if self.bidirectional:
            raise DataError(
                f"data.packing = '{self.packing}' is for models that predict the next token; a bert model needs 'concat'"
            )
        if corpus.starts is None:
            raise DataError(
                f"{corpus.name}: a token file of version 1 does not record where documents begin, which data.packing = "
                f"'{self.packing}' needs; write it again with 'fourfold tokenize', or use 'concat'"
            )
        found = segments_of(corpus.name, corpus.starts, corpus.mask, self.seq_len, self.overlong)
        if not len(found):
            raise DataError(f"{corpus.name}: no example has a token to predict within model.seq_len = {self.seq_len}")
        last = len(found) - int(len(found) * eval_fraction)
        if last < len(found):  # a document that was split stays on one side, unless nothing were left to train
            document = np.searchsorted(corpus.starts, found.first[last], side="right") - 1
            last = int(np.searchsorted(found.first, corpus.starts[document])) or last
        self.segments = found.part(last, len(found)) if self.split == "eval" else found.part(0, last)
        self.held_out = len(found) - last if self.split == "train" else 0
        if self.weights:
            self.segments = self.segments.chosen(self._repeated(self.segments.first))
        if self.split == "train" and not len(self.segments):
            raise DataError(f"{corpus.name}: no example is left to train; raise the weights in data.sources")
        if self.packing == "documents":
            self._order, self._bounds = best_fit(self.segments.lengths - 1, self.seq_len)
        else:
            self._order, self._bounds = np.arange(len(self.segments)), np.arange(len(self.segments) + 1)
        self.first, self.count = 0, len(self._bounds) - 1

    def _repeated(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Indices of the items that begin at these tokens, each repeated according to the weight of its source."""
        assert self.corpus.starts is not None
        ends = np.asarray(self.corpus.starts)[np.cumsum(self.corpus.parts)]
        weight = np.asarray(self.weights)[np.searchsorted(ends, tokens, side="right")]
        rng = np.random.Generator(np.random.Philox(key=_hash(self.seed, 4)))
        times = np.floor(weight + rng.random(len(tokens))).astype(np.int64)
        return np.repeat(np.arange(len(tokens)), times)

    @property
    def whole(self) -> bool:
        """Whether samples hold whole documents."""
        return self.packing != "concat"

    @property
    def all_valid(self) -> bool:
        """Whether every token of every sample is predicted, so that their number is known in advance."""
        return self.corpus.mask is None and not self.bidirectional and not self.whole

    @functools.cached_property
    def context(self) -> float:
        """Effective document length for the cost of attention: Σ L² / Σ L over the documents of all windows, with padding."""
        if self.packing != "documents" or not self.count:
            return float(self.seq_len)
        places = self.segments.lengths - 1
        tails = self.seq_len - np.add.reduceat(places[self._order], self._bounds[:-1])
        return float(((places**2).sum() + (tails**2).sum()) / (self.count * self.seq_len))

    def describe(self, global_batch: int, steps: int) -> str:
        """One line about the data of a run."""
        epochs = global_batch * steps / max(1, self.count)
        runs = f"{steps} step{'s are' if steps > 1 else ' is'} {epochs:.3g} epochs"
        if self.count < global_batch:
            runs += f", and a step of {global_batch} repeats samples: there are only {self.count:,}"
        if not self.whole:
            tokens = self.count * self.seq_len if self.weights else len(self.corpus.tokens)
            return f"{tokens:,} tokens, {self.count:,} windows of {self.seq_len}; {runs}"
        s = self.segments
        tokens = s.lengths.sum()
        filled = (s.lengths - 1).sum() / (self.count * self.seq_len)
        share = "" if self.corpus.mask is None else f" ({s.predicted.sum() / tokens:.0%} trained)"
        said = [f"{len(s):,} examples, {tokens:,} tokens{share}"]
        if self.packing == "documents":
            said.append(f"packed into {self.count:,} windows of {self.seq_len}, {filled:.1%} full")
        else:
            said.append(f"{filled:.0%} of each {self.seq_len} places filled")
        said.append(runs)
        said += [f"{self.held_out:,} more held out for evaluation"] if self.held_out else []
        said += [f"{s.cut:,} cut to fit"] if s.cut else []
        said += [f"{s.split:,} too long, split"] if s.split else []
        said += [f"{s.too_long:,} left out: too long"] if s.too_long else []
        empty = s.empty + self.corpus.left_out
        said += [f"{empty:,} left out: nothing to predict"] if empty else []
        return "; ".join(said)

    def window(self, k: int) -> int:
        """The window of sample k."""
        epoch, place = divmod(k, self.count)
        if self.weights and not self.whole:
            return int(self._windows[permute(place, self.count, _hash(self.seed, epoch, self.split == "eval"))])
        return self.first + permute(place, self.count, _hash(self.seed, epoch, self.split == "eval"))

    def __getitem__(self, k: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if self.whole:
            return self._packed(self.window(k))
        start = self.window(k) * self.seq_len
        if self.bidirectional:
            return self._masked(k, start)
        return self._shifted(start, self.seq_len + 1)

    def _shifted(self, start: int, length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Inputs and targets of a run of `length` tokens; each has length - 1."""
        found = np.asarray(self.corpus.tokens[start : start + length], dtype=np.int64)
        _check_ids(found, self.corpus.vocab, self.corpus.name)
        tokens, targets = found[:-1], found[1:].copy()
        if self.corpus.mask is not None:
            targets[self.corpus.mask[start + 1 : start + length] == 0] = IGNORE
        return tokens, targets

    def _documents(self, window: int) -> Iterator[tuple[int, int, int]]:
        """The documents of a window: for each, its offset in the window, and its first token and length in the corpus."""
        at = 0
        for i in self._order[self._bounds[window] : self._bounds[window + 1]]:
            length = int(self.segments.lengths[i])
            yield at, int(self.segments.first[i]), length
            at += length - 1

    def _packed(self, window: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        tokens, targets = (np.full(self.seq_len, fill, np.int64) for fill in (self.corpus.end, IGNORE))
        for at, first, length in self._documents(window):
            tokens[at : at + length - 1], targets[at : at + length - 1] = self._shifted(first, length)
        return tokens, targets

    def starts(self, k: int) -> npt.NDArray[np.int64]:
        """[T]: for each token of sample k, the position where its document begins; padding is a separate document."""
        out, end = np.zeros(self.seq_len, np.int64), 0
        for at, _, length in self._documents(self.window(k)):
            end = at + length - 1
            out[at:end] = at
        out[end:] = end
        return out

    def _masked(self, k: int, start: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """BERT's masking: of the chosen tokens 80 % are masked, 10 % replaced by a random token, 10 % unchanged."""
        original = np.asarray(self.corpus.tokens[start : start + self.seq_len], dtype=np.int64)
        _check_ids(original, self.corpus.vocab, self.corpus.name)
        rng = np.random.Generator(np.random.Philox(key=_hash(self.seed, k, 2 + (self.split == "eval"))))
        chosen, kind = rng.random(self.seq_len) < self.mask_rate, rng.random(self.seq_len)
        chosen[int(rng.integers(self.seq_len))] = True  # every sample has a target
        random = rng.integers(0, self.corpus.vocab, self.seq_len)
        assert self.corpus.mask_token is not None
        tokens = np.where(chosen & (kind < 0.8), self.corpus.mask_token, original)
        tokens = np.where(chosen & (kind >= 0.8) & (kind < 0.9), random, tokens)
        return tokens, np.where(chosen, original, IGNORE)

    def batch(self, ks: Iterable[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Samples `ks` stacked: tokens and targets, each [B, T]."""
        rows = [self[k] for k in ks]
        return np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows])

    def documents(self, ks: Iterable[int]) -> npt.NDArray[np.int64] | None:
        """`starts` of samples `ks`, [B, T]; None if each sample is one document."""
        return np.stack([self.starts(k) for k in ks]) if self.packing == "documents" else None

    @functools.cached_property
    def _window_lengths(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Of windows of whole documents: Σ L and Σ L² of each."""
        places = (self.segments.lengths - 1)[self._order]
        return np.add.reduceat(places, self._bounds[:-1]), np.add.reduceat(places**2, self._bounds[:-1])

    def lengths(self, ks: Iterable[int]) -> Lengths:
        """What samples `ks` hold; one that is cut from a longer text is one document of T tokens."""
        numbers = list(ks)
        if not self.whole:
            return Lengths(len(numbers) * self.seq_len, len(numbers) * self.seq_len**2)
        tokens, squares = (each[[self.window(k) for k in numbers]].sum() for each in self._window_lengths)
        return Lengths(int(tokens), int(squares))

    def state(self, consumed: int) -> dict[str, Any]:
        """The state from which a run resumes after `consumed` samples."""
        epoch, following = divmod(consumed, self.count)
        return {"epoch": epoch, "next": following, "fingerprint": self.fingerprint}

    @property
    def fingerprint(self) -> str:
        """Identifies the corpus and how it is cut into samples."""
        cut = {"none": "-whole", "documents": f"-documents-{self.seq_len}-{self.overlong}"}
        mixed = f"-{','.join(f'{w:g}' for w in self.weights)}" if self.weights else ""
        return self.corpus.fingerprint + cut.get(self.packing, "") + mixed

    def consumed(self, state: dict[str, Any]) -> int:
        """The inverse of `state`; refuses another corpus."""
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                f"{self.corpus.name}: not the corpus this run was trained on (fingerprint {self.fingerprint}, "
                f"the run has {state['fingerprint']}); give the old one, or start a new run"
            )
        return state["epoch"] * self.count + state["next"]


def open_run_corpus(config: Config, examples: Examples | None = None) -> Corpus:
    """The corpus of a run; `examples`: a user-defined dataset that replaces `data.source`."""
    encoding = encoding_of(config)
    if examples is None:
        return open_corpus(config.data.mixture()[0], config.data.tokenizer, encoding)
    return corpus_of(examples, config.model.vocab, replace(encoding, tokenizer=config.data.tokenizer or "bytes"))


def encoding_of(config: Config) -> Encoding:
    """How a run's text becomes tokens."""
    data = config.data
    return Encoding(data.tokenizer, data.template, data.template_date, data.loss_on)


def open_samples(config: Config, examples: Examples | None = None) -> tuple[Samples, Samples | None]:
    """The training samples, and the evaluation samples if evaluation is enabled; raises DataError for bad data.

    `examples`: a user-defined dataset that replaces `data.source`.
    """
    data, corpus = config.data, open_run_corpus(config, examples)
    if corpus.paired:
        raise ConfigError(
            f"{corpus.name}: preference pairs ('chosen' and 'rejected'), which are for DPO; give --dpo.beta 0.1"
        )
    weights = () if examples is not None else config.data.mixture()[1]
    kinds: dict[str, Any] = {
        "seq_len": config.model.seq_len,
        "vocab": config.model.vocab,
        "seed": config.train.seed,
        "bidirectional": config.model.family == "bert",
        "mask_rate": config.data.mask_rate,
        "packing": config.data.packing,
        "overlong": config.data.overlong,
        "masks": not config.model.dropout,
    }
    if config.data.packing == "documents" and config.model.dropout:
        raise ConfigError(
            f"data.packing = 'documents' with model.dropout = {config.model.dropout}: attention within documents has no "
            "dropout; use dropout = 0, or packing = 'none'"
        )
    held_out = data.eval_fraction if not data.eval_source else 0.0
    train = Samples(corpus, split="train", eval_fraction=held_out, weights=weights, **kinds)
    if not config.train.eval_every:
        return train, None
    if data.eval_source:
        return train, Samples(
            open_corpus(data.eval_source, data.tokenizer, encoding_of(config)), split="eval", eval_fraction=1.0, **kinds
        )
    held = Samples(corpus, split="eval", eval_fraction=held_out, weights=weights, **kinds)
    if held.count < 1:
        raise none_held_out(config, f"{train.count} window{'s' * (train.count > 1)}", train.count)
    return train, held


def none_held_out(config: Config, what: str, parts: int) -> ConfigError:
    """The error if no data is left to evaluate on; `parts`: number of windows or groups of samples that stay together."""
    less = "" if parts < 3 else f"data.eval_fraction = {1.5 / parts:.2g} or more, "
    return ConfigError(
        f"train.eval_every = {config.train.eval_every}, but data.eval_fraction = {config.data.eval_fraction} of {what} leaves "
        f"none to evaluate on; use {less}more data, or train.eval_every = 0"
    )
