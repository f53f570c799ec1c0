"""Which runs lie below a folder, and nothing outside it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from run_files import CONFIG_FILE, ENVIRONMENT_FILE, METRICS_FILE, PIPELINE_FILE
from untrusted.errors import InputError

_DEPTH = 2
ALONE = "~"
"""In an address, the run that ``root`` itself is: browsers take its name "." out of a path."""
_READ = (CONFIG_FILE, METRICS_FILE, ENVIRONMENT_FILE, PIPELINE_FILE)


class NoSuchRun(InputError):
    """A name that is no run below the folder that is shown."""


def runs_below(root: Path) -> list[str]:
    """Names of the runs, as paths below ``root``; "." where ``root`` is a run itself.

    A run is a folder with a config.yaml, at most two levels down. Links that lead out of ``root`` are left out.
    """
    if _is_run(root, root):
        return ["."]
    result = []
    level = [root]
    for _ in range(_DEPTH):
        level = [child for parent in level for child in _folders(parent, root)]
        result += [child for child in level if _is_run(child, root)]
        level = [child for child in level if child not in result]
    return sorted(str(path.relative_to(root)) for path in result)


def run_directory(root: Path, name: str) -> Path:
    """The directory of a run that ``runs_below`` names.

    Raises:
        NoSuchRun: it names none, be it that it leads out of ``root``.
    """
    name = "." if name == ALONE else name
    if name not in runs_below(root):
        raise NoSuchRun(f"{name!r} is no run below {root.name}/: a run is a folder with a {CONFIG_FILE}")
    return root / name


def file_below(run_dir: Path, name: str) -> Path:
    """A file of a run.

    Raises:
        NoSuchRun: there is none such in the run's folder.
    """
    path = run_dir / name
    if "\0" in name or not path.resolve().is_relative_to(run_dir.resolve()) or not path.is_file():
        raise NoSuchRun(f"the run has no file {name!r}")
    return path


def check_below(root: Path, paths: Iterable[Path]) -> None:
    """Raise NoSuchRun where one of ``paths`` is a link that leads out of ``root``."""
    for path in paths:
        if not path.resolve().is_relative_to(root.resolve()):
            raise NoSuchRun(f"{path.parent.name}/{path.name} leads out of {root.name}/: show the folder that has both")


def _is_run(folder: Path, root: Path) -> bool:
    if not (folder / CONFIG_FILE).is_file():
        return False
    try:
        check_below(root, (folder / name for name in _READ))
    except NoSuchRun:
        return False
    return True


def _folders(parent: Path, root: Path) -> list[Path]:
    try:
        children = sorted(child for child in parent.iterdir() if child.is_dir() and not child.name.startswith("."))
    except OSError:
        return []
    return [child for child in children if child.resolve().is_relative_to(root.resolve())]
