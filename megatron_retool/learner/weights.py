"""Hugging Face weights into and out of a Megatron-Core model in any TP/PP/VPP/EP layout.

Both directions walk ``conversion.model.weight_map``.  Loading reads, on every rank, the rows that the rank owns.
Export assembles full tensors bucket by bucket on the ranks that ask for them: for each of those every part comes from a
rank that has it, one on its own node where there is one, and no rank ever holds more than one bucket beside its shard.
"""

from __future__ import annotations

import platform
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from torch import Tensor

from conversion.files.hf_checkpoint import HFCheckpoint
from conversion.model.adapter_map import FACTORS
from conversion.model.architecture import Architecture
from conversion.model.mapping import Mapping, WeightMapError, hf_parts, merge, shard_shape, to_hf
from conversion.model.rules import MCORE_BUFFER_SUFFIXES, Arrangement
from conversion.model.stacked import Stacker
from conversion.model.weight_map import WeightMap, canonical_name

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(?<=\.local_experts\.)(\d+)(?=\.)")


def unwrap(module: torch.nn.Module) -> Any:
    """The GPTModel inside DistributedDataParallel, Float16Module and the like."""
    model: Any = module
    while hasattr(model, "module"):
        model = model.module
    return model


def global_parameters(model_chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's parameters under the weight map's names: global layer and expert numbers, local spec.

    Factors of adapters, which no Hugging Face model has, are left out.
    """
    for chunk in model_chunks:
        model = unwrap(chunk)
        for name, parameter in model.named_parameters():
            if FACTORS not in name:
                yield global_name(model, name), parameter


def global_tensors(model_chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """``global_parameters``, and the buffers that checkpoints have beside them: routers' biases."""
    yield from global_parameters(model_chunks)
    for chunk in model_chunks:
        model = unwrap(chunk)
        for name, buffer in model.named_buffers():
            if name.endswith(MCORE_BUFFER_SUFFIXES):
                yield global_name(model, name), buffer


def global_name(model: Any, name: str) -> str:
    """The weight map's name of a parameter that the unwrapped ``model`` calls ``name``."""
    name = canonical_name(name)
    if found := _LAYER.match(name):
        # layer_number counts from 1 over the whole model, whatever the pipeline layout.
        layer = model.decoder.layers[int(found[1])].layer_number - 1
        name = f"decoder.layers.{layer}.{name[found.end() :]}"
    if _EXPERT.search(name):
        experts = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        first = parallel_state.get_expert_model_parallel_rank() * experts
        name = _EXPERT.sub(lambda found: str(first + int(found[1])), name)
    return name


@dataclass(frozen=True)
class TensorParallelPlace:
    """A rank's place in its tensor-parallel group, and in that of the experts."""

    size: int
    rank: int
    expert_size: int
    expert_rank: int

    @classmethod
    def current(cls) -> TensorParallelPlace:
        """This rank's place in the present process groups."""
        return cls(
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )

    def of(self, mapping: Mapping) -> tuple[int, int]:
        """(size, rank) of the group that splits ``mapping``."""
        return (self.size, self.rank) if mapping.expert is None else (self.expert_size, self.expert_rank)


def local_weight_map(model_chunks: Sequence[torch.nn.Module], architecture: Architecture) -> WeightMap:
    """The model's weight map with the vocabulary padding that the built model has (none seen: no padding)."""
    return WeightMap(architecture, _padded_vocab_size(model_chunks, architecture))


def _padded_vocab_size(model_chunks: Sequence[torch.nn.Module], architecture: Architecture) -> int | None:
    unpadded = WeightMap(architecture)
    for name, parameter in global_parameters(model_chunks):
        if name in unpadded and unpadded[name].arrangement is Arrangement.VOCABULARY:
            return parameter.shape[0] * parallel_state.get_tensor_model_parallel_world_size()
    return None


@torch.no_grad()
def load_hf_weights(
    model_chunks: Sequence[torch.nn.Module],
    architecture: Architecture,
    hf_dir: str | Path,
    except_names: Collection[str] = (),
) -> None:
    """Fill the model's parameters from a Hugging Face directory; values are cast to each parameter's dtype.

    Call it before the optimizer is built, or call ``optimizer.reload_model_params()`` afterwards: the optimizer keeps
    main parameters of its own.

    Args:
        model_chunks: this rank's virtual pipeline stages, wrapped or not.
        except_names: weight-map names that keep their present values (a critic's ``value_head.weight``).

    Raises:
        HFCheckpointError: the directory lacks a tensor, or holds one that the family does not have.
        WeightMapError: a tensor's shape or dtype does not fit, or the model has a parameter that the map lacks.
    """
    checkpoint = HFCheckpoint(hf_dir)
    weight_map = local_weight_map(model_chunks, architecture)
    checkpoint.check(weight_map)
    place = TensorParallelPlace.current()
    for name, parameter in global_tensors(model_chunks):
        if name in except_names:
            continue
        mapping = weight_map[name]
        part = checkpoint.read_shard(mapping, *place.of(mapping))
        if part.shape != parameter.shape:
            raise WeightMapError(
                f"{name} has shape {tuple(parameter.shape)} in the model, but {hf_dir} gives {tuple(part.shape)} for "
                f"tensor parallel rank {place.of(mapping)[1]} of {place.of(mapping)[0]}"
            )
        parameter.copy_(part)


@torch.no_grad()
def export_hf_weights(
    model_chunks: Sequence[torch.nn.Module],
    architecture: Architecture,
    bucket_bytes: int = 512 * 2**20,
    receivers: Sequence[int] = (0,),
    value: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[list[tuple[str, Tensor]]]:
    """Full tensors under their Hugging Face names, in buckets of about ``bucket_bytes`` bytes.

    Every rank must drain the iterator, in step: each bucket is one exchange. ``receivers``, global ranks and the same
    on every rank, get the tensors, in the parameters' dtype and on their device; the others get empty lists. They may
    be views of the live parameters: use or copy them before the next update. A tensor is yielded once; a tied output
    layer is not yielded. A parameter larger than ``bucket_bytes`` makes a bucket of its own; experts that lie in one
    tensor are put together beside the buckets, and come with the last of them.

    ``value`` is what to export of this rank's part of a parameter, in its shape and dtype; None: the part itself.
    """
    yield from _gather(model_chunks, architecture, bucket_bytes, value or weight_value, receivers, buffers=True)


class OwnParts:
    """What this rank sends of a model that each rank sends its own parts of: of every part one rank, the first that
    has it. Nothing is gathered.

    Every rank makes it, which exchanges who holds what. It can be walked over again: buckets of about ``bucket_bytes``
    bytes, with the names of ``HFPart.wire_name``; the tensors may be views of the live parameters.

    Args:
        value: as of ``export_hf_weights``.

    Raises:
        WeightMapError: the family stores experts as one tensor, of which no rank has a run of rows or columns.
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module],
        architecture: Architecture,
        bucket_bytes: int = 512 * 2**20,
        value: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._value = value or weight_value
        self._own, world, weight_map = _held(model_chunks, architecture, self._value, buffers=True)
        mappings = list(weight_map.exported())
        self._bucket_bytes = bucket_bytes
        if stacked := next((mapping for mapping in mappings if mapping.is_stacked), None):
            raise WeightMapError(
                f"{stacked.hf_names[0]}: experts that are stored as one tensor are not sent part by part: set "
                "weight_sync.method to another one"
            )
        rank = dist.get_rank()
        self._sent = [
            (mapping, len(replicas), tp_rank)
            for mapping, replicas in _replicas(mappings, world)
            for tp_rank, ranks in sorted(replicas.items())
            if ranks[0] == rank
        ]

    @torch.no_grad()
    def __iter__(self) -> Iterator[list[tuple[str, Tensor]]]:
        bucket: list[tuple[str, Tensor]] = []
        filled = 0
        for mapping, tp_size, tp_rank in self._sent:
            value = self._value(self._own[mapping.mcore_name])
            for part, tensor in hf_parts(mapping, value, tp_size, tp_rank):
                if bucket and filled + tensor.nbytes > self._bucket_bytes:
                    yield bucket
                    bucket, filled = [], 0
                bucket.append((part.wire_name, tensor))
                filled += tensor.nbytes
        if bucket:
            yield bucket


@torch.no_grad()
def gradients_by_hf_name(model_chunks: Sequence[torch.nn.Module], architecture: Architecture) -> dict[str, Tensor]:
    """Every parameter's reduced gradient under its Hugging Face name, on global rank 0; empty elsewhere.

    Call it on every rank after ``finalize_model_grads`` and before the gradient buffers are cleared. Reads
    ``main_grad`` where Megatron's DistributedDataParallel keeps one, else ``grad``; a parameter without either counts
    as zero.
    """
    for chunk in model_chunks:
        all_gather_gradient_shards(chunk)
    return {
        name: tensor.clone()  # the buffers are clipped and cleared in place
        for bucket in _gather(model_chunks, architecture, 2**30, gradient_value, receivers=(0,), buffers=False)
        for name, tensor in bucket
    }


def weight_value(parameter: Tensor) -> Tensor:
    """A parameter's own values."""
    # Transformer Engine's FP8 parameters are exported in the dtype that they stand for.
    return dequantize_fp8_tensor(parameter) if is_float8tensor(parameter) else parameter.detach()


def gradient_value(parameter: Tensor) -> Tensor:
    """A parameter's gradient in its shape, see ``gradients_by_hf_name``."""
    gradient = getattr(parameter, "main_grad", None)
    if gradient is None:
        gradient = parameter.grad
    return torch.zeros_like(parameter) if gradient is None else gradient.view(parameter.shape)


def all_gather_gradient_shards(chunk: torch.nn.Module) -> None:
    """Undo the distributed optimizer's reduce-scatter: each rank holds only the reduced values of its own part."""
    groups = [*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ())]
    for group in groups:
        if not group.ddp_config.use_distributed_optimizer:
            continue
        ranks, rank = group.intra_distributed_optimizer_instance_size, group.intra_distributed_optimizer_instance_rank
        for bucket in group.buckets:
            own = bucket.grad_data.chunk(ranks)[rank].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=group.intra_distributed_optimizer_instance_group)


