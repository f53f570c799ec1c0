"""SGLang plugin: an engine's layers in the arithmetic that the learner uses too (learner.match_engine=exact).

In place of SGLang's layers stand ``megatron_retool.exact.operators``, which the learner's modules call as well: a token
has the same log-prob, to the bit, in whatever batch, chunk or cached prefix the engine computes it.

On a GPU SGLang is told to take its layers' forward methods of plain torch, which these replace, and what it fuses
beside its layers is turned off.
"""

from __future__ import annotations

import functools
import json
import os
from typing import Any

import torch

from conversion.model.rotary import query_growth
from megatron_retool.exact import operators
from sglang_rollout.engine.exact_plugin import exact_head, exact_states

_LAYERS = "sglang.srt.layers."
_DEEPSEEK = "sglang.srt.models.deepseek_v2."
_DELTA_NETS = "sglang_cpu_engine.delta_nets."
_MAMBA = "sglang_cpu_engine.mamba."
VARIABLE = "MEGATRON_RETOOL_EXACT_MODEL"


_tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
"""Cosines and sines of the positions that were needed up to now, by kind of layer."""


@functools.cache
def _settings() -> dict[str, Any]:
    """What the model's architecture says of positions and attention; whoever starts the engine knows it.

    "frequencies" and "scales" (of scores) have an entry for layers that see the whole past, and one for layers with a
    window where these have others.
    """
    return dict(json.loads(os.environ[VARIABLE]))


@functools.cache
def exchanged() -> frozenset[str]:
    """The operators of ``model_operators.OPERATORS`` that this engine computes as the learner does."""
    return frozenset(_settings()["operators"])


