"""The server over ``in_process``'s trainer and sampler, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_retool.config import TinkerConfig
from megatron_retool.tinker.served_model import ServedModel
from megatron_retool.tinker.server import TinkerServer
from megatron_retool.tinker.service import TinkerService
from tests.kit.markov_policy import VOCABULARY, build_tokenizer
from tests.tinker.in_process import InProcessSampler, InProcessTrainer

NAME = "Qwen/Qwen3-8B"
CONTEXT = 512


def make_model(directory: Path, context: int = CONTEXT) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,  # SGLang pads others on a CPU, and takes no adapters then
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return directory


class Served:
    """
    Attributes:
        loop: on which the server runs: what touches it from a test goes through ``call``.
    """

    def __init__(self, loop, trainer, sampler, service, server) -> None:
        self.loop, self.trainer, self.sampler, self.service = loop, trainer, sampler, service
        self.url = f"http://127.0.0.1:{server.port}"

    def call(self, function, *arguments):
        async def work():
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(300)


def served_model(model: Path, **changes) -> ServedModel:
    described = ServedModel(
        names=(NAME, "local/tiny"),
        tokenizer=str(model),
        vocabulary=VOCABULARY,
        context=CONTEXT,
        longest_sequence=CONTEXT,
        most_rank=8,
    )
    return dataclasses.replace(described, **changes)


@contextlib.contextmanager
def served(
    model: Path,
    directory: Path,
    config: TinkerConfig | None = None,
    *,
    port: int = 0,
    poll_seconds: float = 2.0,
    **changes,
) -> Iterator[Served]:
    config = config or TinkerConfig()
    trainer, sampler = InProcessTrainer(model), InProcessSampler(model)
    loop = asyncio.new_event_loop()
    ready: list[Served] = []
    started, ended = threading.Event(), asyncio.Event()

    async def work() -> None:
        async with (
            TinkerService(
                config, served_model(model, **changes), trainer, sampler, directory, sweep_seconds=0.2
            ) as service,
            TinkerServer(service, port=port, api_key=config.api_key, poll_seconds=poll_seconds) as server,
        ):
            ready.append(Served(loop, trainer, sampler, service, server))
            started.set()
            await ended.wait()

    def run() -> None:
        try:
            loop.run_until_complete(work())
        finally:
            started.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(300)  # a busy machine
    assert ready, "the server did not start"
    try:
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(300)
        loop.close()
