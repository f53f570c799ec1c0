"""Pairs of a better and a worse response, for direct preference optimization.

A row has the columns ``chosen`` and ``rejected``, in any of the forms that data sets have:

    conversations       both are lists of messages that begin alike; ``prompt`` is not read
    completions         both are lists of messages that begin with the assistant; ``prompt`` is the messages before
    texts               both are texts, the assistant's last turn; ``prompt`` is the user's text, or messages

Trained are the assistant's turns after what both sides have in common.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_retool.data.chat_template import ConversationTokenizer, TokenizedConversation
from megatron_retool.data.files import DataError, check_text, data_files, read_table, require_columns
from megatron_retool.data.sft_dataset import (
    SFTCounts,
    as_trajectory_batch,
    checked_messages,
    encode_rows,
    fitted,
    tools_of_rows,
)
from megatron_retool.trajectory import TrajectoryBatch

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]


class PreferenceDataset:
    """The tokenised pairs of some files; arguments and errors as for ``SFTDataset``.

    Args:
        prompt_key, chosen_key, rejected_key: columns of a pair.
    """

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: Any,
        max_length: int,
        overlong: str = "drop",
        prompt_key: str = "prompt",
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
        tools_key: str = "tools",
    ) -> None:
        encoder = ConversationTokenizer(tokenizer)
        kept: list[TokenizedConversation] = []
        rows = dropped = truncated = 0
        for path in [file for source in files for file in data_files(source)]:
            pairs, by_tools = read_pairs(path, prompt_key, chosen_key, rejected_key, tools_key)
            encoded = [
                encode_rows(path, column, encoder, [pair[side] for pair in pairs], by_tools)
                for side, column in enumerate((chosen_key, rejected_key))
            ]
            rows += len(pairs)
            for row, pair in enumerate(pairs):
                shared = _shared_turns(*pair)
                whole = [_after(side[row], shared) for side in encoded]
                sides = [
                    fitted(side, max_length, overlong, f"{path}, row {row}, column {column!r}")
                    for side, column in zip(whole, (chosen_key, rejected_key), strict=True)
                ]
                complete = [side for side in sides if side is not None]
                if len(complete) < 2 or pair[0] == pair[1]:
                    dropped += 1
                    continue
                truncated += any(side is not before for side, before in zip(complete, whole, strict=True))
                kept += complete
        if not kept:
            raise DataError(
                f"{', '.join(files)}: none of the {rows} pairs has two different responses that fit into "
                f"max_length={max_length}; raise it"
            )
        self._batch = as_trajectory_batch(kept)
        self.counts = SFTCounts.of(
            self._batch, len(kept) // 2, rows=rows, dropped=dropped, truncated=truncated, unit="pairs"
        )
        logger.info("%s: %s", ", ".join(files), self.counts)

    def __len__(self) -> int:
        return self.counts.kept

    def batch(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> TrajectoryBatch:
        """The pairs ``rows``: of each the chosen response, then the rejected one."""
        places = 2 * np.asarray(rows, np.int64)
        return self._batch.select(np.stack([places, places + 1], axis=1).reshape(-1))


def read_pairs(
    path: str, prompt_key: str, chosen_key: str, rejected_key: str, tools_key: str
) -> tuple[list[tuple[Messages, Messages]], list[tuple[list[dict[str, Any]] | None, list[int]]]]:
    """A file's pairs of whole conversations, and its sets of tools as ``read_conversations`` gives them.

    Raises:
        DataError: naming file, row and column.
    """
    table = read_table(path)
    hint = ": sft.chosen_key and sft.rejected_key name the columns of a stage with loss=dpo"
    require_columns(path, table, (chosen_key, rejected_key), hint)
    prompts = table[prompt_key].to_pylist() if prompt_key in table.column_names else [None] * len(table)
    columns = [table[key].to_pylist() for key in (chosen_key, rejected_key)]
    pairs = []
    for row, (prompt, *sides) in enumerate(zip(prompts, *columns, strict=True)):
        chosen, rejected = (
            _conversation(path, row, key, side, prompt, prompt_key)
            for key, side in zip((chosen_key, rejected_key), sides, strict=True)
        )
        for key, conversation in ((chosen_key, chosen), (rejected_key, rejected)):
            turns = sum(message["role"] == "assistant" for message in conversation)
            if turns <= _shared_turns(chosen, rejected) and chosen != rejected:
                raise DataError(
                    f"{path}, row {row}, column {key!r}: it has no assistant's turn that the other side does not have"
                )
        pairs.append((chosen, rejected))
    return pairs, tools_of_rows(path, table, tools_key)


def _conversation(path: str, row: int, column: str, cell: Any, prompt: Any, prompt_key: str) -> Messages:
    """The whole conversation of one side of a pair."""
    if isinstance(cell, str) and not _is_json_list(cell):
        check_text(cell, path, row, column)
        cell = [{"role": "assistant", "content": cell}]
    messages = checked_messages(path, row, cell, column)
    if messages[0]["role"] != "assistant":
        return messages
    if prompt is None or prompt == "":
        raise DataError(
            f"{path}, row {row}, column {column!r}: it begins with the assistant, and there is no prompt in column "
            f"{prompt_key!r} (sft.prompt_key)"
        )
    if isinstance(prompt, str) and not _is_json_list(prompt):
        check_text(prompt, path, row, prompt_key)
        prompt = [{"role": "user", "content": prompt}]
    return [*checked_messages(path, row, prompt, prompt_key), *messages]


def _is_json_list(text: str) -> bool:
    """Whether ``text`` is messages as JSON, and no text of someone's that begins with a bracket."""
    if not text.lstrip().startswith("[{"):
        return False
    try:
        return isinstance(json.loads(text), list)
    except (ValueError, RecursionError):
        return False


def _shared_turns(chosen: Messages, rejected: Messages) -> int:
    """How many of the assistant's turns stand in what both conversations begin with."""
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    return sum(message["role"] == "assistant" for message, _ in shared)


def _after(conversation: TokenizedConversation, turns: int) -> TokenizedConversation:
    """``conversation``, of whose assistant's turns the first ``turns`` are not trained."""
    mask = conversation.loss_mask & (conversation.turn_ids >= turns)
    return replace(conversation, loss_mask=mask, turn_ids=np.where(mask, conversation.turn_ids, -1).astype(np.int16))
