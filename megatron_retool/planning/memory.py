"""Memory of one GPU, component by component, for every layout.

Parameters, gradients, optimizer states and checkpoints are exact: they are counted from the weight map's own shapes
(``conversion.model.weight_map``), and tests hold them against Megatron-Core models built on the meta device.
Activations and logits are those of ``activations``; runtime overhead is an allowance.

Notation: TP, PP, VPP, CP, EP, ETP, DP sizes of the layout; h hidden size, L layers, V vocabulary padded to a multiple
of 8 TP; t = tokens of a packed micro-batch on one context-parallel rank = max_tokens_per_micro_batch / CP; b = bytes
of a parameter (2 in bf16).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from conversion.model.adapter_map import factor_elements, target_of
from conversion.model.architecture import Architecture
from conversion.model.layout import ParallelLayout, padded_vocab_size
from conversion.model.mapping import shard_shape
from conversion.model.rules import updated_by_muon
from conversion.model.weight_map import PREDICTOR_PREFIX, WeightMap
from megatron_retool.config import AlgorithmConfig, LearnerConfig, ModelConfig, OptimizerConfig
from megatron_retool.planning.activations import PARAMETER_BYTES, activation_bytes, logit_bytes
from megatron_retool.registry import Need

RUNTIME_BYTES = 4 * 2**30
"""Allowance for the CUDA context, NCCL, cuBLAS and allocator fragmentation of one process."""
PINNED_BLOCK_BYTES = 256 * 2**20
"""Pinned host memory comes in pieces of this size (learner/offload.py)."""

Tensors = tuple[tuple[int, int], ...]
"""(elements, how many tensors of that size), ..."""
Adapters = tuple[int, tuple[str, ...]]
"""learner.lora's rank and targets, where there are adapters."""


@dataclass(frozen=True)
class _Shard:
    """One rank's part of some parameters.

    ``expert`` are those that expert parallelism spreads, ``shared`` an embedding that lies on two pipeline stages.
    """

    dense: Tensors = ()
    expert: Tensors = ()
    shared: Tensors = ()
    matrices: int = 0
    """Elements of them that Muon updates, where it is the optimizer."""
    frozen: int = 0
    """Elements beside them that training leaves as they are."""

    def __add__(self, other: _Shard) -> _Shard:
        tensors = (self.dense + other.dense, self.expert + other.expert, self.shared + other.shared)
        return _Shard(*tensors, self.matrices + other.matrices, self.frozen + other.frozen)

    def times(self, count: int) -> _Shard:
        dense, expert = (tuple((size, number * count) for size, number in t) for t in (self.dense, self.expert))
        return _Shard(dense, expert, self.shared, self.matrices * count, self.frozen * count)

    @property
    def elements(self) -> int:
        return self.frozen + sum(size * number for size, number in (*self.dense, *self.expert, *self.shared))


_Part = str | tuple[bool, ...]
"""embedding, norm, output, predictors, or ``_kind`` of a layer."""


@lru_cache(maxsize=256)
def _shards(
    architecture: Architecture,
    tensor: int,
    expert_tensor: int,
    expert: int,
    vocab_rows: int,
    adapters: Adapters | None = None,
) -> Mapping[_Part, _Shard]:
    """Elements of one rank's part of the embedding, one layer of each kind, the final norm, the output layer, and the
    layers for multi-token prediction; with ``adapters`` those of the adapters' factors in their place."""
    kinds = list(dict.fromkeys(_kind(architecture, number) for number in range(architecture.num_layers)))
    layers: dict[str, Any] = {
        field: tuple(number for number, kind in enumerate(kinds) if kind[place]) for place, field in enumerate(_KINDS)
    }
    small = replace(architecture, num_layers=len(kinds), **layers)
    frozen: Counter[_Part] = Counter()
    parts: dict[_Part, list[tuple[int, bool, bool]]] = {
        "embedding": [],
        **{kind: [] for kind in kinds},
        "norm": [],
        "output": [],
        "predictors": [],
    }
    local_experts = (architecture.num_experts or 0) // expert
    for mapping in WeightMap(small, vocab_rows):
        if mapping.rule.is_buffer or (mapping.expert is not None and mapping.expert >= local_experts):
            continue
        routed = mapping.expert is not None
        ranks = expert_tensor if routed else tensor
        sizes = [math.prod(shard_shape(mapping, ranks, 0))]
        if adapters is not None:
            sizes = factor_elements(mapping, adapters[0], ranks) if target_of(mapping) in adapters[1] else []
        part: _Part
        if mapping.layer is not None:
            part = kinds[mapping.layer]
        elif mapping.mcore_name.startswith("embedding"):
            part = "embedding"
        elif mapping.mcore_name.startswith(PREDICTOR_PREFIX):
            part = "predictors"
        else:
            part = "output" if mapping.mcore_name.startswith("output_layer") else "norm"
        if mapping.rule.is_frozen:
            frozen[part] += sum(sizes)
            continue
        # Experts have gradient buffers of their own only where other ranks hold them than dense layers.
        is_matrix = updated_by_muon(mapping.mcore_name, len(mapping.mcore_shape))
        spread = routed and (expert > 1 or expert_tensor != tensor)
        parts[part] += [(size, spread, is_matrix) for size in sizes]
    return {
        part: _Shard(
            dense=_counted(size for size, spread, _ in result if not spread),
            expert=_counted(size for size, spread, _ in result if spread),
            matrices=sum(size for size, _, is_matrix in result if is_matrix),
            frozen=frozen[part],
        )
        for part, result in parts.items()
    }


