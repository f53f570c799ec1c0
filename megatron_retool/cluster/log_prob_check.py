"""Weights that an engine gets from the learner: does it compute the same model with them?

What a checksum of the weights cannot see (an output layer that the engine takes from elsewhere, other rotary
frequencies, a setting of config.json that one side reads otherwise) shows in the log-probs of a text. One text is
scored by the learner and by every engine, before anything is sampled and, with weight_sync.check_every, again later.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from rich.console import Console

from megatron_retool.algorithms.log_prob_comparison import LogProbComparison
from megatron_retool.algorithms.settings import SamplingSettings
from megatron_retool.config import Config, ModelConfig
from megatron_retool.errors import OperationError
from megatron_retool.trajectory import FinishReason, Trajectory, TrajectoryBatch
from sglang_rollout.engine.base import EngineClient, EngineClientError

TOKENS, TOKENS_ON_GPUS = 512, 4096
"""Length of the text: enough for wrong rotary frequencies to show, and short against a step."""
BLOCK = 32
"""Tokens of text between two blocks of ids from the whole vocabulary: both are at early and at late positions."""
TEXT = """\
The river rises in the hills, runs past four small towns and reaches the sea after two hundred kilometres.
Question: a train leaves at 9:40 and travels 135 km at 90 km/h. When does it arrive? 135 / 90 = 1.5 hours, so at 11:10.
def primes(limit):
    sieve = [True] * (limit + 1)
    for n in range(2, int(limit**0.5) + 1):
        if sieve[n]:
            sieve[n * n :: n] = [False] * len(sieve[n * n :: n])
    return [n for n in range(2, limit + 1) if sieve[n]]
