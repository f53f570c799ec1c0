"""The learner's side of learner.match_engine=exact: Megatron's layers with the forward pass of ``exact.operators``.

The numbers are the engine's, to the bit; gradients are those of the ordinary operators at the same inputs. ``place``
changes the classes of a built model's modules: parameters, their names and their gradients' way stay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from conversion.model.architecture import Architecture
from conversion.model.model_operators import OPERATORS
from conversion.model.rotary import inverse_frequencies
from megatron_retool.config.learner import check_operators
from megatron_retool.exact import operators
from megatron_retool.learner import exact_gradients
from megatron_retool.learner.attention import LocalPackedSequences, PackedAttention, RMSNorm, SwiGLUMLP
from megatron_retool.learner.gated_delta_net import GatedDeltaNet, GatedRMSNorm
from megatron_retool.learner.latent_attention import LatentAttention, ReplicatedLinear
from megatron_retool.learner.mamba import Mamba2, NormOfGated
from megatron_retool.learner.norms import FullWidthRMSNorm, KeyNorm, PostNormSwiGLUMLP, QueryNorm, with_post_norm
from megatron_retool.learner.positions import PreparedQueries
from megatron_retool.learner.recurrent import RecurrentLayer


class ExactColumnParallelLinear(ColumnParallelLinear):
    """On one tensor-parallel rank; a bias is added before the product is rounded."""

    def forward(self, input_: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """[..., K] -> [..., N], and no bias that is still to be added."""
        return exact_gradients.linear(input_, self.weight, self.bias), None


class ExactRowParallelLinear(RowParallelLinear):
    """On one tensor-parallel rank; a bias is added before the product is rounded."""

    def forward(self, input_: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """[..., K] -> [..., N], and no bias that is still to be added."""
        return exact_gradients.linear(input_, self.weight, self.bias), None


class ExactReplicatedLinear(ReplicatedLinear):
    """A projection down to a latent vector."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        return exact_gradients.linear(input, self.weight, None)


class ExactRMSNorm(RMSNorm):
    """Its sum of squares has one order."""

    def forward(self, x: Tensor) -> Tensor:
        """As ``RMSNorm.forward``."""
        weight = 1.0 + self.weight.float() if self.zero_centered else self.weight
        return exact_gradients.rms_norm(x, weight, float(self.eps or 0.0))


class ExactFullWidthRMSNorm(FullWidthRMSNorm):
    """On one tensor-parallel rank."""

    def forward(self, x: Tensor) -> Tensor:
        """As ``FullWidthRMSNorm.forward``."""
        return exact_gradients.rms_norm(x.flatten(-2), self.weight, self.eps).view(x.shape)


def _between(mlp: Any, hidden_states: Tensor) -> Tensor:
    """What the activation of ``mlp`` leaves, between its two linear layers."""
    gate_and_up = mlp.linear_fc1(hidden_states)[0]
    if mlp.config.activation_func is F.silu:
        return exact_gradients.silu_and_multiply(gate_and_up)

    def ordinary(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return mlp.config.activation_func(gate) * up

    return exact_gradients.with_gradient_of(operators.gelu_and_multiply(gate_and_up), ordinary, gate_and_up)


class ExactSwiGLUMLP(SwiGLUMLP):
    """With the exact activation between its linear layers."""

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any) -> Any:
        """The MLP's output and bias, for hidden states [t, 1, h]."""
        return self.linear_fc2(_between(self, hidden_states))


class ExactExpert(MLP):
    """One expert: its gate multiplies what its activation leaves, as in Megatron."""

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any) -> Any:
        """The expert's output [t, h] and bias, for its tokens [t, h] and their gates, float32 [t]."""
        activated = _between(self, hidden_states)
        if per_token_scale is not None:
            activated = (activated * per_token_scale.unsqueeze(-1)).to(hidden_states.dtype)
        return self.linear_fc2(activated)


class ExactSharedExperts(SharedExpertMLP):
    """Experts of every token, which are one MLP. ``ExactMixture`` multiplies by their gate."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[t, 1, h] -> the same."""
        out: Tensor = self.linear_fc2(_between(self, hidden_states))[0]
        return out


