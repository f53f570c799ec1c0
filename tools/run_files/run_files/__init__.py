"""The files that a run of reinforcement learning leaves: their names, and reading them without what wrote them.

README.md says what each of them holds. Nothing here writes into a run.
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
