"""The one statement of how Hugging Face tensors and Megatron-Core parameters correspond.

A family has a table of ``rules.Rule``: a Megatron-Core name, the Hugging Face names whose rows it is made of, how the
rows are arranged, and the dimension that tensor parallelism splits.  ``WeightMap`` expands the table for one model into
``Mapping`` objects.  Offline conversion, weight sync, gradient comparison and FP8 export are walks over them:

    to_mcore   Hugging Face tensors     -> the full Megatron-Core tensor
    to_hf      full Megatron-Core tensor -> Hugging Face tensors (linear, so it maps gradients too)
    shard      full tensor               -> one tensor-parallel rank's part
    merge      every rank's part         -> the full tensor
    hf_parts   one rank's part           -> what it is of the Hugging Face tensors

All five follow from two facts about a mapping: ``segments``, which says where each run of rows of the Megatron-Core
tensor comes from, and ``shard_rows``, which says which rows a rank owns.

Names are those of Megatron-Core's local layer spec with global layer and expert numbers; ``canonical_name`` maps the
Transformer Engine spec's names (norms fused into the next linear layer, grouped experts) onto them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from conversion.model.architecture import Architecture
from conversion.model.attention_config import DeltaNetSizes, IndexerSizes
from conversion.model.rules import EMBEDDING_NAME, MCORE_LAYER, OUTPUT_NAME, SIZES, Arrangement, Layers, Rule
from conversion.model.stacked import part_of, stacked_shapes, tensor_of
from megatron_retool.errors import InputError

if TYPE_CHECKING:  # what checks a model's directory imports this module, and torch takes seconds
    import torch
    from torch import Tensor


class WeightMapError(InputError):
    """A tensor is unknown to the family or has the wrong shape or dtype. The message names the tensor."""


PART = ".part:"
"""Between the name of a tensor and which part of it is meant."""
FULL_PRECISION_DTYPES = ("float32", "bfloat16", "float16", "float64")
IGNORED_HF_NAMES = re.compile(r"\.rotary_emb\.inv_freq$")
"""Tensors that old checkpoints store and that are a function of the config."""


@dataclass(frozen=True)
class RowSegment:
    """Rows ``start:stop`` of Hugging Face tensor number ``source`` (None: zero padding)."""

    source: int | None
    start: int
    stop: int


@dataclass(frozen=True)
class Mapping:
    """One Megatron-Core parameter of one model and the Hugging Face tensors it is made of."""

    mcore_name: str
    """Global name, local spec: ``decoder.layers.3.self_attention.linear_qkv.weight``."""
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    arrangement: Arrangement
    tp_dim: int | None
    rule: Rule
    layer: int | None = None
    expert: int | None = None
    """Global expert number: expert parallelism gives each rank a contiguous run of them."""
    tied: bool = False
    """The output layer of a tied model: read from the embedding, never written back."""
    query_groups: int = 1
    """Of an arrangement by key heads: those of the gated delta net."""
    heads_per_group: int = 1
    """Query heads of a query group."""
    padding_rows: int = 0
    sections: tuple[int, ...] = ()
    """Rows of what Hugging Face tensors fuse, see ``rules.Rule``; empty: nothing is fused."""

    @property
    def is_stacked(self) -> bool:
        """Whether the Hugging Face tensors are parts of larger ones, see ``stacked``."""
        return part_of(self.hf_names[0]) is not None

    @property
    def mcore_shape(self) -> tuple[int, ...]:
        """Shape of the full parameter, vocabulary padding included."""
        return (sum(shape[0] for shape in self.hf_shapes) + self.padding_rows, *self.hf_shapes[0][1:])

    def cast_to(self, dtype: torch.dtype | None) -> torch.dtype | None:
        """What a conversion to ``dtype`` makes of the parameter; None: it stays as it is."""
        return None if self.rule.is_buffer else dtype

    @cached_property
    def blocks(self) -> tuple[RowSegment, ...]:
        """What the arrangement arranges: whole Hugging Face tensors, or their sections, by their rows."""
        blocks, source, start = [], 0, 0
        for rows in self.sections or (shape[0] for shape in self.hf_shapes):
            blocks.append(RowSegment(source, start, start + rows))
            start += rows
            if start == self.hf_shapes[source][0]:
                source, start = source + 1, 0
        return tuple(blocks)

    @cached_property
    def segments(self) -> tuple[RowSegment, ...]:
        """The rows of the full Megatron-Core tensor, top to bottom."""
        if self.arrangement is Arrangement.GATED_QUERY_GROUPS:
            return tuple(self._gated_segments())
        if self.arrangement in (Arrangement.QUERY_GROUPS, Arrangement.KEY_HEADS):
            return tuple(
                RowSegment(block.source, block.start + group * rows, block.start + (group + 1) * rows)
                for group in range(self.query_groups)
                for block in self.blocks
                for rows in ((block.stop - block.start) // self.query_groups,)
            )
        segments = list(self.blocks)
        if self.padding_rows:
            segments.append(RowSegment(None, 0, self.padding_rows))
        return tuple(segments)

    def _gated_segments(self) -> Iterator[RowSegment]:
        query, *others = self.blocks
        heads = self.query_groups * self.heads_per_group
        rows = (query.stop - query.start) // (2 * heads)
        for group in range(self.query_groups):
            first = group * self.heads_per_group
            for gate in (0, 1):
                for head in range(first, first + self.heads_per_group):
                    start = query.start + (2 * head + gate) * rows
                    yield RowSegment(query.source, start, start + rows)
            for block in others:
                size = (block.stop - block.start) // self.query_groups
                yield RowSegment(block.source, block.start + group * size, block.start + (group + 1) * size)

    def shard_rows(self, tp_size: int, tp_rank: int) -> tuple[tuple[int, int], ...]:
        """Row ranges of the full tensor that a rank owns, in the order in which it keeps them.

        Raises:
            WeightMapError: the rows do not divide by ``tp_size``.
        """
        rows = self.mcore_shape[0]
        if self.tp_dim != 0:
            return ((0, rows),)
        blocks = len(self.blocks) if self.arrangement is Arrangement.GATE_UP else 1
        if rows % (blocks * tp_size):
            raise WeightMapError(f"{self.mcore_name}: {rows // blocks} rows do not divide by TP {tp_size}")
        block = rows // blocks
        part = block // tp_size
        return tuple((b * block + tp_rank * part, b * block + (tp_rank + 1) * part) for b in range(blocks))

    def shard_columns(self, tp_size: int, tp_rank: int) -> tuple[int, int] | None:
        """Range of dimension 1 that a rank owns; None where it owns all of it.

        Raises:
            WeightMapError: the columns do not divide by ``tp_size``.
        """
        if self.tp_dim != 1:
            return None
        columns = self.mcore_shape[1]
        if columns % tp_size:
            raise WeightMapError(f"{self.mcore_name}: {columns} columns do not divide by TP {tp_size}")
        part = columns // tp_size
        return tp_rank * part, (tp_rank + 1) * part

    def row_segments(self, low: int, high: int) -> Iterator[RowSegment]:
        """Where rows ``low:high`` of the full tensor come from, top to bottom: what a reader has to fetch."""
        position = 0
        for segment in self.segments:
            length = segment.stop - segment.start
            start, stop = max(low - position, 0), min(high - position, length)
            if start < stop:
                yield RowSegment(segment.source, segment.start + start, segment.start + stop)
            position += length

    def hf_runs(self, source: int) -> list[tuple[int, int, int]]:
        """Where the rows of Hugging Face tensor number ``source`` lie in the full tensor, top to bottom.

        Returns:
            (row of the Hugging Face tensor, row of the full tensor, number of rows) of each run.
        """
        runs, position = [], 0
        for segment in self.segments:
            rows = segment.stop - segment.start
            if segment.source == source:
                runs.append((segment.start, position, rows))
            position += rows
        return sorted(runs)


def to_mcore(mapping: Mapping, tensors: Sequence[Tensor]) -> Tensor:
    """The full Megatron-Core tensor, shape ``mapping.mcore_shape``, from tensors in the order of ``mapping.hf_names``.

    Raises:
        WeightMapError: a tensor has the wrong shape, or the tensors differ in dtype.
    """
    check_tensors(mapping, [tuple(t.shape) for t in tensors], [t.dtype for t in tensors])
    if mapping.segments == (RowSegment(0, 0, mapping.mcore_shape[0]),):
        return tensors[0]
    return _joined([_rows(segment, tensors) for segment in mapping.segments])


def to_hf(mapping: Mapping, full: Tensor) -> dict[str, Tensor]:
    """The Hugging Face tensors by name; padding rows are dropped. Linear, so it maps gradients as well.

    Raises:
        WeightMapError: ``full`` does not have the shape ``mapping.mcore_shape``.
    """
    if tuple(full.shape) != mapping.mcore_shape:
        raise WeightMapError(f"{mapping.mcore_name} has shape {tuple(full.shape)}, expected {mapping.mcore_shape}")
    tensors = {}
    for source, name in enumerate(mapping.hf_names):
        parts = [full[row : row + count] for _, row, count in mapping.hf_runs(source)]
        tensors[name] = _joined(parts)
    return tensors


def shard(mapping: Mapping, full: Tensor, tp_size: int, tp_rank: int) -> Tensor:
    """The part of the full Megatron-Core tensor that tensor-parallel rank ``tp_rank`` of ``tp_size`` holds."""
    ranges = mapping.shard_rows(tp_size, tp_rank)
    part = _joined([full[start:stop] for start, stop in ranges])
    columns = mapping.shard_columns(tp_size, tp_rank)
    return part if columns is None else part[:, columns[0] : columns[1]]


def merge(mapping: Mapping, shards: Sequence[Tensor]) -> Tensor:
    """The full Megatron-Core tensor from every tensor-parallel rank's part, in rank order.

    Raises:
        WeightMapError: a part has the wrong shape.
    """
    tp_size = len(shards)
    for rank, part in enumerate(shards):
        expected = shard_shape(mapping, tp_size, rank)
        if tuple(part.shape) != expected:
            raise WeightMapError(
                f"{mapping.mcore_name}: the part of tensor parallel rank {rank} of {tp_size} has shape "
                f"{tuple(part.shape)}, expected {expected}"
            )
    if tp_size == 1 or mapping.tp_dim is None:
        return shards[0]
    full = shards[0].new_empty(mapping.mcore_shape)
    for rank, part in enumerate(shards):
        columns = mapping.shard_columns(tp_size, rank)
        target = full if columns is None else full[:, columns[0] : columns[1]]
        position = 0
        for start, stop in mapping.shard_rows(tp_size, rank):
            target[start:stop] = part[position : position + stop - start]
            position += stop - start
    return full


@dataclass(frozen=True)
class HFPart:
    """Indices ``start`` to ``start + size`` of dimension ``dim`` of a Hugging Face tensor, and all of the others."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dim: int
    start: int
    size: int

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.size == self.shape[self.dim]

    @property
    def wire_name(self) -> str:
        """Name under which engines are sent the part (``sglang_plugins/weight_parts.py`` reads it)."""
        if self.is_whole:
            return self.name
        return f"{self.name}{PART}{'x'.join(map(str, self.shape))}:{self.dim}:{self.start}"


