"""`serve` and `chat` as processes: they answer, they say what is wrong before they start, and nothing stays behind."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path

import httpx
import openai
import pytest

from megatron_retool.__main__ import main
from tests.end_to_end.conftest import wait_until_gone
from tests.kit.markov_policy import ANSWER
from tests.serving.processes import lines_until, start
from tests.serving.table_policy import SETTINGS

SEED_OF_A_CALL = "1"
"""With which the model calls the tool after this question, and then answers."""


def test_a_question_on_the_command_line(table_model_directory: Path):
    process, marker = start(
        "chat", str(table_model_directory), "--prompt", "What is 6*7?", "--seed", SEED_OF_A_CALL, *SETTINGS
    )
    answer, notes = process.communicate(timeout=400)
    assert process.returncode == 0, notes
    assert re.fullmatch(rf"(word)*{re.escape(ANSWER)}\n", answer), "standard output is the answer and nothing else"
    assert "print(6*7)" in notes and re.search(r"code_interpreter: ok, [\d.]+ s", notes), notes
    assert re.search(r"^. 42 ", notes, re.MULTILINE), "the real sandbox has computed it"
    assert wait_until_gone(marker, 10) == {}


def test_a_server_from_start_to_sigterm(table_model_directory: Path):
    words = ("--tools", "--port", "0", "rollout.engine.count=2", "rollout.multi_turn.max_assistant_turns=20")
    process, marker = start("serve", str(table_model_directory), *words, *SETTINGS, key="our key")
    try:
        told = lines_until(process, "health")
        url = re.search(r"ANTHROPIC_BASE_URL=(\S+) ANTHROPIC_API_KEY=\$MEGATRON_RETOOL_API_KEY", told)[1]
        assert "our key" not in told
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="our key")
        asked = {"model": "any", "messages": [{"role": "user", "content": "What is 6 * 7?"}]}
        found = client.chat.completions.create(**asked, n=4)
        assert len(found.choices) == 4
        assert all(each.message.content.endswith(ANSWER) and not each.message.tool_calls for each in found.choices)
        health = httpx.get(f"{url}/health").json()
        assert (health["status"], health["tools"], len(health["engines"])) == ("ok", ["code_interpreter"], 2)
        assert httpx.get(f"{url}/v1/models").status_code == 401
    finally:
        process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    assert wait_until_gone(marker, 10) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "runs/no_such_run", "--port", "0"], "runs/no_such_run does not exist: name a run"),
        (["chat", "runs/no_such_run"], "runs/no_such_run does not exist: name a run"),
        (["serve", "MODEL", "--port", "0", "rollout.engine.cuont=2"], "rollout.engine.cuont"),
        (["chat", "MODEL", "--config", "no.yaml"], "config file no.yaml does not exist"),
        (["serve", "MODEL", "--host", "no.such.host.invalid"], "this machine has no such address"),
        (["serve", "NO_TOKENIZER", "--port", "0"], "the directory holds no tokenizer"),
        (["chat", "NO_TEMPLATE"], "the tokenizer has no chat template"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    words: list[str],
    message: str,
    table_model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    for name, missing in (("NO_TOKENIZER", "token"), ("NO_TEMPLATE", "chat_template")):
        copy = tmp_path / name
        copy.mkdir()
        for file in table_model_directory.iterdir():
            if not file.name.startswith(missing):
                (copy / file.name).symlink_to(file)
    words = [str(table_model_directory) if word == "MODEL" else word for word in words]
    settings = SETTINGS if words[1] != "runs/no_such_run" else ()
    assert main([*words, *settings]) == 1
    assert message in capsys.readouterr().out


def test_a_port_that_is_taken(table_model_directory: Path, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", str(table_model_directory), "--port", str(taken.getsockname()[1])]) == 1
    assert "is taken: end what listens there" in capsys.readouterr().out
