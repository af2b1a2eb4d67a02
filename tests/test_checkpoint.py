"""Checkpoints: exact under any number of ranks, whole or not there, and never a way to run code."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fourfold.checkpoint import folder as checkpoint_folder
from fourfold.checkpoint import save_load, tensor_files
from fourfold.checkpoint.export import load_model
from fourfold.checkpoint.holdings import Chunks
from fourfold.checkpoint.index import read_index
from fourfold.checkpoint.save_load import Checkpointer, Holding, holding_of, verify
from fourfold.cli import main
from fourfold.errors import CheckpointError, RankFailure
from fourfold.model.build import serial_model
from fourfold.piece import Piece
from fourfold.shard.layout import lay_out
from fourfold.testing.ranks import run_ranks
from fourfold.train.rundir import RunDir, read_metrics
from tests.helpers import MODELS, make_config, run_training, series


def state_digest(run: Path, step: int) -> str:
    """Hash of every tensor (weights and moments) of a checkpoint, opened whole."""
    directory = run / "checkpoints" / f"step-{step:06d}"
    tensors = {n: torch.empty(s, dtype=d) for n, (s, d) in save_load.tensor_types(directory).items()}
    save_load.load(directory, [holding_of(n, t) for n, t in tensors.items()])
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].numpy().tobytes())
    return digest.hexdigest()


# ---- exact ----


def test_token_types_are_saved_and_opened_with_the_rest(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = MODELS["bert"] | {"token_types": 3}
    config = make_config(tmp_path / "run", model, train={"steps": 2}, optim={"weight_decay": 0.0})
    plan = {"mesh": {"data": 2}, "unit": [{"match": "*", "mode": "zero3"}]}
    run_training(config, plan, 2)
    opened, step = load_model(RunDir(tmp_path / "run"))
    written = load_file(tmp_path / "run" / "final" / "model.safetensors")
    types = written["bert.embeddings.token_type_embeddings.weight"]
    assert step == 2
    assert torch.equal(opened.embed.types.weight, types)
    first = serial_model(config.resolve().model, config.train.seed).embed.types.weight
    assert not torch.equal(types[0], first[0])  # what all tokens are
    assert torch.equal(types[1:], first[1:])
    expected = state_digest(tmp_path / "run", 2)
    run_ranks(_reopen_and_save, 3, tmp_path / "run")
    assert state_digest(tmp_path / "run", 2) == expected


def test_saved_on_n_opened_on_m(tmp_path: Path) -> None:
    """All ordered pairs of 1 to 4 ranks: a run resumed without a step to do saves again exactly what it opened."""
    for n in (1, 2, 3, 4):
        config = make_config(tmp_path / f"{n}", train={"steps": 2})
        run_training(config, {"mesh": {"data": n}}, n)
        expected = state_digest(tmp_path / f"{n}", 2)
        for m in (1, 2, 3, 4):
            copy = tmp_path / f"{n}-{m}"
            shutil.copytree(tmp_path / f"{n}", copy)
            run_ranks(_reopen_and_save, m, copy)
            assert state_digest(copy, 2) == expected, (n, m)
            files = (copy / "checkpoints" / "step-000002").glob("*.distcp")
            assert [p.stat().st_size > 1000 for p in files] == [True] * m  # replicas share the writing


def _reopen_and_save(rank: int, ranks: int, path: Path) -> None:
    from fourfold.launch.place import current_place
    from fourfold.plan import Plan
    from fourfold.supervision.watch import Limits
    from fourfold.train.worker import assemble

    config, _ = RunDir(path).read()
    plan = Plan.from_dict({"mesh": {"data": ranks}})
    layout = plan.check(config, ranks)
    loop, done = assemble(
        current_place(), torch.device("cpu"), Limits.of(20.0), config, plan, layout, RunDir(path), (), None
    )
    assert done == 2
    loop.saved_step = -1
    loop.save(2)
    loop.checkpointer.wait()


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path: Path, mode: str, compute: str) -> None:
    saving = {"every": 3, "mode": mode}
    plan = {"mesh": {"data": 2}, "precision": {"compute": compute}}
    whole = make_config(tmp_path / "whole", "llama", train={"steps": 6}, checkpoint=saving)
    reference = run_training(whole, plan, 2)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-000006")
    cut = make_config(tmp_path / "cut", "llama", train={"steps": 6}, checkpoint=saving)
    resumed = run_training(cut, plan, 2, resume=True)
    for key in ("step", "loss", "grad_norm", "lr"):
        assert series(reference, key) == series(resumed, key)
    assert state_digest(tmp_path / "whole", 6) == state_digest(tmp_path / "cut", 6)


def test_resume_under_another_plan_obeys_the_contract(tmp_path: Path) -> None:
    reference = make_config(tmp_path / "whole", train={"steps": 20}, checkpoint={"every": 10})
    expected = run_training(reference, {"mesh": {"data": 1}, "precision": {"compute": "fp64"}}, 1)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-000020")
    config = make_config(tmp_path / "cut", train={"steps": 20})
    plan = {"mesh": {"data": 3}, "batch": {"micro_batches": 2}, "precision": {"compute": "fp64"}}
    found = run_training(config, plan, 3, resume=True)
    for a, b in zip(*([m for m in run if "loss" in m] for run in (expected, found)), strict=True):
        assert abs(a["loss"] - b["loss"]) <= 1e-9 * a["loss"]
        assert abs(a["grad_norm"] - b["grad_norm"]) <= 1e-9 * a["grad_norm"]


def test_a_save_in_the_background_holds_the_values_of_its_step(tmp_path: Path) -> None:
    x = torch.zeros(1000, 1000)
    saver = Checkpointer(tmp_path, keep=3, background=True)
    for step in range(1, 4):
        x.fill_(step)
        saver.save(step, [holding_of("x", x)], {"step": step})
        x.fill_(-1)  # training continues at once
    saver.wait()
    assert [p.name for p in saver.finished()] == ["step-000001", "step-000002", "step-000003"]
    for step in range(1, 4):
        save_load.load(tmp_path / f"step-{step:06d}", [holding_of("x", x)])
        assert (x == step).all()


def test_a_save_without_room_for_a_copy_is_synchronous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    x = torch.zeros(1 << 18)  # 1 MiB on each of four ranks
    saver = Checkpointer(tmp_path, keep=3, background=True, local_ranks=4)
    for step, available in enumerate((4 << 20, 4 << 20, 8 << 20), start=1):
        monkeypatch.setattr(tensor_files, "available_bytes", lambda value=available: value)
        saver.save(step, [holding_of("x", x)], {"step": step})
        assert (saver._thread is None) == (step < 3)
    saver.wait()
    assert [p.name for p in saver.finished()] == ["step-000001", "step-000002", "step-000003"]
    said = "training waits for saves, as with checkpoint.mode = 'sync': a copy needs 4.00 MiB of host memory, and 4.00 MiB are available"
    assert capsys.readouterr().out.count(said) == 1


def _shards(rank: int, ranks: int, path: Path) -> bool:
    """A fused, padded, flat-sharded local parameter: three row blocks of a serial matrix, cut over the ranks."""
    serial = torch.arange(30 * 7, dtype=torch.float64).view(30, 7)
    local = torch.full((13, 7), -1.0, dtype=torch.float64)  # the last row is padding
    pieces = []
    for part in range(3):
        local[4 * part : 4 * part + 4] = serial[10 * part + 2 : 10 * part + 6]
        pieces.append(Piece("w", (30, 7), ((10 * part + 2, 10 * part + 6), (0, 7)), ((4 * part, 4 * part + 4), (0, 7))))
    rest = [
        Piece("w", (30, 7), ((10 * part + a, 10 * part + b), (0, 7)), ((c, c + b - a), (0, 7)))
        for part in range(3)
        for a, b, c in ((0, 2, 6 * part), (6, 10, 6 * part + 2))
    ]
    other = torch.cat([serial[10 * part + a : 10 * part + b] for part in range(3) for a, b in ((0, 2), (6, 10))])
    layout = lay_out({"w": (13, 7), "rest": (18, 7)}, ranks)
    flat = torch.full((layout.total,), -2.0, dtype=torch.float64)
    for slot, value in zip(layout.slots, (local, other), strict=True):
        flat[slot.start : slot.stop] = value.flatten()
    low, high = layout.shard_range(rank)
    holding = Holding("", flat[low:high].clone(), low, layout, {"w": tuple(pieces), "rest": tuple(rest)})
    saver = Checkpointer(path, group=dist.group.WORLD)
    saver.save(1, [holding], {"step": 1})
    back = torch.zeros_like(serial)
    save_load.load(path / "step-000001", [holding_of("w", back)], group=dist.group.WORLD)
    mine = Holding("", torch.full_like(holding.flat, -3), low, layout, holding.pieces)
    save_load.load(path / "step-000001", [mine], group=dist.group.WORLD)
    covered = mine.flat != -3
    return torch.equal(back, serial) and torch.equal(mine.flat[covered], holding.flat[covered])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_fused_padded_and_sharded_parameters(tmp_path: Path, ranks: int) -> None:
    assert all(run_ranks(_shards, ranks, tmp_path))


def test_boxes_of_one_part_of_a_file(tmp_path: Path) -> None:
    """What a rank of a grid holds of a fused matrix: several runs of rows, in any order."""
    whole = torch.randn(10, 4)
    Checkpointer(tmp_path).save(1, [holding_of("w", whole)], {"step": 1})
    folder = tmp_path / "step-000001"
    for starts in ((1, 6), (6, 1), (0, 3, 7)):
        chunks = Chunks((10, 4), torch.float32)
        views = {at: torch.full((3, 4), torch.nan) for at in starts}
        chunks.views.update({torch.Size((at, 0)): view for at, view in views.items()})
        save_load._fill(folder, read_index(folder), {"w": chunks})
        for at, view in views.items():
            assert torch.equal(view, whole[at : at + 3]), (starts, at)


def test_a_save_waits_for_the_one_in_flight(tmp_path: Path) -> None:
    """They use the same group of ranks, and on GPUs the same memory of the host."""
    saver, seen = Checkpointer(tmp_path, background=True), []
    write = saver._write

    def slow(path: Path, *args: Any) -> None:
        seen.append(f"{path.name} begins")
        time.sleep(0.2)
        write(path, *args)
        seen.append(f"{path.name} ends")

    saver._write = slow  # type: ignore[method-assign]
    for step in (1, 2):
        saver.save(step, [holding_of("x", torch.zeros(10))], {"step": step})
    saver.wait()
    assert seen == ["step-000001 begins", "step-000001 ends", "step-000002 begins", "step-000002 ends"]


# ---- whole, or not there ----


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors are written in pieces by several threads, as large ones are."""
    monkeypatch.setattr(tensor_files, "FILE_BYTES", 100_000)
    for module in (tensor_files, checkpoint_folder):
        monkeypatch.setattr(module, "PIECE", 30_000)