def hf_parts(mapping: Mapping, part: Tensor, tp_size: int, tp_rank: int) -> Iterator[tuple[HFPart, Tensor]]:
    """What a rank's part of the Megatron-Core tensor is of the Hugging Face tensors; padding rows are dropped.

    The parts of all ranks together are what ``to_hf`` makes of the merged tensor.
    """
    columns = mapping.shard_columns(tp_size, tp_rank)
    runs: dict[int, list[tuple[int, int, int]]] = {}
    row = 0
    for low, high in mapping.shard_rows(tp_size, tp_rank):
        for segment in mapping.row_segments(low, high):
            rows = segment.stop - segment.start
            if segment.source is not None:
                runs.setdefault(segment.source, []).append((segment.start, row, rows))
            row += rows
    for source, found in sorted(runs.items()):
        name, shape = mapping.hf_names[source], mapping.hf_shapes[source]
        for start, pieces in _adjacent(sorted(found)):
            tensor = _joined([part[row : row + rows] for row, rows in pieces])
            if columns is not None:
                yield HFPart(name, shape, 1, columns[0], columns[1] - columns[0]), tensor
            else:
                yield HFPart(name, shape, 0, start, len(tensor)), tensor


def _adjacent(runs: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Runs of Hugging Face rows that follow one another, as (first row, [(row of the part, rows)])."""
    end, pieces, first = -1, list[tuple[int, int]](), 0
    for start, row, rows in runs:
        if pieces and start != end:
            yield first, pieces
            pieces = []
        if not pieces:
            first = start
        pieces.append((row, rows))
        end = start + rows
    if pieces:
        yield first, pieces


def shard_shape(mapping: Mapping, tp_size: int, tp_rank: int) -> tuple[int, ...]:
    """Shape of one rank's part."""
    rows = sum(stop - start for start, stop in mapping.shard_rows(tp_size, tp_rank))
    columns = mapping.shard_columns(tp_size, tp_rank)
    rest = mapping.mcore_shape[1:] if columns is None else (columns[1] - columns[0],)
    return (rows, *rest)


def check_tensors(
    mapping: Mapping, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], where: str = ""
) -> None:
    """Hold what a checkpoint stores against what the mapping expects.

    Raises:
        WeightMapError: naming the tensor (and ``where`` it lies) whose shape or dtype does not fit.
    """
    suffix = f" in {where}" if where else ""
    for name, shape, dtype, expected in zip(mapping.hf_names, shapes, dtypes, mapping.hf_shapes, strict=True):
        if tuple(shape) != expected:
            raise WeightMapError(
                f"{name}{suffix} has shape {tuple(shape)}, but config.json implies {expected}: "
                "config.json and the weights do not belong together"
            )
        if str(dtype).removeprefix("torch.") not in FULL_PRECISION_DTYPES:
            raise WeightMapError(f"{name}{suffix} has dtype {dtype}: start from the full-precision weights")
        if dtype != dtypes[0]:
            raise WeightMapError(
                f"{name}{suffix} has dtype {dtype}, but {mapping.hf_names[0]} has {dtypes[0]}: both become parts of "
                f"{mapping.mcore_name}, which has one dtype"
            )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    import torch

    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _rows(segment: RowSegment, tensors: Sequence[Tensor]) -> Tensor:
    if segment.source is None:
        return tensors[0].new_zeros(segment.stop - segment.start, *tensors[0].shape[1:])
    return tensors[segment.source][segment.start : segment.stop]


