"""Sampling with transformers' model, token by token: all requests in one batch with a KV cache."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from conversion.model.architecture import Architecture
from conversion.model.attention_config import normalise_latents
from megatron_retool.algorithms.sampling import kept_in_order
from megatron_retool.config import Config
from megatron_retool.errors import OperationError
from megatron_retool.routed_experts import ExpertArray
from sglang_rollout.engine.base import GenerateRequest, GenerateResult, RankedText
from sglang_rollout.engine.launch_command import resolve_device
from sglang_rollout.engine.routed_experts import RoutingShape
from sglang_rollout.engine.transformers_routing import RoutingRecorder, extended
from sglang_rollout.engine.weight_sync.disk import WeightDirectory


class InputTooLong(ValueError):
    """A request leaves no room for a token."""


def _most_tokens(request: GenerateRequest) -> int:
    """How many tokens the filters leave at most; 0: all."""
    sampling = request.sampling
    return sampling.most_tokens if request.wants_filtered else max(sampling.top_k, 0)


@dataclass(eq=False)
class SampledSequence:
    """A request and what was sampled for it."""

    request: GenerateRequest
    ids: list[int]
    done: asyncio.Future[None]
    deadline: float
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_log_probs: list[list[float]] = field(default_factory=list)
    routed_experts: ExpertArray | None = None
    """Of the tokens that were input so far, all under the same weights."""
    finish_reason: Any = None
    matched_stop: int | str | None = None
    error: Exception | None = None

    def given_up(self) -> bool:
        """Whether no request waits for more; it has ended then."""
        if time.monotonic() >= self.deadline or self.done.cancelled():
            self.finish_reason = "abort"
            return True
        return False

    @property
    def output_ids(self) -> list[int]:
        """The ids that were sampled so far."""
        return self.ids[len(self.request.input_ids) :]

    def result(self) -> GenerateResult:
        """What was sampled, as the request's answer."""
        top = self.top_log_probs if self.request.top_log_probs else None
        rows, start = self.routed_experts, self.request.routed_experts_start
        return GenerateResult(
            output_ids=self.output_ids,
            log_probs=self.log_probs,
            weight_versions=self.versions,
            finish_reason=self.finish_reason,
            matched_stop=self.matched_stop,
            prompt_tokens=len(self.request.input_ids),
            top_log_probs=top,
            routed_experts=None if rows is None or start is None else rows[start : len(self.ids) - 1],
        )


