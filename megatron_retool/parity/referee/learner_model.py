"""The run's learner once more, in one process: log-probs, hidden states and experts of the sampled tokens.

Precision, kernels and packing are the run's; the layout is that of one rank, on whatever device this host has.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from conversion.model.architecture import Architecture
from megatron_retool.config import LearnerConfig
from megatron_retool.parity.referee.referee_model import Reading
from megatron_retool.parity.referee.stored_step import StoredStep, Weights
from megatron_retool.trajectory import TrajectoryBatch


def single_rank(learner: LearnerConfig) -> LearnerConfig:
    """The same learner in one process."""
    return replace(
        learner,
        world_size=1,
        device="auto",
        tensor_model_parallel_size=1,
        sequence_parallel=False,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
    )


def replays_engine(step: StoredStep, batch: TrajectoryBatch) -> bool:
    """Whether the learner took the engine's choice of experts for its log-probs."""
    return step.config.learner.routing_replay == "rollout" and batch.routed_experts is not None


def describe_layout(learner: LearnerConfig) -> str:
    """Such as "4 ranks, TP 2, PP 2"."""
    sizes = {
        "TP": learner.tensor_model_parallel_size,
        "PP": learner.pipeline_model_parallel_size,
        "VPP": learner.virtual_pipeline_model_parallel_size or 1,
        "CP": learner.context_parallel_size,
        "EP": learner.expert_model_parallel_size,
    }
    ranks = "1 rank" if learner.world_size == 1 else f"{learner.world_size} ranks"
    return ", ".join([ranks, *(f"{name} {size}" for name, size in sizes.items() if size > 1)])


@torch.no_grad()
def read_learner(
    step: StoredStep,
    architecture: Architecture,
    batch: TrajectoryBatch,
    watched: npt.NDArray[np.bool_],
    on_tokens: Callable[[int], object] = lambda _: None,
) -> Reading:
    """What the learner makes of the tokens of the batch's loss mask.

    Args:
        watched: bool [n], the tokens whose hidden states are kept.
        on_tokens: called with the number of sampled tokens that were read.

    Raises:
        ConfigError: the learner's precision does not fit this machine.
        ValueError: a response exceeds learner.max_tokens_per_micro_batch.
    """
    from conversion.model import flops
    from megatron_retool.learner import parallel
    from megatron_retool.learner.model import build_model_chunks
    from megatron_retool.learner.packing import Packer
    from megatron_retool.learner.precision import acceleration_for, check_precision, token_multiple
    from megatron_retool.learner.routing_replay import RoutingReplay
    from megatron_retool.learner.specs import build_transformer_config

    config = step.config
    settings = single_rank(config.learner)
    acceleration = acceleration_for(settings)
    check_precision(settings, settings.optimizer, architecture, acceleration)
    layout, device = settings.layout(architecture), parallel.resolve_device("auto")
    parallel.initialize(layout, device, config.trainer.seed)
    try:
        transformer_config = build_transformer_config(architecture, settings, layout, acceleration)
        (model,) = build_model_chunks(architecture, transformer_config, acceleration)
        _load(model, architecture, step.weights)
        if settings.match_engine == "exact":
            from megatron_retool.learner import exact

            exact.place([model], architecture)
        model.eval()
        packer = Packer(
            layout,
            settings.max_tokens_per_micro_batch,
            0,
            0,
            device,
            quadratic_cost=flops.quadratic_cost(architecture),
            token_multiple=token_multiple(settings),
            attention_buckets=acceleration.packs_attention(architecture),
        )
        # Where each sampled token stands among the sampled, and among the watched.
        place = np.cumsum(batch.loss_mask) - 1
        result = _Found(len(watched), architecture)
        routing = None
        if replays_engine(step, batch):
            replay = RoutingReplay(config.learner, config.algorithm, architecture, transformer_config, [model], device)
            routing = replay.reading(batch, reference=False)
        for micro_batch in packer.micro_batches(batch):
            tokens = place[micro_batch.response_positions[micro_batch.slots.cpu().numpy()]]
            watch = _Watch(micro_batch.head_positions, torch.from_numpy(watched[tokens]).to(device))
            with routing or nullcontext(), _hooks(model, architecture, watch):
                log_probs = model(
                    micro_batch,
                    routing=routing,
                    sampling=config.rollout.train,
                    chunk_tokens=settings.log_prob_chunk_tokens,
                    fp32_head=settings.fp32_lm_head,
                )[0]
            result.add(tokens, log_probs, watch)
            on_tokens(len(tokens))
        return result.reading(watched)
    finally:
        parallel.shutdown()


def _load(model: Any, architecture: Architecture, weights: Weights) -> None:
    from megatron_retool.learner.checkpoint.load import load_model_weights
    from megatron_retool.learner.weights import load_hf_weights

    if weights.mcore_dir is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch, about how Megatron-Core uses it
            load_model_weights([model], architecture, weights.mcore_dir)
    else:
        load_hf_weights([model], architecture, weights.path)


@dataclass
class _Watch:
    """What hooks find of one micro-batch: hidden states of the ``watched`` among ``rows``, experts of all ``rows``."""

    rows: Tensor
    watched: Tensor
    hidden: list[Tensor] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)


class _Found:
    """What all micro-batches gave, in the order of the batch's sampled tokens."""

    def __init__(self, tokens: int, architecture: Architecture) -> None:
        self._log_probs = np.zeros(tokens)
        self._hidden: dict[int, npt.NDArray[np.float32]] = {}
        self._experts = (
            np.zeros((tokens, len(architecture.expert_layers), architecture.num_experts_per_tok or 0), np.int64)
            if architecture.is_moe
            else None
        )

    def add(self, tokens: npt.NDArray[np.int64], log_probs: Tensor, watch: _Watch) -> None:
        self._log_probs[tokens] = log_probs.double().cpu().numpy()
        states = torch.stack(watch.hidden, 1).numpy()
        self._hidden.update(zip(tokens[watch.watched.cpu().numpy()].tolist(), states, strict=True))
        if self._experts is not None:
            self._experts[tokens] = torch.stack(watch.experts, 1).numpy()

    def reading(self, watched: npt.NDArray[np.bool_]) -> Reading:
        hidden = np.stack([self._hidden[token] for token in np.flatnonzero(watched).tolist()])
        return Reading(self._log_probs, hidden, self._experts)


@contextmanager
def _hooks(model: Any, architecture: Architecture, watch: _Watch) -> Iterator[None]:
    def keep(_: Any, __: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        watch.hidden.append(states.squeeze(1)[watch.rows][watch.watched].float().cpu())

    def route(_: Any, __: Any, output: tuple[Tensor, Tensor]) -> None:
        chosen = output[1][watch.rows].float().topk(architecture.num_experts_per_tok or 1, -1).indices
        watch.experts.append(chosen.cpu())

    decoder = model.decoder
    modules = [model.embedding, *decoder.layers, decoder.final_layernorm]
    handles = [module.register_forward_hook(keep) for module in modules]
    if architecture.is_moe:
        routed = [decoder.layers[number] for number in architecture.expert_layers]
        handles += [layer.mlp.router.register_forward_hook(route) for layer in routed]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
