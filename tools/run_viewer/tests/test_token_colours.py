"""Numbers of tokens as the files have them, their colours, and the text of each token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from run_viewer.columns import KINDS, colour, largest_shown, rejection_reasons, token_columns
from run_viewer.stored_step import StoredResponse
from run_viewer.token_texts import token_texts

ESTIMATES = {
    "old_log_probs": np.log(np.array([0.5, 0.2, 1.0, 0.5], np.float32)),
    "entropy": np.array([0.1, 0.7, 9.0, 0.2], np.float32),
    "advantages": np.array([1, 1, 0, 1], np.float32),
    "importance_weights": np.array([1, 2, 1, 0], np.float32),
    "keep": np.array([1, 0, 1, 1], np.float32),
    "rejected_by": np.array([0, 6, 0, 0], np.float32),
    "routing_flips": np.array([0, 2, 1, np.nan], np.float32),
}


def response() -> StoredResponse:
    return StoredResponse.of_row(
        {
            "group_id": 3, "index": 1, "prompt_ids": [1, 2], "response_ids": [3, 4, 5, 6],
            "loss_mask": [True, True, False, True], "rollout_log_probs": np.log([0.5, 0.8, 1.0, 0.25]),
            "turn_ids": [0, 0, -1, 1], "weight_versions": [7, 7, -1, 8], "finish_reason": "stop", "reward": 1.0,
            "reward_info": "{}", "tool_calls": "[]", "extra_info": "{}",
        }
    )  # fmt: skip


def test_columns_are_those_of_the_files_and_have_no_value_where_a_token_has_none():
    columns = token_columns(response(), ESTIMATES)
    nan = np.nan
    expected = {
        "loss_mask": [1, 1, 0, 1],
        "turn": [0, 0, nan, 1],
        "weight_version": [7, 7, nan, 8],
        "surprise": [0.5, 0.2, nan, 0.75],
        "log_ratio": [0, np.log(0.25), nan, np.log(2)],
        "entropy": [0.1, 0.7, nan, 0.2],
        "advantage": [1, 1, nan, 1],
        "importance_weight": [0, np.log(2), nan, -np.inf],
        "rejected": [0, 1, 0, 0],
        "rejected_by": [nan, 6, nan, nan],
        "routing_flips": [0, 2, 1, nan],
    }
    assert list(columns) == list(expected) == list(KINDS)
    for name, values in expected.items():
        np.testing.assert_allclose(columns[name], values, atol=1e-6, err_msg=name)


def test_reasons_of_a_rejection_are_the_runs_own_rules():
    reasons = rejection_reasons(["geometric_ratio 0.99 1.01", "token_k3 0 1"])
    assert reasons[6] == "token_k3 0 1" and reasons[2] == "the veto" and max(reasons) == 6


def test_without_the_learner_only_the_rollouts_columns_are_there():
    assert set(token_columns(response(), None)) == {name for name, kind in KINDS.items() if not kind.learner}


def test_an_estimate_of_another_length_is_refused():
    with pytest.raises(ValueError, match="3/1: the learner's entropy has 3 entries for 4 response tokens"):
        token_columns(response(), {"entropy": np.zeros(3, np.float32)})


def test_signs_are_told_apart_and_strength_grows_with_the_magnitude():
    kind = KINDS["log_ratio"]
    (more, strong), (less, _) = colour(kind, 2.0, 1.0), colour(kind, -2.0, 1.0)
    assert more != less and strong == 1.0
    assert colour(kind, 0.25, 1.0) == (more, 0.25) and colour(kind, -np.inf, 1.0) == (less, 1.0)
    assert colour(kind, 0.0, 1.0) is None and colour(kind, np.nan, 1.0) is None
    assert colour(KINDS["turn"], 0, 1.0) != colour(KINDS["turn"], 1, 1.0)
    assert colour(KINDS["rejected"], 1, 1.0) and colour(KINDS["rejected"], 0, 1.0) is None


def test_one_wild_token_does_not_take_the_colour_from_all_others():
    values = np.full(1000, 0.01)
    values[0], values[1] = 30.0, np.nan
    assert largest_shown(KINDS["log_ratio"], values) == pytest.approx(0.01)
    assert largest_shown(KINDS["log_ratio"], np.zeros(5)) == largest_shown(KINDS["entropy"], np.full(2, np.nan)) == 1.0
    assert largest_shown(KINDS["log_ratio"], np.r_[np.zeros(999), 5.0]) == 5.0


@settings(deadline=None)  # machines that test may be busy
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@example("\N{REPLACEMENT CHARACTER}")
@example("é\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}東")
def test_the_texts_of_all_tokens_are_the_text(text: str):
    """Bytes as tokens, so that characters are spread over several."""
    ids = list(text.encode())
    texts = token_texts(ids, lambda part: bytes(part).decode(errors="replace"))
    assert len(texts) == len(ids) and "".join(texts) == text


def test_bytes_that_are_no_character_are_marks():
    texts = token_texts([0xFF, 0x41, 0xE2, 0x82], lambda part: bytes(part).decode(errors="replace"))
    assert len(texts) == 4 and "".join(texts).startswith("\N{REPLACEMENT CHARACTER}A\N{REPLACEMENT CHARACTER}")


def test_a_space_that_decoding_drops_at_the_beginning_is_kept():
    words = {1: " one", 2: " two"}
    texts = token_texts([1, 2, 1], lambda part: "".join(words[i] for i in part).removeprefix(" "))
    assert texts == ["one", " two", " one"]
