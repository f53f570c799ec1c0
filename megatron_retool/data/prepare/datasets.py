"""The data sets that `data prepare` knows: where they are published, and what is made of their files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from megatron_retool.data.files import DataError
from megatron_retool.data.prepare.layouts import (
    AimeQuestions,
    Layout,
    Questions,
    RetoolConversations,
    VerlPrompts,
    WorkedAnswers,
)

_HELD_OUT = 32
"""One conversation in so many is held out, where the source has no split for it."""


@dataclass(frozen=True)
class PreparedFile:
    """A file that is made.

    Attributes:
        name: of the file, without suffix; also the split in extra_info.
        source: pattern that the names of its source files match.
        takes: which rows it takes, by their keys' digests; None: all.
    """

    name: str
    source: str = ""
    takes: Callable[[bytes], bool] | None = None

    def is_source(self, file: str) -> bool:
        """Whether the file of this name in the source is read for it."""
        return re.search(self.source, file) is not None


@dataclass(frozen=True)
class DataSet:
    """A published data set.

    Attributes:
        repository: its name on the hub.
        layout: of a file: (name, schema, instruction) -> how its rows are read.
    """

    name: str
    repository: str
    outputs: tuple[PreparedFile, ...]
    layout: Callable[[str, pa.Schema, str], Layout]


def digest_of(key: str) -> bytes:
    """16 bytes that are equal where keys are."""
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


def _is_held_out(digest: bytes) -> bool:
    return digest[0] % _HELD_OUT == 0


def _require(file: str, found: pa.Schema, *names: str) -> None:
    for name in names:
        if name not in found.names:
            raise DataError(f"{file}: column {name!r} is missing; the file has {', '.join(found.names)}")


def _retool(file: str, found: pa.Schema, instruction: str) -> Layout:
    _require(file, found, "messages")
    return RetoolConversations(file, found)


def _dapo(file: str, found: pa.Schema, instruction: str) -> Layout:
    _require(file, found, "prompt", "reward_model")
    return VerlPrompts(file, found, "math_dapo")


def _aime(year: int) -> Callable[[str, pa.Schema, str], Layout]:
    def layout(file: str, found: pa.Schema, instruction: str) -> Layout:
        if {"prompt", "reward_model"} <= set(found.names):
            return VerlPrompts(file, found, f"aime_{year}", year)
        by_lower = {name.lower(): name for name in found.names}
        question = by_lower.get("problem") or by_lower.get("question")
        if question is None or "answer" not in by_lower:
            _require(file, found, "problem" if question is None else "answer")
        others = {by_lower[name]: name for name in ("url", "id", "problem_idx", "year") if name in by_lower}
        return AimeQuestions(f"aime_{year}", str(question), by_lower["answer"], others, instruction, year)

    return layout


def _gsm8k(file: str, found: pa.Schema, instruction: str) -> Layout:
    _require(file, found, "question", "answer")
    return WorkedAnswers("gsm8k", "question", "answer", {}, instruction)


def _math_500(file: str, found: pa.Schema, instruction: str) -> Layout:
    _require(file, found, "problem", "answer")
    fields = {"level": "level", "subject": "subject", "unique_id": "problem_id"}
    others = {column: field for column, field in fields.items() if column in found.names}
    return Questions("math_500", "problem", "answer", others, instruction)


_TEST = (PreparedFile("test"),)
DATA_SETS = {
    each.name: each
    for each in (
        DataSet(
            "retool-sft",
            "JoeYing/ReTool-SFT",
            (
                PreparedFile("train", takes=lambda digest: not _is_held_out(digest)),
                PreparedFile("val", takes=_is_held_out),
            ),
            _retool,
        ),
        DataSet("dapo-math-17k", "BytedTsinghua-SIA/DAPO-Math-17k", (PreparedFile("train"),), _dapo),
        DataSet("aime-2024", "Maxwell-Jia/AIME_2024", _TEST, _aime(2024)),
        DataSet("aime-2025", "yentinglin/aime_2025", _TEST, _aime(2025)),
        DataSet(
            "gsm8k",
            "openai/gsm8k",
            (PreparedFile("train", r"^(?!.*socratic).*train"), PreparedFile("test", r"^(?!.*socratic).*test")),
            _gsm8k,
        ),
        DataSet("math-500", "HuggingFaceH4/MATH-500", _TEST, _math_500),
    )
}
"""By the name that the command takes."""
