"""Low-rank adapters (LoRA, arXiv:2106.09685) on the linear layers of a frozen model, in any parallel layout.

    y = base(x) + (alpha / rank) fuse(B_1 A_1 x, B_2 A_2 x, ...)          A_i [rank, in], B_i [out_i, rank]

A layer of Megatron fuses several matrices of Hugging Face (q, k and v; gate and up).  Each has factors of its own, as
in PEFT, and ``fuse`` lays their outputs out as the rows of the fused weight lie.  Tensor parallelism cuts what it cuts
of the weight: B by rows in a column-parallel layer, A by columns in a row-parallel one; the other factor is whole on
every rank.  Ranks exchange the rank's few columns between the two products, where the layer itself exchanges all:

    column parallel    A x, then copy (identity; backward all-reduce), then B
    the same with SP   A x of this rank's tokens, then all-gather (backward reduce-scatter), then B
    row parallel       A x of this rank's columns, then all-reduce, then B
    the same with SP   A x of this rank's columns, then reduce-scatter, then B
    replicated         every rank has the layer whole (the latents of latent attention): no exchange
    experts            no exchange: the token dispatcher gathers before the layer and adds up partial sums after it
"""

from __future__ import annotations

import contextlib
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import Parameter, ParameterList

from conversion.files.peft_files import PeftFiles
from conversion.model.adapter_map import factor_mappings, peft_tensor, target_of
from conversion.model.architecture import Architecture
from conversion.model.mapping import Mapping, RowSegment, shard, shard_shape
from conversion.model.peft_config import PeftFilesError
from conversion.model.rules import Arrangement
from conversion.model.weight_map import WeightMap
from megatron_retool.config import ConfigError, LoraConfig
from megatron_retool.learner.attention import rms_norm
from megatron_retool.learner.latent_attention import ReplicatedLinear
from megatron_retool.learner.model import PackedModel
from megatron_retool.learner.weights import (
    TensorParallelPlace,
    gather_mapped,
    global_name,
    gradient_value,
    local_weight_map,
    unwrap,
    weight_value,
)


