"""`fourfold train` with optimizer state on the host: the bits of the device, under every executor; checkpoints both ways."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fourfold.config import Config
from fourfold.errors import PlanError, RankFailure
from fourfold.offload.activations import ActivationOffload, Parcel
from fourfold.offload.queues import DeviceQueues
from fourfold.plan import Plan
from fourfold.program import Stream
from fourfold.program.stages import lay_out_pipeline
from fourfold.testing.budget import Budget
from fourfold.testing.ranks import run_ranks
from fourfold.train import streamed
from fourfold.train.one_rank import OneRank
from fourfold.train.rundir import RunDir, read_metrics
from fourfold.train.streamed import StreamedUnits
from fourfold.train.worker import fit
from tests.helpers import MODELS, make_config, run_training, series
from tests.offload.threads import OPEN, thread_queues

LLAMA = MODELS["llama"] | {"layers": 3, "tie": True}
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {"batch": {"micro_batches": 2}}),
    "data": (2, {"mesh": {"data": 2}, "batch": {"micro_batches": 2}}),
    "wave": (2, {"mesh": {"pipe": 2}, "batch": {"micro_batches": 3}, "pipeline": {"schedule": "wave"}}),
    "sharded": (
        2,
        {
            "mesh": {"data": 2},
            "batch": {"micro_batches": 2},
            "unit": [
                {"match": "blocks.*.attn", "mode": "zero3", "reduce": "micro-batch"},
                {"match": "*", "mode": "zero2"},
            ],
        },
    ),
    "grid": (4, {"mesh": {"row": 2, "col": 2}, "unit": [{"match": "blocks.0.*", "mode": "keep"}]}),
    "message-driven": (
        3,
        {"mesh": {"pipe": 3}, "batch": {"micro_batches": 4}, "pipeline": {"executor": "message-driven"}},
    ),
}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "BUCKET", 4096)


def run(folder: Path, plan: dict[str, Any], ranks: int, *, resume: bool = False, **sections: Any) -> tuple[Any, ...]:
    config = make_config(folder, LLAMA, **{"train": {"steps": 4}} | sections)
    metrics = run_training(config, plan, ranks, resume=resume)
    final = (folder / "final" / "model.safetensors").read_bytes()
    return series(metrics, "loss"), series(metrics, "grad_norm"), final


MODES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "waits": ({}, {"optim": {"clip": 1.7}}),
    "rolls back": ({"rollback": "1GiB"}, {"optim": {"clip": 1.7}}),
    "early": ({}, {"optim": {"clip": 0.0, "lr": 1e-2}, "train": {"steps": 4, "guard": False}}),
}


@pytest.mark.parametrize(
    ("compute", "ways"), [("bf16", ("waits", "rolls back")), ("fp32", ("rolls back",)), ("bf16", ("early",))]
)
@pytest.mark.parametrize("name", PLANS)
def test_host_state_has_the_bits_of_the_device(tmp_path: Path, name: str, compute: str, ways: tuple[str, ...]) -> None:
    ranks, plan = PLANS[name]
    plan, (_, sections) = plan | {"precision": {"compute": compute}}, MODES[ways[0]]
    expected = run(tmp_path / "device", plan | {"memory": {"optimizer": "device"}}, ranks, **sections)
    for how in ways:
        memory = {"optimizer": "host", **MODES[how][0]}
        assert run(tmp_path / how, plan | {"memory": memory}, ranks, **sections) == expected
        outcomes = [m.get("rolled_back") for m in read_metrics(RunDir(tmp_path / how)) if "loss" in m]
        # the first step waits: memory is measured in it
        assert outcomes == ([None, True, False, False] if how == "rolls back" else [None] * 4)


def _train_late(rank: int, ranks: int, config: Config, plan: dict[str, Any], careless: bool) -> None:
    from fourfold.offload import activations, streamer

    made = []

    def queues(device: torch.device) -> DeviceQueues:
        made.append(thread_queues(rank + 10 * len(made), 2e-3))
        return made[-1]

    streamer.make_queues = activations.make_queues = queues  # type: ignore[attr-defined]
    streamed.LEAST, streamed.BUFFER = 256, 4096  # bytes: else all activations of so small a model stay
    fetched, fetch = [0], ActivationOffload._fetch

    def counted(self: ActivationOffload, parcel: Parcel) -> None:
        fetched[0] += parcel.value is None
        fetch(self, parcel)

    ActivationOffload._fetch = counted  # type: ignore[method-assign]
    if careless:  # what uses the weights does not wait for their update
        StreamedUnits.wait = lambda self, unit: None  # type: ignore[method-assign]
    with open(os.devnull, "w") as nowhere:
        sys.stdout = nowhere
        fit(config, Plan.from_dict(plan))
    assert len(made) == 2
    assert fetched[0] > 10
    for queue in list(OPEN):
        queue.close()


def train_late(folder: Path, name: str, how: str, *, careless: bool = False) -> tuple[list[float], ...]:
    """Train with queues that are threads with random delays, evaluated and saved after each step."""
    ranks, plan = PLANS[name]
    memory, sections = MODES[how]
    plan = plan | {"precision": {"compute": "bf16"}}
    plan |= {"memory": {"optimizer": "host", **memory, "activations": "host"}, "tensor": {"overlap": True}}
    found = []
    for late in (False, True):
        train = {"steps": 4, "eval_every": 1} | sections.get("train", {})
        fields: dict[str, Any] = sections | {"train": train, "checkpoint": {"every": 2}}
        config = make_config(folder / f"{late}", LLAMA, **fields)
        if late:
            run_ranks(_train_late, ranks, config, plan, careless)
        else:
            run_training(config, plan, ranks)
        metrics = list(read_metrics(RunDir(folder / f"{late}")))
        weights = load_file(folder / f"{late}" / "final" / "model.safetensors")
        keys = ("loss", "grad_norm", "eval_loss")
        found.append(([series(metrics, key) for key in keys], {n: t.tolist() for n, t in weights.items()}))
    return tuple(found)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "how"), [*((name, "rolls back") for name in PLANS), ("sharded", "early"), ("wave", "waits")]
)
def test_time_changes_nothing_in_a_run(tmp_path: Path, name: str, how: str) -> None:
    """A gather, a layer, a message of a tied weight, an evaluation and a save wait for the update of what they use."""
    at_once, late = train_late(tmp_path, name, how)
    assert at_once == late


def test_a_run_that_does_not_wait_is_detected(tmp_path: Path) -> None:
    at_once, late = train_late(tmp_path, "sharded", "early", careless=True)
    assert at_once != late


CONSUMED: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "data": (2, {"mesh": {"data": 2}}),
    "sharded": (2, {"mesh": {"data": 2}, "unit": [{"match": "*", "mode": "zero3"}]}),
    "pipe": (2, {"mesh": {"pipe": 2}, "batch": {"micro_batches": 1}, "pipeline": {"schedule": "wave"}}),
    "col": (2, {"mesh": {"col": 2}}),
}


@pytest.mark.parametrize("name", CONSUMED)
def test_consumed_gradients_have_the_bits_of_kept_ones(tmp_path: Path, name: str) -> None:
    """Gradient norms included: their squares are summed before they are freed, in the same order."""
    ranks, plan = CONSUMED[name]
    sections = {"optim": {"clip": 0.0}, "train": {"steps": 4, "guard": False}}
    found = []
    for memory in ({"optimizer": "device"}, {"optimizer": "host", "gradients": "consume"}):
        sized = {"precision": {"compute": "bf16"}, "memory": memory}
        found.append(run(tmp_path / memory["optimizer"], plan | sized, ranks, **sections))
    assert found[0] == found[1]


def test_consumed_gradients_never_stand_whole(tmp_path: Path) -> None:
    """At most one waits for its update when the next is computed; and a step's counted peak falls by the others."""
    fields = {"family": "gpt", "layers": 6, "hidden": 64, "heads": 4, "seq_len": 16, "vocab": 64}
    sections = {"optim": {"clip": 0.0}, "train": {"global_batch": 1, "guard": False, "run_dir": str(tmp_path)}}
    config = Config.from_dict({"model": fields, **sections}).resolve()
    peaks = {}
    for gradients in ("keep", "consume"):
        one = OneRank(config, Plan.from_dict({"memory": {"optimizer": "host", "gradients": gradients}}), optimizer=True)
        assert isinstance(one.optimizer, StreamedUnits)
        standing, start = [], one.optimizer._start

        def counted(unit: Any, one: Any = one, standing: list[int] = standing, start: Any = start) -> None:
            start(unit)
            there = [u.shard_grad for u in one.units] + [t for b in one.optimizer.streamer.buckets for t in b.held]
            standing.append(len({t.data_ptr() for t in there if t is not None}))

        one.optimizer._start = counted  # type: ignore[method-assign]
        for _ in range(2):
            with Budget() as budget:
                one.step()
                one.update()
        peaks[gradients] = budget.peak.bytes
        assert max(standing) == (1 if gradients == "consume" else len(one.units))
    whole = sum(u.shard.nbytes for u in one.units)
    assert peaks["keep"] - peaks["consume"] > whole / 2  # activations and one gradient are at the peak


