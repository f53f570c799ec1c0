"""Log-probs of given texts by SGLang's runner of models, without its scheduler and server.

For a process with SGLang whose process groups are there. The runner, its cache and its attention are those that a CPU
engine's scheduler drives: float32, torch_native, and what ``cpu_engine_plugin`` puts in the place of both.
"""

from __future__ import annotations

import array
from types import SimpleNamespace
from typing import Any

import torch

DECODED = 2
"""Tokens at a text's end whose log-probs come from decoding steps."""


class _NoPrefixes(SimpleNamespace):
    """In place of a cache of prefixes: room for only each request's tokens."""

    def supports_prefix_sharing(self) -> bool:
        return False

    def supports_swa(self) -> bool:
        return False

    def supports_mamba(self) -> bool:
        return False

    def maybe_hand_to_session(self, request: Any) -> None:
        pass


def log_probs(directory: str, sequences: list[list[int]]) -> list[list[float]]:
    """Of each sequence's tokens but the first, at temperature 1.

    The sequences are one batch. A half of each is a prompt; what follows comes behind it, as a turn does behind a
    cached prefix; the last ``DECODED`` come one by one.

    Args:
        directory: Hugging Face model, float32 weights.
        sequences: more than 2 * (DECODED + 1) tokens each.
    """
    runner = _runner(directory, sum(map(len, sequences)), len(sequences))
    requests = [_request(number, ids) for number, ids in enumerate(sequences)]
    middles, ends = [len(ids) // 2 for ids in sequences], [len(ids) - 1 - DECODED for ids in sequences]
    with torch.no_grad():
        prompts, _ = _extend(runner, requests, [0] * len(sequences), middles)
        turns, batch = _extend(runner, requests, middles, ends)
        result = [prompt + turn for prompt, turn in zip(prompts, turns, strict=True)]
        for step in range(DECODED):
            decoded = _decode(runner, batch, [ids[end + step :] for ids, end in zip(sequences, ends, strict=True)])
            for each, score in zip(result, decoded, strict=True):
                each.append(score)
    return result


def _runner(directory: str, tokens: int, requests: int) -> Any:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.bootstrap import init_layer_runtime
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    # Those that ``engine.launch_command`` starts a CPU engine with.
    arguments = ServerArgs(
        model_path=directory,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_overlap_schedule=True,
        skip_tokenizer_init=True,
        max_total_tokens=2 * tokens,
        max_running_requests=2 * requests,
        max_mamba_cache_size=6 * requests,  # of models with linear attention
    )
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    initialize_moe_config()
    config = ModelConfig.from_server_args(arguments)
    init_layer_runtime(model_config=config)
    runner = ModelRunner(model_config=config, mem_fraction_static=0.5, gpu_id=0, nccl_port=0, server_args=arguments)
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()  # without CUDA: what runs batches eagerly
    return runner


def _request(number: int, ids: list[int]) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    request = Req(str(number), "", array.array("q", ids), SamplingParams(max_new_tokens=1), return_logprob=True)
    request.full_untruncated_fill_ids = request.origin_input_ids
    return request


def _extend(runner: Any, requests: list[Any], starts: list[int], ends: list[int]) -> tuple[list[list[float]], Any]:
    """Tokens from ``starts`` to ``ends`` into the cache: the log-prob of what follows each of them, and the batch."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    for request, start, end in zip(requests, starts, ends, strict=True):
        request.prefix_len, request.extend_end = start, end
    batch = ScheduleBatch.init_new(
        reqs=requests,
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        tree_cache=_NoPrefixes(
            page_size=runner.page_size,
            device=runner.device,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        ),
        model_config=runner.model_config,
        enable_overlap=False,
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )
    batch.prepare_for_extend()
    batch.input_ids = batch.prefill_input_ids_cpu
    scores = _forward(runner, batch).input_token_logprobs
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    return [part.tolist() for part in scores.split(lengths)], batch


def _decode(runner: Any, batch: Any, rest: list[list[int]]) -> list[float]:
    """The first token of each ``rest`` into the cache: the log-prob of the second."""
    batch.input_ids = torch.tensor([ids[0] for ids in rest])
    batch.prepare_for_decode()
    scores = _forward(runner, batch).next_token_logits.log_softmax(-1)
    return scores.gather(-1, torch.tensor([[ids[1]] for ids in rest]))[:, 0].tolist()


def _forward(runner: Any, batch: Any) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    forward = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
    return runner.forward(forward).logits_output
