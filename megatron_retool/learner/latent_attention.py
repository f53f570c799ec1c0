"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), in place of Megatron's attention.

Queries, keys and values are made of latent vectors, and positions rotate a part of each query and one key that all
heads share.  Megatron's own module rotates sequence by sequence, knows no shared prefixes, and needs Transformer
Engine.  Here the rotated part comes first in each head, so that ``PackedAttention`` sees ordinary heads with positions
on their first features, and all that it can do - packing, context parallelism, shared prefixes - holds here too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import set_save_original_input
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from conversion.model.attention_config import IndexerSizes, LatentSizes
from megatron_retool.learner.attention import (
    LOCAL_LINEARS,
    LocalPackedSequences,
    PackedAttention,
    ParallelLinears,
    RMSNorm,
)
from megatron_retool.learner.sparse_attention import SparseAttention


class LatentAttention(MegatronModule):
    """Causal self-attention over packed sequences: [t, 1, h] -> [t, 1, h], of t / TP tokens with sequence parallelism.

    The projections down to the latents are whole on every tensor-parallel rank, for the rank's own tokens; those up
    from them are split by heads.  Parameters have Megatron-Core's names.

    Args:
        sizes: of the latents.
        rotated: features of each head that positions rotate; ``config.kv_channels`` has them and the others together.
        linears: of the projections that are split by heads.
        indexer: of what chooses the keys that a query sees; None: it sees all of its past.
        shared_choices: see ``Architecture.shared_choices``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        sizes: LatentSizes,
        rotated: int,
        linears: ParallelLinears = LOCAL_LINEARS,
        indexer: IndexerSizes | None = None,
        shared_choices: Collection[int] = (),
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.sizes, self.rotated, self.is_sparse = sizes, rotated, indexer is not None
        self.plain = config.kv_channels - rotated
        heads, hidden = config.num_attention_heads, config.hidden_size
        options: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "is_expert": False,
            "tp_group": parallel_state.get_tensor_model_parallel_group(),
        }
        column: dict[str, Any] = {**options, "gather_output": False, "skip_bias_add": False}
        queries = heads * config.kv_channels
        if sizes.query_rank is None:
            self.linear_q_proj = linears.column(hidden, queries, **column)
        else:
            self.linear_q_down_proj = ReplicatedLinear(config, hidden, sizes.query_rank)
            self.q_layernorm = RMSNorm(config, sizes.query_rank, sizes.norm_eps)
            self.linear_q_up_proj = linears.column(sizes.query_rank, queries, **column)
        self.linear_kv_down_proj = ReplicatedLinear(config, hidden, sizes.key_value_rank + rotated)
        self.kv_layernorm = RMSNorm(config, sizes.key_value_rank, sizes.norm_eps)
        self.linear_kv_up_proj = linears.column(sizes.key_value_rank, heads * (self.plain + sizes.value_dim), **column)
        core: dict[str, Any] = {"softmax_scale": config.softmax_scale, "pg_collection": pg_collection}
        if indexer is None:
            self.core_attention = PackedAttention(config, layer_number, None, "self", **core)
        else:
            assert sizes.query_rank is not None, "the indexer reads the queries' latent"
            sparse: dict[str, Any] = {
                "sizes": indexer,
                "query_rank": sizes.query_rank,
                "rotated": rotated,
                "chooses": layer_number - 1 not in shared_choices,
                "is_shared": layer_number in shared_choices,
            }
            self.core_attention = SparseAttention(config, layer_number, None, "self", **core, **sparse)
        self.linear_proj = linears.row(
            heads * sizes.value_dim, hidden, input_is_parallel=True, skip_bias_add=True, **options
        )

    def set_for_recompute_input_layernorm(self) -> None:
        """Keep the norm's output for the backward pass, which computes it again, and not what FP8 makes of it."""
        if self.sizes.query_rank is None:  # other projections of it compute in the model's dtype
            set_save_original_input(self.linear_q_proj)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: LocalPackedSequences | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Output [t, 1, h] and bias, for the packed hidden states [t, 1, h]."""
        query_latent = self._query_latent(hidden_states)
        query, _ = (self.linear_q_proj if self.sizes.query_rank is None else self.linear_q_up_proj)(query_latent)
        latent, turned = self.linear_kv_down_proj(hidden_states).split([self.sizes.key_value_rank, self.rotated], -1)
        read = {"hidden_states": hidden_states, "query_latent": query_latent} if self.is_sparse else {}
        out = self._attended(query, self.kv_layernorm(latent), turned, packed_seq_params, **read)
        result: tuple[Tensor, Tensor | None] = self.linear_proj(out)
        return result

    def _query_latent(self, hidden_states: Tensor) -> Tensor:
        """[t, 1, query rank], normalised; the hidden states where queries have no latent."""
        if self.sizes.query_rank is None:
            return hidden_states
        latent: Tensor = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        return latent

    def _attended(
        self, query: Tensor, latent: Tensor, turned: Tensor, packed: LocalPackedSequences | None, **read: Tensor
    ) -> Tensor:
        """What the heads read, [t, 1, heads / TP x value_dim].

        Args:
            query: [t, 1, heads / TP x d].
            latent: of keys and values, normalised, [t, 1, key_value_rank].
            turned: the key features that positions rotate, which all heads share, [t, 1, rotated].
            read: what ``SparseAttention`` chooses keys by.
        """
        key, value = self._keys_and_values(latent, turned)
        plain, own = query.unflatten(-1, (-1, self.plain + self.rotated)).split([self.plain, self.rotated], -1)
        query = torch.cat([self._in_halves(own), plain], -1)
        # Attention wants heads of one size; zeros change neither a score nor what is cut off again.
        size = max(query.size(-1), value.size(-1))
        query, key, value = (F.pad(x, (0, size - x.size(-1))) for x in (query, key, value))
        out = self.core_attention(query, key, value, packed_seq_params=packed, **read)
        attended: Tensor = out.unflatten(-1, (-1, size))[..., : self.sizes.value_dim].flatten(-2)
        return attended

    def _keys_and_values(self, latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        """[t, 1, heads / TP, d] keys, the rotated features first, and [t, 1, heads / TP, value_dim] values."""
        both, _ = self.linear_kv_up_proj(latent)
        plain, value = both.unflatten(-1, (-1, self.plain + self.sizes.value_dim)).split(
            [self.plain, self.sizes.value_dim], -1
        )
        # The heads of all ranks use this key: its gradient is their sum.
        if self.config.sequence_parallel:
            turned = gather_from_sequence_parallel_region(turned)
        else:
            turned = copy_to_tensor_model_parallel_region(turned)
        shared = self._in_halves(turned).unsqueeze(2).expand(-1, -1, plain.size(2), -1)
        return torch.cat([shared, plain], -1), value

    def _in_halves(self, x: Tensor) -> Tensor:
        """Pairs that positions rotate together, side by side in the checkpoint, as ``PackedAttention`` has them."""
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.sizes.interleaved else x


class ReplicatedLinear(torch.nn.Linear):
    """A linear layer that every tensor-parallel rank has whole, for its own tokens of a sequence."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)
        if config.perform_initialization:
            config.init_method(self.weight)
        # finalize_model_grads adds up the gradients of the ranks' tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