class Adapter(torch.nn.Module):
    """The factors of one linear layer, in its weight's dtype and on its device.

    Attributes:
        mapping: of the layer's weight.
        a: [rank, in] for each Hugging Face matrix; in a row-parallel layer [rank, in / TP].
        b: [rows, rank] for each run of rows that the weight arranges by itself (``Mapping.blocks``: a whole matrix, or
            a section of one that is fused on disk); in a column-parallel layer [rows / TP, rank].
        enabled: False: the layer answers as the base model's.
    """

    def __init__(self, linear: Any, mapping: Mapping, settings: LoraConfig, sequence_parallel: bool) -> None:
        super().__init__()
        self.mapping = mapping
        self.rank, self.scale = settings.rank, settings.alpha / settings.rank
        self.enabled = True
        self.is_column, self.is_replicated = mapping.tp_dim == 0, mapping.tp_dim is None
        self.tp_size, self.tp_rank = TensorParallelPlace.current().of(mapping)
        # Transformer Engine's layers of experts have another, for it leaves their exchange to Megatron.
        self._group = getattr(linear, "_tp_group", None) or getattr(linear, "tp_group", None)
        self._sequence_parallel = sequence_parallel and self.tp_size > 1
        self._exchanges_elsewhere = mapping.expert is not None
        like = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self.a, self.b = ParameterList(), ParameterList()
        names = (factor.hf_names[0] for factor in factor_mappings(mapping, settings.rank))
        for name, value in zip(names, initial_factors(self, settings), strict=True):
            parameter = Parameter(value.to(**like, memory_format=torch.contiguous_format, copy=True))
            (self.a if ".lora_A." in name else self.b).append(parameter)
        self._mark(linear)

    def _mark(self, linear: Any) -> None:
        """Tell Megatron which factors are split, which are copies, and whose gradients are sums over ranks."""
        split, whole = ([*self.b], [*self.a]) if self.is_column else ([*self.a], [*self.b])
        if self.is_replicated:
            split, whole = [], [*self.a, *self.b]
        for parameter in (*split, *whole):
            # As the weight's: experts that other ranks hold than dense layers have gradient buffers of their own.
            parameter.allreduce = getattr(linear.weight, "allreduce", True)
        for parameter in split:
            # The gradient's norm counts what is split on every rank, and copies on one.
            parameter.tensor_model_parallel = self.tp_size > 1
        for parameter in whole:
            # Such a gradient is one of this rank's tokens; finalize_model_grads adds up what has this mark.
            parameter.sequence_parallel = self._sequence_parallel and not self._exchanges_elsewhere

    @property
    def partial(self) -> tuple[Parameter, ...]:
        """Factors whose gradient on each rank of the experts' tensor parallelism is a part of it."""
        if not self._exchanges_elsewhere or self.tp_size == 1:
            return ()
        return tuple(self.a if self.is_column else self.b)

    def forward(self, x: Tensor) -> Tensor:
        """What the layer adds to its output: [..., in of this rank] -> [..., rows of this rank]."""
        low = torch.nn.functional.linear(x, torch.cat(list(self.a)) if len(self.a) > 1 else self.a[0])
        low = self._exchanged(low * self.scale)
        parts = low.split(self.rank, -1)
        blocks = zip(self.mapping.blocks, self.b, strict=True)
        return self._fused([torch.nn.functional.linear(parts[_source(block)], b) for block, b in blocks])

    def _exchanged(self, low: Tensor) -> Tensor:
        if self._exchanges_elsewhere or self.is_replicated or self.tp_size == 1:
            return low
        if self.is_column and self._sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(low, group=self._group)
        if self.is_column:
            return mappings.copy_to_tensor_model_parallel_region(low, group=self._group)
        if self._sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(low, group=self._group)
        return mappings.reduce_from_tensor_model_parallel_region(low, group=self._group)

    def _fused(self, parts: Sequence[Tensor]) -> Tensor:
        """[..., rows of a block] of each block -> [..., rows], as the rows of this rank's weight lie."""
        if len(parts) == 1:
            return parts[0]
        if self.mapping.arrangement in (Arrangement.COPY, Arrangement.GATE_UP):
            return torch.cat(list(parts), -1)
        groups = self.mapping.query_groups // self.tp_size
        parts = [part.unflatten(-1, (groups, -1)) for part in parts]
        if self.mapping.arrangement is Arrangement.GATED_QUERY_GROUPS:
            # Each head's queries over its gate become the group's queries over its gates.
            heads = parts[0].unflatten(-1, (self.mapping.heads_per_group, 2, -1))
            parts[0] = heads.transpose(-3, -2).flatten(-3)
        return torch.cat(parts, -1).flatten(-2)

    @torch.no_grad()
    def delta(self) -> Tensor:
        """(alpha / rank) B A, in the rows and columns of this rank's part of the weight: float32 [rows, in]."""
        blocks = zip(self.mapping.blocks, self.b, strict=True)
        products = [self.a[_source(block)].float().t() @ b.float().t() for block, b in blocks]
        return self._fused(products).t() * self.scale


def _source(block: RowSegment) -> int:
    assert block.source is not None
    return block.source


def initial_factors(adapter: Adapter, settings: LoraConfig) -> list[Tensor]:
    """The factors that an adapter begins with, of the rank of ``settings``: every A, then every B, which is zero.
    Float32, this rank's parts."""
    result = []
    for factor in factor_mappings(adapter.mapping, settings.rank):
        if ".lora_A." in factor.hf_names[0]:
            result.append(shard(factor, _initial_a(factor, settings), adapter.tp_size, adapter.tp_rank))
        else:
            result.append(torch.zeros(shard_shape(factor, adapter.tp_size, adapter.tp_rank)))
    return result


def _initial_a(factor: Mapping, settings: LoraConfig) -> Tensor:
    """Uniform in +-1 / sqrt(in), as PEFT's; the whole factor from a seed of its name, so that layouts agree."""
    shape = factor.hf_shapes[0]
    generator = torch.Generator().manual_seed(zlib.crc32(factor.hf_names[0].encode()) + (settings.seed << 32))
    return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])


def stored_factors(adapter: Adapter, files: PeftFiles) -> list[Tensor]:
    """This rank's parts of an adapter's factors in peft's files, of the files' rank: every A, then every B. Float32.

    Raises:
        PeftFilesError: a number is not finite.
    """
    named = zip(factor_mappings(adapter.mapping, files.rank), files.factors(adapter.mapping), strict=True)
    return [shard(factor, whole, adapter.tp_size, adapter.tp_rank) for factor, whole in named]