@pytest.mark.parametrize(
    ("memory", "sections", "message"),
    [
        ({"optimizer": "host"}, {"optim": {"clip": 1.0}}, r"optim.clip = 1.0 needs the norm.*use optim.clip = 0"),
        ({"optimizer": "host"}, {"train": {"guard": True}}, r"train.guard = true.*use train.guard = false"),
        ({"optimizer": "host"}, {"batch": 3}, r"summed over 3 micro-batches; use batch.micro_batches = 1"),
        ({"optimizer": "device"}, {}, r"memory.optimizer = 'device'; use optimizer = 'host'"),
        ({"optimizer": "auto"}, {}, r"memory.optimizer = 'auto' without device_state"),
    ],
)
def test_consuming_is_refused(tmp_path: Path, memory: dict[str, str], sections: Any, message: str) -> None:
    micro = sections.pop("batch", 1) if "batch" in (sections := dict(sections)) else 1
    made = {"optim": {"clip": 0.0}, "train": {"guard": False}}
    config = make_config(tmp_path / "run", LLAMA, **{k: made[k] | sections.get(k, {}) for k in made}).resolve()
    with pytest.raises(PlanError, match=message):
        Plan.from_dict({"batch": {"micro_batches": micro}, "memory": {"gradients": "consume", **memory}}).check(
            config, 1
        )