def register() -> None:
    """Entry point of group ``sglang.srt.plugins``: exchange these operators."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    attention = "attention.torch_native_backend.TorchNativeAttnBackend."
    latent = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla.DeepseekMLAForwardMixin."
    rotary, gemma = "rotary_embedding.", "sglang.srt.models.gemma3_causal."
    hooks: dict[str, tuple[tuple[str, Any], ...]] = {
        "embedding": ((gemma + "Gemma3TextScaledWordEmbedding.forward", scaled_embedding),),
        "norm": (
            ("layernorm.RMSNorm.forward_native", rms_norm),
            ("layernorm.GemmaRMSNorm.forward_native", zero_centered_norm),
            ("layernorm.Gemma3RMSNorm.forward_native", zero_centered_norm),
            (_DELTA_NETS + "norm", operators.rms_norm),
        ),
        "rotary": (
            (rotary + "base.RotaryEmbedding.forward_native", rotary_embedding),
            (rotary + "mrope.MRotaryEmbedding.forward_native", rotary_embedding),
            (rotary + "rope_variant.DeepseekScalingRotaryEmbedding.forward_native", rotary_embedding),
            (gemma + "Gemma3RotaryEmbedding.forward", angles),
            (gemma + "apply_rotary_pos_emb", rotate),
            ("sglang.srt.models.ministral3._get_llama_4_attn_scale", growth_of_queries),
        ),
        "attention": (
            (attention + "_run_sdpa_forward_decode", decode_attention),
            (attention + "_run_sdpa_forward_extend", extend_attention),
            (_DELTA_NETS + "times_sigmoid", operators.multiply_by_sigmoid),
            ("sglang.srt.models.qwen3_next.Qwen3HybridAttentionDecoderLayer.self_attention", gated_attention),
        ),
        "delta_net": (
            (_DELTA_NETS + "convolved", exact_states.convolved),
            (_DELTA_NETS + "rates", operators.delta_net_rates),
            (_DELTA_NETS + "answers", operators.delta_rule),
            (_DELTA_NETS + "gated_norm", exact_states.gated_norm),
        ),
        "mamba": (
            (_DELTA_NETS + "convolved", exact_states.convolved),
            (_MAMBA + "walked", exact_states.state_space),
            ("attention.mamba.mixer2_rms_norm_gated.Mixer2RMSNormGated.forward_native", exact_states.norm_of_gated),
        ),
        "activation": (
            ("activation.SiluAndMul.forward_native", silu_and_mul),
            ("activation.GeluAndMul.forward_native", gelu_and_mul),
        ),
        "router": (("moe.topk.TopK.forward_native", choose_experts),),
        "experts": (
            (
                "quantization.unquant.UnquantizedFusedMoEMethod.forward_native",
                scaled_experts if torch.cuda.is_available() else experts,
            ),
            ("sglang.kernels.ops.elementwise.elementwise._launch_fused_gate_sigmoid_mul", gate_shared_expert),
        ),
        "head": (("logits_processor.LogitsProcessor._compute_lm_head", exact_head.logits),),
    }
    for operator in exchanged() & hooks.keys():
        for target, hook in hooks[operator]:
            whole = target if target.startswith(("sglang.", "sglang_cpu_engine.")) else _LAYERS + target
            HookRegistry.register(whole, hook, HookType.REPLACE)
    if "attention" in exchanged():
        for name in ("prepare", "core"):
            HookRegistry.register(f"{latent}forward_absorb_{name}", with_exact_products, HookType.AROUND)
        HookRegistry.register(
            _DEEPSEEK + "DeepseekV2AttentionMLA.dispatch_attn_forward_method", read_latents, HookType.AROUND
        )
    if "router" in exchanged():
        for gate in (_DEEPSEEK + "MoEGate", "sglang.srt.models.glm4_moe.Glm4MoeGate"):
            HookRegistry.register(f"{gate}.forward", router_logits, HookType.REPLACE)
    HookRegistry.register(_LAYERS + "quantization.unquant.UnquantizedLinearMethod.apply", linear, HookType.AROUND)
    HookRegistry.register(_LAYERS + "linear.LinearBase.__init__", note_operator, HookType.AROUND)
    if torch.cuda.is_available():
        for operator, pairs in exact_states.on_a_gpu().items():
            for target, hook in pairs if operator in exchanged() else ():
                HookRegistry.register(target, hook, HookType.REPLACE)
        HookRegistry.register("sglang.srt.models.utils.enable_fused_set_kv_buffer", is_not_fused, HookType.REPLACE)
        HookRegistry.register("sglang.srt.models.utils.apply_qk_norm", norm_heads, HookType.REPLACE)
        HookRegistry.register(_LAYERS + "dual_gemm.DualGemm._select_mode", has_no_mode, HookType.REPLACE)
        if "delta_net" in exchanged():
            qwen = "sglang.srt.models.qwen3_5.Qwen3_5"
            HookRegistry.register(qwen + "GatedDeltaNet.finalize_fused_in_proj", has_no_mode, HookType.REPLACE)
            HookRegistry.register(qwen + "AttentionDecoderLayer.self_attention", gated_attention, HookType.REPLACE)
        HookRegistry.register(
            "sglang.kernels.ops.gemm.fused_a_gemm.fused_a_gemm_weight_eligible", is_not_fused, HookType.REPLACE
        )
    HookRegistry.register("sglang.srt.models.transformers.TransformersBase.__init__", refuse_model, HookType.REPLACE)
    if "head" in exchanged():
        HookRegistry.register(_LAYERS + "sampler.Sampler.__init__", exact_head.take_log_softmax, HookType.AROUND)
        HookRegistry.register(_LAYERS + "sampler.Sampler.forward", exact_head.filter_exactly, HookType.AROUND)
        HookRegistry.register(
            _LAYERS + "logprob_processor.InputLogprobProcessor.__init__", exact_head.keep_log_softmax, HookType.AROUND
        )
        torch.log_softmax = torch.nn.functional.log_softmax = exact_head.log_softmax  # type: ignore[assignment]


def refuse_model(*arguments: Any, **kwargs: Any) -> None:
    """Raise ValueError for a model that SGLang has no class for, and would compute with transformers' layers."""
    raise ValueError(
        "learner.match_engine=exact exchanges SGLang's layers, and SGLang computes this model with transformers': set "
        "learner.match_engine=none"
    )


