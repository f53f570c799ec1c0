"""From a Hugging Face config to Megatron-Core models: the policy, its reference copy, the critic.

One builder for every machine.  With Transformer Engine the layers come from its spec; without it (CPU, or a GPU without
Transformer Engine) from Megatron's local spec with the modules of ``attention.py``.  Parameter names differ between the
two only in the norms, which the weight map knows.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel import layers as tensor_parallel_layers
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.nn import Parameter

from conversion.model.architecture import Architecture
from conversion.model.layout import ParallelLayout, padded_vocab_size
from conversion.model.rotary import inverse_frequencies, softmax_scale
from conversion.model.rules import MCORE_BUFFER_SUFFIXES
from megatron_retool.algorithms.settings import SamplingSettings
from megatron_retool.config import LearnerConfig
from megatron_retool.errors import InputError
from megatron_retool.learner import parallel
from megatron_retool.learner.attention import (
    LocalPackedSequences,
    PackedAttention,
    RMSNorm,
    RotaryTable,
    SwiGLUMLP,
)
from megatron_retool.learner.biased_experts import place_biased_experts
from megatron_retool.learner.expert_groups import place_group_choice
from megatron_retool.learner.gated_delta_net import GatedDeltaNet
from megatron_retool.learner.latent_attention import LatentAttention
from megatron_retool.learner.log_probs import head_hidden_states, token_scores
from megatron_retool.learner.multi_token_prediction import PackedPredictor, PredictionLoss
from megatron_retool.learner.norms import place_norms
from megatron_retool.learner.packing import MicroBatch
from megatron_retool.learner.performance import layer_options, pipeline_options
from megatron_retool.learner.positions import place_positions, query_growth
from megatron_retool.learner.precision import Acceleration, transformer_options
from megatron_retool.learner.routing_replay import LayerReplay, RoutingPass
from megatron_retool.learner.transformer_engine import choose_block_scales

if TYPE_CHECKING:
    from megatron_retool.learner.teacher_loss import TeacherLoss

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "quick_gelu": quick_gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
}


def build_transformer_config(
    architecture: Architecture,
    learner: LearnerConfig,
    layout: ParallelLayout,
    acceleration: Acceleration,
    *,
    deterministic: bool = False,
) -> TransformerConfig:
    """Megatron's description of the model in this layout and precision."""
    options: dict[str, Any] = {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_query_groups": architecture.num_query_groups,
        "kv_channels": architecture.head_dim,
        "ffn_hidden_size": architecture.ffn_hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": architecture.rms_norm_eps,
        "qk_layernorm": architecture.qk_norm,
        "gated_linear_unit": True,
        "activation_func": ACTIVATIONS[architecture.activation],
        "layernorm_zero_centered_gamma": architecture.zero_centered_norm,
        "activation_func_clamp_value": architecture.activation_limit,
        "glu_linear_offset": architecture.activation_offset,
        "add_bias_linear": architecture.linear_bias,
        "add_qkv_bias": architecture.attention_bias,
        "attention_output_gate": architecture.attention_gate,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": architecture.initializer_range,
        "use_cpu_initialization": not acceleration.cuda,
        # Also where weights are read next: without it Megatron leaves out the marks that tell which parameters tensor
        # parallelism splits, and the gradient norm counts the wrong ones.
        "perform_initialization": True,
        "tensor_model_parallel_size": layout.tensor,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor if architecture.is_moe else None,
        # Packed micro-batches differ in length, so stages tell each other the shape first.
        "variable_seq_lengths": True,
        "cuda_graph_scope": [],
        # Losses arrive already normalised over the global mini-batch: gradients are summed, never averaged.
        "calculate_per_token_loss": True,
        "softmax_scale": softmax_scale(architecture),
        "softmax_type": "learnable" if architecture.attention_sinks else "vanilla",
        # On gloo, sends may still be reading an output that Megatron would free: silently wrong numbers.
        "deallocate_pipeline_outputs": acceleration.cuda,
        "deterministic_mode": deterministic,
    }
    if architecture.sliding_window is not None:
        options["window_size"] = (architecture.sliding_window - 1, 0)
        options["window_attn_skip_freq"] = [int(window is not None) for window in architecture.windows]
    if architecture.unrotated_layers:
        options["no_rope_freq"] = [int(n in architecture.unrotated_layers) for n in range(architecture.num_layers)]
    if architecture.is_moe:
        options |= {
            "num_moe_experts": architecture.num_experts,
            "moe_router_topk": architecture.num_experts_per_tok,
            "moe_ffn_hidden_size": architecture.moe_ffn_hidden_size,
            # Softmax over the chosen experts' logits equals the softmax over all, divided by the chosen ones' sum.
            "moe_router_pre_softmax": architecture.router_scores == "sigmoid"
            or not architecture.norm_topk_prob
            or architecture.num_experts_per_tok == 1,
            "moe_router_score_function": architecture.router_scores,
            "moe_router_enable_expert_bias": architecture.router_bias,
            "moe_router_bias_update_rate": learner.moe_router_bias_update_rate,
            "moe_router_topk_scaling_factor": architecture.routed_scaling_factor,
            "moe_shared_expert_intermediate_size": architecture.shared_expert_ffn_hidden_size,
            "moe_shared_expert_gate": architecture.shared_expert_gate,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
            # Adapters are on each expert's own layers.
            "moe_grouped_gemm": acceleration.transformer_engine is not None
            and not (learner.lora.rank and "experts" in learner.lora.targets),
        }
    if architecture.router_groups is not None:
        options["moe_router_num_groups"], options["moe_router_group_topk"] = architecture.router_groups
    if architecture.is_moe and (architecture.dense_layers or architecture.shared_choices):
        # A list also gives every layer's tensors keys of their own in checkpoints, see weight_map.checkpoint_place.
        options["moe_layer_freq"] = [int(architecture.has_experts(layer)) for layer in range(architecture.num_layers)]
    if architecture.linear_layers:
        # Only for those keys: without a variant of attention Megatron reads it nowhere else.
        options["linear_attention_freq"] = [
            int(n in architecture.linear_layers) for n in range(architecture.num_layers)
        ]
    if architecture.predictors:
        options |= {"mtp_num_layers": architecture.predictors, "mtp_detach_heads": learner.mtp.detach_heads}
    options |= transformer_options(learner, acceleration)
    if architecture.activation != "silu":
        options["bias_activation_fusion"] = False  # which Megatron has of silu and of the exact gelu
    options |= layer_options(learner, acceleration) | pipeline_options(learner, acceleration)
    return TransformerConfig(**options)


