"""Every way of new weights from the learner into a running engine: checksums, and log-probs afterwards."""

from __future__ import annotations

import torch

from megatron_retool.parity.doctor import model
from megatron_retool.parity.doctor.engine_steps import engine_config, engine_url, score_figures
from megatron_retool.parity.doctor.learner_steps import MeasuredLearner, make_learner
from megatron_retool.parity.doctor.outcome import StepFigure
from megatron_retool.parity.doctor.session import DoctorSession
from sglang_rollout.engine.configured import make_engine

VERSIONS = {"disk": 11, "tensor": 12, "distributed": 13}
"""Each method's own weights, so that none passes with those of another."""


def disk(session: DoctorSession) -> list[StepFigure]:
    """Send weights through files, and compare the engine's checksums."""
    return send(session, "disk")


def tensor(session: DoctorSession) -> list[StepFigure]:
    """Send weights through shared memory or CUDA IPC, and compare the engine's checksums."""
    return send(session, "tensor")


def distributed(session: DoctorSession) -> list[StepFigure]:
    """Broadcast weights in a process group, and compare the engine's checksums."""
    if session.gpus:
        session.need_gpus(2, "NCCL takes no two processes on one GPU: a broadcast from learner to engine")
    return send(session, "distributed")


def send(session: DoctorSession, method: str) -> list[StepFigure]:
    """Weights that the engine has not, by ``method``; then it has to compute what the learner does."""
    config = engine_config(session, model.EXPERTS, f"weight_sync.method={method}", "weight_sync.bucket_bytes=4194304")
    learner = make_learner(config)
    change(learner, VERSIONS[method])
    url = engine_url(session)
    sync = make_engine(config).weight_sync([url])
    try:
        report = sync.push(learner.export_weights(config.weight_sync.bucket_bytes), VERSIONS[method])
    finally:
        sync.close()
    return [
        StepFigure("tensors sent", report.tensors, at_least=1),
        # The engine fuses some: q, k and v, gate and up.
        StepFigure("engine tensors with the right checksum", report.verified_tensors, at_least=5 * model.LAYERS),
        StepFigure("seconds of the sync", report.seconds, "s"),
        *score_figures(config, learner, url),
    ]


def change(learner: MeasuredLearner, seed: int) -> None:
    """Other weights, by a tenth of each tensor's own spread and more."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for chunk in learner.model_chunks:
            for parameter in chunk.parameters():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.add_(noise, alpha=0.03)