class WeightMap:
    """Every mapping of one model, in the order embedding, layers, final norm, output layer, and
    ``Architecture.predictors`` layers for multi-token prediction.

    Args:
        architecture: the model.
        padded_vocab_size: rows of the Megatron-Core embedding and output layer; None: no padding.

    Raises:
        WeightMapError: ``padded_vocab_size`` is smaller than the vocabulary.
    """

    def __init__(self, architecture: Architecture, padded_vocab_size: int | None = None) -> None:
        self.architecture = architecture
        rules = architecture.declaration.rules
        self._rules = tuple(r for r in rules if not r.only_with or getattr(architecture, r.only_with))
        self._sizes = _sizes(architecture)
        self.padded_vocab_size = architecture.vocab_size if padded_vocab_size is None else padded_vocab_size
        if self.padded_vocab_size < architecture.vocab_size:
            raise WeightMapError(
                f"padded vocabulary size {self.padded_vocab_size} is smaller than vocab_size={architecture.vocab_size}"
            )
        self._mappings = {mapping.mcore_name: mapping for mapping in self._expand()}

    def __iter__(self) -> Iterator[Mapping]:
        return iter(self._mappings.values())

    def __len__(self) -> int:
        return len(self._mappings)

    def __getitem__(self, mcore_name: str) -> Mapping:
        """The mapping of a parameter, by its global name of either layer spec.

        Raises:
            WeightMapError: the family has no such parameter.
        """
        try:
            return self._mappings[canonical_name(mcore_name)]
        except KeyError:
            raise WeightMapError(
                f"Megatron-Core parameter {mcore_name} is not in the weight map of family {self.architecture.family}"
            ) from None

    def __contains__(self, mcore_name: object) -> bool:
        return isinstance(mcore_name, str) and canonical_name(mcore_name) in self._mappings

    @cached_property
    def hf_names(self) -> frozenset[str]:
        """Every tensor that a Hugging Face checkpoint of the model must hold."""
        return frozenset(self.hf_shapes)

    @cached_property
    def hf_shapes(self) -> MappingABC[str, tuple[int, ...]]:
        """Shape of each of these tensors by its name, in the order of the mappings."""
        return stacked_shapes(
            (name, shape) for mapping in self for name, shape in zip(mapping.hf_names, mapping.hf_shapes, strict=True)
        )

    @property
    def embedding_name(self) -> str:
        """Hugging Face name of the embedding."""
        return self._hf_name(EMBEDDING_NAME)

    @property
    def output_name(self) -> str:
        """Hugging Face name of the output layer where it is not tied."""
        return self._hf_name(OUTPUT_NAME)

    def _hf_name(self, mcore_name: str) -> str:
        return next(rule.hf[0] for rule in self._rules if rule.mcore == mcore_name)

    def exported(self) -> Iterator[Mapping]:
        """The mappings that are written to Hugging Face: all but the tied output layer."""
        return (mapping for mapping in self if not mapping.tied)

    def predictor_copies(self) -> Iterator[Mapping]:
        """Mappings to what a checkpoint has once more for each layer for multi-token prediction that is a parameter."""
        for predictor in range(self.architecture.predictors):
            for mcore_name, hf_name in self.architecture.declaration.predictor_copies.items():
                own = hf_name.format(behind=self.architecture.num_layers + predictor)
                yield replace(self[mcore_name], hf_names=(own,))

    def exported_groups(self) -> list[tuple[tuple[str, ...], tuple[Mapping, ...]]]:
        """``exported``, as (names of tensors, all mappings that have parts of them): one mapping, but for stacks."""
        groups: dict[tuple[str, ...], list[Mapping]] = {}
        for mapping in self.exported():
            groups.setdefault(tuple(dict.fromkeys(map(tensor_of, mapping.hf_names))), []).append(mapping)
        return [(names, tuple(mappings)) for names, mappings in groups.items()]

    def _expand(self) -> Iterator[Mapping]:
        for in_layers, group in itertools.groupby(self._rules, lambda rule: "{layer}" in rule.mcore):
            rules = tuple(group)
            if not in_layers:
                yield from (self._mapping(rule) for rule in rules)
                continue
            for layer in range(self.architecture.num_layers):
                absent = (
                    Layers.DENSE if self.architecture.has_experts(layer) else Layers.EXPERTS,
                    Layers.LINEAR if self.architecture.has_attention(layer) else Layers.ATTENTION,
                    None if self.architecture.has_indexer(layer) else Layers.INDEXER,
                )
                present = [rule for rule in rules if rule.layers not in absent]
                per_expert = [rule for rule in present if "{expert}" in rule.mcore]
                yield from (self._mapping(rule, layer) for rule in present if "{expert}" not in rule.mcore)
                for expert in range(self.architecture.num_experts or 0):
                    yield from (self._mapping(rule, layer, expert) for rule in per_expert)

        rules = tuple(
            rule
            for rule in self.architecture.declaration.predictors
            if not rule.only_with or getattr(self.architecture, rule.only_with)
        )
        for predictor in range(self.architecture.predictors):
            for rule in rules:
                experts = range(self.architecture.num_experts or 0) if "{expert}" in rule.mcore else (None,)
                yield from (self._mapping(rule, expert=expert, predictor=predictor) for expert in experts)

    def _mapping(
        self, rule: Rule, layer: int | None = None, expert: int | None = None, predictor: int | None = None
    ) -> Mapping:
        tied = rule.mcore == OUTPUT_NAME and self.architecture.tie_word_embeddings
        hf_names = (self.embedding_name,) if tied else rule.hf
        padding = self.padded_vocab_size - self.architecture.vocab_size
        groups, number = self.architecture.num_query_groups, layer if predictor is None else predictor
        if rule.arrangement is Arrangement.KEY_HEADS:
            assert self.architecture.delta_net is not None
            groups = self.architecture.delta_net.key_heads
        return Mapping(
            mcore_name=rule.mcore.format(layer=number, expert=expert),
            hf_names=tuple(
                name.format(layer=number, expert=expert, behind=self.architecture.num_layers + (predictor or 0))
                for name in hf_names
            ),
            hf_shapes=tuple(tuple(self._sizes[size] for size in shape) for shape in rule.shapes),
            arrangement=rule.arrangement,
            tp_dim=rule.tp_dim,
            rule=rule,
            layer=layer,
            expert=expert,
            tied=tied,
            query_groups=groups,
            heads_per_group=self.architecture.num_attention_heads // self.architecture.num_query_groups,
            padding_rows=padding if rule.arrangement is Arrangement.VOCABULARY else 0,
            sections=tuple(self._sizes[size] for size in rule.sections),
        )


