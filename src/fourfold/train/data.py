"""Corpora, and which samples a step sees. numpy only.

A corpus is one long array of token ids (uint8, uint16 or uint32; in memory or memory-mapped), and optionally a mask of the
tokens worth predicting. It is cut into windows of T tokens (plus the one after, for next-token targets); window i starts at
token i · T. Sample k of a run, counted over all steps and epochs, is window permute(seed, epoch, k mod windows): a function
of (seed, k) alone, so of (seed, step), never of the number of ranks. What a resumed run needs is two integers, the epoch
and the next sample in it, and the corpus's fingerprint to know it is the same.

Sources: `stdlib`, text files and folders of them, JSONL (`{"text": ...}` or `{"prompt": ..., "answer": ...}`, where only the
answer is predicted), and token files. Documents are packed one after another with an end-of-text token between them.

[Note: token file]
    bytes 0..7    magic  b"4FOLDTOK"
    bytes 8..11   length of the header in bytes, little-endian uint32 (the header is padded with spaces so that the tokens
                  start on a multiple of 64 bytes)
    header        JSON: version 1, dtype ("uint8" | "uint16" | "uint32"), tokens (count), masked (bool), vocab, end, mask_token,
                  tokenizer (name), fingerprint (hex)
    tokens        count little-endian values
    mask          if masked: count bytes, 1 where the token is to be predicted
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fourfold.config import Config
from fourfold.errors import ConfigError, DataError

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
    def encode(self, text: str) -> npt.NDArray[Any]: ...
    def decode(self, tokens: Iterable[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes. Two control bytes that text does not hold serve as end of text (0) and mask (1)."""

    name, vocab, end, mask = "bytes", 256, 0, 1

    def encode(self, text: str) -> npt.NDArray[Any]:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(t for t in tokens if 1 < t < 256).decode(errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer.json, through the `tokenizers` package."""

    def __init__(self, path: Path):
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise DataError(f"{path}: tokenizer files need the extra: pip install 'fourfold[hf]'") from None
        if not path.is_file():
            raise DataError(f"{path}: no such tokenizer file; use 'bytes' or the path of a tokenizer.json")
        try:
            self._library = Library.from_file(str(path))
        except Exception as e:  # the library raises bare Exception for a malformed file
            raise DataError(f"{path}: not a tokenizer.json: {e}") from None
        self.name, self.vocab = str(path), self._library.get_vocab_size()
        names = ("<|endoftext|>", "<|end_of_text|>", "</s>", "[SEP]", "<eos>", "<|im_end|>")
        end = self._first(*names)
        if end is None:
            raise DataError(f"{path}: has no end-of-text token; looked for {', '.join(names)}")
        self.end = end
        self.mask = self._first("[MASK]", "<mask>")

    def _first(self, *names: str) -> int | None:
        ids = (self._library.token_to_id(name) for name in names)
        return next((i for i in ids if i is not None), None)

    def encode(self, text: str) -> npt.NDArray[Any]:
        return np.asarray(self._library.encode(text, add_special_tokens=False).ids, dtype=_dtype_for(self.vocab))

    def decode(self, tokens: Iterable[int]) -> str:
        return self._library.decode(list(tokens))


def load_tokenizer(name: str) -> Tokenizer:
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(Path(name))


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


def open_corpus(source: str, tokenizer: str = "bytes") -> Corpus:
    """Open a corpus by name or path; raises DataError when it is missing, empty or damaged."""
    if source != "stdlib" and not os.path.exists(source):
        raise DataError(f"data.source = '{source}': no such file; use a path, or 'stdlib' for Python's own source")
    if os.path.isfile(source) and _starts_with(source, MAGIC):
        return _open_tokens(Path(source))
    codec = load_tokenizer(tokenizer)
    tokens, mask = _pack(_documents(source), codec)
    if len(tokens) == 0:
        raise DataError(f"data.source = '{source}': there is no text in it")
    fingerprint = _fingerprint(tokens, mask)
    return Corpus(source, tokens, mask, codec.vocab, codec.end, codec.mask, codec.name, fingerprint)


def _starts_with(path: str, magic: bytes) -> bool:
    with open(path, "rb") as f:
        return f.read(len(magic)) == magic


def _fingerprint(tokens: npt.NDArray[Any], mask: npt.NDArray[Any] | None) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).data)
    if mask is not None:
        digest.update(mask.data)
    return digest.hexdigest()


def _dtype_for(vocab: int) -> type[np.uint8] | type[np.uint16] | type[np.uint32]:
    return np.uint8 if vocab <= 2**8 else np.uint16 if vocab <= 2**16 else np.uint32


# ---- documents ----


@dataclass(frozen=True)
class _Document:
    """Text to predict, after a prompt that is only read."""

    text: str
    prompt: str = ""


def _documents(source: str) -> Iterator[_Document]:
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = sorted(p for p in root.rglob("*.py") if not _SKIPPED & set(p.relative_to(root).parts))
    elif os.path.isdir(source):
        paths = sorted(p for p in Path(source).rglob("*") if p.suffix in (".txt", ".md", ".py", ".jsonl"))
    else:
        paths = [Path(source)]
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            if source == "stdlib":  # a few files there test other encodings
                continue
            raise DataError(f"{path}: not UTF-8 text") from None
        except OSError as e:
            raise DataError(f"{path}: cannot be read: {e.strerror}") from None
        if path.suffix == ".jsonl":
            yield from _json_lines(path, text)
        elif text:
            yield _Document(text)


_SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}


def _json_lines(path: Path, text: str) -> Iterator[_Document]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except json.JSONDecodeError as e:
            raise DataError(f"{path}:{number}: not JSON: {e}") from None
        match item:
            case {"text": str(body)}:
                yield _Document(body)
            case {"prompt": str(prompt), "answer": str(answer)}:
                yield _Document(answer, prompt)
            case _:
                raise DataError(f'{path}:{number}: expected {{"text": ...}} or {{"prompt": ..., "answer": ...}}')


def _pack(documents: Iterable[_Document], codec: Tokenizer) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
    """All documents in one array, each followed by the end token; a mask only when some document has a prompt."""
    dtype = _dtype_for(codec.vocab)
    end = np.array([codec.end], dtype=dtype)
    tokens, masks, prompted = [], [], False
    for document in documents:
        prompt, body = codec.encode(document.prompt), codec.encode(document.text)
        tokens += [prompt.astype(dtype, copy=False), body.astype(dtype, copy=False), end]
        masks.append((len(prompt), len(body) + 1))
        prompted |= len(prompt) > 0
    if not tokens:
        return np.zeros(0, dtype), None
    mask = None
    if prompted:
        mask = np.concatenate([np.repeat(np.array([0, 1], np.uint8), lengths) for lengths in masks])
    return np.concatenate(tokens), mask


# ---- token files: [Note: token file] ----


def write_tokens(source: str, tokenizer: str, path: Path) -> Corpus:
    """Encode a source and write it as a token file; the file appears whole or not at all."""
    corpus = open_corpus(source, tokenizer)
    header = {
        "version": 1,
        "dtype": corpus.tokens.dtype.name,
        "tokens": len(corpus.tokens),
        "masked": corpus.mask is not None,
        "vocab": corpus.vocab,
        "end": corpus.end,
        "mask_token": corpus.mask_token,
        "tokenizer": corpus.tokenizer,
        "fingerprint": corpus.fingerprint,
    }
    text = json.dumps(header).encode()
    text += b" " * (-(len(MAGIC) + 4 + len(text)) % 64)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as f:
            f.write(MAGIC + len(text).to_bytes(4, "little") + text)
            f.write(corpus.tokens.astype(corpus.tokens.dtype.newbyteorder("<"), copy=False).data)
            if corpus.mask is not None:
                f.write(corpus.mask.data)
        partial.replace(path)
    except OSError as e:
        partial.unlink(missing_ok=True)
        raise DataError(f"{path}: cannot be written: {e.strerror}") from None
    return corpus


def _open_tokens(path: Path) -> Corpus:
    with path.open("rb") as f:
        start = f.read(12)
        length = int.from_bytes(start[8:12], "little")
        text = f.read(length)
    try:
        h = json.loads(text)
        dtype = {"uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32}[h["dtype"]]
        count, masked, version = int(h["tokens"]), bool(h["masked"]), h["version"]
        meaning = (int(h["vocab"]), int(h["end"]), h["mask_token"], str(h["tokenizer"]), str(h["fingerprint"]))
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path}: damaged header of a token file; write it again with 'fourfold tokenize'") from None
    if version != 1:
        raise DataError(f"{path}: token file of version {version}; this program reads version 1")
    offset = 12 + length
    wanted = offset + count * np.dtype(dtype).itemsize + (count if masked else 0)
    if (size := path.stat().st_size) != wanted:
        what = "truncated" if size < wanted else "longer than its header says"
        raise DataError(f"{path}: {what}: {size} bytes, but the header promises {wanted} ({count} tokens)")
    if count == 0:
        raise DataError(f"{path}: there are no tokens in it")
    tokens = np.memmap(path, dtype, "r", offset, (count,))
    mask = np.memmap(path, np.uint8, "r", offset + tokens.nbytes, (count,)) if masked else None
    return Corpus(str(path), tokens, mask, *meaning)


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
    are T tokens with some hidden, chosen by (seed, k); others are windows of T + 1 tokens, shifted by one.
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
    ):
        self.corpus, self.seq_len, self.seed, self.split = corpus, seq_len, seed, split
        self.bidirectional, self.mask_rate = bidirectional, mask_rate
        if corpus.vocab > vocab:
            raise DataError(
                f"{corpus.name}: its tokenizer ('{corpus.tokenizer}') has {corpus.vocab} ids, but model.vocab = {vocab}; "
                f"use model.vocab = {corpus.vocab} or more"
            )
        if bidirectional and corpus.mask_token is None:
            raise DataError(f"{corpus.name}: a bert model needs a mask token, which '{corpus.tokenizer}' does not have")
        windows = (len(corpus.tokens) - (0 if bidirectional else 1)) // seq_len
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
        return self.corpus.mask is None and not self.bidirectional

    def window(self, k: int) -> int:
        """Which window sample k is."""
        epoch, place = divmod(k, self.count)
        return self.first + permute(place, self.count, _hash(self.seed, epoch, self.split == "eval"))

    def __getitem__(self, k: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        start = self.window(k) * self.seq_len
        if self.bidirectional:
            return self._hide(k, start)
        window = np.asarray(self.corpus.tokens[start : start + self.seq_len + 1], dtype=np.int64)
        tokens, targets = window[:-1], window[1:].copy()
        if self.corpus.mask is not None:
            targets[self.corpus.mask[start + 1 : start + self.seq_len + 1] == 0] = IGNORE
        return tokens, targets

    def _hide(self, k: int, start: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """BERT's recipe: of the chosen tokens 80 % are masked, 10 % replaced by a random one, 10 % left."""
        original = np.asarray(self.corpus.tokens[start : start + self.seq_len], dtype=np.int64)
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
        return {"epoch": epoch, "next": following, "fingerprint": self.corpus.fingerprint}

    def consumed(self, state: dict[str, Any]) -> int:
        """The inverse of `state`; refuses another corpus."""
        if state["fingerprint"] != self.corpus.fingerprint:
            raise DataError(
                f"{self.corpus.name}: not the corpus this run was trained on (fingerprint {self.corpus.fingerprint}, "
                f"the run has {state['fingerprint']}); give the old one, or start a new run"
            )
        return state["epoch"] * self.count + state["next"]


def open_samples(config: Config) -> tuple[Samples, Samples | None]:
    """The training samples, and those for evaluation when it is asked for; raises DataError for bad data."""
    corpus = open_corpus(config.data.source, config.data.tokenizer)
    kinds: dict[str, Any] = {
        "seq_len": config.model.seq_len,
        "vocab": config.model.vocab,
        "seed": config.train.seed,
        "eval_fraction": config.data.eval_fraction,
        "bidirectional": config.model.family == "bert",
        "mask_rate": config.data.mask_rate,
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