def _counted(sizes: Iterable[int]) -> Tensors:
    return tuple(Counter(sizes).items())


def _stage_chunks(
    architecture: Architecture, layout: ParallelLayout, stage: int, adapters: Adapters | None = None
) -> list[_Shard]:
    """The model chunks that a rank of pipeline stage ``stage`` holds: one, or VPP of them."""
    shards = _shards(
        architecture,
        layout.tensor,
        layout.expert_tensor,
        layout.expert,
        padded_vocab_size(architecture.vocab_size, layout.tensor),
        adapters,
    )
    virtual = layout.virtual_pipeline or 1
    embedding, output = shards["embedding"], shards["output"]
    if architecture.tie_word_embeddings and layout.pipeline > 1:
        embedding, output = _Shard(shared=embedding.dense), _Shard(shared=output.dense)
    elif architecture.predictors and layout.pipeline > 1:
        embedding = _Shard(shared=embedding.dense)
    chunks = []
    for index in range(virtual):
        chunk = _layers(shards, architecture, layout.layers(architecture, stage, index))
        first = stage == 0 and index == 0
        last = stage == layout.pipeline - 1 and index == virtual - 1
        if first:
            chunk = chunk + embedding
        if last:
            chunk = chunk + shards["norm"]
            # A tied output layer is the embedding itself, or a second copy of it on another stage.
            if not architecture.tie_word_embeddings or not first:
                chunk = chunk + output
            chunk = chunk + shards["predictors"]
            if architecture.predictors and not first:  # which look up the tokens that they get
                chunk = chunk + embedding
        chunks.append(chunk)
    return chunks


def _layers(shards: Mapping[_Part, _Shard], architecture: Architecture, numbers: range) -> _Shard:
    counts = Counter(_kind(architecture, number) for number in numbers)
    return sum((shards[kind].times(count) for kind, count in counts.items()), _Shard())


_KINDS = ("dense_layers", "linear_layers", "shared_choices", "layers_without_mixer", "layers_without_mlp")
"""Fields of ``Architecture`` that say which layers differ in their parameters."""


def _kind(architecture: Architecture, layer: int) -> tuple[bool, ...]:
    """Of which of ``_KINDS`` a layer is one."""
    return tuple(layer in getattr(architecture, field) for field in _KINDS)


def parameter_count(architecture: Architecture) -> int:
    """Parameters of the whole model as Hugging Face stores it: unpadded, a tied output layer counted once."""
    shards = _shards(architecture, 1, 1, 1, architecture.vocab_size)
    total = _layers(shards, architecture, range(architecture.num_layers)) + shards["embedding"] + shards["norm"]
    total = total + shards["predictors"]
    if not architecture.tie_word_embeddings:
        total = total + shards["output"]
    return total.elements


