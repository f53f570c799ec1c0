"""Learner ranks that run under Nsight Systems, by Ray's runtime environment."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_retool.config import TrainerConfig


def nsight_environment(trainer: TrainerConfig, role: str, rank: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """What a rank's runtime_env holds besides, so that it runs under `nsys profile`; nothing where it is not to.

    nsys records from cudaProfilerStart to cudaProfilerStop, once for each of trainer.profiler.steps, into
    profile/<role>_rank<rank>_<pid>.nsys-rep of the run.
    """
    profiler = trainer.profiler
    if profiler.tool != "nsys" or not profiler.records(rank):
        return {}
    directory = trainer.run_dir.absolute() / "profile"
    directory.mkdir(parents=True, exist_ok=True)
    options = {name: str(value) for name, value in profiler.nsys_options.items()}
    options |= {
        # An absolute path stays as it is; Ray hands the command to a shell.
        "o": re.sub(r"([^\w@%+=:,./-])", r"\\\1", f"{directory}/{role}_rank{rank}_%p"),
        "capture-range": "cudaProfilerApi",
        "capture-range-end": f"repeat:{len(set(profiler.steps))}",
    }
    # Ray starts "python" under nsys, by PATH.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {"env_vars": {**environment, "PATH": path}, "nsight": options}
