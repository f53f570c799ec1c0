"""Reading prompts: verl's parquet columns, DAPO-Math-17k, AIME 2024 and 2025, and reasoning-gym's generators.

A source's columns tell what it looks like:

* verl's layout, which DAPO-Math-17k shares: prompt (a list of messages, JSON text of one, or a bare question),
  reward_model {ground_truth, …}, and optionally data_source and extra_info, in which tools_kwargs {tool:
  {create_kwargs, execute_kwargs, …}}, need_tools_kwargs and tool_selection (names of the prompt's tools) are verl's;
* a question's layout, as AIME, MATH-500, GSM8K and MMLU are published: problem or question, and answer (in any
  capitals). A worked answer that ends with ``#### 72`` gives 72; choices are shown below the question, and the answer
  (their number from 0, a letter, or a choice's own text) is then a letter;
Pictures, sounds and films are refused. Columns that are not read are named (``ReadCounts.unread``).

* ``reasoning_gym:<task>?size=1000&seed=0&<setting>=<value>`` in the place of a path: problems that the reasoning-gym
  library makes, each with its own verifier.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megatron_retool.data.chat_template import drop_none
from megatron_retool.data.files import DataError, check_text, data_files, decode_json, read_table, require_columns
from megatron_retool.data.folders import REASONING_GYM as REASONING_GYM
from run_files.parquet_files import damage_named
from untrusted import load_json

PROBLEM_COLUMNS = ("problem", "question")
CHOICE_COLUMNS = ("choices", "options")
MEDIA_COLUMNS = ("image", "images", "audio", "audios", "video", "videos")
VERL_COLUMNS = ("reward_model", "data_source", "ability", "extra_info")
_HASHES = re.compile(r"(?:^|\n)####\s*(\S[^\n]*?)\s*$")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_BATCH_ROWS = 65536


# A reader yields, for a stretch of rows: texts that are equal where the prompts are, texts that are equal where all
# other columns are, the answers, and a function that builds the rows at given places. Only distinct rows are ever
# built: DAPO-Math-17k has a hundred copies of each.
_Stretch = tuple[list[str], list[str], list[str], Any]


@dataclass(frozen=True)
class RawPrompt:
    """One row of a source before tokenisation."""

    file: str
    row: int
    data_source: str
    messages: list[dict[str, Any]]
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class ReadCounts:
    """What became of the rows."""

    rows: int = 0
    duplicates: int = 0
    conflicting_answers: int = 0
    """Rows that are kept although an earlier one has the same prompt, with another ground truth."""
    unread: list[str] = field(default_factory=list)
    """Columns that are not read, each as "column of source"."""


def read_prompts(
    sources: Sequence[str], prompt_key: str = "prompt", instruction: str = "", deduplicate: bool = True
) -> tuple[list[RawPrompt], ReadCounts]:
    """The prompts of ``sources`` in order, distinct ones only where ``deduplicate`` is set.

    Args:
        sources: what ``data_files`` takes (files, folders, patterns) and ``reasoning_gym:`` specifications.
        prompt_key: the column of verl's layout that holds the prompt.
        instruction: added below questions of sources that hold bare questions.
        deduplicate: of rows that are equal in every column, keep the first, over all sources together. Rows of an
            environment that share a prompt, and differ elsewhere, are different tasks.

    Raises:
        DataError: naming source, row and column.
    """
    counts = ReadCounts()
    seen: set[tuple[str, str]] = set()
    answer_of: dict[str, str] = {}
    prompts: list[RawPrompt] = []
    for source in sources:
        for file in [source] if source.startswith(REASONING_GYM) else data_files(source):
            for keys, others, answers, take in _stretches(file, prompt_key, instruction, counts.unread):
                kept = []
                for place, (key, other, answer) in enumerate(zip(keys, others, answers, strict=True)):
                    if deduplicate and (key, other) in seen:
                        counts.duplicates += 1
                        continue
                    seen.add((key, other))
                    counts.conflicting_answers += answer_of.setdefault(key, answer) != answer
                    kept.append(place)
                counts.rows += len(keys)
                with damage_named(file):
                    prompts += take(kept)
    return prompts, counts


def _stretches(source: str, prompt_key: str, instruction: str, unread: list[str]) -> Iterator[_Stretch]:
    """What a reader yields, with the source's name in every error of reading, as a date that Python does not know."""
    if source.startswith(REASONING_GYM):
        reader = _read_reasoning_gym(source, instruction)
    else:
        reader = _read_file(source, prompt_key, instruction, unread)
    while True:
        try:
            with damage_named(source):
                stretch = next(reader)
        except StopIteration:
            return
        yield stretch


