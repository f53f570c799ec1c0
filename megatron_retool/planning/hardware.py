"""What the accelerators can do, as data with sources, and how many of them there are.

Rates are dense (no structured sparsity) peaks of the vendor's data sheets; what kernels reach of them is an efficiency
that belongs to the model of the phase (``timing``, ``engine_model``), not to the hardware.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from conversion.model.flops import PEAK_FLOPS, device_kind
from megatron_retool.config import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Accelerator:
    """One GPU, or one learner process with its share of a CPU.

    Attributes:
        memory_bytes: memory that one device reports as its total.
        bandwidth: bytes/s of that memory.
        flops: dense 16-bit tensor FLOP/s (fp32 on a CPU).
        fp8_flops: dense FP8 tensor FLOP/s; 0 where there is no FP8.
        intra_node_bandwidth: bytes/s in one direction between two devices of a node.
        inter_node_bandwidth: bytes/s in one direction from one device to another node (one 400 Gb/s NIC per GPU on
            Hopper and Blackwell machines, 200 Gb/s on DGX A100).
        host_bandwidth: bytes/s in one direction between the device and host memory.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float
    fp8_flops: float
    intra_node_bandwidth: float
    inter_node_bandwidth: float
    host_bandwidth: float
    source: str

    @property
    def is_cpu(self) -> bool:
        """Whether it is a CPU, whose learner runs on gloo."""
        return self.name == "CPU"


# Memory: what the driver reports, in some cases less than the marketing figure.
ACCELERATORS: dict[str, Accelerator] = {
    accelerator.name: accelerator
    for accelerator in (
        Accelerator(
            name="A100",
            memory_bytes=80 * GIB,
            bandwidth=2.039e12,
            flops=PEAK_FLOPS["A100"],
            fp8_flops=0.0,
            intra_node_bandwidth=300e9,
            inter_node_bandwidth=25e9,
            host_bandwidth=25e9,
            source="NVIDIA A100 Tensor Core GPU data sheet (SXM, 80 GB); DGX A100 data sheet",
        ),
        Accelerator(
            name="H100",
            memory_bytes=79.6 * GIB,
            bandwidth=3.35e12,
            flops=PEAK_FLOPS["H100"],
            fp8_flops=1978e12,
            intra_node_bandwidth=450e9,
            inter_node_bandwidth=50e9,
            host_bandwidth=50e9,
            source="NVIDIA H100 Tensor Core GPU data sheet (SXM); DGX H100 data sheet",
        ),
        Accelerator(
            name="H200",
            memory_bytes=139.8 * GIB,
            bandwidth=4.8e12,
            flops=PEAK_FLOPS["H200"],
            fp8_flops=1978e12,
            intra_node_bandwidth=450e9,
            inter_node_bandwidth=50e9,
            host_bandwidth=50e9,
            source="NVIDIA H200 Tensor Core GPU data sheet (SXM); DGX H200 data sheet",
        ),
        Accelerator(
            name="B200",
            memory_bytes=178.4 * GIB,
            bandwidth=8.0e12,
            flops=PEAK_FLOPS["B200"],
            fp8_flops=4500e12,
            intra_node_bandwidth=900e9,
            inter_node_bandwidth=50e9,
            host_bandwidth=50e9,
            source="NVIDIA Blackwell architecture technical brief (HGX B200); DGX B200 data sheet",
        ),
        Accelerator(
            name="L4",
            memory_bytes=22.0 * GIB,
            bandwidth=300e9,
            flops=PEAK_FLOPS["L4"],
            fp8_flops=242e12,
            intra_node_bandwidth=25e9,
            inter_node_bandwidth=12.5e9,
            host_bandwidth=25e9,
            source="NVIDIA L4 Tensor Core GPU data sheet; PCIe 4.0 between cards, 100 Gb/s a card between hosts are "
            "assumptions",
        ),
        Accelerator(
            name="RTX4090",
            memory_bytes=23.6 * GIB,
            bandwidth=1.008e12,
            flops=PEAK_FLOPS["RTX 4090"],
            fp8_flops=330e12,
            intra_node_bandwidth=20e9,
            inter_node_bandwidth=12.5e9,
            host_bandwidth=25e9,
            source="NVIDIA Ada GPU architecture paper (GeForce RTX 4090); between cards through the host and 100 Gb/s "
            "a card between hosts are assumptions",
        ),
        Accelerator(
            name="CPU",
            memory_bytes=8 * GIB,
            bandwidth=10e9,
            flops=130e9,
            fp8_flops=0.0,
            intra_node_bandwidth=4e9,
            inter_node_bandwidth=1e9,
            host_bandwidth=10e9,
            source="one core of a Xeon virtual machine, measured with torch: fp32 products of [2048, 128] and "
            "[128, 128], a copy of 256 MB; 8 GiB of host memory for each learner process is an assumption",
        ),
    )
}


def accelerator_of(device_name: str) -> Accelerator | None:
    """What is known of the device that torch calls ``device_name``; None: nothing."""
    kind = device_kind(device_name)
    return None if kind is None else ACCELERATORS.get(kind.replace(" ", ""))


@dataclass(frozen=True)
class Machines:
    """``count`` accelerators in nodes of ``per_node``."""

    accelerator: Accelerator
    count: int
    per_node: int

    @property
    def nodes(self) -> int:
        """Machines, the last of which may be partly used."""
        return -(-self.count // self.per_node)

    def bandwidth_between(self, group: int) -> float:
        """Bytes/s per device among ``group`` devices that are neighbours in rank order: the slowest link decides."""
        return (
            self.accelerator.intra_node_bandwidth if group <= self.per_node else self.accelerator.inter_node_bandwidth
        )

    def __str__(self) -> str:
        return f"{self.count} x {self.accelerator.name} in {self.nodes} node(s) of {min(self.per_node, self.count)}"


def parse_machines(text: str, per_node: int = 8) -> Machines:
    """``H100x16`` -> 16 H100 in nodes of ``per_node``; ``CPUx2`` -> two processes on one host.

    Raises:
        ConfigError: the text has another form, the name is unknown, or the count does not fill whole nodes.
    """
    match = re.fullmatch(r"([A-Za-z]+\d*)x(\d+)", text.strip())
    if match is None or int(match[2]) < 1:
        raise ConfigError(f"--gpus {text!r} is not of the form H100x16 (name, x, count)")
    name, count = match[1].upper(), int(match[2])
    if name not in ACCELERATORS:
        raise ConfigError(f"--gpus {text!r}: {name} is not one of {', '.join(ACCELERATORS)}")
    accelerator = ACCELERATORS[name]
    if accelerator.is_cpu:
        return Machines(accelerator, count, count)
    if per_node < 1:
        raise ConfigError(f"--gpus-per-node {per_node} must be at least 1")
    if count > per_node and count % per_node:
        raise ConfigError(f"--gpus {text!r}: {count} GPUs do not fill whole nodes of {per_node}; see --gpus-per-node")
    return Machines(accelerator, count, per_node)
