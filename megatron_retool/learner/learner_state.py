"""What a rank of the learner has: its models, their optimizer, and the packer of its micro-batches."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from conversion.files.directory import local_directory
from conversion.model import flops
from conversion.model.architecture import Architecture
from megatron_retool.config import Config, ConfigError, LearnerConfig, OptimizerConfig
from megatron_retool.learner import adapters, cpu, data_parallel, parallel
from megatron_retool.learner.deterministic import check_attention, make_deterministic
from megatron_retool.learner.initial import frozen_copy, initial_chunks
from megatron_retool.learner.model import CriticModel, PackedModel, PolicyModel
from megatron_retool.learner.offload import HostOffload
from megatron_retool.learner.optimizer import build_optimizer, keep_main_parameters
from megatron_retool.learner.packing import Packer, Plan
from megatron_retool.learner.performance import check_performance
from megatron_retool.learner.pipeline import sum_gradients
from megatron_retool.learner.precision import acceleration_for, check_precision, token_multiple
from megatron_retool.learner.routing_replay import RoutingReplay
from megatron_retool.learner.shared_packing import SharedPrefixPacker
from megatron_retool.learner.specs import build_transformer_config
from megatron_retool.learner.teacher import teachers_of
from megatron_retool.learner.weights import OwnParts, export_hf_weights
from megatron_retool.trajectory import TrajectoryBatch

if TYPE_CHECKING:
    from megatron_retool.learner.checkpoint.save import PendingSave

logger = logging.getLogger(__name__)


class LearnerState:
    """Model, optimizer and schedule of one rank: built, exported, moved and saved.

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
            hf_dir, architecture = _read_architecture(hf_dir, config.model.families)
        if config.learner.mtp.train and role == "actor" and not architecture.predictors:
            architecture = architecture.with_predictors()
        self.config = config
        self.role = role
        self._pending_save: PendingSave | None = None
        self._offload = HostOffload(self)
        self.own_seconds = self._update_start = 0.0
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
        readers = [self.architecture, *(chunk.architecture for teacher in self.teachers for chunk in teacher.chunks)]
        return packer(
            self.layout,
            learner.max_tokens_per_micro_batch,
            parallel.data_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
            self.device,
            quadratic_cost=flops.quadratic_cost(self.architecture),
            token_multiple=token_multiple(learner),
            attention_buckets=any(self.acceleration.packs_attention(each, self.layout.context) for each in readers),
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
        before = getattr(self, "optimizer", None)
        self.optimizer, self.scheduler = build_optimizer(
            self.config.learner, optimizer, total_optimizer_steps, self.model_chunks
        )
        if before is not None and self.config.learner.fp8.parameters:
            keep_main_parameters(self.optimizer, before)
        self.transformer_config.grad_scale_func = self.optimizer.scale_loss

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


def _read_architecture(hf_dir: str | Path | None, families: Sequence[str]) -> tuple[Path, Architecture]:
    """A model's local directory, and what its config.json describes."""
    if hf_dir is None:
        raise ConfigError("model.path is empty: the learner needs a Hugging Face directory")
    directory = local_directory(str(hf_dir))
    return directory, Architecture.from_pretrained(directory, families)
