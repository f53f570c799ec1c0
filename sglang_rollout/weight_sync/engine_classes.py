"""Whether SGLang's own class of a model takes the weights that it is sent: each parameter written, no name unknown.

One process with SGLang builds every class on a CPU and lets its ``load_weights`` read. Nothing is computed, so no GPU
is needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_rollout.engine.process import CPU_SHIMS, torchvision_directory

SCRIPT = CPU_SHIMS / "load_into_engine_models.py"


@dataclass(frozen=True)
class Load:
    """Weights to load.

    Attributes:
        directory: with the config.json that chooses and shapes the class.
        tensors: safetensors file.
        override: of config.json.
    """

    name: str
    directory: str
    tensors: str
    override: dict[str, Any] = field(default_factory=dict)


def load_into_engine_classes(loads: list[Load], directory: Path, timeout: float = 500) -> dict[str, str]:
    """What went wrong with each load, by name; empty where every parameter was written whole.

    Args:
        directory: for files of this call.

    Raises:
        RuntimeError: the process ended without an answer.
    """
    cases, answers = directory / "cases.json", directory / "answers.json"
    cases.write_text(json.dumps([asdict(load) for load in loads]))
    paths = [str(CPU_SHIMS), str(torchvision_directory()), *sys.path]
    found = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), str(cases), str(answers)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "SGLANG_USE_CPU_ENGINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCHDYNAMO_DISABLE": "1",
        },
        timeout=timeout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if found.returncode or not answers.is_file():
        raise RuntimeError(f"SGLang's classes could not be loaded: {found.stdout[-2000:]}")
    return {name: _said(answer) for name, answer in json.loads(answers.read_text()).items()}


def _said(answer: dict[str, Any]) -> str:
    if "error" in answer:
        return str(answer["error"])
    missing = [text for text in answer["warnings"] if "not found" in text or "not loaded" in text]
    unwritten = answer["unwritten"]
    parts = [f"not written: {', '.join(unwritten[:5])} ({len(unwritten)} in all)"] if unwritten else []
    return "; ".join(parts + missing[:5])
