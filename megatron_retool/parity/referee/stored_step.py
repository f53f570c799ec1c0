"""A stored step that the referee can judge: its weights, and a sample of its tokens.

Tokens of step s are sampled with version s - 1 of the weights, which is what a checkpoint global_step_(s - 1) or
weights_step_(s - 1) holds, or for s = 1 the model that the run started from; old_log_probs are of the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from conversion.files.checksums import COMPLETE_NAME
from conversion.files.directory import local_directory
from conversion.model.architecture import Architecture
from conversion.model.mapping import to_hf
from conversion.model.stacked import Stacker
from conversion.model.weight_map import WeightMap, checkpoint_place
from megatron_retool.config import Config, ModelConfig, load_config
from megatron_retool.errors import InputError
from megatron_retool.runs.checkpoints import complete_checkpoints
from megatron_retool.runs.weights_checkpoints import weights_checkpoints
from megatron_retool.trajectory import Trajectory, TrajectoryBatch, read_trajectories
from run_files import check_run_directory
from run_files.steps import read_estimates, step_path, stored_steps

if TYPE_CHECKING:
    from torch import Tensor

TOKENS_OF_A_RESPONSE = 1024
"""Most tokens that are judged of one response, whose logits exist at one time."""


@dataclass(frozen=True)
class Weights:
    """Where the weights of a version are: ``hf_dir`` or ``mcore_dir``."""

    version: int
    hf_dir: Path | None = None
    mcore_dir: Path | None = None

    @property
    def path(self) -> Path:
        """The directory with the weights."""
        path = self.mcore_dir or self.hf_dir
        assert path is not None
        return path

    def tensors(self, architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by its Hugging Face name, in the dtype that is stored."""
        from conversion.files.dist_checkpoint import DistCheckpoint  # torch: finding a step needs none
        from conversion.files.hf_checkpoint import HFCheckpoint

        weight_map = WeightMap(architecture)
        if self.mcore_dir is None:
            assert self.hf_dir is not None
            source = HFCheckpoint(self.hf_dir)
            for name in weight_map.hf_shapes:
                yield name, source.read(name)
            return
        checkpoint, stacker = DistCheckpoint(self.mcore_dir), Stacker(weight_map.hf_shapes)
        for mapping in weight_map.exported():
            full = checkpoint.read(checkpoint_place(mapping, architecture), mapping.mcore_shape)
            yield from stacker.add_all(to_hf(mapping, full).items())


@dataclass(frozen=True)
class StoredStep:
    """A step whose trajectories, log-probs and weights are on disk."""

    run_dir: Path
    config: Config
    number: int
    weights: Weights

    @property
    def model_dir(self) -> Path:
        """Where config.json is."""
        return local_directory(self.config.model.path)


@dataclass(frozen=True)
class SampledResponse:
    """Some of a trajectory's sampled tokens.

    Attributes:
        positions: int64 [m], places in the response, ascending.
        old_log_probs: float64 [m]; None where the run did not compute them (bypass mode).
    """

    trajectory: Trajectory
    positions: npt.NDArray[np.int64]
    old_log_probs: npt.NDArray[np.float64] | None


def find_step(run_dir: str | Path, number: int | None = None) -> StoredStep:
    """Step ``number`` of a run, or the newest that can be judged.

    Raises:
        FileNotFoundError: there is no such run, or its trajectories or weights are not on disk; the message says which
            steps can be judged and which settings keep more.
        ConfigError: the run's config.yaml cannot be read.
    """
    run_dir = Path(run_dir)
    check_run_directory(run_dir)
    trained = _trained_steps(run_dir / "rollouts")
    if not trained:
        raise FileNotFoundError(
            f"{run_dir / 'rollouts'} has no step_N.parquet with its step_N.learner.parquet: the run has not trained a "
            "step yet"
        )
    if not (run_dir / "config.yaml").is_file():
        raise FileNotFoundError(f"{run_dir / 'config.yaml'} is missing: it says which model and settings the run had")
    if number is not None and number not in trained:
        raise FileNotFoundError(
            f"{run_dir / 'rollouts'} has no trajectories of step {number} with the learner's log-probs: it has those "
            f"of {_listed(trained)}"
        )
    config = load_config(run_dir / "config.yaml")
    kept = {step: weights for step in trained if (weights := _weights_before(run_dir, config.model, step)) is not None}
    wanted = max(kept, default=None) if number is None else number
    if wanted is None or wanted not in kept:
        which = f"step {number} was" if number is not None else "the run's steps were"
        versions = f"version {number - 1}" if number is not None else "versions"
        raise FileNotFoundError(
            f"{run_dir}: {which} sampled with weights ({versions}) that are not on disk: "
            + (f"--step can be one of {_listed(sorted(kept))}. " if kept else f"{_missing_start(config.model)}. ")
            + "For a run's every step set trainer.save_freq=1 and trainer.keep_checkpoints=0, or for only weights "
            "trainer.save_weights_freq=1 (step N needs the checkpoint of step N - 1)"
        )
    return StoredStep(run_dir, config, wanted, kept[wanted])