def _save_for_ever(path: Path, background: bool) -> None:
    x = torch.zeros(4, 50_000)
    saver = Checkpointer(path, background=background)
    for step in range(1, 10**6):
        x.fill_(step)
        saver.save(step, [holding_of(f"x{i}", row) for i, row in enumerate(x)], {"step": step})


@pytest.mark.usefixtures("small_pieces")
def test_files_are_written_and_read_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    tensors = {f"w{i}": torch.randn(40_000 + 1000 * i) for i in range(6)} | {"small": torch.randn(3, 2)}
    Checkpointer(tmp_path).save(1, [holding_of(n, t) for n, t in tensors.items()], {"step": 1})
    folder = tmp_path / "step-000001"
    listed = json.loads((folder / "complete.json").read_text())["files"]
    written = sorted(p.name for p in folder.glob("*.distcp"))
    assert written == [f"__0_{i}.distcp" for i in range(4)]
    for name in written:
        data = (folder / name).read_bytes()
        assert listed[name] == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert max(listed[n]["bytes"] for n in written) < 2 * min(listed[n]["bytes"] for n in written)
    theirs = {n: torch.zeros_like(t) for n, t in tensors.items()}
    dcp.load(theirs, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    ours = {n: torch.zeros_like(t) for n, t in tensors.items()}
    save_load.load(folder, [holding_of(n, t) for n, t in ours.items()])
    for name, tensor in tensors.items():
        assert torch.equal(theirs[name], tensor)
        assert torch.equal(ours[name], tensor)
    with open(folder / "__0_2.distcp", "r+b") as f:
        f.seek(-20_000, os.SEEK_END)
        f.write(b"?")
    assert [str(p) for p in verify(folder) if "__0_2.distcp is damaged: its checksum" in p]
    # a disk that fails in the middle of one of the files: its own error, and nothing is left
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data) if len(data) < 20_000 else _no_space())
    with pytest.raises(CheckpointError, match="no space left on the disk"):
        Checkpointer(tmp_path).save(2, [holding_of(n, t) for n, t in tensors.items()], {"step": 2})
    assert not (tmp_path / "step-000002").exists()


