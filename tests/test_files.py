"""Files: damaged, hostile or unwritable ones give one sentence, quickly, and nothing outside is touched."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fourfold import files, schema
from fourfold.config import Config
from fourfold.errors import ConfigError, FileError, RunDirError
from fourfold.plan import Plan
from fourfold.train.rundir import RunDir, read_metrics, scan_metrics
from tests.helpers import make_config

# ---- reading ----


def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.write_bytes(b"12345")
    assert files.read_bytes(good, most=5) == b"12345"
    with pytest.raises(FileError, match="has 5 bytes; a file of this kind has at most 4"):
        files.read_bytes(good, most=4)
    with (tmp_path / "sparse").open("wb") as f:
        f.truncate(2**40)
    began = time.process_time()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(good)
    assert files.read_bytes(tmp_path / "link") == b"12345"
    for name, message in (
        ("sparse", "has 1099511627776 bytes"),
        ("fifo", "it is not a regular file"),
        (".", "it is a folder"),
        ("none", "no such file"),
        ("a\0b", "cannot be the name of a file"),
        ("x" * 300, "the name is too long"),
    ):
        with pytest.raises(FileError, match=message):
            files.read_bytes(f"{tmp_path}/{name}")
    with pytest.raises(FileError, match="is a link"):
        files.read_bytes(tmp_path / "link", follow=False)
    assert time.process_time() - began < 2


DEEP = 100_000
BOMBS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "json depth": (files.parse_json, "[" * DEEP, "nested deeper than 64"),
    "json depth 65": (files.parse_json, "[" * 65 + "]" * 65, "nested deeper than 64"),
    "json digits": (files.parse_json, "1" * 5000, "4300 digits"),
    "json 100 digits": (files.parse_json, "1" * 100, "a whole number of 330 bits"),
    "json nan": (files.parse_json, '{"a": NaN}', "NaN is not a JSON number"),
    "json infinity": (files.parse_json, '{"a": -Infinity}', "-Infinity is not a JSON number"),
    "json 1e400": (files.parse_json, '{"a": 1e400}', "too large for a float"),
    "json twice": (files.parse_json, '{"a": 1, "a": 2}', "the key 'a' appears twice"),
    "json surrogate": (files.parse_json, r'{"a": "\ud800"}', "not valid Unicode"),
    "json many keys": (
        files.parse_json,
        "{" + ",".join(f'"{i}":1' for i in range(10**5)) + ',"7":1}',
        "'7' appears twice",
    ),
    "toml depth": (files.parse_toml, "a = " + "[" * DEEP, "nested deeper than 64"),
    "toml digits": (files.parse_toml, "a = " + "1" * 5000, "4300 digits"),
    "toml dotted": (files.parse_toml, ".".join("a" * 20_000) + " = 1", "more than 64 parts"),
    "toml quoted": (files.parse_toml, '" a "  .  ' * 20_000 + "a = 1", "more than 64 parts"),
    "toml header": (files.parse_toml, "[" + ".".join("a" * 20_000) + "]", "more than 64 parts"),
    "toml date": (files.parse_toml, "a = 2021-13-41", "not valid TOML"),
    "yaml aliases": (
        files.parse_yaml,
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
        "aliases",
    ),
    "yaml depth": (files.parse_yaml, "[" * DEEP, "nested deeper than 64"),
    "yaml indented": (files.parse_yaml, "\n".join(" " * i + "a:" for i in range(300)), "nested deeper than 64"),
    "yaml digits": (files.parse_yaml, "a: " + "1" * 5000, "a number of 5000 characters"),
    "yaml sixties": (files.parse_yaml, "a: " + ":".join(["1"] * 5000), "a number of 9999 characters"),
    "yaml tag": (files.parse_yaml, "a: !!python/object/apply:os.system [id]", "not valid YAML"),
    "yaml date": (files.parse_yaml, "a: 2021-13-41", "not valid YAML"),
    "yaml keys": (files.parse_yaml, "1: 2", "the key 1 is not a string"),
    "yaml long": (files.parse_yaml, "a: b\n" * 10**5, "characters of YAML"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_give_a_sentence_at_once(name: str) -> None:
    if name.startswith("yaml"):
        pytest.importorskip("yaml")
    parse, text, message = BOMBS[name]
    began = time.process_time()
    with pytest.raises(ConfigError) as e:
        parse(text, "the file", ConfigError)
    assert str(e.value).startswith("the file: not ")
    assert message in str(e.value)
    assert len(str(e.value)) < 500
    assert time.process_time() - began < 3


def test_what_is_allowed_is_read() -> None:
    assert files.parse_json('{"a": [1, -2.5e3, null, true, "ä\\u00e4"]}', "") == {"a": [1, -2500.0, None, True, "ää"]}
    assert files.parse_toml("[a.b]\nc.d = 1979-05-27\ne = nan", "")["a"]["b"]["c"]["d"].year == 1979
    pytest.importorskip("yaml")
    assert files.parse_yaml("a: {b: [1, 0x10, 1.5, null]}\nc: |\n  x\n", "") == {
        "a": {"b": [1, 16, 1.5, None]},
        "c": "x\n",
    }


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n\xff\xfe\n\n[1]\n{"a": 2}\n' + b"x" * 500 + b'\n{"a": 3}\n{"a": 4')
    lines = list(files.read_json_lines(path, longest=100))
    assert lines == [(1, {"a": 1}), (2, None), (3, None), (5, None), (6, {"a": 2}), (7, None), (8, {"a": 3}), (9, None)]


# ---- writing ----


def test_a_file_is_replaced_whole_and_never_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    path = tmp_path / "folder" / "x.json"
    path.parent.mkdir()
    path.symlink_to(precious)
    (path.parent / ".x.json.partial").symlink_to(precious)
    schema.write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    assert not path.is_symlink()
    assert precious.read_text() == "mine"
    with pytest.raises(RuntimeError, match="half"), files.create(path) as f:
        f.write(b"half")
        raise RuntimeError("half")
    assert json.loads(path.read_text()) == {"a": 1}
    assert sorted(p.name for p in path.parent.iterdir()) == [".x.json.partial", "x.json"]
    for other in ("linked", "second-name"):
        (tmp_path / other).symlink_to(precious) if other == "linked" else os.link(precious, tmp_path / other)
        with pytest.raises(FileError, match="cannot be written"):
            files.append_to(tmp_path / other)


def test_what_the_disk_says_becomes_a_sentence(tmp_path: Path) -> None:
    for number, words in ((errno.ENOSPC, "no space left on the disk"), (errno.EROFS, "the file system is read-only")):
        with pytest.raises(FileError, match=f"x: cannot be written: {words}"), files.create(tmp_path / "x"):
            raise OSError(number, os.strerror(number))
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileError, match="cannot be written: no such file"):
        files.write_bytes(tmp_path / "none" / "x", b"x")
    with pytest.raises(FileError, match="cannot be written"):
        files.write_bytes(Path("/proc/x"), b"x")


def test_names_out_of_files() -> None:
    good = ("__0_0.distcp", ".metadata", "ä b")
    bad = ("", ".", "..", "a/b", "/a", "../a", "a\\b", "a\0", "a\n", "\x1b[2J", "\ud800", "x" * 256, None, 3, ["a"])
    assert all(map(files.is_plain_name, good))
    assert not any(map(files.is_plain_name, bad))


# ---- run directories ----


def make_run(path: Path) -> RunDir:
    config = make_config(path).resolve()
    run = RunDir.create(path, config, Plan())
    run.unlock()
    return run


@pytest.mark.parametrize("name", [".lock", "config.json", "plan.json", "metrics.jsonl", "logs", "checkpoints", "trace"])
def test_a_run_directory_with_a_link_is_refused_and_nothing_is_written_through_it(tmp_path: Path, name: str) -> None:
    """`.lock` and `.plan.json.partial` once overwrote any file of the user's when a run was resumed."""
    run = make_run(tmp_path / "run")
    outside = tmp_path / "outside"
    here = run.path / name
    if here.is_dir() or name in ("checkpoints", "trace"):
        outside.mkdir()
        here.rmdir() if here.exists() else None
    else:
        outside.write_bytes(here.read_bytes() if here.exists() else b"mine")
        here.unlink(missing_ok=True)
    before = outside.read_bytes() if outside.is_file() else sorted(outside.iterdir())
    here.symlink_to(outside)
    with pytest.raises(RunDirError, match=f"{name}: is a link"):
        RunDir.reopen(run.path)
    assert (outside.read_bytes() if outside.is_file() else sorted(outside.iterdir())) == before


