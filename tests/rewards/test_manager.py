"""The reward manager with real worker processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_retool.config import ConfigError, OverlongConfig, RewardConfig, RolloutConfig
from megatron_retool.data.prompts import PromptRow
from megatron_retool.rewards.base import BadResultError, normalize_result
from megatron_retool.rewards.manager import RewardManager, check_reward
from megatron_retool.trajectory import FinishReason, ToolCall, Trajectory
from sglang_rollout.agent.loop import row_of
from sglang_rollout.groups import GroupFactory
from sglang_rollout.task_agents.outcome import AgentEnd
from untrusted.process_tree import process_fields


class Characters:
    """A tokenizer whose tokens are Unicode code points."""

    def decode(self, token_ids, skip_special_tokens=False):
        return "".join(map(chr, token_ids))


def trajectory(*turns, truth="42", finish=FinishReason.STOP, **extra):
    """Assistant turns with a tool result '=99' between them."""
    ids, turn_ids = [], []
    for number, text in enumerate(turns):
        if number:
            ids += [ord(c) for c in "=\\boxed{99}"]
            turn_ids += [-1] * len("=\\boxed{99}")
        ids += [ord(c) for c in text]
        turn_ids += [number] * len(text)
    turn_ids = np.array(turn_ids, np.int16)
    return Trajectory(
        prompt_ids=np.array([1]),
        response_ids=np.array(ids),
        loss_mask=turn_ids >= 0,
        rollout_log_probs=np.where(turn_ids >= 0, -1.0, 0.0),
        turn_ids=turn_ids,
        weight_versions=np.zeros(len(ids)),
        group_id=0,
        index=0,
        finish_reason=finish,
        tool_calls=[ToolCall("code_interpreter", "{}", "ok", 0.1)] * (len(turns) - 1),
        extra_info={"data_source": "demo", "ground_truth": truth, **extra},
    )


@pytest.fixture
def function(tmp_path):
    """Write a module of reward functions; returns the name to put into reward.function."""

    def write(source, name="score"):
        path = tmp_path / "my_reward.py"
        path.write_text(textwrap.dedent(source))
        return f"{path}:{name}"

    return write


def test_integers_are_scored_without_a_process():
    with RewardManager(RewardConfig(), Characters()) as manager:
        good, bad, none = trajectory("\\boxed{042}"), trajectory("\\boxed{43}"), trajectory("it is 42")
        started = time.process_time()
        for _ in range(200):
            manager.score([good, bad, none])
        assert time.process_time() - started < 2.0
        assert (good.reward, bad.reward, none.reward) == (1.0, -1.0, -1.0)
        assert good.reward_info == {"score": 1.0, "acc": 1.0, "pred": "042"}
        assert manager._workers == []
        assert manager.take_metrics()["reward/scored"] == 600
        assert manager.take_metrics()["reward/scored"] == 0


def test_only_the_last_assistant_turn_counts():
    with RewardManager(RewardConfig(), Characters()) as manager:
        early, late = trajectory("\\boxed{42}", "done"), trajectory("hm", "\\boxed{42}", truth=42)
        copied = trajectory("calling", "done", truth="99")
        manager.score([early, late, copied])
        assert [t.reward for t in (early, late, copied)] == [-1.0, 1.0, -1.0]


def test_where_a_branch_began_outlives_scoring():
    """ARPO's hard estimate needs it after the reward is known."""
    fork = trajectory("calling", "\\boxed{42}")
    fork.reward_info["branch"] = {"parent": 3, "shared_tokens": 7}
    with RewardManager(RewardConfig(), Characters()) as manager:
        manager.score([fork])
    assert fork.reward_info["branch"] == {"parent": 3, "shared_tokens": 7} and fork.reward_info["acc"] == 1.0


def test_symbolic_answers_go_through_the_pool_and_hostile_ones_are_bounded():
    with RewardManager(RewardConfig(timeout_seconds=2.0), Characters()) as manager:
        good = trajectory("\\boxed{\\frac{\\sqrt 2}{2}}", truth="\\sin(\\pi/4)")
        hostile = trajectory("\\boxed{9^{9^{9^{9}}}}", truth="\\sqrt{2}")
        manager.score([good])
        started = time.monotonic()
        manager.score([hostile, hostile])
        assert time.monotonic() - started < 10
        assert "failure" not in hostile.reward_info
        assert good.reward == 1.0 and good.reward_info["acc"] == 1.0
        assert hostile.reward == -1.0
        manager.score([good])
        assert good.reward == 1.0


