"""A published run of the ReTool recipe, as facts to hold the predictions against.

Qwen2.5-32B-Instruct after SFT, one node of 8 H200, verl with FSDP (parameters and optimizer offloaded to host memory)
and vLLM (two engines of TP 4, 90 % of the memory), ten steps in October 2025.

The run's batch is 512 prompts x 16 responses = 8192 responses in 8 mini-batches of 1024 (verl counts prompts).  It
follows from the logged figures themselves: 24 892 834 tokens / 8192 = 3038.7 = 2707 + 332, and clip ratios such as
0.85 % and 0.94 % are 70 and 77 of 8192 responses, but no multiple of 1 / 512.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_retool.planning.engine_model import EngineModel, EngineProfile
from megatron_retool.planning.hardware import ACCELERATORS
from megatron_retool.planning.models import preset
from megatron_retool.planning.simulate import StepResult
from megatron_retool.planning.timing import predict_generation
from megatron_retool.planning.workload import LengthDistribution, Workload

GPUS = 8
MODEL = "qwen2.5-32b"
PROMPTS, RESPONSES_PER_PROMPT, MINI_BATCH = 512, 16, 1024
PROMPT_TOKENS, RESPONSE_LIMIT = 332.0, 16384
MFU = 0.397
"""perf/mfu/actor of step 1, by verl's count of FLOPs: see ``verl_training_flops``."""


@dataclass(frozen=True)
class PublishedStep:
    """Logged figures of one step; None: not published. Seconds, tokens, shares."""

    number: int
    response_mean: float
    clip_ratio: float
    num_turns: float | None = None
    total_tokens: float | None = None
    generation: float | None = None
    log_probs: float | None = None
    update: float | None = None
    step: float | None = None
    slowest_response: float | None = None
    tokens_per_second_per_gpu: float | None = None


STEPS = {
    step.number: step
    for step in (
        PublishedStep(1, 2707, 0.0085, 7.82, 24_892_834, 2529, 525, 1795, 4853, 2492, 641),
        # The mean follows from 650 tokens/s/GPU x 8 GPUs x 4859 s = 8192 x (332 + mean).
        PublishedStep(2, 2752, 0.0094, 7.79, None, 2543, 510, 1801, 4859, None, 650),
        PublishedStep(9, 4330, 0.0370, None, None, None, None, None, 136 * 60, 76.2 * 60, None),
        # Seconds: 36.5 M tokens / (595 tokens/s/GPU x 8). Step 10's validation cannot be part of them: the slowest
        # response and an update at the same MFU leave no room for it.
        PublishedStep(10, 4116, 0.0293, 7.10, 36.5e6, None, None, None, 36.5e6 / (595 * 8), 70.8 * 60, 595),
    )
}
VALIDATION_SECONDS = 913.0
"""Of step 5: 30 problems x 30 responses."""

STACK = EngineProfile(fixed_seconds=31e-3, keeps_prefix=False)
"""The serving stack of that run: 31 ms outside the kernels in every decode step, fitted to step 1's generation; turns
that find their keys and values evicted, because 4096 trajectories share an engine's cache of about 600."""


def workload(step: PublishedStep) -> Workload:
    """num_turns counts user, assistant and tool messages: 2 calls + 2."""
    turns = step.num_turns or 7.10
    return Workload(
        groups=PROMPTS,
        group_size=RESPONSES_PER_PROMPT,
        mini_batch_size=MINI_BATCH,
        prompt_tokens=PROMPT_TOKENS,
        lengths=LengthDistribution.fit(step.response_mean, step.clip_ratio, RESPONSE_LIMIT),
        tool_calls=(turns - 2) / 2,
    )


def engine(profile: EngineProfile = STACK) -> EngineModel:
    return EngineModel(
        preset(MODEL),
        ACCELERATORS["H200"],
        tensor_parallel=4,
        profile=profile,
        memory_fraction=0.9,
        max_running=1024,
    )


@lru_cache(maxsize=32)
def predicted_generation(step: PublishedStep, profile: EngineProfile = STACK) -> StepResult:
    return predict_generation(engine(profile), 2, workload(step))


def verl_training_flops(work: Workload) -> float:
    """Forward and backward FLOPs of a step as verl counts them, which its MFU is made of.

    6 FLOPs for each parameter and token, embedding table included, and 12 layers q s^2 for a sequence of s tokens: the
    whole score matrix, not its causal half.
    """
    a = preset(MODEL)
    attention = a.hidden_size * (2 * a.query_size + 2 * a.key_value_size)
    dense = a.num_layers * (attention + 3 * a.hidden_size * a.ffn_hidden_size) + 2 * a.vocab_size * a.hidden_size
    lengths = work.total_lengths(work.responses)
    return float(6 * dense * lengths.sum() + 12 * a.num_layers * a.query_size * (lengths**2).sum())


def predicted_update(step: PublishedStep) -> float:
    """Seconds of the update at the published MFU."""
    return verl_training_flops(workload(step)) / (GPUS * ACCELERATORS["H200"].flops * MFU)


def predicted_log_probs(step: PublishedStep) -> float:
    """A forward pass is a third of forward and backward; the same share of the peak is assumed."""
    return predicted_update(step) / 3
