"""What environments on a server have in common: the policy acts by calls of one tool, and reads what it observes."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from megatron_retool.config import ConfigError
from sglang_rollout.environments.base import Action, Environment, Start, Step


class ServedEnvironment(Environment):
    """An episode on a server.

    Args:
        url: of the server: http://127.0.0.1:8000.
        tool: what the policy calls the action.
        observation_field: the field of an observation that the policy reads; None: all of it as JSON.
        reward: of the episode: the ``sum`` of all steps', or the ``last`` one's.

    Raises:
        ConfigError: a setting is wrong.
    """

    def __init__(self, url: str, tool: str, observation_field: str | None, reward: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"rollout.environment_kwargs.url={url!r} must be an address such as http://127.0.0.1:8000"
            )
        if reward not in ("sum", "last"):
            raise ConfigError(f"rollout.environment_kwargs.reward={reward!r} must be sum or last")
        self.url = url.rstrip("/")
        self.http: aiohttp.ClientSession | None = None
        self._tool, self._field, self._reward = tool, observation_field, reward
        self._rewards: list[float] = []
        self._done = False

    @abstractmethod
    async def act(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """What comes of a call of the tool: observation, reward (or None) and done."""

    def started(
        self, row: Mapping[str, Any], first: Mapping[str, Any], description: str, parameters: Mapping[str, Any]
    ) -> Start:
        """The data's messages, what is observed ``first``, and the tool."""
        function = {"name": self._tool, "description": description, "parameters": dict(parameters)}
        messages = [*row["messages"], {"role": "user", "content": self._observed(first)}]
        return Start(messages, [{"type": "function", "function": function}])

    async def step(self, action: Action) -> Step:
        """Act once for each call; a turn without a call ends the episode."""
        if not action.calls:
            return Step(done=True)
        messages = []
        for call in action.calls:
            text = "The episode is over."
            if not self._done:
                text = self._observed(await self.act(call.arguments))
            messages.append({"role": "tool", "content": text})
        return Step(messages, done=self._done)

    def score(self) -> float:
        """The sum of the rewards, or the last one, as configured."""
        if not self._rewards:
            return 0.0
        return sum(self._rewards) if self._reward == "sum" else self._rewards[-1]

    async def close(self) -> None:
        """Close the connection."""
        if self.http is not None:
            await self.http.close()

    def _observed(self, data: Mapping[str, Any]) -> str:
        if data.get("reward") is not None:
            self._rewards.append(float(data["reward"]))
        self._done = bool(data.get("done"))
        observation = data.get("observation")
        if self._field is not None and isinstance(observation, Mapping):
            return str(observation[self._field])
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
