"""Rollouts and their rows: one each, or several where the context was rewritten on the way (``Trajectory.segment``).

Whoever counts or scores what a policy did counts rollouts; whoever trains or stores reads rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

import numpy as np

from megatron_retool.trajectory import RESPONSE_COLUMNS, Trajectory

AGENT_KEY = "agent"
"""In reward_info: how an agent that samples through the gateway, or an environment, ended (outcome, message) and, where
it has given the reward itself, its result (score and what else it said)."""


ROW_NAMES = ("uid", "data_source", "ground_truth")
"""What a trajectory's extra_info says of its row beside the row's own extra_info."""
SHADOWED = "extra_info"
"""In a trajectory's extra_info: what the row's own extra_info has under names that are taken, if it has any."""


def with_row(extra_info: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """A trajectory's extra_info: the row's own, and ``row`` (of ``ROW_NAMES``), which no key of the user replaces."""
    taken = {*row, SHADOWED}
    shadowed = {name: value for name, value in extra_info.items() if name in taken}
    free = {name: value for name, value in extra_info.items() if name not in taken}
    return {**free, **row, **({SHADOWED: shadowed} if shadowed else {})}


def own_extra_info(extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """The row's own extra_info, as its file has it, out of a trajectory's."""
    free = {name: value for name, value in extra_info.items() if name not in (*ROW_NAMES, SHADOWED)}
    return {**free, **extra_info.get(SHADOWED, {})}


class AgentOutcome(StrEnum):
    """How an agent that samples through the gateway, or an environment, ended; every rollout of one has exactly one.

    FINISHED: it returned. CRASH: it raised, or its program ended with another status than 0. TIMEOUT: it was not done
    after rollout.multi_turn.max_wall_seconds. RESOURCES: its program had more memory or processes than
    rollout.agent_limits allows. CONTEXT_OVERFLOW: it crashed after a call for whose answer its context had no room.
    BAD_RESULT: what it returned is no reward.
    """

    FINISHED = "finished"
    CRASH = "crash"
    TIMEOUT = "timeout"
    RESOURCES = "resources"
    CONTEXT_OVERFLOW = "context_overflow"
    BAD_RESULT = "bad_result"


def rollouts_of(rows: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """The rows of each rollout, which lie together in order of segment; see ``TrajectoryBatch.rollout_ids``."""
    result: list[list[Trajectory]] = []
    for row in rows:
        last = result[-1][-1] if result else None
        same = last is not None and (row.group_id, row.index) == (last.group_id, last.index)
        if last is not None and same and row.segment > last.segment:
            result[-1].append(row)
        else:
            result.append([row])
    return result


def whole_rollouts(rows: Sequence[Trajectory]) -> list[Trajectory]:
    """Each rollout as one trajectory, for whoever counts rollouts; see ``whole_rollout``."""
    return [whole_rollout(own) for own in rollouts_of(rows)]


def whole_rollout(rows: Sequence[Trajectory]) -> Trajectory:
    """The rows of one rollout as if it had never been cut: the first prompt, then all responses end to end.

    A rollout of one row is that row. Routed experts are left out: those of prompts in between have no place in it.
    It is for scores and metrics, never for training: a later segment's tokens were sampled in its own context.
    """
    if len(rows) == 1:
        return rows[0]
    tool_calls, length = [], 0
    for row in rows:
        tool_calls += [
            replace(call, position=call.position + length if call.position >= 0 else -1) for call in row.tool_calls
        ]
        length += len(row.response_ids)
    return replace(
        rows[0],
        **{name: np.concatenate([getattr(row, name) for row in rows]) for name in RESPONSE_COLUMNS},
        tool_calls=tool_calls,
        finish_reason=rows[-1].finish_reason,
        routed_experts=None,
    )
