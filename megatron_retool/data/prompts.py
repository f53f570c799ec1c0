"""Prompts for rollouts: read, checked, tokenised once, and handed out in an order that a seed and a number fix."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, overload

import numpy as np

from megatron_retool.config import ConfigError, DataConfig
from megatron_retool.data.chat_template import ChatTemplateError, render, tokenize
from megatron_retool.data.files import DataError
from megatron_retool.data.prompt_files import RawPrompt, ReadCounts, read_prompts
from megatron_retool.data.token_bounds import TokenBound

logger = logging.getLogger(__name__)


class PromptTools(Protocol):
    """Knows which tools a prompt has (tools.registry.ToolRegistry)."""

    def schemas(self, extra_info: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Schemas for the chat template. Raises ValueError where the row asks for what the run's tools do not have."""
        ...


@dataclass(frozen=True)
class PromptRow:
    """A prompt to sample from.

    ``prompt_ids`` are the chat-templated prompt's token ids up to and including the header that asks the assistant to
    speak: a rollout appends to them and never tokenises the prompt again. ``group_id`` counts the prompts handed out
    since the start of the run, so that a prompt drawn again in a later epoch opens a new group; ``uid`` names the
    row itself, by all that it says and, among equal ones, by its place.
    """

    prompt_ids: list[int]
    group_id: int
    uid: str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class PromptCounts:
    """Rows read, and why some of them are not used."""

    rows: int
    duplicates: int
    conflicting_answers: int
    overlong: int
    kept: int
    unread: Sequence[str] = ()

    def __str__(self) -> str:
        parts = [f"{self.kept} prompts of {self.rows} rows"]
        if self.duplicates:
            parts.append(f"{self.duplicates} repeat an earlier row")
        if self.conflicting_answers:
            parts.append(f"{self.conflicting_answers} ask what an earlier one asks and have another answer")
        if self.overlong:
            parts.append(f"{self.overlong} over data.max_prompt_length")
        if self.unread:
            parts.append(f"columns that are not read: {', '.join(self.unread[:8])}")
        return ", ".join(parts)


