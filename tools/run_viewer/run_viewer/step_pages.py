"""A step and its responses as the page shows them: plain dictionaries for JSON, read column by column.

A step's list reads the columns with one value a response and three with one a token, a column at a time; a response
reads only its row group. No routed experts, no text of other responses, no other step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from run_files import CONFIG_FILE, METRICS_FILE
from run_files.parquet_files import (
    UnreadableFile,
    column_names,
    damage_named,
    list_groups,
    read_parquet,
    read_row,
    read_row_groups,
)
from run_files.steps import KEY_COLUMNS, RowKey, keys_of, step_path, stored_steps
from run_viewer.columns import CATEGORIES, HUES, KINDS, largest_shown, rejection_reasons, token_columns
from run_viewer.json_numbers import column_for_json, number_for_json, values_for_json
from run_viewer.row_names import named_response, response_name, row_keys
from run_viewer.runs_table import settings_of
from run_viewer.stored_step import OPTIONAL_COLUMNS, ROW_COLUMNS, TOKEN_COLUMNS, StoredResponse, question_in
from run_viewer.token_texts import token_texts
from untrusted import load_own_json
from untrusted.errors import InputError

Decode = Callable[[list[int]], str]
_COLOURED = {"entropy", "advantages", "rejected_by", "routing_flips"}
"""Of the learner's columns, those that have a colour as they are."""
_TEXTS = ["prompt", "response"]
_AT_ONCE = 16
"""Rows whose texts are held as Python's while they are searched."""
_CALLED = {"error", "timeout", "parse_error", "unknown_tool", "bad_arguments"}


def step_file(run_dir: Path, number: int) -> Path:
    """rollouts/step_N.parquet.

    Raises:
        FileNotFoundError: the run has not stored the step.
    """
    path = step_path(run_dir / "rollouts", number)
    if not path.is_file():
        steps = stored_steps(run_dir / "rollouts")
        there = f"it has {steps[0]} to {steps[-1]}" if steps else "it has none yet"
        raise FileNotFoundError(f"the run has no rollouts/{path.name}: {there}")
    return path


def files_of_step(run_dir: Path, number: int) -> list[Path]:
    """All that a step's pages come from, be they there or not."""
    folder = run_dir / "rollouts"
    stored = [step_path(folder, number), step_path(folder, number, "learner"), step_path(folder, number, "times")]
    return [*stored, run_dir / METRICS_FILE, run_dir / CONFIG_FILE]


def step_page(run_dir: Path, number: int) -> dict[str, Any]:
    """Groups of a step in the order of the file, each with its responses; ``problems`` names files that are damaged.

    masked_share is over the sampled tokens of a response, largest_difference the largest |log π_old - log π_rollout| of
    them; both are None where the learner has not trained on it.

    Raises:
        FileNotFoundError: the run has not stored the step.
        UnreadableFile: the step's file is damaged.
    """
    path = step_file(run_dir, number)
    table = read_parquet(path, ROW_COLUMNS, ["segment", "timing"])
    problems: list[str] = []
    keys, tokens = keys_of(table, path), _token_figures(path)
    compared: dict[RowKey, tuple[float | None, Any]] = {}
    if path.with_suffix(".learner.parquet").is_file():
        try:
            compared = _compared(path, keys, tokens)
        except (UnreadableFile, ValueError) as error:
            problems.append(_named(error, path))
    groups: dict[int, dict[str, Any]] = {}
    for place, (key, row) in enumerate(zip(keys, table.to_pylist(), strict=True)):
        info, extra, calls = (_parsed(row[name], problems) for name in ("reward_info", "extra_info", "tool_calls"))
        info, extra = (each if isinstance(each, dict) else {} for each in (info, extra))
        statuses = [str(call.get("status")) for call in calls if isinstance(call, dict)] if calls else []
        group = groups.setdefault(
            row["group_id"],
            {
                "group_id": row["group_id"],
                "question": question_in(extra),
                "ground_truth": _text(extra.get("ground_truth")),
                "data_source": _text(extra.get("data_source")),
                "trained": bool(info.get("trained", True)),
                "responses": [],
            },
        )
        masked, largest = compared.get(key, (None, None))
        group["responses"].append(
            {
                "index": response_name(*key[1:]),
                "reward": number_for_json(row["reward"]),
                "accuracy": number_for_json(info.get("acc")),
                "prediction": _text(info.get("pred")),
                "why": {key: value for key, value in info.items() if key not in ("acc", "pred", "trained")},
                "tokens": tokens.lengths[place],
                "sampled_tokens": int(tokens.loss_mask[place].sum()),
                "turns": tokens.turns[place],
                "calls": len(statuses),
                "failed_calls": sum(status in _CALLED for status in statuses),
                "tool_statuses": statuses,
                "finish_reason": row["finish_reason"],
                "trained": key in compared,
                "masked_share": masked,
                "largest_difference": largest,
                "timing": _parsed(row.get("timing"), problems),
            }
        )
    return {"number": number, "groups": list(groups.values()), "problems": list(dict.fromkeys(problems))}


