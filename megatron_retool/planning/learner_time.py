"""How long a learner takes for a step's tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from conversion.model.architecture import Architecture
from conversion.model.flops import forward_flops, mlp_flops, pair_flops, quadratic_cost, token_flops
from conversion.model.layout import ParallelLayout
from megatron_retool.algorithms.dynamic_context import ranks_needed
from megatron_retool.config import LearnerConfig
from megatron_retool.planning.activations import PARAMETER_BYTES, block_layers
from megatron_retool.planning.hardware import Machines
from megatron_retool.planning.memory import adapters_of, trained_parameters
from megatron_retool.planning.workload import Workload


@dataclass(frozen=True)
class Assumptions:
    """What the hardware table does not say. Fractions of peaks that kernels and links reach.

    Attributes:
        dense_efficiency: matrix products and flash attention of a dense model, communication aside.
        moe_efficiency: the same with grouped matrix products of experts.
        cpu_efficiency: on one core, models of a million parameters (most of the time goes into small operations).
        fp8_speedup: of the kernels of an FP8 training step over bf16.
        link_efficiency: of NVLink and network bandwidth in collectives.
        hidden_context_exchange: share of context parallelism's key-value exchange that attention hides.
        storage_bandwidth: bytes/s of the shared file system per node.
        bucket_seconds: fixed cost of one weight-sync bucket.
        optimizer_bytes: memory traffic of AdamW for each parameter of a shard.
    """

    dense_efficiency: float = 0.55
    moe_efficiency: float = 0.25
    cpu_efficiency: float = 0.5
    fp8_speedup: float = 1.35
    link_efficiency: float = 0.75
    hidden_context_exchange: float = 0.5
    storage_bandwidth: float = 2e9
    bucket_seconds: float = 0.03
    optimizer_bytes: float = 34.0


@dataclass(frozen=True)
class LearnerTime:
    """Seconds of one learner phase on the slowest rank, over all mini-batches of a step.

    ``compute`` is the mean rank's arithmetic; the other parts come on top of it.
    """

    compute: float
    recompute: float
    tensor_exchange: float
    context_exchange: float
    expert_exchange: float
    bubble: float
    imbalance: float
    gradient_exchange: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return float(sum(vars(self).values()))

    def scaled(self, share: float) -> LearnerTime:
        """The phase over ``share`` of the step's mini-batches."""
        return LearnerTime(**{name: share * seconds for name, seconds in vars(self).items()})


def training_seconds(
    log_probs: LearnerTime, reference: LearnerTime | None, update: LearnerTime, critic: float
) -> float:
    """Seconds of the learner's passes in a step, one after another."""
    return log_probs.total + (reference.total if reference else 0.0) + update.total + critic


