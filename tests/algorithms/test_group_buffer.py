"""The rules of the asynchronous buffer over random schedules: the bound holds, and nothing is lost or thrown away."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_retool.algorithms.group_buffer import GroupBuffer


class Schedule:
    """Engines and learner that act in the order of a list of numbers, and what became of every group."""

    def __init__(self, batch_groups: int, max_age: int, keeps: list[bool]) -> None:
        self.buffer = GroupBuffer(batch_groups, max_age)
        self.keeps = keeps
        self.version = self.started = self.training = 0
        self.born: dict[int, int] = {}
        self.trained: dict[int, int] = {}
        self.dropped: set[int] = set()
        self.ended: list[int] = []
        """Groups with a signal in the order in which they ended."""
        self.again: list[int] = []
        """Groups whose prompts a resumed run draws first."""

    def act(self, choice: int) -> None:
        kind, which = choice % 4, choice // 4
        if kind == 0:
            for _ in range(min(self.buffer.room(self.version), 1 + which % 3)):
                group_id = self.again.pop(0) if self.again else self.started
                self.started = max(self.started, group_id + 1)
                self.buffer.start([group_id], self.version)
                self.born[group_id] = self.version
        elif kind == 3:
            if which % 8 == 0 and self.training == self.version:
                self.resume(self.buffer.max_age - (which % 16 == 0 and self.buffer.max_age > 1))
        elif kind == 1 and self.buffer.generating:
            self.end(self.buffer.generating[which % len(self.buffer.generating)])
        elif kind == 2 and self.training > self.version:
            self.version = self.training  # the update is done, and engines have its weights
        elif kind == 2:
            self.take()

    def end(self, group_id: int) -> None:
        keeps = self.keeps[group_id % len(self.keeps)]
        self.buffer.finish(group_id, has_signal=keeps)
        if keeps:
            self.ended.append(group_id)
        else:
            self.dropped.add(group_id)

    def resume(self, max_age: int) -> None:
        """A new process from a checkpoint of now, perhaps with a smaller bound; what was under way starts again."""
        versions = self.buffer.versions
        kept = {group_id: versions[group_id] for group_id in self.ended if group_id in self.buffer.complete}
        under_way = self.buffer.generating
        self.buffer = GroupBuffer(self.buffer.batch_groups, max_age, self.buffer.step)
        self.again = sorted([*self.again, *under_way, *self.buffer.restore(kept)])

    def take(self) -> None:
        step = self.buffer.step + 1
        taken = self.buffer.take()
        if taken is None:
            return
        self.training = step
        for group_id in taken:
            assert group_id not in self.trained
            self.trained[group_id] = step
            # Its oldest token may be of the version that it started with.
            assert step - 1 - self.born[group_id] <= self.buffer.max_age
        assert len(taken) == self.buffer.batch_groups


@settings(deadline=None, max_examples=300)
@given(
    batch_groups=st.integers(1, 4),
    max_age=st.integers(1, 3),
    keeps=st.lists(st.booleans(), min_size=1, max_size=7).filter(any),
    choices=st.lists(st.integers(0, 3000), max_size=200),
)
def test_the_bound_holds_and_nothing_is_lost(
    batch_groups: int, max_age: int, keeps: list[bool], choices: list[int]
) -> None:
    schedule = Schedule(batch_groups, max_age, keeps)
    for choice in choices:
        schedule.act(choice)
        accounted = {*schedule.trained, *schedule.dropped, *schedule.buffer.versions, *schedule.again}
        assert accounted == set(range(schedule.started))
    # However it stands: once what is under way ends, the run goes on, with every group trained in time.
    wanted = schedule.buffer.step + 3
    while schedule.buffer.step < wanted:
        for kind in (0, 1, 1, 2, 2):
            schedule.act(kind)
            assert not schedule.buffer.versions.keys() & set(schedule.again)


def test_the_docstrings_example() -> None:
    buffer = GroupBuffer(2, 1)
    assert buffer.room(0) == 4
    buffer.start(range(4), 0)
    for group_id in (1, 3):
        buffer.finish(group_id, has_signal=True)
    assert buffer.take() == [1, 3]
    assert buffer.room(0) == 0
    assert buffer.room(1) == 2
    buffer.start((4, 5), 1)
    for group_id in (4, 5, 0):
        buffer.finish(group_id, has_signal=True)
    assert buffer.take() is None, "group 2 would be too old afterwards"
    buffer.finish(2, has_signal=True)
    assert buffer.take() == [0, 2]
    assert buffer.complete == [4, 5]


def test_a_group_without_a_signal_frees_its_slot() -> None:
    buffer = GroupBuffer(2, 1)
    buffer.start(range(4), 0)
    buffer.finish(0, has_signal=False)
    assert buffer.room(0) == 1
    assert buffer.versions == {1: 0, 2: 0, 3: 0}


def test_a_smaller_batch_keeps_every_deadline() -> None:
    buffer = GroupBuffer(2, 1)
    buffer.start(range(4), 0)
    buffer.finish(0, has_signal=True)
    assert buffer.take(full=False) is None, "three groups would be left for one step of two"
    buffer.finish(1, has_signal=False)
    assert buffer.take(full=False) == [0]


def test_what_a_checkpoint_kept_is_trained_first() -> None:
    buffer = GroupBuffer(2, 2, step=5)
    assert buffer.restore({9: 4, 7: 3}) == []
    buffer.start((10, 11), 5)
    for group_id in (11, 10):
        buffer.finish(group_id, has_signal=True)
    assert buffer.take() == [7, 9]


def test_a_smaller_bound_leaves_out_what_would_come_too_late() -> None:
    buffer = GroupBuffer(2, 1, step=3)
    assert buffer.restore({5: 3, 4: 2, 2: 2, 3: 2, 1: 1}) == [1, 3]
    assert buffer.take() == [4, 2]


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda buffer: buffer.start([0], 0), "before"),
        (lambda buffer: buffer.start([4], 0), "slots"),
        (lambda buffer: buffer.finish(9, has_signal=True), "not under way"),
    ],
)
def test_what_cannot_be(act, words: str) -> None:
    buffer = GroupBuffer(2, 1)
    buffer.start(range(4), 0)
    with pytest.raises(ValueError, match=words):
        act(buffer)
