"""Ragged batches cost what their tokens cost, whatever the longest response is."""

import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_retool.algorithms.advantages import AdvantageInputs, compute_advantages
from megatron_retool.algorithms.loss_aggregation import token_weights
from megatron_retool.algorithms.policy_loss import PolicyLossInputs, policy_loss
from megatron_retool.algorithms.rollout_correction import rollout_correction
from megatron_retool.config import AlgorithmConfig, RolloutCorrectionConfig

ROOT = Path(__file__).resolve().parents[2]


def test_one_long_response_among_many_short_ones_is_not_padded():
    """4,000 responses with one of 400,000 tokens: 1.6 G elements if padded, 0.5 M as they are."""
    lengths = torch.cat([torch.tensor([400_000]), torch.full((3_999,), 25)])
    ids = torch.arange(4_000).repeat_interleave(lengths)
    mask = torch.ones(len(ids), dtype=torch.bool)
    rollout = -torch.rand(len(ids), generator=torch.Generator().manual_seed(0))
    rewards, groups = torch.arange(4_000) % 3 * 1.0, torch.arange(4_000) // 16
    config = RolloutCorrectionConfig(mode="truncate", rejection=["sequence_max_k2 0 2.5", "geometric_ratio 0.99 1.01"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    correction = rollout_correction(rollout, rollout, mask, ids, 4_000, torch.zeros_like(ids), config)
    algorithm = AlgorithmConfig(policy_loss="gspo", loss_aggregation="seq-mean-token-mean")
    weights = token_weights(algorithm.aggregation, mask, ids, 4_000, correction.keep_mask)
    for name in ("grpo", "reinforce_plus_plus", "gae"):
        batch = AdvantageInputs(rewards, groups, mask, ids, values=rollout)
        advantages, _ = compute_advantages(AlgorithmConfig(advantage=name).estimator, batch)
    log_probs = rollout.clone().requires_grad_()
    inputs = PolicyLossInputs(log_probs, rollout, advantages, mask, weights, ids, correction.importance_weights)
    policy_loss(inputs, algorithm.objective).loss.backward()
    assert bool(correction.keep_mask.all()) and bool(torch.isfinite(log_probs.grad).all())
    assert time.process_time() - started < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


@pytest.mark.rare
def test_the_benchmark_runs_and_its_two_sides_agree():
    command = [sys.executable, "benchmarks/algorithms.py", "--sequences", "32", "--max-length", "512", "--json"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert '"ratio"' in run.stdout
