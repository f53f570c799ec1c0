"""Learner and engine on the same GPU: who sleeps gives its memory back."""

from __future__ import annotations

import numpy as np
import torch

from megatron_retool.parity.doctor import model
from megatron_retool.parity.doctor.engine_steps import ask, engine_config, engine_url
from megatron_retool.parity.doctor.learner_steps import make_learner
from megatron_retool.parity.doctor.outcome import StepFigure
from megatron_retool.parity.doctor.session import DoctorSession
from megatron_retool.parity.doctor.sync_steps import send
from sglang_rollout.engine.base import Memory
from sglang_rollout.engine.client import SGLangClient

ALL = (Memory.KV_CACHE, Memory.WEIGHTS)
_GIB = 2**30


def sleep_wake(session: DoctorSession) -> list[StepFigure]:
    """Free memory of the engine's GPU around its sleep; the learner's around its offload; then both compute on."""
    session.need_gpus(1, "memory that is given back")
    url, gpu = engine_url(session), session.gpus - 1

    async def sleep(client: SGLangClient) -> None:
        await client.sleep(ALL)

    async def wake(client: SGLangClient) -> None:
        await client.wake(ALL)

    before = _free(gpu)
    ask(url, sleep)
    asleep = _free(gpu)
    ask(url, wake)
    awake = _free(gpu)
    config = engine_config(session, model.EXPERTS)
    learner = make_learner(config)
    batch = model.mini_batch()
    log_probs = learner.log_probs(batch)["log_probs"]
    # Of these every rank keeps main gradients in float32.
    sizes = [(each.numel(), each.element_size()) for chunk in learner.model_chunks for each in chunk.parameters()]
    expected = sum(count * (size + 4) for count, size in sizes)
    held = torch.cuda.memory_allocated()
    learner.offload("weights", "optimizer", "gradients")
    left = torch.cuda.memory_allocated()
    learner.reload("weights", "optimizer", "gradients")
    again = learner.log_probs(batch)["log_probs"]
    learner.close()
    figures = [
        StepFigure("the engine's sleep gives back", (asleep - before) / _GIB, "GiB", at_least=1.0),
        StepFigure("of which it takes again", (asleep - awake) / max(asleep - before, 1), at_least=0.9),
        StepFigure("the learner's offload gives back", (held - left) / expected, "of its weights", at_least=0.9),
        # Atomic sums may order themselves otherwise; empty weights differ by whole nats.
        StepFigure(
            "log-probs afterwards, mean difference", float(np.abs(again - log_probs).mean()), "nats", at_most=0.02
        ),
    ]
    # Weights wake empty: they are sent again, and then the engine computes as before.
    return figures + send(session, "tensor")


def _free(gpu: int) -> int:
    """Free bytes of the GPU."""
    return torch.cuda.mem_get_info(gpu)[0]
