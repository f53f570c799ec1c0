"""What an engine answers to requests without its key, and where the key can be read."""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_retool.config import EngineConfig
from sglang_rollout.engine.client import SGLangClient
from sglang_rollout.engine.key import authorization, engine_key
from sglang_rollout.engine.launch_command import PLUGINS
from sglang_rollout.engine.process import SGLangServer
from tests.kit import markov_policy
from untrusted.process_tree import descendants

ONE_TOKEN = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[SGLangServer]:
    directory = tmp_path_factory.mktemp("engine")
    model = markov_policy.save(markov_policy.random_model(tokenizer, 0), tokenizer, directory / "model")
    config = EngineConfig(device="cpu", max_total_tokens=2048)
    with SGLangServer(config, model_path=model, log_file=directory / "engine.log") as server:
        yield server


def status(server: SGLangServer, path: str, body: object | None, headers: dict[str, str]) -> int:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.base_url + path, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
def test_an_engine_answers_who_shows_its_key_alone(server: SGLangServer) -> None:
    update = {"model_path": str(server.model_path)}
    requests: list[tuple[str, object | None]] = [
        ("/update_weights_from_disk", update), ("/generate", ONE_TOKEN), ("/server_info", None), ("/model_info", None),
        ("/flush_cache", {}), ("/freeze_gc", {}), ("/v1/models", None),
    ]  # fmt: skip
    for path, body in requests:
        for headers in ({}, {"Authorization": "Bearer guessed"}):
            assert status(server, path, body, headers) in (401, 403), path
        assert status(server, path, body, authorization()) == 200, path

    async def generate() -> Any:
        async with SGLangClient(server.base_url) as client:
            return await client.request("/generate", ONE_TOKEN)

    assert len(asyncio.run(generate())["output_ids"]) == 1


def test_the_key_stands_in_no_log_command_line_or_environment(server: SGLangServer) -> None:
    assert server.pid is not None
    assert status(server, "/generate", ONE_TOKEN, authorization()) == 200
    for pid in (server.pid, *descendants(server.pid)):
        process = psutil.Process(pid)
        assert engine_key() not in " ".join(process.cmdline())
        assert engine_key() not in "".join(process.environ().values())
    log = server.log_file.read_text(errors="replace")
    assert "server_args=" in log, "the log no longer prints the settings: look where SGLang prints them now"
    assert engine_key() not in log


def test_the_keys_file_is_its_owners_and_is_gone_once_the_server_runs(
    server: SGLangServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server._key_file is None

    class Sleeping(SGLangServer):
        def command(self) -> list[str]:
            return [sys.executable, "-c", "import time; time.sleep(60)"]

    config = EngineConfig(device="cpu")
    sleeping = Sleeping(config, model_path=server.model_path, log_file=tmp_path / "engine.log")
    sleeping.launch()
    try:
        path = sleeping._key_file
        assert path is not None and stat.S_IMODE(path.stat().st_mode) == 0o600
        assert engine_key() in path.read_text()
    finally:
        sleeping.stop()
    assert not path.exists()


def test_processes_agree_on_a_key_that_they_are_given() -> None:
    code = (
        "from sglang_rollout.engine.key import engine_key, use_engine_key; use_engine_key('theirs'); "
        "print(engine_key())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "theirs"


def test_what_is_logged_hides_keys_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGINS))
    import hidden_key

    shown = hidden_key.without_keys({"api_key": "secret", "admin_api_key": None, "port": 1})
    assert shown == {"api_key": "<hidden>", "admin_api_key": None, "port": 1}
