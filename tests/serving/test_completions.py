"""Completions of a served model: texts without a chat template, and how likely they are."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from types import SimpleNamespace

import httpx
import openai
import pytest
import torch
from transformers import Qwen2ForCausalLM

from megatron_retool.config import MultiTurnConfig, SamplingConfig, load_config
from megatron_retool.serving.front import OpenDoor
from sglang_rollout.engine.configured import make_engine
from sglang_rollout.engine.pool import EnginePool
from sglang_rollout.engine.rollout_statistics import RolloutStatistics
from sglang_rollout.gateway import completions
from sglang_rollout.gateway.api import MAX_PROMPTS_BYTES
from sglang_rollout.gateway.sampler import PoolSampler
from sglang_rollout.gateway.server import Gateway
from tests.kit.markov_policy import ANSWER, WORD
from tests.serving.scripted_model import Script
from tests.serving.table_policy import SETTINGS

QUESTION = "What is 6*7?\n"
CONTEXT = 64


@pytest.fixture(scope="module")
def pool(table_model_directory):
    config = load_config(None, [*SETTINGS, f"model.path={table_model_directory}"])
    engine = make_engine(config)
    server = engine.server(
        0,
        model_path=config.model.path,
        host="127.0.0.1",
        log_file=table_model_directory / "unused",
        tokenizer=True,
        weights_from_sync=False,
        gpu_ids=None,
    )
    return lambda: EnginePool(engine, [server.base_url], config.rollout, RolloutStatistics())


@pytest.fixture(scope="module")
def model(table_model_directory):
    return Qwen2ForCausalLM.from_pretrained(table_model_directory, dtype=torch.float32)


@contextlib.asynccontextmanager
async def served(tokenizer, sampler):
    config = load_config(None, ["rollout.val.temperature=1.0", "rollout.val.top_p=1.0"])
    door = OpenDoor(config, context_length=CONTEXT)
    async with Gateway(sampler, tokenizer, MultiTurnConfig(), model="mine", door=door) as gateway:
        root = f"http://127.0.0.1:{gateway.port}"
        async with (
            httpx.AsyncClient(base_url=root, timeout=60) as http,
            openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="any", max_retries=0) as client,
        ):
            yield SimpleNamespace(http=http, client=client)


def log_probs(model, ids: list[int]) -> list[float]:
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return rows[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()


def test_the_likelihood_of_texts_as_lm_eval_asks_for_it(tokenizer, pool, model):
    pairs = [(WORD, WORD + WORD), (QUESTION, ANSWER), (WORD, WORD + ANSWER)]
    contexts = [tokenizer.encode(context, add_special_tokens=False) for context, _ in pairs]
    wholes = [tokenizer.encode("".join(pair), add_special_tokens=False) for pair in pairs]
    texts = [tokenizer.decode(whole) for whole in wholes]

    async def run():
        async with served(tokenizer, PoolSampler(pool(), RolloutStatistics())) as at:
            for prompts in (wholes, texts):
                asked = {"model": "m", "prompt": prompts, "echo": True, "max_tokens": 1, "temperature": 0}
                answer = (await at.http.post("/v1/completions", json={**asked, "logprobs": 1, "seed": 1234})).json()
                assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
                for choice, whole, context in zip(answer["choices"], wholes, contexts, strict=True):
                    # What lm-eval reads: the last token is the one that was sampled.
                    shown = choice["logprobs"]
                    assert shown["token_logprobs"][0] is None and shown["top_logprobs"][0] is None
                    found = shown["token_logprobs"][len(context) : -1]
                    expected = log_probs(model, whole)[len(context) - 1 :]
                    assert found == pytest.approx(expected, abs=1e-5)
                    tops = shown["top_logprobs"][len(context) : -1]
                    likeliest = [max(top, key=top.__getitem__) for top in tops]
                    greedy = all(
                        token == best for token, best in zip(shown["tokens"][len(context) : -1], likeliest, strict=True)
                    )
                    assert greedy == all(value > math.log(0.5) for value in expected)
                    # A token that ends the text is one of the tokens, and no text.
                    assert "".join(shown["tokens"]).removesuffix("<|im_end|>") == choice["text"]
                    assert choice["text"].startswith(tokenizer.decode(whole))
                assert answer["usage"]["prompt_tokens"] == sum(map(len, wholes))
            only = await at.client.completions.create(model="m", prompt=wholes, echo=True, max_tokens=0, logprobs=1)
            assert [choice.text for choice in only.choices] == texts
            assert [len(choice.logprobs.tokens) for choice in only.choices] == [len(whole) for whole in wholes]

    asyncio.run(run())


def test_texts_are_gone_on_with(tokenizer, pool):
    async def run():
        async with served(tokenizer, PoolSampler(pool(), RolloutStatistics())) as at:
            ask = at.client.completions.create
            asked = {"model": "m", "max_tokens": 20, "seed": 3, "temperature": 0.7}
            one = await ask(prompt=[WORD, QUESTION], n=2, **asked)
            again = await ask(prompt=[WORD, QUESTION], n=2, **asked)
            assert [choice.text for choice in one.choices] == [choice.text for choice in again.choices]
            assert len(one.choices) == 4 and one.usage.prompt_tokens == 1 + len(tokenizer.encode(QUESTION))
            ended = next(choice for choice in one.choices if choice.finish_reason == "stop")
            assert ended.text.endswith(ANSWER) and "<|im_end|>" not in ended.text
            shown = (await ask(prompt=WORD, model="m", max_tokens=3, temperature=0, logprobs=2)).choices[0]
            assert shown.text == WORD * 3 and shown.finish_reason == "length" and shown.logprobs.tokens == [WORD] * 3
            assert [sorted(top) for top in shown.logprobs.top_logprobs] == [sorted([WORD, ANSWER])] * 3
            stream = await ask(prompt=WORD, stream=True, stream_options={"include_usage": True}, **asked)
            pieces = [piece async for piece in stream]
            whole = await ask(prompt=WORD, **asked)
            text = "".join(choice.text for piece in pieces for choice in piece.choices)
            assert text == whole.choices[0].text and pieces[-1].usage == whole.usage

    asyncio.run(run())


WRONG = [
    ({}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [[1], "a", [True]]}, "prompt[2]"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [[0], [1 << 40]]}, "prompt[1]"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a"] * (completions.MOST_ANSWERS + 1)}, "prompt"),
    ({"prompt": ["a"] * 2, "n": completions.MOST_ANSWERS}, "prompt"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "logprobs": completions.MOST_LIKELIEST + 1}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "echo": 1}, "echo"),
    ({"prompt": "a", "best_of": 4}, "best_of"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "no_such": 1}, "no_such"),
    ({"prompt": "a", "temperature": 3}, "temperature"),
    ({"prompt": [0] * (CONTEXT + 1)}, "messages"),
    ({"prompt": [0] * CONTEXT}, "messages"),
    ({"prompt": "a" * 1_000_000}, "messages"),
    ({"prompt": ["a", "a " * 100_000]}, "messages"),
]


def test_what_is_wrong_is_told(tokenizer):
    async def run():
        script = Script(tokenizer, [ANSWER])
        async with served(tokenizer, script) as at:
            for fields, name in WRONG:
                answer = await at.http.post("/v1/completions", json=fields)
                assert answer.status_code == 400 and answer.json()["error"]["param"] == name, (fields, answer.text)
            assert (await at.http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
            answer = await at.http.post("/v1/completions", json={"prompt": "a", "logprobs": 1})
            assert answer.status_code == 400 and "the engines" in answer.json()["error"]["message"]
            large = json.dumps({"prompt": "a", "user": "x" * (MAX_PROMPTS_BYTES + 1)})
            answer = await at.http.post("/v1/completions", content=large)
            assert answer.status_code == 400 and len(script.requests) == 1

    asyncio.run(run())


def test_a_run_refuses_completions(tokenizer):
    async def run():
        async with Gateway(Script(tokenizer, [ANSWER]), tokenizer, MultiTurnConfig()) as gateway:
            session = gateway.open_session(SamplingConfig())
            async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key, max_retries=0) as client:
                with pytest.raises(openai.BadRequestError, match="megatron-retool serve.*use chat/completions"):
                    await client.completions.create(model="m", prompt="a")
            assert session.segments() == []

    asyncio.run(run())


def test_openais_client_asks_for_models_and_counts_tokens(tokenizer):
    async def run():
        script = Script(tokenizer, [ANSWER])
        async with served(tokenizer, script) as at:
            assert (await at.client.models.retrieve("mine")).id == "mine"
            asked = {"model": "m", "input": "How many?", "instructions": "Count."}
            counted = await at.client.responses.input_tokens.count(**asked)
            said = await at.client.responses.create(**asked, max_output_tokens=4)
            assert (counted.object, counted.input_tokens) == ("response.input_tokens", said.usage.input_tokens)
            assert len(script.requests) == 1

    asyncio.run(run())