def block_spec(
    architecture: Architecture,
    config: TransformerConfig,
    acceleration: Acceleration,
    vp_stage: int | None,
    share_prefixes: bool = False,
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage for this machine."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    kinds = [
        (architecture.has_experts(layer), architecture.has_attention(layer)) for layer in range(first, first + count)
    ]
    engine = acceleration.transformer_engine is not None
    specs = {
        (experts, attention): _engine_layer(config, experts, share_prefixes)
        if engine
        else _local_layer(architecture, config, experts, attention)
        for experts, attention in set(kinds)
    }
    for spec in specs.values():
        place_norms(spec.submodules, architecture, engine)
        place_positions(spec.submodules, architecture)
    return TransformerBlockSubmodules(
        layer_specs=[specs[kind] for kind in kinds], layer_norm=TENorm if engine else RMSNorm
    )


def predictor_spec(architecture: Architecture, config: TransformerConfig, acceleration: Acceleration) -> ModuleSpec:
    """The layers for multi-token prediction, which are like the model's own and all alike: in a mixture of experts each
    has some."""
    engine = acceleration.transformer_engine is not None
    experts = architecture.is_moe
    layer = _engine_layer(config, experts, False) if engine else _local_layer(architecture, config, experts, True)
    place_norms(layer.submodules, architecture, engine)
    place_positions(layer.submodules, architecture)
    norm = TENorm if engine else RMSNorm
    predictor = ModuleSpec(
        PackedPredictor,
        params={"hidden_first": architecture.declaration.predictor_hidden_first},
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm,
            hnorm=norm,
            eh_proj=TEColumnParallelLinear if engine else ColumnParallelLinear,
            mtp_model_layer=layer,
            layer_norm=norm,
        ),
    )
    layers = MultiTokenPredictionBlockSubmodules(layer_specs=[predictor] * architecture.predictors)
    return ModuleSpec(MultiTokenPredictionBlock, submodules=layers)


def _engine_layer(config: TransformerConfig, experts: bool, share_prefixes: bool) -> ModuleSpec:
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm and experts,
        qk_layernorm=config.qk_layernorm,
    )
    if share_prefixes:  # which Transformer Engine's attention knows nothing of
        spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return spec


