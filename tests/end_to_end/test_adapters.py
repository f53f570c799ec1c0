"""The demo with adapters on the real stack: engines get merged weights or adapters, checkpoints hold adapters alone."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from conversion.files.dist_checkpoint import DistCheckpoint
from conversion.mcore_to_hf import export
from megatron_retool.runs.metrics_file import read_metrics
from tests.campaign.demo import write_config
from tests.end_to_end.conftest import CommandLine

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.slow
def test_engines_sample_from_the_adapted_model(tmp_path):
    """Three steps from random weights, with a KL to the model without adapters."""
    config = write_config(
        tmp_path, "adapters", 3, variant="demo_lora_cpu", val_before_train=False, test_freq=0, save_freq=3
    )
    command_line = CommandLine(config)
    small = ("demo.pretrain_rows=1", "demo.sft_rows=1", "demo.sft_val_rows=1", "data.max_val_samples=2")
    for command in ("make-demo", "train"):
        code, output = command_line.run(command, *small, "algorithm.kl_in_loss=0.01")
        assert code == 0, output
    rows = read_metrics(tmp_path / "adapters" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    # The policy goes away from the model without adapters.
    assert 0 < rows[0]["actor/kl_loss"] < rows[2]["actor/kl_loss"]
    for row in rows:
        assert row["actor/grad_norm"] > 0
        # Engine and learner compute the same model: with the base alone in the engine they would not from step 2 on.
        assert row["rollout_corr/log_prob_abs_diff"] < 1e-5
    checkpoint = tmp_path / "adapters" / "checkpoints" / "global_step_3"
    weights = [key for key in DistCheckpoint(checkpoint / "learner").tensors if not key.startswith("optimizer.")]
    assert weights and all(".lora." in key for key in weights)
    export(checkpoint, tmp_path / "exported", require_tokenizer=False)
    merged = load_file(next((tmp_path / "exported").glob("model*.safetensors")))
    base = load_file(next((tmp_path / "adapters" / "data" / "model").glob("model*.safetensors")))
    changed = {name for name, weight in merged.items() if not torch.equal(weight, base[name].to(weight.dtype))}
    assert changed == {name for name in merged if "_proj.weight" in name}
    factors = load_file(tmp_path / "exported" / "adapter" / "adapter_model.safetensors")
    assert len(factors) == 2 * len(changed)


@pytest.mark.rare
def test_an_adapter_travels_alone_and_what_engines_sample_is_the_same_policy(tmp_path):
    """A run that ends after two steps and goes on with two engines, which pause long responses."""
    config = write_config(
        tmp_path, "adapters", 4, variant="demo_lora_cpu", val_before_train=False, test_freq=0, save_freq=2
    )
    command_line = CommandLine(config)
    small = ("demo.pretrain_rows=1", "demo.sft_rows=1", "demo.sft_val_rows=1", "data.max_val_samples=2")
    code, output = command_line.run("make-demo", *small)
    assert code == 0, output
    sent: dict[str, float] = {}
    for sync, overrides, steps in (
        ("merged", ("trainer.total_steps=1",), [1]),
        ("adapter", ("trainer.total_steps=2", "weight_sync.verify=true"), [1, 2]),
        ("adapter", ("rollout.engine.count=2", "rollout.partial.enable=true"), [1, 2, 3, 4]),
    ):
        run = f"trainer.experiment_name={sync}"
        base = f"model.path={tmp_path}/adapters/data/model"
        data = f"demo.directory={tmp_path}/adapters/data"
        lora = ("learner.lora.rank=8", f"learner.lora.sync={sync}")
        code, output = command_line.run("train", *small, run, base, data, *lora, *overrides)
        assert code == 0, output
        rows = read_metrics(tmp_path / sync / "metrics.jsonl")
        assert [row["step"] for row in rows] == steps
        for row in rows:
            assert row["actor/grad_norm"] > 0
            # With the base alone in the engines, or under another version's name, it would not be so from step 2 on.
            assert row["rollout_corr/log_prob_abs_diff/lag_0"] < 1e-5
        sent[sync] = rows[-1]["weight_sync/gigabytes"]
    assert 0 < sent["adapter"] < sent["merged"] / 10
    rows = read_metrics(tmp_path / "adapter" / "metrics.jsonl")
    # Compared at the first sync, and at the second, where the adapter adds something.
    assert [row["step"] for row in rows if "weight_sync/log_prob_difference_max" in row] == [1, 2, 3, 4]
    assert all(row["weight_sync/log_prob_difference_max"] < 1e-4 for row in rows if row["step"] in (1, 2))
    assert rows[1]["weight_sync/verified_tensors"] > 0
