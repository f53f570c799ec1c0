"""How a policy uses its code tool, as ReTool watches it (arXiv:2504.11536, section 3.3): functions of trajectories."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from megatron_retool.rewards.code_purpose import Purpose, purpose_of
from megatron_retool.trajectory import ToolCall, Trajectory

T = TypeVar("T")

_RIGHT = 0.5
"""Least accuracy of a response that counts as right."""
MAX_CLASSIFIED = 1024
"""Programs of a step whose purpose is determined: about half a millisecond each, and a step may have many thousands."""


def code_of(call: ToolCall) -> str | None:
    """The program of a call: the text that it passes as ``code``, whatever the tool's name. None: it passes none."""
    if call.status == "parse_error":
        return None
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None
    code = arguments.get("code") if isinstance(arguments, dict) else None
    return code if isinstance(code, str) else None


def lines_of(code: str) -> int:
    """Lines that are neither empty nor a comment."""
    return sum(1 for line in map(str.strip, code.splitlines()) if line and not line.startswith("#"))


def code_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """code/*, over all trajectories; nothing where no call passes code. docs/metrics.md has the formulas.

    Rates of code in right and in wrong responses, first_call_position and self_correction_rate are left out where no
    response has what they are rates of. A call that could not be read is no code, but it is one that failed, which a
    later call may correct.
    """
    programs = [[(code, call) for call in t.tool_calls if (code := code_of(call)) is not None] for t in trajectories]
    with_code = [(t, own) for t, own in zip(trajectories, programs, strict=True) if own]
    if not with_code:
        return {}
    calls = [pair for _, own in with_code for pair in own]
    lines = sum(lines_of(code) for code, _ in calls)
    ran = sum(_ran(call) for _, call in calls)
    metrics = {
        "code/ratio": len(with_code) / len(trajectories),
        "code/lines_per_response": lines / len(trajectories),
        "code/lines_per_call": lines / len(calls),
        "code/correct_calls": float(ran),
        "code/pass_rate": ran / len(calls),
    }
    for name, right in (("right", True), ("wrong", False)):
        chosen = [own for t, own in with_code if _is_right(t) is right]
        if chosen:
            metrics[f"code/pass_rate/{name}"] = float(np.mean([_ran(call) for own in chosen for _, call in own]))
            metrics[f"code/last_pass_rate/{name}"] = float(np.mean([_ran(own[-1][1]) for own in chosen]))
    positions = [
        own[0][1].position / len(t.response_ids)
        for t, own in with_code
        if own[0][1].position >= 0 < len(t.response_ids)
    ]
    if positions:
        metrics["code/first_call_position"] = float(np.mean(positions))
    chosen_calls = evenly_chosen(calls, MAX_CLASSIFIED)
    purposes = Counter(purpose_of(code) for code, _ in chosen_calls)
    metrics |= {f"code/purpose/{purpose.value}": purposes[purpose] / len(chosen_calls) for purpose in Purpose}
    corrected = [result for t in trajectories if (result := _corrected(t)) is not None]
    if corrected:
        metrics["code/self_correction_rate"] = float(np.mean(corrected))
    return metrics


def evenly_chosen[T](items: Sequence[T], count: int) -> list[T]:
    """All, or ``count`` of them at equal distances, the first among them."""
    return [items[place * len(items) // count] for place in range(count)] if len(items) > count else list(items)


def _ran(call: ToolCall) -> bool:
    return call.status == "ok"


def _is_right(trajectory: Trajectory) -> bool:
    return trajectory.accuracy >= _RIGHT


def _corrected(trajectory: Trajectory) -> bool | None:
    """Whether code ran after the first call that failed; None: none failed. Calls of other tools do not count."""
    failed = False
    for call in trajectory.tool_calls:
        if call.status == "parse_error":
            failed = True
        elif code_of(call) is not None:
            if failed and _ran(call):
                return True
            failed = failed or not _ran(call)
    return False if failed else None
