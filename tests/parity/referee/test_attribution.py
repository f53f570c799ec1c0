"""The referee's statistics name the side, the place and the layer that was made wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_retool.parity.referee.attribution import (
    Judged,
    Routing,
    layer_rows,
    relative_differences,
    response_rows,
    routing_statistics,
    split_rows,
)
from megatron_retool.parity.referee.verdict import verdict

TOKENS = 400
STAGES = ["embedding", "layer 1", "layer 2", "layer 3", "layer 4", "final norm"]


@pytest.fixture
def judged():
    """20 responses of 20 tokens, half of each a second turn; both sides off by float32's rounding."""
    rng = np.random.default_rng(0)
    referee = np.log(rng.uniform(0.001, 1.0, TOKENS))
    rounding = rng.normal(0, 1e-7, (4, TOKENS))
    positions = np.tile(np.arange(20), 20)
    return Judged(
        engine=referee + rounding[0],
        learner=referee + rounding[1],
        referee=referee,
        turns=(positions >= 10).astype(np.int64),
        positions=positions,
        responses=np.repeat(np.arange(20), 20),
        names=[(number // 4, number % 4) for number in range(20)],
        engine_format=referee + rounding[2],
        learner_format=referee + rounding[3],
    )


def by_place(judged):
    return {(row["split"], row["category"]): row for row in split_rows(judged)}


def test_rounding_is_nobodys_fault(judged):
    rows = by_place(judged)
    assert rows["all", "all"]["side"] == "neither" and rows["all", "all"]["engine_share"] is None
    assert not rows["all", "all"]["engine"]["beyond_format"]
    assert "agree with the referee" in verdict(split_rows(judged), None, None)[0]


@pytest.mark.parametrize("side", ["engine", "learner"])
def test_the_side_the_bin_and_the_turn_are_named(judged, side):
    wrong = (np.exp(judged.referee) < 0.1) & (judged.turns == 1)
    judged = replace(judged, **{side: getattr(judged, side) + 0.02 * wrong})
    rows = by_place(judged)
    other = "learner" if side == "engine" else "engine"
    assert rows["all", "all"]["side"] == side and rows["all", "all"][side]["beyond_format"]
    assert not rows["all", "all"][other]["beyond_format"]
    assert rows["all", "all"]["engine_share"] == pytest.approx(float(side == "engine"), abs=1e-4)
    assert rows["turn", "1"]["side"] == side and rows["turn", "0"]["side"] == "neither"
    assert rows["probability", "0.01–0.1"]["side"] == side and rows["probability", "0.5–0.9"]["side"] == "neither"
    sentences = verdict(split_rows(judged), None, None)
    assert f"the mismatch is the {side}'s (100 %" in sentences[0]
    assert f"the {side} is further off than its number format explains" in " ".join(sentences)
    assert f"the {other} is no further off" in " ".join(sentences)
    assert any("furthest off at" in sentence and "turn 1" in sentence for sentence in sentences)


def test_the_worst_responses_come_first(judged):
    engine = judged.engine.copy()
    engine[judged.responses == 7] += 0.01
    engine[(judged.responses == 7) & (judged.positions == 13)] += 0.5
    (first, second) = response_rows(replace(judged, engine=engine), limit=2)
    assert (first["group_id"], first["index"], first["worst_position"], first["side"]) == (1, 3, 13, "engine")
    assert second["side"] == "neither" and second["tokens"] == 20


def test_two_sides_that_are_wrong_alike_are_not_called_right(judged):
    error = np.random.default_rng(1).normal(0, 0.1, TOKENS)
    alike = replace(judged, engine=judged.engine + error, learner=judged.learner + error)
    assert "not with the referee" in verdict(split_rows(alike), None, None)[0]
    rng = np.random.default_rng(2)
    both = replace(alike, engine=judged.engine + error, learner=judged.learner + rng.normal(0, 0.1, TOKENS))
    assert by_place(both)["all", "all"]["side"] == "both"
    assert "comes from both" in verdict(split_rows(both), None, None)[0]


def test_positions_fall_into_octaves(judged):
    positions = np.arange(TOKENS)
    names = [row["category"] for row in split_rows(replace(judged, positions=positions)) if row["split"] == "position"]
    assert names == ["0–15", "16–31", "32–63", "64–127", "128–255", "256–511"]
    tokens = [row["tokens"] for row in split_rows(replace(judged, positions=positions)) if row["split"] == "position"]
    assert tokens == [16, 16, 32, 64, 128, 144]


def hidden_states(rng, error, first=None):
    """Three of [tokens, stages, h]: referee, learner and yardstick; the learner is wrong from stage ``first`` on."""
    referee = rng.normal(0, 1, (100, len(STAGES), 16))
    learner, yardstick = (referee * (1 + rng.normal(0, 1e-3, referee.shape)) for _ in range(2))
    if first is not None:
        learner[:, first:] += error * rng.normal(0, 1, learner[:, first:].shape)
    return referee, learner, yardstick


@pytest.mark.parametrize("first", [0, 2, 5])
def test_the_first_layer_that_is_off_is_named(first):
    referee, learner, yardstick = hidden_states(np.random.default_rng(0), 0.05, first)
    rows = layer_rows(STAGES, relative_differences(learner, referee), relative_differences(yardstick, referee))
    assert [row["off"] for row in rows] == [number >= first for number in range(len(STAGES))]


def test_rounding_of_the_number_format_is_not_off():
    referee, learner, yardstick = hidden_states(np.random.default_rng(0), 0.0)
    rows = layer_rows(STAGES, relative_differences(learner, referee), relative_differences(yardstick, referee))
    assert not any(row["off"] for row in rows)


def test_a_few_tokens_with_other_experts_are_not_a_layer_that_is_off(judged):
    referee, learner, yardstick = hidden_states(np.random.default_rng(0), 0.0)
    other = np.zeros((2, 100, 4), bool)
    other[0, :8, 1] = other[1, 40:46, 1] = True
    learner[:8, 2:] += 1.0
    differences = relative_differences(learner, referee), relative_differences(yardstick, referee)
    assert layer_rows(STAGES, *differences)[2]["off"]
    assert not any(row["off"] for row in layer_rows(STAGES, *differences, (other[0], other[1])))
    other[0, :, 2] = True  # the whole layer's router is wrong
    assert [row["off"] for row in layer_rows(STAGES, *differences, (other[0], other[1]))][:4] == [False] * 3 + [True]


def test_the_share_of_routing(judged):
    rng = np.random.default_rng(0)
    own_experts = np.stack([rng.permutation(8)[:2] for _ in range(TOKENS * 3)]).reshape(TOKENS, 3, 2)
    engine_experts = own_experts[..., ::-1].copy()  # the same ones in another order
    engine_experts[:40, 1, 0] = 8
    jump = np.zeros(TOKENS)
    jump[:40] = rng.normal(0, 0.3, 40)
    known = np.ones(TOKENS, bool)
    known[-20:] = False
    engine_experts[-20:] = 9  # unknown: does not count
    routing = Routing(judged.referee, judged.referee + jump, own_experts, engine_experts, known, own_experts)
    found = routing_statistics(judged.engine + jump, routing)
    assert found["share_of_squared_error"] == pytest.approx(1.0, abs=1e-4)
    assert found["tokens_with_other_experts"] == pytest.approx(40 / 380)
    assert found["by_layer"] == pytest.approx([0, 40 / 380, 0])
    assert found["mean_abs_forced"] < 1e-6 < found["mean_abs_other_experts"]
    assert found["mean_abs_same_experts"] < 1e-6 and found["learner_tokens_with_other_experts"] == 0.0
    noise = rng.normal(0, 0.05, TOKENS)
    found = routing_statistics(judged.engine + jump + noise, routing)
    expected = np.square(jump).sum() / (np.square(jump).sum() + np.square(noise).sum())
    assert found["share_of_squared_error"] == pytest.approx(expected, abs=0.1)
    sentence = verdict(split_rows(judged), None, found)[-1]
    assert "of the engine's squared error is routing: 10.5 % of tokens chose other experts" in sentence
