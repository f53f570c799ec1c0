"""benchmarks/trl_grpo.py without TRL: what it tells TRL, what it serves, and what it makes of the numbers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import trl_grpo
from benchmarks.trl_grpo import OURS, TRL
from benchmarks.trl_grpo_service import around_result, as_trajectory, turn_header, turns_of
from megatron_retool.config import ConfigError, RewardConfig, load_config
from megatron_retool.data.prompts import PromptRow, PromptSource
from megatron_retool.rewards.manager import RewardManager
from sglang_rollout.agent.tool_call_formats import HermesFormat
from sglang_rollout.agent.turn_glue import TurnGlue
from tests.kit.markov_policy import ANSWER, CALL, build_tokenizer
from tools.registry import ToolRegistry

CONFIG = trl_grpo.ROOT / "configs" / "demo_cpu.yaml"
NO_FILTER = "algorithm.dynamic_sampling.enable=false"
PROMPT = PromptRow([1], 7, "uid", "demo", "42")


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def glue(tokenizer) -> TurnGlue:
    return TurnGlue(tokenizer, HermesFormat(), max_result_tokens=60)


def test_settings_of_the_demo():
    settings = trl_grpo.grpo_settings(load_config(CONFIG, [NO_FILTER]), steps=10)
    assert {name: settings[name] for name in ("max_steps", "steps_per_generation", "per_device_train_batch_size")} == {
        "max_steps": 20, "steps_per_generation": 2, "per_device_train_batch_size": 64
    }  # fmt: skip
    assert (settings["epsilon"], settings["epsilon_high"], settings["loss_type"]) == (0.2, 0.28, "dapo")
    assert (settings["learning_rate"], settings["adam_beta1"], settings["adam_beta2"]) == (1e-4, 0.9, 0.95)
    assert (settings["max_completion_length"], settings["max_tool_calling_iterations"]) == (160, 3)
    assert (settings["top_k"], settings["min_p"], settings["bf16"]) == (0, None, False)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.dynamic_sampling.enable=true", "dynamic_sampling.enable=True: this comparison is for False alone"),
        ("algorithm.policy_loss=gspo", "policy_loss='gspo'"),
        ("rollout.multi_turn.tools=[code_interpreter,search]", "tools="),
    ],
)
def test_what_trl_cannot_be_told_is_refused(override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        trl_grpo.grpo_settings(load_config(CONFIG, [NO_FILTER, override]), steps=1)


def test_prompts_are_those_of_a_run_in_their_order(tmp_path, tokenizer):
    rows = [
        {
            "data_source": "demo",
            "prompt": [{"role": "user", "content": f"{number}?"}],
            "reward_model": {"ground_truth": str(number)},
        }
        for number in range(7)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    files = f"data.train_files=['{tmp_path / 'train.parquet'}']"
    sizes = ["data.train_batch_size=3", "data.max_prompt_length=1000", "trainer.seed=5"]
    config = load_config(CONFIG, [NO_FILTER, files, *sizes, "learner.mini_batch_size=24"])
    drawn = trl_grpo.draw_prompts(config, tokenizer, steps=3)
    schemas = SimpleNamespace(schemas=lambda _: ToolRegistry.from_config(config.tools, []).schemas())
    source = PromptSource(config.data, tokenizer, schemas, seed=5)
    steps = [source.next_batch(3) for _ in range(3)]
    assert [row.uid for row in drawn] == [row.uid for step in steps for row in step]
    trl_grpo.write_prompts(drawn, tmp_path / "prompts.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == list(range(9))
    assert [line["messages"] for line in lines] == [row.messages for row in drawn]
    assert "code_interpreter" in tokenizer.decode(lines[0]["prompt_ids"])


def test_a_result_is_told_apart_from_the_template_around_it(tokenizer, glue):
    before, after = around_result(tokenizer, glue)
    assert before.endswith("<tool_response>\n") and after.startswith("\n</tool_response>")
    for result in ("", "42", "Error: 1\n", " ", "x" * 500):
        text = tokenizer.decode(glue.render([result]).ids).removeprefix(before).removesuffix(after)
        assert text == result or len(result) > 60 and "left out" in text


def test_turns_of_a_response(tokenizer, glue):
    call, answer = (tokenizer.encode(text) + [glue.end_of_turn_id] for text in (CALL, ANSWER))
    between = glue.render(["42"]).ids
    header = turn_header(glue)
    turns = turns_of([*call, *between, *answer], glue.end_of_turn_id, header)
    assert turns == [0] * len(call) + [-1] * len(between) + [1] * len(answer)
    assert turns_of(call[:-1], glue.end_of_turn_id, header) == [0] * (len(call) - 1)


def test_the_reward_is_that_of_the_last_turn(tokenizer, glue):
    end, header = glue.end_of_turn_id, turn_header(glue)
    call, answer = (tokenizer.encode(text) + [end] for text in (CALL, ANSWER))
    between = glue.render([ANSWER]).ids
    responses = [answer, [*call, *between, *answer], [*call, *between], answer[:-1]]
    trajectories = [as_trajectory(PROMPT, index, ids, end, header) for index, ids in enumerate(responses)]
    with RewardManager(RewardConfig(), tokenizer) as rewards:
        rewards.score(trajectories)
    assert [trajectory.reward for trajectory in trajectories] == [1, 1, -1, 1]
    assert [trajectory.finish_reason for trajectory in trajectories] == ["stop", "stop", "length", "length"]
    assert int(trajectories[1].loss_mask.sum()) == len(call) + len(answer)


def result(seconds: list[float], accuracy: dict[int, float]) -> dict:
    steps = [
        {"step": step, "seconds": each, "experience_seconds": each / 2, "response_tokens": 500}
        for step, each in enumerate(seconds, start=1)
    ]
    return {"steps": steps, "accuracy": accuracy}


def test_speed_and_accuracy_of_both_sides():
    rounds = [
        {OURS: result([9, 1, 2], {0: 0.25, 3: 0.5}), TRL: result([50, 10, 20], {0: 0.25, 3: 0.25})},
        {OURS: result([9, 3, 2], {0: 0.25, 3: 1.0}), TRL: result([30, 20, 20], {0: 0.25, 3: 0.75})},
    ]
    ours = trl_grpo.speed(rounds, OURS)
    assert (ours["steps"], ours["median_seconds"], ours["total_seconds"], ours["seconds_per_1000_tokens"]) == (
        4, 2, 8, 4
    )  # fmt: skip
    lines = trl_grpo.speed_lines(rounds)
    assert lines[1].split()[-3:] == ["2.00", "20.00", "10.00"]
    table = trl_grpo.accuracy_lines(rounds)
    assert table[1].split() == ["0", "0.0", "0.250", "0.0", "0.250"]
    assert table[2].split() == ["3", "13.0", "0.750", "75.0", "0.500"]


def test_validated_steps():
    assert trl_grpo.validated_steps(5, 2) == [0, 2, 4, 5]
    assert trl_grpo.validated_steps(4, 2) == [0, 2, 4]


def test_an_environment_that_is_none_is_named(tmp_path):
    assert trl_grpo.pinned()["trl"]
    (tmp_path / "venv").mkdir()
    with pytest.raises(SystemExit, match="is no environment of Python"):
        trl_grpo.prepare_environment(tmp_path / "venv")


def test_a_process_that_fails_shows_the_end_of_its_output(tmp_path):
    with pytest.raises(SystemExit, match=r"TRL's trainer failed with exit code 3(.|\n)*it broke"):
        trl_grpo.run("TRL's trainer", ["sh", "-c", "echo it broke; exit 3"], tmp_path / "log")
