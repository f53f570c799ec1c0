"""Pairs in every form that data sets have, and what of them is trained."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_retool.data.files import DataError
from megatron_retool.data.preference_dataset import PreferenceDataset

ASK = [{"role": "user", "content": "1+1?"}]
RIGHT, WRONG = [{"role": "assistant", "content": "2"}], [{"role": "assistant", "content": "3"}]
FORMS = {
    "texts": {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
    "completions": {"prompt": ASK, "chosen": RIGHT, "rejected": WRONG},
    "completions after a text": {"prompt": "1+1?", "chosen": RIGHT, "rejected": WRONG},
    "conversations": {"chosen": ASK + RIGHT, "rejected": ASK + WRONG},
    "conversations beside a prompt": {"prompt": "not read", "chosen": ASK + RIGHT, "rejected": ASK + WRONG},
    "JSON": {"chosen": json.dumps(ASK + RIGHT), "rejected": json.dumps(ASK + WRONG)},
}


def write(path, rows: list[dict]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def trained(batch, row: int, tokenizer) -> str:
    return tokenizer.decode(batch.response_ids[(batch.sequence_ids == row) & batch.loss_mask])


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_pair(form: str, tokenizer, tmp_path):
    dataset = PreferenceDataset([write(tmp_path / "pairs.parquet", [FORMS[form]])], tokenizer, 256)
    batch = dataset.batch([0])
    assert (len(dataset), len(batch)) == (1, 2)
    assert [trained(batch, row, tokenizer) for row in (0, 1)] == ["2<|im_end|>", "3<|im_end|>"]
    assert str(dataset.counts).startswith("1 pairs")


def test_turns_that_both_sides_have_are_not_trained(tokenizer, tmp_path):
    shared = [*ASK, {"role": "assistant", "content": "wait"}, {"role": "user", "content": "well?"}]
    more = [{"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]
    row = {"chosen": shared + RIGHT + more, "rejected": shared + WRONG}
    batch = PreferenceDataset([write(tmp_path / "pairs.parquet", [row])], tokenizer, 256).batch([0])
    assert trained(batch, 0, tokenizer) == "2<|im_end|>yes<|im_end|>"
    assert trained(batch, 1, tokenizer) == "3<|im_end|>"


def test_pairs_stay_together_and_lengths_count_for_both(tokenizer, tmp_path):
    long = {"prompt": "1+1?", "chosen": "2", "rejected": "3" * 200}
    rows = [{"prompt": f"{n}+0?", "chosen": str(n), "rejected": str(n + 1)} for n in range(5)]
    same = {"prompt": "2+2?", "chosen": "4", "rejected": "4"}
    file = write(tmp_path / "pairs.parquet", [*rows, long, same])
    dataset = PreferenceDataset([file], tokenizer, 64)
    assert (dataset.counts.rows, dataset.counts.kept, dataset.counts.dropped) == (7, 5, 2)
    batch = dataset.batch(np.array([3, 0]))
    assert [trained(batch, row, tokenizer)[0] for row in range(4)] == ["3", "4", "0", "1"]
    cut = PreferenceDataset([file], tokenizer, 64, "truncate")
    assert (cut.counts.kept, cut.counts.truncated, cut.counts.dropped) == (6, 1, 1)
    with pytest.raises(DataError, match=r"row 5, column 'rejected': \d+ tokens, more than max_length=64"):
        PreferenceDataset([file], tokenizer, 64, "error")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chosen": "2"}, "sft.rejected_key"),
        ({"chosen": "2", "rejected": "3"}, "there is no prompt in column 'prompt'"),
        ({"prompt": "1+1?", "chosen": RIGHT, "rejected": [{"content": "3"}]}, "row 0, column 'rejected'"),
        ({"chosen": ASK + RIGHT, "rejected": ASK}, "no assistant's turn"),
        ({"prompt": "1+1?", "chosen": 2, "rejected": 3}, "row 0, column 'chosen'"),
    ],
)
def test_bad_rows_are_named(row: dict, words: str, tokenizer, tmp_path):
    with pytest.raises(DataError) as error:
        PreferenceDataset([write(tmp_path / "pairs.parquet", [row])], tokenizer, 256)
    assert words in str(error.value)
    assert "pairs.parquet" in str(error.value)
