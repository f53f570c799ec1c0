"""Spreading of requests over servers, as bookkeeping alone."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from code_interpreter.balancer import Balancer, Server


def balancer(count: int) -> Balancer:
    return Balancer(f"http://server{index}" for index in range(count))


@given(servers=st.integers(1, 6), requests=st.integers(0, 60), at_once=st.booleans())
def test_equal_servers_get_equal_shares(servers: int, requests: int, at_once: bool) -> None:
    """Whether the requests wait for one another or not."""
    under_test, chosen = balancer(servers), Counter[str]()
    for _ in range(requests):
        server = under_test.choose()
        assert server is not None
        server.outstanding += at_once
        chosen[server.url] += 1
    shares = [chosen[server.url] for server in under_test.servers]
    assert max(shares) - min(shares) <= 1


@given(st.data())
def test_choice_is_the_best_there_is(data: st.DataObject) -> None:
    under_test = balancer(data.draw(st.integers(1, 5)))
    for server in under_test.servers:
        server.up, server.outstanding = data.draw(st.booleans()), data.draw(st.integers(0, 3))
    failed = data.draw(st.sets(st.sampled_from(under_test.servers)))
    chosen = under_test.choose(failed)
    assert chosen is not None
    classes: list[list[Server]] = [
        [s for s in under_test.servers if s.up and s not in failed],
        [s for s in under_test.servers if s.up],
        [s for s in under_test.servers if s not in failed],
        under_test.servers,
    ]
    candidates = next(servers for servers in classes if servers)
    assert chosen in candidates
    assert chosen.outstanding == min(server.outstanding for server in candidates)
    assert under_test.has_another(failed) == bool(classes[0])


def test_server_that_was_busy_catches_up() -> None:
    under_test = balancer(2)
    first, second = under_test.servers
    first.outstanding = 3
    chosen = []
    for _ in range(5):
        server = under_test.choose()
        assert server is not None
        server.outstanding += 1
        chosen.append(server)
    assert chosen == [second, second, second, first, second]


def test_no_server_at_all() -> None:
    under_test = Balancer()
    assert under_test.choose() is None and not under_test.has_another(())
    under_test.put(3, "http://late")
    assert under_test.choose() is under_test.servers[0]
    assert under_test.drop(3) is not None and under_test.drop(3) is None
    assert under_test.choose() is None


def test_counts_belong_to_the_index_and_are_taken_once() -> None:
    under_test = balancer(2)
    first, second = under_test.servers
    first.counts.requests, first.counts.failures, second.counts.retries = 5, 2, 1
    again = under_test.put(0, "http://elsewhere")
    again.counts.requests += 1
    second.up = False
    assert under_test.take_metrics() == {
        "tool/sandboxes_up": 1,
        "tool/sandbox_0/requests": 6, "tool/sandbox_0/failures": 2, "tool/sandbox_0/retries": 0,
        "tool/sandbox_1/requests": 0, "tool/sandbox_1/failures": 0, "tool/sandbox_1/retries": 1,
    }  # fmt: skip
    under_test.drop(1)
    assert under_test.take_metrics()["tool/sandbox_0/requests"] == 0
