"""The reward interface: verl's ``compute_score`` signature, how functions are found, and what they may return."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class BadResultError(ValueError):
    """A reward function returned something that is no reward."""


ScoreFunction = Callable[..., Any]
"""compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict) -> float | dict

``solution_str`` is the whole response as text, tool results included.  ``extra_info`` is what the prompt's row carried,
plus final_turn (text of the last assistant turn), num_turns, tool_calls (list of {name, status}) and finish_reason.
A dict must hold "score"; "acc" (correct or not; default: score > 0) and "pred" (the answer, for majority votes) are
used where they are there, everything else is kept beside them.
"""

BUILT_IN = {
    "math": "megatron_retool.rewards.math:compute_score",
    "deep_research": "megatron_retool.rewards.deep_research:compute_score",
    "deep_research_hermes": "megatron_retool.rewards.deep_research:compute_score_hermes",
    "reasoning_gym": "megatron_retool.rewards.reasoning_gym:compute_score",
}


def load_function(name: str) -> ScoreFunction:
    """What ``reward.function`` names: a built-in, ``path/to/file.py:function`` or ``package.module:function``.

    Raises:
        ValueError: the file, module or function does not exist, does not import, or is not callable.
    """
    target, separator, attribute = BUILT_IN.get(name, name).rpartition(":")
    if not separator or not target or not attribute:
        raise ValueError(
            f"reward.function={name!r} is neither {', '.join(BUILT_IN)} nor of the form path/to/file.py:function or "
            "package.module:function"
        )
    try:
        if target.endswith(".py"):
            if not Path(target).is_file():
                raise ValueError(f"reward.function={name!r}: there is no file {target}")
            spec = importlib.util.spec_from_file_location(f"reward_function_{Path(target).stem}", target)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(target)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"reward.function={name!r}: importing {target} failed: {error!r}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"reward.function={name!r}: {target} has no function {attribute!r}")
    return function  # type: ignore[no-any-return]


def normalize_result(result: Any) -> dict[str, Any]:
    """A function's return value as {"score": float, "acc": float, "pred": str | None, ...}.

    Raises:
        BadResultError: neither a number nor a dict with a finite number under "score".
    """
    info = dict(result) if isinstance(result, Mapping) else {"score": result}
    try:
        score = float(info["score"])
        accuracy = float(info["acc"]) if "acc" in info else float(score > 0)
    except (KeyError, TypeError, ValueError):
        raise BadResultError(
            f"a reward function must return a number or a dict with 'score', not {repr(result)[:200]}"
        ) from None
    if not (math.isfinite(score) and math.isfinite(accuracy)):
        raise BadResultError(f"a reward must be finite, not {repr(result)[:200]}")
    prediction = info.get("pred")
    return {**info, "score": score, "acc": accuracy, "pred": None if prediction is None else str(prediction)}
