"""What a training step keeps on a GPU until its backward pass: activations of the layers, logits of the head.

The sums of the tensors that autograd keeps, layout by layout. Notation: as in ``memory``; t = tokens of a packed
micro-batch on one context-parallel rank = max_tokens_per_micro_batch / CP.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from conversion.model.architecture import Architecture
from conversion.model.attention_config import MambaSizes
from conversion.model.layout import ParallelLayout, padded_vocab_size
from megatron_retool.config import LearnerConfig, RecomputeConfig

PARAMETER_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
DELTA_CHUNK = 64
"""Tokens of a chunk of ``learner.delta_rule`` and ``learner.state_space``."""


def layer_activations(
    architecture: Architecture,
    layout: ParallelLayout,
    tokens: float,
    width: int = 2,
    fused: bool = True,
    dense: bool = False,
    linear: bool = False,
    mixer: bool = True,
    mlp: bool = True,
) -> dict[str, float]:
    """Bytes that one layer keeps for its backward pass, tensor by tensor, without recomputation.

    After Korthikanti et al. (arXiv:2205.05198), section 4, with flash attention (no score matrix), grouped queries,
    RMSNorm and SwiGLU.  q and k v are the sizes of all query heads and of all key (= value) heads, s = TP with sequence
    parallelism and 1 without, f the SwiGLU width, e = chosen experts per token, w = ``width``, n = norms of the layer:
    2 before attention and MLP, 2 after them, or both.

                     Transformer Engine (fused)               local layer spec           what it is
        norms        (n + 2) t h w / s                        t h (8 n + 2 w) / s        inputs (local: in fp32, raw and
                                                                                         normalised) and linear layers'
        attention    t (3 q + 3 kv) w / TP + 4 t heads / TP   the same                   QKV output, rotated q and k,
                                                                                         output; log-sum-exp
        query norm   t (q + kv) w / TP                        8 t (q + kv) / TP          of q and k (Qwen3); over all
                                                                                         heads together local in both
        latents      t c (8 + w) / s                          the same                   c features of latents and of
                                                                                         the shared key (DeepSeek-V3)
        chosen keys  t CP t w                                 the same                   mask of the pairs of a text as
                                                                                         long as the micro-batch
                                                                                         (DeepSeek-V3.2)
        state        see ``_delta_net``, ``_mamba``           the same                   in attention's place
                                                                                         (Qwen3-Next)
        SwiGLU       3 t f w / TP                             4 t f w / TP               gate, up, (silu,) product
        no gate      2 t f w / TP                             the same                   ReLU of the product, its square
        experts      e t (2 h ETP + 3 f) w / s                e t (h ETP + 6 f) w / s    inputs, (outputs,) gate, up,
                                                                                         (silu, their product,) what is
                                                                                         multiplied by probabilities
                                                              e t (h ETP + 3 f) w / s    without a gate
        router       8 t E / s                                the same                   fp32 logits, probabilities

    Args:
        tokens: t, of one context-parallel rank.
        width: bytes of an activation.
        fused: Transformer Engine's layer spec; False: Megatron's local one.
        dense: of a mixture of experts, one of its dense layers.
        linear: one of ``Architecture.linear_layers``.
        mixer: False: one of ``Architecture.layers_without_mixer``.
        mlp: False: one of ``Architecture.layers_without_mlp``.
    """
    a, tp = architecture, layout.tensor
    split = tp if layout.sequence_parallel else 1
    query, key_value = a.query_size, a.key_value_size if a.latent is None else a.query_size
    norms = a.pre_norm + a.post_norm
    parts = {"norms": (mixer + mlp) * tokens * a.hidden_size * (norms * (width if fused else 8) + width) / split}
    if mixer:
        parts["attention"] = 3 * tokens * (query + key_value) * width / tp + 4 * tokens * a.num_attention_heads / tp
    if a.latent is not None:
        parts["latents"] = tokens * (a.query_rank + a.cached_size) * (8 + width) / split
    if a.indexer is not None and tokens * layout.context > a.indexer.index_topk:
        parts["chosen keys"] = tokens * layout.context * tokens * width
    if linear:
        state = _mamba(a.mamba, width) if a.mamba is not None else _delta_net(a, width)
        parts["attention"] = tokens * state / tp
    elif a.qk_norm:
        parts["query_norm"] = tokens * (query + key_value) * (width if fused and not a.qk_norm_full_width else 8) / tp
    if not mlp:
        return parts
    widths = 2 if not a.gated_mlp else 3 if fused and a.activation == "silu" else 4
    if a.is_moe and not dense:
        assert a.num_experts is not None and a.num_experts_per_tok is not None and a.moe_ffn_hidden_size is not None
        # Balanced routing leaves each rank e t / s tokens; ETP ranks see those of the whole group, each a part of f.
        routed = a.num_experts_per_tok * tokens / split
        rows, columns = (2, 3) if fused else (1, 6 if a.gated_mlp else 3)
        own = rows * a.expert_hidden_size * layout.expert_tensor + columns * a.moe_ffn_hidden_size
        projected = tokens * (a.moe_latent_size or 0) / split  # from latents back
        parts["experts"] = (routed * own + projected) * width
        # Two float32 scores, and the int64 places of the sort that permutes the tokens.
        parts["router"] = 16 * tokens * a.num_experts / split
        if a.shared_expert_ffn_hidden_size is not None:
            parts["shared expert"] = widths * tokens * a.shared_expert_ffn_hidden_size * width / tp
    else:
        parts["mlp"] = widths * tokens * a.ffn_hidden_size * width / tp
    return parts


def _delta_net(architecture: Architecture, width: int) -> float:
    """Bytes of a token that a gated delta net keeps on all tensor-parallel ranks.

    Of q, c, v features of queries, of all that is convolved and of values, H value heads and K key heads, chunks of C
    tokens: in the model's dtype 3 c + v (around the convolution, and the output projection's input); in float32
    4 q + 4 H d_k + 4 v (queries, keys and values as they are, of unit length, decayed; the system's solution; what
    changes), 4 v (norm and gate), C (4 H + 2 K) (matrices of token pairs in a chunk), H d_k d_v / C (states).
    """
    sizes = architecture.delta_net
    assert sizes is not None
    heads, keys = sizes.value_heads, sizes.value_heads * sizes.key_dim
    single = 4 * sizes.query_size + 4 * keys + 8 * sizes.value_size
    pairs = DELTA_CHUNK * (4 * heads + 2 * sizes.key_heads)
    states = keys * sizes.value_dim / DELTA_CHUNK
    own = width * (3 * sizes.convolved_size + sizes.value_size)
    return own + 4 * (single + pairs + states)


def _mamba(sizes: MambaSizes, width: int) -> float:
    """Bytes of a token that Mamba-2 keeps on all tensor-parallel ranks.

    Of v features of values, g of what states are written by and of what they are read by, c of all that is convolved,
    H heads with N x P numbers of state, G groups, chunks of C tokens: in the model's dtype 3 c + v (around the
    convolution, and the output projection's input); in float32 9 v (values as they are and by their steps, what states
    say, norm and gate), 3 g, C (2 H + G) (matrices of token pairs in a chunk), 2 H N (each head's copies of what its
    state is written and read by), v N / C (states).
    """
    single = 9 * sizes.value_size + 3 * sizes.group_size + 2 * sizes.heads * sizes.state_dim
    pairs = DELTA_CHUNK * (2 * sizes.heads + sizes.groups)
    own = width * (3 * sizes.convolved_size + sizes.value_size)
    return own + 4 * (single + pairs + sizes.state_size / DELTA_CHUNK)


def _kept_by_layer(
    architecture: Architecture,
    layout: ParallelLayout,
    recompute: RecomputeConfig,
    tokens: float,
    width: int,
    fused: bool,
    dense: bool,
    linear: bool,
    mixer: bool,
    mlp: bool,
) -> float:
    """Bytes a layer keeps under selective recomputation of the named modules."""
    parts = layer_activations(architecture, layout, tokens, width, fused, dense, linear, mixer, mlp)
    split = layout.tensor if layout.sequence_parallel else 1
    if recompute.granularity == "selective":
        for module in recompute.modules:
            if module == "layernorm" and architecture.pre_norm:
                parts["norms"] -= (mixer + mlp) * tokens * architecture.hidden_size * width / split
            elif module == "mlp":
                parts.pop("mlp", None)
            elif module == "moe":
                parts.pop("experts", None)
                parts.pop("router", None)
            elif module == "moe_act" and "experts" in parts:
                assert architecture.num_experts_per_tok is not None and architecture.moe_ffn_hidden_size is not None
                parts["experts"] -= (
                    architecture.num_experts_per_tok * tokens / split * architecture.moe_ffn_hidden_size * width
                )
        # core_attn: flash attention keeps no score matrix, so that there is nothing to save.
    return sum(parts.values())


def mask_bytes(
    architecture: Architecture, layout: ParallelLayout, tokens: float, width: int, fused: bool = True
) -> float:
    """What all layers of a micro-batch share where attention is the learner's own (``learner.attention``): a number for
    each pair of a text as long as the micro-batch, t CP t w.

    With context parallelism there is one mask for each width of window, no window included; without, one for layers
    with a window that is shorter than such a text.
    """
    if fused and not architecture.needs_packed_attention(layout.context):
        return 0.0
    longest = tokens * layout.context
    windows = {window for number, window in enumerate(architecture.windows) if architecture.has_attention(number)}
    if layout.context == 1:
        windows = {window for window in windows if window is not None and window < longest}
    return len(windows) * tokens * longest * width


def activation_bytes(
    architecture: Architecture,
    layout: ParallelLayout,
    learner: LearnerConfig,
    stage: int,
    micro_batches: int,
    fused: bool = True,
) -> float:
    """Peak activations of a rank of pipeline stage ``stage``, logits aside.

    With A = bytes a layer keeps (``layer_activations``; the mean where layers differ), I = bytes of a layer's input
    (t h w / s) and l = layers of the stage, one micro-batch in flight keeps

        no recomputation      l A
        full, uniform, n      ceil(l / n) I, and n A while a block is recomputed
        full, block, n        n I + (l - n) A, and A while a layer is recomputed
        selective             l A less the recomputed modules' part
        n layers on the host  (l - n) A, with cpu_offloading_num_layers

    Masks are kept too (``mask_bytes``).  1F1B keeps min(PP - stage, micro-batches) micro-batches in flight;
    interleaving multiplies by 1 + (PP - 1) / (PP VPP) (arXiv:2205.05198, section 5.2).  The first stage also keeps the
    embedding's output.  The last keeps A + 5 I of each layer for multi-token prediction: what its three norms and its
    projection read; with full recomputation 2 I, and as much as that while it computes one again.
    """
    width = PARAMETER_BYTES[learner.dtype]
    tokens = learner.max_tokens_per_micro_batch / layout.context
    recompute = learner.recompute
    layers = architecture.num_layers // layout.pipeline
    chunks = (layout.layers(architecture, stage, chunk) for chunk in range(layout.virtual_pipeline or 1))
    # How many of the stage's layers are of each kind: dense, linear, mixer, mlp.
    kinds = Counter(
        (
            number in architecture.dense_layers,
            number in architecture.linear_layers,
            architecture.has_mixer(number),
            architecture.has_mlp(number),
        )
        for chunk in chunks
        for number in chunk
    )

    def mean(of_kind: Callable[..., float]) -> float:
        return sum(of_kind(*kind) * count for kind, count in kinds.items()) / layers

    whole = mean(lambda *kind: sum(layer_activations(architecture, layout, tokens, width, fused, *kind).values()))
    layer_input = tokens * architecture.hidden_size * width / (layout.tensor if layout.sequence_parallel else 1)
    working = 0.0
    if recompute.granularity == "full":
        count = recompute.num_layers or 1
        if (recompute.method or "uniform") == "uniform":
            kept, working = math.ceil(layers / count) * layer_input, count * whole
        else:
            again = block_layers(architecture, learner)
            kept, working = again * layer_input + (layers - again) * whole, whole
    else:
        kept = (layers - learner.cpu_offloading_num_layers) * mean(
            lambda *kind: _kept_by_layer(architecture, layout, recompute, tokens, width, fused, *kind)
        )
    in_flight = float(min(layout.pipeline - stage, micro_batches))
    if layout.virtual_pipeline:
        interleaved = layout.pipeline * (1 + (layout.pipeline - 1) / (layout.pipeline * layout.virtual_pipeline))
        in_flight = min(interleaved, micro_batches) if stage == 0 else min(interleaved - stage, micro_batches)
    embedded = layer_input * in_flight if stage == 0 else 0.0
    if architecture.predictors and stage == layout.pipeline - 1:
        own = whole + 5 * layer_input
        if recompute.granularity == "full" and recompute.method != "block":
            kept, working = kept + architecture.predictors * 2 * layer_input, max(working, own)
        else:
            kept += architecture.predictors * own
    masks = mask_bytes(architecture, layout, tokens, width, fused) * in_flight
    return kept * in_flight + working + embedded + masks


def block_layers(architecture: Architecture, learner: LearnerConfig) -> int:
    """Layers of a pipeline stage that recompute.method=block computes again: so many of each of its model chunks."""
    layers = architecture.num_layers // learner.pipeline_model_parallel_size
    return min(layers, (learner.recompute.num_layers or 1) * (learner.virtual_pipeline_model_parallel_size or 1))


def logit_bytes(architecture: Architecture, layout: ParallelLayout, learner: LearnerConfig) -> float:
    """Peak of the chunked head on the last stage (learner/log_probs.py).

    c = min(log_prob_chunk_tokens, t) rows of V / TP logits exist at one time: in the forward pass fp32 logits and
    probabilities, in the backward pass also their 16-bit gradient, 10 bytes an element (12 with an fp32 head, which
    keeps an fp32 copy of its weight too).  The hidden states of all t tokens are gathered over TP (t h w), their
    gradient is another t h w, and the weight's gradient of a chunk is V / TP h w before it is added to the main one.
    """
    width = PARAMETER_BYTES[learner.dtype]
    tokens = learner.max_tokens_per_micro_batch / layout.context
    rows = padded_vocab_size(architecture.vocab_size, layout.tensor) / layout.tensor
    chunk = min(learner.log_prob_chunk_tokens, tokens)
    head_width = 4 if learner.fp32_lm_head else width
    logits = chunk * rows * (8 + head_width)
    hidden = 2 * tokens * architecture.hidden_size * width
    weight = rows * architecture.hidden_size * (head_width + (4 if learner.fp32_lm_head and width == 2 else 0))
    return logits + hidden + weight
