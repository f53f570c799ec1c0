"""Layers with the same window keep one mask of a micro-batch until the backward pass, and not one each."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from conversion.model.layout import ParallelLayout
from megatron_retool.learner import cpu

TOKENS, HEADS, GROUPS, SIZE, WINDOW = 13, 4, 2, 8, 5


def test_layers_with_one_window_keep_one_mask() -> None:
    cpu.install()
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_retool.learner import parallel
    from megatron_retool.learner.attention import LocalPackedSequences, PackedAttention, RotaryTable
    from megatron_retool.learner.attention_pieces import Bucket

    torch.manual_seed(0)
    parallel.initialize(ParallelLayout.of_ranks(1), torch.device("cpu"), 0)
    try:
        config = TransformerConfig(
            num_layers=3,
            hidden_size=HEADS * SIZE,
            num_attention_heads=HEADS,
            num_query_groups=GROUPS,
            kv_channels=SIZE,
            window_size=(WINDOW - 1, 0),
            window_attn_skip_freq=[1, 0, 1],
            no_rope_freq=[1, 1, 1],
        )
        layers = [PackedAttention(config, number, None, "self") for number in (1, 2, 3)]
    finally:
        parallel.shutdown()
    cos, sin = RotaryTable(torch.ones(SIZE // 2)).at(torch.arange(TOKENS), TOKENS, torch.float32)
    packed = LocalPackedSequences(buckets=(Bucket(TOKENS, 1, TOKENS, None, None),), cos=cos, sin=sin)
    query = torch.randn(TOKENS, 1, HEADS, SIZE, requires_grad=True)
    key, value = (torch.randn(TOKENS, 1, GROUPS, SIZE, requires_grad=True) for _ in range(2))
    kept: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        found = [layer(query, key, value, packed_seq_params=packed) for layer in layers]

    masks = [tensor for tensor in kept if tensor.shape[-2:] == (TOKENS, TOKENS)]
    assert len({mask.untyped_storage().data_ptr() for mask in masks}) == 1 and len(packed.masks) == 1
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    sides = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
    for visible, out in zip((distance < WINDOW, distance < TOKENS, distance < WINDOW), found, strict=True):
        mask = visible & (distance >= 0)
        wanted = F.scaled_dot_product_attention(*sides, attn_mask=mask, enable_gqa=True).permute(2, 0, 1, 3).flatten(2)
        torch.testing.assert_close(out, wanted)
