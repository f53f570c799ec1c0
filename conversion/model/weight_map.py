"""The one statement of how Hugging Face tensors and Megatron-Core parameters correspond.

A family has a table of ``rules.Rule``: a Megatron-Core name, the Hugging Face names whose rows it is made of, how the
rows are arranged, and the dimension that tensor parallelism splits.  ``WeightMap`` expands the table for one model into
``Mapping`` objects.  Offline conversion, weight sync, gradient comparison and FP8 export are walks over them.

Names are those of Megatron-Core's local layer spec with global layer and expert numbers; ``canonical_name`` maps the
Transformer Engine spec's names (norms fused into the next linear layer, grouped experts) onto them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, replace
from functools import cached_property

from conversion.model.architecture import Architecture
from conversion.model.attention_config import DeltaNetSizes, IndexerSizes, MambaSizes
from conversion.model.mapping import Mapping, WeightMapError
from conversion.model.rules import EMBEDDING_NAME, MCORE_LAYER, OUTPUT_NAME, SIZES, Arrangement, Layers, Rule
from conversion.model.stacked import stacked_shapes, tensor_of

IGNORED_HF_NAMES = re.compile(r"\.rotary_emb\.inv_freq$")
"""Tensors that old checkpoints store and that are a function of the config."""


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
                kinds = _kinds(self.architecture, layer)
                present = [rule for rule in rules if rule.layers in kinds]
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
            delta_net, mamba = self.architecture.delta_net, self.architecture.mamba
            groups = delta_net.key_heads if delta_net else mamba.groups if mamba else 1
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


def _kinds(architecture: Architecture, layer: int) -> set[Layers]:
    has_mlp, has_experts = architecture.has_mlp(layer), architecture.has_experts(layer)
    kinds = {
        Layers.ALL: True,
        Layers.MIXER: architecture.has_mixer(layer),
        Layers.MLP: has_mlp,
        Layers.DENSE: has_mlp and not has_experts,
        Layers.EXPERTS: has_experts,
        Layers.ATTENTION: architecture.has_attention(layer),
        Layers.LINEAR: layer in architecture.linear_layers,
        Layers.INDEXER: architecture.has_indexer(layer),
    }
    return {kind for kind, there in kinds.items() if there}


def _sizes(architecture: Architecture) -> MappingABC[str, int]:
    delta = architecture.delta_net or DeltaNetSizes(0, 0, 0, 0, 0)
    mamba = architecture.mamba or MambaSizes(0, 0, 0, 0, 0)
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
        architecture.expert_hidden_size,
        architecture.moe_ffn_hidden_size or 0,
        2 * (architecture.moe_ffn_hidden_size or 0),
        architecture.shared_expert_ffn_hidden_size or 0,
        2 * (architecture.shared_expert_ffn_hidden_size or 0),
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
        mamba.heads,
        mamba.value_size,
        mamba.group_size,
        mamba.convolved_size,
        mamba.convolved_size + mamba.value_size + mamba.heads,
        mamba.kernel,
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
