"""gpt-oss's router against transformers' module; tests/parity has whole models and layouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from conversion.model.layout import ParallelLayout
from megatron_retool.learner import cpu

TOKENS, HIDDEN, WIDTH, EXPERTS, CHOSEN, LIMIT = 23, 16, 12, 4, 2, 0.5
SETTINGS: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": WIDTH,
    "num_attention_heads": 2,
    "use_cpu_initialization": True,
    "add_bias_linear": True,
    "gated_linear_unit": True,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": LIMIT,
    "bias_activation_fusion": False,
    "num_moe_experts": EXPERTS,
    "moe_ffn_hidden_size": WIDTH,
    "moe_router_topk": CHOSEN,
    "moe_router_load_balancing_type": "none",
    "moe_router_dtype": "fp32",
    "cuda_graph_scope": [],
}


@pytest.fixture
def one_process() -> Iterator[None]:
    cpu.install()
    from megatron_retool.learner import parallel

    parallel.initialize(ParallelLayout.of_ranks(1), torch.device("cpu"), 0)
    yield
    parallel.shutdown()


def transformers_config() -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN,
        swiglu_limit=LIMIT, num_hidden_layers=1,
    )  # fmt: skip


def random_(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.normal_(0.0, 0.5, generator=generator)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).norm()) <= 1e-5 * float(expected.norm())


def test_the_bias_is_no_parameter_of_the_sequence(one_process: None) -> None:
    """Megatron's mark would have gradients of different experts added up."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_retool.learner.biased_experts import ExpertOutput

    config = TransformerConfig(**SETTINGS)
    config.sequence_parallel = True
    options: dict[str, Any] = {"init_method": torch.nn.init.zeros_, "input_is_parallel": True, "skip_bias_add": True}
    layer = ExpertOutput(WIDTH, HIDDEN, config=config, bias=True, is_expert=True, **options)
    assert not layer.bias.sequence_parallel and layer.bias.tensor_model_parallel


def test_the_router_is_transformers(one_process: None) -> None:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    theirs = GptOssTopKRouter(transformers_config())
    random_(theirs, 3)
    config = TransformerConfig(**SETTINGS, moe_router_pre_softmax=False)
    ours = TopKRouter(config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    ours.load_state_dict({"weight": theirs.weight, "bias": theirs.bias}, strict=False)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(4))
    probabilities, routing = ours(x[:, None])
    _, gates, chosen = theirs(x)
    expected = torch.zeros(TOKENS, EXPERTS).scatter(1, chosen, gates)
    assert torch.equal(routing, expected > 0)
    assert torch.allclose(probabilities, expected, atol=1e-6)
    upstream = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(5))
    (probabilities * upstream).sum().backward()
    (expected * upstream).sum().backward()
    assert_close(ours.bias.grad, theirs.bias.grad)
    assert_close(ours.weight.grad, theirs.weight.grad)
