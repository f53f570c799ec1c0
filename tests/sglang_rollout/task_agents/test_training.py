"""The agents of examples/, sampled by transformers' engine and trained: every row is judged in its own context."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_retool.algorithms.policy_loss import PolicyLossInputs, policy_loss
from megatron_retool.config import RewardConfig, load_config
from megatron_retool.loop.columns import add_advantages, correct_rollout, split_mini_batches
from megatron_retool.loop.experience import filter_step
from megatron_retool.loop.metrics import rollout_metrics
from megatron_retool.loop.state import TrainerState
from megatron_retool.parity.admission.tiny_model import hf_log_probs
from megatron_retool.rewards.manager import RewardManager
from megatron_retool.rollout_rows import AGENT_KEY, rollouts_of
from megatron_retool.trajectory import TrajectoryBatch
from sglang_rollout.engine.transformers_engine import TransformersEngine
from sglang_rollout.rollout_manager import RolloutManager
from tests.kit import markov_policy
from tests.kit.scripted import Prompt, ScriptedTools
from tests.sglang_rollout.engine.test_transformers_engine import started

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
GROUPS, SIZE = 2, 3


def rollouts(tokenizer, directory, tmp_path, example, **settings):
    config = load_config(
        None,
        [
            f"model.path={directory}",
            f"trainer.runs_dir={tmp_path}",
            "rollout.engine.backend=transformers",
            "rollout.engine.device=cpu",
            "rollout.engine.dtype=float32",
            "rollout.engine.random_seed=0",
            f"rollout.agent={EXAMPLES}/{example}.py:run",
            f"rollout.agent_kwargs={settings}",
            f"rollout.train.n={SIZE}",
            f"data.train_batch_size={GROUPS}",
            f"learner.mini_batch_size={GROUPS * SIZE}",
            "data.max_prompt_length=1500",
            "data.max_response_length=8",
            "algorithm.loss_aggregation=seq-mean-token-mean",
            "algorithm.rollout_correction.rejection=['geometric_ratio 0.999 1.001']",
        ],
    )
    prompts = []
    for group in range(GROUPS):
        prompts.append(Prompt([1, 2], group, {"uid": str(group), "ground_truth": "e"}))
        prompts[-1].messages = [{"role": "user", "content": f"What is {group} + {group}?"}]

    async def scenario():
        engine = TransformersEngine(config)
        async with RolloutManager(config, tokenizer, [started(engine)], ScriptedTools(), engine=engine) as manager:
            return await asyncio.wait_for(manager.generate_groups(prompts, config.rollout.train), 100)

    groups = asyncio.run(scenario())
    with RewardManager(RewardConfig(), tokenizer) as rewards:
        for group in groups:
            rewards.score(group)
    return config, groups


@pytest.mark.parametrize(("example", "segments"), [("openai_agent", 1), ("compaction_agent", 2)])
def test_an_example_is_sampled_and_learns(tokenizer, tmp_path, example, segments):
    pytest.importorskip("openai")
    model = markov_policy.random_model(tokenizer, seed=1)
    directory = markov_policy.save(model, tokenizer, tmp_path / "model")
    settings = {"steps": segments} if example == "compaction_agent" else {}
    config, groups = rollouts(tokenizer, directory, tmp_path, example, **settings)
    rows = [row for group in groups for row in group]
    assert {row.reward_info[AGENT_KEY]["outcome"] for row in rows} == {"finished"}
    assert len(rollouts_of(rows)) == GROUPS * SIZE
    if example == "compaction_agent":
        assert rollout_metrics(rows)["rollout/segments"] == segments
    assert {row.reward for row in rows} <= {0.0, 1.0} and all("result" in row.reward_info[AGENT_KEY] for row in rows)
    # A model that says anything is seldom right: every other rollout counts as such.
    for row in rows:
        row.reward = float(row.index % 2)
    assert filter_step(groups, "reward").kept_groups == [0, 1]

    batch = TrajectoryBatch.from_trajectories(rows)
    with torch.no_grad():
        before, entropy = hf_log_probs(model, batch)
    mask = batch.loss_mask
    # Token in, token out: what the learner's model says of each row is what the engine sampled with.
    np.testing.assert_allclose(before.numpy()[mask], batch.rollout_log_probs[mask], atol=1e-4)
    batch = batch.with_columns(old_log_probs=before, entropy=entropy)
    batch, corrected, _ = correct_rollout(config.learner, config.algorithm, batch, rows, 0)
    assert corrected["rollout_corr/masked_fraction"] == 0.0
    batch, _ = add_advantages(batch, rows, TrainerState.first(config))
    (mini_batch,) = split_mini_batches(config, batch, step=1)
    # Each rollout weighs the same, whatever its number of rows.
    totals = np.bincount(mini_batch.token_rollout_ids, mini_batch.columns["loss_weights"])
    np.testing.assert_allclose(totals, 1 / (GROUPS * SIZE), rtol=1e-5)

    log_probs, _ = hf_log_probs(model, mini_batch)
    names = ("old_log_probs", "advantages", "loss_weights", "importance_weights")
    columns = {name: torch.from_numpy(mini_batch.columns[name]) for name in names}
    sequence_ids = torch.from_numpy(mini_batch.token_rollout_ids)
    inputs = PolicyLossInputs(log_probs, loss_mask=torch.from_numpy(mask), sequence_ids=sequence_ids, **columns)
    policy_loss(inputs, config.algorithm.objective).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.02 * parameter.grad
        after, _ = hf_log_probs(model, mini_batch)
    gain = (columns["advantages"] * columns["loss_weights"] * (after - before))[torch.from_numpy(mask)].sum()
    assert gain > 0
