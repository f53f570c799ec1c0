import numpy as np

from megatron_retool.loop.metrics import (
    agent_loop_metrics,
    batch_metrics,
    per_token_metrics,
    performance_metrics,
    reward_metrics,
    rollout_metrics,
)
from megatron_retool.runs.step_timer import StepTimer
from megatron_retool.trajectory import FinishReason, RolloutTiming, ToolCall, Trajectory, TrajectoryBatch
from run_files.phases import Phase


def trajectory(reward, statuses, response=4, reason=FinishReason.STOP):
    return Trajectory(
        [1, 2], [3] * response, [True] * response, [-0.5] * response, [0] * response, [0] * response, 0, 0, reason,
        reward=reward, reward_info={"acc": float(reward > 0)},
        tool_calls=[ToolCall("code_interpreter", "", status, 2.0) for status in statuses],
    )  # fmt: skip


def test_rollout_metrics_count_calls_by_status():
    metrics = rollout_metrics(
        [
            trajectory(1, ["ok", "timeout", "parse_error"]),
            trajectory(-1, ["ok"], reason=FinishReason.LENGTH),
            trajectory(-1, []),
            trajectory(-1, []),
        ]
    )
    assert metrics["rollout/acc/mean"] == 0.25
    assert metrics["rollout/score/mean"] == -0.5
    assert metrics["tool/calls"] == 1.0
    assert metrics["tool/use_rate"] == 0.5
    assert metrics["tool/success_rate"] == 0.5
    assert metrics["tool/timeout_rate"] == 0.25
    assert metrics["tool/parse_error_rate"] == 0.25
    assert metrics["num_turns/max"] == 4 and metrics["num_turns/min"] == 1
    assert metrics["rollout/finish_reason/length"] == 0.25


def test_use_of_each_tool_is_told_apart():
    rows = [trajectory(1, ["ok", "ok"]), trajectory(1, ["error"]), trajectory(-1, ["unknown_tool"]), trajectory(-1, [])]
    rows[0].tool_calls[1] = ToolCall("search", "", "ok", 0.1)
    rows[2].tool_calls[0] = ToolCall("serach", "", "unknown_tool", 0.0)
    metrics = rollout_metrics(rows)
    rates = {name: value for name, value in metrics.items() if name.startswith("tool/use_rate")}
    assert rates == {"tool/use_rate": 0.75, "tool/use_rate/code_interpreter": 0.5, "tool/use_rate/search": 0.25}


def test_numbers_that_a_reward_function_returned_beside_its_score():
    rows = [trajectory(1, []), trajectory(-1, []), trajectory(-1, [])]
    rows[0].reward_info |= {"score": 1.0, "f1": 0.5, "both": True, "trained": True, "why": "right", "inf": float("inf")}
    rows[1].reward_info |= {"score": -1.0, "f1": 0, "both": False, "pred": "7", "overlong_penalty": -0.5}
    metrics = {name: value for name, value in rollout_metrics(rows).items() if name.startswith("reward/")}
    assert metrics == {
        "reward/f1/mean": 0.25, "reward/f1/max": 0.5, "reward/f1/min": 0.0,
        "reward/both/mean": 0.5, "reward/both/max": 1.0, "reward/both/min": 0.0,
    }  # fmt: skip


def test_batch_metrics_masks_advantages_and_counts_clipped():
    batch = TrajectoryBatch.from_trajectories([trajectory(1, [], 4), trajectory(-1, [], 2)])
    batch.loss_mask[0] = False
    batch = batch.with_columns(advantages=np.array([100, 1, 1, 1, -1, -1]))
    metrics = batch_metrics(batch, max_prompt_length=2, max_response_length=4)
    assert metrics["critic/advantages/max"] == 1
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["prompt_length/clip_ratio"] == 1.0
    assert metrics["critic/score/mean"] == 0


def test_phases_of_one_name_add_up():
    timer = StepTimer()
    for _ in range(2):
        with timer.phase(Phase.GENERATION):
            pass
    timer.spans += [(Phase.UPDATE_ACTOR, 1.0, 2.0), (Phase.UPDATE_ACTOR, 4.0, 0.5)]
    assert set(timer.metrics()) == {"timing_s/gen", "timing_s/update_actor"}
    assert timer.seconds[Phase.UPDATE_ACTOR] == 2.5