def routed_expert_parameters(architecture: Architecture) -> int:
    """Parameters in experts, all layers together; 0 for a dense model."""
    if not architecture.is_moe:
        return 0
    assert architecture.num_experts is not None and architecture.moe_ffn_hidden_size is not None
    one = (3 if architecture.gated_mlp else 2) * architecture.expert_hidden_size * architecture.moe_ffn_hidden_size
    if architecture.linear_bias:
        one += 2 * architecture.moe_ffn_hidden_size + architecture.hidden_size
    return len(architecture.expert_layers) * architecture.num_experts * one


def rank_parameters(architecture: Architecture, layout: ParallelLayout, stage: int) -> int:
    """Parameters of a rank of pipeline stage ``stage``, all its chunks together."""
    return sum(chunk.elements for chunk in _stage_chunks(architecture, layout, stage))


def adapters_of(learner: LearnerConfig) -> Adapters | None:
    """What the functions of this module know of learner.lora."""
    return (learner.lora.rank, tuple(learner.lora.targets)) if learner.lora.rank else None


def weight_sync_bytes(architecture: Architecture, learner: LearnerConfig) -> int:
    """What a weight sync sends to one engine: all weights, or with learner.lora.sync=adapter the adapters' factors."""
    if learner.lora.sends_adapter:
        return checkpoint_bytes(architecture, learner.dtype, with_optimizer=False, adapters=adapters_of(learner))
    return parameter_count(architecture) * PARAMETER_BYTES[learner.dtype]


def trained_parameters(
    architecture: Architecture, layout: ParallelLayout, stage: int, adapters: Adapters | None = None
) -> int:
    """``rank_parameters`` without those that training leaves as they are; with ``adapters`` only their factors."""
    return sum(chunk.elements - chunk.frozen for chunk in _stage_chunks(architecture, layout, stage, adapters))


def expert_data_parallel(layout: ParallelLayout) -> int:
    """Ranks that hold the same experts: world / (ETP EP PP)."""
    return layout.world_size // (layout.expert_tensor * layout.expert * layout.pipeline)


@dataclass(frozen=True)
class StateBytes:
    """What training keeps from step to step on one rank, in bytes."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Bytes of all three."""
        return self.parameters + self.gradients + self.optimizer


@lru_cache(maxsize=4096)
def state_bytes(
    architecture: Architecture,
    layout: ParallelLayout,
    stage: int,
    dtype: str = "bfloat16",
    distributed_optimizer: bool = True,
    per_element: float | None = None,
    optimizer: str = "adamw",
    adapters: Adapters | None = None,
) -> StateBytes:
    """Parameters, fp32 main gradients and the optimizer's states of a rank of pipeline stage ``stage``.

    Megatron's DDP lays all parameters of a chunk end to end in one buffer (experts that EP spreads in another).  With
    the distributed optimizer each tensor starts at a multiple of 64 elements and the buffer's length n is rounded up
    to a multiple of lcm(128, D), where D = DP CP for dense parameters and world / (ETP EP PP) for experts; a tied
    embedding that two pipeline stages share is rounded up by itself:

        parameters = b n          gradients = 4 n          optimizer = s n / D

    with s = ``per_element`` (None: of AdamW in fp32, ``optimizer_bytes_per_element``).  The optimizer's figure is the
    share of the rank with the most; padding aside all shares are equal.  Without the distributed optimizer nothing is
    padded or divided: n is the number of parameters and optimizer = s n.  The buckets of learner.overlap_grad_reduce
    round up more often, by less than lcm(128, D) elements each, which is not counted.  Muon has one moment less for
    each element of a matrix: 4 bytes.  What training leaves as it is (indexers) has b bytes an element and nothing
    else.

    With ``adapters`` the model has only parameters, outside of these buffers, and n is that of the factors.
    """
    width = PARAMETER_BYTES[dtype]
    if per_element is None:
        per_element = optimizer_bytes_per_element(LearnerConfig(dtype=dtype), OptimizerConfig())
    dense_ranks, expert_ranks = layout.data * layout.context, expert_data_parallel(layout)
    elements = shares = 0.0
    matrices = frozen = 0
    for chunk in _stage_chunks(architecture, layout, stage, adapters):
        matrices += chunk.matrices
        frozen += chunk.frozen
        for tensors, ranks in ((chunk.dense, dense_ranks), (chunk.shared, dense_ranks), (chunk.expert, expert_ranks)):
            length = _buffer_elements(tensors, ranks, distributed_optimizer)
            elements += length
            shares += length / ranks if distributed_optimizer else length
    if adapters is not None:
        frozen = rank_parameters(architecture, layout, stage)
    return StateBytes(
        parameters=width * (elements + frozen),
        gradients=4.0 * elements,
        optimizer=per_element * shares - (4.0 * matrices if optimizer == "muon" else 0.0),
    )