def _no_space() -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.usefixtures("small_pieces")
def test_killed_at_any_moment_the_newest_complete_checkpoint_is_whole(tmp_path: Path) -> None:
    """SIGKILL at 30 random instants of a process that does nothing but save."""
    chance = random.Random(0)
    found = []
    for trial in range(30):
        path = tmp_path / str(trial)
        pid = os.fork()
        if pid == 0:
            try:
                _save_for_ever(path, background=trial % 2 == 1)
            finally:
                os._exit(1)
        deadline = time.monotonic() + 30
        while save_load.newest(path) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.06))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        last = save_load.newest(path)
        assert last is not None
        x = torch.zeros(4, 50_000)
        state = save_load.load(last, [holding_of(f"x{i}", row) for i, row in enumerate(x)])
        assert (x == state["step"]).all()
        complete = len(list(path.glob("step-*/complete.json")))
        found.append((complete, len(list(path.glob("step-*")))))
        assert complete <= 3  # two, or a third that had not been pruned yet
        shutil.rmtree(path)
    assert any(there > complete for complete, there in found), "no kill fell into a save; the test shows nothing"


def test_old_ones_are_pruned_and_leftovers_removed(tmp_path: Path) -> None:
    x = torch.zeros(3)
    (tmp_path / "step-000001").mkdir()
    (tmp_path / "step-000001" / "__0_0.distcp").write_bytes(b"half")
    saver = Checkpointer(tmp_path, keep=2)
    for step in (2, 4, 6):
        saver.save(step, [holding_of("x", x)], {"step": step})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000004", "step-000006"]
    (tmp_path / "step-000008").mkdir()
    assert save_load.newest(tmp_path) == tmp_path / "step-000006"
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        save_load.read_state(tmp_path / "step-000008")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "index.json", "state.json"])
def test_a_flipped_byte_is_named(tmp_path: Path, name: str) -> None:
    x = torch.randn(1000)
    Checkpointer(tmp_path).save(1, [holding_of("x", x)], {"step": 1})
    path = tmp_path / "step-000001" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        save_load.load(tmp_path / "step-000001", [holding_of("x", x)])
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        save_load.load(tmp_path / "step-000001", [holding_of("x", x)])


