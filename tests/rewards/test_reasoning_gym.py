"""Every task's own verifier, with the entries that the library itself makes."""

from __future__ import annotations

import json
import sys

import pytest

from megatron_retool.data.prompt_files import read_prompts
from megatron_retool.rewards import reasoning_gym

TASKS = [
    "base_conversion", "basic_arithmetic", "chain_sum", "complex_arithmetic", "countdown", "family_relationships",
    "gcd", "knights_knaves", "lcm", "letter_counting", "polynomial_equations", "prime_factorization", "spell_backward",
    "sudoku", "syllogism", "word_sorting",
]  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_the_tasks_own_verifier_decides(task):
    prompts, _ = read_prompts([f"reasoning_gym:{task}?size=3&seed=1"])
    for prompt in prompts:
        # As it comes out of a stored trajectory: through JSON.
        extra_info = json.loads(json.dumps(prompt.extra_info))

        def scored(answer: str, prompt=prompt, extra_info=extra_info) -> dict:
            info = {**extra_info, "final_turn": f"So: <answer>{answer}</answer>"}
            return reasoning_gym.compute_score(prompt.data_source, "not read", prompt.ground_truth, info)

        assert scored(prompt.ground_truth) == {"score": 1.0, "acc": 1.0, "pred": prompt.ground_truth}
        assert scored("no idea")["acc"] == 0.0


def test_metadata_may_be_json_text():
    (prompt, *_), _ = read_prompts(["reasoning_gym:countdown?size=1&seed=1"])
    info = {"metadata": json.dumps(prompt.extra_info["metadata"]), "final_turn": f"\\boxed{{{prompt.ground_truth}}}"}
    assert reasoning_gym.compute_score("reasoning_gym/countdown", "", prompt.ground_truth, info)["acc"] == 1.0


def test_an_unknown_task_is_said():
    with pytest.raises(ValueError, match="nothing"):
        reasoning_gym.compute_score("reasoning_gym/nothing", "\\boxed{7}", "7", {})


def test_reasoning_gym_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    reasoning_gym._verifier.cache_clear()
    with pytest.raises(ImportError, match="needs the package reasoning-gym"):
        reasoning_gym.compute_score("reasoning_gym/chain_sum", "\\boxed{7}", "7", {})