def optimizer_bytes_per_element(learner: LearnerConfig, optimizer: OptimizerConfig) -> float:
    """Bytes of AdamW's state on the device for each parameter.

    12 (fp32 main parameter, two moments) where parameters have 16 bits, 8 in fp32 (no second copy), none with
    cpu_offload.  With use_precision_aware_optimizer the moments have their dtypes' sizes, and of the main parameter 2
    bytes are kept, as float16 or as the half of float32 that bfloat16 lacks; beside FP8 and float16 weights, which lack
    more, float32 ones stay whole.
    """
    if optimizer.cpu_offload:
        return 0.0
    if learner.dtype == "float32":
        return 8.0
    if not optimizer.use_precision_aware_optimizer:
        return 12.0
    whole = learner.dtype != "bfloat16" or learner.fp8.recipe is not None
    main = 4 if whole and optimizer.main_params_dtype == "float32" else 2
    return float(main + PARAMETER_BYTES[optimizer.exp_avg_dtype] + PARAMETER_BYTES[optimizer.exp_avg_sq_dtype])


def _buffer_elements(tensors: Tensors, ranks: int, padded: bool) -> int:
    if not padded:
        return sum(size * number for size, number in tensors)
    aligned = sum(-(-size // 64) * 64 * number for size, number in tensors)
    multiple = math.lcm(128, ranks)
    return -(-aligned // multiple) * multiple


def checkpoint_bytes(
    architecture: Architecture,
    dtype: str = "bfloat16",
    with_optimizer: bool = True,
    optimizer: str = "adamw",
    adapters: Adapters | None = None,
) -> int:
    """Tensor bytes of a distributed checkpoint (learner/), whatever layout wrote it.

    Each parameter is stored once: b bytes of weight and, for AdamW, fp32 master copy and two moments (12 bytes; 12 in
    fp32 as well, where the master copy repeats the weight).  Vocabulary padding is stored, a tied output layer is not.
    For Muon, which needs the plain optimizer, a matrix has one moment, and fp32 weights are not repeated. What training
    leaves as it is has only its weight. With ``adapters`` their factors are all that is stored.
    """
    width = PARAMETER_BYTES[dtype] + (12 if with_optimizer else 0)
    if adapters is not None:
        shards = _shards(architecture, 1, 1, 1, architecture.vocab_size, adapters)
        return width * _layers(shards, architecture, range(architecture.num_layers)).elements
    rows = padded_vocab_size(architecture.vocab_size, 1)
    tables = 1 if architecture.tie_word_embeddings else 2
    padding = (rows - architecture.vocab_size) * architecture.hidden_size * tables
    total = (parameter_count(architecture) + padding) * width
    if not with_optimizer:
        return total
    shards = _shards(architecture, 1, 1, 1, architecture.vocab_size)
    layers = _layers(shards, architecture, range(architecture.num_layers)) + shards["predictors"]
    total -= 12 * layers.frozen
    if optimizer == "muon":
        total -= 4 * layers.matrices
        if dtype == "float32":
            total -= 4 * (parameter_count(architecture) - layers.frozen + padding)
    return total


# --- the whole device -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LearnerMemory:
    """Bytes on one GPU of the learner while it updates; of the pipeline stage that needs the most."""

    stage: int
    parameters: float
    gradients: float
    optimizer: float
    reference: float
    critic: float
    fp8_copies: float
    activations: float
    logits: float
    runtime: float

    @property
    def total(self) -> float:
        """Bytes at the peak of an update."""
        return self.resident + self.activations + self.logits + self.fp8_copies + self.runtime

    @property
    def resident(self) -> float:
        """States that stay between phases unless they are moved to host memory."""
        return self.parameters + self.gradients + self.optimizer + self.reference + self.critic

    @property
    def sleeping(self) -> float:
        """What waits in host memory while a colocated engine works. Gradients are nothing between two steps."""
        return self.resident - self.gradients

    @property
    def pinned(self) -> float:
        """Host memory that this takes: weights and optimizer states each in whole pieces."""
        weights, optimizer = self.sleeping - self.optimizer, self.optimizer
        return float(sum(math.ceil(part / PINNED_BLOCK_BYTES) * PINNED_BLOCK_BYTES for part in (weights, optimizer)))

    def components(self) -> dict[str, float]:
        """Bytes by name of the part."""
        return {name: value for name, value in vars(self).items() if name != "stage"}


def frozen_architectures(
    algorithm: AlgorithmConfig, learner: LearnerConfig, model: ModelConfig, policy: Architecture
) -> list[Architecture]:
    """The models that the learner computes beside the policy: its start, or teachers in its place.

    Raises:
        ConfigError: see ``DistillationConfig.teacher_architectures``.
    """
    distillation = algorithm.distillation
    if distillation.paths:
        return distillation.teacher_architectures(policy, learner, model.families)
    return [policy] if algorithm.keeps_reference else []


def learner_memory(
    learner: LearnerConfig,
    algorithm: AlgorithmConfig,
    model: ModelConfig,
    architecture: Architecture,
    layout: ParallelLayout,
    on_cpu: bool = False,
) -> LearnerMemory:
    """Peak memory of a learner rank, stage by stage; the stage that needs the most.

    The reference policy, where it is needed, is a frozen copy of the parameters; with learner.lora it is the model
    without its adapters and needs no memory.  Teachers that the learner computes take its
    place.  The critic, where one is, has parameters, gradients and optimizer states of its own.  Neither has layers for
    multi-token prediction, which with learner.mtp.train lie on the last stage.  FP8 and FP4 training keep each linear
    weight twice in few bits, as it is and transposed, while a mini-batch's micro-batches run; with
    learner.fp8.parameters these two are the weight.  Models that train only in Megatron-
    Core's own layers keep what those keep, on a GPU too.
    """
    needs = algorithm.needs
    adapters = adapters_of(learner)
    frozen = frozen_architectures(algorithm, learner, model, architecture)
    if adapters is not None and not algorithm.distillation.paths:
        frozen = []
    micro_batches = max(1, learner.mini_batch_size // layout.data)
    result = []
    with_predictors = architecture.with_predictors() if learner.mtp.train else architecture

    def states_of(model: Architecture, stage: int) -> StateBytes:
        return state_bytes(
            model,
            layout,
            stage,
            learner.dtype,
            learner.use_distributed_optimizer,
            optimizer_bytes_per_element(learner, learner.optimizer),
            learner.optimizer.name,
            adapters,
        )

    for stage in range(layout.pipeline):
        states = states_of(with_predictors, stage)
        last = stage == layout.pipeline - 1
        parameters, copies = states.parameters, 0.0
        if learner.fp8.recipe is not None:
            shards = _shards(
                architecture,
                layout.tensor,
                layout.expert_tensor,
                layout.expert,
                padded_vocab_size(architecture.vocab_size, layout.tensor),
            )
            numbers = (layout.layers(architecture, stage, n) for n in range(layout.virtual_pipeline or 1))
            elements = sum(_layers(shards, architecture, each).elements for each in numbers)
            # Of FP4 two copies of half a byte, and a byte of scale for 16 numbers of each.
            copies = (1.125 if learner.fp8.recipe == "nvfp4" else 2.0) * elements
            if learner.fp8.parameters:
                parameters, copies = parameters - PARAMETER_BYTES[learner.dtype] * elements + copies, 0.0
        result.append(
            LearnerMemory(
                stage=stage,
                parameters=parameters,
                gradients=states.gradients,
                optimizer=states.optimizer,
                reference=float(
                    PARAMETER_BYTES[learner.dtype] * sum(rank_parameters(each, layout, stage) for each in frozen)
                ),
                critic=states_of(architecture, stage).total if Need.CRITIC in needs else 0.0,
                fp8_copies=copies,
                activations=activation_bytes(with_predictors, layout, learner, stage, micro_batches, not on_cpu),
                logits=logit_bytes(architecture, layout, learner) if last else 0.0,
                runtime=0.5 * 2**30 if on_cpu else RUNTIME_BYTES,
            )
        )
    return max(result, key=lambda memory: memory.total)
