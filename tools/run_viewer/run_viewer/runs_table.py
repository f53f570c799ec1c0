"""Runs below a folder: how far each has come, what it came to, under which settings and on what."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from run_files import CONFIG_FILE, ENVIRONMENT_FILE, PIPELINE_FILE
from run_files.phases import Phase
from run_files.settings import differing_settings, flat_settings
from run_files.steps import stored_steps
from run_viewer.curves import Curves, is_number, read_curves
from run_viewer.json_numbers import number_for_json, values_for_json
from run_viewer.run_directories import runs_below
from run_viewer.run_status import read_json, run_status

_TIMES = (Phase.STEP, Phase.VALIDATION, Phase.QUICK_VALIDATION, Phase.SAVE_CHECKPOINT)
_RISES = re.compile(r"val-core/all/acc/(mean@\d+|best@\d+/mean|maj@\d+/mean)|val-quick/all/acc/mean@\d+|"
                    r"rollout/(acc|score)/mean|tool/(use|success)_rate")  # fmt: skip
"""Metrics whose largest value is the best one."""


def runs_page(root: Path, now: float | None = None) -> dict[str, Any]:
    """``/api/runs``: a row for each run below ``root``, the newest first, and the settings in which they differ.

    A run whose files cannot be read has a row too, which says why in ``problems``; rows have only differing settings.
    """
    rows = sorted((_row(root / name, name, now) for name in runs_below(root)), key=lambda row: -(row["started"] or 0))
    different = differing([row["settings"] for row in rows if row["settings"]])
    for row in rows:
        row["settings"] = {name: row["settings"].get(name) for name in different}
    return {"runs": rows, "differing": different}


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Dotted names of settings whose values are not all equal; a run's own name is left out."""
    return list(differing_settings([{key: str(value) for key, value in run.items()} for run in settings]))


def _row(run_dir: Path, name: str, now: float | None) -> dict[str, Any]:
    problems: list[str] = []
    settings, curves = settings_of(run_dir, problems), read_curves(run_dir)
    problems += curves.problems
    status = run_status(run_dir, settings, curves, problems, now)
    return {
        "name": name,
        "title": run_dir.resolve().name,
        "status": status.state,
        "reason": status.reason,
        "step": status.step,
        "total_steps": status.total_steps,
        "started": _started(run_dir),
        "seconds": _seconds(curves),
        "figures": _figures(curves),
        "settings": settings,
        "problems": problems,
    }


def run_page(run_dir: Path, name: str, now: float | None = None) -> dict[str, Any]:
    """``/api/runs/R``: state, settings, environment, stored steps and validations, and files to look into.

    ``lacks`` says what the run did not store.
    """
    row = _row(run_dir, name, now)
    problems: list[str] = row["problems"]
    environment = read_json(run_dir / ENVIRONMENT_FILE, [])  # the row has its problem
    lacks = [] if environment else [f"{ENVIRONMENT_FILE} is not there: commit, versions and hardware were not stored"]
    stages = read_json(run_dir / PIPELINE_FILE, []).get("seconds")
    return row | {
        "environment": environment,
        "steps": stored_steps(run_dir / "rollouts"),
        "validation": stored_steps(run_dir / "validation"),
        "links": links(run_dir),
        "stages": stages if isinstance(stages, dict) else {},
        "problems": problems,
        "lacks": lacks,
    }


def links(run_dir: Path) -> list[dict[str, str]]:
    """Pages, tables and logs of the run as {text, href}; href is a path below the run's directory."""
    result = [("report", "report/index.html"), ("accuracy by problem", "report/validation_problems.csv")]
    result += [
        (path.stem.replace("_", " "), f"report/{path.name}")
        for path in _files(run_dir / "report", "*.html")
        if path.name != "index.html"
    ]
    result += [(f"profile {path.stem}", f"profile/{path.name}") for path in _files(run_dir / "profile", "*.md")]
    result += [(f"log {path.stem}", f"logs/{path.name}") for path in _files(run_dir / "logs", "*.log")]
    return [{"text": text, "href": href} for text, href in result if (run_dir / href).is_file()]


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))


def settings_of(run_dir: Path, problems: list[str]) -> dict[str, Any]:
    """Value by dotted key; empty, and a sentence in ``problems``, where config.yaml cannot be read."""
    path = run_dir / CONFIG_FILE
    try:
        about = path.stat()
        return _read_settings(path, about.st_mtime_ns, about.st_size)
    except Exception as error:  # OmegaConf's and YAML's own, of a foreign file
        problems.append(f"{path} cannot be read: {str(error).splitlines()[0]}")
        return {}


@functools.lru_cache(maxsize=256)
def _read_settings(path: Path, _changed: int, _size: int) -> dict[str, Any]:
    tree = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(tree, dict):
        raise ValueError("it is no mapping of settings")
    settings: dict[str, Any] = values_for_json(flat_settings(tree))
    return settings


def _started(run_dir: Path) -> float | None:
    """When config.yaml was written, which a run does first; seconds since 1970. A resumed run writes it again."""
    try:
        return (run_dir / CONFIG_FILE).stat().st_mtime
    except OSError:
        return None


def _seconds(curves: Curves) -> float | None:
    """Of all steps, validations and checkpoints that have rows."""
    result = [row.get(phase.metric) for row in curves.rows for phase in _TIMES]
    seconds = [value for value in result if value is not None and is_number(value)]
    return math.fsum(seconds) if seconds else None


def _figures(curves: Curves) -> dict[str, dict[str, Any]]:
    """Last value of metrics that a run is judged by, and the largest with its step."""
    figures = {}
    for name in curves.names:
        if _RISES.fullmatch(name) is None:
            continue
        points = [(step, row[name]) for step, row in zip(curves.steps, curves.rows, strict=True)
                  if is_number(row.get(name))]  # fmt: skip
        best = max((point for point in points if math.isfinite(point[1])), key=lambda point: point[1], default=None)
        figures[name] = {
            "last": number_for_json(points[-1][1]),
            "best": None if best is None else number_for_json(best[1]),
            "best_step": None if best is None else best[0],
        }
    return figures
