"""Which engine a trajectory goes to, and how many an engine takes.

A trajectory stays with its engine while it lives: the next turn finds its whole past in that engine's prefix cache.
A new one goes where its group is (the prompt is cached there), and one that gave its place back between two turns goes
where it was, unless that engine is clearly busier than the least loaded one. An engine that fails is left out; its
trajectories take another one and continue from their token ids.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_retool.errors import OperationError
from sglang_rollout.engine.base import EngineClient

GROUP_AFFINITY_SLACK = 4
"""Trajectories by which a group's engine may be ahead of the least loaded one before the group is split."""


class NoEngineAvailable(OperationError):
    """Every engine is dead and none is expected back."""


@dataclass(eq=False)
class RoutedEngine:
    """An engine and its load.

    Attributes:
        number: its place among the run's engines, which its successor takes over.
        tokens: estimates the KV cache that its trajectories occupy.
        requests: ids of those under way.
    """

    url: str
    client: EngineClient
    number: int
    alive: bool = True
    trajectories: int = 0
    tokens: int = 0
    groups: dict[int, int] = field(default_factory=dict)
    requests: set[str] = field(default_factory=set)


@dataclass
class Lease:
    """A trajectory's place at an engine; give it back with ``Router.release``."""

    engine: RoutedEngine
    group_id: int
    tokens: int


@dataclass(eq=False)
class _Waiter:
    group_id: int
    tokens: int
    avoid: RoutedEngine | None
    before: int | None
    lease: asyncio.Future[Lease]


class Router:
    """Hands out places at engines. All methods belong to one event loop.

    Args:
        clients: one for each engine.
        max_trajectories: places at each engine.
        max_tokens: KV-cache tokens of each engine; None does not limit them (SGLang then queues or retracts).
    """

    def __init__(self, clients: Sequence[EngineClient], max_trajectories: int, max_tokens: int | None = None) -> None:
        self.engines = [RoutedEngine(client.base_url, client, number) for number, client in enumerate(clients)]
        self.max_trajectories = max_trajectories
        self.max_tokens = max_tokens
        self.recovery_expected = False
        """Set while a dead engine is being restarted: then waiting makes sense."""
        self._waiting: deque[_Waiter] = deque()

    async def acquire(
        self, group_id: int, tokens: int, avoid: RoutedEngine | None = None, before: int | None = None
    ) -> Lease:
        """A place for a trajectory of ``group_id`` that has ``tokens`` tokens now; waits, first come first served.

        Args:
            avoid: an engine that just failed a request of this trajectory: taken only where there is no other.
            before: number of the engine that has the trajectory's past in its cache.

        Raises:
            NoEngineAvailable
        """
        waiter = _Waiter(group_id, tokens, avoid, before, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._serve()
        try:
            return await waiter.lease
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif waiter.lease.done() and not waiter.lease.cancelled() and waiter.lease.exception() is None:
                self.release(waiter.lease.result())
            raise

    def grow(self, lease: Lease, tokens: int) -> None:
        """Tell that the lease's trajectory has ``tokens`` tokens now."""
        lease.engine.tokens += tokens - lease.tokens
        lease.tokens = tokens

    def release(self, lease: Lease) -> None:
        """Give a place back."""
        engine = lease.engine
        engine.trajectories -= 1
        engine.tokens -= lease.tokens
        engine.groups[lease.group_id] -= 1
        if not engine.groups[lease.group_id]:
            del engine.groups[lease.group_id]
        self._serve()

    def mark_dead(self, engine: RoutedEngine) -> None:
        """Leave the engine out."""
        engine.alive = False
        self._serve()

    def replace(self, url: str, client: EngineClient) -> None:
        """Take an engine in again: in place of the one at ``url``, or as a further one."""
        numbers = [engine.number for engine in self.engines if engine.url == url]
        number = numbers[0] if numbers else 1 + max((engine.number for engine in self.engines), default=-1)
        self.engines = [engine for engine in self.engines if engine.url != url]
        self.add(client, number)

    def add(self, client: EngineClient, number: int) -> None:
        """Take one more engine in."""
        self.engines.append(RoutedEngine(client.base_url, client, number))
        self._serve()

    def forget(self, engine: RoutedEngine) -> None:
        """Take an engine out that was left out before."""
        self.engines.remove(engine)

    def wake(self) -> None:
        """Let those who wait look again (after ``recovery_expected`` changed)."""
        self._serve()

    def _choose(self, waiter: _Waiter) -> RoutedEngine | None:
        alive = [engine for engine in self.engines if engine.alive]
        # An engine that just failed a request is a last resort, not a first choice.
        candidates = [engine for engine in alive if engine is not waiter.avoid] or alive
        candidates = [engine for engine in candidates if self._has_room(engine, waiter.tokens)]
        if not candidates:
            return None
        least = min(candidates, key=lambda engine: engine.trajectories)
        busiest = least.trajectories + GROUP_AFFINITY_SLACK
        for engine in candidates:
            if engine.number == waiter.before and engine.trajectories <= busiest:
                return engine
        home = max(candidates, key=lambda engine: engine.groups.get(waiter.group_id, 0))
        return home if home.groups.get(waiter.group_id) and home.trajectories <= busiest else least

    def _has_room(self, engine: RoutedEngine, tokens: int) -> bool:
        if engine.trajectories >= self.max_trajectories:
            return False
        # A trajectory larger than the budget may still run by itself.
        return self.max_tokens is None or not engine.trajectories or engine.tokens + tokens <= self.max_tokens

    def _take(self, engine: RoutedEngine, group_id: int, tokens: int) -> Lease:
        engine.trajectories += 1
        engine.tokens += tokens
        engine.groups[group_id] = engine.groups.get(group_id, 0) + 1
        return Lease(engine, group_id, tokens)

    def _serve(self) -> None:
        """Give places to those who wait, in order; the first one that finds none keeps the others waiting."""
        while self._waiting:
            waiter = self._waiting[0]
            engine = self._choose(waiter)
            if engine is None:
                break
            self._waiting.popleft()
            if not waiter.lease.done():
                waiter.lease.set_result(self._take(engine, waiter.group_id, waiter.tokens))
        if not self.recovery_expected and not any(engine.alive for engine in self.engines):
            dead = ", ".join(engine.url for engine in self.engines)
            while self._waiting:
                waiter = self._waiting.popleft()
                if not waiter.lease.done():
                    waiter.lease.set_exception(NoEngineAvailable(f"all engines are dead: {dead}"))
