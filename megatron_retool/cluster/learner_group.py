"""The learner's processes as Ray actors: one actor per rank, all called with the same arguments (SPMD).

A critic is a second group of the same kind, with ranks and a process group of its own.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import ray
import torch
from ray.exceptions import ObjectLostError

from megatron_retool.algorithms.settings import SamplingSettings
from megatron_retool.cluster.gpus import visible_devices
from megatron_retool.cluster.learner_failures import (
    DEATHS,
    LearnerDied,
    OutOfStep,
    Severity,
    failures,
    in_one_line,
    severity,
)
from megatron_retool.cluster.nsight import nsight_environment
from megatron_retool.cluster.placement import BROADCASTS, Placement
from megatron_retool.cluster.routed_rows import RowStore, with_rows
from megatron_retool.cluster.runtime import node_address, redirect_output, resolved
from megatron_retool.config import Config, ConfigError
from megatron_retool.monitor.memory import peak_memory
from megatron_retool.monitor.phases import Phase
from megatron_retool.monitor.profile_table import RankProfile
from megatron_retool.ports import free_port
from megatron_retool.runs.checkpoints import SaveError
from megatron_retool.target_sequences import OptimizerStep, RequestRefused, TargetSequence, TokenLoss, TokenOutputs
from megatron_retool.trajectory import TrajectoryBatch
from sglang_rollout.engine.base import SyncReport
from sglang_rollout.engine.key import engine_key, use_engine_key
from sglang_rollout.weight_sync.errors import WeightSyncError

if TYPE_CHECKING:
    from megatron_retool.learner.adapter_runs import AdapterRuns
    from megatron_retool.learner.profiler import StepRecorder
    from megatron_retool.learner.reading import FusedUpdate, LogProbs

DEATH_NOTICE_SECONDS = 10.0
"""How long after a rank's error the death of another rank, which would be its cause, may become known."""

# Before Blackwell, communication overlaps only where kernels are launched in the order in which they were issued.
GPU_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Of ranks with GPUs; what the environment has already wins. Under Slurm scripts/slurm/nccl.env says the same."""
BROADCAST_ENVIRONMENT = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""Of ranks that form an NCCL group with engines: SGLang turns both off in its servers, and members have to agree.
Other ranks keep them, for NVLink's switches add gradients up faster than the GPUs do."""


Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
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
            found = self.learner.log_probs(_arrived(batch), reference=reference, sampling=sampling)
        return found if self.rank == 0 else None

    def values(self, batch: TrajectoryBatch) -> FloatArray | None:
        """``Learner.values``; None on other ranks than the first."""
        with self._phase(Phase.VALUES):
            found = self.learner.values(batch)
        return found if self.rank == 0 else None

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
            found = self.learner.update_fused(
                _arrived(batch), sampling=sampling, kl_in_loss=kl_in_loss, step_without_loss=step_without_loss
            )
        return (found if self.rank == 0 else None), self.learner.own_seconds

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
            found = getattr(self.runs, method)(*arguments, **options)
        except (RequestRefused, ConfigError, SaveError) as refusal:
            return refusal
        except Exception as error:
            raise OutOfStep(f"{method} failed: {type(error).__name__}: {error}") from error
        return found if self.rank == 0 else None

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
        """Send the current weights to this rank's engines; see sglang_rollout.weight_sync.push.

        Returns:
            None: it has no engine. An error as an answer: another sender's engines may be at fault too.
        """
        from sglang_rollout.weight_sync.push import push_weights

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


