"""Accuracy of each validation problem at each step: what is read, its order, pictures and table."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_retool.reports.problems import MAX_MAPS, problem_accuracy
from megatron_retool.reports.run import draw_plots
from megatron_retool.trajectory import FinishReason, Trajectory, write_trajectories


def response(group: int, index: int, accuracy: float, info: dict[str, Any]) -> Trajectory:
    return Trajectory(
        [1], [2], [True], [-0.5], [0], [0], group, index, FinishReason.STOP, reward=2 * accuracy - 1,
        reward_info={"acc": accuracy}, extra_info={"uid": f"{info['data_source']}{group}", **info},
    )  # fmt: skip


def validated(run_dir: Path, step: int, problems: list[tuple[dict[str, Any], list[float]]]) -> None:
    rows = [
        response(group, index, accuracy, info)
        for group, (info, accuracies) in enumerate(problems)
        for index, accuracy in enumerate(accuracies)
    ]
    write_trajectories(rows, run_dir / "validation" / f"step_{step:06d}.parquet")
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "val-core/all/acc/mean@2": 0.5}) + "\n")


def aime(index: int) -> dict[str, Any]:
    return {"data_source": "aime_2025", "index": index}


def read(run_dir: Path) -> Any:
    return problem_accuracy(run_dir, [json.loads(line) for line in (run_dir / "metrics.jsonl").open()], [])


def test_problems_are_sorted_by_difficulty_and_then_by_accuracy(tmp_path: Path) -> None:
    order = [14, 2, 17, 0]  # numbers 15, 3, 3 and 1
    for step in (0, 5):
        validated(tmp_path, step, [(aime(index), [float(index == 17), step / 5]) for index in order])
    (found,) = read(tmp_path)
    assert (found.source, found.steps) == ("aime_2025", [0, 5])
    assert found.names == ["#0", "#17", "#2", "#14"]
    assert found.groups == ["problems_1-5"] * 3 + ["problems_11-15"]
    np.testing.assert_array_equal(found.accuracy, [[0, 0.5], [0.5, 1], [0, 0.5], [0, 0.5]])


def test_what_is_not_of_this_run_or_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    known = {"data_source": "demo", "index": 3, "id": "train/algebra/3"}
    validated(tmp_path, 0, [(known, [1.0]), ({"data_source": "demo", "index": 4}, [0.0])])
    validated(tmp_path, 5, [(known, [0.0])])
    validated(tmp_path, 10, [(known, [1.0])])
    (tmp_path / "validation" / "step_000005.parquet").write_bytes(b"PAR1 cut")
    write_trajectories([response(0, 0, 0.0, known)], tmp_path / "validation" / "step_000007.parquet")
    quick = {"step": 12, "val-quick/all/acc/mean@2": 0.5}
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps(quick) + "\n")
    (found,) = read(tmp_path)
    assert (found.names, found.groups, found.steps) == (["train/algebra/3", "#4"], ["", ""], [0, 5, 10])
    np.testing.assert_array_equal(found.accuracy, [[1, np.nan, 1], [0, np.nan, np.nan]])


@pytest.mark.parametrize(("problems", "steps"), [(30, 3), (500, 4)])
def test_the_report_has_a_heat_map_and_a_table(tmp_path: Path, problems: int, steps: int) -> None:
    from matplotlib.image import imread

    for step in range(steps):
        rows = [({"data_source": "math", "index": n, "level": n % 5 + 1}, [float(n % 3 == 0)]) for n in range(problems)]
        validated(tmp_path, step, rows)
    page = draw_plots(tmp_path).write_page()
    text = page.read_text()
    assert 'src="validation_problems.png"' in text and 'href="validation_problems.csv"' in text
    height, width, _ = imread(page.parent / "validation_problems.png").shape
    assert width == 770 and 500 < height < 1700
    table = list(csv.reader((page.parent / "validation_problems.csv").open()))
    assert len(table) == problems + 1
    assert table[0] == ["data_source", "problem", "difficulty", "mean", *(f"step {step}" for step in range(steps))]
    assert table[1][:5] == ["math", "#0", "level_1", "1", "1"]
    assert [row[2] for row in table[1:]] == sorted(row[2] for row in table[1:])


def test_many_sources_share_a_heat_map(tmp_path: Path) -> None:
    sources = [{"data_source": f"source {place}", "index": 0} for place in range(MAX_MAPS + 1)]
    validated(tmp_path, 0, [(info, [1.0]) for info in sources[:-1]])
    page = draw_plots(tmp_path).write_page()
    assert len(list(page.parent.glob("validation_problems_*.png"))) == MAX_MAPS
    validated(tmp_path, 5, [(info, [1.0]) for info in sources])
    assert 'alt="Accuracy by problem: all"' in draw_plots(tmp_path).write_page().read_text()


def test_a_run_without_validations_has_neither(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rollout/acc/mean": 0.5}\n')
    assert "validation_problems" not in draw_plots(tmp_path).write_page().read_text()
