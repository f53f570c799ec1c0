"""Conversations for supervised fine-tuning: read, tokenised once, kept in memory, and cut into batches.

A conversation becomes one row of a TrajectoryBatch, the contract that reinforcement learning uses as well: the prompt
is everything before the first trained token, the response everything after it up to the last trained one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_retool.data.chat_template import (
    ChatTemplateError,
    ConversationTokenizer,
    TokenizedConversation,
    drop_none,
    normalize_messages,
)
from megatron_retool.data.files import DataError, check_text, data_files, decode_json, read_table, require_columns
from megatron_retool.trajectory import TrajectoryBatch

logger = logging.getLogger(__name__)

_ENCODE_ROWS = 4096


@dataclass(frozen=True)
class SFTCounts:
    """Conversations or pairs read, and what max_length did to them.

    ``tokens`` and ``trained_tokens`` are of the kept ones.
    """

    rows: int
    dropped: int
    truncated: int
    kept: int
    tokens: int
    trained_tokens: int
    unit: str = "conversations"

    @classmethod
    def of(
        cls, batch: TrajectoryBatch, kept: int, *, rows: int, dropped: int, truncated: int, unit: str = "conversations"
    ) -> SFTCounts:
        """Those of ``kept`` conversations or pairs, which ``batch`` has."""
        tokens, trained = int(batch.total_lengths.sum()), int(batch.loss_mask.sum())
        return cls(rows, dropped, truncated, kept, tokens, trained, unit)

    def __str__(self) -> str:
        text = f"{self.kept} {self.unit}, {self.tokens} tokens of which {self.trained_tokens} trained"
        if self.dropped:
            text += f", {self.dropped} over max_length dropped"
        if self.truncated:
            text += f", {self.truncated} truncated to max_length"
        return text


class SFTDataset:
    """The tokenised conversations of some files.

    Args:
        files: parquet, JSON Lines or JSON files.
        tokenizer: a Hugging Face tokenizer with a chat template.
        max_length: tokens of a whole conversation.
        overlong: what happens to a longer one: "drop", "truncate" (dropped if no trained token is left) or "error".
        messages_key: column of the messages: JSON text or a nested column.
        tools_key: column of the tools' JSON schemas, likewise; optional in the files.

    Raises:
        DataError: naming file, row and column.
    """

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: Any,
        max_length: int,
        overlong: str = "drop",
        messages_key: str = "messages",
        tools_key: str = "tools",
    ) -> None:
        encoder = ConversationTokenizer(tokenizer)
        kept: list[TokenizedConversation] = []
        rows = dropped = truncated = 0
        for path in [file for source in files for file in data_files(source)]:
            messages, by_tools = read_conversations(path, messages_key, tools_key)
            conversations = encode_rows(path, messages_key, encoder, messages, by_tools)
            rows += len(conversations)
            for row, conversation in enumerate(conversations):
                fitting = fitted(conversation, max_length, overlong, f"{path}, row {row}, column {messages_key!r}")
                if fitting is None:
                    dropped += 1
                    continue
                truncated += fitting is not conversation
                kept.append(fitting)
        if not kept:
            raise DataError(
                f"{', '.join(files)}: none of the {rows} conversations fits into max_length={max_length}; raise it"
            )
        self._batch = as_trajectory_batch(kept)
        self.counts = SFTCounts.of(self._batch, len(kept), rows=rows, dropped=dropped, truncated=truncated)
        logger.info("%s: %s", ", ".join(files), self.counts)

    def __len__(self) -> int:
        return len(self._batch)

    def batch(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> TrajectoryBatch:
        """The conversations ``rows`` with the column loss_weights: 1 / (trained tokens of the batch) on each of them.

        The weighted sum of the token losses is then their mean over the batch, however it is cut up afterwards.
        """
        batch = self._batch.select(rows)
        return batch.with_columns(loss_weights=batch.loss_mask / np.float64(batch.loss_mask.sum()))


class BatchOrder:
    """Which rows make up the batch of a step: a fresh permutation each epoch, cut into batches across epochs' borders.

    A function of only seed and step, so that a resumed run needs no stored position. Batches are plain random ones:
    bucketing by length saves padding that packed sequences do not have, and correlates each batch's content with its
    length.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: Sequence[int]) -> None:
        self.num_rows = num_rows
        self.batch_size = batch_size
        self._seed = tuple(seed)
        self._epochs: dict[int, npt.NDArray[np.int64]] = {}

    def rows(self, step: int) -> npt.NDArray[np.int64]:
        """int64 [batch_size]: the rows of step 0, 1, …"""
        places = np.arange(step * self.batch_size, (step + 1) * self.batch_size, dtype=np.int64)
        epochs, places = np.divmod(places, self.num_rows)
        return np.concatenate([self._permutation(int(e))[places[epochs == e]] for e in np.unique(epochs)])

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch not in self._epochs:
            while len(self._epochs) > 2:
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = np.random.default_rng((*self._seed, epoch)).permutation(self.num_rows)
        return self._epochs[epoch]