def test_other_models_are_refused(tmp_path: Path) -> None:
    Checkpointer(tmp_path).save(1, [holding_of("head.weight", torch.zeros(3))], {"step": 1})
    with pytest.raises(CheckpointError, match="no tensor 'head.weigth'; did you mean 'head.weight'"):
        save_load.load(tmp_path / "step-000001", [holding_of("head.weigth", torch.zeros(3))])
    with pytest.raises(CheckpointError, match=r"'head.weight' is \[3\] in the checkpoint and \[4\] in the model"):
        save_load.load(tmp_path / "step-000001", [holding_of("head.weight", torch.zeros(4))])


# ---- never code ----


class Payload:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.marker}",))


def test_a_pickle_in_any_file_does_not_run(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", train={"steps": 2})
    run_training(config, {}, 1)
    marker = tmp_path / "it-ran"
    payload = pickle.dumps(Payload(marker))
    pickle.loads(payload)
    assert marker.exists()  # the payload is real
    marker.unlink()
    folder = tmp_path / "run" / "checkpoints" / "step-000002"
    files = [p for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != ".lock"]
    assert len(files) > 8
    for path in files:
        before, listed = path.read_bytes(), (folder / "complete.json").read_bytes()
        path.write_bytes(payload)
        if path.parent == folder and path.name != "complete.json":  # an attacker would mend the checksum too
            entries = json.loads(listed)
            entries["files"][path.name] = {"bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
            (folder / "complete.json").write_text(json.dumps(entries))
        for attempt in (
            lambda: load_model(RunDir(tmp_path / "run")),
            lambda: list(read_metrics(RunDir(tmp_path / "run"))),
        ):
            with contextlib.suppress(Exception):
                attempt()
        assert not marker.exists(), path
        path.write_bytes(before)
        (folder / "complete.json").write_bytes(listed)
    load_model(RunDir(tmp_path / "run"))


def mend_checksum(path: Path) -> None:
    """What an attacker who changes a file does besides."""
    marker = path.parent / "complete.json"
    entries = json.loads(marker.read_text())
    data = path.read_bytes()
    entries["files"][path.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    marker.write_text(json.dumps(entries))


def make_old(directory: Path) -> None:
    """A checkpoint as version 1 had it: DCP's pickle is the only index."""
    (directory / "index.json").unlink()
    entries = json.loads((directory / "complete.json").read_text())
    del entries["files"]["index.json"]
    (directory / "complete.json").write_text(json.dumps(entries | {"version": 1}))


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "..", "", "a\x00b", "a\x1b[2J"])
@pytest.mark.parametrize("old", [False, True])
def test_an_index_cannot_point_outside_its_directory(tmp_path: Path, old: bool, name: str) -> None:
    x = torch.zeros(3)
    Checkpointer(tmp_path).save(1, [holding_of("x", x)], {"step": 1})
    directory = tmp_path / "step-000001"
    if old:
        make_old(directory)
        path = directory / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        for info in metadata.storage_data.values():
            info.relative_path = name
        path.write_bytes(pickle.dumps(metadata))
    else:
        path = directory / "index.json"
        index = json.loads(path.read_text())
        index["tensors"]["x"]["chunks"][0]["file"] = name
        path.write_text(json.dumps(index))
    mend_checksum(path)
    with pytest.raises(CheckpointError, match="the index names the file .*; refused"):
        save_load.load(directory, [holding_of("x", x)])


def test_old_checkpoints_open(tmp_path: Path) -> None:
    tensors = {"a.b": torch.randn(5, 7), "c": torch.randn(3).bfloat16(), "d": torch.tensor(2.0, dtype=torch.float64)}
    Checkpointer(tmp_path).save(1, [holding_of(n, t) for n, t in tensors.items()], {"step": 1})
    make_old(tmp_path / "step-000001")
    for protocol in (None, 2, 5):
        path = tmp_path / "step-000001" / ".metadata"
        if protocol is not None:
            path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes()), protocol))
            mend_checksum(path)
        back = {n: torch.zeros_like(t) for n, t in tensors.items()}
        save_load.load(tmp_path / "step-000001", [holding_of(n, t) for n, t in back.items()])
        assert all(torch.equal(back[n], tensors[n]) for n in tensors)


