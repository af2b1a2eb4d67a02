"""Checkpoints in object stores: through fsspec's memory and local files, and an S3-compatible server on loopback."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.checkpoint import save_load
from fourfold.checkpoint.remote import RemoteFolder, check_url, fetch_newest, local_run
from fourfold.cli import main
from fourfold.errors import CheckpointError, ConfigError
from tests.helpers import make_config

fsspec = pytest.importorskip("fsspec")


def save(local: Path, remote: RemoteFolder, step: int, **options: Any) -> None:
    saver = save_load.Checkpointer(local, remote=remote, **options)
    state = {"step": step}
    saver.save(step, [save_load.holding_of("x", torch.full((300,), float(step)))], state, last=True)


def loaded(local: Path) -> float:
    x = torch.zeros(300)
    directory, _, _ = save_load.load_newest(local, lambda: [save_load.holding_of("x", x)])
    assert directory is not None
    assert (x == x[0]).all()
    return x[0].item()


@pytest.fixture(params=["memory", "file"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    url = f"memory://run-{os.getpid()}" if request.param == "memory" else f"file://{tmp_path}/remote/run"
    yield RemoteFolder(url)
    fsspec.filesystem("memory").store.clear()


def test_a_store_that_refuses_to_delete_does_not_end_a_run(
    tmp_path: Path, remote: RemoteFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rights to write without rights to delete are usual in object stores."""

    def refused(name: str) -> None:
        raise CheckpointError(f"{remote.url}/{name}: cannot be removed: permission denied")

    monkeypatch.setattr(remote, "remove", refused)
    said = io.StringIO()
    for step in (2, 4, 6):
        save(tmp_path / "here", remote, step, keep=1, console=said)
    assert [step for step, _ in remote.complete()] == [2, 4, 6]
    assert "step-000002: cannot be removed: permission denied; the run continues" in said.getvalue()


def test_saved_there_and_opened_on_another_machine(tmp_path: Path, remote: RemoteFolder) -> None:
    for step in (2, 4, 6, 8):
        save(tmp_path / "here", remote, step, keep=2, keep_every=2 if step == 2 else 0)
    assert [step for step, _ in remote.complete()] == [6, 8]
    assert [p.name for p in (tmp_path / "here").iterdir()] == ["step-000008"]  # the newest alone stays here
    assert save_load.download_newest(remote, tmp_path / "there", None) == []
    assert loaded(tmp_path / "there") == 8
    assert [remote.verify(name) for _, name in remote.complete()] == [[], []]
    assert remote.doomed(1, 3) == []  # step 6 is kept as a third
    assert remote.doomed(1) == ["step-000006"]
    remote.remove("step-000006")
    assert [name for _, name in remote.steps()] == ["step-000008"]


