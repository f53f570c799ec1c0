"""What ends by itself: sessions without a sign of life, unnamed snapshots, calls that wait for one that is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_retool.config import TinkerConfig
from megatron_retool.target_sequences import RequestRefused
from megatron_retool.tinker import training_run
from megatron_retool.tinker.messages import MESSAGES
from megatron_retool.tinker.requests import read_create_model
from megatron_retool.tinker.service import TinkerService
from megatron_retool.tinker.wire import tensor_message
from sglang_rollout.gateway.errors import ApiError
from tests.tinker.in_process import InProcessSampler, InProcessTrainer
from tests.tinker.served import NAME, served_model


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def lives(model: Path, kept: Path, work, **settings) -> None:
    """Run ``work(service, trainer, session_id, model_id)`` with one run."""

    async def main() -> None:
        trainer = InProcessTrainer(model)
        service = TinkerService(
            TinkerConfig(**settings), served_model(model), trainer, InProcessSampler(model), kept, sweep_seconds=0.05
        )
        async with service:
            session = (await service.sessions.create([], None, "")).record.id
            body = {"session_id": session, "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 2}}
            answer = await service.training.create(read_create_model(body))
            assert await service.training.create(read_create_model(body)) == answer
            await service.promises.wait(answer["request_id"], 20)
            await work(service, trainer, session, answer["model_id"])

    asyncio.run(main())


async def result(service: TinkerService, answer) -> bytes:
    return (await service.promises.wait(answer["request_id"], 20)).payload


def lesson_of(model_id: str, number: int) -> bytes:
    message = MESSAGES["ForwardBackwardRequest"](model_id=model_id, seq_id=number, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().text.tokens = np.array([1, 2], np.int32).tobytes()
    datum.loss_fn_inputs["target_tokens"].CopyFrom(tensor_message(np.array([2, 3])))
    return bytes(message.SerializeToString())


def test_a_session_without_a_sign_of_life_ends_with_its_runs(model_directory, tmp_path):
    async def work(service, trainer, session, model_id):
        await until(lambda: ("delete_run", model_id) in trainer.calls)
        with pytest.raises(ApiError) as raised:
            service.sessions.alive(session)
        assert raised.value.status == 410
        with pytest.raises(ApiError, match="the run's session has ended"):
            await service.training.optim_step({"model_id": model_id, "seq_id": 1, "adam_params": {}})

    lives(model_directory, tmp_path, work, session_timeout_seconds=0.5)


def test_the_newest_snapshots_without_a_name_are_kept(model_directory, tmp_path):
    async def work(service, trainer, session, model_id):
        for number in range(1, 6):
            body = {
                "model_id": model_id,
                "seq_id": number,
                "sampling_session_seq_id": number,
                "kind": "inflight" if number == 1 else "snapshot",
            }
            assert b"sampling_session_id" in await result(
                service, await service.training.save_weights_for_sampler(body)
            )
        # The second and third made way; the first is what a session follows.
        names = [each.path.name for each in service.checkpoints.unnamed(model_id)]
        assert names == ["unnamed-1", "unnamed-4", "unnamed-5"]
        assert service.checkpoints.named(model_id) == []
        sample = {
            "sampling_session_id": f"{session}:sample:2",
            "seq_id": 0,
            "prompt": {"chunks": [{"tokens": [1]}]},
            "sampling_params": {"max_tokens": 1},
        }
        with pytest.raises(ApiError, match="there is no checkpoint .*unnamed-2"):
            await service.sampling.sample(sample)
        for number in (1, 5):
            sample["sampling_session_id"] = f"{session}:sample:{number}"
            assert await result(service, await service.sampling.sample(sample))

    lives(model_directory, tmp_path, work, unnamed_samplers=2)


def test_calls_after_one_that_is_lost_fail_instead_of_waiting(model_directory, tmp_path, monkeypatch):
    monkeypatch.setattr(training_run, "GAP_SECONDS", 0.3)

    async def work(service, trainer, session, model_id):
        late = await service.training.optim_step({"model_id": model_id, "seq_id": 3, "adam_params": {}})
        assert b"calls 1 to 2 of this run did not reach the server" in await result(service, late)
        assert ("apply", model_id) not in trainer.calls

    lives(model_directory, tmp_path, work)


def test_a_call_that_is_refused_leaves_nothing_unsaved(model_directory, tmp_path):
    async def work(service, trainer, session, model_id):
        run = service.training.find(model_id)
        trainer.broken = RequestRefused("a loss of one's own says no")
        assert b"says no" in await result(service, await service.training.forward_backward(lesson_of(model_id, 1)))
        assert (run.record.unsaved_calls, run.record.next_call) == (0, 2)
        await result(service, await service.training.forward_backward(lesson_of(model_id, 2)))
        assert (run.record.unsaved_calls, run.gathered) == (1, True)
        body = {"model_id": model_id, "seq_id": 3, "path": "with-gradients"}
        await result(service, await service.training.save_weights(body))
        assert run.record.unsaved_calls == 1, "gathered gradients are in no checkpoint"
        await result(service, await service.training.optim_step({"model_id": model_id, "seq_id": 4, "adam_params": {}}))
        await result(service, await service.training.save_weights({**body, "seq_id": 5, "path": "without"}))
        assert (run.record.unsaved_calls, run.record.saved) == (0, f"tinker://{model_id}/weights/without")

    lives(model_directory, tmp_path, work)


def test_a_server_has_room_for_some_runs(model_directory, tmp_path):
    async def work(service, trainer, session, model_id):
        body = {"session_id": session, "model_seq_id": 1, "base_model": NAME, "lora_config": {"rank": 2}}
        with pytest.raises(ApiError, match=r"1 training runs are open, .* \(tinker.max_runs\)"):
            await service.training.create(read_create_model(body))

    lives(model_directory, tmp_path, work, max_runs=1)


def test_a_checkpoint_expires(model_directory, tmp_path):
    async def work(service, trainer, session, model_id):
        body = {"model_id": model_id, "seq_id": 1, "path": "short"}
        await result(service, await service.training.save_weights(body))
        (found,) = service.checkpoints.named(model_id)
        await service.checkpoints.change(found, ttl=(0,))
        assert service.checkpoints.named(model_id) == []
        await until(lambda: not service.checkpoints.directory(found.path).exists())

    lives(model_directory, tmp_path, work)


def test_a_checkpoint_that_is_deleted_while_it_changes(model_directory, tmp_path, monkeypatch):
    async def work(service, trainer, session, model_id):
        await result(service, await service.training.save_weights({"model_id": model_id, "seq_id": 1, "path": "short"}))
        (found,) = service.checkpoints.named(model_id)
        store, write = service.checkpoints._store, service.checkpoints._store.write_checkpoint

        def write_too_late(checkpoint):
            store.delete(checkpoint.path)
            write(checkpoint)

        monkeypatch.setattr(store, "write_checkpoint", write_too_late)
        with pytest.raises(RequestRefused, match="was deleted meanwhile"):
            await service.checkpoints.change(found, public=True)
        assert not service.checkpoints.directory(found.path).exists()

    lives(model_directory, tmp_path, work)


def test_a_trainer_that_died_ends_the_server(model_directory, tmp_path):
    class Died(RuntimeError): ...

    async def main() -> None:
        trainer = InProcessTrainer(model_directory)
        service = TinkerService(
            TinkerConfig(),
            served_model(model_directory),
            trainer,
            InProcessSampler(model_directory),
            tmp_path,
            fatal=(Died,),
        )
        async with service:
            session = (await service.sessions.create([], None, "")).record.id
            body = {"session_id": session, "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 2}}
            model_id = (await service.training.create(read_create_model(body)))["model_id"]
            dies = asyncio.create_task(service.until_it_dies())
            trainer.broken = Died("rank 0 is gone")
            answer = await service.training.forward_backward(lesson_of(model_id, 1))
            assert b"rank 0 is gone" in await result(service, answer)
            with pytest.raises(Died, match="rank 0 is gone"):
                await asyncio.wait_for(dies, 10)

    asyncio.run(main())