def is_not_fused(*_: Any) -> bool:
    """Rotation writes no keys and values into the cache, and latent attention's first products are linear layers."""
    return False


def has_no_mode(*_: Any) -> None:
    """An MLP's first products and its activation are not one kernel, nor a delta net's two products one matrix."""


def norm_heads(
    q: torch.Tensor, k: torch.Tensor, q_norm: Any, k_norm: Any, head_dim: int, *_: Any, **__: Any
) -> tuple[torch.Tensor, ...]:
    """Each head of queries and keys [tokens, heads * head_dim], by their norms."""
    return tuple(norm(x.reshape(-1, head_dim)).view(x.shape) for x, norm in ((q, q_norm), (k, k_norm)))


def rms_norm(norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None, *rest: Any, **kwargs: Any) -> Any:
    """Of x, or of x + residual as it is rounded, which is then returned too."""
    return _normed(norm, norm.weight, x, residual)


def zero_centered_norm(norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None, *_: Any, **__: Any) -> Any:
    """``rms_norm`` by one more than the weight."""
    return _normed(norm, 1.0 + norm.weight.float(), x, residual)


def _normed(norm: Any, weight: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
    if residual is not None:
        x = x + residual
    result = operators.rms_norm(x, weight, norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)
    return result if residual is None else (result, x)


def gated_attention(layer: Any, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any) -> Any:
    """Attention of Qwen3-Next and 3.5, where SGLang multiplies by a sigmoid that it has rounded."""
    query, key, value, gate = layer.forward_prepare_native(positions=positions, hidden_states=hidden_states)
    output = layer.attn(query, key, value, forward_batch)
    if layer.attn_output_gate:
        output = operators.multiply_by_sigmoid(output, gate.reshape(output.shape))
    return layer.o_proj(output)[0]


def scaled_embedding(embedding: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Of tokens, times a factor that is rounded to the model's dtype."""
    result = torch.nn.functional.embedding(input_ids, embedding.weight)
    return result * result.new_tensor(embedding.embed_scale)


def silu_and_mul(activation: Any, x: torch.Tensor) -> torch.Tensor:
    """``x`` [..., 2 * features]"""
    return operators.silu_and_multiply(x)


def gelu_and_mul(activation: Any, x: torch.Tensor) -> torch.Tensor:
    """``x`` [..., 2 * features]"""
    assert activation.approximate == "tanh", "the learner's GELU is the one with tanh"
    return operators.gelu_and_multiply(x)


def rotary_embedding(
    rotary: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *rest: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """``query`` and ``key`` [tokens, heads * head size], or [tokens, heads, head size].

    Where neighbours rotate together, they come out in halves, as the learner has them: scores add up in that order.
    Of the three positions that multimodal models have for a token, those of texts are all the same.
    """
    if positions.dim() == 2:
        positions = positions[0]
    cos, sin = angles(rotary, query, positions)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        heads = x.reshape(len(positions), -1, rotary.head_size)
        if not rotary.is_neox_style:
            turned, plain = heads.tensor_split([rotary.rotary_dim], -1)
            heads = torch.cat([turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), plain], -1)
        return operators.rotate(heads, cos, sin).view(x.shape)

    return rotated(query), rotated(key)


def angles(rotary: Any, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, float32 [tokens, rotated features / 2], at ``positions``."""
    positions = positions.reshape(-1)
    longest, kind = int(positions.max()) + 1, _kind(rotary)
    if kind not in _tables or len(_tables[kind][0]) < longest:
        table = operators.rotary_table(_settings()["frequencies"][kind], max(256, 2 * longest))
        _tables[kind] = (table[0].to(positions.device), table[1].to(positions.device))
    cos, sin = _tables[kind]
    return cos[positions], sin[positions]


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``query`` and ``key`` [tokens, heads, head size], by ``angles``."""
    return operators.rotate(query, cos, sin), operators.rotate(key, cos, sin)


def growth_of_queries(positions: torch.Tensor, share: float, period: int) -> torch.Tensor:
    """float32 [tokens, 1]: what queries are multiplied by."""
    return query_growth(share, period, positions).unsqueeze(-1)


def _kind(rotary: Any) -> int:
    """The number of SGLang's frequencies among those of the settings."""
    if not hasattr(rotary, "exact_kind"):
        if hasattr(rotary, "cos_sin_cache"):
            cos, sin = rotary.cos_sin_cache[1].float().chunk(2)
            own = torch.atan2(sin, cos).cpu()
        else:
            own = rotary.inv_freq.cpu()
        far = [float((own - torch.tensor(each)).abs().max()) for each in _settings()["frequencies"]]
        rotary.exact_kind = far.index(min(far))
    return int(rotary.exact_kind)


def linear(original: Any, method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A layer's product with its weight, and its bias."""
    if getattr(layer, "exact_operator", "mlp_up") not in exchanged():
        return original(method, layer, x, bias)
    return operators.linear(x, layer.weight, bias)


_OPERATORS_OF_LAYERS = {
    "QKVParallelLinear": "qkv",
    "ReplicatedLinear": "router",
    "RowParallelLinear": "mlp_down",
    "o_proj": "attention_output",
    "out_proj": "attention_output",
    "in_proj": "qkv",
    "in_proj_qkvz": "qkv",
    "in_proj_ba": "qkv",
    "q_proj": "qkv",
    "q_b_proj": "qkv",
    "kv_a_proj_with_mqa": "qkv",
    "fused_qkv_a_proj_with_mqa": "qkv",
}
"""By a layer's class, and by its name where that says more; any other is "mlp_up"."""


def note_operator(
    original: Any,
    layer: Any,
    input_size: int,
    output_size: int,
    skip_bias_add: bool = False,
    params_dtype: torch.dtype | None = None,
    quant_config: Any = None,
    prefix: str = "",
) -> None:
    """Remember what a new linear layer is for. Its class may leave out its parent's method, but comes by this one."""
    original(layer, input_size, output_size, skip_bias_add, params_dtype, quant_config, prefix)
    known = (_OPERATORS_OF_LAYERS.get(name) for name in (prefix.rpartition(".")[2], type(layer).__name__))
    layer.exact_operator = next(filter(None, known), "mlp_up")


def read_latents(original: Any, attention: Any, *arguments: Any) -> Any:
    """Have latent attention read the latents in prefills too, where it would make each head's keys and values."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    original(attention, *arguments)
    return AttnForwardMethod.MLA


def with_exact_products(original: Any, attention: Any, *arguments: Any, **kwargs: Any) -> Any:
    """Latent attention's products of heads with matrices of their own, for which SGLang calls torch.bmm."""
    ordinary, torch.bmm = torch.bmm, products_of_heads  # type: ignore[assignment]
    try:
        return original(attention, *arguments, **kwargs)
    finally:
        torch.bmm = ordinary


def products_of_heads(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """[heads, rows, K] times [heads, K, N]."""
    result = operators.linear_of_heads(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
    return result if out is None else out.copy_(result)


def router_logits(gate: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """[rows, experts] in the model's dtype, as other families' routers give them; for sigmoids in float32."""
    sigmoids = getattr(gate, "e_score_correction_bias", None) is not None
    return operators.linear(hidden_states, gate.weight, dtype=torch.float32 if sigmoids else None)


def choose_experts(chooser: Any, hidden_states: torch.Tensor, router_logits: torch.Tensor, **_: Any) -> Any:
    """The experts of each token and their gates."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput, capture_routed_experts_if_allowed

    settings = chooser.topk_config
    # With a bias SGLang takes sigmoids, whatever its setting says.
    kind = settings.scoring_func if settings.correction_bias is None else "sigmoid"
    router_logits = router_logits.float()
    scores = operators.sigmoid(router_logits) if kind == "sigmoid" else router_logits
    ranked = scores if settings.correction_bias is None else scores + settings.correction_bias
    groups = (settings.num_expert_group, settings.topk_group) if settings.use_grouped_topk else None
    chosen = operators.top_experts(
        ranked, settings.top_k, groups, of_a_group=1 if settings.correction_bias is None else 2
    )
    gates = operators.expert_gates(scores, chosen, settings.renormalize, kind).gather(1, chosen)
    capture_routed_experts_if_allowed(settings, chooser.layer_id, chosen.int())
    return StandardTopKOutput(gates, chosen.int(), router_logits)


def experts(method: Any, layer: Any, dispatch_output: Any) -> Any:
    """The sum of each token's experts, in the order of their numbers."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x = dispatch_output.hidden_states
    gates, chosen, _ = dispatch_output.topk_output
    out = torch.zeros_like(x)
    for number in chosen.unique().tolist():
        rows, places = (chosen == number).nonzero(as_tuple=True)
        activated = operators.silu_and_multiply(operators.linear(x[rows], layer.w13_weight[number]))
        activated = (activated * gates[rows, places].unsqueeze(-1)).to(x.dtype)
        out = out.index_add(0, rows, operators.linear(activated, layer.w2_weight[number]))
    return StandardCombineInput(hidden_states=out)


def scaled_experts(method: Any, layer: Any, dispatch_output: Any) -> Any:
    """``experts`` times their factor, as SGLang's kernels for a GPU return them; on a CPU its models multiply."""
    result = experts(method, layer, dispatch_output)
    factor = layer.moe_runner_config.routed_scaling_factor
    if factor is not None:
        result.hidden_states.mul_(factor)
    return result


def gate_shared_expert(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    output: torch.Tensor,
    *,
    do_add: bool,
) -> None:
    """sigmoid(hidden_states . gate_weight) * shared_output into ``output`` [tokens, hidden size], or added to it."""
    gate = operators.sigmoid(operators.linear(hidden_states, gate_weight.unsqueeze(0), dtype=torch.float32))
    output.copy_(operators.gated_sum(output if do_add else torch.zeros_like(output), shared_output, gate))


def decode_attention(
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *rest: Any,
    sliding_window_size: int | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """One new token of each request against its cache. ``query`` and ``output`` [requests, heads, head size]."""
    starts = req_pool_indices.long() * req_to_token.size(1)
    return output.copy_(_attended(query, k_cache, v_cache, req_to_token, starts, seq_lens, sliding_window_size))


def extend_attention(
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    *rest: Any,
    sliding_window_size: int | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The new tokens of each request (a prompt, or a turn after a cached prefix) against its cache.

    ``query`` and ``output`` [new tokens of all requests, heads, head size].
    """
    extend_lens = extend_lens.long()
    starts = (req_pool_indices.long() * req_to_token.size(1)).repeat_interleave(extend_lens)
    first = (extend_lens.cumsum(0) - extend_lens).repeat_interleave(extend_lens)
    counts = (
        prefix_lens.long().repeat_interleave(extend_lens) + torch.arange(len(starts), device=first.device) - first + 1
    )
    return output.copy_(_attended(query, k_cache, v_cache, req_to_token, starts, counts, sliding_window_size))


def _attended(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    earlier_keys: int | None,
) -> torch.Tensor:
    """``earlier_keys``: how many before itself a query sees; None: all."""
    scale = _settings()["scales"][0]
    if earlier_keys is not None:
        scale = _settings()["scales"][-1]
        starts, counts = operators.last_keys(starts, counts, earlier_keys + 1)
    # Of latents the values are the keys' first features, and a view of them: an array would be a copy of the cache.
    values = k_cache if v_cache.data_ptr() == k_cache.data_ptr() else v_cache
    return operators.attention(query, k_cache, values, slots, starts, counts, scale, width=v_cache.size(-1))
