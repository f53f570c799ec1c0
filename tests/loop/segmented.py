"""Random rollouts, and the same ones cut into segments: every token in the context in which it was sampled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_retool.trajectory import FinishReason, RolloutTiming, ToolCall, Trajectory

COLUMNS = ("response_ids", "loss_mask", "rollout_log_probs", "turn_ids", "weight_versions")


def rollout(rng: np.random.Generator, group: int, index: int) -> Trajectory:
    """Sampled turns with tool tokens between them; now and then nothing at all was sampled."""
    turns = int(rng.integers(0, 4))
    parts = []
    for turn in range(turns):
        parts += [turn] * int(rng.integers(1, 5)) + [-1] * int(rng.integers(0, 3))
    turn_ids = np.array(parts, np.int16)
    mask = turn_ids >= 0
    count = len(turn_ids)
    return Trajectory(
        prompt_ids=rng.integers(0, 50, int(rng.integers(1, 4))),
        response_ids=rng.integers(0, 50, count),
        loss_mask=mask,
        rollout_log_probs=np.where(mask, -rng.random(count), 0),
        turn_ids=turn_ids,
        weight_versions=np.where(mask, rng.integers(0, 3, count), -1),
        group_id=group,
        index=index,
        finish_reason=FinishReason.LENGTH if rng.random() < 0.3 else FinishReason.STOP,
        reward=float(rng.choice([-1.0, 0.5, 1.0])),
        tool_calls=[ToolCall("t", "{}", "ok", 0.1, position=min(1, count - 1))] if count else [],
        extra_info={"data_source": "x", "uid": str(group), "ground_truth": "1"},
        timing=RolloutTiming(1.0, 0.5, 0.25),
    )


def step_of(rng: np.random.Generator, groups: int = 3, size: int = 3) -> list[Trajectory]:
    return [rollout(rng, group, index) for group in range(groups) for index in range(size)]


def cut(whole: Trajectory, places: list[int]) -> list[Trajectory]:
    """The rollout in segments that begin at ``places`` of its response; each prompt is all that stands before it."""
    bounds = [0, *sorted({place for place in places if 0 < place < len(whole.response_ids)}), len(whole.response_ids)]
    rows = []
    for segment, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        columns = {name: getattr(whole, name)[start:end] for name in COLUMNS}
        calls = [
            replace(call, position=call.position - start)
            for call in whole.tool_calls
            if start <= call.position < end or len(bounds) == 2
        ]
        rows.append(
            replace(
                whole,
                prompt_ids=np.concatenate([whole.prompt_ids, whole.response_ids[:start]]),
                **columns,
                segment=segment,
                tool_calls=calls,
                reward_info=dict(whole.reward_info),
            )
        )
    return rows


def randomly_cut(rng: np.random.Generator, rollouts: list[Trajectory]) -> list[Trajectory]:
    return [row for whole in rollouts for row in cut(whole, rng.integers(0, 12, int(rng.integers(0, 4))).tolist())]
