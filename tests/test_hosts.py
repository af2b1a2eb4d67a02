"""Two hosts (network namespaces): training over torchrun, a rank killed, elastic restart, the same weights."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.testing.network import Network, missing
from tests.helpers import make_config

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def config_file(path: Path) -> str:
    config = make_config(path.parent / path.stem, train={"steps": 6, "timeout": 30}, checkpoint={"every": 2})
    path.write_text(json.dumps(config.to_dict()))
    return str(path)


def digest(run: Path) -> str:
    return hashlib.sha256((run / "final" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.timeout(180)
def test_a_rank_killed_on_one_of_two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # sums of several threads have other bits
    assert main(["train", config_file(tmp_path / "whole.json"), "--nproc", "2"]) == 0
    config = config_file(tmp_path / "hosts.json")
    with Network(hosts=2, rate="1gbit") as net:
        agents = net.torchrun(
            ["-m", "fourfold", "train", config],
            flags=["--max-restarts=1"],
            env={"FOURFOLD_FAULTS": "kill rank=1 step=4"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said = [agent.communicate(timeout=150)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert digest(tmp_path / "hosts") == digest(tmp_path / "whole")
    lines = map(json.loads, (tmp_path / "hosts" / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 7))  # other lines tell of saves
