"""The learner: a Megatron-Core model that is asked for log-probs and taught by mini-batches.

SPMD: every rank builds a ``Learner`` and calls the same methods with the same whole batch; each takes its own share,
and answers are the same on every rank.  Runs under torchrun as well as under Ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state
from torch import Tensor

from conversion.files.directory import local_directory
from conversion.model import flops
from conversion.model.architecture import Architecture
from megatron_retool.algorithms.policy_loss import PolicyObjective
from megatron_retool.algorithms.settings import SamplingSettings
from megatron_retool.algorithms.token_losses import bind_token_loss
from megatron_retool.algorithms.top_tokens import TopTokens
from megatron_retool.config import Config, ConfigError, LearnerConfig, OptimizerConfig
from megatron_retool.config.accumulation import check_accumulation
from megatron_retool.learner import adapters, cpu, data_parallel, parallel
from megatron_retool.learner.deterministic import check_attention, make_deterministic
from megatron_retool.learner.divergence import Divergence
from megatron_retool.learner.initial import frozen_copy, initial_chunks
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
from megatron_retool.learner.model import CriticModel, PackedModel, PolicyModel
from megatron_retool.learner.multi_token_prediction import PredictionLoss
from megatron_retool.learner.offload import HostOffload
from megatron_retool.learner.optimizer import build_optimizer, clip_and_apply, step_settings
from megatron_retool.learner.packing import Packer, Plan
from megatron_retool.learner.performance import check_performance
from megatron_retool.learner.pipeline import forward, forward_backward, reduce_over_ranks, sum_gradients
from megatron_retool.learner.precision import acceleration_for, check_precision, token_multiple
from megatron_retool.learner.reading import FusedUpdate, LogProbs, read_tokens
from megatron_retool.learner.routing_replay import RoutingPass, RoutingReplay
from megatron_retool.learner.shared_packing import SharedPrefixPacker
from megatron_retool.learner.specs import build_transformer_config
from megatron_retool.learner.target_batch import TargetBatch, TargetLoss
from megatron_retool.learner.teacher import last_hidden_states, teacher_of_rows, teachers_of
from megatron_retool.learner.teacher_loss import TeacherLoss
from megatron_retool.learner.transformer_engine import watch_attention
from megatron_retool.learner.weights import OwnParts, export_hf_weights
from megatron_retool.target_sequences import OptimizerStep, RequestRefused, TargetSequence, TokenLoss, TokenOutputs
from megatron_retool.trajectory import TrajectoryBatch

if TYPE_CHECKING:
    from megatron_retool.learner.checkpoint.save import PendingSave

logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float32]


class Learner:
    """Model, optimizer and schedule of one rank.

    Attributes that other rooms read: ``model_chunks`` (this rank's virtual pipeline stages, DDP-wrapped),
    ``optimizer``, ``scheduler``, ``architecture``, ``transformer_config``, ``layout``, ``base`` (directory that the
    weights were read from) and ``base_checksum`` (see ``checkpoint.state.adapter_record``), ``own_seconds`` (of this
    rank's last update up to the sum of gradients over data-parallel ranks, where it waits for the slowest),
    ``has_gradients`` (whether ``accumulate`` has left some that no ``apply`` has used).

    Args:
        config: the run's configuration; ``learner``, ``algorithm`` and ``trainer`` are read.
        optimizer: hyperparameters; a run's stages may differ in them.
        total_optimizer_steps: length of the learning-rate schedule.
        hf_dir: Hugging Face directory (or hub id) with config.json, and with the weights unless ``mcore_dir`` has them.
        mcore_dir: distributed checkpoint of conversion/hf_to_mcore.py to take the weights from.
        architecture: instead of ``hf_dir``: a model with random weights.
        with_reference: also know the initial weights, for ``log_probs(reference=True)``: a frozen copy, or with
            learner.lora the model without its adapters.
        with_teacher: in place of the initial weights, know the teachers of algorithm.distillation that have a path.
        role: "actor", or "critic" for one value per token in place of the vocabulary.

    Raises:
        ConfigError: the layout or the precision does not fit the model, the machine or the number of processes.
    """

    def __init__(
        self,
        config: Config,
        *,
        optimizer: OptimizerConfig,
        total_optimizer_steps: int,
        hf_dir: str | Path | None = None,
        mcore_dir: str | Path | None = None,
        architecture: Architecture | None = None,
        with_reference: bool = False,
        with_teacher: bool = False,
        role: str = "actor",
    ) -> None:
        if role not in ("actor", "critic"):
            raise ConfigError(f"role={role!r} is neither actor nor critic")
        if role == "critic" and with_reference:
            raise ConfigError("a critic has no reference policy: build it with with_reference=False")
        if with_reference:
            config.learner.lora.check_reference()
        if architecture is None:
            if hf_dir is None:
                raise ConfigError("model.path is empty: the learner needs a Hugging Face directory")
            hf_dir = local_directory(str(hf_dir))
            architecture = Architecture.from_pretrained(hf_dir, config.model.families)
        if config.learner.mtp.train and role == "actor" and not architecture.predictors:
            architecture = architecture.with_predictors()
        self.config = config
        self.role = role
        self._pending_save: PendingSave | None = None
        self._offload = HostOffload(self)
        self.own_seconds = 0.0
        self.architecture = architecture
        self.layout = config.learner.layout(architecture)
        self.device = parallel.resolve_device(config.learner.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if config.learner.expandable_segments:
            parallel.use_expandable_segments(self.device)
        parallel.use_host_threads(self.device, config.learner.threads)
        if config.trainer.deterministic:
            make_deterministic()
        of_teachers: list[Architecture] = []
        if with_teacher:
            distillation = config.algorithm.distillation
            of_teachers = distillation.teacher_architectures(architecture, config.learner, config.model.families)
        self.acceleration = acceleration_for(config.learner)
        self._attention_buckets = any(
            self.acceleration.packs_attention(each, self.layout.context) for each in (architecture, *of_teachers)
        )
        check_precision(config.learner, optimizer, architecture, self.acceleration)
        check_performance(config.learner, optimizer, architecture, self.layout, self.acceleration)
        kernels = check_attention(config, architecture, self.layout, self.acceleration)
        parallel.initialize(self.layout, self.device, config.trainer.seed)
        if torch.distributed.get_rank() == 0:
            logger.info("learner: %s", self.acceleration.describe())
            if kernels is not None:
                logger.warning("%s", kernels)

        source = mcore_dir or hf_dir
        self.base = None if source is None else Path(source)
        self.base_checksum: str | None = None
        self.transformer_config = build_transformer_config(
            architecture, config.learner, self.layout, self.acceleration, deterministic=config.trainer.deterministic
        )
        chunks = initial_chunks(
            PolicyModel if role == "actor" else CriticModel,
            architecture,
            self.transformer_config,
            self.acceleration,
            hf_dir=hf_dir,
            mcore_dir=mcore_dir,
            verify=config.trainer.verify_checkpoints,
            share_prefixes=config.learner.share_prefixes,
            exact=config.learner.match_engine == "exact" and role == "actor",
        )
        self._base_is_reference = with_reference and bool(config.learner.lora.rank) and not with_teacher
        if config.learner.lora.rank:
            adapters.attach(chunks, architecture, config.learner.lora)
            if config.learner.lora.path and role == "actor":
                adapters.begin_with_files(chunks, architecture, config.learner.lora)
        self.reference_chunks: list[PackedModel] | None = None
        self.teachers = teachers_of(config, of_teachers, self.acceleration)
        if self.teachers:
            self.reference_chunks = [chunk for teacher in self.teachers for chunk in teacher.chunks]
        elif with_reference and not self._base_is_reference:
            self.reference_chunks = frozen_copy(
                chunks, architecture, self.transformer_config, self.acceleration, config.learner.share_prefixes
            )
        self.routing_replay: RoutingReplay | None = None
        if role == "actor" and config.learner.routing_replay != "none":
            frozen = None if with_teacher else self.reference_chunks  # a teacher chooses its own experts
            models = [*chunks, *(frozen or ())]
            self.routing_replay = RoutingReplay(
                config.learner, config.algorithm, architecture, self.transformer_config, models, self.device
            )
        self.model_chunks: Sequence[Any] = data_parallel.wrap(self.transformer_config, config.learner, chunks)
        no_sync = [chunk.no_sync for chunk in self.model_chunks]
        self.transformer_config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.transformer_config.finalize_model_grads_func = self._timed_gradient_sum()
        self.has_gradients = False
        cpu.fix_torch_adam()
        self.reset_optimizer(optimizer, total_optimizer_steps)
        self.packer = self._make_packer(config.learner)

    def _make_packer(self, learner: LearnerConfig) -> Packer:
        packer = SharedPrefixPacker if learner.share_prefixes else Packer
        return packer(
            self.layout,
            learner.max_tokens_per_micro_batch,
            parallel.data_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
            self.device,
            quadratic_cost=flops.quadratic_cost(self.architecture),
            token_multiple=token_multiple(learner),
            attention_buckets=self._attention_buckets,
            # An attention call's overhead, in pairs: some 2 million multiply-adds.
            pairs_per_call=2e6 / (self.architecture.query_size / self.layout.tensor),
            predictors=self.architecture.predictors,
            dynamic_context=learner.dynamic_context_parallel,
        )

    def reset_optimizer(self, optimizer: OptimizerConfig, total_optimizer_steps: int) -> None:
        """Start a stage: fresh optimizer state and schedule on the present weights.

        Raises:
            ConfigError: the warm-up is as long as the whole schedule, or min_lr exceeds lr.
        """
        self._skip_grad_norm = optimizer.skip_grad_norm
        self.optimizer, self.scheduler = build_optimizer(
            self.config.learner, optimizer, total_optimizer_steps, self.model_chunks
        )
        self.transformer_config.grad_scale_func = self.optimizer.scale_loss

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

    def _timed_gradient_sum(self) -> Callable[..., None]:
        @functools.wraps(sum_gradients)
        def timed(*args: Any, **kwargs: Any) -> None:
            if self.device.type == "cuda":
                # Not the whole device: sums that overlap wait for the slowest rank on streams of their own.
                torch.cuda.current_stream().synchronize()
            self.own_seconds = time.perf_counter() - self._update_start
            sum_gradients(*args, **kwargs)
            adapters.sum_expert_gradients(self.model_chunks)

        return timed

    def _mfu(self, room: str, batch: TrajectoryBatch, plan: Plan, seconds: float) -> dict[str, float]:
        peak = flops.peak_flops(self.acceleration.gpu_name)
        if peak is None:
            return {}
        achieved = self.model_flops(batch, plan) / seconds / self.layout.world_size
        return {f"perf/mfu/{room}": achieved / peak}

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        """What the next update is going to use."""
        return float(next(group["lr"] for group in self.optimizer.param_groups if group["params"]))

    def model_flops(self, batch: TrajectoryBatch, plan: Plan | None = None) -> float:
        """FLOPs of a forward and backward pass over the batch, over all ranks together; ``plan``: see ``Packer``."""
        return self.packer.training_flops(self.architecture, batch, plan)

    def export_weights(
        self, bucket_bytes: int = 512 * 2**20, receivers: Sequence[int] = (0,)
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Full tensors by Hugging Face name in buckets, on the ranks ``receivers``; all must drain the iterator.

        They are the policy's, with adapters merged into them; of layers for multi-token prediction those that the
        engines' draft gets (``Config.trains_draft``).
        """
        return export_hf_weights(*self._exported(), bucket_bytes, receivers, self._exported_value())

    def own_parts(self, bucket_bytes: int = 512 * 2**20) -> OwnParts:
        """What this rank holds of the weights that ``export_weights`` gathers, for engines; every rank calls it."""
        return OwnParts(*self._exported(), bucket_bytes, self._exported_value())

    def _exported(self) -> tuple[Sequence[Any], Architecture]:
        data_parallel.finish_gathering(self.model_chunks)
        if self.config.trains_draft:
            return self.model_chunks, self.architecture
        return self.model_chunks, dataclasses.replace(self.architecture, predictors=0)

    def _exported_value(self) -> adapters.MergedWeights | None:
        return adapters.MergedWeights(self.model_chunks) if self.config.learner.lora.rank else None

    def export_adapter(self, receivers: Sequence[int] = (0,)) -> Iterator[list[tuple[str, Tensor]]]:
        """Only the policy's adapters: ``adapters.export_factors``."""
        data_parallel.finish_gathering(self.model_chunks)
        return adapters.export_factors(self.model_chunks, self.architecture, self.config.learner.lora, receivers)

    def offload(self, *parts: str) -> None:
        """Move "weights", "optimizer" or "gradients" to host memory, where there is a GPU that they leave."""
        if self.device.type == "cuda":
            self.finish_save()
            data_parallel.finish_gathering(self.model_chunks)
            self._offload.offload(*parts)

    def reload(self, *parts: str) -> None:
        """Bring back what ``offload`` moved. Nothing may use these parts before."""
        if self.device.type == "cuda":
            self._offload.reload(*parts)

    def save(self, directory: str | Path, *, asynchronous: bool = False, weights_only: bool = False) -> None:
        """Write model, optimizer, schedule and random state; see ``checkpoint.save``.

        Args:
            asynchronous: return when the state is copied; ``finish_save``, the next ``save`` or ``close`` completes it.
            weights_only: write only the model.

        Raises:
            SaveError: too little room on the disk, or writing failed, on any rank.
        """
        from megatron_retool.learner.checkpoint.save import save_checkpoint

        self.finish_save()
        data_parallel.finish_gathering(self.model_chunks)
        self._pending_save = save_checkpoint(self, directory, asynchronous=asynchronous, weights_only=weights_only)
        if not asynchronous:
            self.finish_save()

    def finish_save(self) -> None:
        """Wait for the checkpoint that is being written, if there is one.

        Raises:
            SaveError: writing failed on some rank.
        """
        if self._pending_save is not None:
            pending, self._pending_save = self._pending_save, None
            pending.wait()

    def load(self, directory: str | Path) -> None:
        """Continue from ``save``'s directory, written in any layout; see ``checkpoint.load``."""
        from megatron_retool.learner.checkpoint.load import load_checkpoint

        data_parallel.finish_gathering(self.model_chunks)
        load_checkpoint(self, directory)

    def close(self) -> None:
        """Complete a checkpoint that is being written, and leave the process groups; the learner is of no use after."""
        self.finish_save()
        # Hooks on gradients hold the configuration through C++, where the garbage collector sees no cycle: by these
        # functions the weights and the process groups would stay for as long as the process lives.
        config = self.transformer_config
        config.no_sync_func = config.finalize_model_grads_func = config.grad_scale_func = None
        parallel.shutdown()


def _routing_flips(routing: RoutingPass, batch: TrajectoryBatch) -> FloatArray:
    """Of the response tokens; see ``Learner.log_probs``."""
    flips = batch.of_responses(routing.flips())
    return np.where(flips < 0, np.nan, flips).astype(np.float32)


def _head_options(temperature: float, sampling: SamplingSettings | None) -> dict[str, Any]:
    return {"temperature": temperature} if sampling is None else {"sampling": sampling}