@torch.no_grad()
def begin_with_files(chunks: Sequence[PackedModel], architecture: Architecture, settings: LoraConfig) -> None:
    """Fill adapters of a model from the files of peft that ``settings.path`` names.

    Raises:
        ConfigError: they are not of this model, or of another rank, alpha or other targets.
    """
    said = f"learner.lora.path={settings.path}"
    try:
        settings.check_files()
        files = PeftFiles(settings.path or "")
        files.check(WeightMap(architecture), settings.targets)
        for adapter in adapters(chunks):
            for parameter, value in zip((*adapter.a, *adapter.b), stored_factors(adapter, files), strict=True):
                parameter.copy_(value)
    except PeftFilesError as error:
        raise ConfigError(f"{said}: {error}") from error


class _Adapted:
    """Mixed into a linear layer that has an ``Adapter`` as ``lora``."""

    lora: Adapter

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        output, bias = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        return (output + self.lora(self._read(x)) if self.lora.enabled else output), bias

    def _read(self, x: Tensor) -> Tensor:
        """What the layer multiplies its weight with."""
        return x

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """The layer's own, whose axes are only for weight and bias, and the factors with theirs."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        state = {name: item for name, item in state.items() if not name.startswith(f"{prefix}lora.")}
        factors = self.lora.state_dict(keep_vars=True)
        letter, axis = ("b.", 0) if self.lora.is_column else ("a.", 1)
        axes = {name: axis for name in factors if name.startswith(letter)}
        return state | make_sharded_tensors_for_checkpoint(
            factors,
            f"{prefix}lora.",
            axes,
            sharded_offsets,
            tp_group=self.lora._group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class _AdaptedReplicated:
    """The same of a layer that every tensor-parallel rank has whole, and that checkpoints hold as any module."""

    lora: Adapter

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)  # type: ignore[misc]
        return output + self.lora(x) if self.lora.enabled else output


class _AdaptedBehindNorm(_Adapted):
    """The same of Transformer Engine's layer that has the norm before it inside."""

    def _read(self, x: Tensor) -> Tensor:
        # Computed once more: the kernel keeps what it makes of its input to itself.
        layer: Any = self
        return rms_norm(x, layer.layer_norm_weight, layer.eps, layer.config.layernorm_zero_centered_gamma)


@functools.cache
def _adapted(layer: Any) -> type[Any]:
    """``layer`` with an adapter where it calls Megatron's or Transformer Engine's, before what it does with the output.

    Where Transformer Engine is not installed, Megatron has no classes in its layers' place.
    """
    mixins: dict[Any, type[Any]] = {
        ColumnParallelLinear: _Adapted,
        RowParallelLinear: _Adapted,
        TEColumnParallelLinear: _Adapted,
        TERowParallelLinear: _Adapted,
        TELayerNormColumnParallelLinear: _AdaptedBehindNorm,
        ReplicatedLinear: _AdaptedReplicated,
    }
    for plain, mixin in mixins.items():
        if isinstance(plain, type) and issubclass(layer, plain):
            adapted = type(f"Adapted{plain.__name__}", (mixin, plain), {})
            return adapted if layer is plain else type(f"Adapted{layer.__name__}", (layer, adapted), {})
    raise ConfigError(f"learner.lora.rank: adapters do not know layers of the kind {layer.__name__}: set it to 0")


def attach(chunks: Sequence[PackedModel], architecture: Architecture, settings: LoraConfig) -> None:
    """Freeze a model and give the layers that ``settings.targets`` names adapters, which change nothing at first.

    Call it when the weights are read, before Megatron's DDP is around the model.

    Args:
        chunks: this rank's virtual pipeline stages. A critic's value head, which no base model has, stays trainable.

    Raises:
        ConfigError: a layer is of an unknown kind, or a stage has no layer to adapt.
    """
    weights = local_weight_map(chunks, architecture)
    for chunk in chunks:
        chunk.requires_grad_(False)
        chunk.trains_adapters = True
        for name, module in list(chunk.named_modules()):
            weight = global_name(chunk, f"{name}.weight")
            if weight in weights and target_of(weights[weight]) in settings.targets:
                layer: Any = type(module)
                module.__class__ = _adapted(layer)
                module.lora = Adapter(module, weights[weight], settings, chunk.config.sequence_parallel)
        if hasattr(chunk, "value_head"):
            chunk.value_head.requires_grad_(True)
        if not any(parameter.requires_grad for parameter in chunk.parameters()):
            raise ConfigError(
                f"learner.lora.targets={settings.targets}: a pipeline stage has no such layer and would have nothing "
                "to train: add a target, or lower learner.pipeline_model_parallel_size"
            )