def test_custom_functions_get_what_they_need(function):
    name = function(
        """
        import sys
        def score(data_source, solution_str, ground_truth, extra_info):
            print("noise on stdout")
            assert "torch" not in sys.modules
            return {"score": 0.25, "acc": 0, "pred": 7, "source": data_source, "text": solution_str,
                    "truth": ground_truth, "extra": extra_info}
        """
    )
    with RewardManager(RewardConfig(function=name), Characters()) as manager:
        scored = trajectory("a", "b", truth=["x", "y"], level=np.int64(3))
        manager.score([scored])
    info = scored.reward_info
    assert scored.reward == 0.25
    assert (info["acc"], info["pred"], info["source"]) == (0.0, "7", "demo")
    assert info["text"] == "a=\\boxed{99}b" and info["truth"] == ["x", "y"]
    extra = info["extra"]
    assert (extra["final_turn"], extra["num_turns"], extra["level"], extra["finish_reason"]) == ("b", 3, 3, "stop")
    assert extra["tool_calls"] == [{"name": "code_interpreter", "status": "ok"}]
    json.dumps(info)


def test_a_key_of_the_row_never_takes_the_place_of_its_truth_or_source(function):
    name = function("""
        def score(data_source, solution_str, ground_truth, extra_info):
            seen = [data_source, ground_truth, *(extra_info[name] for name in ("ground_truth", "note"))]
            return {"score": 1.0, "seen": seen}
    """)
    own = {"ground_truth": "seven", "data_source": "hub/other", "uid": 3, "note": 5}
    row = PromptRow([1], 0, "a", "demo", "42", own)
    state = GroupFactory(RolloutConfig(), 512).new(row, "train", 1).states[0]
    assert [state.extra_info[name] for name in ("uid", "data_source", "ground_truth")] == ["a", "demo", "42"]
    seen_by_agent = row_of(state)
    assert seen_by_agent["extra_info"] == own and seen_by_agent["ground_truth"] == "42"
    scored = trajectory("\\boxed{42}")
    scored.extra_info = dict(state.extra_info)
    with RewardManager(RewardConfig(function=name), Characters()) as manager:
        manager.score([scored])
    assert scored.reward_info["seen"] == ["demo", "42", "seven", 5]


@pytest.mark.parametrize("name", ["trained", "overlong_filtered", "failure", "agent", "branch", "tools"])
def test_a_function_writes_no_key_of_the_run(name):
    kept = normalize_result({"score": 1.0, name: True})
    assert name not in kept and kept[f"returned_{name}"] is True


@pytest.mark.parametrize("value", [1e39, -1e300, 1e18, {"score": 1.0, "acc": 1e39}])
def test_a_score_that_the_learner_cannot_hold_is_a_bad_result(value):
    with pytest.raises(BadResultError, match="between -1e\\+17 and 1e\\+17"):
        normalize_result(value)
    assert AgentEnd.returned(value).result is None


def test_every_failure_is_typed_counted_and_survived(function):
    name = function(
        """
        import ctypes, os, time
        def score(data_source, solution_str, ground_truth, extra_info):
            if solution_str == "slow": time.sleep(60)
            if solution_str == "stuck": pow(3, 10**8)
            if solution_str == "raise": raise KeyError("no such thing")
            if solution_str == "text": return "good"
            if solution_str == "nan": return float("nan")
            if solution_str == "memory": bytearray(10**12)
            if solution_str == "crash": os.kill(os.getpid(), 11)
            return 1
        """
    )
    kinds = {
        "slow": "timeout",
        "stuck": "timeout",
        "raise": "exception",
        "text": "bad_result",
        "nan": "bad_result",
        "memory": "memory",
        "crash": "worker_died",
    }
    config = RewardConfig(function=name, timeout_seconds=0.5, failure_score=-2.0)
    with RewardManager(config, Characters()) as manager:
        for text, kind in kinds.items():
            failed, fine = trajectory(text), trajectory("fine")
            manager.score([failed, fine])
            assert failed.reward == -2.0 and failed.reward_info["failure"] == kind, text
            assert failed.reward_info["acc"] == 0.0 and failed.reward_info["failure_message"]
            assert fine.reward == 1.0 and fine.reward_info["acc"] == 1.0
        metrics = manager.take_metrics()
    assert metrics["reward/failures/timeout"] == metrics["reward/failures/bad_result"] == 2
    assert metrics["reward/failures/worker_died"] == metrics["reward/failures/memory"] == 1


def test_validation_has_counts_of_its_own():
    """A step's metrics are those of its own responses, also where validation is scored before or beside it."""
    with RewardManager(RewardConfig(), Characters()) as manager:
        manager.score([trajectory("\\boxed{42}")] * 3, "validation")
        manager.score([trajectory("\\boxed{42}")])
        assert manager.take_metrics()["reward/scored"] == 1
        assert manager.take_metrics("validation")["reward/scored"] == 3
        assert manager.take_metrics("validation")["reward/scored"] == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "reward.function='nothing' is not one of math, deep_research"),
        ("/does/not/exist.py:score", "there is no file /does/not/exist.py"),
        ("json:score", "json has no 'score'"),
        ("no_such_module_here:score", "there is no module no_such_module_here: install it"),
        ("json:loads", "loads takes 1 argument.s. by position, and is called with 4: data_source, solution_str"),
    ],
)
def test_a_function_that_does_not_load_stops_the_run_at_once(name, message):
    with pytest.raises(ConfigError, match=message):
        RewardManager(RewardConfig(function=name), Characters())


