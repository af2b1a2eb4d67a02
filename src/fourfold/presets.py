"""Cluster presets. Peak rates are the vendors'; efficiencies, ring bandwidths and host links are from public benchmarks.

Every preset's `source` names the origin of its numbers. `fourfold calibrate` measures better ones on your machines. `memory` is
what torch reports for such a device. `host.link` is the bandwidth per device while all devices of a node copy at once, which the
host's memory channels limit, not PCIe.
"""

from __future__ import annotations

from collections.abc import Mapping

from fourfold.cluster import Cluster, Device, Host, Level

__all__ = ["PRESETS"]


def _gpus(name: str, source: str, device: Device, *, node: Level, network: Level, link: float, memory: str) -> Cluster:
    return Cluster(name=name, device=device, host=Host(memory=memory, link=link), level=(node, network), source=source)


def _presets() -> dict[str, Cluster]:
    """The presets by name."""

    def nvlink(bandwidth: float) -> Level:
        return Level(name="NVLink", ranks=8, bandwidth=bandwidth, latency=2e-6)

    def infiniband(bandwidth: float) -> Level:
        return Level(name="InfiniBand", bandwidth=bandwidth, latency=6e-6)

    a100 = {"bf16": 312e12, "fp32": 19.5e12, "fp64": 19.5e12}
    h100 = {"bf16": 989e12, "fp32": 67e12, "fp64": 67e12}
    made = [
        _gpus(
            "v100-16g",
            "NVIDIA V100 datasheet; DGX-1: rings over NVLink 130 GB/s, 4 × 100 Gb/s InfiniBand a node, two GPUs a PCIe 3 link",
            Device(
                name="V100 16 GB",
                memory="15.77GiB",
                reserve="1GiB",
                matrix={"bf16": 15.7e12, "fp32": 15.7e12, "fp64": 7.8e12},  # its matrix units take fp16, and no bf16
                efficiency=0.76,
                attention=0.4,
                attention_backward=3.0,
                processors=80,
                memory_rate=0.78e12,
                eager=0.8,
            ),
            node=nvlink(130e9),
            network=infiniband(6e9),
            link=6e9,
            memory="512GiB",
        ),
        _gpus(
            "a100-40g",
            "NVIDIA A100 datasheet; rings over NVSwitch 235 GB/s (nccl-tests), 8 × 200 Gb/s InfiniBand a node, PCIe 4",
            Device(
                name="A100 40 GB",
                memory="39.5GiB",
                reserve="1.5GiB",
                matrix=a100,
                efficiency=0.83,
                attention_backward=3.0,
                processors=108,
                memory_rate=1.33e12,
                eager=0.75,
            ),
            node=nvlink(235e9),
            network=infiniband(23e9),
            link=20e9,
            memory="1TiB",
        ),
        _gpus(
            "a100-80g",
            "NVIDIA A100 datasheet; rings over NVSwitch 235 GB/s (nccl-tests), 8 × 200 Gb/s InfiniBand a node, PCIe 4",
            Device(
                name="A100 80 GB",
                memory="79.2GiB",
                reserve="1.5GiB",
                matrix=a100,
                efficiency=0.83,
                attention_backward=3.0,
                processors=108,
                memory_rate=1.75e12,
                eager=0.75,
            ),
            node=nvlink(235e9),
            network=infiniband(23e9),
            link=20e9,
            memory="2TiB",
        ),
        _gpus(
            "h100-sxm",
            "NVIDIA H100 datasheet, shares of it as measured on an H200; rings over NVSwitch 360 GB/s (nccl-tests), "
            "8 × 400 Gb/s InfiniBand a node, two sockets of DDR5-4800",
            Device(
                name="H100 80 GB",
                memory="79.1GiB",
                matrix=h100,
                efficiency=0.7,
                attention=0.7,
                attention_backward=3.0,
                processors=132,
                memory_rate=2.95e12,
                eager=0.65,
            ),
            node=nvlink(360e9),
            network=infiniband(46e9),
            link=30e9,
            memory="2TiB",
        ),
        _gpus(
            "h200",
            "NVIDIA H200 datasheet; shares of it measured on one (large products, warm: 700 TFLOP/s); network and host as H100's",
            Device(
                name="H200 141 GB",
                memory="139.8GiB",
                matrix=h100,
                efficiency=0.71,
                attention=0.7,
                attention_backward=3.0,
                processors=132,
                memory_rate=4.36e12,
                eager=0.65,
            ),
            node=nvlink(360e9),
            network=infiniband(46e9),
            link=30e9,
            memory="2TiB",
        ),
        _gpus(
            "b200",
            "NVIDIA B200 datasheet; rings over NVSwitch and shares of the peak scaled from H100's",
            Device(
                name="B200 180 GB",
                memory="178.3GiB",
                matrix={"bf16": 2250e12, "fp32": 75e12, "fp64": 37e12},
                efficiency=0.68,
                attention=0.7,
                attention_backward=3.0,
                processors=148,
                memory_rate=6.8e12,
                eager=0.6,
            ),
            node=nvlink(700e9),
            network=infiniband(46e9),
            link=35e9,
            memory="3TiB",
        ),
        Cluster(
            name="l4-pcie",
            devices=4,
            device=Device(
                name="L4 24 GB",
                memory="22GiB",
                reserve="1GiB",
                matrix={"bf16": 121e12, "fp32": 30.3e12, "fp64": 0.5e12},
                efficiency=0.5,
                attention_backward=3.0,
                processors=58,
                memory_rate=0.25e12,
                eager=0.9,
            ),
            host=Host(memory="256GiB", link=20e9),
            level=(
                Level(name="PCIe", ranks=4, bandwidth=9e9, latency=8e-6),
                Level(name="Ethernet", bandwidth=2.8e9, latency=3e-5),
            ),
            source="NVIDIA L4 datasheet; PCIe 4 through the host, 100 Gb/s Ethernet a node",
        ),
    ]
    return {c.name: c for c in made}


PRESETS: Mapping[str, Cluster] = _presets()
