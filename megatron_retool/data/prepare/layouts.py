"""What a row of each published data set becomes: pure functions of a batch and its rows.

A layout names the columns that it reads, gives each row a key (rows of equal keys repeat one another) and an answer,
and makes a row of ours from one that is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from answer_equality.expressions import Text
from answer_equality.reading import reading
from answer_equality.score import extract_answer, quick_verdict
from megatron_retool.data.chat_template import drop_none
from megatron_retool.data.files import DataError, check_text, decode_json
from megatron_retool.data.prepare.aime import AimeProblem, aime_problem
from megatron_retool.data.prepare.batches import Batch
from megatron_retool.data.prompt_files import (
    cell_text,
    check_prompt_type,
    ground_truth_of,
    prompt_keys,
    question_messages,
)
from megatron_retool.data.tagged_traces import TraceError, conversation, parse_trace
from tools.code_interpreter_tool import CodeInterpreterTool

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
PROMPTS = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", _MESSAGES),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        (
            "extra_info",
            pa.struct(
                [
                    ("index", pa.int64()),
                    ("split", pa.string()),
                    ("problem_id", pa.string()),
                    ("level", pa.string()),
                    ("subject", pa.string()),
                    ("year", pa.int64()),
                    ("contest", pa.string()),
                    ("problem_number", pa.int64()),
                ]
            ),
        ),
    ]
)
"""verl's columns. ``index`` is the row of the source, counted over its files; what a source does not know is null."""
CONVERSATIONS = pa.schema(
    [
        ("messages", pa.string()),
        ("tools", pa.string()),
        ("extra_info", pa.struct([("index", pa.int64()), ("tool_calls", pa.int64())])),
    ]
)
"""For supervised fine-tuning; messages and tools are JSON text."""

_QUESTION_MARK = "*user question:*"
_MAX_ANSWER_CHARACTERS = 1000
_AIME_ANSWER = re.compile(r"\$?(\d{1,3})(?:\^\{?\\circ\}?)?\$?", re.ASCII)


class RowDropped(Exception):
    """The row cannot be used. The text is the reason, one of a few, to count by."""


@dataclass(frozen=True)
class Place:
    """Of a row."""

    file: str
    row: int
    """Of the file."""
    index: int
    """Of the source."""
    split: str

    def error(self, column: str, reason: str) -> DataError:
        """An error that names the file, the row and the column."""
        return DataError(f"{self.file}, row {self.row}, column {column!r}: {reason}")


class Layout(Protocol):
    """One way in which a data set is published."""

    schema: pa.Schema
    """Of the rows that ``row`` makes."""

    @property
    def columns(self) -> Sequence[str]:
        """Read from the file."""
        ...

    def keys(self, batch: Batch) -> list[str]:
        """A text for each row of the batch; rows whose texts are equal repeat one another.

        Raises:
            DataError: a cell is missing or of the wrong type.
        """
        ...

    def answers(self, batch: Batch) -> list[str]:
        """For each row, what must be equal in rows that repeat one another."""
        ...

    def row(self, place: Place, cells: dict[str, Any]) -> dict[str, Any]:
        """The row of ours for ``cells``.

        Raises:
            RowDropped: it is left out, and why.
            DataError: a cell is not what its column should hold.
        """
        ...


def text_column(batch: Batch, column: str, numbers: bool = False) -> list[str]:
    """The column's cells as text, none of which may be missing or blank.

    Args:
        numbers: it may hold numbers as well.

    Raises:
        DataError: naming file, row and column.
    """
    cells = batch.rows.column(column)
    kind = cells.type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not is_text and not (numbers and (pa.types.is_integer(kind) or pa.types.is_floating(kind))):
        raise DataError(f"{batch.file}, row {batch.first}, column {column!r}: has type {kind}; expected text")
    texts = []
    for row, cell in enumerate(cells.to_pylist(), batch.first):
        text = cell_text(cell)
        if cell is None or not text:
            raise DataError(f"{batch.file}, row {row}, column {column!r}: the cell is empty")
        texts.append(text)
    return texts


def is_readable(answer: str) -> bool:
    """Whether the grader reads ``answer`` as mathematics, and not only as plain words."""
    if quick_verdict("0", answer) is not None:  # an integer
        return True
    return len(answer) <= _MAX_ANSWER_CHARACTERS and not isinstance(reading(answer, units=True), Text)


