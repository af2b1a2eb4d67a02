"""Calibration on a shaped network finds its links; the benchmarks on shaped networks run, in small, and mean what they say."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from benchmarks import network_plans, sharding
from fourfold.cluster import Cluster, Level
from fourfold.launch.place import Place
from fourfold.planner.evaluate import predict
from fourfold.testing.emulate import emulated_products
from fourfold.testing.network import Network, missing, parse_rate
from fourfold.train.calibrate import CPU, _Calibration

why = missing()
shaped = pytest.mark.skipif(why is not None, reason=why or "")
RATE = "80mbit"


def declared(ranks: int) -> Cluster:
    """Emulated devices on links of RATE, as a file would say it."""
    cluster = Cluster.local(ranks)
    level = Level(name="network", bandwidth=parse_rate(RATE), latency=1e-3)
    rates = dict.fromkeys(cluster.device.matrix, network_plans.FLOPS)
    device = replace(cluster.device, matrix=rates, efficiency=1.0, memory="1GiB", reserve="0MiB", margin=0.0)
    return replace(cluster, name="declared", nodes=ranks, devices=1, level=(level,), device=device, overlap=1.0)


# ---- calibration ----


def _level(rank: int, ranks: int) -> Level:
    calibration = _Calibration(Place(rank, ranks, 0, 1), torch.device("cpu"))
    calibration.sizes = replace(CPU, buffers=(1 << 12, 1 << 16, 1 << 18), tries=3)
    return calibration._levels(1e12)[0]


def _off(level: Level) -> dict[str, float]:
    """What was measured over what the links are shaped to, where that is far from 1."""
    cluster, size, rate = replace(declared(4), level=(level,)), 1 << 20, parse_rate(RATE)
    found = {"message": cluster.message(size, 1) * rate / size}
    for kind, members, received in (("all_gather", 4, 0.75), ("reduce_scatter", 2, 0.5), ("all_reduce", 4, 1.5)):
        found[kind] = cluster.collective(kind, size, members) * rate / (received * size)  # type: ignore[arg-type]
    far = {name: ratio for name, ratio in found.items() if abs(ratio - 1) > 0.25}
    if abs(level.bandwidth / rate - 1) >= 0.1:
        far["bandwidth"] = level.bandwidth / rate
    if level.latency >= 5e-3:  # not shaped: what processes and sockets take
        far["latency"] = level.latency
    # small ones do not take bytes over rate: that is what sizes are measured for
    if (small := cluster.collective("all_gather", 1 << 14, 4) * rate / (0.75 * (1 << 14))) <= 1.3:
        far["a small all_gather"] = small
    return far


@shaped
def test_calibration_finds_the_links() -> None:
    for _ in range(6):  # others use the machine too
        with Network(4, RATE) as net:
            far = _off(net.run_ranks(_level)[0])
        if not far:
            break
        time.sleep(1)
    assert not far


# ---- emulated products ----


def test_products_take_their_time_and_nothing_else() -> None:
    a, b = torch.ones(64, 64), torch.ones(64, 64, requires_grad=True)
    with emulated_products(2 * 64**3 / 0.02):
        start = time.monotonic()
        y = a @ b
        assert time.monotonic() - start >= 0.02
        assert not y.any()
        y.sum().backward()
        assert b.grad is not None
        assert b.grad.shape == b.shape
    assert (a @ b)[0, 0] == 64


# ---- benchmarks ----


def test_all_contestants_have_the_same_gradients() -> None:
    found = dict(sharding.check(models=[sharding.Model("mixed widths", (16, 32, 16))]))
    assert len(found) == 7
    assert max(found.values()) < 1e-5


@shaped
def test_contestants_run_within_their_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    task = sharding.Task(sharding.Model("tiny", (64, 64)), 2, 2)
    rows = sharding.race(task, sharding.Lab(2, rate=RATE), declared(2), 1)
    assert {row.peer for row in rows} >= {"FSDP2 ZeRO-3", "DDP", "best single mode"}
    plan = sharding.our_plan(task, declared(2), 1.01 * sharding.needs(task, "zero3"))
    assert plan is not None
    assert sharding.needs(task, plan) <= 1.01 * sharding.needs(task, "zero3")
    assert "ample" in capsys.readouterr().out


@shaped
def test_predicted_plans_run() -> None:
    cluster = declared(4)
    for _, model, plan in network_plans.plans():
        config = network_plans.config_of(model)
        plan.check(config, 4)
        assert predict(plan, network_plans.problem_of(config, plan, cluster)).seconds > 0
    _, model, plan = network_plans.plans()[0]
    config = network_plans.config_of(model)
    with Network(4, RATE) as net:
        found = net.run_ranks(network_plans.measured, [(config, plan)], 1)[0][0]
    seconds = predict(plan, network_plans.problem_of(config, plan, cluster)).seconds
    assert found.seconds > 0.7 * seconds  # never faster than its products and bytes
    assert len(network_plans.every_plan(cluster)) > 60
