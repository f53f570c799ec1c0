"""Teachers as servers that score given tokens: which rows they score, what of them is read, and what they refuse."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from megatron_retool.cluster import teachers as module
from megatron_retool.cluster.teachers import TeacherFailure, Teachers
from megatron_retool.config import ConfigError, DistillationConfig, TeacherConfig, load_config
from megatron_retool.parity.admission.tiny_model import random_batch

LENGTHS = [(5, 20), (9, 3), (4, 12), (6, 1)]


def encode(text: str) -> list[int]:
    return [ord(character) % 97 for character in text]


class TeacherServer:
    """Speaks SGLang's API: the log-prob of a token is -token / 100 - place / 10000, less ``offset``."""

    def __init__(self, offset: float = 0.0) -> None:
        self.offset = offset
        self.failures: list[int] = []
        self.shift = 0
        self.keys: list[str | None] = []
        self.scored = 0
        self.at_once = self.most_at_once = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        application = web.Application(client_max_size=2**24)
        application.router.add_post("/generate", self._generate)
        application.router.add_post("/tokenize", self._tokenize)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def _tokenize(self, request: web.Request) -> web.Response:
        text = (await request.json())["prompt"]
        return web.json_response({"tokens": [token + self.shift for token in encode(text)]})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.keys.append(request.headers.get("Authorization"))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.02)
        self.at_once -= 1
        if self.failures:
            return web.json_response({"error": {"message": "said why"}}, status=self.failures.pop(0))
        self.scored += 1
        ids, start = body["input_ids"], body["logprob_start_len"]
        assert body["sampling_params"]["max_new_tokens"] <= 1
        scores = [[None, ids[start], None]]
        scores += [[-ids[i] / 100 - i / 10000 - self.offset, ids[i], None] for i in range(start + 1, len(ids))]
        meta = {"input_token_logprobs": scores, "id": "1", "prompt_tokens": len(ids)}
        return web.json_response({"text": "", "output_ids": [0], "meta_info": meta})


def settings(*teachers: TeacherConfig, **more: Any) -> DistillationConfig:
    return DistillationConfig(list(teachers), **{"retries": 0, "timeout_seconds": 5.0, **more})


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY_SECONDS", 0.01)


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    run.__name__ = test.__name__
    return run


def expected(batch: Any, offsets: list[float]) -> np.ndarray:
    found = np.zeros(batch.num_response_tokens, np.float32)
    place = 0
    for row in range(len(batch)):
        for i in range(int(batch.response_lengths[row])):
            position = int(batch.prompt_lengths[row]) + i
            found[place] = -batch.response_ids[place] / 100 - position / 10000 - offsets[row]
            place += 1
    return np.where(batch.loss_mask, found, 0.0)


@in_a_loop
async def test_each_row_is_scored_by_its_teacher_at_the_sampled_tokens() -> None:
    batch = random_batch(LENGTHS, seed=1)
    assert not batch.loss_mask.all()
    one, other = TeacherServer(), TeacherServer(offset=3.0)
    async with one.serving() as url, other.serving() as other_url:
        config = settings(TeacherConfig(url, api_key="secret"), TeacherConfig(other_url, ["aime"]), max_concurrent=2)
        async with Teachers(config, encode) as teachers:
            found = await teachers.log_probs(batch, ["math", "aime", "gsm8k", "math"])
    np.testing.assert_allclose(found, expected(batch, [0.0, 3.0, 0.0, 0.0]), atol=1e-6)
    rows = [int(batch.loss_mask[batch.sequence_ids == row].any()) for row in range(4)]
    assert (one.scored, other.scored) == (rows[0] + rows[2] + rows[3], rows[1])
    assert set(one.keys) == {"Bearer secret"}
    assert set(other.keys) == {None}
    assert one.most_at_once == 2