class PromptSource:
    """The training prompts, in a new random order each epoch, without end.

    The order depends only on ``seed`` and the epoch's number, so that the position is two integers and a
    resumed run continues with exactly the prompts that the stopped one would have drawn.

    Raises:
        ConfigError: data.train_files is empty.
        DataError: a file is wrong (naming file, row and column), a row asks for a tool or a tool's setting that the
            run does not have, a prompt is too long under
            data.overlong_prompts=error, or no prompt is left.
    """

    def __init__(self, config: DataConfig, tokenizer: Any, tools: PromptTools, seed: int) -> None:
        self._rows, self.counts = _load(config, "train_files", tokenizer, tools)
        self._shuffle = config.shuffle
        self._seed = seed
        self._drawn = 0
        self._again: list[int] = []
        self._order: tuple[int, np.ndarray] | None = None
        self._fingerprint = _fingerprint([row.uid for row in self._rows])
        logger.info("training prompts: %s", self.counts)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def data_sources(self) -> set[str]:
        """The data sources that the rows name."""
        return {row.data_source for row in self._rows}

    @property
    def epoch(self) -> int:
        """Passes over the prompts that are complete."""
        return self._drawn // len(self._rows)

    def next_batch(self, count: int) -> list[PromptRow]:
        """The next ``count`` prompts; where an epoch ends, the next one begins within the batch.

        Prompts that were given back, or drawn before a resume and not finished, come first, under the group ids they
        had.
        """
        batch = []
        for _ in range(count):
            if self._again:
                draw = self._again.pop(0)
            else:
                draw = self._drawn
                self._drawn += 1
            batch.append(self._prompt(draw))
        return batch

    def give_back(self, group_ids: Sequence[int]) -> None:
        """Let ``next_batch`` begin with the prompts of these groups again, under the group ids that they have.

        Raises:
            ValueError: a group was not drawn, or its prompt is back already.
        """
        for group_id in group_ids:
            if group_id >= self._drawn or group_id in self._again:
                raise ValueError(f"group {group_id} is not one that was drawn")
        self._again = sorted({*self._again, *group_ids})
        # As if the last ones had not been drawn: the position does not tell how many were.
        while self._again and self._again[-1] == self._drawn - 1:
            self._drawn = self._again.pop()

    def take_unfinished(self, group_ids: Sequence[int]) -> list[PromptRow]:
        """After a resume: the prompts of groups that are going to be continued. ``next_batch`` leaves them out.

        Raises:
            DataError: a group is not one of those that the loaded state calls unfinished.
        """
        unknown = sorted(set(group_ids) - set(self._again))
        if unknown:
            raise DataError(f"the checkpoint's data position does not call group {unknown[0]} unfinished")
        self._again = [draw for draw in self._again if draw not in group_ids]
        return [self._prompt(draw) for draw in group_ids]

    def state_dict(self, unfinished: Sequence[int] = ()) -> dict[str, Any]:
        """The position, as JSON types.

        Args:
            unfinished: group ids of prompts that were drawn and whose groups are not complete; a resumed run draws
                them again, but for those that ``take_unfinished`` gets.
        """
        return {
            "drawn": self._drawn,
            "again": sorted({*self._again, *unfinished}),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "prompts": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``.

        Raises:
            DataError: the prompts, their seed or their shuffling are not the ones that the state was saved with, or it
                is no position at all.
        """
        self._take_rows_of(state.get("prompts"))
        current = self.state_dict()
        for key, setting in (("seed", "trainer.seed"), ("shuffle", "data.shuffle"), ("prompts", "data.train_files")):
            if state.get(key) != current[key]:
                raise DataError(
                    f"the checkpoint's data position was saved with another {setting} ({state.get(key)}, now "
                    f"{current[key]}): resume with the same data settings, or start a new run"
                )
        drawn, again = state.get("drawn"), state.get("again")
        for key, numbers in (("drawn", [drawn]), ("again", again)):
            if not isinstance(numbers, list) or not all(type(each) is int and each >= 0 for each in numbers):
                raise DataError(
                    f"the checkpoint's data position is damaged: {key}={state.get(key)!r:.60}: resume from an older "
                    "checkpoint (trainer.resume_from_path)"
                )
        assert isinstance(drawn, int) and isinstance(again, list)
        self._drawn, self._again = drawn, again

    def _take_rows_of(self, fingerprint: Any) -> None:
        """Where ``fingerprint`` is of a version that told rows by their messages, use the rows that it would have."""
        if fingerprint == self._fingerprint:
            return
        first: dict[str, PromptRow] = {}
        for row in self._rows:
            first.setdefault(_digest(row.messages), row)
        for rows in (self._rows, list(first.values())):
            if fingerprint == _fingerprint([_digest(row.messages) for row in rows]):
                self._rows, self._fingerprint, self._order = rows, str(fingerprint), None
                return

    def _prompt(self, draw: int) -> PromptRow:
        epoch, place = divmod(draw, len(self._rows))
        return _with_group(self._rows[int(self._epoch_order(epoch)[place])], draw)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            count = len(self._rows)
            order = np.random.default_rng((self._seed, epoch)).permutation(count) if self._shuffle else np.arange(count)
            self._order = (epoch, order)
        return self._order[1]


class ValidationSet(Sequence[PromptRow]):
    """The held-out prompts in the order of the files; at most data.max_val_samples, spread evenly over them.

    Attributes:
        quick: data.quick_val_samples of them, ``evenly_drawn``, with the group ids that they have here.

    Raises:
        ConfigError: data.val_files is empty.
        DataError: as for PromptSource.
    """

    def __init__(self, config: DataConfig, tokenizer: Any, tools: PromptTools) -> None:
        rows, self.counts = _load(config, "val_files", tokenizer, tools)
        limit = config.max_val_samples
        if limit is not None and limit < len(rows):
            rows = [rows[int(place)] for place in np.linspace(0, len(rows) - 1, limit).round()]
        self._rows = [_with_group(row, group) for group, row in enumerate(rows)]
        places = evenly_drawn(len(self._rows), config.quick_val_samples, config.quick_val_seed)
        self.quick: Sequence[PromptRow] = [self._rows[place] for place in places]
        logger.info("validation prompts: %s", self.counts)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> PromptRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[PromptRow]: ...

    def __getitem__(self, index: int | slice) -> PromptRow | list[PromptRow]:
        return self._rows[index]

    def __iter__(self) -> Iterator[PromptRow]:
        return iter(self._rows)


def evenly_drawn(count: int, samples: int, seed: int) -> list[int]:
    """``samples`` places below ``count``, ascending: one of each of as many equal stretches, drawn by ``seed``.

    All places where there are no more than ``samples``. The stretches keep the shares that sources and difficulties
    have in files which are sorted by them.
    """
    if samples >= count:
        return list(range(count))
    rng = random.Random(seed)
    bounds = [count * stretch // samples for stretch in range(samples + 1)]
    # random() gives the same numbers in every version of Python, which is not said of whole numbers in a range.
    return [first + int(rng.random() * (end - first)) for first, end in pairwise(bounds)]


def read_validation_prompts(config: DataConfig) -> list[RawPrompt]:
    """The rows of data.val_files before tokenisation, overlong ones among them.

    Raises:
        DataError: a file is wrong.
    """
    return _read(config, config.val_files)[0]


def _read(config: DataConfig, files: Sequence[str]) -> tuple[list[RawPrompt], ReadCounts]:
    return read_prompts(files, config.prompt_key, config.question_instruction, config.deduplicate)


def _load(config: DataConfig, key: str, tokenizer: Any, tools: PromptTools) -> tuple[list[PromptRow], PromptCounts]:
    files = getattr(config, key)
    if not files:
        raise ConfigError(f"data.{key} is empty: name at least one file of prompts")
    raw, counts = _read(config, files)
    rows: list[PromptRow] = []
    overlong = 0
    copies: Counter[str] = Counter()
    texts = _render_all(raw, tokenizer, tools)
    bound = TokenBound(tokenizer)
    fewest = [bound.fewest(text) if len(text) > 16 * config.max_prompt_length else 0 for text in texts]
    enormous = [least > config.max_prompt_length for least in fewest]
    tokenized = iter(tokenize(tokenizer, [text for text, skip in zip(texts, enormous, strict=True) if not skip]))
    for prompt, least, skip in zip(raw, fewest, enormous, strict=True):
        said = _digest([prompt.data_source, prompt.messages, prompt.ground_truth, prompt.extra_info])
        copies[said] += 1
        ids = [] if skip else next(tokenized)
        if skip or len(ids) > config.max_prompt_length:
            if config.overlong_prompts == "error":
                count = f"at least {least}" if skip else len(ids)
                raise DataError(
                    f"{prompt.file}, row {prompt.row}, column {config.prompt_key!r}: {count} tokens, more than "
                    f"data.max_prompt_length={config.max_prompt_length}; raise it, or set data.overlong_prompts=filter"
                )
            overlong += 1
            continue
        rows.append(
            PromptRow(
                prompt_ids=ids,
                group_id=-1,
                uid=said if copies[said] == 1 else _digest([said, copies[said]]),
                data_source=prompt.data_source,
                ground_truth=prompt.ground_truth,
                extra_info=prompt.extra_info,
                messages=prompt.messages,
            )
        )
    if not rows:
        raise DataError(
            f"data.{key}: none of the {counts.rows} rows is left: {overlong} prompts are longer than "
            f"data.max_prompt_length={config.max_prompt_length}; raise it"
        )
    return rows, PromptCounts(
        counts.rows, counts.duplicates, counts.conflicting_answers, overlong, len(rows), counts.unread
    )


def _render_all(prompts: Sequence[RawPrompt], tokenizer: Any, tools: PromptTools) -> list[str]:
    """Each prompt with the tools that it has; prompts of the same tools are rendered together."""
    places_of: dict[str, list[int]] = {}
    schemas_of: dict[str, list[dict[str, Any]]] = {}
    for place, prompt in enumerate(prompts):
        try:
            schemas = tools.schemas(prompt.extra_info)
        except ValueError as error:
            raise DataError(f"{prompt.file}, row {prompt.row}, column 'extra_info': {error}") from error
        names = json.dumps([schema["function"]["name"] for schema in schemas])
        places_of.setdefault(names, []).append(place)
        schemas_of[names] = schemas
    texts = [""] * len(prompts)
    for names, places in places_of.items():
        rendered = _render_prompts([prompts[place] for place in places], tokenizer, schemas_of[names])
        for place, text in zip(places, rendered, strict=True):
            texts[place] = text
    return texts


def _render_prompts(prompts: Sequence[RawPrompt], tokenizer: Any, schemas: Sequence[dict[str, Any]]) -> list[str]:
    try:
        return render(tokenizer, [p.messages for p in prompts], schemas, add_generation_prompt=True)
    except ChatTemplateError as error:
        for prompt in prompts:
            try:
                render(tokenizer, [prompt.messages], schemas, add_generation_prompt=True)
            except ChatTemplateError as single:
                raise DataError(f"{prompt.file}, row {prompt.row}: {single}") from single
        raise DataError(str(error)) from error


def _with_group(row: PromptRow, group_id: int) -> PromptRow:
    return PromptRow(row.prompt_ids, group_id, row.uid, row.data_source, row.ground_truth, row.extra_info, row.messages)


def _digest(said: Any) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _fingerprint(uids: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for uid in uids:
        digest.update(uid.encode())
    return f"{len(uids)}:{digest.hexdigest()[:16]}"
