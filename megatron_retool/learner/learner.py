"""The learner: a Megatron-Core model that is asked for log-probs and taught by mini-batches.

SPMD: every rank builds a ``Learner`` and calls the same methods with the same whole batch; each takes its own share,
and answers are the same on every rank.  Runs under torchrun as well as under Ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from conversion.model import flops
from megatron_retool.algorithms.policy_loss import PolicyObjective
from megatron_retool.algorithms.settings import SamplingSettings
from megatron_retool.algorithms.token_losses import bind_token_loss
from megatron_retool.config import ConfigError
from megatron_retool.config.accumulation import check_accumulation
from megatron_retool.learner import adapters, data_parallel, parallel
from megatron_retool.learner.divergence import Divergence
from megatron_retool.learner.learner_state import LearnerState
from megatron_retool.learner.losses import (
    KEPT_TOKENS,
    FusedPolicyLoss,
    MicroBatchLoss,
    critic_update_loss,
    policy_update_loss,
    sft_update_loss,
    sft_weights,
    top_tokens_loss,
)
from megatron_retool.learner.micro_batch import MicroBatch
from megatron_retool.learner.model import PackedModel
from megatron_retool.learner.multi_token_prediction import PredictionLoss
from megatron_retool.learner.optimizer import clip_and_apply, step_settings
from megatron_retool.learner.packing import Plan
from megatron_retool.learner.pipeline import forward, forward_backward, reduce_over_ranks
from megatron_retool.learner.reading import FusedUpdate, LogProbs, read_tokens
from megatron_retool.learner.routing_replay import RoutingPass
from megatron_retool.learner.target_batch import TargetBatch, TargetLoss
from megatron_retool.learner.teacher import last_hidden_states, teacher_of_rows
from megatron_retool.learner.teacher_loss import TeacherLoss
from megatron_retool.learner.transformer_engine import watch_attention
from megatron_retool.target_sequences import (
    OptimizerStep,
    RequestRefused,
    TargetSequence,
    TokenLoss,
    TokenOutputs,
    TopTokens,
)
from megatron_retool.trajectory import TrajectoryBatch

logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float32]


class Learner(LearnerState):
    """A rank that reads texts and learns from them. ``LearnerState`` says how it is built."""

    # --- reading --------------------------------------------------------------------------------------------------

    def log_probs(
        self,
        batch: TrajectoryBatch,
        *,
        reference: bool = False,
        temperature: float = 1.0,
        sampling: SamplingSettings | None = None,
    ) -> LogProbs:
        """log pi of every token of the loss mask and the entropy of the distribution it came from.

        In a mixture of experts ``learner.routing_replay`` says whose choice of experts this is, also of the reference
        (see ``routing_replay.RoutingReplay``).

        Args:
            reference: of the initial weights, or of the teacher, of several by the column ``teacher``.
            temperature: pi = softmax(logits / temperature).
            sampling: instead of ``temperature``: pi is what rollouts with these settings are sampled from, after
                temperature, top_p, top_k and min_p (``algorithms/sampling.py``).

        Returns:
            log_probs, entropy: float32 [T] in the batch's order, 0 where ``loss_mask`` is false.
            metrics: routing_replay/*, where experts of the engine were replayed.
            routed_experts: with learner.routing_replay=old_log_probs, the experts that the learner chose: uint8 or
                int16 [sum (P + R), layers, k] in the batch's order, prompt first in each sequence.
            routing_flips: where experts of the engine were replayed, in how many layers the learner would have taken
                others for a token: float32 [T] in the batch's order; NaN where the engine's are not known.

        Raises:
            ConfigError: ``reference`` without a reference policy or teacher.
            ValueError: the batch's routed experts are not of this model.
        """
        if reference and self.reference_chunks is None and not self._base_is_reference:
            raise ConfigError("the learner was built without a reference policy (with_reference=True)")
        chunks = self.reference_chunks if reference else None
        head_options = _head_options(temperature, sampling)
        replay = self.routing_replay
        own_choice = reference and bool(self.teachers)
        routing = replay.reading(batch, reference) if replay and not own_choice else None
        base = reference and self._base_is_reference
        if reference and len(self.teachers) > 1:
            result = self._read_by_teachers(batch, head_options)
        else:
            micro_batches = self.packer.micro_batches(batch)
            with adapters.adapters_off(self.model_chunks) if base else contextlib.nullcontext():
                result = self._read(micro_batches, 2, batch.num_response_tokens, head_options, chunks, routing)
        answer: LogProbs = {
            "log_probs": result[0],
            "entropy": result[1],
            "metrics": routing.metrics() if routing else {},
        }
        if routing and routing.records:
            answer["routed_experts"] = routing.recorded()
        if routing and routing.counts:
            answer["routing_flips"] = _routing_flips(routing, batch)
        return answer

    def _read_by_teachers(self, batch: TrajectoryBatch, head_options: dict[str, Any]) -> FloatArray:
        """float32 [2, T], log-probs and entropy, of each row by its teacher."""
        result = np.zeros((2, batch.num_response_tokens), np.float32)
        numbers = teacher_of_rows(batch)
        of_tokens = np.repeat(numbers, batch.response_lengths)
        for number in np.unique(numbers):
            rows = batch.select(np.flatnonzero(numbers == number))
            chunks = self.teachers[number].chunks
            micro_batches = self.packer.micro_batches(rows)
            result[:, of_tokens == number] = self._read(
                micro_batches, 2, rows.num_response_tokens, head_options, chunks
            )
        return result

    def values(self, batch: TrajectoryBatch) -> FloatArray:
        """The critic's value of the state in which each response token is generated: float32 [T]."""
        micro_batches = self.packer.micro_batches(batch, head_on="response")
        return self._read(micro_batches, 1, batch.num_response_tokens, {})[0]

    def sft_loss(self, batch: TrajectoryBatch) -> float:
        """-sum(loss_weights * log_probs), without a gradient; weights as in ``sft_update``."""
        micro_batches = self.packer.micro_batches(batch)
        log_probs = self._read(micro_batches, 2, batch.num_response_tokens, {})[0].astype(np.float64)
        return float(-(sft_weights(batch).astype(np.float64) * log_probs).sum())

    def _read(
        self,
        micro_batches: list[MicroBatch],
        columns: int,
        num_tokens: int,
        head_options: dict[str, Any],
        chunks: list[PackedModel] | None = None,
        routing: RoutingPass | None = None,
    ) -> FloatArray:
        return read_tokens(
            chunks or self.model_chunks,
            micro_batches,
            columns,
            num_tokens,
            max_tokens=self.packer.max_tokens,
            device=self.device,
            head_options={**head_options, **self._head_settings},
            routing=routing,
        )

    # --- learning -------------------------------------------------------------------------------------------------

    def update(
        self,
        mini_batch: TrajectoryBatch,
        *,
        temperature: float = 1.0,
        sampling: SamplingSettings | None = None,
        kl_in_loss: float | None = None,
    ) -> dict[str, float]:
        """One optimizer step on the policy loss of a mini-batch.

        Args:
            mini_batch: with the columns old_log_probs, advantages and loss_weights (of the whole mini-batch, 0 where
                rejected), optionally importance_weights and ref_log_probs; values and returns where the loss needs
                a critic.
            temperature, sampling: of the rollout, as for ``log_probs``.
            kl_in_loss: coefficient of the KL in this step, where algorithm.kl_schedule changes it; None:
                algorithm.kl_in_loss.

        Returns:
            actor/pg_loss, pg_clipfrac, pg_clipfrac_lower, ppo_kl, entropy, grad_norm, lr and the like;
            global_seqlen/*; perf/mfu/actor where the device's peak is known; routing_replay/* where experts are
            replayed and ``log_probs`` has not counted that already.

        Raises:
            ValueError: the batch lacks a column, or its routed experts are not of this model.
        """
        loss = policy_update_loss(mini_batch, self._objective(kl_in_loss))
        options = _head_options(temperature, sampling)
        return self._learn("actor", mini_batch, "loss_mask", options, loss, routing=self._replayed(mini_batch))

    def update_fused(
        self,
        mini_batch: TrajectoryBatch,
        *,
        temperature: float = 1.0,
        sampling: SamplingSettings | None = None,
        kl_in_loss: float | None = None,
        step_without_loss: bool = False,
    ) -> FusedUpdate:
        """``update`` with old log-probs of its own forward pass, and the rollout correction applied within it.

        The same loss, gradient and metrics as ``log_probs``, ``rollout_correction`` and ``update`` one after another.

        Args:
            mini_batch: as for ``update``, without old_log_probs and importance_weights; keep and loss_weights tell what
                may give loss before the correction.
            step_without_loss: make the optimizer step also where the correction rejects every token: other mini-batches
                of the step have some.

        Returns:
            log_probs, entropy, routing_flips: as ``log_probs`` before the update.
            metrics: as ``update``; only routing_replay/* where every token was rejected and nothing was learned.

        Raises:
            ValueError: as ``update``.
        """
        loss = FusedPolicyLoss(
            mini_batch,
            self._objective(kl_in_loss),
            self.config.algorithm.rollout_correction,
            self.device,
        )
        options, routing = _head_options(temperature, sampling), self._replayed(mini_batch, count=True)
        metrics = self._learn(
            "actor", mini_batch, "loss_mask", options, loss, routing=routing, step_without_loss=step_without_loss
        )
        result = parallel.sum_over_data_parallel(loss.found).cpu().numpy()
        answer: FusedUpdate = {"log_probs": result[0], "entropy": result[1], "metrics": metrics}
        if routing and routing.counts:
            answer["routing_flips"] = _routing_flips(routing, mini_batch)
        return answer

    def _replayed(self, mini_batch: TrajectoryBatch, count: bool = False) -> RoutingPass | None:
        return self.routing_replay.learning(mini_batch, count) if self.routing_replay else None

    def _objective(self, kl_in_loss: float | None) -> PolicyObjective:
        objective = self.config.algorithm.objective
        return objective if kl_in_loss is None else dataclasses.replace(objective, kl_in_loss=kl_in_loss)

    def update_critic(self, mini_batch: TrajectoryBatch) -> dict[str, float]:
        """One optimizer step on the value loss; columns values (before the update), returns and loss_weights."""
        loss = critic_update_loss(mini_batch, self.config.learner.critic.value_clip)
        return self._learn("critic", mini_batch, "response", {}, loss)

    def sft_update(self, batch: TrajectoryBatch) -> dict[str, float]:
        """One optimizer step of supervised fine-tuning on the tokens of ``loss_mask``.

        The loss is -sum(loss_weights * log_probs); without that column, the mean over the batch's masked-in tokens.

        Returns:
            loss, grad_norm, lr.
        """
        loss = sft_update_loss(batch)
        metrics = self._learn("sft", batch, "loss_mask", {}, loss)
        return {name.removeprefix("sft/"): value for name, value in metrics.items()}

    def top_tokens_update(self, batch: TrajectoryBatch, top: TopTokens) -> dict[str, float]:
        """One optimizer step towards a teacher's most probable tokens, at the tokens of ``loss_mask``.

        The loss is sum(loss_weights * KL), see ``algorithms.top_tokens``.

        Returns:
            loss, grad_norm, lr.
        """
        metrics = self._learn("sft", batch, "loss_mask", {}, top_tokens_loss(batch, top), candidates=top.ids)
        return {name.removeprefix("sft/"): value for name, value in metrics.items()}

    def top_tokens_loss(self, batch: TrajectoryBatch, top: TopTokens) -> float:
        """The loss of ``top_tokens_update``, without a gradient."""
        loss, parts = top_tokens_loss(batch, top), list[dict[str, Tensor]]()

        def note(micro_batch: MicroBatch, output: Tensor) -> None:
            parts.append(loss(micro_batch, output).metrics)

        for chunk in self.model_chunks:
            chunk.eval()
        micro_batches = self.packer.micro_batches(batch, candidates=top.ids)
        with torch.no_grad():
            forward(self.model_chunks, micro_batches, self._head_settings, self.packer.max_tokens, note)
        return reduce_over_ranks(parts, self.layout, self.device)["sft/loss"]

    def _learn(
        self,
        room: str,
        batch: TrajectoryBatch,
        head_on: str,
        head_options: dict[str, Any],
        loss: MicroBatchLoss,
        routing: RoutingPass | None = None,
        step_without_loss: bool = True,
        candidates: npt.NDArray[np.int32] | None = None,
    ) -> dict[str, float]:
        if self.has_gradients:
            raise RequestRefused("an update would drop what was accumulated: call apply before it")
        start = self._update_start = time.perf_counter()
        distillation = self.config.algorithm.distillation
        taught = room == "actor" and bool(self.teachers) and distillation.divergence != "none"
        plan = self.packer.plan(batch, teacher_of_rows(batch) if taught and len(self.teachers) > 1 else None)
        micro_batches = self.packer.micro_batches(batch, head_on, plan, candidates=candidates)
        self.clear_gradients()
        options = {**head_options, "routing": routing}
        if self.architecture.predictors:
            scaling_factor = self.config.learner.mtp.loss_scaling_factor
            predictions = PredictionLoss(batch, self.architecture.predictors, scaling_factor)
            options["predictions"], loss = predictions, predictions.beside(loss)
        if taught:
            teaching = TeacherLoss(
                Divergence(distillation.divergence, distillation.beta, distillation.top_k),
                distillation.divergence_weight,
                batch,
                micro_batches,
                last_hidden_states(self.teachers, micro_batches, self.packer.max_tokens),
                [teacher.head_weight for teacher in self.teachers],
            )
            options["teacher"], loss = teaching, teaching.beside(loss)
        biases = self._router_biases() if self.config.learner.moe_router_bias_update_rate else []
        before = [bias.clone() for bias in biases]
        with routing or contextlib.nullcontext():
            parts = self._add_gradients(micro_batches, options, loss)
        metrics = reduce_over_ranks(parts, self.layout, self.device)
        routing_metrics = routing.metrics() if routing else {}
        applied = False
        if metrics.pop(KEPT_TOKENS, 1.0) or step_without_loss:
            metrics[f"{room}/lr"] = self.learning_rate
            applied, metrics[f"{room}/grad_norm"] = self._step()
        if not applied:
            for bias, value in zip(biases, before, strict=True):  # Megatron has moved them where it sums gradients
                bias.copy_(value)
        if f"{room}/grad_norm" not in metrics:
            return routing_metrics
        metrics |= routing_metrics
        norm, bound = metrics[f"{room}/grad_norm"], self._skip_grad_norm
        if not applied and not math.isfinite(norm):
            metrics[f"{room}/nonfinite_grad"] = 1.0
            logger.warning("the gradient norm is %s: this update was left out", norm)
        elif bound is not None:
            metrics[f"{room}/skipped_by_grad_norm"] = float(not applied)
            if not applied:
                logger.warning(
                    "the gradient norm %.4g exceeds skip_grad_norm=%g: this update was left out", norm, bound
                )
        if room != "sft":
            metrics |= self.packer.balance_metrics(batch, plan)
            metrics |= self._mfu(room, batch, plan, time.perf_counter() - start)
        return metrics

    def accumulate(
        self, sequences: Sequence[TargetSequence], loss: TokenLoss, *, forward_only: bool = False
    ) -> TokenOutputs:
        """Add the gradient of a loss, summed over all targets, to what earlier calls have left; no step is made.

        Gradients stay on each rank until ``apply``, which sums them over ranks once.

        Args:
            sequences: with targets of their own, and the columns that the loss reads.
            forward_only: compute only the outputs; gradients stay as they are.

        Returns:
            Log-probs and loss of each target, and the metric loss, their sum.

        Raises:
            RequestRefused: the loss or a sequence does not fit; nothing has changed.
            ConfigError: a setting does not go with accumulating.
        """
        check_accumulation(self.config.learner, self.architecture, self.role)
        targets = TargetBatch.of(sequences, self.architecture)
        target_loss = TargetLoss(targets, bind_token_loss(loss, targets.columns), self.device)
        try:
            plan = self.packer.plan(targets.batch)
        except ValueError as error:
            raise RequestRefused(str(error)) from error
        micro_batches = self.packer.micro_batches(targets.batch, plan=plan, targets=targets.targets)
        if forward_only:
            for chunk in self.model_chunks:
                chunk.eval()
            with torch.no_grad():
                forward(self.model_chunks, micro_batches, self._head_settings, self.packer.max_tokens, target_loss)
        else:
            if not self.has_gradients:
                self.clear_gradients()
            self.has_gradients = True
            with data_parallel.gradients_stay(self.transformer_config, self.model_chunks):
                self._add_gradients(micro_batches, {}, target_loss)
        return targets.outputs(parallel.sum_over_data_parallel(target_loss.found).cpu().numpy())

    def apply(self, step: OptimizerStep) -> dict[str, float]:
        """One optimizer step on what ``accumulate`` has left, with settings of its own; the schedule stays as it is.

        Returns:
            lr; grad_norm, before clipping; skipped, 1 where the norm is not finite or above skip_grad_norm: the step is
            then left out, and the gradients are dropped all the same.

        Raises:
            RequestRefused: nothing was accumulated.
            ConfigError: the optimizer is not AdamW.
        """
        check_accumulation(self.config.learner, self.architecture, self.role)
        if not self.has_gradients:
            raise RequestRefused("nothing was accumulated since the last step: call accumulate before apply")
        self.has_gradients = False
        self._update_start = time.perf_counter()
        data_parallel.start_gradient_sums(self.model_chunks)
        self.transformer_config.finalize_model_grads_func(list(self.model_chunks))
        with step_settings(self.optimizer, step):
            applied, norm = clip_and_apply(self.optimizer)
        return {"lr": step.learning_rate, "grad_norm": norm, "skipped": float(not applied)}

    def clear_gradients(self) -> None:
        """Set the gradients to zero."""
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.has_gradients = False

    def _add_gradients(
        self, micro_batches: list[MicroBatch], options: dict[str, Any], loss: MicroBatchLoss
    ) -> list[dict[str, Tensor]]:
        """Forward and backward; the losses' metrics."""
        for chunk in self.model_chunks:
            chunk.train()
        options = {**options, **self._head_settings}
        parts = forward_backward(self.model_chunks, micro_batches, options, self.packer.max_tokens, loss)
        watch_attention()
        return parts

    def _router_biases(self) -> list[torch.Tensor]:
        """Float32 [experts] of each layer with a router whose choice has a bias."""
        modules = (module for chunk in self.model_chunks for module in chunk.modules())
        return [bias for module in modules if (bias := getattr(module, "expert_bias", None)) is not None]

    def _step(self) -> tuple[bool, float]:
        applied, norm = clip_and_apply(self.optimizer)
        if applied:
            self.scheduler.step(increment=1)
        return applied, norm

    @property
    def _head_settings(self) -> dict[str, Any]:
        learner = self.config.learner
        return {"chunk_tokens": learner.log_prob_chunk_tokens, "fp32_head": learner.fp32_lm_head}

    def _mfu(self, room: str, batch: TrajectoryBatch, plan: Plan, seconds: float) -> dict[str, float]:
        peak = flops.peak_flops(self.acceleration.gpu_name)
        if peak is None:
            return {}
        achieved = self.model_flops(batch, plan) / seconds / self.layout.world_size
        return {f"perf/mfu/{room}": achieved / peak}


def _routing_flips(routing: RoutingPass, batch: TrajectoryBatch) -> FloatArray:
    """Of the response tokens; see ``Learner.log_probs``."""
    flips = batch.of_responses(routing.flips())
    return np.where(flips < 0, np.nan, flips).astype(np.float32)


def _head_options(temperature: float, sampling: SamplingSettings | None) -> dict[str, Any]:
    return {"temperature": temperature} if sampling is None else {"sampling": sampling}
