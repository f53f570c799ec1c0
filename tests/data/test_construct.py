"""`data construct`: the judge's rules, and the command against a local endpoint and the real sandbox."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web

from code_interpreter.process import SandboxServerProcess
from megatron_retool.__main__ import main
from megatron_retool.chat_endpoint import ChatEndpoint, ChatReply, EndpointError, EndpointRefusal, EndpointSilence
from megatron_retool.commands.data_construct import PROMPT
from megatron_retool.config import CodeInterpreterConfig
from megatron_retool.data.construct.judge import CodeOutput, judge
from megatron_retool.data.construct.ledger import Ledger
from megatron_retool.data.construct.run import PlainTrace, PromptTemplate
from megatron_retool.data.files import DataError
from megatron_retool.data.sft_dataset import SFTDataset
from megatron_retool.data.tagged_traces import TraceError, parse_trace

# ---- tags ------------------------------------------------------------------------------------------------------------


def test_code_and_hermes_blocks():
    trace = parse_trace(
        "One.\n<code>\n```python\nprint('<b>')\n```\n</code>\n<interpreter>\n<b>\n</interpreter>\nTwo."
        '<tool_call>{"name": "code_interpreter", "arguments": {"code": "print(2)"}}</tool_call>'
        "<tool_response>2</tool_response><code>print(3)</code> So <answer>\\boxed{3}</answer>"
    )
    assert [(call.text, call.code, call.output) for call in trace.calls] == [
        ("One.", "print('<b>')", "<b>"),
        ("Two.", "print(2)", "2"),
        ("", "print(3)", None),
    ]
    assert trace.answer == "So \\boxed{3}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<code>print(1)", "unclosed block"),
        ("<code>print(1)</code><interpreter>1", "unclosed block"),
        ("print(1)</code>", "stray tag"),
        ("<interpreter>1</interpreter>", "stray tag"),
        ("<code>print(1)</code> words <interpreter>1</interpreter>", "stray tag"),
        ("<code>\n```python\n```</code>", "empty code"),
        ("<tool_call>{}</tool_call>", "bad tool call"),
        ('<tool_call>{"name": "search", "arguments": {"code": "x"}}</tool_call>', "bad tool call"),
    ],
)
def test_broken_traces(text: str, reason: str):
    with pytest.raises(TraceError) as caught:
        parse_trace(text)
    assert caught.value.reason == reason


# ---- the judge -------------------------------------------------------------------------------------------------------

ASKED = [{"role": "user", "content": "How much?"}]


def decide(text: str, finish_reason: str = "stop", answer: str = "42", outputs: dict[str, CodeOutput] | None = None):
    async def run(code: str) -> CodeOutput:
        return (outputs or {}).get(code, CodeOutput("42", True))

    return asyncio.run(judge(ChatReply(text, finish_reason), ASKED, answer, run))


def test_the_real_output_takes_the_place_of_the_made_up_one():
    verdict = decide(
        "<think>hm</think><rewritten>First <code>print(6*7)</code><interpreter>41</interpreter> so \\boxed{42}."
        "</rewritten> Bye"
    )
    assert (verdict.reason, verdict.calls, verdict.replaced) == (None, 1, 1)
    assert [message["role"] for message in verdict.messages] == ["user", "assistant", "tool", "assistant"]
    assert verdict.messages[2]["content"] == "42" and verdict.messages[3]["content"] == "so \\boxed{42}."


CODE = "<code>a</code><interpreter>42</interpreter>"
KNOWN_ERROR = "<code>a</code><interpreter>NameError: a</interpreter>"
FAILED = {"a": CodeOutput("NameError: name 'a' is not defined", False)}


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        (f"{CODE} \\boxed{{42}}", {"finish_reason": "length"}, "cut off"),
        (f"<rewritten>{CODE} \\boxed{{42}}", {}, "unclosed block"),
        ("It is \\boxed{42}", {}, "no code"),
        (f"\\boxed{{42}} {CODE} done", {}, "no boxed answer"),
        (f"{CODE} Answer: 42", {}, "no boxed answer"),
        (f"{CODE} \\boxed{{43}}", {}, "wrong answer"),
        (f"{CODE} \\boxed{{42}}", {"outputs": FAILED}, "code failed"),
        (f"{CODE} \\boxed{{42}}", {"outputs": {"a": CodeOutput("", True)}}, "code printed nothing"),
        (f"{KNOWN_ERROR} \\boxed{{42}}", {"outputs": FAILED}, None),
        (f"{CODE} \\boxed{{\\frac{{84}}{{2}}}}", {}, None),
    ],
)
def test_what_is_rejected(text: str, options: dict[str, Any], reason: str | None):
    assert decide(text, **options).reason == reason


# ---- the endpoint ----------------------------------------------------------------------------------------------------

Answer = Callable[[dict[str, Any], int], tuple[int, Any, dict[str, str]]]


class Server:
    """Chat completions at ``url``, in a thread. ``answer`` maps (body, how many requests came before) to a response."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answer: Answer = lambda body, number: (200, completion("nothing"), {})
        self.most_at_once = self._at_once = 0
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()

        async def serve() -> None:
            application = web.Application()
            application.router.add_post("/v1/chat/completions", self._handle)
            self._runner = web.AppRunner(application)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
            ready.set()

        self._loop.create_task(serve())
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        assert ready.wait(30)

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.keys.append(request.headers.get("Authorization"))
        self.requests.append(body)
        number = len(self.requests) - 1
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(0.02)
        self._at_once -= 1
        status, content, headers = self.answer(body, number)
        text = content if isinstance(content, str) else json.dumps(content)
        return web.Response(status=status, text=text, headers=headers)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)


