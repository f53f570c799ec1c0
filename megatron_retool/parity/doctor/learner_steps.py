"""The learner of this host against transformers on the CPU: log-probs, loss and every gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from conversion.files.dist_metadata import load_arrays
from megatron_retool.algorithms.log_prob_comparison import LogProbComparison
from megatron_retool.config import Config, ConfigError, load_config
from megatron_retool.learner.learner import Learner
from megatron_retool.learner.precision import FP8_RECIPES, Acceleration, check_precision
from megatron_retool.learner.weights import gradients_by_hf_name
from megatron_retool.parity.batches import with_experts
from megatron_retool.parity.doctor import model
from megatron_retool.parity.doctor.outcome import Skipped, StepFigure
from megatron_retool.parity.doctor.session import DoctorSession
from megatron_retool.trajectory import TrajectoryBatch


@dataclass(frozen=True)
class Bounds:
    """What rounding explains.

    Attributes:
        log_probs: mean difference, in units of the log-probs' own spread.
        loss: difference, in units of the loss of an advantage of 1.
        gradients: of all tensors together, |difference| over |gradient| (2-norms).
        worst_gradient: the same of the worst tensor; None: rounding may leave nothing of one.
    """

    log_probs: float
    loss: float
    gradients: float
    worst_gradient: float | None


FP32 = Bounds(1e-4, 1e-4, 1e-3, 1e-3)
TF32 = Bounds(5e-3, 5e-3, 5e-2, 5e-2)
"""Products of float32 whose factors are rounded to TF32's 10 bits, as Transformer Engine's may be."""
BF16 = Bounds(0.05, 0.02, 0.1, 0.2)
BF16_STATES = Bounds(0.1, 0.02, 0.3, 0.7)
"""With gradients of one number for each head, which are small sums of large parts."""
FP8 = Bounds(0.4, 0.1, 0.35, 0.6)
FP4 = Bounds(1.0, 0.3, 0.9, None)
"""Three times what the rounding itself makes of log-probs; gradients of zeros would be 1 apart, and it leaves 0.62 to
0.68 (tests/gpu_branch/test_low_precision.py)."""


KEPT_IN_FP8 = 0.01
"""Of log-probs after two steps. Weights round alike; the gradient's norm, by which it is clipped, is summed in another
order, which may turn a last bit."""


class MeasuredLearner(Learner):
    """Keeps the gradients of its last update, before they are clipped: on rank 0, by Hugging Face name."""

    gradients: dict[str, Tensor]

    def _step(self) -> tuple[bool, float]:
        result = gradients_by_hf_name(self.model_chunks, self.architecture)
        self.gradients = {name: tensor.float().cpu() for name, tensor in result.items()}
        return super()._step()


def learner_config(session: DoctorSession, kind: str, *overrides: str) -> Config:
    """A configuration of one rank for the model ``kind``; its experts are replayed."""
    replay = "rollout" if kind == model.EXPERTS else "none"
    # Where the new policy is far from the old one, as it is in FP8, no gradient may be clipped away.
    return load_config(
        None,
        [
            f"model.path={model.model_directory(session, kind)}",
            f"trainer.runs_dir={session.directory / 'runs'}",
            f"learner.max_tokens_per_micro_batch={model.MAX_TOKENS}",
            f"learner.routing_replay={replay}",
            "algorithm.clip_ratio_low=1",
            "algorithm.clip_ratio_high=100",
            "learner.optimizer.lr=1e-3",
            *overrides,
        ],
    )


def make_learner(config: Config) -> MeasuredLearner:
    """A learner that measures itself, with the weights of ``model.path``."""
    return MeasuredLearner(
        config, optimizer=config.learner.optimizer, total_optimizer_steps=100, hf_dir=config.model.path
    )


def measure(config: Config, batch: TrajectoryBatch, reference: dict[str, Any]) -> dict[str, Any]:
    """What ``reference`` has, by the learner: log_probs [T], loss, gradients (on rank 0)."""
    learner = make_learner(config)
    try:
        batch = with_experts(batch, reference["experts"])
        log_probs = learner.log_probs(batch)["log_probs"]
        metrics = learner.update(batch.with_columns(old_log_probs=reference["log_probs"]))
        return {"log_probs": log_probs, "loss": metrics["actor/pg_loss"], "gradients": learner.gradients}
    finally:
        learner.close()


def compare(label: str, found: dict[str, Any], reference: dict[str, Any], bounds: Bounds) -> list[StepFigure]:
    """The figures of ``found`` against ``reference``."""
    batch = model.mini_batch()
    mask = batch.loss_mask
    ids = [0, *batch.response_ids[mask].tolist()]
    log_probs = LogProbComparison(ids, found["log_probs"][mask], reference["log_probs"][mask])
    ours, theirs = found["gradients"], reference["gradients"]
    apart = {name: float((ours[name] - theirs[name]).norm()) for name in theirs}
    norms = {name: float(theirs[name].norm()) for name in theirs}
    errors = {name: apart[name] / max(norms[name], 1e-9) for name in theirs}
    # max() of a NaN is whatever came first.
    worst = max(errors, key=lambda name: errors[name] if np.isfinite(errors[name]) else np.inf)
    return [
        StepFigure(f"{label}: log-probs, mean difference", log_probs.relative, "spreads", at_most=bounds.log_probs),
        StepFigure(f"{label}: loss, difference", abs(found["loss"] - reference["loss"]), at_most=bounds.loss),
        StepFigure(
            f"{label}: gradients, all tensors",
            math.hypot(*apart.values()) / math.hypot(*norms.values()),
            "of their norm",
            at_most=bounds.gradients,
        ),
        StepFigure(
            f"{label}: gradients, worst tensor ({worst})", errors[worst], "of its norm", at_most=bounds.worst_gradient
        ),
    ]


def read_reference(session: DoctorSession, kind: str) -> dict[str, Any]:
    """The arrays that transformers computed of the model ``kind``, by name."""
    result: dict[str, Any] = load_arrays(model.reference_file(session, kind))
    return result


def finest_dtype() -> tuple[str, Bounds]:
    """learner.dtype for steps in which everything has to agree, and its bounds.

    Transformer Engine's packed attention has no context parallelism in float32.
    """
    return ("bfloat16", BF16) if Acceleration.detect().transformer_engine else ("float32", FP32)


def fp32(session: DoctorSession) -> list[StepFigure]:
    """Log-probs and gradients in float32 against transformers."""
    with_engine = Acceleration.detect().transformer_engine is not None
    try:
        return _parity(session, TF32 if with_engine else FP32, "learner.dtype=float32")
    except ValueError as error:
        if with_engine and "No dot product attention" in str(error):
            raise Skipped(f"Transformer Engine has no packed attention in float32 here: {error}") from error
        raise


def bf16(session: DoctorSession) -> list[StepFigure]:
    """Log-probs and gradients in bfloat16 against transformers."""
    return _parity(session, BF16, "learner.dtype=bfloat16")


def own_attention(session: DoctorSession) -> list[StepFigure]:
    """Log-probs and gradients of models whose attention or states the learner computes itself."""
    acceleration, batch = Acceleration.detect(), model.mini_batch()
    figures = [StepFigure("computed on", acceleration.describe())]
    for kind in model.OWN_ATTENTION:
        made = model.build(kind)
        made.save_pretrained(model.model_directory(session, kind))
        reference = model.compute(made, batch, kind)
        for dtype, bounds in (
            ("float32", TF32 if acceleration.transformer_engine else FP32),
            ("bfloat16", BF16_STATES),
        ):
            found = measure(learner_config(session, kind, f"learner.dtype={dtype}"), batch, reference)
            figures += compare(f"{kind}, {dtype}", found, reference, bounds)
    return figures


def fp8_tensorwise(session: DoctorSession) -> list[StepFigure]:
    """Log-probs and gradients in FP8 with a scale for each tensor."""
    return _by_recipe(session, "tensorwise", FP8)


def fp8_blockwise(session: DoctorSession) -> list[StepFigure]:
    """Log-probs and gradients in FP8 with a scale for each block of 128."""
    return _by_recipe(session, "blockwise", FP8)


def fp8_parameters(session: DoctorSession) -> list[StepFigure]:
    """Log-probs after steps with weights kept in FP8, against the same with weights in bfloat16."""
    figures = []
    for recipe in ("tensorwise", "blockwise", "mxfp8"):  # nvfp4 rounds at random
        try:
            options = _fp8_options(session, recipe)
        except Skipped:
            if recipe == "tensorwise":
                raise
            continue
        found = [_after_steps(session, *options, f"learner.fp8.parameters={kept}") for kept in ("false", "true")]
        apart = float(np.abs(found[1] - found[0]).mean() / found[0].std())
        figures.append(StepFigure(f"{recipe}: log-probs, mean difference", apart, "spreads", at_most=KEPT_IN_FP8))
    return figures


def _after_steps(session: DoctorSession, *overrides: str) -> np.ndarray[Any, Any]:
    reference = read_reference(session, model.EXPERTS)
    batch = with_experts(model.mini_batch(), reference["experts"])
    learner = make_learner(learner_config(session, model.EXPERTS, *overrides))
    try:
        for _ in range(2):
            learner.update(batch.with_columns(old_log_probs=reference["log_probs"]))
        return learner.log_probs(batch)["log_probs"][batch.loss_mask]
    finally:
        learner.close()


def fp8_mxfp8(session: DoctorSession) -> list[StepFigure]:
    """Log-probs and gradients in FP8 with a scale for each block of 32."""
    return _by_recipe(session, "mxfp8", FP8)


def nvfp4(session: DoctorSession) -> list[StepFigure]:
    """Log-probs and gradients in FP4 with a scale for each block of 16."""
    return _by_recipe(session, "nvfp4", FP4)


def _by_recipe(session: DoctorSession, recipe: str, bounds: Bounds) -> list[StepFigure]:
    return _parity(session, bounds, *_fp8_options(session, recipe))


def _fp8_options(session: DoctorSession, recipe: str) -> tuple[str, ...]:
    """
    Raises:
        Skipped: this machine has no such products.
    """
    assert recipe in FP8_RECIPES
    overrides = ("learner.dtype=bfloat16", f"learner.fp8.recipe={recipe}")
    learner = learner_config(session, model.DENSE, *overrides).learner
    architecture = model_architecture(session, model.DENSE)
    try:
        check_precision(learner, learner.optimizer, architecture, Acceleration.detect())
    except ConfigError as error:
        raise Skipped(str(error)) from error
    return overrides


def model_architecture(session: DoctorSession, kind: str) -> Any:
    """The architecture of the session's model ``kind``."""
    from conversion.model.architecture import Architecture

    return Architecture.from_pretrained(model.model_directory(session, kind))


def _parity(session: DoctorSession, bounds: Bounds, *overrides: str) -> list[StepFigure]:
    figures = [StepFigure("computed on", Acceleration.detect().describe())]
    for kind in model.KINDS:
        reference = read_reference(session, kind)
        result = measure(learner_config(session, kind, *overrides), model.mini_batch(), reference)
        figures += compare(kind, result, reference, bounds)
    return figures