def _read_file(source: str, prompt_key: str, instruction: str, unread: list[str]) -> Iterator[_Stretch]:
    table = read_table(source)
    _check_media(source, table)
    by_lower = {name.lower(): name for name in table.column_names}
    problem = next((by_lower[name] for name in PROBLEM_COLUMNS if name in by_lower), None)
    if prompt_key not in table.column_names and problem is not None and "answer" in by_lower:
        reader = _competition_rows(source, table, problem, by_lower, instruction)
    else:
        require_columns(source, table, (prompt_key,), ": data.prompt_key names the column of the prompts")
        cure = ": prompts have their answer there, as {ground_truth: …}, or bare questions theirs in a column answer"
        require_columns(source, table, ("reward_model",), cure)
        unread += [f"{name} of {source}" for name in table.column_names if name not in (prompt_key, *VERL_COLUMNS)]
        reader = _verl_rows(source, table, prompt_key, instruction)
    yield from reader


def _check_media(source: str, table: pa.Table) -> None:
    """Raise DataError where a row has a picture, a sound or a film."""
    for name in table.column_names:
        if name.lower() not in MEDIA_COLUMNS:
            continue
        for row, cell in enumerate(table.column(name)):
            if cell.as_py() not in (None, "", [], {}):
                raise DataError(
                    f"{source}, row {row}, column {name!r}: the row has more than text, and only text is trained on: "
                    "leave out such rows, or the column where the text says it all"
                )


# ---- verl's layout ------------------------------------------------------------------------------------------------


def _verl_rows(source: str, table: pa.Table, prompt_key: str, instruction: str) -> Iterator[_Stretch]:
    check_prompt_type(source, table.schema, prompt_key)
    first = 0
    for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
        column = batch.column(prompt_key)
        keys = prompt_keys(source, column, first, prompt_key)
        answers = [
            str(ground_truth_of(source, first + place, reward_model))
            for place, reward_model in enumerate(batch.column("reward_model").to_pylist())
        ]

        def take(places: list[int], batch: pa.RecordBatch = batch, first: int = first) -> list[RawPrompt]:
            rows = batch.take(pa.array(places, pa.int64())).to_pylist()
            return [
                _verl_row(source, first + place, row, prompt_key, instruction)
                for place, row in zip(places, rows, strict=True)
            ]

        yield keys, other_keys(batch, prompt_key), answers, take
        first += batch.num_rows


def check_prompt_type(source: str, schema: pa.Schema, prompt_key: str) -> None:
    """Raise DataError where the column of prompts holds neither messages nor text."""
    kind = schema.field(prompt_key).type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        fields = kind.value_type
        if pa.types.is_struct(fields) and {"role", "content"} <= {f.name for f in fields}:
            texts = (fields.field("role").type, fields.field("content").type)
            if all(pa.types.is_string(t) or pa.types.is_large_string(t) for t in texts):
                return
    raise DataError(
        f"{source}: column {prompt_key!r} has type {kind}; expected a list of messages {{role, content}} with text, "
        "or text"
    )


def prompt_keys(source: str, column: pa.Array, first: int, prompt_key: str) -> list[str]:
    """A text for each row that is equal where the prompts are equal.

    Args:
        first: row of the source that ``column`` begins with.

    Raises:
        DataError: a prompt is missing or empty.
    """

    def fail(places: np.ndarray, reason: str) -> None:
        if len(places):
            raise DataError(f"{source}, row {first + int(places[0])}, column {prompt_key!r}: {reason}")

    fail(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)), "the prompt is missing")
    if not pa.types.is_list(column.type) and not pa.types.is_large_list(column.type):
        blank = pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(column)), 0)
        fail(np.flatnonzero(blank.to_numpy(zero_copy_only=False)), "the prompt is empty")
        return column.to_pylist()

    parents = pc.list_parent_indices(column).to_numpy(zero_copy_only=False)
    messages = pc.list_flatten(column)
    roles, contents = pc.struct_field(messages, "role"), pc.struct_field(messages, "content")
    for name, values in (("role", roles), ("content", contents)):
        fail(parents[values.is_null().to_numpy(zero_copy_only=False)], f"a message has no {name}")
    filled = pc.greater(pc.utf8_length(pc.utf8_trim_whitespace(contents)), 0)
    asked = pc.and_(pc.not_equal(roles, "system"), filled).to_numpy(zero_copy_only=False)
    has_question = np.zeros(len(column), bool)
    has_question[parents[asked]] = True
    fail(np.flatnonzero(~has_question), "the prompt is empty: no message besides the system's has text")

    counts = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
    texts = pc.binary_join_element_wise(roles.cast(pa.string()), contents.cast(pa.string()), "\x1f")
    return pc.binary_join(pa.ListArray.from_arrays(offsets, texts), "\x1e").to_pylist()


