"""Options that change a training step's speed and memory and not its mathematics: rules, and Megatron's words for them.

No CUDA, Transformer Engine or Megatron import happens here, so that every rule can be checked and tested anywhere.
"""

from __future__ import annotations

from typing import Any

from megatron_retool.config import ConfigError, LearnerConfig
from megatron_retool.learner.precision import Acceleration


def check_performance(learner: LearnerConfig, acceleration: Acceleration) -> None:
    """Hold the settings against each other and the machine, before any weight is read.

    Raises:
        ConfigError: naming the key, what is missing and what would do.
    """
    if learner.overlap_param_gather and not learner.use_distributed_optimizer:
        raise ConfigError(
            "learner.overlap_param_gather=true needs learner.use_distributed_optimizer=true: without it no rank "
            "gathers weights"
        )
    if learner.overlap_param_gather and not learner.overlap_grad_reduce:
        raise ConfigError("learner.overlap_param_gather=true needs learner.overlap_grad_reduce=true")
    if learner.gradient_bucket_size is not None and not learner.overlap_grad_reduce:
        raise ConfigError(
            "learner.gradient_bucket_size belongs to learner.overlap_grad_reduce=true: without overlap everything is "
            "summed at once"
        )
    if learner.overlap_p2p_comm and learner.virtual_pipeline_model_parallel_size is None:
        raise ConfigError(
            "learner.overlap_p2p_comm=true needs learner.virtual_pipeline_model_parallel_size: only the interleaved "
            "schedule has other chunks to compute while one is under way"
        )


def data_parallel_options(learner: LearnerConfig) -> dict[str, Any]:
    """Keyword arguments of Megatron's DistributedDataParallelConfig: fp32 gradients, summed."""
    return {
        "use_distributed_optimizer": learner.use_distributed_optimizer,
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": learner.overlap_grad_reduce,
        "overlap_param_gather": learner.overlap_param_gather,
        "bucket_size": learner.gradient_bucket_size,
    }


def pipeline_options(learner: LearnerConfig, acceleration: Acceleration) -> dict[str, Any]:
    """Keyword arguments of Megatron's TransformerConfig: how stages exchange activations and gradients."""
    return {
        "overlap_p2p_comm": learner.overlap_p2p_comm,
        # One batch of all sends and receives is over as a whole; what overlaps is waited for one by one.
        "batch_p2p_comm": not learner.overlap_p2p_comm,
        "batch_p2p_sync": acceleration.cuda,
    }
