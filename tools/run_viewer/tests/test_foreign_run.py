"""A run of another stack, with only the columns that run_files' README asks for: its pages, its export, its text."""

import asyncio
import doctest
import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp.test_utils import TestClient, TestServer
from tokenizers import Tokenizer, models

from run_viewer.command import main
from run_viewer.compare_runs import first_difference
from run_viewer.curves import curves_page
from run_viewer.runs_table import runs_page
from run_viewer.server import build_app
from run_viewer.step_pages import response_page
from run_viewer.timeline import step_time_page
from run_viewer.tokenizers import Tokenizers

WORDS = {"six": 0, "times": 1, "seven": 2, "is": 3, "42": 4, "41": 5, "[unknown]": 6}
CALL = {"name": "search", "status": "ok", "seconds": 0.5, "output_tokens": 1, "position": 2, "unknown": 1}


def make_run(run_dir: Path, answer: int = 4, **changes: object) -> Path:
    (run_dir / "rollouts").mkdir(parents=True)
    (run_dir / "config.yaml").write_text("model: {path: nowhere}\ntrainer: {total_steps: 3}\n")
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "timing_s/step": 2.0, "actor/entropy": 0.5}\n')
    row = {
        "group_id": 0,
        "index": 0,
        "prompt_ids": [0, 1, 2],
        "response_ids": [0, 3, 2, answer],
        "loss_mask": [True, True, False, True],
        "rollout_log_probs": [math.log(0.5), 0.0, 0.0, math.log(0.25)],
        "turn_ids": [0, 0, -1, 1],
        "weight_versions": [0, 0, -1, 0],
        "finish_reason": "eos",
        "reward": 1.0,
        "reward_info": json.dumps({"acc": 1.0, "odd": float("nan")}),
        "tool_calls": json.dumps([CALL]),
        "extra_info": json.dumps({"prompt": [{"role": "user", "content": "six times seven?"}]}),
    }
    pq.write_table(pa.Table.from_pylist([row | changes]), run_dir / "rollouts" / "step_000001.parquet")
    columns = {"group_id": [0], "index": [0], "entropy": pa.array([[0.1, 0.2, 0.3, 0.4]], pa.list_(pa.float32()))}
    pq.write_table(pa.table(columns), run_dir / "rollouts" / "step_000001.learner.parquet")
    return run_dir


def with_tokenizer(run_dir: Path) -> Path:
    (run_dir / "tokenizer").mkdir()
    Tokenizer(models.WordLevel(WORDS, unk_token="[unknown]")).save(str(run_dir / "tokenizer" / "tokenizer.json"))
    return run_dir


def test_the_readmes_example_prints_what_it_says() -> None:
    failed, tried = doctest.testfile(str(Path(__file__).parents[1] / "README.md"), module_relative=False)
    assert tried > 10 and not failed


def test_every_page_has_what_the_files_have(tmp_path: Path) -> None:
    run_dir = with_tokenizer(make_run(tmp_path / "run"))
    decode, problem = Tokenizers().of_run(run_dir)
    page = response_page(run_dir, 1, 0, "0", decode, problem)
    assert page["problems"] == [] and page["texts"][0] == "six" and page["finish_reason"] == "eos"
    assert page["question"] == "six times seven?" and page["reward_info"] == {"acc": 1, "odd": None}
    assert page["columns"]["surprise"][:2] == pytest.approx([0.5, 0]) and page["columns"]["entropy"][2] is None
    (call,) = page["tool_calls"]
    assert call == {"name": "search", "arguments": "", "status": "ok", "seconds": 0.5, "output_truncated": False,
                    "output_tokens": 1, "position": 2, "started": None}  # fmt: skip
    (row,) = runs_page(tmp_path)["runs"]
    assert (row["name"], row["step"], row["total_steps"]) == ("run", 1, 3)
    assert curves_page(run_dir, ["actor/entropy"])["captions"]["actor/entropy"]["meaning"], "metrics.md came along"
    assert step_time_page(run_dir, 1)["phases"][0]["seconds"] == 2


def test_the_server_answers_with_the_same(tmp_path: Path) -> None:
    make_run(tmp_path / "run")

    async def answers() -> list[int]:
        async with TestClient(TestServer(build_app(tmp_path))) as client:
            paths = (
                "/",
                "/page/app.js",
                "/page/plotly.min.js",
                "/api/runs",
                "/api/runs/run/steps/1/0/0",
                "/api/runs/x",
            )
            return [(await client.get(path)).status for path in paths]

    assert asyncio.run(answers()) == [200] * 5 + [404]


def test_the_command_prints_exports_and_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = with_tokenizer(make_run(tmp_path / "run"))
    assert main([str(run_dir), "--text"]) == 0 and "step 1: 1 responses" in capsys.readouterr().out
    assert main([str(run_dir), "--text", "--group", "0", "--color", "entropy"]) == 0
    said = capsys.readouterr().out
    assert "six times seven?" in said and "call 0: search ok, 0.50 s" in said and "0.1 to 0.4" in said
    assert main([str(tmp_path), "--export", str(tmp_path / "page.html"), "--step", "1"]) == 0
    assert "six times seven?" in (tmp_path / "page.html").read_text()
    assert main([str(run_dir), "--text", "--color", "mood"]) == 1
    assert main([str(tmp_path / "none")]) == 1
    assert capsys.readouterr().out.count("error:") == 2


def test_what_is_of_another_kind_is_taken_as_not_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = json.dumps([CALL | {"seconds": "long", "name": None}, "none"])
    info, extra = json.dumps({"acc": "right"}), json.dumps({"prompt": ["six?", {"role": "user", "content": "seven?"}]})
    run_dir = with_tokenizer(make_run(tmp_path / "run", tool_calls=calls, reward_info=info, extra_info=extra))
    assert main([str(run_dir), "--text", "--group", "0"]) == 0
    said = capsys.readouterr().out
    assert "call 0:  ok, 0.00 s" in said and "accuracy 1," in said and "question: seven?" in said
    assert response_page(run_dir, 1, 0, "0", None)["problems"] == []


def test_columns_of_another_length_are_named_by_file_and_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "run", turn_ids=[0])
    assert main([str(run_dir), "--text"]) == 1
    assert "step_000001.parquet, row 0: cannot be read: response 0/0: turn_ids has 1 entries" in " ".join(
        capsys.readouterr().out.split()
    )


def test_without_a_tokenizer_tokens_are_numbers_and_no_network_is_asked(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    decode, problem = Tokenizers().of_run(run_dir)
    assert decode is None and problem.startswith("tokens are shown as numbers, since the run's tokenizer is missing")
    assert response_page(run_dir, 1, 0, "0", decode, problem)["texts"][0] == "⟨0⟩"


def test_two_runs_part_at_a_token(tmp_path: Path) -> None:
    problems: list[str] = []
    first = first_difference(make_run(tmp_path / "a"), make_run(tmp_path / "b", answer=5), problems)
    assert first is not None and (first.token, first.column, first.a, first.b) == (3, "response_ids", 4, 5)