def _sizes(architecture: Architecture) -> MappingABC[str, int]:
    delta = architecture.delta_net or DeltaNetSizes(0, 0, 0, 0, 0)
    indexer = architecture.indexer or IndexerSizes(0, 0, 0)
    values = (
        1,
        architecture.vocab_size,
        architecture.hidden_size,
        2 * architecture.hidden_size,
        architecture.query_size,
        architecture.key_value_size,
        architecture.query_size + 2 * architecture.key_value_size,
        architecture.head_dim,
        architecture.ffn_hidden_size,
        2 * architecture.ffn_hidden_size,
        architecture.num_experts or 0,
        architecture.moe_ffn_hidden_size or 0,
        architecture.shared_expert_ffn_hidden_size or 0,
        architecture.query_rank,
        architecture.latent.key_value_rank if architecture.latent else 0,
        architecture.cached_size,
        architecture.latent_key_value_size,
        architecture.output_size,
        architecture.num_attention_heads,
        architecture.gated_query_size,
        delta.query_size,
        delta.value_size,
        delta.value_heads,
        delta.value_dim,
        delta.convolved_size,
        delta.convolved_size + delta.value_size,
        2 * delta.value_heads,
        delta.kernel,
        indexer.query_size,
        indexer.head_dim,
        indexer.heads,
    )
    return dict(zip(SIZES, values, strict=True))


