"""From a Hugging Face config to Megatron-Core models: the policy, its reference copy, the critic."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import layers as tensor_parallel_layers
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from conversion.model.architecture import Architecture
from conversion.model.layout import padded_vocab_size
from conversion.model.rotary import inverse_frequencies
from conversion.model.rules import MCORE_BUFFER_SUFFIXES
from megatron_retool.algorithms.settings import SamplingSettings
from megatron_retool.errors import InputError
from megatron_retool.learner import parallel
from megatron_retool.learner.attention import LocalPackedSequences, RotaryTable
from megatron_retool.learner.expert_groups import place_group_choice
from megatron_retool.learner.log_probs import head_hidden_states, token_scores
from megatron_retool.learner.micro_batch import MicroBatch
from megatron_retool.learner.multi_token_prediction import PredictionLoss
from megatron_retool.learner.positions import query_growth
from megatron_retool.learner.precision import Acceleration
from megatron_retool.learner.routing_replay import LayerReplay, RoutingPass
from megatron_retool.learner.specs import block_spec, predictor_spec
from megatron_retool.learner.transformer_engine import check_matrices, choose_block_scales

if TYPE_CHECKING:
    from megatron_retool.learner.teacher_loss import TeacherLoss


@contextlib.contextmanager
def unfused_output_layer() -> Iterator[None]:
    """Let Megatron build its output layer beside Transformer Engine's layers that fuse weight gradients.

    The layers do that themselves. The output layer, the one native linear layer of such a model, would need Apex and is
    refused without it; but nothing ever calls its forward (``log_probs.py``).
    """
    available = tensor_parallel_layers._grad_accum_fusion_available
    tensor_parallel_layers._grad_accum_fusion_available = True
    try:
        yield
    finally:
        tensor_parallel_layers._grad_accum_fusion_available = available


def _rotate_in_group(attention: SelfAttention, _: Any, arguments: dict[str, Any]) -> None:
    """Let Megatron rotate by the places of the ranks that share the micro-batch; it asks its layout's CP group.

    A hook of the layer and not of the model: recomputation calls only layers.
    """
    attention.pg_collection.cp = parallel.context_group(arguments["packed_seq_params"].local_cp_size)


class PackedModel(GPTModel):
    """A GPTModel that reads packed micro-batches; ``_head`` of a subclass turns the last hidden states into output."""

    def __init__(
        self,
        architecture: Architecture,
        config: TransformerConfig,
        acceleration: Acceleration,
        *,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
        tied: bool,
        share_prefixes: bool = False,
    ) -> None:
        uses_engine = acceleration.transformer_engine is not None
        with unfused_output_layer() if uses_engine else contextlib.nullcontext():
            super().__init__(
                config,
                block_spec(architecture, config, acceleration, vp_stage, share_prefixes),
                vocab_size=padded_vocab_size(architecture.vocab_size, config.tensor_model_parallel_size),
                max_sequence_length=architecture.max_position_embeddings,
                pre_process=pre_process,
                post_process=post_process,
                parallel_output=True,
                share_embeddings_and_output_weights=tied,
                position_embedding_type="rope",
                rotary_base=architecture.rope_theta,
                mtp_block_spec=predictor_spec(architecture, config, acceleration) if architecture.predictors else None,
                vp_stage=vp_stage,
            )
        self.architecture = architecture
        self._packs_attention = acceleration.packs_attention(architecture, config.context_parallel_size)
        frequencies = inverse_frequencies(architecture)
        self.rotary_pos_emb.inv_freq = frequencies.to(self.rotary_pos_emb.inv_freq.device)
        self._rotary_table, self._local_rotary_table = RotaryTable(frequencies), None
        if architecture.local_rope_theta is not None:
            frequencies = inverse_frequencies(architecture, local=True)
            self._local_rotary_table = RotaryTable(frequencies)
            self._local_rotary_pos_emb = copy.copy(self.rotary_pos_emb)
            self._local_rotary_pos_emb.inv_freq = frequencies.to(self.rotary_pos_emb.inv_freq.device)
        if config.context_parallel_size > 1 and not self._packs_attention:
            for module in self.modules():
                if isinstance(module, SelfAttention):
                    module.pg_collection = copy.copy(module.pg_collection)
                    module.register_forward_pre_hook(_rotate_in_group, with_kwargs=True)
        self.layer_replays: list[LayerReplay] = []
        # Set by exact.py.
        self.exact = False
        # Set by adapters.py where the model itself is frozen.
        self.trains_adapters = False
        # Set by data_parallel.py where communication overlaps: to call before the head's weight is read, and after its
        # gradient is added.
        self.before_head: Callable[[], None] | None = None
        self.head_gradient_added: Callable[[], None] | None = None

    def forward(
        self,
        micro_batch: MicroBatch,
        routing: RoutingPass | None = None,
        predictions: PredictionLoss | None = None,
        **head_options: Any,
    ) -> Tensor:
        """One stage's pass over a micro-batch; ``routing`` says or keeps which token goes through which experts.

        ``predictions``, where it is given, gets what the layers for multi-token prediction say.

        Returns:
            Hidden states [t, 1, h] (with sequence parallelism [t / TP, 1, h]) on stages before the last; what ``_head``
            returns on the last.

        Raises:
            ValueError: a text, padding included, is longer than ``Architecture.longest_text``.
        """
        longest = self.architecture.longest_text
        if longest is not None and micro_batch.max_seqlen > longest:
            raise InputError(
                f"a text of {micro_batch.max_seqlen} tokens: the model's longrope positions are other ones beyond "
                f"{longest}, which the learner does not compute"
            )
        embedded = None
        if self.pre_process:
            embedded = self._embed(micro_batch.input_ids, micro_batch.position_ids)
            if self.trains_adapters and torch.is_grad_enabled():
                # Layers that are computed again give no gradient to their adapters where no input asks for one.
                embedded.requires_grad_()
        rotary, packed = self._sequence_parameters(micro_batch)
        with contextlib.nullcontext() if routing is None else routing.through(self.layer_replays, micro_batch):
            hidden = self.decoder(
                hidden_states=embedded, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=packed
            )
        if not self.post_process:
            return hidden
        if predictions is not None:
            predictions.note(self._predict(hidden, micro_batch, rotary, packed, **head_options))
        return self._head(hidden, micro_batch, **head_options)

    def _embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(input_ids=input_ids, position_ids=position_ids)
        scale = self.architecture.embedding_scale
        if scale == 1.0:
            return embedded
        return embedded * (embedded.new_tensor(scale) if self.architecture.embedding_scale_rounded else scale)

    def _sequence_parameters(self, micro_batch: MicroBatch) -> tuple[Tensor | None, PackedSeqParams]:
        lengths: dict[str, Any] = {
            "cu_seqlens_q": micro_batch.cu_seqlens,
            "cu_seqlens_kv": micro_batch.cu_seqlens,
            "max_seqlen_q": micro_batch.max_seqlen,
            "max_seqlen_kv": micro_batch.max_seqlen,
        }
        if self.config.context_parallel_size > 1:
            size = micro_batch.context_size
            lengths |= {"local_cp_size": size, "cp_group": parallel.context_group(size) if size > 1 else None}
        growth = query_growth(self.architecture, micro_batch.position_ids.squeeze(0))
        if not self._packs_attention and micro_batch.tree is None:
            packed = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q_padded=micro_batch.cu_seqlens,
                cu_seqlens_kv_padded=micro_batch.cu_seqlens,
                **lengths,
            )
            packed.query_growth = growth
            angles = self.rotary_pos_emb(micro_batch.max_seqlen, packed_seq=True)
            if self._local_rotary_table is not None:
                local = self._local_rotary_pos_emb(micro_batch.max_seqlen, packed_seq=True)
                angles = torch.stack([angles, local])
            return angles, packed
        place = micro_batch.position_ids.squeeze(0), micro_batch.max_seqlen, self.config.params_dtype
        cos, sin = self._rotary_table.at(*place)
        packed = LocalPackedSequences(buckets=micro_batch.buckets, tree=micro_batch.tree, cos=cos, sin=sin, **lengths)
        packed.query_growth = growth
        if self._local_rotary_table is not None:
            packed.local_cos, packed.local_sin = self._local_rotary_table.at(*place)
        return None, packed

    def own_head_weight(self) -> Parameter | None:
        """The weight that ``_head`` uses without calling the module that holds it; None where there is none."""
        return None

    def _head(self, hidden: Tensor, micro_batch: MicroBatch, **options: Any) -> Tensor:
        raise NotImplementedError

    def _predict(
        self, hidden: Tensor, micro_batch: MicroBatch, rotary: Tensor | None, packed: PackedSeqParams, **options: Any
    ) -> list[tuple[Tensor, Tensor]]:
        raise NotImplementedError


class PolicyModel(PackedModel):
    """The language model: log-probs and entropy of the tokens that the micro-batch's head positions predict."""

    def _head(  # type: ignore[override]
        self,
        hidden: Tensor,
        micro_batch: MicroBatch,
        *,
        temperature: float = 1.0,
        sampling: SamplingSettings | None = None,
        chunk_tokens: int = 1024,
        fp32_head: bool = False,
        logits: bool = False,
        hidden_states: bool = False,
        teacher: TeacherLoss | None = None,
    ) -> Tensor:
        """float32 [2, n]: log-probs, entropy; [K + 1, n] with K targets each.

        With ``logits``: this TP rank's float32 [n, V / TP] instead; with ``hidden_states``: what the output layer makes
        logits of, [n, h]. ``teacher``, where it is given, gets the divergence of the policy from it.
        """
        selected = self._read_by_head(hidden, micro_batch.head_positions)
        scaling = self.architecture.logits_scaling
        if hidden_states:
            return selected if scaling == 1.0 else selected / scaling
        if self.before_head is not None:
            self.before_head()
        weight = self.head_weight()
        if logits:
            return torch.mm(selected, weight.t()).float() / scaling
        # Only the parameter itself has a main gradient, and only under Megatron's DDP.
        main_grad = getattr(weight, "main_grad", None) if torch.is_grad_enabled() else None
        log_probs, entropy, _best, divergence = token_scores(
            selected,
            weight,
            micro_batch.targets,
            vocab_size=self.architecture.vocab_size,
            group=self.pg_collection.tp,
            logits_scaling=scaling,
            temperature=temperature,
            sampling=sampling,
            chunk_tokens=chunk_tokens,
            fp32_head=fp32_head,
            main_grad=main_grad,
            on_main_grad=None if main_grad is None else self.head_gradient_added,
            teacher=None if teacher is None else teacher.head(micro_batch),
            exact=self.exact,
        )
        if teacher is not None and divergence is not None:
            teacher.note(divergence if micro_batch.copies is None else divergence.index_select(0, micro_batch.copies))
        columns = [log_probs] if log_probs.dim() == 1 else log_probs.unbind(1)
        result = torch.stack([*columns, entropy])
        return result if micro_batch.copies is None else result.index_select(1, micro_batch.copies)

    def _predict(
        self,
        hidden: Tensor,
        micro_batch: MicroBatch,
        rotary: Tensor | None,
        packed: PackedSeqParams,
        *,
        chunk_tokens: int = 1024,
        fp32_head: bool = False,
        **_: Any,
    ) -> list[tuple[Tensor, Tensor]]:
        """What each layer for multi-token prediction says of its targets; see ``PredictionLoss.note``."""
        weight = self.head_weight()
        main_grad = getattr(weight, "main_grad", None)
        if self.config.mtp_detach_heads:
            # Of no input Megatron's recomputation would take a gradient.
            hidden, weight, main_grad = hidden.detach().requires_grad_(), weight.detach(), None
        result = []
        for layer, prediction in zip(self.mtp.layers, micro_batch.predictions, strict=True):
            hidden, *_rest = layer(
                input_ids=prediction.input_ids,
                position_ids=micro_batch.position_ids,
                hidden_states=hidden,
                attention_mask=None,
                rotary_pos_emb=rotary,
                packed_seq_params=packed,
                embedding=self._embed,
            )
            selected = self._read_by_head(hidden, prediction.head_positions)
            log_probs, _entropy, best, _divergence = token_scores(
                selected,
                weight,
                prediction.targets,
                vocab_size=self.architecture.vocab_size,
                group=self.pg_collection.tp,
                logits_scaling=self.architecture.logits_scaling,
                chunk_tokens=chunk_tokens,
                fp32_head=fp32_head,
                main_grad=main_grad,
            )
            result.append((log_probs, best))
        return result

    def _read_by_head(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [n, h] of ``positions``."""
        return head_hidden_states(hidden, positions, self.config.sequence_parallel, self.pg_collection.tp)

    def own_head_weight(self) -> Parameter | None:
        """The output layer's weight on the last stage, which ``_head`` multiplies by itself."""
        # An embedding on the same stage is the head's weight too; its module's forward and backward tell of both uses.
        return self.output_layer.weight if self.post_process else None

    def head_weight(self) -> Tensor:
        """[V / TP, h]: the output layer's weight, or the tied embedding."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


class CriticModel(PackedModel):
    """The same backbone with one output: the value of the state in which each response token is generated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "tied": False})
        if self.post_process:
            self.output_layer = None
            # Zero at the start: no value is better than a random one.
            self.value_head = torch.nn.Linear(
                self.config.hidden_size,
                1,
                bias=False,
                dtype=self.config.params_dtype,
                device=self.decoder.final_layernorm.weight.device,
            )
            torch.nn.init.zeros_(self.value_head.weight)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Every module as it is: GPTModel's own method would look for an output layer."""
        return MegatronModule.sharded_state_dict(self, *args, **kwargs)

    def _head(self, hidden: Tensor, micro_batch: MicroBatch, **_: Any) -> Tensor:
        """float32 [n]."""
        selected = head_hidden_states(
            hidden,
            micro_batch.head_positions,
            self.config.sequence_parallel,
            self.pg_collection.tp,
            replicated_head=True,
        )
        values = self.value_head(selected).squeeze(-1).float()
        return values if micro_batch.copies is None else values.index_select(0, micro_batch.copies)