class VerlPrompts:
    """verl's columns, as DAPO-Math-17k and BytedTsinghua-SIA/AIME-2024 have them. The prompt stays as it is."""

    schema = PROMPTS

    def __init__(self, file: str, found: pa.Schema, data_source: str, year: int | None = None) -> None:
        """``data_source`` and ``year`` are what the rows get; DAPO's name themselves."""
        check_prompt_type(file, found, "prompt")
        self.columns = [name for name in ("prompt", "reward_model", "data_source", "extra_info") if name in found.names]
        self._data_source, self._year = data_source, year

    def keys(self, batch: Batch) -> list[str]:
        """What tells the rows' prompts apart."""
        return prompt_keys(batch.file, batch.rows.column("prompt"), batch.first, "prompt")

    def answers(self, batch: Batch) -> list[str]:
        """The rows' ground truths."""
        column = batch.rows.column("reward_model")
        if pa.types.is_struct(column.type) and "ground_truth" in {field.name for field in column.type}:
            truths = pc.struct_field(column, "ground_truth").to_pylist()
            if None not in truths:
                return [str(truth) for truth in truths]
        return [str(ground_truth_of(batch.file, row, cell)) for row, cell in enumerate(column.to_pylist(), batch.first)]

    def row(self, place: Place, cells: dict[str, Any]) -> dict[str, Any]:
        """The row as training reads it.

        Raises:
            RowDropped: the grader cannot read the answer.
            DataError: a cell has another form.
        """
        truth = str(ground_truth_of(place.file, place.row, cells["reward_model"])).strip()
        if not is_readable(truth):
            raise RowDropped("the grader cannot read the answer")
        extra = decode_json(cells.get("extra_info") or {}, place.file, place.row, "extra_info")
        identity = extra.get("index") if isinstance(extra, dict) else None
        prompt = cells["prompt"]
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt.strip()}]
        return prompt_row(
            place,
            str(self._data_source if self._year else cells.get("data_source") or self._data_source),
            prompt,
            truth,
            problem_id=None if identity is None else str(identity),
            year=self._year,
        )


@dataclass(frozen=True)
class Questions:
    """A bare question and its answer, under the names that the data set has for them.

    Args:
        question, answer: columns.
        others: column of the source -> field of extra_info.
        instruction: added below the question.
    """

    data_source: str
    question: str
    answer: str
    others: dict[str, str]
    instruction: str
    schema = PROMPTS

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        return [self.question, self.answer, *self.others]

    def keys(self, batch: Batch) -> list[str]:
        """What tells the rows' questions apart."""
        return text_column(batch, self.question)

    def answers(self, batch: Batch) -> list[str]:
        """The rows' answers as text."""
        return text_column(batch, self.answer, numbers=True)

    def row(self, place: Place, cells: dict[str, Any]) -> dict[str, Any]:
        """The row as training reads it: the question with the instruction, and the answer."""
        truth = self.truth(cell_text(cells[self.answer]))
        prompt = question_messages(cells[self.question], self.instruction)
        others = {field: cells[column] for column, field in self.others.items() if cells[column] is not None}
        return prompt_row(place, self.data_source, prompt, truth, **self.details(place, others))

    def truth(self, answer: str) -> str:
        """What the grader compares with."""
        return answer

    def details(self, place: Place, others: dict[str, Any]) -> dict[str, Any]:
        """Fields of extra_info."""
        return {field: str(value) for field, value in others.items()}


@dataclass(frozen=True)
class WorkedAnswers(Questions):
    """GSM8K: the answer's text ends with #### and the number."""

    def answers(self, batch: Batch) -> list[str]:
        """What follows the last #### of each worked answer."""
        return [answer.rpartition("####")[2] for answer in super().answers(batch)]

    def truth(self, answer: str) -> str:
        """The number after the last ####.

        Raises:
            RowDropped: there is none.
        """
        _, mark, number = answer.rpartition("####")
        number = number.strip().replace(",", "")
        if not mark or not number:
            raise RowDropped("no #### before the answer")
        return number