PREDICTOR_PREFIX = "mtp."
"""How names begin of parameters of layers for multi-token prediction, and their keys in a checkpoint."""
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")


def canonical_name(mcore_name: str) -> str:
    """The local spec's name for a parameter of either layer spec; other names come back unchanged."""
    for fused, plain in _FUSED_NORMS.items():
        if mcore_name.endswith(fused):
            return mcore_name.removesuffix(fused) + plain
    return _GROUPED_EXPERT.sub(r"mlp.experts.local_experts.\3.\1.\2", mcore_name)


@dataclass(frozen=True)
class CheckpointPlace:
    """Where a parameter lies in a Megatron-Core distributed checkpoint: ``key``, indexed by layer and expert."""

    key: str
    index: tuple[int, ...] = ()
    """Position on the axes that the checkpoint puts before the parameter's own: (), (layer,) or (layer, expert)."""
    axes: tuple[int, ...] = ()
    """Length of these axes."""


def checkpoint_place(mapping: Mapping, architecture: Architecture) -> CheckpointPlace:
    """The key that Megatron-Core's ``sharded_state_dict`` gives the parameter, with stacked layers and experts.

    Where layers differ in their parameters, they are not stacked: keys have the layer's number.

    Both layer specs write these keys, with one exception that the learner's checkpoint room evens out: the local spec
    stores the norm before a mixture of experts as if it were fused into a linear layer that does not exist.
    """
    name = mapping.mcore_name
    if name.startswith(PREDICTOR_PREFIX):
        for fused, plain in _FUSED_NORMS.items():
            of_several = architecture.is_moe if fused.startswith("mlp.") else architecture.latent is not None
            if not of_several:
                name = name.replace(".mtp_model_layer." + plain, ".mtp_model_layer." + fused)
        name = name.replace(".mtp_model_layer.", ".transformer_layer.")
        if mapping.expert is None:
            return CheckpointPlace(name)
        assert architecture.num_experts is not None
        name = name.replace(f"local_experts.{mapping.expert}.", "experts.")
        return CheckpointPlace(name, (mapping.expert,), (architecture.num_experts,))
    if mapping.layer is None:
        return CheckpointPlace(EMBEDDING_NAME if mapping.tied else name)
    name = name.removeprefix(MCORE_LAYER.format(layer=mapping.layer))
    for fused, plain in _FUSED_NORMS.items():
        has_experts = architecture.has_experts(mapping.layer)
        has_qkv = architecture.latent is None and architecture.has_attention(mapping.layer)
        of_several = has_experts if fused.startswith("mlp.") else not has_qkv
        if name == plain and not of_several:  # what several modules read is fused into none
            name = fused
    index: tuple[int, ...] = (mapping.layer,)
    axes: tuple[int, ...] = (architecture.num_layers,)
    prefix = "decoder.layers."
    if architecture.has_mixed_layers:
        index, axes, prefix = (), (), MCORE_LAYER.format(layer=mapping.layer)
    if mapping.expert is None:
        return CheckpointPlace(prefix + name, index, axes)
    name = name.replace(f"local_experts.{mapping.expert}.", "experts.")
    assert architecture.num_experts is not None
    return CheckpointPlace(prefix + name, (*index, mapping.expert), (*axes, architecture.num_experts))
