"""Whether this Python has the project's packages. Standard library only: it is asked before others are imported."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_NEEDED = ("rich", "omegaconf", "torch", "megatron", "transformers")


def require_packages(program: str) -> None:
    """Nothing where the packages are there.

    Args:
        program: what was called, as a user would type it after activating the environment.

    Raises:
        SystemExit: with one line that names the environment and the command that makes it.
    """
    missing = next((name for name in _NEEDED if importlib.util.find_spec(name) is None), None)
    if missing is None:
        return
    venv = Path(os.environ.get("MEGATRON_RETOOL_VENV", _ROOT / ".venv"))
    venv = venv if venv.is_absolute() else _ROOT / venv
    activate = f"source {_shown(venv / 'bin' / 'activate')}"
    if (venv / "bin" / "python").exists():
        cure = f"`{activate}` first, then `{program}`"
    else:
        cure = f"`bash {_shown(_ROOT / 'scripts' / 'setup.sh')}` installs them into {_shown(venv)}; then `{activate}`"
    sys.exit(f"error: {sys.executable} lacks the package {missing}, which `{program}` needs: {cure}")


def _shown(path: Path) -> str:
    """Relative to the working directory where it lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
