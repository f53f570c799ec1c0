"""Agents that know a model's API alone, through the manager and the gateway: their rows, rewards, outcomes and ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_retool.config import ConfigError, RewardConfig, SamplingConfig
from megatron_retool.loop.metrics import rollout_metrics
from megatron_retool.registry import ExtensionError
from megatron_retool.rewards.manager import RewardManager
from megatron_retool.rollout_rows import AGENT_KEY, rollouts_of
from megatron_retool.trajectory import FinishReason
from sglang_rollout.agent.agents import check_agent
from sglang_rollout.agent.paused_groups import read_paused_groups, write_paused_groups
from sglang_rollout.engine.router import NoEngineAvailable
from sglang_rollout.rollout_manager import RolloutManager
from sglang_rollout.task_agents.agent import TaskAgents
from tests.kit.scripted import Prompt, ScriptedTools
from tests.sglang_rollout.test_rollout_manager import ScriptedEngine, make_config

FUNCTIONS = """
import asyncio
import json
import time
import urllib.error
import urllib.request


def ask(client, *texts, **more):
    body = {"model": client.model, "messages": [{"role": "user", "content": text} for text in texts], **more}
    request = urllib.request.Request(f"{client.base_url}/chat/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json", "Authorization": f"Bearer {client.api_key}"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


async def continues(task, client, *, reward=1.0):
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as openai:
        messages = [{"role": "user", "content": task["messages"][0]["content"]}]
        for _ in range(2):
            found = await openai.chat.completions.create(model=client.model, messages=messages)
            messages += [{"role": "assistant", "content": found.choices[0].message.content},
                         {"role": "user", "content": "go on"}]
    return {"reward": reward, "acc": 0.5, "group": task["group_id"]}


def forgets(task, client):
    for text in ("one", "two", "three"):
        ask(client, text)


def crashes(task, client):
    ask(client, "one")
    raise RuntimeError("the plan failed")


def exits(task, client):
    raise SystemExit(3)


async def sleeps(task, client):
    await asyncio.to_thread(ask, client, "one")
    await asyncio.sleep(60)


def blocks(task, client):
    time.sleep(6)


def says_nothing_of_use(task, client):
    return "good"


def overflows(task, client):
    for count in range(1, 9):
        ask(client, *["word " * 200] * count)


def loops_for_ever(task, client):
    dead = ("session_closed", "not_found")
    while True:
        try:
            ask(client, "again")
        except urllib.error.HTTPError as error:
            if json.load(error)["error"]["code"] in dead:
                return
        except urllib.error.URLError:
            return  # the run has ended
        time.sleep(0.01)


def silent(task, client):
    return 2.0


async def stubborn(task, client):
    for _ in range(2):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass  # of the time-out; the second one ends it


def own_timeout(task, client):
    raise TimeoutError("of its own")
"""
PROMPTS = [Prompt([1, 2], group_id, {"uid": str(group_id)}) for group_id in range(2)]
for prompt in PROMPTS:
    prompt.messages = [{"role": "user", "content": f"question {prompt.group_id}"}]
TWO = SamplingConfig(n=2)


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("agents") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def generated(tokenizer, *overrides, fail=lambda count: None, tools=None):
    async def scenario():
        engine = await ScriptedEngine(tokenizer, fail).start()
        try:
            given = tools or ScriptedTools()
            async with RolloutManager(make_config(*overrides), tokenizer, [engine.url], given) as manager:
                return await asyncio.wait_for(manager.generate_groups(PROMPTS, TWO), 100)
        finally:
            await engine.stop()

    return asyncio.run(scenario())


def ends_of(groups):
    rows = [row for group in groups for row in group]
    rollouts = rollouts_of(rows)
    assert [(own[0].group_id, own[0].index) for own in rollouts] == [(g, i) for g in range(2) for i in range(2)]
    return rows, [own[0].reward_info[AGENT_KEY] for own in rollouts]


def test_an_agents_own_client_needs_no_socket_and_reads_no_certificates(tokenizer, functions, monkeypatch):
    def refused(*arguments, **keywords):
        raise OSError("certificates are read")

    monkeypatch.setattr(ssl, "create_default_context", refused)
    rows = [row for group in generated(tokenizer, f"rollout.agent={functions}:continues") for row in group]
    assert len(rows) == 4 and {row.reward_info[AGENT_KEY]["outcome"] for row in rows} == {"finished"}


def test_a_conversation_is_one_row_and_the_agent_gives_its_reward(tokenizer, functions):
    groups = generated(tokenizer, f"rollout.agent={functions}:continues", "rollout.agent_kwargs={reward: 0.75}")
    rows, ends = ends_of(groups)
    assert len(rows) == 4 and all(end["outcome"] == "finished" for end in ends)
    for row in rows:
        assert sorted(set(row.turn_ids.tolist())) == [-1, 0, 1] and row.finish_reason is FinishReason.STOP
        assert tokenizer.decode(row.prompt_ids).count(f"question {row.group_id}") == 1
        assert np.array_equal(row.loss_mask, row.turn_ids >= 0) and (row.weight_versions[row.loss_mask] == 1).all()
    with RewardManager(RewardConfig(), tokenizer) as rewards:
        rewards.score(rows)
        assert rewards.take_metrics() == {name: 4.0 * (name == "reward/scored") for name in rewards_counted()}
    assert {(row.reward, row.accuracy, row.reward_info["group"]) for row in rows} == {(0.75, 0.5, 0), (0.75, 0.5, 1)}
    metrics = rollout_metrics(rows)
    assert metrics["agent/outcome/finished"] == metrics["agent/own_reward"] == metrics["rollout/segments"] == 1.0


def rewards_counted():
    return ["reward/scored", *(f"reward/failures/{k}" for k in ("timeout", "exception", "bad_result", "memory",
                                                                "worker_died"))]  # fmt: skip


def test_each_rewritten_history_is_a_row_of_the_rollout(tokenizer, functions):
    rows, ends = ends_of(generated(tokenizer, f"rollout.agent={functions}:forgets"))
    assert [row.key for row in rows] == [(g, i, s) for g in range(2) for i in range(2) for s in range(3)]
    assert not any("result" in end for end in ends)
    for row in rows:
        assert set(row.turn_ids.tolist()) - {-1} == {row.segment}
        assert ("one", "two", "three")[row.segment] in tokenizer.decode(row.prompt_ids)
        assert row.extra_info["uid"] == str(row.group_id)
    assert rollout_metrics(rows)["rollout/segments"] == 3.0


@pytest.mark.parametrize(
    ("name", "outcome", "said", "reason", "sampled"),
    [
        ("crashes", "crash", "crashes raised RuntimeError at line", FinishReason.ABORTED, True),
        ("exits", "crash", "SystemExit", FinishReason.ABORTED, False),
        ("own_timeout", "crash", "TimeoutError", FinishReason.ABORTED, False),
        ("sleeps", "timeout", "not done after 3 s", FinishReason.ABORTED, True),
        ("blocks", "timeout", "not done after 3 s", FinishReason.ABORTED, False),
        ("stubborn", "timeout", "not done after 3 s", FinishReason.ABORTED, False),
        ("loops_for_ever", "timeout", "not done after 3 s", FinishReason.ABORTED, True),
        ("says_nothing_of_use", "bad_result", "'good'", FinishReason.ABORTED, False),
        ("overflows", "context_overflow", "HTTPError", FinishReason.LENGTH, True),
        ("silent", "finished", None, FinishReason.STOP, False),
    ],
)
def test_every_end_is_typed_and_keeps_what_was_sampled(tokenizer, functions, name, outcome, said, reason, sampled):
    seconds = 3 if outcome == "timeout" else 60
    overrides = [f"rollout.agent={functions}:{name}", f"rollout.multi_turn.max_wall_seconds={seconds}"]
    if name == "overflows":
        overrides += ["data.max_prompt_length=900", "data.max_response_length=300", "rollout.agent_limits.max_calls=5"]
    if name == "loops_for_ever":
        overrides += ["rollout.agent_limits.max_calls=2"]
    rows, ends = ends_of(generated(tokenizer, *overrides))
    for end in ends:
        assert end["outcome"] == outcome and (said or "") in end.get("message", "")
    assert {own[-1].finish_reason for own in rollouts_of(rows)} == {reason}
    assert all(bool(row.loss_mask.any()) == sampled for row in rows)
    assert rollout_metrics(rows)[f"agent/outcome/{outcome}"] == 1.0
    if name == "loops_for_ever":
        # Two answers and refusals without end; what the dead session was sent has changed nothing.
        assert {own[-1].segment for own in rollouts_of(rows)} == {1} and len(rows) == 2 * len(ends)


PROGRAM = """
import json, os, subprocess, sys, time, urllib.request
mode, place = sys.argv[1:]
task = json.load(open(os.environ["TASK_FILE"]))
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": task["messages"], "max_tokens": 50}).encode()
headers = {"Content-Type": "application/json", "x-api-key": os.environ["ANTHROPIC_API_KEY"]}
address = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
json.load(urllib.request.urlopen(urllib.request.Request(address, body, headers)))
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
open(f"{place}/{child.pid}", "w").close()
if mode == "memory":
    held = b"x" * (300 << 20)
    time.sleep(60)
if mode == "processes":
    many = [subprocess.Popen(["sleep", "60"]) for _ in range(12)]
    time.sleep(60)
if mode == "sleep":
    time.sleep(60)
print("last words " * 9999, flush=True)
if mode == "crash":
    sys.exit("no way on")
with open(os.environ["RESULT_FILE"], "w") as file:
    file.write(json.dumps({"reward": 0.5}) if mode == "reward" else "{")
"""


@pytest.mark.parametrize(
    ("mode", "outcome", "said"),
    [
        ("reward", "finished", ""),
        ("broken", "bad_result", "RESULT_FILE"),
        ("crash", "crash", "no way on"),
        ("sleep", "timeout", "not done after 6 s"),
        ("memory", "resources", "rollout.agent_limits allows 150 MiB"),
        ("processes", "resources", "rollout.agent_limits allows 150 MiB and 8"),
    ],
)
def test_a_program_has_limits_and_leaves_nothing_behind(tokenizer, tmp_path, mode, outcome, said):
    (tmp_path / "agent.py").write_text(PROGRAM)
    (tmp_path / "children").mkdir()
    command = f"[{sys.executable}, {tmp_path}/agent.py, {mode}, {tmp_path}/children]"
    rows, ends = ends_of(
        generated(
            tokenizer,
            f"rollout.agent={{command: {command}}}",
            f"rollout.multi_turn.max_wall_seconds={6 if mode == 'sleep' else 60}",
            "rollout.agent_limits.memory_mb=150",
            "rollout.agent_limits.max_processes=8",
        )
    )
    for end in ends:
        assert (end["outcome"], said in end.get("message", "")) == (outcome, True), end
        assert end.get("result", {}).get("score") == (0.5 if mode == "reward" else None)
    assert all(row.loss_mask.any() for row in rows)
    pids = [int(path.name) for path in (tmp_path / "children").iterdir()]
    assert len(pids) == 4 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_no_more_agents_than_places_work_at_a_time(tokenizer, functions, tmp_path):
    (tmp_path / "own.py").write_text(
        "import asyncio\nrunning, most = 0, 0\n"
        "async def run(task, client):\n"
        "    global running, most\n"
        "    running += 1\n    most = max(most, running)\n    await asyncio.sleep(0.02)\n    running -= 1\n"
        "    return float(most)\n"
    )
    limit = "rollout.agent_limits.max_concurrent=2"
    _, ends = ends_of(generated(tokenizer, f"rollout.agent={tmp_path}/own.py:run", limit))
    assert max(end["result"]["score"] for end in ends) == 2.0


@pytest.mark.parametrize(("kind", "places"), [("async", 80), ("plain", 64), ("program", 64)])
def test_asynchronous_agents_have_as_many_places_as_the_engines(tokenizer, tmp_path, kind, places):
    (tmp_path / "own.py").write_text("%sdef run(task, client): pass\n" % ("async " * (kind == "async")))
    agent = "{command: own.py}" if kind == "program" else f"{tmp_path}/own.py:run"
    engines = ("rollout.engine.count=2", "rollout.max_concurrent_trajectories=40")
    agents = TaskAgents(make_config(f"rollout.agent={agent}", *engines), tokenizer, ScriptedTools())
    free = 0
    while not agents.places.locked():
        asyncio.run(agents.places.acquire())
        free += 1
    assert free == places


def test_opening_tools_is_time_of_the_rollout(tokenizer, functions):
    """Where it takes all that there is, the agent is not begun."""

    class SlowTools(ScriptedTools):
        async def open(self, trajectory):
            await asyncio.sleep(60)

    limit = "rollout.multi_turn.max_wall_seconds=1"
    began = time.monotonic()
    rows, ends = ends_of(generated(tokenizer, f"rollout.agent={functions}:forgets", limit, tools=SlowTools()))
    assert {end["outcome"] for end in ends} == {"timeout"} and not any(row.loss_mask.any() for row in rows)
    assert time.monotonic() - began < 30


def test_a_paused_rollout_starts_again(tokenizer, tmp_path):
    """The first one of group 1 hangs in the first stream; what the others have stays, on disk too."""
    (tmp_path / "own.py").write_text(
        "import asyncio\nstarted = []\n"
        "async def run(task, client):\n"
        "    started.append((task['group_id'], task['index']))\n"
        "    if started.count((1, 0)) == 1 and started[-1] == (1, 0):\n"
        "        await asyncio.sleep(60)\n"
        "    return len(started)\n"
    )

    async def scenario():
        engine = await ScriptedEngine(tokenizer).start()
        config = make_config(f"rollout.agent={tmp_path}/own.py:run", "rollout.partial.enable=true")
        try:
            async with RolloutManager(config, tokenizer, [engine.url], ScriptedTools()) as manager:
                began = time.monotonic()
                async with contextlib.aclosing(manager.stream(PROMPTS, TWO)) as stream:
                    first = await anext(stream)
                assert time.monotonic() - began < 5 and first[0].group_id == 0
                (paused,) = manager.finish_step()
                again = await manager.generate_groups([], TWO)
                return paused, again
        finally:
            await engine.stop()

    paused, (again,) = asyncio.run(scenario())
    assert [bool(state.rows) for state in paused.states] == [False, True]
    assert [row.reward_info[AGENT_KEY]["result"]["score"] for row in again] == [5.0, 4.0]
    write_paused_groups([paused], tmp_path / "paused.parquet")
    (stored,) = read_paused_groups(tmp_path / "paused.parquet")
    assert [(state.finish_reason, state.response_ids) for state in stored.states] == [(None, [])] * 2


def test_engines_that_are_all_gone_end_the_stream(tokenizer, functions):
    with pytest.raises(NoEngineAvailable):
        generated(tokenizer, f"rollout.agent={functions}:forgets", fail=lambda count: "die")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.agent=3"], "package.module:object"),
        (["rollout.agent={program: x}"], "command: "),
        (["rollout.agent={command: []}"], "command: "),
        (["rollout.agent={command: x}", "rollout.agent_kwargs={a: 1}"], "a program takes none"),
        (["rollout.agent={command: no-such-program-here}"], "no program 'no-such-program-here' on PATH"),
        (["rollout.agent={functions}:continues", "rollout.agent_kwargs={rewards: 1}"], "its own are reward"),
        (["rollout.agent={functions}:silent", "rollout.branching.enable=true"], "rollout.branching forks"),
    ],
)
def test_what_is_wrong_is_said_before_the_run(functions, overrides, said):
    with pytest.raises((ConfigError, ExtensionError), match=said):
        check_agent(make_config(*(each.replace("{functions}", str(functions)) for each in overrides)).rollout)


def test_the_environment_of_the_run_is_left_alone(functions):
    assert "OPENAI_BASE_URL" not in os.environ
