"""`fourfold why`: causes injected into runs on emulated accelerators (computing is sleeping), each named first."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fourfold
from fourfold.checkpoint.save_load import Checkpointer
from fourfold.cli import main
from fourfold.cluster import Cluster, Level
from fourfold.collectives import Pending
from fourfold.config import Config
from fourfold.data.samples import Samples
from fourfold.plan import Plan
from fourfold.record import RECORD
from fourfold.runtime.stage import Stage
from fourfold.testing.emulate import emulated_products
from fourfold.testing.ranks import run_ranks
from fourfold.train.rundir import RunDir
from fourfold.train.worker import fit
from fourfold.view.why import Explanation, _Case, explain_run
from tests.helpers import compile_without_code, make_config

RATE = 80e6
"""FLOP/s of an emulated accelerator: a forward of a stage takes about 5 ms a sequence."""
MODEL = {"family": "gpt", "layers": 4, "hidden": 32, "heads": 4, "seq_len": 16}


def cluster(launch: float = 0.0) -> Cluster:
    """What the emulated accelerators are, for the planner: FLOPs and a fixed time per matmul, nothing else."""
    local = Cluster.local(4)
    matrix = dict.fromkeys(local.device.matrix, RATE)
    device = replace(local.device, matrix=matrix, efficiency=1.0, attention=1.0, memory_rate=1e12, operator=launch)
    return replace(local, name="emulated", device=device, level=(Level(name="loopback", bandwidth=1e9),))


def _slow_link(seconds: float) -> None:
    def wait(self: Pending) -> None:
        if (work := self._work) is not None and self._ticket.kind == "all_reduce":

            class Slow:
                def wait(self) -> None:
                    work.wait()
                    time.sleep(seconds)

            self._work = Slow()
        real(self)

    real, Pending.wait = Pending.wait, wait  # type: ignore[method-assign]


def _slow_unit(name: str, seconds: float) -> None:
    def init(self: Stage, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        if name in self.index:
            run = self._runs[self.index[name]]
            self._runs[self.index[name]] = lambda *args: (time.sleep(seconds), run(*args))[1]

    real, Stage.__init__ = Stage.__init__, init  # type: ignore[method-assign]


def _before(owner: Any, name: str, seconds: float) -> None:
    real: Callable[..., Any] = getattr(owner, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return real(*args, **kwargs)

    setattr(owner, name, slow)


def _train(rank: int, ranks: int, config: Config, plan: dict[str, Any], cause: str) -> None:
    import sys

    rate = RATE / 3 if (cause, rank) == ("straggler", 3) else RATE
    if cause == "communication":
        _slow_link(0.25)
    if cause == "slow-unit":
        _slow_unit("blocks.1.mlp", 0.03)
    if cause == "data":
        _before(Samples, "batch", 0.12)
    if cause == "save":
        _before(Checkpointer, "save", 2.0)
    with open("/dev/null", "w") as nowhere, emulated_products(rate, launch=0.004 if cause == "micro-batch" else 0.0):
        sys.stdout = nowhere
        fit(config, Plan.from_dict(plan))


def explained(tmp_path: Path, cause: str) -> Explanation:
    config = make_config(
        tmp_path / "run",
        MODEL,
        train={"steps": 4, "global_batch": 16},
        log={"trace": 1},
        checkpoint={"every": 2 if cause == "save" else 1000, "mode": "sync"},
    )
    plan = {"mesh": {"pipe": 2, "data": 2}, "batch": {"micro_batches": 8 if cause == "micro-batch" else 4}}
    run_ranks(_train, 4, config, plan, cause)
    return explain_run(RunDir.find(str(tmp_path / "run")), cluster(0.004 if cause == "micro-batch" else 0.0))


@pytest.mark.parametrize(
    ("cause", "details"),
    [
        ("straggler", {"rank": 3}),
        ("communication", {"collective": "all_reduce", "axes": "data"}),
        ("slow-unit", {"unit": "blocks.1.mlp"}),
        ("data", {}),
        ("save", {}),
        ("micro-batch", {"micro_batches": 8}),
    ],
)
def test_an_injected_cause_is_named_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cause: str, details: dict[str, Any]
) -> None:
    found = explained(tmp_path, cause)
    said = "\n".join(found.lines())
    assert found.verdict == cause, said
    assert details.items() <= found.findings[0].details.items(), said
    assert min(found.accounted) > 0.95, said
    assert len(found.lines()) < 16, said
    assert main(["why", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] == pytest.approx(found.seconds)
    assert fourfold.explain_run(tmp_path / "run", changes=False).steps == found.steps


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(tmp_path)]) == 2
    RunDir.create(tmp_path / "run", make_config(tmp_path / "run"), Plan()).unlock()
    assert main(["why", str(tmp_path / "run")]) == 2
    assert "--log.trace 10" in capsys.readouterr().err


def test_a_faster_kernel_of_attention_is_offered(tmp_path: Path) -> None:
    """A run on a GPU whose deterministic attention is slower than another kernel: what the other would save."""
    config = make_config(tmp_path / "run", train={"steps": 4}, log={"trace": 2})
    run_ranks(_train, 1, config, {"precision": {"compute": "bf16"}}, "none")
    run = RunDir(tmp_path / "run")
    env = json.loads(run.env_file.read_text())
    for kernel, offered in (("flash", True), ("cudnn", False)):
        env["attention"] = {"kernel": kernel, "seconds": {"flash": 2.0, "cudnn": 1.0}}
        run.env_file.write_text(json.dumps(env))
        change = _Case(run, Cluster.preset("h200"))._faster_attention()
        assert change.startswith("train.deterministic = false: attention by cudnn, in 0.50 of the time") == offered
        assert explain_run(run, Cluster.preset("h200")).accounted[0] > 0.5


# ---- a unit that torch.compile fails on ----


@torch.library.custom_op("fourfold_tests::plus", mutates_args=())
def plus(x: Tensor, y: float, seconds: float) -> Tensor:
    """An operator whose author has not said what shape it returns: torch.compile fails on a layer that calls it."""
    time.sleep(seconds)
    return x + y


plus.register_autograd(lambda ctx, grad: (grad, None, None))


class ManyOperators(nn.Module):
    """400 tiny operators: most of their time is the host's, and one kernel if they are compiled.

    `seconds`: further time of a forward that does not compile, so that a busy machine costs less than it; then 40 operators do.
    """

    def __init__(self, opaque: bool, seconds: float) -> None:
        super().__init__()
        self.mix, self.opaque, self.seconds = nn.Linear(16, 16), opaque, seconds

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        for i in range(20 if self.seconds else 200):
            x = x * 0.99 + 1e-4 * i
        return plus(x, 1.0, self.seconds) if self.opaque else x + 1.0


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return {"inputs": torch.full((4, 16), index / 64), "targets": torch.zeros(4, 16)}


def _fit_layers(
    rank: int, ranks: int, folder: Path, opaque: tuple[int, ...], failing: tuple[int, ...], seconds: float
) -> None:
    """`opaque`: the layers that torch.compile fails on, on the ranks `failing`."""
    layers = lambda: [ManyOperators(i in opaque and rank in failing, seconds) for i in range(4)]  # noqa: E731
    plan = {"mesh": {"data": ranks}, "batch": {"micro_batches": 8}, "precision": {"compile": True}}
    config = {"train": {"steps": 6, "global_batch": 16 * ranks, "run_dir": str(folder)}, "log": {"trace": 1}}
    loss = lambda output, batch: (output - batch["targets"]).square().sum()  # noqa: E731
    fourfold.fit(
        Config.from_dict(config), Plan.from_dict(plan), model=layers, data=Numbers(), loss=loss, console=io.StringIO()
    )


QUIET = pytest.mark.skipif(
    not os.environ.get("FOURFOLD_SLOW_TESTS"),
    reason="real computing: on a busy machine another cause may be first",
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "opaque", "failing", "named", "seconds"),
    [
        (1, (), (), [], 0.04),
        (1, (2,), (0,), ["2"], 0.04),
        (2, (2,), (1,), ["2"], 0.04),
        (2, (1, 3), (0, 1), ["1", "3"], 0.04),
        pytest.param(1, (2,), (0,), ["2"], 0.0, marks=QUIET),
        pytest.param(2, (2,), (1,), ["2"], 0.0, marks=QUIET),
        pytest.param(2, (1, 3), (0, 1), ["1", "3"], 0.0, marks=QUIET),
    ],
)
def test_units_that_fell_out_of_the_compiler_are_named_first(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    opaque: tuple[int, ...],
    failing: tuple[int, ...],
    named: list[str],
    seconds: float,
) -> None:
    if seconds:  # what is slow is the forward that does not compile: no C++ is needed for the others
        compile_without_code(monkeypatch, fullgraph=False)
    monkeypatch.setattr(RECORD, "uncompiled", {"blocks.0": "an earlier run of this process"})
    # a busy machine takes minutes to compile, while other ranks wait in a collective
    run_ranks(_fit_layers, ranks, tmp_path / "run", opaque, failing, seconds, timeout=280, group_timeout=280)
    found = explain_run(tmp_path / "run")
    said = "\n".join(found.lines())
    print(said)
    assert capfd.readouterr().err.count("runs uncompiled: torch.compile failed") == len(named) * len(failing)
    if not named:
        assert "uncompiled" not in {f.label for f in found.findings}, said
        assert "ompiled" not in said
        return
    first = found.findings[0]
    assert found.verdict == "uncompiled", said
    assert first.details["units"] == named, said
    assert first.details["unit"] in named
    assert first.details["ranks"] == list(failing)
    assert "no fake impl registered" in first.details["why"]
    assert f"unit {first.details['unit']} " in said
    assert "no fake impl registered" in said
    slow = [f.details["unit"] for f in found.findings if f.label == "slow-unit"]  # on a busy machine, others may be
    assert not {*slow} & {*named}, said
    assert min(found.accounted) > 0.95, said
