"""Calls are done in the order of their numbers, whatever order they come in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_retool.tinker import sequence_gate
from megatron_retool.tinker.sequence_gate import SequenceGate
from sglang_rollout.gateway.errors import ApiError


@given(st.permutations(range(1, 9)))
def test_any_order_of_arrival_becomes_that_of_the_numbers(order):
    gate: SequenceGate[int] = SequenceGate()
    done = [call for number in order for call in gate.offer(number, number)]
    assert done == list(range(1, 9))
    assert gate.next == 9


def test_a_retry_is_known():
    gate: SequenceGate[str] = SequenceGate(first=3)
    gate.offer(5, "early")
    assert [number for number in range(1, 7) if gate.has_passed(number)] == [1, 2, 5]


def test_a_call_that_never_comes_is_given_up():
    now = [0.0]
    gate: SequenceGate[str] = SequenceGate(clock=lambda: now[0])
    assert gate.skip(10.0) is None
    gate.offer(3, "third")
    gate.offer(4, "fourth")
    now[0] = 10.0
    assert gate.skip(10.0) is None
    now[0] = 10.5
    assert gate.skip(10.0) == (["third", "fourth"], range(1, 3))
    assert gate.next == 5


def test_too_many_early_calls_are_refused(monkeypatch):
    monkeypatch.setattr(sequence_gate, "MOST_HELD", 2)
    gate: SequenceGate[int] = SequenceGate()
    for number in (3, 4):
        gate.check_room(number)
        gate.offer(number, number)
    with pytest.raises(ApiError, match="wait for call 1") as raised:
        gate.check_room(5)
    assert raised.value.status == 429
    gate.check_room(1)
