"""Teachers of on-policy distillation: servers that score the policy's own responses, token by token."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_retool.config import ConfigError, DistillationConfig, TeacherConfig
from megatron_retool.errors import OperationError
from megatron_retool.trajectory import TrajectoryBatch
from sglang_rollout.engine.base import (
    EngineClientError,
    EngineFailed,
    EngineTimeout,
    EngineUnavailable,
    ScoredText,
    ScoreRequest,
)
from sglang_rollout.engine.client import SGLangClient

FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 1.0, 60.0
PROBES = (
    "The sum of 17 and 25 is 42.\n\ndef f(x):\n    return x ** 2\n",
    'Wait, let me check: \\frac{1}{2} + 0.75 = 1.25, so {"name": "code_interpreter"} it is.',
    "Über naïve façades: 東京, Привет, 🎲\t1234567890",
)
"""Texts that tokenizers with another vocabulary or another way to cut digits, spaces and scripts encode differently."""
FloatArray = npt.NDArray[np.float32]


class TeacherFailure(OperationError):
    """A teacher does not score what it is asked. The message names it and what to do."""


class Teachers:
    """All teachers of a run. An asynchronous context manager, of one event loop.

    Args:
        encode: the policy's tokenizer: a text's ids, without special tokens around them.

    Raises:
        ConfigError: on entry: a teacher has another tokenizer, or none where check_tokenizer is true.
        TeacherFailure: on entry: a teacher does not answer.
    """

    def __init__(self, config: DistillationConfig, encode: Callable[[str], list[int]]) -> None:
        self._config = config
        self._encode = encode
        self._teachers: list[TeacherClient] = []

    async def __aenter__(self) -> Teachers:
        self._teachers = [TeacherClient(settings, self._config) for settings in self._config.teachers]
        try:
            if self._config.check_tokenizer:
                await asyncio.gather(*(teacher.check_tokenizer(self._encode) for teacher in self._teachers))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for teacher in self._teachers:
            await teacher.client.close()

    async def log_probs(self, batch: TrajectoryBatch, data_sources: Sequence[str]) -> FloatArray:
        """The teachers' log-probs of the batch's responses: float32 [T], 0 outside the loss mask.

        Args:
            data_sources: of each row.

        Raises:
            ConfigError: no teacher teaches a row's data source.
            TeacherFailure: a teacher fails again and again.
        """
        result = np.zeros(batch.num_response_tokens, np.float32)
        starts = np.cumsum(batch.response_lengths) - batch.response_lengths
        prompts = np.split(batch.prompt_ids, np.cumsum(batch.prompt_lengths)[:-1])

        async def score(row: int) -> None:
            part = slice(int(starts[row]), int(starts[row] + batch.response_lengths[row]))
            sampled = np.flatnonzero(batch.loss_mask[part])
            if not len(sampled):
                return
            ids = [*prompts[row].tolist(), *batch.response_ids[part][: sampled[-1] + 1].tolist()]
            start = len(prompts[row]) + int(sampled[0])
            scores = await self._teachers[self._config.teacher_of(data_sources[row])].score(ids, start)
            result[part][sampled] = np.asarray(scores, np.float32)[sampled - sampled[0]]

        tasks = [asyncio.ensure_future(score(row)) for row in range(len(batch))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return result


def check_teacher_files(config: DistillationConfig, encode: Callable[[str], list[int]]) -> None:
    """Compare the tokenizers of the teachers that the learner computes with the policy's.

    Args:
        encode: as for ``Teachers``.

    Raises:
        ConfigError: one is another, or a teacher's directory has none, where check_tokenizer is true.
    """
    from transformers import AutoTokenizer

    for number, path in enumerate(config.paths):
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"algorithm.distillation.teachers[{number}].path={path} has no tokenizer to compare with the policy's "
                f"({error}): put its files there, or set algorithm.distillation.check_tokenizer=false if you know that "
                "it is the policy's"
            ) from error
        for text in PROBES:
            tokens = [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
            _check_encoding(path, text, tokens, encode(text))


def _check_encoding(teacher: str, text: str, tokens: list[int], own: list[int]) -> None:
    if tokens != own:
        place = len(os.path.commonprefix([own, tokens]))
        raise ConfigError(
            f"the teacher {teacher} has another tokenizer than the policy: token {place} of {text[:30]!r}… is "
            f"{tokens[place : place + 1]} there and {own[place : place + 1]} here. Its log-probs are of other tokens: "
            "take a teacher of the same family"
        )


class TeacherClient:
    """One server."""

    def __init__(self, settings: TeacherConfig, config: DistillationConfig) -> None:
        self.settings = settings
        self._retries, self._timeout = config.retries, config.timeout_seconds
        self._places = asyncio.Semaphore(config.max_concurrent)
        key = settings.api_key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.client = SGLangClient(settings.url, retries=0, timeout_seconds=config.timeout_seconds, headers=headers)

    async def score(self, ids: list[int], start: int) -> list[float]:
        """log-probs of ``ids`` from ``start`` on, given those before each.

        Raises:
            TeacherFailure: it refuses the text, or does not answer after all retries.
        """
        async with self._places:
            request = ScoreRequest(ids, start)
            result = await self._asked("score", functools.partial(self.client.score_text, request))
        scores: list[float] = result.log_probs
        if len(scores) != len(ids) - start or not np.isfinite(scores).all():
            raise TeacherFailure(
                f"the teacher {self.settings.url} gave {len(scores)} log-probs of {len(ids) - start} tokens, or one "
                "that is not finite"
            )
        return scores

    async def likeliest(self, ids: Sequence[int], start: int, count: int) -> list[list[tuple[int, float]]]:
        """(id, log-prob) of the ``count`` most probable tokens in the place of each of ``ids`` from ``start`` on.

        Raises:
            TeacherFailure: as ``score``.
        """
        async with self._places:
            request = ScoreRequest(ids, start, likeliest=count)
            result: ScoredText = await self._asked("score", functools.partial(self.client.score_text, request))
        if len(result.likeliest) != len(ids) - start:
            raise TeacherFailure(
                f"the teacher {self.settings.url} gave the likeliest tokens of {len(result.likeliest)} places of "
                f"{len(ids) - start}"
            )
        return result.likeliest

    async def check_tokenizer(self, encode: Callable[[str], list[int]]) -> None:
        """See ``Teachers``."""
        for text in PROBES:
            try:
                answer = await self._asked("tokenize", functools.partial(self._tokenized, text))
                tokens = [int(token) for token in answer["tokens"]]
            except (TeacherFailure, KeyError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"the teacher {self.settings.url} encodes no text for a comparison of tokenizers ({error}): start "
                    "it with its tokenizer, or set algorithm.distillation.check_tokenizer=false if you know that it "
                    "has the policy's"
                ) from error
            _check_encoding(self.settings.url, text, tokens, encode(text))

    async def _tokenized(self, text: str) -> Any:
        return await self.client.request("/tokenize", {"prompt": text, "add_special_tokens": False}, self._timeout)

    async def _asked(self, what: str, ask: Callable[[], Any]) -> Any:
        delay = FIRST_DELAY_SECONDS
        for attempt in range(self._retries + 1):
            try:
                return await ask()
            except (EngineUnavailable, EngineTimeout, EngineFailed) as error:
                last = error
            except EngineClientError as error:
                raise TeacherFailure(f"the teacher {self.settings.url} refuses to {what}: {error.reason}") from error
            if attempt < self._retries:
                await asyncio.sleep(delay)
                delay = min(2 * delay, LONGEST_DELAY_SECONDS)
        raise TeacherFailure(
            f"the teacher {self.settings.url} did not {what} in {self._retries + 1} attempts: {last.reason}. Start it "
            "again; the run resumes from its last checkpoint"
        ) from last