def test_half_an_upload_is_never_taken_for_whole(
    tmp_path: Path, remote: RemoteFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every file of the upload the store stops answering."""
    save(tmp_path / "here", remote, 2)
    upload, pipe = RemoteFolder.upload, RemoteFolder.upload_marker
    for failing in range(6):
        count = [0]

        def broken(self: RemoteFolder, *args: Any, count: list[int] = count, at: int = failing) -> None:
            count[0] += 1
            if count[0] > at:
                raise CheckpointError("the store does not answer")
            (pipe if args[0].is_dir() else upload)(self, *args)

        monkeypatch.setattr(RemoteFolder, "upload", broken)
        monkeypatch.setattr(RemoteFolder, "upload_marker", broken)
        if failing < 5:  # tensors, three small files, the marker
            with pytest.raises(CheckpointError, match="the store does not answer"):
                save(tmp_path / "here", remote, 4)
        else:
            save(tmp_path / "here", remote, 4)
        monkeypatch.undo()
        assert [step for step, _ in remote.complete()] == ([2] if failing < 5 else [2, 4])
        assert fetch_newest(remote.url, tmp_path / f"there{failing}") is not None
        assert loaded(tmp_path / f"there{failing}") == (2 if failing < 5 else 4)
        assert loaded(tmp_path / "here") == 4  # complete in the run directory


def test_a_damaged_one_is_set_aside(tmp_path: Path, remote: RemoteFolder) -> None:
    for step in (2, 4):
        save(tmp_path / "here", remote, step)
    fs, path = fsspec.core.url_to_fs(f"{remote.url}/step-000004/__0_0.distcp")
    data = bytearray(fs.cat_file(path))
    data[-30] ^= 1
    fs.pipe_file(path, bytes(data))
    assert "its checksum is not the one" in remote.verify("step-000004")[0]
    said = save_load.download_newest(remote, tmp_path / "there", None)
    assert len(said) == 1
    assert "step-000004/__0_0.distcp is damaged" in said[0]
    assert loaded(tmp_path / "there") == 2
    assert remote.state("step-000004") == "damaged"
    save(tmp_path / "here", remote, 6)
    assert remote.state("step-000004") == "damaged"  # kept for a person to look at
    fs.pipe_file(f"{remote._root}/step-000006/complete.json", b"[" * 100)
    assert "step-000006 is damaged" in save_load.download_newest(remote, tmp_path / "marker", None)[0]
    assert loaded(tmp_path / "marker") == 2
    for _, name in remote.complete():
        fs.pipe_file(
            f"{remote._root}/{name}/complete.json", b'{"version": 2, "files": {"../x": {"bytes": 1, "sha256": "0"}}}'
        )
    with pytest.raises(CheckpointError, match="no checkpoint verifies.*refused"):
        save_load.download_newest(remote, tmp_path / "nowhere", None)


def test_urls() -> None:
    for url, message in (
        ("runs/mine", "expected a URL such as"),
        ("s3://", "names no folder"),
        ("nonsense://a/b", "fsspec cannot open nonsense://"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_url(url)
    with pytest.raises(ConfigError, match="memory:// is inside one process; 2 ranks"):
        check_url("memory://x", 2)
    check_url("memory://x")


def config_file(folder: Path, run: str, url: str = "") -> str:
    sections: dict[str, Any] = {"train": {"steps": 4, "timeout": 60}, "checkpoint": {"every": 2, "dir": url}}
    path = folder / f"{run}.json"
    path.write_text(json.dumps(make_config(folder / run, **sections).to_dict()))
    return str(path)


def digest(run: Path) -> str:
    return hashlib.sha256((run / "final" / "model.safetensors").read_bytes()).hexdigest()


def test_a_run_goes_on_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two ranks, killed; the machine is gone, and another one continues from the URL alone."""
    assert main(["train", config_file(tmp_path, "whole"), "--nproc", "2"]) == 0
    url = f"file://{tmp_path}/store/run"
    monkeypatch.setenv("FOURFOLD_FAULTS", "kill rank=1 step=4")
    assert main(["train", config_file(tmp_path, "first", url), "--nproc", "2", "--checkpoint.mode", "sync"]) == 1
    monkeypatch.delenv("FOURFOLD_FAULTS")
    shutil.rmtree(tmp_path / "first")
    second = str(tmp_path / "second")
    capfd.readouterr()
    assert main(["train", "--resume", url, "--train.run-dir", second]) == 0
    assert "from the newest checkpoint at" in " ".join(capfd.readouterr().out.split())
    assert digest(tmp_path / "second") == digest(tmp_path / "whole")
    assert main(["train", config_file(tmp_path, "third", url), "--nproc", "2"]) == 2  # another run's checkpoints
    assert f"resume it with --resume {url}" in capfd.readouterr().err

    monkeypatch.chdir(tmp_path)
    assert main(["export", url, str(tmp_path / "out")]) == 0  # runs/run is made
    assert (tmp_path / "out" / "config.json").exists()
    shutil.rmtree(tmp_path / "runs" / "run" / "checkpoints")
    assert main(["sample", str(tmp_path / "runs" / "run"), "--tokens", "2"]) == 0
    with pytest.raises(ConfigError, match="holds another run"):
        local_run(f"file://{tmp_path}/store", second)
    capfd.readouterr()
    assert main(["checkpoint", "list", url, "--json"]) == 0
    assert [c["state"] for c in json.loads(capfd.readouterr().out)["checkpoints"]] == ["complete", "complete"]
    assert main(["checkpoint", "verify", second]) == 0
    capfd.readouterr()
    assert main(["checkpoint", "prune", second, "--keep", "1", "--json"]) == 0
    assert list(json.loads(capfd.readouterr().out)["deleted"]) == [f"{url}/step-000002"]
    assert main(["checkpoint", "prune", url]) == 2


@pytest.mark.skipif(
    "FOURFOLD_SLOW_TESTS" not in os.environ, reason="a server and three interpreters: FOURFOLD_SLOW_TESTS=1"
)
@pytest.mark.timeout(400)
def test_an_s3_server(tmp_path: Path) -> None:
    """A real client and a real server of the protocol: two ranks save, another machine resumes and verifies."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = os.environ | {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    env |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "FSSPEC_S3_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    env |= {"OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], env=env, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        make = "import s3fs; s3fs.S3FileSystem().mkdir('bucket')"
        subprocess.run([sys.executable, "-c", make], env=env, check=True, timeout=90)

        def command(*args: str) -> str:
            done = subprocess.run(
                [sys.executable, "-m", "fourfold", *args], env=env, capture_output=True, text=True, timeout=180
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        url = "s3://bucket/runs/mine"
        command("train", config_file(tmp_path, "first", url), "--nproc", "2")
        command("train", "--resume", url, "--train.run-dir", str(tmp_path / "second"), "--train.steps", "6")
        listed = json.loads(command("checkpoint", "list", url, "--json"))["checkpoints"]
        assert [(c["step"], c["state"]) for c in listed] == [(4, "complete"), (6, "complete")]
        assert json.loads(command("checkpoint", "verify", url, "--json"))["good"]
    finally:
        server.kill()
        server.wait()
