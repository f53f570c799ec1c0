"""What one step through the Tinker server takes beside Learner.update of the same tokens.

    python benchmarks/tinker_server.py                         # the demo's shape
    python benchmarks/tinker_server.py --shape small --bar 1.2

Two learners as a run has them (ranks under Ray), with the same adapters, in turns: one is asked for updates, the other
by Tinker's public client through the server (forward_backward with PPO's loss, and optim_step). It prints medians of
the clock, and the ratio within a turn. With --bar it fails where the ratio is above.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tinker
from tinker import types

from benchmarks.accumulation import as_sequences, with_columns
from benchmarks.learner_work import SHAPES, add_batch_arguments, long_tailed_batch, print_ratios
from megatron_retool.algorithms.settings import SamplingSettings
from megatron_retool.cluster.learner_group import LearnerGroup
from megatron_retool.cluster.placement import plan_placement
from megatron_retool.cluster.runtime import ray_runtime
from megatron_retool.config import Config, load_config
from megatron_retool.target_sequences import TargetSequence
from megatron_retool.tinker.served_model import ServedModel
from megatron_retool.tinker.server import TinkerServer
from megatron_retool.tinker.service import TinkerService

NAME = "local/benchmark"


def datum(sequence: TargetSequence) -> types.Datum:
    """A sequence as the client sends it."""
    columns = {"logprobs": sequence.columns["rollout_log_probs"], "advantages": sequence.columns["advantages"]}
    inputs = {"target_tokens": sequence.targets, **columns}
    return types.Datum(
        model_input=types.ModelInput.from_ints(sequence.tokens.tolist()),
        loss_fn_inputs={name: types.TensorData.from_numpy(values) for name, values in inputs.items()},
    )


def configuration(options: argparse.Namespace, directory: Path) -> Config:
    """A random model of the shape, and settings for it."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SHAPES[options.shape])).save_pretrained(directory / "model")
    return load_config(
        None,
        [
            f"model.path={directory / 'model'}",
            f"trainer.runs_dir={directory}",
            "trainer.experiment_name=run",
            "learner.dtype=float32",
            f"learner.lora.rank={options.rank}",
            "learner.lora.targets=[attention,mlp]",
            f"learner.max_tokens_per_micro_batch={options.max_tokens_per_micro_batch}",
            "algorithm.loss_aggregation=token-mean",
        ],
    )


async def measure(options: argparse.Namespace, directory: Path) -> dict[str, list[float]]:
    """Seconds of each side, by turn."""
    config = configuration(options, directory)
    vocabulary = SHAPES[options.shape]["vocab_size"]
    batch = with_columns(long_tailed_batch(options, vocabulary))
    data = [datum(each) for each in as_sequences(batch)]
    most = int(batch.total_lengths.max())
    model = ServedModel((NAME,), str(directory / "model"), vocabulary, most, most, options.rank)
    with ray_runtime(config.cluster):
        updating, serving = (LearnerGroup(config, plan_placement(config)) for _ in range(2))
        try:
            await asyncio.gather(updating.setup(10_000), serving.setup(1))
            async with (
                TinkerService(config.tinker, model, serving, _NoSampler(), directory / "kept") as service,
                TinkerServer(service) as server,
            ):
                url = f"http://127.0.0.1:{server.port}"
                client = await asyncio.to_thread(tinker.ServiceClient, base_url=url, api_key="tml-local")
                run = await asyncio.to_thread(
                    lambda: client.create_lora_training_client(base_model=NAME, rank=options.rank).result()
                )

                def step() -> None:
                    gradients = run.forward_backward(data, "ppo")
                    stepped = run.optim_step(types.AdamParams(learning_rate=1e-4, grad_clip_norm=1.0))
                    gradients.result()
                    stepped.result()

                sides = {
                    "update": lambda: updating.update(batch, sampling=SamplingSettings()),
                    "through the server": lambda: asyncio.to_thread(step),
                }
                print(f"{options.shape}, rank {options.rank}, {int(batch.total_lengths.sum())} tokens, wall time")
                return await in_turns(sides, options.steps)
        finally:
            updating.kill()
            serving.kill()


async def in_turns(sides: dict[str, Callable[[], Awaitable[Any]]], steps: int) -> dict[str, list[float]]:
    """``steps`` times of each side after two that do not count, first one and then the other first."""
    result: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(steps + 2):
        for name in list(sides) if turn % 2 else reversed(list(sides)):
            start = time.perf_counter()
            await sides[name]()
            if turn > 1:
                result[name].append(time.perf_counter() - start)
    return result


class _NoSampler:
    """This server is asked to train only."""

    async def load_adapter(self, name: str, directory: Path) -> None:
        raise NotImplementedError

    async def unload_adapter(self, name: str) -> None:
        raise NotImplementedError

    async def sample(self, adapter: str | None, request: Any) -> Any:
        raise NotImplementedError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="demo")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--bar", type=float)
    add_batch_arguments(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        seconds = asyncio.run(measure(options, Path(directory)))
    ratio = print_ratios(seconds)["through the server"]
    if options.bar is not None and ratio > options.bar:
        raise SystemExit(f"ratio {ratio:.2f} is above --bar {options.bar}")


if __name__ == "__main__":
    main()
