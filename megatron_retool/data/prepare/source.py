"""The files of a data set: from the hub, whose cache keeps them, or a copy that lies here."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_retool.data.files import DataError
from megatron_retool.data.prepare.batches import SUFFIXES
from megatron_retool.data.prepare.datasets import DataSet, PreparedFile

_NO_DATA = ("dataset_infos.json", "dataset_info.json", "state.json", "config.json")
"""JSON files beside the data."""


@dataclass(frozen=True)
class SourceFile:
    """A file to read, and its name in messages."""

    path: Path
    name: str
    """In its repository or directory; messages use it."""


@dataclass(frozen=True)
class DataSetSource:
    """Where a data set was read.

    Attributes:
        where: the repository on the hub, or the local path.
        revision: the commit on the hub; None for a local copy.
        files: by the output that they are for.
    """

    where: str
    revision: str | None
    files: dict[str, list[SourceFile]]


def local_source(data_set: DataSet, path: Path) -> DataSetSource:
    """``path``: a directory with the data set's files at any depth, or a single file.

    Raises:
        DataError: nothing is there, or nothing for one of the outputs.
    """
    if path.is_file():
        result = {path.name: path}
    elif path.is_dir():
        result = {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*")) if file.is_file()}
    else:
        raise DataError(f"--from {path}: there is no such file or directory")
    outputs = data_set.outputs
    if path.is_file():
        outputs = tuple(each for each in outputs if each.is_source(path.name))
        if not outputs:
            either = " or ".join(output.name for output in data_set.outputs)
            raise DataError(f"--from {path}: the name does not tell whether it is {either}: name a directory")
    names = _data_files(list(result), outputs, f"--from {path}")
    files = {output: [SourceFile(result[name], name) for name in chosen] for output, chosen in names.items()}
    return DataSetSource(str(path.resolve()), None, files)


def hub_source(data_set: DataSet, repository: str, revision: str | None = None) -> DataSetSource:
    """Download what is not in the hub's cache yet; a download that was cut off continues where it ended.

    HF_ENDPOINT in the environment names another hub than the public one.

    Args:
        revision: branch, tag or commit; None: the main branch.

    Raises:
        DataError: the hub does not answer, or has no such repository, revision or files.
    """
    import httpx
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    endpoint = os.environ.get("HF_ENDPOINT") or None
    at = f"{repository} on the hub" + (f" at {revision}" if revision else "")
    try:
        info = HfApi(endpoint=endpoint).dataset_info(repository, revision=revision)
        names = _data_files([file.rfilename for file in info.siblings or ()], data_set.outputs, at)
        paths = {
            name: hf_hub_download(repository, name, repo_type="dataset", revision=info.sha, endpoint=endpoint)
            for name in dict.fromkeys(name for chosen in names.values() for name in chosen)
        }
    except DataError:
        raise
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, httpx.HTTPError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{at}: {reason}. What was downloaded is kept, the same command continues; "
            "without a way to the hub, name a local copy with --from"
        ) from error
    files = {output: [SourceFile(Path(paths[name]), name) for name in chosen] for output, chosen in names.items()}
    return DataSetSource(repository, info.sha, files)


def _data_files(names: Sequence[str], outputs: Sequence[PreparedFile], where: str) -> dict[str, list[str]]:
    """The names of data files by output; of several kinds the preferred one."""
    chosen: dict[str, list[str]] = {}
    for output in outputs:
        for suffix in SUFFIXES:
            of_kind = [name for name in names if _is_data(name, suffix) and output.is_source(name)]
            if of_kind:
                chosen[output.name] = sorted(of_kind)
                break
        else:
            raise DataError(
                f"{where}: there is no {', '.join(SUFFIXES)} file for {output.name}.parquet among "
                f"{', '.join(sorted(names)[:8]) or 'no files at all'}"
            )
    return chosen


def _is_data(name: str, suffix: str) -> bool:
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") for part in path.parts)
    return path.suffix == suffix and not hidden and path.name not in _NO_DATA


def describe_files(files: Sequence[SourceFile]) -> list[dict[str, Any]]:
    """Name, size and SHA-256 of each."""
    return [{"name": file.name, "bytes": file.path.stat().st_size, "sha256": sha256_of(file.path)} for file in files]


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of the file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
