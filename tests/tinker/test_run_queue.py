"""Which run is next: a run keeps the learner while it has calls, and none waits longer than the others' shares."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_retool.tinker.run_queue import Job, RunQueue


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def nothing() -> None: ...


def names(queue: RunQueue, clock: Clock, seconds: float) -> list[str]:
    found = []
    while (job := queue.next()) is not None:
        found.append(job.run)
        clock.now += seconds
    return found


def filled(counts: dict[str, int], share: float) -> tuple[RunQueue, Clock]:
    clock = Clock()
    queue = RunQueue(share, clock)
    for place in range(max(counts.values())):
        for run, count in counts.items():
            if place < count:
                queue.put(Job(run, nothing))
    return queue, clock


def test_a_runs_calls_follow_one_another_although_they_came_mixed():
    queue, clock = filled({"a": 3, "b": 2}, share=100.0)
    assert names(queue, clock, 1.0) == ["a", "a", "a", "b", "b"]


def test_a_run_makes_way_after_its_share():
    queue, clock = filled({"a": 5, "b": 2, "c": 1}, share=2.0)
    assert names(queue, clock, 1.0) == ["a", "a", "b", "b", "c", "a", "a", "a"]


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 30), min_size=1), st.floats(0.5, 5.0), st.floats(0.1, 3.0)
)
def test_no_run_starves(counts, share, seconds):
    """Between two jobs of a run that has more, every other has at most its share, and the job that ends it."""
    queue, clock = filled(counts, share)
    order = names(queue, clock, seconds)
    assert {run: order.count(run) for run in counts} == counts
    most = (len(counts) - 1) * (share / seconds + 1)
    for run in counts:
        places = [place for place, each in enumerate(order) if each == run]
        assert all(later - earlier - 1 <= most for earlier, later in zip(places, places[1:], strict=False))


def test_work_goes_on_when_more_comes():
    async def main() -> list[str]:
        queue, done = RunQueue(), []

        async def note(name: str) -> None:
            done.append(name)

        worker = asyncio.create_task(queue.work())
        for name in ("first", "second"):
            queue.put(Job("run", lambda name=name: note(name)))
            await asyncio.sleep(0.01)
        assert len(queue) == 0
        worker.cancel()
        return done

    assert asyncio.run(main()) == ["first", "second"]
