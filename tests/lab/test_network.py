"""Shaped networks: times that follow from bytes and rates, hosts that are removed whatever happens, reasons to skip.

That a job of torchrun runs across two hosts is shown by the example in docs/lab.md (test_docs.py).
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fourfold.errors import NetworkError, RankFailure
from fourfold.testing import network
from fourfold.testing.ledger import Ledger
from fourfold.testing.network import Measured, Network, measure, missing, parse_rate, traffic

MIB = 1 << 20
why = missing()
shaped = pytest.mark.skipif(why is not None, reason=why or "")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert not network._namespaces(f"{network._owner(os.getpid())}-")


def all_reduce(rank: int, ranks: int) -> tuple[float, list[Measured]]:
    """The bytes an all-reduce of 2 MiB must receive, and how it went, five times."""
    x = torch.ones(2 * MIB // 4)
    with Ledger() as ledger:
        dist.all_reduce(x)  # also connects
    return ledger.received, [measure(lambda: dist.all_reduce(x)) for _ in range(5)]


def slowness(hosts: int, rate: str, tries: int) -> float:
    """Measured time over bytes / rate: the median of five, of the first try within a tenth or the best of them all."""
    found = []
    for _ in range(tries):
        with Network(hosts, rate) as net:
            received, measured = net.run_ranks(all_reduce)[0]
        ratio = statistics.median(m.seconds for m in measured) / (received / parse_rate(rate))
        if abs(ratio - 1) < 0.1:
            return ratio
        found.append((abs(ratio - 1), ratio, statistics.median(m.busy for m in measured)))
        time.sleep(1)  # others use the machine too
    _, ratio, busy = min(found)
    if ratio > 1 and busy > 0.9:
        pytest.skip(f"the processors are {busy:.0%} busy: the time is theirs, {ratio:.2f} of the network's")
    return ratio


@shaped
@pytest.mark.parametrize(("hosts", "rate"), [(2, "100mbit"), (4, "50mbit")])
def test_an_all_reduce_takes_bytes_over_rate(hosts: int, rate: str) -> None:
    assert slowness(hosts, rate, tries=5) == pytest.approx(1, abs=0.1)


@shaped
def test_another_rate_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: give the links twice the rate, and it does."""
    honest = network._shape
    monkeypatch.setattr(network, "_shape", lambda device, rate, segment: honest(device, "200mbit", segment))
    assert slowness(2, "100mbit", tries=1) < 0.9


