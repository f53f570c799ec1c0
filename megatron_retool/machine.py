"""What machine this is: its processor, memory and GPUs, and the versions that matter; neither names nor paths of it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    "torch", "triton", "megatron-core", "transformer-engine", "flash-attn", "apex", "sglang", "sglang-kernel",
    "flashinfer-python", "transformers", "ray", "numpy",
)  # fmt: skip
_GIB = 2**30


def machine() -> dict[str, Any]:
    """processor, cores, memory_gib, gpus (names), driver: what a report says of the machine."""
    result: dict[str, Any] = {
        "processor": _processor(),
        "cores": cores(),
        "memory_gib": round(memory_bytes() / _GIB, 1),
    }
    gpus = nvidia_smi("name")
    return result | {"gpus": gpus} | ({"driver": nvidia_smi("driver_version")[0]} if gpus else {})


def versions() -> dict[str, str]:
    """Of Python, of PACKAGES that are installed, and of torch's CUDA and NCCL."""
    import torch

    result = {"python": platform.python_version()}
    for name in PACKAGES:
        version = installed(name)
        if version is not None:
            result[name] = version
    if torch.version.cuda is not None:
        result["cuda"] = torch.version.cuda
    return result


def installed(package: str) -> str | None:
    """The version of an installed package; None where it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def nvidia_smi(query: str) -> list[str]:
    """A line for each GPU that CUDA_VISIBLE_DEVICES leaves; empty where nvidia-smi is missing or fails."""
    program = shutil.which("nvidia-smi")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if program is None or visible == "":
        return []
    which = [f"--id={visible}"] if visible else []
    command = [program, f"--query-gpu={query}", "--format=csv,noheader,nounits", *which]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def gpu_count() -> int:
    """GPUs that torch can use, without opening CUDA in this process."""
    import torch

    return torch.cuda.device_count()


def cores() -> int:
    """Cores that this process may use: by affinity, and by the container's quota."""
    allowed = len(os.sched_getaffinity(0))
    quota, _, period = _control_group("cpu.max").partition(" ")
    return min(allowed, max(1, int(quota) // int(period))) if quota.isdigit() and period.isdigit() else allowed


def memory_bytes() -> int:
    """Memory of the host, or less where the container has a limit."""
    limit = _control_group("memory.max")
    total = psutil.virtual_memory().total
    return min(total, int(limit)) if limit.isdigit() else total


def _control_group(name: str) -> str:
    try:
        return Path("/sys/fs/cgroup", name).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return " ".join(names[0].split()) if names else platform.machine()