def other_keys(batch: pa.RecordBatch, prompt_key: str) -> list[str]:
    """A text for each row that is equal where all columns but the prompt's are equal."""
    leaves = [batch.column(name) for name in sorted(batch.schema.names) if name != prompt_key]
    while any(pa.types.is_struct(leaf.type) for leaf in leaves):
        leaves = [part for leaf in leaves for part in (leaf.flatten() if pa.types.is_struct(leaf.type) else [leaf])]
    texts = [_as_text(leaf) for leaf in leaves]
    joined = pc.binary_join_element_wise(
        *texts, pa.scalar("\x1f", pa.large_string()), null_handling="replace", null_replacement="\x00"
    )
    result: list[str] = joined.to_pylist()
    return result


def _as_text(leaf: pa.Array) -> pa.Array:
    kind = leaf.type
    if pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return leaf.cast(pa.large_string())
    return pa.array([None if value is None else repr(value) for value in leaf.to_pylist()], pa.large_string())


def ground_truth_of(source: str, number: int, reward_model: Any) -> Any:
    """The truth in a cell of reward_model, a mapping or JSON text of one. Raises DataError where it has none."""
    reward_model = decode_json(reward_model, source, number, "reward_model")
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        raise DataError(f"{source}, row {number}, column 'reward_model': expected a mapping with ground_truth")
    return _exact(reward_model["ground_truth"], source, number, "reward_model")


def _exact(truth: Any, source: str, number: int, column: str) -> Any:
    """``truth``. Raises DataError where it is a number that has lost digits on its way into the file."""
    if isinstance(truth, float) and not abs(truth) <= 2**53:
        raise DataError(
            f"{source}, row {number}, column {column!r}: the ground truth {truth!r} is beyond what a number holds "
            "exactly: store it as text"
        )
    return truth


def _verl_row(source: str, number: int, row: dict[str, Any], prompt_key: str, instruction: str) -> RawPrompt:
    data_source = row.get("data_source") or Path(source).stem
    extra = decode_json(row.get("extra_info") or {}, source, number, "extra_info")
    if not isinstance(extra, dict):
        raise DataError(f"{source}, row {number}, column 'extra_info': expected a mapping, found {extra!r:.60}")
    if row.get("ability") is not None:
        extra.setdefault("ability", row["ability"])
    if extra.get("tools_kwargs") is not None:
        # In Arrow every row has the fields of all rows, and no struct is without fields: hence JSON text in some files.
        extra["tools_kwargs"] = drop_none(decode_json(extra["tools_kwargs"], source, number, "extra_info"))
    return RawPrompt(
        file=source,
        row=number,
        data_source=str(data_source),
        messages=_messages(source, number, row[prompt_key], prompt_key, instruction),
        ground_truth=ground_truth_of(source, number, row["reward_model"]),
        extra_info={key: value for key, value in extra.items() if value is not None},
    )


def _messages(source: str, number: int, prompt: Any, prompt_key: str, instruction: str) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        written = _written_messages(prompt)
        if written is None:
            return question_messages(prompt, instruction)
        prompt = written
        check_text(prompt, source, number, prompt_key)
    for message in prompt:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise DataError(
                f"{source}, row {number}, column {prompt_key!r}: expected messages with role and content as text"
            )
    if not any(message["content"].strip() for message in prompt if message["role"] != "system"):
        raise DataError(f"{source}, row {number}, column {prompt_key!r}: the prompt is empty")
    if prompt[-1]["role"] == "assistant":
        raise DataError(
            f"{source}, row {number}, column {prompt_key!r}: the last message is the assistant's, which the policy "
            "would answer as if somebody else had said it: end the prompt before it"
        )
    return [{key: value for key, value in message.items() if value is not None} for message in prompt]


def _written_messages(text: str) -> list[Any] | None:
    """The messages that ``text`` is the JSON of, as a list or as {"messages": [...]}; None: it is a question."""
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        result = load_json(text, finite=False)
    except ValueError:
        return None
    if isinstance(result, dict):
        result = result.get("messages")
    if isinstance(result, list) and result and isinstance(result[0], dict) and "role" in result[0]:
        return result
    return None


def cell_text(cell: Any) -> str:
    """A cell as text; 42.0 is 42."""
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell).strip()


def question_messages(question: str, instruction: str) -> list[dict[str, Any]]:
    """A bare question as a prompt's messages, with ``instruction`` below it."""
    return [{"role": "user", "content": f"{question.strip()}\n\n{instruction}" if instruction else question.strip()}]


# ---- AIME, GSM8K, MMLU and the like -------------------------------------------------------------------------------


