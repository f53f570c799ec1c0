"""Conversations in the learner's contract, batches that a step's number fixes, and errors that name the row."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_retool.data.files import DataError
from megatron_retool.data.sft_dataset import BatchOrder, SFTDataset
from megatron_retool.trajectory import FinishReason, Trajectory


def conversation(answer: str = "2", **extra) -> list[dict]:
    return [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": answer, **extra}]


def write(path, rows: list[dict]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


@pytest.fixture(scope="module")
def dataset(demo_directory, tokenizer) -> SFTDataset:
    return SFTDataset([str(demo_directory / "sft.parquet")], tokenizer, max_length=256)


def test_rows_are_valid_trajectories_that_decode_to_the_conversation(dataset, demo_directory, tokenizer):
    rows = pq.read_table(demo_directory / "sft.parquet").to_pylist()
    batch = dataset.batch(np.arange(len(rows)))
    ends = np.cumsum(batch.response_lengths)
    prompt_ends = np.cumsum(batch.prompt_lengths)
    for row in range(0, len(rows), 7):
        prompt = slice(prompt_ends[row] - batch.prompt_lengths[row], prompt_ends[row])
        response = slice(ends[row] - batch.response_lengths[row], ends[row])
        trajectory = Trajectory(
            prompt_ids=batch.prompt_ids[prompt],
            response_ids=batch.response_ids[response],
            loss_mask=batch.loss_mask[response],
            rollout_log_probs=batch.rollout_log_probs[response],
            turn_ids=batch.turn_ids[response],
            weight_versions=batch.weight_versions[response],
            group_id=row,
            index=0,
            finish_reason=FinishReason.STOP,
        )
        messages, tools = json.loads(rows[row]["messages"]), json.loads(rows[row]["tools"])
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        assert tokenizer.decode([*trajectory.prompt_ids, *trajectory.response_ids]) == text.removesuffix("\n")
        assert trajectory.loss_mask[0]
        assert trajectory.loss_mask[-1]
        assert trajectory.response_ids[-1] == tokenizer.eos_token_id
        assert trajectory.num_turns == sum(m["role"] == "assistant" for m in messages)


def test_loss_weights_are_the_mean_over_trained_tokens_of_the_batch(dataset):
    batch = dataset.batch([3, 1, 4, 1])
    weights = batch.columns["loss_weights"]
    assert weights.sum() == pytest.approx(1, abs=1e-6)
    assert not weights[~batch.loss_mask].any()
    assert len(set(weights[batch.loss_mask])) == 1
    assert len(batch) == 4
    assert batch.response_lengths[1] == batch.response_lengths[3]


def test_nested_columns_and_rows_with_different_tools(tmp_path, tokenizer):
    call = {"type": "function", "function": {"name": "code_interpreter", "arguments": '{"code": "print(2)"}'}}
    system = {"role": "system", "content": "s"}
    tool = {"type": "function", "function": {"name": "t", "parameters": {"properties": {"x": {"type": "string"}}}}}
    rows = [
        {"messages": [system, *conversation("", tool_calls=[call])], "tools": [tool]},
        {"messages": [system, *conversation("plain")], "tools": None},
    ]
    dataset = SFTDataset([write(tmp_path / "n.parquet", rows)], tokenizer, max_length=256)
    first, second = dataset.batch([0]), dataset.batch([1])
    assert "<tools>" in tokenizer.decode(first.prompt_ids)
    assert '"arguments": {"code": "print(2)"}}' in tokenizer.decode(first.response_ids)
    assert "<tools>" not in tokenizer.decode(second.prompt_ids)
    assert tokenizer.decode(second.response_ids) == "plain<|im_end|>"


def test_max_length(tmp_path, tokenizer):
    rows = [
        {"messages": json.dumps(conversation(text))} for text in ("short", "a long answer that goes on and on and on")
    ]
    rows.append({"messages": json.dumps([{"role": "user", "content": "word " * 200}, *conversation()[1:]])})
    path = write(tmp_path / "l.parquet", rows)
    dropped = SFTDataset([path], tokenizer, max_length=30, overlong="drop")
    assert (dropped.counts.kept, dropped.counts.dropped, dropped.counts.truncated) == (1, 2, 0)
    truncated = SFTDataset([path], tokenizer, max_length=30, overlong="truncate")
    assert (truncated.counts.kept, truncated.counts.dropped, truncated.counts.truncated) == (2, 1, 1)
    assert truncated.batch([1]).total_lengths.tolist() == [30]
    assert "1 truncated" in str(truncated.counts)
    with pytest.raises(DataError, match=r"l.parquet, row 1, column 'messages': \d+ tokens, more than max_length=30"):
        SFTDataset([path], tokenizer, max_length=30, overlong="error")
    with pytest.raises(DataError, match="none of the 3 conversations fits"):
        SFTDataset([path], tokenizer, max_length=3)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"conversation": "x"}], "column 'messages' is missing"),
        ([{"messages": json.dumps(conversation())}, {"messages": "[oops"}], "row 1, column 'messages': not valid JSON"),
        ([{"messages": "[]"}], "row 0, column 'messages': expected a list of messages"),
        ([{"messages": json.dumps(conversation())}, {"messages": None}], "row 1, column 'messages': expected a list"),
        ([{"messages": '[{"content": "x"}]'}], "expected messages with a role"),
        ([{"messages": json.dumps(conversation(""))}], "neither text nor a tool call"),
        ([{"messages": json.dumps(conversation(["x"]))}], "content is no text"),
        ([{"messages": json.dumps(c)} for c in (conversation(), conversation()[:1])], "row 1.*nothing to learn"),
        ([{"messages": json.dumps(conversation()), "tools": "{}"}], "row 0, column 'tools': expected a list"),
        ([{"messages": json.dumps(conversation()), "tools": "["}], "row 0, column 'tools': not valid JSON"),
    ],
)
def test_bad_rows(tmp_path, tokenizer, rows, message):
    with pytest.raises(DataError, match=f"bad.parquet.*{message}"):
        SFTDataset([write(tmp_path / "bad.parquet", rows)], tokenizer, max_length=256)


@given(st.integers(1, 50), st.integers(1, 64), st.integers(0, 5))
def test_batch_order_visits_every_row_once_an_epoch(num_rows, batch_size, seed):
    order = BatchOrder(num_rows, batch_size, (seed, 1))
    stream = np.concatenate([order.rows(step) for step in range(2 * num_rows)])
    for epoch in range(len(stream) // num_rows):
        assert sorted(stream[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))
    assert (BatchOrder(num_rows, batch_size, (seed, 1)).rows(7) == order.rows(7)).all()


def test_batches_mix_lengths(dataset):
    """Bucketed batches correlate content with length, and a tiny model then does not learn to copy."""
    batch = dataset.batch(BatchOrder(len(dataset), 32, (0, 0)).rows(0))
    everything = dataset.batch(np.arange(len(dataset)))
    assert batch.total_lengths.std() > 0.6 * everything.total_lengths.std()
