"""The reward interface: verl's ``compute_score`` signature, the built-in functions, and what any of them may return."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from megatron_retool.errors import InputError
from megatron_retool.registry import Registry


class BadResultError(InputError):
    """A reward function returned something that is no reward."""


ScoreFunction = Callable[..., Any]
"""compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict, **function_kwargs)

Returns a number or a dict; ``async def`` is awaited. ``solution_str`` is the whole response as text, tool results
included.  ``extra_info`` is that of the prompt's row, plus final_turn (text of the last assistant turn), num_turns,
tool_calls (list of {name, status}) and finish_reason, which replace keys of the row that have these names.

A dict must hold "score"; "acc" (correct or not; default: score > 0) and "pred" (the answer, for majority votes) are
used where they are there. Everything else is kept beside them, and finite numbers and booleans become metrics.
"""

reward_functions: Registry[ScoreFunction] = Registry(
    "reward.function",
    takes=("data_source", "solution_str", "ground_truth", "extra_info"),
    built_in={
        "math": "answer_equality.score:compute_score",
        "deep_research": "megatron_retool.rewards.deep_research:compute_score",
        "deep_research_hermes": "megatron_retool.rewards.deep_research:compute_score_hermes",
        "reasoning_gym": "megatron_retool.rewards.reasoning_gym:compute_score",
        "by_data_source": "megatron_retool.rewards.by_data_source:compute_score",
    },
)

NAMES_OF_THE_RUN = frozenset(
    (
        *("agent", "agent_failure", "branch", "failure", "failure_message", "overlong_filtered", "overlong_penalty"),
        *("tools", "trained"),
    )
)
"""What the run itself writes into reward_info."""
RETURNED_PREFIX = "returned_"
"""Stands before a name of ``NAMES_OF_THE_RUN`` that a reward function or agent has returned."""
LARGEST_SCORE = 1e17
"""The learner keeps scores as float32, squares them and adds the squares up."""
LARGEST_METRIC = 3.4e38
"""Loggers keep float32; sums over a step stay finite in float64."""

_WITH_METRICS_OF_THEIR_OWN = NAMES_OF_THE_RUN | {"score", "acc", "pred", "reward"}


def normalize_result(result: Any) -> dict[str, Any]:
    """A function's return value as {"score": float, "acc": float, "pred": str | None, ...}.

    Names of ``NAMES_OF_THE_RUN`` get ``RETURNED_PREFIX``, so that no function decides what is trained on.

    Raises:
        BadResultError: neither a number nor a dict with a number under "score", or one beyond ``LARGEST_SCORE``.
    """
    info = dict(result) if isinstance(result, Mapping) else {"score": result}
    try:
        score = float(info["score"])
        accuracy = float(info["acc"]) if "acc" in info else float(score > 0)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise BadResultError(
            f"a reward function must return a number or a dict with 'score', not {_shown(result)}"
        ) from None
    if not (math.isfinite(score) and math.isfinite(accuracy)):
        raise BadResultError(f"a reward must be finite, not {_shown(result)}")
    if max(abs(score), abs(accuracy)) > LARGEST_SCORE:
        raise BadResultError(f"a reward must be between -{LARGEST_SCORE:g} and {LARGEST_SCORE:g}, not {_shown(result)}")
    prediction = info.get("pred")
    info = {f"{RETURNED_PREFIX}{name}" if name in NAMES_OF_THE_RUN else name: each for name, each in info.items()}
    return {**info, "score": score, "acc": accuracy, "pred": None if prediction is None else str(prediction)}


def _shown(value: Any) -> str:
    try:
        return repr(value)[:200]
    except Exception:  # An integer of too many digits, or an object's own __repr__.
        return f"a {type(value).__name__}"


def extra_values(reward_info: Mapping[str, Any]) -> dict[str, float]:
    """What a reward function returned beside score, acc and pred, as far as it is a finite number or a boolean."""
    return {
        str(name): float(value)
        for name, value in reward_info.items()
        if name not in _WITH_METRICS_OF_THEIR_OWN and isinstance(value, (int, float)) and abs(value) <= LARGEST_METRIC
    }