class ExactRouter(TopKRouter):
    """Chooses experts, of equal ones the first.

    Logits are rounded to the model's dtype before a softmax, as in transformers and SGLang, and not before sigmoids.

    Attributes:
        groups, of_a_group: see ``operators.top_experts``.
        normalizes: a token's gates add up to 1, before their factor.
        factor: of the gates; 1 where ``ExactMixture`` multiplies by it.
    """

    groups: tuple[int, int] | None
    of_a_group: int
    normalizes: bool
    factor: float

    def gating(self, input: Tensor) -> Tensor:
        """float32 [..., E]."""
        dtype = torch.float32 if self.score_function == "sigmoid" else None
        return exact_gradients.linear(input, self.weight, None, dtype).float()

    def routing(self, logits: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Gates, float32 [t, E], and which experts are chosen, bool [t, E]."""
        logits = logits.reshape(-1, logits.size(-1))
        is_sigmoid = self.score_function == "sigmoid"
        scores = operators.sigmoid(logits) if is_sigmoid else logits.detach()
        ranked = scores if self.expert_bias is None else scores + self.expert_bias

        def own() -> tuple[Tensor, Tensor]:
            experts = operators.top_experts(ranked, self.topk, self.groups, self.of_a_group)
            return ranked.gather(1, experts), experts

        replay: Any = self.router_replay
        experts = (own() if replay is None else replay.choose(ranked, own, limited=self.groups is not None))[1]
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, experts, True)
        self._apply_expert_bias(chosen)

        def ordinary(logits: Tensor) -> Tensor:
            if is_sigmoid:
                gates = logits.sigmoid() * chosen
                return gates / (gates.sum(-1, keepdim=True) + 1e-20) if self.normalizes else gates
            if self.normalizes:
                return logits.masked_fill(~chosen, float("-inf")).softmax(-1)
            return logits.softmax(-1) * chosen

        exact = operators.expert_gates(scores, experts, self.normalizes, self.score_function)
        return exact_gradients.with_gradient_of(exact, ordinary, logits) * self.factor, chosen


class ExactMixture(MoELayer):
    """A mixture of experts on one rank, which adds up each token's experts in the order of their numbers.

    Attributes:
        factor: of the sum; 1 where the gates have it.
    """

    factor: float

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """[t, 1, h] -> the same, and no bias."""
        rows = hidden_states.reshape(-1, hidden_states.size(-1))
        gates, chosen = self.router(hidden_states)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts.local_experts):
            taken = chosen[:, number].nonzero().squeeze(1)
            # Experts without tokens take part with none: their gradient is zero, not missing.
            output, _bias = expert(rows.index_select(0, taken), gates[:, number].index_select(0, taken))
            out = out.index_add(0, taken, output)
        out = out.view(hidden_states.shape) * self.factor
        if self.shared_experts is None:
            return out, None
        shared = self.shared_experts(hidden_states)
        if not self.shared_experts.use_shared_expert_gate:
            return out + shared, None
        logits = exact_gradients.linear(hidden_states, self.shared_experts.gate_weight, None, torch.float32)
        exact = operators.sigmoid(logits.view(-1, 1)).view(logits.shape)
        return operators.gated_sum(out, shared, exact_gradients.with_gradient_of(exact, torch.sigmoid, logits)), None


class ExactRotaryTable:
    """In place of ``attention.RotaryTable``: cosines and sines in float32, once for each frequency."""

    def __init__(self, frequencies: Sequence[float]) -> None:
        self._frequencies = frequencies
        self._tables = operators.rotary_table(frequencies, 0)

    def at(self, positions: Tensor, max_length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two tensors float32 [t, 1, r / 2] at ``positions`` (int64 [t], below ``max_length``)."""
        if self._tables[0].size(0) < max_length:
            cos, sin = operators.rotary_table(self._frequencies, 2 * max_length)
            self._tables = cos.to(positions.device), sin.to(positions.device)
        cos, sin = (table.index_select(0, positions).unsqueeze(1) for table in self._tables)
        return cos, sin


class ExactAttention(PackedAttention):
    """Causal attention whose sums run over each query's keys in the order of the text.

    ``exact_operators``, which ``place`` sets, says whether rotation and attention are exact.
    """

    exact_operators: frozenset[str]

    def _rotated(self, x: Tensor, packed: LocalPackedSequences) -> Tensor:
        cos, sin = self._angles(packed)
        if "rotary" not in self.exact_operators:
            return super()._rotated(x, packed)
        assert cos is not None and sin is not None
        return exact_gradients.rotate(x, cos.squeeze(1), sin.squeeze(1))

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, packed: LocalPackedSequences, chosen: Any) -> Tensor:
        ordinary = super()._attended
        if "rotary" in self.exact_operators and packed.query_growth is not None:
            query = query * packed.query_growth.view(-1, 1, 1).to(query.dtype)
        if "attention" not in self.exact_operators:
            return ordinary(query, key, value, packed, chosen)
        slots, starts, counts = _key_places(packed, query.size(0))
        if self.window is not None:
            starts, counts = operators.last_keys(starts, counts, self.window)
        exact = operators.attention(query, key, value, slots, starts, counts, self.scale)
        return exact_gradients.with_gradient_of(
            exact, lambda q, k, v: ordinary(q, k, v, packed, chosen), query, key, value
        )