def adapters(chunks: Sequence[torch.nn.Module]) -> Iterator[Adapter]:
    """The adapters of this rank's virtual pipeline stages, wrapped or not."""
    for chunk in chunks:
        yield from (module for module in unwrap(chunk).modules() if isinstance(module, Adapter))


class MergedWeights:
    """``value`` of ``weights.export_hf_weights``: a weight with what its adapter adds, rounded once to its dtype.

    Each rank merges its own part, so that nothing more is exchanged than without adapters.
    """

    def __init__(self, model_chunks: Sequence[torch.nn.Module]) -> None:
        modules = (module for chunk in model_chunks for module in unwrap(chunk).modules())
        result = ((module, getattr(module, "lora", None)) for module in modules)
        self._adapters = {id(module.weight): lora for module, lora in result if isinstance(lora, Adapter)}

    def __call__(self, parameter: Tensor) -> Tensor:
        """The parameter's value with its adapter added, where it has one; in the weight's dtype."""
        weight = weight_value(parameter)
        adapter = self._adapters.get(id(parameter))
        return weight if adapter is None else (weight.float() + adapter.delta()).to(weight.dtype)

    def dtype_of(self, parameter: Tensor) -> torch.dtype:
        """The dtype of what a call returns."""
        return parameter.dtype if id(parameter) in self._adapters else weight_value(parameter).dtype


def gather_factors(
    chunks: Sequence[torch.nn.Module],
    architecture: Architecture,
    settings: LoraConfig,
    value: Callable[[Tensor], Tensor] = Tensor.detach,
    keep: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
    receivers: Sequence[int] = (0,),
) -> dict[str, Tensor]:
    """Whole factors by the names of PEFT's files without their prefix, on the ranks ``receivers``; empty elsewhere.

    Every rank calls it.

    Args:
        settings: of the adapters.
        value: what to gather of this rank's part of a factor, in its shape.
        keep: what to keep of each tensor when it arrives, given its Hugging Face name.
    """
    adapted = [mapping for mapping in WeightMap(architecture) if target_of(mapping) in settings.targets]
    mappings = [factor for mapping in adapted for factor in factor_mappings(mapping, settings.rank)]
    own: dict[str, Tensor] = {}
    for adapter in adapters(chunks):
        named = zip(factor_mappings(adapter.mapping, adapter.rank), (*adapter.a, *adapter.b), strict=True)
        own.update({factor.mcore_name: parameter for factor, parameter in named})
    parts: dict[str, dict[int, Tensor]] = {}
    for bucket in gather_mapped(own, mappings, value, receivers):
        for name, tensor in bucket:
            whole, first = peft_tensor(name)
            parts.setdefault(whole, {})[first] = keep(name, tensor)
    # Sections of a matrix that is fused on disk have factors B of their own.
    return {name: torch.cat([rows[first] for first in sorted(rows)]) for name, rows in parts.items()}


def export_factors(
    chunks: Sequence[torch.nn.Module], architecture: Architecture, settings: LoraConfig, receivers: Sequence[int] = (0,)
) -> Iterator[list[tuple[str, Tensor]]]:
    """``gather_factors`` in one bucket on the ranks ``receivers`` and none elsewhere. Every rank must drain it."""
    factors = gather_factors(chunks, architecture, settings, receivers=receivers)
    if factors:
        yield list(factors.items())


@contextlib.contextmanager
def adapters_off(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within it the model is its base."""
    result = list(adapters(chunks))
    for adapter in result:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in result:
            adapter.enabled = True


def sum_expert_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    """Add up, over the experts' tensor-parallel ranks, the gradients of factors that each has a part of.

    Call it where gradients have been summed over all other ranks.
    """
    gradients = [gradient_value(parameter) for adapter in adapters(chunks) for parameter in adapter.partial]
    if gradients:
        group = parallel_state.get_expert_tensor_parallel_group()
        with torch.no_grad():
            joined = torch.cat([gradient.flatten() for gradient in gradients])
            torch.distributed.all_reduce(joined, group=group)
            for gradient, total in zip(gradients, joined.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(total.view_as(gradient))
