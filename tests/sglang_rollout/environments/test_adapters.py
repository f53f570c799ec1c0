"""Environments of others: servers in the words of OpenEnv and of Gymnasium, and reasoning_gym itself."""

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
from tests.kit.markov_policy import ANSWER, hermes_call
from tests.kit.scripted import ScriptedTools
from tests.sglang_rollout.agent.test_loop import END, ScriptedEngine
from tests.sglang_rollout.environments.test_loop import started


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

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/schema", self.schema), web.get("/ws", self.episode)]


class GymnasiumServer:
    """Guess a number below ten, that the seed gives; three tries, and as many episodes at a time as are asked for."""

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.episodes: dict[str, list[int]] = {}

    @property
    def open(self) -> int:
        return len(self.episodes)

    async def reset(self, request: web.Request) -> web.Response:
        self.seeds.append((await request.json())["seed"])
        name = f"episode {len(self.seeds)}"
        self.episodes[name] = []
        return web.json_response({"observation": "Guess.", "info": {}, "session_id": name})

    async def step(self, request: web.Request) -> web.Response:
        body = await request.json()
        tries, secret = self.episodes[body["session_id"]], 7
        if body["action"] == 9:
            return web.Response(status=422, text="nine is not known here")
        tries.append(body["action"])
        found = body["action"] == secret
        what = "found" if found else "higher" if body["action"] < secret else "lower"
        state = {"text": what, "tries": len(tries)}
        ended = {"terminated": found, "truncated": len(tries) == 3}
        return web.json_response({"observation": state, "reward": float(found) - 0.25, **ended, "info": {}})

    async def close(self, request: web.Request) -> web.Response:
        del self.episodes[(await request.json())["session_id"]]
        return web.Response(status=204)

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/reset", self.reset), web.post("/step", self.step), web.post("/close", self.close)]


def lived(tokenizer, turns, kind="openenv", uid="a", **kwargs):
    """A trajectory, the seeds that the server was given, and the episodes that are still open."""

    async def scenario():
        server = OpenEnvServer() if kind == "openenv" else GymnasiumServer()
        app = web.Application()
        app.router.add_routes(server.routes())
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        settings = json.dumps({"url": url, **kwargs})
        overrides = [f"rollout.environment_kwargs={settings}", "rollout.multi_turn.tools=[]"]
        config = load_config(None, [f"rollout.environment={kind}", *overrides])
        agent = make_agent(config.rollout, config.data, tokenizer, ScriptedTools())
        state = started(tokenizer)
        state.extra_info = {"uid": uid}
        assert await agent.run(state, ScriptedEngine(tokenizer, turns), lambda: False)
        await asyncio.sleep(0.05)
        left = server.open
        await runner.cleanup()
        return state, server.seeds, left

    return asyncio.run(scenario())


def test_an_openenv_server_leads_a_trajectory(tokenizer):
    call = hermes_call("word", name="act")
    state, seeds, left = lived(tokenizer, [call + END, call + call + END], observation_field="text")
    prompt, text = tokenizer.decode(state.prompt_ids), tokenizer.decode(state.response_ids)
    assert "the data's question" in prompt and "Say three words." in prompt and "Say a word." in prompt
    assert '"metadata"' not in prompt and "1 said" in text and left == 0
    assert state.finish_reason is FinishReason.STOP and state.reward_info[AGENT_KEY]["result"]["score"] == 1.5
    # Rollouts of one row are compared: they have one world, and other rows have others.
    state, (seed,), _ = lived(tokenizer, [ANSWER + END])
    assert [seed] == seeds and 0 <= seed < 1 << 31
    assert lived(tokenizer, [ANSWER + END], uid="b")[1] != seeds


def test_an_error_of_the_server_is_a_crash_of_the_episode(tokenizer):
    state, _, left = lived(tokenizer, [hermes_call("bad", name="act") + END], reward="last")
    end = state.reward_info[AGENT_KEY]
    assert end["outcome"] == "crash" and "EXECUTION_ERROR" in end["message"] and left == 0


def guess(*numbers: int) -> str:
    calls = [{"name": "guess", "arguments": {"action": number}} for number in numbers]
    return "".join(f"<tool_call>\n{json.dumps(each)}\n</tool_call>" for each in calls) + END


GUESSING = {"action": {"type": "integer", "minimum": 0}, "tool": "guess", "observation_field": "text"}


def test_a_gymnasium_server_leads_a_trajectory(tokenizer):
    turns = [guess(3), guess(-1), guess(8, 7, 7), ANSWER + END]
    state, (seed,), left = lived(tokenizer, turns, "gymnasium_server", description="Say a number.", **GUESSING)
    prompt, text = tokenizer.decode(state.prompt_ids), tokenizer.decode(state.response_ids)
    assert "the data's question" in prompt and "Guess." in prompt and "Say a number." in prompt
    # What breaks the schema is answered by the loop, and no try.
    assert text.count("<tool_response>") == 2 and "higher" in text and "minimum" in text and left == 0
    assert state.finish_reason is FinishReason.STOP and state.reward_info[AGENT_KEY]["result"]["score"] == 0.25
    again, seeds, _ = lived(tokenizer, [guess(1), ANSWER + END], "gymnasium_server", reward="last", **GUESSING)
    assert seeds == [seed] and again.reward_info[AGENT_KEY]["result"]["score"] == -0.25
    over, _, left = lived(tokenizer, [guess(1), guess(2), guess(3), guess(7)], "gymnasium_server", **GUESSING)
    assert over.turn == 2 and over.finish_reason is FinishReason.STOP and left == 0


def test_a_refusal_of_a_gymnasium_server_is_a_crash_of_the_episode(tokenizer):
    state, _, left = lived(tokenizer, [guess(9)], "gymnasium_server", **GUESSING)
    end = state.reward_info[AGENT_KEY]
    assert end["outcome"] == "crash" and "status 422: nine is not known here" in end["message"] and left == 0


def gym(**kwargs):
    kwargs = {"dataset": "chain_sum", "size": 20, **kwargs}
    overrides = [f"rollout.environment_kwargs={json.dumps(kwargs)}", "rollout.multi_turn.tools=[]"]
    return load_config(None, ["rollout.environment=reasoning_gym", *overrides])


def test_reasoning_gym_asks_and_scores(tokenizer):
    config = gym()
    agent = make_agent(config.rollout, config.data, tokenizer, ScriptedTools())
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
    ("config", "message"),
    [
        (lambda: gym(dataset="no_such_task"), "makes no such tasks"),
        (lambda: gym(settings={"terms": 3}), "makes no such tasks"),
        (lambda: load_config(None, ["rollout.environment=openenv", "rollout.environment_kwargs={url: x}",
                                    "rollout.multi_turn.tools=[]"]), "must be an address"),
        (lambda: load_config(None, ["rollout.environment=verifier", "rollout.multi_turn.tools=[]"]),
         "not one of gymnasium_server, openenv, reasoning_gym"),
        (lambda: load_config(None, ["rollout.environment=gymnasium_server", "rollout.multi_turn.tools=[]",
                                    "rollout.environment_kwargs={url: 'http://x', action: {type: whole}}"]),
         "action is no JSON schema"),
    ],
)  # fmt: skip
def test_wrong_settings_are_one_message(config, message):
    with pytest.raises((ConfigError, ExtensionError), match=message):
        check_agent(config().rollout)