def test_a_pickle_cannot_change_which_folder_is_deleted(tmp_path: Path) -> None:
    """BUILD on an allowed class once set PosixPath.parent: the next save deleted a folder of the attacker's choice."""
    x, precious = torch.zeros(3), tmp_path / "precious"
    precious.mkdir()
    (precious / "complete.json").write_text("mine")
    parent, saver = Path.parent, Checkpointer(tmp_path / "c")
    saver.save(1, [holding_of("x", x)], {"step": 1})
    directory = tmp_path / "c" / "step-000001"
    make_old(directory)
    build = b"\x80\x02cpathlib\nPosixPath\nq\x00}U\x06parent"
    target = str(precious).encode()
    build += b"h\x00X" + len(target).to_bytes(4, "little") + target + b"\x85Rsb0"
    (directory / ".metadata").write_bytes(build + (directory / ".metadata").read_bytes())
    mend_checksum(directory / ".metadata")
    with pytest.raises(CheckpointError, match="metadata: damaged"):
        save_load.load(directory, [holding_of("x", x)])
    assert Path.parent is parent
    for step in (2, 3, 4):
        saver.save(step, [holding_of("x", x)], {"step": step})
    assert (precious / "complete.json").read_text() == "mine"


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02Nr\xff\xff\xff\x1f.",  # memo entry 2**29
        b"\x80\x05\x96\xff\xff\xff\xff\x01\x00\x00\x00.",  # a bytearray of 8 GB
        b"\x80\x05\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",  # a frame of 2**63 bytes
        b"\x80\x02(" + b"\x85" * 5000 + b".",  # nested tuples
        b"\x80\x02}" + b"K\x01\x86q\x00" + b"h\x00h\x00\x86q\x00" * 200 + b"Ns.",  # a key of 2**200 leaves
        b"\x80\x02",
        b"",
    ],
)
def test_a_small_index_takes_little_memory_and_time(tmp_path: Path, data: bytes) -> None:
    x = torch.zeros(3)
    Checkpointer(tmp_path).save(1, [holding_of("x", x)], {"step": 1})
    directory = tmp_path / "step-000001"
    make_old(directory)
    (directory / ".metadata").write_bytes(data)
    mend_checksum(directory / ".metadata")
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(CheckpointError, match="metadata: damaged"):
        save_load.load(directory, [holding_of("x", x)])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    assert time.process_time() - began < 5


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    x = torch.randn(6, 4)
    Checkpointer(tmp_path).save(1, [holding_of("x", x)], {"step": 1})
    directory = tmp_path / "step-000001"
    path, marker = directory / "index.json", (directory / "complete.json").read_bytes()
    good = path.read_text()

    def chunk(**fields: Any) -> Any:
        return lambda t: t["chunks"][0].update(fields)

    for change, message in (
        (chunk(at=-1), "-1 is not a count"),
        (chunk(at=10**9), r"lies outside __0_0\.distcp"),
        (chunk(bytes=8), r"lies outside __0_0\.distcp"),
        (chunk(at=7), r"__0_0\.distcp"),
        (chunk(shape=[5, 4]), "the parts of 'x' have 20 elements of 24"),
        (chunk(shape=[7, 4]), "a part of 'x' lies outside it"),
        (chunk(offset=[0]), "another number of dims"),
        (chunk(file="state.json"), "lies outside state.json"),
        (chunk(file="complete.json"), "which complete.json does not list"),
        (lambda t: t.update(dtype="object"), "of type 'object'"),
        (lambda t: t.update(dtype="int32"), "not the tensor that the index says"),
        (lambda t: t.update(shape=[10**12, 10**12], chunks=[]), "have 0 elements"),
        (lambda t: t.pop("chunks"), "'chunks' is missing"),
    ):
        index = json.loads(good)
        change(index["tensors"]["x"])
        path.write_text(json.dumps(index))
        (directory / "complete.json").write_bytes(marker)
        mend_checksum(path)
        with pytest.raises(CheckpointError, match=message):
            save_load.load(directory, [holding_of("x", torch.zeros(6, 4))])


def test_links_are_neither_followed_nor_emptied(tmp_path: Path) -> None:
    x, outside = torch.ones(3), tmp_path / "outside"
    saver = Checkpointer(outside)
    saver.save(5, [holding_of("x", x)], {"step": 5})
    checkpoints = tmp_path / "c"
    saver = Checkpointer(checkpoints)
    saver.save(1, [holding_of("x", x)], {"step": 1})
    for name in ("step-000002", "step-000009"):
        (checkpoints / name).symlink_to(outside / "step-000005")
    assert save_load.newest(checkpoints) == checkpoints / "step-000001"
    for step in (2, 3, 4):
        saver.save(step, [holding_of("x", x)], {"step": step})
    assert len(list((outside / "step-000005").iterdir())) == 5
    assert (checkpoints / "step-000009").is_symlink()
    data = checkpoints / "step-000004" / "__0_0.distcp"
    data.unlink()
    data.symlink_to(outside / "step-000005" / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: is a link"):
        save_load.load(checkpoints / "step-000004", [holding_of("x", x)])
    (tmp_path / "linked").symlink_to(outside)
    with pytest.raises(CheckpointError, match="linked: is a link"):
        Checkpointer(tmp_path / "linked").save(6, [holding_of("x", x)], {"step": 6})


# ---- order, retention, damage ----


def test_the_newest_is_the_one_of_the_last_step_not_of_the_last_name(tmp_path: Path) -> None:
    """step-1000000 sorts before step-999999 as text: it was deleted as soon as it was saved."""
    x, saver = torch.zeros(3), Checkpointer(tmp_path, keep=2)
    for step in (999_998, 999_999, 1_000_000, 1_000_001, 10_000_000):
        saver.save(step, [holding_of("x", x)], {"step": step})
        assert save_load.newest(tmp_path) == tmp_path / f"step-{step:06d}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10000000", "step-1000001"]


