"""Lines that share a link, and what the grid's collectives add to a chain: by hand."""

from __future__ import annotations

import pytest

from fourfold.cluster import Cluster, Device, Level
from fourfold.config import ModelConfig
from fourfold.model.operators import ModelSpec
from fourfold.plan import Precision, Tensor
from fourfold.planner.beside import grid_times
from fourfold.planner.layout import Setting
from fourfold.planner.link import Link


def test_lines_of_one_link_share_it_and_others_do_not() -> None:
    for links, ends in (((0, 0), 3.0), ((0, 1), 2.0)):
        link = Link(links, (0.0, 0.0))
        link.start(0, 1.0)
        number = link.start(1, 2.0)
        assert link.wait(1, number) == pytest.approx(ends)


def test_a_line_runs_one_after_another() -> None:
    link = Link((0,), (0.0,))
    first, second = link.start(0, 1.0), link.start(0, 2.0)
    link.run(0.5)
    assert link.wait(0, first) == pytest.approx(0.5)
    link.run(5.0)
    assert link.wait(0, second) == 0.0


def test_who_comes_late_lets_pass_what_is_on_the_way() -> None:
    link = Link((0, 0), (2.0, 2.0))
    long, short = link.start(0, 10.0), link.start(1, 1.0)
    assert link.wait(1, short) == pytest.approx(2.0 + 2.0)  # two seconds of the other, then half of the link
    assert link.wait(0, long) == pytest.approx(7.0)
    link = Link((0, 0), (2.0, 2.0))
    link.start(0, 0.5)
    assert link.wait(1, link.start(1, 1.0)) == pytest.approx(1.5)  # no more than there is


def setting() -> Setting:
    device = Device(
        kind="cpu", matrix={"bf16": 1e9, "fp32": 1e9, "fp64": 1e9}, efficiency=1.0, operator=0.0, memory_rate=1e15
    )
    cluster = Cluster(nodes=4, devices=1, device=device, level=(Level(bandwidth=1e7, latency=0.0),), overlap=1.0)
    model = ModelConfig(family="gpt", layers=4, hidden=128, heads=4, seq_len=32, vocab=128, tie=False)
    return Setting(ModelSpec.from_config(model), cluster, 16, Precision())


def test_weights_are_gathered_one_product_ahead() -> None:
    """Rows alone, forward: `out`, which is short, hides little of the gather of `up`, which hides most of that of `down`."""
    mlp, attn = (grid_times(setting(), 128, 4, 1, Tensor(flow="os"), 1)[kind] for kind in ("mlp", "attn"))
    weight = 3 / 4 * 4 * 128 * 512 / 1e7  # up, and down: 19.7 ms
    out, up = (2 * 128 * 128 * n / 1e9 for n in (128, 512))  # seconds of the products
    assert mlp.forward[0].shown == pytest.approx(weight - out + weight - up, rel=1e-3)
    assert mlp.forward[1].every == 0.0
    assert attn.forward[0].shown == pytest.approx(0.0, abs=1e-6)  # all of it behind `down` and `qkv`


def test_without_overlap_everything_is_waited_for() -> None:
    for kind, found in grid_times(setting(), 128, 2, 2, Tensor(overlap=False), 1).items():
        for line in (*found.forward, *found.backward):
            assert line.shown == pytest.approx(line.every), kind


def test_a_backward_in_two_parts_hides_less() -> None:
    one, two = (grid_times(setting(), 128, 1, 4, Tensor(), 1, apart)["mlp"] for apart in (False, True))
    assert two.backward[1].shown > one.backward[1].shown
    assert two.backward[1].every == pytest.approx(one.backward[1].every)
