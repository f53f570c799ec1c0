from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_rollout.engine.client import SGLangClient
from sglang_rollout.engine.router import GROUP_AFFINITY_SLACK, NoEngineAvailable, Router


def make_router(engines: int = 2, max_trajectories: int = 8, max_tokens: int | None = None) -> Router:
    return Router([SGLangClient(f"http://e{index}") for index in range(engines)], max_trajectories, max_tokens)


def urls(leases) -> list[str]:
    return [lease.engine.url for lease in leases]


def test_a_group_stays_together_until_its_engine_is_clearly_busier():
    async def scenario():
        router = make_router(max_trajectories=100)
        leases = [await router.acquire(1, 10) for _ in range(GROUP_AFFINITY_SLACK + 3)]
        other = [await router.acquire(2, 10) for _ in range(2)]
        return urls(leases), urls(other)

    first, second = asyncio.run(scenario())
    assert first[: GROUP_AFFINITY_SLACK + 1] == ["http://e0"] * (GROUP_AFFINITY_SLACK + 1)
    assert first[GROUP_AFFINITY_SLACK + 1] == "http://e1"
    assert second == ["http://e1"] * 2


def test_places_are_limited_and_given_in_order():
    async def scenario():
        router = make_router(engines=1, max_trajectories=2)
        held = [await router.acquire(0, 1), await router.acquire(0, 1)]
        order = []

        async def want(name):
            lease = await router.acquire(0, 1)
            order.append(name)
            return lease

        waiting = [asyncio.create_task(want(name)) for name in "abc"]
        await asyncio.sleep(0)
        assert order == []
        for lease in held:
            router.release(lease)
        await asyncio.sleep(0.01)
        assert order == ["a", "b"]
        router.release(waiting[0].result())
        await asyncio.gather(*waiting)
        return order

    assert asyncio.run(scenario()) == ["a", "b", "c"]


def test_the_token_budget_counts_what_trajectories_hold_now():
    async def scenario():
        router = make_router(engines=1, max_trajectories=100, max_tokens=100)
        small = await router.acquire(0, 40)
        router.grow(small, 90)
        large = asyncio.create_task(router.acquire(1, 20))
        await asyncio.sleep(0.01)
        assert not large.done()
        router.release(small)
        assert (await large).engine.tokens == 20
        # More than the budget is served alone rather than never.
        router.release(large.result())
        assert (await router.acquire(2, 500)).tokens == 500

    asyncio.run(scenario())


def test_a_dead_engine_gets_nothing_and_a_replaced_one_serves_those_who_wait():
    async def scenario():
        router = make_router(engines=2)
        router.mark_dead(router.engines[0])
        assert urls([await router.acquire(group, 1) for group in range(3)]) == ["http://e1"] * 3
        router.recovery_expected = True
        router.mark_dead(router.engines[1])
        waiting = asyncio.create_task(router.acquire(9, 1))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        router.replace("http://e0", SGLangClient("http://e2"))
        return (await waiting).engine.url, [engine.url for engine in router.engines]

    assert asyncio.run(scenario()) == ("http://e2", ["http://e1", "http://e2"])


def test_without_hope_waiting_is_an_error_that_names_the_engines():
    async def scenario():
        router = make_router(engines=1, max_trajectories=1)
        await router.acquire(0, 1)
        waiting = asyncio.create_task(router.acquire(0, 1))
        await asyncio.sleep(0)
        router.mark_dead(router.engines[0])
        await waiting

    with pytest.raises(NoEngineAvailable, match="http://e0"):
        asyncio.run(scenario())


def test_an_engine_to_avoid_is_taken_only_where_there_is_no_other():
    async def scenario():
        router = make_router(engines=2)
        first = router.engines[0]
        elsewhere = await router.acquire(0, 1, avoid=first)
        router.mark_dead(router.engines[1])
        back = await router.acquire(0, 1, avoid=first)
        return urls([elsewhere, back])

    assert asyncio.run(scenario()) == ["http://e1", "http://e0"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50), st.booleans()), max_size=40))
def test_no_place_is_lost_or_given_twice(requests):
    async def scenario():
        router = make_router(engines=2, max_trajectories=3, max_tokens=120)
        tasks = []

        async def work(group, tokens, cancelled):
            task = asyncio.current_task()
            if cancelled:
                asyncio.get_running_loop().call_soon(task.cancel)
            lease = await router.acquire(group, tokens)
            try:
                assert all(engine.trajectories <= 3 for engine in router.engines)
                router.grow(lease, tokens + 5)
                await asyncio.sleep(0)
            finally:
                router.release(lease)

        tasks = [asyncio.create_task(work(*request)) for request in requests]
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [(engine.trajectories, engine.tokens, engine.groups) for engine in router.engines] == [(0, 0, {})] * 2

    asyncio.run(scenario())


def test_a_trajectory_comes_back_to_the_engine_that_has_its_past():
    async def scenario():
        router = make_router(engines=3, max_trajectories=64)
        assert (await router.acquire(0, 1, before=2)).engine.number == 2
        # Whatever the others of its group do, unless the engine is much busier.
        elsewhere = [await router.acquire(0, 1, before=1) for _ in range(GROUP_AFFINITY_SLACK + 1)]
        assert {lease.engine.number for lease in elsewhere} == {1}
        assert (await router.acquire(7, 1, before=1)).engine.number == 0
        router.mark_dead(router.engines[2])
        assert (await router.acquire(7, 1, before=2)).engine.number == 0

    asyncio.run(scenario())
