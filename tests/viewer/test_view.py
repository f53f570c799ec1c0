"""`megatron-retool view --text` on a run on disk, and on one whose trajectories mean harm."""

from __future__ import annotations

import pytest

from megatron_retool.__main__ import main
from megatron_retool.algorithms.rejection_rules import FIRST_RULE, NOT_FINITE, OVERLONG, VETO, WEIGHT_MASK
from run_viewer.columns import rejection_reasons


def view(capsys, *arguments: str) -> str:
    assert main(["view", "--text", *arguments]) == 0
    return capsys.readouterr().out


def test_a_step_is_shown_by_groups(run_dir, capsys):
    lines = view(capsys, str(run_dir)).splitlines()
    assert lines[0] == "step 7: 4 responses"
    (five,) = [line for line in lines if "│     5 │" in line]
    (six,) = [line for line in lines if "│     6 │" in line]
    assert "░█" in five and "yes" in five and "no" in six and "What is 6 * 7?" in six and " 1.0 " in six


def test_a_response_is_shown_as_it_was_sampled_and_sends_no_command_to_the_terminal(run_dir, capsys):
    output = view(capsys, str(run_dir), "--step", "7", "--group", "5", "--index", "1", "--color", "log_ratio")
    assert "\x1b" not in output and "\x07" not in output
    assert "[bold]not bold[/bold]" in output and "Grüße 東京<|im_end|>" in output and "⏎\n" in output
    assert "reward: +1, accuracy 1, ended by stop" in output and "ground truth: 42" in output
    assert "call 0: code_interpreter timeout, 2.50 s, 12 tokens, cut" in output
    # The learner's log-probs are 0, the engine's -0.2.
    assert "0.2 to 0.2, full colour at 0.2" in output and "not looked at" not in output


def test_colours_reach_a_terminal(run_dir, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    assert "\x1b[30;48;2;240;228;66m" in view(capsys, str(run_dir), "--group", "5", "--color", "rejected")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--step", "8"], "has no step_000008.parquet: --step can be one of 7 to 7"),
        (["--group", "4"], "--group 4: step 7 has groups 5, 6"),
        (["--group", "5", "--index", "9"], "--index 9: group 5 of step 7 has responses [0, 1]"),
        (["--group", "5", "--color", "mood"], "--color 'mood' is not one of loss_mask, turn"),
        (["--group", "6", "--color", "entropy"], "the learner has not computed it for response 6/0"),
    ],
)
def test_what_is_not_there_is_named(run_dir, capsys, arguments, said):
    assert main(["view", "--text", str(run_dir), *arguments]) == 1
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("more", [[], ["--export", "page.html"]])
def test_what_belongs_to_text_is_refused_without_it(run_dir, capsys, more):
    assert main(["view", str(run_dir), "--color", "entropy", *more]) == 1
    assert "--color is of --text: add --text" in " ".join(capsys.readouterr().out.split())


def test_a_damaged_file_is_named(run_dir, capsys):
    path = run_dir / "rollouts" / "step_000007.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    assert main(["view", "--text", str(run_dir)]) == 1
    assert "step_000007.parquet" in capsys.readouterr().out.replace("\n", "")


def test_reasons_of_a_rejection_have_the_numbers_that_the_correction_writes():
    reasons = rejection_reasons(["the first rule"])
    assert [reasons[number] for number in (NOT_FINITE, VETO, WEIGHT_MASK, OVERLONG, FIRST_RULE)] == [
        "a log-prob is not finite",
        "the veto",
        "the mask of importance weights",
        "overlong filtering",
        "the first rule",
    ]
