"""Corpora, and which samples a step sees. numpy only.

A corpus is one long array of token ids (uint8, uint16 or uint32; in memory or memory-mapped), and optionally a mask of the
tokens worth predicting. It is cut into windows of T tokens (plus the one after, for next-token targets); window i starts at
token i · T. Sample k of a run, counted over all steps and epochs, is window permute(seed, epoch, k mod windows): a function
of (seed, k) alone, so of (seed, step), never of the number of ranks. What a resumed run needs is two integers, the epoch
and the next sample in it, and the corpus's fingerprint to know it is the same.

Plain text is cut into windows (`packing = "concat"`): documents follow one another with an end-of-text token between them.
Examples of fine-tuning (chats, prompts with answers) are samples of their own (`packing = "none"`): sample k is one example,
padded with the end token to T; attention is causal, so the padding changes nothing, and it is never predicted. Encoding is
in encode.py, formats and chat templates in chats.py.

[Note: token file]
    bytes 0..7    magic  b"4FOLDTOK"
    bytes 8..11   length of the header in bytes, little-endian uint32 (the header is padded with spaces so that the tokens
                  start on a multiple of 64 bytes)
    header        JSON: version 2, dtype ("uint8" | "uint16" | "uint32"), tokens (count), masked (bool), documents (count),
                  prompted (whether examples are prompts with answers), left_out (count), vocab, end, mask_token,
                  tokenizer (name), fingerprint (hex)
    tokens        count little-endian values
    mask          if masked: count bytes, 1 where the token is to be predicted
    starts        documents + 1 little-endian uint64: where each document begins, and where the last one ends
Version 1 has neither documents nor starts, and is still read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fourfold import files, schema
from fourfold.config import Config
from fourfold.errors import ConfigError, DataError
from fourfold.train.chats import ChatTemplate
from fourfold.train.encode import Encoder, Encoding, cached_tokens, encode_to_file, examples, needs_cache, source_files

__all__ = [
    "ByteTokenizer",
    "Corpus",
    "Samples",
    "Tokenizer",
    "load_tokenizer",
    "open_corpus",
    "permute",
    "write_tokens",
]

MAGIC = b"4FOLDTOK"
HEADER_BYTES = 1 << 20
"""Bound on the header of a token file."""
CHECKED_BYTES = 256 << 20
"""Token files of up to this size are compared with their fingerprint when opened; of larger ones, the ids that are read."""
IGNORE = -100  # target of a token that is not predicted, as torch's cross entropy has it


class Tokenizer(Protocol):
    """Text to token ids and back. `end` separates documents, `mask` hides a token from a bidirectional model."""

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
        """The token that a text begins with, where the tokenizer has one."""

    @property
    def special(self) -> frozenset[int]:
        """Control tokens, such as the one that ends a turn of a chat."""

    def encode_all(
        self, texts: Sequence[str]
    ) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """For every text its ids, and where the characters of each token begin and end."""

    def encode(self, text: str) -> npt.NDArray[Any]: ...
    def decode(self, tokens: Iterable[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes. Two control bytes that text does not hold serve as end of text (0) and mask (1)."""

    name, vocab, end, mask, begin = "bytes", 256, 0, 1, None
    special: frozenset[int] = frozenset()

    def encode_all(
        self, texts: Sequence[str]
    ) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        for text in texts:
            ids = self.encode(text)
            of = np.cumsum((ids & 0xC0) != 0x80) - 1  # a character begins with a byte that continues none
            yield ids, of, of + 1

    def encode(self, text: str) -> npt.NDArray[Any]:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(t for t in tokens if 1 < t < 256).decode(errors="replace")


TOKENIZER_BYTES = 512 << 20