def small_message(rank: int, ranks: int) -> float:
    """The least time that 64 KiB take from host 0 to host 1 after a pause."""
    x, seconds = torch.ones((64 << 10) // 4), []
    for _ in range(8):
        time.sleep(0.01)
        seconds.append(measure(lambda: dist.recv(x, 0) if rank else dist.send(x, 1)).seconds)
    return min(seconds)


@shaped
def test_a_link_at_rest_is_not_faster_afterwards() -> None:
    with Network(hosts=2, rate="50mbit") as net:
        seconds = net.run_ranks(small_message)[0]
    assert seconds > 0.75 * (64 << 10) / parse_rate("50mbit")


def pairs(rank: int, ranks: int, senders: dict[int, int]) -> tuple[float, int, int]:
    """The time that messages of 1 MiB take, from the keys to the values, all at once; this host's bytes."""
    x, receivers = torch.ones(MIB // 4), {to: source for source, to in senders.items()}

    def work() -> None:
        if rank in senders:
            dist.send(x, senders[rank])
        if rank in receivers:
            dist.recv(x, receivers[rank])

    work()
    dist.barrier()
    before = traffic()
    seconds = min(measure(work).seconds for _ in range(3))
    after = traffic()
    return seconds, after.received - before.received, after.sent - before.sent


@shaped
def test_two_levels_are_fast_inside_and_shaped_between() -> None:
    with Network(hosts=2, rate="100mbit") as net:
        inside = net.run_ranks(pairs, {0: 1}, ranks_per_host=2)
        one = net.run_ranks(pairs, {0: 2}, ranks_per_host=2)
        both = net.run_ranks(pairs, {0: 2, 1: 3}, ranks_per_host=2)
        counted = [net.traffic(host) for host in range(2)]
    alone = MIB / parse_rate("100mbit")
    assert inside[0][0] < alone / 2  # by loopback: some 2 ms instead of 84
    assert one[0][0] > 0.9 * alone
    assert both[0][0] > 1.8 * alone  # two ranks of a host share its link
    assert inside[0][2] < MIB / 4  # barriers only
    assert 3 * MIB < one[2][1] < 1.1 * 3 * MIB
    assert 6 * MIB < both[0][2] < 1.1 * 6 * MIB
    assert counted[1].received > (4 + 8) * MIB > counted[0].received


@shaped
def test_racks_share_their_uplink() -> None:
    with Network(hosts=4, rate="200mbit", racks=2, uplink="100mbit") as net:
        within = net.run_ranks(pairs, {0: 1, 2: 3})
        across = net.run_ranks(pairs, {0: 2, 1: 3})
    assert within[0][0] > 0.9 * MIB / parse_rate("200mbit")
    assert across[0][0] > 0.9 * 2 * MIB / parse_rate("100mbit")
    assert across[0][0] > 2 * within[0][0]


def broken(rank: int, ranks: int) -> None:
    if rank == 1:
        raise ValueError("a stone in the road")
    dist.barrier()


@shaped
def test_a_rank_that_fails_is_named() -> None:
    with Network(hosts=2, rate="100mbit") as net:
        with pytest.raises(RankFailure, match="(?s)rank 1 failed first.*a stone in the road"):
            net.run_ranks(broken)
        with pytest.raises(NetworkError, match="there is no host 2: the network has hosts 0 to 1"):
            net.popen(2, ["true"])


@shaped
def test_an_exception_leaves_no_host_and_no_process() -> None:
    processes = []
    with pytest.raises(KeyError), Network(hosts=2, rate="100mbit") as net:
        processes = [net.popen(0, ["sh", "-c", "sleep 600 & wait"]), net.popen(1, ["sleep", "600"])]
        raise KeyError
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2
    with pytest.raises(NetworkError, match="the network is not up"):
        net.popen(0, ["true"])


@shaped
def test_a_killed_run_is_cleaned_up_by_the_next_and_a_living_one_is_not() -> None:
    child = os.fork()
    if child == 0:
        net = Network(hosts=1, rate="100mbit").__enter__()
        net.popen(0, ["sleep", "600"])
        os.kill(os.getpid(), signal.SIGKILL)
    name = network._owner(child)
    os.waitpid(child, 0)
    left = network._namespaces(f"{name}-")
    assert len(left) == 2  # the host and its switch
    assert subprocess.run(["ip", "netns", "pids", left[0]], capture_output=True).stdout
    with Network(hosts=1, rate="100mbit") as first:
        assert not network._namespaces(f"{name}-")
        with Network(hosts=1, rate="100mbit") as second:
            assert first.traffic(0) is not None
            assert first._host(0) != second._host(0)
        assert first.traffic(0) is not None


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert missing() == "shaped networks need root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for tool in ("ip", "tc"):
        monkeypatch.setattr(shutil, "which", lambda name, gone=tool: None if name == gone else which(name) or name)
        assert missing() == f"shaped networks need `{tool}` (iproute2), which is not installed"
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(network, "_configure", lambda name: network._run("false"))
    if why is None:
        assert missing() == "shaped networks do not work here: `false` failed: "
    monkeypatch.setattr(sys, "platform", "darwin")
    assert missing() == "shaped networks need Linux; this is darwin"


@shaped
def test_what_is_missing_is_found_in_real_processes(tmp_path: Path) -> None:
    """Without root, and with no `tc` on the path."""
    command = [sys.executable, "-c", "from fourfold.testing.network import missing; print(missing())"]
    unmapped = ["unshare", "--user"]  # in a user namespace without a mapping, root has no rights
    if subprocess.run([*unmapped, "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine has no user namespaces, so root cannot be given up")
    (tmp_path / "ip").symlink_to(shutil.which("ip") or "")
    for words, env, reason in (
        ([*unmapped, *command], os.environ, "shaped networks need root"),
        (command, os.environ | {"PATH": str(tmp_path)}, "shaped networks need `tc` (iproute2), which is not installed"),
    ):
        out = subprocess.run(words, env=env, capture_output=True, text=True, timeout=90)
        assert out.stdout.strip() == reason, out.stderr


def test_wrong_networks_are_refused() -> None:
    for arguments, message in {
        (3, "1gbit", 2, "1mbit"): "3 hosts cannot be divided equally among 2 racks; use a multiple of 2",
        (0, "1gbit", 1, None): "0 hosts",
        (4, "1gbit", 2, None): "racks and the rate of their uplink go together",
        (4, "fast", 1, None): "invalid rate 'fast'; write for example '100mbit'",
        (4, "1gbit", 2, "0mbit"): "invalid rate '0mbit'; write for example '100mbit'",
    }.items():
        hosts, rate, racks, uplink = arguments
        with pytest.raises(NetworkError) as error:
            Network(hosts, rate, racks=racks, uplink=uplink)
        assert message in str(error.value)
    assert parse_rate("100mbit") == 12.5e6
    assert parse_rate("1.5Gbit") == 187.5e6