def recomputed_share(architecture: Architecture, learner: LearnerConfig, mean_length: float) -> float:
    """Share of a forward pass that recomputation repeats in the backward pass."""
    recompute = learner.recompute
    if recompute.granularity == "full":
        if (recompute.method or "uniform") == "uniform":
            return 1.0
        return block_layers(architecture, learner) / (architecture.num_layers // learner.pipeline_model_parallel_size)
    if recompute.granularity == "selective":
        a = architecture
        attention = pair_flops(a) * mean_length / 2
        mlp = mlp_flops(a)
        modules = recompute.modules or ["core_attn"]
        again = (attention if "core_attn" in modules else 0.0) + (mlp if {"mlp", "moe"} & set(modules) else 0.0)
        return again / (token_flops(a) + attention)
    return 0.0


def learner_time(
    architecture: Architecture,
    learner: LearnerConfig,
    layout: ParallelLayout,
    machines: Machines,
    workload: Workload,
    assumptions: Assumptions,
    training: bool,
) -> LearnerTime:
    """One pass over a step's batch: an update (``training``) or log-probs.

    Communication, per layer and token of a rank, w bytes an element, for each pass (1, or 3 and the recomputed share):

        TP   2 all-gathers and 2 reduce-scatters of h w (TP - 1) / TP each
        CP   keys and values of the other ranks, 2 kv / TP w (CP - 1), of which attention hides a part
        EP   2 all-to-alls of e h w (EP - 1) / EP for the e chosen experts, over s = TP ranks with sequence parallelism

    and once a mini-batch 4 (fp32 gradients) + b (parameters) bytes for each parameter, (D - 1) / D of them, over
    D = DP CP ranks; learner.overlap_grad_reduce and overlap_param_gather hide, at best, what fits behind one
    micro-batch's backward and forward pass.  The bubble is (PP - 1) / (VPP m) of the work with m micro-batches a rank.

    Imbalance: a mini-batch ends when the rank with the longest sequences is done; with few responses a rank that is the
    rank that holds the longest response of the mini-batch.
    """
    a, accelerator = architecture, machines.accelerator
    efficiency = assumptions.dense_efficiency
    if accelerator.is_cpu:
        efficiency = assumptions.cpu_efficiency
    elif a.is_moe:
        efficiency = assumptions.moe_efficiency
    if learner.fp8.recipe is not None:
        efficiency *= assumptions.fp8_speedup
    gpu_flops = accelerator.flops * efficiency
    lengths = workload.total_lengths(workload.responses)
    response_tokens = round(workload.responses * workload.lengths.mean)
    forward = forward_flops(a, lengths, response_tokens, masked=True)
    passes = 3.0 if training else 1.0
    computed = passes if adapters_of(learner) is None else _passes_with_adapters(a, learner, layout, training)
    again = recomputed_share(a, learner, workload.mean_length) if training else 0.0
    work = forward / layout.world_size / gpu_flops

    width = PARAMETER_BYTES[learner.dtype]
    layers = a.num_layers / layout.pipeline
    tokens = float(lengths.sum()) / (layout.data * layout.context)
    per_token_layers = tokens * layers * (passes + again)

    def seconds(bytes_per_token: float, group: int, count: float = 1.0) -> float:
        bandwidth = machines.bandwidth_between(group) * assumptions.link_efficiency
        return per_token_layers * count * bytes_per_token / bandwidth

    tp, cp, ep = layout.tensor, layout.context, layout.expert
    exchanges = 2.0 * a.sublayers / a.num_layers
    tensor_exchange = seconds(a.hidden_size * width * (tp - 1) / tp, tp, exchanges) if tp > 1 else 0.0
    context_exchange = expert_exchange = 0.0
    if cp > 1:
        sizes = np.full(len(lengths), cp, np.int64)
        if learner.dynamic_context_parallel:
            sizes = ranks_needed(lengths, learner.max_tokens_per_micro_batch, cp)
        others, share_of_others = (float(np.average(x, weights=lengths)) for x in (sizes - 1, 1 - 1 / sizes))
        keys_and_values = 2 * (a.key_value_size if a.latent is None else max(a.query_size, a.output_size))
        bytes_per_token = keys_and_values / tp * width * others
        shown = a.attention_layers / a.num_layers * (1 - assumptions.hidden_context_exchange)
        context_exchange = seconds(bytes_per_token, tp * cp) * shown
        if a.recurrent is not None:  # what is convolved, decays and rates to the ranks of the heads, and values back
            exchanged = a.recurrent.convolved_size + a.recurrent.rates + a.recurrent.value_size
            share = len(a.linear_layers) / a.num_layers
            context_exchange += seconds(exchanged / tp * width * share_of_others, tp * cp, share)
    if ep > 1:
        split = tp if layout.sequence_parallel else 1
        routed = (a.num_experts_per_tok or 0) * len(a.expert_layers) / a.num_layers / split
        expert_exchange = seconds(routed * a.expert_hidden_size * width * (ep - 1) / ep, ep * layout.expert_tensor, 2.0)

    mini_batches = max(1, math.ceil(workload.responses / workload.mini_batch_size)) if training else 1
    per_rank = tokens * layout.context / mini_batches
    micro_batches = max(1, math.ceil(per_rank / learner.max_tokens_per_micro_batch))
    base = work * (computed + again) + tensor_exchange + context_exchange + expert_exchange
    bubble = base * (layout.pipeline - 1) / ((layout.virtual_pipeline or 1) * micro_batches)
    imbalance = base * _imbalance(a, workload, layout.data, mini_batches)

    gradient_exchange = optimizer = 0.0
    if training:
        held = max(trained_parameters(a, layout, stage, adapters_of(learner)) for stage in range(layout.pipeline))
        one_pass = base / (3 * micro_batches * mini_batches)
        gradient_exchange, optimizer = (
            mini_batches * each for each in _step_seconds(learner, layout, machines, assumptions, held, one_pass)
        )
    return LearnerTime(
        compute=work * computed,
        recompute=work * again,
        tensor_exchange=tensor_exchange,
        context_exchange=context_exchange,
        expert_exchange=expert_exchange,
        bubble=bubble,
        imbalance=imbalance,
        gradient_exchange=gradient_exchange,
        optimizer=optimizer,
    )


def _step_seconds(
    learner: LearnerConfig,
    layout: ParallelLayout,
    machines: Machines,
    assumptions: Assumptions,
    held: float,
    one_pass: float,
) -> tuple[float, float]:
    """Exchange of gradients and parameters, and the optimizer, at the end of one mini-batch.

    Args:
        held: trained parameters of a rank.
        one_pass: seconds of the mini-batch's forward pass over one micro-batch.
    """
    ranks, width = layout.data * layout.context, PARAMETER_BYTES[learner.dtype]
    exchange = 0.0
    if ranks > 1:
        bandwidth = machines.bandwidth_between(ranks * layout.tensor) * assumptions.link_efficiency
        per_byte = held * (ranks - 1) / ranks / bandwidth
        # One micro-batch's backward pass can hide the sum, one's forward pass the gather.
        hidden_sum = 2 * one_pass if learner.overlap_grad_reduce else 0.0
        hidden_gather = one_pass if learner.overlap_param_gather else 0.0
        exchange = max(0.0, 4 * per_byte - hidden_sum) + max(0.0, width * per_byte - hidden_gather)
    shard = held / ranks if learner.use_distributed_optimizer else held
    if learner.optimizer.cpu_offload:
        return exchange, shard * (4 + width) / machines.accelerator.host_bandwidth
    return exchange, shard * assumptions.optimizer_bytes / machines.accelerator.bandwidth


def _passes_with_adapters(
    architecture: Architecture, learner: LearnerConfig, layout: ParallelLayout, training: bool
) -> float:
    """Matrix products of a pass over the model, in those of a forward pass without adapters.

    Training computes no gradients of the model's own matrices, a third of its products; the factors have all three
    kinds of products, in proportion to their elements.
    """
    factors, whole = (
        max(trained_parameters(architecture, layout, stage, adapters) for stage in range(layout.pipeline))
        for adapters in (adapters_of(learner), None)
    )
    return (2.0 if training else 1.0) + (3.0 if training else 1.0) * factors / whole


@lru_cache(maxsize=1024)
def _imbalance(architecture: Architecture, workload: Workload, data_parallel: int, mini_batches: int) -> float:
    """Relative excess of the heaviest data-parallel rank over the mean one, averaged over mini-batches.

    Responses are spread over mini-batches by a shuffle.  The balanced partition over ranks
    (algorithms.sequence_balance) comes close to its lower bound, the larger of the mean load and the heaviest response,
    which is what counts here.
    """
    if data_parallel == 1:
        return 0.0
    lengths = workload.total_lengths(workload.responses)
    costs = lengths + quadratic_cost(architecture) * lengths**2
    costs = np.random.default_rng(0).permutation(costs)
    excess = [
        max(1.0, data_parallel * float(part.max()) / float(part.sum())) - 1
        for part in np.array_split(costs, mini_batches)
        if len(part)
    ]
    return float(np.mean(excess))