@dataclass(frozen=True)
class _RankContents:
    """What one rank holds: enough for every rank to derive the same exchange plan."""

    node: str
    place: TensorParallelPlace
    dtypes: dict[str, torch.dtype]
    padded_vocab_size: int | None


@dataclass(frozen=True)
class _Part:
    mapping: Mapping
    tp_size: int
    tp_rank: int
    sources: dict[int, int]
    """Global rank that each receiver has the part from; its own where it holds it."""
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return shard_shape(self.mapping, self.tp_size, self.tp_rank)


def _gather(
    model_chunks: Sequence[torch.nn.Module],
    architecture: Architecture,
    bucket_bytes: int,
    value: Callable[[Tensor], Tensor],
    receivers: Sequence[int],
    buffers: bool,
) -> Iterator[list[tuple[str, Tensor]]]:
    own, world, weight_map = _held(model_chunks, architecture, value, buffers)
    device = next(iter(own.values())).device
    mappings = [mapping for mapping in weight_map.exported() if buffers or not mapping.rule.is_buffer]
    stacker = Stacker(weight_map.hf_shapes)
    for bucket in _buckets(_plan(mappings, world, receivers), bucket_bytes):
        yield list(stacker.add_all(_exchange(bucket, own, value, device)))


def _held(
    model_chunks: Sequence[torch.nn.Module],
    architecture: Architecture,
    value: Callable[[Tensor], Tensor],
    buffers: bool,
) -> tuple[dict[str, Tensor], list[_RankContents], WeightMap]:
    """This rank's tensors by their names in the weight map, what each rank holds, and the map with the vocabulary
    padding that the built model has. Every rank calls it."""
    own: dict[str, Tensor] = dict((global_tensors if buffers else global_parameters)(model_chunks))
    contents = _RankContents(
        _node(),
        TensorParallelPlace.current(),
        {name: _dtype(parameter, value) for name, parameter in own.items()},
        _padded_vocab_size(model_chunks, architecture),
    )
    world = _of_all_ranks(contents)
    return own, world, WeightMap(architecture, max((c.padded_vocab_size or 0) for c in world) or None)