def test_rollback_is_for_state_on_the_host() -> None:
    with pytest.raises(PlanError, match=r"rollback = 4GiB.*memory.optimizer = 'device'"):
        Plan.from_dict({"memory": {"rollback": "4GiB"}})
    with pytest.raises(PlanError, match=r"memory.rollback = 'some'"):
        Plan.from_dict({"memory": {"rollback": "some"}})


def test_checkpoints_are_those_of_the_device(tmp_path: Path) -> None:
    """Saved with state on the host and opened with it on the device, and the other way: the bits of no stop at all."""
    plans: dict[str, dict[str, Any]] = {
        o: {"precision": {"compute": "bf16"}, "memory": {"optimizer": o, "staging": "1MiB"}}
        for o in ("device", "host", "auto")
    }
    plans["rolls back"] = {"precision": {"compute": "bf16"}, "memory": {"optimizer": "host", "rollback": "300KiB"}}
    clip = {"optim": {"clip": 1.7}}  # two steps clip; the third, after which it is saved, does not
    whole = run(tmp_path / "whole", plans["device"], 1, train={"steps": 6}, **clip)
    pairs = (("host", "device"), ("device", "host"), ("auto", "rolls back"), ("rolls back", "auto"))
    for first, then in pairs:
        folder = tmp_path / f"{first}-{then}"
        config = make_config(folder, LLAMA, train={"steps": 6}, checkpoint={"every": 3}, **clip)
        run_training(config, plans[first], 1)
        for late in RunDir(folder).checkpoints.glob("step-000006"):
            (late / "complete.json").unlink()
        found = run(folder, plans[then], 1, resume=True, train={"steps": 6}, checkpoint={"every": 3}, **clip)
        assert found == whole, (first, then)