class LearnerGroup:
    """All ranks of one model, driven from one process. Every method is awaitable and raises the rank's own error.

    Args:
        role: "learner" (the policy), or "critic".

    Attributes:
        nodes: each rank's node, once the group is set up.

    Raises:
        LearnerDied: from every method, where a rank has died or the ranks are out of step. All have been killed then.
    """

    def __init__(self, config: Config, placement: Placement, role: str = "learner") -> None:
        self.config = config
        self.role = role
        self.nodes: list[str] = []
        threads = str(config.learner.threads)
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        remote = ray.remote(LearnerWorker)
        self.workers: list[Any] = [
            remote.options(
                **placement.learner_options(rank, role),
                runtime_env={"env_vars": own} | nsight_environment(config.trainer, role, rank, own),
                max_concurrency=1,
            ).remote(config, role, rank, placement.gpus(role, rank), engine_key())
            for rank in range(config.learner.world_size)
            for own in [environment | _of_rank(placement, role, rank)]
        ]
        self._seconds = [0.0] * len(self.workers)
        self._rows = RowStore()

    async def setup(self, total_optimizer_steps: int) -> None:
        """Build the model on every rank.

        Raises:
            LearnerDied: a rank ended meanwhile.
        """
        try:
            master = await self.workers[0].rendezvous.remote()
        except DEATHS as error:
            raise self._died(0, error) from error
        self.nodes = await self._on_all_ranks(LearnerWorker.setup, master, total_optimizer_steps)

    def kill(self) -> None:
        """End every rank at once, whatever it is doing."""
        self._rows.release()
        for worker in self.workers:
            ray.kill(worker)

    async def log_probs(
        self, batch: TrajectoryBatch, *, sampling: SamplingSettings, reference: bool = False
    ) -> LogProbs:
        """log_probs and entropy, float32 [T] each, and what else ``Learner.log_probs`` finds."""
        return _of_rank_0(await self._on_all_ranks(LearnerWorker.log_probs, batch, reference, sampling))

    async def values(self, batch: TrajectoryBatch) -> FloatArray:
        """Critic: float32 [T]."""
        return _of_rank_0(await self._on_all_ranks(LearnerWorker.values, batch))

    async def update(
        self, batch: TrajectoryBatch, *, sampling: SamplingSettings, kl_in_loss: float | None = None
    ) -> dict[str, float]:
        """One optimizer step on a mini-batch; its metrics. ``kl_in_loss``: as for ``Learner.update``."""
        return self._note_seconds(await self._on_all_ranks(LearnerWorker.update, batch, sampling, kl_in_loss))

    async def update_fused(
        self,
        batch: TrajectoryBatch,
        *,
        sampling: SamplingSettings,
        kl_in_loss: float | None = None,
        step_without_loss: bool = False,
    ) -> FusedUpdate:
        """The same with old log-probs of its own: ``Learner.update_fused``."""
        return self._note_seconds(
            await self._on_all_ranks(LearnerWorker.update_fused, batch, sampling, kl_in_loss, step_without_loss)
        )

    async def update_critic(self, batch: TrajectoryBatch) -> dict[str, float]:
        """The same for a critic."""
        return self._note_seconds(await self._on_all_ranks(LearnerWorker.update_critic, batch))

    def _note_seconds(self, answers: Sequence[tuple[Answer | None, float]]) -> Answer:
        self._seconds = [total + own for total, (_, own) in zip(self._seconds, answers, strict=True)]
        return _of_rank_0([answer for answer, _ in answers])

    def take_rank_seconds(self) -> list[float]:
        """Each rank's own seconds in updates since the last call: without its waiting for other data-parallel ranks."""
        taken, self._seconds = self._seconds, [0.0] * len(self.workers)
        return taken

    async def peak_memory(self) -> dict[str, float]:
        """``monitor.memory.peak_memory`` of the rank that has the most of each, in GiB."""
        ranks = await self._on_all_ranks(LearnerWorker.peak_memory)
        return {name: max(rank[name] for rank in ranks) for name in ranks[0]}

    async def offload(self, *parts: str) -> None:
        """Move "weights", "optimizer" or "gradients" to host memory."""
        await self._on_all_ranks(LearnerWorker.offload, *parts)

    async def reload(self, *parts: str) -> None:
        """Bring back what ``offload`` moved."""
        await self._on_all_ranks(LearnerWorker.reload, *parts)

    async def save(self, directory: Path, *, asynchronous: bool = False, weights_only: bool = False) -> None:
        """Write a checkpoint; ``asynchronous`` returns when the state is copied, and ``finish_save`` completes it.

        Raises:
            SaveError: there is too little room, or writing failed.
        """
        _check_saved(
            await self._on_all_ranks(LearnerWorker.save, str(directory.absolute()), asynchronous, weights_only)
        )

    async def finish_save(self) -> None:
        """Wait for the checkpoint that is being written, if there is one.

        Raises:
            SaveError: writing failed.
        """
        _check_saved(await self._on_all_ranks(LearnerWorker.finish_save))

    async def load(self, directory: Path) -> None:
        """Continue from a checkpoint on every rank."""
        await self._on_all_ranks(LearnerWorker.load, str(directory.absolute()))

    async def sync_weights(self, senders: dict[int, list[str]], version: int) -> dict[str, float]:
        """Send the current weights to every engine, as ``version``; the seconds and bytes that it took.

        Args:
            senders: base URLs of engines by the rank that they get their weights from.

        Raises:
            WeightSyncError: naming the engines at fault.
        """
        answers = await self._on_all_ranks(LearnerWorker.sync_weights, senders, version)
        errors = [answer for answer in answers if isinstance(answer, WeightSyncError)]
        if errors:
            # Ranks that send together have the same to say.
            said = dict.fromkeys(map(str, errors))
            raise WeightSyncError(
                "; ".join(said), list(dict.fromkeys(url for error in errors for url in error.engines))
            )
        return SyncReport.together([answer for answer in answers if isinstance(answer, SyncReport)]).metrics()

    # Runs of callers that train by themselves (``learner.adapter_runs``). Each method raises RequestRefused where the
    # request is wrong, ConfigError where a setting does not go with runs, and SaveError where writing fails: the ranks
    # then continue as if they had not been asked.

    async def create_run(self, run: str, *, rank: int, alpha: float, seed: int) -> None:
        """A run with fresh factors and optimizer state; its rank is at most learner.lora.rank."""
        await self._of_runs("create_run", run, rank=rank, alpha=alpha, seed=seed)

    async def delete_run(self, run: str) -> None:
        """Forget a run."""
        await self._of_runs("delete_run", run)

    async def accumulate(
        self, run: str, sequences: list[TargetSequence], loss: TokenLoss, *, forward_only: bool = False
    ) -> TokenOutputs:
        """Add the gradient of a loss, summed over all targets; ``forward_only``: only its outputs."""
        found: TokenOutputs = await self._of_runs("accumulate", run, sequences, loss, forward_only=forward_only)
        return found

    async def apply(self, run: str, step: OptimizerStep) -> dict[str, float]:
        """One optimizer step on what was accumulated: grad_norm, lr, and skipped as ``Learner.apply`` says."""
        found: dict[str, float] = await self._of_runs("apply", run, step)
        return found

    async def save_run(self, run: str, directory: Path, *, with_optimizer: bool) -> None:
        """Write peft's files, and what ``load_run`` continues from in any layout."""
        await self._of_runs("save_run", run, str(directory.absolute()), with_optimizer=with_optimizer)

    async def load_run(self, run: str, directory: Path, *, with_optimizer: bool) -> None:
        """Give a run of the same rank what ``save_run``, or peft, wrote."""
        await self._of_runs("load_run", run, str(directory.absolute()), with_optimizer=with_optimizer)

    async def write_adapter(self, run: str, directory: Path) -> None:
        """Write only a run's factors, as peft's files."""
        await self._of_runs("write_adapter", run, str(directory.absolute()))

    async def _of_runs(self, method: str, *arguments: Any, **options: Any) -> Any:
        answers = await self._on_all_ranks(LearnerWorker.of_runs, method, *arguments, **options)
        refusals = [answer for answer in answers if isinstance(answer, Exception)]
        if refusals and len(refusals) < len(answers):
            self.kill()
            raise LearnerDied(f"{self.role}: only some ranks refused {method}, and are out of step: {refusals[0]}")
        if refusals:
            raise refusals[0]
        return answers[0]

    async def begin_profile(self, step: int) -> None:
        """Let the chosen ranks record what follows as part of ``step``."""
        await self._on_all_ranks(LearnerWorker.begin_profile, step)

    async def end_profile(self) -> list[RankProfile]:
        """What they recorded."""
        return [found for found in await self._on_all_ranks(LearnerWorker.end_profile) if found is not None]

    async def _on_all_ranks(
        self,
        method: Callable[Concatenate[LearnerWorker, Arguments], Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> list[Answer]:
        """``method`` of every rank with the same arguments; batches and lists among them are stored once for all ranks,
        and the rows of a batch's routed experts once for all batches of a step.

        A failure does not wait for the other ranks: they may be stuck in a collective.
        """
        # Ray resolves a reference only as a direct argument, which these are.
        sent = [self._sent(argument) if isinstance(argument, TrajectoryBatch) else argument for argument in args]
        shared = [ray.put(each) if isinstance(each, TrajectoryBatch | list) else each for each in sent]
        calls = [getattr(worker, method.__name__).remote(*shared, **kwargs) for worker in self.workers]
        tasks: list[asyncio.Task[Answer]] = [asyncio.ensure_future(resolved(call)) for call in calls]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            deadline = asyncio.get_running_loop().time() + DEATH_NOTICE_SECONDS
            while (failed := failures(tasks)) and not isinstance(failed[0][1], DEATHS):
                # One rank's death is an error in another rank's collective, which may be known first.
                pending = [task for task in tasks if not task.done()]
                left = deadline - asyncio.get_running_loop().time()
                if not pending or left <= 0:
                    break
                await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        if failed:
            rank, error = failed[0]
            if severity(error) != Severity.ORDINARY:
                # The other ranks may wait for this one for ever, and later calls for them.
                self.kill()
                raise self._died(rank, error) from error
            raise error
        return [task.result() for task in tasks]

    def _sent(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        if self.role == "critic" or self.config.learner.routing_replay == "none":
            return replace(batch, routed_experts=None)
        return self._rows.without_rows(batch)

    def _died(self, rank: int, error: BaseException) -> LearnerDied:
        log = self.config.trainer.run_dir / "logs" / f"{self.role}_rank{rank}.log"
        node = f" on {self.nodes[rank]}" if self.nodes else ""
        what = {Severity.DEATH: "died", Severity.OUT_OF_STEP: "left the others waiting"}.get(
            severity(error), "lost its device or its links"
        )
        return LearnerDied(f"{self.role} rank {rank}{node} {what} ({log}): {in_one_line(error)}")


def _failure_of(work: Callable[[], None]) -> str | None:
    try:
        work()
    except (SaveError, OSError) as error:
        return str(error)
    return None


def _check_saved(reasons: Sequence[str | None]) -> None:
    failed = [reason for reason in reasons if reason is not None]
    if failed:
        raise SaveError(failed[0])


def _of_rank_0[Answer](answers: Sequence[Answer | None]) -> Answer:
    answer = answers[0]
    assert answer is not None
    return answer


def _of_rank(placement: Placement, role: str, rank: int) -> dict[str, str]:
    """With GPUs a rank sees only its own, and could not tell how many others share its node's cores."""
    return {"LOCAL_WORLD_SIZE": str(placement.ranks_beside(role, rank))} if placement.gpus(role, rank) else {}
