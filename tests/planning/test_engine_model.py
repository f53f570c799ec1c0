"""The decode model against published latencies and its own limits."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_retool.config import EngineConfig
from megatron_retool.config.rollout import SpeculativeConfig
from megatron_retool.planning.engine_model import CPU_PROFILE, GPU_PROFILE, EngineModel
from megatron_retool.planning.hardware import ACCELERATORS, GIB, Machines, parse_machines
from megatron_retool.planning.models import preset

H100 = ACCELERATORS["H100"]
NODE = Machines(H100, 8, 8)

# ML.ENERGY leaderboard (github.com/ml-energy/leaderboard, public/data/tasks, February 2026): vLLM, bf16, H100.
# model, GPUs, mean batch, mean output tokens, output tokens/s. Prompts have about 300 tokens.
LOOKED_AT = [
    ("qwen3-32b", 2, 8, 631, 522), ("qwen3-32b", 2, 64, 635, 2654), ("qwen3-32b", 2, 256, 634, 5155),
    ("qwen3-8b", 1, 8, 647, 962), ("qwen3-8b", 1, 128, 641, 5930), ("qwen3-8b", 1, 383, 648, 8258),
    ("llama3.1-70b", 4, 8, 350, 470), ("llama3.1-70b", 4, 128, 359, 3876), ("llama3.1-70b", 4, 511, 350, 5921),
    ("qwen3-30b-a3b", 2, 8, 901, 831), ("qwen3-30b-a3b", 2, 128, 919, 4546), ("qwen3-30b-a3b", 2, 511, 927, 9650),
]  # fmt: skip
HELD_OUT = [
    ("qwen3-14b", 1, 8, 620, 627), ("qwen3-14b", 1, 64, 617, 3140), ("qwen3-14b", 1, 253, 625, 5760),
    ("llama3.1-8b", 1, 8, 389, 1070), ("llama3.1-8b", 1, 128, 405, 7037), ("llama3.1-8b", 1, 383, 394, 9248),
    # Reasoning: contexts that grow to thousands of tokens.
    ("qwen3-32b", 2, 8, 6936, 475), ("qwen3-32b", 2, 64, 7058, 2079), ("qwen3-8b", 1, 63, 8367, 2510),
    ("qwen3-14b", 1, 59, 6711, 2146), ("qwen3-30b-a3b", 2, 32, 8110, 1965), ("qwen3-30b-a3b", 2, 128, 8058, 4664),
    ("qwen3-30b-a3b", 1, 16, 8243, 955),
]  # fmt: skip


def predicted_throughput(name: str, gpus: int, batch: int, output: int) -> float:
    """Every finished sequence is followed by another one, whose prompt has to be read."""
    prompt = 300
    engine = EngineModel(preset(name), H100, gpus)
    step = engine.step_seconds(batch, batch * (prompt + output / 2))
    return batch / (step + batch / output * engine.prefill_seconds(prompt))


def errors(rows: list[tuple[str, int, int, int, int]]) -> list[float]:
    return [predicted_throughput(*row[:4]) / row[4] - 1 for row in rows]


def test_throughput_of_the_models_that_the_constants_were_chosen_for() -> None:
    found = errors(LOOKED_AT)
    dense, experts = found[:9], found[9:]
    assert max(map(abs, dense)) < 0.20
    assert max(map(abs, experts)) < 0.26
    assert abs(statistics.mean(found)) < 0.08


def test_throughput_of_models_and_contexts_that_were_not_looked_at() -> None:
    found = errors(HELD_OUT)
    assert max(map(abs, found)) < 0.22
    assert statistics.median(map(abs, found)) < 0.05


def engine(**changes: object) -> EngineModel:
    base = EngineModel(preset("qwen2.5-32b"), ACCELERATORS["H200"], 4, memory_fraction=0.9, max_running=1024)
    return replace(base, **changes)


def test_the_cache_takes_what_the_weights_leave() -> None:
    model = engine()
    static = 0.9 * 4 * 139.8 * GIB
    assert model.kv_bytes_per_token == 2 * 64 * 8 * 128 * 2
    assert model.cache_tokens * model.kv_bytes_per_token + model.weight_bytes == pytest.approx(static)
    assert engine(tensor_parallel=16).kv_bytes_per_token == 2 * model.kv_bytes_per_token
    assert engine(max_cache_tokens=1000).cache_tokens == 1000
    assert EngineModel(preset("qwen2.5-32b"), H100, 1, memory_fraction=0.6).cache_tokens < 0
    assert model.concurrency(3000) == int(model.cache_tokens / 3000)
    assert model.concurrency(100) == 1024
    assert model.concurrency(1e9) == 1


def test_fp8_weights_take_half_and_embeddings_stay() -> None:
    whole, half = engine().weight_bytes, engine(weight_bytes_per_parameter=1.0).weight_bytes
    tables = 2 * 152064 * 5120
    assert half == pytest.approx((whole - 2 * tables) / 2 + 2 * tables)
    assert engine(weight_bytes_per_parameter=1.0).batch_seconds(64) < engine().batch_seconds(64)


def test_attention_groups_keep_one_copy_of_the_cache_and_several_of_the_attention() -> None:
    moe = preset("qwen3-30b-a3b")
    whole = EngineModel(moe, H100, 8)
    groups = replace(whole, attention_groups=8)
    assert moe.num_query_groups == 4
    # Eight devices for four key-value heads keep each twice.
    assert whole.kv_bytes_per_token == 2 * groups.kv_bytes_per_token
    attention = 48 * 2048 * (2 * 32 * 128 + 2 * 4 * 128) + moe.vocab_size * 2048
    assert groups.weight_bytes - whole.weight_bytes == 7 * attention * 2


def test_sparse_attention_caches_the_keys_of_indexers_and_reads_so_many_latents() -> None:
    """Against DeepSeek-V3, which is DeepSeek-V3.2 without indexers; 8 GPUs have all latents each."""
    v3, v32 = (EngineModel(preset(name), ACCELERATORS["B200"], 8) for name in ("deepseek-v3", "deepseek-v3.2"))
    assert v32.kv_bytes_per_token - v3.kv_bytes_per_token == 8 * 61 * 132
    shared = replace(v32, architecture=replace(v32.architecture, shared_choices=(2, 3, 4)))
    assert shared.kv_bytes_per_token - v3.kv_bytes_per_token == 8 * 58 * 132
    short, long = 2048, 100_000
    more = [engine.step_seconds(1, long) - engine.step_seconds(1, short) for engine in (v3, v32)]
    assert more[1] / more[0] == pytest.approx(132 / (576 * 2))
    latents = v3.step_seconds(1, 2048) - v3.step_seconds(1, 0)
    unread = v32.step_seconds(1, 0) - latents - v3.step_seconds(1, 0)
    assert 0 < unread < 0.01 * v3.step_seconds(1, 0)  # the indexers' own weights
    assert v32.prefill_seconds(long) < 0.5 * v3.prefill_seconds(long)
    assert v32.prefill_seconds(short) > v3.prefill_seconds(short)


def test_graphs_stay_on_the_device_whatever_the_cache() -> None:
    model = engine(graph_batch=256)
    assert (len(model.prefill_graph_sizes), max(model.prefill_graph_sizes)) == (58, 8192)
    assert model.largest_decode_graph == 256
    # Output, residual and hidden states, and gate, up and product of an MLP of 27648 over 4 GPUs.
    tensors = 8192 * 2 * (3 * 5120 + 3 * 27648 / 4)
    assert model.graph_bytes == (2 * 256 + 8 * 58) * 2**20 + tensors
    assert engine(graph_batch=256, memory_fraction=0.3).graph_bytes == model.graph_bytes
    small = EngineModel(preset("qwen3-0.6b"), ACCELERATORS["L4"], graph_batch=64)
    assert (max(small.prefill_graph_sizes), small.largest_decode_graph) == (4096, 48)
    latent = EngineModel(preset("deepseek-v3"), ACCELERATORS["B200"], 16)
    assert max(latent.prefill_graph_sizes) == 8192 and latent.graph_bytes > 1536 * 2**20
    assert replace(model, accelerator=ACCELERATORS["CPU"]).graph_bytes == 0


def test_attention_groups_share_the_tokens_of_a_prefill_and_need_more_for_decoding() -> None:
    whole = EngineModel(preset("qwen3-30b-a3b"), H100, 8)
    groups = replace(whole, attention_groups=4)
    assert max(groups.prefill_graph_sizes) == 2048
    for model, reserved in ((whole, 2 * 256), (groups, 2 * 256 + 3 * 4 * 256)):
        sizes = model.prefill_graph_sizes
        tensors = max(sizes) * 2 * (3 * 2048 + 8 * (3 * 768 + 2048))
        assert model.graph_bytes == (reserved + 8 * len(sizes)) * 2**20 + tensors


def test_routed_experts_take_a_row_of_host_memory_for_each_token_of_the_cache() -> None:
    model = EngineModel(preset("qwen3-30b-a3b"), H100, 4, memory_fraction=0.6)
    assert model.routed_experts_host_bytes == model.cache_tokens * 48 * 8 * 4
    groups = replace(model, attention_groups=4)
    assert groups.routed_experts_host_bytes == groups.cache_tokens / 4 * 48 * 8 * 4
    assert engine().routed_experts_host_bytes == 0


def test_a_draft_model_takes_what_its_files_have(tmp_path: Path) -> None:
    for name, size in (("a.safetensors", 3000), ("b.safetensors", 500), ("config.json", 7)):
        (tmp_path / name).write_bytes(b" " * size)
    speculative = SpeculativeConfig(algorithm="STANDALONE", draft_model_path=str(tmp_path))
    drafted = EngineModel.from_config(EngineConfig(speculative=speculative), preset("qwen3-8b"), NODE)
    plain = EngineModel.from_config(EngineConfig(), preset("qwen3-8b"), NODE)
    assert drafted.weight_bytes - plain.weight_bytes == 3500


def test_steps_get_longer_with_batch_and_context_and_shorter_with_gpus() -> None:
    model = engine()
    assert model.step_seconds(1, 1000) < model.step_seconds(64, 64_000) < model.step_seconds(64, 640_000)
    assert engine(tensor_parallel=8).step_seconds(256, 500_000) < model.step_seconds(256, 500_000)
    # Reading the weights is most of a step with one sequence: it cannot be faster than the memory.
    assert model.step_seconds(1, 1000) > 0.9 * model.weight_bytes / (4 * 4.8e12)


def test_experts_are_read_when_a_token_chose_them() -> None:
    moe = EngineModel(preset("qwen3-30b-a3b"), H100, 1)
    one, many = moe._read_bytes(1), moe._read_bytes(512)
    assert one < 0.15 * many
    assert many == pytest.approx(moe.weight_bytes - 151936 * 2048 * 2, rel=1e-3)


def test_prefill_of_a_continued_trajectory_costs_its_new_tokens() -> None:
    model = engine()
    assert model.prefill_seconds(100, 4000) < 0.1 * model.prefill_seconds(4100)
    assert model.prefill_seconds(8000) > 2 * model.prefill_seconds(4000)


def test_configuration_and_cpu() -> None:
    config = EngineConfig(tensor_parallel_size=2, mem_fraction_static=0.5, max_running_requests=300, quantization="fp8")
    model = EngineModel.from_config(config, preset("qwen3-8b"), NODE, max_concurrent=128)
    assert (model.tensor_parallel, model.memory_fraction, model.max_running) == (2, 0.5, 128)
    assert (model.graph_batch, model.largest_decode_graph) == (300, 256)
    assert (model.weight_bytes_per_parameter, model.profile) == (1.0, GPU_PROFILE)
    demo = EngineModel.from_config(EngineConfig(dtype="float32"), preset("qwen2.5-0.5b"), parse_machines("CPUx2"))
    assert (demo.weight_bytes_per_parameter, demo.profile) == (4.0, CPU_PROFILE)


def test_an_engine_on_two_nodes_waits_for_the_network_in_every_layer() -> None:
    engine = EngineConfig(tensor_parallel_size=16)
    one, two = (EngineModel.from_config(engine, preset("qwen3-32b"), Machines(H100, 16, size)) for size in (16, 8))
    assert (one.nodes, two.nodes) == (1, 2)
    layers, hidden = 64, 5120
    latency, payload = two.profile.network_latency, 2 * 32 * hidden * 2 * 15 / 16
    longer = latency + payload * (1 / H100.inter_node_bandwidth - 1 / H100.intra_node_bandwidth)
    assert two.batch_seconds(32) - one.batch_seconds(32) == pytest.approx(2 * layers * longer)