def test_bf16_moments_train(tmp_path: Path) -> None:
    plan = {"precision": {"compute": "bf16"}, "memory": {"moments": "bf16"}}
    on_device = run(tmp_path / "a", plan, 1)
    on_host = run(tmp_path / "b", {**plan, "memory": {"moments": "bf16", "optimizer": "host"}}, 1)
    exact = run(tmp_path / "c", {"precision": {"compute": "bf16"}}, 1)
    assert on_device == on_host
    assert on_device[2] != exact[2]
    assert on_device[0] == pytest.approx(exact[0], rel=0.01)


def test_a_step_that_is_not_finite_is_skipped_whole(tmp_path: Path) -> None:
    """An infinite learning rate would make any update visible: the skipped steps change nothing."""
    found = []
    for optimizer in ("device", "host"):
        config = make_config(
            tmp_path / optimizer, LLAMA, optim={"lr": 1e30, "warmup": 0}, train={"steps": 3, "max_skipped": 9}
        )
        memory = {"optimizer": optimizer, "rollback": "1GiB" if optimizer == "host" else "0GiB"}
        metrics = run_training(config, {"precision": {"compute": "bf16"}, "memory": memory}, 1)
        assert series(metrics, "skipped")[-1] >= 1
        assert optimizer == "device" or any(series(metrics, "rolled_back"))
        found.append((tmp_path / optimizer / "final" / "model.safetensors").read_bytes())
    assert found[0] == found[1]


def test_without_the_guard_the_first_such_step_ends_the_run(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", LLAMA, optim={"lr": 1e30, "warmup": 0}, train={"steps": 3, "guard": False})
    with pytest.raises(RankFailure, match=r"train.guard = false the weights were updated with it"):
        run_training(config, {"memory": {"optimizer": "host"}}, 1)


def test_updates_are_instructions(tmp_path: Path) -> None:
    """Without clipping STREAM follows the unit's reduction; with it, all come at the end."""
    config = make_config(tmp_path / "run", LLAMA).resolve()
    plan = Plan.from_dict({"memory": {"optimizer": "host"}, "batch": {"micro_batches": 2}})
    for early in (True, False):
        program = lay_out_pipeline(config.model, plan, 12, early=early).programs.of(0)
        names = [type(i).__name__ for i in program.instructions]
        streams = [i for i, name in enumerate(names) if name == "Stream"]
        assert len(streams) == 2 + 2 * 3
        assert (streams[0] < len(names) - len(streams)) == early
    none = lay_out_pipeline(config.model, dataclasses.replace(plan, memory=Plan().memory), 12).programs.of(0)
    assert not any(isinstance(i, Stream) for i in none.instructions)


def test_as_much_state_stays_on_the_device_as_the_plan_says(tmp_path: Path) -> None:
    fields = {"family": "gpt", "layers": 2, "hidden": 64, "heads": 4, "seq_len": 32, "vocab": 128}
    config = Config.from_dict({"model": fields, "train": {"global_batch": 2, "run_dir": str(tmp_path)}}).resolve()
    plan = Plan.from_dict({"memory": {"optimizer": "auto", "device_state": "400KiB"}})
    one = OneRank(config, plan, optimizer=True)
    one.step()
    one.update()
    assert isinstance(one.optimizer, StreamedUnits)
    regions = one.optimizer.streamer.regions
    stays = sum(r.bytes for r in regions if r.home == "device")
    assert 200 << 10 < stays <= 400 << 10
    assert sum(r.bytes for r in regions) == 8 * sum(u.shard.numel() for u in one.units)
