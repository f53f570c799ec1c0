"""Folders of data files: which files a setting means that names a folder, as data sets are published, or a pattern."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from run_files.parquet_files import UnreadableFile

REASONING_GYM = "reasoning_gym:"
"""Begins a source of prompts that is no file."""
SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json")
MOST_FILES = 20_000
"""Of a folder, all kinds counted: more is a home directory, and no data set."""
_DESCRIPTIONS = re.compile(r"(dataset_infos?|dataset_dict|state|config|\w*_config|tokenizer|index|\S*\.index)\.json")
_SPLIT = re.compile(r"(?:^|[^a-z])(train(?:ing)?|test(?:ing)?|eval(?:uation)?|dev|val(?:id(?:ation)?)?)(?:[^a-z]|$)")
_SHOWN = 6


class DataError(UnreadableFile):
    """A data file cannot be used. The message names the file, the row and the column, and says what to do."""


def data_files(source: str) -> list[str]:
    """The files that ``source`` names: itself, those that its ``*`` and ``?`` match, or those of a folder.

    A folder is a data set as the Hugging Face hub has it: Parquet files or, without any, JSON Lines or JSON files, in
    the order of their names. A folder with several splits or configurations means none of them.

    Raises:
        DataError: there are no such files, or several splits; the message says what to name.
    """
    path = Path(source)
    if any(character in source for character in "*?") and not os.path.lexists(path):
        matched = sorted(str(file) for file in _matching(path) if file.is_file())
        if not matched:
            raise DataError(f"{source}: no file matches it")
        return matched
    if not path.is_dir():
        if not path.is_file():
            raise DataError(f"{source}: the file does not exist{_hint(source)}")
        if path.suffix not in SUFFIXES:
            raise DataError(f"{source}: expected a .parquet, .jsonl or .json file")
        return [source]
    files = _files_below(path)
    if not files:
        raise DataError(f"{source}: {_what_it_holds(path)}")
    groups: dict[tuple[str, str], list[Path]] = {}
    for file in files:
        below = file.relative_to(path)
        result = _SPLIT.search(below.stem.lower())
        groups.setdefault((below.parent.as_posix(), result[1] if result else ""), []).append(file)
    if len(groups) > 1:
        choices = [_pattern(path, group) for group in groups.values()]
        more = f" and {len(choices) - _SHOWN} more" if len(choices) > _SHOWN else ""
        raise DataError(
            f"{source} is a folder with several splits or data sets: name one of {', '.join(choices[:_SHOWN])}{more}"
        )
    return [str(file) for file in files]


def _matching(path: Path) -> list[Path]:
    parts = path.parts[1:] if path.is_absolute() else path.parts
    try:
        return list(Path(path.anchor).glob("/".join(parts)))
    except (ValueError, OSError):
        return []


def _files_below(folder: Path) -> list[Path]:
    """Its data files, of one kind, by name."""
    result: dict[str, list[Path]] = {suffix: [] for suffix in SUFFIXES}
    seen = 0
    for directory, directories, names in os.walk(folder):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        seen += len(names)
        if seen > MOST_FILES:
            raise DataError(f"{folder} holds more than {MOST_FILES} files: name the folder of the data set itself")
        for name in sorted(names):
            file = Path(directory) / name
            if name.startswith(".") or file.suffix not in result or _DESCRIPTIONS.fullmatch(name):
                continue
            result[file.suffix].append(file)
    kinds = [suffix for suffix in SUFFIXES if result[suffix]]
    if len(kinds) > 1 and ".json" in kinds:
        kinds.remove(".json")  # descriptions of the data, beside it
    if len(kinds) > 1:
        raise DataError(
            f"{folder} holds {' and '.join(kinds)} files, which may say the same: name the files, or "
            f"{folder}/…/*{kinds[0]}"
        )
    return result[kinds[0]] if kinds else []


def _pattern(folder: Path, group: Sequence[Path]) -> str:
    """What names a group by itself: its only file, its directory, or a pattern."""
    if len(group) == 1:
        return str(group[0])
    inside, names = group[0].parent, [file.name for file in group]
    start = os.path.commonprefix(names)
    same = inside != folder and len([file for file in inside.iterdir() if file.suffix == group[0].suffix]) == len(group)
    return str(inside) if same else str(inside / f"{start}*{group[0].suffix}")


def _what_it_holds(folder: Path) -> str:
    """Why a folder without data files is no data set, and what to do."""
    saved = folder / "dataset_dict.json"
    if saved.is_file() or next(folder.glob("*.arrow"), None) is not None:
        inner = "['train']" if saved.is_file() else ""
        return (
            "the folder was written by datasets' save_to_disk, whose Arrow files are not read here: write it as "
            f"Parquet, python -c \"from datasets import load_from_disk; load_from_disk('{folder}'){inner}"
            f".to_parquet('{folder.name}.parquet')\", and name that file"
        )
    if (folder / "config.json").is_file():
        return "the folder holds a model, where a file or folder of .parquet, .jsonl or .json files is expected"
    kinds = sorted({file.suffix for file in folder.iterdir() if file.is_file() and file.suffix})
    result = f", and has {', '.join(kinds[:_SHOWN])}" if kinds else ""
    return f"the folder holds no .parquet, .jsonl or .json file{result}: name one that does"


def _hint(source: str) -> str:
    """What may be meant by a name that is no file."""
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source) and not Path(source).suffix and not Path(source).parent.is_dir():
        return (
            f": if it is a data set of the hub, fetch it (hf download --repo-type dataset {source}) and name its folder"
        )
    return ""
