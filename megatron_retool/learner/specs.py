"""What Megatron-Core builds a model of: its transformer config and the specs of its layers.

One builder for every machine.  With Transformer Engine the layers come from its spec; without it (CPU, or a GPU without
Transformer Engine) from Megatron's local spec with the modules of ``attention.py``.  What neither knows (latent
attention, states, sinks) is the learner's own in both, beside Transformer Engine with its linear layers.  Parameter
names differ between the two only in norms and experts, which the weight map knows.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from megatron.core.activations import squared_relu
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
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

from conversion.model.architecture import Architecture
from conversion.model.layout import ParallelLayout
from conversion.model.rotary import softmax_scale
from megatron_retool.config import LearnerConfig
from megatron_retool.learner.attention import LOCAL_LINEARS, PackedAttention, ParallelLinears, RMSNorm, SwiGLUMLP
from megatron_retool.learner.biased_experts import place_biased_experts
from megatron_retool.learner.gated_delta_net import GatedDeltaNet
from megatron_retool.learner.latent_attention import LatentAttention
from megatron_retool.learner.latent_experts import place_latent_experts
from megatron_retool.learner.mamba import Mamba2
from megatron_retool.learner.multi_token_prediction import PackedPredictor
from megatron_retool.learner.norms import place_norms
from megatron_retool.learner.performance import layer_options, pipeline_options
from megatron_retool.learner.positions import place_positions
from megatron_retool.learner.precision import Acceleration, transformer_options

ENGINE_LINEARS = ParallelLinears(TEColumnParallelLinear, TERowParallelLinear)
ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "quick_gelu": quick_gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu2": squared_relu,
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
        "gated_linear_unit": architecture.gated_mlp,
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
    some_without = len(architecture.expert_layers) < architecture.num_layers
    if architecture.is_moe and (some_without or architecture.shared_choices):
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


class LayerKind(NamedTuple):
    """What a layer has: experts rather than a dense MLP, attention rather than a state, and its halves at all."""

    experts: bool
    attention: bool = True
    mixer: bool = True
    mlp: bool = True


def kind_of(architecture: Architecture, layer: int) -> LayerKind:
    """What the layer with this global number has."""
    a = architecture
    return LayerKind(a.has_experts(layer), a.has_attention(layer), a.has_mixer(layer), a.has_mlp(layer))


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
    kinds = [kind_of(architecture, layer) for layer in range(first, first + count)]
    specs = {kind: _layer(architecture, config, acceleration, kind, share_prefixes) for kind in set(kinds)}
    norm = RMSNorm if acceleration.transformer_engine is None else TENorm
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in kinds], layer_norm=norm)


def predictor_spec(architecture: Architecture, config: TransformerConfig, acceleration: Acceleration) -> ModuleSpec:
    """The layers for multi-token prediction, which are like the model's own and all alike: in a mixture of experts each
    has some."""
    engine = acceleration.transformer_engine is not None
    norm = TENorm if engine else RMSNorm
    predictor = ModuleSpec(
        PackedPredictor,
        params={"hidden_first": architecture.declaration.predictor_hidden_first},
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm,
            hnorm=norm,
            eh_proj=TEColumnParallelLinear if engine else ColumnParallelLinear,
            mtp_model_layer=_layer(architecture, config, acceleration, LayerKind(architecture.is_moe)),
            layer_norm=norm,
        ),
    )
    layers = MultiTokenPredictionBlockSubmodules(layer_specs=[predictor] * architecture.predictors)
    return ModuleSpec(MultiTokenPredictionBlock, submodules=layers)


def place_residual(layer: Any, architecture: Architecture) -> None:
    """Have a layer multiply what attention and the MLP add to the residual stream, where the model does."""
    if architecture.residual_multiplier == 1.0:
        return

    def add_multiplied(training: bool, fused: bool) -> Callable[..., Tensor]:
        add = get_bias_dropout_add(training, fused)

        def added(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float) -> Tensor:
            output, bias = output_with_bias
            output = (output if bias is None else output + bias) * architecture.residual_multiplier
            result: Tensor = add((output, None), residual, probability)
            return result

        return added

    layer.self_attn_bda = layer.mlp_bda = add_multiplied


def leave_out(layer: Any, kind: LayerKind) -> None:
    """Take from a layer's submodules, TransformerLayerSubmodules, the half that a layer of this kind lacks."""
    if not kind.mixer:
        layer.input_layernorm = layer.self_attention = IdentityOp
        layer.self_attn_bda = IdentityFuncOp
    if not kind.mlp:
        layer.pre_mlp_layernorm = layer.mlp = IdentityOp
        layer.mlp_bda = IdentityFuncOp


def _layer(
    architecture: Architecture,
    config: TransformerConfig,
    acceleration: Acceleration,
    kind: LayerKind,
    share_prefixes: bool = False,
) -> ModuleSpec:
    """A layer of this kind for this machine."""
    engine = acceleration.transformer_engine is not None
    if engine:
        packs_attention = share_prefixes or acceleration.packs_attention(architecture, config.context_parallel_size)
        spec = _engine_layer(architecture, config, kind, packs_attention)
    else:
        spec = _local_layer(architecture, config, kind)
    place_norms(spec.submodules, architecture, engine)
    place_positions(spec.submodules, architecture)
    place_residual(spec.submodules, architecture)
    leave_out(spec.submodules, kind)
    return spec


def _engine_layer(
    architecture: Architecture, config: TransformerConfig, kind: LayerKind, packs_attention: bool
) -> ModuleSpec:
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if kind.experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm and kind.experts,
        qk_layernorm=config.qk_layernorm,
    )
    if packs_attention:
        spec.submodules.self_attention.submodules.core_attention = PackedAttention
    _place_mixer(spec, architecture, kind, ENGINE_LINEARS, TENorm)
    return spec


def _place_mixer(
    spec: ModuleSpec, architecture: Architecture, kind: LayerKind, linears: ParallelLinears, norm: type[Any]
) -> None:
    """Give a layer the attention, the state and the experts that Megatron-Core's specs do not know."""
    layer = spec.submodules
    if kind.mixer and not kind.attention:
        module = GatedDeltaNet if architecture.delta_net is not None else Mamba2
        layer.self_attention = ModuleSpec(module, params={"sizes": architecture.recurrent, "linears": linears})
    elif architecture.latent is not None:
        params = {
            **layer.self_attention.params,
            "sizes": architecture.latent,
            "rotated": architecture.rotary_dim,
            "indexer": architecture.indexer,
            "shared_choices": architecture.shared_choices,
            "linears": linears,
        }
        layer.self_attention = ModuleSpec(LatentAttention, params=params)
    if architecture.latent is not None or not kind.attention:
        # There is no linear_qkv that the norm could be a part of.
        layer.input_layernorm = norm
        layer.sharded_state_dict_keys_map.pop("input_layernorm.", None)
    if kind.experts and architecture.moe_latent_size is not None:
        place_latent_experts(layer, architecture.moe_latent_size)


def _local_layer(architecture: Architecture, config: TransformerConfig, kind: LayerKind) -> ModuleSpec:
    spec = copy.deepcopy(
        get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts if kind.experts else None,
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
    _place_mixer(spec, architecture, kind, LOCAL_LINEARS, RMSNorm)
    if kind.experts and architecture.linear_bias:
        place_biased_experts(spec.submodules)
    if architecture.gated_mlp and not kind.experts:
        spec.submodules.mlp = SwiGLUMLP
    return spec
