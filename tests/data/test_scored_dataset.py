"""Responses with a teacher's most probable tokens: how they are read, and how a teacher is asked for them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_retool.data import scoring
from megatron_retool.data.files import DataError
from megatron_retool.data.scored_dataset import ScoredDataset
from megatron_retool.data.scoring import Scoring, ScoringCounts, check, score

VOCABULARY = 50
ROW: dict[str, Any] = {
    "prompt_ids": [1, 2, 3],
    "response_ids": [10, 11, 12, 13],
    "loss_mask": [False, True, False, True],
    "top_ids": [[], [11, 7], [], [13, 9, 4]],
    "top_log_probs": [[], [-0.5, -1.5], [], [-1.0, -2.0, -3.0]],
}


def written(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_numbers_stand_beside_their_tokens(tmp_path: Path) -> None:
    other = {**ROW, "response_ids": [20, 21], "loss_mask": [True, True]}
    other |= {"top_ids": [[5], [6]], "top_log_probs": [[0.0], [-1.0]]}
    data = ScoredDataset([written(tmp_path / "rows.jsonl", ROW, other)], VOCABULARY, 64)
    assert str(data.counts) == "2 responses, 12 tokens of which 4 trained"
    batch, top = data.batch([1, 0]), data.top_tokens([1, 0])
    assert batch.response_ids.tolist() == [20, 21, 11, 12, 13], "what comes before the first trained token is prompt"
    assert top.ids.tolist() == [[5, 0, 0], [6, 0, 0], [11, 7, 0], [0, 0, 0], [13, 9, 4]]
    np.testing.assert_array_equal(np.isfinite(top.log_probs).sum(-1), [1, 1, 2, 0, 3])
    assert batch.columns["loss_weights"].tolist() == [0.25, 0.25, 0.25, 0.0, 0.25]


def test_a_long_response_is_cut_with_its_numbers(tmp_path: Path) -> None:
    file = written(tmp_path / "rows.jsonl", ROW)
    data = ScoredDataset([file], VOCABULARY, 6, overlong="truncate")
    assert data.batch([0]).response_ids.tolist() == [11]
    assert data.top_tokens([0]).ids.tolist() == [[11, 7, 0]]
    with pytest.raises(DataError, match="none of the 1 responses fits into max_length=6"):
        ScoredDataset([file], VOCABULARY, 6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_ids": []}, "no tokens"),
        ({"response_ids": [10, 11, 12, 50]}, "column 'response_ids': expected ids of tokens, from 0 to 49"),
        ({"response_ids": ["a", 11, 12, 13]}, "rows.jsonl"),
        ({"loss_mask": [True, True]}, "column 'loss_mask': expected a 0 or 1 for each of the 4"),
        ({"loss_mask": [False] * 4}, "no token is trained"),
        ({"top_ids": [[], [11, 7]]}, "column 'top_ids': expected 4 lists"),
        (
            {"top_ids": [[], [11, 11], [], [13, 9, 4]]},
            "response token 1, column 'top_ids': expected at most 1024 differ",
        ),
        ({"top_ids": [[], [], [], [13, 9, 4]]}, "response token 1, column 'top_log_probs': expected a number for each"),
        ({"top_log_probs": [[], [-0.1, -0.1], [], [-1, -2, -3]]}, "add up to more than 1"),
        ({"top_log_probs": [[], [0.5, -9.0], [], [-1, -2, -3]]}, "expected finite numbers of at most 0"),
        ({"loss_mask": [True] * 4}, "response token 0, column 'top_ids': it is trained, and the teacher says nothing"),
        ({"top_ids": None}, "column 'top_ids'"),
    ],
)
def test_a_wrong_row_is_named(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        ScoredDataset([written(tmp_path / "rows.jsonl", ROW, {**ROW, **changes})], VOCABULARY, 64)
    assert words in str(error.value)


def test_a_missing_column_says_what_writes_it(tmp_path: Path) -> None:
    row = {name: value for name, value in ROW.items() if name != "top_ids"}
    with pytest.raises(DataError, match="column 'top_ids' is missing.*megatron-retool data score"):
        ScoredDataset([written(tmp_path / "rows.jsonl", row)], VOCABULARY, 64)


class Scripted:
    """Says the token after each and the one after that; fails once ``left`` requests are answered."""

    def __init__(self, left: int = 1000) -> None:
        self.left, self.asked = left, list[tuple[list[int], int]]()

    async def likeliest(self, ids: Any, start: int, count: int) -> list[list[tuple[int, float]]]:
        await asyncio.sleep(0)
        if not self.left:
            raise ConnectionError("gone")
        self.left -= 1
        self.asked.append((list(ids), start))
        chances = [math.log(0.6), math.log(0.3)][:count]
        return [[(token + number, chance) for number, chance in enumerate(chances)] for token in ids[start:]]


def rollouts(path: Path, count: int) -> str:
    rows = [
        {
            "prompt_ids": [1, 2, number],
            "response_ids": [10, 11, 12, 13],
            "loss_mask": [False, True, True, False],
            "reward": float(number % 2),
        }
        for number in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def test_a_teacher_is_asked_for_what_is_trained_and_the_files_train(tmp_path: Path) -> None:
    file, teacher = rollouts(tmp_path / "step.parquet", 6), Scripted()
    what = Scoring((file,), "http://teacher", 2, min_reward=1.0)
    counts = asyncio.run(score(what, tmp_path / "out", teacher, lambda counts: None))
    assert (counts.rows, counts.left_out, counts.scored) == (6, 3, 3)
    assert teacher.asked == [([1, 2, number, 10, 11, 12], 4) for number in (1, 3, 5)]
    data = ScoredDataset([str(tmp_path / "out")], VOCABULARY, 64)
    assert data.top_tokens([2]).ids.tolist() == [[11, 12], [12, 13]]
    np.testing.assert_allclose(np.exp(data.top_tokens([2]).log_probs), [[0.6, 0.3]] * 2, rtol=1e-6)


def test_the_same_call_goes_on_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "ROWS", 4)
    what = Scoring((rollouts(tmp_path / "step.parquet", 10),), "http://teacher", 2, None)
    with pytest.raises(ConnectionError):
        asyncio.run(score(what, tmp_path / "out", Scripted(left=6), lambda counts: None))
    teacher, told = Scripted(), list[int]()
    counts = asyncio.run(score(what, tmp_path / "out", teacher, lambda counts: told.append(counts.scored)))
    assert (counts.scored, counts.found, len(teacher.asked), told) == (10, 4, 6, [4, 8, 10])
    assert len(ScoredDataset([str(tmp_path / "out")], VOCABULARY, 64)) == 10
    assert not list((tmp_path / "out").glob(".*")), "no half of a file is left"
    with pytest.raises(DataError, match="has the results of another scoring"):
        asyncio.run(score(dataclasses.replace(what, top_k=3), tmp_path / "out", teacher, lambda counts: None))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thing").touch()
    with pytest.raises(DataError, match="is not empty"):
        asyncio.run(score(what, tmp_path / "other", teacher, lambda counts: None))


def test_faults_are_found_before_the_teacher_is_asked(tmp_path: Path) -> None:
    good = {"prompt_ids": [1], "response_ids": [2]}
    for changes, words in (
        ({"response_ids": []}, "row 1, column 'response_ids'"),
        ({"loss_mask": [1, 0]}, "loss_mask"),
    ):
        file = written(tmp_path / "rows.jsonl", good, {**good, **changes})
        with pytest.raises(DataError, match=words):
            check(Scoring((file,), "http://teacher", 2, None))
    with pytest.raises(DataError, match="column 'reward' is missing.*--min-reward"):
        check(Scoring((written(tmp_path / "rows.jsonl", good),), "http://teacher", 2, 1.0))
    assert ScoringCounts().rows == 0