def build_model_chunks(
    architecture: Architecture,
    config: TransformerConfig,
    acceleration: Acceleration,
    model_class: Callable[..., PackedModel] = PolicyModel,
    *,
    share_prefixes: bool = False,
) -> list[PackedModel]:
    """This rank's part of the model: one chunk, or one for each virtual pipeline stage.

    With ``share_prefixes`` it is for micro-batches of ``shared_packing.SharedPrefixPacker``.
    """
    recipe = config.fp8_recipe if config.fp8 else config.fp4_recipe if config.fp4 else None
    if recipe == "blockwise":
        choose_block_scales(acceleration.capability)
    stages: list[int | None] = [None]
    if config.virtual_pipeline_model_parallel_size is not None:
        stages = list(range(config.virtual_pipeline_model_parallel_size))
    chunks = []
    for stage in stages:
        ignore = stage is None
        chunk = model_class(
            architecture,
            config,
            acceleration,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=ignore, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=ignore, vp_stage=stage),
            vp_stage=stage,
            tied=architecture.tie_word_embeddings,
            share_prefixes=share_prefixes,
        )
        if recipe is not None:
            check_matrices(chunk, recipe)
        if acceleration.cuda:
            chunk.cuda(torch.cuda.current_device())
        chunk = chunk.to(config.params_dtype)
        for name, buffer in chunk.named_buffers():
            if name.endswith(MCORE_BUFFER_SUFFIXES):  # before weights are read: 16 bits would round them
                buffer.data = buffer.data.float()
        place_group_choice(chunk, architecture)
        chunks.append(chunk)
    return chunks