class BatchedModel:
    """The model with its batch. ``_step`` and ``refresh`` run in threads, one at a time; the rest in the event loop."""

    def __init__(self, path: Path, config: Config, weights: WeightDirectory, admit_every: int, attention: str) -> None:
        self.path = path
        self.config = config
        self.device = resolve_device(config.rollout.engine.device)
        self._weights = weights
        self._admit_every = admit_every
        self._attention = attention
        self._lock = threading.Lock()
        self._model: Any = None
        self._tokenizer: Any = None
        self._version = 0
        self._loaded: tuple[Path, int] | None = None
        self._routing: RoutingRecorder | None = None
        self._stop_ids: frozenset[int] = frozenset()
        self._context = 0
        self._waiting: list[SampledSequence] = []
        self._batch: list[SampledSequence] = []
        self._steps = 0
        self._cache: Any = None
        self._cache_of: tuple[Path, int] | None = None
        self._mask = torch.empty(0)
        self._serving: asyncio.Task[None] | None = None
        self._random = torch.Generator()
        self._random.seed()

    async def sample(self, sequence: SampledSequence) -> None:
        """Return when ``sequence`` has a finish reason."""
        self._waiting.append(sequence)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        await sequence.done

    async def idle(self) -> None:
        """Return when nothing is sampled."""
        if self._serving is not None and not self._serving.done():
            await asyncio.wait({self._serving})

    def move(self, device: str) -> None:
        """Bring the weights to ``device``."""
        with self._lock:
            if self._model is not None:
                self._model.to(device)

    def refresh(self) -> int:
        """Load the newest weights, if they are not loaded yet; their version."""
        with self._lock:
            self._refresh()
            return self._version

    def score(self, input_ids: Sequence[int]) -> list[float]:
        """log-prob of every token but the first; the batch and its cache stay as they are."""
        return self.rank(input_ids, 1).log_probs

    @torch.inference_mode()
    def rank(self, input_ids: Sequence[int], count: int) -> RankedText:
        """``RankingClient.rank``; the batch and its cache stay as they are."""
        with self._lock:
            self._refresh()
            ids = torch.tensor([list(input_ids)], device=self._model.device)
            log_probs = self._model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
            values, tokens = log_probs.topk(min(count, log_probs.shape[-1]), -1)
            likeliest = [list(zip(*pair, strict=True)) for pair in zip(tokens.tolist(), values.tolist(), strict=True)]
            return RankedText(log_probs[:-1].gather(-1, ids[0, 1:, None])[:, 0].tolist(), likeliest)

    async def _serve(self) -> None:
        while self._waiting or self._batch:
            joining: list[SampledSequence] = []
            if not self._batch or self._steps % self._admit_every == 0:
                joining, self._waiting = self._waiting, []
            self._steps += 1
            try:
                ended = await asyncio.to_thread(self._step, joining)
            except Exception as error:
                ended, self._batch = [*joining, *self._batch], []
                for sequence in ended:
                    sequence.error = error
            ended += [sequence for sequence in self._waiting if sequence.given_up()]
            self._waiting = [sequence for sequence in self._waiting if sequence.finish_reason is None]
            for sequence in ended:
                if sequence.done.done():
                    continue
                if sequence.error is not None:
                    sequence.done.set_exception(sequence.error)
                else:
                    sequence.done.set_result(None)

    def _refresh(self) -> None:
        newest = self._weights.newest()
        if newest is None and self._loaded is not None:
            return
        version, path = newest or (0, self.path)
        result = (path, path.stat().st_mtime_ns)
        if result == self._loaded:
            return
        settings = self.config.rollout.engine
        self._model, info = _load(path, settings.dtype, self._attention)
        if info["missing_keys"]:
            raise OperationError(f"{path} lacks {', '.join(sorted(info['missing_keys'])[:5])}")
        self._model.to(self.device).eval()
        if self.config.learner.routing_replay == "rollout":
            shape = RoutingShape.of(Architecture.from_pretrained(self.path, self.config.model.families))
            self._routing = RoutingRecorder(self._model, shape.experts)
        self._loaded, self._version = result, version
        ends = self._model.generation_config.eos_token_id
        self._stop_ids = frozenset([ends] if isinstance(ends, int) else ends or ())
        self._context = settings.context_length or self._model.config.max_position_embeddings

    @torch.inference_mode()
    def _step(self, joining: list[SampledSequence]) -> list[SampledSequence]:
        """Sample one token for every sequence of the batch, after ``joining`` have joined it; those that ended."""
        with self._lock:
            self._refresh()
            for sequence in joining:
                if len(sequence.ids) >= self._context:
                    length = len(sequence.ids)
                    sequence.error = InputTooLong(f"the input of {length} tokens fills the context of {self._context}")
                    sequence.deadline = 0.0
            batch = [*self._batch, *joining]
            ended = [sequence for sequence in batch if sequence.finish_reason is None and sequence.given_up()]
            rows = [row for row, sequence in enumerate(batch) if sequence.finish_reason is None]
            self._batch = [batch[row] for row in rows]
            if self._batch:
                # Keys and values of other weights would give log-probs that no weights have.
                continues = not joining and self._cache_of == self._loaded
                if self._cache_of != self._loaded:
                    for sequence in self._batch:
                        sequence.routed_experts = None
                logits = self._decode(rows) if continues else self._prefill()
                self._cache_of = self._loaded
                for sequence, token in zip(self._batch, self._draw(logits.float().cpu()), strict=True):
                    self._append(sequence, token)
                ended += [sequence for sequence in self._batch if sequence.finish_reason is not None]
            return ended

    def _prefill(self) -> torch.Tensor:
        """Logits [sequences, vocabulary] of the next token, with a new cache; sequences are padded on the left."""
        longest = max(len(sequence.ids) for sequence in self._batch)
        ids = torch.zeros(len(self._batch), longest, dtype=torch.int64)
        self._mask = torch.zeros_like(ids)
        for row, sequence in enumerate(self._batch):
            ids[row, longest - len(sequence.ids) :] = torch.tensor(sequence.ids)
            self._mask[row, longest - len(sequence.ids) :] = 1
        return self._forward(ids, (self._mask.cumsum(-1) - 1).clamp(min=0), cache=None)

    def _decode(self, rows: list[int]) -> torch.Tensor:
        """Logits [sequences, vocabulary] of the next token; ``rows`` of the cache continue."""
        if len(rows) < len(self._mask):
            # Layers with a state in place of keys and values have this way to choose rows, and no other.
            self._cache.reorder_cache(torch.tensor(rows, device=self._model.device))
            self._mask = self._mask[rows]
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(rows), 1)], dim=-1)
        last = torch.tensor([[sequence.ids[-1]] for sequence in self._batch])
        return self._forward(last, self._mask.sum(-1, keepdim=True) - 1, self._cache)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        device = self._model.device
        if self._routing is not None:
            self._routing.forget()
        output = self._model(
            input_ids=ids.to(device),
            attention_mask=self._mask.to(device),
            position_ids=positions.to(device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = output.past_key_values
        if self._routing is not None:
            self._record(self._routing.rows(len(ids)))
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _record(self, rows: ExpertArray) -> None:
        """Add to every sequence's rows those of the tokens that were input, [sequences, tokens, layers, k]."""
        for sequence, result in zip(self._batch, rows, strict=True):
            own = result[-min(len(result), len(sequence.ids)) :]
            sequence.routed_experts = extended(sequence.routed_experts, own, len(sequence.ids) - len(own))

    def _draw(self, logits: torch.Tensor) -> list[tuple[int, float, list[float]]]:
        """A token for each sequence, its log-prob and those of the most likely tokens, from float32 [sequences, V]."""
        requests = [sequence.request for sequence in self._batch]

        def column(values: Iterable[float]) -> torch.Tensor:
            return torch.tensor(list(values))[:, None]

        greedy = column(request.sampling.temperature == 0.0 for request in requests)
        log_probs = (logits / column(request.sampling.temperature or 1.0 for request in requests)).log_softmax(-1)
        likely, order = log_probs.sort(descending=True, stable=True)
        probs, size = likely.exp(), logits.shape[-1]
        kept = kept_in_order(
            probs,
            column(_most_tokens(request) or size for request in requests),
            column(request.sampling.top_p for request in requests),
            column(request.sampling.min_p for request in requests),
        )
        filtered = likely.masked_fill(~kept, -torch.inf).log_softmax(-1)
        # The largest of log-probs with Gumbel noise is a sample.
        noise = torch.stack([self._noise(sequence, size) for sequence in self._batch])
        places = torch.where(greedy, filtered, filtered - (-noise.log()).log()).argmax(-1, keepdim=True)
        wants_filtered = column(request.wants_filtered for request in requests)
        chosen = torch.where(wants_filtered, filtered, likely).gather(-1, places)[:, 0].tolist()
        most = max(request.top_log_probs for request in requests)
        top = [row[: request.top_log_probs] for row, request in zip(likely[:, :most].tolist(), requests, strict=True)]
        return list(zip(order.gather(-1, places)[:, 0].tolist(), chosen, top, strict=True))

    def _noise(self, sequence: SampledSequence, size: int) -> torch.Tensor:
        """float32 [size] in (0, 1): of only the request's seed and the position, where it has a seed."""
        generator = self._random
        if sequence.request.seed is not None:
            digest = hashlib.blake2b(f"{sequence.request.seed}/{len(sequence.ids)}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        return torch.rand(size, generator=generator).clamp(min=1e-20)

    def _append(self, sequence: SampledSequence, drawn: tuple[int, float, list[float]]) -> None:
        """Add a token and see whether it is the last."""
        token, log_prob, top = drawn
        sequence.ids.append(token)
        sequence.log_probs.append(log_prob)
        sequence.versions.append(self._version)
        sequence.top_log_probs.append(top)
        request = sequence.request
        if len(sequence.log_probs) >= request.max_new_tokens or len(sequence.ids) >= self._context:
            sequence.finish_reason = "length"
        elif (request.stop.end_of_sequence and token in self._stop_ids) or token in request.stop.token_ids:
            sequence.finish_reason, sequence.matched_stop = "stop", token
        elif request.stop.strings:
            # A string of n characters may have begun n tokens ago at the earliest.
            longest = max(len(text) for text in request.stop.strings)
            tail = self._decoded(sequence.output_ids[-longest - 1 :])
            for text in request.stop.strings:
                if text in tail:
                    sequence.finish_reason, sequence.matched_stop = "stop", text
                    break

    def _decoded(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(
                self.config.model.tokenizer_path or self.path, trust_remote_code=False
            )
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _load(path: Path, dtype: str, attention: str) -> tuple[Any, dict[str, Any]]:
    """The model in ``path``, and what transformers tells of its loading."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    # Every new version is loaded again: the console belongs to the run.
    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=False,
        )
    finally:
        if shows_progress:
            logging.enable_progress_bar()
    model, info = loaded
    return normalise_latents(model), info
