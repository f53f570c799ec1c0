"""Tinker's losses in the learner's words: which inputs a loss takes, and the columns and arguments they become.

The mathematics is ``algorithms/token_losses.py``. An input that a loss does not know is refused: without it the loss
would be another one, and no test would see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_retool.target_sequences import FloatArray, Int64Array, RequestRefused, TargetSequence, TokenLoss
from megatron_retool.tinker.wire import Array, Datum
from untrusted import quoted

STABLE_REINFORCE = "stable_reinforce"
STAND_IN_CLIP = 1.2
"""Where the stand-in for stable_reinforce clips a token's ratio."""
_POLICY = {"logprobs": "rollout_log_probs", "advantages": "advantages"}
_THRESHOLDS = {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high"}


@dataclass(frozen=True)
class LossForm:
    """What a loss takes.

    Attributes:
        inputs: that every datum must have, beside target_tokens: name in loss_fn_inputs, column of the learner.
        optional: that it may have.
        config: numbers of loss_fn_config: name there, argument of the learner's loss.
    """

    inputs: Mapping[str, str]
    optional: Mapping[str, str]
    config: Mapping[str, str]


LOSSES = {
    "cross_entropy": LossForm({}, {"weights": "weights"}, {}),
    "importance_sampling": LossForm(_POLICY, {}, {}),
    "ppo": LossForm(_POLICY, _THRESHOLDS, _THRESHOLDS),
    "cispo": LossForm(_POLICY, _THRESHOLDS, _THRESHOLDS),
    "dro": LossForm(_POLICY, {}, {"beta": "beta"}),
    "gspo": LossForm({**_POLICY, "sequence_ratio_mask": "sequence_ratio_mask"}, _THRESHOLDS, _THRESHOLDS),
}
_REFUSED = (
    "loss_fn=stable_reinforce: its formula is not published, so this server does not have it: set "
    "loss_fn=importance_sampling (in the cookbook's recipes on the command line), or start the server with "
    "tinker.stable_reinforce=stand_in, which trains a clipped REINFORCE in its place"
)


def token_loss(name: str, config: Mapping[str, float | str], *, stand_in: bool) -> TokenLoss:
    """The learner's loss for ``loss_fn`` and ``loss_fn_config``.

    Args:
        stand_in: train a clipped REINFORCE, -sg(min(r, 1.2)) p A, where stable_reinforce is asked for.

    Raises:
        RequestRefused: there is no such loss here, or it has no such setting.
    """
    if name == STABLE_REINFORCE:
        if not stand_in:
            raise RequestRefused(_REFUSED)
        # Its own settings belong to a formula that is not known; none of them fits the stand-in.
        return TokenLoss("cispo", {"clip_low": 0.0, "clip_high": STAND_IN_CLIP})
    form = _form(name)
    arguments = {}
    for key, value in config.items():
        if key not in form.config:
            known = f"its settings are {', '.join(form.config)}" if form.config else "it has none"
            raise RequestRefused(f"loss_fn_config[{quoted(key, 60)}]: loss_fn={name} has no such setting: {known}")
        if isinstance(value, str):
            raise RequestRefused(f"loss_fn_config[{quoted(key, 60)}]: is {quoted(value, 60)}: give a number")
        arguments[form.config[key]] = float(value)
    return TokenLoss(name, arguments)


def target_sequences(name: str, data: Sequence[Datum], vocabulary: int, longest: int) -> list[TargetSequence]:
    """The datums as ``loss_fn`` takes them.

    Args:
        name: loss_fn.
        vocabulary: of the model; token ids lie below it.
        longest: tokens of a sequence.

    Raises:
        RequestRefused: naming the datum and its field.
    """
    form = LossForm(_POLICY, {}, {}) if name == STABLE_REINFORCE else _form(name)
    return [_sequence(name, form, each, f"data[{place}]", vocabulary, longest) for place, each in enumerate(data)]


def _form(name: str) -> LossForm:
    if name not in LOSSES:
        raise RequestRefused(f"loss_fn={quoted(name, 60)}: there is no such loss: this server has {', '.join(LOSSES)}")
    return LOSSES[name]


def _sequence(name: str, form: LossForm, datum: Datum, where: str, vocabulary: int, longest: int) -> TargetSequence:
    if len(datum.tokens) > longest:
        raise RequestRefused(
            f"{where}.model_input: has {len(datum.tokens)} tokens: the server's sequences have at most {longest}"
        )
    known = {"target_tokens": "targets", **form.inputs, **form.optional}
    for key in datum.inputs:
        if key not in known:
            raise RequestRefused(
                f"{where}.loss_fn_inputs[{quoted(key, 60)}]: loss_fn={name} has no such input, it takes "
                f"{', '.join(known)}: leave it out"
            )
    for key in ("target_tokens", *form.inputs):
        if key not in datum.inputs:
            raise RequestRefused(f"{where}.loss_fn_inputs[{key!r}]: is missing: loss_fn={name} needs it")
    targets = _ids(datum.inputs["target_tokens"], f"{where}.loss_fn_inputs['target_tokens']", vocabulary)
    columns = {
        column: _column(datum.inputs[key], targets.shape, f"{where}.loss_fn_inputs[{key!r}]")
        for key, column in known.items()
        if key in datum.inputs and key != "target_tokens"
    }
    if name == "cross_entropy" and "weights" not in columns:
        columns["weights"] = np.ones(targets.shape, np.float32)
    _ids(datum.tokens, f"{where}.model_input", vocabulary)
    try:
        return TargetSequence(datum.tokens, targets, columns)
    except RequestRefused as error:
        raise RequestRefused(f"{where}: {error}") from error


def _ids(values: Array, where: str, vocabulary: int) -> Int64Array:
    ids = values.astype(np.int64)
    if values.dtype.kind == "f" and not (ids == values).all():
        raise RequestRefused(f"{where}: token ids are whole numbers")
    if ids.size and not (ids.min() >= 0 and ids.max() < vocabulary):
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise RequestRefused(f"{where}: {wrong} is no token of the model, which has ids 0 to {vocabulary - 1}")
    return ids


def _column(values: Array, shape: tuple[int, ...], where: str) -> FloatArray:
    if values.shape != shape:
        raise RequestRefused(f"{where}: has shape {list(values.shape)}: give it that of target_tokens, {list(shape)}")
    if not np.isfinite(values).all():
        raise RequestRefused(f"{where}: holds a number that is not finite")
    return values.astype(np.float32)
