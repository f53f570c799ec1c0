"""Communication that overlaps with computing changes nothing: gradients and weights, several updates, every layout."""

from typing import Any

import numpy as np
import pytest
import torch

from megatron_retool.config import Config, LearnerConfig, OptimizerConfig, TrainerConfig
from megatron_retool.parity.admission.tiny_model import random_batch
from megatron_retool.parity.ranks import run_ranks
from tests.kit import tiny_models

LENGTHS = [(5, 30), (9, 3), (4, 22), (13, 41), (6, 1), (8, 17)]
# The norm of all shards is added up shard by shard, which other buckets cut otherwise: without clipping its rounding
# changes nothing, and everything else can be asked for to the bit.
OPTIMIZER = OptimizerConfig(lr=1e-2, clip_grad=0, eps=1e-6)
# Smaller than any tensor that counts: nearly every parameter is a bucket of its own.
BOTH = {"overlap_grad_reduce": True, "overlap_param_gather": True, "gradient_bucket_size": 500}
GRADIENTS = {"overlap_grad_reduce": True, "gradient_bucket_size": 3000}
P2P = {"overlap_p2p_comm": True}
INTERLEAVED = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}
SPARSE = {"expert_model_parallel_size": 2}
# processes -> name -> model, layout, dtype, what overlaps
CASES: dict[int, dict[str, Any]] = {
    2: {
        "data": ("qwen2", {}, "float32", BOTH),
        "data, all-reduce": ("qwen2", {"use_distributed_optimizer": False}, "float32", GRADIENTS),
        "data, tied, bfloat16": ("qwen2_tied", {}, "bfloat16", BOTH),
        "experts": ("qwen3_moe", SPARSE, "float32", BOTH),
    },
    4: {
        "pipeline, tied": ("qwen2_tied", {"pipeline_model_parallel_size": 2}, "float32", BOTH),
        "interleaved": ("qwen2_deep", INTERLEAVED, "float32", BOTH | P2P),
        "experts and pipeline": ("qwen3_moe", SPARSE | {"pipeline_model_parallel_size": 2}, "float32", BOTH),
    },
}
NAMES = [(world_size, name) for world_size, cases in CASES.items() for name in cases]


def learn(world_size, hf_dir, layout, dtype, overlap, directory):
    from megatron_retool.learner.learner import Learner
    from megatron_retool.learner.weights import gradients_by_hf_name

    learner = LearnerConfig(world_size=world_size, dtype=dtype, max_tokens_per_micro_batch=64, **layout, **overlap)
    config = Config(learner=learner, trainer=TrainerConfig(verify_checkpoints=False))
    batch = random_batch(LENGTHS)
    subject = Learner(config, optimizer=OPTIMIZER, total_optimizer_steps=9, hf_dir=hf_dir)
    norms, gradients = [], []
    for step in range(4):
        if step == 3 and directory is not None:
            subject.save(directory)
            subject.sft_update(batch)
            subject.load(directory)
        # Two batches of different lengths: micro-batches of another number, and the second has seen the first's hooks.
        part = batch if step != 1 else random_batch(LENGTHS[:4], seed=5)
        norms.append(subject.sft_update(part)["grad_norm"])
        gradients.append(gradients_by_hf_name(subject.model_chunks, subject.architecture))
    weights = {name: tensor.clone() for bucket in subject.export_weights() for name, tensor in bucket}
    log_probs = subject.log_probs(batch)["log_probs"]
    buckets = sum(len(c.bucket_groups) + len(c.expert_parallel_bucket_groups) for c in subject.model_chunks)
    return {"norms": norms, "gradients": gradients, "weights": weights, "log_probs": log_probs, "buckets": buckets}


def learn_in_all(world_size, directory):
    found = {}
    for name, (model, layout, dtype, overlap) in CASES[world_size].items():
        plain = learn(world_size, directory / model, layout, dtype, {}, None)
        saved = directory / f"{name} checkpoint" if name in ("data", "pipeline, tied") else None
        found[name] = (plain, learn(world_size, directory / model, layout, dtype, overlap, saved))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    directory = tmp_path_factory.mktemp("overlap")
    tiny_models.hf_model("qwen2", num_hidden_layers=4, tie_word_embeddings=False).save_pretrained(directory / "qwen2")
    tiny_models.hf_model("qwen2", num_hidden_layers=4, tie_word_embeddings=True).save_pretrained(
        directory / "qwen2_tied"
    )
    tiny_models.hf_model("qwen2", num_hidden_layers=8).save_pretrained(directory / "qwen2_deep")
    tiny_models.hf_model("qwen3_moe", num_hidden_layers=2).save_pretrained(directory / "qwen3_moe")
    return {
        (world_size, name): answer
        for world_size in CASES
        for name, answer in run_ranks(
            learn_in_all, world_size, directory / f"ranks{world_size}", world_size, directory, timeout=150
        ).items()
    }


@pytest.mark.parametrize(("world_size", "name"), NAMES)
def test_overlap_gives_the_same_gradients_and_weights(found, world_size, name):
    plain, overlapped = found[world_size, name]
    assert all(norm > 0 for norm in plain["norms"])
    np.testing.assert_allclose(overlapped["norms"], plain["norms"], rtol=1e-6)
    assert overlapped["weights"].keys() == plain["weights"].keys()
    for step, gradients in enumerate(plain["gradients"]):
        for key, expected in gradients.items():
            assert torch.equal(overlapped["gradients"][step][key], expected), (step, key)
    for key, expected in plain["weights"].items():
        assert torch.equal(overlapped["weights"][key], expected), key
    np.testing.assert_array_equal(overlapped["log_probs"], plain["log_probs"])


def test_there_was_something_to_overlap(found):
    assert found[2, "data"][0]["buckets"] == 1
    assert found[2, "data"][1]["buckets"] > 10
