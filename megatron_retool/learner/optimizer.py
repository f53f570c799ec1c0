"""Megatron's optimizer and learning-rate schedule, and one step of both."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import clip_grads, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from conversion.model.rules import updated_by_muon
from megatron_retool.config import ConfigError, LearnerConfig, OptimizerConfig
from megatron_retool.learner.performance import optimizer_state_options
from megatron_retool.learner.precision import muon_options, optimizer_options
from megatron_retool.learner.weights import global_parameters
from megatron_retool.target_sequences import OptimizerStep


def build_optimizer(
    learner: LearnerConfig,
    settings: OptimizerConfig,
    total_steps: int,
    model_chunks: Sequence[DistributedDataParallel],
) -> tuple[Any, OptimizerParamScheduler]:
    """A fresh optimizer on the present weights, and a schedule of ``total_steps``.

    Raises:
        ConfigError: the warm-up is as long as the whole schedule, or min_lr exceeds lr.
    """
    if settings.warmup_steps >= total_steps:
        raise ConfigError(
            f"optimizer.warmup_steps={settings.warmup_steps} must be less than the {total_steps} optimizer steps of "
            "the stage"
        )
    if settings.min_lr > settings.lr:
        raise ConfigError(f"optimizer.min_lr={settings.min_lr} exceeds optimizer.lr={settings.lr}")
    options = optimizer_options(learner, settings) | optimizer_state_options(settings)
    if settings.name == "muon":
        options |= muon_options(learner, settings)
        _leave_to_adamw(model_chunks)
    optimizer = get_megatron_optimizer(MegatronOptimizerConfig(**options), list(model_chunks))
    for part in optimizer.chained_optimizers:
        if getattr(getattr(part, "optimizer", None), "store_param_remainders", False):
            _save_whole_main_parameters(part)
    for chunk in model_chunks:
        for parameter in chunk.parameters():
            # The optimizer has taken an FP8 weight's floats and dropped them: a later one must not ask for them.
            parameter.__dict__.pop("get_high_precision_init_val", None)
    scheduler = OptimizerParamScheduler(
        optimizer,
        # Step k of the warm-up runs at (k + 1) / (warmup_steps + 1) of lr: none is lost at rate 0.
        init_lr=settings.lr / (settings.warmup_steps + 1),
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=total_steps,
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=total_steps,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def round_main_parameters(optimizer: Any, model_chunks: Sequence[DistributedDataParallel]) -> None:
    """Make the weights again from the main parameters, as a step ends; every rank calls it."""
    for part in optimizer.chained_optimizers:
        if getattr(part, "is_stub_optimizer", False):
            continue
        if part.config.reuse_grad_buf_for_mxfp8_param_ag:
            part._copy_main_params_to_param_buffer()
        else:
            part._copy_main_params_to_model_params()
    for chunk in model_chunks:
        chunk.start_param_sync(force_sync=True)


def keep_main_parameters(optimizer: Any, before: Any) -> None:
    """Let a stage's optimizer begin with the main parameters of the one before, where weights in FP8 have lost them.

    Args:
        optimizer, before: Megatron's distributed optimizers on the same parameters.
    """
    for part, earlier in zip(optimizer.chained_optimizers, before.chained_optimizers, strict=True):
        if getattr(part, "is_stub_optimizer", False):
            continue
        groups = part.shard_fp32_from_float16_groups, earlier.shard_fp32_from_float16_groups
        for group, kept in zip(*groups, strict=True):
            for main, value in zip(group, kept, strict=True):
                main.data.copy_(value)


def _leave_to_adamw(model_chunks: Sequence[DistributedDataParallel]) -> None:
    """Mark what Muon does not update. Megatron by itself would give it routers and heads of critics too."""
    for name, parameter in global_parameters(model_chunks):
        if not updated_by_muon(name, parameter.dim()):
            parameter.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]


def _save_whole_main_parameters(optimizer: Any) -> None:
    """Let checkpoints hold main parameters as float32, where Transformer Engine's Adam keeps 16 bits of each.

    Megatron-Core saves those bits as if they were the parameter, which loses it, and Transformer Engine refuses them
    when they are loaded. A main parameter's bits are those of the bfloat16 weight, followed by 16 zeros, plus what is
    kept, a number from -2^15 to 2^15 - 1.

    Args:
        optimizer: Megatron's DistributedOptimizer on it.
    """
    get, put = optimizer._get_main_param_and_optimizer_states, optimizer._set_main_param_and_optimizer_states

    def weight_bits(model_parameter: Any) -> torch.Tensor | None:
        group, number = optimizer.model_param_group_index_map[model_parameter]
        weight = optimizer.optimizer.param_groups[group]["params"][number]
        return weight.detach().view(torch.int16).int() << 16 if weight.dtype == torch.bfloat16 else None

    def get_whole(model_parameter: Any) -> dict[str, Any]:
        tensors: dict[str, Any] = get(model_parameter)
        bits = weight_bits(model_parameter)
        if bits is not None:
            tensors["param"] = (bits + tensors["param"].int()).view(torch.float32)
        return tensors

    def put_part(model_parameter: Any, tensors: dict[str, Any]) -> None:
        bits = weight_bits(model_parameter)
        if bits is not None:
            whole = tensors["param"].to(bits.device, torch.float32).view(torch.int32)
            # Half way between two weights lies 2^15, where another optimizer has rounded down.
            tensors = {**tensors, "param": (whole - bits).clamp(-(2**15), 2**15 - 1).to(torch.int16)}
        put(model_parameter, tensors)

    optimizer._get_main_param_and_optimizer_states = get_whole
    optimizer._set_main_param_and_optimizer_states = put_part


@contextlib.contextmanager
def step_settings(optimizer: Any, step: OptimizerStep) -> Iterator[None]:
    """Within it the optimizer, Megatron's AdamW, has a caller's settings in place of the run's."""
    own = {
        "lr": step.learning_rate,
        "betas": (step.beta1, step.beta2),
        "eps": step.eps,
        "weight_decay": step.weight_decay,
    }
    groups = [group for group in optimizer.param_groups if group["params"]]
    kept = [{name: group[name] for name in own} for group in groups]
    configs = {id(part.config): part.config for part in optimizer.chained_optimizers}.values()
    clips = [config.clip_grad for config in configs]
    try:
        for group in groups:
            # As the schedule does: biases and norms have no weight decay.
            group.update(own, weight_decay=step.weight_decay * group.get("wd_mult", 1.0))
        for config in configs:
            config.clip_grad = step.grad_clip_norm
        yield
    finally:
        for group, values in zip(groups, kept, strict=True):
            group.update(values)
        for config, clip in zip(configs, clips, strict=True):
            config.clip_grad = clip


