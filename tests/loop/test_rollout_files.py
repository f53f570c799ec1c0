"""What a step leaves in rollouts/, read again."""

import numpy as np

from megatron_retool.loop.rollout_files import read_estimates, write_estimates
from tests.loop.test_columns import make_batch, trajectory


def test_estimates_on_disk_are_found_by_group_and_index(tmp_path):
    rows = [trajectory(7, 0, 1.0), trajectory(9, 3, 0.0)]
    batch = make_batch(*rows).with_columns(entropy=np.arange(8))
    write_estimates(batch, tmp_path / "rollouts" / "step.learner.parquet")
    found = read_estimates(tmp_path / "rollouts" / "step.learner.parquet")
    assert set(found) == {(7, 0), (9, 3)}
    np.testing.assert_array_equal(found[9, 3]["entropy"], [4, 5, 6, 7])
    np.testing.assert_array_equal(found[7, 0]["old_log_probs"], rows[0].rollout_log_probs)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step.learner.parquet"]
