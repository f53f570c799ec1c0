"""A learner whose storages went to host memory and came back learns on as if nothing had happened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_retool.config import Config, ConfigError, LearnerConfig, OptimizerConfig
from megatron_retool.learner import offload, parallel
from megatron_retool.learner.offload import HostOffload
from megatron_retool.parity.admission.tiny_model import random_batch, save_model
from tests.kit.tiny_models import hf_model

PARTS = ("weights", "optimizer", "gradients")

LENGTHS = [(5, 20), (9, 3), (4, 12)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(hf_model("qwen2", num_hidden_layers=2), tmp_path_factory.mktemp("model"))


def learner(model_dir: Path, dtype: str) -> Any:
    from megatron_retool.learner.learner import Learner

    settings = LearnerConfig(dtype=dtype, max_tokens_per_micro_batch=64)
    optimizer = OptimizerConfig(lr=1e-2)
    return Learner(
        Config(learner=settings), optimizer=optimizer, total_optimizer_steps=9, hf_dir=model_dir, with_reference=True
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_everything_leaves_and_comes_back(model_dir: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch(LENGTHS)
    moved, stayed = learner(model_dir, dtype), learner(model_dir, dtype)
    parameters = sum(p.numel() for p in moved.model_chunks[0].parameters())
    for one in (moved, stayed):
        one.sft_update(batch)
    monkeypatch.setattr(offload, "BLOCK_BYTES", 5000)  # parts take several blocks, and storages cross their borders
    away = HostOffload(moved)
    gone = {part: away.offload(part) for part in PARTS}
    size = 4 if dtype == "float32" else 2
    assert gone["weights"] >= 2 * size * parameters  # the reference's too
    assert gone["gradients"] >= 4 * parameters
    # Adam's two moments, and with bfloat16 weights the main ones in float32.
    assert gone["optimizer"] >= (8 if dtype == "float32" else 12) * parameters
    assert all(p.untyped_storage().nbytes() == 0 for p in moved.model_chunks[0].parameters())
    assert away.offload(*PARTS) == 0

    away.reload("weights")
    assert moved.sft_loss(batch) == stayed.sft_loss(batch)
    away.reload(*PARTS)
    for _ in range(2):
        assert moved.sft_update(batch) == stayed.sft_update(batch)
    for mine, other in zip(moved.model_chunks[0].parameters(), stayed.model_chunks[0].parameters(), strict=True):
        assert torch.equal(mine, other)
    assert (
        moved.log_probs(batch, reference=True)["log_probs"] == stayed.log_probs(batch, reference=True)["log_probs"]
    ).all()


def test_without_a_gpu_nothing_moves(model_dir: Path) -> None:
    here = learner(model_dir, "float32")
    here.offload(*PARTS)
    assert all(p.untyped_storage().nbytes() for p in here.model_chunks[0].parameters())
    here.reload(*PARTS)


def test_fp8_copies_of_weights_leave_with_them(model_dir: Path) -> None:
    here = learner(model_dir, "bfloat16")
    layer = here.model_chunks[0].module.decoder.layers[0].mlp
    layer._fp8_workspaces = {"weight": torch.zeros(1000, dtype=torch.uint8)}
    away = HostOffload(here)
    away.offload("optimizer")
    assert layer._fp8_workspaces
    weights = away.offload("weights")
    assert not layer._fp8_workspaces
    away.reload("weights", "optimizer")
    assert weights - away.offload("weights") == 1000


def test_ranks_with_gpus_share_the_cores_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(24))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert parallel.use_host_threads(torch.device("cuda", 0), 1) == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "99")
    assert parallel.use_host_threads(torch.device("cuda", 0), 1) == 1
    for wrong in ("0", "-1", "all"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", wrong)
        with pytest.raises(ConfigError, match=f"LOCAL_WORLD_SIZE={wrong}"):
            parallel.use_host_threads(torch.device("cuda", 0), 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert parallel.use_host_threads(torch.device("cuda", 0), 1) == 8
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert parallel.use_host_threads(torch.device("cuda", 0), 1) == 6
    assert parallel.use_host_threads(torch.device("cpu"), 2) == 2
    assert torch.get_num_threads() == threads
