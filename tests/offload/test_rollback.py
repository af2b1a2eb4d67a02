"""Updates that start before the gradient norm is known, and are undone where it was not fine: the bits of those that wait."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fourfold import StreamedAdamW
from fourfold.errors import ConfigError
from fourfold.offload import streamer
from fourfold.offload.buckets import Bucket
from fourfold.offload.streamer import LAST_STEPS, TOO_MANY, Streamer
from tests.offload.test_streamed_adamw import DEVICE, assert_same, batches, continue_both, groups_of, make_net, train
from tests.offload.threads import slow_queues

ALL = 1 << 30
CLIP = 4.0
"""Between the norms of a loss multiplied by 0.1 and by 100. (The loss falls: 10,000 is above it in all 25 steps.)"""

SCALES: dict[str, Callable[[int], float]] = {
    "none": lambda step: 0.1,
    "every": lambda step: 1e4,
    "alternating": lambda step: 100.0 if step % 2 else 0.1,
    "few": lambda step: 100.0 if step % 5 == 3 else 0.1,
    "nan": lambda step: math.nan if step % 5 == 3 else 0.1,
    "nan and clipped": lambda step: {2: 100.0, 3: math.nan}.get(step % 6, 0.1),
}


def outcomes(found: list[bool | None]) -> Callable[[int, StreamedAdamW], None]:
    return lambda step, optimizer: found.append(optimizer.rolled_back)


def expected(case: str, steps: int) -> list[bool | None]:
    """The documented rule: a step is tried if fewer than TOO_MANY of the last LAST_STEPS known steps were not fine.

    The first step learns the order in which gradients become complete: some parameters have none.
    """
    known: list[bool] = []
    late: bool | None = None
    out: list[bool | None] = []
    for step in range(1, steps + 1):
        unfine = SCALES[case](step) != 0.1
        tried = step > 1 and sum(known[-LAST_STEPS:]) < TOO_MANY
        out.append(unfine if tried else None)
        known += [late] if late is not None else []
        known += [unfine] if tried else []
        late = None if tried else unfine
    return out


@pytest.mark.parametrize("case", SCALES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=["bf16", "fp32", "fp64"])
def test_it_has_the_bits_of_adamw(dtype: torch.dtype, case: str) -> None:
    """Compared after every fifth step, and always after a step that was rolled back."""
    found: list[bool | None] = []
    guard = "nan" in case
    options: dict[str, Any] = {"early": True, "rollback": ALL, "guard": guard, "scale": SCALES[case]}
    _, optimizer = train(dtype, CLIP, steps=25, each=outcomes(found), **options)
    assert found == expected(case, 25)
    assert optimizer.streamer.rollback_bytes > 0
    train(dtype, CLIP, steps=8, check=1, **options)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_as_many_bytes_as_there_is_room_for(share: float) -> None:
    """With few spare places some buckets wait for the norm, and blocks that are in both kinds count their steps once."""
    found: list[bool | None] = []
    total = train(clip=CLIP, steps=1, rollback=ALL)[1].streamer.rollback_bytes
    options: dict[str, Any] = {"early": True, "scale": SCALES["few"], "bucket": 512, "each": outcomes(found)}
    _, optimizer = train(clip=CLIP, steps=12, check=1, rollback=int(share * total), **options)
    mine = optimizer.streamer
    assert mine.rollback_bytes <= share * total
    spared = sum(b.spare is not None for b in mine.buckets)
    assert (spared == 0, spared == len(mine.buckets)) == (share == 0, share == 1)
    assert (True in found) == (share > 0)
    kept = Streamer(mine.blocks, bucket=256, rollback=ALL, host_bytes=mine.host_bytes + 6000)
    assert 0 < kept.rollback_bytes <= 6000


@pytest.mark.parametrize(
    "options",
    [{"accumulate": 3}, {"placement": "auto", "device_bytes": 60000}, {"ring": 1}, {"ring": 100}, {"staging": 10**6}],
)
def test_every_way_of_running_it(options: dict[str, Any]) -> None:
    train(clip=CLIP, early=True, rollback=ALL, steps=12, check=4, scale=SCALES["few"], **options)


@pytest.mark.parametrize("case", ["few", "nan and clipped", "every"])
@pytest.mark.parametrize("seed", range(3))
def test_time_changes_nothing(case: str, seed: int) -> None:
    """Every queue has random delays."""
    options: dict[str, Any] = {"guard": True, "scale": SCALES[case], "queues": slow_queues(seed, DEVICE)}
    room = (ALL, 60000, ALL)[seed]
    train(torch.bfloat16, CLIP, early=True, rollback=room, steps=14, check=7, **options)


@pytest.mark.parametrize("queue", ["copy_in", "update", "copy_out", "compute"])
def test_a_queue_that_does_not_wait_is_detected(queue: str) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        for seed in range(5):
            options: dict[str, Any] = {
                "scale": SCALES["few"],
                "queues": slow_queues(seed, DEVICE, 3e-3, careless=queue),
            }
            train(clip=CLIP, early=True, rollback=ALL, steps=9, check=9, **options)


def _forget_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = streamer._copy_weights
    monkeypatch.setattr(streamer, "_copy_weights", lambda *a, back: None if back else copy(*a, back=back))


def _forget_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_foreach_sub_", lambda tensors, n: None)


def _forget_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new state is written over the old one."""
    place = Bucket.place
    monkeypatch.setattr(Bucket, "place", lambda self, spare: place(self, False))