@contextlib.contextmanager
def _library_errors(path: Path, what: str) -> Iterator[None]:
    """The `tokenizers` library raises bare Exception, and a panic of its Rust code is not even that."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as e:
        raise DataError(f"{path}: {what}: {' '.join(str(e).split())[:300]}") from None


class HuggingFaceTokenizer:
    """A tokenizer.json, through the `tokenizers` package."""

    def __init__(self, path: Path):
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise DataError(f"{path}: tokenizer files need the extra: pip install 'fourfold[hf]'") from None
        if not path.is_file():
            raise DataError(f"{path}: no such tokenizer file; use 'bytes' or the path of a tokenizer.json")
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

    def encode_all(
        self, texts: Sequence[str]
    ) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        with _library_errors(Path(self.name), "cannot encode text"):
            encoded = self._library.encode_batch(list(texts), add_special_tokens=False)
        for found in encoded:
            self._check_ids(found.ids)
            places = np.asarray(found.offsets, dtype=np.int64).reshape(-1, 2)
            yield np.asarray(found.ids, dtype=_dtype_for(self.vocab)), places[:, 0], places[:, 1]

    def _check_ids(self, ids: Sequence[int]) -> None:
        if ids and max(ids) >= self.vocab:
            raise DataError(f"{self.name}: gives the id {max(ids)}, but has {self.vocab} tokens")

    def encode(self, text: str) -> npt.NDArray[Any]:
        with _library_errors(Path(self.name), "cannot encode text"):
            ids = self._library.encode(text, add_special_tokens=False).ids
        self._check_ids(ids)
        return np.asarray(ids, dtype=_dtype_for(self.vocab))

    def decode(self, tokens: Iterable[int]) -> str:
        with _library_errors(Path(self.name), "cannot decode tokens"):
            return self._library.decode(list(tokens))


def load_tokenizer(name: str) -> Tokenizer:
    return ByteTokenizer() if name in ("bytes", "") else HuggingFaceTokenizer(Path(name))


@dataclass(frozen=True)
class Corpus:
    """Token ids, what is to be predicted (None: all), and what the ids mean."""

    name: str
    tokens: npt.NDArray[Any]
    mask: npt.NDArray[Any] | None
    vocab: int
    end: int
    mask_token: int | None
    tokenizer: str
    fingerprint: str
    starts: npt.NDArray[Any] | None = None
    """Where each document begins, and where the last one ends."""
    prompted: bool = False
    """Whether the documents are examples of fine-tuning: prompts with answers, or chats."""
    left_out: int = 0
    """Examples that were not encoded, since their answer says nothing."""


def open_corpus(source: str, tokenizer: str = "bytes", encoding: Encoding | None = None) -> Corpus:
    """Open a corpus by name or path; raises DataError when it is missing, empty or damaged."""
    if "\0" in source:
        raise DataError(f"data.source = {source!r}: cannot be the name of a file")
    if os.path.isfile(source) and _starts_with(source, MAGIC):
        return _open_tokens(Path(source))
    encoding = replace(encoding or Encoding(), tokenizer=tokenizer or "bytes")
    if needs_cache(source, encoding.tokenizer):
        return replace(_open_tokens(cached_tokens(source, encoding)), name=source)
    codec = load_tokenizer(encoding.tokenizer)
    encoder = Encoder(codec, encoding)
    found = list(encoder(examples(source, source_files(source))))
    if not found:
        raise DataError(f"data.source = '{source}': there is no text in it")
    tokens, mask = np.concatenate([ids for ids, _ in found]), None
    if any(marks is not None for _, marks in found):
        mask = np.concatenate([np.ones(len(ids), np.uint8) if marks is None else marks for ids, marks in found])
    starts = np.cumsum([0, *(len(ids) for ids, _ in found)])
    return Corpus(
        source,
        tokens,
        mask,
        codec.vocab,
        codec.end,
        codec.mask,
        codec.name,
        _fingerprint(tokens, mask),
        starts,
        encoder.prompted,
        encoder.empty,
    )


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


def write_tokens(source: str, tokenizer: str, path: Path, encoding: Encoding | None = None) -> Corpus:
    """Encode a source and write it as a token file; the file appears whole or not at all."""
    encode_to_file(source, replace(encoding or Encoding(), tokenizer=tokenizer), path)
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
        counts = (count, vocab, end, documents + 1, left_out)
        if length > HEADER_BYTES or not all(map(schema.whole, counts)) or not isinstance(masked, bool):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, DataError):
        raise DataError(f"{path}: damaged header of a token file; write it again with 'fourfold tokenize'") from None
    if version not in (1, 2):
        raise DataError(f"{path}: token file of version {str(version)[:20]}; this program reads versions 1 and 2")
    masks = mask_token is None or (schema.whole(mask_token) and mask_token < vocab)
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
    return Corpus(str(path), tokens, mask, *meaning, starts, prompted, left_out)


def _check_ids(tokens: npt.NDArray[Any], vocab: int, name: str) -> None:
    """Raise DataError for an id that the vocabulary does not have: an embedding has no row for it."""
    if len(tokens) and (largest := int(tokens.max())) >= vocab:
        raise DataError(f"{name}: damaged: it has the id {largest}, but its vocabulary {vocab} ids")


# ---- samples ----


def permute(index: int, count: int, key: int) -> int:
    """Place of `index` in a random permutation of range(count), chosen by `key`; needs no memory.

    Four Feistel rounds on the smallest even number of bits that holds `count`; results outside are walked on until one
    falls inside (at most four tries on average), which keeps it a permutation.
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


