"""A referee between engine and learner: `python -m megatron_retool report referee runs/<name> [--step N]`.

Computes a sample of a stored step's sampled tokens again, with transformers in float32 or float64 and that step's
weights, and says whether the engine's log-probs (rollout_log_probs) or the learner's (old_log_probs) are off, by how
much and where; in which layer the learner's hidden states leave the referee's; and in a mixture of experts how much of
it is the choice of experts. Writes report/referee_step_N.html and .json in the run's directory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from conversion.files.checksums import verify_files
from conversion.model.architecture import Architecture
from conversion.model.weight_map import WeightMap
from megatron_retool.parity.referee.attribution import Judged
from megatron_retool.parity.referee.page import write_page
from megatron_retool.parity.referee.stored_step import SampledResponse, find_step, sample_tokens
from run_files.atomic_files import write_text

SMALL_MODEL = 50_000_000
"""Parameters up to which the referee computes in float64 unless an option says otherwise."""


def write_referee_report(run_dir: str | Path, step: int | None = None, **options: Any) -> tuple[Path, dict[str, Any]]:
    """Judge a step and write its page and figures.

    Args:
        options: those of ``judge_step``, with its defaults.

    Returns:
        The page's path, and what is in the JSON file beside it.

    Raises:
        FileNotFoundError, ValueError, ConfigError: as ``judge_step``.
    """
    result, judged = judge_step(run_dir, step, **options)
    target = Path(run_dir) / "report"
    target.mkdir(exist_ok=True)
    page = target / f"referee_step_{result['step']:06d}.html"
    write_text(page.with_suffix(".json"), json.dumps(result, indent=1, ensure_ascii=False))
    write_page(page, result, judged)
    return page, result


def judge_step(
    run_dir: str | Path,
    step: int | None = None,
    *,
    tokens: int = 4000,
    seed: int = 0,
    dtype: str = "auto",
    console: Console | None = None,
) -> tuple[dict[str, Any], Judged]:
    """Compute a sample of a step's tokens again.

    Args:
        step: None: the newest that can be judged.
        tokens: sampled tokens to judge.
        seed: of which ones.
        dtype: of the referee: float32, float64, or auto for float64 up to ``SMALL_MODEL`` parameters.

    Returns:
        What the JSON file holds, and the tokens.

    Raises:
        FileNotFoundError, ValueError, ConfigError: as ``find_step`` and ``sample_tokens``; or the run did not compute
            old_log_probs (bypass mode), and its learner does not run here.
        DamagedError: the weights are not what was written.
    """
    stored = find_step(run_dir, step)
    responses, drawn_from = sample_tokens(stored, tokens, seed)
    if stored.config.trainer.verify_checkpoints:
        verify_files(stored.weights.path)
    architecture = Architecture.from_pretrained(stored.model_dir, stored.config.model.families)
    if dtype == "auto":
        parameters = sum(math.prod(mapping.mcore_shape) for mapping in WeightMap(architecture).exported())
        dtype = "float64" if parameters <= SMALL_MODEL else "float32"
    from megatron_retool.parity.referee.judge import Referee  # torch and transformers: the checks above need neither

    judge = Referee(stored, responses, architecture, dtype, seed, console or Console(quiet=True))
    result = {**judge.result(), "sample": _sample(responses, drawn_from, seed)}
    return result, judge.judged


def _sample(responses: Sequence[SampledResponse], drawn_from: int, seed: int) -> dict[str, Any]:
    count = sum(len(response.positions) for response in responses)
    return {"responses": len(responses), "tokens": count, "of_tokens": drawn_from, "seed": seed}
