"""The engines of a run that is training, and requests to add or remove some.

    engines.json                      the run: its process and its engines, written again with each change
    engine_requests/NAME.json         a command: {"add": 1} or {"remove": [0]}
    engine_requests/NAME.answer       the run: {"done": true, "text": "…"}; the command deletes it

Files need no open port, and who may write into the run's directory may change the run in any case.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_retool.errors import InputError
from run_files.atomic_files import write_text
from untrusted import load_own_json, quoted

FILE = "engines.json"
REQUESTS = "engine_requests"
MOST_ADDED = 64
"""Engines that one request may add."""
_LARGEST = 2**20
"""Bytes of a file that is read."""


@dataclass(frozen=True)
class RunEngine:
    """An engine that serves. ``gpus``: places on its node."""

    number: int
    url: str
    node: int
    gpus: tuple[int, ...]


@dataclass(frozen=True)
class EngineRequest:
    """How many engines are to be added, or the numbers of those that are to go."""

    add: int = 0
    remove: tuple[int, ...] = ()

    @classmethod
    def parse(cls, value: Any) -> EngineRequest:
        """Raise ValueError where ``value`` is no request."""
        if isinstance(value, dict) and len(value) == 1:
            add, remove = value.get("add"), value.get("remove")
            if type(add) is int and 1 <= add <= MOST_ADDED:
                return cls(add=add)
            if isinstance(remove, list) and remove and all(type(number) is int and number >= 0 for number in remove):
                return cls(remove=tuple(dict.fromkeys(remove)))
        raise ValueError(
            f"{quoted(value)} is neither {{'add': N}}, N from 1 to {MOST_ADDED}, nor {{'remove': [NUMBER, …]}}"
        )

    def text(self) -> str:
        """The request as its file has it."""
        return json.dumps({"add": self.add} if self.add else {"remove": list(self.remove)})


@dataclass(frozen=True)
class Answer:
    """Whether a request was carried out, and what became of it."""

    done: bool
    text: str


def begin(run_dir: Path) -> None:
    """Forget requests that an earlier process of the run has not answered."""
    shutil.rmtree(run_dir / REQUESTS, ignore_errors=True)
    (run_dir / REQUESTS).mkdir(parents=True)


def write_engines(run_dir: Path, engines: Sequence[RunEngine]) -> None:
    """Say which engines the run of this process has."""
    result = {"host": socket.gethostname(), "process": os.getpid(), "engines": [asdict(engine) for engine in engines]}
    write_text(run_dir / FILE, json.dumps(result, indent=1) + "\n")


def end(run_dir: Path) -> None:
    """The run has no engines any more."""
    (run_dir / FILE).unlink(missing_ok=True)
    shutil.rmtree(run_dir / REQUESTS, ignore_errors=True)


def read_engines(run_dir: Path) -> list[RunEngine]:
    """The engines of the run in ``run_dir``, in order of their numbers.

    Raises:
        InputError: no run with engines is at work there, or the file is damaged.
    """
    path = run_dir / FILE
    if not path.is_file():
        raise InputError(
            f"{path} is missing: no training is at work in {run_dir}, or it has not started its engines yet"
        )
    try:
        result = _read(path)
        host, process = str(result["host"]), int(result["process"])
        engines = [
            RunEngine(int(each["number"]), str(each["url"]), int(each["node"]), tuple(map(int, each["gpus"])))
            for each in result["engines"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged ({error!r}): it is written again when the run starts") from error
    if host == socket.gethostname() and not os.path.exists(f"/proc/{process}"):
        raise InputError(f"the run in {run_dir} is not at work: its process {process} has ended")
    return engines


def ask(run_dir: Path, request: EngineRequest) -> Path:
    """Leave a request for the run; ``take_answer`` has what becomes of it."""
    path = run_dir / REQUESTS / f"{time.time_ns()}-{os.getpid()}.json"
    write_text(path, request.text())
    return path


def take_answer(request: Path) -> Answer | None:
    """The run's answer to ``request``, which is deleted; None: there is none yet."""
    path = request.with_suffix(".answer")
    if not path.is_file():
        return None
    result = _read(path)
    path.unlink()
    return Answer(bool(result["done"]), str(result["text"]))


def withdraw(request: Path) -> None:
    """Take back a request that the run has not begun to carry out."""
    request.unlink(missing_ok=True)


def take_requests(run_dir: Path) -> list[tuple[Path, EngineRequest]]:
    """Requests that wait, the oldest first, which are deleted. One that cannot be read is answered with the reason."""
    result = []
    for path in sorted((run_dir / REQUESTS).glob("*.json")):
        try:
            request = EngineRequest.parse(_read(path))
        except (OSError, ValueError) as error:
            answer(path, Answer(False, str(error)))
        else:
            result.append((path, request))
        path.unlink(missing_ok=True)
    return result


def answer(request: Path, said: Answer) -> None:
    """Tell the command what became of its request."""
    write_text(request.with_suffix(".answer"), json.dumps(asdict(said)))


def _read(path: Path) -> Any:
    size = path.stat().st_size
    if size > _LARGEST:
        raise ValueError(f"{path.name} has {size} bytes, and at most {_LARGEST} are read")
    return load_own_json(path.read_bytes())
