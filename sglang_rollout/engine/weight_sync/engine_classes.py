"""Whether SGLang's own class of a model takes the weights that it is sent, and what an engine on a CPU computes.

One process with SGLang builds every class on a CPU and lets its ``load_weights`` read: each parameter has to be
written, and no name be unknown. Where sequences are given, it then computes their log-probs, model after model, with
what a CPU engine runs but its scheduler and server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import sglang_cpu_engine
from megatron_retool.errors import OperationError
from sglang_rollout.engine.launch_command import torchvision_directory

SCRIPT = Path(__file__).resolve().parent / "in_engine_process" / "load_into_engine_models.py"


@dataclass(frozen=True)
class Load:
    """Weights to load.

    Attributes:
        directory: with the config.json that chooses and shapes the class; an engine's weights too.
        tensors: safetensors file.
        override: of config.json.
        halves: dimension in which a tensor is cut, by its name: both halves come by themselves, as
            ``weight_sync.method=sharded`` sends them. None: all come whole.
        changed: whole weights with some elements moved come next, then what makes them those of ``tensors`` again, as
            ``weight_sync.delta`` sends it.
        sequences: token ids to score with an engine of ``directory``, seven or more each; none: no engine is built.
    """

    name: str
    directory: str
    tensors: str
    override: dict[str, Any] = field(default_factory=dict)
    sequences: list[list[int]] = field(default_factory=list)
    halves: dict[str, int] = field(default_factory=dict)
    changed: bool = False


@dataclass(frozen=True)
class Loaded:
    """What became of a ``Load``.

    Attributes:
        wrong: what went wrong with the class; empty: every parameter was written whole.
        log_probs: of each sequence's tokens but the first, at temperature 1, in float32.
        failed: why there are no ``log_probs``; empty: they are there, or were not asked for.
    """

    wrong: str
    log_probs: list[list[float]] = field(default_factory=list)
    failed: str = ""


def load_into_engine_classes(loads: list[Load], directory: Path, timeout: float = 500) -> dict[str, Loaded]:
    """What became of each load, by name.

    Args:
        directory: for files of this call.

    Raises:
        RuntimeError: the process ended without an answer, or did not end in time.
    """
    cases, answers = directory / "cases.json", directory / "answers.json"
    cases.write_text(json.dumps([asdict(load) for load in loads]))
    paths = [str(torchvision_directory()), *sys.path]
    search = {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    try:
        result = subprocess.run(
            [sys.executable, "-W", "ignore", str(SCRIPT), str(cases), str(answers)],
            env={**os.environ, **sglang_cpu_engine.environment(search)},
            timeout=timeout,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except subprocess.TimeoutExpired:
        raise OperationError(f"SGLang's classes were not loaded within {timeout:.0f} s") from None
    if result.returncode or not answers.is_file():
        raise OperationError(f"SGLang's classes could not be loaded: {result.stdout[-2000:]}")
    return {
        name: Loaded(_said(answer), answer.get("log_probs", []), answer.get("failed", ""))
        for name, answer in json.loads(answers.read_text()).items()
    }


def _said(answer: dict[str, Any]) -> str:
    if "error" in answer:
        return str(answer["error"])
    missing = [text for text in answer["warnings"] if "not found" in text or "not loaded" in text]
    unwritten = answer["unwritten"]
    parts = [f"not written, or not right: {', '.join(unwritten[:5])} ({len(unwritten)} in all)"] if unwritten else []
    return "; ".join(parts + missing[:5])