@dataclass(frozen=True)
class _TokenFigures:
    """Of each row, in the file's order, without prompts.

    Attributes:
        loss_mask, rollout_log_probs: each [R]; they are compared with the learner's.
    """

    lengths: list[int]
    turns: list[int]
    loss_mask: list[npt.NDArray[np.bool_]]
    rollout_log_probs: list[npt.NDArray[np.float32]]


def _token_figures(path: Path) -> _TokenFigures:
    result = _TokenFigures([], [], [], [])
    for columns in list_groups(path, ["loss_mask", "turn_ids", "rollout_log_probs"]):
        offsets = columns["loss_mask"][0]
        for name, (others, _) in columns.items():
            if not np.array_equal(others, offsets):
                raise UnreadableFile(f"{path}: {name} has other lengths than loss_mask")
        for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            result.lengths.append(end - start)
            result.turns.append(int(columns["turn_ids"][1][start:end].max(initial=-1)) + 1)
            # Copies: a view would keep its whole row group in memory.
            result.loss_mask.append(columns["loss_mask"][1][start:end].astype(np.bool_))
            result.rollout_log_probs.append(columns["rollout_log_probs"][1][start:end].astype(np.float32))
    return result


def _compared(path: Path, keys: Sequence[RowKey], tokens: _TokenFigures) -> dict[RowKey, tuple[float | None, Any]]:
    """Masked share and largest difference of the rows that the learner has trained on."""
    learner = path.with_suffix(".learner.parquet")
    places = {key: place for place, key in enumerate(keys)}
    present = column_names(learner)
    names = [name for name in ("keep", "old_log_probs") if name in present]
    compared: dict[RowKey, tuple[float | None, Any]] = dict.fromkeys(row_keys(learner), (None, None))
    rows = iter(compared)
    for columns in list_groups(learner, names) if names else ():
        for row in range(len(columns[names[0]][0]) - 1):
            key = next(rows)
            if key not in places:
                raise UnreadableFile(f"{learner} has response {key[0]}/{key[1]}, which {path.name} has not")
            mask = tokens.loss_mask[places[key]]
            values = {name: column[offsets[row] : offsets[row + 1]] for name, (offsets, column) in columns.items()}
            for name, column in values.items():
                if len(column) != len(mask):
                    raise UnreadableFile(f"{learner}: {name} of response {key[0]}/{key[1]} has another length")
            if mask.any():
                masked = float(np.mean(values["keep"][mask] == 0)) if "keep" in values else None
                largest = None
                if "old_log_probs" in values:
                    engine = tokens.rollout_log_probs[places[key]][mask]
                    largest = number_for_json(np.abs(values["old_log_probs"][mask].astype(np.float64) - engine).max())
                compared[key] = (masked, largest)
    return compared


def response_page(
    run_dir: Path, number: int, group_id: int, name: str, decode: Decode | None, tokenizer_problem: str = ""
) -> dict[str, Any]:
    """A response with every column of its tokens, each [R]; numbers as the files have them.

    Args:
        name: of the response in its group (``response_name``).
        decode: of the run's tokenizer; None: there is none, and tokens are shown as their numbers.
        tokenizer_problem: why there is none; "" where there is one.

    Raises:
        FileNotFoundError: the run has not stored the step, or the step has no such response.
        UnreadableFile: a file is damaged.
    """
    path = step_file(run_dir, number)
    key = (group_id, *named_response(name))
    keys = row_keys(path)
    if key not in keys:
        raise FileNotFoundError(f"rollouts/{path.name} has no response {group_id}/{name}")
    row = keys.index(key)
    stored = read_row(path, row, [*ROW_COLUMNS, *TOKEN_COLUMNS], OPTIONAL_COLUMNS)
    problems = [tokenizer_problem] if tokenizer_problem else []
    with damage_named(path):
        response = StoredResponse.of_row(stored, problems)
    estimates = _estimates(path, key, problems)
    columns = token_columns(response, estimates)
    ids = response.response_ids.tolist()
    texts = token_texts(ids, decode) if decode else [f"⟨{token}⟩" for token in ids]
    shown = {
        name: column_for_json(column) for name, column in {**columns, **_stored_columns(response, estimates)}.items()
    }
    prompt = response.prompt or (decode(response.prompt_ids.tolist()) if decode else "")
    return {
        "group_id": group_id, "index": response_name(*key[1:]), "step": number, "length": len(ids), "prompt": prompt,
        "question": question_in(response.extra_info), "ids": ids, "texts": texts,
        "columns": shown,
        "kinds": {
            name: {"meaning": KINDS[name].meaning, "scale": KINDS[name].scale,
                   "largest": largest_shown(KINDS[name], column)}
            for name, column in columns.items()
        },
        "hues": {"categories": CATEGORIES, **HUES}, "reasons": _reasons(run_dir, problems),
        "turns": [{"turn": turn, "start": start, "end": end} for turn, start, end in _runs(response.turn_ids)],
        "tool_calls": values_for_json(list(response.tool_calls)),
        "reward": number_for_json(response.reward), "reward_info": values_for_json(response.reward_info),
        "extra_info": values_for_json(response.extra_info), "finish_reason": response.finish_reason,
        "timing": _parsed(response.timing, problems), "trained": bool(estimates),
        "prompt_tokens": len(response.prompt_ids), "problems": problems,
    }  # fmt: skip


