"""The learner's processes as Ray actors: one actor per rank, all called with the same arguments (SPMD).

A critic is a second group of the same kind, with ranks and a process group of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import ray

from megatron_retool.algorithms.settings import SamplingSettings
from megatron_retool.cluster.learner_failures import DEATHS, LearnerDied, Severity, failures, in_one_line, severity
from megatron_retool.cluster.learner_worker import FloatArray, LearnerWorker
from megatron_retool.cluster.nsight import nsight_environment
from megatron_retool.cluster.placement import Placement
from megatron_retool.cluster.routed_rows import RowStore
from megatron_retool.cluster.runtime import resolved
from megatron_retool.config import Config
from megatron_retool.runs.checkpoints import SaveError
from megatron_retool.runs.profile_table import RankProfile
from megatron_retool.target_sequences import OptimizerStep, TargetSequence, TokenLoss, TokenOutputs
from megatron_retool.trajectory import TrajectoryBatch
from sglang_rollout.engine.base import SyncReport
from sglang_rollout.engine.key import engine_key
from sglang_rollout.engine.weight_sync.errors import WeightSyncError

if TYPE_CHECKING:
    from megatron_retool.learner.reading import FusedUpdate, LogProbs

DEATH_NOTICE_SECONDS = 10.0
"""How long after a rank's error the death of another rank, which would be its cause, may become known."""

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


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
        """``runs.peak_memory`` of the rank that has the most of each, in GiB."""
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
        result: TokenOutputs = await self._of_runs("accumulate", run, sequences, loss, forward_only=forward_only)
        return result

    async def apply(self, run: str, step: OptimizerStep) -> dict[str, float]:
        """One optimizer step on what was accumulated: grad_norm, lr, and skipped as ``Learner.apply`` says."""
        result: dict[str, float] = await self._of_runs("apply", run, step)
        return result

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
        return [result for result in await self._on_all_ranks(LearnerWorker.end_profile) if result is not None]

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
