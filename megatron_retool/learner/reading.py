"""What a model's head says of each response token, without a gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_retool.learner import parallel
from megatron_retool.learner.micro_batch import MicroBatch
from megatron_retool.learner.pipeline import forward
from megatron_retool.learner.routing_replay import RoutingPass
from megatron_retool.routed_experts import ExpertArray

FloatArray = npt.NDArray[np.float32]


class LogProbs(TypedDict):
    """What ``Learner.log_probs`` finds."""

    log_probs: FloatArray
    entropy: FloatArray
    metrics: dict[str, float]
    routed_experts: NotRequired[ExpertArray]
    routing_flips: NotRequired[FloatArray]


class FusedUpdate(TypedDict):
    """What ``Learner.update_fused`` finds."""

    log_probs: FloatArray
    entropy: FloatArray
    metrics: dict[str, float]
    routing_flips: NotRequired[FloatArray]


@torch.no_grad()
def read_tokens(
    modules: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    columns: int,
    num_tokens: int,
    *,
    max_tokens: int,
    device: torch.device,
    head_options: dict[str, Any],
    routing: RoutingPass | None = None,
) -> FloatArray:
    """The head's ``columns`` of a batch: float32 [columns, T] on every rank, 0 at tokens that it does not read.

    Args:
        modules: this rank's virtual pipeline stages.
        micro_batches: this rank's.
        num_tokens: T, response tokens of the whole batch.
        max_tokens: of a micro-batch.
        head_options: keyword arguments of the models' forward pass.
    """
    result = torch.zeros(columns, num_tokens, dtype=torch.float32, device=device)

    def collect(micro_batch: MicroBatch, output: Tensor) -> None:
        positions = torch.from_numpy(micro_batch.response_positions).to(device)[micro_batch.slots]
        result[:, positions] = output.view(columns, -1)

    for module in modules:
        module.eval()
    with routing or contextlib.nullcontext():
        forward(modules, micro_batches, {**head_options, "routing": routing}, max_tokens, collect)
    # Every token was found by one context-parallel rank of one data-parallel rank.
    parallel.sum_over_data_parallel(result)
    return result.cpu().numpy()
