"""A tokenizer and prompts for tests of the loop with the real rollout."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.kit import markov_policy


@pytest.fixture(scope="module")
def tokenizer():
    return markov_policy.build_tokenizer()


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    rows = [
        {
            "data_source": "test",
            "prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
            "reward_model": {"ground_truth": str(number + 1), "style": "rule"},
            "extra_info": {"index": number},
        }
        for number in range(40)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    return tmp_path / "train.parquet"
