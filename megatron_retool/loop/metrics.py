"""Formulas of the step metrics, under the names that verl's dashboards use: pure functions of trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_retool.loop.code_metrics import code_metrics
from megatron_retool.rewards.base import extra_values
from megatron_retool.rollout_rows import AGENT_KEY, AgentOutcome, whole_rollouts
from megatron_retool.trajectory import FinishReason, Trajectory, TrajectoryBatch
from run_files.phases import TIMING_PREFIX, Phase

_EXECUTED = ("ok", "error", "timeout")
"""Statuses of calls that reached a tool."""


def _spread(prefix: str, values: npt.NDArray[Any]) -> dict[str, float]:
    if len(values) == 0:
        return {}
    return {
        f"{prefix}/mean": float(values.mean()),
        f"{prefix}/max": float(values.max()),
        f"{prefix}/min": float(values.min()),
    }


def batch_metrics(batch: TrajectoryBatch, max_prompt_length: int, max_response_length: int) -> dict[str, float]:
    """critic/score, critic/advantages, critic/returns, response_length and prompt_length of the trained batch.

    response/aborted_ratio is the share of empty responses, which response_length_non_aborted leaves out. clip_ratio is
    the share of sequences at the limit. A rollout of several rows counts once, with the sum of its responses and the
    prompt of its first row. With a critic also critic/values and critic/vf_explained_var =
    1 - Var(returns - values) / Var(returns) over sampled tokens: 1 is a perfect critic, 0 one that knows the mean.
    """
    metrics = _spread("critic/score", batch.rewards[batch.first_rows])
    responses = batch.rollout_response_lengths
    sampled = {name: column[batch.loss_mask].astype(np.float64) for name, column in batch.columns.items()}
    for name in ("advantages", "returns", "values"):
        if name in sampled:
            metrics |= _spread(f"critic/{name}", sampled[name])
    if "values" in sampled and len(sampled["values"]) and sampled["returns"].var() > 0:
        error = (sampled["returns"] - sampled["values"]).var()
        metrics["critic/vf_explained_var"] = float(1.0 - error / sampled["returns"].var())
    for name, lengths, limit in (
        ("response_length", responses, max_response_length),
        ("prompt_length", batch.prompt_lengths[batch.first_rows], max_prompt_length),
    ):
        metrics |= _spread(name, lengths)
        if len(lengths):
            metrics[f"{name}/clip_ratio"] = float((lengths >= limit).mean())
    if len(responses):
        there = responses[responses > 0]
        metrics["response/aborted_ratio"] = 1.0 - len(there) / len(responses)
        metrics |= _spread("response_length_non_aborted", there)
        if len(there):
            metrics["response_length_non_aborted/clip_ratio"] = float((there >= max_response_length).mean())
    return metrics


def reward_metrics(batch: TrajectoryBatch, token_rewards: npt.NDArray[Any] | None = None) -> dict[str, float]:
    """critic/rewards: score plus what is added token by token, of the responses that are not empty.

    Args:
        token_rewards: float [T], the KL penalty in the reward (negative); None: there is none.
    """
    rewards = batch.rewards[batch.first_rows].astype(np.float64)
    if token_rewards is not None:
        rewards = rewards + np.bincount(batch.token_rollout_ids, token_rewards, minlength=batch.num_rollouts)
    return _spread("critic/rewards", rewards[batch.rollout_response_lengths > 0])


_TOKENS_OF_PHASES = (Phase.REFERENCE, Phase.VALUES, Phase.ADVANTAGE, Phase.UPDATE_ACTOR, Phase.UPDATE_CRITIC)


def per_token_metrics(seconds: Mapping[Phase, float], prompt_tokens: int, response_tokens: int) -> dict[str, float]:
    """timing_per_token_ms/<phase>: milliseconds for each token of the trained batch.

    Generation counts response tokens (tool results among them), the other phases prompts too. What was generated and
    not trained on is in the time and not in the count.
    """
    counts = dict.fromkeys(_TOKENS_OF_PHASES, prompt_tokens + response_tokens) | {Phase.GENERATION: response_tokens}
    return {
        f"timing_per_token_ms/{phase.value}": 1000.0 * seconds[phase] / count
        for phase, count in counts.items()
        if phase in seconds and count
    }


def rollout_metrics(rows: Sequence[Trajectory]) -> dict[str, float]:
    """What the policy did, over every rollout generated in the step, kept for training or not.

    rollout/score and rollout/acc are unbiased by dynamic sampling, which critic/score is not. tool/* follow the
    statuses of ToolCall; a parse error is a call that never reached a tool. tool/use_rate is the share of
    trajectories with at least one call, tool/use_rate/<name> of those in which that tool ran. reward/<name>/* are the
    numbers that the reward function returned beside its score, over the trajectories that have them. code/* and
    timing_s/agent_loop/* are those of ``code_metrics`` and ``agent_loop_metrics``.
    """
    if not rows:
        return {}
    trajectories = whole_rollouts(rows)
    calls = [call for t in trajectories for call in t.tool_calls]
    executed = [call for call in calls if call.status in _EXECUTED]
    total = max(len(calls), 1)
    metrics = _spread("num_turns", np.array([t.num_turns for t in trajectories]))
    metrics |= _spread("tool_call_counts", np.array([len(t.tool_calls) for t in trajectories]))
    metrics |= {
        "rollout/score/mean": float(np.mean([t.reward for t in trajectories])),
        "rollout/acc/mean": float(np.mean([t.accuracy for t in trajectories])),
        "rollout/trajectories": float(len(trajectories)),
        "rollout/segments": len(rows) / len(trajectories),
        "tool/calls": len(calls) / len(trajectories),
        "tool/use_rate": float(np.mean([bool(t.tool_calls) for t in trajectories])),
        "tool/success_rate": sum(call.status == "ok" for call in calls) / total,
        "tool/timeout_rate": sum(call.status == "timeout" for call in calls) / total,
        "tool/parse_error_rate": sum(call.status == "parse_error" for call in calls) / total,
        "tool/seconds_mean": float(np.mean([call.seconds for call in executed])) if executed else 0.0,
    }
    used = [{call.name for call in t.tool_calls if call.status in _EXECUTED} for t in trajectories]
    for name in sorted(set().union(*used)):
        metrics[f"tool/use_rate/{name}"] = float(np.mean([name in names for names in used]))
    extras: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in extra_values(trajectory.reward_info).items():
            extras.setdefault(name, []).append(value)
    for name in sorted(extras):
        metrics |= _spread(f"reward/{name}", np.array(extras[name]))
    for reason in FinishReason:
        metrics[f"rollout/finish_reason/{reason.value}"] = float(
            np.mean([t.finish_reason is reason for t in trajectories])
        )
    return metrics | code_metrics(trajectories) | agent_loop_metrics(trajectories) | task_agent_metrics(trajectories)


def task_agent_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """agent/*, of rollouts that a function or program has driven (docs/agents.md); nothing where there are none.

    agent/outcome/<outcome> is the share that ended so, agent/own_reward the share to which the agent gave the reward,
    and agent/seconds how long they took.
    """
    ends = [t.reward_info[AGENT_KEY] for t in trajectories if AGENT_KEY in t.reward_info]
    if not ends:
        return {}
    metrics = {
        f"agent/outcome/{outcome}": sum(end["outcome"] == outcome for end in ends) / len(ends)
        for outcome in AgentOutcome
    }
    metrics["agent/own_reward"] = sum("result" in end for end in ends) / len(ends)
    return metrics | _spread("agent/seconds", np.array([end["seconds"] for end in ends]))


def agent_loop_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """timing_s/agent_loop/*: seconds that trajectories took, and the slowest one's share of each cause.

    The slowest is the one of the largest ``RolloutTiming.total``. Trajectories without a timing are left out. Under
    verl's names, except waiting, num_turns, ms_per_token, group_id and index, which verl lacks.
    """
    timed = [(t, t.timing) for t in trajectories if t.timing is not None]
    if not timed:
        return {}
    prefix = f"{TIMING_PREFIX}agent_loop"
    metrics = _spread(f"{prefix}/generate_sequences", np.array([timing.generation for _, timing in timed]))
    metrics |= _spread(f"{prefix}/tool_calls", np.array([timing.tools for _, timing in timed]))
    metrics |= _spread(f"{prefix}/waiting", np.array([timing.waiting for _, timing in timed]))
    slowest, timing = max(timed, key=lambda pair: pair[1].total)
    sampled = int((slowest.turn_ids >= 0).sum())
    figures = {
        "generate_sequences": timing.generation,
        "tool_calls": timing.tools,
        "waiting": timing.waiting,
        "ms_per_token": 1000.0 * timing.generation / max(sampled, 1),
        "prompt_length": len(slowest.prompt_ids),
        "response_length": len(slowest.response_ids),
        "num_turns": slowest.num_turns,
        "group_id": slowest.group_id,
        "index": slowest.index,
    }
    return metrics | {f"{prefix}/slowest/{name}": float(value) for name, value in figures.items()}


def performance_metrics(total_tokens: int, samples: int, seconds: float, learner_ranks: int) -> dict[str, float]:
    """perf/total_num_tokens, perf/time_per_step, perf/throughput (tokens per second and learner rank) and
    perf/samples_per_second (trajectories that are trained on)."""
    import psutil

    return {
        "perf/total_num_tokens": float(total_tokens),
        "perf/time_per_step": seconds,
        "perf/throughput": total_tokens / seconds / learner_ranks,
        "perf/samples_per_second": samples / seconds,
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
    }