class ExactPreparedQueries(PreparedQueries):
    """Whose growth by position ``ExactAttention`` applies, behind the rotation as SGLang does."""

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        """As ``PreparedQueries.forward``."""
        self._growth = None
        return SelfAttention.forward(self, *args, packed_seq_params=packed_seq_params, **kwargs)


class ExactSelfAttention(SelfAttention):
    """Where attention has an output gate, the product with its sigmoid is exact."""

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        gate = gate.reshape(x.shape)
        exact = operators.multiply_by_sigmoid(x, gate)
        return exact_gradients.with_gradient_of(exact, super()._apply_output_gate, x, gate)


class _ExactRecurrence(RecurrentLayer):
    """A memory that goes from token to token; the gradient is that of the rule chunk by chunk."""

    def _within_rank(self, convolved: Tensor, rates: Tensor, packed: LocalPackedSequences) -> Tensor:
        starts, weight = packed.cu_seqlens_q.long(), self.conv1d.weight.squeeze(1)
        with torch.no_grad():
            texts = (
                F.pad(x.t(), (weight.size(-1) - 1, 0)) for x in convolved.flatten(1).tensor_split(starts[1:-1].cpu())
            )
            mixed = torch.cat([operators.convolve(x, weight, self.conv1d.bias).t() for x in texts])
            slots = torch.arange(len(starts) - 1, device=starts.device)
            exact = self._exact(mixed.view(convolved.shape), rates, slots, starts)
        ordinary = super()._within_rank
        return exact_gradients.with_gradient_of(exact, lambda c, r: ordinary(c, r, packed), convolved, rates)

    def _exact(self, mixed: Tensor, rates: Tensor, texts: Tensor, starts: Tensor) -> Tensor:
        """[t, heads, value features], for [t, groups, features] behind the convolution and [t, groups, rates]; for
        ``texts`` and ``starts`` see ``operators.delta_rule``."""
        raise NotImplementedError


class ExactGatedDeltaNet(_ExactRecurrence, GatedDeltaNet):
    """On one tensor-parallel rank."""

    def _exact(self, mixed: Tensor, rates: Tensor, texts: Tensor, starts: Tensor) -> Tensor:
        query, key, value = self._heads(mixed)
        betas, steps = (x.flatten(1) for x in rates.chunk(2, -1))
        log_decays, betas = operators.delta_net_rates(steps, betas, self.A_log, self.dt_bias)
        states = value.new_zeros(len(texts), *value.shape[1:], key.size(-1), dtype=torch.float32)
        return operators.delta_rule(query, key, value, log_decays, betas, states, texts, starts)


