"""Rollout throughput on this machine, and what the agent loop costs over bare /generate requests.

    python benchmarks/rollout_throughput.py [--trajectories 128] [--rounds 5]

A model of the demo's size runs in a real SGLang server. First the rollout manager samples groups, with tool calls in
several turns; then the very same requests (ids in, number of ids out, order within a trajectory) are sent with a bare
HTTP client. The difference is routing, parsing, tokenising results and bookkeeping. Sampling is seeded, so every round
is the same work, and the fastest round of each kind is compared: other processes only ever make a round slower.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiohttp
import orjson

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_retool.config import SamplingConfig, load_config
from sglang_rollout.engine.base import GenerateRequest, GenerateResult
from sglang_rollout.engine.client import SGLangClient
from sglang_rollout.engine.key import authorization
from sglang_rollout.engine.process import SGLangServer
from sglang_rollout.rollout_manager import RolloutManager
from tests.kit.markov_policy import CALL, Table, build_tokenizer, save, table_model
from tests.kit.scripted import Prompt, ScriptedTools

# Turns of about 35 tokens; half of them end with a tool call.
POLICY: Table = {
    "\n": {"word": 1.0},
    "word": {"word": 0.97, CALL: 0.015, "\\boxed{42}": 0.015},
    CALL: {"<|im_end|>": 1.0},
    "\\boxed{42}": {"<|im_end|>": 1.0},
}
CONFIG = [
    "rollout.engine.device=cpu",
    "rollout.engine.dtype=float32",
    "rollout.engine.max_total_tokens=131072",
    "rollout.engine.max_running_requests=512",
    "rollout.multi_turn.max_tool_response_tokens=64",
    "data.max_response_length=600",
]
SEED = "rollout.engine.random_seed=0"


class Recorder:
    """Keeps every request of a trajectory as (input ids, ids sampled), in order."""

    def __init__(self) -> None:
        self.requests: dict[tuple[int, ...], list[tuple[list[int], int]]] = defaultdict(list)
        self._generate = SGLangClient.generate

    def install(self) -> None:
        recorder = self

        async def generate(client: SGLangClient, request: GenerateRequest, **kwargs: Any) -> GenerateResult:
            result = await recorder._generate(client, request, **kwargs)
            recorder.requests[(request.seed or 0,)].append((list(request.input_ids), len(result.output_ids)))
            return result

        SGLangClient.generate = generate

    def remove(self) -> None:
        SGLangClient.generate = self._generate


async def replay(url: str, chains: list[list[tuple[list[int], int]]]) -> int:
    """The recorded requests with nothing around them; tokens sampled."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=authorization()) as session:

        async def chain(requests: list[tuple[list[int], int]]) -> int:
            tokens = 0
            for input_ids, count in requests:
                sampling = {"temperature": 1.0, "max_new_tokens": count, "ignore_eos": True}
                body = {"input_ids": input_ids, "return_logprob": True, "sampling_params": sampling}
                async with session.post(
                    url + "/generate", data=orjson.dumps(body), headers={"Content-Type": "application/json"}
                ) as response:
                    tokens += len(orjson.loads(await response.read())["output_ids"])
            return tokens

        return sum(await asyncio.gather(*(chain(requests) for requests in chains)))


async def measure(engine: SGLangServer, tokenizer: Any, trajectories: int, rounds: int) -> None:
    config = load_config(None, [*CONFIG, SEED])
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 6*7?"}], tokenize=False, add_generation_prompt=True
    )
    prompt_ids = tokenizer.encode(text, add_special_tokens=False)
    prompts = [Prompt(prompt_ids, group) for group in range(trajectories // 8)]
    loop_times, bare_times, loop_cpu, bare_cpu = [], [], [], []
    async with (
        SGLangClient(engine.base_url) as client,
        RolloutManager(config, tokenizer, [engine.base_url], ScriptedTools()) as manager,
    ):
        for round_index in range(rounds + 1):
            recorder = Recorder()
            recorder.install()
            await client.flush_cache()
            before, began, cpu = manager.statistics.sampled_tokens, time.perf_counter(), time.process_time()
            groups = await manager.generate_groups(prompts, SamplingConfig(n=8))
            loop_seconds, loop_cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
            recorder.remove()
            sampled = manager.statistics.sampled_tokens - before
            await client.flush_cache()
            began, cpu = time.perf_counter(), time.process_time()
            tokens = await replay(engine.base_url, list(recorder.requests.values()))
            bare_seconds, bare_cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
            if tokens != sampled:
                raise SystemExit(f"the replay sampled {tokens} tokens instead of {sampled}")
            if round_index:  # the first round warms up
                loop_times.append(loop_seconds)
                bare_times.append(bare_seconds)
                loop_cpu.append(loop_cpu_seconds)
                bare_cpu.append(bare_cpu_seconds)
        turns = statistics.mean(t.num_turns for group in groups for t in group)
        lengths = statistics.mean(len(t.response_ids) for group in groups for t in group)
    loop_best, bare_best = min(loop_times), min(bare_times)
    print(
        f"{trajectories} trajectories, {sampled / trajectories:.0f} sampled of {lengths:.0f} response tokens, "
        f"{turns:.1f} turns\n"
        f"rollout manager: {sampled / loop_best:.0f} tokens/s ({loop_best:.2f} s, client CPU {min(loop_cpu):.2f} s)\n"
        f"bare requests:   {sampled / bare_best:.0f} tokens/s ({bare_best:.2f} s, client CPU {min(bare_cpu):.2f} s)\n"
        f"overhead {100 * (loop_best / bare_best - 1):.1f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    tokenizer = build_tokenizer()
    with tempfile.TemporaryDirectory() as directory:
        model = save(table_model(tokenizer, POLICY), tokenizer, Path(directory) / "model")
        config = load_config(None, [*CONFIG, SEED])
        engine = SGLangServer(config.rollout.engine, model_path=model, log_file=Path(directory) / "engine.log")
        began = time.perf_counter()
        engine.start()
        print(f"engine ready after {time.perf_counter() - began:.1f} s")
        try:
            asyncio.run(measure(engine, tokenizer, arguments.trajectories, arguments.rounds))
        finally:
            engine.stop()


if __name__ == "__main__":
    main()