@pytest.mark.parametrize("name", ["math", "answer_equality.score:compute_score"])
def test_keyword_arguments_that_a_function_does_not_have_stop_the_run_at_once(name):
    with pytest.raises(ConfigError, match="reward.function_kwargs.strict: compute_score has no parameter of that name"):
        RewardManager(RewardConfig(function=name, function_kwargs={"strict": True}), Characters())


def test_every_call_has_the_configured_keyword_arguments_and_may_be_awaited(function):
    name = function(
        """
        import asyncio
        async def score(data_source, solution_str, ground_truth, extra_info, *, weights, offset=0.0):
            await asyncio.sleep(0)
            return {"score": sum(weights.values()) + offset, "bonus": offset > 0, "loop": id(asyncio.get_event_loop())}
        """
    )
    config = RewardConfig(function=name, function_kwargs={"weights": {"a": 1, "b": 2}, "offset": 0.5}, processes=1)
    with RewardManager(config, Characters()) as manager:
        first, second = trajectory("a"), trajectory("b")
        manager.score([first, second])
    assert first.reward == second.reward == 3.5 and first.reward_info["bonus"] is True
    assert first.reward_info["loop"] == second.reward_info["loop"], "what a function keeps open belongs to its loop"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return extra_info['task']", "exception on a prompt of 'demo', .* score raised KeyError at line 2: .task."),
        ("return 'good'", "bad_result on a prompt of 'demo', .*: a reward function must return a number or a dict"),
        ("import os; os._exit(3)", "worker_died on a prompt of 'demo', .*: exit status 3"),
    ],
)
def test_a_function_that_fails_on_a_prompt_of_the_data_is_refused(function, body, said):
    name = function(f"def score(data_source, solution_str, ground_truth, extra_info):\n    {body}\n")
    prompt = PromptRow([1], 0, "uid", "demo", "42", {"split": "train"})
    with pytest.raises(ConfigError, match=f"reward.function=.*my_reward.py:score: {said}.*Correct the function"):
        check_reward(RewardConfig(function=name), prompt)


def test_a_function_that_scores_a_prompt_of_the_data_passes(function):
    name = function(
        """
        def score(data_source, solution_str, ground_truth, extra_info):
            return {"score": solution_str == "\\\\boxed{42}" and extra_info["split"] == "train"}
        """
    )
    prompt = PromptRow([1], 0, "uid", "demo", "42", {"split": "train"})
    for config in (RewardConfig(function=name), RewardConfig(), RewardConfig(function="deep_research")):
        check_reward(config, prompt)
        check_reward(config)
    with pytest.raises(ConfigError, match="reward.function='maths' is not one of math"):
        check_reward(RewardConfig(function="maths"))


def test_overlong_shaping_and_filtering():
    overlong = OverlongConfig(mode="soft_punish", buffer_length=10, penalty=0.5, filter=True)
    with RewardManager(RewardConfig(overlong=overlong), Characters(), max_response_length=20) as manager:
        short, long = trajectory("\\boxed{42}"), trajectory("\\boxed{42} and on", finish=FinishReason.LENGTH)
        manager.score([short, long])
    assert short.reward == 1.0 and "overlong_filtered" not in short.reward_info
    assert long.reward == pytest.approx(1.0 - 0.5 * 7 / 10) and long.reward_info["score"] == 1.0
    assert long.reward_info["overlong_filtered"] is True
    with pytest.raises(ConfigError, match="data.max_response_length"):
        RewardManager(RewardConfig(overlong=overlong), Characters())


def test_workers_die_with_their_parent(function):
    """SIGKILL of the parent leaves no worker behind, not even one inside an endless C call, nor what that started."""
    name = function(
        """
        import subprocess
        def score(data_source, solution_str, ground_truth, extra_info):
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            open(solution_str, "w").write(str(child.pid))
            return pow(3, 10**9)
        """
    )
    note = Path(name.rpartition("/")[0]) / "child"
    script = textwrap.dedent(
        f"""
        import threading
        from megatron_retool.config import RewardConfig
        from megatron_retool.rewards.manager import RewardManager
        from tests.rewards.test_manager import Characters, trajectory
        manager = RewardManager(RewardConfig(function={name!r}, processes=1), Characters())
        print(manager._workers[0]._process.pid, manager._workers[0]._pid, flush=True)
        manager.score([trajectory({str(note)!r})])
        """
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    deadline = time.monotonic() + 20
    while not (note.exists() and note.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    pids.append(int(note.read_text()))

    def alive():
        for pid in pids:
            with contextlib.suppress(OSError):
                if process_fields(pid)[0] != "Z":
                    yield pid

    assert list(alive()) == pids
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 5
    while list(alive()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(alive())
