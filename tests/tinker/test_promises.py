"""Results are kept for clients that ask again, and not for ever."""

from __future__ import annotations

import asyncio

import pytest

from megatron_retool.tinker import promises
from megatron_retool.tinker.promises import Outcome, Promises, failure
from sglang_rollout.gateway.errors import ApiError


@pytest.fixture
def now():
    return [0.0]


def settled(kept: Promises, name: str, size: int = 10) -> None:
    kept.settle(kept.open(name), Outcome(b"x" * size))


def there(kept: Promises, *names: str) -> list[str]:
    return [name for name in names if kept.find(name) is not None]


def test_waiting_ends_with_the_result_or_without():
    async def main():
        kept = Promises()
        promise = kept.open("a", model_id="m")
        assert promise.submission == {"request_id": "a", "model_id": "m"}
        assert await kept.wait("a", 0.01) is None
        waiting = asyncio.create_task(kept.wait("a", 10.0))
        await asyncio.sleep(0)
        kept.settle(promise, Outcome(b"done"))
        assert (await waiting).payload == b"done"
        kept.settle(promise, Outcome(b"again"))
        assert (await kept.wait("a", 0.0)).payload == b"done"
        with pytest.raises(ApiError) as raised:
            await kept.wait("b", 0.0)
        assert raised.value.status == 410

    asyncio.run(main())


def test_what_was_taken_goes_first(now):
    kept = Promises(lambda: now[0])
    settled(kept, "taken")
    settled(kept, "waiting")
    kept.open("open")
    kept.take("taken")
    now[0] = promises.TAKEN_SECONDS + 1
    kept.take("taken")  # asked for again: that does not prolong it
    kept.sweep()
    assert there(kept, "taken", "waiting", "open") == ["waiting", "open"]
    now[0] = promises.WAITING_SECONDS + 1
    kept.sweep()
    assert there(kept, "taken", "waiting", "open") == ["open"]


def test_results_share_a_bound_of_memory(now):
    kept = Promises(lambda: now[0], most_bytes=25)
    for name in ("oldest", "taken", "newest"):
        settled(kept, name)
        now[0] += 1
        if name == "taken":
            kept.take(name)
    assert there(kept, "oldest", "taken", "newest") == ["oldest", "newest"]
    settled(kept, "large", 24)
    assert there(kept, "oldest", "newest", "large") == ["large"]


def test_a_cancelled_promise_ends_its_work():
    kept = Promises()
    ended = []
    promise = kept.open("a")
    promise.cancel = lambda: ended.append("a")
    kept.open("b")
    for name in ("a", "a", "b", "unknown"):
        kept.cancel(name)
    assert ended == ["a"]
    assert promise.outcome == failure("the request was cancelled", by_user=True)
    assert kept.find("b").outcome is None


def test_too_many_are_refused(monkeypatch):
    monkeypatch.setattr(promises, "MOST_PROMISES", 1)
    kept = Promises()
    kept.open("a")
    with pytest.raises(ApiError) as raised:
        kept.open("b")
    assert raised.value.status == 429