def fitted(
    conversation: TokenizedConversation, max_length: int, overlong: str, place: str
) -> TokenizedConversation | None:
    """``conversation`` within ``max_length`` tokens; None: it is dropped.

    Raises:
        DataError: it is longer, and ``overlong`` is error.
    """
    if len(conversation.ids) <= max_length:
        return conversation
    if overlong == "error":
        raise DataError(
            f"{place}: {len(conversation.ids)} tokens, more than max_length={max_length}; raise it, or set the stage's "
            "overlong to drop or truncate"
        )
    if overlong == "drop" or not conversation.loss_mask[:max_length].any():
        return None
    return TokenizedConversation(
        conversation.ids[:max_length], conversation.loss_mask[:max_length], conversation.turn_ids[:max_length]
    )


def as_trajectory_batch(conversations: Sequence[TokenizedConversation]) -> TrajectoryBatch:
    """Rows in the learner's contract; tokens after the last trained one are left out, nothing depends on them."""
    count = len(conversations)
    prompts, responses, masks, turns = [], [], [], []
    for conversation in conversations:
        trained = np.flatnonzero(conversation.loss_mask)
        start, end = int(trained[0]), int(trained[-1]) + 1
        prompts.append(conversation.ids[:start])
        responses.append(conversation.ids[start:end])
        masks.append(conversation.loss_mask[start:end])
        turns.append(conversation.turn_ids[start:end])
    total = sum(map(len, responses))
    return TrajectoryBatch(
        prompt_ids=np.concatenate(prompts),
        prompt_lengths=np.array([len(p) for p in prompts], np.int32),
        response_ids=np.concatenate(responses),
        response_lengths=np.array([len(r) for r in responses], np.int32),
        loss_mask=np.concatenate(masks),
        rollout_log_probs=np.zeros(total, np.float32),
        turn_ids=np.concatenate(turns),
        weight_versions=np.full(total, -1, np.int32),
        group_ids=np.arange(count, dtype=np.int32),
        indices=np.zeros(count, np.int32),
        rewards=np.zeros(count, np.float32),
    )


def read_conversations(
    path: str, messages_key: str, tools_key: str
) -> tuple[list[list[dict[str, Any]]], list[tuple[list[dict[str, Any]] | None, list[int]]]]:
    """A file's conversations, by row, and its sets of tools, each with the rows that have it.

    Raises:
        DataError: naming file, row and column.
    """
    table = read_table(path)
    require_columns(path, table, (messages_key,), ": sft.messages_key names the column of the conversations")
    messages = [
        checked_messages(path, row, cell, messages_key) for row, cell in enumerate(table[messages_key].to_pylist())
    ]
    return messages, tools_of_rows(path, table, tools_key)


def tools_of_rows(path: str, table: Any, tools_key: str) -> list[tuple[list[dict[str, Any]] | None, list[int]]]:
    """The sets of tools in a file's table, each with the rows that have it; DataError as ``read_conversations``."""
    cells = table[tools_key].to_pylist() if tools_key in table.column_names else [None] * len(table)
    # Rows with the same tools are rendered in one call; a file usually has one set of tools.
    by_tools: dict[str, list[int]] = {}
    for row, cell in enumerate(cells):
        key = cell if isinstance(cell, str) else json.dumps(cell)
        by_tools.setdefault(key, []).append(row)
    return [(_tools(path, rows[0], key, tools_key), rows) for key, rows in by_tools.items()]


def encode_rows(
    path: str,
    column: str,
    encoder: ConversationTokenizer,
    messages: Sequence[list[dict[str, Any]]],
    by_tools: Sequence[tuple[list[dict[str, Any]] | None, list[int]]],
) -> list[TokenizedConversation]:
    """The conversations ``messages`` of a file's rows, tokenised.

    Raises:
        DataError: naming file, row and column.
    """
    encoded: dict[int, TokenizedConversation] = {}
    for tools, rows in by_tools:
        for first in range(0, len(rows), _ENCODE_ROWS):
            part = rows[first : first + _ENCODE_ROWS]
            try:
                encoded.update(zip(part, encoder.encode_batch([messages[row] for row in part], tools), strict=True))
            except ChatTemplateError as error:
                where = "" if error.row is None else f", row {part[error.row]}"
                raise DataError(f"{path}{where}, column {column!r}: {error}") from error
    return [encoded[row] for row in range(len(messages))]


def checked_messages(path: str, row: int, cell: Any, column: str) -> list[dict[str, Any]]:
    """The messages of a cell, as text or nested; DataError naming file, row and column where they are none."""

    def fail(reason: str) -> DataError:
        return DataError(f"{path}, row {row}, column {column!r}: {reason}")

    cell = decode_json(cell, path, row, column)
    check_text(cell, path, row, column)
    if not isinstance(cell, list) or not cell:
        raise fail(f"expected a list of messages, found {cell!r:.60}")
    for message in cell:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise fail(f"expected messages with a role, found {message!r:.60}")
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            raise fail(f"a message's content is no text: {content!r:.60}")
        if message["role"] == "assistant" and not content and not message.get("tool_calls"):
            raise fail("an assistant message has neither text nor a tool call")
    return normalize_messages(cell)


def _tools(path: str, row: int, text: str, column: str) -> list[dict[str, Any]] | None:
    tools = decode_json(text, path, row, column) if text.strip() else None
    check_text(tools, path, row, column)
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"{path}, row {row}, column {column!r}: expected a list of tool schemas, found {tools!r:.60}")
    return drop_none(tools) if tools else None
