"""Agents as they are installed, against a scripted engine: each runs a command, and every turn is trained as sampled.

``.ci/install_packages.sh`` installs them. None of them reaches out: the model is the gateway, and all else is off.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from megatron_retool.config import MultiTurnConfig, SamplingConfig
from sglang_rollout.engine.base import GenerateResult
from sglang_rollout.gateway.interface import SessionLimits
from sglang_rollout.gateway.server import Gateway

PROGRAMS = (
    Path(os.environ.get("AGENT_CLIENTS_DIR", Path.home() / ".cache/megatron-retool/agent_clients"))
    / "node_modules/.bin"
)
QUESTION = "What is 6 times 7? Run a command."
ANSWER = "The answer is 42."
COMMAND = "echo forty-two"
CALLS = {
    "Bash": {"command": COMMAND, "description": "Say it"},
    "shell_command": {"command": COMMAND},
    "exec_command": {"cmd": COMMAND},
    "run_shell_command": {"command": COMMAND, "description": "Say it", "is_background": False},
    "bash": {"command": COMMAND, "description": "Say it"},
}
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENAI_MODEL": "policy",
    "NO_COLOR": "1",
}


class CallsOnce:
    """Calls the client's shell in its first turn with tools, and then answers."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        self.sampled: list[tuple[list[int], list[int]]] = []

    async def generate(self, state, request):
        context = [*state.prompt_ids, *state.response_ids]
        text = self.tokenizer.decode(context)
        name = next((name for name in CALLS if f'"name": "{name}"' in text), None)
        said = ANSWER
        if name is not None and not self.tokenizer.decode(state.response_ids):
            said = f"<tool_call>\n{json.dumps({'name': name, 'arguments': CALLS[name]})}\n</tool_call>"
        ids = [*self.tokenizer.encode(said, add_special_tokens=False), self.tokenizer.eos_token_id]
        self.sampled.append((context, ids))
        return GenerateResult(ids, [-0.5] * len(ids), [0] * len(ids), "stop", ids[-1])


def codex(session, directory):
    provider = f'name="gateway",base_url="{session.base_url}",env_key="OPENAI_API_KEY",wire_api="responses"'
    settings = [f"model_providers.gateway={{{provider}}}", 'model_provider="gateway"', "analytics.enabled=false"]
    return ["exec", "--skip-git-repo-check", *(each for one in settings for each in ("-c", one)), "-m", "policy"]


def opencode(session, directory):
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": session.base_url, "apiKey": session.key},
        "models": {"policy": {"name": "policy"}},
    }
    settings = {"share": "disabled", "autoupdate": False, "model": "gateway/policy", "provider": {"gateway": provider}}
    (directory / "opencode.json").write_text(json.dumps(settings))
    return ["run"]


CLIENTS = {
    "claude": lambda session, directory: ["--allowedTools", "Bash", "-p"],
    "codex": codex,
    "qwen": lambda session, directory: ["--auth-type", "openai", "--approval-mode", "yolo", "-p"],
    "opencode": opencode,
}


@pytest.mark.parametrize("name", CLIENTS)
def test_an_installed_agent_trains_exactly(tokenizer, tmp_path, name):
    program = PROGRAMS / name
    if not program.exists():
        pytest.skip(f"{program} is missing: .ci/install_packages.sh installs it")

    async def run():
        engine = CallsOnce(tokenizer)
        async with Gateway(engine, tokenizer, MultiTurnConfig()) as gateway:
            session = gateway.open_session(SamplingConfig(), limits=SessionLimits(context_length=500_000))
            settings = {
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path),
                "TMPDIR": str(tmp_path),
                "OPENAI_BASE_URL": session.base_url,
                "OPENAI_API_KEY": session.key,
                "ANTHROPIC_BASE_URL": session.anthropic_base_url,
                "ANTHROPIC_API_KEY": session.key,
                **QUIET,
            }
            process = await asyncio.create_subprocess_exec(
                program,
                *CLIENTS[name](session, tmp_path),
                QUESTION,
                cwd=tmp_path,
                env=settings,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                output, _ = await asyncio.wait_for(process.communicate(), 120)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            assert process.returncode == 0 and ANSWER in output.decode(), output.decode()[-2000:]
            assert not gateway.statistics.errors
            return engine.sampled, await session.close()

    sampled, segments = asyncio.run(run())
    trained = []
    for segment in segments:
        prompt, response = segment.prompt_ids.tolist(), segment.response_ids.tolist()
        for turn in range(int(segment.turn_ids.max()) + 1):
            places = [place for place, number in enumerate(segment.turn_ids) if number == turn]
            trained.append(([*prompt, *response[: places[0]]], response[places[0] : places[-1] + 1]))
    assert sorted(trained) == sorted(sampled)
    (conversation,) = (segment for segment in segments if len(segment.calls) > 1)
    # What the command says is the client's: Codex starts none where its sandbox cannot be made.
    assert "<tool_response>" in tokenizer.decode(conversation.response_ids.tolist())
