"""The calls of training runs: taken in at once, put in order, carried out one at a time by the trainer."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_retool.config.tinker import TinkerConfig
from megatron_retool.target_sequences import OptimizerStep, RequestRefused, TargetSequence, TokenLoss, TokenOutputs
from megatron_retool.tinker.checkpoints import Checkpoints, expiry
from megatron_retool.tinker.external_weights import encrypt_files
from megatron_retool.tinker.losses import target_sequences, token_loss
from megatron_retool.tinker.promises import Outcome, Promises, failure, json_outcome
from megatron_retool.tinker.requests import (
    TRAINED,
    CheckpointPath,
    CopyWeights,
    CreateModel,
    LoadWeights,
    LoraSettings,
    SaveWeights,
    read_load_weights,
    read_optimizer_step,
    read_save_weights,
    required_integer,
    required_text,
)
from megatron_retool.tinker.run_queue import Job, RunQueue
from megatron_retool.tinker.run_store import RunRecord, RunStore, SamplerRecord, StoredCheckpoint
from megatron_retool.tinker.served_model import ServedModel
from megatron_retool.tinker.sessions import ClientSessions
from megatron_retool.tinker.trainer import Trainer
from megatron_retool.tinker.training_run import TrainingRun
from megatron_retool.tinker.wire import ForwardBackward, read_data, read_forward_backward, write_outputs
from sglang_rollout.gateway.errors import ApiError, invalid
from sglang_rollout.gateway.fields import Json
from untrusted import clipped

MOST_HELD_BYTES = 2 << 30
"""Of forward_backward's bodies that wait for the learner."""
Answer = dict[str, Any]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Batch:
    sequences: list[TargetSequence]
    loss: TokenLoss
    forward_only: bool
    reports_elements: bool


