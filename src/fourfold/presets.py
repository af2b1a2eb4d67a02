"""Cluster presets. Peak rates are the vendors'; efficiencies, ring bandwidths and host links are from public benchmarks.

Every preset's `source` names the origin of its numbers. `fourfold calibrate` measures better ones on your machines. `memory` is
what torch reports for such a device. `host.link` is the bandwidth per device while all devices of a node copy at once, which the
host's memory channels limit, not PCIe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fourfold.cluster import Cluster, Device, Host, Level

__all__ = ["PRESETS"]

NVLINK_HOP, NETWORK_HOP = 3.4e-6, 14e-6
"""Seconds of a hop of a ring inside a node and between nodes: constants of NCCL's own tuning model, for rings of the protocol
that large buffers use."""
OVERLAP = 0.82
"""Assumed: while NCCL's kernels run, they hold 16 to 32 of the 108 to 148 multiprocessors of a GPU."""
START = 4e-5
"""Seconds of a collective besides hops and bytes: assumed; with it, eight A100s reach half of their bandwidth at some 10 MB."""
CONGESTION = 0.05
"""Assumed for InfiniBand: see `Level.congestion`."""
CLOUD_CONGESTION = 0.08
"""Assumed for networks of clouds."""


FP8 = (
    "h100-sxm", "h100-pcie", "h200", "h20", "gh200", "b200", "gb200", "l4-pcie", "l40s", "rtx-4090", "rtx-5090", "rtx-pro-6000",
)  # fmt: skip
"""Presets of GPUs with fp8 tensor cores, which data sheets state at twice the rate of bf16. The MI300X has them for another
encoding of e4m3 than the one used here."""


def _with_fp8(c: Cluster) -> Cluster:
    return replace(c, device=replace(c.device, matrix=c.device.matrix | {"fp8": 2 * c.device.matrix["bf16"]}))


def _gpus(name: str, source: str, device: Device, *, node: Level, network: Level, link: float, memory: str) -> Cluster:
    host, levels = Host(memory=memory, link=link), (node, network)
    return Cluster(name=name, device=device, host=host, level=levels, overlap=OVERLAP, source=source)


def _cards(
    name: str,
    source: str,
    device: Device,
    *,
    devices: int,
    pcie: float,
    ethernet: float,
    link: float,
    memory: str,
) -> Cluster:
    """A host with PCIe cards; `ethernet` is the bandwidth of the node, which its devices share."""
    levels = (
        Level(name="PCIe", ranks=devices, bandwidth=pcie, latency=8e-6),
        Level(name="Ethernet", bandwidth=ethernet / devices, latency=3e-5),
    )
    return Cluster(
        name=name, devices=devices, device=device, host=Host(memory=memory, link=link), level=levels, source=source
    )


def _card(
    name: str, memory: str, bf16: float, fp32: float, fp64: float, processors: int, rate: float, share: float
) -> Device:
    """A card by its data sheet: TFLOP/s by dtype, multiprocessors, bytes/s of memory; `share` of the peak is assumed."""
    return Device(
        name=name,
        memory=memory,
        reserve="1GiB",
        matrix={"bf16": bf16 * 1e12, "fp32": fp32 * 1e12, "fp64": fp64 * 1e12},
        efficiency=share,
        attention_backward=3.0,
        processors=processors,
        memory_rate=0.88 * rate,
        eager=0.85,
    )