def test_an_old_checkpoint_that_cannot_be_removed_stays_and_the_new_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one was deleted, as if its save had failed, and the run ended."""
    x, said, remove = torch.zeros(3), io.StringIO(), shutil.rmtree

    def refused(path: Path, *args: Any, **options: Any) -> None:
        if path.name == "step-000001":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        remove(path, *args, **options)

    monkeypatch.setattr(shutil, "rmtree", refused)
    saver = Checkpointer(tmp_path, keep=1, console=said)
    for step in (1, 2, 3, 4):
        saver.save(step, [holding_of("x", x)], {"step": step})
    assert [step for step, _ in save_load.complete(tmp_path)] == [4]
    assert said.getvalue().count("step-000001: cannot be removed: permission denied; the run continues") == 1
    with pytest.raises(CheckpointError, match="cannot be removed: permission denied"):  # `fourfold checkpoint prune`
        save_load.remove(tmp_path / "step-000001")


def test_every_nth_checkpoint_is_kept(tmp_path: Path) -> None:
    x, saver = torch.zeros(3), Checkpointer(tmp_path, keep=2, keep_every=4)
    for step in range(1, 12):
        saver.save(step, [holding_of("x", x)], {"step": step})
    assert [step for step, _ in save_load.complete(tmp_path)] == [4, 8, 10, 11]


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(tmp_path: Path) -> None:
    """Also where a byte of a tensor has changed: it has been read into place before its file is found to be damaged."""
    x, saver = torch.zeros(3), Checkpointer(tmp_path, keep=5)
    held = [holding_of("x", x)]
    assert save_load.load_newest(tmp_path, lambda: held) == (None, {}, [])
    for step in (1, 2, 3):
        saver.save(step, [holding_of("x", torch.full((3,), float(step)))], {"step": step})
    data = tmp_path / "step-000002" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    data = tmp_path / "step-000003" / "__0_0.distcp"
    stored = torch.full((3,), 3.0).numpy().tobytes()
    assert data.read_bytes().count(stored) == 1
    data.write_bytes(data.read_bytes().replace(stored, torch.full((3,), 7.0).numpy().tobytes()))
    path, state, lines = save_load.load_newest(tmp_path, lambda: held)
    assert path == tmp_path / "step-000001"
    assert state["step"] == 1
    assert (x == 1).all()
    assert [line.rpartition("; ")[2] for line in lines] == [
        "set aside as damaged-step-000003",
        "set aside as damaged-step-000002",
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["damaged-step-000002", "damaged-step-000003", "step-000001"]
    (tmp_path / "step-000001" / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="no checkpoint verifies"):
        save_load.load_newest(tmp_path, lambda: held)
    assert (tmp_path / "step-000001").is_dir()


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(tmp_path: Path) -> None:
    """Same bits as without the damage."""
    whole = make_config(tmp_path / "whole", train={"steps": 6}, checkpoint={"every": 2, "keep": 3})
    reference = run_training(whole, {}, 1)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-000006")
    index = tmp_path / "cut" / "checkpoints" / "step-000004" / "index.json"
    index.write_bytes(index.read_bytes().replace(b"float32", b"float64", 1))
    (tmp_path / "cut" / "metrics.jsonl").open("a").write('{"step": 6, "lo')
    cut = make_config(tmp_path / "cut", train={"steps": 6}, checkpoint={"every": 2, "keep": 3})
    resumed = run_training(cut, {}, 1, resume=True)
    for key in ("step", "loss", "grad_norm"):
        assert series(reference, key) == series(resumed, key)
    assert state_digest(tmp_path / "whole", 6) == state_digest(tmp_path / "cut", 6)
    assert (tmp_path / "cut" / "checkpoints" / "damaged-step-000004").is_dir()
    assert [step for step, _ in save_load.complete(tmp_path / "cut" / "checkpoints")] == [2, 4, 6]


def test_a_damaged_state_does_not_stop_the_command_that_resumes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from fourfold.cli import main

    config = make_config(tmp_path / "run", train={"steps": 4}, checkpoint={"every": 2})
    run_training(config, {}, 1)
    (tmp_path / "run" / "checkpoints" / "step-000004" / "state.json").write_text("{")
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    out = capfd.readouterr().out.replace("\n", "")
    assert "state.json is damaged: 1 bytes" in out
    assert "set aside as damaged-step-000004; resuming from step-000002" in out


# ---- the command ----


def test_the_checkpoint_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fourfold.cli import main
    from fourfold.plan import Plan

    run = RunDir.create(tmp_path / "run", make_config(tmp_path / "run").resolve(), Plan())
    run.unlock()
    saver = Checkpointer(run.checkpoints, keep=9)
    for step in range(1, 7):
        saver.save(step, [holding_of("x", torch.zeros(3))], {"step": step})
    (run.checkpoints / "step-000002" / "complete.json").unlink()
    (run.checkpoints / "damaged-step-000009").mkdir()
    (run.checkpoints / "damaged-step-notes").write_text("a file of the user's own")
    assert main(["checkpoint", "list", str(run.path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(r["step"], r["state"]) for r in rows] == [
        *((s, "unfinished" if s == 2 else "complete") for s in range(1, 7)),
        (None, "set aside: damaged"),
    ]
    assert main(["checkpoint", "verify", str(run.path)]) == 0
    for flags in (["--dry-run"], []):
        assert main(["checkpoint", "prune", str(run.path), "--keep", "1", "--keep-every", "3", "--json", *flags]) == 0
        gone = json.loads(capsys.readouterr().out.splitlines()[-1])["deleted"]
        assert sorted(Path(p).name for p in gone) == [f"step-00000{s}" for s in (1, 2, 4, 5)]
        left = [step for step, _ in save_load.complete(run.checkpoints)]
        assert left == ([1, 3, 4, 5, 6] if flags else [3, 6])
    data = run.checkpoints / "step-000003" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    assert main(["checkpoint", "verify", str(run.path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["good"]
    assert [bool(p) for p in found["checkpoints"].values()] == [True, False]
    assert main(["checkpoint", "verify", str(run.checkpoints / "step-000006")]) == 0
    assert main(["checkpoint", "list", str(run.path), "--keep", "3"]) == 2
    run.lock()
    assert main(["checkpoint", "prune", str(run.path)]) == 2
    assert "is in use by process" in capsys.readouterr().err
    run.unlock()


def test_code_in_a_tensor_file_with_right_sums_is_not_run(tmp_path: Path) -> None:
    """torch's own text recommends weights_only = False, which would run it."""
    x = torch.arange(6.0)
    Checkpointer(tmp_path).save(1, [holding_of("x", x)], {"step": 1})
    path = tmp_path / "step-000001"
    file, marker = next(path.glob("*.distcp")), json.loads((path / "complete.json").read_text())
    data = bytearray(file.read_bytes())
    at = data.index(b"ctorch._utils") - 2
    name = str(tmp_path / "made").encode()
    code = b"\x80\x02cos\nmkdir\n(X" + len(name).to_bytes(4, "little") + name + b"tR."
    assert len(code) < data.index(b"PK", at) - at
    data[at : at + len(code)] = code
    file.write_bytes(data)
    marker["files"][file.name]["sha256"] = hashlib.sha256(data).hexdigest()
    (path / "complete.json").write_text(json.dumps(marker))
    with pytest.raises(CheckpointError, match=r"damaged at byte 0: .*it was not run") as caught:
        save_load.load(path, [holding_of("x", x)])
    assert "weights_only" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001"]


