"""What tests/parity leaves out, critic and losses over whole sequences, is the same in every layout."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_retool.config import AlgorithmConfig, Config, LearnerConfig, OptimizerConfig, RolloutCorrectionConfig
from megatron_retool.parity.admission.tiny_model import random_batch
from megatron_retool.parity.ranks import run_ranks
from tests.kit import tiny_models

LENGTHS = [(5, 30), (9, 3), (4, 22), (13, 41), (6, 1), (8, 17)]
OPTIMIZER = OptimizerConfig(lr=1e-2, clip_grad=0.5, eps=1e-6)
LAYOUTS: dict[int, dict[str, Any]] = {
    1: {"one": {}},
    2: {
        "data": {},
        "context": {"context_parallel_size": 2},
        "dynamic_context": {"context_parallel_size": 2, "dynamic_context_parallel": True},
        "pipeline": {"pipeline_model_parallel_size": 2},
        "tensor": {"tensor_model_parallel_size": 2},
        "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    },
}
# Bypass mode rejects by the geometric ratio in the loss, and GSPO's ratio is one of whole responses.
ALGORITHM = AlgorithmConfig(
    policy_loss="gspo",
    rollout_correction=RolloutCorrectionConfig(
        mode="none", rejection=["geometric_ratio 0.9 1.1"], bypass_old_log_probs=True
    ),
)


def learn(world_size, name, hf_dir):
    from megatron_retool.learner.learner import Learner

    learner = LearnerConfig(
        world_size=world_size, dtype="float32", max_tokens_per_micro_batch=96, **LAYOUTS[world_size][name]
    )
    config = Config(learner=learner, algorithm=ALGORITHM)
    batch = random_batch(LENGTHS)
    rng = np.random.default_rng(2)
    count = batch.num_response_tokens
    weights = batch.loss_mask / batch.loss_mask.sum()

    critic = Learner(config, optimizer=OPTIMIZER, total_optimizer_steps=9, hf_dir=hf_dir, role="critic")
    returns = rng.normal(0, 1, count)
    for _ in range(2):
        columns = {"values": critic.values(batch), "returns": returns, "loss_weights": weights}
        critic_metrics = critic.update_critic(batch.with_columns(**columns))
    values = critic.values(batch)

    actor = Learner(config, optimizer=OPTIMIZER, total_optimizer_steps=9, hf_dir=hf_dir)
    old = actor.log_probs(batch)["log_probs"] + np.repeat([0.0, 0.05, 0.5, -0.03, 0.0, 0.5], batch.response_lengths)
    columns = {"old_log_probs": old, "advantages": rng.normal(0, 1, count), "loss_weights": weights}
    actor_metrics = actor.update(batch.with_columns(**columns))
    metrics = {key: value for key, value in (critic_metrics | actor_metrics).items() if "seqlen" not in key}
    log_probs = actor.log_probs(batch)["log_probs"]
    actor.reset_optimizer(replace(OPTIMIZER, skip_grad_norm=metrics["actor/grad_norm"] / 1e3), 9)
    skipped = actor.update(batch.with_columns(**columns))["actor/skipped_by_grad_norm"]
    after = actor.log_probs(batch)["log_probs"]
    return {**metrics, "values": values, "log_probs": log_probs, "skipped": skipped, "after the skip": after}


def learn_in_all(world_size, hf_dir):
    return {name: learn(world_size, name, hf_dir) for name in LAYOUTS[world_size]}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    directory = tmp_path_factory.mktemp("layouts")
    tiny_models.hf_model("qwen2", num_hidden_layers=2).save_pretrained(directory / "hf")
    return {
        name: answer
        for world_size in LAYOUTS
        for name, answer in run_ranks(
            learn_in_all, world_size, directory / str(world_size), world_size, directory / "hf"
        ).items()
    }


@pytest.mark.parametrize("layout", LAYOUTS[2])
def test_critic_and_whole_sequence_losses_are_the_same(found, layout):
    one = found["one"]
    assert np.abs(one["values"]).max() > 1e-3 and 0 < abs(one["actor/ppo_kl"]) < 0.1  # two are rejected
    assert found[layout].keys() == one.keys() and one["skipped"] == 1.0
    np.testing.assert_array_equal(found[layout]["after the skip"], found[layout]["log_probs"])
    for name, expected in one.items():
        np.testing.assert_allclose(found[layout][name], expected, rtol=2e-4, atol=2e-5, err_msg=name)
