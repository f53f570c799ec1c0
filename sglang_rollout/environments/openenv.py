"""Environments of an OpenEnv server: each trajectory has a connection, which is an episode of its own there.

The server says what an action is (GET /schema), and the policy acts by calls of one tool whose arguments are an
action's fields. What is observed comes back as JSON, or as the text of one field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from megatron_retool.config import ConfigError
from sglang_rollout.environments.base import Action, Environment, Start, Step

_TOKEN_BYTES = 16 << 20


class OpenEnvEnvironment(Environment):
    """An episode on an OpenEnv server, over its WebSocket.

    Args:
        url: of the server: http://127.0.0.1:8000.
        tool: what the policy calls the action.
        observation_field: the field of an observation that the policy reads; None: all of it as JSON.
        reward: of the episode: the ``sum`` of all steps', or the ``last`` one's.

    Raises:
        ConfigError: a setting is wrong.
    """

    def __init__(
        self, *, url: str, tool: str = "act", observation_field: str | None = None, reward: str = "sum"
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"rollout.environment_kwargs.url={url!r} must be an address such as http://127.0.0.1:8000"
            )
        if reward not in ("sum", "last"):
            raise ConfigError(f"rollout.environment_kwargs.reward={reward!r} must be sum or last")
        self._url = url.rstrip("/")
        self._tool, self._field, self._reward = tool, observation_field, reward
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._rewards: list[float] = []
        self._done = False

    async def reset(self, row: Mapping[str, Any]) -> Start:
        self._http = aiohttp.ClientSession()
        async with self._http.get(f"{self._url}/schema") as answer:
            answer.raise_for_status()
            schema = (await answer.json())["action"]
        # What every OpenEnv action has beside its own fields is not the policy's.
        fields = {name: each for name, each in schema.get("properties", {}).items() if name != "metadata"}
        parameters = {**schema, "type": "object", "properties": fields}
        self._socket = await self._http.ws_connect(f"{self._url}/ws", max_msg_size=_TOKEN_BYTES)
        observed = self._observed(await self._ask("reset", {"seed": row["seed"]}))
        function = {
            "name": self._tool,
            "description": schema.get("description") or "Act in the environment.",
            "parameters": parameters,
        }
        messages = [*row["messages"], {"role": "user", "content": observed}]
        return Start(messages, [{"type": "function", "function": function}])

    async def step(self, action: Action) -> Step:
        if not action.calls:
            return Step(done=True)
        messages = []
        for call in action.calls:
            text = "The episode is over."
            if not self._done:
                text = self._observed(await self._ask("step", dict(call.arguments)))
            messages.append({"role": "tool", "content": text})
        return Step(messages, done=self._done)

    def score(self) -> float:
        if not self._rewards:
            return 0.0
        return sum(self._rewards) if self._reward == "sum" else self._rewards[-1]

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        if self._http is not None:
            await self._http.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        assert self._socket is not None
        await self._socket.send_json({"type": kind, "data": data})
        answer = await self._socket.receive_json()
        if answer.get("type") != "observation":
            raise RuntimeError(f"the server answered {kind} with {json.dumps(answer)[:500]}")
        found: dict[str, Any] = answer["data"]
        return found

    def _observed(self, data: Mapping[str, Any]) -> str:
        if data.get("reward") is not None:
            self._rewards.append(float(data["reward"]))
        self._done = bool(data.get("done"))
        observation = data.get("observation")
        if self._field is not None and isinstance(observation, Mapping):
            return str(observation[self._field])
        return json.dumps(observation, ensure_ascii=False)
