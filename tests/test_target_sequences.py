"""Sequences with given targets, their losses and an optimizer's step: what does not fit is refused by name."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from megatron_retool.target_sequences import OptimizerStep, RequestRefused, TargetSequence


def sequence(**changes: Any) -> TargetSequence:
    tokens = np.arange(4)
    return TargetSequence(**{"tokens": tokens, "targets": tokens + 1, "columns": {}} | changes)


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 3)])
def test_a_position_has_one_target_or_several(shape: tuple[int, ...]) -> None:
    weights = np.ones(shape, np.float32)
    assert sequence(targets=np.zeros(shape, np.int64), columns={"weights": weights}).columns["weights"] is weights


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"tokens": np.zeros(0, np.int64)}, r"tokens: has shape \[0\]"),
    "two rows": ({"tokens": np.zeros((1, 4), np.int64)}, r"tokens: has shape \[1, 4\]"),
    "tokens of 32 bits": ({"tokens": np.arange(4, dtype=np.int32)}, "tokens: is int32: give an array of int64"),
    "a list": ({"tokens": [0, 1, 2, 3]}, "tokens: is list"),
    "a negative token": ({"tokens": np.array([0, -1, 2, 3])}, "tokens: holds -1"),
    "a negative target": ({"targets": np.array([0, 1, 2, -100])}, "targets: holds -100"),
    "fewer targets": ({"targets": np.arange(3)}, r"targets: has shape \[3\] for 4 tokens: give \[4\], or \[4, K\]"),
    "no target": ({"targets": np.zeros((4, 0), np.int64)}, r"targets: has shape \[4, 0\]"),
    "three axes": ({"targets": np.zeros((4, 1, 1), np.int64)}, r"targets: has shape \[4, 1, 1\]"),
    "a double column": ({"columns": {"weights": np.ones(4)}}, "weights: is float64: give an array of float32"),
    "a longer column": (
        {"columns": {"weights": np.ones(5, np.float32)}},
        r"weights: has shape \[5\]: give it that of targets, \[4\]",
    ),
    "no number": ({"columns": {"advantages": np.full(4, np.nan, np.float32)}}, "advantages: holds a number that"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(RequestRefused, match=message):
        sequence(**changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1e-3),
        ("eps", float("nan")),
        ("eps", 0.0),
        ("grad_clip_norm", float("inf")),
        ("beta1", 1.0),
        ("beta2", 2.0),
    ],
)
def test_a_step_with_a_number_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(RequestRefused, match=f"{name}="):
        OptimizerStep(**{"learning_rate": 1e-3} | {name: value})


def test_a_refusal_stays_short_and_whole_between_processes() -> None:
    refusal = RequestRefused(f"run {'x' * 10**6!r}: there is no such run")
    again = pickle.loads(pickle.dumps(refusal))
    assert isinstance(again, RequestRefused) and str(again) == str(refusal)
    assert len(str(refusal)) < 5000 and str(refusal).endswith("there is no such run")
