"""Data: samples depend on (seed, step) alone; files are whole or refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.data.samples import (
    IGNORE,
    ByteTokenizer,
    Samples,
    corpus_of,
    load_tokenizer,
    open_corpus,
    permute,
    write_tokens,
)
from fourfold.errors import DataError


@settings(deadline=None)
@given(st.integers(1, 500), st.integers(0, 2**63))
def test_permute_is_a_permutation(count: int, key: int) -> None:
    assert sorted(permute(i, count, key) for i in range(count)) == list(range(count))


def test_permutations_differ_by_key_and_look_random() -> None:
    a, b = ([permute(i, 1000, key) for i in range(1000)] for key in (1, 2))
    assert a != b
    assert abs(np.corrcoef(np.arange(1000), a)[0, 1]) < 0.1


def text_file(path: Path, size: int = 1000) -> str:
    path.write_text("".join(chr(ord("a") + i % 26) for i in range(size)))
    return str(path)


def samples(source: str, **fields: object) -> Samples:
    return Samples(open_corpus(source), **{"seq_len": 10, "vocab": 256, "seed": 3} | fields)  # type: ignore[arg-type]


def test_an_epoch_sees_every_window_once_and_epochs_differ(tmp_path: Path) -> None:
    s = samples(text_file(tmp_path / "a.txt"))
    epochs = [[s.window(e * s.count + i) for i in range(s.count)] for e in range(2)]
    assert s.count == 100
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(100))
    assert epochs[0] != epochs[1]


def test_targets_are_the_next_tokens(tmp_path: Path) -> None:
    s = samples(text_file(tmp_path / "a.txt"))
    tokens, targets = s.batch(range(4))
    assert tokens.shape == targets.shape == (4, 10)
    assert (tokens[:, 1:] == targets[:, :-1]).all()
    assert s.all_valid


def test_evaluation_split_is_apart(tmp_path: Path) -> None:
    source = text_file(tmp_path / "a.txt")
    train, held = (samples(source, split=split, eval_fraction=0.1) for split in ("train", "eval"))
    assert (train.count, held.count) == (90, 10)
    assert {train.window(k) for k in range(90)}.isdisjoint(held.window(k) for k in range(10))


def test_state_is_two_integers_and_a_fingerprint(tmp_path: Path) -> None:
    s = samples(text_file(tmp_path / "a.txt"))
    state = s.state(250)
    assert state == {"epoch": 2, "next": 50, "fingerprint": s.corpus.fingerprint}
    assert s.consumed(json.loads(json.dumps(state))) == 250
    other = samples(text_file(tmp_path / "b.txt", 999))
    with pytest.raises(DataError, match="not the corpus this run was trained on"):
        other.consumed(state)


def test_prompts_are_not_predicted(tmp_path: Path) -> None:
    lines = [{"prompt": "what?", "answer": "that"}, {"text": "plain"}] * 20
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    s = samples(str(path), packing="none")
    assert not s.all_valid
    for k in range(s.count):
        tokens, targets = s[k]
        shown = ByteTokenizer().decode(t for t in targets if t != IGNORE)
        assert "w" not in shown  # of "what?"
        assert "?" not in shown
        assert (targets != IGNORE).any()
        assert (targets[targets != IGNORE] == np.append(tokens[1:], targets[-1])[targets != IGNORE]).all()


def test_bidirectional_samples_hide_tokens(tmp_path: Path) -> None:
    s = samples(text_file(tmp_path / "a.txt", 20000), seq_len=100, bidirectional=True)
    tokens, targets = s.batch(range(200))
    chosen = targets != IGNORE
    assert abs(chosen.mean() - 0.15) < 0.02
    assert abs((tokens == 1)[chosen].mean() - 0.8) < 0.02
    assert abs((tokens == targets)[chosen].mean() - 0.1) < 0.02
    assert (tokens[~chosen] > 1).all()
    again = samples(text_file(tmp_path / "a.txt", 20000), seq_len=100, bidirectional=True)
    assert (again.batch(range(200))[0] == tokens).all()
    rare = samples(text_file(tmp_path / "a.txt", 20000), seq_len=100, bidirectional=True, mask_rate=1e-9)
    assert ((rare.batch(range(50))[1] != IGNORE).sum(1) == 1).all()  # every sample has a target


def test_stdlib_is_on_every_machine() -> None:
    corpus = open_corpus("stdlib")
    assert len(corpus.tokens) > 5_000_000
    assert b"def __init__(self" in corpus.tokens.tobytes()


# ---- token files ----


def test_token_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "a" * i, "answer": "b" * i}) for i in range(1, 30)))
    written = write_tokens(str(path), "bytes", tmp_path / "out.bin")
    read = open_corpus(str(tmp_path / "out.bin"))
    assert (read.tokens == written.tokens).all()
    assert read.mask is not None
    assert written.mask is not None
    assert (read.mask == written.mask).all()
    assert (read.vocab, read.end, read.mask_token, read.fingerprint) == (256, 0, 1, written.fingerprint)
    assert isinstance(read.tokens, np.memmap)
    header = (tmp_path / "out.bin").read_bytes()[:12]
    assert header[:8] == b"4FOLDTOK"
    assert (12 + int.from_bytes(header[8:], "little")) % 64 == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-5], "truncated: .* but the header promises"),
        (lambda data: data + b"x", "longer than its header says"),
        (lambda data: data[:20], "damaged header"),
        (lambda data: data.replace(b'"uint8"', b'"uint9"'), "damaged header"),
        (lambda data: data.replace(b'"version": 2', b'"version": 9'), "version 9"),
    ],
)
def test_damaged_token_files_are_refused(tmp_path: Path, damage: object, message: str) -> None:
    write_tokens(text_file(tmp_path / "a.txt"), "bytes", tmp_path / "a.bin")
    path = tmp_path / "b.bin"
    path.write_bytes(damage((tmp_path / "a.bin").read_bytes()))  # type: ignore[operator]
    with pytest.raises(DataError, match=message):
        open_corpus(str(path))


def test_bad_sources(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(DataError, match="there is no text in it"):
        open_corpus(str(empty))
    with pytest.raises(DataError, match="no such file"):
        open_corpus(str(tmp_path / "nowhere.txt"))
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8"):
        open_corpus(str(tmp_path / "binary.txt"))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    with pytest.raises(DataError, match=r"bad.jsonl:2: not an example: has 'txt'; expected"):
        open_corpus(str(tmp_path / "bad.jsonl"))
    with pytest.raises(DataError, match="fewer than one sample"):
        samples(text_file(tmp_path / "short.txt", 9))
    with pytest.raises(DataError, match="use model.vocab = 256 or more"):
        samples(text_file(tmp_path / "a.txt"), vocab=100)


def test_hugging_face_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[SEP]": 0, "a": 1, "b": 2, "[UNK]": 3}, "[UNK]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "tokenizer.json"))
    codec = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert (codec.vocab, codec.end, codec.mask) == (4, 0, None)
    assert codec.encode("a b z").tolist() == [1, 2, 3]
    (tmp_path / "t.txt").write_text("a b " * 20)
    corpus = write_tokens(str(tmp_path / "t.txt"), str(tmp_path / "tokenizer.json"), tmp_path / "t.bin")
    assert corpus.tokens[:4].tolist() == [1, 2, 1, 2]
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(DataError, match="not a tokenizer.json"):
        load_tokenizer(str(tmp_path / "broken.json"))
    with pytest.raises(DataError, match="no such tokenizer file"):
        load_tokenizer("nowhere.json")
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "vocab.json").write_text("{}")
    with pytest.raises(DataError, match=r"but vocab.json, an older form; convert it: AutoTokenizer.from_pretrained"):
        load_tokenizer(str(tmp_path / "older" / "tokenizer.json"))


# ---- a dataset of the user's own ----


@pytest.mark.parametrize(
    "item",
    [
        {"tokens": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]},
        {"tokens": [1, 2, 3], "targets": [IGNORE, 3, 4]},
        {"input_ids": [1, 2, 3, 4], "labels": [IGNORE, IGNORE, 3, 4]},
    ],
)
def test_own_examples(item: dict[str, list[int]]) -> None:
    corpus = corpus_of([item] * 3, vocab=100)
    s = Samples(corpus, seq_len=5, vocab=100, seed=0, packing="none")
    tokens, targets = s[0]
    assert (s.count, tokens[:3].tolist()) == (3, [1, 2, 3])
    assert targets.tolist() == [IGNORE, 3, 4, IGNORE, IGNORE]


def test_own_examples_of_text_and_bad_ones() -> None:
    corpus = corpus_of([{"prompt": "a", "completion": "bc"}], vocab=256)
    assert corpus.tokens.tolist() == [97, 98, 99, 0]
    assert corpus.mask is not None
    assert corpus.mask.tolist() == [0, 1, 1, 1]
    bad: list[tuple[object, str]] = [
        ({"tokens": [1, 200]}, r"example 1: has the id 200, but model.vocab = 100"),
        ({"tokens": [1, 2], "loss_mask": [1]}, "2 tokens, but 1 values of 'loss_mask'"),
        ({"tokens": [1, 2], "targets": [5, 6]}, "has token 5 at position 1, but the example has 2"),
        ({"tokens": [1.5]}, "'tokens' must be a list of integers"),
        ([1, 2], "expected a mapping with 'tokens', found list"),
        ({"ids": [1]}, "not an example: has 'ids'"),
    ]
    for item, message in bad:
        with pytest.raises(DataError, match=message):
            corpus_of([{"tokens": [1, 2]}, item], vocab=100)  # type: ignore[list-item]
