"""A supervised run through Tinker's client is the run that `megatron-retool sft` makes of the same adapter."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_retool.cluster.learner_group import LearnerGroup
from megatron_retool.cluster.placement import plan_placement
from megatron_retool.cluster.runtime import ray_runtime
from megatron_retool.config import Config, LoraConfig, OptimizerConfig
from megatron_retool.data.sft_dataset import BatchOrder, SFTDataset
from megatron_retool.data.tokenizer import load_tokenizer
from megatron_retool.sft.launch import fine_tune
from megatron_retool.tinker.served_model import ServedModel
from megatron_retool.tinker.server import TinkerServer
from megatron_retool.tinker.service import TinkerService
from megatron_retool.trajectory import TrajectoryBatch
from tests.data.conftest import demo_directory  # noqa: F401
from tests.sft.conftest import QUIET, config_of, losses, with_sft
from tests.tinker.in_process import InProcessSampler

tinker = pytest.importorskip("tinker", reason="the client of Tinker is not installed (pyproject.toml, extra test)")
from tinker import types  # noqa: E402

NAME, STEPS, RANK = "local/demo", 5, 8
OPTIMIZER = OptimizerConfig(lr=1e-2, betas=[0.9, 0.98], eps=1e-8, weight_decay=0.01, clip_grad=1.0)


def configuration(demo: Path, runs_dir: Path) -> Config:
    config = config_of(demo, runs_dir)
    stage = dataclasses.replace(config.sft.stages[1], steps=STEPS, optimizer=OPTIMIZER, val_files=[])
    lora = LoraConfig(rank=RANK, targets=["attention", "mlp"], seed=3)
    learner = dataclasses.replace(config.learner, lora=lora, world_size=1)
    return dataclasses.replace(with_sft(config, stages=[stage]), learner=learner)


def data(batch: TrajectoryBatch) -> list[Any]:
    """The batch's conversations as the client sends them: the loss is the mean over its trained tokens."""
    found = []
    prompts = np.split(batch.prompt_ids, np.cumsum(batch.prompt_lengths)[:-1])
    ends = np.cumsum(batch.response_lengths)[:-1]
    responses, weights = np.split(batch.response_ids, ends), np.split(batch.columns["loss_weights"], ends)
    for prompt, response, weight in zip(prompts, responses, weights, strict=True):
        ids = np.concatenate([prompt, response]).astype(np.int64)
        whole = np.concatenate([np.zeros(len(prompt)), weight]).astype(np.float32)
        inputs = {"target_tokens": ids[1:], "weights": whole[1:]}
        found.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(ids[:-1].tolist()),
                loss_fn_inputs={name: types.TensorData.from_numpy(values) for name, values in inputs.items()},
            )
        )
    return found


async def through_tinker(config: Config, batches: list[TrajectoryBatch], directory: Path) -> list[float]:
    model = ServedModel((NAME,), config.model.path, 512, 512, 512, RANK)
    step = types.AdamParams(
        learning_rate=OPTIMIZER.lr, beta1=0.9, beta2=0.98, eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0
    )

    def train(url: str) -> list[float]:
        client = tinker.ServiceClient(base_url=url, api_key="tml-local")
        run = client.create_lora_training_client(base_model=NAME, rank=RANK, seed=3).result()
        found = []
        for batch in batches:
            gradients = run.forward_backward(data(batch), "cross_entropy")
            run.optim_step(step).result()
            found.append(gradients.result().metrics["loss:sum"])
        return found

    with ray_runtime(config.cluster):
        group = LearnerGroup(config, plan_placement(config))
        try:
            await group.setup(1)
            async with (
                TinkerService(
                    config.tinker, model, group, InProcessSampler(Path(config.model.path)), directory
                ) as served,
                TinkerServer(served) as server,
            ):
                return await asyncio.to_thread(train, f"http://127.0.0.1:{server.port}")
        finally:
            group.kill()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_both_ways_learn_the_same(demo_directory: Path, tmp_path: Path) -> None:  # noqa: F811
    config = configuration(demo_directory, tmp_path)
    fine_tune(config, QUIET)
    stage = config.sft.stages[0]
    dataset = SFTDataset(stage.train_files, load_tokenizer(config.model), stage.max_length)
    order = BatchOrder(len(dataset), stage.batch_size, (config.trainer.seed, 0))
    batches = [dataset.batch(order.rows(number)) for number in range(STEPS)]
    found = asyncio.run(through_tinker(config, batches, tmp_path / "tinker"))
    expected = losses(config)
    assert expected[-1] < 0.95 * expected[0]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
