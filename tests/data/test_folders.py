"""Folders and patterns of data files, as data sets are published."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_retool.data.folders import DataError, data_files
from megatron_retool.data.prompt_files import read_prompts


def make(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


@pytest.mark.parametrize(
    ("there", "given", "expected"),
    [
        (["README.md", "data/train-00000-of-00001.parquet"], "", ["data/train-00000-of-00001.parquet"]),
        (["data/b.parquet", "data/a.parquet", ".cache/c.parquet"], "", ["data/a.parquet", "data/b.parquet"]),
        (["train.jsonl", "dataset_infos.json", "state.json"], "", ["train.jsonl"]),
        (["a.jsonl", "a.json"], "", ["a.jsonl"]),
        (["rows.json", "dataset_info.json"], "", ["rows.json"]),
        (["data/train-0.parquet", "data/test-0.parquet"], "data/train-*.parquet", ["data/train-0.parquet"]),
        (["main/train-0.parquet", "socratic/train-0.parquet"], "main", ["main/train-0.parquet"]),
        (["contest.parquet", "latest.parquet"], "", ["contest.parquet", "latest.parquet"]),
        (["a*b.parquet"], "a*b.parquet", ["a*b.parquet"]),
    ],
)
def test_what_a_name_means(there: list[str], given: str, expected: list[str], tmp_path: Path) -> None:
    make(tmp_path, *there)
    assert data_files(str(tmp_path / given)) == [str(tmp_path / name) for name in expected]


@pytest.mark.parametrize(
    ("there", "given", "words"),
    [
        (["data/train-0.parquet", "data/test-0.parquet"], "", ["several splits", "data/test-0.parquet"]),
        (["a/train-0.parquet", "a/train-1.parquet", "a/dev.parquet"], "", ["a/train-*.parquet"]),
        (["main/train-0.parquet", "socratic/train-0.parquet"], "", ["main/train-0.parquet", "socratic"]),
        (["a.parquet", "b.jsonl"], "", [".parquet and .jsonl"]),
        (["data-00000-of-00001.arrow", "state.json"], "", ["save_to_disk", "to_parquet", "load_from_disk"]),
        (["dataset_dict.json", "train/data-00000-of-00001.arrow"], "", ["save_to_disk", "['train']"]),
        (["config.json", "model.safetensors", "tokenizer.json"], "", ["holds a model"]),
        (["a.csv"], "", ["no .parquet, .jsonl or .json file", ".csv"]),
        (["a.csv"], "a.csv", ["expected a .parquet"]),
        (["a.parquet"], "b*.parquet", ["no file matches"]),
        (["a.parquet"], "gone.parquet", ["does not exist"]),
    ],
)
def test_what_is_refused(there: list[str], given: str, words: list[str], tmp_path: Path) -> None:
    make(tmp_path, *there)
    with pytest.raises(DataError) as error:
        data_files(str(tmp_path / given))
    for word in [str(tmp_path), *words]:
        assert word in str(error.value)


def test_a_data_set_of_the_hub_is_not_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="hf download --repo-type dataset openai/gsm8k"):
        data_files("openai/gsm8k")


def test_the_rows_of_a_folder_name_their_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for part in range(2):
        rows = {"question": [f"What is 1 + {part}?"], "answer": [str(1 + part)]}
        pq.write_table(pa.table(rows), tmp_path / "data" / f"train-{part:05d}-of-00002.parquet")
    (tmp_path / "dataset_infos.json").write_text(json.dumps({"default": {}}))
    prompts, counts = read_prompts([str(tmp_path)])
    assert counts.rows == 2
    assert [(Path(each.file).name, each.row, each.ground_truth) for each in prompts] == [
        ("train-00000-of-00002.parquet", 0, "1"),
        ("train-00001-of-00002.parquet", 0, "2"),
    ]
