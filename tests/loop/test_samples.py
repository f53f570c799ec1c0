"""Validation samples as they are printed: nothing cropped, in a log or in a panel."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from megatron_retool.loop.samples import LoggedSample, print_sample, sample_of
from megatron_retool.trajectory import FinishReason, ToolCall, Trajectory
from run_files.steps import question_of

RESPONSE = (
    '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(17*23+5)"}}\n</tool_call><|im_end|>\n'
    "<tool_response>\n396\n</tool_response>\n" + "so the [bold]answer[/] is " * 12 + "x" * 300 + " \\boxed{396}\x1b[0m"
)


def trajectory(**changes: object) -> Trajectory:
    fields: dict[str, object] = {
        "prompt_ids": [1],
        "response_ids": [2],
        "loss_mask": [True],
        "rollout_log_probs": [-0.5],
        "turn_ids": [0],
        "weight_versions": [1],
        "group_id": 0,
        "index": 0,
        "finish_reason": FinishReason.STOP,
        "reward": 1.0,
        "reward_info": {"acc": 1.0, "pred": "396"},
        "tool_calls": [ToolCall("code_interpreter", {}, "ok", 0.1, False)],
        "extra_info": {"ground_truth": 396},
    }
    return Trajectory(**{**fields, **changes})


def printed(sample: LoggedSample, *, terminal: bool) -> str:
    # As the command line makes it: soft-wrapped where the output is no terminal.
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal, soft_wrap=not terminal, no_color=True)
    print_sample(console, "step 5, validation sample 1 of 4", sample)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("terminal", [False, True], ids=["log", "terminal"])
def test_a_sample_is_shown_whole(terminal: bool) -> None:
    text = printed(sample_of(trajectory(), "How much is 17 times 23, plus 5?", RESPONSE), terminal=terminal)
    assert max(map(len, text.splitlines())) <= 80
    assert ("╭" in text) == terminal
    assert terminal or not any(line.endswith(" ") for line in text.splitlines())
    for line in (
        "step 5, validation sample 1 of 4",
        "question: How much is 17 times 23, plus 5?",
        "ground truth: 396",
        "prediction: 396",
        "verdict: right, reward +1",
        "tool calls: code_interpreter ok",
        '{"name": "code_interpreter", "arguments": {"code": "print(17*23+5)"}}',
        "<tool_response>",
    ):
        assert line in text, line
    assert text.count("x") >= 300
    assert text.count("[bold]answer[/]") == 12, "markup in a response is text"
    assert "\\boxed{396}\N{REPLACEMENT CHARACTER}[0m" in text
    assert "…" not in text


def test_verdicts() -> None:
    def verdict(**changes: object) -> str:
        return sample_of(trajectory(**changes), "", "").verdict

    assert verdict(reward=-1.0, reward_info={"acc": 0.0}) == "wrong, reward -1"
    assert verdict(reward=0.4, reward_info={"acc": 0.25}) == "acc 0.25, reward +0.4"
    assert verdict(reward=-1.0, reward_info={}) == "wrong, reward -1"
    assert verdict(reward=-1.0, finish_reason=FinishReason.LENGTH, reward_info={}) == (
        "wrong, ended by length, reward -1"
    )


def test_what_is_missing_is_said() -> None:
    sample = sample_of(trajectory(reward_info={"acc": 0.0}, extra_info={}, tool_calls=[]), "q", "r")
    assert sample == replace(sample, truth="not in the data", prediction=None, tools="none")
    assert "prediction: none was found" in printed(sample, terminal=False)


def test_the_question_is_the_last_user_message() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "second"},
    ]
    assert question_of(messages, "templated") == "second"
    assert question_of([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "templated") == "templated"
    assert question_of([], "templated") == "templated"