def completion(text: str, finish_reason: str = "stop") -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}]}


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def ask(server: Server, **options: Any) -> ChatReply:
    async def asked() -> ChatReply:
        async with ChatEndpoint(server.url, "m", first_delay_seconds=0.01, **options) as endpoint:
            return await endpoint.ask("hello")

    return asyncio.run(asked())


def test_what_may_pass_is_tried_again(server):
    failures = [(503, "busy", {}), (429, "slow down", {"Retry-After": "0"}), (200, "no JSON", {}), (200, {}, {})]
    server.answer = lambda body, number: failures[number] if number < 4 else (200, completion("hi", "length"), {})
    assert ask(server, key="secret", sampling={"temperature": 0.5}) == ChatReply("hi", "length")
    assert len(server.requests) == 5 and server.keys[0] == "Bearer secret"
    expected = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "temperature": 0.5}
    assert server.requests[0] == expected


def test_what_will_not_pass(server):
    server.answer = lambda body, number: (500, "out of memory", {})
    with pytest.raises(EndpointSilence, match="HTTP 500: out of memory; gave up after 3 attempts"):
        ask(server, retries=2)
    server.answer = lambda body, number: (400, "too long", {})
    with pytest.raises(EndpointRefusal, match="HTTP 400: too long"):
        ask(server)
    server.answer = lambda body, number: (401, "", {})
    with pytest.raises(EndpointError, match="HTTP 401: check the key that --key-variable names"):
        ask(server)
    server.answer = lambda body, number: (404, "no such model", {})
    with pytest.raises(EndpointError, match="check --url and --model"):
        ask(server)


# ---- ledger and template ---------------------------------------------------------------------------------------------


