"""Names of the files that a run of reinforcement learning leaves; README.md says what each of them holds.

The modules here read them, and need nothing of the stack that wrote them.
"""

from __future__ import annotations

from pathlib import Path

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
ENVIRONMENT_FILE = "environment.json"
PIPELINE_FILE = "pipeline.json"


def check_run_directory(run_dir: Path) -> None:
    """Raise FileNotFoundError where there is no such directory."""
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir} is no directory: name that of a run, runs/<experiment_name>")