def _trained_steps(rollouts: Path) -> list[int]:
    return [step for step in stored_steps(rollouts) if step_path(rollouts, step, "learner").is_file()]


def _weights_before(run_dir: Path, model: ModelConfig, step: int) -> Weights | None:
    version = step - 1
    if version == 0:
        return _first_weights(model)
    for checkpoint in complete_checkpoints(run_dir):
        if checkpoint.step == version and (checkpoint.learner / "metadata.json").is_file():
            return Weights(version, mcore_dir=checkpoint.learner)
    alone = [each for each in weights_checkpoints(run_dir) if each.step == version]
    return Weights(version, mcore_dir=alone[0].path) if alone else None


def _first_weights(model: ModelConfig) -> Weights | None:
    if model.mcore_path is not None:
        directory = Path(model.mcore_path)
        return Weights(0, mcore_dir=directory) if (directory / COMPLETE_NAME).is_file() else None
    if not model.path:
        return None
    try:
        directory = local_directory(model.path)
    except (OSError, ValueError):
        return None
    return Weights(0, hf_dir=directory) if (directory / "config.json").is_file() else None


def _missing_start(model: ModelConfig) -> str:
    start = model.mcore_path or model.path
    return f"no checkpoint of a step before one of them is left, and {start}, which it started from, is not there"


def _listed(steps: Sequence[int]) -> str:
    shown = [str(step) for step in steps]
    if len(shown) > 12:
        shown = [*shown[:6], "…", *shown[-5:]]
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(shown)}"


def sample_tokens(step: StoredStep, tokens: int, seed: int) -> tuple[list[SampledResponse], int]:
    """Responses that were trained on, drawn until they have ``tokens`` sampled tokens, in the order of the file.

    Only tokens of the step's own weight version count.

    Returns:
        The responses, and how many tokens there are to draw from.

    Raises:
        ValueError: the step's files do not belong together, or no token is of its weight version.
        UnreadableFile: one of them is damaged.
    """
    folder = step.run_dir / "rollouts"
    path, learner = step_path(folder, step.number), step_path(folder, step.number, "learner")
    estimates = read_estimates(learner)
    trajectories = {t.key: t for t in read_trajectories(path)}
    bypassed = step.config.algorithm.rollout_correction.bypass_old_log_probs
    candidates: list[tuple[Trajectory, npt.NDArray[np.float64], npt.NDArray[np.int64]]] = []
    total = 0
    for key, columns in estimates.items():
        trajectory, old_log_probs = trajectories.get(key), columns.get("old_log_probs")
        if trajectory is None or old_log_probs is None or len(old_log_probs) != len(trajectory.response_ids):
            raise InputError(f"{learner}: row {key} does not belong to a trajectory of {path.name}")
        own = np.flatnonzero(trajectory.loss_mask & (trajectory.weight_versions == step.weights.version))
        total += int(trajectory.loss_mask.sum())
        if len(own):
            candidates.append((trajectory, old_log_probs.astype(np.float64), own))
    if not candidates:
        raise InputError(
            f"{path}: none of {total} tokens that were trained on is of weight version "
            f"{step.weights.version}, whose log-probs the learner computed: there is nothing to judge"
            + (" (they are older, see rollout.staleness)" if total else "")
        )
    rng = np.random.default_rng(seed)
    drawn, count = {}, 0
    for number in rng.permutation(len(candidates)):
        own = candidates[number][2]
        if len(own) > TOKENS_OF_A_RESPONSE:
            own = np.sort(rng.choice(own, TOKENS_OF_A_RESPONSE, replace=False))
        own = own[: tokens - count]
        drawn[int(number)] = own
        count += len(own)
        if count >= tokens:
            break
    responses = [
        SampledResponse(candidates[number][0], own, None if bypassed else candidates[number][1][own])
        for number, own in sorted(drawn.items())
    ]
    return responses, sum(len(own) for _, _, own in candidates)


def batch_of(responses: Sequence[SampledResponse]) -> TrajectoryBatch:
    """The responses as the learner reads them, with the sampled tokens as the loss mask."""
    trajectories = []
    for response in responses:
        mask = np.zeros(len(response.trajectory.response_ids), np.bool_)
        mask[response.positions] = True
        log_probs = np.where(mask, response.trajectory.rollout_log_probs, 0).astype(np.float32)
        trajectories.append(replace(response.trajectory, loss_mask=mask, rollout_log_probs=log_probs))
    return TrajectoryBatch.from_trajectories(trajectories)
