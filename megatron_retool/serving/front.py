"""The gateway's door for everybody: one key for all clients, and the run's tools where the server is to run them.

All calls share a session of the gateway, so that a conversation that comes back is continued from its token ids. It is
followed by a fresh one after ``CALLS_OF_A_SESSION`` calls, so that memory does not grow for ever: a conversation that
is older is then read from its text, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

from megatron_retool.config import Config
from megatron_retool.serving.system_prompt import with_system
from megatron_retool.serving.tool_turns import HiddenTurns, until_final
from sglang_rollout.gateway.conversation import ConversationAnswer, ConversationCall, Message, TextAnswer, TextCall
from sglang_rollout.gateway.errors import ApiError
from sglang_rollout.gateway.interface import SessionLimits
from sglang_rollout.gateway.server import Gateway
from sglang_rollout.gateway.session_tree import seed_of
from sglang_rollout.gateway.sessions import OpenSession
from tools.registry import ToolRegistry
from tools.tool import TrajectoryInfo

CALLS_OF_A_SESSION = 1024
_RESPONSES_KEPT = 1024
_NO_LIMIT = 10**9


def serving_limits(context_length: int) -> SessionLimits:
    """Of a session that serves everybody: only contexts are limited."""
    return SessionLimits(
        context_length=context_length,
        max_calls=_NO_LIMIT,
        max_concurrent_calls=_NO_LIMIT,
        max_wall_seconds=float(_NO_LIMIT),
    )


class OpenDoor:
    """``gateway.server.Door`` for clients of no run.

    Args:
        config: how it samples (rollout.val) where a call does not say, and how many turns and tool calls an answer has.
        context_length: tokens of a context with its answer.
        api_key: what every call must show; None: nothing.
        tools: run for calls that bring no tools of their own; None: the client's are the only ones.
        system: the system message of calls that have none; None: they stay as they are.
    """

    def __init__(
        self,
        config: Config,
        *,
        context_length: int,
        api_key: str | None = None,
        tools: ToolRegistry | None = None,
        system: str | None = None,
    ) -> None:
        self._config = config
        self._limits = serving_limits(context_length)
        self._api_key = api_key
        self._tools = tools
        self._system = system
        self._hidden = HiddenTurns()
        self._responses: dict[str, list[Message]] = {}
        self._numbers = itertools.count()
        self._present: OpenSession | None = None
        self._calls = 0
        self._running: Counter[OpenSession] = Counter()

    def session(self, gateway: Gateway, key: str) -> OpenSession:
        """The present session.

        Raises:
            ApiError: 401, the key is not the server's.
        """
        if self._api_key is not None and not self.knows(key):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        if self._present is None or self._calls >= CALLS_OF_A_SESSION:
            self._calls = 0
            self._present = gateway.open_session(
                self._config.rollout.val, limits=self._limits, calls_choose_sampling=True
            )
            self._present.responses = self._responses
        while len(self._responses) > _RESPONSES_KEPT:
            del self._responses[next(iter(self._responses))]
        return self._present

    def knows(self, key: str) -> bool:
        """Whether ``key`` is the server's own."""
        if self._api_key is None:
            return False
        return hmac.compare_digest(key.encode(errors="replace"), self._api_key.encode())

    async def answer(
        self, session: OpenSession, call: ConversationCall, with_tokens: bool = False
    ) -> list[ConversationAnswer]:
        """The model's answers; where the server runs the tools, the final ones."""
        call = replace(call, messages=with_system(call.messages, self._system))
        async with self._served(session) as session:
            if self._tools is None or call.tools is not None:
                return await session.answer(call, with_tokens)
            finals = (self._final(session, self._tools, each, with_tokens) for each in _one_by_one(call))
            return list(await asyncio.gather(*finals))

    async def complete(self, session: OpenSession, call: TextCall) -> list[TextAnswer]:
        """How the model continues the prompts of ``call``, as they are."""
        async with self._served(session) as session:
            return await session.complete(call)

    @contextlib.asynccontextmanager
    async def _served(self, session: OpenSession) -> AsyncIterator[OpenSession]:
        """The session that answers a call, which is not closed meanwhile."""
        # While the call's body was read, the session may have got a successor, and have been closed.
        session = self._present or session
        self._calls += 1
        self._running[session] += 1
        try:
            yield session
        finally:
            self._running[session] -= 1
            for retired in [each for each in self._running if each is not self._present and not self._running[each]]:
                del self._running[retired]
                await retired.close()

    async def _final(
        self, session: OpenSession, tools: ToolRegistry, call: ConversationCall, with_tokens: bool
    ) -> ConversationAnswer:
        schemas = tools.schemas()
        await session.check_size(call.messages, schemas)
        history = self._hidden.whole(call.messages, schemas)

        async def ask(messages: list[Message]) -> ConversationAnswer:
            (answer,) = await session.answer(replace(call, messages=messages, tools=schemas), with_tokens)
            return answer

        opened = await tools.open(TrajectoryInfo(next(self._numbers), 0))
        try:
            finished = await until_final(ask, opened, self._config.rollout.multi_turn, history)
        finally:
            await opened.close({})
        answer = finished.answer()
        self._hidden.keep(call.messages, schemas, answer, finished.turns)
        return answer


def _one_by_one(call: ConversationCall) -> list[ConversationCall]:
    """``call``, which asks for several answers, as calls for one each."""
    seeds = [call.seed, *(seed_of(call.seed, choice) for choice in range(1, call.choices))]
    return [replace(call, choices=1, seed=seed) for seed in seeds]