def _local_layer(
    architecture: Architecture, config: TransformerConfig, experts: bool, has_attention: bool
) -> ModuleSpec:
    spec = copy.deepcopy(
        get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts if experts else None,
            moe_grouped_gemm=False,
            qk_layernorm=config.qk_layernorm,
            normalization="RMSNorm",
        )
    )
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if architecture.latent is not None:
        params = {**spec.submodules.self_attention.params, "sizes": architecture.latent}
        params["rotated"] = architecture.rotary_dim
        params |= {"indexer": architecture.indexer, "shared_choices": architecture.shared_choices}
        spec.submodules.self_attention = ModuleSpec(LatentAttention, params=params)
    if not has_attention:
        spec.submodules.self_attention = ModuleSpec(GatedDeltaNet, params={"sizes": architecture.delta_net})
    if architecture.latent is not None or not has_attention:
        # There is no linear_qkv that the norm could be a part of.
        del spec.submodules.sharded_state_dict_keys_map["input_layernorm."]
    if experts and architecture.linear_bias:
        place_biased_experts(spec.submodules)
    if not experts:
        spec.submodules.mlp = SwiGLUMLP
    return spec


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
        self.uses_transformer_engine = uses_engine
        frequencies = inverse_frequencies(architecture)
        self.rotary_pos_emb.inv_freq = frequencies.to(self.rotary_pos_emb.inv_freq.device)
        self._rotary_table, self._local_rotary_table = RotaryTable(frequencies), None
        if architecture.local_rope_theta is not None:
            frequencies = inverse_frequencies(architecture, local=True)
            self._local_rotary_table = RotaryTable(frequencies)
            self._local_rotary_pos_emb = copy.copy(self.rotary_pos_emb)
            self._local_rotary_pos_emb.inv_freq = frequencies.to(self.rotary_pos_emb.inv_freq.device)
        if uses_engine and config.context_parallel_size > 1:
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
        if self.architecture.embedding_scale != 1.0:
            # transformers rounds the scale to the weights' dtype, too.
            embedded = embedded * embedded.new_tensor(self.architecture.embedding_scale)
        return embedded

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
        if self.uses_transformer_engine and micro_batch.tree is None:
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

        With ``logits``: this TP rank's float32 [n, V / TP] instead; with ``hidden_states``: what the head reads,
        [n, h]. ``teacher``, where it is given, gets the divergence of the policy from it.
        """
        group = self.pg_collection.tp
        selected = head_hidden_states(hidden, micro_batch.head_positions, self.config.sequence_parallel, group)
        if hidden_states:
            return selected
        if self.before_head is not None:
            self.before_head()
        weight = self.head_weight()
        if logits:
            return torch.mm(selected, weight.t()).float()
        # Only the parameter itself has a main gradient, and only under Megatron's DDP.
        main_grad = getattr(weight, "main_grad", None) if torch.is_grad_enabled() else None
        log_probs, entropy, _best, divergence = token_scores(
            selected,
            weight,
            micro_batch.targets,
            vocab_size=self.architecture.vocab_size,
            group=group,
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
        found = torch.stack([*columns, entropy])
        return found if micro_batch.copies is None else found.index_select(1, micro_batch.copies)

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
        group, weight = self.pg_collection.tp, self.head_weight()
        main_grad = getattr(weight, "main_grad", None)
        if self.config.mtp_detach_heads:
            # Of no input Megatron's recomputation would take a gradient.
            hidden, weight, main_grad = hidden.detach().requires_grad_(), weight.detach(), None
        found = []
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
            selected = head_hidden_states(hidden, prediction.head_positions, self.config.sequence_parallel, group)
            log_probs, _entropy, best, _divergence = token_scores(
                selected,
                weight,
                prediction.targets,
                vocab_size=self.architecture.vocab_size,
                group=group,
                chunk_tokens=chunk_tokens,
                fp32_head=fp32_head,
                main_grad=main_grad,
            )
            found.append((log_probs, best))
        return found

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
    if config.fp8_recipe == "blockwise":
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
        if acceleration.cuda:
            chunk.cuda(torch.cuda.current_device())
        chunk = chunk.to(config.params_dtype)
        for name, buffer in chunk.named_buffers():
            if name.endswith(MCORE_BUFFER_SUFFIXES):  # before weights are read: 16 bits would round them
                buffer.data = buffer.data.float()
        place_group_choice(chunk, architecture)
        chunks.append(chunk)
    return chunks
