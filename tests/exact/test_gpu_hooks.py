"""Everything that the exact plugin replaces in SGLang on a GPU is there, by its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_cpu_engine import delta_nets
from sglang_rollout.engine.exact_plugin import exact_states
from sglang_rollout.engine.launch_command import torchvision_directory

ROOT = Path(__file__).parents[2]


@pytest.mark.rare
def test_every_hook_has_a_target() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.exact.hooks_on_gpu"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(torchvision_directory())])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["missing"] == [] and found["hooks"] > 20
    assert found["apart"] == 0.0 and found["sum"] > 1


def test_new_tokens_of_a_delta_net_come_packed() -> None:
    """Two key heads of 4 features and six value heads of 3, each of which has a slot among five."""
    random = torch.Generator().manual_seed(0)
    packed, states = torch.randn(2, 2 * 8 + 18, generator=random), torch.randn(5, 6, 3, 4, generator=random)
    a, b, of_heads = torch.randn(3, 2, 6, generator=random).unbind(0)
    slots = torch.tensor([3, 1])
    query, key, value = packed.split([8, 8, 18], -1)
    apart, behind = states.clone(), states.clone()
    expected = delta_nets.delta_rule_of_next(
        of_heads[0], of_heads[1], query.view(1, 2, 2, 4), key.view(1, 2, 2, 4), value.reshape(1, 2, 6, 3), a, b,
        apart, slots, torch.arange(3),
    )  # fmt: skip
    found = exact_states.delta_rule_of_packed(
        None, packed, a, b, A_log=of_heads[0], dt_bias=of_heads[1], scale=0.5, ssm_states=behind,
        cache_indices=slots, num_v_heads=6, head_v_dim=3,
    )  # fmt: skip
    assert torch.equal(found, expected) and torch.equal(apart, behind) and not torch.equal(apart, states)
