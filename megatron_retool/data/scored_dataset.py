"""Responses with a teacher's most probable tokens at each token, for fine-tuning (``sft.stages[].loss=top_k``).

A row has token ids, for the numbers are of these tokens and no others:

    prompt_ids, response_ids    lists of ids, as the rows of a run's rollouts have them
    loss_mask                   of the response; without the column every token is trained
    top_ids, top_log_probs      for each response token a list of the teacher's most probable tokens in its place, and
                                their log-probs; may be empty where the loss mask is false

``megatron-retool data score`` writes such files.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_retool.data.chat_template import TokenizedConversation
from megatron_retool.data.files import DataError, data_files, read_table, require_columns
from megatron_retool.data.sft_dataset import SFTCounts, as_trajectory_batch, fitted
from megatron_retool.target_sequences import TopTokens
from megatron_retool.trajectory import TrajectoryBatch

logger = logging.getLogger(__name__)

COLUMNS = ("prompt_ids", "response_ids", "top_ids", "top_log_probs")
MASK = "loss_mask"
MOST_TOKENS = 1024
"""The teacher may name this many tokens in the place of one."""
_ROUNDING = 1e-3
"""By which probabilities may add up to more than 1."""


class ScoredDataset:
    """The scored responses of some files.

    Args:
        files, max_length, overlong: as for ``SFTDataset``.
        vocab_size: of the policy's model.

    Raises:
        DataError: naming file, row and column.
    """

    def __init__(self, files: Sequence[str], vocab_size: int, max_length: int, overlong: str = "drop") -> None:
        kept: list[_Scored] = []
        rows = dropped = truncated = 0
        for path in [file for source in files for file in data_files(source)]:
            for row, scored in enumerate(read_scored(path, vocab_size)):
                rows += 1
                whole = fitted(scored.conversation, max_length, overlong, f"{path}, row {row}")
                if whole is None:
                    dropped += 1
                    continue
                truncated += whole is not scored.conversation
                kept.append(_Scored(whole, scored.prompt_length, scored.ids, scored.log_probs))
        if not kept:
            raise DataError(
                f"{', '.join(files)}: none of the {rows} responses fits into max_length={max_length}; raise it"
            )
        self._batch = as_trajectory_batch([each.conversation for each in kept])
        self._top = _together(kept, self._batch)
        self._starts = np.concatenate([[0], np.cumsum(self._batch.response_lengths, dtype=np.int64)])
        self.counts = SFTCounts.of(
            self._batch, len(kept), rows=rows, dropped=dropped, truncated=truncated, unit="responses"
        )
        logger.info("%s: %s", ", ".join(files), self.counts)

    def __len__(self) -> int:
        return len(self._batch)

    def batch(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> TrajectoryBatch:
        """The responses ``rows``, with loss_weights as of ``SFTDataset.batch``."""
        batch = self._batch.select(rows)
        return batch.with_columns(loss_weights=batch.loss_mask / np.float64(batch.loss_mask.sum()))

    def top_tokens(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> TopTokens:
        """What the teacher says of the response tokens of ``batch(rows)``."""
        taken = np.concatenate([np.arange(self._starts[row], self._starts[row + 1]) for row in rows])
        return TopTokens(self._top.ids[taken], self._top.log_probs[taken])


@dataclass(frozen=True)
class _Scored:
    """
    Attributes:
        prompt_length: tokens before the response.
        ids, log_probs: of each response token, as the file has them.
    """

    conversation: TokenizedConversation
    prompt_length: int
    ids: list[list[int]]
    log_probs: list[list[float]]


def read_scored(path: str, vocab_size: int) -> list[_Scored]:
    """A file's rows, checked.

    Raises:
        DataError: naming file, row and column.
    """
    table = read_table(path)
    require_columns(path, table, COLUMNS, ": megatron-retool data score writes such a file")
    columns = {name: table[name].to_pylist() for name in COLUMNS}
    columns[MASK] = table[MASK].to_pylist() if MASK in table.column_names else [None] * len(table)
    return [
        _row({name: cells[row] for name, cells in columns.items()}, f"{path}, row {row}", vocab_size)
        for row in range(len(table))
    ]


def checked_response(
    cells: dict[str, Any], place: str, vocab_size: int = 2**31
) -> tuple[list[int], list[int], list[bool]]:
    """A row's prompt and response ids, and its whole loss mask.

    Raises:
        DataError: they are none.
    """
    prompt, response = (_token_ids(cells[name], f"{place}, column {name!r}", vocab_size) for name in COLUMNS[:2])
    for name, ids in zip(COLUMNS[:2], (prompt, response), strict=True):
        if not ids:
            raise DataError(f"{place}, column {name!r}: there are no tokens")
    mask = cells.get(MASK)
    mask = [True] * len(response) if mask is None else mask
    if not isinstance(mask, list) or len(mask) != len(response) or not all(each in (0, 1) for each in mask):
        raise DataError(f"{place}, column {MASK!r}: expected a 0 or 1 for each of the {len(response)} response tokens")
    return prompt, response, [bool(each) for each in mask]


def _row(cells: dict[str, Any], place: str, vocab_size: int) -> _Scored:
    prompt, response, mask = checked_response(cells, place, vocab_size)
    if not any(mask):
        raise DataError(f"{place}, column {MASK!r}: no token is trained: leave the row out")
    lists = {name: cells[name] for name in COLUMNS[2:]}
    for name, values in lists.items():
        if not isinstance(values, list) or len(values) != len(response):
            raise DataError(f"{place}, column {name!r}: expected {len(response)} lists, one for each response token")
    for number, (ids, log_probs) in enumerate(zip(*lists.values(), strict=True)):
        _check_position(ids, log_probs, mask[number], f"{place}, response token {number}", vocab_size)
    whole = np.array([*prompt, *response], np.int32)
    conversation = TokenizedConversation(
        whole,
        np.array([False] * len(prompt) + mask),
        np.zeros(len(whole), np.int16),
    )
    return _Scored(conversation, len(prompt), lists["top_ids"], lists["top_log_probs"])


def _token_ids(cell: Any, place: str, vocab_size: int) -> list[int]:
    if not isinstance(cell, list) or not all(isinstance(each, int) and 0 <= each < vocab_size for each in cell):
        raise DataError(f"{place}: expected ids of tokens, from 0 to {vocab_size - 1}")
    return cell


def _check_position(ids: Any, log_probs: Any, is_trained: bool, place: str, vocab_size: int) -> None:
    ids = _token_ids(ids, f"{place}, column 'top_ids'", vocab_size)
    if len(ids) > MOST_TOKENS or len(set(ids)) < len(ids):
        raise DataError(f"{place}, column 'top_ids': expected at most {MOST_TOKENS} different tokens")
    numbers = isinstance(log_probs, list) and all(isinstance(each, int | float) for each in log_probs)
    if not numbers or len(log_probs) != len(ids):
        raise DataError(f"{place}, column 'top_log_probs': expected a number for each of the {len(ids)} tokens")
    if not all(math.isfinite(each) and each <= _ROUNDING for each in log_probs):
        raise DataError(f"{place}, column 'top_log_probs': expected finite numbers of at most 0")
    if sum(map(math.exp, log_probs)) > 1 + _ROUNDING:
        raise DataError(
            f"{place}, column 'top_log_probs': their probabilities add up to more than 1: they have to be natural "
            "logarithms, over the whole vocabulary"
        )
    if is_trained and not ids:
        raise DataError(f"{place}, column 'top_ids': it is trained, and the teacher says nothing of it")


def _together(kept: Sequence[_Scored], batch: TrajectoryBatch) -> TopTokens:
    """Of all response tokens of ``batch``, which may begin later and end earlier than the file's rows."""
    width = max(len(ids) for scored in kept for ids in scored.ids)
    ids = np.zeros((batch.num_response_tokens, width), np.int32)
    log_probs = np.full(ids.shape, -np.inf, np.float32)
    place = 0
    for scored, prompt, response in zip(kept, batch.prompt_lengths, batch.response_lengths, strict=True):
        first = int(prompt) - scored.prompt_length
        for number in range(first, first + int(response)):
            result = len(scored.ids[number])
            ids[place, :result] = scored.ids[number]
            log_probs[place, :result] = scored.log_probs[number]
            place += 1
    return TopTokens(ids, log_probs)
