"""The check of a first weight sync, on a real engine and transformers' model in the place of the learner, of which
tests/parity says that it computes the same."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from rich.console import Console

from megatron_retool.cluster.log_prob_check import LogProbCheck
from megatron_retool.config import Config
from megatron_retool.trajectory import TrajectoryBatch
from sglang_rollout.engine.client import SGLangClient


class ModelLearner:
    def __init__(self, model: Any) -> None:
        self.model = model

    async def log_probs(self, batch: TrajectoryBatch, *, sampling: Any) -> dict[str, Any]:
        ids = torch.tensor([[*batch.prompt_ids.tolist(), *batch.response_ids.tolist()]])
        with torch.no_grad():
            log_probs = self.model(ids).logits[0, :-1].float().log_softmax(-1)
        return {"log_probs": log_probs.gather(-1, ids[0, 1:, None])[:, 0].numpy()}


def compare(config: Config, tokenizer: Any, url: str, model: Any) -> dict[str, float]:
    """weight_sync/log_prob_difference_{mean,max}.

    Raises:
        LogProbMismatch: the engine at ``url`` and ``model`` differ.
    """
    console = Console(record=True, width=500)
    check = LogProbCheck(config, tokenizer, SGLangClient, console)

    async def run() -> dict[str, float]:
        await check.score_by(ModelLearner(model), [url])
        await check.compare()
        assert "not compared" not in console.export_text()
        return check.take_metrics()

    return asyncio.run(run())
