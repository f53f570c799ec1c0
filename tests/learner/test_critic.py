"""A critic learns returns, and its checkpoint brings the same values back."""

import numpy as np
import pytest

from megatron_retool.config import OptimizerConfig, load_config
from megatron_retool.parity.ranks import run_ranks
from megatron_retool.trajectory import FinishReason, Trajectory, TrajectoryBatch
from tests.kit import tiny_models


def learn_and_reload(hf_dir, directory):
    from megatron_retool.learner.learner import Learner

    config = load_config(None, ["learner.device=cpu", "learner.dtype=float32", "learner.world_size=2"])

    def critic():
        return Learner(
            config, optimizer=OptimizerConfig(lr=1e-2), total_optimizer_steps=30, hf_dir=hf_dir, role="critic"
        )

    learner = critic()
    generator = np.random.default_rng(0)
    rows = []
    for i in range(8):  # the reward can be read off the prompt
        response = generator.integers(3, 90, 6 + i)
        sampled = np.arange(6 + i) != 3
        rows.append(
            Trajectory(
                [5 + 20 * (i % 2), 7], response, sampled, -1.0 * sampled, np.where(sampled, 0, -1),
                np.where(sampled, 0, -1), i, 0, FinishReason.STOP, reward=1.0 - 2.0 * (i % 2),
            )
        )  # fmt: skip
    batch = TrajectoryBatch.from_trajectories(rows)
    weights = batch.loss_mask / batch.loss_mask.sum()
    returns = np.repeat(batch.rewards, batch.response_lengths)
    first = learner.values(batch)
    metrics = []
    for _ in range(12):
        columns = {"values": learner.values(batch), "returns": returns, "loss_weights": weights}
        metrics.append(learner.update_critic(batch.with_columns(**columns)))
    learned = learner.values(batch)
    learner.save(directory)
    other = critic()
    fresh = other.values(batch)
    other.load(directory)
    return {
        "first": first, "fresh": fresh, "learned": learned, "loaded": other.values(batch),
        "losses": [row["critic/vf_loss"] for row in metrics], "metrics": metrics[-1], "returns": returns,
        "mask": batch.loss_mask,
    }  # fmt: skip


@pytest.mark.timeout(120)
def test_critic_learns_and_its_checkpoint_continues(tmp_path):
    model = tiny_models.hf_model("qwen2", num_hidden_layers=2)
    model.save_pretrained(tmp_path / "hf")
    found = run_ranks(learn_and_reload, 2, tmp_path / "ranks", tmp_path / "hf", tmp_path / "critic")
    assert np.all(found["first"] == 0)  # a new value head knows nothing
    assert found["losses"][-1] < 0.3 * found["losses"][0]
    error = (found["learned"] - found["returns"])[found["mask"]]
    assert np.mean(error**2) < 0.5
    np.testing.assert_array_equal(found["loaded"], found["learned"])
    assert np.all(found["fresh"] == 0)
    for name in ("critic/vf_loss", "critic/vf_clipfrac", "critic/grad_norm", "critic/lr"):
        assert name in found["metrics"]