@dataclass(frozen=True)
class AimeQuestions(Questions):
    """AIME, one year. The problem's number comes from what the file has (aime.py)."""

    year: int = 0

    def truth(self, answer: str) -> str:
        """The answer, an integer from 0 to 999.

        Raises:
            RowDropped: it is something else.
        """
        result = _AIME_ANSWER.fullmatch(answer)
        if result is None:
            raise RowDropped("the answer is no integer from 0 to 999")
        return result[1]

    def details(self, place: Place, others: dict[str, Any]) -> dict[str, Any]:
        """Year, contest and number of the problem.

        Raises:
            DataError: it is of another year than the file.
        """
        stated = str(others.get("year", ""))
        problem = aime_problem(others, place.file, place.row, self.year)
        result = problem.year if problem is not None else int(stated) if stated.isdecimal() else self.year
        if result != self.year:
            raise place.error(self.question, f"a problem of {result}, not of {self.year}: name that year's file")
        if problem is None:
            return {"problem_id": str(others.get("id", place.index)), "year": self.year}
        return _aime_details(problem)


def _aime_details(problem: AimeProblem) -> dict[str, Any]:
    return {
        "problem_id": problem.name,
        "year": problem.year,
        "contest": problem.contest,
        "problem_number": problem.number,
    }


class RetoolConversations:
    """ReTool-SFT: one user and one assistant message with code between tags, or the multi-turn form of it."""

    schema = CONVERSATIONS

    def __init__(self, file: str, found: pa.Schema) -> None:
        self.columns = ["messages"]
        self._tools = json.dumps([CodeInterpreterTool.schema])

    def keys(self, batch: Batch) -> list[str]:
        """What tells the conversations apart: all of their messages."""
        return [json.dumps(cell) for cell in batch.rows.column("messages").to_pylist()]

    def answers(self, batch: Batch) -> list[str]:
        """Nothing: a conversation holds its answer."""
        return [""] * batch.rows.num_rows

    def row(self, place: Place, cells: dict[str, Any]) -> dict[str, Any]:
        """The conversation with each tool result as a turn of its own.

        Raises:
            RowDropped: it ends without an answer.
            DataError: its messages have another form.
        """
        messages = decode_json(cells["messages"], place.file, place.row, "messages")
        check_text(messages, place.file, place.row, "messages")
        messages = drop_none(messages) if isinstance(messages, list) else messages
        if not isinstance(messages, list) or not all(
            isinstance(message, dict) and isinstance(message.get("content", ""), str) and "role" in message
            for message in messages
        ):
            raise place.error("messages", f"expected a list of messages with role and content, found {messages!r:.60}")
        if not any(message["role"] == "tool" for message in messages):
            messages = _as_turns(place, messages)
        answer = messages[-1]
        if answer["role"] != "assistant" or extract_answer(answer.get("content", "")) is None:
            raise RowDropped("no final answer")
        calls = sum(len(message.get("tool_calls") or ()) for message in messages)
        if not calls:
            raise RowDropped("no code")
        return {
            "messages": json.dumps(messages),
            "tools": self._tools,
            "extra_info": {"index": place.index, "tool_calls": calls},
        }


def _as_turns(place: Place, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A question and its tagged trace as a conversation with tool calls."""
    roles = [str(message["role"]) for message in messages]
    if roles[-2:] != ["user", "assistant"]:
        result = ", ".join(roles) or "none"
        raise place.error("messages", f"expected a user's and an assistant's message, found {result}")
    question, text = (message.get("content", "") for message in messages[-2:])
    _, _, asked = question.rpartition(_QUESTION_MARK)
    try:
        trace = parse_trace(text)
    except TraceError as error:
        raise RowDropped(error.reason) from error
    outputs = [call.output for call in trace.calls if call.output is not None]
    if len(outputs) < len(trace.calls):
        raise RowDropped("code without its output")
    asked = asked.replace("<answer>", "").replace("</answer>", "").strip()
    return conversation([{"role": "user", "content": asked}], trace, outputs)


def prompt_row(
    place: Place, data_source: str, prompt: list[dict[str, Any]], truth: str, **extra: Any
) -> dict[str, Any]:
    """A row of PROMPTS; ``extra`` goes into extra_info."""
    return {
        "data_source": data_source,
        "prompt": prompt,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": place.index, "split": place.split, **extra},
    }