def search_step(run_dir: Path, number: int, text: str) -> dict[str, Any]:
    """The responses of a step whose prompt or response has ``text``, whatever its capitals.

    Raises:
        FileNotFoundError: the run has not stored the step.
        UnreadableFile: the step's file is damaged, or has no texts.
    """
    path = step_file(run_dir, number)
    if not set(_TEXTS) <= set(column_names(path)):
        raise UnreadableFile(f"{path} has no texts to search")
    wanted = text.casefold()
    result: list[list[int | str]] = []
    for table in read_row_groups(path, ["group_id", "index", *_TEXTS], ["segment"]):
        keys = keys_of(table, path)
        texts = (row for batch in table.select(_TEXTS).to_batches(max_chunksize=_AT_ONCE) for row in batch.to_pylist())
        for (group_id, *rest), row in zip(keys, texts, strict=True):
            if any(wanted in (row[name] or "").casefold() for name in _TEXTS):
                result.append([group_id, response_name(*rest)])
    return {"found": result}


def _estimates(path: Path, key: RowKey, problems: list[str]) -> dict[str, npt.NDArray[np.float32]]:
    learner = path.with_suffix(".learner.parquet")
    if not learner.is_file():
        return {}
    try:
        keys = row_keys(learner)
        stored = read_row(learner, keys.index(key)) if key in keys else {}
        with damage_named(learner):
            return {k: _one_number_each(k, v) for k, v in stored.items() if k not in KEY_COLUMNS}
    except UnreadableFile as error:
        problems.append(_named(error, path))
        return {}


def _one_number_each(name: str, column: Any) -> npt.NDArray[np.float32]:
    numbers = np.asarray(column, np.float32)
    if numbers.ndim != 1:
        raise InputError(f"column {name!r} holds no list of numbers")
    return numbers


def _reasons(run_dir: Path, problems: list[str]) -> dict[int, str]:
    rules = settings_of(run_dir, problems).get("algorithm.rollout_correction.rejection")
    return rejection_reasons(rules if isinstance(rules, list) else [])


def _stored_columns(response: StoredResponse, estimates: Mapping[str, Any]) -> dict[str, Any]:
    """What the files have of each token beside the columns that have colours."""
    sampled = response.loss_mask
    columns = {"rollout_log_probs": np.where(sampled, response.rollout_log_probs, np.nan)}
    for name, column in estimates.items():
        if name not in _COLOURED and len(column) == len(sampled):
            columns[name] = np.where(sampled, column, np.nan)
    return columns


def _runs(turn_ids: npt.NDArray[np.int16]) -> list[tuple[int, int, int]]:
    """Stretches of equal turn: (turn, first token, one past the last)."""
    if not len(turn_ids):
        return []
    cuts = [0, *(np.flatnonzero(np.diff(turn_ids)) + 1).tolist(), len(turn_ids)]
    return [(int(turn_ids[start]), start, end) for start, end in zip(cuts, cuts[1:], strict=False)]


def _parsed(text: Any, problems: list[str]) -> Any:
    if text is None:
        return None
    try:
        return values_for_json(load_own_json(text))
    except ValueError as error:
        problems.append(f"a column that should be JSON is none: {error}")
        return None


def _text(value: Any) -> str | None:
    return None if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _named(error: Exception, path: Path) -> str:
    return str(error).replace(f"{path.parents[1]}/", "")
