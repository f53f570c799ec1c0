"""One layer of Mamba-2 against transformers' modules of Granite 4 and Nemotron-H; tests/parity has whole models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conversion.model.architecture import Architecture
from conversion.model.attention_config import MambaSizes
from conversion.model.layout import ParallelLayout
from conversion.model.mapping import shard, to_mcore
from conversion.model.weight_map import WeightMap
from megatron_retool.learner import cpu
from megatron_retool.parity.admission.shrink import shrunk
from megatron_retool.parity.ranks import run_ranks
from megatron_retool.planning.models import MODELS
from tests.learner.test_gated_delta_net import LENGTHS, kept_bytes, packed_parameters

HIDDEN = 32
GRANITE = MambaSizes(heads=8, head_dim=8, groups=1, state_dim=12, kernel=4)
NEMOTRON = MambaSizes(heads=12, head_dim=8, groups=4, state_dim=10, kernel=3)


def architecture(sizes: MambaSizes) -> Architecture:
    return replace(Architecture.from_hf_config(shrunk(MODELS["granite-4.0-h-micro"], 4)), mamba=sizes)


def transformers_layer(sizes: MambaSizes) -> Any:
    """Nemotron-H's, where there are groups, which it normalises one by one; Granite's knows no others."""
    from transformers import GraniteMoeHybridConfig, NemotronHConfig
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    torch.manual_seed(0)
    module: Any
    if sizes.groups == 1:
        granite = GraniteMoeHybridConfig(
            hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=4, layer_types=["mamba"],
            mamba_n_heads=sizes.heads, mamba_d_head=sizes.head_dim, mamba_d_state=sizes.state_dim, mamba_n_groups=1,
            mamba_d_conv=sizes.kernel, mamba_expand=sizes.value_size // HIDDEN,
        )  # fmt: skip
        module = GraniteMoeHybridMambaLayer(granite, 0)
    else:
        nemotron = NemotronHConfig(
            hidden_size=HIDDEN, layers_block_type=["mamba"], mamba_num_heads=sizes.heads, mamba_head_dim=sizes.head_dim,
            ssm_state_size=sizes.state_dim, n_groups=sizes.groups, conv_kernel=sizes.kernel, time_step_min=0.0,
            layer_norm_epsilon=1e-6,
        )  # fmt: skip
        module = NemotronHMamba2Mixer(nemotron, 0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.2)
            if name == "A_log":
                parameter.sub_(3.0)
    return module


def our_layer(sizes: MambaSizes, sequence_parallel: bool, ranks: int) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_retool.learner.mamba import Mamba2

    config = TransformerConfig(
        num_layers=4, hidden_size=HIDDEN, num_attention_heads=4, use_cpu_initialization=True, add_bias_linear=False,
        layernorm_epsilon=1e-6, tensor_model_parallel_size=ranks, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    return Mamba2(config, 1, sizes)


def _in_rank(sizes: MambaSizes, ranks: int, sequence_parallel: bool = False) -> dict[str, float]:
    """How far output and gradients are from transformers', on the worst of ``ranks``."""
    from megatron.core import parallel_state

    from megatron_retool.learner import parallel

    parallel.initialize(ParallelLayout.of_ranks(ranks, tensor=ranks), torch.device("cpu"), 0)
    rank = parallel_state.get_tensor_model_parallel_rank()
    theirs, ours, model = transformers_layer(sizes), our_layer(sizes, sequence_parallel, ranks), architecture(sizes)
    weights = {f"model.layers.0.mamba.{name}": weight for name, weight in theirs.named_parameters()}
    weight_map = WeightMap(model)
    mappings = {name: weight_map[f"decoder.layers.0.self_attention.{name}"] for name, _ in ours.named_parameters()}
    assert {name for mapping in mappings.values() for name in mapping.hf_names} == weights.keys()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            full = to_mcore(mappings[name], [weights[each] for each in mappings[name].hf_names])
            parameter.copy_(shard(mappings[name], full, ranks, rank))

    tokens = sum(LENGTHS)
    hidden, upstream = torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN)
    expected = torch.cat([theirs(part[None])[0] for part in hidden.requires_grad_().split(LENGTHS)])
    gradients = torch.autograd.grad(expected, [hidden, *weights.values()], upstream)
    wanted = dict(zip(["hidden", *weights], gradients, strict=True))

    own = slice(rank * tokens // ranks, (rank + 1) * tokens // ranks) if sequence_parallel else slice(None)
    mine = hidden.detach()[own].requires_grad_()
    frequencies = type("Rotary", (), {"inv_freq": torch.ones(2)})
    found, _ = ours(mine.unsqueeze(1), packed_seq_params=packed_parameters(frequencies))
    (found.squeeze(1) * upstream[own]).sum().backward()
    errors = {"output": _off(found.squeeze(1), expected[own]), "hidden": _off(mine.grad, wanted["hidden"][own])}
    for name, parameter in ours.named_parameters():
        full = to_mcore(mappings[name], [wanted[each] for each in mappings[name].hf_names])
        errors[name] = _off(parameter.grad, shard(mappings[name], full, ranks, rank))
    everyone: list[dict[str, float]] = [errors] * ranks
    torch.distributed.all_gather_object(everyone, errors)
    return {name: max(each[name] for each in everyone) for name in errors}


def _off(found: Any, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


@pytest.mark.parametrize("sizes", [GRANITE, NEMOTRON], ids=["granite", "nemotron"])
def test_it_is_transformers(sizes: MambaSizes) -> None:
    cpu.install()
    errors = _in_rank(sizes, 1)
    assert max(errors.values()) < 1e-5, errors


def _split() -> list[dict[str, float]]:
    return [_in_rank(NEMOTRON, 2, parallel) for parallel in (False, True)]


def test_tensor_parallel_ranks_have_whole_groups(tmp_path: Path) -> None:
    for errors in run_ranks(_split, 2, tmp_path):
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(("groups", "ranks"), [(1, 2), (1, 4), (2, 2), (2, 4), (4, 2), (3, 2)])
def test_ranks_share_out_heads_with_their_groups_vectors(groups: int, ranks: int) -> None:
    cpu.install()
    from megatron_retool.learner import parallel

    parallel.initialize(ParallelLayout.of_ranks(1), torch.device("cpu"), 0)
    sizes = MambaSizes(heads=4 * groups, head_dim=2, groups=groups, state_dim=3, kernel=2)
    values, vectors = torch.randn(5, sizes.heads, 2), torch.randn(5, groups, 6)
    shared = our_layer(sizes, False, 1)._shared_out(torch.cat([values.view(5, groups, -1), vectors], -1), ranks)
    assert shared.size(1) % ranks == 0
    each = sizes.heads // shared.size(1)
    for part in range(shared.size(1)):
        own, copies = shared[:, part].split([2 * each, 6], -1)
        assert torch.equal(own.view(5, each, 2), values[:, part * each : (part + 1) * each])
        assert torch.equal(copies, vectors[:, part * each // 4])


@pytest.mark.parametrize("sizes", [replace(GRANITE, state_dim=32), NEMOTRON], ids=["granite", "nemotron"])
def test_the_planner_knows_what_autograd_keeps(sizes: MambaSizes) -> None:
    """Within 5 % (the rest: numbers of which each head has one, and the first chunk, which reads no state)."""
    cpu.install()
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_retool.learner import parallel
    from megatron_retool.learner.mamba import Mamba2
    from megatron_retool.planning.activations import layer_activations

    layout, tokens = ParallelLayout.of_ranks(1), 512
    parallel.initialize(layout, torch.device("cpu"), 0)
    config = TransformerConfig(
        num_layers=4, hidden_size=HIDDEN, num_attention_heads=4, use_cpu_initialization=True, bf16=True,
        params_dtype=torch.bfloat16, add_bias_linear=False,
    )  # fmt: skip
    measured = kept_bytes(Mamba2(config, 1, sizes), HIDDEN, tokens)
    planned = layer_activations(architecture(sizes), layout, tokens, 2, fused=False, linear=True)["attention"]
    assert planned == pytest.approx(measured, rel=0.05)
