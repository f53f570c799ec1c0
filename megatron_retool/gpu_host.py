"""What a host lacks that GPUs need. scripts/setup.sh --gpu runs this file before it downloads and builds for long.

It needs nothing but Python. Exit status 1 where nothing could be built; what only a run needs is said, for runs may be
on other nodes.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

GLIBC = (2, 34)
DRIVER = 580
SHARED_MEMORY = 4 << 30


def missing_for_building() -> list[str]:
    """A sentence for each thing that compiling against torch and CUDA needs."""
    lacks = []
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        package = "python{}.{}-dev".format(*sys.version_info[:2])
        lacks.append(
            f"{header} is missing, which Transformer Engine and Triton need: install {package} (python3-devel)"
        )
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        lacks.append("a C++ compiler is missing, which also engines need: install build-essential (gcc-c++)")
    name, version = platform.libc_ver()
    if name == "glibc" and tuple(map(int, version.split(".")[:2])) < GLIBC:
        lacks.append(
            f"glibc {version} is older than the 2.34 that SGLang's kernels are built for: use Ubuntu 22.04, RHEL 9 or "
            "newer, or docker/Dockerfile"
        )
    return lacks


def missing_for_running() -> list[str]:
    """A sentence for each thing that a run on this host needs."""
    lacks = []
    driver = driver_version()
    if driver is None:
        lacks.append(f"no NVIDIA driver answers here (nvidia-smi): nodes need one of the {DRIVER} series or newer")
    elif driver.partition(".")[0].isdigit() and int(driver.partition(".")[0]) < DRIVER:
        lacks.append(f"the driver {driver} is too old for CUDA 13, torch will find no GPU: {DRIVER} or newer is needed")
    shared = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
    if shared < SHARED_MEMORY:
        lacks.append(f"/dev/shm has {shared >> 20} MiB, and runs need 4 GiB or more: docker run --shm-size=32g")
    return lacks


def driver_version() -> str | None:
    """Such as "580.65.06"; None where nvidia-smi is missing or fails."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split() if done.returncode == 0 else []
    return lines[0] if lines else None


def main() -> int:
    """Print what this host lacks, a line each; 1 where something is missing without which nothing can be built."""
    fatal = missing_for_building()
    for line in fatal + missing_for_running():
        print(f"setup: {line}", file=sys.stderr)
    return 1 if fatal else 0


if __name__ == "__main__":
    sys.exit(main())