@in_a_loop
async def test_a_teacher_that_comes_back_is_waited_for_and_one_that_does_not_is_named() -> None:
    batch, server = random_batch(LENGTHS, seed=1), TeacherServer()
    async with server.serving() as url, Teachers(settings(TeacherConfig(url), retries=2), encode) as teachers:
        server.failures = [500, 500]
        await teachers.log_probs(batch, ["math"] * 4)
        server.failures = [500] * 20
        with pytest.raises(TeacherFailure, match=f"the teacher {url} did not score in 3 attempts.*Start it again"):
            await teachers.log_probs(batch, ["math"] * 4)
        server.failures = [400]
        with pytest.raises(TeacherFailure, match=f"the teacher {url} refuses to score: .*said why"):
            await teachers.log_probs(batch, ["math"] * 4)
    gone = settings(TeacherConfig("http://127.0.0.1:9"), check_tokenizer=False)
    async with Teachers(gone, encode) as teachers:
        with pytest.raises(TeacherFailure, match="127.0.0.1:9 did not score in 1 attempts"):
            await teachers.log_probs(batch, ["math"] * 4)


@in_a_loop
async def test_scores_that_are_no_numbers_are_refused() -> None:
    batch, server = random_batch(LENGTHS, seed=1), TeacherServer(offset=math.inf)
    async with server.serving() as url, Teachers(settings(TeacherConfig(url)), encode) as teachers:
        with pytest.raises(TeacherFailure, match=url):
            await teachers.log_probs(batch, ["math"] * 4)


@in_a_loop
async def test_another_tokenizer_is_refused_by_name() -> None:
    server = TeacherServer()
    server.shift = 1
    async with server.serving() as url:
        with pytest.raises(ConfigError, match=f"the teacher {url} has another tokenizer than the policy: token 0 of"):
            async with Teachers(settings(TeacherConfig(url)), encode):
                pass
        async with Teachers(settings(TeacherConfig(url), check_tokenizer=False), encode):
            pass
    with pytest.raises(ConfigError, match="encodes no text for a comparison of tokenizers.*check_tokenizer=false"):
        async with Teachers(settings(TeacherConfig(url)), encode):
            pass


@in_a_loop
async def test_a_row_that_no_teacher_teaches_is_named() -> None:
    batch, server = random_batch(LENGTHS, seed=1), TeacherServer()
    async with server.serving() as url, Teachers(settings(TeacherConfig(url, ["aime"])), encode) as teachers:
        with pytest.raises(ConfigError, match="no teacher names the data source 'math'"):
            await teachers.log_probs(batch, ["aime", "math", "aime", "aime"])


TEACHER = "algorithm.distillation.teachers=[{url: http://teacher:30000}]"
QUIET = "algorithm.dynamic_sampling.enable=false"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([TEACHER], "score responses for nothing"),
        (["algorithm.advantage=reverse_kl", QUIET], "would teach the policy to stay as it was"),
        (["algorithm.advantage=reverse_kl", TEACHER, "algorithm.dynamic_sampling.enable=true"], "set it to false"),
        (["algorithm.advantage=reverse_kl", TEACHER, QUIET, "rollout.train.temperature=0.7"], "train.temperature=0.7"),
        (["algorithm.advantage=reverse_kl", TEACHER, QUIET, "rollout.train.top_p=0.9"], "rollout.train.top_p=0.9"),
        (["algorithm.kl_in_loss=1", "algorithm.distillation.teachers=[{url: teacher}]"], "expected http"),
        (["algorithm.kl_in_loss=1", "algorithm.distillation.teachers=[{url: http://a}, {url: http://b}]"],
         "teaches the rows that no other teacher names already"),
        (["algorithm.reward_weight=1"], "algorithm.advantage=reverse_kl"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, overrides)
    assert words in str(error.value)


def test_a_teacher_takes_the_place_of_the_initial_policy() -> None:
    config = load_config(None, ["algorithm.advantage=reverse_kl", TEACHER, QUIET])
    assert not config.algorithm.keeps_reference
    assert load_config(None, ["algorithm.kl_in_loss=0.1"]).algorithm.keeps_reference
