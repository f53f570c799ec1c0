"""Who samples for the server: the base model, and adapters by name. ``engine_sampler.EngineSampler`` is one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_retool.target_sequences import FloatArray
from megatron_retool.tinker.messages import MESSAGES
from megatron_retool.tinker.sample_requests import SampleRequest
from megatron_retool.tinker.wire import tensor_message, top_tokens_message

Ids = npt.NDArray[np.integer[Any]]
_STOP_REASONS = {"stop": 0, "length": 1}


@dataclass(frozen=True, eq=False)
class LikeliestTokens:
    """The likeliest tokens of some positions: ids and log-probs [n, k]; where there is none, ``wire.MASKED``."""

    ids: Ids
    log_probs: FloatArray


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """
    Attributes:
        tokens: ids [R], with the one that ended it.
        log_probs: float32 [R], of the distribution that was sampled.
        stopped: a stop token or text ended it; else max_tokens did.
    """

    tokens: Ids
    log_probs: FloatArray
    stopped: bool
    top: LikeliestTokens | None = None


@dataclass(frozen=True, eq=False)
class SampleResult:
    """
    Attributes:
        prompt_log_probs: float32 [P]; NaN at position 0 and wherever nothing was asked for.
        top_prompt: of the P positions.
        target_log_probs: float32 in the shape of the request's targets; NaN where that has none.
    """

    sequences: list[SampledTokens]
    prompt_log_probs: FloatArray | None = None
    top_prompt: LikeliestTokens | None = None
    target_log_probs: FloatArray | None = None
    cached_tokens: int = 0

    def to_wire(self) -> bytes:
        """A SampleResponse."""
        message = MESSAGES["SampleResponse"](prompt_cache_hit_tokens=self.cached_tokens)
        for each in self.sequences:
            sequence = message.sequences.add(
                stop_reason=_STOP_REASONS["stop" if each.stopped else "length"],
                tokens=np.ascontiguousarray(each.tokens, "<i4").tobytes(),
                log_probs=np.ascontiguousarray(each.log_probs, "<f4").tobytes(),
            )
            if each.top is not None:
                sequence.top.CopyFrom(top_tokens_message(each.top.ids, each.top.log_probs))
        if self.prompt_log_probs is not None:
            message.prompt_log_probs = np.ascontiguousarray(self.prompt_log_probs, "<f4").tobytes()
        if self.top_prompt is not None:
            message.top_prompt.CopyFrom(top_tokens_message(self.top_prompt.ids, self.top_prompt.log_probs))
        if self.target_log_probs is not None:
            message.target_log_probs.CopyFrom(tensor_message(self.target_log_probs))
        return bytes(message.SerializeToString())


class PromptSampler(Protocol):
    """Samples of several prompts run side by side.

    Every method raises RequestRefused where the caller asked for what cannot be done.
    """

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Read PEFT's files, now or later, under a name that is free."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter that no sample uses."""
        ...

    async def sample(self, adapter: str | None, request: SampleRequest) -> SampleResult:
        """Sample from an adapter, or from the base model. Cancelling the call ends the samples."""
        ...
