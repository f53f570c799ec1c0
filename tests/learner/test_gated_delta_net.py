"""Gated delta net and gated attention against transformers' modules; tests/parity has whole models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from conversion.model.architecture import Architecture
from conversion.model.layout import ParallelLayout
from conversion.model.mapping import shard, to_hf, to_mcore
from conversion.model.weight_map import WeightMap
from megatron_retool.learner import cpu
from megatron_retool.parity.admission.shrink import shrunk
from megatron_retool.parity.ranks import run_ranks
from megatron_retool.planning.models import MODELS

LENGTHS = (9, 1, 70, 6)
"""Of packed sequences: one goes over a chunk's end, one is shorter than the convolution."""


def architecture(**change: Any) -> Architecture:
    return Architecture.from_hf_config({**shrunk(MODELS["qwen3-next-80b-a3b"], 4), **change})


def transformers_layer(model: Architecture, layer: int) -> tuple[Any, Any]:
    """Its module in attention's place with random weights, and rotary positions."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    config = Qwen3NextConfig(**{k: v for k, v in model.hf_config.items() if k not in ("model_type", "dtype")})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    kind = theirs.Qwen3NextAttention if model.has_attention(layer) else theirs.Qwen3NextGatedDeltaNet
    module = kind(config, layer)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.2)
            if name == "A_log":
                parameter.sub_(3.0)
    return module, theirs.Qwen3NextRotaryEmbedding(config)


def their_sequences(module: Any, rotary: Any, hidden: Tensor) -> Tensor:
    """Each sequence by itself: [t, h] -> [t, h]."""
    found = []
    for part in hidden.split(LENGTHS):
        if hasattr(module, "A_log"):
            found.append(module(part[None])[0])
            continue
        positions = torch.arange(len(part))[None]
        causal = torch.full((len(part), len(part)), float("-inf")).triu(1)[None, None]
        found.append(module(part[None], rotary(part[None], positions), causal)[0][0])
    return torch.cat(found)


def packed_parameters(rotary: Any) -> Any:
    """The four sequences as two buckets, one of which pads."""
    from megatron_retool.learner.attention import LocalPackedSequences, RotaryTable
    from megatron_retool.learner.attention_pieces import Bucket

    rows = [torch.arange(9) + 0, torch.full((9,), 9)]
    cells = torch.cat([torch.arange(9), torch.tensor([9])])
    alone = torch.cat([torch.arange(70), 70 + torch.arange(6), torch.full((64,), 71)])
    buckets = (
        Bucket(10, 2, 9, torch.cat(rows), cells),
        Bucket(76, 2, 70, alone, torch.arange(76)),
    )
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    cos, sin = RotaryTable(rotary.inv_freq).at(positions, max(LENGTHS), torch.float32)
    return LocalPackedSequences(buckets=buckets, cos=cos, sin=sin)


def our_layer(model: Architecture, layer: int, sequence_parallel: bool, ranks: int) -> Any:
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_retool.learner.specs import LayerKind, _local_layer

    config = TransformerConfig(
        num_layers=4, hidden_size=model.hidden_size, num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups, kv_channels=model.head_dim, use_cpu_initialization=True,
        attention_output_gate=True, qk_layernorm=True, layernorm_zero_centered_gamma=True, add_bias_linear=False,
        layernorm_epsilon=model.rms_norm_eps, tensor_model_parallel_size=ranks, sequence_parallel=sequence_parallel,
        normalization="RMSNorm",
    )  # fmt: skip
    kind = LayerKind(experts=False, attention=model.has_attention(layer))
    spec = _local_layer(model, config, kind).submodules.self_attention
    from megatron.core.process_groups_config import ProcessGroupCollection

    return build_module(
        spec, config=config, layer_number=layer + 1, pg_collection=ProcessGroupCollection.use_mpu_process_groups()
    )


def _in_rank(ranks: int, layer: int, sequence_parallel: bool, **change: Any) -> dict[str, float]:
    """How far output and gradients are from transformers', on the worst of ``ranks``."""
    from megatron.core import parallel_state

    from megatron_retool.learner import parallel

    parallel.initialize(ParallelLayout.of_ranks(ranks, tensor=ranks), torch.device("cpu"), 0)
    rank = parallel_state.get_tensor_model_parallel_rank()
    model = architecture(**change)
    theirs, rotary = transformers_layer(model, layer)
    ours = our_layer(model, layer, sequence_parallel, ranks)
    place = "linear_attn" if hasattr(theirs, "A_log") else "self_attn"
    weights = {f"model.layers.{layer}.{place}.{name}": weight for name, weight in theirs.named_parameters()}
    prefix = f"decoder.layers.{layer}.self_attention."
    mappings = {name: WeightMap(model)[prefix + name] for name, _ in ours.named_parameters()}
    assert {name for mapping in mappings.values() for name in mapping.hf_names} == weights.keys()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            full = to_mcore(mappings[name], [weights[each] for each in mappings[name].hf_names])
            parameter.copy_(shard(mappings[name], full, ranks, rank))

    tokens = sum(LENGTHS)
    hidden, upstream = torch.randn(tokens, model.hidden_size), torch.randn(tokens, model.hidden_size)
    expected = their_sequences(theirs, rotary, hidden.requires_grad_())
    gradients = torch.autograd.grad(expected, [hidden, *weights.values()], upstream)
    wanted = dict(zip(["hidden", *weights], gradients, strict=True))

    own = slice(rank * tokens // ranks, (rank + 1) * tokens // ranks) if sequence_parallel else slice(None)
    mine = hidden.detach()[own].requires_grad_()
    found, _ = ours(mine.unsqueeze(1), attention_mask=None, packed_seq_params=packed_parameters(rotary))
    (found.squeeze(1) * upstream[own]).sum().backward()
    errors = {"output": _off(found.squeeze(1), expected[own]), "hidden": _off(mine.grad, wanted["hidden"][own])}
    for name, parameter in ours.named_parameters():
        gradient = parameter.grad
        # What finalize_model_grads adds up over the ranks.
        if getattr(parameter, "sequence_parallel", False) or "q_layernorm" in name or "k_layernorm" in name:
            torch.distributed.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
        full = to_mcore(mappings[name], [wanted[each] for each in mappings[name].hf_names])
        errors[name] = _off(gradient, shard(mappings[name], full, ranks, rank))
        assert ranks > 1 or to_hf(mappings[name], gradient).keys() <= weights.keys()
    everyone: list[dict[str, float]] = [errors] * ranks
    torch.distributed.all_gather_object(everyone, errors)
    return {name: max(each[name] for each in everyone) for name in errors}


def _off(found: Any, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("layer", [0, 3])
def test_they_are_transformers(layer: int) -> None:
    """Layer 0 has a gated delta net, layer 3 gated attention."""
    cpu.install()
    errors = _in_rank(1, layer, False)
    assert max(errors.values()) < 1e-5, errors
    assert ("A_log" in errors) == (layer == 0)


def _every_kind() -> list[dict[str, float]]:
    found = [_in_rank(2, layer, parallel) for layer in (0, 3) for parallel in (False, True)]
    return [*found, _in_rank(2, 3, True, num_key_value_heads=1)]


def test_they_are_split_by_heads(tmp_path: Path) -> None:
    """With sequence parallelism and without, and where two ranks share a key head."""
    for errors in run_ranks(_every_kind, 2, tmp_path):
        assert max(errors.values()) < 1e-5, errors


def test_a_convolution_sees_its_own_sequence_alone() -> None:
    cpu.install()
    from megatron_retool.learner import parallel
    from megatron_retool.learner.recurrent import CausalConvolution

    parallel.initialize(ParallelLayout.of_ranks(1), torch.device("cpu"), 0)
    settings: Any = SimpleNamespace(params_dtype=torch.float32)
    convolution, x = CausalConvolution(settings, 5, 4), torch.randn(2, 7, 5)
    found, weight = convolution(x, convolution.weight), convolution.weight
    assert found.shape == x.shape
    for token in range(7):
        seen = range(max(0, token - 3), token + 1)
        expected = torch.stack([x[:, each] * weight[:, 0, 3 - (token - each)] for each in seen]).sum(0)
        torch.testing.assert_close(found[:, token], expected)


def kept_bytes(module: Any, hidden_size: int, tokens: int) -> int:
    """What autograd keeps of a bfloat16 layer's pass over two sequences, beside its input and its weights."""
    from megatron_retool.learner.attention import LocalPackedSequences
    from megatron_retool.learner.attention_pieces import Bucket

    hidden = torch.randn(tokens, 1, hidden_size, dtype=torch.bfloat16, requires_grad=True)
    others = {tensor.untyped_storage().data_ptr() for tensor in (hidden, *module.parameters())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    buckets = (Bucket(tokens, 2, tokens // 2, None, None),)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(hidden, packed_seq_params=LocalPackedSequences(buckets=buckets))
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in others)


@pytest.mark.parametrize("size", [8, 32])
def test_the_planner_knows_what_autograd_keeps(size: int) -> None:
    """Within 3 % (the rest: numbers of which each head has one)."""
    cpu.install()
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_retool.learner import parallel
    from megatron_retool.learner.gated_delta_net import GatedDeltaNet
    from megatron_retool.planning.activations import layer_activations

    layout = ParallelLayout.of_ranks(1)
    parallel.initialize(layout, torch.device("cpu"), 0)
    model, tokens = architecture(linear_key_head_dim=size), 512
    config = TransformerConfig(
        num_layers=4, hidden_size=model.hidden_size, num_attention_heads=4, use_cpu_initialization=True, bf16=True,
        params_dtype=torch.bfloat16, add_bias_linear=False,
    )  # fmt: skip
    assert model.delta_net is not None
    module = GatedDeltaNet(config, 1, model.delta_net)
    measured = kept_bytes(module, model.hidden_size, tokens)
    planned = layer_activations(model, layout, tokens, 2, fused=False, linear=True)["attention"]
    assert planned == pytest.approx(measured, rel=0.03)
