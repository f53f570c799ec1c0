"""A run of one step on disk: engine and learner are both transformers' tiny model, and off where they are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_retool.config import load_config, save_config
from megatron_retool.loop.rollout_files import write_estimates
from megatron_retool.parity.admission.tiny_model import save_model
from megatron_retool.trajectory import FinishReason, Trajectory, TrajectoryBatch, write_trajectories
from tests.kit.tiny_models import hf_model

RESPONSES = 12
TEMPERATURE = 0.8
Error = Callable[[Trajectory], np.ndarray]


def make_run(
    directory: Path,
    family: str,
    *overrides: str,
    engine: Error | None = None,
    experts: bool = False,
    replay: bool = False,
    **model: Any,
) -> Path:
    """runs/<name> with step 1, whose weights are the model that it started from.

    Args:
        engine: what is added to the engine's log-probs of a trajectory, float64 [R].
        experts: the engine chose at random in every fourth token, and recorded what it chose.
        replay: the learner took the engine's choice.
    """
    run_dir, policy = directory / "run", hf_model(family, **model)
    save_model(policy, directory / "model")
    settings = [
        f"model.path={directory / 'model'}",
        "learner.dtype=float32",
        "learner.max_tokens_per_micro_batch=128",
        "rollout.engine.dtype=float32",
        f"rollout.train.temperature={TEMPERATURE}",
        f"trainer.runs_dir={directory}",
        "trainer.experiment_name=run",
    ]
    run_dir.mkdir()
    save_config(load_config(None, [*settings, *overrides]), run_dir / "config.yaml")
    rng = np.random.default_rng(1)
    trajectories, learner = [], []
    for number in range(RESPONSES):
        trajectory = _trajectory(rng, number)
        if experts:
            trajectory.routed_experts = _experts(rng, policy, trajectory)
        own = _log_probs(policy, trajectory, None)
        sampled = _log_probs(policy, trajectory, trajectory.routed_experts) if experts else own
        if engine is not None:
            sampled = sampled + engine(trajectory)
        trajectory.rollout_log_probs = np.where(trajectory.loss_mask, sampled, 0).astype(np.float32)
        trajectories.append(trajectory)
        learner.append(np.where(trajectory.loss_mask, sampled if replay else own, 0))
    batch = TrajectoryBatch.from_trajectories(trajectories).with_columns(old_log_probs=np.concatenate(learner))
    write_trajectories(trajectories, run_dir / "rollouts" / "step_000001.parquet")
    write_estimates(batch, run_dir / "rollouts" / "step_000001.learner.parquet")
    return run_dir


def _trajectory(rng: np.random.Generator, number: int) -> Trajectory:
    """Two turns of the policy with a tool's result between them."""
    first, tool, second = rng.integers(4, 14, 3)
    turns = np.repeat([0, -1, 1], [first, tool, second])
    return Trajectory(
        prompt_ids=rng.integers(0, 101, rng.integers(3, 9)),
        response_ids=rng.integers(0, 101, len(turns)),
        loss_mask=turns >= 0,
        rollout_log_probs=np.zeros(len(turns)),
        turn_ids=turns,
        weight_versions=np.where(turns >= 0, 0, -1),
        group_id=number // 4,
        index=number % 4,
        finish_reason=FinishReason.STOP,
        reward=1.0,
    )


def _experts(rng: np.random.Generator, policy: Any, trajectory: Trajectory) -> np.ndarray:
    """The model's own choice, another one in the second layer of every fourth token, no row for the last token."""
    ids = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
    chosen: list[np.ndarray] = []
    _forward(policy, ids, lambda layer, output: chosen.append(output[2].numpy().copy()))
    rows = np.stack(chosen, 1).astype(np.uint8)
    for token in range(0, len(ids), 4):
        rows[token, 1] = rng.permutation(4)[:2]
    rows[-1] = 255
    return rows


def _log_probs(policy: Any, trajectory: Trajectory, experts: np.ndarray | None) -> np.ndarray:
    ids = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])

    def force(layer: int, output: tuple[torch.Tensor, ...]) -> Any:
        assert experts is not None
        chosen = output[2].clone()
        known = torch.from_numpy(experts[:, 0, 0] != 255)
        chosen[known] = torch.from_numpy(experts[:, layer].astype(np.int64))[known]
        gates = torch.softmax(output[0], -1).gather(-1, chosen)
        return output[0], gates / gates.sum(-1, keepdim=True), chosen

    logits = _forward(policy, ids, None if experts is None else force)
    log_p = torch.log_softmax(logits.double() / TEMPERATURE, -1)
    targets = torch.from_numpy(trajectory.response_ids.astype(np.int64))
    return log_p[len(trajectory.prompt_ids) - 1 : -1].gather(-1, targets[:, None]).squeeze(-1).numpy()


@torch.no_grad()
def _forward(policy: Any, ids: np.ndarray, route: Callable[[int, Any], Any] | None) -> torch.Tensor:
    handles = []
    if route is not None:
        for number, layer in enumerate(policy.model.layers):

            def hook(_: Any, __: Any, output: Any, number: int = number) -> Any:
                return route(number, output)

            handles.append(layer.mlp.gate.register_forward_hook(hook))
    logits = policy(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
    for handle in handles:
        handle.remove()
    return logits
