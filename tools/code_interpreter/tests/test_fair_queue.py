from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from code_interpreter.fair_queue import FairQueue, QueueFull


def test_clients_take_turns() -> None:
    async def scenario() -> list[str]:
        queue: FairQueue[int] = FairQueue(100)
        served = []

        async def request(client: str) -> None:
            await queue.get(client, 10)
            served.append(client)

        tasks = [asyncio.ensure_future(request("flood")) for _ in range(6)]
        await asyncio.sleep(0)
        tasks += [asyncio.ensure_future(request(client)) for client in ("a", "b", "a")]
        await asyncio.sleep(0)
        for item in range(9):
            queue.put(item)
            await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)
        return served

    assert asyncio.run(scenario()) == ["flood", "a", "b", "flood", "a", "flood", "flood", "flood", "flood"]


def test_full_and_late() -> None:
    async def scenario() -> None:
        queue: FairQueue[int] = FairQueue(1)
        waiting = asyncio.ensure_future(queue.get("a", 10))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="waiting"):
            await queue.get("b", 10)
        queue.put(7)
        assert await waiting == 7
        with pytest.raises(QueueFull, match="0.01 s"):
            await queue.get("b", 0.01)
        assert queue.waiting == 0
        queue.put(8)
        assert queue.take_idle() == 8

    asyncio.run(scenario())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["get a", "get b", "cancel", "put", "tick", "late"]), max_size=40))
def test_no_item_is_lost_or_given_twice(steps: list[str]) -> None:
    """Whatever the order of requests, cancellations, time-outs and returns, three items stay three items."""

    async def scenario() -> None:
        queue: FairQueue[int] = FairQueue(1000)
        outside = [0, 1, 2]
        held: list[int] = []
        tasks: list[asyncio.Task[None]] = []

        async def request(client: str, timeout: float) -> None:
            try:
                item = queue.take_idle()
                held.append(await queue.get(client, timeout) if item is None else item)
            except QueueFull:
                pass

        for step in steps:
            if step.startswith("get"):
                tasks.append(asyncio.ensure_future(request(step[-1], 100)))
            elif step == "late":
                tasks.append(asyncio.ensure_future(request("c", 0)))
            elif step == "cancel" and tasks:
                tasks[len(tasks) // 2].cancel()
            elif step == "put" and (outside or held):
                queue.put(outside.pop() if outside else held.pop())
            elif step == "tick":
                await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0.0001)
        everywhere = outside + held
        while (item := queue.take_idle()) is not None:
            everywhere.append(item)
        assert sorted(everywhere) == [0, 1, 2]
        pending = [task for task in tasks if not task.done()]
        assert len(pending) == queue.waiting
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert queue.waiting == 0

    asyncio.run(scenario())