def test_a_line_that_a_killed_command_left_is_taken_off(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.append("a", {"reason": None, "calls": 2, "replaced": 1, "row": 0})
    ledger.append("b", {"reason": "no code", "row": 1})
    with path.open("ab") as file:
        file.write(b'{"key": "c", "rea')
    again = Ledger(path)
    assert "a" in again and "c" not in again
    again.append("c", {"reason": None, "calls": 1, "row": 2})
    last = Ledger(path)
    assert last.counts(["a", "b", "c", "d"]) == {"accepted": 2, "calls": 3, "replaced": 1, "rejected: no code": 1}
    assert [record["row"] for record in last.records(["c", "b", "a"], accepted=True)] == [2, 0]
    last.forget_rejected()
    assert "b" not in last


def test_the_template_has_both_places(tmp_path):
    trace = PlainTrace(0, "What of <<reasoning>>?", "I {think} <<question>>", "1")
    filled = PromptTemplate(PROMPT).fill(trace)
    assert "\nWhat of <<reasoning>>?\n" in filled and "\nI {think} <<question>>\n" in filled
    assert "\\boxed{}" in filled and "<rewritten>" in filled
    (tmp_path / "p.txt").write_text("<<question>>")
    with pytest.raises(DataError, match="p.txt: there is no <<reasoning>> in it"):
        PromptTemplate(tmp_path / "p.txt")


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sandbox() -> Iterator[str]:
    process = SandboxServerProcess(CodeInterpreterConfig(workers=2, preimport=["math"]))
    yield process.start()
    process.stop()


TRACES = [
    {"question": f"What is {n} times 7?", "reasoning": f"{n}·7 = {7 * n}", "answer": str(7 * n)} for n in range(1, 7)
]


def rewriting(body: dict[str, Any]) -> str:
    """Item 3 fails in its code, 4 answers wrong, 5 writes no code; the outputs that it makes up are all wrong."""
    prompt = body["messages"][0]["content"]
    n = next(n for n in range(1, 7) if f"What is {n} times 7?" in prompt)
    code = {3: "print(undefined)", 5: ""}.get(n, f"n = {n}\nprint(n * 7)")
    block = f"<code>\n{code}\n</code>\n<interpreter>\n0\n</interpreter>\n" if code else ""
    return f"<rewritten>Multiply.\n{block}It is \\boxed{{{7 * n + (n == 4)}}}.</rewritten>"


def construct(traces: Path, output: Path, server: Server, sandbox: str, *more: str) -> int:
    return main(
        ["data", "construct", "--input", str(traces), "--output", str(output), "--url", server.url, "--model", "m",
         "--concurrency", "3", "--retries", "0", f"tools.code_interpreter.url={sandbox}", *more]
    )  # fmt: skip


def test_traces_become_conversations(tmp_path, server, sandbox, tokenizer, monkeypatch, capsys):
    traces, output = tmp_path / "traces.jsonl", tmp_path / "out"
    traces.write_text("".join(json.dumps(row) + "\n" for row in [*TRACES, TRACES[0]]))
    monkeypatch.setenv("MY_KEY", "secret")

    # The endpoint is busy for item 6: what has a verdict is kept, the rest is asked again by the second run.
    def first(body: dict[str, Any], number: int) -> tuple[int, Any, dict[str, str]]:
        text = rewriting(body)
        return (503, "busy", {}) if "What is 6" in body["messages"][0]["content"] else (200, completion(text), {})

    server.answer = first
    assert construct(traces, output, server, sandbox, "--key-variable", "MY_KEY") == 1
    assert "without an answer: the same command asks again" in " ".join(capsys.readouterr().out.split())
    assert set(server.keys) == {"Bearer secret"} and 1 < server.most_at_once <= 3
    assert len(server.requests) == 6
    assert server.requests[0]["model"] == "m" and server.requests[0]["max_tokens"] == 16384

    server.answer = lambda body, number: (200, completion(rewriting(body)), {})
    assert construct(traces, output, server, sandbox) == 0
    assert len(server.requests) == 7 and "What is 6" in server.requests[-1]["messages"][0]["content"]

    rows = pq.read_table(output / "train.parquet").to_pylist()
    assert [row["extra_info"] for row in rows] == [{"index": index, "tool_calls": 1} for index in (0, 1, 5)]
    messages = json.loads(rows[1]["messages"])
    assert messages[0]["role"] == "user" and messages[0]["content"].startswith("What is 2 times 7?\n\n")
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"code": "n = 2\nprint(n * 7)"}
    assert messages[2] == {"role": "tool", "content": "14"}
    assert messages[3] == {"role": "assistant", "content": "It is \\boxed{14}."}
    assert len(SFTDataset([str(output / "train.parquet")], tokenizer, 4096)) == 3

    rejected = [json.loads(line) for line in (output / "rejected.jsonl").read_text().splitlines()]
    assert [(record["row"], record["reason"]) for record in rejected] == [
        (2, "code failed"),
        (3, "wrong answer"),
        (4, "no code"),
    ]
    assert "NameError: name 'undefined' is not defined" in rejected[0]["detail"]
    assert rejected[1]["detail"] == "29 instead of 28" and rejected[1]["reply"]
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["counts"] == {
        "accepted": 3, "calls": 3, "replaced": 3, "traces": 6, "unanswered": 0,
        "rejected: code failed": 1, "rejected: no code": 1, "rejected: wrong answer": 1,
    }  # fmt: skip

    assert construct(traces, output, server, sandbox, "--retry-rejected") == 0
    assert len(server.requests) == 10
    assert construct(traces, output, server, sandbox, "--temperature", "0.1", "--limit", "2") == 0
    assert len(server.requests) == 12, "another temperature is another question"


def test_wrong_settings_end_at_once(tmp_path, server, sandbox, capsys):
    traces, output = tmp_path / "traces.parquet", tmp_path / "out"
    pq.write_table(pa.Table.from_pylist(TRACES), traces)

    def said(*more: str) -> str:
        assert construct(traces, output, server, sandbox, *more) == 1
        return " ".join(capsys.readouterr().out.split())

    assert "--key-variable NOT_THERE: there is no such variable" in said("--key-variable", "NOT_THERE")
    assert "traces.parquet: column 'solution' is missing" in said("--reasoning", "solution")
    assert not server.requests
    server.answer = lambda body, number: (404, "no such model", {})
    assert "HTTP 404: no such model: check --url and --model" in said()
    server.answer = lambda body, number: (500, "", {})
    assert "HTTP 500; gave up after 1 attempts" in said()
    blank = [*TRACES, {"question": "A?", "reasoning": "", "answer": "1"}]
    pq.write_table(pa.Table.from_pylist(blank), traces)
    asked = len(server.requests)
    assert "traces.parquet, row 6, column 'reasoning': the cell is empty" in said()
    assert len(server.requests) == asked


@pytest.mark.parametrize("url", ["http://127.0.0.1:9"])
def test_a_sandbox_that_does_not_answer(tmp_path, server, url, capsys):
    traces = tmp_path / "traces.jsonl"
    traces.write_text(json.dumps(TRACES[0]))
    assert construct(traces, tmp_path / "out", server, url) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "tools.code_interpreter.url: http://127.0.0.1:9 does not answer" in said


def test_the_command_starts_a_sandbox(tmp_path, server):
    traces = tmp_path / "traces.jsonl"
    traces.write_text(json.dumps(TRACES[1]))
    server.answer = lambda body, number: (200, completion(rewriting(body)), {})
    command = ["data", "construct", "--input", str(traces), "--output", str(tmp_path / "out"), "--url", server.url]
    assert main([*command, "--model", "m", "tools.code_interpreter.workers=1",
                 "tools.code_interpreter.preimport=[math]"]) == 0  # fmt: skip
    assert pq.read_table(tmp_path / "out/train.parquet").num_rows == 1
