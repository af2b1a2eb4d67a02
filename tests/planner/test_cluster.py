"""Clusters: presets, files, what-ifs, collectives by level; nonsense is refused with what is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli import main
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


def test_nodes_of_this_machine_are_ranks_in_files_too(tmp_path: Path) -> None:
    (tmp_path / "here.toml").write_text('preset = "local"\nnodes = 2\n')
    found, same = Cluster.find(str(tmp_path / "here.toml")), Cluster.preset("local", 2)
    assert replace(found, name="local") == same
    assert Cluster.find(str(tmp_path / "here.toml"), 4).usable == Cluster.preset("local", 4).usable


def test_messages_within_a_node_stay_there() -> None:
    cluster = Cluster.preset("h100-sxm", nodes=2)
    near = [cluster.messages(3e7, first, other, 1) for first, other in ((0, 1), (0, 4), (7, 0), (5, 0), (8, 15))]
    assert near == [cluster.message(3e7, 1)] * 5
    assert cluster.messages(3e7, 7, 8, 1) == cluster.message(3e7, 8) > 4 * near[0]
    assert cluster.messages(3e7, 4, 6, 4) == cluster.message(3e7, 8)  # two of the four leave


def test_faster_devices_have_the_same_share_of_their_peak() -> None:
    device = replace(Cluster.preset("h100-sxm").device, stated={"bf16": 1e15, "fp32": 1e14, "fp64": 1e13})
    faster = replace(Cluster.preset("h100-sxm"), device=device).what_if({"flops": "x2", "nodes": 2})
    assert (faster.device.peak("bf16"), faster.nodes) == (2e15, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes = 0", "nodes = 0 must be"),
        ('preset = "h100"', "unknown cluster 'h100'; did you mean h100-sxm or h100-pcie?"),
        ("[device]\nmemroy = '1GB'", "unknown field 'device.memroy'; did you mean 'memory'?"),
        ('preset = "rtx4090"', "unknown cluster 'rtx4090'; did you mean rtx-4090? Or give"),
        ("[device]\nmemory = '1GB'\nreserve = '2GB'", "leaves nothing for tensors"),
        (
            "[device]\nmemory = '24'",
            "leaves nothing for tensors; a number without a unit is bytes: write for example '24GB'",
        ),
        ("[host]\nlink = '50 GB/s'", "host.link must be a number; found a string '50 GB/s'; numbers have no unit"),
        ("[device]\nefficiency = 1.5", "device.efficiency = 1.5 must be a fraction"),
        ("[device.matrix]\nbf16 = 1e12", "device.matrix has no rate for 'fp32'"),
        ("[[level]]\nbandwidth = -1.0", "bandwidth = -1 must be"),
        ("[[level]]\n[level.factor]\nall_gathr = 2.0", "did you mean 'all_gather'?"),
        ("nodes = 2\n[[level]]\nranks = 8", "the levels connect 8 devices, but there are 2 nodes · 8 = 16"),
        ("", "no [[level]] of network"),
        ("overlap = 2.0\n[[level]]\nbandwidth = 1.0", "overlap = 2 must be a fraction"),
        ("nodes = -1", "c.toml: nodes = -1 must be a whole number of at least 1"),
        ("nods = 2", "c.toml: unknown field 'nods'; did you mean 'nodes'?"),
        ("zzz = 2", "unknown field 'zzz'; choose one of preset, name, nodes"),
        ("[[level]]\n[level.measured]\n'all_gather 4' = [[1, inf]]", "measured.'all_gather 4': ratio = inf must be"),
        ("[[level]]\n[level.measured]\n'all_gather 4' = [[9, 1], [1, 1]]", "must increase"),
        ("[[level]]\n[level.measured]\n'all_gather 4' = [1, 2]", "must be pairs [bytes, ratio]"),
        ("[[level]]\nbandwidth = 1e-300", "bandwidth = 1e-300 must be bytes/s, at least 10000"),
        ("[[level]]\nbandwidth = 1", "bandwidth = 1 must be bytes/s"),
        ("[[level]]\nlatency = 1e9", "latency = 1e+09 must be a number from 0 to 1 (seconds)"),
        ("[device]\noperator = inf", "device.operator = inf must be"),
        ("[device]\noperator = nan", "device.operator = nan must be"),
        ("[device]\noperator = 1e9", "device.operator = 1e+09 must be"),
        ("[device]\neager = 5.0", "device.eager = 5 must be a fraction"),
        ("[device]\nmargin = 1.5", "device.margin = 1.5 must be a fraction from 0 to below 1"),
        ("[device]\nalignment = 0", "device.alignment = 0 must be a whole number of elements"),
        ("[[level]]\ncongestion = -1", "congestion = -1 must be a number from 0 to 10"),
        ("[device]\nprocessors = -1", "device.processors = -1 must be a whole number"),
        (
            "[[level]]\nranks = 3\n[[level]]",
            "ranks = 3 does not divide 1 node · 8 = 8 devices; the nearest that does is 2",
        ),
        ("[[level]]\nranks = 8\n[[level]]\nranks = 4", "level[0] connects 8: levels must grow"),
        ("nodes = 3\n[[level]]\nranks = 4\n[[level]]\nranks = 6\n[[level]]", "ranks = 6 is not a multiple of the 4"),
        ("nodes = 1000000000\n[[level]]", "at most 1000000 are supported"),
    ],
)
def test_nonsense_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ClusterError) as e:
        Cluster.load(tmp_path / "c.toml")
    assert message in str(e.value)


def test_this_machine_has_at_least_one_rank_and_memory_for_each() -> None:
    for ranks in (0, -1, 2.5):
        with pytest.raises(ClusterError, match="must be a whole number of at least 1"):
            Cluster.local(ranks)  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match="100000 ranks are too many for this machine.*use [0-9]+ or fewer") as e:
        Cluster.local(100_000)
    assert Cluster.local(int(str(e.value).split()[-3])).usable > 0


def test_what_joins_a_node_follows_its_devices(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('preset = "h100-sxm"\nnodes = 3\ndevices = 4\n')
    for c in (Cluster.load(tmp_path / "c.toml"), Cluster.preset("h100-sxm", 3).what_if({"devices": "4"})):
        assert (c.ranks, c.level[0].ranks, c.level[1].ranks) == (12, 4, 0)


def _quiet(c: Cluster) -> Cluster:
    """Without congestion, and without what every collective takes."""
    return replace(c, level=tuple(replace(level, congestion=0.0, start=0.0) for level in c.level))


def test_large_groups_lose_bandwidth() -> None:
    c = Cluster.preset("h100-sxm", nodes=64)
    few, many, quiet = (x.collective("all_gather", 1e12, n, 8) for x, n in ((c, 2), (c, 64), (_quiet(c), 64)))
    assert many / quiet == pytest.approx(1 + 6 * c.level[1].congestion, rel=1e-2)
    assert few < many
    one = c.collective("all_gather", 1, 8)
    assert one == pytest.approx(7 * c.level[0].latency + c.level[0].start, rel=1e-2)


def test_widths_that_are_not_aligned_are_slow() -> None:
    a100, v100 = Cluster.preset("a100-80g"), Cluster.preset("v100-16g")

    def rate(c: Cluster, width: int) -> float:
        return width / c.product(8192, 8192, width, "bf16", 2)

    assert rate(a100, 7168) > 1.3 * rate(a100, 7176)  # a multiple of 8, not of 64
    assert rate(v100, 7168) == pytest.approx(rate(v100, 7176), rel=0.1)


def test_short_sequences_have_slow_attention() -> None:
    c = Cluster.preset("a100-80g")
    short, usual, long = (c.attention(1e12, "bf16", tokens) for tokens in (512, 3072, 32768))
    assert usual == c.attention(1e12, "bf16")
    assert 1.5 * usual < short
    assert long < usual < 1.2 * long


def test_collectives_know_where_their_ranks_lie() -> None:
    c = _quiet(Cluster.preset("h100-sxm", nodes=16))
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


def test_rings_pass_every_member_and_groups_that_fill_a_node_in_part_have_fewer_lines() -> None:
    c = _quiet(Cluster.preset("h100-sxm", nodes=16))
    near, far = c.level
    tiny = c.collective("all_gather", 1, 128)
    assert tiny == pytest.approx(112 * near.latency + 15 * far.latency, rel=1e-3)
    whole, part = (c.collective("all_gather", 1e12, n) * n / (n - 1) for n in (16, 12))
    assert whole == pytest.approx(1e12 / near.bandwidth, rel=1e-3)  # eight lines, faster than NVLink
    assert part == pytest.approx(1e12 / (4 * far.bandwidth), rel=1e-3)


def test_messages_between_nodes_are_slow_however_near_the_stages_are() -> None:
    c = Cluster.preset("l4-pcie", nodes=4)
    hops = [c.messages(3e7, 2 * stage, 2 * stage + 2, 2) for stage in range(7)]
    assert hops[0::2] == [c.message(3e7, 1)] * 4
    assert hops[1::2] == [c.message(3e7, 4)] * 3
    assert c.messages(3e7, 14, 0, 2) == c.message(3e7, 4)


def test_a_node_of_one_device_has_no_network_inside(tmp_path: Path) -> None:
    for nodes, levels in ((1, 1), (4, 1)):
        (tmp_path / "c.toml").write_text(f'preset = "h100-sxm"\ndevices = 1\nnodes = {nodes}\n')
        c = Cluster.load(tmp_path / "c.toml")
        assert (c.devices, len(c.level), c.ranks) == (1, levels, nodes)
    assert Cluster.preset("h100-sxm").what_if({"devices": "1"}).ranks == 1


def test_local_devices_of_a_file_share_the_machine(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('preset = "local"\ndevices = 4\n')
    c = Cluster.load(tmp_path / "c.toml")
    assert (c.devices, c.memory) == (4, Cluster.local(4).memory)


def test_mfu_is_a_share_of_what_the_vendor_states() -> None:
    d = Cluster.preset("h200").device
    measured = replace(d, matrix=d.matrix | {"bf16": 760e12}, stated=d.matrix)
    assert measured.peak("bf16") == d.peak("bf16") == 989e12


def test_a_file_says_which_rates_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.toml"
    path.write_text('source = "ours"\n[device]\nmemory = "80GB"\n[[level]]\nbandwidth = 1e11\n')
    source = Cluster.load(path).source
    assert source.startswith("ours; assumed, since the file leaves them out: device.matrix = bf16 3.12e+14")
    assert "device.memory =" not in source
    assert "host.link = 2.5e+10, level[0].latency = 5e-06" in source
    assert (
        main(["plan", "configs/llama-1b.toml", "--cluster", str(path), "--global-batch", "8", "--fix", "data=8"]) == 0
    )
    assert "assumed, since the file leaves them out: device.matrix" in capsys.readouterr().err
    saved = tmp_path / "saved.toml"
    Cluster.load(path).save(saved)
    assert Cluster.load(saved).source == source  # nothing is left out there
    path.write_text('preset = "h100-sxm"\n[device]\nmemory = "94GB"\n')
    assert "assumed, since" not in Cluster.load(path).source


def test_two_kinds_of_device_are_refused(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[[device]]\nname = "A100"\n[[device]]\nname = "H100"\n[[level]]\n')
    with pytest.raises(ClusterError, match=r"2 kinds of device; a cluster has one \[device\] table.*slowest device"):
        Cluster.load(tmp_path / "c.toml")
