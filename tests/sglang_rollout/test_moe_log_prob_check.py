"""A mixture of experts in a bfloat16 engine: what rounding does is let through, wrong weights are not."""

from __future__ import annotations

import copy
import itertools
import re

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_retool.cluster.log_prob_check import LogProbMismatch
from megatron_retool.config import load_config
from sglang_rollout.engine.weight_sync.tensor import TensorWeightSync
from tests.kit import markov_policy, moe_policy
from tests.kit.forked_engine import ForkedServer
from tests.kit.markov_policy import VOCABULARY
from tests.sglang_rollout.scored_text import compare

pytestmark = pytest.mark.slow
versions = itertools.count(1)


def random_model(seed: int) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(  # type: ignore[call-arg]
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=96,
        moe_intermediate_size=96,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    # The learner's weights, rounded as the engine will hold them.
    return model.to(torch.bfloat16).float()


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory, tokenizer):
    return markov_policy.save(random_model(1), tokenizer, tmp_path_factory.mktemp("moe") / "model")


@pytest.fixture(scope="module")
def config(model_directory):
    engine = ["device=cpu", "dtype=bfloat16", "max_total_tokens=8192", "max_running_requests=8"]
    overrides = [f"rollout.engine.{each}" for each in engine]
    return load_config(None, [f"model.path={model_directory}", *overrides])


@pytest.fixture(scope="module")
def engine(config, model_directory, tmp_path_factory):
    log = tmp_path_factory.mktemp("logs") / "engine.log"
    process = ForkedServer(config.rollout.engine, model_path=model_directory, log_file=log)
    process.start()
    yield process
    process.stop()


@pytest.fixture
def sent(engine, tmp_path):
    """sent(model, leave_out) puts a model's weights into the engine, but those whose names match."""

    def send(model, leave_out: str = "^$"):
        weights = [
            [(name, tensor) for name, tensor in bucket if not re.search(leave_out, name)]
            for bucket in moe_policy.buckets(model, tmp_path / "sent")
        ]
        with TensorWeightSync([engine.base_url], timeout_seconds=60) as sync:
            sync.push(weights, next(versions))
        return model

    return send


def test_rounding_and_flips_of_the_routing_pass(engine, config, tokenizer, sent):
    model = sent(random_model(2))
    metrics = compare(config, tokenizer, engine.base_url, model)
    assert 1e-4 < metrics["weight_sync/log_prob_difference_mean"] < metrics["weight_sync/log_prob_difference_max"]


def test_a_tied_model_whose_output_layer_nothing_fills(engine, config, tokenizer, sent):
    sent(random_model(1))
    tied = random_model(2)
    tied.lm_head.weight = tied.model.embed_tokens.weight
    sent(tied, leave_out="lm_head")
    with pytest.raises(LogProbMismatch, match=r"All of the text is concerned\. Likely: .*tie_word_embeddings"):
        compare(config, tokenizer, engine.base_url, tied)


@pytest.mark.parametrize("name", [r"layers\.1\.self_attn\.v_proj", r"layers\.2\.mlp\.gate\.", r"layers\.3.*down_proj"])
def test_a_tensor_of_other_weights(engine, config, tokenizer, sent, name):
    sent(random_model(1))
    with pytest.raises(LogProbMismatch, match="All of the text is concerned"):
        compare(config, tokenizer, engine.base_url, sent(random_model(2), leave_out=name))


def test_other_rotary_frequencies(engine, config, tokenizer, sent):
    model = sent(random_model(2))
    settings = copy.deepcopy(model.config)
    settings.rope_parameters = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    scaled = Qwen3MoeForCausalLM(settings).eval()
    scaled.load_state_dict(model.state_dict())
    with pytest.raises(LogProbMismatch):
        compare(config, tokenizer, engine.base_url, scaled)
