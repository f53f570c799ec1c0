"""Environments of an OpenEnv server: each trajectory has a connection, which is an episode of its own there.

The server says what an action is (GET /schema), and the policy acts by calls of one tool whose arguments are an
action's fields. What is observed comes back as JSON, or as the text of one field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from sglang_rollout.environments.base import Start, seed_of
from sglang_rollout.environments.served import ServedEnvironment

_MESSAGE_BYTES = 16 << 20


class OpenEnvEnvironment(ServedEnvironment):
    """An episode on an OpenEnv server, over its WebSocket. Its arguments are those of ``ServedEnvironment``."""

    def __init__(
        self, *, url: str, tool: str = "act", observation_field: str | None = None, reward: str = "sum"
    ) -> None:
        super().__init__(url, tool, observation_field, reward)
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, row: Mapping[str, Any]) -> Start:
        """Connect to the server; its first observation and the tool that acts."""
        self.http = aiohttp.ClientSession()
        async with self.http.get(f"{self.url}/schema") as answer:
            answer.raise_for_status()
            schema = (await answer.json())["action"]
        # What every OpenEnv action has beside its own fields is not the policy's.
        fields = {name: each for name, each in schema.get("properties", {}).items() if name != "metadata"}
        parameters = {**schema, "type": "object", "properties": fields}
        self._socket = await self.http.ws_connect(f"{self.url}/ws", max_msg_size=_MESSAGE_BYTES)
        first = await self._ask("reset", {"seed": seed_of(row)})
        return self.started(row, first, schema.get("description") or "Act in the environment.", parameters)

    async def act(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take one step in the episode."""
        return await self._ask("step", dict(arguments))

    async def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            await self._socket.close()
        await super().close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        assert self._socket is not None
        await self._socket.send_json({"type": kind, "data": data})
        answer = await self._socket.receive_json()
        if answer.get("type") != "observation":
            raise RuntimeError(f"the server answered {kind} with {json.dumps(answer)[:500]}")
        result: dict[str, Any] = answer["data"]
        return result
