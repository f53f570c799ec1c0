"""Reward workers that are disturbed in every way: each response gets its own reward, and no process is left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time

import pytest

from megatron_retool.config import RewardConfig
from megatron_retool.registry import ExtensionError
from megatron_retool.rewards.base import extra_values
from megatron_retool.rewards.channel import _HEADER, _MAGIC, BrokenFrame, Channel
from megatron_retool.rewards.manager import RewardManager
from megatron_retool.rewards.process import WorkerProcess
from tests.rewards.test_manager import Characters, trajectory
from untrusted.process_tree import descendants, process_fields

HOSTILE = """
import os, signal, subprocess, sys, time

def score(data_source, solution_str, ground_truth, extra_info):
    kind, _, value = solution_str.partition(" ")
    notes = ground_truth
    if kind == "fork":
        os.fork()
    elif kind == "forks":
        for _ in range(3):
            if os.fork() == 0: break
    elif kind == "fork-and-raise":
        if os.fork() == 0: raise KeyError("in the child")
    elif kind == "fork-and-exit":
        if os.fork() == 0: sys.exit(5)
    elif kind == "print":
        print('{"result": {"score": -7}}', flush=True)
        os.write(1, b'{"result": {"score": -7}}\\n'); os.write(2, b"noise\\n"); os.system("echo noise")
    elif kind == "everywhere":
        for descriptor in range(3, 2048):
            try: os.write(descriptor, b"a stray line\\n")
            except OSError: pass
    elif kind == "close":
        os.closerange(3, 2048)
    elif kind == "raise":
        raise ValueError("as asked")
    elif kind == "exit":
        sys.exit(3)
    elif kind == "hang":
        time.sleep(60)
    elif kind == "stop-once":
        if not os.path.exists(notes + value):
            open(notes + value, "w").close()
            os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "die-once":
        if not os.path.exists(notes + value):
            open(notes + value, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "daemon":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(0)
    return {"score": float(value or 0), "seen": solution_str}
"""
FAILURES = {
    "raise": "exception",
    "exit": "exception",
    "hang": "timeout",
    "everywhere": "worker_died",
    "close": "worker_died",
}


@pytest.fixture
def function(tmp_path):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    return f"{tmp_path}/hostile.py:score"


def test_every_reward_belongs_to_its_response(function, tmp_path):
    chance = random.Random(7)
    kinds = [*FAILURES, "stop-once", "die-once", *["fork", "forks", "fork-and-raise", "fork-and-exit", "print"] * 3]
    kinds += ["plain"] * (60 - len(kinds))
    chance.shuffle(kinds)
    notes = f"{tmp_path}/note"
    responses = [trajectory(f"{kind} {number}", truth=notes) for number, kind in enumerate(kinds, 1)]
    config = RewardConfig(function=function, timeout_seconds=1.0, processes=2, failure_score=-100.0)
    with RewardManager(config, Characters()) as manager:
        for start in range(0, len(responses), 12):
            manager.score(responses[start : start + 12])
        counted = manager.take_metrics()
    for number, (kind, response) in enumerate(zip(kinds, responses, strict=True), 1):
        if kind in FAILURES:
            assert (response.reward, response.reward_info["failure"]) == (-100.0, FAILURES[kind]), kind
        else:
            assert (response.reward, response.reward_info["seen"]) == (number, f"{kind} {number}"), kind
    assert counted["reward/failures/worker_died"] == 2 and counted["reward/failures/timeout"] == 1


@pytest.fixture
def worker(function):
    made = WorkerProcess(RewardConfig(function=function))
    yield made
    made.kill()


def ask(worker: WorkerProcess, text: str, timeout: float = 20.0) -> dict:
    request = {"data_source": "x", "solution_str": text, "ground_truth": "", "extra_info": {}}
    return worker.ask(request, timeout)


def alive(pid: int) -> bool:
    try:
        return process_fields(pid)[0] != "Z"
    except OSError:
        return False


def settled(worker: WorkerProcess, sessions: int) -> list[int]:
    """The processes below the guard, once each of ``sessions`` of them has a session of its own."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = [pid for pid in descendants(worker._process.pid) if alive(pid)]
        with contextlib.suppress(ProcessLookupError):
            if len({os.getsid(pid) for pid in found}) == len(found) == sessions:
                return found
        time.sleep(0.02)
    raise AssertionError("the children did not start")


def test_a_stopped_worker_takes_no_large_response_and_is_ended_in_time(worker):
    os.kill(worker._pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="stopped from outside"):
        ask(worker, "plain " + "1" * 300_000, timeout=0.5)
    assert time.monotonic() - began < 5 and not worker.alive and not alive(worker._pid)


def test_a_stopped_guard_does_not_keep_a_worker_alive(worker):
    os.kill(worker._process.pid, signal.SIGSTOP)
    worker.kill()
    assert not worker.alive and not alive(worker._pid)


@pytest.mark.parametrize("end", ["manager", "kill"])
def test_what_a_function_leaves_behind_ends_with_its_worker(worker, end):
    assert ask(worker, "daemon 3")["result"]["score"] == 3.0
    left = settled(worker, 3)
    if end == "manager":
        worker.kill()
    else:
        os.kill(worker._pid, signal.SIGKILL)
        worker._process.wait(10)
    assert not any(map(alive, left))


def test_results_that_nobody_could_store_are_bad_results(tmp_path):
    returned = {
        "10**5000": "must return a number or a dict with 'score', not a int",
        "{'score': 1, 'n': 10**5000}": "cannot be kept as JSON: Exceeds the limit",
        "{'score': 1, 'deep': eval('[' * 90 + ']' * 90)}": "nested too deeply",
        "{'score': 1, (1, 2): 3}": "cannot be kept as JSON",
        "{'score': 1, 'text': 'x' * (65 << 20)}": "bytes; at most",
    }
    source = "def score(data_source, solution_str, ground_truth, extra_info):\n    return eval(solution_str)\n"
    (tmp_path / "own.py").write_text(source)
    responses = [trajectory(text) for text in returned]
    with RewardManager(RewardConfig(function=f"{tmp_path}/own.py:score", processes=1), Characters()) as manager:
        manager.score(responses)
    for response, said in zip(responses, returned.values(), strict=True):
        assert response.reward_info["failure"] == "bad_result" and said in response.reward_info["failure_message"]


def test_a_large_integer_is_no_metric():
    assert extra_values({"n": 10**400, "m": 2, "nan": float("nan"), "inf": -float("inf")}) == {"m": 2.0}


def test_a_process_that_cannot_be_started_says_so(monkeypatch, function):
    def refuse(*_, **__):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refuse)
    with pytest.raises(ExtensionError, match="no process can be started: .* Resource temporarily unavailable"):
        WorkerProcess(RewardConfig(function=function))