class Training:
    """All runs.

    Args:
        fatal: errors after which the trainer cannot be asked again.

    Attributes:
        queue: what is to be done; whoever runs the server lets it ``work``.
        died: the first of the ``fatal`` errors.
    """

    def __init__(
        self,
        config: TinkerConfig,
        model: ServedModel,
        trainer: Trainer,
        store: RunStore,
        checkpoints: Checkpoints,
        sessions: ClientSessions,
        promises: Promises,
        fatal: tuple[type[Exception], ...],
    ) -> None:
        self._config, self._model, self._trainer = config, model, trainer
        self._fatal = fatal
        self.died: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._store, self._checkpoints, self._sessions = store, checkpoints, sessions
        self._promises = promises
        self.queue = RunQueue(config.share_seconds)
        self._runs: dict[str, TrainingRun] = {}
        self._held_bytes = 0
        self._copying = asyncio.Lock()

    def restore(self) -> None:
        """Take in what is on disk: in a thread, before anything else."""
        for record in self._store.runs():
            self._runs[record.id] = TrainingRun(record, self._store, restored=True)

    def find(self, identifier: str) -> TrainingRun:
        """
        Raises:
            ApiError: 404, there is no such run.
        """
        run = self._runs.get(identifier)
        if run is None:
            raise ApiError(404, "model_id: there is no such run", code="not_found", param="model_id")
        return run

    def all(self) -> list[TrainingRun]:
        """The newest first."""
        return sorted(self._runs.values(), key=lambda each: each.record.last_request, reverse=True)

    # Creating and ending runs.

    async def create(self, request: CreateModel) -> Answer:
        """create_model.

        Raises:
            ApiError: the model, the adapter or the session is none of this server's.
        """
        self._sessions.alive(request.session_id)
        self._model.check_name(request.base_model)
        self._model.check_lora(request.lora)
        identifier = f"{request.session_id}:train:{request.model_seq_id}"
        lora = request.lora
        if lora.seed is None:
            # Written down, so that a run that has learned nothing yet is the same after a restart.
            lora = LoraSettings(lora.rank, secrets.randbits(31), *(getattr(lora, name) for name in TRAINED))
        record = RunRecord(identifier, request.session_id, request.base_model, lora, request.user_metadata)
        return await self._add(record, {"type": "create_model", "model_id": identifier})

    async def load(self, body: Json) -> Answer:
        """load_weights: into a run, or into a new one."""
        if body.get("model_id") is not None:
            return await self._in_order(body, read_load_weights, self._load_into)
        request = read_load_weights(body)
        assert request.session_id is not None
        self._sessions.alive(request.session_id)
        checkpoint = self._checkpoints.find(request.path)
        name = request.base_model or checkpoint.base_model
        self._model.check_name(name)
        self._model.check_lora(checkpoint.lora)
        identifier = f"{request.session_id}:train:{request.model_seq_id}"
        record = RunRecord(identifier, request.session_id, name, checkpoint.lora, request.user_metadata)
        answer = {"type": "load_weights", "path": str(request.path), "model_id": identifier}
        return await self._add(record, answer, request)

    async def _add(self, record: RunRecord, answer: Answer, load: LoadWeights | None = None) -> Answer:
        """A new run, whose first job builds it."""
        promise = self._promises.find(f"{record.id}:create")
        if promise is not None:
            return promise.submission
        if record.id in self._runs:
            raise invalid("model_seq_id", f"the run {record.id} exists")
        most = self._config.max_runs
        if sum(not run.record.ended for run in self._runs.values()) >= most:
            raise ApiError(
                400,
                f"{most} training runs are open, and the server has room for no more (tinker.max_runs): close a client "
                "(ServiceClient.close), or wait until an idle one's session ends",
                code="too_many_runs",
            )
        run = self._runs[record.id] = TrainingRun(record, self._store)
        promise = self._promises.open(f"{record.id}:create", model_id=record.id)

        async def build() -> Outcome:
            try:
                await run.note()
                await self._build(run)
                if load is not None:
                    await self._load(run, load)
            except BaseException:
                run.lost = "creating this run failed: create a new training client"
                raise
            return json_outcome(answer)

        self.queue.put(Job(run.id, lambda: self._carry_out(promise.id, build)))
        return promise.submission

    async def _build(self, run: TrainingRun) -> None:
        lora = run.record.lora
        assert lora.seed is not None
        await self._trainer.create_run(run.id, rank=lora.rank, alpha=self._config.alpha, seed=lora.seed)
        run.is_built = True

    async def _prepare(self, run: TrainingRun) -> None:
        """Bring a run that the server's predecessor had into the trainer, as it was saved last.

        Raises:
            RequestRefused: its state is lost.
        """
        run.check_open()
        run.check_state()
        if run.is_built:
            return
        saved = self._checkpoints.of(run.record.saved)
        if run.record.saved is not None and saved is None:
            run.lost = f"the server was restarted, and {run.record.saved} was deleted: create a new training client"
            run.check_state()
        await self._build(run)
        if saved is not None:
            await self._trainer.load_run(run.id, self._checkpoints.directory(saved.path), with_optimizer=True)

    async def copy(self, request: CopyWeights, key: str) -> Answer:
        """copy_weights: a checkpoint of a new run, which takes no calls. The two share their files.

        Args:
            key: of the request, so that sending it twice makes one copy.
        """
        source = self._checkpoints.find(request.source, "source_path")
        if request.session_id is not None:
            session = self._sessions.alive(request.session_id)
        else:
            session = await self._sessions.create([], None, key)
        run_id = f"{session.record.id}:train:{request.model_seq_id}"
        path = dataclasses.replace(source.path, run=run_id)
        async with self._copying:
            known = self._runs.get(run_id)
            if known is None:
                await self._checkpoints.copy(source, path, request.ttl_seconds)
                record = RunRecord(
                    run_id,
                    session.record.id,
                    source.base_model,
                    source.lora,
                    user_metadata=None,
                    ended=True,
                    copied_from=str(source.path),
                )
                run = TrainingRun(record, self._store)
                await run.note()
                self._runs[run_id] = run
            elif known.record.copied_from != str(source.path):
                raise invalid("model_seq_id", f"the run {run_id} exists")
        return {"tinker_path": str(path)}

    async def end(self, session_id: str) -> None:
        """Close the runs of a session; their checkpoints stay."""
        for run in [each for each in self._runs.values() if each.record.session_id == session_id]:
            if run.record.ended:
                continue
            await run.note(ended=True)
            for job in run.gate.drain():
                self.queue.put(job)
            self.queue.put(Job(run.id, lambda run=run: self._delete(run)))  # type: ignore[misc]

    async def _delete(self, run: TrainingRun) -> None:
        if run.is_built:
            run.is_built = False
            try:
                await self._trainer.delete_run(run.id)
            except RequestRefused:
                logger.exception("tinker: %s was not deleted", run.id)
        for checkpoint in self._checkpoints.unnamed(run.id):
            await self._checkpoints.delete(checkpoint.path)

    # Calls in order.

    async def forward_backward(self, body: bytes) -> Answer:
        """Accept a batch for a run, in the order of ``seq_id``; a promise of its outputs.

        Raises:
            ApiError: the request is malformed, the run is unknown, or too much is waiting.
        """
        request = await asyncio.to_thread(read_forward_backward, body)
        if request.seq_id < 1:
            raise invalid("seq_id", f"expected a number from 1 on, got {request.seq_id}")
        if self._held_bytes + len(body) > MOST_HELD_BYTES:
            raise ApiError(429, "the learner has fallen behind: try again later", code="busy")
        run = self.find(request.model_id)
        if (known := self._known(run, request.seq_id)) is not None:
            return known
        try:
            batch: _Batch | Exception = await asyncio.to_thread(self._read_batch, request)
        except RequestRefused as error:
            # The call keeps its place: those after it would wait for it for ever.
            batch = error

        async def work() -> Outcome:
            self._held_bytes -= len(body)
            if isinstance(batch, Exception):
                raise batch
            return await self._accumulate(run, request.seq_id, batch)

        if (known := self._known(run, request.seq_id)) is not None:
            return known  # a retry was faster
        answer = self._offer(run, request.seq_id, work)
        self._held_bytes += len(body)
        return answer

    def _read_batch(self, request: ForwardBackward) -> _Batch:
        loss = token_loss(request.loss_fn, request.loss_fn_config, stand_in=self._config.stable_reinforce == "stand_in")
        sequences = target_sequences(
            request.loss_fn, read_data(request), self._model.vocabulary, self._model.longest_sequence
        )
        return _Batch(sequences, loss, request.forward_only, request.loss_fn == "cross_entropy")

    async def _accumulate(self, run: TrainingRun, number: int, batch: _Batch) -> Outcome:
        await self._prepare(run)
        async with run.call(number, changes=not batch.forward_only):
            outputs = await self._trainer.accumulate(
                run.id, batch.sequences, batch.loss, forward_only=batch.forward_only
            )
        run.gathered |= not batch.forward_only
        return Outcome(await asyncio.to_thread(_written, outputs, batch.reports_elements), is_protobuf=True)

    async def optim_step(self, body: Json) -> Answer:
        """Accept an optimizer step; a promise of its metrics."""
        return await self._in_order(body, read_optimizer_step, self._step)

    async def _step(self, run: TrainingRun, number: int, step: OptimizerStep) -> Answer:
        await self._prepare(run)
        async with run.call(number, changes=True):
            result = await self._trainer.apply(run.id, step)
        run.gathered = False
        metrics = {f"{_METRICS.get(name, name)}:mean": value for name, value in result.items()}
        return {"type": "optim_step", "metrics": metrics}

    async def save_weights(self, body: Json) -> Answer:
        """Accept a request to save the run's state; a promise of its path."""
        return await self._in_order(body, read_save_weights, self._save)

    async def _save(self, run: TrainingRun, number: int, request: SaveWeights) -> Answer:
        await self._prepare(run)
        checkpoint = self._checkpoint(run, "weights", request.name or f"step-{number}", request, with_optimizer=True)

        async def fill(directory: Path) -> None:
            await self._trainer.save_run(run.id, directory, with_optimizer=True)

        async with run.call(number, changes=False):
            await self._checkpoints.write(checkpoint, fill, overwrite=request.overwrite)
        # Gathered gradients are in no checkpoint.
        await run.note(saved=str(checkpoint.path), unsaved_calls=int(run.gathered))
        return {"type": "save_weights", "path": str(checkpoint.path)}

    async def save_weights_for_sampler(self, body: Json) -> Answer:
        """Accept a request to save what a sampler reads; a promise of its path."""
        return await self._in_order(body, read_save_weights, self._save_for_sampler)

    async def _save_for_sampler(self, run: TrainingRun, number: int, request: SaveWeights) -> Answer:
        await self._prepare(run)
        if request.name is None and request.sampling_session_seq_id is None:
            raise invalid("path", "give a name, or the number of a sampling session (sampling_session_seq_id)")
        name = request.name or f"unnamed-{number}"
        unnamed = request.name is None
        checkpoint = self._checkpoint(
            run, "sampler_weights", name, request, unnamed=unnamed, inflight=unnamed and request.inflight
        )

        async def fill(directory: Path) -> None:
            await self._trainer.write_adapter(run.id, directory)

        async with run.call(number, changes=False):
            await self._checkpoints.write(checkpoint, fill)
        if request.name is not None:
            return {"type": "save_weights_for_sampler", "path": str(checkpoint.path)}
        session = self._sessions.find(run.record.session_id)
        sampler = SamplerRecord(
            id=f"{session.record.id}:sample:{request.sampling_session_seq_id}",
            base_model=run.record.base_model,
            path=None if request.inflight else checkpoint.path,
            follows=run.id if request.inflight else None,
        )
        await self._sessions.add_sampler(session, sampler)
        followed = self._checkpoints.followed(run.id)
        for old in self._checkpoints.unnamed(run.id)[: -self._config.unnamed_samplers]:
            if old is not followed:
                await self._checkpoints.delete(old.path)
        return {"type": "save_weights_for_sampler", "sampling_session_id": sampler.id}

    async def save_weights_external(self, body: Json) -> Answer:
        """Accept a request to save files for use elsewhere; a promise of their path."""
        return await self._in_order(body, lambda given: read_save_weights(given, external=True), self._save_external)

    async def _save_external(self, run: TrainingRun, number: int, request: SaveWeights) -> Answer:
        await self._prepare(run)
        assert request.name is not None
        checkpoint = self._checkpoint(run, "external_weights", request.name, request)

        async def fill(directory: Path) -> None:
            await self._trainer.write_adapter(run.id, directory)
            if request.recipients:
                await asyncio.to_thread(encrypt_files, directory, request.recipients)

        async with run.call(number, changes=False):
            await self._checkpoints.write(checkpoint, fill)
        return {"type": "save_weights_external", "path": str(checkpoint.path)}

    async def _load_into(self, run: TrainingRun, number: int, request: LoadWeights) -> Answer:
        run.check_open()
        async with run.call(number, changes=True):
            await self._load(run, request)
        return {"type": "load_weights", "path": str(request.path), "model_id": run.id}

    async def _load(self, run: TrainingRun, request: LoadWeights) -> None:
        checkpoint = self._checkpoints.find(request.path)
        if checkpoint.lora.rank != run.record.lora.rank:
            raise RequestRefused(
                f"path: {request.path} has rank {checkpoint.lora.rank}, and the run has {run.record.lora.rank}: call "
                "create_training_client_from_state"
            )
        if not run.is_built:
            await self._build(run)
        await self._trainer.load_run(
            run.id, self._checkpoints.directory(request.path), with_optimizer=request.optimizer
        )
        run.lost, run.gathered = None, False
        # Without the optimizer's state it is another state than the checkpoint's.
        await run.note(saved=str(request.path), unsaved_calls=int(not request.optimizer))

    def _checkpoint(
        self, run: TrainingRun, kind: str, name: str, request: SaveWeights, **more: Any
    ) -> StoredCheckpoint:
        return StoredCheckpoint(
            path=CheckpointPath(run.id, kind, name),
            base_model=run.record.base_model,
            lora=run.record.lora,
            user_metadata=request.user_metadata,
            expires_at=expiry(request.ttl_seconds),
            **more,
        )

    async def _in_order[Request](
        self,
        body: Json,
        read: Callable[[Json], Request],
        work: Callable[[TrainingRun, int, Request], Awaitable[Answer]],
    ) -> Answer:
        """Take a call in. Whatever else is wrong with one that names its run and its number, it keeps its place."""
        run = self.find(required_text(body, "model_id"))
        number = required_integer(body, "seq_id", 1)
        if (known := self._known(run, number)) is not None:
            return known
        try:
            request: Request | Exception = read(body)
        except (ApiError, RequestRefused) as error:
            request = error

        async def done() -> Outcome:
            if isinstance(request, Exception):
                raise request
            return json_outcome(await work(run, number, request))

        return self._offer(run, number, done)

    def _known(self, run: TrainingRun, number: int) -> Answer | None:
        """What a call was answered that has come before."""
        run.check_open()
        if not run.gate.has_passed(number):
            return None
        return {"request_id": f"{run.id}:{number}", "model_id": run.id}

    def _offer(self, run: TrainingRun, number: int, work: Callable[[], Awaitable[Outcome]]) -> Answer:
        run.gate.check_room(number)
        promise = self._promises.open(f"{run.id}:{number}", model_id=run.id)
        job = Job(run.id, lambda: self._carry_out(promise.id, work))
        for ready in run.gate.offer(number, job):
            self.queue.put(ready)
        return promise.submission

    async def _carry_out(self, identifier: str, work: Callable[[], Awaitable[Outcome]]) -> None:
        try:
            outcome = await work()
        except (RequestRefused, ApiError) as error:
            outcome = failure(str(error), by_user=True)
        except Exception as error:
            logger.exception("tinker: %s failed", identifier)
            outcome = failure(clipped(f"{type(error).__name__}: {error}"), by_user=False)
            if isinstance(error, self._fatal) and not self.died.done():
                self.died.set_result(error)
        promise = self._promises.find(identifier)
        if promise is not None:
            self._promises.settle(promise, outcome)

    def skip_missing(self) -> None:
        """Go on with runs that have waited too long for a call that never came."""
        for run in self._runs.values():
            for job in run.skip_missing():
                self.queue.put(job)


_METRICS = {"grad_norm": "unclipped_grad_l2", "lr": "learning_rate"}


def _written(outputs: TokenOutputs, reports_elements: bool) -> bytes:
    arrays = {"logprobs": outputs.log_probs}
    if reports_elements and outputs.elementwise_loss is not None:
        arrays["elementwise_loss"] = outputs.elementwise_loss
    # Clients split a metric's name at its colon, and add up those of a call's parts accordingly.
    metrics = {f"{name}:{'sum' if name == 'loss' else 'mean'}": value for name, value in outputs.metrics.items()}
    return write_outputs(arrays, metrics)
