"""One pass of Megatron's pipeline schedule over micro-batches, and what ranks add up around it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from conversion.model.layout import ParallelLayout
from megatron_retool.algorithms.policy_loss import LossOutput, reduce_metrics
from megatron_retool.learner import parallel
from megatron_retool.learner.micro_batch import MicroBatch


def forward_backward(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    options: dict[str, Any],
    max_tokens: int,
    loss: Callable[[MicroBatch, Tensor], LossOutput],
) -> list[dict[str, Tensor]]:
    """Forward and backward: gradients of the sum of the losses.

    Args:
        chunks: this rank's virtual pipeline stages.
        options: keyword arguments of the model's forward pass.
        max_tokens: of a micro-batch.
        loss: of a micro-batch and the head's output.

    Returns:
        The losses' metrics, one of each micro-batch; none on pipeline stages before the last.
    """
    metrics: list[dict[str, Tensor]] = []

    def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> Any:
        micro_batch = next(iterator)

        def finish(output: Tensor) -> Any:
            result = loss(micro_batch, output)
            metrics.append(result.metrics)
            # The token count would divide the gradient, which is normalised already (sum_gradients drops it).
            return result.loss, torch.zeros((), dtype=torch.int, device=output.device), {}

        return model(micro_batch, **options), finish

    _run(forward_step, chunks, micro_batches, max_tokens, forward_only=False)
    return metrics


def forward(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    options: dict[str, Any],
    max_tokens: int,
    collect: Callable[[MicroBatch, Tensor], Any],
) -> None:
    """Only forward; ``collect`` gets each micro-batch with the head's output, on the last pipeline stage."""

    def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> Any:
        micro_batch = next(iterator)
        return model(micro_batch, **options), lambda output, non_loss_data=False: collect(micro_batch, output)

    _run(forward_step, chunks, micro_batches, max_tokens, forward_only=True)


def _run(
    forward_step: Callable[[Iterator[MicroBatch], torch.nn.Module], Any],
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    max_tokens: int,
    forward_only: bool,
) -> None:
    several = len(chunks) > 1
    iterators = [iter(micro_batches) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if several else iterators[0],
        model=list(chunks) if several else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=max_tokens,  # a placeholder: stages exchange the real shapes
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


@functools.wraps(finalize_model_grads)
def sum_gradients(model: Any, num_tokens: Any = None, **kwargs: Any) -> None:
    """Add up gradients over ranks, without a division."""
    # calculate_per_token_loss makes Megatron's DDP sum; without a token count nothing is divided afterwards.
    finalize_model_grads(model, None, **kwargs)


def whole_sequences(micro_batch: MicroBatch, output: Tensor) -> Tensor:
    """[columns, n] at the head's tokens -> [columns, R] at all response tokens, on every rank that shares them."""
    if micro_batch.context_size == 1 and output.size(1) == len(micro_batch.response_positions):
        return output
    whole = output.new_zeros(output.size(0), len(micro_batch.response_positions))
    whole = whole.index_copy(1, micro_batch.slots, output)
    if micro_batch.context_size == 1:
        return whole
    return _SumOverContextParallel.apply(whole, parallel.context_group(micro_batch.context_size))


def reported_once(micro_batch: MicroBatch, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """Metrics that all ranks know that share a micro-batch, for ``reduce_over_ranks``: of one, and zeros of others."""
    if micro_batch.context_rank == 0:
        return metrics
    return {name: torch.zeros_like(pair) for name, pair in metrics.items()}


class _SumOverContextParallel(torch.autograd.Function):
    """Add up what context-parallel ranks hold of the same sequences.

    Every rank then computes the same loss from the sum, so each rank's own part gets the gradient as it is: summing
    gradients over ranks here would count the loss CP times.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        x = x.clone()
        torch.distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def reduce_over_ranks(
    parts: Sequence[dict[str, Tensor]], layout: ParallelLayout, device: torch.device
) -> dict[str, float]:
    """Sum (sum, count) pairs over micro-batches and ranks; the same answer on every rank.

    Args:
        parts: of this rank's micro-batches, float64 [2] by name.
    """
    names = sorted(parts[0]) if parts else []
    if layout.pipeline > 1:
        # Earlier stages see no loss and do not know the names.
        box = [names]
        torch.distributed.broadcast_object_list(
            box,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        names = box[0]
    total = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    for part in parts:
        total += torch.stack([part[name] for name in names])
    parallel.sum_over_data_parallel(total)
    return reduce_metrics([dict(zip(names, total.cpu(), strict=True))])
