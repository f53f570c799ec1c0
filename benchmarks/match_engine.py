"""What learner.match_engine=exact costs: CPU time of the learner and of an engine, against none.

    python benchmarks/match_engine.py                          # the demo's shape in bfloat16
    python benchmarks/match_engine.py --dtype float32 --requests 8
    python benchmarks/match_engine.py --family qwen3_5_text    # gated delta nets in three of four layers

The learner takes log-probs of random responses and makes an update from them; the engine answers some prompts, all at a
time, with the same number of tokens. Both forms alternate. Needs no GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learner_work import (
    SHAPES,
    add_batch_arguments,
    in_turns,
    learner_settings,
    long_tailed_batch,
    print_ratios,
    random_learner,
)
from conversion.model.architecture import Architecture
from conversion.model.model_operators import OPERATORS
from megatron_retool.config import EngineConfig
from megatron_retool.config.rollout import SamplingConfig
from megatron_retool.parity.admission.tiny_model import random_model, save_model
from sglang_rollout.engine.base import GenerateRequest, StopConditions
from sglang_rollout.engine.client import SGLangClient
from sglang_rollout.engine.process import SGLangServer

FORMS = ("none", "exact")
FAMILIES: dict[str, dict[str, object]] = {
    "qwen2": {"pad_token_id": None},
    "qwen3_5_text": {
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "pad_token_id": None,
    },
}


def model_config(options: argparse.Namespace) -> dict[str, object]:
    family = FAMILIES[options.family]
    return {"model_type": options.family, "max_position_embeddings": 32768, **SHAPES[options.shape], **family}


def learner_seconds(options: argparse.Namespace) -> dict[str, list[float]]:
    """CPU seconds of log-probs and an update, by form."""
    architecture = Architecture.from_hf_config(model_config(options))
    batch = long_tailed_batch(options, architecture.vocab_size)
    count = batch.num_response_tokens
    columns = {"advantages": np.full(count, 0.1), "loss_weights": batch.loss_mask / batch.loss_mask.sum()}
    settings = {"dtype": options.dtype, **learner_settings(options)}
    learners = {form: random_learner(architecture, lr=1e-4, match_engine=form, **settings) for form in FORMS}

    def step(form: str) -> None:
        old = learners[form].log_probs(batch)["log_probs"]
        learners[form].update(batch.with_columns(old_log_probs=old, **columns))

    device = torch.device("cpu")
    result = in_turns({form: lambda form=form: step(form) for form in FORMS}, options.steps, 2, device)
    return {form: [each.of(device) for each in times] for form, times in result.items()}


def engine_seconds(options: argparse.Namespace) -> dict[str, list[float]]:
    """CPU seconds of an engine's processes for one round of answers, by form."""
    shape, described = SHAPES[options.shape], model_config(options)
    config = EngineConfig(
        device="cpu", dtype=options.dtype, max_total_tokens=65536, max_running_requests=options.requests
    )
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = random_model(described).to(getattr(torch, options.dtype))
        save_model(model, directory / "model", {**described, "dtype": options.dtype})
        engines = {
            form: stack.enter_context(
                SGLangServer(
                    config,
                    model_path=directory / "model",
                    log_file=directory / f"{form}.log",
                    exact_operators=OPERATORS if form == "exact" else (),
                )
            )
            for form in FORMS
        }
        for repetition in range(options.steps + 2):
            for form in FORMS[:: 1 if repetition % 2 else -1]:
                before = processor_seconds(engines[form])
                asyncio.run(answers(engines[form].base_url, shape["vocab_size"], repetition, options))
                if repetition >= 2:
                    seconds[form].append(processor_seconds(engines[form]) - before)
    return seconds


async def answers(url: str, vocabulary: int, seed: int, options: argparse.Namespace) -> None:
    rng = np.random.default_rng(seed)
    sampling, stop = SamplingConfig(), StopConditions(end_of_sequence=False)
    prompts = rng.integers(0, vocabulary, (options.requests, options.prompt_tokens)).tolist()
    async with SGLangClient(url) as client:
        requests = [GenerateRequest(prompt, options.answer_tokens, sampling, stop) for prompt in prompts]
        await asyncio.gather(*(client.generate(request) for request in requests))


def processor_seconds(engine: SGLangServer) -> float:
    processes = psutil.Process(engine.pid).children(recursive=True)
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_batch_arguments(parser)
    parser.add_argument("--shape", choices=("demo", "small"), default="demo")
    parser.add_argument("--family", choices=FAMILIES, default="qwen2")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--answer-tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    print(f"{options.family}, {options.shape}, {options.dtype}, CPU time of one thread")
    for name, measure in (("learner", learner_seconds), ("engine", engine_seconds)):
        ratios = print_ratios({f"{name}, {form}": result for form, result in measure(options).items()})
        print(f"{name}: {1 / ratios[f'{name}, exact']:.2f} of the speed without")
    print(f"{time.perf_counter() - began:.0f} s in all", file=sys.stderr)


if __name__ == "__main__":
    main()
