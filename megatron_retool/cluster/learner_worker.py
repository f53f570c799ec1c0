"""One rank of a learner, in a Ray actor."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from ray.exceptions import ObjectLostError

from megatron_retool.algorithms.settings import SamplingSettings
from megatron_retool.cluster.learner_failures import OutOfStep
from megatron_retool.cluster.placement import BROADCASTS
from megatron_retool.cluster.routed_rows import with_rows
from megatron_retool.cluster.runtime import node_address, redirect_output
from megatron_retool.config import Config, ConfigError
from megatron_retool.config.cluster import visible_devices
from megatron_retool.ports import free_port
from megatron_retool.runs.checkpoints import SaveError
from megatron_retool.runs.peak_memory import peak_memory
from megatron_retool.runs.profile_table import RankProfile
from megatron_retool.target_sequences import RequestRefused
from megatron_retool.trajectory import TrajectoryBatch
from run_files.phases import Phase
from sglang_rollout.engine.base import SyncReport
from sglang_rollout.engine.key import use_engine_key
from sglang_rollout.engine.weight_sync.errors import WeightSyncError

if TYPE_CHECKING:
    from megatron_retool.learner.adapter_runs import AdapterRuns
    from megatron_retool.learner.profiler import StepRecorder
    from megatron_retool.learner.reading import FusedUpdate, LogProbs


# Before Blackwell, communication overlaps only where kernels are launched in the order in which they were issued.
GPU_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Of ranks with GPUs; what the environment has already wins. Under Slurm scripts/slurm/nccl.env says the same."""
BROADCAST_ENVIRONMENT = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""Of ranks that form an NCCL group with engines: SGLang turns both off in its servers, and members have to agree.
Other ranks keep them, for NVLink's switches add gradients up faster than the GPUs do."""

Bucket = list[tuple[str, torch.Tensor]]
FloatArray = npt.NDArray[np.float32]
Updated = tuple[dict[str, float] | None, float]
"""Metrics of an update (only rank 0's), and the seconds that the rank itself took (``Learner.own_seconds``)."""