@torch.no_grad()
def gather_mapped(
    own: dict[str, Tensor],
    mappings: Sequence[Mapping],
    value: Callable[[Tensor], Tensor],
    receivers: Sequence[int] = (0,),
    bucket_bytes: int = 2**28,
) -> Iterator[list[tuple[str, Tensor]]]:
    """What ``mappings`` name, whole and under their Hugging Face names, in buckets on the ranks ``receivers``; empty
    lists elsewhere. Every rank must drain the iterator, in step.

    Args:
        own: this rank's parameters by ``Mapping.mcore_name``; each rank has some.
        value: what to gather of this rank's part of a parameter, in its shape.
    """
    dtypes = {name: value(parameter).dtype for name, parameter in own.items()}
    world = _of_all_ranks(_RankContents(_node(), TensorParallelPlace.current(), dtypes, None))
    device = next(iter(own.values())).device
    for bucket in _buckets(_plan(mappings, world, receivers), bucket_bytes):
        yield _exchange(bucket, own, value, device)


def _of_all_ranks(contents: _RankContents) -> list[_RankContents]:
    world = [contents] * dist.get_world_size()
    dist.all_gather_object(world, contents)
    return world


def _dtype(parameter: Tensor, value: Callable[[Tensor], Tensor]) -> torch.dtype:
    if value is weight_value:
        return parameter.dtype  # of an FP8 parameter what it stands for, without computing that
    # What is merged has its parameter's dtype; merging it only to ask would cost a product of matrices.
    return getattr(value, "dtype_of", lambda part: value(part).dtype)(parameter)