Let x be a real number with x^2 - 5x + 6 = 0. Then (x - 2)(x - 3) = 0, and therefore x = 2 or x = 3.
"What would you have done?" she asked. Nobody answered; outside, the first snow of the year had begun to fall.
{"name": "code_interpreter", "arguments": {"code": "print(sum(k * k for k in range(1, 11)))"}}
"""
"""Prose, arithmetic, code and JSON; ASCII, so that every tokenizer has it."""


class LogProbMismatch(OperationError):
    """An engine and the learner compute different models. The message has the diagnosis."""


class ScoringLearner(Protocol):
    """A learner group, as far as its log-probs are concerned."""

    async def log_probs(self, batch: TrajectoryBatch, *, sampling: SamplingSettings) -> Any:
        """Log-probs of the batch under ``sampling``; see ``Learner.log_probs``."""


class LogProbCheck:
    """Compares each engine with the learner once, or every weight_sync.check_every syncs; where only adapters are sent,
    at the next sync once more.

    A run's first adapter adds nothing to the model, so an engine that leaves it out agrees with the learner.

    ``score_by`` is called while the learner has its weights, ``compare`` while the engines can generate: where they
    share GPUs, never at the same time.

    Args:
        tokenizer: encodes the text.
        client: makes a client of the engine at a URL.
    """

    def __init__(self, config: Config, tokenizer: Any, client: Callable[[str], EngineClient], console: Console) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._client = client
        self._console = console
        self._ids: list[int] = []
        self._learner: ScoringLearner | None = None
        self._checked: set[str] = set()
        """Engines that agreed with the present learner, or cannot be asked."""
        self._unable: set[str] = set()
        """Engines that cannot be asked."""
        self._without_update: set[str] = set()
        """Engines that agreed with this learner's first adapter."""
        self._pending: list[str] = []
        self._syncs = 0
        """Since all engines were compared."""
        self._learner_log_probs: npt.NDArray[np.float32] = np.empty(0, np.float32)
        self._metrics: dict[str, float] = {}

    def restarted(self, url: str) -> None:
        """The engine at ``url`` is a new one."""
        self._checked.discard(url)
        self._unable.discard(url)
        self._without_update.discard(url)

    async def score_by(self, learner: ScoringLearner, urls: Sequence[str]) -> None:
        """The learner's log-probs, if an engine at ``urls`` is to be compared with it."""
        if learner is not self._learner:
            self._learner, self._checked, self._without_update, self._syncs = learner, set(), set(), 0
        every = self._config.weight_sync.check_every
        if every is not None and self._syncs == every:
            self._checked &= self._unable
            self._syncs = 0
        self._syncs += 1
        self._pending = [url for url in urls if url not in self._checked]
        if self._pending:
            if not self._ids:
                self._ids = fixed_text(
                    self._tokenizer, vocabulary_size(self._config.model, self._tokenizer), self._length()
                )
            result = await learner.log_probs(as_batch(self._ids), sampling=SamplingSettings())
            self._learner_log_probs = result["log_probs"]

    async def compare(self) -> None:
        """Score the text by the engines that ``score_by`` found, and compare.

        An engine that does not answer is left to the rollout, which restarts it.

        Raises:
            LogProbMismatch: naming the engine, what differs, where, and the likely causes.
        """
        urls, self._pending = self._pending, []
        answers = await asyncio.gather(*(self._score(url) for url in urls))
        compared = {
            url: LogProbComparison(self._ids, answer, self._learner_log_probs)
            for url, answer in zip(urls, answers, strict=True)
            if answer is not None
        }
        if not compared:
            return
        bound = self._config.weight_sync.max_log_prob_difference or default_bound(self._config)
        wrong = {url: comparison for url, comparison in compared.items() if comparison.differs(bound)}
        if wrong:
            raise LogProbMismatch(self._message(wrong, len(compared), bound))
        agreed = set(compared)
        if self._config.learner.lora.sends_adapter:
            agreed, self._without_update = agreed & self._without_update, self._without_update | agreed
        self._checked |= agreed
        mean, largest = (max(getattr(each, name) for each in compared.values()) for name in ("mean", "max"))
        self._metrics = {
            "weight_sync/log_prob_difference_mean": mean,
            "weight_sync/log_prob_difference_max": largest,
        }
        engines = "the engine agrees" if len(compared) == 1 else f"{len(compared)} engines agree"
        self._console.print(
            f"{engines} with the learner on a text of {len(self._ids)} tokens: mean difference of log-probs "
            f"{mean:.2g}, largest {largest:.2g}",
            highlight=False,
        )

    def take_metrics(self) -> dict[str, float]:
        """weight_sync/log_prob_difference_* of the last comparison, once."""
        taken, self._metrics = self._metrics, {}
        return taken

    async def _score(self, url: str) -> list[float] | None:
        async with self._client(url) as client:
            score = getattr(client, "score", None)
            if score is None:
                self._checked.add(url)
                self._unable.add(url)
                self._warn(f"{url} cannot score a text (its client has no score): its log-probs are not compared")
                return None
            try:
                result: list[float] = await score(self._ids)
            except EngineClientError as error:
                self._warn(f"log-probs of this engine are not compared with the learner's: {error}")
                return None
            return result

    def _warn(self, text: str) -> None:
        self._console.print(text, style="yellow", markup=False)

    def _message(self, wrong: dict[str, LogProbComparison], compared: int, bound: float) -> str:
        url = max(wrong, key=lambda each: wrong[each].relative)
        others = ", ".join(each for each in wrong if each != url)
        which = f"{len(wrong)} of {compared} engines differ" + (f" (also {others})" if others else "")
        if len(wrong) < compared:
            which += ": only these missed something, such as a tensor of a weight sync"
        return (
            f"engine {url} and the learner do not compute the same model: their log-probs of a fixed text of "
            f"{len(self._ids)} tokens differ. {wrong[url].diagnosis(bound)}. {which}. docs/mismatch.md has what to "
            f"look at; weight_sync.max_log_prob_difference, {bound:g} now, is the bound in units of the spread, and "
            "weight_sync.check_log_probs=false continues regardless"
        )

    def _length(self) -> int:
        """As long as engine, learner and the run's own limits allow; one token is left for the engine to sample."""
        config, engine = self._config, self._config.rollout.engine
        limits = [
            TOKENS_ON_GPUS if config.cluster.gpus_per_node else TOKENS,
            config.data.max_prompt_length + config.data.max_response_length,
            config.learner.max_tokens_per_micro_batch,
            *(limit // 2 for limit in [engine.max_total_tokens] if limit is not None),
            *(
                limit - 1
                for limit in [engine.context_length, _of_model(config.model, "max_position_embeddings")]
                if limit
            ),
        ]
        return max(2, min(limits))


def default_bound(config: Config) -> float:
    """What rounding explains, in units of the log-probs' spread; docs/mismatch.md has the measurements."""
    engine, learner, rounded = config.rollout.engine, config.learner, config.weight_sync.round_to
    if rounded in ("int4", "int3"):
        return math.inf
    if learner.fp8.recipe == "nvfp4":
        return 1.0
    if engine.quantization is not None or rounded == "fp8" or learner.fp8.recipe is not None:
        return 0.4
    dtype = engine.dtype
    if dtype == "auto":
        dtype = _of_model(config.model, "dtype") or _of_model(config.model, "torch_dtype") or "bfloat16"
    if dtype == learner.dtype == "float32" and rounded is None:
        return 0.005
    return 0.15


def fixed_text(tokenizer: Any, vocabulary: int, length: int) -> list[int]:
    """``length`` ids, the same in every run: blocks of TEXT and of ids spread over the whole vocabulary, in turns."""
    text = list(tokenizer.encode(TEXT, add_special_tokens=False))
    # Without the last id: SGLang scores the first in its place.
    spread = np.linspace(0, vocabulary - 2, -(-length // 2), dtype=np.int64)
    spread = np.random.default_rng(0).permutation(spread)
    ids: list[int] = []
    while len(ids) < length:
        place = len(ids) // 2
        ids += [text[(place + offset) % len(text)] for offset in range(BLOCK)]
        ids += spread[place : place + BLOCK].tolist()
    return ids[:length]


def vocabulary_size(model: ModelConfig, tokenizer: Any) -> int:
    """Rows of the model's embedding, where its config.json is here; else as many as the tokenizer has ids."""
    return int(_of_model(model, "vocab_size") or len(tokenizer))


def as_batch(ids: Sequence[int]) -> TrajectoryBatch:
    """The text as one response to its first token, all of it sampled."""
    count = len(ids) - 1
    text = Trajectory(
        prompt_ids=np.array(ids[:1], np.int32),
        response_ids=np.array(ids[1:], np.int32),
        loss_mask=np.ones(count, np.bool_),
        rollout_log_probs=np.zeros(count, np.float32),
        turn_ids=np.zeros(count, np.int16),
        weight_versions=np.zeros(count, np.int32),
        group_id=0,
        index=0,
        finish_reason=FinishReason.LENGTH,
        reward=0.0,
    )
    return TrajectoryBatch.from_trajectories([text])


def _of_model(model: ModelConfig, key: str) -> Any:
    """A key of the model's config.json; None where it is not here."""
    file = Path(model.path) / "config.json"
    return json.loads(file.read_text(encoding="utf-8")).get(key) if model.path and file.is_file() else None
