"""Sources of training data: many files and formats, several sources with weights, workers, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.cli import main
from fourfold.config import Config, DataConfig
from fourfold.data import encode
from fourfold.data.encode import Encoding, EncodingWorkers, SourceChunk, encode_to_file
from fourfold.data.samples import Samples, open_corpus, open_samples
from fourfold.errors import ConfigError, DataError
from tests.helpers import make_config


def jsonl(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(path)


def pairs(count: int, letter: str = "b") -> list[dict[str, Any]]:
    return [{"prompt": "a" * (i % 5), "completion": letter * (1 + i % 7)} for i in range(count)]


# ---- workers ----


def test_workers_write_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "CHUNK", 1000)
    text = tmp_path / "t.txt"
    text.write_text("some text")
    sources = (jsonl(tmp_path / "a.jsonl", pairs(400)), str(text), jsonl(tmp_path / "b.jsonl", [{"text": "x"}] * 9))
    shares: list[float] = []
    for workers in (1, 3):
        out = tmp_path / f"{workers}.tokens"
        encode_to_file(sources, Encoding(), out, lambda seen, whole: shares.append(seen / whole), workers=workers)
    assert (tmp_path / "1.tokens").read_bytes() == (tmp_path / "3.tokens").read_bytes()
    assert shares[-1] == 1
    corpus, again = open_corpus(str(tmp_path / "1.tokens")), open_corpus(sources)
    assert corpus.parts == again.parts == (400, 1, 9)
    assert corpus.fingerprint == again.fingerprint


def test_errors_of_workers_name_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "CHUNK", 40)
    data = b"".join(b'{"text": "abc"}\n' for _ in range(6)) + b'{"text": "a\xff"}\n' + b'{"text": "abc"}\n' * 6
    (tmp_path / "a.jsonl").write_bytes(data)
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"a.jsonl:7: byte 11 is not UTF-8"):
            encode_to_file((str(tmp_path / "a.jsonl"),), Encoding(), tmp_path / "out", workers=workers)
    assert not (tmp_path / "out").exists()


def test_a_worker_that_dies_is_an_error(tmp_path: Path) -> None:
    workers = EncodingWorkers(1, Encoding())
    try:
        workers.processes[0].send_signal(signal.SIGKILL)
        workers.processes[0].wait()
        with pytest.raises(DataError, match=r"x: the process that encodes it ended \(exit code -9\)"):
            list(workers([SourceChunk("text", "x", 1, "text")]))
    finally:
        workers.close()


# ---- formats ----


def test_compressed_files(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    data = "".join(json.dumps({"text": "abc"}) + "\n" for _ in range(1000)).encode()
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(data) * 2)  # two frames
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"text"))
    assert len(open_corpus(str(tmp_path / "*")).tokens) == 3000 * 4 + 5
    compressed = zstandard.ZstdCompressor(write_content_size=False).compress(os.urandom(1 << 20).hex().encode() + b"\n")
    (tmp_path / "cut.txt.zst").write_bytes(compressed[:-70000])
    with pytest.raises(DataError, match="cut.txt.zst: cannot be read: it ends in the middle of a frame"):
        open_corpus(str(tmp_path / "cut.txt.zst"))
    (tmp_path / "bad.jsonl.zst").write_bytes(b"no such thing")
    with pytest.raises(DataError, match="bad.jsonl.zst: cannot be read"):
        open_corpus(str(tmp_path / "bad.jsonl.zst"))


def test_datasets_saved_to_disk(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    for split, rows in (("train", pairs(30)), ("test", pairs(7))):
        folder = tmp_path / "saved" / split
        folder.mkdir(parents=True)
        for part in range(2):
            table = pyarrow.Table.from_pylist(rows[part::2])
            with pyarrow.ipc.new_stream(str(folder / f"data-{part}.arrow"), table.schema) as out:
                out.write_table(table, max_chunksize=4)
        names = [{"filename": f"data-{part}.arrow"} for part in range(2)]
        (folder / "state.json").write_text(json.dumps({"_data_files": names}))
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert open_corpus(str(tmp_path / "saved")).parts == (30,)
    assert open_corpus(str(tmp_path / "saved" / "test")).parts == (7,)
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["test"]}))
    with pytest.raises(DataError, match="a dataset with the splits test; name one"):
        open_corpus(str(tmp_path / "saved"))
    (tmp_path / "saved" / "test" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../x"}]}))
    with pytest.raises(DataError, match="does not name the files"):
        open_corpus(str(tmp_path / "saved" / "test"))


def test_rows_without_the_column_are_named(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist([{"question": "a"}]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet, row 1: not an example: has 'question'; expected 'messages'"):
        open_corpus(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "prompt,answer\n1,2\n", "a .csv file is not text to train on; convert it to JSONL"),
        ("a.txt", '[{"text": "a"},\n {"text": "b"}]', "a.txt: holds a JSON list of objects: .json"),
        ("a.txt", '{"text": "a"}\n{"text": "b"}', "a.txt: holds one JSON object per line: .jsonl"),
        ("a.jsonl", '[\n{"text": "a"}\n]', "a.jsonl:1: the file is a list over several lines, .* name it .json"),
        ("a.txt", "ok\nok\n\udcff", "a.txt:3: not UTF-8 text"),
    ],
)
def test_what_is_not_text_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=message):
        open_corpus(str(tmp_path / name))


def test_text_that_looks_a_little_like_json_is_text(tmp_path: Path) -> None:
    for text in ("[1, 2, 3]", "{curly} braces", "[link](x)"):
        (tmp_path / "a.txt").write_text(text)
        assert len(open_corpus(str(tmp_path / "a.txt")).tokens) == len(text) + 1


# ---- several sources ----


@pytest.mark.parametrize("packing", ["documents", "none", "concat"])
def test_weights_of_sources(tmp_path: Path, packing: str) -> None:
    sources = [jsonl(tmp_path / f"{c}.jsonl", [{"prompt": "p", "completion": c * 9}] * 200) for c in "bc"]
    corpus = open_corpus(sources)
    counts = []
    for weights in ((1, 1), (3, 1), (2, 0.5)):
        s = Samples(corpus, seq_len=10, vocab=256, seed=0, packing=packing, weights=weights)
        tokens = np.concatenate([s[k][1] for k in range(s.count)])
        counts.append([int((tokens == ord(c)).sum()) / 9 for c in "bc"])
    assert counts[0] == pytest.approx([200, 200], rel=0.05)
    assert counts[1] == pytest.approx([600, 200], rel=0 if s.whole else 0.05)  # from the first example of a source on
    assert counts[2][0] == pytest.approx(400, rel=0.02)
    assert counts[2][1] == pytest.approx(100, rel=0.2)
    assert s.fingerprint.endswith("-2,0.5")
    said = s.describe(1, 1).split(" tokens")[0].split()[-1]
    held = s.segments.lengths.sum() if s.whole else s.count * 10
    assert int(said.replace(",", "")) == held  # of an epoch, with repetitions


def test_sources_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, held = (jsonl(tmp_path / f"{n}.jsonl", pairs(60, n)) for n in "xyz")
    data = {"sources": [a, f"3 {b}"], "eval_source": held}
    config = make_config(tmp_path / "run", "gpt", train={"eval_every": 4}).to_dict()
    config["data"] = data
    train, evaluation = open_samples(Config.from_dict(config).resolve())
    assert evaluation is not None
    assert ord("z") in evaluation.corpus.tokens
    assert ord("z") not in train.corpus.tokens
    assert len(train.segments) == 240
    (tmp_path / "c.json").write_text(json.dumps(config))
    assert main(["train", str(tmp_path / "c.json"), "--nproc", "1", "--dry-run"]) == 0
    shown = "".join(capsys.readouterr().out.split())  # long paths are wrapped anywhere
    assert "x.jsonl+3×" in shown
    assert "evaluationon" in shown
    assert "240examples" in shown


def test_sources_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="are both given; keep one"):
        DataConfig(source="a.txt", sources=("b.txt",))
    with pytest.raises(ConfigError, match="write a path, or a weight above 0 and a path"):
        DataConfig(sources=("0 b.txt",))
    assert DataConfig(sources=("2 b.txt", "2023.txt")).mixture() == (("b.txt", "2023.txt"), (2.0, 1.0))
    encode_to_file((jsonl(tmp_path / "a.jsonl", pairs(5)),), Encoding(), tmp_path / "a.tokens")
    with pytest.raises(DataError, match="is a token file, which cannot be one of several sources"):
        open_corpus([str(tmp_path / "a.tokens"), str(tmp_path / "a.jsonl")])


def test_a_small_corpus_is_said(tmp_path: Path) -> None:
    s = Samples(open_corpus(jsonl(tmp_path / "a.jsonl", pairs(3))), seq_len=8, vocab=256, seed=0)
    assert "a step of 64 repeats samples: there are only" in s.describe(64, 5)
    assert "repeats" not in s.describe(1, 5)


def test_encoded_by_workers_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a run does it: a process of its own, which has workers; the second opening encodes nothing."""
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path / "cache"))
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "a": 1, "b": 2}, "b"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "tokenizer.json"))
    source = jsonl(tmp_path / "a.jsonl", [{"prompt": "a " * 2, "completion": "b" * 5000}] * 4000)
    assert os.path.getsize(source) > 4 * encode.CHUNK  # enough for two workers
    corpus = open_corpus(source, str(tmp_path / "tokenizer.json"))
    assert corpus.parts == (4000,)
    assert corpus.tokens[:8].tolist() == [1, 1, 2, 0] * 2
    before = os.stat(next((tmp_path / "cache").rglob("*.tokens"))).st_mtime_ns
    assert open_corpus(source, str(tmp_path / "tokenizer.json")).fingerprint == corpus.fingerprint
    assert os.stat(next((tmp_path / "cache").rglob("*.tokens"))).st_mtime_ns == before
