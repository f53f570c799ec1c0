"""The files of a run as others write them: what is read, what is left out, and what is named."""

import doctest
import json
import os
import socket
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from run_files import check_run_directory
from run_files.metrics import read_metrics_and_problems
from run_files.parquet_files import UnreadableFile, read_parquet, read_row
from run_files.process import process_start, still_runs
from run_files.settings import differing_settings, flat_settings
from run_files.steps import keys_of, read_estimates, step_path, stored_steps


def test_the_readmes_examples_print_what_they_say() -> None:
    failed, tried = doctest.testfile(str(Path(__file__).parents[1] / "README.md"), module_relative=False)
    assert tried > 5 and not failed


def test_rows_of_a_step_are_named_by_group_response_and_segment() -> None:
    columns = {"group_id": pa.array([7, 7, 9]), "index": pa.array([0, 1, 0], pa.int32())}
    assert keys_of(pa.table(columns), "f") == [(7, 0, 0), (7, 1, 0), (9, 0, 0)]
    assert keys_of(pa.table({**columns, "segment": pa.array([0, 2, 1])}), "f") == [(7, 0, 0), (7, 1, 2), (9, 0, 1)]
    for wrong, said in (
        ({"group_id": columns["group_id"]}, "f: column 'index' is missing"),
        ({**columns, "index": pa.array(["a", "b", "c"])}, "f: column 'index' holds string"),
        ({**columns, "group_id": pa.array([7, None, 9])}, "f, row 1: column 'group_id' has no number"),
        ({**columns, "index": pa.array([0, 0, 0])}, "f, row 1: response 7/0 stands in row 0 too"),
    ):
        with pytest.raises(UnreadableFile, match=said):
            keys_of(pa.table(wrong), "f")


def test_what_the_learner_computed_is_read_by_row(tmp_path: Path) -> None:
    path = step_path(tmp_path, 3, "learner")
    columns = {"group_id": [0, 0], "index": [0, 1], "entropy": pa.array([[0.5], [1.0, 2.0]], pa.list_(pa.float32()))}
    pq.write_table(pa.table(columns), path)
    found = read_estimates(path)
    assert list(found) == [(0, 0, 0), (0, 1, 0)]
    np.testing.assert_array_equal(found[0, 1, 0]["entropy"], np.array([1.0, 2.0], np.float32))
    pq.write_table(pa.table(columns | {"entropy": ["a", "b"]}), path)
    with pytest.raises(UnreadableFile, match="'entropy' holds string in place of lists of numbers"):
        read_estimates(path)


def test_steps_are_those_whose_responses_are_there(tmp_path: Path) -> None:
    for name in ("step_000010.parquet", "step_000002.parquet", "step_000002.learner.parquet", ".step_000003.parquet"):
        (tmp_path / name).touch()
    assert stored_steps(tmp_path) == [2, 10] and step_path(tmp_path, 2, "times").name == "step_000002.time.json"
    with pytest.raises(FileNotFoundError, match="is no directory"):
        check_run_directory(tmp_path / "none")


def test_a_damaged_file_names_itself_and_the_place(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.parquet"
    pq.write_table(pa.table({"a": [1, 2]}), path)
    assert read_row(path, 1) == {"a": 2}
    with pytest.raises(UnreadableFile, match="column 'b' is missing; the file has a"):
        read_parquet(path, ["b"])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UnreadableFile, match=r"step_000001\.parquet: cannot be read: .*fetch or make it again"):
        read_parquet(path)


def test_lines_of_metrics_that_are_no_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "x": NaN}\nnull\n{"step": "2"}\n\0\0{"step": 3, "word": "a"}\n{"st')
    rows, problems = read_metrics_and_problems(path)
    assert [row["step"] for row in rows] == [1, 3] and "word" not in rows[1]
    assert [problem.split(":")[0].removeprefix(f"{path}, ") for problem in problems] == [
        "line 2 is no JSON object, or only half of one",
        "line 3 has no whole number as its step",
        "line 4",
        "line 5 is no JSON object, or only half of one",
    ]
    assert read_metrics_and_problems(tmp_path / "none") == ([], [])


def test_runs_are_compared_by_the_leaves_of_their_settings() -> None:
    flat = flat_settings({"a": {"b": 1, "c": {}}, "trainer": {"experiment_name": "x"}})
    assert flat == {"a.b": 1, "a.c": {}, "trainer.experiment_name": "x"}
    assert differing_settings([{"a.b": "1", "trainer.experiment_name": "x"}, {"a.b": "2"}, {}]) == {
        "a.b": ["1", "2", "–"]
    }


def test_the_process_of_a_run_is_known_by_its_start() -> None:
    own = {"host": socket.gethostname(), "process": os.getpid(), "process_start": process_start(os.getpid())}
    assert still_runs(own) is True and still_runs(own | {"process_start": 1}) is False
    assert still_runs(json.loads(json.dumps(own | {"host": "elsewhere"}))) is None
