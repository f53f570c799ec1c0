"""The system message of a served model: the run's own, another, or none."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest

from megatron_retool.config import load_config
from megatron_retool.data.demo.tokenizer import CHAT_TEMPLATE
from megatron_retool.serving.system_prompt import choose, with_system

QUESTION = {"role": "user", "content": "How many?"}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def data(*files: Path):
    return load_config(None, [f"data.train_files=[{','.join(map(str, files))}]"]).data


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("prompts", "message", "words"),
    [
        ([[system("Solve."), QUESTION], [system("Solve."), QUESTION]], "Solve.", "the run's"),
        ([[QUESTION]], None, "as in the run's prompts"),
        ([[system("Solve."), QUESTION], [system("Think."), QUESTION]], None, "different"),
        (["How many?"], None, "as in the run's prompts"),
    ],
)
def test_the_message_of_the_runs_prompts(tmp_path, kind, prompts, message, words):
    file = tmp_path / f"train.{kind}"
    if kind == "parquet":
        parquet.write_table(pyarrow.table({"prompt": prompts}), file)
    else:
        file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    found, said = choose(data(file), None, without=False)
    assert found == message and words in said


def test_the_command_line_comes_first(tmp_path):
    file = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.table({"prompt": [[system("Solve."), QUESTION]]}), file)
    assert choose(data(file), "Be brief.", without=False)[0] == "Be brief."
    assert choose(data(file), None, without=True)[0] is None


def test_files_that_are_gone_or_damaged_are_said(tmp_path):
    damaged = tmp_path / "train.parquet"
    damaged.write_bytes(b"PAR1 and no more")
    message, said = choose(data(damaged, tmp_path / "gone.parquet"), None, without=False)
    assert message is None and "--system TEXT" in said


def test_a_message_of_the_callers_own_stays():
    assert with_system([QUESTION], "Solve.") == [system("Solve."), QUESTION]
    for own in (system("Mine."), {"role": "developer", "content": "Mine."}):
        assert with_system([own, QUESTION], "Solve.") == [own, QUESTION]
    assert with_system([QUESTION], None) == [QUESTION]


def test_the_demos_template_shows_tools_without_a_system_message():
    from transformers.utils.chat_template_utils import render_jinja_template

    schema = {"name": "run", "parameters": {"type": "object", "properties": {"code": {"type": "string"}}}}
    tools = [{"type": "function", "function": schema}]

    def rendered(messages):
        (text,), _ = render_jinja_template([messages], tools=tools, chat_template=CHAT_TEMPLATE)
        return text

    listed = '<tools>\n{"name": "run", "arguments": {"code": "string"}}\n</tools>'
    assert rendered([QUESTION]).startswith(f"<|im_start|>system\n{listed}<|im_end|>\n<|im_start|>user\n")
    below = rendered([system("Solve."), QUESTION])
    assert below.startswith(f"<|im_start|>system\nSolve.\n{listed}<|im_end|>\n") and below.count("<tools>") == 1