def test_a_run_directory_that_was_moved_is_not_made_again(tmp_path: Path) -> None:
    """The run went on in a second directory of the old name, and ended with "done"."""
    (tmp_path / "run").mkdir()
    saver = Checkpointer(tmp_path / "run" / "checkpoints")
    saver.save(1, [holding_of("x", torch.zeros(3))], {"step": 1})
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(
        CheckpointError, match="run is gone: it was moved or deleted during the run. Resume from where it is now"
    ):
        saver.save(2, [holding_of("x", torch.zeros(3))], {"step": 2})
    assert not (tmp_path / "run").exists()


def test_a_marker_that_is_a_folder_does_not_end_a_save(tmp_path: Path) -> None:
    saver = Checkpointer(tmp_path, keep=2)
    for step in (1, 3):
        (tmp_path / f"step-{step:06d}" / "complete.json").mkdir(parents=True)
    for step in (2, 3):
        saver.save(step, [holding_of("x", torch.zeros(3))], {"step": step})
    assert [step for step, _ in save_load.complete(tmp_path)] == [2, 3]
    assert not (tmp_path / "step-000001").exists()


# ---- disks ----


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize("background", [False, True])
def test_full_disk_gives_one_error_and_loses_nothing(small_disk: Path, background: bool) -> None:
    small, large = torch.ones(100_000), torch.ones(1_000_000)
    saver = Checkpointer(small_disk / "c", background=background)
    saver.save(1, [holding_of("x", small)], {"step": 1})
    with pytest.raises(
        CheckpointError, match=r"cannot be saved: .*; the last complete checkpoint is .*step-000001"
    ) as e:
        saver.save(2, [holding_of("x", large)], {"step": 2})
        saver.wait()
    assert "no space left on the disk" in str(e.value)
    assert save_load.newest(small_disk / "c") == small_disk / "c" / "step-000001"
    assert not (small_disk / "c" / "step-000002").exists()
    small.zero_()
    save_load.load(small_disk / "c" / "step-000001", [holding_of("x", small)])
    assert (small == 1).all()
    saver.save(3, [holding_of("x", small)], {"step": 3})  # and works again when there is room
    saver.wait()


