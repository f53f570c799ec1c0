"""Data parallelism around the model: Megatron's buffers of gradients and weights, exchanged at once or in buckets.

Without overlap the gradients of a mini-batch are summed in one go at its end, and the optimizer's step gathers the
weights.  With it, a bucket's sum starts as soon as the last micro-batch's backward pass has all its gradients, and a
bucket's gather when a forward pass first asks for one of its weights.  Megatron notices both by hooks, on autograd and
on modules' forward passes.  The output layer's weight passes neither: ``log_probs.py`` reads it and adds its gradient
directly, so it is announced here.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import Module, Parameter, ParameterList

from megatron_retool.config import LearnerConfig
from megatron_retool.learner.model import PackedModel
from megatron_retool.learner.performance import data_parallel_options
from megatron_retool.learner.transformer_engine import keep_weights_in_fp8


class _Collectable(DistributedDataParallel):
    """Megatron's, which Python's collector can free: autograd holds its hooks where the collector does not look, so
    that they must not hold it, and with it the whole learner and the process groups of its layout."""

    def _make_backward_post_hook(self, param: Parameter) -> Any:
        return DistributedDataParallel._make_backward_post_hook(weakref.proxy(self), param)


def wrap(
    config: TransformerConfig, learner: LearnerConfig, chunks: Sequence[PackedModel]
) -> list[DistributedDataParallel]:
    """``chunks`` (this rank's virtual pipeline stages) in Megatron's DDP, with their output layer announced to it."""
    if learner.fp8.parameters:
        keep_weights_in_fp8(config, chunks)
    options = DistributedDataParallelConfig(**data_parallel_options(learner))
    # As in Megatron's own training: what later chunks and stages exchange is not on the critical path.
    wrapped = [_Collectable(config, options, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)]
    for outer, chunk in zip(wrapped, chunks, strict=True):
        _count_padding(outer)
        _announce_head(outer, chunk, options)
        if options.overlap_param_gather:
            _gather_with_owners(outer)
    return wrapped


def _gather_with_owners(outer: DistributedDataParallel) -> None:
    """Gather the weights of a ParameterList when the module that has it is called, since nothing calls the list itself.

    Without it adapters would compute with what only this rank has updated.
    """
    hook = outer._make_forward_pre_hook()

    def gather(module: Module, _inputs: Any) -> None:
        for child in module.children():
            if isinstance(child, ParameterList):
                hook(child)

    for module in outer.module.modules():
        if any(isinstance(child, ParameterList) for child in module.children()):
            module.register_forward_pre_hook(gather)


def _count_padding(outer: DistributedDataParallel) -> None:
    """Let checkpoints find every parameter's optimizer state where a buffer has several buckets.

    Megatron-Core joins the buckets' states without the padding at each bucket's end and cuts them at positions
    that include it: what follows a padded bucket would be saved shifted (``get_parameter_state_dp_zero`` and
    ``sharded_param_state_fully_reshardable``).  Two pipeline stages with a tied embedding have several buckets always.
    """
    for buffer in (*outer.buffers, *outer.expert_parallel_buffers):
        buffer.numel_unpadded = buffer.numel
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()


def _announce_head(outer: DistributedDataParallel, chunk: PackedModel, options: DistributedDataParallelConfig) -> None:
    weight = chunk.own_head_weight()
    if weight is None or not weight.requires_grad:  # frozen under adapters
        return
    group: Any = outer.param_to_bucket_group[weight]
    if options.overlap_param_gather:
        chunk.before_head = group.finish_param_sync
    if options.overlap_grad_reduce:
        chunk.head_gradient_added = lambda: group.register_grad_ready(weight, outer.force_all_reduce)


@contextlib.contextmanager
def gradients_stay(config: TransformerConfig, chunks: Sequence[Any]) -> Iterator[None]:
    """Within it, passes add to the gradients that each rank has, and nothing is summed over ranks.

    A sum is made in place: gradients of a later pass would be added to those that are summed already, and these would
    be counted once for each rank at the next sum.
    """
    kept = config.no_sync_func, config.finalize_model_grads_func
    # The schedule's own no_sync leaves out the last micro-batch, whose hooks would start the sum.
    config.no_sync_func = config.finalize_model_grads_func = None
    try:
        with contextlib.ExitStack() as stack:
            for chunk in chunks:
                stack.enter_context(chunk.no_sync())
            yield
    finally:
        config.no_sync_func, config.finalize_model_grads_func = kept


def start_gradient_sums(chunks: Sequence[Any]) -> None:
    """Start the sums that hooks would have started, where communication overlaps and ``gradients_stay`` kept them."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_grad_reduce:
            chunk.start_grad_sync()


def finish_gathering(chunks: Sequence[Any]) -> None:
    """Make the weights whole that an optimizer step has left to the next forward pass.

    Whatever reads or moves them otherwise (export, checkpoint, offload) needs it, on all ranks. Does nothing where no
    gather is outstanding, or without overlap.
    """
    groups = list(_gathered_in_forward(chunks))
    for group in groups:
        if not group.param_gather_dispatched:
            group.start_param_sync()
    for group in groups:
        group.finish_param_sync(skip_next_bucket_dispatch=True)


def _gathered_in_forward(chunks: Sequence[Any]) -> Iterator[Any]:
    for chunk in chunks:
        if chunk.use_forward_hook:
            yield from (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