# ---- frames


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), theirs


def test_frames_pass_in_pieces_and_keep_their_numbers(ends):
    channel, theirs = ends
    other = Channel(theirs)
    payloads = [b"", b"x", os.urandom(3_000_000)]

    def speak():
        for number, payload in enumerate(payloads):
            other.send(number, payload)

    speaker = threading.Thread(target=speak)
    speaker.start()
    assert [channel.receive(time.monotonic() + 10) for _ in payloads] == list(enumerate(payloads))
    speaker.join()
    assert not channel.has_input()


@pytest.mark.parametrize("position", range(0, _HEADER.size + 5))
def test_a_frame_with_a_wrong_byte_is_none(ends, position):
    channel, theirs = ends
    with_it = bytearray(b"")
    other_ours, other_theirs = socket.socketpair()
    with other_ours, other_theirs:
        Channel(other_ours).send(3, b"12345")
        with_it += other_theirs.recv(1000)
    with_it[position] ^= 4
    theirs.sendall(with_it)
    theirs.shutdown(socket.SHUT_WR)
    try:
        number, payload = channel.receive(time.monotonic() + 5)
    except (BrokenFrame, EOFError):
        return
    assert payload == b"12345" and number != 3, "only the number may be another one, and nobody asked for that"


def test_noise_and_silence_on_the_channel(ends):
    channel, theirs = ends
    assert not channel.has_input()
    theirs.sendall(b'{"result": {"score": 1}}\n')
    assert channel.has_input()
    with pytest.raises(BrokenFrame):
        channel.receive(time.monotonic() + 5)
    with pytest.raises(TimeoutError):
        channel.receive(time.monotonic() + 0.05)
    with pytest.raises(TimeoutError):
        channel.send(1, bytes(50_000_000), time.monotonic() + 0.05)


def test_a_frame_that_claims_to_be_enormous_is_refused(ends):
    channel, theirs = ends
    theirs.sendall(_HEADER.pack(_MAGIC, 1, 2**32 - 1, 0))
    with pytest.raises(BrokenFrame):
        channel.receive(time.monotonic() + 5)


def test_a_request_that_is_no_json_is_a_failure_of_that_request_alone(worker):
    request = {"data_source": "x", "solution_str": "plain 1", "ground_truth": "", "extra_info": {"n": 10**5000}}
    assert worker.ask(request, 5)["failure"] == "exception"
    assert ask(worker, "plain 2")["result"]["score"] == 2.0