class ExactMamba2(_ExactRecurrence, Mamba2):
    """On one tensor-parallel rank."""

    def _exact(self, mixed: Tensor, rates: Tensor, texts: Tensor, starts: Tensor) -> Tensor:
        value, write, read = self._parts(mixed)
        states = value.new_zeros(len(texts), *value.shape[1:], read.size(-1), dtype=torch.float32)
        of_heads = -self.A_log.float().exp(), self.D, self.dt_bias  # as engines keep them
        return operators.state_space(value, rates.flatten(1), *of_heads, write, read, states, texts, starts)


class ExactNormOfGated(NormOfGated):
    """On one tensor-parallel rank, of one group."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """As ``NormOfGated.forward``."""
        exact = operators.norm_of_gated(x, self.weight, self.eps, gate)
        return exact_gradients.with_gradient_of(exact, super().forward, x, gate)


class ExactGatedRMSNorm(GatedRMSNorm):
    """On one tensor-parallel rank."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """As ``GatedRMSNorm.forward``."""
        exact = operators.gated_rms_norm(x, self.weight, self.eps, gate)
        return exact_gradients.with_gradient_of(exact, super().forward, x, gate)


class ExactLatentAttention(LatentAttention):
    """Attention over the latent vectors themselves, which is what an engine keeps of the past.

    score = q_plain (W_key c) + q_turned k_turned = (W_key^T q_plain) c + q_turned k_turned, and the values' sum is
    W_value of the sum of latents c: a head's own keys and values are never made. The gradient is that of the ordinary
    way, which makes them.
    """

    def _attended(
        self, query: Tensor, latent: Tensor, turned: Tensor, packed: LocalPackedSequences | None, **_: Tensor
    ) -> Tensor:
        assert packed is not None
        ordinary = super()._attended
        with torch.no_grad():
            exact = self._exact(query, latent, turned, packed)
        inputs = query, latent, turned, self.linear_kv_up_proj.weight
        return exact_gradients.with_gradient_of(exact, lambda q, c, k, _up: ordinary(q, c, k, packed), *inputs)

    def _exact(self, query: Tensor, latent: Tensor, turned: Tensor, packed: LocalPackedSequences) -> Tensor:
        """[t, 1, heads x value_dim], for what ``_attended`` is given."""
        count, rank = query.size(0), self.sizes.key_value_rank
        plain, own = query.view(count, -1, self.plain + self.rotated).split([self.plain, self.rotated], -1)
        own, shared = (self._turned(x, packed) for x in (own, turned))
        up = self.linear_kv_up_proj.weight.view(-1, self.plain + self.sizes.value_dim, rank)
        of_keys, of_values = up.split([self.plain, self.sizes.value_dim], 1)
        read = torch.cat([operators.linear_of_heads(plain, of_keys.transpose(1, 2)), own], -1)
        kept = torch.cat([latent, shared], -1)
        places, scale = _key_places(packed, count), self.core_attention.scale
        summed = operators.attention(read, kept, kept, *places, scale, width=rank)
        return operators.linear_of_heads(summed, of_values).view(count, 1, -1)

    def _turned(self, x: Tensor, packed: LocalPackedSequences) -> Tensor:
        """``x`` [t, heads, r] at its positions, the partners in halves."""
        result: Tensor = self.core_attention._rotated(self._in_halves(x), packed)
        return result


def _key_places(packed: LocalPackedSequences, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where the keys of each of the stream's ``count`` tokens lie; see ``SharedPrefixes.key_places``."""
    if packed.tree is not None:
        return packed.tree.key_places
    bounds = packed.cu_seqlens_q.long()
    tokens = torch.arange(count, device=bounds.device)
    starts = bounds[torch.searchsorted(bounds, tokens, right=True) - 1]
    return tokens, starts, tokens - starts + 1


