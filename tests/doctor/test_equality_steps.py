"""What the doctor says of an operator whose two sides agree, differ, depend on neighbours or fail."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_retool.doctor.equality_steps import OperatorPair, measure

ROWS = torch.arange(12.0).view(4, 3)


def centered(rows: Tensor) -> Tensor:
    """Depends on a row's neighbours."""
    return rows - rows.mean(0)


def broken(rows: Tensor) -> Tensor:
    raise RuntimeError("no such kernel")


def test_equal_sides_hold() -> None:
    figures = measure(OperatorPair("product", lambda x: 2 * x, lambda x: x + x, ROWS, same=True))
    assert [figure.value for figure in figures] == [0.0, 0.0, 0.0] and all(figure.holds for figure in figures)


def test_a_difference_fails_only_where_there_must_be_none() -> None:
    for same in (False, True):
        between, engine, learner = measure(OperatorPair("norm", lambda x: x, centered, ROWS, same=same))
        assert between.value == 6.5 and between.holds is not same
        assert engine.value == 0.0 and learner.value == 4.5 and learner.holds is not same


def test_a_side_that_fails_is_named() -> None:
    between, engine, learner = measure(OperatorPair("norm", lambda x: x, broken, ROWS, same=True))
    assert between.value == learner.value == "RuntimeError: no such kernel"
    assert not between.holds and engine.holds and not learner.holds
