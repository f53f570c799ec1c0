"""Options that change a training step's speed and memory and not its mathematics: rules, and Megatron's words for them.

No CUDA, Transformer Engine or Megatron import happens here, so that every rule can be checked and tested anywhere.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from conversion.model.architecture import Architecture
from conversion.model.layout import ParallelLayout
from megatron_retool.config import ConfigError, LearnerConfig, OptimizerConfig
from megatron_retool.learner.precision import DTYPES, Acceleration, engine_version

FUSED_PERMUTATION = (2, 1)
FUSED_ROUTER = (2, 6)
"""Versions of Transformer Engine from which Megatron-Core takes its kernels."""


def check_performance(
    learner: LearnerConfig,
    optimizer: OptimizerConfig,
    architecture: Architecture,
    layout: ParallelLayout,
    acceleration: Acceleration,
) -> None:
    """Hold the settings against the model and the machine, before any weight is read.

    What settings say of one another is ``LearnerConfig.check``'s.

    Raises:
        ConfigError: naming the key, what is missing and what would do.
    """
    _check_experts(learner, architecture, layout, acceleration)
    _check_offloading(learner, architecture, acceleration)
    learner.check_optimizer("optimizer", optimizer, architecture)
    if learner.share_prefixes and architecture.attention_sinks:
        raise ConfigError("learner.share_prefixes=true does not go with this model's attention sinks: set it to false")
    if learner.share_prefixes and architecture.indexer is not None:
        raise ConfigError(
            "learner.share_prefixes=true does not go with this model's sparse attention, whose indexer chooses keys of "
            "one text: set it to false"
        )
    if learner.share_prefixes and architecture.linear_layers:
        raise ConfigError(
            "learner.share_prefixes=true does not go with this model's layers without attention, whose state would "
            "have to branch where a common prefix ends: set it to false"
        )
    if learner.share_prefixes and architecture.sliding_window is not None:
        raise ConfigError(
            f"learner.share_prefixes=true does not go with this model's sliding window of "
            f"{architecture.sliding_window} tokens: set it to false"
        )
    if optimizer.use_precision_aware_optimizer and not (acceleration.cuda and acceleration.transformer_engine):
        raise ConfigError(
            "learner.optimizer.use_precision_aware_optimizer=true needs CUDA and Transformer Engine, whose Adam it is: "
            "set it to false"
        )


def _check_experts(
    learner: LearnerConfig, architecture: Architecture, layout: ParallelLayout, acceleration: Acceleration
) -> None:
    flex = learner.moe_token_dispatcher_type == "flex"
    for key, wanted, default, version in (
        ("moe_permute_fusion", bool(learner.moe_permute_fusion), "false", FUSED_PERMUTATION),
        ("moe_router_fusion", learner.moe_router_fusion, "false", FUSED_ROUTER),
        ("moe_token_dispatcher_type=flex", flex, "alltoall", (0, 0)),
    ):
        key = f"learner.{key}"
        cure = f"set {key.partition('=')[0]}={default}"
        if wanted and not architecture.is_moe:
            raise ConfigError(f"{key} needs a mixture-of-experts model, and this is a dense one: {cure}")
        if wanted and not (acceleration.cuda and acceleration.transformer_engine):
            raise ConfigError(f"{key} needs CUDA and Transformer Engine: {cure}")
        if wanted and engine_version(acceleration) < version:
            raise ConfigError(
                f"{key} needs Transformer Engine {version[0]}.{version[1]} or later, found "
                f"{acceleration.transformer_engine}: {cure}"
            )
    if learner.moe_router_fusion and architecture.router_group_score == "best":
        raise ConfigError(
            f"learner.moe_router_fusion=true does not go with this {architecture.family} model, whose groups of "
            "experts are chosen by their best one: the kernel adds up several. Set it to false"
        )
    if not flex:
        return
    if layout.expert * layout.expert_tensor == 1:
        raise ConfigError(
            "learner.moe_token_dispatcher_type=flex needs learner.expert_model_parallel_size above 1: without it no "
            "token leaves its rank"
        )
    if importlib.util.find_spec("deep_ep") is None:
        raise ConfigError(
            "learner.moe_token_dispatcher_type=flex needs the package deep_ep (https://github.com/deepseek-ai/DeepEP), "
            "which is not installed: install it, or set learner.moe_token_dispatcher_type=alltoall"
        )


def _check_offloading(learner: LearnerConfig, architecture: Architecture, acceleration: Acceleration) -> None:
    count = learner.cpu_offloading_num_layers
    if not count:
        return
    key = f"learner.cpu_offloading_num_layers={count}"
    if not (acceleration.cuda and acceleration.transformer_engine):
        raise ConfigError(f"{key} needs CUDA and Transformer Engine: set it to 0")
    if count >= architecture.num_layers:
        raise ConfigError(f"{key} must be less than the model's {architecture.num_layers} layers")


def data_parallel_options(learner: LearnerConfig) -> dict[str, Any]:
    """Keyword arguments of Megatron's DistributedDataParallelConfig: fp32 gradients, summed."""
    return {
        "use_distributed_optimizer": learner.use_distributed_optimizer,
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": learner.overlap_grad_reduce,
        "overlap_param_gather": learner.overlap_param_gather,
        "bucket_size": learner.gradient_bucket_size,
        "fp8_param_gather": learner.fp8.parameters and learner.fp8.recipe != "nvfp4",
        "fp4_param_gather": learner.fp8.parameters and learner.fp8.recipe == "nvfp4",
        "reuse_grad_buf_for_mxfp8_param_ag": learner.fp8.parameters and learner.fp8.recipe == "mxfp8",
    }