def _node() -> str:
    return platform.node()


def _plan(
    mappings: Sequence[Mapping], world: Sequence[_RankContents], receivers: Sequence[int]
) -> Iterator[list[_Part]]:
    """Every mapping's parts and the ranks that send them. A function of ``world``: same on all ranks."""

    def source(receiver: int, candidates: Sequence[int]) -> int:
        return min(candidates, key=lambda rank: (rank != receiver, world[rank].node != world[receiver].node, rank))

    for mapping, replicas in _replicas(mappings, world):
        tp_size = len(replicas)
        yield [
            _Part(
                mapping,
                tp_size,
                tp_rank,
                {receiver: source(receiver, replicas[tp_rank]) for receiver in receivers},
                world[replicas[tp_rank][0]].dtypes[mapping.mcore_name],
            )
            for tp_rank in range(tp_size)
        ]


def _replicas(
    mappings: Sequence[Mapping], world: Sequence[_RankContents]
) -> Iterator[tuple[Mapping, dict[int, list[int]]]]:
    """Every mapping with the global ranks, ascending, that hold each of its parts: one for each tensor-parallel rank
    where that splits it, else one. A function of ``world``: same on all ranks."""
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, contents in enumerate(world):
        for name in contents.dtypes:
            holders[name].append(rank)
    for mapping in mappings:
        ranks = holders.get(mapping.mcore_name)
        if not ranks:
            raise WeightMapError(f"no rank holds {mapping.mcore_name}: the model was built for another architecture")
        tp_size = world[ranks[0]].place.of(mapping)[0] if mapping.tp_dim is not None else 1
        replicas: dict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            replicas[world[rank].place.of(mapping)[1] if tp_size > 1 else 0].append(rank)
        yield mapping, replicas


def _buckets(plan: Iterator[list[_Part]], bucket_bytes: int) -> Iterator[list[list[_Part]]]:
    bucket: list[list[_Part]] = []
    filled = 0
    for parts in plan:
        size = sum(torch.Size(part.shape).numel() * part.dtype.itemsize for part in parts)
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(parts)
        filled += size
    if bucket:
        yield bucket


def _exchange(
    bucket: list[list[_Part]],
    own: dict[str, Tensor],
    value: Callable[[Tensor], Tensor],
    device: torch.device,
) -> list[tuple[str, Tensor]]:
    """One message (for each dtype) from every sending rank to each receiver, which puts the full tensors together."""
    rank = dist.get_rank()
    messages: dict[tuple[int, int, torch.dtype], list[_Part]] = defaultdict(list)
    for parts in bucket:
        for part in parts:
            for receiver, source in part.sources.items():
                if source != receiver and rank in (source, receiver):
                    messages[source, receiver, part.dtype].append(part)
    operations, buffers = [], {}
    packed: dict[tuple[tuple[str, int], ...], Tensor] = {}
    for (source, receiver, dtype), parts in sorted(messages.items(), key=lambda item: (*item[0][:2], str(item[0][2]))):
        if rank == source:
            # Receivers without a replica near them get the same parts.
            content = tuple((part.mapping.mcore_name, part.tp_rank) for part in parts)
            if content not in packed:
                packed[content] = torch.cat([value(own[part.mapping.mcore_name]).reshape(-1) for part in parts])
            operations.append(dist.P2POp(dist.isend, packed[content], receiver))
        else:
            count = sum(torch.Size(part.shape).numel() for part in parts)
            buffers[source, dtype] = torch.empty(count, dtype=dtype, device=device)
            operations.append(dist.P2POp(dist.irecv, buffers[source, dtype], source))
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()
    if rank not in bucket[0][0].sources:
        return []

    position: dict[tuple[int, torch.dtype], int] = defaultdict(int)
    named: list[tuple[str, Tensor]] = []
    for parts in bucket:
        pieces = []
        for part in parts:
            source = part.sources[rank]
            if source == rank:
                pieces.append(value(own[part.mapping.mcore_name]))
                continue
            key, count = (source, part.dtype), torch.Size(part.shape).numel()
            pieces.append(buffers[key][position[key] : position[key] + count].view(part.shape))
            position[key] += count
        full = merge(parts[0].mapping, pieces)
        named.extend((name, tensor.contiguous()) for name, tensor in to_hf(parts[0].mapping, full).items())
    return named
