"""The demo's files: what they hold, that a seed fixes them, and that they appear at once or not at all."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megatron_retool.config import ConfigError
from megatron_retool.data.demo import make, make_demo
from megatron_retool.data.demo.problems import FAMILIES, draw
from megatron_retool.data.demo.snippets import SnippetRunner
from megatron_retool.data.demo.traces import trace
from tests.data.conftest import demo_config
from tools.code_interpreter.process import SandboxServerProcess
from tools.code_interpreter.tool import CodeInterpreterTool

INTERPRETER = demo_config(Path("unused")).tools.code_interpreter


def rows(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def questions(path: Path) -> set[str]:
    if "prompt" in pq.read_schema(path).names:
        return {row["prompt"][-1]["content"] for row in rows(path)}
    found = set()
    for row in rows(path):
        found |= {m["content"] for m in json.loads(row["messages"]) if m["role"] == "user"}
    return found


def digests(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def sandbox_url():
    with SandboxServerProcess(INTERPRETER) as server:
        yield server.url


def test_files_and_columns(demo_directory):
    for name, count in (("pretrain", 120), ("sft", 240), ("sft_val", 24)):
        found = rows(demo_directory / f"{name}.parquet")
        assert len(found) == count
        assert set(found[0]) == {"messages", "tools"}
        assert json.loads(found[0]["tools"])[0]["function"]["name"] == "code_interpreter"
    for name, count, split in (("train", 60, "train"), ("val", 18, "test")):
        found = rows(demo_directory / f"{name}.parquet")
        assert len(found) == count
        for index, row in enumerate(found):
            assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
            assert [message["role"] for message in row["prompt"]] == ["system", "user"]
            assert row["reward_model"]["style"] == "rule"
            assert int(row["reward_model"]["ground_truth"]) >= 0
            assert row["extra_info"]["split"] == split
            assert row["extra_info"]["index"] == index
    assert {row["extra_info"]["family"] for row in rows(demo_directory / "val.parquet")} == set(FAMILIES)


def test_held_out_questions_are_in_no_other_file(demo_directory):
    val = questions(demo_directory / "val.parquet")
    for name in ("train", "sft", "sft_val", "pretrain"):
        assert not val & questions(demo_directory / f"{name}.parquet"), name
    assert not questions(demo_directory / "sft_val.parquet") & questions(demo_directory / "sft.parquet")


def test_the_seed_fixes_every_byte(demo_directory, tmp_path):
    again = make_demo(demo_config(tmp_path / "again"))
    assert digests(again) == digests(demo_directory)
    other = digests(make_demo(demo_config(tmp_path / "other", "trainer.seed=1")))
    changed = {name for name, digest in digests(demo_directory).items() if other[name] != digest}
    assert {f"{name}.parquet" for name in ("pretrain", "sft", "sft_val", "train", "val")} <= changed
    assert "model/model.safetensors" in changed
    assert "model/tokenizer.json" not in changed


def test_a_directory_made_from_the_same_settings_is_left_alone(tmp_path):
    config = demo_config(tmp_path / "data")
    directory = make_demo(config)
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    make_demo(config)
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before
    make_demo(demo_config(tmp_path / "data", "demo.val_rows=6"))
    assert len(rows(directory / "val.parquet")) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(make, "_write_model", fail)
    with pytest.raises(OSError, match="no space"):
        make_demo(demo_config(tmp_path / "data"))
    assert list(tmp_path.iterdir()) == []


def test_foreign_directories_and_impossible_settings_are_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="did not write"):
        make_demo(demo_config(tmp_path / "mine"))
    for override, key in (
        ("demo.vocab_size=500", "demo.vocab_size"),
        ("demo.vocab_size=8192", "demo.vocab_size"),
        ("demo.num_key_value_heads=3", "demo.num_key_value_heads"),
        ("demo.hidden_size=30", "demo.hidden_size"),
        ("demo.val_rows=0", "demo.val_rows"),
    ):
        with pytest.raises(ConfigError, match=key):
            make_demo(demo_config(tmp_path / "data", override))
    assert not (tmp_path / "data").exists()


def test_tokenizer(demo_directory, tokenizer):
    from tokenizers import Tokenizer

    assert len(tokenizer) == tokenizer.vocab_size + len(tokenizer.get_added_vocab()) == 512
    assert max(tokenizer.get_vocab().values()) == 511
    for token in ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"):
        assert len(tokenizer(token).input_ids) == 1
    text = "The 1234 cats' αβγ code:\n\n\tprint(sum(range(10,99+1)))  # 😀"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    # The class that transformers picks for the model must not bring another way to split text.
    assert ids == Tokenizer.from_file(str(demo_directory / "model" / "tokenizer.json")).encode(text).ids
    digits = [token for token in tokenizer.tokenize("98765") if token.strip("Ġ")]
    assert digits == list("98765")
    prompt = rows(demo_directory / "val.parquet")[0]["prompt"]
    tools = json.loads(rows(demo_directory / "sft.parquet")[0]["tools"])
    text = tokenizer.apply_chat_template(prompt, tools=tools, tokenize=False, add_generation_prompt=True)
    assert '{"name": "code_interpreter", "arguments": {"code": "string"}}' in text
    assert len(tokenizer(text).input_ids) < 75


def test_model_is_what_the_configuration_says(demo_directory):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_directory / "model")
    assert model.config.model_type == "qwen2"
    assert model.config.tie_word_embeddings
    assert model.dtype == torch.float32
    assert model.config.vocab_size == 512
    assert 0.045 < model.model.embed_tokens.weight.std() < 0.055


@pytest.mark.parametrize("family", FAMILIES)
def test_snippets_do_what_they_are_meant_to(family):
    rng = random.Random(3)
    run = SnippetRunner(INTERPRETER)
    wrong = []
    for _ in range(40):
        problem = draw(rng, family)
        output = run(problem.correct)
        assert output.succeeded
        assert output.text == str(problem.answer)
        assert not any(run(code).succeeded for code in problem.failing)
        wrong += [run(code) for code in problem.wrong]
        assert all(output.succeeded for output in wrong)
        assert len(output.text) <= 60
    agreeing = sum(output.text == str(problem.answer) for output in wrong[-2:])
    assert agreeing < 2


@pytest.mark.parametrize("style", ["last_line", "traceback"])
@pytest.mark.parametrize("print_last_expression", [False, True])
def test_outputs_are_the_real_sandboxs(sandbox_url, style, print_last_expression):
    """Demonstrations show what the tool is going to return when the model runs the same code later."""
    config = dataclasses.replace(INTERPRETER, error_style=style, print_last_expression=print_last_expression)
    run = SnippetRunner(config)
    rng = random.Random(11)
    codes = ["print(1)\nprint(2)", "1", "None", "", "x = 3", "print('a');print(1/0)", "import nothing", "  print(1)"]
    for family in FAMILIES:
        problem = draw(rng, family)
        codes += [problem.correct, *problem.wrong, *problem.failing]

    async def ask() -> list[str]:
        tool = CodeInterpreterTool(config, sandbox_url)
        try:
            return [(await tool.call({"code": code})).text for code in codes]
        finally:
            await tool.close()

    assert dict(zip(codes, asyncio.run(ask()), strict=True)) == {code: run(code).text for code in codes}


def test_traces_show_what_the_tool_returns():
    rng = random.Random(5)
    run = SnippetRunner(INTERPRETER)
    kinds = {}
    for index in range(600):
        problem = draw(rng, list(FAMILIES)[index % len(FAMILIES)])
        messages, kind = trace(rng, problem, run)
        kinds[kind] = kinds.get(kind, 0) + 1
        for place, message in enumerate(messages):
            if message["role"] == "tool":
                code = messages[place - 1]["tool_calls"][0]["function"]["arguments"]["code"]
                assert message["content"] == run(code).text
        if kind in ("correct", "retry"):
            assert messages[-1]["content"] == f"The answer is \\boxed{{{problem.answer}}}."
    assert set(kinds) == {"guess", "correct", "wrong", "retry", "give_up"}
    assert 0.25 < kinds["guess"] / 600 < 0.4
    assert 0.15 < kinds["correct"] / 600 < 0.3
