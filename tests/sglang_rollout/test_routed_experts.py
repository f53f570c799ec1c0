"""Experts that real engines chose, against those of one fresh forward pass over the whole sequence."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest

from megatron_retool.config import SamplingConfig, load_config
from megatron_retool.routed_experts import is_missing
from sglang_rollout.engine.process import SGLangServer
from sglang_rollout.engine.routed_experts import RoutingShape
from sglang_rollout.rollout_manager import RolloutManager
from tests.sglang_rollout.agent import moe_policy
from tests.sglang_rollout.agent.markov_policy import TOOL_POLICY
from tests.sglang_rollout.scripted import Prompt, ScriptedTools

SHAPE = RoutingShape(moe_policy.LAYERS, moe_policy.K, moe_policy.EXPERTS)
versions = itertools.count(1)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory, tokenizer):
    directory = tmp_path_factory.mktemp("moe") / "model"
    return moe_policy.saved(moe_policy.moe_model(tokenizer, TOOL_POLICY, seed=1), tokenizer, directory)


@pytest.fixture(scope="module")
def config(model_directory):
    return load_config(
        None,
        [
            f"model.path={model_directory}",
            "learner.routing_replay=rollout",
            "rollout.engine.device=cpu",
            "rollout.engine.dtype=float32",
            "rollout.engine.random_seed=7",
            "rollout.engine.max_total_tokens=32768",
            "rollout.engine.max_running_requests=64",
            "rollout.engine.extra_args=[--chunked-prefill-size, '64']",
            "rollout.multi_turn.max_tool_response_tokens=48",
            "data.max_response_length=400",
        ],
    )


@pytest.fixture(scope="module")
def engine(config, model_directory, tmp_path_factory):
    log = tmp_path_factory.mktemp("logs") / "engine.log"
    process = SGLangServer(config.rollout.engine, model_path=model_directory, log_file=log, routed_experts=True)
    process.start()
    yield process
    process.stop()


def check(trajectory, model) -> np.ndarray:
    """Compare the known rows; which are missing."""
    ids = [*trajectory.prompt_ids.tolist(), *trajectory.response_ids.tolist()]
    logits = moe_policy.router_logits(model, ids)
    rows = trajectory.routed_experts
    missing = is_missing(rows)
    assert not (moe_policy.differing(rows, logits) & ~missing).any()
    # The comparison is worth something: rows of the next token would not pass.
    assert moe_policy.differing(np.roll(rows, -1, 0), logits)[~missing].mean() > 0.5
    return missing


def make_prompts(tokenizer, count: int) -> list[Prompt]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 6*7? " * 6}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [Prompt(ids, group_id, {"data_source": "test"}) for group_id in range(count)]


def test_rows_of_several_turns_are_those_of_one_forward_pass(engine, config, tokenizer):
    model = moe_policy.moe_model(tokenizer, TOOL_POLICY, seed=1)

    async def scenario():
        async with RolloutManager(config, tokenizer, [engine.base_url], ScriptedTools()) as manager:
            groups = await manager.generate_groups(make_prompts(tokenizer, 4), SamplingConfig(n=4))
            return groups, manager.statistics

    groups, statistics = asyncio.run(scenario())
    trajectories = [trajectory for group in groups for trajectory in group]
    assert max(trajectory.turn_ids.max() for trajectory in trajectories) >= 2
    assert statistics.cached_tokens > 0.5 * statistics.prompt_tokens
    for trajectory in trajectories:
        missing = check(trajectory, model)
        unsent = np.flatnonzero(trajectory.loss_mask)[-1] + len(trajectory.prompt_ids)
        assert missing.tolist() == [False] * unsent + [True] * (len(missing) - unsent)
