"""The host, its packages and its GPUs, before anything is computed."""

from __future__ import annotations

import importlib.metadata
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_retool.cuda_toolkit import has_driver
from megatron_retool.gpu_host import missing_for_building, missing_for_running
from megatron_retool.installation import ROOT
from megatron_retool.machine import cores, installed, machine, memory_bytes, nvidia_smi
from megatron_retool.parity.doctor.outcome import Skipped, StepFailed, StepFigure
from megatron_retool.parity.doctor.session import DoctorSession

REQUIREMENTS = ROOT / "requirements"
PINS = {False: ("cpu-torch.txt", "cpu.txt"), True: ("gpu-torch.txt", "gpu.txt")}
"""Files of the installation, with GPUs or without."""
_GIB = 2**30
_UNLIMITED = 1e6
_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;#]+)")


def host(session: DoctorSession) -> list[StepFigure]:
    """Limits that are too low show late otherwise: as a bus error, a hang of NCCL, or a process that is killed.

    Raises:
        StepFailed: what compiles for GPUs, or the driver, is missing where GPUs are there or asked for.
    """
    gpus = bool(session.gpus)
    if session.gpus or session.asked:
        lacks = missing_for_building() + missing_for_running()
        if lacks:
            raise StepFailed("; ".join(lacks), "each of them names what to install or to raise")
    shared_memory = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    temporary = Path(tempfile.gettempdir())
    figures = [
        StepFigure("processor", machine()["processor"]),
        StepFigure("cores", cores(), at_least=4 * session.gpus if gpus else 1),
        StepFigure("memory", memory_bytes() / _GIB, "GiB", at_least=12 * session.gpus if gpus else 4),
        # Ray's object store, NCCL's buffers between processes; Docker gives 64 MB unless it is told otherwise.
        StepFigure("shared memory", shared_memory / _GIB, "GiB", at_least=4 if gpus else None),
        StepFigure(
            "room for temporary files", shutil.disk_usage(temporary).free / _GIB, "GiB", at_least=20 if gpus else 1
        ),
        StepFigure("open files", _limit(resource.RLIMIT_NOFILE), at_least=4096 if gpus else 1024),
        StepFigure("processes", _limit(resource.RLIMIT_NPROC), at_least=4096 if gpus else 512),
    ]
    # InfiniBand pins what it sends.
    has_rails = any(Path("/sys/class/infiniband").glob("*"))
    locked = min(_limit(resource.RLIMIT_MEMLOCK) / _GIB, _UNLIMITED)
    return [*figures, StepFigure("memory that may be locked", locked, "GiB", at_least=8 if has_rails else None)]


def versions(session: DoctorSession) -> list[StepFigure]:
    """
    Raises:
        StepFailed: naming packages that are missing or of another version than the pinned one.
    """
    files = [REQUIREMENTS / name for name in PINS[bool(session.gpus)]]
    if files[0].is_file():
        texts = [file.read_text(encoding="utf-8") for file in files]
    else:  # a wheel has no lists, only the pins of its own requirements
        required = importlib.metadata.requires("megatron-retool") or []
        texts = [line for line in required if "extra ==" not in line or (session.gpus and '"gpu"' in line)]
    pins = dict(pin for text in texts for pin in read_pins(text))
    wrong = differing(pins)
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise StepFailed(f"{len(wrong)} of {len(pins)} packages are not as pinned: {', '.join(wrong[:8])}{more}")
    return [StepFigure("packages as pinned", len(pins)), StepFigure("torch", torch.__version__)]


def read_pins(text: str) -> Iterator[tuple[str, str]]:
    """Name and version of each pinned line of a requirements file."""
    for line in text.splitlines():
        if result := _PIN.match(line.strip()):
            yield result[1], result[2]


def differing(pins: dict[str, str]) -> list[str]:
    """Those whose installed version is another, in words. What a build adds to a version (+cu130) does not count."""
    result = {name: installed(name) for name in pins}
    return [
        f"{name} {version or 'is missing'} (pinned: {pins[name]})"
        for name, version in result.items()
        if version is None or version.partition("+")[0] != pins[name]
    ]


def driver(session: DoctorSession) -> list[StepFigure]:
    """
    Raises:
        Skipped: a host without GPUs, of which none was asked for.
        StepFailed: the driver is there and torch finds no GPU.
    """
    names = nvidia_smi("name")
    if not session.gpus and not session.asked:
        if names or has_driver():
            raise StepFailed(
                f"the driver shows {len(names)} GPU(s), and torch {torch.__version__} (CUDA {torch.version.cuda}) "
                "finds none: it is a build without CUDA, or one for a newer driver"
            )
        raise Skipped("this host has no NVIDIA driver")
    figures = [StepFigure("GPUs of torch", torch.cuda.device_count(), at_least=session.asked or 1)]
    figures += [StepFigure("torch's CUDA", str(torch.version.cuda))]
    for index in range(session.gpus):
        properties = torch.cuda.get_device_properties(index)
        free = torch.cuda.mem_get_info(index)[0]
        figures += [
            StepFigure(f"GPU {index}", f"{properties.name}, compute capability {properties.major}.{properties.minor}"),
            StepFigure(f"GPU {index}, memory", properties.total_memory / _GIB, "GiB"),
            # Somebody else on it would disturb every figure below.
            StepFigure(f"GPU {index}, free of it", free / properties.total_memory, at_least=0.9),
        ]
        peers = [other for other in range(session.gpus) if other != index]
        if peers:
            reached = sum(torch.cuda.can_device_access_peer(index, other) for other in peers)
            figures.append(StepFigure(f"GPU {index}, peers that it reaches", f"{reached} of {len(peers)}"))
    return figures


def _limit(which: int) -> float:
    """The soft limit; _UNLIMITED GiB where there is none."""
    soft = resource.getrlimit(which)[0]
    return _UNLIMITED * _GIB if soft == resource.RLIM_INFINITY else float(soft)