class LearnerWorker:
    """One rank, on ``gpus`` of its node. Megatron is imported here and nowhere else in the cluster room."""

    recorder: StepRecorder | None = None
    """Of the step that is being profiled."""
    runs: AdapterRuns | None = None
    """Those of callers that train by themselves, from the first one's call on."""

    def __init__(self, config: Config, role: str, rank: int, gpus: Sequence[int] = (), key: str | None = None) -> None:
        if key is not None:
            use_engine_key(key)
        self.config = config
        self.role = role
        self.rank = rank
        self.gpus = tuple(gpus)
        if gpus:  # before anything asks CUDA for its devices
            devices = visible_devices(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
            chosen = GPU_ENVIRONMENT | (BROADCAST_ENVIRONMENT if config.weight_sync.method in BROADCASTS else {})
            os.environ.update(chosen | os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(devices)})
        redirect_output(config.trainer.run_dir.absolute() / "logs" / f"{role}_rank{rank}.log")

    def rendezvous(self) -> tuple[str, int]:
        """An address and port on this node for torch.distributed."""
        return "127.0.0.1" if self.config.cluster.nodes == 1 else node_address(), free_port()

    def setup(self, master: tuple[str, int], total_optimizer_steps: int) -> str:
        """Join the process group and build model, optimizer and scheduler; the name of this node.

        Raises:
            ConfigError: the plan gives this rank a GPU that CUDA does not find; the CPU would take its place silently.
        """
        if self.gpus and not torch.cuda.is_available():
            raise ConfigError(
                f"{self.role} rank {self.rank} is planned on GPU {self.gpus[0]} of {socket.gethostname()}, where CUDA "
                f"finds none as CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}: check nvidia-smi there and "
                "cluster.gpus_per_node"
            )
        os.environ.update(
            MASTER_ADDR=master[0],
            MASTER_PORT=str(master[1]),
            RANK=str(self.rank),
            WORLD_SIZE=str(self.config.learner.world_size),
            LOCAL_RANK="0",  # a rank sees only its own GPU
        )
        from megatron_retool.learner.learner import Learner

        settings = self.config.learner
        critic = self.role == "critic"
        algorithm = self.config.algorithm
        self.learner = Learner(
            self.config,
            optimizer=settings.critic.optimizer if critic else settings.optimizer,
            total_optimizer_steps=total_optimizer_steps,
            hf_dir=self.config.model.path,
            mcore_dir=self.config.model.mcore_path,
            with_reference=not critic and algorithm.keeps_reference,
            with_teacher=not critic and bool(algorithm.distillation.paths),
            role="critic" if critic else "actor",
        )
        return socket.gethostname()

    # The answers of these are the same on every rank; only rank 0's leaves its process.

    def log_probs(self, batch: TrajectoryBatch, reference: bool, sampling: SamplingSettings) -> LogProbs | None:
        """``Learner.log_probs``; None on other ranks than the first."""
        with self._phase(Phase.REFERENCE if reference else Phase.OLD_LOG_PROB):
            result = self.learner.log_probs(_arrived(batch), reference=reference, sampling=sampling)
        return result if self.rank == 0 else None

    def values(self, batch: TrajectoryBatch) -> FloatArray | None:
        """``Learner.values``; None on other ranks than the first."""
        with self._phase(Phase.VALUES):
            result = self.learner.values(batch)
        return result if self.rank == 0 else None

    def update(self, batch: TrajectoryBatch, sampling: SamplingSettings, kl_in_loss: float | None = None) -> Updated:
        """``Learner.update``, and the rank's own seconds."""
        with self._phase(Phase.UPDATE_ACTOR):
            metrics = self.learner.update(_arrived(batch), sampling=sampling, kl_in_loss=kl_in_loss)
        return (metrics if self.rank == 0 else None), self.learner.own_seconds

    def update_fused(
        self, batch: TrajectoryBatch, sampling: SamplingSettings, kl_in_loss: float | None, step_without_loss: bool
    ) -> tuple[FusedUpdate | None, float]:
        """``Learner.update_fused``, and the rank's own seconds."""
        with self._phase(Phase.UPDATE_ACTOR):
            result = self.learner.update_fused(
                _arrived(batch), sampling=sampling, kl_in_loss=kl_in_loss, step_without_loss=step_without_loss
            )
        return (result if self.rank == 0 else None), self.learner.own_seconds

    def update_critic(self, batch: TrajectoryBatch) -> Updated:
        """``Learner.update_critic``, and the rank's own seconds."""
        with self._phase(Phase.UPDATE_CRITIC):
            metrics = self.learner.update_critic(batch)
        return (metrics if self.rank == 0 else None), self.learner.own_seconds

    def of_runs(self, method: str, *arguments: Any, **options: Any) -> Any:
        """A call of ``AdapterRuns``. What is wrong with a request is an answer: the ranks continue.

        Raises:
            OutOfStep: anything else failed, and other ranks may wait for this one.
        """
        from megatron_retool.learner.adapter_runs import AdapterRuns

        try:
            if self.runs is None:
                self.runs = AdapterRuns(self.learner)
            result = getattr(self.runs, method)(*arguments, **options)
        except (RequestRefused, ConfigError, SaveError) as refusal:
            return refusal
        except Exception as error:
            raise OutOfStep(f"{method} failed: {type(error).__name__}: {error}") from error
        return result if self.rank == 0 else None

    def peak_memory(self) -> dict[str, float]:
        """perf/* of this rank's device since the last call."""
        return peak_memory(self.learner.device)

    def offload(self, *parts: str) -> None:
        """``Learner.offload``."""
        self.learner.offload(*parts)

    def reload(self, *parts: str) -> None:
        """``Learner.reload``."""
        self.learner.reload(*parts)

    def load(self, directory: str) -> None:
        """``Learner.load``."""
        self.learner.load(directory)

    def save(self, directory: str, asynchronous: bool, weights_only: bool) -> str | None:
        """Why no checkpoint is written, or None; as an answer, since an error of a call is looked at as a death."""
        return _failure_of(lambda: self.learner.save(directory, asynchronous=asynchronous, weights_only=weights_only))

    def finish_save(self) -> str | None:
        """``Learner.finish_save``; what failed, or None."""
        return _failure_of(self.learner.finish_save)

    def sync_weights(self, senders: dict[int, list[str]], version: int) -> SyncReport | WeightSyncError | None:
        """Send the current weights to this rank's engines; see sglang_rollout.engine.weight_sync.push.

        Returns:
            None: it has no engine. An error as an answer: another sender's engines may be at fault too.
        """
        from sglang_rollout.engine.weight_sync.push import push_weights

        own = senders.get(self.rank, [])
        if self.config.weight_sync.method == "sharded":
            parts = self.learner.own_parts(self.config.weight_sync.bucket_bytes)
            with self._phase(Phase.WEIGHT_SYNC):
                try:
                    return push_weights(parts, own, version, self.config)
                except WeightSyncError as error:
                    return error
        if self.config.learner.lora.sends_adapter:
            buckets = _Export(self.learner.export_adapter(sorted(senders)))
        else:
            buckets = _Export(self.learner.export_weights(self.config.weight_sync.bucket_bytes, sorted(senders)))
        with self._phase(Phase.WEIGHT_SYNC):
            try:
                return push_weights(buckets, own, version, self.config) if own else None
            except WeightSyncError as error:
                return error
            finally:
                # Every rank takes part in every gather, whatever became of the push: else the next call's would meet
                # these.
                for _ in buckets:
                    pass

    def begin_profile(self, step: int) -> None:
        """Record what this rank does until ``end_profile``, where trainer.profiler names it."""
        profiler = self.config.trainer.profiler
        if not profiler.records(self.rank):
            return
        from megatron_retool.learner.profiler import StepRecorder

        self.recorder = StepRecorder(profiler, self.config.trainer.run_dir.absolute() / "profile", self.role, self.rank)
        self.recorder.begin(step)

    def end_profile(self) -> RankProfile | None:
        """What was recorded; None where this rank records nothing."""
        recorder, self.recorder = self.recorder, None
        return None if recorder is None else recorder.end()

    def _phase(self, phase: Phase) -> AbstractContextManager[None]:
        return nullcontext() if self.recorder is None else self.recorder.phase(phase.value)


def _arrived(batch: TrajectoryBatch) -> TrajectoryBatch:
    """The batch with its routed experts.

    Raises:
        OutOfStep: they are lost here, and other ranks may have them.
    """
    try:
        return with_rows(batch)
    except ObjectLostError as error:
        raise OutOfStep(f"the step's routed experts are lost: {error}") from error


class _Export:
    """The buckets of an export, whose consumer can neither close it nor be taken for the cause of its errors.

    Raises:
        OutOfStep: the export failed, and other ranks may wait for this one.
    """

    def __init__(self, buckets: Iterator[Bucket]) -> None:
        self._buckets = buckets

    def __iter__(self) -> Iterator[Bucket]:
        return self

    def __next__(self) -> Bucket:
        try:
            return next(self._buckets)
        except StopIteration:
            raise
        except Exception as error:
            raise OutOfStep(f"the weights could not be exported: {type(error).__name__}: {error}") from error


def _failure_of(work: Callable[[], None]) -> str | None:
    try:
        work()
    except (SaveError, OSError) as error:
        return str(error)
    return None