def _presets() -> dict[str, Cluster]:
    """The presets by name."""

    def nvlink(bandwidth: float) -> Level:
        return Level(name="NVLink", ranks=8, bandwidth=bandwidth, latency=NVLINK_HOP, start=START)

    def infiniband(bandwidth: float) -> Level:
        return Level(name="InfiniBand", bandwidth=bandwidth, latency=NETWORK_HOP, start=START, congestion=CONGESTION)

    a100 = {"bf16": 312e12, "fp32": 19.5e12, "fp64": 19.5e12}
    h100 = {"bf16": 989e12, "fp32": 67e12, "fp64": 67e12}
    h100_sxm = _gpus(
        "h100-sxm",
        "NVIDIA H100 datasheet, matmul rate from published runs; rings over NVSwitch 360 GB/s (nccl-tests), "
        "8 × 400 Gb/s InfiniBand a node, two sockets of DDR5-4800",
        Device(
            name="H100 80 GB",
            memory="79.1GiB",
            matrix=h100,
            efficiency=0.62,
            attention=0.79,
            flash_2=0.75,
            attention_backward=3.0,
            processors=132,
            memory_rate=2.95e12,
            eager=0.65,
        ),
        node=nvlink(360e9),
        network=infiniband(46e9),
        link=30e9,
        memory="2TiB",
    )
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
                alignment=8,
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
            "NVIDIA A100 datasheet; matmul rate from published runs; rings over NVSwitch 235 GB/s (nccl-tests), "
            "8 × 200 Gb/s InfiniBand a node, PCIe 4",
            Device(
                name="A100 40 GB",
                memory="39.5GiB",
                reserve="1.5GiB",
                matrix=a100,
                efficiency=0.72,
                attention=0.7,
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
            "NVIDIA A100 datasheet; matmul rate from published runs; rings over NVSwitch 235 GB/s (nccl-tests), "
            "8 × 200 Gb/s InfiniBand a node, PCIe 4",
            Device(
                name="A100 80 GB",
                memory="79.2GiB",
                reserve="1.5GiB",
                matrix=a100,
                efficiency=0.72,
                attention=0.7,
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
        h100_sxm,
        _gpus(
            "h200",
            "NVIDIA H200 datasheet; shares of it measured on one (large products, warm: 700 TFLOP/s); network and host as H100's",
            Device(
                name="H200 141 GB",
                memory="139.8GiB",
                matrix=h100,
                efficiency=0.71,
                attention=0.7,
                flash_2=0.75,
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
        # Cards: bf16 peaks are those with fp32 accumulation. Their shares of the peak are assumed, not measured.
        _cards(
            "rtx-3090",
            "NVIDIA GA102 whitepaper; shares assumed; PCIe 4 through the host, 10 Gb/s Ethernet a node",
            _card("RTX 3090 24 GB", "23.69GiB", 71, 35.6, 0.56, 82, 0.936e12, 0.85),
            devices=4,
            pcie=9e9,
            ethernet=1.1e9,
            link=12e9,
            memory="128GiB",
        ),
        _cards(
            "rtx-4090",
            "NVIDIA Ada whitepaper; shares assumed; PCIe 4 through the host (no peer-to-peer), 10 Gb/s Ethernet a node",
            _card("RTX 4090 24 GB", "23.64GiB", 165.2, 82.6, 1.29, 128, 1.008e12, 0.85),
            devices=4,
            pcie=9e9,
            ethernet=1.1e9,
            link=12e9,
            memory="128GiB",
        ),
        _cards(
            "rtx-5090",
            "NVIDIA RTX Blackwell whitepaper; shares assumed; PCIe 5 through the host, 10 Gb/s Ethernet a node",
            _card("RTX 5090 32 GB", "31.36GiB", 209.5, 104.8, 1.64, 170, 1.792e12, 0.85),
            devices=4,
            pcie=16e9,
            ethernet=1.1e9,
            link=20e9,
            memory="192GiB",
        ),
        _cards(
            "rtx-pro-6000",
            "NVIDIA RTX PRO 6000 Blackwell datasheet; shares assumed; PCIe 5, 100 Gb/s Ethernet a node",
            _card("RTX PRO 6000 96 GB", "94.97GiB", 503.8, 126, 1.97, 188, 1.792e12, 0.7),
            devices=4,
            pcie=35e9,
            ethernet=11e9,
            link=30e9,
            memory="512GiB",
        ),
        _cards(
            "a6000",
            "NVIDIA RTX A6000 datasheet; shares assumed; PCIe 4, 25 Gb/s Ethernet a node",
            _card("RTX A6000 48 GB", "47.5GiB", 154.8, 38.7, 0.6, 84, 0.768e12, 0.7),
            devices=4,
            pcie=18e9,
            ethernet=2.8e9,
            link=16e9,
            memory="256GiB",
        ),
        _cards(
            "a10g",
            "NVIDIA A10G as in AWS g5.12xlarge; shares assumed; PCIe 4 through the host, 40 Gb/s Ethernet a node",
            _card("A10G 24 GB", "22.06GiB", 70, 31.5, 0.49, 80, 0.6e12, 0.75),
            devices=4,
            pcie=8e9,
            ethernet=4.4e9,
            link=10e9,
            memory="192GiB",
        ),
        _cards(
            "l40s",
            "NVIDIA L40S datasheet; shares assumed (its power limit binds); PCIe 4, 200 Gb/s Ethernet a node",
            _card("L40S 48 GB", "44.39GiB", 362, 91.6, 1.4, 142, 0.864e12, 0.58),
            devices=8,
            pcie=18e9,
            ethernet=22e9,
            link=16e9,
            memory="1TiB",
        ),
        _cards(
            "h100-pcie",
            "NVIDIA H100 PCIe datasheet; shares assumed (its power limit binds); PCIe 5, 200 Gb/s Ethernet a node",
            _card("H100 PCIe 80 GB", "79.1GiB", 756, 51, 51, 114, 2.0e12, 0.58),
            devices=8,
            pcie=35e9,
            ethernet=22e9,
            link=25e9,
            memory="1TiB",
        ),
        _gpus(
            "h20",
            "NVIDIA H20 datasheet; shares assumed; network and host as H100's",
            _card("H20 96 GB", "95.1GiB", 148, 44, 1, 78, 4.0e12, 0.9),
            node=nvlink(360e9),
            network=infiniband(46e9),
            link=30e9,
            memory="2TiB",
        ),
        _gpus(
            "mi300x",
            "AMD MI300X datasheet; untested: shares and ring bandwidths assumed, 8 × 400 Gb/s RoCE a node",
            _card("MI300X 192 GB (untested)", "191.5GiB", 1307, 163, 163, 304, 5.3e12, 0.45),
            node=Level(name="Infinity Fabric", ranks=8, bandwidth=300e9, latency=4e-6),
            network=Level(name="RoCE", bandwidth=42e9, latency=8e-6),
            link=30e9,
            memory="2TiB",
        ),
        Cluster(
            name="gh200",
            devices=1,
            device=replace(h100_sxm.device, name="GH200 96 GB", memory="94.5GiB", memory_rate=3.5e12),
            host=Host(memory="480GB", link=380e9),
            level=(infiniband(46e9),),
            source="NVIDIA GH200 datasheet; one GPU a node on NVLink-C2C, shares as H100's, 400 Gb/s InfiniBand a GPU",
        ),
        Cluster(
            name="gb200",
            devices=72,
            device=Device(
                name="GB200 186 GB",
                memory="184GiB",
                matrix={"bf16": 2500e12, "fp32": 80e12, "fp64": 40e12},
                efficiency=0.66,
                attention=0.7,
                attention_backward=3.0,
                processors=148,
                memory_rate=7.0e12,
                eager=0.6,
            ),
            host=Host(memory="17TiB", link=150e9),
            level=(Level(name="NVLink", ranks=72, bandwidth=700e9, latency=3e-6), infiniband(46e9)),
            source="NVIDIA GB200 NVL72 datasheet; a rack is a node, shares assumed, NVLink-C2C shared by two GPUs",
        ),
    ]
    by_name = {c.name: _with_fp8(c) if c.name in FP8 else c for c in made}

    def cloud(name: str, gpu: str, gigabits: float, source: str) -> Cluster:
        """A cloud's node: the GPUs of a preset with `gigabits` Gb/s of network a node, of which 80 % are reached."""
        base = by_name[gpu]
        network = Level(
            name="cloud network",
            bandwidth=0.8 * gigabits / 8 * 1e9 / base.devices,
            latency=2e-5,
            start=START,
            congestion=CLOUD_CONGESTION,
        )
        return replace(base, name=name, level=(base.level[0], network), source=f"{source}; GPUs as {gpu}")

    clouds = [
        cloud("p4d", "a100-40g", 400, "AWS p4d.24xlarge: 400 Gb/s EFA a node"),
        cloud("p4de", "a100-80g", 400, "AWS p4de.24xlarge: 400 Gb/s EFA a node"),
        cloud("p5", "h100-sxm", 3200, "AWS p5.48xlarge: 3,200 Gb/s EFA a node"),
        cloud("a3-high", "h100-sxm", 1000, "Google Cloud a3-highgpu-8g: 1,000 Gb/s a node"),
        cloud("a3-mega", "h100-sxm", 1800, "Google Cloud a3-megagpu-8g: 1,800 Gb/s a node"),
    ]
    return by_name | {c.name: c for c in clouds}


PRESETS: Mapping[str, Cluster] = _presets()
