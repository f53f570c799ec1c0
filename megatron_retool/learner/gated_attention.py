"""Attention whose output a gate multiplies (Gated Attention, arXiv:2505.06708), one gate for each feature of a head."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.attention import SelfAttention


class GatedSelfAttention(SelfAttention):
    """Megatron's own gate, also where several tensor-parallel ranks share a key head.

    Of such a group's queries Megatron-Core 0.16 keeps those of the rank, and of its gates all.
    """

    def get_query_key_value_tensors(self, *args: Any, output_gate: bool = False, **kwargs: Any) -> Any:
        found = super().get_query_key_value_tensors(*args, output_gate=output_gate, **kwargs)
        if not output_gate:
            return found
        query, key, value, gate = found
        heads = query.size(2)
        if gate.size(2) != heads:
            rank = parallel_state.get_tensor_model_parallel_rank() % (gate.size(2) // heads)
            gate = gate[:, :, rank * heads : (rank + 1) * heads]
        return query, key, value, gate