class Samples:
    """The samples of a run: sample k as (tokens, targets), each [T] int64; targets are IGNORE where nothing is predicted.

    `split` is "train" (all but the last share of the corpus) or "eval" (that share). A bidirectional model's samples
    are T tokens with some hidden, chosen by (seed, k); others are windows of T + 1 tokens, shifted by one, or whole documents
    (`packing`). `overlong` says what becomes of documents of more than T + 1 tokens.
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
        overlong: str = "cut",
    ):
        self.corpus, self.seq_len, self.seed, self.split = corpus, seq_len, seed, split
        self.whole = packing == "none" or (packing == "auto" and corpus.prompted and not bidirectional)
        self.bidirectional, self.mask_rate = bidirectional, mask_rate
        if corpus.vocab > vocab:
            raise DataError(
                f"{corpus.name}: its tokenizer ('{corpus.tokenizer}') has {corpus.vocab} ids, but model.vocab = {vocab}; "
                f"use model.vocab = {corpus.vocab} or more"
            )
        if bidirectional and corpus.mask_token is None:
            raise DataError(f"{corpus.name}: a bert model needs a mask token, which '{corpus.tokenizer}' does not have")
        if self.whole and bidirectional:
            raise DataError(
                "data.packing = 'none' is for models that predict the next token; a bert model needs 'concat'"
            )
        if self.whole and corpus.starts is None:
            raise DataError(
                f"{corpus.name}: a token file of version 1 does not say where documents begin, which data.packing = 'none' "
                "needs; write it again with 'fourfold tokenize', or use 'concat'"
            )
        self.cut = self.dropped = 0
        """Documents of more than T + 1 tokens that are cut, or left out."""
        self._documents = self._whole_documents(overlong) if self.whole else np.zeros(0, np.int64)
        windows = len(self._documents) if self.whole else (len(corpus.tokens) - (0 if bidirectional else 1)) // seq_len
        if self.whole and not windows:
            raise DataError(f"{corpus.name}: no example has a token to predict within model.seq_len = {seq_len}")
        if windows < 1:
            raise DataError(
                f"{corpus.name}: {len(corpus.tokens)} tokens are fewer than one sample of model.seq_len = {seq_len} "
                f"(+1); use more text or a shorter seq_len"
            )
        held = int(windows * eval_fraction)
        self.first, self.count = (windows - held, held) if split == "eval" else (0, windows - held)

    @property
    def all_valid(self) -> bool:
        """Whether every token of every sample is predicted, so that the number of them is known beforehand."""
        return self.corpus.mask is None and not self.bidirectional and not self.whole

    def _whole_documents(self, overlong: str) -> npt.NDArray[np.int64]:
        """The documents that are samples: those with a token to predict among their first T + 1."""
        starts, mask, room = np.asarray(self.corpus.starts, np.int64), self.corpus.mask, self.seq_len + 1
        lengths = np.diff(starts)
        kept, long = lengths > 1, lengths > room
        if long.any() and overlong == "error":
            raise DataError(
                f"{self.corpus.name}: {long.sum()} of {len(lengths)} examples are longer than model.seq_len = {self.seq_len}, "
                f"the longest has {lengths.max()} tokens; use a longer seq_len, or data.overlong = 'cut' or 'drop'"
            )
        if overlong == "drop":
            kept &= ~long
        if mask is not None:
            stops = np.minimum(starts[1:], starts[:-1] + room)
            total = np.concatenate(([0], np.cumsum(mask, dtype=np.int64)))  # trained tokens before each place
            kept &= total[stops] - total[np.minimum(starts[:-1] + 1, stops)] > 0
        self.cut, self.dropped = int((kept & long).sum()), int((~kept).sum())
        return np.nonzero(kept)[0]

    def describe(self, global_batch: int, steps: int) -> str:
        """What a run sees of its data, in a line."""
        tokens, epochs = len(self.corpus.tokens), global_batch * steps / max(1, self.count)
        if not self.whole:
            return f"{tokens:,} tokens, {self.count:,} windows of {self.seq_len}; {steps} steps are {epochs:.3g} epochs"
        assert self.corpus.starts is not None
        lengths = np.diff(np.asarray(self.corpus.starts, np.int64))[self._documents]
        filled = np.minimum(lengths - 1, self.seq_len).mean() / self.seq_len
        share = "" if self.corpus.mask is None else f" ({self.corpus.mask.mean():.0%} trained)"
        said = [
            f"{self.count:,} examples, {tokens:,} tokens{share}",
            f"{filled:.0%} of each {self.seq_len} places filled",
        ]
        said.append(f"{steps} steps are {epochs:.3g} epochs")
        said += [f"{self.cut:,} cut to fit"] if self.cut else []
        missing = self.dropped + self.corpus.left_out
        said += [f"{missing:,} left out (too long, or nothing to predict)"] if missing else []
        return "; ".join(said)

    def window(self, k: int) -> int:
        """Which window sample k is."""
        epoch, place = divmod(k, self.count)
        return self.first + permute(place, self.count, _hash(self.seed, epoch, self.split == "eval"))

    def __getitem__(self, k: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if self.whole:
            return self._whole_example(self._documents[self.window(k)])
        start = self.window(k) * self.seq_len
        if self.bidirectional:
            return self._hide(k, start)
        window = np.asarray(self.corpus.tokens[start : start + self.seq_len + 1], dtype=np.int64)
        _check_ids(window, self.corpus.vocab, self.corpus.name)
        tokens, targets = window[:-1], window[1:].copy()
        if self.corpus.mask is not None:
            targets[self.corpus.mask[start + 1 : start + self.seq_len + 1] == 0] = IGNORE
        return tokens, targets

    def _whole_example(self, document: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        assert self.corpus.starts is not None
        start = int(self.corpus.starts[document])
        stop = min(int(self.corpus.starts[document + 1]), start + self.seq_len + 1)
        found = np.asarray(self.corpus.tokens[start:stop], dtype=np.int64)
        tokens, targets = (np.full(self.seq_len, fill, np.int64) for fill in (self.corpus.end, IGNORE))
        tokens[: stop - start - 1], targets[: stop - start - 1] = found[:-1], found[1:]
        if self.corpus.mask is not None:
            targets[: stop - start - 1][self.corpus.mask[start + 1 : stop] == 0] = IGNORE
        return tokens, targets

    def _hide(self, k: int, start: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """BERT's recipe: of the chosen tokens 80 % are masked, 10 % replaced by a random one, 10 % left."""
        original = np.asarray(self.corpus.tokens[start : start + self.seq_len], dtype=np.int64)
        _check_ids(original, self.corpus.vocab, self.corpus.name)
        rng = np.random.Generator(np.random.Philox(key=_hash(self.seed, k, 2 + (self.split == "eval"))))
        chosen, kind = rng.random(self.seq_len) < self.mask_rate, rng.random(self.seq_len)
        chosen[int(rng.integers(self.seq_len))] = True  # never a sample without a target
        random = rng.integers(0, self.corpus.vocab, self.seq_len)
        assert self.corpus.mask_token is not None
        tokens = np.where(chosen & (kind < 0.8), self.corpus.mask_token, original)
        tokens = np.where(chosen & (kind >= 0.8) & (kind < 0.9), random, tokens)
        return tokens, np.where(chosen, original, IGNORE)

    def batch(self, ks: Iterable[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Samples `ks` stacked: tokens and targets, each [B, T]."""
        rows = [self[k] for k in ks]
        return np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows])

    def state(self, consumed: int) -> dict[str, Any]:
        """What a resumed run needs to go on after `consumed` samples."""
        epoch, following = divmod(consumed, self.count)
        return {"epoch": epoch, "next": following, "fingerprint": self.fingerprint}

    @property
    def fingerprint(self) -> str:
        """Names the corpus and how it is cut into samples."""
        return self.corpus.fingerprint + ("-whole" if self.whole else "")

    def consumed(self, state: dict[str, Any]) -> int:
        """The inverse of `state`; refuses another corpus."""
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                f"{self.corpus.name}: not the corpus this run was trained on (fingerprint {self.fingerprint}, "
                f"the run has {state['fingerprint']}); give the old one, or start a new run"
            )
        return state["epoch"] * self.count + state["next"]


def open_samples(config: Config) -> tuple[Samples, Samples | None]:
    """The training samples, and those for evaluation when it is asked for; raises DataError for bad data."""
    data = config.data
    encoding = Encoding(data.tokenizer, data.template, data.template_date, data.loss_on)
    corpus = open_corpus(data.source, data.tokenizer, encoding)
    kinds: dict[str, Any] = {
        "seq_len": config.model.seq_len,
        "vocab": config.model.vocab,
        "seed": config.train.seed,
        "eval_fraction": config.data.eval_fraction,
        "bidirectional": config.model.family == "bert",
        "mask_rate": config.data.mask_rate,
        "packing": config.data.packing,
        "overlong": config.data.overlong,
    }
    train = Samples(corpus, split="train", **kinds)
    if not config.train.eval_every:
        return train, None
    held = Samples(corpus, split="eval", **kinds)
    if held.count < 1:
        raise ConfigError(
            f"train.eval_every = {config.train.eval_every}, but data.eval_fraction = {config.data.eval_fraction} of "
            f"{train.count} windows leaves none to evaluate on; use {1.5 / train.count:.2g} or more"
        )
    return train, held
