"""benchmarks/straggler_demo.py without a run: its modes, who is made long and how, and what it makes of the metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from benchmarks import straggler_demo
from benchmarks.straggler_demo import GO_ON, LongTail
from megatron_retool.config import MultiTurnConfig, load_config
from megatron_retool.trajectory import FinishReason
from sglang_rollout.agent.agents import check_agent
from sglang_rollout.agent.loop import AgentSetup
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.engine.base import GenerateResult
from tests.kit.markov_policy import ANSWER, CALL, build_tokenizer
from tests.kit.scripted import ScriptedTools

END = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def agent(tokenizer: Any, share: float, tokens: int, longest: int = 2000) -> LongTail:
    config = MultiTurnConfig(max_tool_response_tokens=60, max_assistant_turns=2)
    return LongTail(AgentSetup(config, tokenizer, ScriptedTools(), longest), share=share, tokens=tokens)


def led(tokenizer: Any, loop: LongTail, said: str) -> TrajectoryState:
    async def generate(state: TrajectoryState, most: int, deadline: float) -> GenerateResult:
        ids = tokenizer.encode(said + END, add_special_tokens=False)
        reason = "stop" if len(ids) <= most else "length"
        ids = ids[:most]
        return GenerateResult(ids, [-0.1] * len(ids), [1] * len(ids), reason, ids[-1] if reason == "stop" else None)

    state = TrajectoryState(tokenizer.encode("user\n", add_special_tokens=False), group_id=3, index=1)
    assert asyncio.run(loop.run(state, generate))
    return state


@pytest.mark.parametrize("said", [ANSWER, CALL])
def test_a_long_response_goes_on_until_it_has_its_tokens(tokenizer: Any, said: str) -> None:
    short = led(tokenizer, agent(tokenizer, 0.0, 300), said)
    long = led(tokenizer, agent(tokenizer, 1.0, 300), said)
    assert (
        short.finish_reason is long.finish_reason is (FinishReason.STOP if said == ANSWER else FinishReason.TOOL_LIMIT)
    )
    assert len(short.response_ids) < 100 and 300 <= len(long.response_ids) < 400
    text = tokenizer.decode(long.response_ids)
    assert GO_ON in text and text.startswith(tokenizer.decode(short.response_ids))
    trajectory = long.to_trajectory()
    assert trajectory.turn_ids.max() == text.count(said) - 1 > 3
    assert GO_ON not in tokenizer.decode(trajectory.response_ids[trajectory.loss_mask].tolist())
    assert led(tokenizer, agent(tokenizer, 1.0, 300, longest=120), said).finish_reason is FinishReason.LENGTH


def test_the_same_responses_are_long_in_every_run(tokenizer: Any) -> None:
    first, second = agent(tokenizer, 0.1, 300), agent(tokenizer, 0.1, 300)
    drawn = [(group, index) for group in range(200) for index in range(8) if first.is_long(group, index)]
    assert drawn == [(group, index) for group in range(200) for index in range(8) if second.is_long(group, index)]
    assert 120 < len(drawn) < 200


@pytest.mark.parametrize("refill", [False, True])
def test_every_mode_is_a_configuration(tmp_path: Path, tokenizer: Any, refill: bool) -> None:
    options = straggler_demo.parse(
        ["--base", str(tmp_path), "--over-sampling", "1.5", *(["--refill"] if refill else [])]
    )
    tokenizer.save_pretrained(tmp_path / "model")
    found = straggler_demo.modes(options.over_sampling, options.max_age, refill)
    configs = [
        load_config(
            options.config,
            [*straggler_demo.settings_of(options, tmp_path, "x", mode), f"model.path={tmp_path / 'model'}"],
        )
        for mode in found.values()
    ]
    check_agent(configs[0].rollout)
    longest = options.tail_tokens + configs[0].data.max_prompt_length
    assert longest <= configs[0].rollout.engine.context_length
    told = [
        (partial.enable and partial.over_sampling_factor, config.rollout.staleness)
        for config in configs
        for partial in [config.rollout.partial]
    ]
    assert told == [(False, 0), *([(1, 0)] if refill else []), (1.5, 0), (False, 1), (1.5, 1)]
    assert all(config.algorithm.dynamic_sampling.enable is refill for config in configs)


def test_ratios_are_against_the_plain_mode() -> None:
    def rows(step: float) -> list[dict[str, float]]:
        names = ("timing_s/gen", "perf/total_num_tokens", "response_length/mean", "rollout/dropped_trajectories")
        warm = {"step": 1, "timing_s/step": 999.0} | dict.fromkeys(names, 999.0)
        return [warm, *({**warm, "step": number, "timing_s/step": step, "timing_s/gen": 2.0,
                         "perf/total_num_tokens": 100.0, "response_length/mean": 70.0,
                         "rollout/dropped_trajectories": 0.0} for number in (3, 4))]  # fmt: skip

    found = {name: straggler_demo.figures_of(rows(step)) for name, step in (("plain", 6.0), ("other", 4.0))}
    _, _, plain, other = straggler_demo.table(found)
    assert plain == "| plain | 2.0 s | 6.0 s | 1.00 x | 1.00 x | 70 | 0.00 | 0.0 |"
    assert other == "| other | 2.0 s | 4.0 s | 1.50 x | 1.50 x | 70 | 0.00 | 0.0 |"


def test_runs_that_are_too_short_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        straggler_demo.parse(["--base", "x", "--steps", "2"])
    assert "the first 2 do not count" in capsys.readouterr().err