def test_a_run_on_a_full_disk_says_so_and_resumes_to_the_same_bits(small_disk: Path, tmp_path: Path) -> None:
    """Room for a few bytes more each time: another write is the first that fails."""
    sections = {"train": {"steps": 4}, "checkpoint": {"every": 2, "mode": "sync"}, "log": {"trace": 1}}
    run_training(make_config(tmp_path / "whole", **sections), {}, 1)  # type: ignore[arg-type]
    expected, filler = state_digest(tmp_path / "whole", 4), small_disk / "filler"
    for room in (0, 9_000, 60_000):
        config = make_config(small_disk / "run", **sections)  # type: ignore[arg-type]
        with filler.open("wb") as f:
            os.posix_fallocate(f.fileno(), 0, shutil.disk_usage(small_disk).free // 4096 * 4096 - room)
        with pytest.raises(RankFailure, match="no space left on the disk") as e:
            run_training(config, {}, 1)
        assert "inline_container" not in str(e.value).rpartition("Error: ")[2]
        filler.unlink()
        run_training(config, {}, 1, resume=(small_disk / "run" / "config.json").exists())
        assert state_digest(small_disk / "run", 4) == expected
        shutil.rmtree(small_disk / "run")


def test_read_only_disk(small_disk: Path) -> None:
    saver = Checkpointer(small_disk / "c")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match="cannot be saved: .*: the file system is read-only"):
        saver.save(1, [holding_of("x", torch.ones(3))], {"step": 1})


def test_one_rank_that_cannot_write_is_an_error_on_all(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"cannot be saved: no paper \(rank 1\)"):
        run_ranks(_broken_on_rank_1, 3, tmp_path)


def _broken_on_rank_1(rank: int, ranks: int, path: Path) -> None:
    from fourfold.checkpoint import tensor_files

    if rank == 1:

        def fail(self: object, *args: object) -> None:
            raise OSError("no paper")

        tensor_files.FileWriter.write_data = fail  # type: ignore[method-assign,assignment]
    layout = lay_out({"x": (64 * ranks,)}, ranks)
    pieces = {"x": (Piece("x", (64 * ranks,), ((0, 64 * ranks),), ((0, 64 * ranks),)),)}
    holding = Holding("", torch.ones(64), 64 * rank, layout, pieces)
    Checkpointer(path, group=dist.group.WORLD).save(1, [holding], {"step": 1})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_box_of_a_tensor_is_read_alone(tmp_path: Path, dtype: torch.dtype) -> None:
    """Boxes of whole rows, and of parts of rows; of a tensor that `torch.save` writes in the usual way, and one that it does not."""
    x = torch.randn(6, 4, 3).to(dtype)
    odd = torch.randn(4, 6).to(dtype).mT  # saved with its strides
    scalar = torch.tensor(3.0, dtype=dtype)
    Checkpointer(tmp_path).save(1, [holding_of("x", x), holding_of("s", scalar)], {"step": 1})
    path, file = tmp_path / "step-000001", "odd.distcp"
    torch.save(odd, path / file)
    size = (path / file).stat().st_size
    marker = json.loads((path / "complete.json").read_text())
    marker["files"][file] = {"bytes": size, "sha256": hashlib.sha256((path / file).read_bytes()).hexdigest()}
    index = json.loads((path / "index.json").read_text())
    chunk = {"offset": [0, 0], "shape": [6, 4], "file": file, "at": 0, "bytes": size}
    index["tensors"]["odd"] = {"dtype": str(dtype).removeprefix("torch."), "shape": [6, 4], "chunks": [chunk]}
    (path / "index.json").write_text(json.dumps(index))
    (path / "complete.json").write_text(json.dumps(marker))
    stored = read_index(path)
    for rows in ((0, 6), (2, 5), (5, 6)):
        whole = (rows, (0, 4), (0, 3))
        assert torch.equal(save_load.read_box(path, stored, "x", whole), x[slice(*rows)])
        part = (rows, (1, 3), (2, 3))
        assert torch.equal(save_load.read_box(path, stored, "x", part), x[slice(*rows), 1:3, 2:3])
        assert torch.equal(save_load.read_box(path, stored, "odd", (rows, (1, 4))), odd[slice(*rows), 1:4])
    assert torch.equal(save_load.read_box(path, stored, "s", ()), scalar)


def test_the_last_checkpoint_can_be_weights_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """final/ is the same; training cannot continue from it, only from the checkpoint before."""
    finals = []
    for last in ("all", "weights"):
        config = make_config(tmp_path / last, train={"steps": 4}, checkpoint={"every": 2, "last": last})
        run_training(config, {"mesh": {"data": 2}}, 2)
        finals.append((tmp_path / last / "final" / "model.safetensors").read_bytes())
    assert finals[0] == finals[1]
    folder = tmp_path / "weights" / "checkpoints"
    names = read_index(folder / "step-000004")
    assert names
    assert not any(name.startswith("optim.") for name in names)
    assert any(name.startswith("optim.") for name in read_index(folder / "step-000002"))
    again = ["train", "--resume", str(tmp_path / "weights"), "--train.steps", "6"]
    assert main(again) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "has weights only (checkpoint.last = 'weights'), so training cannot continue" in said
    shutil.rmtree(folder / "step-000004")
    assert main([*again, "--nproc", "2"]) == 0
    assert save_load.newest(folder) == folder / "step-000006"
