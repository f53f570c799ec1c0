"""Environments of others: an OpenEnv server with the protocol of its own package, and reasoning_gym itself."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from megatron_retool.config import ConfigError, load_config
from megatron_retool.registry import ExtensionError
from megatron_retool.rollout_rows import AGENT_KEY
from megatron_retool.trajectory import FinishReason
from sglang_rollout.agent.agents import check_agent, make_agent
from tests.sglang_rollout.agent.markov_policy import ANSWER, hermes_call
from tests.sglang_rollout.agent.test_loop import END, ScriptedEngine
from tests.sglang_rollout.environments.test_loop import started
from tests.sglang_rollout.scripted import ScriptedTools


class OpenEnvServer:
    """The routes of openenv-core 0.3: GET /schema and a WebSocket on /ws, an episode for each connection."""

    def __init__(self) -> None:
        self.open = 0
        self.seeds: list[int | None] = []

    async def schema(self, request: web.Request) -> web.Response:
        fields = {"code": {"type": "string"}, "metadata": {"type": "object"}}
        action = {"type": "object", "description": "Say a word.", "properties": fields, "required": ["code"]}
        return web.json_response({"action": action, "observation": {}, "state": {}})

    async def episode(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.open += 1
        said: list[str] = []
        async for raw in socket:
            message = json.loads(raw.data)
            if message["type"] == "reset":
                self.seeds.append(message["data"]["seed"])
                data = {"observation": {"text": "Say three words."}, "reward": None, "done": False}
            else:
                said.append(message["data"]["code"])
                data = {"observation": {"text": f"{len(said)} said"}, "reward": 0.5, "done": len(said) == 3}
            if said[-1:] == ["bad"]:
                await socket.send_json({"type": "error", "data": {"message": "no", "code": "EXECUTION_ERROR"}})
                continue
            await socket.send_json({"type": "observation", "data": data})
        self.open -= 1
        return socket


def lived(tokenizer, turns, **kwargs):
    async def scenario():
        server = OpenEnvServer()
        app = web.Application()
        app.router.add_get("/schema", server.schema)
        app.router.add_get("/ws", server.episode)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        settings = json.dumps({"url": url, "observation_field": "text", **kwargs})
        overrides = [f"rollout.environment_kwargs={settings}", "rollout.multi_turn.tools=[]"]
        agent = make_agent(load_config(None, ["rollout.environment=openenv", *overrides]), tokenizer, ScriptedTools())
        state = started(tokenizer)
        state.seed = 11
        assert await agent.run(state, ScriptedEngine(tokenizer, turns), lambda: False)
        await asyncio.sleep(0.05)
        left = server.open
        await runner.cleanup()
        return state, server.seeds, left

    return asyncio.run(scenario())


def test_an_openenv_server_leads_a_trajectory(tokenizer):
    call = hermes_call("word", name="act")
    state, seeds, left = lived(tokenizer, [call + END, call + call + END])
    prompt, text = tokenizer.decode(state.prompt_ids), tokenizer.decode(state.response_ids)
    assert "the data's question" in prompt and "Say three words." in prompt and "Say a word." in prompt
    assert '"metadata"' not in prompt and "1 said" in text and seeds == [11] and left == 0
    assert state.finish_reason is FinishReason.STOP and state.reward_info[AGENT_KEY]["result"]["score"] == 1.5


def test_an_error_of_the_server_is_a_crash_of_the_episode(tokenizer):
    state, _, left = lived(tokenizer, [hermes_call("bad", name="act") + END], reward="last")
    end = state.reward_info[AGENT_KEY]
    assert end["outcome"] == "crash" and "EXECUTION_ERROR" in end["message"] and left == 0


def gym(**kwargs):
    kwargs = {"dataset": "chain_sum", "size": 20, **kwargs}
    overrides = [f"rollout.environment_kwargs={json.dumps(kwargs)}", "rollout.multi_turn.tools=[]"]
    return load_config(None, ["rollout.environment=reasoning_gym", *overrides])


def test_reasoning_gym_asks_and_scores(tokenizer):
    agent = make_agent(gym(), tokenizer, ScriptedTools())
    asked = []
    for right in (False, True):
        state = started(tokenizer)
        state.extra_info = {"uid": "a"}

        async def generate(state, most, deadline, right=right):
            question = tokenizer.decode(state.prompt_ids).rpartition("user\n")[2]
            asked.append(question)
            expression = question.split("?")[0].rpartition(":")[2].split("=")[0]
            answer = eval(expression) if right else "many"
            return await ScriptedEngine(tokenizer, [f"<answer>{answer}</answer>{END}"])(state, most, deadline)

        assert asyncio.run(agent.run(state, generate, lambda: False))
        result = state.reward_info[AGENT_KEY]["result"]
        assert (result["acc"] == 1.0) == right and (result["score"] == 1.0) == right
    assert asked[0] == asked[1]
    state = started(tokenizer)
    assert asyncio.run(agent.run(state, ScriptedEngine(tokenizer, [ANSWER + END]), lambda: False))
    assert state.reward_info[AGENT_KEY]["result"]["acc"] == 0.0


@pytest.mark.parametrize(
    "config, message",
    [
        (lambda: gym(dataset="no_such_task"), "makes no such tasks"),
        (lambda: gym(settings={"terms": 3}), "makes no such tasks"),
        (lambda: load_config(None, ["rollout.environment=openenv", "rollout.environment_kwargs={url: x}",
                                    "rollout.multi_turn.tools=[]"]), "must be an address"),
        (lambda: load_config(None, ["rollout.environment=verifier", "rollout.multi_turn.tools=[]"]),
         "not one of openenv, reasoning_gym"),
    ],
)  # fmt: skip
def test_wrong_settings_are_one_message(config, message):
    with pytest.raises((ConfigError, ExtensionError), match=message):
        check_agent(config())