def _accept_all(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Streamer._judge
    one = torch.ones((), device=DEVICE)
    monkeypatch.setattr(Streamer, "_judge", lambda self, factor, skip: judge(self, one, None))


def _reject_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The roles of the places change where they should not."""
    judge = Streamer._judge

    def wrong(self: Streamer, factor: Any, skip: Any) -> None:
        tried = list(self._tried)
        judge(self, factor, skip)
        for bucket in tried if self.rolled_back else ():
            bucket.in_spare = not bucket.in_spare

    monkeypatch.setattr(Streamer, "_judge", wrong)


@pytest.mark.parametrize("mutation", [_forget_weights, _forget_counts, _forget_state, _accept_all, _reject_all])
def test_a_wrong_undo_is_detected(monkeypatch: pytest.MonkeyPatch, mutation: Callable[..., None]) -> None:
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        train(clip=CLIP, early=True, rollback=ALL, steps=5, check=1, scale=SCALES["few"])


def test_the_factor_decides_not_the_norm() -> None:
    """At a norm just below the threshold the factor may be less than one, and just above it is."""
    norm = float(train(torch.float32, 1e9, steps=2, early=True)[1].norm)
    for clip in (norm - 1e-6, norm, norm + 1e-6, norm + 2e-6, norm * 1.001):
        found: list[bool | None] = []
        _, optimizer = train(torch.float32, clip, steps=2, early=True, rollback=ALL, each=outcomes(found))
        factor = (clip / (optimizer.norm + 1e-6)).clamp(max=1.0)
        assert found == [None, bool(factor != 1)]


def test_state_is_saved_from_wherever_it_is() -> None:
    """After one accepted step it is in the spare places; after loading it continues from there."""
    for steps in (2, 3):
        reference, optimizer = train(clip=CLIP, early=True, rollback=ALL, steps=steps, scale=SCALES["none"], check=100)
        saved = {i: {k: v.clone() for k, v in s.items()} for i, s in optimizer.state_dict()["state"].items()}
        net = reference.net
        for ids in batches(2, seed=5):
            with optimizer.last_backward():
                (0.1 * net(ids)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.load_state_dict({"state": saved, "param_groups": optimizer.state_dict()["param_groups"]})
        assert_same(reference, optimizer)
        continue_both(optimizer, net, reference)


# ---- consumed gradients ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("options", [{}, {"ring": 1}, {"accumulate": 2}, {"placement": "auto", "device_bytes": 60000}])
def test_consumed_gradients_have_the_bits_of_kept_ones(dtype: torch.dtype, options: dict[str, Any]) -> None:
    queues = slow_queues(0, DEVICE) if not options else None
    found = []
    for consume in (False, True):
        net = make_net(dtype)
        made = {"bucket": 2048, "queues": queues, **{k: v for k, v in options.items() if k != "accumulate"}}
        optimizer = StreamedAdamW(groups_of(list(net.parameters())), overlap=net, consume=consume, **made)
        for ids in batches(6):
            for _ in range(options.get("accumulate", 1) - 1):
                net(ids).backward()
            with optimizer.last_backward():
                net(ids).backward()
            assert all(p.grad is None for p in net.parameters()) == consume
            assert sum(bool(b.held) for b in optimizer.streamer.blocks[-1].buckets) <= len(optimizer.streamer.buckets)
            optimizer.step()
            optimizer.zero_grad()
        found.append([optimizer.master(p) for p in net.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_at_most_two_gradients_stand() -> None:
    """One that is computed, and one that waits for its update."""
    layers = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(12))).to(DEVICE)
    optimizer = StreamedAdamW(layers.parameters(), overlap=layers, consume=True)
    most = 0
    held = optimizer.streamer.buckets

    def count(_: Any) -> None:
        nonlocal most
        most = max(most, sum(bool(b.held) for b in held) + sum(p.grad is not None for p in layers.parameters()))

    for p in layers.parameters():
        p.register_post_accumulate_grad_hook(count)
    for _ in range(3):
        with optimizer.last_backward():
            layers(torch.randn(4, 32, device=DEVICE)).sum().backward()
        optimizer.step()
    assert most == 1  # the hook runs after the optimizer's


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": 1.0}, "clip = 1.0 needs"),
        ({"guard": True}, "guard = True needs"),
        ({"overlap": None}, "without overlap"),
    ],
)
def test_consuming_is_refused(options: dict[str, Any], message: str) -> None:
    net = make_net(torch.float32)
    with pytest.raises(ConfigError, match=message):
        StreamedAdamW(net.parameters(), consume=True, **{"overlap": net, **options})