def test_rewards_are_scores_with_what_is_added_to_tokens():
    batch = TrajectoryBatch.from_trajectories([trajectory(1, [], 2), trajectory(-1, [], 1), trajectory(3, [], 0)])
    assert reward_metrics(batch) == {"critic/rewards/mean": 0.0, "critic/rewards/max": 1.0, "critic/rewards/min": -1.0}
    penalties = np.array([-0.25, -0.25, -0.5])
    assert reward_metrics(batch, penalties) == {
        "critic/rewards/mean": -0.5, "critic/rewards/max": 0.5, "critic/rewards/min": -1.5
    }  # fmt: skip


def test_empty_responses_are_counted_and_left_out():
    batch = TrajectoryBatch.from_trajectories([trajectory(1, [], 4), trajectory(-1, [], 2), trajectory(-1, [], 0)])
    metrics = batch_metrics(batch, max_prompt_length=9, max_response_length=4)
    assert metrics["response/aborted_ratio"] == 1 - 2 / 3
    assert metrics["response_length/mean"] == 2.0 and metrics["response_length_non_aborted/mean"] == 3.0
    assert metrics["response_length_non_aborted/min"] == 2.0
    assert metrics["response_length_non_aborted/clip_ratio"] == 0.5


def test_milliseconds_by_token():
    seconds = {Phase.GENERATION: 2.0, Phase.UPDATE_ACTOR: 3.0, Phase.STEP: 9.0}
    assert per_token_metrics(seconds, prompt_tokens=100, response_tokens=500) == {
        "timing_per_token_ms/gen": 4.0, "timing_per_token_ms/update_actor": 5.0
    }  # fmt: skip
    assert per_token_metrics(seconds, 0, 0) == {}


def test_calls_are_counted_by_response():
    metrics = rollout_metrics([trajectory(1, ["ok", "error"]), trajectory(1, [])])
    assert [metrics[f"tool_call_counts/{name}"] for name in ("mean", "max", "min")] == [1.0, 2.0, 0.0]


def test_the_slowest_response_and_why_it_was_slow():
    rows = [trajectory(1, ["ok"], 4), trajectory(-1, ["ok", "timeout"], 10), trajectory(1, [], 2), trajectory(1, [], 8)]
    # The second took 3 + 6 + 0.5 s; the third generated for longer, and the last, an older file's, is not known.
    timings = (RolloutTiming(2.0, 1.0, 0.0), RolloutTiming(3.0, 6.0, 0.5), RolloutTiming(7.0, 0.0, 1.0), None)
    for place, (row, timing) in enumerate(zip(rows, timings, strict=True)):
        row.timing, row.group_id, row.index = timing, 40 + place // 2, place % 2
    # Of its ten tokens, four are a tool's.
    rows[1].loss_mask[6:], rows[1].rollout_log_probs[6:], rows[1].turn_ids[6:] = False, 0.0, -1
    metrics = agent_loop_metrics(rows)
    prefix = "timing_s/agent_loop"
    assert {name: value for name, value in metrics.items() if "slowest" in name} == {
        f"{prefix}/slowest/generate_sequences": 3.0, f"{prefix}/slowest/tool_calls": 6.0,
        f"{prefix}/slowest/waiting": 0.5, f"{prefix}/slowest/ms_per_token": 500.0,
        f"{prefix}/slowest/prompt_length": 2.0, f"{prefix}/slowest/response_length": 10.0,
        f"{prefix}/slowest/num_turns": 3.0, f"{prefix}/slowest/group_id": 40.0, f"{prefix}/slowest/index": 1.0,
    }  # fmt: skip
    assert [metrics[f"{prefix}/generate_sequences/{kind}"] for kind in ("mean", "max", "min")] == [4.0, 7.0, 2.0]
    assert metrics[f"{prefix}/tool_calls/max"] == 6.0 and metrics[f"{prefix}/waiting/mean"] == 0.5
    assert metrics.items() <= rollout_metrics(rows).items()
    assert agent_loop_metrics(rows[3:]) == {}


def test_samples_by_second():
    metrics = performance_metrics(total_tokens=600, samples=8, seconds=4.0, learner_ranks=2)
    assert metrics["perf/samples_per_second"] == 2.0 and metrics["perf/throughput"] == 75.0