_EXACT: dict[type[Any], type[Any]] = {
    ColumnParallelLinear: ExactColumnParallelLinear,
    RowParallelLinear: ExactRowParallelLinear,
    PostNormSwiGLUMLP.output_layer: with_post_norm(ExactRowParallelLinear, RMSNorm),
    RMSNorm: ExactRMSNorm,
    QueryNorm: ExactFullWidthRMSNorm,
    KeyNorm: ExactFullWidthRMSNorm,
    SwiGLUMLP: ExactSwiGLUMLP,
    PostNormSwiGLUMLP: ExactSwiGLUMLP,
    MLP: ExactExpert,
    TopKRouter: ExactRouter,
    MoELayer: ExactMixture,
    PackedAttention: ExactAttention,
    SelfAttention: ExactSelfAttention,
    PreparedQueries: ExactPreparedQueries,
    GatedDeltaNet: ExactGatedDeltaNet,
    GatedRMSNorm: ExactGatedRMSNorm,
    Mamba2: ExactMamba2,
    NormOfGated: ExactNormOfGated,
    LatentAttention: ExactLatentAttention,
    ReplicatedLinear: ExactReplicatedLinear,
    SharedExpertMLP: ExactSharedExperts,
}


def place(chunks: Iterable[Any], architecture: Architecture, exchanged: Collection[str] = OPERATORS) -> None:
    """Have model chunks of one tensor- and context-parallel rank compute with ``exact.operators``.

    Args:
        exchanged: of ``OPERATORS``; the others stay as they are.

    Raises:
        ConfigError: the model has an operator that ``exact`` has not.
    """
    check_operators(architecture)
    exchanged = frozenset(exchanged)
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if exchanged & _operators_of(name, module):
                module.__class__ = _EXACT[type(module)]
            if isinstance(module, ExactAttention):
                # Inside latent attention it is the ordinary way, whose gradient is taken.
                module.exact_operators = exchanged - {"attention"} if architecture.latent else exchanged
            if isinstance(module, ExactRouter):
                _set_router(module, architecture)
                module.factor = 1.0 if "experts" in exchanged else architecture.routed_scaling_factor
            if isinstance(module, ExactMixture):
                module.factor = architecture.routed_scaling_factor if "router" in exchanged else 1.0
        chunk.exact = "head" in exchanged
        if "rotary" in exchanged:
            chunk._rotary_table = ExactRotaryTable(inverse_frequencies(architecture).tolist())
            if architecture.local_rope_theta is not None:
                chunk._local_rotary_table = ExactRotaryTable(inverse_frequencies(architecture, local=True).tolist())


def _set_router(router: ExactRouter, architecture: Architecture) -> None:
    router.groups = architecture.router_groups
    router.of_a_group = 1 if architecture.router_group_score == "best" else 2
    is_sigmoid = router.score_function == "sigmoid"
    router.normalizes = architecture.norm_topk_prob if is_sigmoid else not router.config.moe_router_pre_softmax


_LINEAR = {
    "linear_qkv": "qkv",
    "linear_q_proj": "qkv",
    "linear_q_down_proj": "qkv",
    "linear_q_up_proj": "qkv",
    "linear_kv_down_proj": "qkv",
    "in_proj": "qkv",
    "linear_proj": "attention_output",
    "out_proj": "attention_output",
    "linear_fc1": "mlp_up",
    "linear_fc2": "mlp_down",
}
_KINDS = {
    RMSNorm: {"norm"},
    QueryNorm: {"norm"},
    KeyNorm: {"norm"},
    SwiGLUMLP: {"activation"},
    PostNormSwiGLUMLP: {"activation"},
    SharedExpertMLP: {"activation"},
    TopKRouter: {"router"},
    MoELayer: {"experts"},
    LatentAttention: {"attention"},
    SelfAttention: {"attention"},
    PreparedQueries: {"rotary"},
    GatedDeltaNet: {"delta_net"},
    GatedRMSNorm: {"delta_net"},
    Mamba2: {"mamba"},
    NormOfGated: {"mamba"},
}


def _operators_of(name: str, module: Any) -> set[str]:
    """Those of ``OPERATORS`` for which the module, called ``name`` in its model, changes class."""
    if type(module) not in _EXACT:
        return set()
    if type(module) is PackedAttention:
        return {"rotary", "attention"}
    if ".experts." in name:
        return {"experts"}
    return _KINDS.get(type(module)) or {_LINEAR.get(name.rpartition(".")[2], "")}
