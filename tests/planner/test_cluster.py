"""Clusters: presets, files, what-ifs, collectives by level; nonsense is refused with what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fourfold.cluster import Cluster, Level, preset_names
from fourfold.errors import ClusterError


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_whole_and_survive_files(name: str, tmp_path: Path) -> None:
    cluster = Cluster.preset(name, nodes=2)
    assert cluster.source
    assert 0 < cluster.usable < cluster.memory
    for kind in ("toml", "json"):
        cluster.save(tmp_path / f"c.{kind}")
        assert Cluster.load(tmp_path / f"c.{kind}") == cluster


def test_a_file_may_start_from_a_preset(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('preset = "h100-sxm"\nnodes = 4\n[device]\nmemory = "94GB"\n')
    cluster = Cluster.find(str(tmp_path / "mine.toml"))
    assert (cluster.nodes, cluster.device.memory, cluster.name) == (4, "94GB", "mine")
    assert cluster.device.matrix == Cluster.preset("h100-sxm").device.matrix


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes = 0", "nodes = 0 must be"),
        ('preset = "h100"', "there is no cluster 'h100'; known: v100-16g, a100-40g"),
        ("[device]\nmemroy = '1GB'", "unknown field 'device.memroy'; did you mean 'memory'?"),
        ("[device]\nmemory = '1GB'\nreserve = '2GB'", "leaves nothing for tensors"),
        ("[device]\nefficiency = 1.5", "device.efficiency = 1.5 is a share"),
        ("[device.matrix]\nbf16 = 1e12", "device.matrix has no rate for 'fp32'"),
        ("[[level]]\nbandwidth = -1.0", "bandwidth = -1 must be"),
        ("[[level]]\n[level.factor]\nall_gathr = 2.0", "did you mean 'all_gather'?"),
        ("nodes = 2\n[[level]]\nranks = 8", "the levels join 8 devices, but there are 2 nodes · 8 = 16"),
        ("", "no [[level]] of network"),
        ("overlap = 2.0\n[[level]]\nbandwidth = 1.0", "shares from 0 to 1"),
    ],
)
def test_nonsense_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ClusterError) as e:
        Cluster.load(tmp_path / "c.toml")
    assert message in str(e.value)


def test_collectives_know_where_their_ranks_lie() -> None:
    c = Cluster.preset("h100-sxm", nodes=16)
    inside, across = c.level[0].bandwidth, c.level[1].bandwidth
    size = 1e12  # so large that latency is nothing

    def rate(members: int, stride: int) -> float:
        return (members - 1) / members * size / c.collective("all_gather", size, members, stride)

    assert rate(8, 1) == pytest.approx(inside, rel=1e-3)  # one node
    assert rate(16, 8) == pytest.approx(across, rel=1e-3)  # one device of every node
    assert rate(32, 4) == pytest.approx(2 * across, rel=1e-3)  # two of every node: two links
    assert rate(128, 1) == pytest.approx(min(inside, 8 * across), rel=1e-3)
    assert c.collective("all_reduce", size, 8) == pytest.approx(2 * c.collective("all_gather", size, 8), rel=1e-3)
    assert c.message(1e9, 1) < c.message(1e9, 8)
    assert c.collective("all_gather", size, 1) == 0


def test_a_backend_that_is_worse_than_a_ring() -> None:
    level = Level(bandwidth=1e9, latency=0.0, factor={"reduce_scatter": 2.0})
    c = Cluster(devices=4, level=(level,))
    assert c.collective("reduce_scatter", 1e9, 4) == 2 * c.collective("all_gather", 1e9, 4)


def test_what_if() -> None:
    c = Cluster.preset("a100-80g", nodes=2)
    changed = c.what_if({"memory": "40GiB", "nodes": "16", "bandwidth": "x2", "flops": "x1.5"})
    assert (changed.memory, changed.nodes) == (40 << 30, 16)
    assert changed.level[1].bandwidth == 2 * c.level[1].bandwidth
    assert changed.device.matrix["bf16"] == 1.5 * c.device.matrix["bf16"]
    bad: list[tuple[dict[str, Any], str]] = [
        ({"memroy": "1GB"}, "did you mean 'memory'"),
        ({"nodes": "0"}, "whole number"),
        ({"bandwidth": "2"}, "bandwidth=x2"),
        ({"memory": "much"}, "is not a size"),
    ]
    for changes, message in bad:
        with pytest.raises(ClusterError, match=message):
            c.what_if(changes)


def test_products_take_their_shape_into_account() -> None:
    c = Cluster.preset("a100-80g")
    large = c.product(8192, 8192, 8192, "bf16", 2)
    assert 2 * 8192**3 / large < c.device.matrix["bf16"] * c.device.efficiency
    assert c.product(16, 8192, 8192, "bf16", 2) > 0.9 * 2 * 8192**2 / c.device.memory_rate  # bound by memory
    assert c.product(8192, 64, 8192, "bf16", 2) > large / 128
