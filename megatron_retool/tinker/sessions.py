"""Sessions: one for each client, alive as long as it says so, and the sampling sessions that each has opened."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_retool.tinker.run_store import RunStore, SamplerRecord, SessionRecord
from sglang_rollout.gateway.errors import ApiError

MOST_SESSIONS = 4096
"""That are alive."""
MOST_KNOWN = 16384
_KEYS_KEPT = 4096


@dataclass(eq=False)
class ClientSession:
    """
    Attributes:
        last_sign: when its client was heard of.
        writing: held while its file is written, so that the newest state is the last one there.
    """

    record: SessionRecord
    last_sign: float
    samplers: dict[str, SamplerRecord] = field(default_factory=dict)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


class ClientSessions:
    """All sessions by id.

    Args:
        timeout_seconds: without a sign of life, after which a session ends.
        clock: seconds, rising.
    """

    def __init__(self, store: RunStore, timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._timeout, self._clock = store, timeout_seconds, clock
        self._sessions: dict[str, ClientSession] = {}
        self._samplers: dict[str, tuple[ClientSession, SamplerRecord]] = {}
        self._by_key: OrderedDict[str, ClientSession] = OrderedDict()

    def restore(self) -> None:
        """Take in what is on disk: in a thread, before anything else."""
        for record, samplers in self._store.sessions():
            session = ClientSession(record, self._clock(), {each.id: each for each in samplers})
            self._sessions[record.id] = session
            self._samplers.update((each.id, (session, each)) for each in samplers)

    async def create(self, tags: list[str], metadata: dict[str, str] | None, idempotency_key: str) -> ClientSession:
        """A new session, or the one that a request with the same key has made.

        Raises:
            ApiError: 429, there are too many.
        """
        if idempotency_key and idempotency_key in self._by_key:
            return self._by_key[idempotency_key]
        if sum(not each.record.finished for each in self._sessions.values()) >= MOST_SESSIONS:
            raise ApiError(429, f"{MOST_SESSIONS} sessions are open: close clients", code="too_many_sessions")
        session = ClientSession(SessionRecord(str(uuid.uuid4()), tags, metadata), self._clock())
        self._sessions[session.record.id] = session
        if idempotency_key:
            self._by_key[idempotency_key] = session
            if len(self._by_key) > _KEYS_KEPT:
                self._by_key.popitem(last=False)
        self._forget_oldest()
        await self._write(session)
        return session

    def find(self, identifier: str, field_name: str = "session_id") -> ClientSession:
        """
        Raises:
            ApiError: 404, there is no such session.
        """
        session = self._sessions.get(identifier)
        if session is None:
            raise ApiError(404, f"{field_name}: there is no such session", code="not_found", param=field_name)
        return session

    def alive(self, identifier: str) -> ClientSession:
        """A session that has not ended.

        Raises:
            ApiError: 404, there is none; 410, it has ended.
        """
        session = self.find(identifier)
        if session.record.finished:
            raise ApiError(410, "session_id: the session has ended: make a new client", code="gone", param="session_id")
        session.last_sign = self._clock()
        return session

    def all(self) -> list[ClientSession]:
        """The newest first."""
        return sorted(self._sessions.values(), key=lambda each: each.record.created, reverse=True)

    async def finish(self, session: ClientSession) -> None:
        """Mark a session as finished."""
        if not session.record.finished:
            session.record = dataclasses.replace(session.record, finished=True)
            await self._write(session)

    def expired(self) -> list[ClientSession]:
        """Sessions whose clients have not been heard of for too long."""
        deadline = self._clock() - self._timeout
        return [each for each in self._sessions.values() if not each.record.finished and each.last_sign < deadline]

    async def add_sampler(self, session: ClientSession, sampler: SamplerRecord) -> None:
        """Open a sampling session, or the same one once more."""
        session.samplers[sampler.id] = sampler
        self._samplers[sampler.id] = session, sampler
        await self._write(session)

    def sampler(self, identifier: str) -> SamplerRecord:
        """A sampling session; a sign of life of its session.

        Raises:
            ApiError: 404, there is none.
        """
        result = self._samplers.get(identifier)
        if result is None:
            raise ApiError(404, "there is no such sampling session", code="not_found", param="sampling_session_id")
        session, sampler = result
        session.last_sign = self._clock()
        return sampler

    async def _write(self, session: ClientSession) -> None:
        async with session.writing:
            await asyncio.to_thread(self._store.write_session, session.record, list(session.samplers.values()))

    def _forget_oldest(self) -> None:
        """Of sessions that have ended; their files stay until the server starts again, and longer."""
        ended = [each for each in self._sessions.values() if each.record.finished]
        for session in ended[: max(len(self._sessions) - MOST_KNOWN, 0)]:
            del self._sessions[session.record.id]
            for identifier in session.samplers:
                with contextlib.suppress(KeyError):
                    del self._samplers[identifier]