def optimizer_state_options(optimizer: OptimizerConfig) -> dict[str, Any]:
    """Keyword arguments of Megatron's OptimizerConfig for the dtypes of its state."""
    if not optimizer.use_precision_aware_optimizer:
        return {}
    return {
        "use_precision_aware_optimizer": True,
        "main_params_dtype": DTYPES[optimizer.main_params_dtype],
        "exp_avg_dtype": DTYPES[optimizer.exp_avg_dtype],
        "exp_avg_sq_dtype": DTYPES[optimizer.exp_avg_sq_dtype],
        "store_param_remainders": optimizer.main_params_dtype == "float32",
    }


def layer_options(learner: LearnerConfig, acceleration: Acceleration) -> dict[str, Any]:
    """Keyword arguments of Megatron's TransformerConfig: fused kernels, experts' tokens, activations on the host."""
    engine = acceleration.cuda and acceleration.transformer_engine is not None
    fused_permutation = learner.moe_permute_fusion
    if fused_permutation is None:
        fused_permutation = engine and engine_version(acceleration) >= FUSED_PERMUTATION
    options: dict[str, Any] = {
        # Under adapters no weight of these layers has a gradient.
        "gradient_accumulation_fusion": learner.gradient_accumulation_fusion
        and not learner.lora.rank
        and (engine or acceleration.fused_weight_gradient),
        "moe_token_dispatcher_type": learner.moe_token_dispatcher_type,
        "moe_permute_fusion": fused_permutation,
        "moe_router_fusion": learner.moe_router_fusion,
    }
    if learner.moe_token_dispatcher_type == "flex":
        options["moe_flex_dispatcher_backend"] = "deepep"
    if learner.cpu_offloading_num_layers:
        options |= {"cpu_offloading": True, "cpu_offloading_num_layers": learner.cpu_offloading_num_layers}
    return options


def pipeline_options(learner: LearnerConfig, acceleration: Acceleration) -> dict[str, Any]:
    """Keyword arguments of Megatron's TransformerConfig: how stages exchange activations and gradients."""
    return {
        "overlap_p2p_comm": learner.overlap_p2p_comm,
        # One batch of all sends and receives is over as a whole; what overlaps is waited for one by one.
        "batch_p2p_comm": not learner.overlap_p2p_comm,
        "batch_p2p_sync": acceleration.cuda,
    }
