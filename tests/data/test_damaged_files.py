"""Files that are damaged, or hold what nothing downstream takes: one message with file, row and column where known."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_retool.config import ConfigError, load_config
from megatron_retool.data.files import DataError, read_table, write_parquet
from megatron_retool.data.prompt_files import read_prompts
from megatron_retool.data.prompts import PromptSource
from megatron_retool.data.sft_dataset import SFTDataset
from megatron_retool.runs.checkpoints import Checkpoint
from megatron_retool.trajectory import FinishReason, ToolCall, Trajectory, read_trajectories, write_trajectories
from run_files.parquet_files import UnreadableFile, read_parquet
from run_files.steps import read_estimates
from sglang_rollout.agent.paused_groups import PausedGroup, read_paused_groups, write_paused_groups
from sglang_rollout.agent.trajectory_state import TrajectoryState
from sglang_rollout.agent.written_calls import ParsedCall
from tests.data.test_prompts import TOOLBOX, data_config, verl_row, write


def trajectories(path: Path) -> None:
    made = [
        Trajectory([1, 2], [3, 4], [True, False], [-0.5, 0], [0, -1], [0, -1], group, 0, FinishReason.STOP)
        for group in range(6)
    ]
    made[0].tool_calls = [ToolCall("x", "{}", "ok", 0.1)]
    made[1].routed_experts = np.arange(40, dtype=np.uint8).reshape(4, 5, 2)
    write_trajectories(made, path, texts=[("prompt", f"response {number}") for number in range(6)])


def paused(path: Path) -> None:
    states = [TrajectoryState([], group_id=3, index=index) for index in range(4)]
    for state in states:
        state.append_unsampled(list(range(5)))
        state.pending_calls = [ParsedCall("x", {"a": 1}, "raw")]
        state.routed_experts = [np.arange(40, dtype=np.uint8).reshape(4, 5, 2)]
    write_paused_groups([PausedGroup(3, 4, 1, states)], path)


def prompts(path: Path) -> None:
    rows = [verl_row(f"question {number} αβγ", str(number)) for number in range(12)]
    write_parquet(path, pa.Table.from_pylist(rows))


def bare(path: Path) -> None:
    """Without checksums, as other programs write."""
    rows = [{"problem": f"question {number}", "answer": str(number), "year": number} for number in range(30)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=10)


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "prompts": (prompts, lambda path: read_prompts([str(path)])),
    "competition": (bare, lambda path: read_prompts([str(path)])),
    "trajectories": (trajectories, read_trajectories),
    "paused groups": (paused, read_paused_groups),
    "estimates": (bare, read_parquet),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_flip_and_every_cut_is_read_or_named(tmp_path, kind):
    make, read = KINDS[kind]
    path = tmp_path / "damaged.parquet"
    make(path)
    sound = path.read_bytes()
    read(path)
    chance, named = random.Random(5), 0
    for case in range(80):
        damaged = bytearray(sound)
        if case % 6 == 0:
            del damaged[chance.randrange(len(damaged)) :]
        else:
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            read(path)
        except UnreadableFile as error:
            named += 1
            assert str(error).startswith(str(path)) and "\n" not in str(error)
    assert named > 25


def test_a_damaged_page_is_named_by_its_rows_and_column(tmp_path):
    path = tmp_path / "p.parquet"
    table = pa.table({"a": [f"text {number}" for number in range(40)], "b": list(range(40))})
    pq.write_table(table, path, row_group_size=20, compression="none", use_dictionary=False, write_page_checksum=True)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"text 33", b"text 34"))
    with pytest.raises(
        DataError, match=r"p.parquet, rows 20 to 39, column 'a': cannot be read: .*CRC.* fetch or make it"
    ):
        read_table(path)


def test_text_that_is_no_utf_8_is_named_by_its_row(tmp_path):
    def texts(values: list[bytes]) -> pa.Array:
        return pa.array(values, pa.binary()).view(pa.string())

    answers = pa.array([str(number) for number in range(6)])
    table = pa.table({"problem": texts([b"fine"] * 4 + [b"\xff\xfe", b"fine"]), "answer": answers})
    pq.write_table(table, tmp_path / "p.parquet", row_group_size=3)
    with pytest.raises(DataError, match=r"p.parquet, row 4, column 'problem': cannot be read: .*UTF8"):
        read_prompts([str(tmp_path / "p.parquet")])
    (tmp_path / "p.jsonl").write_bytes(b'{"problem": "a", "answer": "1"}\n{"problem": "\xff", "answer": "1"}\n')
    with pytest.raises(DataError, match=r"p.jsonl, row 1, column 'problem': the text is no UTF-8"):
        read_prompts([str(tmp_path / "p.jsonl")])
    (tmp_path / "p.json").write_bytes(b'[{"problem": "\xff", "answer": "1"}]')
    with pytest.raises(DataError, match=r"p.json: not valid JSON: no UTF-8 at byte 14"):
        read_prompts([str(tmp_path / "p.json")])


DEEP, DIGITS = "[" * 20_000 + "]" * 20_000, "9" * 4301


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", f'{{"problem": "a", "answer": "1"}}\n{{"problem": {DEEP}}}\n', "row 1: nested too deeply"),
        ("a.jsonl", '{"problem": "a"}\n{"problem": "\\ud800"}\n', "cannot be read: .*surrogate pair.* in row 1"),
        (
            "a.jsonl",
            f'{{"problem": "a", "answer": {DIGITS}}}\n',
            "row 0, column 'answer': the ground truth inf is beyond",
        ),
        ("a.jsonl", '{"problem": "a", "answer": 12345678901234567890123}\n', "store it as text"),
        ("a.json", f'[{{"problem": {DEEP}}}]', "not valid JSON: nested too deeply"),
        ("a.json", f'[{{"answer": {DIGITS}}}]', "not valid JSON: a number has too many digits"),
        ("a.json", '[{"answer": "1"}, {"answer": "\\ud800"}]', "row 1, column 'answer': .*surrogates not allowed"),
        ("a.json", f'[{{"answer": 1}}, {{"answer": {10**30}}}]', "row 1, column 'answer': "),
        ("a.json", '[{"a": 1, "answer": 1}, {"a": 1, "answer": "x"}]', "column 'answer': "),
    ],
)
def test_json_that_cannot_be_a_table(tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=f"{name}.*{said}"):
        read_prompts([str(tmp_path / name)])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            verl_row("q", reward_model=f'{{"ground_truth": {DIGITS}}}'),
            "'reward_model': not valid JSON: a number has too",
        ),
        (verl_row("q", reward_model=DEEP), "'reward_model': not valid JSON: nested too deeply"),
        (verl_row("q", reward_model={"ground_truth": 2.0**60}), "'reward_model': the ground truth .* store it as text"),
        (verl_row("q", extra_info=DEEP), "'extra_info': not valid JSON: nested too deeply"),
        (verl_row("q", prompt='[{"role": "user", "content": "\\ud800"}]'), r"'prompt': .*surrogate pair \('\\ud800'\)"),
    ],
)
def test_values_that_nothing_downstream_takes(tmp_path, row, said):
    with pytest.raises(DataError, match=f"p.parquet, row 0, column {said}"):
        read_prompts([write(tmp_path / "p.parquet", [row])])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": DEEP}, "'messages': not valid JSON: nested too deeply"),
        ({"messages": DIGITS}, "'messages': not valid JSON: a number has too many digits"),
        ({"messages": '[{"role": "user", "content": "\\udc00"}]'}, "'messages': .*surrogate pair"),
        (
            {"messages": '[{"role": "user", "content": "x"}]', "tools": '[{"name": "\\ud800"}]'},
            "'tools': .*surrogate pair",
        ),
    ],
)
def test_conversations_that_nothing_downstream_takes(tmp_path, tokenizer, row, said):
    with pytest.raises(DataError, match=f"p.parquet, row 0, column {said}"):
        SFTDataset([write(tmp_path / "p.parquet", [row])], tokenizer, max_length=100)


def test_a_prompt_that_is_json_only_at_first_sight_stays_a_question(tmp_path):
    (prompt,), _ = read_prompts([write(tmp_path / "p.parquet", [verl_row("q", prompt="[{" + DEEP)])])
    assert prompt.messages[0]["content"].startswith("[{[[")


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("finish_reason", "tired", "row 2: cannot be read: 'tired' is not a valid FinishReason"),
        ("reward_info", "{", "row 2: cannot be read: Expecting property name"),
        ("tool_calls", '[{"name": "x"}]', "row 2: cannot be read: .*missing 3 required"),
        ("response_ids", [1], "row 2: cannot be read: .*loss_mask has 2 entries for 1 response tokens"),
    ],
)
def test_stored_trajectories_that_are_none(tmp_path, column, value, said):
    path = tmp_path / "step_000001.parquet"
    trajectories(path)
    table = pq.read_table(path)
    values = table[column].to_pylist()
    values[2] = value
    place = table.column_names.index(column)
    pq.write_table(table.set_column(place, column, pa.array(values, table.schema.field(column).type)), path)
    with pytest.raises(UnreadableFile, match=f"step_000001.parquet, {said}"):
        read_trajectories(path)


def test_other_files_in_the_place_of_a_runs_own(tmp_path):
    bare(tmp_path / "bare.parquet")
    for read in (read_trajectories, read_paused_groups):
        with pytest.raises(UnreadableFile, match="bare.parquet: column '.*' is missing; the file has problem, answer"):
            read(tmp_path / "bare.parquet")
    with pytest.raises(UnreadableFile, match="none.parquet: the file does not exist"):
        read_estimates(tmp_path / "none.parquet")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", DEEP.encode(), b'{"drawn": ' + DIGITS.encode() + b"}"])
def test_a_checkpoints_damaged_json_is_named_with_the_way_back(tmp_path, content):
    (tmp_path / "prompt_source.json").write_bytes(content)
    with pytest.raises(ConfigError, match="prompt_source.json: .*The checkpoint is damaged: go back to an older one"):
        Checkpoint(tmp_path, 1).read("prompt_source.json")
    with pytest.raises(ConfigError, match="trainer_state.json: cannot be read: No such file"):
        Checkpoint(tmp_path, 1).read("trainer_state.json")


@pytest.mark.parametrize(
    "change", [{"drawn": "many"}, {"drawn": -1}, {"again": None}, {"again": [1, "x"]}, {"drawn": None}]
)
def test_a_data_position_that_is_none(tmp_path, tokenizer, change):
    prompts(tmp_path / "p.parquet")
    source = PromptSource(data_config(str(tmp_path / "p.parquet")), tokenizer, TOOLBOX, seed=0)
    with pytest.raises(DataError, match="data position is damaged: .*resume from an older checkpoint"):
        source.load_state_dict({**source.state_dict(), **change})
    with pytest.raises(DataError, match="another trainer.seed"):
        source.load_state_dict({})


def test_one_file_needs_no_brackets():
    config = load_config(None, ["data.train_files=a.parquet", "data.val_files=[b.parquet,c.parquet]"])
    assert (config.data.train_files, config.data.val_files) == (["a.parquet"], ["b.parquet", "c.parquet"])


@pytest.mark.parametrize(
    "rows",
    [["z" * 5000] * 5000, [[{"role": "user", "content": "x" * 2000}] * 10] * 500, [None] * 20_000_000],
    ids=["text", "messages", "nulls"],
)
def test_a_small_file_of_gigabytes_is_not_read(
    rows: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bomb.parquet"
    column = pa.nulls(len(rows), pa.int8()) if rows[0] is None else rows
    pq.write_table(pa.table({"prompt": column}), path)
    read_table(path)
    monkeypatch.setattr("run_files.parquet_files._FREE_BYTES", 2**20)
    with pytest.raises(DataError, match=r"bomb\.parquet: its rows would take more than .* of memory"):
        read_table(path)