@pytest.mark.parametrize("name", ["config.json", "plan.json", "hf", "hf/config.json", "hf/tokenizer_config.json"])
def test_no_command_reads_a_run_through_a_link(tmp_path: Path, name: str) -> None:
    """`fourfold export`, and `final/` of a resumed run, held a copy of the file that hf/tokenizer_config.json was a link to."""
    run = make_run(tmp_path / "run")
    private = tmp_path / "private"
    if name == "hf":
        private.mkdir()
    else:
        private.write_text('{"password": 1}')
    here = run.path / name
    here.parent.mkdir(exist_ok=True)
    here.unlink(missing_ok=True)
    here.symlink_to(private)
    with pytest.raises(RunDirError, match=f"{name}: is a link; links are not followed here"):
        RunDir.find(run.path)


def test_files_that_a_run_writes_do_not_go_through_links(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (run.path / ".lock").unlink()
    (run.path / ".lock").symlink_to(precious)
    with pytest.raises(RunDirError, match="is a link"):
        run.lock()
    (run.path / ".lock").unlink()
    os.link(precious, run.path / ".lock")
    with pytest.raises(RunDirError, match="is a hard link"):
        run.lock()
    for name in (".plan.json.partial", ".config.json.partial"):
        (run.path / name).symlink_to(precious)
    run.write(*run.read())
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("name", ["history.jsonl", "logs/rank0.log", "trace/rank0.jsonl"])
def test_a_run_does_not_append_to_hard_links(tmp_path: Path, name: str) -> None:
    """A rank's log was appended to whatever file its name was a hard link to; history.jsonl was left out without a word."""
    run = make_run(tmp_path / "run")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (run.path / "trace").mkdir()
    os.link(precious, run.path / name)
    with pytest.raises(
        RunDirError, match=f"{name}: is a hard link to another file, and a run appends to it. Put a copy"
    ):
        RunDir.reopen(run.path)


@pytest.mark.parametrize("name", [".lock", "env.json", "metrics.jsonl", "history.jsonl", "logs/rank1.log"])
def test_a_run_directory_with_a_fifo_is_refused_at_once(tmp_path: Path, name: str) -> None:
    """Opening one for writing waits for a reader: a resumed run hung, and so did `fourfold doctor` on `.lock`."""
    run = make_run(tmp_path / "run")
    (run.path / name).unlink(missing_ok=True)
    os.mkfifo(run.path / name)
    with pytest.raises(RunDirError, match=f"{name}: is neither a file nor a folder"):
        RunDir.reopen(run.path)
    with pytest.raises(FileError, match="cannot be written: it is not a regular file"):
        files.append_to(run.path / name)
    assert not run.in_use()


def test_metrics_after_a_broken_line_are_kept(tmp_path: Path) -> None:
    """A flipped bit in the middle of metrics.jsonl hid everything after it, or ended every resume."""
    from fourfold.train.metrics import MetricsFile

    run = make_run(tmp_path / "run")
    lines = [json.dumps({"step": step, "loss": 1.0 / step, "grad_norm": None}) for step in range(1, 8)]
    lines[2] = lines[2].replace('"step"', '"st\x12p"')
    lines[3] = lines[3].replace('"loss": 0', '"loss": "0"')[:20]
    run.metrics_file.write_text("\n".join([*lines, '{"step": 8, "lo']))
    assert [m["step"] for m in read_metrics(run)] == [1, 2, 5, 6, 7]
    assert [number for number, line in scan_metrics(run) if line is None] == [3, 4, 8]
    file = MetricsFile(run, done=6)
    file.write({"step": 7, "loss": float("nan")})
    file.close()
    assert file.dropped == [3, 4, 8]
    assert [m["step"] for m in read_metrics(run)] == [1, 2, 5, 6, 7]


def test_a_cut_trace_line_does_not_end_a_resume(tmp_path: Path) -> None:
    """A full disk cuts a line of the trace; every later resume died on it."""
    from fourfold.train.clock import HostClock
    from fourfold.train.trace import TraceFile

    path = tmp_path / "trace" / "rank0.jsonl"
    path.parent.mkdir()
    good = [
        {"step": step, "rank": 0, "pipe": 0, "origin": 1.5, "spans": [["0F0", 0.0, 1.0, 0.0]]} for step in (1, 2, 3)
    ]
    bad = [good[0] | {"spans": [["0F0", 0.0]]}, good[0] | {"step": "x"}, good[0] | {"spans": 3}]
    text = "".join(json.dumps(line) + "\n" for line in [*good[:2], *bad, good[2]])
    path.write_text(text + '{"step": 4, "spans": [["0F')
    file = TraceFile(path.parent, 0, 0, 1, 2, HostClock())
    file.close()
    assert file.dropped == 4
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_config_files_are_read_with_bounds(tmp_path: Path) -> None:
    path = tmp_path / "big.toml"
    with path.open("wb") as f:
        f.truncate(2**31)
    with pytest.raises(ConfigError, match="big.toml: has 2147483648 bytes"):
        Config.load(path)
    (tmp_path / "nul.json").write_text('{"train": {"run_dir": "a\\u0000b"}}')
    with pytest.raises(ConfigError, match="control character"):
        Config.load(tmp_path / "nul.json")
