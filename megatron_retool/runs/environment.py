"""environment.json: with which code, packages and hardware a run was started last, and by which process."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from megatron_retool.installation import ROOT
from megatron_retool.machine import cores, installed, memory_bytes, nvidia_smi
from run_files import ENVIRONMENT_FILE
from run_files.atomic_files import write_text
from run_files.process import process_start

PACKAGES = ("megatron-retool", "torch", "megatron-core", "transformer-engine", "sglang", "transformers", "ray")


def record_environment(run_dir: Path) -> None:
    """Write environment.json; one of an earlier start is replaced."""
    write_text(run_dir / ENVIRONMENT_FILE, json.dumps(environment(), indent=1))


def environment() -> dict[str, Any]:
    """Commit of the code, versions, hardware, host, process and time of this process."""
    import torch

    versions = {package: installed(package) for package in PACKAGES}
    return {
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": len(_git("status", "--porcelain", "--untracked-files=no").splitlines()),
        "python": platform.python_version(),
        "packages": {package: version for package, version in versions.items() if version is not None},
        "cuda": torch.version.cuda,
        "gpus": nvidia_smi("name"),
        "cpu_cores": cores(),
        "memory_gb": round(memory_bytes() / 1e9, 1),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "process_start": process_start(os.getpid()),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _git(*words: str) -> str:
    if not (ROOT / ".git").exists():  # installed, maybe below another repository
        return ""
    try:
        return subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
