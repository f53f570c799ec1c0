"""Whether this Python has the project's packages, and where its files lie. Standard library only: it is asked before
others are imported.

An environment of an earlier version may be older than this code: Pythons back to 3.9 have to read this file.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""Where the packages lie: the checkout, or site-packages."""
_PYTHON = (3, 12)
_MEGATRON_CORE = (0, 19)
_NEEDED = ("rich", "omegaconf", "torch", "megatron", "transformers", "run_files")


def shipped(name: str) -> Path:
    """Where a file of the repository is that commands read, such as "configs/demo_cpu.yaml": in the checkout, or where
    the wheel put it."""
    path = ROOT / name
    if not path.exists():
        try:
            files = importlib.metadata.files("megatron-retool") or []
        except importlib.metadata.PackageNotFoundError:
            files = []
        for file in files:
            if str(file).endswith(f"share/megatron-retool/{name}"):
                return Path(str(file.locate())).resolve()
    return path


def require_packages(program: str) -> None:
    """Nothing where the packages are there, and of this version.

    Args:
        program: what was called, as a user would type it after activating the environment.

    Raises:
        SystemExit: with one line that names the environment and the command that makes it.
    """
    missing = next((name for name in _NEEDED if importlib.util.find_spec(name) is None), None)
    old = _what_is_old() if missing is None else None
    if missing is None and old is None:
        return
    venv = Path(os.environ.get("MEGATRON_RETOOL_VENV", ROOT / ".venv"))
    venv = venv if venv.is_absolute() else ROOT / venv
    activate = f"source {_shown(venv / 'bin' / 'activate')}"
    script = ROOT / "scripts" / "setup.sh"
    if not script.exists():
        wrong = f"lacks the package {missing}" if missing else f"has {old}"
        sys.exit(f"error: {sys.executable} {wrong}: install megatron-retool again, with the packages that it needs")
    setup = f"`bash {_shown(script)}`"
    if old is not None:
        python = Path(sys.prefix)
        cure = f"{setup} makes a new one" if python == venv else f"`{activate}` first, then `{program}`"
        if python == venv and sys.version_info[:2] < _PYTHON:
            cure = f"`rm -r {_shown(venv)}`, then {setup} makes a new one"
        sys.exit(f"error: the environment {_shown(python)} is of an earlier version: it has {old}: {cure}")
    if (venv / "bin" / "python").exists():
        cure = f"`{activate}` first, then `{program}`"
    else:
        cure = f"{setup} installs them into {_shown(venv)}; then `{activate}`"
    sys.exit(f"error: {sys.executable} lacks the package {missing}, which `{program}` needs: {cure}")


def _what_is_old() -> str | None:
    """What this environment has, and what is needed; None where that is there."""
    if sys.version_info[:2] < _PYTHON:
        return "Python {}.{}, and {}.{} is needed".format(*sys.version_info[:2], *_PYTHON)
    try:
        result = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:  # a checkout of it on PYTHONPATH
        return None
    if tuple(int(part) for part in re.findall(r"\d+", result)[:2]) < _MEGATRON_CORE:
        return "megatron-core {}, and {}.{} is needed".format(result, *_MEGATRON_CORE)
    return None


def _shown(path: Path) -> str:
    """Relative to the working directory where it lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
