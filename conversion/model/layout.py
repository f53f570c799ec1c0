"""How a model is cut over ranks: the sizes of every kind of parallelism, and what has to divide what.

The learner's settings, the planner's search and the converters' target layouts all ask here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from conversion.model.architecture import Architecture
from megatron_retool.errors import InputError


class LayoutError(InputError):
    """Sizes do not fit one another or the model. The message names the setting of ``learner`` and what would fit."""


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of every kind of parallelism. ``world_size`` = tensor x context x data x pipeline."""

    world_size: int
    tensor: int
    pipeline: int
    virtual_pipeline: int | None
    context: int
    data: int
    expert: int
    expert_tensor: int
    sequence_parallel: bool

    @classmethod
    def of_ranks(
        cls,
        world_size: int,
        *,
        tensor: int = 1,
        pipeline: int = 1,
        virtual_pipeline: int | None = None,
        context: int = 1,
        expert: int = 1,
        expert_tensor: int | None = None,
        sequence_parallel: bool = False,
        architecture: Architecture | None = None,
    ) -> ParallelLayout:
        """The layout of ``world_size`` ranks; data parallelism takes what the others leave.

        Args:
            expert_tensor: None: as ``tensor``.
            architecture: of a model whose sizes an error names too, where they do not divide either.

        Raises:
            LayoutError: the sizes do not fit one another.
        """
        expert_tensor = tensor if expert_tensor is None else expert_tensor
        for key, size in (
            ("world_size", world_size),
            ("tensor_model_parallel_size", tensor),
            ("pipeline_model_parallel_size", pipeline),
            ("context_parallel_size", context),
            ("expert_model_parallel_size", expert),
            ("expert_tensor_parallel_size", expert_tensor),
        ):
            if size < 1:
                raise LayoutError(f"learner.{key}={size} must be at least 1")
        wrong = [
            f"learner.world_size={world_size} is not divisible by {name} = {ranks}"
            for name, ranks in (
                ("TP x PP x CP", tensor * pipeline * context),
                ("ETP x EP x PP", expert_tensor * expert * pipeline),
            )
            if world_size % ranks
        ]
        if wrong:
            if architecture is not None:
                wrong += _misfits(architecture, tensor, context, pipeline, virtual_pipeline, expert, expert_tensor)
            raise LayoutError("; ".join(wrong))
        if sequence_parallel and tensor == 1:
            raise LayoutError("learner.sequence_parallel=true needs learner.tensor_model_parallel_size > 1")
        if virtual_pipeline is not None and pipeline < 2:
            raise LayoutError("learner.virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size > 1")
        data = world_size // (tensor * pipeline * context)
        return cls(
            world_size, tensor, pipeline, virtual_pipeline, context, data, expert, expert_tensor, sequence_parallel
        )

    def for_model(self, architecture: Architecture, max_tokens_per_micro_batch: int) -> ParallelLayout:
        """The layout as this model has it: ``expert_tensor`` of one without experts is ``tensor``.

        Raises:
            LayoutError: the model cannot be cut like this, or the token budget is smaller than the padding.
        """
        if not architecture.is_moe and (self.expert > 1 or self.expert_tensor not in (1, self.tensor)):
            raise LayoutError(
                f"learner.expert_model_parallel_size={self.expert} and expert_tensor_parallel_size="
                f"{self.expert_tensor} need a mixture-of-experts model, which {architecture.family} is not"
            )
        layout = self if architecture.is_moe else replace(self, expert_tensor=self.tensor)
        wrong = _misfits(
            architecture,
            layout.tensor,
            layout.context,
            layout.pipeline,
            layout.virtual_pipeline,
            layout.expert,
            layout.expert_tensor,
        )
        if wrong:
            raise LayoutError("; ".join(wrong))
        if architecture.is_moe and self.tensor > 1 and not self.sequence_parallel:
            raise LayoutError(
                "a mixture-of-experts model with tensor_model_parallel_size > 1 needs learner.sequence_parallel=true"
            )
        if architecture.linear_bias and layout.expert_tensor > 1:
            raise LayoutError(
                f"learner.expert_tensor_parallel_size={layout.expert_tensor} would add the bias of an expert as many "
                f"times: this {architecture.family} model has biased experts, set it to 1"
            )
        unit = self.sequence_multiple * self.tensor
        if max_tokens_per_micro_batch < unit:
            raise LayoutError(
                f"learner.max_tokens_per_micro_batch={max_tokens_per_micro_batch} is smaller than the layout's padding "
                f"unit, {unit}"
            )
        return layout

    def layers(self, architecture: Architecture, stage: int, chunk: int = 0) -> range:
        """Global numbers of the layers in a model chunk of a pipeline stage; ``chunk``: its virtual stage."""
        count = architecture.num_layers // (self.pipeline * (self.virtual_pipeline or 1))
        first = (chunk * self.pipeline + stage) * count
        return range(first, first + count)

    @property
    def sequence_multiple(self) -> int:
        """A sequence's length is padded to a multiple of this: context parallelism cuts it into 2 x CP chunks."""
        return 2 * self.context if self.context > 1 else 1

    def padded(self, tokens: Any) -> Any:
        """Lengths of sequences (an int, or an integer array) with their padding to ``sequence_multiple``."""
        return -(-tokens // self.sequence_multiple) * self.sequence_multiple

    @property
    def micro_batch_multiple(self) -> int:
        """A micro-batch's length is padded to a multiple of this: sequence parallelism cuts each CP share by TP."""
        return self.sequence_multiple * (self.tensor if self.sequence_parallel else 1)


@dataclass(frozen=True)
class Cut:
    """One size of a model that one kind of parallelism cuts.

    Attributes:
        dimension: as the arguments of ``cuts``.
        parts: that it is cut into; of virtual_pipeline: PP x VPP, of context: TP x CP.
        what: config.json's key of the size.
        may_repeat: ranks may also share a part, where there are more of them.
    """

    dimension: str
    parts: int
    what: str
    size: int
    may_repeat: bool = False

    @property
    def fits(self) -> bool:
        """Whether the parts divide the size, or repeat it where that is allowed."""
        return self.parts > 0 and (self.size % self.parts == 0 or (self.may_repeat and self.parts % self.size == 0))


def cuts(
    architecture: Architecture,
    *,
    tensor: int = 1,
    context: int = 1,
    pipeline: int = 1,
    virtual_pipeline: int = 1,
    expert: int = 1,
    expert_tensor: int = 1,
) -> Iterator[Cut]:
    """Every size of the model that has to divide by a size of the layout."""
    yield Cut("tensor", tensor, "num_attention_heads", architecture.num_attention_heads)
    yield Cut("tensor", tensor, "num_key_value_heads", architecture.num_query_groups, may_repeat=True)
    if architecture.dense_mlps:
        yield Cut("tensor", tensor, "intermediate_size", architecture.ffn_hidden_size)
    if architecture.shared_expert_ffn_hidden_size is not None:
        width = architecture.shared_expert_ffn_hidden_size
        yield Cut("tensor", tensor, "shared_expert_intermediate_size", width)
    if architecture.delta_net is not None:
        yield Cut("tensor", tensor, "linear_num_key_heads", architecture.delta_net.key_heads)
        if context > 1:
            yield Cut("context", tensor * context, "linear_num_key_heads", architecture.delta_net.key_heads)
    if architecture.mamba is not None:
        yield Cut("tensor", tensor, "mamba_n_groups", architecture.mamba.groups)
        if context > 1:
            yield Cut("context", tensor * context, "mamba_n_heads", architecture.mamba.heads)
    yield Cut("tensor", tensor, "hidden_size", architecture.hidden_size)
    yield Cut("pipeline", pipeline, "num_hidden_layers", architecture.num_layers)
    yield Cut("virtual_pipeline", pipeline * virtual_pipeline, "num_hidden_layers", architecture.num_layers)
    yield Cut("expert", expert, "num_experts", architecture.num_experts or 1)
    if architecture.moe_ffn_hidden_size is not None:
        yield Cut("expert_tensor", expert_tensor, "moe_intermediate_size", architecture.moe_ffn_hidden_size)


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int) -> int:
    """Rows of the embedding and output layer: ``vocab_size`` rounded up to a multiple of 8 x TP.

    Published vocabularies are multiples of 64 or 128, so that nothing is padded and checkpoints have the same shapes in
    every layout up to TP 8.
    """
    multiple = 8 * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def _misfits(
    architecture: Architecture,
    tensor: int,
    context: int,
    pipeline: int,
    virtual_pipeline: int | None,
    expert: int,
    expert_tensor: int,
) -> list[str]:
    """Everything of the model that the sizes do not divide, each with its key."""
    parts = cuts(
        architecture,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        virtual_pipeline=virtual_pipeline or 1,
        expert=expert,
        expert_tensor=expert_tensor if architecture.is_moe else tensor,
    )
    wrong = list(dict.fromkeys(_misfit(cut) for cut in parts if not cut.fits))
    chunks = pipeline * (virtual_pipeline or 1)
    if not architecture.num_layers % chunks:
        firsts = range(0, architecture.num_layers, architecture.num_layers // chunks)
        if apart := sorted(set(firsts) & set(architecture.shared_choices)):
            wrong.append(
                f"layer {apart[0]} of the model sees the keys that the layer before it has chosen, and PP x VPP = "
                f"{chunks} puts it on another stage: change learner.pipeline_model_parallel_size or "
                "learner.virtual_pipeline_model_parallel_size"
            )
    return wrong


def _misfit(cut: Cut) -> str:
    if cut.dimension in ("pipeline", "virtual_pipeline"):
        return (
            f"the model's {cut.what}={cut.size} is not divisible by PP x VPP = {cut.parts}: change "
            "learner.pipeline_model_parallel_size or learner.virtual_pipeline_model_parallel_size"
        )
    if cut.dimension == "context":
        return (
            f"the model's {cut.what}={cut.size} is not divisible by TP x CP = {cut.parts}, and context-parallel ranks "
            "share out the heads of layers without attention: change learner.context_parallel_size or "
            "learner.tensor_model_parallel_size"
        )
    kind = cut.dimension if cut.dimension == "expert_tensor" else f"{cut.dimension}_model"
    setting, size = f"learner.{kind}_parallel_size={cut.parts}", f"the model's {cut.what}={cut.size}"
    if cut.may_repeat:
        return f"{setting} neither divides {size} nor is a multiple of it"
    return f"{setting} does not divide {size}"