def clip_and_apply(optimizer: Any) -> tuple[bool, float]:
    """Returns whether the update was applied, and the policy's gradient's norm before clipping.

    An update whose norm is above ``OptimizerConfig.skip_grad_norm`` changes no weight and no moment.
    Megatron's own step would apply a gradient that is not a number where no loss scaling looks for it, and it lets each
    rank compare its own rounding of the norm with the bound.
    """
    optimizers = [o for o in optimizer.chained_optimizers if not getattr(o, "is_stub_optimizer", False)]
    found_inf = optimizer.prepare_grads()
    norm = float("inf") if found_inf else float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return False, norm
    if exceeds_skip_norm(optimizer, norm):
        return False, norm
    # Of parameters that only observe the others (learner.mtp.detach_heads), which are clipped by themselves.
    norms: dict[str | None, float] = {None: norm, **optimizer._compute_grad_norms_by_group()}
    if broken := [value for value in norms.values() if not math.isfinite(value)]:
        return False, broken[0]
    for part in optimizers:
        groups: dict[str | None, list[torch.Tensor]] = {}
        for parameter in part.get_parameters() if part.config.clip_grad > 0 else ():
            groups.setdefault(getattr(parameter, "grad_norm_group", None), []).append(parameter)
        for group, parameters in groups.items():
            clip_grads.clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=part.config.clip_grad,
                total_norm=norms[group],
                use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    return bool(optimizer.step_with_ready_grads()), norm


def exceeds_skip_norm(optimizer: Any, norm: float) -> bool:
    """Whether an update with this finite gradient norm is to be left out; the same on every rank, all of which call it.

    Ranks sum the norm in groups of their own, whose results may differ in the last bit. Near the bound some would then
    update and others would not, so the largest one decides for all.
    """
    bound = float(optimizer.config.grad_norm_skip_threshold)
    if math.isinf(bound):
        return False
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    largest = torch.tensor(norm, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return bool(largest.item() > bound)
