"""What a row says of its problem's difficulty, and accuracy by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_retool.rewards.difficulty import MAX_GROUPS, difficulties, difficulty_metrics, problem_number
from megatron_retool.trajectory import FinishReason, Trajectory


def groups(source: str, *rows: Mapping[str, Any]) -> list[str | None]:
    return [None if each is None else each.group for each in difficulties([(source, row) for row in rows])]


@pytest.mark.parametrize(
    ("extra_info", "number"),
    [
        ({"index": 0, "ID": "2024-II-4"}, 4),
        ({"index": 0, "id": "2025-I-15"}, 15),
        ({"index": 3, "ID": "1983-11"}, 11),
        ({"index": 0, "Problem Number": 7, "id": 60}, 7),
        ({"index": 0, "problem_idx": "9"}, 9),
        ({"index": 5, "url": "https://artofproblemsolving.com/wiki/index.php/2024_AIME_I_Problems/Problem_12"}, 12),
        ({"index": 14}, 15),
        ({"index": 15}, 1),
        ({"index": 29, "id": "29"}, 15),
        ({"index": 30}, None),
        ({"index": "9a1f"}, None),
        ({"index": True}, None),
        ({"index": 4, "Problem Number": 16}, 5),
        ({}, None),
    ],
)
def test_number_of_a_problem_of_aime(extra_info: dict[str, Any], number: int | None) -> None:
    assert problem_number("aime_2024", extra_info) == number
    assert problem_number("math-ai/AIME25", extra_info) == number
    assert problem_number("gsm8k", extra_info) is None


def test_aime_has_three_groups_in_the_order_of_its_problems() -> None:
    rows = [{"index": index} for index in range(30)]
    found = groups("aime_2025", *rows)
    assert found == [f"problems_{name}" for _ in range(2) for name in ("1-5", "6-10", "11-15") for _ in range(5)]
    orders = [each.order for each in difficulties([("aime_2025", row) for row in rows]) if each is not None]
    assert orders == [*range(1, 16)] * 2


def test_what_the_data_say_goes_before_numbers() -> None:
    assert groups("aime_2024", {"index": 3, "level": "hard"}, {"index": 4, "level": "easy"}) == [
        "level_hard", "level_easy"
    ]  # fmt: skip
    assert groups("math_500", {"level": 5}, {"level": "Level 3"}, {"Level": 2.0}, {"level": "Level ?"}, {}) == [
        "level_5", "level_3", "level_2", "level__", None
    ]  # fmt: skip
    assert groups("x", {"difficulty": {"digits": 3}}, {"difficulty": True}, {"difficulty": float("nan")}) == [None] * 3
    order = difficulties([("x", {"difficulty": word}) for word in ("hard", "olympiad", "easy", "medium")])
    assert [each.order - 1e12 for each in order if each is not None] == [2, 3, 0, 1]


def test_sources_are_told_apart() -> None:
    assert [None if each is None else each.group for each in difficulties([
        ("math", {"level": 1}), ("aime_2025", {"index": 14}), ("math", {"level": 2}), ("gsm8k", {"index": 3})
    ])] == ["level_1", "problems_11-15", "level_2", None]  # fmt: skip


@given(st.lists(st.one_of(st.floats(-1e6, 1e6), st.integers(0, 300), st.text(max_size=8), st.none()), max_size=60))
def test_groups_are_few_and_names_of_metrics(values: list[Any]) -> None:
    found = difficulties([("x", {"difficulty": value}) for value in values])
    names = {each.group for each in found if each is not None}
    assert len(names) <= MAX_GROUPS
    assert all("/" not in name and " " not in name for name in names)
    by_order = sorted((each.order, each.group) for each in found if each is not None and each.order < 1e12)
    runs = [name for place, (_, name) in enumerate(by_order) if not place or by_order[place - 1][1] != name]
    assert len(runs) == len(set(runs)), "a group of numbers is a range of them"


def trajectory(source: str, group: int, accuracy: float, **info: Any) -> Trajectory:
    return Trajectory(
        [1], [2], [True], [-0.5], [0], [0], group, 0, FinishReason.STOP, reward=accuracy,
        reward_info={"acc": accuracy}, extra_info={"data_source": source, **info},
    )  # fmt: skip


def test_accuracy_by_group_is_the_mean_over_prompts_of_the_mean_over_samples() -> None:
    rows = [
        trajectory("aime_2025", 0, 1.0, index=0), trajectory("aime_2025", 0, 0.0, index=0),
        trajectory("aime_2025", 1, 1.0, index=1), trajectory("aime_2025", 1, 1.0, index=1),
        trajectory("aime_2025", 2, 0.0, index=10), trajectory("aime_2025", 2, 0.0, index=10),
        trajectory("math", 3, 1.0, level=5), trajectory("math", 3, 0.0, level=5), trajectory("gsm8k", 4, 1.0),
    ]  # fmt: skip
    expected = {
        "val-aux/aime_2025/acc/problems_1-5/mean@2": 0.75,
        "val-aux/aime_2025/acc/problems_11-15/mean@2": 0.0,
    }
    assert difficulty_metrics(rows) == expected, "one level alone says nothing that the source's mean does not"
    assert difficulty_metrics(rows[::-1]) == expected
    assert difficulty_metrics([]) == {}
