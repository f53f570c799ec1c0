"""Environments behind two addresses in Gymnasium's words: POST /reset and POST /step, JSON in and out.

| request | body | answer |
|---|---|---|
| /reset | seed | observation; session_id where the server has several episodes |
| /step | action, and the session_id | observation, reward, terminated and truncated (or done) |
| /close | session_id, where there is one | nothing that is read |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import jsonschema

from megatron_retool.config import ConfigError
from sglang_rollout.environments.base import Start, seed_of
from sglang_rollout.environments.served import ServedEnvironment


class GymnasiumServerEnvironment(ServedEnvironment):
    """An episode on such a server. What is no argument of ``ServedEnvironment``:

    Args:
        action: JSON schema of an action: {type: integer, minimum: 0, maximum: 3}.
        description: what the policy reads about the tool.
    """

    def __init__(
        self,
        *,
        url: str,
        action: Mapping[str, Any],
        description: str = "Act in the environment.",
        tool: str = "act",
        observation_field: str | None = None,
        reward: str = "sum",
    ) -> None:
        super().__init__(url, tool, observation_field, reward)
        self._action, self._description = dict(action), description
        try:
            jsonschema.Draft202012Validator.check_schema(self._action)
        except jsonschema.SchemaError as error:
            raise ConfigError(f"rollout.environment_kwargs.action is no JSON schema: {error.message}") from error
        self._session: dict[str, Any] = {}

    async def reset(self, row: Mapping[str, Any]) -> Start:
        """Open a session on the server; its first observation and the tool that acts."""
        self.http = aiohttp.ClientSession()
        first = await self._ask("reset", {"seed": seed_of(row)})
        self._session = {name: first[name] for name in ("session_id",) if name in first}
        parameters = {"type": "object", "properties": {"action": self._action}, "required": ["action"]}
        return self.started(row, first, self._description, parameters)

    async def act(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take one step in the session."""
        result = await self._ask("step", {"action": arguments["action"], **self._session})
        done = result.get("done") or result.get("terminated") or result.get("truncated")
        return {**result, "done": bool(done)}

    async def close(self) -> None:
        """End the session, and close the connection."""
        try:
            if self._session:
                await self._ask("close", self._session)
        finally:
            await super().close()

    async def _ask(self, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        assert self.http is not None
        async with self.http.post(f"{self.url}/{what}", json=body) as answer:
            if answer.status >= 400:
                said = (await answer.text())[:500]
                raise RuntimeError(f"the server answered {what} with status {answer.status}: {said}")
            result = await answer.json() if what != "close" else {}
        if what != "close" and (not isinstance(result, dict) or "observation" not in result):
            raise RuntimeError(f"the server answered {what} without an observation: {str(result)[:500]}")
        return result
