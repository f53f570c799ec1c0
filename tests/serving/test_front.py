"""The door for everybody, with real clients: keys, sampling, tools on either side, sessions that follow each other."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from megatron_retool.config import MultiTurnConfig, load_config
from megatron_retool.serving import front
from megatron_retool.serving.front import OpenDoor
from sglang_rollout.gateway.server import Gateway
from tests.kit.markov_policy import ANSWER, CALL, WORD
from tests.kit.scripted import Counter
from tests.serving.scripted_model import Script, counting_tools

MODEL = "mine"
QUESTION = [{"role": "user", "content": "How many?"}]
CONFIG = load_config(None, ["rollout.val.temperature=0.5", "rollout.val.top_p=1.0"])


def served(
    tokenizer,
    script: Script,
    scenario,
    *,
    tools=None,
    key: str | None = None,
    system: str | None = None,
    steers: bool = True,
    stop_strings: bool = True,
) -> None:
    """Run ``scenario(gateway, openai client)``."""

    async def run() -> None:
        door = OpenDoor(CONFIG, context_length=4096, api_key=key, tools=tools, system=system)
        engines = {"steers": steers, "stop_strings": stop_strings}
        async with Gateway(script, tokenizer, MultiTurnConfig(), model=MODEL, door=door, **engines) as gateway:
            url = f"http://127.0.0.1:{gateway.port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=key or "any", max_retries=0) as client:
                await scenario(gateway, client)

    asyncio.run(run())


def test_a_key_for_all(tokenizer):
    async def scenario(gateway, client):
        root = f"http://127.0.0.1:{gateway.port}"
        assert [model.id for model in (await client.models.list()).data] == [MODEL]
        async with httpx.AsyncClient(base_url=root, headers={"x-api-key": "our key"}) as other:
            body = {"model": "any", "max_tokens": 9, "messages": QUESTION}
            message = (await other.post("/v1/messages", json=body)).json()
        assert message["content"][0]["text"] == ANSWER
        for wrong in ("", "another"):
            with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
                await client.with_options(api_key=wrong or "-").models.list()

    served(tokenizer, Script(tokenizer, [ANSWER]), scenario, key="our key")


def test_pages_of_other_sites_need_the_key(tokenizer):
    statuses = []

    async def scenario(gateway, client):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}") as other:
            for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
                shown = {**headers, "Authorization": "Bearer our key"}
                statuses.append(
                    [(await other.get("/v1/models", headers=each)).status_code for each in (headers, shown)]
                )

    for key in (None, "our key"):
        served(tokenizer, Script(tokenizer, [ANSWER]), scenario, key=key)
    assert statuses == [[403, 403], [403, 403], [403, 200], [403, 200]]


def test_a_call_without_a_system_message_gets_the_servers(tokenizer):
    script = Script(tokenizer, [CALL], [ANSWER], [ANSWER])
    tools, _ = counting_tools()

    async def scenario(gateway, client):
        ask = client.chat.completions.create
        first = (await ask(model=MODEL, messages=QUESTION)).choices[0]
        await ask(model=MODEL, messages=[*QUESTION, {"role": "assistant", "content": first.message.content}, *QUESTION])
        await ask(model=MODEL, messages=[{"role": "system", "content": "Mine."}, *QUESTION])

    served(tokenizer, script, scenario, tools=tools, system="Solve it.")
    texts = [tokenizer.decode(context) for context in script.contexts]
    assert [text.count("Solve it.") for text in texts[:3]] == [1, 1, 1]
    assert "print(6*7)" in texts[2], "hidden turns are found below the server's system message"
    assert "Solve it." not in texts[-1] and "Mine." in texts[-1]


def test_calls_choose_how_they_are_sampled(tokenizer):
    script = Script(tokenizer, [WORD])

    async def scenario(gateway, client):
        ask = client.chat.completions.create
        await ask(model=MODEL, messages=QUESTION)
        await ask(model=MODEL, messages=QUESTION, temperature=0, top_p=0)
        await client.responses.create(model=MODEL, input="How many?", temperature=1.5)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await ask(model=MODEL, messages=QUESTION, temperature=3)

    served(tokenizer, script, scenario)
    sampling = [request.sampling for request in script.requests]
    assert [each.temperature for each in sampling] == [0.5, 0, 1.5]
    assert sampling[0].top_p == 1.0 and 0 < sampling[1].top_p < 1e-3


def test_the_server_runs_its_tools(tokenizer):
    script = Script(tokenizer, [WORD, CALL], [CALL], [ANSWER])
    tools, counter = counting_tools()

    async def scenario(gateway, client):
        first = (await client.chat.completions.create(model=MODEL, messages=QUESTION)).choices[0]
        assert (first.message.content, first.message.tool_calls, first.finish_reason) == (ANSWER, None, "stop")
        history = [*QUESTION, {"role": "assistant", "content": first.message.content}, *QUESTION]
        chunks = await client.chat.completions.create(model=MODEL, messages=history, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in chunks]) == ANSWER

    served(tokenizer, script, scenario, tools=tools)
    assert [session["count"] for session in counter.closed] == [2, 2], "each answer has sessions of its own"
    assert "Count." in tokenizer.decode(script.contexts[0]), "the model is told of the tools"
    for earlier, later in zip(script.contexts, script.contexts[1:], strict=False):
        assert later[: len(earlier)] == earlier, "a client that saw answers alone goes on from all token ids"
    assert tokenizer.decode(script.contexts[2]).count("<tool_response>") == 2


def test_several_answers_with_tools(tokenizer):
    tools, counter = counting_tools()
    script = Script(tokenizer, [CALL], [CALL], [ANSWER], [ANSWER])

    async def scenario(gateway, client):
        found = await client.chat.completions.create(model=MODEL, messages=QUESTION, n=2, seed=5)
        assert [choice.message.content for choice in found.choices] == [ANSWER, ANSWER]

    served(tokenizer, script, scenario, tools=tools)
    assert len(counter.closed) == 2 and len(set(script.seeds[:2])) == 2


def test_tools_of_the_client_are_the_client_s(tokenizer):
    tools, counter = counting_tools()
    own = {"type": "function", "function": {"name": "own", "parameters": {"type": "object"}}}

    async def scenario(gateway, client):
        found = await client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[own])
        assert found.choices[0].finish_reason == "tool_calls"

    served(tokenizer, Script(tokenizer, [CALL]), scenario, tools=tools)
    assert not counter.opened


def test_sessions_follow_each_other(tokenizer, monkeypatch):
    """Nothing that was said piles up, and calls under way end where they began."""
    monkeypatch.setattr(front, "CALLS_OF_A_SESSION", 3)
    script = Script(tokenizer, [WORD])

    async def scenario(gateway, client):
        before = await client.responses.create(model=MODEL, input="How many?")
        ask = client.chat.completions.create
        await asyncio.gather(*(ask(model=MODEL, messages=QUESTION) for _ in range(40)))
        assert gateway.open_sessions <= 2
        assert gateway.statistics.sessions > 5
        after = await client.responses.create(model=MODEL, input="And now?", previous_response_id=before.id)
        assert after.output_text == WORD

    served(tokenizer, script, scenario)
    assert "How many?" in tokenizer.decode(script.contexts[-1])


FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


def test_penalties_and_forms_go_to_the_engine(tokenizer):
    script = Script(tokenizer, [WORD])

    async def scenario(gateway, client):
        ask = client.chat.completions.create
        asked = {"model": MODEL, "messages": QUESTION}
        await ask(**asked, frequency_penalty=0.5, presence_penalty=-0.5, extra_body={"top_k": 7, "min_p": 0.1})
        await client.completions.create(model=MODEL, prompt="a", frequency_penalty=0.5)
        await ask(**asked, response_format=FORM)
        await ask(**asked, tools=[Counter.schema], tool_choice="required")
        await client.responses.create(model=MODEL, input="a", text={"format": {"type": "json_object"}})
        with pytest.raises(openai.BadRequestError, match="the request has no tools"):
            await ask(**asked, tool_choice="required")

    served(tokenizer, script, scenario)
    first, second, form, calls, responses = script.requests
    assert first.steering.penalties == {"frequency_penalty": 0.5, "presence_penalty": -0.5}
    assert (first.sampling.top_k, first.sampling.min_p, first.steering.grammar) == (7, 0.1, None)
    assert second.steering.penalties == {"frequency_penalty": 0.5}
    assert form.steering.grammar.kind == responses.steering.grammar.kind == "json_schema"
    assert calls.steering.grammar.kind == "structural_tag" and "tool_call" in calls.steering.grammar.text


@pytest.mark.parametrize(("steers", "stop_strings", "words"), [(False, True, "backend"), (True, False, "no tokenizer")])
def test_engines_without_grammars_say_so(tokenizer, steers, stop_strings, words):
    async def scenario(gateway, client):
        ask = client.chat.completions.create
        with pytest.raises(openai.BadRequestError, match=f"response_format is not supported here: .*{words}"):
            await ask(model=MODEL, messages=QUESTION, response_format=FORM)
        if not steers:
            with pytest.raises(openai.BadRequestError, match="presence_penalty"):
                await ask(model=MODEL, messages=QUESTION, presence_penalty=1)
        await ask(model=MODEL, messages=QUESTION, extra_body={"top_k": 3})

    served(tokenizer, Script(tokenizer, [WORD]), scenario, steers=steers, stop_strings=stop_strings)
