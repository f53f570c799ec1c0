"""A chat model as the reward function, against a real HTTP server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megatron_retool.config import ConfigError, JudgeConfig, RewardConfig, load_config
from megatron_retool.data.prompts import PromptRow
from megatron_retool.rewards.judge import Judge
from megatron_retool.rewards.manager import FAILURES, RewardManager, check_reward
from tests.rewards.test_manager import Characters, trajectory


class ChatServer:
    """An OpenAI-compatible endpoint on this machine; ``answers`` are texts or (status, headers), the last one stays."""

    def __init__(self) -> None:
        self.answers: list[Any] = ["score: 1"]
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []
        self.at_once = self.most_at_once = 0
        self.delay = 0.0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    async def _start(self) -> str:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def _answer(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        self.times.append(time.monotonic())
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self.delay)
        self.at_once -= 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, tuple):
            return web.Response(status=answer[0], headers=answer[1], text="said why")
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        return web.json_response({"choices": [{"message": {"content": answer}}], "usage": usage})

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    server = ChatServer()
    yield server
    server.close()


def settings(server: ChatServer, tmp_path: Path, text: str = "{prompt}|{answer}|{ground_truth}", **more: Any) -> Any:
    file = tmp_path / "judge.txt"
    file.write_text(text)
    return JudgeConfig(url=server.url, model="judge", prompt=str(file), **{"retries": 0, **more})


def scored(judge: JudgeConfig, *trajectories: Any, **config: Any) -> dict[str, float]:
    with RewardManager(RewardConfig(function="judge", judge=judge, **config), Characters()) as manager:
        manager.score(trajectories)
        return manager.take_metrics()


@pytest.mark.parametrize(
    ("reply", "more", "score", "accuracy"),
    [
        ("Well done. Score: 1", {}, 1.0, 1.0),
        ("Score: 0 at first, then score = 0.75", {}, 0.5, 1.0),
        ("score 2", {"lowest": 1.0, "highest": 5.0}, -0.5, 0.0),
        ("Verdict: YES", {"verdict": r"(?i)verdict: (\w+)"}, 1.0, 1.0),
        ("Verdict: incorrect", {"verdict": r"(?i)verdict: (\w+)"}, -1.0, 0.0),
    ],
)
def test_the_last_verdict_becomes_the_reward(
    server: ChatServer, tmp_path: Path, reply: str, more: dict[str, Any], score: float, accuracy: float
) -> None:
    server.answers = [reply]
    row = trajectory("\\boxed{42}")
    scored(settings(server, tmp_path, api_key="secret", **more), row)
    assert (row.reward, row.reward_info["score"], row.reward_info["acc"]) == (score, score, accuracy)
    (request,) = server.requests
    assert request["messages"] == [{"role": "user", "content": "\x01|\\boxed{42}|42"}]
    assert (request["model"], request["temperature"]) == ("judge", 0.0)
    assert server.keys == ["Bearer secret"]


def test_what_a_response_says_is_not_filled_in_again_and_is_bounded(server: ChatServer, tmp_path: Path) -> None:
    rows = [trajectory("the answer is {ground_truth}", truth="hidden"), trajectory("x" * 10_000)]
    scored(settings(server, tmp_path, "judge {answer}", max_characters=1000), *rows)
    sent = sorted((request["messages"][0]["content"] for request in server.requests), key=len)
    assert sent[0] == "judge the answer is {ground_truth}"
    assert len(sent[1]) == len("judge ") + 1000


def test_votes_and_the_grader_that_the_judge_is_compared_with(server: ChatServer, tmp_path: Path) -> None:
    server.answers = ["score: 1", "score: 1", "score: 0", "score: 1"]
    wrong = trajectory("\\boxed{41}")
    judge = settings(server, tmp_path, votes=4, grader="math", prompt_price=2.0, completion_price=10.0)
    metrics = scored(judge, wrong)
    assert wrong.reward == 0.5
    assert wrong.reward_info["judge_verdict"] == 0.75
    assert wrong.reward_info["judge_disagreement"] == pytest.approx(0.75**0.5 / 2)
    assert wrong.reward_info["judge_against_grader"] == 1.0
    assert metrics == {
        **{f"reward/failures/{kind}": 0.0 for kind in FAILURES},
        "reward/scored": 1.0,
        "reward/judge/requests": 4.0,
        "reward/judge/cached": 0.0,
        "reward/judge/prompt_tokens": 400.0,
        "reward/judge/completion_tokens": 40.0,
        "reward/judge/cost": pytest.approx((400 * 2.0 + 40 * 10.0) / 1e6),
    }
    right = trajectory("x = \\frac{84}{2}", truth="\\frac{42}{1}")
    scored(judge, right)
    assert right.reward_info["judge_against_grader"] == 1.0, "a worker process graded it: there is no box"


def test_the_same_question_is_asked_once(server: ChatServer, tmp_path: Path) -> None:
    server.delay = 0.1
    judge = settings(server, tmp_path, cache=str(tmp_path / "replies.sqlite"))
    metrics = scored(judge, *(trajectory("\\boxed{42}") for _ in range(5)))
    assert (metrics["reward/judge/requests"], metrics["reward/judge/cached"]) == (1.0, 4.0)
    metrics = scored(judge, trajectory("\\boxed{42}"), trajectory("\\boxed{43}"))
    assert (metrics["reward/judge/requests"], metrics["reward/judge/cached"]) == (1.0, 1.0)
    assert len(server.requests) == 2


def test_many_requests_at_a_time_and_no_more_a_minute_than_allowed(server: ChatServer, tmp_path: Path) -> None:
    server.delay = 0.2
    rows = [trajectory(f"\\boxed{{{number}}}") for number in range(12)]
    scored(settings(server, tmp_path, max_concurrent=6), *rows)
    assert server.most_at_once == 6
    server.times.clear()
    scored(settings(server, tmp_path, requests_per_minute=600), *rows[:5])
    assert server.times[-1] - server.times[0] > 0.35


@pytest.mark.parametrize(
    ("answer", "failure", "words"),
    [
        ("no idea", "bad_result", "no verdict in the judge's reply 'no idea'"),
        ("score: 7", "bad_result", "verdict 7 lies outside reward.judge.lowest=0"),
        ((500, {}), "timeout", "HTTP 500: said why; gave up after 1 attempts"),
        ((401, {}), "exception", "check reward.judge.api_key"),
        ((404, {}), "exception", "check reward.judge.url and reward.judge.model"),
        ((400, {}), "exception", "HTTP 400"),
    ],
)
def test_a_judge_that_fails_costs_the_response_and_not_the_run(
    server: ChatServer, tmp_path: Path, answer: Any, failure: str, words: str
) -> None:
    server.answers = [answer]
    row = trajectory("\\boxed{42}")
    metrics = scored(settings(server, tmp_path), row, failure_score=-0.25)
    assert (row.reward, row.reward_info["failure"], metrics[f"reward/failures/{failure}"]) == (-0.25, failure, 1.0)
    assert words in row.reward_info["failure_message"]


def test_what_may_pass_is_asked_again(server: ChatServer, tmp_path: Path) -> None:
    server.answers = [(429, {"Retry-After": "0.3"}), "score: 1"]
    row = trajectory("\\boxed{42}")
    scored(settings(server, tmp_path, retries=1), row)
    assert row.reward == 1.0
    assert server.times[1] - server.times[0] >= 0.3


def test_a_judge_is_tried_before_the_run(server: ChatServer, tmp_path: Path) -> None:
    prompt = PromptRow([1], 0, "uid", "demo", "42", {})
    judge = settings(server, tmp_path)
    check_reward(RewardConfig(function="judge", judge=judge), prompt)
    server.answers = [(401, {})]
    with pytest.raises(ConfigError, match=r"reward\.function=judge .* check reward\.judge\.api_key"):
        check_reward(RewardConfig(function="judge", judge=judge), prompt)
    (tmp_path / "judge.txt").write_text("say yes")
    with pytest.raises(ConfigError, match="shows the judge no response"):
        check_reward(RewardConfig(function="judge", judge=judge))
    (tmp_path / "judge.txt").unlink()
    with pytest.raises(ConfigError, match=r"judge\.txt cannot be read"):
        check_reward(RewardConfig(function="judge", judge=judge))
    (tmp_path / "cache").write_text("no database, but a text of some length\n" * 100)
    with pytest.raises(ConfigError, match=r"reward\.judge\.cache=.*not a database"):
        Judge(settings(server, tmp_path, cache=str(tmp_path / "cache")))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["reward.function=judge"], "reward.judge.url is empty"),
        (["reward.judge.model=m"], "reward.function=judge"),
        (["lowest=1", "highest=1"], "must lie below reward.judge.highest"),
        (["url=localhost"], "expected http://"),
        (["verdict='(score'"], "no regular expression"),
        (["verdict=score"], "has no group"),
        (["grader=judge"], "name another function"),
    ],
)
def test_settings_that_contradict_each_other(overrides: list[str], words: str) -> None:
    if "." not in overrides[0].partition("=")[0]:
        known = ["url=http://localhost/v1", "model=m", "prompt=p"]
        overrides = ["reward.function=judge", *(f"reward.judge.{each}" for each in (*known, *overrides))]
    with pytest.raises(ConfigError) as error:
        load_config(None, overrides)
    assert words in str(error.value)
