"""Memory formulas against real models: transformers and Megatron-Core on the meta device, autograd, a checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conversion.model.architecture import Architecture
from megatron_retool.config import (
    AlgorithmConfig,
    Config,
    DistillationConfig,
    Fp8Config,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    MtpConfig,
    OptimizerConfig,
    RecomputeConfig,
    TeacherConfig,
)
from megatron_retool.planning import activations, memory
from megatron_retool.planning.hardware import GIB
from megatron_retool.planning.models import preset
from tests.planning.megatron_facts import SMALL_MODELS, learner_config

ROOT = Path(__file__).parents[2]

TRANSFORMERS = ["qwen2.5-0.5b", "qwen2.5-32b", "qwen3-8b", "qwen3-30b-a3b", "llama3.1-8b"]
SHARDS: list[dict[str, Any]] = [
    {
        "model": "qwen2.5-32b",
        "learner": {
            "world_size": 32, "tensor_model_parallel_size": 4, "sequence_parallel": True,
            "pipeline_model_parallel_size": 2, "context_parallel_size": 2,
        },
        "ranks": [0, 8, 16, 31],
    },
    {
        "model": "qwen2.5-7b",
        "learner": {"world_size": 8, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        "ranks": [0, 7],
    },
    {  # interleaved: three chunks a rank
        "model": "qwen2.5-14b",
        "learner": {
            "world_size": 16, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4,
            "virtual_pipeline_model_parallel_size": 3,
        },
        "ranks": [0, 4, 15],
    },
    # A tied embedding: whole on one stage, a second copy on the last of several; data-parallel sizes that need padding.
    {"model": "qwen2.5-0.5b", "learner": {"world_size": 6}, "ranks": [0, 1, 2, 3, 4, 5]},
    {
        "model": "qwen2.5-0.5b",
        "learner": {"world_size": 12, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        "ranks": [0, 2, 4, 6, 8, 10],
    },
    {"model": "qwen3-8b", "learner": {"world_size": 8, "use_distributed_optimizer": False}, "ranks": [0]},
    {  # key-value heads that TP exceeds
        "model": "qwen3-30b-a3b",
        "learner": {
            "world_size": 16, "tensor_model_parallel_size": 8, "sequence_parallel": True,
            "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 2,
        },
        "ranks": [0, 15],
    },
    {
        "model": "qwen3-30b-a3b",
        "learner": {
            "world_size": 32, "tensor_model_parallel_size": 2, "sequence_parallel": True,
            "pipeline_model_parallel_size": 2, "context_parallel_size": 2, "expert_model_parallel_size": 8,
            "expert_tensor_parallel_size": 1,
        },
        "ranks": [0, 16],
    },
    {
        "model": "qwen3-8b",
        "learner": {
            "world_size": 8, "tensor_model_parallel_size": 2, "sequence_parallel": True,
            "pipeline_model_parallel_size": 2, "lora": {"rank": 8},
        },
        "ranks": [0, 7],
    },
    {
        "model": "qwen3-30b-a3b",
        "learner": {
            "world_size": 16, "tensor_model_parallel_size": 4, "sequence_parallel": True,
            "expert_model_parallel_size": 16, "expert_tensor_parallel_size": 1,
            "lora": {"rank": 4, "targets": ["attention", "experts"]},
        },
        "ranks": [0, 15],
    },
    {"model": "llama3.1-70b", "learner": {
        "world_size": 64, "tensor_model_parallel_size": 8, "sequence_parallel": True, "pipeline_model_parallel_size": 4,
    }, "ranks": [0, 32]},
]  # fmt: skip


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """Measured on real models in a process of its own."""
    finished = subprocess.run(
        [sys.executable, "-m", "tests.planning.megatron_facts"],
        input=json.dumps({"shards": SHARDS, "transformers": TRANSFORMERS}),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_parameters_are_those_of_the_transformers_model(facts: dict[str, Any], name: str) -> None:
    assert memory.parameter_count(preset(name)) == facts["transformers"][name]


def test_routed_experts_are_part_of_the_parameters() -> None:
    moe = preset("qwen3-30b-a3b")
    assert memory.routed_expert_parameters(preset("qwen3-8b")) == 0
    one_expert_less = replace(moe, num_experts=127)
    router = moe.num_layers * moe.hidden_size
    fewer = memory.parameter_count(moe) - memory.parameter_count(one_expert_less)
    assert memory.routed_expert_parameters(moe) // 128 + router == fewer


@pytest.mark.parametrize("index", range(len(SHARDS)))
def test_every_rank_has_the_bytes_that_the_formula_says(facts: dict[str, Any], index: int) -> None:
    case = SHARDS[index]
    learner = learner_config(case["learner"])
    architecture = preset(case["model"])
    layout = learner.layout(architecture)
    adapters = memory.adapters_of(learner)
    for shard in facts["shards"][index]:
        assert memory.rank_parameters(architecture, layout, shard["stage"]) == shard["parameters"]
        states = memory.state_bytes(
            architecture,
            layout,
            shard["stage"],
            "bfloat16",
            learner.use_distributed_optimizer,
            adapters=adapters,
        )
        trained = shard["trained"]
        frozen = shard["parameters"] if adapters else 0
        assert adapters or trained == shard["parameters"]
        assert states.parameters == 2 * (frozen + shard["buffer_elements"])
        assert states.gradients == 4 * shard["buffer_elements"]
        if learner.use_distributed_optimizer:
            # The formula gives the fullest rank's share; a rank has less by the padding that lies in its part.
            padding = shard["buffer_elements"] - trained
            assert 12 * shard["owned"] <= states.optimizer <= 12 * (shard["owned"] + padding)
        else:
            assert states.optimizer == 12 * trained


def test_the_optimizer_shares_of_all_ranks_add_up_to_the_model(facts: dict[str, Any]) -> None:
    """Case 3 lists every data-parallel rank, case 4 every one of TP rank 0."""
    whole = facts["shards"][3]
    assert sum(shard["owned"] for shard in whole) == whole[0]["parameters"]
    split = facts["shards"][4]
    for stage in (0, 1):
        ranks = [shard for shard in split if shard["stage"] == stage]
        assert len(ranks) == 3
        assert sum(shard["owned"] for shard in ranks) == ranks[0]["parameters"]


@pytest.mark.parametrize("name", list(SMALL_MODELS))
def test_activations_of_a_layer_are_what_autograd_keeps(facts: dict[str, Any], name: str) -> None:
    """Measured with the local layer spec: within 0.6 % (the rest: router bookkeeping, rotary tables)."""
    architecture = Architecture.from_hf_config(SMALL_MODELS[name])
    layout = LearnerConfig().layout(architecture)
    halves = {"mixer": architecture.has_mixer(0), "mlp": architecture.has_mlp(0)}
    predicted = sum(activations.layer_activations(architecture, layout, 2048, 2, fused=False, **halves).values())
    assert predicted == pytest.approx(facts["layers"][name], rel=0.006)


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3-next-80b-a3b", "deepseek-v3"])
def test_activations_on_a_gpu_are_those_of_transformer_engines_layers(model: str) -> None:
    architecture = preset(model)
    settings = LearnerConfig(max_tokens_per_micro_batch=2048)
    layout = settings.layout(architecture)
    found = memory.learner_memory(settings, AlgorithmConfig(), ModelConfig(), architecture, layout).activations
    fused, local = (activations.activation_bytes(architecture, layout, settings, 0, 1, each) for each in (True, False))
    assert found == fused < local


def test_activations_of_dense_layers_among_experts() -> None:
    moe = preset("qwen3-30b-a3b")
    first, dense = replace(moe, dense_layers=(0,)), replace(moe, num_experts=None)
    learner = LearnerConfig(world_size=2, pipeline_model_parallel_size=2)
    layout = learner.layout(moe)

    def kept(architecture: Architecture, stage: int) -> float:
        return activations.activation_bytes(architecture, layout, learner, stage, micro_batches=4)

    assert kept(first, 1) == kept(moe, 1)
    embedded = 2 * learner.max_tokens_per_micro_batch * moe.hidden_size * 2
    expected = (23 * (kept(moe, 0) - embedded) + kept(dense, 0) - embedded) / 24 + embedded
    assert kept(first, 0) == pytest.approx(expected)
    assert memory.rank_parameters(first, layout, 1) == memory.rank_parameters(moe, layout, 1)


def test_what_training_leaves_as_it_is_has_no_gradient_and_no_optimizer_state() -> None:
    """The indexers of DeepSeek-V3.2, beside DeepSeek-V3 without them."""
    dense, sparse = preset("deepseek-v3"), preset("deepseek-v3.2")
    shared = replace(sparse, shared_choices=(10, 11))
    one = 1536 * 64 * 128 + 7168 * (128 + 64) + 2 * 128
    frozen = memory.parameter_count(sparse) - memory.parameter_count(dense)
    assert frozen == 61 * one == memory.parameter_count(shared) - memory.parameter_count(dense) + 2 * one
    layout = LearnerConfig(world_size=64, expert_model_parallel_size=64).layout(sparse)
    with_them, without = (memory.state_bytes(each, layout, 0) for each in (sparse, dense))
    assert memory.trained_parameters(sparse, layout, 0) == memory.rank_parameters(dense, layout, 0)
    assert with_them.parameters - without.parameters == 2 * frozen
    assert (with_them.gradients, with_them.optimizer) == (without.gradients, without.optimizer)
    for optimizer, dtype in (("adamw", "bfloat16"), ("muon", "bfloat16"), ("muon", "float32")):
        found = [memory.checkpoint_bytes(each, dtype, optimizer=optimizer) for each in (sparse, dense)]
        assert found[0] - found[1] == frozen * (2 if dtype == "bfloat16" else 4), (optimizer, dtype)


def test_the_mask_of_chosen_keys_is_kept_where_texts_may_be_long() -> None:
    dense, sparse = preset("deepseek-v3"), preset("deepseek-v3.2")
    layout = LearnerConfig(world_size=2, context_parallel_size=2).layout(sparse)

    def more(tokens: float) -> float:
        found = [activations.layer_activations(each, layout, tokens) for each in (sparse, dense)]
        return sum(found[0].values()) - sum(found[1].values())

    assert more(1024) == 0.0  # of texts of up to 2048 tokens all keys are chosen
    assert more(4096) == 4096 * 8192 * 2


@pytest.mark.parametrize(
    ("model", "context", "fused", "masks"),
    [
        ("deepseek-v3", 1, True, 0),
        ("deepseek-v3", 2, True, 1),
        ("qwen3-8b", 2, True, 0),
        ("qwen3-8b", 2, False, 1),
        ("qwen3-8b", 1, False, 0),
        ("gemma-3-1b", 1, True, 0),
        ("gemma-3-1b", 1, False, 1),
        ("gemma-3-1b", 2, True, 2),
        ("gpt-oss-20b", 1, True, 1),
    ],
)
def test_masks_that_all_layers_share(model: str, context: int, fused: bool, masks: int) -> None:
    architecture, settings = preset(model), LearnerConfig(world_size=context, context_parallel_size=context)
    layout = settings.layout(architecture)
    assert activations.mask_bytes(architecture, layout, 2048, 2, fused) == masks * 2048 * context * 2048 * 2


def test_full_recomputation_keeps_the_input_of_each_layer(facts: dict[str, Any]) -> None:
    assert facts["recomputed_layer"] == 2048 * SMALL_MODELS["qwen2"]["hidden_size"] * 2


@pytest.mark.parametrize("case", ["qwen2 bfloat16", "qwen3_moe bfloat16", "qwen2 float32"])
def test_a_checkpoint_has_the_bytes_that_the_formula_says(facts: dict[str, Any], case: str) -> None:
    name, dtype = case.split()
    architecture = Architecture.from_hf_config(SMALL_MODELS[name])
    assert memory.checkpoint_bytes(architecture, dtype) == facts["checkpoints"][case]


def test_a_checkpoint_stores_vocabulary_padding_and_a_tied_head_once() -> None:
    odd = replace(preset("qwen2.5-0.5b"), vocab_size=1001)
    untied = replace(odd, tie_word_embeddings=False)
    padding = 7 * odd.hidden_size
    assert memory.checkpoint_bytes(odd, with_optimizer=False) == 2 * (memory.parameter_count(odd) + padding)
    assert memory.checkpoint_bytes(untied, with_optimizer=False) == 2 * (memory.parameter_count(untied) + 2 * padding)


# --- what the knobs do ------------------------------------------------------------------------------------------------


def learner_32b(**changes: Any) -> LearnerConfig:
    base = LearnerConfig(
        world_size=8, tensor_model_parallel_size=4, sequence_parallel=True, context_parallel_size=2,
        max_tokens_per_micro_batch=36864, recompute=RecomputeConfig("full", "uniform", 1),
    )  # fmt: skip
    return replace(base, **changes)


def plan(learner: LearnerConfig, **algorithm: Any) -> memory.LearnerMemory:
    architecture = preset("qwen2.5-32b")
    config = Config(learner=learner, algorithm=AlgorithmConfig(**algorithm))
    return memory.learner_memory(
        config.learner, config.algorithm, config.model, architecture, learner.layout(architecture)
    )


def test_the_published_recipe_on_eight_gpus() -> None:
    found = plan(learner_32b())
    parameters = memory.parameter_count(preset("qwen2.5-32b")) / 4
    assert found.parameters == pytest.approx(2 * parameters, rel=1e-3)
    assert found.optimizer == pytest.approx(12 * parameters / 2, rel=1e-3)
    assert found.total == pytest.approx(sum(found.components().values()))
    assert 90 * GIB < found.total < 110 * GIB


def test_recomputation_sequence_parallelism_and_context_parallelism_save_activations() -> None:
    full = plan(learner_32b()).activations
    uniform8 = plan(learner_32b(recompute=RecomputeConfig("full", "uniform", 8))).activations
    block = plan(learner_32b(recompute=RecomputeConfig("full", "block", 32))).activations
    mlp = plan(learner_32b(recompute=RecomputeConfig("selective", modules=["mlp"]))).activations
    nothing = plan(learner_32b(recompute=RecomputeConfig())).activations
    assert full < uniform8 < block < nothing
    assert full < mlp < nothing
    assert plan(learner_32b(sequence_parallel=False)).activations > 2 * full
    assert plan(learner_32b(context_parallel_size=1)).activations == pytest.approx(2 * full)


def test_the_first_pipeline_stage_keeps_a_micro_batch_for_each_stage() -> None:
    architecture = preset("qwen2.5-32b")
    learner = learner_32b(world_size=32, pipeline_model_parallel_size=4, recompute=RecomputeConfig())
    layout = learner.layout(architecture)
    kept = [activations.activation_bytes(architecture, layout, learner, stage, 16) for stage in range(4)]
    assert kept[0] > kept[1] > kept[2] > kept[3]
    assert kept[1] / kept[3] == pytest.approx(3)
    assert activations.activation_bytes(architecture, layout, learner, 0, 1) < kept[0] / 3
    interleaved = replace(layout, virtual_pipeline=4)
    assert activations.activation_bytes(architecture, interleaved, learner, 0, 16) / kept[0] == pytest.approx(
        1 + 3 / 16
    )


def test_reference_critic_offload_and_fp8_have_their_price() -> None:
    base = plan(learner_32b())
    assert plan(learner_32b(), kl_in_loss=0.01).reference == pytest.approx(base.parameters)
    assert plan(learner_32b(), advantage="gae").critic == base.parameters + base.gradients + base.optimizer
    assert plan(learner_32b(optimizer=OptimizerConfig(cpu_offload=True))).optimizer == 0
    assert plan(learner_32b(fp8=Fp8Config(recipe="blockwise"))).fp8_copies > 0.9 * base.parameters
    kept = plan(learner_32b(fp8=Fp8Config(recipe="blockwise", parameters=True)))
    assert (kept.fp8_copies, kept.parameters) == (0, base.parameters)  # the two copies are the weight
    four_bits = plan(learner_32b(fp8=Fp8Config(recipe="nvfp4", parameters=True)))
    assert four_bits.fp8_copies == 0 and 0.5 * base.parameters < four_bits.parameters < 0.65 * base.parameters
    assert base.sleeping == base.parameters + base.optimizer
    assert base.sleeping < base.pinned < base.sleeping + 2 * memory.PINNED_BLOCK_BYTES


def test_adapters_need_no_reference_and_hardly_any_states() -> None:
    base, found = plan(learner_32b()), plan(learner_32b(lora=LoraConfig(rank=32)), kl_in_loss=0.01, advantage="gae")
    assert found.reference == 0
    assert base.parameters < found.parameters < 1.02 * base.parameters
    assert found.gradients + found.optimizer < 0.02 * (base.gradients + base.optimizer)
    assert found.critic == found.parameters + found.gradients + found.optimizer


def test_teachers_take_the_place_of_the_reference(tmp_path: Path) -> None:
    architecture = preset("qwen2.5-32b")
    (tmp_path / "config.json").write_text(json.dumps({**architecture.hf_config, "num_hidden_layers": 16}))
    teacher = TeacherConfig(path=str(tmp_path))
    for count in (1, 2):
        distillation = DistillationConfig(teachers=[teacher] * count, divergence="reverse_kl")
        found = plan(learner_32b(lora=LoraConfig(rank=32)), advantage="zero", distillation=distillation)
        assert 0.25 * count * found.parameters < found.reference < 0.3 * count * found.parameters


def test_an_adapter_sync_sends_the_factors_alone() -> None:
    """The seven matrices of each of 64 layers have 131,072 inputs and outputs together, with 32 numbers for each."""
    architecture = preset("qwen2.5-32b")
    merged, alone = (LoraConfig(rank=32, sync=sync) for sync in ("merged", "adapter"))
    assert memory.weight_sync_bytes(architecture, learner_32b(lora=merged)) == 2 * memory.parameter_count(architecture)
    assert memory.weight_sync_bytes(architecture, learner_32b(lora=alone)) == 2 * 64 * 32 * 131_072


def test_pinned_pieces_are_those_of_the_learner() -> None:
    from megatron_retool.learner.offload import BLOCK_BYTES

    assert memory.PINNED_BLOCK_BYTES == BLOCK_BYTES


@pytest.mark.parametrize(
    ("settings", "recipe", "expected"),
    [
        ({}, None, 2 + 4 + 4),
        ({"main_params_dtype": "float16", "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}, None, 6),
        ({"exp_avg_dtype": "bfloat16"}, "blockwise", 4 + 2 + 4),
    ],
)
def test_a_precision_aware_optimizer_keeps_less(settings: dict[str, Any], recipe: str | None, expected: int) -> None:
    optimizer = OptimizerConfig(use_precision_aware_optimizer=True, **settings)
    fp8 = Fp8Config(recipe=recipe)
    base = plan(learner_32b(fp8=fp8)).optimizer
    assert plan(learner_32b(fp8=fp8, optimizer=optimizer)).optimizer == pytest.approx(base * expected / 12)


def test_layers_whose_activations_wait_on_the_host() -> None:
    everything = plan(learner_32b(recompute=RecomputeConfig())).activations
    half = plan(learner_32b(recompute=RecomputeConfig(), cpu_offloading_num_layers=32)).activations
    assert half == pytest.approx(everything / 2, rel=0.02)


def test_chunks_bound_the_logits() -> None:
    small = plan(learner_32b(log_prob_chunk_tokens=1024)).logits
    assert plan(learner_32b(log_prob_chunk_tokens=18432)).logits > 5 * small
    assert small > 1024 * 152064 / 4 * 10


def test_layers_for_multi_token_prediction_have_their_price_on_the_last_stage() -> None:
    mimo = preset("mimo-7b")
    trained = LearnerConfig(world_size=2, pipeline_model_parallel_size=2, mtp=MtpConfig(train=True))
    plain = replace(trained, mtp=MtpConfig())
    layout = trained.layout(mimo)
    hidden, width = mimo.hidden_size, mimo.ffn_hidden_size
    attention = mimo.attention_weights + mimo.query_size + 2 * mimo.key_value_size  # with biases on q, k and v
    own = attention + 3 * hidden * width + 2 * hidden * hidden + 5 * hidden
    embedding = mimo.vocab_size * hidden
    more = [
        memory.rank_parameters(mimo.with_predictors(), layout, stage) - memory.rank_parameters(mimo, layout, stage)
        for stage in (0, 1)
    ]
    assert more == [0, own + embedding]

    one = LearnerConfig(mtp=trained.mtp)
    algorithm = AlgorithmConfig(kl_in_loss=0.1)
    found, without = (
        memory.learner_memory(learner, algorithm, ModelConfig(), mimo, one.layout(mimo))
        for learner in (one, replace(plain, world_size=1, pipeline_model_parallel_size=1))
    )
    assert found.parameters - without.parameters == pytest.approx(2 * own, rel=1e-5)
    assert found.reference == without.reference and found.activations > without.activations


def test_fp32_training_has_no_second_copy_of_the_weights() -> None:
    architecture = preset("qwen3-0.6b")
    layout = LearnerConfig().layout(architecture)
    half = memory.state_bytes(architecture, layout, 0, "bfloat16")
    single = memory.state_bytes(architecture, layout, 0, "float32")
    assert single.total == half.total - 2 * half.parameters + half.parameters
