"""Attention sinks against transformers' attention of gpt-oss; tests/parity has whole models and layouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conversion.model.layout import ParallelLayout
from megatron_retool.learner import cpu

BATCH, LENGTH, HEADS, GROUPS, SIZE, SCALE = 2, 70, 4, 2, 16, 0.2


def expected(query: Any, key: Any, value: Any, sinks: Any, visible: torch.Tensor) -> torch.Tensor:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    module: Any = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, sinks=sinks, training=False)
    hidden = torch.zeros(visible.shape, dtype=query.dtype).masked_fill(~visible, -torch.inf)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    out, _ = eager_attention_forward(module, query, key, value, hidden, SCALE)
    return out


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(length: int, keys: int, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, length, HEADS, SIZE), (BATCH, keys, GROUPS, SIZE), (BATCH, keys, GROUPS, SIZE), (HEADS,)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    query, key, value, sinks = (x.to(dtype).requires_grad_() for x in drawn)
    return query, key, value, sinks


def causal(length: int, window: int) -> torch.Tensor:
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) & (distance < window)


MASKS = {
    "causal": (LENGTH, None),
    "window": (LENGTH, causal(LENGTH, 8)),
    "part of the queries": (5, causal(LENGTH, 8)[torch.tensor([3, 0, 69, 33, 12])].expand(BATCH, 1, -1, -1)),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=str)
def test_it_is_transformers(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    from megatron_retool.learner.attention_pieces import hidden_keys
    from megatron_retool.learner.sinks import sink_attention

    length, mask = MASKS[kind]
    ours, theirs = inputs(length, LENGTH, dtype), inputs(length, LENGTH, torch.float64)
    found = sink_attention(*ours, None if mask is None else hidden_keys(mask, ours[0]), SCALE)
    wanted = expected(*theirs, causal(LENGTH, LENGTH) if mask is None else mask)
    upstream = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (found * upstream.to(dtype)).sum().backward()
    (wanted * upstream).sum().backward()
    for one, other in zip([found, *(x.grad for x in ours)], [wanted, *(x.grad for x in theirs)], strict=True):
        assert one is not None and other is not None
        assert (one.double() - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("masked", [False, True])
def test_torchs_kernels_for_a_gpu_take_what_they_are_given(masked: bool) -> None:
    """Their own functions of shapes, without a GPU; tests/gpu_branch has the numbers."""
    from megatron_retool.learner import sinks

    with torch.device("meta"):
        query, key = torch.empty(2, 4, 70, 16), torch.empty(2, 4, 70, 16)
        mask = torch.empty(1, 1, 70, 72)[..., :70].expand(2, 4, 70, 70) if masked else None
        out, logarithm, *dropped = sinks._gpu_forward(query, key, key, mask, True, 0.0, not masked, scale=SCALE)
        assert out.shape == query.shape and logarithm.shape == (2, 4, 96)
        wanted = [True, True, True, False]
        grads = sinks._gpu_backward(
            out, query, key, key, mask, out, logarithm, *dropped, 0.0, wanted, not masked, scale=SCALE
        )
    assert [grad.shape for grad in grads[:3]] == [query.shape, key.shape, key.shape]


def test_a_sink_takes_probability() -> None:
    """Without it, and with one that is far below every score, attention is the plain one."""
    from megatron_retool.learner.sinks import sink_attention

    query, key, value, sinks = (x.detach() for x in inputs(LENGTH, LENGTH, torch.float32))
    out = sink_attention(query, key, value, sinks, None, SCALE)
    none = sink_attention(query, key, value, torch.full_like(sinks, -200.0), None, SCALE)
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (query, key, value)), is_causal=True, scale=SCALE, enable_gqa=True
    ).transpose(1, 2)
    assert torch.allclose(none, plain, atol=1e-6)
    assert float(out.norm()) < 0.95 * float(plain.norm())


def test_bfloat16_is_close() -> None:
    from megatron_retool.learner.sinks import sink_attention

    exact = inputs(LENGTH, LENGTH, torch.float32)
    query, key, value, sinks = rounded = [x.detach().bfloat16().requires_grad_() for x in exact]
    found, wanted = sink_attention(query, key, value, sinks, None, SCALE), sink_attention(*exact, None, SCALE)
    found.float().sum().backward()
    wanted.sum().backward()
    for one, other in zip([found, *(x.grad for x in rounded)], [wanted, *(x.grad for x in exact)], strict=True):
        assert one is not None and other is not None and one.dtype == torch.bfloat16
        assert (one.float() - other).norm() <= 0.02 * other.norm()


def test_the_core_attention_has_a_sink_for_each_head() -> None:
    """Which tensor parallelism splits, and checkpoints hold by heads; without the setting there is none."""
    cpu.install()
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_retool.learner import parallel
    from megatron_retool.learner.attention import PackedAttention

    parallel.initialize(ParallelLayout.of_ranks(1), torch.device("cpu"), 0)
    try:
        options: dict[str, Any] = {
            "num_layers": 1, "hidden_size": 32, "num_attention_heads": HEADS, "use_cpu_initialization": True,
        }  # fmt: skip
        plain = PackedAttention(TransformerConfig(**options), 1, None, "self")
        assert not list(plain.parameters()) and not plain.sharded_state_dict("core.")
        own = PackedAttention(TransformerConfig(**options, softmax_type="learnable"), 1, None, "self")
        (name, sinks), *others = own.named_parameters()
        assert (name, tuple(sinks.shape), others) == ("softmax_offset", (HEADS,), [])
        assert sinks.tensor_model_parallel and sinks.partition_dim == 0
        assert own.sharded_state_dict("core.")["core.softmax_offset"].global_shape == (HEADS,)
    finally:
        parallel.shutdown()