def _competition_rows(
    source: str, table: pa.Table, problem: str, by_lower: dict[str, str], instruction: str
) -> Iterator[_Stretch]:
    rows = table.to_pylist()
    data_source = _competition_name(source)
    choices_column = next((by_lower[name] for name in CHOICE_COLUMNS if name in by_lower), None)
    prompts, others = [], []
    for number, row in enumerate(rows):
        others.append(repr(sorted((name.lower(), str(value)) for name, value in row.items() if value is not None)))
        question, answer = row[problem], row[by_lower["answer"]]
        if not isinstance(question, str) or not question.strip():
            raise DataError(f"{source}, row {number}, column {problem!r}: the problem is missing or no text")
        if answer is None or not str(answer).strip():
            raise DataError(f"{source}, row {number}, column {by_lower['answer']!r}: the answer is missing")
        name = data_source
        if "year" in by_lower and row[by_lower["year"]] is not None and "aime" in data_source:
            name = f"aime_{row[by_lower['year']]}"
        extra = {
            column: row[column]
            for column in table.column_names
            if column not in (problem, by_lower["answer"]) and column.lower() != "solution" and row[column] is not None
        }
        truth = cell_text(_exact(answer, source, number, by_lower["answer"]))
        if choices_column is not None and row[choices_column] is not None:
            question, truth = _with_choices(source, number, question, row[choices_column], answer)
        elif (worked := _HASHES.search(truth)) is not None:
            truth = worked[1].replace(",", "")
        messages = question_messages(question, instruction)
        prompts.append(RawPrompt(source, number, name, messages, truth, {"index": number, **extra}))
    yield (
        [prompt.messages[-1]["content"] for prompt in prompts],
        others,
        [prompt.ground_truth for prompt in prompts],
        lambda places: [prompts[place] for place in places],
    )


def _with_choices(source: str, number: int, question: str, choices: Any, answer: Any) -> tuple[str, str]:
    """The question with its lettered choices below it, and the letter of the right one.

    Args:
        answer: a choice's number from 0, or as text a choice, its letter or its number.
    """
    where = f"{source}, row {number}"
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(_LETTERS) or not all(map(_is_choice, choices)):
        raise DataError(f"{where}: expected 2 to {len(_LETTERS)} choices as text")
    texts = [str(choice).strip() for choice in choices]
    letters, said = _LETTERS[: len(texts)], cell_text(answer)
    if isinstance(answer, str) and texts.count(said) == 1:
        right = letters[texts.index(said)]
    elif isinstance(answer, str) and len(said) == 1 and said.upper() in letters:
        right = said.upper()
    elif said.isdecimal() and int(said) < len(texts):
        right = letters[int(said)]
    else:
        last = len(texts) - 1
        raise DataError(f"{where}: the answer {said!r:.60} is no choice, no letter and no number from 0 to {last}")
    shown = "\n".join(f"{letter}. {text}" for letter, text in zip(letters, texts, strict=True))
    return f"{question.strip()}\n\n{shown}\n\nAnswer with the letter.", right


def _is_choice(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _competition_name(source: str) -> str:
    """``aime_2025`` for files such as AIME2025-I.jsonl or aime-2025/test.parquet; otherwise the file's name."""
    for part in reversed(Path(source).parts[-3:]):
        result = re.search(r"aime\D{0,3}(20\d\d|\d\d)(?!\d)", part.lower())
        if result:
            year = result[1]
            return f"aime_{year if len(year) == 4 else '20' + year}"
    return Path(source).stem


# ---- reasoning-gym ------------------------------------------------------------------------------------------------


def _read_reasoning_gym(source: str, instruction: str) -> Iterator[_Stretch]:
    task, _, query = source.removeprefix(REASONING_GYM).partition("?")
    settings = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        try:
            settings[name] = load_json(value, finite=False)
        except ValueError:
            settings[name] = value
    settings.setdefault("size", 1000)
    settings.setdefault("seed", 0)
    try:
        import reasoning_gym
    except ImportError as error:
        raise DataError(f"{source}: the reasoning-gym library is not installed: pip install reasoning-gym") from error
    try:
        dataset = reasoning_gym.create_dataset(task, **settings)
        entries = [dataset[index] for index in range(len(dataset))]
    except (ValueError, TypeError, AssertionError) as error:
        raise DataError(f"{source}: reasoning-gym refuses it: {error}") from error
    prompts = [
        RawPrompt(
            file=source,
            row=index,
            data_source=f"reasoning_gym/{task}",
            messages=question_messages(str(entry["question"]), instruction),
            ground_truth=str(entry["answer"]),
            # The verifier scores an answer against the whole entry.
            extra_info={
                "index": index,
                "task": task,
                "question": entry["question"],
                "metadata": entry.get("metadata", {}),
            },
        )
        for index, entry in enumerate(entries)
    ]
    yield (
        [prompt.messages[-1]["content"] for prompt in prompts],
        [repr((prompt.data_source, prompt.ground_truth, prompt.extra_info["metadata"])) for prompt in prompts],
        [prompt.ground_truth for prompt in prompts],
        lambda places: [prompts[place] for place in places],
    )
